"""A gated delta net on one rank: one GEMM in, a short convolution, the gated delta rule, a gated norm, one GEMM out.

Letters: K = key_heads * key_dim, W = value_heads * value_dim, v value heads, C tokens of a chunk. x splits heads, y the
hidden dim: `[M, H_y] → [M, (2K + 2W + 2v)_x]` (queries, keys, values, gate, β and decay) `→ [M, W_x] → [M, H_y]`.
Sources: arXiv 2412.06464; NVIDIA/Megatron-LM@d98e8a64, megatron/core/ssm/gated_delta_net/gdn.py; its kernels
fla-org/flash-linear-attention@bc3b101d, fla/ops/gated_delta_rule/chunk.py, which take queries and keys expanded to
value heads, save those, values, decays and the inverse of each chunk, and compute states again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar, NamedTuple

from axonn_tune.program.inputs import PARTS, LayerInputs, S, X
from axonn_tune.program.nodes import Behind, Nodes, Own, Vectors
from axonn_tune.program.operations import Array, Arrays, Kernel, MatMul, Operation, Phase, Traffic, as_size
from axonn_tune.program.types import MIXER, LayerKind
from axonn_tune.program.types.recurrent import CHUNK, Recurrence, chunk_flops, recurrent_block, split, whole_heads
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

    @property
    def convolved(self) -> int:
        """Queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def projected(self) -> int:
        """These, the output's gate, and β and decay of each value head."""
        return self.convolved + self.values + 2 * self.value_heads


def nodes(given: LayerInputs) -> Nodes:
    """Norm, GEMM in, convolution and delta rule, gated norm, GEMM out and addition; nothing of other layer types."""
    if not isinstance(one := given.own.mixer, GatedDeltaNet):
        return []
    inside = _recurrence(one)
    # Filters, and the two numbers of each head's decay.
    filters = Vectors(over_x=inside.convolved * one.conv + 2 * one.value_heads)
    # Each rank of x has the gradients of its heads.
    of_norm = Vectors(whole=one.value_dim, heads=one.value_dim)
    own = _by_operators(given, one, inside, filters + of_norm) if given.launched else None
    return recurrent_block(given, inside, vectors=filters, of_norm=of_norm, modules=("gdn_norm_out",), own=own)


class _Widths(NamedTuple):
    """Elements of a token, or accesses of each: queries and keys together, values, keys of all value heads, rows of a
    chunk's triangle, of value heads and of key heads, states, and numbers of a value head."""

    keys: float
    values: float
    expanded: float
    rows: float
    shared_rows: float
    states: float
    numbers: float

    def of(self, other: _Widths) -> float:
        """Sum of products."""
        return sum(count * width for count, width in zip(self, other, strict=True))


# Of the bundled runtime's operators on 4 taps, all but those of the chain in FP32: as counted on tensors without data,
# forward, and backward with the forward pass once more. The chain's are four and thirteen a chunk.
_WIDE = _Widths(24.5, 34.0, 5.0, 11.0, 2.0, 0.0, 30.0), _Widths(105.5, 117.0, 29.0, 46.0, 7.0, 0.0, 350.0)
_CHAIN = _Widths(0.0, 6.0, 0.0, 0.0, 0.0, 5.0, 0.0), _Widths(0.0, 26.0, 0.0, 0.0, 0.0, 17.0, 0.0)
_CASTS = (Traffic(0, 0, 0, 1), Traffic(0, 2, 0, 3)), (Traffic(0, 2, 0, 2), Traffic(0, 6, 0, 6))
_KERNELS, _CHAIN_KERNELS = (64.0, 217.0), (4.0, 13.0)
_HELD = _Widths(4.0, 15.0, 3.0, 4.0, 2.0, 1.0, 10.0)
"""Of its graph, which the backward pass makes of the saved input, at its fullest."""


