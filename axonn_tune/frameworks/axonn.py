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

from collections.abc import Iterator
from string import Template

from axonn_tune.frameworks.command import (
    LITTLE_TO_REPEAT,
    NO_MOCK_DATA,
    NO_QKV_BIASES,
    OWN_SCRIPT,
    TRIAL,
    flags,
    of_checkout,
    of_package,
    own_recompute,
    sections_of,
    sizes_words,
)
from axonn_tune.frameworks.description import (
    AS_MANY_A_CHUNK,
    Because,
    Command,
    FlopCount,
    Framework,
    PipelineSchedule,
    Refusal,
    Run,
    Value,
)
from axonn_tune.frameworks.megatron_lm import MODEL, values_of
from axonn_tune.frameworks.step import StepOptions
from axonn_tune.recompute import RECOMPUTES
from axonn_tune.specs.machine import EnvironmentVariable

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
    loss_chunks=1,
    loss="copied",
    loss_reductions=(),
    head_gathered_again=True,
    replicated_tables=("embedding", "position"),
    overlaps=("gather_prefetch",),
)

_ROTARY_BASE = 10_000
"""Source: axonn-ai/Megatron-AxoNN, megatron/model/rotary_pos_embedding.py as of Megatron-LM."""

_ALL_TO_ALLS = "the easy API brackets each layer with all-to-alls where x·y > 1: not modelled"

_ENVIRONMENT = (
    EnvironmentVariable(
        name="CUDA_DEVICE_MAX_CONNECTIONS", value="1", why="kernels start in the order of their launch"
    ),
)


def launch_easy(run: Run) -> Command:
    """The user's own script, with `axonn.init` and a training step in a Python file.

    UsageError for layers not resharded, which the easy API does not have, and for other number formats than BF16.
    """
    run.check(settable=("gather_prefetch",), precisions=("bf16",))
    if run.kept_layers and run.size("z") > 1:
        raise run.cannot("layers that are not resharded after forward", "ask for --kept-layers 0")
    gathers = "gather_prefetch" in run.workload.overlaps
    layout = Template(_LAYOUT).substitute(run.fields, model=run.model.name, world=run.grid.world, gathers=gathers)
    return Command(
        release="AxoNN (axonn-ai/axonn@660a2246, easy API)",
        program=("train.py",),
        environment=_ENVIRONMENT,
        files={"_layout.py": layout},
        checks=(OWN_SCRIPT, of_package("axonn", "axonn-ai/axonn at 660a2246")),
        needs=(
            f"train.py is your own: it builds {sizes_words(run.model)}, whose forward returns the "
            f"loss of {run.workload.sequence_length} tokens, with the functions of the Python file beside the script.",
            own_recompute(run),
        ),
    )


_LAYOUT = '''"""AxoNN of $model on $world GPUs."""

import torch
from axonn import axonn as ax
from axonn.intra_layer import auto_parallelize, clip_grad_norm_, optimize_communication, sync_gradients

GLOBAL_BATCH, MICRO_BATCH, ACCUMULATION = $batch, $micro_batch, $accumulation


def init():
    """Process groups; the product of the degrees is the number of ranks."""
    torch.distributed.init_process_group("nccl")
    ax.init(G_inter=1, G_data=$data, G_intra_r=$x, G_intra_c=$y, G_intra_d=$z)


def build(make):
    """The model that `make` builds, its linear layers sharded, with FP32 weights."""
    with auto_parallelize():
        return make().to("cuda")


def batches(dataset):
    """Micro-batches of this rank."""
    return ax.create_dataloader(dataset, global_batch_size=GLOBAL_BATCH, micro_batch_size=MICRO_BATCH)


def step(model, optimizer, micro_batches):
    """One training step on ACCUMULATION tuples of arguments of the model; its loss in this rank's last micro-batch."""
    for _, arguments in zip(range(ACCUMULATION), micro_batches):
        # The backward pass is outside: it gathers and reduce-scatters on its own.
        with torch.autocast("cuda", torch.bfloat16), optimize_communication(True, True, $gathers, model):
            loss = model(*arguments)
        (loss / ACCUMULATION).backward()
    sync_gradients(model, mean=True)
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()
'''
"""Degrees, batch sizes and the step that was priced. Source: axonn-ai/nanoGPT-AxoNN@46cd608a, train_pm.py."""


