"""Time of one collective: each algorithm is a line, latency + bytes / bandwidth; the library takes the lowest.

p ranks, `bytes` the full (gathered or reduced) buffer, α_t the latency of a hop over tier t, β the
bandwidth of one ring's slowest link after sharing. Bandwidths are algorithm bandwidths: full buffer
over time. Sources:

- ring, recursive: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations
  in MPICH", IJHPCA 19(1), 2005, sections 4.1 to 4.4.
- ring latency by hop kind, tree: NCCL 2.30, `src/graph/tuning.cc`.
- direct: the message counts alone; every rank of a domain sends at once.
- sharing of links: arXiv 2305.13525, equation 7, with edges counted per link instead of rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from axonn_tune.cost.arithmetic import Arithmetic, Column
from axonn_tune.cost.placement import crossing
from axonn_tune.grid import GroupShape
from axonn_tune.specs.machine import Algorithm, CollectiveKind, Machine, Protocol, Tier

TREE_BANDWIDTH_SHARE = 0.92
"""A tree reaches this share of the ring's bandwidth (NCCL tuning.cc)."""

IN_SWITCH_SHARE = 0.76
"""Share of a rank's bandwidth that a reduction in the switch reaches."""

IN_SWITCH_LATENCY_S = 50e-6
"""Fixed latency of a reduction in the switch: fits H100, H200, B200 and B300 (NCCL tuning.cc: 18 to 25 µs)."""

_PASSES: dict[CollectiveKind, int] = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
"""Times the buffer goes around: an all-reduce is a reduce-scatter and an all-gather."""


@dataclass(frozen=True)
class Line:
    """One way to run a collective: time = latency_s + bytes / bandwidth_bytes_per_s."""

    algorithm: str
    protocol: str
    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class Route:
    """A group on a machine: hops of its ring by outermost tier crossed, and its bandwidth after sharing.

    sharing: rings on each tier's busiest link, 0 on tiers that are not crossed; measured: the bandwidth is
    one that the profile gives for just this shape.
    """

    size: int
    hops: tuple[int, ...]
    domains: tuple[int, ...]
    outermost: int
    sharing: tuple[int, ...]
    bandwidth_bytes_per_s: float
    measured: bool = False

    def over(self, tiers: tuple[Tier, ...]) -> Route:
        """The same over tiers of other bandwidths."""
        if self.measured or self.size == 1:
            return self
        return replace(self, bandwidth_bytes_per_s=_bandwidth(self.sharing, tiers))


def route(shape: GroupShape, tiers: tuple[Tier, ...], world: int) -> Route:
    """Lay a group's ring over the tiers.

    `hops[t]` counts the edges whose outermost crossed tier is t; `domains[t]` the domains of the
    next inner tier that one group touches (`domains[0]` is the group's size). A group of one has
    `outermost` -1: it sends nothing.
    """
    if shape.size == 1:
        return Route(size=1, hops=(), domains=(), outermost=-1, sharing=(), bandwidth_bytes_per_s=math.inf)
    inner = [None if position == 0 else tiers[position - 1].ranks for position in range(len(tiers))]
    crossings = [crossing(shape, domain, world) for domain in inner[1:]]
    reaching = [shape.size, *(found.edges for found in crossings)]
    hops = tuple(
        count - (reaching[position + 1] if position + 1 < len(reaching) else 0)
        for position, count in enumerate(reaching)
    )
    outermost = max(position for position, count in enumerate(reaching) if count)
    sharing = (1, *(found.sharing if found.edges else 0 for found in crossings))
    measured = _measured_bandwidth(shape, tiers[outermost])
    return Route(
        size=shape.size,
        hops=hops,
        domains=tuple(max(count, 1) for count in reaching),
        outermost=outermost,
        sharing=sharing,
        bandwidth_bytes_per_s=_bandwidth(sharing, tiers) if measured is None else measured,
        measured=measured is not None,
    )


def _bandwidth(sharing: tuple[int, ...], tiers: tuple[Tier, ...]) -> float:
    """Bandwidth of one ring: what its slowest link leaves it, bytes/s."""
    return min(tier.bandwidth_bytes_per_s / rings for tier, rings in zip(tiers, sharing, strict=True) if rings)


