"""Candidates with pipeline stages, as columns: a bound on each step, and the exact step on request.

All stages of a candidate are one of a few kinds (first, last, those between with more or fewer blocks), each replayed
once. The bound is that of `cost.pipeline`, with compute slowdown from overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from axonn_tune.cost.collectives import collective_time_s, lines_of, route, transfer_time_s
from axonn_tune.cost.columns import Candidates, ChunkColumns, ColumnPricer, Floats, Integers, ShapeColumns, distinct
from axonn_tune.cost.pipeline import StageTimes, pipeline_bound_s, pipeline_time, stage_end_s
from axonn_tune.cost.utilisation import contended_s
from axonn_tune.frameworks import software_on
from axonn_tune.grid import GroupShape
from axonn_tune.program.pipeline import split_layers
from axonn_tune.program.size import COLUMNS
from axonn_tune.program.step import Stage
from axonn_tune.ranking.space import FIRST, LAST, MIDDLE, Fitting, Shapes
from axonn_tune.units import seconds


@dataclass(frozen=True)
class StageKind:
    """Stages that are alike: their number, one of them, and what each chunk of it has."""

    stage: Stage
    numbers: tuple[int, ...]
    chunks: tuple[int, ...]
    communication_s: Floats
    compute_s: Floats
    times: tuple[ChunkColumns, ...]


@dataclass(frozen=True)
class Pipelines:
    """Candidates with as many stages and chunks, priced: all columns have one row each, in the order of `rows`.

    sends_s: of one message; alone_s: computation of the stage that computes longest.
    """

    rows: Integers
    stages: int
    chunks: int
    micro_batches: Integers
    kinds: tuple[StageKind, ...]
    sends_s: Floats
    overlapped: bool
    contention: float
    communication_s: Floats
    alone_s: Floats

    def times(self, at: Integers | int) -> StageTimes:
        """Durations of the stages of some candidates, or of one."""

        def stacked(name: str) -> Floats:
            columns = [[getattr(one, name)[at] for one in kind.times] for kind in self._by_stage()]
            return np.moveaxis(np.array(columns, dtype=np.float64), (0, 1), (-2, -1))

        sent_s = np.asarray(self.sends_s[at])
        sends = np.broadcast_to(sent_s[..., None], (*sent_s.shape, self.stages))
        return StageTimes(
            forward_s=stacked("forward_s"),
            backward_s=stacked("backward_s"),
            last_backward_s=stacked("last_backward_s"),
            end_s=np.moveaxis(np.array([self._end_s(kind)[at] for kind in self._by_stage()]), 0, -1),
            activation_send_s=sends,
            gradient_send_s=sends,
            overlapped=self.overlapped,
        )

    def _end_s(self, kind: StageKind) -> Floats:
        return np.asarray(stage_end_s(kind.times, stages=self.stages))

    def _by_stage(self) -> list[StageKind]:
        placed = {number: kind for kind in self.kinds for number in kind.numbers}
        return [placed[number] for number in range(self.stages)]

    def bound_s(self) -> tuple[Floats, Floats, Floats]:
        """Bounds of all candidates: least step, its compute slowdown, and bubble with least exposed communication."""
        everything = np.arange(len(self.rows))
        scheduled = np.asarray(pipeline_bound_s(self.times(everything), micro_batches=self.micro_batches))
        busy = self._busy_s()
        # A message exposes at most its own time where it is sent and where it is waited for.
        lost = np.asarray(self._lost_s(busy + 4.0 * self.chunks * self.micro_batches * self.sends_s))
        return scheduled + lost, lost, np.maximum(scheduled - np.maximum(busy, self.alone_s), 0.0)

    def _busy_s(self) -> Floats:
        """Busy time of the stage with the most computation, without sends."""
        compute = np.array([kind.compute_s for kind in self.kinds])
        busy = np.array([self._occupied_s(kind) for kind in self.kinds])
        found: Floats = np.take_along_axis(busy, compute.argmax(axis=0)[None], axis=0)[0]
        return found

    def _occupied_s(self, kind: StageKind) -> Floats:
        passes = sum(one.forward_s + one.backward_s for one in kind.times) * (self.micro_batches - 1.0)
        last = sum(one.forward_s + one.last_backward_s for one in kind.times) + self._end_s(kind)
        return np.asarray(passes + last)

    def _lost_s(self, busy_s: Floats) -> Floats:
        lost_s = contended_s(self.communication_s, self.alone_s, busy_s, contention=self.contention)
        return np.broadcast_to(lost_s, busy_s.shape)

    def exact_s(self, position: int) -> tuple[float, float, float]:
        """Step of one candidate by the recurrence, its computation and its bubble, s."""
        time = pipeline_time(self.times(position), micro_batches=int(self.micro_batches[position]))
        slowest = max(self.kinds, key=lambda kind: kind.compute_s[position]).numbers[0]
        alone_s = float(self.alone_s[position])
        bubble_s = min(time.bubble_s[slowest], max(0.0, time.step_s - alone_s))
        sent_s, busy_s = float(self.communication_s[position]), time.step_s - bubble_s
        lost_s = float(contended_s(sent_s, alone_s, busy_s, contention=self.contention))
        return time.step_s + lost_s, alone_s + lost_s, bubble_s


def price_pipelines(
    shapes: Shapes,
    fitting: Fitting,
    pricer: ColumnPricer,
    candidates: Candidates,
    *,
    routes: Sequence[GroupShape],
    contention: float,
) -> Iterator[Pipelines]:
    """Price candidates whose shapes have several stages; those with as many stages and chunks go together.

    routes: the group shapes that routes of candidates number.
    """
    if not len(candidates):
        return
    piped = np.full(len(shapes), -1)
    piped[shapes.piped] = np.arange(len(shapes.piped))
    stages, chunks = shapes.stages[candidates.shape], shapes.chunks[candidates.shape]
    batches = np.asarray(shapes.values["A"])[candidates.shape]
    sends = _sends_s(shapes, candidates, routes)
    first, representative = pricer.distinct(candidates)
    alike = candidates.taken(first)
    parts = _Parts(shapes, fitting, pricer, Candidates(piped[alike.shape], alike.routes))
    schedule = shapes.problem.framework.schedule
    groups = [
        (np.flatnonzero((stages == count) & (chunks == several)), count, several)
        for count in distinct(stages)[0].tolist()
        for several in distinct(chunks[stages == count])[0].tolist()
    ]
    for rows, count, several in groups:
        parts.expect(distinct(representative[rows])[0], count, several)
    for rows, count, several in groups:
        kinds = tuple(parts.kinds(representative[rows], count, several))
        sent = 2.0 * several * batches[rows] * sends[rows]
        communication = [kind.communication_s + sent * _boundaries(kind, count, several) for kind in kinds]
        yield Pipelines(
            rows=rows,
            stages=count,
            chunks=several,
            micro_batches=batches[rows].astype(np.int64),
            kinds=kinds,
            sends_s=sends[rows],
            overlapped=schedule.overlapped_interleaved if several > 1 else schedule.overlapped,
            contention=contention,
            communication_s=np.max(communication, axis=0),
            alone_s=np.max([kind.compute_s for kind in kinds], axis=0),
        )


def _boundaries(kind: StageKind, stages: int, chunks: int) -> float:
    """Share of a stage's passes that end in a message: not the last part's forward, nor the first part's backward."""
    first, last = 0 in kind.numbers, stages - 1 in kind.numbers
    return 1.0 - (float(first) + float(last)) / (2.0 * chunks)


