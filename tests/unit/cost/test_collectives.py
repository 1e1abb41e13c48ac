"""Collective formulas against values worked out by hand, and ring edges that leave a domain counted one by one."""

import math
from typing import Any

import pytest

from axonn_tune.cost.collectives import collective_time_s, crossing, lines, route, transfer_time_s
from axonn_tune.grid import AXES, Grid, GroupShape, distinct_orders, factorizations
from axonn_tune.program.operations import PLAIN, Routing
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.machine import CollectiveFactors, Machine
from tests.unit.cost.machines import two_tier_machine

WORLD = 64
CONTIGUOUS_16, STRIDED_4 = GroupShape(((16, 1),)), GroupShape(((4, 4),))
NODE, NEXT_BUT_ONE, PAIR, THREE = (GroupShape((level,)) for level in ((4, 1), (2, 2), (2, 1), (3, 1)))
LAUNCH, IN, OUT = 5e-6, 2e-6, 10e-6
"""Fixed latencies of the machine: of a call, of a hop inside a node and of one between nodes, s. Its bandwidths are
200 GB/s a rank inside, 80 GB/s a node outside."""


def by_algorithm(machine: Machine, kind: Any, shape: GroupShape) -> dict[str, tuple[float, float]]:
    """`(latency_s, bandwidth)` of each algorithm."""
    found = lines(kind, route(shape, machine.tiers, WORLD), machine)
    return {line.algorithm: (line.latency_s, line.bandwidth_bytes_per_s) for line in found}


@pytest.mark.parametrize(
    ("algorithm", "kind", "shape", "latency_s", "bandwidth"),
    [
        # 12 hops inside, 3 of 4 outside; 15/16 of the buffer over one node's uplink
        ("ring", "all_gather", CONTIGUOUS_16, 12 * IN + 3 * OUT, 80e9 * 16 / 15),
        # an all-reduce is two passes, the launch counted once
        ("ring", "all_reduce", CONTIGUOUS_16, 2 * (12 * IN + 3 * OUT), 80e9 * 8 / 15),
        # four rings leave each node, each gets a quarter of 80 GB/s
        ("ring", "all_gather", STRIDED_4, 3 * OUT, 20e9 * 4 / 3),
        # inside a node nothing is shared
        ("ring", "reduce_scatter", NEXT_BUT_ONE, IN, 200e9 * 2),
        # up and down a chain of 4 and log2(4) levels of nodes; all-reduce only
        ("tree", "all_reduce", CONTIGUOUS_16, 2 * (3 * IN + 2 * OUT), 80e9 * 0.92 / 2),
        ("tree", "all_gather", CONTIGUOUS_16, None, None),
        # Thakur's halving: 4 steps for 16 ranks, each leaving step with a quarter of the uplink; powers of two only
        ("recursive", "reduce_scatter", CONTIGUOUS_16, 2 * OUT + 2 * IN, 1 / (12 / 16 / 20e9 + 3 / 16 / 200e9)),
        ("recursive", "all_gather", THREE, None, None),
        # 3/4 of the buffer inside, 3/4 across the node's whole uplink
        ("hierarchical", "all_gather", CONTIGUOUS_16, 3 * IN + 3 * OUT, 1 / (0.75 / 200e9 + 0.75 / 80e9)),
        ("hierarchical", "all_gather", STRIDED_4, None, None),
        # NVLS: 0.76 of the rank's bandwidth inside; across four nodes the uplink carries the buffer twice
        ("in_switch", "all_reduce", NODE, 50e-6 + IN, 0.76 * 200e9),
        ("in_switch", "all_reduce", CONTIGUOUS_16, 50e-6 + IN + 2 * 2 * OUT, 80e9 / 2),
        ("in_switch", "all_gather", CONTIGUOUS_16, None, None),
        ("in_switch", "all_reduce", STRIDED_4, None, None),
        # Gloo: one latency; four ranks send the three quarters meant for other nodes
        ("direct", "reduce_scatter", CONTIGUOUS_16, OUT, 80e9 / (4 * 3 / 4)),
        ("direct", "all_gather", NEXT_BUT_ONE, IN, 2 * 200e9),
        ("direct", "all_reduce", CONTIGUOUS_16, None, None),
    ],
)
def test_algorithms_by_hand(
    algorithm: str, kind: str, shape: GroupShape, latency_s: float | None, bandwidth: float | None
) -> None:
    """Guards every algorithm: hops, bytes and shared links, and what each does not do."""
    found = by_algorithm(two_tier_machine(algorithms=(algorithm,)), kind, shape).get(algorithm)
    assert found == (None if latency_s is None else pytest.approx((LAUNCH + latency_s, bandwidth)))


def test_numbers_of_a_profile() -> None:
    """Guards measured shapes, priced as measured, and one collective's factors, which scale with the tier's numbers."""
    measured = two_tier_machine(algorithms=("ring",), measured=[(1, 2, 76.0)])
    assert by_algorithm(measured, "all_gather", PAIR)["ring"][1] == pytest.approx(76e9 * 2)
    assert by_algorithm(measured, "all_gather", NODE)["ring"][1] == pytest.approx(200e9 * 4 / 3)
    machine = two_tier_machine(algorithms=("ring",))
    factors = {"all_gather": CollectiveFactors(latency_factor=3.0, bandwidth_factor=0.5)}
    for gb_per_s in (80.0, 160.0):
        outer = machine.tiers[1].model_copy(update={"collectives": factors, "bandwidth_gb_per_s": gb_per_s})
        changed = machine.model_copy(update={"tiers": (machine.tiers[0], outer)})
        expected = (LAUNCH + 3 * 3.0 * OUT, 0.5 * gb_per_s / 4 * 1e9 * 4 / 3)
        assert by_algorithm(changed, "all_gather", STRIDED_4)["ring"] == pytest.approx(expected)
        reduced = by_algorithm(changed, "all_reduce", STRIDED_4)["ring"]
        assert reduced == pytest.approx((LAUNCH + 2 * 3 * OUT, gb_per_s / 4 * 1e9 * 2 / 3))


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
    later = lines("all_reduce", route(CONTIGUOUS_16, machine.tiers, WORLD), machine, call_s=1e-3)
    assert [one.latency_s - 1e-3 for one in later] == pytest.approx([one.latency_s for one in found])


