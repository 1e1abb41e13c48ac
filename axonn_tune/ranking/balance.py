"""Pipeline stages balanced by time: the contiguous split of layers whose slowest stage takes least.

A block of each layer type, the embedding and the LM head of a layout are replayed alone; passes of a stage are sums of
them. One chunk a stage has an exact split, by a dynamic program. Several start from the exact split over parts and from
that by layers, and single layers leave the slowest stage for as long as that helps.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from axonn_tune.cost.columns import Floats, Integers
from axonn_tune.cost.price import Detail, Pricer
from axonn_tune.job import Job, Layout
from axonn_tune.program.schedule import Runs
from axonn_tune.program.step import FIRST, LAST, MIDDLE, Stage

WORTH = 1e-3
"""Share of a step that a split must save."""


def balanced(
    job: Job, layout: Layout, *, step_s: float, limit_bytes: float, below_s: float = math.inf
) -> Detail | None:
    """A layout with its stages balanced by time, where that fits and is notably shorter than its step so far; below_s:
    what its passes alone must be below."""
    pricer, stages = Pricer(job, layout), layout.pipeline
    layer_s, ends_s = _seconds(pricer)
    split = balanced_parts(layer_s, ends_s, pricer.parts, stages=stages)
    before_s, after_s = (stage_s(parts, layer_s, ends_s, stages).max() for parts in (pricer.parts, split))
    batches = job.workload.global_batch / (layout.grid.batch_shares * layout.micro_batch)
    if (
        after_s * batches >= below_s
        or (before_s - after_s) * batches < WORTH * step_s
        or (layout.recompute_layers or 0) >= max(split)
    ):
        return None
    again = Pricer(job, replace(layout, parts=split))
    again.clock, again.known = pricer.clock, pricer.known
    # What does not fit is not replayed.
    if float(again.memory.total_bytes) > limit_bytes:
        return None
    found = again.price()
    return found if found.iteration_s <= (1.0 - WORTH) * step_s else None


def _seconds(pricer: Pricer) -> tuple[Floats, tuple[float, float]]:
    """Both passes of each layer, and what embedding and LM head with MTP add, s; recompute in some is left out."""
    values, _ = pricer.settled_stage(0)
    for of in {"", *(block.given.counted for block in pricer.program.blocks)}:
        values |= {f"L{of}": 1.0, f"kept{of}": 0.0, f"unkept{of}": 1.0}
    replay, types = pricer.replay(values | {"repeated": 0.0}, MIDDLE), [one for one, _ in pricer.model.runs]

    def passes_s(part: Stage, runs: Runs) -> float:
        return float(replay.passes_s(part, runs))

    one_s = {one: passes_s(MIDDLE, ((one, 1.0),)) for one in types}
    each_s = {one: passes_s(MIDDLE, ((one, 2.0),)) - one_s[one] for one in types}
    first, last = (passes_s(part, ((one, 1.0),)) - one_s[one] for part, one in ((FIRST, types[0]), (LAST, types[-1])))
    last += sum(count * each_s[one] for one, count in pricer.model.predicting_runs)
    decoder = pricer.model.decoder_runs
    return np.repeat([each_s[one] for one, _ in decoder], [count for _, count in decoder]), (first, last)


def stage_s(parts: tuple[int, ...] | Integers, layer_s: Floats, ends_s: tuple[float, float], stages: int) -> Floats:
    """Passes of each stage over one micro-batch, s, of one split or a row each; part c·p + s is chunk c of stage s."""
    counts = np.asarray(parts)
    ends = np.cumsum(counts, axis=-1)
    part_s = np.diff(np.concatenate([[0.0], np.cumsum(layer_s)])[np.concatenate((0 * ends[..., :1], ends), axis=-1)])
    part_s[..., [0, -1]] += ends_s
    found: Floats = part_s.reshape(*counts.shape[:-1], -1, stages).sum(axis=-2)
    return found


def balanced_parts(
    layer_s: Floats, ends_s: tuple[float, float], today: tuple[int, ...], *, stages: int
) -> tuple[int, ...]:
    """Layers of each part, at least one, with the least of the slowest stage, then of the sum of squares.

    layer_s: of each layer in order; ends_s: of the embedding and the LM head; today: the split by layers.
    """
    exact = _exact_parts(layer_s, ends_s, len(today))
    if len(today) == stages:
        return exact

    def best_of(splits: Integers) -> int:
        found = stage_s(splits, layer_s, ends_s, stages)
        return int(np.lexsort(((found**2).sum(axis=-1), found.max(axis=-1)))[0])

    def improved(counts: Integers) -> Integers:
        slowest, moves = int(stage_s(counts, layer_s, ends_s, stages).argmax()), np.eye(len(counts), dtype=np.int64)
        sources = [one for one in range(slowest, len(counts), stages) if counts[one] > 1]
        targets = [one for one in range(len(counts)) if one % stages != slowest]
        # The split as it is goes first: another one is better only if it takes less.
        splits = np.array([counts, *(counts - moves[a] + moves[b] for a in sources for b in targets)])
        best = best_of(splits)
        return improved(splits[best]) if best else counts

    each = np.array([improved(np.array(parts)) for parts in (today, exact)])
    return tuple(each[best_of(each)].tolist())


def _exact_parts(layer_s: Floats, ends_s: tuple[float, float], parts: int) -> tuple[int, ...]:
    """The split over so many parts with the least longest part, by a dynamic program, and of those the most even."""
    layers, reached = len(layer_s), np.concatenate([[0.0], np.cumsum(layer_s)])
    taken = reached[None, :] - reached[:, None]
    taken[np.tri(layers + 1, dtype=np.bool_)] = np.inf
    costs = [taken + ends_s[0] * (part == 0) + ends_s[1] * (part == parts - 1) for part in range(parts)]
    longest = np.where(np.arange(layers + 1), np.inf, 0.0)
    for cost in costs:
        longest = np.maximum(longest[:, None], cost).min(axis=0)
    squares, starts = np.where(np.arange(layers + 1), np.inf, 0.0), []
    for cost in costs:
        total = squares[:, None] + np.where(cost <= longest[-1] * (1.0 + 1e-12), cost, np.inf) ** 2
        starts.append(total.argmin(axis=0))
        squares = total.min(axis=0)
    ends = [layers]
    for start in reversed(starts):
        ends.append(int(start[ends[-1]]))
    return tuple(np.diff(ends[::-1]).tolist())
