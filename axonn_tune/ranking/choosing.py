"""The search itself: price the space, take each grid at its best, put the grids in order."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial, reduce
from math import prod

import numpy as np
from numpy.typing import NDArray

from axonn_tune.cost.columns import ColumnPricer, Floats, Integers, RouteTable, distinct, route_table
from axonn_tune.cost.compute import compute_rates
from axonn_tune.cost.price import Detail
from axonn_tune.errors import UsageError
from axonn_tune.frameworks import registry, software_on, step_on
from axonn_tune.frameworks.description import Framework, StepOptions
from axonn_tune.grid import RANK_AXES
from axonn_tune.program.dimensions import MEMORY, MICRO_BATCH, PINNED, padded_alignment, table_alignment
from axonn_tune.program.operations import MATRIX_ALIGNMENT
from axonn_tune.program.schedule import build_schedule
from axonn_tune.program.step import FIRST, LAST, MIDDLE, ONLY, StepProgram, build_step
from axonn_tune.ranking.candidates import Candidates, Columns, order_of, ranking_metric
from axonn_tune.ranking.pools import Pool
from axonn_tune.ranking.priced import TELL, Interrupted, Priced, SearchCounts, Tell
from axonn_tune.ranking.space import (
    Among,
    Fitting,
    Grids,
    Placements,
    Problem,
    Shapes,
    Variant,
    count_candidates,
    cut_may_fit,
    dispatcher_grids,
    exchange_grids,
    fit_all,
    fit_always,
    fit_memory,
    fit_others,
    list_candidates,
    list_grids,
    list_placements,
    list_shapes,
    require_searchable,
    uneven_chunks,
    with_uneven_chunks,
    without_larger,
)
from axonn_tune.request import ALPHA_BETA, DEFAULT_TOP, Precision, RankBy
from axonn_tune.specs.formats import nearest_format
from axonn_tune.units import seconds

LEAST_IN_A_FORMAT = 0.7
"""Share of the step in the first number format from which another is tried: a layout that takes longer than the best by
more does not come first in another format either. No bound: held against whole searches in a test."""
_FEW, _FIRST = 64, 3
"""Rows that are priced at once; of more, the first ones of each number format are priced first."""
_SEEN = 256
"""Candidates that are tried in another number format to know what it reaches."""
_MOST_MOVED = 64
"""Rows of each number format beyond the first grids whose stages are balanced by time: more than searches of shipped
models need."""
LARGEST_COUNT = 2**40
"""Counts from here on do not fit the columns, whose arithmetic must stay exact."""


def search(problem: Problem, *, top: int = DEFAULT_TOP, variants: bool = False, tell: Tell | None = None) -> Priced:
    """Rank grids of a GPU count, the first `top` of them (0: all); with `variants` candidates. Nothing feasible: an
    empty ranking.

    tell: is told how far it is. Interrupted once something has a price, the search raises `Interrupted`, which has it.
    """
    started, found = time.perf_counter(), None
    try:
        for found in _rounds(problem, top=top, variants=variants):
            if tell is not None:
                tell(*found.told)
    except KeyboardInterrupt:
        if found is None or not len(found.exact):
            raise
        raise Interrupted(_ranked(found, started, top=top, variants=variants, interrupted=True)) from None
    assert found is not None, "the last round is of every search"
    return _ranked(found, started, top=top, variants=variants)


def candidates_of(problem: Problem, *, top: int, variants: bool) -> Candidates:
    """Every candidate that fits, the first `top` grids (0: all), or with `variants` candidates, with exact steps."""
    *_, found = _rounds(problem, top=top, variants=variants)
    return found


def _rounds(problem: Problem, *, top: int, variants: bool) -> Iterator[Candidates]:
    """The same after each round of pricing, of which the last has every candidate."""
    # What comes first may hang on how many grids are balanced by time: shorter lists are the start of that many.
    count = max(top, DEFAULT_TOP) if top else LARGEST_COUNT
    _check(problem)
    shapes = list_shapes(grids := list_grids(problem), problem)
    number = count_candidates(shapes, grids, problem.tried(every=variants))
    require_searchable(number)
    shapes = without_larger(shapes, programs := Programs(problem.by_dispatcher[0]))
    exchanges = _with_overlap(problem, grids, _exchanges(problem, grids, shapes, programs))
    fittings = (fit_all if variants or problem.request.recompute_layers else fit_always)(shapes, programs)
    uneven, unpriced = uneven_chunks(shapes, programs, fittings)
    # What does not fit in the first number format may fit in another.
    fit = [shapes.grid] if problem.formats else [shapes.grid[one.rows] for one in fittings.values()]
    placed = distinct(np.concatenate([shapes.grid[uneven], *fit]))[0]
    tried = _Tried(problem, exchanges, list_placements(grids, placed, problem), every=variants, count=count)
    found = partial(
        Candidates,
        problem,
        grids=grids,
        placements=tried.placements,
        rows=np.arange(0),
        programs=programs,
        problems=tuple(one.problem for one in exchanges),
    )
    columns = tried.with_more(_joined([]), shapes, fittings)
    if others := [one for one in programs if one not in fittings]:
        near = _near(columns, shapes, problem, fittings, count=count)
        tried = replace(tried, reached_s=tried.in_formats(columns, shapes, programs))
        among = tried.promising(columns, shapes, {one: near[one.precision] for one in others})
        number += count_candidates(shapes, grids, others, among)
        columns = tried.with_more(columns, shapes, fit_others(shapes, programs, fittings, among))
    columns = _refined(columns, shapes, problem, count=count, variants=variants)
    yield found(number, shapes=shapes, fittings=fittings, columns=columns)
    each = [(tried, uneven)] if len(uneven) else []
    each += [(replace(tried, merges=True), uneven)] if tried.bounds and problem.compares_expert_overlap else []
    base = shapes
    for one, cut in each:
        promising = one.may_be_cut(columns, shapes, fittings)[: len(base)]
        promising[unpriced] = True
        more, within = one.cut(base, cut if variants else cut[promising[cut]], promising, programs)
        among = one.promising(columns, more, within, every=shapes)
        number += count_candidates(more, grids, problem.variants, among if one.bounds else None)
        fitted, before, shapes = fit_all(more, programs, among), len(shapes), shapes.with_more(more)
        fittings = {kind: fittings[kind].with_more(fitted[kind]) for kind in fitted}
        added = {kind: fitting.among(np.arange(before, len(shapes))) for kind, fitting in fittings.items()}
        columns = one.with_more(columns, shapes, added)
        columns = _refined(columns, shapes, problem, count=count, variants=variants)
        yield found(number, shapes=shapes, fittings=fittings, columns=columns)
    if problem.splits and not variants:
        yield _balanced(found(number, shapes=shapes, fittings=fittings, columns=columns), count=count)


@dataclass(frozen=True)
class _Tried:
    """How candidates are priced: with which exchanges, at which placements; every: all are, not only those that may be
    among the first `count` grids; reached_s: steps in number formats that others need not be above; merges: those with
    expert overlap."""

    problem: Problem
    exchanges: list[_Exchange]
    placements: Placements
    every: bool
    count: int
    reached_s: Mapping[Precision | None, float] = field(default_factory=dict)
    merges: bool = False

    @property
    def own(self) -> list[_Exchange]:
        """The exchanges without expert overlap, or those with it."""
        return [one for one in self.exchanges if one.merged == self.merges]

    @property
    def ranks_steps(self) -> bool:
        """Whether only what may have one of the shortest steps is of interest."""
        return self.problem.rank_by == "iteration" and not self.every

    @property
    def bounds(self) -> bool:
        """Whether least steps decide which candidates are priced: dense models have few kinds of stages and chunks."""
        return self.ranks_steps and (self.problem.model.has_experts or len(self.problem.model.types) > 1)

    def with_more(self, columns: Columns, shapes: Shapes, fittings: dict[Variant, Fitting]) -> Columns:
        """Columns with candidates of more recompute sets or shapes, and exact steps at the first ranks."""
        fittings = fittings if self.every else _undominated(self.problem, fittings)
        own, others = ([one for one in self.own if one.other == other] for other in (False, True))
        found = [self._priced(one, shapes, kind, fitting) for one in own for kind, fitting in fittings.items()]
        columns = _joined([columns, *found])
        if not others:
            return self._refined(columns, shapes)
        if self.ranks_steps and _last_place_s(columns, shapes, self.problem, count=self.count) == np.inf:
            columns = self._refined(columns, shapes)
        found = [columns]
        for kind, fitting in fittings.items():
            fitting = self._exchanging(columns, shapes, kind, fitting, others) if self.ranks_steps else fitting
            found += [self._priced(one, shapes, kind, fitting) for one in others]
        return self._refined(_joined(found), shapes)

    def _exchanging(
        self, columns: Columns, shapes: Shapes, kind: Variant, fitting: Fitting, others: list[_Exchange]
    ) -> Fitting:
        """The shapes that may be among the first grids with some of the other exchanges."""
        limit_s = self._limits_s(columns, shapes)[kind.precision]
        mine = (columns.recompute == self.problem.variants.index(kind)) & self.bounds
        near, known = [columns.shape[mine & (columns.bare_s <= limit_s)]], columns.shape[mine]
        for base in self.own:
            # What cannot have the framework's own exchange has no least step yet.
            alike = [fitting.rows[:0], *(one.taken(shapes, fitting).rows for one in others if base.alike(one))]
            rows = np.setdiff1d(np.concatenate(alike), known)
            if len(rows):
                near.append(np.flatnonzero(self._least_s(base, shapes, kind, fitting.among(rows)) <= limit_s))
        return fitting.among(np.concatenate(near))

    def _refined(self, columns: Columns, shapes: Shapes) -> Columns:
        """The columns with what least steps need to decide."""
        if not self.bounds:
            return columns
        return _refined(columns, shapes, self.problem, count=self.count, variants=False)

    def _limits_s(self, columns: Columns, shapes: Shapes) -> dict[Precision | None, float]:
        """Longest steps that can still be among the first grids, or the best of their number format, s."""
        return _limits_s(columns, shapes, self.problem, count=self.count, reached_s=self.reached_s)

    def in_formats(
        self, columns: Columns, shapes: Shapes, programs: Mapping[Variant, StepProgram]
    ) -> dict[Precision | None, float]:
        """Steps in the other number formats of what comes first in the first, where it fits, s."""
        found, kinds = dict[Precision | None, float](), list(programs)
        first = np.argsort(columns.iteration_s, kind="stable")[:_SEEN]
        for precision in self.problem.formats[1:] if self.bounds else ():
            priced = list[Columns]()
            for number in distinct(columns.recompute[first])[0].tolist():
                rows = distinct(columns.shape[first[columns.recompute[first] == number]])[0]
                kind = kinds[number]._replace(precision=precision)
                fitting = fit_memory(shapes.taken(rows, chunks=shapes.chunks[rows]), programs[kind])
                fitting = fitting.spread(rows, len(shapes))
                priced += [self._priced(one, shapes, kind, fitting) for one in self.own if not one.other]
            known = _refined(_joined(priced), shapes, self.problem, count=1, variants=False)
            exact = ~known.pending & ~known.bounded
            found[precision] = float(known.iteration_s[exact].min(initial=np.inf))
        return found

    def promising(self, columns: Columns, shapes: Shapes, among: Among, *, every: Shapes | None = None) -> Among:
        """Those of some shapes that may be among the first grids; every: the shapes of the columns, where they are
        others. Where some blocks repeat, as if none did."""
        limits_s, found = self._limits_s(columns, shapes if every is None else every), dict(among)

        def bounded(kind: Variant, rows: Integers) -> Integers:
            return np.flatnonzero(self._least_own_s(shapes, kind, rows) <= limits_s[kind.precision])

        for precision in {kind.precision: None for kind in among} if self.bounds else ():
            kinds = [kind for kind in among if kind.precision == precision]
            plain = Variant("none", precision=precision)
            near = distinct(np.concatenate([among[kind] for kind in kinds]))[0]
            near = bounded(plain, near) if plain in among else near
            for kind in kinds:
                found[kind] = np.intersect1d(near, among[kind])
        return found

    def may_be_cut(self, columns: Columns, shapes: Shapes, fittings: Mapping[Variant, Fitting]) -> NDArray[np.bool_]:
        """Shapes of one chunk a stage that may be among the first `count` grids cut into several; with expert overlap
        those of one stage or several chunks as they are, too."""
        if not self.merges:
            return _promising(columns, shapes, self.problem, count=self.count)
        found = np.zeros(len(shapes), dtype=np.bool_)
        for precision, limit_s in self._limits_s(columns, shapes).items():
            number = 0 if precision is None else self.problem.formats.index(precision)
            plain, least_s = Variant("none", precision=precision), np.full(len(shapes), np.inf)
            # Cut, it may fit with less recompute than it does as it is.
            repeats = np.array([kind.recompute != "none" for kind in self.problem.variants])[columns.recompute]
            mine = (columns.precision == number) & ~repeats
            np.minimum.at(least_s, columns.shape[mine], columns.least_merged_s[mine])
            fitting = [own.rows for kind, own in fittings.items() if kind.precision == precision]
            near = distinct(np.concatenate(fitting))[0]
            # What is only to be had with another exchange may have no price yet.
            near = near[(least_s[near] <= limit_s) | np.isinf(least_s[near])]
            found[near] |= self._least_own_s(shapes, plain, near, cut=True)[near] <= limit_s
        return found

    def cut(
        self, shapes: Shapes, ones: Integers, near: NDArray[np.bool_], programs: Programs
    ) -> tuple[Shapes, dict[Variant, Integers]]:
        """Some shapes of one chunk a stage cut into several, and those under each variant that may fit; with expert
        overlap what can have it, also as it is."""
        able, own = np.ones(len(shapes), dtype=np.bool_), self.own
        if self.merges:
            able = np.any([one.grids for one in own if one.grids is not None], axis=0)[shapes.grid]
        ones = ones[able[ones]]
        cut, source = with_uneven_chunks(shapes, ones)
        some = shapes.taken(ones, chunks=shapes.chunks[ones])
        # What repeats in some blocks holds no less than what repeats in all.
        fits = {kind: cut_may_fit(some, programs[kind._replace(some=False)]) for kind in programs}
        among = {kind: np.flatnonzero(fits[kind][source]) for kind in programs}
        if not self.merges:
            return cut, among
        as_they_are = np.flatnonzero(near & able & ((shapes.stages == 1) | (shapes.chunks > 1)))
        whole = shapes.taken(as_they_are, chunks=shapes.chunks[as_they_are])
        for kind, rows in among.items():
            rows = np.concatenate((np.arange(len(whole)), len(whole) + rows))
            among[kind] = rows if own[0].programs[kind].merges else rows[:0]
        return replace(whole.with_more(cut), problem=shapes.problem.with_expert_overlap), among

    def _least_own_s(self, shapes: Shapes, kind: Variant, rows: Integers, *, cut: bool = False) -> Floats:
        """Least step of some shapes with any of the exchanges, s; cut: with stages cut into any number of chunks."""
        none, found = np.zeros(len(shapes)), np.full(len(shapes), np.inf)
        anything = Fitting(none, none, none.astype(np.int64), rows, np.inf)
        for base in [one for one in self.own if not one.other]:
            # Some grids cannot have the framework's own exchange of context parallelism, of which this is free.
            each = [one.taken(shapes, anything).rows for one in self.own if base.alike(one)]
            some = anything.among(distinct(np.concatenate(each))[0])
            np.minimum(found, self._least_s(base, shapes, kind, some, cut=cut), out=found)
        return found

    def _least_s(self, one: _Exchange, shapes: Shapes, kind: Variant, fitting: Fitting, *, cut: bool = False) -> Floats:
        """The same with one of them, of its grids; infinite for all others."""
        found, problem = np.full(len(shapes), np.inf), one.problem.within(kind.precision)
        for program, part in _by_alignment(shapes, kind, one.programs, fitting):
            for pool, shape, _ in _pooled(problem, shapes, self.placements, program, part, cut=cut):
                np.minimum.at(found, shape, pool.least_s(exchanged=(False,))[0, int(cut and pool.staged)])
        return found

    def _priced(self, one: _Exchange, shapes: Shapes, kind: Variant, fitting: Fitting) -> Columns:
        """Candidates of a recompute set and an exchange: least steps, or prices where these do not decide."""
        fitting = one.taken(shapes, fitting)
        problem, numbers = one.problem.within(kind.precision), self.problem.formats or (None,)
        found = _joined(
            [
                _priced(problem, shapes, self.placements, program, part, bounds=self.bounds)
                for program, part in _by_alignment(shapes, kind, one.programs, fitting)
            ]
        )
        place, precision = self.problem.variants.index(kind), numbers.index(kind.precision)
        return found.numbered(recompute=place, exchange=self.exchanges.index(one), precision=precision)


def _ranked(found: Candidates, started: float, *, top: int, variants: bool, interrupted: bool = False) -> Priced:
    """The first candidates as rows, each grid once or all of them; started: when the search was. interrupted: only of
    those that have exact steps."""
    problem, shapes, columns, fittings = found.problem, found.shapes, found.columns, found.fittings
    rank = partial(order_of, columns, shapes=shapes, placements=found.placements, fittings=fittings)
    among = found.exact if interrupted else np.arange(len(columns.shape))
    rows = among if variants else _best_of_each(columns, shapes, among, rank_by=problem.rank_by)
    rows = rank(rows, rank_by=problem.rank_by)
    rows = rows if variants else rows[np.sort(distinct(columns.places(shapes)[rows])[1])]
    first = rows[: top or len(rows)]
    best = distinct(columns.precision[rows])[1]
    below = rows[np.sort(best[~np.isin(columns.precision[rows[best]], columns.precision[first])])]
    shortest = among[columns.iteration_s[among] == columns.iteration_s[among].min(initial=np.inf)]
    shortest = rank(shortest, rank_by="iteration")[:1] if problem.rank_by != "iteration" else shortest[:0]
    feasible, least_bytes = np.zeros(len(found.grids.sizes), dtype=np.bool_), np.full(len(found.grids.sizes), np.inf)
    feasible[shapes.grid[columns.shape]] = True
    for fitting in fittings.values():
        np.minimum.at(least_bytes, shapes.grid, fitting.total_bytes)
    searched = SearchCounts(
        len(found.grids.sizes),
        found.number,
        _count_fitting(shapes, found.placements, fittings),
        _count_rejected(found.grids, shapes, distinct(shapes.grid[columns.shape])[0]),
        time.perf_counter() - started,
        unlisted=len(rows) - len(first) - len(below),
    )
    return Priced(
        problem,
        searched,
        found.grids,
        tuple(map(found.priced, first.tolist())),
        feasible,
        least_bytes,
        tuple(map(found.priced, below.tolist())),
        next(map(found.priced, shortest.tolist()), None),
        interrupted=interrupted,
    )


def _balanced(priced: Candidates, *, count: int) -> Candidates:
    """The best row of each of the first grids balanced by time, and those of other grids that may then be the best of
    their number format: those that are faster so come behind the others, each of a shape of its own."""
    # Imported here: most searches have no pipeline, and start-up time is theirs.
    from axonn_tune.ranking.splits import best_split

    shapes, fittings, splits = priced.shapes, {**priced.fittings}, dict[int, tuple[int, ...]]()
    details, kinds = dict[int, Detail](), list(fittings)
    first, moved_s, best_s = _to_balance(priced, count=count)
    columns, number, found = first.columns, len(np.flatnonzero(moved_s == -np.inf)), list[Columns]()
    sources, memory = list[Integers](), list[tuple[Variant, Fitting]]()
    for place, row in enumerate(first.rows.tolist()):
        shape, kind, precision = columns.shape[[row]], kinds[columns.recompute[row]], int(columns.precision[row])
        if shapes.stages[shape[0]] == 1 or moved_s[place] >= best_s[precision]:
            continue
        # What is not priced takes longer than the best of its format.
        step_s = float(columns.iteration_s[row]) if columns.pending[row] else columns.exact_s(row)[0]
        below_s, limit_bytes = np.inf if place < number else best_s[precision], fittings[kind].limit_bytes
        job, layout = first.problem_of(row), first.layout(place)
        one = best_split(job, layout, step_s=step_s, limit_bytes=limit_bytes, below_s=below_s)
        if one is None or one.parts is None:
            continue
        best_s[precision] = min(best_s[precision], one.iteration_s)
        own, rows, new = fittings[kind], np.arange(1), len(shapes) + len(found)
        splits[new], details[len(columns.shape) + len(found)] = one.parts, one
        more = Fitting(np.array([one.memory_bytes]), own.kept_layers[shape], own.repeated[shape], rows, limit_bytes)
        memory.append((kind, more))
        sources.append(shape)
        found.append(
            Columns(
                shape=np.array([new]),
                placement=columns.placement[[row]],
                recompute=columns.recompute[[row]],
                communication_s=np.array([one.communication_s]),
                compute_s=np.array([one.compute_s]),
                iteration_s=np.array([one.iteration_s]),
                bubble_s=np.array([one.bubble_s]),
                bounded=np.zeros(1, dtype=np.bool_),
                pending=np.zeros(1, dtype=np.bool_),
                least_cut_s=np.array([one.iteration_s]),
                bare_s=np.zeros(1),
                least_merged_s=np.zeros(1),
                moved_s=np.zeros(1),
                exchange=columns.exchange[[row]],
                precision=columns.precision[[row]],
            )
        )
    if not found:
        return priced
    for kind in fittings:
        several = [
            more if one == kind else replace(more, total_bytes=np.array([np.inf]), rows=more.rows[:0])
            for one, more in memory
        ]
        fittings[kind] = fittings[kind].with_more(reduce(Fitting.with_more, several))
    places = np.concatenate(sources)
    return replace(
        priced,
        number=priced.number + len(splits),
        shapes=shapes.with_more(shapes.taken(places, chunks=shapes.chunks[places])),
        fittings=fittings,
        columns=_joined([columns, *found]),
        splits=splits,
        details=details,
    )


def _to_balance(priced: Candidates, *, count: int) -> tuple[Candidates, Floats, list[float]]:
    """The best rows of the first grids, then of others that may be the best of their number format, the most promising
    first; of each its step if moving layers made stages take as long as their mean, no limit to the first; and the
    shortest step of each format, s.

    With experts, or where layer types differ, others are all rows: what is best unbalanced need not be the best of its
    grid. Else they are the first grids of each format, since layers of one type are spread evenly as it is.
    """
    columns, shapes = priced.columns, priced.shapes
    rows = np.argsort(columns.iteration_s, kind="stable")
    rows = rows[np.sort(distinct(columns.places(shapes)[rows])[1])]
    of_formats = [rows[columns.precision[rows] == one] for one in range(max(len(priced.problem.formats), 1))]
    exact = ~columns.pending & ~columns.bounded
    best_s = [float(columns.iteration_s[one[exact[one]]].min(initial=np.inf)) for one in of_formats]
    every = priced.problem.model.has_experts or len(priced.problem.model.types) > 1
    moved_s = columns.moved_s.copy()
    for own, group in columns.groups:
        moved_s[own] = columns.iteration_s[own] - group.uneven_s()
    moved_s[rows[:count]] = -np.inf
    others = np.arange(len(moved_s)) if every else np.concatenate([one[:count] for one in of_formats])
    others = np.setdiff1d(others[shapes.stages[columns.shape[others]] > 1], rows[:count])
    others = others[moved_s[others] < np.array(best_s)[columns.precision[others]]]
    others = others[np.argsort(moved_s[others], kind="stable")]
    of_each = [others[columns.precision[others] == one][:_MOST_MOVED] for one in range(len(best_s))]
    chosen = np.concatenate([rows[:count], *of_each])
    return replace(priced, rows=chosen), moved_s[chosen], best_s


class Programs(Mapping[Variant, StepProgram]):
    """Programs of all recompute sets that may be tried, each made when it is first asked for."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._known = problem, dict[Variant, StepProgram]()

    def __getitem__(self, kind: Variant) -> StepProgram:
        if kind not in self._known:
            problem = self._problem
            self._known[kind] = step_program(
                problem, step_on(problem.framework, problem.machine, problem.workload.precision), kind
            )
        return self._known[kind]

    def __iter__(self) -> Iterator[Variant]:
        return iter(self._problem.variants)

    def __len__(self) -> int:
        return len(self._problem.variants)


