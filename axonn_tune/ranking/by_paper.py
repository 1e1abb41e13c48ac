"""Grids ranked by the paper's own model; all other quantities come from our model, for the same grid and rank order."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import get_args

import numpy as np

from axonn_tune.cost.collectives import Line, route
from axonn_tune.cost.paper import NO_BANDWIDTH_ENTRY, RELEASED_ORDER, PaperBackend, PaperPrices, price_paper
from axonn_tune.cost.price import PricedLayout, Term
from axonn_tune.errors import UsageError, suggest
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.grid import AXES, PAPER_ORDER, Grid
from axonn_tune.program.operations import Collective, as_size
from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.priced import Priced, Rejected, count_ties
from axonn_tune.ranking.space import Problem

BACKENDS: tuple[PaperBackend, ...] = get_args(PaperBackend)
_NO_ENTRY = NO_BANDWIDTH_ENTRY, "the machine's paper table has no bandwidth for one of the groups"


def rank_by_paper(problem: Problem, *, backend: str) -> PricedByPaper:
    """Rank by a paper backend: grids that our search finds feasible and the bandwidth table covers.

    The axis order is the one asked for, else the backend's own. Ties: shorter step by our model. UsageError for a
    ranking by anything but communication, for pipeline stages, and for a machine without a `paper` section.
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
    ours = search(replace(problem, rank_by="iteration", request=replace(problem.request, order=order)))
    columns = dict(zip(AXES, ours.grids.sizes.T, strict=True))
    prices = price_paper(
        known[backend],
        model=problem.model,
        machine=problem.machine,
        workload=problem.workload,
        **columns,
        order=order,
    )
    grid, missing = ours.shapes.grid[ours.columns.shape[ours.rows]], int(prices.rejected.sum())
    covered = ~prices.rejected[grid]
    ranked = np.argsort(prices.communication_s[grid[covered]], kind="stable")
    rejected = {**ours.searched.rejected, **({NO_BANDWIDTH_ENTRY: missing} if missing else {})}
    return PricedByPaper(
        **{each.name: getattr(ours, each.name) for each in fields(Priced)}
        | {
            "problem": problem,
            "searched": replace(ours.searched, rejected=rejected),
            "rows": ours.rows[covered][ranked],
            "cost": backend,
        },
        order=order,
        prices=prices,
        unpriced=ours.rows[~covered],
    )


@dataclass(frozen=True, kw_only=True)
class PricedByPaper(Priced):
    """Grids in the order of the paper's communication time. `prices` has a row for every grid.

    unpriced: rows of our model for which the paper's table lacks a bandwidth.
    """

    order: tuple[str, ...]
    prices: PaperPrices
    unpriced: np.ndarray

    def __getitem__(self, position: int) -> PricedLayout:
        """The layout at a place of the ranking, from 0, with the paper's communication time in place of ours."""
        number = self._grid_of(int(self.rows[position]))
        return replace(super().__getitem__(position), communication_s=float(self.prices.communication_s[number]))

    def with_terms(self, position: int) -> PricedLayout:
        """The layout at a place of the ranking, with every collective by the paper's model."""
        return replace(self[position], terms=self._terms(self._grid_of(int(self.rows[position]))))

    @cached_property
    def ties(self) -> int:
        """Number of rows from the first on within model error of the first."""
        metric = self.prices.communication_s[self.shapes.grid[self.columns.shape[self.rows]]]
        return count_ties(metric, metric * self.problem.machine.uncertainty.communication) if len(self) else 0

    @property
    def difference(self) -> None:
        """None: the paper's model does not have it."""

    def rejected(self) -> tuple[Rejected, ...]:
        """Grids that are not ranked, with the reasons, and the paper's time wherever its table gives one."""
        fits = {self._grid_of(row): self._priced(row) for row in self.unpriced.tolist()}
        numbers = {tuple(row): number for number, row in enumerate(self.grids.sizes.tolist())}
        found = []
        for one in super().rejected():
            number = numbers[tuple(one.sizes.values())]
            reasons, priced = () if number in fits else one.reasons, fits.get(number)
            if self.prices.rejected[number]:
                found.append(replace(one, reasons=(*reasons, _NO_ENTRY), priced=priced, order=self.order))
            else:
                seconds, terms = float(self.prices.communication_s[number]), self._terms(number)
                found.append(replace(one, order=self.order, communication_s=seconds, terms=terms))
        return tuple(found)

    def _terms(self, number: int) -> tuple[Term, ...]:
        """Every collective of a grid that more than one rank takes part in; exposed time is unknown."""
        grid, machine = Grid(*self.grids.sizes[number].tolist(), order=self.order), self.problem.machine
        found = []
        for one in self.prices.terms:
            if one.group[number] == 1:
                continue
            size_bytes = float(np.broadcast_to(one.bytes, one.seconds.shape)[number])
            found.append(
                Term(
                    *(one.op, one.axis, one.phase, one.layer, one.count),
                    bytes=size_bytes,
                    group=int(one.group[number]),
                    tier=machine.tiers[route(grid.group_shape(one.axis), machine.tiers, grid.world).outermost].name,
                    seconds=float(one.seconds[number]),
                    exposed_s=math.nan,
                    formula=f"arXiv 2305.13525, equation {one.equation}",
                    line=Line("ring", "", 0.0, float(one.bandwidth_bytes_per_s[number])),
                    collective=Collective(one.op, one.axis, one.phase, one.layer, as_size(size_bytes)),
                )
            )
        return tuple(found)
