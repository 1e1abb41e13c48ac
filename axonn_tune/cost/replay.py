"""Replays a schedule on columns: the clock of every lane, for a whole block of candidates at once.

The schedule is first *linked*: equal runs and equal collectives get one number each, so that a block
prices each of them once and the loop over instructions touches nothing but lists. Runs of equal
blocks are replayed twice and the rest extrapolated, since from there on every block takes as long as the
one before; a lane that gets more than it can send falls behind by as much each time. `timeline` is the
plain twin.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np

from axonn_tune.program.operations import Collective, Computation
from axonn_tune.program.schedule import BackwardBlocks, Instructions, MicroBatch, Run, StepSchedule, Sync, Wait
from axonn_tune.program.size import Size, Value

T = TypeVar("T")

RUN, WAIT, SYNC, ISSUE = range(4)

Linked: TypeAlias = tuple[tuple[int, int, int], ...]
"""Instructions as `(code, number, slot)`: number of a run, of a slot to wait for, or of a collective."""


@dataclass
class Linker:
    """Numbers runs, collectives and slots while it links the parts of one schedule."""

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
        """Number of a collective with its calls in a row; a weight gather is one call where it stands."""
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
    block: Linked
    last_block: Linked
    head: Linked
    head_all_kept: Linked
    first: Linked
    middle: Linked
    last: Linked
    only: Linked
    kept_first: Linked
    kept_middle: Linked
    flush: Linked


@dataclass(frozen=True)
class LinkedSchedule:
    """A `StepSchedule` in numbers, with what the numbers stand for."""

    linker: Linker
    micro_batch: LinkedMicroBatch
    last_micro_batch: LinkedMicroBatch
    end: Linked


def link_schedule(schedule: StepSchedule) -> LinkedSchedule:
    """Number everything in a schedule."""
    linker = Linker()

    def batch(part: MicroBatch) -> LinkedMicroBatch:
        back: BackwardBlocks = part.backward
        pieces = (part.embedding, part.block, part.last_block, part.head, part.head_all_kept)
        blocks = (back.first, back.middle, back.last, back.only, back.kept_first, back.kept_middle)
        return LinkedMicroBatch(*(linker.link(piece) for piece in (*pieces, *blocks, part.flush)))

    return LinkedSchedule(
        linker, batch(schedule.micro_batch), batch(schedule.last_micro_batch), linker.link(schedule.end)
    )


State: TypeAlias = list[Any]
"""Clock of the compute lane, then of each tier's lane, then of each slot; None where nothing was yet."""


@dataclass(frozen=True)
class Replay:
    """Replays one block of candidates.

    runs, collectives: durations by number; lanes: tier of each collective's group, negative where no
    candidate of the block sends it; present: 1.0 where a candidate sends it and 0.0 where its group has
    one member, or None where all do; tiers, slots: how many there are.
    """

    runs: Sequence[Value]
    collectives: Sequence[Value]
    lanes: Sequence[int]
    present: Sequence[Value | None]
    tiers: int
    slots: int

    def step_s(
        self, schedule: LinkedSchedule, *, layers: int, kept: Value, keeping: int, accumulation: Value, buckets: bool
    ) -> Value:
        """Duration of one step, s.

        keeping: 0 if no candidate keeps gathered weights, 2 if all keep all layers', 1 in between;
        buckets: whether the last micro-batch differs from the others by data-parallel buckets.
        """
        last = self._micro_batch(schedule.last_micro_batch, layers=layers, kept=kept, keeping=keeping)
        end = self._play(last, schedule.end)[0]
        others = last
        if buckets:
            others = self._micro_batch(schedule.micro_batch, layers=layers, kept=kept, keeping=keeping)
        result: Value = (accumulation - 1.0) * others[0] + end
        return result

    def _micro_batch(self, batch: LinkedMicroBatch, *, layers: int, kept: Value, keeping: int) -> State:
        state: State = [0.0, *([None] * (self.tiers + self.slots))]
        state = self._play(state, batch.embedding)
        state = self._repeat(state, batch.block, layers - 1)
        state = self._play(state, batch.last_block)
        state = self._play(state, batch.head_all_kept if keeping == 2 else batch.head)
        if keeping == 2:
            state = self._repeat(self._play(state, batch.kept_first), batch.kept_middle, layers - 1)
        elif keeping == 1:
            state = self._repeat_column(self._play(state, batch.kept_first), batch.kept_middle, kept - 1.0)
            state = self._repeat_column(state, batch.middle, layers - kept - 1.0)
            state = self._play(state, batch.last)
        elif layers == 1:
            state = self._play(state, batch.only)
        else:
            state = self._repeat(self._play(state, batch.first), batch.middle, layers - 2)
            state = self._play(state, batch.last)
        return self._play(state, batch.flush)

    def _repeat(self, state: State, part: Linked, times: int) -> State:
        """The state after a part has run `times` times: exact for 0, 1 and 2, then extrapolated."""
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
            None if late is None else np.where(none, 0.0 if start is None else start, np.where(one, early, late))
            for start, early, late in zip(state, once, last, strict=True)
        ]

    def _play(self, state: State, part: Linked) -> State:
        """Follow a part; returns the new state, leaving the given one as it is."""
        state = list(state)
        clock = state[0]
        runs, collectives, lanes, present = self.runs, self.collectives, self.lanes, self.present
        first_slot, larger = 1 + self.tiers, np.maximum
        for code, number, slot in part:
            if code == RUN:
                clock = clock + runs[number]
            elif code == WAIT:
                ready = state[first_slot + number]
                if ready is not None:
                    clock = larger(clock, ready)
            elif lanes[number] >= 0:
                lane = 1 + lanes[number]
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


def _repeated(before: State, state: State, times: Value) -> State:
    """After `times` more of what led from one state to the next: each clock at its pace, none slower than the first."""
    every = state[0] - before[0]
    found = [state[0] + times * every]
    for early, late in zip(before[1:], state[1:], strict=True):
        if late is None:
            found.append(None)
        else:
            found.append(late + times * (every if early is None else np.maximum(late - early, every)))
    return found
