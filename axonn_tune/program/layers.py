"""Operations that layer types share, on one rank, in the order they are issued when nothing overlaps.

Weights that are gathered and gradients that are reduced, linear layers with what a number format adds, norms, additions
to the residual stream. `A[M, K_y]` is an array whose dim K is split over axis y. Each function returns what one rank
does; arrays are local, sizes of collectives those of the full buffer.

Sources of what is not the paper's: tensor and sequence parallelism Shoeybi et al., arXiv 1909.08053, section 3, and
Korthikanti et al., arXiv 2205.05198, section 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from axonn_tune.program.inputs import ALONE, PARTS, SCATTERED, SHARED, H, LayerInputs, Linear, Y
from axonn_tune.program.operations import (
    ONCE,
    Array,
    Arrays,
    Collective,
    Kernel,
    MatMul,
    Measured,
    Operation,
    OpKind,
    Phase,
    Role,
    Size,
    Traffic,
    symbol,
)
from axonn_tune.specs.formats import Copies, Fusion


def moves(
    phase: Phase,
    layer: str,
    moved: Traffic,
    elements: Size,
    given: LayerInputs,
    *,
    calls: Size = ONCE,
    makes: tuple[Array, ...] = (),
    frees: tuple[str, ...] = (),
) -> Kernel:
    """Kernels that move the given bytes per element, all of one mean size."""
    kernels = max(moved.kernels, 1.0)
    size = moved.size_bytes(given.elements) / kernels
    return Kernel(phase, layer, size * elements, kernels * calls, makes=makes, frees=frees)


def activates(
    phase: Phase,
    layer: str,
    elements: Size,
    given: LayerInputs,
    *,
    makes: tuple[Array, ...] = (),
    frees: tuple[str, ...] = (),
) -> Kernel | Measured:
    """The kernel of an activation function of so many output elements, or in the backward pass that of its gradient:
    of torch's compiler as measured (`cost/kernels.csv`), others at the bandwidth of element-wise kernels."""
    back = phase == "backward"
    if given.options.compiled_activation and given.own.gated and elements.coefficient:
        return Measured(phase, layer, "compiled_swiglu", elements, ONCE * 0.0, back, 1, PARTS, makes, frees)
    moved = given.kernels.activation_back if back else given.kernels.activation
    return moves(phase, layer, moved, elements, given, calls=PARTS, makes=makes, frees=frees)


def copies(phase: Phase, layer: str, elements: Size, given: LayerInputs, *, calls: Size) -> list[Operation]:
    """A copy to another layout, where the runtime's are counted."""
    return [moves(phase, layer, Traffic(1, 2), elements, given, calls=calls)] if given.launched else []


def gather_weight(
    layer: str, elements: Size, given: LayerInputs, *, phase: Phase, calls: Size = ONCE
) -> list[Operation]:
    """All-gather of one weight block over z; from FP32 master shards each is rounded first.

    Ranks that also hold weights in the compute type have nothing to round.
    """
    options, sizes = given.options, given.elements
    element = options.gather_bytes or given.weight_element(layer, copies=1)
    rounds = options.master_shards and sizes.main != element and not given.sharded
    axes, shards = given.sharding(layer)
    prepared = (sizes.main + element) * given.mastered(layer, elements) / shards if rounds else ONCE * 0.0
    copied = 2.0 * options.gather_copies * element * elements
    return [
        Kernel(phase, layer, prepared, calls, prepares_gather=True),
        Collective("all_gather", axes, phase, layer, element * elements, "weight", calls),
        *([Kernel(phase, layer, copied, calls, copies_gather=True)] if options.gather_copies else []),
    ]


def reduce_weight_gradient(layer: str, elements: Size, given: LayerInputs, *, apart: Size = ONCE) -> list[Operation]:
    """Reduce-scatter of one weight gradient over z, then its addition to the accumulated shard.

    apart: 0 where its GEMM adds it.
    """
    element = given.options.shard_gradient_bytes or given.elements.compute
    axes, shards = given.sharding(layer)
    added = (element + 2 * given.gradient_bytes) * elements / shards
    return [
        Collective("reduce_scatter", axes, "backward", layer, element * elements, "weight_gradient"),
        Kernel("backward", layer, ONCE * 0.0 if given.options.fused_accumulation else added, apart, accumulates=True),
    ]


def reduction(
    axis: str, phase: Phase, layer: str, size: Size, given: LayerInputs, *, role: Role, calls: Size
) -> Collective:
    """Sum of an output or input gradient: an all-reduce, over x with sequence parallelism a reduce-scatter."""
    kind: OpKind = "reduce_scatter" if given.options.sequence_parallel and axis == "x" else "all_reduce"
    return Collective(kind, axis, phase, layer, size, role, calls)


