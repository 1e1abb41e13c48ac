"""Configurations that were run as a section: predicted against measured, with intervals on both sides."""

from __future__ import annotations

import math
from collections.abc import Mapping

from axonn_tune.report.html import provenance
from axonn_tune.report.html.blocks import Cell, Column, Json, card, facts, fold, section, table, text
from axonn_tune.report.html.configuration import detail_blocks, detailed
from axonn_tune.report.html.inputs import inputs_of
from axonn_tune.report.html.measured_figures import QUANTITIES, axes_figure, points_figure
from axonn_tune.specs.results import MeasurementSite
from axonn_tune.units import MILLI

_PERCENT = 0.01


def _quantity_columns() -> list[Column]:
    found = []
    for label, key, per, unit in QUANTITIES:
        meaning = f"{label.capitalize()} of one rank"
        found += [
            Column(
                f"{key}.predicted", f"{label}, pre\u00addicted, {unit}", f"{meaning}, predicted.", per=per, width_ch=11
            ),
            Column(
                f"{key}.measured", f"mea\u00adsured, {unit}", f"{meaning}, median of the runs.", per=per, width_ch=10
            ),
            Column(
                f"{key}.error", "error, %", "Predicted over measured, less 1.", per=_PERCENT, decimals=1, width_ch=8
            ),
        ]
    return found


_COLUMNS = (
    Column("name", "configuration", "Grid, order, micro-batch, recomputation.", text=True, width_ch=34),
    *_quantity_columns(),
    Column(
        "spread",
        "spread of runs, %",
        "Of the step: largest less smallest, over the median.",
        per=_PERCENT,
        decimals=0,
        width_ch=9,
    ),
    Column("losses", "losses", "Losses and gradient norms against one rank alone.", text=True, width_ch=40),
)
_SHARES = (
    Column("name", "of", "Axis or collective.", text=True, width_ch=16),
    Column("configurations", "in", "Configurations that have it.", decimals=0, width_ch=5),
    Column("predicted_s", "pre\u00addicted, ms", "Mean over these.", per=MILLI, width_ch=10),
    Column("measured_s", "mea\u00adsured, ms", "Mean over these.", per=MILLI, width_ch=10),
    Column(
        "mape",
        "mean |error|, %",
        "Mean over configurations of the size of the error.",
        per=_PERCENT,
        decimals=1,
        width_ch=10,
    ),
    Column("predicted_exposed_s", "exposed, pre\u00addicted, ms", "Of it, not hidden.", per=MILLI, width_ch=10),
    Column("measured_exposed_s", "mea\u00adsured, ms", "Of it, not hidden.", per=MILLI, width_ch=10),
)
_QUALITIES = (
    Column("what", "how well predicted", "What is judged.", text=True, width_ch=26),
    Column("mape", "mean |error|, %", "Mean size of the error.", per=_PERCENT, decimals=1, width_ch=10),
    Column("bias", "mean error, %", "Signed.", per=_PERCENT, decimals=1, width_ch=10),
    Column("worst", "worst, %", "The largest.", per=_PERCENT, decimals=1, width_ch=9),
    Column("spearman", "Spearman", "Rank correlation: 1 is the same order.", decimals=3, width_ch=10),
    Column(
        "regret",
        "regret, %",
        "What the predicted best takes over what the best takes.",
        per=_PERCENT,
        decimals=1,
        width_ch=9,
    ),
    Column("best", "place of predicted best", "Among the measured.", decimals=0, width_ch=11),
)


_GAINS = (
    Column("name", "configuration", "Grid, order, micro-batch, recomputation.", text=True, width_ch=34),
    Column("predicted", "pre\u00addicted, %", "What overlapping saves of the step.", per=_PERCENT, decimals=1),
    Column("measured", "mea\u00adsured, %", "The same, measured.", per=_PERCENT, decimals=1),
)


def validation_section(document: Json, *, identity: str, source: str) -> Json:
    """The section of a validation document."""
    rows, place = document["configurations"], document["place"]
    blocks = [
        points_figure(rows),
        table(
            f"{identity}-table", "Each configuration", _COLUMNS, [_row(one) for one in rows], opens=f"{identity}-one"
        ),
        axes_figure(document),
        _details(document, source=source, identity=f"{identity}-one"),
        *_quality_folds(document),
        provenance.machine_fold(document["machine"]),
        provenance.model_fold(document["model"]),
        provenance.workload_fold(rows[0]["workload"]),
        *_origin_folds(document, source=source),
    ]
    return section(
        identity,
        f"{document['model']['name']} on {place['ranks']} ranks: predicted against measured",
        lead=document["notes"],
        cards=_cards(document),
        blocks=blocks,
    )


