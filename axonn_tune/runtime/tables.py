"""Embedding and LM head on one rank, with the loss; forward and backward are written out.

Letters as in `axonn_tune.program.layers`. Both are split over the vocabulary: `E[V_xy, H]`, its rows split over x, then
y, then z; learned positions are `P[S, H_y]`. Padded rows are zero, are never looked up, and have no share in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from axonn_tune.program.dimensions import loss_chunks
from axonn_tune.program.operations import Phase
from axonn_tune.runtime.communicator import Communicator, WeightGathers, WeightGradients
from axonn_tune.runtime.devices import RuntimeSettings
from axonn_tune.runtime.modules import Norm, compiled
from axonn_tune.runtime.parameters import Matrix


def scatter_hidden(x: torch.Tensor, communicator: Communicator, phase: Phase, layer: str) -> torch.Tensor:
    """`[M, H]` summed over y and x, reduce-scattered to `[M, H_y]`."""
    parts = communicator.mesh.size("y")
    blocks = x.view(x.shape[0], parts, -1).transpose(0, 1).reshape(-1, x.shape[1] // parts)
    shard = communicator.reduce_scatter(blocks, "y", phase, layer).wait()
    return communicator.all_reduce(shard, "x", phase, layer).wait()


def gather_hidden(x: torch.Tensor, communicator: Communicator, phase: Phase, layer: str) -> torch.Tensor:
    """`[M, H_y]` all-gathered to `[M, H]`."""
    whole = communicator.all_gather(x, "y", phase, layer).wait()
    return whole.view(communicator.mesh.size("y"), x.shape[0], -1).transpose(0, 1).reshape(x.shape[0], -1)


@dataclass
class Embedding:
    """Token embedding, and learned positions for GPT; places: positions of a rank's tokens in their sequence `[S]`."""

    table: Matrix
    positions: Matrix | None
    places: torch.Tensor
    communicator: Communicator

    def forward(self, tokens: torch.Tensor, gathers: WeightGathers) -> torch.Tensor:
        """Tokens `[M]` to `[M, H_y]`: each rank looks up its own rows, then all are summed."""
        block = gathers.take(self.table)
        mine, local = local_rows(tokens, self.table)
        looked_up = block[local] * mine[:, None].to(block.dtype)
        x = scatter_hidden(looked_up, self.communicator, "forward", "embedding")
        if self.positions is not None:
            positions = gathers.take(self.positions)[self._rows]
            x = (x.view(-1, len(self.places), x.shape[-1]) + positions).view(x.shape)
        return x

    @property
    def _rows(self) -> torch.Tensor | slice:
        """Rows of these positions: without context parallelism the first ones, of which there is a view."""
        return self.places if self.communicator.mesh.grid.context > 1 else slice(len(self.places))

    def backward(self, tokens: torch.Tensor, gradient: torch.Tensor, gradients: WeightGradients) -> None:
        """Gradients of both tables from `[M, H_y]`."""
        if self.positions is not None:
            rows = gradient.new_zeros(len(self.positions.gathered_rows), gradient.shape[1])
            rows[self._rows] = gradient.view(-1, len(self.places), gradient.shape[1]).sum(0)
            gradients.reduce(self.positions, rows, "position")
        whole = gather_hidden(gradient, self.communicator, "backward", "embedding")
        mine, local = local_rows(tokens, self.table)
        update = sums_of_rows(whole * mine[:, None].to(whole.dtype), local, len(self.table.gathered_rows))
        gradients.reduce(self.table, update, "embedding")
        gradients.finish()


