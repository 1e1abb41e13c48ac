"""Explanation of one configuration: the step in words, its numbers in tables, and JSON.

The words need no knowledge of the cost model and can be checked by an expert. JSON follows the
contract `axonn-tune/explain/1`.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from axonn_tune.cost.collectives import (
    IN_SWITCH_LATENCY_S,
    IN_SWITCH_SHARE,
    TREE_BANDWIDTH_SHARE,
    Line,
    Route,
    route,
    sending,
)
from axonn_tune.cost.price import (
    ATTENTION,
    CONTENDED,
    ELEMENT_WISE,
    GEMMS,
    OPTIMIZER,
    Detail,
    PricedLayout,
    Term,
    Work,
    hidden_behind,
    hidden_s,
    work_by_kind,
)
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.description import Framework
from axonn_tune.grid import ALL_AXES, Grid
from axonn_tune.program.dimensions import model_flops
from axonn_tune.program.operations import Phase, priced_kind
from axonn_tune.program.size import Size
from axonn_tune.ranking.inputs import Inputs
from axonn_tune.ranking.space import Problem
from axonn_tune.report.output import (
    PERCENT,
    WIDTH,
    Column,
    Json,
    cells_of,
    fields_of,
    markdown_table,
    text_of,
    words,
    wrapped,
)
from axonn_tune.report.ranking import (
    COLLECTIVE,
    document_head,
    entry_fields,
    layout_words,
    logged_words,
    term_json,
    term_row,
    training_words,
)
from axonn_tune.specs.machine import Accelerator, Machine, Protocol
from axonn_tune.units import GB, GIB, TERA, counted, show_bytes, show_seconds

SCHEMA = "axonn-tune/explain/1"

_PHASES = (*get_args(Phase), "")
"""Order of phases; items without a phase come last."""
_RECOMPUTE = {
    "none": "There is no activation recomputation: the forward pass saves all activations for the backward pass.",
    "selective": (
        "Selective activation recomputation (checkpointing): the backward pass recomputes {parts} instead of saving "
        "their results."
    ),
    "full": (
        "Full activation recomputation (checkpointing): the forward pass saves only each block's input, and the "
        "backward pass runs the block's forward pass again."
    ),
}
_REPEATED = {
    **dict.fromkeys(("attention.norm", "mlp.norm"), "norms"),
    "attention.core": "core attention",
    "attention.scores": "attention scores",
    "attention.output": "the output projection of attention",
    "mlp.up": "the MLP's up projection",
    "mlp.activation": "activation functions",
}
"""Layers that selective recompute repeats, in words."""
_WORTH_SAYING = 0.005
"""Share of a step below which a gain is not mentioned."""
_KERNELS = (ELEMENT_WISE, OPTIMIZER)
"""Computation without FLOPs of the model."""
_MATMULS = (GEMMS, ATTENTION)
_FORWARD_AND_BACKWARD = 3.0
"""FLOPs of attention that MFU counts over those of its forward pass."""
_ALGORITHMS = {
    "ring": "fixed = launch + {passes}(Σ hops·latency, less one hop of the slowest); algbw = bandwidth·p/{denominator}",
    "tree": (
        f"fixed = launch + 2·(hops inside a domain + log2 of the domains outside); algbw = {TREE_BANDWIDTH_SHARE:g}·"
        "bandwidth/2"
    ),
    "recursive": "fixed = launch + {passes}(latency of each of log2 p steps); algbw from what each step sends",
    "hierarchical": "fixed = launch + {passes}(ring inside a domain, then across); algbw from both parts in turn",
    "in_switch": (
        f"fixed = launch + {show_seconds(IN_SWITCH_LATENCY_S)} + latency inside a domain + 2·latency·log2 of the "
        f"domains outside; algbw = {IN_SWITCH_SHARE:g}·bandwidth inside a domain, at most that across, or half of it "
        "across more than two domains"
    ),
    "direct": "fixed = launch + latency; algbw from what leaves the domain of the tightest network level",
}


@dataclass(frozen=True)
class ExplainSection:
    """A part of the explanation: paragraphs, then sentences, a table, notes and commands; each may be empty."""

    title: str
    paragraphs: Sequence[Sequence[str]] = ()
    sentences: Sequence[str] = ()
    columns: Sequence[Column] = ()
    rows: Sequence[Json] = ()
    notes: Sequence[str] = ()
    commands: Sequence[str] = ()


def sections(priced: Detail, *, terms: bool = False) -> list[ExplainSection]:
    """The whole explanation; terms: with every collective of every layer instead of one row for each kind and axis."""
    lines = line_sentences(priced)
    listed = [_sent(priced), _costs(priced), ExplainSection("How calls are priced", sentences=lines)]
    return [
        _gap(priced),
        ExplainSection("The step in words", paragraphs=paragraphs(priced, gap=False)),
        *(listed if terms else [_collectives(priced)]),
        _computation(priced),
        _memory(priced),
    ]


def explain_text(parts_of: Sequence[ExplainSection]) -> str:
    """An explanation as plain text."""
    parts = []
    for section in parts_of:
        story = [textwrap.fill(" ".join(part), width=WIDTH, break_on_hyphens=False) for part in section.paragraphs]
        table = text_of(section.columns, section.rows).rstrip("\n")
        below = [*map(wrapped, section.sentences), table, *map(wrapped, section.notes), *section.commands]
        lines = [section.title, "-" * len(section.title), "\n\n".join(story), *below]
        parts.append("\n".join(line for line in lines if line) + "\n")
    return "\n".join(parts)


def explain_markdown(parts_of: Sequence[ExplainSection]) -> str:
    """An explanation as Markdown."""
    parts = []
    for section in parts_of:
        cells = cells_of(section.columns, section.rows)
        table = markdown_table(section.columns, cells) if cells else ""
        listed = "\n".join(f"- {sentence}" for sentence in section.sentences)
        story = [" ".join(part) for part in section.paragraphs]
        commands = "\n".join(["```console", *(f"$ {command}" for command in section.commands), "```"])
        blocks = [f"## {section.title}", *story, listed, table.rstrip("\n"), *section.notes]
        blocks += [commands] if section.commands else []
        parts.append("\n\n".join(block for block in blocks if block) + "\n")
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
    peak = job.machine.accelerator.peak_flops_per_s(job.workload.precision)
    useful = [each for each in work if each.phase != "recompute"]
    matmuls = [each for each in useful if each.kind in _MATMULS]
    # Fused attention recomputes scores in its backward pass, which MFU does not count: twice the forward's FLOPs are.
    scores = sum(each.flops for each in matmuls if (each.kind, each.phase) == (ATTENTION, "forward"))
    counted_flops = sum(each.flops for each in matmuls if each.kind != ATTENTION) + _FORWARD_AND_BACKWARD * scores
    at_peak_s = counted_flops / peak
    mean_s = model_flops(job.model, job.workload) / (priced.grid.world * peak)
    y = priced.grid.y
    replicated_s = _FORWARD_AND_BACKWARD * scores * (1.0 - 1.0 / y) / peak
    beyond_s = at_peak_s - mean_s - replicated_s
    beyond = "uneven pipeline stages" if priced.computing else "padded or replicated weights"
    costs = [
        (replicated_s, f"attention replicated over {priced.job.framework.called('y')}"),
        (beyond_s if abs(beyond_s) > _ROUNDING * mean_s else 0.0, beyond),
        (priced.exposed_communication_s, "exposed communication"),
        (priced.bubble_s, "pipeline bubble"),
        (sum(each.seconds for each in work if each.phase == "recompute"), "activation recomputation"),
        (sum(each.seconds for each in matmuls) - at_peak_s, "GEMMs and attention below peak"),
        (priced.contended_s, CONTENDED),
        (sum(each.seconds for each in useful if each.kind in _KERNELS), "other kernels"),
    ]
    ordered = sorted(((cost_s, what) for cost_s, what in costs if cost_s), reverse=True)
    return [("useful FLOPs at peak (MFU)", mean_s), *((what, cost_s) for cost_s, what in ordered)]


def _gap(priced: Detail) -> ExplainSection:
    step_s = priced.iteration_s
    rows = [
        {"what": what, "seconds": spent_s, "share": spent_s / step_s, "bar": "█" * round(_BAR * spent_s / step_s)}
        for what, spent_s in gap_to_peak(priced)
    ]
    return ExplainSection("Gap to peak", columns=_GAP, rows=rows)


_EXPOSED = (
    "Exposed: computation waits for it. Collectives queue on a network, so one can be exposed because of another."
)
_BY_KIND = ("call", "group", "count", "bytes", "tier", "seconds", "exposed_s", "overlapped_with")


def _collectives(priced: Detail) -> ExplainSection:
    """Collectives by kind and axis."""
    kinds: dict[str, list[Json]] = {}
    for row in _term_rows(priced):
        kinds.setdefault(row["call"], []).append(row)
    columns = [_in_ms(COLLECTIVE[key]) for key in _BY_KIND]
    columns[_BY_KIND.index("bytes")] = replace(COLLECTIVE["bytes"], title="all\nbuffers")
    total = {"seconds": priced.communication_s, "exposed_s": priced.exposed_communication_s}
    rows = [*map(_kind_row, kinds.values()), {**dict.fromkeys(_BY_KIND, ""), "call": "all", **total}]
    note = f"{_EXPOSED} --terms lists those of each layer, with fixed time, algbw and how they are priced."
    return ExplainSection("Collectives per rank and step", columns=columns, rows=rows, notes=[note])


def _kind_row(rows: Sequence[Json]) -> Json:
    """Collectives of one kind and axis as one; `overlapped with` is that of the longest."""
    sums = {key: sum(row[key] for row in rows) for key in ("count", "seconds", "exposed_s")}
    longest = max(rows, key=lambda row: float(row["seconds"]))
    behind = str(longest["overlapped_with"]).partition(", in part")[0]
    if sums["exposed_s"] and behind not in _NOT_OVERLAPPED:
        behind += ", in part"
    size_bytes = sum(row["count"] * row["bytes"] for row in rows)
    return {**longest, **sums, "bytes": size_bytes, "overlapped_with": behind}


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


def _sent(priced: Detail) -> ExplainSection:
    """Every collective, its size, and the meaning and value of every letter in the formulas."""
    columns = [COLLECTIVE[key] for key in _SENT]
    columns[_SENT.index("bytes")] = replace(COLLECTIVE["bytes"], title="one\ncall")
    used = {name for term in priced.terms for name, _ in term.collective.size_bytes.powers}
    letters = [f"{name} = {priced.values[name]:,.0f} ({what})" for name, what in _MEANINGS.items() if name in used]
    note = f"Letters: {', '.join(letters)}."
    return ExplainSection("Collectives per rank and step", columns=columns, rows=_term_rows(priced), notes=[note])


def _term_rows(priced: Detail) -> list[Json]:
    """Every collective, numbered, with what it is overlapped with."""
    workload = priced.job.workload
    return [
        {
            **term_row(term_json(term), priced.job.framework),
            "formula": _named(term.collective.size_bytes, priced.job.framework),
            "number": number,
            "call": f"{term.op} {priced.job.framework.called(term.axis)}",
            "overlapped_with": _behind(term, hidden_behind(term, workload)),
        }
        for number, term in enumerate(priced.terms, start=1)
    ]


def _named(size: Size, framework: Framework) -> str:
    """A size with the framework's names of its axes."""
    had = [(name, power) for name, power in size.powers if name in framework.axes or name not in ALL_AXES]
    called = [(framework.called(name) if name in ALL_AXES else name, power) for name, power in had]
    return str(Size(size.coefficient, tuple(called)))