@dataclass(frozen=True, eq=False)
class _Exchange:
    """The search with one exchange of context parallelism and one dispatcher: for which grids, all if None, and its
    programs; other: with another exchange than the framework's own; merged: with expert overlap."""

    problem: Problem
    grids: NDArray[np.bool_] | None
    programs: Programs
    other: bool = False
    merged: bool = False

    def taken(self, shapes: Shapes, fitting: Fitting) -> Fitting:
        """The shapes that have it."""
        if self.grids is None:
            return fitting
        return replace(fitting, rows=fitting.rows[self.grids[shapes.grid[fitting.rows]]])

    def alike(self, other: _Exchange) -> bool:
        """Whether it has the framework's own exchange and the dispatcher of another."""
        return not self.other and self.dispatcher == other.dispatcher

    def merging(self, experts: NDArray[np.bool_]) -> _Exchange:
        """The same with expert overlap; experts: grids with expert parallelism."""
        problem, grids = self.problem.with_expert_overlap, experts if self.grids is None else experts & self.grids
        return replace(self, problem=problem, grids=grids, programs=Programs(problem), merged=True)

    @property
    def dispatcher(self) -> str:
        """Its dispatcher."""
        return self.problem.framework.step.dispatcher


def _exchanges(problem: Problem, grids: Grids, shapes: Shapes, programs: Programs) -> list[_Exchange]:
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
            if not found or having.any():
                other = one is not by_exchange[0]
                found.append(_Exchange(two, having, Programs(two) if found else programs, other=other))
    return found


