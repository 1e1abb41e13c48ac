"""Prices of many candidates at once: a candidate is a row, a quantity is a column.

Three levels keep the work small. A *route* is a group shape on the machine; there are a few hundred,
priced one by one into tables. A *shape* is a grid with a micro-batch; sizes and compute times depend
on nothing else. A *candidate* adds the axis order, which decides the routes and so the schedule.
Candidates are scheduled in blocks that fit the cache and whose collectives use the same lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from axonn_tune.cost.arithmetic import COLUMNS, Column
from axonn_tune.cost.collectives import Route, collective_time_s, lines, route
from axonn_tune.cost.compute import ComputeRates
from axonn_tune.cost.durations import Clock, compute_s
from axonn_tune.cost.replay import Replay
from axonn_tune.cost.schedule import Instructions, Run, StepSchedule
from axonn_tune.grid import GroupShape
from axonn_tune.program.operations import GROUP_AXES, Collective
from axonn_tune.program.size import Size, Value
from axonn_tune.program.step import StepProgram
from axonn_tune.specs.machine import CollectiveKind, Machine

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

BLOCK_ROWS = 4096
"""Candidates scheduled together: a column of this many float64 stays in the second-level cache."""

@dataclass(frozen=True)
class RouteTable:
    """Lines of every collective on every distinct route, and the tier each route's lane belongs to (-1: none)."""

    tier: Integers
    lines: dict[CollectiveKind, tuple[tuple[Floats, Floats], ...]]


def route_table(shapes: tuple[GroupShape, ...], machine: Machine, world: int) -> RouteTable:
    """Price every shape for every kind of collective; rows without a line cost nothing and have no lane."""
    paths = [route(shape, machine.tiers, world) for shape in shapes]
    tier = np.array([path.outermost for path in paths])
    kinds: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce")
    return RouteTable(tier, {kind: _line_columns(kind, paths, machine) for kind in kinds})


def _line_columns(
    kind: CollectiveKind, paths: list[Route], machine: Machine
) -> tuple[tuple[Floats, Floats], ...]:
    """`(latency_s, bandwidth_bytes_per_s)` columns, one pair per line; missing lines repeat the first."""
    found = [lines(kind, path, machine) for path in paths]
    width = max((len(row) for row in found), default=0)
    columns = []
    for position in range(width):
        latency, bandwidth = np.zeros(len(paths)), np.full(len(paths), np.inf)
        for index, row in enumerate(found):
            if row:
                line = row[position] if position < len(row) else row[0]
                latency[index], bandwidth[index] = line.latency_s, line.bandwidth_bytes_per_s
        columns.append((latency, bandwidth))
    return tuple(columns)


