"""A Mamba-2 mixer on one rank: one GEMM in, a short convolution, a scan by chunks, a gated norm, one GEMM out.

Letters: M tokens of a half micro-batch, I inner width (heads * head_dim), g groups of heads, N state, l tokens of a
chunk. x splits heads and groups, y the hidden dim, as of attention: `[M, H_y] → [M, (2I + 2gN + heads)_x] → [M, I_x] →
[M, H_y]`. Of a chunk and a group the scan has the GEMMs of arXiv 2405.21060, section 6: C·Bᵀ, its states, and outputs
from inside the chunk and from states before it. What is saved and moved: state-spaces/mamba, mamba_ssm/ops/triton,
ssd_combined.py, MambaSplitConv1dScanCombinedFn, which computes all but the projections and the scan's output again;
gate and norm: NVIDIA/Megatron-LM@00caa53a, megatron/core/ssm/mamba_mixer.py, _ssm_training. Heads of a group share a
GEMM here, so that a kernel reads B, C and C·Bᵀ once.
"""

from __future__ import annotations

from collections.abc import Iterator

from axonn_tune.program import layers
from axonn_tune.program.experts import Gathering
from axonn_tune.program.layers import PARTS, H, LayerInputs, Linear, X, Y, moves
from axonn_tune.program.operations import Array, Arrays, Collective, MatMul, Operation, Phase, Size, Traffic, as_size
from axonn_tune.specs.model import Mamba

NORM, IN, CONV, SCAN, OUT = "mamba.norm", "mamba.in", "mamba.conv", "mamba.scan", "mamba.out"


def linears(given: LayerInputs) -> tuple[Linear, ...]:
    """GEMM in and GEMM out, where a layer type has them."""
    if given.own.mamba is None:
        return ()
    one = given.own.mamba
    width = as_size(float(one.conv_width + one.heads * (one.head_dim + 1))) / X
    return Linear(IN, H / Y, width, "y", "x"), Linear(OUT, _inner(given), H / Y, "x", "y")


def _mixer(given: LayerInputs) -> Mamba:
    assert given.own.mamba is not None, "asked before"
    return given.own.mamba


def _inner(given: LayerInputs) -> Size:
    return as_size(float(_mixer(given).heads * _mixer(given).head_dim)) / X


def _convolved(given: LayerInputs) -> Size:
    return as_size(float(_mixer(given).conv_width)) / X


def _states(given: LayerInputs) -> Size:
    """Elements of states a token: one of each head a chunk."""
    return _inner(given) * float(_mixer(given).state) / float(_mixer(given).chunk)


def forward(given: LayerInputs, gather: Gathering, *, phase: Phase) -> Iterator[Operation]:
    """From the residual stream to the output of the GEMM out; gather: of a weight."""
    first, last = linears(given)
    stream, inner = given.stream, _inner(given)
    normed = stream(f"{NORM} output", "norm outputs", element=given.saved_element)
    made = stream("block input", "residual stream"), normed
    yield from layers.norm_forward(NORM, given, tokens=given.part, calls=PARTS, makes=made)
    yield from gather(first)
    projected = stream("mamba projections", "Mamba-2 projections", first.n, inside=True)
    yield from layers.linear_forward(first, given, phase=phase, makes=(projected,))
    yield from _swapped(given, phase, there=True)
    yield moves(phase, CONV, Traffic(1, 2), given.part * _convolved(given), given, calls=PARTS)
    yield from _chunks(given, phase)
    scanned = stream("scan output", "Mamba-2 scan", inner, inside=True)
    one = _mixer(given)
    yield _gemm(given, phase, one.chunk, _heads(one), one.chunk + one.state, makes=(scanned,))
    yield from _swapped(given, phase, there=False)
    gated = stream("gated output", "Mamba-2 scan", inner, inside=True)
    output = stream("gated norm output", "norm outputs", inner, inside=True, element=given.saved_element)
    # The gate's two accesses, in the scan's last kernel, and those of the norm.
    yield moves(phase, SCAN, Traffic(1, 4), given.part * inner, given, calls=PARTS, makes=(gated, output))
    yield from gather(last)
    yield from layers.linear_forward(last, given, phase=phase)


