"""Tokens sent to their experts and back: bytes that leave each level of the network, and their time.

Letters: E experts, K experts a token, n equal groups of experts (ranks or nodes), G routing groups of which g are
chosen for a token (`n_group` and `topk_group` of DeepSeek-V3: arXiv 2412.19437, section 2.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import comb

import numpy as np
from numpy.typing import NDArray

from axonn_tune.frameworks.dispatchers import Dispatcher
from axonn_tune.program.operations import Value


@dataclass(frozen=True)
class Routing:
    """E, K, G and g of a layer; one group that is always chosen is no limit."""

    experts: int
    per_token: int
    groups: int = 1
    chosen: int = 1


@dataclass(frozen=True)
class Links:
    """Peak bandwidth of one rank inside its node and to other nodes, one direction; ranks of a node."""

    node_bytes_per_s: float
    network_bytes_per_s: float
    node_ranks: int


def distinct_destinations(n: Value, routing: Routing) -> Value:
    """Expected number of n equal groups of experts that a token goes to, routed uniformly: n·(1 − P(none of K there)).

    Without routing groups P = C(E − E/n, K) / C(E, K). n divides E, and n and G divide one another.
    """
    sizes, places = np.unique(np.asarray(n), return_inverse=True)
    each = np.array([_distinct(float(size), routing) for size in sizes])
    found = each[places].reshape(np.shape(n))
    return found if np.ndim(n) else float(found)


@lru_cache(maxsize=1024)
def _distinct(n: float, routing: Routing) -> float:
    held, within = _inside(n, routing)
    groups, chosen = routing.groups, routing.chosen
    candidates = chosen * (routing.experts // groups)
    missed = sum(
        comb(held, j) * comb(groups - held, chosen - j) * comb(candidates - j * within, routing.per_token)
        for j in range(min(held, chosen) + 1)
    )
    return n * (1.0 - missed / (comb(groups, chosen) * comb(candidates, routing.per_token)))


def _inside(n: float, routing: Routing) -> tuple[int, int]:
    """Routing groups that have experts in one of n destinations, and how many experts of each are there."""
    if n % 1 or routing.experts % n or (routing.groups % n and n % routing.groups):
        raise ValueError(f"{routing.experts} experts in {routing.groups} routing groups do not divide over {n:g}")
    held = max(routing.groups // int(n), 1)
    return held, routing.experts // (int(n) * held)


def sent_bytes(
    ranks: Value, nodes: Value, token_bytes: Value, dispatcher: Dispatcher, routing: Routing
) -> NDArray[np.float64]:
    """Bytes that leave one of `ranks` for other ranks, and of those, as a second row, what crosses between `nodes`.

    token_bytes: of all tokens of a rank, each once.
    """
    if dispatcher.counting == "copy":
        inside = across = np.asarray(float(routing.per_token))
    else:
        inside, across = (np.asarray(distinct_destinations(each, routing)) for each in (ranks, nodes))
    return np.stack(np.broadcast_arrays(inside * (1 - 1 / ranks), across * (1 - 1 / nodes))) * np.asarray(
        token_bytes, dtype=np.float64
    )


def dispatched(
    ranks: Value, token_bytes: Value, dispatcher: Dispatcher, routing: Routing, links: Links, *, combine: bool = False
) -> Value:
    """Seconds of one dispatch, or combine: α + max over levels of (bytes that leave it / bandwidth reached there)."""
    nodes = np.maximum(np.asarray(ranks) / links.node_ranks, 1.0)
    inside, across = sent_bytes(np.asarray(ranks), nodes, token_bytes, dispatcher, routing)
    # Inside a node go copies to all ranks but the own: those for other nodes are spread again over there.
    node_s = inside / (dispatcher.reached_node * links.node_bytes_per_s)
    network_s = across / (dispatcher.reached_network * links.network_bytes_per_s)
    alpha = dispatcher.combine_s if combine else dispatcher.dispatch_s
    found = alpha + np.maximum(node_s, network_s)
    return found if np.ndim(ranks) else float(found)
