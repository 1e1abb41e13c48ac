"""A mixture of experts on one rank: router, dispatch, grouped GEMMs, combine; and shared experts.

Letters: T tokens that a rank routes, E experts, K experts a token, D width of a dispatched token (H, or a latent), F
width of an expert, G with its gate, R = T·K·expert_tensor rows of a rank after dispatch. With sequence parallelism a
rank routes its own share of tokens, and ranks of `expert_tensor` gather theirs; elsewhere x and y split experts as they
split other matrices, and each of their ranks routes all tokens. Order of operations: NVIDIA/Megatron-LM@d98e8a64,
megatron/core/transformer/moe, token_dispatcher.py and experts.py; arXiv 2603.07685, figure 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from axonn_tune.frameworks.dispatchers import find_dispatcher
from axonn_tune.frameworks.step import GatherUnit
from axonn_tune.program import layers
from axonn_tune.program.constraints import expert_constraints
from axonn_tune.program.inputs import (
    EXCHANGED,
    EXPERT,
    EXPERT_TENSOR,
    EXPERTS,
    FULLEST,
    IMBALANCE,
    JOINED,
    PARTS,
    H,
    LayerInputs,
    Linear,
    X,
    Y,
)
from axonn_tune.program.layers import moves
from axonn_tune.program.nodes import (
    Adaptable,
    Behind,
    Exchange,
    Gemm,
    Node,
    Nodes,
    Norm,
    Own,
    Vectors,
    branch,
    gathered,
    names,
    norm,
)
from axonn_tune.program.operations import (
    Array,
    Arrays,
    Collective,
    Kernel,
    MatMul,
    Operation,
    OpKind,
    Phase,
    Role,
    Routing,
    Size,
    Traffic,
    as_size,
)
from axonn_tune.program.types import MLP, LayerKind, mlp
from axonn_tune.specs.machine import MatmulLayout
from axonn_tune.specs.sections import Experts

if TYPE_CHECKING:
    from axonn_tune.program.adapters import Adapter

ROUTER, DISPATCH, COMBINE = "moe.router", "moe.dispatch", "moe.combine"
PROBABILITIES = "moe.probabilities"
FC1, ACTIVATION, FC2 = "moe.fc1", "moe.activation", "moe.fc2"
SHARED_FC1, SHARED_ACTIVATION, SHARED_FC2 = "moe.shared_fc1", "moe.shared_activation", "moe.shared_fc2"
_MOE, _SHARED = ("moe",), ("shared_experts", "moe")
"""Modules that recompute repeats at once."""
_TEMPORARY = "backward temporaries"

_SCORED, _SCORED_AT_ONCE = Traffic(12, 0, 24), Traffic(2, 0, 6)
"""Kernels of scores, top-k, probabilities and the balancing loss, by logit, in FP32, as many backward: operator by
operator, or fused into one for the scores of the best and one for the loss (NVIDIA/TransformerEngine@d0067d0d,
transformer_engine/pytorch/router.py; `moe_router_fusion`, which recipes of Megatron-Bridge set)."""

_CLAMPED, _CLAMPED_BACK = Traffic(3, 8), Traffic(3, 10)
"""Clamps of both halves of FC1's output and the copy that joins them, an element of F: operators of their own in front
of the activation's kernel, and their gradients (NVIDIA/Megatron-LM@d98e8a64, megatron/core/fusions/
fused_bias_geglu.py, weighted_bias_quick_geglu_impl)."""

STRIDED = 32.62 / 217.51 * (32.0 / 6.0)
"""Bandwidth of eager kernels over halves of rows, relative to that of one fused kernel: seven of clamped SwiGLU move 32
bytes an element in 217.51 µs, the fused one 6 in 32.62 µs (ROCm/aiter PR 4249, 65,544 rows on MI355X)."""

_BIAS_LOOP: Mapping[bool, tuple[tuple[Traffic, Traffic], tuple[Traffic, Traffic]]] = {
    True: ((Traffic(2, 1, 3), Traffic(2, 1, 3)), (Traffic(6, 1, 7), Traffic(2, 3, 1))),
    False: ((Traffic(2, 4), Traffic(1, 2)), (Traffic(6, 6), Traffic(1, 2))),
}
_BIAS_LOOP_ALONE = ((Traffic(1, 2), Traffic(1, 2)), (Traffic(1, 1), Traffic(1, 2)))
"""FC2's bias times probabilities, which are in FP32 or not, and FC1's, forward and backward: kernels of each expert,
and of all rows: cat, conversions (NVIDIA/Megatron-LM@d98e8a64, megatron/core/transformer/moe/experts.py)."""

_ROUTED = 8.0
"""Bytes of what is kept of the routing of a token to one expert."""


def nodes(given: LayerInputs) -> Nodes:
    """Norm, router, shared experts, dispatch, both grouped GEMMs, combine and addition; nothing of a layer type without
    experts."""
    if given.own.experts is None:
        return []
    first = not given.own.mixes
    normed = norm(mlp.NORM, given, element=_normed_element(given), modules=("layernorm",), first=first)
    ended = branch(mlp.FC2, given)
    sizes, biases = given.own.experts, given.own.biases
    chosen = Own(
        layer=ROUTER,
        modules=_MOE,
        matrix=router(given).weight,
        vectors=Vectors(whole=biases * sizes.count, scores=sizes.count if sizes.score_bias else 0),
        ahead=_router,
        back=_router_backward,
    )
    # Down to the latent that is dispatched, and back up; each rank of x has them whole.
    latent = float(sizes.latent_width or 0) * H / Y
    shared = _shared(given, normed)
    beside = tuple(shared) if given.options.shared_expert_overlap else ()
    return [
        normed,
        chosen,
        *shared,
        Exchange(
            layer=DISPATCH,
            makes=(_dispatched(given),),
            gradient=_rows_of(given, f"{FC1} gradient", row(given), _TEMPORARY),
            reads=chosen,
            matrix=latent,
            modules=_MOE,
            ahead=_dispatch,
            back=_dispatch_backward,
            beside=beside,
        ),
        *_routed(given, sizes),
        Exchange(
            layer=COMBINE,
            makes=ended.makes,
            gradient=ended.gradient,
            matrix=latent,
            modules=_MOE,
            ahead=partial(_combine, makes=ended.makes),
            back=_combine_backward,
            beside=beside,
            joins=tuple(shared[-1:]),
        ),
        *ended.added,
    ]


def _routed(given: LayerInputs, sizes: Experts) -> Nodes:
    """Both grouped GEMMs of routed experts, and the activation between them."""
    return [
        Grouped(
            layer=FC1,
            makes=(_rows_of(given, "expert up projection", up(given)),),
            gradient=_rows_of(given, "expert up gradient", up(given), _TEMPORARY),
            modules=_MOE,
            gathers="forward",
            n=up(given),
            k=row(given),
            each=_each(given)[0],
            width=given.own.ups * sizes.width,
        ),
        Own(
            layer=ACTIVATION,
            makes=(_rows_of(given, "expert activation", width(given)),),
            gradient=_rows_of(given, "expert activation gradient", width(given), _TEMPORARY),
            modules=_MOE,
            partly=dict.fromkeys((ACTIVATION, "moe_act"), partial(_activation, phase="recompute")),
            ahead=_activated,
            back=_activated_backward,
        ),
        Grouped(
            layer=FC2,
            gradient=_rows_of(given, "expert output gradient", row(given), _TEMPORARY),
            modules=_MOE,
            gathers="backward",
            n=row(given),
            k=width(given),
            each=_each(given)[1],
            width=sizes.latent_width or given.own.hidden,
        ),
    ]


KIND = LayerKind(place=MLP, nodes=nodes, constraints=expert_constraints)


@dataclass(frozen=True, eq=False, kw_only=True)
class Grouped(Node):
    """A grouped GEMM `O[R, n] = I[R, k] · W[k, n]`; all experts of a block are gathered at once, before the one that
    comes first in a pass, and their gradients reduced behind the last.

    each: elements of one expert's matrix; width: of its output.
    """

    gathers: Literal["forward", "backward"]
    n: Size
    k: Size
    each: int
    width: int
    adapters: tuple[Adapter, ...] = ()

    def adaptable(self, given: LayerInputs) -> Adaptable:
        """All experts of a rank."""
        most = PARTS * rows(given, FULLEST)
        return Adaptable(Linear(self.layer, self.k, self.n, "", ""), (rows(given), most), local(given))

    @property
    def needs_input(self) -> bool:
        """For its weight's gradient, or for an adapter's."""
        return self.trains or any(one.shares_input for one in self.adapters)

    def gather(self, given: LayerInputs, phase: Phase) -> list[Operation]:
        """Gather of the experts."""
        first = (phase == "backward") == (self.gathers == "backward")
        return gather_experts(given, phase=phase, unit="weight") if first else []

    def forward(self, given: LayerInputs, phase: Phase) -> Iterator[Operation]:
        """The GEMM; behind the first the sum over y."""
        weight, once, second = self.k * self.n, not self.trains, self.gathers == "backward"
        # The second takes what the first one's kernel quantized.
        if not (second and _is_fused(given)):
            yield from layers.quantized(phase, self.layer, rows(given) * self.k, given, once=once)
        yield from layers.quantized_weight(phase, self.layer, local(given) * weight, given)
        yield from _joined(given, phase, self.layer, n=self.n, k=self.k)
        yield _gemm(given, phase, self.layer, n=self.n, k=self.k, makes=self.makes)
        for one in self.adapters:
            yield from one.forward(given, phase)
        if not second:
            yield from _summed(given, phase, self.layer, self.n)
        yield from _biased(given, phase, self.layer, self.n)
        if second and phase == "forward":
            yield from _stashed(given, phase)

    def backward(self, given: LayerInputs, behind: Behind) -> Iterator[Operation]:
        """Both gradients; behind those of the second the sum over y."""
        layer, n, k = self.layer, self.n, self.k
        weight, second = local(given) * n * k, self.gathers == "backward"
        if second:
            yield from _stashed(given, "backward")
        yield from _biased(given, "backward", layer, n)
        quantized = layers.quantized("backward", layer, rows(given) * n, given, once=not self.trains)
        if second or not _is_fused(given):
            yield from quantized if second else _by_expert(given, quantized)
        yield from layers.quantized_again(layer, rows(given) * k, weight, given, trains=self.trains)
        yield from _joined(given, "backward", layer, n=n, k=k)
        if behind.made is None:
            *others, last = reversed(self.adapters)
            for one in others:
                yield from one.backward(given, passes=False)
            yield from last.backward(given, passes=False, frees=behind.frees)
            return
        for one in reversed(self.adapters):
            yield from one.backward(given)
        added = tuple(made.name for one in self.adapters for made in one.input_gradient(given))
        freed = () if self.trains else (*behind.frees, *added)
        yield _gemm(given, "backward", layer, n=k, k=n, layout="NT", makes=(behind.gradient,), frees=freed)
        if self.trains:
            yield _gemm(given, "backward", layer, n=n, k=k, layout="TN", frees=behind.frees)
            if given.kernels.expert_gradient.kernels:
                yield moves("backward", layer, given.kernels.expert_gradient, weight, given, calls=PARTS)
        if second:
            yield from _summed(given, "backward", layer, k)


def _shared(given: LayerInputs, normed: Norm) -> list[Node]:
    """Shared experts, which see every token: a dense MLP split over x and y, beside the others."""
    wide = _experts(given).shared_width
    if not wide:
        return []
    inner = as_size(float(wide)) / X
    ups = float(given.own.ups) * inner
    first, second = Linear(SHARED_FC1, H / Y, ups, "y", "x"), Linear(SHARED_FC2, inner, H / Y, "x", "y")
    into = SharedGemm(
        linear=first,
        makes=(given.stream("shared up projection", "up projection", ups, inside=True),),
        gradient=given.stream("shared up gradient", _TEMPORARY, ups, inside=True),
        reads=normed,
        modules=_SHARED,
    )
    activated = mlp.activation(given, SHARED_ACTIVATION, inner, name="shared ", modules=_SHARED)
    # Their input is there before any of their gradients; a gate's gradient needs their output.
    gated = _experts(given).shared_gate
    kept = (given.stream("shared expert output", "shared expert output"),) if gated else ()
    vectors = Vectors(over_y=given.own.hidden * gated)
    out = SharedGemm(linear=second, makes=kept, keeps=gated, modules=_SHARED, needs=(normed,), vectors=vectors)
    return [into, activated, out]


class SharedGemm(Gemm):
    """A GEMM of the shared experts, whose output, or input gradient, is added to that of the others.

    A gate's number a token is the sigmoid of the input times a vector (NVIDIA/Megatron-LM@d98e8a64,
    megatron/core/transformer/moe/shared_experts.py).
    """

    def forward(self, given: LayerInputs, phase: Phase) -> Iterator[Operation]:
        """With gate and sum behind the second."""
        yield from super().forward(given, phase)
        if self.makes and self.keeps:
            yield moves(phase, SHARED_FC2, Traffic(2, 3), given.routed * H / Y, given, calls=PARTS)
        yield from _added(given, phase) if self.layer == SHARED_FC2 else ()

    def backward(self, given: LayerInputs, behind: Behind) -> Iterator[Operation]:
        """With the gate before the second, and the sum behind the first."""
        if self.makes and self.keeps:
            elements, kept = given.routed * H / Y, names(self.makes)
            yield moves("backward", SHARED_FC2, Traffic(3, 5), elements, given, calls=PARTS, frees=kept)
        yield from super().backward(given, behind)
        yield from _added(given, "backward") if self.layer == SHARED_FC1 and behind.made else ()


def _experts(given: LayerInputs) -> Experts:
    assert given.own.experts is not None, "asked before"
    return given.own.experts


def _normed_element(given: LayerInputs) -> float:
    """Bytes of an element of the norm's output: a router needs it whole, shared experts quantized beside that."""
    quantized = given.format.operand_bytes if given.format and _experts(given).shared_width else 0
    return given.element + quantized


