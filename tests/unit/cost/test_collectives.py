"""Collective formulas against values worked out by hand."""

import math

import pytest

from axonn_tune.cost.collectives import collective_time_s, lines, route
from axonn_tune.grid import GroupShape
from axonn_tune.program.size import PLAIN
from axonn_tune.specs.machine import CollectiveFactors, Machine
from tests.unit.cost.machines import two_tier_machine

WORLD = 64
CONTIGUOUS_16 = GroupShape(((16, 1),))
STRIDED_4 = GroupShape(((4, 4),))
MB = 1e6


def by_algorithm(machine: Machine, kind: str, shape: GroupShape) -> dict[str, tuple[float, float]]:
    """`(latency_s, bandwidth)` of each algorithm."""
    found = lines(kind, route(shape, machine.tiers, WORLD), machine)  # type: ignore[arg-type]
    return {line.algorithm: (line.latency_s, line.bandwidth_bytes_per_s) for line in found}


def test_ring_all_gather_over_four_nodes() -> None:
    """Guards the ring: 12 hops inside, 3 of 4 outside; 15/16 of the buffer over one node's uplink."""
    machine = two_tier_machine(algorithms=("ring",))
    latency, bandwidth = by_algorithm(machine, "all_gather", CONTIGUOUS_16)["ring"]
    assert latency == pytest.approx(5e-6 + 12 * 2e-6 + 3 * 10e-6)
    assert bandwidth == pytest.approx(80e9 * 16 / 15)


def test_ring_all_reduce_is_two_passes() -> None:
    """Guards the factor 2 of an all-reduce in latency and bytes, launch counted once."""
    machine = two_tier_machine(algorithms=("ring",))
    gather = by_algorithm(machine, "all_gather", CONTIGUOUS_16)["ring"]
    reduce = by_algorithm(machine, "all_reduce", CONTIGUOUS_16)["ring"]
    assert reduce[0] - 5e-6 == pytest.approx(2 * (gather[0] - 5e-6))
    assert reduce[1] == pytest.approx(gather[1] / 2)


def test_strided_groups_share_the_uplink() -> None:
    """Guards sharing: four rings leave each node, each gets a quarter of 80 GB/s."""
    machine = two_tier_machine(algorithms=("ring",))
    latency, bandwidth = by_algorithm(machine, "all_gather", STRIDED_4)["ring"]
    assert latency == pytest.approx(5e-6 + 3 * 10e-6)
    assert bandwidth == pytest.approx(20e9 * 4 / 3)


def test_inside_a_node_nothing_is_shared() -> None:
    """Guards the inner tier: its bandwidth is per rank."""
    machine = two_tier_machine(algorithms=("ring",))
    latency, bandwidth = by_algorithm(machine, "reduce_scatter", GroupShape(((2, 2),)))["ring"]
    assert latency == pytest.approx(5e-6 + 2e-6)
    assert bandwidth == pytest.approx(200e9 * 2)


def test_tree_latency_grows_with_the_logarithm_of_nodes() -> None:
    """Guards the tree: up and down a chain of 4 and log2(4) levels of nodes; all-reduce only."""
    machine = two_tier_machine(algorithms=("ring", "tree"))
    latency, bandwidth = by_algorithm(machine, "all_reduce", CONTIGUOUS_16)["tree"]
    assert latency == pytest.approx(5e-6 + 2 * (3 * 2e-6 + 2 * 10e-6))
    assert bandwidth == pytest.approx(80e9 * 0.92 / 2)
    assert "tree" not in by_algorithm(machine, "all_gather", CONTIGUOUS_16)


def test_recursive_doubling_takes_log_steps_on_powers_of_two_only() -> None:
    """Guards Thakur's halving: 4 steps for 16 ranks, each leaving step with a quarter of the uplink."""
    machine = two_tier_machine(algorithms=("recursive",))
    latency, bandwidth = by_algorithm(machine, "reduce_scatter", CONTIGUOUS_16)["recursive"]
    assert latency == pytest.approx(5e-6 + 2 * 10e-6 + 2 * 2e-6)
    expected = (8 / 16 + 4 / 16) / 20e9 + (2 / 16 + 1 / 16) / 200e9
    assert bandwidth == pytest.approx(1 / expected)
    assert by_algorithm(machine, "all_gather", GroupShape(((3, 1),))) == {}


def test_hierarchical_moves_each_byte_across_once() -> None:
    """Guards intra-then-inter: 3/4 of the buffer inside, 3/4 across the node's whole uplink."""
    machine = two_tier_machine(algorithms=("hierarchical",))
    latency, bandwidth = by_algorithm(machine, "all_gather", CONTIGUOUS_16)["hierarchical"]
    assert latency == pytest.approx(5e-6 + 3 * 2e-6 + 3 * 10e-6)
    assert bandwidth == pytest.approx(1 / (0.75 / 200e9 + 0.75 / 80e9))
    assert by_algorithm(machine, "all_gather", STRIDED_4) == {}


