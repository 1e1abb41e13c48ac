"""Prices of many candidates at once: a candidate is a row, a quantity is a column.

Three levels keep the work small. A *route* is a group shape on the machine; there are a few hundred,
priced one by one into tables. A *shape* is a grid with a micro-batch; sizes and compute times depend
on nothing else. A *candidate* adds the rank order, which decides the routes and so the schedule.
Candidates are scheduled in blocks that fit the cache and whose collectives use the same streams.

The schedule is first *linked*: equal runs and equal collectives get one number each, so that a block prices each of
them once and the loop over instructions touches nothing but lists. Runs of equal blocks are replayed twice and the rest
extrapolated, since further blocks take equally long; an overloaded stream falls behind by an equal time with each
block. `timeline` is the plain reference.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from axonn_tune.cost.collectives import Route, collective_time_s, lines_of, route
from axonn_tune.cost.compute import ComputeClock, ComputeRates, compute_s
from axonn_tune.cost.utilisation import contended_s
from axonn_tune.grid import GroupShape
from axonn_tune.program.operations import Collective, Computation, OpKind
from axonn_tune.program.schedule import (
    BackwardBlocks,
    HostOperations,
    Instructions,
    MicroBatch,
    Run,
    StepSchedule,
    Sync,
    Wait,
)
from axonn_tune.program.size import COLUMNS, Size, Value
from axonn_tune.program.step import ONLY, Stage, StepProgram
from axonn_tune.specs.machine import Machine

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


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

T = TypeVar("T")

RUN, WAIT, SYNC, ISSUE = range(4)

Linked: TypeAlias = tuple[tuple[int, int, int], ...]
"""Instructions as `(code, number, slot)`: number of a run, of a handle (slot) to wait for, or of a collective."""


@dataclass
class Linker:
    """Numbers runs, collectives and handles while it links the parts of one schedule."""

    runs: list[tuple[Computation, ...]] = field(default_factory=list)
    collectives: list[tuple[Collective, Size | None]] = field(default_factory=list)
    slots: list[str] = field(default_factory=list)
    _known: dict[Hashable, int] = field(default_factory=dict)

    def link(self, instructions: Instructions) -> Linked:
        """One part of the schedule in numbers."""
        linked: list[tuple[int, int, int]] = []
        for step in instructions:
            if isinstance(step, Run):
                key = tuple(id(operation) for operation in step.operations)
                linked.append((RUN, self._number(key, self.runs, step.operations), 0))
            elif isinstance(step, Wait):
                linked.append((WAIT, self._slot(step.slot), 0))
            elif isinstance(step, Sync):
                linked.append((SYNC, self._collective(step.collective), 0))
            else:
                linked.append((ISSUE, self._collective(step.collective), self._slot(step.slot)))
        return tuple(linked)

    def _collective(self, collective: Collective) -> int:
        """Number of a collective with its consecutive calls; a weight gather is one call."""
        calls = None if collective.role == "weight" or not collective.calls.powers else collective.calls
        key = (collective.kind, collective.axis, collective.size_bytes, calls)
        return self._number(key, self.collectives, (collective, calls))

    def _slot(self, name: str) -> int:
        return self._number(name, self.slots, name)

    def _number(self, key: Hashable, things: list[T], thing: T) -> int:
        if key not in self._known:
            self._known[key] = len(things)
            things.append(thing)
        return self._known[key]


@dataclass(frozen=True)
class LinkedMicroBatch:
    """A `MicroBatch` in numbers."""

    embedding: Linked
    enter: Linked
    block: Linked
    last_block: Linked
    alone: Linked
    head: Linked
    head_all_kept: Linked
    enter_backward: Linked
    first: Linked
    middle: Linked
    last: Linked
    only: Linked
    kept_first: Linked
    kept_middle: Linked
    flush: Linked
    leave: Linked


@dataclass(frozen=True)
class LinkedSchedule:
    """A `StepSchedule` in numbers, with the operations that they stand for."""

    linker: Linker
    micro_batch: LinkedMicroBatch
    last_micro_batch: LinkedMicroBatch
    ends: Mapping[Stage, Linked]
    issued: tuple[HostOperations, HostOperations]
    replicas: str


def link_schedule(schedule: StepSchedule) -> LinkedSchedule:
    """Number everything in a schedule."""
    linker = Linker()

    def batch(part: MicroBatch) -> LinkedMicroBatch:
        back: BackwardBlocks = part.backward
        pieces = (part.embedding, part.enter, part.block, part.last_block, part.alone, part.head, part.head_all_kept)
        blocks = (back.first, back.middle, back.last, back.only, back.kept_first, back.kept_middle)
        every = (*pieces, part.enter_backward, *blocks, part.flush, part.leave)
        return LinkedMicroBatch(*(linker.link(piece) for piece in every))

    return LinkedSchedule(
        linker,
        batch(schedule.micro_batch),
        batch(schedule.last_micro_batch),
        {stage: linker.link(end) for stage, end in schedule.ends.items()},
        schedule.issued,
        schedule.replicas,
    )


State: TypeAlias = list[Any]
"""Clock of the compute stream, of each tier's stream, then of each handle; None before first use."""


