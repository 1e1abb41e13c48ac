"""Accelerate's own launcher and Accelerator, and torch's fully_shard, on a model of tiny blocks: accelerate 1.15.0.

The world is torch's fake one, on CPUs, which Accelerate is told are GPUs. A command for torchrun comes with a Python
file whose `shard` does what Accelerate's config does otherwise. Transformer Engine is not there: Accelerate is told
that it is, and linear layers stay torch's.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import accelerate.accelerator
import accelerate.utils.dataclasses
import accelerate.utils.imports
import torch
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from torch import nn
from torch.distributed import get_process_group_ranks
from torch.distributed._composable.contract import _get_registry
from torch.distributed.fsdp import FSDPModule

from tools.frameworks.answering import Answer, Check, Groups, Request, fake_world, main

WIDTH = 8
BLOCKS = ("GPT2Block", "LlamaDecoderLayer")


class Block(nn.Module):
    """A block of a model, under a name that Accelerate is told."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Decoder(nn.Module):
    """Blocks between a table and a head."""

    def __init__(self, block: type[nn.Module], layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WIDTH)


def accept(request: Request, folder: Path) -> Answer:
    """What rank 0 makes of the command: the mesh and the units of its model."""
    with fake_world(request.world):
        return _sharded(request, folder)[0]


def groups(request: Request, _sizes: Answer, rank: int, folder: Path) -> Groups:
    """Groups over which a rank's shards are gathered and its replicas reduced."""
    with fake_world(request.world, rank=rank):
        _, mesh = _sharded(request, folder)
        return {
            "shard": get_process_group_ranks(mesh.shard_process_group),
            **({"replicate": get_process_group_ranks(mesh.replicate_process_group)} if _replicas(mesh) > 1 else {}),
        }


def _sharded(request: Request, folder: Path) -> tuple[Answer, Any]:
    """Sizes of the sharded model, and its mesh."""
    if request.starter[0] == "accelerate":
        model, said = _with_accelerate(request, folder)
    else:
        model, said = _with_module(request, folder), {}
    blocks: list[Any] = [next(one for one in layer.modules() if isinstance(one, Block)) for layer in model.layers]
    states = [block._get_fsdp_state()._fsdp_param_group for block in blocks]
    policy, mesh = states[0].mp_policy, states[0].mesh_info
    found = {
        "world": torch.distributed.get_world_size(),
        "shard": mesh.mesh.size(mesh.shard_mesh_dim),
        "replicate": _replicas(mesh),
        "units": sum(isinstance(block, FSDPModule) for block in blocks),
        "resharded": [state.post_forward_mesh_info is not None for state in states].count(True),
        "first_kept": next((n for n, state in enumerate(states) if state.post_forward_mesh_info is None), None),
        "recompute": _checkpointed(model),
        "gathered": str(policy.param_dtype).removeprefix("torch."),
        "reduced": str(policy.reduce_dtype).removeprefix("torch."),
        "stored": str(states[0].fsdp_params[0].sharded_param.dtype).removeprefix("torch."),
    }
    return found | said, mesh


def _replicas(mesh: Any) -> int:
    return int(mesh.mesh.size(mesh.replicate_mesh_dim)) if hasattr(mesh, "replicate_process_group") else 1


def _checkpointed(model: nn.Module) -> int:
    """Blocks that recompute: wrapped by Accelerate, or with torch's composable checkpoint."""
    wrapped = sum(type(one).__name__.endswith("CheckpointWrapper") for one in model.modules())
    hooked = sum("checkpoint" in (_get_registry(one) or ()) for one in model.modules())
    return wrapped + hooked


def _with_accelerate(request: Request, folder: Path) -> tuple[Any, Answer]:
    """The model as `accelerate launch` and `Accelerator().prepare` leave it."""
    for module in (accelerate.accelerator, accelerate.utils.dataclasses, accelerate.utils.imports):
        module.is_transformer_engine_available = lambda: True
    accelerate.accelerator.convert_model = lambda _model: None
    words = [request.resolved(word, folder) for word in (*request.starter[1:], *request.program, *request.arguments)]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(["--machine_rank", "0", *words]))
    os.environ |= prepare_multi_gpu_env(args) | {"ACCELERATE_TORCH_DEVICE": "cpu"}
    if args.num_processes != request.world:
        raise ValueError(f"{args.num_processes} processes for a world of {request.world}")
    PartialState._prepare_backend = lambda *_args, **_options: ("gloo", DistributedType.MULTI_GPU)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator()
    model = Decoder(type(args.fsdp_transformer_layer_cls_to_wrap, (Block,), {}), request.layers)
    prepared, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    engine = accelerator.te_recipe_handler
    return prepared, {
        "machines": args.num_machines,
        "block": args.fsdp_transformer_layer_cls_to_wrap,
        "engine": engine and ("mxfp8" if engine.use_mxfp8_block_scaling else engine.fp8_format),
    }


def _with_module(request: Request, folder: Path) -> nn.Module:
    """The model as `shard` of the Python file beside the command leaves it."""
    (suffix,) = request.files
    spec = importlib.util.spec_from_file_location("mesh", folder / f"config{suffix}")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = Decoder(Block, request.layers)
    module.shard(model, model.layers, device="cpu")
    return model


if __name__ == "__main__":
    main(Check("accelerate", accept, groups))
