"""PyTorch's fully sharded data parallelism as llm-foundry and others run it: FSDP1 or FSDP2, one unit a block.

FP32 shards are rounded and gathered block by block, one ahead, again in the backward pass; gradients are
reduce-scattered block by block in every micro-batch. Sources: torch/distributed/fsdp/_fully_shard (torch 2.15) and
llm-foundry's defaults (mixed precision PURE: reductions in BF16; a fused cross-entropy in place; checkpoints that are
not reentrant, whose recompute stops once the last saved tensor is there: before fc2). A hybrid mesh (HSDP) all-reduces
shards over data in every micro-batch, as FSDP2 does unless told otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from string import Template
from typing import Any

from axonn_tune.frameworks.command import (
    EXPANDABLE_SEGMENTS,
    OWN_SCRIPT,
    adapter_arguments,
    of_package,
    peft_config,
    sizes_words,
    tuned_script,
)
from axonn_tune.frameworks.description import Argument, Command, FlopCount, Framework, Run, Section, on_host
from axonn_tune.frameworks.keys import step_keys
from axonn_tune.frameworks.step import StepOptions
from axonn_tune.specs.model import Model
from axonn_tune.vocabulary import OPTIMIZERS, PACKINGS, Precision

STEP = StepOptions(
    gather_unit="block",
    reshard="always",
    whole_rows=False,
    reduce_each_micro_batch=True,
    selective=("attention.core",),
    loss_chunks=1,
    loss_reductions=(),
    loss="fused",
    expert_shards=("z",),
    expert_replicas=("data",),
    overlaps=("gather_prefetch", "weight_gradient", "data_parallel"),
)

_EVERYTHING = ("moments", "master", "gradients", "weights")
ON_HOST = on_host(*_EVERYTHING)
"""Its one switch: parameters, their gradients and the optimizer (torch/distributed/fsdp, CPUOffload, CPUOffloadPolicy).
"""


def offloads(run: Run) -> bool:
    """Whether that switch is on; UsageError for another part of a step on the host."""
    if run.step.offloads and {*run.step.offloaded} != {*_EVERYTHING}:
        said = ", ".join(run.step.offloaded) or "layers"
        raise run.cannot(f"{said} on the host", f"ask for {ON_HOST.value}")
    return run.step.offloads


_BLOCKS = {"llama": "LlamaDecoderLayer", "gpt": "GPT2Block"}
"""Blocks of transformers' models, which Accelerate wraps, where the model does not say."""


def launch(run: Run) -> Command:
    """`accelerate launch` with its config, where that can say it; otherwise a `fully_shard` mesh under torchrun.

    UsageError for selective recompute, formats other than BF16 and those of torchao and Transformer Engine, which
    Accelerate alone can say, and another rank order.
    """
    # Whatever a block is, transformers' class of it is what is wrapped; its training has no multi-token prediction.
    parts = {*run.model.parts} - {"multi-token prediction"} if run.model.block_class else ()
    precisions = ("bf16", *run.framework.formats)
    run.check(settable=("primary_weights", "offloaded", "optimizer"), precisions=precisions, parts=parts)
    if run.recompute == "selective":
        raise run.cannot("selective recompute", "ask for --recompute full or none")
    mesh = _mesh(run)
    narrow, engine = run.workload.format is not None, run.workload.precision in _ENGINE
    if run.size("z") == 1 or run.kept_layers not in (0, run.model.layers) or run.recompute_layers is not None:
        if narrow:
            raise run.cannot("FP8 without Accelerate", "shard over all ranks, every layer alike")
        return replace(mesh, forms={"fully-shard": mesh})
    return Command(
        release="accelerate 1.15.0",
        program=("train.py",),
        accelerate=(Argument("--config_file", "{file:.yaml}"),),
        sections=mesh.sections,
        environment=mesh.environment,
        files={".yaml": "\n".join(_config(run)) + "\n", **peft_config(run)},
        checks=(OWN_SCRIPT, of_package("accelerate", "accelerate 1.15.0")),
        needs=(
            f"train.py is your own: it prepares {sizes_words(run.model)}, with blocks of class "
            f"{_blocks(run.model)} as transformers has them, and takes the sizes below."
            + " Another class goes into fsdp_transformer_layer_cls_to_wrap."
            * (run.model.block_class is None),
            "It calls backward() for each micro-batch outside accelerator.accumulate(), which would keep whole "
            "gradients and reduce them once a step.",
            *tuned_script(run),
            *(_NEEDS[: 3 if run.recompute == "full" else 2] if engine else ()),
        ),
        notes=(
            "Accelerate keeps the last norm and the LM head gathered; the prediction gathers them again.",
            *(("Its LM head computes in 8 bits, too; the prediction has it in BF16.",) if engine else ()),
        ),
        forms={} if narrow else {"fully-shard": mesh},
    )


