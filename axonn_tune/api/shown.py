"""How results show themselves: in notebooks, by rich, and as a report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.console import Group

    from axonn_tune.report.output import Heading, Json

    Shown: TypeAlias = tuple[Sequence[Heading], Sequence[Sequence[str]], Sequence[str]]
    """Headings, cells, and the sentences below a table."""


class Result(ABC):
    """A result with a table: notebooks show it as HTML, rich as a table that fits the console."""

    call: str

    @abstractmethod
    def section(self, *, source: str) -> Json:
        """This result as a section of a report; `source` names where it comes from."""

    @abstractmethod
    def _shown(self) -> Shown:
        """Headings and cells of the table, and the sentences below it."""

    def write_report(self, path: str | Path) -> Path:
        """Write one self-contained HTML file, as `--html` does; EnvironmentProblem without the extra [report]."""
        from axonn_tune.report.html.page import require_plotly, write_page

        require_plotly()
        write_page(path, [self.section(source=self.call)], command=self.call)
        return Path(path)

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        headings, rows, sentences = self._shown()
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in headings:
            table.add_column(Text(heading.title), justify="left" if heading.left else "right", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        return Group(*([table] if rows else []), *map(Text, sentences))

    def _repr_html_(self) -> str:
        return html_text(*self._shown())


def html_text(headings: Sequence[Heading], rows: Sequence[Sequence[str]], sentences: Sequence[str] = ()) -> str:
    """A table and sentences below it, with no style but alignment, so that a notebook's own theme holds."""
    sides = ["left" if heading.left else "right" for heading in headings]
    head = _row("th", [heading.title for heading in headings], sides)
    body = "".join(_row("td", row, sides) for row in rows)
    table = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>" if rows else ""
    return table + "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


def _row(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    shown = (
        f'<{tag} style="text-align: {side}; white-space: pre-line">{escape(cell)}</{tag}>'
        for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{''.join(shown)}</tr>"
