"""How good predictions are, as text and as JSON: against published measurements, runs of one's own, and a baseline.

JSON follows the contracts `axonn-tune/accuracy/1`, `axonn-tune/validation/1` and `axonn-tune/regression/1`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from xml.etree import ElementTree

from axonn_tune.report.output import (
    NOTHING,
    Heading,
    Json,
    TableColumn,
    axis_name,
    cells_of,
    each,
    fields_of,
    json_text,
    markdown_table,
    percent,
    signed_percent,
    text_of,
    text_table,
    times_ms,
    words,
    wrapped,
)
from axonn_tune.specs.results import StepTotals
from axonn_tune.units import counted, show_bytes, show_seconds
from axonn_tune.validation.comparison import (
    ComparisonRow,
    OverlapSaving,
    Pair,
    Quality,
    RunComparison,
    TermComparison,
    paper_quality,
)
from axonn_tune.validation.published.accuracy import Accuracy, LeftOut, PredictedRow, StepSummary
from axonn_tune.validation.published.measurements import Evaluation, errors_by_group
from axonn_tune.validation.published.rows import framework_of
from axonn_tune.validation.quality import Errors
from axonn_tune.validation.regression import GATES, Gate, Regression, RegressionFinding

ACCURACY_SCHEMA, VALIDATION_SCHEMA = "axonn-tune/accuracy/1", "axonn-tune/validation/1"
REGRESSION_SCHEMA = "axonn-tune/regression/1"
_STEP = ("id", "predicted_s", "low_s", "high_s", "why_not", "measured_s", "error", "memory_bytes")
_GROUPINGS = ("by_source", "by_framework", "by_accelerator")


def accuracy_document(found: Accuracy) -> Json:
    """Everything, as JSON: `rows` are the steps; each other kind has a summary and rows of its own."""
    kinds = {"collectives": found.collectives, "gemm": found.gemms, "memory": found.memory}
    return {
        "schema": ACCURACY_SCHEMA,
        "summary": {
            **step_summary(found.summary),
            **{f"without_{kind}": step_summary(summary) for kind, summary in found.without.items()},
        },
        "rows": [
            fields_of(one, _STEP, id=one.row.id, why_not=one.why_not or None, measured_s=one.row.step_s)
            for one in found.steps
        ],
        **{name: _judged(judged) for name, judged in kinds.items() if judged},
    }


def _judged(judged: tuple[Evaluation, ...]) -> Json:
    return {
        "summary": {name: asdict(errors) for name, errors in errors_by_group(judged).items()},
        "rows": [
            fields_of(one, ("id", "predicted", "measured", "why_not"), why_not=one.why_not or None) for one in judged
        ],
    }


def accuracy_text(found: Accuracy) -> str:
    """Everything, for a person."""
    parts = [steps_text(found.summary, found.without)] if found.steps else []
    for title, judged in (
        ("collectives of 1 MiB or more", found.collectives),
        ("GEMMs of 10 GFLOP or more", found.gemms),
        ("memory", found.memory),
    ):
        if judged:
            parts.append(_errors_table(title, errors_by_group(judged)))
            parts.append(_reasons(judged))
    return "\n".join(part for part in parts if part)


def _reasons(judged: tuple[Evaluation, ...]) -> str:
    """Why rows were not predicted, with how many there are."""
    counts = Counter(one.why_not for one in judged if one.why_not)
    return "".join(f"not predicted: {count:,} rows: {why}\n" for why, count in counts.most_common())


def step_summary(summary: StepSummary) -> Json:
    """The figures of a summary."""
    return {
        **asdict(summary.errors),
        **fields_of(summary, ("rows", "predicted", "spearman", "regret", "best_in_top_5", "coverage")),
        **{by: {name: asdict(errors) for name, errors in getattr(summary, by).items()} for by in _GROUPINGS},
        "families": [asdict(family) for family in summary.families],
    }


def steps_text(summary: StepSummary, without: Mapping[LeftOut, StepSummary]) -> str:
    """Errors by source, families, worst rows first, and what was not predicted; beside them the held-out errors."""
    parts = []
    if summary.errors.rows:
        held_out = [(kind, _with_all(one)) for kind, one in without.items()]
        parts += [_errors_table("source", _with_all(summary), held_out), _families_table(summary, without)]
        parts.append(_steps_table("worst rows", summary.worst))
    parts.append(text_of(_INTERLEAVING, summary.of_unknown_interleaving))
    parts.append(_steps_table("rows without a time", [one for one in summary.not_measured if one.predicted_s]))
    unknown = sorted({one.row.framework for one in summary.of_unknown_software})
    parts += [f"unknown framework, priced as the mean of all known ones: {name or 'no name'}" for name in unknown]
    parts += [f"not predicted: {one.row.id}: {one.why_not}" for one in summary.not_predicted]
    return "\n".join(part for part in parts if part) + "\n"


def _with_all(summary: StepSummary) -> dict[str, Errors]:
    return {**summary.by_source, "all": summary.errors}


def _errors_table(
    title: str, groups: dict[str, Errors], held_out: Sequence[tuple[LeftOut, dict[str, Errors]]] = ()
) -> str:
    """Errors by group; of `held_out` mean and median too, by fits without a row's family or source."""
    columns: list[TableColumn[tuple[str, Errors]]] = [
        words(title, lambda group: group[0]),
        each("rows", lambda group: f"{group[1].rows:,}"),
        each("mean", lambda group: percent(group[1].mape)),
        each("median", lambda group: percent(group[1].median)),
        each("90%", lambda group: percent(group[1].p90)),
        each("bias", lambda group: signed_percent(group[1].bias)),
        *(column for kind, other in held_out for column in _held_out_columns(kind, other)),
    ]
    return text_of(columns, list(groups.items()))


