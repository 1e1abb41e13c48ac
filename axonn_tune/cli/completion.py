"""`axonn-tune completion`: the script that makes a shell complete commands, options and names."""

from __future__ import annotations

import click

from axonn_tune.cli.options import help_option

SHELLS = ("bash", "zsh", "fish")


@click.command("completion", short_help="Print a shell's completion script.")
@click.argument("shell", type=click.Choice(SHELLS))
@help_option
@click.pass_context
def completion_command(ctx: click.Context, /, *, shell: str) -> None:
    """Print the completion script of a SHELL.

    \b
    bash: eval "$(axonn-tune completion bash)" in ~/.bashrc
    zsh:  eval "$(axonn-tune completion zsh)" in ~/.zshrc
    fish: axonn-tune completion fish > ~/.config/fish/completions/axonn-tune.fish

    \b
    Example:
      axonn-tune completion bash
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None, "click knows each of SHELLS"
    click.echo(found(ctx.find_root().command, {}, "axonn-tune", "_AXONN_TUNE_COMPLETE").source())
