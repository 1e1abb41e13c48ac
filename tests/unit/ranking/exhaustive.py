"""Every candidate of a small search, listed by plain loops and priced alone: what rows of a search are held against.

Nothing is left out by a bound. Memory is that of the columns of `ranking.fit`, and held against each price.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from axonn_tune.cost.block_runs import BlockRuns
from axonn_tune.cost.price import METRICS, Detail, price
from axonn_tune.cost.pricer import Pricer
from axonn_tune.frameworks import step_on
from axonn_tune.grid import BATCH_AXES, RANK_AXES, Grid
from axonn_tune.job import Layout
from axonn_tune.program.memory import memory_limit_bytes
from axonn_tune.program.step import MIDDLE, StepProgram
from axonn_tune.ranking.fit import Fitting, fit_memory, most_blocks
from axonn_tune.ranking.programs import step_program
from axonn_tune.ranking.shapes import Shapes, list_shapes
from axonn_tune.ranking.space import Grids, Problem, Variant, exchange_grids, list_grids, permuted_axes
from axonn_tune.ranking.splits import WORTH, Staged, schedules_of

MOST_CHUNKS = 8
"""Chunks of a stage that are tried for models of several layer types."""

Key: TypeAlias = tuple[float, float, float, int, int, int, int]


@dataclass(frozen=True)
class Candidate:
    """A layout with the best of its splits, its price, and how it is ordered; own_s: the step of its own split; tried:
    layouts that were priced for it."""

    problem: Problem
    layout: Layout
    place: tuple[int, str | None]
    key: Key
    detail: Detail
    own_s: float
    tried: int


@dataclass
class Ranked:
    """All candidates, and the best of each grid in each number format, best first."""

    candidates: list[Candidate]
    rows: list[Candidate] = field(init=False)

    def __post_init__(self) -> None:
        """Take each place at its best."""
        best = dict[tuple[int, str | None], Candidate]()
        for one in self.candidates:
            known = best.setdefault(one.place, one)
            if one.key < known.key:
                best[one.place] = one
        self.rows = sorted(best.values(), key=lambda one: one.key)

    def as_good(self, one: Candidate) -> list[Layout]:
        """Layouts of its place that tie with it by everything that orders candidates."""
        return [other.layout for other in self.candidates if (other.place, other.key) == (one.place, one.key)]

    def first(self, top: int) -> list[Candidate]:
        """The first rows, then the first of each number format that is below them."""
        of_formats = dict[str | None, Candidate]()
        for one in self.rows:
            of_formats.setdefault(one.place[1], one)
        return [one for place, one in enumerate(self.rows) if place < top or one in of_formats.values()]

    @property
    def prices(self) -> int:
        """Layouts that were priced."""
        return sum(one.tried for one in self.candidates)


def exhaustive(problem: Problem, *, dominated: bool = False) -> Ranked:
    """Every candidate priced; dominated: also those that fit with less recompute."""
    grids = list_grids(problem)
    found = list(_listed(problem, problem, grids, merged=False, dominated=dominated))
    if problem.compares_expert_overlap:
        found += _listed(problem, problem.with_expert_overlap, grids, merged=True, dominated=dominated)
    return Ranked(found)


def _listed(problem: Problem, own: Problem, grids: Grids, *, merged: bool, dominated: bool) -> Iterator[Candidate]:
    """The candidates with expert overlap, which `own` has, or those without."""
    shapes = replace(shapes_of(problem, grids), problem=own)
    fittings = {kind: fitting_of(problem, shapes, kind) for kind in problem.variants}
    for row in range(len(shapes)):
        sizes = sizes_of(grids, shapes, row)
        if merged and not can_merge(sizes, int(shapes.chunks[row])):
            continue
        for kind in kinds_of(problem, fittings, row, dominated=dominated):
            for job in jobs_of(own, grids, int(shapes.grid[row])):
                program = program_of(job, kind)
                if merged and not program.merges:
                    continue
                for number, order in orders_of(problem, sizes):
                    layout = layout_of(problem, grids, shapes, row, kind, fittings[kind], order)
                    place = int(shapes.grid[row]), number, problem.variants.index(kind)
                    yield _priced(
                        job.within(kind.precision), layout, place, kind, float(fittings[kind].total_bytes[row])
                    )


def sizes_of(grids: Grids, shapes: Shapes, row: int) -> dict[str, int]:
    """Axis sizes of a shape."""
    return dict(zip(grids.axes, grids.sizes[shapes.grid[row]].tolist(), strict=True))


def layout_of(
    problem: Problem, grids: Grids, shapes: Shapes, row: int, kind: Variant, fitting: Fitting, order: tuple[str, ...]
) -> Layout:
    """The layout of a shape with a recompute set, of which there is the memory, and a rank order."""
    return Layout(
        Grid(**sizes_of(grids, shapes, row), order=order),
        int(shapes.micro_batch[row]),
        kind.recompute,
        int(fitting.kept_layers[row]),
        int(shapes.chunks[row]),
        problem.parts,
        int(fitting.repeated[row]) or None,
        mtp_part=problem.mtp_part,
    )


def can_merge(sizes: dict[str, int], chunks: int) -> bool:
    """Whether passes of two micro-batches can run beside each other: with experts exchanged, without shared buffers of
    gathers over z, in one stage or in interleaved ones."""
    one_stage = sizes.get("pipeline", 1) == 1
    return sizes.get("expert", 1) > 1 and sizes["z"] == 1 and (one_stage or chunks > 1)


def shapes_of(problem: Problem, grids: Grids) -> Shapes:
    """Every sound grid with every micro-batch and every number of chunks, even or not."""
    listed = list_shapes(grids, problem)
    if problem.parts is not None or problem.request.chunks is not None:
        return listed
    whole = np.flatnonzero(listed.chunks == 1)
    rows, counts = list[int](), list[int]()
    for row in whole.tolist():
        batches = round(float(np.broadcast_to(np.asarray(listed.values["A"]), len(listed))[row]))
        for chunks in range(1, problem.model.layers + 1):
            if chunks == 1 or _interleaves(problem, int(listed.stages[row]), batches, chunks):
                rows.append(row)
                counts.append(chunks)
    shares = np.prod([grids.column(axis) for axis in BATCH_AXES if axis in grids.axes], axis=0)
    shape_batches = problem.workload.global_batch // (shares[listed.grid[whole]] * listed.micro_batch[whole])
    assert np.array_equal(np.broadcast_to(np.asarray(listed.values["A"]), len(listed))[whole], shape_batches)
    return listed.taken(np.array(rows, dtype=np.int64), chunks=np.array(counts, dtype=np.int64))


def _interleaves(problem: Problem, stages: int, batches: int, chunks: int) -> bool:
    """Whether stages can have so many chunks: micro-batches go in groups, each chunk has a layer to begin with."""
    schedule, step, layers = problem.framework.schedule, problem.framework.step, problem.model.layers
    most = step.most_parts(len(problem.model.starts))
    if not schedule.interleaved or stages == 1 or batches % stages or stages * chunks > most:
        return False
    if schedule.equal_chunks:
        return (layers + sum(step.less)) % (stages * chunks) == 0
    return len(problem.model.types) == 1 or chunks <= MOST_CHUNKS


def program_of(problem: Problem, kind: Variant) -> StepProgram:
    """The program of a recompute set in a number format."""
    return step_program(problem, step_on(problem.framework, problem.machine, problem.workload.precision), kind)


def fitting_of(problem: Problem, shapes: Shapes, kind: Variant) -> Fitting:
    """Memory of every shape with a recompute set: on as many blocks as are asked for, or on the fewest that fit."""
    program, asked = program_of(problem.by_dispatcher[0], kind), problem.request.recompute_layers
    if not kind.some:
        return fit_memory(shapes, program)
    if asked:
        return fit_memory(shapes, program, np.full(len(shapes), asked))
    most = most_blocks(shapes)
    fewest = most.copy()
    for count in range(int(most.max(initial=1)) - 1, 0, -1):
        few = fit_memory(shapes, program, np.full(len(shapes), count), keeps=False)
        fewest[few.rows] = np.minimum(fewest[few.rows], count)
    found = fit_memory(shapes, program, fewest)
    return found.among(np.flatnonzero(fewest < most))


def kinds_of(problem: Problem, fittings: dict[Variant, Fitting], row: int, *, dominated: bool) -> list[Variant]:
    """Recompute sets with which a shape is a candidate: of those that fit none that is more than another one.

    What fits without recompute is tried with the sets that are tried always, and no others. Of a set on some blocks
    only the same set on all is more.
    """
    fit = [kind for kind in problem.variants if row in fittings[kind].rows]
    fit = [
        kind
        for kind in fit
        if problem.tries_always(kind)
        or Variant("none", precision=kind.precision) not in fit
        or kind.recompute == "none"
    ]
    step = step_on(problem.framework, problem.machine, problem.workload.precision)
    if dominated or step.reshard == "fit" or problem.rank_by == "exposed":
        return fit
    found = list[Variant]()
    for place, kind in enumerate(fit):
        less = (one for one in fit[:place] if one.precision == kind.precision)
        if not any(not one.some or one.recompute == kind.recompute for one in less):
            found.append(kind)
    return found


def jobs_of(problem: Problem, grids: Grids, grid: int) -> list[Problem]:
    """The problem with each exchange of context parallelism that a grid can have, and each dispatcher that is tried."""
    found, several = list[Problem](), len(problem.by_exchange) > 1
    for place, one in enumerate(problem.by_exchange):
        wide = "context" in grids.axes and grids.column("context")[grid] > 1
        if several and not (exchange_grids(one, grids)[grid] if wide else place == 0):
            continue
        sizes = dict(zip(grids.axes, grids.sizes[grid].tolist(), strict=True))
        names = {one.dispatcher_on(Grid(**sizes, order=problem.orders[0]))}
        if "allgather" in one.framework.dispatchers and sizes.get("expert") == 1:
            names |= {"alltoall", "allgather"}
            names |= {"deepep", "hybridep"} if sizes["expert_tensor"] > 1 else set()
        several_dispatchers = len(one.by_dispatcher) > 1
        found += [two for two in one.by_dispatcher if not several_dispatchers or two.framework.step.dispatcher in names]
    return found


def orders_of(problem: Problem, sizes: dict[str, int]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Every rank order that lays out a grid differently, with its number among all."""
    inner, outer = permuted_axes(problem.axes)
    known = set[tuple[str, ...]]()
    for order in problem.orders:
        wide = tuple(axis for axis in order if axis in RANK_AXES and sizes.get(axis, 1) > 1)
        if wide in known:
            continue
        known.add(wide)
        if len(problem.orders) == 1:
            yield 0, order
            continue
        shown = (*(axis for axis in wide if axis not in outer), *(axis for axis in inner if axis not in wide), *outer)
        yield problem.orders.index(shown), shown


