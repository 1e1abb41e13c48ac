"""Ring edges that leave a domain, against counting them one by one."""

import pytest

from axonn_tune.cost.collectives import Crossing, crossing
from axonn_tune.grid import AXES, Grid, GroupShape, distinct_orders, factorizations


def counted(grid: Grid, axes: str, domain: int) -> tuple[int, int]:
    """Most edges of one ring, and most edges of all rings leaving one domain, by walking every ring."""
    leaving: dict[int, int] = {}
    most = 0
    for group in grid.groups(axes):
        edges = 0
        for position, rank in enumerate(group):
            following = group[(position + 1) % len(group)]
            if following // domain != rank // domain:
                edges += 1
                leaving[rank // domain] = leaving.get(rank // domain, 0) + 1
        most = max(most, edges)
    return most, max(leaving.values(), default=0)


@pytest.mark.parametrize("world", [8, 12, 24, 36])
@pytest.mark.parametrize("domain", [2, 3, 4, 6, 8])
def test_one_axis_is_exact_for_any_sizes(world: int, domain: int) -> None:
    """Guards link sharing, also where groups straddle nodes: 18 to 46% error without it."""
    for row in factorizations(world).tolist():
        for order in distinct_orders(tuple(row)):
            grid = Grid(*row, order=order)
            for axis in AXES:
                found = crossing(grid.group_shape(axis), domain, world)
                assert (found.edges, found.sharing) == counted(grid, axis, domain), (grid, axis)


@pytest.mark.parametrize("world", [8, 24])
@pytest.mark.parametrize("domain", [2, 3, 4, 8])
def test_two_axes_are_never_too_optimistic(world: int, domain: int) -> None:
    """Guards the rounding for `xy`: at least the edges there are, never more than there can be."""
    for row in factorizations(world).tolist():
        for order in distinct_orders(tuple(row)):
            grid = Grid(*row, order=order)
            shape = grid.group_shape("xy")
            found = crossing(shape, domain, world)
            edges, sharing = counted(grid, "xy", domain)
            assert edges <= found.edges <= shape.size or not shape.levels
            assert sharing <= found.sharing <= domain


def test_the_papers_cases() -> None:
    """Guards equation 7 on Perlmutter: 1, 2 and 4 rings share a node's links as the inner axes grow."""
    world, node = 1024, 4
    assert crossing(GroupShape(((16, 1),)), node, world) == Crossing(4, 1)
    assert crossing(GroupShape(((16, 2),)), node, world) == Crossing(8, 2)
    assert crossing(GroupShape(((16, 4),)), node, world) == Crossing(16, 4)
    assert crossing(GroupShape(((16, 64),)), node, world) == Crossing(16, 4)
    assert crossing(GroupShape(((4, 1),)), node, world) == Crossing(0, 0)


def test_large_odd_worlds_stay_cheap() -> None:
    """Guards the million-rank search: no case walks all ranks."""
    found = crossing(GroupShape(((15625, 3),)), 4, 3 * 15625 * 64)
    assert found.edges == 11719
    assert 1 <= found.sharing <= 4