def _quality_folds(document: Json) -> list[Json]:
    """How well the whole was predicted, and the same by axis and by collective."""
    judged = [{**one, "best": one["best"] or None} for one in document["quality"].values()]
    quality = [table("", "", _QUALITIES, judged)]
    if document["gains"]:
        quality.append(table("", "Gain of overlapping", _GAINS, document["gains"]))
    shares = [table("", "Axes", _SHARES, document["axes"]), table("", "Collectives", _SHARES, document["collectives"])]
    return [fold("How well the whole was predicted", quality), fold("By axis and by collective", shares)]


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
    return [provenance.origin_fold(rows), fold("Where it ran", [facts(place)])]


def _cards(document: Json) -> list[Json]:
    step, sent = document["quality"]["step"], document["quality"]["communication"]
    found = [
        card("predicted best", f"#{step['best']}" if step["best"] else "-", note="among the measured, by step"),
        card("regret", _percent(step["regret"]), note="what trusting it costs"),
        card("step, mean |error|", _percent(step["mape"]), note=f"worst {_percent(step['worst'], signed=True)}"),
        card(
            "communication, mean |error|", _percent(sent["mape"]), note=f"worst {_percent(sent['worst'], signed=True)}"
        ),
        _training(document),
    ]
    return found


def _training(document: Json) -> Json:
    """Whether training is sound, and by what that was judged: without a run of one rank alone, by what was sent."""
    if not document["sound"]:
        return card("training", "wrong", note=document["blame"] or "not as the program says")
    losses = list(dict.fromkeys(one["losses"].partition(" (")[0] for one in document["configurations"]))
    if losses == ["not compared"]:
        return card("training", "not compared", note="but every rank sent what the program says")
    return card("training", "sound", note=f"against one rank alone: {', '.join(losses)}")


def _percent(value: float | None, *, signed: bool = False) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def _row(one: Json) -> Mapping[str, Cell]:
    values = {
        f"{key}.{side}": one[key][side] for _, key, _, _ in QUANTITIES for side in ("predicted", "measured", "error")
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
        **{key: one[key]["predicted"] for _, key, _, _ in QUANTITIES[1:]},
        "tokens_per_s": None,
        "mfu": None,
        "hfu": None,
        "tie": False,
    }


_RUNS = (
    Column("began", "began", "When, ISO 8601.", text=True, width_ch=26),
    Column("load", "load", "Processes of the host that wanted a core when it began.", decimals=1, width_ch=7),
    *(
        Column(key, f"{label}, {unit}", f"{label.capitalize()} of one rank.", per=per, width_ch=12)
        for label, key, per, unit in QUANTITIES
    ),
)


def _runs(one: Json) -> Json:
    words = [f"Losses and gradient norms: {one['losses']}.", *one["differs"]]
    return fold(f"Runs ({len(one['runs'])})", [text(words), table("", "", _RUNS, one["runs"])])


_SENT = (
    Column("op", "collective", "What is sent.", text=True, width_ch=14),
    Column("axis", "axis", "Axis whose ranks take part.", text=True, width_ch=7),
    Column("phase", "phase", "Part of the step.", text=True, width_ch=10),
    Column("layer", "layer", "Layer it belongs to.", text=True, width_ch=15),
    Column("predicted_s", "pre\u00addicted, ms", "All calls of a step.", per=MILLI, width_ch=10),
    Column("measured_s", "mea\u00adsured, ms", "Median of the runs.", per=MILLI, width_ch=10),
    Column("count", "calls", "Calls per step and rank.", decimals=0, width_ch=7),
    Column("group", "ranks", "Ranks that take part.", decimals=0, width_ch=7),
    Column("bytes", "buffer, KiB", "Full buffer of one call.", per=1024.0, width_ch=10),
)


def _sent(one: Json) -> Json:
    return fold(f"Collectives, predicted beside measured ({len(one['terms'])})", [table("", "", _SENT, one["terms"])])
