"""AxoNN's own process groups, data loader and sharded layers, through a step of a tiny model: axonn 0.2.0.

The world is torch's fake one, on CPUs, which AxoNN is told are GPUs. What runs is the Python file beside the command.
Flags of Megatron-AxoNN, which is no package, are read by name: their degrees are those of `axonn.init`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from tools.frameworks.answering import Answer, Check, Groups, Request, fake_world, main

WIDTH = 64
FLAGS = {
    "G_inter": "--pipeline-model-parallel-size",
    "G_intra_r": "--row-tensor-model-parallel-size",
    "G_intra_c": "--column-tensor-model-parallel-size",
    "G_intra_d": "--depth-tensor-model-parallel-size",
}
GROUPS = {
    "g_intra_r": "outer_intra_layer_parallel_group",
    "g_intra_c": "inner_intra_layer_parallel_group",
    "g_intra_d": "depth_intra_layer_parallel_group",
    "g_data": "data_parallel_group",
}


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes tensors, on the CPU."""
    return lambda *args, **options: make(*args, **{**options, "device": "cpu"})


def seem_to_have_gpus() -> None:
    """Let AxoNN, which names its device in places, have its way on a CPU."""
    tensors: Any = torch
    tensors.cuda.set_device = lambda _device: None
    tensors.cuda.current_device = lambda: "cpu"
    tensors.cuda.synchronize = lambda: None
    tensors.cuda.device_count = lambda: 8
    tensors.empty, tensors.tensor = _on_cpu(torch.empty), _on_cpu(torch.tensor)
    tensors.nn.Module.to = lambda module, _device: module
    new_group = torch.distributed.new_group
    tensors.distributed.new_group = lambda ranks, backend=None: new_group([int(one) for one in ranks])


@contextlib.contextmanager
def gpu_world(world: int, *, rank: int = 0) -> Iterator[None]:
    """A fake world, whose start does not ask for GPUs again."""
    with fake_world(world, rank=rank), patch("torch.distributed.init_process_group"):
        yield


def accept(request: Request, folder: Path) -> Answer:
    """Degrees as AxoNN has them; of its easy API also what a step of rank 0 does."""
    with gpu_world(request.world):
        module = _init(request, folder)
        from axonn import axonn as ax

        sizes = {name: getattr(ax.config, name) for name in (*FLAGS, "G_data")}
        return {"world": request.world, **sizes, **(_step(module, ax) if module else {})}


def _init(request: Request, folder: Path) -> ModuleType | None:
    """Start AxoNN as the file beside the command does, which is returned, or as Megatron-AxoNN does."""
    if request.files:
        module = _loaded(folder / f"config{next(iter(request.files))}")
        module.init()
        return module
    from axonn import axonn as ax

    words = request.words(folder)
    degrees = {name: int(words[words.index(flag) + 1]) if flag in words else 1 for name, flag in FLAGS.items()}
    used = functools.reduce(int.__mul__, degrees.values())
    ax.init(G_data=request.world // used, **degrees)
    return None


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("layout", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Perceptron(torch.nn.Module):
    """Two linear layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """The mean of its output."""
        mean: torch.Tensor = self.down(torch.relu(self.up(values))).mean()
        return mean


def _step(module: ModuleType, ax: Any) -> Answer:
    """One training step on as many samples as a step takes, and how it was counted."""
    dataset = torch.utils.data.TensorDataset(torch.ones(ax.config.G_data * ax.config.G_intra_d * 64, WIDTH))
    model = module.build(Perceptron)
    drawn = [list(one) for one in module.batches(dataset)]
    passes = []
    model.register_forward_hook(lambda _model, inputs, _output: passes.append(len(inputs[0])))
    module.step(model, torch.optim.AdamW(model.parameters()), iter(drawn))
    return {
        "global_batch": ax.config.global_batch_size,
        "micro_batch": ax.config.micro_batch_size,
        "micro_batches": len(passes),
        "samples": sum(passes),
        "shards": [one.weight.numel() for one in (model.up, model.down)],
        "dtype": str(model.up.weight.dtype).removeprefix("torch."),
    }


def groups(request: Request, _sizes: Answer, rank: int, folder: Path) -> Groups:
    """Groups of a rank."""
    with gpu_world(request.world, rank=rank):
        _init(request, folder)
        from axonn import axonn as ax

        handle = ax.comm_handle
        return {name: torch.distributed.get_process_group_ranks(getattr(handle, of)) for name, of in GROUPS.items()}


if __name__ == "__main__":
    seem_to_have_gpus()
    main(Check("axonn", accept, groups))
