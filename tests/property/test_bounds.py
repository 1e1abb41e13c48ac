"""Lower bounds of the search, held against exact steps of candidates at random."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from axonn_tune.cost.columns import distinct
from axonn_tune.ranking.loop import Loop, Split
from axonn_tune.ranking.programs import Programs, exchanges_of
from axonn_tune.ranking.space import list_grids, list_placements, list_shapes
from axonn_tune.ranking.splits import scheduled_s, schedules_of
from tests.unit.ranking.candidates import Drawn, random_candidates

ROUNDING = 1.0 + 1e-9


def loop_of(drawn: Drawn) -> Loop:
    """A search of the shape of a candidate alone."""
    problem = replace(drawn.pinned, rank_by="iteration")
    grids, programs = list_grids(problem), Programs(problem.by_dispatcher[0])
    shapes = list_shapes(grids, problem)
    placements = list_placements(grids, distinct(shapes.grid)[0], problem)
    return Loop(problem, grids, shapes, placements, exchanges_of(problem, grids, shapes, programs), 1)


class Opened(Loop):
    """A search that keeps what it would decide."""

    def _push(self, bound_s: float, item: Split) -> None:
        kept.append((bound_s, item))


kept: list[tuple[float, Split]] = []


def bounds_of(drawn: Drawn) -> dict[str, tuple[float, float]]:
    """Each bound of a candidate with pipeline stages beside what it must not be above, s; empty without stages."""
    loop, found = loop_of(drawn), dict[str, tuple[float, float]]()
    kept.clear()
    opened = Opened(loop.problem, loop.grids, loop.shapes, loop.placements, loop.exchanges, 1)
    precision = next(iter(loop.problem.formats), None)
    pair_s = float(loop._least_s(loop.shapes, precision, loop.exchanges, any_chunks=True).min())
    best_s = min(drawn.own_s, drawn.iteration_s)
    found["any chunks, recompute and split"] = pair_s, best_s
    opened._open(np.arange(len(loop.shapes)), precision)
    for bound_s, item in list(kept):
        if replace(loop.layout(item.batch, item.row), parts=None) == replace(drawn.layout, parts=None):
            staged = item.batch.pool.staged(np.array([item.row]))
            own, *_ = schedules_of(loop.problem, staged, searched=False)
            found["any split"] = bound_s, best_s
            found["chains of its schedule"] = float(own.step_s[0]), drawn.own_s
            found["its whole schedule"] = scheduled_s(loop.problem, staged, None), drawn.own_s
    return found


@pytest.mark.parametrize(("seed", "count"), [(3, 100), pytest.param(1, 2000, marks=pytest.mark.nightly)])
def test_no_bound_is_above_the_exact_step(seed: int, count: int) -> None:
    """Guards that nothing is missed: the search leaves out what has a bound above the last grid that is listed."""
    staged = 0
    for drawn in random_candidates(Random(seed), count):
        found = bounds_of(drawn)
        staged += "any split" in found
        for name, (bound_s, exact_s) in found.items():
            assert bound_s <= exact_s * ROUNDING, (name, bound_s / exact_s, drawn.layout, drawn.problem.framework.name)
    assert staged > count / 5
