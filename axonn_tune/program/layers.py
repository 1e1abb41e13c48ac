"""The operations of each layer on one rank, in the order they are issued when nothing overlaps.

Letters: M tokens of one rank's micro-batch (of one half of it when split), the others as in `axonn_tune.specs.model`.
`A[M, K_y]` is an array whose dim K is split over axis y. Each function returns what one rank does; arrays are local,
sizes of collectives those of the full buffer. Differences between frameworks are read from `StepOptions`.

Sources of what is not the paper's: tensor and sequence parallelism Shoeybi et al., arXiv 1909.08053, section 3, and
Korthikanti et al., arXiv 2205.05198, section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from axonn_tune.frameworks.description import GatherUnit, StepOptions
from axonn_tune.grid import WORLD
from axonn_tune.program.context import CORE, after_core, before_core
from axonn_tune.program.loss import LOSSES
from axonn_tune.program.operations import (
    MATRIX_ALIGNMENT,
    ONCE,
    Array,
    Attention,
    Collective,
    Computation,
    Kernel,
    KernelSet,
    MatMul,
    Operation,
    OpKind,
    Phase,
    Role,
    Size,
    Traffic,
    as_size,
    kernel_set,
    symbol,
)
from axonn_tune.recompute import NEEDS, Recompute
from axonn_tune.specs.formats import Copies, NumberFormat
from axonn_tune.specs.machine import MatmulLayout
from axonn_tune.specs.model import Experts, Layer, Model
from axonn_tune.specs.workload import ElementSizes

H, S = symbol("H"), symbol("S")
X, Y, Z, CONTEXT = (symbol(name) for name in ("x", "y", "z", "context"))
EXPERT, EXPERT_TENSOR, EXPERT_Z, EXPERT_DATA = map(symbol, ("expert", "expert_tensor", "expert_z", "expert_data"))
IMBALANCE, FULLEST = symbol("imbalance"), symbol("fullest")
EXCHANGED, JOINED, SCATTERED, DIVIDED = map(symbol, ("exchanged", "joined", "scattered", "divided"))
V, P, CHUNKS = symbol("V"), symbol("P"), symbol("C")
PARTS = symbol("parts")
ALONE, SHARED, GROUPED, HALVED = (symbol(name) for name in ("alone", "shared", "grouped", "halved"))

TABLE = V * H / (X * Y)
POSITIONS = P * H / Y


@dataclass(frozen=True)
class Linear:
    """`O[M, n] = Σ_reduced I[M, k] · W[k, n]`, all sizes local; the W block is stored split over z.

    A normal layer has I[M, K_y], W[K_y, N_x]: outputs are summed over y, input gradients over x. A
    transposed one has x and y swapped, so that it takes the normal one's output without resharding.
    One with an axis "" has that dim whole on each rank of it. outside: it takes the tokens between tensor-parallel
    layers, so that its weight is duplicated over x.
    """

    layer: str
    k: Size
    n: Size
    output_axis: str
    input_axis: str
    outside: bool = False

    @property
    def weight(self) -> Size:
        """Elements of the block of W that one rank multiplies with."""
        return self.k * self.n


WIDE_LOGITS = "logits in FP32"
"""Kind of the copies of logits that a loss has in FP32."""

COPY = "embedding copy"
"""Layer of what the last of several pipeline stages does with its copy of a tied embedding."""

WHOLE_BLOCK = "block"
"""Layer of gathers and reductions that take a whole block at once."""

_TABLES = ("embedding", "head", "position", COPY)
EXPERTS = "experts"
"""Layer of those that take all routed experts of a block."""


@dataclass(frozen=True)
class LayerInputs:
    """Common inputs of the layers of one program.

    sharded: master weights are split over data; context: there is a context axis; lone_context: it has one rank, whose
    exchanges are in the program and cost nothing, so that sums of computation keep their order; table_alignment:
    alignment of rows of logits, bytes. layer, of: a layer type, and how its symbols end; repeating: how the symbols end
    that count its blocks that repeat, or those that do not. format: that of linear layers, if it is another.
    """

    model: Model
    elements: ElementSizes
    options: StepOptions = field(default_factory=StepOptions)
    sharded: bool = False
    context: bool = False
    table_alignment: int = MATRIX_ALIGNMENT
    lone_context: bool = False
    layer: Layer | None = None
    of: str = ""
    repeating: str = ""
    format: NumberFormat | None = None

    @property
    def counted(self) -> str:
        """How symbols end that count blocks of this kind."""
        return self.of + self.repeating

    @property
    def own(self) -> Layer:
        """The layer type."""
        return self.layer or self.model.types[0]

    @cached_property
    def Q(self) -> Size:  # noqa: N802 - the letter of the model document, as the next ones
        """Width of all query heads."""
        return symbol(f"Q{self.of}")

    @cached_property
    def N(self) -> Size:  # noqa: N802
        """Output of the fused qkv GEMM."""
        return symbol(f"N{self.of}")

    @cached_property
    def F(self) -> Size:  # noqa: N802
        """Width of the MLP."""
        return symbol(f"F{self.of}")

    @cached_property
    def G(self) -> Size:  # noqa: N802
        """Output of the MLP's first GEMM, gate included."""
        return symbol(f"G{self.of}")

    @cached_property
    def block(self) -> Size:
        """Weights of a block that one rank multiplies with."""
        return symbol(f"W{self.of}") / (X * Y)

    @cached_property
    def blocks(self) -> Size:
        """Blocks of this kind."""
        return symbol(f"L{self.counted}")

    @cached_property
    def held(self) -> Size:
        """Blocks of this kind whose saved activations are alive together."""
        return symbol(f"held{self.counted}")

    @cached_property
    def freed(self) -> Size:
        """Blocks of this kind, which does not repeat, in a chunk whose repeating blocks are in their backward pass."""
        return symbol(f"freed{self.counted}")

    @cached_property
    def unkept_share(self) -> Size:
        """Share of them that are resharded after forward, so gathered again for the backward pass."""
        return symbol(f"unkept{self.counted}") / self.blocks

    @cached_property
    def qkv(self) -> Linear:
        """Queries, keys and values."""
        return Linear("attention.qkv", H / Y, self.N / X, "y", "x")

    @cached_property
    def attention_output(self) -> Linear:
        """Output projection of attention."""
        return Linear("attention.output", self.values / X, H / Y, "x", "y")

    @property
    def values(self) -> Size:
        """Width of attention's output."""
        return self.Q if self.own.latent is None else as_size(float(self.own.value_width))

    @cached_property
    def latents(self) -> tuple[tuple[Linear | None, Linear], ...]:
        """Down- and up-projections of queries, which may have no latent, and of keys and values."""
        latent, heads = self.own.latent, self.own.heads
        assert latent is not None, "asked before"
        rank, kv_rank = latent.query_rank, as_size(float(latent.kv_rank))
        queries: tuple[Linear | None, Linear] = None, Linear("attention.q_up", H / Y, self.Q / X, "y", "x")
        if rank:
            down = Linear("attention.q_down", H / Y, as_size(float(rank)), "y", "", outside=True)
            queries = down, Linear("attention.q_up", down.n, self.Q / X, "", "x")
        down = Linear(
            "attention.kv_down", H / Y, as_size(float(latent.kv_rank + latent.rope_dim)), "y", "", outside=True
        )
        width = as_size(float(heads * (latent.nope_dim + latent.value_dim)))
        return queries, (down, Linear("attention.kv_up", kv_rank, width / X, "", "x"))

    @property
    def projections(self) -> tuple[Linear, ...]:
        """Linear layers in front of attention: those from the hidden state, then those from latents."""
        if self.own.latent is None:
            return (self.qkv,)
        return (*(down for down, _ in self.latents if down), *(up for _, up in self.latents))

    @cached_property
    def fc1(self) -> Linear:
        """First GEMM of the MLP."""
        return Linear("mlp.fc1", H / Y, self.G / X, "y", "x")

    @cached_property
    def fc2(self) -> Linear:
        """Second GEMM of the MLP."""
        return Linear("mlp.fc2", self.F / X, H / Y, "x", "y")

    @property
    def computes(self) -> bool:
        """Whether a block has an MLP, or experts in its place."""
        return self.own.ffn > 0 or self.own.experts is not None

    def repeated_layers(self, recompute: Recompute) -> tuple[str, ...]:
        """Layers that the backward pass of this layer type repeats one by one: of a recompute set those that it has."""
        lacking = {*NEEDS.values()} - {*self.own.parts}
        return tuple(one for one in self.options.repeated_layers(recompute) if NEEDS.get(one) not in lacking)

    @property
    def experts(self) -> Experts:
        """Of a layer type that has them."""
        assert self.own.experts is not None, "asked before"
        return self.own.experts

    @property
    def routed(self) -> Size:
        """Tokens that a rank routes, in a half micro-batch."""
        return self.outside(self.part)

    @cached_property
    def local_experts(self) -> Size:
        """Experts of a rank."""
        return as_size(float(self.experts.count)) / EXPERT

    @cached_property
    def expert_split(self) -> Size:
        """Ranks that split the width of an expert."""
        return EXPERT_TENSOR if self.options.sequence_parallel else X

    @cached_property
    def expert_row(self) -> Size:
        """Width of a token on its way to an expert."""
        return as_size(float(self.experts.latent_width)) / Y if self.experts.latent_width else H / Y

    @cached_property
    def expert_width(self) -> Size:
        """Width of an expert on a rank."""
        return as_size(float(self.experts.width)) / self.expert_split

    @cached_property
    def expert_up(self) -> Size:
        """Output of an expert's first GEMM on a rank, gate included."""
        return float(self.own.ups) * self.expert_width

    @cached_property
    def expert_block(self) -> Size:
        """Weights of the experts of a block that one rank multiplies with."""
        return float(self.own.expert_weights) * self.local_experts / (self.expert_split * Y)

    @cached_property
    def router(self) -> Linear:
        """Logits of experts; where tokens are split over x, each rank has all experts."""
        share = as_size(float(self.experts.count))
        return Linear("moe.router", H / Y, share if self.options.sequence_parallel else share / X, "y", "x")

    @cached_property
    def shared_experts(self) -> tuple[Linear, Linear]:
        """Both GEMMs of the shared experts."""
        width = as_size(float(self.experts.shared_width)) / X
        up = float(self.own.ups) * width
        return Linear("moe.shared_fc1", H / Y, up, "y", "x"), Linear("moe.shared_fc2", width, H / Y, "x", "y")

    @property
    def last_layers(self) -> tuple[str, ...]:
        """Layers of the last operations of a block, whose output its backward pass does not need."""
        return (self.linears[-1].layer,) if self.own.experts is None else ("moe.fc2", "moe.combine", "moe.shared_fc2")

    @cached_property
    def span(self) -> Size:
        """Positions that a token attends to, the masked half included."""
        return symbol(f"span{self.of}") if self.own.window else S

    @cached_property
    def prediction(self) -> Linear:
        """Projection of an MTP layer: from the hidden state and the next token's embedding."""
        return Linear("mtp.projection", 2.0 * H / Y, H / X, "y", "x")

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every linear layer of a block."""
        attention = (*self.projections, self.attention_output) if self.own.attention else ()
        shared = self.shared_experts if self.own.experts and self.own.experts.shared_width else ()
        attention = (self.prediction, *attention) if self.own.predicts else attention
        return (*attention, *((self.fc1, self.fc2) if self.own.ffn else ()), *shared)

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return self.elements.compute

    @property
    def narrow(self) -> bool:
        """Whether linear layers have a number format of their own, or TF32."""
        return self.format is not None or (self.options.tf32 and self.element == 4)

    @property
    def saved_element(self) -> float:
        """Bytes of an element of a linear layer's input, as it is saved: by columns, for the weight gradient."""
        return self.format.operand_bytes if self.format and not self.options.saves_original else self.element

    @property
    def quantizes_twice(self) -> bool:
        """Whether inputs and weights are quantized by rows in the forward pass, and by columns in the backward pass."""
        return self.format is not None and self.options.saves_original and not self.format.transposes

    @property
    def gathers_narrow(self) -> bool:
        """Whether sequence parallelism gathers inputs and output gradients of linear layers in their format."""
        narrow = self.format is not None and self.options.narrow_gathers and not self.quantizes_twice
        return narrow and self.options.sequence_parallel

    @property
    def normed_element(self) -> float:
        """The same of the input of MLP or experts: a router needs it whole, shared experts quantized beside that."""
        if self.own.experts is None:
            return self.saved_element
        return self.element + (self.format.operand_bytes if self.format and self.own.experts.shared_width else 0)

    @property
    def attention_element(self) -> float:
        """The same of attention's input, which several projections quantize, each for itself."""
        several = sum(1 for one in self.projections if one.k == H / Y)
        return self.saved_element * (several if self.format else 1)

    @property
    def core_element(self) -> float:
        """The same of attention's output, which attention needs whole; its projection may save it quantized, too."""
        if self.format is None or self.format.keeps_original or self.options.saves_original:
            return self.element
        return self.element + self.format.operand_bytes

    @property
    def heads_element(self) -> float:
        """The same of queries, keys and values: 1 where attention computes in 8 bits."""
        return 1.0 if self.format and self.options.narrow_attention else self.element

    def weight_element(self, layer: str, *, copies: int) -> float:
        """Bytes of an element of a weight as it is gathered: one copy, or all of a new one; tables have none."""
        if self.format is None or not self.options.primary_weights or layer in _TABLES:
            return self.element
        return self.format.operand_bytes if copies == 1 else self.format.gathered_bytes

    @property
    def weight_copies_bytes(self) -> float:
        """Bytes of a weight of a linear layer in its number format, all copies."""
        return (
            self.format.copies(one_layout=self.options.one_layout) * self.format.operand_bytes if self.format else 0.0
        )

    @cached_property
    def kernels(self) -> KernelSet:
        """How element-wise work is divided into kernels."""
        rms, fused = self.model.family == "llama", self.options.fused_norms
        return kernel_set(self.options.kernels, rms=rms, gated=self.own.gated, fused_norms=fused)

    @property
    def launched(self) -> bool:
        """Whether kernels are those that the bundled runtime launches, copies to other layouts included."""
        return self.options.kernels != "ideal"

    @property
    def norm_statistics(self) -> int:
        """Numbers per token that a norm combines over y: mean and M2, or only the sum of squares."""
        return 1 if self.model.family == "llama" else 2

    @cached_property
    def tokens(self) -> Size:
        """Tokens of one rank's micro-batch."""
        return symbol("b") * S / CONTEXT if self.context else symbol("b") * S

    @cached_property
    def part(self) -> Size:
        """Tokens of one half when the micro-batch is split, all of them otherwise."""
        return self.tokens / PARTS

    def outside(self, tokens: Size) -> Size:
        """Number of these tokens that a rank holds between tensor-parallel layers."""
        return tokens / X if self.options.sequence_parallel else tokens

    @cached_property
    def shards(self) -> Size:
        """Number of shards of a weight block."""
        return Z * CONTEXT if self.context and self.options.context_shards else Z

    @property
    def shard_axes(self) -> str:
        """Group that a weight is gathered over."""
        return "zcontext" if self.context and self.options.context_shards else "z"

    def sharding(self, layer: str) -> tuple[str, Size]:
        """Group that weights of a layer are gathered over, and its size."""
        return ("expert_z", EXPERT_Z) if layer == EXPERTS else (self.shard_axes, self.shards)

    @property
    def shards_experts(self) -> bool:
        """Whether weights of its routed experts, if it has any, may be sharded over a group of their own."""
        return self.own.experts is not None and (self.options.gathers_experts or bool(self.options.expert_shards))

    def replication(self, layer: str) -> tuple[str, Size]:
        """Group that holds the same shard of a layer, and its size."""
        if layer != EXPERTS:
            return self.data_axes, self.replicas
        apart = self.context and self.options.copies_over_context
        return ("contextexpert_data", CONTEXT * EXPERT_DATA) if apart else ("expert_data", EXPERT_DATA)

    @property
    def replicas(self) -> Size:
        """Ranks that hold the same shard."""
        return symbol("data") if self.data_axes == "data" else symbol("data") * CONTEXT

    @property
    def data_axes(self) -> str:
        """Group that holds the same shard."""
        return "contextdata" if self.context and not self.options.context_shards else "data"

    def replicated(self, table: str) -> bool:
        """Whether z replicates a table; a tied LM head is the embedding."""
        tied = self.model.tied_embeddings and table == "head"
        return ("embedding" if tied else table) in self.options.replicated_tables

    def table_shards(self, table: str) -> Size:
        """Number of shards of a table."""
        return ONCE if self.replicated(table) else self.shards

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an accumulated gradient."""
        return self.options.gradient_bytes or self.elements.main

    @property
    def master_bytes(self) -> int:
        """Bytes of a master weight."""
        return self.options.master_bytes or self.elements.main

    @property
    def moment_bytes(self) -> int:
        """Bytes of both moments of a parameter."""
        main = self.elements.main
        return (self.options.exp_avg_bytes or main) + (self.options.exp_avg_sq_bytes or main)

    @property
    def main_gradient_bytes(self) -> int:
        """Bytes of a gradient that the optimizer reads: cast to the type of master weights, or as accumulated."""
        return self.gradient_bytes if self.options.precision_aware else self.elements.main

    @property
    def update_bytes(self) -> float:
        """Bytes that AdamW moves to update a parameter; what a master weight lacks, it reads of the compute weight."""
        return float(self.main_gradient_bytes + self.elements.main + self.master_bytes + 2 * self.moment_bytes)

    @property
    def reduced_bytes(self) -> int:
        """Bytes of a gradient reduced over data."""
        return self.options.reduced_bytes or self.gradient_bytes

    def stream(self, name: str, kind: str, width: Size = H / Y, *, inside: bool = False, element: float = 0) -> Array:
        """An array `[M, width]` of all tokens; as sequence parallelism has it unless `inside`."""
        tokens = self.tokens if inside else self.outside(self.tokens)
        return Array(name, kind, (element or self.element) * tokens * width)


def moves(
    phase: Phase,
    layer: str,
    moved: Traffic,
    elements: Size,
    given: LayerInputs,
    *,
    calls: Size = ONCE,
    makes: tuple[Array, ...] = (),
    frees: tuple[str, ...] = (),
) -> Kernel:
    """Kernels that move the given bytes per element, all of one mean size."""
    kernels = max(moved.kernels, 1.0)
    size = moved.size_bytes(given.elements) / kernels
    return Kernel(phase, layer, size * elements, kernels * calls, makes=makes, frees=frees)


def copies(phase: Phase, layer: str, elements: Size, given: LayerInputs, *, calls: Size) -> list[Operation]:
    """A copy to another layout, where the runtime's are counted."""
    return [moves(phase, layer, Traffic(1, 2), elements, given, calls=calls)] if given.launched else []


