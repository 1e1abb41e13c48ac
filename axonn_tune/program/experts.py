"""A mixture of experts on one rank: router, dispatch, grouped GEMMs, combine; and shared experts.

Letters: T tokens that a rank routes, E experts, K experts a token, D width of a dispatched token (H, or a latent), F
width of an expert, G with its gate, R = T·K·expert_tensor rows of a rank after dispatch. With sequence parallelism a
rank routes its own share of tokens, and ranks of `expert_tensor` gather theirs; elsewhere x and y split experts as they
split other matrices, and each of their ranks routes all tokens. Order of operations: NVIDIA/Megatron-LM@d98e8a64,
megatron/core/transformer/moe, token_dispatcher.py and experts.py; arXiv 2603.07685, figure 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeAlias

from axonn_tune.frameworks.dispatchers import find_dispatcher
from axonn_tune.program import layers
from axonn_tune.program.layers import (
    EXCHANGED,
    EXPERT,
    EXPERT_TENSOR,
    FULLEST,
    IMBALANCE,
    JOINED,
    PARTS,
    H,
    LayerInputs,
    Linear,
    Y,
    moves,
)
from axonn_tune.program.operations import (
    Array,
    Arrays,
    Collective,
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
from axonn_tune.specs.machine import MatmulLayout

ROUTER, DISPATCH, COMBINE = "moe.router", "moe.dispatch", "moe.combine"
PROBABILITIES = "moe.probabilities"
FC1, ACTIVATION, FC2 = "moe.fc1", "moe.activation", "moe.fc2"
SHARED_FC1, SHARED_ACTIVATION, SHARED_FC2 = "moe.shared_fc1", "moe.shared_activation", "moe.shared_fc2"

_SCORED, _SCORED_AT_ONCE = Traffic(12, 0, 24), Traffic(2, 0, 6)
"""Kernels of scores, top-k, probabilities and the balancing loss, by logit, in FP32, as many backward: operator by
operator, or fused into one for the scores of the best and one for the loss (NVIDIA/TransformerEngine@d0067d0d,
transformer_engine/pytorch/router.py; `moe_router_fusion`, which recipes of Megatron-Bridge set)."""

_ROUTED = 8.0
"""Bytes of what is kept of the routing of a token to one expert."""

Gathering: TypeAlias = Callable[[Linear], list[Operation]]
Repeating: TypeAlias = Callable[..., Iterator[Operation]]


def forward(given: LayerInputs, *, phase: Phase) -> Iterator[Operation]:
    """From the norm's output `[T, H_y]` to that of the layer, before its addition to the residual stream."""
    yield from _router(given, phase)
    before, first, second = _shared_parts(given, shared_forward(given, phase=phase), SHARED_FC2)
    yield from before
    yield from _latent(given, phase, DISPATCH)
    made = _rows_of(given, "dispatched tokens", given.expert_row, element=given.saved_element)
    yield from _beside(_sent(given, phase, DISPATCH, there=True, makes=(made,)), first)
    yield from layers.gather_experts(given, phase=phase, unit="weight")
    up = _rows_of(given, "expert up projection", given.expert_up)
    yield from _quantized(given, phase, FC1, given.expert_row, weight=given.expert_row * given.expert_up)
    yield from _joined(given, phase, FC1, n=given.expert_up, k=given.expert_row)
    yield _gemm(given, phase, FC1, n=given.expert_up, k=given.expert_row, makes=(up,))
    yield from _summed(given, phase, FC1, given.expert_up)
    yield from activation(given, phase=phase)
    yield from _weighted(given, phase, given.kernels.weighted)
    yield from _quantized(given, phase, FC2, given.expert_width, weight=given.expert_row * given.expert_width)
    yield from _joined(given, phase, FC2, n=given.expert_row, k=given.expert_width)
    yield _gemm(given, phase, FC2, n=given.expert_row, k=given.expert_width)
    yield from _beside(_sent(given, phase, COMBINE, there=False), second)
    yield from _latent(given, phase, COMBINE)
    yield from _over_x(given, phase, COMBINE)