def _with_overlap(problem: Problem, grids: Grids, exchanges: list[_Exchange]) -> list[_Exchange]:
    """Exchanges, and those of them that can have expert overlap with it, where that is compared."""
    if not problem.compares_expert_overlap:
        return exchanges
    # Gathers of weights over z share buffers, which passes beside each other would both have.
    experts = (grids.column("expert") > 1) & (grids.column("z") == 1)
    return [*exchanges, *(one.merging(experts) for one in exchanges if one.dispatcher != "allgather")]


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

        return rank_by_paper(problem, backend=cost, top=top)

    first, *others = dict.fromkeys(costs)
    found = ranked(first, top=top, variants=variants)
    return replace(found, others={cost: ranked(cost, top=0, variants=False).ranks() for cost in others})


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
    shapes: Shapes, kind: Variant, programs: Programs, fitting: Fitting
) -> Iterator[tuple[StepProgram, Fitting]]:
    """Programs and fittings by the alignment of rows of logits, which differs where the vocabulary is not padded."""
    if not len(fitting.rows):
        return
    options = programs[kind].given.options
    problem, splits = shapes.problem, shapes.sizes("x") * shapes.sizes("y")
    element = problem.workload.element_sizes.compute
    if options.vocabulary_multiple != 0:
        alignment = padded_alignment(problem.model, options, element=element)
        same = alignment == programs[kind].given.table_alignment
        yield programs[kind] if same else step_program(problem, options, kind, alignment=alignment), fitting
        return
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
    if (
        step_on(problem.framework, problem.machine, problem.workload.precision).reshard == "fit"
        or problem.rank_by == "exposed"
    ):
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