@dataclass(frozen=True)
class ChunkColumns:
    """One micro-batch through a chunk, s, as `ChunkTimes`; host_s: wait for the host, all micro-batches."""

    forward_s: Value
    backward_s: Value
    last_backward_s: Value
    end_s: Value
    data_s: Value
    host_s: Value

    def taken(self, rows: Integers) -> ChunkColumns:
        """The rows of some candidates."""
        return ChunkColumns(*(column[rows] for column in self.columns))

    def placed(self, rows: Integers, count: int) -> ChunkColumns:
        """The same in `rows` of `count` candidates; the other rows are undefined."""
        found = ChunkColumns(*(np.full(count, np.nan) for _ in self.columns))
        for column, value in zip(found.columns, self.columns, strict=True):
            column[rows] = value
        return found

    @property
    def columns(self) -> tuple[Any, ...]:
        """All of them."""
        return self.forward_s, self.backward_s, self.last_backward_s, self.end_s, self.data_s, self.host_s


def _waited_s(host_s: Value, layers: Value, blocks_s: Value) -> Value:
    """Time in which blocks wait for the host that issues them, s."""
    if isinstance(host_s, float) and host_s == 0.0:
        return 0.0
    return np.maximum(0.0, host_s * layers - blocks_s)


@dataclass(frozen=True)
class Replay:
    """Replays one block of candidates.

    runs, collectives: durations by number; streams: tier of each collective's group, negative where no
    candidate of the block sends it; present: 1.0 where a candidate sends it and 0.0 where its group has
    one member, or None where all do; tiers, slots: numbers of tiers and handles.
    """

    runs: Sequence[Value]
    collectives: Sequence[Value]
    streams: Sequence[int]
    present: Sequence[Value | None]
    tiers: int
    slots: int

    def step_s(
        self,
        schedule: LinkedSchedule,
        *,
        layers: Value,
        kept: Value,
        keeping: int,
        accumulation: Value,
        buckets: bool,
        host_s: Value,
    ) -> tuple[Value, Value]:
        """Duration of one step without pipeline stages, and its wait for the host, s.

        keeping: 0 if all candidates reshard all layers after forward, 2 if none reshards any, 1 in between; buckets:
        whether the last micro-batch differs from the others by data-parallel buckets; host_s: time to issue a block's
        forward and backward.
        """
        last, waited_s = self._micro_batch(
            schedule.last_micro_batch, layers=layers, kept=kept, keeping=keeping, host_s=host_s
        )
        end = self._play(last, schedule.ends[ONLY])[0] + waited_s
        others_s, others_waited_s = last[0] + waited_s, waited_s
        if buckets:
            others, others_waited_s = self._micro_batch(
                schedule.micro_batch, layers=layers, kept=kept, keeping=keeping, host_s=host_s
            )
            others_s = others[0] + others_waited_s
        result: Value = (accumulation - 1.0) * others_s + end
        return result, (accumulation - 1.0) * others_waited_s + waited_s

    def _micro_batch(
        self, batch: LinkedMicroBatch, *, layers: Value, kept: Value, keeping: int, host_s: Value
    ) -> tuple[State, Value]:
        state = self._play(self._free(), batch.embedding)
        state, forward_s = self._forward(batch, state, layers=layers, final=batch.last_block)
        state = self._play(state, batch.head_all_kept if keeping == 2 else batch.head)
        state, backward_s = self._backward(batch, state, layers=layers, kept=kept, keeping=keeping)
        return self._play(state, batch.flush), _waited_s(host_s, layers, forward_s + backward_s)

    def _free(self) -> State:
        """Every stream free at time 0."""
        return [0.0, *([None] * (self.tiers + self.slots))]

    def _forward(self, batch: LinkedMicroBatch, state: State, *, layers: Value, final: Linked) -> tuple[State, Value]:
        """All blocks forward, and their time."""
        begun_s = state[0]
        state = self._play(self._repeat(state, batch.block, layers - 1), final)
        return state, state[0] - begun_s

    def _backward(
        self, batch: LinkedMicroBatch, state: State, *, layers: Value, kept: Value, keeping: int
    ) -> tuple[State, Value]:
        """All blocks backward, and their time."""
        begun_s = state[0]
        if keeping == 2:
            state = self._repeat(self._play(state, batch.kept_first), batch.kept_middle, layers - 1)
        elif keeping == 1:
            state = self._repeat_column(self._play(state, batch.kept_first), batch.kept_middle, kept - 1.0)
            state = self._repeat_column(state, batch.middle, layers - kept - 1.0)
            state = self._play(state, batch.last)
        elif isinstance(layers, float) and layers == 1.0:
            state = self._play(state, batch.only)
        else:
            several = self._repeat(self._play(state, batch.first), batch.middle, layers - 2.0)
            several = self._play(several, batch.last)
            if not isinstance(layers, float) and (layers == 1.0).any():
                several = _chosen(layers == 1.0, self._play(state, batch.only), several)
            state = several
        return state, state[0] - begun_s

    def chunk(
        self,
        schedule: LinkedSchedule,
        part: Stage,
        stage: Stage,
        *,
        layers: Value,
        kept: Value,
        keeping: int,
        host: tuple[Value, Value],
        times: Value,
    ) -> ChunkColumns:
        """A chunk of a pipeline stage of so many blocks: the column version of `Timeline.chunk`.

        host: time to issue a block's forward and backward, s, and the forward's share of it.
        """
        forward, backward = self._passes(schedule.micro_batch, part, layers=layers, kept=kept, keeping=keeping)
        _, last = self._passes(schedule.last_micro_batch, part, layers=layers, kept=kept, keeping=keeping)
        end_s = self._play(last[0], schedule.ends[stage])[0] - last[0][0]
        data_s = end_s - self._play(self._free(), schedule.ends[stage])[0]
        waited_s = _waited_s(host[0], layers, forward[1] + backward[1])
        ahead_s = waited_s * host[1]
        behind_s = waited_s - ahead_s
        passes_s = forward[0][0] + ahead_s, backward[0][0] + behind_s, last[0][0] + behind_s
        return ChunkColumns(*passes_s, end_s, data_s, times * waited_s)

    def _passes(
        self, batch: LinkedMicroBatch, stage: Stage, *, layers: Value, kept: Value, keeping: int
    ) -> tuple[tuple[State, Value], tuple[State, Value]]:
        state = self._play(self._free(), batch.embedding if stage.first else batch.enter)
        state, blocks_s = self._forward(
            batch, state, layers=layers, final=batch.last_block if stage.last else batch.alone
        )
        if stage.last:
            state = self._play(state, batch.head_all_kept)
        back = self._free() if keeping else self._play(self._free(), batch.enter_backward)
        back, backward_s = self._backward(batch, back, layers=layers, kept=kept, keeping=keeping)
        back = self._play(back, batch.flush if stage.first else batch.leave)
        return (state, blocks_s), (back, backward_s)

    def _repeat(self, state: State, part: Linked, times: Value) -> State:
        """The state after a part has run `times` times: exact for 0, 1 and 2, then extrapolated."""
        if not isinstance(times, float):
            return self._repeat_column(state, part, times)
        if times == 0:
            return state
        once = self._play(state, part)
        if times == 1:
            return once
        twice = self._play(once, part)
        return _repeated(once, twice, times - 2.0)

    def _repeat_column(self, state: State, part: Linked, times: Value) -> State:
        """The same with a number of times for each candidate."""
        once = self._play(state, part)
        twice = self._play(once, part)
        last = _repeated(once, twice, times - 2.0)
        none, one = times == 0.0, times == 1.0
        return [
            None if late is None else np.where(none, _clock(start), np.where(one, early, late))
            for start, early, late in zip(state, once, last, strict=True)
        ]

    def _play(self, state: State, part: Linked) -> State:
        """Run a part; returns the new state and leaves the given one unchanged."""
        state = list(state)
        clock = state[0]
        runs, collectives, streams, present = self.runs, self.collectives, self.streams, self.present
        first_slot, larger = 1 + self.tiers, np.maximum
        for code, number, slot in part:
            if code == RUN:
                clock = clock + runs[number]
            elif code == WAIT:
                ready = state[first_slot + number]
                if ready is not None:
                    clock = larger(clock, ready)
            elif streams[number] >= 0:
                lane = 1 + streams[number]
                busy, sending = state[lane], present[number]
                if busy is None:
                    state[lane] = end = clock + collectives[number]
                elif sending is None:
                    state[lane] = end = larger(busy, clock) + collectives[number]
                else:
                    end = larger(busy * sending, clock) + collectives[number]
                    state[lane] = larger(busy, end)
                if code == SYNC:
                    clock = end
                else:
                    state[first_slot + slot] = end
            elif code == ISSUE:
                state[first_slot + slot] = None
        state[0] = clock
        return state


