"""Predicted over measured, a color for each series: on logarithmic axes, or as errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from axonn_tune.report.html.blocks import Choice, Json, figure
from axonn_tune.report.html.colors import MUTED, SERIES, series_color
from axonn_tune.report.html.ticks import round_ticks
from axonn_tune.units import GIB, MICRO, show_seconds

NEAR = 0.25
"""Size of the error at the dashed lines."""
MOST_POINTS = 3000
"""Of more, those that would lie on each other are drawn once: a browser takes long for ten thousand."""

_CELLS_PER_DECADE = 40
_SYMBOLS = ("circle", "diamond", "square", "triangle-up")
_PERCENT = 0.01


@dataclass(frozen=True)
class Unit:
    """What values are shown in: `name`, so many SI units each, with so many decimals; `show` writes one out."""

    name: str
    per: float
    decimals: int
    show: Callable[[float], str]


STEPS = Unit("s", 1.0, 3, show_seconds)
TIMES = Unit("µs", MICRO, 1, show_seconds)
MEMORY = Unit("GiB", GIB, 2, lambda value: f"{value / GIB:.3g} GiB")
SHARES = Unit("%", _PERCENT, 1, lambda value: f"{value / _PERCENT:.3g}%")


@dataclass(frozen=True)
class Point:
    """A row that has both values, positive; `words`: what pointing at it says."""

    series: str
    measured: float
    predicted: float
    words: str

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted / self.measured - 1.0


def points_figure(points: Sequence[Point], unit: Unit, *, title: str) -> Json:
    """All points, the largest series first so that small ones lie on top, and lines for no error and ±25%."""
    drawn = _apart(points) if len(points) > MOST_POINTS else points
    series = _series(drawn)
    traces = [_trace(name, found, number) for number, (name, found) in enumerate(series.items())]
    errors: dict[int, Json] = {
        number: {"y": [[one.error / _PERCENT for one in found]]} for number, found in enumerate(series.values())
    }
    ends = _ends(drawn)
    for share in (0.0, NEAR, -NEAR):
        errors[len(traces)] = {"y": [[share / _PERCENT] * 2]}
        traces.append(_line(ends, share))
    times = {number: {"y": [trace["y"]]} for number, trace in enumerate(traces)}
    axis = _axis(ends, unit)
    layout = {
        "xaxis": {"title": {"text": "measured"}, **axis},
        "yaxis": {"title": {"text": "predicted"}, **axis},
        "hovermode": "closest",
    }
    linear = {"yaxis.title.text": "error, %", "yaxis.type": "linear", "yaxis.tickvals": None, "yaxis.ticktext": None}
    choices = [Choice("predicted", times), Choice("error", errors, linear)]
    note = f"On the line a prediction is right; dashed: an error of ±{NEAR:.0%}."
    if len(drawn) < len(points):
        note += f" Of rows that lie on each other the worst is drawn: {len(drawn):,} of {len(points):,}."
    return figure(title, traces, layout=layout, height=540, note=note, choices=choices)


def _apart(points: Sequence[Point]) -> list[Point]:
    """The worst of each series in each cell of a fine grid, in the order of `points`."""
    worst: dict[tuple[str, int, int], Point] = {}
    for one in points:
        cell = one.series, _cell(one.measured), _cell(one.predicted)
        if cell not in worst or abs(one.error) > abs(worst[cell].error):
            worst[cell] = one
    return list(worst.values())


def _cell(value: float) -> int:
    return round(_CELLS_PER_DECADE * math.log10(value))


def _series(points: Sequence[Point]) -> Mapping[str, list[Point]]:
    """Points by series, the largest first."""
    found: dict[str, list[Point]] = {}
    for one in points:
        found.setdefault(one.series, []).append(one)
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))


def _ends(points: Sequence[Point]) -> tuple[float, float]:
    """The range of all values, with room on both sides."""
    values = [value for one in points for value in (one.measured, one.predicted)]
    return 0.8 * min(values), 1.25 * max(values)


def _axis(ends: tuple[float, float], unit: Unit) -> Json:
    ticks = round_ticks(*ends, unit=unit.per)
    return {"type": "log", "tickvals": ticks, "ticktext": [unit.show(tick) for tick in ticks]}


def _trace(name: str, points: Sequence[Point], number: int) -> Json:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [one.measured for one in points],
        "y": [one.predicted for one in points],
        "text": [one.words for one in points],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {
            "size": 6,
            "opacity": 0.7,
            "color": series_color(number),
            "symbol": _SYMBOLS[number // len(SERIES) % len(_SYMBOLS)],
        },
    }


def _line(ends: tuple[float, float], error: float) -> Json:
    """Where predictions have this error."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"error of ±{NEAR:.0%}" if error else "measured as predicted",
        "showlegend": error >= 0,
        "x": list(ends),
        "y": [(1.0 + error) * end for end in ends],
        "hoverinfo": "skip",
        "line": {"color": MUTED, "width": 1, "dash": "dash" if error else "solid"},
    }