def splits_beside(job: Problem, layout: Layout) -> list[tuple[int, ...]]:
    """The small set of splits of a layout beside its own."""
    pricer, runs = Pricer(job, layout), job.model.runs
    values, _ = pricer.settled_stage(0)
    kept = bool(layout.kept_layers)
    for of in {"", *(block.given.counted for block in pricer.program.blocks)}:
        values |= {f"L{of}": 1.0, f"kept{of}": 0.0, f"unkept{of}": 1.0}
    replay = pricer.replay(values | {"repeated": 0.0}, MIDDLE)
    # A stream for every group, as bounds have it.
    replay.streams = {axes: [number] * bool(tiers) for number, (axes, tiers) in enumerate(replay.streams.items())}
    replay.tiers = len(replay.streams)
    paces = BlockRuns(replay).paces(first=runs[0][0], last=runs[-1][0], kept=kept)
    batches = job.workload.global_batch // (layout.grid.batch_shares * layout.micro_batch)
    staged = Staged(
        paces,
        np.array([layout.pipeline]),
        np.array([layout.chunks]),
        np.array([batches]),
        np.array([layout.recompute_layers or 0]),
        np.array([pricer.send[2]]),
        np.array([pricer.rates.contention]),
        np.zeros((1, len(job.model.types))),
    )
    every = schedules_of(job, staged, searched=True)
    return [one.parts for one in every if one.parts is not None]


