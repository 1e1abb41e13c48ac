"""Memory of shapes, and which of them fit with which recompute set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from axonn_tune.cost.columns import distinct
from axonn_tune.frameworks import step_on
from axonn_tune.program.memory import Memory, host_bytes, memory_limit_bytes, price_memory
from axonn_tune.program.operations import COLUMNS, Floats, Integers, Value
from axonn_tune.program.step import MIDDLE, StepProgram, as_runs, counted_blocks
from axonn_tune.ranking.shapes import Shapes, StageRows, as_asked, divisible, uneven_chunks, with_uneven_chunks
from axonn_tune.ranking.space import Problem, Variant
from axonn_tune.units import GIB


@dataclass(frozen=True)
class Fitting:
    """Memory of every shape under one recompute set, and the rows that fit.

    kept_layers: of pipeline stages, of each of them. repeated: blocks of each chunk that repeat, 0 for all.
    """

    total_bytes: Floats
    kept_layers: Floats
    repeated: Integers
    rows: Integers
    limit_bytes: float

    def among(self, rows: Integers) -> Fitting:
        """The same of which only some rows are tried."""
        return replace(self, rows=self.rows[np.isin(self.rows, rows)])

    def taken(self, rows: Integers) -> Fitting:
        """Of some shapes that fit."""
        total, kept, repeated = self.total_bytes[rows], self.kept_layers[rows], self.repeated[rows]
        return Fitting(total, kept, repeated, np.arange(len(rows)), self.limit_bytes)

    def spread(self, rows: Integers, count: int) -> Fitting:
        """Of so many shapes, of which these are some; no other one fits."""
        columns = np.full(count, np.inf), np.zeros(count), np.zeros(count, dtype=np.int64)
        for column, own in zip(columns, (self.total_bytes, self.kept_layers, self.repeated), strict=True):
            column[rows] = own
        return Fitting(*columns, rows[self.rows], self.limit_bytes)

    def with_more(self, more: Fitting) -> Fitting:
        """Of these shapes and then others."""
        names = ("total_bytes", "kept_layers", "repeated")
        columns = {name: np.concatenate((getattr(self, name), getattr(more, name))) for name in names}
        rows = np.concatenate((self.rows, more.rows + len(self.total_bytes)))
        return Fitting(**columns, rows=rows, limit_bytes=self.limit_bytes)


def without_larger(shapes: Shapes, programs: Mapping[Variant, StepProgram]) -> Shapes:
    """Shapes without those with a larger micro-batch than one that does not fit however much is recomputed: memory
    grows with it. The smallest ones stay, whether they fit or not."""
    if shapes.problem.request.recompute_layers or not len(shapes):
        return shapes
    most = [programs[kind] for kind in {kind.precision: kind for kind in programs if not kind.some}.values()]
    limit_bytes = memory_limit_bytes(shapes.problem.machine.accelerator)
    same = shapes.grid * (int(shapes.chunks.max()) + 1) + shapes.chunks
    order = np.lexsort((shapes.micro_batch, same))

    def fit(rows: Integers, chunks: Integers) -> NDArray[np.bool_]:
        found = np.empty(len(rows), dtype=np.bool_)
        for start in range(0, len(rows), _SLAB):
            here = slice(start, start + _SLAB)
            slab = shapes.taken(rows[here], chunks=chunks[here])
            totals = [fit_memory(slab, program, keeps=False).total_bytes for program in most]
            found[here] = np.min(totals, axis=0) <= limit_bytes
        return found

    smallest = np.diff(same[order], prepend=-1) != 0
    kept = smallest | _of_first(same[order], lambda places: fit(order[places], shapes.chunks[order[places]]))
    # In several chunks stages have others.
    rest = np.zeros(len(shapes), dtype=np.bool_)
    rest[order[~kept]] = True
    left = (cut := divisible(shapes))[rest[cut]]
    number, chunks = uneven_chunks(shapes, left)
    if len(number):
        grid, micro_batch = shapes.grid[left[number]], shapes.micro_batch[left[number]]
        same = grid * (int(chunks.max()) + 1) + chunks
        by_size = np.lexsort((micro_batch, same))
        number, chunks = number[by_size], chunks[by_size]
        fits = _of_first(same[by_size], lambda at: fit(left[number[at]], chunks[at]))
        kept[np.isin(order, left[number[fits]])] = True
    return shapes.taken(np.sort(order[kept]))


def _of_first(groups: Integers, holds: Callable[[Integers], NDArray[np.bool_]]) -> NDArray[np.bool_]:
    """Whether a condition holds at each place; in each group, which stand together, it holds up to some place."""
    first = np.flatnonzero(np.diff(groups, prepend=-1))
    counts = np.diff(first, append=len(groups))
    low = holds(first).astype(np.int64)
    high = np.where(low, counts, 0)
    while len(open_ := np.flatnonzero(low < high)):
        middle = (low[open_] + high[open_] + 1) // 2
        held = holds(first[open_] + middle - 1)
        low[open_[held]], high[open_[~held]] = middle[held], middle[~held] - 1
    found: NDArray[np.bool_] = np.arange(len(groups)) - np.repeat(first, counts) < np.repeat(low, counts)
    return found


def fits_at_all(shapes: Shapes, programs: Sequence[StepProgram]) -> Integers:
    """Shapes that fit with some recompute set, of which the last one needs least memory; all where it is not asked of
    all blocks."""
    if not len(shapes) or not programs or shapes.problem.request.recompute_layers:
        return np.arange(len(shapes))
    return fit_memory(shapes, programs[-1], keeps=False).rows


def least_bytes_of(
    shapes: Shapes, programs: Mapping[Variant, StepProgram], grids: int
) -> tuple[list[Floats], Integers]:
    """Of shapes as of `without_larger`: least memory of each grid in each number format, infinite without shapes; and
    the shapes that fit with some recompute, as they are or in several chunks."""
    formats, asked = dict.fromkeys(kind.precision for kind in programs), shapes.problem.request.recompute_layers
    least_bytes = [np.full(grids, np.inf) for _ in formats]
    if not len(shapes):
        return least_bytes, np.arange(0)
    # Memory grows with the micro-batch: what is kept beside the smallest one fits.
    same = shapes.grid * (int(shapes.chunks.max()) + 1) + shapes.chunks
    ordered = np.lexsort((shapes.micro_batch, same))
    _, first, group = distinct(same[ordered])
    some = shapes if asked else shapes.taken(ordered[first])
    cut, number = with_uneven_chunks(some, divisible(some))
    every, of_row = some.with_more(cut), np.concatenate([np.arange(len(some)), number])
    least = np.full(len(some), np.inf)
    for precision, of_grid in zip(formats, least_bytes, strict=True):
        kinds = [one for one in programs if one.precision == precision and (asked or not one.some)]
        for one in kinds if asked else kinds[-1:]:
            repeated = np.full(len(every), asked) if one.some else None
            total_bytes = fit_memory(every, programs[one], repeated, keeps=False).total_bytes
            total_bytes = np.where(as_asked(every), total_bytes, np.inf)
            np.minimum.at(of_grid, every.grid, total_bytes)
            np.minimum.at(least, of_row, total_bytes)
    fits = least <= memory_limit_bytes(shapes.problem.machine.accelerator)
    return least_bytes, np.flatnonzero(fits) if asked else np.sort(ordered[fits[group]])


def fit_all(shapes: Shapes, programs: Mapping[Variant, StepProgram], *, every: bool = False) -> dict[Variant, Fitting]:
    """Memory of each shape under each variant; without `every` not of what fits with less recompute, which is as good
    by every criterion.

    Less recompute is less computation and no more collectives, unless it leaves room for fewer layers that are not
    resharded: then that is asked of sets on all blocks that are always tried. What is exposed may shrink behind more
    computation. Of a set on some blocks only the same set on all is more: another may repeat less on all than it on
    some.
    """
    if len(shapes) > _SLAB:
        # What is the same for all of them is worked out once a slab.
        slabs = [fit_all(slab, programs, every=every) for slab in _slabs(shapes)]
        return {one: reduce(Fitting.with_more, (slab[one] for slab in slabs)) for one in slabs[0]}
    problem, found = shapes.problem, dict[Variant, Fitting]()
    step, asked = (
        step_on(problem.framework, problem.machine, problem.workload.precision),
        problem.request.recompute_layers,
    )
    every = every or step.reshard == "fit" or problem.rank_by == "exposed"
    last, taken = np.arange(len(shapes)), shapes
    for one, program in programs.items():
        fits = np.zeros(len(shapes), dtype=np.bool_)
        for less, own in found.items():
            dominates = less.recompute == "none" if every else not less.some or less.recompute == one.recompute
            if dominates and less.precision == one.precision and not (every and problem.tries_always(one)):
                fits[own.rows] = True
        rows = np.flatnonzero(~fits)
        # What is known of the same shapes serves several sets.
        last, taken = (last, taken) if np.array_equal(rows, last) else (rows, shapes.taken(rows))
        if one.some and not asked:
            fitting = _fewest_repeated(taken, program)
        else:
            fitting = fit_memory(taken, program, np.full(len(rows), asked) if one.some else None)
        found[one] = fitting.spread(rows, len(shapes))
    return found


_SLAB = 4096
"""Shapes whose memory is worked out at once: their columns stay in the second-level cache."""


def _slabs(shapes: Shapes) -> Iterator[Shapes]:
    for rows in np.array_split(np.arange(len(shapes)), -(-len(shapes) // _SLAB)):
        yield shapes.taken(rows)


def fit_memory(
    shapes: Shapes, program: StepProgram, repeated: Integers | None = None, *, keeps: bool = True
) -> Fitting:
    """Memory of each shape, and its number of layers that are not resharded: none, unless asked for, without `keeps`,
    and of pipeline stages where only some blocks repeat."""
    if len(shapes) > _SLAB:
        places, parts = 0, list[Fitting]()
        for slab in _slabs(shapes):
            mine = None if repeated is None else repeated[places : places + len(slab)]
            parts.append(fit_memory(slab, program, mine, keeps=keeps))
            places += len(slab)
        return reduce(Fitting.with_more, parts)
    limit_bytes = memory_limit_bytes(shapes.problem.machine.accelerator)
    asked = shapes.problem.request.kept_layers
    kept_layers = (None if keeps else 0.0) if asked is None else float(asked)
    total, kept = np.empty((2, len(shapes)))
    if len(whole := np.flatnonzero(shapes.stages == 1)):
        some = shapes.taken(whole)
        memory = price_memory(
            program,
            values_of_all(some, program, None if repeated is None else repeated[whole]),
            limit_bytes=limit_bytes,
            arithmetic=COLUMNS,
            kept_layers=kept_layers,
        )
        total[whole], kept[whole] = memory.total_bytes, memory.kept_layers
    if len(shapes.piped):
        staged = None if repeated is None else repeated[shapes.piped]
        own = 0.0 if program.some and asked is None else kept_layers
        total[shapes.piped], kept[shapes.piped] = _fit_stages(shapes, program, limit_bytes, own, staged)
    host_limit = host_limit_bytes(shapes.problem)
    if host_limit < np.inf:
        total = np.where(kept_on_host(shapes, program, repeated) <= host_limit, total, np.inf)
    none = np.zeros(len(shapes), dtype=np.int64)
    return Fitting(
        total, kept, none if repeated is None else repeated, np.flatnonzero(total <= limit_bytes), limit_bytes
    )


def host_limit_bytes(problem: Problem) -> float:
    """Memory of a host, bytes; infinite where it is not stated or nothing is there."""
    host = problem.machine.host
    stated = host.memory_gib if host and problem.framework.step.offloads else None
    return np.inf if stated is None else stated * GIB


def kept_on_host(shapes: Shapes, program: StepProgram, repeated: Integers | None = None) -> Floats:
    """What the ranks of a node keep on their host, of the stage that keeps most, bytes."""
    found, piped = np.zeros(len(shapes)), shapes.piped
    ranks = min(shapes.problem.gpus, shapes.problem.machine.launcher.ranks_per_node)
    if len(whole := np.flatnonzero(shapes.stages == 1)):
        values = values_of_all(shapes.taken(whole), program, None if repeated is None else repeated[whole])
        found[whole] = host_bytes(program, values, ranks)
    if len(piped):
        again, between = None if repeated is None else repeated[piped], shapes.stages[piped] > 2
        for one, values in shapes.priced_stages:
            kept = host_bytes(program, {**values, **one.kinds(program, again)}, ranks)
            found[piped] = np.maximum(found[piped], np.where(between | (one.stage != MIDDLE), kept, 0.0))
    return found


def values_of_all(
    shapes: Shapes, program: StepProgram, repeated: Integers | None, kept: Floats | None = None
) -> dict[str, Value]:
    """Symbols of a rank that has all blocks; kept: how many are not resharded, where that is known."""
    chunks, again = [(as_runs(shapes.problem.model.runs), 1.0)], 0.0 if repeated is None else repeated.astype(float)
    return counted_blocks(program, shapes.values, chunks, repeated=again, kept=kept, arithmetic=COLUMNS)


def most_blocks(shapes: Shapes) -> Integers:
    """Blocks of the largest chunk of each shape."""
    found = np.full(len(shapes), sum(shapes.problem.model.counts))
    if len(shapes.piped):
        found[shapes.piped] = np.maximum.reduce([one.most[one.which] for one in shapes.stage_rows])
    return found


def _fewest_repeated(shapes: Shapes, program: StepProgram) -> Fitting:
    """The fewest blocks that must repeat, fewer than all, by bisection: more never need more memory."""
    high = most_blocks(shapes)
    low, limit_bytes = np.zeros_like(high), memory_limit_bytes(shapes.problem.machine.accelerator)
    for _ in range(int(high.max(initial=1)).bit_length()):
        middle = np.maximum((low + high) // 2, 1)
        fits = fit_memory(shapes, program, middle, keeps=False).total_bytes <= limit_bytes
        high, low = np.where(fits, middle, high), np.where(fits, low, middle)
    found = fit_memory(shapes, program, high)
    return found.among(np.flatnonzero(high < most_blocks(shapes)))


def _fit_stages(
    shapes: Shapes, program: StepProgram, limit_bytes: float, asked: float | None, repeated: Integers | None
) -> tuple[Floats, Floats]:
    """Memory of the largest stage of each shape with several, and the layers not resharded on every stage."""
    stages = [(one, {**values, **one.kinds(program, repeated)}) for one, values in shapes.priced_stages]

    def priced(one: StageRows, values: dict[str, Value], kept: Floats | float | None) -> Memory:
        return price_memory(
            *(program, values),
            limit_bytes=limit_bytes,
            arithmetic=COLUMNS,
            kept_layers=kept,
            stage=one.stage,
            known=shapes.known,
            during=one.during,
        )

    alone = [priced(one, values, asked) for one, values in stages]
    layers = [reduce(add, one.blocks()) for one, _ in stages]
    kept = np.maximum.reduce(layers)
    # Of two stages none is between.
    between = shapes.stages[shapes.piped] > 2
    for (one, _), memory, blocks in zip(stages, alone, layers, strict=True):
        fitting = np.asarray(memory.kept_layers)
        decides = (fitting < blocks) & (between | (one.stage != MIDDLE))
        kept = np.where(decides, np.minimum(kept, fitting), kept)
    largest = np.zeros(len(shapes.piped))
    for (one, values), memory, blocks in zip(stages, alone, layers, strict=True):
        here = np.minimum(kept, blocks)
        same = np.array_equal(here, np.asarray(memory.kept_layers))
        total = (memory if same else priced(one, values, here)).total_bytes
        largest = np.maximum(largest, np.where(between | (one.stage != MIDDLE), total, 0.0))
    return largest, kept