@dataclass(frozen=True)
class Candidates:
    """Rows to price: the shape each belongs to, and its route over each group of axes."""

    shape: Integers
    routes: dict[str, Integers]

    def __len__(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Prices:
    """Columns of seconds, one row per candidate."""

    communication_s: Floats
    compute_s: Floats
    iteration_s: Floats


class ColumnPricer:
    """Prices candidates of one program (one kind of recomputation) on one machine."""

    def __init__(
        self, program: StepProgram, schedule: StepSchedule, *, rates: ComputeRates, element_bytes: float, table: RouteTable
    ) -> None:
        self._program = program
        self._schedule = schedule
        self._rates = rates
        self._element_bytes = element_bytes
        self._table = table
        self._terms = tuple(program.collectives())

    def price(self, candidates: Candidates, values: Mapping[str, Value]) -> Prices:
        """Price every candidate; `values` are columns over shapes, `kept` among them."""
        clock = Clock(self._rates, self._element_bytes, values, COLUMNS)
        shapes = _ShapeColumns(clock, self._schedule, self._terms)
        count = len(candidates)
        communication, iteration = np.empty(count), np.empty(count)
        step_compute = np.broadcast_to(np.asarray(compute_s(self._program, clock)), shapes.rows).take(candidates.shape)
        for rows, tiers in self._blocks(candidates, values):
            block = _Block(self._table, candidates, rows, shapes)
            communication[rows] = block.communication_s(self._terms, tiers)
            iteration[rows] = block.iteration_s(self._schedule, tiers)
        return Prices(communication, step_compute, iteration)

    def _blocks(
        self, candidates: Candidates, values: Mapping[str, Value]
    ) -> Iterator[tuple[Integers, dict[str, int]]]:
        """Rows that share lanes and kind of keeping, at most `BLOCK_ROWS` at once."""
        kept, layers = np.asarray(values["kept"]), values["L"]
        keeping = np.where(kept == 0, 0, np.where(kept == layers, 2, 1)).take(candidates.shape)
        keys = [self._table.tier.take(candidates.routes[axes]) for axes in GROUP_AXES]
        code = keeping.copy()
        for key in keys:
            code = code * 16 + (key + 1)
        order = np.argsort(code, kind="stable")
        edges = np.flatnonzero(np.diff(code[order])) + 1
        for group in np.split(order, edges):
            if len(group):
                tiers = {axes: int(key[group[0]]) for axes, key in zip(GROUP_AXES, keys, strict=True)}
                for start in range(0, len(group), BLOCK_ROWS):
                    yield group[start : start + BLOCK_ROWS], tiers


class _ShapeColumns:
    """Everything that depends on the shape alone, computed once per shape and picked per block."""

    def __init__(self, clock: Clock, schedule: StepSchedule, terms: tuple[tuple[Collective, Size], ...]) -> None:
        self.values = clock.values
        self.rows = len(np.asarray(clock.values["b"]))
        calls: dict[object, Column] = {}
        self.runs: dict[int, Column] = {}
        for run in _runs(schedule):
            total: Column = 0.0
            for step in run.operations:
                if step not in calls:
                    calls[step] = clock.run_s(step)
                total = total + calls[step]
            self.runs[id(run)] = total
        self.sizes: dict[Size, Column] = {}
        for collective, count in terms:
            for size in (collective.size_bytes, count, collective.calls):
                if size not in self.sizes:
                    self.sizes[size] = size.evaluate(clock.values)


def _runs(schedule: StepSchedule) -> Iterator[Run]:
    """Every run of a schedule."""
    for instructions in every_part(schedule):
        for instruction in instructions:
            if isinstance(instruction, Run):
                yield instruction


def every_part(schedule: StepSchedule) -> Iterator[Instructions]:
    """Every list of instructions in a schedule."""
    for batch in (schedule.micro_batch, schedule.last_micro_batch):
        yield from (batch.embedding, batch.block, batch.last_block, batch.head, batch.head_all_kept, batch.flush)
        back = batch.backward
        yield from (back.first, back.middle, back.last, back.only, back.kept_first, back.kept_middle)
    yield schedule.end


class _Block:
    """One block of candidates: picks shape and route columns for its rows, each at most once."""

    def __init__(self, table: RouteTable, candidates: Candidates, rows: Integers, shapes: _ShapeColumns) -> None:
        self._table = table
        self._shapes = shapes
        self._shape = candidates.shape.take(rows)
        self._routes = {axes: index.take(rows) for axes, index in candidates.routes.items()}
        self._lines: dict[tuple[CollectiveKind, str], tuple[tuple[Column, Column], ...]] = {}
        self._times: dict[tuple[CollectiveKind, str, Size], Column] = {}
        self._picked: dict[int, Column] = {}

    def _pick(self, column: Column) -> Column:
        """A shape column's values for this block's rows."""
        if isinstance(column, float):
            return column
        key = id(column)
        if key not in self._picked:
            self._picked[key] = column.take(self._shape)
        return self._picked[key]

    def _call_s(self, collective: Collective) -> Column:
        """Time of one call of a collective."""
        key = (collective.kind, collective.axis, collective.size_bytes)
        if key not in self._times:
            chosen = self._chosen_lines(collective.kind, collective.axis)
            size_bytes = self._pick(self._shapes.sizes[collective.size_bytes])
            self._times[key] = collective_time_s(chosen, size_bytes, COLUMNS)
        return self._times[key]

    def _chosen_lines(self, kind: CollectiveKind, axis: str) -> tuple[tuple[Column, Column], ...]:
        if (kind, axis) not in self._lines:
            index = self._routes[axis]
            self._lines[kind, axis] = tuple(
                (latency.take(index), bandwidth.take(index)) for latency, bandwidth in self._table.lines[kind]
            )
        return self._lines[kind, axis]

    def communication_s(self, terms: tuple[tuple[Collective, Size], ...], tiers: Mapping[str, int]) -> Column:
        """Left fold of calls times seconds over the terms; groups of one are left out."""
        total: Column = 0.0
        for collective, count in terms:
            if tiers[collective.axis] >= 0:
                total = total + self._pick(self._shapes.sizes[count]) * self._call_s(collective)
        return total

    def iteration_s(self, schedule: StepSchedule, tiers: Mapping[str, int]) -> Column:
        """End of the schedule."""
        values = self._shapes.values
        replay: Replay[Column] = Replay(
            run_s=lambda run: self._pick(self._shapes.runs[id(run)]),
            collective_s=self._scheduled_s,
            lane=tiers,
            larger=np.maximum,
            choose=np.where,
        )
        return replay.step_s(
            schedule,
            layers=int(float(values["L"])),
            kept=self._pick(values["kept"]),
            accumulation=self._pick(values["A"]),
        )

    def _scheduled_s(self, collective: Collective) -> Column:
        """Time of a collective where the schedule has it: its calls in a row; a gather is one call."""
        if collective.role == "weight" or not collective.calls.powers:
            return self._call_s(collective)
        return self._pick(self._shapes.sizes[collective.calls]) * self._call_s(collective)
