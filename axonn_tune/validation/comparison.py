"""Predicted vs. measured: errors of every configuration, axis and collective, and whether training was right.

Measurements can be compared with other predictions than those they were taken with: another profile's, or those of
the paper's rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from statistics import fmean, median
from typing import Literal, TypeAlias

from axonn_tune.cost.price import Detail
from axonn_tune.cost.price import price as price_layout
from axonn_tune.grid import AXES, split_axes
from axonn_tune.job import Job, Layout
from axonn_tune.specs.machine import COLLECTIVE_KINDS, Machine, Tier
from axonn_tune.specs.model import Model
from axonn_tune.specs.results import (
    BaselineConfiguration,
    MeasuredConfiguration,
    MeasuredTerm,
    Measurements,
    MeasurementSite,
    PredictedStep,
    RunTimes,
    Serial,
    StepTotals,
)
from axonn_tune.specs.workload import Precision
from axonn_tune.validation.quality import errors_of, regret, relative_error, spearman

Agreement: TypeAlias = Literal["equal", "within rounding", "wrong", "not compared"]
FixedConfiguration: TypeAlias = MeasuredConfiguration | BaselineConfiguration
"""A configuration with all choices."""
COMPARED_STEPS = 10
"""Rounding errors grow from step to step; these, from the first, are compared."""
PAPER = "paper, true bytes"
_LOSS_TOLERANCE: dict[Precision, float] = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
_NORM_TOLERANCE: dict[Precision, float] = {"fp64": 1e-8, "fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}
_PASSES: dict[str, int] = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "send": 2}
"""Times that a ring sends a buffer, but for one rank's share; of the two ranks of a message, one sends all of it."""


@dataclass(frozen=True)
class Verdict:
    """Agreement with the serial run. where: the first error; difference: the largest relative one."""

    agreement: Agreement
    difference: float = 0.0
    where: str = ""

    @property
    def words(self) -> str:
        """For a person."""
        if self.agreement == "within rounding":
            return f"within rounding ({self.difference:.0e})"
        return f"wrong: {self.where}" if self.agreement == "wrong" else self.agreement


def compare_with_serial(configuration: MeasuredConfiguration, serial: Serial | None) -> Verdict:
    """The worst agreement of a configuration's runs with a single rank, in losses and gradient norms."""
    if serial is None:
        return Verdict("not compared")
    found = [_compare_run(run, serial, configuration.workload.precision) for run in configuration.runs]
    order: tuple[Agreement, ...] = ("equal", "within rounding", "wrong")
    return max(found, key=lambda one: (order.index(one.agreement), one.difference))


def _compare_run(run: RunTimes, serial: Serial, precision: Precision) -> Verdict:
    largest = 0.0
    for step, what, difference, tolerance in _differences(run, serial, precision):
        if not difference <= tolerance:
            part = "the forward pass" if what == "loss" else "the gradients"
            part = part if step == 1 else "the weight update"
            return Verdict("wrong", difference, f"{what} of step {step} differs by {difference:.1%}: {part}")
        largest = max(largest, difference)
    return Verdict("within rounding", largest) if largest else Verdict("equal")


def _differences(run: RunTimes, serial: Serial, precision: Precision) -> Iterator[tuple[int, str, float, float]]:
    """Step from 1, quantity, relative difference and its tolerance, in the order a step computes them."""
    losses = zip(run.losses, serial.losses, strict=False)
    norms = zip(run.gradient_norms, serial.gradient_norms, strict=False)
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1):
        if step > COMPARED_STEPS:
            return
        yield step, "loss", _relative(*loss), _LOSS_TOLERANCE[precision]
        yield step, "gradient norm", _relative(*norm), _NORM_TOLERANCE[precision]


def _relative(value: float, expected: float) -> float:
    return abs(value - expected) / max(abs(expected), 1e-300)


def blame(verdicts: Sequence[tuple[MeasuredConfiguration, Verdict]]) -> str | None:
    """The axes that are split in all wrong configurations and in no other, in words; None if nothing is wrong."""
    wrong = [_split(one) for one, verdict in verdicts if verdict.agreement == "wrong"]
    right = [_split(one) for one, verdict in verdicts if verdict.agreement in ("equal", "within rounding")]
    if not wrong:
        return None
    for count in range(1, len(AXES) + 1):
        for axes in combinations(AXES, count):
            if all(set(axes) <= one for one in wrong) and not any(set(axes) <= one for one in right):
                return _blamed(axes, right)
    return "no axis is split in all configurations that are wrong and in none that is right"


