"""Prices of one candidate or of many at once: a candidate is a row, a quantity is a number or a column.

Three levels keep the work small. A *route* is a group shape on the machine; there are a few hundred,
priced one by one into tables. A *shape* is a grid with a micro-batch; sizes and compute times depend
on nothing else. A *candidate* adds the rank order, which decides the routes and so the schedule.
Candidates are replayed in blocks that fit the cache; a candidate alone is a block of numbers. Numbers and columns get
the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from axonn_tune.cost.collectives import lines, route
from axonn_tune.cost.compute import ComputeClock, ComputeRates, contended_s
from axonn_tune.cost.replay import Lines, Replay, StageWork
from axonn_tune.grid import GroupShape
from axonn_tune.program.operations import COLUMNS, Floats, Integers, Sent, Value
from axonn_tune.program.schedule import StepSchedule
from axonn_tune.program.step import ONLY, Runs, Stage, StepProgram
from axonn_tune.specs.machine import Machine

if TYPE_CHECKING:
    from axonn_tune.cost.paces import Paces


def distinct(values: NDArray[Any]) -> tuple[NDArray[Any], Integers, Integers]:
    """Distinct values ascending, the first place of each, and for each place the number of its value.

    As `np.unique`, which loads masked arrays first: more than a whole search takes here.
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    new = np.ones(len(values), dtype=np.bool_)
    new[1:] = ordered[1:] != ordered[:-1]
    numbers = np.empty(len(values), dtype=np.int64)
    numbers[order] = np.cumsum(new) - 1
    return ordered[new], order[new], numbers


BLOCK_ROWS = 8192
"""Candidates scheduled together: a column of this many float64 stays in the second-level cache."""
SLAB_ROWS = 16384
"""Candidates whose bounds are worked out at once: their columns stay there, too."""


@dataclass(frozen=True)
class RouteTable:
    """Lines of the collectives on every distinct route, and the tier each route's stream belongs to (-1: none)."""

    tier: Integers
    lines: dict[Sent, Lines]

    @cached_property
    def alike(self) -> Integers:
        """A number per route, shared by routes with equal times of all collectives on the same stream."""
        numbers = self.tier
        for column in (np.asarray(one) for pairs in self.lines.values() for pair in pairs for one in pair):
            most = int(numbers.max(initial=0)) + 2
            numbers = distinct(distinct(column)[2] * most + numbers + 1)[2]
        return numbers


def route_table(
    shapes: tuple[GroupShape, ...],
    used: Mapping[str, Integers],
    machine: Machine,
    world: int,
    *,
    sent: Iterable[tuple[Sent, str]],
    call_s: float = 0.0,
) -> RouteTable:
    """Price the shapes; `used` tells which of them each group of axes takes. Groups of one cost nothing.

    sent: the collectives of all programs with their groups: nothing else is priced; call_s: software overhead per call.
    """
    paths = [route(shape, machine.tiers, world) for shape in shapes]
    tier = np.array([path.outermost for path in paths])
    groups: dict[Sent, set[str]] = {}
    for kind, axes in sent:
        groups.setdefault(kind, set()).add(axes)
    table: dict[Sent, Lines] = {}
    for kind, several in groups.items():
        numbers = distinct(np.concatenate([used[axes] for axes in several]))[0].tolist()
        found = [(number, lines(kind, paths[number], machine, call_s=call_s)) for number in numbers]
        # A pair of columns a line; where a route has fewer lines, its first again.
        columns = []
        for position in range(max((len(row) for _, row in found), default=0)):
            latency, bandwidth = np.zeros(len(paths)), np.full(len(paths), np.inf)
            for number, row in found:
                if row:
                    line = row[position] if position < len(row) else row[0]
                    latency[number], bandwidth[number] = line.latency_s, line.bandwidth_bytes_per_s
            columns.append((latency, bandwidth))
        table[kind] = tuple(columns)
    return RouteTable(tier, table)


@dataclass(frozen=True)
class Candidates:
    """Rows to price: the shape each belongs to, and its route over each group of axes."""

    shape: Integers
    routes: dict[str, Integers]

    def __len__(self) -> int:
        return len(self.shape)

    def taken(self, rows: Integers) -> Candidates:
        """Some of them."""
        return Candidates(self.shape[rows], {axes: route[rows] for axes, route in self.routes.items()})


