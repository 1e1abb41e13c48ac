"""Splits of the layers over pipeline stages that a search prices beside the framework's own, and their schedules.

Of contiguous splits with a layer in each part, a layout has these, by what a block of each layer type, the embedding
and the LM head take:

- one chunk a stage: that whose slowest stage takes least, and that whose longest chain does. Stage r begins its first
  backward pass behind min(p - r, m) forward passes, so that its passes stand (m - 1) and some times in a row: more
  often the later the stage. Both are exact;
- several: that whose sum over chunks of the slowest stage of each chunk is least, with chunks of like length, since
  interleaved 1F1B sends p micro-batches through one chunk of all stages, then through the next; the same with the
  shorter parts of the first chunk last, as without the embedding, which leaves the stage with the LM head fewer layers;
  and those whose slowest stage takes little over all its chunks, by moves of single layers.

Of what is equally good, the most even in seconds or in layers has its shorter parts first or last: four of each, which
can be 2% apart. All of them are candidates of the search, which prices those whose schedule may be listed.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain, pairwise, product
from operator import sub
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from axonn_tune.cost.compute import contended_s
from axonn_tune.cost.paces import FIRST_PART, INNER_PART, LAST_PART, Paces
from axonn_tune.cost.pipeline import Chains, PipelineTime, StageTimes, overlapped, parts_of, pipeline_time, stage_end_s
from axonn_tune.cost.pricer import StageSeconds
from axonn_tune.cost.replay import ChunkTimes
from axonn_tune.program.operations import Floats, Integers, Value
from axonn_tune.program.step import Contents, Stage, chunks_of, contents_of
from axonn_tune.ranking.bound import EXACT, contended, parts_within
from axonn_tune.ranking.space import Problem
from axonn_tune.vocabulary import FOLDED

WORTH = 1e-3
"""Share of a step that a split must save to be taken instead of the framework's own."""
_FORWARD = 1.0 / 3.0
"""A forward pass, as a share of both."""
_ALIKE = (1e-3, 3.0)
"""What the square of a chunk's passes counts beside its slowest stage: of equal sums, chunks of like length."""
_QUANTUM = 1.0 / 16.0
"""What layers and ends take is rounded to such shares of the slowest layer: layouts that differ by less have the same
splits."""
_SAME = 1.0 + 1e-9

Split: TypeAlias = tuple[int, ...]


class Staged(NamedTuple):
    """Candidates with pipeline stages: how long runs of their blocks take, and what their schedules depend on, a row
    each. batches: micro-batches; repeated: blocks of each chunk that repeat, where only some do; send_s: one message;
    updates_s: what blocks of each layer type add to the end of a step, at least.
    """

    paces: Paces
    stages: Integers
    chunks: Integers
    batches: Integers
    repeated: Integers
    send_s: Floats
    contention: Floats
    updates_s: Floats

    def taken(self, rows: Integers) -> Staged:
        """Some of them."""
        columns: Any = (column[rows] for column in self[1:])
        return Staged(self.paces.taken(rows), *columns)

    @staticmethod
    def joined(several: Sequence[Staged]) -> Staged:
        """Candidates one after the other, of programs with as many kinds of blocks."""
        paces = Paces.joined([one.paces for one in several])
        columns: Any = (np.concatenate(each) for each in zip(*(one[1:] for one in several), strict=True))
        return Staged(paces, *columns)


class Scheduled(NamedTuple):
    """Some candidates with the same split of their layers: their rows, and least seconds of each.

    parts: None for the framework's own. step_s: the step by chains of its schedule; exposed_s: exposed communication.
    """

    rows: Integers
    parts: Split | None
    step_s: Floats
    exposed_s: Floats


