"""Predictions against runs of one's own, and against a baseline: as text, Markdown, JUnit, JSON and a section.

JSON follows the contracts `axonn-tune/validation/2` and `axonn-tune/regression/2`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from xml.etree import ElementTree

from axonn_tune.ranking.documents import detailed, inputs_of
from axonn_tune.report import page
from axonn_tune.report.configuration import LayoutWords, detail_blocks
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
from axonn_tune.report.pairs import (
    ERROR,
    MEMORY,
    MILLISECONDS,
    RANKING,
    TERM_TIMES,
    pair_columns,
    pairs_figure,
    points_of,
    quality_columns,
    quality_text,
    term_rows,
)
from axonn_tune.report.run import collectives_table
from axonn_tune.specs.results import QUANTITIES, Pairs, Site
from axonn_tune.units import counted, show_bytes, show_seconds
from axonn_tune.validation.comparison import RunComparison
from axonn_tune.validation.regression import GATES, Gate, Regression, RegressionFinding

VALIDATION_SCHEMA, REGRESSION_SCHEMA = "axonn-tune/validation/2", "axonn-tune/regression/2"
_LABELS = {
    "step_s": "step",
    "communication_s": "communi\u00adcation",
    "exposed_communication_s": "exposed",
    "compute_s": "computation",
    "memory_bytes": "memory",
}
_PAIRS = {
    key: pair_columns(
        key,
        label,
        MEMORY if key == "memory_bytes" else MILLISECONDS,
        meaning=f"{unbroken(label).capitalize()} of one rank",
    )
    for key, label in _LABELS.items()
}
_NAME = words("name", "configuration", "Grid, rank order, micro-batch, recompute.", 34)
_SPREAD = share("step_s.spread", "spread\nof runs", "Of the step: largest less smallest, over the median.", decimals=0)
# In texts without where losses differ.
_LOSSES = words(
    "losses", "losses", "Losses and gradient norms vs. a single rank.", 40, show=lambda losses: losses.partition(":")[0]
)
_CONFIGURATIONS = (_NAME, *(column for columns in _PAIRS.values() for column in columns), _SPREAD, _LOSSES)
_IN_TEXTS = (
    (_NAME, *_PAIRS["step_s"], _SPREAD, *_PAIRS["communication_s"], *_PAIRS["exposed_communication_s"]),
    (
        _NAME,
        *_PAIRS["compute_s"],
        replace(_PAIRS["memory_bytes"][0], title="memory\npredicted", show=show_bytes),
        replace(_PAIRS["memory_bytes"][1], title="measured", show=show_bytes),
        _LOSSES,
    ),
)
"""Two tables, each of which fits a terminal."""
_SHARES = (
    words("name", "of", "Axis or collective.", 16, show=axis_name),
    count("configurations", "in", "Configurations that have it."),
    replace(TERM_TIMES["predicted_s"], meaning="Mean over these."),
    replace(TERM_TIMES["measured_s"], meaning="Mean over these."),
    ERROR,
    share("mape", "mean\n|error|", "Mean over configurations of the size of the error."),
    TERM_TIMES["predicted_exposed_s"],
    replace(TERM_TIMES["measured_exposed_s"], label="measured, ms"),
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
        replace(columns[1], key=f"measured.{key}", label=columns[0].label.replace(" predicted,", ""))
        for key, columns in _PAIRS.items()
    ),
)
_QUALITY = (*RANKING, "mape", "bias", "worst")


def validation_text(comparison: RunComparison) -> str:
    """Every configuration, every axis and collective, the quality of the whole, and what is wrong."""
    document = validation_document(comparison)
    rows = sorted(document["configurations"], key=lambda row: row["step_s"]["measured"])
    shares = [
        text_of((replace(_SHARES[0], label=title), *_SHARES[1:]), document[key])
        for title, key in (("axis", "axes"), ("collective", "collectives"))
    ]
    others = [text_of(_GAINS, document["gains"]), quality_text("quantity", comparison.qualities, _QUALITY)]
    parts = [*(text_of(columns, rows) for columns in _IN_TEXTS), *shares, *others]
    return "\n".join([*filter(None, parts), *map(wrapped, document["notes"])]) + "\n"


def validation_document(comparison: RunComparison) -> Json:
    """The same and what it was made from, by the schema `axonn-tune/validation/2`."""
    measurements, gains = comparison.measurements, comparison.gains
    model, machine = (one.model_dump(mode="json", by_alias=True) for one in (measurements.model, measurements.machine))
    return {
        "schema": VALIDATION_SCHEMA,
        **fields_of(measurements, ("tool_version", "created", "command")),
        "place": measurements.place.model_dump(mode="json"),
        "model": {**model, "sha256": measurements.model_sha256},
        "machine": {**machine, "sha256": measurements.machine_sha256},
        **fields_of(comparison, ("sound", "blame")),
        "notes": list(_notes(comparison)),
        "quality": {name: asdict(one) for name, one in comparison.qualities.items()},
        "axes": comparison.shares("axis"),
        "collectives": comparison.shares("op"),
        "gains": [{"name": name, **gains.row(name)} for name in gains.measured],
        "configurations": list(_configurations(comparison)),
    }


def _configurations(comparison: RunComparison) -> Iterator[Json]:
    """Each with its pairs by quantity, runs and collectives."""
    for one in comparison.configurations:
        yield {
            **fields_of(one, ("name", "micro_batch", "recompute", "kept_layers")),
            "grid": one.grid.model_dump(mode="json"),
            "workload": one.workload.model_dump(mode="json", by_alias=True),
            **{key: comparison.pairs[key].row(one.name) for key in QUANTITIES},
            "losses": comparison.verdicts[one.name].words,
            "differs": comparison.differs[one.name],
            "runs": [run.model_dump(mode="json", include={"began", "load", "measured"}) for run in one.runs],
            "terms": term_rows(one.terms),
        }


def _notes(comparison: RunComparison) -> Iterator[str]:
    """What the tables do not say."""
    measurements, place = comparison.measurements, comparison.measurements.place
    runs = len(comparison.configurations[0].runs)
    yield (
        f"{counted(len(comparison.configurations), 'configuration')} of {measurements.model.name}, "
        f"{counted(runs, 'interleaved run')} each, medians; {place.network}; predicted by {measurements.machine.name}."
    )
    yield "Errors are predicted / measured − 1."
    if place.on_cpu:
        yield "Memory on CPUs has the buffers of Python and Gloo in it, so it is not compared."
    agreements = [verdict.agreement for verdict in comparison.verdicts.values()]
    if measurements.serial is not None:
        parts = [f"{agreements.count(one)} {one}" for one in dict.fromkeys(agreements)]
        yield f"Losses and gradient norms vs. a single rank: {', '.join(parts)}."
    if comparison.blame:
        yield f"Training is {comparison.blame}." if comparison.blame.startswith("wrong") else f"{comparison.blame}."
    for name, verdict in comparison.verdicts.items():
        if verdict.agreement == "wrong":
            yield f"{name}: {verdict.words}."
        yield from (f"{name}: {line}" for line in comparison.differs[name])
    if not any(comparison.differs.values()):
        yield "Every rank sent the expected collectives, in every run."


def validation_section(document: Json, *, identity: str, source: str) -> Json:
    """The section of a validation document."""
    rows, place, opens = document["configurations"], document["place"], f"{identity}-one"
    site, *notes = document["notes"]
    # JSON has null for what is not a number; a best without rows is none.
    qualities = [{"name": name, **one, "best": one["best"] or None} for name, one in document["quality"].items()]
    summary = [page.table("", "", quality_columns("quantity", _QUALITY), qualities)]
    if document["gains"]:
        summary.append(page.table("", "Gain from overlap", _GAINS, document["gains"]))
    shares = [page.table("", key.capitalize(), _SHARES, document[key]) for key in ("axes", "collectives")]
    named = Site.model_fields
    ran = [(named[key].description or key, str(value)) for key, value in place.items() if value is not None]
    made = [("measured", document["created"]), ("command", document["command"])]
    blocks = [
        *_figure(rows),
        *page.notes(notes),
        page.table(f"{identity}-table", "Each configuration", _CONFIGURATIONS, rows, opens=opens),
        _details(document, source=source, identity=opens),
        page.fold("Prediction quality", summary),
        page.fold("By axis and by collective", shares),
        page.machine_fold(document["machine"]),
        page.model_fold(document["model"]),
        page.workload_fold(rows[0]["workload"]),
        page.origin_fold([*page.origin_rows(document, source), *made]),
        page.fold("Where it ran", [page.facts(ran)]),
    ]
    title = f"{document['model']['name']} on {place['ranks']} ranks: predicted vs. measured"
    step, trained = document["quality"]["step"], _trained(document)
    best = f"#{step['best']} of {len(rows)} measured" if step["best"] else "not among the measured"
    error = f"step time: mean |error| {percent(step['mape'])}, worst {signed_percent(step['worst'])}"
    found = f"The predicted best is {best}; {error}; training: {trained[0]}, {trained[1]}."
    return page.section(identity, title, subtitle=site, verdict=[found], cards=_cards(document), blocks=blocks)


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
    step = one["step_s"]
    return {
        **one["grid"],
        **{key: one[key] for key in ("micro_batch", "recompute", "kept_layers")},
        **{key: one[key]["predicted"] for key in _LABELS},
        **dict.fromkeys(("rank", "tokens_per_s", "mfu", "hfu")),
        "order": ",".join(one["grid"]["order"]),
        "overlaps": one["workload"]["overlaps"],
        "iteration_s": step["predicted"],
        "low_s": step["low"],
        "high_s": step["high"],
        "feasible": True,
    }


def _figure(rows: Sequence[Json]) -> Iterator[Json]:
    """Predicted over measured, a series for each time of a step."""
    points = []
    for key, label in _LABELS.items():
        columns = {
            name: {one["name"]: one[key][name] for one in rows if one[key][name] is not None}
            for name in Pairs.model_fields
        }
        if key != "memory_bytes":
            points += points_of(
                Pairs(**columns),
                dict.fromkeys((one["name"] for one in rows), unbroken(label)).__getitem__,
                lambda name: [name],
            )
    note = "Horizontal bars: the spread of the runs; vertical bars: the 80% interval, if the prediction has one."
    if points:
        yield pairs_figure("Predicted vs. measured", points, MILLISECONDS, note=note, bars=True)


_NUMBERS = {key: Column(key, key, show=str) for key in ("baseline", "now", "change", "allowed")}
_QUANTITY = words("quantity", "quantity")
_CHANGES = {"failed": words("failed", ""), "subject": words("subject", "configuration"), "quantity": _QUANTITY}
_CHANGES |= _NUMBERS
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
        # Others would be seen as unchanged.
        shown = [one for one in findings if one.failed or gate == "accuracy" or abs(one.change or 0.0) >= 0.0005]
        failed = sum(one.failed for one in findings)
        summary = f"{counted(len(findings), 'number')} compared, {failed} beyond tolerance."
        ordered = sorted(shown, key=lambda one: (not one.failed, -abs(one.change or 0.0)))
        table = Table(_CHANGES, list(map(_finding_row, ordered)), tuple(_CHANGES))
        made = f"\n{table.render(output_format)}" if ordered else ""
        title = _GATE_TITLES[gate]
        heading = f"### {title}\n\n" if output_format == "md" else f"{title}\n{'-' * len(title)}\n"
        parts.append(f"{heading}{summary}\n{made}")
    return "\n".join(part for part in parts if part) + "\n"


def _finding_row(one: RegressionFinding) -> Json:
    """A number as tables show it."""
    show = _SHOWN.get(one.unit, "{:.3f}".format)
    changed = NOTHING if one.change is None or one.unit == "share" else f"{one.change:+.2%}"
    return {
        "failed": "FAIL" if one.failed else "",
        **fields_of(one, ("subject", "quantity")),
        "baseline": None if one.before is None else show(one.before),
        "now": None if one.now is None else show(one.now),
        "change": "missing" if one.now is None else changed,
        "allowed": _allowed(one),
    }


_SHOWN: Mapping[str, Callable[[float], str]] = {"s": show_seconds, "bytes": show_bytes}


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