def sequence_gather(
    phase: Phase,
    layer: str,
    given: LayerInputs,
    *,
    tokens: Size,
    calls: Size,
    role: Role,
    width: Size = H / Y,
    element: float = 0,
) -> list[Operation]:
    """`[M_x, width]` to `[M, width]` with sequence parallelism; otherwise no communication."""
    if not given.options.sequence_parallel:
        return []
    return [Collective("all_gather", "x", phase, layer, (element or given.element) * tokens * width, role, calls)]


def quantized(
    phase: Phase,
    layer: str,
    elements: Size,
    given: LayerInputs,
    *,
    calls: Size = PARTS,
    once: bool = False,
    fused: Fusion = "none",
) -> list[Operation]:
    """Kernels that quantize an operand of a linear layer, in all copies that its GEMMs take; once: one GEMM takes it.
    fused: what the norm before has done of it.

    Source: NVIDIA/TransformerEngine, guide on performance of low precision; arXiv 2603.07685, section 5.3;
    pytorch/ao@36027d82, torchao/float8/README.md.
    """
    if given.format is None:
        return []
    if given.quantizes_twice:
        kinds: tuple[Copies, ...] = ("rows", "columns") if phase == "backward" and not once else ("rows",)
        return [_one_copy(phase, layer, elements, given, kind, calls=calls) for kind in kinds]
    launches, several = float(given.format.launches), given.format.copies(one_layout=given.options.one_layout)
    moved = given.format.quantization_bytes(1 if once else several)
    kind: Copies = "rows" if once and several > 1 else "all"
    if fused == "whole":
        turned = 2.0 * given.format.operand_bytes * (given.format.transposes and several > 1 and not once)
        return [Kernel(phase, layer, turned * elements, calls, quantizes="all")] if turned else []
    if fused == "maximum":
        moved, launches = moved - 2.0, launches - 1.0
    if given.format.transposes and given.options.fused_quantization:
        return [Kernel(phase, layer, (moved - 2.0 * given.format.passes) * elements, calls)]
    return [Kernel(phase, layer, moved / launches * elements, launches * calls, quantizes=kind)]


def _one_copy(phase: Phase, layer: str, elements: Size, given: LayerInputs, kind: Copies, *, calls: Size) -> Kernel:
    assert given.format is not None, "asked before"
    launches, moved = float(given.format.launches), given.format.quantization_bytes(1)
    return Kernel(phase, layer, moved / launches * elements, launches * calls, quantizes=kind)


def quantized_again(
    layer: str, operand: Size, weight: Size, given: LayerInputs, *, trains: bool = True
) -> list[Operation]:
    """The other copies of a linear layer's input and weight, which the backward pass makes where originals are saved;
    of one that does not train only the weight's.

    Source: pytorch/ao@36027d82, torchao/prototype/moe_training/mxfp8_linear.py, mxfp8_grouped_mm.py.
    """
    if given.options.requantizes:
        return quantized_weight("backward", layer, weight, given)
    if not given.quantizes_twice:
        return []
    sizes = (*([(operand, PARTS)] if trains else []), (weight, ONCE))
    return [_one_copy("backward", layer, size, given, "columns", calls=calls) for size, calls in sizes]


def rescaled(layer: str, gradient: Size, given: LayerInputs) -> list[Operation]:
    """The kernel that multiplies a gradient of a GEMM without scales by them, read and written in BF16.

    Source: pytorch/ao@36027d82, torchao/float8/float8_ops.py, addmm_float8_unwrapped, and issue 2184.
    """
    rescales = given.format is not None and given.format.rescales
    return [Kernel("backward", layer, 2.0 * given.element * gradient, PARTS)] if rescales else []


