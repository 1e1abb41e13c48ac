"""`axonn-tune sweep`: how far a model scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from axonn_tune.cli.options import (
    Chosen,
    color_option,
    columns_option,
    command_line,
    format_option,
    html_option,
    options_of,
    problem_options,
    rank_by,
    wide_option,
)

if TYPE_CHECKING:
    from axonn_tune.api.search import Format


@click.command("sweep", short_help="Scale over GPU counts, batches and models.")
@click.option("--gpus", "counts", required=True, metavar="LIST", help="GPU counts: 64,128 or 64..4096x2 or 64..128+16.")
@click.option("--batch", "batches", metavar="LIST", help="Sequences in a step, in the same way. Default: the model's.")
@problem_options(lists=True)
@click.option("--weak", is_flag=True, help="Weak scaling: the batch is for the first count, and grows with the others.")
@format_option()
@wide_option
@columns_option
@html_option
@color_option
def sweep_command(
    *,
    chosen: Chosen,
    counts: str,
    batches: str | None,
    weak: bool,
    output_format: Format,
    wide: bool,
    columns: tuple[str, ...],
    html: str | None,
    color: bool | None,
) -> None:
    """Find the best configuration at every GPU count, batch and model (--model 20b,40b).

    Efficiency is the throughput of one GPU relative to the first feasible count of the same model and batch.

    \b
    Examples:
      axonn-tune sweep --gpus 64..1024x2 --model 20b
      axonn-tune sweep --gpus 64,128 --model 10b,20b --weak --batch 1024
    """
    from axonn_tune.api.sweep import sweep
    from axonn_tune.cli.report import require_html, write_html
    from axonn_tune.report.output import use_color

    require_html(html)
    found = sweep(
        chosen.model or "",
        gpus=counts,
        machine=chosen.machine,
        batch=batches,
        rank_by=rank_by(chosen),
        weak=weak,
        **options_of(chosen),
    )
    shown = found.render(output_format, wide=wide, columns=columns, color=use_color(wanted=color))
    click.echo(shown, nl=False, color=True)
    if html:
        write_html(html, [found.section(source=command_line())])
    found.require_any()