def local(given: LayerInputs) -> Size:
    """Experts of a rank."""
    return as_size(float(_experts(given).count)) / EXPERT


def _split(given: LayerInputs) -> Size:
    """Ranks that split the width of an expert."""
    return EXPERT_TENSOR if given.options.sequence_parallel else X


def row(given: LayerInputs) -> Size:
    """Width of a token on its way to an expert."""
    latent = _experts(given).latent_width
    return as_size(float(latent)) / Y if latent else H / Y


def width(given: LayerInputs) -> Size:
    """Width of an expert on a rank."""
    return as_size(float(_experts(given).width)) / _split(given)


def up(given: LayerInputs) -> Size:
    """Output of an expert's first GEMM on a rank, gate included."""
    return float(given.own.ups) * width(given)


def weights(given: LayerInputs, each: int | None = None) -> Size:
    """Weights of the experts of a block that one rank multiplies with; each: of these, so many of an expert."""
    each = sum(_each(given)) if each is None else each
    return float(each) * local(given) / (_split(given) * Y)


def _each(given: LayerInputs) -> tuple[int, int]:
    """Elements of both matrices of an expert."""
    one = _experts(given)
    second = one.width * (one.latent_width or given.own.hidden)
    return given.own.ups * second, second


def trained_each(node: Grouped, given: LayerInputs) -> int:
    """Elements of one expert that train: of its matrix, or of adapters that it has for itself."""
    alone = dict.fromkeys(("x", "y", "expert_tensor"), 1.0) | {"H": float(given.own.hidden)}
    added = (float(size.evaluate(alone)) for one in node.adapters if one.each for size in (one.down, one.up))
    return node.each * node.trains + int(sum(added))


