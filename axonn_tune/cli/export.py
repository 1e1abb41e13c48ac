"""`axonn-tune export`: a checkpoint as one file of the whole model."""

from __future__ import annotations

import importlib.util

import click


@click.command("export", short_help="Write a checkpoint's parameters as one safetensors file.")
@click.argument("checkpoint")
@click.option("-o", "--output", required=True, metavar="FILE", help="File to write, such as model.safetensors.")
@click.option(
    "--dtype",
    type=click.Choice(["saved", "fp64", "fp32", "bf16", "fp16"]),
    default="saved",
    show_default=True,
    help="Number format to write.",
)
@click.help_option("-h", "--help")
def export_command(*, checkpoint: str, output: str, dtype: str) -> None:
    """Write the parameters of a CHECKPOINT as one safetensors file, whatever grid saved it.

    CHECKPOINT is the folder of one step, or that of a run's checkpoints, of which the newest is taken. The
    tensors have this program's names, and weights are laid out as inputs × outputs.

    \b
    Example:
      axonn-tune export checkpoints -o model.safetensors --dtype bf16
    """
    from axonn_tune.errors import EnvironmentProblem

    if importlib.util.find_spec("torch") is None:
        raise EnvironmentProblem("export needs torch: pip install 'axonn-tune[runtime]'")
    from axonn_tune.runtime.checkpoint import TYPES, checkpoint_at, export

    found = checkpoint_at(checkpoint)
    count = export(found, output, dtype=TYPES.get(dtype))
    click.echo(f"wrote {output}: {count:,} parameters of {found}")
