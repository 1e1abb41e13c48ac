"""Rankings as tables, Markdown, CSV and JSON, with remarks.

JSON follows the contract `axonn-tune/ranking/1`. Keys may be added, never renamed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from axonn_tune.cost.collectives import bus_bytes
from axonn_tune.cost.price import METRICS as PRICES
from axonn_tune.cost.price import Detail, Parts, PricedLayout, Term, price, quantization, separated, step_parts
from axonn_tune.cost.uncertainty import ACCELERATOR, DEVIATIONS, GENERATIONS, LARGEST, of_layout, outside, own_bound_s
from axonn_tune.errors import BLUE, YELLOW
from axonn_tune.frameworks import find_framework, registry, step_changes
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.description import Framework
from axonn_tune.grid import ALL_AXES, AXES, EXPERT_AXES, RANK_AXES
from axonn_tune.job import Job
from axonn_tune.program.dimensions import (
    CHUNKS,
    EXPERT_OVERLAP,
    MEMORY,
    MFU_CONVENTION,
    MICRO_BATCH,
    PINNED,
    step_tokens,
)
from axonn_tune.program.memory import memory_limit_bytes
from axonn_tune.ranking.inputs import Inputs
from axonn_tune.ranking.priced import WORTH_SAYING, Priced, Rejected, Row
from axonn_tune.ranking.space import Problem
from axonn_tune.report.output import (
    NOTHING,
    PERCENT,
    Column,
    Json,
    Table,
    aligned_cells,
    colored,
    count,
    fields_of,
    words,
)
from axonn_tune.request import ALPHA_BETA, DEFAULT_TOP, RankBy
from axonn_tune.specs.catalog import Loaded
from axonn_tune.specs.numbers import told
from axonn_tune.units import GB, GIB, MICRO, counted, show_bytes, show_count, show_seconds
from axonn_tune.vocabulary import VERSION

RANKING_SCHEMA = "axonn-tune/ranking/1"

_OPTIONS = ("recompute_layers", "kept_layers", "context_exchange", "dispatcher", "expert_overlap")
"""Settings that most layouts have by default."""
_SETTINGS = ("order", "micro_batch", "recompute", *_OPTIONS, "bubble_s", "shortest_step_s")
"""Columns that a narrow table leaves out where all rows have one value."""
_SPARE = (
    ("node_hours", "logged_tflops_per_gpu"),
    ("gpu_hours", "shortest_step_s", "tokens_per_s_per_gpu", "bubble_s"),
)
"""Multiples of the step or of its inverse, left out of what is wider than a line all the same; between them all
communication, of which the exposed is shown, and options that most rows have alike; then other options, MFU last."""
_BROKEN = {"pipeline": "pipe-\nline", "context": "con-\ntext"}
"""Where names of axes are broken that have no underscore."""
_TELLING = 0.02
"""Differences below this share of the total are summed as the rest."""
_MOST_NAMED = 3
"""Number of configurations within model error that a remark names."""
_LONG_CONTEXT = 32_768
"""Tokens in a sequence from which context parallelism is mentioned."""
_HOUR_S = 3600.0
TIED, SHORTEST, OUTSIDE = "≈", "*", "°"
"""Mark what is within model error of the first, the shortest step of all, and what no published step validates."""
_LEAST_BAR, _MOST_BAR = 10, 30
"""Characters of the bar of the longest step."""
RANKED_BY = {
    "communication": "communication per step, overlapped or not",
    "exposed": "exposed communication per step",
    "iteration": "step time",
}
METRICS = {"communication": "communication", "exposed": "exposed communication", "iteration": "step time"}
INTERRUPTED = "Interrupted: the rest was not searched, and may have better layouts."
_SAME_GRID = "for the fastest candidate with the same grid and rank order"


def ranking_table(
    ranked: Priced,
    entries: Sequence[Row],
    *,
    families: Sequence[Sequence[int]] = (),
    names: Sequence[str] = (),
    wide: bool = False,
    terminal: int = 0,
    intervals: bool = True,
) -> Table:
    """The entries with these columns, or those of a narrow or `wide` table; the shortest step is marked, if not #1's.

    families: places of rows that the entries stand for, too. terminal: characters of a line of the terminal, where bars
    are drawn if they fit; 0 for none. intervals: whether the ends of each step's are known, for which it is priced
    again.
    """
    problem, narrow = ranked.problem, not (names or wide)
    framework, limit_bytes = problem.framework, memory_limit_bytes(problem.machine.accelerator)
    found = _rows(ranked, entries, families, limit_bytes, intervals=intervals)
    axes, equal = shown_axes(problem), list[str]()
    if narrow and len(found) > 1:
        alone = [axis for axis in axes if framework.names or axis not in AXES]
        equal = [axis for axis in alone if len({row[axis] for row in found}) == 1][: len(axes) - 1]
        axes = [axis for axis in axes if axis not in equal]
    label, rows = shown_rows(found, framework, axes)
    outer, said = f",{framework.called('pipeline')}", [f"{framework.called(axis)} {found[0][axis]}" for axis in equal]
    orders = [row["wide_order"] or "" for row in rows]
    if (
        narrow
        and framework.permuted
        and any(outer in one for one in orders)
        and all(one.partition(outer)[2] == "" for one in orders)
    ):
        rows = [{**row, "wide_order": row["wide_order"] and row["wide_order"].removesuffix(outer)} for row in rows]
        said.append(f"{framework.called('pipeline')} outermost")
    others = {f"rank_{cost}": rank_column(cost) for cost in ranked.others}
    grid, context = replace(COLUMNS["grid"], label=label), framework.called("context")
    columns = {
        **TEXT_COLUMNS,
        **{one.key: one for one in axis_columns(framework, shown_axes(problem))},
        "rank": replace(COLUMNS["marked_rank"], title=COLUMNS["rank"].label),
        "grid": grid,
        "layout": grid,
        "alike": words("alike", f"or\n{context}"),
        "memory": replace(COLUMNS["memory_bytes"], title=f"memory,\n≤ {limit_bytes / GIB:.1f}\nGiB"),
        **others,
        "rejected_because": COLUMNS["rejected_because"],
    }
    notes = []
    if any(row["alike"] for row in found):
        replicas = framework.called("data")
        notes.append(
            f"or {context}: the same layout with this {context}, as many times the micro-batch and as few {replicas}; "
            "its step is within model error. --unfold lists each."
        )
    table = Table(
        columns,
        rows,
        names or default_columns(ranked, entries, wide=wide, folded=any(row["alike"] for row in found)),
        (
            *(*CONFIG_FIELDS, "memory_limit_bytes", *others, "rejected_because", *training_names(problem)),
            *(["precision"] if problem.formats else []),
            *framework.layout(dict.fromkeys((*problem.axes, "chunks"), 1) if framework.names else {}),
        ),
        best=0 if entries and isinstance(entries[0], PricedLayout) else None,
        title=priced_remark(ranked),
        notes=notes,
    )
    return _with_bars(_narrowed(table, said, rank_by=problem.rank_by, width=terminal) if narrow else table, terminal)


def _narrowed(table: Table, said: Sequence[str], *, rank_by: RankBy, width: int) -> Table:
    """The columns that fit, without those that all rows have alike, which the title says with what is said already."""
    if all(row.get("shortest_step_s") == row.get("iteration_s") for row in table.rows):
        # A repetition of the step, which a remark says.
        table = replace(table, names=[name for name in table.names if name != "shortest_step_s"])
    whole = table.without_equal(_SETTINGS, said)
    options = [name for name in _OPTIONS if name in whole.names]
    alike = [name for name in options if whole.most_alike(name) > len(table.rows) / 2]
    total = ["communication_s"] * (rank_by != "communication")
    spare = (*_SPARE[0], *total, *alike, *_SPARE[1], *options, "mfu")
    found = whole.fitted(spare, aside="rejected_because", width=width)
    gone = [table.columns[name].short for name in whole.names if name not in found.names]
    if not gone:
        return found
    return replace(found, notes=[*table.notes, f"No room for {', '.join(gone)}: --wide shows all."])


def _rows(
    ranked: Priced,
    entries: Sequence[Row],
    families: Sequence[Sequence[int]],
    limit_bytes: float,
    *,
    intervals: bool,
) -> list[Json]:
    """The entries as configurations of the contract, with what tables need beside."""
    best = ranked.fastest_elsewhere()
    folded = {one[0] + 1: ",".join(str(ranked[place].grid.context) for place in one[1:]) for one in families}
    # In CSV with its fraction of a byte, as it always was.
    return [
        {
            **entry_json(entry, ranked, **({} if intervals else {"low_s": None, "high_s": None})),
            "memory_bytes": entry.memory_bytes,
            "memory_limit_bytes": limit_bytes,
            "shortest": same_step(entry, best),
            "alike": folded.get(entry.rank or 0, "") if isinstance(entry, PricedLayout) else "",
            "context_exchange": None if isinstance(entry, Rejected) else entry.context_exchange,
            "dispatcher": None if isinstance(entry, Rejected) else entry.dispatcher,
            "expert_overlap": None if isinstance(entry, Rejected) else entry.expert_overlap,
            "recompute_layers": None if isinstance(entry, Rejected) else entry.recompute_layers,
        }
        for entry in entries
    ]


def _with_bars(table: Table, terminal: int) -> Table:
    """With a bar of computation, bubble and exposed communication on the right, where a terminal has room for it."""
    longest_s = max((row["iteration_s"] for row in table.rows if row["iteration_s"]), default=0.0)
    length = min(terminal - table.width - 2, _MOST_BAR) if terminal else 0
    if length < _LEAST_BAR or not longest_s or "rejected_because" in table.names:
        return table
    rows = [{**row, "bar": _bar(row, length / longest_s)} for row in table.rows]
    column = words("bar", "bar", title=f"{colored('█', BLUE)} compute\n{colored('░', YELLOW)} exposed")
    return replace(table, columns={**table.columns, "bar": column}, rows=rows, names=[*table.names, "bar"])


def _bar(row: Mapping[str, Any], per_s: float) -> str:
    """A step as coloured characters, `per_s` per second; every nonzero part is visible."""
    parts = ((row["compute_s"], "█", BLUE), (row["bubble_s"], "·", ""), (row["exposed_communication_s"], "░", YELLOW))
    shown = ((seconds or 0.0, character, color) for seconds, character, color in parts)
    return "".join(colored(character * math.ceil(seconds * per_s - 0.5), color) for seconds, character, color in shown)


def with_shortest(ranked: Priced, entries: Sequence[Row]) -> tuple[Row, ...]:
    """The ranked entries, below them the one with the shortest step of all where that is none of them, the rejected."""
    best = ranked.fastest_elsewhere()
    if best is None or any(same_step(entry, best) for entry in entries):
        return tuple(entries)
    count = sum(isinstance(entry, PricedLayout) for entry in entries)
    return (*entries[:count], best, *entries[count:])


def same_step(entry: Row, other: PricedLayout | None) -> bool:
    """Whether both are one candidate, at whatever rank."""
    if other is None or isinstance(entry, Rejected):
        return False
    return (entry.layout, entry.communication_s) == (other.layout, other.communication_s)


def rank_column(cost: str) -> Column:
    """Ranks by another cost model."""
    title = "rank by\n" + cost.replace("-", "-\n", 1)
    return count(f"rank_{cost}", f"rank by\n{cost}", f"Place by --cost {cost}.", title=title)


def default_columns(ranked: Priced, entries: Sequence[Row], *, wide: bool = False, folded: bool = False) -> list[str]:
    """Names of the columns shown unless others are asked for."""
    problem, framework = ranked.problem, ranked.problem.framework
    rejected = any(isinstance(entry, Rejected) for entry in entries)
    own = framework.step.context_exchange
    shown = {
        "rank": True,
        "grid": True,
        "alike": folded,
        "order": wide or framework.permuted,
        **dict.fromkeys(("micro_batch", "recompute"), True),
        "recompute_layers": any(getattr(one, "recompute_layers", None) for one in entries),
        "kept_layers": True,
        "precision": bool(problem.formats),
        "context_exchange": any(getattr(one, "context_exchange", None) not in (None, own) for one in entries),
        "dispatcher": any(getattr(one, "dispatcher", None) for one in entries),
        "expert_overlap": any(getattr(one, "expert_overlap", False) for one in entries),
        **dict.fromkeys(("tokens_per_s_per_gpu", "mfu"), True),
        "hfu": wide,
        "logged_tflops_per_gpu": framework.logged is not None,
        "communication_s": True,
        "exposed_communication_s": True,
        "compute_s": wide,
        "bubble_s": problem.pipeline,
        "step": True,
        "shortest_step_s": problem.rank_by != "iteration" and ranked.cost == ALPHA_BETA,
        "memory": True,
        **dict.fromkeys(TRAINING, problem.tokens_total is not None),
        **dict.fromkeys((f"rank_{cost}" for cost in ranked.others), True),
        "rejected_because": rejected,
    }
    return [name for name, is_shown in shown.items() if is_shown]


TRAINING = ("gpu_hours", "node_hours", "days", "days_interval")
"""Columns of a whole training run."""


def training_fields(job: Job, entry: PricedLayout | None) -> Json:
    """Cost of a training run on the given tokens, steps only, with its 80% interval; None: of an infeasible grid."""
    if job.tokens_total is None:
        return {}
    gpus = entry.grid.world if entry else 1
    steps = math.ceil(job.tokens_total / step_tokens(job.workload))
    nodes = math.ceil(gpus / job.machine.launcher.ranks_per_node)
    per = {"gpu_hours": gpus / _HOUR_S, "node_hours": nodes / _HOUR_S, "days": 1.0 / (24.0 * _HOUR_S)}
    ends = dict.fromkeys(("", "_low", "_high"))
    if entry is not None:
        ends = {"": entry.iteration_s, "_low": entry.low_s, "_high": entry.high_s}
    found: Json = {"tokens_total": job.tokens_total, "steps": steps}
    for name, a_second in per.items():
        found |= {name + end: None if time_s is None else steps * time_s * a_second for end, time_s in ends.items()}
    return found


def training_names(problem: Problem) -> tuple[str, ...]:
    """Fields of a whole training in CSV, if its tokens are said."""
    return tuple(training_fields(problem, None))


def training_words(job: Job, found: Json) -> str:
    """The same in a sentence; empty without tokens."""
    if not found.get("days"):
        return ""
    shown = (
        ("gpu_hours", "GPU-hours", show_count),
        ("node_hours", "node-hours", show_count),
        ("days", "days", show_days),
    )
    parts = [
        f"{show(found[name])} {words} (80%: {show(found[f'{name}_low'])} to {show(found[f'{name}_high'])})"
        for name, words, show in shown
    ]
    return f"{show_count(job.tokens_total or 0)} tokens are {found['steps']:,} steps: {', '.join(parts)}."


def show_days(value: float) -> str:
    """Days of a training for a person."""
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"


def shown_rows(configs: Sequence[Json], framework: Framework, axes: Sequence[str]) -> tuple[str, list[Json]]:
    """Configurations of the contract, or none where nothing is feasible, as tables show them; the label of layouts.

    Cells of the layout are made of several numbers, aligned over all rows below the framework's names of its axes.
    """
    called = map(framework.called, axes)
    parts = [_BROKEN.get(name, name.replace("_", "_\n")).split("\n") for name in called]
    height = max(map(len, parts), default=0)
    heads = zip(*([*[""] * (height - len(lines)), *lines] for lines in parts), strict=True)
    aligned = aligned_cells([*heads, *([_plain(config.get(axis)) for axis in axes] for config in configs)])
    rows = [
        {**shown_row(config, framework), "grid": grid, "marked_rank": mark}
        for config, grid, mark in zip(configs, aligned[height:], _marks(configs), strict=True)
    ]
    return "\n".join(["layout" if framework.names else "grid", *aligned[:height]]), rows


def shown_row(config: Json, framework: Framework) -> Json:
    """A configuration of the contract with the cells of tables."""
    axes = [axis for axis in (config.get("order") or "").split(",") if axis]
    order = [axis for axis in axes if config[axis] > 1] or axes
    return {
        **config,
        **(config.get("layout") or {} if framework.names else {}),
        **{f"rank_{cost}": rank for cost, rank in (config.get("ranks") or {}).items()},
        "layout": layout_words(config.get("layout") or {}),
        "expert_overlap": {True: "yes"}.get(config.get("expert_overlap", False)),
        "wide_order": ",".join(map(framework.called, order)) or None,
        "days_interval": days_interval(config),
        "rejected_because": "; ".join(config.get("rejected_because", [])),
    }


def days_interval(config: Json) -> str | None:
    """80% interval of the days of a training."""
    low, high = config.get("days_low"), config.get("days_high")
    return None if low is None or high is None else f"{show_days(low)} to {show_days(high)}"


def layout_words(layout: Mapping[str, int]) -> str:
    """Sizes above 1: `TP=4 DP=64`."""
    return " ".join(f"{name}={size}" for name, size in layout.items() if size > 1) or "one GPU"


def is_tied(config: Json) -> bool:
    """Whether this configuration is within model error of the first."""
    return bool(config.get("tie")) and (config.get("rank") or 1) > 1


def _marks(configs: Sequence[Json]) -> list[str | None]:
    """Ranks with their marks, each with a place of its own where any row has it."""
    marked: list[tuple[Callable[[Json], bool], str]] = [
        (is_tied, TIED),
        (lambda config: bool(config.get("shortest")), SHORTEST),
        (lambda config: bool(config.get("outside_evidence")), OUTSIDE),
    ]
    used = [(has, mark) for has, mark in marked if any(map(has, configs))]
    found = []
    for config in configs:
        rank, marks = config.get("rank"), "".join(mark if has(config) else " " for has, mark in used)
        found.append(f"{rank or ''}{f' {marks}' if used else ''}" if rank or config.get("shortest") else None)
    return found


def shown_axes(problem: Problem) -> list[str]:
    """Axes and chunks in a table: those of the framework that were searched."""
    searched = (*problem.axes, *(["chunks"] if problem.pipeline else []))
    return [axis for axis in problem.framework.columns if axis in searched]


def page_axes(framework: Framework, configs: Iterable[Json]) -> list[str]:
    """Axes that a page shows, and chunks: of those that not every search has, the ones used; of experts any."""
    used = {
        axis
        for one in configs
        for axis in framework.expert_columns
        if (one.get(axis) or 1) > 1 or (axis in EXPERT_AXES and axis in one)
    }
    return [axis for axis in framework.expert_columns if axis in (*AXES, *used)]


def axis_columns(framework: Framework, axes: Sequence[str]) -> list[Column]:
    """A column for each, headed by the framework's name of it."""
    return [replace(COLUMNS[axis], label=framework.called(axis)) for axis in axes]