def gather_experts(given: LayerInputs, *, phase: Phase, unit: GatherUnit) -> list[Operation]:
    """Gather of the experts of a block over what shards them, where weights are gathered by this unit.

    Recompute gathers them as other weights, and so does what CUDA graphs of whole layers or passes capture
    (NVIDIA/Megatron-LM@d98e8a64, docs/api-guide/core/generalized_tensor_parallel.md, section 3.4).
    """
    if not given.shards_experts or given.options.gather_unit != unit:
        return []
    calls = given.gathered_share(phase)
    gathers = layers.gather_weight(EXPERTS, weights(given), given, phase=phase, calls=calls)
    ahead = given.options.gathers_experts and phase != "recompute"
    if ahead and not {"full", "full_iteration"} & {*given.options.cuda_graphs}:
        return [replace(one, role="ahead") for one in gathers if isinstance(one, Collective)]
    return gathers


def reduce_experts(given: LayerInputs, nodes: Iterable[Node], *, unit: GatherUnit) -> list[Operation]:
    """Reduce-scatter of the gradients of those that train."""
    each = sum(trained_each(node, given) for node in nodes if isinstance(node, Grouped))
    if not each or not given.shards_experts or given.options.gather_unit != unit:
        return []
    return layers.reduce_weight_gradient(EXPERTS, weights(given, each), given)


