"""Parts of small SVG figures: the document, text, grid lines, scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

COLOURS = ("#111111", "#1b6ca8", "#c44e00", "#2a8c4a", "#8a3ea8", "#b0174b", "#d4a300", "#5a3a2e")
GREY = "#dddddd"


def document(parts: Iterable[str], *, width: int, height: int) -> str:
    """The whole file."""
    begin = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        'font-family="sans-serif" font-size="12">'
    )
    return "\n".join([begin, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>"]) + "\n"


def linear(low: float, high: float, *, start: float, end: float) -> Callable[[float], float]:
    """Where a value between two lies between two places."""
    return lambda value: start + (value - low) / (high - low) * (end - start)


def text(x: float, y: float, words: str, *, anchor: str) -> str:
    """One line of words; `anchor`: start, middle or end lies at x."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(ends: Sequence[tuple[float, float]], *, colour: str, width: float = 1.0, dashes: str = "") -> str:
    """A straight line between two points."""
    (x1, y1), (x2, y2) = ends
    style = f' stroke-width="{width:g}"' * (width != 1.0) + f' stroke-dasharray="{dashes}"' * bool(dashes)
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{style}/>'


def legend_entry(x: float, y: float, name: str, *, colour: str) -> str:
    """A short line of a colour, and what it stands for."""
    mark = line([(x, y - 4), (x + 24, y - 4)], colour=colour, width=3.0)
    return mark + text(x + 32, y, name, anchor="start")
