"""The plain twin of the column replay: one candidate, one number at a time, every interval recorded.

It follows the same schedule with its own loop and must end at the same bits; what it adds is where
each interval lies and which collective each pause of the compute lane waits for. Repeated parts are
replayed twice and extrapolated, each clock by its own pace; the second replay stands for the rest, in the sums of
pauses as in what is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from axonn_tune.program.operations import Collective, Computation
from axonn_tune.program.schedule import Instructions, Issue, MicroBatch, Run, StepSchedule, Wait
from axonn_tune.program.step import ONLY, Stage
from axonn_tune.specs.traces import (
    COMPUTE_LANE,
    EMBEDDING_BACKWARD,
    EMBEDDING_FORWARD,
    END,
    HEAD,
    block_backward,
    block_forward,
)

TermKey = tuple[str, str, str, str]
"""op, axis, phase, layer."""


@dataclass(frozen=True)
class Interval:
    """One operation on a lane (`COMPUTE_LANE` or a tier's name), in seconds from the start of its micro-batch.

    A collective on the compute lane is a pause: nothing is computed until it has ended.
    """

    lane: str
    operation: Computation | Collective
    start_s: float
    end_s: float

    @property
    def pause(self) -> bool:
        """Whether the compute lane stands still for a collective."""
        return self.lane == COMPUTE_LANE and isinstance(self.operation, Collective)


@dataclass(frozen=True)
class Stretch:
    """A part of a micro-batch as often as it follows itself, each time as it was the first: one name for each time.

    start_s, end_s: of the first, on the compute lane, which the others follow without a gap. lane_every_s: from one
    to the next on a lane of collectives, which can be more: a lane that falls behind.
    """

    names: tuple[str, ...]
    start_s: float
    end_s: float
    intervals: tuple[Interval, ...]
    lane_every_s: Mapping[str, float] = field(default_factory=dict)

    def shifts_s(self, time: int) -> Callable[[str], float]:
        """How far the repeat of this number, from 0, is moved on a lane."""
        every_s = self.end_s - self.start_s
        return lambda lane: time * self.lane_every_s.get(lane, every_s)


@dataclass(frozen=True)
class Batch:
    """Equal micro-batches in a row, `times` of `every_s` each; the last one has the end of the step with it."""

    times: int
    every_s: float
    stretches: tuple[Stretch, ...]


@dataclass
class State:
    """Clocks of one replay: the compute lane, when each lane is free, what each slot waits for."""

    now_s: float = 0.0
    lanes: dict[int, float] = field(default_factory=dict)
    slots: dict[str, tuple[float, Collective]] = field(default_factory=dict)

    def copy(self) -> State:
        """An independent copy."""
        return State(self.now_s, dict(self.lanes), dict(self.slots))

    def repeated(self, times: float, before: State) -> State:
        """After `times` more of what led here from `before`: each clock goes on as it did, none slower than the first.

        A lane that is given more than it can send falls behind, further with each time.
        """
        every_s = self.now_s - before.now_s
        return State(
            self.now_s + times * every_s,
            {
                lane: clock + times * max(clock - before.lanes.get(lane, clock), every_s)
                for lane, clock in self.lanes.items()
            },
            {
                slot: (clock + times * max(clock - before.slots.get(slot, (clock, cause))[0], every_s), cause)
                for slot, (clock, cause) in self.slots.items()
            },
        )


@dataclass(frozen=True)
class ChunkTimes:
    """One micro-batch through a chunk of a pipeline stage, s; last_backward_s, end_s: of the step's last one."""

    forward_s: float
    backward_s: float
    last_backward_s: float
    end_s: float


@dataclass
class Timeline:
    """Replays one step of one candidate.

    run_s: time of one computation where it stands; collective_s: of a collective; lane: tier by group of axes,
    negative for groups of one; lane_names: names of the tiers; dispatch_s: time in which the host issues an operation.
    """

    run_s: Callable[[Computation], float]
    collective_s: Callable[[Collective], float]
    lane: Mapping[str, int]
    lane_names: tuple[str, ...]
    dispatch_s: float = 0.0
    host_s: float = 0.0
    exposed_s: dict[TermKey, float] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    _stretches: list[Stretch] = field(default_factory=list)

    def step_s(self, schedule: StepSchedule, *, layers: int, kept: int, accumulation: int) -> float:
        """Duration of one step without pipeline stages, s."""
        last, waited_s = self._micro_batch(schedule, schedule.last_micro_batch, layers=layers, kept=kept, weight=1.0)
        last_s = last.now_s + waited_s
        end_s = self._play(last, schedule.ends[ONLY], weight=1.0, names=(END,)).now_s + waited_s
        self._note_batch(1, end_s)
        others_s, others_waited_s = last_s, waited_s
        if accumulation > 1:
            # Without replicas there are no buckets, and the last micro-batch is like the others.
            batch = schedule.micro_batch if self._replicated(schedule) else schedule.last_micro_batch
            others, others_waited_s = self._micro_batch(
                schedule, batch, layers=layers, kept=kept, weight=accumulation - 1.0
            )
            others_s = others.now_s + others_waited_s
            self._note_batch(accumulation - 1, others_s)
            self.batches.reverse()
        self.host_s = (accumulation - 1.0) * others_waited_s + waited_s
        return (accumulation - 1.0) * others_s + end_s

    def _replicated(self, schedule: StepSchedule) -> bool:
        return self.lane[schedule.replicas] >= 0

    def chunk(
        self, schedule: StepSchedule, part: Stage, stage: Stage, *, layers: int, kept: int, times: int
    ) -> ChunkTimes:
        """A chunk of a pipeline stage of so many blocks, `times` micro-batches of it a step.

        part: whether the chunk has the embedding or the LM head.

        Passes of a chunk start with free streams, and its weights' gathers with nothing to hide behind.
        """
        forward, backward = self._passes(
            schedule, schedule.micro_batch, part, layers=layers, kept=kept, weight=times - 1.0
        )
        self._note_batch(times - 1, forward[0].now_s + backward[0].now_s)
        _, last = self._passes(schedule, schedule.last_micro_batch, part, layers=layers, kept=kept, weight=1.0)
        end = self._play(last[0], schedule.ends[stage], weight=1.0, names=(END,))
        self._note_batch(1, forward[0].now_s + end.now_s)
        shares = [issued.count(self._sent) for issued in schedule.issued]
        waited_s = self._waited_s(sum(shares), layers, forward[1] + backward[1])
        self.host_s += times * waited_s
        waits = [waited_s * share / sum(shares) for share in shares]
        return ChunkTimes(
            forward[0].now_s + waits[0],
            backward[0].now_s + waits[1],
            last[0].now_s + waits[1],
            end.now_s - last[0].now_s,
        )

    def _passes(
        self, schedule: StepSchedule, batch: MicroBatch, stage: Stage, *, layers: int, kept: int, weight: float
    ) -> tuple[tuple[State, float], tuple[State, float]]:
        """Clocks after the forward and after the backward pass of a chunk, each with what its blocks took."""
        state = self._play(
            State(), batch.embedding if stage.first else batch.enter, weight=weight, names=(EMBEDDING_FORWARD,)
        )
        state, blocks_s = self._forward(batch, state, layers=layers, weight=weight, last=stage.last)
        if stage.last:
            state = self._play(state, batch.head_all_kept, weight=weight, names=(HEAD,))
        back = self._play(State(), () if kept else batch.enter_backward, weight=weight, names=(HEAD,))
        back, backward_s = self._backward(batch, back, layers=layers, kept=kept, weight=weight)
        end = batch.flush if stage.first else batch.leave
        back = self._play(back, end, weight=weight, names=(EMBEDDING_BACKWARD,))
        return (state, blocks_s), (back, backward_s)

    def _sent(self, axes: str) -> float:
        return 1.0 if self.lane[axes] >= 0 else 0.0

    def _waited_s(self, issued: float, layers: int, blocks_s: float) -> float:
        """Time in which blocks wait for the host that issues them, s: compared over both passes of all blocks."""
        return max(0.0, self.dispatch_s * issued * layers - blocks_s)

    def _note_batch(self, times: int, every_s: float) -> None:
        self.batches.append(Batch(times, every_s, tuple(self._stretches)))
        self._stretches.clear()

    def _micro_batch(
        self, schedule: StepSchedule, batch: MicroBatch, *, layers: int, kept: int, weight: float
    ) -> tuple[State, float]:
        """One micro-batch from a clear start, and how long its blocks wait for the host.

        weight: how many micro-batches it stands for.
        """
        state = self._play(State(), batch.embedding, weight=weight, names=(EMBEDDING_FORWARD,))
        state, forward_s = self._forward(batch, state, layers=layers, weight=weight, last=True)
        head = batch.head_all_kept if kept == layers else batch.head
        state = self._play(state, head, weight=weight, names=(HEAD,))
        state, backward_s = self._backward(batch, state, layers=layers, kept=kept, weight=weight)
        issued = sum(one.count(self._sent) for one in schedule.issued)
        waited_s = self._waited_s(issued, layers, forward_s + backward_s)
        return self._play(state, batch.flush, weight=weight, names=(EMBEDDING_BACKWARD,)), waited_s

    def _forward(
        self, batch: MicroBatch, state: State, *, layers: int, weight: float, last: bool
    ) -> tuple[State, float]:
        """All blocks forward, and their time; `last`: the LM head follows."""
        begun_s, names = state.now_s, tuple(map(block_forward, range(layers - 1)))
        state = self._repeat(state, batch.block, weight=weight, names=names)
        final = batch.last_block if last else batch.alone
        state = self._play(state, final, weight=weight, names=(block_forward(layers - 1),))
        return state, state.now_s - begun_s

    def _backward(
        self, batch: MicroBatch, state: State, *, layers: int, kept: int, weight: float
    ) -> tuple[State, float]:
        """All blocks backward, and their time."""

        def play(state: State, instructions: Instructions, name: str) -> State:
            return self._play(state, instructions, weight=weight, names=(name,))

        def blocks(state: State, instructions: Instructions, numbers: range) -> State:
            return self._repeat(state, instructions, weight=weight, names=tuple(map(block_backward, numbers)))

        back, first, unkept, begun_s = batch.backward, block_backward(layers - 1), layers - kept, state.now_s
        if kept == layers:
            state = play(state, back.kept_first, first)
            state = blocks(state, back.kept_middle, range(layers - 2, -1, -1))
        elif kept == 0 and layers == 1:
            state = play(state, back.only, first)
        elif kept == 0:
            state = play(state, back.first, first)
            state = blocks(state, back.middle, range(layers - 2, 0, -1))
            state = play(state, back.last, block_backward(0))
        else:
            state = play(state, back.kept_first, first)
            state = blocks(state, back.kept_middle, range(layers - 2, unkept - 1, -1))
            state = blocks(state, back.middle, range(unkept - 1, 0, -1))
            state = play(state, back.last, block_backward(0))
        return state, state.now_s - begun_s

    def _repeat(self, state: State, instructions: Instructions, *, weight: float, names: tuple[str, ...]) -> State:
        """A part once for each name: replayed at most twice, extrapolated by the second replay's duration."""
        if not names:
            return state
        times = float(len(names))
        once = self._play(state, instructions, weight=weight, names=names[:1])
        if len(names) == 1:
            return once
        twice = self._play(once, instructions, weight=weight * (times - 1.0), names=names[1:])
        self._stretches[-1] = replace(self._stretches[-1], lane_every_s=self._lane_every_s(once, twice))
        return twice.repeated(times - 2.0, once)

    def _lane_every_s(self, once: State, twice: State) -> dict[str, float]:
        """How far apart the same collective of two repeats is, by name of the lane."""
        every_s = twice.now_s - once.now_s
        return {
            self.lane_names[lane]: max(clock - once.lanes.get(lane, clock), every_s)
            for lane, clock in twice.lanes.items()
        }

    def _play(self, state: State, instructions: Instructions, *, weight: float, names: tuple[str, ...]) -> State:
        """Follow instructions from a state; `weight`: how often this happens in the step."""
        state, begun_s, found = state.copy(), state.now_s, list[Interval]()
        for step in instructions:
            if isinstance(step, Run):
                self._run(state, step, found)
            elif isinstance(step, Wait):
                if step.slot in state.slots:
                    self._pause(state, *state.slots[step.slot], found, weight=weight)
            elif self.lane[step.collective.axis] >= 0:
                end_s = self._send(state, step.collective, found)
                if isinstance(step, Issue):
                    state.slots[step.slot] = (end_s, step.collective)
                else:
                    self._pause(state, end_s, step.collective, found, weight=weight)
            elif isinstance(step, Issue):
                state.slots.pop(step.slot, None)
        self._stretches.append(Stretch(names, begun_s, state.now_s, tuple(found)))
        return state

    def _run(self, state: State, run: Run, found: list[Interval]) -> None:
        total_s = 0.0
        for operation in run.operations:
            start_s = state.now_s + total_s
            total_s = total_s + self.run_s(operation)
            found.append(Interval(COMPUTE_LANE, operation, start_s, state.now_s + total_s))
        state.now_s = state.now_s + total_s

    def _send(self, state: State, collective: Collective, found: list[Interval]) -> float:
        """Put a collective on its lane; returns its end."""
        lane = self.lane[collective.axis]
        start_s = max(state.lanes.get(lane, state.now_s), state.now_s)
        end_s = start_s + self.collective_s(collective)
        state.lanes[lane] = end_s
        found.append(Interval(self.lane_names[lane], collective, start_s, end_s))
        return end_s

    def _pause(self, state: State, until_s: float, cause: Collective, found: list[Interval], *, weight: float) -> None:
        """Hold the compute lane until a collective has ended, and charge the pause to it."""
        if until_s > state.now_s:
            key = (cause.kind, cause.axis, cause.phase, cause.layer)
            self.exposed_s[key] = self.exposed_s.get(key, 0.0) + weight * (until_s - state.now_s)
            found.append(Interval(COMPUTE_LANE, cause, state.now_s, until_s))
            state.now_s = until_s
