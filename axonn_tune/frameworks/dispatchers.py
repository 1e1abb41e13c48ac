"""Dispatchers of tokens to experts: what each counts, and how much of a link it reaches."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal, TypeAlias, cast

from axonn_tune.errors import UnknownNameError

Counting: TypeAlias = Literal["copy", "rank"]
"""Which copies of a token leave a rank: one for each of its experts, or one for each distinct rank and node."""


@dataclass(frozen=True)
class Dispatcher:
    """A row of dispatchers.csv.

    reached_node, reached_network: fractions of a link's bandwidth inside and between nodes; *_s: fixed time of a call.
    """

    name: str
    counting: Counting
    reached_node: float
    reached_network: float
    dispatch_s: float
    combine_s: float


def find_dispatcher(name: str) -> Dispatcher:
    """The dispatcher of a name; UnknownNameError with the nearest."""
    known = dispatchers()
    if name not in known:
        raise UnknownNameError("dispatcher", name, known)
    return known[name]


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
        dispatch_s=1e-6 * float(row["dispatch_us"]),
        combine_s=1e-6 * float(row["combine_us"]),
    )
