"""The alpha-beta ranking as entries, one row at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from axonn_tune.cost.columns import Floats
from axonn_tune.cost.evidence import outside
from axonn_tune.cost.prediction import Pricing, price_configuration
from axonn_tune.cost.uncertainty import (
    DEVIATIONS,
    RANKED,
    difference_spread,
    own_half_s,
    performance,
    slopes_of,
    with_software,
)
from axonn_tune.cost.utilisation import exposed_s
from axonn_tune.program.dimensions import executed_flops
from axonn_tune.ranking.choosing import Candidate, Ranking, SearchCounts, ranking_metric
from axonn_tune.ranking.entries import Entry, Sizes
from axonn_tune.ranking.space import Problem, RankBy
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.workload import RECOMPUTES


@dataclass(frozen=True)
class AlphaBetaRanking:
    """The ranking by the alpha-beta model, as entries."""

    ranking: Ranking

    @property
    def cost(self) -> str:
        """Name of the cost model."""
        return "alpha-beta"

    def __len__(self) -> int:
        return len(self.ranking)

    @property
    def searched(self) -> SearchCounts:
        """Numbers of grids and candidates."""
        return self.ranking.searched

    @cached_property
    def ties(self) -> int:
        """Number of rows from the first on that are within model error of it, also by their steps.

        With a learned profile: rows whose difference from the first is within its 80% interval.
        """
        if not len(self):
            return 0
        alike = self._alike if self.ranking.problem.machine.learned is None else self._alike_as_learned
        return min(alike(by) for by in {"iteration", self.ranking.problem.rank_by})

    def _alike_as_learned(self, rank_by: RankBy) -> int:
        """Rows from the first on within model error of it in one metric, by what the profile has learned."""
        learned, first = self._machine.learned, self._slopes(0, rank_by)
        assert learned is not None, "asked before"
        metric = ranking_metric(self.ranking.columns, rank_by=rank_by)[self.ranking.rows]
        for position in range(1, len(self)):
            apart = float(np.log(metric[position] / max(metric[0], 1e-9)))
            if apart > DEVIATIONS * difference_spread(self._slopes(position, rank_by), first, learned):
                return position
        return len(self)

    @property
    def difference(self) -> float | None:
        """Half-width of the 80% interval of the ratio of the first two, with a learned profile; else None."""
        learned = self._machine.learned
        if learned is None or len(self) < 2:
            return None
        first, second = (self._slopes(position, self.ranking.problem.rank_by) for position in (0, 1))
        return DEVIATIONS * difference_spread(second, first, learned)

    @cached_property
    def _machine(self) -> Machine:
        """The profile with the uncertainty of the framework's software."""
        return with_software(self.ranking.problem.machine, self.ranking.problem.framework)

    def _slopes(self, position: int, rank_by: RankBy) -> Floats:
        """Slopes of the ranking criterion, at a rank."""
        problem, configuration = self.ranking.problem, self.ranking.candidate(position).configuration

        def metric(machine: Machine) -> float:
            pricing = price_configuration(
                problem.model, machine, problem.workload, configuration, framework=problem.framework
            )
            return RANKED[rank_by](pricing)

        return slopes_of(metric, self._machine)

    def _alike(self, rank_by: RankBy) -> int:
        """Rows from the first on within model error of it in one metric, by the half-widths of the profile.

        Errors of computation are common to all grids, apart from the residual of each layout.
        """
        columns, rows = self.ranking.columns, self.ranking.rows
        metric = ranking_metric(columns, rank_by=rank_by)[rows]
        width = self.ranking.problem.machine.uncertainty.communication
        if rank_by != "iteration":
            return count_ties(metric, metric * width)
        waiting_s = exposed_s(metric, columns.compute_s[rows])
        return count_ties(metric, np.asarray(own_half_s(metric, waiting_s, width=width)))

    def entry(self, position: int, *, terms: bool) -> Entry:
        """The entry at a place of the ranking, from 0; `terms`: with every collective."""
        candidate = self.ranking.candidate(position)
        found = candidate_entry(candidate, self.ranking.problem, flops=self._executed_flops(position))
        pricing = self.pricing(position) if terms else None
        return replace(
            found,
            rank=position + 1,
            tie=position < self.ties,
            terms=() if pricing is None else pricing.terms,
            stages=() if pricing is None else pricing.stages,
            shortest_step_s=float(self._shortest_steps_s[self.ranking.grid_of(position)]),
        )

    @cached_property
    def _shortest_steps_s(self) -> Floats:
        """Shortest step of all candidates of each grid, s."""
        columns, shapes = self.ranking.columns, self.ranking.shapes
        shortest = np.full(len(self.ranking.grids.sizes), np.inf)
        np.minimum.at(shortest, shapes.grid[columns.shape], columns.iteration_s)
        return shortest

    def fastest(self) -> Entry | None:
        """The feasible candidate with the shortest step; None if there is none."""
        alone = AlphaBetaRanking(self.ranking.fastest())
        return replace(alone.entry(0, terms=False), rank=None, tie=False) if len(alone) else None

    def pricing(self, position: int) -> Pricing:
        """Every term of the candidate at a place of the ranking, from 0."""
        return self.ranking.price(position)

    def ranks(self) -> dict[Sizes, int]:
        """Best rank of each grid."""
        columns, grids = self.ranking.columns, self.ranking.grids.sizes
        rows = grids[self.ranking.shapes.grid[columns.shape[self.ranking.rows]]].tolist()
        found: dict[Sizes, int] = {}
        for position, row in enumerate(rows):
            found.setdefault(tuple(row), position + 1)
        return found

    def rejected_entries(self) -> tuple[Entry, ...]:
        """Rejected grids with reasons; for memory, with the least it needs."""
        entries = []
        for rejected in self.ranking.rejected():
            sizes = tuple(rejected.sizes.values())
            reasons = tuple(f"{name}: {message}" for name, message in rejected.reasons)
            entries.append(
                Entry(
                    axes=self.ranking.grids.axes,
                    sizes=sizes,
                    framework=self.ranking.problem.framework.name,
                    rejected_because=reasons,
                    memory_bytes=rejected.needed_bytes,
                )
            )
        return tuple(entries)

    def _executed_flops(self, position: int) -> float:
        """FLOPs one rank executes in a step, of pipeline stages their mean."""
        columns, row, shapes = self.ranking.columns, self.ranking.rows[position], self.ranking.shapes
        kind, shape = RECOMPUTES[columns.recompute[row]], columns.shape[row]
        kept = self.ranking.fittings[kind].kept_layers[shape]
        every = shapes.values.items()
        values = {name: value[shape] if isinstance(value, np.ndarray) else value for name, value in every}
        values |= {"kept": kept, "unkept": float(self.ranking.problem.model.layers) - kept}
        return float(executed_flops(self.ranking.programs[kind], values) / shapes.stages[shape])


