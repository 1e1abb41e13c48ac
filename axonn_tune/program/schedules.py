"""Pipeline schedules whose backward pass is split: the order of operations of every stage, and where chunks stand.

B is a whole backward pass, I that for the input's gradient alone, W the weights' gradients of it, which wait: other
stages need I, and no one needs W before the step's end. So W fills what would be bubbles. Legend of p, v and m as in
`program.pipeline`. Schedules that are folded (V) have two chunks a stage, of which the second runs back: chunk 0 of
stage s is model part s, chunk 1 is part 2p - 1 - s, so the first stage has both ends of the model.

- zb1p: 1F1B, plain or interleaved, whose W start once as many I are done as the stage has before it. Source: Qi et al.,
  arXiv 2401.10241, ZB-H1; as in `torch.distributed.pipelining`'s `ScheduleInterleavedZeroBubble` and in AMD's Primus.
- zbv: the same source, section 6, for passes of equal length; `ScheduleZBVZeroBubble` and Primus' `zbv-formatted`.
- dualpipe-v: deepseek-ai/DualPipe@3da1bbea; `ScheduleDualPipeV`. Forward passes stand beside whole backward passes, and
  only its ends split them.
- v-half, v-min: Qi et al., arXiv 2405.15362: a pattern that repeats every six slots, with W in the free ones, moved
  ahead as far as memory allows; as in Primus (AMD-AGI/Primus@fd1eeabb, core/pipeline_parallel/scheduler/algorithms).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from axonn_tune.program.memory import Holding
from axonn_tune.program.operations import Floats, Integers
from axonn_tune.program.pipeline import Operation, check_shape, forward_sequence, group_size, stage_order
from axonn_tune.vocabulary import FOLDED, PipelineOrder

Order: TypeAlias = tuple[Operation, ...]
"""Operations of one stage."""


def part_of(schedule: PipelineOrder, stage: int, chunk: int, *, stages: int) -> int:
    """The model part that a chunk of a stage is."""
    return 2 * stages - 1 - stage if chunk and schedule in FOLDED else chunk * stages + stage


def place_of(schedule: PipelineOrder, part: int, *, stages: int) -> tuple[int, int]:
    """Stage and chunk of a model part."""
    chunk, stage = divmod(part, stages)
    return (stages - 1 - stage if chunk and schedule in FOLDED else stage), chunk


def check_schedule(schedule: PipelineOrder, *, stages: int, chunks: int, micro_batches: int) -> None:
    """ValueError for a shape that the schedule does not have."""
    if schedule in FOLDED and chunks != 2:
        raise ValueError(f"{schedule} has 2 chunks a stage, not {chunks}")
    check_shape(stages, 1 if schedule in FOLDED else chunks, micro_batches)
    least = {"1f1b": 1, "dualpipe-v": 2 * stages}.get(schedule, stages)
    if micro_batches < least:
        raise ValueError(f"{schedule} needs at least {least} micro-batches for {stages} stages, not {micro_batches}")


@lru_cache(maxsize=256)
def schedule_orders(schedule: PipelineOrder, *, stages: int, chunks: int, micro_batches: int) -> tuple[Order, ...]:
    """Operations of each stage, in order; ValueError for a shape that the schedule does not have."""
    check_schedule(schedule, stages=stages, chunks=chunks, micro_batches=micro_batches)
    if schedule in _PATTERNS:
        return _Packed(_PATTERNS[schedule], stages, micro_batches).orders()
    if schedule == "1f1b":
        shape = {"stages": stages, "chunks": chunks, "micro_batches": micro_batches}
        return tuple(stage_order(stage, **shape) for stage in range(stages))
    if schedule == "zb1p":
        return tuple(_zero_bubble(stage, stages, chunks, micro_batches) for stage in range(stages))
    made = {"zbv": _folded_zero_bubble, "dualpipe-v": _dual_pipe}[schedule]
    return tuple(made(stage, stages, micro_batches) for stage in range(stages))


def _ahead(stage: int, stages: int, chunks: int) -> int:
    """Forward passes of ZB1P before the first I."""
    return stages - stage - 1 + (chunks - 1) * stages


def _zero_bubble(stage: int, stages: int, chunks: int, micro_batches: int) -> Order:
    """1F1B with so many forward passes ahead that no I waits for a W."""
    chunk, number = (column.tolist() for column in forward_sequence(stages, chunks, micro_batches))
    forwards = [Operation("F", *one) for one in zip(chunk, number, strict=True)]
    behind = [(chunks - 1 - one, batch) for one, batch in zip(chunk, number, strict=True)]
    warm = min(_ahead(stage, stages, chunks), len(forwards))
    found = forwards[:warm]
    for place, one in enumerate(behind):
        found += forwards[warm + place : warm + place + 1]
        found.append(Operation("I", *one))
        found += [Operation("W", *behind[place - stage])] if place >= stage else []
    return (*found, *(Operation("W", *one) for one in behind[len(behind) - stage :]))


class _Counted:
    """Operations that are added by kind and chunk, each of the next micro-batch."""

    def __init__(self) -> None:
        self.operations, self.done = list[Operation](), Counter[tuple[str, int]]()
        self._waiting = deque[tuple[int, int]]()

    def add(self, *names: str) -> None:
        """Each one by its kind and chunk, `F0`; a B is what its I and its W would be."""
        for name in names:
            kind, chunk = name[0], int(name[1])
            batch = self.done[kind if kind != "B" else "I", chunk]
            self.operations.append(Operation(kind, chunk, batch))  # type: ignore[arg-type]  # of the literals' letters
            self.done.update([(one, chunk) for one in ("IW" if kind == "B" else kind)])
            if kind == "I":
                self._waiting.append((chunk, batch))

    def add_oldest(self) -> None:
        """The W that waits longest, if one does."""
        if self._waiting:
            self.operations.append(Operation("W", *self._waiting.popleft()))

    def of(self, micro_batches: int) -> Order:
        """Those of the first micro-batches."""
        return tuple(one for one in self.operations if one.micro_batch < micro_batches)


def _folded_zero_bubble(stage: int, stages: int, micro_batches: int) -> Order:
    """Zero bubbles if F, I and W take as long: of fewer micro-batches than fill it, it leaves out the others."""
    made, every = _Counted(), max(2 * stages - 1, micro_batches)
    made.add(*["F0"] * (2 * (stages - stage) - 1))
    made.add(*["F1", "F0"] * stage)
    made.add(*["F1", "I1", "W1"] * (stages - stage))
    while made.done["F", 1] < every:
        made.add(*["F0"] * (made.done["F", 0] < every), "I0", "W0", "F1", "I1", "W1")
    made.add(*["I0", "I1"] * stage)
    made.add(*["I0", "W0"] * (stages - stage))
    made.add(*["W1"] * (every - made.done["W", 1]))
    made.add(*["W0"] * (every - made.done["W", 0]))
    return made.of(micro_batches)


def _dual_pipe(stage: int, stages: int, micro_batches: int) -> Order:
    """Both directions of the fold beside each other; the last backward passes of about half of the fold are split."""
    made, later = _Counted(), stages - stage - 1
    made.add(*["F0"] * (2 * later))
    made.add(*["F0", "F1"] * (stage + 1))
    for _ in range(later):
        made.add("I1")
        made.add_oldest()
        made.add("F1")
    made.add(*["F0", "B1", "F1", "B0"] * (micro_batches - 2 * stages + stage + 1))
    made.add(*["B1", "F1", "B0"] * later)
    half, split = (stage + 1) // 2, False
    for number in range(stage + 1):
        for chunk in (1, 0):
            split = split or (number == half and (stage % 2 == 1 or chunk == 0))
            made.add(f"{'I' if split else 'B'}{chunk}")
    for _ in range(later):
        made.add_oldest()
        made.add("I0" if split else "B0")
    for _ in range(stage + 1):
        made.add_oldest()
    return made.of(micro_batches)


_Slot: TypeAlias = tuple[str, int, int]
"""Kind, chunk and first slot of an operation of the pattern."""


def _half(stage: int, stages: int) -> Iterator[_Slot]:
    """Lifetimes of both chunks add up to half of 1F1B's."""
    shift = 3 if stages % 2 == 0 else 0
    yield from (("F", 0, 2 * stage), ("F", 1, 3 * stages - stage - 2))
    yield from (("I", 1, 3 * stages + shift + 2 * stage - 1), ("I", 0, 6 * stages + shift - stage - 2))