def gathered_operand(
    phase: Phase, layer: str, elements: Size, given: LayerInputs, *, once: bool = False, by_norm: Fusion = "none"
) -> list[Operation]:
    """The same of an operand that sequence parallelism gathers: each rank its shard, which is then gathered.

    A scale a tensor needs the maximum of all shards first. Where GEMMs need a transposed copy of such an operand, it is
    made of the gathered one. Source: NVIDIA/TransformerEngine@d0067d0d, docs/features/low_precision_training.
    """
    if given.format is None or not given.gathers_narrow:
        return quantized(phase, layer, elements, given, once=once, fused=by_norm)
    one = given.format
    fused = one.transposes and given.options.fused_quantization
    wanted = 1 if once else one.copies(one_layout=given.options.one_layout)
    copies = 1 if one.transposes else wanted
    kind: Copies | None = None if fused else "rows" if once and not one.transposes else "all"
    passes, launches = (0, 1.0) if fused or by_norm == "maximum" else (one.passes, float(one.launches))
    moved = 2.0 * (1 + passes) + copies * one.operand_bytes
    turned = Kernel(phase, layer, 2.0 * one.operand_bytes * elements, PARTS, quantizes="all", turns=by_norm != "whole")
    own = Kernel(phase, layer, moved / launches * given.outside(elements), launches * PARTS, quantizes=kind)
    return [
        *([Collective("all_reduce", "x", phase, layer, ONCE * 4.0, calls=PARTS)] if one.maxima else []),
        *([own] if by_norm != "whole" else []),
        *([turned] if wanted > copies else []),
    ]


def quantized_weight(phase: Phase, layer: str, elements: Size, given: LayerInputs) -> list[Operation]:
    """The same of a weight: in each forward pass, or in that of the first micro-batch, whose copies serve all."""
    if given.format and given.options.primary_weights and given.options.keeps_quantized:
        moved = given.format.primary_bytes(one_layout=given.options.one_layout)
        once = Kernel(phase, layer, moved * elements, ONCE / symbol("A"), quantizes="all")
        return [once] if moved and phase == "forward" else []
    if given.options.keeps_quantized:
        return quantized(phase, layer, elements, given, calls=ONCE / symbol("A")) if phase == "forward" else []
    if given.options.requantizes and given.format and phase != "backward":
        return [_one_copy(phase, layer, elements, given, "rows", calls=ONCE)]
    return quantized(phase, layer, elements, given, calls=ONCE)


def linear_forward(
    linear: Linear,
    given: LayerInputs,
    *,
    phase: Phase,
    makes: tuple[Array, ...] = (),
    trains: bool = True,
    adapted: bool = False,
) -> list[Operation]:
    """GEMM and reduction of the output: `O[M, n] = Σ_output_axis I[M, k] · W[k, n]`; only if it trains the input is
    quantized for a weight gradient, too. One that an adapter reads as well is gathered in the compute type, and
    quantized then (NVIDIA/TransformerEngine@d0067d0d, pytorch/module/layernorm_linear.py,
    return_layernorm_output_gathered)."""
    tokens, axis = given.outside(given.part) if linear.outside else given.part, linear.output_axis
    size, gathered = given.element * tokens * linear.n, list[Operation]()
    fused: Fusion = given.norm_fusion if linear.normed and not adapted else "none"
    operand = quantized(phase, linear.layer, tokens * linear.k, given, once=not trains, fused=fused)
    early = given.gathers_narrow and not linear.outside and not (adapted and linear.input_axis == "x")
    if linear.input_axis == "x":
        role: Role = "output" if given.options.pipelined_tensor else "other"
        element = given.format.operand_bytes if given.format and early else 0.0
        sizes = {"tokens": tokens, "calls": PARTS, "width": linear.k}
        gathered = sequence_gather(phase, linear.layer, given, role=role, element=element, **sizes)
        if early:
            operand = gathered_operand(phase, linear.layer, tokens * linear.k, given, once=not trains, by_norm=fused)
    biased = given.model.biases and given.launched
    return [
        *(operand if early else ()),
        *gathered,
        *([moves(phase, linear.layer, given.kernels.bias, linear.n, given, calls=PARTS)] if biased else []),
        *(() if early else operand),
        *quantized_weight(phase, linear.layer, linear.weight, given),
        MatMul(phase, linear.layer, tokens, linear.n, linear.k, "NN", PARTS, narrow=given.narrow, makes=makes),
        *([reduction(axis, phase, linear.layer, size, given, role="output", calls=PARTS)] if axis else []),
    ]


