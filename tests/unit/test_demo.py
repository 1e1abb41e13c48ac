"""`make demo`: its parts, without the minutes in which it measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from axonn_tune.cli.learn import calibrate_command
from axonn_tune.lab.lab import Lab
from tools import demo

IN_LAB, LOOPBACK = demo.Place(Lab(demo.SHAPE)), demo.Place(None)


@pytest.mark.parametrize("place", [IN_LAB, LOOPBACK])
def test_the_calibration_is_a_command_of_the_tool(place: demo.Place, tmp_path: Path) -> None:
    """Guards the options of a command that the demo runs: a wrong one would be found after minutes of installing."""
    words = place.calibration(tmp_path / "here.yaml")
    with calibrate_command.make_context("calibrate", words[4:]) as context:
        given = context.params
    assert words[3] == "calibrate"
    assert (given["ranks"], given["ranks_per_node"]) == ((None, 2) if place.lab else (demo.RANKS, None))
    assert given["batch"] == place.request.batch


@pytest.mark.parametrize("place", [IN_LAB, LOOPBACK])
def test_the_best_the_middle_and_the_worst_run(place: demo.Place) -> None:
    """Guards what is shown: three grids whose predicted steps differ, which the place can run."""
    results = demo.rank_grids(place, Path("localhost"))
    plan = demo.best_middle_worst(results)
    steps_s = [one.predicted.iteration_s or 0.0 for one in plan.launches]
    assert len(results.ranked) == 10
    assert steps_s == sorted(steps_s)
    assert steps_s[-1] > steps_s[1] > steps_s[0]
    for launch in plan.launches:
        place.runner.require(launch)
        assert bool(launch.workload.overlaps) == (place.lab is not None)
