"""Lightning attention on one rank: linear attention with a decay a head, which no gradient changes; a norm and a gate.

Letters: P = heads * head_dim, C tokens of a chunk. x splits heads, y the hidden dim: queries, keys, values and the gate
`[M, H_y] → [M, 4P_x] → [M, P_x] → [M, H_y]`. Sources: arXiv 2401.04658; transformers 5.23.0,
models/minimax/modeling_minimax.py, MiniMaxLightningAttention. Its kernels were not found measured: chunk by chunk they
compute what Mamba-2's scan does, whose rate an element of state they are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from axonn_tune.frameworks.description import Framework
from axonn_tune.program.constraints import Constraint
from axonn_tune.program.inputs import H, LayerInputs, Linear, Y
from axonn_tune.program.kinds import MIXER, LayerKind
from axonn_tune.program.nodes import Gemm, Nodes, Vectors, branch, norm
from axonn_tune.program.types.recurrent import Recurrence, gated_norm, recurrence, split, whole_heads
from axonn_tune.specs.document import Size
from axonn_tune.specs.model import Layer, Model
from axonn_tune.specs.sections import Mixer, size

NORM, IN, SCAN, GATED, OUT = (f"lightning.{one}" for one in ("norm", "in", "scan", "gated", "out"))


class LightningAttention(Mixer):
    """Sizes of lightning attention."""

    SECTION: ClassVar[str] = "lightning"
    WHAT: ClassVar[str] = "Lightning attention, of layers without attention."
    TITLE: ClassVar[str] = "lightning attention"
    KEYS: ClassVar[dict[str, str]] = {"heads": "num_attention_heads", "head_dim": "head_dim", "chunk": "block_size"}

    heads: Size = size("num_attention_heads, of queries, keys and values alike.")
    head_dim: Size = size("head_dim.", default=128)
    chunk: Size = size("block_size, tokens of a chunk.", default=256)

    @property
    def words(self) -> str:
        """Its heads."""
        return f"lightning attention of {self.heads} heads of {self.head_dim}"


def nodes(given: LayerInputs) -> Nodes:
    """Norm, GEMM in, scan, gated norm, GEMM out and addition; nothing of a layer type without one."""
    if not isinstance(one := given.own.mixer, LightningAttention):
        return []
    width, ended = one.heads * one.head_dim, branch(OUT, given)
    inside = Recurrence(
        layer=SCAN,
        title="lightning attention",
        kernel="mamba2",
        state=width * one.head_dim,
        # Inside a chunk and by states, backward queries, keys and values of both.
        flops=(4.0 * width * (one.chunk + one.head_dim), 10.0 * width * (one.chunk + one.head_dim)),
        into=4 * width,
        out=width,
        again=4.0 * width * one.head_dim / one.chunk,
    )
    projected = given.stream("lightning projections", inside.title, split(inside.into), inside=True)
    gradient = given.stream("lightning projection gradient", "backward temporaries", split(inside.into), inside=True)
    return [
        norm(NORM, given, element=given.saved_element, modules=("layernorm",), first=True),
        Gemm(linear=Linear(IN, H / Y, split(inside.into), "y", "x"), makes=(projected,), gradient=gradient),
        recurrence(given, inside, vectors=Vectors()),
        gated_norm(given, inside, layer=GATED, vectors=Vectors(over_x=width)),
        Gemm(linear=Linear(OUT, split(width), H / Y, "x", "y"), makes=ended.makes, gradient=ended.gradient),
        *ended.added,
    ]


def _constraints(model: Model, framework: Framework) -> Sequence[Constraint]:
    """Whole heads on each rank."""
    heads = [layer.mixer.heads for layer in model.types if isinstance(layer.mixer, LightningAttention)]
    return [*whole_heads(framework, "layers of lightning attention", {"lightning heads": heads}, swaps=False)]


def _logged(layer: Layer, _: float) -> float:
    """Its state: an outer product and a product a head."""
    return 2.0 * one.heads * one.head_dim**2 if isinstance(one := layer.mixer, LightningAttention) else 0.0


KIND = LayerKind(place=MIXER, nodes=nodes, constraints=_constraints, logged=_logged, sizes=LightningAttention)
