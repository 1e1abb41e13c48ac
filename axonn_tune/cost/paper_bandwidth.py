"""Bandwidths of the paper's model: its measured table, and equation 7 for groups that span nodes.

A missing table entry is nan here; the caller rejects what depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from axonn_tune.specs.machine import PaperTable
from axonn_tune.units import GIB

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]


class Lookup(Protocol):
    """A rule for the bandwidth of a group."""

    def __call__(self, table: PaperTable, *, inner: Integers, group: Integers) -> Floats:
        """Bandwidths, bytes/s, of groups with `inner` ranks in the axes inside them."""


def table_bandwidth(table: PaperTable, *, inner: Integers, group: Integers) -> Floats:
    """Look bandwidths (bytes/s) up by (product of inner axes, own size); nan where there is no entry.

    An exact entry wins; else the entry with `group: null`, for groups larger than every size listed
    for that inner product. Inner products beyond the largest listed use the largest.
    """
    largest_inner = max((entry.inner for entry in table.table), default=0)
    largest_group = max((entry.group or 0 for entry in table.table), default=0)
    cells = np.full((largest_inner + 1, largest_group + 2), np.nan)
    for entry in sorted(table.table, key=lambda entry: entry.group is not None):
        bandwidth_bytes_per_s = entry.bandwidth_gib_per_s * GIB
        if entry.group is None:
            listed = max((other.group or 0 for other in table.table if other.inner == entry.inner), default=0)
            cells[entry.inner, listed + 1 :] = bandwidth_bytes_per_s
        else:
            cells[entry.inner, entry.group] = bandwidth_bytes_per_s
    return cells[np.minimum(inner, largest_inner), np.minimum(group, largest_group + 1)]


def equation_7_bandwidth(table: PaperTable, *, inner: Integers, group: Integers) -> Floats:
    """Bandwidth of an axis, arXiv 2305.13525 equation 7: β_i = β_inter / min(G_node, ∏_{j<i} G_j), bytes/s.

    For groups that span nodes. A group inside a node (inner · own ≤ G_node) takes its entry of the
    measured table, nan if there is none.
    """
    spanning_bytes_per_s = table.inter_node_gib_per_s * GIB / np.minimum(table.ranks_per_node, inner)
    inside = table_bandwidth(table, inner=inner, group=group)
    return np.where(inner * group <= table.ranks_per_node, inside, spanning_bytes_per_s)


def axis_bandwidths(
    lookup: Lookup, *, table: PaperTable, group: Mapping[str, Integers], order: tuple[str, ...]
) -> dict[str, Floats]:
    """Bandwidth of every axis by one of the two look-ups above, bytes/s: infinite for groups of one.

    `order` names the axes from the fastest-varying rank outwards.
    """
    inner, found = np.ones_like(group[order[0]]), {}
    for axis in order:
        found[axis] = np.where(group[axis] == 1, np.inf, lookup(table, inner=inner, group=group[axis]))
        inner = inner * group[axis]
    return found
