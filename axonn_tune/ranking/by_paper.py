"""Grids ranked by the paper's own model; all other quantities come from our model, for the same grid and rank order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

import numpy as np

from axonn_tune.cost.collectives import Line, Term, route
from axonn_tune.cost.paper import NO_BANDWIDTH_ENTRY, RELEASED_ORDER, PaperBackend, PaperPrices, price_paper
from axonn_tune.cost.price import PricedLayout
from axonn_tune.errors import UsageError, suggest
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.grid import AXES, PAPER_ORDER, Grid
from axonn_tune.program.operations import Collective, as_size
from axonn_tune.ranking.priced import TELL, Priced, Rejected, Sizes, count_ties
from axonn_tune.ranking.space import Problem
from axonn_tune.request import DEFAULT_TOP

BACKENDS: tuple[PaperBackend, ...] = get_args(PaperBackend)
_NO_ENTRY = NO_BANDWIDTH_ENTRY, "the machine's paper table has no bandwidth for one of the groups"


def rank_by_paper(
    problem: Problem, search: Callable[..., Priced], *, backend: str, top: int = DEFAULT_TOP
) -> PricedByPaper:
    """Rank by a paper backend: grids that our search finds feasible and the bandwidth table covers, the first `top`
    (0: all).

    search: ranks by our model, as `choosing.search`. The axis order is the one asked for, else the backend's own.
    Ties: shorter step by our model. UsageError for a ranking by anything but communication, for pipeline stages, and
    for a machine without a `paper` section.
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
    by_steps = replace(problem, rank_by="iteration", request=replace(problem.request, order=order))
    ours = search(by_steps, top=0, tell=TELL.get())
    columns = dict(zip(AXES, ours.grids.sizes.T, strict=True))
    prices = price_paper(
        known[backend],
        model=problem.model,
        machine=problem.machine,
        workload=problem.workload,
        **columns,
        order=order,
    )
    numbers = {tuple(sizes): number for number, sizes in enumerate(ours.grids.sizes.tolist())}
    places = {numbers[ours.sizes_of(one)]: one for one in ours.first}
    covered = [
        replace(one, communication_s=float(prices.communication_s[number]))
        for number, one in places.items()
        if not prices.rejected[number]
    ]
    covered.sort(key=lambda one: one.communication_s or 0.0)
    missing = int(prices.rejected.sum())
    rejected = {**ours.searched.rejected, **({NO_BANDWIDTH_ENTRY: missing} if missing else {})}
    first = tuple(covered[: top or len(covered)])
    return PricedByPaper(
        problem,
        replace(ours.searched, rejected=rejected, unlisted=len(covered) - len(first)),
        ours.grids,
        first,
        ours.feasible & ~prices.rejected,
        ours.least_bytes,
        shortest=next(iter(ours.first), None),
        cost=backend,
        order=order,
        prices=prices,
        numbers=numbers,
        unpriced={number: one for number, one in places.items() if prices.rejected[number]},
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class PricedByPaper(Priced):
    """Grids in the order of the paper's communication time. `prices` has a row for every grid.

    numbers: of grids by their sizes. unpriced: rows of our model, by number, for which the paper's table lacks a
    bandwidth.
    """

    order: tuple[str, ...]
    prices: PaperPrices
    numbers: dict[Sizes, int]
    unpriced: dict[int, PricedLayout]

    def with_terms(self, position: int) -> PricedLayout:
        """The layout at a place of the ranking, with every collective by the paper's model."""
        return replace(self[position], terms=self._terms(self.numbers[self.sizes_of(self[position])]))

    @cached_property
    def ties(self) -> int:
        """Number of rows from the first on within model error of the first."""
        metric = self._metric("communication")
        return count_ties(metric, metric * self.problem.machine.uncertainty.communication) if len(self) else 0

    @property
    def difference(self) -> None:
        """None: the paper's model does not have it."""

    def rejected(self) -> tuple[Rejected, ...]:
        """Grids that are not ranked, with the reasons, and the paper's time wherever its table gives one."""
        found = []
        for one in super().rejected():
            number = self.numbers[tuple(one.sizes.values())]
            reasons, priced = () if number in self.unpriced else one.reasons, self.unpriced.get(number)
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
