"""The search itself: price the space, take each grid at its best, put the grids in order."""

from __future__ import annotations

import heapq
import time
from bisect import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from axonn_tune.cost.columns import ColumnPricer, Floats, Integers, RouteTable, distinct, route_table
from axonn_tune.cost.compute import compute_rates
from axonn_tune.cost.prediction import Configuration, Pricing, price_configuration
from axonn_tune.cost.utilisation import exposed_s
from axonn_tune.errors import UsageError
from axonn_tune.frameworks import software_on, step_on
from axonn_tune.frameworks.description import StepOptions
from axonn_tune.grid import ALL_AXES, AXES, Grid
from axonn_tune.program.constraints import MEMORY, MICRO_BATCH, PINNED
from axonn_tune.program.dimensions import table_alignment
from axonn_tune.program.operations import MATRIX_ALIGNMENT
from axonn_tune.program.schedule import build_schedule
from axonn_tune.program.step import ONLY, Stage, StepProgram, build_step
from axonn_tune.ranking.space import (
    FIRST,
    LAST,
    MIDDLE,
    Fitting,
    Grids,
    Placements,
    Problem,
    RankBy,
    Shapes,
    fit_memory,
    list_candidates,
    list_grids,
    list_placements,
    list_shapes,
    require_searchable,
    uneven_chunks,
    with_uneven_chunks,
)
from axonn_tune.specs.workload import RECOMPUTES, Recompute
from axonn_tune.units import seconds

if TYPE_CHECKING:
    from axonn_tune.cost.stages import Pipelines

LARGEST_COUNT = 2**40
"""Counts from here on do not fit the columns, whose arithmetic must stay exact."""

RANK_BY: tuple[RankBy, ...] = ("communication", "exposed", "iteration")

LISTED = 10
"""Default number of grids that are ranked by exact steps."""


@dataclass(frozen=True)
class SearchCounts:
    """Numbers of grids before constraints, of candidates after them, and of priced candidates that fit.

    `rejected` counts grids by constraint; a grid can violate several.
    """

    grids: int
    candidates: int
    feasible: int
    rejected: dict[str, int]
    seconds: float


@dataclass(frozen=True)
class Candidate:
    """One priced candidate of a ranking, from the columns."""

    configuration: Configuration
    accumulation: int
    communication_s: float
    compute_s: float
    iteration_s: float
    memory_bytes: float
    bubble_s: float = 0.0

    @property
    def exposed_communication_s(self) -> float:
        """Exposed communication of the step, the bubble excluded, s."""
        return float(exposed_s(self.iteration_s - self.bubble_s, self.compute_s))

    @classmethod
    def of(cls, pricing: Pricing) -> Candidate:
        """A candidate from a single pricing."""
        return cls(
            configuration=pricing.configuration,
            accumulation=pricing.accumulation,
            communication_s=pricing.communication_s,
            compute_s=pricing.compute_s,
            iteration_s=pricing.iteration_s,
            memory_bytes=float(pricing.memory.total_bytes),
            bubble_s=pricing.bubble_s,
        )


@dataclass(frozen=True)
class RejectedGrid:
    """A rejected grid with reasons; needed_bytes: least memory of its candidates if memory is the reason."""

    sizes: dict[str, int]
    reasons: tuple[tuple[str, str], ...]
    needed_bytes: float | None = None


