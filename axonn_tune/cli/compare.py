"""`axonn-tune compare`: is 4D worth it on this model and machine?"""

from __future__ import annotations

import click

from axonn_tune.cli.options import Chosen, color_option, format_option, load, problem_options


@click.command("compare")
@problem_options(ranks=False)
@format_option()
@click.option("--wide", is_flag=True, help="Every column in the table.")
@color_option
def compare(*, chosen: Chosen, output_format: str, wide: bool, color: bool | None) -> None:
    """Set the best 4D grid against Megatron-LM, FSDP (ZeRO-3), HSDP and data parallelism.

    Each is taken at its fastest layout that fits into memory, by the time of a step. --recompute and
    --micro-batch hold for all of them, --no-overlap for Megatron-LM too; axes, their order and kept
    layers for 4D alone. The paper's measurements used full recomputation: --recompute full.
    """
    from axonn_tune.baselines.comparison import compare as compare_all
    from axonn_tune.report.compare import LEFT_OUT, render
    from axonn_tune.report.table import use_color

    inputs = load(chosen)
    comparison = compare_all(inputs.problem)
    found = render(comparison, inputs, output_format=output_format, wide=wide, color=use_color(wanted=color))
    click.echo(found, nl=False, color=True)
    if output_format == "table" and not wide:
        click.echo(f"\n{LEFT_OUT}", err=True)
