"""Runs configurations to validate predictions.

Configurations run in turn, A B C, A B C, each time in new processes, so that other work on the host affects all alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from axonn_tune.cost.price import price
from axonn_tune.errors import EnvironmentProblem, TrainingFailedError, UsageError, error_of
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout, framework_of
from axonn_tune.lab.lab import TRAIN, Lab, exit_codes, require_world
from axonn_tune.launch import host
from axonn_tune.launch.config import build_launch, write_launch
from axonn_tune.processes import die_with, processor_name
from axonn_tune.ranking.choosing import run_search
from axonn_tune.ranking.inputs import Inputs, machine_of_launch
from axonn_tune.ranking.nearest import require_any
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.launch import OF_RUNS, CollectiveTerm, Launch, TermKey
from axonn_tune.specs.loading import Loaded, load_document, load_file
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.points import LOOPBACK
from axonn_tune.specs.results import (
    SUMMARY_NAME,
    ComparedConfiguration,
    Measurements,
    Run,
    Serial,
    Summary,
    configuration_name,
    differences_name,
    launch_pairs,
)
from axonn_tune.vocabulary import VERSION

_LOG = "log.txt"
_LAST_LINES = 12
_DIGITS = 6


@dataclass(frozen=True)
class ValidationPlan:
    """Launch configs to run, of one model and machine, best prediction first."""

    launches: tuple[Launch, ...]
    model: Loaded[Model]
    machine: Loaded[Machine]
    command: str

    def on_one_rank(self) -> Launch:
        """The first one's micro-batches on one rank, which has no order of stages."""
        first = self.launches[0]
        framework = framework_of(first).with_step(pipeline_order="1f1b")
        job = Job(self.model.document, self.machine.document, first.workload, framework)
        return _priced_launch(
            job, Layout(Grid(), first.micro_batch, "none"), self.model, self.machine, command=self.command
        )


@dataclass(frozen=True)
class Selection:
    """Part of a ranking: the first `top` grids (0: all), each in its best rank order and in these orders too.

    also_blocking: each without overlaps too.
    """

    top: int
    orders: tuple[tuple[str, ...], ...] = ()
    also_blocking: bool = False


def plan_from_ranking(inputs: Inputs, selection: Selection, *, command: str) -> ValidationPlan:
    """The configurations of a ranking; NothingFeasibleError if there is none.

    UsageError for another framework than the bundled runtime, of which launch configs are.
    """
    if (framework := inputs.problem.framework).name != AXONN_TUNE.name:
        raise UsageError(f"--framework {framework.name}: only layouts of {AXONN_TUNE.title} are recorded and run")
    ranked = run_search(inputs.problem, top=selection.top)
    require_any(ranked)
    best = [one.layout for one in ranked.first]
    workload = inputs.problem.workload
    workloads = [workload, workload.model_copy(update={"overlaps": ()})] if selection.also_blocking else [workload]
    launches = [
        _priced_launch(
            Job(inputs.model.document, inputs.machine.document, one, framework),
            *(configuration, inputs.model, inputs.machine),
            command=command,
        )
        for configuration in _in_orders(best, selection.orders)
        for one in workloads
    ]
    return ValidationPlan(tuple(launches), inputs.model, inputs.machine, command)


def plan_from_files(paths: Sequence[str], *, machine: str | None, command: str) -> ValidationPlan:
    """The configurations of launch configs, repriced for the profile they name, or for `machine`.

    UsageError if they are of different models or machines.
    """
    documents = [load_file(path, schema=Launch).document for path in paths]
    first = documents[0]
    for path, document in zip(paths, documents, strict=True):
        if document.model != first.model:
            raise UsageError(f"{path} trains another model than {paths[0]}: validate them one after the other")
        if machine is None and document.predicted.machine != first.predicted.machine:
            raise UsageError(f"{path} was predicted for another machine than {paths[0]}; --machine chooses one")
    profile = machine_of_launch(paths[0], first) if machine is None else load_machine(machine)
    model = Loaded(first.model, Path(paths[0]), first.provenance.model_sha256)
    launches = []
    known: dict[str, str] = {}
    for path, document in zip(paths, documents, strict=True):
        # Configurations are compared by their names.
        if first_path := known.get(name := configuration_name(document)):
            raise UsageError(f"{path} repeats the configuration of {first_path}: {name}")
        known[name] = path
        job = Job(model.document, profile.document, document.workload, framework_of(document))
        now = _priced_launch(job, Layout.of(document), model, profile, command=command)
        launches.append(document.model_copy(update={"predicted": now.predicted}))
    return ValidationPlan(tuple(launches), model, profile, command)


def _priced_launch(
    job: Job, configuration: Layout, model: Loaded[Model], machine: Loaded[Machine], *, command: str
) -> Launch:
    """The launch config of a configuration, with its prediction."""
    return build_launch(price(job, configuration), model=model, machine=machine, command=command)