@dataclass(frozen=True)
class Ranking:
    """Result of a search. `rows` indexes the columns, best first, each grid once (or every candidate)."""

    problem: Problem
    searched: SearchCounts
    grids: Grids
    shapes: Shapes
    placements: Placements
    fittings: dict[Recompute, Fitting]
    columns: Columns
    rows: Integers
    programs: dict[Recompute, StepProgram]

    def __len__(self) -> int:
        return len(self.rows)

    def grid_of(self, position: int) -> int:
        """Number of the grid at a place of the ranking."""
        return int(self.shapes.grid[self.columns.shape[self.rows[position]]])

    def candidate(self, position: int) -> Candidate:
        """The candidate at a place of the ranking, from 0."""
        row = int(self.rows[position])
        columns = self.columns
        shape, recompute = int(columns.shape[row]), RECOMPUTES[columns.recompute[row]]
        problem = self.problem
        sizes = dict(zip(self.grids.axes, self.grids.sizes[self.shapes.grid[shape]].tolist(), strict=True))
        order = problem.orders[self.placements.order[columns.placement[row]]]
        micro_batch = int(self.shapes.micro_batch[shape])
        fitting, chunks = self.fittings[recompute], int(self.shapes.chunks[shape])
        step_s, compute_s, bubble_s = columns.exact_s(row)
        grid = Grid(**sizes, order=order)
        return Candidate(
            configuration=Configuration(grid, micro_batch, recompute, int(fitting.kept_layers[shape]), chunks),
            accumulation=problem.workload.global_batch // (grid.batch_shares * micro_batch),
            communication_s=float(columns.communication_s[row]),
            compute_s=compute_s,
            iteration_s=step_s,
            memory_bytes=float(fitting.total_bytes[shape]),
            bubble_s=bubble_s,
        )

    def price(self, position: int) -> Pricing:
        """Every term of the candidate at a place of the ranking."""
        return self._price(self.candidate(position).configuration)

    def _price(self, configuration: Configuration) -> Pricing:
        problem = self.problem
        return price_configuration(
            problem.model, problem.machine, problem.workload, configuration, framework=problem.framework
        )

    def fastest(self) -> Ranking:
        """The same search with only the candidate of the shortest step, for any ranking criterion."""
        steps_s = self.columns.iteration_s
        rows = np.flatnonzero(steps_s == steps_s.min(initial=np.inf))
        ordered = _order(self.columns, rows, self.shapes, self.placements, rank_by="iteration", fittings=self.fittings)
        return replace(self, rows=ordered[:1])

    def rejected(self) -> tuple[RejectedGrid, ...]:
        """Every grid that is not ranked, with its reasons, in the order of the grids."""
        ranked = set(self.shapes.grid[self.columns.shape].tolist())
        shaped = set(self.shapes.grid.tolist())
        return tuple(
            self._rejection(number, dict(zip(self.grids.axes, row, strict=True)), shaped=shaped)
            for number, row in enumerate(self.grids.sizes.tolist())
            if number not in ranked
        )

    @cached_property
    def _least_bytes(self) -> Floats:
        """Least memory of each grid over its micro-batches and kinds of recompute."""
        least = np.full(len(self.grids.sizes), np.inf)
        for fitting in self.fittings.values():
            np.minimum.at(least, self.shapes.grid, fitting.total_bytes)
        return least

    def _rejection(self, number: int, sizes: dict[str, int], *, shaped: set[int]) -> RejectedGrid:
        reasons = self._reasons(number, sizes, shaped=shaped)
        if reasons:
            return RejectedGrid(sizes, reasons)
        least = float(self._least_bytes[number])
        limit_bytes = next(iter(self.fittings.values())).limit_bytes
        reason = MEMORY, f"needs {least / 2**30:.1f} GiB of {limit_bytes / 2**30:.1f} GiB"
        return RejectedGrid(sizes, (reason,), least)

    def _reasons(self, number: int, sizes: dict[str, int], *, shaped: set[int]) -> tuple[tuple[str, str], ...]:
        """All but memory."""
        framework, pins = self.problem.framework, self.problem.request.axes
        broken = tuple(
            (check.name, check.explain(dict.fromkeys(ALL_AXES, 1) | sizes, framework))
            for check, is_broken in zip(self.grids.constraints, self.grids.broken[number], strict=True)
            if is_broken
        )
        if broken:
            return broken
        other = [axis for axis, size in sizes.items() if pins.get(axis, size) != size]
        if other:
            asked = [f"{framework.called(axis)} = {pins[axis]}, not {sizes[axis]}" for axis in other]
            return ((PINNED, f"asked for {', '.join(asked)}"),)
        if number not in shaped:
            return ((MICRO_BATCH, "no micro-batch that is allowed divides this grid's share of the batch"),)
        return ()


