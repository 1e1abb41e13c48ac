"""One linear layer alone: right on every axis at once, and wrong in a telling way when an axis is forgotten."""

from __future__ import annotations

import pytest

from axonn_tune.grid import Grid
from tests.runtime import tasks
from tests.runtime.pool import Pools

GRID = Grid(2, 2, 2, 1)


@pytest.mark.parametrize(
    ("forgotten", "wrong", "transposed"),
    [(None, set(), set()), ("x", {"dI"}, {"O"}), ("y", {"O"}, {"dI"}), ("z", {"dW"}, {"dW"})],
)
def test_the_wrong_tensor_tells_the_axis(
    forgotten: str | None, wrong: set[str], transposed: set[str], pools: Pools
) -> None:
    """Guards the roles of the axes: sums over y make outputs, over x input gradients, over z weight gradients.

    In a transposed layer x and y swap.
    """
    for swapped, expected in ((False, wrong), (True, transposed)):
        assert pools(GRID.world).run(tasks.deviating, GRID, forgotten, swapped) == [expected] * GRID.world
