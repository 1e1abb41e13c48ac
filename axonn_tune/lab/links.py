"""Rates and round trips of a lab's links, measured from inside, and a machine profile from them.

The ranks measure with plain sockets: TCP streams, and round trips of a small packet.
"""

from __future__ import annotations

import bisect
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from axonn_tune.lab.lab import RankPool
from axonn_tune.lab.shape import Shape, address, show_rate
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.machine import Accelerator, Launcher, Machine, Source, Tier
from axonn_tune.units import GB, GIB, MICRO, counted, show_seconds

_STREAM_PORT, _PING_PORT = 28000, 27000
_CHUNK_BYTES = 1 << 18
_PATIENCE_S = 5.0
_WARM_UP_S = 0.2
"""Excluded: buckets are full and queues empty at first."""
_PACKET = bytes(64)

Flow = tuple[int, int]
"""From one rank to another."""


Arrivals = list[tuple[float, int]]
"""(time, bytes arrived so far); all ranks of a host read the same clock."""


def stream(rank: int, flows: Sequence[Flow], duration_s: float) -> dict[Flow, Arrivals]:
    """Send and receive this rank's streams, which all run at once; arrivals of those it receives."""
    receiving, sending = list[tuple[Flow, socket.socket]](), list[tuple[str, int]]()
    for number, (source, target) in enumerate(flows):
        place = (address(target), _STREAM_PORT + number)
        if rank == target:
            receiving.append(((source, target), socket.create_server(place)))
        if rank == source:
            sending.append(place)
    with ThreadPoolExecutor(max_workers=max(1, len(receiving) + len(sending))) as pool:
        arriving = {flow: pool.submit(_receive, listener) for flow, listener in receiving}
        leaving = [pool.submit(_send, place, duration_s) for place in sending]
        for sent in leaving:
            sent.result()
        return {flow: found.result() for flow, found in arriving.items()}


def rates(flows: Sequence[Arrivals]) -> list[float]:
    """Bit/s of streams, without headers, over the time that all of them ran; 0 if there was none."""
    begin = max(one[0][0] for one in flows) + _WARM_UP_S
    end = min(one[-1][0] for one in flows)
    if end <= begin:
        return [0.0] * len(flows)
    return [(_arrived_by(end, one) - _arrived_by(begin, one)) * 8 / (end - begin) for one in flows]


def ping(rank: int, source: int, target: int, count: int) -> list[float]:
    """Round trips of a 64-byte packet between two ranks in s; nothing but on the source."""
    place = (address(target), _PING_PORT)
    if rank not in (source, target):
        return []
    with _accepted(socket.create_server(place)) if rank == target else _connected(place) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if rank == target:
            # Until the other side closes the connection.
            while packet := connection.recv(len(_PACKET)):
                connection.sendall(packet)
            return []
        times_s = []
        for _ in range(count):
            began_s, left = time.perf_counter(), len(_PACKET)
            connection.sendall(_PACKET)
            while left:
                arrived = len(connection.recv(left))
                if not arrived:
                    raise ConnectionError("the other rank has closed the connection")
                left -= arrived
            times_s.append(time.perf_counter() - began_s)
        return times_s


def _send(place: tuple[str, int], duration_s: float) -> None:
    with _connected(place) as connection:
        chunk, end = bytes(_CHUNK_BYTES), time.monotonic() + duration_s
        while time.monotonic() < end:
            connection.sendall(chunk)


