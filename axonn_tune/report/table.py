"""Plain tables: aligned text, Markdown, CSV. No cell is ever cut; the width is what the cells need.

The main job prints one table, and importing a table library would take longer than the search.
"""

from __future__ import annotations

import csv
import io
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from axonn_tune.errors import UsageError, suggest

BOLD, GREEN, RESET = "\x1b[1m", "\x1b[1;32m", "\x1b[0m"


@dataclass(frozen=True)
class Heading:
    """Title of a column, unit included; a line break splits it over lines. `left`: aligned to the left."""

    title: str
    left: bool = False


def use_color(*, wanted: bool | None) -> bool:
    """Whether to color standard output: as wanted; else not with NO_COLOR, yes with FORCE_COLOR, else in a terminal.

    A terminal that calls itself dumb knows no colors.
    """
    environment = os.environ
    if wanted is not None or environment.get("NO_COLOR"):
        return bool(wanted)
    if environment.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return sys.stdout.isatty() and environment.get("TERM") != "dumb"


def require_columns(names: Sequence[str], known: Iterable[str]) -> None:
    """UsageError for a column that does not exist, with the nearest that does."""
    listed = list(known)
    for name in names:
        if name not in listed:
            raise UsageError(f"no column {name!r}{suggest(name, listed)}; known: {', '.join(listed)}")


def text_table(
    headings: Sequence[Heading], rows: Sequence[Sequence[str]], *, color: bool = False, best: int | None = None
) -> str:
    """Columns two spaces apart; with `color` the headings are bold and row `best` is green."""
    titles = [heading.title.split("\n") for heading in headings]
    height = max(map(len, titles))
    head = [[*[""] * (height - len(lines)), *lines] for lines in titles]
    cells = [*zip(*head, strict=True), *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    lines = []
    for number, row in enumerate(cells):
        line = "  ".join(
            cell.ljust(width) if heading.left else cell.rjust(width)
            for cell, width, heading in zip(row, widths, headings, strict=True)
        ).rstrip()
        style = BOLD if number < height else GREEN if best is not None and number == height + best else ""
        lines.append(f"{style}{line}{RESET}" if color and style else line)
    return "\n".join(lines) + "\n"


def markdown_table(headings: Sequence[Heading], rows: Iterable[Sequence[str]]) -> str:
    """A table as GitHub reads it."""
    lines = [
        _markdown_row([heading.title.replace("\n", " ") for heading in headings]),
        _markdown_row([":---" if heading.left else "---:" for heading in headings]),
    ]
    lines += [_markdown_row([" ".join(cell.split()) for cell in row]) for row in rows]
    return "\n".join(lines) + "\n"


def csv_table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Comma-separated values under machine-readable names; None is empty, floats keep every digit."""
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_csv_cell(cell) for cell in row] for row in rows)
    return output.getvalue()


def seconds_cells(values_s: Sequence[float | None]) -> list[str]:
    """Numbers of one column with as many decimals as show three digits of the smallest; `-` for None."""
    known = [abs(value) for value in values_s if value]
    decimals = 2 if not known else min(max(2 - math.floor(math.log10(min(known))), 0), 7)
    largest = max(known, default=1.0)
    # Eight digits are enough to tell any two times of a column apart.
    decimals = max(min(decimals, 7 - math.floor(math.log10(largest))), 0) if known else decimals
    return ["-" if value is None else f"{value:.{decimals}f}" if value else "0" for value in values_s]


def aligned_cells(parts: Sequence[Sequence[str]]) -> list[str]:
    """Cells of several parts each, every part right-aligned in itself."""
    if not parts:
        return []
    widths = [max(len(row[position]) for row in parts) for position in range(len(parts[0]))]
    return [" ".join(part.rjust(width) for part, width in zip(row, widths, strict=True)) for row in parts]


def _markdown_row(cells: Iterable[str]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _csv_cell(cell: object) -> object:
    if isinstance(cell, bool):
        return "true" if cell else "false"
    return repr(cell) if isinstance(cell, float) else cell
