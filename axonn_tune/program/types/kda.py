"""Kimi delta attention on one rank: projections with gates through a low rank, a delta rule with a decay a channel.

Letters: P = heads * head_dim, n heads, d of one, C tokens of a chunk. x splits heads, y the hidden dim: queries, keys,
values, β and, of full rank, the output's gate `[M, H_y] → [M, (3P + n)_x]`; the decay, and an output's gate of low
rank, `[T, H_y] → [T, d] → [M, P_x]`, the first duplicated over x. Sources: arXiv 2510.26692;
NVIDIA-NeMo/Megatron-Bridge@067f987d, models/kimi/kimi_k3_layers.py, whose layer runs on whole sequences;
fla-org/flash-linear-attention@bc3b101d, fla/ops/kda/chunk.py, which saves normed inputs, the decay in 16 bits and two
inverses a chunk.
"""

from __future__ import annotations

from typing import ClassVar

from axonn_tune.program.inputs import H, LayerInputs, Linear, Y
from axonn_tune.program.nodes import Branches, Gemm, Nodes, Vectors, branch, norm
from axonn_tune.program.operations import as_size
from axonn_tune.program.types import MIXER, LayerKind
from axonn_tune.program.types.recurrent import (
    CHUNK,
    Recurrence,
    chunk_flops,
    gated_norm,
    recurrence,
    split,
    whole_heads,
)
from axonn_tune.specs.document import Size
from axonn_tune.specs.model import Layer
from axonn_tune.specs.sections import Mixer, size

NORM, IN, DOWN, UP, SCAN, GATED, OUT = (f"kda.{one}" for one in ("norm", "in", "down", "up", "scan", "gated", "out"))


class KimiDeltaAttention(Mixer):
    """Sizes of Kimi delta attention."""

    SECTION: ClassVar[str] = "kda"
    WHAT: ClassVar[str] = "Kimi delta attention, of layers without attention."
    TITLE: ClassVar[str] = "Kimi delta attention"
    WORDS: ClassVar[str] = "Kimi delta attention of {heads} heads of {head_dim}"
    NAMES: ClassVar[tuple[str, ...]] = ("kda",)
    KEYS: ClassVar[dict[str, str]] = {
        "heads": "linear_num_heads",
        "head_dim": "linear_head_dim",
        "conv": "linear_conv_kernel_dim",
        "full_rank": "linear_attn_config.use_full_rank_gate",
    }

    heads: Size = size("linear_num_heads.")
    head_dim: Size = size("linear_head_dim, of keys and values.", default=128)
    conv: Size = size("Length of the convolution, in tokens.", default=4)
    full_rank: bool = size("The output's gate is a whole matrix, not one of rank head_dim.", default=False)

    @property
    def width(self) -> int:
        """P."""
        return self.heads * self.head_dim


def nodes(given: LayerInputs) -> Nodes:
    """Norm, projections, delta rule, gated norm, GEMM out and addition; nothing of a layer type without them."""
    if not isinstance(one := given.own.mixer, KimiDeltaAttention):
        return []
    inside, low, ended = _recurrence(one), 1 if one.full_rank else 2, branch(OUT, given)
    # Both projections that read it quantize it for themselves.
    element = given.saved_element * (2 if given.format else 1)
    normed = norm(NORM, given, element=element, added=IN, modules=("layernorm",), first=True)
    projected = given.stream("kda projections", inside.title, split(inside.into), inside=True)
    gradient = given.stream("kda projection gradient", "backward temporaries", split(inside.into), inside=True)
    into = Linear(IN, H / Y, split(inside.into - low * one.width), "y", "x")
    down = Linear(DOWN, H / Y, as_size(float(low * one.head_dim)), "y", "", outside=True)
    up = Linear(UP, as_size(float(one.head_dim)), split(low * one.width), "", "x")
    # Queries, keys and values come last in the backward pass: only then is the gradient of all free.
    first = Gemm(linear=into, gradient=gradient, reads=normed)
    lower = Gemm(
        linear=down,
        makes=(given.stream("kda latent", "latents", down.n),),
        gradient=given.stream("kda latent gradient", "backward temporaries", down.n),
        reads=normed,
    )
    gates = Gemm(linear=up, makes=(projected,), reads=lower)
    # Filters, a decay of each channel, and one of each head; each rank of x has the gradients of its heads.
    filters = Vectors(over_x=inside.convolved * one.conv + one.width + one.heads)
    of_norm = Vectors(whole=one.head_dim, heads=one.head_dim)
    return [
        normed,
        Branches((((), (first,)), ((lower,), (gates,)))),
        recurrence(given, inside, vectors=filters, needs=(first, gates), gradient=gradient),
        gated_norm(given, inside, layer=GATED, vectors=of_norm),
        Gemm(linear=Linear(OUT, split(one.width), H / Y, "x", "y"), makes=ended.makes, gradient=ended.gradient),
        *ended.added,
    ]


def _recurrence(one: KimiDeltaAttention) -> Recurrence:
    width, heads, dim = one.width, one.heads, one.head_dim
    return Recurrence(
        layer=SCAN,
        title="Kimi delta attention",
        kernel="kda",
        chain="delta_chain",
        state=width * dim,
        flops=chunk_flops(heads, dim, dim),
        into=5 * width + heads,
        out=width,
        convolved=3 * width,
        normed=2 * width,
        # Of 16 bits: normed queries and keys, values, decay of each channel, β, two inverses of a chunk.
        kept=2.0 * (4 * width + heads + 2 * CHUNK * heads),
        again=4.0 * width * dim / CHUNK,
    )


def _logged(layer: Layer, _: float) -> float:
    """Four times heads * head_dim², the convolution, and the output's gate as of full rank
    (NVIDIA-NeMo/Megatron-Bridge@067f987d, training/utils/flop_utils.py)."""
    if not isinstance(one := layer.mixer, KimiDeltaAttention):
        return 0.0
    gate = 0 if one.full_rank else layer.hidden * one.width - one.head_dim * (layer.hidden + one.width)
    return float(4 * one.width * one.head_dim + 3 * one.conv * one.width + gate)


_WHOLE = whole_heads(KimiDeltaAttention, {"delta-attention heads": "mixer.heads"}, swaps=False)
KIND = LayerKind(place=MIXER, nodes=nodes, constraints=_WHOLE, logged=_logged, sizes=KimiDeltaAttention)
