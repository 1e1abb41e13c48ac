"""What lengths of sequences make of a batch: tokens of a micro-batch, its attention, and what the slowest rank has.

Attention of a sequence of L tokens is that of L² pairs, whatever stands beside it; all else goes by tokens, pads
included. Micro-batches differ in both, and ranks that share the batch wait for the one with most: the expected largest
of so many draws, of sums over the micro-batches between two waits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from axonn_tune.frameworks.step import StepOptions
from axonn_tune.grid import BATCH_AXES
from axonn_tune.program.inputs import suffixes
from axonn_tune.program.operations import Floats, Value
from axonn_tune.specs.lengths import Lengths
from axonn_tune.specs.model import Layer, Model
from axonn_tune.specs.workload import Workload

Span: TypeAlias = Callable[[float], float]
"""Positions that a token of a sequence of some length attends to on average, the masked half included."""

_PACKS, _MOST_SEQUENCES = 128, 32_768
"""Packs that are filled to see what packing reaches, and sequences at most."""
_OPEN = 0.1
"""Share of the packs, the last, that are not counted: those of a whole data set are a smaller share of it."""


def padding(x: float, context: float, options: StepOptions) -> int:
    """Multiple that each sequence is padded to: context cuts it into two chunks a rank, and x splits its tokens under
    sequence parallelism (NVIDIA-NeMo/Megatron-Bridge@067f987d, docs/training/packed-sequences.md)."""
    chunks = 2 * int(context) if context > 1.0 else 1
    return math.lcm(chunks, int(context * x) if options.sequence_parallel else 1)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Micro-batches of some sequences of the batch. tokens: of one sequence of it on average, with pads; own: without;
    deviation: standard deviation of a micro-batch's tokens over their mean. most: tokens of the largest.

    attended: lengths whose pairs a micro-batch has, as rows of equal chance; times: how often; several: rows are draws
    of one micro-batch of so many independent ones.
    """

    tokens: float
    own: float
    deviation: float
    most: float
    attended: Floats
    number: NDArray[np.int64]
    several: float
    known: dict[Span, tuple[float, float]] = field(default_factory=dict)

    @cached_property
    def _lengths(self) -> tuple[Floats, NDArray[np.int64]]:
        lengths, places = np.unique(self.attended, return_inverse=True)
        return lengths, places.ravel()

    def pairs(self, span: Span) -> tuple[float, float]:
        """Pairs of a query and a key by one sequence of the batch, and their deviation as of tokens."""
        if span not in self.known:
            lengths, places = self._lengths
            of_length = np.array([length * span(float(length)) for length in lengths])
            rows = np.bincount(self.number, weights=of_length[places])
            mean = float(rows.mean())
            self.known[span] = mean, float(rows.std()) / mean / math.sqrt(self.several)
        return self.known[span]


@lru_cache(maxsize=4096)
def micro_batch(lengths: Lengths, cut: int, size: int, multiple: int) -> MicroBatch:
    """Of so many sequences (packs, where these are filled), each cut at a length and padded to a multiple."""
    own = np.array(lengths.values(cut))
    padded = np.ceil(own / multiple) * multiple
    every, most = np.arange(len(own)), math.ceil(lengths.most(cut) / multiple) * float(multiple)
    if lengths.packing == "packed":
        number, kept = _packs(tuple(padded.tolist()), cut)
        order, packs = kept[:, 0], float(number)
        filled = float(own[order].sum()) / packs
        return MicroBatch(float(cut), filled, 0.0, float(cut), padded[order], kept[:, 1], size)
    if lengths.packing == "padding-free":
        mean, deviation = float(padded.mean()), float(padded.std()) / math.sqrt(size)
        largest = (most + (size - 1) * mean) / size
        return MicroBatch(mean, float(own.mean()), deviation / mean, largest, padded, every, size)
    # The longest of so many: its quantile at u is that of one at u^(1/size).
    share = ((every + 0.5) / len(own)) ** (1.0 / size)
    longest = padded[np.minimum((share * len(own)).astype(np.int64), len(own) - 1)]
    mean = float(longest.mean())
    return MicroBatch(mean, float(own.mean()), float(longest.std()) / mean, most, longest, every, 1.0)


