"""A comparison of 4D with its alternatives, as a table, Markdown, CSV and JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from axonn_tune.report.output import (
    NOTHING,
    Json,
    Table,
    TableColumn,
    each,
    fields_of,
    percent,
    signed_percent,
    times,
    words,
)
from axonn_tune.report.ranking import document_head
from axonn_tune.units import GIB, TERA

if TYPE_CHECKING:
    from collections.abc import Callable

    from axonn_tune.ranking.compare import Comparison, Contender, StepPrediction
    from axonn_tune.ranking.inputs import Inputs

SCHEMA = "axonn-tune/comparison/1"
PETA = 1000.0 * TERA
NOTABLE = 0.005
"""Share of a step that unlimited memory must save to be mentioned."""

_NARROW = ("strategy", "sizes", "step", "relative", "memory", "mfu", "own_software", "gain")
"""Columns shown unless all are asked for."""
LEFT_OUT = (
    "--wide adds the rest of each layout, micro-batch, gradient accumulation, recompute, compute, exposed "
    "communication, bubble, HFU and the paper's count."
)
_CSV = (
    *("key", "layout", "micro_batch", "grad_accumulation", "recompute"),
    *("iteration_s", "low_s", "high_s", "compute_s", "communication_s", "exposed_communication_s", "bubble_s"),
    *("memory_bytes", "mfu", "hfu", "paper_share", "gain_of_4d", "infeasible"),
    *("framework", "relative_step", "own_software_s"),
)


def comparison_table(comparison: Comparison, *, wide: bool = False) -> Table[Contender]:
    """The main columns, within 100 characters, or all; remarks below."""
    columns = _columns(comparison)
    names = [name for name in columns if name != "sizes"] if wide else _NARROW
    return Table(
        columns,
        comparison.contenders,
        names,
        lambda: (_CSV, [_csv_row(comparison, one) for one in comparison.contenders]),
        comparison_remarks(comparison),
    )


def _columns(comparison: Comparison) -> dict[str, TableColumn[Contender]]:
    """Every column by name; why a contender is infeasible is among the remarks. `sizes`: the start of the layout."""
    return {
        "strategy": words("strategy", lambda contender: contender.name),
        "layout": words("layout", _layout),
        "sizes": words("layout", lambda contender: _layout(contender).partition(",")[0]),
        "micro_batch": _cell("micro-\nbatch", lambda found: str(found.pricing.configuration.micro_batch)),
        "grad_accumulation": _cell("grad.\naccum.", lambda found: str(found.pricing.accumulation)),
        "recompute": _cell("recompute", lambda found: found.pricing.configuration.recompute, left=True),
        "step": _seconds("step\ns", lambda found: found.pricing.iteration_s),
        "compute": _seconds("compute\ns", lambda found: found.pricing.compute_s),
        "exposed": _seconds("exposed\ns", lambda found: found.pricing.exposed_communication_s),
        "bubble": _cell("bubble\ns", lambda found: f"{found.pricing.bubble_s:.2f}"),
        "memory": _cell("memory\nGiB", lambda found: f"{float(found.pricing.memory.total_bytes) / GIB:.3g}"),
        "mfu": _cell("MFU", lambda found: percent(found.performance.mfu)),
        "hfu": _cell("HFU", lambda found: percent(found.performance.hfu)),
        "paper_share": _cell("paper's\ncount", lambda found: percent(found.paper_share)),
        "own_software": _seconds("with own\nsoftware", lambda found: found.own_software_s),
        "relative": each("relative\nstep", lambda contender: _ratio(comparison.relative(contender))),
        "gain": each("step\nvs. 4D", lambda contender: signed_percent(comparison.gain(contender))),
    }


def _cell(title: str, show: Callable[[StepPrediction], str], *, left: bool = False) -> TableColumn[Contender]:
    """A column of what is predicted; `-` where nothing is."""
    return each(title, lambda one: NOTHING if one.prediction is None else show(one.prediction), left=left)


def _seconds(title: str, read: Callable[[StepPrediction], float | None]) -> TableColumn[Contender]:
    return times(title, lambda one: None if one.prediction is None else read(one.prediction))


def _layout(contender: Contender) -> str:
    return "infeasible, see below" if contender.prediction is None else contender.prediction.layout


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def comparison_remarks(comparison: Comparison) -> list[str]:
    """What limits each contender, what overlap gains, and what the paper reports of this case."""
    lines = [_verdict(comparison), *(f"{one.name}: {_limits(one)}" for one in comparison.contenders)]
    first = comparison.own.prediction
    if first is not None:
        lines.append(
            f"Differences within the 80% interval are within model error: 4D takes {first.performance.low_s:.3g} to "
            f"{first.performance.high_s:.3g} s."
        )
    if comparison.overlap is not None:
        overlap = comparison.overlap
        lines.append(
            f"Overlap: the same 4D configuration takes {overlap.off_s:.3g} s with all overlaps off, "
            f"{overlap.on_s:.3g} s with them on: {signed_percent(overlap.gain)}."
        )
    return [*lines, *_claims(comparison)]


def _verdict(comparison: Comparison) -> str:
    """Which strategy is fastest here, on what, and whether 4D's best is another strategy's kind of layout."""
    problem, fastest = comparison.problem, comparison.contenders[0]
    machine, workload = problem.machine, problem.workload
    where = (
        f"{problem.model.name} on {problem.gpus:,} × {machine.name}, {workload.global_batch:,} sequences of "
        f"{workload.sequence_length:,} tokens in {workload.precision}"
    )
    same = comparison.same_layout
    beside = f" 4D's best layout has x = y = 1: it is {same}." if same else ""
    kernels = "Steps are with ideal kernels for all; own software: with numbers fitted to published steps."
    return f"{where}: {fastest.name} has the shortest step.{beside} {kernels}"


def _limits(contender: Contender) -> str:
    """Overhead as shares of the step, and what more memory would bring."""
    found, endless = contender.prediction, contender.endless_memory
    parts = []
    if found is not None:
        shares = [f"{what} {percent(share)}" for what, share in found.limits()]
        parts.append(
            f"overhead beyond useful compute: {', '.join(shares)}" if shares else "no overhead beyond useful compute"
        )
    else:
        parts.append(f"infeasible, {contender.infeasible}")
    if endless is not None and (found is None or endless.iteration_s < (1.0 - NOTABLE) * found.iteration_s):
        recompute = endless.pricing.configuration.recompute
        parts.append(f"with unlimited memory {endless.iteration_s:.3g} s ({endless.layout}, recompute {recompute})")
    return "; ".join(parts) + "."


def _claims(comparison: Comparison) -> list[str]:
    if not comparison.claims:
        return []
    reported = "; ".join(claim.words for claim in comparison.claims)
    lines = [f"The paper (arXiv 2305.13525) reports, measured: {reported}. docs/compare.md says what differs."]
    first = comparison.own.prediction
    if first is not None and first.paper_flops_per_s is not None:
        lines.append(
            f"By the paper's count, which includes full recompute, done or not, 4D is predicted to reach "
            f"{percent(first.paper_share)} of peak, {first.paper_flops_per_s / PETA:.3g} PFLOP/s in all."
        )
    if comparison.problem.limits.recompute is None:
        lines.append("The paper used full activation recomputation throughout: --recompute full compares the same.")
    return lines


def _csv_row(comparison: Comparison, contender: Contender) -> list[object]:
    found = contender.prediction
    values = {} if found is None else prediction_json(found)
    known = {
        **values,
        "key": contender.key,
        "framework": contender.framework,
        "relative_step": comparison.relative(contender),
        "gain_of_4d": comparison.gain(contender),
        "infeasible": contender.infeasible,
    }
    return [known.get(name) for name in _CSV]


def comparison_json(comparison: Comparison, inputs: Inputs) -> Json:
    """Everything, by the schema `axonn-tune/comparison/1`; times per step and rank."""
    overlap = comparison.overlap
    return {
        **document_head(SCHEMA, inputs),
        "memory_limit_bytes": comparison.limit_bytes,
        "contenders": [_contender_json(comparison, one) for one in comparison.contenders],
        "overlap": None if overlap is None else fields_of(overlap, ("off_s", "on_s", "gain")),
        "remarks": comparison_remarks(comparison),
        "paper": [fields_of(claim, ("what", "value", "words")) for claim in comparison.claims],
    }


def _contender_json(comparison: Comparison, contender: Contender) -> Json:
    found, endless = contender.prediction, contender.endless_memory
    return {
        **fields_of(contender, ("key", "name", "framework")),
        "relative_step": comparison.relative(contender),
        "feasible": found is not None,
        "infeasible": contender.infeasible or None,
        "gain_of_4d": comparison.gain(contender),
        "prediction": None if found is None else prediction_json(found),
        "endless_memory": None if endless is None else prediction_json(endless),
    }


def prediction_json(found: StepPrediction) -> Json:
    """One priced layout."""
    pricing, configuration = found.pricing, found.pricing.configuration
    return {
        "layout": found.layout,
        "micro_batch": configuration.micro_batch,
        "grad_accumulation": pricing.accumulation,
        "recompute": configuration.recompute,
        "pipeline": configuration.grid.pipeline,
        "chunks": configuration.chunks,
        "iteration_s": pricing.iteration_s,
        "own_software_s": found.own_software_s,
        **fields_of(found.performance, ("low_s", "high_s")),
        **fields_of(pricing, ("compute_s", "communication_s", "exposed_communication_s", "bubble_s")),
        "traffic": [
            {"kind": axis, "seconds": seconds, "exposed_s": exposed_s}
            for axis, (seconds, exposed_s) in found.by_axis().items()
        ],
        "limits": [{"what": what, "share": share} for what, share in found.limits()],
        "memory_bytes": float(pricing.memory.total_bytes),
        **fields_of(found.performance, ("tokens_per_s", "mfu", "hfu")),
        **fields_of(found, ("paper_share", "paper_flops_per_s")),
    }
