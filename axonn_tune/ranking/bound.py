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
φ = 1 - g / I. Elsewhere it is f / (f + g) of the least: what is longer than that only adds to a chain.

One chunk (1F1B). Stage r begins its first backward pass behind N = min(p - r, m) forward passes. The first micro-batch
goes through all stages and back, W, of which stage r does b_r; stage r then has m - N forward and m - 1 backward passes
left, none of which is on that way. So T ≥ W + (m - N) f_r + (m - 1) g_r ≥ W + c_r b_r, with c_r = m - 1 - φ (N - 1).
Messages that overlap are on the way of W alone: 2 (p - 1) of them come to it.

Several chunks, by two chains:

- Stage r begins once the first micro-batch has gone through the first chunk of the stages before it, and its gradient
  has the same way back behind stage r's last operation: a stage, as many blocks as a part has at least and two
  messages; and the embedding. Between them stage r has all its passes: T ≥ m b_r + way_r.
- Stage r begins its first backward pass once the first micro-batch has gone through all p v parts, and back through the
  last chunks of the stages behind it, of which the last one may have no block. Until then it has done
  2 (p - r - 1) + (v - 1) p + 1 forward passes, p of each chunk in turn: of each at most n = min(m, p + w), where w is
  what 2 (p - r - 1) + 1 has beyond p. What is left is m b_r - n f_r or more, and the last gradient's way to the
  embedding follows: T ≥ way_r + (m - n φ) b_r. Both passes of the LM head count to its forward one: the stage that has
  it does n (1 - φ) of them less.

φ is that of blocks and embedding. Messages are counted as they are: a stage sends as many forward as it has parts, but
for the model's last part, and as many backward, but for the first.

Passes beside each other. A chunk saves s of f + g, each pass by its length. What is left of a forward pass,
f - s f / (f + g), grows with f and g; over layer types it is no less than the sum of f_t - σ s_t, with σ the most of
f_t / (f_t + g_t); likewise backward. Of m micro-batches min(m, p) have nothing beside them.

All stages. Chains T ≥ way_r + c_r b_r, each divided by c_r, add up to T Σ 1/c_r ≥ Σ way_r / c_r + W. And a stage has no
less than its ends and a block in each chunk, but for the first and the last part.

Whole layers. In a step T stage r has room for (T - way_r) / c_r less its ends and messages, so for a whole number of
blocks of the most frequent layer type. Where all stages together have room for fewer than there are, no split takes T:
bisection finds the least T with room, from below. In each chunk as many blocks repeat as asked for, or all if it has
fewer. A stage repeats least with all chunks but one as short as they can be.

Contention. Computation and communication slow each other down by a share of what overlaps. Some stage has no less
communication and some no less computation than the mean one, and each second that a step is longer hides one less.

Shortest part. Splits of several chunks that a search compares have no part but the last shorter than L // (p v) - 1
layers, or than one; a given split may have empty parts, and so may one where ends count as layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from axonn_tune.cost.columns import Floats, Integers
from axonn_tune.cost.compute import ROUNDING, contended_s
from axonn_tune.cost.paces import FIRST_PART, LAST_PART, Paces, Run
from axonn_tune.frameworks.description import PipelineSchedule
from axonn_tune.program.operations import Value
from axonn_tune.specs.model import Model

EXACT = 1.0 - ROUNDING
"""Of a bound: sums in another order differ by rounding."""