_MEANINGS = {
    "H": "hidden",
    "Q": "heads·head_dim",
    "N": "width of q, k and v",
    "F": "ffn",
    "G": "width of the first MLP GEMM",
    "S": "sequence length",
    "b": "micro-batch",
    "C": "chunks of the loss",
    "V": "padded vocabulary",
    "P": "padded positions",
    "parts": "interleaved half micro-batches",
    "block_bucket": "elements of one block's gradient",
    "table_bucket": "elements of an embedding's gradient",
    "position_bucket": "elements of the position embedding's gradient",
    "vectors": "elements of replicated vectors",
}


def _costs(priced: Detail) -> ExplainSection:
    blank: Json = dict.fromkeys(_COSTS, "")
    total_s = {"seconds": priced.communication_s, "exposed_s": priced.exposed_communication_s}
    return ExplainSection(
        "Collective costs",
        columns=[_in_ms(COLLECTIVE[key]) for key in _COSTS],
        rows=[*_term_rows(priced), {**blank, "call": "all", **total_s}],
        notes=[f"{_ONE_CALL} {_EXPOSED}"],
    )


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


def _behind(term: Term, behind: str) -> str:
    if not behind:
        return _NOT_OVERLAPPED[0]
    hidden = hidden_s(term)
    if hidden < 0.01 * term.seconds:
        return _NOT_OVERLAPPED[1]
    return behind if term.exposed_s == 0.0 else f"{behind}, in part"


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
    peak = job.machine.accelerator.peak_flops_per_s(job.workload.precision)
    work = sorted(work_by_kind(priced), key=lambda each: _PHASES.index(each.phase))
    rows = []
    for each in (*work, Work("all", "", priced.compute_s, priced.executed_flops)):
        rate = each.flops / each.seconds if each.flops else None
        shares = {"share": each.seconds / priced.compute_s, "of_peak": rate and rate / peak}
        rows.append({**fields_of(each, ("kind", "phase", "seconds")), "rate": rate, **shares})
    return rows