def count_ties(metric: Floats, half: Floats) -> int:
    """Entries from the first on whose difference from the first lies within its 80% interval."""
    apart = metric - metric[0] > np.hypot(half, half[0])
    return int(np.argmax(apart)) if apart.any() else len(metric)


def priced_entry(pricing: Pricing, problem: Problem) -> Entry:
    """The entry of a single priced configuration, with terms; its rank is 1."""
    found = candidate_entry(Candidate.of(pricing), problem, flops=pricing.executed_flops)
    return replace(found, rank=1, terms=pricing.terms, stages=pricing.stages, shortest_step_s=pricing.iteration_s)


def candidate_entry(candidate: Candidate, problem: Problem, *, flops: float) -> Entry:
    """The entry of a priced candidate, without rank and terms; `flops`: executed FLOPs of a rank in a step."""
    configuration = candidate.configuration
    grid = configuration.grid
    found = performance(
        problem.model,
        problem.machine,
        problem.workload,
        configuration,
        framework=problem.framework,
        compute_s=candidate.compute_s + candidate.bubble_s,
        iteration_s=candidate.iteration_s,
        executed_flops=flops,
    )
    return Entry(
        axes=problem.axes,
        sizes=tuple(grid.axis_size(axis) for axis in problem.axes),
        framework=problem.framework.name,
        pipeline=grid.pipeline,
        chunks=configuration.chunks,
        bubble_s=candidate.bubble_s,
        order=grid.order,
        micro_batch=configuration.micro_batch,
        accumulation=candidate.accumulation,
        recompute=configuration.recompute,
        kept_layers=configuration.kept_layers,
        communication_s=candidate.communication_s,
        exposed_communication_s=candidate.exposed_communication_s,
        compute_s=candidate.compute_s,
        iteration_s=candidate.iteration_s,
        memory_bytes=candidate.memory_bytes,
        tokens_per_s=found.tokens_per_s,
        low_s=found.low_s,
        high_s=found.high_s,
        mfu=found.mfu,
        hfu=found.hfu,
        logged_tflops_per_gpu=found.logged_tflops_per_gpu,
        outside=outside(problem.machine, problem.workload, configuration),
    )
