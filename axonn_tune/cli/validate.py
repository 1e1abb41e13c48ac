"""`axonn-tune validate`: predicted against measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from axonn_tune.cli.options import Chosen, command_line, problem_options
from axonn_tune.cli.validate_runs import Wanted, run_options, validate_runs

if TYPE_CHECKING:
    from axonn_tune.published.accuracy import Accuracy, Files

_FILE = click.Path(path_type=Path)


@click.command("validate", short_help="Run configurations, and compare with the predictions.")
@run_options
@problem_options(required=False)
@click.option("--published", is_flag=True, help="Predict published measurements, and say how far off each is.")
@click.option("--rows", type=_FILE, metavar="FILE", help="Steps of your own, CSV, instead of those shipped.")
@click.option("--collectives", type=_FILE, metavar="FILE", help="Collectives, CSV, instead of those shipped.")
@click.option("--gemm", type=_FILE, metavar="FILE", help="Matrix products, CSV, instead of those shipped.")
@click.option("--memory", type=_FILE, metavar="FILE", help="Memory, CSV, instead of those shipped.")
@click.option("--format", "output_format", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("--worst", type=click.IntRange(min=0), default=20, show_default=True, help="Worst rows to list.")
def validate_command(
    *,
    chosen: Chosen,
    wanted: Wanted,
    published: bool,
    rows: Path | None,
    collectives: Path | None,
    gemm: Path | None,
    memory: Path | None,
    output_format: str,
    worst: int,
) -> None:
    """Set predictions against measured times.

    Runs the best configurations of a ranking, or LAUNCH configs, in turn and repeatedly, each time in
    fresh processes, and compares what was measured with what was predicted: each configuration, axis and
    collective, computation, exposed communication and step. Losses and gradient norms must be those of
    one rank alone, and every collective one the program has; else the exit code is 4.

    With --published, or a file of rows, against what others measured: training steps, collectives, matrix
    products and memory. Files given replace the measurements shipped with the tool, and the other kinds are left
    out; docs/accuracy.md lists their columns. With --html every row is drawn, and can be sorted and filtered.

    \b
    Examples:
      axonn-tune validate --gpus 2 --model nano --machine here.yaml --precision fp32 --top 3
      axonn-tune validate launch.yaml --lab lab -o measured.yaml
      axonn-tune validate --published --worst 5 --html accuracy.html
    """
    if not (published or rows or collectives or gemm or memory):
        validate_runs(chosen, wanted, output_format=output_format)
        return
    from axonn_tune.cli.report import require_html
    from axonn_tune.published.accuracy import Files, evaluate
    from axonn_tune.report import accuracy as report

    require_html(wanted.html)
    files = Files(steps=rows, collectives=collectives, gemm=gemm, memory=memory)
    found = evaluate(files, worst=worst)
    text = report.to_json(report.document(found)) if output_format == "json" else report.text(found)
    if wanted.html is not None:
        _write_html(found, files, wanted.html)
    click.echo(text, nl=False)


def _write_html(found: Accuracy, files: Files, path: str) -> None:
    """Write the report of predictions against measurements."""
    from axonn_tune.cli.report import write_html
    from axonn_tune.report.html.accuracy import accuracy_sections

    write_html(path, accuracy_sections(found, files, command=command_line()))
