"""The exchanges of context parallelism: how attention gets the keys and values of other ranks.

The sequence is cut into 2·context chunks, of which a rank has one from either end. `part` are a rank's own tokens;
widths are those of one rank of x, before an exchange. A buffer is the full one, of which a group of p sends (p-1)/p.
Source, unless another is named: NVIDIA/TransformerEngine@d0067d0d, context_parallel.py in
transformer_engine/pytorch/attention/dot_product_attention.
"""

from __future__ import annotations

from typing import NamedTuple

from axonn_tune.program.inputs import CONTEXT, PARTS, LayerInputs, X
from axonn_tune.program.layers import moves
from axonn_tune.program.operations import (
    ONCE,
    Collective,
    Operation,
    OpKind,
    Phase,
    Role,
    Size,
    Traffic,
    as_size,
    symbol,
)

CORE = "attention.core"


class Widths(NamedTuple):
    """Elements of a token on one rank of x: keys and values, these together with queries, and attention's output."""

    keys: Size
    together: Size
    output: Size


def widths(given: LayerInputs) -> Widths:
    """Widths of the layer's heads; keys and values as attention takes them, so those of a latent (MLA) are expanded."""
    layer = given.own
    if layer.indexer is not None and layer.latent is not None:
        # Its core is absorbed: one key for all heads, which each rank of x has whole.
        latent = as_size(float(layer.latent.kv_rank + layer.latent.rope_dim))
        return Widths(latent, latent, latent)
    keys = as_size(float(layer.kv_heads * (layer.head_dim + layer.value_dim)))
    return Widths(keys / X, given.N / X, given.Q * float(layer.value_dim) / float(layer.head_dim) / X)


def before_core(given: LayerInputs, *, phase: Phase) -> list[Operation]:
    """What attention, or its gradient, needs of other ranks."""
    if not (given.context or given.lone_context):
        return []
    exchange, backward = given.options.context_exchange, phase == "backward"
    if exchange == "ring":
        return _ring(given, phase, "context", share=as_size(1.0))
    if exchange == "all_gather":
        return [_sent(given, "all_gather", "context", phase, CONTEXT * widths(given).keys)]
    count = given.options.context_inside
    group = "context" if exchange == "all_to_all" else f"context[:{count}]"
    width = widths(given).output if backward else widths(given).together
    swapped: list[Operation] = [_sent(given, "all_to_all", group, phase, width)]
    if exchange == "all_to_all":
        return swapped
    return [*swapped, *_ring(given, phase, f"context[::{count}]", share=as_size(1.0 / count))]


def after_core(given: LayerInputs, *, phase: Phase) -> list[Operation]:
    """What goes back: the output, or gradients of queries, keys and values."""
    exchange, backward = given.options.context_exchange, phase == "backward"
    if not given.context and not given.lone_context:
        return []
    if exchange == "ring":
        return _merged(given, phase)
    if exchange == "all_gather":
        # The gathered keys and values are not kept, so backward gathers them again.
        reduced = _sent(given, "reduce_scatter", "context", phase, CONTEXT * widths(given).keys)
        return [reduced] if backward else []
    group = "context" if exchange == "all_to_all" else f"context[:{given.options.context_inside}]"
    back = _sent(given, "all_to_all", group, phase, widths(given).together if backward else widths(given).output)
    return [*(_merged(given, phase) if exchange == "hierarchical" else []), back]


def _merged(given: LayerInputs, phase: Phase) -> list[Operation]:
    """p2p: partial results of a ring, added one by one after the first: outputs scaled by their share of the softmax;
    backward the gradients of queries, and those of keys and values to what came around the ring.

    The bundled runtime adds in its own kernels.
    """
    if given.launched:
        return []
    width = widths(given).together if phase == "backward" else widths(given).output
    return [
        moves(phase, CORE, Traffic(1, 3), given.part * width, given, calls=PARTS * symbol("merged") / _inside(given))
    ]


def calls_of_a_query(given: LayerInputs) -> Size:
    """Calls of attention that a query is in: around a ring several, each with part of the keys."""
    if not given.context or given.options.context_exchange not in ("ring", "hierarchical"):
        return ONCE
    return symbol("ring_calls") / _inside(given)


def _inside(given: LayerInputs) -> float:
    """Ranks of one place in the ring."""
    return float(given.options.context_inside) if given.options.context_exchange == "hierarchical" else 1.0


def _ring(given: LayerInputs, phase: Phase, group: str, *, share: Size) -> list[Operation]:
    """p2p: p-1 sends of a rank's keys and values to its neighbour, each beside attention on those that it has.

    Backward they go around again, and their gradients after them, one send beside each of p chunks of attention; the
    forward's last chunk has none. The bytes of a link are those of a ring's all-gather, by which it is priced.
    share: of the heads.
    """
    whole = CONTEXT * share * widths(given).keys
    # In 8 bits, keys and values are; their gradients are not.
    share_of = given.heads_element / given.element
    sent = (1.0 + share_of) * whole if phase == "backward" else share_of * whole
    return [_sent(given, "all_gather", group, phase, sent, role="keys")]


def _sent(
    given: LayerInputs, kind: OpKind, group: str, phase: Phase, width: Size, *, role: Role = "other"
) -> Collective:
    """One call a half micro-batch, of so many elements a token of the rank."""
    return Collective(kind, group, phase, CORE, given.element * given.part * width, role, PARTS)