def schedules_of(problem: Problem, staged: Staged, *, searched: bool) -> Iterator[Scheduled]:
    """Candidates with each of their splits, the framework's own first; searched: whether there are others.

    Stages take no less than their chunks by `cost.paces`, and a schedule takes no less if its operations do.
    """
    ends = _ends_of(problem, staged) if searched else np.zeros((len(staged.stages), 0))
    single = staged.chunks == 1
    keys = np.column_stack([staged.stages, staged.chunks, staged.repeated, single * staged.batches * searched, ends])
    chunk_s = _ChunkSeconds(staged.paces)
    _, counts = np.unique(keys[order := np.lexsort(keys.T[::-1])], axis=0, return_counts=True)
    for rows in np.split(order, np.cumsum(counts)[:-1]):
        first, stages, chunks = rows[0], int(staged.stages[rows[0]]), int(staged.chunks[rows[0]])
        own, repeated = parts_of(problem, stages, chunks, problem.parts), int(staged.repeated[first])
        others: tuple[Split, ...] = ()
        if searched:
            batches = int(staged.batches[first]) if chunks == 1 else 0
            runs, starts = _runs(problem, ends[first]), problem.model.starts
            others = _known(runs, (ends[first, 0], ends[first, 1]), own, stages, batches, starts)
        # Where no part is longer than what repeats, all blocks repeat: another candidate.
        every = [own, *(one for one in others if repeated < max(one))]
        some = staged.taken(rows)
        updates_s = _updates_s(problem, some, every) if staged.updates_s.any() else 0.0
        schedule = _Schedule(problem, some, every, lambda *one, rows=rows: chunk_s.of(*one)[:, rows], updates_s)
        step_s, exposed_s = schedule.step_s, schedule.exposed_s
        for place, one in enumerate(every):
            yield Scheduled(rows, one if place else None, step_s[:, place], exposed_s[:, place])


def _updates_s(problem: Problem, staged: Staged, splits: Sequence[Split]) -> Floats:
    """What the update of each stage takes at least, s, `[candidates, splits, stages]`."""
    stages = int(staged.stages[0])
    blocks = np.zeros((len(splits), stages, staged.updates_s.shape[1]))
    for at, split in enumerate(splits):
        for part, contents in enumerate(contents_of(problem.model, split, problem.mtp_part)):
            for of_type, count in contents:
                blocks[at, part % stages, of_type] += count
    return np.asarray(np.einsum("ct,pst->cps", staged.updates_s, blocks))


class Replays(NamedTuple):
    """What a schedule of one candidate is made of: a replay of each chunk, and each stage with its chunks.

    kept: whether some layers are not resharded, which chunks have as if none were.
    """

    chunk: Callable[[Stage, Contents], ChunkTimes]
    stage_s: Callable[[Stage, tuple[Contents, ...]], StageSeconds]
    kept: bool


def scheduled_s(problem: Problem, staged: Staged, parts: Split | None, replays: Replays) -> float:
    """Least step of one candidate with a split by its whole schedule, s, which takes longer to find. It is the step, to
    rounding, but where some layers are not resharded: then waits for gradient buckets are left to a price."""
    stages = int(staged.stages[0])
    own = parts_of(problem, stages, int(staged.chunks[0]), parts or problem.parts)

    def replayed(part: Stage, contents: Contents, repeated: int) -> Floats:
        one, (computed_s, sent_s) = replays.chunk(part, contents), staged.paces.sums(contents, repeated)
        passes_s = one.forward_s, one.backward_s, one.saved_s, one.host_s / staged.batches, one.last_backward_s
        return np.array([np.reshape(value, 1) for value in (*passes_s, computed_s, sent_s)])

    contents = contents_of(problem.model, own, problem.mtp_part)
    parted = [(Stage(number == 0, number == stages - 1), contents[number::stages]) for number in range(stages)]
    end_s, alone_s, sent_s = np.array([replays.stage_s(stage, blocks) for stage, blocks in parted]).T
    if not replays.kept:
        every = [[replays.chunk(*one) for one in chunks_of(stage, blocks)] for stage, blocks in parted]
        end_s = end_s + [stage_end_s(one, stages=stages) - one[0].end_s + one[0].data_s for one in every]
    schedule = _Schedule(problem, staged, [own], replayed, end_s)
    time = pipeline_time(schedule.times((0, 0)), micro_batches=int(staged.batches[0]))
    if replays.kept:
        return float(schedule.contended(np.array([[time.step_s]]))[0, 0])
    return EXACT * (time.step_s + schedule.lost_s(time, alone_s, sent_s))


