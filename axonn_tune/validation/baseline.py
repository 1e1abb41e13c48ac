"""Baselines: made of a measurement file, or of the predictions of a ranking alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

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
    PredictedStep,
    Tolerances,
)
from axonn_tune.validation.comparison import Comparison, Row


def from_measurements(measurements: Measurements, *, reason: str, tolerances: Tolerances, floors: Floors) -> Baseline:
    """A baseline of what was measured, with the predictions in the file."""
    rows = Comparison(measurements).rows
    return Baseline(
        schema="axonn-tune/baseline/1",
        created=_now(),
        tool_version=__version__,
        reason=reason,
        place=measurements.place,
        tolerances=tolerances,
        floors=floors,
        model=measurements.model,
        machine=measurements.machine,
        configurations=tuple(map(_measured, rows)),
    )


def from_launches(
    launches: Sequence[Launch], model: Model, machine: Machine, *, reason: str, tolerances: Tolerances, floors: Floors
) -> Baseline:
    """A baseline of predictions alone."""
    return Baseline(
        schema="axonn-tune/baseline/1",
        created=_now(),
        tool_version=__version__,
        reason=reason,
        tolerances=tolerances,
        floors=floors,
        model=model,
        machine=machine,
        configurations=tuple(map(_predicted, launches)),
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def measured_step(row: Row) -> MeasuredStep:
    """What was measured of a configuration."""
    return MeasuredStep(
        step_s=row.step_s.measured,
        compute_s=row.compute_s.measured,
        communication_s=row.communication_s.measured,
        exposed_communication_s=row.exposed_s.measured,
        memory_bytes=row.memory_bytes.measured,
        spread=row.step_s.spread,
    )


def _measured(row: Row) -> BaselineConfiguration:
    one = row.configuration
    return BaselineConfiguration(
        grid=one.grid,
        micro_batch=one.micro_batch,
        recompute=one.recompute,
        kept_layers=one.kept_layers,
        workload=one.workload,
        predicted=one.predicted,
        measured=measured_step(row),
    )


def _predicted(launch: Launch) -> BaselineConfiguration:
    return BaselineConfiguration(
        grid=launch.grid,
        micro_batch=launch.micro_batch,
        recompute=launch.recompute,
        kept_layers=launch.kept_layers,
        workload=launch.workload,
        predicted=PredictedStep.of(launch),
    )
