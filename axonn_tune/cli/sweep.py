"""`axonn-tune sweep`: how far a model scales."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from axonn_tune.cli.options import Chosen, choices_of, color_option, format_option, problem_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from axonn_tune.ranking.sweep import Point


@click.command("sweep", short_help="Scale over GPU counts, batches and models.")
@click.option("--gpus", "counts", required=True, metavar="LIST", help="GPU counts: 64,128 or 64..4096x2 or 64..128+16.")
@click.option("--batch", "batches", metavar="LIST", help="Sequences in a step, in the same way. Default: the model's.")
@problem_options(lists=True)
@click.option("--weak", is_flag=True, help="Weak scaling: the batch is for the first count, and grows with the others.")
@format_option()
@color_option
def sweep_command(
    *, chosen: Chosen, counts: str, batches: str | None, weak: bool, output_format: str, color: bool | None
) -> None:
    """Find the best configuration at every GPU count, batch and model (--model 20b,40b).

    Efficiency is the throughput of one GPU relative to the first feasible count of the same model and batch.
    """
    from axonn_tune.errors import NothingFeasibleError
    from axonn_tune.ranking.sweep import parse_numbers, sweep

    gpus = parse_numbers(counts, option="--gpus")
    sizes = parse_numbers(batches, option="--batch") if batches else (None,)
    models = [name.strip() for name in (chosen.model or "").split(",")]
    choices = choices_of(replace(chosen, gpus=gpus[0]))
    points = sweep(choices, models=models, gpus=gpus, batches=sizes, weak=weak)
    click.echo(_render(points, weak=weak, output_format=output_format, color=color), nl=False, color=True)
    if not any(point.entry for point in points):
        raise NothingFeasibleError("nothing is feasible at any point of the sweep; each has its reason above")


def _render(points: Sequence[Point], *, weak: bool, output_format: str, color: bool | None) -> str:
    from axonn_tune.report import sweep as report
    from axonn_tune.report.ranking_json import to_text
    from axonn_tune.report.table import use_color

    if output_format == "json":
        return to_text(report.sweep_document(points, weak=weak))
    if output_format == "csv":
        return report.sweep_csv(points)
    if output_format == "md":
        return report.sweep_markdown(points)
    return report.sweep_table(points, color=use_color(wanted=color))