def _measured_bandwidth(shape: GroupShape, tier: Tier) -> float | None:
    """Bandwidth the profile gives for just this shape, bytes/s, or None."""
    if len(shape.levels) != 1:
        return None
    size, stride = shape.levels[0]
    found = [entry for entry in tier.measured or () if (entry.group, entry.stride) == (size, stride)]
    return found[0].bandwidth_gb_per_s * 1e9 if found else None


def ring(kind: CollectiveKind, path: Route, tiers: tuple[Tier, ...], protocol: Protocol) -> tuple[float, float]:
    """Ring: (p-1) steps a pass, every rank sending 1/p of the buffer in each (Thakur 2005, 4.1).

    A piece of the buffer travels all edges but one, so a pass waits Σ hops_t · α_t less one hop over
    the outermost tier; the bytes take (p-1)/p · bytes/β.
    """
    passes = _PASSES[kind]
    travelled = [count - (position == path.outermost) for position, count in enumerate(path.hops)]
    latency = sum(count * tier.latency_s for count, tier in zip(travelled, tiers, strict=True))
    return (
        passes * latency * protocol.latency_factor,
        path.bandwidth_bytes_per_s * protocol.bandwidth_factor * path.size / (passes * (path.size - 1)),
    )


def tree(kind: CollectiveKind, path: Route, tiers: tuple[Tier, ...], protocol: Protocol) -> tuple[float, float] | None:
    """Double binary tree, up and down: a chain inside the innermost domain, log2 of the domains outside (NCCL).

    All-reduce only; every link carries the buffer twice, at 0.92 of the ring's bandwidth.
    """
    if kind != "all_reduce":
        return None
    chain = -(-path.domains[0] // path.domains[1]) if len(tiers) > 1 else path.size
    latency = (chain - 1) * tiers[0].latency_s
    for position in range(1, len(tiers)):
        outside = path.domains[position + 1] if position + 1 < len(tiers) else 1
        latency += math.ceil(math.log2(path.domains[position] / outside)) * tiers[position].latency_s
    bandwidth = path.bandwidth_bytes_per_s * protocol.bandwidth_factor * TREE_BANDWIDTH_SHARE / 2
    return 2 * latency * protocol.latency_factor, bandwidth


def in_switch(
    kind: CollectiveKind, path: Route, tiers: tuple[Tier, ...], protocol: Protocol
) -> tuple[float, float] | None:
    """Reduction in the inner switch (NVLS), a tree across domains: all-reduce of 3 ranks a domain or more.

    Each rank sends and receives its buffer once, at 0.76 of its bandwidth (H100, H200 and B200 alike,
    see docs/machines.md); across domains the uplink carries it once for two domains, twice for more.
    """
    inside = path.size // path.domains[1] if len(tiers) > 1 else path.size
    if kind != "all_reduce" or inside < 3:
        return None
    latency, bandwidth = IN_SWITCH_LATENCY_S + tiers[0].latency_s, IN_SWITCH_SHARE * tiers[0].bandwidth_bytes_per_s
    for position in range(1, path.outermost + 1):
        outside = path.domains[position + 1] if position + 1 < len(tiers) else 1
        latency += 2 * math.ceil(math.log2(path.domains[position] / outside)) * tiers[position].latency_s
    if path.outermost:
        bandwidth = min(bandwidth, path.bandwidth_bytes_per_s / (1 if path.domains[path.outermost] == 2 else 2))
    return latency * protocol.latency_factor, bandwidth * protocol.bandwidth_factor


def recursive(
    kind: CollectiveKind, path: Route, tiers: tuple[Tier, ...], protocol: Protocol
) -> tuple[float, float] | None:
    """Recursive doubling (all-gather) or halving (reduce-scatter), both for an all-reduce (Thakur 2005, 4.1 to 4.4).

    Powers of two only. Step k exchanges 2^k/p of the buffer with the rank 2^k members away; in a
    step that leaves a domain every rank of it sends at once, so each gets its share of the uplink.
    """
    steps = path.size.bit_length() - 1
    if path.size != 1 << steps:
        return None
    latency = time_per_byte = 0.0
    for step in range(steps):
        remaining = path.size >> step
        position = max(
            tier
            for tier, domains in enumerate(path.domains)
            if tier == 0 or (domains > 1 and remaining * domains > path.size)
        )
        senders = 1 if position == 0 else tiers[position - 1].ranks or 1
        latency += tiers[position].latency_s
        time_per_byte += remaining / 2 / path.size / (tiers[position].bandwidth_bytes_per_s / senders)
    passes = _PASSES[kind]
    return passes * latency * protocol.latency_factor, protocol.bandwidth_factor / (passes * time_per_byte)


def hierarchical(
    kind: CollectiveKind, path: Route, tiers: tuple[Tier, ...], protocol: Protocol
) -> tuple[float, float] | None:
    """Inside the innermost domain and across domains in turn, both as rings, on evenly filled domains.

    m ranks a domain, D domains: the part across moves bytes/m in D-rank rings, m of them side by
    side; the part inside moves the whole buffer among m ranks.
    """
    if len(tiers) == 1 or path.domains[1] < 2 or path.size % path.domains[1]:
        return None
    across, inside = path.domains[1], path.size // path.domains[1]
    if inside < 2:
        return None
    passes, outer = _PASSES[kind], tiers[path.outermost]
    latency = (inside - 1) * tiers[0].latency_s + (across - 1) * outer.latency_s
    uplink = min(path.bandwidth_bytes_per_s, outer.bandwidth_bytes_per_s)
    per_byte = (inside - 1) / inside / tiers[0].bandwidth_bytes_per_s + (across - 1) / across / uplink
    return passes * latency * protocol.latency_factor, protocol.bandwidth_factor / (passes * per_byte)


def direct(
    kind: CollectiveKind, path: Route, tiers: tuple[Tier, ...], protocol: Protocol
) -> tuple[float, float] | None:
    """Every rank sends every other its piece at once, and sums what it gets: all-gather or reduce-scatter.

    One latency for all messages; a link carries what all ranks behind it send to others: of each rank,
    the share of the buffer that lies in other domains.
    """
    if kind == "all_reduce":
        return None
    time_per_byte = 0.0
    for position, tier in enumerate(tiers[: path.outermost + 1]):
        senders = 1 if position == 0 else tiers[position - 1].ranks or 1
        leaving = senders * (1.0 - 1.0 / path.domains[position])
        time_per_byte = max(time_per_byte, leaving / tier.bandwidth_bytes_per_s)
    latency = tiers[path.outermost].latency_s
    return latency * protocol.latency_factor, protocol.bandwidth_factor / time_per_byte


_ALGORITHMS: dict[Algorithm, Callable[..., tuple[float, float] | None]] = {
    "ring": ring,
    "tree": tree,
    "recursive": recursive,
    "hierarchical": hierarchical,
    "in_switch": in_switch,
    "direct": direct,
}


def lines(kind: CollectiveKind, path: Route, machine: Machine) -> tuple[Line, ...]:
    """Every way the machine's library can run this collective over this route; none in a group of one."""
    if path.size == 1:
        return ()
    tiers = machine.tiers_of(kind)
    path = path if tiers is machine.tiers else path.over(tiers)
    found = []
    for algorithm in machine.library.algorithms[kind]:
        # NCCL reduces in the switch with its simple protocol only, the first of a profile.
        for protocol in machine.library.protocols[: 1 if algorithm == "in_switch" else None]:
            priced = _ALGORITHMS[algorithm](kind, path, tiers, protocol)
            if priced is not None:
                found.append(Line(algorithm, protocol.name, machine.library.launch_s + priced[0], priced[1]))
    return tuple(found)


def collective_time_s(chosen: tuple[tuple[Column, Column], ...], size_bytes: Column, arithmetic: Arithmetic) -> Column:
    """Time of the fastest of several `(latency_s, bandwidth_bytes_per_s)` lines, s; 0 without any line."""
    fastest: Column = 0.0
    for position, (latency_s, bandwidth_bytes_per_s) in enumerate(chosen):
        time_s = latency_s + size_bytes / bandwidth_bytes_per_s
        fastest = time_s if position == 0 else arithmetic.smaller(fastest, time_s)
    return fastest