def _connected(place: tuple[str, int]) -> socket.socket:
    """The other side starts at the same time, so it may be a moment late."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return socket.create_connection(place, timeout=_PATIENCE_S)
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _accepted(listener: socket.socket) -> socket.socket:
    listener.settimeout(_PATIENCE_S)
    with listener:
        connection, _ = listener.accept()
    connection.settimeout(_PATIENCE_S)
    return connection


def _receive(listener: socket.socket) -> Arrivals:
    buffer, total = bytearray(_CHUNK_BYTES), 0
    with _accepted(listener) as connection:
        found = [(time.monotonic(), 0)]
        while size := connection.recv_into(buffer):
            total += size
            found.append((time.monotonic(), total))
    return found


def _arrived_by(time_s: float, found: Arrivals) -> float:
    """Bytes arrived by a time, interpolated."""
    after = bisect.bisect_left(found, (time_s, 0))
    (t0, b0), (t1, b1) = found[max(0, after - 1)], found[min(after, len(found) - 1)]
    return b1 if t1 <= t0 else b0 + (b1 - b0) * (time_s - t0) / (t1 - t0)


TOLERANCE = 0.05
"""Headers take 0.8% of a rate at this packet size."""
_DURATION_S = 0.7
_ATTEMPTS = 3
_PINGS = 60
_HOST_S = 1e-3
"""Limit of a round trip without delay: the time of the host itself, even of a busy one."""
_AT_ONCE_BITS_PER_S = 4e8
"""A few streams at once: with more, the cores are the limit that is measured."""


@dataclass(frozen=True)
class StreamRound:
    """Streams that run at once. together: all share one link of this rate; else each has the rate to itself."""

    what: str
    flows: tuple[Flow, ...]
    rate_bits_per_s: float
    together: bool = False

    @property
    def words(self) -> str:
        """Description of the measurement."""
        return self.what if self.together else f"{counted(len(self.flows), self.what)}"


@dataclass(frozen=True)
class LinkCheck:
    """One requested and measured value, in words, and whether they agree. value: bit/s of a rate, s of a round trip."""

    what: str
    asked: str
    measured: str
    value: float
    agrees: bool


def rounds(shape: Shape) -> Iterator[StreamRound]:
    """Every uplink in both directions, one shared by all ranks of a node, and the ports of the first node."""
    nodes, ranks, port = shape.nodes, shape.ranks_per_node, shape.port_bits_per_s
    if nodes > 1:
        single = min(port, shape.uplink_bits_per_s)
        ring = [(node * ranks, (node + 1) % nodes * ranks) for node in range(nodes)]
        for flows in _batches(ring, single):
            yield StreamRound("node", flows, single)
    if nodes > 1 and ranks > 1:
        both = min(ranks * port, shape.uplink_bits_per_s)
        flows = tuple(zip(shape.ranks_of(0), shape.ranks_of(1), strict=True))
        yield StreamRound(f"node 0 → 1, {ranks} ranks share", flows, both, together=True)
    if ranks > 1:
        for flows in _batches([(rank, (rank + 1) % ranks) for rank in range(ranks)], port):
            yield StreamRound("rank", flows, port)


def verify(ranks: RankPool, *, listen: Callable[[float, str], None] = lambda share, what: None) -> list[LinkCheck]:
    """Measure everything, about a second a round. `listen` gets the share done and what comes next."""
    shape, found = ranks.shape, list[LinkCheck]()
    planned = list(rounds(shape))
    for number, one in enumerate(planned):
        listen(number / len(planned), one.words)
        found += _check_round(ranks, one)
    if shape.ranks_per_node > 1:
        found.append(_check_round_trip(ranks, "round trip inside node 0", (0, 1), 0.0))
    if shape.nodes > 1:
        pair = (0, shape.ranks_per_node)
        found.append(_check_round_trip(ranks, "round trip between nodes 0 and 1", pair, 2 * shape.delay_s))
    return found


def round_trip_s(ranks: RankPool, pair: Flow) -> float:
    """The shortest of many, which excludes other work of the host."""
    answers = ranks.call(ping, [(rank, *pair, _PINGS) for rank in range(ranks.shape.world)])
    return float(min(answers[pair[0]]))


def _batches(flows: list[Flow], rate_bits_per_s: float) -> Iterator[tuple[Flow, ...]]:
    at_once = max(1, int(_AT_ONCE_BITS_PER_S / rate_bits_per_s))
    for begin in range(0, len(flows), at_once):
        yield tuple(flows[begin : begin + at_once])


def _check_round(ranks: RankPool, one: StreamRound) -> list[LinkCheck]:
    """Measure again where it does not agree: the host may have been busy for a moment."""
    for _ in range(_ATTEMPTS):
        found = list(_measure(ranks, one))
        if all(check.agrees for check in found):
            break
    return found


def _measure(ranks: RankPool, one: StreamRound) -> Iterator[LinkCheck]:
    shape = ranks.shape
    # Before ordinary processes, where allowed, so that other work of the host is not measured.
    answers = ranks.call(stream, [(rank, one.flows, _DURATION_S) for rank in range(shape.world)], realtime=True)
    arrived = {flow: found for answer in answers for flow, found in answer.items()}
    measured = rates([arrived[flow] for flow in one.flows])
    if one.together:
        yield _check_rate(one.what, one.rate_bits_per_s, sum(measured))
        return
    for (source, target), rate in zip(one.flows, measured, strict=True):
        ends = shape.node_of(source), shape.node_of(target)
        shown = ends if one.what == "node" else (shape.name_of(source), shape.name_of(target))
        yield _check_rate(f"{one.what} {shown[0]} → {shown[1]}", one.rate_bits_per_s, rate)


def _check_rate(what: str, asked: float, measured: float) -> LinkCheck:
    agrees = abs(measured / asked - 1) <= TOLERANCE
    return LinkCheck(what, show_rate(asked), show_rate(measured), measured, agrees)


def _check_round_trip(ranks: RankPool, what: str, pair: Flow, asked_s: float) -> LinkCheck:
    measured = round_trip_s(ranks, pair)
    asked = show_seconds(asked_s) if asked_s else f"under {show_seconds(_HOST_S)}"
    agrees = asked_s <= measured <= asked_s + max(_HOST_S, 0.1 * asked_s)
    return LinkCheck(what, asked, show_seconds(measured), measured, agrees)


_BITS = 8


def profile(shape: Shape, *, name: str, rank_round_trip_s: float, node_round_trip_s: float) -> Machine:
    """The lab as a machine: two tiers with the rates asked for and the round trips measured, cores shared.

    Where nodes have one rank, or there is one node, the only tier is the one there is.
    """
    template = load_machine("localhost").document
    node_ranks = shape.ranks_per_node if shape.nodes > 1 else None
    tiers = []
    if shape.ranks_per_node > 1 or shape.nodes == 1:
        tiers.append(_tier("node", node_ranks, shape.port_bits_per_s, rank_round_trip_s))
    if shape.nodes > 1:
        alone = shape.ranks_per_node == 1
        rate = min(shape.port_bits_per_s, shape.uplink_bits_per_s) if alone else shape.uplink_bits_per_s
        tiers.append(_tier("cluster", None, rate, node_round_trip_s))
    launcher = Launcher(backend="gloo", ranks_per_node=shape.ranks_per_node)
    changed = {
        "name": name,
        "description": f"Emulated cluster, not calibrated: {shape.words()}",
        "accelerator": _shared_cores(template.accelerator, shape.world),
        "tiers": tuple(tiers),
        "launcher": launcher,
    }
    return template.model_copy(update=changed)


def _tier(name: str, ranks: int | None, rate_bits_per_s: float, round_trip_s: float) -> Tier:
    sources = {
        "latency_us": Source(
            kind="measured", source="shortest round trip of a small packet in this lab: what a step of Gloo waits"
        ),
        "bandwidth_gb_per_s": Source(kind="assumed", source=f"{show_rate(rate_bits_per_s)}, as asked of the lab"),
    }
    if ranks is not None:
        sources["ranks"] = Source(kind="fact", source="ranks on a node of the lab")
    return Tier(
        name=name,
        ranks=ranks,
        # The whole and not half: Gloo's sender waits until the receiver is ready, so a step of a ring
        # takes one crossing for that and one for the data (1.19 ms measured over round trips of 1 ms).
        latency_us=round(round_trip_s / MICRO, 1),
        bandwidth_gb_per_s=rate_bits_per_s / _BITS / GB,
        sources=sources,
    )


def _shared_cores(core: Accelerator, world: int) -> Accelerator:
    """One rank's part of this host: all ranks compute on the same cores."""
    cores = len(os.sched_getaffinity(0))
    share = min(1.0, cores / world)
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB / world
    why = Source(kind="assumed", source=f"placeholder of localhost, {cores} cores shared by {world} ranks")
    changed = {
        "name": f"{share:.3g} of a CPU core",
        "memory_gib": round(memory_gib, 2),
        "memory_bandwidth_gb_per_s": core.memory_bandwidth_gb_per_s * share,
        "peak_tflops": {precision: peak * share for precision, peak in core.peak_tflops.items()},
        "sources": core.sources
        | dict.fromkeys(("memory_bandwidth_gb_per_s", "peak_tflops"), why)
        | {"memory_gib": Source(kind="fact", source=f"memory of this host by {world} ranks")},
    }
    return core.model_copy(update=changed)
