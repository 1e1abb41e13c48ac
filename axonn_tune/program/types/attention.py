"""Attention on one rank: a norm, queries, keys and values, softmax(QKᵀ)V, and the output projection.

Letters: M tokens of a half micro-batch, Q and N widths of queries and of all heads' queries, keys and values. x splits
heads, y the hidden dim: `[M, H_y] → [M, N_x] → [M, Q_x] → [M, H_y]`. Multi-head latent attention has projections of its
own in front (`types.latent`); keys and values of other ranks of context come from `program.context`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from axonn_tune.program.context import CORE, after_core, before_core, calls_of_a_query
from axonn_tune.program.inputs import GROUPED, PARTS, H, LayerInputs, Linear, S, X, Y
from axonn_tune.program.layers import moves
from axonn_tune.program.nodes import Behind, Branches, Gemm, Node, Nodes, Own, Vectors, branch, names, norm
from axonn_tune.program.operations import (
    MATRIX_ALIGNMENT,
    ONCE,
    Array,
    Attention,
    Collective,
    Computation,
    Kernel,
    MatMul,
    Operation,
    Phase,
    Size,
    Traffic,
    as_size,
    symbol,
)
from axonn_tune.program.types import ATTENTION, LayerKind, latent, sparse
from axonn_tune.specs.machine import MatmulLayout

NORM, QKV, GATE, OUTPUT = "attention.norm", "attention.qkv", "attention.gate", "attention.output"
_SCORES = "attention.scores"
"""In a recompute set: the core without its output."""


def nodes(given: LayerInputs) -> Nodes:
    """Norm, projections, core, output projection and addition; nothing of a layer type without attention."""
    if not given.own.attention:
        return []
    several = given.own.latent is not None
    added, element = latent.QUERIES if several else "", _normed_element(given)
    first = norm(NORM, given, element=element, added=added, modules=("layernorm",), first=True, quantizes=not several)
    gate = _gate(given)
    projected: Node | Branches = Gemm(
        linear=Linear(QKV, H / Y, _projected(given), "y", "x", normed=True),
        makes=(_heads(given), *gate),
        gradient=_heads_gradient(given),
    )
    ups: tuple[Node, ...] = ()
    if given.own.indexer is not None:
        heads, back = sparse.heads(given), sparse.heads_gradient(given)
        projected, ups = latent.nodes(given, first, heads=heads, gradient=back)
    elif several:
        projected, ups = latent.nodes(given, first, heads=(_heads(given),), gradient=_heads_gradient(given))
    gradient = given.stream("attention gradient", "backward temporaries", _values(given) / X, inside=True)
    cores: tuple[Node, ...] = (_fused(given, ups, gradient),)
    if given.own.indexer is not None:
        cores = sparse.nodes(given, first, ups, output=_output(given), gradient=gradient)
    output, ended = Linear(OUTPUT, _values(given) / X, H / Y, "x", "y"), branch(OUTPUT, given)
    again = MatMul(
        "recompute", OUTPUT, given.part, output.n, output.k, "NN", PARTS, narrow=given.narrow, makes=ended.makes
    )
    gates = [_gated(given)] if gate else []
    projection = Gemm(linear=output, makes=ended.makes, gradient=ended.gradient, partly={OUTPUT: lambda _: [again]})
    return [first, projected, *cores, *gates, projection, *ended.added]


def _fused(given: LayerInputs, ups: tuple[Node, ...], gradient: Array) -> Own:
    """The core, of all keys or those in a window."""
    # Where a module is repeated to its last operation, its output stays saved.
    scores, again_whole = given.options.recompute_whole_block, partial(_core, phase="recompute")
    return Own(
        layer=CORE,
        makes=(_output(given),),
        gradient=gradient,
        keeps=True,
        needs=ups,
        vectors=Vectors(
            over_x=given.own.sinks * given.own.heads + _norm_elements(given, whole=False),
            whole=_norm_elements(given),
            heads=_norm_elements(given),
        ),
        partly={CORE: again_whole, _SCORES: _without_output, "core_attn": _without_output if scores else again_whole},
        inside=(_SCORES, *(("core_attn",) if scores else ())),
        ahead=_forward,
        back=_backward,
    )


KIND = LayerKind(place=ATTENTION, nodes=nodes, constraints=latent.constraints, logged=sparse.logged)


def _projected(given: LayerInputs) -> Size:
    """Output of the fused GEMM: queries, keys and values, and what gates the output."""
    own = given.own
    if not own.output_gate and not own.values_are_keys:
        return given.N / X
    taken = own.kv_heads * own.value_dim if own.values_are_keys else 0
    return as_size(float(own.qkv_width - taken + own.gate_width)) / X


def _gate(given: LayerInputs) -> tuple[Array, ...]:
    """What gates the output, if there is a gate."""
    width = as_size(float(given.own.gate_width)) / X
    return (given.stream("attention gate", "qkv", width, inside=True),) if given.own.output_gate else ()


def _gated(given: LayerInputs) -> Own:
    """The output times the sigmoid of its gate, which the projection takes (NVIDIA/Megatron-LM@d98e8a64,
    megatron/core/transformer/attention.py, _apply_output_gate)."""
    width, element = _values(given) / X, given.saved_element
    share = given.own.gate_width / given.own.value_width
    output = given.stream("gated attention output", "attention output", width, inside=True, element=element)

    ahead, back = Traffic(1, 2.0 + share), Traffic(1, 3.0 + 2.0 * share)
    if given.options.kernels == "eager":
        ahead, back = Traffic(2, 2.0 + 3.0 * share), Traffic(7, 6.0 + 12.0 * share)
    if given.launched:
        # Gates are copied, unless norms keep the projections; gradients of projections are joined from both.
        ahead += Traffic(0 if given.own.qk_norms else 1, 0.0 if given.own.qk_norms else 2.0 * share)
        back += Traffic(1, 2.0 * (given.own.qkv_width / given.own.value_width + share))

    def forward(given: LayerInputs, phase: Phase) -> list[Operation]:
        return [moves(phase, GATE, ahead, given.part * width, given, calls=PARTS, makes=(output,))]

    def backward(given: LayerInputs, behind: Behind) -> list[Operation]:
        """Gradients of the output and of the gate, which are computed once more from both."""
        made = (behind.gradient,)
        return [moves("backward", GATE, back, given.part * width, given, calls=PARTS, makes=made, frees=behind.frees)]

    gradient = given.stream("gated attention gradient", "backward temporaries", width, inside=True)
    # The bundled runtime has it in the function of the core.
    partly = {"core_attn": partial(forward, phase="recompute")} if given.launched else {}
    return Own(layer=GATE, makes=(output,), gradient=gradient, partly=partly, ahead=forward, back=backward)


def _heads(given: LayerInputs) -> Array:
    """Queries, keys and values of all heads, 8 bits wide where attention computes in those."""
    return given.stream("qkv", "qkv", given.N / X, inside=True, element=given.heads_element)


def _heads_gradient(given: LayerInputs) -> Array:
    """Their gradient, and that of the gate."""
    return given.stream("qkv gradient", "backward temporaries", _projected(given), inside=True)


def _normed_element(given: LayerInputs) -> float:
    """Bytes of an element of the norm's output, which several projections quantize, each for itself."""
    several = latent.readers(given) if given.own.latent is not None else 1
    return given.saved_element * (several if given.format else 1)


