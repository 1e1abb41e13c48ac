"""Configurations that were run, predicted beside measured: as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from axonn_tune.report.accuracy import to_json
from axonn_tune.report.table import Heading, seconds_cells, text_table
from axonn_tune.units import MILLI, counted, show_bytes
from axonn_tune.validation.comparison import (
    ComparisonRow,
    OverlapSaving,
    Pair,
    Quality,
    RunComparison,
    TermComparison,
    paper_quality,
)

SCHEMA = "axonn-tune/validation/1"
_OF_RUN = {
    "began", "load", "step_s", "compute_s", "communication_s", "exposed_communication_s", "memory_bytes",
}  # fmt: skip
_WIDTH = 100


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
    notes = "\n".join(textwrap.fill(line, width=_WIDTH, subsequent_indent="  ") for line in notes_of(comparison))
    return "\n".join([*parts, notes]) + "\n"


def qualities(comparison: RunComparison) -> list[Quality]:
    """Ours, then that of the paper's rule."""
    return [*comparison.qualities, paper_quality(comparison.measurements)]


def validation_json(comparison: RunComparison) -> str:
    """The same as JSON."""
    return to_json(validation_document(comparison))


def validation_document(comparison: RunComparison) -> dict[str, Any]:
    """The same and what it was made from, by the schema `axonn-tune/validation/1`."""
    measurements = comparison.measurements
    return {
        "schema": SCHEMA,
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
        f"{counted(runs, 'run')} each in turn, medians; {place.network}; predicted by {measurements.machine.name}."
    )
    yield "An error is predicted over measured, less one: below zero the prediction is too short."
    agreements = [row.verdict.agreement for row in comparison.rows]
    if measurements.serial is not None:
        parts = [f"{agreements.count(one)} {one}" for one in dict.fromkeys(agreements)]
        yield f"Losses and gradient norms against one rank alone: {', '.join(parts)}."
    if comparison.blame:
        yield f"Training is {comparison.blame}." if comparison.blame.startswith("wrong") else f"{comparison.blame}."
    for row in comparison.rows:
        if row.verdict.agreement == "wrong":
            yield f"{row.configuration.name}: {row.verdict.words}."
        for line in row.differs:
            yield f"{row.configuration.name}: {line}"
    if not any(row.differs for row in comparison.rows):
        yield "Every rank sent what the program says, in every run."


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
_GAINS = [Heading("gain of overlapping", left=True), Heading("predicted"), Heading("measured")]
_QUALITIES = [
    Heading("", left=True), Heading("Spearman"), Heading("regret of\npredicted best"), Heading("its place"),
    Heading("mean\n|error|"), Heading("mean\nerror"), Heading("worst\nerror"),
]  # fmt: skip


def _configuration_cells(rows: Sequence[ComparisonRow]) -> list[list[str]]:
    columns = [
        [row.configuration.name for row in rows],
        *_both([row.step_s for row in rows]),
        [f"{row.step_s.spread:.0%}" if len(row.configuration.runs) > 1 else "-" for row in rows],
        *_both([row.communication_s for row in rows]),
        *_both([row.exposed_s for row in rows]),
    ]
    return [list(cells) for cells in zip(*columns, strict=True)]


def _other_cells(rows: Sequence[ComparisonRow]) -> list[list[str]]:
    columns = [
        [row.configuration.name for row in rows],
        *_both([row.compute_s for row in rows]),
        ["-" if row.memory_bytes.predicted is None else show_bytes(row.memory_bytes.predicted) for row in rows],
        [show_bytes(row.memory_bytes.measured) for row in rows],
        [row.verdict.words.partition(":")[0] for row in rows],
    ]
    return [list(cells) for cells in zip(*columns, strict=True)]


def _both(pairs: Sequence[Pair]) -> tuple[list[str], list[str], list[str]]:
    """Predicted, measured, ms, and the error."""
    predicted = seconds_cells([None if pair.predicted is None else pair.predicted / MILLI for pair in pairs])
    measured = seconds_cells([pair.measured / MILLI for pair in pairs])
    return predicted, measured, [percent(pair.error) for pair in pairs]


def percent(value: float | None) -> str:
    """A relative error for a person: `+3.1%`."""
    return "-" if value is None or value != value else f"{value:+.1%}"


def _share_cells(shares: Sequence[TermComparison]) -> list[list[str]]:
    columns = [
        [one.name for one in shares],
        [str(one.configurations) for one in shares],
        seconds_cells([one.predicted_s / MILLI for one in shares]),
        seconds_cells([one.measured_s / MILLI for one in shares]),
        [percent(one.predicted_s / one.measured_s - 1.0 if one.measured_s else None) for one in shares],
        [f"{one.mape:.1%}" for one in shares],
        seconds_cells([one.predicted_exposed_s / MILLI for one in shares]),
        seconds_cells([one.measured_exposed_s / MILLI for one in shares]),
    ]
    return [list(cells) for cells in zip(*columns, strict=True)]


def _gain_cells(one: OverlapSaving) -> list[str]:
    return [one.name, percent(one.predicted), percent(one.measured)]


def _quality_cells(one: Quality) -> list[str]:
    if not one.rows:
        return [one.what, *["-"] * 6]
    return [
        one.what,
        f"{one.spearman:.3f}",
        percent(one.regret),
        str(one.best),
        f"{one.mape:.1%}",
        percent(one.bias),
        percent(one.worst),
    ]


def _row_json(row: ComparisonRow) -> dict[str, Any]:
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
