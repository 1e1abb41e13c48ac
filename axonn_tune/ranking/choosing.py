"""The search itself: price the space, take each grid at its best, put the grids in order."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from axonn_tune.cost.columns import Candidates, ColumnPricer, Floats, Integers, RouteTable, distinct, route_table
from axonn_tune.cost.compute import compute_rates
from axonn_tune.cost.replay import ChunkTimes, StageWork
from axonn_tune.errors import UsageError
from axonn_tune.frameworks import registry, software_on, step_on
from axonn_tune.frameworks.description import Framework, StepOptions
from axonn_tune.grid import RANK_AXES, GroupShape
from axonn_tune.program.dimensions import MEMORY, MICRO_BATCH, PINNED, table_alignment
from axonn_tune.program.operations import COLUMNS, MATRIX_ALIGNMENT, PLAIN_BLOCKS, REPEATING, Value
from axonn_tune.program.schedule import Runs, blocks_by_kind, build_schedule, kept_by_kind
from axonn_tune.program.step import (
    FIRST,
    LAST,
    MIDDLE,
    ONLY,
    Contents,
    Stage,
    StepProgram,
    as_runs,
    blocks_by_type,
    blocks_in,
    build_step,
    chunks_of,
    contents_of,
    stages_alike,
)
from axonn_tune.ranking.priced import Columns, Priced, SearchCounts, order_of, ranking_metric
from axonn_tune.ranking.space import (
    Fitting,
    Grids,
    Placements,
    Problem,
    Shapes,
    StageRows,
    Variant,
    count_candidates,
    dispatcher_grids,
    exchange_grids,
    fit_all,
    fit_always,
    fit_others,
    list_candidates,
    list_grids,
    list_placements,
    list_shapes,
    require_searchable,
    uneven_chunks,
    values_of_all,
    with_uneven_chunks,
    without_larger,
)
from axonn_tune.request import ALPHA_BETA, DEFAULT_TOP, RankBy
from axonn_tune.specs.formats import nearest_format
from axonn_tune.units import seconds

if TYPE_CHECKING:
    from axonn_tune.cost.pipeline import Pipelines, StageKind

LEAST_IN_A_FORMAT = 0.7
"""Share of the step in the first number format from which another is tried: a layout that takes longer than the best by
more does not come first in another format either. No bound: held against whole searches in a test."""
LARGEST_COUNT = 2**40
"""Counts from here on do not fit the columns, whose arithmetic must stay exact."""


def search(problem: Problem, *, variants: bool = False, exact: int = DEFAULT_TOP) -> Priced:
    """Rank every grid of a GPU count; with `variants` every candidate of it. Nothing feasible: an empty ranking.

    exact: number of ranks in the order of exact steps; with pipeline stages, the rest is ranked by a bound, and none of
    it is balanced by time. Displayed candidates are always exact.
    """
    started = time.perf_counter()
    _check(problem)
    shapes = list_shapes(grids := list_grids(problem), problem)
    candidates = count_candidates(shapes, grids, problem.tried(every=variants))
    require_searchable(candidates)
    programs = _programs(problem.by_dispatcher[0])
    exchanges = _exchanges(problem, grids, shapes := without_larger(shapes, programs), programs)
    every = [program for one in exchanges for program in one.programs.values()]
    fittings = (fit_all if variants or problem.request.recompute_layers else fit_always)(shapes, programs)
    uneven, unpriced = uneven_chunks(shapes, programs, fittings)
    placed = distinct(np.concatenate([shapes.grid[uneven], *(shapes.grid[one.rows] for one in fittings.values())]))[0]
    placements = list_placements(
        grids, placed, problem, tuple(dict.fromkeys(chain.from_iterable(one.groups for one in every)))
    )
    table, formats = _routes(problem, placements, every), problem.formats or (None,)

    def priced(shapes: Shapes, fittings: dict[Variant, Fitting], *, last_s: float = np.inf) -> Columns:
        some, columns = fittings if variants else _undominated(problem, fittings), list[Columns]()
        for number, one in enumerate(exchanges):
            if one.other and not variants and problem.rank_by == "iteration":
                near = _with_other_exchange(_joined(columns), shapes, problem, count=exact, last_s=last_s)
                some = {kind: fitting.among(near) for kind, fitting in some.items()}
            columns += [
                found.numbered(recompute=place, exchange=number, precision=formats.index(kind.precision))
                for place, (kind, program) in enumerate(one.programs.items())
                if kind in some
                for aligned, part in _by_alignment(shapes, kind, program, one.taken(shapes, some[kind]))
                for found in [_price(one.problem.within(kind.precision), shapes, placements, table, aligned, part)]
            ]
        return _joined(columns)

    columns = priced(shapes, fittings)
    if others := [one for one in programs if one not in fittings]:
        near = _near(columns, shapes, problem, count=exact)
        fitted, last_s = (
            fit_others(shapes, programs, fittings, *near),
            _last_place_s(columns, shapes, problem, count=exact),
        )
        columns = _joined([columns, priced(shapes, fitted, last_s=last_s)])
        candidates += sum(
            count_candidates(shapes.taken(rows, chunks=shapes.chunks[rows]), grids, tried)
            for rows, among in zip(near, (formats[:1], formats[1:]), strict=True)
            if (tried := [one for one in others if one.precision in among])
        )
    if len(shapes.piped):
        columns = _refined(columns, shapes, problem, count=exact, variants=variants)
    if len(uneven):
        promising = _promising(columns, shapes, problem, count=exact)
        promising[unpriced] = True
        more, before = with_uneven_chunks(shapes, uneven if variants else uneven[promising[uneven]]), len(shapes)
        candidates += count_candidates(more, grids, problem.variants)
        fitted, last_s = fit_all(more, programs), _last_place_s(columns, shapes, problem, count=exact)
        found = priced(more, fitted, last_s=last_s)
        columns = _joined([columns, replace(found, shape=found.shape + before)])
        shapes, fittings = shapes.with_more(more), {kind: fittings[kind].with_more(fitted[kind]) for kind in fitted}
        columns = _refined(columns, shapes, problem, count=exact, variants=variants)
    whole = Priced(
        *(
            problem,
            SearchCounts(len(grids.sizes), candidates, 0, {}, 0.0),
            grids,
            shapes,
            placements,
            fittings,
            columns,
        ),
        *(np.arange(0), programs, tuple(one.problem for one in exchanges)),
    )
    whole = _balanced(whole, count=exact) if problem.splits and not variants else whole
    return _ranked(whole, started, variants=variants)


def _ranked(found: Priced, started: float, *, variants: bool) -> Priced:
    """Priced candidates in order, each grid once or all of them, with their numbers; started: when the search was."""
    problem, shapes, columns, fittings = found.problem, found.shapes, found.columns, found.fittings
    used = distinct(np.concatenate([shapes.grid[fitting.rows] for fitting in fittings.values()]))[0]
    rows = np.arange(len(columns.shape)) if variants else _best_of_each(columns, shapes, rank_by=problem.rank_by)
    rows = order_of(columns, rows, shapes, found.placements, rank_by=problem.rank_by, fittings=fittings)
    searched = replace(
        found.searched,
        feasible=_count_fitting(shapes, found.placements, fittings),
        rejected=_count_rejected(found.grids, shapes, used),
        seconds=time.perf_counter() - started,
    )
    chosen = rows if variants else rows[np.sort(distinct(columns.places(shapes)[rows])[1])]
    return replace(found, searched=searched, rows=chosen)


def _balanced(priced: Priced, *, count: int) -> Priced:
    """The best row of each of the first grids, and of each number format, balanced by time: those that are faster so
    come behind the others, each of a shape of its own."""
    # Imported here: most searches have no pipeline, and start-up time is theirs.
    from axonn_tune.ranking.balance import balanced

    columns, shapes, fittings, splits = priced.columns, priced.shapes, priced.fittings, dict[int, tuple[int, ...]]()
    rows = np.argsort(columns.iteration_s, kind="stable")
    grids, formats = (np.sort(distinct(one[rows])[1]) for one in (columns.places(shapes), columns.precision))
    first = replace(priced, rows=rows[np.union1d(grids[:count], formats)])
    for place, row in enumerate(first.rows.tolist()):
        shape, kind = columns.shape[[row]], list(fittings)[columns.recompute[row]]
        step_s, limit_bytes = float(columns.iteration_s[row]), fittings[kind].limit_bytes
        if shapes.stages[shape[0]] == 1:
            continue
        found = balanced(first.problem_of(row), first.layout(place), step_s=step_s, limit_bytes=limit_bytes)
        if found is None or found.parts is None:
            continue
        splits[len(shapes)] = found.parts
        own, rows = fittings[kind], np.arange(1)
        more = Fitting(np.array([found.memory_bytes]), own.kept_layers[shape], own.repeated[shape], rows, limit_bytes)
        less = replace(more, total_bytes=np.array([np.inf]), rows=rows[:0])
        fittings = {one: known.with_more(more if one == kind else less) for one, known in fittings.items()}
        one = Columns(
            shape=np.array([len(shapes)]),
            placement=columns.placement[[row]],
            recompute=columns.recompute[[row]],
            communication_s=np.array([found.communication_s]),
            compute_s=np.array([found.compute_s]),
            iteration_s=np.array([found.iteration_s]),
            bubble_s=np.array([found.bubble_s]),
            bounded=np.zeros(1, dtype=np.bool_),
            exchange=columns.exchange[[row]],
            precision=columns.precision[[row]],
        )
        columns, shapes = _joined([columns, one]), shapes.with_more(shapes.taken(shape, chunks=shapes.chunks[shape]))
    searched = replace(priced.searched, candidates=priced.searched.candidates + len(splits))
    return replace(priced, searched=searched, shapes=shapes, fittings=fittings, columns=columns, splits=splits)


@dataclass(frozen=True)
class _Exchange:
    """The search with one exchange of context parallelism and one dispatcher: for which grids, all if None, and its
    programs; other: with another exchange than the framework's own."""

    problem: Problem
    grids: NDArray[np.bool_] | None
    programs: dict[Variant, StepProgram]
    other: bool = False

    def taken(self, shapes: Shapes, fitting: Fitting) -> Fitting:
        """The shapes that have it."""
        if self.grids is None:
            return fitting
        return replace(fitting, rows=fitting.rows[self.grids[shapes.grid[fitting.rows]]])