def _norm_elements(given: LayerInputs, *, whole: bool = True) -> int:
    """Elements of norms of queries and keys: of each head, which all ranks have whole, or of all heads together."""
    own = given.own
    if not own.qk_norms or whole == (own.qk_norms == "all_heads"):
        return 0
    return (2 * own.head_dim if whole else own.query_width + own.kv_heads * own.head_dim) * (1 if own.rms else 2)


def _values(given: LayerInputs) -> Size:
    """Width of attention's output."""
    return given.Q if given.own.value_dim == given.own.head_dim else as_size(float(given.own.value_width))


def _output(given: LayerInputs) -> Array:
    """What attention makes, which it needs whole; its projection may save it quantized, too, if nothing gates it."""
    one, element, tuning = given.format, float(given.element), given.tuning
    quantizes = one is not None and not given.own.output_gate and not one.keeps_original and tuning is None
    if one is not None and quantizes and not given.options.saves_original:
        element += one.operand_bytes
    if tuning is not None and given.heads_element < element:
        # In 8 bits for its own gradients, and whole for an adapter that has no input of its own.
        element = given.heads_element + element * bool(tuning.parts(OUTPUT) and not tuning.dropout)
    return given.stream("attention output", "attention output", _values(given) / X, inside=True, element=element)


def _kept(given: LayerInputs) -> Array:
    """What it keeps beside that: numbers of each row of scores, or all scores with their mask."""
    rows, element = given.tokens * given.Q / X / given.own.head_dim, given.element
    if given.options.fused_attention:
        return Array("softmax statistics", "softmax statistics", given.elements.statistics * rows)
    mask = 1.0 if given.options.dropout else 0.0
    return Array("scores", "attention scores", (element + mask * (element + 1.0)) * (rows * S))


