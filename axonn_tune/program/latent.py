"""Multi-head latent attention (MLA) on one rank: projections to latents, their norms, projections to all heads.

Letters: T tokens that a rank holds between tensor-parallel layers, M those of its micro-batch, r the rank of a latent.
Down-projections `[T, H_y] → [T, r]` are duplicated over x and summed over y. Latents are normed and, with sequence
parallelism, gathered over x. Up-projections `[M, r] → [M, N_x]` are duplicated over y. Keys and values are expanded to
all heads, so attention is that of `layers.attention_core`. Sources: DeepSeek-V2, arXiv 2405.04434, section 2.1;
NVIDIA/Megatron-LM@003b4ce2, megatron/core/transformer/multi_latent_attention.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from axonn_tune.program import layers
from axonn_tune.program.experts import Gathering, Repeating
from axonn_tune.program.layers import PARTS, H, LayerInputs, Linear, X, Y, moves
from axonn_tune.program.operations import PLAIN_BLOCKS, Collective, Operation, Phase, Size, Traffic, as_size, symbol

UP = ("attention.q_up", "attention.kv_up")


def forward(given: LayerInputs, gather: Gathering, *, phase: Phase) -> Iterator[Operation]:
    """From the norm's output `[T, H_y]` to queries, keys and values `[M, N_x]`; gather: of a weight."""
    for down, up in given.latents:
        if down is not None:
            yield from gather(down)
            latent = given.stream(f"{up.layer} latent", "latents", down.n)
            yield from layers.linear_forward(down, given, phase=phase, makes=(latent,))
    rope = _rope(given)
    yield from layers.sequence_gather(
        phase, given.latents[1][1].layer, given, tokens=given.part, calls=PARTS, role="other", width=rope
    )
    for down, up in given.latents:
        yield from gather(up)
        yield from _up(down, up, given, phase=phase)


def backward(given: LayerInputs, gather: Gathering, again: Repeating) -> Iterator[Operation]:
    """Gradients from those of queries, keys and values to that of the norm's output; arguments as of experts."""
    keys = given.stream("gradient by keys and values", "residual gradients")
    whole = given.stream("attention.norm gradient", "residual gradients")
    for (down, up), made in zip(given.latents[::-1], (keys, whole), strict=True):
        last = made is whole
        dead = ("qkv gradient",) if last else ()
        used = (*(["attention.norm output"] if last else []), f"{up.layer} latent gradient")
        yield from gather(up)
        if down is None:
            yield from again("attention.norm")
            yield from layers.linear_backward(up, given, makes=made, frees=(*used, *dead))
        else:
            yield from _up_backward(down, up, given, dead)
            yield from gather(down)
            yield from again("attention.norm")
            yield from layers.linear_backward(down, given, makes=made, frees=used)
    freed, added = (keys.name,), given.outside(given.part) * H / Y
    yield moves("backward", UP[0], Traffic(1, 3), added, given, calls=PARTS, frees=freed)


def repeated(layer: str, given: LayerInputs) -> Iterator[Operation]:
    """One norm and up-projection again, that of keys and values with their rotation."""
    down, up = given.latents[UP.index(layer)]
    yield from _up(down, up, given, phase="recompute")
    if layer == UP[1]:
        yield moves("recompute", layer, Traffic(1, 2), given.part * given.N / X, given, calls=PARTS)


def summed(given: LayerInputs) -> Iterator[Collective]:
    """Sum over x of the gradients of down-projections, of which each rank has those of its tokens."""
    if given.own.latent is None or not given.options.sequence_parallel or given.repeating == PLAIN_BLOCKS:
        return
    down, _ = given.own.latent_weights
    size = given.gradient_bytes * float(down) * symbol(f"L{given.of}") / (Y * given.shards)
    yield Collective("all_reduce", "x", "step", "attention.down", size)


def _rope(given: LayerInputs) -> Size:
    assert given.own.latent is not None, "asked before"
    return as_size(float(given.own.latent.rope_dim))


def _up(down: Linear | None, up: Linear, given: LayerInputs, *, phase: Phase) -> Iterator[Operation]:
    """Norm of a latent, where there is one, and its up-projection, with all that attention takes behind the last."""
    if down is not None:
        norm = given.kernels.again if phase == "recompute" else given.kernels.norm
        made = given.stream(f"{up.layer} input", "latents", up.k, element=given.saved_element)
        yield moves(phase, up.layer, norm[0], given.outside(given.part) * up.k, given, calls=PARTS, makes=(made,))
    heads = given.stream("qkv", "qkv", given.N / X, inside=True, element=given.heads_element)
    yield from layers.linear_forward(up, given, phase=phase, makes=(heads,) if up.layer == UP[1] else ())


def _up_backward(down: Linear, up: Linear, given: LayerInputs, dead: tuple[str, ...]) -> Iterator[Operation]:
    """Gradient of a latent before its norm, `[T, r]`."""
    made = given.stream(f"{up.layer} input gradient", "backward temporaries", up.k, inside=True)
    yield from layers.linear_backward(up, given, makes=made, frees=(f"{up.layer} input", *dead))
    if up.layer == UP[1] and given.options.sequence_parallel:
        size = given.element * given.part * _rope(given)
        yield Collective("reduce_scatter", "x", "backward", up.layer, size, calls=PARTS)
    raw = given.stream(f"{up.layer} latent gradient", "backward temporaries", down.n)
    freed, elements, moved = (f"{up.layer} latent", made.name), given.outside(given.part) * up.k, given.kernels.back[0]
    yield moves("backward", up.layer, moved, elements, given, calls=PARTS, makes=(raw,), frees=freed)
