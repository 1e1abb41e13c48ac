"""torchtitan: FSDP2 or HSDP with tensor, context and pipeline parallelism; compiled unless it is said to be eager.

Each accumulation step gathers, reduce-scatters and, over data, all-reduces in FP32 again. Context ranks hold shards of
the weights, too. Source: torchtitan 0.3.0 (PyPI), distributed/ and trainer.py.
"""

from __future__ import annotations

from dataclasses import replace

from axonn_tune.frameworks.description import Framework, PipelineSchedule
from axonn_tune.frameworks.fsdp import STEP

TORCHTITAN = Framework(
    name="torchtitan",
    title="torchtitan",
    axes=("x", "context", "z", "data", "pipeline"),
    source="torchtitan 0.3.0",
    step=replace(
        STEP,
        sequence_parallel=True,
        shard_gradient_bytes=4,
        context_shards=True,
        context_exchange="all_gather",
        context_overlap=False,
        loss_reductions=(1.0, 1.0, 1.0),
    ),
    schedule=PipelineSchedule(overlapped=True, scattered=False),
    software="compiled",
)

TORCHTITAN_EAGER = replace(TORCHTITAN, name="torchtitan-eager", title="torchtitan (eager)", software="eager")

FRAMEWORKS = (TORCHTITAN, TORCHTITAN_EAGER)
