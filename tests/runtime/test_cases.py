"""What the equivalence tests cover."""

from __future__ import annotations

import itertools

from tests.runtime.cases import INNERMOST, cases, daily_cases, grids, pairs


def test_every_two_values_meet() -> None:
    """Guards the covering by all 56 grids: every two values of two dimensions, but two innermost axes.

    Those of each run have every value of each dimension, and nine in ten of the pairs.
    """
    assert len(grids()) == 56
    assert [case.grid.sizes for case in cases()] == [grid.sizes for grid in grids()]
    chosen = [case for case in cases() if case.grid.world > 1]
    values = [set(dimension) for dimension in zip(*(case.values() for case in chosen), strict=True)]
    assert [len(dimension) for dimension in values] == [2, 4, 2, 2, 3, 3, 3, 2, 2, 3, 3, 3, 3]
    met = set().union(*(pairs(case) for case in chosen))
    for (one, first), (other, second) in itertools.combinations(enumerate(values), 2):
        for mine, theirs in itertools.product(first, second):
            assert ((one, mine), (other, theirs)) in met or mine == theirs == INNERMOST
    daily = set().union(*(pairs(case) for case in daily_cases()))
    assert len(daily & met) > 0.9 * len(met)
