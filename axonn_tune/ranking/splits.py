"""Splits of the layers over pipeline stages that a search prices beside the framework's own, and what is best of them.

A block of each layer type, the embedding and the LM head of a layout are replayed alone; passes of a part are sums of
them. Of contiguous splits with a layer in each part, a layout has these:

- one chunk a stage: that whose slowest stage takes least, and that whose longest chain does. Stage r begins its first
  backward pass behind min(p - r, m) forward passes, so that its passes stand (m - 1) and some times in a row: more
  often the later the stage. Both are exact, by dynamic programming;
- several: that whose sum over chunks of the slowest stage of each chunk is least, with chunks of like length, since
  interleaved 1F1B sends p micro-batches through one chunk of all stages, then through the next; and those whose slowest
  stage takes little over all its chunks, by moves of single layers.

Of what is equally good, the most even in seconds or in layers has its shorter parts first or last: four of each, which
can be 2% apart. Those whose schedule is near to the shortest are priced exactly, if they fit into memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise, product

import numpy as np

from axonn_tune.cost.columns import Floats, Integers
from axonn_tune.cost.pipeline import StageTimes, overlapped, pipeline_bound_s
from axonn_tune.cost.price import Detail, Pricer
from axonn_tune.job import Job, Layout
from axonn_tune.program.schedule import Runs
from axonn_tune.program.step import FIRST, LAST, MIDDLE, Stage

WORTH = 1e-3
"""Share of a step that a split must save."""
_FORWARD = 1.0 / 3.0
"""A forward pass, as a share of both."""
_ALIKE = (1e-3, 3.0)
"""What the square of a chunk's passes counts beside its slowest stage: of equal sums, chunks of like length."""
_NEAR = 1.01
"""Splits with schedules so near to the shortest are priced: the end of a step, for one, is not in them."""
_SAME = 1.0 + 1e-9

Split = tuple[int, ...]


def best_split(
    job: Job, layout: Layout, *, step_s: float, limit_bytes: float, below_s: float = math.inf
) -> Detail | None:
    """A layout with the best of its splits, where that fits and is notably shorter than its step so far; below_s: what
    its passes alone must be below."""
    pricer, stages = Pricer(job, layout), layout.pipeline
    layer_s, ends_s = _seconds(pricer)
    batches = job.workload.global_batch // (layout.grid.batch_shares * layout.micro_batch)
    splits = splits_of(layer_s, ends_s, pricer.parts, stages, batches)
    splits = [one for one in splits if (layout.recompute_layers or 0) < max(one)]
    if not splits:
        return None
    each_s = part_s(np.array([pricer.parts, *splits]), layer_s, ends_s)
    times = np.moveaxis(each_s.reshape(len(each_s), -1, stages), 1, 2)
    sent_s, backward_s = np.full((len(each_s), stages), pricer.send[2]), (1.0 - _FORWARD) * times
    together = overlapped(job.framework.schedule, layout.chunks)
    passes = StageTimes(_FORWARD * times, backward_s, backward_s, 0.0 * sent_s, sent_s, together)
    likely = pipeline_bound_s(passes, micro_batches=np.full(len(each_s), batches))
    own_s, *others_s = np.asarray(likely).tolist()
    found: Detail | None = None
    nearest_s = min(own_s * (1.0 - WORTH), below_s)
    for likely_s, split in sorted(zip(others_s, splits, strict=True)):
        if likely_s >= nearest_s:
            break
        again = Pricer(job, replace(layout, parts=split))
        again.clock, again.known = pricer.clock, pricer.known
        # What does not fit is not replayed.
        if float(again.memory.total_bytes) <= limit_bytes:
            one = again.price()
            found = one if found is None or one.iteration_s < found.iteration_s else found
            nearest_s = min(nearest_s, likely_s * _NEAR)
    return found if found and found.iteration_s <= (1.0 - WORTH) * step_s else None


