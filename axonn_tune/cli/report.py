"""`axonn-tune report`: one self-contained HTML file, and `--html` of other commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from axonn_tune.cli.documents import complete_names
from axonn_tune.cli.options import command_line, help_option, quiet_option

if TYPE_CHECKING:
    from axonn_tune.report.output import Json


@click.command("report", short_help="Write results as one HTML file.")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("-o", "--output", required=True, metavar="FILE.HTML", help="Write the report here.")
@click.option(
    "--machine",
    metavar="NAME|FILE",
    help="Machine profile of launch configs, instead of the one they name.",
    shell_complete=complete_names("machine"),
)
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


def require_html(path: str | None) -> None:
    """EnvironmentProblem if a report is wanted and cannot be drawn: before work is done that would be lost."""
    if path is not None:
        from axonn_tune.report.html.page import require_plotly

        require_plotly()


def write_html(path: str, sections: list[Json], *, quiet: bool = False) -> None:
    """Write the report and say so."""
    from axonn_tune.report.html.page import write_page

    write_page(path, sections, command=command_line())
    if not quiet:
        click.echo(f"Wrote the report as {path}.", err=True)
