"""The search space: grids, then shapes (grid with micro-batch and chunks), then candidates (with rank order).

Grids that violate a constraint are rejected first, and only micro-batches that divide are listed. Memory is checked
before rank orders, since it does not depend on them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from axonn_tune.cost.columns import Candidates, Floats, Integers, distinct
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.description import Framework
from axonn_tune.grid import (
    ALL_AXES,
    AXES,
    BATCH_AXES,
    WORLD,
    GroupShape,
    distinct_orders,
    divisors,
    factorizations,
    merged_shape,
    split_axes,
)
from axonn_tune.program.constraints import Constraint, constraints
from axonn_tune.program.dimensions import dimensions, loss_chunks
from axonn_tune.program.memory import Memory, memory_limit_bytes, price_memory
from axonn_tune.program.size import COLUMNS, Value
from axonn_tune.program.step import Stage, StepProgram
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import RECOMPUTES, Recompute, Workload

RankBy: TypeAlias = Literal["communication", "exposed", "iteration"]

FIRST, MIDDLE, LAST = Stage(True, False), Stage(False, False), Stage(False, True)


@dataclass(frozen=True)
class Limits:
    """What the user pinned: None leaves it to the search."""

    order: tuple[str, ...] | None = None
    recompute: Recompute | None = None
    micro_batch: int | None = None
    kept_layers: int | None = None
    axes: dict[str, int] = field(default_factory=dict)
    chunks: int | None = None

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """Kinds of recompute to try."""
        return RECOMPUTES if self.recompute is None else (self.recompute,)


@dataclass(frozen=True)
class Problem:
    """Inputs of a search.

    pipeline: pipeline stages are part of the search. tokens_total: tokens of the whole training run, for its cost.
    """

    model: Model
    machine: Machine
    workload: Workload
    gpus: int
    limits: Limits = field(default_factory=Limits)
    rank_by: RankBy = "communication"
    framework: Framework = AXONN_TUNE
    pipeline: bool = False
    tokens_total: int | None = None

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Axes that are searched, in the order of `ALL_AXES`; the paper's four are always among the columns."""
        return tuple(
            axis
            for axis in ALL_AXES
            if axis in AXES or (axis in self.framework.axes and (axis != "pipeline" or self.pipeline))
        )

    @cached_property
    def orders(self) -> tuple[tuple[str, ...], ...]:
        """Every rank order that may be tried, each of all axes; pipeline stages are outermost."""
        if self.limits.order is not None:
            named = self.limits.order
            return ((*named, *(axis for axis in self.axes if axis not in named)),)
        if self.framework.permuted:
            outer = tuple(axis for axis in self.axes if axis not in AXES)
            return tuple((*inner, *outer) for inner in itertools.permutations(AXES))
        order = tuple(axis for axis in self.framework.axes if axis in self.axes)
        return ((*order, *(axis for axis in self.axes if axis not in order)),)


@dataclass(frozen=True)
class Grids:
    """Every ordered factorization `sizes[n, axes]`, and its violated constraints `broken[n, constraints]`."""

    axes: tuple[str, ...]
    sizes: Integers
    constraints: tuple[Constraint, ...]
    broken: NDArray[np.bool_]

    @property
    def sound(self) -> Integers:
        """Rows of the grids without violations."""
        return np.flatnonzero(~self.broken.any(axis=1))

    def sound_as_asked(self, pins: Mapping[str, int]) -> Integers:
        """Rows of the grids with the pinned axis sizes."""
        rows = self.sound
        for axis, size in pins.items():
            if axis in self.axes:
                rows = rows[self.column(axis)[rows] == size]
        return rows

    def column(self, axis: str) -> Integers:
        """Sizes of one axis."""
        return self.sizes[:, self.axes.index(axis)]


def sound_sizes(gpus: int, model: Model, workload: Workload) -> Integers:
    """Sizes `[n, 4]` of the 4D grids of a GPU count that break no divisibility constraint."""
    sizes = factorizations(gpus)
    columns = dict.fromkeys(ALL_AXES, np.ones(len(sizes), dtype=np.int64)) | dict(zip(AXES, sizes.T, strict=True))
    broken = [check.broken(columns) for check in constraints(model, workload, AXONN_TUNE)]
    found: Integers = sizes[~np.any(broken, axis=0)]
    return found


