"""`axonn-tune validate`: predicted against measured."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("validate", short_help="Compare predictions with measurements.")
@click.option("--published", is_flag=True, help="Predict published measurements, and say how far off each is.")
@click.option("--rows", type=click.Path(path_type=Path), metavar="FILE", help="Training steps to predict, CSV.")
@click.option("--format", "output_format", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("--worst", type=click.IntRange(min=0), default=20, show_default=True, help="Worst rows to list.")
def validate_command(*, published: bool, rows: Path | None, output_format: str, worst: int) -> None:
    """Set predictions against measured times.

    With --published, against training steps that others measured: those shipped with the tool, or
    those of --rows, a CSV file whose columns docs/accuracy.md lists.
    """
    from axonn_tune.errors import UsageError

    if not published:
        raise UsageError("say what to validate: --published")
    click.echo(_published(rows, output_format=output_format, worst=worst), nl=False)


def _published(rows: Path | None, *, output_format: str, worst: int) -> str:
    from axonn_tune.accuracy.rows import read_steps
    from axonn_tune.accuracy.shipped import SHIPPED
    from axonn_tune.accuracy.steps import predict_steps
    from axonn_tune.accuracy.summary import summarize_steps
    from axonn_tune.report import accuracy as report

    predictions = predict_steps(read_steps(rows or SHIPPED / "steps.csv"))
    summary = summarize_steps(predictions, worst=worst)
    if output_format == "json":
        return report.to_json(
            {"schema": report.SCHEMA, "summary": report.step_summary(summary), "rows": report.step_rows(predictions)}
        )
    return report.steps_text(summary)
