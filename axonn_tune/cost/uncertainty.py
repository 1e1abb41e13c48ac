"""Interval of a predicted step, the one 80% interval that every command prints; and what published steps validate.

The logarithm of a step has two errors. What a machine's kernels and links are off by is common to all layouts of a
ranking: each kind of computation by the half-width of the profile, more where its rate is assumed and not measured, and
by what software scatters by where its numbers are the mean of all, times its share of the step; communication by its
own, times the step's waiting; the host, for steps of which it can decide the time; and so much for each doubling of
ranks and of pipeline stages, whose stragglers and jitter no profile has. With experts the spread of the token imbalance
of natural routing is added, times the step's slope over it. What no number explains is each layout's own. All are
independent.

What a profile has learned is a covariance of its numbers. A prediction's logarithm then has the variance

    gᵀ C g + l² + m² + (d · log2(ranks / ranks of the evidence))² + (p · log2(stages))²

with g = ∂ log(step) / ∂ log(number), l the residual error of a layout, m that of all layouts of a model. For the
difference of two layouts, shared errors cancel: (g - h)ᵀ C (g - h) + 2 l².
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from axonn_tune.cost.compute import ATTENTION, ELEMENT_WISE, GEMMS, OFFLOAD, OPTIMIZER, UNMEASURED, exposed_s
from axonn_tune.frameworks import OF_ONE_NAME, SOFTWARE_SPREADS, base_software, is_fitted, software_key
from axonn_tune.frameworks.description import Framework
from axonn_tune.frameworks.step import IMBALANCE_SPREAD
from axonn_tune.job import Job, Layout
from axonn_tune.program.operations import Floats, Value
from axonn_tune.specs.machine import Learned, LearnedNumber, Machine, Nvidia
from axonn_tune.specs.model import Model
from axonn_tune.specs.numbers import scaled

DEVIATIONS = 1.2816
"""Standard deviations either side of the middle that hold 80% of a normal distribution."""

OF_LAYOUT, OF_LAYOUT_WITH_EXPERTS = 0.04, 0.06
"""Standard deviations of what no number explains of the logarithm of a step, for each layout by itself, of a dense
model and of one with experts. Errors of published steps scatter within families, rows of one source, model and number
of GPUs, by 1.3 to 12% (robust standard deviations, median 3.7%, of fits without the family), with experts by 1.2 to 16%
(median of 13 families of 4 rows or more 5.4%)."""

PER_DOUBLING, PER_STAGE_DOUBLING = 0.013, 0.023
"""Standard deviation of the logarithm of a step for each doubling of ranks beyond a node of `NODE`, and of pipeline
stages, from published steps: 80% of the series that differ in these alone have errors that grow by less (tools/fit/
scale.py). AxoNN's runs on 4,096 to 32,768 GPUs (docs/paper-claims.md) are in none of them."""

NODE = 8

RATES: Mapping[str, tuple[str, ...]] = {
    GEMMS: ("matmul_efficiency",),
    ATTENTION: ("attention_forward_efficiency", "attention_backward_efficiency"),
    ELEMENT_WISE: ("memory_efficiency",),
    OPTIMIZER: ("memory_efficiency",),
}
"""Numbers of an accelerator that the time of each kind of computation hangs on."""

SOFTWARE: Mapping[str, str] = {GEMMS: "gemm", ATTENTION: "attention", ELEMENT_WISE: "traffic"}
"""And of software."""

ASSUMED = 0.35
"""Half of the 80% interval of the logarithm of a rate that is assumed: profiles that were written from data sheets
were off by as much when kernels of their machines were published."""

ISSUE_S, OF_HOST = 5e-3, 0.2
"""Time in which a host issues forward and backward of a block: about 64 operations of 75 µs (frameworks/software.csv).
Half of the 80% interval of a step's logarithm where the host decides all of it, less where blocks compute longer."""

LEAST_EIGENVALUE = 1e-9
"""Of a matrix of correlations."""

NUDGE = 0.02
"""Change of a logarithm for finite-difference slopes."""


