"""Data-parallel reduction: one bucket of gradients a block and a table, sent in the last micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from axonn_tune.runtime.communicate import Communicator, Pending
from axonn_tune.runtime.parameters import Matrix, Vector
from axonn_tune.runtime.settings import Settings


@dataclass
class DataBuckets:
    """Buckets under way. `open` says whether this is the micro-batch in which they are sent."""

    communicator: Communicator
    settings: Settings
    open: bool = False
    _sent: list[tuple[list[Matrix], Pending]] = field(default_factory=list)

    def send(self, layer: str, matrices: list[Matrix]) -> None:
        """Sum the gradients of some matrices over data, once they are complete."""
        if not self.open:
            return
        bucket = torch.cat([matrix.gradient.flatten() for matrix in matrices])
        pending = self.communicator.all_reduce(bucket, "data", "backward", layer)
        if "data_parallel" not in self.settings.overlaps:
            pending.wait()
        self._sent.append((matrices, pending))

    def finish(self) -> None:
        """Wait for every bucket and put the sums in place of the gradients."""
        for matrices, pending in self._sent:
            unpack(pending.wait(), [matrix.gradient for matrix in matrices])
        self._sent.clear()

    def reduce_vectors(self, vectors: list[Vector]) -> None:
        """Sum the gradients of the replicated vectors over z, then data, in one bucket."""
        bucket = torch.cat([vector.gradient for vector in vectors])
        for axis in ("z", "data"):
            bucket = self.communicator.all_reduce(bucket, axis, "step", "vectors").wait()
        unpack(bucket, [vector.gradient for vector in vectors])


def unpack(bucket: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Copy the pieces of a flat bucket into tensors."""
    pieces = torch.split(bucket, [tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view_as(tensor))
