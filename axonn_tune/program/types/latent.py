"""Multi-head latent attention (MLA) on one rank: projections to latents, their norms, projections to all heads.

Letters: T tokens that a rank holds between tensor-parallel layers, M those of its micro-batch, r the rank of a latent.
Down-projections `[T, H_y] → [T, r]` are duplicated over x and summed over y. Latents are normed and, with sequence
parallelism, gathered over x. Up-projections `[M, r] → [M, N_x]` are duplicated over y. Keys and values are expanded to
all heads, so attention is that of `types.attention`. Sources: DeepSeek-V2, arXiv 2405.04434, section 2.1;
NVIDIA/Megatron-LM@003b4ce2, megatron/core/transformer/multi_latent_attention.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from axonn_tune.frameworks.description import Framework
from axonn_tune.program import layers
from axonn_tune.program.constraints import Constraint
from axonn_tune.program.inputs import PARTS, H, LayerInputs, Linear, X, Y
from axonn_tune.program.layers import moves
from axonn_tune.program.nodes import Behind, Branches, Gemm, Node, Norm, Operand, Vectors
from axonn_tune.program.operations import Array, Arrays, Collective, Operation, Phase, Size, Traffic, as_size
from axonn_tune.specs.model import Model
from axonn_tune.specs.sections import LatentAttention

QUERIES, KEYS = "attention.q_up", "attention.kv_up"


def nodes(given: LayerInputs, normed: Norm, *, heads: Arrays, gradient: Array) -> tuple[Branches, tuple[Node, ...]]:
    """Branches from the norm's output to queries, keys and values, which are in `heads`; and the last node of each."""
    branches, ups = list[tuple[tuple[Node, ...], ...]](), list[Node]()
    for down, up in _linears(given):
        keys = up.layer == KEYS
        # Queries come last in the backward pass: only then is the gradient of all heads free.
        made, back = (heads, None) if keys else ((), gradient)
        once_more = partial(_repeated, up=up, down=down, makes=made)
        again = dict.fromkeys((up.layer, "mla_up_proj"), once_more)
        if down is None:
            ups.append(Gemm(linear=up, makes=made, gradient=back, reads=normed, partly=again))
            branches.append(((), (ups[-1],)))
            continue
        first = (_KeysDown if keys else Gemm)(
            linear=down,
            makes=(given.stream(f"{up.layer} latent", "latents", down.n),),
            gradient=given.stream(f"{up.layer} latent gradient", "backward temporaries", down.n),
            reads=normed,
        )
        operand = Operand(
            _input(given, up),
            given.stream(f"{up.layer} input gradient", "backward temporaries", up.k, inside=True),
            partial(_normed, up=up),
            partial(_normed_backward, up=up),
        )
        vectors = Vectors(whole=int(up.k.coefficient) * (1 if given.own.rms else 2))
        ups.append(
            Gemm(linear=up, operand=operand, makes=made, gradient=back, reads=first, partly=again, vectors=vectors)
        )
        branches.append(((first,), (ups[-1],)))
    return Branches(tuple(branches)), tuple(ups)


def constraints(model: Model, framework: Framework) -> list[Constraint]:
    """Whole rows of each shard, where those are whole."""
    latents = [layer.latent for layer in model.types if layer.latent is not None]
    if not latents or not framework.step.whole_rows:
        return []
    ranks = math.gcd(*(rank for one in latents for rank in (one.query_rank or one.kv_rank, one.kv_rank)))
    width = math.gcd(*(layer.value_width for layer in model.types if layer.attention))
    return [
        Constraint("latents-by-z", "ranks of latents", ranks, ("z",)),
        Constraint("values-by-xz", "heads * value_dim", width, ("x", "z")),
    ]


def readers(given: LayerInputs) -> int:
    """Projections that read the norm's output: those down to latents, and that of queries without one."""
    return len(_linears(given))


def _latent(given: LayerInputs) -> LatentAttention:
    assert given.own.latent is not None, "asked before"
    return given.own.latent


def _linears(given: LayerInputs) -> tuple[tuple[Linear | None, Linear], ...]:
    """Down- and up-projections of queries, which may have no latent, and of keys and values."""
    latent, heads = _latent(given), given.own.heads
    queries: tuple[Linear | None, Linear] = None, Linear(QUERIES, H / Y, given.Q / X, "y", "x")
    if latent.query_rank:
        down = Linear("attention.q_down", H / Y, as_size(float(latent.query_rank)), "y", "", outside=True)
        queries = down, Linear(QUERIES, down.n, given.Q / X, "", "x")
    kept = as_size(float(latent.kv_rank + latent.rope_dim))
    width = as_size(float(heads * (latent.nope_dim + latent.value_dim)))
    down = Linear("attention.kv_down", H / Y, kept, "y", "", outside=True)
    return queries, (down, Linear(KEYS, as_size(float(latent.kv_rank)), width / X, "", "x"))


def _input(given: LayerInputs, up: Linear) -> Array:
    """A latent behind its norm."""
    return given.stream(f"{up.layer} input", "latents", up.k, element=given.saved_element)


class _KeysDown(Gemm):
    """The projection of keys and values, behind which what is rotated of keys is gathered for all tokens."""

    def forward(self, given: LayerInputs, phase: Phase) -> Iterator[Operation]:
        """With the gather."""
        yield from super().forward(given, phase)
        rope, part = _rope(given), given.part
        yield from layers.sequence_gather(phase, KEYS, given, tokens=part, calls=PARTS, role="other", width=rope)


def _rope(given: LayerInputs) -> Size:
    return as_size(float(_latent(given).rope_dim))


def _normed(given: LayerInputs, phase: Phase, *, up: Linear) -> list[Operation]:
    """Norm of a latent."""
    moved = (given.kernels.again if phase == "recompute" else given.kernels.norm)[0]
    elements, made = given.outside(given.part) * up.k, (_input(given, up),)
    return [moves(phase, up.layer, moved, elements, given, calls=PARTS, makes=made)]


def _normed_backward(given: LayerInputs, behind: Behind, *, up: Linear) -> Iterator[Operation]:
    """Gradient of a latent before its norm, `[T, r]`."""
    if up.layer == KEYS and given.options.sequence_parallel:
        size = given.element * given.part * _rope(given)
        yield Collective("reduce_scatter", "x", "backward", up.layer, size, calls=PARTS)
    elements: Size = given.outside(given.part) * up.k
    moved, made = given.kernels.back[0], (behind.gradient,)
    yield moves("backward", up.layer, moved, elements, given, calls=PARTS, makes=made, frees=behind.frees)


def _repeated(given: LayerInputs, *, up: Linear, down: Linear | None, makes: Arrays) -> Iterator[Operation]:
    """One norm and up-projection again, that of keys and values with their rotation."""
    if down is not None:
        yield from _normed(given, "recompute", up=up)
    yield from layers.linear_forward(up, given, phase="recompute", makes=makes)
    if up.layer == KEYS:
        yield moves("recompute", KEYS, Traffic(1, 2), given.part * given.N / X, given, calls=PARTS)