def list_grids(problem: Problem) -> Grids:
    """All grids of a GPU count, with the divisibility constraints applied."""
    had = tuple(axis for axis in problem.axes if axis in problem.framework.axes)
    found = factorizations(problem.gpus, axes=len(had))
    sizes = np.ones((len(found), len(problem.axes)), dtype=np.int64)
    sizes[:, [problem.axes.index(axis) for axis in had]] = found
    columns = dict(zip(problem.axes, sizes.T, strict=True))
    columns |= {axis: np.ones(len(sizes), dtype=np.int64) for axis in ALL_AXES if axis not in columns}
    checks = constraints(problem.model, problem.workload, problem.framework)
    broken = np.stack([check.broken(columns) for check in checks], axis=1)
    return Grids(problem.axes, sizes, checks, broken)


@dataclass(frozen=True)
class StageRows:
    """One stage of every shape with several: its kind, blocks, and blocks whose activations are held together."""

    stage: Stage
    layers: Floats
    held: Floats


@dataclass(frozen=True)
class Shapes:
    """Grids with a micro-batch and chunks of a stage: the grid each belongs to, and its symbols as columns."""

    problem: Problem
    grid: Integers
    micro_batch: Integers
    chunks: Integers
    values: dict[str, Value]

    def __len__(self) -> int:
        return len(self.grid)

    def sizes(self, axis: str) -> Integers:
        """Sizes of an axis."""
        return np.broadcast_to(np.asarray(self.values[axis]), len(self)).astype(np.int64)

    @cached_property
    def stages(self) -> Integers:
        """Pipeline stages."""
        return self.sizes("pipeline")

    @cached_property
    def piped(self) -> Integers:
        """Rows with more than one stage."""
        return np.flatnonzero(self.stages > 1)

    @cached_property
    def stage_rows(self) -> tuple[StageRows, ...]:
        """The stages that can need most memory or time: the first, the one after it, the last."""
        return tuple(_stage_rows(self))

    def stage_values(self, one: StageRows) -> dict[str, Value]:
        """Symbols of one stage of every shape with several."""
        axes = {axis: _taken(self.values[axis], self.piped) for axis in (*ALL_AXES, "b")}
        found = dimensions(
            self.problem.model,
            self.problem.workload,
            axes,
            chunks=_taken(self.values["C"], self.piped),
            arithmetic=COLUMNS,
            options=self.problem.framework.step,
            stage=one.stage,
            layers=one.layers,
        )
        return {**found, "held": one.held}


def list_shapes(grids: Grids, problem: Problem) -> Shapes:
    """Every sound grid with every micro-batch that divides its share of the batch (and what is pinned)."""
    workload, limits = problem.workload, problem.limits
    sound = grids.sound_as_asked(limits.axes)
    shares = np.prod([grids.column(axis)[sound] for axis in BATCH_AXES if axis in grids.axes], axis=0, dtype=np.int64)
    share = workload.global_batch // shares
    options = {int(sequences): _micro_batches(int(sequences), workload, limits) for sequences in distinct(share)[0]}
    counts = np.array([len(options[int(sequences)]) for sequences in share], dtype=np.int64)
    grid = np.repeat(sound, counts)
    chosen = [options[int(sequences)] for sequences in share]
    micro_batch = np.array([size for sizes in chosen for size in sizes], dtype=np.int64)
    chunks = np.ones(len(grid), dtype=np.int64)
    if "pipeline" in grids.axes:
        grid, micro_batch, chunks = _with_chunks(grids, problem, grid, micro_batch, np.repeat(share, counts))
    elif limits.chunks not in (None, 1):
        grid, micro_batch, chunks = grid[:0], micro_batch[:0], chunks[:0]
    return Shapes(problem, grid, micro_batch, chunks, _values(grids, problem, grid, micro_batch))