@dataclass(frozen=True)
class Layers:
    """Columns of what splits are made of, s, `[candidates]`, or of layer types `[types, candidates]`.

    counts: blocks of each type, `predicting` those of multi-token prediction, which the last stage has. both_s: both
    passes of a block; forward_s, backward_s: of each pass, beside another micro-batch's where that saves something;
    saved_s: by both beside each other; again_s: what comes to a block that repeats, where only some do. forward_share:
    the most that a forward pass is of both; least_share: what passes beside each other take of themselves at least.
    ahead_s, behind_s: what the embedding adds, forward and backward; head_s: the LM head, both. sent_s: communication
    of a step, of all stages; computed_s: in one micro-batch.
    """

    counts: Integers
    predicting: Integers
    both_s: Floats
    forward_s: Floats
    backward_s: Floats
    saved_s: Floats
    again_s: Floats
    forward_share: Floats
    least_share: Floats
    ahead_s: Floats
    behind_s: Floats
    head_s: Floats
    sent_s: Floats
    computed_s: Floats

    def taken(self, rows: Integers) -> Layers:
        """Of some candidates."""
        names = [each.name for each in fields(self) if each.name not in ("counts", "predicting")]
        columns: dict[str, Any] = {name: getattr(self, name)[..., rows] for name in names}
        return replace(self, **columns)

    def block_s(self, alone: Floats | float) -> Floats:
        """Both passes of a block of each type; alone: share of its micro-batches without others beside them."""
        return self.both_s - (1.0 - alone) * self.saved_s

    def whole_s(self, alone: Floats | float) -> Floats:
        """Both passes of one micro-batch through the whole model."""
        found: Floats = self.counts @ self.block_s(alone) + self.ahead_s + self.behind_s + self.head_s
        return found


def layers_of(paces: Paces, model: Model, rows: int) -> Layers:
    """The layers of so many candidates."""
    repeating, plain = ([kinds[number] for kinds in paces.kinds] for number in (0, 1))
    every, predicting = np.array(model.counts), np.zeros(len(plain), dtype=np.int64)
    for of_type, count in model.predicting_runs if model.mtp_layers else ():
        predicting[of_type] += count
    first, last = model.runs[0][0], model.runs[-1][0]

    def of(values: Sequence[Value], kinds: Sequence[int] = plain) -> Floats:
        return np.array([_column(values[kind], rows) for kind in kinds])

    forward = np.array([_least_s(run, rows) for run in paces.forward])
    backward, repeated = (
        np.array([_least_s(paces.backward[kind], rows) for kind in kinds]) for kinds in (plain, repeating)
    )
    again = np.maximum(repeated - backward, 0.0)
    ahead_s = _added_s(paces.opening[FIRST_PART, first], forward[first])
    behind_s = _added_s(paces.closing[FIRST_PART, plain[first]], backward[first])
    both, saved, issued = forward + backward, of(paces.saved_s), [sum(one, 0.0) for one in paces.issued]
    shares = _share(forward, both), _share(backward, both)
    beside = [one - share.max(axis=0) * saved for one, share in zip((forward, backward), shares, strict=True)]
    # All blocks of a chunk take what they compute, or what the host takes to issue them: one or the other for all.
    waits = every @ of(issued) > every @ (both - saved)
    held = np.where(waits, of(issued), both)
    more = np.where(waits, np.maximum(of(issued, repeating) - of(issued), 0.0), again)
    forward_shares = (
        1.0 - _share(backward, held),
        1.0 - _share(again, more),
        _share(ahead_s, ahead_s + behind_s, nothing=0.0),
    )
    return Layers(
        counts=every,
        predicting=predicting,
        both_s=held,
        forward_s=beside[0],
        backward_s=beside[1],
        saved_s=np.where(waits, 0.0, saved),
        again_s=more,
        forward_share=np.vstack(forward_shares).max(axis=0),
        least_share=(1.0 - _share(saved, both, nothing=0.0)).min(axis=0),
        ahead_s=ahead_s,
        behind_s=behind_s,
        head_s=_added_s(paces.opening[LAST_PART, last], forward[last]),
        sent_s=every @ of(paces.sent_s),
        computed_s=every @ of(paces.computed_s) + sum(_column(one, rows) for one in paces.ends_s),
    )


def _column(value: Value, rows: int) -> Floats:
    return np.broadcast_to(np.asarray(value, dtype=np.float64), rows)


