"""DeepSeek-V4's compressed attention on one rank: one key that is its value, of a window and of compressed tokens.

Letters: M tokens of a half micro-batch, q the rank of the latent of queries, n heads, d width of the key, g groups of
heads whose outputs go through o each. Every token attends to a window; with ratio 128 also to all compressed keys
before it (HCA), with ratio 4 to those of them that an indexer chooses (CSA), with 0 to no others. Compressors take a
weighted mean of so many tokens (CSA: of twice as many, which overlap). Neither x nor context splits it
(NVIDIA-NeMo/Megatron-Bridge@067f987d, examples/models/deepseek_v4/README.md). The core takes what kernels of sparse
attention were measured to (`cost/kernels.csv`). Source: transformers 5.23.0,
models/deepseek_v4/modeling_deepseek_v4.py; counted FLOPs: Megatron-Bridge, training/utils/flop_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Self

from axonn_tune.frameworks.description import Framework
from axonn_tune.program.constraints import Constraint
from axonn_tune.program.inputs import PARTS, H, LayerInputs, Linear, X, Y
from axonn_tune.program.layers import moves
from axonn_tune.program.nodes import Behind, Gemm, Nodes, Own, Vectors, branch, names, norm
from axonn_tune.program.operations import Array, Attention, Measured, Operation, Phase, Size, Traffic, as_size, symbol
from axonn_tune.program.types import MIXER, LayerKind
from axonn_tune.specs.document import Size as Sized
from axonn_tune.specs.model import Layer, Model
from axonn_tune.specs.sections import Indexer, Mixer, optional, size

NORM, QUERY_DOWN, QUERIES, KEYS = "compressed.norm", "compressed.q_down", "compressed.q_up", "compressed.kv"
INDEXER, CORE, GROUPS, OUT = "compressed.indexer", "compressed.core", "compressed.groups", "compressed.out"


class CompressedAttention(Mixer):
    """Sizes of compressed attention."""

    SECTION: ClassVar[str] = "compressed"
    WHAT: ClassVar[str] = "Compressed attention (DeepSeek-V4), in place of attention."
    TITLE: ClassVar[str] = "compressed attention"
    KEYS: ClassVar[dict[str, str]] = {
        **{"heads": "num_attention_heads", "head_dim": "head_dim", "query_rank": "q_lora_rank", "groups": "o_groups"},
        **{"output_rank": "o_lora_rank", "window": "sliding_window"},
    }

    heads: Sized = size("num_attention_heads.")
    head_dim: Sized = size("head_dim, width of the one key, which is the value, too.")
    query_rank: Sized = size("q_lora_rank.")
    groups: Sized = size("o_groups, groups of heads whose outputs are projected apart.")
    output_rank: Sized = size("o_lora_rank, width of a group's projection.")
    window: Sized = size("sliding_window, in tokens.", default=128)
    ratio: Sized | None = optional("Tokens of a compressed key; without, there is the window alone.")
    indexer: Indexer | None = optional("Chooses compressed keys; without, all are attended to.")

    @property
    def problem(self) -> str:
        """Whole heads of a group, and an indexer of compressed keys alone."""
        if self.heads % self.groups:
            return f"heads ({self.heads}) is not divisible by groups ({self.groups})"
        return "indexer is given, but no ratio: there are no compressed keys" if self.indexer and not self.ratio else ""

    @property
    def words(self) -> str:
        """Its heads, and which keys."""
        others = f", of every {self.ratio} tokens one key" if self.ratio else ""
        chosen = f", of which {self.indexer.topk:,} are chosen" if self.indexer else ""
        return f"compressed attention of {self.heads} heads of {self.head_dim}, window {self.window}{others}{chosen}"

    @property
    def predicting(self) -> Self:
        """Multi-token prediction attends to the window alone."""
        return self.model_copy(update={"ratio": None, "indexer": None})

    @property
    def compressors(self) -> int:
        """Outputs of the compressor's two projections: CSA's keys overlap, so have two halves."""
        return 0 if not self.ratio else 2 * self.head_dim * (2 if self.indexer else 1)

    @property
    def indexes(self) -> int:
        """Outputs of the indexer's own compressor, and of heads' weights."""
        return 4 * self.indexer.head_dim + self.indexer.heads if self.indexer else 0

    @property
    def pair_width(self) -> int:
        """A query of each head with the key, and its probability with that again."""
        return 2 * self.heads * self.head_dim

    def pairs(self, length: float) -> float:
        """Keys of a query, as Megatron-Bridge counts them."""
        if not self.ratio:
            return float(self.window)
        if self.indexer is None:
            return self.window + length / (2.0 * self.ratio)
        chosen = min(float(self.indexer.topk), length / self.ratio)
        return self.window + chosen * (1.0 - chosen * self.ratio / (2.0 * length))


def nodes(given: LayerInputs) -> Nodes:
    """Norm, queries, keys, core, both output projections and addition; nothing of other layer types."""
    if not isinstance(one := given.own.mixer, CompressedAttention):
        return []
    first = norm(NORM, given, element=given.saved_element, added=QUERY_DOWN, modules=("layernorm",), first=True)
    rank, ended, temporary = as_size(float(one.query_rank)), branch(OUT, given), "backward temporaries"
    scored = one.indexer.heads * one.indexer.head_dim if one.indexer else 0
    wide, width = _wide(one.heads * one.head_dim + scored), _wide(one.head_dim + one.compressors + one.indexes)
    joined = _wide(one.groups * one.output_rank)
    down = Gemm(
        linear=Linear(QUERY_DOWN, H / Y, rank, "y", "", outside=True),
        makes=(given.stream("query latent", "latents", rank),),
        gradient=given.stream("query latent gradient", temporary, rank),
        reads=first,
    )
    queries = Gemm(
        linear=Linear(QUERIES, rank, wide, "", "x"),
        makes=(given.stream("queries", "qkv", wide, inside=True),),
        gradient=given.stream("queries gradient", temporary, wide, inside=True),
        modules=("mla_up_proj",),
    )
    keys = Gemm(
        linear=Linear(KEYS, H / Y, width, "y", "x"),
        makes=(given.stream("keys", "qkv", width, inside=True),),
        gradient=given.stream("keys gradient", temporary, width, inside=True),
        reads=first,
    )
    groups = Gemm(
        linear=Linear(GROUPS, _wide(one.heads * one.head_dim), as_size(float(one.output_rank)), "x", ""),
        makes=(given.stream("group outputs", "attention output", joined, inside=True),),
        gradient=given.stream("group outputs gradient", temporary, joined, inside=True),
    )
    out = Gemm(linear=Linear(OUT, joined, H / Y, "x", "y"), makes=ended.makes, gradient=ended.gradient)
    return [first, down, queries, keys, _core(given, one, queries), groups, out, *ended.added]


def _wide(width: int) -> Size:
    return as_size(float(width)) / X


def _core(given: LayerInputs, one: CompressedAttention, queries: Gemm) -> Own:
    """Norms and positions, compressor and indexer, and the core."""
    output = given.stream("attention output", "attention output", _wide(one.heads * one.head_dim), inside=True)
    kept = [
        Array("softmax statistics", "softmax statistics", given.elements.statistics * given.tokens * _wide(one.heads))
    ]
    if one.indexer is not None:
        kept.append(Array("chosen tokens", "chosen tokens", 4.0 * given.tokens * float(one.indexer.topk)))
    flops = 2.0 * given.part * symbol(f"span{given.of}") * _wide(one.pair_width)
    kernel = "sparse_mla" if one.indexer else "window_mla"
    turned, compressed = _wide((one.heads + 1) * one.head_dim), _wide(one.compressors + one.indexes)

    def before(given: LayerInputs, phase: Phase) -> Iterator[Operation]:
        """Behind the projections: norms and rotary positions, then means of so many tokens, of which all is read."""
        yield moves(phase, CORE, Traffic(1, 2), given.part * turned, given, calls=PARTS)
        if one.ratio:
            yield moves(phase, CORE, Traffic(1, 1), given.part * compressed, given, calls=PARTS)

    def forward(given: LayerInputs, phase: Phase) -> Iterator[Operation]:
        yield from before(given, phase)
        if (index := one.indexer) is not None:
            seen = given.seen / float(one.ratio or 1)
            scores = 2.0 * given.part * seen * float(index.heads * index.head_dim)
            yield Attention(phase, INDEXER, scores, seen, width=float(index.head_dim), calls=PARTS)
            # Scores of the half of keys that a query sees, in FP32, are written and read.
            yield moves(phase, INDEXER, Traffic(2, 0, 2), given.part * seen / 2.0, given, calls=PARTS)
        yield Measured(phase, CORE, kernel, 1e-9 * flops, flops, calls=PARTS, makes=(output, *kept))

    def without_output(given: LayerInputs) -> Iterator[Operation]:
        for step in forward(given, "recompute"):
            yield replace(step, makes=tuple(array for array in step.makes if array is not output))

    def backward(given: LayerInputs, behind: Behind) -> Iterator[Operation]:
        """Five GEMMs for the forward's two; the indexer's scores have gradients of chosen keys alone."""
        assert queries.gradient is not None, "as made above"
        if (index := one.indexer) is not None:
            scores = 4.0 * given.part * symbol(f"span{given.of}") * float(index.heads * index.head_dim)
            span = symbol(f"span{given.of}")
            yield Attention("backward", INDEXER, scores, span, True, width=float(index.head_dim), calls=PARTS)
        freed = (*behind.frees, *names((output, *kept, *queries.makes)))
        made, work = (behind.gradient, queries.gradient), 2.5 * flops
        yield Measured("backward", CORE, kernel, 1e-9 * work, work, True, calls=PARTS, makes=made, frees=freed)
        yield from before(given, "backward")

    # Norms of latent and key, sinks, and of the compressors what is added to each row of a mean, and a norm.
    added = one.ratio * one.compressors // 2 + one.head_dim if one.ratio else 0
    added += 9 * one.indexer.head_dim if one.indexer else 0
    return Own(
        layer=CORE,
        makes=(output,),
        gradient=given.stream(
            "attention gradient", "backward temporaries", _wide(one.heads * one.head_dim), inside=True
        ),
        keeps=True,
        needs=(queries,),
        vectors=Vectors(whole=one.query_rank + one.head_dim + one.heads + added),
        partly={"core_attn": without_output},
        inside=("core_attn",),
        ahead=forward,
        back=backward,
    )


def _constraints(model: Model, framework: Framework) -> list[Constraint]:
    """Neither tensor nor context parallelism splits it."""
    if not any(isinstance(layer.mixer, CompressedAttention) for layer in model.types):
        return []
    axes = {axis: framework.called(axis) for axis in ("x", "context") if axis in framework.axes}
    words = "compressed attention is not split by"
    return [
        Constraint(f"compressed-by-{axis}", f"{words} {name}", 1, (axis,), both=True) for axis, name in axes.items()
    ]


def _logged(layer: Layer, length: float) -> float:
    """Scores of a query with its keys, and of the indexer with all compressed ones."""
    if not isinstance(one := layer.mixer, CompressedAttention):
        return 0.0
    index, others = one.indexer, length / one.ratio if one.ratio else 0.0
    return one.pair_width * one.pairs(length) + (index.heads * index.head_dim * others if index else 0.0)


KIND = LayerKind(place=MIXER, nodes=nodes, constraints=_constraints, logged=_logged, sizes=CompressedAttention)
