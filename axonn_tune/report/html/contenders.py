"""A comparison as a section: 4D beside Megatron-LM, FSDP, HSDP and data parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from axonn_tune.report.html.blocks import Cell, Column, Json, figure, section, table, text
from axonn_tune.report.html.colors import COMPUTATION, MUTED, TEXT, series_color
from axonn_tune.report.html.ranking import provenance_folds
from axonn_tune.units import GIB, show_seconds

_COLUMNS = (
    Column("name", "way", "How the model is split.", text=True, width_ch=16),
    Column("layout", "layout", "Its best layout that fits.", text=True, width_ch=34),
    Column("iteration_s", "step, s", "One step.", width_ch=10),
    Column("low_s", "80% from, s", "Lower end of its 80% interval.", width_ch=10),
    Column("high_s", "80% to, s", "Upper end.", width_ch=10),
    Column("gain_of_4d", "4D is faster by, %", "Its step over that of 4D, less 1.", per=0.01, decimals=1, width_ch=11),
    Column("compute_s", "compute, s", "Computation of a step and rank.", width_ch=10),
    Column("exposed_communication_s", "exposed, s", "Communication no computation hides.", width_ch=10),
    Column("bubble_s", "bubble, s", "Time a pipeline stage stands idle.", width_ch=9),
    Column("memory_bytes", "memory, GiB", "Peak of one GPU.", per=GIB, width_ch=10),
    Column("mfu", "MFU, %", "Model FLOPs over the peak; recomputation not counted.", per=0.01, decimals=1, width_ch=8),
    Column("hfu", "HFU, %", "Executed FLOPs over the peak.", per=0.01, decimals=1, width_ch=8),
    Column("micro_batch", "micro\u00adbatch", "Sequences at a time.", decimals=0, width_ch=8),
    Column("grad_accumulation", "accumu\u00adlation", "Micro-batches in a step.", decimals=0, width_ch=9),
    Column("recompute", "re\u00adcompute", "What backward computes again.", text=True, width_ch=10),
    Column("infeasible", "why not", "What rules it out.", text=True, width_ch=50),
)
_PARTS = (
    ("computation", "compute_s", COMPUTATION),
    ("exposed communication", "exposed_communication_s", series_color(1)),
    ("pipeline bubble", "bubble_s", MUTED),
)


def comparison_section(document: Json, *, identity: str, source: str) -> Json:
    """The section of a comparison document."""
    contenders = document["contenders"]
    feasible = [each for each in contenders if each["prediction"]]
    rows = [_row(each) for each in contenders]
    columns = [column for column in _COLUMNS if any(row[column.key] is not None for row in rows)]
    return section(
        identity,
        f"{document['model']['name']} on {document['gpus']:,} × {document['machine']['name']}: 4D and its alternatives",
        lead=[],
        cards=[],
        blocks=[
            _bars(feasible),
            text(document.get("remarks", []), title="In words"),
            table(f"{identity}-table", "Each at its best", columns, rows, note="Click a heading to sort."),
            *provenance_folds(document, source=source),
        ],
    )


def _row(contender: Json) -> Mapping[str, Cell]:
    found = contender["prediction"] or {}
    own = {key: contender[key] for key in ("name", "gain_of_4d", "infeasible")}
    return {**{column.key: found.get(column.key) for column in _COLUMNS}, **own}


def _bars(contenders: Sequence[Json]) -> Json:
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
        for name, key, color in _PARTS
        if any(each[key] for each in predictions)
    ]
    traces.append(_intervals(predictions, places))
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "s a step"}, "rangemode": "tozero"},
        "yaxis": {
            "tickvals": places,
            "ticktext": [each["name"] for each in contenders],
            "range": [len(contenders) - 0.4, -0.6],
            "fixedrange": True,
        },
        "hovermode": "closest",
    }
    note = "Whiskers: the 80% interval. Differences within it are not settled."
    return figure("The step of each", traces, layout=layout, height=130 + 42 * len(contenders), note=note)


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