def linear_backward(
    linear: Linear, given: LayerInputs, *, makes: Array, frees: tuple[str, ...], trains: bool = True
) -> list[Operation]:
    """Both gradients: `dI[M, k] = Σ_input_axis dO · Wᵀ`, and, if it trains, `dW[k, n] = Σ_z Iᵀ · dO`.

    makes: dI; frees: I and dO, where nothing else needs them. One that does not train neither gathers I again nor
    quantizes dO for dW (NVIDIA/TransformerEngine@d0067d0d, pytorch/module/linear.py, requires_wgrad).
    """
    part, layer, axis = given.part, linear.layer, linear.input_axis
    part = given.outside(part) if linear.outside else part
    # Row-parallel: dO is gathered first. Column-parallel: the gather of I overlaps with the input-gradient GEMM.
    role: Role = "input_gather" if axis == "x" else "other"
    size, moved = given.element * part * linear.k, given.kernels.bias_gradient
    biased, alone = given.model.biases and trains, given.options.gather_unit == "weight" and trains
    width, early = linear.k if axis == "x" else linear.n, given.gathers_narrow and not linear.outside
    element, operand = 0.0, quantized("backward", layer, part * linear.n, given, once=not trains)
    if given.format and early:
        # The input was saved quantized; an output gradient is gathered by rows and columns.
        element = given.format.operand_bytes * (1 if axis == "x" or given.format.transposes or not trains else 2)
        if axis != "x":
            operand = gathered_operand("backward", layer, part * linear.n, given, once=not trains)
    # The bundled runtime adds a gradient in its GEMM where it needs neither another type nor other ranks.
    apart = SCATTERED if given.launched and given.element == given.gradient_bytes else ONCE
    sizes = {"tokens": part, "calls": PARTS, "width": width}
    needed = not linear.outside and (trains or axis != "x")
    gathered = sequence_gather("backward", layer, given, role=role, element=element, **sizes) if needed else []
    back = partial(MatMul, "backward", layer, narrow=given.narrow)
    weight = [
        back(linear.k, linear.n, part, "TN", PARTS, frees=frees),
        *rescaled(layer, linear.weight, given),
    ]
    return [
        *([*operand, *gathered] if early else [*gathered, *operand]),
        *(quantized_weight("backward", layer, linear.weight, given) if given.options.requantizes else []),
        back(part, linear.k, linear.n, "NT", PARTS, makes=(makes,), frees=() if trains else frees),
        *rescaled(layer, part * linear.k, given),
        *([reduction(axis, "backward", layer, size, given, role="input_gradient", calls=PARTS)] if axis else []),
        *(weight if trains else []),
        *([moves("backward", layer, moved, part * linear.n, given, calls=PARTS)] if biased else []),
        *(reduce_weight_gradient(layer, linear.weight, given, apart=apart) if alone else []),
    ]


def dequantized(phase: Phase, linear: Linear, given: LayerInputs) -> list[Kernel]:
    """The kernel that makes a weight in the compute type of one that is quantized and does not train, before each of
    its GEMMs (bitsandbytes@95f9af30, bitsandbytes/autograd/_functions.py, MatMul4Bit)."""
    if given.tuning is None or not given.tuning.quantized:
        return []
    wide = Array(f"{linear.layer} dequantized", "dequantized weights", given.element * linear.weight)
    moved = (given.tuning.base_bytes + given.element) * linear.weight
    return [Kernel(phase, linear.layer, moved, makes=(wide,) if phase == "backward" else ())]


def norm_forward(
    layer: str,
    given: LayerInputs,
    *,
    tokens: Size,
    calls: Size,
    makes: tuple[Array, ...] = (),
    summed: Traffic | None = None,
    quantizes: bool = False,
) -> list[Operation]:
    """Exact norm of `[M, H_y]`: the shard's statistics are all-gathered over y and combined.

    summed: bytes of the addition of the residual stream, if fused into the norm. quantizes: for the linear layer of its
    module, where norms do.
    """
    own = given.outside(tokens)
    statistics = given.norm_statistics * given.elements.statistics * own * Y
    saved = [Array(statistics_of(one), "norm statistics", statistics / Y * calls) for one in makes[-1:]]
    moved = [one + (summed or Traffic()) + _fused(given, quantizes=quantizes) for one in given.kernels.norm]
    return [
        Collective("all_gather", "y", "forward", layer, statistics, calls=calls, makes=tuple(saved)),
        *_norm_kernels("forward", layer, moved, given, tokens=own, calls=calls, makes=makes),
    ]


def statistics_of(output: Array) -> str:
    """Name of what a norm saves beside its output."""
    return f"{output.name} statistics"


def _fused(given: LayerInputs, *, quantizes: bool) -> Traffic:
    """What a norm that quantizes its output writes beyond that."""
    if not quantizes or given.norm_fusion != "whole" or given.format is None:
        return Traffic()
    return Traffic(0, given.format.fused_bytes(one_layout=given.options.one_layout) / given.elements.compute)


def norm_recompute(
    layer: str, given: LayerInputs, *, makes: tuple[Array, ...], quantizes: bool = False
) -> list[Operation]:
    """Recompute of a norm's output from its saved input and statistics, without communication."""
    own, moved = given.outside(given.part), [one + _fused(given, quantizes=quantizes) for one in given.kernels.again]
    return _norm_kernels("recompute", layer, moved, given, tokens=own, calls=PARTS, makes=makes)


