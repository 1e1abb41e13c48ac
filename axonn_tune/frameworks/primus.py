"""AMD's Primus: Megatron-Core with patches, among them schedules of stages that split the backward pass.

`patch_primus_pipeline` with `pp_algorithm`. Its messages go beside computation. Source: AMD-AGI/Primus@fd1eeabb,
primus/configs/modules/megatron/primus_pipeline.yaml and primus/core/pipeline_parallel.
"""

from __future__ import annotations

from dataclasses import replace

from axonn_tune.frameworks.megatron_core import MEGATRON_CORE

PRIMUS = replace(
    MEGATRON_CORE,
    name="primus",
    title="Primus",
    source="AMD-AGI/Primus@fd1eeabb, primus/core/pipeline_parallel",
    measured_on="AMD-AGI/Primus@fd1eeabb, docs_deprecated/tech_blogs/primus_pipeline: 8 GPUs, MI300X",
    schedule=replace(MEGATRON_CORE.schedule, overlapped=True, orders=("1f1b", "zb1p", "zbv", "v-half", "v-min")),
    tuner="",
    launch=None,
)

FRAMEWORKS = (PRIMUS,)
