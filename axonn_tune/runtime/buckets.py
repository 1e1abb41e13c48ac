"""Data-parallel reduction: one bucket of gradients a block and a table, sent in the last micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from axonn_tune.runtime.communicate import Communicator, Pending
from axonn_tune.runtime.parameters import Bucket
from axonn_tune.runtime.settings import Settings


@dataclass
class DataBuckets:
    """Buckets under way. `open` says whether this is the micro-batch in which they are sent."""

    communicator: Communicator
    settings: Settings
    open: bool = False
    _sent: list[tuple[Bucket, Pending]] = field(default_factory=list)

    def send(self, bucket: Bucket) -> None:
        """Sum the gradients of a bucket over data, once they are complete; each rank its own part if it is split."""
        if not self.open:
            return
        reduce = self.communicator.reduce_scatter if bucket.split else self.communicator.all_reduce
        pending = reduce(bucket.gradient, "data", "backward", bucket.layer)
        if "data_parallel" not in self.settings.overlaps:
            pending.wait()
        self._sent.append((bucket, pending))

    def finish(self) -> None:
        """Wait for every bucket."""
        for bucket, pending in self._sent:
            total = pending.wait()
            if bucket.split:
                bucket.own_gradient.copy_(total)
        self._sent.clear()

    def reduce_vectors(self, bucket: Bucket) -> None:
        """Sum the gradients of the replicated vectors over z, then data, in place, and wait."""
        for axis in ("z", "data"):
            self.communicator.all_reduce(bucket.gradient, axis, "step", bucket.layer).wait()
