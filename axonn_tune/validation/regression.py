"""Baselines, and checks against them: predictions, measured times, and accuracy.

There are three gates. A prediction that moves by more than its tolerance fails: a change of the model needs a new
baseline with a reason. A measured step fails if it becomes slower than its tolerance. Accuracy is tracked, and fails
below its floor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TypeAlias, TypedDict, Unpack, get_args

from axonn_tune import __version__
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.results import (
    Baseline,
    BaselineConfiguration,
    Floors,
    MeasuredStep,
    Measurements,
    MeasurementSite,
    PredictedStep,
    Tolerances,
    measured_totals,
)
from axonn_tune.validation.comparison import (
    ComparisonRow,
    Pair,
    Quality,
    RunComparison,
    predicted_step,
    price,
    quality,
)
from axonn_tune.validation.quality import relative_error

Gate: TypeAlias = Literal["predictions", "measurements", "accuracy"]
Unit: TypeAlias = Literal["s", "bytes", "share"]
GATES: tuple[Gate, ...] = get_args(Gate)


class BaselineTerms(TypedDict):
    """Reason and tolerances of a baseline."""

    reason: str
    tolerances: Tolerances
    floors: Floors


_PREDICTED: tuple[tuple[str, str, Unit], ...] = (
    ("step", "step_s", "s"),
    ("computation", "compute_s", "s"),
    ("communication", "communication_s", "s"),
    ("exposed communication", "exposed_communication_s", "s"),
    ("memory", "memory_bytes", "bytes"),
)


def baseline_from_measurements(measurements: Measurements, **kept: Unpack[BaselineTerms]) -> Baseline:
    """A baseline of measured times, with the predictions in the file."""
    configurations = [
        BaselineConfiguration.from_fields_of(row.configuration, measured=measured_step(row))
        for row in RunComparison(measurements).rows
    ]
    place, model, machine = measurements.place, measurements.model, measurements.machine
    return _baseline(configurations, model, machine, place=place, **kept)


def baseline_from_launches(
    launches: Sequence[Launch], model: Model, machine: Machine, **kept: Unpack[BaselineTerms]
) -> Baseline:
    """A baseline of predictions alone."""
    configurations = [
        BaselineConfiguration.from_fields_of(launch, predicted=PredictedStep.of(launch)) for launch in launches
    ]
    return _baseline(configurations, model, machine, place=None, **kept)


def _baseline(
    configurations: Sequence[BaselineConfiguration],
    model: Model,
    machine: Machine,
    *,
    place: MeasurementSite | None,
    **kept: Unpack[BaselineTerms],
) -> Baseline:
    return Baseline(
        schema="axonn-tune/baseline/1",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_version=__version__,
        place=place,
        model=model,
        machine=machine,
        configurations=tuple(configurations),
        **kept,
    )


def measured_step(row: ComparisonRow) -> MeasuredStep:
    """The measured numbers of a configuration."""
    return MeasuredStep(**measured_totals(row), spread=row.step_s.spread)


@dataclass(frozen=True)
class RegressionFinding:
    """One number before and now. limit: the relative change, or for accuracy the value, beyond which it fails."""

    gate: Gate
    subject: str
    quantity: str
    unit: Unit
    before: float | None
    now: float | None
    limit: float | None
    failed: bool

    @property
    def change(self) -> float | None:
        """now / before - 1; None where either is missing, or the earlier one is zero."""
        return relative_error(self.now, self.before)


@dataclass(frozen=True)
class Regression:
    """Everything compared. warnings: why some of it may not be comparable."""

    findings: tuple[RegressionFinding, ...]
    warnings: tuple[str, ...]

    @property
    def failures(self) -> tuple[RegressionFinding, ...]:
        """The findings that fail."""
        return tuple(one for one in self.findings if one.failed)

    def of(self, gate: Gate) -> tuple[RegressionFinding, ...]:
        """The findings of one gate."""
        return tuple(one for one in self.findings if one.gate == gate)


def check(
    baseline: Baseline,
    *,
    machine: Machine | None = None,
    measurements: Measurements | None = None,
    tolerances: Tolerances | None = None,
    floors: Floors | None = None,
) -> Regression:
    """Check current predictions, and new measurements if there are any, against a baseline.

    machine: predict for this profile instead of the baseline's own.
    """
    limits, least = tolerances or baseline.tolerances, floors or baseline.floors
    profile = machine or baseline.machine
    now = {one.name: predicted_step(price(baseline.model, profile, one)) for one in baseline.configurations}
    rows = RunComparison(measurements).rows if measurements is not None else ()
    measured = {row.configuration.name: measured_step(row) for row in rows}
    findings = [
        *_predictions(baseline, now, limits),
        *(_measurements(baseline, measured, limits) if measurements is not None else ()),
        *_accuracy(baseline, now, measured, least),
    ]
    return Regression(tuple(findings), tuple(_warnings(baseline, machine, measurements)))


def _predictions(
    baseline: Baseline, now: Mapping[str, PredictedStep], limits: Tolerances
) -> Iterator[RegressionFinding]:
    """Every predicted number."""
    for one in baseline.configurations:
        for quantity, field, unit in _PREDICTED:
            before, after = getattr(one.predicted, field), getattr(now[one.name], field)
            change = relative_error(after, before)
            moved = before != after if change is None else abs(change) > limits.prediction
            yield RegressionFinding(
                "predictions", one.name, quantity, unit, before, after, limits.prediction, failed=moved
            )


def _measurements(
    baseline: Baseline, now: Mapping[str, MeasuredStep], limits: Tolerances
) -> Iterator[RegressionFinding]:
    """Every configuration that was measured before; one that is missing now fails."""
    for one in baseline.configurations:
        before, after = one.measured, now.get(one.name)
        if before is None:
            continue
        step = max(limits.step, before.spread, 0.0 if after is None else after.spread)
        checked: tuple[tuple[str, str, Unit, float], ...] = (
            ("step", "step_s", "s", step),
            ("communication", "communication_s", "s", max(limits.communication, step)),
            ("memory", "memory_bytes", "bytes", limits.memory),
        )
        for quantity, field, unit, limit in checked:
            then = getattr(before, field)
            value = None if after is None else getattr(after, field)
            worse = value is None or value > then * (1.0 + limit)
            yield RegressionFinding("measurements", one.name, quantity, unit, then, value, limit, failed=worse)


def _accuracy(
    baseline: Baseline, now: Mapping[str, PredictedStep], measured: Mapping[str, MeasuredStep], floors: Floors
) -> Iterator[RegressionFinding]:
    """How well predictions match measurements: those of the baseline, then the current ones."""
    then = _qualities(baseline, {one.name: one.predicted for one in baseline.configurations}, {})
    after = _qualities(baseline, now, measured)
    if not after["step"].rows:
        return
    for quantity, what, field, floor in (
        ("rank correlation of steps", "step", "spearman", floors.spearman),
        ("regret of the predicted best", "step", "regret", floors.regret),
        ("mean error of steps", "step", "mape", floors.step_error),
        ("mean error of communication", "communication", "mape", floors.communication_error),
    ):
        value: float = getattr(after[what], field)
        missed = floor is not None and not (value >= floor if field == "spearman" else value <= floor)
        before: float = getattr(then[what], field)
        yield RegressionFinding("accuracy", "all", quantity, "share", before, value, floor, failed=missed)


def _qualities(
    baseline: Baseline, predicted: Mapping[str, PredictedStep], measured: Mapping[str, MeasuredStep]
) -> dict[str, Quality]:
    """Of step and communication, over all configurations that were ever measured."""
    steps, communication = [], []
    for one in baseline.configurations:
        found = measured.get(one.name, one.measured)
        if found is not None:
            steps.append(Pair(predicted[one.name].step_s, found.step_s))
            communication.append(Pair(predicted[one.name].communication_s, found.communication_s))
    return {"step": quality("step", steps), "communication": quality("communication", communication)}


def _warnings(baseline: Baseline, machine: Machine | None, measurements: Measurements | None) -> Iterator[str]:
    """Differences between then and now that are not compared."""
    if machine is not None and machine != baseline.machine:
        yield (
            f"predicted for machine profile {machine.name!r}, the baseline for {baseline.machine.name!r} "
            "as it was then, so predictions may differ"
        )
    if measurements is None:
        return
    if baseline.place is None:
        yield "the baseline has no measurements: only predictions and accuracy are compared"
    else:
        for field, description in type(baseline.place).model_fields.items():
            then, after = getattr(baseline.place, field), getattr(measurements.place, field)
            if then != after:
                words = f"{field.replace('_', ' ')} was {then!r}, is {after!r} ({description.description})"
                yield f"another machine: {words}"
    if measurements.model != baseline.model:
        yield f"the measurements are of model {measurements.model.name!r}, the baseline is of another"
    known = {one.name for one in baseline.configurations}
    new = [one.name for one in measurements.configurations if one.name not in known]
    if new:
        yield f"not in the baseline, and not compared: {', '.join(new)}"
