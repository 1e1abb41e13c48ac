"""What a page is made of, as plain JSON: the only contract between this package and `static/*.js`.

A page has sections; a section has blocks. A colour that starts with `--` is a variable of `style.css`, so that
figures follow the theme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from axonn_tune.report.table import seconds_cells

Json: TypeAlias = dict[str, Any]
Cell: TypeAlias = str | int | float | None


@dataclass(frozen=True)
class Column:
    """A column of a table. The page shows `value / per`, a number with `decimals` digits after the point.

    meaning: what it is, shown when its heading is pointed at; text: it holds words; hidden: only filtered by;
    decimals: None for as many as show three digits of the smallest.
    """

    key: str
    label: str
    meaning: str
    text: bool = False
    hidden: bool = False
    per: float = 1.0
    decimals: int | None = None
    width_ch: int = 0


@dataclass(frozen=True)
class Filter:
    """A choice above a table: rows whose `column` holds the value."""

    column: str
    label: str
    options: Sequence[Cell]


@dataclass(frozen=True)
class Choice:
    """One way to look at a figure: what to change in some of its traces, by number, and in its layout."""

    label: str
    traces: Mapping[int, Json]
    layout: Json = field(default_factory=dict)


def section(identity: str, title: str, *, lead: Sequence[str], cards: Sequence[Json], blocks: Sequence[Json]) -> Json:
    """One source of the report; `identity` is what links lead to, `lead` sentences below its title."""
    return {"id": identity, "title": title, "lead": list(lead), "cards": list(cards), "blocks": list(blocks)}


def card(label: str, value: str, *, note: str = "") -> Json:
    """One number, large."""
    return {"label": label, "value": value, "note": note}


def cards(found: Sequence[Json]) -> Json:
    """Several of them."""
    return {"kind": "cards", "cards": list(found)}


def text(sentences: Sequence[str], *, title: str = "") -> Json:
    """Sentences, one paragraph each."""
    return {"kind": "text", "title": title, "sentences": list(sentences)}


def facts(rows: Sequence[tuple[str, str]], *, title: str = "") -> Json:
    """Names and values."""
    return {"kind": "facts", "title": title, "rows": [list(row) for row in rows]}


def command(line: str, *, title: str) -> Json:
    """A command line to copy."""
    return {"kind": "command", "title": title, "line": line}


def fold(title: str, blocks: Sequence[Json]) -> Json:
    """Blocks behind a title, closed until it is clicked."""
    return {"kind": "fold", "title": title, "blocks": list(blocks)}


def figure(
    title: str,
    traces: Sequence[Json],
    *,
    layout: Mapping[str, Any],
    height: int,
    note: str = "",
    choices: Sequence[Choice] = (),
    least_width: int = 0,
) -> Json:
    """A plotly figure, drawn when it is seen; narrower than `least_width` pixels it scrolls sideways."""
    return {
        "kind": "figure",
        "title": title,
        "note": note,
        "figure": {"data": list(traces), "layout": dict(layout)},
        "height": height,
        "leastWidth": least_width,
        "choices": [
            {"label": one.label, "traces": {str(key): value for key, value in one.traces.items()}, "layout": one.layout}
            for one in choices
        ],
    }


def table(
    identity: str,
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, Cell]],
    *,
    note: str = "",
    filters: Sequence[Filter] = (),
    opens: str = "",
    tall: bool = False,
) -> Json:
    """A table that sorts; `filters` and a search box above it if it is `tall`; a click opens a row in block `opens`."""
    return {
        "kind": "table",
        "id": identity,
        "title": title,
        "note": note,
        "rows": len(rows),
        "columns": [column_json(column, [row.get(column.key) for row in rows]) for column in columns],
        "filters": [
            {"column": one.column, "label": one.label, "options": list(one.options)}
            for one in filters
            if len(one.options) > 1
        ],
        "opens": opens,
        "tall": tall,
    }


def column_json(column: Column, values: Sequence[Cell]) -> Json:
    """A column with its values, every digit of them; repeated words are kept once."""
    numbers = [value / column.per for value in values if isinstance(value, int | float)]
    found: Json = {
        "key": column.key,
        "label": column.label,
        "meaning": column.meaning,
        "text": column.text,
        "hidden": column.hidden,
        "per": column.per,
        "decimals": (decimals := _decimals(numbers) if column.decimals is None else column.decimals),
        "width": max(_width(column.label), _longest(numbers, decimals), column.width_ch if column.text else 0),
    }
    if not column.text:
        return {**found, "values": list(values)}
    words = list(dict.fromkeys(value for value in values if value is not None))
    places = {word: place for place, word in enumerate(words)}
    return {**found, "words": words, "values": [None if value is None else places[value] for value in values]}


def _width(label: str) -> int:
    """Characters of the longest part of a heading that cannot be broken."""
    return max(len(part) for part in label.replace("\u00ad", "- ").split())


def _longest(numbers: Sequence[float], decimals: int) -> int:
    """Characters of the longest number as it is shown."""
    return max((len(f"{number:,.{decimals}f}") for number in (min(numbers), max(numbers))), default=0) if numbers else 0


def _decimals(numbers: Sequence[float]) -> int:
    """As many decimals as the tables of the terminal have."""
    known = [abs(number) for number in numbers if number]
    if not known:
        return 0
    return len(seconds_cells([min(known), max(known)])[0].partition(".")[2])
