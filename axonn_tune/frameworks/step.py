"""Options of a training step, with the limits of their values: what a framework does, or `--set step.KEY` asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

from axonn_tune.errors import UsageError, suggest
from axonn_tune.grid import Folding
from axonn_tune.recompute import MODULES, Recompute, modules_of
from axonn_tune.vocabulary import (
    DISPATCHERS,
    LARGEST_SIZE,
    MOST_TIMES,
    OPTIMIZERS,
    OVERLAPS,
    CudaGraphs,
    Overlap,
    PipelineOrder,
    Precision,
)

GatherUnit: TypeAlias = Literal["weight", "block"]
Reduction: TypeAlias = Literal["buckets", "whole", "parameter"]
ExpertKernels: TypeAlias = Literal["compiled", "looped", "separate", "fused"]
KernelKind: TypeAlias = Literal["ideal", "compiled", "eager"]
ScanKernels: TypeAlias = Literal["fla", "cudnn"]
SparseKernels: TypeAlias = Literal["cudnn", "tilelang"]
LossKind: TypeAlias = Literal["in_place", "fused", "softmax", "copied", "eager"]
NATURAL_IMBALANCE, IMBALANCE_SPREAD = 1.4, 0.3
"""Token imbalance of natural routing over 8 ranks that have 32,768 tokens together (`program.dimensions` has others),
and standard deviation of its logarithm: median and spread of four models by their steps with forced load balancing and
without, 1.59 of Qwen3-235B with EP 8 and 1.06 of Mixtral 8x22B with EP 8 (yanring/Megatron-MoE-ModelZoo@e865051), 1.24
of Nemotron-3-Super with EP 32 and 2.2 of Qwen3-30B with EP 16 (NVIDIA-NeMo/Megatron-Bridge@067f987d)."""
MOST_IMBALANCE = 1.47
"""Upper end of its 80% interval over the middle: exp(1.2816 · spread)."""
ContextExchange: TypeAlias = Literal["ring", "all_gather", "all_to_all", "hierarchical"]
MOST_LESS = 64
"""Layers that an embedding or an LM head may count as."""
MOST_CHUNKS = 4096
"""Chunks of the loss, as Liger's has them: those of a vocabulary 4,096 times the hidden size."""
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
HOST_BYTES = 16.0
"""Of an element that is updated on the host, there: weight, gradient and two moments in FP32."""
FORMAT_OPTIONS = (
    *("primary_weights", "first_layers_bf16", "last_layers_bf16"),
    *("narrow_attention", "narrow_head", "narrow_activation", "cudnn_norms"),
)
"""Options that are of no use without a number format below 16 bits, of which a framework has all, some or none."""
_FOLDED = ("x", "z", "context", "data")
_REPEATED = (
    *(
        "attention.core",
        "attention.scores",
        "attention.gate",
        "attention.norm",
        "attention.output",
        "attention.q_up",
        "attention.kv_up",
    ),
    *("mlp.norm", "mlp.up", "mlp.fc1", "mlp.fc2", "mlp.activation", "moe.activation"),
    *MODULES,
)
"""Layers and modules that selective recompute can repeat."""


@dataclass(frozen=True)
class TensorOptions:
    """Of tensor parallelism, over x and y.

    sequence_parallel: the residual stream is split over x between layers; all-reduces over x become all-gathers
    before column-parallel and reduce-scatters after row-parallel layers (arXiv 2205.05198, section 4.2).
    pipelined_tensor: forward collectives over x are split into chunks that overlap with the adjacent GEMM
    (tp-comm-overlap). repeated_kv_heads: x may exceed key and value heads, which are then held by several ranks.
    """

    sequence_parallel: bool = False
    pipelined_tensor: bool = False
    repeated_kv_heads: bool = False


@dataclass(frozen=True)
class GatherOptions:
    """Of weights that are sharded over z: how they are gathered, and their gradients reduce-scattered.

    gather_unit: one all-gather and reduce-scatter a weight, or a block.
    gather_bytes, shard_gradient_bytes: element of those all-gathers and reduce-scatters; None: the compute type.
    gather_copies: full-size copies a gather makes beyond its own buffer.
    gather_after_recompute: the backward pass gathers again although recompute did.
    prefetch_recompute, prefetch_backward: those gathers are issued one ahead, as the forward's are.
    reshard: after forward always, never, or as many blocks as memory allows keep theirs (`fit`).
    head_gathered_again: the LM head's weight is gathered once more for its backward pass, blocking.
    replicated_tables: of embedding, positions and LM head, those replicated over z; their gradients are
    summed over z at the end of the step. replicated_adapters: the same of all adapters, whose gradients are then also
    summed over the axis of tensor parallelism that splits neither of their dims, in one call each.
    whole_rows: shards are whole rows, so rows must divide; otherwise they are padded.
    master_shards: gathers read FP32 master weights and round them first; otherwise each rank keeps its weights
    in the compute type beside them.
    """

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
    replicated_adapters: bool = False
    whole_rows: bool = True
    master_shards: bool = True