def _values(grids: Grids, problem: Problem, grid: Integers, micro_batch: Integers) -> dict[str, Value]:
    """Symbols of a rank that has all blocks; those of a pipeline stage follow from them."""
    axes: dict[str, Value] = {axis: 1.0 for axis in ALL_AXES if axis not in grids.axes}
    axes |= {axis: grids.column(axis)[grid].astype(np.float64) for axis in grids.axes}
    axes["b"] = micro_batch.astype(np.float64)
    return dimensions(
        problem.model,
        problem.workload,
        axes,
        chunks=_loss_chunks(problem, micro_batch, axes["context"]),
        arithmetic=COLUMNS,
        options=problem.framework.step,
    )


def _loss_chunks(problem: Problem, micro_batch: Integers, context: Value) -> Value:
    """Chunks of the loss, 1 for whole logits."""
    if not problem.framework.step.chunked_loss:
        return 1.0
    tokens = micro_batch * problem.workload.sequence_length // np.asarray(context).astype(np.int64)
    counts, _, inverse = distinct(tokens)
    return np.array([loss_chunks(int(count)) for count in counts], dtype=np.float64)[inverse]


def _micro_batches(sequences: int, workload: Workload, limits: Limits) -> tuple[int, ...]:
    """Micro-batch sizes that divide a rank's sequences; only even ones with two-batch overlap."""
    step = 2 if workload.split_micro_batch else 1
    return tuple(
        size
        for size in divisors(sequences)
        if size % step == 0 and (limits.micro_batch is None or size == limits.micro_batch)
    )


def _with_chunks(
    grids: Grids, problem: Problem, grid: Integers, micro_batch: Integers, share: Integers
) -> tuple[Integers, Integers, Integers]:
    """Every shape with every valid number of chunks per stage: equal chunks, micro-batches in groups."""
    asked, layers = problem.limits.chunks, problem.model.layers
    stages, batches = grids.column("pipeline")[grid], share // micro_batch
    kept = [np.arange(len(grid) if asked in (None, 1) else 0)]
    counts = [np.ones(len(kept[0]), dtype=np.int64)]
    if problem.framework.schedule.interleaved:
        for chunks in divisors(layers)[1:] if asked is None else [asked] * (asked > 1):
            # Chunks of as many blocks each, as Megatron-LM's flags have it; others where they are asked for.
            cut = layers % (stages * chunks) == 0 if asked is None else stages * chunks <= layers
            fits = (stages > 1) & cut & (batches % stages == 0)
            kept.append(np.flatnonzero(fits))
            counts.append(np.full(len(kept[-1]), chunks, dtype=np.int64))
    rows = np.concatenate(kept)
    return grid[rows], micro_batch[rows], np.concatenate(counts)


def _stage_rows(shapes: Shapes) -> Iterator[StageRows]:
    # Imported here: most searches have no pipeline, and start-up time is theirs.
    from axonn_tune.program.pipeline import in_flight_chunks, split_layers

    stages, chunks = shapes.stages[shapes.piped], shapes.chunks[shapes.piped]
    batches = np.asarray(shapes.values["A"])[shapes.piped].astype(np.int64)
    uneven = tuple(_uneven_rows(shapes.problem.model.layers, stages, chunks, batches))
    counts, _, which = distinct(stages)
    splits = [split_layers(shapes.problem.model.layers, parts=int(count)) for count in counts]
    for stage, number in ((FIRST, 0), (MIDDLE, 1), (LAST, -1)):
        layers = np.array([split[min(number, len(split) - 1)] for split in splits], dtype=np.float64)[which]
        place = stages - 1 if number < 0 else np.minimum(number, stages - 1)
        alive = np.ones(len(stages))
        for count in distinct(chunks)[0]:
            mine = chunks == count
            flying = in_flight_chunks(place[mine], stages=stages[mine], micro_batches=batches[mine], chunks=int(count))
            alive[mine] = np.asarray(flying) / count
        held = alive * layers
        for rows, blocks in uneven:
            layers[rows], held[rows] = blocks[number]
        yield StageRows(stage, layers, held)


