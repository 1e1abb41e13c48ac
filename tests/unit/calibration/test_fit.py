"""Fits find the numbers that points were made of."""

from __future__ import annotations

import pytest

from axonn_tune.calibration.profile import Calibration, calibrate, program_sample
from axonn_tune.cost.price import price
from axonn_tune.errors import UsageError
from axonn_tune.job import Job, Layout
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.document import to_yaml
from axonn_tune.specs.loading import parse_document
from axonn_tune.specs.machine import MEASURED_KINDS, CollectiveFactors, Machine
from axonn_tune.specs.points import Point, PointFile, StepProbe
from tests.unit.calibration import synthetic

WORLD = 8


def calibrated(points: list[Point], *, ranks_per_host: int = 2) -> Calibration:
    """The profile of some points."""
    measured = PointFile(synthetic.setting(WORLD, ranks_per_host=ranks_per_host), tuple(points))
    return calibrate(measured, load_machine("localhost").document, name="found")


@pytest.fixture(scope="module")
def clean() -> Calibration:
    """That of points without noise."""
    return calibrated(synthetic.points(WORLD, synthetic.cluster(), noise=0.0))


@pytest.fixture(scope="module")
def noisy() -> Calibration:
    """That of points each off by up to a tenth."""
    return calibrated(synthetic.points(WORLD, synthetic.cluster(), noise=0.1))


def test_latency_and_bandwidth_of_each_collective_and_tier_are_found(clean: Calibration, noisy: Calibration) -> None:
    """Guards the whole way from points to a profile: α and β of each collective on two tiers, sharing included."""
    truth = synthetic.cluster()
    for done, tolerance in ((clean, 0.03), (noisy, 0.15)):
        found = done.machine
        assert [(tier.name, tier.ranks) for tier in found.tiers] == [("node", 2), ("network", None)]
        for kind in MEASURED_KINDS:
            for own, expected in zip(found.tiers, truth.tiers, strict=True):
                known = expected.used_by(kind).bandwidth_gb_per_s
                assert own.used_by(kind).bandwidth_gb_per_s == pytest.approx(known, rel=tolerance)
        for probe in synthetic.plan(WORLD).probes:
            if probe.what == "collective":
                predicted = synthetic.collective_s(probe, found, WORLD)
                assert predicted == pytest.approx(synthetic.collective_s(probe, truth, WORLD), rel=tolerance)


def test_groups_lie_on_nodes_as_in_the_world() -> None:
    """Guards nodes of four: of groups of three neighbours most span two nodes, though the first does not."""
    inner, outer = synthetic.cluster().tiers
    truth = synthetic.cluster().model_copy(update={"tiers": (inner.model_copy(update={"ranks": 4}), outer)})
    measured = PointFile(synthetic.setting(12, ranks_per_host=4), tuple(synthetic.points(12, truth, noise=0.0)))
    found = calibrate(measured, load_machine("localhost").document, name="found").machine
    for probe in synthetic.plan(12).probes:
        if probe.what == "collective":
            expected = synthetic.collective_s(probe, truth, 12)
            assert synthetic.collective_s(probe, found, 12) == pytest.approx(expected, rel=0.03)


def test_compute_rates_are_found(clean: Calibration) -> None:
    """Guards the joint fit of GEMMs, attention and steps, and memory's rate, which a copy in a cache is not."""
    found = clean.machine.accelerator
    peak = found.peak_tflops["fp32"]
    assert found.matmul_tile == 1
    assert {one: peak * share for one, share in found.matmul_efficiency.items()} == pytest.approx(
        {"NN": 0.05, "NT": 0.045, "TN": 0.04}, rel=0.06
    )
    assert peak * found.attention_forward_efficiency == pytest.approx(0.01, rel=0.1)
    assert peak * found.attention_backward_efficiency == pytest.approx(0.008, rel=0.1)
    assert found.memory_bandwidth_gb_per_s == pytest.approx(8.0, rel=0.03)
    assert found.memory_efficiency == pytest.approx(0.25, rel=0.1)
    # What a probe of a step costs is what the search says of one rank's computation.
    setting = synthetic.setting(WORLD)
    launch = setting.launches[0]
    (seconds,) = program_sample(StepProbe(launch=0), 1.0, clean.machine, setting).price(lambda same: same)
    searched = price(Job(launch.model, clean.machine, launch.workload), Layout.of(launch))
    assert seconds == pytest.approx(searched.compute_s, rel=1e-9)


def test_outliers_are_named_and_pull_little() -> None:
    """Guards robustness: one collective three times too slow is named, and changes what is predicted by little."""
    truth = synthetic.cluster()
    points = synthetic.points(WORLD, truth, noise=0.02)
    odd = next(point.probe for point in points if point.probe.what == "collective" and point.probe.size_bytes > 2**19)
    slowed = [
        point.model_copy(update={"seconds": 3 * point.seconds}) if point.probe == odd else point for point in points
    ]
    done = calibrated(slowed)
    assert done.machine.measured is not None
    assert len(done.machine.measured.outliers) == 1
    assert done.communication is not None
    assert done.communication.outliers == (odd,)
    for kind in MEASURED_KINDS:
        assert done.machine.tiers[1].used_by(kind).bandwidth_gb_per_s == pytest.approx(
            truth.tiers[1].used_by(kind).bandwidth_gb_per_s, rel=0.05
        )


