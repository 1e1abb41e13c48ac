"""Figures of configurations that were run: points with intervals on both sides, and sums by axis and collective."""

from __future__ import annotations

from collections.abc import Sequence

from axonn_tune.report.html.blocks import Choice, Json, figure
from axonn_tune.report.html.colors import ACCENT, MEASURED, MUTED, PREDICTED
from axonn_tune.units import GIB, MILLI

QUANTITIES = (
    ("step", "step_s", MILLI, "ms"),
    ("communication", "communication_s", MILLI, "ms"),
    ("exposed", "exposed_communication_s", MILLI, "ms"),
    ("computation", "compute_s", MILLI, "ms"),
    ("memory", "memory_bytes", GIB, "GiB"),
)


def points_figure(rows: Sequence[Json]) -> Json:
    """Predicted over measured, with the interval of the prediction and the range of the runs."""
    changes = [_points(rows, key, per) for _, key, per, _ in QUANTITIES]
    kept = [number for number, change in enumerate(changes) if change["x"][0]]
    choices = [_choice(QUANTITIES[number], changes[number]) for number in kept]
    unit = QUANTITIES[kept[0]][3]
    layout = {
        "xaxis": {"title": {"text": f"measured, {unit}"}},
        "yaxis": {"title": {"text": f"predicted, {unit}"}},
        "hovermode": "closest",
    }
    note = (
        "On the dashed line a prediction is right. Across: the range of the runs; upwards: the 80% interval, if the"
        " prediction has one."
    )
    traces = _traces(changes[kept[0]])
    return figure("Predicted against measured", traces, layout=layout, height=460, note=note, choices=choices)


def _traces(change: Json) -> list[Json]:
    """The points with their intervals, and the line of those that are right."""
    whiskers = {"color": MUTED, "thickness": 1.2, "width": 4}
    points = {
        "type": "scatter",
        "mode": "markers",
        "name": "configurations",
        **{key: change[key][0] for key in ("x", "y", "text")},
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"size": 11, "color": ACCENT},
        **{key: {**change[key][0], **whiskers} for key in ("error_x", "error_y")},
    }
    line = {
        "type": "scatter",
        "mode": "lines",
        "name": "measured as predicted",
        "x": change["ends"],
        "y": change["ends"],
        "hoverinfo": "skip",
        "line": {"color": MUTED, "dash": "dash", "width": 1},
    }
    return [points, line]


def _choice(quantity: tuple[str, str, float, str], change: Json) -> Choice:
    """One quantity in place of another."""
    label, _, _, unit = quantity
    ends = change["ends"]
    moved = {key: change[key] for key in ("x", "y", "text", "error_x", "error_y")}
    titles = {"xaxis.title.text": f"measured, {unit}", "yaxis.title.text": f"predicted, {unit}"}
    return Choice(label, {0: moved, 1: {"x": [ends], "y": [ends]}}, titles)


def _points(rows: Sequence[Json], key: str, per: float) -> Json:
    """What one quantity makes of the traces."""
    known = [one for one in rows if one[key]["predicted"] is not None]
    x = [one[key]["measured"] / per for one in known]
    y = [one[key]["predicted"] / per for one in known]
    runs = [[run[key] / per for run in one["runs"]] for one in known]
    intervals = [(one["low_s"], one["high_s"]) if key == "step_s" else (None, None) for one in known]
    lows = [value if low is None else low / per for value, (low, _) in zip(y, intervals, strict=True)]
    highs = [value if high is None else high / per for value, (_, high) in zip(y, intervals, strict=True)]
    spans = [*x, *y]
    words = [
        f"{one['name']}<br>predicted {predicted:.4g}, measured {measured:.4g} ({one[key]['error'] or 0.0:+.1%})"
        for one, predicted, measured in zip(known, y, x, strict=True)
    ]
    return {
        "x": [x],
        "y": [y],
        "text": [words],
        "error_x": [
            _errors(
                [max(one) - v for one, v in zip(runs, x, strict=True)],
                [v - min(one) for one, v in zip(runs, x, strict=True)],
            )
        ],
        "error_y": [
            _errors([h - v for h, v in zip(highs, y, strict=True)], [v - low for low, v in zip(lows, y, strict=True)])
        ],
        "ends": [0.0, 1.05 * max(spans, default=1.0)],
    }


def _errors(up: Sequence[float], down: Sequence[float]) -> Json:
    """Error bars of both sides; the median of two runs may round a hair beyond them."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [max(value, 0.0) for value in up],
        "arrayminus": [max(value, 0.0) for value in down],
    }


def axes_figure(document: Json) -> Json:
    """Predicted beside measured by axis and collective, means over the configurations that have them."""
    shares = [
        *((f"over {one['name']}", one) for one in document["axes"]),
        *((one["name"], one) for one in document["collectives"]),
    ]
    names = [name for name, _ in shares]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": side,
            "y": names,
            "x": [one[key] / MILLI for _, one in shares],
            "hovertemplate": "%{y}: " + side + " %{x:.4g} ms<extra></extra>",
            "marker": {"color": color},
        }
        for side, key, color in (("predicted", "predicted_s", PREDICTED), ("measured", "measured_s", MEASURED))
    ]
    layout = {
        "barmode": "group",
        "xaxis": {"title": {"text": "ms a step"}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "fixedrange": True},
        "hovermode": "closest",
    }
    note = "Means over the configurations that have them."
    return figure("By axis and collective", traces, layout=layout, height=140 + 46 * len(names), note=note)