def backward(given: LayerInputs, gather: Gathering, again: Repeating, *, held: bool = False) -> Iterator[Operation]:
    """Gradients in the reverse order; gather: of a weight; again: what is repeated here, if it is; held: the weights
    of experts are there, gathered for recompute."""
    yield from again("moe")
    yield from _latent(given, "backward", COMBINE)
    made = _rows_of(given, "expert output gradient", given.expert_row, "backward temporaries")
    after, second, first = _shared_parts(given, shared_backward(given, gather, again), SHARED_FC1)
    yield from _beside(_sent(given, "backward", COMBINE, there=True, makes=(made,)), second)
    if not held:
        yield from layers.gather_experts(given, phase="backward", unit="weight", calls=given.unkept_share)
    yield from again(ACTIVATION)
    freed = "expert activation", made.name
    yield from _gemm_backward(given, FC2, n=given.expert_row, k=given.expert_width, frees=freed)
    yield from _summed(given, "backward", FC2, given.expert_width)
    yield from _weighted(given, "backward", given.kernels.weighted_back)
    moved, freed = given.kernels.activation_back, ("expert up projection", "expert activation gradient")
    made = _rows_of(given, "expert up gradient", given.expert_up, "backward temporaries")
    elements = rows(given) * given.expert_width
    yield moves("backward", ACTIVATION, moved, elements, given, calls=PARTS, makes=(made,), frees=freed)
    freed = "dispatched tokens", made.name
    yield from _gemm_backward(given, FC1, n=given.expert_up, k=given.expert_row, frees=freed)
    yield from layers.reduce_experts(given, unit="weight")
    yield from _beside(_sent(given, "backward", DISPATCH, there=False, frees=(f"{FC1} gradient",)), first)
    yield from _latent(given, "backward", DISPATCH)
    yield from _over_x(given, "backward", DISPATCH)
    yield from again("mlp.norm")
    yield from after
    yield from _router_backward(given, gather)


def rows(given: LayerInputs, most: Size = IMBALANCE) -> Size:
    """R, rows after dispatch of the rank with most tokens, for which all wait, in a half micro-batch."""
    return most * given.routed * float(given.experts.per_token) * EXPERT_TENSOR


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
    each = rows(given) / given.local_experts
    sizes = (k, n, each) if layout == "TN" else (each, n, k)
    groups, padded = given.local_experts, given.format.alignment / 2.0 if given.format else 0.0
    return MatMul(
        *(phase, layer, *sizes, layout, PARTS),
        groups=groups,
        narrow=given.narrow,
        padded=padded,
        makes=makes,
        frees=frees,
    )


def _quantized(
    given: LayerInputs, phase: Phase, layer: str, width: Size, *, weight: Size | None = None
) -> Iterator[Operation]:
    """Quantization of `[R, width]` by one grouped kernel; weight: elements of an expert's, quantized too."""
    yield from layers.quantized(phase, layer, rows(given) * width, given)
    if weight is not None:
        yield from layers.quantized_weight(phase, layer, given.local_experts * weight, given)


def _gemm_backward(given: LayerInputs, layer: str, *, n: Size, k: Size, frees: tuple[str, ...]) -> Iterator[Operation]:
    """Both gradients of `_gemm`."""
    name = "expert activation gradient" if layer == FC2 else f"{layer} gradient"
    made = _rows_of(given, name, k, "backward temporaries")
    yield from _quantized(given, "backward", layer, n)
    yield from layers.quantized_again(layer, rows(given) * k, given.local_experts * n * k, given)
    yield from _joined(given, "backward", layer, n=n, k=k)
    yield _gemm(given, "backward", layer, n=k, k=n, layout="NT", makes=(made,))
    yield _gemm(given, "backward", layer, n=n, k=k, layout="TN", frees=frees)
    if given.kernels.expert_gradient.kernels:
        weight = given.local_experts * n * k
        yield moves("backward", layer, given.kernels.expert_gradient, weight, given, calls=PARTS)


def activation(given: LayerInputs, *, phase: Phase) -> Iterator[Operation]:
    """Activation times probability, `[R, G] → [R, F]`."""
    # Repeated, it is the original that is kept for the weight gradient.
    element = given.element if phase == "recompute" else given.saved_element
    made = _rows_of(given, "expert activation", given.expert_width, element=element)
    elements = rows(given) * given.expert_width
    moved = given.kernels.activation
    yield moves(phase, ACTIVATION, moved, elements, given, calls=PARTS, makes=(made,))


def _joined(given: LayerInputs, phase: Phase, layer: str, *, n: Size, k: Size) -> Iterator[Operation]:
    """Shards of the experts' weights `[k, n]` are copied into one, where the bundled runtime gathers several."""
    if given.launched:
        weight = given.local_experts * n * k
        yield moves(phase, layer, Traffic(1, 2), weight, given, calls=PARTS * JOINED)


def _weighted(given: LayerInputs, phase: Phase, moved: Traffic) -> Iterator[Operation]:
    """Probabilities times activations `[R, F]`, or what comes back through both, where these are kernels apart."""
    if moved.kernels:
        yield moves(phase, ACTIVATION, moved, rows(given) * given.expert_width, given, calls=PARTS)