def _chosen(wanted: Any, state: State, other: State) -> State:  # noqa: ANN401 - a column of truth values
    """One state where `wanted`, the other elsewhere; a clock missing in one of them is at its start there."""
    return [
        None if one is None and two is None else np.where(wanted, _clock(one), _clock(two))
        for one, two in zip(state, other, strict=True)
    ]


def _clock(value: Any) -> Any:  # noqa: ANN401 - a number or a column
    return 0.0 if value is None else value


def _repeated(before: State, state: State, times: Value) -> State:
    """State after `times` more repeats: each clock advances at its own pace, none slower than the first."""
    every = state[0] - before[0]
    found = [state[0] + times * every]
    for early, late in zip(before[1:], state[1:], strict=True):
        if late is None:
            found.append(None)
        else:
            found.append(late + times * (every if early is None else np.maximum(late - early, every)))
    return found


@dataclass(frozen=True)
class RouteTable:
    """Lines of the collectives on every distinct route, and the tier each route's stream belongs to (-1: none)."""

    tier: Integers
    lines: dict[OpKind, tuple[tuple[Floats, Floats], ...]]

    @cached_property
    def alike(self) -> Integers:
        """A number per route, shared by routes with equal times of all collectives on the same stream."""
        numbers = self.tier
        for column in (one for pairs in self.lines.values() for pair in pairs for one in pair):
            most = int(numbers.max(initial=0)) + 2
            numbers = distinct(distinct(column)[2] * most + numbers + 1)[2]
        return numbers