class _ChunkSeconds:
    """Chunks of candidates, each worked out once for all of them: as of `Paces.chunk`, with the computation of their
    blocks in one micro-batch and their communication in a step, s, `[7, candidates]`."""

    def __init__(self, paces: Paces) -> None:
        self._paces, self._known = paces, dict[tuple[Stage, Contents, int], Floats]()

    def of(self, part: Stage, contents: Contents, repeated: int) -> Floats:
        """One of them."""
        key = part, contents, repeated
        if key not in self._known:
            found, paces = np.empty((7, self._paces.table.shape[1])), self._paces
            for row, value in zip(found, (*paces.chunk(*key), *paces.sums(contents, repeated)), strict=True):
                row[:] = value
            self._known[key] = found
        return self._known[key]


class _Schedule:
    """Schedules of candidates with as many stages and chunks, each with some splits, `[candidates, splits, ...]`.

    chunk: of these candidates, as of `_ChunkSeconds`.
    """

    def __init__(
        self,
        problem: Problem,
        staged: Staged,
        splits: Sequence[Split],
        chunk: Callable[[Stage, Contents, int], Floats],
        end_s: Floats | float = 0.0,
    ) -> None:
        stages, chunks, repeated = (int(column[0]) for column in (staged.stages, staged.chunks, staged.repeated))
        contents = [contents_of(problem.model, one, problem.mtp_part) for one in splits]
        keys = dict[tuple[Stage, Contents], int]()
        which = np.array([[keys.setdefault(key, len(keys)) for key in _chunks_in(one)] for one in contents])
        count, paces = len(staged.stages), staged.paces
        found = np.stack([chunk(*one, repeated) for one in keys], axis=1)
        # Part c·p + s is chunk c of stage s.
        each = np.moveaxis(found[:, which].reshape(7, len(splits), chunks, stages, count), (4, 1, 3, 2), (1, 2, 3, 4))
        forward_s, backward_s, saved_s, waited_s, last_s, computed_s, sent_s = each
        self._waited_s = waited_s.sum(axis=-1)
        self._m = staged.batches.astype(np.float64)[:, None]
        self._end_s, self._send_s = np.zeros(forward_s.shape[:-1]) + end_s, staged.send_s
        if chunks > 1 and saved_s.any():
            share = 1.0 - saved_s / np.maximum(forward_s + backward_s, 1e-30)
            forward_s, backward_s, last_s = share * forward_s, share * backward_s, share * last_s
            self._end_s = self._end_s + saved_s.sum(axis=-1) * np.minimum(self._m, stages)[..., None]
        self._forward_s, self._backward_s, self._last_s = forward_s, backward_s, last_s
        self._contention, self._order = staged.contention, problem.framework.step.pipeline_order
        self._together = overlapped(problem.framework.schedule, chunks, self._order)
        computed_s = computed_s.sum(axis=-1)
        for at, stage in enumerate((0, -1)):
            computed_s[..., stage] += np.broadcast_to(paces.value("ends", 0, at), count)[:, None]
        messages = np.full(stages, 2.0 * chunks)
        messages[[0, -1]] -= 1.0
        self._computed_s = self._m[..., None] * computed_s
        self._messages_s = (self._m * staged.send_s[:, None])[..., None] * messages
        self._sent_s = sent_s.sum(axis=-1) + self._messages_s

    def times(self, at: tuple[int, int] | slice = slice(None)) -> StageTimes:
        """Durations of all, or of one candidate with one split."""
        send_s = np.broadcast_to(self._send_s[:, None, None], self._end_s.shape)
        passes_s = self._forward_s[at], self._backward_s[at], self._last_s[at]
        return StageTimes(*passes_s, self._end_s[at], send_s[at], self._together)

    @property
    def step_s(self) -> Floats:
        """Least steps by chains of the schedules, s."""
        if self._order == "1f1b":
            return self.contended(self._chains.step_s)
        sent_s = self._sent_s if self._order not in FOLDED else self._sent_s - self._messages_s
        computed_s, sent_s = self._computed_s.mean(axis=-1), sent_s.mean(axis=-1)
        return contended(self._of_any_order_s(), computed_s, sent_s, contention=self._contention[:, None])

    def _of_any_order_s(self) -> Floats:
        """Least steps where backward passes are split, in any order, s.

        Before its first operation a stage waits for the forward pass of a micro-batch through the stages before it,
        whose chunk 0 are the first parts of the model, folded or not: T >= sum of F and sends before it + m W. Both
        halves of a backward pass take no less than the whole one (`cost.pricer.Kind`), and waits for the host, which
        may go with either pass, are left out of the forward pass on that way.
        """
        times, m, folded = self.times(), self._m[..., None], self._order in FOLDED
        forward_s, backward_s, last_s = times.occupied()
        sent_s, end_s = (0.0, 0.0) if folded else (times.send_s, times.end_s)
        if folded:
            # Chunk 1 of stage s is part 2p - 1 - s.
            for passes_s in (forward_s, backward_s, last_s):
                passes_s[..., 1] = passes_s[..., ::-1, 1].copy()
        busy_s = m * forward_s.sum(-1) + (m - 1.0) * backward_s.sum(-1) + last_s.sum(-1)
        to_next_s = np.maximum(self._forward_s[..., 0] - self._waited_s, 0.0) + sent_s
        begun_s = np.cumsum(to_next_s, axis=-1) - to_next_s
        return np.asarray((begun_s + busy_s + end_s).max(axis=-1))

    @cached_property
    def _chains(self) -> Chains:
        batches = np.broadcast_to(self._m, self._end_s.shape[:2])
        return Chains.of(self.times(), batches.astype(np.int64))

    def contended(self, step_s: Floats) -> Floats:
        """Steps with the least slowdown from overlap, s: by what the stage that computes longest, which may be any, is
        busy with or waits for messages.

        What its passes take more than here is on its chains, but for its first forward passes `beside` the second one.
        So they can be longer by what a chain is shorter than the step, and if by more, the step is longer, too.
        """
        chains, times, m = self._chains, self.times(), self._m[..., None]
        forward_s, backward_s, last_s = times.occupied().sum(axis=-1)
        busy_s = m * forward_s + (m - 1.0) * backward_s + last_s + times.end_s
        # A stage receives as many messages as it sends.
        waited_s = m * times.sent()[:2].sum(axis=(0, -1))
        sent_s, alone_s = self._sent_s.max(axis=-1)[..., None], self._computed_s.max(axis=-1)[..., None]
        most = np.minimum(self._contention[:, None, None], 1.0)
        if not most.any():
            return np.asarray(EXACT * step_s)
        lost_s = np.asarray(contended_s(sent_s, alone_s, step_s[..., None], contention=most))
        for begun_s, share in ((chains.begun_s, np.ones(1)), (chains.turned_s, 1.0 - chains.beside)):
            left_s = np.maximum(step_s[..., None] - begun_s - chains.ended_s, 0.0)
            occupied_s = busy_s + waited_s + left_s / share
            own_s = contended_s(sent_s, alone_s, occupied_s, contention=np.minimum(most, share))
            lost_s = np.maximum(lost_s, own_s)
        return np.asarray(EXACT * (step_s + lost_s.min(axis=-1)))

    def lost_s(self, time: PipelineTime, compute_s: Floats, communication_s: Floats) -> float:
        """Slowdown from overlap of one candidate with one split, s, of the stages that compute longest the least; given
        its schedule, and the computation and communication of each stage but for messages."""
        alone_s = compute_s + (self._m[..., None] * self._waited_s)[0, 0]
        bubble_s = np.minimum(time.bubble_s, np.maximum(0.0, time.step_s - alone_s.max()))
        sent_s, most = (communication_s + self._messages_s[0, 0]).max(), float(self._contention[0])
        lost_s = np.asarray(contended_s(sent_s, alone_s, time.step_s - bubble_s, contention=most))
        return float(np.broadcast_to(lost_s, alone_s.shape)[alone_s >= EXACT * alone_s.max()].min())

    @property
    def exposed_s(self) -> Floats:
        """Least exposed communication, s: of the stage with least, since which computes longest is not known. Waits for
        the host count to computation."""
        busy_s = self._m[..., None] * ((self._forward_s + self._backward_s).sum(axis=-1) - self._waited_s)
        found: Floats = np.maximum(busy_s - self._computed_s, 0.0).min(axis=-1)
        return found


