"""Common inputs of the operations of one program: the model, the options of a step, sizes as symbols, and what follows.

Letters: M tokens of one rank's micro-batch (of one half of it when split), the others as in `axonn_tune.specs.model`.
Differences between frameworks are read from `StepOptions`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from axonn_tune.frameworks.step import OFFLOAD_MODULES, StepOptions
from axonn_tune.program.operations import MATRIX_ALIGNMENT, ONCE, Array, KernelSet, Phase, Size, kernel_set, symbol
from axonn_tune.specs.formats import Fusion, NumberFormat
from axonn_tune.specs.model import Layer, Model
from axonn_tune.specs.tuning import Tuning
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
    layers, so that its weight is duplicated over x. normed: its norm is in its module, and may quantize for it.
    """

    layer: str
    k: Size
    n: Size
    output_axis: str
    input_axis: str
    outside: bool = False
    normed: bool = False

    @property
    def split_output(self) -> str:
        """Axis that splits its output."""
        return {"x": "x", "y": "y"}.get(self.input_axis, "")

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
ADAPTER = "lora"
"""How names of layers end that are adapters; alone, all of a block."""
EXPERTS = "experts"
"""Layer of those that take all routed experts of a block."""


OTHERS = ".others"
"""Behind symbols that count blocks beside that in which a backward pass ends, if they are alike."""


def suffixes(model: Model) -> tuple[str, ...]:
    """What stands behind the symbols of each layer type of a model: nothing if there is but one, beside that of the
    layer in which its backward pass ends."""
    types, alone = model.types, len(model.layer_types) < 2 and not model.mtp_layers
    return tuple("" if alone and (not layer.opens or len(types) == 1) else f".{layer.name}" for layer in types)


def counted_suffix(model: Model, of: str) -> str:
    """What stands behind the symbols that count blocks of a layer type: without it they count all blocks."""
    return of or (OTHERS if len(model.types) > 1 else "")


@dataclass(frozen=True)
class LayerInputs:
    """Common inputs of the layers of one program.

    sharded: master weights are split over data; context: there is a context axis; lone_context: it has one rank, whose
    exchanges are in the program and cost nothing, so that sums of computation keep their order; table_alignment:
    alignment of rows of logits, bytes. layer, of: a layer type, and how its symbols end; repeating: how the symbols end
    that count its blocks that repeat, or those that do not. format: that of linear layers, if it is another. lengths:
    sequences differ in length.
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
    lengths: bool = False

    @property
    def counted(self) -> str:
        """How symbols end that count blocks of this kind."""
        return counted_suffix(self.model, self.of) + self.repeating

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
    def trained_block(self) -> Size:
        """Of these, those that train."""
        return symbol(f"trained{self.of}") / (X * Y)

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

    def gathered_share(self, phase: Phase) -> Size:
        """Share of them that gather a weight in a pass: all forward, and those that are resharded once more."""
        return ONCE if phase == "forward" else self.unkept_share

    @property
    def tuning(self) -> Tuning | None:
        """What of the model trains, where that is not all."""
        return self.model.tuning

    def trains_table(self, table: str) -> bool:
        """Whether a table trains; a tied LM head is the embedding."""
        tied = self.model.tied_embeddings and table == "head"
        return self.tuning is None or ("embedding" if tied else table) in self.tuning.tables

    def mastered(self, layer: str, elements: Size) -> Size:
        """Elements of a weight, or of a whole block, that have master weights."""
        if self.tuning is None or layer.endswith(ADAPTER) or (layer in _TABLES and self.trains_table(layer)):
            return elements
        return self.trained_block if layer == WHOLE_BLOCK else 0.0 * elements

    @property
    def state_element(self) -> int:
        """Bytes of an element of master weights, gradients and optimizer states, unless a framework has others: of
        adapters in BF16 that are their own master weights they are in BF16, too."""
        half = self.tuning is not None and self.tuning.dtype == "bf16" and self.options.master_shards
        return self.elements.compute if half else self.elements.main

    @property
    def passes_gradients(self) -> bool:
        """Whether gradients go through blocks: not where the LM head alone trains."""
        return self.tuning is None or self.tuning.adapts

    @property
    def replicates_adapters(self) -> bool:
        """Whether adapters are whole on all ranks of z."""
        return self.options.replicated_adapters and self.tuning is not None

    @property
    def streams(self) -> int:
        """Residual streams: several with hyper-connections."""
        return self.model.residual_streams or 1

    @property
    def routed(self) -> Size:
        """Tokens that a rank routes, in a half micro-batch."""
        return self.outside(self.part)

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
    def norm_fusion(self) -> Fusion:
        """What a norm in the module of a linear layer does of quantizing for it: Transformer Engine's."""
        fuses = self.options.quantizes_in_gemm and not self.options.saves_original and self.own.norms != "post"
        return self.format.with_norm[self.options.cudnn_norms] if self.format and fuses else "none"

    @property
    def heads_element(self) -> float:
        """The same of queries, keys and values: 1 where attention computes in 8 bits."""
        return 1.0 if self.format and self.options.narrow_attention else self.element

    @property
    def activation_element(self) -> float:
        """The same of what a dense MLP's activation reads."""
        return 1.0 if self.format and self.options.narrow_activation else self.element

    def weight_element(self, layer: str, *, copies: int) -> float:
        """Bytes of an element of a weight as it is gathered: one copy, or all of a new one; tables have none. Of a
        quantized base adapters count as if they were of it, too."""
        if self.tuning is not None and self.tuning.quantized and layer not in (*_TABLES, EXPERTS):
            return self.element if layer.endswith(ADAPTER) else self.tuning.base_bytes
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

    @property
    def seen(self) -> Size:
        """Positions of a token's own sequence, the masked half included."""
        return symbol("seen") if self.lengths else S

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

    def moved_share(self, array: str) -> float:
        """Share of a saved array that goes to the host beside that of whole layers."""
        modules = (module for module in self.options.offloaded if array in OFFLOAD_MODULES.get(module, ()))
        return self.options.offloaded_inputs if any(modules) else 0.0

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an accumulated gradient."""
        return self.options.gradient_bytes or self.state_element

    @property
    def reduced_bytes(self) -> int:
        """Bytes of a gradient reduced over data."""
        return self.options.reduced_bytes or self.gradient_bytes

    def stream(self, name: str, kind: str, width: Size = H / Y, *, inside: bool = False, element: float = 0) -> Array:
        """An array `[M, width]` of all tokens; as sequence parallelism has it unless `inside`."""
        tokens = self.tokens if inside else self.outside(self.tokens)
        return Array(name, kind, (element or self.element) * tokens * width)