class _Blocks(NamedTuple):
    """Kind of stage by its blocks: of those between the ends, the ones with fewer; or so many in all, where chunks of a
    stage differ."""

    stage: Stage
    fewer: bool
    total: int


class _Chunk(NamedTuple):
    """A chunk of a kind of stage: what else it has than blocks, and how many those are, 0 for an equal share."""

    part: Stage
    some: _Blocks
    blocks: int


def _chunks_of(some: _Blocks, blocks: tuple[int, ...]) -> list[_Chunk]:
    """The chunks of a stage in their order."""
    stage, last = some.stage, len(blocks) - 1
    return [
        _Chunk(Stage(stage.first and at == 0, stage.last and at == last), some, count if some.total else 0)
        for at, count in enumerate(blocks)
    ]


@dataclass(frozen=True)
class _Parts:
    """Stages and chunks of all candidates, each replayed once; `candidates` number the shapes with stages."""

    shapes: Shapes
    fitting: Fitting
    pricer: ColumnPricer
    candidates: Candidates
    _shaped: dict[_Blocks, ShapeColumns] = field(default_factory=dict)
    _sums: dict[_Blocks, tuple[Floats, Floats]] = field(default_factory=dict)
    _rows: dict[_Blocks | _Chunk, list[Integers]] = field(default_factory=dict)
    _chunks: dict[_Chunk, ChunkColumns] = field(default_factory=dict)

    def expect(self, rows: Integers, stages: int, chunks: int) -> None:
        """Collect the chunks of the candidates in `rows`, before any is replayed."""
        for some, blocks in self._alike(stages, chunks):
            self._rows.setdefault(some, []).append(rows)
            for chunk in dict.fromkeys(_chunks_of(some, blocks)):
                self._rows.setdefault(chunk, []).append(rows)

    def kinds(self, rows: Integers, stages: int, chunks: int) -> Iterator[StageKind]:
        """Every kind of stage of the candidates in `rows`, all with as many stages and chunks."""
        for (some, blocks), numbers in self._alike(stages, chunks).items():
            communication, compute = self._stage(some)
            times = tuple(self._chunk(chunk).taken(rows) for chunk in _chunks_of(some, blocks))
            host = sum(one.host_s for one in times)
            yield StageKind(some.stage, tuple(numbers), blocks, communication[rows], compute[rows] + host, times)

    def _alike(self, stages: int, chunks: int) -> dict[tuple[_Blocks, tuple[int, ...]], list[int]]:
        """Numbers of the stages of each kind, and the blocks of its chunks."""
        split = split_layers(self.shapes.problem.model.layers, parts=stages * chunks)
        fewest, alike = min(split[1:-1], default=0), dict[tuple[_Blocks, tuple[int, ...]], list[int]]()
        uneven = chunks > 1 and len(set(split)) > 1
        for number in range(stages):
            stage = FIRST if number == 0 else LAST if number == stages - 1 else MIDDLE
            blocks = split[number::stages]
            fewer = not uneven and stage == MIDDLE and blocks[0] == fewest and fewest != max(split[1:-1])
            alike.setdefault((_Blocks(stage, fewer, sum(blocks) if uneven else 0), blocks), []).append(number)
        return alike

    def _stage(self, some: _Blocks) -> tuple[Floats, Floats]:
        if some not in self._sums:
            rows = np.concatenate(self._rows[some])
            found = np.full((2, len(self.candidates)), np.nan)
            found[:, rows] = self.pricer.sums(self.candidates.taken(rows), self._columns(some))
            self._sums[some] = found[0], found[1]
        return self._sums[some]

    def _chunk(self, chunk: _Chunk) -> ChunkColumns:
        """A chunk, of the candidates that are expected to have it."""
        if chunk not in self._chunks:
            columns, chunks = self._columns(chunk.some), self.shapes.chunks[self.shapes.piped]
            each = np.floor(np.asarray(columns.values["L"]) / chunks)
            layers = np.maximum(np.full(len(chunks), float(chunk.blocks)) if chunk.blocks else each, 1.0)
            rows = np.concatenate(self._rows[chunk])
            times = self.pricer.chunk(self.candidates.taken(rows), columns, chunk.part, layers=layers)
            self._chunks[chunk] = times.placed(rows, len(self.candidates))
        return self._chunks[chunk]

    def _columns(self, some: _Blocks) -> ShapeColumns:
        """Columns of a kind of stage."""
        if some not in self._shaped:
            one = self.shapes.stage_rows[(FIRST, MIDDLE, LAST).index(some.stage)]
            layers = np.full(len(one.layers), float(some.total)) if some.total else one.layers - float(some.fewer)
            layers = np.maximum(layers, 1.0)
            values = self.shapes.stage_values(replace(one, layers=layers))
            kept = np.minimum(self.fitting.kept_layers[self.shapes.piped], layers)
            self._shaped[some] = self.pricer.shapes({**values, "kept": kept, "unkept": layers - kept}, some.stage)
        return self._shaped[some]