def _exchanges(problem: Problem, grids: Grids, shapes: Shapes, programs: dict[Variant, StepProgram]) -> list[_Exchange]:
    """The exchanges that are compared, each with the grids that it can have; the first has those without context, too;
    and the dispatchers that layouts have by default.

    No exchange or dispatcher needs other memory, so each candidate is priced with every one, and ranked with the best.
    """
    used = np.zeros(len(grids.sizes), dtype=np.bool_)
    used[shapes.grid] = True
    several = len(problem.by_exchange) > 1
    wide = used & (grids.column("context") > 1) if several else used
    several = several and bool(wide.any())
    if not several and len(problem.by_dispatcher) == 1:
        return [_Exchange(problem.by_dispatcher[0], None, programs)]
    found, by_exchange = list[_Exchange](), problem.by_exchange if several else (problem,)
    for one in by_exchange:
        with_exchange = exchange_grids(one, grids) & wide if several else used
        for two in one.by_dispatcher:
            having = with_exchange if one is not by_exchange[0] or not several else with_exchange | ~wide
            if len(one.by_dispatcher) > 1:
                having = having & dispatcher_grids(one, grids, two.framework.step.dispatcher)
            of = programs
            if found:
                of = _programs(two) if having.any() else {}
            if of:
                found.append(_Exchange(two, having, of, other=one is not by_exchange[0]))
    return found


