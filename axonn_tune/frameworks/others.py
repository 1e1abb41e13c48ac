"""Software of a few published rows: XLA (MaxText, Paxml), Meta's Llama 3 training, MegaScale."""

from __future__ import annotations

from dataclasses import replace

from axonn_tune.frameworks.description import ADAMW_ALONE, AS_MANY_A_CHUNK, Framework, PipelineSchedule
from axonn_tune.frameworks.fsdp import STEP
from axonn_tune.frameworks.megatron_core import MEGATRON_CORE, NAMES
from axonn_tune.frameworks.torchtitan import TORCHTITAN

XLA = Framework(
    name="xla",
    title="MaxText, Paxml",
    axes=("x", "z", "data", "pipeline"),
    source="google/maxtext, google/paxml: parameters sharded as by FSDP, kernels fused by XLA",
    measured_on="steps of NVIDIA's DGX Cloud recipes on 16 and 128 H100",
    step=STEP,
    schedule=PipelineSchedule(equal_chunks="MaxText repeats stages of as many layers each"),
    attention_since="",
    software="core",
    hopper_attention=True,
)

META_4D = replace(
    MEGATRON_CORE.with_step(shard_gradients=True, context_exchange="all_gather"),
    name="meta-4d",
    optimizers=ADAMW_ALONE,
    tuner="",
    packings=(),
    formats=(),
    format_options=(),
    title="Meta (Llama 3)",
    axes=("x", "context", "data", "pipeline"),
    expert_axes=("expert", "expert_tensor"),
    source="arXiv 2407.21783, section 3.3: weights not resharded after forward, context ranks share gradients' shards",
    measured_on="arXiv 2407.21783, table 4: 8,192 and 16,384 H100",
    keeps_layers=True,
    offload=None,
    logged=None,
    launch=None,
)

MEGASCALE = Framework(
    name="megascale",
    title="MegaScale",
    axes=("x", "data", "pipeline"),
    source="arXiv 2402.15627",
    measured_on="arXiv 2402.15627, table 2: 256 to 12,288 A100",
    step=MEGATRON_CORE.step,
    schedule=replace(MEGATRON_CORE.schedule, equal_chunks=AS_MANY_A_CHUNK),
    software="core",
    names=NAMES,
)

UNKNOWN = Framework(
    name="unknown",
    title="unknown software",
    axes=("x", "context", "z", "data", "pipeline"),
    source="what most frameworks have in common",
    measured_on="the steps of all frameworks, whose mean its numbers are",
    step=MEGATRON_CORE.with_step(overlaps=("data_parallel", "gather_prefetch", "weight_gradient")).step,
    schedule=MEGATRON_CORE.schedule,
    software="unknown",
    names=NAMES,
)

AUTOMODEL = replace(
    TORCHTITAN.with_step(
        dispatcher="deepep",
        expert_kernels="looped",
        fused_norms=True,
        recompute_whole_block=False,
        master_bytes=2,
        exp_avg_bytes=2,
        exp_avg_sq_bytes=2,
    ),
    name="automodel",
    title="NeMo Automodel",
    source="NVIDIA-NeMo/Automodel@36044ad3, docs/performance-summary.mdx: FSDP2 and expert parallelism in it, "
    "kernels of Transformer Engine, DeepEP; components/moe/parallelizer.py, apply_ac: torch's checkpoint, which stops "
    "at the last saved tensor; _transformers/auto_model.py: parameters in BF16, so Adam's moments, too",
    software="core",
    hopper_attention=True,
    logged=MEGATRON_CORE.logged,
    launch=None,
)
"""Of published rows alone: priced, not searched for."""

FRAMEWORKS = (XLA, META_4D, MEGASCALE, UNKNOWN)
