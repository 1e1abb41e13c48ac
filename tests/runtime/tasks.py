"""Small tasks for the ranks of a pool."""

from __future__ import annotations

import torch

from axonn_tune.grid import Grid
from axonn_tune.runtime.communicator import Communicator
from axonn_tune.runtime.devices import RuntimeSettings
from axonn_tune.runtime.ledger import Ledger
from axonn_tune.runtime.mesh import build_mesh
from axonn_tune.runtime.optimizer import AdamW
from axonn_tune.runtime.transformer import Transformer
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.launch import Optimizer
from tests.runtime.steps import forward_backward, leave


def trained_in_bf16(grid: Grid, split: bool) -> dict[str, torch.Tensor]:
    """Weights as they are computed with, after three steps of a small model in bf16."""
    mesh, wide = build_mesh(grid), torch.float32
    settings = RuntimeSettings(
        torch.bfloat16, wide, wide, frozenset(), "none", 0, torch.device("cpu"), shard_master=split
    )
    model = Transformer(load_model("nano").document, Communicator(mesh, Ledger()), settings, sequence=16, seed=0)
    adam = AdamW(
        model.store, model.communicator, Optimizer(learning_rate=1e-3, warmup_steps=0, gradient_clip_norm=None)
    )
    tokens = torch.randint(0, 500, (4, 17), generator=torch.Generator().manual_seed(mesh.rank))
    for _ in range(3):
        loss = forward_backward(model, tokens[:, :-1], tokens[:, 1:], scale=1 / 128, last=True)
        model.finish_gradients()
        adam.step(loss)
    leave(mesh)
    return {one.name: one.value.bfloat16() for one in model.store.matrices}
