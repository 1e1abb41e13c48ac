"""What has changed against a baseline: predictions, measured times, and how well the one tells the other.

Two gates that are different jobs. A prediction that moves by more than a trifle fails: somebody changed the
model, and must say so by recording anew. Accuracy is tracked, and fails below its floor alone; a step that
became slower fails beyond its tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from axonn_tune.specs.machine import Machine
from axonn_tune.specs.results import (
    Baseline,
    Floors,
    MeasuredStep,
    Measurements,
    MeasurementSite,
    PredictedStep,
    Tolerances,
)
from axonn_tune.validation.baseline import measured_step
from axonn_tune.validation.comparison import Comparison, Pair, Quality, quality
from axonn_tune.validation.repricing import predicted_step, price

Gate: TypeAlias = Literal["predictions", "measurements", "accuracy"]
Unit: TypeAlias = Literal["s", "bytes", "share"]
GATES: tuple[Gate, ...] = ("predictions", "measurements", "accuracy")


@dataclass(frozen=True)
class Finding:
    """One number then and now. limit: the relative change, or for accuracy the value, beyond which it fails."""

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
        """now / before - 1; None where either is missing, or was nothing."""
        return self.now / self.before - 1.0 if self.before and self.now is not None else None


@dataclass(frozen=True)
class Regression:
    """Everything compared. warnings: why some of it may compare what cannot be compared."""

    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]

    @property
    def failures(self) -> tuple[Finding, ...]:
        """What fails."""
        return tuple(one for one in self.findings if one.failed)

    def of(self, gate: Gate) -> tuple[Finding, ...]:
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
    """Compare what is predicted now, and what was measured now if anything was, with a baseline.

    machine: predict for this profile instead of the baseline's own.
    """
    limits, least = tolerances or baseline.tolerances, floors or baseline.floors
    profile = machine or baseline.machine
    now = {one.name: predicted_step(price(baseline.model, profile, one)) for one in baseline.configurations}
    measured = _measured_now(measurements) if measurements is not None else {}
    findings = [
        *_predictions(baseline, now, limits),
        *(_measurements(baseline, measured, limits) if measurements is not None else ()),
        *_accuracy(baseline, now, measured, least),
    ]
    return Regression(tuple(findings), tuple(_warnings(baseline, machine, measurements)))


def _measured_now(measurements: Measurements) -> dict[str, MeasuredStep]:
    return {row.configuration.name: measured_step(row) for row in Comparison(measurements).rows}


_PREDICTED: tuple[tuple[str, str, Unit], ...] = (
    ("step", "step_s", "s"),
    ("computation", "compute_s", "s"),
    ("communication", "communication_s", "s"),
    ("exposed communication", "exposed_communication_s", "s"),
    ("memory", "memory_bytes", "bytes"),
)


def _predictions(baseline: Baseline, now: Mapping[str, PredictedStep], limits: Tolerances) -> Iterator[Finding]:
    """Every predicted number."""
    for one in baseline.configurations:
        for quantity, field, unit in _PREDICTED:
            before, after = getattr(one.predicted, field), getattr(now[one.name], field)
            found = Finding("predictions", one.name, quantity, unit, before, after, limits.prediction, failed=False)
            moved = abs(found.change) > limits.prediction if found.change is not None else before != after
            yield replace(found, failed=moved)


def _measurements(baseline: Baseline, now: Mapping[str, MeasuredStep], limits: Tolerances) -> Iterator[Finding]:
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
            yield Finding("measurements", one.name, quantity, unit, then, value, limit, failed=worse)


def _accuracy(
    baseline: Baseline, now: Mapping[str, PredictedStep], measured: Mapping[str, MeasuredStep], floors: Floors
) -> Iterator[Finding]:
    """How well predictions tell measurements: those of the baseline, then those of now."""
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
        yield Finding("accuracy", "all", quantity, "share", before, value, floor, failed=missed)


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
    """What differs between then and now beside what is compared."""
    if machine is not None and machine != baseline.machine:
        yield (
            f"predicted for machine profile {machine.name!r}, the baseline for {baseline.machine.name!r} "
            "as it was then: predictions may differ for that"
        )
    if measurements is None:
        return
    if baseline.place is None:
        yield "the baseline has no measurements: only predictions and accuracy are compared"
    else:
        yield from place_differences(baseline.place, measurements.place)
    if measurements.model != baseline.model:
        yield f"measured was model {measurements.model.name!r}, the baseline has another"
    known = {one.name for one in baseline.configurations}
    new = [one.name for one in measurements.configurations if one.name not in known]
    if new:
        yield f"not in the baseline, and not compared: {', '.join(new)}"


def place_differences(before: MeasurementSite, now: MeasurementSite) -> Iterator[str]:
    """A warning for everything of two places that differs."""
    for field, description in type(before).model_fields.items():
        then, after = getattr(before, field), getattr(now, field)
        if then != after:
            yield f"another machine: {field.replace('_', ' ')} was {then!r}, is {after!r} ({description.description})"
