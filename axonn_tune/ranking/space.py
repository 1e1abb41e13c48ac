"""The search space: grids, then shapes (grid with micro-batch), then candidates (with axis order).

Grids that break a constraint go first, micro-batches that do not divide are never made, and memory is
settled before an axis order is tried, since it does not depend on one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from axonn_tune.program.size import COLUMNS
from axonn_tune.cost.columns import Candidates, Floats, Integers
from axonn_tune.program.memory import memory_limit_bytes, price_memory
from axonn_tune.grid import AXES, GroupShape, distinct_orders, divisors, factorizations, merged_shape
from axonn_tune.program.constraints import Constraint, constraints
from axonn_tune.program.dimensions import dimensions, loss_chunks
from axonn_tune.program.operations import GROUP_AXES
from axonn_tune.program.size import Value
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import RECOMPUTES, Recompute, Workload

ORDERS = tuple(itertools.permutations(AXES))


@dataclass(frozen=True)
class Limits:
    """What the user pinned: None leaves it to the search."""

    order: tuple[str, ...] | None = None
    recompute: Recompute | None = None
    micro_batch: int | None = None
    kept_layers: int | None = None
    axes: dict[str, int] = field(default_factory=dict)

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """Kinds of recomputation to try."""
        return RECOMPUTES if self.recompute is None else (self.recompute,)


@dataclass(frozen=True)
class Grids:
    """Every ordered factorization `sizes[n, 4]`, and which constraints each breaks `broken[n, constraints]`."""

    sizes: Integers
    constraints: tuple[Constraint, ...]
    broken: NDArray[np.bool_]

    @property
    def sound(self) -> Integers:
        """Rows of the grids that break none."""
        return np.flatnonzero(~self.broken.any(axis=1))


def list_grids(gpus: int, model: Model, workload: Workload) -> Grids:
    """All grids of a GPU count, with the divisibility constraints applied."""
    sizes = factorizations(gpus)
    columns = dict(zip(AXES, sizes.T, strict=True))
    checks = constraints(model, workload)
    broken = np.stack([check.broken(columns) for check in checks], axis=1)
    return Grids(sizes, checks, broken)


@dataclass(frozen=True)
class Shapes:
    """Grids with a micro-batch: the grid each belongs to, and its symbols as columns."""

    grid: Integers
    micro_batch: Integers
    values: dict[str, Value]

    def __len__(self) -> int:
        return len(self.grid)


def list_shapes(grids: Grids, model: Model, workload: Workload, limits: Limits) -> Shapes:
    """Every sound grid with every micro-batch that divides its share of the batch (and what is pinned)."""
    sound = grids.sound
    for axis, size in limits.axes.items():
        sound = sound[grids.sizes[sound, AXES.index(axis)] == size]
    share = workload.global_batch // (grids.sizes[sound, AXES.index("data")] * grids.sizes[sound, AXES.index("z")])
    options = {int(sequences): _micro_batches(int(sequences), workload, limits) for sequences in np.unique(share)}
    counts = np.array([len(options[int(sequences)]) for sequences in share], dtype=np.int64)
    grid = np.repeat(sound, counts)
    chosen = [options[int(sequences)] for sequences in share]
    micro_batch = np.array([size for sizes in chosen for size in sizes], dtype=np.int64)
    axes: dict[str, Value] = {
        axis: grids.sizes[grid, position].astype(np.float64) for position, axis in enumerate(AXES)
    }
    axes["b"] = micro_batch.astype(np.float64)
    distinct, inverse = np.unique(micro_batch, return_inverse=True)
    chunks = np.array([loss_chunks(int(size) * workload.sequence_length) for size in distinct], dtype=np.float64)
    values = dimensions(model, workload, axes, chunks=chunks[inverse], floor=np.floor)
    return Shapes(grid, micro_batch, values)


def _micro_batches(sequences: int, workload: Workload, limits: Limits) -> tuple[int, ...]:
    """Micro-batches one rank can cut its sequences into; even ones only if they are split in two."""
    step = 2 if workload.split_micro_batch else 1
    return tuple(
        size
        for size in divisors(sequences)
        if size % step == 0 and (limits.micro_batch is None or size == limits.micro_batch)
    )


@dataclass(frozen=True)
class Fitting:
    """Memory of every shape under one kind of recomputation, and the rows that fit."""

    total_bytes: Floats
    kept_layers: Floats
    rows: Integers
    limit_bytes: float


def fit_memory(
    model: Model, machine: Machine, workload: Workload, shapes: Shapes, *, recompute: Recompute, limits: Limits
) -> Fitting:
    """Settle memory: what each shape needs, and how many layers can keep their gathered weights."""
    limit_bytes = memory_limit_bytes(machine.accelerator)
    memory = price_memory(
        model,
        workload,
        shapes.values,
        recompute=recompute,
        limit_bytes=limit_bytes,
        arithmetic=COLUMNS,
        kept_layers=None if limits.kept_layers is None else float(limits.kept_layers),
    )
    total, kept = np.asarray(memory.total_bytes), np.asarray(memory.kept_layers)
    return Fitting(total, kept, np.flatnonzero(total <= limit_bytes), limit_bytes)


@dataclass(frozen=True)
class Placements:
    """Distinct axis orders of the grids in use: for each placement its grid, order and routes."""

    grid: Integers
    order: Integers
    routes: dict[str, Integers]
    shapes: tuple[GroupShape, ...]
    of_grid: dict[int, Integers]


def list_placements(grids: Grids, used: Integers, limits: Limits) -> Placements:
    """Every distinct axis order of each grid in `used`, with the shapes of all its groups."""
    order_numbers = _orders_by_width(limits)
    wide = (grids.sizes[used] > 1) @ np.array([1, 2, 4, 8])
    counts = np.array([len(order_numbers[int(mask)]) for mask in wide], dtype=np.int64)
    grid = np.repeat(used, counts)
    order = np.array([number for mask in wide for number in order_numbers[int(mask)]], dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(counts)))
    of_grid = {int(number): np.arange(starts[i], starts[i + 1]) for i, number in enumerate(used)}
    known: dict[GroupShape, int] = {}
    routes = {axes: _routes(axes, grids.sizes[grid], order, known) for axes in GROUP_AXES}
    return Placements(grid, order, routes, tuple(known), of_grid)


def _orders_by_width(limits: Limits) -> dict[int, tuple[int, ...]]:
    """Numbers of the distinct orders, for each set of axes wider than 1 (as a bit mask)."""
    if limits.order is not None:
        return {mask: (ORDERS.index(limits.order),) for mask in range(16)}
    found = {}
    for mask in range(16):
        sizes = tuple(2 if mask >> position & 1 else 1 for position in range(4))
        found[mask] = tuple(ORDERS.index(order) for order in distinct_orders((sizes[0], sizes[1], sizes[2], sizes[3])))
    return found


def _routes(axes: str, sizes: Integers, order: Integers, known: dict[GroupShape, int]) -> Integers:
    """Number of each row's group shape over `axes`; new shapes are added to `known`."""
    if axes == "xyzdata":
        world = int(np.prod(sizes[0])) if len(sizes) else 1
        return np.full(len(sizes), known.setdefault(merged_shape([(world, 1)]), len(known)))
    names = (axes,) if axes in AXES else tuple(axes)
    levels = [_level(axis, sizes, order) for axis in names]
    code = np.zeros(len(sizes), dtype=np.int64)
    for size, stride in levels:
        distinct, number = np.unique(size << 32 | stride, return_inverse=True)
        code = code * len(distinct) + number
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    numbers = []
    for row in first.tolist():
        pairs = sorted(((int(size[row]), int(stride[row])) for size, stride in levels), key=lambda level: level[1])
        numbers.append(known.setdefault(merged_shape(pairs), len(known)))
    return np.array(numbers, dtype=np.int64)[inverse]


def _level(axis: str, sizes: Integers, order: Integers) -> tuple[Integers, Integers]:
    """Size and stride of an axis for each row; an axis of size 1 has stride 1."""
    position = AXES.index(axis)
    inside = np.array([[names.index(other) < names.index(axis) for other in AXES] for names in ORDERS])
    stride = np.where(inside[order], sizes, 1).prod(axis=1)
    size = sizes[:, position]
    return size, np.where(size > 1, stride, 1)


def list_candidates(shapes: Shapes, rows: Integers, placements: Placements) -> tuple[Candidates, Integers]:
    """Every placement of every shape in `rows`; also the placement of each candidate."""
    chosen = [placements.of_grid[int(grid)] for grid in shapes.grid[rows]]
    placement = np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64)
    shape = np.repeat(rows, [len(found) for found in chosen])
    routes = {axes: numbers[placement] for axes, numbers in placements.routes.items()}
    return Candidates(shape, routes), placement