def run_search(problem: Problem, *, costs: Sequence[str] = (ALPHA_BETA,), variants: bool = False) -> Priced:
    """Rank by the first cost model, and look each grid up in the rankings by the others.

    UsageError if a cost model of the paper is combined with what it does not know, or the machine has no table for it.
    """

    def ranked(cost: str, *, variants: bool) -> Priced:
        if cost == ALPHA_BETA:
            return search(problem, variants=variants)
        if variants:
            raise UsageError(f"{cost} ranks grids, not candidates: leave out --variants")
        # Imported here: the paper's model is not needed to rank by ours.
        from axonn_tune.ranking.by_paper import rank_by_paper

        return rank_by_paper(problem, backend=cost)

    first, *others = dict.fromkeys(costs)
    found = ranked(first, variants=variants)
    return replace(found, others={cost: ranked(cost, variants=False).ranks() for cost in others})


def _programs(problem: Problem) -> dict[Variant, StepProgram]:
    """Programs of all recompute sets that may be tried."""
    options = step_on(problem.framework, problem.machine)
    return {kind: step_program(problem, options, kind) for kind in problem.variants}


def step_program(
    problem: Problem, options: StepOptions, kind: Variant, *, alignment: int = MATRIX_ALIGNMENT
) -> StepProgram:
    """The program of a variant; alignment: of rows of logits, bytes."""
    return build_step(
        problem.model,
        problem.within(kind.precision).workload,
        recompute=kind.recompute,
        some=kind.some,
        options=options,
        context="context" in problem.axes,
        table_alignment=alignment,
    )


def _by_alignment(
    shapes: Shapes, kind: Variant, program: StepProgram, fitting: Fitting
) -> Iterator[tuple[StepProgram, Fitting]]:
    """Programs and fittings by the alignment of rows of logits, which differs where the vocabulary is not padded."""
    options = program.given.options
    if options.vocabulary_multiple != 0:
        yield program, fitting
        return
    problem, splits = shapes.problem, shapes.sizes("x") * shapes.sizes("y")
    element = problem.workload.element_sizes.compute
    pairs = list(zip(shapes.sizes("V").tolist(), splits.tolist(), strict=True))
    aligned = {(rows, split): table_alignment(rows, split=split, element=element) for rows, split in set(pairs)}
    found = np.array([aligned[pair] for pair in pairs], dtype=np.int64)
    for alignment in distinct(found)[0].tolist():
        rows = fitting.rows[found[fitting.rows] == alignment]
        yield step_program(problem, options, kind, alignment=alignment), replace(fitting, rows=rows)


def _undominated(problem: Problem, fittings: dict[Variant, Fitting]) -> dict[Variant, Fitting]:
    """Fittings without the shapes that also fit with less recompute, which is as good by every criterion.

    Less recompute is less computation and no more collectives, unless it leaves room for fewer layers that are not
    resharded. What is exposed may shrink behind more computation. Of a set on some blocks only the same set on all is
    more: another may repeat less on all than it on some.
    """
    if step_on(problem.framework, problem.machine).reshard == "fit" or problem.rank_by == "exposed":
        return fittings
    found, fit = dict[Variant, Fitting](), dict[Variant, Integers]()
    for kind, fitting in fittings.items():
        alike = {one: rows for one, rows in fit.items() if one.precision == kind.precision}
        less = [rows for one, rows in alike.items() if not one.some or one.recompute == kind.recompute]
        taken = np.setdiff1d(fitting.rows, np.concatenate([fitting.rows[:0], *less]))
        found[kind], fit[kind] = replace(fitting, rows=taken), fitting.rows
    return found


