"""Rank orders of grids, the routes of their groups, and candidates: shapes with a rank order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from axonn_tune.cost.columns import Candidates, RouteTable, distinct
from axonn_tune.grid import (
    ALL_AXES,
    EXPERT_AXES,
    EXPERT_GROUPS,
    RANK_AXES,
    WORLD,
    Folding,
    GroupShape,
    distinct_orders,
    expert_levels,
    level_of,
    merged_shape,
    split_axes,
)
from axonn_tune.program.operations import Integers, Sent
from axonn_tune.ranking.shapes import Shapes
from axonn_tune.ranking.space import Grids, Problem, permuted_axes


class Routes(dict[str, Integers]):
    """Numbers of the group shapes of some placements, by group of axes: worked out when first asked for.

    shapes: what they number, more with every group.
    """

    def __init__(self, levels: Mapping[str, tuple[Integers, Integers]], problem: Problem, rows: int) -> None:
        super().__init__()
        self._levels, self._problem, self._rows = levels, problem, rows
        self.shapes = dict[GroupShape, int]()

    def __missing__(self, axes: str) -> Integers:
        folding, world = self._problem.framework.step.folding, self._problem.gpus
        self[axes] = _routes(axes, self._levels, self.shapes, folding, rows=self._rows, world=world)
        return self[axes]


@dataclass(frozen=True)
class Placements:
    """Distinct rank orders of the grids in use: for each placement its grid, number of its order, and routes; tables of
    these, by groups, what is sent over them and the time that a call takes the software."""

    grid: Integers
    order: Integers
    orders: tuple[tuple[str, ...], ...]
    routes: Routes
    of_grid: dict[int, Integers]
    tables: dict[tuple[tuple[str, ...], frozenset[tuple[Sent, str]], float], RouteTable] = field(default_factory=dict)

    @property
    def shapes(self) -> tuple[GroupShape, ...]:
        """What the routes number so far."""
        return tuple(self.routes.shapes)


def list_placements(grids: Grids, used: Integers, problem: Problem) -> Placements:
    """Every distinct rank order of each grid in `used`."""
    order_numbers = _orders_by_width(problem)
    wide = _width(grids, used)
    counts = np.array([len(order_numbers[int(mask)]) for mask in wide], dtype=np.int64)
    grid = np.repeat(used, counts)
    order = np.array([number for mask in wide for number in order_numbers[int(mask)]], dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(counts)))
    of_grid = {int(number): np.arange(starts[i], starts[i + 1]) for i, number in enumerate(used)}
    levels = {axis: _level(axis, grids, grid, order, problem.orders) for axis in problem.axes}
    return Placements(grid, order, problem.orders, Routes(levels, problem, len(grid)), of_grid)


def count_orders(problem: Problem, grids: Grids, rows: Integers) -> int:
    """Distinct rank orders of some grids, of each as often as it is there."""
    numbers = _orders_by_width(problem)
    return int(np.array([len(numbers[mask]) for mask in range(len(numbers))])[_width(grids, rows)].sum())


def _width(grids: Grids, rows: Integers) -> Integers:
    """Axes wider than 1 of each grid in `rows`, as a bit mask."""
    numbered = [place for place, axis in enumerate(grids.axes) if axis in RANK_AXES]
    mask: Integers = (grids.sizes[rows][:, numbered] > 1) @ (1 << np.arange(len(numbered)))
    return mask


def _orders_by_width(problem: Problem) -> Mapping[int, tuple[int, ...]]:
    """Numbers of the distinct orders, for each set of axes wider than 1 (as a bit mask)."""
    axes, orders = tuple(axis for axis in problem.axes if axis in RANK_AXES), problem.orders
    masks = range(1 << len(axes))
    if len(orders) == 1:
        return dict.fromkeys(masks, (0,))
    inner, outer = permuted_axes(axes)
    found, number = {}, {order: place for place, order in enumerate(orders)}
    for mask in masks:
        sizes = tuple(2 if mask >> position & 1 else 1 for position in range(len(inner)))
        found[mask] = tuple(number[*order, *outer] for order in distinct_orders(sizes, axes=inner))
    return found


def _level(
    axis: str, grids: Grids, grid: Integers, order: Integers, orders: tuple[tuple[str, ...], ...]
) -> tuple[Integers, Integers]:
    """Size and stride of an axis for each placement; an axis of size 1 has stride 1."""
    sizes = grids.sizes[grid]
    if axis in EXPERT_AXES:
        return sizes[:, grids.axes.index(axis)], np.ones(len(grid), dtype=np.int64)
    numbered = [other for other in grids.axes if other in RANK_AXES]
    inside = np.array([[names.index(other) < names.index(axis) for other in numbered] for names in orders])
    ranks = sizes[:, [grids.axes.index(other) for other in numbered]]
    stride = np.where(inside[order], ranks, 1).prod(axis=1)
    size = sizes[:, grids.axes.index(axis)]
    return size, np.where(size > 1, stride, 1)


def _routes(
    axes: str,
    level: Mapping[str, tuple[Integers, Integers]],
    known: dict[GroupShape, int],
    folding: Folding,
    *,
    rows: int,
    world: int,
) -> Integers:
    """Number of each placement's group shape over `axes`; new shapes are added to `known`."""
    if axes == WORLD:
        return np.full(rows, known.setdefault(merged_shape([(world, 1)]), len(known)))
    alone = np.ones(rows, dtype=np.int64), np.ones(rows, dtype=np.int64)
    if axes in EXPERT_GROUPS:
        levels = expert_levels(axes, dict.fromkeys(ALL_AXES, alone) | dict(level), folding)
    else:
        levels = [level.get(axis, alone) for axis in split_axes(axes)]
    if axes not in EXPERT_GROUPS and len(levels) == 1:
        levels = [level_of(axes, *levels[0])]
    code = np.zeros(rows, dtype=np.int64)
    found = [(alone[0] * size, alone[0] * stride) for size, stride in levels]
    for size, stride in found:
        values, _, number = distinct(size << 32 | stride)
        code = code * len(values) + number
    _, first, inverse = distinct(code)
    numbers = []
    for row in first.tolist():
        pairs = sorted(((int(size[row]), int(stride[row])) for size, stride in found), key=lambda pair: pair[1])
        numbers.append(known.setdefault(merged_shape(pairs), len(known)))
    return np.array(numbers, dtype=np.int64)[inverse]


def list_candidates(
    shapes: Shapes, rows: Integers, placements: Placements, groups: Sequence[str]
) -> tuple[Candidates, Integers]:
    """Every placement of every shape in `rows`, with its routes over some groups; also the placement of each."""
    chosen = [placements.of_grid[int(grid)] for grid in shapes.grid[rows]]
    placement = np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64)
    shape = np.repeat(rows, [len(found) for found in chosen])
    routes = {axes: placements.routes[axes][placement] for axes in (*groups, "x")}
    return Candidates(shape, routes), placement
