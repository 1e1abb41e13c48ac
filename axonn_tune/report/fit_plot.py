"""Draws what was measured against what the fit says, as an SVG picture that needs nothing to be made."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from axonn_tune.calibration.profile import Calibration
from axonn_tune.errors import UsageError
from axonn_tune.specs.points import CollectiveProbe
from axonn_tune.units import show_bytes, show_seconds

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 360, 300, 64, 40, 36
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")


@dataclass(frozen=True)
class Series:
    """One group shape's measured and fitted times by size."""

    label: str
    points: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True)
class Scale:
    """Logarithmic axes of a panel: value ranges to pixels."""

    sizes: tuple[float, float]
    times: tuple[float, float]

    def x(self, size: float) -> float:
        """Pixels from the panel's left."""
        return _LEFT + _share(size, self.sizes) * (_WIDTH - _LEFT - 8)

    def y(self, time: float) -> float:
        """Pixels from the top."""
        return _HEIGHT - _BOTTOM - _share(time, self.times) * (_HEIGHT - _TOP - _BOTTOM)


def require_svg(path: str) -> None:
    """UsageError for a file that is no SVG picture."""
    if Path(path).suffix != ".svg":
        raise UsageError(f"--plot {path}: the name must end in .svg")


def fit_svg(done: Calibration) -> str:
    """One panel per collective: points as measured, lines as fitted; UsageError if no collective was measured."""
    panels = {kind: list(found) for kind, found in _series(done).items()}
    if not panels:
        raise UsageError("--plot: no collectives were measured")
    every = [point for found in panels.values() for one in found for point in one.points]
    scale = Scale(_range([size for size, _, _ in every]), _range([time for _, *times in every for time in times]))
    body = [
        f'<g transform="translate({number * _WIDTH} 0)">{"".join(_panel(kind, found, scale))}</g>'
        for number, (kind, found) in enumerate(panels.items())
    ]
    size = f'width="{_WIDTH * len(panels)}" height="{_HEIGHT}"'
    style = 'font-family="sans-serif" font-size="10"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(body) + "\n</svg>\n"


def _series(done: Calibration) -> dict[str, list[Series]]:
    """Measured and fitted times by collective and group shape."""
    fit = done.communication
    found: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for probe, seconds in done.medians.items():
        if isinstance(probe, CollectiveProbe) and fit is not None:
            label = f"{probe.group} ranks, stride {probe.stride}"
            point = (float(probe.size_bytes), seconds, seconds * (1.0 + fit.errors[probe]))
            found.setdefault(probe.op, {}).setdefault(label, []).append(point)
    return {
        kind: [Series(label, tuple(sorted(points))) for label, points in shapes.items()]
        for kind, shapes in found.items()
    }


def _panel(kind: str, found: Sequence[Series], scale: Scale) -> Iterator[str]:
    yield f'<text x="{_LEFT}" y="16" font-size="12">{escape(kind)}: measured, and fitted (lines)</text>'
    bottom = _HEIGHT - _BOTTOM
    yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{_WIDTH - 8}" fill="none" stroke="#444"/>'
    for size in _ticks(scale.sizes, factor=16.0):
        yield f'<text x="{scale.x(size):.1f}" y="{bottom + 14}" text-anchor="middle">{show_bytes(size)}</text>'
    for time in _ticks(scale.times, factor=10.0):
        yield f'<text x="{_LEFT - 4}" y="{scale.y(time):.1f}" text-anchor="end">{show_seconds(time)}</text>'
    for number, one in enumerate(found):
        yield from _drawn(one, number, scale)


def _drawn(one: Series, number: int, scale: Scale) -> Iterator[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    line = " ".join(f"{scale.x(size):.1f},{scale.y(fitted):.1f}" for size, _, fitted in one.points)
    yield f'<polyline points="{line}" fill="none" stroke="{colour}"/>'
    for size, measured, _ in one.points:
        yield f'<circle cx="{scale.x(size):.1f}" cy="{scale.y(measured):.1f}" r="2.5" fill="{colour}"/>'
    yield f'<text x="{_LEFT + 8}" y="{_TOP + 12 * number}" fill="{colour}">{escape(one.label)}</text>'


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest, a little apart if they are one."""
    return min(values), max(max(values), 1.01 * min(values))


def _share(value: float, between: tuple[float, float]) -> float:
    """Where a value lies on a logarithmic axis, 0 to 1."""
    return math.log(value / between[0]) / math.log(between[1] / between[0])


def _ticks(between: tuple[float, float], *, factor: float) -> Iterator[float]:
    """Powers of the factor inside a range; for sizes these are round numbers of bytes, for times of seconds."""
    power = math.ceil(math.log(between[0], factor) - 1e-9)
    while factor**power <= between[1]:
        yield factor**power
        power += 1
