"""1F1B and interleaved 1F1B: the exact step time, and a bound on it; legend and order as in `program.pipeline`.

An operation starts when its stage has finished the operation before and the message it needs has arrived. A blocking
send (Megatron-Core's batched isend and irecv) keeps the sender until the message has arrived; its receive shares that
batch, so the receiver only waits. An overlapped send delays only the receiver.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from axonn_tune.program.pipeline import Count, Integers, check_shape, forward_sequence, group_size, messages, warm_up

Floats: TypeAlias = NDArray[np.float64]
Column: TypeAlias = float | Floats

PERIODIC = 1e-10
"""Clocks whose shifts over a period differ by less than this share of the shift are in steady state. Maximum and sum
never enlarge a difference, so skipping any number of periods adds at most this share to a step."""


@dataclass(frozen=True, eq=False)
class StageTimes:
    """Durations of a pipeline's operations, s.

    forward_s, backward_s, last_backward_s: (stages, chunks); the last is the backward of the last micro-batch, which
    carries the gradient buckets of data parallelism, and equals backward_s if None. end_s: after a stage's last
    operation (optimizer step). activation_send_s: from a stage to the next, round the ring; gradient_send_s: to the
    one before. These three are one number, or one a stage, of the sender. overlapped: see the module's docstring.
    For `pipeline_bound_s` all may have columns in front: (*columns, stages, chunks) and (*columns, stages).
    """

    forward_s: ArrayLike
    backward_s: ArrayLike
    last_backward_s: ArrayLike | None = None
    end_s: ArrayLike = 0.0
    activation_send_s: ArrayLike = 0.0
    gradient_send_s: ArrayLike = 0.0
    overlapped: bool = False


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


@dataclass(frozen=True, eq=False)
class _Durations:
    """`StageTimes` as arrays (..., stages, chunks); activation and gradient are 0 where a part sends none."""

    forward: Floats
    backward: Floats
    last: Floats
    activation: Floats
    gradient: Floats
    end: Floats
    overlapped: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Stages and chunks."""
        return self.forward.shape[-2], self.forward.shape[-1]

    def computing(self) -> Floats:
        """Time of F, B and the last B: (3, ..., stages, chunks)."""
        return np.stack([self.forward, self.backward, self.last])

    def sent(self) -> Floats:
        """Time of the message that F, B and the last B send: (3, ..., stages, chunks)."""
        return np.stack([self.activation, self.gradient, self.gradient])

    @cached_property
    def received(self) -> Floats:
        """Time of the message that F, B and the last B need: (3, stages, chunks)."""
        by_part = self.shape[::-1]
        activation = np.roll(self.activation.T.ravel(), 1).reshape(by_part).T
        gradient = np.roll(self.gradient.T.ravel(), -1).reshape(by_part).T
        return np.stack([activation, gradient, gradient])

    def occupied(self) -> Floats:
        """How long F, B and the last B occupy their stage: (3, ..., stages, chunks)."""
        return self.computing() if self.overlapped else self.computing() + self.sent()

    def latency(self) -> Floats:
        """From when a sender is free again to when F, B and the last B may start: (3, stages, chunks)."""
        return self.received * self.overlapped


def _durations(times: StageTimes) -> _Durations:
    """Checked and broadcast; ValueError names what does not fit."""
    given = {name: np.asarray(value, dtype=float) for name, value in vars(times).items() if value is not None}
    for name, array in given.items():
        if not (np.isfinite(array).all() and (array >= 0).all()):
            raise ValueError(f"{name}: durations must be finite and not negative")
    if given["forward_s"].ndim < 2 or 0 in given["forward_s"].shape:
        raise ValueError(f"forward_s: expected (stages, chunks), got {given['forward_s'].shape}")
    chunked = [given["forward_s"], given["backward_s"], given.get("last_backward_s", given["backward_s"])]
    staged = [given[name][..., None] for name in ("activation_send_s", "gradient_send_s", "end_s")]
    try:
        forward, backward, last, activation, gradient, end = np.broadcast_arrays(*chunked, *staged)
    except ValueError as error:
        shapes = {name: array.shape for name, array in given.items()}
        raise ValueError(f"durations differ in stages, chunks or columns: {shapes}") from error
    activation = activation * _sends(*forward.shape[-2:], silent=(-1, -1))
    gradient = gradient * _sends(*forward.shape[-2:], silent=(0, 0))
    return _Durations(forward, backward, last, activation, gradient, end[..., 0], times.overlapped)