@lru_cache(maxsize=4096)
def _chunks_in(contents: tuple[Contents, ...]) -> list[tuple[Stage, Contents]]:
    """Each part with what it has beside blocks, embedding or LM head."""
    last = len(contents) - 1
    return [(Stage(place == 0, place == last), one) for place, one in enumerate(contents)]


def _ends_of(problem: Problem, staged: Staged) -> Floats:
    """What embedding and LM head with MTP, and a block of each layer type, take beside the longest of these, rounded:
    `[candidates, 2 + types]`; recompute in some blocks is left out."""
    model, paces, count = problem.model, staged.paces, len(staged.stages)

    def passes_s(part: Stage, of_type: int, count: int) -> Value:
        forward_s, backward_s, saved_s, *_ = paces.chunk(part, ((of_type, count),), 0)
        found: Value = forward_s + backward_s - saved_s
        return found

    each_s = [passes_s(INNER_PART, one, 2) - passes_s(INNER_PART, one, 1) for one in range(len(model.types))]
    first, last = model.runs[0][0], model.runs[-1][0]
    ahead_s = passes_s(FIRST_PART, first, 1) - passes_s(INNER_PART, first, 1)
    head_s = passes_s(LAST_PART, last, 1) - passes_s(INNER_PART, last, 1)
    head_s += sum(number * each_s[one] for one, number in model.predicting_runs)
    values = np.array([np.broadcast_to(one, count) for one in (ahead_s, head_s, *each_s)])
    return np.asarray(np.round(values / values[2:].max(axis=0) / _QUANTUM) * _QUANTUM).T


