"""Time of one collective: each algorithm is a line, latency + bytes / bandwidth; the lowest counts.

p ranks, `bytes` the full (gathered or reduced) buffer, α_t the latency of a hop over tier t, β the
bandwidth of one ring's slowest link after sharing. Bandwidths are algorithm bandwidths: full buffer
over time. Sources:

- ring, recursive: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations
  in MPICH", IJHPCA 19(1), 2005, sections 4.1 to 4.4.
- ring latency by hop kind, tree: NCCL 2.30, `src/graph/tuning.cc`.
- direct: the message counts alone; every rank of a domain sends at once.
- sharing of links: arXiv 2305.13525, equation 7, with edges counted per link instead of rounded.

A ring visits the group's ranks in ascending order and closes from the last to the first. A *domain* of a tier is the
set of ranks it connects (the ranks of one node, say). An edge crosses out of a domain when its ends lie in different
ones. All groups of an axis run at the same time, so their edges that leave the busiest domain share its bandwidth.

Of tokens sent to their experts and back: E experts, K experts a token, n equal groups of experts (ranks or nodes),
G routing groups of which g are chosen for a token (`n_group` and `topk_group` of DeepSeek-V3: arXiv 2412.19437,
section 2.1.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import comb, gcd
from typing import NamedTuple

from axonn_tune.frameworks.dispatchers import Dispatcher, profiled_dispatcher
from axonn_tune.grid import GroupShape
from axonn_tune.program.operations import Arithmetic, Collective, OpKind, Routing, Sent, Value
from axonn_tune.specs.machine import COLLECTIVE_KINDS, LARGEST_NODE, Algorithm, CollectiveKind, Machine, Protocol, Tier

TREE_BANDWIDTH_SHARE = 0.92
"""A tree reaches this share of the ring's bandwidth (NCCL tuning.cc)."""

IN_SWITCH_SHARE = 0.76
"""Share of a rank's bandwidth that an in-network reduction reaches."""

IN_SWITCH_LATENCY_S = 50e-6
"""Fixed latency of an in-network reduction: fits H100, H200, B200 and B300 (NCCL tuning.cc: 18 to 25 µs)."""

_PASSES: dict[CollectiveKind, int] = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}
"""Passes around the ring: an all-reduce is a reduce-scatter and an all-gather."""


@dataclass(frozen=True)
class Line:
    """One algorithm and protocol of a collective: time = latency_s + bytes / bandwidth_bytes_per_s."""

    algorithm: str
    protocol: str
    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class Term:
    """All calls of one collective in a step of one rank, by any cost model: seconds = count · time of one call.

    bytes: the full (gathered or reduced) buffer of one call, `formula` as symbols; line: algorithm and protocol that
    the library uses; exposed_s is nan if the cost model has none.
    """

    op: str
    axis: str
    phase: str
    layer: str
    count: int
    bytes: float
    group: int
    tier: str
    seconds: float
    exposed_s: float
    formula: str
    line: Line
    collective: Collective


def bus_bytes(collective: str, ranks: float, size_bytes: float) -> float:
    """Bytes that the bus bandwidth of a collective counts, of a send all (nccl-tests, PERFORMANCE.md)."""
    if collective == "send":
        return size_bytes
    passes = 2.0 if collective == "all_reduce" else 1.0
    return passes * (ranks - 1.0) / ranks * size_bytes


@dataclass(frozen=True)
class Route:
    """A group on a machine: hops of its ring by outermost crossed tier, and its bandwidth after link sharing.

    sharing: rings on each tier's busiest link, 0 on tiers that are not crossed; measured: the profile has a measured
    bandwidth for this shape.
    """

    size: int
    hops: tuple[int, ...]
    domains: tuple[int, ...]
    outermost: int
    sharing: tuple[int, ...]
    bandwidth_bytes_per_s: float
    measured: bool = False


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
    measured = [
        entry.bandwidth_gb_per_s * 1e9
        for entry in tiers[outermost].measured or ()
        if shape.levels == ((entry.group, entry.stride),)
    ]
    return Route(
        size=shape.size,
        hops=hops,
        domains=tuple(max(count, 1) for count in reaching),
        outermost=outermost,
        sharing=sharing,
        bandwidth_bytes_per_s=measured[0] if measured else _bandwidth(sharing, tiers),
        measured=bool(measured),
    )


