"""Where the rings of a group run: which tiers their edges cross, and how many rings share a link.

A ring visits the group's ranks in ascending order and closes from the last to the first. A *domain*
of a tier is the set of ranks it connects (the ranks of one node, say). An edge crosses out of a
domain when its ends lie in different ones. All groups of an axis run at the same time, so what
counts for bandwidth is how many of their edges leave the busiest domain together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from axonn_tune.grid import GroupShape


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
        return _one_level(*shape.levels[0], domain=domain, world=world)
    (inner_size, inner_stride), (outer_size, _) = shape.levels
    inside = crossing(GroupShape((shape.levels[0],)), domain, world)
    edges = outer_size * (max(inside.edges - 1, 0) + 1)
    sharing = domain if inside.edges or domain % (inner_size * inner_stride) else domain // inner_size
    return Crossing(edges, sharing)


def _one_level(size: int, stride: int, *, domain: int, world: int) -> Crossing:
    """Crossing of groups of `size` ranks `stride` apart; see `crossing`."""
    if stride >= domain:
        return Crossing(size, domain)
    block = size * stride
    phases = min(world // block, domain // gcd(block, domain))
    first = max(min(number * block % domain + stride, domain) - 1 for number in range(phases))
    domains_touched = (first + (size - 1) * stride) // domain + 1
    if domains_touched == 1:
        return Crossing(0, 0)
    return Crossing(domains_touched, _sharing(size, stride, domain=domain, world=world))


_DOMAINS_EXAMINED = 64


def _sharing(size: int, stride: int, *, domain: int, world: int) -> int:
    """Most groups that one domain holds a part of, but not all of: each has one edge that leaves it.

    The pattern repeats; at most 64 domains are looked at, which is all of them but for odd sizes.
    """
    block = size * stride
    busiest = 0
    for number in range(min(-(-world // domain), block // gcd(block, domain), _DOMAINS_EXAMINED)):
        first, end = number * domain, min((number + 1) * domain, world)
        if first // block == (end - 1) // block:
            parts = [(first % block, (end - 1) % block + 1)]
        else:
            parts = [(first % block, block), (0, (end - 1) % block + 1)]
        busiest = max(busiest, sum(_groups_cut(size, stride, begin=begin, end=end) for begin, end in parts))
    return busiest


def _groups_cut(size: int, stride: int, *, begin: int, end: int) -> int:
    """Groups of one block with members both inside and outside the block's ranks `begin` to `end`."""
    touched = min(stride, end - begin)
    whole = max(0, min(stride, end - (size - 1) * stride) - begin)
    return touched - whole
