"""Runs configurations in turn, A B C, A B C, so that what changes on the host meanwhile meets all of them alike."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from axonn_tune import __version__
from axonn_tune.launch.config import write_launch
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.results import (
    MeasuredConfiguration,
    MeasuredTerm,
    Measurements,
    MeasurementSite,
    PredictedStep,
    Serial,
)
from axonn_tune.validation.choice import Chosen, name_of, serial
from axonn_tune.validation.folder import Outcome, read_outcome
from axonn_tune.validation.places import Ranks, train_alone


@dataclass(frozen=True)
class Progress:
    """After a run: how many of how many are done, what it was, and how long the rest will take."""

    done: int
    of: int
    launch: Launch
    outcome: Outcome
    left_s: float

    @property
    def name(self) -> str:
        """What was run, as tables call it."""
        return name_of(self.launch)


@dataclass(frozen=True)
class Extent:
    """How much to run: rounds through all configurations, steps of each run, with or without the serial run."""

    repeats: int
    steps: int
    alone: bool = True


Listen = Callable[[Progress], None]


def measure(
    chosen: Chosen, ranks: Ranks, extent: Extent, *, folder: Path, listen: Listen, save: Callable[[Measurements], None]
) -> Measurements:
    """Run everything; `save` gets what there is after each round. Runs leave their folders in `folder`.

    UsageError, before anything runs, if the ranks are not those needed; TrainingFailedError if a run fails.
    """
    for launch in chosen.launches:
        ranks.require(launch)
    outcomes: list[list[Outcome]] = [[] for _ in chosen.launches]
    alone = _alone(chosen, extent, folder) if extent.alone else None
    began, done = time.monotonic(), 0
    total = extent.repeats * len(chosen.launches)
    for repeat in range(extent.repeats):
        for number, launch in enumerate(chosen.launches):
            outcome = _run(launch, ranks, extent.steps, folder / f"{number:03d}-{repeat}")
            outcomes[number].append(outcome)
            done += 1
            left_s = (time.monotonic() - began) / done * (total - done)
            listen(Progress(done, total, launch, outcome, left_s))
        found = _document(chosen, ranks, outcomes, alone)
        save(found)
    return found


def _run(launch: Launch, ranks: Ranks, steps: int, directory: Path) -> Outcome:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "launch.yaml"
    write_launch(path, launch)
    began, load = datetime.now(UTC).isoformat(timespec="seconds"), os.getloadavg()[0]
    ranks.run(launch, path, steps=steps, directory=directory)
    return read_outcome(directory, began=began, load=round(load, 1))


def _alone(chosen: Chosen, extent: Extent, folder: Path) -> Serial:
    launch, directory = serial(chosen), folder / "serial"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "launch.yaml"
    write_launch(path, launch)
    train_alone(launch, path, steps=extent.steps, directory=directory)
    outcome = read_outcome(directory, began=datetime.now(UTC).isoformat(timespec="seconds"), load=0.0)
    return Serial(losses=outcome.times.losses, gradient_norms=outcome.times.gradient_norms)


def _document(
    chosen: Chosen, ranks: Ranks, outcomes: Sequence[Sequence[Outcome]], alone: Serial | None
) -> Measurements:
    first = outcomes[0][0]
    return Measurements(
        schema="axonn-tune/measurement/1",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_version=__version__,
        command=chosen.command,
        place=_place(ranks, first, chosen.launches[0]),
        warmup_steps=first.warmup_steps,
        model_sha256=chosen.model.sha256,
        machine_sha256=chosen.machine.sha256,
        model=chosen.model.document,
        machine=chosen.machine.document,
        serial=alone,
        configurations=tuple(
            _configuration(launch, mine) for launch, mine in zip(chosen.launches, outcomes, strict=True)
        ),
    )


def _place(ranks: Ranks, outcome: Outcome, launch: Launch) -> MeasurementSite:
    ran = outcome.ran_on
    return MeasurementSite(
        network=ranks.network,
        host=ran.host,
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        device=ran.device,
        ranks=ran.ranks,
        ranks_per_node=launch.ranks_per_node,
        backend=ran.backend,
        torch_version=ran.torch_version,
    )


def _processor() -> str:
    """This host's CPU as Linux names it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8", "replace").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _configuration(launch: Launch, outcomes: Sequence[Outcome]) -> MeasuredConfiguration:
    return MeasuredConfiguration(
        grid=launch.grid,
        micro_batch=launch.micro_batch,
        recompute=launch.recompute,
        kept_layers=launch.kept_layers,
        workload=launch.workload,
        predicted=PredictedStep.of(launch),
        runs=tuple(outcome.times for outcome in outcomes),
        terms=_terms(outcomes),
    )


def _terms(outcomes: Sequence[Outcome]) -> tuple[MeasuredTerm, ...]:
    """Terms that every run has."""
    found = []
    for key, term in outcomes[0].terms.items():
        mine = [outcome.terms[key] for outcome in outcomes if key in outcome.terms]
        if len(mine) < len(outcomes):
            continue
        found.append(
            MeasuredTerm(
                op=term.op,
                axis=term.axis,
                phase=term.phase,
                layer=term.layer,
                count=term.count,
                bytes=term.bytes,
                group=term.group,
                predicted_s=term.predicted_s,
                predicted_exposed_s=term.predicted_exposed_s,
                measured_s=tuple(one.measured_s for one in mine),
                exposed_s=tuple(one.measured_exposed_s for one in mine),
                steps_s=tuple(outcome.step_terms_s.get(key, ()) for outcome in outcomes),
            )
        )
    return tuple(found)
