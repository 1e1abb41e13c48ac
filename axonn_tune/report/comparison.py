"""Strategies compared: as tables, JSON and a section of a page.

JSON follows the contract `axonn-tune/comparison/1`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from axonn_tune.cost.compute import ATTENTION, ELEMENT_WISE, GEMMS
from axonn_tune.cost.price import Detail
from axonn_tune.cost.uncertainty import own_bound_s
from axonn_tune.cost.work import CONTENDED, HOST
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.job import Job
from axonn_tune.ranking.compare import (
    BUBBLE,
    CAUSES,
    EXPOSED,
    OF_THE_CLAIM,
    OTHER_KERNELS,
    RECOMPUTE,
    REST,
    Comparison,
    Contender,
    by_axis,
    causes,
    limits,
    own_software_s,
    paper_step_flops,
    sizes_of,
)
from axonn_tune.ranking.documents import inputs_of
from axonn_tune.ranking.inputs import Inputs
from axonn_tune.report import page
from axonn_tune.report.output import (
    NOTHING,
    Column,
    Json,
    Table,
    fields_of,
    known_value,
    percent,
    share,
    signed_percent,
    words,
)
from axonn_tune.report.ranking import COLUMNS, document_head, layout_words, machine_words, optimizer_words
from axonn_tune.report.training import TRAINING, days_interval, training_columns, training_fields
from axonn_tune.units import TERA, show_seconds

COMPARISON_SCHEMA = "axonn-tune/comparison/1"
PETA = 1000.0 * TERA

APART = "*"
STANDS_APART = f"{APART} not measured on several GPUs, so neither the best nor the baseline."
_STRATEGIES = {
    "strategy": words("shown_name", "strategy", "How the model is split.", 16),
    "layout": words("shown_layout", "layout", "Its best layout that fits.", 34),
    **{key: COLUMNS[key] for key in ("micro_batch", "grad_accumulation")},
    "recompute": COLUMNS["recompute"],
    "memory": COLUMNS["memory_bytes"],
    "tokens_per_s_per_gpu": COLUMNS["tokens_per_s_per_gpu"],
    "mfu": share("mfu", "MFU", COLUMNS["mfu"].meaning),
    "hfu": share("hfu", "HFU", COLUMNS["hfu"].meaning),
    "paper_share": share("paper_share", "paper's\ncount"),
    "logged_tflops_per_gpu": COLUMNS["logged_tflops_per_gpu"],
    "step": COLUMNS["iteration_s"],
    "over": share("over_baseline", "vs.\nbaseline", "Its step time over that of the baseline, less 1.", signed=True),
}
"""Columns of a comparison by name; why a strategy is infeasible is in the remarks."""
_SPARE = ("node_hours", "energy_mwh", "goodput", "tokens_per_s_per_gpu", "mfu", "micro_batch", "recompute", "memory")
_NARROW = (
    "strategy",
    "layout",
    "micro_batch",
    "recompute",
    "memory",
    "tokens_per_s_per_gpu",
    "mfu",
    "logged_tflops_per_gpu",
    "step",
    "over",
)
"""Columns that are left out, in this order, where a line has no room; those shown unless all are asked for."""
_SHORT = {
    OTHER_KERNELS: "other\nkernels",
    RECOMPUTE: "recompute",
    **{f"exposed {name}": name for name in EXPOSED.values()},
    BUBBLE: "bubble",
    CONTENDED: "overlap\nslowdown",
    HOST: "waiting\nfor host",
    REST: "rest",
}
"""Headings of causes in texts, where they are others."""
_ENDLESS = Column(
    "endless_memory.iteration_s", "unlimited\nmemory, s", "Step of its best layout if memory did not limit."
)
_PAGE_COLUMNS = (
    *(_STRATEGIES[name] for name in ("strategy", "layout", "step")),
    *(COLUMNS[key] for key in ("low_s", "high_s")),
    *(_STRATEGIES[name] for name in ("over", "tokens_per_s_per_gpu", "mfu", "hfu", "logged_tflops_per_gpu")),
    *(_ENDLESS, _STRATEGIES["memory"]),
    *(COLUMNS[key] for key in ("micro_batch", "grad_accumulation", "recompute", *TRAINING[:3])),
)
_PAGE_STEP = (_STRATEGIES["strategy"], _STRATEGIES["step"])
_CONTENDER_FIELDS = (
    *("key", "layout", "micro_batch", "grad_accumulation", "recompute"),
    *("iteration_s", "low_s", "high_s", "compute_s", "communication_s", "exposed_communication_s", "bubble_s"),
    *("memory_bytes", "mfu", "hfu", "paper_share", "gain_of_4d", "infeasible"),
    *("framework", "relative_step", "own_software_s", "over_baseline", "tokens_per_s_per_gpu", "measured"),
)
_COLORS = {
    **{"computation": page.COMPUTATION, GEMMS: page.BY_KIND[GEMMS], OTHER_KERNELS: page.BY_KIND[ATTENTION]},
    **{RECOMPUTE: page.BY_KIND[ELEMENT_WISE], "exposed communication": page.EXPOSED},
    **{"exposed TP": "--axis-x", "exposed FSDP": "--axis-z", "exposed DP": "--axis-data", "exposed CP": page.WAIT},
    "exposed EP": "--axis-several",
    **{
        "exposed PP": f"{page.EXPOSED}/0.6",
        BUBBLE: page.BUBBLE,
        **{one: page.BY_KIND[one] for one in (CONTENDED, HOST)},
        REST: f"{page.MUTED}/0.5",
    },
}
_STEP_PARTS = {"computation": "compute_s", "exposed communication": "exposed_communication_s", BUBBLE: "bubble_s"}
"""Parts of a step in documents that have no causes."""
_VISIBLE = 1e-3
"""Share of the longest step from which on a cause is drawn."""


def comparison_tables(comparison: Comparison, *, wide: bool = False) -> tuple[Table, Table]:
    """Each strategy at its best, and strategies by causes of their steps; both within a line."""
    problem, base = comparison.problem, comparison.baseline
    rows = [_contender_row(_contender_json(comparison, one)) for one in comparison.contenders]
    training = training_columns(problem)
    machine = machine_words(problem)
    kernels = ", with ideal kernels for all" if comparison.same_kernels else ""
    workload, auto = problem.workload, problem.request.precision == "auto"
    formats = "the number format of each" if auto else workload.precision
    title = (
        f"{problem.title} on {problem.gpus:,} × {machine}, {workload.batch_words} in {formats}"
        f"{optimizer_words(problem.framework)}: "
        f"strategies at their best{kernels}; baseline: "
        f"{base.name if base else NOTHING}."
    )
    title += f"\n{STANDS_APART}" * any(not row["measured"] for row in rows)
    names = [*(_STRATEGIES if wide else _NARROW), *training]
    fields = (*_CONTENDER_FIELDS, *(("precision",) if auto else ()), *training_fields(problem, None))
    columns = {**_STRATEGIES, **{name: COLUMNS[name] for name in TRAINING}}
    best = Table(columns, rows, names, fields, title=title)
    decimals, used = _causes_shown(rows)

    def shown(seconds: float) -> str:
        return f"{seconds:.{decimals}f}" if abs(seconds) >= 0.5 * 10**-decimals else "0"

    columns = {
        "strategy": _STRATEGIES["strategy"],
        "step": replace(COLUMNS["iteration_s"], show=shown),
        **{name: Column(f"causes.{name}", name, title=_SHORT.get(name, name), show=shown) for name in used},
        "endless": replace(_ENDLESS, title="unlimited\nmemory", show=shown),
    }
    exposed = ", ".join(_SHORT[name] for name in used if name.startswith("exposed "))
    said = (
        f"What each step consists of, in s; {f'{exposed}: exposed communication over them; ' if exposed else ''}with "
        "pipeline stages, of the one that computes longest. Unlimited memory: the best step if memory did not limit."
    )
    matrix = Table(columns, rows, list(columns), title=said)
    return (best if wide else best.fitted(_SPARE)), matrix.fitted(("endless", REST, HOST, CONTENDED))


def _causes_shown(rows: Sequence[Json]) -> tuple[int, list[str]]:
    """Decimals of seconds that show three digits of the shortest step, and causes that are more than 0 with them."""
    shortest_s = min((row["iteration_s"] for row in rows if row["feasible"]), default=1.0)
    decimals = max(0, 2 - math.floor(math.log10(shortest_s)))
    least_s = 0.5 * 10**-decimals
    return decimals, [one for one in CAUSES if any(abs(row["causes"].get(one) or 0.0) >= least_s for row in rows)]


def _contender_row(contender: Json) -> Json:
    """A strategy of the contract, with what is predicted of it."""
    found = contender["prediction"] or {}
    layout = found.get("layout", "infeasible")
    row = {"causes": {}, **found, **contender, "shown_layout": layout, "days_interval": days_interval(found)}
    row["shown_name"] = contender["name"] if contender.get("measured", True) else f"{contender['name']} {APART}"
    return row | ({} if contender["endless_memory"] else {"endless_memory": None})


def short_remarks(comparison: Comparison) -> list[str]:
    """Which is fastest, whether that is sure, and how sure its step is."""
    base, lines = comparison.baseline, fastest_words(comparison)
    if base is not None and base.prediction is not None:
        low_s, high_s = base.prediction.low_s, base.prediction.high_s
        own = show_seconds(_own_s(comparison, base.prediction))
        interval = f"{show_seconds(low_s)} to {show_seconds(high_s)}"
        lines.append(f"80% interval of {base.name}: {interval}, between strategies ±{own}.")
    return lines


def comparison_remarks(comparison: Comparison) -> list[str]:
    """The same, why some are infeasible, what overlap gains, and what the paper reports of this case."""
    same, overlap = comparison.same_layout, comparison.overlap
    lines = [
        *short_remarks(comparison),
        *(f"{one.name} stands apart: {_apart_words(comparison, one)}" for one in comparison.apart),
        *([f"4D's best layout has x = y = 1: it is {same}."] if same else []),
        *(f"{one.name}: infeasible, {one.infeasible}." for one in comparison.contenders if one.prediction is None),
    ]
    if overlap is not None:
        lines.append(
            f"4D's best layout takes {overlap.off_s:.3g} s with all overlaps off, {overlap.on_s:.3g} s with them on: "
            f"{signed_percent(overlap.gain)}."
        )
    return [*lines, *_claims(comparison)]


def _apart_words(comparison: Comparison, contender: Contender) -> str:
    """What is predicted of a strategy that was not measured on several GPUs, and by what it is priced."""
    found = contender.prediction
    assert found is not None, "asked before"
    said = f"a step of {show_seconds(found.iteration_s)} is predicted, and none was measured on several GPUs"
    if comparison.same_kernels or find_framework(contender.framework).software:
        return f"{said}."
    return (
        f"{said}. Its kernels are priced as its program has them, the others' by numbers fitted to measured steps: "
        "--same-kernels compares layouts alone."
    )


def fastest_words(comparison: Comparison) -> list[str]:
    """Which strategy has the shortest step, by how much before the baseline or else the next; whether that is sure.

    Nothing where all that fit stand apart.
    """
    first, *others = comparison.ranked or (None,)
    if first is None or first.prediction is None:
        return []
    step_s = first.prediction.iteration_s
    said = f"{first.name} has the shortest step, {show_seconds(step_s)}"
    base = comparison.baseline
    second = (others[0] if others else None) if base is first else base
    if second is None or second.prediction is None:
        return [f"{said}; no other strategy fits."]
    other_s = second.prediction.iteration_s
    own_s = math.hypot(_own_s(comparison, first.prediction), _own_s(comparison, second.prediction))
    error = "within model error" if other_s - step_s <= own_s else "more than model error"
    return [f"{said}: {percent(1.0 - step_s / other_s)} less than {second.name}, {error}."]


def _own_s(comparison: Comparison, found: Detail) -> float:
    """Half of the 80% interval of a step that no other strategy shares, s."""
    waiting_s = found.exposed_communication_s
    return own_bound_s(comparison.problem, step_s=found.iteration_s, waiting_s=waiting_s)


def _claims(comparison: Comparison) -> list[str]:
    if not comparison.claims:
        return []
    reported = "; ".join(claim.words for claim in comparison.claims)
    lines = [
        f"The paper (arXiv 2305.13525) reports, measured: {reported}. docs/paper-claims.md says what differs.",
        *_gain_of_the_paper(comparison),
    ]
    first = comparison.own.prediction
    if first is not None and (counted := _by_papers_count(first))["paper_share"] is not None:
        lines.append(
            f"By the paper's count, which includes full recompute, done or not, 4D is predicted to reach "
            f"{percent(counted['paper_share'])} of peak, {counted['paper_flops_per_s'] / PETA:.3g} PFLOP/s in all."
        )
    if comparison.problem.request.recompute is None:
        lines.append("The paper used full activation recomputation throughout: --recompute full compares the same.")
    return lines


def _gain_of_the_paper(comparison: Comparison) -> list[str]:
    """The claim over Megatron-LM as it stands on this engine, for the bundled runtime and for the paper's software."""
    steps = {one.key: one.prediction.iteration_s for one in comparison.contenders if one.prediction is not None}
    then, now = OF_THE_CLAIM[0], "megatron-core"
    if not {AXONN_TUNE.name, "megatron-axonn", then, now} <= steps.keys():
        return []
    names = ((AXONN_TUNE.name, "4D in the bundled runtime"), ("megatron-axonn", "the paper's own Megatron-AxoNN"))
    gains = [
        f"{whose} trains {_faster(steps[then] / steps[key])} than {OF_THE_CLAIM[1]} and "
        f"{_faster(steps[now] / steps[key])} than Megatron-Core"
        for key, whose in names
    ]
    kernels = "with ideal kernels for all" if comparison.same_kernels else "each with its own software"
    return [
        f"Predicted here, {kernels}: {'; '.join(gains)}.",
        "Which release and options of Megatron-LM the paper ran is not stated where we could read it. The one of 2022 "
        "is the nearest before it: attention is not fused, and gradients are all-reduced after the backward pass. "
        "Megatron-Core is today's, with fused attention, a distributed optimizer, overlapped reductions and GTP.",
    ]


