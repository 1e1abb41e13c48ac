"""Description of a training framework as a value: axes, constraints, a step's options, schedule, software.

A framework is data: the program reads `StepOptions`, the search reads axes and schedule, the cost model reads the
software's numbers. This module prices nothing, and other modules do not depend on a framework's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from axonn_tune.errors import UsageError, suggest
from axonn_tune.frameworks.dispatchers import default_dispatcher
from axonn_tune.grid import ALL_AXES, AXES, WORLD, Folding, split_axes
from axonn_tune.recompute import MODULES, RECOMPUTES, modules_of
from axonn_tune.specs.machine import Accelerator, Software
from axonn_tune.specs.workload import Recompute
from axonn_tune.vocabulary import DISPATCHERS, LARGEST_SIZE, MOST_TIMES, OVERLAPS, CudaGraphs, Overlap, Precision

if TYPE_CHECKING:
    from axonn_tune.frameworks.command import Command, Run
    from axonn_tune.specs.model import Model

GatherUnit: TypeAlias = Literal["weight", "block"]
Reduction: TypeAlias = Literal["buckets", "whole", "parameter"]
KernelKind: TypeAlias = Literal["ideal", "compiled", "eager"]
LossKind: TypeAlias = Literal["in_place", "fused", "softmax", "copied", "eager"]
NATURAL_IMBALANCE, IMBALANCE_SPREAD = 1.4, 0.2
"""Token imbalance of natural routing, and standard deviation of its logarithm. Fitted to steps with forced load
balancing and without: 1.65 of four of Qwen3-235B with EP 8, 24 to 9% longer (yanring/Megatron-MoE-ModelZoo@e865051),
1.16 of Nemotron-3-Super with EP 32, 6.5% longer (NVIDIA-NeMo/Megatron-Bridge@067f987d)."""
MOST_IMBALANCE = 1.29
"""Upper end of its 80% interval over the middle: exp(1.2816 · spread)."""
ContextExchange: TypeAlias = Literal["ring", "all_gather", "all_to_all", "hierarchical"]
MOST_LESS = 64
"""Layers that an embedding or an LM head may count as."""
_MOST_REDUCTIONS = 16


@dataclass(frozen=True)
class Limits:
    """What a value of a step's option may be, each of them where it has several: a number in a range, or a word.

    whole: a whole number. most_values: of an option with several.
    """

    least: float = 0.0
    most: float = float(LARGEST_SIZE)
    whole: bool = True
    words: tuple[str, ...] = ()
    most_values: int = LARGEST_SIZE

    def check(self, name: str, value: object) -> None:
        """UsageError for a value that the option cannot have, with the range or the words, and the nearest."""
        several = value if isinstance(value, tuple) else (value,)
        for one in several:
            said = f"step.{name}={one!r:.40}"
            if self.words:
                if one not in self.words:
                    raise UsageError(f"{said}{suggest(str(one), self.words)}: known: {', '.join(self.words)}")
                continue
            number = one if isinstance(one, int | float) and not isinstance(one, bool) else math.nan
            if not self.least <= number <= self.most or (self.whole and number != int(number)):
                kind = "a whole number" if self.whole else "a number"
                near = self.most if number > self.most else self.least
                raise UsageError(
                    f"{said}: must be {kind} from {self.least:g} to {self.most:,.10g}; nearest valid: {near:.10g}"
                )
        if len(several) > self.most_values or (self.words and len({*several}) < len(several)):
            raise UsageError(f"step.{name}: {len(several)} values; up to {self.most_values} are read, each word once")


def _limited(default: Any, least: float = 0.0, most: float = LARGEST_SIZE, **more: Any) -> Any:  # noqa: ANN401 - a field
    """A field with limits."""
    return field(default=default, metadata={"limits": Limits(least, most, **more)})


def _bytes() -> Any:  # noqa: ANN401 - a field
    """Bytes of an element, or None."""
    return _limited(None, 1, 8)


def _words(*known: str, default: Any = ()) -> Any:  # noqa: ANN401 - a field
    """Words of a vocabulary."""
    return _limited(default, words=known)


OFFLOAD_MODULES: Mapping[str, tuple[str, ...]] = {
    "attn_norm": ("block input",),
    "qkv_linear": ("attention.norm output",),
    "core_attn": ("qkv",),
    "attn_proj": ("attention output",),
    "mlp_norm": ("mlp.norm input",),
    "expert_fc1": ("dispatched tokens",),
    "moe_act": ("expert up projection",),
}
"""Saved arrays that are the inputs of modules which Megatron-Core can offload one by one. Source:
NVIDIA/Megatron-LM@d98e8a64, docs/user-guide/features/fine_grained_activation_offloading.md."""
_FOLDED = ("x", "z", "context", "data")
_REPEATED = (
    *("attention.core", "attention.scores", "attention.norm", "attention.output", "attention.q_up", "attention.kv_up"),
    *("mlp.norm", "mlp.up", "mlp.fc1", "mlp.fc2", "mlp.activation", "moe.activation", "shared_experts", "moe"),
)
"""Layers that selective recompute can repeat."""


@dataclass(frozen=True)
class StepOptions:
    """Options of one training step beyond the collectives and GEMMs that all layouts share.

    Tensor parallelism (x, y)
        sequence_parallel: the residual stream is split over x between layers; all-reduces over x become all-gathers
        before column-parallel and reduce-scatters after row-parallel layers (arXiv 2205.05198, section 4.2).
        pipelined_tensor: forward collectives over x are split into chunks that overlap with the adjacent GEMM
        (tp-comm-overlap). repeated_kv_heads: x may exceed key and value heads, which are then held by several ranks.

    Sharded weights (z)
        gather_unit: one all-gather and reduce-scatter a weight, or a block.
        gather_bytes, shard_gradient_bytes: element of those all-gathers and reduce-scatters; None: the compute type.
        gather_copies: full-size copies a gather makes beyond its own buffer.
        gather_after_recompute: the backward pass gathers again although recompute did.
        prefetch_recompute, prefetch_backward: those gathers are issued one ahead, as the forward's are.
        reshard: after forward always, never, or as many blocks as memory allows keep theirs (`fit`).
        head_gathered_again: the LM head's weight is gathered once more for its backward pass, blocking.
        replicated_tables: of embedding, positions and LM head, those replicated over z; their gradients are
        summed over z at the end of the step.
        whole_rows: shards are whole rows, so rows must divide; otherwise they are padded.
        master_shards: gathers read FP32 master weights and round them first; otherwise each rank keeps its weights
        in the compute type beside them.

    Replicated weights (data)
        reduction: buckets behind the backward pass, or after it one buffer, or one call a parameter.
        blocking_reduction: the same where it does not overlap; None: in the backward pass, each bucket once it is
        complete, before the gradient goes to the stage before (the bundled runtime, `runtime.communicator.DataBuckets`;
        FSDP's hooks, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_backward).
        staged_reduction: the same of pipeline stages, overlapped or not; None: as without stages.
        gradient_bytes: element of accumulated gradients; None: that of master weights. reduced_bytes: of gradients
        reduced over data; None: the same.
        reduce_each_micro_batch: gradients are reduced over data in each micro-batch instead of once a step.
        distributed_optimizer: master weights and moments are split over data; gradients are reduce-scattered, new
        weights all-gathered (ZeRO-1). parameter_overlap: that all-gather runs behind the next forward pass.
        shard_gradients: accumulated gradients are split over data, too (ZeRO-2).
        offloaded: what is kept on the host: Adam's moments, master weights, accumulated gradients, weights, and
        saved inputs of modules, named as Megatron-Core's --offload-modules does, but those of one layer.
        offloaded_states, offloaded_inputs: fractions of moments and master weights, and of those inputs.
        offloaded_layers: fraction of a rank's layers whose saved activations are.
        master_bytes, exp_avg_bytes, exp_avg_sq_bytes: elements of master weights and of Adam's moments that a
        precision-aware optimizer keeps; None: that of master weights in FP32, and another optimizer if all are.

    Context parallelism
        context_exchange: how attention gets keys and values of other ranks (`program.context`): around a ring, beside
        attention, by an all-gather, by all-to-alls that swap tokens for heads, or by those inside groups of
        context_inside ranks and a ring across the groups.
        context_shards: weights are sharded over context as over z, not replicated as over data.

    Experts
        expert_shards, expert_replicas: rank axes that experts fold over, as `grid.Folding` has them; without any, the
        framework has no experts. dispatcher: how tokens reach their experts. imbalance: rows of the rank with most
        tokens over the mean, 1 with forced load balancing. capacity_factor: tokens that an expert takes at most, over
        the mean; None: all (dropless). expert_overlap: where stages are interleaved or there is one, a forward and a
        backward pass of two micro-batches run beside each other, layer by layer, dispatch and combine of each behind
        computation of the other. delayed_weight_gradients: those of experts then run beside the combine of gradients.
        shared_expert_overlap: GEMMs of shared experts run beside dispatch and combine. gathers_experts: an axis of its
        own, `expert_z`, shards weights of experts, which are gathered a block ahead into buffers that stay.
        balancing_loss: a loss balances experts by the tokens of each in the batch, which all ranks count in each layer
        and micro-batch (Megatron-Core's global_aux_loss).

    Recompute, loss, fusion
        recompute_whole_block: full recompute repeats the block to its last operation, and that of a module the module.
        selective: layers that selective recompute repeats; `mlp.up` is the GEMM of a gated MLP's half without gate.
        loss_chunks: logits exist for one of so many equal chunks of tokens at a time, and their gradients are added in
        FP32; 0: for one of at most 4,096 tokens, as the bundled runtime has it. loss_reductions: all-reduces of one
        number a token. loss_parallel: of logits split over x; otherwise each rank of x gathers those of all words.
        loss: which copies of the logits its cross-entropy holds (`program.tables.LOSSES`).
        fused_attention: FlashAttention; otherwise GEMMs, softmax and dropout that write all scores.
        fused_norms: an RMSNorm is one kernel; otherwise some, in FP32 (nn.RMSNorm without a compiler).
        dropout: its masks are saved and its kernels run.
        fused_accumulation: weight gradients are added inside their GEMM.
        kernels: element-wise work in kernels as the bundled runtime launches them, compiled or operator by operator;
        ideal: with the software's `traffic` as factor.
        cuda_graphs: scopes whose operations the host does not launch.
        vocabulary_multiple: rows of the embedding on each rank of x are padded to a multiple of it; None: to what
        divides; 0: not padded, rows that do not divide are dropped.
        overlaps: those it has; a workload may switch some of them off.

    Pipeline stages
        first_less, last_less: layers that the embedding and the LM head count as where layers are split over stages.

    Number formats
        tf32: linear layers round FP32 operands to TF32, as Transformer Engine has cuBLAS do it
        (NVIDIA/TransformerEngine@0143a5e0, transformer_engine/common/gemm/cublaslt_gemm.cu). Products of PyTorch's own
        do not since 1.12 (torch.backends.cuda.matmul.allow_tf32).
        keeps_quantized: weights are quantized once a step, for all micro-batches; otherwise in each forward pass.
        one_layout: GEMMs take any layout of 8-bit operands, so that a scale a tensor needs no transposed copy.
        primary_weights: weights of linear layers and experts are kept and gathered in the format alone, without BF16
        beside it (Megatron-Core's --fp8-param-gather and --fp4-param-gather, torchao's float8 all-gather).
        first_layers_bf16, last_layers_bf16: layers at either end whose GEMMs stay in BF16 (Megatron-Core's
        --first-last-layers-bf16 with --num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16).
        narrow_attention: attention computes in 8 bits (Transformer Engine's fp8_dpa; Megatron-Core's
        --fp8-dot-product-attention).
        narrow_gathers: gathers over x move inputs and output gradients of linear layers in the format; where originals
        are saved, only with a scale a tensor (torchao's Float8ColwiseParallel and Float8RowwiseParallel).
        saves_original: linear layers save their input in BF16, and quantize it again in the backward pass.
        quantizes_in_gemm: quantization is issued with its GEMM (Transformer Engine), not as operations of its own.
        fused_quantization: a compiler finds the maxima of scales of whole tensors in the kernels before (torchao).
        engine_formats: those of Transformer Engine where others are torchao's (`in_format`). requantizes: weights are
        quantized by rows for the forward pass, and again for the backward pass.
    """

    sequence_parallel: bool = False
    pipelined_tensor: bool = False
    repeated_kv_heads: bool = False
    gather_unit: GatherUnit = "weight"
    gather_bytes: int | None = _bytes()
    shard_gradient_bytes: int | None = _bytes()
    gather_copies: int = _limited(0, 0, 8)
    gather_after_recompute: bool = False
    prefetch_recompute: bool = True
    prefetch_backward: bool = True
    reshard: Literal["always", "never", "fit"] = "fit"
    head_gathered_again: bool = False
    replicated_tables: tuple[str, ...] = _words("embedding", "position", "head")
    whole_rows: bool = True
    master_shards: bool = True
    reduction: Reduction = "buckets"
    blocking_reduction: Reduction | None = None
    staged_reduction: Reduction | None = None
    gradient_bytes: int | None = _bytes()
    reduced_bytes: int | None = _bytes()
    reduce_each_micro_batch: bool = False
    distributed_optimizer: bool = False
    parameter_overlap: bool = False
    shard_gradients: bool = False
    offloaded: tuple[str, ...] = _words("moments", "master", "gradients", "weights", *OFFLOAD_MODULES)
    offloaded_states: float = _limited(1.0, 0, 1, whole=False)
    offloaded_inputs: float = _limited(1.0, 0, 1, whole=False)
    offloaded_layers: float = _limited(0.0, 0, 1, whole=False)
    master_bytes: int | None = _bytes()
    exp_avg_bytes: int | None = _bytes()
    exp_avg_sq_bytes: int | None = _bytes()
    context_exchange: ContextExchange = "ring"
    context_inside: int = _limited(1, 1)
    context_shards: bool = False
    expert_shards: tuple[str, ...] = _words(*_FOLDED)
    expert_replicas: tuple[str, ...] = _words(*_FOLDED)
    dispatcher: str = _words(*DISPATCHERS, default="alltoall")
    imbalance: float = _limited(NATURAL_IMBALANCE, 1, MOST_TIMES, whole=False)
    capacity_factor: float | None = _limited(None, 0.01, MOST_TIMES, whole=False)
    expert_overlap: bool = False
    delayed_weight_gradients: bool = False
    shared_expert_overlap: bool = False
    gathers_experts: bool = False
    balancing_loss: bool = False
    recompute_whole_block: bool = False
    selective: tuple[str, ...] = _words(
        *_REPEATED, default=("attention.core", "attention.norm", "mlp.norm", "mlp.activation")
    )
    loss_chunks: int = _limited(0, 0, MOST_LESS)
    loss_parallel: bool = True
    loss_reductions: tuple[float, ...] = _limited((1.0, 2.0), 0, 64, whole=False, most_values=_MOST_REDUCTIONS)
    loss: LossKind = "in_place"
    fused_attention: bool = True
    fused_norms: bool = True
    dropout: bool = False
    fused_accumulation: bool = False
    kernels: KernelKind = "ideal"
    cuda_graphs: tuple[CudaGraphs, ...] = ()
    vocabulary_multiple: int | None = _limited(None, 0, 65536)
    overlaps: tuple[Overlap, ...] = OVERLAPS
    first_less: int = _limited(0, 0, MOST_LESS)
    last_less: int = _limited(0, 0, MOST_LESS)
    tf32: bool = False
    keeps_quantized: bool = False
    one_layout: bool = False
    primary_weights: bool = False
    first_layers_bf16: int = _limited(0, 0, 10_000)
    last_layers_bf16: int = _limited(0, 0, 10_000)
    narrow_attention: bool = False
    narrow_gathers: bool = False
    saves_original: bool = False
    quantizes_in_gemm: bool = False
    fused_quantization: bool = False
    engine_formats: tuple[Precision, ...] = ()
    requantizes: bool = False

    def __post_init__(self) -> None:
        """Refuse values out of the limits of their options."""
        for name, limits in _LIMITS.items():
            if (value := getattr(self, name)) is not None and value != ():
                limits.check(name, value)
        if both := {*self.expert_shards} & {*self.expert_replicas}:
            raise UsageError(f"step.expert_shards and step.expert_replicas both name {min(both)}")

    def in_format(self, name: str) -> StepOptions:
        """The options in a number format: Transformer Engine saves inputs quantized, repeats blocks to their last
        operation, and under FSDP2 quantizes weights that were gathered in BF16 in both passes.

        Source: NVIDIA/TransformerEngine@d0067d0d, transformer_engine/pytorch/module/linear.py, pytorch/distributed.py.
        """
        if name not in self.engine_formats:
            return self
        own = replace(self, saves_original=False, fused_quantization=False, primary_weights=False)
        return replace(own, requantizes=True, recompute_whole_block=True)

    def repeated_layers(self, recompute: Recompute) -> tuple[str, ...]:
        """Layers that the backward pass repeats one by one: none where it repeats whole blocks or nothing."""
        if recompute == "selective":
            return self.selective
        modules = [MODULES[name] for name in modules_of(recompute)]
        layers = (layer for one in modules for layer in (one.whole if self.recompute_whole_block else one.layers))
        return tuple(dict.fromkeys(layers))

    @property
    def folding(self) -> Folding:
        """Rank axes that experts fold over."""
        return Folding(self.expert_shards, self.expert_replicas)

    @property
    def copies_over_context(self) -> bool:
        """Whether ranks of context have copies of the same experts: these are not folded over it."""
        return "context" not in (*self.expert_shards, *self.expert_replicas)

    @property
    def less(self) -> tuple[int, int]:
        """Layers that the embedding and the LM head count as."""
        return self.first_less, self.last_less

    def most_parts(self, layers: int) -> int:
        """Largest number of model parts that have a layer each."""
        return (layers + sum(self.less)) // (1 + max(self.less))

    @property
    def precision_aware(self) -> bool:
        """Whether the optimizer has types of its own, and reads gradients as they were accumulated."""
        return (self.master_bytes, self.exp_avg_bytes, self.exp_avg_sq_bytes) != (None, None, None)

    def staged(self, chunks: int) -> StepOptions:
        """The step of pipeline stages of so many chunks; passes run beside each other only where they are several."""
        reduction = self.staged_reduction or self.reduction
        return replace(self, reduction=reduction, expert_overlap=self.expert_overlap and chunks > 1)


_LIMITS: Mapping[str, Limits] = {
    one.name: one.metadata["limits"] for one in fields(StepOptions) if "limits" in one.metadata
}


@dataclass(frozen=True)
class PipelineSchedule:
    """Pipeline schedule of a framework.

    interleaved: several chunks a stage are possible. overlapped: sends overlap with computation, of plain 1F1B and of
    interleaved stages. uneven: stages may differ in layers. equal_chunks: the rule by which all chunks of interleaved
    stages have as many layers; empty where they may differ. layouts: the layers of each part can be told. scattered:
    each rank of x sends its share of an activation, which the receiver gathers.
    """

    interleaved: bool = True
    overlapped: bool = False
    overlapped_interleaved: bool = True
    uneven: bool = True
    equal_chunks: str = ""
    layouts: bool = True
    scattered: bool = True


AS_MANY_A_CHUNK = "--num-layers-per-virtual-pipeline-stage gives each chunk as many layers"
"""Rule of Megatron-LM before Megatron-Core had layouts (NVIDIA/Megatron-LM@v3.0, megatron/arguments.py)."""


@dataclass(frozen=True)
class FlopCount:
    """How a framework's log counts the FLOPs of a step, for the TFLOP/s of a GPU that it prints.

    log: whose; label: what stands beside the number there; counts: what it counts, where MFU counts otherwise.
    weights: of a block its GEMMs (`gemms`), those of the square GPT block, 12·H² (`square`), those with H² each for
    queries and output and 2 // (heads per KV head) · H² for keys and values (`whole_groups`), or all `parameters` but
    the token embedding; of experts those of a token, and the router only as parameters. scores: counted share of
    attention's S×S scores; windows: in windows those of a causal one. padded: the vocabulary is the padded one.
    repeated: parts counted a fourth time (blocks, scores, head), by kind of recompute. where: axes of which one must be
    above 1, as the program that prints it is not started otherwise; none: always.
    """

    log: str
    label: str
    counts: str
    source: str = field(compare=False)
    weights: Literal["gemms", "square", "whole_groups", "parameters"] = "gemms"
    scores: float = 1.0
    windows: bool = False
    padded: bool = False
    repeated: Mapping[Recompute, tuple[str, ...]] = field(default_factory=dict)
    where: tuple[str, ...] = ()


FUSED = Software()
"""Kernels as well fused as the programs say, and a host that is never late."""


@dataclass(frozen=True)
class Framework:
    """A training framework.

    name: what `--framework` takes. measured_on: where steps of it on several GPUs were measured, and by whom; "" where
    none was: its predictions are compared with nothing then, and stand apart. axes: those it has, in the rank order
    from the inside that it starts with; permuted: the search may reorder the paper's four. ranked_by: default ranking
    criterion; where that is communication, pipeline stages are searched on demand. software: whose numbers in the file
    of fitted numbers it uses, "" for ideal kernels; the half-widths of its intervals go by the same name.
    hopper_attention: attention uses what Hopper adds. attention_since: before this generation of NVIDIA's, and above
    16 bits, it writes all scores, since FlashAttention 2 and cuDNN's attention need both (Dao-AILab/flash-attention,
    README; NVIDIA/TransformerEngine, pytorch/attention/dot_product_attention/utils.py); "" where torch's own kernel
    runs anywhere. refused: combinations it cannot run. expert_axes: of experts, those it has; expert_software: whose
    numbers it uses for models
    with them; tensor_without_expert: x splits experts where there is no expert parallelism, and only there.
    keeps_layers: layers can be told not to reshard after forward, all of them or some. recompute_modules: those that a
    recompute set can name; recompute_some: whether a set can be on the first layers of each chunk alone: no, whole
    blocks, or any set. formats: number formats below 16 bits that it is priced in; older_formats: those of them that
    only releases before the one of its commands have; format_options: step options of theirs that it can be told.
    asked_axes: axes that it has on demand alone. precision_aware: it reduces gradients in BF16 on demand, and keeps
    optimizer states in types of their own. cuda_graphs: scopes that it captures, its default first, each with the
    layouts that it then cannot run. exchanges: of context parallelism, those that a search compares; without any, that
    of its step alone. dispatchers: those it has, of which each layout takes its default; without any, it has that of
    its step alone. overlaps_experts: it can run passes of two micro-batches, or shared experts, beside dispatch and
    combine.
    names: its names of axes and `chunks`, in the order of its columns; an axis without a name has ours. As options they
    are written in lower case, with hyphens (`--dp-shard`). logged: how its log counts FLOPs; None if it prints none.
    launch: the command of a configuration; None if it is priced only. keys: its table of arguments as CSV, if it is
    none of those under `arguments/`.
    """

    name: str
    title: str
    axes: tuple[str, ...]
    source: str
    measured_on: str = ""
    step: StepOptions = StepOptions()
    schedule: PipelineSchedule = PipelineSchedule()
    software: str = ""
    permuted: bool = False
    ranked_by: Literal["communication", "iteration"] = "iteration"
    hopper_attention: bool = False
    attention_since: Literal["", "ampere"] = "ampere"
    exchanges: tuple[ContextExchange, ...] = ()
    dispatchers: tuple[str, ...] = ()
    overlaps_experts: bool = False
    refused: tuple[Refusal, ...] = ()
    keeps_layers: bool = True
    expert_axes: tuple[str, ...] = ()
    expert_software: str = ""
    asked_axes: tuple[str, ...] = ()
    tensor_without_expert: bool = False
    recompute_modules: tuple[str, ...] = ()
    recompute_some: Literal["no", "full", "any"] = "no"
    recompute_sets: tuple[Recompute, ...] = RECOMPUTES
    searches_some: bool = True
    precision_aware: bool = False
    formats: tuple[Precision, ...] = ()
    older_formats: tuple[Precision, ...] = ()
    format_options: tuple[str, ...] = ()
    cuda_graphs: Mapping[CudaGraphs, tuple[Refusal, ...]] = field(default_factory=dict, compare=False)
    names: Mapping[str, str] = field(default_factory=dict, compare=False)
    logged: FlopCount | None = field(default=None, compare=False)
    launch: Callable[[Run], Command] | None = field(default=None, compare=False)
    keys: str = field(default="", compare=False)

    def writes_scores(self, accelerator: Accelerator, precision: Precision) -> str:
        """Why its attention has no kernel without scores on an accelerator or in a precision; "" where it has one."""
        if self.attention_since and precision in ("fp32", "fp64"):
            return f"in {precision}, where FlashAttention and cuDNN's attention take 16 bits or fewer"
        if self.attention_since and accelerator.before(self.attention_since):
            since = self.attention_since.capitalize()
            return f"on {accelerator.name}, where FlashAttention and cuDNN's attention need {since} or newer"
        return ""

    def with_step(self, **changes: object) -> Framework:
        """The same framework with other step options; an exchange or dispatcher that is named is the only one."""
        exchanges = () if "context_exchange" in changes else self.exchanges
        dispatchers = () if "dispatcher" in changes else self.dispatchers
        step = replace(self.step, **changes)  # type: ignore[arg-type]
        return replace(self, step=step, exchanges=exchanges, dispatchers=dispatchers)

    @property
    def searches_stages(self) -> bool:
        """Whether a search has pipeline stages without being asked for them."""
        return self.ranked_by == "iteration" and "pipeline" in self.axes

    def dispatcher_over(self, ranks: int, domain: int | None) -> str:
        """The dispatcher of experts over so many ranks: the one asked for, or the default on a machine whose innermost
        domain has so many ranks."""
        return default_dispatcher(self.dispatchers, ranks=ranks, domain=domain) or self.step.dispatcher

    def training(self, model: Model) -> Framework:
        """The same framework with the axes of experts, if a model has them and it does, and its software for them."""
        had = (axis for axis in self.expert_axes if axis != "expert_z" or self.step.gathers_experts)
        added = tuple(axis for axis in had if axis not in self.axes) if model.has_experts else ()
        return (
            replace(self, axes=(*self.axes, *added), software=self.expert_software or self.software) if added else self
        )

    def having(self, *axes: str) -> Framework:
        """The same framework with those of these axes that it has on demand."""
        added = tuple(axis for axis in axes if axis in self.asked_axes and axis not in self.axes)
        return replace(self, axes=(*self.axes, *added)) if added else self

    def capturing(self, scopes: tuple[CudaGraphs, ...]) -> Framework:
        """The same framework with these scopes in CUDA graphs, and without what that excludes."""
        excluded = (refusal for scope in scopes for refusal in self.cuda_graphs[scope])
        return replace(self.with_step(cuda_graphs=scopes), refused=(*self.refused, *excluded))

    def cannot_recompute(self, recompute: Recompute, layers: int | None = None) -> str:
        """Why it cannot recompute a set, or not on the first so many layers of each chunk alone; "" where it can."""
        missing = [name for name in modules_of(recompute) if name not in self.recompute_modules]
        if missing:
            known = ", ".join((*RECOMPUTES, *self.recompute_modules))
            return f"{self.title} cannot recompute {missing[0]}; it has {known}"
        if layers is None or recompute == "none" or self.recompute_some == "any":
            return ""
        if self.recompute_some == "full":
            why = "recomputes modules on all layers, and only whole layers (full) on the first of each chunk"
            return "" if recompute == "full" else f"{self.title} {why}"
        return f"{self.title} recomputes on all layers, not on the first of each chunk"

    @property
    def columns(self) -> tuple[str, ...]:
        """Its axes, and `chunks` where its stages can be interleaved, as tables have them from left to right."""
        had = {*self.axes, *(["chunks"] if "pipeline" in self.axes and self.schedule.interleaved else [])}
        return tuple(axis for axis in dict.fromkeys((*self.names, *ALL_AXES, "chunks")) if axis in had)

    @property
    def expert_columns(self) -> tuple[str, ...]:
        """Its columns with a model with experts."""
        return replace(self, axes=tuple(dict.fromkeys((*self.axes, *self.expert_axes)))).columns

    def searched_axes(self, *, pipeline: bool) -> tuple[str, ...]:
        """Axes of a search, in the order of `ALL_AXES`: the paper's four, and its own, with pipeline stages or not."""
        has = {*AXES, *self.axes} - (set() if pipeline else {"pipeline"})
        return tuple(axis for axis in ALL_AXES if axis in has)

    def called(self, axes: str) -> str:
        """Its name of an axis, of `chunks`, or of the axes of a group, `TP·CP`; ours where it has none."""
        if axes == WORLD:
            return "world"
        if not self.names or axes == "chunks":
            return self.names.get(axes, axes)
        of_group = split_axes(axes)
        had = [axis for axis in of_group if axis in self.axes]
        return "·".join(self.names.get(axis, axis) for axis in had or of_group) + "".join(axes.partition("[")[1:])

    def option(self, axis: str) -> str:
        """The option that pins an axis or `chunks` by its name: `--tp`."""
        return f"--{self.called(axis).lower().replace('_', '-')}"

    def axis(self, name: str) -> str | None:
        """The axis, or `chunks`, of this name in any case; None if there is none."""
        return {self.called(axis).lower(): axis for axis in self.expert_columns}.get(name.lower())

    def layout(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Sizes of axes and `chunks` by its names of them, in the order of its columns."""
        return {self.called(axis): sizes[axis] for axis in self.columns if axis in sizes}


@dataclass(frozen=True)
class Refusal:
    """Layouts a framework cannot run: those where each of some axes is above 1; `why` in its own terms."""

    axes: tuple[str, ...]
    why: str = field(compare=False)
