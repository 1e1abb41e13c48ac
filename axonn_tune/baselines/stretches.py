"""The operations of Megatron-LM's block, embedding and head on one rank, in the order they are issued.

Letters as in `axonn_tune.program.layers`; x stands for the tensor axis, of t ranks. Column-parallel
layers (qkv, fc1) hold W[K, N_x], row-parallel ones (attention output, fc2) W[K_x, N]. Between blocks
the activations are I[M, H] on every rank, or with sequence parallelism I[M_x, H], gathered before
each column-parallel layer and reduce-scattered after each row-parallel one.

Sources: Shoeybi et al., arXiv 1909.08053, section 3; Korthikanti et al., arXiv 2205.05198, section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from axonn_tune.baselines.layout import Software
from axonn_tune.program.layers import TOKENS, F, G, H, N, Q, S, X
from axonn_tune.program.operations import MATRIX_ALIGNMENT, Attention, Collective, Computation, Kernel, MatMul, Phase
from axonn_tune.program.size import Size, as_size, symbol
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import ElementSizes, Recompute

V = symbol("V")
LONGEST_FUSED_SOFTMAX = 2048
WHOLE = TOKENS * H


@dataclass(frozen=True)
class Stretch:
    """Computation, and the collectives over the tensor group that follow it, or run beside it if `beside`."""

    computation: tuple[Computation, ...] = ()
    communication: tuple[Collective, ...] = ()
    beside: bool = False


Stretches: TypeAlias = tuple[Stretch, ...]


@dataclass(frozen=True)
class Block:
    """What the blocks of one program share."""

    model: Model
    elements: ElementSizes
    software: Software
    sequence_parallel: bool
    fused_softmax: bool = True
    table_alignment: int = MATRIX_ALIGNMENT

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return self.elements.compute

    @property
    def head_alignment(self) -> int:
        """Bytes at whose multiples each head's rows start."""
        return math.gcd(self.model.head_dim * self.element, MATRIX_ALIGNMENT)

    @property
    def outside(self) -> Size:
        """Tokens a rank works on outside the tensor-parallel layers."""
        return TOKENS / X if self.sequence_parallel else TOKENS

    def send(self, kind: str, phase: Phase, layer: str) -> tuple[Collective, ...]:
        """Collective of one `[M, H]` buffer over the tensor group.

        gather: before a split layer; reduce: after it. Without sequence parallelism a gather is not
        needed and a reduction is an all-reduce.
        """
        size = self.element * WHOLE
        if kind == "gather":
            return (Collective("all_gather", "x", phase, layer, size),) if self.sequence_parallel else ()
        return (Collective("reduce_scatter" if self.sequence_parallel else "all_reduce", "x", phase, layer, size),)


def block_forward(block: Block, *, phase: Phase = "forward") -> Stretches:
    """One block: two collectives without sequence parallelism, four with it."""
    e = block.element
    return (
        Stretch((_norm(block, "attention.norm", phase),), block.send("gather", phase, "attention.qkv")),
        Stretch(
            (
                MatMul(phase, "attention.qkv", TOKENS, N / X, H, "NN"),
                *attention_core(block, phase),
                MatMul(phase, "attention.output", TOKENS, H, Q / X, "NN"),
            ),
            block.send("reduce", phase, "attention.output"),
        ),
        Stretch(
            (_residual(block, "attention.output", phase), _norm(block, "mlp.norm", phase)),
            block.send("gather", phase, "mlp.fc1"),
        ),
        Stretch(
            (
                MatMul(phase, "mlp.fc1", TOKENS, G / X, H, "NN"),
                Kernel(phase, "mlp.activation", e * (3.0 if block.model.gated else 2.0) * TOKENS * F / X),
                MatMul(phase, "mlp.fc2", TOKENS, H, F / X, "NN"),
            ),
            block.send("reduce", phase, "mlp.fc2"),
        ),
        Stretch((_residual(block, "mlp.fc2", phase),)),
    )