def framework_of(document: Json) -> Framework:
    """The framework of a document of results, with its step; of those that do not say, the bundled runtime."""
    changed = {name: tuple(one) if isinstance(one, list) else one for name, one in document.get("step", {}).items()}
    return find_framework(document.get("framework") or AXONN_TUNE.name).with_step(**changed)


def machine_words(problem: Problem) -> str:
    """Its name and accelerator, and that nobody named it."""
    assumed = "; assumed, no --machine" if problem.machine_assumed else ""
    return f"{problem.machine.name} ({problem.machine.accelerator.name}{assumed})"


def with_framework(framework: Framework) -> str:
    """` with Megatron-Core`; nothing for the bundled runtime."""
    return f" with {framework.title}" if framework.software else ""


def _plain(value: object) -> str:
    return NOTHING if value is None else str(value)


_MORE_AXES = tuple(axis for axis in RANK_AXES if axis not in (*AXES, "pipeline"))

CONFIG_FIELDS = (
    *("rank", *AXES, "order", "feasible", "tie", "micro_batch", "grad_accumulation", "recompute", "kept_layers"),
    *("communication_s", "exposed_communication_s", "compute_s", "iteration_s", "low_s", "high_s", "tokens_per_s"),
    *("mfu", "hfu", "memory_bytes", "framework", *_MORE_AXES, "pipeline", "chunks", "bubble_s", "shortest_step_s"),
    *("layout", "tokens_per_s_per_gpu", "logged_tflops_per_gpu", "recompute_layers", *EXPERT_AXES, "dispatcher"),
    "expert_overlap",
)
"""CSV fields of a configuration."""
_COLUMNS = (
    count("rank", "rank", "Place in the ranking; none for a rejected grid."),
    Column("marked_rank", "rank", show=str),
    count("x", "x", "Ranks that split the output of a layer."),
    count("y", "y", "Ranks that split its input."),
    count("z", "z", "Ranks that split the batch and the stored weights."),
    count("data", "data", "Replicas, which split the batch alone."),
    count("context", "context", "Ranks that split the sequence."),
    count("pipeline", "pipeline", "Pipeline stages."),
    count("expert", "expert", "Ranks that share the experts of a layer."),
    count("expert_tensor", "expert\ntensor", "Ranks that split each expert."),
    count("expert_z", "expert\nz", "Ranks that shard the stored weights of each expert."),
    Column("grid", "grid\nx y z data", show=str),
    words("wide_order", "rank\norder", "Axes from the fastest-varying rank outwards.", 12),
    words("order", "rank order", "Every axis, as a command needs it.", hidden=True),
    count("micro_batch", "micro\u00adbatch", "Sequences one rank processes at a time.", title="micro-\nbatch"),
    count("grad_accumulation", "grad.\naccum.", "Gradient accumulation steps."),
    words("recompute", "recompute", "Activation recomputation (checkpointing).", 10),
    count(
        "recompute_layers",
        "recomputed\nlayers",
        "Layers of each chunk that recompute, the first ones; all of them without a number.",
        title="recom\u00adputed\nlayers",
    ),
    count(
        "kept_layers",
        "layers not\nresharded",
        "Layers not resharded after forward (FSDP2).",
        title="not re\u00adsharded",
    ),
    words("precision", "format", "Number format of linear layers and experts.", 13),
    words("context_exchange", "exchange", "How attention gets keys and values of other ranks of context.", 14),
    words("dispatcher", "dispatcher", "How tokens reach their experts.", 14, title="dis\u00adpatcher"),
    words(
        "expert_overlap",
        "EP overlap",
        "Whether dispatch and combine overlap with computation of another micro-batch.",
        title="EP over\u00adlap",
    ),
    Column(
        "communication_s",
        "communi\u00adcation, s",
        "All collectives of a step and rank, overlapped or not.",
        title="comm.,\ns",
    ),
    Column(
        "exposed_communication_s",
        "exposed, s",
        "Communication not overlapped with computation.",
        title="ex-\nposed,\ns",
    ),
    Column("compute_s", "compute, s", "Computation of a step and rank."),
    count("chunks", "chunks", "Chunks of a pipeline stage (interleaving)."),
    Column("bubble_s", "bubble, s", "Time a pipeline stage is idle."),
    Column("shortest_step_s", "best of grid, s", "Shortest step of its candidates.", title="best of\ngrid, s"),
    Column("iteration_s", "step, s", "One step, from start to end."),
    Column("low_s", "80% from, s", "Lower end of the 80% interval of the step."),
    Column("high_s", "80% to, s", "Upper end of the 80% interval of the step."),
    count("tokens_per_s", "tokens/s", "Tokens of all GPUs together."),
    count("tokens_per_s_per_gpu", "tokens/s/GPU", "Tokens of one GPU.", title="tokens\n/s/GPU"),
    Column("mfu", "MFU, %", "Model FLOPs over the peak; recompute not counted.", per=PERCENT, decimals=1),
    Column("hfu", "HFU, %", "The same with recompute and padding.", per=PERCENT, decimals=1),
    Column(
        "logged_tflops_per_gpu",
        "TFLOP/s/GPU of the log",
        "What the framework's own log prints, by its own count of FLOPs.",
        decimals=1,
        title="TFLOP/s\n/GPU,\nlog",
    ),
    Column(
        "memory_bytes",
        "memory, GiB",
        "Peak of one GPU; for a grid that does not fit, the least it needs.",
        per=GIB,
        show=lambda size_bytes: f"{size_bytes / GIB:.1f}",
    ),
    Column("gpu_hours", "GPU-hours", "Of the whole training run.", title="GPU-\nhours", show=show_count),
    Column("node_hours", "node-hours", "Of the whole training run.", title="node-\nhours", show=show_count),
    Column("days", "days", "Of the whole training run.", show=show_days),
    Column("days_interval", "days, 80%", "80% interval of the days.", show=str),
    Column("tie", "within\nmodel\nerror", show=lambda tie: "yes" if tie else NOTHING),
    words("state", "state", "Feasible, within model error of the first, or why it is rejected.", 24),
    words("rejected_because", "rejected because", "Violated constraints.", 60),
)
COLUMNS = {column.key: column for column in _COLUMNS}
"""Columns of a configuration by key."""
_OF_PAGES = {*AXES, "context", "pipeline", "wide_order", "memory_bytes", "state", "rejected_because", "marked_rank"}
TEXT_COLUMNS = {
    **{key: column for key, column in COLUMNS.items() if key not in _OF_PAGES},
    "step": COLUMNS["iteration_s"],
    "recompute": replace(COLUMNS["recompute"], title="recom\u00adpute"),
    "order": COLUMNS["wide_order"],
    "memory": COLUMNS["memory_bytes"],
}
"""Columns of a table by the names of --columns."""


