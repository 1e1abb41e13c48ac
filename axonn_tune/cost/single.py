"""Price of one candidate in plain Python: the twin of `columns`, with every term spelled out.

`columns` ranks; this explains, writes launch configs and traces, and holds `columns` to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce

from axonn_tune.cost.arithmetic import PLAIN
from axonn_tune.cost.collectives import Line, collective_time_s, lines, route
from axonn_tune.cost.compute import FUSED, ComputeRates, Kernels, compute_rates
from axonn_tune.cost.durations import Clock, compute_s
from axonn_tune.cost.memory import Memory, memory_limit_bytes, price_memory
from axonn_tune.cost.timeline import Batch, Timeline
from axonn_tune.cost.utilisation import contended_s, exposed_s
from axonn_tune.grid import Grid
from axonn_tune.program.dimensions import symbol_values
from axonn_tune.program.flops import executed_flops
from axonn_tune.program.operations import GROUP_AXES, Collective, Computation
from axonn_tune.program.schedule import StepSchedule, build_schedule
from axonn_tune.program.step import StepProgram, build_step
from axonn_tune.specs.machine import CollectiveKind, Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Recompute, Workload


@dataclass(frozen=True)
class Configuration:
    """One candidate: grid with axis order, micro-batch, recomputation; kept layers None for as many as fit."""

    grid: Grid
    micro_batch: int
    recompute: Recompute
    kept_layers: int | None = None


@dataclass(frozen=True)
class Term:
    """All calls of one collective in a step, of one rank: seconds = count · time of one call."""

    op: str
    axis: str
    phase: str
    layer: str
    count: int
    size_bytes: float
    group: int
    tier: str
    seconds: float
    exposed_s: float
    collective: Collective
    line: Line


@dataclass(frozen=True)
class Pricing:
    """Everything predicted of one candidate; seconds and bytes per step and rank.

    alone_s, scheduled_s: computation and end of the step if communication did not slow computation beside it.
    """

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
    batches: tuple[Batch, ...]

    @cached_property
    def communication_s(self) -> float:
        """All communication, hidden or not, s."""
        return reduce(lambda total, term: total + term.seconds, self.terms, 0.0)

    @cached_property
    def contended_s(self) -> float:
        """What computation loses to communication beside it, s."""
        lost_s = contended_s(self.communication_s, self.alone_s, self.scheduled_s, contention=self.rates.contention)
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
        """Time of the step in which nothing is computed, s."""
        return float(exposed_s(self.iteration_s, self.compute_s))


def price_configuration(
    model: Model, machine: Machine, workload: Workload, configuration: Configuration, *, kernels: Kernels = FUSED
) -> Pricing:
    """Price one candidate by the alpha-beta model; `kernels`: of the software that trains.

    The candidate must satisfy the divisibility constraints; whether it fits into memory is for the
    caller to judge from the result.
    """
    program, schedule = _program(model, workload, configuration.recompute)
    values, memory = _settled(model, machine, workload, configuration)
    rates = compute_rates(machine.accelerator, workload.precision, kernels)
    clock = Clock(rates, float(workload.element_sizes.compute), values, PLAIN)
    prices = _CollectivePrices(machine, configuration.grid, values)
    timeline = Timeline(
        run_s=_RunTimes(clock, {}),
        collective_s=prices.scheduled_s,
        lane=prices.lane,
        lane_names=tuple(tier.name for tier in machine.tiers),
    )
    accumulation = int(values["A"])
    scheduled_s = timeline.step_s(
        schedule,
        layers=model.layers,
        kept=int(values["kept"]),
        accumulation=accumulation,
    )
    return Pricing(
        configuration=configuration,
        accumulation=accumulation,
        memory=memory,
        memory_limit_bytes=memory_limit_bytes(machine.accelerator),
        terms=prices.terms(program, timeline),
        alone_s=float(compute_s(program, clock)),
        scheduled_s=scheduled_s,
        executed_flops=float(executed_flops(program, values)),
        values=values,
        program=program,
        rates=rates,
        batches=tuple(timeline.batches),
    )


@lru_cache(maxsize=16)
def _program(model: Model, workload: Workload, recompute: Recompute) -> tuple[StepProgram, StepSchedule]:
    """Program and schedule, built once for all candidates that share them."""
    program = build_step(model, workload, recompute=recompute)
    return program, build_schedule(program, overlaps=workload.overlaps, split=workload.split_micro_batch)


def _settled(
    model: Model, machine: Machine, workload: Workload, configuration: Configuration
) -> tuple[dict[str, float], Memory]:
    """Values of all symbols, and the memory that decides how many layers keep their gathered weights."""
    values = symbol_values(model, workload, configuration.grid, micro_batch=configuration.micro_batch)
    asked = configuration.kept_layers
    memory = price_memory(
        model,
        workload,
        values,
        recompute=configuration.recompute,
        limit_bytes=memory_limit_bytes(machine.accelerator),
        arithmetic=PLAIN,
        kept_layers=None if asked is None else float(asked),
    )
    kept = float(memory.kept_layers)
    return {**values, "kept": kept, "unkept": float(model.layers) - kept}, memory


@dataclass(frozen=True)
class _RunTimes:
    """Time of each computation, worked out once."""

    clock: Clock
    known: dict[Computation, float]

    def __call__(self, step: Computation) -> float:
        if step not in self.known:
            self.known[step] = float(self.clock.run_s(step))
        return self.known[step]


class _CollectivePrices:
    """Prices the collectives of one candidate."""

    def __init__(self, machine: Machine, grid: Grid, values: dict[str, float]) -> None:
        self._values = values
        self._machine = machine
        self._routes = {axes: route(grid.group_shape(axes), machine.tiers, grid.world) for axes in GROUP_AXES}
        self._lines: dict[tuple[CollectiveKind, str], tuple[Line, ...]] = {}
        self.lane = {axes: path.outermost for axes, path in self._routes.items()}

    def lines(self, collective: Collective) -> tuple[Line, ...]:
        """Every way the library could run this collective."""
        key = (collective.kind, collective.axis)
        if key not in self._lines:
            self._lines[key] = lines(collective.kind, self._routes[collective.axis], self._machine)
        return self._lines[key]

    def fastest(self, collective: Collective) -> Line:
        """The line the library takes for this collective."""
        size_bytes = float(collective.size_bytes.evaluate(self._values))
        return min(self.lines(collective), key=lambda line: line.latency_s + size_bytes / line.bandwidth_bytes_per_s)

    def call_s(self, collective: Collective) -> float:
        """Time of one call, s."""
        chosen = tuple((line.latency_s, line.bandwidth_bytes_per_s) for line in self.lines(collective))
        return float(collective_time_s(chosen, collective.size_bytes.evaluate(self._values), PLAIN))

    def scheduled_s(self, collective: Collective) -> float:
        """Time of a collective where the schedule has it: its calls in a row; a gather is one call."""
        calls = 1.0 if collective.role == "weight" else float(collective.calls.evaluate(self._values))
        return calls * self.call_s(collective)

    def terms(self, program: StepProgram, timeline: Timeline) -> tuple[Term, ...]:
        """Every collective that is really sent, in program order, with the pauses it causes."""
        found = []
        exposed = dict(timeline.exposed_s)
        for collective, count in program.collectives():
            calls = float(count.evaluate(self._values))
            if self.lane[collective.axis] < 0 or not calls:
                continue
            key = (collective.kind, collective.axis, collective.phase, collective.layer)
            found.append(
                Term(
                    op=collective.kind,
                    axis=collective.axis,
                    phase=collective.phase,
                    layer=collective.layer,
                    count=int(calls),
                    size_bytes=float(collective.size_bytes.evaluate(self._values)),
                    group=self._routes[collective.axis].size,
                    tier=self._machine.tiers[self.lane[collective.axis]].name,
                    seconds=calls * self.call_s(collective),
                    exposed_s=exposed.pop(key, 0.0),
                    collective=collective,
                    line=self.fastest(collective),
                )
            )
        return tuple(found)
