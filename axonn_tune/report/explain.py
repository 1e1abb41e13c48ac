"""Explanation of one configuration: the step and its costs in tables, and JSON.

JSON follows the contract `axonn-tune/explain/1`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from axonn_tune.cost.compute import ATTENTION, ELEMENT_WISE, GEMMS, OFFLOAD, OPTIMIZER, SCANS, UNHIDDEN
from axonn_tune.cost.price import Detail, PricedLayout
from axonn_tune.cost.work import CONTENDED, HOST, Work, hidden_behind, hidden_s, timed_gemms, work_by_kind
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.grid import ALL_AXES
from axonn_tune.program.dimensions import model_flops
from axonn_tune.program.operations import Phase, Size
from axonn_tune.ranking.inputs import Inputs
from axonn_tune.ranking.space import Problem
from axonn_tune.report.collective_costs import line_sentences
from axonn_tune.report.facts import AXIS_COLUMNS, axis_rows, busiest, node_words, step_facts, step_words
from axonn_tune.report.output import (
    PERCENT,
    WIDTH,
    Column,
    Json,
    cells_of,
    fields_of,
    line_width,
    markdown_table,
    text_of,
    words,
    wrapped,
)
from axonn_tune.report.pipeline_map import MAP_COLUMNS, MEMORY_BY_STAGE, drawn_schedule, schedule_legend, stage_rows
from axonn_tune.report.ranking import (
    COLLECTIVE,
    document_head,
    entry_fields,
    layout_words,
    machine_words,
    term_json,
    term_row,
)
from axonn_tune.request import ALPHA_BETA
from axonn_tune.units import GB, GIB, TERA, show_seconds

SCHEMA = "axonn-tune/explain/1"

_PHASES = (*get_args(Phase), "")
"""Order of phases; items without a phase come last."""
_KERNELS = (ELEMENT_WISE, OPTIMIZER)
"""Computation without FLOPs of the model."""
_MATMULS = (GEMMS, ATTENTION, SCANS)
_FORWARD_AND_BACKWARD = 3.0
"""FLOPs of attention that MFU counts over those of its forward pass."""


@dataclass(frozen=True)
class ExplainSection:
    """A part of the explanation, in this order: names with words, sentences, a drawing in lines, a table, notes and
    commands; each may be empty."""

    title: str
    facts: Sequence[tuple[str, str]] = ()
    sentences: Sequence[str] = ()
    drawing: Sequence[str] = ()
    columns: Sequence[Column] = ()
    rows: Sequence[Json] = ()
    notes: Sequence[str] = ()
    commands: Sequence[str] = ()


def sections(priced: Detail, *, terms: bool = False, verbose: bool = False, remark: str = "") -> list[ExplainSection]:
    """Where the step goes, and verbose all numbers; terms: with every collective of every layer instead of one row for
    each kind and axis.

    remark: on the layout.
    """
    step_s, accelerator = priced.iteration_s, priced.job.machine.accelerator
    gap = [
        {"what": what, "seconds": spent_s, "share": spent_s / step_s, "bar": "█" * round(_BAR * spent_s / step_s)}
        for what, spent_s in gap_to_peak(priced)
    ]
    first = ExplainSection("Gap to peak", columns=_GAP, rows=gap)
    if not (verbose or terms):
        notes = [remark] if remark else []
        return [first, ExplainSection("The step", facts=step_facts(priced, short=True), notes=notes)]
    masked = "TFLOP/s of attention count the masked half of the scores, as MFU does here; causal kernels skip it."
    if priced.job.workload.format:
        precision = priced.job.workload.precision
        masked += f" Of peak: of {precision} for its GEMMs and the total, of BF16 for attention and GEMMs in BF16."
    reserved = (
        f"Usable: {accelerator.memory_gib:g} GiB less {accelerator.reserved_memory_gib:g} GiB reserved for "
        "the driver's context, communicators and fragmentation (accelerator.reserved_memory_gib)."
    )
    longest, largest = (f", of {busiest(priced)}", ", of the largest stage") if priced.stages else ("", "")
    return [
        first,
        ExplainSection("The step", facts=step_facts(priced)),
        ExplainSection(
            "Layout", columns=AXIS_COLUMNS, rows=axis_rows(priced), notes=[*filter(None, (node_words(priced), remark))]
        ),
        *(_stages(priced) if priced.stages else []),
        *([*_every_collective(priced), _every_gemm(priced)] if terms else [_collectives(priced)]),
        ExplainSection(
            f"Computation per rank and step{longest}", columns=WORK_COLUMNS, rows=work_rows(priced), notes=[masked]
        ),
        ExplainSection(
            f"Peak memory per GPU{largest}", columns=MEMORY_COLUMNS, rows=memory_rows(priced), notes=[reserved]
        ),
    ]


_NAMES = 24
"""Characters of the names of facts."""


def explain_text(parts_of: Sequence[ExplainSection]) -> str:
    """An explanation as plain text."""
    parts, width = [], min(line_width(), WIDTH)
    for section in parts_of:
        facts = [
            textwrap.fill(f"{name:<{_NAMES}}{said}", width, subsequent_indent=" " * _NAMES, break_on_hyphens=False)
            for name, said in section.facts
        ]
        table = text_of(section.columns, section.rows).rstrip("\n")
        below = [*map(wrapped, section.sentences), *section.drawing, table, *map(wrapped, section.notes)]
        lines = [section.title, "-" * len(section.title), *facts, *below, *section.commands]
        parts.append("\n".join(line for line in lines if line) + "\n")
    return "\n".join(parts)


def explain_markdown(parts_of: Sequence[ExplainSection]) -> str:
    """An explanation as Markdown."""
    parts = []
    for section in parts_of:
        cells = cells_of(section.columns, section.rows)
        table = markdown_table(section.columns, cells) if cells else ""
        listed = [*(f"- {name}: {said}" for name, said in section.facts), *(f"- {said}" for said in section.sentences)]
        drawn = ["```text", *section.drawing, "```"] if section.drawing else []
        commands = ["```console", *(f"$ {one}" for one in section.commands), "```"] if section.commands else []
        blocks = ["\n".join(listed), "\n".join(drawn), table.rstrip("\n"), *section.notes, "\n".join(commands)]
        parts.append("\n\n".join([f"## {section.title}", *filter(None, blocks)]) + "\n")
    return "\n".join(parts)


_ROUNDING = 1e-6
_BAR = 40
"""Characters of a bar of the whole step."""
_TIME = Column("seconds", "time", "Of a step and rank.", show=show_seconds)
_GAP = (
    words("what", "step spent on"),
    _TIME,
    Column("share", "of step", show="{:.1%}".format),
    words("bar", ""),
)


def gap_to_peak(priced: Detail) -> list[tuple[str, float]]:
    """Gap to peak, s: the time of useful FLOPs at peak, then each overhead up to the step, largest first.

    It sums to the step, of which the first is MFU. The rest is of the pipeline stage that computes longest.
    """
    work, job = work_by_kind(priced), priced.job
    peak = job.peak_flops_per_s
    useful = [each for each in work if each.phase != "recompute"]
    matmuls = [each for each in useful if each.kind in _MATMULS]
    # Fused attention recomputes scores in its backward pass, which MFU does not count: twice the forward's FLOPs are.
    scores = sum(each.flops for each in matmuls if (each.kind, each.phase) == (ATTENTION, "forward"))
    counted_flops = sum(each.flops for each in matmuls if each.kind != ATTENTION) + _FORWARD_AND_BACKWARD * scores
    at_peak_s = counted_flops / peak
    mean_s = model_flops(job.model, job.workload, multiple=priced.multiple) / (priced.grid.world * peak)
    inside = model_flops(job.model, job.workload, windows=True, multiple=priced.multiple)
    inside_s = inside / (priced.grid.world * peak)
    replicated_s = _FORWARD_AND_BACKWARD * scores * (1.0 - 1.0 / priced.grid.y) / peak
    beyond_s = at_peak_s - inside_s - replicated_s
    beyond = "uneven pipeline stages" if priced.computing else "padded or replicated weights"
    beyond = f"pads, {beyond}" if job.workload.lengths is not None else beyond
    if priced.grid.expert > 1 and job.framework.step.imbalance != 1.0:
        beyond = f"token imbalance, {beyond}"
    costs = [
        (inside_s - mean_s, "scores outside windows, not computed"),
        (replicated_s, f"attention replicated over {priced.job.framework.called('y')}"),
        (beyond_s if abs(beyond_s) > _ROUNDING * mean_s else 0.0, beyond),
        (priced.exposed_communication_s, "exposed communication"),
        (priced.bubble_s, "pipeline bubble"),
        (sum(each.seconds for each in work if each.phase == "recompute"), "activation recomputation"),
        (sum(each.seconds for each in matmuls) - at_peak_s, "GEMMs and attention below peak"),
        (priced.contended_s, CONTENDED),
        (priced.host_s, HOST),
        (sum(each.seconds for each in useful if each.kind in _KERNELS), "other kernels"),
        (sum(each.seconds for each in useful if each.kind == OFFLOAD), OFFLOAD),
    ]
    ordered = sorted(((cost_s, what) for cost_s, what in costs if cost_s), reverse=True)
    return [("useful FLOPs at peak (MFU)", mean_s), *((what, cost_s) for cost_s, what in ordered)]


_EXPOSED = (
    "Exposed: computation waits for it. Collectives queue on a network, so one can be exposed because of another."
)
_BY_KIND = ("call", "group", "count", "bytes", "tier", "seconds", "exposed_s", "overlapped_with")


def _collectives(priced: Detail) -> ExplainSection:
    """Collectives by kind and axis; each overlaps with what its longest one does."""
    kinds: dict[str, list[Json]] = {}
    for row in _term_rows(priced):
        kinds.setdefault(row["call"], []).append(row)
    rows: list[Json] = []
    for several in kinds.values():
        sums = {key: sum(row[key] for row in several) for key in ("count", "seconds", "exposed_s")}
        several.sort(key=lambda row: -float(row["seconds"]))
        longest, beside = several[0], [str(row["overlapped_with"]).partition(", in part")[0] for row in several]
        behind = next((words for words in beside if words not in _NOT_OVERLAPPED), beside[0])
        if sums["exposed_s"] and behind not in _NOT_OVERLAPPED:
            behind += ", in part"
        size_bytes = sum(row["count"] * row["bytes"] for row in several)
        rows.append({**longest, **sums, "bytes": size_bytes, "overlapped_with": behind})
    columns = [_in_ms(COLLECTIVE[key]) for key in _BY_KIND]
    columns[_BY_KIND.index("bytes")] = replace(COLLECTIVE["bytes"], title="all\nbuffers")
    notes = [
        f"{_EXPOSED} --terms lists those of each layer, with fixed time, algbw and how they are priced.",
        *_of_which_stage(priced),
    ]
    shown = [*rows, {**dict.fromkeys(_BY_KIND, ""), **_all_collectives(priced)}]
    return ExplainSection("Collectives per rank and step", columns=columns, rows=shown, notes=notes)


def _all_collectives(priced: Detail) -> Json:
    exposed_s = sum(term.exposed_s for term in priced.terms)
    return {"call": "all", "seconds": priced.communication_s, "exposed_s": exposed_s}


def _of_which_stage(priced: Detail) -> list[str]:
    """Whose collectives a pipeline's table lists, since the step waits for those of another stage."""
    if not priced.stages:
        return []
    if priced.stage == priced.busiest:
        return [f"Collectives of stage {priced.stage}, which communicates most and computes longest."]
    return [
        f"Collectives of stage {priced.stage}, which communicates most; exposed communication of the step, "
        f"{show_seconds(priced.exposed_communication_s)}, is that of {busiest(priced)}."
    ]


