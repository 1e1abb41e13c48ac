"""`axonn-tune search`, which is also what `axonn-tune` does without a command."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from axonn_tune.cli.options import (
    COSTS,
    Chosen,
    SuggestingChoice,
    color_option,
    columns_option,
    command_line,
    format_option,
    html_option,
    options_of,
    problem_of,
    problem_options,
    quiet_option,
    rank_by,
    wide_option,
)

if TYPE_CHECKING:
    from axonn_tune.api.options import Cost
    from axonn_tune.api.search import Format, Script, SearchResult


@click.command("search", short_help="Rank every grid of a number of GPUs.")
@problem_options()
@click.option(
    "--cost",
    "costs",
    type=SuggestingChoice(COSTS),
    multiple=True,
    default=["alpha-beta"],
    show_default=True,
    help="Cost model to rank by. May be repeated: the first ranks, the others' ranks are shown beside it.",
)
@click.option(
    "--top", type=click.IntRange(min=0), metavar="N", default=10, show_default=True, help="Rows to list; 0: all."
)
@click.option("--all", "with_rejected", is_flag=True, help="List rejected grids too, with the reasons.")
@click.option("--variants", is_flag=True, help="List every candidate, not only the best of each grid.")
@format_option()
@wide_option
@columns_option
@click.option("-o", "--output", metavar="FILE", help="Write the launch config of the first row, or of --pick, here.")
@click.option(
    "--pick", type=click.IntRange(min=1), metavar="N", default=1, show_default=True, help="Row that -o writes."
)
@click.option("--tokens", metavar="FILE", help="Token file, as by `axonn-tune data`, that the launch config trains on.")
@click.option("--emit", type=SuggestingChoice(("torchrun", "slurm")), help="Also write a script that starts it.")
@html_option
@quiet_option
@color_option
def search_command(
    *,
    chosen: Chosen,
    costs: tuple[Cost, ...],
    top: int,
    with_rejected: bool,
    variants: bool,
    output_format: Format,
    wide: bool,
    columns: tuple[str, ...],
    output: str | None,
    pick: int,
    tokens: str | None,
    emit: Script | None,
    html: str | None,
    quiet: bool,
    color: bool | None,
) -> None:
    """Rank every grid of a number of GPUs, by predicted communication time.

    The ranking goes to standard output; why the first beats the second, ties, and what was rejected
    go to standard error.

    \b
    Examples:
      axonn-tune --gpus 1024 --model 80b
      axonn-tune --gpus 64 --model 20b --rank-by iteration --wide
      axonn-tune --gpus 64 --model 20b --columns rank,grid,step,mfu --top 5
      axonn-tune --gpus 64 --model 20b -o launch.yaml --emit slurm
    """
    from axonn_tune.api.search import search
    from axonn_tune.cli.report import require_html, write_html
    from axonn_tune.report.output import use_color

    require_html(html)
    _check_output(output, emit=emit, pick=pick, tokens=tokens)
    found = search(**problem_of(chosen), rank_by=rank_by(chosen), cost=costs, variants=variants, **options_of(chosen))
    found.results.require_row(pick)
    painted = use_color(wanted=color)
    shown = found.render(output_format, top=top, rejected=with_rejected, wide=wide, columns=columns, color=painted)
    click.echo(shown, nl=False, color=True)
    if html:
        write_html(html, [found.section(source=command_line())], quiet=quiet)
    found.results.require_any()
    if output_format in ("table", "md") and not quiet:
        click.echo("\n" + "\n".join(found.remarks), err=True)
    if output:
        _write(found, output=output, pick=pick, tokens=tokens, emit=emit, quiet=quiet)


def _check_output(output: str | None, *, emit: str | None, pick: int, tokens: str | None) -> None:
    """Refuse what to write without where to, and standard output, which has the ranking."""
    if not output and (emit or tokens or pick != 1):
        option = "--emit" if emit else "--tokens" if tokens else "--pick"
        raise click.UsageError(f"{option} says what to write: give -o FILE too.")
    if output in ("", "-"):
        raise click.UsageError("-o - : a launch config is a file of its own, and the ranking is on standard output.")


def _write(
    found: SearchResult, *, output: str, pick: int, tokens: str | None, emit: Script | None, quiet: bool
) -> None:
    """Write the launch config of a row, and the script that starts it."""
    path, *script = replace(found, call=command_line()).write_launch_config(output, pick=pick, tokens=tokens, emit=emit)
    written = [f"#{pick} as {path}", *(f"the script that starts it as {path}" for path in script)]
    if not quiet:
        click.echo(f"Wrote {' and '.join(written)}.", err=True)