def gather_weight(
    layer: str, elements: Size, given: LayerInputs, *, phase: Phase, calls: Size = ONCE
) -> list[Operation]:
    """All-gather of one weight block over z; from FP32 master shards each is rounded first.

    Ranks that also hold weights in the compute type have nothing to round.
    """
    options, sizes = given.options, given.elements
    element = options.gather_bytes or given.weight_element(layer, copies=1)
    rounds = options.master_shards and sizes.main != element and not given.sharded
    axes, shards = given.sharding(layer)
    prepared = (sizes.main + element) * elements / shards if rounds else ONCE * 0.0
    copied = 2.0 * options.gather_copies * element * elements
    return [
        Kernel(phase, layer, prepared, calls, prepares_gather=True),
        Collective("all_gather", axes, phase, layer, element * elements, "weight", calls),
        *([Kernel(phase, layer, copied, calls, copies_gather=True)] if options.gather_copies else []),
    ]


def reduce_weight_gradient(layer: str, elements: Size, given: LayerInputs, *, apart: Size = ONCE) -> list[Operation]:
    """Reduce-scatter of one weight gradient over z, then its addition to the accumulated shard.

    apart: 0 where its GEMM adds it.
    """
    element = given.options.shard_gradient_bytes or given.elements.compute
    axes, shards = given.sharding(layer)
    added = (element + 2 * given.gradient_bytes) * elements / shards
    return [
        Collective("reduce_scatter", axes, "backward", layer, element * elements, "weight_gradient"),
        Kernel("backward", layer, ONCE * 0.0 if given.options.fused_accumulation else added, apart, accumulates=True),
    ]


