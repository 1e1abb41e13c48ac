"""What the equivalence tests cover."""

from __future__ import annotations

import itertools

import pytest

from tests.runtime.cases import FAMILIES, cases, grids, pairs


def test_every_grid_is_there_with_both_families() -> None:
    """Guards the promise: the 55 grids of 1, 2, 3, 4, 6 and 8 ranks, and 2x2x2x2."""
    assert len(grids()) == 56
    found = [
        (case.training.family, *(getattr(case.grid, axis) for axis in ("x", "y", "z", "data"))) for case in cases()
    ]
    wanted = [(family, grid.x, grid.y, grid.z, grid.data) for grid in grids() for family in FAMILIES]
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_two_values_meet(family: str) -> None:
    """Guards the covering: every two values of two dimensions, halves, split state and dropout among them."""
    chosen = [case for case in cases() if case.training.family == family and case.grid.world > 1]
    values = [set(dimension) for dimension in zip(*(case.values() for case in chosen), strict=True)]
    assert [len(dimension) for dimension in values] == [4, 2, 2, 3, 3, 4, 4, 2, 2]
    met = set().union(*(pairs(case) for case in chosen))
    for (one, first), (other, second) in itertools.combinations(enumerate(values), 2):
        for mine, theirs in itertools.product(first, second):
            assert ((one, mine), (other, theirs)) in met