def test_measured_shapes_override_the_counting_rule() -> None:
    """Guards `measured`: a shape that was measured is priced as measured, others by the rule."""
    machine = two_tier_machine(algorithms=("ring",), measured=[(1, 2, 76.0)])
    assert by_algorithm(machine, "all_gather", GroupShape(((2, 1),)))["ring"][1] == pytest.approx(76e9 * 2)
    assert by_algorithm(machine, "all_gather", GroupShape(((4, 1),)))["ring"][1] == pytest.approx(200e9 * 4 / 3)


def test_a_group_of_one_has_no_line_and_costs_nothing() -> None:
    """Guards that axes of size 1 are free."""
    machine = two_tier_machine(algorithms=("ring",))
    assert lines("all_reduce", route(GroupShape(()), machine.tiers, WORLD), machine) == ()
    assert collective_time_s((), 1e9, PLAIN) == 0.0


def test_the_library_takes_the_fastest_line_and_stays_monotone() -> None:
    """Guards the minimum over lines: small messages by latency, large by bandwidth, never cheaper when larger."""
    machine = two_tier_machine(algorithms=("ring", "tree"), protocols=[("simple", 1.0, 1.0), ("ll", 0.2, 0.25)])
    found = lines("all_reduce", route(CONTIGUOUS_16, machine.tiers, WORLD), machine)
    chosen = tuple((line.latency_s, line.bandwidth_bytes_per_s) for line in found)
    times = [float(collective_time_s(chosen, 2.0**power, PLAIN)) for power in range(31)]
    assert times == sorted(times)
    assert times[0] == pytest.approx(min(line.latency_s for line in found), rel=1e-3)
    assert times[-1] == pytest.approx(2.0**30 * 2 * 15 / 16 / 80e9, rel=0.01)


def test_unlimited_outer_tier_and_single_tier() -> None:
    """Guards machines with one tier only, such as a workstation."""
    machine = two_tier_machine(algorithms=("ring", "tree", "hierarchical"), nodes=False)
    path = route(CONTIGUOUS_16, machine.tiers, WORLD)
    assert path.outermost == 0
    found = {line.algorithm: line for line in lines("all_reduce", path, machine)}
    assert found["ring"].latency_s == pytest.approx(5e-6 + 30 * 2e-6)
    assert found["tree"].latency_s == pytest.approx(5e-6 + 30 * 2e-6)
    assert "hierarchical" not in found
    assert math.isfinite(found["ring"].bandwidth_bytes_per_s)


def test_reduction_in_the_switch_moves_the_buffer_once() -> None:
    """Guards NVLS: 0.76 of the rank's bandwidth inside; across four nodes the uplink carries it twice."""
    machine = two_tier_machine(algorithms=("in_switch",))
    latency, bandwidth = by_algorithm(machine, "all_reduce", GroupShape(((4, 1),)))["in_switch"]
    assert latency == pytest.approx(5e-6 + 50e-6 + 2e-6)
    assert bandwidth == pytest.approx(0.76 * 200e9)
    latency, bandwidth = by_algorithm(machine, "all_reduce", CONTIGUOUS_16)["in_switch"]
    assert latency == pytest.approx(5e-6 + 50e-6 + 2e-6 + 2 * 2 * 10e-6)
    assert bandwidth == pytest.approx(80e9 / 2)
    assert by_algorithm(machine, "all_gather", CONTIGUOUS_16) == {}
    assert by_algorithm(machine, "all_reduce", STRIDED_4) == {}


def test_direct_exchange_sends_all_that_leaves_a_node_at_once() -> None:
    """Guards Gloo's reduce-scatter: one latency; four ranks send the three quarters meant for other nodes."""
    machine = two_tier_machine(algorithms=("direct",))
    latency, bandwidth = by_algorithm(machine, "reduce_scatter", CONTIGUOUS_16)["direct"]
    assert latency == pytest.approx(5e-6 + 10e-6)
    assert bandwidth == pytest.approx(80e9 / (4 * 3 / 4))
    latency, bandwidth = by_algorithm(machine, "all_gather", GroupShape(((2, 2),)))["direct"]
    assert (latency, bandwidth) == pytest.approx((5e-6 + 2e-6, 2 * 200e9))
    assert by_algorithm(machine, "all_reduce", CONTIGUOUS_16) == {}


def test_a_collective_with_factors_of_its_own() -> None:
    """Guards calibrated profiles: factors of a tier change one collective, and scale with the tier's numbers."""
    machine = two_tier_machine(algorithms=("ring",))
    factors = {"all_gather": CollectiveFactors(latency_factor=3.0, bandwidth_factor=0.5)}
    outer = machine.tiers[1].model_copy(update={"collectives": factors})
    changed = machine.model_copy(update={"tiers": (machine.tiers[0], outer)})
    assert by_algorithm(changed, "all_reduce", STRIDED_4) == by_algorithm(machine, "all_reduce", STRIDED_4)
    latency, bandwidth = by_algorithm(changed, "all_gather", STRIDED_4)["ring"]
    assert latency == pytest.approx(5e-6 + 3 * 3.0 * 10e-6)
    assert bandwidth == pytest.approx(0.5 * 20e9 * 4 / 3)
    faster = changed.model_copy(
        update={"tiers": (machine.tiers[0], outer.model_copy(update={"bandwidth_gb_per_s": 160.0}))}
    )
    assert by_algorithm(faster, "all_gather", STRIDED_4)["ring"][1] == pytest.approx(2 * bandwidth)