def _dispatched(given: LayerInputs) -> Array:
    return _rows_of(given, "dispatched tokens", row(given), element=given.saved_element)


def _dispatch(given: LayerInputs, phase: Phase) -> Iterator[Operation]:
    yield from _latent(given, phase, DISPATCH)
    yield from _sent(given, phase, DISPATCH, there=True, makes=(_dispatched(given),))


def _dispatch_backward(given: LayerInputs, behind: Behind) -> Iterator[Operation]:
    yield from _sent(given, "backward", DISPATCH, there=False, frees=behind.frees)
    yield from _latent(given, "backward", DISPATCH, trains=behind.trains)
    yield from _over_x(given, "backward", DISPATCH)


def _combine(given: LayerInputs, phase: Phase, *, makes: Arrays) -> Iterator[Operation]:
    """Rows back to their tokens, as the output of the branch where that is kept for a norm."""
    steps = [*_sent(given, phase, COMBINE, there=False), *_latent(given, phase, COMBINE)]
    steps += _over_x(given, phase, COMBINE)
    yield from steps[:-1]
    yield replace(steps[-1], makes=(*steps[-1].makes, *makes))


def _combine_backward(given: LayerInputs, behind: Behind) -> Iterator[Operation]:
    yield from _latent(given, "backward", COMBINE, trains=behind.trains)
    yield from _sent(given, "backward", COMBINE, there=True, makes=(behind.gradient,), frees=behind.frees)