def _computation(priced: Detail) -> ExplainSection:
    rows = work_rows(priced)
    note = "TFLOP/s of attention count the masked half of the scores, as MFU does here; causal kernels skip it."
    of = ", of the stage that computes longest" if priced.computing else ""
    return ExplainSection(f"Computation per rank and step{of}", columns=WORK_COLUMNS, rows=rows, notes=[note])


_MEMORY = (
    words("name", "memory"),
    Column("bytes", "GiB", per=GIB, decimals=2),
    Column("share", "of usable, %", per=PERCENT, decimals=1),
)


def _memory(priced: Detail) -> ExplainSection:
    """Memory at the peak of a step, largest item first."""
    limit_bytes, accelerator = priced.memory_limit_bytes, priced.job.machine.accelerator
    shown = [*memory_items(priced), ("usable", limit_bytes)]
    rows = [{"name": name, "bytes": size, "share": size / limit_bytes} for name, size in shown]
    note = (
        f"Usable: {accelerator.memory_gib:g} GiB less {accelerator.reserved_memory_gib:g} GiB reserved for "
        "the driver's context, communicators and fragmentation (accelerator.reserved_memory_gib)."
    )
    return ExplainSection("Peak memory per GPU", columns=_MEMORY, rows=rows, notes=[note])


