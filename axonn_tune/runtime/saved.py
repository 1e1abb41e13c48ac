"""What a residual branch of a block has at hand: weights while they are gathered, and what its backward pass needs.

Letters as in `axonn_tune.runtime.experts`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch

from axonn_tune.runtime.communicator import CollectiveHandle, WeightGathers
from axonn_tune.runtime.modules import Middles, NormStatistics, ParallelLinear, TensorFunction
from axonn_tune.runtime.parameters import Bucket, Matrix, Vector

LocalOutput = tuple[torch.Tensor, TensorFunction]
"""Output and backward pass of attention or of an activation."""


@dataclass
class Router:
    """The router's weight `W[H_y, E_x]`, as a layer of which weights are gathered; bias: `[E]`, added to scores for the
    choice of experts alone."""

    layer: str
    weight: Matrix
    bias: Vector | None = None


@dataclass
class ExpertWeights:
    """Weights of this rank's experts, gathered in one call: those of FC1, then of FC2, expert by expert."""

    layer: str
    first: list[Matrix]
    second: list[Matrix]
    bucket: Bucket | None = None
    name: str = "experts"
    shard_axis: str = "expert_z"

    @property
    def weight(self) -> ExpertWeights:
        """What is gathered."""
        return self

    @property
    def value(self) -> torch.Tensor:
        """Shards of all, flat."""
        assert self.bucket is not None, "made with the model"
        return self.bucket.value[: self._count]

    @property
    def gradient(self) -> torch.Tensor:
        """Of the same."""
        assert self.bucket is not None, "made with the model"
        return self.bucket.gradient[: self._count]

    @property
    def _count(self) -> int:
        return sum(one.value.numel() for one in (*self.first, *self.second))

    def views(self, gathered: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all shards, flat, those of each expert: `[experts, shards, rows, columns]` of FC1 and of FC2."""
        shards, found, begin = gathered.view(-1, self._count), list[torch.Tensor](), 0
        for matrices in (self.first, self.second):
            rows, columns = matrices[0].value.shape
            end = begin + len(matrices) * rows * columns
            found.append(shards[:, begin:end].view(len(shards), len(matrices), rows, columns).transpose(0, 1))
            begin = end
        return found[0], found[1]

    def new_gradient(self, like: torch.Tensor) -> torch.Tensor:
        """Room for the gradients of all shards, flat, in the type of a tensor."""
        shards = len(self.first[0].gathered_rows) // len(self.first[0].row_range)
        return like.new_empty(shards * self._count)


@dataclass(frozen=True)
class Routing:
    """Where the tokens of a part go.

    order: of (token, choice) by expert, `[T·K]`; back: where each is in that order, `[T, K]`; counts: how many go to
    each rank, and come from it; places: of what comes, in the order of this rank's experts, `[R]`; None: it comes so.
    sizes: how many each of these has.
    """

    order: torch.Tensor
    back: torch.Tensor
    counts: tuple[list[int], list[int]]
    places: torch.Tensor | None
    sizes: torch.Tensor

    @cached_property
    def on_host(self) -> list[int]:
        """How many rows each of this rank's experts has, as numbers."""
        found: list[int] = self.sizes.tolist()
        return found

    @cached_property
    def ends(self) -> torch.Tensor:
        """Where the rows of each end, on the device."""
        return self.sizes.cumsum(0).to(self.order.device, torch.int32)

    def sorted(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows that came, in the order of this rank's experts."""
        return rows if self.places is None else rows[self.places]

    def unsorted(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of this rank's experts in the order in which they came."""
        if self.places is None:
            return rows
        found = torch.empty_like(rows)
        found[self.places] = rows
        return found


@dataclass
class SavedExperts:
    """What is saved of a part from forward to backward.

    logits, chosen, shares: of a graph from all logits `[T, E]` to the probabilities `[T, K]` and, for a load-balancing
    loss, to the sum over tokens of scores as shares of one `[E]`; rows, probabilities: dispatched, `[R, H_y]` and
    `[R]`; local: activation `[R, F_x]` and its backward pass; shared: the same of shared experts.
    """

    logits: torch.Tensor
    chosen: torch.Tensor
    shares: torch.Tensor | None
    routing: Routing
    rows: torch.Tensor
    probabilities: torch.Tensor
    local: LocalOutput
    shared: LocalOutput | None


Linear: TypeAlias = ParallelLinear | Router | ExpertWeights
"""A layer of which weights are gathered."""


@dataclass
class GatheredWeights:
    """Gathered weights of one block: gathered at the first use, held until the last.

    users: micro-batches between forward and backward that share them, where a layer is not resharded after forward.
    """

    gathers: WeightGathers
    held: dict[str, torch.Tensor] = field(default_factory=dict)
    users: int = 1

    def take(self, linear: Linear, *, last: bool) -> torch.Tensor:
        """A layer's gathered weight."""
        if linear.layer not in self.held:
            self.held[linear.layer] = self.gathers.take(linear.weight)
        return self.held.pop(linear.layer) if last and self.users == 1 else self.held[linear.layer]


@dataclass
class SavedActivations:
    """What a residual branch saves of a micro-batch, or of half a split one, from forward to backward.

    tokens: their numbers `[M]`, for dropout; statistics: of the norm; x: residual stream `[M, H_y]` that the branch
    reads; hidden: first linear layer's output `[M, N_x]`; local: attention's or activation's output and backward pass;
    normal: the norm's output; experts: of them; counts: tokens of each of them, on all ranks, for a loss; middles: of
    adapters.
    """

    tokens: torch.Tensor
    statistics: NormStatistics
    x: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    local: LocalOutput | None = None
    normal: torch.Tensor | None = None
    experts: SavedExperts | None = None
    counts: CollectiveHandle | None = None
    middles: Middles = field(default_factory=dict)