def gather_experts(given: LayerInputs, *, phase: Phase, unit: GatherUnit, calls: Size = ONCE) -> list[Operation]:
    """Gather of the experts of a block over what shards them, where weights are gathered by this unit.

    Recompute gathers them as other weights, and so does what CUDA graphs of whole layers or passes capture
    (NVIDIA/Megatron-LM@d98e8a64, docs/api-guide/core/generalized_tensor_parallel.md, section 3.4).
    """
    if not given.shards_experts or given.options.gather_unit != unit:
        return []
    gathers = gather_weight(EXPERTS, given.expert_block, given, phase=phase, calls=calls)
    ahead = given.options.gathers_experts and phase != "recompute"
    if ahead and not {"full", "full_iteration"} & {*given.options.cuda_graphs}:
        return [replace(one, role="ahead") for one in gathers if isinstance(one, Collective)]
    return gathers


def reduce_experts(given: LayerInputs, *, unit: GatherUnit) -> list[Operation]:
    """Reduce-scatter of their gradients."""
    if not given.shards_experts or given.options.gather_unit != unit:
        return []
    return reduce_weight_gradient(EXPERTS, given.expert_block, given)


def gather_table(table: str, elements: Size, given: LayerInputs) -> list[Operation]:
    """All-gather of a table over z for the forward pass, unless it is replicated."""
    return [] if given.replicated(table) else gather_weight(table, elements, given, phase="forward")


