"""DeepSpeed's own engine, topology and pipeline split, on a model of tiny layers: deepspeed 0.19.8.

The world is torch's fake one, on CPUs. Arguments of Megatron-DeepSpeed, which is no package, are read by name; its
model is the list of layers that its GPTModelPipe makes, split by `type:transformer` as there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.comm import comm
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime import constants
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.runtime.zero import config as zero
from torch import nn

from tools.frameworks.answering import Answer, Check, Groups, Request, fake_world, main

WIDTH = 8
KEYS = {
    value
    for module in (constants, zero)
    for name, value in vars(module).items()
    if name.isupper() and isinstance(value, str)
}
"""Names of keys; those at the top of its JSON that DeepSpeed does not know are ignored by it."""


class Embedding(nn.Linear):
    """What comes before the blocks, or after."""


class TransformerLayer(nn.Linear):
    """A block."""


@contextlib.contextmanager
def deepspeed_world(world: int, *, rank: int = 0) -> Iterator[None]:
    """A fake world that DeepSpeed finds started."""
    with fake_world(world, rank=rank):
        comm.cdb = None
        deepspeed.init_distributed()
        yield


def accept(request: Request, folder: Path) -> Answer:
    """What DeepSpeed's engine makes of the command."""
    path, tensor, stages = _arguments(request, folder)
    unknown = set(json.loads(Path(path).read_text(encoding="utf-8"))) - KEYS
    if unknown:
        raise KeyError(f"DeepSpeed ignores {', '.join(sorted(unknown))}")
    with deepspeed_world(request.world):
        topology = _topology(request.world, tensor, stages)
        module, layers = _model(topology, request.layers)
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=torch.optim.AdamW(module.parameters()),
            config=path,
            mpu=None if stages > 1 else PipelineParallelGrid(topology),
            dist_init_required=False,
        )
        return {"world": request.world, "tp": tensor, "pp": stages, "layers": layers} | _sizes(engine)


def _arguments(request: Request, folder: Path) -> tuple[str, int, int]:
    """Path of the JSON, tensor-parallel ranks and stages; DeepSpeed's own parser reads its own arguments."""
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser(allow_abbrev=False))
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    args, _ = parser.parse_known_args(request.words(folder))
    assert args.deepspeed, "--deepspeed is missing"
    return args.deepspeed_config, args.tensor_model_parallel_size, args.pipeline_model_parallel_size


def _topology(world: int, tensor: int, stages: int) -> Any:
    return PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=world // (tensor * stages))


def _model(topology: Any, layers: int) -> tuple[nn.Module, list[list[int]]]:
    """A model, and the blocks of each stage."""
    kinds = [Embedding, *[TransformerLayer] * layers, Embedding]
    if topology.get_dim("pipe") == 1:
        return nn.Sequential(*(kind(WIDTH, WIDTH) for kind in kinds)), [[layers]]
    specs = [LayerSpec(kind, WIDTH, WIDTH) for kind in kinds]
    module = PipelineModule(specs, topology=topology, loss_fn=nn.MSELoss(), partition_method="type:transformer")
    ends = zip(module.parts, module.parts[1:], strict=False)
    return module, [[sum(kind is TransformerLayer for kind in kinds[start:stop])] for start, stop in ends]


def _sizes(engine: Any) -> Answer:
    settings = engine._config.zero_config
    return {
        "dp": engine.dp_world_size,
        "stage": engine.zero_optimization_stage(),
        "global_batch": engine.train_batch_size(),
        "micro_batch": engine.train_micro_batch_size_per_gpu(),
        "micro_batches": engine._config.gradient_accumulation_steps,
        "bf16": engine.bfloat16_enabled(),
        "fp16": engine.fp16_enabled(),
        "communicated": str(engine.communication_data_type).removeprefix("torch."),
        "accumulated": engine._config.grad_accum_dtype,
        "overlap": engine.zero_overlap_comm(),
        "contiguous": engine.zero_contiguous_gradients(),
        "reduced_elements": engine.zero_reduce_bucket_size(),
        "prefetched_elements": settings.prefetch_bucket_size,
        "live_parameters": settings.max_live_parameters,
        "reuse_distance": settings.max_reuse_distance,
    }


def groups(request: Request, sizes: Answer, rank: int, _folder: Path) -> Groups:
    """Groups of a rank in DeepSpeed's grid; the ranks of data parallelism are those of ZeRO-3, where it is on."""
    with deepspeed_world(request.world, rank=rank):
        grid = PipelineParallelGrid(_topology(request.world, sizes["tp"], sizes["pp"]))
        data = "zero3" if sizes["stage"] == 3 else "dp"
        return {"tp": grid.slice_group, data: grid.dp_group, "pp": grid.pp_group}


if __name__ == "__main__":
    main(Check("deepspeed", accept, groups))
