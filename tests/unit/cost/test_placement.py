"""Ring edges that leave a domain, against counting them one by one."""

import pytest

from axonn_tune.cost.collectives import crossing
from axonn_tune.grid import AXES, Grid, distinct_orders, factorizations


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
