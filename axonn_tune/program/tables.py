"""The 4D operations of the embedding, the head with its loss, and the end of a step.

The token table is `E[V_xy, H]`, stored split over z; learned positions are `P[S, H_y]`, stored split
over z. Both are padded to divide. The loss works in C chunks of tokens, so that no rank holds more
logits than `[M/C, V_xy]`.
"""

from __future__ import annotations

from axonn_tune.program.layers import (
    TOKENS,
    Context,
    H,
    X,
    Y,
    gather_weight,
    norm_backward,
    norm_forward,
    reduce_weight_gradient,
)
from axonn_tune.program.operations import ONCE, Collective, Kernel, MatMul, Operation
from axonn_tune.program.size import Size, symbol
from axonn_tune.specs.machine import CollectiveKind

V, P, CHUNKS = symbol("V"), symbol("P"), symbol("C")
TABLE = V * H / (X * Y)
POSITIONS = P * H / Y
WORLD_AXES = "xyzdata"


def embedding_forward(context: Context) -> list[Operation]:
    """Look-up in the local rows, `[M, H]` reduce-scattered over y to `[M, H_y]`, summed over x."""
    element = context.elements.compute
    operations = [
        *gather_weight("embedding", TABLE, context, phase="forward"),
        Kernel("forward", "embedding", 2.0 * element * TOKENS * H),
        Collective("reduce_scatter", "y", "forward", "embedding", element * TOKENS * H),
        Collective("all_reduce", "x", "forward", "embedding", element * TOKENS * H / Y),
    ]
    if context.model.learned_positions:
        operations += gather_weight("position", POSITIONS, context, phase="forward")
        operations.append(Kernel("forward", "position", 3.0 * element * TOKENS * H / Y))
    return operations


def embedding_backward(context: Context) -> list[Operation]:
    """Position gradient; then `[M, H_y]` all-gathered over y and added into the local rows."""
    element = context.elements.compute
    operations: list[Operation] = []
    if context.model.learned_positions:
        operations.append(Kernel("backward", "position", element * TOKENS * H / Y))
        operations += reduce_weight_gradient("position", POSITIONS, context)
    return [
        *operations,
        Collective("all_gather", "y", "backward", "embedding", element * TOKENS * H),
        Kernel("backward", "embedding", 3.0 * element * TOKENS * H),
        *reduce_weight_gradient("embedding", TABLE, context),
    ]


def head(context: Context) -> list[Operation]:
    """Final norm, `h[M, H]` gathered over y, then logits, loss and their gradients chunk by chunk.

    The gradients are computed at once, so logits are never kept: `dh[M, H]` is reduce-scattered over
    y and summed over x, `dE[V_xy, H]` reduce-scattered over z.
    """
    element = context.elements.compute
    return [
        *norm_forward("head.norm", context, tokens=TOKENS, calls=ONCE),
        *gather_weight("head", TABLE, context, phase="forward"),
        Collective("all_gather", "y", "forward", "head", element * TOKENS * H),
        *_loss_chunk(context, tokens=TOKENS / CHUNKS),
        *reduce_weight_gradient("head", TABLE, context)[:1],
        Collective("reduce_scatter", "y", "backward", "head", element * TOKENS * H),
        Collective("all_reduce", "x", "backward", "head", element * TOKENS * H / Y),
        *reduce_weight_gradient("head", TABLE, context)[1:],
        *norm_backward("head.norm", context, tokens=TOKENS, calls=ONCE),
    ]


def _loss_chunk(context: Context, *, tokens: Size) -> list[Operation]:
    """One chunk: `logits[t, V_xy] = h · Eᵀ`, cross-entropy over xy, `dh = dlogits · E`, `dE = dlogitsᵀ · h`."""
    rows, sizes = V / (X * Y), context.elements
    return [
        MatMul("forward", "head", tokens, rows, H, "NT", CHUNKS),
        Collective("all_reduce", "xy", "forward", "loss.max", sizes.statistics * tokens, calls=CHUNKS),
        Collective("all_reduce", "xy", "forward", "loss.sums", 2.0 * sizes.statistics * tokens, calls=CHUNKS),
        Kernel("forward", "loss", 5.0 * sizes.compute * tokens * rows, CHUNKS),
        MatMul("backward", "head", tokens, H, rows, "NN", CHUNKS),
        MatMul("backward", "head", rows, H, tokens, "TN", CHUNKS),
    ]


def data_bucket(layer: str, elements: Size, context: Context, *, sharded: bool) -> Collective:
    """Gradients of one bucket over data: all-reduced, or reduce-scattered to the owner of the optimizer state."""
    kind: CollectiveKind = "reduce_scatter" if sharded else "all_reduce"
    return Collective(kind, "data", "backward", layer, context.elements.main * elements, "data")


def step_end(context: Context, *, buckets: tuple[tuple[str, Size, Size], ...], sharded: bool) -> list[Operation]:
    """Gradients of the replicated vectors, the gradient norm with the loss, AdamW; then new weights to their users.

    `buckets`: `(layer, elements, how many)` of each data-parallel bucket, for the sharded case.
    """
    main, parameters, vectors = context.elements.main, symbol("parameters"), symbol("vectors")
    share = symbol("data") if sharded else ONCE
    operations: list[Operation] = [
        Collective("all_reduce", "z", "step", "vectors", main * vectors),
        Collective("all_reduce", "data", "step", "vectors", main * vectors),
        Kernel("step", "gradient_norm", main * parameters / share),
        Collective("all_reduce", WORLD_AXES, "step", "gradient_norm", ONCE * 16.0),
        Kernel("step", "optimizer", (7.0 * main + (context.elements.compute if sharded else 0.0)) * parameters / share),
        Kernel("step", "optimizer", 7.0 * main * vectors),
    ]
    if sharded:
        operations += [
            Collective("all_gather", "data", "step", layer, context.elements.compute * elements, calls=count)
            for layer, elements, count in buckets
        ]
    return operations