def rows(given: LayerInputs, most: Size = IMBALANCE) -> Size:
    """R, rows after dispatch of the rank with most tokens, for which all wait, in a half micro-batch."""
    return most * given.routed * float(_experts(given).per_token) * EXPERT_TENSOR


def _rows_of(given: LayerInputs, name: str, width: Size, kind: str = "", *, element: float = 0) -> Array:
    """`[R, width]` of the whole micro-batch, of the fullest rank that is likely."""
    return Array(name, kind or name, (element or given.element) * PARTS * rows(given, FULLEST) * width)


def _gemm(
    given: LayerInputs,
    phase: Phase,
    layer: str,
    *,
    n: Size,
    k: Size,
    layout: MatmulLayout = "NN",
    makes: Arrays = (),
    frees: tuple[str, ...] = (),
) -> MatMul:
    """`O[R, n] = I[R, k] · W[k, n]`, a group an expert of the rank; of a weight gradient (TN) R is contracted."""
    each = rows(given) / local(given)
    sizes = (k, n, each) if layout == "TN" else (each, n, k)
    groups, padded = local(given), given.format.alignment / 2.0 if given.format else 0.0
    return MatMul(
        *(phase, layer, *sizes, layout, PARTS),
        groups=groups,
        narrow=given.narrow,
        padded=padded,
        added_bytes=given.gradient_bytes if layout == "TN" and given.options.fused_accumulation else 0,
        makes=makes,
        frees=frees,
    )


def _is_separate(given: LayerInputs) -> bool:
    """Whether biases and clamps of experts are operators of their own."""
    return given.options.expert_kernels == "separate"


def _is_fused(given: LayerInputs) -> bool:
    """Whether activation, probability and quantization are in the grouped GEMMs."""
    return given.options.expert_kernels == "fused" and given.format is not None and given.format.name == "mxfp8"


