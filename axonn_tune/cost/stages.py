"""Pipelines, priced, one candidate or many: each kind of stage once, joined by 1F1B or interleaved 1F1B.

The step is that of `cost.pipeline`, exact or bounded, with compute slowdown from overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from axonn_tune.cost.collectives import collective_time_s, lines_of, route, transfer_time_s
from axonn_tune.cost.columns import Floats, Integers
from axonn_tune.cost.compute import contended_s
from axonn_tune.cost.pipeline import PipelineTime, StageTimes, pipeline_bound_s, pipeline_time
from axonn_tune.cost.replay import ChunkTimes
from axonn_tune.frameworks.description import Framework, PipelineSchedule
from axonn_tune.grid import GroupShape
from axonn_tune.program.size import Arithmetic, Value
from axonn_tune.program.step import Stage
from axonn_tune.specs.machine import Machine, Software
from axonn_tune.units import seconds


def stages_alike(parts: tuple[int, ...], stages: int) -> dict[tuple[Stage, tuple[int, ...]], list[int]]:
    """Stages that are alike: their place and the blocks of their chunks, with their numbers.

    parts: blocks of each model part, chunk c of stage s at c·p + s.
    """
    found: dict[tuple[Stage, tuple[int, ...]], list[int]] = {}
    for number in range(stages):
        stage = Stage(number == 0, number == stages - 1)
        found.setdefault((stage, parts[number::stages]), []).append(number)
    return found


def chunks_of(stage: Stage, blocks: tuple[int, ...]) -> Iterator[tuple[Stage, int]]:
    """Each chunk of a stage: what it has beside blocks, embedding or LM head, and its number of blocks."""
    for number, count in enumerate(blocks):
        yield Stage(stage.first and number == 0, stage.last and number == len(blocks) - 1), count


def stage_end_s(chunks: Sequence[ChunkTimes], *, stages: int) -> Any:  # noqa: ANN401 - number or column
    """From a stage's last operation to its end, s.

    The last chunk's gradient buckets go out first. Buckets of a chunk in flight when its last backward pass ends
    overlap with the next chunk's passes before its own last one, then delay that chunk's buckets.
    """
    left: Any = 0.0
    carried: Any = 0.0
    for chunk in reversed(chunks):
        left = np.maximum(0.0, carried - (stages - 1) * chunk.backward_s)
        carried = chunk.data_s + left
    return chunks[0].end_s + left


@dataclass(frozen=True)
class StageKind:
    """Stages that are alike: their numbers, and seconds of one: collectives, computation, passes of each chunk."""

    numbers: list[int]
    communication_s: Floats
    compute_s: Floats
    times: tuple[ChunkTimes, ...]


@dataclass(frozen=True)
class Pipelines:
    """Candidates with as many stages and chunks: all columns have one row each.

    send_s: of one message; alone_s: computation of the stage that computes longest.
    """

    stages: int
    chunks: int
    micro_batches: Integers
    kinds: tuple[StageKind, ...]
    send_s: Floats
    overlapped: bool
    contention: float

    def __len__(self) -> int:
        return len(self.micro_batches)

    def sent_s(self, kind: StageKind) -> Floats:
        """All messages of a stage: each pass ends in one, but the last part's forward and the first part's backward."""
        ends = float(0 in kind.numbers) + float(self.stages - 1 in kind.numbers)
        sent = 2.0 * self.chunks * self.micro_batches.astype(np.float64) * self.send_s
        return np.asarray(sent * (1.0 - ends / (2.0 * self.chunks)))

    @cached_property
    def communication_s(self) -> Floats:
        """All communication of the stage that has most, s."""
        found: Floats = np.max([kind.communication_s + self.sent_s(kind) for kind in self.kinds], axis=0)
        return found

    @cached_property
    def alone_s(self) -> Floats:
        """Computation of the stage that computes longest, s."""
        found: Floats = np.max([kind.compute_s for kind in self.kinds], axis=0)
        return found

    @cached_property
    def _by_stage(self) -> list[StageKind]:
        placed = {number: kind for kind in self.kinds for number in kind.numbers}
        return [placed[number] for number in range(self.stages)]

    def times(self, at: Integers | int) -> StageTimes:
        """Durations of the stages of some candidates, or of one."""

        def stacked(name: str) -> Floats:
            columns = [[getattr(one, name)[at] for one in kind.times] for kind in self._by_stage]
            return np.moveaxis(np.array(columns, dtype=np.float64), (0, 1), (-2, -1))

        sent_s = np.asarray(self.send_s[at])
        sends = np.broadcast_to(sent_s[..., None], (*sent_s.shape, self.stages))
        return StageTimes(
            forward_s=stacked("forward_s"),
            backward_s=stacked("backward_s"),
            last_backward_s=stacked("last_backward_s"),
            end_s=np.moveaxis(np.array([self._end_s(kind)[at] for kind in self._by_stage]), 0, -1),
            activation_send_s=sends,
            gradient_send_s=sends,
            overlapped=self.overlapped,
        )

    def _end_s(self, kind: StageKind) -> Floats:
        return np.asarray(stage_end_s(kind.times, stages=self.stages))

    def bound_s(self) -> tuple[Floats, Floats, Floats]:
        """Bounds of all candidates: least step, its compute slowdown, and bubble with least exposed communication."""
        everything = np.arange(len(self))
        scheduled = np.asarray(pipeline_bound_s(self.times(everything), micro_batches=self.micro_batches))
        busy = self._busy_s()
        # A message exposes at most its own time where it is sent and where it is waited for.
        occupied = busy + 4.0 * self.chunks * self.micro_batches * self.send_s
        lost_s = contended_s(self.communication_s, self.alone_s, occupied, contention=self.contention)
        lost = np.broadcast_to(np.asarray(lost_s), occupied.shape)
        return scheduled + lost, lost, np.maximum(scheduled - np.maximum(busy, self.alone_s), 0.0)

    def floor_s(self) -> tuple[Floats, Floats]:
        """Least step of the same stages cut into any number of chunks, and its least exposed communication, s.

        The passes of the stage with the most computation, back to back, and the end of its step without waiting for
        gradients, which may be reduced behind another chunk.
        """
        busy = [
            sum(
                (one.forward_s + np.minimum(one.backward_s, one.last_backward_s)) * self.micro_batches
                for one in kind.times
            )
            + kind.times[0].end_s
            - kind.times[0].data_s
            for kind in self.kinds
        ]
        compute = np.array([kind.compute_s for kind in self.kinds])
        found: Floats = np.take_along_axis(np.array(busy), compute.argmax(axis=0)[None], axis=0)[0]
        return found, np.maximum(found - self.alone_s, 0.0)

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

    def price(self, position: int) -> tuple[PipelineTime, int, float]:
        """One candidate by the recurrence: its time, the stage that computes longest, and its wait for others, s."""
        time = pipeline_time(self.times(position), micro_batches=int(self.micro_batches[position]))
        slowest = max(self.kinds, key=lambda kind: kind.compute_s[position]).numbers[0]
        return time, slowest, min(time.bubble_s[slowest], max(0.0, time.step_s - float(self.alone_s[position])))

    def exact_s(self, position: int) -> tuple[float, float, float]:
        """Step of one candidate, its computation and its bubble, s."""
        time, _, bubble_s = self.price(position)
        sent_s, alone_s = float(self.communication_s[position]), float(self.alone_s[position])
        lost_s = float(contended_s(sent_s, alone_s, time.step_s - bubble_s, contention=self.contention))
        return time.step_s + lost_s, alone_s + lost_s, bubble_s


@dataclass(frozen=True)
class Messages:
    """Activations and gradients between stages.

    scattered: each rank of x sends its share, which is gathered again where it arrives; call_s: software overhead.
    """

    scattered: bool
    machine: Machine
    world: int
    call_s: float

    @classmethod
    def of(cls, framework: Framework, machine: Machine, world: int, software: Software) -> Messages:
        """Those of a framework; with sequence parallelism there is no more than a share to send."""
        scattered = framework.schedule.scattered and not framework.step.sequence_parallel
        return cls(scattered, machine, world, seconds(software.collective_us))

    def send_s(
        self, size_bytes: Value, whole_bytes: Value, *, stride: int, over_x: GroupShape, arithmetic: Arithmetic
    ) -> Value:
        """Time of one message to the rank at distance `stride`, s; whole_bytes: what is gathered again over x."""
        sent_s = transfer_time_s(size_bytes, stride=stride, machine=self.machine, call_s=self.call_s)
        if not self.scattered:
            return sent_s
        path = route(over_x, self.machine.tiers, self.world)
        chosen = lines_of("all_gather", path, self.machine, call_s=self.call_s)
        pairs = tuple((line.latency_s, line.bandwidth_bytes_per_s) for line in chosen)
        return sent_s + collective_time_s(pairs, whole_bytes, arithmetic)


def overlapped(schedule: PipelineSchedule, chunks: int) -> bool:
    """Whether sends of so many chunks a stage overlap with computation."""
    return schedule.overlapped_interleaved if chunks > 1 else schedule.overlapped
