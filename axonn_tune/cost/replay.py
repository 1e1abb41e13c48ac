"""The replay of a schedule: for one candidate in numbers, or for many in columns, by the same code.

Clocks of the compute stream, of each tier's stream and of each handle advance by sums and maxima, which give numbers
and columns the same bits. Runs of equal blocks are replayed twice and the rest extrapolated, since further blocks take
equally long; an overloaded stream falls behind by an equal time with each block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from axonn_tune.cost.collectives import collective_time_s
from axonn_tune.cost.compute import ComputeClock, compute_s
from axonn_tune.cost.recorder import BACKWARD, FORWARD, Recorder, State
from axonn_tune.frameworks.dispatchers import find_dispatcher
from axonn_tune.program.operations import ONCE, Collective, Sent, Size, Value
from axonn_tune.program.schedule import HANDLES, ISSUE, RUN, SYNC, WAIT, Instructions, MicroBatch, StepSchedule
from axonn_tune.program.step import ONLY, Behind, Runs, Segment, Stage, StepProgram, kept_share, segments
from axonn_tune.vocabulary import EMBEDDING_BACKWARD, EMBEDDING_FORWARD, END, HEAD


class ChunkTimes(NamedTuple):
    """One micro-batch through a chunk of a pipeline stage, s: numbers, or columns.

    last_backward_s: of the step's last one; end_s: after it, the step's end; data_s: of that, waiting for the chunk's
    gradient buckets; host_s: waits for the host, all micro-batches; saved_s: by a forward and a backward pass of two
    micro-batches that run beside each other. input_s, weight_s: halves of a backward pass that is split.
    """

    forward_s: Any
    backward_s: Any
    last_backward_s: Any
    end_s: Any
    data_s: Any
    host_s: Any
    saved_s: Any = 0.0
    input_s: Any = 0.0
    weight_s: Any = 0.0


Lines: TypeAlias = tuple[tuple[Value, Value], ...]
"""`(latency_s, bandwidth_bytes_per_s)` of each algorithm and protocol of a collective."""


class StageWork:
    """Sizes and computation of one stage of a step, each worked out once; the clock has the values of symbols.

    runs: all its blocks, where that is one chunk.
    """

    def __init__(
        self, clock: ComputeClock, program: StepProgram, schedule: StepSchedule, stage: Stage, runs: Runs | None = None
    ) -> None:
        self.clock, self.program, self.schedule, self.stage = clock, program, schedule, stage
        self.values = clock.values
        self.runs: Runs = ((0, self.values["L"]),) if runs is None else runs
        self.terms = tuple(program.collectives(stage))
        self._durations: dict[int, Value] = {}
        self._sizes: dict[Size, Value] = {}
        self._segments: dict[tuple[tuple[int, int], ...], tuple[Runs, list[Segment]]] = {}

    def run_s(self, number: int) -> Value:
        """Duration of a run, s."""
        if number not in self._durations:
            total: Value = 0.0
            # Shares of blocks are no numbers where there are none of a kind, whose runs are not played.
            with np.errstate(invalid="ignore", divide="ignore"):
                for step in self.schedule.runs[number]:
                    total = total + self.clock.run_s(step)
            self._durations[number] = total
        return self._durations[number]

    def size(self, size: Size) -> Value:
        """Value of a size."""
        if size not in self._sizes:
            self._sizes[size] = size.evaluate(self.values)
        return self._sizes[size]

    def segments(self, runs: Runs) -> list[Segment]:
        """Blocks of a chunk in the order of their backward passes; its share of the stage's is not resharded."""
        key = tuple((of_type, id(count)) for of_type, count in runs)
        if key not in self._segments:
            arithmetic, values = self.clock.arithmetic, self.values
            kept = kept_share(runs, values["kept"], values["L"], arithmetic)
            repeated = values.get("repeated", 0.0)
            found = segments(self.program, runs, kept=kept, repeated=repeated, arithmetic=arithmetic)
            self._segments[key] = runs, found
        return self._segments[key][1]

    @cached_property
    def compute_s(self) -> Value:
        """Computation of the stage in a step, s."""
        return compute_s(self.program, self.clock, self.stage)