def half_width(
    job: Job,
    layout: Layout,
    *,
    computed_s: Mapping[str, float],
    compute_s: float,
    iteration_s: float,
    of_imbalance: float = 0.0,
    issued: float = 1.0,
) -> float:
    """Half of the 80% interval of a step's logarithm, by a profile that has learned nothing.

    computed_s: computation by its kind; compute_s: all of it, with waiting for other stages; of_imbalance: slope over
    the logarithm of the token imbalance, where that is natural; issued: share of a block's operations that the host
    issues one by one.
    """
    grid, machine = layout.grid, job.machine
    waiting = float(exposed_s(iteration_s, compute_s)) / iteration_s
    share = (1.0 - waiting) / max(sum(computed_s.values()), 1e-12)
    fitted = is_fitted(job.framework, machine)
    halves = {
        kind: math.hypot(of_rates(machine, kind), of_software(SOFTWARE.get(kind), fitted=fitted)) for kind in computed_s
    }
    of_kinds = (share * spent_s * halves[kind] for kind, spent_s in computed_s.items())
    batches = job.workload.global_batch / (grid.batch_shares * layout.micro_batch)
    issued_s = issued * batches * job.model.layers / grid.pipeline * ISSUE_S
    decided = min(1.0, issued_s / max(compute_s, 1e-12)) if machine.launcher.backend == "nccl" else 0.0
    of_host = decided * math.hypot(OF_HOST, of_software("dispatch_us", fitted=fitted))
    of_scale = DEVIATIONS * PER_DOUBLING * max(0.0, math.log2(grid.world / NODE))
    shared = (*of_kinds, waiting * machine.uncertainty.communication, of_host, of_scale)
    return math.hypot(*shared, jitter(grid.pipeline, of_imbalance), DEVIATIONS * of_layout(job.model))


def jitter(stages: int, of_imbalance: float) -> float:
    """Half of the 80% interval that comes of pipeline stages, and of the token imbalance by a step's slope over it."""
    of_stages = PER_STAGE_DOUBLING * math.log2(stages)
    return DEVIATIONS * math.hypot(of_stages, IMBALANCE_SPREAD * of_imbalance)


def of_rates(machine: Machine, kind: str) -> float:
    """Half of the 80% interval of the logarithm of a kind of computation, by where its rates come from."""
    accelerator = machine.accelerator
    kinds = (accelerator.sources[number].kind for number in RATES.get(kind, ()))
    assumed = kind in (UNMEASURED, OFFLOAD) or any(one in ("assumed", "placeholder") for one in kinds)
    return math.hypot(machine.uncertainty.compute, ASSUMED if assumed else 0.0)


def of_software(number: str | None, *, fitted: bool) -> float:
    """The same of what a number of software does to it, where that is the mean of all software."""
    return 0.0 if fitted or number is None else DEVIATIONS * SOFTWARE_SPREADS[number] / OF_ONE_NAME


def of_layout(model: Model) -> float:
    """Standard deviation of a step's logarithm by itself, of a layout of a model."""
    return OF_LAYOUT_WITH_EXPERTS if model.has_experts else OF_LAYOUT


def own_half_s(job: Job, *, step_s: Value, waiting_s: Value) -> Value:
    """Half of the 80% interval of steps of a job that its layouts do not share, s; of communication by the profile."""
    return np.hypot(waiting_s * job.machine.uncertainty.communication, DEVIATIONS * of_layout(job.model) * step_s)


def own_bound_s(job: Job, *, step_s: float, waiting_s: float) -> float:
    """The same, s; with what the profile has learned of layouts if it has learned."""
    if job.machine.learned is None:
        return float(own_half_s(job, step_s=step_s, waiting_s=waiting_s))
    return DEVIATIONS * job.machine.learned.of_layout * step_s


