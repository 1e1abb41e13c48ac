"""The 4D operations of each layer, in the order a rank issues them when nothing overlaps.

Letters: M tokens of one rank's micro-batch (of one half of it when split), the others as in
`axonn_tune.specs.model`. `A[M, K_y]` is an array whose dim K is split over axis y. Each function
returns what one rank does; arrays are local, sizes of collectives those of the full buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

from axonn_tune.program.operations import ONCE, Attention, Collective, Kernel, MatMul, Operation, Phase
from axonn_tune.program.size import Size, symbol
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import ElementSizes

H, Q, N, F, G, S = (symbol(name) for name in ("H", "Q", "N", "F", "G", "S"))
X, Y, Z = (symbol(name) for name in ("x", "y", "z"))
PARTS = symbol("parts")
UNKEPT_SHARE = symbol("unkept") / symbol("L")
"""Of the blocks, those whose gathered weights are not kept, and so are gathered again for the backward pass."""

TOKENS = symbol("b") * S
"""Tokens of one rank's micro-batch."""

PART = TOKENS / PARTS
"""Tokens of one half when the micro-batch is split, all of them otherwise."""


@dataclass(frozen=True)
class Linear:
    """`O[M, n] = Σ_reduced I[M, k] · W[k, n]`, all sizes local; the W block is stored split over z.

    A normal layer has I[M, K_y], W[K_y, N_x]: outputs are summed over y, input gradients over x. A
    transposed one has x and y swapped, so that it takes the normal one's output as it is.
    """

    layer: str
    k: Size
    n: Size
    output_axis: str
    input_axis: str


QKV = Linear("attention.qkv", H / Y, N / X, "y", "x")
ATTENTION_OUTPUT = Linear("attention.output", Q / X, H / Y, "x", "y")
FC1 = Linear("mlp.fc1", H / Y, G / X, "y", "x")
FC2 = Linear("mlp.fc2", F / X, H / Y, "x", "y")
BLOCK_LINEARS = (QKV, ATTENTION_OUTPUT, FC1, FC2)


@dataclass(frozen=True)
class Context:
    """What the layers of one program share. `sharded`: main weights are split over data, too."""

    model: Model
    elements: ElementSizes
    sharded: bool = False

    @property
    def norm_statistics(self) -> int:
        """Numbers per token that a norm combines over y: mean and M2, or the sum of squares alone."""
        return 1 if self.model.family == "llama" else 2


def gather_weight(
    layer: str, rows_by_columns: Size, context: Context, *, phase: Phase, calls: Size = ONCE
) -> list[Operation]:
    """All-gather of one weight block over z, from the main copy's shard rounded to the compute type.

    With main weights split over data there is a copy in the compute type already.
    """
    element = context.elements.compute
    rounds = context.elements.main != element and not context.sharded
    rounding = (context.elements.main + element) * rows_by_columns / Z if rounds else ONCE * 0.0
    return [
        Kernel(phase, layer, rounding, calls, prepares_gather=True),
        Collective("all_gather", "z", phase, layer, element * rows_by_columns, "weight", calls),
    ]


def reduce_weight_gradient(layer: str, rows_by_columns: Size, context: Context) -> list[Operation]:
    """Reduce-scatter of one weight gradient over z, then its addition to the accumulated shard."""
    element = context.elements.compute
    return [
        Collective("reduce_scatter", "z", "backward", layer, element * rows_by_columns, "weight_gradient"),
        Kernel("backward", layer, (element + 2 * context.elements.main) * rows_by_columns / Z, accumulates=True),
    ]


def linear_forward(linear: Linear, context: Context, *, phase: Phase) -> list[Operation]:
    """Product and all-reduce of the output: `O[M, n] = Σ_output_axis I[M, k] · W[k, n]`."""
    size = context.elements.compute * PART * linear.n
    return [
        MatMul(phase, linear.layer, PART, linear.n, linear.k, "NN", PARTS),
        Collective("all_reduce", linear.output_axis, phase, linear.layer, size, "output", PARTS),
    ]