_SENT = ("number", "phase", "layer", "op", "axis", "group", "formula", "bytes", "count")
_COSTS = (
    "number",
    "call",
    "algorithm",
    "latency_s",
    "bandwidth_bytes_per_s",
    "bus_bandwidth_bytes_per_s",
    "seconds",
    "exposed_s",
    "overlapped_with",
)


def _every_collective(priced: Detail) -> list[ExplainSection]:
    """Every collective: its size, with the meaning and value of every letter in the formulas; its cost, and why."""
    columns = [COLLECTIVE[key] for key in _SENT]
    columns[_SENT.index("bytes")] = replace(COLLECTIVE["bytes"], title="one\ncall")
    used = {name for term in priced.terms for name, _ in term.collective.size_bytes.powers}
    letters = [
        # Of a layer type: `block_bucket.moe`.
        f"{name} = {priced.values[name]:,.{4 if letter == 'imbalance' else 10}g} "
        f"({', '.join((what, *name.split('.')[1:]))})"
        for letter, what in _MEANINGS.items()
        for name in sorted(used)
        if name.partition(".")[0] == letter
    ]
    rows = _term_rows(priced)
    costs = [*rows, {**dict.fromkeys(_COSTS, ""), **_all_collectives(priced)}]
    sent = [f"Letters: {', '.join(letters)}."]
    return [
        ExplainSection("Collectives per rank and step", columns=columns, rows=rows, notes=sent),
        ExplainSection(
            "Collective costs",
            columns=[_in_ms(COLLECTIVE[key]) for key in _COSTS],
            rows=costs,
            notes=[f"{_ONE_CALL} {_EXPOSED}", *_of_which_stage(priced)],
        ),
        ExplainSection("How calls are priced", sentences=line_sentences(priced)),
    ]


