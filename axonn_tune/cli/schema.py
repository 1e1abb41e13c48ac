"""`axonn-tune schema`: JSON Schemas of the documents, for editors."""

from __future__ import annotations

import click

from axonn_tune.cli.options import SuggestingChoice, help_option

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
    from axonn_tune.files import write_text_atomically
    from axonn_tune.specs.schemas import schema_texts

    text = schema_texts()[f"{kind}.json"]
    if output is None:
        click.echo(text, nl=False)
        return
    write_text_atomically(output, text)
    click.echo(f"wrote {output}; first line of a file beside it: # yaml-language-server: $schema={output}", err=True)