def memory_items(priced: Detail) -> list[tuple[str, float]]:
    """Peak memory of one GPU, bytes: items, the largest first; then the sum."""
    items = sorted(((float(size), name) for name, size in priced.memory.items if size), reverse=True)
    return [*((name, size) for size, name in items), ("all", float(priced.memory.total_bytes))]


def explain_title(problem: Problem, priced: PricedLayout) -> str:
    """Title line of the explanation."""
    step = f", {show_seconds(priced.iteration_s)} a step"
    machine = f"{problem.machine.name} ({problem.machine.accelerator.name})"
    where = f"{problem.model.name} on {problem.gpus:,} × {machine}"
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
        "cost": "alpha-beta",
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


def step_words(priced: Detail) -> list[str]:
    """The step as a list of sentences."""
    return [sentence for part in paragraphs(priced) for sentence in part]


def paragraphs(priced: Detail, *, gap: bool = True, log: bool = True) -> list[list[str]]:
    """The same in paragraphs: work, layout, memory, time, and gap to peak; log: what the framework's own will print."""
    grid = priced.grid
    found = [
        list(_work(priced)),
        [*_axes(priced), *_placement(grid, priced.job.machine, priced.job.framework)],
        list(_saved(priced)),
        list(_time(priced)),
        list(_use(priced, log=log)),
        list(_limits(priced)) if gap else [],
    ]
    return [part for part in found if part]