_GEMM_COLUMNS = (
    words("phase", "phase"),
    words("layer", "layer"),
    words("shape", "m × n × k"),
    Column("flops", "GFLOP", per=1e9, decimals=1),
    Column("rate", "rate, TFLOP/s", per=TERA, decimals=1),
    Column("of_peak", "rate of\npeak, %", per=PERCENT, decimals=1),
    Column("call_s", "one\ncall", show=show_seconds),
    Column("calls", "calls", decimals=0),
)


def _every_gemm(priced: Detail) -> ExplainSection:
    """Each GEMM and attention with what its time follows from."""
    rates, workload = priced.rates, priced.job.workload
    rows = [
        {
            **fields_of(one, ("phase", "layer", "shape", "flops", "rate", "call_s")),
            "of_peak": one.rate / one.peak,
            "calls": calls,
        }
        for one, calls in timed_gemms(priced).items()
    ]
    ramps = dict.fromkeys((f"{rates.matmul_ramp:g}", f"{rates.format_ramp:.4g} in {workload.precision}"))
    ramp = " or ".join(ramps if workload.format else list(ramps)[:1])
    launch, attention = show_seconds(rates.matmul_launch_s), show_seconds(rates.kernel_launch_s)
    said = (
        f"One call of a GEMM takes launch + the longer of 2·m·n·(k + ramp) / rate, m, n rounded up to {rates.tile:g}, "
        f"and the bytes of its operands and output / {rates.memory_bytes_per_s / GB:,.0f} GB/s; several groups, in one "
        f"launch, as many times that and {UNHIDDEN:.0%} of the shorter; a weight gradient that is added is read and "
        f"written in its own type. Launch {launch}, of attention {attention}, whose time is launch + FLOPs / rate; "
        f"ramp {ramp}. Rate: that of a large one, peak × efficiency; of attention with the "
        "masked half, which kernels leave out, so that it may be above 100% of peak; of scans as measured."
    )
    return ExplainSection("GEMMs and attention per rank and step", columns=_GEMM_COLUMNS, rows=rows, notes=[said])


