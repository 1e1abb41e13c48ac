"""torchtitan: FSDP2 or HSDP with tensor, context and pipeline parallelism; compiled unless it is said to be eager.

Each accumulation step gathers, reduce-scatters and, over data, all-reduces in FP32 again. Context ranks hold shards of
the weights, too. Selective recompute keeps outputs of attention and of every second GEMM: it repeats those of keys
(small, not counted), of attention's output and of the MLP's half without gate, norms and activation. Eager, an RMSNorm
is a handful of FP32 kernels. Source: torchtitan 0.3.0 (PyPI), distributed/ and trainer.py.
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
        recompute_whole_block=True,
        selective=("attention.norm", "attention.output", "mlp.norm", "mlp.up", "mlp.activation"),
    ),
    schedule=PipelineSchedule(overlapped=True, scattered=False),
    software="compiled",
)

TORCHTITAN_EAGER = replace(
    TORCHTITAN.with_step(fused_norms=False), name="torchtitan-eager", title="torchtitan (eager)", software="eager"
)

FRAMEWORKS = (TORCHTITAN, TORCHTITAN_EAGER)
