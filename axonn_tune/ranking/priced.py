"""Priced layouts: the candidates of a search as columns, best first; each row with its layout and prices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from axonn_tune.cost.columns import Floats, Integers
from axonn_tune.cost.compute import exposed_s
from axonn_tune.cost.price import Detail, PricedLayout, Term, price
from axonn_tune.cost.uncertainty import DEVIATIONS, difference_spread, own_bound_s, own_half_s, with_software
from axonn_tune.errors import NothingFeasibleError, UsageError
from axonn_tune.grid import ALL_AXES, Grid
from axonn_tune.job import Layout
from axonn_tune.program.dimensions import MEMORY, MICRO_BATCH, PINNED, executed_flops
from axonn_tune.program.operations import PLAIN
from axonn_tune.program.schedule import blocks_by_kind, kept_by_kind
from axonn_tune.program.step import StepProgram, as_runs, contents_of
from axonn_tune.ranking.space import Fitting, Grids, Placements, Problem, Shapes, Variant
from axonn_tune.request import ALPHA_BETA, Precision, RankBy
from axonn_tune.units import GIB, counted

if TYPE_CHECKING:
    from axonn_tune.cost.pipeline import Pipelines
    from axonn_tune.ranking.pools import Pool

WORTH_SAYING = 0.01
"""Share of a step that another layout must save to be named."""

_SETTLED = 256
"""Rows that are priced with the first one that is asked for beyond those that are exact."""

Sizes: TypeAlias = tuple[int, ...]
"""Axis sizes in the order of the axes that were searched."""


@dataclass(frozen=True)
class SearchCounts:
    """Numbers of grids before constraints, of candidates after them, and of priced candidates that fit.

    `rejected` counts grids by constraint; a grid can violate several.
    """

    grids: int
    candidates: int
    feasible: int
    rejected: dict[str, int]
    seconds: float


@dataclass(frozen=True)
class Rejected:
    """A grid that is not ranked, with the reasons.

    needed_bytes: least memory of its candidates if memory is the reason. priced: its best candidate, where it lacks no
    more than a bandwidth in the paper's table. order, communication_s, terms: by a cost model of the paper.
    """

    sizes: dict[str, int]
    reasons: tuple[tuple[str, str], ...]
    needed_bytes: float | None = None
    priced: PricedLayout | None = None
    order: tuple[str, ...] | None = None
    communication_s: float | None = None
    terms: tuple[Term, ...] = ()

    @property
    def memory_bytes(self) -> float | None:
        """Least memory of its candidates, where it is known."""
        return self.needed_bytes if self.priced is None else self.priced.memory_bytes


@dataclass(frozen=True)
class Columns:
    """Priced candidates of all kinds of recompute: indices and seconds, one row each.

    bounded: steps that are bounds until they are refined. pending: only their least steps are known, s, which are also
    their computation. least_cut_s: least step if cut into several chunks; bare_s: without exchanges of context
    parallelism; least_merged_s: with expert overlap; moved_s: with layers moved until stages take as long as their
    mean, which is no bound. groups: with pipeline stages, each with its rows; pools: what prices rows, each with its
    first one. exchange: of context parallelism, by their number in the search; precision: of the number formats
    compared.
    """

    shape: Integers
    placement: Integers
    recompute: Integers
    communication_s: Floats
    compute_s: Floats
    iteration_s: Floats
    bubble_s: Floats
    bounded: NDArray[np.bool_]
    pending: NDArray[np.bool_]
    least_cut_s: Floats
    bare_s: Floats
    least_merged_s: Floats
    moved_s: Floats
    groups: tuple[tuple[Integers, Pipelines], ...] = ()
    pools: tuple[tuple[int, Pool], ...] = ()
    exchange: Integers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    precision: Integers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def numbered(self, **numbers: int) -> Columns:
        """The same with these columns of one number each."""
        columns: dict[str, Any] = {name: np.full(len(self.shape), number) for name, number in numbers.items()}
        return replace(self, **columns)

    def places(self, shapes: Shapes) -> Integers:
        """What a row is the best of: its grid, in its number format."""
        return shapes.grid[self.shape] + (int(shapes.grid.max(initial=-1)) + 1) * self.precision

    def replayed(self, rows: Integers) -> Columns:
        """The same with prices of some more rows."""
        rows, groups = np.sort(rows[self.pending[rows]]), list(self.groups)
        if not len(rows):
            return self
        names = ("communication_s", "compute_s", "iteration_s", "bubble_s")
        found: dict[str, Any] = {name: getattr(self, name).copy() for name in (*names, "bounded", "pending")}
        found["pending"][rows] = False
        for start, pool in self.pools:
            first, end = np.searchsorted(rows, (start, start + len(pool))).tolist()
            for one in pool.priced(rows[first:end] - start) if end > first else ():
                places = start + one.places
                for name in names:
                    found[name][places] = getattr(one, name)
                found["bounded"][places] = one.group is not None
                if one.group is not None:
                    groups.append((places, one.group))
        return replace(self, **found, groups=tuple(groups))

    @cached_property
    def _of_groups(self) -> dict[int, tuple[Pipelines, int]]:
        """Group and place in it of each row that has one."""
        return {row: (group, place) for rows, group in self.groups for place, row in enumerate(rows.tolist())}

    def exact_s(self, row: int) -> tuple[float, float, float]:
        """Step of one candidate that is not pending, with pipeline stages by the exact recurrence; its computation and
        bubble, s."""
        assert not self.pending[row], "rows are priced before they are shown"
        if self.bounded[row]:
            group, place = self._of_groups[row]
            return group.exact_s(place)
        return float(self.iteration_s[row]), float(self.compute_s[row]), float(self.bubble_s[row])


@dataclass(frozen=True, repr=False)
class Priced:
    """Layouts of a job, priced and ranked; empty if nothing is feasible.

    `rows` indexes the columns, best first, each grid once (or every candidate). problems: the problem with each
    exchange of context parallelism that was compared. splits: layers of each part of the shapes whose stages are
    balanced by time. others: rank of each grid by other cost models. details: everything of rows, where it is known.
    """

    problem: Problem
    searched: SearchCounts
    grids: Grids
    shapes: Shapes
    placements: Placements
    fittings: dict[Variant, Fitting]
    columns: Columns
    rows: Integers
    programs: Mapping[Variant, StepProgram]
    problems: tuple[Problem, ...] = ()
    cost: str = ALPHA_BETA
    splits: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    others: Mapping[str, Mapping[Sizes, int]] = field(default_factory=dict)
    details: dict[int, Detail] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        """How many rows of what."""
        return f"<{type(self).__name__}: {counted(len(self), 'row')} of {self.problem!r}>"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> PricedLayout:
        """The layout at a place of the ranking, from 0, with its prices."""
        row = int(self.rows[position])
        return replace(self._priced(row), rank=position + 1, tie=position < self.ties)

    def detail(self, position: int) -> Detail:
        """Everything that the alpha-beta model predicts of the layout at a place of the ranking, from 0."""
        row = int(self.rows[position])
        return replace(
            self._detailed(row),
            rank=position + 1,
            tie=position < self.ties,
            shortest_step_s=float(self._shortest_steps_s[self._places[row]]),
        )

    def with_terms(self, position: int) -> PricedLayout:
        """The layout at a place of the ranking, with every collective by the ranking's cost model."""
        detail = self._detailed(int(self.rows[position]))
        return replace(self[position], terms=detail.terms, stages=detail.stages)

    def _detailed(self, row: int) -> Detail:
        if row not in self.details:
            self.details[row] = price(self.problem_of(row), self._layout(row))
        return self.details[row]

    def layout(self, position: int) -> Layout:
        """The layout at a place of the ranking, from 0."""
        return self._layout(int(self.rows[position]))

    def _layout(self, row: int) -> Layout:
        columns, shape = self.columns, int(self.columns.shape[row])
        sizes = self.grids.sizes[self._grid_of(row)].tolist()
        order = self.placements.orders[self.placements.order[columns.placement[row]]]
        fitting = self.fittings[kind := self._variant(row)]
        return Layout(
            Grid(**dict(zip(self.grids.axes, sizes, strict=True)), order=order),
            int(self.shapes.micro_batch[shape]),
            kind.recompute,
            int(fitting.kept_layers[shape]),
            int(self.shapes.chunks[shape]),
            self.splits.get(shape, self.problem.parts),
            int(fitting.repeated[shape]) or None,
            mtp_part=self.problem.mtp_part,
        )

    def _variant(self, row: int) -> Variant:
        return list(self.fittings)[int(self.columns.recompute[row])]

    def problem_of(self, row: int) -> Problem:
        """The problem with the exchange and in the number format of a candidate."""
        found = self.problems[self.columns.exchange[row]] if self.problems else self.problem
        return found.within(self._variant(row).precision) if found.formats else found

    def _grid_of(self, row: int) -> int:
        return int(self.shapes.grid[self.columns.shape[row]])

    def _priced(self, row: int) -> PricedLayout:
        """A candidate as priced by the alpha-beta model, without rank."""
        columns, shape, layout = self._settled(row), int(self.columns.shape[row]), self._layout(row)
        step_s, compute_s, bubble_s = columns.exact_s(row)
        kind, model = self._variant(row), self.problem.model
        kept, every = self.fittings[kind].kept_layers[shape], self.shapes.values.items()
        values = {name: value[shape] if isinstance(value, np.ndarray) else value for name, value in every}
        values |= {"kept": kept, "unkept": float(model.layers) - kept}
        if len(self.programs[kind].blocks) > 1:
            parts: tuple[int, ...] = (model.layers,)
            if layout.pipeline > 1:
                from axonn_tune.cost.pipeline import parts_of

                parts = parts_of(self.problem, layout.pipeline, layout.chunks, layout.parts)
            chunks = [(as_runs(one), 1.0) for one in contents_of(model, parts, layout.mtp_part)]
            values["repeated"] = float(layout.recompute_layers or 0)
            again = values["repeated"]
            values |= blocks_by_kind(self.programs[kind], chunks, repeated=again, arithmetic=PLAIN)
            values |= kept_by_kind(self.programs[kind], chunks, values, kept, arithmetic=PLAIN)
        return PricedLayout(
            **vars(layout),
            job=self.problem_of(row),
            communication_s=float(columns.communication_s[row]),
            compute_s=compute_s,
            iteration_s=step_s,
            bubble_s=bubble_s,
            memory_bytes=float(self.fittings[kind].total_bytes[shape]),
            executed_flops=float(executed_flops(self.programs[kind], values) / self.shapes.stages[shape]),
            shortest_step_s=float(self._shortest_steps_s[self._places[row]]),
        )

    def _settled(self, row: int) -> Columns:
        """Columns in which a row is priced, with those that follow it in the ranking."""
        if self._later[-1].pending[row]:
            place = int(np.flatnonzero(np.append(self.rows, row) == row)[0])
            self._later.append(self._later[-1].replayed(np.append(self.rows, row)[place : place + _SETTLED]))
        return self._later[-1]

    @cached_property
    def _later(self) -> list[Columns]:
        """The columns, and those with prices of more rows."""
        return [self.columns]

    @cached_property
    def _places(self) -> Integers:
        return self.columns.places(self.shapes)

    @cached_property
    def _shortest_steps_s(self) -> Floats:
        """Shortest step of all candidates of each grid in each number format, s."""
        shortest = np.full(int(self._places.max(initial=-1)) + 1, np.inf)
        np.minimum.at(shortest, self._places, self.columns.iteration_s)
        return shortest

    @property
    def best_by_format(self) -> dict[Precision, int]:
        """Place of the first row of each number format that is compared and fits, in their order."""
        formats = self.columns.precision[self.rows].tolist()
        return {name: formats.index(at) for at, name in enumerate(self.problem.formats) if at in formats}

    @cached_property
    def ties(self) -> int:
        """Number of rows from the first on that are within model error of it, also by their steps.

        With a learned profile: rows whose difference from the first is within its 80% interval.
        """
        if not len(self):
            return 0
        alike = self._alike if self.problem.machine.learned is None else self._alike_as_learned
        return min(alike(by) for by in {"iteration", self.problem.rank_by})

    def _alike(self, rank_by: RankBy) -> int:
        """Rows from the first on within model error of it in one metric, by the half-widths of the profile.

        Errors of computation are common to all grids, apart from the residual of each layout.
        """
        metric = ranking_metric(self.columns, rank_by=rank_by)[self.rows]
        if rank_by != "iteration":
            return count_ties(metric, metric * self.problem.machine.uncertainty.communication)
        waiting_s = exposed_s(metric, self.columns.compute_s[self.rows])
        return count_ties(metric, np.asarray(own_half_s(self.problem, step_s=metric, waiting_s=waiting_s)))

    def _alike_as_learned(self, rank_by: RankBy) -> int:
        """The same by what the profile has learned."""
        metric, apart = ranking_metric(self.columns, rank_by=rank_by)[self.rows], self._apart(rank_by)
        for position in range(1, len(self)):
            if float(np.log(metric[position] / max(metric[0], 1e-9))) > apart(position):
                return position
        return len(self)

    def _apart(self, rank_by: RankBy) -> Callable[[int], float]:
        """Half-width of the 80% interval of the ratio of a row to the first, by what the profile has learned."""
        learned = with_software(self.problem.machine, self.problem.framework).learned
        assert learned is not None, "asked before"
        first = self._priced(int(self.rows[0])).slopes(rank_by)

        def half_width(position: int) -> float:
            other = self._priced(int(self.rows[position])).slopes(rank_by)
            return DEVIATIONS * difference_spread(other, first, learned)

        return half_width

    def families(self, top: int) -> list[list[int]]:
        """Places of the first `top` rows (0: all), each row with the later ones that differ from it in little.

        Such rows only exchange context, micro-batch and replicas, so that every rank has as many tokens a micro-batch
        and the same shards of weights; their steps are within model error. Only a ranking by steps has any.
        """
        found: list[list[int]] = []
        folds = self.problem.rank_by == "iteration" and self.cost == ALPHA_BETA and not self.problem.request.variants
        alike = dict[tuple[object, ...], list[list[int]]]()
        for place in range(min(top or len(self), len(self))):
            same = alike.setdefault(self._family(place), []) if folds else []
            mine = next((one for one in same if self._tied(one[0], place)), None)
            if mine is None:
                found.append([place])
                same.append(found[-1])
            else:
                mine.append(place)
        return [*found, *([place] for place in self._best_below(top))]

    def _best_below(self, top: int) -> list[int]:
        """Places of the first rows of number formats that are below the first `top` (0: none)."""
        return [place for place in sorted(self.best_by_format.values()) if 0 < top <= place]

    def _family(self, place: int) -> tuple[object, ...]:
        """What rows have in common that only exchange context, micro-batch and replicas."""
        layout = self.layout(place)
        grid, shards = layout.grid, layout.grid.z
        if self.problem.framework.step.context_shards:
            shards *= grid.context
        order = tuple(axis for axis in grid.order if axis in ("x", "y") and grid.axis_size(axis) > 1)
        tokens = layout.micro_batch / grid.context
        precision = self._variant(int(self.rows[place])).precision
        stages, experts = (grid.pipeline, layout.chunks, layout.parts), (grid.expert, grid.expert_tensor)
        sizes = (precision, grid.x, grid.y, shards, *experts, *stages, layout.kept_layers, tokens)
        return (*sizes, layout.recompute, order, self.problem_of(int(self.rows[place])).framework.step.expert_overlap)

    def _tied(self, first: int, other: int) -> bool:
        """Whether the steps of two rows are within model error of each other."""
        rows, job = (self[first], self[other]), self.problem
        halves = [own_bound_s(job, step_s=one.iteration_s, waiting_s=one.exposed_communication_s) for one in rows]
        return abs(rows[1].iteration_s - rows[0].iteration_s) <= math.hypot(*halves)

    @property
    def difference(self) -> float | None:
        """Half-width of the 80% interval of the ratio of the first two, with a learned profile; else None."""
        if self.problem.machine.learned is None or len(self) < 2:
            return None
        return self._apart(self.problem.rank_by)(1)

    def fastest(self) -> PricedLayout | None:
        """The candidate of the shortest step, of all that are feasible, not only the best of each grid."""
        steps_s = self.columns.iteration_s
        rows = np.flatnonzero(steps_s == steps_s.min(initial=np.inf))
        if not len(rows):
            return None
        ranked = order_of(self.columns, rows, self.shapes, self.placements, rank_by="iteration", fittings=self.fittings)
        return self._priced(int(ranked[0]))

    def fastest_elsewhere(self) -> PricedLayout | None:
        """The candidate with the shortest step of all, where another criterion's first has a notably longer one."""
        if self.problem.rank_by == "iteration" or not len(self):
            return None
        best = self.fastest()
        return best if best and best.iteration_s <= (1.0 - WORTH_SAYING) * self[0].iteration_s else None

    def ranks(self) -> dict[Sizes, int]:
        """Best rank of each grid."""
        found: dict[Sizes, int] = {}
        for position, row in enumerate(self.grids.sizes[self.shapes.grid[self.columns.shape[self.rows]]].tolist()):
            found.setdefault(tuple(row), position + 1)
        return found

    def listed(self, *, top: int, terms: bool = False, rejected: bool = False) -> tuple[PricedLayout | Rejected, ...]:
        """The first `top` rows (0: all), with every collective if asked for; then the rejected grids if asked for."""
        row_at = self.with_terms if terms else self.__getitem__
        rows = map(row_at, (*range(min(top or len(self), len(self))), *self._best_below(top)))
        return (*rows, *(self.rejected() if rejected else ()))

    def require_row(self, pick: int) -> None:
        """UsageError if `pick` is not a rank of a non-empty ranking."""
        if pick < 1:
            raise UsageError(f"--pick {pick}: places count from 1")
        if 0 < len(self) < pick:
            verb = "is" if len(self) == 1 else "are"
            raise UsageError(f"--pick {pick}: only {counted(len(self), 'configuration')} {verb} ranked")

    def require_any(self) -> None:
        """NothingFeasibleError, with binding constraint and nearest change, if the ranking is empty."""
        if not len(self):
            raise NothingFeasibleError(self.nothing_feasible())

    def nothing_feasible(self) -> str:
        """Reason of an empty ranking, and the nearest change."""
        from axonn_tune.ranking.nearest import nearest_change

        found, only = self.searched, self.searched.grids == 1
        if found.feasible:
            rejecting = ", ".join(found.rejected)
            none = "the only grid has no price" if only else f"none of {found.grids:,} grids has a price"
            return f"{none} ({rejecting}); nearest change: --cost {ALPHA_BETA}"
        none = "the only grid cannot train this" if only else f"none of {found.grids:,} grids can train this"
        return f"{none}: {nearest_change(self.problem)}"

    def rejected(self) -> tuple[Rejected, ...]:
        """Every grid that is not ranked, with its reasons, in the order of the grids."""
        ranked = set(self.shapes.grid[self.columns.shape[self.rows]].tolist())
        asked = set(self.grids.sound_as_asked(self.problem).tolist())
        shaped, least_bytes = set(self.shapes.grid.tolist()), np.full(len(self.grids.sizes), np.inf)
        for fitting in self.fittings.values():
            np.minimum.at(least_bytes, self.shapes.grid, fitting.total_bytes)
        limit_bytes, found = next(iter(self.fittings.values())).limit_bytes, list[Rejected]()
        for number, row in enumerate(self.grids.sizes.tolist()):
            if number in ranked:
                continue
            sizes = dict(zip(self.grids.axes, row, strict=True))
            reasons, needed = self._reasons(number, sizes, shaped=shaped, asked=asked), None
            if not reasons:
                needed = float(least_bytes[number])
                reasons = ((MEMORY, f"needs {needed / GIB:.1f} GiB of {limit_bytes / GIB:.1f} GiB"),)
            found.append(Rejected(sizes, reasons, needed))
        return tuple(found)

    def _reasons(
        self, number: int, sizes: dict[str, int], *, shaped: set[int], asked: set[int]
    ) -> tuple[tuple[str, str], ...]:
        """All but memory."""
        framework, pins = self.problem.framework, self.problem.request.axes
        broken = tuple(
            (check.name, check.explain(dict.fromkeys(ALL_AXES, 1) | sizes, framework))
            for check, is_broken in zip(self.grids.constraints, self.grids.broken[number], strict=True)
            if is_broken
        )
        if broken:
            return broken
        other = [axis for axis, size in sizes.items() if pins.get(axis, size) != size]
        if other:
            others = [f"{framework.called(axis)} = {pins[axis]}, not {sizes[axis]}" for axis in other]
            return ((PINNED, f"asked for {', '.join(others)}"),)
        if number not in asked:
            stages = f"{framework.called('pipeline')} = {sizes['pipeline']}"
            return ((PINNED, f"the parts of the pipeline layout are none of {stages}"),)
        if number not in shaped:
            return ((MICRO_BATCH, "no micro-batch that is allowed divides this grid's share of the batch"),)
        return ()


