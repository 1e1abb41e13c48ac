"""The grid as a value: factorizations, ranks, groups, orders."""

import itertools

import numpy as np
import pytest

from axonn_tune.grid import (
    AXES,
    Grid,
    GroupShape,
    distinct_orders,
    divisors,
    factorizations,
    split_axes,
)


@pytest.mark.parametrize("number", [1, 2, 7, 12, 60, 64, 210, 1021, 1024])
def test_factorizations_are_all_and_each_once(number: int) -> None:
    """Guards `searched.grids`: brute force over all quadruples of divisors finds the same set."""
    brute = {
        (x, y, z, number // (x * y * z))
        for x, y, z in itertools.product(divisors(number), repeat=3)
        if number % (x * y * z) == 0
    }
    found = [tuple(row) for row in factorizations(number).tolist()]
    assert set(found) == brute
    assert len(found) == len(brute)
    assert found == sorted(found)


def test_factorizations_of_large_counts() -> None:
    """Guards counts nobody enumerates by hand."""
    assert len(factorizations(2**20)) == 1771
    rows = factorizations(1_000_000)
    assert len(rows) == 7056
    assert (rows.prod(axis=1) == 1_000_000).all()


def test_first_axis_of_the_order_varies_fastest() -> None:
    """Guards the rank order, which decides what crosses the network."""
    grid = Grid(2, 3, 4, 1, order=("y", "z", "x", "data"))
    assert grid.coordinates(1) == {"x": 0, "y": 1, "z": 0, "data": 0}
    assert grid.coordinates(3) == {"x": 0, "y": 0, "z": 1, "data": 0}
    assert grid.stride("x") == 12
    assert grid.members(0, "y") == (0, 1, 2)
    assert grid.members(5, "x") == (5, 17)


def test_groups_partition_the_world() -> None:
    """Guards that groups over any axes cover every rank once and share the shape they claim."""
    grid = Grid(2, 2, 3, 2, order=("z", "x", "data", "y"))
    for axes in ("x", "y", "z", "data", "xy", "xyz", "xyzdata"):
        groups = list(grid.groups(axes))
        assert sorted(rank for group in groups for rank in group) == list(range(grid.world))
        assert {len(group) for group in groups} == {grid.group_shape(axes).size}


def test_neighbouring_axes_merge_and_axes_of_one_vanish() -> None:
    """Guards that equal placements have equal shapes, which the pricing tables rely on."""
    grid = Grid(2, 4, 8, 1)
    assert grid.group_shape("xy") == GroupShape(((8, 1),))
    assert grid.group_shape("data") == GroupShape(())
    assert Grid(2, 4, 8, order=("x", "z", "y", "data")).group_shape("xy") == GroupShape(((2, 1), (4, 16)))


def test_orders_that_differ_only_in_axes_of_one_are_one() -> None:
    """Guards the size of the space: 4! orders only when all axes are wider than 1."""
    assert len(distinct_orders((2, 2, 2, 2))) == 24
    assert len(distinct_orders((2, 1, 2, 1))) == 2
    assert distinct_orders((1, 1, 1, 1)) == (AXES,)
    layouts = {tuple(Grid(2, 1, 3, 2, order=order).members(0, "z")) for order in distinct_orders((2, 1, 3, 2))}
    assert len(layouts) > 1


@pytest.mark.parametrize("axes", ["w", "xx", "", "xq", "datadata"])
def test_unknown_axes_are_refused(axes: str) -> None:
    """Guards against a typo that would silently communicate over nothing."""
    with pytest.raises(ValueError, match="does not name axes"):
        split_axes(axes)


def test_wrong_grids_are_refused() -> None:
    """Guards the constructor: sizes below 1, orders that miss an axis, ranks outside."""
    with pytest.raises(ValueError, match="x=0"):
        Grid(x=0)
    with pytest.raises(ValueError, match="order must name"):
        Grid(order=("x", "x", "y", "z"))
    with pytest.raises(ValueError, match="outside a world of 1"):
        Grid().coordinates(1)


def test_divisors() -> None:
    """Guards the micro-batches offered."""
    assert divisors(1) == (1,)
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert np.prod(divisors(7)) == 7