def launch_megatron(run: Run) -> Command:
    """Megatron-AxoNN's `pretrain_gpt.py`; UsageError for stages of several sizes, and for what its flags do not say.

    Flags by their source: axonn-ai/Megatron-AxoNN, megatron/arguments.py; its examples/run_axonn.sh.
    """
    overlaps = ("gather_prefetch", "input_gradient", "weight_gradient")
    run.check(settable=overlaps, precisions=("bf16", "fp16"))
    values = _values(run)
    return Command(
        release="Megatron-AxoNN (axonn-ai/Megatron-AxoNN@6d60f45c)",
        program=("pretrain_gpt.py",),
        sections=sections_of({title: flags(names, values, run.framework.name) for title, names in _WRITTEN.items()}),
        environment=_ENVIRONMENT,
        # megatron/arguments.py: asynchronous reductions raise without it, and are the default.
        asserted=("CUDA_DEVICE_MAX_CONNECTIONS",),
        checks=(
            of_checkout("pretrain_gpt.py", "axonn-ai/Megatron-AxoNN at 6d60f45c"),
            of_package("axonn", "axonn-ai/axonn at 879ae578"),
        ),
        needs=(
            "Start it in a checkout of axonn-ai/Megatron-AxoNN at 6d60f45c, with axonn-ai/axonn at 879ae578 installed: "
            "no release on PyPI has what it imports.",
            NO_MOCK_DATA,
        ),
        notes=tuple(_notes(run)),
    )


_CACHED = "num_layers_for_caching_weights_in_depth_tensor_parallel_all_gather"
_WRITTEN = {
    "model": f"""
        {MODEL} group_query_attention num_query_groups norm_epsilon use_flash_attn use_amd
        no_gradient_accumulation_fusion
    """,
    "batch": "micro_batch_size global_batch_size",
    "parallelism": """
        row_tensor_model_parallel_size column_tensor_model_parallel_size depth_tensor_model_parallel_size
        pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage
    """,
    "overlap": f"overlap_axonn_comm overlap_axonn_reduce_scatter overlap_axonn_all_gather {_CACHED}",
    "recompute": "recompute_granularity recompute_method recompute_num_layers",
    "precision": "bf16 fp16 accumulate_allreduce_grads_in_fp32",
    "trial": " ".join(TRIAL),
}
"""Arguments by section."""


def _values(run: Run) -> dict[str, Value]:
    """Values of arguments; micro-batches are of a tensor group, which splits them over z."""
    depth, grouped = run.size("z"), run.model.kv_heads != run.model.heads
    amd = run.machine.accelerator.is_amd
    if not run.even:
        whole = f"{run.model.layers} layers in {len(run.parts)} parts of the same size"
        raise run.cannot(f"uneven stages: it wants {whole}", "ask for --pipeline and --chunks that divide them")
    if run.chunks > 1 and run.size("pipeline") == 2:
        raise run.cannot("two interleaved stages", "ask for --chunks 1 or more stages")
    scatter, gather = run.overlaps("weight_gradient"), run.overlaps("gather_prefetch")
    if not run.overlaps("input_gradient") and (scatter or gather) and run.size("x") * run.size("y") > 1:
        raise run.cannot("--no-overlap input_gradient with others on", "switch off all with --no-overlap all")
    split = f"{run.micro_batch} for each of {depth} shards" if depth > 1 else ""
    halves = Because(True, "as in BF16, where that is the default")
    return {
        **values_of(run, norm="RMSNorm"),
        "group_query_attention": grouped,
        "num_query_groups": run.model.kv_heads if grouped else None,
        "use_flash_attn": run.step.fused_attention,
        "use_amd": amd,
        "no_gradient_accumulation_fusion": amd,
        "micro_batch": Because(run.micro_batch * depth, split),
        "layers_per_chunk": Because(run.parts[0], f"{run.chunks} chunks a stage") if run.chunks > 1 else None,
        # The first switch is that of all.
        "overlap_axonn_comm": scatter or gather or run.overlaps("input_gradient"),
        "overlap_axonn_reduce_scatter": scatter,
        "overlap_axonn_all_gather": gather,
        _CACHED: _cached(run) or None,
        "accumulate_allreduce_grads_in_fp32": halves if run.workload.precision == "fp16" else None,
    }


