"""The space of grids as a map: x and y across, z and data upwards; colours for times, marks for what cannot be used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from axonn_tune.report.html.blocks import Choice, Json, figure
from axonn_tune.report.html.colors import MUTED, RING
from axonn_tune.report.html.configuration import grid_words
from axonn_tune.report.html.ticks import round_ticks
from axonn_tune.units import GIB, show_bytes, show_seconds

_MOST_COLUMNS = 130
"""With more columns, those of one product x·y are joined, each cell the best of them."""
_SYMBOLS = (
    "x-thin-open",
    "circle-open",
    "square-open",
    "diamond-open",
    "triangle-up-open",
    "cross-thin-open",
    "hash-open",
)
_NOTHING_TO_SHOW = 2
_SPAN, _NEAR = 12.0, 0.8
"""What takes more than this many times the best has the colour of the worst."""


@dataclass(frozen=True)
class Metric:
    """What the colour can stand for."""

    label: str
    key: str
    show: Callable[[float], str]
    tick: Callable[[float], str]


_METRICS = (
    Metric("communication", "communication_s", show_seconds, show_seconds),
    Metric("exposed", "exposed_communication_s", show_seconds, show_seconds),
    Metric("step", "iteration_s", show_seconds, show_seconds),
    Metric("memory", "memory_bytes", show_bytes, lambda value: f"{value / GIB:.3g} GiB"),
)
_RANKED_BY = {"communication": "communication", "exposed": "exposed", "iteration": "step"}


@dataclass(frozen=True)
class Places:
    """Where each grid lies: columns by (x, y) or by their product, rows by z."""

    columns: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    joined: bool

    @classmethod
    def of(cls, configs: Sequence[Json]) -> Places:
        """Columns in the order of x·y, then of x falling; rows in the order of z."""
        pairs = {(config["x"], config["y"]) for config in configs}
        rows = tuple(sorted({config["z"] for config in configs}))
        if len(pairs) <= _MOST_COLUMNS:
            return cls(tuple(sorted(pairs, key=lambda pair: (pair[0] * pair[1], -pair[0]))), rows, False)
        return cls(tuple((product, 1) for product in sorted({x * y for x, y in pairs})), rows, True)

    def at(self, config: Json) -> tuple[int, int]:
        """Column and row."""
        x, y = config["x"], config["y"]
        return self._column[(x * y, 1) if self.joined else (x, y)], self._row[config["z"]]

    @cached_property
    def _column(self) -> Mapping[tuple[int, int], int]:
        return {pair: place for place, pair in enumerate(self.columns)}

    @cached_property
    def _row(self) -> Mapping[int, int]:
        return {size: place for place, size in enumerate(self.rows)}


def map_figure(configs: Sequence[Json], *, rank_by: str) -> Json | None:
    """The map of all configurations of a ranking; None for so few grids that there is nothing to see."""
    best = _best(configs)
    rejected = [config for config in configs if not config["feasible"]]
    if len(best) + len(rejected) <= _NOTHING_TO_SHOW:
        return None
    places = Places.of([*best, *rejected])
    metrics = [metric for metric in _METRICS if any(config[metric.key] for config in best)]
    metrics.sort(key=lambda metric: metric.label != _RANKED_BY[rank_by])
    traces = [*([_heat(best, places, metrics[0])] if metrics else []), *_marks(rejected, places), *_first(best, places)]
    choices = [Choice(metric.label, {0: _colored(best, places, metric)}) for metric in metrics]
    what = "Columns of one product x·y are joined; a cell shows the best of them. " if places.joined else ""
    return figure(
        "The space of grids",
        traces,
        layout=_layout(places),
        height=170 + max(24 * len(places.rows), 140),
        note=f"Each cell is a grid at its best: x and y across, z upwards, data is what remains. {what}"
        "The ring is the first of the ranking. Marks are grids that cannot be used; the legend says why, and hides them"
        " when clicked.",
        choices=choices,
        least_width=max(14 * len(places.columns), 320),
    )


def _best(configs: Sequence[Json]) -> list[Json]:
    """The first of each grid, in ranking order."""
    found: dict[tuple[int, ...], Json] = {}
    for config in configs:
        if config["feasible"]:
            found.setdefault((config["x"], config["y"], config["z"], config["data"]), config)
    return list(found.values())


def _heat(best: Sequence[Json], places: Places, metric: Metric) -> Json:
    return {
        "type": "heatmap",
        "x": list(range(len(places.columns))),
        "y": list(range(len(places.rows))),
        **{
            key: value[0] if isinstance(value, list) else value
            for key, value in _colored(best, places, metric).items()
            if "." not in key
        },
        "colorbar": {"thickness": 12, "outlinewidth": 0, **_ticks(best, metric)},
        "colorscale": [[0, "--map-best"], [0.5, "--map-middle"], [1, "--map-worst"]],
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
        "hovertemplate": "%{text}<extra></extra>",
    }


def _colored(best: Sequence[Json], places: Places, metric: Metric) -> Json:
    """Colours (logarithms) and words of each cell, as a change to the trace."""
    colors: list[list[float | None]] = [[None] * len(places.columns) for _ in places.rows]
    said = [[""] * len(places.columns) for _ in places.rows]
    for config in reversed(best):
        value = config[metric.key]
        if value is None:
            continue
        column, row = places.at(config)
        colors[row][column] = round(math.log10(max(value, 1e-9)), 4)
        said[row][column] = f"{_cell_words(config)}<br>{metric.label} {metric.show(value)}"
    ticks = _ticks(best, metric)
    low, high = _range(best, metric)
    return {
        "zmin": math.log10(low),
        "zmax": math.log10(high),
        "z": [colors],
        "text": [said],
        **{f"colorbar.{key}": [value] if isinstance(value, list) else value for key, value in ticks.items()},
    }


def _cell_words(config: Json) -> str:
    return f"#{config['rank']}: {grid_words(config)}"


def _ticks(best: Sequence[Json], metric: Metric) -> Json:
    """Ticks of the logarithmic colour bar; the last says so if there is more beyond it."""
    low, high = _range(best, metric)
    shown = round_ticks(low, high, unit=GIB if metric.key == "memory_bytes" else 1.0)
    words = [metric.tick(value) for value in shown]
    if max(config[metric.key] or 0.0 for config in best) > high:
        shown = [*(value for value in shown if value < _NEAR * high), high]
        words = [*(metric.tick(value) for value in shown[:-1]), f"≥ {metric.tick(high)}"]
    return {"tickvals": [math.log10(value) for value in shown], "ticktext": words}


def _range(best: Sequence[Json], metric: Metric) -> tuple[float, float]:
    """What the colours span: from the best to so many times as much, where differences matter."""
    known = [value for config in best if (value := config[metric.key])]
    return min(known), min(max(known), _SPAN * min(known))


def _marks(rejected: Sequence[Json], places: Places) -> list[Json]:
    """Grids that cannot be used, by the first constraint they break."""
    by_reason: dict[str, list[Json]] = {}
    for config in rejected:
        by_reason.setdefault(reason_name(config), []).append(config)
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": f"{reason} ({len(found)})",
            "x": [places.at(config)[0] for config in found],
            "y": [places.at(config)[1] for config in found],
            "text": [f"{grid_words(config)}<br>{'<br>'.join(config['rejected_because'])}" for config in found],
            "hovertemplate": "%{text}<extra></extra>",
            "marker": {"color": MUTED, "symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 7, "line": {"width": 1.4}},
        }
        for number, (reason, found) in enumerate(by_reason.items())
    ]


def reason_name(config: Json) -> str:
    """The constraint a rejected grid breaks: the first, if there are several."""
    return str(config["rejected_because"][0]).partition(":")[0] if config["rejected_because"] else "rejected"


def _first(best: Sequence[Json], places: Places) -> list[Json]:
    """A ring around the first of the ranking."""
    if not best:
        return []
    column, row = places.at(best[0])
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "first of the ranking",
            "x": [column],
            "y": [row],
            "hoverinfo": "skip",
            "marker": {"color": RING, "symbol": "circle-open", "size": 16, "line": {"width": 3}},
        }
    ]


def _layout(places: Places) -> Json:
    products = [x * y for x, y in places.columns]
    borders = [place for place, (one, other) in enumerate(pairwise(products)) if one != other]
    starts = [0, *(place + 1 for place in borders)]
    ends = [*borders, len(products) - 1]
    centres = [(start + end) / 2 for start, end in zip(starts, ends, strict=True)]
    line = {"color": "--grid", "width": 1}
    return {
        "xaxis": {
            "title": {"text": "x · y; within one product x falls from left to right"},
            "tickvals": centres,
            "ticktext": [f"{products[start]:,}" for start in starts],
            "range": [-0.5, len(products) - 0.5],
            "showgrid": False,
            "zeroline": False,
        },
        "yaxis": {
            "title": {"text": "z"},
            "tickvals": list(range(len(places.rows))),
            "ticktext": [f"{size:,}" for size in places.rows],
            "range": [-0.5, len(places.rows) - 0.5],
            "showgrid": False,
            "zeroline": False,
        },
        "shapes": [
            {
                "type": "line",
                "xref": "x",
                "yref": "paper",
                "x0": at + 0.5,
                "x1": at + 0.5,
                "y0": 0,
                "y1": 1,
                "line": line,
            }
            for at in borders
        ],
        "hovermode": "closest",
    }
