"""How calls of collectives are priced, in sentences with their numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from axonn_tune.cost.collectives import (
    IN_SWITCH_LATENCY_S,
    IN_SWITCH_SHARE,
    TREE_BANDWIDTH_SHARE,
    Line,
    Route,
    Term,
    priced_kind,
    route,
    sending,
)
from axonn_tune.cost.price import Detail
from axonn_tune.frameworks.dispatchers import find_dispatcher
from axonn_tune.specs.machine import Machine, Protocol
from axonn_tune.units import GB, show_bytes, show_seconds

_ALGORITHMS = {
    "ring": "fixed = launch + {passes}(Σ hops·latency, less one hop of the slowest); algbw = bandwidth·p/{denominator}",
    "tree": (
        f"fixed = launch + 2·(hops inside a domain + log2 of the domains outside); algbw = {TREE_BANDWIDTH_SHARE:g}·"
        "bandwidth/2"
    ),
    "recursive": "fixed = launch + {passes}(latency of each of log2 p steps); algbw from what each step sends",
    "hierarchical": "fixed = launch + {passes}(ring inside a domain, then across); algbw from both parts in turn",
    "in_switch": (
        f"fixed = launch + {show_seconds(IN_SWITCH_LATENCY_S)} + latency inside a domain + 2·latency·log2 of the "
        f"domains outside; algbw = {IN_SWITCH_SHARE:g}·bandwidth inside a domain, at most that across, or half of it "
        "across more than two domains"
    ),
    "direct": "fixed = launch + latency; algbw from what leaves the domain of the tightest network level",
}


def line_sentences(priced: Detail) -> list[str]:
    """For each different line of the terms: the formula, its numbers and the result."""
    found: dict[tuple[str, str, Line], str] = {}
    own = priced.job.machine.placing(priced.grid.world)
    for term in priced.terms:
        key = (term.op, term.axis, term.line)
        if term.op == "send":
            found[key] = _send_sentence(term, priced, own)
        elif term.collective.routing is not None and priced_kind(term.collective.sent, own) != "all_to_all":
            found[key] = _dispatch_sentence(term, priced)
        elif key not in found:
            kind = priced_kind(term.collective.sent, own)
            machine = own.model_copy(update={"tiers": own.tiers_of(kind)})
            shape = priced.grid.group_shape(term.axis, priced.job.framework.step.folding)
            path = route(shape, machine.tiers, priced.grid.world)
            found[key] = _sentence(term, path, machine, over=priced.job.framework.called(term.axis))
    return list(found.values())


def _send_sentence(term: Term, priced: Detail, machine: Machine) -> str:
    link = sending(stages=priced.grid.group_shape("pipeline"), machine=machine, world=priced.grid.world)
    shared = f" / {link.senders} ranks of a domain that send at once" if link.senders > 1 else ""
    return (
        f"send over {priced.job.framework.called(term.axis)}, {show_bytes(term.bytes)} to the next stage: fixed = "
        "launch + latency + software per call, and the gather of its shares where there is one; algbw = bandwidth"
        f"{shared}. Here launch {show_seconds(machine.library.launch_s)}, latency {show_seconds(link.tier.latency_s)} "
        f"({link.tier.name}), bandwidth {link.bandwidth_bytes_per_s * link.senders / GB:g} GB/s: "
        f"fixed = {show_seconds(term.line.latency_s)}, algbw = {term.line.bandwidth_bytes_per_s / GB:.4g} GB/s."
    )


def _dispatch_sentence(term: Term, priced: Detail) -> str:
    """How long tokens take to their experts, or back."""
    routing, framework = term.collective.routing, priced.job.framework
    assert routing is not None, "asked before"
    one = find_dispatcher(routing.dispatcher)
    copies = "a copy of each token for each expert" if one.counting == "copy" else "each token once a rank and node"
    limit = f" in {routing.chosen} of {routing.groups} groups" if routing.groups > 1 else ""
    return (
        f"{term.op} over {framework.called(term.axis)}, {one.name}: {copies}, {routing.per_token} of {routing.experts} "
        f"experts{limit}; algbw = that of the slowest level. Here {term.group} ranks: fixed = "
        f"{show_seconds(term.line.latency_s)}, algbw = {term.line.bandwidth_bytes_per_s / GB:.4g} GB/s."
    )


def _sentence(term: Term, path: Route, machine: Machine, *, over: str) -> str:
    line = term.line
    passes = "2" if term.op == "all_reduce" else ""
    formula = _ALGORITHMS.get(line.algorithm, "").format(passes=passes, denominator="(2(p−1))" if passes else "(p−1)")
    protocol = next(each for each in machine.library.protocols if each.name == line.protocol)
    launch = show_seconds(machine.library.launch_s)
    numbers = [
        f"p = {path.size}",
        f"launch {launch}",
        *_numbers(path, machine, protocol, in_switch=line.algorithm == "in_switch"),
    ]
    return (
        f"{term.op} over {over}, {line.algorithm} ({line.protocol}): {formula}. "
        f"Here {', '.join(numbers)}: fixed = {show_seconds(line.latency_s)}, "
        f"algbw = {line.bandwidth_bytes_per_s / GB:.4g} GB/s."
    )


def _numbers(path: Route, machine: Machine, protocol: Protocol, *, in_switch: bool) -> Iterator[str]:
    """Hops by network level, the bandwidth of shared links, and what the protocol changes."""
    hops = [
        f"{count} of {show_seconds(tier.latency_s)} ({tier.name})"
        for count, tier in zip(path.hops, machine.tiers, strict=True)
        if count
    ]
    yield f"hops {' + '.join(hops)}"
    inner, outermost = machine.tiers[0], machine.tiers[path.outermost]
    if in_switch:
        yield f"bandwidth {inner.bandwidth_gb_per_s:g} GB/s inside a domain ({inner.name})"
    if in_switch and not path.outermost:
        return
    shared = outermost.bandwidth_bytes_per_s / path.bandwidth_bytes_per_s
    bandwidth = f"bandwidth {path.bandwidth_bytes_per_s / GB:.4g} GB/s of a group"
    if path.outermost > 0 and shared > 1.0 and math.isclose(shared, round(shared)):
        bandwidth += (
            f" (1/{round(shared)} of {outermost.name}'s {outermost.bandwidth_gb_per_s:g} GB/s of a node and direction, "
            "which groups share)"
        )
    yield bandwidth
    if protocol.latency_factor != 1.0:
        yield f"hops' latency × {protocol.latency_factor:g}"
    if protocol.bandwidth_factor != 1.0:
        yield f"bandwidth × {protocol.bandwidth_factor:g}"
