"""`axonn_tune.run`, `validate`, `regress` and `calibrate`: training, measuring, and comparisons.

Each function imports its own needs: running a launch config takes no cost model.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from axonn_tune.errors import UsageError, error_of
from axonn_tune.files import write_text_atomically
from axonn_tune.launch import host
from axonn_tune.request import options_of, whole
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.document import to_yaml
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document
from axonn_tune.specs.results import (
    SUMMARY_NAME,
    Baseline,
    Floors,
    Measurements,
    Summary,
    Tolerances,
    remove_outcome,
    run_directory,
)

if TYPE_CHECKING:
    from axonn_tune.calibration import measure as measuring
    from axonn_tune.calibration.profile import Calibration
    from axonn_tune.specs.catalog import MachineLike, ModelLike
    from axonn_tune.specs.machine import Backend
    from axonn_tune.validation.comparison import RunComparison
    from axonn_tune.validation.published.accuracy import Accuracy
    from axonn_tune.validation.regression import Regression
    from axonn_tune.validation.runner import RankRunner, ValidationPlan, ValidationProgress
    from axonn_tune.vocabulary import Precision


@dataclass(frozen=True)
class RunResult:
    """A run that has ended: its folder, its exit code, and whether this process is the one to report it."""

    folder: Path
    code: int
    leads: bool


def run(
    launch: str | Path,
    *,
    steps: int | None = None,
    resume: bool = False,
    resume_from: str | None = None,
    directory: str | Path | None = None,
) -> Summary:
    """Train as a launch config says, on this host, as `axonn-tune run` does; predicted vs. measured.

    steps: train up to this step, that of the config unless given. resume: fail without a checkpoint to resume from;
    resume_from: the name of one, the newest unless given. directory: folder for metrics, `runs/<time>-<name>` unless
    given. Needs torch, and the main thread. EnvironmentProblem without torch, UsageError for too many ranks or too few
    steps, TrainingFailedError, with the exit code, if the run ends otherwise than it should.
    """
    warn = partial(warnings.warn, stacklevel=2)
    ended = start(launch, steps=steps, resume=resume, resume_from=resume_from, directory=directory, warn=warn)
    if ended.code:
        raise error_of(ended.code)(f"the run in {str(ended.folder)!r} ended with exit code {ended.code}")
    if not (ended.folder / SUMMARY_NAME).exists():
        raise UsageError(f"the run in {str(ended.folder)!r} ended well, but after too few steps to be measured")
    return load_document(ended.folder / SUMMARY_NAME, schema=Summary)


def start(
    launch: str | Path,
    *,
    steps: int | None = None,
    resume: bool = False,
    resume_from: str | None = None,
    directory: str | Path | None = None,
    trace: int | None = None,
    trace_all: bool = False,
    warn: Callable[[str], None],
) -> RunResult:
    """Run to the end; under torchrun or srun as the rank this process is. Errors as `run`, but for how it ends.

    trace: steps to trace, on every rank with `trace_all`. warn: gets a warning if ranks share cores.
    """
    document, path = load_document(launch, schema=Launch), Path(launch)
    host.require_torch()
    folder = run_directory(document) if directory is None else Path(directory)
    arguments = ["--directory", str(folder)]
    for name, number in (("--steps", steps), ("--trace", trace)):
        arguments += [] if number is None else [name, str(number)]
    # In one word: a name may look like an option.
    arguments += [f"--resume-from={resume_from}"] if resume_from is not None else []
    arguments += [*(["--resume"] if resume else []), *(["--trace-all"] if trace_all else [])]
    command = host.command_of(document, path, arguments=arguments, environment=os.environ)
    cores = len(os.sched_getaffinity(0))
    crowded = None if host.already_started(os.environ) else host.crowding(document, cores=cores)
    if crowded:
        warn(crowded)
    leads = host.leads(os.environ)
    if leads:
        remove_outcome(folder)
    return RunResult(folder, host.run_command(command, document), leads)


def start_dry(launch: str | Path) -> int:
    """Build one rank without memory or network, which prints what it would use; the exit code."""
    document = load_document(launch, schema=Launch)
    host.require_torch()
    return host.run_command([sys.executable, "-m", "axonn_tune.runtime.dry_run", str(launch)], document)


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Where and how often to run, as the options of `axonn-tune validate`.

    repeats: rounds through all configurations. steps: of each run; the first two do not count. serial: also train on
    one rank alone, as the reference for losses. fastest: compare each configuration's fastest run, not the median. lab:
    run on the ranks of this running lab. realtime: with a lab, prioritized over all other processes; root only.
    start_with: launcher elsewhere, `"srun --ntasks=8"`. folder: keep the folder of each run here. output: measurement
    file.
    """

    repeats: int = 3
    steps: int = 8
    serial: bool = True
    fastest: bool = False
    lab: str | None = None
    realtime: bool = False
    start_with: str | None = None
    folder: str | Path | None = None
    output: str | Path | None = None


