"""Predicted beside measured: each configuration, each axis, and how well the whole was ranked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

from axonn_tune.published.quality import spearman
from axonn_tune.grid import AXES
from axonn_tune.specs.measurements import MeasuredConfiguration, MeasuredTerm, Measurements, RunTimes
from axonn_tune.validation.verdict import Verdict, blame, judge


@dataclass(frozen=True)
class Pair:
    """One number both ways. measured: median over runs; spread: (largest - smallest) / median of them."""

    predicted: float | None
    measured: float
    spread: float = 0.0

    @property
    def error(self) -> float | None:
        """Predicted / measured - 1; None where either is missing."""
        return self.predicted / self.measured - 1.0 if self.predicted is not None and self.measured else None


@dataclass(frozen=True)
class Row:
    """One configuration."""

    configuration: MeasuredConfiguration
    step_s: Pair
    compute_s: Pair
    communication_s: Pair
    exposed_s: Pair
    memory_bytes: Pair
    verdict: Verdict
    differs: tuple[str, ...]


@dataclass(frozen=True)
class Quality:
    """How well some pairs were predicted.

    mape: mean of |error|; bias: mean error; spearman: of the ranks; regret: what the predicted best really
    takes over what the best takes, less 1; best: place of the predicted best among the measured, from 1.
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
class Share:
    """All terms of one kind over all configurations: means per configuration that has them, s."""

    name: str
    predicted_s: float
    measured_s: float
    predicted_exposed_s: float
    measured_exposed_s: float
    configurations: int
    mape: float