def _priced(job: Problem, layout: Layout, place: tuple[int, int, int], kind: Variant, total_bytes: float) -> Candidate:
    """A candidate with its own split, unless another one is notably shorter."""
    own, limit_bytes = price(job, layout), memory_limit_bytes(job.machine.accelerator)
    # Where all blocks of all chunks repeat, columns of a set on some have room for one that does not.
    most = max((count for stage in own.stages for _, count in stage.parts), default=job.model.layers)
    if (layout.recompute_layers or 0) < most:
        assert abs(own.memory_bytes - total_bytes) <= 1e-12 * total_bytes, (own, total_bytes)
    best, others = own, list[Detail]()
    if job.splits and layout.pipeline > 1:
        every = (replace(layout, parts=one) for one in splits_beside(job, layout))
        others = [price(job, one) for one in every]
        fitting = [one for one in others if one.memory_bytes <= limit_bytes]
        first = min(fitting, key=lambda one: one.iteration_s, default=own)
        best = first if first.iteration_s <= (1.0 - WORTH) * own.iteration_s else own
    grid, order, recompute = place
    key = (
        float(getattr(best, METRICS[job.rank_by])),
        best.iteration_s,
        total_bytes if best is own else best.memory_bytes,
        *(grid, order, layout.micro_batch, recompute),
    )
    return Candidate(job, best.layout, (grid, kind.precision), key, best, own.iteration_s, 1 + len(others))