def _faster(times: float) -> str:
    """`26.0% faster`, or slower, from how many times as fast."""
    return f"{percent(abs(times - 1.0))} {'faster' if times >= 1.0 else 'slower'}"


def comparison_json(comparison: Comparison, inputs: Inputs) -> Json:
    """Everything, by the schema `axonn-tune/comparison/1`; times per step and rank."""
    overlap = comparison.overlap
    return {
        **document_head(COMPARISON_SCHEMA, inputs),
        "memory_limit_bytes": comparison.limit_bytes,
        "same_kernels": comparison.same_kernels,
        "baseline": comparison.baseline.key if comparison.baseline else None,
        "contenders": [_contender_json(comparison, one) for one in comparison.contenders],
        "overlap": None if overlap is None else fields_of(overlap, ("off_s", "on_s", "gain")),
        "verdict": fastest_words(comparison),
        "remarks": comparison_remarks(comparison),
        "paper": [fields_of(claim, ("what", "value", "words")) for claim in comparison.claims],
    }


def _contender_json(comparison: Comparison, contender: Contender) -> Json:
    found, best_unlimited = contender.prediction, contender.unlimited_memory
    auto = comparison.problem.request.precision == "auto"
    return {
        **fields_of(contender, ("key", "name", "framework", "measured")),
        "relative_step": comparison.relative(contender),
        "over_baseline": comparison.over_baseline(contender),
        "feasible": found is not None,
        "infeasible": contender.infeasible or None,
        "gain_of_4d": comparison.gain(contender),
        "separated_by": [{"what": what, "share": share} for what, share in comparison.separated_by(contender)],
        "prediction": None if found is None else _prediction_json(found, auto=auto),
        "endless_memory": None if best_unlimited is None else _prediction_json(best_unlimited, auto=auto),
    }


