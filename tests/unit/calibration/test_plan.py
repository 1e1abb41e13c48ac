"""What a calibration measures."""

from __future__ import annotations

import pytest

from axonn_tune.calibration.measuring import seconds_of
from axonn_tune.calibration.plan import MOST_SHAPES, group_shapes
from axonn_tune.errors import UsageError
from axonn_tune.grid import AXES, Grid, distinct_orders, factorizations
from tests.unit.calibration.synthetic import plan


@pytest.mark.parametrize("world", [2, 4, 6, 8, 12])
def test_shapes_are_those_of_the_grids(world: int) -> None:
    """Guards completeness: every group over one axis that some grid of the world has, and no other."""
    wanted = set()
    for sizes in factorizations(world).tolist():
        for order in distinct_orders(tuple(sizes)):
            grid = Grid(**dict(zip(AXES, sizes, strict=True)), order=order)
            wanted |= {grid.group_shape(axis).levels for axis in AXES}
    assert {((size, stride),) for size, stride in group_shapes(world)} == wanted - {()}


def test_many_shapes_are_cut() -> None:
    """Guards the number of process groups; the world and neighbours stay."""
    shapes = group_shapes(1024)
    assert len(shapes) == MOST_SHAPES
    assert shapes[0] == (1024, 1)
    assert (2, 1) in shapes


def test_essentials_hold_one_of_each_kind() -> None:
    """Guards short budgets: what is measured in any case suffices for a fit."""
    found = plan(4)
    essential = found.probes[: found.essential]
    assert {probe.what for probe in essential} == {probe.what for probe in found.probes}
    assert {probe.layout for probe in essential if probe.what == "matmul"} == {"NN", "NT", "TN"}
    assert len({probe.size_bytes for probe in essential if probe.what == "collective"}) == 2
    assert len(set(found.probes)) == len(found.probes)


def test_shards_are_whole_elements() -> None:
    """Guards worlds of three: a buffer divides by its group."""
    for probe in plan(6).probes:
        if probe.what == "collective":
            assert probe.size_bytes % (4 * probe.group) == 0


def test_times_are_read() -> None:
    """Guards --budget."""
    assert [seconds_of(text) for text in ("20s", "5m", "1h", "90", "1.5m")] == [20.0, 300.0, 3600.0, 90.0, 90.0]
    for text in ("", "5 minutes", "0s", "-3s"):
        with pytest.raises(UsageError, match="--budget"):
            seconds_of(text)
