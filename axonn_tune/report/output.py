"""What commands write: a table as text, Markdown, HTML, CSV or data frame; JSON; and how far a long one has come.

No cell is ever cut; the width is what the cells need. The main job prints one table, and importing a table library
would take longer than the search: rich is imported by what draws a bar or fits a terminal.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

from axonn_tune.errors import BOLD, GREEN, RESET, UsageError, suggest
from axonn_tune.grid import AXES

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Group

Json: TypeAlias = dict[str, Any]
WIDTH, _NARROWEST = 100, 80
"""Characters of a line of prose, and of a table unless all its columns are asked for: most in a pipe, least."""
NOTHING = "-"
"""A cell without a value."""
_UNSAID = (NOTHING, "0", "", "all")
"""Cells of a whole column that nobody needs to be told."""
_LEAST_ROOM = 24
"""Characters below which a last column is not broken."""
PERCENT = 0.01
SECONDS_BETWEEN_LINES, SECONDS_BETWEEN_BARS, SECONDS_UNSAID = 30.0, 0.1, 2.0

ProgressFunction: TypeAlias = Callable[[float, str], None]
"""Takes the share that is done, 0 to 1, and a few words on what is being done now."""


@dataclass(frozen=True)
class Column:
    """A column of every format: what stands above it, what it means, and how its values are written.

    key: of the value in a row, dots lead into its parts; label: heading, with its unit after a comma; meaning: shown
    when the heading of a page is pointed at. Values are words, or numbers shown as `value / per` with `decimals`
    digits, None for those of `seconds_cells`. width_ch: of words, where a page may break them; hidden: a page only
    filters by it; title: heading in texts, where it is another, with line breaks; show: what writes a value in texts.
    """

    key: str
    label: str
    meaning: str = ""
    text: bool = False
    width_ch: int = 0
    per: float = 1.0
    decimals: int | None = None
    hidden: bool = False
    title: str | None = None
    show: Callable[[Any], str] | None = None

    @property
    def heading(self) -> str:
        """As texts have it."""
        return self.label if self.title is None else self.title

    @property
    def lines(self) -> tuple[list[str], str]:
        """Words of the heading in texts, line by line, and the unit, which has a line of its own."""
        words, _, unit = self.heading.partition(", ")
        return words.split("\n"), unit

    @property
    def short(self) -> str:
        """The heading on one line, without its unit."""
        return unbroken(self.label).partition(",")[0]

    def cells(self, rows: Sequence[object]) -> list[str]:
        """As texts have them: `-` for what is not known."""
        values = [known_value(row, self.key) for row in rows]
        if self.decimals is None and self.show is None and not self.text:
            return seconds_cells([None if value is None else value / self.per for value in values])
        return [NOTHING if value is None else "" if value == "" else self._cell(value) for value in values]

    def _cell(self, value: Any) -> str:  # noqa: ANN401 - words or a number
        if self.show is not None:
            return self.show(value)
        return str(value) if self.text else f"{value / self.per:,.{self.decimals}f}"


def words(key: str, label: str, meaning: str = "", width_ch: int = 0, **others: Any) -> Column:  # noqa: ANN401
    """A column of words, aligned to the left."""
    return Column(key, label, meaning, text=True, width_ch=width_ch, **others)


def count(key: str, label: str, meaning: str = "", **others: Any) -> Column:  # noqa: ANN401
    """A column of whole numbers."""
    return Column(key, label, meaning, decimals=0, **others)


def share(
    key: str, label: str, meaning: str = "", *, decimals: int = 1, signed: bool = False, title: str | None = None
) -> Column:
    """A column of shares: a page has the percent sign in the heading, texts have it in the cells."""
    show = signed_percent if signed else partial(percent, decimals=decimals)
    return Column(key, f"{label}, %", meaning, per=PERCENT, decimals=decimals, title=title or label, show=show)


def unbroken(label: str) -> str:
    """A heading on one line."""
    return label.replace("\n", " ")


def known_value(row: object, key: str) -> Any:  # noqa: ANN401 - whatever rows hold
    """What a row, or an object, has under a key; None for what is missing or not a number."""
    for name in key.split("."):
        row = row.get(name) if isinstance(row, Mapping) else getattr(row, name, None)
    return None if isinstance(row, float) and math.isnan(row) else row


@dataclass(frozen=True)
class Table:
    """Rows as every format shows them, and sentences below; UsageError, when shown, for a column that does not exist.

    title: what the rows are of, above them; columns: all there are, by name; names: those to show; fields: what CSV and
    data frames have of each row, units included; best: number of a row to mark; apart: an empty line between the notes
    of a text; gap: spaces between columns.
    """

    columns: Mapping[str, Column]
    rows: Sequence[Mapping[str, Any]]
    names: Sequence[str]
    fields: Sequence[str] = ()
    notes: Sequence[str] = ()
    best: int | None = None
    apart: bool = False
    title: str = ""
    gap: int = 2

    @cached_property
    def shown(self) -> list[Column]:
        """The columns to show, each by its name or its heading."""
        known = {one.short.lower(): one for one in self.columns.values()} | {**self.columns}
        for name in self.names:
            if name not in known and name.lower() not in known:
                raise UsageError(f"no column {name!r}{suggest(name, known)}; known: {', '.join(self.columns)}")
        return [known.get(name) or known[name.lower()] for name in self.names]

    @cached_property
    def cells(self) -> list[list[str]]:
        """Cells of each row."""
        return cells_of(self.shown, self.rows)

    @property
    def width(self) -> int:
        """Characters of its longest line as text."""
        return max(map(len, text_table(self.shown, self.cells, gap=self.gap).splitlines()))

    @property
    def values(self) -> list[list[object]]:
        """The fields of each row."""
        return [[row.get(name) for name in self.fields] for row in self.rows]

    def render(self, output_format: str, *, color: bool = False) -> str:
        """As `csv`, `md`, or aligned text."""
        if output_format == "csv":
            return csv_table(self.fields, self.values)
        if output_format == "md":
            listed = "".join(f"- {note}\n" for note in self.notes)
            head = f"{self.title}\n\n" if self.title else ""
            return head + markdown_table(self.shown, self.cells) + (f"\n{listed}" if listed else "")
        below = ("\n" if self.apart else "").join(f"{wrapped(note)}\n" for note in self.notes)
        shown = text_table(self.shown, self.cells, color=color, best=self.best, gap=self.gap, width=line_width())
        head = "".join(f"{wrapped(line)}\n" for line in self.title.splitlines())
        return head + shown + (f"\n{below}" if below else "")

    def without_equal(self, names: Sequence[str], also: Sequence[str] = ()) -> Table:
        """Without those of these columns that have one value in all rows; the title says which, but for nothing.

        also: what else all rows have, in words.
        """
        equal = [name for name in names if name in self.names and len({*self._column(name)}) == 1]
        told = [(self.columns[name].short, self._column(name)[0]) for name in equal]
        said = [*also, *(f"{short} {cell}" for short, cell in told if cell not in _UNSAID)]
        title = f"{self.title}\n{'In all rows' if len(self.rows) > 1 else 'Also'}: {', '.join(said)}."
        return replace(
            self, names=[name for name in self.names if name not in equal], title=title if said else self.title
        )

    def _column(self, name: str) -> list[str]:
        return self.columns[name].cells(self.rows)

    def most_alike(self, name: str) -> int:
        """Rows that have the most frequent cell of a column."""
        return max(Counter(self._column(name)).values(), default=0)

    def fitted(self, spare: Sequence[str], *, aside: str = "", width: int = 0) -> Table:
        """Within a line, if it can be: with less space between columns, then without the spare ones, in their order.

        Of those it has again what leaves room. aside: a column that comes last and is long, and does not count. width:
        of a line, 0 for `line_width`.
        """
        width, gone = max(width, _NARROWEST) if width else line_width(), list[str]()
        left = [name for name in spare if name in self.names]
        while (found := self._within(gone, aside, width)) is None and left:
            gone.append(left.pop(0))
        if found is None:
            return replace(self, gap=1, names=[name for name in self.names if name not in gone])
        for name in [*reversed(gone)]:
            found = self._within([one for one in gone if one != name], aside, width) or found
            gone = [one for one in gone if one not in found.names]
        return found

    def _within(self, gone: Sequence[str], aside: str, width: int) -> Table | None:
        """Without these columns, if that is within a line."""
        table = replace(self, names=[name for name in self.names if name not in gone])
        counted = replace(table, names=[name for name in table.names if name != aside])
        gap = next((gap for gap in (2, 1) if replace(counted, gap=gap).width <= width), None)
        return None if gap is None else replace(table, gap=gap)

    def frame(self) -> pd.DataFrame:
        """The fields as a data frame."""
        import pandas as pd

        return pd.DataFrame(self.values, columns=list(self.fields))

    def html(self) -> str:
        """With no style but alignment, so that a notebook's own theme holds."""
        # Imported here: its tables of entities cost a command line more than all its options.
        from html import escape

        sides = ["left" if column.text else "right" for column in self.shown]
        head = _html_row("th", [escape(column.heading) for column in self.shown], sides)
        body = "".join(_html_row("td", map(escape, row), sides) for row in self.cells)
        table = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>" if self.rows else ""
        head, *below = (f"<p>{escape(text)}</p>" if text else "" for text in (self.title, *self.notes))
        return head + table + "".join(below)

    def rich(self) -> Group:
        """As rich prints it, fitted to the console."""
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=None, pad_edge=False, header_style="bold")
        for column in self.shown:
            table.add_column(Text(column.heading), justify="left" if column.text else "right", overflow="fold")
        for row in self.cells:
            table.add_row(*map(Text, row))
        head = [Text(self.title)] if self.title else []
        return Group(*head, *([table] if self.rows else []), *map(Text, self.notes))