def _count_fitting(shapes: Shapes, placements: Placements, fittings: dict[Variant, Fitting]) -> int:
    """Candidates that fit into memory, priced or not."""
    placed = np.bincount(placements.grid, minlength=int(shapes.grid.max(initial=-1)) + 1)
    return int(sum(placed[shapes.grid[fitting.rows]].sum() for fitting in fittings.values()))


def _routes(problem: Problem, placements: Placements, programs: Sequence[StepProgram]) -> RouteTable:
    """Price every route for all collectives of the programs."""
    sent = {(step.sent, step.axis) for program in programs for step, _ in program.collectives()}
    sent |= {(step.sent, step.axis) for program in programs for step, _ in program.collectives(FIRST)}
    software = software_on(problem.framework, problem.machine)
    return route_table(
        placements.shapes,
        placements.routes,
        problem.machine.placing(problem.gpus),
        problem.gpus,
        sent=sent,
        call_s=seconds(software.collective_us),
    )


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


_schedule = lru_cache(maxsize=16)(build_schedule)
"""Schedules of the kinds of recompute, which shapes with equal and with uneven chunks share."""


def _price(
    problem: Problem,
    shapes: Shapes,
    placements: Placements,
    table: RouteTable,
    program: StepProgram,
    fitting: Fitting,
) -> Columns:
    """Price all candidates of one variant that fit into memory; sizes are worked out of their shapes alone."""
    workload, own = problem.workload, fitting.rows
    shapes, fitting = shapes.taken(own, chunks=shapes.chunks[own]), fitting.taken(own)
    rates = compute_rates(
        problem.machine.accelerator,
        workload.precision,
        software_on(problem.framework, problem.machine),
        cuda_graphs=problem.framework.step.cuda_graphs,
    )

    def pricer_of(program: StepProgram, *stages: Stage) -> ColumnPricer:
        schedule = _schedule(program, overlaps=workload.overlaps, split=workload.split_micro_batch, stages=stages)
        element_bytes = float(workload.element_sizes.compute)
        return ColumnPricer(program, schedule, rates=rates, element_bytes=element_bytes, table=table)

    whole = fitting.rows[shapes.stages[fitting.rows] == 1] if len(shapes.piped) else fitting.rows
    candidates, placement = list_candidates(shapes, whole, placements)
    communication, compute, iteration = np.empty((3, 0))
    if len(candidates):
        pricer = pricer_of(program, ONLY)
        first, representative = pricer.distinct(candidates)
        values = values_of_all(shapes, program, fitting.repeated, fitting.kept_layers)
        runs = as_runs(problem.model.runs) if problem.model.mixed else ((0, values["L"]),)
        prices = pricer.price(candidates.taken(first), values, runs)
        communication, compute, iteration = prices[:, representative]
    found = Columns(
        shape=candidates.shape,
        placement=placement,
        recompute=np.zeros(len(candidates), dtype=np.int64),
        communication_s=communication,
        compute_s=compute,
        iteration_s=iteration,
        bubble_s=np.zeros(len(candidates)),
        bounded=np.zeros(len(candidates), dtype=np.bool_),
    )
    if len(whole) == len(fitting.rows):
        return replace(found, shape=own[found.shape])
    candidates, placement = list_candidates(shapes, fitting.rows[shapes.stages[fitting.rows] > 1], placements)
    given = program.given
    kind = Variant(program.recompute, program.some)
    staged = step_program(problem, given.options.staged, kind, alignment=given.table_alignment)
    pricer = pricer_of(staged, FIRST, MIDDLE, LAST)
    contention, routes, parts = rates.contention, placements.shapes, [found]
    for rows, group in _price_pipelines(shapes, fitting, pricer, candidates, routes=routes, contention=contention):
        step_s, lost_s, bubble_s = group.bound_s()
        parts.append(
            Columns(
                shape=candidates.shape[rows],
                placement=placement[rows],
                recompute=np.zeros(len(rows), dtype=np.int64),
                communication_s=group.communication_s,
                compute_s=group.alone_s + lost_s,
                iteration_s=step_s,
                bubble_s=bubble_s,
                bounded=np.ones(len(rows), dtype=np.bool_),
                starts=((0, group),),
            )
        )
    found = _joined(parts)
    return replace(found, shape=own[found.shape])


# Candidates with pipeline stages: each kind of stage replayed once for all that have it.


def _price_pipelines(
    shapes: Shapes,
    fitting: Fitting,
    pricer: ColumnPricer,
    candidates: Candidates,
    *,
    routes: Sequence[GroupShape],
    contention: float,
) -> Iterator[tuple[Integers, Pipelines]]:
    """Price candidates whose shapes have several stages; those with as many stages and chunks go together, with their
    rows.

    routes: the group shapes that routes of candidates number.
    """
    # Imported here: most searches have no pipeline, and start-up time is theirs.
    from axonn_tune.cost.pipeline import Pipelines, overlapped

    if not len(candidates):
        return
    piped = np.full(len(shapes), -1)
    piped[shapes.piped] = np.arange(len(shapes.piped))
    stages, chunks = shapes.stages[candidates.shape], shapes.chunks[candidates.shape]
    batches = np.asarray(shapes.values["A"])[candidates.shape].astype(np.int64)
    sends = _sends_s(shapes, pricer.program, candidates, routes)
    first, representative = pricer.distinct(candidates)
    alike = candidates.taken(first)
    parts = _Parts(shapes, fitting, pricer, Candidates(piped[alike.shape], alike.routes))
    groups = [
        (np.flatnonzero((stages == count) & (chunks == several)), count, several)
        for count in distinct(stages)[0].tolist()
        for several in distinct(chunks[stages == count])[0].tolist()
    ]
    for rows, count, several in groups:
        parts.expect(distinct(representative[rows])[0], count, several)
    for rows, count, several in groups:
        yield (
            rows,
            Pipelines(
                stages=count,
                chunks=several,
                micro_batches=batches[rows],
                kinds=tuple(parts.kinds(representative[rows], count, several)),
                send_s=sends[rows],
                overlapped=overlapped(shapes.problem.framework.schedule, several),
                contention=contention,
                mixed=len(shapes.problem.model.types) > 1,
            ),
        )