def _least(stage: int, stages: int) -> Iterator[_Slot]:
    """To a third."""
    shift = 2 if stages % 3 == 0 else 0
    yield from (("F", 0, stage), ("F", 1, 2 * stages - stage - 1))
    yield from (("I", 1, 2 * stages + shift + stage), ("I", 0, 4 * stages + shift - stage - 1))


_PERIOD = 6
"""Slots of a pattern: F, I and W of two chunks."""
_PATTERNS: dict[str, Callable[[int, int], Iterator[_Slot]]] = {"v-half": _half, "v-min": _least}
_MEMORY = {"F": 1, "I": 0, "W": -1}
"""Activations that an operation adds."""


class _Packed:
    """A pattern that repeats for each micro-batch, with W in free slots, and then all of it as early as it can be.

    Before the cool-down, nothing moves ahead where that would take more memory than the pattern does; in it, W go where
    they find room. Slots are equal, whatever operations take.
    """

    def __init__(self, pattern: Callable[[int, int], Iterator[_Slot]], stages: int, micro_batches: int) -> None:
        self._stages, self._last = stages, micro_batches - 1
        self._slots = [
            {
                first + _PERIOD * number: Operation(kind, chunk, number)  # type: ignore[arg-type]  # as above
                for kind, chunk, first in pattern(stage, stages)
                for number in range(micro_batches)
            }
            for stage in range(stages)
        ]
        for each in self._slots:
            self._add_weights(each)
        self._at = [{one: slot for slot, one in each.items()} for each in self._slots]
        # With few micro-batches the steady state begins behind the last forward pass: then what follows it stays.
        ends = [(at[Operation("F", 1, self._last)], at[Operation("I", 0, 0)]) for at in self._at]
        self._cooling = [
            {one for one, slot in at.items() if slot > last and (steady < last or slot <= steady)}
            for at, (last, steady) in zip(self._at, ends, strict=True)
        ]

    @staticmethod
    def _add_weights(slots: dict[int, Operation]) -> None:
        """Each W in the next free slot."""
        waiting, slot = deque[Operation](), 0
        left = len(slots) // 2
        while left:
            one = slots.get(slot)
            if one is not None and one.kind == "I":
                waiting.append(one._replace(kind="W"))
            elif one is None and waiting:
                slots[slot] = waiting.popleft()
                left -= 1
            slot += 1

    def orders(self) -> tuple[Order, ...]:
        """Operations of each stage as they follow each other."""
        self._move_ahead()
        self._cool_down()
        return tuple(tuple(each[slot] for slot in sorted(each)) for each in self._slots)

    def _earliest(self, stage: int, one: Operation) -> int:
        """First slot in which all that an operation waits for is done."""
        needed = [self._at[stage][one._replace(micro_batch=one.micro_batch - 1)]] if one.micro_batch else [-1]
        if one.kind == "W":
            needed.append(self._at[stage][one._replace(kind="I")])
        else:
            part = part_of("v-half", stage, one.chunk, stages=self._stages) + (1 if one.kind == "I" else -1)
            if part == 2 * self._stages:
                needed.append(self._at[stage][one._replace(kind="F")])
            elif part >= 0:
                at, chunk = place_of("v-half", part, stages=self._stages)
                needed.append(self._at[at][one._replace(chunk=chunk)])
        return max(needed) + 1

    def _move(self, stage: int, old: int, new: int) -> None:
        self._slots[stage][new] = self._slots[stage].pop(old)
        self._at[stage][self._slots[stage][new]] = new

    def _move_ahead(self) -> None:
        """Each operation to the first free slot from which on memory stays within that of the pattern."""
        longest = max(map(max, self._slots)) + 1
        held = [[0] * (longest + 1) for _ in self._slots]
        for slots, found in zip(self._slots, held, strict=True):
            for slot in range(longest):
                found[slot] = found[slot - 1] + (_MEMORY[slots[slot].kind] if slot in slots else 0)
        most = max(map(max, held))
        for slot in range(longest):
            for stage, slots in enumerate(self._slots):
                if slot not in slots:
                    continue
                more, new = _MEMORY[slots[slot].kind], slot
                for place in range(slot - 1, self._earliest(stage, slots[slot]) - 1, -1):
                    if more > 0 and held[stage][place] + more > most:
                        break
                    new = new if place in slots else place
                if new < slot:
                    for place in range(new, slot):
                        held[stage][place] += more
                    self._move(stage, slot, new)

    def _cool_down(self) -> None:
        """What is left after the last forward pass, without W, as early as it can be; then these in free slots."""
        weights = [list[Operation]() for _ in self._slots]
        for slot in range(max(map(max, self._slots)) + 1):
            for stage, slots in enumerate(self._slots):
                one = slots.get(slot)
                if one is None or one not in self._cooling[stage]:
                    continue
                if one.kind == "W":
                    weights[stage].append(slots.pop(slot))
                    continue
                free = (place for place in range(self._earliest(stage, one), slot) if place not in slots)
                if (new := next(free, slot)) < slot:
                    self._move(stage, slot, new)
        for stage, each in enumerate(weights):
            for one in each:
                new = self._earliest(stage, one)
                while new in self._slots[stage]:
                    new += 1
                self._slots[stage][new], self._at[stage][one] = one, new


