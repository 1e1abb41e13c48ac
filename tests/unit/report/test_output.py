"""What commands write: aligned tables, Markdown, CSV, JSON, and how long they still take."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

import pytest

from axonn_tune.ranking.priced import TELL
from axonn_tune.report.inventory import show_count
from axonn_tune.report.output import (
    Column,
    csv_table,
    json_text,
    markdown_table,
    progress,
    search_progress,
    use_color,
    words,
)

HEADINGS = [words("", "name"), Column("", "time, s")]
ROWS = [["a", "1.5"], ["long|name", "10.25"]]


def test_markdown_escapes_what_would_split_a_cell() -> None:
    """Guards Markdown: a bar in a cell, a break in a heading."""
    assert markdown_table(HEADINGS, ROWS).splitlines() == [
        "| name | time, s |",
        "| :--- | ---: |",
        "| a | 1.5 |",
        "| long\\|name | 10.25 |",
    ]


@pytest.mark.parametrize(
    ("count", "text"), [(999_885_952, "1 B"), (999_400_000, "999 M"), (76_800_000_000, "76.8 B"), (999, "999")]
)
def test_counts_are_rounded_into_the_next_unit(count: int, text: str) -> None:
    """Guards `1e+03 M` of a model of 999.9 million parameters."""
    assert show_count(count) == text


def test_csv_keeps_every_digit() -> None:
    """Guards CSV: floats read back equal, None is empty, commas are quoted."""
    third = 1 / 3
    assert csv_table(["a", "b", "c", "d"], [[third, None, True, "x,y"]]) == f'a,b,c,d\n{third!r},,true,"x,y"\n'
    assert float(repr(third)) == third


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


def test_json_has_no_nan() -> None:
    """Guards strict JSON: what is not finite becomes null, however deep."""
    assert json_text({"a": [float("nan"), {"b": float("inf")}, 1.5]}) == '{"a": [null, {"b": null}, 1.5]}\n'


class Terminal(io.StringIO):
    """A stream that takes itself for a terminal."""

    def isatty(self) -> bool:
        """Yes."""
        return True


def told(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, *, shown: bool = True) -> str:
    """What half a minute's steps write of 100 s of work."""
    monkeypatch.setattr("sys.stderr", stream)
    now_s = 0.0
    with progress("calibrating", shown=shown, clock=lambda: now_s) as tell:
        for now_s in (1.0, 20.0, 50.0, 60.0, 90.0):
            tell(now_s / 100.0, f"point {now_s:.0f}")
    return stream.getvalue()


def test_a_log_gets_a_plain_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards Slurm logs: whole lines, half a minute apart, without any control character."""
    text = told(io.StringIO(), monkeypatch)
    assert text.splitlines() == ["calibrating: 50%, point 50, 0:50 left", "calibrating: 90%, point 90, 0:10 left"]
    assert "\x1b" not in text
    assert "\r" not in text


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the bar: what is done and how long it takes; a dumb terminal has lines instead."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    text = told(Terminal(), monkeypatch)
    assert "calibrating: point 90" in text
    assert "0:10 left" in text
    assert "\x1b[2K" in text
    monkeypatch.setenv("TERM", "dumb")
    assert told(Terminal(), monkeypatch) == told(io.StringIO(), monkeypatch)


def test_a_long_search_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what a terminal shows of a search: nothing for two seconds, then a bar that goes away; a pipe nothing."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")

    def shown(stream: io.StringIO, seconds: Sequence[float]) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        now_s = [0.0]
        with search_progress(clock=lambda: now_s[-1]):
            for done, at_s in enumerate(seconds):
                now_s.append(at_s)
                if tell := TELL.get():
                    tell(1000 * done, 3000, 12.5)
        assert TELL.get() is None
        return stream.getvalue()

    assert shown(Terminal(), [0.5, 1.9]) == ""
    assert shown(io.StringIO(), [0.5, 3.0]) == ""
    text = shown(Terminal(), [0.5, 3.0])
    assert "1,000 candidates priced, 3,000 left, best 12.5 s" in text
    assert "\x1b[2K" in text
