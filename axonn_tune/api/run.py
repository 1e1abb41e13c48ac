"""`axonn_tune.run`: execute a launch config on this host."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from axonn_tune.errors import UsageError, error_of
from axonn_tune.launch import host
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document
from axonn_tune.specs.results import SUMMARY_NAME, Summary, remove_outcome, run_directory


@dataclass(frozen=True)
class Ended:
    """A run that has ended: its folder, its exit code, and whether this process is the one to report it."""

    folder: Path
    code: int
    leads: bool


def run(
    launch: str | Path, *, steps: int | None = None, resume: bool = False, directory: str | Path | None = None
) -> Summary:
    """Train as a launch config says, on this host, as `axonn-tune run` does; measured beside predicted.

    steps: train up to this step, that of the config unless given. resume: fail without a checkpoint to resume
    from. directory: folder for metrics, `runs/<time>-<name>` unless given. Needs torch, and the main thread.
    EnvironmentProblem without torch, UsageError for too many ranks or too few steps, TrainingFailedError,
    with the exit code, if the run ends otherwise than it should.
    """
    ended = start(launch, steps=steps, resume=resume, directory=directory, warn=_warn)
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
    directory: str | Path | None = None,
    trace: int | None = None,
    trace_all: bool = False,
    warn: Callable[[str], None],
) -> Ended:
    """Run to the end; under torchrun or srun as the rank this process is. Errors as `run`, but for how it ends.

    trace: steps to trace, on every rank with `trace_all`. warn: gets a warning if ranks share cores.
    """
    document, path = load_document(launch, schema=Launch), Path(launch)
    host.require_torch()
    folder = run_directory(document) if directory is None else Path(directory)
    arguments = ["--directory", str(folder), *_numbered({"steps": steps, "trace": trace})]
    arguments += [*(["--resume"] if resume else []), *(["--trace-all"] if trace_all else [])]
    command = host.command_of(document, path, arguments=arguments, environment=os.environ)
    crowded = None if host.already_started(os.environ) else host.crowding(document, cores=_cores())
    if crowded:
        warn(crowded)
    leads = host.leads(os.environ)
    if leads:
        remove_outcome(folder)
    return Ended(folder, host.run_command(command, document), leads)


def start_dry(launch: str | Path) -> int:
    """Build one rank without memory or network, which prints what it would use; the exit code."""
    document = load_document(launch, schema=Launch)
    host.require_torch()
    return host.run_command(host.dry_run_command(Path(launch)), document)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _numbered(given: Mapping[str, int | None]) -> list[str]:
    """Options with a number, those that were given."""
    return [word for name, number in given.items() if number is not None for word in (f"--{name}", str(number))]


def _warn(words: str) -> None:
    warnings.warn(words, stacklevel=3)
