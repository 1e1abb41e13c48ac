"""The search itself: price the space, take each grid at its best, put the grids in order."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from axonn_tune.cost.columns import ColumnPricer, Floats, Integers, Prices, RouteTable, route_table
from axonn_tune.cost.compute import compute_rates
from axonn_tune.cost.prediction import Configuration, Pricing, price_configuration
from axonn_tune.cost.utilisation import exposed_s
from axonn_tune.errors import UsageError
from axonn_tune.grid import AXES, Grid
from axonn_tune.program.constraints import MEMORY, MICRO_BATCH
from axonn_tune.program.schedule import build_schedule
from axonn_tune.program.step import build_step
from axonn_tune.ranking.space import (
    ORDERS,
    Fitting,
    Grids,
    Limits,
    Placements,
    Shapes,
    fit_memory,
    list_candidates,
    list_grids,
    list_placements,
    list_shapes,
)
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import RECOMPUTES, Recompute, Workload

RankBy: TypeAlias = Literal["communication", "exposed", "iteration"]
LARGEST_COUNT = 2**40
"""Counts from here on would not fit the columns: products of them must stay exact."""

RANK_BY: tuple[RankBy, ...] = ("communication", "exposed", "iteration")


@dataclass(frozen=True)
class Problem:
    """What is searched: the inputs of a ranking."""

    model: Model
    machine: Machine
    workload: Workload
    gpus: int
    limits: Limits = field(default_factory=Limits)
    rank_by: RankBy = "communication"


@dataclass(frozen=True)
class Searched:
    """How much was looked at: grids before constraints; candidates after them; those that fit and were priced.

    `rejected` counts grids by constraint; a grid can break several.
    """

    grids: int
    candidates: int
    feasible: int
    rejected: dict[str, int]
    seconds: float


@dataclass(frozen=True)
class Candidate:
    """One priced candidate of a ranking, as the columns had it."""

    configuration: Configuration
    accumulation: int
    communication_s: float
    compute_s: float
    iteration_s: float
    memory_bytes: float

    @property
    def exposed_communication_s(self) -> float:
        """Time of the step in which nothing is computed, s."""
        return float(exposed_s(self.iteration_s, self.compute_s))


@dataclass(frozen=True)
class Rejected:
    """A grid that cannot be used, with the reasons in words."""

    sizes: dict[str, int]
    reasons: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Ranking:
    """Result of a search. `rows` indexes the columns, best first, each grid once (or every candidate)."""

    problem: Problem
    searched: Searched
    grids: Grids
    shapes: Shapes
    placements: Placements
    fittings: dict[Recompute, Fitting]
    columns: Columns
    rows: Integers

    def __len__(self) -> int:
        return len(self.rows)

    def candidate(self, position: int) -> Candidate:
        """The candidate at a place of the ranking, from 0."""
        row = int(self.rows[position])
        columns = self.columns
        shape, recompute = int(columns.shape[row]), RECOMPUTES[columns.recompute[row]]
        x, y, z, data = self.grids.sizes[self.shapes.grid[shape]].tolist()
        order = ORDERS[self.placements.order[columns.placement[row]]]
        micro_batch = int(self.shapes.micro_batch[shape])
        fitting = self.fittings[recompute]
        grid = Grid(x, y, z, data, order=order)
        return Candidate(
            configuration=Configuration(grid, micro_batch, recompute, int(fitting.kept_layers[shape])),
            accumulation=self.problem.workload.global_batch // (grid.data * grid.z * micro_batch),
            communication_s=float(columns.communication_s[row]),
            compute_s=float(columns.compute_s[row]),
            iteration_s=float(columns.iteration_s[row]),
            memory_bytes=float(fitting.total_bytes[shape]),
        )

    def price(self, position: int) -> Pricing:
        """Every term of the candidate at a place of the ranking."""
        problem = self.problem
        return price_configuration(
            problem.model, problem.machine, problem.workload, self.candidate(position).configuration
        )

    def fastest(self) -> Ranking:
        """The same search with the candidate of the shortest step alone, whatever was ranked by."""
        steps_s = self.columns.iteration_s
        rows = np.flatnonzero(steps_s == steps_s.min(initial=np.inf))
        ordered = _order(self.columns, rows, self.shapes, self.placements, rank_by="iteration", fittings=self.fittings)
        return replace(self, rows=ordered[:1])

    def rejected(self) -> tuple[Rejected, ...]:
        """Every grid that is not ranked, with its reasons, in the order of the grids."""
        ranked = set(self.shapes.grid[self.columns.shape].tolist())
        shaped = set(self.shapes.grid.tolist())
        return tuple(
            Rejected(sizes := dict(zip(AXES, row, strict=True)), self._reasons(number, sizes, shaped=shaped))
            for number, row in enumerate(self.grids.sizes.tolist())
            if number not in ranked
        )

    def _reasons(self, number: int, sizes: dict[str, int], *, shaped: set[int]) -> tuple[tuple[str, str], ...]:
        broken = tuple(
            (check.name, check.explain(sizes))
            for check, is_broken in zip(self.grids.constraints, self.grids.broken[number], strict=True)
            if is_broken
        )
        if broken:
            return broken
        if number not in shaped:
            return ((MICRO_BATCH, "no micro-batch that is allowed divides this grid's share of the batch"),)
        least = min(float(fitting.total_bytes[self.shapes.grid == number].min()) for fitting in self.fittings.values())
        limit_bytes = next(iter(self.fittings.values())).limit_bytes
        return ((MEMORY, f"needs {least / 2**30:.1f} GiB of {limit_bytes / 2**30:.1f} GiB"),)


@dataclass(frozen=True)
class Columns:
    """Priced candidates of all kinds of recomputation: indices and seconds, one row each."""

    shape: Integers
    placement: Integers
    recompute: Integers
    communication_s: Floats
    compute_s: Floats
    iteration_s: Floats


def search(problem: Problem, *, variants: bool = False) -> Ranking:
    """Rank every grid of a GPU count; with `variants` every candidate of it. Nothing feasible: an empty ranking."""
    started = time.perf_counter()
    _check(problem)
    model, machine, workload, limits = problem.model, problem.machine, problem.workload, problem.limits
    grids = list_grids(problem.gpus, model, workload)
    shapes = list_shapes(grids, model, workload, limits)
    fittings = {
        recompute: fit_memory(model, machine, workload, shapes, recompute=recompute, limits=limits)
        for recompute in limits.recomputes
    }
    used = np.unique(np.concatenate([shapes.grid[fitting.rows] for fitting in fittings.values()]))
    placements = list_placements(grids, used, limits)
    table = route_table(placements.shapes, placements.routes, machine, problem.gpus)
    columns = _joined([_price(problem, shapes, placements, table, kind, fittings[kind]) for kind in limits.recomputes])
    candidates = len(columns.shape)
    rows = np.arange(candidates) if variants else _best_of_each(columns, shapes, rank_by=problem.rank_by)
    rows = _order(columns, rows, shapes, placements, rank_by=problem.rank_by, fittings=fittings)
    searched = Searched(
        grids=len(grids.sizes),
        candidates=_count_candidates(shapes, placements, grids, limits),
        feasible=candidates,
        rejected=_count_rejected(grids, shapes, used),
        seconds=time.perf_counter() - started,
    )
    chosen = rows if variants else _first_of_each(shapes.grid[columns.shape[rows]], rows)
    return Ranking(problem, searched, grids, shapes, placements, fittings, columns, chosen)


def _check(problem: Problem) -> None:
    """Refuse what no grid could satisfy and no constraint would name."""
    model, workload, pins = problem.model, problem.workload, problem.limits.axes
    if max(problem.gpus, workload.global_batch, workload.sequence_length) >= LARGEST_COUNT:
        raise UsageError(f"GPU counts, batches and sequence lengths must be below {LARGEST_COUNT:,}")
    if len(pins) == len(AXES) and prod(pins.values()) != problem.gpus:
        asked = "·".join(str(pins[axis]) for axis in AXES)
        raise UsageError(f"x·y·z·data = {asked} is {prod(pins.values())}, not {problem.gpus} GPUs")
    if model.learned_positions and workload.sequence_length > model.max_sequence_length:
        raise UsageError(
            f"sequence length {workload.sequence_length} exceeds the position table of {model.name} "
            f"({model.max_sequence_length})"
        )
    kept = problem.limits.kept_layers
    if kept is not None and kept > model.layers:
        raise UsageError(f"--kept-layers {kept}: {model.name} has {model.layers} layers")
    if workload.precision not in problem.machine.accelerator.peak_tflops:
        known = list(problem.machine.accelerator.peak_tflops)
        advice = f"; try --precision {known[0]}" if known else ""
        raise UsageError(
            f"machine {problem.machine.name} states no {workload.precision} peak "
            f"(accelerator.peak_tflops has {', '.join(known)}){advice}"
        )


def _price(
    problem: Problem, shapes: Shapes, placements: Placements, table: RouteTable, recompute: Recompute, fitting: Fitting
) -> Columns:
    """Price all candidates of one kind of recomputation that fit into memory."""
    workload = problem.workload
    candidates, placement = list_candidates(shapes, fitting.rows, placements)
    program = build_step(problem.model, workload, recompute=recompute)
    pricer = ColumnPricer(
        program,
        build_schedule(program, overlaps=workload.overlaps, split=workload.split_micro_batch),
        rates=compute_rates(problem.machine.accelerator, workload.precision),
        element_bytes=float(workload.element_sizes.compute),
        table=table,
    )
    kept = {"kept": fitting.kept_layers, "unkept": float(problem.model.layers) - fitting.kept_layers}
    prices: Prices = pricer.price(candidates, {**shapes.values, **kept})
    number = np.full(len(candidates), RECOMPUTES.index(recompute), dtype=np.int64)
    return Columns(candidates.shape, placement, number, prices.communication_s, prices.compute_s, prices.iteration_s)


def _joined(parts: list[Columns]) -> Columns:
    """Columns one after the other."""
    names = ("shape", "placement", "recompute", "communication_s", "compute_s", "iteration_s")
    return Columns(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _order(
    columns: Columns,
    rows: Integers,
    shapes: Shapes,
    placements: Placements,
    *,
    rank_by: RankBy,
    fittings: dict[Recompute, Fitting],
) -> Integers:
    """Rows from best to worst. Ties: shorter step, less memory, then grid, order, micro-batch, recomputation."""
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
    return np.asarray(exposed_s(columns.iteration_s, columns.compute_s))


def _first_of_each(grid: NDArray[np.int64], rows: Integers) -> Integers:
    """The first row of each grid, in ranking order."""
    _, first = np.unique(grid, return_index=True)
    return rows[np.sort(first)]


def _count_candidates(shapes: Shapes, placements: Placements, grids: Grids, limits: Limits) -> int:
    """Candidates before memory is looked at: shapes times distinct orders times kinds of recomputation."""
    if limits.order is not None:
        return len(shapes) * len(limits.recomputes)
    wide = (grids.sizes[shapes.grid] > 1).sum(axis=1)
    orders = np.array([1, 1, 2, 6, 24])[wide]
    return int(orders.sum()) * len(limits.recomputes)


def _count_rejected(grids: Grids, shapes: Shapes, used: Integers) -> dict[str, int]:
    """Grids rejected, by constraint; names without any are left out."""
    counts = {check.name: int(broken.sum()) for check, broken in zip(grids.constraints, grids.broken.T, strict=True)}
    shaped = len(np.unique(shapes.grid))
    counts[MICRO_BATCH] = len(grids.sound) - shaped
    counts[MEMORY] = shaped - len(used)
    return {name: count for name, count in counts.items() if count}