@dataclass(frozen=True)
class Columns:
    """Priced candidates of all kinds of recompute: indices and seconds, one row each.

    bounded: steps that are bounds until they are refined. starts: groups with pipeline stages, each with its first row.
    """

    shape: Integers
    placement: Integers
    recompute: Integers
    communication_s: Floats
    compute_s: Floats
    iteration_s: Floats
    bubble_s: Floats
    bounded: NDArray[np.bool_]
    starts: tuple[tuple[int, Pipelines], ...] = ()

    def exact_s(self, row: int) -> tuple[float, float, float]:
        """Step of one candidate, with pipeline stages by the exact recurrence; its computation and bubble, s."""
        if self.bounded[row]:
            start, group = self.starts[bisect([start for start, _ in self.starts], row) - 1]
            return group.exact_s(row - start)
        return float(self.iteration_s[row]), float(self.compute_s[row]), float(self.bubble_s[row])


def search(problem: Problem, *, variants: bool = False, exact: int = LISTED) -> Ranking:
    """Rank every grid of a GPU count; with `variants` every candidate of it. Nothing feasible: an empty ranking.

    exact: number of ranks in the order of exact steps; with pipeline stages, the rest is ranked by a bound. Displayed
    candidates are always exact.
    """
    started = time.perf_counter()
    _check(problem)
    request, options = problem.request, step_on(problem.framework, problem.machine)
    grids = list_grids(problem)
    shapes = list_shapes(grids, problem)
    candidates = _count_candidates(shapes, grids, problem)
    require_searchable(candidates)
    programs = {kind: _program(problem, options, kind) for kind in request.recomputes}
    fittings = {kind: fit_memory(shapes, program) for kind, program in programs.items()}
    uneven, unpriced = uneven_chunks(shapes, programs, fittings)
    groups = tuple(dict.fromkeys(axes for program in programs.values() for axes in program.groups))
    placed = distinct(np.concatenate([shapes.grid[uneven], *(shapes.grid[one.rows] for one in fittings.values())]))[0]
    placements = list_placements(grids, placed, problem, groups)
    table = _routes(problem, placements, programs)

    def priced(shapes: Shapes, fittings: dict[Recompute, Fitting]) -> Columns:
        some = fittings if variants else _undominated(problem, options, fittings)
        return _joined(
            [
                _price(problem, shapes, placements, table, program, part)
                for kind in programs
                for program, part in _by_alignment(shapes, options, programs[kind], some[kind])
            ]
        )

    columns = priced(shapes, fittings)
    if len(shapes.piped):
        columns = _refined(columns, shapes, problem, count=exact, variants=variants)
    if len(uneven):
        promising = _promising(columns, shapes, problem, count=exact)
        promising[unpriced] = True
        more, before = with_uneven_chunks(shapes, uneven if variants else uneven[promising[uneven]]), len(shapes)
        candidates += _count_candidates(more, grids, problem)
        fitted = {kind: fit_memory(more, program) for kind, program in programs.items()}
        found = priced(more, fitted)
        columns = _joined([columns, replace(found, shape=found.shape + before)])
        shapes, fittings = shapes.with_more(more), {kind: fittings[kind].with_more(fitted[kind]) for kind in fitted}
        columns = _refined(columns, shapes, problem, count=exact, variants=variants)
    used = distinct(np.concatenate([shapes.grid[fitting.rows] for fitting in fittings.values()]))[0]
    rows = np.arange(len(columns.shape)) if variants else _best_of_each(columns, shapes, rank_by=problem.rank_by)
    rows = _order(columns, rows, shapes, placements, rank_by=problem.rank_by, fittings=fittings)
    searched = SearchCounts(
        grids=len(grids.sizes),
        candidates=candidates,
        feasible=_count_fitting(shapes, placements, fittings),
        rejected=_count_rejected(grids, shapes, used, request.axes),
        seconds=time.perf_counter() - started,
    )
    chosen = rows if variants else rows[np.sort(distinct(shapes.grid[columns.shape[rows]])[1])]
    return Ranking(problem, searched, grids, shapes, placements, fittings, columns, chosen, programs)


