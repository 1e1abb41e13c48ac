"""A sweep as a section: throughput, efficiency and step time over GPUs, one line per model and batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from axonn_tune.grid import AXES
from axonn_tune.report.html import provenance
from axonn_tune.report.html.blocks import Cell, Choice, Column, Json, figure, section, table
from axonn_tune.report.html.colors import MUTED, series_color
from axonn_tune.report.html.configuration import grid_words
from axonn_tune.report.html.ranking import COLUMNS as RANKING_COLUMNS
from axonn_tune.report.html.ticks import round_ticks
from axonn_tune.units import counted

_OF_CONFIG = (
    *AXES,
    "iteration_s",
    "low_s",
    "high_s",
    "communication_s",
    "exposed_communication_s",
    "compute_s",
    "tokens_per_s",
    "mfu",
    "hfu",
    "memory_bytes",
    "micro_batch",
    "recompute",
    "kept_layers",
    "order",
)
_BY_KEY = {column.key: column for column in RANKING_COLUMNS}
_COLUMNS = (
    Column("model", "model", "What is trained.", text=True, width_ch=12),
    Column("gpus", "GPUs", "How many there are.", decimals=0, width_ch=8),
    Column("global_batch", "batch", "Sequences in a step.", decimals=0, width_ch=9),
    Column(
        "efficiency",
        "effi\u00adciency, %",
        "Throughput of one GPU over that of the first feasible count.",
        per=0.01,
        decimals=1,
        width_ch=9,
    ),
    *(_BY_KEY[key] for key in _OF_CONFIG),
    Column("reason", "why nothing is feasible", "The nearest change that would help.", text=True, width_ch=60),
)
_MANY = 40
"""From so many points on the table scrolls in a window of its own."""
_METRICS = (
    ("tokens/s", "tokens_per_s", "log", 1.0),
    ("efficiency, %", "efficiency", "linear", 0.01),
    ("step, s", "iteration_s", "log", 1.0),
    ("MFU, %", "mfu", "linear", 0.01),
)


def sweep_section(document: Json, *, identity: str, source: str) -> Json:
    """The section of a sweep document."""
    points = document["points"]
    names = ", ".join(model["name"] for model in document["models"])
    feasible = [point for point in points if point["feasible"]]
    note = f"{document['scaling'].capitalize()} scaling. Click a heading to sort."
    pieces = [
        *([_curves(feasible, document)] if feasible else []),
        table(
            f"{identity}-table",
            "Every point",
            _shown_columns(points),
            [_row(one) for one in points],
            note=note,
            tall=len(points) > _MANY,
        ),
        provenance.machine_fold(document["machine"]),
        *(provenance.model_fold(model) for model in document["models"]),
        provenance.workload_fold(points[0]["workload"]),
        provenance.origin_fold(
            [("source", source), ("schema", document["schema"]), ("axonn-tune", document["tool_version"])]
        ),
    ]
    lead = [
        f"{document['scaling'].capitalize()} scaling of {names} on {document['machine']['name']}: the best "
        f"configuration at each of {counted(len(points), 'point')}, ranked by {document['rank_by']}.",
    ]
    if len(feasible) < len(points):
        lead.append(f"At {len(points) - len(feasible)} of them nothing is feasible; the table says why.")
    return section(identity, f"Scaling of {names}", lead=lead, cards=[], blocks=pieces)


def _shown_columns(points: Sequence[Json]) -> list[Column]:
    return [column for column in _COLUMNS if column.key != "reason" or any(point["reason"] for point in points)]


def _row(point: Json) -> Mapping[str, Cell]:
    config = point["config"] or {}
    own = {key: point[key] for key in ("model", "gpus", "global_batch", "efficiency", "reason")}
    return {**{key: config.get(key) for key in _OF_CONFIG}, **own}


def _curves(points: Sequence[Json], document: Json) -> Json:
    """One line per model and batch (of weak scaling: of its first batch), and what is ideal for each."""
    lines = _lines(points, weak=document["scaling"] == "weak")
    metrics = [metric for metric in _METRICS if all(_value(point, metric[1]) is not None for point in points)]
    traces: list[Json] = []
    changes: list[dict[int, Json]] = [{} for _ in metrics]
    for number, (name, line) in enumerate(lines.items()):
        for ideal in (False, True):
            for place, metric in enumerate(metrics):
                changes[place][len(traces)] = {"y": [_values(line, metric[1], metric[3], ideal=ideal)]}
            traces.append(_line(name, line, number, ideal=ideal, y=changes[0][len(traces)]["y"][0]))
    choices = [
        Choice(label, change, {"yaxis.title.text": label, "yaxis.type": scale, **_axis_ticks(change, scale)})
        for (label, _, scale, _), change in zip(metrics, changes, strict=True)
    ]
    gpus = sorted({point["gpus"] for point in points})
    layout = {
        "xaxis": {
            "title": {"text": "GPUs"},
            "type": "log",
            "tickvals": _thinned(gpus),
            "ticktext": [f"{one:,}" for one in _thinned(gpus)],
        },
        "yaxis": {"title": {"text": metrics[0][0]}, "type": metrics[0][2]},
        "hovermode": "closest",
    }
    note = "Dashed: every GPU as fast as at the first feasible count."
    return figure("Scaling", traces, layout=layout, height=420, note=note, choices=choices)


def _axis_ticks(change: Mapping[int, Json], scale: str) -> Json:
    """Ticks of a logarithmic axis; a linear one is left to plotly."""
    if scale != "log":
        return {"yaxis.tickvals": None, "yaxis.ticktext": None}
    values = [value for one in change.values() for value in one["y"][0] if value]
    ticks = round_ticks(min(values), max(values))
    return {
        "yaxis.tickvals": ticks,
        "yaxis.ticktext": [f"{tick:,.4g}" if tick < 1000 else f"{tick:,.0f}" for tick in ticks],
    }


def _thinned(values: Sequence[int]) -> list[int]:
    """At most eight of them."""
    every = -(-len(values) // 8)
    return list(values[::every])


def _lines(points: Sequence[Json], *, weak: bool) -> dict[str, list[Json]]:
    """Points of each line in the order of GPUs."""
    found: dict[str, list[Json]] = {}
    batches = {point["global_batch"] for point in points}
    for point in points:
        per_gpu = point["global_batch"] / point["gpus"]
        batch = f"{per_gpu:g} sequences a GPU" if weak else f"batch {point['global_batch']:,}"
        several = weak or len(batches) > 1
        found.setdefault(f"{point['model']}, {batch}" if several else point["model"], []).append(point)
    return {name: sorted(line, key=lambda point: int(point["gpus"])) for name, line in found.items()}


def _value(point: Json, key: str) -> float | None:
    value = point["efficiency"] if key == "efficiency" else point["config"][key]
    return None if value is None else float(value)


def _values(line: Sequence[Json], key: str, per: float, *, ideal: bool) -> list[float | None]:
    """What a line shows; ideal: what an efficiency of 100% would make of it."""
    values = [_value(point, key) for point in line]
    if ideal:
        # A rate grows and a time shrinks by the efficiency; MFU is a rate of one GPU.
        shares = [point["efficiency"] or 1.0 for point in line]
        down = key == "iteration_s"
        values = [
            None if value is None else value * share if down else value / share
            for value, share in zip(values, shares, strict=True)
        ]
    return [None if value is None else value / per for value in values]


def _line(name: str, line: Sequence[Json], number: int, *, ideal: bool, y: Sequence[float | None]) -> Json:
    gpus = [point["gpus"] for point in line]
    if ideal:
        return {
            "type": "scatter",
            "mode": "lines",
            "x": gpus,
            "y": y,
            "legendgroup": name,
            "showlegend": False,
            "hoverinfo": "skip",
            "line": {"color": MUTED, "dash": "dash", "width": 1},
        }
    said = [f"{name}: {point['gpus']:,} GPUs<br>{grid_words(point['config'])}" for point in line]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "legendgroup": name,
        "x": gpus,
        "y": y,
        "text": said,
        "hovertemplate": "%{text}<br>%{y:.4g}<extra></extra>",
        "line": {"color": series_color(number), "width": 2},
        "marker": {"size": 8},
    }
