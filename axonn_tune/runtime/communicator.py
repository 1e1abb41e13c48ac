"""Communication of a training step: every collective goes through here and is recorded in the ledger.

Each call returns a handle; its result may be read after `wait()`. Collectives over a group of one do nothing and are
not recorded. Gloo's own reduce-scatter is an all-reduce inside; here it is an all-to-all and a local sum in rank
order, which sends half the bytes. The sum counts as the collective's time.

Under NCCL each group has its own stream. docs/decisions/0013 explains why no data is read and no memory reused too
early, for any CUDA_DEVICE_MAX_CONNECTIONS: a collective starts after an event on the issuing stream, another event
blocks the waiting stream, and a handle holds the sent tensors until then.

A message to a neighbouring pipeline stage is a broadcast in a group of its two ranks: unlike Gloo's own messages it is
asynchronous on both sides, in order, and timed as every other collective is.

Some collectives outlive the layer that issues them: all-gathers of weights are prefetched for the next layer,
reduce-scatters of weight gradients finish one layer later, and data-parallel buckets finish at the end of the step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

from axonn_tune.grid import ENDS
from axonn_tune.program.inputs import COPY
from axonn_tune.program.operations import OpKind, Phase
from axonn_tune.program.pipeline import Kind
from axonn_tune.runtime.clocks import Call, Timer
from axonn_tune.runtime.devices import RuntimeSettings
from axonn_tune.runtime.ledger import Ledger, LedgerEntry
from axonn_tune.runtime.mesh import Edge, Mesh
from axonn_tune.runtime.parameters import Bucket, Vector


@dataclass(eq=False, repr=False)
class CollectiveHandle:
    """A collective in flight. `wait` returns its result, however often it is called.

    buffer: where the result arrives, not to be read before. finish: makes the result of what has arrived. sent: held,
    because a stream that the computation does not wait for may still read its memory.
    """

    buffer: torch.Tensor
    work: dist.Work | None
    finish: Callable[[], torch.Tensor] | None = None
    sent: torch.Tensor | None = None
    call: Call | None = None

    def __post_init__(self) -> None:
        if self.call is not None and self.work is not None:
            self.call.clock.mark_end(self.work, self.call.group, partial(setattr, self.call, "done"))

    @property
    def done(self) -> bool:
        """Whether the result has arrived, or the message has been received."""
        return self.work is None or self.work.is_completed()

    def wait(self) -> torch.Tensor:
        """Wait for the result (on CUDA: make the current stream wait for it)."""
        call, self.call = self.call, None
        if call is not None:
            call.halted = call.clock.mark()
        if self.work is not None:
            self.work.wait()
            self.work = self.sent = None
        if self.finish is not None:
            self.buffer, self.finish = self.finish(), None
        if call is not None:
            call.resumed = call.clock.mark()
            call.done = call.resumed if call.done is None else call.done
        return self.buffer


@dataclass(frozen=True)
class Communicator:
    """Collectives over the mesh's axes."""

    mesh: Mesh
    ledger: Ledger
    timer: Timer = field(default_factory=Timer)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        axis: str,
        phase: Phase,
        layer: str,
        *,
        largest: bool = False,
        planned: int | None = None,
    ) -> CollectiveHandle:
        """Sum (or maximum) over the group, in place; planned: as of `exchange`."""
        group = self.mesh.groups[axis]
        if group is None:
            return CollectiveHandle(tensor, None)
        call = self._record(LedgerEntry("all_reduce", axis, phase, layer, tensor.nbytes), group, tensor, planned)
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        work = dist.all_reduce(tensor, op=operation, group=group, async_op=True)
        return CollectiveHandle(tensor, work, call=call)

    def all_gather(self, shard: torch.Tensor, axis: str, phase: Phase, layer: str) -> CollectiveHandle:
        """The group's shards, concatenated along dim 0 in the order of the axis."""
        group = self.mesh.groups[axis]
        if group is None:
            return CollectiveHandle(shard, None)
        shard = shard.contiguous()
        result = shard.new_empty((shard.shape[0] * self.mesh.size(axis), *shard.shape[1:]))
        call = self._record(LedgerEntry("all_gather", axis, phase, layer, result.nbytes), group)
        work = _newest("all_gather_single", "all_gather_into_tensor")(result, shard, group=group, async_op=True)
        return CollectiveHandle(result, work, sent=shard, call=call)

    def reduce_scatter(self, tensor: torch.Tensor, axis: str, phase: Phase, layer: str) -> CollectiveHandle:
        """Sum over the group, split along dim 0; this rank's shard."""
        group = self.mesh.groups[axis]
        if group is None:
            return CollectiveHandle(tensor, None)
        tensor, size = tensor.contiguous(), self.mesh.size(axis)
        call = self._record(LedgerEntry("reduce_scatter", axis, phase, layer, tensor.nbytes), group)
        shape = (tensor.shape[0] // size, *tensor.shape[1:])
        if dist.get_backend(group) == "gloo":
            shards = torch.empty_like(tensor)
            work = dist.all_to_all_single(shards, tensor, group=group, async_op=True)
            return CollectiveHandle(
                shards, work, lambda: _sum_in_order(shards.view(size, *shape)), sent=tensor, call=call
            )
        result = tensor.new_empty(shape)
        work = _newest("reduce_scatter_single", "reduce_scatter_tensor")(result, tensor, group=group, async_op=True)
        return CollectiveHandle(result, work, sent=tensor, call=call)

    def pass_on(
        self, tensor: torch.Tensor, axis: str, phase: Phase, layer: str, *, whole_bytes: int, first: bool
    ) -> CollectiveHandle:
        """A contiguous tensor to the next rank of a ring; the previous rank's comes back.

        All passes of a ring together are one all-gather of the program, of so many bytes: `first` counts it.
        """
        group, place, size = self.mesh.groups[axis], self.mesh.place(axis), self.mesh.size(axis)
        assert group is not None, "a rank alone has no ring"
        entry, result = LedgerEntry("all_gather", axis, phase, layer, whole_bytes), torch.empty_like(tensor)
        call = self._record(entry, group) if first else self.timer.issue(entry, group, counted=False)
        sent, received = [0] * size, [0] * size
        sent[(place + 1) % size] = received[(place - 1) % size] = tensor.numel()
        # Of an all-to-all the only part that is not empty.
        flat = result.view(-1), tensor.view(-1)
        work = dist.all_to_all_single(*flat, received, sent, group=group, async_op=True)
        return CollectiveHandle(result, work, sent=tensor, call=call)

    def exchange(
        self,
        rows: torch.Tensor,
        counts: tuple[list[int], list[int]],
        op: OpKind,
        phase: Phase,
        layer: str,
        *,
        planned: int | None = None,
    ) -> CollectiveHandle:
        """Rows to ranks of `expert`, as many to each and from each as `counts` say; those that come, in rank order.

        planned: rows that balanced experts would have. The call is timed under that size, so that all ranks and steps
        have the same terms; the ledger has the rows that really go.
        """
        group, (sent, received) = self.mesh.groups["expert"], counts
        rows = rows.contiguous()
        if group is None:
            return CollectiveHandle(rows, None)
        call = self._record(LedgerEntry(op, "expert", phase, layer, rows.nbytes), group, rows, planned)
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        work = dist.all_to_all_single(result, rows, received, sent, group=group, async_op=True)
        return CollectiveHandle(result, work, sent=rows, call=call)

    def pass_shards(
        self, rows: torch.Tensor, counts: tuple[list[int], list[int]], axis: str, layer: str, *, whole: int
    ) -> CollectiveHandle:
        """Rows to ranks of a group, as many to each and from each as `counts` say; those that come, in rank order.

        Some of the ranks get shards from all, or send some to all; whole: shards' rows that each rank has on one side.
        """
        group, (sent, received) = self.mesh.groups[axis], counts
        if group is None:
            return CollectiveHandle(rows, None)
        rows, size_bytes = rows.contiguous(), whole * math.prod(rows.shape[1:]) * rows.itemsize
        call = self._record(LedgerEntry("all_to_all", axis, "step", layer, size_bytes), group)
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        work = dist.all_to_all_single(result, rows, received, sent, group=group, async_op=True)
        return CollectiveHandle(result, work, sent=rows, call=call)

    def send(self, tensor: torch.Tensor, kind: Kind) -> CollectiveHandle:
        """Send an activation (F) or a gradient (B) to the stage that needs it next."""
        edge, tensor = self.mesh.sends[kind], tensor.contiguous()
        self.ledger.record(_message(tensor))
        return self._pass(tensor, edge, sent=True)

    def receive(self, buffer: torch.Tensor, kind: Kind) -> CollectiveHandle:
        """Fill a contiguous buffer with the next activation (F) or gradient (B) from a neighbouring stage."""
        return self._pass(buffer, self.mesh.receives[kind], sent=False)

    def _pass(self, tensor: torch.Tensor, edge: Edge, *, sent: bool) -> CollectiveHandle:
        call = self.timer.issue(_message(tensor), edge.group, edge=edge)
        work = dist.broadcast(tensor, edge.sender, group=edge.group, async_op=True)
        return CollectiveHandle(tensor, work, sent=tensor if sent else None, call=call)

    def _record(
        self,
        entry: LedgerEntry,
        group: dist.ProcessGroup,
        sent: torch.Tensor | None = None,
        planned: int | None = None,
    ) -> Call | None:
        """Count a call before its issue, and time it if this step is timed; planned: rows of what is sent."""
        self.ledger.record(entry)
        if sent is not None and planned is not None:
            entry = replace(entry, size_bytes=planned * math.prod(sent.shape[1:]) * sent.itemsize)
        return self.timer.issue(entry, group)


def _message(tensor: torch.Tensor) -> LedgerEntry:
    """Its name in the program."""
    return LedgerEntry("send", "pipeline", "forward", "stage", tensor.nbytes)


def _sum_in_order(shards: torch.Tensor) -> torch.Tensor:
    """Sum over dim 0, always in rank order."""
    total = shards[0].clone()
    for shard in shards[1:]:
        total += shard
    return total


def _newest(name: str, older: str) -> Callable[..., dist.Work]:
    """torch's function of a name, or of the one that it has in older versions."""
    found: Callable[..., dist.Work] = getattr(dist, name, None) or getattr(dist, older)
    return found


class Gathered(Protocol):
    """A weight as it is gathered and its gradient reduced: a matrix, or those of all experts of a rank in one."""

    name: str
    shard_axis: str

    @property
    def value(self) -> torch.Tensor:
        """This rank's shard."""

    @property
    def gradient(self) -> torch.Tensor:
        """Of its shard."""


WeightGather: TypeAlias = tuple[Gathered, Phase, str]
"""A weight to gather, in which phase, and what the program calls it."""


class WeightGathers:
    """Weight all-gathers of one micro-batch, `(matrix, phase, layer)` in order; taking one prefetches the next."""

    def __init__(self, communicator: Communicator, settings: RuntimeSettings, chain: list[WeightGather]) -> None:
        self._communicator = communicator
        self._settings = settings
        self._chain = chain
        self._prefetch = "gather_prefetch" in settings.overlaps
        self._issued = self._issue(chain[0]) if self._prefetch and chain else None

    def take(self, matrix: Gathered) -> torch.Tensor:
        """The gathered weight that is next in the chain, which must be `matrix`."""
        expected, *rest = self._chain
        assert expected[0] is matrix, f"the chain has {expected[0].name} next, not {matrix.name}"
        pending = self._issued if self._issued is not None else self._issue(expected)
        block = pending.wait()
        self._chain = rest
        self._issued = self._issue(rest[0]) if self._prefetch and rest else None
        return block

    def _issue(self, link: WeightGather) -> CollectiveHandle:
        matrix, phase, layer = link
        return self._communicator.all_gather(matrix.value.to(self._settings.compute), matrix.shard_axis, phase, layer)


class WeightGradients:
    """Weight gradients in flight: each reduce-scatter is finished one layer later."""

    def __init__(self, communicator: Communicator, settings: RuntimeSettings) -> None:
        self._communicator = communicator
        self._deferred = "weight_gradient" in settings.overlaps
        self._pending: tuple[Gathered, CollectiveHandle, Callable[[], None] | None] | None = None

    def later(self, work: Callable[[], None]) -> None:
        """Part of what makes weight gradients, in order: now."""
        work()

    def add(
        self,
        matrix: Gathered,
        inputs: Sequence[torch.Tensor],
        output_gradients: Sequence[torch.Tensor],
        layer: str,
        after: Callable[[], None] | None,
    ) -> None:
        """Add `dW[k, n] = Iᵀ · dO` of all parts: in the GEMM itself where no other rank has shards, and in one type."""
        into, direct = matrix.gradient, self._communicator.mesh.groups[matrix.shard_axis] is None
        if not (direct and into.dtype == inputs[0].dtype):
            into, direct = inputs[0].t() @ output_gradients[0], False
            inputs, output_gradients = inputs[1:], output_gradients[1:]
        for x, gradient in zip(inputs, output_gradients, strict=True):
            into.addmm_(x.t(), gradient)
        if not direct:
            self.reduce(matrix, into, layer, after)
            return
        self.finish()
        if after is not None:
            after()

    def reduce(
        self, matrix: Gathered, gradient: torch.Tensor, layer: str, after: Callable[[], None] | None = None
    ) -> None:
        """Reduce-scatter a gathered weight's gradient over z and add it to the shard; `after` runs once it is added."""
        self.finish()
        pending = self._communicator.reduce_scatter(gradient, matrix.shard_axis, "backward", layer)
        self._pending = (matrix, pending, after)
        if not self._deferred:
            self.finish()

    def finish(self) -> None:
        """Add the gradient in flight."""
        if self._pending is not None:
            matrix, pending, after = self._pending
            self._pending = None
            matrix.gradient.add_(pending.wait())
            if after is not None:
                after()


class WaitingGradients(WeightGradients):
    """Weight gradients of linear layers and experts that wait until `run`, with both operands of each."""

    def __init__(self, communicator: Communicator, settings: RuntimeSettings) -> None:
        super().__init__(communicator, settings)
        self._waiting = deque[Callable[[], None]]()

    def add(
        self,
        matrix: Gathered,
        inputs: Sequence[torch.Tensor],
        output_gradients: Sequence[torch.Tensor],
        layer: str,
        after: Callable[[], None] | None,
    ) -> None:
        """As of `WeightGradients`, but later."""
        operands = tuple(inputs), tuple(output_gradients)
        self.later(partial(super().add, matrix, *operands, layer, after))

    def later(self, work: Callable[[], None]) -> None:
        """The same in `run`."""
        self._waiting.append(work)

    def run(self) -> None:
        """Add them, and let each one's operands go."""
        while self._waiting:
            self._waiting.popleft()()
        self.finish()


@dataclass
class DataBuckets:
    """Data-parallel gradient buckets in flight; `open`: this is the micro-batch in which they are reduced."""

    communicator: Communicator
    settings: RuntimeSettings
    open: bool = False
    _sent: list[tuple[Bucket, CollectiveHandle]] = field(default_factory=list)

    def send(self, bucket: Bucket) -> None:
        """All-reduce a bucket's gradients over data once they are complete; reduce-scatter them if it is split."""
        if not self.open:
            return
        pending = self._reduce(bucket, "backward")
        if "data_parallel" not in self.settings.overlaps:
            pending.wait()
        self._sent.append((bucket, pending))

    def _reduce(self, bucket: Bucket, phase: Phase) -> CollectiveHandle:
        reduce = self.communicator.reduce_scatter if bucket.split else self.communicator.all_reduce
        return reduce(bucket.gradient, bucket.axes, phase, bucket.layer)

    def finish(self) -> None:
        """Wait for every bucket."""
        for bucket, pending in self._sent:
            total = pending.wait()
            if bucket.split:
                bucket.own_gradient.copy_(total)
        self._sent.clear()

    def reduce_copies(self, bucket: Bucket) -> None:
        """Sum the gradients of tied embeddings over the first stage's embedding and the last stage's LM head."""
        if bucket.layer == COPY:
            self._sent.append((bucket, self._reduce(bucket, "step")))
            self.finish()
        self.communicator.all_reduce(bucket.own_gradient, ENDS, "step", "embedding").wait()

    def reduce_adapters(self, axis: str, bucket: Bucket) -> None:
        """Sum gradients of adapters over an axis whose ranks have them alike, each a share of the sum, over z and over
        data, and wait."""
        for axes in (axis, "z"):
            self.communicator.all_reduce(bucket.gradient, axes, "step", bucket.layer).wait()
        self._sent.append((bucket, self._reduce(bucket, "step")))
        self.finish()

    def reduce_vectors(self, bucket: Bucket) -> None:
        """Sum the gradients of the replicated vectors over z, then data, in place, and wait.

        First those of norms of heads, which are the last of them, over x.
        """
        if own := sum(one.value.numel() for one in bucket.parameters if isinstance(one, Vector) and one.of_heads):
            self.communicator.all_reduce(bucket.gradient[-own:], "x", "step", bucket.layer).wait()
        for axis in ("z", self.communicator.mesh.data_axes):
            self.communicator.all_reduce(bucket.gradient, axis, "step", bucket.layer).wait()