def _term_rows(priced: Detail) -> list[Json]:
    """Every collective, numbered, its size with the framework's names of axes, and what it is overlapped with."""
    framework, rows = priced.job.framework, []
    for number, term in enumerate(priced.terms, start=1):
        had = [one for one in term.collective.size_bytes.powers if one[0] in framework.axes or one[0] not in ALL_AXES]
        called = [(framework.called(name) if name in ALL_AXES else name, power) for name, power in had]
        behind = hidden_behind(term, priced.job.workload) or _NOT_OVERLAPPED[0]
        if behind not in _NOT_OVERLAPPED and hidden_s(term) < 0.01 * term.seconds:
            behind = _NOT_OVERLAPPED[1]
        elif behind not in _NOT_OVERLAPPED and term.exposed_s:
            behind += ", in part"
        rows.append(
            {
                **term_row(term_json(term), framework),
                "formula": str(Size(term.collective.size_bytes.coefficient, tuple(called))),
                "number": number,
                "call": f"{term.op} {framework.called(term.axis)}",
                "overlapped_with": behind,
            }
        )
    return rows


_MEANINGS = {
    "H": "hidden",
    "Q": "heads·head_dim",
    "N": "width of q, k and v",
    "F": "ffn",
    "G": "width of the first MLP GEMM",
    "S": "sequence length",
    "seen": "positions of a token's own sequence",
    "b": "micro-batch",
    "C": "chunks of the loss",
    "L": "layers",
    "imbalance": "tokens of the fullest rank over the mean",
    "V": "padded vocabulary",
    "P": "padded positions",
    "parts": "interleaved half micro-batches",
    "block_bucket": "elements of one block's gradient",
    "expert_bucket": "elements of the gradient of one layer's experts",
    "table_bucket": "elements of an embedding's gradient",
    "position_bucket": "elements of the position embedding's gradient",
    "vectors": "elements of replicated vectors",
    "head_norms": "elements of norms of queries and keys",
    "trained": "weights of a block that train",
}


_ONE_CALL = (
    "One call takes its fixed time + bytes / algbw, the algorithm bandwidth. busbw is algbw as nccl-tests converts it: "
    "times (n−1)/n for all_gather and reduce_scatter, 2(n−1)/n for all_reduce."
)


def _in_ms(column: Column) -> Column:
    """A column of seconds with a unit in each cell, ms below 1 s."""
    titles = {"seconds": "all\ncalls", "exposed_s": "exposed"}

    def show(seconds: float) -> str:
        return show_seconds(seconds) if seconds else "0"

    return replace(column, title=titles[column.key], show=show) if column.key in titles else column


