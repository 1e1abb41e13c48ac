"""Megatron-Core: tensor, sequence, context and interleaved pipeline parallelism, distributed optimizer, and GTP.

GTP (generalized tensor parallelism) shards weights over an axis of its own, our z: one gather a weight and pass, a
reduce-scatter of its gradient each micro-batch, nothing kept between passes. Sources: NVIDIA/Megatron-LM@d98e8a64
(2026-08-22) and its GTP guide, docs/api-guide/core/generalized_tensor_parallel.md; defaults of its arguments but for
those every recipe sets: sequence parallelism, distributed optimizer, overlapped gradient reduction and parameter
gather.
"""

from __future__ import annotations

from axonn_tune.frameworks.description import Framework, PipelineSchedule, StepOptions

_STEP = StepOptions(
    sequence_parallel=True,
    repeated_kv_heads=True,
    shard_gradient_bytes=4,
    reshard="always",
    head_gathered_again=True,
    whole_rows=False,
    gather_after_recompute=True,
    master_shards=False,
    distributed_optimizer=True,
    parameter_overlap=True,
    recompute_whole_block=True,
    selective=("attention.scores",),
    chunked_loss=False,
    loss_reductions=(1.0, 1.0, 1.0),
    fused_accumulation=True,
    vocabulary_multiple=128,
    overlaps=("gather_prefetch", "input_gradient", "weight_gradient", "data_parallel"),
)

MEGATRON_CORE = Framework(
    name="megatron-core",
    title="Megatron-Core",
    axes=("x", "context", "z", "data", "pipeline"),
    source="NVIDIA/Megatron-LM@d98e8a64, megatron/core",
    step=_STEP,
    schedule=PipelineSchedule(scattered=False),
    software="core",
    hopper_attention=True,
)

NEMO = Framework(
    name="nemo",
    title="NeMo",
    axes=("x", "context", "data", "pipeline"),
    source="defaults of NeMo's recipes: gradients reduced in BF16, --tp-comm-overlap where a row says so",
    step=MEGATRON_CORE.with_step(gradient_bytes=2).step,
    schedule=MEGATRON_CORE.schedule,
    software="core",
    hopper_attention=True,
)

NEMO_2022 = Framework(
    name="nemo-2022",
    title="NeMo (2022)",
    axes=NEMO.axes,
    source="NeMo before it had FlashAttention and fused layers",
    step=NEMO.with_step(fused_attention=False).step,
    software="megatron-2021",
    hopper_attention=True,
)

FRAMEWORKS = (MEGATRON_CORE, NEMO, NEMO_2022)
