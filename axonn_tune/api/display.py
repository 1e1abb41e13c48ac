"""Results shown in notebooks (HTML) and by rich."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

    from axonn_tune.report.table import Heading


def html_page(headings: Sequence[Heading], rows: Sequence[Sequence[str]], sentences: Sequence[str]) -> str:
    """A table and sentences below it, with no style but alignment, so that a notebook's own theme holds."""
    sides = ["left" if heading.left else "right" for heading in headings]
    head = _row("th", [heading.title for heading in headings], sides)
    body = "".join(_row("td", row, sides) for row in rows)
    table = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>" if rows else ""
    return table + "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


def rich_text(table: str, sentences: Sequence[str]) -> Text:
    """A table with its colors and sentences below it; no line of the table is wrapped."""
    from rich.text import Text

    return Text("\n").join([Text.from_ansi(table, no_wrap=True), *map(Text, sentences)])


def _row(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    shown = (
        f'<{tag} style="text-align: {side}; white-space: pre-line">{escape(cell)}</{tag}>'
        for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{''.join(shown)}</tr>"