def _program(problem: Problem, options: StepOptions, kind: Recompute, alignment: int = MATRIX_ALIGNMENT) -> StepProgram:
    """The program of a kind of recompute; alignment: of rows of logits, bytes."""
    context = "context" in problem.axes
    return build_step(
        problem.model, problem.workload, recompute=kind, options=options, context=context, table_alignment=alignment
    )


def _by_alignment(
    shapes: Shapes, options: StepOptions, program: StepProgram, fitting: Fitting
) -> Iterator[tuple[StepProgram, Fitting]]:
    """Programs and fittings by the alignment of rows of logits, which differs where the vocabulary is not padded."""
    if options.vocabulary_multiple != 0:
        yield program, fitting
        return
    problem, splits = shapes.problem, shapes.sizes("x") * shapes.sizes("y")
    element = problem.workload.element_sizes.compute
    pairs = list(zip(shapes.sizes("V").tolist(), splits.tolist(), strict=True))
    aligned = {
        (rows, split): table_alignment(problem.model, rows, split=split, element=element, options=options)
        for rows, split in set(pairs)
    }
    found = np.array([aligned[pair] for pair in pairs], dtype=np.int64)
    for alignment in distinct(found)[0].tolist():
        rows = fitting.rows[found[fitting.rows] == alignment]
        yield _program(problem, options, program.recompute, alignment), replace(fitting, rows=rows)


def _undominated(
    problem: Problem, options: StepOptions, fittings: dict[Recompute, Fitting]
) -> dict[Recompute, Fitting]:
    """Fittings without the shapes that also fit with less recompute, which is as good by every criterion.

    Less recompute is less computation and no more collectives, unless it leaves room for fewer layers that are not
    resharded. What is exposed may shrink behind more computation.
    """
    if options.reshard == "fit" or problem.rank_by == "exposed":
        return fittings
    found, fit = dict[Recompute, Fitting](), np.zeros(0, dtype=np.bool_)
    for kind, fitting in fittings.items():
        fit = fit if len(fit) else np.zeros(len(fitting.total_bytes), dtype=np.bool_)
        found[kind] = replace(fitting, rows=fitting.rows[~fit[fitting.rows]])
        fit[fitting.rows] = True
    return found


def _count_fitting(shapes: Shapes, placements: Placements, fittings: dict[Recompute, Fitting]) -> int:
    """Candidates that fit into memory, priced or not."""
    placed = np.bincount(placements.grid, minlength=int(shapes.grid.max(initial=-1)) + 1)
    return int(sum(placed[shapes.grid[fitting.rows]].sum() for fitting in fittings.values()))


def _routes(problem: Problem, placements: Placements, programs: dict[Recompute, StepProgram]) -> RouteTable:
    """Price every route for all collectives of the programs."""
    sent = {(step.kind, step.axis) for program in programs.values() for step, _ in program.collectives()}
    sent |= {(step.kind, step.axis) for program in programs.values() for step, _ in program.collectives(FIRST)}
    software = software_on(problem.framework, problem.machine)
    return route_table(
        placements.shapes,
        placements.routes,
        problem.machine,
        problem.gpus,
        sent=sent,
        call_s=seconds(software.collective_us),
    )


