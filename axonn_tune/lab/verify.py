"""Whether a lab does what was asked of it: rates and round trips, measured from inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from axonn_tune.lab.ranks import Ranks
from axonn_tune.lab.shape import Shape, show_rate
from axonn_tune.lab.streams import Flow, ping, rates, stream
from axonn_tune.units import counted, show_seconds

TOLERANCE = 0.05
"""Headers take 0.8% of a rate at this packet size."""
_DURATION_S = 0.7
_ATTEMPTS = 3
_PINGS = 60
_HOST_S = 1e-3
"""What a round trip may take with no delay asked for: the host's own time, a busy one's included."""
_AT_ONCE_BITS_PER_S = 4e8
"""A few streams on few cores: more and the cores are the limit that is measured."""


@dataclass(frozen=True)
class Round:
    """Streams that run at once. together: all share one link of this rate; else each has the rate to itself."""

    what: str
    flows: tuple[Flow, ...]
    rate_bits_per_s: float
    together: bool = False

    @property
    def words(self) -> str:
        """What is measured, in words."""
        return self.what if self.together else f"{counted(len(self.flows), self.what)}"


@dataclass(frozen=True)
class Check:
    """One thing asked for and measured, in words, and whether they agree. value: bit/s of a rate, s of a round trip."""

    what: str
    asked: str
    measured: str
    value: float
    agrees: bool


def rounds(shape: Shape) -> Iterator[Round]:
    """Every uplink in both directions, one shared by all ranks of a node, and the ports of the first node."""
    nodes, ranks, port = shape.nodes, shape.ranks_per_node, shape.port_bits_per_s
    if nodes > 1:
        single = min(port, shape.uplink_bits_per_s)
        ring = [(node * ranks, (node + 1) % nodes * ranks) for node in range(nodes)]
        for flows in _batches(ring, single):
            yield Round("node", flows, single)
    if nodes > 1 and ranks > 1:
        both = min(ranks * port, shape.uplink_bits_per_s)
        flows = tuple(zip(shape.ranks_of(0), shape.ranks_of(1), strict=True))
        yield Round(f"node 0 → 1, {ranks} ranks share", flows, both, together=True)
    if ranks > 1:
        for flows in _batches([(rank, (rank + 1) % ranks) for rank in range(ranks)], port):
            yield Round("rank", flows, port)


def verify(
    ranks: Ranks, *, tolerance: float = TOLERANCE, listen: Callable[[float, str], None] = lambda share, what: None
) -> list[Check]:
    """Measure everything; takes about a second a round. `listen` hears which share is done, and what comes next."""
    shape, found = ranks.shape, list[Check]()
    planned = list(rounds(shape))
    for number, one in enumerate(planned):
        listen(number / len(planned), one.words)
        found += _check_round(ranks, one, tolerance)
    if shape.ranks_per_node > 1:
        found.append(_check_round_trip(ranks, "round trip inside node 0", (0, 1), 0.0))
    if shape.nodes > 1:
        pair = (0, shape.ranks_per_node)
        found.append(_check_round_trip(ranks, "round trip between nodes 0 and 1", pair, 2 * shape.delay_s))
    return found


def round_trip_s(ranks: Ranks, pair: Flow) -> float:
    """The shortest of many: what the network takes, without what else the host does."""
    answers = ranks.call(ping, [(rank, *pair, _PINGS) for rank in range(ranks.shape.world)])
    return float(min(answers[pair[0]]))


def _batches(flows: list[Flow], rate_bits_per_s: float) -> Iterator[tuple[Flow, ...]]:
    at_once = max(1, int(_AT_ONCE_BITS_PER_S / rate_bits_per_s))
    for begin in range(0, len(flows), at_once):
        yield tuple(flows[begin : begin + at_once])


def _check_round(ranks: Ranks, one: Round, tolerance: float) -> list[Check]:
    """Measured again where it does not agree: a host that is busy for a moment is not the network."""
    for _ in range(_ATTEMPTS):
        found = list(_measure(ranks, one, tolerance))
        if all(check.agrees for check in found):
            break
    return found


def _measure(ranks: Ranks, one: Round, tolerance: float) -> Iterator[Check]:
    shape = ranks.shape
    # Before ordinary processes, where that is allowed: what else the host does is not to be measured.
    answers = ranks.call(stream, [(rank, one.flows, _DURATION_S) for rank in range(shape.world)], realtime=True)
    arrived = {flow: found for answer in answers for flow, found in answer.items()}
    measured = rates([arrived[flow] for flow in one.flows])
    if one.together:
        yield _check_rate(one.what, one.rate_bits_per_s, sum(measured), tolerance)
        return
    for (source, target), rate in zip(one.flows, measured, strict=True):
        ends = shape.node_of(source), shape.node_of(target)
        shown = ends if one.what == "node" else (shape.name_of(source), shape.name_of(target))
        yield _check_rate(f"{one.what} {shown[0]} → {shown[1]}", one.rate_bits_per_s, rate, tolerance)


def _check_rate(what: str, asked: float, measured: float, tolerance: float) -> Check:
    agrees = abs(measured / asked - 1) <= tolerance
    return Check(what, show_rate(asked), show_rate(measured), measured, agrees)


def _check_round_trip(ranks: Ranks, what: str, pair: Flow, asked_s: float) -> Check:
    measured = round_trip_s(ranks, pair)
    asked = show_seconds(asked_s) if asked_s else f"under {show_seconds(_HOST_S)}"
    agrees = asked_s <= measured <= asked_s + max(_HOST_S, 0.1 * asked_s)
    return Check(what, asked, show_seconds(measured), measured, agrees)