def _least_s(run: Run, rows: int) -> Floats:
    """What each block of a run takes at least."""
    few = [_column(one.blocks_s, rows) / (number + 1) for number, one in enumerate(run[:4])]
    found: Floats = np.array([*few, _column(run.more.blocks_s, rows)]).min(axis=0)
    return found


def _added_s(run: Run, each_s: Floats) -> Floats:
    """What comes to the blocks of a run at least."""
    few = [np.asarray(one.whole_s) - (number + 1) * each_s for number, one in enumerate(run[:4])]
    found: Floats = np.maximum(np.array(few).min(axis=0), 0.0)
    return found


def _share(part: Floats, whole: Floats, *, nothing: float = 1.0) -> Floats:
    """A part of a whole, at most all of it; where there is nothing, as given."""
    found: Floats = np.where(whole > 0.0, np.minimum(part, whole) / np.maximum(whole, 1e-30), nothing)
    return found


class Shape(NamedTuple):
    """Candidates with as many stages and chunks. chunks: None for any number; batches: micro-batches; repeated: blocks
    of each chunk that repeat, where only some do; shortest: layers that each part but the last has at least; send_s:
    of one message."""

    stages: int
    chunks: int | None
    batches: Floats
    repeated: Integers
    shortest: int
    send_s: Floats


Chain: TypeAlias = tuple[Floats, Floats]
"""Of each stage what a chain has beside a multiple of its passes, s, and that multiple, `[stages, candidates]`."""


def any_split_s(layers: Layers, shape: Shape, *, schedule: PipelineSchedule, contention: float) -> Floats:
    """Least step of candidates of a shape, of all splits of their layers, s."""
    p, m, stage, several = shape.stages, shape.batches, np.arange(shape.stages)[:, None], shape.chunks or 1
    hidden = schedule.overlapped, schedule.overlapped_interleaved
    blocking = not (any(hidden) if shape.chunks is None else hidden[several > 1])
    block = layers.block_s(np.minimum(m, p) / m if shape.chunks != 1 else 1.0)
    ends_s, ends = layers.ahead_s + layers.behind_s, 1.0 * (stage == 0) + (stage == p - 1)
    messages = blocking * (2.0 * several - ends) * shape.send_s
    # What a forward pass sends less than its share of both.
    unsent = layers.forward_share * messages - blocking * (several - (stage == p - 1)) * shape.send_s
    last_s = layers.head_s + layers.predicting @ block
    # Only the ends of the model may have no block.
    beside = np.where(stage == 0, ends_s, 0.0) + np.where(stage == p - 1, last_s, 0.0) + messages
    least = beside + np.maximum(several - ends, 0.0) * block[layers.counts > 0].min(axis=0)
    whole = layers.counts @ block + ends_s + layers.head_s + messages.sum(axis=0)
    if shape.chunks == 1:
        before = np.minimum(p - stage, m) - 1.0
        chains = [(whole + before * unsent, np.maximum(m - 1.0 - layers.forward_share * before, 1e-12))]
    else:
        chains = _interleaved(layers, shape, block, unsent)
    found: Floats = whole
    for way, times in chains:
        found = np.maximum(found, (whole + (way / times).sum(axis=0)) / (1.0 / times).sum(axis=0))
        found = np.maximum(found, (way + times * least).max(axis=0))
    if shape.chunks is not None:
        found = _of_whole_layers(layers, shape, block, found, beside, chains)
    found = found + (shape.chunks == 1 and not blocking) * 2.0 * (p - 1) * shape.send_s
    return contended(found, m * layers.computed_s / p, layers.sent_s / p, contention=contention)


