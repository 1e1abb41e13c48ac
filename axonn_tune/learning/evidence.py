"""Evidence: measurements with their predictions, in one form for all sources.

A sample is one measured item, such as a training step, with one or several times and a function that prices them on a
profile. Noise is the error of a price with a correct profile, as a standard deviation of logarithms: the error of the
model and of the measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any, TypeAlias

from axonn_tune.cost.collectives import Term, bus_bytes, collective_time_s, lines, route
from axonn_tune.cost.compute import compute_rates, matmul_time_s
from axonn_tune.cost.price import Detail, price
from axonn_tune.cost.uncertainty import OF_LAYOUT
from axonn_tune.frameworks import software_on
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.description import Framework
from axonn_tune.grid import Grid, GroupShape
from axonn_tune.job import Job, Layout
from axonn_tune.learning.run import CommandRun
from axonn_tune.program.operations import PLAIN
from axonn_tune.specs.launch import CollectiveTerm, Launch
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.points import CollectiveProbe, MatmulProbe, Probe
from axonn_tune.specs.results import ComparedConfiguration, Measurements, Pairs, Summary, configuration_name
from axonn_tune.specs.workload import ELEMENT_SIZES, Recompute
from axonn_tune.units import TERA, show_bytes
from axonn_tune.validation.published.accuracy import best_pricing
from axonn_tune.validation.published.cases import Case, interleavings
from axonn_tune.vocabulary import Precision

Adjust: TypeAlias = Callable[[Machine], Machine]
"""Maps a profile to one with trial numbers."""

OF_MODEL = 0.035
"""Residual error of a step that is common to all layouts of a model: by fits without their family, the means of
families of published steps scatter by 2 to 6% (median 3.5%)."""

STEP_NOISE, RUN_NOISE = math.hypot(OF_LAYOUT, OF_MODEL), OF_LAYOUT
"""Noise of a step of any model, and of a run with known collectives."""

MATMUL_NOISE = 0.15
"""Of one GEMM (docs/accuracy.md, GEMMs)."""

TERM_NOISE, COLLECTIVE_NOISE = 0.1, 0.1
"""Of one collective: alpha-beta lines miss measured times by about that (docs/accuracy.md, collectives)."""

PRECISE_BYTES, MOST_COLLECTIVE_NOISE = 64.0 * 1024**2, 0.3
"""Size from which on that is all that a collective misses, and what it misses at most. Errors of published collectives
scatter by 4 to 6% from 64 MiB up, 16% at 16 MiB, and 29 to 34% at 1 to 4 MiB (robust standard deviations), where
libraries switch between protocols and algorithms: small messages must not spoil what large ones say of bandwidth."""

TERM_FLOOR = 0.02
"""Share of a step below which a collective's time has little weight."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Setup(Job):
    """What is stated of a step; recomputes: possible kinds where it is not stated."""

    layout: Layout
    recomputes: tuple[Recompute, ...] = ()

    @cached_property
    def priced(self) -> Detail:
        """The step on the profile as it is."""
        return price(self, self.layout)

    def price(self, adjust: Adjust) -> Detail:
        """The step on the profile with trial numbers."""
        return price(replace(self, machine=adjust(self.machine)), self.layout)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured item.

    name: with its position in the file; what: quantity of each time. ranks: of the run. noise: of each time.
    price: predicted times on its profile, s; narrow: the same sample with open configurations chosen. setup: of a step
    with a fixed layout. seen: every measured time, also those that `price` does not have, s. unstated: blank columns
    of a row on which its step may depend. bus_bytes: bytes that the bus bandwidth of each collective counts.
    ranks_per_core: of a host without GPUs, 0 if unknown. flops: of all ranks, as its log counts; 0 if unknown.
    dispatcher: of experts over several ranks, "" without; natural: whether their router spreads tokens by itself.
    run: as a log states it, or facts.
    """

    name: str
    framework: Framework
    ranks: int
    what: tuple[str, ...]
    measured_s: tuple[float, ...]
    noise: tuple[float, ...]
    price: Callable[[Adjust], tuple[float, ...]]
    narrow: Callable[[Adjust], Sample] | None = None
    setup: Setup | None = None
    seen: Mapping[str, float] = field(default_factory=dict)
    unstated: tuple[str, ...] = ()
    bus_bytes: tuple[float, ...] = ()
    ranks_per_core: float = 0.0
    flops: float = 0.0
    dispatcher: str = ""
    natural: bool = False
    run: CommandRun | None = None

    def narrowed(self, adjust: Adjust) -> Sample:
        """The same, with open configurations chosen by these numbers."""
        return self if self.narrow is None else replace(self.narrow(adjust), run=self.run)


def step_sample(case: Case, *, name: str = "", spread: float = 0.0) -> Sample:
    """One row of measured steps; spread: relative standard error of its time."""
    assert case.row.step_s is not None, case.row.id
    configurations = case.configurations if case.row.interleave_known else tuple(interleavings(case))

    def priced(adjust: Adjust) -> Detail:
        return best_pricing(replace(case, machine=adjust(case.machine)), configurations)

    def narrow(adjust: Adjust) -> Sample:
        chosen, row = priced(adjust).layout, replace(case.row, interleave_known=True)
        found = step_sample(replace(case, configurations=(chosen,), row=row), name=name, spread=spread)
        assert found.setup is not None, "of one configuration"
        open_ = tuple(dict.fromkeys(one.recompute for one in configurations))
        return replace(found, setup=replace(found.setup, recomputes=open_))

    settled, grid = configurations[0] if len(configurations) == 1 else None, case.configurations[0].grid
    job = (case.model, case.machine, case.workload, case.framework)
    replicas, more = grid.data > 1 and case.framework.step.gather_unit != "block", case.row.more
    of_experts = {"routing": more.routing, "dispatcher": more.dispatcher} if more and grid.expert > 1 else {}
    matters = {"vpp": grid.pipeline > 1, "seq_parallel": grid.x > 1, "zero_stage": replicas}
    return Sample(
        name=name or f"{case.row.id} (line {case.row.line})",
        framework=case.framework,
        ranks=case.row.gpus,
        what=("step",),
        measured_s=(case.row.step_s,),
        noise=(math.hypot(STEP_NOISE, spread),),
        price=lambda adjust: (priced(adjust).iteration_s,),
        narrow=narrow if settled is None else None,
        setup=None if settled is None else Setup(*job, layout=settled),
        seen={"step": case.row.step_s},
        unstated=(
            *(name for name in case.row.unstated if matters.get(name, True)),
            *(name for name, stated in of_experts.items() if not stated),
        ),
        flops=(case.row.tflops_per_gpu or 0.0) * TERA * case.row.step_s * case.row.gpus,
        **_dispatched(case, grid),
    )


def _dispatched(job: Job, grid: Grid) -> dict[str, Any]:
    """Dispatcher and routing of experts over several ranks."""
    if not job.model.has_experts or grid.expert == 1:
        return {}
    step = job.framework.step
    natural = step.imbalance is None and not step.capacity_factor
    return {"dispatcher": job.dispatcher_on(grid), "natural": natural}


def measured_samples(measurements: Measurements, machine: Machine, *, name: str) -> list[Sample]:
    """Every configuration of a measurement file, priced on a profile."""
    model = measurements.model
    return [_run_sample(model, one, one.pairs, one.terms, machine, name) for one in measurements.configurations]


def run_sample(launch: Launch, summary: Summary, machine: Machine, *, name: str) -> Sample:
    """One run of the bundled runtime, priced on a profile."""
    found, site = _run_sample(launch.model, launch, summary.pairs, summary.terms, machine, name), summary.ran_on
    if site.backend != "gloo" or not site.cores or not site.host_ranks:
        return found
    return replace(found, ranks_per_core=site.host_ranks / site.cores)


def _run_sample(
    model: Model,
    shape: Launch | ComparedConfiguration,
    pairs: Pairs,
    terms: Sequence[CollectiveTerm],
    machine: Machine,
    name: str,
) -> Sample:
    """Step, computation and every collective that the program has."""
    times = {"step": pairs.measured["step_s"], "computation": pairs.measured["compute_s"]}
    times |= {_term_name(term): median(term.measured_s) for term in terms}
    setup = Setup(model, machine, shape.workload, layout=Layout.of(shape))

    def named(adjust: Adjust) -> dict[str, float]:
        return named_times(setup.price(adjust))

    known = named(lambda same: same)
    kept = {what: seconds for what, seconds in times.items() if seconds > 0.0 and known.get(what)}
    return Sample(
        name=f"{name}: {configuration_name(shape)}",
        framework=AXONN_TUNE,
        ranks=shape.grid.world,
        what=tuple(kept),
        measured_s=tuple(kept.values()),
        noise=tuple(noise_of(what, seconds, step_s=times["step"]) for what, seconds in kept.items()),
        price=lambda adjust: tuple(map(named(adjust).__getitem__, kept)),
        setup=setup,
        seen={what: seconds for what, seconds in times.items() if seconds > 0.0},
        **_dispatched(setup, setup.layout.grid),
    )


WHOLE = ("step", "computation")
"""Times that are of a whole step."""


def noise_of(what: str, seconds: float, *, step_s: float) -> float:
    """Noise of one time of a run, s: of the step, its computation, or a collective."""
    return RUN_NOISE if what in WHOLE else math.hypot(TERM_NOISE, TERM_FLOOR * step_s / seconds)


def _term_name(term: CollectiveTerm | Term) -> str:
    return f"{term.op} over {term.axis}, {term.phase}, {term.layer}, {term.count} × {round(term.bytes)} bytes"


def named_times(pricing: Detail) -> dict[str, float]:
    """Times of a prediction by what they are of."""
    terms = {_term_name(term): term.seconds for term in pricing.terms}
    return {"step": pricing.iteration_s, "computation": pricing.compute_s, **terms}


def probe_samples(
    measured: Mapping[Probe, float], machine: Machine, framework: Framework, *, name: str, world: int = 0
) -> list[Sample]:
    """Collectives and GEMMs of one file, a sample for each kind of collective and group, and one of all GEMMs.

    world: ranks that took part, in groups of the same shape; 0: those of one group. All sizes of a sample count as
    `INDEPENDENT` rows at most, since they share the model's error.
    """
    groups: dict[tuple[str, int, int], list[tuple[CollectiveProbe, float]]] = {}
    for probe, seconds in measured.items():
        if isinstance(probe, CollectiveProbe):
            groups.setdefault((probe.op, probe.group, probe.stride), []).append((probe, seconds))
    gemms = [(probe, seconds) for probe, seconds in measured.items() if isinstance(probe, MatmulProbe)]
    found = [_collective_sample(one, machine, framework, name, world) for one in groups.values()]
    return [*found, _matmul_sample(gemms, machine, framework, name)] if gemms else found


INDEPENDENT = 6
"""Largest weight of all sizes of one sample, in rows."""


def _matmul_sample(
    found: Sequence[tuple[MatmulProbe, float]], machine: Machine, framework: Framework, name: str
) -> Sample:
    """GEMMs in fp32 on CPUs and in bf16 on GPUs, as calibrations measure them."""
    precision: Precision = "fp32" if machine.launcher.backend == "gloo" else "bf16"
    element_bytes = float(ELEMENT_SIZES[precision].compute)

    def price(adjust: Adjust) -> tuple[float, ...]:
        adjusted = adjust(machine)
        rates = compute_rates(adjusted.accelerator, precision, software_on(framework, adjusted))
        return tuple(
            float(
                matmul_time_s(
                    *(float(probe.m), float(probe.n), float(probe.k)),
                    flops_per_s=rates.matmul_flops_per_s[probe.layout],
                    element_bytes=element_bytes,
                    rates=rates,
                    arithmetic=PLAIN,
                )
            )
            for probe, _ in found
        )

    return Sample(
        name=f"{name}: GEMMs",
        framework=framework,
        ranks=1,
        what=tuple(f"{probe.layout}, {probe.m} × {probe.n} × {probe.k}" for probe, _ in found),
        measured_s=tuple(seconds for _, seconds in found),
        noise=(MATMUL_NOISE * math.sqrt(max(1.0, len(found) / INDEPENDENT)),) * len(found),
        price=price,
    )


def _collective_sample(
    found: Sequence[tuple[CollectiveProbe, float]], machine: Machine, framework: Framework, name: str, world: int
) -> Sample:
    first, ranks = found[0][0], world or found[0][0].group * found[0][0].stride
    share = math.sqrt(max(1.0, len(found) / INDEPENDENT))
    sizes = [float(probe.size_bytes) for probe, _ in found]
    units = [(probe.size_bytes, 1024 ** ((probe.size_bytes.bit_length() - 1) // 10)) for probe, _ in found]

    def price(adjust: Adjust) -> tuple[float, ...]:
        adjusted = adjust(machine)
        path = route(GroupShape(((first.group, first.stride),)), adjusted.tiers, ranks)
        choices = tuple((line.latency_s, line.bandwidth_bytes_per_s) for line in lines(first.op, path, adjusted))
        return tuple(float(collective_time_s(choices, size, PLAIN)) for size in sizes)

    return Sample(
        name=f"{name}: {first.op} of {first.group} ranks",
        framework=framework,
        ranks=ranks,
        # In full where a binary unit does not divide it.
        what=tuple(f"{size:,} bytes" if size % unit else show_bytes(size) for size, unit in units),
        measured_s=tuple(seconds for _, seconds in found),
        # It falls with the fourth root of the size.
        noise=tuple(
            share * min(MOST_COLLECTIVE_NOISE, COLLECTIVE_NOISE * math.sqrt(math.sqrt(max(1.0, PRECISE_BYTES / size))))
            for size in sizes
        ),
        price=price,
        bus_bytes=tuple(bus_bytes(first.op, first.group, size) for size in sizes),
    )


def joined(samples: Sequence[Sample]) -> Sample:
    """Several samples of collectives as one."""
    return Sample(
        name=samples[0].name.partition(":")[0],
        framework=samples[0].framework,
        ranks=max(sample.ranks for sample in samples),
        what=tuple(f"{sample.name}, {what}" for sample in samples for what in sample.what),
        measured_s=tuple(seconds for sample in samples for seconds in sample.measured_s),
        noise=tuple(one for sample in samples for one in sample.noise),
        price=lambda adjust: tuple(seconds for sample in samples for seconds in sample.price(adjust)),
    )