def _routes(problem: Problem, placements: Placements, program: StepProgram) -> RouteTable:
    """Price every route for all collectives of a program."""
    steps = (step for stage in (ONLY, FIRST) for step, _ in program.collectives(stage))
    sent = frozenset((step.sent, step.axis) for step in steps)
    software, machine = software_on(problem.framework, problem.machine), problem.machine.placing(problem.gpus)
    call_s = seconds(software.collective_us)
    key = program.groups, sent, call_s
    if key not in placements.tables:
        used = {axes: placements.routes[axes] for axes in program.groups}
        table = route_table(placements.shapes, used, machine, problem.gpus, sent=sent, call_s=call_s)
        placements.tables[key] = table
    return placements.tables[key]


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


def _pooled(
    problem: Problem,
    shapes: Shapes,
    placements: Placements,
    program: StepProgram,
    fitting: Fitting,
    *,
    cut: bool = False,
) -> Iterator[tuple[Pool, Integers, Integers]]:
    """All candidates of one variant that fit into memory, without and with pipeline stages; each with the shape and the
    placement of its candidates. cut: as if stages were cut into several chunks."""
    workload, options = problem.workload, program.given.options
    rates = compute_rates(
        problem.machine.accelerator,
        workload.precision,
        software_on(problem.framework, problem.machine),
        multiplied=problem.gemm_format,
        cuda_graphs=problem.framework.step.cuda_graphs,
        quantizes_in_gemm=problem.framework.step.quantizes_in_gemm,
    )
    several, looped = shapes.stages[fitting.rows] > 1, (shapes.chunks[fitting.rows] > 1) | cut
    if not options.expert_overlap:
        looped = np.zeros_like(several)
    for staged, chunks, of in ((False, 1, ~several), (True, 1, several & ~looped), (True, 2, several & looped)):
        if not len(rows := fitting.rows[of]):
            continue
        stages, one = (FIRST, MIDDLE, LAST) if staged else (ONLY,), program
        if staged and options.staged(chunks) != options:
            kind, alignment = Variant(program.recompute, program.some), program.given.table_alignment
            one = step_program(problem, options.staged(chunks), kind, alignment=alignment)
        schedule = _schedule(one, overlaps=workload.overlaps, split=workload.split_micro_batch, stages=stages)
        element_bytes = float(workload.element_sizes.compute)
        some, own = shapes.taken(rows, chunks=shapes.chunks[rows]), fitting.taken(rows)
        candidates, placement = list_candidates(some, np.arange(len(rows)), placements, one.groups)
        table = _routes(problem, placements, one)
        pricer = ColumnPricer(one, schedule, rates=rates, element_bytes=element_bytes, table=table)
        yield (
            Pool(some, own, pricer, candidates, placements.shapes, rates.contention, staged),
            rows[candidates.shape],
            placement,
        )