@dataclass(frozen=True)
class Held:
    """Micro-batches of each chunk of a stage that hold saved activations, and of those that wait for their W alone.

    kind: of the operation in which that is. ending: 1 for a chunk whose I is in its last block: of its micro-batch,
    which counts as waiting, that block is whole.
    """

    kind: Holding
    whole: tuple[int, ...]
    waiting: tuple[int, ...]
    ending: tuple[int, ...]


def held_at_most(order: Order, *, chunks: int) -> tuple[Held, ...]:
    """What a stage holds together, by kind of operation, without what is no more than at another time.

    Activations are there from F on; I leaves what W needs, block by block, which goes with it; B leaves nothing. I
    holds most in its first block or in its last one. Of F those of the last chunk are listed, which has the LM head.
    """
    whole, waiting, none, found = [0] * chunks, [0] * chunks, (0,) * chunks, list[Held]()
    for kind, chunk, _ in order:
        if kind == "I" or kind == "B":
            found.append(Held(kind, tuple(whole), tuple(waiting), none))
        whole[chunk] += {"F": 1, "I": -1, "B": -1, "W": 0}[kind]
        waiting[chunk] += {"I": 1, "W": -1}.get(kind, 0)
        if kind == "I":
            ending = tuple(int(one == chunk) for one in range(chunks))
            found.append(Held(kind, tuple(whole), tuple(waiting), ending))
        elif kind == "F" and chunk == chunks - 1:
            found.append(Held(kind, tuple(whole), tuple(waiting), none))
    return undominated(found)