def _uneven_rows(
    layers: int, stages: Integers, chunks: Integers, batches: Integers
) -> Iterator[tuple[Integers, dict[int, tuple[int, float]]]]:
    """Rows whose chunks differ in blocks: of the first stage, the one between the ends that holds most, and the last,
    all blocks and those held together."""
    from axonn_tune.program.pipeline import in_flight, split_layers

    several = np.flatnonzero((chunks > 1) & (layers % (stages * chunks) != 0))
    kinds = {(int(stages[one]), int(chunks[one]), int(batches[one])) for one in several}
    for count, parts, micro_batches in sorted(kinds):
        rows = several[(stages[several] == count) & (chunks[several] == parts) & (batches[several] == micro_batches)]
        split = split_layers(layers, parts=count * parts)
        held = [
            in_flight(number, stages=count, micro_batches=micro_batches, weights=split[number::count])
            for number in range(count)
        ]
        most = max(range(1, max(count - 1, 2)), key=lambda number: held[min(number, count - 1)])
        places = {0: 0, 1: min(most, count - 1), -1: count - 1}
        yield rows, {name: (sum(split[place::count]), float(held[place])) for name, place in places.items()}


def _taken(value: Value, rows: Integers) -> Value:
    return value if isinstance(value, float) else value[rows]


@dataclass(frozen=True)
class Fitting:
    """Memory of every shape under one kind of recompute, and the rows that fit.

    kept_layers: of pipeline stages, of each of them.
    """

    total_bytes: Floats
    kept_layers: Floats
    rows: Integers
    limit_bytes: float


def fit_memory(shapes: Shapes, program: StepProgram) -> Fitting:
    """Memory of each shape, and its number of layers that are not resharded."""
    limit_bytes = memory_limit_bytes(shapes.problem.machine.accelerator)
    asked = shapes.problem.limits.kept_layers
    values = {**shapes.values, "held": shapes.values["L"]}
    memory = price_memory(
        program,
        values,
        limit_bytes=limit_bytes,
        arithmetic=COLUMNS,
        kept_layers=None if asked is None else float(asked),
    )
    total, kept = (np.broadcast_to(np.asarray(one), len(shapes)) for one in (memory.total_bytes, memory.kept_layers))
    if len(shapes.piped):
        total, kept = total.copy(), kept.copy()
        total[shapes.piped], kept[shapes.piped] = _fit_stages(shapes, program, limit_bytes)
    return Fitting(total, kept, np.flatnonzero(total <= limit_bytes), limit_bytes)


def _fit_stages(shapes: Shapes, program: StepProgram, limit_bytes: float) -> tuple[Floats, Floats]:
    """Memory of the largest stage of each shape with several, and the layers not resharded on every stage."""
    asked = shapes.problem.limits.kept_layers
    stages = [(one, shapes.stage_values(one)) for one in shapes.stage_rows]

    def priced(one: StageRows, values: dict[str, Value], kept: Floats | float | None) -> Memory:
        return price_memory(
            program, values, limit_bytes=limit_bytes, arithmetic=COLUMNS, kept_layers=kept, stage=one.stage
        )

    alone = [priced(one, values, asked) for one, values in stages]
    kept = np.maximum.reduce([one.layers for one, _ in stages])
    for (one, _), memory in zip(stages, alone, strict=True):
        fitting = np.asarray(memory.kept_layers)
        kept = np.where(fitting < one.layers, np.minimum(kept, fitting), kept)
    largest = np.zeros(len(shapes.piped))
    for (one, values), memory in zip(stages, alone, strict=True):
        here = np.minimum(kept, one.layers)
        same = np.array_equal(here, np.asarray(memory.kept_layers))
        largest = np.maximum(largest, (memory if same else priced(one, values, here)).total_bytes)
    return largest, kept


@dataclass(frozen=True)
class Placements:
    """Distinct rank orders of the grids in use: for each placement its grid, order and routes."""

    grid: Integers
    order: Integers
    routes: dict[str, Integers]
    shapes: tuple[GroupShape, ...]
    of_grid: dict[int, Integers]