def _in_orders(best: Iterable[Layout], orders: Sequence[tuple[str, ...]]) -> Iterator[Layout]:
    """Each configuration in its own rank order, then in the others that place its ranks differently."""
    for configuration in best:
        grid, known = configuration.grid, set[tuple[str, ...]]()
        for other in (grid, *(Grid(*grid.sizes, order=order) for order in orders)):
            # Axes of size 1 place nothing.
            placed = tuple(axis for axis in other.order if other.axis_size(axis) > 1)
            if placed not in known:
                known.add(placed)
                yield replace(configuration, grid=other)


@dataclass(frozen=True)
class LabRunner:
    """The ranks of a running lab. realtime: prioritized over ordinary processes of this host, where allowed."""

    lab: Lab
    realtime: bool = False

    @property
    def network(self) -> str:
        """The lab's shape."""
        return f"lab: {self.lab.shape.words()}"

    def require(self, launch: Launch) -> None:
        """UsageError unless the lab has as many ranks, and the backend is Gloo."""
        require_world(launch, self.lab.shape)

    def run(self, launch: Launch, path: Path, *, steps: int, directory: Path) -> None:
        """Train on every rank of the lab; errors as `ProcessRunner.run`."""
        directory.mkdir(parents=True, exist_ok=True)
        options = {"steps": steps, "directory": directory}
        arguments = (str(path), options, str(directory / _LOG))
        ended = exit_codes(self.lab.ranks.run(TRAIN, [arguments] * self.lab.shape.world, realtime=self.realtime))
        _require_success(next((code for _, code in ended if code), 0), directory)


@dataclass(frozen=True)
class ProcessRunner:
    """Ranks started on this host; or, with a command before that of a rank, wherever that command starts them."""

    before: tuple[str, ...] = ()

    @property
    def network(self) -> str:
        """Loopback, or the command."""
        return f"started by {' '.join(self.before)}" if self.before else LOOPBACK

    def require(self, launch: Launch) -> None:
        """UsageError if there are too many ranks for this host."""
        if not self.before:
            host.crowding(launch, cores=len(os.sched_getaffinity(0)))

    def run(self, launch: Launch, path: Path, *, steps: int, directory: Path) -> None:
        """Train; metrics are in the directory afterwards. TrainingFailedError with the end of the ranks' log."""
        directory.mkdir(parents=True, exist_ok=True)
        arguments = ["--steps", str(steps), "--directory", str(directory)]
        if self.before:
            # What a queue's own command starts, it ends itself.
            bound, command = None, [*self.before, sys.executable, "-m", "axonn_tune.runtime", str(path), *arguments]
        else:
            bound = partial(die_with, os.getpid())
            command = host.command_of(launch, path, arguments=arguments, environment={})
        variables = {variable.name: variable.value for variable in launch.environment} | os.environ
        with (directory / _LOG).open("a", encoding="utf-8") as log:
            try:
                ended = subprocess.run(command, env=variables, stdout=log, stderr=log, check=False, preexec_fn=bound)
            except OSError as error:
                raise EnvironmentProblem(f"cannot run {command[0]!r}: {error.strerror}") from error
        _require_success(ended.returncode, directory)


RankRunner: TypeAlias = LabRunner | ProcessRunner
"""Runs launch configs, each in fresh processes."""


def _require_success(code: int, directory: Path) -> None:
    if not code:
        return
    log = directory / _LOG
    lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
    shown = [line for line in lines if line.startswith("Error: ")] or lines[-_LAST_LINES:]
    raise error_of(code)("\n".join([f"the run in {str(directory)!r} ended with exit code {code}", *shown]))


@dataclass(frozen=True)
class RunOutcome:
    """One run; the summary's terms have each step's seconds."""

    run: Run
    summary: Summary


def read_outcome(directory: Path, *, began: str, load: float) -> RunOutcome:
    """The outcome of a run that succeeded; TrainingFailedError if it left no summary."""
    path = directory / SUMMARY_NAME
    if not path.exists():
        raise TrainingFailedError(f"the run in {str(directory)!r} measured nothing: too few steps beyond the warm-up")
    summary = load_document(path, schema=Summary)
    metrics = [one.read_text("utf-8").splitlines() for one in sorted(directory.glob("metrics-rank*.jsonl"))]
    ranks = [[line for line in map(json.loads, lines) if "step" in line] for lines in metrics]
    timed = [[step for step in steps if not step["warmup"]] for steps in ranks]
    terms = _step_terms(timed)
    differ = [json.loads(one.read_text("utf-8"))["differs"] for one in sorted(directory.glob(differences_name("*")))]
    counts = Counter(line for lines in differ for line in lines)
    run = Run(
        began=began,
        load=load,
        measured=summary.pairs.measured,
        steps_s=_means([[step["step_s"] for step in steps] for steps in timed]),
        losses=tuple(float(step["loss"]) for step in ranks[0]),
        gradient_norms=tuple(float(step["gradient_norm"]) for step in ranks[0]),
        differs=tuple(f"{line} (on {count} of the ranks)" for line, count in counts.items()),
    )
    found = [term.model_copy(update={"steps_s": (terms.get(term.key, ()),)}) for term in summary.terms]
    return RunOutcome(run, summary.model_copy(update={"terms": tuple(found)}))


