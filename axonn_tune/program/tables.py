"""Embedding, learned positions and LM head with the loss, forward and backward.

The embedding `E[V_xy, H]` is stored split over z; learned positions are `P[S, H_y]`, stored split over z. Both are
padded to divide. In chunks no rank holds more logits than `[M/C, V_xy]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from axonn_tune.frameworks.step import LossKind
from axonn_tune.program.inputs import (
    CHUNKS,
    DIVIDED,
    HALVED,
    POSITIONS,
    SHARED,
    TABLE,
    WIDE_LOGITS,
    H,
    LayerInputs,
    V,
    X,
    Y,
)
from axonn_tune.program.layers import (
    copies,
    gather_weight,
    moves,
    norm_backward,
    norm_forward,
    quantized,
    quantized_weight,
    reduce_weight_gradient,
    reduction,
    sequence_gather,
)
from axonn_tune.program.operations import ONCE, Array, Collective, Kernel, MatMul, Operation, Size, Traffic


class Loss(NamedTuple):
    """Copies of the logits: in the compute type, in FP32, and further ones in FP32 where x splits the vocabulary."""

    narrow: float
    wide: float
    over_x: float = 0.0


LOSSES: dict[LossKind, Loss] = {
    # The gradient overwrites the logits: a chunk of the bundled runtime; [TE] up to 2.17, which [M] pins, and where
    # --cross-entropy-fusion-impl te asks for it.
    "in_place": Loss(1, 0),
    # One graph: logits are saved, and their gradient is written. With loss_parallel, whose all-reduces end fusion, the
    # gradient is saved in FP32 (AOT graphs of [TT]'s loss). llm-foundry's fused loss and XLA take as much.
    "fused": Loss(2, 0, over_x=0.5),
    # FP32 logits become softmax and gradient in place, which is then cast: [M] since 2024-06, fused by its JIT or not;
    # [TE] from 2.18 on, which writes an FP32 gradient beside the logits.
    "softmax": Loss(1, 1),
    # Logits cast to FP32 and shifted into a second copy: [M] before that.
    "copied": Loss(1, 2),
    # Operator by operator, as `cross_entropy(logits.float(), …)` of [TT] without a compiler and of transformers: in the
    # backward pass log-probabilities, the gradient of nll_loss and that of log_softmax; loss_parallel has their
    # exponential, too. The logits are gone by then, but these copies do not fit into the hole that they leave.
    "eager": Loss(1, 3, over_x=1),
}
"""How the arrays of a cross-entropy live, by the name that `step.loss` takes: copies of the logits `[M, V_xy]` that are
there together, at most.

