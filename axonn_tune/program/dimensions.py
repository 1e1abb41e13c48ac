"""What a layout makes of a model: the values of the sizes' symbols.

Sizes are padded vocabulary, gradient accumulation steps, chunks, buckets, stored elements and FLOPs.

MFU follows PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B): three times the FLOPs of the forward GEMMs
and of full S×S attention, the masked half counted; the LM head counts, embedding look-ups and recompute do not. HFU
counts the same of what a rank runs, recompute and padding included, and the masked half of attention, too, although
causal kernels skip it. What a framework's log counts is in its description.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial, reduce
from typing import NamedTuple

import numpy as np

from axonn_tune.frameworks.description import FlopCount, Framework
from axonn_tune.frameworks.step import MOST_IMBALANCE, StepOptions
from axonn_tune.grid import ALL_AXES, BATCH_AXES, Grid, divisors
from axonn_tune.program.count import TypeCount, active_parameters, closing_vectors, counted, type_constants
from axonn_tune.program.inputs import counted_suffix, suffixes
from axonn_tune.program.lengths import of_lengths, sequences_of
from axonn_tune.program.operations import MATRIX_ALIGNMENT, PLAIN, Arithmetic, Attention, MatMul, Measured, Value
from axonn_tune.program.step import BUNDLED, ONLY, Stage, StepProgram
from axonn_tune.program.types import kinds
from axonn_tune.program.types.sparse import WHOLE_HEADS
from axonn_tune.program.update import whole_symbols
from axonn_tune.specs.model import Layer, Model
from axonn_tune.specs.tuning import Tuning
from axonn_tune.specs.workload import Recompute, Workload

LOSS_CHUNK_TOKENS = 4096
"""Most tokens whose logits exist at one time."""

LONGEST_FUSED_SOFTMAX = 2048

_STEPS_OF_SOFTMAX, _STEPS_OF_SOFTMAX_BACK = 5.0, 5.0
"""Kernels of a softmax that is not fused, forward and backward."""

MFU_CONVENTION = "PaLM, appendix B: recompute not counted, LM head and the masked half of attention counted"

_ONE_RANK: Value = 1.0

_FORWARD_AND_BACKWARD = 3.0
"""The backward pass does twice the forward's GEMMs: one for each gradient."""


