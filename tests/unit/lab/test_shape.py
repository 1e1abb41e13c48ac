"""What a lab is, in numbers and names."""

from __future__ import annotations

import pytest

from axonn_tune.errors import UsageError
from axonn_tune.lab.shape import Shape, parse_delay, parse_rate, show_rate

SHAPE = Shape(nodes=3, ranks_per_node=4, uplink_bits_per_s=2e8, port_bits_per_s=4e8)


def test_ranks_fill_one_node_after_the_other() -> None:
    """Guards placement: the same as torchrun's, which the cost model assumes."""
    assert [SHAPE.node_of(rank) for rank in (0, 3, 4, 11)] == [0, 0, 1, 2]
    assert [SHAPE.rank_named(SHAPE.name_of(rank)) for rank in range(12)] == list(range(12))
    place = SHAPE.environment(6, turn=2)
    assert {name: place[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")} == {
        "RANK": "6",
        "WORLD_SIZE": "12",
        "LOCAL_RANK": "2",
        "GROUP_RANK": "1",
    }
    assert SHAPE.environment(6)["MASTER_PORT"] != place["MASTER_PORT"], "the last run's port may not be free yet"


def test_a_wrong_rank_names_those_there_are() -> None:
    """Guards the message."""
    for wrong in ("3.0", "0.4", "7", "a.b"):
        with pytest.raises(UsageError, match=r"from 0\.0 to 2\.3"):
            SHAPE.rank_named(wrong)


def test_rates_and_delays_are_read_with_their_units() -> None:
    """Guards units: decimal prefixes, bit and not byte, and no number without a unit."""
    assert [parse_rate(text) for text in ("200mbit", "1gbit", "1.5 Gbit/s", "5000kbit")] == [2e8, 1e9, 1.5e9, 5e6]
    assert [parse_delay(text) for text in ("1ms", "250us", "0.5s")] == [1e-3, 2.5e-4, 0.5]
    assert show_rate(1.985e8) == "198.5 Mbit/s"
    for wrong in ("200", "200mb", "-1gbit", "1kbit", "1000gbit"):
        with pytest.raises(UsageError):
            parse_rate(wrong)
    for wrong in ("1", "5s", "ms"):
        with pytest.raises(UsageError):
            parse_delay(wrong)


@pytest.mark.parametrize("wrong", [(0, 1), (1, 0), (64, 3)])
def test_impossible_sizes_are_refused(wrong: tuple[int, int]) -> None:
    """Guards the limits: an address and a file descriptor each."""
    with pytest.raises(UsageError, match="1 to 128 ranks"):
        Shape(*wrong, uplink_bits_per_s=1e8, port_bits_per_s=1e8)
