"""Small tasks for the ranks of a pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from axonn_tune.grid import Grid
from axonn_tune.program.operations import GROUP_AXES, Phase
from axonn_tune.runtime.communicator import CollectiveHandle, Communicator, WeightGradients
from axonn_tune.runtime.devices import RuntimeSettings
from axonn_tune.runtime.ledger import Ledger
from axonn_tune.runtime.mesh import Mesh, build_mesh
from axonn_tune.runtime.modules import ParallelLinear, interleave
from axonn_tune.runtime.optimizer import AdamW
from axonn_tune.runtime.parameters import MatrixLayout, ParameterStore
from axonn_tune.runtime.transformer import Transformer
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.launch import Optimizer
from tests.runtime.steps import forward_backward, leave

TOKENS, ROWS, COLUMNS = 24, 48, 72


def connected(grid: Grid) -> int:
    """Connect the groups of a grid as they are made; this rank's stage."""
    mesh = build_mesh(grid, device=torch.device("cpu"))
    leave(mesh)
    return mesh.stage


def group_members(grid: Grid) -> dict[str, list[int] | None]:
    """The ranks of each of this rank's process groups."""
    mesh = build_mesh(grid)
    found = {axes: group and dist.get_process_group_ranks(group) for axes, group in mesh.groups.items()}
    leave(mesh)
    assert set(found) == set(GROUP_AXES)
    return found


@dataclass(frozen=True)
class Skipping(Communicator):
    """A communicator that forgets to sum over one axis."""

    forgotten: str | None = None

    def all_reduce(
        self, tensor: torch.Tensor, axis: str, phase: Phase, layer: str, *, largest: bool = False
    ) -> CollectiveHandle:
        if axis == self.forgotten:
            return CollectiveHandle(tensor, None)
        return super().all_reduce(tensor, axis, phase, layer, largest=largest)

    def reduce_scatter(self, tensor: torch.Tensor, axis: str, phase: Phase, layer: str) -> CollectiveHandle:
        if axis == self.forgotten:
            return CollectiveHandle(tensor.chunk(self.mesh.size(axis))[self.mesh.coordinate(axis)], None)
        return super().reduce_scatter(tensor, axis, phase, layer)


def deviating(grid: Grid, forgotten: str | None, transposed: bool) -> set[str]:
    """Which tensors of one linear layer are wrong on this rank when sums over an axis are forgotten.

    Compared with `O = I · W`, `dI = dO · Wᵀ` and `dW = Iᵀ · dO` on whole matrices.
    """
    mesh = build_mesh(grid)
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(TOKENS, width, generator=generator).double() for width in (ROWS, COLUMNS))
    whole = _linear(Mesh(Grid(), 0, {"z": None}), Ledger(), None, transposed=transposed).weight.value
    linear = _linear(mesh, Ledger(), forgotten, transposed=transposed)
    tokens = _piece(TOKENS, "z", mesh)
    inputs, outputs = _piece(ROWS, linear.output_axis, mesh), _piece(COLUMNS, linear.input_axis, mesh)
    block = linear.communicator.all_gather(linear.weight.value, "z", "forward", "layer").wait()
    gradients = WeightGradients(linear.communicator, linear.settings)
    (output,) = interleave([linear.forward(x[tokens, inputs], block, "forward")])
    (input_gradient,) = linear.backward([x[tokens, inputs]], block, [gradient[tokens, outputs]], gradients)
    gradients.finish()
    rows, columns = linear.weight.row_range, linear.weight.column_range
    weight_gradient = (x.t() @ gradient)[rows.start : rows.stop, columns.start : columns.stop]
    pairs = {
        "O": (output, (x @ whole)[tokens, outputs]),
        "dI": (input_gradient, (gradient @ whole.t())[tokens, inputs]),
        "dW": (linear.weight.gradient, weight_gradient),
    }
    leave(mesh)
    return {name for name, (mine, right) in pairs.items() if (mine - right).abs().max() > 1e-13 * right.abs().max()}


def _linear(mesh: Mesh, ledger: Ledger, forgotten: str | None, *, transposed: bool) -> ParallelLinear:
    rows, columns = ("x", "y") if transposed else ("y", "x")
    wide, device = torch.float64, torch.device("cpu")
    settings = RuntimeSettings(wide, wide, wide, frozenset(), "none", 0, device)
    layout = MatrixLayout("weight", ROWS, COLUMNS, (rows,), columns, real_rows=ROWS, deviation=1.0)
    weight = ParameterStore(mesh, 0, wide, device).matrix(layout)
    return ParallelLinear("layer", rows, columns, weight, None, Skipping(mesh, ledger, forgotten=forgotten), settings)


def _piece(width: int, axis: str, mesh: Mesh) -> slice:
    share, place = width // mesh.size(axis), mesh.coordinate(axis)
    return slice(place * share, (place + 1) * share)


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
