"""Candidates of one recompute set, exchange and dispatcher: bounds of all of them, prices of those of one stage.

A candidate with pipeline stages is bounded over all splits of its layers, then by the schedule of each of its splits;
both from how long runs of its blocks take (`cost.paces`), for a few NumPy calls a layer type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from axonn_tune.cost.columns import Candidates, ColumnPricer, Floats, Integers, distinct
from axonn_tune.cost.price import Pricer
from axonn_tune.frameworks import software_on
from axonn_tune.grid import GroupShape
from axonn_tune.job import Layout
from axonn_tune.program.operations import COLUMNS
from axonn_tune.program.step import MIDDLE, StepProgram, as_runs
from axonn_tune.ranking.bound import Layers, Shape, any_split_s, contended, layers_of, sent_of_mean_s, shortest_part
from axonn_tune.ranking.fit import Fitting, values_of_all
from axonn_tune.ranking.shapes import Shapes
from axonn_tune.ranking.space import Problem
from axonn_tune.units import seconds

if TYPE_CHECKING:
    from axonn_tune.cost.paces import Paces
    from axonn_tune.ranking.splits import Staged

_SLAB = 16384
"""Candidates whose bounds are worked out at once: their columns stay in the second-level cache."""


@dataclass(frozen=True)
class Pool:
    """Candidates of one program, of shapes that fit: all without pipeline stages, or all with several.

    problem: with their exchange, dispatcher and number format. routes: the group shapes that routes of candidates
    number; contention: as of `contended_s`.
    """

    problem: Problem
    shapes: Shapes
    fitting: Fitting
    pricer: ColumnPricer
    candidates: Candidates
    routes: Sequence[GroupShape]
    contention: float
    several_stages: bool
    _pricers: dict[Layout, Pricer] = field(default_factory=dict, compare=False)

    def __len__(self) -> int:
        return len(self.candidates)

    @cached_property
    def _alike(self) -> tuple[Integers, Integers]:
        """Candidates that represent all others of equal shape and route times, and which of these each one is."""
        return self.pricer.distinct(self.candidates)

    @cached_property
    def batches(self) -> Floats:
        """Micro-batches of each candidate."""
        return np.asarray(self.shapes.values["A"])[self.candidates.shape]

    @cached_property
    def sends_s(self) -> Floats:
        """Time of one message between stages of every candidate, s."""
        return _sends_s(self.shapes, self.pricer.program, self.candidates, self.routes)

    @cached_property
    def paces(self) -> Paces:
        """Runs of blocks of the candidates that differ."""
        kept = self.fitting.kept_layers
        values = values_of_all(self.shapes, self.pricer.program, self.fitting.repeated, 0.0 * kept)
        runs, work = self.shapes.problem.model.runs, self.pricer.work(values, MIDDLE)
        return self.pricer.paces(
            self.candidates.taken(self._alike[0]), work, first=runs[0][0], last=runs[-1][0], kept=bool(kept.any())
        )

    @cached_property
    def layers(self) -> Layers:
        """What splits of the candidates are made of, of those that differ."""
        return layers_of(self.paces, self.shapes.problem.model, len(self._alike[0]))

    def any_split_s(self, *, any_chunks: bool = False) -> Floats:
        """Least step of every candidate over all splits of its layers, s; any_chunks: and over all numbers of chunks.
        Without pipeline stages that of their only stage."""
        if len(self) > _SLAB:
            slabs = np.array_split(np.arange(len(self)), -(-len(self) // _SLAB))
            return np.concatenate([self.among(rows).any_split_s(any_chunks=any_chunks) for rows in slabs])
        if not self.several_stages:
            return self._one_stage_s()
        problem, found = self.shapes.problem, np.empty(len(self))
        schedule, given = problem.framework.schedule, problem.parts is not None or any(problem.framework.step.less)
        for rows, stages, chunks in _groups(self.shapes, self.candidates):
            shape = Shape(
                stages,
                None if any_chunks else chunks,
                self.batches[rows],
                self.fitting.repeated[self.candidates.shape[rows]],
                0 if any_chunks else shortest_part(problem.model.layers, stages, chunks, given=given),
                self.sends_s[rows],
            )
            layers = self.layers.taken(self._alike[1][rows])
            found[rows] = any_split_s(layers, shape, schedule=schedule, contention=self.contention)
        return found

    def _one_stage_s(self) -> Floats:
        """Blocks of all micro-batches one after the other, with embedding and LM head."""
        layers, batches = self.layers.taken(self._alike[1]), self.batches
        whole_s, computed_s = batches * layers.whole_s(1.0 / batches), batches * layers.computed_s
        return contended(whole_s, computed_s, layers.sent_s, contention=self.contention)

    def least_sent_s(self) -> Floats:
        """Communication of the mean stage of every candidate, s: some stage has no less."""
        stages = self.shapes.stages[self.candidates.shape]
        chunks = self.shapes.chunks[self.candidates.shape]
        sent_s = self.layers.sent_s[self._alike[1]]
        return sent_of_mean_s(sent_s, self.batches * self.sends_s, stages=stages, chunks=chunks)

    def staged(self, rows: Integers) -> Staged:
        """Some candidates with pipeline stages, as their schedules are made."""
        # Imported here: most searches have no pipeline stages, and start-up time is theirs.
        from axonn_tune.ranking.splits import Staged

        shape, batches = self.candidates.shape[rows], self.batches[rows].astype(np.int64)
        numbers = self.shapes.stages[shape], self.shapes.chunks[shape], batches, self.fitting.repeated[shape]
        contention = np.full(len(rows), self.contention)
        return Staged(self.paces.taken(self._alike[1][rows]), *numbers, self.sends_s[rows], contention)

    def pricer_of(self, layout: Layout) -> Pricer:
        """What prices a layout; splits of the same candidate share what does not depend on them."""
        found, own = Pricer(self.problem, layout), replace(layout, parts=self.shapes.problem.parts)
        if own in self._pricers:
            found.clock, found.known = self._pricers[own].clock, self._pricers[own].known
        return self._pricers.setdefault(layout, found)

    def among(self, places: Integers) -> Pool:
        """Some candidates, with only their shapes."""
        used, _, shape = distinct(self.candidates.shape[places])
        some = replace(self.candidates.taken(places), shape=shape)
        shapes = self.shapes.taken(used)
        return replace(self, shapes=shapes, fitting=self.fitting.taken(used), candidates=some)

    def whole(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Prices of all candidates without pipeline stages: communication, computation, step and bubble, s."""
        program, model = self.pricer.program, self.shapes.problem.model
        first, representative = self._alike
        values = values_of_all(self.shapes, program, self.fitting.repeated, self.fitting.kept_layers)
        runs = as_runs(model.runs) if model.mixed else ((0, values["L"]),)
        prices = self.pricer.price(self.candidates.taken(first), values, runs)
        communication, compute, iteration = prices[:, representative]
        return communication, compute, iteration, np.zeros(len(self))


