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

from axonn_tune.cost.collectives import Route, collective_time_s, lines, route
from axonn_tune.cost.compute import ComputeClock, ComputeRates, compute_s
from axonn_tune.cost.replay import LinkedSchedule, Replay, link_schedule
from axonn_tune.cost.utilisation import contended_s
from axonn_tune.grid import GroupShape
from axonn_tune.program.operations import GROUP_AXES, Collective
from axonn_tune.program.schedule import StepSchedule
from axonn_tune.program.size import COLUMNS, Size, Value
from axonn_tune.program.step import StepProgram
from axonn_tune.specs.machine import COLLECTIVE_KINDS, CollectiveKind, Machine

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

BLOCK_ROWS = 8192
"""Candidates scheduled together: a column of this many float64 stays in the second-level cache."""

KINDS_SENT: dict[str, tuple[CollectiveKind, ...]] = {
    "x": ("all_reduce",),
    "y": ("all_gather", "reduce_scatter", "all_reduce"),
    "z": ("all_gather", "reduce_scatter", "all_reduce"),
    "data": ("all_gather", "reduce_scatter", "all_reduce"),
    "xy": ("all_reduce",),
    "xyzdata": ("all_reduce",),
}
"""Collectives that programs send over each group of axes; the others are not priced."""


@dataclass(frozen=True)
class RouteTable:
    """Lines of the collectives on every distinct route, and the tier each route's lane belongs to (-1: none)."""

    tier: Integers
    lines: dict[CollectiveKind, tuple[tuple[Floats, Floats], ...]]


def route_table(
    shapes: tuple[GroupShape, ...], used: Mapping[str, Integers], machine: Machine, world: int
) -> RouteTable:
    """Price the shapes; `used` tells which of them each group of axes takes. Groups of one cost nothing."""
    paths = [route(shape, machine.tiers, world) for shape in shapes]
    tier = np.array([path.outermost for path in paths])
    table: dict[CollectiveKind, tuple[tuple[Floats, Floats], ...]] = {}
    for kind in COLLECTIVE_KINDS:
        numbers = [used[axes] for axes, kinds in KINDS_SENT.items() if kind in kinds]
        table[kind] = _line_columns(kind, paths, np.unique(np.concatenate(numbers)).tolist(), machine)
    return RouteTable(tier, table)


