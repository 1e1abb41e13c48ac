"""A gated delta net on one rank: one GEMM in, a short convolution, the gated delta rule, a gated norm, one GEMM out.

Letters: K = key_heads * key_dim, W = value_heads * value_dim, v value heads, C tokens of a chunk. x splits heads, y the
hidden dim: `[M, H_y] → [M, (2K + 2W + 2v)_x]` (queries, keys, values, gate, β and decay) `→ [M, W_x] → [M, H_y]`.
Sources: arXiv 2412.06464; NVIDIA/Megatron-LM@d98e8a64, megatron/core/ssm/gated_delta_net/gdn.py; its kernels
fla-org/flash-linear-attention@bc3b101d, fla/ops/gated_delta_rule/chunk.py, which take queries and keys expanded to
value heads, save those, values, decays and the inverse of each chunk, and compute states again in the backward pass.
"""

from __future__ import annotations

from typing import ClassVar

from axonn_tune.program.inputs import LayerInputs
from axonn_tune.program.kinds import MIXER, LayerKind
from axonn_tune.program.nodes import Nodes, Vectors
from axonn_tune.program.types.recurrent import CHUNK, Recurrence, chunk_flops, recurrent_block, whole_heads
from axonn_tune.specs.document import Size
from axonn_tune.specs.model import Layer
from axonn_tune.specs.sections import Mixer, size


class GatedDeltaNet(Mixer):
    """Sizes of a gated delta net."""

    SECTION: ClassVar[str] = "gdn"
    WHAT: ClassVar[str] = "A gated delta net, of layers without attention."
    TITLE: ClassVar[str] = "gated delta nets"
    WORDS: ClassVar[str] = "gated delta net of {key_heads} key and {value_heads} value heads"
    LETTER: ClassVar[str] = "G"
    VARIANT: ClassVar[str] = "gated_delta_net"
    PARSED: ClassVar[dict[str, int]] = {
        **{"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "conv": 4},
    }
    NAMES: ClassVar[tuple[str, ...]] = ("G", "gdn")
    KEYS: ClassVar[dict[str, str]] = {
        "key_heads": "linear_num_key_heads",
        "value_heads": "linear_num_value_heads",
        "key_dim": "linear_key_head_dim",
        "value_dim": "linear_value_head_dim",
        "conv": "linear_conv_kernel_dim",
    }

    key_heads: Size = size("linear_num_key_heads.")
    value_heads: Size = size("linear_num_value_heads, divisible by those of keys.")
    key_dim: Size = size("linear_key_head_dim.", default=128)
    value_dim: Size = size("linear_value_head_dim.", default=128)
    conv: Size = size("Length of the convolution, in tokens.", default=4)

    @property
    def problem(self) -> str:
        """Keys are repeated for equally many values each."""
        odd = self.value_heads % self.key_heads
        return f"value_heads ({self.value_heads}) must be divisible by key_heads ({self.key_heads})" if odd else ""

    @property
    def keys(self) -> int:
        """K."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """W."""
        return self.value_heads * self.value_dim


def nodes(given: LayerInputs) -> Nodes:
    """Norm, GEMM in, convolution and delta rule, gated norm, GEMM out and addition; nothing of other layer types."""
    if not isinstance(one := given.own.mixer, GatedDeltaNet):
        return []
    inside = _recurrence(one)
    # Filters, and the two numbers of each head's decay.
    filters = Vectors(over_x=inside.convolved * one.conv + 2 * one.value_heads)
    # Each rank of x has the gradients of its heads.
    of_norm = Vectors(whole=one.value_dim, heads=one.value_dim)
    return recurrent_block(given, inside, vectors=filters, of_norm=of_norm, modules=("gdn_norm_out",))


def _recurrence(one: GatedDeltaNet) -> Recurrence:
    heads, key, value = one.value_heads, one.key_dim, one.value_dim
    # Of 16 bits: normed and expanded queries and keys, values, β, the chunk's inverse; in FP32 the decay.
    kept = 2 * (2 * one.keys + 2 * heads * key + one.values + heads + CHUNK * heads) + 4 * heads
    return Recurrence(
        layer="gdn.scan",
        title="gated delta nets",
        kernel="gated_delta",
        chain="delta_chain",
        state=heads * key * value,
        flops=chunk_flops(heads, key, value),
        into=2 * (one.keys + one.values + heads),
        out=one.values,
        convolved=2 * one.keys + one.values,
        normed=2 * one.keys,
        kept=float(kept),
        # States of each chunk, and their gradients.
        again=4.0 * heads * key * value / CHUNK,
    )


def _logged(layer: Layer, _: float) -> float:
    """Four times value heads * value_dim², and the convolution (NVIDIA/Megatron-LM@d98e8a64, training.py)."""
    if not isinstance(one := layer.mixer, GatedDeltaNet):
        return 0.0
    return float(4 * one.value_heads * one.value_dim**2 + one.conv * (2 * one.keys + one.values))


_WHOLE = whole_heads(
    GatedDeltaNet,
    "gated delta nets",
    {"delta-net key heads": "mixer.key_heads", "delta-net value heads": "mixer.value_heads"},
)
KIND = LayerKind(place=MIXER, nodes=nodes, constraints=_WHOLE, logged=_logged, sizes=GatedDeltaNet)
