"""`axonn-tune search`, which is also what `axonn-tune` does without a command."""

from __future__ import annotations

import click

from axonn_tune.cli.options import Chosen, load, problem_options


@click.command("search")
@problem_options()
def search_command(*, chosen: Chosen) -> None:
    """Rank every grid of a number of GPUs."""
    from axonn_tune.search.ranking import search

    ranking = search(load(chosen).problem)
    for position in range(min(10, len(ranking))):
        click.echo(str(ranking.candidate(position)))
