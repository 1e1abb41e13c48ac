"""Baselines, and checks against them: predictions, measured times, and accuracy.

There are three gates. A prediction that moves by more than its tolerance fails: a change of the model needs a new
baseline with a reason. A measured step fails if it becomes slower than its tolerance. Accuracy is tracked, and fails
below its floor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from axonn_tune.specs.machine import Machine
from axonn_tune.specs.results import (
    QUANTITIES,
    Baseline,
    ComparedConfiguration,
    Floors,
    Measurements,
    Pairs,
    Tolerances,
    launch_pairs,
)
from axonn_tune.validation.comparison import across, price, priced_pairs
from axonn_tune.validation.quality import Quality, quality, relative_error
from axonn_tune.vocabulary import VERSION

if TYPE_CHECKING:
    from axonn_tune.validation.runner import ValidationPlan

Gate: TypeAlias = Literal["predictions", "measurements", "accuracy"]
Unit: TypeAlias = Literal["s", "bytes", "share"]
GATES: tuple[Gate, ...] = get_args(Gate)


def baseline_of(
    source: Measurements | ValidationPlan,
    *,
    reason: str,
    tolerances: Tolerances,
    floors: Floors,
) -> Baseline:
    """A baseline of measured times with the predictions in the file, or of the predictions of launch configs alone."""
    if isinstance(source, Measurements):
        kept = [one.model_copy(update={"runs": (), "terms": ()}) for one in source.configurations]
        place, model, machine = source.place, source.model, source.machine
    else:
        kept = [ComparedConfiguration.from_fields_of(one, pairs=launch_pairs(one)) for one in source.launches]
        place, model, machine = None, source.model.document, source.machine.document
    return Baseline(
        schema="axonn-tune/baseline/2",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_version=VERSION,
        reason=reason,
        place=place,
        tolerances=tolerances,
        floors=floors,
        model=model,
        machine=machine,
        configurations=tuple(kept),
    )


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
    now = {one.name: priced_pairs(price(baseline.model, profile, one)) for one in baseline.configurations}
    measured = {one.name: one.pairs for one in (measurements.configurations if measurements is not None else ())}
    findings = [
        *_predictions(baseline, now, limits),
        *(_measurements(baseline, measured, limits) if measurements is not None else ()),
        *_accuracy(baseline, now, measured, least),
    ]
    return Regression(tuple(findings), tuple(_warnings(baseline, machine, measurements)))


def _unit(quantity: str) -> Unit:
    return "bytes" if quantity == "memory_bytes" else "s"


def _predictions(baseline: Baseline, now: Mapping[str, Pairs], limits: Tolerances) -> Iterator[RegressionFinding]:
    """Every predicted number."""
    for one in baseline.configurations:
        for key, words in QUANTITIES.items():
            before, after = one.pairs.predicted.get(key), now[one.name].predicted.get(key)
            change, limit = relative_error(after, before), limits.prediction
            moved = before != after if change is None else abs(change) > limit
            yield RegressionFinding("predictions", one.name, words, _unit(key), before, after, limit, failed=moved)


def _measurements(baseline: Baseline, now: Mapping[str, Pairs], limits: Tolerances) -> Iterator[RegressionFinding]:
    """Every configuration that was measured before; one that is missing now fails."""
    for one in baseline.configurations:
        if not one.pairs.measured:
            continue
        after = now.get(one.name, Pairs())
        step = max(limits.step, one.pairs.spread.get("step_s", 0.0), after.spread.get("step_s", 0.0))
        for key, limit in (
            ("step_s", step),
            ("communication_s", max(limits.communication, step)),
            ("memory_bytes", limits.memory),
        ):
            then, value = one.pairs.measured[key], after.measured.get(key)
            worse = value is None or value > then * (1.0 + limit)
            words, unit = QUANTITIES[key], _unit(key)
            yield RegressionFinding("measurements", one.name, words, unit, then, value, limit, failed=worse)


def _accuracy(
    baseline: Baseline, now: Mapping[str, Pairs], measured: Mapping[str, Pairs], floors: Floors
) -> Iterator[RegressionFinding]:
    """How well predictions match measurements: those of the baseline, then the current ones."""
    recorded = {one.name: one.pairs for one in baseline.configurations}
    latest = {
        name: now[name].model_copy(update={"measured": measured.get(name, pairs).measured})
        for name, pairs in recorded.items()
    }
    then, after = _qualities(recorded), _qualities(latest)
    if not after["step_s"].rows:
        return
    for quantity, key, field, floor in (
        ("rank correlation of steps", "step_s", "spearman", floors.spearman),
        ("regret of the predicted best", "step_s", "regret", floors.regret),
        ("mean error of steps", "step_s", "mape", floors.step_error),
        ("mean error of communication", "communication_s", "mape", floors.communication_error),
    ):
        before: float = getattr(then[key], field)
        value: float = getattr(after[key], field)
        missed = floor is not None and not (value >= floor if field == "spearman" else value <= floor)
        yield RegressionFinding("accuracy", "all", quantity, "share", before, value, floor, failed=missed)


def _qualities(rows: Mapping[str, Pairs]) -> dict[str, Quality]:
    """Of each quantity, over all configurations that were ever measured."""
    return {key: quality(pairs) for key, pairs in across(rows).items()}


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