def block_backward(block: Block, *, recompute: Recompute) -> Stretches:
    """What was not kept once more, then all gradients; full recomputation repeats the whole block, fc2 included."""
    e = block.element
    again = block_forward(block, phase="recompute") if recompute == "full" else ()
    core_again = attention_core(block, "recompute") if recompute == "selective" else ()
    return (
        *again,
        *_row_backward(block, "mlp.fc2", F / X),
        Stretch((Kernel("backward", "mlp.activation", e * (5.0 if block.model.gated else 3.0) * TOKENS * F / X),)),
        *_column_backward(block, "mlp.fc1", G / X),
        Stretch((_norm_backward(block, "mlp.norm"),)),
        Stretch(core_again),
        *_row_backward(block, "attention.output", Q / X),
        Stretch(attention_core_backward(block)),
        *_column_backward(block, "attention.qkv", N / X),
        Stretch((_norm_backward(block, "attention.norm"),)),
    )


def _row_backward(block: Block, layer: str, width: Size) -> Iterator[Stretch]:
    """`dI[M, K_x] = dO · Wᵀ` and `dW[K_x, H] = Iᵀ · dO`: dO is gathered first if it is split."""
    yield Stretch(tuple(_dropout_backward(block, layer)), block.send("gather", "backward", layer))
    yield Stretch(
        (
            MatMul("backward", layer, TOKENS, width, H, "NT"),
            MatMul("backward", layer, width, H, TOKENS, "TN"),
            *_after_weight_gradient(block, layer, width, bias=H),
        )
    )


def _column_backward(block: Block, layer: str, width: Size, *, alignment: int = MATRIX_ALIGNMENT) -> Iterator[Stretch]:
    """Both gradients of `O[M, N_x] = I[M, H] · W[H, N_x]`; `alignment`: of the rows of dO, bytes.

    The input is gathered again beside the input gradient's product, and that gradient is reduced
    beside the weight gradient's product (Korthikanti et al., section 4.2.2).
    """
    beside = block.software.tensor_overlap
    yield Stretch(
        (MatMul("backward", layer, TOKENS, H, width, "NT", alignment=alignment),),
        block.send("gather", "backward", layer),
        beside=beside,
    )
    yield Stretch(
        (
            MatMul("backward", layer, H, width, TOKENS, "TN", alignment=alignment),
            *_after_weight_gradient(block, layer, width, bias=width),
        ),
        block.send("reduce", "backward", layer),
        beside=beside,
    )


def _after_weight_gradient(block: Block, layer: str, width: Size, *, bias: Size) -> Iterator[Kernel]:
    """Bias gradient; adding the weight gradient to the accumulated one, unless the product does it."""
    if block.model.biases:
        yield Kernel("backward", layer, block.element * TOKENS * bias)
    if not block.software.fused_accumulation:
        yield Kernel("backward", layer, (block.element + 2.0 * block.elements.main) * H * width)


def _norm(block: Block, layer: str, phase: Phase) -> Kernel:
    return Kernel(phase, layer, 3.0 * block.element * block.outside * H)


def _norm_backward(block: Block, layer: str) -> Kernel:
    return Kernel("backward", layer, 4.0 * block.element * block.outside * H)


def _residual(block: Block, layer: str, phase: Phase) -> Kernel:
    """Bias, dropout with its mask of one byte, and the addition, in one kernel."""
    return Kernel(phase, layer, (3.0 * block.element + block.software.dropout) * block.outside * H)


def _dropout_backward(block: Block, layer: str) -> Iterator[Kernel]:
    if block.software.dropout:
        yield Kernel("backward", layer, (2.0 * block.element + 1.0) * block.outside * H)


def attention_core(block: Block, phase: Phase) -> tuple[Computation, ...]:
    """softmax(QKᵀ)V of the rank's heads; unfused, the scores `[b, heads_x, S, S]` are written and read again."""
    biased = Kernel(phase, "attention.core", 2.0 * block.element * TOKENS * N / X)
    if block.software.fused_attention:
        return biased, Attention(phase, "attention.core", 4.0 * TOKENS * S * Q / X)
    rows, width = TOKENS * (Q / X) / block.model.head_dim, as_size(block.model.head_dim)
    alignment = block.head_alignment
    return (
        biased,
        MatMul(phase, "attention.core", rows, S, width, "NT", alignment=alignment, batched=True),
        *_softmax(block, phase, rows * S),
        MatMul(phase, "attention.core", rows, width, S, "NN", alignment=alignment, batched=True),
    )


