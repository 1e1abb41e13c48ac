"""The micro-batches of a step through one rank's pipeline stage, in the order of 1F1B or of its interleaved form.

A rank without pipeline stages is the only one of its pipeline: each forward pass is followed by its backward pass.

Sends overlap with computation and delay only the receiver. The receive of the next message of each kind is posted as
soon as the one before has arrived, so that it overlaps too. A stage that is two messages ahead of its neighbour waits
until the first is received, which bounds their memory and cannot deadlock in these orders.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from axonn_tune.program.pipeline import Kind, Operation, stage_order
from axonn_tune.runtime.communicator import CollectiveHandle, Communicator
from axonn_tune.runtime.transformer import ChunkContext, MicroBatch, Transformer


@dataclass
class Inbox:
    """Messages of one kind to this stage; `make_buffer`: an empty `[M, H_y]`; `left`: those not yet asked for."""

    communicator: Communicator
    kind: Kind
    make_buffer: Callable[[], torch.Tensor]
    left: int
    _next: CollectiveHandle | None = None

    def __post_init__(self) -> None:
        self._ask()

    def take(self) -> torch.Tensor:
        """The next message."""
        assert self._next is not None, "asked for as often as expected"
        message = self._next.wait()
        self._ask()
        return message

    def _ask(self) -> None:
        self._next = self.communicator.receive(self.make_buffer(), self.kind) if self.left else None
        self.left -= 1


MOST_SENT = 2
"""Messages of one kind in flight at once."""


@dataclass
class Outbox:
    """Messages from this stage."""

    communicator: Communicator
    _sent: dict[Kind, deque[CollectiveHandle]] = field(default_factory=dict)

    def send(self, message: torch.Tensor, kind: Kind) -> None:
        """Send; what earlier ones have held goes when they have been received."""
        sent = self._sent.setdefault(kind, deque())
        sent.append(self.communicator.send(message, kind))
        while sent and (sent[0].done or len(sent) > MOST_SENT):
            sent.popleft().wait()

    def finish(self) -> None:
        """Wait until all have been received."""
        for sent in self._sent.values():
            while sent:
                sent.popleft().wait()


@dataclass
class PipelineStage:
    """Runs steps of a model; micro_batch: sequences of one; scale: of the loss."""

    model: Transformer
    micro_batch: int
    scale: float

    def gradients(self, batch: Callable[[int], MicroBatch], *, count: int) -> torch.Tensor:
        """Forward and backward of all micro-batches of a step, with complete gradients; this rank's loss.

        batch: a micro-batch by its number.
        """
        model, mesh = self.model, self.model.communicator.mesh
        stages, chunks = mesh.grid.pipeline, len(model.chunks)
        order = stage_order(mesh.stage, stages=stages, chunks=chunks, micro_batches=count)
        inboxes = self._inboxes(order) if stages > 1 else {}
        outbox = Outbox(model.communicator)
        loss = torch.zeros((), dtype=torch.float64, device=model.settings.device)
        contexts: dict[tuple[int, int], ChunkContext] = {}
        for kind, chunk, number in order:
            last = number == count - 1
            received = inboxes[kind].take() if self._receives(kind, chunk) else None
            if kind == "F":
                result, contexts[chunk, number] = model.forward(
                    chunk, batch(number), received, scale=self.scale, last=last
                )
                if model.ends(chunk):
                    loss += result
                else:
                    outbox.send(result, kind)
                del result
            else:
                gradient = model.backward(chunk, contexts.pop((chunk, number)), received, last=last)
                if gradient is not None:
                    outbox.send(gradient, kind)
                del gradient
            del received
        outbox.finish()
        model.finish_gradients()
        return loss

    def _receives(self, kind: Kind, chunk: int) -> bool:
        """Whether an operation needs a message."""
        return not (self.model.begins(chunk) if kind == "F" else self.model.ends(chunk))

    def _inboxes(self, order: tuple[Operation, ...]) -> dict[Kind, Inbox]:
        expected = Counter(kind for kind, chunk, _ in order if self._receives(kind, chunk))
        return {kind: Inbox(self.model.communicator, kind, self._buffer, count) for kind, count in expected.items()}

    def _buffer(self) -> torch.Tensor:
        model, settings = self.model, self.model.settings
        width = model.model.hidden // model.communicator.mesh.size("y")
        return torch.empty(self.micro_batch * model.sequence, width, dtype=settings.compute, device=settings.device)
