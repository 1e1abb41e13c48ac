"""`axonn-tune report` and `trace`: results as one HTML file, steps as one file for Perfetto."""

from __future__ import annotations

import click

from axonn_tune.cli.options import help_option, machine_option, quiet_option, write_html, write_or_print


@click.command("report", short_help="Write results as one HTML file.")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("-o", "--output", required=True, metavar="FILE.HTML", help="Write the report here.")
@machine_option("Machine profile of launch configs, instead of the one they name.")
@quiet_option
@help_option
def report_command(*, sources: tuple[str, ...], output: str, machine: str | None, quiet: bool) -> None:
    """Write results as one self-contained HTML file, to be read in any browser, without a network.

    SOURCE is a launch config; a ranking, sweep, comparison or validation as --format json prints it; a
    measurement file, as `validate -o` writes it; or the folder of a finished run. Several become
    sections of one report. Each is recognised by its schema. The same is written by --html of search,
    compare, sweep and validate. It needs plotly: pip install 'axonn-tune[report]'.

    \b
    Example:
      axonn-tune --gpus 1024 --model 80b -o launch.yaml
      axonn-tune report launch.yaml -o report.html
    """
    from axonn_tune.report.html.page import require_plotly
    from axonn_tune.report.html.sources import read_section

    require_plotly()
    sections = [read_section(source, number=number, machine=machine) for number, source in enumerate(sources, start=1)]
    write_html(output, sections, quiet=quiet)


@click.command("trace", short_help="Predicted and measured steps in one file for Perfetto.")
@click.argument("launch", metavar="LAUNCH.YAML")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("-o", "--output", metavar="FILE", help="Write the trace here. Default: standard output.")
@click.option("--step", type=click.IntRange(min=1), metavar="N", help="Measured step. Default: of median duration.")
@machine_option("Predict for this machine. Default: the one that the launch config names.")
@quiet_option
@help_option
def trace_command(
    *, launch: str, runs: tuple[str, ...], output: str | None, step: int | None, machine: str | None, quiet: bool
) -> None:
    """Write the predicted step of LAUNCH.YAML, and measured steps of it, as one trace.

    Each RUN is the folder of a run that was started with --trace, or one of its files trace-rank<N>.json.
    Predicted and measured processes have the same tracks, and the same names for parts of the step
    and for collectives; they are aligned where the step starts. Open the file in https://ui.perfetto.dev.

    \b
    Examples:
      axonn-tune trace launch.yaml -o predicted.json
      axonn-tune run launch.yaml --steps 6 --trace 2 --trace-all --directory traced
      axonn-tune trace launch.yaml traced -o both.json
    """
    from axonn_tune.cli.search import explain_launch_said

    if step is not None and not runs:
        raise click.UsageError("--step is of a measured run: name its folder too.")
    trace = explain_launch_said(launch, machine=machine).trace(runs, step=step)
    write_trace(output, trace.text, quiet=quiet)
    if not quiet:
        click.echo("\n".join(trace.remarks), err=True)


def write_trace(output: str | None, text: str, *, quiet: bool) -> None:
    """To a file, or to standard output."""
    said = None if quiet else f"Wrote {output}; open it in https://ui.perfetto.dev."
    write_or_print(output, text, wrote=said)
