"""DeepSeek sparse attention (DSA) on one rank: an indexer scores all keys, attention takes those that it chose.

Letters: M tokens of a half micro-batch, r the rank of the latent of keys and values, n_I and d_I heads of the indexer
and their width. The core is absorbed: one key of r + rope_dim and one value of r for all heads, whose queries and
outputs are as wide; it takes what its kernels were measured to (`cost/kernels.csv`). x splits heads; kernels pad those
of a rank to whole 64. The indexer is duplicated on all ranks of x and sees every token
`[M, H_y] → [M, n_I·d_I]`; its inputs are detached, and it learns by a loss of its own against attention's
probabilities. A shared one takes what the last full one before it chose. Sources: DeepSeek-V3.2, arXiv 2512.02556,
section 2; NVIDIA/Megatron-LM@d98e8a64, megatron/core/transformer/experimental_attention_variant; heads of a rank:
deepseek-ai/FlashMLA@9241ae3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from axonn_tune.program import layers
from axonn_tune.program.context import CORE, after_core, before_core
from axonn_tune.program.inputs import CONTEXT, PARTS, H, LayerInputs, Linear, X, Y
from axonn_tune.program.layers import moves
from axonn_tune.program.nodes import Behind, Node, Norm, Own, Vectors, gathered, names
from axonn_tune.program.operations import (
    Array,
    Arrays,
    Attention,
    Collective,
    MatMul,
    Measured,
    Operation,
    Phase,
    Size,
    Traffic,
    as_size,
    symbol,
)
from axonn_tune.specs.model import Layer
from axonn_tune.specs.sections import Indexer, LatentAttention

INDEXER = "attention.indexer"
WHOLE_HEADS = 64
"""Heads of a rank that kernels of the core compute at least, or a multiple."""

_ID, _SCORE = 4.0, 4.0
"""Bytes of a chosen token's place, and of a score."""


def heads(given: LayerInputs) -> tuple[Array, ...]:
    """Absorbed queries of a rank's heads, and the latent with its rotated part, which is the key of all."""
    width = _key_width(given)
    queries = given.stream("qkv", "qkv", float(given.own.heads) * width / X, inside=True)
    return queries, given.stream("latent key", "qkv", width, inside=True)


def heads_gradient(given: LayerInputs) -> Array:
    """Gradient of the queries."""
    width = float(given.own.heads) * _key_width(given) / X
    return given.stream("qkv gradient", "backward temporaries", width, inside=True)


def nodes(
    given: LayerInputs, normed: Norm, ups: tuple[Node, ...], *, output: Array, gradient: Array
) -> tuple[Node, ...]:
    """The indexer, unless another layer's is shared, and the core, whose `output` has this gradient."""
    chosen = Array("chosen tokens", "chosen tokens", _ID * float(_indexer(given).topk) * given.tokens)
    latents = given.stream("attention latents", "attention output", _value_width(given) / X, inside=True)
    rows = Array("softmax statistics", "softmax statistics", given.elements.statistics * given.tokens * _heads(given))
    shared, saved = _indexer(given).shared, (latents, rows)

    def forward(given: LayerInputs, phase: Phase) -> Iterator[Operation]:
        yield from before_core(given, phase=phase)
        made = (output, *saved, *([chosen] if shared else []))
        yield _core(given, phase, _flops(given, queries=1, values=1), makes=made)
        yield from after_core(given, phase=phase)

    def without_output(given: LayerInputs) -> Iterator[Operation]:
        for step in forward(given, "recompute"):
            yield replace(step, makes=tuple(array for array in step.makes if array is not output))

    def backward(given: LayerInputs, behind: Behind) -> Iterator[Operation]:
        yield from before_core(given, phase="backward")
        freed = (*behind.frees, output.name, *names(saved), *([chosen.name] if shared else []))
        flops, made = _flops(given, queries=3, values=2), (heads_gradient(given),)
        yield replace(_core(given, "backward", flops, makes=made), backward=True, frees=freed)
        yield from after_core(given, phase="backward")

    core = Own(
        layer=CORE,
        makes=(output,),
        gradient=gradient,
        keeps=True,
        reads=ups[-1],
        needs=ups,
        partly={"core_attn": without_output},
        inside=("core_attn",),
        ahead=forward,
        back=backward,
    )
    return (core,) if shared else (_indexing(given, normed, chosen), core)


def logged(layer: Layer, length: float) -> float:
    """Megatron-LM counts the indexer's weights without the gradient of their inputs, scores of all keys that a query
    sees, and of the chosen ones the loss: its gradients of scores, and attention's probabilities."""
    one = layer.indexer
    if one is None or one.shared or (latent := layer.latent) is None:
        return 0.0
    seen, chosen = (length + 1.0) / 2.0, layer.keys(length)
    scored = one.heads * (one.head_dim + 1.0)
    loss = 2.0 * chosen * scored + chosen * layer.heads * (latent.kv_rank + latent.rope_dim)
    return (seen * scored + loss - _weights(layer, one)) / 3.0


def _weights(layer: Layer, one: Indexer) -> float:
    """Elements of its matrices: queries from their latent, keys and heads' weights from the hidden state."""
    assert layer.latent is not None, "the document asks for one"
    rank = layer.latent.query_rank or layer.hidden
    return float(rank * one.heads * one.head_dim + layer.hidden * (one.head_dim + one.heads))


def _indexer(given: LayerInputs) -> Indexer:
    assert given.own.indexer is not None, "asked before"
    return given.own.indexer


