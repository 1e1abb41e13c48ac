"""Step times of published rows under many sets of numbers at once: a row of an array is a case, a column a set.

A fit asks for the same steps again and again, with other numbers of software and accelerator. What does not depend on
them is worked out once: sizes, routes, collectives but for what software adds to
each. Chunks and steps that share a program and streams are replayed together, by the replay of the search.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from axonn_tune.cost.compute import ComputeClock, ComputeRates, exposed_s, lost_s, rate_of_matmul
from axonn_tune.cost.pipeline import StageTimes, gathers_messages, overlapped, pipeline_time, stage_end_s
from axonn_tune.cost.pricer import Pricer
from axonn_tune.cost.replay import ChunkTimes, Replay, StageWork
from axonn_tune.frameworks.description import FUSED
from axonn_tune.program.operations import COLUMNS, Collective, MatMul, Value
from axonn_tune.program.schedule import StepSchedule
from axonn_tune.program.step import ONLY, Contents, Stage, StepProgram, blocks_in, chunks_of
from axonn_tune.specs.machine import Accelerator
from axonn_tune.validation.published.cases import Case
from tools.fit.fitting import Floats


@dataclass(frozen=True)
class Setting:
    """One set of numbers: rates of the accelerator under some software, and what that adds to each collective."""

    rates: ComputeRates
    call_s: float


class PublishedSteps:
    """Cases of one configuration each, laid out and ready to be priced."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._groups: dict[Hashable, _Group] = {}
        self._candidates = [self._laid_out(number, case) for number, case in enumerate(cases)]

    def _laid_out(self, number: int, case: Case) -> _Candidate:
        (one,) = case.configurations
        pricer = Pricer(case.problem, one, FUSED)
        return (_Whole if pricer.grid.pipeline == 1 else _Pipelined)(number, pricer, self._groups)

    def step_s(self, settings: Sequence[Sequence[Setting]]) -> Floats:
        """Steps, s: a row for each case, a column for each of its sets; each case has as many as the others."""
        numbers = _Numbers(settings)
        for group in self._groups.values():
            group.price(numbers)
        return np.array([one.step_s(numbers) for one in self._candidates])


@dataclass(frozen=True)
class _Stage:
    """One pipeline stage, without prices."""

    stage: Stage
    blocks: tuple[Contents, ...]
    values: dict[str, float]


def _stages(pricer: Pricer) -> Iterator[_Stage]:
    parts, stages = pricer.contents, pricer.grid.pipeline
    for number in range(stages):
        stage = Stage(number == 0, number == stages - 1)
        yield _Stage(stage, parts[number::stages], pricer.settled_stage(number)[0])


class _Numbers:
    """Sets of numbers of every case as arrays, and those of some cases."""

    def __init__(self, settings: Sequence[Sequence[Setting]]) -> None:
        self.settings = settings
        self.call_s = np.array([[one.call_s for one in own] for own in settings])
        self.contention = np.array([[one.rates.contention for one in own] for own in settings])

    def rates(self, cases: Sequence[int]) -> ComputeRates:
        """Rates of a group's cases; numbers that differ are arrays."""
        found: ComputeRates = _column([[one.rates for one in self.settings[case]] for case in cases])
        return found


def _column(values: list[list[Any]]) -> Any:  # noqa: ANN401 - a number, an array, or what holds them
    """Values of a group's cases, element by element; what is no number is that of the first, as of all."""
    first = values[0][0]
    if isinstance(first, dict):
        return {key: _column([[one[key] for one in own] for own in values]) for key in first}
    if isinstance(first, tuple):
        return tuple(_column([[one[at] for one in own] for own in values]) for at in range(len(first)))
    if is_dataclass(first) and not isinstance(first, type):
        names = [each.name for each in fields(first)]
        return replace(
            first, **{name: _column([[getattr(one, name) for one in own] for own in values]) for name in names}
        )
    if type(first) is not float or all(one == first for own in values for one in own):
        return first
    return np.array(values)


def _kinds(value: Any) -> Hashable:  # noqa: ANN401 - rates, or what they hold
    """What of rates is no number, which the cases of a group share; of an accelerator its name."""
    if isinstance(value, dict):
        return tuple((key, _kinds(one)) for key, one in value.items())
    if isinstance(value, tuple):
        return tuple(map(_kinds, value))
    if is_dataclass(value) and not isinstance(value, type):
        return tuple(_kinds(getattr(value, each.name)) for each in fields(value))
    if isinstance(value, Accelerator):
        return value.name
    return None if type(value) is float else value


