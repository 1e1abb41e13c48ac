"""The layout of a world as a value: axis sizes, rank order, groups. It creates no process group and measures nothing.

`ALL_AXES` names every axis there is; a framework has some of them, and an axis it does not have is of size 1.
Ranks are numbered with the first axis of `order` varying fastest. The group of a rank over an axis
holds the ranks that differ from it in that axis alone; over several axes (`"xy"`), in those alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb, prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from axonn_tune.errors import UsageError

AXES = ("x", "y", "z", "data")
"""Axes of the paper's 4D algorithm."""

STAGE_AXES = (*AXES, "context")
"""Axes of the ranks of one pipeline stage."""

RANK_AXES = (*AXES, "context", "pipeline")
"""Every axis that ranks are numbered by."""

EXPERT_AXES = ("expert_tensor", "expert", "expert_z")
"""Axes of experts, over the same ranks as the others (parallel folding, arXiv 2504.14960), the inner one first."""

ALL_AXES = (*RANK_AXES, "expert", "expert_tensor", "expert_z")
"""Every axis a framework can have."""

BATCH_AXES = ("data", "z")
"""Axes along which ranks take sequences of their own."""

PAPER_ORDER = AXES

WORLD = "xyzdata"
"""The group of all ranks, whatever axes there are; the name is that of the documents."""

ENDS = "ends"
"""First and last pipeline stage, which both hold a tied embedding."""

_SLICE = re.compile(r"([a-z]+)\[(::?)(\d+)\]")
"""Groups over a part of an axis: `context[:8]` of 8 neighbours, `context[::8]` of every eighth rank, one of each."""