class _Blocks(NamedTuple):
    """Kind of stage by its blocks; fewer: of those between the ends, how many fewer than the most.

    contents: the blocks of each chunk, where their number does not say what they are.
    """

    stage: Stage
    fewer: int
    contents: tuple[Contents, ...] = ()


class _Chunk(NamedTuple):
    """A chunk of a kind of stage: what else it has than blocks, and of those their number where all have no equal
    share, and their layer types in order.

    stages: of which the chunk is; number: of those chunks with the same types in a stage.
    """

    part: Stage
    stages: _Blocks
    types: tuple[int, ...] | None = None
    number: int = 0


class _Worked(NamedTuple):
    """Stages that are worked out together: the candidates that have them, and sizes of their shapes.

    places, shapes: of each kind, the rows of its candidates with the place of the first, and its places among shapes.
    """

    candidates: Candidates
    work: StageWork
    places: dict[_Blocks, tuple[Integers, int]]
    shapes: dict[_Blocks, slice]


@dataclass(frozen=True)
class _Parts:
    """Stages and chunks of all candidates, each replayed once; `candidates` number the shapes with stages.

    Stages of one place whose chunks have given blocks are worked out together, and of their chunks those with the same
    layer types, whatever the number of each.
    """

    shapes: Shapes
    fitting: Fitting
    pricer: ColumnPricer
    candidates: Candidates
    _rows: dict[_Blocks, list[Integers]] = field(default_factory=dict)
    _counts: dict[_Chunk, dict[_Blocks, Contents]] = field(default_factory=dict)
    _worked: dict[_Blocks, _Worked] = field(default_factory=dict)
    _sums: dict[_Blocks, tuple[Floats, Floats]] = field(default_factory=dict)
    _chunks: dict[_Chunk, dict[_Blocks, ChunkTimes]] = field(default_factory=dict)

    def expect(self, rows: Integers, stages: int, chunks: int) -> None:
        """Collect the candidates of each kind of stage, before any is replayed."""
        for some, of_stage, _ in self._alike(stages, chunks):
            self._rows.setdefault(some, []).append(rows)
            for part, contents in of_stage:
                self._numbered(some, part, contents)

    def kinds(self, rows: Integers, stages: int, chunks: int) -> Iterator[StageKind]:
        """Every kind of stage of the candidates in `rows`, all with as many stages and chunks."""
        from axonn_tune.cost.pipeline import StageKind

        for some, of_stage, numbers in self._alike(stages, chunks):
            mine, start = self._work(_together(some)).places[some]
            at = np.searchsorted(mine, rows)
            communication, compute = (column[start + at] for column in self._stage(_together(some)))
            each = (self._chunk(self._numbered(some, part, contents))[some] for part, contents in of_stage)
            times = tuple(one.taken(at) for one in each)
            host = sum(one.host_s for one in times)
            yield StageKind(numbers, communication, compute + host, times)

    def _numbered(self, some: _Blocks, part: Stage, contents: Contents) -> _Chunk:
        """What a chunk is replayed with: in one kind of stage no two that differ in numbers of blocks."""
        types = tuple(of_type for of_type, _ in contents) if some.contents else None
        number = 0
        while True:
            chunk = _Chunk(part, _together(some), types, number)
            if self._counts.setdefault(chunk, {}).setdefault(some, contents) == contents:
                return chunk
            number += 1

    def _alike(self, stages: int, chunks: int) -> Iterator[tuple[_Blocks, list[tuple[Stage, Contents]], list[int]]]:
        """Each kind of stage with its chunks in their order, and the numbers of its stages."""
        from axonn_tune.cost.pipeline import parts_of

        problem = self.shapes.problem
        split = parts_of(problem, stages, chunks, problem.parts)
        exactly = problem.parts is not None or len(problem.model.types) > 1 or (chunks > 1 and len(set(split)) > 1)
        alike = stages_alike(contents_of(problem.model, split, problem.mtp_part), stages)
        blocks = {key: sum(map(blocks_in, key[1])) for key in alike}
        most = max((count for (stage, _), count in blocks.items() if stage == MIDDLE), default=0)
        for (stage, contents), numbers in alike.items():
            some = _Blocks(stage, int(most > blocks[stage, contents]) if stage == MIDDLE else 0)
            some = _Blocks(stage, 0, contents) if exactly else some
            yield some, [(part, one if exactly else ()) for part, one in chunks_of(stage, contents)], numbers

    def _stage(self, together: _Blocks) -> tuple[Floats, Floats]:
        """Communication and computation of kinds of stage, of the candidates that are expected to have them."""
        if together not in self._sums:
            worked = self._work(together)
            self._sums[together] = self.pricer.sums(worked.candidates, worked.work)
        return self._sums[together]

    def _chunk(self, chunk: _Chunk) -> dict[_Blocks, ChunkTimes]:
        """A chunk, of the candidates that are expected to have its stages, by kind of stage."""
        if chunk not in self._chunks:
            worked, counts = self._work(chunk.stages), self._counts[chunk]
            if chunk.types is None:
                chunks = self.shapes.chunks[self.shapes.piped]
                each = np.floor(np.asarray(worked.work.values["L"]) / chunks)
                runs: Runs = ((0, np.maximum(each, 1.0)),)
            else:
                columns = np.zeros((len(chunk.types), sum(one.stop - one.start for one in worked.shapes.values())))
                for some, contents in counts.items():
                    columns[:, worked.shapes[some]] = np.array([count for _, count in contents])[:, None]
                same = len(set(counts.values())) == 1
                numbers = [float(count) for _, count in next(iter(counts.values()))] if same else list(columns)
                runs = tuple(zip(chunk.types, numbers, strict=True))
            lengths = [(some, *worked.places[some]) for some in counts]
            rows = np.concatenate([np.arange(start, start + len(mine)) for _, mine, start in lengths])
            times = self.pricer.chunk(worked.candidates.taken(rows), worked.work, chunk.part, runs=runs)
            ends = np.cumsum([len(mine) for _, mine, _ in lengths]).tolist()
            self._chunks[chunk] = {
                some: times.taken(np.arange(end - len(mine), end))
                for (some, mine, _), end in zip(lengths, ends, strict=True)
            }
        return self._chunks[chunk]

    def _work(self, together: _Blocks) -> _Worked:
        """Kinds of stage, of the candidates that are expected to have them."""
        if together not in self._worked:
            places, shapes = dict[_Blocks, tuple[Integers, int]](), dict[_Blocks, slice]()
            sizes, found, start, first = list[tuple[dict[str, Value], int]](), list[Candidates](), 0, 0
            for some in [one for one in self._rows if _together(one) == together]:
                rows = distinct(np.concatenate(self._rows[some]))[0]
                candidates = self.candidates.taken(rows)
                among, values = self._sized(some, candidates)
                places[some], shapes[some] = (rows, start), slice(first, first + len(among))
                found.append(replace(candidates, shape=first + np.searchsorted(among, candidates.shape)))
                sizes.append((values, len(among)))
                start, first = start + len(rows), first + len(among)
            routes = {axes: np.concatenate([one.routes[axes] for one in found]) for axes in found[0].routes}
            every = Candidates(np.concatenate([one.shape for one in found]), routes)
            work = self.pricer.work(_stacked(sizes), together.stage)
            self._worked[together] = _Worked(every, work, places, shapes)
        return self._worked[together]

    def _sized(self, some: _Blocks, candidates: Candidates) -> tuple[Integers, dict[str, Value]]:
        """Symbols of a kind of stage, and the shapes with stages that they are of: of exact chunks only of those that
        have them."""
        alike = [one for one in self.shapes.stage_rows if one.stage == some.stage]
        if some.contents:
            among = distinct(candidates.shape)[0]
            return among, self._values_of(some, among)
        layers = np.maximum.reduce([one.blocks()[0] for one in alike]) - float(some.fewer)
        layers = np.maximum(layers, 1.0)
        every = np.arange(len(layers))
        values = self.shapes.stage_values(some.stage, (layers,), every)
        kept = np.minimum(self.fitting.kept_layers[self.shapes.piped], layers)
        return every, values | self._counts_of(some, alike, layers, kept)

    def _values_of(self, some: _Blocks, among: Integers) -> dict[str, Value]:
        """Symbols of a stage with exactly these chunks, of some shapes with stages."""
        program, rows = self.pricer.program, self.shapes.piped[among]
        counts = blocks_by_type(self.shapes.problem.model, some.contents)
        columns = tuple(np.full(len(rows), float(count)) for count in counts)
        values, chunks = (
            self.shapes.stage_values(some.stage, columns, among),
            [(as_runs(one), 1.0) for one in some.contents],
        )
        again = values["repeated"] = self.fitting.repeated[rows].astype(np.float64)
        values |= blocks_by_kind(program, chunks, repeated=again, arithmetic=COLUMNS)
        kept = np.minimum(self.fitting.kept_layers[rows], values["L"])
        return values | kept_by_kind(program, chunks, values, kept, arithmetic=COLUMNS)

    def _counts_of(self, some: _Blocks, alike: list[StageRows], layers: Floats, kept: Floats) -> dict[str, Value]:
        """Symbols that count the blocks of a kind of stage."""
        program, found = self.pricer.program, dict[str, Value]({"kept": kept, "unkept": layers - kept})
        if not program.some:
            return found
        repeated = self.fitting.repeated[self.shapes.piped]
        again = alike[0].blocks(repeated)[0]
        if some.stage == MIDDLE:
            # Chunks of stages in between differ by one block at most.
            chunks = self.shapes.chunks[self.shapes.piped].astype(np.float64)
            each, left = layers // chunks, layers % chunks
            again = chunks * np.minimum(repeated, each) + np.where(repeated > each, left, 0.0)
        counts: dict[str, Floats] = {REPEATING: again, PLAIN_BLOCKS: layers - again}
        for end, blocks in counts.items():
            share = kept if end == PLAIN_BLOCKS else 0.0 * kept
            found |= {f"L{end}": blocks, f"kept{end}": share, f"unkept{end}": blocks - share}
        return found | {"repeated": repeated.astype(np.float64)}