class _Clock(ComputeClock):
    """Durations as arrays; those of unaligned GEMMs, which are few, one by one."""

    def rate_of(self, step: MatMul) -> float:
        if step.narrow:
            return self.rates.format_flops_per_s[step.layout]
        aligned = step.alignment >= 16
        if aligned or step.batched:
            rates = self.rates.matmul_flops_per_s if aligned else self.rates.vector_fp32_flops_per_s
            return rates[step.layout]
        matrix, vector = self.rates.matmul_flops_per_s[step.layout], self.rates.vector_flops_per_s[step.layout]
        return cast(float, _between(np.asarray(matrix), np.asarray(vector), step, self.element_bytes))


def _between(matrix: Floats, vector: Floats, step: MatMul, element_bytes: float) -> Floats:
    """`rate_of_matmul`, element by element."""
    found = np.empty_like(matrix)
    for place in np.ndindex(matrix.shape):
        rates = _TwoRates({step.layout: float(matrix[place])}, {step.layout: float(vector[place])})
        found[place] = rate_of_matmul(
            step.layout,
            element_bytes=element_bytes,
            alignment=step.alignment,
            batched=False,
            rates=cast(ComputeRates, rates),
        )
    return found


@dataclass(frozen=True)
class _TwoRates:
    matmul_flops_per_s: Mapping[str, float]
    vector_flops_per_s: Mapping[str, float]


@dataclass
class _Group:
    """What is priced together: a stage of cases with one program and the same streams.

    chunk: what the chunk to be replayed has beside blocks, None for all of a step without pipeline stages.
    """

    program: StepProgram
    schedule: StepSchedule
    streams: Mapping[str, Sequence[int]]
    tiers: int
    element: float
    stage: Stage
    chunk: Stage | None
    cases: list[int] = field(default_factory=list)
    values: list[Mapping[str, float]] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    replays: list[Replay] = field(default_factory=list)
    found: dict[str, Floats] = field(default_factory=dict)
    _bare_s: dict[Collective, Floats] = field(default_factory=dict)

    def add(self, case: int, values: Mapping[str, float], blocks: int, replay: Replay) -> int:
        """Add a row; returns its number."""
        assert not values["kept"], "published rows keep no gathered weights"
        self.cases.append(case)
        self.values.append(values)
        self.blocks.append(blocks)
        self.replays.append(replay)
        return len(self.cases) - 1

    @cached_property
    def columns(self) -> dict[str, Value]:
        """Symbols as columns."""
        return {name: np.array([[own[name]] for own in self.values]) for name in self.values[0]}

    def bare_s(self, collective: Collective) -> Floats:
        """What a call takes without software."""
        if collective not in self._bare_s:
            self._bare_s[collective] = np.array([[replay.call_s(collective)] for replay in self.replays])
        return self._bare_s[collective]

    def price(self, numbers: _Numbers) -> None:
        """Work out durations under other numbers."""
        cases = np.array(self.cases)
        clock = _Clock(numbers.rates(self.cases), self.element, self.columns, COLUMNS)
        replay = _RowReplay(self, StageWork(clock, self.program, self.schedule, self.stage), numbers.call_s[cases])
        if self.chunk is None or self.chunk == self.stage:
            self.found |= {"computed": np.asarray(replay.work.compute_s), "sent": np.asarray(replay.communication_s())}
        layers = np.array(self.blocks, dtype=np.float64)[:, None]
        times = replay.step_s() if self.chunk is None else replay.chunk(self.chunk, ((0, layers),))
        names = ("scheduled", "host") if self.chunk is None else _CHUNK
        # None of these steps runs passes of two micro-batches beside each other, which saves nothing then.
        self.found |= {name: np.asarray(one) for name, one in zip(names, times, strict=False)}
        shape = numbers.call_s[cases].shape
        self.found = {name: np.broadcast_to(column, shape) for name, column in self.found.items()}


class _RowReplay(Replay):
    """The replay of a group: a row for each of its cases, a column for each set of numbers."""

    def __init__(self, group: _Group, work: StageWork, call_s: Floats) -> None:
        super().__init__(
            work,
            streams=group.streams,
            lines=lambda *_: (),
            several=lambda axes: float(bool(group.streams[axes])),
            tiers=group.tiers,
        )
        self._group, self._software_s = group, call_s

    def call_s(self, collective: Collective) -> Value:
        return self._group.bare_s(collective) + self._software_s


@dataclass(frozen=True)
class _Row:
    """A row of a group."""

    group: _Group
    number: int

    def __getitem__(self, name: str) -> Floats:
        column: Floats = self.group.found[name][self.number]
        return column


def _join(
    groups: dict[Hashable, _Group],
    case: int,
    pricer: Pricer,
    values: dict[str, float],
    stage: Stage,
    chunk: Stage | None,
    blocks: int,
) -> _Row:
    """A row in the group it belongs to."""
    replay = pricer.replay(values, stage)
    streams = tuple(replay.streams[axes] for axes in pricer.program.groups)
    key = id(pricer.program), streams, replay.tiers, stage, chunk, _kinds(pricer.rates)
    if key not in groups:
        element = float(pricer.element)
        groups[key] = _Group(pricer.program, pricer.schedule, replay.streams, replay.tiers, element, stage, chunk)
    return _Row(groups[key], groups[key].add(case, values, blocks, replay))