@lru_cache(maxsize=64)
def _packs(lengths: tuple[float, ...], size: int) -> tuple[int, NDArray[np.int64]]:
    """How many packs, and of each sequence in them its place among the lengths and its pack: first-fit in shuffled
    order, as Megatron-Bridge has it (src/megatron/bridge/data/packing/algorithms.py)."""
    times = math.ceil(_PACKS * size / sum(lengths))
    order = list(range(len(lengths))) * max(1, min(times, _MOST_SEQUENCES // len(lengths)))
    random.Random(0).shuffle(order)
    left, packs, count = np.full(len(order), float(size)), np.empty(len(order), dtype=np.int64), 0
    for place, one in enumerate(order):
        fits = left[: count + 1] >= lengths[one]
        pack = int(np.argmax(fits))
        left[pack] -= lengths[one]
        packs[place], count = pack, max(count, pack + 1)
    closed = max(1, count - math.ceil(_OPEN * count))
    kept = np.column_stack((np.array(order), packs))
    return closed, kept[packs < closed]


@lru_cache(maxsize=4096)
def _late(ranks: float, micro_batches: float) -> float:
    """Deviations by which the rank with most of so many is above the mean, of sums over some micro-batches: Blom's
    expected largest of normal draws."""
    # Imported here: only lengths need it.
    from statistics import NormalDist

    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) / math.sqrt(micro_batches)


@lru_cache(maxsize=256)
def _spread_of_most(ranks: float) -> float:
    """Half the distance of the quantiles one deviation off the middle, of the largest of so many normal draws."""
    # Imported here: only lengths need it.
    from statistics import NormalDist

    one = NormalDist()
    low, high = (one.inv_cdf(one.cdf(deviation) ** (1.0 / ranks)) for deviation in (-1.0, 1.0))
    return (high - low) / 2.0


def waits_each(axes: Mapping[str, float], options: StepOptions) -> bool:
    """Whether ranks wait for each other in each micro-batch: where they gather weights, exchange tokens or reduce
    gradients in it; others wait once, at the end of the step."""
    return axes["z"] > 1.0 or axes["expert"] > 1.0 or options.reduce_each_micro_batch


def length_symbols(
    workload: Workload, axes: Mapping[str, Value], spans: Mapping[str, Span], options: StepOptions
) -> dict[str, Value]:
    """S, seen, longest, and what spans name: of the rank with most, which the others wait for.

    S, longest: tokens of a sequence of the batch, and at the peak of memory. seen: positions that a token attends to
    without a window, the masked half included; spans: those by a function of the length.
    """
    names = ("b", "x", "context", "z", "expert", *(axis for axis in BATCH_AXES if axis not in ("z", "expert")))
    columns = np.broadcast_arrays(*(axes[name] for name in names))
    if not columns[0].ndim:
        return dict(_of_one(workload, {name: float(axes[name]) for name in names}, spans, options))
    rows = np.stack(columns, axis=1)
    alike, places = np.unique(rows, axis=0, return_inverse=True)
    found = [_of_one(workload, dict(zip(names, row.tolist(), strict=True)), spans, options) for row in alike]
    # By names, since there may be no candidates.
    return {name: np.array([one[name] for one in found])[places.ravel()] for name in ("S", "longest", *spans)}


def step_spread(workload: Workload, size: int, ranks: int, multiple: int) -> tuple[float, float]:
    """Standard deviation of tokens and of pairs of the rank with most in a step, over their means: micro-batches of so
    many sequences on each of the ranks that share the batch."""
    if workload.lengths is None:
        return 0.0, 0.0
    one = micro_batch(workload.lengths, workload.sequence_length, size, multiple)
    share = _spread_of_most(float(ranks)) / math.sqrt(max(1.0, workload.global_batch / (ranks * size)))
    return one.deviation * share, one.pairs(_whole)[1] * share


def _of_one(
    workload: Workload, axes: Mapping[str, float], spans: Mapping[str, Span], options: StepOptions
) -> dict[str, float]:
    assert workload.lengths is not None, "asked before"
    size, multiple = int(axes["b"]), padding(axes["x"], axes["context"], options)
    one = micro_batch(workload.lengths, workload.sequence_length, size, multiple)
    ranks = math.prod(axes[axis] for axis in BATCH_AXES)
    batches = 1.0 if waits_each(axes, options) else max(1.0, workload.global_batch / (ranks * size))
    late = _late(ranks, batches)
    tokens = one.tokens * (1.0 + late * one.deviation)
    found = {"S": tokens, "longest": one.most}
    for name, span in spans.items():
        pairs, deviation = one.pairs(span)
        found[name] = pairs * (1.0 + late * deviation) / tokens
    return found


def sequences_of(workload: Workload, multiple: int = 1) -> Sequence[tuple[float, float]]:
    """Lengths of the sequences of a batch without pads, and how many of each; multiple: that each is padded to."""
    if workload.lengths is None:
        return ((float(workload.sequence_length), float(workload.global_batch)),)
    one = micro_batch(workload.lengths, workload.sequence_length, 1, multiple)
    values, counts = np.unique(workload.lengths.values(workload.sequence_length), return_counts=True)
    each = float(workload.global_batch) * one.own / float(values @ counts)
    return tuple(zip(values.tolist(), (each * counts).tolist(), strict=True))


def own_tokens(workload: Workload, multiple: int = 1) -> float:
    """Tokens of a step, all ranks, without pads."""
    return sum(length * number for length, number in sequences_of(workload, multiple))


def batched_tokens(workload: Workload, size: int, multiple: int) -> float:
    """Tokens of a step, all ranks, with pads, in micro-batches of so many sequences."""
    length = float(workload.sequence_length)
    if workload.lengths is not None:
        length = micro_batch(workload.lengths, workload.sequence_length, size, multiple).tokens
    return workload.global_batch * length


@lru_cache(maxsize=256)
def _span_of(layer: Layer) -> Span | None:
    """Positions that a token attends to on average, twice the causal ones, by the length of its sequence: of
    S·(S + 1) / 2 a window leaves W·(W + 1) / 2 + (S - W)·W. None of layers that attend to all, or to none."""
    if layer.mixer is not None and layer.mixer.pair_width:
        return layer.mixer.pairs
    reach = layer.reach
    if not reach:
        return None

    def of_window(length: float) -> float:
        window = min(float(reach), length)
        return window * (2.0 * length - window) / length

    return of_window


def _whole(length: float) -> float:
    """Positions that a token attends to where nothing limits them."""
    return length


def of_lengths(model: Model, workload: Workload, axes: Mapping[str, Value], options: StepOptions) -> dict[str, Value]:
    """Values of the symbols that lengths of sequences decide."""
    spans = {f"span{of}": _span_of(layer) for layer, of in zip(model.types, suffixes(model), strict=True)}
    limited = {name: span for name, span in spans.items() if span is not None}
    if workload.lengths is None:
        length = float(workload.sequence_length)
        return {"S": length, **{name: span(length) for name, span in limited.items()}}
    return length_symbols(workload, axes, {"seen": _whole, **limited}, options)
