"""A lab in numbers and names: the lines given to `ip` and `tc`, what is measured of a network, and its profile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from axonn_tune.errors import UsageError
from axonn_tune.lab.links import profile, rates, rounds
from axonn_tune.lab.namespaces import limit, switch_limits, switch_links
from axonn_tune.lab.shape import Shape, parse_delay, parse_rate
from axonn_tune.processes import exit_code_of
from axonn_tune.specs.document import to_yaml
from axonn_tune.specs.loading import load_document
from axonn_tune.specs.machine import Machine

SHAPE = Shape(nodes=4, ranks_per_node=2, uplink_bits_per_s=2e8, port_bits_per_s=8e8, delay_s=1e-3)


def test_every_end_of_every_link_has_a_name_and_its_rate() -> None:
    """Guards both directions of both tiers, names of the kernel's 15 characters, and ranks placed as by torchrun.

    Netem, for kernels that have it, delays each packet between nodes once, short ones too.
    """
    links = dict(SHAPE.links())
    assert links == {
        **{f"axt-{end}{node}": 2e8 for end in ("up", "down") for node in range(4)},
        **{f"axt-port{rank}": 8e8 for rank in range(8)},
    }
    largest = Shape(nodes=128, ranks_per_node=1, uplink_bits_per_s=1e8, port_bits_per_s=1e8)
    assert all(len(name) <= 15 for name, _ in largest.links())
    made = "\n".join(switch_links(SHAPE, [f"/proc/self/fd/{number}" for number in range(8)]))
    assert all(made.count(f"{name} ") >= 2 for name in links), "made, and set up"
    assert made.count("master axt-leaf3") == 3, "an uplink and two ranks"
    delayed = [line.split()[3] for line in switch_limits(SHAPE, netem=True) if "netem delay 1000us" in line]
    assert sorted(delayed) == sorted(f"axt-up{node}" for node in range(4) for _ in "23")
    assert not any("netem" in line for line in switch_limits(SHAPE, netem=False))
    place = SHAPE.environment(6, turn=2)
    assert [place[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")] == ["6", "8", "0", "3"]
    assert SHAPE.environment(6)["MASTER_PORT"] != place["MASTER_PORT"], "the last run's port may not be free yet"


def test_lines_of_one_link() -> None:
    """Guards bursts (a larger one is free for small messages, a smaller one loses rate) and full duplex."""
    assert "htb rate 50000000bit burst 9100 " in "\n".join(limit("a", 5e7))
    assert "htb rate 800000000bit burst 50000 " in "\n".join(limit("a", 8e8))
    lines = list(limit("a", 1e8))
    assert sum("ceil 100000000bit" in line for line in lines) == 2
    assert any("classid 1:2 htb rate 10000000bit" in line and "prio 0" in line for line in lines)
    assert any("classid 1:3 htb rate 90000000bit" in line and "prio 1" in line for line in lines)
    assert lines[0].endswith("default 3")
    assert lines[-1].endswith("u32 match u16 0 0xffc0 at 2 flowid 1:2")


def test_verification_covers_every_uplink_and_a_node() -> None:
    """Guards `lab verify`: each node sends and receives, all ranks of a node share once, and ports are measured.

    Rates count the time that all streams ran: one that goes on alone must not count as if it had shared.
    """
    found = list(rounds(SHAPE))
    uplinks = [flow for one in found if one.what == "node" for flow in one.flows]
    assert sorted(SHAPE.node_of(source) for source, _ in uplinks) == [0, 1, 2, 3]
    assert sorted(SHAPE.node_of(target) for _, target in uplinks) == [0, 1, 2, 3]
    assert [one.rate_bits_per_s for one in found if one.together] == [2e8]
    assert [one.rate_bits_per_s for one in found if one.what == "rank"] == [8e8, 8e8]
    steady = [(0.1 * tick, 1_000_000 * tick) for tick in range(11)]
    longer = [*steady, *((1.0 + 0.1 * tick, 10_000_000 + 5_000_000 * tick) for tick in range(1, 11))]
    assert rates([steady, longer]) == pytest.approx([80e6, 80e6])
    assert rates([steady, [(5.0, 0)]]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("nodes", "ranks", "tiers"), [(4, 2, ["node", "cluster"]), (4, 1, ["cluster"]), (1, 4, ["node"])]
)
def test_profile_is_a_machine_with_the_rates_asked_for(
    nodes: int, ranks: int, tiers: list[str], tmp_path: Path
) -> None:
    """Guards `lab profile`: it loads, in every shape, with bits made bytes, α a round trip, provenance for all."""
    shape = Shape(nodes=nodes, ranks_per_node=ranks, uplink_bits_per_s=2e8, port_bits_per_s=4e8)
    machine = profile(shape, name="mine", rank_round_trip_s=2e-5, node_round_trip_s=5e-5)
    path = tmp_path / "mine.yaml"
    path.write_text(to_yaml(machine), encoding="utf-8")
    loaded = load_document(path, schema=Machine)
    assert loaded == machine
    assert [tier.name for tier in loaded.tiers] == tiers
    assert loaded.tiers[-1].bandwidth_bytes_per_s == pytest.approx(25e6 if nodes > 1 else 50e6)
    assert loaded.tiers[-1].latency_s == pytest.approx(5e-5 if nodes > 1 else 2e-5)
    assert loaded.tiers[-1].ranks is None


def test_rates_delays_and_sizes_are_read_with_their_units_and_limits() -> None:
    """Guards units: decimal prefixes, bit and not byte, and no number without a unit; an address for every rank."""
    assert [parse_rate(text) for text in ("200mbit", "1gbit", "1.5 Gbit/s", "5000kbit")] == [2e8, 1e9, 1.5e9, 5e6]
    assert [parse_delay(text) for text in ("1ms", "250us", "0.5s")] == [1e-3, 2.5e-4, 0.5]
    for wrong in ("200", "200mb", "-1gbit", "1kbit", "1000gbit"):
        with pytest.raises(UsageError):
            parse_rate(wrong)
    for wrong in ("1", "5s", "ms"):
        with pytest.raises(UsageError):
            parse_delay(wrong)
    for nodes, ranks in ((0, 1), (1, 0), (64, 3)):
        with pytest.raises(UsageError, match="1 to 128 ranks"):
            Shape(nodes, ranks, uplink_bits_per_s=1e8, port_bits_per_s=1e8)


def test_signal_while_ranks_start_reaches_them() -> None:
    """Guards a stop during start-up: it waits for the ranks, and commands they become do not ignore it."""
    program = (
        "import os, signal, axonn_tune.processes as processes\n"
        "number = signal.SIGUSR2\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [number])\n"
        "signal.signal(number, signal.SIG_IGN)\n"
        "os.kill(os.getpid(), number)\n"
        "run = lambda rank: os.execvp('sleep', ['sleep', '30'])\n"
        "print(sorted(processes.fork_ranks(2, run, passed_on=[number])) == [(0, -number), (1, -number)])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "True\n"


def test_one_exit_code_for_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards what a caller sees: training failed before all else, then the first word, then a signal, by name."""
    assert exit_code_of([(0, 0), (1, 0)]) == 0
    assert exit_code_of([(1, 130), (0, 6)]) == 6
    assert exit_code_of([(1, 75), (0, 75)]) == 75
    assert exit_code_of([(1, 2), (0, 1)]) == 2
    assert exit_code_of([(1, -9), (0, 6)]) == 6
    assert capsys.readouterr().err == ""
    assert exit_code_of([(1, -9), (0, -15)]) == 6
    assert capsys.readouterr().err == "Error: rank 0: ended by SIGTERM; rank 1: ended by SIGKILL\n"
