"""What layers with a recurrence in place of attention share: exchanges of context parallelism and measured kernels.

Letters: M tokens of a half micro-batch; x splits heads. A recurrence needs all tokens of a sequence in order, so ranks
of context swap tokens for heads in front of it and back behind (NVIDIA/Megatron-LM@d98e8a64,
megatron/core/ssm/gated_delta_net/gdn.py and mamba_context_parallel.py). Chunks of a sequence follow one another (the
chain, whose time is that of the longest sequence), what is inside them is computed at once (the scan).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

from axonn_tune.frameworks.description import Framework
from axonn_tune.program.constraints import Constraint
from axonn_tune.program.inputs import PARTS, H, LayerInputs, Linear, S, X, Y
from axonn_tune.program.layers import moves
from axonn_tune.program.nodes import Behind, Gemm, Node, Nodes, Own, Vectors, branch, names, norm
from axonn_tune.program.operations import Array, Collective, Measured, Operation, Phase, Size, Traffic, as_size
from axonn_tune.program.types import Constraints
from axonn_tune.specs.model import Model
from axonn_tune.specs.sections import Mixer

CHUNK = 64
"""Tokens of a chunk, in kernels of FLA, cuDNN and Megatron-Core."""


def chunk_flops(heads: int, key: int, value: int) -> tuple[float, float]:
    """FLOPs a token of a delta rule by chunks, forward and backward, where states are computed once more."""
    ahead = 6 * key * value + CHUNK * (6 * key + 4 * value)
    back = 16 * key * value + CHUNK * (20 * key + 10 * value) + 4 * CHUNK**2
    return float(heads * ahead), float(heads * back)


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """One recurrence: its layer, widths of a token on all ranks, and kernels.

    kernel, chain: of `cost/kernels.csv`, with `state` elements a token and so many FLOPs forward and backward, and,
    where it shows, of chunks one after another. into, out: what is projected and what it makes; convolved: of these,
    what a short convolution goes over; normed: what is normalized of that, queries and keys. kept: bytes of a token
    that its kernels save beside their inputs and outputs; again: bytes of states, and of gradients, that the backward
    pass makes for itself.
    """

    layer: str
    title: str
    kernel: str
    chain: str = ""
    state: int
    flops: tuple[float, float]
    into: int
    out: int
    convolved: int = 0
    normed: int = 0
    kept: float = 0.0
    again: float = 0.0


def split(width: float) -> Size:
    """A width on one rank of x."""
    return as_size(float(width)) / X


def swapped(given: LayerInputs, phase: Phase, layer: str, width: int) -> Iterator[Operation]:
    """The all-to-all of context parallelism over so many elements a token, from tokens to heads or back."""
    if given.context or given.lone_context:
        size = given.element * given.part * split(width)
        yield Collective("all_to_all", "context", phase, layer, size, calls=PARTS)


def recurrence(
    given: LayerInputs,
    one: Recurrence,
    *,
    vectors: Vectors,
    needs: tuple[Node, ...] = (),
    gradient: Array | None = None,
) -> Own:
    """The node between the projection in and the gated norm: convolution, norms of queries and keys, the scan.

    needs: projections in, where there are several; gradient: of what they make together.
    """
    made, kept, inner = _made(given, one), _kept(given, one), given.part * split(one.normed)
    convolved = given.part * split(one.convolved)

    def forward(given: LayerInputs, phase: Phase) -> Iterator[Operation]:
        yield from swapped(given, phase, one.layer, one.into)
        if one.convolved:
            yield _convolution(one, phase, convolved)
        if one.normed:
            yield moves(phase, one.layer, Traffic(1, 2), inner, given, calls=PARTS)
        yield from _scans(given, one, phase, made=(made, kept))

    def backward(given: LayerInputs, behind: Behind) -> Iterator[Operation]:
        states = Array("states", "backward temporaries", one.again * given.tokens / X)
        steps = [*_scans(given, one, "backward", made=(states, gradient or behind.gradient))]
        if one.normed:
            steps.append(moves("backward", one.layer, Traffic(1, 3), inner, given, calls=PARTS))
        if one.convolved:
            steps.append(_convolution(one, "backward", convolved))
        steps += swapped(given, "backward", one.layer, one.into)
        yield from steps[:-1]
        yield replace(steps[-1], frees=(*names((made, kept, states)), *behind.frees))

    return Own(
        layer=one.layer,
        makes=(made,),
        gradient=given.stream(f"{one.title} gradient", "backward temporaries", split(one.out), inside=True),
        keeps=True,
        needs=needs,
        vectors=vectors,
        ahead=forward,
        back=backward,
    )


def gated_norm(
    given: LayerInputs, one: Recurrence, *, layer: str, vectors: Vectors, modules: tuple[str, ...] = ()
) -> Own:
    """The node behind: a norm of each head times a gate, which the projection in makes, and the exchange back."""
    width = split(one.out)
    output = given.stream(f"{one.title} norm", "norm outputs", width, inside=True, element=given.saved_element)

    def forward(given: LayerInputs, phase: Phase) -> Iterator[Operation]:
        yield moves(phase, layer, Traffic(1, 3), given.part * width, given, calls=PARTS, makes=(output,))
        yield from swapped(given, phase, layer, one.out)

    def backward(given: LayerInputs, behind: Behind) -> Iterator[Operation]:
        yield from swapped(given, "backward", layer, one.out)
        elements, made = given.part * width, (behind.gradient,)
        yield moves("backward", layer, Traffic(1, 5), elements, given, calls=PARTS, makes=made, frees=behind.frees)

    gradient = given.stream(f"{one.title} norm gradient", "backward temporaries", width, inside=True)
    return Own(
        layer=layer,
        makes=(output,),
        gradient=gradient,
        vectors=vectors,
        modules=modules,
        ahead=forward,
        back=backward,
    )


def recurrent_block(
    given: LayerInputs,
    one: Recurrence,
    *,
    vectors: Vectors,
    of_norm: Vectors,
    modules: tuple[str, ...] = (),
    own: Own | None = None,
) -> Nodes:
    """Norm, one GEMM in, the recurrence with its vectors, its gated norm, GEMM out and addition.

    own: in place of recurrence and gated norm.
    """
    section, width = one.layer.partition(".")[0], split(one.into)
    ended = branch(f"{section}.out", given)
    projected = given.stream(f"{section} projections", one.title, width, inside=True)
    gradient = given.stream(f"{section} projection gradient", "backward temporaries", width, inside=True)
    into, out = (
        Linear(f"{section}.in", H / Y, width, "y", "x"),
        Linear(f"{section}.out", split(one.out), H / Y, "x", "y"),
    )
    middle = (
        [own]
        if own
        else [
            recurrence(given, one, vectors=vectors),
            gated_norm(given, one, layer=f"{section}.gated", vectors=of_norm, modules=modules),
        ]
    )
    return [
        norm(f"{section}.norm", given, element=given.saved_element, modules=("layernorm",), first=True),
        Gemm(linear=into, makes=(projected,), gradient=gradient),
        *middle,
        Gemm(linear=out, makes=ended.makes, gradient=ended.gradient),
        *ended.added,
    ]


def whole_heads(mixer: type[Mixer], sizes: Mapping[str, str], *, swaps: bool = True) -> Constraints:
    """Whole heads on each rank, with context parallelism behind its all-to-alls, where framework and layer have those.

    sizes: where a layer has its number of heads, by words for them.
    """

    def constraints(model: Model, framework: Framework) -> list[Constraint]:
        layers = [layer for layer in model.types if isinstance(layer.mixer, mixer)]
        swapping, found = swaps and framework.swaps_heads, list[Constraint]()
        for words, path in sizes.items() if layers else ():
            value, name = math.gcd(*map(attrgetter(path), layers)), words.lower().replace(" ", "-")
            found.append(Constraint(f"{name}-by-x", words, value, ("x",)))
            if swapping:
                found.append(Constraint(f"{name}-by-x-context", words, value, ("x", "context"), where="context"))
        return found

    return constraints


def _made(given: LayerInputs, one: Recurrence) -> Array:
    return given.stream(f"{one.title} output", one.title, split(one.out), inside=True)


def _kept(given: LayerInputs, one: Recurrence) -> Array:
    return Array(f"{one.title} inputs", one.title, one.kept * given.tokens / X)


def _convolution(one: Recurrence, phase: Phase, work: Size) -> Measured:
    back, layer, none = phase == "backward", f"{one.layer.partition('.')[0]}.conv", as_size(0.0)
    return Measured(phase, layer, "causal_conv1d", work, none, back, calls=PARTS)


def _scans(given: LayerInputs, one: Recurrence, phase: Phase, *, made: tuple[Array, ...]) -> Iterator[Operation]:
    """All chunks at once, then the chain of a sequence, which only one size of cuDNN's kernels does not tell apart."""
    back, none = phase == "backward", as_size(0.0)
    work, flops = given.part * split(one.state), given.part * split(one.flops[back])
    others = f".{given.options.scan_kernels}" if one.chain and given.options.scan_kernels != "fla" else ""
    yield Measured(phase, one.layer, f"{one.kernel}_scan{others}", work, flops, back, 6, PARTS, made)
    if one.chain and not others:
        yield Measured(phase, one.layer, one.chain, S, none, back, calls=PARTS)
