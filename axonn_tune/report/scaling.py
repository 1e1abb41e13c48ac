"""Several searches as a section each: a sweep over GPUs, and 4D compared with other strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from axonn_tune.grid import AXES
from axonn_tune.report.configuration import grid_words
from axonn_tune.report.output import Json
from axonn_tune.report.page import (
    COMPUTATION,
    MUTED,
    PERCENT,
    TEXT,
    Cell,
    Choice,
    Column,
    figure,
    machine_fold,
    model_fold,
    named_axis,
    origin_fold,
    percent_column,
    provenance_folds,
    round_ticks,
    section,
    series_color,
    table,
    text,
    workload_fold,
)
from axonn_tune.report.ranking_section import BY_KEY
from axonn_tune.units import counted, show_seconds

_OF_CONFIG = (
    *AXES,
    *("iteration_s", "low_s", "high_s", "communication_s", "exposed_communication_s", "compute_s", "tokens_per_s"),
    *("mfu", "hfu", "memory_bytes", "micro_batch", "recompute", "kept_layers", "order"),
)
_SWEEP_COLUMNS = (
    Column("model", "model", "What is trained.", text=True, width_ch=12),
    Column("gpus", "GPUs", "How many there are.", decimals=0),
    Column("global_batch", "batch", "Sequences in a step.", decimals=0),
    percent_column("efficiency", "effi\u00adciency, %", "Throughput of one GPU over that of the first feasible count."),
    *(BY_KEY[key] for key in _OF_CONFIG),
    Column("reason", "why nothing is feasible", "The nearest change that would help.", text=True, width_ch=60),
)
_MANY = 40
"""From so many points on the table scrolls in a window of its own."""
_SWEEP_METRICS = (
    ("tokens/s", "tokens_per_s", "log", 1.0),
    ("efficiency, %", "efficiency", "linear", PERCENT),
    ("step, s", "iteration_s", "log", 1.0),
    ("MFU, %", "mfu", "linear", PERCENT),
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
            _sweep_columns(points),
            [_sweep_row(one) for one in points],
            note=note,
            tall=len(points) > _MANY,
        ),
        machine_fold(document["machine"]),
        *(model_fold(model) for model in document["models"]),
        workload_fold(points[0]["workload"]),
        origin_fold([("source", source), ("schema", document["schema"]), ("axonn-tune", document["tool_version"])]),
    ]
    lead = [
        f"{document['scaling'].capitalize()} scaling of {names} on {document['machine']['name']}: the best "
        f"configuration at each of {counted(len(points), 'point')}, ranked by {document['rank_by']}.",
    ]
    if len(feasible) < len(points):
        lead.append(f"At {len(points) - len(feasible)} of them nothing is feasible; the table says why.")
    return section(identity, f"Scaling of {names}", lead=lead, cards=[], blocks=pieces)


def _sweep_columns(points: Sequence[Json]) -> list[Column]:
    return [column for column in _SWEEP_COLUMNS if column.key != "reason" or any(point["reason"] for point in points)]


def _sweep_row(point: Json) -> Mapping[str, Cell]:
    config = point["config"] or {}
    own = {key: point[key] for key in ("model", "gpus", "global_batch", "efficiency", "reason")}
    return {**{key: config.get(key) for key in _OF_CONFIG}, **own}


def _curves(points: Sequence[Json], document: Json) -> Json:
    """One line per model and batch (of weak scaling: of its first batch), and what is ideal for each."""
    lines = _points_by_line(points, weak=document["scaling"] == "weak")
    metrics = [
        metric for metric in _SWEEP_METRICS if all(_point_value(point, metric[1]) is not None for point in points)
    ]
    traces: list[Json] = []
    changes: list[dict[int, Json]] = [{} for _ in metrics]
    for number, (name, line) in enumerate(lines.items()):
        for ideal in (False, True):
            for place, metric in enumerate(metrics):
                changes[place][len(traces)] = {"y": [_curve_values(line, metric[1], metric[3], ideal=ideal)]}
            traces.append(_curve(name, line, number, ideal=ideal, y=changes[0][len(traces)]["y"][0]))
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


def _points_by_line(points: Sequence[Json], *, weak: bool) -> dict[str, list[Json]]:
    """Points of each line in the order of GPUs."""
    found: dict[str, list[Json]] = {}
    batches = {point["global_batch"] for point in points}
    for point in points:
        per_gpu = point["global_batch"] / point["gpus"]
        batch = f"{per_gpu:g} sequences a GPU" if weak else f"batch {point['global_batch']:,}"
        several = weak or len(batches) > 1
        found.setdefault(f"{point['model']}, {batch}" if several else point["model"], []).append(point)
    return {name: sorted(line, key=lambda point: int(point["gpus"])) for name, line in found.items()}


def _point_value(point: Json, key: str) -> float | None:
    value = point["efficiency"] if key == "efficiency" else point["config"][key]
    return None if value is None else float(value)


def _curve_values(line: Sequence[Json], key: str, per: float, *, ideal: bool) -> list[float | None]:
    """What a line shows; ideal: what an efficiency of 100% would make of it."""
    values = [_point_value(point, key) for point in line]
    if ideal:
        # A rate grows and a time shrinks by the efficiency; MFU is a rate of one GPU.
        shares = [point["efficiency"] or 1.0 for point in line]
        down = key == "iteration_s"
        values = [
            None if value is None else value * share if down else value / share
            for value, share in zip(values, shares, strict=True)
        ]
    return [None if value is None else value / per for value in values]


def _curve(name: str, line: Sequence[Json], number: int, *, ideal: bool, y: Sequence[float | None]) -> Json:
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


_COMPARISON_COLUMNS = (
    Column("name", "strategy", "How the model is split.", text=True, width_ch=16),
    Column("layout", "layout", "Its best layout that fits.", text=True, width_ch=34),
    *(BY_KEY[key] for key in ("iteration_s", "low_s", "high_s")),
    percent_column("gain_of_4d", "step vs. 4D, %", "Its step time over that of 4D, less 1."),
    *(BY_KEY[key] for key in ("compute_s", "exposed_communication_s")),
    Column("bubble_s", "bubble, s", "Time a pipeline stage is idle."),
    *(BY_KEY[key] for key in ("memory_bytes", "mfu", "hfu", "micro_batch", "grad_accumulation", "recompute")),
    Column("infeasible", "infeasible because", "What rules it out.", text=True, width_ch=50),
)
_STEP_PARTS = (
    ("computation", "compute_s", COMPUTATION),
    ("exposed communication", "exposed_communication_s", series_color(1)),
    ("pipeline bubble", "bubble_s", MUTED),
)


def comparison_section(document: Json, *, identity: str, source: str) -> Json:
    """The section of a comparison document."""
    contenders = document["contenders"]
    feasible = [each for each in contenders if each["prediction"]]
    rows = [_contender_row(each) for each in contenders]
    columns = [column for column in _COMPARISON_COLUMNS if any(row[column.key] is not None for row in rows)]
    return section(
        identity,
        f"{document['model']['name']} on {document['gpus']:,} × {document['machine']['name']}: 4D and its alternatives",
        lead=[],
        cards=[],
        blocks=[
            _step_bars(feasible),
            text(document.get("remarks", []), title="In words"),
            table(f"{identity}-table", "Each strategy at its best", columns, rows, note="Click a heading to sort."),
            *provenance_folds(document, source=source),
        ],
    )


def _contender_row(contender: Json) -> Mapping[str, Cell]:
    found = contender["prediction"] or {}
    own = {key: contender[key] for key in ("name", "gain_of_4d", "infeasible")}
    return {**{column.key: found.get(column.key) for column in _COMPARISON_COLUMNS}, **own}


def _step_bars(contenders: Sequence[Json]) -> Json:
    """The parts of each one's step, and its interval."""
    places = list(range(len(contenders)))
    predictions = [each["prediction"] for each in contenders]
    traces: list[Json] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": places,
            "x": [each[key] for each in predictions],
            "text": [f"{name}: {show_seconds(each[key])}" for each in predictions],
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
            "width": 0.55,
            "marker": {"color": color},
        }
        for name, key, color in _STEP_PARTS
        if any(each[key] for each in predictions)
    ]
    traces.append(_intervals(predictions, places))
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "s per step"}, "rangemode": "tozero"},
        "yaxis": named_axis([each["name"] for each in contenders]),
        "hovermode": "closest",
    }
    note = "Whiskers: the 80% interval. Differences within it are within model error."
    return figure("Step time by strategy", traces, layout=layout, height=130 + 42 * len(contenders), note=note)


def _intervals(predictions: Sequence[Json], places: Sequence[int]) -> Json:
    """Whiskers at the end of each bar."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "80% interval",
        "x": [each["iteration_s"] for each in predictions],
        "y": list(places),
        "hoverinfo": "skip",
        "marker": {"color": TEXT, "size": 5},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [each["high_s"] - each["iteration_s"] for each in predictions],
            "arrayminus": [each["iteration_s"] - each["low_s"] for each in predictions],
            "color": TEXT,
            "thickness": 1,
            "width": 5,
        },
    }
