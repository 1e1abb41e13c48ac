"""Fits find the numbers that points were made of."""

from __future__ import annotations

import pytest

from axonn_tune.calibration.profile import Calibration, calibrate
from axonn_tune.errors import UsageError
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.document import to_yaml
from axonn_tune.specs.loading import parse_document
from axonn_tune.specs.machine import COLLECTIVE_KINDS, Machine
from axonn_tune.specs.points import Point, PointFile
from tests.unit.calibration import synthetic

WORLD = 8


def calibrated(points: list[Point], *, ranks_per_host: int = 2) -> Calibration:
    """The profile of some points."""
    measured = PointFile(synthetic.setting(WORLD, ranks_per_host=ranks_per_host), tuple(points))
    return calibrate(measured, load_machine("localhost").document, name="found")


@pytest.fixture(scope="module")
def outline() -> Machine:
    """Tiers and algorithms as calibrate lays them, whatever the numbers."""
    template = synthetic.cluster(two_tiers())
    return calibrated(synthetic.points(WORLD, template, noise=0.0)).machine


def two_tiers() -> Machine:
    """The localhost template with two tiers, and Gloo's algorithms."""
    base = load_machine("localhost").document
    inner = base.tiers[0].model_copy(update={"name": "node", "ranks": 2})
    algorithms = base.library.algorithms | {"reduce_scatter": ("direct",)}
    return base.model_copy(
        update={
            "tiers": (inner, base.tiers[0].model_copy(update={"name": "network"})),
            "library": base.library.model_copy(update={"algorithms": algorithms}),
        }
    )


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.002), (0.1, 0.15)])
def test_latency_and_bandwidth_of_each_collective_and_tier_are_found(noise: float, tolerance: float) -> None:
    """Guards the whole way from points to a profile: α and β of three collectives on two tiers, sharing included."""
    truth = synthetic.cluster(two_tiers())
    found = calibrated(synthetic.points(WORLD, truth, noise=noise)).machine
    assert [tier.name for tier in found.tiers] == ["node", "network"]
    for kind in COLLECTIVE_KINDS:
        outer, expected = found.tiers[1].used_by(kind), truth.tiers[1].used_by(kind)
        assert outer.bandwidth_gb_per_s == pytest.approx(expected.bandwidth_gb_per_s, rel=tolerance)
        inner, expected = found.tiers[0].used_by(kind), truth.tiers[0].used_by(kind)
        assert inner.bandwidth_gb_per_s == pytest.approx(expected.bandwidth_gb_per_s, rel=tolerance)
    for probe in synthetic.plan(WORLD).probes:
        if probe.what == "collective":
            predicted = synthetic.collective_s(probe, found, WORLD)
            assert predicted == pytest.approx(synthetic.collective_s(probe, truth, WORLD), rel=max(0.01, noise))


def test_compute_rates_are_found() -> None:
    """Guards the joint fit of products, attention and steps, and memory's rate, which a copy in a cache is not."""
    truth = synthetic.COMPUTE
    found = calibrated(synthetic.points(WORLD, synthetic.cluster(two_tiers()), noise=0.02)).compute
    assert found.tile == 1
    assert found.flops_per_s["NN"] == pytest.approx(1 / truth["NN"], rel=0.05)
    assert found.flops_per_s["TN"] == pytest.approx(1 / truth["TN"], rel=0.05)
    assert found.memory_bytes_per_s == pytest.approx(1 / truth["byte_s"], rel=0.1)
    assert found.copy_bytes_per_s == pytest.approx(8e9, rel=0.03)


def test_outliers_are_named_and_pull_little() -> None:
    """Guards robustness: one collective three times too slow is named, and changes what is predicted by little."""
    truth = synthetic.cluster(two_tiers())
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
    for kind in COLLECTIVE_KINDS:
        assert done.machine.tiers[1].used_by(kind).bandwidth_gb_per_s == pytest.approx(
            truth.tiers[1].used_by(kind).bandwidth_gb_per_s, rel=0.05
        )


def test_held_out_points_measure_the_error() -> None:
    """Guards the check of a fit: what it had not seen is off by about the noise, and the profile says so."""
    truth = synthetic.cluster(two_tiers())
    measured = calibrated(synthetic.points(WORLD, truth, noise=0.1)).machine.measured
    assert measured is not None
    assert measured.held_out_error is not None
    assert 0.005 < measured.held_out_error < 0.1


def test_profile_is_written_and_read_back_equal(outline: Machine) -> None:
    """Guards the document: every number with its source, and as the file says."""
    assert parse_document(to_yaml(outline), schema=Machine) == outline


def test_one_host_is_called_loopback() -> None:
    """Guards honesty: ranks that share a host's network stack have measured no network."""
    flat = two_tiers()
    flat = flat.model_copy(update={"tiers": (flat.tiers[1],)})
    found = calibrated(synthetic.points(WORLD, flat, noise=0.0), ranks_per_host=8).machine
    assert [tier.name for tier in found.tiers] == ["loopback"]
    assert "CPU time, not a network" in found.description


def test_too_little_is_refused() -> None:
    """Guards calibrations cut off early: what is missing is named."""
    points = [point for point in synthetic.points(WORLD, two_tiers(), noise=0.0) if point.probe.what != "attention"]
    with pytest.raises(UsageError, match="not measured within the budget: attention"):
        calibrated(points)


def test_nodes_of_one_host_are_told_apart() -> None:
    """Guards `lab exec all -- axonn-tune calibrate`: all ranks have one host name, LOCAL_WORLD_SIZE tells its nodes."""
    points, one_host = synthetic.points(WORLD, synthetic.cluster(two_tiers()), noise=0.0), synthetic.setting(WORLD)
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
        calibrated(synthetic.points(WORLD, synthetic.cluster(two_tiers()), noise=0.0), ranks_per_host=3)


def test_a_tier_that_is_never_the_tightest_still_has_rates() -> None:
    """Guards tiers behind a slower one: what the points show at least is taken, not nothing."""
    fast = synthetic.cluster(two_tiers())
    slow_inside = fast.tiers[0].model_copy(update={"bandwidth_gb_per_s": 1e-3})
    machine = fast.model_copy(update={"tiers": (slow_inside, fast.tiers[1].model_copy(update={"collectives": None}))})
    found = calibrated(synthetic.points(WORLD, machine, noise=0.0)).machine
    assert all(set(tier.collectives or ()) == set(COLLECTIVE_KINDS) for tier in found.tiers)