def _blocks(model: Model) -> str:
    """The class of its blocks, or several with commas."""
    return model.block_class or _BLOCKS[model.family]


def _mesh(run: Run) -> Command:
    """One's own train.py under torchrun; mesh, number format and units are a Python file that also runs on CPUs.

    Sizes of a batch are told by the names of transformers' TrainingArguments where it has one.
    """
    other = run.is_changed("optimizer")
    again = run.recompute == "full" and run.workload.precision in _ENGINE
    sizes = {"replicate": run.size("data"), "shard": run.size("z")}
    mesh = {name: size for name, size in sizes.items() if name == "shard" or size > 1}
    module = Template(_MESH).substitute(
        what=f"{run.model.name} on {run.grid.world} GPUs",
        sizes=tuple(mesh.values()),
        names=tuple(mesh),
        kept=run.kept_layers,
        recomputed=min(run.recompute_layers or run.model.layers, run.model.layers) if run.recompute == "full" else 0,
        resharded=run.kept_layers < run.model.layers,
        policies="CPUOffloadPolicy, " * offloads(run),
        offload=", offload_policy=CPUOffloadPolicy()" * offloads(run),
    )
    batch = (
        Argument("--per_device_train_batch_size", run.micro_batch, "the micro-batch"),
        Argument("--gradient_accumulation_steps", run.accumulation),
        Argument("--seq_length", run.workload.sequence_length),
        *([Argument("--optim", step_keys("trainer")["optimizer"].write(run.step.optimizer))] if other else []),
        *([Argument("--gradient_checkpointing", "true", "by Transformer Engine")] if again else []),
    )
    return Command(
        release="PyTorch FSDP2 (torch 2.7 to 2.15)",
        program=("train.py",),
        sections=(Section("batch", batch), *adapter_arguments(run)),
        environment=(EXPANDABLE_SEGMENTS,),
        files={"_mesh.py": module, **peft_config(run)},
        checks=(OWN_SCRIPT,),
        needs=(
            f"train.py is your own: it builds {sizes_words(run.model)}, calls "
            "shard(model, blocks) of the Python file beside the script, and takes the sizes below.",
            "It calls backward() for each micro-batch, each of which reduces gradients.",
            *tuned_script(run),
        ),
    )


def _config(run: Run) -> Iterator[str]:
    """Lines of Accelerate's YAML. Source: accelerate 1.15.0, commands/config and utils/dataclasses.py."""
    world = run.grid.world
    yield "compute_environment: LOCAL_MACHINE"
    yield "distributed_type: FSDP"
    if run.workload.format is None:
        yield "mixed_precision: bf16  # gathers and reductions"
    else:
        yield "mixed_precision: fp8  # GEMMs of linear layers; reductions in BF16"
        yield "fp8_config:"
        gathers = f"  enable_fsdp_float8_all_gather: {json.dumps(run.step.primary_weights)}"
        yield from _ENGINE.get(run.workload.precision, ("  backend: AO", gathers, "  pad_inner_dim: true"))
    yield f"num_machines: {-(-world // min(run.machine.launcher.ranks_per_node, world))}"
    yield f"num_processes: {world}"
    yield "fsdp_config:"
    yield "  fsdp_version: 2"
    yield "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
    yield f"  fsdp_transformer_layer_cls_to_wrap: {_blocks(run.model)}"
    yield f"  fsdp_reshard_after_forward: {json.dumps(run.kept_layers == 0)}"
    if run.workload.precision not in _ENGINE:
        yield f"  fsdp_activation_checkpointing: {json.dumps(run.recompute == 'full')}"
    yield f"  fsdp_offload_params: {json.dumps(offloads(run))}"
    yield "  fsdp_cpu_ram_efficient_loading: false"
    yield "  fsdp_state_dict_type: SHARDED_STATE_DICT"
    if run.size("data") > 1:
        yield "parallelism_config:"
        yield f"  parallelism_config_dp_replicate_size: {run.size('data')}"
        yield f"  parallelism_config_dp_shard_size: {run.size('z')}"
        yield "  parallelism_config_tp_size: 1"
        yield "  parallelism_config_cp_size: 1"