def _bandwidth(sharing: tuple[int, ...], tiers: tuple[Tier, ...]) -> float:
    """Bandwidth of one ring on its slowest shared link, bytes/s."""
    return min(tier.bandwidth_bytes_per_s / rings for tier, rings in zip(tiers, sharing, strict=True) if rings)


def ring(kind: CollectiveKind, path: Route, tiers: tuple[Tier, ...], protocol: Protocol) -> tuple[float, float]:
    """Ring: (p-1) steps a pass, every rank sending 1/p of the buffer in each (Thakur 2005, 4.1).

    A shard of the buffer traverses all edges but one, so a pass waits Σ hops_t · α_t less one hop over
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
    """In-network reduction (NVLS) inside domains, a tree across: all-reduce with 3 or more ranks per domain.

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
    """Hierarchical: rings inside the innermost domain and across domains, in turn, on evenly filled domains.

    m ranks a domain, D domains: across domains, m concurrent D-rank rings move bytes/m each; inside, m ranks move the
    whole buffer.
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
    """Direct: every rank sends shards to all others at once, and sums what it receives: all-gather or reduce-scatter.

    One latency for all messages. A link carries the messages of all its ranks: of each rank, the share of the buffer
    that goes to other domains.
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


@lru_cache(maxsize=1024)
def distinct_destinations(n: int, routing: Routing) -> float:
    """Expected number of n equal groups of experts that a token goes to, routed uniformly: n·(1 − P(none of K there)).

    Without routing groups P = C(E − E/n, K) / C(E, K). Where n and G do not divide one another, groups count as none;
    where n does not divide E, each expert is anywhere.
    """
    experts, per_token, groups, chosen = routing.experts, routing.per_token, routing.groups, routing.chosen
    if experts % n:
        return n * (1.0 - (1.0 - 1.0 / n) ** per_token)
    if groups % n and n % groups:
        groups = chosen = 1
    held = max(groups // n, 1)
    within, candidates = experts // (n * held), chosen * (experts // groups)
    missed = sum(
        comb(held, j) * comb(groups - held, chosen - j) * comb(candidates - j * within, per_token)
        for j in range(min(held, chosen) + 1)
    )
    return n * (1.0 - missed / (comb(groups, chosen) * comb(candidates, per_token)))


def copies_leaving(domains: int, dispatcher: Dispatcher, routing: Routing) -> float:
    """Copies of a token that leave one of so many ranks, or domains of the network, for the others."""
    copies = routing.per_token if dispatcher.counting == "copy" else distinct_destinations(domains, routing)
    return copies * (1.0 - 1.0 / domains)


def dispatch_line(kind: OpKind, routing: Routing, path: Route, machine: Machine) -> Line:
    """Time of a dispatch, or of a combine: α + max over levels of (bytes that leave it / bandwidth reached there).

    All ranks of a domain send at once and share its link. Inside the innermost go copies to all ranks but the own:
    those for other domains are spread again over there; in a rack a rank reaches no more than was measured there. Bytes
    are those of a buffer with a copy for each expert, or with each token once.
    """
    dispatcher, tiers, time_per_byte = profiled_dispatcher(routing.dispatcher, machine), machine.tiers, 0.0
    back = kind == "combine"
    most = dispatcher.rack_combine_bytes_per_s if back else dispatcher.rack_dispatch_bytes_per_s
    for position, tier in enumerate(tiers[: path.outermost + 1]):
        senders = 1 if position == 0 else tiers[position - 1].ranks or 1
        bandwidth, reached = tier.bandwidth_bytes_per_s, dispatcher.reached_network
        if position == 0:
            bandwidth, reached = path.bandwidth_bytes_per_s if path.measured else bandwidth, dispatcher.reached_node
        reached_bytes_per_s = reached * bandwidth
        if position == 0 and path.domains[0] > LARGEST_NODE:
            reached_bytes_per_s = min(reached_bytes_per_s, most)
        leaving = senders * copies_leaving(path.domains[position], dispatcher, routing)
        time_per_byte = max(time_per_byte, leaving / reached_bytes_per_s)
    held = routing.per_token if dispatcher.counting == "copy" else 1
    alpha = dispatcher.combine_s if back else dispatcher.dispatch_s
    return Line(dispatcher.name, "", alpha, held / time_per_byte)


def priced_kind(sent: Sent, machine: Machine) -> CollectiveKind:
    """The collective of a profile by which one is priced: of an all-to-all its own where it was measured."""
    kind, routing = (sent, None) if isinstance(sent, str) else sent
    if kind in COLLECTIVE_KINDS:
        return kind
    copies = kind == "all_to_all" or (routing is not None and routing.dispatcher == "alltoall")
    return "all_to_all" if copies and "all_to_all" in machine.library.algorithms else "all_gather"


def lines(sent: Sent, path: Route, machine: Machine, *, call_s: float = 0.0) -> tuple[Line, ...]:
    """A line for every algorithm and protocol of the library over this route; none for a group of one.

    call_s: software overhead per call. An all-to-all that was not measured is priced as the all-gather of its buffer:
    in both, a rank sends (p-1)/p of it over its own link. Across domains it is direct: what leaves one is not passed on
    from rank to rank. A dispatch or combine has one line, by its routing; one that sends a copy for each expert
    is priced as an all-to-all where those were measured.
    """
    if path.size == 1:
        return ()
    kind, routing = (sent, None) if isinstance(sent, str) else sent
    priced_as = priced_kind(sent, machine)
    routing = None if priced_as == "all_to_all" else routing
    tiers = machine.tiers_of(priced_as)
    if tiers is not machine.tiers and not path.measured:
        path = replace(path, bandwidth_bytes_per_s=_bandwidth(path.sharing, tiers))
    if routing is not None:
        dispatched = dispatch_line(kind, routing, path, machine.model_copy(update={"tiers": tiers}))
        return (replace(dispatched, latency_s=dispatched.latency_s + call_s),)
    found = []
    apart = kind == "all_to_all" and path.outermost > 0
    for algorithm in ("direct",) if apart else machine.library.algorithms[priced_as]:
        # NCCL's in-network reduction uses only the simple protocol, the first of a profile.
        for protocol in machine.library.protocols[: 1 if algorithm == "in_switch" else None]:
            line = _ALGORITHMS[algorithm](priced_as, path, tiers, protocol)
            if line is not None:
                latency_s, bandwidth_bytes_per_s = machine.library.launch_s + line[0] + call_s, line[1]
                found.append(Line(algorithm, protocol.name, latency_s, bandwidth_bytes_per_s))
    return tuple(found)


def collective_time_s(chosen: tuple[tuple[Value, Value], ...], size_bytes: Value, arithmetic: Arithmetic) -> Value:
    """Time of the fastest of several `(latency_s, bandwidth_bytes_per_s)` lines, s; 0 without any line."""
    fastest: Value = 0.0
    for position, (latency_s, bandwidth_bytes_per_s) in enumerate(chosen):
        time_s = latency_s + size_bytes / bandwidth_bytes_per_s
        fastest = time_s if position == 0 else arithmetic.smaller(fastest, time_s)
    return fastest


def transfer_time_s(
    size_bytes: Value, *, stages: GroupShape, machine: Machine, world: int, call_s: float = 0.0
) -> Value:
    """Time to send `size_bytes` to the next rank of a pipeline, all ranks sending at once, s.

    The link is that of the outermost tier that some stage sends over, whose messages the others wait for. call_s: as
    for `lines`.
    """
    link = sending(stages=stages, machine=machine, world=world)
    latency_s = machine.library.launch_s + link.tier.latency_s + call_s
    return latency_s + size_bytes / link.bandwidth_bytes_per_s


class SendLink(NamedTuple):
    """The tier that messages of a pipeline go over, the ranks that share a link of it, and what one has, bytes/s."""

    tier: Tier
    senders: int
    bandwidth_bytes_per_s: float


def sending(*, stages: GroupShape, machine: Machine, world: int) -> SendLink:
    """The link of the outermost tier that ranks of a pipeline send over.

    Ranks of a domain that send out of it share its bandwidth. Inside the innermost domain a message has the link
    between two ranks alone, not all those of a ring: the bandwidth measured for a group of two, where there is one. Of
    MI300X that is one link of xGMI, 48 GB/s, of the seven that a rank has (ROCm/rccl issue 1210).
    """
    path = route(stages, machine.tiers, world)
    tier, senders = machine.tiers[path.outermost], path.sharing[path.outermost]
    bandwidth_bytes_per_s = tier.bandwidth_bytes_per_s / senders
    if path.outermost == 0:
        pair = route(GroupShape(((2, stages.levels[0][1]),)), machine.tiers, world)
        bandwidth_bytes_per_s = min(bandwidth_bytes_per_s, pair.bandwidth_bytes_per_s)
    return SendLink(tier, senders, bandwidth_bytes_per_s)


@dataclass(frozen=True)
class Crossing:
    """How the rings of one axis leave the domains of one size.

    edges: edges of one ring that leave a domain (0: every group lies inside one);
    sharing: edges of all concurrent rings that leave the busiest domain.
    """

    edges: int
    sharing: int


@lru_cache(maxsize=1 << 17)
def crossing(shape: GroupShape, domain: int | None, world: int) -> Crossing:
    """Edges leaving domains of `domain` consecutive ranks (None: one domain holds all ranks).

    One level is exact for any sizes, also where groups straddle domains. Two levels (`xy` when
    another axis lies between) are rounded up: they carry only loss statistics and the gradient norm.
    """
    if domain is None or world <= domain or not shape.levels or domain % shape.span == 0:
        return Crossing(0, 0)
    if len(shape.levels) == 1:
        size, stride = shape.levels[0]
        if stride >= domain:
            return Crossing(size, domain)
        block = size * stride
        phases = min(world // block, domain // gcd(block, domain))
        first = max(min(number * block % domain + stride, domain) - 1 for number in range(phases))
        touched = (first + (size - 1) * stride) // domain + 1
        return Crossing(touched, _sharing(size, stride, domain=domain, world=world)) if touched > 1 else Crossing(0, 0)
    (inner_size, inner_stride), (outer_size, _) = shape.levels
    inside = crossing(GroupShape((shape.levels[0],)), domain, world)
    edges = outer_size * (max(inside.edges - 1, 0) + 1)
    sharing = domain if inside.edges or domain % (inner_size * inner_stride) else domain // inner_size
    return Crossing(edges, sharing)


_DOMAINS_EXAMINED = 64


def _sharing(size: int, stride: int, *, domain: int, world: int) -> int:
    """Largest number of groups that straddle one domain, with members inside and outside; one edge of each leaves it.

    The pattern repeats; at most 64 domains are checked, which covers all but odd sizes.
    """
    block = size * stride
    busiest = 0
    for number in range(min(-(-world // domain), block // gcd(block, domain), _DOMAINS_EXAMINED)):
        first, end = number * domain, min((number + 1) * domain, world)
        parts = [(first % block, (end - 1) % block + 1)]
        if first // block != (end - 1) // block:
            parts = [(first % block, block), (0, (end - 1) % block + 1)]
        cut = 0
        for begin, end in parts:
            whole = max(0, min(stride, end - (size - 1) * stride) - begin)
            cut += min(stride, end - begin) - whole
        busiest = max(busiest, cut)
    return busiest
