"""Dispatchers of tokens to experts: what each counts, and how much of a link it reaches."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Literal, TypeAlias, cast

from axonn_tune.errors import UnknownNameError
from axonn_tune.specs.machine import LARGEST_NODE, Dispatching, Machine

Counting: TypeAlias = Literal["all", "copy", "rank"]
"""Which copies of a token leave a rank: to all ranks, one for each of its experts, or one for each distinct rank and
node."""

Host: TypeAlias = Literal["free", "waits", "drives"]
"""What the host does during a dispatch: goes on issuing, waits for the counts of tokens that it brings unless another
micro-batch is computed beside it, or drives the transfer by itself."""

AUTO = "auto"
"""The dispatcher that `default_dispatcher` says."""

_MOST_ALL_TO_ALL = 8
"""Most ranks that have all-to-alls by default: up to 8, those and all-gathers are as fast as DeepEP
(NVIDIA/Megatron-LM issue 1456)."""


@dataclass(frozen=True)
class Dispatcher:
    """A row of dispatchers.csv.

    reached_node, reached_network: of the bandwidth that the machine has inside and between its innermost domains;
    rack_*: most bandwidth of a rank among more ranks than those of a node; *_s: fixed time of a call. SMs that its
    kernels take are in the accelerator's contention.
    """

    name: str
    counting: Counting
    reached_node: float
    reached_network: float
    rack_dispatch_bytes_per_s: float
    rack_combine_bytes_per_s: float
    dispatch_s: float
    combine_s: float
    host: Host


def default_dispatcher(had: Sequence[str], *, ranks: int, domain: int | None) -> str:
    """The default for experts over so many ranks, where the innermost domain of the network has so many (None: all).

    HybridEP over several ranks where that is a rack; all-to-all over up to 8 in a node; else DeepEP, which sends a
    token to a node once. Instead of one that is not among those `had` the first; "" without any.
    """
    wanted = "alltoall" if ranks <= min(domain or ranks, _MOST_ALL_TO_ALL) else "deepep"
    wanted = "hybridep" if ranks > 1 and domain is not None and domain > LARGEST_NODE else wanted
    return wanted if wanted in had else next(iter(had), "")


def find_dispatcher(name: str) -> Dispatcher:
    """The dispatcher of a name; UnknownNameError with the nearest."""
    known = dispatchers()
    if name not in known:
        raise UnknownNameError("dispatcher", name, known)
    return known[name]


def dispatching(name: str, machine: Machine) -> Dispatching:
    """A dispatcher's numbers on a machine: the profile's own, else those that ship."""
    return machine.dispatchers.get(name) or Dispatching(call_us=1e6 * find_dispatcher(name).dispatch_s)


def profiled_dispatcher(name: str, machine: Machine) -> Dispatcher:
    """The dispatcher of a name with what the machine's profile has of it."""
    found, own = find_dispatcher(name), machine.dispatchers.get(name)
    if own is None:
        return found
    rates = {name: own.bandwidth_share * getattr(found, name) for name in _RATES}
    return replace(found, **rates, dispatch_s=1e-6 * own.call_us, combine_s=1e-6 * own.call_us)


_RATES = ("reached_node", "reached_network", "rack_dispatch_bytes_per_s", "rack_combine_bytes_per_s")


@cache
def dispatchers() -> Mapping[str, Dispatcher]:
    """Every dispatcher by name; sources of the numbers stand beside them in the table."""
    text = files("axonn_tune.frameworks").joinpath("dispatchers.csv").read_text(encoding="utf-8")
    return {one["dispatcher"]: _dispatcher(one) for one in csv.DictReader(text.splitlines())}


def _dispatcher(row: Mapping[str, str]) -> Dispatcher:
    return Dispatcher(
        name=row["dispatcher"],
        counting=cast(Counting, row["counting"]),
        reached_node=float(row["reached_node"]),
        reached_network=float(row["reached_network"]),
        rack_dispatch_bytes_per_s=1e9 * float(row["rack_dispatch_gb_per_s"] or math.inf),
        rack_combine_bytes_per_s=1e9 * float(row["rack_combine_gb_per_s"] or math.inf),
        dispatch_s=1e-6 * float(row["dispatch_us"]),
        combine_s=1e-6 * float(row["combine_us"]),
        host=cast(Host, row["host"]),
    )
