"""Shape of a lab: nodes, ranks per node, rates; the names of its parts; requests and results of its ranks.

Two network levels. A rank's port bounds what one rank sends and receives; a node's uplink bounds what all its
ranks together exchange with other nodes, in each direction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from axonn_tune.errors import UsageError

PREFIX = "axt"
INTERFACE = f"{PREFIX}0"
"""A rank's only network interface, in its own namespace."""
MTU_BYTES = 9000
MOST_RANKS = 128
"""One address and one file descriptor each; far more than a host can run."""
_NETWORK = "10.77.0"
_FIRST_PORT, _PORTS = 29500, 1000
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(k|m|g)bit(?:/s)?", re.IGNORECASE)
_RATE_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", re.IGNORECASE)
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LEAST_BITS_PER_S, _MOST_BITS_PER_S = 1e6, 100e9


@dataclass(frozen=True)
class Shape:
    """An emulated cluster. delay_s: added to each crossing between nodes, one way."""

    nodes: int
    ranks_per_node: int
    uplink_bits_per_s: float
    port_bits_per_s: float
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks_per_node < 1 or self.world > MOST_RANKS:
            raise UsageError(
                f"{self.nodes} nodes × {self.ranks_per_node} ranks = {self.world}: a lab has 1 to {MOST_RANKS} ranks"
            )

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """The node a rank is on: ranks fill one node after the other."""
        return rank // self.ranks_per_node

    def ranks_of(self, node: int) -> range:
        """The ranks on a node."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def rank_named(self, name: str) -> int:
        """The rank of `NODE.RANK`, both from 0; UsageError with what there is."""
        match = re.fullmatch(r"(\d+)\.(\d+)", name)
        node, local = (int(match[1]), int(match[2])) if match else (self.nodes, 0)
        if node >= self.nodes or local >= self.ranks_per_node:
            last = f"{self.nodes - 1}.{self.ranks_per_node - 1}"
            raise UsageError(f"no rank {name!r}: this lab has NODE.RANK from 0.0 to {last}, `all`, and `switch`")
        return node * self.ranks_per_node + local

    def name_of(self, rank: int) -> str:
        """`NODE.RANK`, both from 0."""
        return f"{self.node_of(rank)}.{rank % self.ranks_per_node}"

    def links(self) -> Iterator[tuple[str, float]]:
        """Every rate-limited end in the switch's namespace, with its rate in bit/s."""
        for node in range(self.nodes):
            yield part("up", node), self.uplink_bits_per_s
            yield part("down", node), self.uplink_bits_per_s
        for rank in range(self.world):
            yield part("port", rank), self.port_bits_per_s

    def environment(self, rank: int, *, turn: int = 0) -> dict[str, str]:
        """Variables of a rank as torchrun sets them, and Gloo's interface. turn: sets the port of a run."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(rank % self.ranks_per_node),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "GROUP_RANK": str(self.node_of(rank)),
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(_FIRST_PORT + turn % _PORTS),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }

    def words(self) -> str:
        """For a person."""
        text = f"{self.nodes} nodes × {self.ranks_per_node} ranks, uplink {show_rate(self.uplink_bits_per_s)}"
        delay = f", delay {self.delay_s * 1e3:g} ms" if self.delay_s else ""
        return f"{text}, port {show_rate(self.port_bits_per_s)}{delay}"


def address(rank: int) -> str:
    """A rank's address, which only means something inside its lab."""
    return f"{_NETWORK}.{rank + 1}"


def part(kind: Literal["leaf", "up", "down", "port"], number: int) -> str:
    """Name of a node's bridge, of the two ends of its uplink, or of the switch's end of a rank's link.

    An end limits what it sends: `up` what a node sends, `down` what it receives, `port` what a rank receives.
    """
    return f"{PREFIX}-{kind}{number}"


def parse_rate(text: str) -> float:
    """`200mbit`, `1gbit`, `500kbit` in bit/s, decimal prefixes as `tc` has them; UsageError otherwise."""
    rate = _parsed(text, _RATE, _RATE_UNITS, "no rate; write it as 200mbit or 1gbit")
    if not _LEAST_BITS_PER_S <= rate <= _MOST_BITS_PER_S:
        raise UsageError(f"{text!r}: a rate is from 1mbit to 100gbit")
    return rate


def parse_delay(text: str) -> float:
    """`1ms`, `250us` in s; UsageError otherwise."""
    delay_s = _parsed(text, _TIME, _TIME_UNITS, "no time; write it as 1ms or 250us")
    if delay_s > 1:
        raise UsageError(f"{text!r}: a delay is at most 1s")
    return delay_s


def _parsed(text: str, pattern: re.Pattern[str], units: dict[str, float], otherwise: str) -> float:
    match = pattern.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is {otherwise}")
    return float(match[1]) * units[match[2].lower()]


def show_rate(bits_per_s: float) -> str:
    """Bit/s as text: `198 Mbit/s`."""
    unit, scale = ("Gbit/s", 1e9) if bits_per_s >= 1e9 else ("Mbit/s", 1e6)
    return f"{bits_per_s / scale:.4g} {unit}"


@dataclass(frozen=True)
class RunRequest:
    """One run: a function as `module:name`, each rank's arguments, and where modules are looked for."""

    function: str
    each: list[tuple[Any, ...]]
    path: tuple[str, ...]
    realtime: bool


@dataclass(frozen=True)
class RankResult:
    """Result of one rank. code: negative for a signal; error: what it raised."""

    rank: int
    code: int
    value: Any = None
    error: str | None = None