def _interleaved(layers: Layers, shape: Shape, block: Floats, unsent: Floats) -> list[Chain]:
    """Chains of several chunks; unsent: what a forward pass of each stage sends less than its share of both, s."""
    p, m, send_s = shape.stages, shape.batches, shape.send_s
    stage, used = np.arange(p)[:, None], layers.counts > 0
    ends_s = np.where(stage, layers.ahead_s + layers.behind_s, 0.0)
    way = stage * (shape.shortest * block[used].min(axis=0) + 2.0 * send_s) + ends_s
    chains = [(way, np.broadcast_to(m, way.shape))]
    if shape.chunks is None:
        return chains
    ahead = layers.counts @ layers.forward_s + layers.least_share * (layers.ahead_s + layers.head_s)
    ahead = ahead + (p * shape.chunks - 1.0) * send_s
    back = shape.shortest * layers.backward_s[used].min(axis=0) + send_s
    # The last part may have no block.
    turned = ahead + np.maximum(p - 2.0 - stage, 0.0) * back
    drained = stage * back + np.where(stage, layers.behind_s, 0.0) * layers.least_share
    warm = 2.0 * (p - stage - 1.0) + 1.0
    first = np.minimum(m, p + np.clip(warm - p, 0.0, p))
    # Both passes of the LM head go with a forward pass.
    head = np.where(stage == p - 1, first * (1.0 - layers.forward_share) * layers.head_s, 0.0)
    return [*chains, (turned + drained - head + first * unsent, np.maximum(m - first * layers.forward_share, 1e-12))]


_HALVINGS = 10
"""Of the interval in which the step of whole layers is looked for."""


def _of_whole_layers(
    layers: Layers, shape: Shape, block: Floats, least_s: Floats, beside: Floats, chains: list[Chain]
) -> Floats:
    """The least step in which all stages together have room for the blocks of the most frequent layer type, s.

    Of its chunks all but one have `shortest` blocks, but the last one of the model, which may have none; the rest is in
    one chunk, where it repeats least.
    """
    chunks, repeated, shortest = shape.chunks or 1, shape.repeated, shape.shortest
    decoder = layers.counts - layers.predicting
    most = int(decoder.argmax())
    each_s, again_s = block[most], np.where(repeated > 0, layers.again_s[most], 0.0)
    lone = (np.arange(shape.stages)[:, None] == shape.stages - 1) * (chunks > 1)
    rest = (chunks - 1.0 - lone) * shortest
    others = (chunks - 1.0 - lone) * np.minimum(repeated, shortest)

    def room(step_s: Floats) -> Floats:
        left_s = np.minimum.reduce([(step_s - way) / times - beside for way, times in chains])
        few = np.floor((left_s - (others - rest) * again_s) / (each_s + again_s) + ROUNDING)
        many = np.floor((left_s - (others + repeated) * again_s) / each_s + ROUNDING)
        several = np.where(many >= rest + repeated, many, np.minimum(few, rest + repeated))
        found: Floats = np.clip(several, 0.0, None).sum(axis=0)
        return found

    low, high, wanted = least_s, 2.0 * least_s, float(decoder[most])
    fits = room(low) >= wanted
    low = np.where(fits | (room(high) >= wanted), low, high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        enough = room(middle) >= wanted
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.where(fits, least_s, np.maximum(low, least_s))


def contended(step_s: Floats, computed_s: Floats, sent_s: Floats, *, contention: Floats | float) -> Floats:
    """Least steps with the least slowdown from overlap, s."""
    lost_s = contended_s(sent_s, computed_s, step_s, contention=np.minimum(contention, 1.0))
    return np.asarray(EXACT * (step_s + lost_s))


def sent_of_mean_s(sent_s: Floats, send_s: Floats, *, stages: Integers, chunks: Integers) -> Floats:
    """Communication of the mean stage, s; sent_s: collectives of all; send_s: one message of every micro-batch."""
    found: Floats = EXACT * (sent_s + (2.0 * stages * chunks - 2.0) * (stages > 1) * send_s) / stages
    return found


def shortest_part(layers: int, stages: int, chunks: int, *, given: bool) -> int:
    """Layers that each part but the last has at least in the splits that a search compares; given: the split is, or
    the ends of the model count as layers, so that a part may have none."""
    return 0 if given else 1 if chunks == 1 else max(1, layers // (stages * chunks) - 1)