_COLLECTIVE = (
    count("number", "no."),
    words("op", "collective", "all_gather, reduce_scatter or all_reduce.", 14),
    words("axis", "axis", "Axis of the grid whose ranks take part.", 7),
    words("phase", "phase", "Part of the step.", 10),
    words("layer", "layer", "Layer it belongs to.", 15),
    words("call", "collective"),
    count("group", "ranks", "Ranks that take part."),
    count("count", "calls", "Calls per step and rank."),
    Column("seconds", "all calls, s", "Time of all calls of a step and rank: calls × (fixed + bytes / algbw)."),
    Column("exposed_s", "exposed, s", "The part not overlapped: computation waits for it."),
    Column("bytes", "buffer, MiB", "Full (gathered or reduced) buffer of one call.", per=2**20, show=show_bytes),
    words("formula", "full buffer, bytes", "Elements and bytes of that buffer, symbols as in explain.", 22),
    words("tier", "network", "Outermost network level it crosses.", 11),
    words("algorithm", "algorithm", "Algorithm and protocol the library is predicted to choose.", 18),
    Column("latency_s", "fixed, µs", "Time of a call without data.", per=MICRO, decimals=1),
    Column("bandwidth_bytes_per_s", "algbw, GB/s", "Bytes of the buffer per second beyond that.", per=GB, decimals=2),
    Column(
        "bus_bandwidth_bytes_per_s",
        "busbw, GB/s",
        "The same as nccl-tests converts it: what a link carries.",
        per=GB,
        decimals=2,
    ),
    words("overlapped_with", "overlapped with"),
)
COLLECTIVE = {column.key: column for column in _COLLECTIVE}
"""Columns of a collective by key."""


