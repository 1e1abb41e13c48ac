"""Pipelines: kinds of stages joined by a schedule; the exact step, a bound on that of 1F1B, messages.

Legend and orders as in `program.pipeline` and `program.schedules`. An operation starts when its stage has finished
the operation before and the message it needs has arrived. A blocking send (Megatron-Core's batched isend and irecv)
keeps the sender until the message has arrived; its receive shares that batch, so the receiver only waits. An overlapped
send delays only the receiver.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from axonn_tune.cost.collectives import collective_time_s, lines, route, transfer_time_s
from axonn_tune.cost.replay import ChunkTimes
from axonn_tune.frameworks.description import Framework, PipelineSchedule
from axonn_tune.grid import GroupShape
from axonn_tune.job import Job
from axonn_tune.program.operations import Arithmetic, Floats, Integers, Value
from axonn_tune.program.pipeline import (
    Count,
    Kind,
    Operation,
    forward_sequence,
    group_size,
    messages,
    model_parts,
    warm_up,
)
from axonn_tune.program.schedules import check_schedule, part_of, schedule_orders
from axonn_tune.specs.machine import Machine
from axonn_tune.vocabulary import FOLDED, PipelineOrder

PERIODIC = 1e-10
"""Clocks whose shifts over a period differ by less than this share of the shift are in steady state. Maximum and sum
never enlarge a difference, so skipping any number of periods adds at most this share to a step."""


def parts_of(job: Job, stages: int, chunks: int, given: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Layers of each model part of a job's shape, chunk c of stage s at c·p + s: as given, or as it splits them."""
    model, less = job.model, job.framework.step.less
    return model_parts(model.layers, stages=stages, chunks=chunks, given=given, less=less, starts=model.starts)


@dataclass(frozen=True)
class StageKind:
    """Stages that are alike: their numbers, and seconds of one: collectives, computation, passes of each chunk."""

    numbers: list[int]
    communication_s: Floats
    compute_s: Floats
    times: tuple[ChunkTimes, ...]

    def merged(self, micro_batches: Integers, *, stages: int) -> StageKind:
        """The same where forward and backward passes of two micro-batches run beside each other; those of warm-up and
        cool-down do not, as many as a micro-batch for each stage, which the end of the step has with it."""
        found, lone_s = list[ChunkTimes](), np.zeros(len(micro_batches))
        for one in self.times:
            share = 1.0 - one.saved_s / np.maximum(one.forward_s + one.backward_s, 1e-30)
            forward_s, backward_s, last_s = (share * each for each in one[:3])
            merged = one._replace(forward_s=forward_s, backward_s=backward_s, last_backward_s=last_s)
            found.append(merged._replace(saved_s=0.0 * one.saved_s))
            lone_s = lone_s + one.saved_s * np.minimum(micro_batches, stages)
        return replace(self, times=(found[0]._replace(end_s=found[0].end_s + lone_s), *found[1:]))


def stage_end_s(chunks: Sequence[ChunkTimes], *, stages: int) -> Any:  # noqa: ANN401 - number or column
    """From a stage's last operation to its end, s.

    The last chunk's gradient buckets go out first. Buckets of a chunk in flight when its last backward pass ends
    overlap with the next chunk's passes before its own last one, then delay that chunk's buckets.
    """
    left: Any = 0.0
    carried: Any = 0.0
    for chunk in reversed(chunks):
        left = np.maximum(0.0, carried - (stages - 1) * chunk.backward_s)
        carried = chunk.data_s + left
    return chunks[0].end_s + left