def _groups(shapes: Shapes, candidates: Candidates) -> Iterator[tuple[Integers, int, int]]:
    """Candidates with as many stages and chunks, by their places, with both numbers."""
    stages, chunks = shapes.stages[candidates.shape], shapes.chunks[candidates.shape]
    for count in distinct(stages)[0].tolist():
        for several in distinct(chunks[stages == count])[0].tolist():
            yield np.flatnonzero((stages == count) & (chunks == several)), count, several


def _sends_s(shapes: Shapes, program: StepProgram, candidates: Candidates, routes: Sequence[GroupShape]) -> Floats:
    """Time of one message between stages of every candidate, s."""
    # Imported here: most searches have no pipeline stages, and start-up time is theirs.
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
    stages = shapes.stages[candidates.shape]
    ways, firsts, way = distinct((strides * (problem.gpus + 1) + stages) * len(routes) + (over_x if gathered else 0))
    found = np.empty(len(candidates))
    for number, first in zip(range(len(ways)), firsts.tolist(), strict=True):
        mine = way == number
        shape = candidates.shape[mine]
        found[mine] = message_s(
            size[shape],
            whole[shape],
            stages=GroupShape(((int(stages[first]), int(strides[first])),)),
            over_x=routes[over_x[first]] if gathered else None,
            machine=problem.machine.placing(problem.gpus),
            world=problem.gpus,
            call_s=call_s,
            arithmetic=COLUMNS,
        )
    return found
