"""`axonn-tune run`: execute a launch config."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from axonn_tune.cli.options import help_option

if TYPE_CHECKING:
    from collections.abc import Mapping

    from axonn_tune.specs.launch import Launch


@click.command("run", short_help="Execute a launch config on this host, or join in.")
@click.argument("launch", metavar="LAUNCH.YAML")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Train up to this step. Default: the config's.")
@click.option("--resume", is_flag=True, help="Fail if there is no checkpoint to resume from.")
@click.option("--directory", metavar="DIR", help="Folder for metrics. Default: runs/<time>-<name>.")
@click.option("--dry-run", is_flag=True, help="Build one rank without memory or network; print what it would use.")
@click.option("--terms", is_flag=True, help="In the table at the end, one row for each collective of each layer.")
@click.option("--trace", type=click.IntRange(min=1), metavar="N", help="Write a trace of N steps after the warm-up.")
@click.option("--trace-all", is_flag=True, help="With --trace: of every rank, not only the first.")
@help_option
def run_command(
    *,
    launch: str,
    steps: int | None,
    resume: bool,
    directory: str | None,
    dry_run: bool,
    terms: bool,
    trace: int | None,
    trace_all: bool,
) -> None:
    """Train as LAUNCH.YAML says, on this host; under torchrun or srun, as the rank this process is.

    One line a step goes to standard error, and each rank's metrics to a file in the run's folder. At the
    end a table says what was measured beside what was predicted; summary.json holds it all. If the launch
    config names a checkpoint.directory, the run goes on from its newest checkpoint. SIGTERM and
    SIGUSR2 save and end with exit code 75.
    """
    import os

    from axonn_tune.launch import local
    from axonn_tune.specs.launch import Launch
    from axonn_tune.specs.loading import load_document
    from axonn_tune.specs.runs import remove_outcome, run_directory

    document, path = load_document(launch, schema=Launch), Path(launch)
    local.require_torch()
    folder = run_directory(document) if directory is None else Path(directory)
    if dry_run:
        command = local.dry_run_command(path)
    else:
        arguments = ["--directory", str(folder), *_numbered({"steps": steps, "trace": trace})]
        arguments += [*(["--resume"] if resume else []), *(["--trace-all"] if trace_all else [])]
        command = local.command_of(document, path, arguments=arguments, environment=os.environ)
        _warn_of_crowding(document)
    reports = not dry_run and local.leads(os.environ)
    if reports:
        remove_outcome(folder)
    code = local.run_command(command, document)
    if reports:
        show_summary(folder, all_terms=terms)
    if code:
        raise click.exceptions.Exit(code)


def _numbered(given: Mapping[str, int | None]) -> list[str]:
    """Options with a number, those that were given."""
    return [word for name, number in given.items() if number is not None for word in (f"--{name}", str(number))]


def _warn_of_crowding(launch: Launch) -> None:
    """Where this process is to start all ranks."""
    import os

    from axonn_tune.launch import local

    if not local.already_started(os.environ):
        warning = local.crowding(launch, cores=len(os.sched_getaffinity(0)))
        if warning:
            click.echo(f"Warning: {warning}", err=True)


def show_summary(folder: Path, *, all_terms: bool) -> None:
    """The table of a run that got far enough to be measured."""
    from axonn_tune.report.terms import summary_text
    from axonn_tune.specs.loading import load_document
    from axonn_tune.specs.runs import SUMMARY_NAME, Summary

    path = folder / SUMMARY_NAME
    if path.exists():
        click.echo(f"\n{summary_text(load_document(path, schema=Summary), all_terms=all_terms)}", nl=False)
        click.echo(f"All of it, and every collective: {path}", err=True)