class _Candidate:
    """One configuration of a case."""

    def __init__(self, case: int, pricer: Pricer, groups: dict[Hashable, _Group]) -> None:
        self.case, self.pricer = case, pricer
        self._lay_out(groups)

    def _lay_out(self, groups: dict[Hashable, _Group]) -> None:
        raise NotImplementedError

    def step_s(self, numbers: _Numbers) -> Floats:
        """Its step under each set of numbers, s."""
        raise NotImplementedError

    def _contended(
        self, numbers: _Numbers, scheduled_s: Floats, busy_s: Floats, sent_s: Floats, own_s: Floats
    ) -> Floats:
        """The step with what computation loses to communication beside it, s."""
        hidden_s = sent_s - exposed_s(busy_s, own_s)
        return np.asarray(scheduled_s + lost_s(hidden_s, own_s, contention=numbers.contention[self.case]))


class _Whole(_Candidate):
    """Without pipeline stages."""

    def _lay_out(self, groups: dict[Hashable, _Group]) -> None:
        values, _ = self.pricer.settled_stage(0)
        self.row = _join(groups, self.case, self.pricer, values, ONLY, None, self.pricer.model.layers)

    def step_s(self, numbers: _Numbers) -> Floats:
        scheduled_s = self.row["scheduled"]
        return self._contended(
            numbers, scheduled_s, scheduled_s, self.row["sent"], self.row["computed"] + self.row["host"]
        )


class _Pipelined(_Candidate):
    """With pipeline stages: the recurrence is evaluated for one set after the other."""

    def _lay_out(self, groups: dict[Hashable, _Group]) -> None:
        self.stages: list[list[_Row]] = []
        known: dict[Hashable, list[_Row]] = {}
        for one in _stages(self.pricer):
            key = one.stage, one.blocks
            if key not in known:
                known[key] = list(self._chunks(one, groups))
            self.stages.append(known[key])
        self.micro_batches = int(one.values["A"])

    def _chunks(self, one: _Stage, groups: dict[Hashable, _Group]) -> Iterator[_Row]:
        known: dict[Hashable, _Row] = {}
        for chunk, count in chunks_of(one.stage, one.blocks):
            if (chunk, count) not in known:
                known[chunk, count] = _join(
                    groups, self.case, self.pricer, one.values, one.stage, chunk, blocks_in(count)
                )
            yield known[chunk, count]

    def step_s(self, numbers: _Numbers) -> Floats:
        return np.array([self._one_s(numbers, place) for place in range(len(numbers.settings[self.case]))])

    def _one_s(self, numbers: _Numbers, place: int) -> float:
        def table(name: str) -> Floats:
            return np.array([[float(row[name][place]) for row in rows] for rows in self.stages])

        calls = 2 if gathers_messages(self.pricer.framework) and self.pricer.grid.x > 1 else 1
        sends_s = self.pricer.send[2] + calls * float(numbers.call_s[self.case][place])
        times = StageTimes(
            forward_s=table("forward"),
            backward_s=table("backward"),
            last_backward_s=table("last"),
            end_s=np.array([self._end_s(rows, place) for rows in self.stages]),
            send_s=np.full(len(self.stages), sends_s),
            overlapped=overlapped(self.pricer.framework.schedule, self.pricer.layout.chunks),
        )
        time = pipeline_time(times, micro_batches=self.micro_batches)
        computed = [
            _of_stage(rows, "computed", place) + sum(float(row["host"][place]) for row in rows) for rows in self.stages
        ]
        sent = [
            _of_stage(rows, "sent", place) + count * sends_s
            for rows, count in zip(self.stages, time.sends, strict=True)
        ]
        slowest = max(range(len(computed)), key=computed.__getitem__)
        bubble_s = min(time.bubble_s[slowest], max(0.0, time.step_s - computed[slowest]))
        hidden_s = max(sent) - float(exposed_s(time.step_s - bubble_s, computed[slowest]))
        contention = float(numbers.contention[self.case][place])
        return time.step_s + float(lost_s(hidden_s, computed[slowest], contention=contention))

    def _end_s(self, rows: list[_Row], place: int) -> float:
        chunks = [ChunkTimes(*(float(row[name][place]) for name in _CHUNK)) for row in rows]
        return float(stage_end_s(chunks, stages=len(self.stages)))


_CHUNK = ("forward", "backward", "last", "end", "data", "host")
"""Names of a chunk's columns, in the order of `ChunkTimes`."""


def _of_stage(rows: list[_Row], name: str, place: int) -> float:
    """A sum over a stage's step, which one of its chunks' groups has."""
    return next(float(row[name][place]) for row in rows if name in row.group.found)