def route_table(
    shapes: tuple[GroupShape, ...],
    used: Mapping[str, Integers],
    machine: Machine,
    world: int,
    *,
    sent: Iterable[tuple[OpKind, str]],
    call_s: float = 0.0,
) -> RouteTable:
    """Price the shapes; `used` tells which of them each group of axes takes. Groups of one cost nothing.

    sent: the collectives of all programs with their groups: nothing else is priced; call_s: software overhead per call.
    """
    paths = [route(shape, machine.tiers, world) for shape in shapes]
    tier = np.array([path.outermost for path in paths])
    groups: dict[OpKind, set[str]] = {}
    for kind, axes in sent:
        groups.setdefault(kind, set()).add(axes)
    table: dict[OpKind, tuple[tuple[Floats, Floats], ...]] = {}
    for kind, several in groups.items():
        numbers = distinct(np.concatenate([used[axes] for axes in several]))[0].tolist()
        table[kind] = _line_columns(kind, paths, numbers, machine, call_s=call_s)
    return RouteTable(tier, table)


def _line_columns(
    kind: OpKind, paths: list[Route], numbers: list[int], machine: Machine, *, call_s: float
) -> tuple[tuple[Floats, Floats], ...]:
    """`(latency_s, bandwidth_bytes_per_s)` columns, one pair per line; missing lines repeat the first."""
    found = [(number, lines_of(kind, paths[number], machine, call_s=call_s)) for number in numbers]
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

    def taken(self, rows: Integers) -> Candidates:
        """Some of them."""
        return Candidates(self.shape[rows], {axes: route[rows] for axes, route in self.routes.items()})