def _by_operators(given: LayerInputs, one: GatedDeltaNet, inside: Recurrence, vectors: Vectors) -> Own:
    """Convolution, rule and gated norm as the bundled runtime has them (`axonn_tune.runtime.delta`): operator by
    operator in FP32, of which it saves the input alone."""
    heads, key, value = one.value_heads, one.key_dim, one.value_dim
    rows, states = (CHUNK * heads, CHUNK * one.key_heads), heads * key * value / CHUNK
    widths = _Widths(2 * one.keys, one.values, heads * key, *rows, states, heads)
    wide, chunks = float(given.elements.statistics), S / CHUNK

    def kernels(phase: Phase, *, back: bool, makes: Arrays = ()) -> Iterator[Operation]:
        for_keys, for_values = (casts.size_bytes(given.elements) for casts in _CASTS[back])
        prepared = wide * _WIDE[back].of(widths) + for_keys * 2 * one.keys + for_values * one.values
        for moved, count, calls in (
            (prepared, _KERNELS[back], PARTS),
            (wide * _CHAIN[back].of(widths), _CHAIN_KERNELS[back], PARTS * chunks),
        ):
            each = given.part * split(moved / count) * PARTS / calls
            yield Kernel(phase, inside.layer, each, count * calls, makes=makes)
            makes = ()

    def gemm(phase: Phase, m: float, n: float, k: float, *, of: int, times: float, chain: bool = False) -> Operation:
        # In FP32 outside of linear layers: rows count as if not aligned, for which vector units do them.
        groups = given.part * float(of) / (S if chain else CHUNK) / X
        calls = times * (PARTS * chunks if chain else PARTS)
        sizes = as_size(m), as_size(n), as_size(k)
        return MatMul(phase, inside.layer, *sizes, "NN", calls, 1, batched=True, groups=groups)

    def gemms(phase: Phase, *, back: bool) -> Iterator[Operation]:
        times = 3.0 if back else 1.0
        yield gemm(phase, CHUNK, CHUNK, key, of=one.key_heads, times=2 * times)
        yield gemm(phase, CHUNK, key + value, CHUNK / 2, of=heads, times=2.0 if back else 1.0)
        if back:
            yield gemm(phase, CHUNK, CHUNK, key + value, of=heads, times=1.0)
        for m, k, count in ((CHUNK, key, 2), (CHUNK, CHUNK, 1), (key, CHUNK, 1)):
            yield gemm(phase, m, value, k, of=heads, times=count * times, chain=True)

    def backward(given: LayerInputs, behind: Behind) -> Iterator[Operation]:
        graph = Array("delta rule graph", "backward temporaries", given.part * split(wide * _HELD.of(widths)))
        yield from kernels("backward", back=True, makes=(graph,))
        *most, last = gemms("backward", back=True)
        yield from most[:-1]
        yield replace(most[-1], frees=(graph.name,))
        yield replace(last, makes=(behind.gradient,), frees=behind.frees)

    def forward(given: LayerInputs, phase: Phase) -> Iterator[Operation]:
        *most, last = (*kernels(phase, back=False), *gemms(phase, back=False))
        yield from (*most, replace(last, makes=(output,)))

    stream = partial(given.stream, width=split(one.values), inside=True)
    output = stream("gated delta nets output", "norm outputs")
    gradient = stream("gated delta nets gradient", "backward temporaries")
    return Own(layer=inside.layer, makes=(output,), gradient=gradient, vectors=vectors, ahead=forward, back=backward)


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
        into=one.projected,
        out=one.values,
        convolved=one.convolved,
        normed=2 * one.keys,
        kept=float(kept),
        # States of each chunk, and their gradients.
        again=4.0 * heads * key * value / CHUNK,
    )


def _logged(layer: Layer, _: float) -> float:
    """Four times value heads * value_dim², and the convolution (NVIDIA/Megatron-LM@d98e8a64, training.py)."""
    if not isinstance(one := layer.mixer, GatedDeltaNet):
        return 0.0
    return float(4 * one.value_heads * one.value_dim**2 + one.conv * one.convolved)


_WHOLE = whole_heads(
    GatedDeltaNet,
    {"delta-net key heads": "mixer.key_heads", "delta-net value heads": "mixer.value_heads"},
)
KIND = LayerKind(place=MIXER, nodes=nodes, constraints=_WHOLE, logged=_logged, sizes=GatedDeltaNet)
