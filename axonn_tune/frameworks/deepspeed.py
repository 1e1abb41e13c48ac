"""DeepSpeed ZeRO: stage 1 over data, stage 3 as sharded weights, with Megatron-style tensor parallelism.

ZeRO-3 gathers parameter by parameter, ahead by elements in the recorded order, and reduce-scatters gradients in every
micro-batch. Source: deepspeed 0.19.8 (PyPI), runtime/zero. Stage 3 has no replicas: z is all ranks that share data.
"""

from __future__ import annotations

from axonn_tune.frameworks.description import Framework, PipelineSchedule, Refusal, StepOptions
from axonn_tune.frameworks.megatron_2021 import MEGATRON_2021

_STEP = StepOptions(
    reshard="always",
    whole_rows=False,
    gather_after_recompute=True,
    master_shards=False,
    gradient_bytes=2,
    distributed_optimizer=True,
    recompute_whole_block=True,
    selective=("attention.scores",),
    chunked_loss=False,
    loss_reductions=(1.0, 1.0, 1.0),
    vocabulary_multiple=128,
    overlaps=("gather_prefetch", "weight_gradient", "data_parallel"),
)

DEEPSPEED = Framework(
    name="deepspeed",
    title="DeepSpeed ZeRO",
    axes=("x", "z", "data", "pipeline"),
    source="deepspeed 0.19.8, runtime/zero",
    step=_STEP,
    schedule=PipelineSchedule(interleaved=False, uneven=True),
    software="unknown",
    refused=(
        Refusal(("z", "data"), "ZeRO-3 shards over all data-parallel ranks: stage 3 has no replicas"),
        Refusal(("z", "pipeline"), "DeepSpeed's pipeline module excludes ZeRO-3"),
    ),
)

DEEPSPEED_2021 = Framework(
    name="deepspeed-2021",
    title="Megatron-LM with ZeRO-3 (2021)",
    axes=("x", "z"),
    source="arXiv 2104.04473, section 5.2: DeepSpeed 0.3 with ZeRO-3, whose overlap_comm is off unless asked for",
    step=MEGATRON_2021.with_step(overlaps=()).step,
    schedule=MEGATRON_2021.schedule,
    software="megatron-2021",
)

FRAMEWORKS = (DEEPSPEED, DEEPSPEED_2021)