def linear_backward(linear: Linear, context: Context) -> list[Operation]:
    """Both gradients: `dI[M, k] = Σ_input_axis dO · Wᵀ`, and `dW[k, n] = Σ_z Iᵀ · dO`."""
    element = context.elements.compute
    bias = [Kernel("backward", linear.layer, element * PART * linear.n, PARTS)] if context.model.biases else []
    return [
        MatMul("backward", linear.layer, PART, linear.k, linear.n, "NT", PARTS),
        Collective(
            "all_reduce",
            linear.input_axis,
            "backward",
            linear.layer,
            element * PART * linear.k,
            "input_gradient",
            PARTS,
        ),
        MatMul("backward", linear.layer, linear.k, linear.n, PART, "TN", PARTS),
        *bias,
        *reduce_weight_gradient(linear.layer, linear.k * linear.n, context),
    ]


def norm_forward(layer: str, context: Context, *, tokens: Size, calls: Size) -> list[Operation]:
    """Exact norm of `[M, H_y]`: the shard's statistics are all-gathered over y and combined."""
    statistics = context.norm_statistics * context.elements.statistics * tokens * Y
    return [
        Collective("all_gather", "y", "forward", layer, statistics, calls=calls),
        Kernel("forward", layer, 3.0 * context.elements.compute * tokens * H / Y, calls),
    ]


def norm_recompute(layer: str, context: Context) -> list[Operation]:
    """Norm output once more, from the saved input and statistics: nothing is sent."""
    return [Kernel("recompute", layer, 2.0 * context.elements.compute * PART * H / Y, PARTS)]


def norm_backward(layer: str, context: Context, *, tokens: Size, calls: Size) -> list[Operation]:
    """Gradient of the norm; the sums over the hidden dim are all-reduced over y."""
    sums = context.norm_statistics * context.elements.statistics * tokens
    return [
        Collective("all_reduce", "y", "backward", layer, sums, calls=calls),
        Kernel("backward", layer, 4.0 * context.elements.compute * tokens * H / Y, calls),
    ]


def attention_core(context: Context, *, phase: Phase) -> list[Operation]:
    """Biases or rotary positions, then softmax(QKᵀ)V on heads_x: `[M, N_x] → [M, Q_x]`, replicated over y."""
    return [
        Kernel(phase, "attention.core", 2.0 * context.elements.compute * PART * N / X, PARTS),
        Attention(phase, "attention.core", 4.0 * PART * S * Q / X, calls=PARTS),
    ]


def attention_core_backward(context: Context) -> list[Operation]:
    """Gradient of `attention_core`: five products for its two, since fused attention computes the scores again."""
    return [
        Attention("backward", "attention.core", 10.0 * PART * S * Q / X, backward=True, calls=PARTS),
        Kernel("backward", "attention.core", 2.0 * context.elements.compute * PART * N / X, PARTS),
    ]


def activation(context: Context, *, phase: Phase) -> list[Operation]:
    """GELU or SwiGLU, `[M, G_x] → [M, F_x]`: reads G, writes F."""
    element = context.elements.compute
    return [Kernel(phase, "mlp.activation", element * (2.0 if not context.model.gated else 3.0) * PART * F / X, PARTS)]


def activation_backward(context: Context) -> list[Operation]:
    """Gradient of the activation: reads G and dF, writes dG."""
    element = context.elements.compute
    return [
        Kernel("backward", "mlp.activation", element * (3.0 if not context.model.gated else 5.0) * PART * F / X, PARTS)
    ]


def residual(layer: str, context: Context, *, phase: Phase) -> list[Operation]:
    """Addition to the residual stream `[M, H_y]`."""
    return [Kernel(phase, layer, 3.0 * context.elements.compute * PART * H / Y, PARTS)]
