"""A search from its inputs to its rows: what is searched, the loop, and the first grids in order."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod

import numpy as np

from axonn_tune.cost.columns import distinct
from axonn_tune.errors import UsageError
from axonn_tune.frameworks import registry
from axonn_tune.frameworks.description import Framework
from axonn_tune.grid import RANK_AXES
from axonn_tune.program.feasibility import MEMORY, PINNED
from axonn_tune.program.memory import memory_limit_bytes
from axonn_tune.program.operations import Integers
from axonn_tune.ranking.fit import least_bytes_of, without_larger
from axonn_tune.ranking.loop import Loop
from axonn_tune.ranking.placements import count_orders, list_placements
from axonn_tune.ranking.priced import TELL, Interrupted, Priced, SearchCounts, Tell
from axonn_tune.ranking.programs import Programs, exchanges_of
from axonn_tune.ranking.shapes import Shapes, list_shapes, pairs_of, require_searchable, without_shape
from axonn_tune.ranking.space import Grids, Problem, list_grids
from axonn_tune.request import ALPHA_BETA, DEFAULT_TOP
from axonn_tune.specs.formats import nearest_format

LARGEST_COUNT = 2**40
"""Counts from here on do not fit the columns, whose arithmetic must stay exact."""


def search(problem: Problem, *, top: int = DEFAULT_TOP, variants: bool = False, tell: Tell | None = None) -> Priced:
    """Rank grids of a GPU count, the first `top` of them (0: all); with `variants` candidates. Nothing feasible: an
    empty ranking.

    tell: is told how far it is. Interrupted once something has a price, the search raises `Interrupted`, which has it.
    """
    started = time.perf_counter()
    _check(problem)
    shapes = list_shapes(grids := list_grids(problem), problem)
    require_searchable(count_orders(problem, grids, shapes.grid) * len(problem.tried(every=variants)))
    number = count_orders(problem, grids, shapes.grid[pairs_of(shapes)[0]])
    programs = Programs(problem.by_dispatcher[0])
    # Some orders of passes need less memory than 1F1B.
    shapes = shapes if problem.compared_orders else without_larger(shapes, programs)
    loop = Loop(
        problem,
        grids,
        shapes,
        list_placements(grids, distinct(shapes.grid)[0], problem),
        exchanges_of(problem, grids, shapes, programs),
        top,
        variants=variants,
        tell=tell,
    )
    interrupted = False
    try:
        loop.run()
    except KeyboardInterrupt:
        if not loop.found:
            raise
        interrupted = True
    found = _priced(loop, programs, number, time.perf_counter() - started, interrupted=interrupted)
    if interrupted:
        raise Interrupted(found) from None
    return found


def _priced(loop: Loop, programs: Programs, candidates: int, seconds: float, *, interrupted: bool) -> Priced:
    """The rows of a search that has ended, and what it counted."""
    problem, grids, shapes = loop.problem, loop.grids, loop.shapes
    first, below, shortest = loop.rows()
    least_bytes, fits = least_bytes_of(shapes, programs, len(grids.sizes))
    limit_bytes = memory_limit_bytes(problem.machine.accelerator)
    places = sum(int((of_grid <= limit_bytes).sum()) for of_grid in least_bytes)
    least = np.min(least_bytes, axis=0)
    feasible = least <= limit_bytes
    # Listed one by one, they are counted with their chunks, recompute sets and exchanges.
    counts, own = loop.counts, shapes.taken(fits)
    fitting = count_orders(problem, grids, own.grid[pairs_of(own)[0]])
    tried, number = (counts["tried"], counts["fit"]) if loop.variants else (candidates, fitting)
    searched = SearchCounts(
        len(grids.sizes),
        tried,
        number,
        _count_rejected(grids, shapes, np.flatnonzero(feasible)),
        seconds,
        unlisted=(number if loop.variants else places) - len(first) - len(below),
    )
    return Priced(problem, searched, grids, first, feasible, least, below, shortest, interrupted=interrupted)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Raise the thresholds of Python's garbage collector: a search keeps nearly all that it makes, and its cycles are
    some hundred objects."""
    before = gc.get_threshold()
    gc.set_threshold(1_000_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@_rare_collections()
def run_search(
    problem: Problem, *, costs: Sequence[str] = (ALPHA_BETA,), top: int = DEFAULT_TOP, variants: bool = False
) -> Priced:
    """Rank by the first cost model, and look each grid up in the rankings by the others.

    UsageError if a cost model of the paper is combined with what it does not know, or the machine has no table for it.
    """

    def ranked(cost: str, *, top: int, variants: bool) -> Priced:
        if cost == ALPHA_BETA:
            return search(problem, top=top, variants=variants, tell=TELL.get())
        if variants:
            raise UsageError(f"{cost} ranks grids, not candidates: leave out --variants")
        # Imported here: the paper's model is not needed to rank by ours.
        from axonn_tune.ranking.by_paper import rank_by_paper

        return rank_by_paper(problem, search, backend=cost, top=top)

    first, *others = dict.fromkeys(costs)
    found = ranked(first, top=top, variants=variants)
    return replace(found, others={cost: ranked(cost, top=0, variants=False).ranks() for cost in others})


def _check(problem: Problem) -> None:
    """Refuse inputs that no grid could satisfy and no constraint covers."""
    model, workload, pins = problem.model, problem.workload, problem.request.axes
    if max(problem.gpus, workload.global_batch, workload.sequence_length) >= LARGEST_COUNT:
        raise UsageError(f"GPU counts, batches and sequence lengths must be below {LARGEST_COUNT:,}")
    searched = [axis for axis in problem.framework.columns if axis in problem.axes and axis in RANK_AXES]
    product = prod(size for axis, size in pins.items() if axis in RANK_AXES)
    if set(searched) <= set(pins) and product != problem.gpus:
        names = "·".join(problem.framework.called(axis) for axis in searched)
        asked = "·".join(str(pins[axis]) for axis in searched)
        raise UsageError(f"{names} = {asked} is {product}, not {problem.gpus} GPUs")
    if model.learned_positions and workload.sequence_length > model.max_sequence_length:
        raise UsageError(
            f"sequence length {workload.sequence_length} exceeds the position table of {model.name} "
            f"({model.max_sequence_length})"
        )
    kept = problem.request.kept_layers
    if kept is not None and kept > model.layers:
        raise UsageError(f"--kept-layers {kept}: {model.name} has {model.layers} layers")
    if workload.format and workload.precision not in problem.framework.formats:
        raise UsageError(_no_format(problem.framework, workload.precision))
    if workload.precision not in problem.machine.accelerator.peak_tflops:
        known = list(problem.machine.accelerator.peak_tflops)
        near = nearest_format(workload.precision, known) if workload.format and known else "".join(known[:1])
        advice = f"; try --precision {near}" if near else ""
        raise UsageError(
            f"machine {problem.machine.name} states no {workload.precision} peak "
            f"(accelerator.peak_tflops has {', '.join(known)}){advice}"
        )


def _no_format(framework: Framework, precision: str) -> str:
    """Why a framework is not priced in a number format: those it has, and frameworks that have this one."""
    others = ", ".join(name for name, one in registry().items() if precision in one.formats)
    known = ", ".join(("bf16", *framework.formats))
    return f"--precision {precision}: {framework.title} is priced in {known}; frameworks with it: {others}"


def _count_rejected(grids: Grids, shapes: Shapes, used: Integers) -> dict[str, int]:
    """Rejected grids by constraint, without zeros."""
    counts = {check.name: int(broken.sum()) for check, broken in zip(grids.constraints, grids.broken.T, strict=True)}
    shaped, asked = distinct(shapes.grid)[0], grids.sound_as_asked(shapes.problem)
    without = np.ones(len(grids.sizes), dtype=np.bool_)
    without[shaped] = False
    missing = without_shape(grids, shapes.problem, asked[without[asked]])
    counts |= {name: len(rows) for name, rows in missing.items()}
    counts[MEMORY] = len(shaped) - len(used)
    counts[PINNED] = len(grids.sound) - len(asked)
    return {name: count for name, count in counts.items() if count}
