"""`axonn-tune run`: execute a launch config."""

from __future__ import annotations

from pathlib import Path

import click

from axonn_tune.cli.options import help_option


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

    \b
    Examples:
      axonn-tune run launch.yaml --steps 10
      axonn-tune run launch.yaml --dry-run
      srun axonn-tune run launch.yaml
    """
    from axonn_tune.api.run import start, start_dry

    if trace_all and trace is None:
        raise click.UsageError("--trace-all is of a trace: give --trace N too.")
    if dry_run:
        code = start_dry(launch)
    else:
        started = start(
            launch,
            steps=steps,
            resume=resume,
            directory=directory,
            trace=trace,
            trace_all=trace_all,
            warn=lambda words: click.echo(f"Warning: {words}", err=True),
        )
        code = started.code
        if started.leads:
            show_summary(started.folder, all_terms=terms)
    if code:
        raise click.exceptions.Exit(code)


def show_summary(folder: Path, *, all_terms: bool) -> None:
    """The table of a run that got far enough to be measured."""
    from axonn_tune.report.terms import summary_text
    from axonn_tune.specs.loading import load_document
    from axonn_tune.specs.results import SUMMARY_NAME, Summary

    path = folder / SUMMARY_NAME
    if path.exists():
        click.echo(f"\n{summary_text(load_document(path, schema=Summary), all_terms=all_terms)}", nl=False)
        click.echo(f"All of it, and every collective: {path}", err=True)