def _runs(problem: Problem, ends: Floats) -> tuple[tuple[float, int], ...]:
    return tuple((float(ends[2 + one]), count) for one, count in problem.model.decoder_runs)


@lru_cache(maxsize=4096)
def _known(
    runs: tuple[tuple[float, int], ...],
    ends: tuple[float, float],
    own: Split,
    stages: int,
    batches: int,
    starts: tuple[int, ...],
) -> tuple[Split, ...]:
    """Splits of whole groups of layers, each from one of `starts` to the next."""
    layers = np.repeat([one for one, _ in runs], [count for _, count in runs])
    groups = np.add.reduceat(layers, starts)
    reached = np.array([*starts, len(layers)])
    whole = np.diff(np.searchsorted(reached, np.cumsum(own)), prepend=0).tolist()
    found = splits_of(groups, ends, tuple(whole), stages, batches)
    within = parts_within(own, stages, searched=True, alike=len(runs) == 1)
    cut = (tuple(np.diff(reached[np.cumsum(one)], prepend=0).tolist()) for one in found)
    return tuple(one for one in cut if within.holds(one, stages))


def part_s(parts: Sequence[int] | Integers, layer_s: Floats, ends_s: tuple[float, float]) -> Floats:
    """Passes of each part over one micro-batch, s, of one split or a row each; part c·p + s is chunk c of stage s."""
    ends = np.cumsum(parts, axis=-1)
    reached = np.concatenate([[0.0], np.cumsum(layer_s)])
    found: Floats = np.diff(reached[np.concatenate((0 * ends[..., :1], ends), axis=-1)])
    found[..., [0, -1]] += ends_s
    return found