def list_placements(grids: Grids, used: Integers, problem: Problem, groups: tuple[str, ...]) -> Placements:
    """Every distinct rank order of each grid in `used`, with the shapes of all its groups."""
    order_numbers = _orders_by_width(problem)
    wide = (grids.sizes[used] > 1) @ (1 << np.arange(len(grids.axes)))
    counts = np.array([len(order_numbers[int(mask)]) for mask in wide], dtype=np.int64)
    grid = np.repeat(used, counts)
    order = np.array([number for mask in wide for number in order_numbers[int(mask)]], dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(counts)))
    of_grid = {int(number): np.arange(starts[i], starts[i + 1]) for i, number in enumerate(used)}
    known: dict[GroupShape, int] = {}
    layout = _Levels(grids, grid, order, problem.orders)
    routes = {axes: layout.routes(axes, known) for axes in groups}
    return Placements(grid, order, routes, tuple(known), of_grid)


def _orders_by_width(problem: Problem) -> Mapping[int, tuple[int, ...]]:
    """Numbers of the distinct orders, for each set of axes wider than 1 (as a bit mask)."""
    axes, orders = problem.axes, problem.orders
    masks = range(1 << len(axes))
    if len(orders) == 1:
        return dict.fromkeys(masks, (0,))
    found, outer = {}, tuple(axis for axis in axes if axis not in AXES)
    for mask in masks:
        sizes = tuple(2 if mask >> position & 1 else 1 for position in range(len(AXES)))
        found[mask] = tuple(orders.index((*order, *outer)) for order in distinct_orders(sizes))
    return found


@dataclass(frozen=True)
class _Levels:
    """Sizes and strides of every axis for each placement."""

    grids: Grids
    grid: Integers
    order: Integers
    orders: tuple[tuple[str, ...], ...]

    def routes(self, axes: str, known: dict[GroupShape, int]) -> Integers:
        """Number of each row's group shape over `axes`; new shapes are added to `known`."""
        if axes == WORLD:
            world = int(np.prod(self.grids.sizes[0])) if len(self.grids.sizes) else 1
            return np.full(len(self.grid), known.setdefault(merged_shape([(world, 1)]), len(known)))
        levels = [self.ends()] if axes == "ends" else [self.level(axis) for axis in split_axes(axes)]
        code = np.zeros(len(self.grid), dtype=np.int64)
        for size, stride in levels:
            values, _, number = distinct(size << 32 | stride)
            code = code * len(values) + number
        _, first, inverse = distinct(code)
        numbers = []
        for row in first.tolist():
            pairs = sorted(((int(size[row]), int(stride[row])) for size, stride in levels), key=lambda level: level[1])
            numbers.append(known.setdefault(merged_shape(pairs), len(known)))
        return np.array(numbers, dtype=np.int64)[inverse]

    def level(self, axis: str) -> tuple[Integers, Integers]:
        """Size and stride of an axis for each row; an axis of size 1 has stride 1."""
        if axis not in self.grids.axes:
            return np.ones(len(self.grid), dtype=np.int64), np.ones(len(self.grid), dtype=np.int64)
        axes = self.grids.axes
        inside = np.array([[names.index(other) < names.index(axis) for other in axes] for names in self.orders])
        sizes = self.grids.sizes[self.grid]
        stride = np.where(inside[self.order], sizes, 1).prod(axis=1)
        size = sizes[:, axes.index(axis)]
        return size, np.where(size > 1, stride, 1)

    def ends(self) -> tuple[Integers, Integers]:
        """First and last pipeline stage."""
        size, stride = self.level("pipeline")
        return np.minimum(size, 2), np.where(size > 1, stride * (size - 1), 1)


def list_candidates(shapes: Shapes, rows: Integers, placements: Placements) -> tuple[Candidates, Integers]:
    """Every placement of every shape in `rows`; also the placement of each candidate."""
    chosen = [placements.of_grid[int(grid)] for grid in shapes.grid[rows]]
    placement = np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64)
    shape = np.repeat(rows, [len(found) for found in chosen])
    routes = {axes: numbers[placement] for axes, numbers in placements.routes.items()}
    return Candidates(shape, routes), placement