def undominated(several: Iterable[Held]) -> tuple[Held, ...]:
    """Of each kind without those that hold no more than another one, whatever a chunk's blocks hold."""
    by_kind = dict[Holding, set[tuple[tuple[int, ...], ...]]]()
    for one in several:
        by_kind.setdefault(one.kind, set()).add((one.whole, one.waiting, one.ending))
    found = list[Held]()
    for kind, states in by_kind.items():
        listed = sorted(states)
        whole, waiting, ending = np.array(listed).swapaxes(0, 1)
        # As if a chunk had two blocks: any other number compares alike.
        held = np.concatenate([2 * whole + ending, 2 * waiting - ending], axis=1)
        # Each one is no more than itself.
        most = np.flatnonzero((held[:, None] <= held).all(axis=2).sum(axis=1) == 1)
        found += [Held(kind, *listed[at]) for at in most[_corners(held[most])]]
    return tuple(found)


def _corners(points: Integers) -> list[int]:
    """Points without those between two others: bytes are linear in what is held, so one of these has no less."""
    found = list[int]()
    for number, point in enumerate(points):
        while len(found) > 1:
            before, after = points[found[-1]] - points[found[-2]], point - points[found[-1]]
            if (before @ after) ** 2 != (before @ before) * (after @ after) or before @ after <= 0:
                break
            found.pop()
        found.append(number)
    return found


@lru_cache(maxsize=4096)
def stage_held(
    schedule: PipelineOrder, stage: int, *, stages: int, chunks: int, micro_batches: int
) -> tuple[Held, ...]:
    """The same of a stage of a schedule.

    Between the warm-up and the last passes ZB1P repeats itself: no more micro-batches matter than its forward passes
    ahead and the W behind take, and two rounds.
    """
    if schedule == "zb1p":
        check_schedule(schedule, stages=stages, chunks=chunks, micro_batches=micro_batches)
        group, behind = group_size(stages, chunks), _ahead(stage, stages, chunks) + stage
        micro_batches = min(micro_batches, (behind // (chunks * group) + 3) * group)
        return held_at_most(_zero_bubble(stage, stages, chunks, micro_batches), chunks=chunks)
    order = schedule_orders(schedule, stages=stages, chunks=chunks, micro_batches=micro_batches)[stage]
    return held_at_most(order, chunks=chunks)


@lru_cache(maxsize=4096)
def stage_states(
    schedule: PipelineOrder, stage: int, *, stages: int, chunks: int, micro_batches: int
) -> dict[Holding, Floats]:
    """The same as rows, `[states, 3·chunks]`, by kind: whole, waiting and ending micro-batches of each chunk."""
    found = dict[Holding, list[tuple[int, ...]]]()
    for one in stage_held(schedule, stage, stages=stages, chunks=chunks, micro_batches=micro_batches):
        found.setdefault(one.kind, []).append((*one.whole, *one.waiting, *one.ending))
    return {kind: np.array(rows, dtype=np.float64) for kind, rows in found.items()}