def _summed(given: LayerInputs, phase: Phase, layer: str, width: Size) -> Iterator[Operation]:
    """Sum over y of what contracts over a split row: FC1's output, or FC2's input gradient."""
    if not given.options.sequence_parallel:
        yield Collective("all_reduce", "y", phase, layer, given.element * rows(given) * width, calls=PARTS)


def _over_x(given: LayerInputs, phase: Phase, layer: str) -> Iterator[Operation]:
    """Sum over x of what all experts of a token make together, where x splits them."""
    if not given.options.sequence_parallel:
        role: Role = "output" if phase != "backward" else "other"
        yield Collective("all_reduce", "x", phase, layer, given.element * given.routed * H / Y, role, PARTS)


def _latent(given: LayerInputs, phase: Phase, layer: str) -> Iterator[Operation]:
    """Projection to the latent that is dispatched, or back, where there is one."""
    if not given.experts.latent_width:
        return
    tokens, wide, narrow = given.routed, H / Y, given.expert_row
    n, k = (narrow, wide) if layer == DISPATCH else (wide, narrow)
    if phase == "backward":
        yield MatMul(phase, layer, tokens, k, n, "NT", PARTS)
        yield MatMul(phase, layer, k, n, tokens, "TN", PARTS)
    else:
        yield MatMul(phase, layer, tokens, n, k, "NN", PARTS)


def _router(given: LayerInputs, phase: Phase) -> Iterator[Operation]:
    """Logits of all experts `[T, E]`, summed over y, their scores, and the K best; they compute in FP32.

    Without sequence parallelism the router is a linear layer as others, of which x has shares: gathered, as scores need
    all logits of a token. For a load-balancing loss the tokens of each expert in the batch are counted over all ranks.
    """
    count, tokens, element = float(given.experts.count), given.routed, float(given.elements.statistics)
    kept = Array("routing", "routing maps", _ROUTED * given.experts.per_token * PARTS * tokens)
    linear = given.router
    if not given.options.sequence_parallel:
        yield from _gathered(linear, given, phase)
    if given.kernels.routed.kernels:
        yield moves(phase, ROUTER, given.kernels.routed, tokens * H / Y, given, calls=PARTS)
    yield MatMul(phase, ROUTER, tokens, linear.n, linear.k, "NN", PARTS, makes=(kept,))
    yield Collective("all_reduce", "y", phase, ROUTER, element * linear.n * tokens, calls=PARTS)
    if not given.options.sequence_parallel:
        yield Collective("all_gather", "x", phase, ROUTER, element * count * tokens, calls=PARTS)
    if given.options.balancing_loss and phase == "forward":
        yield Collective("all_reduce", f"z{given.data_axes}", phase, ROUTER, as_size(element * count), "counts")
    yield moves(phase, ROUTER, _scored(given), count * tokens, given, calls=PARTS)


def _scored(given: LayerInputs) -> Traffic:
    return _SCORED_AT_ONCE if given.options.kernels == "ideal" else _SCORED


def _gathered(linear: Linear, given: LayerInputs, phase: Phase) -> list[Operation]:
    """Gather of a weight for the forward pass, where weights are gathered one by one."""
    if given.options.gather_unit == "block":
        return []
    return layers.gather_weight(linear.layer, linear.weight, given, phase=phase)


def _router_backward(given: LayerInputs, gather: Gathering) -> Iterator[Operation]:
    """Gradients of scores, of the router's input, to which those of the experts are added, and of its weight."""
    count, tokens, layer, linear = float(given.experts.count), given.routed, ROUTER, given.router
    made = given.stream("mlp.norm gradient", "residual gradients")
    yield moves("backward", layer, _scored(given), count * tokens, given, calls=PARTS)
    apart = not given.options.sequence_parallel
    if apart:
        yield from gather(linear)
    yield MatMul("backward", layer, tokens, linear.k, linear.n, "NT", PARTS, makes=(made,))
    yield moves("backward", layer, given.kernels.routed_back, tokens * H / Y, given, calls=PARTS)
    freed = "mlp.norm output", "routing"
    yield MatMul("backward", layer, linear.k, linear.n, tokens, "TN", PARTS, frees=freed)
    if apart and given.options.gather_unit == "weight":
        yield from layers.reduce_weight_gradient(layer, linear.weight, given)