def reduce_table_gradient(table: str, elements: Size, given: LayerInputs) -> list[Operation]:
    """As of a weight; a table that is not split over z only adds its gradient."""
    if not given.replicated(table):
        return reduce_weight_gradient(table, elements, given)
    if given.options.fused_accumulation:
        return []
    return [Kernel("backward", table, (given.element + 2.0 * given.gradient_bytes) * elements)]


def reduction(
    axis: str, phase: Phase, layer: str, size: Size, given: LayerInputs, *, role: Role, calls: Size
) -> Collective:
    """Sum of an output or input gradient: an all-reduce, over x with sequence parallelism a reduce-scatter."""
    kind: OpKind = "reduce_scatter" if given.options.sequence_parallel and axis == "x" else "all_reduce"
    return Collective(kind, axis, phase, layer, size, role, calls)


def sequence_gather(
    phase: Phase,
    layer: str,
    given: LayerInputs,
    *,
    tokens: Size,
    calls: Size,
    role: Role,
    width: Size = H / Y,
    element: float = 0,
) -> list[Operation]:
    """`[M_x, width]` to `[M, width]` with sequence parallelism; otherwise no communication."""
    if not given.options.sequence_parallel:
        return []
    return [Collective("all_gather", "x", phase, layer, (element or given.element) * tokens * width, role, calls)]


def quantized(phase: Phase, layer: str, elements: Size, given: LayerInputs, *, calls: Size = PARTS) -> list[Operation]:
    """Kernels that quantize an operand of a linear layer, in all copies that its GEMMs take.

    Source: NVIDIA/TransformerEngine, guide on performance of low precision; arXiv 2603.07685, section 5.3;
    pytorch/ao@36027d82, torchao/float8/README.md.
    """
    if given.format is None:
        return []
    if given.quantizes_twice:
        kinds: tuple[Copies, ...] = ("rows", "columns") if phase == "backward" else ("rows",)
        return [_one_copy(phase, layer, elements, given, kind, calls=calls) for kind in kinds]
    launches = float(given.format.launches)
    moved = given.format.quantization_bytes(one_layout=given.options.one_layout)
    if given.format.transposes and given.options.fused_quantization:
        return [Kernel(phase, layer, (moved - 2.0 * given.format.passes) * elements, calls)]
    return [Kernel(phase, layer, moved / launches * elements, launches * calls, quantizes="all")]


def _one_copy(phase: Phase, layer: str, elements: Size, given: LayerInputs, kind: Copies, *, calls: Size) -> Kernel:
    assert given.format is not None, "asked before"
    launches, moved = float(given.format.launches), 2.0 * (1 + given.format.passes) + given.format.operand_bytes
    return Kernel(phase, layer, moved / launches * elements, launches * calls, quantizes=kind)


def quantized_again(layer: str, operand: Size, weight: Size, given: LayerInputs) -> list[Operation]:
    """The other copies of a linear layer's input and weight, which the backward pass makes where originals are saved.

    Source: pytorch/ao@36027d82, torchao/prototype/moe_training/mxfp8_linear.py, mxfp8_grouped_mm.py.
    """
    if given.options.requantizes:
        return quantized_weight("backward", layer, weight, given)
    if not given.quantizes_twice:
        return []
    sizes = ((operand, PARTS), (weight, ONCE))
    return [_one_copy("backward", layer, size, given, "columns", calls=calls) for size, calls in sizes]


def rescaled(layer: str, gradient: Size, given: LayerInputs) -> list[Operation]:
    """The kernel that multiplies a gradient of a GEMM without scales by them, read and written in BF16.

    Source: pytorch/ao@36027d82, torchao/float8/float8_ops.py, addmm_float8_unwrapped, and issue 2184.
    """
    rescales = given.format is not None and given.format.rescales
    return [Kernel("backward", layer, 2.0 * given.element * gradient, PARTS)] if rescales else []


def gathered_operand(phase: Phase, layer: str, elements: Size, given: LayerInputs) -> list[Operation]:
    """The same of an operand that sequence parallelism gathers: each rank its shard, which is then gathered.

    A scale a tensor needs the maximum of all shards first. Where GEMMs need a transposed copy of such an operand, it is
    made of the gathered one. Source: NVIDIA/TransformerEngine@d0067d0d, docs/features/low_precision_training.
    """
    if given.format is None or not given.gathers_narrow:
        return quantized(phase, layer, elements, given)
    one = given.format
    fused = one.transposes and given.options.fused_quantization
    kind: Copies | None = None if fused else "all"
    passes, launches = (0, 1.0) if fused else (one.passes, float(one.launches))
    copies = 1 if one.transposes else 2
    moved = 2.0 * (1 + passes) + copies * one.operand_bytes
    turned = Kernel(phase, layer, 2.0 * one.operand_bytes * elements, PARTS, quantizes="all", turns=True)
    return [
        *([Collective("all_reduce", "x", phase, layer, ONCE * 4.0, calls=PARTS)] if one.maxima else []),
        Kernel(phase, layer, moved / launches * given.outside(elements), launches * PARTS, quantizes=kind),
        *([turned] if one.copies(one_layout=given.options.one_layout) > copies else []),
    ]


