"""A small SVG of predicted over measured step times, both logarithmic: one colour for each source."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from axonn_tune.units import show_seconds
from axonn_tune.validation.published.accuracy import PredictedRow
from benchmarks.svg import COLOURS, GREY, document, legend_entry, line, linear, text

WIDTH, HEIGHT = 750, 520
LEFT, TOP, SIDE = 60, 12, 456
"""Corner and side of the square that points lie in, pixels."""
RIGHT, BOTTOM = LEFT + SIDE, TOP + SIDE
NEAR = 0.25
"""Size of the error at the dashed lines."""
DOT = 4

Points: TypeAlias = Sequence[tuple[float, float]]
Scale: TypeAlias = Callable[[float], float]


def figure(predictions: Iterable[PredictedRow]) -> str:
    """The whole document; ValueError without a step that is both measured and predicted."""
    sources = _sources(predictions)
    values = [value for points in sources.values() for point in points for value in point]
    if not values:
        raise ValueError("no step is both measured and predicted: nothing to draw")
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    across = linear(low, high, start=LEFT, end=RIGHT)
    upwards = linear(low, high, start=BOTTOM, end=TOP)
    parts = [*_axes(range(low, high + 1), across, upwards), *_lines(low, high, across, upwards)]
    for number, points in enumerate(sources.values()):
        parts.append(_dots(points, across, upwards, colour=_colour(number)))
    return document([*parts, *_legend(sources)], width=WIDTH, height=HEIGHT)


def _sources(predictions: Iterable[PredictedRow]) -> Mapping[str, Points]:
    """Measured and predicted times by source, s; the largest source first, so that small ones lie on top."""
    found: dict[str, list[tuple[float, float]]] = {}
    for one in predictions:
        if one.row.step_s and one.predicted_s:
            found.setdefault(one.row.dataset, []).append((one.row.step_s, one.predicted_s))
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))


def _axes(powers: Iterable[int], across: Scale, upwards: Scale) -> list[str]:
    """Grid lines at powers of ten, with their times, and what the axes are."""
    parts = []
    for power in powers:
        x, y, words = across(power), upwards(power), show_seconds(10.0**power)
        parts += [line([(x, TOP), (x, BOTTOM)], colour=GREY), text(x, BOTTOM + 18, words, anchor="middle")]
        parts += [line([(LEFT, y), (RIGHT, y)], colour=GREY), text(LEFT - 6, y + 4, words, anchor="end")]
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 40, "measured step", anchor="middle"))
    return [*parts, text(LEFT + 8, TOP + 16, "predicted step", anchor="start")]


def _lines(low: float, high: float, across: Scale, upwards: Scale) -> list[str]:
    """Where predictions are right, and where they are wrong by ±25%, each as far as the square goes."""
    parts = []
    for error in (0.0, NEAR, -NEAR):
        shift = math.log10(1.0 + error)
        ends = [(across(at), upwards(at + shift)) for at in (max(low, low - shift), min(high, high - shift))]
        parts.append(line(ends, colour="#777777", dashes="5 4" if error else ""))
    return parts


def _dots(points: Points, across: Scale, upwards: Scale, *, colour: str) -> str:
    """One path of round dots: lines without length, each place once."""
    places = dict.fromkeys(
        f"M{across(math.log10(measured)):.0f} {upwards(math.log10(predicted)):.0f}h0" for measured, predicted in points
    )
    return (
        f'<path fill="none" stroke="{colour}" stroke-opacity="0.65" stroke-width="{DOT}" stroke-linecap="round" '
        f'd="{"".join(places)}"/>'
    )


def _legend(sources: Mapping[str, Points]) -> list[str]:
    x = RIGHT + 16
    parts = [
        legend_entry(x, TOP + 14 + 18 * number, f"{name}, {len(points):,}", colour=_colour(number))
        for number, (name, points) in enumerate(sources.items())
    ]
    y = TOP + 14 + 18 * (len(sources) + 1)
    for words, dashes in (("no error", ""), (f"±{NEAR:.0%}", "5 4")):
        parts.append(line([(x, y - 4), (x + 24, y - 4)], colour="#777777", dashes=dashes))
        parts.append(text(x + 32, y, words, anchor="start"))
        y += 18
    return parts


def _colour(number: int) -> str:
    """Of a source; the first of all is for curves that others are compared with."""
    own = COLOURS[1:]
    return own[number % len(own)]
