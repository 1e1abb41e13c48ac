"""The search: one best-first loop over lower bounds.

A pair is a grid with a micro-batch. It has a bound over all numbers of chunks, recompute sets and splits of the layers.
The most promising pairs are opened first: their candidates are listed and checked for memory; those without pipeline
stages are priced in columns, the others bounded over all splits. What is popped goes one level on: to the bound of each
of its splits, to the schedule of one, to its price. A candidate is left out only where its bound is above the last grid
that is listed and above the best of its number format, so that none of these can be missed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from axonn_tune.cost.columns import distinct
from axonn_tune.cost.compute import exposed_s
from axonn_tune.cost.price import PricedLayout, Prices, detail_of, prices_of
from axonn_tune.cost.pricer import Pricer
from axonn_tune.frameworks import step_on
from axonn_tune.grid import Grid
from axonn_tune.job import Layout
from axonn_tune.program.dimensions import executed_flops
from axonn_tune.program.operations import PLAIN, Floats, Integers
from axonn_tune.program.step import as_runs, counted_blocks
from axonn_tune.ranking.fit import Fitting, fit_all, fits_at_all
from axonn_tune.ranking.placements import Placements, count_orders
from axonn_tune.ranking.pools import Pool
from axonn_tune.ranking.priced import Tell
from axonn_tune.ranking.programs import Exchange, by_alignment, pooled
from axonn_tune.ranking.shapes import Shapes, as_asked, pair_keys, pairs_of, with_all_chunks
from axonn_tune.ranking.space import Grids, Problem, Variant
from axonn_tune.vocabulary import PipelineOrder, Precision

if TYPE_CHECKING:
    from axonn_tune.ranking.unsplit import Unsplit

_FIRST = 256
"""Pairs that are opened first, to know a limit; the next ones are four times as many."""

_PROBED = 256
"""Candidates whose splits are bounded early, after each batch of pairs, to price the most promising ones."""
_MOST = 128
"""Candidates whose splits are bounded at once, at most: after these the limit may be lower."""
_ANY, _SPLIT, _WHOLE = range(3)
"""Levels of bounds: of all splits, of one by chains of its schedule, of its whole schedule."""


Mode: TypeAlias = tuple[bool, PipelineOrder]
"""As of `Exchange`."""


class Batch(NamedTuple):
    """Candidates of one pool: their problem, recompute set and memory, and their shapes and placements by numbers."""

    problem: Problem
    kind: Variant
    shapes: Shapes
    fitting: Fitting
    pool: Pool
    shape: Integers
    placement: Integers


class Rows(NamedTuple):
    """Priced candidates of a batch, as columns: their places in it and seconds; pricer: of the only one, where that
    was priced by itself."""

    batch: Batch
    places: Integers
    communication_s: Floats
    compute_s: Floats
    iteration_s: Floats
    bubble_s: Floats
    memory_bytes: Floats
    pricer: Pricer | None = None


class Split(NamedTuple):
    """A candidate with one split of its layers, the framework's own if it has none; level: what its bound is of."""

    batch: Batch
    row: int
    parts: tuple[int, ...] | None
    level: int


class Paired(NamedTuple):
    """Candidates of all pairs: which one each is of, their places in the order of pairs, and what bounds them."""

    pair: Integers
    order: Integers
    unsplit: Unsplit