def _cached(run: Run) -> int:
    """Layers that are gathered once, counted from the first of the whole model."""
    stages = run.size("pipeline")
    if run.size("z") == 1 or not run.kept_layers:
        return 0
    if run.kept_layers >= run.model.layers // stages:
        return run.model.layers
    if stages > 1:
        what = f"{run.kept_layers} layers of each stage that are not resharded after forward"
        raise run.cannot(what, f"ask for --kept-layers 0 or {run.model.layers // stages}")
    return run.kept_layers


def _notes(run: Run) -> Iterator[str]:
    if run.model.qkv_biases:
        yield NO_QKV_BIASES
    if run.model.rotary_base not in (None, _ROTARY_BASE):
        yield f"Its rotary base is {_ROTARY_BASE:,}, without an argument; the model's is {run.model.rotary_base:,.0f}."
    if 0 < _cached(run) < run.model.layers:
        yield "It is the first layers whose weights stay gathered; the prediction has the last ones."
    if run.recompute == "selective" and run.step.fused_attention:
        yield LITTLE_TO_REPEAT


AXONN = Framework(
    name="axonn",
    title="AxoNN (easy API)",
    axes=("y", "x", "z", "data"),
    source="axonn-ai/axonn@660a2246, axonn/intra_layer; axonn-ai/nanoGPT-AxoNN@46cd608a, train_pm.py",
    measured_on="arXiv 2502.08145: up to 32,768 GPUs",
    step=_EASY,
    software="eager",
    refused=(Refusal(("x",), _ALL_TO_ALLS), Refusal(("y",), _ALL_TO_ALLS)),
    keeps_layers=False,
    recompute_some="full",
    names={"x": "G_intra_r", "y": "G_intra_c", "z": "G_intra_d", "pipeline": "G_inter", "data": "G_data"},
    launch=launch_easy,
)

MEGATRON_AXONN = Framework(
    name="megatron-axonn",
    title="Megatron-AxoNN",
    axes=("y", "x", "z", "pipeline", "data"),
    source="axonn-ai/Megatron-AxoNN@6d60f45c",
    measured_on="arXiv 2305.13525: up to 1,024 A100",
    step=StepOptions(
        gather_after_recompute=True,
        prefetch_backward=False,
        replicated_tables=("embedding", "position", "head"),
        reduction="whole",
        gradient_bytes=4,
        master_shards=False,
        recompute_whole_block=True,
        selective=("attention.scores",),
        loss_chunks=1,
        loss="copied",
        loss_reductions=(1.0, 1.0, 1.0),
        fused_accumulation=True,
        vocabulary_multiple=128,
        overlaps=("gather_prefetch", "input_gradient", "weight_gradient"),
    ),
    schedule=PipelineSchedule(overlapped_interleaved=False, equal_chunks=AS_MANY_A_CHUNK, scattered=False),
    software="core",
    recompute_some="full",
    names={"x": "row", "y": "column", "z": "depth", "pipeline": "PP", "chunks": "VPP", "data": "DP"},
    logged=FlopCount(
        log="Megatron-AxoNN",
        label="theoretical FLOP/s",
        counts="12·H² a block whatever the model, with recompute whether it is on or not",
        source="axonn-ai/Megatron-AxoNN@064236e4:megatron/training.py, get_flops; arXiv 2104.04473, equation 3",
        weights="square",
        padded=True,
        repeated=dict.fromkeys(RECOMPUTES, ("blocks", "scores")),
    ),
    launch=launch_megatron,
)

FRAMEWORKS = (AXONN, MEGATRON_AXONN)
