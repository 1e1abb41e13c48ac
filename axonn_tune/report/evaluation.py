"""How good predictions are, as text and as JSON: against published measurements, runs of one's own, and a baseline.

JSON follows the contracts `axonn-tune/accuracy/1`, `axonn-tune/validation/1` and `axonn-tune/regression/1`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from xml.etree import ElementTree

from axonn_tune.published.accuracy import Accuracy
from axonn_tune.published.cases import framework_of
from axonn_tune.published.measurements import Evaluation, errors_by_group
from axonn_tune.published.quality import Errors, StepSummary
from axonn_tune.published.steps import LeftOut, PredictedStep
from axonn_tune.report.output import (
    NOTHING,
    Heading,
    Json,
    axis_name,
    json_text,
    markdown_table,
    percent,
    seconds_cells,
    signed_percent,
    text_table,
    wrapped,
)
from axonn_tune.units import MILLI, counted, show_bytes, show_seconds
from axonn_tune.validation.comparison import (
    ComparisonRow,
    OverlapSaving,
    Pair,
    Quality,
    RunComparison,
    TermComparison,
    paper_quality,
)
from axonn_tune.validation.regression import GATES, Gate, Regression, RegressionFinding

ACCURACY_SCHEMA, VALIDATION_SCHEMA = "axonn-tune/accuracy/1", "axonn-tune/validation/1"
REGRESSION_SCHEMA = "axonn-tune/regression/1"


def accuracy_document(found: Accuracy) -> Json:
    """Everything, as JSON: `rows` are the steps; each other kind has a summary and rows of its own."""
    kinds = {"collectives": found.collectives, "gemm": found.gemms, "memory": found.memory}
    return {
        "schema": ACCURACY_SCHEMA,
        "summary": {
            **step_summary(found.summary),
            **{f"without_{kind}": step_summary(summary) for kind, summary in found.without.items()},
        },
        "rows": step_rows(found.steps),
        **{name: _judged(judged) for name, judged in kinds.items() if judged},
    }


def _judged(judged: tuple[Evaluation, ...]) -> Json:
    return {
        "summary": {name: asdict(errors) for name, errors in errors_by_group(judged).items()},
        "rows": [
            {"id": one.id, "predicted": one.predicted, "measured": one.measured, "why_not": one.why_not or None}
            for one in judged
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


def step_rows(predictions: tuple[PredictedStep, ...]) -> list[Json]:
    """One object per row: `why_not` is null where there is a prediction."""
    return [
        {
            "id": one.row.id,
            "predicted_s": one.predicted_s,
            "low_s": one.low_s,
            "high_s": one.high_s,
            "why_not": one.why_not or None,
            "measured_s": one.row.step_s,
            "error": one.error,
            "memory_bytes": one.memory_bytes,
        }
        for one in predictions
    ]


def step_summary(summary: StepSummary) -> Json:
    """The figures of a summary."""
    return {
        **asdict(summary.errors),
        "rows": summary.rows,
        "predicted": summary.predicted,
        "spearman": summary.spearman,
        "regret": summary.regret,
        "best_in_top_5": summary.best_in_top_5,
        "coverage": summary.coverage,
        "by_source": {name: asdict(errors) for name, errors in summary.by_source.items()},
        "by_framework": {name: asdict(errors) for name, errors in summary.by_framework.items()},
        "by_accelerator": {name: asdict(errors) for name, errors in summary.by_accelerator.items()},
        "families": [asdict(family) for family in summary.families],
    }


def steps_text(summary: StepSummary, without: Mapping[LeftOut, StepSummary]) -> str:
    """Errors by source, families, worst rows first, and what was not predicted; beside them the held-out errors."""
    parts = []
    if summary.errors.rows:
        held_out = [(kind, _with_all(one)) for kind, one in without.items()]
        parts += [_errors_table("source", _with_all(summary), held_out), _families_table(summary, without)]
        parts.append(_steps_table("worst rows", summary.worst))
    parts.append(_interleaving_table(summary.of_unknown_interleaving))
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
    headings = [Heading(title, left=True), *map(Heading, ("rows", "mean", "median", "90%", "bias"))]
    headings += [Heading(f"held-out\n{kind},\n{what}") for kind, _ in held_out for what in ("mean", "median")]
    rows = [
        [
            *(
                name,
                f"{one.rows:,}",
                percent(one.mape),
                percent(one.median),
                percent(one.p90),
                signed_percent(one.bias),
            ),
            *(cell for _, other in held_out for cell in _mean_and_median(other.get(name))),
        ]
        for name, one in groups.items()
    ]
    return text_table(headings, rows)


def _mean_and_median(errors: Errors | None) -> tuple[str, str]:
    """Nothing for a group without held-out rows."""
    return (percent(errors.mape), percent(errors.median)) if errors else (NOTHING, NOTHING)


def _families_table(summary: StepSummary, without: Mapping[LeftOut, StepSummary]) -> str:
    """How well layouts are ranked within families, and what intervals hold."""
    if not summary.families:
        return ""
    headings = [Heading("families of\n5+ rows", left=True), Heading("families"), Heading("mean\nSpearman")]
    headings += [Heading("mean\nregret"), Heading("best in\ntop 5"), Heading("80% interval\ncoverage")]
    named = {"all rows": summary, **{f"held-out {kind}": one for kind, one in without.items()}}
    rows = [
        [
            *(name, str(len(one.families)), f"{one.spearman:.3f}", percent(one.regret)),
            *(percent(one.best_in_top_5, decimals=0), percent(one.coverage, decimals=0)),
        ]
        for name, one in named.items()
    ]
    return text_table(headings, rows)


def _steps_table(title: str, steps: Sequence[PredictedStep]) -> str:
    """One line a row, with what it was priced as and its interval; nothing without rows."""
    if not steps:
        return ""
    headings = [
        *(Heading(name, left=True) for name in (title, "framework", "priced as", "model", "layout")),
        *map(Heading, ("measured, s", "predicted, s", "80% interval", "error")),
    ]
    return text_table(headings, [_step_cells(one) for one in steps])


def _interleaving_table(steps: Sequence[PredictedStep]) -> str:
    """Rows whose source does not state interleaving, by both readings; nothing without such rows."""
    if not steps:
        return ""
    headings = [*(Heading(name, left=True) for name in ("* interleaving not stated", "model", "fastest layout"))]
    headings += map(Heading, ("measured, s", "predicted, s", "error", "without\ninterleaving, s", "error"))
    return text_table(headings, [_interleaving_cells(one) for one in steps])


def _interleaving_cells(one: PredictedStep) -> list[str]:
    times = [f"{one.row.step_s:.3f}", f"{one.predicted_s:.3f}", f"{one.error:+.1%}"]
    return [one.row.id, one.row.model, one.layout, *times, f"{one.plain_s:.3f}", f"{one.plain_error:+.1%}"]


def _step_cells(one: PredictedStep) -> list[str]:
    measured = NOTHING if one.row.step_s is None else f"{one.row.step_s:.3f}"
    interval = NOTHING if one.low_s is None or one.high_s is None else f"{one.low_s:.3f} to {one.high_s:.3f}"
    layout = one.layout
    return [
        *(one.row.id, one.row.framework, framework_of(one.row).software, one.row.model, layout),
        *(measured, f"{one.predicted_s:.3f}", interval, signed_percent(one.error)),
    ]


_OF_RUN = {
    "began", "load", "step_s", "compute_s", "communication_s", "exposed_communication_s", "memory_bytes",
}  # fmt: skip


def validation_text(comparison: RunComparison) -> str:
    """Every configuration, every axis and collective, the quality of the whole, and what is wrong."""
    rows = sorted(comparison.rows, key=lambda row: row.step_s.measured)
    parts = [
        text_table(_CONFIGURATIONS, _configuration_cells(rows)),
        text_table(_OTHERS, _other_cells(rows)),
        text_table([Heading("axis", left=True), *_SHARES], _share_cells(comparison.axes)),
        text_table([Heading("collective", left=True), *_SHARES], _share_cells(comparison.collectives)),
        *([text_table(_GAINS, [_gain_cells(one) for one in comparison.gains])] if comparison.gains else []),
        text_table(_QUALITIES, [_quality_cells(one) for one in qualities(comparison)]),
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


_CONFIGURATIONS = [
    Heading("configuration", left=True), Heading("step,\npredicted,\nms"), Heading("measured,\nms"), Heading("error"),
    Heading("spread\nof runs"), Heading("communi-\ncation,\npredicted"), Heading("measured,\nms"), Heading("error"),
    Heading("exposed,\npredicted"), Heading("measured,\nms"), Heading("error"),
]  # fmt: skip
_OTHERS = [
    Heading("configuration", left=True), Heading("computation,\npredicted, ms"), Heading("measured,\nms"),
    Heading("error"), Heading("memory,\npredicted"), Heading("measured"), Heading("losses", left=True),
]  # fmt: skip
_SHARES = [
    Heading("in"), Heading("predicted,\nms"), Heading("measured,\nms"), Heading("error"), Heading("mean\n|error|"),
    Heading("exposed,\npredicted,\nms"), Heading("\nmeasured,\nms"),
]  # fmt: skip
_GAINS = [Heading("gain from overlap", left=True), Heading("predicted"), Heading("measured")]
_QUALITIES = [
    Heading("", left=True), Heading("Spearman"), Heading("regret of\npredicted best"), Heading("its measured\nrank"),
    Heading("mean\n|error|"), Heading("mean\nerror"), Heading("worst\nerror"),
]  # fmt: skip


def _configuration_cells(rows: Sequence[ComparisonRow]) -> list[list[str]]:
    columns = [
        [row.configuration.name for row in rows],
        *_both([row.step_s for row in rows]),
        [percent(row.step_s.spread, decimals=0) if len(row.configuration.runs) > 1 else NOTHING for row in rows],
        *_both([row.communication_s for row in rows]),
        *_both([row.exposed_s for row in rows]),
    ]
    return [list(cells) for cells in zip(*columns, strict=True)]


def _other_cells(rows: Sequence[ComparisonRow]) -> list[list[str]]:
    columns = [
        [row.configuration.name for row in rows],
        *_both([row.compute_s for row in rows]),
        [NOTHING if row.memory_bytes.predicted is None else show_bytes(row.memory_bytes.predicted) for row in rows],
        [show_bytes(row.memory_bytes.measured) for row in rows],
        [row.verdict.words.partition(":")[0] for row in rows],
    ]
    return [list(cells) for cells in zip(*columns, strict=True)]


def _both(pairs: Sequence[Pair]) -> tuple[list[str], list[str], list[str]]:
    """Predicted, measured, ms, and the error."""
    predicted = seconds_cells([None if pair.predicted is None else pair.predicted / MILLI for pair in pairs])
    measured = seconds_cells([pair.measured / MILLI for pair in pairs])
    return predicted, measured, [signed_percent(pair.error) for pair in pairs]


def _share_cells(shares: Sequence[TermComparison]) -> list[list[str]]:
    columns = [
        [axis_name(one.name) for one in shares],
        [str(one.configurations) for one in shares],
        seconds_cells([one.predicted_s / MILLI for one in shares]),
        seconds_cells([one.measured_s / MILLI for one in shares]),
        [signed_percent(one.predicted_s / one.measured_s - 1.0 if one.measured_s else None) for one in shares],
        [percent(one.mape) for one in shares],
        seconds_cells([one.predicted_exposed_s / MILLI for one in shares]),
        seconds_cells([one.measured_exposed_s / MILLI for one in shares]),
    ]
    return [list(cells) for cells in zip(*columns, strict=True)]


def _gain_cells(one: OverlapSaving) -> list[str]:
    return [one.name, signed_percent(one.predicted), signed_percent(one.measured)]


def _quality_cells(one: Quality) -> list[str]:
    if not one.rows:
        return [one.what, *[NOTHING] * 6]
    return [
        one.what,
        f"{one.spearman:.3f}",
        signed_percent(one.regret),
        str(one.best),
        percent(one.mape),
        signed_percent(one.bias),
        signed_percent(one.worst),
    ]


def _row_json(row: ComparisonRow) -> Json:
    configuration = row.configuration
    pairs = {"step_s": row.step_s, "compute_s": row.compute_s, "communication_s": row.communication_s}
    pairs |= {"exposed_communication_s": row.exposed_s, "memory_bytes": row.memory_bytes}
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


_CHANGES = [
    Heading("", left=True), Heading("configuration", left=True), Heading("quantity", left=True), Heading("baseline"),
    Heading("now"), Heading("change"), Heading("allowed"),
]  # fmt: skip
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
    table: Callable[[list[Heading], list[list[str]]], str],
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
        rows = [_finding_cells(one) for one in sorted(shown, key=lambda one: (not one.failed, -abs(one.change or 0.0)))]
        parts.append(heading(_GATE_TITLES[gate]) + summary + "\n" + (f"\n{table(_CHANGES, rows)}" if rows else ""))
    return "\n".join(part for part in parts if part) + "\n"


def _changed(one: RegressionFinding) -> bool:
    """Whether a change would be seen."""
    return one.change is not None and abs(one.change) >= 0.0005


def _finding_cells(one: RegressionFinding) -> list[str]:
    show: Callable[[float], str] = {"s": show_seconds, "bytes": show_bytes, "share": _three_decimals}[one.unit]
    change = (
        "missing" if one.now is None else NOTHING if one.change is None or one.unit == "share" else f"{one.change:+.2%}"
    )
    return [
        "FAIL" if one.failed else "",
        one.subject,
        one.quantity,
        NOTHING if one.before is None else show(one.before),
        NOTHING if one.now is None else show(one.now),
        change,
        _allowed(one),
    ]


def _three_decimals(value: float) -> str:
    return f"{value:.3f}"


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
            lines = [" ".join(cell for cell in _finding_cells(one)[2:] if cell) for one in wrong]
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
