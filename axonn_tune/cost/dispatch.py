"""Tokens sent to their experts and back: how many copies leave each level of the network, and the line of their time.

Letters: E experts, K experts a token, n equal groups of experts (ranks or nodes), G routing groups of which g are
chosen for a token (`n_group` and `topk_group` of DeepSeek-V3: arXiv 2412.19437, section 2.1.2).
"""

from __future__ import annotations

from functools import lru_cache
from math import comb

from axonn_tune.cost.collectives import Line, Route
from axonn_tune.frameworks.dispatchers import Dispatcher, profiled_dispatcher
from axonn_tune.program.operations import OpKind, Routing
from axonn_tune.specs.machine import LARGEST_NODE, Machine


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