A copy is in the compute type (BF16), or in FP32. Sources: [TT] pytorch/torchtitan, torchtitan/components/loss.py of
0.1.0 to 0.2.2, and torch 2.13, torch/distributed/tensor/parallel/loss.py; [M] NVIDIA/Megatron-LM@d98e8a64,
megatron/core/tensor_parallel/cross_entropy.py and core/fusions/fused_cross_entropy.py; [TE]
NVIDIA/TransformerEngine@d0067d0d, transformer_engine/pytorch/triton/cross_entropy.py.
"""


def tables(given: LayerInputs) -> Iterator[tuple[str, Size]]:
    """Tables of a model that train, with the elements that z shards."""
    held = [("embedding", TABLE)]
    held += [] if given.model.tied_embeddings else [("head", TABLE)]
    held += [("position", POSITIONS)] if given.model.learned_positions else []
    yield from (one for one in held if given.trains_table(one[0]))


def gather_table(table: str, elements: Size, given: LayerInputs) -> list[Operation]:
    """All-gather of a table over z for the forward pass, unless it is replicated."""
    return [] if given.replicated(table) else gather_weight(table, elements, given, phase="forward")


def reduce_table_gradient(table: str, elements: Size, given: LayerInputs) -> list[Operation]:
    """As of a weight; a table that is not split over z only adds its gradient, and one that does not train has none."""
    if not given.trains_table(table):
        return []
    if not given.replicated(table):
        return reduce_weight_gradient(table, elements, given)
    if given.options.fused_accumulation:
        return []
    return [Kernel("backward", table, (given.element + 2.0 * given.gradient_bytes) * elements)]


def embedding_forward(given: LayerInputs) -> list[Operation]:
    """Look-up in the local rows, `[M, H]` reduce-scattered over y to `[M, H_y]`, summed over x."""
    element, tokens = given.element, given.tokens
    size = element * tokens * H / Y
    operations = [
        *gather_table("embedding", TABLE, given),
        moves("forward", "embedding", given.kernels.looked_up, tokens * H, given),
        *copies("forward", "embedding", tokens * H, given, calls=SHARED),
        Collective("reduce_scatter", "y", "forward", "embedding", element * tokens * H),
        reduction("x", "forward", "embedding", size, given, role="other", calls=ONCE),
    ]
    if given.model.learned_positions:
        operations += gather_table("position", POSITIONS, given)
        added = Traffic(1, 2 if given.launched else 3)
        operations.append(moves("forward", "position", added, given.outside(tokens) * H / Y, given))
    return operations


def embedding_backward(given: LayerInputs) -> list[Operation]:
    """Position gradient; then `[M, H_y]` all-gathered over y and added into the local rows. Nothing where neither
    trains: what comes before it in the backward pass needs no gradient of its input."""
    if not given.trains_table("embedding"):
        return []
    element, tokens = given.element, given.tokens
    operations: list[Operation] = []
    if given.model.learned_positions:
        operations.append(Kernel("backward", "position", element * given.outside(tokens) * H / Y))
        if given.launched:
            operations.append(moves("backward", "position", Traffic(2, 1), POSITIONS, given))
        operations += reduce_table_gradient("position", POSITIONS, given)
    return [
        *operations,
        *sequence_gather("backward", "embedding", given, tokens=tokens, calls=ONCE, role="other"),
        Collective("all_gather", "y", "backward", "embedding", element * tokens * H),
        *copies("backward", "embedding", tokens * H, given, calls=SHARED),
        moves("backward", "embedding", given.kernels.scattered, tokens * H, given),
        *([moves("backward", "embedding", Traffic(1, 1), TABLE, given)] if given.launched else []),
        *reduce_table_gradient("embedding", TABLE, given),
    ]


def head(given: LayerInputs) -> list[Operation]:
    """Final norm, `h[M, H]` gathered over y, then logits, loss and their gradients chunk by chunk.

    Each chunk's gradients follow its loss, so logits are never saved: `dh[M, H]` is reduce-scattered over
    y and summed over x, `dE[V_xy, H]` reduce-scattered over z.
    """
    element, tokens = given.element, given.tokens
    size = element * tokens * H
    reduced = reduce_table_gradient("head", TABLE, given)
    # torchtitan's chunks add into a buffer in FP32 (torchtitan 0.3.0, components/loss.py, GradAccumulator).
    summed = max(element, given.elements.statistics) if given.options.loss_chunks > 1 else element
    kind = "LM head input and gradient"
    held = Array("head input", kind, size), Array("head gradient", kind, summed * tokens * H)
    passed: list[Operation] = []
    if given.passes_gradients:
        passed = [
            Collective("reduce_scatter", "y", "backward", "head", size),
            reduction("x", "backward", "head", size / Y, given, role="other", calls=ONCE),
        ]
    return [
        *copies("forward", "head", given.outside(tokens) * H / Y, given, calls=HALVED),
        *norm_forward("head.norm", given, tokens=tokens, calls=ONCE),
        *gather_table("head", TABLE, given),
        *sequence_gather("forward", "head", given, tokens=tokens, calls=ONCE, role="other"),
        Collective("all_gather", "y", "forward", "head", size, makes=(held[0],)),
        *copies("forward", "head", tokens * H, given, calls=SHARED),
        *_loss_chunk(given, tokens=tokens / CHUNKS, gradient=held[1]),
        *(step for step in reduced if isinstance(step, Collective)),
        *copies("backward", "head", tokens * H, given, calls=SHARED),
        *passed,
        *(step for step in reduced if not isinstance(step, Collective)),
        *(norm_backward("head.norm", given, tokens=tokens, calls=ONCE, summed=False) if passed else ()),
    ]


def _loss_chunk(given: LayerInputs, *, tokens: Size, gradient: Array) -> list[Operation]:
    """One chunk: `logits[t, V_xy] = h · Eᵀ`, cross-entropy over xy, `dh = dlogits · E`, `dE = dlogitsᵀ · h`.

    Unless it is in chunks, the input is gathered again beside the dh GEMM with sequence parallelism.
    """
    rows, sizes, aligned, split = V / (X * Y), given.elements, given.table_alignment, given.options.loss_parallel
    words, over = words_of_loss(given), "xy" if split else "y"
    reductions = given.options.loss_reductions
    names = ("loss.max", "loss.sums") if len(reductions) == 2 else ("loss",) * len(reductions)
    logits = tuple(_logits(given, tokens * words))
    whole = given.element * tokens * words
    narrow = given.format is not None and given.options.narrow_head
    weight = quantized_weight("forward", "head", rows * H, given) if narrow else ()
    gradients = quantized("backward", "head", tokens * rows, given, calls=CHUNKS) if narrow else ()
    back = partial(MatMul, "backward", "head", calls=CHUNKS, narrow=narrow, alignment=aligned)
    return [
        *(quantized("forward", "head", tokens * H, given, calls=CHUNKS) if narrow else ()),
        *weight,
        MatMul("forward", "head", tokens, rows, H, "NT", CHUNKS, narrow=narrow, makes=logits),
        *([] if split else [Collective("all_gather", "x", "forward", "loss", whole, calls=CHUNKS)]),
        *(
            Collective("all_reduce", over, "forward", name, numbers * sizes.statistics * tokens, calls=CHUNKS)
            for name, numbers in zip(names, reductions, strict=True)
        ),
        moves("forward", "loss", given.kernels.loss, tokens * words, given, calls=CHUNKS),
        *_gathers_for_head_backward(given),
        *gradients,
        *([back(tokens, H, rows, "NN", makes=(gradient,))] if given.passes_gradients else []),
        *([back(rows, H, tokens, "TN")] if given.trains_table("head") else []),
    ]


def words_of_loss(given: LayerInputs) -> Size:
    """Words of the vocabulary whose logits a rank has in its loss."""
    return V / (X * Y) if given.options.loss_parallel else V / Y


def _logits(given: LayerInputs, elements: Size) -> Iterator[Array]:
    """Copies of the logits that a loss holds together."""
    loss, wide = LOSSES[given.options.loss], given.elements.statistics * elements
    kind = "logits" if given.options.loss_chunks == 1 else "logits of one chunk"
    yield Array("logits", kind, loss.narrow * given.element * elements)
    if loss.wide:
        yield Array("FP32 logits", WIDE_LOGITS, loss.wide * wide)
    if loss.over_x and given.options.loss_parallel:
        yield Array("FP32 logits over x", WIDE_LOGITS, loss.over_x * wide * DIVIDED)


def _gathers_for_head_backward(given: LayerInputs) -> list[Operation]:
    """The LM head's weight and, for its gradient, its input once more; in chunks both are there."""
    if given.options.loss_chunks != 1:
        return []
    weight: list[Operation] = []
    if given.options.head_gathered_again and not given.replicated("head"):
        # Not overlappable: the loss directly follows the forward GEMM.
        for step in gather_weight("head", TABLE, given, phase="backward"):
            alone = {"role": "other"} if isinstance(step, Collective) else {"prepares_gather": False}
            weight.append(replace(step, **alone))
    if not given.trains_table("head"):
        return weight
    return [*weight, *sequence_gather("backward", "head", given, tokens=given.tokens, calls=ONCE, role="input_gather")]
