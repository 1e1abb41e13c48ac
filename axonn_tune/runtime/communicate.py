"""The one door to the network: every collective goes through here and is written into the ledger.

Each call returns a `Pending`; its result may be read after `wait()`. Collectives over a group of one
do nothing and leave no trace. Gloo's own reduce-scatter is an all-reduce inside; here it is an
all-to-all and a local sum in rank order, which sends half the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from axonn_tune.program.operations import Phase
from axonn_tune.runtime.ledger import Entry, Ledger
from axonn_tune.runtime.mesh import Mesh
from axonn_tune.specs.machine import CollectiveKind


class Pending:
    """A collective under way. `wait` returns its result, however often it is called."""

    def __init__(
        self, result: torch.Tensor, work: dist.Work | None, finish: Callable[[], torch.Tensor] | None = None
    ) -> None:
        self._result = result
        self._work = work
        self._finish = finish

    def wait(self) -> torch.Tensor:
        """Block until the result is there (on CUDA: make the current stream wait for it)."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result


@dataclass(frozen=True)
class Communicator:
    """Collectives over the mesh's axes."""

    mesh: Mesh
    ledger: Ledger

    def all_reduce(
        self, tensor: torch.Tensor, axis: str, phase: Phase, layer: str, *, largest: bool = False
    ) -> Pending:
        """Sum (or maximum) over the group, in place."""
        group = self.mesh.groups[axis]
        if group is None:
            return Pending(tensor, None)
        self._record("all_reduce", axis, phase, layer, tensor)
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        return Pending(tensor, dist.all_reduce(tensor, op=operation, group=group, async_op=True))

    def all_gather(self, shard: torch.Tensor, axis: str, phase: Phase, layer: str) -> Pending:
        """Shards of the group, joined along dim 0 in rank order of the axis."""
        group = self.mesh.groups[axis]
        if group is None:
            return Pending(shard, None)
        shard = shard.contiguous()
        result = shard.new_empty((shard.shape[0] * self.mesh.size(axis), *shard.shape[1:]))
        self._record("all_gather", axis, phase, layer, result)
        return Pending(result, _all_gather(result, shard, group))

    def reduce_scatter(self, tensor: torch.Tensor, axis: str, phase: Phase, layer: str) -> Pending:
        """Sum over the group, cut along dim 0; this rank's piece."""
        group = self.mesh.groups[axis]
        if group is None:
            return Pending(tensor, None)
        tensor, size = tensor.contiguous(), self.mesh.size(axis)
        self._record("reduce_scatter", axis, phase, layer, tensor)
        piece = (tensor.shape[0] // size, *tensor.shape[1:])
        if dist.get_backend(group) == "gloo":
            pieces = torch.empty_like(tensor)
            work = dist.all_to_all_single(pieces, tensor, group=group, async_op=True)
            return Pending(pieces, work, lambda: _sum_in_order(pieces.view(size, *piece)))
        result = tensor.new_empty(piece)
        return Pending(result, _reduce_scatter(result, tensor, group))

    def _record(self, op: CollectiveKind, axis: str, phase: Phase, layer: str, full: torch.Tensor) -> None:
        self.ledger.record(Entry(op, axis, phase, layer, full.numel() * full.element_size()))


def _sum_in_order(pieces: torch.Tensor) -> torch.Tensor:
    """Sum over dim 0, one after the other, whatever the sizes."""
    total = pieces[0].clone()
    for piece in pieces[1:]:
        total += piece
    return total


def _all_gather(result: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """`all_gather_single`, which older versions call `all_gather_into_tensor`."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = call(result, shard, group=group, async_op=True)
    return work


def _reduce_scatter(result: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """`reduce_scatter_single`, which older versions call `reduce_scatter_tensor`."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work = call(result, tensor, group=group, async_op=True)
    return work