@dataclass(frozen=True)
class Prices:
    """Columns of seconds, one row per candidate."""

    communication_s: Floats
    compute_s: Floats
    iteration_s: Floats

    def taken(self, rows: Integers) -> Prices:
        """Those of some candidates, or of several each."""
        return Prices(self.communication_s[rows], self.compute_s[rows], self.iteration_s[rows])


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
        self._program = program
        self._schedule = link_schedule(schedule)
        self._rates = rates
        self._element_bytes = element_bytes
        self._table = table

    def shapes(self, values: Mapping[str, Value], stage: Stage = ONLY) -> ShapeColumns:
        """What depends on the shapes alone; `values` are columns over shapes, `kept` among them."""
        clock = ComputeClock(self._rates, self._element_bytes, values, COLUMNS)
        return ShapeColumns(clock, self._schedule, self._program, stage)

    def distinct(self, candidates: Candidates) -> tuple[Integers, Integers]:
        """Rows that represent all others of equal shape and route times; and the representative of each row."""
        alike, code = self._table.alike, candidates.shape.copy()
        most = int(alike.max(initial=0)) + 1
        for taken in candidates.routes.values():
            code = distinct(code * most + alike[taken])[2]
        _, first, representative = distinct(code)
        return first, representative

    def price(self, candidates: Candidates, values: Mapping[str, Value]) -> Prices:
        """Price every candidate without pipeline stages; `values` as for `shapes`."""
        count = len(candidates)
        communication, iteration, waited = np.empty(count), np.empty(count), np.zeros(count)
        if not count:
            return Prices(communication, waited, iteration)
        shapes = self.shapes(values)
        for rows, streams, keeping in self._blocks(candidates, values):
            block = _Block(self._table, candidates, rows, shapes, streams)
            communication[rows] = block.communication_s()
            iteration[rows], waited[rows] = block.iteration_s(
                self._schedule, keeping=keeping, dispatch_s=self._rates.dispatch_s
            )
        alone = shapes.compute_s.take(candidates.shape) + waited
        lost = contended_s(communication, alone, iteration, contention=self._rates.contention)
        return Prices(communication, alone + lost, iteration + lost)

    def sums(self, candidates: Candidates, shapes: ShapeColumns) -> tuple[Floats, Floats]:
        """Communication and computation of one pipeline stage of every candidate in a step, s."""
        communication = np.empty(len(candidates))
        for rows, streams, _ in self._blocks(candidates, shapes.values):
            communication[rows] = _Block(self._table, candidates, rows, shapes, streams).communication_s()
        return communication, shapes.compute_s.take(candidates.shape)

    def chunk(self, candidates: Candidates, shapes: ShapeColumns, part: Stage, *, layers: Floats) -> ChunkColumns:
        """One micro-batch through a chunk of some blocks of a stage; `part`: the chunk's embedding or LM head.

        layers: of the chunk, for each shape.
        """
        values, found = shapes.values, ChunkColumns(*(np.empty(len(candidates)) for _ in range(6)))
        kept = np.floor(np.asarray(values["kept"]) * layers / np.asarray(values["L"]))
        for rows, streams, keeping in self._blocks(candidates, {**values, "kept": kept, "L": layers}):
            block = _Block(self._table, candidates, rows, shapes, streams)
            times = block.chunk(
                self._schedule,
                part,
                layers=layers,
                kept=kept,
                keeping=keeping,
                dispatch_s=self._rates.dispatch_s,
            )
            for column, value in zip(found.columns, times.columns, strict=True):
                column[rows] = value
        return found

    def _blocks(
        self, candidates: Candidates, values: Mapping[str, Value]
    ) -> Iterator[tuple[Integers, dict[str, int], int]]:
        """Rows that share streams and kind of keeping, at most `BLOCK_ROWS` at once, with both.

        A group of one sends nothing and fits any stream; it counts to the outermost tier's.
        """
        kept, layers = np.asarray(values["kept"]), values["L"]
        code = np.where(kept == 0, 0, np.where(kept == layers, 2, 1)).take(candidates.shape)
        outermost = int(self._table.tier.max(initial=0))
        tiers = {axes: self._table.tier.take(candidates.routes[axes]) for axes in self._program.groups}
        for tier in tiers.values():
            code = code * (outermost + 1) + np.where(tier < 0, outermost, tier)
        small = 3 * (outermost + 1) ** len(tiers) < 2**15
        # Codes that fit 16 bits sort in linear time.
        order = np.argsort(code.astype(np.int16) if small else code, kind="stable")
        for group in np.split(order, np.flatnonzero(np.diff(code[order])) + 1):
            streams = {axes: int(tier.take(group).max(initial=-1)) for axes, tier in tiers.items()}
            keeping = int(code[group[0]] // (outermost + 1) ** len(tiers)) if len(group) else 0
            for start in range(0, len(group), BLOCK_ROWS):
                yield group[start : start + BLOCK_ROWS], streams, keeping


class ShapeColumns:
    """Everything that depends only on the shape and the stage, computed once per shape and picked per block."""

    def __init__(self, clock: ComputeClock, schedule: LinkedSchedule, program: StepProgram, stage: Stage) -> None:
        self._clock, self._program, self.stage = clock, program, stage
        self.values = clock.values
        self.terms = tuple(program.collectives(stage))
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
        wanted = [size for collective, count in self.terms for size in (collective.size_bytes, count)]
        for collective, times in schedule.linker.collectives:
            wanted += [collective.size_bytes] if times is None else [collective.size_bytes, times]
        for size in wanted:
            if size not in self.sizes:
                self.sizes[size] = size.evaluate(clock.values)

    @cached_property
    def compute_s(self) -> Floats:
        """Computation of the stage in a step, s."""
        computed = compute_s(self._program, self._clock, self.stage)
        return np.broadcast_to(np.asarray(computed), len(np.asarray(self.values["b"])))


class _Block:
    """One block of candidates: picks shape and route columns for its rows, each at most once."""

    def __init__(
        self,
        table: RouteTable,
        candidates: Candidates,
        rows: Integers,
        shapes: ShapeColumns,
        streams: Mapping[str, int],
    ) -> None:
        self._table = table
        self._shapes = shapes
        self._streams = streams
        self._shape = candidates.shape.take(rows)
        self._routes = {axes: index.take(rows) for axes, index in candidates.routes.items()}
        self._lines: dict[tuple[OpKind, str], tuple[tuple[Value, Value], ...]] = {}
        self._times: dict[tuple[OpKind, str, Size], Value] = {}
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

    def _chosen_lines(self, kind: OpKind, axis: str) -> tuple[tuple[Value, Value], ...]:
        if (kind, axis) not in self._lines:
            index = self._routes[axis]
            self._lines[kind, axis] = tuple(
                (latency.take(index), bandwidth.take(index)) for latency, bandwidth in self._table.lines[kind]
            )
        return self._lines[kind, axis]

    def communication_s(self) -> Value:
        """Left fold of calls times seconds over the stage's terms; groups of one add nothing."""
        total: Value = 0.0
        for collective, count in self._shapes.terms:
            if self._streams[collective.axis] >= 0:
                total = total + self._pick(self._shapes.sizes[count]) * self._call_s(collective)
        return total

    def iteration_s(self, schedule: LinkedSchedule, *, keeping: int, dispatch_s: float) -> tuple[Value, Value]:
        """End of the schedule, and its wait for the host."""
        values = self._shapes.values
        return self._replay(schedule).step_s(
            schedule,
            layers=float(values["L"]),
            kept=self._pick(values["kept"]),
            keeping=keeping,
            accumulation=self._pick(values["A"]),
            buckets=self._streams.get(schedule.replicas, -1) >= 0,
            host_s=self._issued_s(schedule, dispatch_s)[0],
        )

    def chunk(
        self,
        schedule: LinkedSchedule,
        part: Stage,
        *,
        layers: Floats,
        kept: Floats,
        keeping: int,
        dispatch_s: float,
    ) -> ChunkColumns:
        """One micro-batch through a chunk of a stage, `kept` of whose blocks are not resharded after forward."""
        return self._replay(schedule).chunk(
            schedule,
            part,
            self._shapes.stage,
            layers=self._pick(layers),
            kept=self._pick(kept),
            keeping=keeping,
            host=self._issued_s(schedule, dispatch_s),
            times=self._pick(self._shapes.values["A"]),
        )

    def _replay(self, schedule: LinkedSchedule) -> Replay:
        linker = schedule.linker
        present = {axes: self._presence(axes) for axes in self._streams}
        return Replay(
            runs=[self._pick(column) for column in self._shapes.runs],
            collectives=[self._scheduled_s(collective, calls) for collective, calls in linker.collectives],
            streams=[self._streams[collective.axis] for collective, _ in linker.collectives],
            present=[present[collective.axis] for collective, _ in linker.collectives],
            tiers=int(self._table.tier.max(initial=0)) + 1,
            slots=len(linker.slots),
        )

    def _issued_s(self, schedule: LinkedSchedule, dispatch_s: float) -> tuple[Value, Value]:
        """Time in which the host issues a block's forward and backward, and the forward's share of it."""
        if not dispatch_s:
            return 0.0, 0.0
        forward, backward = (one.count(self._sent, self._symbol) for one in schedule.issued)
        return dispatch_s * (forward + backward), forward / (forward + backward)

    def _symbol(self, name: str) -> Value:
        return self._pick(self._shapes.values[name])

    def _sent(self, axes: str) -> Value:
        """1.0 for candidates whose group over `axes` has several members."""
        return (self._table.tier.take(self._routes[axes]) >= 0).astype(np.float64)

    def _presence(self, axes: str) -> Value | None:
        """1.0 for candidates whose group over `axes` has several members; None if that is all of them."""
        several = self._table.tier.take(self._routes[axes]) >= 0
        return None if several.all() else several.astype(np.float64)

    def _scheduled_s(self, collective: Collective, calls: Size | None) -> Value:
        """Time of a collective in the schedule: its consecutive calls."""
        if self._streams[collective.axis] < 0:
            return 0.0
        call_s = self._call_s(collective)
        return call_s if calls is None else self._pick(self._shapes.sizes[calls]) * call_s