def _priced(
    problem: Problem, shapes: Shapes, placements: Placements, program: StepProgram, fitting: Fitting, *, bounds: bool
) -> Columns:
    """Candidates of one variant that fit into memory: with `bounds` their least steps, else prices."""
    found = list[Columns]()
    for pool, shape, placement in _pooled(problem, shapes, placements, program, fitting):
        none = np.zeros(len(pool))
        (least_s, least_cut_s, merged_s, moved_s), (bare_s, *_) = (
            pool.least_s(exchanged=(True, False)) if bounds else np.zeros((2, 4, len(pool)))
        )
        columns = Columns(
            shape=shape,
            placement=placement,
            recompute=np.zeros(len(pool), dtype=np.int64),
            communication_s=none,
            compute_s=least_s,
            iteration_s=least_s,
            bubble_s=none,
            bounded=np.zeros(len(pool), dtype=np.bool_),
            pending=np.ones(len(pool), dtype=np.bool_),
            # Passes may run beside each other once stages are cut.
            least_cut_s=merged_s if problem.framework.step.expert_overlap else least_cut_s,
            bare_s=bare_s,
            least_merged_s=merged_s,
            moved_s=moved_s,
            pools=((0, pool),),
        )
        found.append(columns if bounds else columns.replayed(np.arange(len(pool))))
    return _joined(found)


