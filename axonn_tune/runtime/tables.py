"""Embedding, head and loss on tables split over the vocabulary.

The token table is `E[V_xy, H]`, its rows cut over x, then y, then z; learned positions are `P[S, H_y]`.
Padded rows are zero, are never looked up, and have no share in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from axonn_tune.program.dimensions import loss_chunks
from axonn_tune.program.operations import Phase
from axonn_tune.runtime.chains import Gathers, Gradients
from axonn_tune.runtime.communicate import Communicator
from axonn_tune.runtime.norm import Norm
from axonn_tune.runtime.parameters import Matrix
from axonn_tune.runtime.settings import Settings


def scatter_hidden(x: torch.Tensor, communicator: Communicator, phase: Phase, layer: str) -> torch.Tensor:
    """`[M, H]` summed over y and x, cut to `[M, H_y]`."""
    parts = communicator.mesh.size("y")
    pieces = x.view(x.shape[0], parts, -1).transpose(0, 1).reshape(-1, x.shape[1] // parts)
    piece = communicator.reduce_scatter(pieces, "y", phase, layer).wait()
    return communicator.all_reduce(piece, "x", phase, layer).wait()


def gather_hidden(x: torch.Tensor, communicator: Communicator, phase: Phase, layer: str) -> torch.Tensor:
    """`[M, H_y]` joined to `[M, H]`."""
    whole = communicator.all_gather(x, "y", phase, layer).wait()
    return whole.view(communicator.mesh.size("y"), x.shape[0], -1).transpose(0, 1).reshape(x.shape[0], -1)


@dataclass
class Embedding:
    """Token look-up, and learned positions for GPT."""

    table: Matrix
    positions: Matrix | None
    sequence: int
    communicator: Communicator

    def forward(self, tokens: torch.Tensor, gathers: Gathers) -> torch.Tensor:
        """Tokens `[M]` to `[M, H_y]`: local rows only, summed over the ranks that hold the others."""
        block = gathers.take(self.table)
        mine, local = local_rows(tokens, self.table)
        looked_up = block[local] * mine[:, None].to(block.dtype)
        x = scatter_hidden(looked_up, self.communicator, "forward", "embedding")
        if self.positions is not None:
            positions = gathers.take(self.positions)[: self.sequence]
            x = (x.view(-1, self.sequence, x.shape[-1]) + positions).view(x.shape)
        return x

    def backward(self, tokens: torch.Tensor, gradient: torch.Tensor, gradients: Gradients) -> None:
        """Gradients of both tables from `[M, H_y]`."""
        if self.positions is not None:
            rows = gradient.new_zeros(self.positions.layout.rows, gradient.shape[1])
            rows[: self.sequence] = gradient.view(-1, self.sequence, gradient.shape[1]).sum(0)
            gradients.reduce(self.positions, rows, "position")
        whole = gather_hidden(gradient, self.communicator, "backward", "embedding")
        mine, local = local_rows(tokens, self.table)
        update = whole.new_zeros(block_rows(self.table), whole.shape[1])
        update.index_add_(0, local, whole * mine[:, None].to(whole.dtype))
        gradients.reduce(self.table, update, "embedding")
        gradients.finish()


def block_rows(table: Matrix) -> int:
    """Rows of the block this rank holds gathered over z."""
    return len(table.gathered_rows)


def local_rows(tokens: torch.Tensor, table: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens lie in this rank's block, and each token's row in it (row 0 for the others)."""
    start, rows = table.gathered_rows.start, block_rows(table)
    mine = (tokens >= start) & (tokens < start + rows)
    return mine, torch.where(mine, tokens - start, torch.zeros_like(tokens))


@dataclass
class Head:
    """Final norm, logits and loss, with all gradients at once."""

    table: Matrix
    norm: Norm
    vocab: int
    communicator: Communicator
    settings: Settings
    after: Callable[[], None] | None = None

    def forward_backward(
        self, x: torch.Tensor, targets: torch.Tensor, gathers: Gathers, gradients: Gradients, *, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss · scale summed over this rank's targets `[M]`, and the gradient of `x[M, H_y]`."""
        normal, statistics = self.norm.forward(x)
        block = gathers.take(self.table)
        hidden = gather_hidden(normal, self.communicator, "forward", "head")
        chunks = loss_chunks(len(targets))
        losses, hidden_gradients = [], []
        weight_gradient = torch.zeros_like(block)
        for part, wanted in zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True):
            loss, logits_gradient = self._loss(part @ block.t(), wanted, scale=scale)
            losses.append(loss)
            hidden_gradients.append(logits_gradient @ block)
            weight_gradient += logits_gradient.t() @ part
        gradients.reduce(self.table, weight_gradient, "head", self.after)
        gradient = scatter_hidden(torch.cat(hidden_gradients), self.communicator, "backward", "head")
        result = self.norm.backward(x, statistics, gradient)
        gradients.finish()
        return torch.stack(losses).sum(), result

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor, *, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross-entropy of `logits[t, V_xy]`: loss · scale summed, and the logits' gradient.

        The largest logit, the sum of exponentials and the target's logit are combined over xy.
        """
        wide = logits.to(self.settings.statistics)
        real = max(0, min(self.vocab - self.table.gathered_rows.start, wide.shape[1]))
        wide[:, real:] = -math.inf
        top = self.communicator.all_reduce(wide.max(-1).values, "xy", "forward", "loss.max", largest=True).wait()
        exponentials = torch.exp(wide - top[:, None])
        mine, local = local_rows(targets, self.table)
        held = mine.to(wide.dtype)
        wanted = torch.where(mine, wide.gather(1, local[:, None])[:, 0] - top, torch.zeros_like(top))
        both = torch.stack([exponentials.sum(-1), wanted])
        total, wanted = self.communicator.all_reduce(both, "xy", "forward", "loss.sums").wait()
        gradient = exponentials / total[:, None]
        gradient.scatter_add_(1, local[:, None], -held[:, None])
        return (total.log() - wanted).sum() * scale, (gradient * scale).to(logits.dtype)