def _biased(given: LayerInputs, phase: Phase, layer: str, width: Size) -> Iterator[Operation]:
    """Biases expert by expert, the second one times probabilities, which DeepEP and HybridEP have in FP32."""
    if not given.own.biases or given.options.expert_kernels not in ("looped", *["separate"] * (layer == FC2)):
        return
    wide = find_dispatcher(given.options.dispatcher).counting == "rank"
    table = _BIAS_LOOP[wide] if layer == FC2 else _BIAS_LOOP_ALONE
    each, whole = table[phase == "backward"]
    one = moves(phase, layer, each, rows(given) * width / local(given), given, calls=local(given) * PARTS)
    rest = moves(phase, layer, whole, rows(given) * width, given, calls=PARTS)
    yield from (replace(one, bare=True), replace(rest, bare=True))


def _stashed(given: LayerInputs, phase: Phase) -> Iterator[Operation]:
    """A copy of the dispatched tokens, FC1's output and the activation, into pages or back; recipes with pages repeat
    none of them."""
    if given.options.paged_stash:
        for width_of, element in (
            (row(given), given.saved_element),
            (up(given), float(given.element)),
            (width(given), given.saved_element),
        ):
            yield Kernel(phase, FC2, 2.0 * element * rows(given) * width_of, PARTS)


def _by_expert(given: LayerInputs, quantized: Iterable[Operation]) -> Iterator[Operation]:
    """What quantizes FC1's output gradient; where it sums that of its bias, too, once an expert
    (NVIDIA/TransformerEngine@d0067d0d, transformer_engine/pytorch/module/_split_quantization.py)."""
    apart = given.own.biases and _is_separate(given)
    for one in quantized:
        if apart and isinstance(one, Kernel):
            yield replace(one, size_bytes=one.size_bytes / local(given), calls=one.calls * local(given))
        else:
            yield one


def _clamped(given: LayerInputs, phase: Phase) -> Iterator[Operation]:
    if _experts(given).clamp and _is_separate(given):
        moved = _CLAMPED_BACK if phase == "backward" else _CLAMPED
        elements = rows(given) * width(given) / STRIDED
        yield replace(moves(phase, ACTIVATION, moved, elements, given, calls=PARTS), bare=True)


def _activation(given: LayerInputs, phase: Phase) -> Iterator[Operation]:
    """Activation times probability, `[R, G] → [R, F]`, with the clamps before it."""
    yield from _clamped(given, phase)
    # Repeated, it is the original that is kept for the weight gradient.
    element = given.element if phase == "recompute" else given.saved_element
    made = _rows_of(given, "expert activation", width(given), element=element)
    # In FC1's kernel it is written, but no kernel of its own; repeated it is one.
    elements = rows(given) * width(given) * float(phase == "recompute" or not _is_fused(given))
    yield layers.activates(phase, ACTIVATION, elements, given, makes=(made,))


def _activated(given: LayerInputs, phase: Phase) -> Iterator[Operation]:
    yield from _activation(given, phase)
    yield from _weighted(given, phase, given.kernels.weighted)


def _activated_backward(given: LayerInputs, behind: Behind) -> Iterator[Operation]:
    yield from _weighted(given, "backward", given.kernels.weighted_back)
    elements = rows(given) * width(given) * float(not _is_fused(given))
    yield layers.activates("backward", ACTIVATION, elements, given, makes=(behind.gradient,), frees=behind.frees)
    yield from _clamped(given, "backward")


def _joined(given: LayerInputs, phase: Phase, layer: str, *, n: Size, k: Size) -> Iterator[Operation]:
    """Shards of the experts' weights `[k, n]` are copied into one, where the bundled runtime gathers several."""
    if given.launched:
        weight = local(given) * n * k
        yield moves(phase, layer, Traffic(1, 2), weight, given, calls=PARTS * JOINED)


def _weighted(given: LayerInputs, phase: Phase, moved: Traffic) -> Iterator[Operation]:
    """Probabilities times activations `[R, F]`, or what comes back through both, where these are kernels apart."""
    if moved.kernels:
        yield moves(phase, ACTIVATION, moved, rows(given) * width(given), given, calls=PARTS)


def _summed(given: LayerInputs, phase: Phase, layer: str, width: Size) -> Iterator[Operation]:
    """Sum over y of what contracts over a split row: FC1's output, or FC2's input gradient."""
    if not given.options.sequence_parallel:
        yield Collective("all_reduce", "y", phase, layer, given.element * rows(given) * width, calls=PARTS)


