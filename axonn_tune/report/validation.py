"""Runs as a section, predicted vs. measured: configurations of a validation, or the summary of one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from axonn_tune.report.configuration import (
    NAME_COLUMNS,
    SIZE_COLUMNS,
    detail_blocks,
    detailed,
    inputs_of,
)
from axonn_tune.report.output import NOTHING, Json, axis_name, percent, signed_percent
from axonn_tune.report.page import (
    ACCENT,
    MEASURED,
    MUTED,
    PREDICTED,
    Cell,
    Choice,
    Column,
    card,
    facts,
    figure,
    fold,
    machine_fold,
    model_fold,
    origin_fold,
    percent_column,
    section,
    table,
    text,
    workload_fold,
)
from axonn_tune.report.run import groups_of, other_hardware, ratio, setting_sentence
from axonn_tune.specs.results import MeasurementSite, Quantity, Summary
from axonn_tune.units import GIB, MILLI, counted, show_bytes, show_seconds

_QUANTITIES = (
    ("step", "step_s", MILLI, "ms"),
    ("communication", "communication_s", MILLI, "ms"),
    ("exposed", "exposed_communication_s", MILLI, "ms"),
    ("computation", "compute_s", MILLI, "ms"),
    ("memory", "memory_bytes", GIB, "GiB"),
)


def _quantity_columns() -> list[Column]:
    found = []
    for label, key, per, unit in _QUANTITIES:
        meaning = f"{label.capitalize()} of one rank"
        found += [
            Column(f"{key}.predicted", f"{label}, pre\u00addicted, {unit}", f"{meaning}, predicted.", per=per),
            Column(f"{key}.measured", f"mea\u00adsured, {unit}", f"{meaning}, median of the runs.", per=per),
            percent_column(f"{key}.error", "error, %", "Predicted / measured − 1."),
        ]
    return found


_NAME = Column("name", "configuration", "Grid, rank order, micro-batch, recompute.", text=True, width_ch=34)
_CONFIGURATIONS = (
    _NAME,
    *_quantity_columns(),
    percent_column("spread", "spread of runs, %", "Of the step: largest less smallest, over the median.", decimals=0),
    Column("losses", "losses", "Losses and gradient norms vs. a single rank.", text=True, width_ch=40),
)
_SHARES = (
    Column("name", "of", "Axis or collective.", text=True, width_ch=16),
    Column("configurations", "in", "Configurations that have it.", decimals=0),
    Column("predicted_s", "pre\u00addicted, ms", "Mean over these.", per=MILLI),
    Column("measured_s", "mea\u00adsured, ms", "Mean over these.", per=MILLI),
    percent_column("mape", "mean |error|, %", "Mean over configurations of the size of the error."),
    Column("predicted_exposed_s", "exposed, pre\u00addicted, ms", "The exposed part of it.", per=MILLI),
    Column("measured_exposed_s", "mea\u00adsured, ms", "The exposed part of it.", per=MILLI),
)
_QUALITIES = (
    Column("what", "quantity", "What is evaluated.", text=True, width_ch=26),
    percent_column("mape", "mean |error|, %", "Mean size of the error."),
    percent_column("bias", "mean error, %", "Signed."),
    percent_column("worst", "worst, %", "The largest."),
    Column("spearman", "Spearman", "Rank correlation: 1 is the same order.", decimals=3),
    percent_column("regret", "regret, %", "Time of the predicted best over that of the measured best, less 1."),
    Column("best", "rank of predicted best", "Among the measured.", decimals=0),
)
_GAINS = (
    _NAME,
    percent_column("predicted", "pre\u00addicted, %", "What overlap saves of the step."),
    percent_column("measured", "mea\u00adsured, %", "The same, measured."),
)
_RUNS = (
    Column("began", "began", "When, ISO 8601.", text=True, width_ch=26),
    Column("load", "load", "Processes of the host that wanted a core when it began.", decimals=1),
    *(
        Column(key, f"{label}, {unit}", f"{label.capitalize()} of one rank.", per=per)
        for label, key, per, unit in _QUANTITIES
    ),
)
_TERMS = (
    *NAME_COLUMNS,
    Column("predicted_s", "pre\u00addicted, ms", "Time of all calls of a step.", per=MILLI),
    Column("measured_s", "mea\u00adsured, ms", "The same, measured; of several runs the median.", per=MILLI),
    Column(
        "predicted_exposed_s", "exposed, pre\u00addicted, ms", "The part not overlapped with computation.", per=MILLI
    ),
    Column("measured_exposed_s", "mea\u00adsured, ms", "The same, waiting for stragglers included.", per=MILLI),
    *SIZE_COLUMNS,
    Column("bytes", "buffer, KiB", "Full buffer of one call.", per=1024.0),
    Column("tier", "network", "Outermost network level it was predicted to cross.", text=True, width_ch=12),
)


def validation_section(document: Json, *, identity: str, source: str) -> Json:
    """The section of a validation document."""
    rows, place = document["configurations"], document["place"]
    blocks = [
        _points_figure(rows),
        table(
            f"{identity}-table",
            "Each configuration",
            _CONFIGURATIONS,
            [_configuration_row(one) for one in rows],
            opens=f"{identity}-one",
        ),
        _axes_figure(document),
        _details(document, source=source, identity=f"{identity}-one"),
        *_quality_folds(document),
        machine_fold(document["machine"]),
        model_fold(document["model"]),
        workload_fold(rows[0]["workload"]),
        *_origin_folds(document, source=source),
    ]
    return section(
        identity,
        f"{document['model']['name']} on {place['ranks']} ranks: predicted vs. measured",
        lead=document["notes"],
        cards=_cards(document),
        blocks=blocks,
    )


def _quality_folds(document: Json) -> list[Json]:
    """How well the whole was predicted, and the same by axis and by collective."""
    judged = [{**one, "best": one["best"] or None} for one in document["quality"].values()]
    quality = [table("", "", _QUALITIES, judged)]
    if document["gains"]:
        quality.append(table("", "Gain from overlap", _GAINS, document["gains"]))
    shares = [table("", "Axes", _SHARES, document["axes"]), table("", "Collectives", _SHARES, document["collectives"])]
    return [fold("Prediction quality", quality), fold("By axis and by collective", shares)]


def _origin_folds(document: Json, *, source: str) -> list[Json]:
    """What was run, and where."""
    rows = [
        ("source", source),
        ("schema", document["schema"]),
        ("axonn-tune", document["tool_version"]),
        ("measured", document["created"]),
        ("command", document["command"]),
    ]
    place = [
        (MeasurementSite.model_fields[key].description or key, str(value)) for key, value in document["place"].items()
    ]
    return [origin_fold(rows), fold("Where it ran", [facts(place)])]


def _cards(document: Json) -> list[Json]:
    step, sent = document["quality"]["step"], document["quality"]["communication"]
    found = [
        card("predicted best", f"#{step['best']}" if step["best"] else NOTHING, note="among the measured, by step"),
        card("regret", percent(step["regret"]), note="cost of trusting it"),
        card("step, mean |error|", percent(step["mape"]), note=f"worst {signed_percent(step['worst'])}"),
        card("communication, mean |error|", percent(sent["mape"]), note=f"worst {signed_percent(sent['worst'])}"),
        _training(document),
    ]
    return found


def _training(document: Json) -> Json:
    """Whether training is sound: losses against a single rank, else whether the expected collectives were sent."""
    if not document["sound"]:
        return card("training", "wrong", note=document["blame"] or "unexpected collectives")
    losses = list(dict.fromkeys(one["losses"].partition(" (")[0] for one in document["configurations"]))
    if losses == ["not compared"]:
        return card("training", "not compared", note="but every rank sent the expected collectives")
    return card("training", "sound", note=f"vs. a single rank: {', '.join(losses)}")


def _configuration_row(one: Json) -> Mapping[str, Cell]:
    values = {
        f"{key}.{side}": one[key][side] for _, key, _, _ in _QUANTITIES for side in ("predicted", "measured", "error")
    }
    spread = one["step_s"]["spread"] if len(one["runs"]) > 1 else None
    return {"name": one["name"], **values, "spread": spread, "losses": one["losses"]}


def _details(document: Json, *, source: str, identity: str) -> Json:
    """Each configuration as it was predicted, and its runs."""
    items = []
    for number, one in enumerate(document["configurations"]):
        inputs = inputs_of({**document, "gpus": document["place"]["ranks"]}, source=source, workload=one["workload"])
        found = detailed(_as_config(one), inputs)
        blocks = [] if found is None else detail_blocks(found, explain=())
        items.append({"row": number, "title": one["name"], "blocks": [_runs(one), _sent(one), *blocks]})
    return {"kind": "configurations", "id": identity, "title": "One configuration", "items": items}


def _as_config(one: Json) -> Json:
    """The prediction of a configuration as a ranking has it."""
    return {
        "rank": None,
        **{axis: one["grid"][axis] for axis in ("x", "y", "z", "data")},
        "order": ",".join(one["grid"]["order"]),
        "feasible": True,
        "rejected_because": [],
        **{key: one[key] for key in ("micro_batch", "recompute", "kept_layers", "low_s", "high_s")},
        "iteration_s": one["step_s"]["predicted"],
        **{key: one[key]["predicted"] for _, key, _, _ in _QUANTITIES[1:]},
        "tokens_per_s": None,
        "mfu": None,
        "hfu": None,
        "tie": False,
    }


def _runs(one: Json) -> Json:
    words = [f"Losses and gradient norms: {one['losses']}.", *one["differs"]]
    return fold(f"Runs ({len(one['runs'])})", [text(words), table("", "", _RUNS, one["runs"])])


def _sent(one: Json) -> Json:
    return fold(f"Collectives, predicted vs. measured ({len(one['terms'])})", [_terms_table("", "", one["terms"])])


def _points_figure(rows: Sequence[Json]) -> Json:
    """Predicted over measured, with the interval of the prediction and the range of the runs."""
    changes = [_points(rows, key, per) for _, key, per, _ in _QUANTITIES]
    kept = [number for number, change in enumerate(changes) if change["x"][0]]
    choices = [_choice(_QUANTITIES[number], changes[number]) for number in kept]
    unit = _QUANTITIES[kept[0]][3]
    layout = {
        "xaxis": {"title": {"text": f"measured, {unit}"}},
        "yaxis": {"title": {"text": f"predicted, {unit}"}},
        "hovermode": "closest",
    }
    note = (
        "Dashed line: measured as predicted. Horizontal bars: the range of the runs; vertical bars: the 80% interval,"
        " if the prediction has one."
    )
    traces = _traces(changes[kept[0]])
    return figure("Predicted vs. measured", traces, layout=layout, height=460, note=note, choices=choices)


def _traces(change: Json) -> list[Json]:
    """The points with their intervals, and the line of no error."""
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
            _error_bars(
                [max(one) - v for one, v in zip(runs, x, strict=True)],
                [v - min(one) for one, v in zip(runs, x, strict=True)],
            )
        ],
        "error_y": [
            _error_bars(
                [h - v for h, v in zip(highs, y, strict=True)], [v - low for low, v in zip(lows, y, strict=True)]
            )
        ],
        "ends": [0.0, 1.05 * max(spans, default=1.0)],
    }


def _error_bars(up: Sequence[float], down: Sequence[float]) -> Json:
    """Error bars of both sides; the median of two runs may round a hair beyond them."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [max(value, 0.0) for value in up],
        "arrayminus": [max(value, 0.0) for value in down],
    }