def _by_papers_count(priced: Detail) -> Json:
    """Share of peak and FLOP/s by the paper's count of FLOPs, None where that does not describe the model."""
    job, counted = priced.job, paper_step_flops(priced.job.model, priced.job.workload)
    if counted is None:
        return {"paper_share": None, "paper_flops_per_s": None}
    peak = job.peak_flops_per_s * priced.grid.world
    return {"paper_share": counted / (priced.iteration_s * peak), "paper_flops_per_s": counted / priced.iteration_s}


def _prediction_json(priced: Detail, *, auto: bool) -> Json:
    """One priced layout; auto: its number format is one of several."""
    sizes = sizes_of(priced)
    return {
        "layout": layout_words(sizes),
        "sizes": sizes,
        "grad_accumulation": priced.accumulation,
        "own_software_s": own_software_s(priced),
        "tokens_per_s_per_gpu": priced.tokens_per_s / priced.grid.world,
        "causes": causes(priced),
        **fields_of(priced, _PREDICTED),
        **({"precision": priced.job.workload.precision} if auto else {}),
        "traffic": [
            {"kind": axis, "seconds": seconds, "exposed_s": exposed_s}
            for axis, (seconds, exposed_s) in by_axis(priced).items()
        ],
        "limits": [{"what": what, "share": share} for what, share in limits(priced)],
        **_by_papers_count(priced),
        **training_fields(priced.job, priced),
    }