def _check(problem: Problem) -> None:
    """Refuse inputs that no grid could satisfy and no constraint covers."""
    model, workload, pins = problem.model, problem.workload, problem.request.axes
    if max(problem.gpus, workload.global_batch, workload.sequence_length) >= LARGEST_COUNT:
        raise UsageError(f"GPU counts, batches and sequence lengths must be below {LARGEST_COUNT:,}")
    searched = [axis for axis in problem.framework.columns if axis in problem.axes]
    if set(searched) <= set(pins) and prod(pins.values()) != problem.gpus:
        names = "·".join(problem.framework.called(axis) for axis in searched)
        asked = "·".join(str(pins[axis]) for axis in searched)
        raise UsageError(f"{names} = {asked} is {prod(pins.values())}, not {problem.gpus} GPUs")
    if model.learned_positions and workload.sequence_length > model.max_sequence_length:
        raise UsageError(
            f"sequence length {workload.sequence_length} exceeds the position table of {model.name} "
            f"({model.max_sequence_length})"
        )
    kept = problem.request.kept_layers
    if kept is not None and kept > model.layers:
        raise UsageError(f"--kept-layers {kept}: {model.name} has {model.layers} layers")
    if workload.precision not in problem.machine.accelerator.peak_tflops:
        known = list(problem.machine.accelerator.peak_tflops)
        advice = f"; try --precision {known[0]}" if known else ""
        raise UsageError(
            f"machine {problem.machine.name} states no {workload.precision} peak "
            f"(accelerator.peak_tflops has {', '.join(known)}){advice}"
        )


_schedule = lru_cache(maxsize=16)(build_schedule)
"""Schedules of the kinds of recompute, which shapes with equal and with uneven chunks share."""


def _price(
    problem: Problem,
    shapes: Shapes,
    placements: Placements,
    table: RouteTable,
    program: StepProgram,
    fitting: Fitting,
) -> Columns:
    """Price all candidates of one kind of recompute that fit into memory."""
    workload = problem.workload
    rates = compute_rates(
        problem.machine.accelerator, workload.precision, software_on(problem.framework, problem.machine)
    )

    def pricer_of(program: StepProgram, *stages: Stage) -> ColumnPricer:
        schedule = _schedule(program, overlaps=workload.overlaps, split=workload.split_micro_batch, stages=stages)
        element_bytes = float(workload.element_sizes.compute)
        return ColumnPricer(program, schedule, rates=rates, element_bytes=element_bytes, table=table)

    kept = {"kept": fitting.kept_layers, "unkept": float(problem.model.layers) - fitting.kept_layers}
    number = RECOMPUTES.index(program.recompute)
    whole = fitting.rows[shapes.stages[fitting.rows] == 1] if len(shapes.piped) else fitting.rows
    candidates, placement = list_candidates(shapes, whole, placements)
    communication, compute, iteration = np.empty((3, 0))
    if len(candidates):
        pricer = pricer_of(program, ONLY)
        first, representative = pricer.distinct(candidates)
        communication, compute, iteration = pricer.price(candidates.taken(first), {**shapes.values, **kept})[
            :, representative
        ]
    found = Columns(
        shape=candidates.shape,
        placement=placement,
        recompute=np.full(len(candidates), number, dtype=np.int64),
        communication_s=communication,
        compute_s=compute,
        iteration_s=iteration,
        bubble_s=np.zeros(len(candidates)),
        bounded=np.zeros(len(candidates), dtype=np.bool_),
    )
    if len(whole) == len(fitting.rows):
        return found
    # Imported here: most searches have no pipeline, and start-up time is theirs.
    from axonn_tune.ranking.pipelines import price_pipelines

    candidates, placement = list_candidates(shapes, fitting.rows[shapes.stages[fitting.rows] > 1], placements)
    given = program.given
    staged = build_step(
        problem.model,
        workload,
        recompute=program.recompute,
        options=given.options.staged,
        context=given.context,
        table_alignment=given.table_alignment,
    )
    pricer = pricer_of(staged, FIRST, MIDDLE, LAST)
    contention, routes = rates.contention, placements.shapes
    groups = tuple(price_pipelines(shapes, fitting, pricer, candidates, routes=routes, contention=contention))
    return _joined([found, _bounds(groups, candidates.shape, placement, number)])


