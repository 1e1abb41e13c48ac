"""Candidates with pipeline stages, as columns: a bound on each step first, the exact step where it is asked for.

All stages of a candidate are one of a few kinds (first, last, those between with more or fewer blocks), each laid out
once. The bound is that of `cost.pipeline`, with computation slowed by communication beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from axonn_tune.cost.collectives import collective_time_s, lines_of, route, transfer_time_s
from axonn_tune.cost.columns import Candidates, ChunkColumns, ColumnPricer, Floats, Integers
from axonn_tune.cost.pipeline import StageTimes, pipeline_bound_s, pipeline_time, split_layers
from axonn_tune.cost.utilisation import contended_s
from axonn_tune.frameworks import software_on
from axonn_tune.grid import GroupShape, merged_shape
from axonn_tune.program.size import COLUMNS
from axonn_tune.program.step import Stage
from axonn_tune.ranking.space import FIRST, LAST, MIDDLE, Fitting, Problem, Shapes, StageRows, stage_rows, stage_values
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

    bound_s: least step; busy_s: what the stage that computes longest is not idle for; sends_s: of one message.
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
            end_s=stacked("end_s")[..., 0],
            activation_send_s=sends,
            gradient_send_s=sends,
            overlapped=self.overlapped,
        )

    def _by_stage(self) -> list[StageKind]:
        placed = {number: kind for kind in self.kinds for number in kind.numbers}
        return [placed[number] for number in range(self.stages)]

    def bound_s(self) -> tuple[Floats, Floats]:
        """Least step of every candidate, and what of it is computation lost to communication."""
        everything = np.arange(len(self.rows))
        scheduled = np.asarray(pipeline_bound_s(self.times(everything), micro_batches=self.micro_batches))
        lost = np.asarray(self._lost_s(self._busy_s()))
        return scheduled + lost, lost

    def _busy_s(self) -> Floats:
        """What the stage that computes longest is not idle for, with all its sends: at most."""
        compute = np.array([kind.compute_s for kind in self.kinds])
        busy = np.array([self._occupied_s(kind) for kind in self.kinds])
        found: Floats = np.take_along_axis(busy, compute.argmax(axis=0)[None], axis=0)[0]
        return found

    def _occupied_s(self, kind: StageKind) -> Floats:
        passes = sum(one.forward_s + one.backward_s for one in kind.times) * (self.micro_batches - 1.0)
        last = sum(one.forward_s + one.last_backward_s for one in kind.times) + kind.times[0].end_s
        return np.asarray(passes + last + 2.0 * self.chunks * self.micro_batches * self.sends_s)

    def _lost_s(self, busy_s: Floats) -> Floats:
        return np.asarray(contended_s(self.communication_s, self.alone_s, busy_s, contention=self.contention))

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
    problem: Problem,
    shapes: Shapes,
    fitting: Fitting,
    pricer: ColumnPricer,
    candidates: Candidates,
    *,
    strides: Integers,
    contention: float,
) -> Iterator[Pipelines]:
    """Price candidates whose shapes have several stages, those with as many stages and chunks together.

    strides: ranks between the stages of each candidate.
    """
    if not len(candidates):
        return
    piped = np.full(len(shapes), -1)
    piped[shapes.piped] = np.arange(len(shapes.piped))
    stages, chunks = shapes.stages[candidates.shape], shapes.chunks[candidates.shape]
    rows_of = stage_rows(problem, shapes)
    for count in np.unique(stages).tolist():
        for several in np.unique(chunks[stages == count]).tolist():
            rows = np.flatnonzero((stages == count) & (chunks == several))
            mine = Candidates(candidates.shape[rows], {axes: route[rows] for axes, route in candidates.routes.items()})
            sends = _sends_s(problem, shapes, mine, strides[rows])
            group = _Group(problem, shapes, fitting, pricer, rows_of, piped, count, several)
            kinds = tuple(group.kinds(mine))
            sent = 2.0 * several * np.asarray(shapes.values["A"])[mine.shape]
            communication = np.max(
                [kind.communication_s + sent * _boundaries(kind, count, several) * sends for kind in kinds], axis=0
            )
            schedule = problem.framework.schedule
            yield Pipelines(
                rows=rows,
                stages=count,
                chunks=several,
                micro_batches=np.asarray(shapes.values["A"])[mine.shape].astype(np.int64),
                kinds=kinds,
                sends_s=sends,
                overlapped=schedule.overlapped_interleaved if several > 1 else schedule.overlapped,
                contention=contention,
                communication_s=communication,
                alone_s=np.max([kind.compute_s for kind in kinds], axis=0),
            )


def _boundaries(kind: StageKind, stages: int, chunks: int) -> float:
    """Share of a stage's passes that end in a message: not the last part's forward, nor the first part's backward."""
    first, last = 0 in kind.numbers, stages - 1 in kind.numbers
    return 1.0 - (float(first) + float(last)) / (2.0 * chunks)