def _means(by_rank: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Mean of each step over ranks, with the digits that a measured time can have."""
    return tuple(float(f"{fmean(step):.{_DIGITS}g}") for step in zip(*by_rank, strict=True))


def _step_terms(timed: Sequence[Sequence[dict[str, Any]]]) -> dict[TermKey, tuple[float, ...]]:
    """Each term's time in each step, mean over ranks, by its key."""
    found: dict[TermKey, list[list[float]]] = {}
    for steps in timed:
        mine: dict[TermKey, list[float]] = {}
        for step in steps:
            for term in step["terms"]:
                key = (term["op"], term["axis"], term["phase"], term["layer"], term["bytes"])
                mine.setdefault(key, []).append(term["seconds"])
        for key, values in mine.items():
            found.setdefault(key, []).append(values)
    return {key: _means(by_rank) for key, by_rank in found.items()}


@dataclass(frozen=True)
class ValidationProgress:
    """After a run: how many of how many are done, the run, and the time left."""

    done: int
    of: int
    launch: Launch
    outcome: RunOutcome
    left_s: float

    @property
    def name(self) -> str:
        """The name of the configuration in tables."""
        return configuration_name(self.launch)


def run_plan(
    plan: ValidationPlan,
    runner: RankRunner,
    *,
    repeats: int,
    steps: int,
    serial: bool = True,
    folder: Path,
    listen: Callable[[ValidationProgress], None],
    save: Callable[[Measurements], None],
) -> Measurements:
    """Run each configuration `repeats` times for `steps` steps; `save` gets the measurements so far after each round.

    serial: train on one rank, too, to compare losses with. Runs leave their folders in `folder`.
    UsageError, before anything runs, if the ranks do not suit a launch config; TrainingFailedError if a run fails.
    """
    for launch in plan.launches:
        runner.require(launch)
    outcomes: list[list[RunOutcome]] = [[] for _ in plan.launches]
    alone = None
    if serial:
        # On a rank of this host, whatever the other runs use.
        alone = Serial.from_fields_of(_run(plan.on_one_rank(), ProcessRunner(), steps, folder / "serial").run)
    began, done = time.monotonic(), 0
    total = repeats * len(plan.launches)
    for repeat in range(repeats):
        for number, launch in enumerate(plan.launches):
            outcome = _run(launch, runner, steps, folder / f"{number:03d}-{repeat}")
            outcomes[number].append(outcome)
            done += 1
            left_s = (time.monotonic() - began) / done * (total - done)
            listen(ValidationProgress(done, total, launch, outcome, left_s))
        found = _document(plan, runner, outcomes, alone)
        save(found)
    return found


def _run(launch: Launch, runner: RankRunner, steps: int, directory: Path) -> RunOutcome:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "launch.yaml"
    write_launch(path, launch)
    began, load = datetime.now(UTC).isoformat(timespec="seconds"), os.getloadavg()[0]
    runner.run(launch, path, steps=steps, directory=directory)
    return read_outcome(directory, began=began, load=round(load, 1))


def _document(
    plan: ValidationPlan, runner: RankRunner, outcomes: Sequence[Sequence[RunOutcome]], serial: Serial | None
) -> Measurements:
    first = outcomes[0][0].summary
    site = {
        "network": runner.network,
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "ranks_per_node": plan.launches[0].ranks_per_node,
    }
    return Measurements(
        schema="axonn-tune/measurement/2",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_version=VERSION,
        command=plan.command,
        place=first.ran_on.model_copy(update=site),
        warmup_steps=first.warmup_steps,
        model_sha256=plan.model.sha256,
        machine_sha256=plan.machine.sha256,
        model=plan.model.document,
        machine=plan.machine.document,
        serial=serial,
        configurations=tuple(
            ComparedConfiguration.from_fields_of(launch, pairs=launch_pairs(launch)).with_runs(
                [outcome.run for outcome in mine], _terms([outcome.summary.terms for outcome in mine])
            )
            for launch, mine in zip(plan.launches, outcomes, strict=True)
        ),
    )


def _terms(runs: Sequence[Sequence[CollectiveTerm]]) -> list[CollectiveTerm]:
    """Terms that every run has, with the times of each."""
    by_key = [{term.key: term for term in terms} for terms in runs]
    found = []
    for term in runs[0]:
        mine = [terms[term.key] for terms in by_key if term.key in terms]
        if len(mine) == len(runs):
            times = {name: tuple(time for one in mine for time in getattr(one, name)) for name in OF_RUNS}
            found.append(term.model_copy(update=times))
    return found