# Ranks.


def _refined(columns: Columns, shapes: Shapes, problem: Problem, *, count: int, variants: bool) -> Columns:
    """Columns with exact steps at the first `count` ranks, and for the shortest step of all.

    Rows whose least step is above that at the last of these ranks stay pending. First those are priced that have the
    least of their grids, to know it.
    """
    groups = None if variants else columns.places(shapes)
    for last in (False, False, True) if columns.pending.any() else ():
        limits_s = np.array(list(_limits_s(columns, shapes, problem, count=count).values()))
        near = columns.pending & (columns.iteration_s <= limits_s[columns.precision])
        if groups is not None:
            # What is above an exact step of its grid is not the best of it.
            exact_s = np.full(int(groups.max(initial=-1)) + 1, np.inf)
            known = np.flatnonzero(~columns.pending & ~columns.bounded)
            np.minimum.at(exact_s, groups[known], columns.iteration_s[known])
            near &= columns.iteration_s <= exact_s[groups]
        rows = np.flatnonzero(near)
        if len(rows) > _FEW and not last:
            # The most promising first: the limits come down by them, and where a grid has several, theirs.
            best = rows[np.argsort(columns.iteration_s[rows], kind="stable")]
            best = best[np.sort(distinct(columns.places(shapes)[best])[1])]
            formats = [best[columns.precision[best] == number][:_FIRST] for number in range(len(limits_s))]
            most = count if len(rows) > 3 * len(best) else 4 * count
            rows = distinct(np.concatenate([best[:most], *formats]))[0]
        if len(rows):
            columns = _refined_rows(columns.replayed(rows), groups, problem, count=count)
    return _refined_rows(columns, groups, problem, count=count)