def _forward(given: LayerInputs, phase: Phase) -> Iterable[Operation]:
    """Norms of queries and keys, where they are kernels of their own, and the core."""
    return [*([] if given.launched else _head_norms(given, phase=phase)), *_core(given, phase=phase)]


def _without_output(given: LayerInputs) -> Iterator[Operation]:
    """The core once more, whose output is there."""
    for step in _core(given, phase="recompute"):
        yield replace(step, makes=tuple(array for array in step.makes if array.name != "attention output"))


def _backward(given: LayerInputs, behind: Behind) -> Iterable[Operation]:
    """Gradients of the core, then of norms of queries and keys."""
    return [*_core_backward(given, behind), *([] if given.launched else _head_norms(given, phase="backward"))]


def _head_norms(given: LayerInputs, *, phase: Phase) -> list[Operation]:
    """Norms of queries and keys over each head, which save their inputs, `[M, Q_x]` and `[M, K_x]`.

    Those over all heads sum squares over x. The bundled runtime has them where it separates heads, of which it saves
    `[M, N_x]`, values included, once more.
    """
    if not given.own.qk_norms or given.own.latent is not None:
        return []
    back = phase == "backward"
    moved, widths = given.kernels.heads[back], _head_widths(given)
    names = [f"{one} before norm" for one in ("queries", "keys")]
    held = (given.N / X, ONCE * 0.0) if given.launched else widths
    saved = [given.stream(name, "qkv", width, inside=True) for name, width in zip(names, held, strict=True)]
    sums = given.norm_statistics * given.elements.statistics * given.part * 2.0
    return [
        *([Collective("all_reduce", "x", phase, CORE, sums, calls=PARTS)] if given.own.qk_norms == "all_heads" else []),
        *(
            moves(
                *(phase, CORE, moved, given.part * width, given),
                calls=PARTS,
                makes=() if back else (array,),
                frees=(array.name,) if back else (),
            )
            for width, array in zip(widths, saved, strict=True)
        ),
    ]


def _head_widths(given: LayerInputs) -> tuple[Size, Size]:
    """Widths of queries and of keys on a rank."""
    return given.Q / X, as_size(float(given.own.kv_heads * given.own.head_dim)) / X


def _core(given: LayerInputs, *, phase: Phase) -> list[Operation]:
    """Biases or rotary positions, then softmax(QKᵀ)V on heads_x: `[M, N_x] → [M, Q_x]`, replicated over y."""
    # Heads of `[M, N_x]` are rotated by their positions, or copied under grouped-query attention, else views.
    views = given.launched and given.model.learned_positions
    separated = GROUPED * PARTS if views else PARTS
    narrow = given.narrow and given.options.narrow_attention
    if given.options.fused_attention:
        made = (_output(given), _kept(given))
        core: list[Computation] = [_attended(given, phase, (1, 1), narrow=narrow, makes=made)]
    else:
        core = _unfused_core(given, phase=phase)
    return [
        *before_core(given, phase=phase),
        *(_head_norms(given, phase=phase) if given.launched else ()),
        *_turned(given, given.kernels.turned, phase),
        moves(phase, CORE, Traffic(1, 2), given.part * given.N / X, given, calls=separated),
        *([Kernel(phase, CORE, 3.0 * given.part * given.N / X, PARTS, quantizes="all")] if narrow else []),
        *core,
        *after_core(given, phase=phase),
    ]


def _span(given: LayerInputs) -> Size:
    """Positions that a token attends to, the masked half included."""
    return symbol(f"span{given.of}") if given.own.reach else given.seen


