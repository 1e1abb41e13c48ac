"""Predictions against published measurements, as text and as JSON."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from axonn_tune.published.accuracy import Accuracy
from axonn_tune.published.cases import framework_of
from axonn_tune.published.measurements import Evaluation, errors_by_group
from axonn_tune.published.quality import Errors, StepSummary
from axonn_tune.published.steps import LeftOut, PredictedStep
from axonn_tune.report.table import Heading, text_table

SCHEMA = "axonn-tune/accuracy/1"


def document(found: Accuracy) -> dict[str, Any]:
    """Everything, as JSON: `rows` are the steps; each other kind has a summary and rows of its own."""
    kinds = {"collectives": found.collectives, "gemm": found.gemms, "memory": found.memory}
    return {
        "schema": SCHEMA,
        "summary": {
            **step_summary(found.summary),
            **{f"without_{kind}": step_summary(summary) for kind, summary in found.without.items()},
        },
        "rows": step_rows(found.steps),
        **{name: _judged(judged) for name, judged in kinds.items() if judged},
    }


def _judged(judged: tuple[Evaluation, ...]) -> dict[str, Any]:
    return {
        "summary": {name: asdict(errors) for name, errors in errors_by_group(judged).items()},
        "rows": [
            {"id": one.id, "predicted": one.predicted, "measured": one.measured, "why_not": one.why_not or None}
            for one in judged
        ],
    }


def text(found: Accuracy) -> str:
    """Everything, for a person."""
    parts = [steps_text(found.summary, found.without)] if found.steps else []
    for title, judged in (
        ("collectives of 1 MiB and more", found.collectives),
        ("matrix products of 10 GFLOP and more", found.gemms),
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


def step_rows(predictions: tuple[PredictedStep, ...]) -> list[dict[str, Any]]:
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


def step_summary(summary: StepSummary) -> dict[str, Any]:
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


def to_json(content: dict[str, Any]) -> str:
    """JSON text, nan as null."""
    return json.dumps(_plain(content), indent=1, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def steps_text(summary: StepSummary, without: Mapping[LeftOut, StepSummary]) -> str:
    """Errors by source, families, worst rows first, and what was not predicted; beside them those of left-out rows."""
    parts = []
    if summary.errors.rows:
        left_out = [(kind, _with_all(one)) for kind, one in without.items()]
        parts += [_errors_table("source", _with_all(summary), left_out), _ranking_table(summary, without)]
        parts.append(_steps_table("worst rows", summary.worst))
    parts.append(_interleaving_table(summary.of_unknown_interleaving))
    parts.append(_steps_table("rows without a time", [one for one in summary.not_measured if one.predicted_s]))
    unknown = sorted({one.row.framework for one in summary.of_unknown_software})
    parts += [f"not known, priced as the mean of all known software: {name or 'no framework'}" for name in unknown]
    parts += [f"not predicted: {one.row.id}: {one.why_not}" for one in summary.not_predicted]
    return "\n".join(part for part in parts if part) + "\n"


def _with_all(summary: StepSummary) -> dict[str, Errors]:
    return {**summary.by_source, "all": summary.errors}


def _errors_table(
    title: str, groups: dict[str, Errors], left_out: Sequence[tuple[LeftOut, dict[str, Errors]]] = ()
) -> str:
    """Errors by group; of `left_out` mean and median too, by fits without a row's family or source."""
    headings = [Heading(title, left=True), *map(Heading, ("rows", "mean", "median", "90%", "bias"))]
    headings += [Heading(f"without\n{kind}, {what}") for kind, _ in left_out for what in ("mean", "median")]
    rows = [
        [
            *(name, f"{one.rows:,}", f"{one.mape:.1%}", f"{one.median:.1%}", f"{one.p90:.1%}", f"{one.bias:+.1%}"),
            *(cell for _, other in left_out for cell in _mean_and_median(other.get(name))),
        ]
        for name, one in groups.items()
    ]
    return text_table(headings, rows)


def _mean_and_median(errors: Errors | None) -> tuple[str, str]:
    """Of a group without left-out rows nothing."""
    return (f"{errors.mape:.1%}", f"{errors.median:.1%}") if errors else ("-", "-")


def _ranking_table(summary: StepSummary, without: Mapping[LeftOut, StepSummary]) -> str:
    """How well layouts are ranked within families, and what intervals hold."""
    if not summary.families:
        return ""
    headings = [Heading("families of\n5 rows or more", left=True), Heading("families"), Heading("mean\nSpearman")]
    headings += [Heading("mean\nregret"), Heading("best in\ntop 5"), Heading("80% intervals\nhold")]
    named = {"all rows": summary, **{f"without {kind}": one for kind, one in without.items()}}
    rows = [
        [
            *(name, str(len(one.families)), f"{one.spearman:.3f}", f"{one.regret:.1%}"),
            *(f"{one.best_in_top_5:.0%}", f"{one.coverage:.0%}"),
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
    name = one.row.id if one.plain_s is None else f"{one.row.id}*"
    measured = "-" if one.row.step_s is None else f"{one.row.step_s:.3f}"
    interval = "-" if one.low_s is None or one.high_s is None else f"{one.low_s:.3f} to {one.high_s:.3f}"
    error = "-" if one.error is None else f"{one.error:+.1%}"
    return [
        *(name, one.row.framework, framework_of(one.row).software, one.row.model, one.layout),
        *(measured, f"{one.predicted_s:.3f}", interval, error),
    ]