def _bounds(
    groups: tuple[tuple[Integers, Pipelines], ...], shape: Integers, placement: Integers, number: int
) -> Columns:
    """Columns of candidates with pipeline stages, their steps by the bound."""
    rows = np.concatenate([rows for rows, _ in groups]) if groups else np.empty(0, dtype=np.int64)
    empty, priced = [np.empty(0)], [group for _, group in groups]
    bounds = [group.bound_s() for group in priced]
    firsts = np.cumsum([0, *map(len, priced)])[:-1]
    steps = np.concatenate([step for step, _, _ in bounds] or empty)
    lost = np.concatenate([lost for _, lost, _ in bounds] or empty)
    return Columns(
        shape=shape[rows],
        placement=placement[rows],
        recompute=np.full(len(rows), number, dtype=np.int64),
        communication_s=np.concatenate([group.communication_s for group in priced] or empty),
        compute_s=np.concatenate([group.alone_s for group in priced] or empty) + lost,
        iteration_s=steps,
        bubble_s=np.concatenate([bubble for _, _, bubble in bounds] or empty),
        bounded=np.ones(len(rows), dtype=np.bool_),
        starts=tuple(zip(firsts.tolist(), priced, strict=True)),
    )


def _refined(columns: Columns, shapes: Shapes, problem: Problem, *, count: int, variants: bool) -> Columns:
    """Columns with exact steps at the first `count` ranks, and for the shortest step of all.

    Bounds are never above the exact value, so a candidate whose exact value is the lowest of all that are left is the
    next place; candidates whose bound is above it need no exact value. Ties go to the shorter step.
    """
    groups = None if variants else shapes.grid[columns.shape]
    columns = _refined_by(columns, groups, rank_by=problem.rank_by, count=count)
    return columns if problem.rank_by == "iteration" else _refined_by(columns, None, rank_by="iteration", count=1)


def _refined_by(columns: Columns, groups: Integers | None, *, rank_by: RankBy, count: int) -> Columns:
    """The same for one measure; groups: of rows that share a place, None where each has its own."""
    iteration, compute, bubble = columns.iteration_s.copy(), columns.compute_s.copy(), columns.bubble_s.copy()
    metric, bounded = ranking_metric(columns, rank_by=rank_by), columns.bounded.copy()
    rows = np.arange(len(metric)).tolist()
    queue = list(zip(metric.tolist(), iteration.tolist(), rows, (~bounded).tolist(), strict=True))
    heapq.heapify(queue)
    ranked: set[int] = set()
    while queue and len(ranked) < count:
        *_, row, known = heapq.heappop(queue)
        if known:
            ranked.add(row if groups is None else int(groups[row]))
            continue
        iteration[row], compute[row], bubble[row] = columns.exact_s(row)
        bounded[row] = False
        exact = replace(
            columns,
            iteration_s=iteration[row : row + 1],
            compute_s=compute[row : row + 1],
            bubble_s=bubble[row : row + 1],
            communication_s=columns.communication_s[row : row + 1],
        )
        measure = float(ranking_metric(exact, rank_by=rank_by)[0])
        heapq.heappush(queue, (measure, float(iteration[row]), row, True))
    return replace(columns, iteration_s=iteration, compute_s=compute, bubble_s=bubble, bounded=bounded)


