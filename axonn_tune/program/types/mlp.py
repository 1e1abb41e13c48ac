"""The dense MLP on one rank: a norm, `[M, H_y] → [M, G_x]`, an activation to `[M, F_x]`, and back to `[M, H_y]`."""

from __future__ import annotations

from functools import partial

from axonn_tune.program.inputs import PARTS, H, LayerInputs, Linear, X, Y
from axonn_tune.program.layers import activates
from axonn_tune.program.nodes import Behind, Gemm, Nodes, Own, branch, norm
from axonn_tune.program.operations import MatMul, Operation, Phase, Size
from axonn_tune.program.types import MLP, LayerKind

NORM, FC1, UP, ACTIVATION, FC2 = "mlp.norm", "mlp.fc1", "mlp.up", "mlp.activation", "mlp.fc2"


def nodes(given: LayerInputs) -> Nodes:
    """Norm, two GEMMs with an activation between them, and addition; nothing of a layer type without a dense MLP."""
    if not given.own.ffn:
        return []
    first, second = Linear(FC1, H / Y, given.G / X, "y", "x", normed=True), Linear(FC2, given.F / X, H / Y, "x", "y")
    names = ("up projection", "gate projection")[: given.own.ups]
    element = given.activation_element
    up = tuple(given.stream(name, "up projection", given.F / X, inside=True, element=element) for name in names)
    ended = branch(FC2, given)
    # Of a gated MLP the half that is not gated.
    half = MatMul("recompute", FC1, given.part, given.F / X, first.k, "NN", PARTS, narrow=given.narrow, makes=up[:1])
    return [
        norm(
            NORM,
            given,
            element=given.saved_element,
            modules=("layernorm",),
            first=not given.own.mixes,
            quantizes=True,
        ),
        Gemm(
            linear=first,
            makes=up,
            gradient=given.stream("up gradient", "backward temporaries", given.G / X, inside=True),
            modules=("mlp",),
            partly={UP: lambda _: [half]},
        ),
        activation(given, ACTIVATION, given.F / X, modules=("mlp",), alone=("mlp_act",)),
        Gemm(
            linear=second,
            makes=ended.makes,
            gradient=ended.gradient,
            modules=("mlp",) if given.options.recompute_whole_block else (),
        ),
        *ended.added,
    ]


KIND = LayerKind(place=MLP, nodes=nodes)


def activation(
    given: LayerInputs,
    layer: str,
    width: Size,
    *,
    name: str = "",
    modules: tuple[str, ...] = (),
    alone: tuple[str, ...] = (),
) -> Own:
    """GELU or SwiGLU of so many elements a token: reads G, writes F; its gradient reads G and dF, writes dG."""
    elements = given.part * width
    output = given.stream(f"{name}activation", "activation", width, inside=True, element=given.saved_element)

    def forward(given: LayerInputs, phase: Phase) -> list[Operation]:
        return [activates(phase, layer, elements, given, makes=(output,))]

    def backward(given: LayerInputs, behind: Behind) -> list[Operation]:
        return [activates("backward", layer, elements, given, makes=(behind.gradient,), frees=behind.frees)]

    gradient = given.stream(f"{output.name} gradient", "backward temporaries", width, inside=True)
    return Own(
        layer=layer,
        makes=(output,),
        gradient=gradient,
        modules=modules,
        partly=dict.fromkeys(alone, partial(forward, phase="recompute")),
        ahead=forward,
        back=backward,
    )