def _sent(
    given: LayerInputs, phase: Phase, layer: str, *, there: bool, makes: Arrays = (), frees: tuple[str, ...] = ()
) -> list[Operation]:
    """Rows to their experts (`there`), or back: of each direction the other is the backward pass, with as many bytes.

    Backward they are what they are forward in reverse order. allgather: all tokens to all ranks, from which each takes
    its rows; combined in FP32, the type of probabilities. Others send tokens over `expert`, each once or a copy for
    each expert, gather what arrived over `expert_tensor`, and put it into the order of experts.
    """
    options, width = given.options, given.expert_row
    kind: OpKind = "all_gather" if there else "reduce_scatter"
    routed = IMBALANCE * given.routed
    copies = routed * float(given.experts.per_token)
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
            moved, sent = token + copy * float(given.experts.per_token), copies
            steps.insert(0, moves(phase, layer, moved, given.routed * width, given, calls=PARTS))
        experts, over = given.experts, ("expert_tensor", EXPERT_TENSOR * copies)
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


def _shared_parts(
    given: LayerInputs, steps: Iterator[Operation], then: str
) -> tuple[Iterable[Operation], list[Operation], list[Operation]]:
    """Operations of shared experts by themselves; or those beside the first exchange of tokens and, from the layer
    `then` on, beside the second."""
    if not given.options.shared_expert_overlap:
        return steps, [], []
    every = list(steps)
    place = next((number for number, step in enumerate(every) if step.layer == then), 0)
    return (), every[:place], every[place:]


def _beside(steps: list[Operation], others: list[Operation]) -> Iterator[Operation]:
    """Operations of an exchange, and behind its dispatch or combine those that run beside it."""
    for step in steps:
        yield step
        if isinstance(step, Collective) and step.routing is not None:
            yield from others


def _probabilities(given: LayerInputs, phase: Phase, copies: Size, *, there: bool) -> list[Operation]:
    """Calls beside a dispatch: FP32 probabilities, with the map of tokens or how many each expert gets; gradients of
    probabilities back. DeepEP and HybridEP have them in the same call, under a hundredth of its bytes."""
    experts, every = float(given.experts.count), EXPERT * EXPERT_TENSOR
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
    size = element * given.routed * float(given.experts.per_token)
    return [sent, Collective("all_reduce", "x", phase, PROBABILITIES, size, calls=PARTS)]


def shared_forward(given: LayerInputs, *, phase: Phase) -> Iterator[Operation]:
    """Experts that see every token: a dense MLP beside the others, split over x and y."""
    if not given.experts.shared_width:
        return
    first, second = given.shared_experts
    up = given.stream("shared up projection", "up projection", first.n, inside=True)
    yield from _gathered(first, given, phase)
    yield from layers.linear_forward(first, given, phase=phase, makes=(up,))
    made = given.stream("shared activation", "activation", second.k, inside=True, element=given.saved_element)
    moved = given.kernels.activation
    yield moves(phase, SHARED_ACTIVATION, moved, given.part * second.k, given, calls=PARTS, makes=(made,))
    yield from _gathered(second, given, phase)
    yield from layers.linear_forward(second, given, phase=phase)
    yield from _added(given, phase)


def shared_backward(given: LayerInputs, gather: Gathering, again: Repeating) -> Iterator[Operation]:
    """Gradients of the shared experts."""
    if not given.experts.shared_width:
        return
    first, second = given.shared_experts
    yield from again("shared_experts")
    yield from gather(second)
    made = given.stream("shared activation gradient", "backward temporaries", second.k, inside=True)
    yield from layers.linear_backward(second, given, makes=made, frees=("shared activation",))
    moved, freed = given.kernels.activation_back, ("shared up projection", made.name)
    made = given.stream("shared up gradient", "backward temporaries", first.n, inside=True)
    elements = given.part * second.k
    yield moves("backward", SHARED_ACTIVATION, moved, elements, given, calls=PARTS, makes=(made,), frees=freed)
    yield from gather(first)
    kept = given.stream("shared gradient", "residual gradients")
    yield from layers.linear_backward(first, given, makes=kept, frees=(made.name,))
    yield from _added(given, "backward")


def _added(given: LayerInputs, phase: Phase) -> Iterator[Operation]:
    """The shared experts' output, or their input's gradient, added to that of the others."""
    if given.launched and phase != "recompute":
        yield moves(phase, SHARED_FC2, Traffic(1, 3), given.routed * H / Y, given, calls=PARTS)


REPEATED = {ACTIVATION: activation, "shared_experts": shared_forward, "moe": forward}
"""What recompute can repeat of experts, by layer: the activation, or modules as a whole."""