def _refined_rows(columns: Columns, groups: Integers | None, problem: Problem, *, count: int) -> Columns:
    """The same of rows that are priced; groups: of rows that share a place, None where each has its own.

    Bounds are never above the exact value, so a candidate whose exact value is the lowest of all that are left is the
    next place; candidates whose bound is above it need no exact value. Ties go to the shorter step.
    """
    known = np.flatnonzero(~columns.pending)
    columns = _refined_by(columns, groups, rank_by=problem.rank_by, count=count, among=known)
    for number in range(len(problem.formats)):
        # The best of each number format is shown, whatever its place.
        mine = known[columns.precision[known] == number]
        columns = _refined_by(columns, groups, rank_by=problem.rank_by, count=1, among=mine)
    if problem.rank_by == "iteration":
        return columns
    return _refined_by(columns, None, rank_by="iteration", count=1, among=known)


def _refined_by(columns: Columns, groups: Integers | None, *, rank_by: RankBy, count: int, among: Integers) -> Columns:
    """The same for one measure; among: rows."""
    iteration, compute, bubble = columns.iteration_s.copy(), columns.compute_s.copy(), columns.bubble_s.copy()
    metric, bounded = ranking_metric(columns, rank_by=rank_by), columns.bounded.copy()
    known_of = (~bounded)[among].tolist()
    queue = list(zip(metric[among].tolist(), iteration[among].tolist(), among.tolist(), known_of, strict=True))
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
    pending = columns.pending & (columns.least_cut_s <= np.maximum(last_s, shortest_s)[columns.precision])
    found[columns.shape[pending]] = True
    for rows, group in columns.groups:
        step_s, exposed = group.floor_s()
        step_s = columns.least_cut_s[rows] if problem.framework.step.expert_overlap else step_s
        least = {"iteration": step_s, "exposed": exposed, "communication": columns.communication_s[rows]}
        kept = (least[problem.rank_by] <= last_s) | (step_s <= shortest_s[columns.precision[rows]])
        found[columns.shape[rows[kept]]] = True
    return found


