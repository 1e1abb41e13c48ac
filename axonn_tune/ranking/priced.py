"""Priced layouts: the rows of a ranking, best first, each with its layout and prices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from axonn_tune.cost.collectives import Term
from axonn_tune.cost.price import METRICS, Detail, PricedLayout
from axonn_tune.cost.uncertainty import DEVIATIONS, difference_spread, own_bound_s, own_half_s, with_software
from axonn_tune.errors import UsageError
from axonn_tune.grid import ALL_AXES
from axonn_tune.job import Layout
from axonn_tune.program.feasibility import CHUNKS, EXPERT_OVERLAP, MEMORY, MICRO_BATCH, PINNED
from axonn_tune.program.memory import memory_limit_bytes
from axonn_tune.program.operations import Floats
from axonn_tune.ranking.shapes import without_shape
from axonn_tune.ranking.space import Grids, Problem
from axonn_tune.request import ALPHA_BETA, RankBy
from axonn_tune.units import GIB, counted
from axonn_tune.vocabulary import Precision

WORTH_SAYING = 0.01
"""Share of a step that another layout must save to be named."""

Sizes: TypeAlias = tuple[int, ...]
"""Axis sizes in the order of the axes that were searched."""


@dataclass(frozen=True)
class SearchCounts:
    """Numbers of grids before constraints, of candidates after them, and of those that fit with some recompute.

    A candidate is a grid with a micro-batch and a rank order, which fits in some number of chunks. Of a ranking of
    candidates, which are listed one by one, they are counted with chunks, recompute sets and exchanges.
    `rejected` counts grids by constraint; a grid can violate several. unlisted: what is feasible beyond the rows of the
    ranking, grids, each in every number format that it fits in, or candidates where these are ranked.
    """

    grids: int
    candidates: int
    feasible: int
    rejected: dict[str, int]
    seconds: float
    unlisted: int = 0


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


Tell: TypeAlias = Callable[[int, int, float], None]
"""Is told how many candidates have their price, how many may have one yet, and the shortest step until now, s."""
TELL: ContextVar[Tell | None] = ContextVar("TELL", default=None)
"""Who is told of the searches of a command."""

Row: TypeAlias = PricedLayout | Rejected
"""A row of a ranking."""


@dataclass(frozen=True, repr=False)
class Priced:
    """The first layouts of a ranking, priced, best first, each grid once (or every candidate); empty if nothing is
    feasible. `ranked[0]` is the first of `rows`.

    first: rows as the search made them, in full where it knows more. below: the first of each number format that none
    of these has. shortest: the candidate with the shortest step of all that are feasible, where the ranking is by
    another criterion. feasible: of each grid of `grids` whether it is; least_bytes: least memory of its candidates,
    infinite without any. others: rank of each grid by other cost models. interrupted: of a search that did not end.
    """

    problem: Problem
    searched: SearchCounts
    grids: Grids
    first: tuple[PricedLayout, ...]
    feasible: NDArray[np.bool_]
    least_bytes: Floats
    below: tuple[PricedLayout, ...] = ()
    shortest: PricedLayout | None = None
    cost: str = ALPHA_BETA
    others: Mapping[str, Mapping[Sizes, int]] = field(default_factory=dict)
    interrupted: bool = False

    def __repr__(self) -> str:
        """How many rows of what."""
        return f"<{type(self).__name__}: {counted(len(self), 'row')} of {self.problem!r}>"

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, position: int) -> PricedLayout:
        """The layout at a place of the ranking, from 0, with its prices."""
        return self.rows[position]

    @cached_property
    def rows(self) -> tuple[PricedLayout, ...]:
        """The rows with their ranks."""
        return tuple(row_of(one, rank=place + 1, tie=place < self.ties) for place, one in enumerate(self.first))

    def detail(self, position: int) -> Detail:
        """Everything that the alpha-beta model predicts of the layout at a place of the ranking, from 0."""
        return self.rows[position].detail

    def with_terms(self, position: int) -> PricedLayout:
        """The layout at a place of the ranking, with every collective by the ranking's cost model."""
        return _with_terms(self.rows[position])

    @cached_property
    def best_by_format(self) -> dict[Precision, PricedLayout]:
        """The first row of each number format that is compared and fits, in their order."""
        best = dict[str, PricedLayout]()
        for one in (*self.rows, *map(row_of, self.below)):
            best.setdefault(one.job.workload.precision, one)
        return {name: best[name] for name in self.problem.formats if name in best}

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
        metric = self._metric(rank_by)
        if rank_by != "iteration":
            return count_ties(metric, metric * self.problem.machine.uncertainty.communication)
        waiting_s = np.array([one.exposed_communication_s for one in self.first])
        return count_ties(metric, np.asarray(own_half_s(self.problem, step_s=metric, waiting_s=waiting_s)))

    def _metric(self, rank_by: RankBy) -> Floats:
        """What rows are ranked by, s."""
        return np.array([getattr(one, METRICS[rank_by]) for one in self.first])

    def _alike_as_learned(self, rank_by: RankBy) -> int:
        """The same by what the profile has learned."""
        metric, apart = self._metric(rank_by), self._apart(rank_by)
        for position in range(1, len(self)):
            if float(np.log(metric[position] / max(metric[0], 1e-9))) > apart(position):
                return position
        return len(self)

    def _apart(self, rank_by: RankBy) -> Callable[[int], float]:
        """Half-width of the 80% interval of the ratio of a row to the first, by what the profile has learned."""
        learned = with_software(self.problem.machine, self.problem.framework).learned
        assert learned is not None, "asked before"
        first = self.first[0].slopes(rank_by)

        def half_width(position: int) -> float:
            return DEVIATIONS * difference_spread(self.first[position].slopes(rank_by), first, learned)

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
        return found

    def listed_below(self, top: int) -> tuple[PricedLayout, ...]:
        """The first rows of number formats that none of the first `top` (0: all) has, in the order of the ranking."""
        rest = self.best_by_format.values()
        below = [one for one in rest if (one.rank or math.inf) > (top or len(self))]
        metric = METRICS[self.problem.rank_by]
        return tuple(sorted(below, key=lambda one: (one.rank or math.inf, getattr(one, metric))))

    def _family(self, place: int) -> tuple[object, ...]:
        """What rows have in common that only exchange context, micro-batch and replicas."""
        layout = self.first[place]
        grid, shards, step = layout.grid, layout.grid.z, layout.job.framework.step
        if step.context_shards:
            shards *= grid.context
        order = tuple(axis for axis in grid.order if axis in ("x", "y") and grid.axis_size(axis) > 1)
        tokens, precision = layout.micro_batch / grid.context, layout.job.workload.precision
        stages, experts = (grid.pipeline, layout.chunks, layout.parts), (grid.expert, grid.expert_tensor)
        sizes = (precision, grid.x, grid.y, shards, *experts, *stages, layout.kept_layers, tokens)
        return (*sizes, layout.recompute, order, step.expert_overlap)

    def _tied(self, first: int, other: int) -> bool:
        """Whether the steps of two rows are within model error of each other."""
        rows, job = (self.first[first], self.first[other]), self.problem
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
        if self.shortest is not None:
            return row_of(self.shortest)
        return self.rows[0] if len(self) else None

    def fastest_elsewhere(self) -> PricedLayout | None:
        """The candidate with the shortest step of all, where another criterion's first has a notably longer one."""
        best = self.fastest() if self.shortest and len(self) else None
        return best if best and best.iteration_s <= (1.0 - WORTH_SAYING) * self[0].iteration_s else None

    def ranks(self) -> dict[Sizes, int]:
        """Best rank of each grid that has one."""
        found: dict[Sizes, int] = {}
        for place, one in enumerate(self.first):
            found.setdefault(self.sizes_of(one), place + 1)
        return found

    def sizes_of(self, one: Layout) -> Sizes:
        """A layout's sizes of the axes that were searched."""
        return tuple(map(one.grid.axis_size, self.grids.axes))

    def is_feasible(self, one: Layout) -> bool:
        """Whether its grid is one of those that are feasible."""
        return bool(self.feasible[(self.grids.sizes == self.sizes_of(one)).all(axis=1)].any())

    def listed(self, *, top: int = 0, terms: bool = False, rejected: bool = False) -> tuple[Row, ...]:
        """The first `top` rows (0: all) and the first of number formats below, with every collective if asked for;
        then the rejected grids if asked for."""
        count = min(top or len(self), len(self))
        rows = [self.with_terms(place) if terms else self.rows[place] for place in range(count)]
        rows += [_with_terms(one) if terms else one for one in self.listed_below(top)]
        return (*rows, *(self.rejected() if rejected else ()))

    def require_row(self, pick: int) -> None:
        """UsageError if `pick` is not a rank of a non-empty ranking."""
        if pick < 1:
            raise UsageError(f"--pick {pick}: places count from 1")
        if 0 < len(self) < pick:
            verb = "is" if len(self) == 1 else "are"
            raise UsageError(f"--pick {pick}: only {counted(len(self), 'configuration')} {verb} ranked")

    def rejected(self) -> tuple[Rejected, ...]:
        """Every grid that is not feasible, with its reasons, in the order of the grids."""
        asked = set(self.grids.sound_as_asked(self.problem).tolist())
        limit_bytes, found = memory_limit_bytes(self.problem.machine.accelerator), list[Rejected]()
        for number in np.flatnonzero(~self.feasible).tolist():
            sizes = dict(zip(self.grids.axes, self.grids.sizes[number].tolist(), strict=True))
            reasons, needed = self._reasons(number, sizes, asked=asked), None
            if not reasons:
                needed = float(self.least_bytes[number])
                reasons = ((MEMORY, f"needs {needed / GIB:.1f} GiB of {limit_bytes / GIB:.1f} GiB"),)
            found.append(Rejected(sizes, reasons, needed))
        return tuple(found)

    def _reasons(self, number: int, sizes: dict[str, int], *, asked: set[int]) -> tuple[tuple[str, str], ...]:
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
        return self._without_shape(number, sizes) if np.isinf(self.least_bytes[number]) else ()

    def _without_shape(self, number: int, sizes: dict[str, int]) -> tuple[tuple[str, str], ...]:
        """Why no micro-batch and number of chunks is allowed."""
        framework = self.problem.framework
        stages, count = sizes.get("pipeline", 1), self.problem.request.chunks or 2
        pipeline, chunks = framework.called("pipeline"), framework.called("chunks")
        several = (
            f"{pipeline} = {stages} with {chunks} = {count} needs {self.problem.model.layers} layers in "
            f"{stages * count} chunks, and micro-batches in multiples of {stages}"
        )
        said = {
            MICRO_BATCH: "no micro-batch that is allowed divides this grid's share of the batch",
            CHUNKS: several if stages > 1 else f"{chunks} above 1 needs {pipeline} above 1",
            EXPERT_OVERLAP: f"--expert-overlap needs interleaved stages: {several}",
        }
        missing = without_shape(self.grids, self.problem, np.array([number]))
        return tuple((name, said[name]) for name, rows in missing.items() if len(rows))


class Interrupted(KeyboardInterrupt):
    """A search that was interrupted once it had found something; result: of `axonn_tune.search`, where that asked."""

    def __init__(self, found: Priced) -> None:
        super().__init__()
        self.found = found
        self.result: Any = None


def count_ties(metric: Floats, half: Floats) -> int:
    """Entries from the first on whose difference from the first lies within its 80% interval."""
    apart = metric - metric[0] > np.hypot(half, half[0])
    return int(np.argmax(apart)) if apart.any() else len(metric)


def row_of(one: PricedLayout, **placed: Any) -> PricedLayout:  # noqa: ANN401 - fields
    """A layout as a row, with its place; of a `Detail` without its parts, which it finds again."""
    own = replace(one, **placed)
    if not isinstance(own, Detail):
        return own
    row = PricedLayout(**{each.name: getattr(own, each.name) for each in fields(PricedLayout)})
    row = replace(row, terms=(), stages=())
    vars(row)["detail"] = own
    return row


def _with_terms(row: PricedLayout) -> PricedLayout:
    """A row with every collective, and each pipeline stage."""
    return replace(row, terms=row.detail.terms, stages=row.detail.stages)
