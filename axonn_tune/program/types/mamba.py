"""A Mamba-2 mixer on one rank: one GEMM in, a short convolution, a scan by chunks, a gated norm, one GEMM out.

Letters: M tokens of a half micro-batch, I inner width (heads * head_dim), g groups of heads, N state, l tokens of a
chunk. x splits heads and groups, y the hidden dim, as of attention: `[M, H_y] → [M, (2I + 2gN + heads)_x] → [M, I_x] →
[M, H_y]`. Convolution and scan take what their kernels were measured to (`cost/kernels.csv`); FLOPs are counted as of
the GEMMs of a chunk and a group in arXiv 2405.21060, section 6: C·Bᵀ, its states, and outputs from inside the chunk
and from states before it. What is saved: state-spaces/mamba, mamba_ssm/ops/triton, ssd_combined.py,
MambaSplitConv1dScanCombinedFn, which computes all but the projections and the scan's output again; gate and norm:
NVIDIA/Megatron-LM@00caa53a, megatron/core/ssm/mamba_mixer.py, _ssm_training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from axonn_tune.frameworks.description import Framework
from axonn_tune.program.constraints import Constraint
from axonn_tune.program.inputs import PARTS, H, LayerInputs, Linear, X, Y
from axonn_tune.program.layers import moves
from axonn_tune.program.nodes import Behind, Gemm, Nodes, Own, Vectors, branch, names, norm
from axonn_tune.program.operations import Array, Arrays, Collective, Measured, Operation, Phase, Size, Traffic, as_size
from axonn_tune.program.types import MIXER, LayerKind
from axonn_tune.specs.model import Layer, Model
from axonn_tune.specs.sections import Mamba

NORM, IN, CONV, SCAN, OUT = "mamba.norm", "mamba.in", "mamba.conv", "mamba.scan", "mamba.out"


def nodes(given: LayerInputs) -> Nodes:
    """Norm, GEMM in, scan, gated norm, GEMM out and addition; nothing of a layer type without a mixer."""
    if given.own.mamba is None:
        return []
    ended = branch(OUT, given)
    one, inner, temporary = given.own.mamba, _inner(given), "backward temporaries"
    width = as_size(float(one.conv_width + one.heads * (one.head_dim + 1))) / X
    return [
        norm(NORM, given, element=given.saved_element, first=True, quantizes=True),
        Gemm(
            linear=Linear(IN, H / Y, width, "y", "x", normed=True),
            makes=(given.stream("mamba projections", "Mamba-2 projections", width, inside=True),),
            gradient=given.stream("projection gradient", temporary, width, inside=True),
        ),
        Own(
            layer=SCAN,
            makes=(_scanned(given),),
            gradient=given.stream("gated gradient", temporary, inner, inside=True),
            keeps=True,
            # The convolution with its bias, three vectors of the scan, and its norm.
            vectors=Vectors(over_x=one.conv_width * (one.conv + 1) + one.heads * (3 + one.head_dim)),
            ahead=_forward,
            back=_backward,
        ),
        Own(
            layer=SCAN,
            makes=(_output(given),),
            gradient=given.stream("gated norm gradient", temporary, inner, inside=True),
            ahead=_gated,
            back=_gated_backward,
        ),
        Gemm(linear=Linear(OUT, inner, H / Y, "x", "y"), makes=ended.makes, gradient=ended.gradient),
        *ended.added,
    ]


def _constraints(model: Model, framework: Framework) -> list[Constraint]:
    """Whole heads and groups on each rank, with context parallelism after its all-to-alls.

    There Megatron-Core may also hold a group on several ranks (megatron/core/ssm/mamba_context_parallel.py); here not.
    """
    mixers, found = [layer.mamba for layer in model.types if layer.mamba], list[Constraint]()
    for name in ("heads", "groups") if mixers else ():
        value, what = math.gcd(*(getattr(one, name) for one in mixers)), f"Mamba {name}"
        found.append(Constraint(f"mamba-{name}-by-x", what, value, ("x",)))
        if "context" in framework.axes:
            axes = ("x", "context")
            found.append(Constraint(f"mamba-{name}-by-x-context", what, value, axes, where="context"))
    if mixers and framework.step.whole_rows:
        inner = math.gcd(*(one.heads * one.head_dim for one in mixers))
        found.append(Constraint("mamba-by-xz", "Mamba heads * head_dim", inner, ("x", "z")))
    return found


def _logged(layer: Layer, _: float) -> float:
    """Twice the hidden size as inner width, whatever it is, and 7 FLOPs an element of state."""
    if (one := layer.mamba) is None:
        return 0.0
    return float(3 * layer.hidden * (2 * layer.hidden - one.heads * one.head_dim) + 7 * layer.hidden * one.state)


KIND = LayerKind(place=MIXER, nodes=nodes, constraints=_constraints, logged=_logged)


def _mixer(given: LayerInputs) -> Mamba:
    assert given.own.mamba is not None, "asked before"
    return given.own.mamba


def _inner(given: LayerInputs) -> Size:
    return as_size(float(_mixer(given).heads * _mixer(given).head_dim)) / X


def _scanned(given: LayerInputs) -> Array:
    return given.stream("scan output", "Mamba-2 scan", _inner(given), inside=True)


def _gate(given: LayerInputs) -> Array:
    return given.stream("gated output", "Mamba-2 scan", _inner(given), inside=True)


def _output(given: LayerInputs) -> Array:
    element = given.saved_element
    return given.stream("gated norm output", "norm outputs", _inner(given), inside=True, element=element)


def _convolved(given: LayerInputs) -> Size:
    return as_size(float(_mixer(given).conv_width)) / X


def _states(given: LayerInputs) -> Size:
    """Elements of states a token: one of each head a chunk."""
    return _inner(given) * float(_mixer(given).state) / float(_mixer(given).chunk)


def _forward(given: LayerInputs, phase: Phase) -> Iterator[Operation]:
    """Convolution and scan, with the exchanges of context parallelism around them."""
    yield from _swapped(given, phase, there=True)
    yield _convolution(given, phase)
    one = _mixer(given)
    yield _scan(given, phase, _again_flops(one) + _inside_flops(one), makes=(_scanned(given),))
    yield from _swapped(given, phase, there=False)


def _gated(given: LayerInputs, phase: Phase) -> list[Operation]:
    """The gate's two accesses, in the scan's last kernel, and those of the norm."""
    made = _gate(given), _output(given)
    return [moves(phase, SCAN, Traffic(1, 4), given.part * _inner(given), given, calls=PARTS, makes=made)]


def _again_flops(one: Mamba) -> float:
    """FLOPs a token of C·Bᵀ and of states at the ends of chunks, which the backward pass repeats."""
    return 2.0 * (one.groups * one.chunk + one.heads * one.head_dim) * one.state


def _inside_flops(one: Mamba) -> float:
    """FLOPs a token of outputs from inside a chunk and from states before it."""
    return 2.0 * one.heads * one.head_dim * (one.chunk + one.state)


def _convolution(
    given: LayerInputs, phase: Phase, *, backward: bool = False, makes: Arrays = (), frees: tuple[str, ...] = ()
) -> Measured:
    """The convolution of x, B and C, or its gradients."""
    work = given.part * _convolved(given)
    return Measured(phase, CONV, "causal_conv1d", work, as_size(0.0), backward, 1, PARTS, makes, frees)


def _scan(
    given: LayerInputs,
    phase: Phase,
    flops: float,
    *,
    makes: Arrays,
    frees: tuple[str, ...] = (),
    backward: bool = False,
) -> Measured:
    """The scan, or its gradients, in as many kernels as `_mamba_chunk_scan_combined_fwd` and `_bwd` launch."""
    work, counted = given.part * _inner(given) * float(_mixer(given).state), given.part * flops / X
    launches = 14 if backward else 5
    return Measured(phase, SCAN, "mamba2_scan", work, counted, backward, launches, PARTS, makes, frees)


def _swapped(given: LayerInputs, phase: Phase, *, there: bool) -> Iterator[Operation]:
    """All-to-alls of context parallelism, from tokens to heads of z, x, B, C and dt, or back with the output: one each
    (NVIDIA/Megatron-LM, megatron/core/ssm/mamba_context_parallel.py)."""
    if not (given.context or given.lone_context):
        return
    one, inner = _mixer(given), _inner(given)
    shared = as_size(float(one.groups * one.state)) / X
    swapped = (inner, inner, shared, shared, as_size(float(one.heads)) / X) if there else (inner,)
    for width in swapped:
        size = given.element * given.part * width
        yield Collective("all_to_all", "context", phase, SCAN, size, calls=PARTS)


def _gated_backward(given: LayerInputs, behind: Behind) -> list[Operation]:
    """Gradient of norm and gate."""
    elements, freed = given.part * _inner(given), (*behind.frees, _gate(given).name)
    made = (behind.gradient,)
    return [moves("backward", SCAN, Traffic(1, 3), elements, given, calls=PARTS, makes=made, frees=freed)]


def _backward(given: LayerInputs, behind: Behind) -> Iterator[Operation]:
    """Gradients in the reverse order, the convolution and chunks computed once more."""
    yield from _swapped(given, "backward", there=False)
    yield from _scan_backward(given, behind)
    yield from _swapped(given, "backward", there=True)


def _scan_backward(given: LayerInputs, behind: Behind) -> Iterator[Operation]:
    """Gradients of gate, scan and convolution, as `_mamba_chunk_scan_combined_bwd`.

    Of FLOPs: what is done again; gradients of states and of x, as forward; of B and C by the states, of C·Bᵀ, of B and
    C by that, and of the decays.
    """
    one, temporary = _mixer(given), "backward temporaries"
    width = _convolved(given)
    convolved, turned = (
        given.stream(name, temporary, width, inside=True) for name in ("convolved", "convolved gradient")
    )
    states, gradients = (
        Array(name, temporary, given.elements.statistics * given.tokens * _states(given))
        for name in ("chunk states", "chunk state gradients")
    )
    yield _convolution(given, "backward", makes=(convolved, behind.gradient))
    heads = one.heads * one.head_dim
    by_states, by_products = 2 * heads * one.state, 2 * (heads + one.groups * one.state) * one.chunk
    flops = _again_flops(one) + _inside_flops(one) + 2.0 * (heads * one.state + by_states + by_products)
    made, scanned = (states, gradients, turned), (_scanned(given).name,)
    yield _scan(given, "backward", flops, makes=made, frees=scanned, backward=True)
    freed = (*names((convolved, turned, states, gradients)), *behind.frees)
    yield _convolution(given, "backward", backward=True, frees=freed)