@dataclass
class Loop:
    """A search for the first `top` places: grids in each number format, or with `variants` candidates.

    found: what is priced; counts: how much of what was done; tell: is told after each batch of pairs how many are
    decided, how many are left, and the best value so far, s.
    """

    problem: Problem
    grids: Grids
    shapes: Shapes
    placements: Placements
    exchanges: list[Exchange]
    top: int
    variants: bool = False
    tell: Tell | None = None
    found: list[Rows] = field(default_factory=list)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("opened", "tried", "fit", "bounded", "split", "scheduled", "priced"), 0)
    )

    def __post_init__(self) -> None:
        self._heap: list[tuple[float, int, Split]] = []
        self._best = np.full(len(self.grids.sizes) * max(len(self.problem.formats), 1), np.inf)
        self._each: list[float] = []
        self._own: dict[tuple[int, int], float] = {}
        self._paired: dict[Precision | None, dict[Mode, Paired]] = {}
        self._pushed = 0
        self._known: float | None = None

    def run(self) -> None:
        """Search until nothing that is left may be listed; what was found so far stays, if it is interrupted."""
        bounds = self._pair_bounds()
        order, at, size = np.argsort(bounds, axis=None, kind="stable"), 0, _FIRST
        values = bounds.ravel()[order]
        order, values = order[np.isfinite(values)], values[np.isfinite(values)]
        formats = self.problem.formats or (None,)
        while at < len(order):
            several = order[at : at + (len(order) if self._opens_all else size)]
            formats_of, pairs = np.divmod(several, bounds.shape[1])
            if values[at] > max(self._limit(name) for name in formats):
                break
            for number, name in enumerate(formats):
                mine = pairs[formats_of == number]
                mine = mine[bounds[number, mine] <= self._limit(name)]
                if len(mine):
                    chosen = np.zeros(len(self._pairs[0]), dtype=np.bool_)
                    chosen[mine] = True
                    self._open(np.flatnonzero(chosen[self._pairs[1]]), name)
            at, size = at + len(several), size * 4
            self._probe()
            self._settle(values[at] if at < len(order) else np.inf)
            if self.tell is not None:
                self.tell(at, len(order) - at, float(self._best.min(initial=np.inf)))
        self._settle(np.inf)

    @property
    def _opens_all(self) -> bool:
        """Whether pairs have no bounds: candidates are ranked by something else than the step, or all are counted."""
        return self.problem.rank_by != "iteration" or self.variants

    # Pairs.

    @cached_property
    def _pairs(self) -> tuple[Integers, Integers]:
        return pairs_of(self.shapes)

    def _pair_bounds(self) -> Floats:
        """Least step of each pair in each number format, s, `[formats, pairs]`; 0 where steps are not ranked."""
        ones, _ = self._pairs
        formats = self.problem.formats or (None,)
        if self._opens_all or len(ones) <= _FIRST:
            return np.zeros((len(formats), len(ones)))
        found = np.full((len(formats), len(ones)), np.inf)
        for least, name in zip(found, formats, strict=True):
            for paired in self._paired_by(name).values():
                np.minimum.at(least, paired.pair, paired.unsplit.least_s())
        return found

    @cached_property
    def _modes(self) -> tuple[Mode, ...]:
        return tuple(dict.fromkeys(one.mode for one in self.exchanges))

    def _paired_by(self, precision: Precision | None) -> dict[Mode, Paired]:
        """All pairs in a number format without recompute, whether they fit or not, by the modes of exchanges."""
        # Imported here: a ranking by communication bounds no pairs, and start-up time is its own.
        from axonn_tune.ranking.unsplit import Unsplit

        if precision not in self._paired:
            ones, _ = self._pairs
            shapes, none = self.shapes.taken(ones, chunks=np.ones(len(ones), dtype=np.int64)), np.zeros(len(ones))
            step = step_on(self.problem.framework, self.problem.machine, self.problem.workload.precision)
            kept = none + float(step.reshard == "fit")
            anything = Fitting(none, kept, none.astype(np.int64), np.arange(len(shapes)), np.inf)
            kind, found = Variant("none", precision=precision), dict[Mode, Paired]()
            for mode in self._modes:
                exchanges = [one for one in self.exchanges if one.mode == mode]
                own = replace(shapes, problem=exchanges[0].problem) if mode[1] != "1f1b" else shapes
                # Each pool goes when its bounds are known.
                batches = self._batches(own, kind, anything, exchanges, cut=True)
                if several := [(one.shape, one.pool.unsplit) for one in batches]:
                    pair = np.concatenate([shape for shape, _ in several])
                    unsplit = Unsplit.joined([one for _, one in several])
                    found[mode] = Paired(pair, np.argsort(pair, kind="stable"), unsplit)
            self._paired[precision] = found
        return self._paired[precision]

    def _least_s(self, shapes: Shapes, precision: Precision | None, mode: Mode) -> Floats:
        """Least step of each shape, of all recompute sets and splits of its layers, s."""
        found = np.full(len(shapes), np.inf)
        if (paired := self._paired_by(precision).get(mode)) is None:
            return found
        pairs = np.searchsorted(pair_keys(self.shapes)[self._pairs[0]], pair_keys(shapes))
        first, end = (np.searchsorted(paired.pair[paired.order], pairs, side) for side in ("left", "right"))
        which = np.repeat(np.arange(len(shapes)), end - first)
        ahead = np.cumsum(end - first) - (end - first)
        rows = paired.order[np.arange(len(which)) + (first - ahead)[which]]
        np.minimum.at(found, which, paired.unsplit.least_s(rows, shapes.chunks[which]))
        return found

    # Candidates.

    def _open(self, rows: Integers, precision: Precision | None) -> None:
        """List the candidates of some shapes in a number format, price those without stages, and bound the others."""
        self.counts["opened"] += len(rows)
        base = with_all_chunks(self.shapes.taken(rows))
        if len(base.piped):
            # What stages have is worked out once, for all that is taken of these.
            assert base.stage_rows
        for mode in self._modes:
            exchanges = [one for one in self.exchanges if one.mode == mode]
            shapes, programs, (merged, order) = base, exchanges[0].programs, mode
            if merged or order != self.problem.framework.step.pipeline_order:
                able = np.any([one.grids for one in exchanges if one.grids is not None], axis=0)[base.grid]
                problem = self.problem.with_expert_overlap if merged else exchanges[0].problem
                shapes = base.taken(np.flatnonzero(able))
                # Stages hold other micro-batches.
                shapes = replace(shapes, problem=problem) if merged else shapes.of(problem)
            shapes = shapes.taken(np.flatnonzero(as_asked(shapes)))
            limit_s = self._limit(precision)
            if np.isfinite(limit_s) and not self._opens_all:
                near = np.flatnonzero(self._least_s(shapes, precision, mode) <= limit_s)
                shapes = shapes.taken(near)
            kinds = [one for one in shapes.problem.variants if one.precision == precision]
            kinds = [one for one in kinds if not merged or programs[one].merges]
            if not len(shapes) or not kinds:
                continue
            self.counts["tried"] += len(kinds) * sum(
                count_orders(self.problem, self.grids, shapes.grid[one.of(shapes)]) for one in exchanges
            )
            shapes = shapes.taken(fits_at_all(shapes, [programs[one] for one in kinds if not one.some]))
            fittings = fit_all(shapes, {one: programs[one] for one in kinds}, every=self.variants)
            several = (self._batches(shapes, kind, fitting, exchanges) for kind, fitting in fittings.items())
            self._take(chain.from_iterable(several))

    def _batches(
        self, shapes: Shapes, kind: Variant, fitting: Fitting, exchanges: list[Exchange], *, cut: bool = False
    ) -> Iterator[Batch]:
        """Pools of the candidates of a recompute set that fit."""
        for exchange in exchanges:
            problem = exchange.problem.within(kind.precision)
            for program, part in by_alignment(shapes, kind, exchange.programs, exchange.taken(shapes, fitting)):
                given = exchange.programs, kind, program
                several = pooled(problem, shapes, self.placements, *given, part, cut=cut)
                for pool, shape, placement in several:
                    for slab, rows in pool.slabs():
                        yield Batch(problem, kind, shapes, part, slab, shape[rows], placement[rows])

    def _take(self, batches: Iterator[Batch]) -> None:
        """Price candidates without pipeline stages, and bound the others: over all splits, then of each split."""
        for batch in batches:
            pool, limit = batch.pool, self._limit(batch.kind.precision)
            self.counts["fit"] += len(pool)
            if not pool.several_stages:
                self._add(Rows(batch, np.arange(len(pool)), *pool.whole(), batch.fitting.total_bytes[batch.shape]))
                continue
            self.counts["bounded"] += len(pool)
            pool = pool.with_paces()
            if self.problem.rank_by == "exposed":
                least = np.zeros(len(pool))
            else:
                sent = self.problem.rank_by == "communication"
                unsplit, chunks = pool.unsplit, pool.chunks
                least = unsplit.least_sent_s(chunks) if sent else unsplit.least_s(np.arange(len(pool)), chunks)
            if not len(near := np.flatnonzero(least <= limit)):
                continue
            kept = batch._replace(pool=pool.among(near), shape=batch.shape[near], placement=batch.placement[near])
            steps = self.problem.rank_by == "iteration"
            level = _WHOLE if batch.problem.framework.step.splits_backward and not steps else _ANY
            for row, value in enumerate(least[near].tolist()):
                self._push(value, Split(kept, row, None, level))

    def _schedule(self, items: list[tuple[float, Split]]) -> None:
        """Bound the splits of some candidates."""
        # Imported here: most searches have no pipeline stages, and start-up time is theirs.
        from axonn_tune.ranking.splits import Staged, schedules_of

        self.counts["split"] += len(items)
        several = dict[tuple[int, PipelineOrder], dict[int, list[int]]]()
        for at, (_, one) in enumerate(items):
            alike = len(one.batch.pool.pricer.program.blocks), one.batch.problem.framework.step.pipeline_order
            several.setdefault(alike, {}).setdefault(id(one.batch), []).append(at)
        for (_, passes), of_batch in several.items():
            order = np.array([at for places in of_batch.values() for at in places])
            problem = items[order[0]][1].batch.problem
            pools = [items[places[0]][1].batch.pool for places in of_batch.values()]
            rows = [np.array([items[at][1].row for at in places]) for places in of_batch.values()]
            staged = Staged.joined([pool.staged(own) for pool, own in zip(pools, rows, strict=True)])
            least = np.array([items[at][0] for at in order.tolist()])
            steps = self.problem.rank_by == "iteration"
            # Where backward passes are split, the framework's own split of the layers is the only one.
            searched = self.problem.splits and not self.variants and passes == "1f1b"
            for scheduled in schedules_of(problem, staged, searched=searched):
                own = scheduled.rows
                values = np.maximum(least[own], scheduled.step_s) if steps else scheduled.exposed_s
                for at, value in zip(order[own].tolist(), values.tolist(), strict=True):
                    item = items[at][1]
                    if value <= self._most(item):
                        self._push(value, item._replace(parts=scheduled.parts, level=_SPLIT))

    def _push(self, bound_s: float, item: Split) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (bound_s, self._pushed, item))

    def _place(self, batch: Batch, rows: Integers | int) -> Any:  # noqa: ANN401 - a number or numbers
        """Grid in its number format."""
        number = 0 if batch.kind.precision is None else self.problem.formats.index(batch.kind.precision)
        return batch.shapes.grid[batch.shape[rows]] + len(self.grids.sizes) * number

    def _probe(self) -> None:
        """Price the most promising split that fits of some places, to know a limit early."""
        if self.variants or not self.top or self.problem.rank_by != "iteration":
            return
        firsts = dict[int, tuple[float, int, Split]]()
        for entry in heapq.nsmallest(_PROBED, self._heap):
            if entry[2].level == _ANY and len(firsts) < 2 * self.top:
                firsts.setdefault(int(self._place(entry[2].batch, entry[2].row)), entry)
        others = self._without(firsts.values())
        self._heap = []
        self._schedule([(bound_s, item) for bound_s, _, item in firsts.values()])
        each = dict[int, list[tuple[float, int, Split]]]()
        for entry in sorted(self._heap):
            each.setdefault(int(self._place(entry[2].batch, entry[2].row)), []).append(entry)
        fitting = (next(filter(lambda entry: self._fits(entry[2]), entries), None) for entries in each.values())
        priced = list(islice(filter(None, fitting), self.top))
        self._heap = [*self._without(priced), *others]
        heapq.heapify(self._heap)
        for bound_s, _, item in priced:
            if bound_s <= self._most(item):
                self._price(item)

    def _without(self, taken: Iterable[tuple[float, int, Split]]) -> list[tuple[float, int, Split]]:
        """What is in the queue but for some of it."""
        numbers = {number for _, number, _ in taken}
        return [entry for entry in self._heap if entry[1] not in numbers]

    def _settle(self, until_s: float) -> None:
        """Take candidates whose bounds are not above a limit to their prices."""
        size = 32
        while self._heap and self._heap[0][0] <= until_s:
            bound_s, _, item = heapq.heappop(self._heap)
            if bound_s > self._most(item):
                if bound_s > max(map(self._limit, self.problem.formats or (None,))):
                    self._heap.clear()
                continue
            if item.level != _ANY or self.problem.rank_by == "communication":
                self._decide(bound_s, item)
                continue
            items, others = [(bound_s, item)], []
            while self._heap and len(items) < size and self._heap[0][0] <= until_s:
                entry = heapq.heappop(self._heap)
                if entry[0] > self._most(entry[2]):
                    continue
                if entry[2].level == _ANY:
                    items.append((entry[0], entry[2]))
                else:
                    others.append(entry)
            for entry in others:
                heapq.heappush(self._heap, entry)
            self._schedule(items)
            size = min(2 * size, _MOST)

    def _most(self, item: Split) -> float:
        """What a candidate must not be above to be listed, s."""
        limit_s = self._limit(item.batch.kind.precision)
        return limit_s if self.variants else min(limit_s, float(self._best[self._place(item.batch, item.row)]))

    def _decide(self, bound_s: float, item: Split) -> None:
        """Take a split on to its whole schedule, where stages are interleaved, or to its price."""
        batch, row, parts, level = item
        splits = batch.problem.framework.step.splits_backward
        if (level == _SPLIT or splits) and not self._fits(item):
            return
        if level == _SPLIT and self.problem.rank_by == "iteration" and not splits:
            self.counts["scheduled"] += 1
            least_s = self._scheduled_s(batch, row, parts)
            self._push(max(bound_s, least_s), item._replace(level=_WHOLE))
            return
        self._price(item)

    def _fits(self, item: Split) -> bool:
        """Whether a candidate fits into memory with its split; with the framework's own it does."""
        batch, row, parts, _ = item
        layout, limit_bytes = self.layout(batch, row, parts), batch.fitting.limit_bytes
        known = parts is None and not batch.problem.framework.step.splits_backward
        return known or batch.pool.pricer_of(layout).fits(limit_bytes)

    def _scheduled_s(self, batch: Batch, row: int, parts: tuple[int, ...] | None) -> float:
        """Bound of a candidate with a split, or its own, by its whole schedule, s."""
        # Imported here: most searches have no pipeline stages, and start-up time is theirs.
        from axonn_tune.ranking.splits import scheduled_s

        replays = batch.pool.replays_of(row, self.layout(batch, row))
        return scheduled_s(batch.problem, batch.pool.staged(np.array([row])), parts, replays)

    def _price(self, item: Split) -> None:
        """Price a candidate with a split of its layers, which must be notably shorter than with the framework's own."""
        batch, row, parts, _ = item
        if parts is None:
            self._own_s(batch, row)
            return
        # Imported here: most searches have no pipeline stages, and start-up time is theirs.
        from axonn_tune.ranking.splits import WORTH

        pricer, prices = self._prices(batch, row, parts)
        if prices.iteration_s > self._most(item):
            return
        most_s = prices.iteration_s / (1.0 - WORTH)
        if most_s <= self._scheduled_s(batch, row, None) or most_s <= self._own_s(batch, row):
            self._add(self._row(batch, row, pricer, prices))

    def _own_s(self, batch: Batch, row: int) -> float:
        """Step of a candidate with its own split, s."""
        key = id(batch.pool), row
        if key not in self._own:
            pricer, prices = self._prices(batch, row, None)
            self._own[key] = prices.iteration_s
            self._add(self._row(batch, row, pricer, prices))
        return self._own[key]

    def _prices(self, batch: Batch, row: int, parts: tuple[int, ...] | None) -> tuple[Pricer, Prices]:
        """Those of a candidate with a split, and what knows the rest."""
        self.counts["priced"] += 1
        pricer = batch.pool.pricer_of(self.layout(batch, row, parts))
        return pricer, prices_of(pricer)

    def _row(self, batch: Batch, row: int, pricer: Pricer, prices: Prices) -> Rows:
        communication, compute, iteration, bubble, memory = (np.array([one]) for one in prices[:5])
        return Rows(batch, np.array([row]), communication, compute, iteration, bubble, memory, pricer)

    def layout(self, batch: Batch, row: int, parts: tuple[int, ...] | None = None) -> Layout:
        """The layout of a candidate."""
        shape, shapes, fitting = int(batch.shape[row]), batch.shapes, batch.fitting
        sizes = self.grids.sizes[shapes.grid[shape]].tolist()
        order = self.placements.orders[self.placements.order[batch.placement[row]]]
        return Layout(
            Grid(**dict(zip(self.grids.axes, sizes, strict=True)), order=order),
            int(shapes.micro_batch[shape]),
            batch.kind.recompute,
            int(fitting.kept_layers[shape]),
            int(shapes.chunks[shape]),
            parts or self.problem.parts,
            int(fitting.repeated[shape]) or None,
            mtp_part=self.problem.mtp_part,
        )

    # What is found.

    def _add(self, rows: Rows) -> None:
        """Priced candidates, by which limits come down."""
        self.found.append(rows)
        self._known = None
        metric = self.metric(rows)
        np.minimum.at(self._best, self._place(rows.batch, rows.places), metric)
        if self.variants:
            self._each += metric.tolist()

    def metric(self, rows: Rows) -> Floats:
        """What rows are ranked by, s."""
        if self.problem.rank_by == "communication":
            return rows.communication_s
        if self.problem.rank_by == "iteration":
            return rows.iteration_s
        return np.asarray(exposed_s(rows.iteration_s - rows.bubble_s, rows.compute_s))

    def _limit(self, precision: Precision | None) -> float:
        """What the last place that is listed is ranked by, or the best of a number format, s."""
        if precision is None:
            # The best of all is no later than the last one that is listed.
            return self._limit_of_all()
        number, count = self.problem.formats.index(precision), len(self.grids.sizes)
        return max(self._limit_of_all(), float(self._best[number * count : (number + 1) * count].min(initial=np.inf)))

    def _limit_of_all(self) -> float:
        if self._known is None:
            self._known = self._last_s()
        return self._known

    def _last_s(self) -> float:
        values = np.array(self._each) if self.variants else self._best
        if not self.top or self.top > len(values):
            return np.inf
        return float(np.partition(values, self.top - 1)[self.top - 1])

    # The rows.

    def rows(self) -> tuple[tuple[PricedLayout, ...], tuple[PricedLayout, ...], PricedLayout | None]:
        """The first places in order, the first of number formats that have none of these, and, of a ranking by
        something else, what has the shortest step of all that is priced."""
        if not self.found:
            return (), (), None
        metric, iteration, memory = (
            np.concatenate(each)
            for each in zip(*((self.metric(one), one.iteration_s, one.memory_bytes) for one in self.found), strict=True)
        )
        number = np.repeat(np.arange(len(self.found)), [len(one.places) for one in self.found])
        places = np.concatenate([one.places for one in self.found])
        where = np.concatenate([np.ravel(self._place(one.batch, one.places)) for one in self.found])
        keys = [self._order_keys(one) for one in self.found]
        ties = [np.concatenate([each[key] for each in keys]) for key in range(4)]
        ordered = np.lexsort((*ties[::-1], memory, iteration, metric))
        first = ordered if self.variants else ordered[np.sort(distinct(where[ordered])[1])]
        formats = where // len(self.grids.sizes)
        shown = first[: self.top or len(first)]
        best = first[np.sort(distinct(formats[first])[1])]
        below = best[~np.isin(formats[best], formats[shown])]
        shortest_s = np.full(len(self._best), np.inf)
        np.minimum.at(shortest_s, where, iteration)

        def layouts(rows: Integers) -> tuple[PricedLayout, ...]:
            chosen = zip(number[rows].tolist(), places[rows].tolist(), where[rows].tolist(), rows.tolist(), strict=True)
            return tuple(
                self._priced(self.found[of], int(row), at - int(np.searchsorted(number, of)), float(shortest_s[place]))
                for of, row, place, at in chosen
            )

        shortest = np.lexsort((*ties[::-1], memory, iteration))[:1]
        others = layouts(shortest) if self.problem.rank_by != "iteration" else ()
        return layouts(shown), layouts(below), next(iter(others), None)

    def _order_keys(self, rows: Rows) -> tuple[Integers, ...]:
        """What ties are ordered by: grid, rank order, micro-batch, recompute."""
        batch, shape = rows.batch, rows.batch.shape[rows.places]
        order = self.placements.order[batch.placement[rows.places]]
        return (
            batch.shapes.grid[shape],
            order,
            batch.shapes.micro_batch[shape],
            np.full(len(shape), self.problem.variants.index(batch.kind)),
        )

    def _priced(self, rows: Rows, row: int, at: int, shortest_s: float) -> PricedLayout:
        """A priced candidate, without rank."""
        if rows.pricer is not None:
            return replace(detail_of(rows.pricer), shortest_step_s=shortest_s)
        batch, model = rows.batch, self.problem.model
        shape, layout, program = int(batch.shape[row]), self.layout(batch, row), batch.pool.pricer.program
        kept, every = batch.fitting.kept_layers[shape], batch.shapes.values.items()
        values = {name: value[shape] if isinstance(value, np.ndarray) else value for name, value in every}
        again, chunks = float(layout.recompute_layers or 0), [(as_runs(model.runs), 1.0)]
        values = counted_blocks(program, values, chunks, repeated=again, kept=kept, arithmetic=PLAIN)
        return PricedLayout(
            **vars(layout),
            job=batch.problem,
            communication_s=float(rows.communication_s[at]),
            compute_s=float(rows.compute_s[at]),
            iteration_s=float(rows.iteration_s[at]),
            bubble_s=float(rows.bubble_s[at]),
            memory_bytes=float(rows.memory_bytes[at]),
            executed_flops=float(executed_flops(program, values)),
            shortest_step_s=shortest_s,
        )
