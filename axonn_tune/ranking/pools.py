"""Candidates of one recompute set, exchange and dispatcher: bounds of all of them, prices of those of one stage.

A candidate with pipeline stages is bounded over all splits of its layers, then by the schedule of each of its splits;
both from how long runs of its blocks take (`cost.paces`), for a few NumPy calls a layer type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from axonn_tune.cost.columns import SLAB_ROWS, Candidates, ColumnPricer, distinct
from axonn_tune.cost.pricer import Pricer
from axonn_tune.frameworks import software_on
from axonn_tune.frameworks.optimizers import ADAMW
from axonn_tune.grid import GroupShape
from axonn_tune.job import Layout
from axonn_tune.program.operations import COLUMNS, Floats, Integers
from axonn_tune.program.step import MIDDLE, StepProgram, as_runs
from axonn_tune.ranking.fit import Fitting, values_of_all
from axonn_tune.ranking.shapes import Shapes
from axonn_tune.ranking.space import Problem
from axonn_tune.units import seconds

if TYPE_CHECKING:
    from axonn_tune.cost.paces import Paces
    from axonn_tune.cost.replay import StageWork
    from axonn_tune.ranking.splits import Replays, Staged
    from axonn_tune.ranking.unsplit import Unsplit


@dataclass(frozen=True)
class Pool:
    """Candidates of one program, of shapes that fit: all without pipeline stages, or all with several.

    problem: with their exchange, dispatcher and number format. routes: the group shapes that routes of candidates
    number; contention: as of `contended_s`; idle: blocks as of `BlockRuns.idle_paces`, for coarse bounds.
    """

    problem: Problem
    shapes: Shapes
    fitting: Fitting
    pricer: ColumnPricer
    candidates: Candidates
    routes: Sequence[GroupShape]
    contention: float
    several_stages: bool
    idle: bool = False
    _runs: Paces | None = field(default=None, compare=False)
    _pricers: dict[Layout, Pricer] = field(default_factory=dict, compare=False)
    _shared: dict[Layout, Pricer] = field(default_factory=dict, compare=False)

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
    def updates_s(self) -> Floats:
        """As of `block_updates_s`, of every candidate."""
        options = self.pricer.program.given.options
        if not (self.several_stages and (options.offloads or options.optimizer != ADAMW)):
            return np.zeros((len(self), len(self.shapes.problem.model.types)))
        # Imported here: most searches are of AdamW on GPUs, and start-up time is theirs.
        from axonn_tune.ranking.updates import block_updates_s

        return block_updates_s(self.shapes, self.pricer)[self.candidates.shape]

    @cached_property
    def sends_s(self) -> Floats:
        """Time of one message between stages of every candidate, s."""
        return _sends_s(self.shapes, self.pricer.program, self.candidates, self.routes)

    @property
    def paces(self) -> Paces:
        """Runs of blocks of the candidates that differ."""
        if self._runs is not None:
            return self._runs
        rows, runs = self._alike[0], self.shapes.problem.model.runs
        kept = bool(self.fitting.kept_layers.any())
        return self.pricer.paces(
            self.candidates.taken(rows), self._work, first=runs[0][0], last=runs[-1][0], kept=kept, idle=self.idle
        )

    def with_paces(self) -> Pool:
        """The same, which keeps the runs of its blocks."""
        return replace(self, _runs=self.paces)

    def among(self, rows: Integers) -> Pool:
        """Some of its candidates with their shapes, and with the runs of their blocks if these are kept."""
        used, _, shape = distinct(self.candidates.shape[rows])
        candidates = replace(self.candidates.taken(rows), shape=shape)
        # Those that differ are numbered in the same order.
        runs = self._runs and self._runs.taken(distinct(self._alike[1][rows])[0])
        shapes, fitting = self.shapes.taken(used), self.fitting.taken(used)
        return replace(self, shapes=shapes, fitting=fitting, candidates=candidates, _runs=runs)

    def slabs(self) -> Iterator[tuple[Pool, Integers]]:
        """It in parts that are worked out at once, with their places."""
        if len(self) <= SLAB_ROWS:
            yield self, np.arange(len(self))
            return
        for rows in np.array_split(np.arange(len(self)), -(-len(self) // SLAB_ROWS)):
            yield self.among(rows), rows

    @cached_property
    def _work(self) -> StageWork:
        kept = self.fitting.kept_layers
        values = values_of_all(self.shapes, self.pricer.program, self.fitting.repeated, 0.0 * kept)
        return self.pricer.work(values, MIDDLE)

    @cached_property
    def unsplit(self) -> Unsplit:
        """What bounds over all splits of their layers are made of."""
        # Imported here: most searches have no pipeline stages, and start-up time is theirs.
        from axonn_tune.ranking.bound import layers_of
        from axonn_tune.ranking.unsplit import Unsplit

        shape, several = self.candidates.shape, self.several_stages
        problem, (rows, alike) = self.shapes.problem, self._alike
        return Unsplit(
            problem,
            layers_of(self.paces, problem.model, len(rows), with_last=problem.mtp_part is None),
            alike,
            self.shapes.stages[shape],
            self.batches,
            self.fitting.repeated[shape],
            self.sends_s if several else np.zeros(len(self)),
            np.full(len(self), self.contention),
            self.updates_s,
        )

    @property
    def chunks(self) -> Integers:
        """Chunks of a stage of each candidate."""
        return self.shapes.chunks[self.candidates.shape]

    def staged(self, rows: Integers) -> Staged:
        """Some candidates with pipeline stages, as their schedules are made."""
        # Imported here: most searches have no pipeline stages, and start-up time is theirs.
        from axonn_tune.ranking.splits import Staged

        shape, batches = self.candidates.shape[rows], self.batches[rows].astype(np.int64)
        numbers = self.shapes.stages[shape], self.shapes.chunks[shape], batches, self.fitting.repeated[shape]
        contention = np.full(len(rows), self.contention)
        return Staged(
            self.paces.taken(self._alike[1][rows]), *numbers, self.sends_s[rows], contention, self.updates_s[rows]
        )

    def replays_of(self, row: int, layout: Layout) -> Replays:
        """Replays of parts of one candidate, given its layout; numbers of chunks share them."""
        # Imported here: most searches have no pipeline stages, and start-up time is theirs.
        from axonn_tune.ranking.splits import Replays

        kept, shared = bool(self.fitting.kept_layers[self.candidates.shape[row]] > 0), self._pricer_with(layout)
        return Replays(partial(shared.chunk, kept=kept), shared.stage_s, kept)

    def pricer_of(self, layout: Layout) -> Pricer:
        """What prices a layout."""
        if layout not in self._pricers:
            self._pricers[layout] = self._pricer_with(layout).split(layout)
        return self._pricers[layout]

    def _pricer_with(self, layout: Layout) -> Pricer:
        """What prices a layout with some split and number of chunks: all that does not depend on these is shared."""
        shared = replace(layout, chunks=min(layout.chunks, 2), parts=None)
        if shared not in self._shared:
            self._shared[shared] = Pricer(self.problem, replace(layout, parts=self.shapes.problem.parts))
        return self._shared[shared]

    def whole(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Prices of all candidates without pipeline stages: communication, computation, step and bubble, s."""
        program, model = self.pricer.program, self.shapes.problem.model
        first, representative = self._alike
        values = values_of_all(self.shapes, program, self.fitting.repeated, self.fitting.kept_layers)
        runs = as_runs(model.runs) if model.opening or model.mixed else ((0, values["L"]),)
        prices = self.pricer.price(self.candidates.taken(first), values, runs)
        communication, compute, iteration = prices[:, representative]
        return communication, compute, iteration, np.zeros(len(self))


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
