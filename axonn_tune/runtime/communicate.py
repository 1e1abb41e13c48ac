"""The one door to the network: every collective goes through here and is written into the ledger.

Each call returns a `Pending`; its result may be read after `wait()`. Collectives over a group of one
do nothing and leave no trace. Gloo's own reduce-scatter is an all-reduce inside; here it is an
all-to-all and a local sum in rank order, which sends half the bytes; the sum counts as its time.

Under NCCL each group has a stream of its own. Why nothing is read too early there and no memory reused too
early, whatever CUDA_DEVICE_MAX_CONNECTIONS says, stands in docs/decisions/0013: a collective starts after
an event on the stream that issues it, the stream that waits is held by another, and a `Pending` keeps
what is sent until then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from axonn_tune.program.operations import Phase
from axonn_tune.runtime.ledger import Entry, Ledger
from axonn_tune.runtime.mesh import Mesh
from axonn_tune.runtime.timing import Call, Timer


class Pending:
    """A collective under way. `wait` returns its result, however often it is called."""

    def __init__(
        self,
        result: torch.Tensor,
        work: dist.Work | None,
        finish: Callable[[], torch.Tensor] | None = None,
        *,
        sent: torch.Tensor | None = None,
        call: Call | None = None,
    ) -> None:
        self._result = result
        # Else its memory could be given away while a stream that computation does not wait for still reads it.
        self._sent = sent
        self._work = work
        self._finish = finish
        self._call = call
        if call is not None and work is not None:
            call.sent(work)

    def wait(self) -> torch.Tensor:
        """Block until the result is there (on CUDA: make the current stream wait for it)."""
        call, self._call = self._call, None
        if call is not None:
            call.halt()
        result = self._settle()
        if call is not None:
            call.resume()
        return result

    def _settle(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = self._sent = None
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result


@dataclass(frozen=True)
class Communicator:
    """Collectives over the mesh's axes."""

    mesh: Mesh
    ledger: Ledger
    timer: Timer = field(default_factory=Timer)

    def all_reduce(
        self, tensor: torch.Tensor, axis: str, phase: Phase, layer: str, *, largest: bool = False
    ) -> Pending:
        """Sum (or maximum) over the group, in place."""
        group = self.mesh.groups[axis]
        if group is None:
            return Pending(tensor, None)
        call = self._record(Entry("all_reduce", axis, phase, layer, tensor.nbytes), group)
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        work = dist.all_reduce(tensor, op=operation, group=group, async_op=True)
        return Pending(tensor, work, call=call)

    def all_gather(self, shard: torch.Tensor, axis: str, phase: Phase, layer: str) -> Pending:
        """Shards of the group, joined along dim 0 in rank order of the axis."""
        group = self.mesh.groups[axis]
        if group is None:
            return Pending(shard, None)
        shard = shard.contiguous()
        result = shard.new_empty((shard.shape[0] * self.mesh.size(axis), *shard.shape[1:]))
        call = self._record(Entry("all_gather", axis, phase, layer, result.nbytes), group)
        return Pending(result, _all_gather(result, shard, group), sent=shard, call=call)

    def reduce_scatter(self, tensor: torch.Tensor, axis: str, phase: Phase, layer: str) -> Pending:
        """Sum over the group, cut along dim 0; this rank's piece."""
        group = self.mesh.groups[axis]
        if group is None:
            return Pending(tensor, None)
        tensor, size = tensor.contiguous(), self.mesh.size(axis)
        call = self._record(Entry("reduce_scatter", axis, phase, layer, tensor.nbytes), group)
        piece = (tensor.shape[0] // size, *tensor.shape[1:])
        if dist.get_backend(group) == "gloo":
            pieces = torch.empty_like(tensor)
            work = dist.all_to_all_single(pieces, tensor, group=group, async_op=True)
            return Pending(pieces, work, lambda: _sum_in_order(pieces.view(size, *piece)), sent=tensor, call=call)
        result = tensor.new_empty(piece)
        return Pending(result, _reduce_scatter(result, tensor, group), sent=tensor, call=call)

    def _record(self, entry: Entry, group: dist.ProcessGroup) -> Call | None:
        """Count a call that is about to be issued, and note when, if this step is timed."""
        self.ledger.record(entry)
        return self.timer.issue(entry, group)


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
