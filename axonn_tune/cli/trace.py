"""`axonn-tune trace`: the predicted step, and measured ones beside it, as one file for Perfetto."""

from __future__ import annotations

import click

from axonn_tune.cli.documents import complete_names
from axonn_tune.cli.options import help_option, quiet_option


@click.command("trace", short_help="Predicted and measured steps in one file for Perfetto.")
@click.argument("launch", metavar="LAUNCH.YAML")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("-o", "--output", metavar="FILE", help="Write the trace here. Default: standard output.")
@click.option("--step", type=click.IntRange(min=1), metavar="N", help="Measured step. Default: of median duration.")
@click.option(
    "--machine",
    metavar="NAME|FILE",
    help="Predict for this machine. Default: the one that the launch config names.",
    shell_complete=complete_names("machine"),
)
@quiet_option
@help_option
def trace_command(
    *, launch: str, runs: tuple[str, ...], output: str | None, step: int | None, machine: str | None, quiet: bool
) -> None:
    """Write the predicted step of LAUNCH.YAML, and measured steps of it, as one trace.

    Each RUN is the folder of a run that was started with --trace, or one of its files trace-rank<N>.json.
    Predicted and measured processes have the same lanes, and the same names for parts of the step
    and for collectives; they are aligned where the step starts. Open the file in https://ui.perfetto.dev.

    \b
    Examples:
      axonn-tune trace launch.yaml -o predicted.json
      axonn-tune run launch.yaml --steps 6 --trace 2 --trace-all --directory traced
      axonn-tune trace launch.yaml traced -o both.json
    """
    from axonn_tune.cli.explain import explain_launch_said

    if step is not None and not runs:
        raise click.UsageError("--step is of a measured run: name its folder too.")
    trace = explain_launch_said(launch, machine=machine).trace(runs, step=step)
    write_trace(output, trace.text, quiet=quiet)
    if not quiet:
        click.echo("\n".join(trace.remarks), err=True)


def write_trace(output: str | None, text: str, *, quiet: bool) -> None:
    """To a file, or to standard output."""
    from axonn_tune.files import write_text_atomically

    if output in (None, "-"):
        click.echo(text, nl=False)
        return
    write_text_atomically(str(output), text)
    if not quiet:
        click.echo(f"Wrote {output}; open it in https://ui.perfetto.dev.", err=True)