def _strides(shapes: Shapes, candidates: Candidates) -> Integers:
    """Ranks between neighbouring stages of each candidate."""
    orders = shapes.problem.orders
    inside = [order[: order.index("pipeline")] == order[:-1] for order in orders]
    assert all(inside) or len(orders) == 1, "orders that are tried have the pipeline outermost"
    stride = np.ones(len(candidates), dtype=np.int64)
    for axis in orders[0][: orders[0].index("pipeline")]:
        stride *= shapes.sizes(axis)[candidates.shape]
    return stride


def _sends_s(shapes: Shapes, candidates: Candidates, routes: Sequence[GroupShape]) -> Floats:
    """Time of one message between stages of every candidate, s: the column version of `cost.stages`."""
    problem, strides = shapes.problem, _strides(shapes, candidates)
    options, schedule, machine = problem.framework.step, problem.framework.schedule, problem.machine
    axes = {
        axis: np.broadcast_to(np.asarray(shapes.values[axis]), len(shapes))[candidates.shape]
        for axis in ("x", "y", "context", "b")
    }
    call_s = seconds(software_on(problem.framework, machine).collective_us)
    tokens = axes["b"] * problem.workload.sequence_length / axes["context"]
    whole = problem.workload.element_sizes.compute * tokens * problem.model.hidden / axes["y"]
    split = options.sequence_parallel or schedule.scattered
    size, found = (whole / axes["x"] if split else whole), np.zeros(len(candidates))
    for stride in distinct(strides)[0].tolist():
        mine = strides == stride
        found[mine] = transfer_time_s(size[mine], stride=int(stride), machine=machine, call_s=call_s)
    if schedule.scattered and not options.sequence_parallel:
        over_x = candidates.routes["x"]
        for number in distinct(over_x)[0].tolist():
            mine = over_x == number
            path = route(routes[number], machine.tiers, problem.gpus)
            chosen = lines_of("all_gather", path, machine, call_s=call_s)
            pairs = tuple((line.latency_s, line.bandwidth_bytes_per_s) for line in chosen)
            found[mine] = found[mine] + collective_time_s(pairs, whole[mine], COLUMNS)
    return found
