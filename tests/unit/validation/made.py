"""Measurement files made up from predictions, so that what a comparison must find is known."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.request import Request
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.results import ComparedConfiguration, Measurements, Run, Serial, Site, launch_pairs
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
        schema="axonn-tune/measurement/2",
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


def place() -> Site:
    """Somewhere."""
    return Site(
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


def _configuration(launch: Launch, factor: float, runs: int) -> ComparedConfiguration:
    pairs = launch_pairs(launch)
    measured = {name: value * factor for name, value in pairs.predicted.items()}
    measured["memory_bytes"] = pairs.predicted["memory_bytes"]
    one = Run(
        began="2026-01-02T03:04:05+00:00",
        load=0.0,
        measured=measured,
        steps_s=(measured["step_s"],),
        losses=LOSSES,
        gradient_norms=NORMS,
    )
    terms = [
        term.model_copy(
            update={
                "measured_s": ((term.seconds or 0.0) * factor,) * runs,
                "measured_exposed_s": ((term.exposed_s or 0.0) * factor,) * runs,
                "steps_s": (((term.seconds or 0.0) * factor,),) * runs,
            }
        )
        for term in launch.predicted.terms
    ]
    return ComparedConfiguration.from_fields_of(launch, pairs=pairs).with_runs([one] * runs, terms)


def _measured_on(document: Measurements, real: Machine) -> Measurements:
    """Measured is what another profile predicts; predicted stays."""
    truth = repriced(document, real)
    configurations = []
    for one, true in zip(document.configurations, truth.configurations, strict=True):
        run = one.runs[0].model_copy(update={"measured": one.runs[0].measured | true.pairs.predicted})
        terms = [
            term.model_copy(update={"measured_s": (other.seconds,)})
            for term, other in zip(one.terms, true.terms, strict=True)
        ]
        configurations.append(one.with_runs([run], terms))
    return document.model_copy(update={"configurations": tuple(configurations)})