@dataclass(frozen=True)
class GradientOptions:
    """Of gradients of weights that are replicated over data: their types, and how they are reduced.

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
    shard_gradients: accumulated gradients are split over data, too (ZeRO-2). whole_gradient_bytes: of an element of
    whole gradients that each rank of z accumulates beside, as where FSDP reduces in the last micro-batch alone
    (no_sync); 0: none.
    """

    reduction: Reduction = "buckets"
    blocking_reduction: Reduction | None = None
    staged_reduction: Reduction | None = None
    gradient_bytes: int | None = _bytes()
    reduced_bytes: int | None = _bytes()
    reduce_each_micro_batch: bool = False
    distributed_optimizer: bool = False
    parameter_overlap: bool = False
    shard_gradients: bool = False
    whole_gradient_bytes: int = _limited(0, 0, 4)


_TP_MODES = ("duplicated", "distributed", "blockwise", "layer_sharded", "in_turn")
_FORMS = ("standard", "gram")


@dataclass(frozen=True)
class OptimizerOptions:
    """Of the optimizer (`frameworks.optimizers`), and of one that orthogonalizes whole matrices.

    muon_tp_mode: how ranks that have shards of a matrix do it. Each gathers it and iterates on all of it; on its
    shard, with sums of Gram matrices; on its shard as if that were all; or one rank in turn takes a whole matrix, over
    all shards, or over z alone of what it gathers over the others.
    muon_num_ns_steps: iterations. muon_form: each with the matrix, or on its Gram matrix with one restart.
    muon_batched: matrices of one shape in one launch. muon_apart_gate: gate and up projections are two matrices.
    muon_cut: states are split by elements, so that all ranks with a part of a matrix iterate on it. muon_gathered: they
    are so, but each rank gathers all of them and iterates on every matrix.
    """

    optimizer: str = _words(*OPTIMIZERS, default="adamw")
    muon_tp_mode: str = _words(*_TP_MODES, default="duplicated")
    muon_num_ns_steps: int = _limited(5, 1, 100)
    muon_form: str = _words(*_FORMS, default="standard")
    muon_batched: bool = False
    muon_apart_gate: bool = False
    muon_cut: bool = False
    muon_gathered: bool = False


@dataclass(frozen=True)
class StateOptions:
    """Of persistent state: what is on the host, and the types of a precision-aware optimizer.

    offloaded: what is kept on the host: Adam's moments, master weights, accumulated gradients, weights, and
    saved inputs of modules, named as Megatron-Core's --offload-modules does, but those of one layer.
    offloaded_states, offloaded_inputs: fractions of moments and master weights, and of those inputs.
    offloaded_layers: fraction of a rank's layers whose saved activations are.
    host_optimizer: whose Adam updates what is there: torch's, in FP32 and in the process of each rank; or DeepSpeed's,
    on all cores, which rounds the new weights, too. offload_overlap: one parameter is copied while others are updated.
    master_bytes, exp_avg_bytes, exp_avg_sq_bytes: elements of master weights and of Adam's moments that a
    precision-aware optimizer keeps; None: that of master weights in FP32, and another optimizer if all are.
    """

    offloaded: tuple[str, ...] = _words("moments", "master", "gradients", "weights", *OFFLOAD_MODULES)
    offloaded_states: float = _limited(1.0, 0, 1, whole=False)
    offloaded_inputs: float = _limited(1.0, 0, 1, whole=False)
    offloaded_layers: float = _limited(0.0, 0, 1, whole=False)
    host_optimizer: str = _words("torch", "deepspeed", default="torch")
    offload_overlap: bool = False
    master_bytes: int | None = _bytes()
    exp_avg_bytes: int | None = _bytes()
    exp_avg_sq_bytes: int | None = _bytes()

    @property
    def offloads(self) -> bool:
        """Whether something is on the host."""
        return bool(self.offloaded or self.offloaded_layers)

    @property
    def precision_aware(self) -> bool:
        """Whether the optimizer has types of its own, and reads gradients as they were accumulated."""
        return (self.master_bytes, self.exp_avg_bytes, self.exp_avg_sq_bytes) != (None, None, None)


