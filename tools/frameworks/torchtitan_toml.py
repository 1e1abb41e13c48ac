"""The same as `torchtitan.py` for the last release that reads TOML: torchtitan 0.2.2."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.pipelining import PipelineStage
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims, pipeline_parallel
from torchtitan.protocols.train_spec import get_train_spec

from tools.frameworks.answering import Answer, Check, Groups, Request, fake_world, main

AXES = ("tp", "cp", "dp_shard", "dp_replicate", "pp")


class SplitError(Exception):
    """Raised with the modules of each model part, once they are known."""


def accept(request: Request, folder: Path) -> Answer:
    """Sizes as torchtitan reads them."""
    logging.disable(logging.CRITICAL)
    config = ConfigManager().parse_args(request.words(folder))
    parallelism, training = config.parallelism, config.training
    dims = ParallelDims(
        dp_shard=parallelism.data_parallel_shard_degree,
        dp_replicate=parallelism.data_parallel_replicate_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        pp=parallelism.pipeline_parallel_degree,
        ep=1,
        etp=1,
        world_size=request.world,
    )
    with fake_world(request.world):
        parts = _parts(config, dims)
    shares = dims.dp_replicate * dims.dp_shard
    micro = parallelism.pipeline_parallel_microbatch_size if dims.pp > 1 else training.local_batch_size
    return {
        "world": dims.world_size,
        **{axis: getattr(dims, axis) for axis in AXES},
        "schedule": parallelism.pipeline_parallel_schedule if dims.pp > 1 else None,
        "global_batch": training.global_batch_size,
        "micro_batch": micro,
        "accumulated": training.global_batch_size // (training.local_batch_size * shares),
        "micro_batches": training.global_batch_size // (shares * micro),
        "sequence": training.seq_len,
        "recompute": config.activation_checkpoint.mode,
        "reshard": parallelism.fsdp_reshard_after_forward,
        "compile": config.compile.enable,
        "dtype": training.mixed_precision_param,
        "reduced": training.mixed_precision_reduce,
        "blocks": _model(config).n_layers,
        "parameters": _parameters(config),
        "layers": parts,
    }


def _model(config: Any) -> Any:
    return get_train_spec(config.model.name).model_args[config.model.flavor]


def _parameters(config: Any) -> int:
    """Parameters, counted on a model that holds no numbers."""
    model = _model(config)
    model.update_from_config(config)
    with torch.device("meta"):
        return sum(one.numel() for one in get_train_spec(config.model.name).model_cls(model).parameters())


def _parts(config: Any, dims: ParallelDims) -> list[list[int]]:
    """Layers of each chunk of each stage, once its schedule could be built; both on a model of nothing."""
    model, nothing, device = _model(config), torch.nn.Identity(), torch.device("cpu")
    if dims.pp == 1:
        return [[model.n_layers]]
    try:
        with patch.object(pipeline_parallel, "pipeline_module_split", _split):
            pipeline_parallel.pipeline_llm(nothing, dims, config, device, model, _unused, _unused)
    except SplitError as found:
        layers = [sum(name.startswith("layers.") for name in part) for part in found.args[0]]
    chunks = len(layers) // dims.pp
    stages = [
        PipelineStage(nothing, chunk * dims.pp, len(layers), device, group=_group(dims)) for chunk in range(chunks)
    ]
    pipeline_parallel.build_pipeline_schedule(config, stages, _unused)
    return [layers[stage :: dims.pp] for stage in range(dims.pp)]


def _split(*given: Any) -> None:
    raise SplitError(given[-1])


def _unused(*_given: Any) -> None:
    raise AssertionError("nothing is computed here")


def _group(dims: ParallelDims) -> Any:
    return dims.get_mesh("pp").get_group()


def groups(request: Request, sizes: Answer, rank: int, _folder: Path) -> Groups:
    """Groups of a rank in torchtitan's mesh; `fsdp` is dp_shard and cp."""
    with fake_world(request.world, rank=rank):
        dims = ParallelDims(**{axis: sizes[axis] for axis in AXES}, ep=1, etp=1, world_size=request.world)
        dims.build_mesh()
        return {name: dims._meshes[name].mesh.flatten().tolist() for name in ("tp", "cp", "fsdp", "dp_replicate", "pp")}


if __name__ == "__main__":
    main(Check("torchtitan", accept, groups))