_DEFAULT_RUNS = Runs()


def validate(
    model: ModelLike, gpus: int, *, top: int = 5, runs: Runs = _DEFAULT_RUNS, **options: object
) -> RunComparison:
    """Run the first `top` (0: all) rows of a ranking, and compare predicted vs. measured.

    Other parameters as of `axonn_tune.search`. `.blame` names wrong training and differences from the program; `.sound`
    is then False. Needs torch; TrainingFailedError if a run fails.
    """
    from axonn_tune.api.search import call_text, request_of
    from axonn_tune.ranking.inputs import load_inputs
    from axonn_tune.validation.runner import Selection, plan_from_ranking

    given = {"model": model, "gpus": gpus, **options}
    inputs = load_inputs(request_of("validate", given, known=options_of("validate")))
    selection = Selection(whole("top", top, least=0))
    return compared(plan_from_ranking(inputs, selection, command=call_text("validate", given)), runs)


def validate_launches(
    launches: Sequence[str | Path], *, machine: str | Path | None = None, runs: Runs = _DEFAULT_RUNS
) -> RunComparison:
    """Run launch configs, on the profile they name or on `machine`, and compare. Otherwise as `validate`."""
    from axonn_tune.api.search import call_text
    from axonn_tune.validation.runner import plan_from_files

    paths = [str(path) for path in launches]
    if not paths:
        raise UsageError("launches=(): name at least one launch config")
    call = call_text("validate_launches", {"launches": paths, "machine": machine})
    named = None if machine is None else str(machine)
    return compared(plan_from_files(paths, machine=named, command=call), runs)


def accuracy(rows: str | Path | None = None, *, machine: MachineLike | None = None, worst: int = 20) -> Accuracy:
    """Predict published steps, or those of a CSV file, as `axonn-tune accuracy` does; runs nothing.

    machine: price every row of the file on this profile as it is, instead of the shipped one nearest to its words; what
    a row says otherwise is in `.warnings` of its prediction. worst: how many of the worst rows to list. `.steps` has
    the predictions, in seconds with 80% intervals, `.summary` their errors. UsageError for a file that cannot be read,
    DocumentError with every column and cell that is wrong.
    """
    from axonn_tune.validation.published.accuracy import evaluate

    if machine is not None and rows is None:
        raise UsageError("--machine prices the steps of --rows, and not those that ship: name a file of rows")
    priced_on = None if machine is None else load_machine(machine)
    return evaluate(None if rows is None else Path(rows), machine=priced_on, listed=whole("worst", worst, least=0))


validate_rows = accuracy
"""The earlier name."""


