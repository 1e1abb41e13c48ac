"""A gated short convolution on one rank: one GEMM in, `C ⊙ conv(B ⊙ x)`, one GEMM out.

x splits channels, y the hidden dim: `[M, H_y] → [M, 3H_x] → [M, H_x] → [M, H_y]`. Gates and convolution are kernels
of their own, whose inputs are saved. Source: transformers 5.23.0, models/lfm2/modeling_lfm2.py, Lfm2ShortConv.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

from axonn_tune.program.inputs import PARTS, H, LayerInputs, Linear, X, Y
from axonn_tune.program.layers import moves
from axonn_tune.program.nodes import Behind, Gemm, Nodes, Own, Vectors, branch, names, norm
from axonn_tune.program.operations import Measured, Operation, Phase, Traffic, as_size
from axonn_tune.program.types import MIXER, LayerKind
from axonn_tune.program.types.recurrent import whole_heads
from axonn_tune.specs.document import Size
from axonn_tune.specs.model import Layer
from axonn_tune.specs.sections import Mixer, size

NORM, IN, CONV, OUT = "shortconv.norm", "shortconv.in", "shortconv.conv", "shortconv.out"


class ShortConvolution(Mixer):
    """Sizes of a gated short convolution."""

    SECTION: ClassVar[str] = "shortconv"
    WHAT: ClassVar[str] = "A gated short convolution, of layers without attention."
    TITLE: ClassVar[str] = "short convolutions"
    WORDS: ClassVar[str] = "short convolution over {conv} tokens"
    KEYS: ClassVar[dict[str, str]] = {"conv": "conv_L_cache"}

    conv: Size = size("conv_L_cache, its length in tokens.", default=3)


def nodes(given: LayerInputs) -> Nodes:
    """Norm, GEMM, gates and convolution, GEMM and addition; nothing of a layer type without one."""
    if not isinstance(one := given.own.mixer, ShortConvolution):
        return []
    width, title, ended = H / X, "short convolutions", branch(OUT, given)
    elements = given.part * width
    array = partial(given.stream, inside=True)
    inner, convolved, out = (
        array(f"{name} of a short convolution", title, width) for name in ("input", "output", "gated output")
    )
    measured = partial(Measured, layer=CONV, kernel="causal_conv1d", work=elements, flops=as_size(0.0), calls=PARTS)

    def forward(given: LayerInputs, phase: Phase) -> Iterator[Operation]:
        yield moves(phase, CONV, Traffic(1, 3), elements, given, calls=PARTS, makes=(inner,))
        yield measured(phase, makes=(convolved,))
        yield moves(phase, CONV, Traffic(1, 3), elements, given, calls=PARTS, makes=(out,))

    def backward(given: LayerInputs, behind: Behind) -> Iterator[Operation]:
        freed = (*names((inner, convolved)), *behind.frees)
        yield moves("backward", CONV, Traffic(1, 5), elements, given, calls=PARTS, makes=(behind.gradient,))
        yield measured("backward", backward=True)
        yield moves("backward", CONV, Traffic(1, 5), elements, given, calls=PARTS, frees=freed)

    temporary = "backward temporaries"
    return [
        norm(NORM, given, element=given.saved_element, modules=("layernorm",), first=True),
        Gemm(
            linear=Linear(IN, H / Y, 3.0 * width, "y", "x"),
            makes=(array("short convolution projections", title, 3.0 * width),),
            gradient=array("short convolution projection gradient", temporary, 3.0 * width),
        ),
        Own(
            layer=CONV,
            makes=(out,),
            gradient=array("short convolution gradient", temporary, width),
            vectors=Vectors(over_x=given.own.hidden * one.conv),
            ahead=forward,
            back=backward,
        ),
        Gemm(linear=Linear(OUT, width, H / Y, "x", "y"), makes=ended.makes, gradient=ended.gradient),
        *ended.added,
    ]


def _logged(layer: Layer, _: float) -> float:
    """The convolution."""
    return float(layer.hidden * layer.mixer.conv) if isinstance(layer.mixer, ShortConvolution) else 0.0


_WHOLE = whole_heads(ShortConvolution, {"channels of convolutions": "hidden"}, swaps=False)
KIND = LayerKind(place=MIXER, nodes=nodes, constraints=_WHOLE, logged=_logged, sizes=ShortConvolution)