@dataclass(frozen=True)
class Pipelines:
    """Candidates with as many stages and chunks: all columns have one row each.

    send_s: of one message; alone_s: computation of the stage that computes longest; order: of their passes.
    """

    stages: int
    chunks: int
    micro_batches: Integers
    kinds: tuple[StageKind, ...]
    send_s: Floats
    overlapped: bool
    contention: float
    order: PipelineOrder = "1f1b"

    def __post_init__(self) -> None:
        """Merge passes where chunks are interleaved: without, no backward pass follows a forward of another one."""
        if self.chunks > 1 and any(np.any(one.saved_s) for kind in self.kinds for one in kind.times):
            kinds = tuple(kind.merged(self.micro_batches, stages=self.stages) for kind in self.kinds)
            object.__setattr__(self, "kinds", kinds)

    def __len__(self) -> int:
        return len(self.micro_batches)

    def sent_s(self, kind: StageKind) -> Floats:
        """All messages of a stage: each pass ends in one, but the last part's forward and the first part's backward,
        and those that stay on the stage where a pipeline is folded."""
        folded, several = self.order in FOLDED, len(kind.numbers) > 1
        ends = float(0 in kind.numbers) + float(self.stages - 1 in kind.numbers and not (folded and several))
        ends *= 1.0 + folded
        sent = 2.0 * self.chunks * self.micro_batches.astype(np.float64) * self.send_s
        return np.asarray(sent * (1.0 - ends / (2.0 * self.chunks)))

    @cached_property
    def communication_s(self) -> Floats:
        """All communication of the stage that has most, s."""
        found: Floats = np.max([kind.communication_s + self.sent_s(kind) for kind in self.kinds], axis=0)
        return found

    @cached_property
    def alone_s(self) -> Floats:
        """Computation of the stage that computes longest, s."""
        found: Floats = np.max([kind.compute_s for kind in self.kinds], axis=0)
        return found

    def times(self, at: Integers | int) -> StageTimes:
        """Durations of the stages of some candidates, or of one."""
        placed = {number: kind for kind in self.kinds for number in kind.numbers}
        by_stage = [placed[number] for number in range(self.stages)]

        def stacked(name: str) -> Floats:
            columns = [[getattr(one, name)[at] for one in kind.times] for kind in by_stage]
            return np.moveaxis(np.array(columns, dtype=np.float64), (0, 1), (-2, -1))

        sent_s = np.asarray(self.send_s[at])
        return StageTimes(
            forward_s=stacked("forward_s"),
            backward_s=stacked("backward_s"),
            last_backward_s=stacked("last_backward_s"),
            end_s=np.moveaxis(np.array([stage_end_s(kind.times, stages=self.stages)[at] for kind in by_stage]), 0, -1),
            send_s=np.broadcast_to(sent_s[..., None], (*sent_s.shape, self.stages)),
            overlapped=self.overlapped,
            order=self.order,
            **({name: stacked(name) for name in ("input_s", "weight_s")} if self.order != "1f1b" else {}),
        )

    def price(self, position: int) -> tuple[PipelineTime, int, float]:
        """One candidate by the recurrence: its time, the stage that computes longest, and its wait for others, s."""
        time = pipeline_time(self.times(position), micro_batches=int(self.micro_batches[position]))
        assert math.isfinite(time.step_s), "what is priced by the recurrence is expected, so its stages have durations"
        slowest = max(self.kinds, key=lambda kind: kind.compute_s[position]).numbers[0]
        return time, slowest, min(time.bubble_s[slowest], max(0.0, time.step_s - float(self.alone_s[position])))


def overlapped(schedule: PipelineSchedule, chunks: int, order: PipelineOrder = "1f1b") -> bool:
    """Whether sends of so many chunks a stage overlap with computation: where backward passes are split, all do."""
    return order != "1f1b" or schedule.overlapped_interleaved if chunks > 1 else schedule.overlapped


def gathers_messages(framework: Framework) -> bool:
    """Whether each rank of x sends its share of a message, which is gathered again where it arrives; with sequence
    parallelism there is no more than a share to send."""
    return framework.schedule.scattered and not framework.step.sequence_parallel


def message_s(
    size_bytes: Value,
    whole_bytes: Value,
    *,
    stages: GroupShape,
    over_x: GroupShape | None,
    machine: Machine,
    world: int,
    call_s: float,
    arithmetic: Arithmetic,
) -> Value:
    """Time of one activation or gradient to the next stage, s.

    whole_bytes: what is gathered again over x, nothing without `over_x`; call_s: software overhead.
    """
    sent_s = transfer_time_s(size_bytes, stages=stages, machine=machine, world=world, call_s=call_s)
    if over_x is None:
        return sent_s
    chosen = lines("all_gather", route(over_x, machine.tiers, world), machine, call_s=call_s)
    pairs = tuple((line.latency_s, line.bandwidth_bytes_per_s) for line in chosen)
    return sent_s + collective_time_s(pairs, whole_bytes, arithmetic)