def compared(
    plan: ValidationPlan, runs: Runs, *, listen: Callable[[ValidationProgress], None] = lambda progress: None
) -> RunComparison:
    """Run the plan and compare; errors as `validate`. listen: called after each run."""
    from axonn_tune.validation.comparison import RunComparison, fastest_runs
    from axonn_tune.validation.runner import run_plan

    host.require_torch()
    repeats, steps = whole("repeats", runs.repeats), whole("steps", runs.steps, least=3)

    def save(found: Measurements) -> None:
        # After each round, so that a validation that is cut off leaves whole rounds.
        if runs.output is not None:
            write_text_atomically(runs.output, to_yaml(found, header=[f"Written by {found.command}"]))

    with runner_of(runs) as runner, tempfile.TemporaryDirectory(prefix="axonn-tune-") as folder:
        measured = run_plan(
            plan,
            runner,
            repeats=repeats,
            steps=steps,
            serial=runs.serial,
            folder=Path(runs.folder or folder),
            listen=listen,
            save=save,
        )
    return RunComparison(fastest_runs(measured) if runs.fastest else measured)


@contextmanager
def runner_of(runs: Runs) -> Iterator[RankRunner]:
    """The ranks to run on; UsageError if they are named twice."""
    from axonn_tune.lab.lab import Lab
    from axonn_tune.validation.runner import LabRunner, ProcessRunner

    if runs.lab is None:
        if runs.realtime:
            raise UsageError("--realtime is for the ranks of a lab: give --lab too")
        try:
            words = shlex.split(runs.start_with or "")
        except ValueError as error:
            raise UsageError(f"--start-with {runs.start_with!r:.80}: {error}; write it as a shell has it") from None
        yield ProcessRunner(tuple(words))
        return
    if runs.start_with is not None:
        raise UsageError("--lab and --start-with both say where the ranks are")
    with Lab.attached(runs.lab) as lab:
        yield LabRunner(lab, realtime=runs.realtime)


def regress(
    baseline: str | Path | Baseline,
    *,
    measurement: str | Path | Measurements | None = None,
    machine: MachineLike | None = None,
    tolerances: Tolerances | None = None,
    floors: Floors | None = None,
) -> Regression:
    """Compare predictions, and measured times if there are any, with a baseline, as `axonn-tune regress` does.

    measurement: what a validation wrote. machine: predict for this profile instead of the baseline's own.
    tolerances, floors: instead of the baseline's own. What fails is in `.failures`; nothing is raised for it.
    """
    from axonn_tune.validation.regression import check

    return check(
        baseline if isinstance(baseline, Baseline) else load_document(baseline, schema=Baseline),
        machine=None if machine is None else load_machine(machine).document,
        measurements=load_document(measurement, schema=Measurements)
        if isinstance(measurement, str | Path)
        else measurement,
        tolerances=tolerances,
        floors=floors,
    )


class CalibrateOptions(TypedDict, total=False):
    """Options of a calibration, as of `axonn-tune calibrate`; each may be left out.

    machine: profile for what is not measured, localhost by default. points: file of raw points.
    ranks_per_node: consecutive ranks that share the intra-node network. resume: continue from the raw points.
    """

    machine: MachineLike
    precision: Precision
    batch: int
    backend: Backend
    ranks_per_node: int
    name: str
    points: str
    resume: bool


def calibrate(
    output: str | Path,
    *,
    ranks: int | None = None,
    budget: str = "60s",
    model: ModelLike = "nano",
    listen: Callable[[measuring.CalibrationProgress], None] | None = None,
    **options: Unpack[CalibrateOptions],
) -> Calibration | None:
    """Measure collectives, GEMMs and steps on all ranks at once, and write a machine profile, with its fits.

    ranks: how many to start here, one per core unless given; under torchrun or srun this process is one of those
    that are started, and all but the first get None. budget: time to measure in, as in `20s`. model: whose
    GEMMs and step are measured. listen: called as points come in. Needs torch. EnvironmentProblem
    without it; TrainingFailedError if a rank fails.
    """
    from axonn_tune.calibration import measure

    host.require_torch()
    request = measure.CalibrationRequest(output=str(output), ranks=ranks, budget=budget, model=model, **options)
    code = measure.run_probes(request, measure.plan_of(request), listen or (lambda progress: None))
    if code:
        raise error_of(code)(f"the ranks that measure ended with exit code {code}")
    return measure.write_profile(request) if host.leads(os.environ) else None