class Blocks(NamedTuple):
    """Blocks that are replayed: of the model, or of a chunk of a pipeline stage.

    forward: in forward order; backward: in the order of their backward passes, none of them empty; layers: their
    number; issue_s: the host's time to issue all of them, forward and backward; ahead: the forward's share of it.
    """

    forward: Runs
    backward: Sequence[Segment]
    issue_s: Value
    ahead: Value

    @property
    def first(self) -> int | None:
        """Layer type of the first block forward, the last one backward; None without blocks."""
        return self.forward[0][0] if self.forward else None

    @property
    def resharded(self) -> int | None:
        """The first kind of block that is gathered again for its backward pass."""
        return next((one.block.kind for one in self.backward if not one.block.kept), None)

    @property
    def kept(self) -> bool:
        """Whether some are not resharded after forward."""
        return any(one.block.kept for one in self.backward)


class Replay:
    """One stage of a step, replayed for one candidate in numbers, or for a block of candidates in columns.

    streams: tiers on which candidates send over each group of axes; lines: of a collective over its group; several: 1.0
    where a group has several members, else 0.0; on: 1.0 where a group sends on a tier, else 0.0; tiers: their number;
    picked: the candidates' values of a quantity of the stage's work. Candidates of a block share which segments of
    blocks are empty.
    """

    recorder: Recorder | None = None
    saved_s: Value = 0.0

    def __init__(
        self,
        work: StageWork,
        *,
        streams: Mapping[str, Sequence[int]],
        lines: Callable[[Sent, str], Lines],
        several: Callable[[str], Value],
        tiers: int,
        on: Callable[[str, int], Value] = lambda axes, tier: 1.0,
        picked: Callable[[Value], Value] = lambda value: value,
    ) -> None:
        self.work, self.schedule, self.streams, self.tiers = work, work.schedule, streams, tiers
        self._lines, self._several, self._on, self._picked = lines, several, on, picked
        self._larger, self._joint = work.clock.arithmetic.larger, work.program.given.model.has_experts
        self._calls: dict[tuple[Sent, str, Size], Value] = {}
        self._in_a_row: dict[tuple[Sent, str, Size, Size], Value] = {}
        self._sending_on: dict[str, list[tuple[int, Value | None]]] = {}
        self._sent: dict[int, tuple[list[tuple[int, Value | None]], Value]] = {}
        self._durations: dict[int, Value] = {}
        self._paces: dict[Instructions, Value] = {}
        self._reached: dict[tuple[int, Instructions], tuple[State, State]] = {}
        self._some_sent: dict[Instructions, Instructions] = {}

    def call_s(self, collective: Collective) -> Value:
        """Time of one call of a collective, s."""
        key = (collective.sent, collective.axis, collective.size_bytes)
        if key not in self._calls:
            size_bytes = self.value(collective.size_bytes)
            chosen = self._lines(collective.sent, collective.axis)
            self._calls[key] = collective_time_s(chosen, size_bytes, self.work.clock.arithmetic)
        return self._calls[key]

    def value(self, size: Size) -> Value:
        """Value of a size."""
        return self._picked(self.work.size(size))

    def duration_s(self, number: int) -> Value:
        """Duration of a run, s."""
        if number not in self._durations:
            self._durations[number] = self._picked(self.work.run_s(number))
        return self._durations[number]

    def communication_s(self) -> Value:
        """Left fold of calls times seconds over the stage's collectives; groups of one add nothing."""
        total: Value = 0.0
        for collective, count in self.work.terms:
            if self.streams[collective.axis]:
                total = total + self.value(count) * self.call_s(collective)
        return total

    def _sending(self, number: int) -> tuple[list[tuple[int, Value | None]], Value]:
        """Of a collective by its number: the tiers it is sent on, each with 1.0 where a candidate sends it there and
        0.0 where it does not, None where all do; and the duration of consecutive calls (a weight gather is one)."""
        if number not in self._sent:
            one = self.schedule.collectives[number]
            tiers = self._tiers_of(one.axis)
            self._sent[number] = tiers, self.calls_s(one) if tiers else 0.0
        return self._sent[number]

    def calls_s(self, one: Collective) -> Value:
        """Duration of the consecutive calls of a collective, s; a weight gather is one."""
        calls = ONCE if one.role in ("weight", "ahead") else one.calls
        key = one.sent, one.axis, one.size_bytes, calls
        if key not in self._in_a_row:
            self._in_a_row[key] = self.call_s(one) if calls == ONCE else self.value(calls) * self.call_s(one)
        return self._in_a_row[key]

    def _tiers_of(self, axes: str) -> list[tuple[int, Value | None]]:
        if axes not in self._sending_on:
            own = [(tier, self._on(axes, tier)) for tier in self.streams.get(axes, ())]
            self._sending_on[axes] = [(tier, None if np.all(sending) else sending) for tier, sending in own]
        return self._sending_on[axes]

    def _blocks(self, runs: Runs) -> Blocks:
        """The blocks of some runs; the host's time to issue them is nothing where it is so fast."""
        forward = [(of_type, self._picked(count)) for of_type, count in runs]
        behind = [one._replace(blocks=self._picked(one.blocks)) for one in self.work.segments(runs)]
        backward = [one for one in behind if np.asarray(one.blocks).flat[0] > 0]
        dispatch_s = self.work.clock.rates.dispatch_s
        if not runs or (np.isscalar(dispatch_s) and not dispatch_s):
            return Blocks(forward, backward, 0.0, 0.0)
        counted = [(one.block.kind, one.blocks) for one in backward] if self.work.program.some else forward
        issued = [(*self.issued(kind), count) for kind, count in counted]
        issue_s: Value = 0.0
        for ahead, behind_it, count in issued:
            issue_s = issue_s + dispatch_s * (ahead + behind_it) * count
        for kind, count in counted:
            if (sent_s := self.sent_tokens_s(kind)) is not None:
                issue_s = issue_s + sent_s * count
        if len(issued) == 1:
            return Blocks(forward, backward, issue_s, issued[0][0] / self._larger(issued[0][0] + issued[0][1], 1.0))
        share = sum(ahead * count for ahead, _, count in issued) / self._larger(
            sum((one + two) * count for one, two, count in issued), 1.0
        )
        return Blocks(forward, backward, issue_s, share)

    def sent_tokens_s(self, kind: int) -> Value | None:
        """Time in which the host issues nothing, since it waits for the counts of tokens that a dispatch brings, or
        drives the transfer, beside another micro-batch, too; None for blocks without experts, and else."""
        block, program = self.work.program.blocks[kind], self.work.program
        host = find_dispatcher(program.given.options.dispatcher).host
        if host == "free" or (host == "waits" and program.merges):
            return None
        total: Value | None = None
        for step in (*block.forward.operations, *block.backward.operations):
            if isinstance(step, Collective) and step.kind in ("dispatch", "combine"):
                sent_s = self.calls_s(step) * self._multiplicity(step.axis)
                total = sent_s if total is None else total + sent_s
        return total

    def issued(self, kind: int) -> tuple[Value, Value]:
        """Operations of a block's forward and backward pass that the host issues."""
        forward, backward = (
            sum(count * self._multiplicity(name) for name, count in one.items()) for one in self.schedule.issued[kind]
        )
        return forward, backward

    def _multiplicity(self, name: str) -> Value:
        """Of operations that the host issues: value of a symbol; 1.0 for groups of several members, else 0.0."""
        if name in self.streams:
            return self._several(name)
        if name == "1/expert":
            return 1.0 / self._picked(self.work.values["expert"])
        return self._picked(self.work.values[name]) if name else 1.0

    def step_s(self) -> tuple[Value, Value]:
        """Duration of one step without pipeline stages, and its wait for the host, s; the last micro-batch goes first.

        Without replicas no buckets are sent, and the last micro-batch is like the others.
        """
        schedule, values = self.schedule, self.work.values
        blocks, times = self._blocks(self.work.runs), self._picked(values["A"]) - 1.0
        buckets = any(self.streams.get(axes) for axes in schedule.replicas)
        self._begin_batch(1.0)
        state, blocks_s = self._micro_batch(schedule.last_micro_batch, blocks)
        waited_s = self._waited_s(blocks, blocks_s)
        last_s = self._play(state, schedule.ends[ONLY], END)[0] + waited_s
        self._end_batch(last_s)
        others_s, others_waited_s = state[0] + waited_s, waited_s
        if buckets or self.recorder is not None:
            self._begin_batch(times)
            ordinary = schedule.micro_batch if buckets else schedule.last_micro_batch
            state, blocks_s = self._micro_batch(ordinary, blocks)
            others_waited_s = self._waited_s(blocks, blocks_s)
            others_s = state[0] + others_waited_s
        saved_s = self._saved_s(schedule.micro_batch, blocks, blocks_s)
        if buckets or self.recorder is not None:
            self._end_batch(others_s - saved_s, before=True)
        self.saved_s = times * saved_s
        result: Value = times * (others_s - saved_s) + last_s
        return result, times * others_waited_s + waited_s

    @property
    def update_s(self) -> Value:
        """The stage's end of a step, without waits for gradient buckets, s."""
        return self.alone_s(self.schedule.ends[self.work.stage])

    def alone_s(self, part: Instructions) -> Value:
        """Duration of some instructions from idle streams, s."""
        found: Value = self.after(self.idle, part)[0]
        return found

    def chunk(self, part: Stage, runs: Runs) -> ChunkTimes:
        """A chunk of some blocks, with its share of the stage's that are not resharded; part: its embedding or LM head.

        Passes start with idle streams, so their first weight gathers are exposed.
        """
        schedule, values, end = self.schedule, self.work.values, self.schedule.ends[self.work.stage]
        blocks, times = self._blocks(runs), self._picked(values["A"])
        self._begin_batch(times - 1.0)
        forward, backward = self._passes(schedule.micro_batch, blocks, part)
        self._end_batch(forward[0][0] + backward[0][0])
        self._begin_batch(1.0)
        last = self._passes(schedule.last_micro_batch, blocks, part, last=True)[1][0]
        ended_s = self._play(last, end, END)[0]
        self._end_batch(forward[0][0] + ended_s)
        end_s = ended_s - last[0]
        data_s = end_s - self.update_s
        waited_s = self._waited_s(blocks, forward[1] + backward[1])
        ahead_s = waited_s * blocks.ahead
        behind_s = waited_s - ahead_s
        passes_s = forward[0][0] + ahead_s, backward[0][0] + behind_s, last[0] + behind_s
        saved_s = self._saved_s(schedule.micro_batch, blocks, forward[1] + backward[1])
        return ChunkTimes(*passes_s, end_s, data_s, times * waited_s, saved_s)

    def weights_s(self, runs: Runs) -> Value:
        """Weight gradients of a chunk that wait for the rest of its backward pass, one operation after the other, s."""
        # Imported here: most schedules split no backward pass, and start-up time is theirs.
        from axonn_tune.program.split import waits

        total: Value = 0.0
        for one in self.work.segments(runs):
            for step in filter(waits, self.work.program.blocks[one.block.kind].backward.operations):
                if isinstance(step, Collective):
                    total = total + one.blocks * self.calls_s(step) * self._multiplicity(step.axis)
                else:
                    total = total + one.blocks * self.work.clock.run_s(step)
        return total

    def _saved_s(self, batch: MicroBatch, blocks: Blocks, blocks_s: Value) -> Value:
        """What layers save of a forward and a backward pass that run beside each other, with dispatch and combine of
        each behind computation of the other; first and last ones of a step run alone, s. The host takes as long."""
        saved_s: Value = 0.0
        for one in blocks.backward:
            saved_s = saved_s + one.blocks * self.block_saves_s(batch, one.of_type, one.block)
        if isinstance(saved_s, float) and saved_s == 0.0:
            return saved_s
        room_s = self._larger(0.0, blocks_s - blocks.issue_s)
        kept_s: Value = saved_s - self._larger(0.0, saved_s - room_s)
        return kept_s

    def block_saves_s(self, batch: MicroBatch, of_type: int, block: Behind) -> Value:
        """The same of one block with experts, s."""
        program = self.work.program
        if not program.merges or not program.blocks[block.kind].merges:
            return 0.0
        alone = batch.forward(of_type, of_type), batch.backward(of_type, block, block.kind)
        apart_s, both_s = sum(map(self._pace_s, alone)), self._pace_s(batch.merged(of_type, block))
        found: Value = self._larger(0.0, apart_s - both_s)
        return found

    def _pace_s(self, part: Instructions) -> Value:
        """Time of a part in steady state."""
        if part not in self._paces:
            once = self.after(self.idle, part)
            self._paces[part] = self.after(once, part)[0] - once[0]
        return self._paces[part]

    def _begin_batch(self, times: Value) -> None:
        if self.recorder is not None:
            self.recorder.begin_batch(float(times))

    def _end_batch(self, every_s: Value, *, before: bool = False) -> None:
        if self.recorder is not None:
            self.recorder.end_batch(float(every_s), before=before)

    def _micro_batch(self, batch: MicroBatch, blocks: Blocks) -> tuple[State, Value]:
        """One micro-batch from idle streams, and what its blocks take of it, s, where nothing waits for the host."""
        embedding, head, flush = batch.embedding(blocks.first), batch.head(blocks.resharded), batch.flush(blocks.first)
        state = self._play(self.idle, embedding, EMBEDDING_FORWARD)
        state = self._forward(batch, state, blocks, head=True)
        state = self._play(state, head, HEAD)
        state = self._backward(batch, state, blocks)
        state = self._play(state, flush, EMBEDDING_BACKWARD)
        return state, self._of_blocks_s(state, embedding, head, flush)

    def _passes(
        self, batch: MicroBatch, blocks: Blocks, part: Stage, *, last: bool = False
    ) -> tuple[tuple[State, Value], tuple[State, Value]]:
        """Clocks after the forward and after the backward pass of a chunk, each with what its blocks took; last: the
        forward pass is only recorded."""
        head, state = part.last and blocks.first is None, self.idle
        ahead_s: Value = 0.0
        if self.recorder is not None or not last:
            enter = batch.embedding(blocks.first) if part.first else batch.enter(blocks.first, head=head)
            leave = batch.head(None) if part.last else ()
            state = self._play(state, enter, EMBEDDING_FORWARD)
            state = self._forward(batch, state, blocks, head=part.last)
            state = self._play(state, leave, HEAD) if part.last else state
            ahead_s = self._of_blocks_s(state, enter, leave)
        enter = () if blocks.kept else batch.enter_backward(blocks.resharded)
        leave = (batch.flush if part.first else batch.leave)(blocks.first)
        back = self._play(self.idle, enter, HEAD)
        back = self._backward(batch, back, blocks)
        back = self._play(back, leave, EMBEDDING_BACKWARD)
        return (state, ahead_s), (back, self._of_blocks_s(back, enter, leave))

    def _of_blocks_s(self, state: State, *others: Instructions) -> Value:
        """What a pass that began with idle streams took but for what other instructions take by themselves, s: its
        blocks, and the waits for what they sent. In either the host issues ahead."""
        took_s: Value = state[0]
        for part in others:
            took_s = took_s - self.alone_s(part)
        return took_s

    def _waited_s(self, blocks: Blocks, blocks_s: Value) -> Value:
        """Time in which blocks wait for the host that issues them, s: compared over both passes of all blocks."""
        if isinstance(blocks.issue_s, float) and blocks.issue_s == 0.0:
            return 0.0
        waited_s: Value = self._larger(0.0, blocks.issue_s - blocks_s)
        return waited_s

    @cached_property
    def idle(self) -> State:
        """Every stream free at time 0."""
        return [0.0, *([None] * (self.tiers + len(HANDLES)))]

    def after(self, state: State, part: Instructions) -> State:
        """The state after a part, worked out once for each state: runs of blocks share how they begin."""
        key = id(state), part
        if key not in self._reached:
            self._reached[key] = state, self._run(state, self._sent_of(part), None) if part else state
        return self._reached[key][1]

    def _sent_of(self, part: Instructions) -> Instructions:
        """Instructions without collectives that are waited for at once and that no candidate sends."""
        if part not in self._some_sent:
            unsent = {one for one in part if one[0] == SYNC and not self._sending(one[1])[0]}
            self._some_sent[part] = tuple(one for one in part if one not in unsent) if unsent else part
        return self._some_sent[part]

    def _forward(self, batch: MicroBatch, state: State, blocks: Blocks, *, head: bool) -> State:
        """All blocks forward; head: the LM head follows."""
        following = [of_type for of_type, _ in blocks.forward[1:]]
        for (of_type, count), after in zip_longest(blocks.forward, following):
            state = self._repeat(state, batch.forward(of_type, of_type), count - 1.0, FORWARD)
            state = self._play(state, batch.forward(of_type, after, head=head and after is None), FORWARD)
        return state

    def _backward(self, batch: MicroBatch, state: State, blocks: Blocks) -> State:
        """All blocks backward."""
        before = None
        for number, one in enumerate(blocks.backward):
            later = (other.block.kind for other in blocks.backward[number + 1 :] if not other.block.kept)
            state = self._segment(batch, state, one, before=before, following=next(later, None))
            before = one.of_type
        return state

    def _segment(
        self, batch: MicroBatch, state: State, one: Segment, *, before: int | None, following: int | None
    ) -> State:
        """Blocks backward that are alike; before: type of the block before them; following: what gathers after them."""
        block, count, own = one.block, one.blocks, one.block.kind
        middle, last = (batch.backward(one.of_type, block, after) for after in (own, following))
        if block.kept:
            state = self._play(state, batch.backward(before, block, None), BACKWARD)
            return self._repeat(state, middle, count - 1.0, BACKWARD)
        if before == one.of_type:
            return self._play(self._repeat(state, middle, count - 1.0, BACKWARD), last, BACKWARD)
        single = isinstance(count, float)
        if np.all(count == 1.0):
            return self._play(state, batch.backward(before, block, following), BACKWARD)
        several = self._play(state, batch.backward(before, block, own), BACKWARD)
        several = self._play(self._repeat(several, middle, count - 2.0, BACKWARD), last, BACKWARD)
        if single or not np.any(count == 1.0):
            return several
        return _chosen(count == 1.0, self._play(state, batch.backward(before, block, following), BACKWARD), several)

    def _repeat(self, state: State, part: Instructions, times: Value, phase: str) -> State:
        """The state after a part has run `times` times: exact for 0, 1 and 2, then extrapolated."""
        single = isinstance(times, float)
        if np.all(times <= 0.0):
            return state
        once = self._play(state, part, phase)
        if np.all(times == 1.0):
            return once
        twice = self._play(once, part, phase, times=times - 1.0)
        if self.recorder is not None:
            self.recorder.repeated(once, twice)
        # Each clock advances at its own pace, none slower than the first.
        every, more = twice[0] - once[0], times - 2.0
        last: State = [twice[0] + more * every]
        for early, late in zip(once[1:], twice[1:], strict=True):
            own = every if early is None or late is None else self._larger(late - early, every)
            last.append(None if late is None else late + more * own)
        if single:
            return last
        none, one = times == 0.0, times == 1.0
        return [
            None if late is None else np.where(none, _clock(start), np.where(one, early, late))
            for start, early, late in zip(state, once, last, strict=True)
        ]

    def _play(self, state: State, part: Instructions, phase: str, *, times: Value = 1.0) -> State:
        """Run a part, one of `times`; returns the new state and leaves the given one unchanged."""
        if self.recorder is None:
            return self._run(state, part, None)
        self.recorder.begin(phase, float(times), state[0])
        after = self._run(state, part, self.recorder)
        self.recorder.end(after[0])
        return after

    def _run(self, state: State, part: Instructions, recorder: Recorder | None) -> State:
        state = list(state)
        clock = state[0]
        first_handle, larger = 1 + self.tiers, self._larger
        for code, number, handle in part:
            if code == RUN:
                if recorder is not None:
                    recorder.run(number, clock)
                clock = clock + self.duration_s(number)
            elif code == WAIT:
                ready = state[first_handle + number]
                if ready is not None:
                    if recorder is not None:
                        recorder.wait(number, clock, ready)
                    clock = larger(clock, ready)
            else:
                end = self._send(state, clock, number, None if code == SYNC else handle, recorder)
                if code == ISSUE:
                    issued = state[first_handle + handle]
                    # Buckets of experts go beside others, over another group.
                    both = self._joint and issued is not None
                    state[first_handle + handle] = end if not both else issued if end is None else larger(issued, end)
                elif end is not None:
                    clock = end
        state[0] = clock
        return state

    def _send(
        self, state: State, clock: Value, number: int, handle: int | None, recorder: Recorder | None
    ) -> Value | None:
        """Put a collective on its stream; returns its end, None where no candidate sends it."""
        tiers, takes_s = self._sending(number)
        if not tiers:
            return None
        start = clock
        for tier, sending in tiers:
            if (busy := state[1 + tier]) is not None:
                start = self._larger(busy if sending is None else busy * sending, start)
        end: Value = start + takes_s
        for tier, sending in tiers:
            # Where a candidate's group has one member, the end is the clock, which delays nothing on any tier.
            own, busy = end if sending is None or len(tiers) == 1 else end * sending, state[1 + tier]
            state[1 + tier] = own if busy is None or sending is None else self._larger(busy, own)
        if recorder is not None:
            recorder.sent(number, handle, tiers[0][0], start, end, now_s=clock)
        return end


def _chosen(wanted: Any, state: State, other: State) -> State:  # noqa: ANN401 - a column of truth values
    """One state where `wanted`, the other elsewhere; a clock missing in one of them is at its start there."""
    return [
        None if one is None and two is None else np.where(wanted, _clock(one), _clock(two))
        for one, two in zip(state, other, strict=True)
    ]


def _clock(value: Any) -> Any:  # noqa: ANN401 - a number or a column
    return 0.0 if value is None else value