def ranking_document(
    inputs: Inputs, ranked: Priced, entries: Sequence[Row], *, marked: int = 0, known: int = 0
) -> Json:
    """The whole document; entries include terms if they were listed with them.

    marked: rows from the first on that remarks are about, 0 for all; known: those with the ends of their intervals, for
    which each is priced again, 0 for all.
    """
    problem, best = ranked.problem, ranked.fastest_elsewhere()
    logged = problem.framework.logged
    listed = sum(isinstance(entry, PricedLayout) for entry in entries)
    remarks = (priced_remark(ranked), *ranking_remarks(ranked, places=range(min(marked or listed, listed))))
    ends = [{} if place < known or not known else {"low_s": None, "high_s": None} for place in range(len(entries))]
    return {
        **document_head(RANKING_SCHEMA, inputs),
        "cost": ranked.cost,
        "rank_by": problem.rank_by,
        "memory_limit_bytes": memory_limit_bytes(problem.machine.accelerator),
        "mfu_convention": MFU_CONVENTION,
        "logged_convention": None if logged is None else fields_of(logged, _LOGGED),
        "searched": fields_of(ranked.searched, ("grids", "candidates", "feasible", "unlisted", "rejected", "seconds")),
        **({"interrupted": True} if ranked.interrupted else {}),
        "ties_with_first": ranked.ties,
        # Without the mark of a row that documents and pages have under a key of its own.
        "verdict": [line.removeprefix(f"{SHORTEST} ") for line in ranking_verdict(ranked)],
        "remarks": [line.removeprefix(f"{SHORTEST} ") for line in remarks],
        "configs": [entry_json(entry, ranked, **own) for entry, own in zip(entries, ends, strict=True)],
        "shortest_step": None if best is None else entry_fields(best),
    }


