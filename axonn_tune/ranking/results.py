"""The result of a search as entries: the first ranking, and ranks by other cost models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from axonn_tune.errors import NothingFeasibleError, UsageError
from axonn_tune.ranking.by_alpha_beta import AlphaBetaRanking
from axonn_tune.ranking.choosing import SearchCounts, search
from axonn_tune.ranking.entries import Entry, RankedGrids, Sizes
from axonn_tune.ranking.inputs import Inputs
from axonn_tune.ranking.space import Problem
from axonn_tune.units import counted

WORTH_SAYING = 0.01
"""Share of a step that another configuration must save to be named."""


@dataclass(frozen=True)
class Results:
    """A ranking, and each grid's rank by the other cost models asked for."""

    inputs: Inputs
    ranked: RankedGrids
    others: Mapping[str, Mapping[Sizes, int]]

    def listed(self, *, top: int, terms: bool = False, rejected: bool = False) -> tuple[Entry, ...]:
        """The first `top` entries (0: all), then the rejected ones if asked for."""
        count = len(self.ranked) if top == 0 else min(top, len(self.ranked))
        entries = [self.ranked.entry(position, terms=terms) for position in range(count)]
        return (*entries, *(self.ranked.rejected_entries() if rejected else ()))

    def fastest_elsewhere(self) -> Entry | None:
        """The candidate with the shortest step of all, where another criterion's first has a notably longer one."""
        if self.inputs.problem.rank_by == "iteration" or not len(self.ranked):
            return None
        best, first_s = self.ranked.fastest(), self.ranked.entry(0, terms=False).iteration_s
        if best is None or best.iteration_s is None or not first_s:
            return None
        return best if best.iteration_s <= (1.0 - WORTH_SAYING) * first_s else None

    def require_row(self, pick: int) -> None:
        """UsageError if `pick` is not a rank of a non-empty ranking."""
        if pick < 1:
            raise UsageError(f"--pick {pick}: places count from 1")
        if 0 < len(self.ranked) < pick:
            verb = "is" if len(self.ranked) == 1 else "are"
            raise UsageError(f"--pick {pick}: only {counted(len(self.ranked), 'configuration')} {verb} ranked")

    def require_any(self) -> None:
        """NothingFeasibleError, with binding constraint and nearest change, if the ranking is empty."""
        if len(self.ranked) == 0:
            raise NothingFeasibleError(nothing_feasible(self.inputs.problem, self.ranked.searched))


def run_search(inputs: Inputs, *, costs: Sequence[str] = ("alpha-beta",), variants: bool = False) -> Results:
    """Rank by the first cost model, and look each grid up in the rankings by the others.

    UsageError if a paper cost is combined with what it does not know, or the machine has no table for it.
    """
    first, *others = dict.fromkeys(costs)
    ranked = _rank(inputs.problem, cost=first, variants=variants)
    return Results(inputs, ranked, {cost: _rank(inputs.problem, cost=cost).ranks() for cost in others})


def _rank(problem: Problem, *, cost: str, variants: bool = False) -> RankedGrids:
    if cost == "alpha-beta":
        return AlphaBetaRanking(search(problem, variants=variants))
    if variants:
        raise UsageError(f"{cost} ranks grids, not candidates: leave out --variants")
    # Imported here: the paper's model is not needed to rank by ours.
    from axonn_tune.ranking.by_paper import rank_by_paper

    return rank_by_paper(problem, backend=cost)


def nothing_feasible(problem: Problem, searched: SearchCounts) -> str:
    """Reason of an empty ranking, and the nearest change."""
    from axonn_tune.ranking.nearest import nearest_change

    only = searched.grids == 1
    if searched.feasible:
        rejecting = ", ".join(searched.rejected)
        none = "the only grid has no price" if only else f"none of {searched.grids:,} grids has a price"
        return f"{none} ({rejecting}); nearest change: --cost alpha-beta"
    none = "the only grid cannot train this" if only else f"none of {searched.grids:,} grids can train this"
    return f"{none}: {nearest_change(problem)}"
