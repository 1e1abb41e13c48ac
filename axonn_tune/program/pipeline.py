"""1F1B and interleaved 1F1B: the order of operations of a stage, chunks in flight, and the layers of model parts.

Legend: p stages, each with v chunks of the model; chunk c of stage s is model part c·p + s. m micro-batches, in groups
of g: 1 in 1F1B, p when interleaved. F and B are the forward and the backward of one micro-batch through one chunk.

The orders are those of Megatron-Core (`pipeline_parallel/schedules.py`) and of `torch.distributed.pipelining`
(`Schedule1F1B`, `ScheduleInterleaved1F1B`); they agree on every shape that both accept. torch refuses 1F1B with m < p,
where Megatron-Core and this run fewer warm-up forwards; torch interleaves where m is not divisible by p, which is a
ValueError here as in Megatron-Core. (torch 2.13 lists the last stage's forwards in 1F1B from 1 on, and runs them from
0 on.) Source: Narayanan et al., arXiv 2104.04473, section 2.2.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from axonn_tune.program.operations import Integers

Kind: TypeAlias = Literal["F", "B", "I", "W"]
"""Forward, whole backward; of a backward pass that is split the input's gradient, and the weights'
(`program.schedules`)."""
Count: TypeAlias = int | Integers


class Operation(NamedTuple):
    """One pass of a micro-batch through a chunk."""

    kind: Kind
    chunk: int
    micro_batch: int


def stage_order(stage: int, *, stages: int, chunks: int, micro_batches: int) -> tuple[Operation, ...]:
    """Operations of a stage: warm-up forwards, pairs of a forward and a backward, then the remaining backwards.

    Without pairs, when the warm-up takes in all forwards. ValueError if the shape is no pipeline's.
    """
    check_shape(stages, chunks, micro_batches)
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} of {stages}: expected 0 to {stages - 1}")
    chunk, micro_batch = forward_sequence(stages, chunks, micro_batches)
    forwards = [Operation("F", c, i) for c, i in zip(chunk.tolist(), micro_batch.tolist(), strict=True)]
    backwards = [Operation("B", chunks - 1 - c, i) for _, c, i in forwards]
    warm = min(int(warm_up(stage, stages=stages, chunks=chunks)), len(forwards))
    pairs = zip(forwards[warm:], backwards, strict=False)
    return (*forwards[:warm], *chain.from_iterable(pairs), *backwards[len(forwards) - warm :])


def warm_up(stage: Count, *, stages: Count, chunks: int) -> Count:
    """Forwards of a stage before its first pair: `p-r-1` in 1F1B, `2(p-r-1) + (v-1)·p` interleaved."""
    return stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages


def check_shape(stages: int, chunks: int, micro_batches: int) -> None:
    """ValueError for a shape that is no pipeline's."""
    if min(stages, chunks, micro_batches) < 1:
        raise ValueError(f"stages {stages}, chunks {chunks}, micro-batches {micro_batches}: each must be at least 1")
    if chunks > 1 and micro_batches % stages:
        raise ValueError(f"interleaved: micro-batches ({micro_batches}) are not divisible by stages ({stages})")


def group_size(stages: int, chunks: int) -> int:
    """Consecutive micro-batches through one chunk."""
    return stages if chunks > 1 else 1


def forward_sequence(stages: int, chunks: int, micro_batches: int) -> tuple[Integers, Integers]:
    """Chunk and micro-batch of each forward in order; backwards have the same with chunks reversed."""
    group = group_size(stages, chunks)
    number = np.arange(chunks * micro_batches)
    return number // group % chunks, number // (group * chunks) * group + number % group


def messages(stage: int, *, stages: int, chunks: int, micro_batches: int, folded: bool = False) -> int:
    """Activations and gradients that a stage sends in a step; it receives the same number. folded: what the last stage
    passes on stays there, and the first one has both ends of the model."""
    ends = (stage == 0) + (stage == stages - 1)
    return micro_batches * (2 * chunks - ends * (1 + folded)) if stages > 1 else 0


