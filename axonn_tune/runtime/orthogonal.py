"""Whole matrices from the shards of a group of ranks, orthogonalized on each: what Muon does to a momentum.

Each rank gathers a matrix over z, y and x, iterates on all of it and takes its own part: `axonn_tune.program.whole`
lists these gathers. Source of the iteration: Keller Jordan's Muon (torch.optim.Muon has the same); of the scale, by
which an update has the size of AdamW's and its learning rate: arXiv 2502.16982, section 2.2.
"""

from __future__ import annotations

import math
import re

import torch

from axonn_tune.program.whole import LAYER
from axonn_tune.runtime.communicator import Communicator
from axonn_tune.runtime.parameters import Matrix, part_of

QUINTIC = 3.4445, -4.7750, 2.0315
"""Of X, X·Xᵀ·X and (X·Xᵀ)²·X in an iteration that brings singular values near 1."""
SCALE = 0.2
"""Root mean square of AdamW's updates, about."""
_LEAST_NORM = 1e-7


def orthogonalize_(
    momentum: torch.Tensor, matrix: Matrix, communicator: Communicator, *, iterations: int, compute: torch.dtype
) -> None:
    """Replace this rank's shard of a momentum by that of the update; iterations are in the type `compute`."""
    for columns in matrix.parts or (None,):
        shard = momentum if columns is None else momentum[:, columns]
        whole = _gathered(shard, matrix, communicator)
        del shard
        scale = SCALE * math.sqrt(max(whole.shape))
        own = part_of(range(whole.shape[1]), matrix.column_axes, communicator.mesh)
        whole = whole.div_(whole.norm().clamp(min=_LEAST_NORM)).to(compute)
        tall = whole.shape[0] > whole.shape[1]
        whole = newton_schulz(whole.t() if tall else whole, iterations)
        whole = whole.t() if tall else whole
        update = whole[matrix.row_range.start : matrix.row_range.stop, own.start : own.stop] * scale
        if columns is None:
            momentum.copy_(update)
        else:
            momentum[:, columns] = update.to(momentum.dtype)


def _gathered(shard: torch.Tensor, matrix: Matrix, communicator: Communicator) -> torch.Tensor:
    """The matrix of which each rank has a shard; perhaps that itself."""
    name = re.sub(r"^blocks\.\d+\.|experts\.\d+\.|\.weight$", "", matrix.name)
    for axis in (matrix.shard_axis, "y", "x"):
        if communicator.mesh.size(axis) > 1:
            across = axis in matrix.column_axes
            shard = (shard.t() if across else shard).contiguous()
            whole = communicator.all_gather(shard, axis, "step", f"{LAYER}.{name}").wait()
            shard = whole.t() if across else whole
            del whole
    return shard


def newton_schulz(x: torch.Tensor, iterations: int) -> torch.Tensor:
    """Nearly the nearest matrix to `x`, no taller than wide and of norm 1, whose singular values are all 1."""
    first, third, fifth = QUINTIC
    for _ in range(iterations):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x
