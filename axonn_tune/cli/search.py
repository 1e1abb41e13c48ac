"""`axonn-tune search`, which is also what `axonn-tune` does without a command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from axonn_tune.cli.options import (
    COSTS,
    Chosen,
    SuggestingChoice,
    color_option,
    command_line,
    format_option,
    load,
    problem_options,
    quiet_option,
)

if TYPE_CHECKING:
    from axonn_tune.ranking.results import Results


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
@click.option("--wide", is_flag=True, help="More columns in tables.")
@click.option("--columns", metavar="NAME,...", help="Just these columns in tables.")
@click.option("-o", "--output", metavar="FILE", help="Write the launch config of the first row, or of --pick, here.")
@click.option(
    "--pick", type=click.IntRange(min=1), metavar="N", default=1, show_default=True, help="Row that -o writes."
)
@click.option("--tokens", metavar="FILE", help="Token file, as by `axonn-tune data`, that the launch config trains on.")
@click.option("--emit", type=SuggestingChoice(("torchrun", "slurm")), help="Also write a script that starts it.")
@quiet_option
@color_option
def search_command(
    *,
    chosen: Chosen,
    costs: tuple[str, ...],
    top: int,
    with_rejected: bool,
    variants: bool,
    output_format: str,
    wide: bool,
    columns: str | None,
    output: str | None,
    pick: int,
    tokens: str | None,
    emit: str | None,
    quiet: bool,
    color: bool | None,
) -> None:
    """Rank every grid of a number of GPUs, by predicted communication time.

    The ranking goes to standard output; why the first beats the second, ties, and what was rejected
    go to standard error.
    """
    from axonn_tune.ranking.results import run_search

    _check_output(output, emit=emit, pick=pick, tokens=tokens)
    results = run_search(load(chosen), costs=costs, variants=variants)
    results.require_row(pick)
    shown = _render(
        results,
        top=top,
        with_rejected=with_rejected,
        output_format=output_format,
        wide=wide,
        columns=columns,
        color=color,
    )
    click.echo(shown, nl=False, color=True)
    results.require_any()
    if output_format in ("table", "md") and not quiet:
        from axonn_tune.report.remarks import remarks

        click.echo("\n" + "\n".join(remarks(results)), err=True)
    if output:
        _write(results, output=output, pick=pick, tokens=tokens, emit=emit, quiet=quiet)


def _check_output(output: str | None, *, emit: str | None, pick: int, tokens: str | None) -> None:
    """Refuse what to write without where to, and standard output, which has the ranking."""
    if not output and (emit or tokens or pick != 1):
        option = "--emit" if emit else "--tokens" if tokens else "--pick"
        raise click.UsageError(f"{option} says what to write: give -o FILE too.")
    if output in ("", "-"):
        raise click.UsageError("-o - : a launch config is a file of its own, and the ranking is on standard output.")


def _render(
    results: Results,
    *,
    top: int,
    with_rejected: bool,
    output_format: str,
    wide: bool,
    columns: str | None,
    color: bool | None,
) -> str:
    """The ranking in the wanted format."""
    from axonn_tune.cost.memory import memory_limit_bytes

    entries = results.listed(top=top, terms=output_format == "json", rejected=with_rejected)
    limit_bytes = memory_limit_bytes(results.inputs.problem.machine.accelerator)
    if output_format == "json":
        from axonn_tune.report.ranking_json import ranking_document, to_text

        return to_text(ranking_document(results, entries, limit_bytes=limit_bytes))
    from axonn_tune.report import ranking_table as tables
    from axonn_tune.report.table import use_color

    if output_format == "csv":
        return tables.ranking_csv(results, entries, limit_bytes=limit_bytes)
    names = columns.split(",") if columns else tables.default_columns(results, entries, wide=wide)
    if not entries:
        return ""
    if output_format == "md":
        return tables.ranking_markdown(results, entries, names=names, limit_bytes=limit_bytes)
    return tables.ranking_table(results, entries, names=names, limit_bytes=limit_bytes, color=use_color(wanted=color))


def _write(results: Results, *, output: str, pick: int, tokens: str | None, emit: str | None, quiet: bool) -> None:
    """Write the launch config of a row, and the script that starts it."""
    from axonn_tune.launch.config import build_launch, write_launch

    inputs = results.inputs
    launch = build_launch(
        results.ranked.pricing(pick - 1),
        model=inputs.model,
        machine=inputs.machine,
        workload=inputs.problem.workload,
        command=command_line(),
        tokens=tokens,
    )
    written = [f"#{pick} as {output}"]
    if not emit:
        write_launch(output, launch)
    else:
        from axonn_tune.launch.emit import ScriptKind, emit_script, script_text

        kinds: dict[str, ScriptKind] = {"torchrun": "torchrun", "slurm": "slurm"}
        # What refuses a script refuses it here, before anything is written.
        script_text(kinds[emit], launch=launch, machine=inputs.machine.document, launch_path=output)
        write_launch(output, launch)
        script = emit_script(kinds[emit], launch=launch, machine=inputs.machine.document, launch_path=output)
        written.append(f"the script that starts it as {script}")
    if not quiet:
        click.echo(f"Wrote {' and '.join(written)}.", err=True)
