"""`make demo`: its parts, without the minutes in which it measures."""

from __future__ import annotations

import os
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

from axonn_tune.cli.learn import calibrate_command
from axonn_tune.errors import CheckFailedError
from axonn_tune.lab.lab import Lab
from axonn_tune.specs.loading import load_document
from axonn_tune.specs.results import Measurements
from axonn_tune.validation.comparison import RunComparison
from tools import demo

ROOT = Path(__file__).parents[2]
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
    """Guards what is shown: three grids whose predicted steps differ, one of them with experts on several ranks, which
    the place can run."""
    results = demo.rank_grids(place, Path("localhost"))
    plan = demo.best_middle_worst(results)
    steps_s = [one.predicted.iteration_s or 0.0 for one in plan.launches]
    assert len(results.ranked) == 20
    assert any(launch.grid.expert > 1 and launch.force_load_balancing for launch in plan.launches)
    assert steps_s == sorted(steps_s)
    assert steps_s[-1] > steps_s[1] > steps_s[0]
    for launch in plan.launches:
        place.runner.require(launch)
        assert bool(launch.workload.overlaps) == (place.lab is not None)


@pytest.fixture(scope="module")
def measured() -> RunComparison:
    """Three grids that ran in a lab, in the order of the ranking by predicted step."""
    found = load_document(ROOT / "tests/fixtures/lab/4x2-50mbit.yaml", schema=Measurements)
    ordered = sorted(found.configurations, key=lambda one: one.pairs.predicted["step_s"])
    return RunComparison(found.model_copy(update={"configurations": (ordered[0], ordered[8], ordered[-1])}))


def as_predicted(comparison: RunComparison, *, error: float, load: float = 1.0) -> RunComparison:
    """The same, had every step taken what was predicted but for this error."""
    found = []
    for one in comparison.measurements.configurations:
        step_s = one.pairs.predicted["step_s"] / (1.0 + error)
        runs = [
            run.model_copy(update={"measured": run.measured | {"step_s": step_s}, "load": load}) for run in one.runs
        ]
        found.append(one.with_runs(runs, one.terms))
    return RunComparison(comparison.measurements.model_copy(update={"configurations": tuple(found)}))


def test_make_runs_it() -> None:
    """Guards the one command of a fresh clone: it installs what the report needs, and then runs the demo."""
    # Under `make test` this is an inner make, which would print the folders that it enters and leaves.
    plain = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}}
    words = ["make", "-n", "-B", "demo"]
    said = subprocess.run(words, cwd=ROOT, env=plain, capture_output=True, text=True, check=True).stdout
    assert "[report,runtime]" in said
    assert said.splitlines()[-1].endswith("python -m tools.demo")


def test_what_holds_and_what_does_not_is_said(measured: RunComparison) -> None:
    """Guards the verdicts: they follow from the runs."""
    good = "\n".join(demo.verdicts(as_predicted(measured, error=0.04), network=True))
    bad = "\n".join(demo.verdicts(as_predicted(measured, error=0.12, load=40.0), network=True))
    assert "The order holds." in good
    assert "all within 10%, the largest error is +4.0%" in good
    assert "not all within 10%, the largest error is +12.0%" in bad
    assert "load 40" in bad
    assert "load" not in good


@pytest.mark.parametrize("network", [True, False])
@pytest.mark.parametrize("error", [0.09, -0.09, 0.12, -0.12])
def test_a_promise_that_is_not_kept_fails(error: float, network: bool, measured: RunComparison) -> None:
    """Guards the exit code: on an emulated cluster, and there alone, an error of more than 10% is one."""
    fails = network and abs(error) > 0.1
    with pytest.raises(CheckFailedError, match=r"1[24]\.\d% off, where 10% is") if fails else nullcontext():
        demo.require_promised(as_predicted(measured, error=error), network=network)