@lru_cache(maxsize=4096)
def model_parts(
    layers: int,
    *,
    stages: int,
    chunks: int,
    given: tuple[int, ...] | None = None,
    less: tuple[int, int] = (0, 0),
    starts: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """Layers of each model part, chunk c of stage s at c·p + s: as given, or split evenly.

    starts: layers with which parts may begin, if not with all.

    less: layers that the embedding and the LM head count as. ValueError where they leave a part fewer than 0 layers.
    Of several chunks the last parts but one get the remainder layers: those wait shortest between forward and backward
    pass, and a short first chunk fills and drains the pipeline sooner. So stages differ by one layer at most, the last
    part, which has the LM head, has one less, and as long as one other has, so has the first.
    """
    if given is not None:
        return given
    last = stages * chunks - 1
    each, left = divmod(layers, last + 1)
    even = tuple(each + (last - left <= part < last) for part in range(last + 1))
    if chunks == 1 or any(less):
        even = split_layers(layers, parts=stages * chunks, first_less=less[0], last_less=less[1])
    return even if starts is None else of_whole_groups(even, starts)


def of_whole_groups(parts: tuple[int, ...], starts: Sequence[int]) -> tuple[int, ...]:
    """The parts, or if one begins with another layer than these, the nearest that do not, each with a layer.

    ValueError for more parts than there are such layers.
    """
    ends = [*accumulate(parts)]
    if {*ends} <= {*starts, ends[-1]}:
        return parts
    if len(starts) < len(parts):
        raise ValueError(f"cannot split the model over {len(parts)} parts: they begin with {len(starts)} layers alone")
    cuts = [0]
    for part, end in enumerate(ends[:-1], 1):
        possible = starts[bisect_right(starts, cuts[-1]) : len(starts) - (len(parts) - 1 - part)]
        cuts.append(min(possible, key=lambda start: abs(start - end)))
    return tuple(end - start for start, end in pairwise([*cuts, ends[-1]]))


@lru_cache(maxsize=4096)
def held_of_chunks(
    stage: int, *, stages: int, micro_batches: int, weights: tuple[float, ...], more: int = 0
) -> tuple[int, ...]:
    """How many micro-batches of each chunk are between forward and backward where the sum of their weights is largest.

    weights: of each chunk, its layers for instance; they may differ. more: forwards beyond the warm-up before the first
    backward. After the k-th forward of `stage_order` all but
    the warm-up's forwards before it have their backward behind them. The order is periodic: no more micro-batches
    matter than the warm-up and two rounds. ValueError for a shape that is no pipeline's.
    """
    chunks = len(weights)
    check_shape(stages, chunks, micro_batches)
    group, longest = group_size(stages, chunks), int(warm_up(0, stages=stages, chunks=chunks)) + more
    enough = (longest // (chunks * group) + 2) * group
    forward, _ = forward_sequence(stages, chunks, min(micro_batches, enough))
    each = np.asarray(weights)
    done, freed = np.cumsum(each[forward]), np.cumsum(each[chunks - 1 - forward])
    held, warm = done.copy(), int(warm_up(stage, stages=stages, chunks=chunks)) + more
    held[warm + 1 :] -= freed[: max(len(held) - warm - 1, 0)]
    most = int(held.argmax())
    counts = np.bincount(forward[: most + 1], minlength=chunks)
    counts -= np.bincount(chunks - 1 - forward[: max(most - warm, 0)], minlength=chunks)
    return tuple(counts.tolist())


def split_layers(
    layers: int,
    *,
    parts: int,
    first_less: int = 0,
    last_less: int = 0,
    first: int | None = None,
    last: int | None = None,
) -> tuple[int, ...]:
    """Layers of each model part: even; remainder layers go to parts in the middle first, then the first, then the last.

    first_less, last_less: layers that the embedding and the LM head count as (1 is Megatron-LM's
    `--account-for-embedding-in-pipeline-split` and `--account-for-loss-in-pipeline-split`, torchtitan's
    `pipeline_parallel_first_stage_less_layers`). first, last: given counts, with the rest split over the other parts.
    Part c·p + s is chunk c of stage s. ValueError where a part would get fewer than 0 layers, or layers are left.
    """
    given = {part: count for part, count in ((0, first), (parts - 1, last)) if count is not None}
    less = {0: first_less} | {parts - 1: last_less + (first_less if parts == 1 else 0)}
    free = [part for part in (*range(1, parts - 1), *sorted({0, parts - 1})) if part not in given]
    each, left = divmod(layers - sum(given.values()) + sum(less.get(part, 0) for part in free), max(len(free), 1))
    counts = given | {part: each + (place < left) - less.get(part, 0) for place, part in enumerate(free)}
    if parts < 1 or sum(counts.values()) != layers or min(counts.values()) < 0:
        split = f"split {layers} layers over {parts} parts"
        raise ValueError(f"cannot {split}: {first=}, {last=}, {first_less=}, {last_less=} give {[*counts.values()]}")
    return tuple(counts[part] for part in range(parts))
