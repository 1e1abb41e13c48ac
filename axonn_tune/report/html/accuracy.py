"""Predictions against measurements of others as sections: steps, collectives, matrix products, memory."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from html import escape

from axonn_tune import __version__
from axonn_tune.errors import UsageError
from axonn_tune.published.accuracy import Accuracy, Files
from axonn_tune.published.measurements import RELATIVE, Evaluation, errors_by_group
from axonn_tune.published.quality import Errors
from axonn_tune.published.rows import SHIPPED
from axonn_tune.published.steps import PredictedStep
from axonn_tune.report.html import accuracy_tables as tables
from axonn_tune.report.html.accuracy_figure import MEMORY, SHARES, STEPS, TIMES, Point, Unit, points_figure
from axonn_tune.report.html.blocks import Json, card, section
from axonn_tune.report.html.provenance import origin_fold

_FIGURE = "Predicted against measured"


@dataclass(frozen=True)
class _Kind:
    """Rows that are not steps. counted: over which of them errors are; series: what of a group the color is for."""

    title: str
    judged: tuple[Evaluation, ...]
    counted: str
    unit: Unit
    series: Callable[[str], str]


def accuracy_sections(found: Accuracy, files: Files, *, command: str) -> list[Json]:
    """A section for each kind of which there are rows, the last with what was read; UsageError if there are none."""
    sections = [_steps_section(found)] if found.steps else []
    for kind in _kinds(found):
        if kind.judged:
            sections.append(_kind_section(kind, f"s{len(sections) + 1}"))
    read = list(_read(files))
    if not sections:
        raise UsageError(f"nothing to report: no rows in {', '.join(words for _, words in read)}")
    sections[-1]["blocks"].append(origin_fold([("axonn-tune", __version__), ("command", command), *read]))
    return sections


def _read(files: Files) -> Iterator[tuple[str, str]]:
    """Which files were read, and their hashes."""
    chosen = files.or_shipped()
    for each in fields(chosen):
        path = getattr(chosen, each.name)
        if path is not None:
            where = f"{path.name}, shipped with the tool" if path.parent == SHIPPED else str(path)
            yield each.name, f"{where}, SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()}"


def _kinds(found: Accuracy) -> Iterator[_Kind]:
    yield _Kind("Collectives", found.collectives, "rows of 1 MiB and more", TIMES, _collective)
    yield _Kind("Matrix products", found.gemms, "rows of 10 GFLOP and more", TIMES, _accelerator)
    yield _Kind("Memory", found.memory, "all rows", MEMORY, str)


def _collective(group: str) -> str:
    """Of a group `system, collective`."""
    return group.rpartition(", ")[2]


def _accelerator(group: str) -> str:
    """Of a group `accelerator, layout`."""
    return group.partition(", ")[0]


def _steps_section(found: Accuracy) -> Json:
    """Training steps."""
    steps, summary = found.steps, found.summary
    points = [_step_point(one) for one in steps if one.error is not None]
    groups: Sequence[tuple[str, Mapping[str, Errors]]] = (
        ("source", {**summary.by_source, "all": summary.errors}),
        ("framework", summary.by_framework),
        ("accelerator", summary.by_accelerator),
    )
    blocks = [
        *([points_figure(points, STEPS, title=_FIGURE)] if points else []),
        *(tables.errors_table(found, what=what, title=f"Errors by {what}") for what, found in groups if points),
        *([tables.families_table(summary.families)] if summary.families else []),
        *([tables.steps_table(steps)] if summary.predicted else []),
        *([tables.refused_steps_table(summary.not_predicted)] if summary.not_predicted else []),
    ]
    lead = [
        f"{summary.predicted:,} of {summary.rows:,} rows are predicted, from what they say: model, layout, software, "
        "accelerator. Errors are predicted over measured, less 1."
    ]
    return section("s1", "Training steps", lead=lead, cards=_step_cards(found), blocks=blocks)


def _step_cards(found: Accuracy) -> list[Json]:
    summary = found.summary
    return [
        *_error_cards(summary.errors),
        card("80% intervals hold", _percent(summary.coverage, decimals=0), note="of the measured times"),
        card("Spearman", "-" if summary.spearman is None else f"{summary.spearman:.3f}", note="mean over families"),
        card("regret", _percent(summary.regret), note="mean over families"),
        card("best in top 5", _percent(summary.best_in_top_5, decimals=0), note="of the families"),
        *(
            card(f"mean without {kind}", _percent(one.errors.mape), note=f"by fits without a row's {kind}")
            for kind, one in found.without.items()
        ),
    ]


def _error_cards(errors: Errors) -> list[Json]:
    return [
        card("mean |error|", _percent(errors.mape), note=f"of {errors.rows:,} rows"),
        card("median |error|", _percent(errors.median), note=f"90% within {_percent(errors.p90)}"),
    ]


def _percent(value: float | None, *, decimals: int = 1) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{decimals}%}"


def _step_point(one: PredictedStep) -> Point:
    """A step with what pointing at it says."""
    row, configuration = one.row, one.configuration
    assert configuration is not None, row.id
    assert one.predicted_s is not None, row.id
    assert row.step_s, row.id
    words = [
        row.id,
        f"{row.framework}, {row.model} on {row.gpus:,} {row.gpu}",
        f"{one.layout}, micro-batch {configuration.micro_batch}, recomputation {configuration.recompute}",
        _both(row.step_s, one.predicted_s, STEPS),
    ]
    if one.low_s is not None and one.high_s is not None:
        words.append(f"80% interval: {STEPS.show(one.low_s)} to {STEPS.show(one.high_s)}")
    return Point(row.dataset, row.step_s, one.predicted_s, _said(words))


def _both(measured: float, predicted: float, unit: Unit) -> str:
    error = predicted / measured - 1.0
    return f"measured {unit.show(measured)}, predicted {unit.show(predicted)} ({error:+.1%})"


def _said(lines: Sequence[str]) -> str:
    """Lines of what is said of a point: words of a file are no markup."""
    return "<br>".join(escape(line, quote=False) for line in lines)


def _kind_section(kind: _Kind, identity: str) -> Json:
    """Rows of another kind; shares among them have a figure and a table of their own."""
    parts = [part for part in _parts(kind) if part.rows]
    errors = errors_by_group(kind.judged)
    note = f"Counted: {kind.counted}."
    refused = tables.reasons_table(kind.judged)
    blocks = [
        *(figure for part in parts for figure in _figures(part, kind)),
        *(
            [tables.errors_table(errors, what="group", title="Errors by group", note=note)]
            if errors["all"].rows
            else []
        ),
        *(
            tables.judged_table(part.rows, part.unit, identity=f"{identity}-rows-{number}", title=part.table)
            for number, part in enumerate(parts, start=1)
        ),
        *([refused] if refused else []),
    ]
    predicted = sum(one.predicted is not None for one in kind.judged)
    lead = [f"{predicted:,} of {len(kind.judged):,} rows are predicted. Errors are those of {kind.counted}."]
    return section(identity, kind.title, lead=lead, cards=_error_cards(errors["all"]), blocks=blocks)


@dataclass(frozen=True)
class _Part:
    """Predicted rows in one unit, and what their figure and table are called."""

    rows: Sequence[Evaluation]
    unit: Unit
    figure: str
    table: str


def _parts(kind: _Kind) -> Iterator[_Part]:
    predicted = [one for one in kind.judged if one.predicted is not None]
    shares = [one for one in predicted if kind.unit is MEMORY and one.group == RELATIVE]
    yield _Part([one for one in predicted if one not in shares], kind.unit, _FIGURE, tables.EACH)
    yield _Part(shares, SHARES, "Shares, predicted against measured", "Each share")


def _figures(part: _Part, kind: _Kind) -> Iterator[Json]:
    """The figure of rows that were measured too, if there are any."""
    points = [
        Point(
            kind.series(one.group),
            one.measured,
            one.predicted,
            _said([f"{one.id}: {one.group}", _both(one.measured, one.predicted, part.unit)]),
        )
        for one in part.rows
        if one.measured and one.predicted
    ]
    if points:
        yield points_figure(points, part.unit, title=part.figure)
