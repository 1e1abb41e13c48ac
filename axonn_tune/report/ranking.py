"""Rankings and sweeps: as tables, Markdown, CSV and JSON, and what to know about a ranking besides the numbers.

JSON follows the contracts `axonn-tune/ranking/1` and `axonn-tune/sweep/1`. Keys may be added, never renamed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from axonn_tune import __version__
from axonn_tune.cost.prediction import Term
from axonn_tune.grid import ALL_AXES, AXES
from axonn_tune.program.dimensions import MFU_CONVENTION
from axonn_tune.program.memory import memory_limit_bytes
from axonn_tune.ranking.entries import Entry
from axonn_tune.ranking.inputs import Inputs
from axonn_tune.ranking.results import Results
from axonn_tune.ranking.space import Problem
from axonn_tune.report.output import (
    NOTHING,
    Json,
    Table,
    TableColumn,
    aligned_cells,
    axis_name,
    each,
    fields_of,
    seconds_cells,
    times,
    words,
)
from axonn_tune.specs.catalog import Loaded
from axonn_tune.specs.workload import Workload
from axonn_tune.units import GIB, counted, show_seconds

if TYPE_CHECKING:
    from axonn_tune.ranking.sweep import Point

RANKING_SCHEMA, SWEEP_SCHEMA = "axonn-tune/ranking/1", "axonn-tune/sweep/1"

_MOST_COLUMNS = 9
_LEFT_OUT_FIRST = ("mfu", "exposed_communication_s", "order", "batching")
"""What makes room where other cost models or reasons need columns, unless the table is to be wide."""
_MOST_DIFFERENCES = 3
_WORTH_SAYING = 0.01
"""Share of a step that another configuration must save to be named."""
_RANKED_BY = {
    "communication": "communication per step, overlapped or not",
    "exposed": "exposed communication per step",
    "iteration": "step time",
}
_METRICS = {
    "communication": ("communication", "communication_s"),
    "exposed": ("exposed communication", "exposed_communication_s"),
    "iteration": ("step time", "iteration_s"),
}
_OURS = "alpha-beta"
_SAME_GRID = "for the fastest candidate with the same grid and rank order"
_NO_ENTRY = Entry(sizes=(0,) * len(AXES))


def ranking_table(
    results: Results, entries: Sequence[Entry], *, names: Sequence[str] = (), wide: bool = False
) -> Table[Entry]:
    """The entries with these columns, or those of a narrow or `wide` table."""
    limit_bytes = memory_limit_bytes(results.inputs.problem.machine.accelerator)
    return Table(
        _ranking_columns(results, limit_bytes=limit_bytes),
        entries,
        names or default_columns(results, entries, wide=wide),
        lambda: ranking_records(results, entries, limit_bytes=limit_bytes),
        best=0 if entries and entries[0].feasible else None,
    )


def default_columns(results: Results, entries: Sequence[Entry], *, wide: bool = False) -> list[str]:
    """Names of the columns shown unless others are asked for."""
    names = ["rank", "grid", "order", "batching", "communication_s", "exposed_communication_s", "step", "mfu", "memory"]
    problem = results.inputs.problem
    if wide:
        names[5:8] = ["exposed_communication_s", "compute_s", "step", "tokens_per_s", "mfu", "hfu"]
    if problem.pipeline:
        names[3:3] = ["chunks"]
        names[names.index("step") : names.index("step")] = ["bubble_s"]
    if problem.rank_by != "iteration" and results.ranked.cost == _OURS:
        names.insert(names.index("step") + 1, "shortest_step_s")
    names += [f"rank_{cost}" for cost in results.others]
    if any(not entry.feasible for entry in entries):
        names.append("rejected_because")
    if not wide:
        for name in _LEFT_OUT_FIRST[: max(len(names) - _MOST_COLUMNS, 0)]:
            names.remove(name)
    return names


def ranking_records(
    results: Results, entries: Sequence[Entry], *, limit_bytes: float
) -> tuple[list[str], list[list[object]]]:
    """Names of all fields, units included, and their values of every entry: what CSV and data frames hold."""
    workload = results.inputs.problem.workload
    rows = []
    for entry in entries:
        found = {**entry_fields(entry, workload), "memory_bytes": entry.memory_bytes}
        others = [ranks.get(entry.sizes) for ranks in results.others.values()]
        rows.append([*(found[name] for name in _CSV), limit_bytes, *others, "; ".join(entry.rejected_because)])
    return [*_CSV, "memory_limit_bytes", *(f"rank_{cost}" for cost in results.others), "rejected_because"], rows


_MORE_AXES = tuple(axis for axis in ALL_AXES if axis not in (*AXES, "pipeline"))

_CSV = (
    *("rank", *AXES, "order", "feasible", "tie", "micro_batch", "grad_accumulation", "recompute", "kept_layers"),
    *("communication_s", "exposed_communication_s", "compute_s", "iteration_s", "low_s", "high_s", "tokens_per_s"),
    *("mfu", "hfu", "memory_bytes", "framework", *_MORE_AXES, "pipeline", "chunks", "bubble_s", "shortest_step_s"),
)


def _ranking_columns(results: Results, *, limit_bytes: float) -> dict[str, TableColumn[Entry]]:
    """Every column there is, by name, in the order of the table."""
    axes = shown_axes(results.inputs.problem)
    return {
        **_COLUMNS,
        "grid": TableColumn(title=f"grid\n{' '.join(axes)}", cells=_grids(axes)),
        "memory": replace(_COLUMNS["memory"], title=f"memory,\nGiB of\n{limit_bytes / GIB:.1f}"),
        **{f"rank_{cost}": _rank_column(results, cost) for cost in results.others},
        "rejected_because": words("rejected because", lambda entry: "; ".join(entry.rejected_because)),
    }


def _rank_column(results: Results, cost: str) -> TableColumn[Entry]:
    title = "rank by\n" + cost.replace("-", "-\n", 1)
    return each(title, lambda entry: _plain(results.others[cost].get(entry.sizes)))


def _grids(axes: Sequence[str]) -> Callable[[Sequence[Entry]], list[str]]:
    """Sizes of these axes, aligned."""
    return lambda entries: aligned_cells([[str(entry.size(axis) or NOTHING) for axis in axes] for entry in entries])


def shown_axes(problem: Problem) -> list[str]:
    """Axes of a grid that a table shows: those that the framework has and that were searched."""
    return [axis for axis in problem.axes if axis in problem.framework.axes]


def _batchings(entries: Sequence[Entry]) -> list[str]:
    parts = [[_plain(entry.micro_batch), _plain(entry.recompute), _plain(entry.kept_layers)] for entry in entries]
    return aligned_cells(parts)


def _steps(entries: Sequence[Entry]) -> list[str]:
    """Step times with the half-width of their interval."""
    times = seconds_cells([entry.iteration_s for entry in entries])
    halves = [
        None if entry.high_s is None or entry.low_s is None else (entry.high_s - entry.low_s) / 2 for entry in entries
    ]
    decimals = max((len(time.partition(".")[2]) for time in times), default=0)
    return [time if half is None else f"{time} ±{half:.{decimals}f}" for time, half in zip(times, halves, strict=True)]


def _order(entry: Entry) -> str:
    return ",".join(entry.wide_order or entry.order or (NOTHING,))


def _plain(value: object) -> str:
    return NOTHING if value is None else str(value)


def _percent(share: float | None) -> str:
    """A share in a column of percent."""
    return NOTHING if share is None else f"{100 * share:.1f}"


def _count(number: float | None) -> str:
    return NOTHING if number is None else f"{number:,.0f}"


def _gib(size_bytes: float | None) -> str:
    return NOTHING if size_bytes is None else f"{size_bytes / GIB:.1f}"


_COLUMNS: dict[str, TableColumn[Entry]] = {
    "rank": each("rank", lambda entry: _plain(entry.rank)),
    "grid": TableColumn(title="grid\nx y z data", cells=_grids(AXES)),
    "order": words("rank\norder", _order),
    "batching": TableColumn(title="micro-batch,\nrecompute,\nnot resharded", left=True, cells=_batchings),
    "micro_batch": each("micro-\nbatch", lambda entry: _plain(entry.micro_batch)),
    "grad_accumulation": each("grad.\naccum.", lambda entry: _plain(entry.accumulation)),
    "recompute": words("recompute", lambda entry: _plain(entry.recompute)),
    "kept_layers": each("layers not\nresharded", lambda entry: _plain(entry.kept_layers)),
    "communication_s": times("communi-\ncation,\ns", lambda entry: entry.communication_s),
    "exposed_communication_s": times("exposed,\ns", lambda entry: entry.exposed_communication_s),
    "compute_s": times("compute,\ns", lambda entry: entry.compute_s),
    "chunks": each("chunks", lambda entry: _plain(entry.chunks)),
    "bubble_s": times("bubble,\ns", lambda entry: entry.bubble_s),
    "shortest_step_s": times("shortest\nstep, s", lambda entry: entry.shortest_step_s),
    "step": TableColumn(title="step,\ns", cells=_steps),
    "iteration_s": times("step,\ns", lambda entry: entry.iteration_s),
    "low_s": times("at least,\ns", lambda entry: entry.low_s),
    "high_s": times("at most,\ns", lambda entry: entry.high_s),
    "tokens_per_s": each("tokens/s", lambda entry: _count(entry.tokens_per_s)),
    "mfu": each("MFU,\n%", lambda entry: _percent(entry.mfu)),
    "hfu": each("HFU,\n%", lambda entry: _percent(entry.hfu)),
    "memory": each("memory,\nGiB", lambda entry: _gib(entry.memory_bytes)),
    "tie": each("within\nmodel\nerror", lambda entry: "yes" if entry.tie else NOTHING),
}
"""Columns of an entry by name, in the order of the table of a ranking; those of other cost models come after them."""


def ranking_document(results: Results, entries: Sequence[Entry], *, limit_bytes: float) -> Json:
    """The whole document; entries carry their terms if they were listed with them."""
    problem, searched = results.inputs.problem, results.ranked.searched
    return {
        **document_head(RANKING_SCHEMA, results.inputs),
        "cost": results.ranked.cost,
        "rank_by": problem.rank_by,
        "memory_limit_bytes": limit_bytes,
        "mfu_convention": MFU_CONVENTION,
        "searched": fields_of(searched, ("grids", "candidates", "feasible", "rejected", "seconds")),
        "ties_with_first": results.ranked.ties,
        "remarks": ranking_remarks(results),
        "configs": [entry_json(entry, results) for entry in entries],
    }


def document_head(schema: str, inputs: Inputs) -> Json:
    """What documents of one problem begin with."""
    problem = inputs.problem
    return {
        "schema": schema,
        "tool_version": __version__,
        "gpus": problem.gpus,
        "model": origin(inputs.model),
        "machine": origin(inputs.machine),
        "workload": problem.workload.model_dump(mode="json", by_alias=True),
    }


def origin(loaded: Loaded[Any]) -> Json:
    """A document with all its keys, and the file and hash it came from."""
    return {
        **loaded.document.model_dump(mode="json", by_alias=True),
        "path": str(loaded.path),
        "sha256": loaded.sha256,
    }


def entry_json(entry: Entry, results: Results) -> Json:
    """One config of the contract."""
    found = entry_fields(entry, results.inputs.problem.workload)
    if results.others:
        found["ranks"] = {cost: ranks.get(entry.sizes) for cost, ranks in results.others.items()}
    return {**found, "terms": [term_json(term) for term in entry.terms]}


_ENTRY = (
    *("rank", *AXES, "order", "feasible", "rejected_because", "micro_batch", "grad_accumulation", "recompute"),
    *("kept_layers", "overlap", "communication_s", "exposed_communication_s", "compute_s", "iteration_s"),
    *("memory_bytes", "tokens_per_s", "low_s", "high_s", "mfu", "hfu", "tie", "framework", *_MORE_AXES),
    *("pipeline", "chunks", "bubble_s", "shortest_step_s", "stages"),
)
_STAGE = ("blocks", "compute_s", "communication_s", "bubble_s", "memory_bytes")
_TERM = ("op", "axis", "phase", "layer", "count", "bytes", "group", "tier", "seconds", "exposed_s", "formula")
_LINE = ("algorithm", "protocol", "latency_s", "bandwidth_bytes_per_s")


def entry_fields(entry: Entry, workload: Workload) -> Json:
    """One config of the contract, without its terms."""
    return fields_of(
        entry,
        _ENTRY,
        order=None if entry.order is None else ",".join(entry.order),
        rejected_because=list(entry.rejected_because),
        grad_accumulation=entry.accumulation,
        overlap=list(workload.overlaps),
        memory_bytes=None if entry.memory_bytes is None else int(entry.memory_bytes),
        stages=[fields_of(stage, _STAGE, memory_bytes=int(stage.memory.total_bytes)) for stage in entry.stages],
        **{axis: entry.size(axis) for axis in _MORE_AXES},
    )


def term_json(term: Term) -> Json:
    """One term of the contract, and how it was priced."""
    exposed_s = None if math.isnan(term.exposed_s) else term.exposed_s
    return {
        **fields_of(term, _TERM, bytes=int(term.bytes), exposed_s=exposed_s),
        **fields_of(term.line, _LINE, protocol=term.line.protocol or None),
    }


@dataclass(frozen=True)
class Difference:
    """How much less (negative: more) time the first spends in one part of the step than the second."""

    less_s: float
    what: str

    def __str__(self) -> str:
        return f"{show_seconds(abs(self.less_s))} {'less' if self.less_s > 0 else 'more'} {self.what}"


def ranking_remarks(results: Results) -> list[str]:
    """Sentences to print below a table, one each."""
    said = [
        shortest_step_remark(results),
        priced_remark(results),
        why_first(results),
        ties_remark(results),
        rejected_remark(results),
        searched_remark(results),
    ]
    return [sentence for sentence in said if sentence]


def priced_remark(results: Results) -> str:
    """What was priced, and what it is ranked by."""
    problem, cost = results.inputs.problem, results.ranked.cost
    workload, machine = problem.workload, problem.machine
    sequences, tokens = counted(workload.global_batch, "sequence"), counted(workload.sequence_length, "token")
    title = f" with {problem.framework.title}" if problem.framework.software else ""
    said = (
        f"{problem.model.name} on {problem.gpus:,} × {machine.name} ({machine.accelerator.name}){title}, "
        f"{sequences} of {tokens} in {workload.precision}; ranked by {_RANKED_BY[problem.rank_by]}"
    )
    if cost == _OURS:
        return f"{said}."
    return f"{said}, by --cost {cost}. Exposed communication, step and memory: by {_OURS}, {_SAME_GRID}."


def why_first(results: Results) -> str:
    """Where the first of the ranking spends less than the second."""
    ranked = results.ranked
    if len(ranked) < 2:
        return "Only one configuration is feasible." if len(ranked) else ""
    first, second = (ranked.entry(position, terms=True) for position in (0, 1))
    rank_by = results.inputs.problem.rank_by
    name, attribute = _METRICS[rank_by]
    less_s = getattr(second, attribute) - getattr(first, attribute)
    if less_s == 0.0:
        return f"#1 and #2 have the same {name}; the shorter step decides, then less memory."
    found = sorted(_differences(first, second, rank_by=rank_by), key=lambda difference: -abs(difference.less_s))
    parts = [str(difference) for difference in found[:_MOST_DIFFERENCES] if difference.less_s]
    return f"#1 beats #2 by {show_seconds(less_s)} of {name}: {', '.join(parts)}."


def _differences(first: Entry, second: Entry, *, rank_by: str) -> Iterator[Difference]:
    exposed = rank_by != "communication"
    ours, theirs = (_by_axis(entry.terms, exposed=exposed) for entry in (first, second))
    groups = [{(term.op, term.axis): f"{term.group} ranks" for term in entry.terms} for entry in (first, second)]
    waiting = "waiting for " if exposed else "in "
    for key in {**ours, **theirs}:
        here, there = groups[0].get(key), groups[1].get(key)
        sizes = here or f"{there} there"
        if here and there and here != there:
            sizes = f"{here} against {there}"
        op, axis = key
        yield Difference(theirs.get(key, 0.0) - ours.get(key, 0.0), f"{waiting}{op} over {axis_name(axis)} ({sizes})")
    if rank_by == "iteration" and first.compute_s is not None and second.compute_s is not None:
        yield Difference(second.compute_s - first.compute_s, "computing")


def _by_axis(terms: tuple[Term, ...], *, exposed: bool) -> dict[tuple[str, str], float]:
    """Seconds by collective and axis."""
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for term in terms:
        sums[term.op, term.axis] += (term.exposed_s or 0.0) if exposed else term.seconds
    return sums


def ties_remark(results: Results) -> str:
    """How many are within model error of the first."""
    count = results.ranked.ties
    if count < 2:
        return ""
    uncertainty = results.inputs.machine.document.uncertainty
    known = f"communication ±{uncertainty.communication:.0%}"
    if results.inputs.problem.rank_by == "iteration":
        known += f", computation ±{uncertainty.compute:.0%}"
    whom = "both" if count == 2 else f"all {count:,}"
    return f"Ranks 1 to {count:,} are within model error ({known}): benchmark {whom}."


def shortest_step_remark(results: Results) -> str:
    """Which candidate has the shortest step, if it is clearly shorter than that of the first of the ranking."""
    problem, ranked = results.inputs.problem, results.ranked
    best = ranked.fastest() if len(ranked) and problem.rank_by != "iteration" else None
    first_s = ranked.entry(0, terms=False).iteration_s if best else None
    if best is None or best.iteration_s is None or not first_s:
        return ""
    gain = 1.0 - best.iteration_s / first_s
    if gain < _WORTH_SAYING:
        return ""
    cost = "" if ranked.cost == _OURS else f"--cost {_OURS} "
    return (
        f"The shortest step is that of {_configuration(best)}: {show_seconds(best.iteration_s)}, {gain:.0%} less than "
        f"#1's {show_seconds(first_s)}. {cost}--rank-by step ranks by it."
    )


def _configuration(entry: Entry) -> str:
    """`x=1 y=1 z=64 data=4, rank order z,data, micro-batch 2, recompute none`."""
    sizes = " ".join(f"{axis}={size}" for axis, size in zip(entry.axes, entry.sizes, strict=True))
    order = [f"rank order {','.join(entry.wide_order)}"] if len(entry.wide_order) > 1 else []
    return ", ".join([sizes, *order, f"micro-batch {entry.micro_batch}", f"recompute {entry.recompute}"])


def rejected_remark(results: Results) -> str:
    """How many grids were rejected, and for which constraints."""
    found = results.ranked.searched
    left_out = found.grids - len(results.ranked.ranks())
    if not left_out:
        return "The only grid is feasible." if found.grids == 1 else f"All {found.grids:,} grids are feasible."
    reasons = ", ".join(f"{name} {count}" for name, count in found.rejected.items())
    several = " (a grid can break several)" if sum(found.rejected.values()) > left_out else ""
    of, are, them = counted(found.grids, "grid"), *(("is", "it") if left_out == 1 else ("are", "them"))
    return f"{left_out:,} of {of} {are} rejected: {reasons}{several}; --all lists {them}."


def searched_remark(results: Results) -> str:
    """How much was priced, in what time."""
    found = results.ranked.searched
    fit = "fits and was" if found.feasible == 1 else "fit and were"
    of = counted(found.candidates, "candidate")
    return f"{found.feasible:,} of {of} {fit} priced, in {show_seconds(found.seconds)}."


def sweep_table(points: Sequence[Point], *, names: Sequence[str] = (), wide: bool = False) -> Table[Point]:
    """The points with these columns, all or the main ones; below are the reasons where nothing is feasible."""
    reasons = [f"{_where(point)}: {point.reason}" for point in points if point.entry is None]
    chosen = names or (tuple(_SWEEP_COLUMNS) if wide else _MAIN_SWEEP_COLUMNS)
    return Table(_SWEEP_COLUMNS, points, chosen, lambda: sweep_records(points), reasons, apart=True)


def sweep_records(points: Sequence[Point]) -> tuple[list[str], list[list[object]]]:
    """Names of all fields, units included, and their values of each point: what CSV and data frames hold."""
    names = ("model", "gpus", "global_batch", "feasible", "reason", "efficiency")
    fields = [name for name in _CSV if name not in {"rank", "feasible", "tie"}]
    rows: list[list[object]] = []
    for point in points:
        own, config = _point_json(point), _point_config(point) or {}
        rows.append([*(own[name] for name in names), *(config.get(name) for name in fields)])
    return [*names, *fields], rows


def sweep_document(points: Sequence[Point], *, weak: bool) -> Json:
    """Everything, as `axonn-tune/sweep/1`; each model and the machine once."""
    models = {point.inputs.model.document.name: origin(point.inputs.model) for point in points}
    return {
        "schema": SWEEP_SCHEMA,
        "tool_version": __version__,
        "scaling": "weak" if weak else "strong",
        "rank_by": points[0].inputs.problem.rank_by if points else None,
        "models": list(models.values()),
        "machine": origin(points[0].inputs.machine) if points else None,
        "points": [
            {
                **_point_json(point),
                "workload": point.inputs.problem.workload.model_dump(mode="json", by_alias=True),
                "config": _point_config(point),
            }
            for point in points
        ],
    }


def _point_json(point: Point) -> Json:
    problem = point.inputs.problem
    return {
        "model": problem.model.name,
        "gpus": problem.gpus,
        "global_batch": problem.workload.global_batch,
        "feasible": point.entry is not None,
        "reason": point.reason or None,
        "efficiency": point.efficiency,
    }


def _point_config(point: Point) -> Json | None:
    """The best configuration of a point; None where nothing is feasible."""
    return None if point.entry is None else entry_fields(point.entry, point.inputs.problem.workload)


def _where(point: Point) -> str:
    problem = point.inputs.problem
    return f"{problem.model.name} on {problem.gpus} GPUs, batch {problem.workload.global_batch}"


def _of_entry(name: str) -> TableColumn[Point]:
    """A column of the best configuration of each point."""
    column = _COLUMNS[name]
    return TableColumn(
        title=column.title,
        left=column.left,
        cells=lambda points: column.cells([point.entry or _NO_ENTRY for point in points]),
    )


_SWEEP_COLUMNS: dict[str, TableColumn[Point]] = {
    "model": words("model", lambda point: point.inputs.problem.model.name),
    "gpus": each("GPUs", lambda point: f"{point.inputs.problem.gpus:,}"),
    "batch": each("batch", lambda point: f"{point.inputs.problem.workload.global_batch:,}"),
    **{name: _of_entry(name) for name in ("grid", "order", "micro_batch", "recompute")},
    **{name: _of_entry(name) for name in ("communication_s", "exposed_communication_s")},
    "step": _of_entry("iteration_s"),
    **{name: _of_entry(name) for name in ("low_s", "high_s", "tokens_per_s", "mfu", "memory")},
    "efficiency": each("efficiency,\n%", lambda point: _percent(point.efficiency)),
}
"""Columns of a sweep by name, in the order of a wide table."""
_MAIN_SWEEP_COLUMNS = ("model", "gpus", "batch", "grid", "order", "step", "tokens_per_s", "mfu", "efficiency")
