"""Replays a schedule: the clock of the compute lane and of each communication lane, through one step.

The same rules serve a column of candidates and a single one; what differs is the number type. Runs
of equal blocks are replayed twice and the rest extrapolated by the second one's duration, since from
there on every block takes as long as the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from axonn_tune.cost.schedule import Instructions, Issue, MicroBatch, Run, StepSchedule, Sync, Wait
from axonn_tune.program.operations import Collective

T = TypeVar("T")

COMPUTE = "compute"


@dataclass(frozen=True)
class Replay(Generic[T]):
    """Interpreter of schedules.

    run_s, collective_s: durations; lane: tier of each group of axes, negative where the group has one
    member and nothing is sent; larger: maximum; choose: `choose(condition, a, b)`, like numpy's where.
    """

    run_s: Callable[[Run], T]
    collective_s: Callable[[Collective], T]
    lane: Mapping[str, int]
    larger: Callable[[Any, Any], Any]
    choose: Callable[[Any, Any, Any], Any]

    def step_s(self, schedule: StepSchedule, *, layers: int, kept: T, accumulation: T) -> T:
        """Duration of one step, s: equal micro-batches, then the last one with its buckets and the end."""
        last = self.micro_batch({COMPUTE: 0.0}, schedule.last_micro_batch, layers=layers, kept=kept)
        end = self.play(last, schedule.end)[COMPUTE]
        others = last
        if self.lane["data"] >= 0:
            others = self.micro_batch({COMPUTE: 0.0}, schedule.micro_batch, layers=layers, kept=kept)
        result: T = (accumulation - 1.0) * others[COMPUTE] + end
        return result

    def micro_batch(self, state: dict[str, Any], batch: MicroBatch, *, layers: int, kept: Any) -> dict[str, Any]:
        """One micro-batch from a given state; `kept` is 0 for all rows, `layers` for all, or between for all."""
        state = self.play(state, batch.embedding)
        state = self.repeat(state, batch.block, layers - 1)
        state = self.play(state, batch.last_block)
        first = kept if isinstance(kept, float | int) else kept.flat[0]
        all_kept = first == layers
        state = self.play(state, batch.head_all_kept if all_kept else batch.head)
        back = batch.backward
        if all_kept:
            state = self.repeat(self.play(state, back.kept_first), back.kept_middle, layers - 1)
        elif first == 0 and layers == 1:
            state = self.play(state, back.only)
        elif first == 0:
            state = self.play(self.repeat(self.play(state, back.first), back.middle, layers - 2), back.last)
        else:
            state = self.repeat(self.play(state, back.kept_first), back.kept_middle, kept - 1.0)
            state = self.play(self.repeat(state, back.middle, layers - kept - 1.0), back.last)
        return self.play(state, batch.flush)

    def repeat(self, state: dict[str, Any], instructions: Instructions, times: Any) -> dict[str, Any]:
        """The state after a part has run `times` times: exact for 0, 1 and 2, then extrapolated."""
        if isinstance(times, int) and times == 0:
            return state
        once = self.play(state, instructions)
        if isinstance(times, int) and times == 1:
            return once
        twice = self.play(once, instructions)
        shift = (times - 2.0) * (twice[COMPUTE] - once[COMPUTE])
        many = {name: None if clock is None else clock + shift for name, clock in twice.items()}
        if isinstance(times, int):
            return many
        return {
            name: None
            if clock is None
            else self.choose(times == 0, state.get(name, 0.0), self.choose(times == 1, once[name], clock))
            for name, clock in many.items()
        }

    def play(self, state: dict[str, Any], instructions: Instructions) -> dict[str, Any]:
        """Follow instructions; returns the new state, leaving the given one as it is."""
        state = dict(state)
        clock, larger = state[COMPUTE], self.larger
        for step in instructions:
            if isinstance(step, Run):
                clock = clock + self.run_s(step)
            elif isinstance(step, Wait):
                ready = state.get(step.slot)
                if ready is not None:
                    clock = larger(clock, ready)
            else:
                lane = self.lane[step.collective.axis]
                if lane >= 0:
                    name = f"lane {lane}"
                    busy = state.get(name)
                    start = clock if busy is None else larger(busy, clock)
                    state[name] = start + self.collective_s(step.collective)
                    if isinstance(step, Sync):
                        clock = state[name]
                if isinstance(step, Issue):
                    state[step.slot] = state[name] if lane >= 0 else None
        state[COMPUTE] = clock
        return state