@dataclass(frozen=True)
class _Group:
    """Candidates with as many stages and chunks, and what prices them."""

    problem: Problem
    shapes: Shapes
    fitting: Fitting
    pricer: ColumnPricer
    rows: tuple[StageRows, ...]
    piped: Integers
    stages: int
    chunks: int

    def kinds(self, candidates: Candidates) -> Iterator[StageKind]:
        """Every kind of stage."""
        parts = split_layers(self.problem.model.layers, parts=self.stages * self.chunks)
        alike: dict[tuple[Stage, tuple[int, ...]], list[int]] = {}
        for number in range(self.stages):
            stage = FIRST if number == 0 else LAST if number == self.stages - 1 else MIDDLE
            alike.setdefault((stage, parts[number :: self.stages]), []).append(number)
        for (stage, blocks), numbers in alike.items():
            yield self._kind(candidates, stage, blocks, tuple(numbers))

    def _kind(
        self, candidates: Candidates, stage: Stage, blocks: tuple[int, ...], numbers: tuple[int, ...]
    ) -> StageKind:
        place = (FIRST, MIDDLE, LAST).index(stage)
        layers = float(sum(blocks))
        at = self.piped[candidates.shape]
        one = replace(self.rows[place], layers=np.full(len(self.shapes.piped), layers))
        values = stage_values(self.problem, self.shapes, one)
        kept = np.minimum(self.fitting.stages[place], layers)
        values = {**values, "kept": kept, "unkept": layers - kept, "L": layers}
        mine = Candidates(at, candidates.routes)
        communication, compute = self.pricer.sums(mine, values, stage)
        known: dict[tuple[Stage, int], ChunkColumns] = {}
        times = []
        for number, count in enumerate(blocks):
            part = Stage(stage.first and number == 0, stage.last and number == len(blocks) - 1)
            if (part, count) not in known:
                known[part, count] = self.pricer.chunk(mine, values, part, stage, layers=count)
            times.append(known[part, count])
        host = sum(one.host_s for one in times)
        return StageKind(stage, numbers, blocks, communication, compute + host, tuple(times))


def _sends_s(problem: Problem, shapes: Shapes, candidates: Candidates, strides: Integers) -> Floats:
    """Time of one message between stages of every candidate, s: the twin of `cost.stages`."""
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
    for stride in np.unique(strides).tolist():
        mine = strides == stride
        found[mine] = transfer_time_s(size[mine], stride=int(stride), machine=machine, call_s=call_s)
    if schedule.scattered and not options.sequence_parallel:
        for width in np.unique(axes["x"]).tolist():
            mine = axes["x"] == width
            shape: GroupShape = merged_shape([(int(width), 1)])
            chosen = lines_of("all_gather", route(shape, machine.tiers, problem.gpus), machine, call_s=call_s)
            pairs = tuple((line.latency_s, line.bandwidth_bytes_per_s) for line in chosen)
            found[mine] = found[mine] + collective_time_s(pairs, whole[mine], COLUMNS)
    return found