def cells_of(columns: Sequence[Column], rows: Sequence[object]) -> list[list[str]]:
    """Cells of each row."""
    return [list(row) for row in zip(*(column.cells(rows) for column in columns), strict=True)]


def text_of(columns: Sequence[Column], rows: Sequence[object]) -> str:
    """The rows as aligned text; nothing without rows."""
    return text_table(columns, cells_of(columns, rows), width=line_width()) if rows else ""


def _html_row(tag: str, cells: Iterable[str], sides: Sequence[str]) -> str:
    """A row of a table; the cells are HTML already."""
    shown = (
        f'<{tag} style="text-align: {side}; white-space: pre-line">{cell}</{tag}>'
        for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{''.join(shown)}</tr>"


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


def terminal_width() -> int:
    """Characters of a line of the terminal that standard output is; 0 if it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def line_width() -> int:
    """Characters of a line: as COLUMNS or the terminal has it, 80 at least; in a pipe or a file 100."""
    return max(shutil.get_terminal_size((WIDTH, 0)).columns, _NARROWEST)


def colored(text: str, color: str) -> str:
    """The text in a color, which ends with it; as it is without one or without text."""
    return f"{color}{text}{RESET}" if color and text else text


def text_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    color: bool = False,
    best: int | None = None,
    gap: int = 2,
    width: int = 0,
) -> str:
    """Columns with a gap between them; with `color` the headings are bold and row `best` is green.

    width: of a line, within which a last column of words is broken; 0 for none.
    """
    units = [column.lines[1] for column in columns]
    titles = [column.lines[0] for column in columns]
    height = max(map(len, titles))
    head = [[*[""] * (height - len(lines)), *lines] for lines in titles]
    if any(units):
        head, height = [[*lines, unit] for lines, unit in zip(head, units, strict=True)], height + 1
    cells = [*zip(*head, strict=True), *rows]
    widths = [max(len(row[place]) for row in cells) for place in range(len(columns))]
    room = width - sum(widths[:-1]) - gap * (len(widths) - 1)
    breaks = columns[-1].text and _LEAST_ROOM <= room < widths[-1]
    lines = []
    for number, row in enumerate(cells):
        style = BOLD if number < height else GREEN if best is not None and number == height + best else ""
        last = (textwrap.wrap(row[-1], room, break_long_words=False, break_on_hyphens=False) if breaks else []) or [
            row[-1]
        ]
        for at, part in enumerate(last):
            parts = [*([""] * (len(row) - 1) if at else row[:-1]), part]
            sides = (
                cell.ljust(size) if column.text else cell.rjust(size)
                for cell, size, column in zip(parts, widths, columns, strict=True)
            )
            line = (" " * gap).join(sides).rstrip()
            lines.append(f"{style}{line}{RESET}" if color and style else line)
    return "\n".join(lines) + "\n"


def markdown_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    """A table as GitHub reads it."""
    lines = [
        _markdown_row([unbroken(column.heading) for column in columns]),
        _markdown_row([":---" if column.text else "---:" for column in columns]),
    ]
    lines += [_markdown_row([" ".join(cell.split()) for cell in row]) for row in rows]
    return "\n".join(lines) + "\n"


def csv_table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Comma-separated values under machine-readable names; None is empty, floats keep every digit."""
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(map(_csv_cell, row) for row in rows)
    return output.getvalue()


def _csv_cell(value: object) -> object:
    """A value as CSV has it; text that a spreadsheet would take for a formula has an apostrophe before it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}" if isinstance(value, str) and value.startswith(tuple("=+-@\t\r")) else value


def seconds_cells(values_s: Sequence[float | None]) -> list[str]:
    """Numbers of one column with as many decimals as show three digits of the middle one, and one more if the smallest
    would be 0; `-` for None."""
    known = sorted(abs(value) for value in values_s if value)
    decimals = min(max(2 - math.floor(math.log10(known[len(known) // 2])), 0), 7) if known else 2
    decimals += bool(known) and known[0] < 0.5 * 10**-decimals
    return [NOTHING if value is None else f"{value:.{decimals}f}" if value else "0" for value in values_s]


def axis_name(axis: str) -> str:
    """An axis, or several, as people know it: all four together are the world."""
    return "world" if axis == "".join(AXES) else axis


def percent(share: float | None, *, decimals: int = 1) -> str:
    """A share for a person: `12.3%`; `-` for None and nan."""
    return NOTHING if share is None or math.isnan(share) else f"{share:.{decimals}%}"


def signed_percent(share: float | None) -> str:
    """A relative error or change for a person: `+3.1%`; `-` for None and nan."""
    return NOTHING if share is None or math.isnan(share) else f"{share:+.1%}"


def wrapped(sentence: str) -> str:
    """A sentence in lines of at most 100 characters, indented from the second on."""
    width = min(line_width(), WIDTH)
    return textwrap.fill(sentence, width=width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def aligned_cells(parts: Sequence[Sequence[str]]) -> list[str]:
    """Cells of several parts each, every part right-aligned in itself."""
    if not parts:
        return []
    widths = [max(len(row[position]) for row in parts) for position in range(len(parts[0]))]
    return [" ".join(part.rjust(width) for part, width in zip(row, widths, strict=True)) for row in parts]


def _markdown_row(cells: Iterable[str]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def fields_of(source: object, names: Iterable[str], **own: object) -> Json:
    """What `source` has under these names, in their order; `own`: what stands under some of them instead."""
    return {name: own[name] if name in own else getattr(source, name) for name in names}


def json_text(document: Json, *, indent: int | None = None, separators: tuple[str, str] | None = None) -> str:
    """JSON text with every digit; a number that is not finite becomes null, which JSON has instead."""
    dumps = partial(json.dumps, ensure_ascii=False, allow_nan=False, indent=indent, separators=separators)
    try:
        return f"{dumps(document)}\n"
    except ValueError:
        return f"{dumps(_finite(document))}\n"


def _finite(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def progress(
    what: str, *, shown: bool = True, clock: Callable[[], float] = time.monotonic
) -> Iterator[ProgressFunction]:
    """Something that takes long; tell the function given how far it is. `shown=False`: nothing is said."""
    if not shown:
        yield lambda share, words: None
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _bar(what, clock) as tell:
            yield tell
    else:
        yield _lines(what, clock)


@contextmanager
def search_progress(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Shows on a terminal how far searches are that take more than `SECONDS_UNSAID`."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    # Imported here: what writes other tables does without searches.
    from axonn_tune.ranking.priced import TELL
    from axonn_tune.units import show_seconds

    began_s, shown = clock(), list[ProgressFunction]()
    with ExitStack() as stack:

        def tell(done: int, left: int, best_s: float) -> None:
            if not shown and clock() - began_s >= SECONDS_UNSAID:
                shown.append(stack.enter_context(_bar("Searching", clock)))
            best = f", best {show_seconds(best_s)}" if math.isfinite(best_s) else ""
            for one in shown:
                one(done / max(done + left, 1), f"{done:,} candidates priced, {left:,} left{best}")

        before = TELL.set(tell)
        try:
            yield
        finally:
            TELL.reset(before)


def left_words(elapsed_s: float, share: float) -> str:
    """Time left as 1:05 or 2:00:00, if it goes on as it did; empty before anything is done."""
    if share <= 0.0:
        return ""
    left_s = round(elapsed_s * (1.0 - min(share, 1.0)) / share)
    minutes, seconds = divmod(left_s, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d} left" if hours else f"{minutes}:{seconds:02d} left"


def _lines(what: str, clock: Callable[[], float]) -> ProgressFunction:
    """A line when half a minute has gone by since the last."""
    began_s = said_s = clock()

    def tell(share: float, words: str) -> None:
        nonlocal said_s
        now_s = clock()
        if now_s - said_s >= SECONDS_BETWEEN_LINES:
            said_s = now_s
            parts = [f"{share:.0%}", words, left_words(now_s - began_s, share)]
            print(f"{what}: {', '.join(part for part in parts if part)}", file=sys.stderr, flush=True)

    return tell


@contextmanager
def _bar(what: str, clock: Callable[[], float]) -> Iterator[ProgressFunction]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[left]}"))
    # No thread that draws: a process that has one may not enter a lab's namespaces.
    with Progress(
        *columns, console=Console(file=getattr(sys.stderr, "plain", sys.stderr)), transient=True, auto_refresh=False
    ) as bar:
        task, began_s = bar.add_task(what, total=1.0, left=""), clock()
        drawn_s = began_s - SECONDS_BETWEEN_BARS

        def tell(share: float, words: str) -> None:
            nonlocal drawn_s
            now_s = clock()
            if now_s - drawn_s >= SECONDS_BETWEEN_BARS:
                drawn_s, left = now_s, left_words(now_s - began_s, share)
                description = f"{what}: {words}" if words else what
                bar.update(task, completed=min(share, 1.0), description=description, left=left, refresh=True)

        yield tell
