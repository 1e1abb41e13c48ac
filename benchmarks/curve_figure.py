"""A small SVG of training curves: losses above, differences to the first curve below, on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.svg import COLOURS, GREY, document, legend_entry, line, linear, text

WIDTH, LEFT, RIGHT = 720, 56, 16
PANELS = ((24, 236), (272, 408))
"""Top and bottom of the two panels."""
HEIGHT = 444
FLOOR = 1e-8
"""Differences below it are drawn here: single precision's rounding."""


@dataclass(frozen=True)
class Curve:
    """A name and one value a step."""

    name: str
    values: Sequence[float]


def figure(curves: Sequence[Curve]) -> str:
    """The whole document. The first curve is what the others are compared with."""
    parts = [*_losses(curves), *_differences(curves[0], curves[1:]), *_legend(curves)]
    return document(parts, width=WIDTH, height=HEIGHT)


def _losses(curves: Sequence[Curve]) -> list[str]:
    highest = math.ceil(max(max(one.values) for one in curves))
    place = _upwards(0.0, highest, PANELS[0])
    steps = len(curves[0].values)
    parts = [text(LEFT, PANELS[0][0] - 8, "loss, nats per byte", anchor="start")]
    parts += [_grid_line(place(float(loss)), str(loss)) for loss in range(highest + 1)]
    for number, one in enumerate(curves):
        # Curves lie on each other: the widest first, so that each shows beside the next.
        width = 1.2 + 1.6 * (len(curves) - 1 - number)
        parts.append(_line(one.values, steps, place, colour=COLOURS[number], width=width))
    return parts


def _differences(first: Curve, others: Sequence[Curve]) -> list[str]:
    gaps = [[abs(mine - theirs) for mine, theirs in zip(one.values, first.values, strict=True)] for one in others]
    low, high = math.log10(FLOOR), math.ceil(math.log10(max(FLOOR * 10, *(max(found) for found in gaps))))
    place = _upwards(low, high, PANELS[1])
    parts = [text(LEFT, PANELS[1][0] - 8, f"distance of the loss from that of the {first.name} run", anchor="start")]
    parts += [_grid_line(place(float(power)), f"1e{power}") for power in range(int(low), high + 1, 2)]
    for number, gap in enumerate(gaps, start=1):
        logarithms = [math.log10(max(one, FLOOR)) for one in gap]
        parts.append(_line(logarithms, len(gap), place, colour=COLOURS[number], width=1.0))
    steps = len(first.values)
    ticks = range(0, steps + 1, max(1, steps // 6))
    parts += [text(_across(step, steps), PANELS[1][1] + 16, str(step), anchor="middle") for step in ticks]
    return [*parts, text(WIDTH - RIGHT, HEIGHT - 4, "step", anchor="end")]


def _legend(curves: Sequence[Curve]) -> list[str]:
    return [
        legend_entry(WIDTH - RIGHT - 130, PANELS[0][0] + 14 + 18 * number, one.name, colour=COLOURS[number])
        for number, one in enumerate(curves)
    ]


def _upwards(low: float, high: float, panel: tuple[int, int]) -> Callable[[float], float]:
    return linear(low, high, start=panel[1], end=panel[0])


def _across(step: float, steps: int) -> float:
    return LEFT + step / steps * (WIDTH - LEFT - RIGHT)


def _line(values: Sequence[float], steps: int, place: Callable[[float], float], *, colour: str, width: float) -> str:
    points = " ".join(f"{_across(number + 1, steps):.1f},{place(value):.1f}" for number, value in enumerate(values))
    return f'<polyline fill="none" stroke="{colour}" stroke-width="{width:.1f}" points="{points}"/>'


def _grid_line(y: float, label: str) -> str:
    return line([(LEFT, y), (WIDTH - RIGHT, y)], colour=GREY) + text(LEFT - 6, y + 4, label, anchor="end")