def test_held_out_points_measure_the_error(noisy: Calibration) -> None:
    """Guards the check of a fit: what it had not seen is off by about the noise, and the profile says so."""
    assert noisy.machine.measured is not None
    assert 0.005 < (noisy.machine.measured.held_out_error or 0.0) < 0.1


def test_profile_is_written_and_read_back_equal(clean: Calibration) -> None:
    """Guards the document: every number with its source, and as the file says."""
    assert parse_document(to_yaml(clean.machine), schema=Machine) == clean.machine


def test_one_host_is_called_loopback() -> None:
    """Guards honesty: ranks that share a host's network stack have measured no network."""
    truth = synthetic.cluster()
    flat = truth.model_copy(update={"tiers": (truth.tiers[1],)})
    found = calibrated(synthetic.points(WORLD, flat, noise=0.0), ranks_per_host=8).machine
    assert [tier.name for tier in found.tiers] == ["loopback"]
    assert "CPU time, not a network" in found.description


def test_too_little_is_refused() -> None:
    """Guards calibrations cut off early: what is missing is named."""
    points = [
        point for point in synthetic.points(WORLD, synthetic.cluster(), noise=0.0) if point.probe.what != "attention"
    ]
    with pytest.raises(UsageError, match="not measured within the budget: attention"):
        calibrated(points)
    whole = synthetic.points(WORLD, synthetic.cluster(), noise=0.0)
    inside = [one for one in whole if one.probe.what != "collective" or (one.probe.group, one.probe.stride) == (2, 1)]
    with pytest.raises(UsageError, match="too little was measured over network level network: raise --budget"):
        calibrated(inside)
    reduced = [one for one in whole if one.probe.what != "collective" or one.probe.op != "all_gather"]
    found = calibrated(reduced).machine
    assert [set(tier.collectives or ()) for tier in found.tiers] == [{"reduce_scatter", "all_reduce", "all_to_all"}] * 2


def test_nodes_of_one_host_are_told_apart() -> None:
    """Guards `lab exec all -- axonn-tune calibrate`: all ranks have one host name, LOCAL_WORLD_SIZE tells its nodes."""
    points, one_host = synthetic.points(WORLD, synthetic.cluster(), noise=0.0), synthetic.setting(WORLD)
    places = tuple(
        place.model_copy(update={"node_ranks": 2, "network": f"net:[{rank}]"})
        for rank, place in enumerate(one_host.ranks)
    )
    measured = PointFile(one_host.model_copy(update={"ranks": places}), tuple(points))
    found = calibrate(measured, load_machine("localhost").document, name="found").machine
    assert [(tier.name, tier.ranks) for tier in found.tiers] == [("node", 2), ("network", None)]
    assert found.launcher.ranks_per_node == 2
    assert found.measured is not None
    assert found.measured.network.endswith("between 8 networks of 1 host")


def test_hosts_must_hold_equal_blocks() -> None:
    """Guards the tiers, which describe equal nodes of consecutive ranks."""
    with pytest.raises(UsageError, match="equal blocks"):
        calibrated(synthetic.points(WORLD, synthetic.cluster(), noise=0.0), ranks_per_host=3)


def test_points_tell_no_bandwidth_above_their_noise() -> None:
    """Guards short measurements on a busy host: a collective that takes as long at every size, beside one 10,000 times
    slower, ends in a profile and not in an error."""
    truth = synthetic.cluster()
    flat = CollectiveFactors(latency_factor=1.0, bandwidth_factor=1000.0)
    slow = CollectiveFactors(latency_factor=1.0, bandwidth_factor=0.01)
    outer = truth.tiers[1].model_copy(update={"collectives": {"all_gather": slow, "all_reduce": flat}})
    machine = truth.model_copy(update={"tiers": (outer,)})
    points = [
        point.model_copy(update={"seconds": 1e-5})
        if point.probe.what == "collective" and point.probe.op == "all_reduce"
        else point
        for point in synthetic.points(WORLD, machine, noise=0.0)
    ]
    (tier,) = calibrated(points, ranks_per_host=8).machine.tiers
    largest = max(point.probe.size_bytes for point in points if point.probe.what == "collective")
    assert tier.used_by("all_gather").bandwidth_gb_per_s < 0.1 * truth.tiers[1].bandwidth_gb_per_s
    assert tier.used_by("all_reduce").bandwidth_gb_per_s <= largest / 1e-5 / 1e9 / 0.04


def test_a_tier_that_is_never_the_tightest_still_has_rates() -> None:
    """Guards tiers behind a slower one: what the points show is taken, not nothing."""
    truth = synthetic.cluster()
    slow_inside = truth.tiers[0].model_copy(update={"bandwidth_gb_per_s": 1e-3})
    machine = truth.model_copy(update={"tiers": (slow_inside, truth.tiers[1])})
    found = calibrated(synthetic.points(WORLD, machine, noise=0.0)).machine
    assert all(set(tier.collectives or ()) == set(MEASURED_KINDS) for tier in found.tiers)