# One pipeline by the exact recurrence, or columns of them by a bound.


@dataclass(frozen=True, eq=False)
class StageTimes:
    """Durations of a pipeline's operations, s; for `Chains` all may have columns in front of these dims.

    forward_s, backward_s, last_backward_s: (stages, chunks); the last is the backward of the last micro-batch, which
    carries the gradient buckets of data parallelism. end_s: (stages), after a stage's last operation (optimizer step).
    send_s: (stages), of an activation to the next stage, round the ring, or of a gradient to the one before.
    overlapped: see the module's docstring. order: of passes; where it splits the backward pass, input_s and weight_s
    are its halves, of which the last weight gradient has what the last backward pass takes more.
    """

    forward_s: Floats
    backward_s: Floats
    last_backward_s: Floats
    end_s: Floats
    send_s: Floats
    overlapped: bool = False
    order: PipelineOrder = "1f1b"
    input_s: Floats | None = None
    weight_s: Floats | None = None

    @property
    def folded(self) -> bool:
        """Whether the second chunk of each stage runs back."""
        return self.order in FOLDED

    @property
    def shape(self) -> tuple[int, int]:
        """Stages and chunks."""
        return self.forward_s.shape[-2], self.forward_s.shape[-1]

    def _sent_but(self, silent: tuple[int, int], fold: tuple[int, int]) -> Floats:
        """Time of the message of each part, 0 for the part at the model's end, and for what stays on its stage where
        the pipeline is folded; all 0 on one stage."""
        sends = np.full(self.shape, float(self.shape[0] > 1))
        sends[silent] = 0.0
        if self.folded:
            sends[fold] = 0.0
        sent: Floats = np.broadcast_to(self.send_s[..., None], self.forward_s.shape) * sends
        return sent

    @cached_property
    def activation_s(self) -> Floats:
        """Of each part's forward message."""
        return self._sent_but((0, 1) if self.folded else (-1, -1), (-1, 0))

    @cached_property
    def gradient_s(self) -> Floats:
        """Of each part's backward message."""
        return self._sent_but((0, 0), (-1, 1))

    def computing(self) -> Floats:
        """Time of F, B and the last B, and, if B are split, of I, W and the last W: (3 or 6, ..., stages, chunks)."""
        whole = [self.forward_s, self.backward_s, self.last_backward_s]
        if self.input_s is None or self.weight_s is None:
            return np.stack(whole)
        more_s = self.last_backward_s - self.backward_s
        return np.stack([*whole, self.input_s, self.weight_s, self.weight_s + more_s])

    def sent(self) -> Floats:
        """Time of the message that each of these sends: as of `computing`."""
        return self._messages(self.activation_s, self.gradient_s)

    def _messages(self, activation: Floats, gradient: Floats) -> Floats:
        halves = [] if self.input_s is None else [gradient, 0.0 * gradient, 0.0 * gradient]
        return np.stack([activation, gradient, gradient, *halves])

    @cached_property
    def received(self) -> Floats:
        """Time of the message that each of these needs: as of `computing`, without columns."""

        def moved(sent_s: Floats, step: int) -> Floats:
            placed = sent_s.T.copy()
            placed[1:] = placed[1:, ::-1] if self.folded else placed[1:]
            placed = np.roll(placed.ravel(), step).reshape(placed.shape)
            placed[1:] = placed[1:, ::-1] if self.folded else placed[1:]
            return placed.T

        return self._messages(moved(self.activation_s, 1), moved(self.gradient_s, -1))

    def occupied(self) -> Floats:
        """How long each of these occupies its stage: as of `computing`."""
        return self.computing() if self.overlapped else self.computing() + self.sent()


@dataclass(frozen=True)
class PipelineTime:
    """A step, and what each stage does in it, s: step = busy + exposed sends + bubble, for each stage.

    busy_s: computation and the tail; exposed_send_s: blocking sends, and waits up to the length of the message waited
    for; bubble_s: the rest, until the last stage has ended; sends: messages sent, of both kinds.
    """

    step_s: float
    busy_s: tuple[float, ...]
    bubble_s: tuple[float, ...]
    exposed_send_s: tuple[float, ...]
    sends: tuple[int, ...]


# The exact recurrence.


