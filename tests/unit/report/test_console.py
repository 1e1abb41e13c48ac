"""How long commands say that they take: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import io

import pytest

from axonn_tune.report.console import left_words, progress


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


@pytest.mark.parametrize(
    ("elapsed_s", "share", "words"),
    [
        (10.0, 0.0, ""),
        (10.0, 0.5, "0:10 left"),
        (60.0, 0.25, "3:00 left"),
        (3600.0, 0.5, "1:00:00 left"),
        (5.0, 1.2, "0:00 left"),
    ],
)
def test_time_left_goes_on_as_before(elapsed_s: float, share: float, words: str) -> None:
    """Guards the arithmetic, and its ends."""
    assert left_words(elapsed_s, share) == words


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


def test_nothing_is_said_where_another_rank_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards worlds of many ranks: only one of them tells."""
    assert told(Terminal(), monkeypatch, shown=False) == ""
