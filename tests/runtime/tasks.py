"""Small tasks for the ranks of a pool."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from axonn_tune.grid import Grid
from axonn_tune.runtime.clocks import TimedCall, Timer
from axonn_tune.runtime.communicator import Communicator
from axonn_tune.runtime.devices import RuntimeSettings
from axonn_tune.runtime.ledger import Ledger
from axonn_tune.runtime.mesh import build_mesh
from axonn_tune.runtime.optimizer import ShardedOptimizer
from axonn_tune.runtime.transformer import Transformer
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.launch import Optimizer
from tests.runtime.steps import forward_backward, leave

LATE_S = 0.3
"""How late the late rank is: far longer than the collective takes."""


def trained_in_bf16(grid: Grid, split: bool) -> dict[str, torch.Tensor]:
    """Weights as they are computed with, after three steps of a small model in bf16."""
    mesh, wide = build_mesh(grid), torch.float32
    kinds = torch.bfloat16, wide, wide
    settings = RuntimeSettings(*kinds, frozenset(), "none", 0, torch.device("cpu"), shard_master=split)
    model = Transformer(load_model("nano").document, Communicator(mesh, Ledger()), settings, sequence=16, seed=0)
    options = Optimizer(learning_rate=1e-3, warmup_steps=0, gradient_clip_norm=None)
    adam = ShardedOptimizer(model.store, model.communicator, options)
    tokens = torch.randint(0, 500, (4, 17), generator=torch.Generator().manual_seed(mesh.rank))
    for _ in range(3):
        loss = forward_backward(model, tokens[:, :-1], tokens[:, 1:], scale=1 / 128, last=True)
        model.finish_gradients()
        adam.step(loss)
    leave(mesh)
    return {one.name: one.value.bfloat16() for one in model.store.matrices}


def one_late_rank() -> tuple[TimedCall, ...]:
    """Two all-reduces of two ranks: one read long after it is done; one waited for at once, to which rank 1 is late."""
    timer = Timer()
    timer.start(torch.device("cpu"))
    communicator = Communicator(build_mesh(Grid(1, 1, 1, 2)), Ledger(), timer)
    dist.barrier()
    timer.begin_step(0)
    hidden = communicator.all_reduce(torch.ones(1000), "data", "backward", "block")
    time.sleep(LATE_S)
    hidden.wait()
    time.sleep(LATE_S * dist.get_rank())
    communicator.all_reduce(torch.ones(1000), "data", "step", "vectors").wait()
    times = timer.end_step()
    assert times is not None, "a started timer times step 0"
    return times.calls