def _blamed(axes: Sequence[str], right: Sequence[set[str]]) -> str:
    named = axes[0] if len(axes) == 1 else f"{', '.join(axes[:-1])} and {axes[-1]} together"
    if not right:
        return f"every configuration is wrong; all of them split {named}"
    return f"wrong wherever {named} {'is' if len(axes) == 1 else 'are'} split, and nowhere else"


def _split(configuration: MeasuredConfiguration) -> set[str]:
    grid = configuration.grid.grid()
    return {axis for axis in AXES if grid.axis_size(axis) > 1}


@dataclass(frozen=True)
class Pair:
    """A number, predicted and measured. measured: median of the runs; spread: (largest - smallest) / median."""

    predicted: float | None
    measured: float
    spread: float = 0.0

    @property
    def error(self) -> float | None:
        """Predicted / measured - 1; None where either is missing."""
        return relative_error(self.predicted, self.measured)


@dataclass(frozen=True)
class ComparisonRow:
    """One configuration, predicted vs. measured."""

    configuration: MeasuredConfiguration
    step_s: Pair
    compute_s: Pair
    communication_s: Pair
    exposed_communication_s: Pair
    memory_bytes: Pair
    verdict: Verdict
    differs: tuple[str, ...]


@dataclass(frozen=True)
class Quality:
    """How well some pairs were predicted.

    mape: mean of |error|; bias: mean error; spearman: rank correlation; regret: measured time of the predicted best
    over that of the best, minus 1; best: place of the predicted best among the measured, from 1.
    """

    what: str
    rows: int
    mape: float
    bias: float
    worst: float
    spearman: float
    regret: float
    best: int


@dataclass(frozen=True)
class TermComparison:
    """All terms over one axis, or of one collective: means per configuration that has any, s."""

    name: str
    predicted_s: float
    measured_s: float
    predicted_exposed_s: float
    measured_exposed_s: float
    configurations: int
    mape: float


@dataclass(frozen=True)
class OverlapSaving:
    """The gain of overlapping: 1 - step with overlaps / step without."""

    name: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class RunComparison:
    """A measurement file, predicted vs. measured."""

    measurements: Measurements

    @cached_property
    def rows(self) -> tuple[ComparisonRow, ...]:
        """Each configuration, in the order they ran."""
        return tuple(_row(one, self.measurements) for one in self.measurements.configurations)

    @cached_property
    def qualities(self) -> tuple[Quality, ...]:
        """Quality of communication, exposed communication, computation and step."""
        named: tuple[tuple[str, Callable[[ComparisonRow], Pair]], ...] = (
            ("communication", lambda row: row.communication_s),
            ("exposed communication", lambda row: row.exposed_communication_s),
            ("computation", lambda row: row.compute_s),
            ("step", lambda row: row.step_s),
        )
        return tuple(quality(what, [pair(row) for row in self.rows]) for what, pair in named)

    @cached_property
    def axes(self) -> tuple[TermComparison, ...]:
        """Means of the collectives over each axis."""
        order = {axis: place for place, axis in enumerate(AXES)}
        return tuple(sorted(self._means("axis"), key=lambda one: (order.get(one.name, len(AXES)), one.name)))

    @cached_property
    def collectives(self) -> tuple[TermComparison, ...]:
        """Means of each collective."""
        return tuple(self._means("op"))

    def _means(self, field: Literal["axis", "op"]) -> Iterator[TermComparison]:
        """Of all terms with the same value in this field."""
        terms = [one.terms for one in self.measurements.configurations]
        for name in dict.fromkeys(getattr(term, field) for own in terms for term in own):
            yield term_means(name, ([term for term in own if getattr(term, field) == name] for own in terms))

    @cached_property
    def gains(self) -> tuple[OverlapSaving, ...]:
        """The gain of every configuration that ran with overlaps and without."""
        blocking = {_twin(row): row for row in self.rows if not row.configuration.workload.overlaps}
        pairs = [(row, blocking.get(_twin(row))) for row in self.rows if row.configuration.workload.overlaps]
        return tuple(_gain(row.configuration.name, row.step_s, twin.step_s) for row, twin in pairs if twin is not None)

    @cached_property
    def blame(self) -> str | None:
        """The axes on which training is wrong, in words; None if it is right."""
        return blame([(row.configuration, row.verdict) for row in self.rows])

    @property
    def fault(self) -> str:
        """What a check that fails says of it."""
        return self.blame or "collectives of some ranks differ from the program"

    @property
    def sound(self) -> bool:
        """Whether losses and collectives of all configurations are correct."""
        return not any(row.verdict.agreement == "wrong" or row.differs for row in self.rows)

    def quality_of(self, what: str) -> Quality:
        """One of `qualities` by its name."""
        return next(one for one in self.qualities if one.what == what)