@dataclass(frozen=True, order=True)
class GroupShape:
    """Placement of a group's ranks: `(size, stride)` levels, inner to outer.

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


class Folding(NamedTuple):
    """Rank axes that experts fold over, from the inside: first those that shard weights, then those that replicate.

    Several axes of a kind adjoin, from the innermost rank on. What experts leave of the first shards their weights
    (`expert_z`), what they leave of the others replicates them (`expert_data`), but for the inner ranks of these that
    an axis `expert_z` of the grid takes, which shard them, too.
    """

    shards: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()


EXPERT_GROUPS = {
    "expert_tensor": ("expert_tensor",),
    "expert": ("expert",),
    "expert_tensorexpert": EXPERT_AXES[:2],
    "expert_z": ("expert_z",),
    "expert_data": ("expert_data",),
    "contextexpert_data": ("context", "expert_data"),
}
"""Groups of ranks that only experts have, with their axes; the last: copies of an expert where it is not folded over
context."""


EXPERT_STAGE_AXES = ("x", "y", "context", "expert", "expert_z", "expert_data")
"""What `STAGE_AXES` are to experts that are not folded over context."""


def axes_of_ranks(split: Iterable[str]) -> tuple[str, ...]:
    """Axes of the ranks of a pipeline stage, to parameters that are split over some: of experts, or of others."""
    return EXPERT_STAGE_AXES if "expert" in split else STAGE_AXES


class AxisSize:
    """An attribute of a grid: the size of the axis that has its name."""

    def __set_name__(self, owner: type[Grid], name: str) -> None:
        """Remember the axis."""
        self._axis = name

    def __get__(self, grid: Grid, owner: type[Grid]) -> int:
        """The size."""
        return grid.axis_size(self._axis)


@dataclass(frozen=True, init=False)
class Grid:
    """Sizes of the axes, and their order from the fastest-varying rank outwards.

    Axes that `order` leaves out must be of size 1: they take no part in the numbering of ranks, as those of experts.
    """

    sizes: tuple[int, ...]
    order: tuple[str, ...]

    def __init__(self, *sizes: int, order: tuple[str, ...] = PAPER_ORDER, **named: int) -> None:
        """Sizes in the order of `ALL_AXES` or by name, 1 where none is given; ValueError for what makes no world."""
        if len(sizes) > len(ALL_AXES):
            raise ValueError(f"{len(sizes)} sizes for {len(ALL_AXES)} axes: {', '.join(ALL_AXES)}")
        given = dict(zip(ALL_AXES, sizes, strict=False))
        if twice := [axis for axis in named if axis in given]:
            raise ValueError(f"sizes given twice: {', '.join(twice)}")
        given |= named
        unknown = [axis for axis in given if axis not in ALL_AXES]
        if unknown:
            raise ValueError(f"no axis is called {', '.join(unknown)}: known are {', '.join(ALL_AXES)}")
        object.__setattr__(self, "sizes", tuple(given.get(axis, 1) for axis in ALL_AXES))
        object.__setattr__(self, "order", order)
        wrong = [f"{axis}={size}" for axis, size in self.by_axis.items() if size < 1]
        if wrong:
            raise ValueError(f"axis sizes must be at least 1: {', '.join(wrong)}")
        wide = {axis for axis, size in self.by_axis.items() if size > 1}
        if len(set(order)) != len(order) or not set(order) <= set(RANK_AXES) or not wide - {*EXPERT_AXES} <= set(order):
            needed = [axis for axis in RANK_AXES if axis in wide or axis in AXES]
            raise ValueError(f"order must name each of {', '.join(needed)} once, not {', '.join(order)}")

    @property
    def by_axis(self) -> Mapping[str, int]:
        """Size of every axis."""
        return dict(zip(ALL_AXES, self.sizes, strict=True))

    def axis_size(self, axis: str) -> int:
        """Size of one axis."""
        return self.sizes[ALL_AXES.index(axis)]

    x, y, z, data = AxisSize(), AxisSize(), AxisSize(), AxisSize()
    context, pipeline, expert, expert_tensor = AxisSize(), AxisSize(), AxisSize(), AxisSize()

    @property
    def world(self) -> int:
        """Number of ranks: the product of the axes that number them."""
        return prod(self.axis_size(axis) for axis in RANK_AXES)

    @property
    def batch_shares(self) -> int:
        """Shares that the global batch is split into."""
        return prod(self.axis_size(axis) for axis in BATCH_AXES)

    def stride(self, axis: str) -> int:
        """Ranks between neighbours along an axis: the product of the axes inside it."""
        if axis not in self.order:
            return 1
        return prod(self.axis_size(inner) for inner in self.order[: self.order.index(axis)])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank; ValueError outside the world."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside a world of {self.world}")
        return {axis: rank // self.stride(axis) % self.axis_size(axis) for axis in self.order}

    def rank(self, coordinates: dict[str, int]) -> int:
        """Rank of the given coordinates; axes left out are 0."""
        for axis, position in coordinates.items():
            if not 0 <= position < self.axis_size(axis):
                raise ValueError(f"{axis}={position} is outside an axis of {self.axis_size(axis)}")
        return sum(position * self.stride(axis) for axis, position in coordinates.items())

    def members(self, rank: int, axes: str) -> tuple[int, ...]:
        """Ranks of the group of `rank` over `axes` (see `split_axes`), ascending."""
        here, names = self.coordinates(rank), self._axes_of(axes)
        positions = itertools.product(*(range(self.axis_size(axis)) for axis in names))
        return tuple(sorted(self.rank(here | dict(zip(names, place, strict=True))) for place in positions))

    def groups(self, axes: str) -> Iterator[tuple[int, ...]]:
        """Yield every group over `axes`; together they partition the world."""
        names = self._axes_of(axes)
        for rank in range(self.world):
            place = self.coordinates(rank)
            if all(place[axis] == 0 for axis in names):
                yield self.members(rank, axes)

    def group_shape(self, axes: str, folding: Folding | None = None) -> GroupShape:
        """Shape of the groups over `axes`; folding: of experts, which their groups need."""
        if axes in EXPERT_GROUPS:
            sizes = {axis: (self.axis_size(axis), self.stride(axis)) for axis in ALL_AXES}
            levels = [(int(size), int(stride)) for size, stride in expert_levels(axes, sizes, folding or Folding())]
            return merged_shape(sorted(levels, key=lambda level: level[1]))
        names = self._axes_of(axes)
        if len(names) == 1:
            size, stride = level_of(axes, self.axis_size(names[0]), self.stride(names[0]))
            return merged_shape([(int(size), int(stride))])
        return merged_shape((self.axis_size(axis), self.stride(axis)) for axis in self.order if axis in names)

    def _axes_of(self, axes: str) -> tuple[str, ...]:
        """Axes of a group that take part in the numbering."""
        return tuple(axis for axis in split_axes(axes) if axis in self.order)


def split_axes(axes: str) -> tuple[str, ...]:
    """`"xy"` to `("x", "y")`, `"contextdata"` to `("context", "data")`; `WORLD` is all axes."""
    if axes == WORLD:
        return RANK_AXES
    if axes in EXPERT_GROUPS:
        return EXPERT_GROUPS[axes]
    if axes == ENDS:
        return ("pipeline",)
    if part := _SLICE.fullmatch(axes):
        return (part[1],)
    names, rest = list[str](), axes
    while rest:
        name = next((axis for axis in ALL_AXES if rest.startswith(axis) and axis not in names), "")
        if not name:
            raise ValueError(f"{axes!r} does not name axes out of {', '.join(ALL_AXES)}")
        names.append(name)
        rest = rest.removeprefix(name)
    if not names:
        raise ValueError(f"{axes!r} does not name axes out of {', '.join(ALL_AXES)}")
    return tuple(names)


def level_of(axes: str, size: Any, stride: Any) -> tuple[Any, Any]:  # noqa: ANN401 - numbers or columns
    """Size and stride of a group over one axis or over a part of it, from those of the axis."""
    if axes == ENDS:
        return np.minimum(size, 2), stride * np.maximum(size - 1, 1)
    if (part := _SLICE.fullmatch(axes)) is None:
        return size, stride
    count = int(part[3])
    within = np.minimum(size, count)
    return (within, stride) if part[2] == ":" else (size // within, stride * count)


Levels: TypeAlias = Mapping[str, tuple[Any, Any]]
"""Size and stride of each axis: numbers, or columns."""


def expert_levels(group: str, axes: Levels, folding: Folding) -> list[tuple[Any, Any]]:
    """`(size, stride)` levels of a group of experts.

    Experts take ranks of the axes that shard weights first, then of those that replicate: `expert_tensor` the inner
    ones, `expert` the next, and of those left that replicate `expert_z`.
    """
    inner, outer = (_joined_level(axes, names) for names in folding)
    tensor, expert = axes["expert_tensor"][0], axes["expert"][0]
    tensor_inner = np.minimum(tensor, inner[0])
    expert_inner = np.minimum(expert, inner[0] // tensor_inner)
    found, left = dict[str, list[tuple[Any, Any]]](), list[tuple[Any, Any]]()
    for (size, stride), tensors, experts in (
        (inner, tensor_inner, expert_inner),
        (outer, tensor // tensor_inner, expert // expert_inner),
    ):
        found.setdefault("expert_tensor", []).append((tensors, stride))
        found.setdefault("expert", []).append((experts, stride * tensors))
        found.setdefault("expert_tensorexpert", []).append((tensors * experts, stride))
        left.append((size // (tensors * experts), stride * tensors * experts))
    shards, (size, stride) = axes["expert_z"][0], left[1]
    copies = size // shards, stride * shards
    sharded = [left[0], (shards, stride)]
    apart = {"expert_z": sharded, "expert_data": [copies], "contextexpert_data": [axes["context"], copies]}
    return (found | apart)[group]


def _joined_level(axes: Levels, names: tuple[str, ...]) -> tuple[Any, Any]:
    """Size and stride of adjoining axes, several of which begin at the innermost rank."""
    size, stride = (axes[names[0]] if len(names) == 1 else (1, 1)) if names else (1, 1)
    for axis in names if len(names) > 1 else ():
        size = size * axes[axis][0]
    return size, stride


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


def nearest_sizes(ranks: int, size: int) -> list[int]:
    """Other sizes that an axis can have on so many ranks, those nearest to one first."""
    return sorted({*divisors(ranks)} - {size}, key=lambda other: (abs(other - size), other))


MOST_GRIDS = 1_000_000
"""Grids of one search: twenty times those of any power of two that a number of GPUs can be."""


def factorizations(number: int, *, axes: int = len(AXES)) -> NDArray[np.int64]:
    """Every ordered factorization into one factor an axis, as rows in lexicographic order.

    Shape `[factorizations, axes]`; each prime's exponent is split over the axes
    independently, so no row is discarded. UsageError for more rows than `MOST_GRIDS`.
    """
    count = prod(comb(exponent + axes - 1, axes - 1) for exponent in prime_factors(number).values())
    if count > MOST_GRIDS:
        raise UsageError(
            f"{number:,} GPUs have {count:,} grids of {axes} axes, and up to {MOST_GRIDS:,} are searched: give "
            "a number with fewer divisors, such as a power of two"
        )
    rows = np.ones((1, axes), dtype=np.int64)
    for prime, exponent in prime_factors(number).items():
        powers = np.power(np.int64(prime), np.array(list(_splits(exponent, axes)), dtype=np.int64))
        rows = (rows[:, None, :] * powers[None, :, :]).reshape(-1, axes)
    return rows[np.lexsort(rows.T[::-1])]


def _splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as an ordered sum of so many parts, 0 among them."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _splits(total - first, parts - 1):
            yield (first, *rest)


def distinct_orders(sizes: Sequence[int], *, axes: tuple[str, ...] = AXES) -> tuple[tuple[str, ...], ...]:
    """Axis orders that lay out a grid of these sizes differently, each represented once.

    Orders that differ only in where axes of size 1 stand give the same ranks, so those axes are
    put last, in the order of `axes`.
    """
    wide = tuple(axis for axis, size in zip(axes, sizes, strict=True) if size > 1)
    narrow = tuple(axis for axis in axes if axis not in wide)
    return tuple(inner + narrow for inner in itertools.permutations(wide))