def quantized_weight(phase: Phase, layer: str, elements: Size, given: LayerInputs) -> list[Operation]:
    """The same of a weight: in each forward pass, or in that of the first micro-batch, whose copies serve all."""
    if given.format and given.options.primary_weights and given.options.keeps_quantized:
        moved = given.format.primary_bytes(one_layout=given.options.one_layout)
        once = Kernel(phase, layer, moved * elements, ONCE / symbol("A"), quantizes="all")
        return [once] if moved and phase == "forward" else []
    if given.options.keeps_quantized:
        return quantized(phase, layer, elements, given, calls=ONCE / symbol("A")) if phase == "forward" else []
    if given.options.requantizes and given.format and phase != "backward":
        return [_one_copy(phase, layer, elements, given, "rows", calls=ONCE)]
    return quantized(phase, layer, elements, given, calls=ONCE)


def linear_forward(
    linear: Linear, given: LayerInputs, *, phase: Phase, makes: tuple[Array, ...] = ()
) -> list[Operation]:
    """GEMM and reduction of the output: `O[M, n] = Σ_output_axis I[M, k] · W[k, n]`."""
    tokens, axis = given.outside(given.part) if linear.outside else given.part, linear.output_axis
    size, gathered = given.element * tokens * linear.n, list[Operation]()
    operand = quantized(phase, linear.layer, tokens * linear.k, given)
    early = given.gathers_narrow and not linear.outside
    if linear.input_axis == "x":
        role: Role = "output" if given.options.pipelined_tensor else "other"
        element = given.format.operand_bytes if given.format and early else 0.0
        sizes = {"tokens": tokens, "calls": PARTS, "width": linear.k}
        gathered = sequence_gather(phase, linear.layer, given, role=role, element=element, **sizes)
        operand = gathered_operand(phase, linear.layer, tokens * linear.k, given)
    biased = given.model.biases and given.launched
    return [
        *(operand if early else ()),
        *gathered,
        *([moves(phase, linear.layer, given.kernels.bias, linear.n, given, calls=PARTS)] if biased else []),
        *(() if early else operand),
        *quantized_weight(phase, linear.layer, linear.weight, given),
        MatMul(phase, linear.layer, tokens, linear.n, linear.k, "NN", PARTS, narrow=given.narrow, makes=makes),
        *([reduction(axis, phase, linear.layer, size, given, role="output", calls=PARTS)] if axis else []),
    ]


def linear_backward(linear: Linear, given: LayerInputs, *, makes: Array, frees: tuple[str, ...]) -> list[Operation]:
    """Both gradients: `dI[M, k] = Σ_input_axis dO · Wᵀ`, and `dW[k, n] = Σ_z Iᵀ · dO`.

    makes: dI; frees: I and dO, where nothing else needs them.
    """
    part, layer, axis = given.part, linear.layer, linear.input_axis
    part = given.outside(part) if linear.outside else part
    # Row-parallel: dO is gathered first. Column-parallel: the gather of I overlaps with the input-gradient GEMM.
    role: Role = "input_gather" if axis == "x" else "other"
    size, moved = given.element * part * linear.k, given.kernels.bias_gradient
    biased, alone = given.model.biases, given.options.gather_unit == "weight"
    width, early = linear.k if axis == "x" else linear.n, given.gathers_narrow and not linear.outside
    element, operand = 0.0, quantized("backward", layer, part * linear.n, given)
    if given.format and early:
        # The input was saved quantized; an output gradient is gathered by rows and columns.
        element = given.format.operand_bytes * (1 if axis == "x" or given.format.transposes else 2)
        operand = operand if axis == "x" else gathered_operand("backward", layer, part * linear.n, given)
    # The bundled runtime adds a gradient in its GEMM where it needs neither another type nor other ranks.
    apart = SCATTERED if given.launched and given.element == given.gradient_bytes else ONCE
    sizes = {"tokens": part, "calls": PARTS, "width": width}
    gathered = [] if linear.outside else sequence_gather("backward", layer, given, role=role, element=element, **sizes)
    return [
        *([*operand, *gathered] if early else [*gathered, *operand]),
        *(quantized_weight("backward", layer, linear.weight, given) if given.options.requantizes else []),
        MatMul("backward", layer, part, linear.k, linear.n, "NT", PARTS, narrow=given.narrow, makes=(makes,)),
        *rescaled(layer, part * linear.k, given),
        *([reduction(axis, "backward", layer, size, given, role="input_gradient", calls=PARTS)] if axis else []),
        MatMul("backward", layer, linear.k, linear.n, part, "TN", PARTS, narrow=given.narrow, frees=frees),
        *rescaled(layer, linear.weight, given),
        *([moves("backward", layer, moved, part * linear.n, given, calls=PARTS)] if biased else []),
        *(reduce_weight_gradient(layer, linear.weight, given, apart=apart) if alone else []),
    ]


def norm_forward(
    layer: str,
    given: LayerInputs,
    *,
    tokens: Size,
    calls: Size,
    makes: tuple[Array, ...] = (),
    summed: Traffic | None = None,
) -> list[Operation]:
    """Exact norm of `[M, H_y]`: the shard's statistics are all-gathered over y and combined.

    summed: bytes of the addition of the residual stream, if fused into the norm.
    """
    own = given.outside(tokens)
    statistics = given.norm_statistics * given.elements.statistics * own * Y
    saved = Array(f"{layer} statistics", "norm statistics", statistics / Y * calls)
    moved = [one + (summed or Traffic()) for one in given.kernels.norm]
    return [
        Collective("all_gather", "y", "forward", layer, statistics, calls=calls, makes=(saved,) if makes else ()),
        *_norm_kernels("forward", layer, moved, given, tokens=own, calls=calls, makes=makes),
    ]


def norm_recompute(layer: str, given: LayerInputs, *, makes: tuple[Array, ...]) -> list[Operation]:
    """Recompute of a norm's output from its saved input and statistics, without communication."""
    own = given.outside(given.part)
    return _norm_kernels("recompute", layer, given.kernels.again, given, tokens=own, calls=PARTS, makes=makes)


def norm_backward(
    layer: str,
    given: LayerInputs,
    *,
    tokens: Size,
    calls: Size,
    makes: tuple[Array, ...] = (),
    frees: tuple[str, ...] = (),
    summed: bool = True,
) -> list[Operation]:
    """Gradient of the norm, `summed` with that of the residual stream; its sums over hidden are all-reduced over y."""
    own = given.outside(tokens)
    sums = given.norm_statistics * given.elements.statistics * own
    both = zip(given.kernels.back, given.kernels.back_sum, strict=True)
    moved = [one + added if summed else one for one, added in both]
    return [
        Collective("all_reduce", "y", "backward", layer, sums, calls=calls),
        *_norm_kernels("backward", layer, moved, given, tokens=own, calls=calls, makes=makes, frees=frees),
    ]