def fastest_runs(measurements: Measurements) -> Measurements:
    """Only the run with the shortest step of each configuration: other work on a host only ever adds time."""
    return measurements.model_copy(update={"configurations": tuple(map(_fastest, measurements.configurations))})


def _fastest(configuration: MeasuredConfiguration) -> MeasuredConfiguration:
    at = min(range(len(configuration.runs)), key=lambda number: configuration.runs[number].step_s)
    times = ("measured_s", "exposed_s", "steps_s")
    terms = tuple(
        term.model_copy(update={name: (getattr(term, name)[at],) for name in times}) for term in configuration.terms
    )
    return configuration.model_copy(update={"runs": (configuration.runs[at],), "terms": terms})


def _row(configuration: MeasuredConfiguration, measurements: Measurements) -> ComparisonRow:
    predicted, runs = configuration.predicted, configuration.runs
    if on_cpu(measurements.place):
        predicted = predicted.model_copy(update={"memory_bytes": None})
    return ComparisonRow(
        configuration=configuration,
        **{
            name: _pair(getattr(predicted, name), [getattr(run, name) for run in runs])
            for name in StepTotals.model_fields
        },
        verdict=compare_with_serial(configuration, measurements.serial),
        differs=tuple(dict.fromkeys(line for run in runs for line in run.differs)),
    )


def on_cpu(place: MeasurementSite) -> bool:
    """Whether memory is a process' resident set, with the buffers of Python and Gloo that no prediction includes."""
    return place.device.startswith("cpu")


def _pair(predicted: float | None, values: Sequence[float]) -> Pair:
    middle = median(values)
    return Pair(predicted, middle, (max(values) - min(values)) / middle if middle else 0.0)


def _twin(row: ComparisonRow) -> tuple[object, ...]:
    """Key shared by configurations that differ only in their overlaps."""
    one = row.configuration
    return one.grid, one.micro_batch, one.recompute, one.kept_layers


def _gain(name: str, overlapped: Pair, blocking: Pair) -> OverlapSaving:
    predicted = 0.0
    if overlapped.predicted is not None and blocking.predicted:
        predicted = 1.0 - overlapped.predicted / blocking.predicted
    return OverlapSaving(name, predicted, 1.0 - overlapped.measured / blocking.measured)


def quality(what: str, pairs: Iterable[Pair]) -> Quality:
    """Quality of the pairs that have both numbers; nan without any."""
    known = [(pair.predicted, pair.measured) for pair in pairs if pair.predicted is not None]
    errors = [predicted / measured - 1.0 for predicted, measured in known if measured]
    if not errors:
        return Quality(what, 0, math.nan, math.nan, math.nan, math.nan, math.nan, best=0)
    predicted, measured = [one[0] for one in known], [one[1] for one in known]
    chosen = measured[predicted.index(min(predicted))]
    summary = errors_of(errors)
    return Quality(
        what=what,
        rows=len(known),
        mape=summary.mape,
        bias=summary.bias,
        worst=max(errors, key=abs),
        spearman=spearman(predicted, measured),
        regret=regret(predicted, measured),
        best=1 + sum(value < chosen for value in measured),
    )