def _over_x(given: LayerInputs, phase: Phase, layer: str) -> Iterator[Operation]:
    """Sum over x of what all experts of a token make together, where x splits them."""
    if not given.options.sequence_parallel:
        role: Role = "output" if phase != "backward" else "other"
        yield Collective("all_reduce", "x", phase, layer, given.element * given.routed * H / Y, role, PARTS)


def _latent(given: LayerInputs, phase: Phase, layer: str, *, trains: bool = True) -> Iterator[Operation]:
    """Projection to the latent that is dispatched, or back, where there is one."""
    if not _experts(given).latent_width:
        return
    tokens, wide, narrow = given.routed, H / Y, row(given)
    n, k = (narrow, wide) if layer == DISPATCH else (wide, narrow)
    if phase == "backward":
        yield MatMul(phase, layer, tokens, k, n, "NT", PARTS)
        if trains:
            yield MatMul(phase, layer, k, n, tokens, "TN", PARTS)
    else:
        yield MatMul(phase, layer, tokens, n, k, "NN", PARTS)


def router(given: LayerInputs) -> Linear:
    """Logits of experts; where tokens are split over x, each rank has all experts."""
    share = as_size(float(_experts(given).count))
    return Linear(ROUTER, H / Y, share if given.options.sequence_parallel else share / X, "y", "x")


def _routing(given: LayerInputs) -> Array:
    return Array("routing", "routing maps", _ROUTED * _experts(given).per_token * PARTS * given.routed)


def _router(given: LayerInputs, phase: Phase) -> Iterator[Operation]:
    """Logits of all experts `[T, E]`, summed over y, their scores, and the K best; they compute in FP32.

    Without sequence parallelism the router is a linear layer as others, of which x has shares: gathered, as scores need
    all logits of a token. For a load-balancing loss the tokens of each expert in the batch are counted over all ranks.
    """
    count, tokens, element = float(_experts(given).count), given.routed, float(given.elements.statistics)
    linear = router(given)
    if not given.options.sequence_parallel:
        yield from gathered(linear, given, phase)
    if given.kernels.routed.kernels:
        yield moves(phase, ROUTER, given.kernels.routed, tokens * H / Y, given, calls=PARTS)
    yield MatMul(phase, ROUTER, tokens, linear.n, linear.k, "NN", PARTS, makes=(_routing(given),))
    yield Collective("all_reduce", "y", phase, ROUTER, element * linear.n * tokens, calls=PARTS)
    if not given.options.sequence_parallel:
        yield Collective("all_gather", "x", phase, ROUTER, element * count * tokens, calls=PARTS)
    if given.options.balancing_loss and phase == "forward":
        yield Collective("all_reduce", f"z{given.data_axes}", phase, ROUTER, as_size(element * count), "counts")
    yield moves(phase, ROUTER, _scored(given), count * tokens, given, calls=PARTS)


def _scored(given: LayerInputs) -> Traffic:
    return _SCORED_AT_ONCE if given.options.kernels == "ideal" else _SCORED


def _router_backward(given: LayerInputs, behind: Behind) -> Iterator[Operation]:
    """Gradients of scores, of the router's input, to which those of the experts are added, and of its weight."""
    count, tokens, layer, linear = float(_experts(given).count), given.routed, ROUTER, router(given)
    yield moves("backward", layer, _scored(given), count * tokens, given, calls=PARTS)
    apart = not given.options.sequence_parallel
    if apart:
        yield from behind.gather(linear)
    freed = *behind.frees, _routing(given).name
    back, unread = partial(MatMul, "backward", layer), () if behind.trains else freed
    yield back(tokens, linear.k, linear.n, "NT", PARTS, makes=(behind.gradient,), frees=unread)
    yield moves("backward", layer, given.kernels.routed_back, tokens * H / Y, given, calls=PARTS)
    if behind.trains:
        yield back(linear.k, linear.n, tokens, "TN", PARTS, frees=freed)
    if behind.trains and apart and given.options.gather_unit == "weight":
        yield from layers.reduce_weight_gradient(layer, linear.weight, given)