def _sends(stages: int, chunks: int, *, silent: tuple[int, int]) -> Floats:
    """1 for each part that sends, 0 for the part at the model's end; all 0 on one stage."""
    sends = np.full((stages, chunks), float(stages > 1))
    sends[silent] = 0.0
    return sends


# The exact recurrence.


def pipeline_time(times: StageTimes, *, micro_batches: int) -> PipelineTime:
    """Exact step time of a pipeline; chunks > 1 are interleaved.

    Equal periods of the steady state are jumped over (a period is one or more groups of micro-batches after which
    every clock has moved by the same time), which changes nothing by more than 1e-9 of the step.
    ValueError for shapes that do not fit, negative durations, and interleaving with m not divisible by p.
    """
    durations = _checked(times, micro_batches)
    return _summary(durations, micro_batches, *_evaluate(durations, micro_batches))


def _checked(times: StageTimes, micro_batches: int) -> _Durations:
    """The durations of one pipeline, without columns."""
    durations = _durations(times)
    if durations.forward.ndim > 2:
        raise ValueError(f"forward_s: expected (stages, chunks), got {durations.forward.shape}")
    check_shape(*durations.shape, micro_batches)
    return durations


def _summary(durations: _Durations, micro_batches: int, finish_s: Floats, waited_s: Floats) -> PipelineTime:
    """Totals of each stage from the end of its last operation and its waits for messages."""
    times = np.array([micro_batches, micro_batches - 1, 1.0])
    busy_s = np.tensordot(times, durations.computing(), 1).sum(axis=1) + durations.end
    blocked_s = 0.0 if durations.overlapped else micro_batches * durations.sent()[:2].sum(axis=(0, 2))
    exposed_s = waited_s + blocked_s
    step_s = float((finish_s + durations.end).max())
    stages, chunks = durations.shape
    return PipelineTime(
        step_s=step_s,
        busy_s=tuple(busy_s.tolist()),
        bubble_s=tuple(np.maximum(step_s - busy_s - exposed_s, 0.0).tolist()),
        exposed_send_s=tuple(exposed_s.tolist()),
        sends=tuple(
            messages(stage, stages=stages, chunks=chunks, micro_batches=micro_batches) for stage in range(stages)
        ),
    )


class Pass(NamedTuple):
    """One micro-batch through one chunk of a stage, forward or backward, s from the start of the step."""

    stage: int
    backward: bool
    chunk: int
    micro_batch: int
    start_s: float
    end_s: float


def pipeline_passes(times: StageTimes, *, micro_batches: int) -> list[Pass]:
    """Every pass of a step by the same recurrence, in an order that respects dependencies; sends are not in them."""
    durations = _checked(times, micro_batches)
    stages, chunks = durations.shape
    program, _, _ = _program(stages, chunks, micro_batches)
    tape = _Tape(durations)
    tape.run(program)
    ends_s = np.array(tape.done_s[1:]) - (durations.occupied() - durations.computing()).ravel()[program.cost]
    starts_s = ends_s - durations.computing().ravel()[program.cost]
    kind, stage, chunk = np.unravel_index(program.cost, (3, stages, chunks))
    seen: dict[tuple[bool, int, int], int] = {}
    found = []
    for key in zip(
        (kind > 0).tolist(), stage.tolist(), chunk.tolist(), starts_s.tolist(), ends_s.tolist(), strict=True
    ):
        backward, at, of, start_s, end_s = key
        number = seen[backward, at, of] = seen.get((backward, at, of), -1) + 1
        found.append(Pass(at, backward, of, number, start_s, end_s))
    return found


# The evaluation skips equal periods. A program lists the operations of all stages in an order that respects
# every dependency, and names the two that each depends on by how far back they are. So a lap, the operations of one
# group of micro-batches in steady state, is the same wherever it stands, and m only says how often it is repeated.


class _Program(NamedTuple):
    """Operations as columns: how far back (negative) the one before on the stage and the sender are, and the index of
    the duration in (3, stages, chunks). What needs no message has the one before as its sender."""

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


