"""The reference for the column replay: one candidate, one number at a time, optionally with every interval.

It follows the same schedule with its own loop and must agree to the last bit. It adds the position of each interval and
the collective that each wait of the compute stream is for. Repeated parts are replayed twice and extrapolated, each
clock at its own pace; the second replay represents the rest in sums and records.
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

Pause = tuple[TermKey, float, float, float]
"""A wait of the compute stream: collective, number of micro-batches, times in each, and duration, s."""


@dataclass(frozen=True)
class Interval:
    """One operation on a stream (`COMPUTE_LANE` or a tier's name), in seconds from the start of its micro-batch.

    A collective on the compute stream is a wait until it has ended.
    """

    lane: str
    operation: Computation | Collective
    start_s: float
    end_s: float

    @property
    def pause(self) -> bool:
        """Whether this is a wait of the compute stream for a collective."""
        return self.lane == COMPUTE_LANE and isinstance(self.operation, Collective)


@dataclass(frozen=True)
class Stretch:
    """A repeated part of a micro-batch, each repeat like the first: one name per repeat.

    start_s, end_s: of the first on the compute stream; the others follow without a gap. lane_every_s: period on a
    communication stream, longer where it is overloaded.
    """

    names: tuple[str, ...]
    start_s: float
    end_s: float
    intervals: tuple[Interval, ...]
    lane_every_s: Mapping[str, float] = field(default_factory=dict)

    def shifts_s(self, time: int) -> Callable[[str], float]:
        """Offset of a repeat, from 0, on a stream, s."""
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
    """Clocks of one replay: the compute stream, when each stream is free, and each handle."""

    now_s: float = 0.0
    lanes: dict[int, float] = field(default_factory=dict)
    slots: dict[str, tuple[float, Collective]] = field(default_factory=dict)

    def copy(self) -> State:
        """An independent copy."""
        return State(self.now_s, dict(self.lanes), dict(self.slots))

    def repeated(self, times: float, before: State) -> State:
        """State after `times` more repeats of the part since `before`: each clock at its own pace, none slower than the
        first.

        An overloaded stream falls further behind with each repeat.
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
    """One micro-batch through a chunk of a pipeline stage, s; last_backward_s, end_s: of the step's last one.

    data_s: of the end, waiting for the chunk's gradient buckets.
    """

    forward_s: float
    backward_s: float
    last_backward_s: float
    end_s: float
    data_s: float


@dataclass(frozen=True)
class _Chunk:
    """A replayed chunk: durations, waits for the host in a micro-batch, waits for collectives, recorded intervals."""

    times: ChunkTimes
    waited_s: float
    pauses: list[Pause]
    batches: list[Batch]


@dataclass
class Timeline:
    """Replays one step of one candidate.

    values: of all symbols; run_s: time of one computation in the schedule; collective_s: of a collective; lane: stream
    (tier) by group of axes, negative for groups of one; lane_names: names of the tiers; dispatch_s: host time to issue
    an operation; recording: intervals are recorded.
    """

    values: Mapping[str, float]
    run_s: Callable[[Computation], float]
    collective_s: Callable[[Collective], float]
    lane: Mapping[str, int]
    lane_names: tuple[str, ...]
    dispatch_s: float = 0.0
    recording: bool = True
    host_s: float = 0.0
    pauses: list[Pause] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    _stretches: list[Stretch] = field(default_factory=list)
    _stands_for: float = 1.0
    _chunks: dict[tuple[Stage, int, int, bool], _Chunk] = field(default_factory=dict)
    _runs: dict[int, tuple[Run, float]] = field(default_factory=dict)
    _sent_s: dict[int, tuple[Collective, float]] = field(default_factory=dict)

    @property
    def exposed_s(self) -> dict[TermKey, float]:
        """Waits of the compute stream by collective, s."""
        found: dict[TermKey, float] = {}
        for key, batches, times, pause_s in self.pauses:
            found[key] = found.get(key, 0.0) + batches * times * pause_s
        return found

    def step_s(self, schedule: StepSchedule, *, layers: int, kept: int, accumulation: int) -> float:
        """Duration of one step without pipeline stages, s."""
        last, waited_s = self._micro_batch(schedule, schedule.last_micro_batch, layers=layers, kept=kept)
        last_s = last.now_s + waited_s
        end_s = self._play(last, schedule.ends[ONLY], names=(END,)).now_s + waited_s
        self._note_batch(1, end_s)
        others_s, others_waited_s = last_s, waited_s
        if accumulation > 1:
            # Without replicas there are no buckets, and the last micro-batch is like the others.
            batch = schedule.micro_batch if self._replicated(schedule) else schedule.last_micro_batch
            self._stands_for = accumulation - 1.0
            others, others_waited_s = self._micro_batch(schedule, batch, layers=layers, kept=kept)
            others_s = others.now_s + others_waited_s
            self._note_batch(accumulation - 1, others_s)
            self.batches.reverse()
        self.host_s = (accumulation - 1.0) * others_waited_s + waited_s
        return (accumulation - 1.0) * others_s + end_s

    def _replicated(self, schedule: StepSchedule) -> bool:
        return self.lane[schedule.replicas] >= 0

    def chunk(
        self, schedule: StepSchedule, part: Stage, stage: Stage, *, layers: int, kept: int, times: int, ends: bool
    ) -> ChunkTimes:
        """A chunk of a pipeline stage of so many blocks, `times` micro-batches of it a step.

        part: whether the chunk has the embedding or the LM head; ends: it is the last to finish, and the stage waits
        for the step's own collectives after it.

        Passes of a chunk start with idle streams, so its first weight gathers are exposed. Equal chunks of
        one stage are replayed once.
        """
        key = part, layers, kept, ends
        if key in self._chunks:
            self.pauses += self._chunks[key].pauses
            self.batches += self._chunks[key].batches
        else:
            pauses, batches = len(self.pauses), len(self.batches)
            found, waited_s = self._chunk(schedule, part, stage, layers=layers, kept=kept, times=times, ends=ends)
            self._chunks[key] = _Chunk(found, waited_s, self.pauses[pauses:], self.batches[batches:])
        self.host_s += times * self._chunks[key].waited_s
        return self._chunks[key].times

    def _chunk(
        self, schedule: StepSchedule, part: Stage, stage: Stage, *, layers: int, kept: int, times: int, ends: bool
    ) -> tuple[ChunkTimes, float]:
        """Durations of a chunk, and how long its blocks wait for the host in a micro-batch."""
        before, self._stands_for = len(self.pauses), times - 1.0
        forward, backward = self._passes(schedule.micro_batch, part, layers=layers, kept=kept)
        self._note_batch(times - 1, forward[0].now_s + backward[0].now_s)
        self._stands_for = 1.0
        if self.recording or self._replicated(schedule):
            _, last = self._passes(schedule.last_micro_batch, part, layers=layers, kept=kept)
        else:
            # Without replicas there are no buckets, and the last micro-batch is like the others.
            last = backward
            self.pauses += [(key, 1.0, number, pause_s) for key, _, number, pause_s in self.pauses[before:]]
        passes, stretches = len(self.pauses), len(self._stretches)
        alone_s = self._play(State(), schedule.ends[stage], names=(END,)).now_s
        del self.pauses[passes:], self._stretches[stretches:]
        end = self._play(last[0], schedule.ends[stage], names=(END,))
        if not ends:
            del self.pauses[passes:]
        self._note_batch(1, forward[0].now_s + end.now_s)
        shares = [issued.count(self._sent, self.values.__getitem__) for issued in schedule.issued]
        waited_s = self._waited_s(sum(shares), layers, forward[1] + backward[1])
        waits = [waited_s * share / sum(shares) for share in shares]
        times_s = ChunkTimes(
            forward[0].now_s + waits[0],
            backward[0].now_s + waits[1],
            last[0].now_s + waits[1],
            end.now_s - last[0].now_s,
            end.now_s - last[0].now_s - alone_s,
        )
        return times_s, waited_s

    def _passes(
        self, batch: MicroBatch, stage: Stage, *, layers: int, kept: int
    ) -> tuple[tuple[State, float], tuple[State, float]]:
        """Clocks after the forward and after the backward pass of a chunk, each with what its blocks took."""
        state = self._play(State(), batch.embedding if stage.first else batch.enter, names=(EMBEDDING_FORWARD,))
        state, blocks_s = self._forward(batch, state, layers=layers, last=stage.last)
        if stage.last:
            state = self._play(state, batch.head_all_kept, names=(HEAD,))
        back = self._play(State(), () if kept else batch.enter_backward, names=(HEAD,))
        back, backward_s = self._backward(batch, back, layers=layers, kept=kept)
        end = batch.flush if stage.first else batch.leave
        back = self._play(back, end, names=(EMBEDDING_BACKWARD,))
        return (state, blocks_s), (back, backward_s)

    def _sent(self, axes: str) -> float:
        return 1.0 if self.lane[axes] >= 0 else 0.0

    def _waited_s(self, issued: float, layers: int, blocks_s: float) -> float:
        """Time in which blocks wait for the host that issues them, s: compared over both passes of all blocks."""
        return max(0.0, self.dispatch_s * issued * layers - blocks_s)

    def _note_batch(self, times: int, every_s: float) -> None:
        if not self.recording:
            return
        self.batches.append(Batch(times, every_s, tuple(self._stretches)))
        self._stretches.clear()

    def _micro_batch(self, schedule: StepSchedule, batch: MicroBatch, *, layers: int, kept: int) -> tuple[State, float]:
        """One micro-batch from idle streams, and how long its blocks wait for the host."""
        state = self._play(State(), batch.embedding, names=(EMBEDDING_FORWARD,))
        state, forward_s = self._forward(batch, state, layers=layers, last=True)
        head = batch.head_all_kept if kept == layers else batch.head
        state = self._play(state, head, names=(HEAD,))
        state, backward_s = self._backward(batch, state, layers=layers, kept=kept)
        issued = sum(one.count(self._sent, self.values.__getitem__) for one in schedule.issued)
        waited_s = self._waited_s(issued, layers, forward_s + backward_s)
        return self._play(state, batch.flush, names=(EMBEDDING_BACKWARD,)), waited_s

    def _forward(self, batch: MicroBatch, state: State, *, layers: int, last: bool) -> tuple[State, float]:
        """All blocks forward, and their time; `last`: the LM head follows."""
        begun_s, names = state.now_s, tuple(map(block_forward, range(layers - 1)))
        state = self._repeat(state, batch.block, names=names)
        final = batch.last_block if last else batch.alone
        state = self._play(state, final, names=(block_forward(layers - 1),))
        return state, state.now_s - begun_s

    def _backward(self, batch: MicroBatch, state: State, *, layers: int, kept: int) -> tuple[State, float]:
        """All blocks backward, and their time."""

        def play(state: State, instructions: Instructions, name: str) -> State:
            return self._play(state, instructions, names=(name,))

        def blocks(state: State, instructions: Instructions, numbers: range) -> State:
            return self._repeat(state, instructions, names=tuple(map(block_backward, numbers)))

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

    def _repeat(self, state: State, instructions: Instructions, *, names: tuple[str, ...]) -> State:
        """Run a part once per name: replayed at most twice, extrapolated by the second replay's duration."""
        if not names:
            return state
        times = float(len(names))
        once = self._play(state, instructions, names=names[:1])
        if len(names) == 1:
            return once
        twice = self._play(once, instructions, names=names[1:], times=times - 1.0)
        if self.recording:
            self._stretches[-1] = replace(self._stretches[-1], lane_every_s=self._lane_every_s(once, twice))
        return twice.repeated(times - 2.0, once)

    def _lane_every_s(self, once: State, twice: State) -> dict[str, float]:
        """Period of a repeated collective, by name of the stream."""
        every_s = twice.now_s - once.now_s
        return {
            self.lane_names[lane]: max(clock - once.lanes.get(lane, clock), every_s)
            for lane, clock in twice.lanes.items()
        }

    def _play(self, state: State, instructions: Instructions, *, names: tuple[str, ...], times: float = 1.0) -> State:
        """Run instructions from a state; `times`: how often in the micro-batch."""
        state, begun_s, found = state.copy(), state.now_s, list[Interval]()
        for step in instructions:
            if isinstance(step, Run):
                if self.recording:
                    self._note_run(state.now_s, step, found)
                state.now_s = state.now_s + (self._runs.get(id(step)) or self._summed(step))[1]
            elif isinstance(step, Wait):
                if step.slot in state.slots:
                    self._pause(state, *state.slots[step.slot], found, times=times)
            elif self.lane[step.collective.axis] >= 0:
                end_s = self._send(state, step.collective, found)
                if isinstance(step, Issue):
                    state.slots[step.slot] = (end_s, step.collective)
                else:
                    self._pause(state, end_s, step.collective, found, times=times)
            elif isinstance(step, Issue):
                state.slots.pop(step.slot, None)
        if self.recording:
            self._stretches.append(Stretch(names, begun_s, state.now_s, tuple(found)))
        return state

    def _note_run(self, begun_s: float, run: Run, found: list[Interval]) -> None:
        total_s = 0.0
        for operation in run.operations:
            start_s = begun_s + total_s
            total_s = total_s + self.run_s(operation)
            found.append(Interval(COMPUTE_LANE, operation, start_s, begun_s + total_s))

    def _summed(self, run: Run) -> tuple[Run, float]:
        """A run with its duration, s: the left fold over its operations, computed once per run."""
        total_s = 0.0
        for operation in run.operations:
            total_s = total_s + self.run_s(operation)
        self._runs[id(run)] = run, total_s
        return self._runs[id(run)]

    def _timed(self, collective: Collective) -> tuple[Collective, float]:
        """A collective with its duration in the schedule, computed once."""
        self._sent_s[id(collective)] = collective, self.collective_s(collective)
        return self._sent_s[id(collective)]

    def _send(self, state: State, collective: Collective, found: list[Interval]) -> float:
        """Put a collective on its stream; returns its end."""
        lane = self.lane[collective.axis]
        start_s = max(state.lanes.get(lane, state.now_s), state.now_s)
        end_s = start_s + (self._sent_s.get(id(collective)) or self._timed(collective))[1]
        state.lanes[lane] = end_s
        if self.recording:
            found.append(Interval(self.lane_names[lane], collective, start_s, end_s))
        return end_s

    def _pause(self, state: State, until_s: float, cause: Collective, found: list[Interval], *, times: float) -> None:
        """Block the compute stream until a collective has ended, and record the wait."""
        if until_s > state.now_s:
            key = (cause.kind, cause.axis, cause.phase, cause.layer)
            self.pauses.append((key, self._stands_for, times, until_s - state.now_s))
            if self.recording:
                found.append(Interval(COMPUTE_LANE, cause, state.now_s, until_s))
            state.now_s = until_s