def _held_out_columns(kind: LeftOut, errors: Mapping[str, Errors]) -> Iterator[TableColumn[tuple[str, Errors]]]:
    """Mean and median; nothing for a group without held-out rows."""
    yield each(f"held-out\n{kind},\nmean", lambda group: percent(errors[group[0]].mape if group[0] in errors else None))
    yield each(
        f"held-out\n{kind},\nmedian", lambda group: percent(errors[group[0]].median if group[0] in errors else None)
    )


def _families_table(summary: StepSummary, without: Mapping[LeftOut, StepSummary]) -> str:
    """How well layouts are ranked within families, and what intervals hold."""
    if not summary.families:
        return ""
    named = {"all rows": summary, **{f"held-out {kind}": one for kind, one in without.items()}}
    return text_of(_FAMILIES, list(named.items()))


_FAMILIES: list[TableColumn[tuple[str, StepSummary]]] = [
    words("families of\n5+ rows", lambda one: one[0]),
    each("families", lambda one: str(len(one[1].families))),
    each("mean\nSpearman", lambda one: f"{one[1].spearman:.3f}"),
    each("mean\nregret", lambda one: percent(one[1].regret)),
    each("best in\ntop 5", lambda one: percent(one[1].best_in_top_5, decimals=0)),
    each("80% interval\ncoverage", lambda one: percent(one[1].coverage, decimals=0)),
]


def _steps_table(title: str, steps: Sequence[PredictedRow]) -> str:
    """One line a row, with what it was priced as and its interval; nothing without rows."""
    return text_of([words(title, lambda one: one.row.id), *_STEPS], steps)


_MEASURED: TableColumn[PredictedRow] = each("measured, s", lambda one: _three_decimals(one.row.step_s))
_PREDICTED: TableColumn[PredictedRow] = each("predicted, s", lambda one: _three_decimals(one.predicted_s))
_ERROR: TableColumn[PredictedRow] = each("error", lambda one: signed_percent(one.error))
_STEPS: list[TableColumn[PredictedRow]] = [
    words("framework", lambda one: one.row.framework),
    words("priced as", lambda one: framework_of(one.row).software),
    words("model", lambda one: one.row.model),
    words("layout", lambda one: one.layout),
    _MEASURED,
    _PREDICTED,
    each("80% interval", lambda one: _interval(one.low_s, one.high_s)),
    _ERROR,
]
_INTERLEAVING: list[TableColumn[PredictedRow]] = [
    words("* interleaving not stated", lambda one: one.row.id),
    words("model", lambda one: one.row.model),
    words("fastest layout", lambda one: one.layout),
    _MEASURED,
    _PREDICTED,
    _ERROR,
    each("without\ninterleaving, s", lambda one: _three_decimals(one.plain_s)),
    each("error", lambda one: signed_percent(one.plain_error)),
]
"""Rows whose source does not state interleaving, by both readings."""


def _interval(low_s: float | None, high_s: float | None) -> str:
    return NOTHING if low_s is None or high_s is None else f"{low_s:.3f} to {high_s:.3f}"


