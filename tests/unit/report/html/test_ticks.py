"""Ticks of logarithmic scales."""

from __future__ import annotations

import pytest

from axonn_tune.report.html.ticks import round_ticks


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.9, 25.0, [1, 2, 5, 10, 20]),
        (3.0, 8000.0, [10, 100, 1000]),
        (11.0, 12.0, [11.0, 12.0]),
        (7.0, 7.0, [7.0]),
    ],
)
def test_ticks_are_round_and_few(low: float, high: float, ticks: list[float]) -> None:
    """Guards scales: round numbers within the range, and the ends where there is none."""
    assert round_ticks(low, high) == pytest.approx(ticks)


def test_ticks_of_memory_are_round_in_its_unit() -> None:
    """Guards memory: whole GiB, not whole billions of bytes."""
    assert round_ticks(1.5 * 2**30, 12.0 * 2**30, unit=2.0**30) == pytest.approx([2 * 2**30, 5 * 2**30, 10 * 2**30])