def _together(some: _Blocks) -> _Blocks:
    """What a kind of stage is worked out with: others in its place whose chunks have given blocks, or itself."""
    return _Blocks(some.stage, -1) if some.contents else some


def _stacked(sizes: Sequence[tuple[dict[str, Value], int]]) -> dict[str, Value]:
    """Symbols of some shapes and then of others, given how many each are."""
    if len(sizes) == 1:
        return sizes[0][0]

    def joined(name: str) -> Value:
        columns = [values[name] for values, _ in sizes]
        if all(isinstance(one, float) and one == columns[0] for one in columns):
            return columns[0]
        return np.concatenate([np.broadcast_to(np.asarray(values[name]), count) for values, count in sizes])

    return {name: joined(name) for name in sizes[0][0]}


def _sends_s(shapes: Shapes, program: StepProgram, candidates: Candidates, routes: Sequence[GroupShape]) -> Floats:
    """Time of one message between stages of every candidate, s."""
    from axonn_tune.cost.pipeline import gathers_messages, message_s

    problem, over_x, orders = shapes.problem, candidates.routes["x"], shapes.problem.orders
    inside = [order[: order.index("pipeline")] == order[:-1] for order in orders]
    assert all(inside) or len(orders) == 1, "orders that are tried have the pipeline outermost"
    strides = np.ones(len(candidates), dtype=np.int64)
    for axis in orders[0][: orders[0].index("pipeline")]:
        strides *= shapes.sizes(axis)[candidates.shape]
    whole, size = (
        np.broadcast_to(np.asarray(program.send(scattered=one).size_bytes.evaluate(shapes.values)), len(shapes))
        for one in (False, problem.framework.schedule.scattered)
    )
    gathered, call_s = (
        gathers_messages(problem.framework),
        seconds(software_on(problem.framework, problem.machine).collective_us),
    )
    ways, firsts, way = distinct(strides * len(routes) + over_x if gathered else strides)
    found = np.empty(len(candidates))
    for number, first in zip(range(len(ways)), firsts.tolist(), strict=True):
        mine = way == number
        shape = candidates.shape[mine]
        found[mine] = message_s(
            size[shape],
            whole[shape],
            stride=int(strides[first]),
            over_x=routes[over_x[first]] if gathered else None,
            machine=problem.machine.placing(problem.gpus),
            world=problem.gpus,
            call_s=call_s,
            arithmetic=COLUMNS,
        )
    return found