def _norm_kernels(
    phase: Phase,
    layer: str,
    moved: Sequence[Traffic],
    given: LayerInputs,
    *,
    tokens: Size,
    calls: Size,
    makes: tuple[Array, ...] = (),
    frees: tuple[str, ...] = (),
) -> list[Operation]:
    """Kernels of a norm, of which there are others where y splits the hidden dim."""
    alone, shared = moved
    elements = tokens * H / Y
    if alone == shared:
        return [moves(phase, layer, alone, elements, given, calls=calls, makes=makes, frees=frees)]
    return [
        moves(phase, layer, shared, elements, given, calls=SHARED * calls),
        moves(phase, layer, alone, elements, given, calls=ALONE * calls, makes=makes, frees=frees),
    ]


def head_norms(given: LayerInputs, *, phase: Phase) -> list[Operation]:
    """Norms of queries and keys over each head, which save their inputs, `[M, Q_x]` and `[M, K_x]`.

    The bundled runtime has them where it separates heads, of which it saves `[M, N_x]`, values included, once more.
    """
    if not given.own.qk_norms or given.own.latent is not None:
        return []
    back = phase == "backward"
    moved, widths = given.kernels.heads[back], _head_widths(given)
    names = [f"{one} before norm" for one in ("queries", "keys")]
    held = (given.N / X, ONCE * 0.0) if given.launched else widths
    saved = [given.stream(name, "qkv", width, inside=True) for name, width in zip(names, held, strict=True)]
    return [
        moves(
            *(phase, CORE, moved, given.part * width, given),
            calls=PARTS,
            makes=() if back else (array,),
            frees=(array.name,) if back else (),
        )
        for width, array in zip(widths, saved, strict=True)
    ]


def _head_widths(given: LayerInputs) -> tuple[Size, Size]:
    """Widths of queries and of keys on a rank."""
    return given.Q / X, as_size(float(given.own.kv_heads * given.own.head_dim)) / X


def attention_core(given: LayerInputs, *, phase: Phase) -> list[Operation]:
    """Biases or rotary positions, then softmax(QKᵀ)V on heads_x: `[M, N_x] → [M, Q_x]`, replicated over y."""
    # Heads of `[M, N_x]` are rotated by their positions, or copied under grouped-query attention, else views.
    views = given.launched and given.model.learned_positions
    separated = GROUPED * PARTS if views else PARTS
    element = given.core_element
    output = given.stream("attention output", "attention output", given.values / X, inside=True, element=element)
    narrow = given.narrow and given.options.narrow_attention
    if given.options.fused_attention:
        rows = given.tokens * given.Q / X / given.own.head_dim
        statistics = Array("softmax statistics", "softmax statistics", given.elements.statistics * rows)
        flops = _core_flops(given, queries=1, values=1)
        core: list[Computation] = [
            Attention(phase, CORE, flops, given.span, narrow=narrow, calls=PARTS, makes=(output, statistics))
        ]
    else:
        core = _unfused_core(given, phase=phase, output=output)
    return [
        *before_core(given, phase=phase),
        *(head_norms(given, phase=phase) if given.launched else ()),
        *_turned(given, given.kernels.turned, phase),
        moves(phase, CORE, Traffic(1, 2), given.part * given.N / X, given, calls=separated),
        *([Kernel(phase, CORE, 3.0 * given.part * given.N / X, PARTS, quantizes="all")] if narrow else []),
        *core,
        *after_core(given, phase=phase),
    ]


def _core_flops(given: LayerInputs, *, queries: int, values: int) -> Size:
    """Of so many GEMMs of all heads with scores and queries or keys, and with scores and values."""
    width = float(queries + values) * given.Q
    if given.own.latent is not None:
        width = as_size(float(queries * given.own.query_width + values * given.own.value_width))
    return 2.0 * given.part * given.span * width / X


def _joined(given: LayerInputs) -> list[Operation]:
    """Gradient of `[M, N_x]` from those of its heads."""
    joined = moves("backward", CORE, Traffic(1, 2), given.part * given.N / X, given, calls=PARTS)
    norms = head_norms(given, phase="backward") if given.launched else []
    return [*_turned(given, given.kernels.turned_back, "backward"), *norms, joined]


def _turned(given: LayerInputs, moved: Traffic, phase: Phase) -> list[Operation]:
    """Rotary positions of queries and keys, where they have kernels of their own."""
    if not moved.kernels or given.model.learned_positions:
        return []
    return [moves(phase, CORE, moved, given.part * width, given, calls=PARTS) for width in _head_widths(given)]


def _unfused_core(given: LayerInputs, *, phase: Phase, output: Array) -> list[Computation]:
    """Scores `[b, heads_x, S, S]` are written and read: `5·a·s²·b` bytes saved (arXiv 2205.05198, equation 1)."""
    element, mask = given.element, 1.0 if given.options.dropout else 0.0
    scores = given.tokens * given.Q / X / given.own.head_dim * S
    made = (Array("scores", "attention scores", (element + mask * (element + 1.0)) * scores),)
    return [
        _scores_matmul(given, phase, "NT", forward=True),
        Kernel(phase, CORE, symbol("scores") * _scores(given), symbol("softmax") * PARTS, makes=made),
        *([Kernel(phase, CORE, (2.0 * element + 1.0) * _scores(given), PARTS)] if given.options.dropout else []),
        _scores_matmul(given, phase, "NN", forward=False, values=True, makes=(output,)),
    ]


def _scores(given: LayerInputs) -> Size:
    return given.part * given.Q / X / given.own.head_dim * S


def _scores_matmul(
    given: LayerInputs,
    phase: Phase,
    layout: MatmulLayout,
    *,
    forward: bool,
    values: bool = False,
    makes: tuple[Array, ...] = (),
) -> MatMul:
    """One batched GEMM of the core, `[rows, S]` from heads or `[rows, width]` from scores; values: of their heads."""
    dim = given.own.value_dim if values else given.own.head_dim
    rows, width = given.part * (given.Q / X) / given.own.head_dim, as_size(dim)
    n, k = (S, width) if forward else (width, S)
    alignment = math.gcd(dim * given.element, MATRIX_ALIGNMENT)
    return MatMul(phase, CORE, rows, n, k, layout, PARTS, alignment, batched=True, makes=makes)


def attention_core_backward(given: LayerInputs) -> list[Operation]:
    """Gradient of `attention_core`: five GEMMs for its two when fused, since the scores are computed again."""
    element = given.element
    gradient = given.stream("qkv gradient", "backward temporaries", given.N / X, inside=True)
    dead = ("qkv", "attention output", "softmax statistics", "scores", "attention gradient")
    joined = _joined(given)
    exchanged, returned = (found(given, phase="backward") for found in (before_core, after_core))
    if given.options.fused_attention:
        flops = _core_flops(given, queries=3, values=2)
        narrow = given.narrow and given.options.narrow_attention
        core = Attention("backward", CORE, flops, given.span, True, narrow, calls=PARTS, makes=(gradient,), frees=dead)
        return [*exchanged, core, *joined, *returned]
    scores, values = (_scores_matmul(given, "backward", "NN", forward=one, values=True) for one in (True, False))
    keys = _scores_matmul(given, "backward", "NN", forward=False)
    masked = [Kernel("backward", CORE, (2.0 * element + 1.0) * _scores(given), PARTS)] if given.options.dropout else []
    size, kernels = symbol("scores_back") * _scores(given), symbol("softmax_back") * PARTS
    softmax = Kernel("backward", CORE, size, kernels, makes=(gradient,), frees=dead)
    return [*exchanged, scores, values, *masked, softmax, keys, keys, *joined, *returned]