def _three_decimals(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


_OF_RUN = {
    "began", "load", "step_s", "compute_s", "communication_s", "exposed_communication_s", "memory_bytes",
}  # fmt: skip


def validation_text(comparison: RunComparison) -> str:
    """Every configuration, every axis and collective, the quality of the whole, and what is wrong."""
    rows = sorted(comparison.rows, key=lambda row: row.step_s.measured)
    parts = [
        text_of(_CONFIGURATIONS, rows),
        text_of(_OTHERS, rows),
        _terms_table("axis", comparison.axes),
        _terms_table("collective", comparison.collectives),
        *([text_of(_GAINS, comparison.gains)] if comparison.gains else []),
        text_of(_QUALITIES, qualities(comparison)),
    ]
    return "\n".join([*parts, *map(wrapped, notes_of(comparison))]) + "\n"


def qualities(comparison: RunComparison) -> list[Quality]:
    """Ours, then that of the paper's rule."""
    return [*comparison.qualities, paper_quality(comparison.measurements)]


def validation_json(comparison: RunComparison) -> str:
    """The same as JSON."""
    return json_text(validation_document(comparison), indent=1)


def validation_document(comparison: RunComparison) -> Json:
    """The same and what it was made from, by the schema `axonn-tune/validation/1`."""
    measurements = comparison.measurements
    return {
        "schema": VALIDATION_SCHEMA,
        "tool_version": measurements.tool_version,
        "created": measurements.created,
        "command": measurements.command,
        "place": measurements.place.model_dump(mode="json"),
        "model": {**measurements.model.model_dump(mode="json", by_alias=True), "sha256": measurements.model_sha256},
        "machine": {
            **measurements.machine.model_dump(mode="json", by_alias=True),
            "sha256": measurements.machine_sha256,
        },
        "sound": comparison.sound,
        "blame": comparison.blame,
        "notes": list(notes_of(comparison)),
        "quality": {one.what: asdict(one) for one in qualities(comparison)},
        "axes": [asdict(one) for one in comparison.axes],
        "collectives": [asdict(one) for one in comparison.collectives],
        "gains": [asdict(one) for one in comparison.gains],
        "configurations": [_row_json(row) for row in comparison.rows],
    }


def notes_of(comparison: RunComparison) -> Iterator[str]:
    """What the tables do not say."""
    measurements = comparison.measurements
    runs = len(measurements.configurations[0].runs)
    place = measurements.place
    yield (
        f"{counted(len(comparison.rows), 'configuration')} of {measurements.model.name}, "
        f"{counted(runs, 'interleaved run')} each, medians; {place.network}; predicted by {measurements.machine.name}."
    )
    yield "Error: predicted / measured − 1."
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


def _pair_columns(
    predicted: str, measured: str, read: Callable[[ComparisonRow], Pair]
) -> list[TableColumn[ComparisonRow]]:
    """Predicted, measured, ms, and the error."""
    return [
        times_ms(predicted, lambda row: read(row).predicted),
        times_ms(measured, lambda row: read(row).measured),
        each("error", lambda row: signed_percent(read(row).error)),
    ]


def _spread(row: ComparisonRow) -> str:
    return percent(row.step_s.spread, decimals=0) if len(row.configuration.runs) > 1 else NOTHING


def _bytes(value: float | None) -> str:
    return NOTHING if value is None else show_bytes(value)


_CONFIGURATIONS: list[TableColumn[ComparisonRow]] = [
    words("configuration", lambda row: row.configuration.name),
    *_pair_columns("step,\npredicted,\nms", "measured,\nms", lambda row: row.step_s),
    each("spread\nof runs", _spread),
    *_pair_columns("communi-\ncation,\npredicted", "measured,\nms", lambda row: row.communication_s),
    *_pair_columns("exposed,\npredicted", "measured,\nms", lambda row: row.exposed_communication_s),
]
_OTHERS: list[TableColumn[ComparisonRow]] = [
    words("configuration", lambda row: row.configuration.name),
    *_pair_columns("computation,\npredicted, ms", "measured,\nms", lambda row: row.compute_s),
    each("memory,\npredicted", lambda row: _bytes(row.memory_bytes.predicted)),
    each("measured", lambda row: show_bytes(row.memory_bytes.measured)),
    words("losses", lambda row: row.verdict.words.partition(":")[0]),
]
_TERMS: list[TableColumn[TermComparison]] = [
    each("in", lambda one: str(one.configurations)),
    times_ms("predicted,\nms", lambda one: one.predicted_s),
    times_ms("measured,\nms", lambda one: one.measured_s),
    each("error", lambda one: signed_percent(one.predicted_s / one.measured_s - 1.0 if one.measured_s else None)),
    each("mean\n|error|", lambda one: percent(one.mape)),
    times_ms("exposed,\npredicted,\nms", lambda one: one.predicted_exposed_s),
    times_ms("\nmeasured,\nms", lambda one: one.measured_exposed_s),
]
_GAINS: list[TableColumn[OverlapSaving]] = [
    words("gain from overlap", lambda one: one.name),
    each("predicted", lambda one: signed_percent(one.predicted)),
    each("measured", lambda one: signed_percent(one.measured)),
]
_QUALITIES: list[TableColumn[Quality]] = [
    words("", lambda one: one.what),
    each("Spearman", lambda one: f"{one.spearman:.3f}" if one.rows else NOTHING),
    each("regret of\npredicted best", lambda one: signed_percent(one.regret)),
    each("its measured\nrank", lambda one: str(one.best) if one.rows else NOTHING),
    each("mean\n|error|", lambda one: percent(one.mape)),
    each("mean\nerror", lambda one: signed_percent(one.bias)),
    each("worst\nerror", lambda one: signed_percent(one.worst)),
]
"""Without rows all numbers are nan."""


def _terms_table(title: str, terms: Sequence[TermComparison]) -> str:
    columns = [words(title, lambda one: axis_name(one.name)), *_TERMS]
    return text_table(columns, cells_of(columns, terms))


def _row_json(row: ComparisonRow) -> Json:
    configuration = row.configuration
    pairs = {name: getattr(row, name) for name in StepTotals.model_fields}
    runs = [run.model_dump(mode="json", include=_OF_RUN) for run in configuration.runs]
    terms = [term.model_dump(mode="json", exclude={"steps_s", "exposed_s"}) for term in configuration.terms]
    return {
        "name": configuration.name,
        "grid": configuration.grid.model_dump(mode="json"),
        "micro_batch": configuration.micro_batch,
        "recompute": configuration.recompute,
        "kept_layers": configuration.kept_layers,
        "workload": configuration.workload.model_dump(mode="json", by_alias=True),
        "overlaps": list(configuration.workload.overlaps),
        "low_s": configuration.predicted.low_s,
        "high_s": configuration.predicted.high_s,
        **{name: {**asdict(pair), "error": pair.error} for name, pair in pairs.items()},
        "losses": row.verdict.words,
        "differs": list(row.differs),
        "runs": runs,
        "terms": [{**term, "measured_s": median(term["measured_s"])} for term in terms],
    }


_CHANGES: list[TableColumn[RegressionFinding]] = [
    words("", lambda one: "FAIL" if one.failed else ""),
    words("configuration", lambda one: one.subject),
    words("quantity", lambda one: one.quantity),
    each("baseline", lambda one: _shown(one.before, one.unit)),
    each("now", lambda one: _shown(one.now, one.unit)),
    each("change", lambda one: _change(one)),
    each("allowed", lambda one: _allowed(one)),
]
_GATE_TITLES: dict[Gate, str] = {
    "predictions": "Predictions: must not move",
    "measurements": "Measurements: must not grow",
    "accuracy": "Accuracy: must stay above its floor",
}


def regression_text(found: Regression) -> str:
    """What failed or changed, gate by gate, and one line for all."""
    return _render(found, text_table, heading=lambda title: f"{title}\n{'-' * len(title)}\n") + f"{verdict(found)}\n"


def regression_markdown(found: Regression) -> str:
    """The same for a pull request or a job summary."""
    heading: Callable[[str], str] = lambda title: f"### {title}\n\n"  # noqa: E731
    return f"## axonn-tune regress: {verdict(found)}\n\n" + _render(found, markdown_table, heading=heading)


def verdict(found: Regression) -> str:
    """All of it in one line."""
    if not found.failures:
        return f"{counted(len(found.findings), 'number')} compared, none beyond tolerance"
    parts = [f"{sum(one.failed for one in found.of(gate))} of {len(found.of(gate))} {gate}" for gate in GATES]
    return f"failed: {', '.join(part for part in parts if not part.startswith('0 '))}"


def _render(
    found: Regression,
    table: Callable[[Sequence[Heading], Sequence[Sequence[str]]], str],
    *,
    heading: Callable[[str], str],
) -> str:
    parts = ["\n".join(wrapped(f"Warning: {one}") for one in found.warnings)]
    for gate in GATES:
        findings = found.of(gate)
        if not findings:
            continue
        shown = [one for one in findings if one.failed or gate == "accuracy" or _changed(one)]
        failed = sum(one.failed for one in findings)
        summary = f"{counted(len(findings), 'number')} compared, {failed} beyond tolerance."
        rows = cells_of(_CHANGES, sorted(shown, key=lambda one: (not one.failed, -abs(one.change or 0.0))))
        parts.append(heading(_GATE_TITLES[gate]) + summary + "\n" + (f"\n{table(_CHANGES, rows)}" if rows else ""))
    return "\n".join(part for part in parts if part) + "\n"


def _changed(one: RegressionFinding) -> bool:
    """Whether a change would be seen."""
    return one.change is not None and abs(one.change) >= 0.0005


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return NOTHING
    return show_seconds(value) if unit == "s" else show_bytes(value) if unit == "bytes" else _three_decimals(value)


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
            lines = [" ".join(filter(None, cells)) for cells in cells_of(_CHANGES[2:], wrong)]
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