def test_a_single_tier() -> None:
    """Guards machines with one tier only, such as a workstation."""
    machine = two_tier_machine(algorithms=("ring", "tree", "hierarchical"), nodes=False)
    found = by_algorithm(machine, "all_reduce", CONTIGUOUS_16)
    assert found["ring"][0] == found["tree"][0] == pytest.approx(LAUNCH + 30 * IN)
    assert set(found) == {"ring", "tree"}
    assert math.isfinite(found["ring"][1])


def counted(groups: list[tuple[int, ...]], domain: int) -> tuple[int, int]:
    """Most edges of one ring, and most edges of all rings leaving one domain, by walking every ring."""
    leaving: dict[int, int] = {}
    most = 0
    for group in groups:
        edges = 0
        for position, rank in enumerate(group):
            following = group[(position + 1) % len(group)]
            if following // domain != rank // domain:
                edges += 1
                leaving[rank // domain] = leaving.get(rank // domain, 0) + 1
        most = max(most, edges)
    return most, max(leaving.values(), default=0)


@pytest.mark.parametrize("world", [8, 12, 24, 36])
def test_crossings_are_exact_for_one_axis_and_never_too_optimistic_for_two(world: int) -> None:
    """Guards link sharing, also where groups straddle nodes (18 to 46% error without it), and the rounding for `xy`."""
    for row in factorizations(world).tolist():
        for order in distinct_orders(tuple(row)):
            grid = Grid(*row, order=order)
            for axis in (*AXES, "xy") if world in (8, 24) else AXES:
                shape, groups = grid.group_shape(axis), list(grid.groups(axis))
                for domain in (2, 3, 4, 6, 8):
                    found, (edges, sharing) = crossing(shape, domain, world), counted(groups, domain)
                    if axis != "xy":
                        assert (found.edges, found.sharing) == (edges, sharing), (grid, axis, domain)
                    elif domain != 6:
                        assert edges <= found.edges <= shape.size or not shape.levels
                        assert sharing <= found.sharing <= domain


@pytest.mark.parametrize(
    ("shape", "algorithm", "bandwidth"),
    [
        # Inside a node as an all-gather of the buffer: 3/4 of it leave a rank.
        (NODE, "ring", 200e9 * 4 / 3),
        # Across four nodes each of four ranks sends 3/4 of its own buffer out of a node.
        (CONTIGUOUS_16, "direct", 80e9 / (4 * 3 / 4)),
        (STRIDED_4, "direct", 80e9 / (4 * 3 / 4)),
    ],
)
def test_an_all_to_all_by_hand(shape: GroupShape, algorithm: str, bandwidth: float) -> None:
    """Guards what leaves a node: a ring would pass it on over one link for the whole node."""
    machine = two_tier_machine(algorithms=("ring",))
    found = lines("all_to_all", route(shape, machine.tiers, WORLD), machine)
    assert {line.algorithm for line in found} == {algorithm}
    assert found[0].bandwidth_bytes_per_s == pytest.approx(bandwidth)


def test_a_measured_all_to_all_prices_tokens_on_their_way_to_experts() -> None:
    """Guards calibrated profiles: α and β are those of the all-to-all, and of a dispatcher that sends a copy each."""
    machine = two_tier_machine(algorithms=("ring",))
    library = machine.library.model_copy(
        update={"algorithms": machine.library.algorithms | {"all_to_all": ("direct",)}}
    )
    factors = {"all_to_all": CollectiveFactors(latency_factor=3.0, bandwidth_factor=0.5)}
    tiers = tuple(tier.model_copy(update={"collectives": factors}) for tier in machine.tiers)
    measured, path = machine.model_copy(update={"library": library, "tiers": tiers}), route(NODE, tiers, WORLD)
    (line,) = lines("all_to_all", path, measured)
    assert (line.latency_s, line.bandwidth_bytes_per_s) == pytest.approx((5e-6 + 3 * 2e-6, 0.5 * 200e9 * 4 / 3))
    copies, once = (("dispatch", Routing(8, 2, 1, 1, name)) for name in ("alltoall", "deepep"))
    assert lines(copies, path, measured) == (line,)
    assert lines(once, path, measured) == lines(once, path, machine)


@pytest.mark.parametrize(
    ("stages", "bandwidth"),
    [
        # one link of xGMI, of the seven that a ring over all ranks has
        (GroupShape(((8, 1),)), 47.7e9),
        (GroupShape(((2, 4),)), 47.7e9),
        # behind the node its eight ranks share what leaves it
        (GroupShape(((2, 8),)), 357e9 / 8),
    ],
)
def test_a_message_has_the_link_between_two_ranks(stages: GroupShape, bandwidth: float) -> None:
    """Of pipeline stages, by what a larger message takes more."""
    machine = load_machine("mi300x").document
    small_s, large_s = (transfer_time_s(size, stages=stages, machine=machine, world=stages.span) for size in (1e6, 1e8))
    assert float(large_s - small_s) == pytest.approx((1e8 - 1e6) / bandwidth)
