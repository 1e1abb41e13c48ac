"""What the equivalence tests cover."""

from __future__ import annotations

import itertools

from tests.runtime.cases import INNERMOST, cases, grids, pairs


def test_every_grid_is_there() -> None:
    """Guards the promise: the 55 grids of 1, 2, 3, 4, 6 and 8 ranks, and 2x2x2x2."""
    assert len(grids()) == 56
    assert [case.grid.sizes for case in cases()] == [grid.sizes for grid in grids()]


def test_every_two_values_meet() -> None:
    """Guards the covering: every two values of two dimensions, of options and of axes, but two innermost axes."""
    chosen = [case for case in cases() if case.grid.world > 1]
    values = [set(dimension) for dimension in zip(*(case.values() for case in chosen), strict=True)]
    assert [len(dimension) for dimension in values] == [2, 4, 2, 2, 3, 3, 3, 2, 2, 3, 3, 3, 3]
    met = set().union(*(pairs(case) for case in chosen))
    for (one, first), (other, second) in itertools.combinations(enumerate(values), 2):
        for mine, theirs in itertools.product(first, second):
            assert ((one, mine), (other, theirs)) in met or mine == theirs == INNERMOST
