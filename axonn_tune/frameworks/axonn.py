"""Upstream AxoNN as its code behaves: the easy API, and Megatron-AxoNN, the paper's software.

Easy API (axonn-ai/axonn@660a2246 with axonn-ai/nanoGPT-AxoNN@46cd608a): parameters and gathers in FP32, one gather a
weight, assembled by a concatenation; forward gathers one layer ahead, those of recompute and of the backward pass,
which gathers again, and reduce-scatters (BF16) blocking; over data one blocking FP32 all-reduce a parameter at the end.
Only linear layers, the LM head among them, are sharded: gradients of tables are summed over all ranks.
With x·y > 1 it brackets each layer with all-to-alls, which are not modelled.

Megatron-AxoNN (axonn-ai/Megatron-AxoNN@6d60f45c): BF16 parameters; forward and recompute gathers one ahead, the
backward pass gathers again, blocking; one FP32 all-reduce of one buffer over data after the backward pass. Embedding
and LM head are split over x·y as Megatron-LM's are, and replicated over z.
"""

from __future__ import annotations

from axonn_tune.frameworks.description import Framework, PipelineSchedule, Refusal, StepOptions

_EASY = StepOptions(
    gather_bytes=4,
    gather_copies=1,
    gather_after_recompute=True,
    prefetch_recompute=False,
    prefetch_backward=False,
    reshard="always",
    reduction="parameter",
    gradient_bytes=4,
    recompute_whole_block=True,
    selective=("attention.core",),
    chunked_loss=False,
    loss_reductions=(),
    head_gathered_again=True,
    replicated_tables=("embedding", "position"),
    overlaps=("gather_prefetch",),
)

_ALL_TO_ALLS = "the easy API brackets each layer with all-to-alls where x·y > 1: not modelled"

AXONN = Framework(
    name="axonn",
    title="AxoNN (easy API)",
    axes=("y", "x", "z", "data"),
    source="axonn-ai/axonn@660a2246, axonn/intra_layer; axonn-ai/nanoGPT-AxoNN@46cd608a, train_pm.py",
    step=_EASY,
    software="eager",
    refused=(Refusal(("x",), _ALL_TO_ALLS), Refusal(("y",), _ALL_TO_ALLS)),
)

MEGATRON_AXONN = Framework(
    name="megatron-axonn",
    title="Megatron-AxoNN",
    axes=("y", "x", "z", "pipeline", "data"),
    source="axonn-ai/Megatron-AxoNN@6d60f45c",
    step=StepOptions(
        gather_after_recompute=True,
        prefetch_backward=False,
        replicated_tables=("embedding", "position", "head"),
        reduction="whole",
        gradient_bytes=4,
        master_shards=False,
        recompute_whole_block=True,
        selective=("attention.scores",),
        chunked_loss=False,
        loss_reductions=(1.0, 1.0, 1.0),
        fused_accumulation=True,
        vocabulary_multiple=128,
        overlaps=("gather_prefetch", "input_gradient", "weight_gradient"),
    ),
    schedule=PipelineSchedule(overlapped_interleaved=False, scattered=False),
    software="core",
)

FRAMEWORKS = (AXONN, MEGATRON_AXONN)
