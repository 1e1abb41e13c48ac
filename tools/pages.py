"""Pages of the documentation whose words are kept beside a script that computes their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from axonn_tune.files import write_text_atomically
from axonn_tune.report.output import Column, markdown_table, words


def write_page(path: Path, text: Path, tables: Mapping[str, str]) -> None:
    """Write a page: fixed words with tables where they say `{{name}}`."""
    page = text.read_text(encoding="utf-8")
    for name, table in tables.items():
        page = page.replace("{{" + name + "}}", table.rstrip())
    write_text_atomically(path, page)


def table(left: Sequence[str], right: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; left: headings of words, right: headings of numbers, which come after them."""
    return markdown_table([*(words("", name) for name in left), *(Column("", name) for name in right)], rows)
