"""What has changed against a baseline: for a terminal, as Markdown, as JUnit XML, as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from xml.etree import ElementTree

from axonn_tune.report.accuracy import to_json
from axonn_tune.report.table import Heading, markdown_table, text_table
from axonn_tune.units import counted, show_bytes, show_seconds
from axonn_tune.validation.regression import GATES, Gate, Regression, RegressionFinding

SCHEMA = "axonn-tune/regression/1"
_WIDTH = 100
_HEADINGS = [
    Heading("", left=True), Heading("configuration", left=True), Heading("quantity", left=True), Heading("baseline"),
    Heading("now"), Heading("change"), Heading("allowed"),
]  # fmt: skip
_TITLES: dict[Gate, str] = {
    "predictions": "Predictions, which may not move",
    "measurements": "Measured times, which may not grow",
    "accuracy": "Accuracy, which has a floor",
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
        return f"{counted(len(found.findings), 'number')} compared, none beyond its tolerance"
    parts = [f"{sum(one.failed for one in found.of(gate))} of {len(found.of(gate))} {gate}" for gate in GATES]
    return f"failed: {', '.join(part for part in parts if not part.startswith('0 '))}"


def _render(
    found: Regression,
    table: Callable[[list[Heading], list[list[str]]], str],
    *,
    heading: Callable[[str], str],
) -> str:
    parts = ["\n".join(textwrap.fill(f"Warning: {one}", width=_WIDTH) for one in found.warnings)]
    for gate in GATES:
        findings = found.of(gate)
        if not findings:
            continue
        shown = [one for one in findings if one.failed or gate == "accuracy" or _changed(one)]
        failed = sum(one.failed for one in findings)
        summary = f"{counted(len(findings), 'number')} compared, {failed} beyond what is allowed."
        rows = [_cells(one) for one in sorted(shown, key=lambda one: (not one.failed, -abs(one.change or 0.0)))]
        parts.append(heading(_TITLES[gate]) + summary + "\n" + (f"\n{table(_HEADINGS, rows)}" if rows else ""))
    return "\n".join(part for part in parts if part) + "\n"


def _changed(one: RegressionFinding) -> bool:
    """Whether a change would be seen."""
    return one.change is not None and abs(one.change) >= 0.0005


def _cells(one: RegressionFinding) -> list[str]:
    show: Callable[[float], str] = {"s": show_seconds, "bytes": show_bytes, "share": _share}[one.unit]
    change = (
        "missing" if one.now is None else "-" if one.change is None or one.unit == "share" else f"{one.change:+.2%}"
    )
    return [
        "FAIL" if one.failed else "",
        one.subject,
        one.quantity,
        "-" if one.before is None else show(one.before),
        "-" if one.now is None else show(one.now),
        change,
        _allowed(one),
    ]


def _share(value: float) -> str:
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
            lines = [" ".join(cell for cell in _cells(one)[2:] if cell) for one in wrong]
            failure = ElementTree.SubElement(case, "failure", message=", ".join(one.quantity for one in wrong))
            failure.text = "\n".join(lines)


def regression_json(found: Regression) -> str:
    """Every number."""
    return to_json(
        {
            "schema": SCHEMA,
            "passed": not found.failures,
            "warnings": list(found.warnings),
            "findings": [{**asdict(one), "change": one.change} for one in found.findings],
        }
    )
