"""`axonn-tune data`: text to a token file that a launch config can name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click


@click.command("data", short_help="Turn text files into a token file.")
@click.argument("paths", nargs=-1, metavar="[PATHS]...")
@click.option("-o", "--output", required=True, metavar="FILE", help="Token file to write.")
@click.option(
    "--tokenizer",
    default="bytes",
    show_default=True,
    metavar="bytes|FILE.json",
    help="Every byte its own id, or a Hugging Face tokenizer.json, which needs the library `tokenizers`.",
)
@click.option(
    "--include",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="Files to take from folders; may be repeated.  [default: *.txt, *.md, *.rst, *.py]",
)
@click.option(
    "--python-stdlib", is_flag=True, help="Add the source of Python's standard library, which is always there."
)
@click.option("--vocab", type=click.IntRange(min=1), help="Fail if the tokenizer has more ids than this.")
@click.help_option("-h", "--help")
def data_command(
    *,
    paths: tuple[str, ...],
    output: str,
    tokenizer: str,
    patterns: tuple[str, ...],
    python_stdlib: bool,
    vocab: int | None,
) -> None:
    """Turn text files and folders into one token file, for `data: {path: FILE}` in a launch config.

    With the default tokenizer there are 257 ids: the bytes, and an end-of-text mark after each file.
    The file is written under another name and renamed when it is complete.

    \b
    Examples:
      axonn-tune data --python-stdlib -o tokens.bin
      axonn-tune data books/ --include *.txt -o tokens.bin
    """
    from axonn_tune.errors import UsageError
    from axonn_tune.runtime import tokens

    if not paths and not python_stdlib:
        raise UsageError("nothing to read: name files or folders, or give --python-stdlib")
    sources = [Path(path) for path in paths] + [tokens.standard_library()] * python_stdlib
    files = tokens.text_files(sources, patterns=patterns or tokens.TEXT_PATTERNS)
    chosen = tokens.tokenizer_named(tokenizer)
    if vocab is not None and chosen.vocab > vocab:
        raise UsageError(f"tokenizer {chosen.name!r} has {chosen.vocab:,} ids, --vocab allows {vocab:,}")
    total_bytes = sum(file.stat().st_size for file in files)
    with _progress(total_bytes) as advance:
        ids = tokens.encoded(files, chosen, on_read=advance)
        header = tokens.write_tokens(output, ids, vocab=chosen.vocab, tokenizer=chosen.name)
    click.echo(
        f"wrote {output}: {header.count:,} tokens from {total_bytes / 1e6:,.1f} MB of text, "
        f"vocabulary {header.vocab:,} ({header.tokenizer})"
    )


@contextmanager
def _progress(total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Takes the bytes read since the last time."""
    from axonn_tune.report.output import progress

    read_bytes = 0
    with progress("reading text") as tell:

        def advance(size: int) -> None:
            nonlocal read_bytes
            read_bytes += size
            tell(read_bytes / max(total_bytes, 1), f"{read_bytes / 1e6:,.0f} of {total_bytes / 1e6:,.0f} MB")

        yield advance