@dataclass(frozen=True)
class ContextOptions:
    """Of context parallelism.

    context_exchange: how attention gets keys and values of other ranks (`program.context`): around a ring, beside
    attention, by an all-gather, by all-to-alls that swap tokens for heads, or by those inside groups of
    context_inside ranks and a ring across the groups.
    context_shards: weights are sharded over context as over z, not replicated as over data.
    """

    context_exchange: ContextExchange = "ring"
    context_inside: int = _limited(1, 1)
    context_shards: bool = False


@dataclass(frozen=True)
class ExpertOptions:
    """Of experts.

    expert_shards, expert_replicas: rank axes that experts fold over, as `grid.Folding` has them; without any, the
    framework has no experts. dispatcher: how tokens reach their experts. imbalance: rows of the rank with most tokens
    over the mean, 1 with forced load balancing; None: natural routing, whose `natural_imbalance` depends on the
    layout. capacity_factor: tokens that an expert takes at most, over the mean; None: all (dropless).
    expert_overlap: where stages are interleaved or there is one, a forward and a backward pass of two micro-batches run
    beside each other, layer by layer, dispatch and combine of each behind computation of the other.
    delayed_weight_gradients: those of experts then run beside the combine of gradients. shared_expert_overlap: GEMMs of
    shared experts run beside dispatch and combine. gathers_experts: an axis of its own, `expert_z`, shards weights of
    experts, which are gathered a block ahead into buffers that stay. balancing_loss: a loss balances experts by the
    tokens of each in the batch, which all ranks count in each layer and micro-batch (Megatron-Core's global_aux_loss).
    expert_kernels: what is between the grouped GEMMs of routed experts is one kernel, biases and clamps included
    (compiled); biases are operators of their own, expert by expert (looped: NVIDIA-NeMo/Automodel@01f0725c,
    nemo_automodel/components/moe/experts.py, _apply_bias); clamps and the bias of the second GEMM are (separate:
    NVIDIA/Megatron-LM@d98e8a64, megatron/core/transformer/moe/experts.py, TEGroupedMLP); or all of it is in the GEMMs,
    with what it quantizes, which needs MXFP8 (fused: NVIDIA/TransformerEngine@d0067d0d,
    transformer_engine/pytorch/ops/fused/grouped_mlp.py; otherwise as compiled). paged_stash: what routed experts save
    is copied into pages after their forward pass, and back before their backward pass (NVIDIA/Megatron-LM@d98e8a64,
    docs/user-guide/features/paged_stash.md).
    """

    expert_shards: tuple[str, ...] = _words(*_FOLDED)
    expert_replicas: tuple[str, ...] = _words(*_FOLDED)
    dispatcher: str = _words(*DISPATCHERS, default="alltoall")
    imbalance: float | None = _limited(None, 1, MOST_TIMES, whole=False)
    natural_imbalance: float = _limited(NATURAL_IMBALANCE, 1, MOST_TIMES, whole=False)
    capacity_factor: float | None = _limited(None, 0.01, MOST_TIMES, whole=False)
    expert_overlap: bool = False
    delayed_weight_gradients: bool = False
    shared_expert_overlap: bool = False
    gathers_experts: bool = False
    balancing_loss: bool = False
    expert_kernels: ExpertKernels = "compiled"
    paged_stash: bool = False

    @property
    def folding(self) -> Folding:
        """Rank axes that experts fold over."""
        return Folding(self.expert_shards, self.expert_replicas)

    @property
    def copies_over_context(self) -> bool:
        """Whether ranks of context have copies of the same experts: these are not folded over it."""
        return "context" not in (*self.expert_shards, *self.expert_replicas)


@dataclass(frozen=True)
class RecomputeOptions:
    """Of activation recomputation.

    recompute_whole_block: full recompute repeats the block to its last operation, and that of a module the module.
    selective: layers that selective recompute repeats; `mlp.up` is the GEMM of a gated MLP's half without gate.
    selective_at_once: all of these are repeated before the first gradient of a block, as by a checkpoint of whole
    blocks that saves outputs of some operations (torch/utils/checkpoint.py, _CachingTorchDispatchMode).
    """

    recompute_whole_block: bool = False
    selective: tuple[str, ...] = _words(
        *_REPEATED, default=("attention.core", "attention.norm", "mlp.norm", "mlp.activation")
    )
    selective_at_once: bool = False