def _evaluate(durations: _Durations, micro_batches: int) -> tuple[Floats, Floats]:
    """When each stage is free after its last operation, and its waits for messages, s."""
    shortest = _shortest(*durations.shape)
    pieces = _pieces(*durations.shape, min(micro_batches, shortest))
    tape = _Tape(durations)
    tape.run(pieces.warm)
    if micro_batches >= shortest:
        tape.run_laps(pieces.lap, laps=(micro_batches - shortest) // group_size(*durations.shape) + 1)
    tape.run(pieces.rest)
    return np.array(tape.done_s)[pieces.final] + tape.jumped_s, tape.waited_s()


class _Tape:
    """Programs run one after another: when the stage of each operation was free again, less what was jumped over, s."""

    def __init__(self, durations: _Durations) -> None:
        self.durations = durations
        self.latency, self.occupied = durations.latency().ravel(), durations.occupied().ravel()
        self.done_s = [0.0]
        self.jumped_s = 0.0
        self.programs: list[_Program] = []
        self.times: list[int] = []

    def run_laps(self, lap: _Program, *, laps: int) -> None:
        """Repeat a lap; once all clocks advance equally over two laps, skip whole periods."""
        bound, reach = self._bound(lap), -min(lap.before.min(), lap.sender.min())
        states: list[float] = []
        run, check = 0, 2
        while run < laps:
            self._run(lap, bound)
            states += self.done_s[-reach:]
            run += 1
            if run == check and (found := _period(np.array(states).reshape(run, reach))):
                laps = run + self._jump(laps - run, *found)
                check = 0
            elif run == check:
                check += max(1, run // 2)

    def waited_s(self) -> Floats:
        """Waits of each stage owed to messages, s: each up to the length of the message."""
        before, sender, cost = (np.concatenate(columns) for columns in zip(*self.programs, strict=True))
        times = np.repeat(self.times, [program.cost.size for program in self.programs])
        done_s, position = np.array(self.done_s), np.arange(1, cost.size + 1)
        wait_s = done_s[position + sender] + self.latency[cost] - done_s[position + before]
        exposed_s = np.clip(wait_s, 0.0, self.durations.received.ravel()[cost])
        stages, chunks = self.durations.shape
        return np.bincount(cost // chunks % stages, times * exposed_s).astype(float)

    def _jump(self, laps: int, period: int, shift_s: float) -> int:
        """Skips whole periods, each like the one just run; the laps that are left."""
        skipped, left = divmod(laps, period)
        self.jumped_s += skipped * shift_s
        self.times[-period:] = [1 + skipped] * period
        return left

    def run(self, program: _Program) -> None:
        """The recurrence, once over a program."""
        self._run(program, self._bound(program))

    def _bound(self, program: _Program) -> tuple[list[int], list[int], list[float], list[float]]:
        before, sender, cost = program
        return before.tolist(), sender.tolist(), self.latency[cost].tolist(), self.occupied[cost].tolist()

    def _run(self, program: _Program, bound: tuple[list[int], list[int], list[float], list[float]]) -> None:
        self.programs.append(program)
        self.times.append(1)
        done_s, append = self.done_s, self.done_s.append
        for before, sender, latency_s, occupied_s in zip(*bound, strict=True):
            free_s, arrival_s = done_s[before], done_s[sender] + latency_s
            append((free_s if free_s > arrival_s else arrival_s) + occupied_s)


def _period(states: Floats) -> tuple[int, float] | None:
    """Laps since the last state that the newest differs from by the same time on every clock, and that time, s."""
    shifts = states[-1] - states[-2::-1]
    low, high = shifts.min(axis=1), shifts.max(axis=1)
    steady = np.flatnonzero(high - low <= PERIODIC * low)
    return (int(steady[0]) + 1, float((low + high)[steady[0]] / 2)) if steady.size else None


def _slots(stages: int, chunks: int, micro_batches: int) -> Integers:
    """Time slot of each operation, (F or B, position in its order, stage): after those of its dependencies."""
    position, stage = np.arange(chunks * micro_batches)[:, None], np.arange(stages)
    if chunks == 1:
        return np.stack([2 * position + stage, 2 * (position + stages) - 1 - stage])
    turned = position - stage + warm_up(0, stages=stages, chunks=chunks)
    return np.stack([2 * (position + stage), 2 * turned + 1])


def _first_lap(stages: int, chunks: int) -> int:
    """First slot from which on every stage alternates, with what its operations depend on."""
    return 2 * stages + 2 if chunks == 1 else 2 * int(warm_up(0, stages=stages, chunks=chunks)) + 4


def _shortest(stages: int, chunks: int) -> int:
    """Micro-batches of the shortest pipeline that has a lap before the first stage's last forward."""
    group = group_size(stages, chunks)
    forwards = _first_lap(stages, chunks) // 2 + 1
    return group * (1 + -(-forwards // (chunks * group)))


@lru_cache(maxsize=32)
def _pieces(stages: int, chunks: int, micro_batches: int) -> _Pieces:
    """The program of a pipeline, cut before and after the first lap."""
    program, slot, final = _program(stages, chunks, micro_batches)
    first = _first_lap(stages, chunks) if micro_batches >= _shortest(stages, chunks) else slot[-1] + 1
    start, stop = np.searchsorted(slot, [first, first + 2 * chunks * group_size(stages, chunks)]).tolist()
    return _Pieces(program.piece(0, start), program.piece(start, stop), program.piece(stop, slot.size), final)


def _program(stages: int, chunks: int, micro_batches: int) -> tuple[_Program, Integers, Integers]:
    """All operations in order of their slots, with the slots, and the last operation of each stage from the end."""
    forward_chunk, number = forward_sequence(stages, chunks, micro_batches)
    slots = _slots(stages, chunks, micro_batches)
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


def pipeline_bound_s(times: StageTimes, *, micro_batches: Count) -> Column:
    """Lower bound of `pipeline_time(...).step_s`, s, for columns of pipelines; m is a column or one number.

    It never exceeds the exact value, because it is the longest of several chains of dependent operations.
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
    """
    durations = _durations(times)
    (stages, chunks), (forward, backward, last) = durations.shape, durations.occupied()
    to_next, back, last_back = durations.computing() + durations.sent()
    m = np.asarray(micro_batches)[..., None]
    first = np.minimum(warm_up(np.arange(stages), stages=stages, chunks=chunks) + 1, chunks * m)
    paired = chunks * m - first

    warm_s = (_counts(first, stages, chunks) * forward).sum(-1)
    paired_back_s = (_counts(paired, stages, chunks)[..., ::-1] * backward).sum(-1)
    pairs_s = m * forward.sum(-1) - warm_s + paired_back_s
    cool_s = (m - 1) * backward.sum(-1) + last.sum(-1) - paired_back_s

    fill_s = np.cumsum(to_next[..., 0], -1) - to_next[..., 0]
    first_back = np.where(m > 1, back[..., -1], last_back[..., -1])
    turned_s = to_next.sum((-2, -1))[..., None] + _later(first_back)
    started_s = np.maximum(fill_s + warm_s, turned_s)

    drained_s = _drain(durations, last[..., 0])
    way_s = durations.activation[..., -1] * durations.overlapped + _later(to_next[..., -1])
    way_s = way_s + (last_back[..., 1:].sum((-2, -1)) + last[..., -1, 0] + drained_s[..., -1])[..., None]
    ended_s = started_s + pairs_s + cool_s + drained_s
    ended_s = np.maximum(ended_s, np.where(paired, started_s, fill_s + warm_s) + pairs_s + way_s)
    if chunks == 1:
        ended_s = np.maximum(ended_s, fill_s + _round_trips(durations, m) + way_s)
    bound_s = ended_s.max(-1)
    return bound_s if bound_s.ndim else float(bound_s)


def _round_trips(durations: _Durations, micro_batches: Integers) -> Floats:
    """From a stage's first forward to its last in 1F1B, s: trips one after another, and the micro-batches left over."""
    to_next, back, _ = (durations.computing() + durations.sent())[..., 0]
    forward, backward, _ = durations.occupied()[..., 0]
    trips, left = np.divmod(micro_batches - 1, np.arange(durations.shape[0], 0, -1))
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


def _drain(durations: _Durations, last_s: Floats) -> Floats:
    """From when a stage is free after its last operation to the end of the longest chain over stages before it, s."""
    hops = durations.gradient[..., 1:, 0] * durations.overlapped + last_s[..., :-1]
    behind = np.concatenate([np.zeros_like(last_s[..., :1]), np.cumsum(hops, -1)], -1)
    return behind + np.maximum.accumulate(durations.end - behind, -1)
