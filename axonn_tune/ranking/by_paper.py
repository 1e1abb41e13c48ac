"""Grids ranked by the paper's own model; all other quantities come from our model, for the same grid and rank order."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

import numpy as np

from axonn_tune.cost.collectives import Line, route
from axonn_tune.cost.paper import (
    NO_BANDWIDTH_ENTRY,
    RELEASED_ORDER,
    PaperBackend,
    PaperPrices,
    PaperTerm,
    price_paper,
)
from axonn_tune.cost.prediction import Pricing, Term
from axonn_tune.errors import UsageError, suggest
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.grid import AXES, PAPER_ORDER, Grid
from axonn_tune.program.operations import Collective
from axonn_tune.program.size import as_size
from axonn_tune.ranking.by_alpha_beta import AlphaBetaRanking, count_ties
from axonn_tune.ranking.choosing import SearchCounts, search
from axonn_tune.ranking.entries import Entry, Sizes
from axonn_tune.ranking.space import Problem

BACKENDS: tuple[PaperBackend, ...] = get_args(PaperBackend)
_NO_ENTRY = f"{NO_BANDWIDTH_ENTRY}: the machine's paper table has no bandwidth for one of the groups"


def rank_by_paper(problem: Problem, *, backend: str) -> PaperRanking:
    """Rank by a paper backend: grids that our search finds feasible and the bandwidth table covers.

    The axis order is the one asked for, else the backend's own. UsageError for a ranking by anything but
    communication, for pipeline stages, and for a machine without a `paper` section.
    """
    known = {name: name for name in BACKENDS}
    if backend not in known:
        raise UsageError(f"no cost model named {backend!r}{suggest(backend, known)}")
    if problem.framework.name != AXONN_TUNE.name:
        raise UsageError(f"--cost {backend} knows the grids of {AXONN_TUNE.name} alone: leave out --framework")
    if problem.rank_by != "communication":
        raise UsageError(f"{backend} knows communication times only: it cannot rank by {problem.rank_by}")
    if problem.pipeline:
        raise UsageError(f"{backend} knows no pipeline stages: leave out --pipeline")
    order = tuple(problem.request.order or ()) or (PAPER_ORDER if backend == "paper" else RELEASED_ORDER)
    ours = replace(problem, rank_by="iteration", request=replace(problem.request, order=order))
    base = AlphaBetaRanking(search(ours))
    x, y, z, data = base.ranking.grids.sizes.T
    prices = price_paper(
        known[backend],
        model=problem.model,
        machine=problem.machine,
        workload=problem.workload,
        x=x,
        y=y,
        z=z,
        data=data,
        order=order,
    )
    return PaperRanking(known[backend], order, base, prices)


@dataclass(frozen=True)
class PaperRanking:
    """Grids in the order of the paper's communication time. `prices` has a row for every grid of `base`."""

    cost: PaperBackend
    order: tuple[str, ...]
    base: AlphaBetaRanking
    prices: PaperPrices

    def __len__(self) -> int:
        return len(self._positions)

    @cached_property
    def _grid_of(self) -> list[int]:
        """Number of the grid at each place of our ranking."""
        ranking = self.base.ranking
        numbers: list[int] = ranking.shapes.grid[ranking.columns.shape[ranking.rows]].tolist()
        return numbers

    @cached_property
    def _number(self) -> dict[Sizes, int]:
        rows = self.base.ranking.grids.sizes.tolist()
        return {tuple(row): number for number, row in enumerate(rows)}

    @cached_property
    def _positions(self) -> list[int]:
        """Places in our ranking, in the order of this one. Ties: shorter step by our model, then grid."""
        priced = [place for place, grid in enumerate(self._grid_of) if not self.prices.rejected[grid]]
        return sorted(
            priced, key=lambda place: (self.prices.communication_s[self._grid_of[place]], place, self._grid_of[place])
        )

    @cached_property
    def searched(self) -> SearchCounts:
        """Numbers of grids and candidates, by our search and by the table."""
        found, missing = self.base.searched, int(self.prices.rejected.sum())
        return replace(found, rejected={**found.rejected, NO_BANDWIDTH_ENTRY: missing}) if missing else found

    @cached_property
    def ties(self) -> int:
        """Number of rows from the first on within model error of the first."""
        if not len(self):
            return 0
        half_width = self.base.ranking.problem.machine.uncertainty.communication
        metric = self.prices.communication_s[[self._grid_of[place] for place in self._positions]]
        return count_ties(metric, metric * half_width)

    @property
    def difference(self) -> None:
        """None: the paper's model does not have it."""

    def entry(self, position: int, *, terms: bool) -> Entry:
        """The entry at a place of the ranking, from 0; `terms`: with every collective."""
        place = self._positions[position]
        found = replace(self.base.entry(place, terms=False), rank=position + 1, tie=position < self.ties)
        return self._with_paper(found, terms=terms)

    def fastest(self) -> Entry | None:
        """The candidate of the shortest step by our model, of all in the order of this ranking."""
        return self.base.fastest()

    def pricing(self, position: int) -> Pricing:
        """What our model predicts of the configuration at a place of this ranking, from 0."""
        return self.base.pricing(self._positions[position])

    def rejected_entries(self) -> tuple[Entry, ...]:
        """Grids that are not ranked, with the reasons, and the paper's time wherever its table gives one."""
        found = [
            replace(self.base.entry(place, terms=False), rank=None, tie=False)
            for place, grid in enumerate(self._grid_of)
            if self.prices.rejected[grid]
        ]
        rejected = [*found, *self.base.rejected_entries()]
        rejected.sort(key=lambda entry: self._number[entry.sizes])
        return tuple(self._with_paper(entry, terms=True) for entry in rejected)

    def ranks(self) -> dict[Sizes, int]:
        """Rank of each grid."""
        sizes = self.base.ranking.grids.sizes
        rows = sizes[[self._grid_of[place] for place in self._positions]].tolist() if len(self) else []
        return {tuple(row): position + 1 for position, row in enumerate(rows)}

    def _with_paper(self, entry: Entry, *, terms: bool) -> Entry:
        """The entry with the paper's communication time and terms in place of ours."""
        number = self._number[entry.sizes]
        if self.prices.rejected[number]:
            reasons = (*entry.rejected_because, _NO_ENTRY)
            return replace(entry, order=self.order, communication_s=None, rejected_because=reasons)
        return replace(
            entry,
            order=self.order,
            communication_s=float(self.prices.communication_s[number]),
            terms=self._terms(entry.sizes, number) if terms else (),
        )

    def _terms(self, sizes: Sizes, number: int) -> tuple[Term, ...]:
        problem = self.base.ranking.problem
        grid, tiers = Grid(*sizes, order=self.order), problem.machine.tiers
        tier = {axis: tiers[route(grid.group_shape(axis), tiers, grid.world).outermost].name for axis in AXES}
        return tuple(_term(term, number, tier=tier[term.axis]) for term in self.prices.terms if term.group[number] > 1)


def _term(term: PaperTerm, number: int, *, tier: str) -> Term:
    size_bytes = float(np.broadcast_to(term.bytes, term.seconds.shape)[number])
    return Term(
        op=term.op,
        axis=term.axis,
        phase=term.phase,
        layer=term.layer,
        count=term.count,
        bytes=size_bytes,
        group=int(term.group[number]),
        tier=tier,
        seconds=float(term.seconds[number]),
        exposed_s=math.nan,
        formula=f"arXiv 2305.13525, equation {term.equation}",
        line=Line("ring", "", 0.0, float(term.bandwidth_bytes_per_s[number])),
        collective=Collective(term.op, term.axis, term.phase, term.layer, as_size(size_bytes)),
    )