def _line_columns(
    kind: CollectiveKind, paths: list[Route], numbers: list[int], machine: Machine
) -> tuple[tuple[Floats, Floats], ...]:
    """`(latency_s, bandwidth_bytes_per_s)` columns, one pair per line; missing lines repeat the first."""
    found = [(number, lines(kind, paths[number], machine)) for number in numbers]
    columns = []
    for position in range(max((len(row) for _, row in found), default=0)):
        latency, bandwidth = np.zeros(len(paths)), np.full(len(paths), np.inf)
        for number, row in found:
            if row:
                line = row[position] if position < len(row) else row[0]
                latency[number], bandwidth[number] = line.latency_s, line.bandwidth_bytes_per_s
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
        self,
        program: StepProgram,
        schedule: StepSchedule,
        *,
        rates: ComputeRates,
        element_bytes: float,
        table: RouteTable,
    ) -> None:
        self._program = program
        self._schedule = link_schedule(schedule)
        self._rates = rates
        self._element_bytes = element_bytes
        self._table = table
        self._terms = tuple(program.collectives())

    def price(self, candidates: Candidates, values: Mapping[str, Value]) -> Prices:
        """Price every candidate; `values` are columns over shapes, `kept` among them."""
        count = len(candidates)
        communication, iteration = np.empty(count), np.empty(count)
        clock = Clock(self._rates, self._element_bytes, values, COLUMNS)
        step_compute = np.broadcast_to(np.asarray(compute_s(self._program, clock)), len(np.asarray(values["b"])))
        if count:
            shapes = _ShapeColumns(clock, self._schedule, self._terms)
            for rows, lanes, keeping in self._blocks(candidates, values):
                block = _Block(self._table, candidates, rows, shapes, lanes)
                communication[rows] = block.communication_s(self._terms)
                iteration[rows] = block.iteration_s(self._schedule, keeping=keeping)
        alone = step_compute.take(candidates.shape)
        lost = contended_s(communication, alone, iteration, contention=self._rates.contention)
        return Prices(communication, alone + lost, iteration + lost)

    def _blocks(
        self, candidates: Candidates, values: Mapping[str, Value]
    ) -> Iterator[tuple[Integers, dict[str, int], int]]:
        """Rows that share lanes and kind of keeping, at most `BLOCK_ROWS` at once, with both.

        A group of one sends nothing and fits any lane; it is put with the outermost tier's.
        """
        kept, layers = np.asarray(values["kept"]), values["L"]
        code = np.where(kept == 0, 0, np.where(kept == layers, 2, 1)).take(candidates.shape)
        outermost = int(self._table.tier.max(initial=0))
        tiers = {axes: self._table.tier.take(candidates.routes[axes]) for axes in GROUP_AXES}
        for tier in tiers.values():
            code = code * (outermost + 1) + np.where(tier < 0, outermost, tier)
        assert 3 * (outermost + 1) ** len(tiers) < 2**15, "codes fit 16 bits, which sort in linear time"
        order = np.argsort(code.astype(np.int16), kind="stable")
        for group in np.split(order, np.flatnonzero(np.diff(code[order])) + 1):
            lanes = {axes: int(tier.take(group).max()) for axes, tier in tiers.items()}
            keeping = int(code[group[0]] // (outermost + 1) ** len(tiers))
            for start in range(0, len(group), BLOCK_ROWS):
                yield group[start : start + BLOCK_ROWS], lanes, keeping


class _ShapeColumns:
    """Everything that depends on the shape alone, computed once per shape and picked per block."""

    def __init__(self, clock: Clock, schedule: LinkedSchedule, terms: tuple[tuple[Collective, Size], ...]) -> None:
        self.values = clock.values
        calls: dict[int, Value] = {}
        self.runs: list[Value] = []
        for operations in schedule.linker.runs:
            total: Value = 0.0
            for step in operations:
                if id(step) not in calls:
                    calls[id(step)] = clock.run_s(step)
                total = total + calls[id(step)]
            self.runs.append(total)
        self.sizes: dict[Size, Value] = {}
        wanted = [size for collective, count in terms for size in (collective.size_bytes, count)]
        for collective, times in schedule.linker.collectives:
            wanted += [collective.size_bytes] if times is None else [collective.size_bytes, times]
        for size in wanted:
            if size not in self.sizes:
                self.sizes[size] = size.evaluate(clock.values)


class _Block:
    """One block of candidates: picks shape and route columns for its rows, each at most once."""

    def __init__(
        self, table: RouteTable, candidates: Candidates, rows: Integers, shapes: _ShapeColumns, lanes: Mapping[str, int]
    ) -> None:
        self._table = table
        self._shapes = shapes
        self._lanes = lanes
        self._shape = candidates.shape.take(rows)
        self._routes = {axes: index.take(rows) for axes, index in candidates.routes.items()}
        self._lines: dict[tuple[CollectiveKind, str], tuple[tuple[Value, Value], ...]] = {}
        self._times: dict[tuple[CollectiveKind, str, Size], Value] = {}
        self._picked: dict[int, Value] = {}

    def _pick(self, column: Value) -> Value:
        """A shape column's values for this block's rows."""
        if isinstance(column, float):
            return column
        key = id(column)
        if key not in self._picked:
            self._picked[key] = column.take(self._shape)
        return self._picked[key]

    def _call_s(self, collective: Collective) -> Value:
        """Time of one call of a collective."""
        key = (collective.kind, collective.axis, collective.size_bytes)
        if key not in self._times:
            chosen = self._chosen_lines(collective.kind, collective.axis)
            size_bytes = self._pick(self._shapes.sizes[collective.size_bytes])
            self._times[key] = collective_time_s(chosen, size_bytes, COLUMNS)
        return self._times[key]

    def _chosen_lines(self, kind: CollectiveKind, axis: str) -> tuple[tuple[Value, Value], ...]:
        if (kind, axis) not in self._lines:
            index = self._routes[axis]
            self._lines[kind, axis] = tuple(
                (latency.take(index), bandwidth.take(index)) for latency, bandwidth in self._table.lines[kind]
            )
        return self._lines[kind, axis]

    def communication_s(self, terms: tuple[tuple[Collective, Size], ...]) -> Value:
        """Left fold of calls times seconds over the terms; groups of one add nothing."""
        total: Value = 0.0
        for collective, count in terms:
            if self._lanes[collective.axis] >= 0:
                total = total + self._pick(self._shapes.sizes[count]) * self._call_s(collective)
        return total

    def iteration_s(self, schedule: LinkedSchedule, *, keeping: int) -> Value:
        """End of the schedule."""
        values, linker = self._shapes.values, schedule.linker
        present = {axes: self._presence(axes) for axes in self._lanes}
        replay = Replay(
            runs=[self._pick(column) for column in self._shapes.runs],
            collectives=[self._scheduled_s(collective, calls) for collective, calls in linker.collectives],
            lanes=[self._lanes[collective.axis] for collective, _ in linker.collectives],
            present=[present[collective.axis] for collective, _ in linker.collectives],
            tiers=int(self._table.tier.max(initial=0)) + 1,
            slots=len(linker.slots),
        )
        return replay.step_s(
            schedule,
            layers=int(float(values["L"])),
            kept=self._pick(values["kept"]),
            keeping=keeping,
            accumulation=self._pick(values["A"]),
            buckets=self._lanes["data"] >= 0,
        )

    def _presence(self, axes: str) -> Value | None:
        """1.0 for candidates whose group over `axes` has several members; None if that is all of them."""
        several = self._table.tier.take(self._routes[axes]) >= 0
        return None if several.all() else several.astype(np.float64)

    def _scheduled_s(self, collective: Collective, calls: Size | None) -> Value:
        """Time of a collective where the schedule has it: its calls in a row."""
        if self._lanes[collective.axis] < 0:
            return 0.0
        call_s = self._call_s(collective)
        return call_s if calls is None else self._pick(self._shapes.sizes[calls]) * call_s
