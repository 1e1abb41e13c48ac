"""`axonn-tune models`, `machines` and `schema`: list, check and import documents, and print their schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import (
    Count,
    SuggestingChoice,
    complete_names,
    format_option,
    guessed_words,
    help_option,
    set_option,
    write_or_print,
)
from axonn_tune.errors import AxonnTuneError, UsageError

if TYPE_CHECKING:
    from axonn_tune.api.analysis import Catalog
    from axonn_tune.specs.catalog import Kind, Loaded


@click.group("models")
@help_option
def models_command() -> None:
    """List, show, check and import models."""


@click.group("machines", short_help="List, show and check machine profiles.")
@help_option
def machines_command() -> None:
    """List, show and check machine profiles.

    A profile of your own cluster comes from logs of training or of nccl-tests (axonn-tune learn), from measuring it
    (axonn-tune calibrate), or from a file that extends the nearest one (extends: dgx-h100).

    \b
    Example:
      axonn-tune learn all_reduce.txt --machine dgx-h100 -o ours.yaml
    """


def _load(kind: Kind, name: str, *, overrides: tuple[str, ...] = ()) -> Loaded[Any]:
    from axonn_tune.specs.catalog import load_machine, load_model

    return load_model(name, overrides=overrides) if kind == "model" else load_machine(name, overrides=overrides)


def _add_common(group: click.Group, kind: Kind) -> None:
    """Give a group its `list`, `show` and `check`."""
    plural, name = f"{kind}s", {"model": "80b", "machine": "perlmutter"}[kind]

    def words(of: str, example: str) -> str:
        return f"{of}\n\n\b\nExample:\n  axonn-tune {plural} {example}"

    @group.command("list", help=words(f"List the {plural} that can be named.", "list"))
    @format_option(("table", "json"))
    @help_option
    def list_documents(*, output_format: str) -> None:
        from axonn_tune.api.analysis import machines, models

        catalog: Catalog[Any] = models() if kind == "model" else machines()
        for name, error in catalog.broken.items():
            # One broken file must not hide the others; `check` fails on it.
            click.echo(f"left out {name}: {error}", err=True)
        if output_format == "json":
            click.echo(json.dumps(catalog.to_dict(), indent=2, ensure_ascii=False))
        else:
            click.echo(catalog.render(), nl=False)

    of_show = f"Print a {kind} as YAML, whatever it extends and --set included."

    @group.command("show", help=words(of_show, f"show {name}"))
    @click.argument("name", shell_complete=complete_names(kind))
    @set_option("Change one value.")
    @format_option(("yaml", "json"))
    @help_option
    def show_document(*, name: str, set: tuple[str, ...], output_format: str) -> None:
        from axonn_tune.report import inventory
        from axonn_tune.specs.document import to_yaml

        loaded = _load(kind, name, overrides=set)
        if output_format == "json":
            click.echo(json.dumps(inventory.origin_json(loaded), indent=2, ensure_ascii=False))
        else:
            click.echo(to_yaml(loaded.document, header=inventory.origin_lines(loaded)), nl=False)

    of_check = f"Check {kind} files (or names) and report everything wrong in them."

    @group.command("check", help=words(of_check, f"check {name}"))
    @click.argument("files", nargs=-1, required=True)
    @help_option
    def check_documents(*, files: tuple[str, ...]) -> None:
        _check(kind, files)


def _check(kind: Kind, names: tuple[str, ...]) -> None:
    from axonn_tune.report.output import wrapped
    from axonn_tune.specs.numbers import told

    errors: list[AxonnTuneError] = []
    for name in names:
        try:
            loaded = _load(kind, name)
            click.echo(f"ok {loaded.path}")
            for words in told(loaded.consequences, kept=True):
                click.echo(wrapped(f"{words}."))
            if kind == "machine":
                from axonn_tune.calibration.profile import differences

                if loaded.document.measured is not None:
                    for difference in differences(loaded.document.measured):
                        click.echo(f"Warning: {loaded.path}: {difference}; its times may not hold here", err=True)
        except AxonnTuneError as error:
            errors.append(error)
    if errors:
        listed = "\n".join(str(error) for error in errors)
        raise UsageError(f"{listed}\n{len(errors)} of {len(names)} cannot be used")


_add_common(models_command, "model")
_add_common(machines_command, "machine")


@models_command.command("import")
@click.argument("config")
@click.option("-o", "--output", metavar="FILE", help="Write the YAML here instead of to standard output.")
@click.option("--name", help="Name of the model. Default: that of the file written, else of what is read.")
@click.option("--batch", type=Count(), help="Global batch size, in sequences; else about 4 million tokens.")
@click.option("--seq", type=Count(), help="Tokens in a sequence; else the longest it takes, up to 8192.")
@help_option
def import_model(*, config: str, output: str | None, name: str | None, batch: int | None, seq: int | None) -> None:
    """Turn CONFIG into a model file: a local Hugging Face config.json (or its folder), or the script or config
    file of a run with Megatron-LM, NeMo or torchtitan, whose batch and sequence length are taken, too.

    What would change the cost noticeably and cannot be expressed is refused; what was left out
    because it hardly matters, or was assumed, is named in the description.

    \b
    Example:
      axonn-tune models import config.json -o mymodel.yaml
      axonn-tune models import pretrain.sh -o mymodel.yaml
    """
    from axonn_tune.api.learning import import_model as imported
    from axonn_tune.specs.document import to_yaml

    own = name or (None if output in (None, "", "-") else Path(str(output)).stem)
    model = imported(config, name=own, batch=batch, seq=seq)
    text = to_yaml(model, header=[f"Imported by axonn-tune from {config}"])
    said, step = model.description.replace("; left out: ", "\n  left out: "), model.defaults
    if taken := guessed_words(model, batch=step.global_batch, length=step.sequence_length):
        said += f"\n  assumed: {taken}"
    write_or_print(output, text, wrote=f"wrote {output}: {said}")


# Spelled out, so that --help need not build them; a test compares.
KINDS = (
    *("model", "model-derived", "machine", "machine-derived", "workload", "launch", "summary", "measurement"),
    "baseline",
)


@click.command("schema", short_help="Print the JSON Schema of a kind of document, for editors.")
@click.argument("kind", type=SuggestingChoice(KINDS))
@click.option("-o", "--output", metavar="FILE", help="Write it here instead of to standard output.")
@help_option
def schema_command(*, kind: str, output: str | None) -> None:
    """Print the JSON Schema of a KIND of document, by which editors complete keys and show what they mean.

    \b
    Editors with YAML support (VS Code with Red Hat's extension, for one) take it from a file's first line:
      # yaml-language-server: $schema=machine.schema.json
    Files that extend another have a schema of their own: model-derived, machine-derived.

    \b
    Example:
      axonn-tune schema machine-derived -o machine.schema.json
    """
    from axonn_tune.specs.schemas import schema_texts

    text = schema_texts()[f"{kind}.json"]
    first_line = f"# yaml-language-server: $schema={output}"
    write_or_print(output, text, wrote=f"wrote {output}; first line of a file beside it: {first_line}")
