"""`axonn-tune explain`: one configuration, every term."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from axonn_tune.cli.options import Chosen, format_option, load, problem_options

if TYPE_CHECKING:
    from axonn_tune.ranking.inputs import Inputs
    from axonn_tune.report.explain import Subject


@click.command("explain", short_help="Explain one configuration, term by term.")
@click.argument("launch", required=False, metavar="[LAUNCH]")
@problem_options(required=False)
@click.option("--pick", type=click.IntRange(min=1), default=1, show_default=True, help="Row of the ranking to explain.")
@format_option(("table", "json", "md"))
def explain_command(*, chosen: Chosen, launch: str | None, pick: int, output_format: str) -> None:
    """Explain one configuration: what a step consists of, what bounds it, every collective.

    The configuration is that of a LAUNCH config, or the best that the options leave (--pick N: the
    Nth): pin axes, order and the rest to explain one in particular.
    """
    inputs = _launch_inputs(launch, chosen) if launch else load(chosen)
    subject = _subject(inputs, pick=pick)
    if output_format == "json":
        from axonn_tune.report.explain_json import explain_document
        from axonn_tune.report.ranking_json import to_text

        click.echo(to_text(explain_document(subject)), nl=False)
        return
    from axonn_tune.report.explain import explain_markdown, explain_text, explain_title

    render = explain_markdown if output_format == "md" else explain_text
    heading = "# " if output_format == "md" else ""
    click.echo(f"{heading}{explain_title(subject)}\n\n{render(subject)}", nl=False)


def _subject(inputs: Inputs, *, pick: int) -> Subject:
    """The configuration to explain; NothingFeasibleError if the options leave none."""
    from axonn_tune.ranking.results import run_search
    from axonn_tune.report.explain import Subject

    results = run_search(inputs)
    results.require_any()
    results.require_row(pick)
    return Subject(inputs, results.ranked.entry(pick - 1, terms=True), results.ranked.pricing(pick - 1))


def _launch_inputs(path: str, chosen: Chosen) -> Inputs:
    """What a launch config describes, on its machine or on the one named."""
    from axonn_tune.ranking.inputs import launch_inputs

    ctx = click.get_current_context()
    given = {each.name for each in fields(Chosen) if ctx.get_parameter_source(each.name) is ParameterSource.COMMANDLINE}
    if given - {"machine"}:
        flags = [param.opts[0] for param in ctx.command.params if param.name in given - {"machine"}]
        raise click.UsageError(f"{path} says all of it: leave out {', '.join(flags)}.")
    inputs, changed = launch_inputs(path, machine=chosen.machine if "machine" in given else None)
    if changed:
        click.echo(f"The machine profile is not the one that {path} was written with: times differ.", err=True)
    return inputs
