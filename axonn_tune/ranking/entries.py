"""One row of a ranking, by any cost model: the source of tables, CSV and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from axonn_tune.cost.prediction import Pricing, StagePrediction, Term
from axonn_tune.grid import AXES
from axonn_tune.ranking.choosing import SearchCounts

Sizes: TypeAlias = tuple[int, ...]
"""Axis sizes in the order of the axes that were searched."""


@dataclass(frozen=True)
class Entry:
    """One grid (or candidate) of a ranking; None: not feasible, or not known to the cost model.

    rank: from 1; None for a rejected grid, and for the candidate with the shortest step beside a ranking by another
    criterion. order: axes from the fastest-varying rank outwards. tie: within model error of the first of the ranking.
    shortest_step_s: of all candidates of this grid. bubble_s: waiting for other pipeline stages; stages: each of them,
    where terms are listed. outside: what of it no published step validates (`cost.evidence`).
    """

    sizes: Sizes
    axes: tuple[str, ...] = AXES
    framework: str = "axonn-tune"
    pipeline: int = 1
    chunks: int = 1
    bubble_s: float | None = None
    shortest_step_s: float | None = None
    stages: tuple[StagePrediction, ...] = field(default=(), repr=False)
    rank: int | None = None
    order: tuple[str, ...] | None = None
    rejected_because: tuple[str, ...] = ()
    tie: bool = False
    micro_batch: int | None = None
    accumulation: int | None = None
    recompute: str | None = None
    kept_layers: int | None = None
    communication_s: float | None = None
    exposed_communication_s: float | None = None
    compute_s: float | None = None
    iteration_s: float | None = None
    memory_bytes: float | None = None
    tokens_per_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    logged_tflops_per_gpu: float | None = None
    outside: tuple[str, ...] = ()
    terms: tuple[Term, ...] = field(default=(), repr=False)

    def size(self, axis: str) -> int:
        """Size of an axis, 1 where it is not searched."""
        return self.sizes[self.axes.index(axis)] if axis in self.axes else 1

    @property
    def x(self) -> int:
        """Size of axis x."""
        return self.size("x")

    @property
    def y(self) -> int:
        """Size of axis y."""
        return self.size("y")

    @property
    def z(self) -> int:
        """Size of axis z."""
        return self.size("z")

    @property
    def data(self) -> int:
        """Size of axis data."""
        return self.size("data")

    @property
    def feasible(self) -> bool:
        """Whether it satisfies every constraint."""
        return not self.rejected_because

    @property
    def wide_order(self) -> tuple[str, ...]:
        """The rank order without axes of size 1."""
        return tuple(axis for axis in self.order or () if self.size(axis) > 1)


class RankedGrids(Protocol):
    """A ranking by one cost model."""

    @property
    def cost(self) -> str:
        """Name of the cost model."""

    @property
    def searched(self) -> SearchCounts:
        """Numbers of grids and candidates."""

    @property
    def ties(self) -> int:
        """Number of rows from the first on that are within model error of it."""

    @property
    def difference(self) -> float | None:
        """Half-width of the 80% interval of the ratio of the first two, with a learned profile; else None."""

    def __len__(self) -> int: ...

    def entry(self, position: int, *, terms: bool) -> Entry:
        """The entry at a place of the ranking, from 0; `terms`: with every collective."""

    def fastest(self) -> Entry | None:
        """The candidate of the shortest step, of all that are feasible, not only the best of each grid."""

    def rejected_entries(self) -> Sequence[Entry]:
        """Grids that are not ranked, with the reasons."""

    def ranks(self) -> dict[Sizes, int]:
        """Best rank of each grid."""

    def pricing(self, position: int) -> Pricing:
        """Everything the alpha-beta model predicts of the configuration at a place of the ranking, from 0."""
