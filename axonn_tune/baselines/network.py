"""Times of what Megatron-LM sends on a machine: collectives as in the 4D model, and sends between stages."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_tune.cost.collectives import collective_time_s, lines, route
from axonn_tune.grid import GroupShape
from axonn_tune.program.size import PLAIN
from axonn_tune.specs.machine import CollectiveKind, Machine, Tier


@dataclass(frozen=True)
class Traffic:
    """All communication of one kind in a step of one rank, and the part of it nothing hides."""

    kind: str
    seconds: float
    exposed_s: float


def transfer_time_s(size_bytes: float, *, stride: int, tiers: tuple[Tier, ...], launch_s: float) -> float:
    """Time to send `size_bytes` to the rank `stride` further, all ranks sending at once, s.

    The link crossed is that of the innermost tier whose domains hold both ends; over an outer tier
    every rank of a domain sends, so each gets its share of the domain's bandwidth.
    """
    position = next((i for i, tier in enumerate(tiers) if tier.ranks is None or stride < tier.ranks), len(tiers) - 1)
    senders = 1 if position == 0 else tiers[position - 1].ranks or 1
    return launch_s + tiers[position].latency_s + size_bytes * senders / tiers[position].bandwidth_bytes_per_s


class Network:
    """Prices what is sent in one world of ranks; remembers the lines of each group."""

    def __init__(self, machine: Machine, world: int, *, call_s: float = 0.0) -> None:
        """`call_s`: what the software adds to each collective."""
        self.machine = machine
        self.call_s = call_s
        self.world = world
        self._lines: dict[tuple[CollectiveKind, GroupShape], tuple[tuple[float, float], ...]] = {}

    def collective_s(self, kind: CollectiveKind, shape: GroupShape, size_bytes: float) -> float:
        """Time of one collective, s; nothing in a group of one."""
        key = (kind, shape)
        if key not in self._lines:
            found = lines(kind, route(shape, self.machine.tiers, self.world), self.machine)
            self._lines[key] = tuple((self.call_s + line.latency_s, line.bandwidth_bytes_per_s) for line in found)
        return float(collective_time_s(self._lines[key], size_bytes, PLAIN))

    def transfer_s(self, stride: int, size_bytes: float) -> float:
        """Time of one send to the next stage, s."""
        launch_s = self.machine.library.launch_s
        return transfer_time_s(size_bytes, stride=stride, tiers=self.machine.tiers, launch_s=launch_s)
