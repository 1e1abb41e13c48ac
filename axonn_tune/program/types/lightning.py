"""Lightning attention on one rank: linear attention with a decay a head, which no gradient changes; a norm and a gate.

Letters: P = heads * head_dim, C tokens of a chunk. x splits heads, y the hidden dim: queries, keys, values and the gate
`[M, H_y] → [M, 4P_x] → [M, P_x] → [M, H_y]`. Sources: arXiv 2401.04658; transformers 5.23.0,
models/minimax/modeling_minimax.py, MiniMaxLightningAttention. Its kernels were not found measured: chunk by chunk they
compute what Mamba-2's scan does, whose rate an element of state they are given.
"""

from __future__ import annotations

from typing import ClassVar

from axonn_tune.program.inputs import LayerInputs
from axonn_tune.program.nodes import Nodes, Vectors
from axonn_tune.program.types import MIXER, LayerKind
from axonn_tune.program.types.recurrent import Recurrence, recurrent_block, whole_heads
from axonn_tune.specs.document import Size
from axonn_tune.specs.model import Layer
from axonn_tune.specs.sections import Mixer, size


class LightningAttention(Mixer):
    """Sizes of lightning attention."""

    SECTION: ClassVar[str] = "lightning"
    WHAT: ClassVar[str] = "Lightning attention, of layers without attention."
    TITLE: ClassVar[str] = "lightning attention"
    WORDS: ClassVar[str] = "lightning attention of {heads} heads of {head_dim}"
    KEYS: ClassVar[dict[str, str]] = {"heads": "num_attention_heads", "head_dim": "head_dim", "chunk": "block_size"}

    heads: Size = size("num_attention_heads, of queries, keys and values alike.")
    head_dim: Size = size("head_dim.", default=128)
    chunk: Size = size("block_size, tokens of a chunk.", default=256)


def nodes(given: LayerInputs) -> Nodes:
    """Norm, GEMM in, scan, gated norm, GEMM out and addition; nothing of a layer type without one."""
    if not isinstance(one := given.own.mixer, LightningAttention):
        return []
    width = one.heads * one.head_dim
    inside = Recurrence(
        layer="lightning.scan",
        title="lightning attention",
        kernel="mamba2",
        state=width * one.head_dim,
        # Inside a chunk and by states, backward queries, keys and values of both.
        flops=(4.0 * width * (one.chunk + one.head_dim), 10.0 * width * (one.chunk + one.head_dim)),
        into=4 * width,
        out=width,
        again=4.0 * width * one.head_dim / one.chunk,
    )
    return recurrent_block(given, inside, vectors=Vectors(), of_norm=Vectors(over_x=width))


def _logged(layer: Layer, _: float) -> float:
    """Its state: an outer product and a product a head."""
    return 2.0 * one.heads * one.head_dim**2 if isinstance(one := layer.mixer, LightningAttention) else 0.0


_WHOLE = whole_heads(LightningAttention, {"lightning heads": "mixer.heads"}, swaps=False)
KIND = LayerKind(place=MIXER, nodes=nodes, constraints=_WHOLE, logged=_logged, sizes=LightningAttention)
