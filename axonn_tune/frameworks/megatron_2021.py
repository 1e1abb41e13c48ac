"""Megatron-LM of 2020 and 2021, and the Megatron-DeepSpeed that was built on it.

No fused attention, no gradient accumulation inside GEMMs, nothing overlapped. Source: Narayanan et al., arXiv
2104.04473; Smith et al., arXiv 2201.11990.
"""

from __future__ import annotations

from axonn_tune.frameworks.description import Framework, PipelineSchedule, StepOptions
from axonn_tune.frameworks.megatron_core import NAMES

_STEP = StepOptions(
    reshard="always",
    whole_rows=False,
    gather_after_recompute=True,
    master_shards=False,
    reduction="whole",
    recompute_whole_block=True,
    selective=("attention.scores",),
    chunked_loss=False,
    loss_reductions=(1.0, 1.0, 1.0),
    fused_attention=False,
    dropout=True,
    vocabulary_multiple=128,
    overlaps=(),
)
_SCHEDULE = PipelineSchedule(overlapped_interleaved=False)

MEGATRON_2021 = Framework(
    name="megatron-2021",
    title="Megatron-LM (2021)",
    axes=("x", "data", "pipeline"),
    source="arXiv 2104.04473",
    step=_STEP,
    schedule=_SCHEDULE,
    software="megatron-2021",
    names=NAMES,
)

MEGATRON_DEEPSPEED = Framework(
    name="megatron-deepspeed",
    title="Megatron-DeepSpeed",
    axes=("x", "data", "pipeline"),
    source="microsoft/Megatron-DeepSpeed as vTrain ran it (arXiv 2312.12391): gradients reduced in FP16",
    step=MEGATRON_2021.with_step(gradient_bytes=2).step,
    schedule=PipelineSchedule(interleaved=False, overlapped_interleaved=False),
    software="megatron-deepspeed",
    names=NAMES,
)

FRAMEWORKS = (MEGATRON_2021, MEGATRON_DEEPSPEED)