def activation(given: LayerInputs, *, phase: Phase) -> list[Operation]:
    """GELU or SwiGLU, `[M, G_x] → [M, F_x]`: reads G, writes F."""
    made = given.stream("activation", "activation", given.F / X, inside=True, element=given.saved_element)
    moved = given.kernels.activation
    return [moves(phase, "mlp.activation", moved, given.part * given.F / X, given, calls=PARTS, makes=(made,))]


def up_projections(given: LayerInputs) -> tuple[Array, ...]:
    """Output of the MLP's first GEMM, `[M, F_x]`, and its gate's."""
    names = ("up projection", "gate projection")[: given.own.ups]
    return tuple(given.stream(name, "up projection", given.F / X, inside=True) for name in names)


def activation_backward(given: LayerInputs) -> list[Operation]:
    """Gradient of the activation: reads G and dF, writes dG."""
    made = given.stream("up gradient", "backward temporaries", given.G / X, inside=True)
    moved, freed = given.kernels.activation_back, ("up projection", "gate projection", "activation gradient")
    elements = given.part * given.F / X
    return [moves("backward", "mlp.activation", moved, elements, given, calls=PARTS, makes=(made,), frees=freed)]


def residual(layer: str, given: LayerInputs, *, phase: Phase, makes: tuple[Array, ...] = ()) -> list[Operation]:
    """Addition to the residual stream `[M, H_y]`; with dropout its mask of one byte an element is written, too."""
    mask = 1.0 if given.options.dropout else 0.0
    size = (3.0 * given.element + mask) * given.outside(given.part) * H / Y
    masks = [given.stream(f"{layer} mask", "dropout masks", element=1)] if given.options.dropout else []
    return [Kernel(phase, layer, size, PARTS, makes=(*makes, *masks))]


def dropout_backward(layer: str, given: LayerInputs) -> list[Operation]:
    """Gradient through the mask, where there is dropout."""
    if not given.options.dropout:
        return []
    size = (2.0 * given.element + 1.0) * given.outside(given.part) * H / Y
    return [Kernel("backward", layer, size, PARTS, frees=(f"{layer} mask",))]


# The embedding `E[V_xy, H]` is stored split over z; learned positions are `P[S, H_y]`, stored split over z. Both are
# padded to divide. With a chunked loss no rank holds more logits than `[M/C, V_xy]`.


def embedding_forward(given: LayerInputs) -> list[Operation]:
    """Look-up in the local rows, `[M, H]` reduce-scattered over y to `[M, H_y]`, summed over x."""
    element, tokens = given.element, given.tokens
    size = element * tokens * H / Y
    operations = [
        *gather_table("embedding", TABLE, given),
        moves("forward", "embedding", given.kernels.looked_up, tokens * H, given),
        *copies("forward", "embedding", tokens * H, given, calls=SHARED),
        Collective("reduce_scatter", "y", "forward", "embedding", element * tokens * H),
        reduction("x", "forward", "embedding", size, given, role="other", calls=ONCE),
    ]
    if given.model.learned_positions:
        operations += gather_table("position", POSITIONS, given)
        added = Traffic(1, 2 if given.launched else 3)
        operations.append(moves("forward", "position", added, given.outside(tokens) * H / Y, given))
    return operations


def embedding_backward(given: LayerInputs) -> list[Operation]:
    """Position gradient; then `[M, H_y]` all-gathered over y and added into the local rows."""
    element, tokens = given.element, given.tokens
    operations: list[Operation] = []
    if given.model.learned_positions:
        operations.append(Kernel("backward", "position", element * given.outside(tokens) * H / Y))
        if given.launched:
            operations.append(moves("backward", "position", Traffic(2, 1), POSITIONS, given))
        operations += reduce_table_gradient("position", POSITIONS, given)
    return [
        *operations,
        *sequence_gather("backward", "embedding", given, tokens=tokens, calls=ONCE, role="other"),
        Collective("all_gather", "y", "backward", "embedding", element * tokens * H),
        *copies("backward", "embedding", tokens * H, given, calls=SHARED),
        moves("backward", "embedding", given.kernels.scattered, tokens * H, given),
        *([moves("backward", "embedding", Traffic(1, 1), TABLE, given)] if given.launched else []),
        *reduce_table_gradient("embedding", TABLE, given),
    ]


def head(given: LayerInputs) -> list[Operation]:
    """Final norm, `h[M, H]` gathered over y, then logits, loss and their gradients chunk by chunk.

    Each chunk's gradients follow its loss, so logits are never saved: `dh[M, H]` is reduce-scattered over
    y and summed over x, `dE[V_xy, H]` reduce-scattered over z.
    """
    element, tokens = given.element, given.tokens
    size = element * tokens * H
    reduced = reduce_table_gradient("head", TABLE, given)
    held = [Array(name, "LM head input and gradient", size) for name in ("head input", "head gradient")]
    return [
        *copies("forward", "head", given.outside(tokens) * H / Y, given, calls=HALVED),
        *norm_forward("head.norm", given, tokens=tokens, calls=ONCE),
        *gather_table("head", TABLE, given),
        *sequence_gather("forward", "head", given, tokens=tokens, calls=ONCE, role="other"),
        Collective("all_gather", "y", "forward", "head", size, makes=(held[0],)),
        *copies("forward", "head", tokens * H, given, calls=SHARED),
        *_loss_chunk(given, tokens=tokens / CHUNKS, gradient=held[1]),
        *(step for step in reduced if isinstance(step, Collective)),
        *copies("backward", "head", tokens * H, given, calls=SHARED),
        Collective("reduce_scatter", "y", "backward", "head", size),
        reduction("x", "backward", "head", size / Y, given, role="other", calls=ONCE),
        *(step for step in reduced if not isinstance(step, Collective)),
        *norm_backward("head.norm", given, tokens=tokens, calls=ONCE, summed=False),
    ]


