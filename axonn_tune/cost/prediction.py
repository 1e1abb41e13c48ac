"""Price of one candidate in plain Python: the reference for `columns`, with every term.

`columns` ranks. This module explains, writes launch configs and traces, predicts published steps, and agrees with
`columns` to the last bit. All frameworks share the program and the schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial, reduce
from typing import TYPE_CHECKING

from axonn_tune.cost.collectives import Line, collective_time_s, lines_of, route
from axonn_tune.cost.compute import ComputeClock, ComputeRates, compute_rates, compute_s
from axonn_tune.cost.timeline import Batch, TermKey, Timeline
from axonn_tune.cost.utilisation import contended_s, exposed_s
from axonn_tune.frameworks import software_on, step_on
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.description import Framework, StepOptions
from axonn_tune.grid import Grid
from axonn_tune.program.dimensions import executed_flops, symbol_values, table_alignment
from axonn_tune.program.memory import Memory, memory_limit_bytes, price_memory
from axonn_tune.program.operations import MATRIX_ALIGNMENT, Collective, OpKind
from axonn_tune.program.schedule import StepSchedule, build_schedule
from axonn_tune.program.size import PLAIN
from axonn_tune.program.step import ONLY, Stage, StepProgram, build_step
from axonn_tune.specs.machine import Machine, Software
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Recompute, Workload
from axonn_tune.units import seconds

if TYPE_CHECKING:
    from axonn_tune.specs.launch import StepShape


@dataclass(frozen=True)
class Configuration:
    """One candidate: grid with rank order, micro-batch, recompute; layers not resharded: None for as many as fit.

    chunks: of each pipeline stage; parts: blocks of each chunk, model part c·p + s at that place; None: an even split.
    """

    grid: Grid
    micro_batch: int
    recompute: Recompute
    kept_layers: int | None = None
    chunks: int = 1
    parts: tuple[int, ...] | None = None

    @classmethod
    def of(cls, one: StepShape) -> Configuration:
        """That of a launch config, or of a measured configuration."""
        return cls(one.grid.grid(), one.micro_batch, one.recompute, one.kept_layers, one.chunks, one.parts)


@dataclass(frozen=True)
class Term:
    """All calls of one collective in a step of one rank, by any cost model: seconds = count · time of one call.

    bytes: the full (gathered or reduced) buffer of one call, `formula` as symbols; line: algorithm and protocol that
    the library uses; exposed_s is nan if the cost model has none.
    """

    op: str
    axis: str
    phase: str
    layer: str
    count: int
    bytes: float
    group: int
    tier: str
    seconds: float
    exposed_s: float
    formula: str
    line: Line
    collective: Collective


@dataclass(frozen=True)
class StagePrediction:
    """One pipeline stage: its blocks, seconds of a step, and memory of a rank."""

    blocks: int
    compute_s: float
    communication_s: float
    bubble_s: float
    memory: Memory


@dataclass(frozen=True)
class Pricing:
    """Everything predicted of one candidate; seconds and bytes per step and rank.

    For a pipeline it is the stage with the most communication, `stage`; memory is that of the largest stage. alone_s,
    scheduled_s: computation and end of the step without compute slowdown from overlap; computation includes host_s, the
    accelerator's wait for its host. bubble_s: wait for other stages of the stage with the most computation, to which
    `computing` belongs: its kind, and the values of its symbols.
    """

    framework: Framework
    configuration: Configuration
    accumulation: int
    memory: Memory
    memory_limit_bytes: float
    terms: tuple[Term, ...]
    alone_s: float
    scheduled_s: float
    executed_flops: float
    values: dict[str, float]
    program: StepProgram
    rates: ComputeRates
    host_s: float = 0.0
    bubble_s: float = 0.0
    stages: tuple[StagePrediction, ...] = ()
    stage: int = 0
    computing: tuple[Stage, dict[str, float]] | None = field(default=None, compare=False, repr=False)
    record: Callable[[], tuple[Batch, ...]] = field(default=tuple, compare=False, repr=False)

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """Every operation of the schedule, from a second replay, since few callers need it."""
        return self.record()

    @cached_property
    def communication_s(self) -> float:
        """All communication, overlapped or not, s."""
        return reduce(lambda total, term: total + term.seconds, self.terms, 0.0)

    @cached_property
    def contended_s(self) -> float:
        """Compute slowdown from overlap, s."""
        busy_s = self.scheduled_s - self.bubble_s
        lost_s = contended_s(self.communication_s, self.alone_s, busy_s, contention=self.rates.contention)
        return float(lost_s)

    @property
    def compute_s(self) -> float:
        """Computation of the step, s."""
        return self.alone_s + self.contended_s

    @property
    def iteration_s(self) -> float:
        """Time of the step, s."""
        return self.scheduled_s + self.contended_s

    @property
    def exposed_communication_s(self) -> float:
        """Exposed communication of the step, the bubble excluded, s."""
        return float(exposed_s(self.iteration_s - self.bubble_s, self.compute_s))


def price_configuration(
    model: Model,
    machine: Machine,
    workload: Workload,
    configuration: Configuration,
    *,
    framework: Framework = AXONN_TUNE,
    software: Software | None = None,
) -> Pricing:
    """Price one candidate by the alpha-beta model, as `framework` trains it.

    software: numbers of kernels and host, those of the framework unless given. The candidate must satisfy the
    divisibility constraints; the caller checks whether it fits into memory.
    """
    used = software_on(framework, machine) if software is None else software
    pricer = _Pricer(model, machine, workload, configuration, framework, used)
    return pricer.whole() if configuration.grid.pipeline == 1 else pricer.pipelined()


_SIZES = ("layers", "hidden", "heads", "ffn", "vocab", "max_sequence_length")
_SYMBOLIC_MODEL = dict.fromkeys(_SIZES, 1) | {"name": "", "description": "", "source": "", "defaults": None}
_SYMBOLIC_WORKLOAD = {"global_batch": 1, "sequence_length": 1}
"""Model and workload without the fields that no program depends on."""


@lru_cache(maxsize=256)
def _program(
    model: Model, workload: Workload, recompute: Recompute, options: StepOptions, *, context: bool, alignment: int
) -> tuple[StepProgram, StepSchedule]:
    """Program and schedule, built once for all candidates that share them: sizes and batch are symbols in both."""
    program = build_step(
        model, workload, recompute=recompute, options=options, context=context, table_alignment=alignment
    )
    stages = tuple(Stage(first, last) for first in (True, False) for last in (True, False))
    schedule = build_schedule(program, overlaps=workload.overlaps, split=workload.split_micro_batch, stages=stages)
    return program, schedule


class _Pricer:
    """Prices one candidate."""

    def __init__(
        self,
        model: Model,
        machine: Machine,
        workload: Workload,
        configuration: Configuration,
        framework: Framework,
        software: Software,
    ) -> None:
        self.model, self.machine, self.workload = model, machine, workload
        self.configuration, self.framework, self.grid = configuration, framework, configuration.grid
        self.options = step_on(framework, machine)
        self.rates = compute_rates(machine.accelerator, workload.precision, software)
        self.call_s = seconds(software.collective_us)
        self.element = workload.element_sizes.compute
        self.program, self.schedule = _program(
            model.model_copy(update=_SYMBOLIC_MODEL),
            workload.model_copy(update=_SYMBOLIC_WORKLOAD),
            configuration.recompute,
            self.options,
            context=configuration.grid.context > 1,
            alignment=self._alignment(),
        )

    def _alignment(self) -> int:
        """Alignment of rows of logits; it depends on the grid only if the vocabulary is not padded."""
        if self.options.vocabulary_multiple != 0:
            return MATRIX_ALIGNMENT
        rows = self._symbols(ONLY, None)["V"]
        split = self.grid.x * self.grid.y
        return table_alignment(self.model, rows, split=split, element=self.element, options=self.options)

    def _symbols(self, stage: Stage, layers: int | None) -> dict[str, float]:
        return symbol_values(
            self.model,
            self.workload,
            self.grid,
            micro_batch=self.configuration.micro_batch,
            options=self.options,
            stage=stage,
            layers=layers,
        )

    def settled(
        self,
        stage: Stage,
        layers: int | None = None,
        held: float | None = None,
        *,
        kept_layers: float | None = None,
    ) -> tuple[dict[str, float], Memory]:
        """Values of all symbols of a stage, and the memory that decides how many blocks keep their gathered weights."""
        values = self._symbols(stage, layers)
        values["held"] = values["L"] if held is None else held
        asked = self.configuration.kept_layers if kept_layers is None else kept_layers
        memory = price_memory(
            self.program,
            values,
            limit_bytes=memory_limit_bytes(self.machine.accelerator),
            arithmetic=PLAIN,
            kept_layers=None if asked is None else min(float(asked), values["L"]),
            stage=stage,
        )
        kept = float(memory.kept_layers)
        return {**values, "kept": kept, "unkept": values["L"] - kept}, memory

    def priced(
        self, values: dict[str, float], *, recording: bool = False
    ) -> tuple[ComputeClock, _CollectivePrices, Timeline]:
        """Prices of computations and collectives for given symbols, and the replay that uses both."""
        clock = ComputeClock(self.rates, float(self.element), values, PLAIN)
        prices = _CollectivePrices(self.machine, self.grid, values, self.program, self.call_s)
        timeline = Timeline(
            values=values,
            run_s=lambda step: float(clock.run_s(step)),
            collective_s=prices.scheduled_s,
            lane=prices.lane,
            lane_names=tuple(tier.name for tier in self.machine.tiers),
            dispatch_s=self.rates.dispatch_s,
            recording=recording,
        )
        return clock, prices, timeline

    def whole(self) -> Pricing:
        """A candidate without pipeline stages."""
        values, memory = self.settled(ONLY)
        clock, prices, timeline = self.priced(values)
        scheduled_s = self._replay(timeline, values)
        return Pricing(
            framework=self.framework,
            configuration=self.configuration,
            accumulation=int(values["A"]),
            memory=memory,
            memory_limit_bytes=memory_limit_bytes(self.machine.accelerator),
            terms=prices.terms(self.program, timeline.exposed_s),
            alone_s=float(compute_s(self.program, clock)) + timeline.host_s,
            scheduled_s=scheduled_s,
            executed_flops=float(executed_flops(self.program, values)),
            values=values,
            program=self.program,
            rates=self.rates,
            host_s=timeline.host_s,
            record=partial(self._record, values),
        )

    def _replay(self, timeline: Timeline, values: dict[str, float]) -> float:
        return timeline.step_s(
            self.schedule, layers=self.model.layers, kept=int(values["kept"]), accumulation=int(values["A"])
        )

    def _record(self, values: dict[str, float]) -> tuple[Batch, ...]:
        """A second replay that records every interval."""
        timeline = self.priced(values, recording=True)[2]
        self._replay(timeline, values)
        return tuple(timeline.batches)

    def pipelined(self) -> Pricing:
        """A candidate of several pipeline stages."""
        # Imported here: most searches have no pipeline.
        from axonn_tune.cost.stages import price_stages

        return price_stages(self)


class _CollectivePrices:
    """Prices the collectives of one candidate, each once."""

    def __init__(
        self, machine: Machine, grid: Grid, values: dict[str, float], program: StepProgram, call_s: float
    ) -> None:
        self._values = values
        self._machine = machine
        self._call_s = call_s
        self._routes = {axes: route(grid.group_shape(axes), machine.tiers, grid.world) for axes in program.groups}
        self._lines: dict[tuple[OpKind, str], tuple[Line, ...]] = {}
        self._known: dict[int, tuple[Collective, float, float]] = {}
        self.lane = {axes: path.outermost for axes, path in self._routes.items()}

    def lines(self, collective: Collective) -> tuple[Line, ...]:
        """Lines of all algorithms and protocols of this collective."""
        key = (collective.kind, collective.axis)
        if key not in self._lines:
            path = self._routes[collective.axis]
            self._lines[key] = lines_of(collective.kind, path, self._machine, call_s=self._call_s)
        return self._lines[key]

    def sized(self, collective: Collective) -> tuple[Collective, float, float]:
        """A collective with its bytes and the time of one call, s."""
        found = self._known.get(id(collective))
        if found is None:
            size_bytes = float(collective.size_bytes.evaluate(self._values))
            chosen = tuple((line.latency_s, line.bandwidth_bytes_per_s) for line in self.lines(collective))
            call_s = float(collective_time_s(chosen, size_bytes, PLAIN))
            found = self._known[id(collective)] = collective, size_bytes, call_s
        return found

    def scheduled_s(self, collective: Collective) -> float:
        """Time of a collective in the schedule: its consecutive calls; a gather is one call."""
        calls = 1.0 if collective.role == "weight" else float(collective.calls.evaluate(self._values))
        return calls * self.sized(collective)[2]

    def terms(self, program: StepProgram, exposed: dict[TermKey, float], stage: Stage = ONLY) -> tuple[Term, ...]:
        """Every collective with more than one rank, in program order, with the waits for it."""
        found = []
        exposed = dict(exposed)
        for collective, count in program.collectives(stage):
            if self.lane[collective.axis] < 0:
                continue
            calls = float(count.evaluate(self._values))
            if not calls:
                continue
            _, size_bytes, call_s = self.sized(collective)
            lines = self.lines(collective)
            key = (collective.kind, collective.axis, collective.phase, collective.layer)
            found.append(
                Term(
                    op=collective.kind,
                    axis=collective.axis,
                    phase=collective.phase,
                    layer=collective.layer,
                    count=int(calls),
                    bytes=size_bytes,
                    group=self._routes[collective.axis].size,
                    tier=self._machine.tiers[self.lane[collective.axis]].name,
                    seconds=calls * call_s,
                    exposed_s=exposed.pop(key, 0.0),
                    formula=str(collective.size_bytes),
                    collective=collective,
                    line=min(lines, key=lambda line: line.latency_s + size_bytes / line.bandwidth_bytes_per_s),
                )
            )
        return tuple(found)