@dataclass(frozen=True)
class LossOptions:
    """Of the loss, and the vocabulary that it is over.

    loss_chunks: logits exist for one of so many equal chunks of tokens at a time, and their gradients are added in
    FP32; 0: for one of at most 4,096 tokens, as the bundled runtime has it. loss_reductions: all-reduces of one
    number a token. loss_parallel: of logits split over x; otherwise each rank of x gathers those of all words.
    loss: which copies of the logits its cross-entropy holds (`program.tables.LOSSES`).
    vocabulary_multiple: rows of the embedding on each rank of x are padded to a multiple of it; None: to what
    divides; 0: not padded, rows that do not divide are dropped.
    """

    loss_chunks: int = _limited(0, 0, MOST_CHUNKS)
    loss_parallel: bool = True
    loss_reductions: tuple[float, ...] = _limited((1.0, 2.0), 0, 64, whole=False, most_values=_MOST_REDUCTIONS)
    loss: LossKind = "in_place"
    vocabulary_multiple: int | None = _limited(None, 0, 65536)


@dataclass(frozen=True)
class KernelOptions:
    """Of kernels, and what the host launches.

    fused_attention: FlashAttention; otherwise GEMMs, softmax and dropout that write all scores.
    deterministic: fused attention adds the gradients of queries in one order (Transformer Engine's
    NVTE_ALLOW_NONDETERMINISTIC_ALGO=0, which Megatron-Core's --deterministic-mode needs).
    fused_norms: an RMSNorm is one kernel; otherwise some, in FP32 (nn.RMSNorm without a compiler).
    dropout: its masks are saved and its kernels run.
    fused_accumulation: weight gradients are added inside their GEMM.
    compiled_activation: a gated activation is the kernel that torch's compiler makes of it alone (Megatron-Core's
    jit_fuser), whose rate is measured; otherwise it goes at the bandwidth of others.
    fused_hyper_connections: one kernel before a branch and one behind it; otherwise operator by operator, in FP32
    (Primus, traces of DeepSeek-V4 in mid-2026).
    scan_kernels: whose scans of delta rules run: Triton's of flash-linear-attention, or cuDNN's. sparse_kernels: whose
    core of sparse attention: FlashMLA's forward with cuDNN's backward pass, or TileLang's, as Megatron-Core's
    --dsa-kernel-backend has them.
    kernels: element-wise work in kernels as the bundled runtime launches them, compiled or operator by operator;
    ideal: with the software's `traffic` as factor.
    cuda_graphs: scopes whose operations the host does not launch. step_reductions: all-reduces of a few bytes at the
    end of a step beside that of the gradient norm.
    """

    fused_attention: bool = True
    deterministic: bool = False
    fused_norms: bool = True
    dropout: bool = False
    fused_accumulation: bool = False
    compiled_activation: bool = False
    fused_hyper_connections: bool = True
    scan_kernels: ScanKernels = "fla"
    sparse_kernels: SparseKernels = "cudnn"
    kernels: KernelKind = "ideal"
    step_reductions: int = _limited(0, 0, 64)
    cuda_graphs: tuple[CudaGraphs, ...] = ()


@dataclass(frozen=True)
class StageOptions:
    """Of pipeline stages.

    first_less, last_less: layers that the embedding and the LM head count as where layers are split over stages.
    pipeline_order: in which order they do the passes of all micro-batches (`program.schedules`).
    """

    first_less: int = _limited(0, 0, MOST_LESS)
    last_less: int = _limited(0, 0, MOST_LESS)
    pipeline_order: PipelineOrder = "1f1b"

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients wait behind the input's gradient in the backward pass of stages."""
        return self.pipeline_order != "1f1b"

    @property
    def less(self) -> tuple[int, int]:
        """Layers that the embedding and the LM head count as."""
        return self.first_less, self.last_less

    def most_parts(self, layers: int) -> int:
        """Largest number of model parts that have a layer each."""
        return (layers + sum(self.less)) // (1 + max(self.less))