def _sent(
    given: LayerInputs, phase: Phase, layer: str, *, there: bool, makes: Arrays = (), frees: tuple[str, ...] = ()
) -> list[Operation]:
    """Rows to their experts (`there`), or back: of each direction the other is the backward pass, with as many bytes.

    Backward they are what they are forward in reverse order. allgather: all tokens to all ranks, from which each takes
    its rows; combined in FP32, the type of probabilities. Others send tokens over `expert`, each once or a copy for
    each expert, gather what arrived over `expert_tensor`, and put it into the order of experts.
    """
    options, width = given.options, row(given)
    kind: OpKind = "all_gather" if there else "reduce_scatter"
    routed = IMBALANCE * given.routed
    copies = routed * float(_experts(given).per_token)
    # The bundled runtime has the rows of a rank that exchanges none in the order of experts already.
    exchanged = PARTS * EXCHANGED if given.launched else PARTS
    ordered = moves(phase, layer, Traffic(1, 2), copies * EXPERT_TENSOR * width, given, calls=exchanged)
    steps = _probabilities(given, phase, copies, there=there) if layer == DISPATCH else []
    if options.dispatcher == "allgather":
        size = (4.0 if layer == COMBINE else given.element) * given.routed * EXPERT * EXPERT_TENSOR * width
        steps += [Collective(kind, "expert_tensorexpert", phase, layer, size, calls=PARTS), ordered]
    else:
        sent, copied = routed, find_dispatcher(options.dispatcher).counting == "copy"
        if copied:
            token, copy = given.kernels.dispatched if there else given.kernels.combined
            moved, sent = token + copy * float(_experts(given).per_token), copies
            steps.insert(0, moves(phase, layer, moved, given.routed * width, given, calls=PARTS))
        experts, over = _experts(given), ("expert_tensor", EXPERT_TENSOR * copies)
        routing = Routing(
            *(experts.count, experts.per_token, experts.groups, experts.chosen_groups), options.dispatcher
        )
        swapped: OpKind = "dispatch" if there else "combine"
        steps += [
            Collective(swapped, "expert", phase, layer, given.element * sent * width, calls=PARTS, routing=routing),
            Collective(kind, over[0], phase, layer, given.element * over[1] * width, calls=PARTS),
            ordered,
        ]
    steps = steps if there else steps[::-1]
    return [*steps[:-1], replace(steps[-1], makes=makes, frees=frees)]


def _probabilities(given: LayerInputs, phase: Phase, copies: Size, *, there: bool) -> list[Operation]:
    """Calls beside a dispatch: FP32 probabilities, with the map of tokens or how many each expert gets; gradients of
    probabilities back. DeepEP and HybridEP have them in the same call, under a hundredth of its bytes."""
    experts, every = float(_experts(given).count), EXPERT * EXPERT_TENSOR
    if given.options.dispatcher == "allgather":
        kind: OpKind = "all_gather" if there else "reduce_scatter"
        size = (5.0 if there else 4.0) * experts * given.routed * every
        return [Collective(kind, "expert_tensorexpert", phase, PROBABILITIES, size, calls=PARTS)]
    if find_dispatcher(given.options.dispatcher).counting != "copy":
        return []
    counted = Collective("all_gather", "expert_tensorexpert", phase, PROBABILITIES, 8.0 * experts * every, calls=PARTS)
    element = float(given.elements.statistics)
    sent = Collective("all_to_all", "expert", phase, PROBABILITIES, element * copies, calls=PARTS)
    if there or given.options.sequence_parallel:
        return [counted, sent] if there else [sent]
    # Each rank of x has a share of the width of an expert, and so of a probability's gradient.
    size = element * given.routed * float(_experts(given).per_token)
    return [sent, Collective("all_reduce", "x", phase, PROBABILITIES, size, calls=PARTS)]


def _added(given: LayerInputs, phase: Phase) -> Iterator[Operation]:
    """The shared experts' output, or their input's gradient, added to that of the others."""
    if given.launched and phase != "recompute":
        yield moves(phase, SHARED_FC2, Traffic(1, 3), given.routed * H / Y, given, calls=PARTS)