_ENGINE: dict[Precision, tuple[str, ...]] = {
    "fp8-delayed": ("  backend: TE", "  fp8_format: HYBRID"),
    "mxfp8": ("  backend: TE", "  use_mxfp8_block_scaling: true"),
}
"""Formats of Transformer Engine, and Accelerate's config of them."""
_NEEDS = (
    "It needs Transformer Engine 2.16 or later, which keeps no quantized weights between passes of FSDP2.",
    "It calls accelerate.utils.apply_fp8_autowrap(model, accelerator.te_recipe_handler) after prepare(): Accelerate "
    "does so under FSDP1 alone, and linear layers would compute in BF16.",
    "Before prepare() it wraps each block in torch's checkpoint_wrapper with checkpoint_fn="
    "transformer_engine.pytorch.checkpoint: torch's own would recompute in BF16.",
)

_MESH = '''"""FSDP2 of $what."""

import torch
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ${policies}MixedPrecisionPolicy, fully_shard

SIZES, NAMES = $sizes, $names
KEPT_LAYERS = $kept
RECOMPUTED_LAYERS = $recomputed
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def shard(model, blocks, device="cuda"):
    """Shard a model with FP32 weights over all ranks, in place; blocks: its transformer blocks in their order.

    The last KEPT_LAYERS blocks are not resharded after forward; the first RECOMPUTED_LAYERS are repeated in backward.
    """
    mesh = init_device_mesh(device, SIZES, mesh_dim_names=NAMES)
    blocks = list(blocks)
    for number, block in enumerate(blocks):
        if number < RECOMPUTED_LAYERS:
            checkpoint(block)
        resharded = number < len(blocks) - KEPT_LAYERS
        fully_shard(block, mesh=mesh, mp_policy=POLICY, reshard_after_forward=resharded$offload)
    return fully_shard(model, mesh=mesh, mp_policy=POLICY, reshard_after_forward=$resharded$offload)
'''

WHOLE_MATRICES: Mapping[str, Any] = {"muon_tp_mode": "layer_sharded", "muon_batched": True, "muon_apart_gate": True}
"""Muon where FSDP shards matrices: ranks take whole ones in turn, and iterate on those of one shape at once. Sources:
microsoft/dion@0a059a45, README, megabatch_base.py; pytorch/torchtitan@b5bcd76c, distributed/flex_shard/dist_muon.py."""

FSDP = Framework(
    name="fsdp",
    title="PyTorch FSDP",
    axes=("z", "data"),
    source="torch 2.15, torch/distributed/fsdp/_fully_shard; mosaicml/llm-foundry",
    tuner="peft",
    measured_on="steps of mosaicml/llm-foundry on 8 to 512 A100 and H100",
    step=replace(
        STEP,
        reduced_bytes=2,
        saves_original=True,
        fused_quantization=True,
        engine_formats=(*_ENGINE,),
        **WHOLE_MATRICES,
    ),
    optimizers=dict.fromkeys(OPTIMIZERS, ()),
    attention_since="",
    software="eager",
    formats=("fp8-current", *_ENGINE),
    format_options=("primary_weights",),
    recompute_some="full",
    savers=(),
    offload=ON_HOST,
    packings=PACKINGS,
    names={"z": "shard", "data": "replicate"},
    logged=FlopCount(
        log="llm-foundry",
        label="throughput/device/flops_per_sec",
        counts="the same as MFU, and norms, biases and positions as if they were weights",
        source="llm-foundry 0.22.0 (PyPI), models/mpt/modeling_mpt.py, flops_per_batch",
        weights="parameters",
    ),
    launch=launch,
)

FRAMEWORKS = (FSDP,)