def pipeline_time(times: StageTimes, *, micro_batches: int) -> PipelineTime:
    """Exact step time of a pipeline; chunks > 1 are interleaved or folded.

    Equal periods of the steady state are jumped over (a period is one or more groups of micro-batches after which
    every clock has moved by the same time), which changes nothing by more than 1e-9 of the step.
    ValueError for interleaving with m not divisible by p.
    """
    stages, chunks = times.shape
    tape = _Tape(times)
    if times.order in ("1f1b", "zb1p"):
        check_schedule(times.order, stages=stages, chunks=chunks, micro_batches=micro_batches)
        shortest = _shortest(times.order, stages, chunks)
        pieces = _pieces(times.order, stages, chunks, min(micro_batches, shortest))
        tape.run(pieces.warm)
        tape.run(pieces.lap, laps=(micro_batches - shortest) // group_size(stages, chunks) + 1)
        tape.run(pieces.rest)
        passes = [micro_batches, micro_batches - 1, 1.0]
        runs = np.array(passes if times.order == "1f1b" else [micro_batches, 0.0, 0.0, *passes])
        final = pieces.final
        computed_s = np.tensordot(runs, times.computing(), 1).sum(axis=1)
    else:
        program, final = _ordered_program(times.order, stages, chunks, micro_batches)
        tape.run(program)
        counts = np.bincount(program.cost, minlength=times.computing().size).reshape(times.computing().shape)
        computed_s = (counts * times.computing()).sum(axis=(0, 2))
    finish_s = np.array(tape.done_s)[final] + tape.jumped_s
    busy_s = computed_s + times.end_s
    blocked_s = 0.0 if times.overlapped else micro_batches * times.sent()[:2].sum(axis=(0, 2))
    exposed_s = tape.waited_s() + blocked_s
    step_s = float((finish_s + times.end_s).max())
    return PipelineTime(
        step_s=step_s,
        busy_s=tuple(busy_s.tolist()),
        bubble_s=tuple(np.maximum(step_s - busy_s - exposed_s, 0.0).tolist()),
        exposed_send_s=tuple(exposed_s.tolist()),
        sends=tuple(
            messages(stage, stages=stages, chunks=chunks, micro_batches=micro_batches, folded=times.folded)
            for stage in range(stages)
        ),
    )


class Pass(NamedTuple):
    """One micro-batch through one chunk of a stage, s from the start of the step; kind: as of an `Operation`."""

    stage: int
    kind: Kind
    chunk: int
    micro_batch: int
    start_s: float
    end_s: float


def pipeline_passes(times: StageTimes, *, micro_batches: int) -> list[Pass]:
    """Every pass of a step by the same recurrence, in an order that respects dependencies; sends are not in them."""
    stages, chunks = times.shape
    whole, tape = times.order == "1f1b", _Tape(times)
    shape = stages, chunks, micro_batches
    program = _program(*shape)[0] if whole else _ordered_program(times.order, *shape)[0]
    tape.run(program)
    starts_s = np.array(tape.done_s[1:]) - tape.occupied[program.cost]
    ends_s = starts_s + times.computing().ravel()[program.cost]
    number, stage, chunk = np.unravel_index(program.cost, times.computing().shape)
    seen: dict[tuple[Kind, int, int], int] = {}
    found = []
    columns = (column.tolist() for column in (number, stage, chunk, starts_s, ends_s))
    for place, at, of, start_s, end_s in zip(*columns, strict=True):
        kind = _KINDS[place]
        # Micro-batches go one after the other through each half; of backward passes some may be whole.
        alike: tuple[Kind, ...] = ("I", "W") if kind == "B" and not whole else (kind,)
        for one in alike:
            batch = seen[one, at, of] = seen.get((one, at, of), -1) + 1
        found.append(Pass(at, kind, of, batch, start_s, end_s))
    return found


# The evaluation skips equal periods. A program lists the operations of all stages in an order that respects
# every dependency, and names the two that each depends on by how far back they are. So a lap, the operations of one
# group of micro-batches in steady state, is the same wherever it stands, and m only says how often it is repeated.


_KINDS: tuple[Kind, ...] = ("F", "B", "B", "I", "W", "W")
"""Kinds of operations as durations have them: the third and the last one are of the last micro-batch."""


class _Program(NamedTuple):
    """Operations as columns: how far back (negative) the one before on the stage and the sender are, and the index of
    the duration in (kinds, stages, chunks). What needs no message has the one before as its sender."""

    before: Integers
    sender: Integers
    cost: Integers

    def piece(self, start: int, stop: int) -> _Program:
        """Some operations in a row."""
        return _Program(*(column[start:stop] for column in self))


class _Pieces(NamedTuple):
    """The program of the shortest pipeline with one lap (of a shorter one: all warm-up), and the last operation of each
    stage, counted from the end."""

    warm: _Program
    lap: _Program
    rest: _Program
    final: Integers


class _Tape:
    """Programs run one after another: when the stage of each operation was free again, less what was jumped over, s.

    latency: from when a sender is free again to when F, B and the last B may start.
    """

    def __init__(self, times: StageTimes) -> None:
        self.times = times
        self.latency, self.occupied = (times.received * times.overlapped).ravel(), times.occupied().ravel()
        self.done_s = [0.0]
        self.jumped_s = 0.0
        self.programs: list[_Program] = []
        self.runs: list[int] = []

    def run(self, program: _Program, *, laps: int = 1) -> None:
        """Repeat a program; once all clocks advance equally over two laps, skip whole periods."""
        if not program.cost.size:
            return
        before, sender, cost = program
        bound = before.tolist(), sender.tolist(), self.latency[cost].tolist(), self.occupied[cost].tolist()
        reach, states = -min(before.min(), sender.min()), list[float]()
        run, check = 0, 2
        while run < laps:
            self._lap(*bound)
            self.programs.append(program)
            self.runs.append(1)
            states += self.done_s[-reach:]
            run += 1
            if run == check and (found := _period(np.array(states).reshape(run, reach))):
                period, shift_s = found
                skipped, left = divmod(laps - run, period)
                self.jumped_s += skipped * shift_s
                self.runs[-period:] = [1 + skipped] * period
                laps, check = run + left, 0
            elif run == check:
                check += max(1, run // 2)

    def _lap(self, before: list[int], sender: list[int], latency_s: list[float], occupied_s: list[float]) -> None:
        """The recurrence, once over a program."""
        done_s, append = self.done_s, self.done_s.append
        for back, source, late_s, takes_s in zip(before, sender, latency_s, occupied_s, strict=True):
            free_s, arrival_s = done_s[back], done_s[source] + late_s
            append((free_s if free_s > arrival_s else arrival_s) + takes_s)

    def waited_s(self) -> Floats:
        """Waits of each stage owed to messages, s: each up to the length of the message."""
        before, sender, cost = (np.concatenate(columns) for columns in zip(*self.programs, strict=True))
        runs = np.repeat(self.runs, [program.cost.size for program in self.programs])
        done_s, position = np.array(self.done_s), np.arange(1, cost.size + 1)
        wait_s = done_s[position + sender] + self.latency[cost] - done_s[position + before]
        exposed_s = np.clip(wait_s, 0.0, self.times.received.ravel()[cost])
        stages, chunks = self.times.shape
        return np.bincount(cost // chunks % stages, runs * exposed_s).astype(float)


def _period(states: Floats) -> tuple[int, float] | None:
    """Laps since the last state that the newest differs from by the same time on every clock, and that time, s."""
    shifts = states[-1] - states[-2::-1]
    low, high = shifts.min(axis=1), shifts.max(axis=1)
    steady = np.flatnonzero(high - low <= PERIODIC * low)
    return (int(steady[0]) + 1, float((low + high)[steady[0]] / 2)) if steady.size else None


def _first_lap(order: PipelineOrder, stages: int, chunks: int) -> int:
    """First slot from which on every stage alternates, with what its operations depend on."""
    if order == "zb1p":
        # Each has a W by slot (2v + 1)·p, and none depends on what is over 2p slots before.
        return 2 * (chunks + 2) * stages + 2
    return 2 * stages + 2 if chunks == 1 else 2 * int(warm_up(0, stages=stages, chunks=chunks)) + 4


def _shortest(order: PipelineOrder, stages: int, chunks: int) -> int:
    """Micro-batches of the shortest pipeline that has a lap before the first stage's last forward."""
    group = group_size(stages, chunks)
    forwards = _first_lap(order, stages, chunks) // 2 + 1
    return group * (1 + -(-forwards // (chunks * group)))


@lru_cache(maxsize=32)
def _pieces(order: PipelineOrder, stages: int, chunks: int, micro_batches: int) -> _Pieces:
    """The program of a pipeline, cut before and after the first lap."""
    made = _program if order == "1f1b" else _zero_bubble_program
    program, slot, final = made(stages, chunks, micro_batches)
    long = micro_batches >= _shortest(order, stages, chunks)
    first = _first_lap(order, stages, chunks) if long else slot[-1] + 1
    start, stop = np.searchsorted(slot, [first, first + 2 * chunks * group_size(stages, chunks)]).tolist()
    return _Pieces(program.piece(0, start), program.piece(start, stop), program.piece(stop, slot.size), final)


def _program(stages: int, chunks: int, micro_batches: int) -> tuple[_Program, Integers, Integers]:
    """All operations in order of their slots, with the slots, and the last operation of each stage from the end."""
    forward_chunk, number = forward_sequence(stages, chunks, micro_batches)
    # Time slot of each operation, (F or B, position in its order, stage): after those of its dependencies.
    position, stage = np.arange(chunks * micro_batches)[:, None], np.arange(stages)
    if chunks == 1:
        slots = np.stack([2 * position + stage, 2 * (position + stages) - 1 - stage])
    else:
        turned = position - stage + warm_up(0, stages=stages, chunks=chunks)
        slots = np.stack([2 * (position + stage), 2 * turned + 1])
    kind, place, stage = (index.ravel() for index in np.indices(slots.shape))
    order = np.lexsort((stage, slots.ravel()))
    kind, stage, micro_batch = kind[order], stage[order], number[place[order]]
    chunk = np.abs(kind * (chunks - 1) - forward_chunk[place[order]])
    part, position = chunk * stages + stage, np.arange(order.size)

    of_stage = np.lexsort((position, stage)).reshape(stages, -1)
    before = np.full(order.size, -1)
    before[of_stage[:, 1:]] = of_stage[:, :-1]
    at = np.full((2, chunks * stages + 1, micro_batches), -1)
    at[kind, part, micro_batch] = position
    sender = at[kind, part + 2 * kind - 1, micro_batch]
    sender = np.where(sender < 0, before, sender)
    cost = ((kind + kind * (micro_batch == micro_batches - 1)) * stages + stage) * chunks + chunk
    return _Program(before - position, sender - position, cost), slots.ravel()[order], of_stage[:, -1] - order.size


@lru_cache(maxsize=64)
def _ordered_program(order: PipelineOrder, stages: int, chunks: int, micro_batches: int) -> tuple[_Program, Integers]:
    """All operations of a schedule that splits the backward pass, each after those that it waits for; and the last one
    of each stage from the end."""
    if order == "zb1p":
        program, _, final = _zero_bubble_program(stages, chunks, micro_batches)
        return program, final
    return _program_of(order, stages, chunks, micro_batches)


def _zero_bubble_program(stages: int, chunks: int, micro_batches: int) -> tuple[_Program, Integers, Integers]:
    """As `_program`, of ZB1P: stage s has its k-th F in slot 2k + s, its k-th I in slot 2(k + v·p) - 1 - s, and its
    k-th W behind its (k + s)-th I, or behind the last one with others."""
    forward_chunk, number = forward_sequence(stages, chunks, micro_batches)
    place, stage = np.indices((chunks * micro_batches, stages))
    follows = np.minimum(place + stage, place[-1])
    slots = np.stack([2 * place + stage, *(2 * (one + chunks * stages) - 1 - stage for one in (place, follows))])
    behind = np.stack([0 * place, 0 * place, 1 + place + stage - follows])
    kind, place, stage = (index.ravel() for index in np.indices(slots.shape))
    order = np.lexsort((stage, behind.ravel(), slots.ravel()))
    kind, stage, micro_batch = kind[order], stage[order], number[place[order]]
    chunk, position = forward_chunk[place[order]], np.arange(order.size)
    chunk = np.where(kind > 0, chunks - 1 - chunk, chunk)
    part = chunk * stages + stage

    of_stage = np.lexsort((position, stage)).reshape(stages, -1)
    before = np.full(order.size, -1)
    before[of_stage[:, 1:]] = of_stage[:, :-1]
    at = np.full((3, chunks * stages + 1, micro_batches), -1)
    at[kind, part, micro_batch] = position
    # F waits for that of the part before, I for that of the part behind it, and W for its own I.
    sender = at[np.minimum(kind, 1), part + np.array([-1, 1, 0])[kind], micro_batch]
    sender = np.where(sender < 0, before, sender)
    duration = np.array([0, 3, 4])[kind] + (kind == 2) * (micro_batch == micro_batches - 1)
    cost = (duration * stages + stage) * chunks + chunk
    return _Program(before - position, sender - position, cost), slots.ravel()[order], of_stage[:, -1] - order.size


def _program_of(order: PipelineOrder, stages: int, chunks: int, micro_batches: int) -> tuple[_Program, Integers]:
    """As `_ordered_program`, by following the order of each stage."""
    orders = schedule_orders(order, stages=stages, chunks=chunks, micro_batches=micro_batches)
    # Where F of each part and micro-batch is, then I or B, and what no other operation waits for.
    size, columns, last = stages * chunks * micro_batches, list[tuple[int, int, int]](), [-1] * stages
    done = [-1] * (2 * size + 1)
    left = [iter(_waits(order, stage, each, stages, chunks, micro_batches)) for stage, each in enumerate(orders)]
    heads, count = [next(each, None) for each in left], sum(map(len, orders))
    while len(columns) < count:
        for stage, each in enumerate(left):
            head, before = heads[stage], last[stage]
            while head is not None:
                needed, own, cost = head
                source = before if needed is None else done[needed]
                if needed is not None and source < 0:
                    break
                at = len(columns)
                # A message of another stage, or what was done on this one.
                columns.append((before - at, source - at, cost))
                done[own] = before = at
                head = next(each, None)
            heads[stage], last[stage] = head, before
    befores, senders, costs = np.array(columns, dtype=np.int64).T
    return _Program(befores, senders, costs), np.array(last) - count


def _waits(
    order: PipelineOrder, stage: int, operations: Sequence[Operation], stages: int, chunks: int, micro_batches: int
) -> Iterator[tuple[int | None, int, int]]:
    """Of each operation of a stage the one that it waits for, if any, and its own place, as of `_program_of`; and
    the index of its duration."""
    parts = [part_of(order, stage, chunk, stages=stages) for chunk in range(chunks)]
    size, last = stages * chunks * micro_batches, micro_batches - 1
    for kind, chunk, batch in operations:
        own, cost = parts[chunk] * micro_batches + batch, stage * chunks + chunk
        if kind == "F":
            yield own - micro_batches if parts[chunk] else None, own, cost
        elif kind == "W":
            yield size + own, 2 * size, (4 + (batch == last)) * stages * chunks + cost
        else:
            needed = size + own + micro_batches if parts[chunk] + 1 < stages * chunks else None
            number = 3 if kind == "I" else 1 + (batch == last)
            yield needed, size + own, number * stages * chunks + cost


class Chains(NamedTuple):
    """Chains of dependent operations through each stage, s, `(..., stages)`: the longest is a lower bound of a step.

    For each stage r, let N = min(warm-up + 1, v·m) be its forwards before its first backward. That one starts after

    - parts 0 to r-1 have taken the first micro-batch forward, and r has run N forwards; and
    - all parts have taken the first micro-batch forward, and the last chunks of p-1 to r+1 have taken it back.

    Then r alternates v·m-N backwards with the v·m-N forwards left, and the step ends no earlier than

    - r's N last backwards, the last backward of chunk 0 on r-1, r-2, ..., s, and the tail of s, for any s up to r; and
    - the last forward's way to the last part, and the last micro-batch's way back as far as any stage's tail.

    (Where no forward is left, N = v·m, the last chain starts from the first only.) In 1F1B there is another chain:
    stage r starts each forward after the backward of p-r micro-batches before, a round trip to the last stage. A
    blocking send counts to its sender's operation, an overlapped one only where a chain goes over it.

    Exact to rounding for equal stages with free sends. Gap to the exact value over 1,500 random pipelines of each kind
    (p 2 to 16, v 1 to 4, m p to 8p, half of them overlapped): first part up to 10% and last part up to 50% longer than
    the others, sends to 2%: 1F1B 0.0% at worst; interleaved 0.1% in the median, 1.4% at worst. Every chunk ±20%, sends
    to 3%: 1F1B 0.0% and 2.0%; interleaved 1.3% and 6.2%. Every chunk ±90%, sends to 33%: 0.0% and 11%; 7.0% and 24%.

    begun_s, turned_s: when its first backward pass starts at least, behind its own forward passes, and behind the way
    of the first micro-batch to the last part and back; ended_s: from there to the end of the step. beside: of its
    forward passes of a chunk the share that is not on the second of these chains, at most. step_s: the longest chain of
    all stages, `(...)`.
    """

    begun_s: Floats
    turned_s: Floats
    ended_s: Floats
    beside: Floats
    step_s: Floats

    @staticmethod
    def of(times: StageTimes, micro_batches: Count) -> Chains:
        """Of pipelines as columns; m is a column or one number."""
        (stages, chunks), (forward, backward, last) = times.shape, times.occupied()
        to_next, back, last_back = times.computing() + times.sent()
        m = np.asarray(micro_batches)[..., None]
        first = np.minimum(warm_up(np.arange(stages), stages=stages, chunks=chunks) + 1, chunks * m)
        paired, counts = chunks * m - first, _counts(first, stages, chunks)

        warm_s = (counts * forward).sum(-1)
        paired_back_s = (_counts(paired, stages, chunks)[..., ::-1] * backward).sum(-1)
        pairs_s = m * forward.sum(-1) - warm_s + paired_back_s
        cool_s = (m - 1) * backward.sum(-1) + last.sum(-1) - paired_back_s

        fill_s = np.cumsum(to_next[..., 0], -1) - to_next[..., 0]
        begun_s, first_back = fill_s + warm_s, np.where(m > 1, back[..., -1], last_back[..., -1])
        turned_s = to_next.sum((-2, -1))[..., None] + _later(first_back)
        started_s = np.maximum(begun_s, turned_s)

        # From when a stage is free after its last operation to the end of the longest chain over stages before it.
        hops = times.gradient_s[..., 1:, 0] * times.overlapped + last[..., :-1, 0]
        behind = np.concatenate([np.zeros_like(last[..., :1, 0]), np.cumsum(hops, -1)], -1)
        drained_s = behind + np.maximum.accumulate(times.end_s - behind, -1)
        way_s = times.activation_s[..., -1] * times.overlapped + _later(to_next[..., -1])
        way_s = way_s + (last_back[..., 1:].sum((-2, -1)) + last[..., -1, 0] + drained_s[..., -1])[..., None]
        ended_s = pairs_s + cool_s + drained_s
        steps_s = np.maximum(started_s + ended_s, np.where(paired, started_s, begun_s) + pairs_s + way_s)
        if chunks == 1:
            steps_s = np.maximum(steps_s, fill_s + _round_trips(times, m) + way_s)
        return Chains(begun_s, turned_s, ended_s, (counts[..., 0] - 1) / m, steps_s.max(-1))


def _round_trips(times: StageTimes, micro_batches: Integers) -> Floats:
    """From a stage's first forward to its last in 1F1B, s: trips one after another, and the micro-batches left over."""
    to_next, back, _ = (times.computing() + times.sent())[..., 0]
    forward, backward, _ = times.occupied()[..., 0]
    trips, left = np.divmod(micro_batches - 1, np.arange(times.shape[0], 0, -1))
    trips_s = trips * (to_next + _later(to_next + back) + backward)
    until_last_s: Floats = trips_s + left * (forward + backward * (trips > 0)) + forward
    return until_last_s


def _counts(operations: Integers, stages: int, chunks: int) -> Integers:
    """How many of the first forwards of a stage are of each chunk, (..., stages, chunks)."""
    group = group_size(stages, chunks)
    rounds, left = np.divmod(operations[..., None], chunks * group)
    return rounds * group + np.clip(left - group * np.arange(chunks), 0, group)


def _later(stage_s: Floats) -> Floats:
    """Sum over the stages after each, s."""
    return np.cumsum(stage_s[..., ::-1], -1)[..., ::-1] - stage_s