# Ranks.


def _refined(columns: Columns, shapes: Shapes, problem: Problem, *, count: int, variants: bool) -> Columns:
    """Columns with exact steps at the first `count` ranks, and for the shortest step of all.

    Bounds are never above the exact value, so a candidate whose exact value is the lowest of all that are left is the
    next place; candidates whose bound is above it need no exact value. Ties go to the shorter step.
    """
    groups = None if variants else columns.places(shapes)
    columns = _refined_by(columns, groups, rank_by=problem.rank_by, count=count)
    for number in range(1, len(problem.formats) + 1):
        # The best of each number format is shown, whatever its place.
        mine = np.flatnonzero(columns.precision == number - 1)
        columns = _refined_by(columns, groups, rank_by=problem.rank_by, count=1, among=mine)
    return columns if problem.rank_by == "iteration" else _refined_by(columns, None, rank_by="iteration", count=1)


def _refined_by(
    columns: Columns, groups: Integers | None, *, rank_by: RankBy, count: int, among: Integers | None = None
) -> Columns:
    """The same for one measure; groups: of rows that share a place, None where each has its own; among: rows."""
    iteration, compute, bubble = columns.iteration_s.copy(), columns.compute_s.copy(), columns.bubble_s.copy()
    metric, bounded = ranking_metric(columns, rank_by=rank_by), columns.bounded.copy()
    rows = np.arange(len(metric)) if among is None else among
    known_of = (~bounded)[rows].tolist()
    queue = list(zip(metric[rows].tolist(), iteration[rows].tolist(), rows.tolist(), known_of, strict=True))
    heapq.heapify(queue)
    ranked: set[int] = set()
    while queue and len(ranked) < count:
        *_, row, known = heapq.heappop(queue)
        if known:
            ranked.add(row if groups is None else int(groups[row]))
            continue
        iteration[row], compute[row], bubble[row] = columns.exact_s(row)
        bounded[row] = False
        exact = replace(
            columns,
            iteration_s=iteration[row : row + 1],
            compute_s=compute[row : row + 1],
            bubble_s=bubble[row : row + 1],
            communication_s=columns.communication_s[row : row + 1],
        )
        measure = float(ranking_metric(exact, rank_by=rank_by)[0])
        heapq.heappush(queue, (measure, float(iteration[row]), row, True))
    return replace(columns, iteration_s=iteration, compute_s=compute, bubble_s=bubble, bounded=bounded)


