"""Least steps: what no split of the layers of a candidate goes below, with proofs.

All follow from chains of operations that wait for each other. Let a candidate have p stages, v chunks a stage, and m
micro-batches; f_r and g_r are what all chunks of stage r take of one micro-batch forward and backward, b_r = f_r + g_r,
each with its sends where these block; W is the sum of b_r, what one micro-batch takes through the model and back. No
step gets shorter if an operation takes longer, so each may take the least it can.

Layers. A run of blocks takes the least share that a block has in any run of its type, times their number; what
embedding and LM head add is the least that they add to any run. A chunk takes what its blocks compute or, if that is
longer, what the host needs to issue all of them. One of both counts for all blocks of a candidate, that of more over
all layers: the longer one of each type would be too much where one type waits for the host and another one does not.

Shares. φ is the most that f_r is of b_r. Where the host takes I, no backward pass is shorter than it computes, so that
φ = 1 - g / I. Elsewhere it is f / (f + g) of the least: what is longer than that only adds to a chain. φ is that of
blocks: what the embedding takes forward beyond that share is taken off the first stage's chains.

One chunk (1F1B). Stage r begins its first backward pass behind N = min(p - r, m) forward passes. The first micro-batch
goes through all stages and back, W, of which stage r does b_r; stage r then has m - N forward and m - 1 backward passes
left, none of which is on that way. So T ≥ W + (m - N) f_r + (m - 1) g_r ≥ W + c_r b_r, with c_r = m - 1 - φ (N - 1).
Messages that overlap are on the way of W alone: 2 (p - 1) of them come to it.

Several chunks, by three chains:

- Stage r begins once the first micro-batch has gone through the first chunk of the stages before it, and its gradient
  has the same way back behind stage r's last operation: a stage, as many blocks as a part has at least and two
  messages; and the embedding. Between them stage r has all its passes: T ≥ m b_r + way_r.
- Stage r begins its first backward pass once the first micro-batch has gone through all p v parts, and back through the
  last chunks of the stages behind it. Until then it has done 2 (p - r - 1) + (v - 1) p + 1 forward passes, p of each
  chunk in turn: those are p f_r, and p - 2 r - 1 more of its first chunk, or that many less of its last one where this
  is negative. What is left is m b_r - p f_r or more, less the further ones of the first chunk, which has as many blocks
  as a part has at most, and with the ones that the last chunk has not had. The last gradient's way to the embedding
  follows: T ≥ way_r + (m - p φ) b_r. Both passes of the LM head count to its forward one: the stage that has it does
  p (1 - φ) of them less.
- From that first backward pass on, a forward and a backward one are a pair, and stage r has (m - p) v + 2 r + 1 - p of
  these, (m - p) of each chunk in turn: those are (m - p) b_r, and 2 r + 1 - p more of its last chunk, or that many less
  of its first one where this is negative. The last of these forward passes has its way through the last chunks of the
  stages behind r, and the last micro-batch its way back through all parts. With the way of the first one through all
  parts and back through the last chunks behind r that is T ≥ W + (m - p) b_r, with the last chunks of the stages behind
  r in both directions, and the further pairs. A stage without a pair has W.

Messages are counted as they are: a stage sends as many forward as it has parts, but
for the model's last part, and as many backward, but for the first.

Passes beside each other. A chunk saves s of f + g, each pass by its length. What is left of a forward pass,
f - s f / (f + g), grows with f and g; over layer types it is no less than the sum of f_t - σ s_t, with σ the most of
f_t / (f_t + g_t); likewise backward. Of m micro-batches min(m, p) have nothing beside them.

All stages. Chains T ≥ way_r + c_r b_r, each divided by c_r, add up to T Σ 1/c_r ≥ Σ way_r / c_r + W. And a stage has no
less than its ends and in each chunk the shortest part.

Parts. Splits that a search compares have no part but the last shorter than `Parts.shortest`, and none longer than
`Parts.longest`: the splits of what takes least are, but for few, within a layer of the mean. Of several chunks of a
stage one may be shorter than the mean, rounded down: `Parts.common`; and the last part.

Blocks that repeat. A chunk of n blocks repeats min(n, k) of them, a concave function of n, which is nowhere below the
line between its values for `common` and the longest part, if it is between these. One that is shorter is below that
line by most where it is shortest. So n blocks in several chunks repeat no less than on that line, less what the shorter
ones may be below it. Of all that repeat no more are of rarer layer types than there are of these. In a stage a block of
another type may repeat in the place of one of the most frequent type; it is then there as a whole.

Whole layers. In a step T stage r has room for (T - way_r) / c_r less its ends and messages, so for a whole number of
blocks of the most frequent layer type. Where all stages together have room for fewer than there are, no split takes T:
bisection finds the least T with room, from below.

Ends. All these chains end with the last gradient on the first stage, whose own end follows: its update, of as many
blocks as it has at least.

Contention. Computation and communication slow each other down by a share of what overlaps. Some stage has no less
communication and some no less computation than the mean one, of blocks that repeat, too, and each second that a step is
longer hides one less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from axonn_tune.cost.compute import ROUNDING, contended_s
from axonn_tune.cost.paces import FIRST_PART, LAST_PART, Other, Paces, Part
from axonn_tune.frameworks.description import PipelineSchedule
from axonn_tune.program.operations import Floats, Integers, Value
from axonn_tune.specs.model import Model

EXACT = 1.0 - ROUNDING
"""Of a bound: sums in another order differ by rounding."""


@dataclass(frozen=True)
class Layers:
    """Columns of what splits are made of, s, `[candidates]`, or of layer types `[types, candidates]`.

    counts: blocks of each type, `predicting` those of multi-token prediction, which the last stage has. both_s: both
    passes of a block; forward_s, backward_s: of each pass, beside another micro-batch's where that saves something;
    longest_forward_s: the most that a forward pass takes of both, alone;
    saved_s: by both beside each other; again_s: what comes to a block that repeats, where only some do. forward_share:
    the most that a forward pass is of both; least_share: what passes beside each other take of themselves at least.
    ahead_s, behind_s: what the embedding adds, forward and backward; head_s: the LM head, both. sent_s: communication
    of a step, of all stages; computed_s: in one micro-batch; again_sent_s, again_computed_s: what comes to each of them
    with a block that repeats. ends_s: of both passes, embedding and LM head of the only stage, beside its blocks.
    """

    counts: Integers
    predicting: Integers
    both_s: Floats
    forward_s: Floats
    backward_s: Floats
    longest_forward_s: Floats
    saved_s: Floats
    again_s: Floats
    forward_share: Floats
    least_share: Floats
    ahead_s: Floats
    behind_s: Floats
    head_s: Floats
    sent_s: Floats
    computed_s: Floats
    again_sent_s: Floats
    again_computed_s: Floats
    ends_s: Floats

    def __len__(self) -> int:
        return len(self.sent_s)

    def taken(self, rows: Integers) -> Layers:
        """Of some candidates."""
        return self._mapped(lambda column: column[..., rows])

    @staticmethod
    def joined(several: Sequence[Layers]) -> Layers:
        """Candidates of one model, one after the other."""
        return several[0]._mapped(lambda *columns: np.concatenate(columns, axis=-1), *several[1:])

    def _mapped(self, change: Callable[..., Floats], *others: Layers) -> Layers:
        names = [each.name for each in fields(self) if each.name not in ("counts", "predicting")]
        columns: dict[str, Any] = {name: change(*(getattr(one, name) for one in (self, *others))) for name in names}
        return replace(self, **columns)

    def block_s(self, alone: Floats | float) -> Floats:
        """Both passes of a block of each type; alone: share of its micro-batches without others beside them."""
        return self.both_s - (1.0 - alone) * self.saved_s

    def whole_s(self, alone: Floats | float) -> Floats:
        """Both passes of one micro-batch through the whole model."""
        found: Floats = self.counts @ self.block_s(alone) + self.ends_s
        return found


def layers_of(paces: Paces, model: Model, rows: int, *, with_last: bool) -> Layers:
    """The layers of so many candidates; with_last: whether multi-token prediction is in the last part."""
    repeating, plain = ([kinds[number] for kinds in paces.kinds] for number in (0, 1))
    every, predicting = np.array(model.counts), np.zeros(len(plain), dtype=np.int64)
    for of_type, count in model.predicting_runs if model.mtp_layers and with_last else ():
        predicting[of_type] += count
    first, last = model.runs[0][0], model.runs[-1][0]

    def of(part: Other, kinds: Sequence[int] = plain) -> Floats:
        return np.array([_column(paces.value(part, kind), rows) for kind in kinds])

    def least_s(part: Part, numbers: Iterable[int]) -> Floats:
        return np.array([_column(paces.run(part, number).least_s, rows) for number in numbers])

    def issued_s(kinds: Sequence[int]) -> Floats:
        return np.array([sum(_column(paces.value("issued", kind, at), rows) for at in range(3)) for kind in kinds])

    forward, backward, repeated = (
        least_s("forward", range(len(plain))),
        least_s("backward", plain),
        least_s("backward", repeating),
    )
    again = np.maximum(repeated - backward, 0.0)
    ahead_s = paces.run("opening", first, FIRST_PART).added_s(forward[first])
    behind_s = paces.run("closing", plain[first], FIRST_PART).added_s(backward[first])
    both, saved, issued = forward + backward, of("saved"), issued_s(plain)
    shares = _share(forward, both), _share(backward, both)
    beside = [one - share.max(axis=0) * saved for one, share in zip((forward, backward), shares, strict=True)]
    # All blocks of a chunk take what they compute, or what the host takes to issue them: one or the other for all.
    waits = every @ issued > every @ (both - saved)
    held = np.where(waits, issued, both)
    more = np.where(waits, np.maximum(issued_s(repeating) - issued, 0.0), again)
    forward_shares = 1.0 - _share(backward, held), 1.0 - _share(again, more)
    head_s = paces.run("opening", last, LAST_PART).added_s(forward[last])
    ends_s, computed_s = ahead_s + behind_s + head_s, sum(_column(paces.value("ends", 0, at), rows) for at in range(2))
    # What blocks wait at the ends they do not wait for the host: such a step has what the host issues and the ends
    # compute, or what blocks and ends take.
    least_ends_s = np.maximum(ends_s - every @ (issued - (both - saved)), computed_s)
    return Layers(
        counts=every,
        predicting=predicting,
        both_s=held,
        forward_s=beside[0],
        backward_s=beside[1],
        longest_forward_s=held - backward + np.maximum(more - again, 0.0),
        saved_s=np.where(waits, 0.0, saved),
        again_s=more,
        forward_share=np.vstack(forward_shares).max(axis=0),
        least_share=(1.0 - _share(saved, both, nothing=0.0)).min(axis=0),
        ahead_s=ahead_s,
        behind_s=behind_s,
        head_s=head_s,
        sent_s=every @ of("sent"),
        computed_s=every @ of("computed") + computed_s,
        again_sent_s=np.maximum(of("sent", repeating) - of("sent"), 0.0),
        again_computed_s=np.maximum(of("computed", repeating) - of("computed"), 0.0),
        ends_s=np.where(waits, least_ends_s, ends_s),
    )


def _column(value: Value, rows: int) -> Floats:
    return np.broadcast_to(np.asarray(value, dtype=np.float64), rows)


def _share(part: Floats, whole: Floats, *, nothing: float = 1.0) -> Floats:
    """A part of a whole, at most all of it; where there is nothing, as given."""
    found: Floats = np.where(whole > 0.0, np.minimum(part, whole) / np.maximum(whole, 1e-30), nothing)
    return found


class Parts(NamedTuple):
    """Layers that each part of the model but the last has at least, that each one has at most, and that the last one
    has at least; and what all parts of a stage but one, and the last, have at least: numbers, or columns of candidates.
    """

    shortest: Any
    longest: Any
    last: Any
    common: Any

    def holds(self, parts: Sequence[int], stages: int) -> bool:
        """Whether a split is within these."""
        within = min(parts[:-1]) >= self.shortest and max(parts) <= self.longest and parts[-1] >= self.last
        return bool(within and _most_short(parts, stages, self.common) <= 1)

    def repeats(self, repeated: Integers) -> tuple[Floats, Floats, Floats, Floats]:
        """Least number of blocks that repeat of some blocks, `repeated` of each part or all that it has: of each part,
        of each block, and what the one shorter part of a stage, and the last one, have less than that."""
        fewest, most = np.minimum(repeated, self.common), np.minimum(repeated, self.longest)
        slope = (most - fewest) / np.maximum(self.longest - self.common, 1)
        each = fewest - slope * self.common
        short, last = (each + slope * one - np.minimum(repeated, one) for one in (self.shortest, self.least_last))
        return each, slope, short, last

    @property
    def least_last(self) -> Any:  # noqa: ANN401 - a number or column
        """Layers that the last part has at least, and none of the others less."""
        return np.minimum(self.shortest, self.last)


def _most_short(parts: Sequence[int], stages: int, layers: int) -> int:
    """Most parts of a stage, but for the last part, that have fewer layers."""
    short = [one < layers for one in parts[:-1]]
    return max(sum(short[stage::stages]) for stage in range(stages))


def parts_within(own: Sequence[int], stages: int, *, searched: bool, alike: bool) -> Parts:
    """Limits of the splits that a search compares; own: the framework's; searched: whether there are others; alike:
    whether all layers are of one type."""
    if not searched:
        return Parts(min(own[:-1]), max(own), own[-1], min(own[:-1]))
    mean, one_chunk = sum(own) / len(own), len(own) == stages
    least, most = (1, 2) if one_chunk else (max(1, int(mean) - 1), 1 if alike else 2)
    shortest = min(least, *own)
    common = shortest if one_chunk or _most_short(own, stages, int(mean)) > 1 else int(mean)
    return Parts(shortest, max(most * math.ceil(mean) + 1, *own), min(1, own[-1]), common)


class Shape(NamedTuple):
    """Candidates with as many stages, all with one chunk or all with several. chunks: a column, or None for any number;
    batches: micro-batches; repeated: blocks of each chunk that repeat, where only some do; parts: layers that parts may
    have; send_s: of one message; end_s: of the first stage after its last pass, at least."""

    stages: int
    chunks: Integers | None
    batches: Floats
    repeated: Integers
    parts: Parts
    send_s: Floats
    end_s: Floats

    @property
    def single(self) -> bool:
        """Whether stages have one chunk."""
        return self.chunks is not None and bool(self.chunks[0] == 1)

    @property
    def several(self) -> Floats:
        """Chunks of a stage, one at least."""
        return np.ones(1) if self.chunks is None else self.chunks.astype(np.float64)


Chain: TypeAlias = tuple[Floats, Floats]
"""Of each stage what a chain has beside a multiple of its passes, s, and that multiple, `[stages, candidates]`."""


def any_split_s(layers: Layers, shape: Shape, *, schedule: PipelineSchedule, contention: Floats) -> Floats:
    """Least step of candidates of a shape, of all splits of their layers, s."""
    p, m, stage, several = shape.stages, shape.batches, np.arange(shape.stages)[:, None], shape.several
    hidden, parts, used = (schedule.overlapped, schedule.overlapped_interleaved), shape.parts, layers.counts > 0
    blocking = not (any(hidden) if shape.chunks is None else hidden[not shape.single])
    block = layers.block_s(1.0 if shape.single else np.minimum(m, p) / m)
    ends_s, last = layers.ahead_s + layers.behind_s, stage == p - 1
    messages = blocking * (2.0 * several - (stage == 0) - last) * shape.send_s
    # What a forward pass sends or embeds less than its share of both.
    embedded = layers.forward_share * ends_s - layers.ahead_s
    unsent = layers.forward_share * messages - blocking * (several - last) * shape.send_s
    unsent = unsent + np.where(stage == 0, np.minimum(embedded, 0.0), 0.0)
    beside = np.where(stage == 0, ends_s, 0.0) + messages
    beside = beside + last * (layers.head_s + layers.predicting @ block)
    fewest = several * parts.shortest - last * (parts.shortest - parts.last)
    least = beside + fewest * block[used].min(axis=0)
    blocks_s = layers.counts @ block + _repeated_s(layers.again_s, layers, shape)
    whole = blocks_s + ends_s + layers.head_s + messages.sum(axis=0)
    if shape.single:
        before = np.minimum(p - stage, m) - 1.0
        chains = [(whole + before * unsent, np.maximum(m - 1.0 - layers.forward_share * before, 1e-12))]
    else:
        chains = _interleaved(layers, shape, block, unsent, blocking=blocking)
    found: Floats = whole
    for way, times in chains:
        found = np.maximum(found, (whole + (way / times).sum(axis=0)) / (1.0 / times).sum(axis=0))
        found = np.maximum(found, (way + times * least).max(axis=0))
    if shape.chunks is not None:
        found = _of_whole_layers(layers, shape, block, found, beside, chains)
    found = found + (shape.single and not blocking) * 2.0 * (p - 1) * shape.send_s + shape.end_s
    computed_s = layers.computed_s + _repeated_s(layers.again_computed_s, layers, shape)
    sent_s = layers.sent_s + _repeated_s(layers.again_sent_s, layers, shape)
    return contended(found, m * computed_s / p, sent_s / p, contention=contention)


def any_order_s(layers: Layers, stages: int, batches: Floats, *, contention: Floats) -> Floats:
    """Least step of candidates of so many stages whose backward passes are split, in any order, s.

    Some stage has no less to do than the mean one, and no forward pass with both halves of a backward pass takes less
    than with the whole one (`cost.pricer.Kind`): T ≥ m W / p.
    """
    whole_s = layers.counts @ layers.block_s(1.0) + layers.ahead_s + layers.behind_s + layers.head_s
    computed_s, sent_s = batches * layers.computed_s / stages, layers.sent_s / stages
    return contended(batches * whole_s / stages, computed_s, sent_s, contention=contention)


def _interleaved(layers: Layers, shape: Shape, block: Floats, unsent: Floats, *, blocking: bool) -> list[Chain]:
    """Chains of several chunks; unsent: what a forward pass of each stage sends less than its share of both, s."""
    p, m, send_s, parts = shape.stages, shape.batches, shape.send_s, shape.parts
    stage, used = np.arange(p)[:, None], layers.counts > 0
    ends_s = np.where(stage, layers.ahead_s + layers.behind_s, 0.0)
    way = stage * (parts.shortest * block[used].min(axis=0) + 2.0 * send_s) + ends_s
    chains = [(way, np.broadcast_to(m, way.shape))]
    if shape.chunks is None:
        return chains
    ahead = layers.counts @ layers.forward_s + layers.least_share * (layers.ahead_s + layers.head_s)
    ahead = ahead + (p * shape.chunks - 1.0) * send_s
    backward_s, last = layers.backward_s[used].min(axis=0), stage == p - 1
    back = parts.shortest * backward_s + send_s
    turned = ahead + np.where(last, 0.0, (p - 2.0 - stage) * back + parts.last * backward_s + send_s)
    drained = stage * back + np.where(stage, layers.behind_s, 0.0) * layers.least_share
    # Of its first forward passes p are of each chunk, but for some more of the first or some less of the last.
    beyond = p - 2.0 * stage - 1.0
    more, fewer = np.minimum(np.maximum(beyond, 0.0), m - p), np.maximum(-beyond, 0.0)
    first_s = parts.longest * layers.longest_forward_s[used].max(axis=0) + np.where(stage, 0.0, layers.ahead_s)
    last_s = np.where(last, parts.last, parts.shortest) * layers.forward_s[used].min(axis=0)
    before = more * (first_s + blocking * send_s) - fewer * (last_s + blocking * ~last * send_s)
    # Both passes of the LM head go with a forward pass.
    before = before + last * (p * (1.0 - layers.forward_share) - fewer * layers.least_share) * layers.head_s
    times = np.broadcast_to(np.maximum(m - p * layers.forward_share, 1e-12), way.shape)
    chains.append((turned + drained - before + p * unsent, times))
    through = layers.whole_s(0.0) + _repeated_s(layers.again_s, layers, shape) + 2.0 * (p * shape.chunks - 1.0) * send_s
    each_s, head_s = layers.forward_s[used].min(axis=0) + backward_s, layers.least_share * layers.head_s
    later = (p - 2.0 - stage) * (parts.shortest * each_s + 2.0 * send_s) + parts.last * each_s + head_s + send_s
    longest_s = parts.longest * (layers.both_s + layers.again_s)[used].max(axis=0) + np.where(stage, 0.0, ends_s[-1])
    last_s = np.where(last, parts.last * each_s + head_s, parts.shortest * each_s)
    pairs = fewer * (last_s + blocking * send_s) - more * (longest_s + 2.0 * blocking * send_s)
    # Without a pair the first micro-batch has its way alone.
    beside = np.where((m > p) | (beyond < 0.0), np.where(last, 0.0, later) + pairs, 0.0)
    return [*chains, (through + beside, np.broadcast_to(np.maximum(m - p, 1e-12), way.shape))]


_HALVINGS = 10
"""Of the interval in which the step of whole layers is looked for."""


def _repeated_s(each_s: Floats, layers: Layers, shape: Shape) -> Floats:
    """What all repeated blocks of the model take more at least, s, given each of a layer type: the rarer types may have
    as many of them as they have blocks."""
    decoder, (each, slope, short, last) = layers.counts - layers.predicting, shape.parts.repeats(shape.repeated)
    repeats = shape.stages * (shape.several * each - short) - last + slope * decoder.sum()
    most = int(decoder.argmax())
    rarer = np.minimum(decoder.sum() - decoder[most], repeats)
    found: Floats = rarer * each_s[decoder > 0].min(axis=0) + (repeats - rarer) * each_s[most]
    return found


def _of_whole_layers(
    layers: Layers, shape: Shape, block: Floats, least_s: Floats, beside: Floats, chains: list[Chain]
) -> Floats:
    """The least step in which all stages together have room for the blocks of the most frequent layer type, s."""
    chunks, parts, decoder = shape.several, shape.parts, layers.counts - layers.predicting
    most, stage = int(decoder.argmax()), np.arange(shape.stages)[:, None]
    # Another block that repeats in the place of one of these is there as a whole.
    others = [block[one] + layers.again_s[one] for one in np.flatnonzero(decoder > 0).tolist() if one != most]
    again_s = np.minimum.reduce([layers.again_s[most], *others])
    each, slope, short, last = parts.repeats(shape.repeated)
    none = chunks * each - short - np.where(stage == shape.stages - 1, last, 0.0)
    each_s = block[most] + again_s * slope

    def room(step_s: Floats) -> Floats:
        left_s = np.minimum.reduce([(step_s - way) / times - beside for way, times in chains])
        found = np.floor((left_s - again_s * none) / each_s + ROUNDING)
        if shape.single:
            # All that are repeated are in this one.
            every = np.floor((left_s - again_s * shape.repeated) / block[most] + ROUNDING)
            few = np.floor(left_s / (block[most] + again_s) + ROUNDING)
            found = np.where(every >= shape.repeated, every, np.minimum(few, shape.repeated))
        return np.asarray(np.clip(found, 0.0, chunks * parts.longest).sum(axis=0))

    low_s, high_s, wanted = least_s, 2.0 * least_s, float(decoder[most])
    fits = room(low_s) >= wanted
    low_s = np.where(fits | (room(high_s) >= wanted), low_s, high_s)
    for _ in range(_HALVINGS):
        middle = (low_s + high_s) / 2.0
        enough = room(middle) >= wanted
        low_s, high_s = np.where(enough, low_s, middle), np.where(enough, middle, high_s)
    return np.where(fits, least_s, np.maximum(low_s, least_s))


def contended(step_s: Floats, computed_s: Floats, sent_s: Floats, *, contention: Floats | float) -> Floats:
    """Least steps with the least slowdown from overlap, s."""
    lost_s = contended_s(sent_s, computed_s, step_s, contention=np.minimum(contention, 1.0))
    return np.asarray(EXACT * (step_s + lost_s))


def sent_of_mean_s(sent_s: Floats, send_s: Floats, *, stages: Integers, chunks: Integers) -> Floats:
    """Communication of the mean stage, s; sent_s: collectives of all; send_s: one message of every micro-batch."""
    found: Floats = EXACT * (sent_s + (2.0 * stages * chunks - 2.0) * (stages > 1) * send_s) / stages
    return found