def _seconds(pricer: Pricer) -> tuple[Floats, tuple[float, float]]:
    """Both passes of each layer, and what embedding and LM head with MTP add, s; recompute in some is left out."""
    values, _ = pricer.settled_stage(0)
    for of in {"", *(block.given.counted for block in pricer.program.blocks)}:
        values |= {f"L{of}": 1.0, f"kept{of}": 0.0, f"unkept{of}": 1.0}
    replay = pricer.replay(values | {"repeated": 0.0}, MIDDLE)
    types = list(dict.fromkeys(one for one, _ in pricer.model.runs))

    def passes_s(part: Stage, runs: Runs) -> float:
        return float(replay.passes_s(part, runs))

    ends = (FIRST, pricer.model.runs[0][0]), (LAST, pricer.model.runs[-1][0])
    one_s = {one: passes_s(MIDDLE, ((one, 1.0),)) for one in types}
    each_s = {one: passes_s(MIDDLE, ((one, 2.0),)) - one_s[one] for one in types}
    first, last = (passes_s(part, ((one, 1.0),)) - one_s[one] for part, one in ends)
    last += sum(count * each_s[one] for one, count in pricer.model.predicting_runs)
    decoder = pricer.model.decoder_runs
    return np.repeat([each_s[one] for one, _ in decoder], [count for _, count in decoder]), (first, last)


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
            cuts, each = _chunks(layer_s, ends_s, stages, len(own) // stages, alike), list[list[Split]]()
            for start, end in pairwise(cuts):
                ends = ends_s[0] * (start == 0), ends_s[1] * (end == len(layer_s))
                each.append(_ties(layer_s[start:end], ends, np.ones(stages)))
            found += [tuple(chain(*several)) for several in zip(*each, strict=True)]
        found += _moved(layer_s, ends_s, own, stages)
    return [one for one in dict.fromkeys(found) if one != own]


def _ties(layer_s: Floats, ends_s: tuple[float, float], weight: Floats) -> list[Split]:
    """Splits whose most costly part costs least: the most even of them in seconds, and in layers, which need least
    memory, with the shorter parts first or last."""
    longest = _longest(layer_s, ends_s, weight)
    return [
        _parts(layer_s, ends_s, weight, longest, late=late, by_layers=by_layers)
        for by_layers, late in product((False, True), repeat=2)
    ]


def _moved(layer_s: Floats, ends_s: tuple[float, float], own: Split, stages: int) -> list[Split]:
    """Splits whose slowest stage takes little over all its chunks, then the others: single layers leave that stage for
    as long as it helps, from the framework's split and from that whose longest part takes least."""

    def best_of(splits: Integers) -> int:
        found = part_s(splits, layer_s, ends_s).reshape(len(splits), -1, stages).sum(axis=1)
        return int(np.lexsort(((found**2).sum(axis=-1), found.max(axis=-1)))[0])

    def improved(counts: Integers) -> Integers:
        stage_s = part_s(counts, layer_s, ends_s).reshape(-1, stages).sum(axis=0)
        slowest, moves = int(stage_s.argmax()), np.eye(len(counts), dtype=np.int64)
        sources = [one for one in range(slowest, len(counts), stages) if counts[one] > 1]
        targets = [one for one in range(len(counts)) if one % stages != slowest]
        # The split as it is goes first: another one is better only if it takes less.
        splits = np.array([counts, *(counts - moves[a] + moves[b] for a in sources for b in targets)])
        best = best_of(splits)
        return improved(splits[best]) if best else counts

    weight = np.ones(len(own))
    exact = _parts(layer_s, ends_s, weight, _longest(layer_s, ends_s, weight), late=False, by_layers=False)
    return [tuple(improved(np.array(parts)).tolist()) for parts in (own, exact)]


def _costs(layer_s: Floats, ends_s: tuple[float, float], weight: Floats) -> list[Floats]:
    """What each part costs with the layers from one place to another, `[start, end]`; infinite for none."""
    reached = np.concatenate([[0.0], np.cumsum(layer_s)])
    taken = reached[None, :] - reached[:, None]
    taken[np.tri(len(reached), dtype=np.bool_)] = np.inf
    last = len(weight) - 1
    ends = [ends_s[0] * (part == 0) + ends_s[1] * (part == last) for part in range(last + 1)]
    return [times * (taken + more) for times, more in zip(weight.tolist(), ends, strict=True)]


def _longest(layer_s: Floats, ends_s: tuple[float, float], weight: Floats) -> float:
    """The least cost of the part of a split that costs most; weight: of each part's passes."""
    longest = np.where(np.arange(len(layer_s) + 1), np.inf, 0.0)
    for cost in _costs(layer_s, ends_s, weight):
        longest = np.maximum(longest[:, None], cost).min(axis=0)
    return float(longest[-1])


def _parts(
    layer_s: Floats, ends_s: tuple[float, float], weight: Floats, longest: float, *, late: bool, by_layers: bool
) -> Split:
    """Layers of each part of the most even split of which none costs more than `longest`; of several the one whose
    shorter parts are the last ones (late) or the first."""
    places = np.arange(len(layer_s) + 1)
    squares, starts = np.where(places, np.inf, 0.0), list[Integers]()
    for cost in _costs(layer_s, ends_s, weight):
        even = (places - places[:, None]).astype(np.float64) if by_layers else cost
        total = squares[:, None] + np.where(cost <= longest * _SAME, even, np.inf) ** 2
        squares = total.min(axis=0)
        last = len(places) - 1 - (total <= squares * _SAME)[::-1].argmax(axis=0)
        starts.append(last if late else total.argmin(axis=0))
    ends = [len(layer_s)]
    for start in reversed(starts):
        ends.append(int(start[ends[-1]]))
    return tuple(np.diff(ends[::-1]).tolist())


def _chunks(layer_s: Floats, ends_s: tuple[float, float], stages: int, chunks: int, alike: float) -> list[int]:
    """Where each chunk of all stages begins, and the last one ends, so that the sum over chunks of the least that their
    slowest stage can take is least."""
    first, *_, last = _costs(layer_s, ends_s, np.ones(stages))
    plain = _costs(layer_s, (0.0, 0.0), np.ones(1))[0]
    rest = _in_parts(plain, stages - 1)
    inner = _joined(rest, plain) if chunks > 2 else plain
    slowest = [_joined(first[:1], rest), *[inner] * (chunks - 2), _joined(rest, last[:, -1:])]
    places = np.arange(len(plain))
    filled = plain if alike > 1.0 else (places - places[:, None]) * float(layer_s.max())
    every = [filled[:1] + ends_s[0], *[filled] * (chunks - 2), filled[:, -1:] + ends_s[1]]
    whole = stages * float(layer_s.sum())
    total, starts = np.zeros(1), list[Integers]()
    for chunk_s, all_s in zip(slowest, every, strict=True):
        found = total[:, None] + chunk_s + alike * all_s**2 / whole
        starts.append(found.argmin(axis=0))
        total = found.min(axis=0)
    cuts, at = [len(layer_s)], 0
    for start in reversed(starts[1:]):
        at = int(start[at])
        cuts.append(at)
    return [0, *reversed(cuts)]


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