_NOT_OVERLAPPED = ("not overlappable", "no compute left")


WORK_COLUMNS = (
    words("kind", "computation", "What is computed.", 28),
    words("phase", "phase", "Part of the step.", 10),
    Column("seconds", "time, s", "Of a step and rank.", title="time", show=show_seconds),
    Column("share", "share, %", "Of all computation.", per=PERCENT, decimals=1),
    Column("rate", "TFLOP/s", "Speed reached; element-wise kernels count no FLOPs.", per=TERA, decimals=1),
    Column("of_peak", "of peak, %", "The same over the accelerator's peak.", per=PERCENT, decimals=1),
)


def work_rows(priced: Detail) -> list[Json]:
    """Computation by kind and phase, in the order of the step; last all of it."""
    job = priced.job
    peak = job.peak_flops_per_s
    work = sorted(work_by_kind(priced), key=lambda each: _PHASES.index(each.phase))
    rows = []
    for each in (*work, Work("all", "", priced.compute_s, priced.executed_flops)):
        rate = each.flops / each.seconds if each.flops else None
        of_peak = each.at_peak_s / each.seconds if each.at_peak_s else rate and rate / peak
        shares = {"share": each.seconds / priced.compute_s, "of_peak": of_peak}
        rows.append({**fields_of(each, ("kind", "phase", "seconds")), "rate": rate, **shares})
    return rows


MEMORY_COLUMNS = (
    words("name", "memory"),
    Column("bytes", "GiB", per=GIB, decimals=2),
    Column("share", "of usable, %", per=PERCENT, decimals=1),
)


def memory_rows(priced: Detail) -> list[Json]:
    """Memory at the peak of a step, of the largest stage: largest item first, then all and what is usable."""
    limit_bytes = priced.memory_limit_bytes
    shown = [*memory_items(priced), ("usable", limit_bytes)]
    return [{"name": name, "bytes": size, "share": size / limit_bytes} for name, size in shown]


def memory_items(priced: Detail) -> list[tuple[str, float]]:
    """Peak memory of one GPU, bytes: items, the largest first; then the sum."""
    items = sorted(((float(size), name) for name, size in priced.memory.items if size), reverse=True)
    return [*((name, size) for size, name in items), ("all", float(priced.memory.total_bytes))]


def explain_title(problem: Problem, priced: PricedLayout) -> str:
    """Title line of the explanation."""
    step = f", {show_seconds(priced.iteration_s)} a step"
    where = f"{problem.title} on {problem.gpus:,} × {machine_words(problem)}"
    framework, sizes = problem.framework, {axis: priced.grid.axis_size(axis) for axis in problem.axes}
    if framework.names:
        layout = layout_words(framework.layout({**sizes, "chunks": priced.chunks}))
        return f"{where} with {framework.title}: {layout}{step}"
    software = "" if framework.name == AXONN_TUNE.name else f" with {framework.title}"
    shown = {axis: str(size) for axis, size in framework.layout(sizes).items()}
    return f"{where}{software}: grid {' × '.join(shown)} = {' × '.join(shown.values())}{step}"


def explain_document(inputs: Inputs, priced: Detail) -> Json:
    """Everything the tables show, with every digit."""
    workload = inputs.problem.workload
    terms = [
        {**term_json(term), "hidden_s": hidden_s(term), "hidden_behind": hidden_behind(term, workload) or None}
        for term in priced.terms
    ]
    work = work_by_kind(priced)
    return {
        **document_head(SCHEMA, inputs),
        "cost": ALPHA_BETA,
        "words": step_words(priced),
        "config": {**entry_fields(priced), "terms": terms},
        "symbols": priced.values,
        "lines": line_sentences(priced),
        "gap_to_peak": [{"what": what, "seconds": spent_s} for what, spent_s in gap_to_peak(priced)],
        "computation": [fields_of(each, ("kind", "phase", "seconds", "flops")) for each in work],
        "memory": {
            "items": {name: float(size) for name, size in priced.memory.items},
            "total_bytes": float(priced.memory.total_bytes),
            "limit_bytes": priced.memory_limit_bytes,
        },
    }


def _stages(priced: Detail) -> list[ExplainSection]:
    """Stages of a pipeline: where and what they are, their first passes, and their memory."""
    rows = stage_rows(priced)
    return [
        ExplainSection("Pipeline stages", columns=MAP_COLUMNS, rows=rows),
        ExplainSection("Pipeline schedule", drawing=drawn_schedule(priced), notes=[schedule_legend(priced)]),
        ExplainSection("Peak memory per GPU by stage", columns=MEMORY_BY_STAGE, rows=rows),
    ]