def ranking_metric(columns: Columns, *, rank_by: RankBy) -> Floats:
    """The column a ranking sorts by, s."""
    if rank_by == "communication":
        return columns.communication_s
    if rank_by == "iteration":
        return columns.iteration_s
    return np.asarray(exposed_s(columns.iteration_s - columns.bubble_s, columns.compute_s))


def order_of(
    columns: Columns,
    rows: Integers,
    shapes: Shapes,
    placements: Placements,
    *,
    rank_by: RankBy,
    fittings: dict[Variant, Fitting],
) -> Integers:
    """Rows from best to worst. Ties: shorter step, less memory, then grid, order, micro-batch, recompute."""
    shape, recompute = columns.shape[rows], columns.recompute[rows]
    memory = np.empty(len(rows))
    for number, fitting in enumerate(fittings.values()):
        mine = recompute == number
        memory[mine] = fitting.total_bytes[shape[mine]]
    keys = (
        recompute,
        shapes.micro_batch[shape],
        placements.order[columns.placement[rows]],
        shapes.grid[shape],
        memory,
        columns.iteration_s[rows],
        ranking_metric(columns, rank_by=rank_by)[rows],
    )
    return rows[np.lexsort(keys)]


def count_ties(metric: Floats, half: Floats) -> int:
    """Entries from the first on whose difference from the first lies within its 80% interval."""
    apart = metric - metric[0] > np.hypot(half, half[0])
    return int(np.argmax(apart)) if apart.any() else len(metric)