@dataclass(frozen=True)
class Gain:
    """What overlapping is worth: 1 - step with overlaps / step without."""

    name: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class Comparison:
    """A measurement file, compared."""

    measurements: Measurements

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Each configuration, as they were run."""
        return tuple(_row(one, self.measurements) for one in self.measurements.configurations)

    @cached_property
    def qualities(self) -> tuple[Quality, ...]:
        """Of communication, exposed communication, computation and step."""
        named: tuple[tuple[str, Callable[[Row], Pair]], ...] = (
            ("communication", lambda row: row.communication_s),
            ("exposed communication", lambda row: row.exposed_s),
            ("computation", lambda row: row.compute_s),
            ("step", lambda row: row.step_s),
        )
        return tuple(quality(what, [pair(row) for row in self.rows]) for what, pair in named)

    @cached_property
    def axes(self) -> tuple[Share, ...]:
        """Of the collectives over each axis."""
        names = dict.fromkeys(term.axis for one in self.measurements.configurations for term in one.terms)
        ordered = sorted(names, key=lambda name: (AXES.index(name) if name in AXES else len(AXES), name))
        return tuple(share(name, self._terms(axis=name)) for name in ordered)

    @cached_property
    def collectives(self) -> tuple[Share, ...]:
        """Of each collective."""
        names = dict.fromkeys(term.op for one in self.measurements.configurations for term in one.terms)
        return tuple(share(name, self._terms(op=name)) for name in names)

    def _terms(self, *, axis: str | None = None, op: str | None = None) -> list[list[MeasuredTerm]]:
        """Of each configuration, those over an axis, or of a collective."""
        return [
            [term for term in one.terms if axis in (None, term.axis) and op in (None, term.op)]
            for one in self.measurements.configurations
        ]

    @cached_property
    def gains(self) -> tuple[Gain, ...]:
        """Of every configuration that ran with overlaps and without."""
        blocking = {_twin(row): row for row in self.rows if not row.configuration.workload.overlaps}
        pairs = [(row, blocking.get(_twin(row))) for row in self.rows if row.configuration.workload.overlaps]
        return tuple(_gain(row.configuration.name, row.step_s, twin.step_s) for row, twin in pairs if twin is not None)

    @cached_property
    def blame(self) -> str | None:
        """On which axis training is wrong, in words; None if it is not."""
        return blame([(row.configuration, row.verdict) for row in self.rows])

    @property
    def sound(self) -> bool:
        """Whether everything trained as it should, and sent what the program says."""
        return not any(row.verdict.agreement == "wrong" or row.differs for row in self.rows)

    def quality_of(self, what: str) -> Quality:
        """One of `qualities` by its name."""
        return next(one for one in self.qualities if one.what == what)


def fastest_runs(measurements: Measurements) -> Measurements:
    """Of each configuration the run with the shortest step alone: other work on a host only ever adds time."""
    return measurements.model_copy(update={"configurations": tuple(map(_fastest, measurements.configurations))})


def _fastest(configuration: MeasuredConfiguration) -> MeasuredConfiguration:
    at = min(range(len(configuration.runs)), key=lambda number: configuration.runs[number].step_s)
    terms = tuple(
        term.model_copy(
            update={
                "measured_s": (term.measured_s[at],),
                "exposed_s": (term.exposed_s[at],),
                "steps_s": (term.steps_s[at],),
            }
        )
        for term in configuration.terms
    )
    return configuration.model_copy(update={"runs": (configuration.runs[at],), "terms": terms})


def _row(configuration: MeasuredConfiguration, measurements: Measurements) -> Row:
    predicted, runs = configuration.predicted, configuration.runs
    return Row(
        configuration=configuration,
        step_s=_pair(predicted.step_s, runs, lambda run: run.step_s),
        compute_s=_pair(predicted.compute_s, runs, lambda run: run.compute_s),
        communication_s=_pair(predicted.communication_s, runs, lambda run: run.communication_s),
        exposed_s=_pair(predicted.exposed_communication_s, runs, lambda run: run.exposed_communication_s),
        memory_bytes=_pair(predicted.memory_bytes, runs, lambda run: run.memory_bytes),
        verdict=judge(configuration, measurements.serial),
        differs=tuple(dict.fromkeys(line for run in runs for line in run.differs)),
    )


def _pair(predicted: float | None, runs: Sequence[RunTimes], value: Callable[[RunTimes], float]) -> Pair:
    values = [value(run) for run in runs]
    middle = median(values)
    return Pair(predicted, middle, (max(values) - min(values)) / middle if middle else 0.0)


def _twin(row: Row) -> tuple[object, ...]:
    """What two configurations share that differ in their overlaps alone."""
    one = row.configuration
    return one.grid, one.micro_batch, one.recompute, one.kept_layers


def _gain(name: str, overlapped: Pair, blocking: Pair) -> Gain:
    predicted = 0.0
    if overlapped.predicted is not None and blocking.predicted:
        predicted = 1.0 - overlapped.predicted / blocking.predicted
    return Gain(name, predicted, 1.0 - overlapped.measured / blocking.measured)


def quality(what: str, pairs: Iterable[Pair]) -> Quality:
    """Quality of those that have both numbers; nan without any."""
    known = [(pair.predicted, pair.measured) for pair in pairs if pair.predicted is not None]
    errors = [predicted / measured - 1.0 for predicted, measured in known if measured]
    if not errors:
        return Quality(what, 0, math.nan, math.nan, math.nan, math.nan, math.nan, 0)
    predicted, measured = [one[0] for one in known], [one[1] for one in known]
    chosen = min(range(len(known)), key=lambda at: predicted[at])
    best = min(measured)
    return Quality(
        what=what,
        rows=len(known),
        mape=fmean(map(abs, errors)),
        bias=fmean(errors),
        worst=max(errors, key=abs),
        spearman=spearman(predicted, measured),
        regret=measured[chosen] / best - 1.0 if best else math.nan,
        best=1 + sum(value < measured[chosen] for value in measured),
    )


def share(name: str, terms: Iterable[Sequence[MeasuredTerm]]) -> Share:
    """Sums over the terms of each configuration, then means over configurations that have any."""
    sums = [_sums(mine) for mine in terms if mine]
    errors = [abs(predicted / measured - 1.0) for predicted, measured, _, _ in sums if measured]
    predicted_s, measured_s, predicted_exposed_s, measured_exposed_s = map(fmean, zip(*sums, strict=True))
    return Share(
        name=name,
        predicted_s=predicted_s,
        measured_s=measured_s,
        predicted_exposed_s=predicted_exposed_s,
        measured_exposed_s=measured_exposed_s,
        configurations=len(sums),
        mape=fmean(errors) if errors else math.nan,
    )


def _sums(terms: Sequence[MeasuredTerm]) -> tuple[float, float, float, float]:
    """Predicted, measured, and both exposed, of the median run, s."""
    return (
        sum(term.predicted_s or 0.0 for term in terms),
        sum(median(term.measured_s) for term in terms),
        sum(term.predicted_exposed_s or 0.0 for term in terms),
        sum(median(term.exposed_s) for term in terms),
    )
