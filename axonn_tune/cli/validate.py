"""`axonn-tune validate`: predicted against measured."""

from __future__ import annotations

from pathlib import Path

import click

_FILE = click.Path(path_type=Path)


@click.command("validate", short_help="Compare predictions with measurements.")
@click.option("--published", is_flag=True, help="Predict published measurements, and say how far off each is.")
@click.option("--rows", type=_FILE, metavar="FILE", help="Training steps, CSV, instead of those shipped.")
@click.option("--collectives", type=_FILE, metavar="FILE", help="Collectives, CSV, instead of those shipped.")
@click.option("--gemm", type=_FILE, metavar="FILE", help="Matrix products, CSV, instead of those shipped.")
@click.option("--memory", type=_FILE, metavar="FILE", help="Memory, CSV, instead of those shipped.")
@click.option("--format", "output_format", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("--worst", type=click.IntRange(min=0), default=20, show_default=True, help="Worst rows to list.")
@click.option("--figure", type=_FILE, metavar="FILE", help="Draw predicted against measured (needs matplotlib).")
def validate_command(
    *,
    published: bool,
    rows: Path | None,
    collectives: Path | None,
    gemm: Path | None,
    memory: Path | None,
    output_format: str,
    worst: int,
    figure: Path | None,
) -> None:
    """Set predictions against measured times.

    With --published, against what others measured: training steps, collectives, matrix products and
    memory. Files given replace the measurements shipped with the tool, and the other kinds are left
    out; docs/accuracy.md lists their columns.
    """
    from axonn_tune.accuracy.published import Files, judge
    from axonn_tune.errors import UsageError
    from axonn_tune.report import accuracy as report

    if not published:
        raise UsageError("say what to validate: --published")
    found = judge(Files(steps=rows, collectives=collectives, gemm=gemm, memory=memory), worst=worst)
    if figure is not None:
        from axonn_tune.report.accuracy_figure import draw

        draw(found.steps, figure)
    text = report.to_json(report.document(found)) if output_format == "json" else report.text(found)
    click.echo(text, nl=False)