def _attended(
    given: LayerInputs,
    phase: Phase,
    gemms: tuple[int, int],
    *,
    narrow: bool,
    makes: tuple[Array, ...],
    frees: tuple[str, ...] = (),
) -> Attention:
    """The core as one kernel of so many GEMMs of scores with queries or keys, and of scores with values.

    In 8 bits backward does not skip what is outside of a window: on GB200 cuDNN 9.22 takes 1.73 ms for two sequences of
    4,096 tokens, 128 heads of 64 and a window of 128, 0.47 in BF16 (NVIDIA/cudnn-frontend@3929da2e,
    benchmark/sdpa_benchmark_training).
    """
    own, (queries, values) = given.own, gemms
    back = phase == "backward"
    keys = given.seen if narrow and back and own.window else _span(given)
    width = float(queries + values) * given.Q
    unequal = own.value_dim != own.head_dim
    if unequal:
        width = as_size(float(queries * own.query_width + values * own.value_width))
    flops, mean = 2.0 * given.part * keys * width / X, (queries * own.head_dim + values * own.value_dim) / sum(gemms)
    ordered, at_once = back and given.options.deterministic, keys / calls_of_a_query(given)
    return Attention(
        phase, CORE, flops, at_once, back, narrow, mean, ordered, unequal, calls=PARTS, makes=makes, frees=frees
    )


def _joined(given: LayerInputs) -> list[Operation]:
    """Gradient of `[M, N_x]` from those of its heads."""
    joined = moves("backward", CORE, Traffic(1, 2), given.part * given.N / X, given, calls=PARTS)
    norms = _head_norms(given, phase="backward") if given.launched else []
    return [*_turned(given, given.kernels.turned_back, "backward"), *norms, joined]


def _turned(given: LayerInputs, moved: Traffic, phase: Phase) -> list[Operation]:
    """Rotary positions of queries and keys, where they have kernels of their own."""
    if not moved.kernels or given.model.learned_positions:
        return []
    return [moves(phase, CORE, moved, given.part * width, given, calls=PARTS) for width in _head_widths(given)]


def _unfused_core(given: LayerInputs, *, phase: Phase) -> list[Computation]:
    """Scores `[b, heads_x, S, S]` are written and read: `5·a·s²·b` bytes saved (arXiv 2205.05198, equation 1)."""
    softmax = symbol("softmax") * PARTS
    return [
        _scores_matmul(given, phase, "NT", forward=True),
        Kernel(phase, CORE, symbol("scores") * _scores(given), softmax, makes=(_kept(given),)),
        *([Kernel(phase, CORE, (2.0 * given.element + 1.0) * _scores(given), PARTS)] if given.options.dropout else []),
        _scores_matmul(given, phase, "NN", forward=False, values=True, makes=(_output(given),)),
    ]


def _scores(given: LayerInputs) -> Size:
    return given.part * given.Q / X / given.own.head_dim * S


def _scores_matmul(
    given: LayerInputs,
    phase: Phase,
    layout: MatmulLayout,
    *,
    forward: bool,
    values: bool = False,
    makes: tuple[Array, ...] = (),
) -> MatMul:
    """One batched GEMM of the core, `[rows, S]` from heads or `[rows, width]` from scores; values: of their heads."""
    dim = given.own.value_dim if values else given.own.head_dim
    rows, width = given.part * (given.Q / X) / given.own.head_dim, as_size(dim)
    n, k = (S, width) if forward else (width, S)
    alignment = math.gcd(dim * given.element, MATRIX_ALIGNMENT)
    return MatMul(phase, CORE, rows, n, k, layout, PARTS, alignment, batched=True, makes=makes)


def _core_backward(given: LayerInputs, behind: Behind) -> list[Operation]:
    """Gradient of `_core`: five GEMMs for its two when fused, since the scores are computed again."""
    element = given.element
    gradient, dead = _heads_gradient(given), (*behind.frees, *names((_output(given), _kept(given))))
    joined = _joined(given)
    exchanged, returned = (found(given, phase="backward") for found in (before_core, after_core))
    if given.options.fused_attention:
        narrow = given.narrow and given.options.narrow_attention
        core = _attended(given, "backward", (3, 2), narrow=narrow, makes=(gradient,), frees=dead)
        return [*exchanged, core, *joined, *returned]
    scores, values = (_scores_matmul(given, "backward", "NN", forward=one, values=True) for one in (True, False))
    keys = _scores_matmul(given, "backward", "NN", forward=False)
    masked = [Kernel("backward", CORE, (2.0 * element + 1.0) * _scores(given), PARTS)] if given.options.dropout else []
    size, kernels = symbol("scores_back") * _scores(given), symbol("softmax_back") * PARTS
    softmax = Kernel("backward", CORE, size, kernels, makes=(gradient,), frees=dead)
    return [*exchanged, scores, values, *masked, softmax, keys, keys, *joined, *returned]