def _loss_chunk(given: LayerInputs, *, tokens: Size, gradient: Array) -> list[Operation]:
    """One chunk: `logits[t, V_xy] = h · Eᵀ`, cross-entropy over xy, `dh = dlogits · E`, `dE = dlogitsᵀ · h`.

    Unless it is in chunks, the input is gathered again beside the dh GEMM with sequence parallelism.
    """
    rows, sizes, aligned = V / (X * Y), given.elements, given.table_alignment
    reductions = given.options.loss_reductions
    names = ("loss.max", "loss.sums") if len(reductions) == 2 else ("loss",) * len(reductions)
    logits = tuple(_logits(given, tokens * rows))
    return [
        MatMul("forward", "head", tokens, rows, H, "NT", CHUNKS, makes=logits),
        *(
            Collective("all_reduce", "xy", "forward", name, numbers * sizes.statistics * tokens, calls=CHUNKS)
            for name, numbers in zip(names, reductions, strict=True)
        ),
        moves("forward", "loss", given.kernels.loss, tokens * rows, given, calls=CHUNKS),
        *_gathers_for_head_backward(given),
        MatMul("backward", "head", tokens, H, rows, "NN", CHUNKS, alignment=aligned, makes=(gradient,)),
        MatMul("backward", "head", rows, H, tokens, "TN", CHUNKS, alignment=aligned),
    ]


def _logits(given: LayerInputs, elements: Size) -> Iterator[Array]:
    """Copies of the logits that a loss holds together."""
    loss, wide = LOSSES[given.options.loss], given.elements.statistics * elements
    kind = "logits of one chunk" if given.options.chunked_loss else "logits"
    yield Array("logits", kind, loss.narrow * given.element * elements)
    if loss.wide:
        yield Array("FP32 logits", WIDE_LOGITS, loss.wide * wide)
    if loss.over_x:
        yield Array("FP32 logits over x", WIDE_LOGITS, loss.over_x * wide * DIVIDED)


def _gathers_for_head_backward(given: LayerInputs) -> list[Operation]:
    """The LM head's weight and, for its gradient, its input once more; in chunks both are there."""
    if given.options.chunked_loss:
        return []
    weight: list[Operation] = []
    if given.options.head_gathered_again and not given.replicated("head"):
        # Not overlappable: the loss directly follows the forward GEMM.
        for step in gather_weight("head", TABLE, given, phase="backward"):
            alone = {"role": "other"} if isinstance(step, Collective) else {"prepares_gather": False}
            weight.append(replace(step, **alone))
    return [*weight, *sequence_gather("backward", "head", given, tokens=given.tokens, calls=ONCE, role="input_gather")]


def data_bucket(layer: str, elements: Size, given: LayerInputs) -> Collective:
    """Gradients of one bucket over data: all-reduced, or reduce-scattered to the owner of the optimizer state."""
    kind: OpKind = "reduce_scatter" if given.sharded else "all_reduce"
    axes, _ = given.replication(layer)
    return Collective(kind, axes, "backward", layer, given.reduced_bytes * elements, "data")


Bucket = tuple[str, Size, Size]
"""`(layer, elements, how many a step)` of one data-parallel bucket."""


def step_end(given: LayerInputs, *, buckets: tuple[Bucket, ...], unsent: tuple[Collective, ...]) -> Iterator[Operation]:
    """Gradients of the replicated vectors, the gradient norm with the loss, AdamW; then new weights to their users.

    buckets: those of the data-parallel reduction; unsent: what of it is reduced only here.
    """
    element = given.element
    parameters, vectors = symbol("parameters"), symbol("vectors")
    share = given.replicas if given.sharded else ONCE
    copied = element if given.sharded else 0.0
    yield from unsent
    yield from _vectors_end(given)
    yield from _tables_end(given)
    yield Kernel("step", "gradient_norm", given.main_gradient_bytes * parameters / share)
    experts = symbol("expert_parameters") / (given.replication(EXPERTS)[1] if given.sharded else ONCE)
    if given.model.has_experts:
        yield Kernel("step", "gradient_norm", given.main_gradient_bytes * experts)
    yield Collective("all_reduce", WORLD, "step", "gradient_norm", ONCE * 16.0)
    yield Kernel("step", "optimizer", (given.update_bytes + copied) * parameters / share)
    if given.model.has_experts:
        yield Kernel("step", "optimizer", (given.update_bytes + copied) * experts)
    yield Kernel("step", "optimizer", given.update_bytes * vectors)
    if given.sharded and given.options.reduction == "whole" and not given.options.primary_weights:
        yield parameter_gather("parameters", parameters, given, phase="step")
        if given.model.has_experts:
            yield parameter_gather(EXPERTS, symbol("expert_parameters"), given, phase="step")
    elif given.sharded:
        ahead = ("block", EXPERTS, "head") if given.options.parameter_overlap else ()
        for layer, elements, count in buckets:
            if layer not in ahead:
                yield parameter_gather(layer, elements, given, phase="step", calls=count)
        if given.model.tied_embeddings or given.model.mtp_layers:
            yield parameter_gather(COPY, symbol("table_bucket"), given, phase="step")


def _vectors_end(given: LayerInputs) -> Iterator[Operation]:
    """Sums of the gradients of replicated vectors."""
    vectors = given.elements.main * symbol("vectors")
    if given.launched and any(layer.qk_norms for layer in given.model.types):
        yield Collective("all_reduce", "x", "step", "vectors", given.elements.main * symbol("head_norms"))
    if given.options.sequence_parallel:
        yield Collective("all_reduce", "x", "step", "vectors", given.gradient_bytes * symbol("vectors"))
    yield Collective("all_reduce", given.shard_axes, "step", "vectors", vectors)
    yield Collective("all_reduce", given.data_axes, "step", "vectors", vectors)


def _tables_end(given: LayerInputs) -> Iterator[Operation]:
    """Gradients of tables replicated over z, and of tied embeddings on the first and the last stage."""
    if given.options.reduction != "parameter":
        for table, elements in tables(given):
            if given.replicated(table):
                yield Collective("all_reduce", given.shard_axes, "step", table, given.gradient_bytes * elements)
    if given.model.tied_embeddings or given.model.mtp_layers:
        shard = TABLE / given.table_shards("embedding")
        bucket = shard if given.replicated("embedding") else symbol("table_bucket")
        if given.options.reduction != "whole":
            yield replace(data_bucket(COPY, bucket, given), phase="step")
        # Megatron-LM adds whole buffers; the bundled runtime adds only each rank's share.
        own = bucket / given.replicas if given.sharded and not given.options.distributed_optimizer else shard
        yield Collective("all_reduce", "ends", "step", "embedding", given.gradient_bytes * own)


def tables(given: LayerInputs) -> Iterator[tuple[str, Size]]:
    """Tables of a model, with the elements that z shards."""
    yield "embedding", TABLE
    if not given.model.tied_embeddings:
        yield "head", TABLE
    if given.model.learned_positions:
        yield "position", POSITIONS


def parameter_gather(layer: str, elements: Size, given: LayerInputs, *, phase: Phase, calls: Size = ONCE) -> Collective:
    """New weights of one bucket, in the compute type, from the ranks that updated them."""
    axes, _ = given.replication(layer)
    return Collective(
        "all_gather",
        axes,
        phase,
        layer,
        given.weight_element(layer, copies=2) * elements,
        "parameters" if phase != "step" else "other",
        calls,
    )