def _softmax(block: Block, phase: Phase, scores: Size) -> Iterator[Kernel]:
    """Scaled masked softmax of all scores, in one kernel or step by step in fp32, then dropout."""
    e, wide = block.element, block.elements.statistics
    # Scale, mask, to fp32, softmax, back: what Megatron-LM does where its fused kernel refuses a shape.
    by_step = (2.0 * e, 2.0 * e, e + wide, 2.0 * wide, wide + e)
    for moved in (2.0 * e,) if block.fused_softmax else by_step:
        yield Kernel(phase, "attention.core", moved * scores)
    if block.software.dropout:
        yield Kernel(phase, "attention.core", (2.0 * e + 1.0) * scores)


def _softmax_backward(block: Block, scores: Size) -> Iterator[Kernel]:
    e, wide = block.element, block.elements.statistics
    if block.software.dropout:
        yield Kernel("backward", "attention.core", (2.0 * e + 1.0) * scores)
    by_step = (e + wide, 3.0 * wide, wide + e, 2.0 * e, 2.0 * e)
    for moved in (3.0 * e,) if block.fused_softmax else by_step:
        yield Kernel("backward", "attention.core", moved * scores)


def fused_softmax_takes(*, sequence_length: int, rows: int) -> bool:
    """Whether Megatron-LM's fused softmax takes scores of `rows` heads times sequences (fused_softmax.py).

    Sequences of 17 to 2,048 in multiples of 4, and rows in multiples of the 4 that one thread block works on.
    """
    return 16 < sequence_length <= LONGEST_FUSED_SOFTMAX and sequence_length % 4 == 0 and rows % 4 == 0


def attention_core_backward(block: Block) -> tuple[Computation, ...]:
    """Gradient of `attention_core`: five products in one kernel, or four with the scores kept."""
    unbiased = Kernel("backward", "attention.core", 2.0 * block.element * TOKENS * N / X)
    if block.software.fused_attention:
        return Attention("backward", "attention.core", 10.0 * TOKENS * S * Q / X, backward=True), unbiased
    rows, width = TOKENS * (Q / X) / block.model.head_dim, as_size(block.model.head_dim)
    alignment = block.head_alignment
    scores = MatMul("backward", "attention.core", rows, S, width, "NT", alignment=alignment, batched=True)
    values = MatMul("backward", "attention.core", rows, width, S, "NN", alignment=alignment, batched=True)
    return scores, values, *_softmax_backward(block, rows * S), values, values, unbiased


def embedding(block: Block) -> Stretches:
    """Look-up in a table split over the vocabulary, forward and backward."""
    e = block.element
    forward = [Kernel("forward", "embedding", 2.0 * e * WHOLE)]
    if block.model.learned_positions:
        forward.append(Kernel("forward", "position", 3.0 * e * block.outside * H))
    return (
        Stretch(tuple(forward), block.send("reduce", "forward", "embedding")),
        Stretch((), block.send("gather", "backward", "embedding")),
        Stretch((Kernel("backward", "embedding", 3.0 * e * WHOLE),)),
    )


def head(block: Block) -> Stretches:
    """Final norm, `logits[M, V_x]`, cross-entropy with three small all-reduces, and all gradients."""
    e, rows = block.element, V / X
    sums = tuple(Collective("all_reduce", "x", "forward", "loss", block.elements.statistics * TOKENS) for _ in range(3))
    return (
        Stretch((_norm(block, "head.norm", "forward"),), block.send("gather", "forward", "head")),
        Stretch((MatMul("forward", "head", TOKENS, rows, H, "NT"),), sums),
        Stretch((Kernel("forward", "loss", 5.0 * e * TOKENS * rows),)),
        *_column_backward(block, "head", rows, alignment=block.table_alignment),
        Stretch((_norm_backward(block, "head.norm"),)),
    )


def collectives(stretches: Iterable[Stretch]) -> list[Collective]:
    """All collectives, in order."""
    return [step for stretch in stretches for step in stretch.communication]


def computations(stretches: Iterable[Stretch]) -> list[Computation]:
    """All computation, in order."""
    return [step for stretch in stretches for step in stretch.computation]
