"""Predictions against runs of one's own, and against a baseline: as text, Markdown, JUnit, JSON and a section.

JSON follows the contracts `axonn-tune/validation/1` and `axonn-tune/regression/1`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from xml.etree import ElementTree

from axonn_tune.report import page
from axonn_tune.report.configuration import LayoutWords, detail_blocks, detailed, inputs_of
from axonn_tune.report.output import (
    NOTHING,
    Column,
    Json,
    Table,
    axis_name,
    cells_of,
    count,
    fields_of,
    json_text,
    percent,
    share,
    signed_percent,
    text_of,
    unbroken,
    words,
    wrapped,
)
from axonn_tune.report.run import TIMES, collectives_table, pairs_figure
from axonn_tune.specs.results import MeasurementSite, StepTotals
from axonn_tune.units import GIB, MILLI, counted, show_bytes, show_seconds
from axonn_tune.validation.comparison import ComparisonRow, RunComparison, on_cpu, paper_quality
from axonn_tune.validation.regression import GATES, Gate, Regression, RegressionFinding

VALIDATION_SCHEMA, REGRESSION_SCHEMA = "axonn-tune/validation/1", "axonn-tune/regression/1"
_OF_RUN = {
    "began", "load", "step_s", "compute_s", "communication_s", "exposed_communication_s", "memory_bytes",
}  # fmt: skip
_QUANTITIES = (
    ("step", "step_s", MILLI, "ms"),
    ("communi\u00adcation", "communication_s", MILLI, "ms"),
    ("exposed", "exposed_communication_s", MILLI, "ms"),
    ("computation", "compute_s", MILLI, "ms"),
    ("memory", "memory_bytes", GIB, "GiB"),
)


def _quantity_columns() -> Iterator[Column]:
    """Both sides of every quantity, and the error."""
    for label, key, per, unit in _QUANTITIES:
        meaning = f"{unbroken(label).capitalize()} of one rank"
        yield Column(f"{key}.predicted", f"{label}, predicted, {unit}", f"{meaning}, predicted.", per=per)
        yield Column(f"{key}.measured", f"measured, {unit}", f"{meaning}, median of the runs.", per=per)
        yield share(f"{key}.error", "error", "Predicted / measured − 1.", signed=True)


_OF_PAIR = tuple(_quantity_columns())
_PAIRS = {column.key: column for column in _OF_PAIR}
_NAME = words("name", "configuration", "Grid, rank order, micro-batch, recompute.", 34)
_SPREAD = share("spread", "spread\nof runs", "Of the step: largest less smallest, over the median.", decimals=0)


def _before_colon(losses: str) -> str:
    """Losses in texts, without where they differ."""
    return losses.partition(":")[0]


_LOSSES = words("losses", "losses", "Losses and gradient norms vs. a single rank.", 40, show=_before_colon)
_CONFIGURATIONS = (_NAME, *_OF_PAIR, _SPREAD, _LOSSES)
_IN_TEXTS = (
    (_NAME, *_OF_PAIR[:3], _SPREAD, *_OF_PAIR[3:9]),
    (
        _NAME,
        *_OF_PAIR[9:12],
        replace(_PAIRS["memory_bytes.predicted"], title="memory,\npredicted", show=show_bytes),
        replace(_PAIRS["memory_bytes.measured"], title="measured", show=show_bytes),
        _LOSSES,
    ),
)
"""Two tables, each of which fits a terminal."""
_MEAN = "Mean over these."
_SHARES = (
    words("name", "of", "Axis or collective.", 16, show=axis_name),
    count("configurations", "in", "Configurations that have it."),
    replace(TIMES["predicted_s"], meaning=_MEAN),
    replace(TIMES["measured_s"], meaning=_MEAN),
    share("error", "error", "Predicted / measured − 1.", signed=True),
    share("mape", "mean\n|error|", "Mean over configurations of the size of the error."),
    TIMES["predicted_exposed_s"],
    replace(TIMES["measured_exposed_s"], label="measured, ms"),
)
_QUALITIES = (
    words("what", "quantity", "What is evaluated.", 26, title=""),
    Column("spearman", "Spearman", "Rank correlation: 1 is the same order.", decimals=3),
    share(
        "regret",
        "regret of\npredicted best",
        "Time of the predicted best over that of the measured best, less 1.",
        signed=True,
    ),
    count("best", "its measured\nrank", "Of the predicted best, among the measured."),
    share("mape", "mean\n|error|", "Mean size of the error."),
    share("bias", "mean\nerror", "Signed.", signed=True),
    share("worst", "worst\nerror", "The largest.", signed=True),
)
_GAINS = (
    replace(_NAME, title="gain from overlap"),
    share("predicted", "predicted", "What overlap saves of the step.", signed=True),
    share("measured", "measured", "The same, measured.", signed=True),
)
_RUNS = (
    words("began", "began", "When, ISO 8601.", 26),
    Column("load", "load", "Processes of the host that wanted a core when it began.", decimals=1),
    *(
        Column(key, f"{label}, {unit}", f"{unbroken(label).capitalize()} of one rank.", per=per)
        for label, key, per, unit in _QUANTITIES
    ),
)


def validation_text(comparison: RunComparison) -> str:
    """Every configuration, every axis and collective, the quality of the whole, and what is wrong."""
    document = validation_document(comparison)
    rows = _shown(sorted(document["configurations"], key=lambda row: row["step_s"]["measured"]))
    shares = [
        text_of((replace(_SHARES[0], label=title), *_SHARES[1:]), _with_errors(document[key]))
        for title, key in (("axis", "axes"), ("collective", "collectives"))
    ]
    others = [text_of(_GAINS, document["gains"]), text_of(_QUALITIES, _qualities(document))]
    parts = [*(text_of(columns, rows) for columns in _IN_TEXTS), *shares, *others]
    return "\n".join([*filter(None, parts), *map(wrapped, document["notes"])]) + "\n"


def _shown(configurations: Sequence[Json]) -> list[Json]:
    """With the spread of several runs."""
    return [{**one, "spread": one["step_s"]["spread"] if len(one["runs"]) > 1 else None} for one in configurations]


def _with_errors(shares: Sequence[Json]) -> list[Json]:
    """With the error of the means."""
    return [
        {**one, "error": one["predicted_s"] / one["measured_s"] - 1.0 if one["measured_s"] else None} for one in shares
    ]


def _qualities(document: Json) -> list[Json]:
    """Of each quantity; without rows there is no best."""
    return [{**one, "best": one["best"] or None} for one in document["quality"].values()]


def validation_json(comparison: RunComparison) -> str:
    """The document as text."""
    return json_text(validation_document(comparison), indent=1)


def validation_document(comparison: RunComparison) -> Json:
    """The same and what it was made from, by the schema `axonn-tune/validation/1`."""
    measurements = comparison.measurements
    model, machine = (one.model_dump(mode="json", by_alias=True) for one in (measurements.model, measurements.machine))
    return {
        "schema": VALIDATION_SCHEMA,
        **fields_of(measurements, ("tool_version", "created", "command")),
        "place": measurements.place.model_dump(mode="json"),
        "model": {**model, "sha256": measurements.model_sha256},
        "machine": {**machine, "sha256": measurements.machine_sha256},
        **fields_of(comparison, ("sound", "blame")),
        "notes": list(_notes(comparison)),
        "quality": {one.what: asdict(one) for one in (*comparison.qualities, paper_quality(measurements))},
        **{key: [asdict(one) for one in getattr(comparison, key)] for key in ("axes", "collectives", "gains")},
        "configurations": [_row_json(row) for row in comparison.rows],
    }


def _notes(comparison: RunComparison) -> Iterator[str]:
    """What the tables do not say."""
    measurements = comparison.measurements
    runs = len(measurements.configurations[0].runs)
    place = measurements.place
    yield (
        f"{counted(len(comparison.rows), 'configuration')} of {measurements.model.name}, "
        f"{counted(runs, 'interleaved run')} each, medians; {place.network}; predicted by {measurements.machine.name}."
    )
    yield "Error: predicted / measured − 1."
    if on_cpu(place):
        yield "Memory on CPUs has the buffers of Python and Gloo in it, so it is not compared."
    agreements = [row.verdict.agreement for row in comparison.rows]
    if measurements.serial is not None:
        parts = [f"{agreements.count(one)} {one}" for one in dict.fromkeys(agreements)]
        yield f"Losses and gradient norms vs. a single rank: {', '.join(parts)}."
    if comparison.blame:
        yield f"Training is {comparison.blame}." if comparison.blame.startswith("wrong") else f"{comparison.blame}."
    for row in comparison.rows:
        if row.verdict.agreement == "wrong":
            yield f"{row.configuration.name}: {row.verdict.words}."
        for line in row.differs:
            yield f"{row.configuration.name}: {line}"
    if not any(row.differs for row in comparison.rows):
        yield "Every rank sent the expected collectives, in every run."


def _row_json(row: ComparisonRow) -> Json:
    configuration, workload = row.configuration, row.configuration.workload
    named = ("name", "grid", "micro_batch", "recompute", "kept_layers")
    pairs = {name: getattr(row, name) for name in StepTotals.model_fields}
    runs = [run.model_dump(mode="json", include=_OF_RUN) for run in configuration.runs]
    terms = [term.model_dump(mode="json", exclude={"steps_s", "exposed_s"}) for term in configuration.terms]
    return {
        **fields_of(configuration, named, grid=configuration.grid.model_dump(mode="json")),
        "workload": workload.model_dump(mode="json", by_alias=True),
        "overlaps": list(workload.overlaps),
        **fields_of(configuration.predicted, ("low_s", "high_s")),
        **{name: {**asdict(pair), "error": pair.error} for name, pair in pairs.items()},
        "losses": row.verdict.words,
        "differs": list(row.differs),
        "runs": runs,
        "terms": [{**term, "measured_s": median(term["measured_s"])} for term in terms],
    }


def validation_section(document: Json, *, identity: str, source: str) -> Json:
    """The section of a validation document."""
    rows, place, opens = document["configurations"], document["place"], f"{identity}-one"
    site, *notes = document["notes"]
    quality = [page.table("", "", _QUALITIES, _qualities(document))]
    if document["gains"]:
        quality.append(page.table("", "Gain from overlap", _GAINS, document["gains"]))
    shares = [page.table("", key.capitalize(), _SHARES, _with_errors(document[key])) for key in ("axes", "collectives")]
    blocks = [
        _points_figure(rows),
        *page.notes(notes),
        page.table(f"{identity}-table", "Each configuration", _CONFIGURATIONS, _shown(rows), opens=opens),
        _axes_figure(document),
        _details(document, source=source, identity=opens),
        page.fold("Prediction quality", quality),
        page.fold("By axis and by collective", shares),
        page.machine_fold(document["machine"]),
        page.model_fold(document["model"]),
        page.workload_fold(rows[0]["workload"]),
        *_origin_folds(document, source=source),
    ]
    title = f"{document['model']['name']} on {place['ranks']} ranks: predicted vs. measured"
    step, trained = document["quality"]["step"], _trained(document)
    best = f"#{step['best']} of {len(rows)} measured" if step["best"] else "not among the measured"
    error = f"step time: mean |error| {percent(step['mape'])}, worst {signed_percent(step['worst'])}"
    found = f"The predicted best is {best}; {error}; training: {trained[0]}, {trained[1]}."
    return page.section(identity, title, subtitle=site, verdict=[found], cards=_cards(document), blocks=blocks)


def _origin_folds(document: Json, *, source: str) -> list[Json]:
    """What was run, and where."""
    made = [("measured", document["created"]), ("command", document["command"])]
    named = MeasurementSite.model_fields
    place = [(named[key].description or key, str(value)) for key, value in document["place"].items()]
    return [
        page.origin_fold([*page.origin_rows(document, source), *made]),
        page.fold("Where it ran", [page.facts(place)]),
    ]


def _cards(document: Json) -> list[Json]:
    step, sent = document["quality"]["step"], document["quality"]["communication"]
    best = f"#{step['best']}" if step["best"] else NOTHING
    verdict, why = _trained(document)
    return [
        page.card("predicted best", best, note="among the measured, by step"),
        page.card("regret", percent(step["regret"]), note="cost of trusting it"),
        page.card("step, mean |error|", percent(step["mape"]), note=f"worst {signed_percent(step['worst'])}"),
        page.card("communication, mean |error|", percent(sent["mape"]), note=f"worst {signed_percent(sent['worst'])}"),
        page.card("training", verdict, note=why),
    ]


def _trained(document: Json) -> tuple[str, str]:
    """Whether training is sound, and by what: losses against a single rank, or whether the expected collectives ran."""
    if not document["sound"]:
        return "wrong", document["blame"] or "unexpected collectives"
    losses = list(dict.fromkeys(one["losses"].partition(" (")[0] for one in document["configurations"]))
    if losses == ["not compared"]:
        return "not compared", "but every rank sent the expected collectives"
    return "sound", f"vs. a single rank: {', '.join(losses)}"


def _details(document: Json, *, source: str, identity: str) -> Json:
    """Each configuration as it was predicted, and its runs."""
    items, layouts = [], LayoutWords.of(document, ())
    for number, one in enumerate(document["configurations"]):
        problem = {**document, "gpus": document["place"]["ranks"], "workload": one["workload"]}
        found = detailed(_as_config(one), inputs_of(problem, source=source))
        said = [f"Losses and gradient norms: {one['losses']}.", *one["differs"]]
        blocks = [
            page.fold(f"Runs ({len(one['runs'])})", [page.text(said), page.table("", "", _RUNS, one["runs"])]),
            page.fold(f"Collectives, predicted vs. measured ({len(one['terms'])})", [collectives_table(one["terms"])]),
            *([] if found is None else detail_blocks(found, explain=(), layouts=layouts, source=document["command"])),
        ]
        items.append({"row": number, "title": one["name"], "blocks": blocks})
    return {"kind": "configurations", "id": identity, "title": "One configuration", "items": items}


def _as_config(one: Json) -> Json:
    """The prediction of a configuration as a ranking has it."""
    return {
        **one["grid"],
        **{key: one[key] for key in ("micro_batch", "recompute", "kept_layers", "low_s", "high_s")},
        **{key: one[key]["predicted"] for _, key, _, _ in _QUANTITIES},
        **dict.fromkeys(("rank", "tokens_per_s", "mfu", "hfu")),
        "order": ",".join(one["grid"]["order"]),
        "iteration_s": one["step_s"]["predicted"],
        "feasible": True,
    }


def _points_figure(rows: Sequence[Json]) -> Json:
    """Predicted over measured, with the interval of the prediction and the range of the runs."""
    choices = []
    shown: list[Json] = []
    for label, key, per, unit in _QUANTITIES:
        known = [one for one in rows if one[key]["predicted"] is not None]
        if known:
            shown.append(_points(known, key, per))
            ends = [0.0, 1.05 * max(*shown[-1]["x"], *shown[-1]["y"])]
            moved = {name: [value] for name, value in shown[-1].items()}
            titles = {"xaxis.title.text": f"measured, {unit}", "yaxis.title.text": f"predicted, {unit}"}
            choices.append(page.choice(unbroken(label), {0: moved, 1: {"x": [ends], "y": [ends]}}, titles))
    whiskers = {"color": page.MUTED, "thickness": 1.2, "width": 4}
    drawn, first = shown[0], choices[0]
    bars: Json = {key: {**drawn[key], **whiskers} for key in ("error_x", "error_y")}
    look = {"size": 11, "color": page.ACCENT}
    line = first["traces"]["1"]
    traces = [
        page.point_trace("configurations", drawn["x"], drawn["y"], text=drawn["text"], marker=look, **bars),
        page.line_trace("measured as predicted", line["x"][0], line["y"][0]),
    ]
    layout = {f"{axis}axis": {"title": {"text": first["layout"][f"{axis}axis.title.text"]}} for axis in ("x", "y")}
    note = (
        "Dashed line: measured as predicted. Horizontal bars: the range of the runs; vertical bars: the 80% interval,"
        " if the prediction has one."
    )
    return page.figure("Predicted vs. measured", traces, layout=layout, height=460, note=note, choices=choices)


def _points(known: Sequence[Json], key: str, per: float) -> Json:
    """What one quantity makes of the points."""
    x = [one[key]["measured"] / per for one in known]
    y = [one[key]["predicted"] / per for one in known]
    runs = [[run[key] / per for run in one["runs"]] for one in known]
    lows, highs = ([value / per for value in _ends(known, key, side)] for side in ("low_s", "high_s"))
    said = [
        f"{one['name']}<br>predicted {predicted:.4g}, measured {measured:.4g} ({one[key]['error'] or 0.0:+.1%})"
        for one, predicted, measured in zip(known, y, x, strict=True)
    ]
    of_runs = page.error_bars(_less(map(max, runs), x), _less(x, map(min, runs)))
    of_interval = page.error_bars(_less(highs, y), _less(y, lows))
    return {"x": x, "y": y, "text": said, "error_x": of_runs, "error_y": of_interval}


def _ends(known: Sequence[Json], key: str, side: str) -> list[float]:
    """An end of the interval of each step; the prediction itself where there is none."""
    return [one[side] if key == "step_s" and one[side] is not None else one[key]["predicted"] for one in known]


def _less(values: Iterable[float], others: Iterable[float]) -> list[float]:
    return [value - other for value, other in zip(values, others, strict=True)]


def _axes_figure(document: Json) -> Json:
    """Predicted vs. measured by axis and collective, means over the configurations that have them."""
    shares = {
        **{f"over {axis_name(one['name'])}": one for one in document["axes"]},
        **{one["name"]: one for one in document["collectives"]},
    }
    pairs = [(name, one["predicted_s"], one["measured_s"]) for name, one in shares.items()]
    return pairs_figure("By axis and collective", pairs, note="Means over the configurations that have them.")


_NUMBERS = {key: Column(key, key, show=str) for key in ("baseline", "now", "change", "allowed")}
_QUANTITY = words("quantity", "quantity")
_CHANGES = {
    "failed": words("failed", ""),
    "subject": words("subject", "configuration"),
    "quantity": _QUANTITY,
    **_NUMBERS,
}
_GATE_TITLES: dict[Gate, str] = {
    "predictions": "Predictions: must not move",
    "measurements": "Measurements: must not grow",
    "accuracy": "Accuracy: must stay above its floor",
}


def regression_text(found: Regression) -> str:
    """What failed or changed, gate by gate, and one line for all."""
    return _render(found, "table") + f"{verdict(found)}\n"


def regression_markdown(found: Regression) -> str:
    """The same for a pull request or a job summary."""
    return f"## axonn-tune regress: {verdict(found)}\n\n" + _render(found, "md")


def verdict(found: Regression) -> str:
    """All of it in one line."""
    if not found.failures:
        return f"{counted(len(found.findings), 'number')} compared, none beyond tolerance"
    parts = [f"{sum(one.failed for one in found.of(gate))} of {len(found.of(gate))} {gate}" for gate in GATES]
    return f"failed: {', '.join(part for part in parts if not part.startswith('0 '))}"


def _render(found: Regression, output_format: str) -> str:
    parts = ["\n".join(wrapped(f"Warning: {one}") for one in found.warnings)]
    for gate in GATES:
        findings = found.of(gate)
        if not findings:
            continue
        shown = [one for one in findings if one.failed or gate == "accuracy" or _changed(one)]
        failed = sum(one.failed for one in findings)
        summary = f"{counted(len(findings), 'number')} compared, {failed} beyond tolerance."
        ordered = sorted(shown, key=lambda one: (not one.failed, -abs(one.change or 0.0)))
        table = Table(_CHANGES, list(map(_finding_row, ordered)), tuple(_CHANGES))
        made = f"\n{table.render(output_format)}" if ordered else ""
        title = _GATE_TITLES[gate]
        heading = f"### {title}\n\n" if output_format == "md" else f"{title}\n{'-' * len(title)}\n"
        parts.append(f"{heading}{summary}\n{made}")
    return "\n".join(part for part in parts if part) + "\n"


def _changed(one: RegressionFinding) -> bool:
    """Whether a change would be seen."""
    return one.change is not None and abs(one.change) >= 0.0005


def _finding_row(one: RegressionFinding) -> Json:
    """A number as tables show it."""
    show = _SHOWN.get(one.unit, "{:.3f}".format)
    return {
        "failed": "FAIL" if one.failed else "",
        "subject": one.subject,
        "quantity": one.quantity,
        "baseline": None if one.before is None else show(one.before),
        "now": None if one.now is None else show(one.now),
        "change": _change(one),
        "allowed": _allowed(one),
    }


_SHOWN: Mapping[str, Callable[[float], str]] = {"s": show_seconds, "bytes": show_bytes}


def _change(one: RegressionFinding) -> str:
    if one.now is None:
        return "missing"
    return NOTHING if one.change is None or one.unit == "share" else f"{one.change:+.2%}"


def _allowed(one: RegressionFinding) -> str:
    if one.limit is None:
        return "tracked"
    if one.gate == "accuracy":
        return f"{'at least' if 'correlation' in one.quantity else 'at most'} {one.limit:g}"
    sign = "±" if one.gate == "predictions" else "+"
    return f"{sign}{one.limit:.3g}" if one.limit < 0.001 else f"{sign}{one.limit:.1%}"


def regression_junit(found: Regression) -> str:
    """JUnit XML: a suite for each gate, a case for each configuration of it."""
    root = ElementTree.Element("testsuites", name="axonn-tune regress")
    for gate in GATES:
        findings = found.of(gate)
        if findings:
            _suite(root, gate, findings)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(root: ElementTree.Element, gate: Gate, findings: Sequence[RegressionFinding]) -> None:
    subjects = dict.fromkeys(one.subject for one in findings)
    failed = {one.subject for one in findings if one.failed}
    suite = ElementTree.SubElement(
        root, "testsuite", name=gate, tests=str(len(subjects)), failures=str(len(failed)), errors="0", skipped="0"
    )
    for subject in subjects:
        case = ElementTree.SubElement(suite, "testcase", classname=f"axonn-tune.{gate}", name=subject)
        wrong = [one for one in findings if one.subject == subject and one.failed]
        if wrong:
            columns = (_QUANTITY, *_NUMBERS.values())
            lines = [" ".join(filter(None, cells)) for cells in cells_of(columns, list(map(_finding_row, wrong)))]
            failure = ElementTree.SubElement(case, "failure", message=", ".join(one.quantity for one in wrong))
            failure.text = "\n".join(lines)


def regression_json(found: Regression) -> str:
    """Every number."""
    return json_text(
        {
            "schema": REGRESSION_SCHEMA,
            "passed": not found.failures,
            "warnings": list(found.warnings),
            "findings": [{**asdict(one), "change": one.change} for one in found.findings],
        },
        indent=1,
    )