@dataclass(frozen=True)
class FormatOptions:
    """Of number formats below FP32.

    tf32: linear layers round FP32 operands to TF32, as Transformer Engine has cuBLAS do it
    (NVIDIA/TransformerEngine@0143a5e0, transformer_engine/common/gemm/cublaslt_gemm.cu). GEMMs of PyTorch's own
    do not since 1.12 (torch.backends.cuda.matmul.allow_tf32).
    keeps_quantized: weights are quantized once a step, for all micro-batches; otherwise in each forward pass.
    one_layout: GEMMs take any layout of 8-bit operands, so that a scale a tensor needs no transposed copy.
    primary_weights: weights of linear layers and experts are kept and gathered in the format alone, without BF16
    beside it (Megatron-Core's --fp8-param-gather and --fp4-param-gather, torchao's float8 all-gather).
    first_layers_bf16, last_layers_bf16: layers at either end whose GEMMs stay in BF16 (Megatron-Core's
    --first-last-layers-bf16 with --num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16).
    narrow_attention: attention computes in 8 bits (Transformer Engine's fp8_dpa; Megatron-Core's
    --fp8-dot-product-attention).
    narrow_head: GEMMs of the LM head are in the format, too (Megatron-Core's fp8_output_proj).
    narrow_activation: inputs of gated activations are saved in 8 bits (its activation_func_fp8_input_store).
    cudnn_norms: norms are cuDNN's, which quantize to MXFP8 in the same kernel for the linear layer of their module
    (Transformer Engine's NVTE_NORM_FWD_USE_CUDNN); its own do so for delayed scaling, and find current scaling's
    maximum.
    narrow_gathers: gathers over x move inputs and output gradients of linear layers in the format; where originals
    are saved, only with a scale a tensor (torchao's Float8ColwiseParallel and Float8RowwiseParallel).
    saves_original: linear layers save their input in BF16, and quantize it again in the backward pass.
    quantizes_in_gemm: quantization is issued with its GEMM (Transformer Engine), not as operations of its own.
    fused_quantization: a compiler finds the maxima of scales of whole tensors in the kernels before (torchao).
    engine_formats: those of Transformer Engine where others are torchao's (`in_format`). requantizes: weights are
    quantized by rows for the forward pass, and again for the backward pass.
    """

    tf32: bool = False
    keeps_quantized: bool = False
    one_layout: bool = False
    primary_weights: bool = False
    first_layers_bf16: int = _limited(0, 0, 10_000)
    last_layers_bf16: int = _limited(0, 0, 10_000)
    narrow_attention: bool = False
    narrow_head: bool = False
    narrow_activation: bool = False
    cudnn_norms: bool = False
    narrow_gathers: bool = False
    saves_original: bool = False
    quantizes_in_gemm: bool = False
    fused_quantization: bool = False
    engine_formats: tuple[Precision, ...] = ()
    requantizes: bool = False


@dataclass(frozen=True)
class StepOptions(
    FormatOptions,
    StageOptions,
    KernelOptions,
    LossOptions,
    RecomputeOptions,
    ExpertOptions,
    ContextOptions,
    OptimizerOptions,
    StateOptions,
    GradientOptions,
    GatherOptions,
    TensorOptions,
):
    """Options of one training step beyond the collectives and GEMMs that all layouts share, by subject.

    Their names are flat, as `--set step.KEY` and documents have them; fields come from the last base to the first.
    overlaps: those it has; a workload may switch some of them off.
    """

    overlaps: tuple[Overlap, ...] = OVERLAPS

    def __post_init__(self) -> None:
        """Refuse values out of the limits of their options."""
        for name, limits in _LIMITS.items():
            if (value := getattr(self, name)) is not None and value != ():
                limits.check(name, value)
        if both := {*self.expert_shards} & {*self.expert_replicas}:
            raise UsageError(f"step.expert_shards and step.expert_replicas both name {min(both)}")

    @property
    def of_optimizer(self) -> OptimizerOptions:
        """Those of the optimizer alone."""
        return OptimizerOptions(**{one.name: getattr(self, one.name) for one in fields(OptimizerOptions)})

    def in_format(self, name: str) -> StepOptions:
        """The options in a number format: Transformer Engine saves inputs quantized, repeats blocks to their last
        operation, and under FSDP2 quantizes weights that were gathered in BF16 in both passes.

        Source: NVIDIA/TransformerEngine@d0067d0d, transformer_engine/pytorch/module/linear.py, pytorch/distributed.py.
        """
        if name not in self.engine_formats:
            return self
        own = replace(self, saves_original=False, fused_quantization=False, primary_weights=False)
        return replace(own, requantizes=True, recompute_whole_block=True, quantizes_in_gemm=True)

    def repeated(self, recompute: Recompute) -> tuple[str, ...]:
        """Layers and modules that the backward pass repeats: none where it repeats whole blocks or nothing."""
        return self.selective if recompute == "selective" else modules_of(recompute)

    def staged(self, chunks: int) -> StepOptions:
        """The step of pipeline stages of so many chunks; passes run beside each other only where they are several."""
        reduction = self.staged_reduction or self.reduction
        return replace(self, reduction=reduction, expert_overlap=self.expert_overlap and chunks > 1)


_LIMITS: Mapping[str, Limits] = {
    one.name: one.metadata["limits"] for one in fields(StepOptions) if "limits" in one.metadata
}
