"""Rankings as tables, Markdown, CSV and JSON, with remarks.

JSON follows the contract `axonn-tune/ranking/1`. Keys may be added, never renamed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from axonn_tune.cost.collectives import Term, bus_bytes
from axonn_tune.cost.price import METRICS as PRICES
from axonn_tune.cost.price import PricedLayout
from axonn_tune.errors import BLUE, YELLOW
from axonn_tune.frameworks import step_changes
from axonn_tune.frameworks.description import Framework
from axonn_tune.frameworks.optimizers import ADAMW, optimizers
from axonn_tune.grid import ALL_AXES, AXES, EXPERT_AXES, RANK_AXES
from axonn_tune.program.memory import memory_limit_bytes, room_of
from axonn_tune.ranking.inputs import Inputs
from axonn_tune.ranking.priced import Priced, Rejected, Row
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
from axonn_tune.report.training import days_interval, show_days, training_columns, training_fields
from axonn_tune.request import ALPHA_BETA, RankBy
from axonn_tune.specs.catalog import Loaded
from axonn_tune.specs.numbers import told
from axonn_tune.units import GB, GIB, MICRO, show_bytes, show_count
from axonn_tune.vocabulary import VERSION

_OPTIONS = ("recompute_layers", "kept_layers", "context_exchange", "dispatcher", "expert_overlap", "pipeline_order")
"""Settings that most layouts have by default."""
_SETTINGS = ("order", "micro_batch", "recompute", *_OPTIONS, "precision", "bubble_s")
"""Columns that a narrow table leaves out where all rows have one value."""
_MULTIPLES = ("node_hours", "energy_mwh", "goodput", "gpu_hours", "tokens_per_s_per_gpu", "communication_s")
_PARTS = ("bubble_s", "exposed_communication_s")
"""Left out, in this order, of what is wider than a line all the same: multiples of the step or of its inverse, options
that most rows have alike, and where time goes; then other options."""
TIED, SHORTEST, OUTSIDE = "≈", "*", "°"
"""Mark what is within model error of the first, the shortest step of all, and what no published step validates."""
_LEGENDS = {
    TIED: f"{TIED} within model error of #1.",
    SHORTEST: f"{SHORTEST} shortest step of all.",
    OUTSIDE: f"{OUTSIDE} beyond what published steps validate.",
    "order": "Rank order: axes of adjacent ranks first.",
    "formats": "Without a rank: the best in another format. MFU: of each format's own peak.",
    "kept_layers": "Layers gathered: weights stay gathered from forward to backward (reshard_after_forward=False).",
}
"""Marks and columns that a title explains where they stand below it."""
_LEAST_BAR, _MOST_BAR = 10, 30
"""Characters of the bar of the longest step."""
RANKED_BY = {
    "communication": "communication per step, overlapped or not",
    "exposed": "exposed communication per step",
    "iteration": "step time",
}
METRICS = {"communication": "communication", "exposed": "exposed communication", "iteration": "step time"}
_SAME_GRID = "for the fastest candidate with the same grid and rank order"


def ranking_table(
    ranked: Priced,
    entries: Sequence[Row],
    *,
    names: Sequence[str] = (),
    wide: bool = False,
    terminal: int = 0,
    intervals: bool = True,
) -> Table:
    """The entries with these columns, or those of a narrow or `wide` table; the shortest step is marked, if not #1's.

    terminal: characters of a line of the terminal, where bars are drawn if they fit; 0 for none. intervals: whether the
    ends of each step's are known, for which it is priced again.
    """
    problem, narrow = ranked.problem, not (names or wide)
    framework, limit_bytes = problem.framework, memory_limit_bytes(problem.machine.accelerator)
    found = _rows(ranked, entries, limit_bytes, intervals=intervals)
    axes, equal = shown_axes(problem), dict[str, int]()
    if narrow:
        axes, equal = without_equal_axes(framework, axes, found)
    label, rows = shown_rows(found, framework, axes)
    outer, said = (
        f",{framework.called('pipeline')}",
        [f"{framework.called(axis)} {size}" for axis, size in equal.items()],
    )
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
    grid, memory = replace(COLUMNS["grid"], label=label), memory_columns(limit_bytes)
    columns = {
        **TEXT_COLUMNS,
        **{one.key: one for one in axis_columns(framework, shown_axes(problem))},
        "rank": replace(COLUMNS["marked_rank"], title=COLUMNS["rank"].label),
        "grid": grid,
        "layout": grid,
        **memory,
        **others,
        "rejected_because": COLUMNS["rejected_because"],
    }
    table = Table(
        columns,
        rows,
        names or default_columns(ranked, entries, wide=wide, tight=any(row["tight"] for row in rows)),
        (
            *(*CONFIG_FIELDS, "memory_limit_bytes", *others, "rejected_because", *training_fields(problem, None)),
            *(["precision"] if problem.formats else []),
            *(["pipeline_order"] if len(framework.schedule.orders) > 1 else []),
            *framework.layout(dict.fromkeys((*problem.axes, "chunks"), 1) if framework.names else {}),
        ),
        best=0 if entries and isinstance(entries[0], PricedLayout) else None,
        title=priced_remark(ranked),
    )
    table = _narrowed(table, said, rank_by=problem.rank_by, width=terminal) if narrow else table
    marks = [*"".join(row["marked_rank"] or "" for row in rows)]
    if problem.formats and len({row["precision"] for row in rows}) > 1:
        marks.append("formats")
    return _with_bars(explained(table, framework, (*axes, *equal, *marks)), terminal)


def without_equal_axes(
    framework: Framework, axes: Sequence[str], rows: Sequence[Json]
) -> tuple[list[str], dict[str, int]]:
    """Axes without those that have one size in all rows, in one row 1; and those with it, but for 1 of an odd name."""
    sizes = {axis: {row[axis] for row in rows} for axis in axes if framework.names or axis not in AXES}
    equal = [axis for axis, one in sizes.items() if len(one) == 1 and (len(rows) > 1 or one == {1})]
    equal = equal[: len(axes) - 1]
    told = {axis: rows[0][axis] for axis in equal if rows[0][axis] > 1 or axis not in framework.explained}
    return [axis for axis in axes if axis not in equal], told


def explained(table: Table, framework: Framework, shown: Iterable[str]) -> Table:
    """With words on marks, axes and columns that are not widely known, in the title; shown: axes and marks."""
    shown = {*table.names, *shown}
    legends = [said for name, said in {**_LEGENDS, **framework.explained}.items() if name in shown]
    about = "" if not legends else " " if "\n" in table.title else "\n"
    return replace(table, title=f"{table.title}{about}{' '.join(legends)}")


def _narrowed(table: Table, said: Sequence[str], *, rank_by: RankBy, width: int) -> Table:
    """The columns that fit, without those that all rows have alike, which the title says with what is said already."""
    whole = table.without_equal((*_SETTINGS, "tight"), said)
    options = [name for name in _OPTIONS if name in whole.names]
    alike = [name for name in options if whole.most_alike(name) > len(table.rows) / 2]
    mfu = ["mfu"] * ("logged_tflops_per_gpu" in whole.names)
    spare = [name for name in (*_MULTIPLES, *mfu, *alike, *_PARTS, *options) if name != PRICES[rank_by]]
    return whole.fitted(spare, aside="rejected_because", width=width)


def _rows(
    ranked: Priced,
    entries: Sequence[Row],
    limit_bytes: float,
    *,
    intervals: bool,
) -> list[Json]:
    """The entries as configurations of the contract, with what tables need beside."""
    best = ranked.fastest_elsewhere()
    # In CSV with its fraction of a byte, as it always was.
    return [
        {
            **entry_json(entry, ranked, **({} if intervals else {"low_s": None, "high_s": None})),
            "memory_bytes": entry.memory_bytes,
            "memory_limit_bytes": limit_bytes,
            "shortest": same_step(entry, best),
            **{name: getattr(entry, name, None) for name in _OPTIONS if name != "kept_layers"},
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
    return count(f"rank_{cost}", f"rank by\n{cost}", f"Place by --cost {cost}.")


def default_columns(ranked: Priced, entries: Sequence[Row], *, wide: bool = False, tight: bool = False) -> list[str]:
    """Names of the columns shown unless others are asked for."""
    problem, framework = ranked.problem, ranked.problem.framework
    rejected = any(isinstance(entry, Rejected) for entry in entries)
    own = framework.step.context_exchange
    shown = {
        "rank": True,
        "grid": True,
        "order": wide or framework.permuted,
        **dict.fromkeys(("micro_batch", "recompute"), True),
        "recompute_layers": any(getattr(one, "recompute_layers", None) for one in entries),
        "kept_layers": wide or any(one.layout.kept_layers for one in entries if isinstance(one, PricedLayout)),
        "precision": bool(problem.formats),
        "context_exchange": any(getattr(one, "context_exchange", None) not in (None, own) for one in entries),
        "dispatcher": any(getattr(one, "dispatcher", None) for one in entries),
        "expert_overlap": any(getattr(one, "expert_overlap", False) for one in entries),
        "pipeline_order": any(getattr(one, "pipeline_order", "1f1b") != "1f1b" for one in entries),
        **dict.fromkeys(("tokens_per_s_per_gpu", "mfu"), True),
        "hfu": wide,
        "logged_tflops_per_gpu": framework.logged is not None,
        "communication_s": wide or problem.rank_by == "communication",
        "exposed_communication_s": True,
        "compute_s": wide,
        "bubble_s": problem.pipeline,
        "step": True,
        "shortest_step_s": wide and problem.rank_by != "iteration" and ranked.cost == ALPHA_BETA,
        "memory": True,
        "tight": tight,
        **dict.fromkeys(training_columns(problem), True),
        **dict.fromkeys((f"rank_{cost}" for cost in ranked.others), True),
        "rejected_because": rejected,
    }
    return [name for name, is_shown in shown.items() if is_shown]


def shown_rows(configs: Sequence[Json], framework: Framework, axes: Sequence[str]) -> tuple[str, list[Json]]:
    """Configurations of the contract, or none where nothing is feasible, as tables show them; the label of layouts.

    Cells of the layout are made of several numbers, aligned over all rows below the framework's names of its axes.
    """
    called = map(framework.called, axes)
    parts = [name.split("_") for name in called]
    height = max(map(len, parts), default=0)
    heads = zip(*([*[""] * (height - len(lines)), *lines] for lines in parts), strict=True)
    aligned = aligned_cells([*heads, *([_plain(config.get(axis)) for axis in axes] for config in configs)])
    rows = [
        {**shown_row(config, framework), "grid": grid, "marked_rank": mark}
        for config, grid, mark in zip(configs, aligned[height:], _marks(configs), strict=True)
    ]
    return "\n".join(aligned[:height]), rows


def shown_row(config: Json, framework: Framework) -> Json:
    """A configuration of the contract with the cells of tables."""
    axes = [axis for axis in (config.get("order") or "").split(",") if axis]
    order = [axis for axis in axes if config[axis] > 1] or axes
    fits, limit_bytes = config.get("feasible"), config.get("memory_limit_bytes") or math.inf
    return {
        **config,
        **(config.get("layout") or {} if framework.names else {}),
        **{f"rank_{cost}": rank for cost, rank in (config.get("ranks") or {}).items()},
        "layout": layout_words(config.get("layout") or {}),
        "expert_overlap": {True: "yes"}.get(config.get("expert_overlap", False)),
        "some_layers": config.get("recompute_layers") or (None if config.get("recompute") in (None, "none") else "all"),
        "wide_order": ",".join(map(framework.called, order)) or None,
        "days_interval": days_interval(config),
        "tight": "tight" if fits and room_of(config["memory_bytes"], limit_bytes) == "tight" else "",
        "rejected_because": "; ".join(config.get("rejected_because", [])),
    }


def layout_words(layout: Mapping[str, int]) -> str:
    """Sizes above 1: `TP=4 DP=64`."""
    return " ".join(f"{name}={size}" for name, size in layout.items() if size > 1) or "one GPU"


def memory_columns(limit_bytes: float) -> dict[str, Column]:
    """The peak of a GPU, with what can be used of it in the heading, and whether that is tight."""
    title = f"memory\n≤ {limit_bytes / GIB:.1f}, GiB"
    return {"memory": replace(COLUMNS["memory_bytes"], title=title), "tight": words("tight", "memory", title="")}


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


def machine_words(problem: Problem) -> str:
    """Its name and accelerator, and that nobody named it."""
    assumed = "; assumed, no --machine" if problem.machine_assumed else ""
    return f"{problem.machine.name} ({problem.machine.accelerator.name}{assumed})"


def with_framework(framework: Framework) -> str:
    """` with Megatron-Core`; nothing for the bundled runtime."""
    return f" with {framework.title}" if framework.software else ""


def optimizer_words(framework: Framework) -> str:
    """`, optimizer Muon`; nothing for AdamW."""
    name = framework.step.optimizer
    return "" if name == ADAMW else f", optimizer {optimizers()[name].title}"


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
    count("rank", "rank", "Place in the ranking; none for a rejected layout."),
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
    count("micro_batch", "micro-batch", "Sequences one rank processes at a time.", title="micro\nbatch"),
    count("grad_accumulation", "accumulation\nsteps", "Gradient accumulation steps."),
    words("recompute", "recompute", "Activation recomputation (checkpointing).", 10),
    count(
        "recompute_layers",
        "recomputed\nlayers",
        "Layers of each chunk that recompute, the first ones; all of them without a number.",
    ),
    count(
        "kept_layers",
        "layers\ngathered",
        "Layers whose weights stay gathered from forward to backward (FSDP2's reshard_after_forward=False).",
    ),
    words("precision", "format", "Number format of linear layers and experts.", 13),
    words("context_exchange", "CP type", "How attention gets keys and values of other ranks of context.", 14),
    words("dispatcher", "dispatcher", "How tokens reach their experts.", 14, title="token\ndispatcher"),
    words(
        "expert_overlap",
        "EP overlap",
        "Whether dispatch and combine overlap with computation of another micro-batch.",
        title="EP\noverlap",
    ),
    words(
        "pipeline_order",
        "schedule",
        "Order of passes of pipeline stages; all but 1f1b split the backward pass.",
        title="pipeline\nschedule",
    ),
    Column(
        "communication_s",
        "communication, s",
        "All collectives of a step and rank, overlapped or not.",
        title="collectives, s",
    ),
    Column("exposed_communication_s", "exposed, s", "Communication that computation waits for."),
    Column("compute_s", "compute, s", "Computation of a step and rank."),
    count("chunks", "chunks", "Chunks of a pipeline stage (interleaving)."),
    Column("bubble_s", "bubble, s", "Time a pipeline stage is idle."),
    Column("shortest_step_s", "grid's shortest\nstep, s", "Shortest step of any micro-batch and recompute set on it."),
    Column("iteration_s", "step, s", "One step, from start to end."),
    Column("low_s", "80% from, s", "Lower end of the 80% interval of the step."),
    Column("high_s", "80% to, s", "Upper end of the 80% interval of the step."),
    count("tokens_per_s", "tokens/s", "Tokens of all GPUs together."),
    count("tokens_per_s_per_gpu", "tokens/s/GPU", "Tokens of one GPU.", title="tokens, /s/GPU"),
    Column("mfu", "MFU, %", "Model FLOPs over the peak; recompute not counted.", per=PERCENT, decimals=1),
    Column("hfu", "HFU, %", "The same with recompute and padding.", per=PERCENT, decimals=1),
    Column(
        "logged_tflops_per_gpu",
        "TFLOP/s/GPU in log",
        "What the framework's own log prints, by its own count of FLOPs.",
        decimals=0,
        title="TFLOP/s\nin log, /GPU",
    ),
    Column(
        "memory_bytes",
        "memory, GiB",
        "Peak of one GPU; for a layout that does not fit, the least it needs.",
        per=GIB,
        decimals=1,
    ),
    Column("gpu_hours", "GPU-hours", "Of the whole training run.", title="GPU\nhours", show=show_count),
    Column("node_hours", "node-hours", "Of the whole training run.", title="node\nhours", show=show_count),
    Column("days", "days", "Of the whole training run.", show=show_days),
    Column("days_interval", "days, 80%", "80% interval of the days.", show=str),
    Column("cost", "cost", "Of the whole training run, in the unit of the price.", show=show_count),
    Column("energy_mwh", "energy, MWh", "Of the whole training run, hosts and cooling included.", show=show_count),
    Column("goodput", "goodput, %", "Share of time that trains.", per=PERCENT, decimals=1),
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
    "recompute_layers": replace(COLUMNS["recompute_layers"], key="some_layers", title="layers", show=str),
    "order": COLUMNS["wide_order"],
    "memory": COLUMNS["memory_bytes"],
}
"""Columns of a table by the names of --columns."""


_COLLECTIVE = (
    count("number", "no."),
    words("op", "collective", "all_gather, reduce_scatter or all_reduce.", 14),
    words("axis", "axis", "Axis whose ranks take part.", 7),
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
    if job.workload.lengths is not None:
        found["batched_tokens_per_s"] = entry.batched_tokens_per_s
    if job.formats:
        found["precision"] = job.workload.precision
    if entry.dispatcher and job.framework.overlaps_experts:
        found["expert_overlap"] = entry.expert_overlap
    if entry.pipeline > 1 and len(job.framework.schedule.orders) > 1:
        found["pipeline_order"] = entry.pipeline_order
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


def priced_remark(ranked: Priced) -> str:
    """Priced problem and ranking criterion."""
    problem, cost = ranked.problem, ranked.cost
    workload = problem.workload
    formats = ", ".join(problem.formats or (workload.precision,))
    said = (
        f"{problem.title} on {problem.gpus:,} × {machine_words(problem)}"
        f"{with_framework(problem.framework) or ' with the bundled 4D runtime'}, "
        f"{workload.batch_words} in {formats}{optimizer_words(problem.framework)}{_overlap_words(problem)}; "
        f"ranked by {RANKED_BY[problem.rank_by]}"
    )
    if cost == ALPHA_BETA:
        return f"{said}."
    return f"{said}, by --cost {cost}. Exposed communication, step and memory: by {ALPHA_BETA}, {_SAME_GRID}."


def _overlap_words(problem: Problem) -> str:
    """What of experts overlaps as asked."""
    step = problem.framework.step
    where = ", expert overlap where EP is above 1 and stages are interleaved or one"
    return where if step.expert_overlap else ", shared experts beside dispatch" if step.shared_expert_overlap else ""