def with_software(machine: Machine, framework: Framework) -> Machine:
    """A learned profile, with prior uncertainty for a framework without evidence."""
    learned, key = machine.learned, software_key(framework)
    if learned is None or any(number.path.startswith(f"software.{key}.") for number in learned.numbers):
        return machine
    software = base_software(framework, machine)
    values = {name: getattr(software, name) for name in SOFTWARE_SPREADS}
    numbers = tuple(
        LearnedNumber(path=f"software.{key}.{name}", prior=value, prior_spread=spread, value=value, spread=spread)
        for name, spread in SOFTWARE_SPREADS.items()
        if (value := values[name]) > 0.0
    )
    both = learned.model_copy(update={"numbers": (*learned.numbers, *numbers)})
    return machine.model_copy(update={"software": {**machine.software, key: software}, "learned": both})


def slopes_of(price: Callable[[Machine], float], machine: Machine) -> Floats:
    """∂ log(price) / ∂ log(number) for every number that the profile has learned or could have."""
    assert machine.learned is not None, "for profiles that have learned"
    base, nudged = _log(price(machine)), [{number.path: math.exp(NUDGE)} for number in machine.learned.numbers]
    return np.array([(_log(price(scaled(machine, factors))) - base) / NUDGE for factors in nudged])


def _log(seconds: float) -> float:
    """A logarithm; of 0 s, that of a nanosecond."""
    return math.log(max(seconds, 1e-9))


def covariance_of(learned: Learned) -> Floats:
    """Covariance of the logarithms of a profile's numbers."""
    spreads = np.array([number.spread for number in learned.numbers])
    correlations = np.eye(len(spreads))
    for row, values in enumerate(learned.correlations):
        correlations[row, : len(values)] = correlations[: len(values), row] = values
    # Stored numbers are rounded, so the variance of two numbers known only by their sum may be slightly negative.
    eigenvalues, vectors = np.linalg.eigh(correlations)
    whole = (vectors * np.maximum(eigenvalues, LEAST_EIGENVALUE)) @ vectors.T
    found: Floats = whole * np.outer(spreads, spreads)
    return found


def shared_spread(slopes: Floats, learned: Learned, *, ranks: int) -> float:
    """Standard deviation of a logarithm that other layouts of the model on as many ranks share."""
    doublings = max(0.0, math.log2(ranks / learned.ranks))
    variance = max(0.0, float(slopes @ covariance_of(learned) @ slopes))
    return math.hypot(math.sqrt(variance), learned.per_doubling * doublings, learned.of_model)


def spread(slopes: Floats, learned: Learned, *, ranks: int) -> float:
    """Standard deviation of the logarithm of a prediction."""
    return math.hypot(shared_spread(slopes, learned, ranks=ranks), learned.of_layout)


def difference_spread(one: Floats, other: Floats, learned: Learned) -> float:
    """Standard deviation of the logarithm of the ratio of two layouts on as many ranks."""
    apart = one - other
    variance = float(apart @ covariance_of(learned) @ apart)
    return math.sqrt(max(0.0, variance) + 2.0 * learned.of_layout**2)


LARGEST: Mapping[str, int] = {"gpus": 8192, "pipeline": 64, "chunks": 20, "context": 8, "sequence": 262144}
"""What published steps validate: the largest of each among the rows that are scored, dense, with experts, in formats
below 16 bits, with context parallelism or of fine-tuning (tools/fit/scale.py)."""

GENERATIONS: tuple[Nvidia, ...] = ("volta", "ampere", "hopper", "blackwell")
"""Generations of the accelerators of dense rows, to which numbers of accelerators and software are fitted."""

ACCELERATOR = "accelerator"


def outside(job: Job, layout: Layout) -> tuple[str, ...]:
    """What of a step is beyond them: names of `LARGEST`, and `ACCELERATOR` unless the machine itself was measured."""
    grid, machine = layout.grid, job.machine
    sizes = {
        "gpus": grid.world,
        "pipeline": grid.pipeline,
        "chunks": layout.chunks,
        "context": grid.context,
        "sequence": job.workload.sequence_length,
    }
    beyond = tuple(name for name, size in sizes.items() if size > LARGEST[name])
    if machine.learned or machine.measured or machine.accelerator.generation in GENERATIONS:
        return beyond
    return (*beyond, ACCELERATOR)
