"""The grid as a value: axis sizes, rank order, groups. It creates no process group and measures nothing.

Ranks are numbered with the first axis of `order` varying fastest. The group of a rank over an axis
holds the ranks that differ from it in that axis alone; over several axes (`"xy"`), in those alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import comb, prod

import numpy as np
from numpy.typing import NDArray

AXES = ("x", "y", "z", "data")
PAPER_ORDER = AXES


@dataclass(frozen=True, order=True)
class GroupShape:
    """How a group's ranks lie among all ranks: `(size, stride)` levels, inner to outer.

    A group over one axis, or over neighbouring axes, has one level; a size-1 group has none.
    """

    levels: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return prod(size for size, _ in self.levels)

    @property
    def span(self) -> int:
        """Ranks in the aligned block that holds the group and its siblings."""
        return self.levels[-1][0] * self.levels[-1][1] if self.levels else 1


@dataclass(frozen=True)
class Grid:
    """Sizes of the four axes, and their order from the fastest-varying rank outwards."""

    x: int = 1
    y: int = 1
    z: int = 1
    data: int = 1
    order: tuple[str, ...] = PAPER_ORDER

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(AXES):
            raise ValueError(f"order must name each of {', '.join(AXES)} once, not {', '.join(self.order)}")
        wrong = [f"{axis}={self.axis_size(axis)}" for axis in AXES if self.axis_size(axis) < 1]
        if wrong:
            raise ValueError(f"axis sizes must be at least 1: {', '.join(wrong)}")

    def axis_size(self, axis: str) -> int:
        """Size of one axis."""
        return {"x": self.x, "y": self.y, "z": self.z, "data": self.data}[axis]

    @property
    def world(self) -> int:
        """Number of ranks, x * y * z * data."""
        return self.x * self.y * self.z * self.data

    def stride(self, axis: str) -> int:
        """Ranks between neighbours along an axis: the product of the axes inside it."""
        return prod(self.axis_size(inner) for inner in self.order[: self.order.index(axis)])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank; ValueError outside the world."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside a world of {self.world}")
        return {axis: rank // self.stride(axis) % self.axis_size(axis) for axis in AXES}

    def rank(self, coordinates: dict[str, int]) -> int:
        """Rank of the given coordinates; axes left out are 0."""
        for axis, position in coordinates.items():
            if not 0 <= position < self.axis_size(axis):
                raise ValueError(f"{axis}={position} is outside an axis of {self.axis_size(axis)}")
        return sum(position * self.stride(axis) for axis, position in coordinates.items())

    def members(self, rank: int, axes: str) -> tuple[int, ...]:
        """Ranks of the group of `rank` over `axes` (see `split_axes`), ascending."""
        here, names = self.coordinates(rank), split_axes(axes)
        positions = itertools.product(*(range(self.axis_size(axis)) for axis in names))
        return tuple(sorted(self.rank(here | dict(zip(names, place, strict=True))) for place in positions))

    def groups(self, axes: str) -> Iterator[tuple[int, ...]]:
        """Yield every group over `axes`; together they partition the world."""
        names = split_axes(axes)
        for rank in range(self.world):
            place = self.coordinates(rank)
            if all(place[axis] == 0 for axis in names):
                yield self.members(rank, axes)

    def group_shape(self, axes: str) -> GroupShape:
        """Shape of the groups over `axes`."""
        names = [axis for axis in self.order if axis in split_axes(axes)]
        return merged_shape((self.axis_size(axis), self.stride(axis)) for axis in names)


def split_axes(axes: str) -> tuple[str, ...]:
    """`"xy"` to `("x", "y")`; `"data"` stays one axis; `"xyzdata"` is all four."""
    letters, data = (axes[:-4], ("data",)) if axes.endswith("data") else (axes, ())
    names = (*letters, *data)
    if not names or len(set(names)) != len(names) or not set(names) <= set(AXES):
        raise ValueError(f"{axes!r} does not name axes out of {', '.join(AXES)}")
    return names


def merged_shape(levels: Iterator[tuple[int, int]] | list[tuple[int, int]]) -> GroupShape:
    """Group shape of `(size, stride)` levels given inner to outer: size-1 levels go, adjoining ones join."""
    merged: list[tuple[int, int]] = []
    for size, stride in levels:
        if size == 1:
            continue
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return GroupShape(tuple(merged))


def prime_factors(number: int) -> dict[int, int]:
    """Prime factors of a positive number with their exponents."""
    factors: dict[int, int] = {}
    rest, candidate = number, 2
    while candidate * candidate <= rest:
        while rest % candidate == 0:
            factors[candidate] = factors.get(candidate, 0) + 1
            rest //= candidate
        candidate += 1
    if rest > 1:
        factors[rest] = factors.get(rest, 0) + 1
    return factors


def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a positive number, ascending."""
    found = [1]
    for prime, exponent in prime_factors(number).items():
        found = [known * prime**power for known in found for power in range(exponent + 1)]
    return tuple(sorted(found))


def count_factorizations(number: int) -> int:
    """Ordered factorizations of a number into four factors: a product of binomials over its primes."""
    return prod(comb(exponent + 3, 3) for exponent in prime_factors(number).values())


def factorizations(number: int) -> NDArray[np.int64]:
    """Every ordered factorization into four factors, as rows `(x, y, z, data)`, lexicographic.

    Shape `[count_factorizations(number), 4]`; each prime's exponent is dealt out to the four axes
    independently, so nothing is enumerated and thrown away.
    """
    rows = np.ones((1, 4), dtype=np.int64)
    for prime, exponent in prime_factors(number).items():
        dealt = [
            (a, b, c, exponent - a - b - c)
            for a in range(exponent + 1)
            for b in range(exponent + 1 - a)
            for c in range(exponent + 1 - a - b)
        ]
        powers = np.power(np.int64(prime), np.array(dealt, dtype=np.int64))
        rows = (rows[:, None, :] * powers[None, :, :]).reshape(-1, 4)
    return rows[np.lexsort(rows.T[::-1])]


def distinct_orders(sizes: tuple[int, int, int, int]) -> tuple[tuple[str, ...], ...]:
    """Axis orders that lay a grid of these sizes out differently, each represented once.

    Orders that differ only in where axes of size 1 stand give the same ranks, so those axes are
    put last, in the order of `AXES`.
    """
    wide = tuple(axis for axis, size in zip(AXES, sizes, strict=True) if size > 1)
    narrow = tuple(axis for axis in AXES if axis not in wide)
    return tuple(inner + narrow for inner in itertools.permutations(wide))