def _axes_figure(document: Json) -> Json:
    """Predicted vs. measured by axis and collective, means over the configurations that have them."""
    shares = [
        *((f"over {axis_name(one['name'])}", one) for one in document["axes"]),
        *((one["name"], one) for one in document["collectives"]),
    ]
    pairs = [(name, one["predicted_s"], one["measured_s"]) for name, one in shares]
    return _bars("By axis and collective", pairs, note="Means over the configurations that have them.")


def run_section(summary: Summary, *, identity: str, source: str) -> Json:
    """The section of a run's summary."""
    ran = summary.ran_on
    lead = [
        setting_sentence(summary),
        f"Measured: mean over ranks and {counted(summary.averaged_steps, 'step')} of {summary.timed_steps} timed.",
    ]
    warning = other_hardware(summary)
    rows = [term.model_dump(mode="json") for term in summary.terms]
    named = ("averaged_steps", "timed_steps", "warmup_steps", "memory_convention")
    origin = [
        ("source", source),
        ("schema", summary.schema_),
        *((Summary.model_fields[key].description or key, str(getattr(summary, key))) for key in named),
        *((type(ran).model_fields[key].description or key, str(value)) for key, value in ran.model_dump().items()),
    ]
    return section(
        identity,
        f"{summary.name}: predicted vs. measured",
        lead=[*lead, *([f"Warning: {warning}"] if warning else [])],
        cards=_run_cards(summary),
        blocks=[
            _times_figure(summary),
            *([_groups_figure(summary)] if summary.terms else []),
            _terms_table(f"{identity}-table", "Each collective", rows, note="Click a heading to sort."),
            origin_fold(origin),
        ],
    )