def logged_words(entry: PricedLayout) -> str:
    """What the framework's own log will print, in a sentence; empty if it prints nothing of the kind."""
    job = entry.job
    count, peak = job.framework.logged, job.machine.accelerator.peak_tflops[job.gemm_format]
    tflops = entry.logged_tflops_per_gpu
    if count is None or tflops is None:
        return ""
    return (
        f"{count.log}'s log will print about {tflops:,.0f} TFLOP/s per GPU ({count.label}), {tflops / peak:.1%} of "
        f"peak: it counts {count.counts}."
    )


def document_head(schema: str, inputs: Inputs) -> Json:
    """Common first keys of documents of one problem."""
    problem = inputs.problem
    return {
        "schema": schema,
        "tool_version": VERSION,
        "gpus": problem.gpus,
        "framework": problem.framework.name,
        **({"step": changed} if (changed := step_changes(problem.framework)) else {}),
        "model": origin(inputs.model),
        "machine": origin(inputs.machine),
        **({"machine_assumed": True} if problem.machine_assumed else {}),
        "workload": problem.workload.model_dump(mode="json", by_alias=True),
        **({} if problem.gemm_format == problem.workload.precision else {"gemm_format": problem.gemm_format}),
    }


def origin(loaded: Loaded[Any]) -> Json:
    """A document with all its keys, and the file and hash it came from; what follows from replaced values, if any."""
    assumed = told(loaded.consequences, kept=False)
    return {
        **loaded.document.model_dump(mode="json", by_alias=True),
        **({"assumed": assumed} if assumed else {}),
        "path": str(loaded.path),
        "sha256": loaded.sha256,
    }


def entry_json(entry: Row, ranked: Priced, **own: None) -> Json:
    """One config of the contract; own: what is left out."""
    problem = ranked.problem
    found = entry_fields(entry, **own) if isinstance(entry, PricedLayout) else _rejected_fields(entry, problem)
    if ranked.others:
        sizes = tuple(found[axis] for axis in problem.axes)
        found["ranks"] = {cost: ranks.get(sizes) for cost, ranks in ranked.others.items()}
    return {**found, "terms": [term_json(term) for term in entry.terms]}


_ENTRY = (
    *("rank", *AXES, "order", "feasible", "rejected_because", "micro_batch", "grad_accumulation", "recompute"),
    *("kept_layers", "overlap", "communication_s", "exposed_communication_s", "compute_s", "iteration_s"),
    *("memory_bytes", "tokens_per_s", "low_s", "high_s", "mfu", "hfu", "tie", "framework", *_MORE_AXES),
    *("pipeline", "chunks", "bubble_s", "shortest_step_s", "stages", "outside_evidence"),
    *("tokens_per_s_per_gpu", "logged_tflops_per_gpu"),
)
_STAGE = ("blocks", "compute_s", "communication_s", "bubble_s", "memory_bytes")
_TERM = ("op", "axis", "phase", "layer", "count", "bytes", "group", "tier", "seconds", "exposed_s", "formula")
_LOGGED = ("log", "label", "counts", "scores", "weights", "source")
_LINE = ("algorithm", "protocol", "latency_s", "bandwidth_bytes_per_s")


def entry_fields(entry: PricedLayout, **own: None) -> Json:
    """One config of the contract, without its terms; own: what is left out."""
    job, sizes = entry.job, _had(entry.job.framework, entry.grid.by_axis)
    found = fields_of(
        entry,
        (*_ENTRY, "layout"),
        **sizes,
        **own,
        order=",".join(entry.order),
        feasible=True,
        rejected_because=[],
        outside_evidence=list(entry.outside),
        grad_accumulation=entry.accumulation,
        overlap=list(job.workload.overlaps),
        layout=job.framework.layout({**sizes, "chunks": entry.chunks}),
        memory_bytes=int(entry.memory_bytes),
        tokens_per_s_per_gpu=entry.tokens_per_s / entry.grid.world,
        stages=[fields_of(stage, _STAGE, memory_bytes=int(stage.memory.total_bytes)) for stage in entry.stages],
    )
    found |= {axis: sizes[axis] for axis in EXPERT_AXES if axis in sizes}
    if entry.recompute_layers is not None:
        found["recompute_layers"] = entry.recompute_layers
    if entry.parts is not None:
        # Imported here: most searches are given no layout, and start-up time is theirs.
        from axonn_tune.stages import layout_text

        found["pipeline_layout"] = layout_text(entry.parts, mtp=job.model.mtp_layers, mtp_part=entry.mtp_part)
    if entry.context_exchange:
        found["context_exchange"] = entry.context_exchange
    if entry.dispatcher:
        found["dispatcher"] = entry.dispatcher
    if job.formats:
        found["precision"] = job.workload.precision
    if entry.dispatcher and job.framework.overlaps_experts:
        found["expert_overlap"] = entry.expert_overlap
    return found | training_fields(job, entry)


