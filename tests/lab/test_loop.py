"""What is measured on labs: their links, and the whole loop of calibration, ranking, runs and predictions that hold.

All of it is in this one file, whose tests run one after another: ranks that are scheduled before all other
processes of this host slow those of another lab.

The gate of the loop is that of `axonn-tune regress`: floors for rank correlation, regret and the error of steps. Noise
on two shared cores passes them; a model without latency, without shared links, or with two axes swapped does not, on
the same runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from axonn_tune.cost import collectives
from axonn_tune.cost.price import Detail
from axonn_tune.errors import EnvironmentProblem
from axonn_tune.lab.lab import Lab
from axonn_tune.lab.links import verify
from axonn_tune.lab.shape import Shape
from axonn_tune.ranking.inputs import Inputs, load_inputs
from axonn_tune.report.validation import regression_text, validation_text
from axonn_tune.request import Request
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.results import ComparedConfiguration, Floors, Measurements, Tolerances
from axonn_tune.validation import regression
from axonn_tune.validation.comparison import RunComparison, fastest_runs
from axonn_tune.validation.regression import RegressionFinding, baseline_of
from axonn_tune.validation.runner import (
    LabRunner,
    Selection,
    ValidationPlan,
    plan_from_ranking,
    run_plan,
)
from tests.lab.labs import SMALL, WHY_NOT, needs_labs

WORLD, BATCH = 4, 8
LONGEST_STEP_S = 1.3
SHAPE = Shape(nodes=2, ranks_per_node=2, uplink_bits_per_s=60e6, port_bits_per_s=200e6, delay_s=4e-3)
FLOORS = Floors(spearman=0.8, regret=0.25, step_error=0.13)
REALTIME = os.getuid() == 0
"""Before all other processes of this host, where that is allowed: tests run beside one another."""
CALIBRATE = "calibrate --model nano --batch 8 --ranks-per-node 2 --budget 30s -o"


pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.nightly]


@needs_labs
@pytest.mark.parametrize("delay_s", [0.0, 1e-3])
def test_links_are_what_was_asked(delay_s: float) -> None:
    """Guards the network itself: 50 Mbit/s between nodes, shared by a node's ranks, 200 inside, each within 5%.

    A delay, by the kernel's netem or by the relay, is added between nodes only: 2 ms there and back.
    """
    try:
        with Lab(replace(SMALL, uplink_bits_per_s=50e6, delay_s=delay_s)) as lab:
            # All must agree once: the host may be busy for longer than `verify` tries.
            found = verify(lab.ranks)
            found = found if all(check.agrees for check in found) else verify(lab.ranks)
    except EnvironmentProblem as error:
        pytest.skip(str(error))
    assert [check for check in found if not check.agrees] == []
    values = {check.what: check.value for check in found}
    assert values["node 0 → 1"] == pytest.approx(50e6, rel=0.05)
    assert values["node 0 → 1, 2 ranks share"] == pytest.approx(50e6, rel=0.05)
    assert values["rank 0.0 → 0.1"] == pytest.approx(200e6, rel=0.05)
    assert 2 * delay_s <= values["round trip between nodes 0 and 1"] < 2 * delay_s + 1e-3
    assert values["round trip inside node 0"] < 1e-3


def lab_machine(folder: Path, lab: Lab) -> Path:
    """A profile of the lab, measured for half a minute."""
    path, command = folder / "lab.yaml", [sys.executable, "-m", "axonn_tune", *CALIBRATE.split()]
    outcomes = lab.ranks.execute([*command, str(path)], realtime=REALTIME)
    assert [one.code for one in outcomes] == [0] * WORLD
    return path


def inputs(machine: Path | str) -> Inputs:
    """The search whose configurations run."""
    request = Request("nano", gpus=WORLD, machine=str(machine), batch=BATCH, precision="fp32", recompute="none")
    return load_inputs(request)


def chosen(machine: Path) -> ValidationPlan:
    """All grids, some in another order too, but those that take long."""
    every = plan_from_ranking(inputs(machine), Selection(0, (("data", "z", "y", "x"),)), command="test")
    quick = [one for one in every.launches if (one.predicted.iteration_s or 0.0) < LONGEST_STEP_S]
    return replace(every, launches=tuple(quick))


def possible_shape() -> Shape:
    """With delay where this host can give it, else without."""
    try:
        with Lab(SHAPE):
            return SHAPE
    except EnvironmentProblem as error:
        print(f"no delay between the nodes of this lab: {error}")
        return replace(SHAPE, delay_s=0.0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measurements]:
    """Everything run on a lab with delay between its nodes."""
    if WHY_NOT is not None:
        pytest.skip(f"no lab can be made here: {WHY_NOT}")
    folder = tmp_path_factory.mktemp("loop")
    with Lab(possible_shape()) as lab:
        yield run(chosen(lab_machine(folder, lab)), LabRunner(lab, realtime=REALTIME), folder)


def run(selected: ValidationPlan, runner: LabRunner, folder: Path) -> Measurements:
    """Rounds of four steps, of which the fastest count: other work on this host only adds time."""
    measured = run_plan(
        selected,
        runner,
        repeats=3,
        steps=4,
        folder=folder / "runs",
        listen=lambda progress: None,
        save=lambda found: None,
    )
    return fastest_runs(measured)


def gate(measurements: Measurements, floors: Floors) -> list[RegressionFinding]:
    """What `axonn-tune regress` says of accuracy, failures alone."""
    baseline = baseline_of(measurements, reason="test", tolerances=Tolerances(), floors=floors)
    found = regression.check(baseline)
    print(regression_text(found))
    return [one for one in found.of("accuracy") if one.failed]


def test_predictions_hold_on_the_lab(measured: Measurements) -> None:
    """Guards the loop: what the tuner ranks first is nearly the fastest, ranks agree, training is right everywhere."""
    comparison = RunComparison(measured)
    print(validation_text(comparison))
    assert comparison.sound
    assert gate(measured, FLOORS) == []


def at_the_predicted_level(measurements: Measurements) -> Measurements:
    """The same with all measured times multiplied by what makes steps as long as predicted in the middle.

    A profile that was measured while this host was busy predicts all steps too long by one factor, beside which a model
    that predicts them too short has as small an error as the right one.
    """
    steps = [one.pairs for one in measurements.configurations]
    factor = median(pairs.predicted["step_s"] / pairs.measured["step_s"] for pairs in steps)
    found = []
    for one in measurements.configurations:
        times = {name: value * (factor if name.endswith("_s") else 1.0) for name, value in one.pairs.measured.items()}
        pairs = one.pairs.model_copy(update={"measured": times})
        found.append(one.model_copy(update={"pairs": pairs}))
    return measurements.model_copy(update={"configurations": tuple(found)})


def without_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every hop and call is free."""
    original = regression.price

    def broken(model: Model, machine: Machine, configuration: ComparedConfiguration) -> Detail:
        tiers = tuple(tier.model_copy(update={"latency_us": 0.0}) for tier in machine.tiers)
        library = machine.library.model_copy(update={"launch_us": 0.0})
        return original(model, machine.model_copy(update={"tiers": tiers, "library": library}), configuration)

    monkeypatch.setattr(regression, "price", broken)


def without_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ring has its links to itself."""

    def alone(sharing: tuple[int, ...], tiers: tuple[Any, ...]) -> float:
        return float(min(tier.bandwidth_bytes_per_s for tier, rings in zip(tiers, sharing, strict=True) if rings))

    monkeypatch.setattr(collectives, "_bandwidth", alone)


def with_axes_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """x is taken for y, and y for x."""
    original = regression.price

    def broken(model: Model, machine: Machine, configuration: ComparedConfiguration) -> Detail:
        grid = configuration.grid
        swapped = grid.model_copy(update={"x": grid.y, "y": grid.x})
        return original(model, machine, configuration.model_copy(update={"grid": swapped}))

    monkeypatch.setattr(regression, "price", broken)


@pytest.mark.parametrize("break_it", [without_latency, without_sharing, with_axes_swapped])
def test_gate_fails_with_a_wrong_model(
    measured: Measurements, break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the gate itself, on the same runs, whatever level this host's load gave them."""
    if break_it is without_latency and "delay" not in measured.place.network:
        pytest.skip("this lab has no delay, so latency matters little")
    level = at_the_predicted_level(measured)
    assert gate(level, FLOORS) == []
    break_it(monkeypatch)
    assert gate(level, FLOORS) != []
