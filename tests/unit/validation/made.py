"""Measurement files made up from predictions, so that what a comparison must find is known."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.request import Request
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.launch import Launch, PredictedTerm
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.results import (
    MeasuredConfiguration,
    MeasuredTerm,
    Measurements,
    MeasurementSite,
    PredictedStep,
    RunTimes,
    Serial,
)
from axonn_tune.validation.comparison import repriced
from axonn_tune.validation.runner import Selection, ValidationPlan, plan_from_ranking

Factor = Callable[[int], float]
"""Measured / predicted of a configuration by its number."""
LOSSES, NORMS = (6.25, 6.0), (1.5, 1.25)


@cache
def chosen(*, top: int = 0) -> ValidationPlan:
    """Grids of 8 ranks of nano on a two-tier machine."""
    request = Request("nano", gpus=8, precision="bf16", recompute="none")
    return plan_from_ranking(load_inputs(request), Selection(top), command="made up")


def machine() -> Machine:
    """What is predicted for: Perlmutter's GPUs with a host that is never late, as if they were CPUs."""
    found = load_machine("perlmutter").document
    return found.model_copy(update={"launcher": found.launcher.model_copy(update={"backend": "gloo"})})


def measurements(factor: Factor = lambda number: 1.0, *, runs: int = 1, real: Machine | None = None) -> Measurements:
    """Everything measured as predicted times a factor; real: as predicted for this machine instead."""
    found = chosen()
    document = Measurements(
        schema="axonn-tune/measurement/1",
        created="2026-01-02T03:04:05+00:00",
        tool_version="0",
        command=found.command,
        place=place(),
        warmup_steps=2,
        model_sha256=found.model.sha256,
        machine_sha256=found.machine.sha256,
        model=found.model.document,
        machine=found.machine.document,
        serial=Serial(losses=LOSSES, gradient_norms=NORMS),
        configurations=tuple(
            _configuration(launch, factor(number), runs) for number, launch in enumerate(found.launches)
        ),
    )
    return document if real is None else _measured_on(document, real)


def place() -> MeasurementSite:
    """Somewhere."""
    return MeasurementSite(
        network="made up",
        host="here",
        processor="none",
        cores=2,
        device="cpu",
        ranks=8,
        ranks_per_node=4,
        backend="gloo",
        torch_version="2",
    )


def _configuration(launch: Launch, factor: float, runs: int) -> MeasuredConfiguration:
    predicted = PredictedStep.of(launch)
    assert predicted.step_s is not None
    assert predicted.compute_s is not None
    assert predicted.exposed_communication_s is not None
    assert predicted.memory_bytes is not None
    one = RunTimes(
        began="2026-01-02T03:04:05+00:00",
        load=0.0,
        step_s=predicted.step_s * factor,
        compute_s=predicted.compute_s * factor,
        communication_s=predicted.communication_s * factor,
        exposed_communication_s=predicted.exposed_communication_s * factor,
        memory_bytes=predicted.memory_bytes,
        steps_s=(predicted.step_s * factor,),
        losses=LOSSES,
        gradient_norms=NORMS,
    )
    return MeasuredConfiguration(
        grid=launch.grid,
        micro_batch=launch.micro_batch,
        recompute=launch.recompute,
        kept_layers=launch.kept_layers,
        workload=launch.workload,
        predicted=predicted,
        runs=(one,) * runs,
        terms=tuple(_term(term, factor, runs) for term in launch.predicted.terms),
    )


def _term(term: PredictedTerm, factor: float, runs: int) -> MeasuredTerm:
    return MeasuredTerm(
        op=term.op,
        axis=term.axis,
        phase=term.phase,
        layer=term.layer,
        count=term.count,
        bytes=round(term.bytes),
        group=term.group,
        predicted_s=term.seconds,
        predicted_exposed_s=term.exposed_s,
        measured_s=(term.seconds * factor,) * runs,
        exposed_s=(term.exposed_s * factor,) * runs,
        steps_s=((term.seconds * factor,),) * runs,
    )


def _measured_on(document: Measurements, real: Machine) -> Measurements:
    """Measured is what another profile predicts; predicted stays."""
    truth = repriced(document, real)
    configurations = []
    for one, true in zip(document.configurations, truth.configurations, strict=True):
        step = true.predicted
        run = one.runs[0].model_copy(
            update={
                "step_s": step.step_s,
                "compute_s": step.compute_s,
                "communication_s": step.communication_s,
                "exposed_communication_s": step.exposed_communication_s,
            }
        )
        terms = tuple(
            term.model_copy(update={"measured_s": (other.predicted_s,)})
            for term, other in zip(one.terms, true.terms, strict=True)
        )
        configurations.append(one.model_copy(update={"runs": (run,), "terms": terms}))
    return document.model_copy(update={"configurations": tuple(configurations)})
