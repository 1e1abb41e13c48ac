"""Sections of validations and runs: their numbers are their documents'."""

from __future__ import annotations

import json
import math

import pytest

from axonn_tune.report.output import Json
from axonn_tune.report.run import run_section
from axonn_tune.report.validation import validation_document, validation_section
from axonn_tune.validation.comparison import RunComparison
from tests.unit.report.pages import blocks, titled, values
from tests.unit.report.test_run import summary, term
from tests.unit.validation.made import measurements


def validated() -> Json:
    """Configurations measured at 1, 1.1, 1.2… times what was predicted, three runs each."""
    found = measurements(lambda number: 1.0 + 0.1 * number, runs=3)
    return json.loads(json.dumps(validation_document(RunComparison(found))))


def test_a_validation_has_both_sides_of_everything() -> None:
    """Guards predicted against measured: table, points and their intervals, details of each configuration."""
    document = validated()
    section = validation_section(document, identity="s1", source="test")
    rows = document["configurations"]
    table = titled(section, "table", "Each configuration")
    for key in ("step_s", "communication_s", "compute_s", "memory_bytes"):
        for side in ("predicted", "measured", "error"):
            assert values(table, f"{key}.{side}") == [row[key][side] for row in rows]
    traces = titled(section, "figure", "Predicted vs. measured")["figure"]["data"]
    points = next(trace for trace in traces if trace["name"] == "step")
    for place, row in enumerate(rows):
        step = row["step_s"]
        assert (points["x"][place], points["y"][place]) == (step["measured"], step["predicted"])
        assert points["error_x"]["array"][place] == pytest.approx(step["spread"] * step["measured"] / 2.0)
        if step["high"] is not None:
            assert points["y"][place] + points["error_y"]["array"][place] == pytest.approx(step["high"])
    # On CPUs the peak is a process' resident set, with Python and Gloo in it.
    assert {row["memory_bytes"]["error"] for row in rows} == {None}
    assert all(row["memory_bytes"]["measured"] > 0 for row in rows)
    items = next(blocks(section, "configurations"))["items"]
    assert [item["title"] for item in items] == [row["name"] for row in rows]


def test_a_validation_claims_no_more_than_was_compared() -> None:
    """Guards the cards: what was not compared with a single rank is not called sound, and nan is no number."""
    compared = validation_document(RunComparison(measurements()))
    alone = validation_document(RunComparison(measurements().model_copy(update={"serial": None})))
    assert _cards(compared)["training"] == ("sound", "vs. a single rank: equal")
    assert _cards(alone)["training"][0] == "not compared"
    nothing = {"best": 0, **dict.fromkeys(("regret", "mape", "worst", "bias", "spearman"), math.nan)}
    alone["quality"]["step"].update(nothing)
    found = _cards(alone)
    assert (found["predicted best"][0], found["regret"][0]) == ("-", "-")
    assert found["step, mean |error|"] == ("-", "worst -")


def _cards(document: Json) -> dict[str, tuple[str, str]]:
    """Value and note of each card."""
    section = validation_section(document, identity="s1", source="test")
    return {card["label"]: (card["value"], card["note"]) for card in section["cards"]}


def test_a_run_has_both_sides_of_every_term() -> None:
    """Guards the section of a run folder, and that what was not predicted is not made up."""
    found = summary(term("block"), term("head", seconds=None, exposed_s=None))
    section = run_section(found, identity="s1", source="test")
    table = titled(section, "table", "Each collective")
    assert values(table, "predicted_s") == [0.001, None]
    assert values(table, "measured_s") == [0.002, 0.002]
    notes = {card["label"]: card["note"] for card in section["cards"]}
    assert notes["exposed communication"] == "not predicted"
    assert notes["step"] == "predicted 200 ms, ratio 1.5"