def _last_place_s(
    columns: Columns, shapes: Shapes, problem: Problem, *, count: int, places: Integers | None = None
) -> float:
    """What the last of the first `count` grids, or places, is ranked by, s; infinite where there are fewer."""
    places = shapes.grid[columns.shape] if places is None else places
    best, metric = np.full(int(places.max(initial=-1)) + 1, np.inf), ranking_metric(columns, rank_by=problem.rank_by)
    np.minimum.at(best, places, np.where(columns.pending, np.inf, metric))
    return float(np.sort(best)[count - 1]) if 0 < count <= len(best) else np.inf


def _limits_s(
    columns: Columns,
    shapes: Shapes,
    problem: Problem,
    *,
    count: int,
    reached_s: Mapping[Precision | None, float] | None = None,
) -> dict[Precision | None, float]:
    """Longest steps that can still be among the first grids, or the best of their number format, by format, s."""
    last_s = _last_place_s(columns, shapes, problem, count=count, places=columns.places(shapes))
    known, reached_s = np.where(columns.pending, np.inf, columns.iteration_s), reached_s or {}
    return {
        name: max(last_s, float(known[columns.precision == number].min(initial=reached_s.get(name, np.inf))))
        for number, name in enumerate(problem.formats or (None,))
    }


def _near(
    columns: Columns, shapes: Shapes, problem: Problem, fittings: Mapping[Variant, Fitting], *, count: int
) -> dict[Precision | None, Integers]:
    """Shapes that may be among the first `count` grids, or be the fastest, with less recompute; and in other formats.

    Recompute repeats no more than the forward pass, and a backward pass takes no less, so without it a step and its
    communication are at least two thirds. In other formats those are tried, too, that do not fit in the first.
    """
    found = np.zeros((2, len(shapes)), dtype=np.bool_)
    found[1, np.setdiff1d(np.arange(len(shapes)), columns.shape)] = True
    # What can only have another exchange than the framework's own is not priced where it takes longer with more.
    found[0, np.setdiff1d(np.concatenate([one.rows for one in fittings.values()]), columns.shape)] = True
    for metric, limit_s in (
        (ranking_metric(columns, rank_by=problem.rank_by), _last_place_s(columns, shapes, problem, count=count)),
        (columns.iteration_s, float(columns.iteration_s.min(initial=np.inf))),
    ):
        least = np.full(len(shapes), np.inf)
        np.minimum.at(least, columns.shape, metric)
        for rows, share in zip(found, (2.0 / 3.0, LEAST_IN_A_FORMAT), strict=True):
            rows |= np.isfinite(least) & (share * least <= limit_s)
    # Cut into several chunks, they may be the fastest.
    shortest_s = columns.iteration_s.min(initial=np.inf)
    found[1, columns.shape[columns.pending & (columns.least_cut_s <= shortest_s)]] = True
    for own, group in columns.groups if problem.formats else ():
        least_cut_s = columns.least_cut_s[own] if problem.framework.step.expert_overlap else group.floor_s()[0]
        found[1, columns.shape[own[least_cut_s <= shortest_s]]] = True
    near, in_formats = map(np.flatnonzero, found)
    return {one: in_formats if number else near for number, one in enumerate(problem.formats or (None,))}


def _joined(parts: Sequence[Columns]) -> Columns:
    """Columns one after the other; without any, none."""
    if not parts:
        counts, none, no = np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0, dtype=np.bool_)
        return Columns(counts, counts, counts, none, none, none, none, no, no, none, none, none, none)
    every = [one.name for one in fields(Columns) if one.name not in ("groups", "pools")]
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in every}
    before = np.cumsum([0, *(len(part.shape) for part in parts)]).tolist()
    pairs = list(zip(parts, before, strict=False))
    return Columns(
        **joined,
        groups=tuple((start + rows, group) for part, start in pairs for rows, group in part.groups),
        pools=tuple((start + first, pool) for part, start in pairs for first, pool in part.pools),
    )


def _best_of_each(columns: Columns, shapes: Shapes, among: Integers, *, rank_by: RankBy) -> Integers:
    """Rows that reach the lowest value of their grid in their number format: several where there are ties."""
    metric, grid = ranking_metric(columns, rank_by=rank_by)[among], columns.places(shapes)[among]
    lowest = np.full(int(grid.max(initial=-1)) + 1, np.inf)
    np.minimum.at(lowest, grid, metric)
    return np.asarray(among[metric == lowest[grid]])


def _count_rejected(grids: Grids, shapes: Shapes, used: Integers) -> dict[str, int]:
    """Rejected grids by constraint, without zeros."""
    counts = {check.name: int(broken.sum()) for check, broken in zip(grids.constraints, grids.broken.T, strict=True)}
    shaped = len(distinct(shapes.grid)[0])
    asked = len(grids.sound_as_asked(shapes.problem))
    counts[MICRO_BATCH] = asked - shaped
    counts[MEMORY] = shaped - len(used)
    counts[PINNED] = len(grids.sound) - asked
    return {name: count for name, count in counts.items() if count}
