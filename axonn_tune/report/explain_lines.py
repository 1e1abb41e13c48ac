"""How a collective's line α + bytes/β comes about, with the numbers of one group filled in."""

from __future__ import annotations

import math
from collections.abc import Iterator

from axonn_tune.cost.collectives import Line, Route, route
from axonn_tune.cost.prediction import Pricing, Term
from axonn_tune.ranking.space import Problem
from axonn_tune.specs.machine import Machine, Protocol
from axonn_tune.units import show_seconds

_GB = 1e9
_ALGORITHMS = {
    "ring": "α = launch + {passes}(Σ hops·latency, less one hop of the slowest); β = bandwidth·p/{denominator}",
    "tree": "α = launch + 2·(hops inside a domain + log2 of the domains outside); β = 0.92·bandwidth/2",
    "recursive": "α = launch + {passes}(latency of each of log2 p steps); β from what each step sends over its tier",
    "hierarchical": "α = launch + {passes}(ring inside a domain, then across); β from both parts in turn",
    "in_switch": "α = launch + a fixed latency; β = the switch's share of the bandwidth",
    "direct": "α = launch + latency; β from what leaves the domain of the tightest tier",
}


def line_sentences(problem: Problem, pricing: Pricing) -> list[str]:
    """For each different line of the terms: the formula, its numbers and the result."""
    found: dict[tuple[str, str, Line], str] = {}
    for term in pricing.terms:
        key = (term.op, term.axis, term.line)
        if key not in found:
            kind = term.collective.kind
            machine = problem.machine.model_copy(update={"tiers": problem.machine.tiers_of(kind)})
            path = route(pricing.configuration.grid.group_shape(term.axis), machine.tiers, problem.gpus)
            found[key] = _sentence(term, path, machine)
    return list(found.values())


def _sentence(term: Term, path: Route, machine: Machine) -> str:
    line = term.line
    passes = "2" if term.op == "all_reduce" else ""
    formula = _ALGORITHMS.get(line.algorithm, "").format(passes=passes, denominator="(2(p−1))" if passes else "(p−1)")
    protocol = next(each for each in machine.library.protocols if each.name == line.protocol)
    numbers = [f"p = {path.size}", f"launch {show_seconds(machine.library.launch_s)}", *_numbers(path, machine)]
    numbers += _factors(protocol)
    return (
        f"{term.op} over {term.axis}, {line.algorithm} ({line.protocol}): {formula}. Here {', '.join(numbers)}: "
        f"α = {show_seconds(line.latency_s)}, β = {line.bandwidth_bytes_per_s / _GB:.4g} GB/s."
    )


def _numbers(path: Route, machine: Machine) -> Iterator[str]:
    """Hops by tier, and the bandwidth left of the links that the groups share."""
    hops = [
        f"{count} of {show_seconds(tier.latency_s)} ({tier.name})"
        for count, tier in zip(path.hops, machine.tiers, strict=True)
        if count
    ]
    yield f"hops {' + '.join(hops)}"
    outermost = machine.tiers[path.outermost]
    shared = outermost.bandwidth_bytes_per_s / path.bandwidth_bytes_per_s
    bandwidth = f"bandwidth {path.bandwidth_bytes_per_s / _GB:.4g} GB/s of a group"
    if path.outermost > 0 and shared > 1.0 and math.isclose(shared, round(shared)):
        bandwidth += (
            f" (1/{round(shared)} of {outermost.name}'s {outermost.bandwidth_gb_per_s:g} GB/s, which groups share)"
        )
    yield bandwidth


def _factors(protocol: Protocol) -> Iterator[str]:
    """What the protocol changes."""
    if protocol.latency_factor != 1.0:
        yield f"hops' latency × {protocol.latency_factor:g}"
    if protocol.bandwidth_factor != 1.0:
        yield f"bandwidth × {protocol.bandwidth_factor:g}"
