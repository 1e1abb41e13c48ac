"""One linear layer alone: right on every axis at once, and wrong in a telling way when an axis is forgotten."""

from __future__ import annotations

import pytest

from axonn_tune.grid import Grid
from tests.runtime import tasks
from tests.runtime.pool import Pools

GRID = Grid(2, 2, 2, 1)


@pytest.mark.parametrize(
    ("forgotten", "wrong"), [(None, set()), ("x", {"dI"}), ("y", {"O"}), ("z", {"dW"})], ids=["none", "x", "y", "z"]
)
def test_the_wrong_tensor_tells_the_axis(forgotten: str | None, wrong: set[str], pools: Pools) -> None:
    """Guards the roles of the axes: sums over y make outputs, over x input gradients, over z weight gradients."""
    assert pools(GRID.world).run(tasks.deviating, GRID, forgotten, False) == [wrong] * GRID.world


@pytest.mark.parametrize(
    ("forgotten", "wrong"), [(None, set()), ("x", {"O"}), ("y", {"dI"}), ("z", {"dW"})], ids=["none", "x", "y", "z"]
)
def test_a_transposed_layer_swaps_x_and_y(forgotten: str | None, wrong: set[str], pools: Pools) -> None:
    """Guards the other half of the layers, whose roles of x and y are exchanged."""
    assert pools(GRID.world).run(tasks.deviating, GRID, forgotten, True) == [wrong] * GRID.world