def _run_cards(summary: Summary) -> list[Json]:
    return [
        *(
            card(name, show_seconds(value.measured), note=_prediction(value, show_seconds))
            for name, value in _times(summary)
        ),
        card("memory", show_bytes(summary.memory_bytes.measured), note=_prediction(summary.memory_bytes, show_bytes)),
        card("tokens/s", f"{summary.tokens_per_s:,.0f}", note="measured"),
    ]


def _times(summary: Summary) -> tuple[tuple[str, Quantity], ...]:
    return (
        ("step", summary.step_s),
        ("computation", summary.compute_s),
        ("communication", summary.communication_s),
        ("exposed", summary.exposed_communication_s),
    )


def _prediction(value: Quantity, show: Callable[[float], str]) -> str:
    if value.predicted is None:
        return "not predicted"
    return f"predicted {show(value.predicted)}, ratio {ratio(value.measured, value.predicted)}"


def _times_figure(summary: Summary) -> Json:
    pairs = [(name, value.predicted, value.measured) for name, value in _times(summary)]
    return _bars("Predicted vs. measured", pairs, note="One step of one rank.")


def _groups_figure(summary: Summary) -> Json:
    groups = groups_of(summary.terms, all_terms=False)
    pairs = [(f"{group.op} over {axis_name(group.axis)}", group.predicted_s, group.measured_s) for group in groups]
    return _bars("Collectives", pairs, note="All calls of a step, overlapped or not, by collective and axis.")


def _bars(title: str, pairs: list[tuple[str, float | None, float]], *, note: str) -> Json:
    """Predicted and measured, a pair of bars for each name, s."""
    names = [name for name, _, _ in pairs]
    sides = (
        ("predicted", PREDICTED, [None if one is None else one / MILLI for _, one, _ in pairs]),
        ("measured", MEASURED, [one / MILLI for _, _, one in pairs]),
    )
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": side,
            "y": names,
            "x": values,
            "hovertemplate": "%{y}: " + side + " %{x:.4g} ms<extra></extra>",
            "marker": {"color": color},
        }
        for side, color, values in sides
    ]
    layout = {
        "barmode": "group",
        "xaxis": {"title": {"text": "ms per step"}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "fixedrange": True},
        "hovermode": "closest",
    }
    return figure(title, traces, layout=layout, height=140 + 46 * len(names), note=note)


def _terms_table(identity: str, title: str, terms: Sequence[Mapping[str, Cell]], *, note: str = "") -> Json:
    """Each collective, with the columns of which something is known."""
    columns = [column for column in _TERMS if any(term.get(column.key) is not None for term in terms)]
    return table(identity, title, columns, terms, note=note)