def _work(priced: Detail) -> Iterator[str]:
    workload, grid, framework = priced.job.workload, priced.grid, priced.job.framework
    shares = grid.data * grid.z
    axes = [axis for axis in ("data", "z") if axis in framework.axes]
    names = " × ".join(map(framework.called, axes))
    product = f"{' × '.join(str(grid.axis_size(axis)) for axis in axes)} = " if len(axes) > 1 else ""
    yield (
        f"One step of {priced.job.model.name} trains {workload.global_batch:,} sequences of "
        f"{workload.sequence_length:,} tokens on {grid.world:,} GPUs."
    )
    yield (
        f"The global batch is split over {names} = {product}{counted(shares, 'group')} of GPUs. "
        f"Each trains {counted(workload.global_batch // shares, 'sequence')}, in "
        f"{counted(priced.accumulation, 'micro-batch')} of {counted(priced.micro_batch, 'sequence')}."
    )


def _axes(priced: Detail) -> Iterator[str]:
    grid, options, chunks = priced.grid, priced.job.framework.step, priced.chunks
    called = priced.job.framework.called
    if grid.y == 1 and grid.x > 1:
        done = "all-gather inputs and reduce-scatter outputs" if options.sequence_parallel else "sum the outputs"
        yield f"Every weight matrix is sharded over {called('x')} = {grid.x} GPUs, which {done} of each pair of GEMMs."
    elif grid.x * grid.y > 1:
        yield (
            f"Every weight matrix is sharded over {called('x')} × {called('y')} = {grid.x} × {grid.y} GPUs. They sum "
            "the partial results of each GEMM: over one of the two axes in the forward pass, over the other in the "
            "backward pass."
        )
    shards, along = (grid.z * grid.context, "zcontext") if options.context_shards else (grid.z, "z")
    if shards > 1:
        yield (
            f"Each weight is stored in {shards} shards along {called(along)}. They are all-gathered before use, and "
            "gradients are reduce-scattered after it."
        )
    if grid.context > 1:
        yield f"Each sequence is split over {called('context')} = {grid.context} GPUs."
    if grid.pipeline > 1:
        each = f", each of {chunks} interleaved chunks" if chunks > 1 else ""
        name = f" ({called('pipeline')})" if priced.job.framework.names else ""
        yield f"The layers are split over {grid.pipeline} pipeline stages{name}{each}."
    if grid.data > 1:
        how = "in each micro-batch" if options.reduce_each_micro_batch else "once per step"
        yield f"{grid.data} replicas along {called('data')} average their gradients {how}."


def _placement(grid: Grid, machine: Machine, framework: Framework) -> Iterator[str]:
    """Network level of the groups of each axis."""
    wide = [axis for axis in grid.order if grid.axis_size(axis) > 1]
    if not wide:
        yield "There is one GPU and no communication."
        return
    names = list(map(framework.called, wide))
    numbered = f"The rank order is {', then '.join(names)}" if len(wide) > 1 else f"All GPUs lie along {names[0]}"
    places = [f"a {name} group {_place(grid, axis, machine)}" for name, axis in zip(names, wide, strict=True)]
    yield f"{numbered}: {'; '.join(places)}."