class ColumnPricer:
    """Prices candidates of one program (one kind of recompute) on one machine."""

    def __init__(
        self,
        program: StepProgram,
        schedule: StepSchedule,
        *,
        rates: ComputeRates,
        element_bytes: float,
        table: RouteTable,
    ) -> None:
        self.program, self._schedule = program, schedule
        self._rates, self._element_bytes, self._table = rates, element_bytes, table

    def clock(
        self, values: Mapping[str, Value], others: tuple[ComputeClock, Integers | None] | None = None
    ) -> ComputeClock:
        """The clock of some shapes; others: of more of them."""
        return ComputeClock(self._rates, self._element_bytes, values, COLUMNS, others=others)

    def work(
        self, clock: ComputeClock | Mapping[str, Value], stage: Stage = ONLY, runs: Runs | None = None
    ) -> StageWork:
        """What depends on the shapes alone; values of the clock are columns over shapes, `kept` among them."""
        clock = clock if isinstance(clock, ComputeClock) else self.clock(clock)
        return StageWork(clock, self.program, self._schedule, stage, runs)

    def distinct(self, candidates: Candidates) -> tuple[Integers, Integers]:
        """Rows that represent all others of equal shape and route times; and the representative of each row."""
        alike, code = self._table.alike, candidates.shape.copy()
        most = int(alike.max(initial=0)) + 1
        for taken in candidates.routes.values():
            code = distinct(code * most + alike[taken])[2]
        _, first, representative = distinct(code)
        return first, representative

    def price(self, candidates: Candidates, values: Mapping[str, Value], runs: Runs) -> Floats:
        """Communication, computation and step of every candidate without pipeline stages, s.

        values: as for `work`; runs: all blocks of the model.
        """
        communication, iteration, waited = np.zeros((3, len(candidates)))
        if not len(candidates):
            return np.zeros((3, 0))
        work = self.work(values, runs=runs)
        for rows in _blocks(candidates, work):
            replay = self._replay(candidates.taken(rows), work)
            communication[rows] = replay.communication_s()
            iteration[rows], waited[rows] = replay.step_s()
        alone = _computed_s(work, candidates) + waited
        lost = contended_s(communication, alone, iteration, contention=self._rates.contention)
        return np.stack([communication, alone + lost, iteration + lost])

    def paces(
        self, candidates: Candidates, work: StageWork, *, first: int, last: int, kept: bool, idle: bool = False
    ) -> Paces:
        """Runs of blocks of each candidate, as of `BlockRuns.paces`, or with `idle` of its `idle_paces`, with a stream
        for every group in which some candidate sends: what is sent waits no longer for it than for one they share."""
        # Imported here: most searches have no pipeline stages, and start-up time is theirs.
        from axonn_tune.cost.block_runs import BlockRuns

        runs = BlockRuns(self._replay(candidates, work, apart=True))
        return (runs.idle_paces if idle else runs.paces)(first=first, last=last, kept=kept)

    def _replay(self, block: Candidates, work: StageWork, *, apart: bool = False) -> Replay:
        """The replay of a block of candidates: columns of shapes and routes are picked at most once each; apart: with a
        stream for every group."""
        table, groups, known = self._table, self.program.groups, dict[int, Value]()
        tiers = {axes: table.tier.take(block.routes[axes]) for axes in groups}
        sent = {axes: distinct(tier[tier >= 0])[0].tolist() for axes, tier in tiers.items()}

        def picked(column: Value) -> Value:
            if isinstance(column, float):
                return column
            if id(column) not in known:
                known[id(column)] = column.take(block.shape)
            return known[id(column)]

        @cache
        def lines(kind: Sent, axes: str) -> Lines:
            routes = block.routes[axes]
            return tuple(
                (np.take(latency, routes), np.take(bandwidth, routes)) for latency, bandwidth in table.lines[kind]
            )

        def several(axes: str) -> Floats:
            return (tiers[axes] >= 0).astype(np.float64)

        return Replay(
            work,
            streams={axes: [at] * bool(sent[axes]) for at, axes in enumerate(groups)} if apart else sent,
            lines=lines,
            several=several,
            tiers=len(groups) if apart else int(table.tier.max(initial=0)) + 1,
            on=lambda axes, tier: several(axes) if apart else (tiers[axes] == tier).astype(np.float64),
            picked=picked,
        )


def _blocks(candidates: Candidates, work: StageWork) -> Iterator[Integers]:
    """Rows that share which segments of their blocks are empty, at most `BLOCK_ROWS` at once."""
    by_shape, kinds = np.zeros(1, dtype=np.int64), 1
    for one in work.segments(work.runs) if work.runs else []:
        by_shape, kinds = 2 * by_shape + (np.asarray(one.blocks) > 0), 2 * kinds
        if kinds > 2**10:
            values, _, by_shape = distinct(by_shape)
            kinds = len(values)
    code = np.broadcast_to(by_shape, len(np.asarray(work.values["b"]))).take(candidates.shape)
    order = np.argsort(code, kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(code[order])) + 1):
        for start in range(0, len(group), BLOCK_ROWS):
            yield group[start : start + BLOCK_ROWS]


def _computed_s(work: StageWork, candidates: Candidates) -> Floats:
    """Computation of the stage in a step of each candidate, s."""
    by_shape = np.broadcast_to(np.asarray(work.compute_s), len(np.asarray(work.values["b"])))
    return by_shape.take(candidates.shape)
