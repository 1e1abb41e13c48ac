"""Axes as data: what must hold of every grid over any of them, in any rank order."""

from __future__ import annotations

import itertools
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axonn_tune.grid import RANK_AXES, WORLD, Grid, divisors, factorizations, split_axes
from tests.property import strategies

SUBSETS = st.sets(st.sampled_from(RANK_AXES), min_size=1).map(lambda chosen: tuple(a for a in RANK_AXES if a in chosen))


@given(strategies.six_axis_grids())
def test_the_first_axis_of_an_order_varies_fastest(grid: Grid) -> None:
    """Guards strides: neighbours along an axis are as far apart as the axes inside it are large."""
    for axis in RANK_AXES:
        inside = grid.order[: grid.order.index(axis)]
        assert grid.stride(axis) == prod(grid.axis_size(other) for other in inside)
        if grid.axis_size(axis) > 1:
            assert grid.rank({axis: 1}) == grid.stride(axis)


@given(strategies.six_axis_grids(), SUBSETS)
def test_groups_partition_the_world(grid: Grid, axes: tuple[str, ...]) -> None:
    """Guards groups over any of six axes: every rank is in one, all have the size and span that their shape says."""
    name = "".join(axes)
    axes = RANK_AXES if name == WORLD else axes
    assert split_axes(name) == axes
    groups, shape = list(grid.groups(name)), grid.group_shape(name)
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(grid.world))
    assert {len(group) for group in groups} == {shape.size}
    assert shape.size == prod(grid.axis_size(axis) for axis in axes)
    assert all(group[-1] - group[0] < shape.span for group in groups)
    for rank in groups[0]:
        assert grid.members(rank, name) == groups[0]


@pytest.mark.parametrize("axes", range(2, 7))
@pytest.mark.parametrize("number", [1, 6, 8, 12, 30, 36])
def test_factorizations_over_any_number_of_axes(number: int, axes: int) -> None:
    """Guards `searched.grids` for every framework: brute force over tuples of divisors finds the same, in order."""
    brute = [sizes for sizes in itertools.product(divisors(number), repeat=axes) if prod(sizes) == number]
    found = [tuple(row) for row in factorizations(number, axes=axes).tolist()]
    assert found == sorted(brute)


@pytest.mark.parametrize(
    ("sizes", "named", "message"),
    [
        ((0,), {}, "x=0"),
        ((1, 1, 1, 1, 1, -2), {}, "pipeline=-2"),
        ((), {"experts": 2}, "no axis is called experts"),
        ((2,) * 10, {}, "10 sizes for 9 axes"),
        ((2,), {"x": 4}, "given twice: x"),
        ((2, 1, 1, 1, 1, 2), {}, "order must name each of x, y, z, data, pipeline"),
        ((2,), {"order": ("y", "z", "data")}, "order must name"),
        ((2, 2), {"order": ("x", "y", "x")}, "order must name"),
        ((2,), {"order": ("x", "expert")}, "order must name"),
    ],
)
def test_what_makes_no_world_is_refused(sizes: tuple[int, ...], named: dict[str, int], message: str) -> None:
    """Guards the constructor: sizes below 1, too many, twice, axes there are not, orders that leave one out."""
    with pytest.raises(ValueError, match=message):
        Grid(*sizes, **named)
