"""Words and limits that documents, options and frameworks share: number formats, overlaps, scopes of CUDA graphs.

Imports nothing, so that every other module can import it.
"""

from __future__ import annotations

from typing import Literal, get_args

VERSION = "0.1.0"
"""Of this package, which every file that it writes names."""

Precision = Literal[
    "bf16",
    "fp16",
    "fp32",
    "fp64",
    "fp8-delayed",
    "fp8-current",
    "fp8-rowwise",
    "fp8-blockwise",
    "mxfp8",
    "nvfp4",
    "mxfp4",
]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
GemmFormat = Literal[Precision, "tf32"]
"""What tensor cores multiply: a number format, or FP32 rounded to TF32."""
AUTO: Literal["auto"] = "auto"
"""In place of a number format: BF16 and every one that framework and accelerator have."""
Overlap = Literal["gather_prefetch", "input_gradient", "weight_gradient", "data_parallel", "output"]
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)
"""gather_prefetch: weight gathers over z, one ahead; input_gradient: dI all-reduce behind the weight gradient;
weight_gradient: dW reduce-scatter behind the next layer; data_parallel: buckets behind the backward pass; output:
forward all-reduce of one half behind the other half's work (only with a split micro-batch)."""
Packing = Literal["packed", "padding-free", "padded"]
PACKINGS: tuple[Packing, ...] = get_args(Packing)
"""How a batch holds sequences that differ in length."""
CudaGraphs = Literal["full", "attn", "mlp", "mamba", "moe_router", "moe_preprocess", "full_iteration"]
CUDA_GRAPHS: tuple[CudaGraphs, ...] = get_args(CudaGraphs)
"""Scopes of CUDA graphs: whole layers; attention, MLP or Mamba-2 with its norm; the norm before experts, router and
shared experts; what a dispatcher prepares; forward and backward pass of a step."""
DISPATCHERS = ("alltoall", "deepep", "hybridep", "allgather", "deepep-uccl", "deepep-nvshmem")
"""Dispatchers of tokens to experts; `frameworks/dispatchers.csv` says what each sends."""
OPTIMIZERS = ("adamw", "adamw-8bit", "sgd", "lion", "adafactor", "muon")
"""Optimizers; `frameworks/optimizers.csv` says what each keeps and moves."""
Moments = Literal["fp32", "fp16", "bf16", "fp8"]
MOMENT_BYTES: dict[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Types of Adam's moments that a precision-aware optimizer has."""
PipelineOrder = Literal["1f1b", "zb1p", "zbv", "dualpipe-v", "v-half", "v-min"]
PIPELINE_ORDERS: tuple[PipelineOrder, ...] = get_args(PipelineOrder)
"""Orders of passes of pipeline stages (`program.schedules`): 1F1B, plain or interleaved, and those that split the
backward pass."""
FOLDED: tuple[PipelineOrder, ...] = ("zbv", "dualpipe-v", "v-half", "v-min")
"""Those of two chunks a stage, of which the second runs back over the stages."""
Tune = Literal["full", "lora", "qlora", "dora", "head"]
TUNES: tuple[Tune, ...] = get_args(Tune)
"""What of a model trains: all of it; adapters of low rank, of a base in 4 bits, or with magnitudes; the LM head."""
AdapterType = Literal["bf16", "fp32"]
ADAPTER_TYPES: tuple[AdapterType, ...] = get_args(AdapterType)

COMPUTE_LANE = "compute"
"""The track of computation in a trace."""
EMBEDDING_FORWARD, HEAD, EMBEDDING_BACKWARD = "embedding, forward", "head and loss", "embedding, backward"
END, WEIGHTS = "gradients and optimizer", "weight gradients"
"""Parts of a step on that track, in order but for blocks: forward, loss, backward, end."""

DEFAULT_MACHINE = "perlmutter"
"""The default machine of a search."""
LARGEST_SIZE = 2**31 - 1
"""Largest size of models, batches and grids that documents and options may state."""
MOST_TIMES = 1e4
"""Largest token imbalance and capacity factor."""