def _latent(given: LayerInputs) -> LatentAttention:
    assert given.own.latent is not None, "the document asks for one"
    return given.own.latent


def _key_width(given: LayerInputs) -> Size:
    return as_size(float(_latent(given).kv_rank + _latent(given).rope_dim))


def _value_width(given: LayerInputs) -> Size:
    return as_size(float(given.own.heads * _latent(given).kv_rank))


def _heads(given: LayerInputs) -> Size:
    """Heads of a rank, as kernels pad them."""
    return symbol(f"padded{given.of}")


def _span(given: LayerInputs) -> Size:
    return symbol(f"span{given.of}")


def _flops(given: LayerInputs, *, queries: int, values: int) -> Size:
    """Of chosen pairs, of so many GEMMs of all heads with the key's width, and with the value's."""
    latent = _latent(given)
    width = float(queries * (latent.kv_rank + latent.rope_dim) + values * latent.kv_rank)
    return given.part * _span(given) * _heads(given) * width


def _core(given: LayerInputs, phase: Phase, flops: Size, *, makes: Arrays) -> Measured:
    others = "" if given.options.sparse_kernels == "cudnn" else f".{given.options.sparse_kernels}"
    return Measured(phase, CORE, f"sparse_mla{others}", 1e-9 * flops, flops, calls=PARTS, makes=makes)


def _indexing(given: LayerInputs, normed: Norm, chosen: Array) -> Own:
    """The indexer: three projections, scores of all keys, the k best; backward its loss."""
    one, linears = _indexer(given), _linears(given)
    width = as_size(float((one.heads + 1) * one.head_dim + one.heads))
    made = given.stream("indexer projections", "indexer", width, inside=True)

    def forward(given: LayerInputs, phase: Phase) -> Iterator[Operation]:
        for linear in linears:
            yield from gathered(linear, given, phase)
        yield from _inputs(given, phase)
        for linear in linears:
            yield MatMul(phase, INDEXER, given.part, linear.n, linear.k, "NN", PARTS)
            yield Collective("all_reduce", "y", phase, INDEXER, given.element * given.part * linear.n, calls=PARTS)
        yield moves(phase, INDEXER, Traffic(1, 2), given.part * width, given, calls=PARTS, makes=(made,))
        if given.context or given.lone_context:
            keys = given.element * given.part * CONTEXT * float(one.head_dim)
            yield Collective("all_gather", "context", phase, INDEXER, keys, calls=PARTS)
        scores = 2.0 * given.part * given.seen * float(one.heads * one.head_dim)
        yield Attention(phase, INDEXER, scores, given.seen, width=float(one.head_dim), calls=PARTS)
        # A query sees half of the keys, whose scores are written and read.
        elements = given.part * given.seen * (_SCORE / given.element / 2.0)
        yield moves(phase, INDEXER, Traffic(2, 2), elements, given, calls=PARTS, makes=(chosen,))

    def backward(given: LayerInputs, behind: Behind) -> Iterator[Operation]:
        probabilities = given.part * _span(given) * float(given.own.heads) * _key_width(given) / X
        core = float(_latent(given).kv_rank + _latent(given).rope_dim)
        yield Attention("backward", INDEXER, probabilities, _span(given), True, width=core, calls=PARTS)
        summed = _SCORE * given.part * float(one.topk)
        yield Collective("all_reduce", "x", "backward", INDEXER, summed, calls=PARTS)
        scores = 2.0 * given.part * _span(given) * float(one.heads * one.head_dim)
        own = float(one.head_dim)
        yield Attention("backward", INDEXER, scores, _span(given), True, width=own, calls=PARTS, frees=(chosen.name,))
        if given.context or given.lone_context:
            keys = given.element * given.part * CONTEXT * float(one.head_dim)
            yield Collective("reduce_scatter", "context", "backward", INDEXER, keys, calls=PARTS)
        yield from _inputs(given, "backward")
        freed = (made.name, *behind.frees)
        for linear in linears:
            last = freed if linear is linears[-1] else ()
            yield MatMul("backward", INDEXER, linear.k, linear.n, given.part, "TN", PARTS, frees=last)
            if given.options.gather_unit == "weight":
                yield from layers.reduce_weight_gradient(INDEXER, linear.weight, given)

    return Own(
        layer=INDEXER,
        reads=normed,
        detached=True,
        matrix=as_size(_weights(given.own, one)) / Y,
        vectors=Vectors(whole=2 * one.head_dim),
        ahead=forward,
        back=backward,
    )


def _linears(given: LayerInputs) -> tuple[Linear, ...]:
    """Queries, from their latent, of which each rank of y takes a part; keys and heads' weights."""
    one, rank = _indexer(given), float(_latent(given).query_rank or given.own.hidden)
    queries = Linear(INDEXER, as_size(rank) / Y, as_size(float(one.heads * one.head_dim)), "y", "")
    return queries, Linear(INDEXER, H / Y, as_size(float(one.head_dim + one.heads)), "y", "")


def _inputs(given: LayerInputs, phase: Phase) -> Iterator[Operation]:
    """With sequence parallelism, the norm's output and the latent of queries of all tokens."""
    rank = _latent(given).query_rank
    for width in (H / Y, *([as_size(float(rank))] if rank else [])):
        yield from layers.sequence_gather(
            phase, INDEXER, given, tokens=given.part, calls=PARTS, role="other", width=width
        )
