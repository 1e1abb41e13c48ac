"""The plain twin of the column replay: one candidate, one number at a time, every interval recorded.

It follows the same schedule with its own loop and must end at the same bits; what it adds is where
each interval lies and which collective each pause of the compute lane waits for. Repeated parts are
replayed twice and extrapolated; the second replay stands for the rest in the sums of pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from axonn_tune.program.operations import Collective, Computation
from axonn_tune.program.schedule import Instructions, Issue, MicroBatch, Run, StepSchedule, Wait

TermKey = tuple[str, str, str, str]
"""op, axis, phase, layer."""


@dataclass(frozen=True)
class Interval:
    """One operation on a lane (`compute` or a tier's name), in seconds from the start of its micro-batch."""

    lane: str
    operation: Computation | Collective
    start_s: float
    end_s: float
    part: str
    stands_for: float


@dataclass
class State:
    """Clocks of one replay: the compute lane, when each lane is free, what each slot waits for."""

    now_s: float = 0.0
    lanes: dict[int, float] = field(default_factory=dict)
    slots: dict[str, tuple[float, Collective]] = field(default_factory=dict)

    def copy(self) -> State:
        """An independent copy."""
        return State(self.now_s, dict(self.lanes), dict(self.slots))

    def shifted(self, by_s: float) -> State:
        """Every clock moved by the same time."""
        return State(
            self.now_s + by_s,
            {lane: clock + by_s for lane, clock in self.lanes.items()},
            {slot: (clock + by_s, cause) for slot, (clock, cause) in self.slots.items()},
        )


@dataclass
class Timeline:
    """Replays one step of one candidate.

    run_s: time of one computation where it stands; collective_s: of a collective; lane: tier by group of axes,
    negative for groups of one; lane_names: names of the tiers.
    """

    run_s: Callable[[Computation], float]
    collective_s: Callable[[Collective], float]
    lane: Mapping[str, int]
    lane_names: tuple[str, ...]
    intervals: list[Interval] = field(default_factory=list)
    exposed_s: dict[TermKey, float] = field(default_factory=dict)

    def step_s(self, schedule: StepSchedule, *, layers: int, kept: int, accumulation: int) -> float:
        """Duration of one step, s."""
        last = self._micro_batch(
            schedule.last_micro_batch, layers=layers, kept=kept, weight=1.0, part="last micro-batch"
        )
        last_s = last.now_s
        end_s = self._play(last, schedule.end, weight=1.0, part="end").now_s
        others_s = last_s
        weight = accumulation - 1.0
        if self.lane["data"] >= 0:
            others = self._micro_batch(
                schedule.micro_batch, layers=layers, kept=kept, weight=weight, part="micro-batch"
            )
            others_s = others.now_s
        elif weight:
            self._micro_batch(schedule.last_micro_batch, layers=layers, kept=kept, weight=weight, part="micro-batch")
        return (accumulation - 1.0) * others_s + end_s

    def _micro_batch(self, batch: MicroBatch, *, layers: int, kept: int, weight: float, part: str) -> State:
        """One micro-batch from a clear start; `weight`: how many micro-batches it stands for."""

        def play(state: State, instructions: Instructions, name: str) -> State:
            return self._play(state, instructions, weight=weight, part=f"{part}: {name}")

        def repeat(state: State, instructions: Instructions, times: int, name: str) -> State:
            return self._repeat(state, instructions, times, weight=weight, part=f"{part}: {name}")

        state = play(State(), batch.embedding, "embedding")
        state = repeat(state, batch.block, layers - 1, "block")
        state = play(state, batch.last_block, "last block")
        state = play(state, batch.head_all_kept if kept == layers else batch.head, "head")
        back = batch.backward
        if kept == layers:
            state = play(state, back.kept_first, "first kept block backward")
            state = repeat(state, back.kept_middle, layers - 1, "kept block backward")
        elif kept == 0 and layers == 1:
            state = play(state, back.only, "block backward")
        elif kept == 0:
            state = play(state, back.first, "first block backward")
            state = repeat(state, back.middle, layers - 2, "block backward")
            state = play(state, back.last, "last block backward")
        else:
            state = play(state, back.kept_first, "first kept block backward")
            state = repeat(state, back.kept_middle, kept - 1, "kept block backward")
            state = repeat(state, back.middle, layers - kept - 1, "block backward")
            state = play(state, back.last, "last block backward")
        return play(state, batch.flush, "embedding backward")

    def _repeat(self, state: State, instructions: Instructions, times: int, *, weight: float, part: str) -> State:
        """A part `times` times over: replayed at most twice, extrapolated by the second replay's duration."""
        if times == 0:
            return state
        once = self._play(state, instructions, weight=weight, part=part)
        if times == 1:
            return once
        twice = self._play(once, instructions, weight=weight * (times - 1.0), part=part)
        return twice.shifted((times - 2.0) * (twice.now_s - once.now_s))

    def _play(self, state: State, instructions: Instructions, *, weight: float, part: str) -> State:
        """Follow instructions from a state; `weight`: how often this happens in the step."""
        state = state.copy()
        for step in instructions:
            if isinstance(step, Run):
                self._run(state, step, weight=weight, part=part)
            elif isinstance(step, Wait):
                if step.slot in state.slots:
                    self._pause(state, *state.slots[step.slot], weight=weight)
            elif self.lane[step.collective.axis] >= 0:
                end_s = self._send(state, step.collective, weight=weight, part=part)
                if isinstance(step, Issue):
                    state.slots[step.slot] = (end_s, step.collective)
                else:
                    self._pause(state, end_s, step.collective, weight=weight)
            elif isinstance(step, Issue):
                state.slots.pop(step.slot, None)
        return state

    def _run(self, state: State, run: Run, *, weight: float, part: str) -> None:
        total_s = 0.0
        for operation in run.operations:
            start_s = state.now_s + total_s
            total_s = total_s + self.run_s(operation)
            self.intervals.append(Interval("compute", operation, start_s, state.now_s + total_s, part, weight))
        state.now_s = state.now_s + total_s

    def _send(self, state: State, collective: Collective, *, weight: float, part: str) -> float:
        """Put a collective on its lane; returns its end."""
        lane = self.lane[collective.axis]
        start_s = max(state.lanes.get(lane, state.now_s), state.now_s)
        end_s = start_s + self.collective_s(collective)
        state.lanes[lane] = end_s
        self.intervals.append(Interval(self.lane_names[lane], collective, start_s, end_s, part, weight))
        return end_s

    def _pause(self, state: State, until_s: float, cause: Collective, *, weight: float) -> None:
        """Hold the compute lane until a collective has ended, and charge the pause to it."""
        if until_s > state.now_s:
            key = (cause.kind, cause.axis, cause.phase, cause.layer)
            self.exposed_s[key] = self.exposed_s.get(key, 0.0) + weight * (until_s - state.now_s)
            state.now_s = until_s