def splits_of(layer_s: Floats, ends_s: tuple[float, float], own: Split, stages: int, batches: int) -> list[Split]:
    """The splits of a layout beside its own.

    layer_s: both passes of each layer over one micro-batch in order; ends_s: of the embedding and the LM head; own: the
    framework's split; batches: micro-batches.
    """
    found = list[Split]()
    if len(own) == stages:
        chains = batches - 1.0 + _FORWARD * (1.0 - np.minimum(stages - np.arange(stages), batches))
        for weight in (np.ones(stages), chains)[: 1 + (batches > 1)]:
            found += _ties(layer_s, ends_s, weight)
    else:
        for alike in _ALIKE:
            cuts, each = _chunks(layer_s, ends_s, stages, len(own) // stages, alike), list[tuple[Split, ...]]()
            for start, end in pairwise(cuts):
                ends = ends_s[0] * (start == 0), ends_s[1] * (end == len(layer_s))
                each.append(_ties(layer_s[start:end], ends, np.ones(stages)))
            found += [tuple(chain(*several)) for several in zip(*each, strict=True)]
            # Little as the embedding is, it moves the first chunk's shorter parts away from the stage with the LM head.
            late = _ties(layer_s[: cuts[1]], (0.0, 0.0), np.ones(stages))[-1]
            found += [(*late, *chain(*several)) for several in zip(*each[1:], strict=True)]
        found += _moved(layer_s, ends_s, own, stages)
    return [one for one in dict.fromkeys(found) if one != own]


def _ties(layer_s: Floats, ends_s: tuple[float, float], weight: Floats) -> tuple[Split, ...]:
    """Splits whose most costly part costs least: the most even of them in seconds, and in layers, which need least
    memory, with the shorter parts first or last."""
    return _known_ties(tuple(layer_s.tolist()), ends_s, tuple(weight.tolist()))


@lru_cache(maxsize=8192)
def _known_ties(
    layers: tuple[float, ...], ends_s: tuple[float, float], weights: tuple[float, ...]
) -> tuple[Split, ...]:
    return _Row(layers, ends_s, weights).most_even()


def _moved(layer_s: Floats, ends_s: tuple[float, float], own: Split, stages: int) -> list[Split]:
    """Splits whose slowest stage takes little over all its chunks, then the others: single layers leave that stage for
    as long as it helps, from the framework's split and from that whose longest part takes least."""

    def best_of(splits: Integers) -> int:
        found = part_s(splits, layer_s, ends_s).reshape(len(splits), -1, stages).sum(axis=1)
        slowest_s = found.max(axis=-1)
        least = np.flatnonzero(slowest_s == slowest_s.min())
        return int(least[(found[least] ** 2).sum(axis=-1).argmin()])

    def improved(counts: Integers) -> Integers:
        stage_s = part_s(counts, layer_s, ends_s).reshape(-1, stages).sum(axis=0)
        slowest, moves = int(stage_s.argmax()), np.eye(len(counts), dtype=np.int64)
        sources = [one for one in range(slowest, len(counts), stages) if counts[one] > 1]
        targets = [one for one in range(len(counts)) if one % stages != slowest]
        # The split as it is goes first: another one is better only if it takes less.
        moved = counts - moves[sources, None] + moves[targets]
        splits = np.concatenate([counts[None], moved.reshape(-1, len(counts))])
        best = best_of(splits)
        return improved(splits[best]) if best else counts

    exact = _Row(layer_s.tolist(), ends_s, [1.0] * len(own)).first()
    return [tuple(improved(np.array(parts)).tolist()) for parts in (own, exact)]


class _Row:
    """Layers to be cut into parts.

    layers: seconds of each; ends_s: of what comes to the first part, and to the last; weights: how often the passes of
    each part count, no less the later the part.
    """

    def __init__(self, layers: Sequence[float], ends_s: tuple[float, float], weights: Sequence[float]) -> None:
        self._count, self._reached = len(layers), np.concatenate([[0.0], np.cumsum(layers)])
        self._until, last = self._reached.tolist(), len(weights) - 1
        beside = [ends_s[0] * (part == 0) + ends_s[1] * (part == last) for part in range(last + 1)]
        self._parts = list(zip(weights, beside, strict=True))

    def longest(self) -> float:
        """The least cost of the part of a split that costs most, by bisection: of each try, what the most costly part
        costs, or would with the next layer, so that it ends at a cost."""
        whole = self._until[-1] + sum(more for _, more in self._parts)
        # No less than the mean, but for rounding.
        low = (1.0 - 1e-9) * whole / sum(1.0 / times for times, _ in self._parts)
        # Parts of the mean and one more layer hold all, but where ends are long.
        near = low + max(times for times, _ in self._parts) * max(map(sub, self._until[1:], self._until))
        high = min(self._filled(near)[0], self._filled(np.inf)[0])
        while low < high:
            most, beyond = self._filled(min((low + high) / 2.0, math.nextafter(high, 0.0)))
            low, high = (low, most) if most < np.inf else (beyond, high)
        return high

    def _filled(self, longest: float) -> tuple[float, float]:
        """What the most costly part costs if each has as many layers as cost no more than that, infinite if not all
        layers are in one; and the least that a part would cost with one more."""
        until, start, most, beyond = self._until, 0, 0.0, np.inf
        for part, (times, more) in enumerate(self._parts):
            # Each later part has one layer at least.
            last = self._count - len(self._parts) + 1 + part
            end = min(bisect_right(until, longest / times - more + until[start], start + 1) - 1, last)
            while end > start and times * (until[end] - until[start] + more) > longest:
                end -= 1
            while end < last and times * (until[end + 1] - until[start] + more) <= longest:
                end += 1
            if end < last:
                beyond = min(beyond, times * (until[end + 1] - until[start] + more))
            if end == start:
                return np.inf, beyond
            most, start = max(most, times * (until[end] - until[start] + more)), end
        return (most if start == self._count else np.inf), beyond

    def _windows(self, longest: float) -> tuple[list[int], list[int]]:
        """First and last places where each part can begin, and the last one end, if none costs more than that."""
        until, first, last, slack = self._until, [self._count], [0], 1e-9 * self._until[-1]
        for part, (times, more) in enumerate(self._parts):
            most = longest / times - more + slack
            last.append(min(bisect_right(until, most + until[last[-1]]) - 1, self._count - len(self._parts) + 1 + part))
        for part, (times, more) in reversed([*enumerate(self._parts)]):
            most = longest / times - more + slack
            first.append(max(bisect_left(until, until[first[-1]] - most), part))
        return [0, *first[-2::-1]], last

    def first(self) -> Split:
        """The first of `most_even` with the least longest part."""
        (cost, _), can, begins = self._costs(self.longest())
        least, starts = np.where(np.arange(cost.shape[-1]), np.inf, 0.0), list[list[int]]()
        for each in np.where(can, cost, np.inf) ** 2:
            total = least[:, None] + each
            starts.append(total.argmin(axis=0).tolist())
            least = total.min(axis=0)
        return self._from(starts, begins)

    def _from(self, starts: list[list[int]], begins: list[int]) -> Split:
        """The split of which parts start there, given where windows begin."""
        at, ends = 0, [self._count]
        for start, begin in zip(reversed(starts), reversed(begins), strict=True):
            at = start[at]
            ends.append(begin + at)
        return tuple(end - start for start, end in pairwise(reversed(ends)))

    def _costs(self, longest: float) -> tuple[tuple[Floats, Integers], NDArray[np.bool_], list[int]]:
        """What each part costs, and its layers, `[parts, start, end]` in windows of places; whether it has any and
        costs no more than `longest`; and where the windows begin."""
        first, last = map(np.array, self._windows(longest))
        width = int((last - first).max()) + 1
        places = first[:, None] + np.arange(width)
        reached = self._reached[np.minimum(places, self._count)]
        times, more = (column[:, None, None] for column in np.array(self._parts).T)
        cost = times * (reached[1:, None, :] - reached[:-1, :, None] + more)
        layers = places[1:, None, :] - places[:-1, :, None]
        # Places behind a window are none.
        can = (layers > 0) & (cost <= longest * _SAME) & (places <= last[:, None])[1:, None, :]
        return (cost, layers), can, first[:-1].tolist()

    def most_even(self) -> tuple[Split, ...]:
        """The most even splits whose longest part costs least, in seconds and in layers; of several the ones whose
        shorter parts are the first, and the last."""
        costs, can, begins = self._costs(self.longest())
        squares, width = np.where(can, np.array(costs, dtype=np.float64), np.inf) ** 2, can.shape[-1]
        least, starts = np.tile(np.where(np.arange(width), np.inf, 0.0), (2, 1)), list[Integers]()
        for each in squares.swapaxes(0, 1):
            total = least[:, :, None] + each
            least = total.min(axis=1)
            alike = total <= least[:, None] * _SAME
            starts.append(np.array([total.argmin(axis=1), width - 1 - alike[:, ::-1].argmax(axis=1)]))
        every = np.array(starts)
        return tuple(
            self._from(every[:, late, by_layers].tolist(), begins) for by_layers, late in product((0, 1), repeat=2)
        )


def _chunks(layer_s: Floats, ends_s: tuple[float, float], stages: int, chunks: int, alike: float) -> list[int]:
    """Where each chunk of all stages begins, and the last one ends, so that the sum over chunks of the least that their
    slowest stage can take is least."""
    given = tuple(layer_s.tolist()), ends_s, stages, alike
    last_s, more_s = _chunk_costs(*given)[2]
    cuts = [len(layer_s)]
    at = int((_reached(*given, chunks - 1)[0] + last_s + more_s).argmin())
    for number in range(chunks - 1, 0, -1):
        cuts.append(at)
        at = int(_reached(*given, number)[1][at])
    return [0, *reversed(cuts)]


@lru_cache(maxsize=1024)
def _reached(
    layers: tuple[float, ...], ends_s: tuple[float, float], stages: int, alike: float, chunks: int
) -> tuple[Floats, Integers]:
    """The least sum of the first chunks up to each place, none of them the last, and where the last of these begins."""
    given = layers, ends_s, stages, alike
    chunk_s, more_s = _chunk_costs(*given)[min(chunks - 1, 1)]
    if chunks == 1:
        return chunk_s + more_s, np.zeros(len(layers) + 1, dtype=np.int64)
    found = _reached(*given, chunks - 1)[0][:, None] + chunk_s
    found += more_s
    starts = found.argmin(axis=0)
    return np.take_along_axis(found, starts[None], axis=0)[0], starts


@lru_cache(maxsize=64)
def _chunk_costs(
    layers: tuple[float, ...], ends_s: tuple[float, float], stages: int, alike: float
) -> tuple[tuple[Floats, Floats], ...]:
    """The slowest stage of the first chunk by its end, of any chunk between, `[start, end]`, and of the last by its
    start; each with what its square counts."""
    plain, rest, inner = _inner(layers, stages)
    first, last = plain[:1] + ends_s[0], plain[:, -1:] + ends_s[1]
    ahead, behind = np.maximum(first.T, rest).min(axis=0), np.maximum(rest, last.T).min(axis=1)
    places = np.arange(len(plain))
    filled = plain if alike > 1.0 else (places - places[:, None]) * max(layers)
    whole = stages * float(np.sum(layers))
    every = (filled[0] + ends_s[0], filled, filled[:, -1] + ends_s[1])
    return tuple(
        (chunk_s, np.asarray(alike * all_s**2 / whole))
        for chunk_s, all_s in zip((ahead, inner, behind), every, strict=True)
    )


@lru_cache(maxsize=64)
def _inner(layers: tuple[float, ...], stages: int) -> tuple[Floats, Floats, Floats]:
    """The cost of one part, of the slowest of all stages but one, and of all, without ends, `[start, end]`."""
    reached = np.concatenate([[0.0], np.cumsum(layers)])
    plain = reached[None, :] - reached[:, None]
    plain[np.tri(len(reached), dtype=np.bool_)] = np.inf
    rest = _in_parts(plain, stages - 1)
    return plain, rest, _joined(rest, plain)


def _in_parts(cost: Floats, parts: int) -> Floats:
    """The least longest of so many parts from each place to each other one, by doubling."""
    found: Floats | None = None
    while parts:
        if parts % 2:
            found = cost if found is None else _joined(found, cost)
        parts //= 2
        cost = _joined(cost, cost) if parts else cost
    assert found is not None, "there are several stages"
    return found


def _joined(one: Floats, other: Floats) -> Floats:
    """The longer of two costs in a row, with the best place between them, `[start, end]`."""
    found = np.full((len(one), other.shape[1]), np.inf)
    for place in range(len(other)):
        np.minimum(found, np.maximum(one[:, place, None], other[place]), out=found)
    return found