def _chunks(given: LayerInputs, phase: Phase, *, makes: Arrays = ()) -> Iterator[Operation]:
    """Decays, states at the ends of chunks, which are in FP32 until they are passed on, and C·Bᵀ."""
    one = _mixer(given)
    yield moves(phase, SCAN, Traffic(1, 1, 2), given.part * float(one.heads) / X, given, calls=PARTS)
    yield _gemm(given, phase, _heads(one), one.state, one.chunk, makes=makes)
    yield moves(phase, SCAN, Traffic(1, 0, 2), given.part * _states(given), given, calls=PARTS)
    yield _gemm(given, phase, one.chunk, one.chunk, one.state)


def _heads(one: Mamba) -> float:
    """Width of the heads of a group."""
    return one.heads * one.head_dim / one.groups


def _gemm(given: LayerInputs, phase: Phase, m: float, n: float, k: float, *, makes: Arrays = ()) -> MatMul:
    """One of the scan's GEMMs, for each chunk and group."""
    one = _mixer(given)
    count = given.part * float(one.groups) / float(one.chunk) / X
    return MatMul(phase, SCAN, as_size(m), as_size(n), as_size(k), "NN", PARTS, groups=count, makes=makes)


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


def backward(given: LayerInputs, gather: Gathering) -> Iterator[Operation]:
    """Gradients in the reverse order, the convolution and chunks computed once more."""
    first, last = linears(given)
    inner, temporary = _inner(given), "backward temporaries"
    yield from gather(last)
    yield from layers.dropout_backward(OUT, given)
    made = given.stream("gated norm gradient", temporary, inner, inside=True)
    yield from layers.linear_backward(last, given, makes=made, frees=("gated norm output",))
    gradient = given.stream("gated gradient", temporary, inner, inside=True)
    elements, freed = given.part * inner, (made.name, "gated output")
    yield moves("backward", SCAN, Traffic(1, 3), elements, given, calls=PARTS, makes=(gradient,), frees=freed)
    yield from _swapped(given, "backward", there=False)
    yield from _scan_backward(given)
    yield from _swapped(given, "backward", there=True)
    yield from gather(first)
    made = given.stream(f"{NORM} gradient", "residual gradients")
    freed = f"{NORM} output", "projection gradient"
    yield from layers.linear_backward(first, given, makes=made, frees=freed)
    made = given.stream("new residual gradient", "residual gradients")
    freed = f"{NORM} gradient", "new residual gradient"
    yield from layers.norm_backward(NORM, given, tokens=given.part, calls=PARTS, makes=(made,), frees=freed)


def _scan_backward(given: LayerInputs) -> Iterator[Operation]:
    """Gradients of gate, scan and convolution: kernel by kernel as in `_mamba_chunk_scan_combined_bwd`."""
    one, temporary, tokens = _mixer(given), "backward temporaries", given.part
    width, inner, heads = _convolved(given), _inner(given), _heads(one)
    convolved, turned = (
        given.stream(name, temporary, width, inside=True) for name in ("convolved", "convolved gradient")
    )
    projected = given.stream("projection gradient", temporary, linears(given)[0].n, inside=True)
    states, gradients = (
        Array(name, temporary, given.elements.statistics * given.tokens * _states(given))
        for name in ("chunk states", "chunk state gradients")
    )
    made = convolved, projected
    yield moves("backward", CONV, Traffic(1, 2), tokens * width, given, calls=PARTS, makes=made)
    yield from _chunks(given, "backward", makes=(states,))
    yield moves("backward", SCAN, Traffic(1, 6), tokens * inner, given, calls=PARTS, frees=("scan output",))
    yield _gemm(given, "backward", heads, one.state, one.chunk, makes=(gradients,))
    yield moves("backward", SCAN, Traffic(1, 2, 2), tokens * _states(given), given, calls=PARTS)
    # Gradients of x, of B and C by the states, of C·Bᵀ, of B and C by that, and of the decays.
    yield _gemm(given, "backward", one.chunk, heads, one.chunk + one.state, makes=(turned,))
    for m, n, k in (
        *[(one.chunk, one.state, heads)] * 2,
        (one.chunk, one.chunk, heads),
        *[(one.chunk, one.state, one.chunk)] * 2,
        (one.chunk, one.chunk, heads),
    ):
        yield _gemm(given, "backward", m, n, k)
    freed = convolved.name, turned.name, states.name, gradients.name, "gated gradient", "mamba projections"
    yield moves("backward", CONV, Traffic(1, 3), tokens * width, given, calls=PARTS, frees=freed)