def _promising(columns: Columns, shapes: Shapes, problem: Problem, *, count: int) -> NDArray[np.bool_]:
    """Shapes of one chunk a stage that may be among the first `count` grids, or be the fastest, cut into several; of
    each number format.

    What a stage of one chunk is busy with takes as long in several, and their sends are as many at least; with more
    recompute it takes longer.
    """
    last_s = _last_place_s(columns, shapes, problem, count=count)
    found, shortest_s = np.zeros(len(shapes), dtype=np.bool_), np.full(max(len(problem.formats), 1), np.inf)
    np.minimum.at(shortest_s, columns.precision, columns.iteration_s)
    for start, group in columns.starts:
        rows = np.arange(start, start + len(group))
        step_s, exposed = group.floor_s()
        least = {"iteration": step_s, "exposed": exposed, "communication": columns.communication_s[rows]}
        kept = (least[problem.rank_by] <= last_s) | (step_s <= shortest_s[columns.precision[rows]])
        found[columns.shape[rows[kept]]] = True
    return found


def _last_place_s(columns: Columns, shapes: Shapes, problem: Problem, *, count: int) -> float:
    """What the last of the first `count` grids is ranked by, s; infinite where there are fewer."""
    places = np.full(int(shapes.grid.max(initial=-1)) + 1, np.inf)
    np.minimum.at(places, shapes.grid[columns.shape], ranking_metric(columns, rank_by=problem.rank_by))
    return float(np.sort(places)[count - 1]) if 0 < count <= len(places) else np.inf


def _near(columns: Columns, shapes: Shapes, problem: Problem, *, count: int) -> tuple[Integers, Integers]:
    """Shapes that may be among the first `count` grids, or be the fastest, with less recompute; and in other formats.

    Recompute repeats no more than the forward pass, and a backward pass takes no less, so without it a step and its
    communication are at least two thirds. In other formats those are tried, too, that do not fit in the first.
    """
    found = np.zeros((2, len(shapes)), dtype=np.bool_)
    found[1, np.setdiff1d(np.arange(len(shapes)), columns.shape)] = True
    for metric, limit_s in (
        (ranking_metric(columns, rank_by=problem.rank_by), _last_place_s(columns, shapes, problem, count=count)),
        (columns.iteration_s, float(columns.iteration_s.min(initial=np.inf))),
    ):
        least = np.full(len(shapes), np.inf)
        np.minimum.at(least, columns.shape, metric)
        for rows, share in zip(found, (2.0 / 3.0, LEAST_IN_A_FORMAT), strict=True):
            rows |= np.isfinite(least) & (share * least <= limit_s)
    for start, group in columns.starts if problem.formats else ():
        # Cut into several chunks, they may be the fastest.
        cut = np.arange(start, start + len(group))
        found[1, columns.shape[cut[group.floor_s()[0] <= columns.iteration_s.min()]]] = True
    return np.flatnonzero(found[0]), np.flatnonzero(found[1])


def _with_other_exchange(columns: Columns, shapes: Shapes, problem: Problem, *, count: int, last_s: float) -> Integers:
    """Shapes that may be among the first `count` grids with another exchange of context parallelism, which changes no
    more of a step than its exposed communication; and those not priced with the framework's own.

    last_s: what the last of them takes so far, s.
    """
    last_s = min(last_s, _last_place_s(columns, shapes, problem, count=count))
    least = np.full(len(shapes), np.inf)
    np.minimum.at(least, columns.shape, columns.compute_s + columns.bubble_s)
    return np.flatnonzero((least <= last_s) | ~np.isfinite(least))


def _joined(parts: list[Columns]) -> Columns:
    """Columns one after the other."""
    names = [field.name for field in fields(Columns) if field.name != "starts"]
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    starts, before = [], 0
    for part in parts:
        starts += [(before + start, group) for start, group in part.starts]
        before += len(part.shape)
    return Columns(**joined, starts=tuple(starts))


def _best_of_each(columns: Columns, shapes: Shapes, *, rank_by: RankBy) -> Integers:
    """Rows that reach the lowest value of their grid in their number format: several where there are ties."""
    metric, grid = ranking_metric(columns, rank_by=rank_by), columns.places(shapes)
    lowest = np.full(int(grid.max(initial=-1)) + 1, np.inf)
    np.minimum.at(lowest, grid, metric)
    return np.flatnonzero(metric == lowest[grid])


def _count_rejected(grids: Grids, shapes: Shapes, used: Integers) -> dict[str, int]:
    """Rejected grids by constraint, without zeros."""
    counts = {check.name: int(broken.sum()) for check, broken in zip(grids.constraints, grids.broken.T, strict=True)}
    shaped = len(distinct(shapes.grid)[0])
    asked = len(grids.sound_as_asked(shapes.problem))
    counts[MICRO_BATCH] = asked - shaped
    counts[MEMORY] = shaped - len(used)
    counts[PINNED] = len(grids.sound) - asked
    return {name: count for name, count in counts.items() if count}
