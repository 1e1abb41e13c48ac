"""`axonn-tune compare`: is 4D worth it on this model and machine?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from axonn_tune.cli.options import (
    Chosen,
    color_option,
    command_line,
    format_option,
    html_option,
    options_of,
    problem_of,
    problem_options,
)

if TYPE_CHECKING:
    from axonn_tune.api.search import Format


@click.command("compare")
@problem_options(ranks=False)
@format_option()
@click.option("--wide", is_flag=True, help="Every column in the table.")
@html_option
@color_option
def compare(*, chosen: Chosen, output_format: Format, wide: bool, html: str | None, color: bool | None) -> None:
    """Set the best 4D grid against Megatron-LM, FSDP (ZeRO-3), HSDP and data parallelism.

    Each is taken at its fastest layout that fits into memory, by the time of a step. --recompute and
    --micro-batch hold for all of them, --no-overlap for Megatron-LM too; axes, their order and kept
    layers for 4D alone. The paper's measurements used full recomputation: --recompute full.

    \b
    Examples:
      axonn-tune compare --gpus 64 --model 20b
      axonn-tune compare --gpus 64 --model 20b --recompute full --wide
    """
    from axonn_tune.api.compare import compare as compare_all
    from axonn_tune.cli.report import require_html, write_html
    from axonn_tune.report.compare import LEFT_OUT
    from axonn_tune.report.output import use_color

    require_html(html)
    found = compare_all(**problem_of(chosen), **options_of(chosen))
    click.echo(found.render(output_format, wide=wide, color=use_color(wanted=color)), nl=False, color=True)
    if output_format == "table" and not wide:
        click.echo(f"\n{LEFT_OUT}", err=True)
    if html:
        write_html(html, [found.section(source=command_line())])