@lru_cache(maxsize=4096)
def loss_chunks(tokens: int) -> int:
    """Fewest equal chunks of at most `LOSS_CHUNK_TOKENS` tokens."""
    return next(chunks for chunks in divisors(tokens) if tokens // chunks <= LOSS_CHUNK_TOKENS)


def constants(model: Model, workload: Workload) -> dict[str, float]:
    """Values of the symbols that a whole search shares, but those of layer types and of lengths."""
    return {
        "parts": 2.0 if workload.split_micro_batch else 1.0,
        "grouped": float(model.kv_heads < model.heads),
        "halved": float(workload.split_micro_batch),
    }


def dimensions(
    model: Model,
    workload: Workload,
    axes: Mapping[str, Value],
    *,
    chunks: Value,
    arithmetic: Arithmetic,
    options: StepOptions = BUNDLED,
    stage: Stage = ONLY,
    layers: Sequence[Value] | None = None,
) -> dict[str, Value]:
    """Values of every symbol but `kept`, `unkept` and `held`.

    axes: sizes of all axes and b, the micro-batch; chunks: `loss_chunks(b · S)`, or 1 for whole logits; stage and
    layers: which tables and how many blocks of each layer type the rank holds, all unless told otherwise.
    """
    x, y, z, data, context = (axes[name] for name in ("x", "y", "z", "data", "context"))
    batch_shares: Value = reduce(lambda product, axis: product * axes[axis], BATCH_AXES, _ONE_RANK)
    several = model.pattern is not None or model.mtp_layers > 0 or model.opening > 0
    counts: Sequence[Value] = tuple(map(float, model.counts)) if several else (float(model.layers),)
    counts, hidden = counts if layers is None else layers, float(model.hidden)
    shards, replicas = (z * context, data) if options.context_shards else (z, data * context)
    rows = table_rows(model, x * y, shards, options=options, arithmetic=arithmetic)
    positions = _rounded_up(float(model.max_sequence_length * model.learned_positions), shards, arithmetic)
    table, position = rows * hidden / (x * y * shards), positions * hidden / (y * shards)
    sharded = workload.shard_optimizer_over_data or options.distributed_optimizer
    share = replicas if sharded else 1.0
    counts_of = counted(model, sequence_parallel=options.sequence_parallel)
    lengths = of_lengths(model, workload, axes, options)
    split, known = x * y * shards, {**axes, **lengths}
    weights = _weights_of_types(
        model, workload, known, counts, split=split, share=share, options=options, arithmetic=arithmetic
    )
    ranks = shards, share, weights.expert_z, weights.expert_data if sharded else 0.0
    vectors = partial(_vectors, counts=counts, x=x, y=y, own=options.kernels != "ideal")
    closing = closing_vectors(model) / y if stage.last else 0.0 * y
    held = (
        _sum(weights.stored)
        + _tables(model, stage) * table
        + (position if stage.first else 0.0 * position)
        + _replicated(model, stage, options, table=table, position=position) * (shards - 1.0)
        + _looked_up(model, counts, stage, table=table, arithmetic=arithmetic)
    )
    trained = held if model.tuning is None else _sum(weights.stored) + _trained_tables(model.tuning, stage) * table
    accumulated = float(workload.global_batch) / (batch_shares * axes["b"])
    return {
        "L": _sum(counts),
        "H": hidden,
        **weights.of_types,
        **lengths,
        **constants(model, workload),
        **axes,
        "A": accumulated,
        "C": chunks,
        "V": rows,
        "P": positions,
        **weights.buckets,
        **_of_experts(weights, {**axes, "A": accumulated}, model, workload, options, arithmetic),
        "table_bucket": _rounded_up(table, share, arithmetic),
        "position_bucket": _rounded_up(position, share, arithmetic),
        "parameters": trained,
        **whole_symbols(model, options, counts, axes, ranks, trained),
        "vectors": vectors([one.trains for one in counts_of]) + (closing if model.tuning is None else 0.0 * y),
        **_frozen(weights, counts_of, vectors),
        **({} if model.tuning is None else {"frozen_tables": held - trained + closing}),
        **(_of_bundled(counts_of, counts, z, arithmetic) if options.kernels != "ideal" else {}),
        "divided": arithmetic.smaller(x - 1.0, 1.0),
        **_of_ring(context),
        **_softmax_bytes(model, workload, axes, arithmetic=arithmetic),
        "shared": arithmetic.smaller(y - 1.0, 1.0),
        "alone": 1.0 - arithmetic.smaller(y - 1.0, 1.0),
    }


def _of_experts(
    weights: _Weights,
    axes: Mapping[str, Value],
    model: Model,
    workload: Workload,
    options: StepOptions,
    arithmetic: Arithmetic,
) -> dict[str, Value]:
    """Elements, groups and imbalance of routed experts, if there are some; axes: with A, the micro-batches."""
    if not weights.routed:
        return {}
    return {
        "expert_parameters": _sum(weights.routed),
        "expert_z": weights.expert_z,
        "expert_data": weights.expert_data,
        **_imbalances(axes, weights.expert_data, model, workload, options, arithmetic),
        "exchanged": arithmetic.smaller(axes["expert"] - 1.0, 1.0),
        "joined": arithmetic.smaller(weights.expert_z - 1.0, 1.0),
    }


def _of_ring(context: Value) -> dict[str, Value]:
    """Calls of a ring: a query is in the causal call of its rank's chunks, in all calls that have half of the keys, and
    in half of those that have all, as many of either."""
    return {"ring_calls": 1.0 + 0.75 * (context - 1.0), "merged": 0.75 * (context - 1.0)}


def _frozen(
    weights: _Weights, counts_of: Sequence[TypeCount], vectors: Callable[[Sequence[TypeCount]], Value]
) -> dict[str, Value]:
    """Elements of a rank that do not train, if there are some."""
    if not any(one.trained is not None for one in counts_of):
        return {}
    experts = {"frozen_expert_parameters": _sum(weights.frozen_experts)} if weights.routed else {}
    left = vectors(counts_of) - vectors([one.trains for one in counts_of])
    return {"frozen_parameters": _sum(weights.frozen), "frozen_vectors": left, **experts}


class _Weights(NamedTuple):
    """Matrices of a rank by layer type: symbols and buckets of each, elements of all that train, those of routed
    experts apart, and of all that do not; z and data of experts."""

    expert_z: Value
    expert_data: Value
    of_types: dict[str, Value]
    buckets: dict[str, Value]
    stored: list[Value]
    routed: list[Value]
    frozen: list[Value]
    frozen_experts: list[Value]


def _weights_of_types(
    model: Model,
    workload: Workload,
    axes: Mapping[str, Value],
    counts: Sequence[Value],
    *,
    split: Value,
    share: Value,
    options: StepOptions,
    arithmetic: Arithmetic,
) -> _Weights:
    """axes: with what lengths decide; split: ranks that a matrix is sharded over; share: replicas that optimizer states
    are sharded over."""
    expert_z, expert_data = _left_of_experts(axes, options, arithmetic) if model.has_experts else (1.0, 1.0)
    found = _Weights(expert_z, expert_data, {}, {}, [], [], [], [])
    sharded = workload.shard_optimizer_over_data or options.distributed_optimizer
    counts_of = counted(model, sequence_parallel=options.sequence_parallel)
    whole = options.replicated_adapters and model.tuning is not None
    for layer, one, of, count in zip(model.types, counts_of, suffixes(model), counts, strict=True):
        weights, trained = one.stored(axes["x"], axes["y"]), one.trains.stored(axes["x"], axes["y"])
        block = trained / (axes["x"] * axes["y"] if whole else split)
        found.of_types[f"L{counted_suffix(model, of)}"] = count
        own = {**type_constants(layer), "W": weights, "trained": trained}
        own |= {"span": axes[f"span{of}"]} if f"span{of}" in axes else {}
        if layer.indexer is not None:
            own["padded"] = _rounded_up(layer.heads / axes["x"], float(WHOLE_HEADS), arithmetic)
        found.of_types.update((f"{name}{of}", value) for name, value in own.items())
        found.buckets[f"block_bucket{of}"] = _rounded_up(block, share, arithmetic)
        found.stored.append(count * block)
        found.frozen.append(count * ((weights - trained) / split))
        if layer.experts is not None:
            rank = _expert_weights(one.trains, axes, options) / expert_z
            copies = expert_data * axes["context"] if options.copies_over_context else expert_data
            found.buckets[f"expert_bucket{of}"] = _rounded_up(rank, copies if sharded else 1.0, arithmetic)
            found.routed.append(count * rank)
            found.frozen_experts.append(count * (_expert_weights(one, axes, options) / expert_z - rank))
    if whole:
        for axis in "xy":
            split_by = [
                count * getattr(one.trains, f"over_{axis}") for count, one in zip(counts, counts_of, strict=True)
            ]
            found.buckets[f"adapters_over_{axis}"] = _rounded_up(_sum(split_by) / axes[axis], share, arithmetic)
    return found


def _expert_weights(one: TypeCount, axes: Mapping[str, Value], options: StepOptions) -> Value:
    """Elements of the routed experts of a block that one rank multiplies with, or adds: their biases."""
    split = axes["expert_tensor"] if options.sequence_parallel else axes["x"]
    whole = float(one.each + one.each_biases)
    found: Value = whole * (float(one.routed) / axes["expert"]) / (split * axes["y"])
    return found


def _left_of_experts(axes: Mapping[str, Value], options: StepOptions, arithmetic: Arithmetic) -> tuple[Value, Value]:
    """Ranks that shard and that replicate the weights of an expert: what `grid.expert_levels` leaves."""
    inner, outer = (
        reduce(lambda size, axis: size * axes[axis], names, _ONE_RANK)
        for names in (options.folding.shards, options.folding.replicas)
    )
    taken, shards = axes["expert_tensor"] * axes["expert"], axes["expert_z"]
    inside = arithmetic.smaller(taken, inner)
    return inner / inside * shards, outer / (taken / inside * shards)


_RANKS, _TOKENS = 8.0, 32768.0
"""Of a group of ranks for which the token imbalance of natural routing is stated."""
_PER_DEVIATION = 1.28
"""Standard deviation of the largest of n normal numbers, over theirs by √(2 ln n): π/√6, of a Gumbel distribution."""


def _natural_excess(
    axes: Mapping[str, Value], groups: Value, model: Model, workload: Workload, options: StepOptions
) -> Value:
    """What the fullest rank has above the mean with natural routing, over that of the stated group.

    Each layer of a micro-batch waits for the fullest of EP ranks. Tokens that stand together choose alike, so its
    excess goes with √(2 ln EP) over the root of the group's tokens in a micro-batch: steps of Qwen3-235B lost as much
    with 32 micro-batches as with 256 (yanring/Megatron-MoE-ModelZoo@e865051). At the step's end `groups` wait for the
    one whose sum over all layers and micro-batches is largest: by √(2 ln groups) of that sum's deviations.
    """
    ranks = axes["expert"]
    tokens = float(workload.sequence_length) * axes["b"] / axes["context"] * ranks
    tokens = tokens / axes["x"] * axes["expert_tensor"] if options.sequence_parallel else tokens
    # Of a lone rank, whose share is 1 however, as if of two.
    chosen, passes = np.log(np.maximum(ranks, 2.0)), axes["A"] * float(model.layers) / axes["pipeline"]
    later = _PER_DEVIATION * np.sqrt(2.0 * np.log(np.maximum(groups, 1.0)) / passes) / (2.0 * chosen)
    found = np.sqrt(chosen / np.log(_RANKS) * _TOKENS / tokens) * (1.0 + later)
    return found if isinstance(found, np.ndarray) else float(found)


def _imbalances(
    axes: Mapping[str, Value],
    groups: Value,
    model: Model,
    workload: Workload,
    options: StepOptions,
    arithmetic: Arithmetic,
) -> dict[str, Value]:
    """Tokens of the rank with most over the mean, and at the upper end of that: no more than all, or than fit."""
    capacity = math.inf if options.capacity_factor is None else float(options.capacity_factor)
    stated, excess = options.imbalance, options.natural_imbalance - 1.0
    most: Value = stated or 1.0 + excess * _natural_excess(axes, groups, model, workload, options)
    high = most * MOST_IMBALANCE if stated != 1.0 else most
    return {
        name: arithmetic.smaller(arithmetic.smaller(value, capacity), axes["expert"])
        for name, value in (("imbalance", most), ("fullest", high))
    }


def _sum(values: Sequence[Value]) -> Value:
    """Left fold."""
    return reduce(lambda total, value: total + value, values)


def _vectors(types: Sequence[TypeCount], counts: Sequence[Value], *, x: Value, y: Value, own: bool) -> Value:
    """Elements of norms, biases and sinks of a rank's blocks; own: of the bundled runtime, which has biases of scores
    there."""
    found = list[Value]()
    for one, count in zip(types, counts, strict=True):
        over_y, over_x, whole, _, scores = map(float, one.vectors)
        found.append(count * (over_y / y + over_x / x + (whole + own * scores)))
    return _sum(found)


def _of_bundled(
    types: Sequence[TypeCount], counts: Sequence[Value], z: Value, arithmetic: Arithmetic
) -> dict[str, Value]:
    """What only kernels of the bundled runtime ask for: elements of norms of queries and keys that train, and whether z
    has several ranks."""
    norms = [count * float(one.trains.vectors.heads) for one, count in zip(types, counts, strict=True)]
    return {"head_norms": _sum(norms), "scattered": arithmetic.smaller(z - 1.0, 1.0)}


def _tables(model: Model, stage: Stage) -> float:
    """Tables of a stage; with tied embeddings the last stage has a copy."""
    held = float(stage.first) + float(stage.last)
    return 1.0 if model.tied_embeddings and stage.first and stage.last else held


def _trained_tables(tuning: Tuning, stage: Stage) -> float:
    """Tables of a stage that train, of a model of which not all does."""
    return float(stage.first and "embedding" in tuning.tables) + float(stage.last and "head" in tuning.tables)


def _looked_up(model: Model, counts: Sequence[Value], stage: Stage, *, table: Value, arithmetic: Arithmetic) -> Value:
    """Copy of the embedding that a stage has for its MTP layers alone."""
    if stage.first or (model.tied_embeddings and stage.last) or not model.mtp_layers:
        return 0.0
    copies: Value = arithmetic.smaller(counts[-1], 1.0) * table
    return copies


def _replicated(model: Model, stage: Stage, options: StepOptions, *, table: Value, position: Value) -> Value:
    """Elements of one shard of the tables that a stage does not shard over z."""
    alone = model.tied_embeddings and stage.first
    copy = "embedding" if model.tied_embeddings else "head"
    found: Value = 0.0
    if stage.first and "embedding" in options.replicated_tables:
        found = found + table
    if stage.last and not alone and copy in options.replicated_tables:
        found = found + table
    if stage.first and model.learned_positions and "position" in options.replicated_tables:
        found = found + position
    return found


def _rounded_up(elements: Value, multiple: Value, arithmetic: Arithmetic) -> Value:
    """Elements with padding to a multiple."""
    rounded: Value = arithmetic.floor((elements + (multiple - 1.0)) / multiple) * multiple
    return rounded


def table_rows(model: Model, split: Value, shards: Value, *, options: StepOptions, arithmetic: Arithmetic) -> Value:
    """Rows of the embedding on all ranks: padded, or cut without padding."""
    vocabulary, multiple = float(model.vocab), options.vocabulary_multiple
    if multiple == 0:
        cut: Value = arithmetic.floor(vocabulary / split) * split
        return cut
    padded = _rounded_up(vocabulary, float(multiple) * split, arithmetic) if multiple else vocabulary
    return _rounded_up(padded, split * shards, arithmetic)


def table_alignment(rows: float, *, split: int, element: int) -> int:
    """Alignment of rows of logits in bytes, where the vocabulary is not padded: that of single elements."""
    return math.gcd(int(rows) // split * element, MATRIX_ALIGNMENT)


def padded_alignment(model: Model, options: StepOptions, *, element: int) -> int:
    """The same where the vocabulary is padded: to a multiple of many, or only in shards, which are gathered to one that
    is not."""
    return MATRIX_ALIGNMENT if options.vocabulary_multiple else math.gcd(model.vocab * element, MATRIX_ALIGNMENT)


def _softmax_bytes(
    model: Model, workload: Workload, axes: Mapping[str, Value], *, arithmetic: Arithmetic
) -> dict[str, Value]:
    """Kernels of a softmax, and the bytes of each per score, forward and backward: one, or several in FP32.

    Megatron-LM's fused softmax takes sequences of 17 to 2,048 in multiples of 4, and rows (heads times sequences) in
    multiples of the 4 that one thread block works on (fused_softmax.py). Elsewhere it scales, masks, converts, takes
    the softmax and converts back, one kernel each.
    """
    element, wide = workload.element_sizes.compute, workload.element_sizes.statistics
    length = workload.sequence_length
    rows = axes["b"] * float(model.heads) / axes["x"]
    left = arithmetic.smaller(rows - arithmetic.floor(rows / 4.0) * 4.0, 1.0)
    if not (16 < length <= LONGEST_FUSED_SOFTMAX and length % 4 == 0):
        left = 0.0 * rows + 1.0
    fused, fused_back = 2.0 * element, 3.0 * element
    stepwise, stepwise_back = 6.0 * element + 4.0 * wide, 6.0 * element + 5.0 * wide
    kernels, kernels_back = 1.0 + left * (_STEPS_OF_SOFTMAX - 1.0), 1.0 + left * (_STEPS_OF_SOFTMAX_BACK - 1.0)
    return {
        "scores": (fused + left * (stepwise - fused)) / kernels,
        "scores_back": (fused_back + left * (stepwise_back - fused_back)) / kernels_back,
        "softmax": kernels,
        "softmax_back": kernels_back,
    }


def symbol_values(
    model: Model,
    workload: Workload,
    grid: Grid,
    *,
    micro_batch: int,
    options: StepOptions = BUNDLED,
    stage: Stage = ONLY,
    layers: Sequence[int] | None = None,
) -> dict[str, float]:
    """Values of every symbol but `kept`, `unkept` and `held`, for one grid; `layers`: blocks of each layer type."""
    axes: dict[str, Value] = {axis: float(grid.axis_size(axis)) for axis in ALL_AXES}
    axes["b"] = float(micro_batch)
    tokens = micro_batch * workload.sequence_length // grid.context
    chunks = float(options.loss_chunks or loss_chunks(tokens))
    found = dimensions(
        model,
        workload,
        axes,
        chunks=chunks,
        arithmetic=PLAIN,
        options=options,
        stage=stage,
        layers=None if layers is None else tuple(map(float, layers)),
    )
    return {name: float(value) for name, value in found.items()}


def model_flops(
    model: Model, workload: Workload, *, masked: bool = True, windows: bool = False, multiple: int = 1
) -> float:
    """FLOPs one step needs, all ranks: 3·(2·(L·W + V·H)·tokens + 4·S·Q·L·tokens), arXiv 2204.02311 appendix B.

    W: of each layer type what a token meets, of which what does not train has no gradient, so twice the forward's, and
    what comes before all that trains none of its input either; 4·Q: 2·heads·(query and value width); V·H for each MTP
    layer, too. Sequences that differ in length count each by its own.
    masked: False counts only keys that a causal query sees, in its window: (S + 1)/2 in place of S. windows: of layers
    with a window, scores inside alone, with the masked half. multiple: that each sequence is padded to.
    """
    of_types = list(zip(counted(model), model.counts, strict=True))
    weights = sum(count * one.active_weights for one, count in of_types)
    left = (2 * one.active_weights - one.trains.active_weights - one.passes.active_weights for one, _ in of_types)
    frozen = sum(count * each for each, (_, count) in zip(left, of_types, strict=True))
    head = model.vocab * model.hidden * (1 + model.mtp_layers)
    weights += head
    if (tuning := model.tuning) is not None:
        frozen += 0 if {"head", "embedding"} & {*tuning.tables} else head
    total = 0.0
    for length, number in sequences_of(workload, multiple):
        attention, ended = 0.0, 0.0
        for (layer, count), (one, _) in zip(model.by_type, of_types, strict=True):
            keys = length if masked and layer.indexer is None else layer.keys(length)
            keys = min(keys, 2.0 * layer.keys(length)) if windows else keys
            each = 2 * count * layer.scored_width * keys
            if layer.mixer is not None:
                each += 2 * count * layer.mixer.pair_width * layer.mixer.pairs(length)
            attention, ended = attention + each, ended + each * (not one.mixes)
        forward = 2.0 * weights + attention
        # Without a block that trains no gradient goes through one.
        through = _FORWARD_AND_BACKWARD * forward - 2.0 * (frozen + ended)
        total += (through if tuning is None or tuning.adapts else forward + 2.0 * head) * (number * length)
    return total


def logged_flops(
    framework: Framework, model: Model, workload: Workload, *, grid: Grid, recompute: Recompute
) -> float | None:
    """FLOPs of one step, all ranks, as the framework's log counts them; None if it prints no such number. Logs count a
    model of which not all trains as one that trains whole, without adapters, or by a rule of their own
    (`FlopCount.tuned`)."""
    model, count = model.tuned(None), framework.logged
    count = count and count.of(model, workload)
    if count is None or (count.where and all(grid.axis_size(axis) == 1 for axis in count.where)):
        return None
    if model.mixed and count.weights in ("square", "whole_groups"):
        return None
    rows = float(model.vocab)
    if count.padded:
        rows = float(table_rows(model, float(grid.x * grid.y), 1.0, options=framework.step, arithmetic=PLAIN))
    again, total = count.repeated.get(recompute, ()), 0.0
    passes = {part: _FORWARD_AND_BACKWARD + (part in again) for part in ("blocks", "scores", "head")}
    if count.frozen:
        passes |= {part: passes[part] - 1 for part in ("blocks", "head")}
    plain = ((workload.sequence_length, workload.global_batch),)
    for length, number in sequences_of(workload) if count.samples else plain:
        scored = (
            2.0 * times * layer.scored_width * _counted_keys(count, layer, length) for layer, times in model.by_type
        )
        forward = {
            "blocks": 2.0 * _counted_weights(count, model, float(length)),
            "scores": sum(scored),
            "head": 2.0 * rows * model.hidden * (1 + model.mtp_layers),
        }
        total += number * length * sum(passes[part] * flops for part, flops in forward.items())
    return total


def _counted_weights(count: FlopCount, model: Model, length: float) -> float:
    """Elements of the blocks that a count multiplies a token with, in sequences of a length."""
    hidden = float(model.hidden)
    if count.weights == "square":
        return model.layers * 12.0 * hidden**2
    if count.weights == "whole_groups":
        attention = (2 + 2 // (model.heads // model.kv_heads)) * hidden
        return model.layers * hidden * (attention + model.plain.up_width + model.ffn)
    if count.weights == "parameters":
        return float(active_parameters(model) - model.vocab * model.hidden * (1 if model.tied_embeddings else 2))
    of_types = zip(counted(model), model.counts, strict=True)
    blocks = sum(number * (one.active_weights - one.router) for one, number in of_types)
    others = (number * kind.logged(layer, length) for kind in kinds() for layer, number in model.by_type)
    return float(blocks + sum(others))


def _counted_keys(count: FlopCount, layer: Layer, length: float) -> float:
    """Keys of a query, on average, by a count: its share of the sequence, or those in a window."""
    window = layer.window
    if layer.indexer is not None or (count.windows and window is not None and window < length):
        return layer.keys(float(length))
    return count.scores * length


def step_tokens(workload: Workload) -> int:
    """Tokens in one step, all ranks; with pads where sequences fill packs or are cut."""
    return workload.global_batch * workload.sequence_length


def executed_flops(program: StepProgram, values: Mapping[str, Value], stage: Stage = ONLY) -> Value:
    """FLOPs of GEMMs, attention and scans that one rank of a stage executes in a step, recompute included."""
    total: Value = 0.0
    for step, count in program.calls(stage):
        if isinstance(step, MatMul | Attention | Measured):
            total = total + count.evaluate(values) * step.flops.evaluate(values)
    return total
