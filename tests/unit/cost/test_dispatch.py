"""Bytes and time of dispatch against numbers computed by hand."""

from dataclasses import replace

import numpy as np
import pytest

from axonn_tune.cost.dispatch import Links, Routing, dispatched, distinct_destinations, sent_bytes
from axonn_tune.errors import UnknownNameError
from axonn_tune.frameworks.dispatchers import find_dispatcher

V3 = Routing(256, 8)
LIMITED = Routing(256, 8, groups=8, chosen=4)
LINKS = Links(node_bytes_per_s=100.0, network_bytes_per_s=10.0, node_ranks=2)


def test_two_of_four_experts_on_two_ranks() -> None:
    """Both on one rank: 1 of 6 pairs for each rank, so 2·(1 − 1/6)."""
    assert distinct_destinations(2.0, Routing(4, 2)) == pytest.approx(5 / 3)


def test_one_group_of_two() -> None:
    """Both experts in the chosen group of two: one node of two, and both of its ranks."""
    routing = Routing(4, 2, groups=2, chosen=1)
    assert distinct_destinations(np.array([1.0, 2.0, 4.0]), routing) == pytest.approx([1, 1, 2])


def test_nodes_of_deepseek_v3() -> None:
    """Columns of layouts, with and without routing groups.

    Four nodes hold 2 of 8 groups each: none, one or both are chosen in 15, 40 and 15 of 70 cases, and the 8 experts
    then miss them with 1, C(96, 8)/C(128, 8) = 0.0926 and 0.0031: 4·(1 − 0.2679).
    """
    nodes = np.array([2.0, 4.0, 8.0])
    assert distinct_destinations(nodes, V3) == pytest.approx([1.99, 3.61, 5.29], abs=0.006)
    assert distinct_destinations(nodes, LIMITED) == pytest.approx([1.926, 2.928, 3.629], abs=0.001)


@pytest.mark.parametrize("n", [3.0, 1.5])
def test_what_does_not_divide_is_refused(n: float) -> None:
    """No count of destinations is rounded."""
    with pytest.raises(ValueError, match="do not divide"):
        distinct_destinations(n, V3)


def test_slowest_level_and_the_fixed_time_count() -> None:
    """Four ranks on two nodes, one expert a rank, K = 2: 1.5·60 bytes inside at 100, 1·60 across at 10 (all-to-all).

    Distinct ranks are 2, distinct nodes 5/3: 90 bytes inside, 50 across.
    """
    copies = replace(find_dispatcher("alltoall"), reached_node=1.0, reached_network=1.0, dispatch_s=1.0, combine_s=2.0)
    distinct, routing = replace(copies, counting="rank"), Routing(4, 2)
    assert sent_bytes(4.0, 2.0, 60.0, copies, routing) == pytest.approx([90, 60])
    assert sent_bytes(4.0, 2.0, 60.0, distinct, routing) == pytest.approx([90, 50])
    assert dispatched(4.0, 60.0, copies, routing, LINKS) == pytest.approx(7)
    assert dispatched(4.0, 60.0, distinct, routing, LINKS, combine=True) == pytest.approx(7)


def test_unknown_dispatcher_names_the_nearest() -> None:
    """A slip of the keyboard is answered with what was meant."""
    with pytest.raises(UnknownNameError, match="hybridep"):
        find_dispatcher("hybriddep")