def _place(grid: Grid, axis: str, machine: Machine) -> str:
    """Placement of one group's members."""
    stride, size, inner = grid.stride(axis), grid.axis_size(axis), machine.tiers[0]
    wide_enough = (tier.name for tier in machine.tiers if tier.ranks is None or stride * size <= tier.ranks)
    outermost = next(wide_enough, machine.tiers[-1].name)
    if inner.ranks is None or stride * size <= inner.ranks:
        return f"is {size} GPUs joined by {inner.name}"
    if stride >= inner.ranks:
        return f"is {size} GPUs, each in another {inner.name} domain, joined by {outermost}"
    together = inner.ranks // stride
    domains = -(-size // together)
    return f"is {size} GPUs, {together} in each of {domains} {inner.name} domains, which {outermost} joins"


def _saved(priced: Detail) -> Iterator[str]:
    repeated = dict.fromkeys(_REPEATED.get(name, name) for name in priced.job.framework.step.selective)
    yield _RECOMPUTE[priced.recompute].format(parts=", ".join(repeated))
    kept = int(priced.memory.kept_layers)
    if kept and priced.grid.z > 1:
        yield (
            f"The last {'layer is' if kept == 1 else f'{kept} layers are'} not resharded after forward "
            f"(reshard_after_forward=False): memory is left for {'its' if kept == 1 else 'their'} gathered weights."
        )


def _time(priced: Detail) -> Iterator[str]:
    exposed_s, step_s = priced.exposed_communication_s, priced.iteration_s
    bound = "compute" if exposed_s < step_s / 2 else "communication"
    yield (
        f"The step takes {show_seconds(step_s)} (80% interval: {show_seconds(priced.low_s)} to "
        f"{show_seconds(priced.high_s)}). It is {bound}-bound: a GPU computes for {_part(priced.compute_s, step_s)}"
        f"{_slowing(priced.job.machine.accelerator, priced)}, and waits for communication for "
        f"{_part(exposed_s, step_s)}."
    )
    if priced.bubble_s:
        yield (
            f"The pipeline bubble, in which the stage that computes longest waits for the others, is "
            f"{_part(priced.bubble_s, step_s)}."
        )
    if not priced.terms:
        return
    hidden_s = max(priced.communication_s - exposed_s, 0.0)
    yield (
        f"The collectives of a GPU take {show_seconds(priced.communication_s)}, of which "
        f"{_part(hidden_s, priced.communication_s)} are overlapped with computation."
    )
    longest = max(priced.terms, key=lambda term: term.exposed_s)
    if longest.exposed_s:
        yield (
            f"The longest wait is for {longest.op} over {priced.job.framework.called(longest.axis)} of {longest.layer} "
            f"({longest.phase}): {show_seconds(longest.exposed_s)} per step."
        )


def _part(seconds: float, whole_s: float) -> str:
    return f"{show_seconds(seconds)} ({seconds / whole_s:.0%})"


def _use(priced: Detail, *, log: bool) -> Iterator[str]:
    peak = priced.job.machine.accelerator.peak_tflops[priced.job.workload.precision]
    yield (
        f"That is {priced.tokens_per_s:,.0f} tokens/s, {priced.mfu:.1%} of the peak of {peak:g} TFLOP/s "
        f"without recompute (MFU), {priced.hfu:.1%} with it (HFU). Both count attention's masked half."
    )
    if log and (logged := logged_words(priced)):
        yield logged
    if priced.job.tokens_total:
        yield training_words(priced.job, entry_fields(priced))
    yield (
        f"Peak memory per GPU is {show_bytes(float(priced.memory.total_bytes))} of "
        f"{show_bytes(priced.memory_limit_bytes)} usable."
    )


def _slowing(accelerator: Accelerator, priced: Detail) -> str:
    """Compute slowdown from overlap, with the profile's number and its source."""
    if not priced.contended_s:
        return ""
    kind = accelerator.sources["contention"].kind if "contention" in accelerator.sources else "assumed"
    factor = f"{accelerator.contention:g} of its time, {kind}: accelerator.contention"
    return f", of which {show_seconds(priced.contended_s)} are compute slowdown from overlap ({factor})"


def _limits(priced: Detail) -> Iterator[str]:
    """Gap to peak by cost."""
    step_s = priced.iteration_s
    _, *costs = gap_to_peak(priced)
    shares = [f"{what} {_part(cost_s, step_s)}" for what, cost_s in costs if cost_s > _WORTH_SAYING * step_s]
    if shares:
        yield f"Gap to peak: {', '.join(shares)}."


def line_sentences(priced: Detail) -> list[str]:
    """For each different line of the terms: the formula, its numbers and the result."""
    found: dict[tuple[str, str, Line], str] = {}
    own = priced.job.machine
    for term in priced.terms:
        key = (term.op, term.axis, term.line)
        if term.op == "send":
            found[key] = _send_sentence(term, priced, own)
        elif key not in found:
            kind = priced_kind(term.collective.kind)
            machine = own.model_copy(update={"tiers": own.tiers_of(kind)})
            path = route(priced.grid.group_shape(term.axis), machine.tiers, priced.grid.world)
            found[key] = _sentence(term, path, machine, over=priced.job.framework.called(term.axis))
    return list(found.values())


def _send_sentence(term: Term, priced: Detail, machine: Machine) -> str:
    tier, senders = sending(stride=priced.grid.stride("pipeline"), machine=machine)
    shared = f" / {senders} ranks of a domain that send at once" if senders > 1 else ""
    return (
        f"send over {priced.job.framework.called(term.axis)}, {show_bytes(term.bytes)} to the next stage: fixed = "
        "launch + latency + software per call, and the gather of its shares where there is one; algbw = bandwidth"
        f"{shared}. Here launch {show_seconds(machine.library.launch_s)}, latency {show_seconds(tier.latency_s)} "
        f"({tier.name}), bandwidth {tier.bandwidth_gb_per_s:g} GB/s: fixed = {show_seconds(term.line.latency_s)}, "
        f"algbw = {term.line.bandwidth_bytes_per_s / GB:.4g} GB/s."
    )


def _sentence(term: Term, path: Route, machine: Machine, *, over: str) -> str:
    line = term.line
    passes = "2" if term.op == "all_reduce" else ""
    formula = _ALGORITHMS.get(line.algorithm, "").format(passes=passes, denominator="(2(p−1))" if passes else "(p−1)")
    protocol = next(each for each in machine.library.protocols if each.name == line.protocol)
    launch = show_seconds(machine.library.launch_s)
    numbers = [
        f"p = {path.size}",
        f"launch {launch}",
        *_numbers(path, machine, protocol, in_switch=line.algorithm == "in_switch"),
    ]
    return (
        f"{term.op} over {over}, {line.algorithm} ({line.protocol}): {formula}. "
        f"Here {', '.join(numbers)}: fixed = {show_seconds(line.latency_s)}, "
        f"algbw = {line.bandwidth_bytes_per_s / GB:.4g} GB/s."
    )


def _numbers(path: Route, machine: Machine, protocol: Protocol, *, in_switch: bool) -> Iterator[str]:
    """Hops by network level, the bandwidth of shared links, and what the protocol changes."""
    hops = [
        f"{count} of {show_seconds(tier.latency_s)} ({tier.name})"
        for count, tier in zip(path.hops, machine.tiers, strict=True)
        if count
    ]
    yield f"hops {' + '.join(hops)}"
    inner, outermost = machine.tiers[0], machine.tiers[path.outermost]
    if in_switch:
        yield f"bandwidth {inner.bandwidth_gb_per_s:g} GB/s inside a domain ({inner.name})"
    if in_switch and not path.outermost:
        return
    shared = outermost.bandwidth_bytes_per_s / path.bandwidth_bytes_per_s
    bandwidth = f"bandwidth {path.bandwidth_bytes_per_s / GB:.4g} GB/s of a group"
    if path.outermost > 0 and shared > 1.0 and math.isclose(shared, round(shared)):
        bandwidth += (
            f" (1/{round(shared)} of {outermost.name}'s {outermost.bandwidth_gb_per_s:g} GB/s, which groups share)"
        )
    yield bandwidth
    if protocol.latency_factor != 1.0:
        yield f"hops' latency × {protocol.latency_factor:g}"
    if protocol.bandwidth_factor != 1.0:
        yield f"bandwidth × {protocol.bandwidth_factor:g}"