def _promising(columns: Columns, shapes: Shapes, problem: Problem, *, count: int) -> NDArray[np.bool_]:
    """Shapes of one chunk a stage that may be among the first `count` grids, or be the fastest, cut into several.

    What a stage of one chunk is busy with takes as long in several, and their sends are as many at least; with more
    recompute it takes longer.
    """
    places = np.full(int(shapes.grid.max(initial=-1)) + 1, np.inf)
    np.minimum.at(places, shapes.grid[columns.shape], ranking_metric(columns, rank_by=problem.rank_by))
    last_s = float(np.sort(places)[count - 1]) if 0 < count <= len(places) else np.inf
    found = np.zeros(len(shapes), dtype=np.bool_)
    for start, group in columns.starts:
        rows = np.arange(start, start + len(group))
        step_s, exposed = group.floor_s()
        least = {"iteration": step_s, "exposed": exposed, "communication": columns.communication_s[rows]}
        kept = (least[problem.rank_by] <= last_s) | (step_s <= columns.iteration_s.min(initial=np.inf))
        found[columns.shape[rows[kept]]] = True
    return found


def _joined(parts: list[Columns]) -> Columns:
    """Columns one after the other."""
    names = [field.name for field in fields(Columns) if field.name != "starts"]
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    starts, before = [], 0
    for part in parts:
        starts += [(before + start, group) for start, group in part.starts]
        before += len(part.shape)
    return Columns(**joined, starts=tuple(starts))


def _order(
    columns: Columns,
    rows: Integers,
    shapes: Shapes,
    placements: Placements,
    *,
    rank_by: RankBy,
    fittings: dict[Recompute, Fitting],
) -> Integers:
    """Rows from best to worst. Ties: shorter step, less memory, then grid, order, micro-batch, recompute."""
    shape, recompute = columns.shape[rows], columns.recompute[rows]
    memory = np.empty(len(rows))
    for kind, fitting in fittings.items():
        mine = recompute == RECOMPUTES.index(kind)
        memory[mine] = fitting.total_bytes[shape[mine]]
    keys = (
        recompute,
        shapes.micro_batch[shape],
        placements.order[columns.placement[rows]],
        shapes.grid[shape],
        memory,
        columns.iteration_s[rows],
        ranking_metric(columns, rank_by=rank_by)[rows],
    )
    return rows[np.lexsort(keys)]


def _best_of_each(columns: Columns, shapes: Shapes, *, rank_by: RankBy) -> Integers:
    """Rows that reach their grid's lowest value: several where a grid has ties."""
    metric, grid = ranking_metric(columns, rank_by=rank_by), shapes.grid[columns.shape]
    lowest = np.full(int(grid.max(initial=-1)) + 1, np.inf)
    np.minimum.at(lowest, grid, metric)
    return np.flatnonzero(metric == lowest[grid])


def ranking_metric(columns: Columns, *, rank_by: RankBy) -> Floats:
    """The column a ranking sorts by, s."""
    if rank_by == "communication":
        return columns.communication_s
    if rank_by == "iteration":
        return columns.iteration_s
    return np.asarray(exposed_s(columns.iteration_s - columns.bubble_s, columns.compute_s))


def _count_candidates(shapes: Shapes, grids: Grids, problem: Problem) -> int:
    """Candidates before the memory check: shapes times distinct rank orders times kinds of recompute."""
    recomputes = problem.request.recomputes
    if len(problem.orders) == 1:
        return len(shapes) * len(recomputes)
    wide = (grids.sizes[shapes.grid][:, : len(AXES)] > 1).sum(axis=1)
    orders = np.array([1, 1, 2, 6, 24])[wide]
    return int(orders.sum()) * len(recomputes)


def _count_rejected(grids: Grids, shapes: Shapes, used: Integers, pins: Mapping[str, int]) -> dict[str, int]:
    """Rejected grids by constraint, without zeros."""
    counts = {check.name: int(broken.sum()) for check, broken in zip(grids.constraints, grids.broken.T, strict=True)}
    shaped = len(distinct(shapes.grid)[0])
    asked = len(grids.sound_as_asked(pins))
    counts[MICRO_BATCH] = asked - shaped
    counts[MEMORY] = shaped - len(used)
    counts[PINNED] = len(grids.sound) - asked
    return {name: count for name, count in counts.items() if count}
