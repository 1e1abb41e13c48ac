"""`axonn-tune explain`: one configuration, every term."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from axonn_tune.cli.options import Chosen, format_option, options_of, problem_of, problem_options, rank_by

if TYPE_CHECKING:
    from axonn_tune.api.explain import Explanation, Format


@click.command("explain", short_help="Explain one configuration, term by term.")
@click.argument("launch", required=False, metavar="[LAUNCH]")
@problem_options(required=False)
@click.option("--pick", type=click.IntRange(min=1), default=1, show_default=True, help="Row of the ranking to explain.")
@click.option("--trace", metavar="FILE", help="Also write the predicted step as a trace for Perfetto.")
@format_option(("table", "json", "md"))
def explain_command(*, chosen: Chosen, launch: str | None, pick: int, trace: str | None, output_format: Format) -> None:
    """Explain one configuration: what a step consists of, what bounds it, every collective.

    The configuration is that of a LAUNCH config, or the best that the options leave (--pick N: the
    Nth): pin axes, order and the rest to explain one in particular.

    \b
    Examples:
      axonn-tune explain --gpus 1024 --model 80b
      axonn-tune explain --gpus 64 --model 20b --x 2 --z 8 --trace step.json
      axonn-tune explain launch.yaml
    """
    if trace == "-":
        raise click.UsageError("--trace -: standard output has the explanation.")
    found = _of_launch(launch, chosen) if launch else _of_search(chosen, pick=pick)
    if trace:
        from axonn_tune.cli.trace import write_trace

        write_trace(trace, found.trace().text, quiet=False)
    click.echo(found.render(output_format), nl=False)


def _of_search(chosen: Chosen, *, pick: int) -> Explanation:
    from axonn_tune.api.explain import explain

    return explain(**problem_of(chosen), rank_by=rank_by(chosen), pick=pick, **options_of(chosen))


def _of_launch(path: str, chosen: Chosen) -> Explanation:
    """What a launch config describes, on its machine or on the one named."""
    from axonn_tune.cli.validate_runs import given, refuse_search

    refuse_search(f"{path} says")
    return explain_launch_said(path, machine=chosen.machine if given("machine") else None)


def explain_launch_said(path: str, *, machine: str | None) -> Explanation:
    """The configuration of a launch config; says so if the machine profile has changed since."""
    from axonn_tune.api.explain import explain_launch

    found = explain_launch(path, machine=machine)
    if found.machine_changed:
        click.echo(f"The machine profile is not the one that {path} was written with: times differ.", err=True)
    return found
