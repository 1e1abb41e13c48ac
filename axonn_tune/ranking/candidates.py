"""Candidates of a search as columns, until the first of them are rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from axonn_tune.cost.columns import Floats, Integers
from axonn_tune.cost.compute import exposed_s
from axonn_tune.cost.price import Detail, PricedLayout
from axonn_tune.grid import Grid
from axonn_tune.job import Layout
from axonn_tune.program.dimensions import executed_flops
from axonn_tune.program.operations import PLAIN
from axonn_tune.program.schedule import blocks_by_kind, kept_by_kind
from axonn_tune.program.step import StepProgram, as_runs, contents_of
from axonn_tune.ranking.space import Fitting, Grids, Placements, Problem, Shapes, Variant
from axonn_tune.request import RankBy

if TYPE_CHECKING:
    from axonn_tune.cost.pipeline import Pipelines
    from axonn_tune.ranking.pools import Pool


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


@dataclass(frozen=True)
class Candidates:
    """Priced candidates of a search; `rows` indexes the columns.

    number: of candidates after constraints. problems: the problem with each exchange of context parallelism that was
    compared. splits: layers of each part of the shapes whose stages are balanced by time. details: everything of rows,
    where it is known.
    """

    problem: Problem
    number: int
    grids: Grids
    shapes: Shapes
    placements: Placements
    fittings: dict[Variant, Fitting]
    columns: Columns
    rows: Integers
    programs: Mapping[Variant, StepProgram]
    problems: tuple[Problem, ...] = ()
    splits: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    details: Mapping[int, Detail] = field(default_factory=dict)

    @property
    def exact(self) -> Integers:
        """Rows that have exact steps."""
        return np.flatnonzero(~self.columns.pending & ~self.columns.bounded)

    @property
    def told(self) -> tuple[int, int, float]:
        """How far the search is, as it is told."""
        steps_s = self.columns.iteration_s[self.exact]
        return len(steps_s), len(self.columns.shape) - len(steps_s), float(steps_s.min(initial=np.inf))

    def layout(self, position: int) -> Layout:
        """The layout at a place, from 0."""
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

    def priced(self, row: int) -> PricedLayout:
        """A candidate as priced by the alpha-beta model, without rank."""
        shortest_s = float(self._shortest_steps_s[self._places[row]])
        if row in self.details:
            return replace(self.details[row], shortest_step_s=shortest_s)
        columns, shape, layout = self.columns, int(self.columns.shape[row]), self._layout(row)
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
            shortest_step_s=shortest_s,
        )

    @cached_property
    def _places(self) -> Integers:
        return self.columns.places(self.shapes)

    @cached_property
    def _shortest_steps_s(self) -> Floats:
        """Shortest step of all candidates of each grid in each number format, s."""
        shortest = np.full(int(self._places.max(initial=-1)) + 1, np.inf)
        np.minimum.at(shortest, self._places, self.columns.iteration_s)
        return shortest


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
