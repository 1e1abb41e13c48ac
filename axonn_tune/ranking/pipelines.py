"""Candidates with pipeline stages, as columns: each kind of stage replayed once for all candidates that have it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from axonn_tune.cost.columns import Candidates, ColumnPricer, Floats, Integers, distinct
from axonn_tune.cost.replay import ChunkTimes, StageWork
from axonn_tune.cost.stages import Messages, Pipelines, StageKind, chunks_of, overlapped, stages_alike
from axonn_tune.frameworks import software_on
from axonn_tune.grid import GroupShape
from axonn_tune.program.pipeline import model_parts
from axonn_tune.program.size import COLUMNS
from axonn_tune.program.step import Stage, StepProgram
from axonn_tune.ranking.space import MIDDLE, Fitting, Shapes


def price_pipelines(
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
            ),
        )


class _Blocks(NamedTuple):
    """Kind of stage by its blocks: of those between the ends, the ones with fewer."""

    stage: Stage
    fewer: bool


class _Chunk(NamedTuple):
    """A chunk of a kind of stage: what else it has than blocks, and how many those are, 0 for an equal share."""

    part: Stage
    some: _Blocks
    blocks: int


@dataclass(frozen=True)
class _Parts:
    """Stages and chunks of all candidates, each replayed once; `candidates` number the shapes with stages."""

    shapes: Shapes
    fitting: Fitting
    pricer: ColumnPricer
    candidates: Candidates
    _worked: dict[_Blocks, StageWork] = field(default_factory=dict)
    _sums: dict[_Blocks, tuple[Floats, Floats]] = field(default_factory=dict)
    _rows: dict[_Blocks | _Chunk, list[Integers]] = field(default_factory=dict)
    _chunks: dict[_Chunk, ChunkTimes] = field(default_factory=dict)

    def expect(self, rows: Integers, stages: int, chunks: int) -> None:
        """Collect the chunks of the candidates in `rows`, before any is replayed."""
        for some, of_stage, _ in self._alike(stages, chunks):
            ones: list[_Blocks | _Chunk] = [some, *dict.fromkeys(of_stage)]
            for one in ones:
                self._rows.setdefault(one, []).append(rows)

    def kinds(self, rows: Integers, stages: int, chunks: int) -> Iterator[StageKind]:
        """Every kind of stage of the candidates in `rows`, all with as many stages and chunks."""
        for some, of_stage, numbers in self._alike(stages, chunks):
            communication, compute = self._stage(some)
            times = tuple(self._chunk(chunk).taken(rows) for chunk in of_stage)
            host = sum(one.host_s for one in times)
            yield StageKind(numbers, communication[rows], compute[rows] + host, times)

    def _alike(self, stages: int, chunks: int) -> Iterator[tuple[_Blocks, list[_Chunk], list[int]]]:
        """Each kind of stage with its chunks in their order, and the numbers of its stages."""
        problem = self.shapes.problem
        split = model_parts(problem.model.layers, stages=stages, chunks=chunks, less=problem.framework.step.less)
        uneven, alike = chunks > 1 and len(set(split)) > 1, stages_alike(split, stages)
        most = max((sum(blocks) for stage, blocks in alike if stage == MIDDLE), default=0)
        for (stage, blocks), numbers in alike.items():
            some = _Blocks(stage, stage == MIDDLE and sum(blocks) < most)
            of_stage = [_Chunk(part, some, count if uneven else 0) for part, count in chunks_of(stage, blocks)]
            yield some, of_stage, numbers

    def _stage(self, some: _Blocks) -> tuple[Floats, Floats]:
        """Communication and computation of a kind of stage, of the candidates that are expected to have it."""
        if some not in self._sums:
            rows = np.concatenate(self._rows[some])
            found = np.full((2, len(self.candidates)), np.nan)
            found[:, rows] = self.pricer.sums(self.candidates.taken(rows), self._work(some))
            self._sums[some] = found[0], found[1]
        return self._sums[some]

    def _chunk(self, chunk: _Chunk) -> ChunkTimes:
        """A chunk, of the candidates that are expected to have it."""
        if chunk not in self._chunks:
            work, chunks = self._work(chunk.some), self.shapes.chunks[self.shapes.piped]
            each = np.floor(np.asarray(work.values["L"]) / chunks)
            layers = np.maximum(np.full(len(chunks), float(chunk.blocks)) if chunk.blocks else each, 1.0)
            rows = np.concatenate(self._rows[chunk])
            times = self.pricer.chunk(self.candidates.taken(rows), work, chunk.part, layers=layers)
            found = ChunkTimes(*(np.full(len(self.candidates), np.nan) for _ in times.columns))
            for column, value in zip(found.columns, times.columns, strict=True):
                column[rows] = value
            self._chunks[chunk] = found
        return self._chunks[chunk]

    def _work(self, some: _Blocks) -> StageWork:
        """Sizes and computation of a kind of stage."""
        if some not in self._worked:
            alike = [one for one in self.shapes.stage_rows if one.stage == some.stage]
            layers = np.maximum.reduce([one.layers for one in alike]) - float(some.fewer)
            layers = np.maximum(layers, 1.0)
            values = self.shapes.stage_values(replace(alike[0], layers=layers))
            kept = np.minimum(self.fitting.kept_layers[self.shapes.piped], layers)
            self._worked[some] = self.pricer.work({**values, "kept": kept, "unkept": layers - kept}, some.stage)
        return self._worked[some]


def _strides(shapes: Shapes, candidates: Candidates) -> Integers:
    """Ranks between neighbouring stages of each candidate."""
    orders = shapes.problem.orders
    inside = [order[: order.index("pipeline")] == order[:-1] for order in orders]
    assert all(inside) or len(orders) == 1, "orders that are tried have the pipeline outermost"
    stride = np.ones(len(candidates), dtype=np.int64)
    for axis in orders[0][: orders[0].index("pipeline")]:
        stride *= shapes.sizes(axis)[candidates.shape]
    return stride


def _sends_s(shapes: Shapes, program: StepProgram, candidates: Candidates, routes: Sequence[GroupShape]) -> Floats:
    """Time of one message between stages of every candidate, s."""
    problem, strides, over_x = shapes.problem, _strides(shapes, candidates), candidates.routes["x"]
    software = software_on(problem.framework, problem.machine)
    messages = Messages.of(problem.framework, problem.machine, problem.gpus, software)
    whole, size = (
        np.broadcast_to(np.asarray(program.send(scattered=one).size_bytes.evaluate(shapes.values)), len(shapes))
        for one in (False, problem.framework.schedule.scattered)
    )
    ways, firsts, way = distinct(strides * len(routes) + over_x if messages.scattered else strides)
    found = np.empty(len(candidates))
    for number, first in zip(range(len(ways)), firsts.tolist(), strict=True):
        mine = way == number
        shape = candidates.shape[mine]
        found[mine] = messages.send_s(
            size[shape],
            whole[shape],
            stride=int(strides[first]),
            over_x=routes[over_x[first]],
            arithmetic=COLUMNS,
        )
    return found