def term_means(name: str, terms: Iterable[Sequence[MeasuredTerm]]) -> TermComparison:
    """Sums over the terms of each configuration, then means over configurations that have any."""
    sums = [_sums(mine) for mine in terms if mine]
    errors = [abs(predicted / measured - 1.0) for predicted, measured, _, _ in sums if measured]
    predicted_s, measured_s, predicted_exposed_s, measured_exposed_s = map(fmean, zip(*sums, strict=True))
    return TermComparison(
        name=name,
        predicted_s=predicted_s,
        measured_s=measured_s,
        predicted_exposed_s=predicted_exposed_s,
        measured_exposed_s=measured_exposed_s,
        configurations=len(sums),
        mape=fmean(errors) if errors else math.nan,
    )


def _sums(terms: Sequence[MeasuredTerm]) -> tuple[float, float, float, float]:
    """Predicted, measured, and the exposed part of both, of the median run, s."""
    return (
        sum(term.predicted_s or 0.0 for term in terms),
        sum(median(term.measured_s) for term in terms),
        sum(term.predicted_exposed_s or 0.0 for term in terms),
        sum(median(term.exposed_s) for term in terms),
    )


def repriced(measurements: Measurements, machine: Machine) -> Measurements:
    """The same measurements with the current predictions of a profile."""
    found = tuple(_repriced(measurements, machine, one) for one in measurements.configurations)
    return measurements.model_copy(update={"machine": machine, "configurations": found})


def price(model: Model, machine: Machine, configuration: FixedConfiguration) -> Detail:
    """The current prediction of a profile for a configuration."""
    return price_layout(Job(model, machine, configuration.workload), Layout.of(configuration))


def predicted_step(priced: Detail) -> PredictedStep:
    """A prediction without its interval, which is the profile's and not the configuration's."""
    return PredictedStep.from_fields_of(priced, step_s=priced.iteration_s, low_s=None, high_s=None)


def _repriced(
    measurements: Measurements, machine: Machine, configuration: MeasuredConfiguration
) -> MeasuredConfiguration:
    priced = price(measurements.model, machine, configuration)
    now = {(term.op, term.axis, term.phase, term.layer, round(term.bytes)): term for term in priced.terms}
    terms = []
    for term in configuration.terms:
        found = now.get((term.op, term.axis, term.phase, term.layer, term.bytes))
        seconds, exposed_s = (None, None) if found is None else (found.seconds, found.exposed_s)
        terms.append(term.model_copy(update={"predicted_s": seconds, "predicted_exposed_s": exposed_s}))
    return configuration.model_copy(update={"predicted": predicted_step(priced), "terms": tuple(terms)})


def paper_communication_s(configuration: MeasuredConfiguration, machine: Machine, *, world: int) -> float:
    """arXiv 2305.13525: ring bytes over equation 7's bandwidth, no latency; bytes and calls as sent.

    Equation 7 for a group that spans nodes: β_inter / min(G_node, ∏ inner axes), with each collective's β on the
    innermost and the outermost tier.
    """
    grid, total_s = configuration.grid.grid(), 0.0
    tiers_of: dict[str, tuple[Tier, ...]] = {kind: machine.tiers_of(kind) for kind in COLLECTIVE_KINDS}
    tiers_of["send"] = tiers_of["all_gather"]
    node_ranks = (machine.tiers[0].ranks or world) if len(machine.tiers) > 1 else world
    for term in configuration.terms:
        inner = min(grid.stride(axis) for axis in split_axes(term.axis) if grid.axis_size(axis) > 1)
        sent = term.count * _PASSES[term.op] * (term.group - 1) / term.group * term.bytes
        tiers = tiers_of[term.op]
        if inner * term.group <= node_ranks:
            total_s += sent / tiers[0].bandwidth_bytes_per_s
        else:
            total_s += sent / (tiers[-1].bandwidth_bytes_per_s / min(node_ranks, inner))
    return total_s


def paper_quality(measurements: Measurements) -> Quality:
    """How well the paper's rule predicts the measured communication."""
    machine, world = measurements.machine, measurements.place.ranks
    pairs = [
        Pair(
            paper_communication_s(one, machine, world=world),
            median(run.communication_s for run in one.runs),
        )
        for one in measurements.configurations
    ]
    return quality(PAPER, pairs)
