"""Plain tables: alignment, Markdown, CSV, numbers of one column."""

from __future__ import annotations

import pytest

from axonn_tune.report.table import (
    Heading,
    aligned_cells,
    csv_table,
    markdown_table,
    seconds_cells,
    text_table,
    use_color,
)

HEADINGS = [Heading("name", left=True), Heading("time,\ns")]
ROWS = [["a", "1.5"], ["long|name", "10.25"]]


def test_columns_are_aligned() -> None:
    """Guards the layout: text to the left, numbers to the right, headings over their columns."""
    assert text_table(HEADINGS, ROWS) == (
        "           time,\n"  # a two-line heading stands on its last line
        "name           s\n"
        "a            1.5\n"
        "long|name  10.25\n"
    )


def test_color_marks_headings_and_the_best_row() -> None:
    """Guards color: only the headings and one row, and each line ends it."""
    lines = text_table(HEADINGS, ROWS, color=True, best=1).splitlines()
    assert [line.startswith("\x1b[") for line in lines] == [True, True, False, True]
    assert all(line.endswith("\x1b[0m") for line in lines if line.startswith("\x1b["))


def test_markdown_escapes_what_would_split_a_cell() -> None:
    """Guards Markdown: a bar in a cell, a break in a heading."""
    assert markdown_table(HEADINGS, ROWS).splitlines() == [
        "| name | time, s |",
        "| :--- | ---: |",
        "| a | 1.5 |",
        "| long\\|name | 10.25 |",
    ]


def test_csv_keeps_every_digit() -> None:
    """Guards CSV: floats read back equal, None is empty, commas are quoted."""
    third = 1 / 3
    assert csv_table(["a", "b", "c", "d"], [[third, None, True, "x,y"]]) == f'a,b,c,d\n{third!r},,true,"x,y"\n'
    assert float(repr(third)) == third


@pytest.mark.parametrize(
    ("values", "cells"),
    [
        ([1.5, 10.25], ["1.50", "10.25"]),
        ([0.0123, 1.0], ["0.0123", "1.0000"]),
        ([120.0, 15.5], ["120.0", "15.5"]),
        ([None, 0.0, 2.0], ["-", "0", "2.00"]),
        ([1e-9, 1000.0], ["0.0000", "1000.0000"]),
        ([1e9], ["1000000000"]),
        ([None], ["-"]),
        ([], []),
    ],
)
def test_seconds_of_a_column_share_their_decimals(values: list[float | None], cells: list[str]) -> None:
    """Guards columns of times: three digits of the smallest, eight of the largest, unknown and zero told apart."""
    assert seconds_cells(values) == cells


def test_parts_of_cells_are_aligned() -> None:
    """Guards grids: x, y, z and data stand below each other."""
    assert aligned_cells([["1", "128"], ["16", "8"]]) == [" 1 128", "16   8"]
    assert aligned_cells([]) == []


@pytest.mark.parametrize(
    ("terminal", "environment", "colored"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"TERM": "dumb"}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": "0"}, False),
        (False, {"FORCE_COLOR": "1", "TERM": "dumb"}, True),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_colors_are_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, environment: dict[str, str], colored: bool
) -> None:
    """Guards NO_COLOR, FORCE_COLOR and TERM=dumb; --color and --no-color win over all of them."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert use_color(wanted=None) is colored
    assert use_color(wanted=True)
    assert not use_color(wanted=False)
