"""torchtitan's own configuration, meshes, pipeline split and schedules, without a GPU: torchtitan 0.3.0.

The trainer needs a GPU to be built. What it does with the global batch is repeated here: torchtitan/trainer.py, lines
408 to 430 of that release.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torchtitan.components.quantization import float8, mx
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import (
    _build_pipeline_schedule,
    _generate_llm_fqn_per_model_part,
    _get_pipeline_metadata,
    _get_pp_rank_to_stage_indices_mapping,
)

from tools.frameworks.answering import Answer, Check, Groups, Request, fake_world, main

AXES = ("tp", "cp", "dp_shard", "dp_replicate", "pp", "ep")


def accept(request: Request, folder: Path) -> Answer:
    """Sizes as torchtitan reads them."""
    logging.disable(logging.CRITICAL)
    for module in (float8, mx):
        module.has_cuda_capability = lambda *needed: (request.capability, 0) >= needed
    with _started_as(request.resolved(request.program[0], folder)):
        config = ConfigManager().parse_args(request.words(folder))
    dims = ParallelDims.from_config(config.parallelism, request.world)
    parts = _parts(config, dims)
    if dims.pp > 1:
        _schedule(config, dims, len(parts[0]))
    return _sizes(config, dims) | _batch(config, dims) | _step(config) | _model(config) | {"layers": parts}


@contextlib.contextmanager
def _started_as(program: str) -> Iterator[None]:
    """A program of one's own is the module `__main__`, where torchtitan finds its config function."""
    if not program.endswith(".py"):
        yield
        return
    spec = importlib.util.spec_from_file_location("own", program)
    assert spec is not None
    assert spec.loader is not None
    module, before = importlib.util.module_from_spec(spec), sys.modules["__main__"]
    spec.loader.exec_module(module)
    sys.modules["__main__"] = module
    try:
        yield
    finally:
        sys.modules["__main__"] = before


def _sizes(config: Any, dims: ParallelDims) -> Answer:
    parallelism = config.parallelism
    return {
        "world": dims.world_size,
        **{axis: getattr(dims, axis) for axis in AXES},
        "spmd_backend": dims.spmd_backend,
        "sequence_parallel": parallelism.enable_sequence_parallel,
        "schedule": parallelism.pipeline_parallel_schedule if dims.pp > 1 else None,
    }


def _batch(config: Any, dims: ParallelDims) -> Answer:
    """Samples of a rank and pass, and passes in a step: accumulated steps times micro-batches of the pipeline."""
    training, local = config.training, config.training.local_batch_size
    shares = dims.dp_replicate * dims.dp_shard
    batch = training.global_batch_size if training.global_batch_size >= 0 else local * shares
    if batch % (local * shares):
        raise ValueError(f"global batch {batch} is no multiple of local batch {local} times {shares}")
    micro = config.parallelism.pipeline_parallel_microbatch_size if dims.pp > 1 else local
    return {
        "global_batch": batch,
        "micro_batch": micro,
        "accumulated": batch // (local * shares),
        "micro_batches": batch // (shares * micro),
        "sequence": training.seq_len,
    }


def _step(config: Any) -> Answer:
    training, recompute = config.training, config.activation_checkpoint
    return {
        "recompute": None if recompute is None else type(recompute).__qualname__.removesuffix(".Config"),
        "reshard": config.parallelism.fsdp_reshard_after_forward,
        "compile": config.compile.enable,
        "dtype": training.mixed_precision_param,
        "reduced": training.mixed_precision_reduce,
        "cuda_graphs": not training.disable_cuda_graphs,
    }


def _model(config: Any) -> Answer:
    """Shape of the model; parameters are counted on one that holds no numbers."""
    model = config.model_spec.model
    block = model.layers[0]
    for layer in model.layers:
        if (moe := getattr(layer, "moe", None)) is not None and hasattr(
            dispatcher := moe.routed_experts.token_dispatcher, "num_max_tokens_per_rank"
        ):
            # As its trainer does from the shape of a batch.
            dispatcher.num_max_tokens_per_rank = config.training.local_batch_size * config.training.seq_len
    with torch.device("meta"):
        parameters = sum(one.numel() for one in model.build().parameters())
    return {
        "blocks": len(model.layers),
        "hidden": model.dim,
        "ffn": block.feed_forward.w1.out_features if block.feed_forward is not None else None,
        "heads": block.attention.n_heads,
        "kv_heads": getattr(block.attention, "n_kv_heads", block.attention.n_heads),
        "experts": _experts(model),
        "vocab": model.vocab_size,
        "parameters": parameters,
    }


def _experts(model: Any) -> list[Any] | None:
    """Experts of a layer, those of a token, and the dispatcher."""
    mixtures = [layer.moe for layer in model.layers if getattr(layer, "moe", None) is not None]
    if not mixtures:
        return None
    one = mixtures[0]
    return [one.num_experts, one.router.top_k, type(one.routed_experts.token_dispatcher).__qualname__.split(".")[0]]


def _parts(config: Any, dims: ParallelDims) -> list[list[int]]:
    """Layers of each chunk of each stage."""
    parallelism = config.parallelism
    if dims.pp == 1:
        return [[len(config.model_spec.model.layers)]]
    names = parallelism.module_fqns_per_model_part
    if names is None:
        names = _generate_llm_fqn_per_model_part(*_get_pipeline_metadata(dims, parallelism, config.model_spec.model))
    layers = [sum(name.startswith("layers.") for name in part) for part in names]
    schedule = parallelism.pipeline_parallel_schedule
    return [
        [layers[part] for part in _get_pp_rank_to_stage_indices_mapping(stage, dims.pp, schedule, len(layers))]
        for stage in range(dims.pp)
    ]


def _schedule(config: Any, dims: ParallelDims, chunks: int) -> None:
    """Build the schedule, on a model of nothing; ValueError for what it refuses."""
    with fake_world(dims.pp):
        nothing, device = torch.nn.Identity(), torch.device("cpu")
        stages = [PipelineStage(nothing, chunk * dims.pp, chunks * dims.pp, device) for chunk in range(chunks)]
        _build_pipeline_schedule(
            parallelism=config.parallelism,
            local_batch_size=config.training.local_batch_size,
            stages=stages,
            loss_fn=lambda output, _labels: (output.sum(), None),
        )


def groups(request: Request, sizes: Answer, rank: int, _folder: Path) -> Groups:
    """Groups of a rank in torchtitan's mesh."""
    with fake_world(request.world, rank=rank):
        dims = ParallelDims(
            **{axis: sizes[axis] for axis in AXES}, world_size=request.world, spmd_backend=sizes["spmd_backend"]
        )
        dims.build_mesh()
        sparse = ("efsdp",) if sizes["ep"] > 1 else ()
        return {axis: dims._single_axis_meshes[axis].mesh.flatten().tolist() for axis in (*AXES, *sparse)}


if __name__ == "__main__":
    main(Check("torchtitan", accept, groups))