def norm_backward(
    layer: str,
    given: LayerInputs,
    *,
    tokens: Size,
    calls: Size,
    makes: tuple[Array, ...] = (),
    frees: tuple[str, ...] = (),
    summed: bool = True,
) -> list[Operation]:
    """Gradient of the norm, `summed` with that of the residual stream; its sums over hidden are all-reduced over y."""
    own = given.outside(tokens)
    sums = given.norm_statistics * given.elements.statistics * own
    both = zip(given.kernels.back, given.kernels.back_sum, strict=True)
    moved = [one + added if summed else one for one, added in both]
    return [
        Collective("all_reduce", "y", "backward", layer, sums, calls=calls),
        *_norm_kernels("backward", layer, moved, given, tokens=own, calls=calls, makes=makes, frees=frees),
    ]


def _norm_kernels(
    phase: Phase,
    layer: str,
    moved: Sequence[Traffic],
    given: LayerInputs,
    *,
    tokens: Size,
    calls: Size,
    makes: tuple[Array, ...] = (),
    frees: tuple[str, ...] = (),
) -> list[Operation]:
    """Kernels of a norm, of which there are others where y splits the hidden dim."""
    alone, shared = moved
    elements = tokens * H / Y
    if alone == shared:
        return [moves(phase, layer, alone, elements, given, calls=calls, makes=makes, frees=frees)]
    return [
        moves(phase, layer, shared, elements, given, calls=SHARED * calls),
        moves(phase, layer, alone, elements, given, calls=ALONE * calls, makes=makes, frees=frees),
    ]


def residual(layer: str, given: LayerInputs, *, phase: Phase, makes: tuple[Array, ...] = ()) -> list[Operation]:
    """Addition to the residual stream `[M, H_y]`; with dropout its mask of one byte an element is written, too."""
    mask = 1.0 if given.options.dropout else 0.0
    # Onto several streams it is in the kernel of hyper-connections before.
    size = (3.0 * given.element * (given.streams == 1) + mask) * given.outside(given.part) * H / Y
    return [Kernel(phase, layer, size, PARTS, makes=(*makes, *dropout_masks(layer, given)))]


def dropout_masks(layer: str, given: LayerInputs) -> tuple[Array, ...]:
    """The mask of an addition, where there is dropout."""
    return (given.stream(f"{layer} mask", "dropout masks", element=1),) if given.options.dropout else ()


def dropout_backward(layer: str, given: LayerInputs) -> list[Operation]:
    """Gradient through the mask, where there is dropout."""
    if not given.options.dropout:
        return []
    size = (2.0 * given.element + 1.0) * given.outside(given.part) * H / Y
    frees = tuple(mask.name for mask in dropout_masks(layer, given))
    return [Kernel("backward", layer, size, PARTS, frees=frees)]


def mixed_streams(
    given: LayerInputs,
    layer: str,
    phase: Phase,
    *,
    ahead: bool,
    back: bool = False,
    makes: Arrays = (),
    frees: tuple[str, ...] = (),
) -> Measured:
    """The kernel of hyper-connections (mHC, arXiv 2512.24880) before a branch (`ahead`) or behind it, or its gradients.

    Of m residual streams a token's m·H elements are read and H written before a branch; behind it m·H and the branch's
    H are read and m·H written. The coefficients of a site come of a matrix on all streams. Operator by operator both
    take as long a byte.
    """
    streams = float(given.streams)
    accesses = (2.0 * streams + 1.0 if back else streams + 1.0) if ahead else 3.0 * streams + 2.0
    accesses = accesses if ahead or back else 2.0 * streams + 1.0
    elements = given.outside(given.part) * H / Y
    flops = (4.0 if back else 2.0) * coefficients(given.streams) * streams * elements * (1.0 if ahead else 0.0)
    kernel = "mhc_pre" if ahead else "mhc_post"
    kernel = kernel if given.options.fused_hyper_connections else "eager_mhc"
    work = given.element * accesses * elements
    return Measured(phase, layer, kernel, work, flops, back, calls=PARTS, makes=makes, frees=frees)


def coefficients(streams: int) -> int:
    """Of a site: one a stream before the branch, one behind it, and a matrix of streams."""
    return streams * (streams + 2)


def closing_elements(streams: int, hidden: int) -> int:
    """Elements of what makes one stream of all behind the last block."""
    return streams * streams * hidden + streams + 1 if streams > 1 else 0