def sums_of_rows(gradient: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    """`[count, H]` from `gradient[M, H]`: each row added where `rows[M]` says, in FP32 at least.

    A GPU's kernel does so in whatever type; a CPU's would round each sum, and so lose most of a frequent token's.
    """
    narrow = gradient.device.type == "cpu" and gradient.itemsize < torch.float32.itemsize
    wide = gradient.float() if narrow else gradient
    found: torch.Tensor = torch.ops.aten.embedding_dense_backward(wide, rows, count, -1, False)
    return found if found.dtype == gradient.dtype else found.to(gradient.dtype)


def local_rows(tokens: torch.Tensor, table: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens have their row in this rank's gathered table, and each token's row (0 for the others)."""
    start, stop = table.gathered_rows.start, table.gathered_rows.stop
    mine = (tokens >= start) & (tokens < stop)
    return mine, torch.where(mine, tokens - start, torch.zeros_like(tokens))


@dataclass
class LMHead:
    """LM head: final norm, logits and loss, forward and backward in one pass."""

    table: Matrix
    norm: Norm
    vocab: int
    communicator: Communicator
    settings: RuntimeSettings
    after: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self._exponentials = compiled(exponential_sums, self.settings)
        self._gradient = compiled(probabilities_, self.settings)

    def forward_backward(
        self,
        x: torch.Tensor,
        targets: torch.Tensor,
        gathers: WeightGathers,
        gradients: WeightGradients,
        *,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss · scale summed over this rank's targets `[M]`, and the gradient of `x[M, H_y]`."""
        _, normal, statistics = self.norm.forward(x)
        block = gathers.take(self.table)
        hidden = gather_hidden(normal, self.communicator, "forward", "head")
        chunks = loss_chunks(len(targets))
        hidden_gradient, losses = torch.empty_like(hidden), list[torch.Tensor]()
        weight_gradient = torch.empty_like(block if self.table.trains else block[:0])
        pieces = (one.chunk(chunks) for one in (hidden, hidden_gradient, targets))
        for part, part_gradient, labels in zip(*pieces, strict=True):
            logits = part @ block.t()
            losses.append(self._loss(logits, labels, scale=scale))
            torch.mm(logits, block, out=part_gradient)
            if self.table.trains:
                weight_gradient.addmm_(logits.t(), part, beta=min(len(losses) - 1, 1))
            del logits  # Freed, or two chunks' logits would be alive.
        del hidden, part, block
        if self.table.trains:
            gradients.reduce(self.table, weight_gradient, "head", self.after)
        gradient = scatter_hidden(hidden_gradient, self.communicator, "backward", "head")
        result = self.norm.backward(x, statistics, gradient)
        gradients.finish()
        return torch.stack(losses).sum(), result

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor, *, scale: float) -> torch.Tensor:
        """Cross-entropy of `logits[t, V_xy]`: loss · scale summed. The logits become their gradient.

        The largest logit, the sum of exponentials and the target's logit are combined over xy.
        """
        real = max(0, min(self.vocab - self.table.gathered_rows.start, logits.shape[1]))
        if real < logits.shape[1]:
            logits[:, real:] = -math.inf
        kind = self.settings.statistics
        found = [self._exponentials(some, kind) for (some,) in self._slices(logits)]
        own, sums = (torch.cat(each) for each in zip(*found, strict=True))
        top = self.communicator.all_reduce(own.clone(), "xy", "forward", "loss.max", largest=True).wait()
        mine, local = local_rows(targets, self.table)
        label_logits = logits.gather(1, local[:, None])[:, 0].to(kind) - top
        both = torch.stack([sums * (own - top).exp(), torch.where(mine, label_logits, 0.0)])
        total, label_sums = self.communicator.all_reduce(both, "xy", "forward", "loss.sums").wait()
        for some in self._slices(logits, top + (total / scale).log()):
            self._gradient(*some)
        rows = torch.arange(len(targets), device=targets.device)
        # The label's in the statistics type: 1 less a probability near 1 has no digits in a narrow one.
        label_gradient = (label_logits.exp() / total - 1.0) * scale
        logits[rows, local] = torch.where(mine, label_gradient.to(logits.dtype), logits[rows, local])
        loss: torch.Tensor = (total.log() - label_sums).sum() * scale
        return loss

    def _slices(self, *columns: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Some rows of each after the other, so that no whole copy in a wider type is made; all at once if compiled."""
        count = 1 if self.settings.compile else EAGER_SLICES
        return zip(*(one.chunk(count) for one in columns), strict=True)


EAGER_SLICES = 16


def exponential_sums(logits: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest logit of each row, finite, and `Σ_v exp(logits[t, v] - largest)`, `[t]` of a type."""
    top = logits.amax(-1).to(dtype).clamp(min=torch.finfo(dtype).min)
    return top, (logits - top[:, None]).exp_().sum(-1)


def probabilities_(logits: torch.Tensor, shift: torch.Tensor) -> None:
    """Overwrite `logits[t, V]` with `exp(logits - shift[t])`, computed in the type of `shift`."""
    torch.exp(logits - shift[:, None], out=logits)