def _had(framework: Framework, sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes of axes without those of experts that it has none of."""
    return {axis: size for axis, size in sizes.items() if axis in RANK_AXES or axis in framework.axes}


def _rejected_fields(one: Rejected, problem: Problem) -> Json:
    """A rejected grid of the contract: what is unknown of it is None."""
    sizes = _had(problem.framework, dict.fromkeys(ALL_AXES, 1) | one.sizes)
    rest = {
        **{"chunks": 1, "overlap": list(problem.workload.overlaps), "framework": problem.framework.name},
        **{"stages": [], "outside_evidence": [], "tie": False, **sizes},
        "layout": problem.framework.layout({**sizes, "chunks": 1}),
        "memory_bytes": None if one.needed_bytes is None else int(one.needed_bytes),
        **training_fields(problem, None),
    }
    found = dict.fromkeys((*_ENTRY, "layout")) | rest if one.priced is None else entry_fields(one.priced)
    reasons = [f"{name}: {message}" for name, message in one.reasons]
    return found | {
        "order": ",".join(one.order) if one.order else None,
        "feasible": False,
        "rejected_because": reasons,
        "communication_s": one.communication_s,
    }


def term_json(term: Term) -> Json:
    """One term of the contract, and how it was priced."""
    exposed_s = None if math.isnan(term.exposed_s) else term.exposed_s
    return {
        **fields_of(term, _TERM, bytes=int(term.bytes), exposed_s=exposed_s),
        **fields_of(term.line, _LINE, protocol=term.line.protocol or None),
        "bus_bandwidth_bytes_per_s": bus_bytes(term.op, term.group, term.line.bandwidth_bytes_per_s),
    }


def term_row(term: Json, framework: Framework) -> Json:
    """A term of the contract as tables show it: algorithm and protocol as one, the axis by the framework's name."""
    algorithm = ", ".join(filter(None, (term["algorithm"], term["protocol"])))
    return {**term, "algorithm": algorithm, "axis": framework.called(term["axis"])}


def ranking_verdict(ranked: Priced) -> list[str]:
    """Which configuration to take and why, in those of the sentences below a table that say so."""
    remarks = (shortest_step_remark, why_first, ties_remark, training_remark)
    return [said for remark in remarks if (said := remark(ranked))]


def ranking_remarks(ranked: Priced, *, places: Sequence[int]) -> list[str]:
    """Sentences to print below a table, one each; places: of the rows that it shows, whose marks they explain."""
    said = [
        INTERRUPTED if ranked.interrupted else "",
        shortest_step_remark(ranked),
        stages_remark(ranked, places),
        nodes_remark(ranked.problem),
        context_remark(ranked.problem),
        kept_remark(ranked, places),
        training_remark(ranked),
        why_first(ranked),
        *formats_remarks(ranked),
        expert_overlap_remark(ranked),
        interval_remark(ranked),
        ties_remark(ranked),
        outside_remark(ranked, places),
        rejected_remark(ranked),
        searched_remark(ranked),
    ]
    return [sentence for sentence in said if sentence]


def stages_remark(ranked: Priced, places: Sequence[int]) -> str:
    """Pipeline layouts of the first rows whose stages are balanced by time; empty without any."""
    splits = {place: ranked[place].parts for place in places}
    named = [(place, parts) for place, parts in splits.items() if parts and parts != ranked.problem.parts][:_MOST_NAMED]
    if not named:
        return ""
    # Imported here: most searches balance no stages, and start-up time is theirs.
    from axonn_tune.stages import layout_text

    mtp, alike = ranked.problem.model.mtp_layers, dict[str, list[str]]()
    for place, parts in named:
        alike.setdefault(layout_text(parts, mtp=mtp), []).append(f"#{place + 1}")
    said = "; ".join(f"{', '.join(ranks)} {layout}" for layout, ranks in alike.items())
    return f"Stages balanced by time, with other numbers of layers: {said}."


def nodes_remark(problem: Problem) -> str:
    """That some node is not filled, as launchers and schedulers want; empty where all are."""
    per_node, gpus = problem.machine.launcher.ranks_per_node, problem.gpus
    if gpus % per_node == 0 or gpus < per_node:
        return ""
    return f"{gpus:,} GPUs do not fill nodes of {per_node}: scripts can be written for multiples of {per_node} only."


def context_remark(problem: Problem) -> str:
    """Frameworks with context parallelism, for long sequences in one without."""
    if "context" in problem.framework.axes or problem.workload.sequence_length < _LONG_CONTEXT:
        return ""
    others = [name for name, one in registry().items() if "context" in one.axes and one.launch]
    return (
        f"{problem.framework.title} has no context parallelism, which sequences of "
        f"{problem.workload.sequence_length:,} tokens may need: --framework {' or '.join(others)} has."
    )


def merged_remark(ranked: Priced, place: int) -> str:
    """Why a layout has no expert overlap although it was asked for; empty where it has, or was not asked for."""
    layout, called = ranked[place], ranked.problem.framework.called
    if not ranked.problem.request.expert_overlap or layout.expert_overlap:
        return ""
    reasons = (
        (layout.grid.expert == 1, f"{called('expert')} is 1"),
        (layout.dispatcher == "allgather", "all-gathers cannot overlap"),
        (True, f"recompute {layout.recompute} repeats experts"),
    )
    return f"--expert-overlap changes nothing here: {next(why for holds, why in reasons if holds)}."


def kept_remark(ranked: Priced, places: Sequence[int]) -> str:
    """That layers asked for not to be resharded are sharded in no row; empty where they are, or were not asked for."""
    kept = ranked.problem.request.kept_layers
    if not kept or not places or any(ranked[place].grid.z > 1 for place in places):
        return ""
    axis = ranked.problem.framework.called("z")
    return f"--kept-layers {kept} changes nothing here: {axis} is 1, so no layer is sharded."


def priced_remark(ranked: Priced) -> str:
    """Priced problem and ranking criterion."""
    problem, cost = ranked.problem, ranked.cost
    workload = problem.workload
    sequences, tokens = counted(workload.global_batch, "sequence"), counted(workload.sequence_length, "token")
    formats = ", ".join(problem.formats or (workload.precision,))
    said = (
        f"{problem.model.name} on {problem.gpus:,} × {machine_words(problem)}"
        f"{with_framework(problem.framework) or ' with the bundled 4D runtime'}, "
        f"{sequences} of {tokens} in {formats}{_overlap_words(problem)}; ranked by {RANKED_BY[problem.rank_by]}"
    )
    if cost == ALPHA_BETA:
        return f"{said}."
    return f"{said}, by --cost {cost}. Exposed communication, step and memory: by {ALPHA_BETA}, {_SAME_GRID}."


def formats_remarks(ranked: Priced) -> list[str]:
    """What the best layout of each number format saves, of time and memory, over that of the first that fits."""
    best = ranked.best_by_format
    if len(best) < 2:
        if not ranked.problem.formats or ranked.problem.framework.formats:
            return []
        others = ", ".join(name for name, one in registry().items() if len(one.formats) > 1)
        return [f"{ranked.problem.framework.title} is priced in bf16 alone; with formats: {others}."]
    (first, base), *others_best = best.items()
    said = [f"{first} at best: {show_seconds(base.iteration_s)} a step, {show_bytes(base.memory_bytes)}{_at(base)}."]
    for name, one in others_best:
        saved_s, saved_bytes = base.iteration_s - one.iteration_s, base.memory_bytes - one.memory_bytes
        said.append(
            f"{name} at best: {show_seconds(one.iteration_s)}, {abs(saved_s) / base.iteration_s:.1%} "
            f"{'less' if saved_s >= 0 else 'more'}; {show_bytes(one.memory_bytes)}, {show_bytes(abs(saved_bytes))} "
            f"{'less' if saved_bytes >= 0 else 'more'}{_at(one)}{', within model error' * (one.tie and base.tie)}."
        )
    quickest = min((one for _, one in others_best), key=lambda one: one.iteration_s)
    said.append("MFU is relative to the peak of each row's own format: compare formats by tokens/s/GPU.")
    return [*said, f"{f'#{quickest.rank}: ' if quickest.rank else ''}{format_words(quickest.detail)}"]


def _at(row: PricedLayout) -> str:
    """The place of a row that has one."""
    return f" (#{row.rank})" if row.rank else ""


def format_words(priced: Detail) -> str:
    """Why a step in a format below 16 bits takes less, or no less, than in BF16; empty in others."""
    workload = priced.job.workload
    if not workload.format:
        return ""
    job = replace(priced.job, workload=workload.model_copy(update={"precision": "bf16"}))
    plain = price(job, priced.layout)
    # On the same pipeline stage, whichever computes longest in BF16.
    (gemms_s, _), (own_s, quantizing_s) = quantization(replace(plain, computing=priced.computing)), quantization(priced)
    return (
        f"{workload.precision}: {show_seconds(priced.iteration_s)} a step, the same layout in bf16 "
        f"{show_seconds(plain.iteration_s)}. GEMMs take {show_seconds(own_s)} instead of {show_seconds(gemms_s)}, "
        f"quantization kernels with their launches {show_seconds(quantizing_s)}"
        f"{', no less than GEMMs save' if quantizing_s >= gemms_s - own_s else ''}."
    )


def expert_overlap_words(priced: Detail) -> str:
    """What a step would take without expert overlap; empty where it has none."""
    if not priced.expert_overlap:
        return ""
    apart = price(replace(priced.job, framework=priced.job.framework.with_step(expert_overlap=False)), priced.layout)
    more_bytes = priced.memory_bytes - apart.memory_bytes
    return (
        f"dispatch and combine overlap with computation of another micro-batch (--expert-overlap): "
        f"{show_seconds(priced.iteration_s)} a step, {show_seconds(apart.iteration_s)} without"
        f"{f', for {show_bytes(more_bytes)} more memory' if more_bytes else ''}."
    )


def expert_overlap_remark(ranked: Priced) -> str:
    """The same of the first layout, where the search chose it."""
    said = expert_overlap_words(ranked.detail(0)) if ranked.problem.compares_expert_overlap and len(ranked) else ""
    return f"#1: {said} --no-expert-overlap leaves it out." if said else ""


def _overlap_words(problem: Problem) -> str:
    """What of experts overlaps as asked."""
    step = problem.framework.step
    where = ", expert overlap where EP is above 1 and stages are interleaved or one"
    return where if step.expert_overlap else ", shared experts beside dispatch" if step.shared_expert_overlap else ""


def training_remark(ranked: Priced) -> str:
    """Cost of a whole training run with the first configuration."""
    problem = ranked.problem
    if problem.tokens_total is None or not len(ranked):
        return ""
    found = entry_fields(ranked[0])
    return f"#1: {training_words(problem, found)} Restarts, checkpoints and evaluation come on top."


def why_first(ranked: Priced) -> str:
    """Why the first configuration is faster than the next that is no twin of it, as one signed sum of causes."""
    rank_by, places = ranked.problem.rank_by, [family[0] for family in ranked.families(DEFAULT_TOP)]
    if len(ranked) < 2:
        pinned = " with these pins" if ranked.problem.request.axes else ""
        return f"Only one configuration{pinned} is feasible." if len(ranked) > ranked.searched.unlisted else ""
    rival = (*places, 1)[1]
    first, second = (ranked.with_terms(place) for place in (0, rival))
    name, attribute = METRICS[rank_by], PRICES[rank_by]
    less_s = getattr(second, attribute) - getattr(first, attribute)
    if less_s == 0.0:
        return f"#1 and #{rival + 1} have the same {name}; the shorter step decides, then less memory."
    if rank_by == "iteration":
        base, other = (step_parts(ranked.detail(place)) for place in (rival, 0))
    else:
        base, other = _collective_reasons(ranked.problem, first, second)
    apart_s = [other.get(key, ("", 0.0))[1] - base.get(key, ("", 0.0))[1] for key in {**base, **other}]
    worth_s = _TELLING * sum(map(abs, apart_s))
    found = separated(base, other, longer_s=-less_s, worth_s=worth_s, unseen_s=worth_s / 10.0)
    parts = [f"{'-' if more_s < 0 else '+'}{show_seconds(abs(more_s))} {what}" for what, more_s in found]
    return f"#1 vs. #{rival + 1}: -{show_seconds(less_s)} of {name} = {', '.join(parts)} (minus: #1 takes less)."


def _collective_reasons(problem: Problem, first: PricedLayout, second: PricedLayout) -> tuple[Parts, Parts]:
    """Communication of the second and the first by collective and axis, all or exposed."""
    exposed = problem.rank_by != "communication"
    sizes = [{(term.op, _axis_of(term)): term.group for term in entry.terms} for entry in (first, second)]

    def called(key: tuple[str, str]) -> str:
        groups = dict.fromkeys(str(of[key]) for of in sizes if key in of)
        words = f"{key[0]} over {problem.framework.called(key[1])} ({' vs. '.join(groups)} ranks)"
        return f"exposed {words}" if exposed else words

    second_s, first_s = (_by_axis(entry.terms, exposed=exposed) for entry in (second, first))
    return (
        {key: (called(key), seconds) for key, seconds in second_s.items()},
        {key: (called(key), seconds) for key, seconds in first_s.items()},
    )


def _axis_of(term: Term) -> str:
    """Axes of a collective without context, which holds shards or replicas as z or data do."""
    return term.axis.replace("context", "") or term.axis


def _by_axis(terms: tuple[Term, ...], *, exposed: bool) -> dict[tuple[str, str], float]:
    """Seconds by collective and axis."""
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for term in terms:
        sums[term.op, _axis_of(term)] += (term.exposed_s or 0.0) if exposed else term.seconds
    return sums


def ties_remark(ranked: Priced) -> str:
    """Number of configurations within model error of the first, and which to benchmark: one of each family."""
    ties = ranked.ties
    if ties < 2:
        return ""
    machine = ranked.problem.machine
    known = f"communication ±{machine.uncertainty.communication:.0%}"
    if machine.learned is not None:
        known = "by what the profile has learned"
    else:
        own = f"each layout's step ±{DEVIATIONS * of_layout(ranked.problem.model):.0%}"
        known = f"{own}, exposed {known}" if ranked.problem.rank_by == "iteration" else f"{known}, {own}"
    last = ", the last that is listed," if ties == len(ranked) and ranked.searched.unlisted else ""
    apart = [family[0] + 1 for family in ranked.families(DEFAULT_TOP)[:_MOST_NAMED] if family[0] < ties]
    listed = [f"#{rank}" for rank in apart]
    whom = " and ".join(filter(None, (", ".join(listed[:-1]), listed[-1])))
    if ties <= _MOST_NAMED:
        benchmark = "" if len(apart) < 2 else f": benchmark {'both' if len(apart) == ties == 2 else whom}"
        alike = " and ".join(f"#{rank}" for rank in (1, ties)) if ties == 2 else f"#1 to #{ties}"
        return f"{TIED}: {alike}{last} are within model error ({known}){benchmark}."
    benchmark = f": benchmark {whom} first" if len(apart) > 1 else ""
    return f"{TIED}: #2 to #{ties:,}{last} are within model error of #1 ({known}){benchmark}."


def interval_remark(ranked: Priced) -> str:
    """#1's step with its 80% interval and what of that is its own; MFU, throughput, and the log's number."""
    first = ranked[0] if len(ranked) else None
    if first is None:
        return ""
    machine = ranked.problem.machine
    own_s = own_bound_s(ranked.problem, step_s=first.iteration_s, waiting_s=first.exposed_communication_s)
    own = f"±{show_seconds(own_s)}"
    if machine.learned is not None:
        apart = ranked.difference
        of = METRICS[ranked.problem.rank_by]
        own = "" if apart is None else f"±{apart:.1%} for the difference of #1 and #2 in {of}"
    said = f", of which {own} is its own and the rest common to all rows" if own else ", most of it common to all rows"
    logged = logged_words(first)
    return (
        f"#1: {show_seconds(first.iteration_s)} a step, 80% interval {show_seconds(first.low_s)} to "
        f"{show_seconds(first.high_s)}{said}; MFU {first.mfu:.1%}, "
        f"{first.tokens_per_s / first.grid.world:,.0f} tokens/s/GPU{f'. {logged}' if logged else '.'}"
    )


_SIZES = {"gpus": "number of GPUs", "sequence": "sequence length"}


def outside_remark(ranked: Priced, places: Sequence[int]) -> str:
    """What of these rows no published step validates, with the largest among those steps; "" without any."""
    problem = ranked.problem
    found = dict.fromkeys(name for place in places for name in outside(problem, ranked[place]))
    names = [name for name in found if name != ACCELERATOR]
    said = [
        f"largest {_SIZES.get(name) or problem.framework.called(name)} in the data: {LARGEST[name]:,}" for name in names
    ]
    if ACCELERATOR in found:
        said.append(f"{problem.machine.accelerator.name}: the data has {', '.join(map(str.capitalize, GENERATIONS))}")
    return f"{OUTSIDE}: outside what was validated ({'; '.join(said)})." if said else ""


def shortest_step_remark(ranked: Priced) -> str:
    """The candidate with the shortest step, and its gain over the first configuration."""
    problem = ranked.problem
    best = ranked.fastest() if len(ranked) and problem.rank_by != "iteration" else None
    if best is None:
        return ""
    first_s = ranked[0].iteration_s
    gain = 1.0 - best.iteration_s / first_s
    if best.iteration_s == first_s:
        return "#1 also has the shortest step of all."
    if gain < WORTH_SAYING:
        return f"#1's step is within {WORTH_SAYING:.0%} of the shortest of all, {show_seconds(best.iteration_s)}."
    rank = ranked.ranks().get(tuple(map(best.grid.axis_size, problem.axes)))
    grid = f"#{rank}'s grid" if rank else "another grid"
    cost = "" if ranked.cost == ALPHA_BETA else f"--cost {ALPHA_BETA} "
    return (
        f"{SHORTEST} Shortest step of all: {show_seconds(best.iteration_s)}, {gain:.0%} less than #1's "
        f"{show_seconds(first_s)}. It is {grid} with {_configuration(best, problem)}. {cost}--rank-by step ranks by it."
    )


def _configuration(entry: PricedLayout, problem: Problem) -> str:
    """`x=1 y=1 z=64 data=4, rank order z,data, micro-batch 2, recompute none`."""
    framework = problem.framework
    values = {axis: entry.grid.axis_size(axis) for axis in problem.axes}
    values |= {"chunks": entry.chunks} if problem.pipeline else {}
    sizes = " ".join(f"{name}={size}" for name, size in framework.layout(values).items())
    wide = [framework.called(axis) for axis in entry.order if entry.grid.axis_size(axis) > 1]
    order = [f"rank order {','.join(wide)}"] if len(wide) > 1 and framework.permuted else []
    return ", ".join([sizes, *order, f"micro-batch {entry.micro_batch}", f"recompute {entry.recomputed}"])


def rejected_remark(ranked: Priced) -> str:
    """Number of rejected grids by constraint."""
    found, problem = ranked.searched, ranked.problem
    left_out = found.grids - int(ranked.feasible.sum())
    if not left_out:
        return "The only grid is feasible." if found.grids == 1 else f"All {found.grids:,} grids are feasible."
    most_first = sorted(found.rejected.items(), key=lambda one: -one[1])
    called = _CONSTRAINTS | {one.name: f"with {one.brief(problem.framework)}" for one in ranked.grids.constraints}
    reasons = ", ".join(f"{number:,} {called.get(name, name)}" for name, number in most_first)
    several = " (a grid can break several)" if sum(found.rejected.values()) > left_out else ""
    of, are, them = counted(found.grids, "grid"), *(("is", "it") if left_out == 1 else ("are", "them"))
    return f"{left_out:,} of {of} {are} rejected: {reasons}{several}; --all lists {them}."


_CONSTRAINTS = {
    MEMORY: "out of memory",
    MICRO_BATCH: "without a micro-batch that divides the batch",
    CHUNKS: "without the chunks asked for",
    EXPERT_OVERLAP: "without room for expert overlap",
    PINNED: "other than pinned",
}


def searched_remark(ranked: Priced) -> str:
    """How much fits into memory of what was searched, and the time, on a line of its own."""
    found, variants = ranked.searched, ranked.problem.request.variants
    fit, of = "fits" if found.feasible == 1 else "fit", counted(found.candidates, "candidate" if variants else "grid")
    of = of if variants else f"{of} with micro-batch and rank order"
    what = "candidate" if variants else "layout" if ranked.problem.formats else "grid"
    more = f"{counted(found.unlisted, f'more {what}')} {'has' if found.unlisted == 1 else 'have'} no rank"
    rest = f" {more}: --top 0 ranks all." if found.unlisted else ""
    return f"{found.feasible:,} of {of} {fit}, searched in {show_seconds(found.seconds)}.{rest}"