_PREDICTED = (
    *("micro_batch", "recompute", "pipeline", "chunks", "iteration_s", "low_s", "high_s", "compute_s"),
    *("communication_s", "exposed_communication_s", "bubble_s", "memory_bytes", "tokens_per_s", "mfu", "hfu"),
    "logged_tflops_per_gpu",
)


def comparison_section(document: Json, *, identity: str, source: str) -> Json:
    """The section of a comparison document."""
    contenders, job = document["contenders"], inputs_of(document, source=source).problem
    rows = [_contender_row(one) for one in contenders]
    decimals, used = _causes_shown(rows)
    columns = [one for one in _PAGE_COLUMNS if any(known_value(row, one.key) not in (None, 0.0) for row in rows)]
    causes = [*_PAGE_STEP, *(Column(f"causes.{name}", f"{name}, s", "A part of the step.") for name in used)]
    causes = [one if one.text else replace(one, decimals=decimals) for one in causes]
    kernels = "with ideal kernels for all" if document.get("same_kernels", True) else "each with its own software"
    base = document.get("baseline", "the first") or "none"
    apart = any(APART in row["shown_name"] for row in rows)
    marked = [*([STANDS_APART.replace("* n", "* N")] if apart else []), page.SORTS]
    return page.section(
        identity,
        f"{document['model']['name']} on {document['gpus']:,} × {document['machine']['name']}: strategies compared",
        subtitle=page.subtitle(document, f"step time, {kernels}; baseline: {base}"),
        verdict=document.get("verdict", []),
        blocks=[
            _step_bars([row for row in rows if row["feasible"]], job),
            page.table(f"{identity}-table", "Each strategy at its best", columns, rows, note=" ".join(marked)),
            page.table("", "Where the step goes", causes, [row for row in rows if row["feasible"]], note=page.SORTS),
            page.text(document.get("remarks", []), title="In words"),
            *page.provenance_folds(document, source=source),
        ],
    )


def _step_bars(contenders: Sequence[Json], job: Job) -> Json:
    """The parts of each one's step, and its interval."""
    longest_s = max(one["prediction"]["iteration_s"] for one in contenders)

    def parts(step: Json) -> dict[str, float]:
        found = step.get("causes") or {name: step[key] for name, key in _STEP_PARTS.items()}
        return {name: seconds for name, seconds in found.items() if seconds >= _VISIBLE * longest_s}

    rows = [
        page.step_row(one["shown_name"], one["prediction"], parts(one["prediction"]), job=job) for one in contenders
    ]
    note = (
        "Whiskers: the 80% interval; thick: the part that other strategies do not share. Differences within that part, "
        "of both, are within model error."
    )
    return page.stacks("Step time by strategy", rows, _COLORS, axis="s per step", note=note)
