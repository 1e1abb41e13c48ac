"""A comparison of 4D with its alternatives, as a table, Markdown, CSV and JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from axonn_tune import __version__
from axonn_tune.report.output import (
    NOTHING,
    Heading,
    Json,
    csv_table,
    json_text,
    markdown_table,
    percent,
    seconds_cells,
    signed_percent,
    text_table,
)
from axonn_tune.report.ranking import origin
from axonn_tune.units import GIB, TERA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from axonn_tune.ranking.compare import Comparison, Contender, StepPrediction
    from axonn_tune.ranking.inputs import Inputs

SCHEMA = "axonn-tune/comparison/1"
PETA = 1000.0 * TERA
NOTABLE = 0.005
"""Share of a step that unlimited memory must save to be mentioned."""

_HEADINGS = (
    Heading("strategy", left=True),
    Heading("layout", left=True),
    Heading("micro-\nbatch"),
    Heading("grad.\naccum."),
    Heading("recompute", left=True),
    Heading("step\ns"),
    Heading("compute\ns"),
    Heading("exposed\ns"),
    Heading("bubble\ns"),
    Heading("memory\nGiB"),
    Heading("MFU"),
    Heading("HFU"),
    Heading("paper's\ncount"),
    Heading("own\nsoftware s"),
    Heading("relative\nstep"),
    Heading("4D is\nfaster by"),
)
_NARROW = (0, 1, 5, 14, 6, 7, 9, 10, 13, 15)
"""Columns shown unless all are asked for."""
LEFT_OUT = (
    "--wide adds the rest of each layout, micro-batch, gradient accumulation, recompute, bubble, HFU and the paper's "
    "count."
)
_CSV = (
    *("key", "layout", "micro_batch", "grad_accumulation", "recompute"),
    *("iteration_s", "low_s", "high_s", "compute_s", "communication_s", "exposed_communication_s", "bubble_s"),
    *("memory_bytes", "mfu", "hfu", "paper_share", "gain_of_4d", "infeasible"),
    *("framework", "relative_step", "own_software_s"),
)


def render(
    comparison: Comparison, inputs: Inputs, *, output_format: str, wide: bool = False, color: bool = False
) -> str:
    """The comparison as text; a table that is not `wide` shows the main columns, within 100 characters."""
    if output_format == "json":
        return json_text(comparison_json(comparison, inputs))
    if output_format == "csv":
        return csv_table(*comparison_records(comparison))
    if output_format == "md":
        table = markdown_table(*comparison_cells(comparison, wide=True))
        return table + "\n" + "".join(f"- {line}\n" for line in comparison_remarks(comparison))
    headings, rows = comparison_cells(comparison, wide=wide)
    return (
        text_table(headings, rows, color=color) + "\n" + "".join(f"{line}\n" for line in comparison_remarks(comparison))
    )


def comparison_records(comparison: Comparison) -> tuple[Sequence[str], list[list[object]]]:
    """Names of all fields, units included, and their values of each strategy: what CSV and data frames hold."""
    return _CSV, [_csv_row(comparison, each) for each in comparison.contenders]


def comparison_cells(comparison: Comparison, *, wide: bool = False) -> tuple[Sequence[Heading], list[list[str]]]:
    """Headings and cells of the table; all columns if it is `wide`, else the main ones."""
    rows = _rows(comparison)
    if wide:
        return _HEADINGS, rows
    return [_HEADINGS[column] for column in _NARROW], [[_narrow(row[column]) for column in _NARROW] for row in rows]


def _narrow(cell: str) -> str:
    """A layout without what follows its sizes; other cells hold no comma."""
    return cell.partition(",")[0]


def _rows(comparison: Comparison) -> list[list[str]]:
    """One row per contender; why one is infeasible is among the remarks."""
    found = [each.prediction for each in comparison.contenders]
    columns = [
        seconds_cells([None if each is None else getattr(each.pricing, name) for each in found])
        for name in ("iteration_s", "compute_s", "exposed_communication_s")
    ]
    columns.append([NOTHING if each is None else f"{each.pricing.bubble_s:.2f}" for each in found])
    own = seconds_cells([None if each is None else each.own_software_s for each in found])
    rows = []
    for position, contender in enumerate(comparison.contenders):
        times, relative = [column[position] for column in columns], comparison.relative(contender)
        last = [own[position], NOTHING if relative is None else f"{relative:.2f}"]
        rows.append([contender.name, *_cells(contender, times), *last, signed_percent(comparison.gain(contender))])
    return rows


def _cells(contender: Contender, times: list[str]) -> list[str]:
    found = contender.prediction
    if found is None:
        return ["infeasible, see below", *[NOTHING] * 3, *times, *[NOTHING] * 4]
    chosen = found.pricing.configuration
    return [
        found.layout,
        str(chosen.micro_batch),
        str(found.pricing.accumulation),
        chosen.recompute,
        *times,
        f"{float(found.pricing.memory.total_bytes) / GIB:.3g}",
        percent(found.performance.mfu),
        percent(found.performance.hfu),
        percent(found.paper_share),
    ]


def comparison_remarks(comparison: Comparison) -> list[str]:
    """What limits each contender, what overlap gains, and what the paper reports of this case."""
    lines = [_verdict(comparison), *(f"{each.name}: {_limits(each)}" for each in comparison.contenders)]
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
        "schema": SCHEMA,
        "tool_version": __version__,
        "gpus": comparison.problem.gpus,
        "model": origin(inputs.model),
        "machine": origin(inputs.machine),
        "workload": comparison.problem.workload.model_dump(mode="json", by_alias=True),
        "memory_limit_bytes": comparison.limit_bytes,
        "contenders": [_contender_json(comparison, each) for each in comparison.contenders],
        "overlap": None if overlap is None else {"off_s": overlap.off_s, "on_s": overlap.on_s, "gain": overlap.gain},
        "remarks": comparison_remarks(comparison),
        "paper": [{"what": claim.what, "value": claim.value, "words": claim.words} for claim in comparison.claims],
    }


def _contender_json(comparison: Comparison, contender: Contender) -> Json:
    found, endless = contender.prediction, contender.endless_memory
    return {
        "key": contender.key,
        "name": contender.name,
        "framework": contender.framework,
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
        "low_s": found.performance.low_s,
        "high_s": found.performance.high_s,
        "compute_s": pricing.compute_s,
        "communication_s": pricing.communication_s,
        "exposed_communication_s": pricing.exposed_communication_s,
        "bubble_s": pricing.bubble_s,
        "traffic": [
            {"kind": axis, "seconds": seconds, "exposed_s": exposed_s}
            for axis, (seconds, exposed_s) in found.by_axis().items()
        ],
        "limits": [{"what": what, "share": share} for what, share in found.limits()],
        "memory_bytes": float(pricing.memory.total_bytes),
        "tokens_per_s": found.performance.tokens_per_s,
        "mfu": found.performance.mfu,
        "hfu": found.performance.hfu,
        "paper_share": found.paper_share,
        "paper_flops_per_s": found.paper_flops_per_s,
    }
