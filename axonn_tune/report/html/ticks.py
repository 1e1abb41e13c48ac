"""Ticks of logarithmic scales: round numbers within a range, few enough to read."""

from __future__ import annotations

import math

_WIDE = 300.0
"""From this ratio on powers of ten are enough."""


def round_ticks(low: float, high: float, *, unit: float = 1.0) -> list[float]:
    """1, 2 and 5 times powers of ten of `unit` between two positive values; the two themselves if there are fewer."""
    decades = range(math.floor(math.log10(low / unit)), math.ceil(math.log10(high / unit)) + 1)
    steps = (1, 2, 5) if high / low < _WIDE else (1,)
    found = [step * 10.0**decade * unit for decade in decades for step in steps]
    shown = [value for value in found if low <= value <= high]
    return shown if len(shown) > 1 else list(dict.fromkeys([low, high]))
