"""PyTorch's fully sharded data parallelism as llm-foundry and others run it: FSDP1 or FSDP2, one unit a block.

FP32 shards are rounded and gathered block by block, one ahead, again in the backward pass; gradients are
reduce-scattered block by block in every micro-batch. Sources: torch/distributed/fsdp/_fully_shard (torch 2.15) and
llm-foundry's defaults (mixed precision PURE: reductions in BF16; a fused cross-entropy in place; checkpoints that are
not reentrant, whose recompute stops once the last saved tensor is there: before fc2). A hybrid mesh (HSDP) all-reduces
shards over data in every micro-batch, as FSDP2 does unless told otherwise.
"""

from __future__ import annotations

from dataclasses import replace

from axonn_tune.frameworks.description import Framework, StepOptions

STEP = StepOptions(
    gather_unit="block",
    reshard="always",
    whole_rows=False,
    reduce_each_micro_batch=True,
    selective=("attention.core",),
    chunked_loss=False,
    loss_reductions=(),
    logit_bytes=4.0,
    overlaps=("gather_prefetch", "weight_gradient", "data_parallel"),
)

FSDP = Framework(
    name="fsdp",
    title="PyTorch FSDP",
    axes=("z", "data"),
    source="torch 2.15, torch/distributed/fsdp/_fully_shard; mosaicml/llm-foundry",
    step=replace(STEP, reduced_bytes=2),
    software="eager",
)

FRAMEWORKS = (FSDP,)
