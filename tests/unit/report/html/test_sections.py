"""Sections of sweeps, comparisons, validations and runs: their numbers are their documents'."""

from __future__ import annotations

import json
import math

import pytest

from axonn_tune.baselines.comparison import compare
from axonn_tune.ranking.inputs import Choices, load_inputs
from axonn_tune.ranking.sweep import sweep
from axonn_tune.report.compare import comparison_json
from axonn_tune.report.html.blocks import Json
from axonn_tune.report.html.contenders import comparison_section
from axonn_tune.report.html.measured import validation_section
from axonn_tune.report.html.one_run import run_section
from axonn_tune.report.html.scaling import sweep_section
from axonn_tune.report.sweep import sweep_document
from axonn_tune.report.validation import validation_document
from axonn_tune.validation.comparison import RunComparison
from tests.unit.report.html.pages import blocks, titled, values
from tests.unit.report.test_terms import summary, term
from tests.unit.validation.made import measurements


def sweep_json(*, weak: bool) -> Json:
    """Two models on 16 to 64 GPUs; the larger does not fit on the fewest."""
    choices = Choices(gpus=16, model="5b")
    points = sweep(choices, models=["5b", "20b"], gpus=(16, 32, 64), batches=(None,), weak=weak)
    return sweep_document(points, weak=weak)


@pytest.mark.parametrize("weak", [False, True])
def test_a_sweep_has_every_point(weak: bool) -> None:
    """Guards the table and the curves of a sweep, and the ideal line."""
    document = sweep_json(weak=weak)
    section = sweep_section(document, identity="s1", source="test")
    table = titled(section, "table", "Every point")
    for key in ("gpus", "efficiency", "global_batch"):
        assert values(table, key) == [point[key] for point in document["points"]]
    for key in ("iteration_s", "tokens_per_s", "mfu", "memory_bytes", "low_s"):
        assert values(table, key) == [(point["config"] or {}).get(key) for point in document["points"]]
    traces = titled(section, "figure", "Scaling")["figure"]["data"]
    drawn = [value for trace in traces if trace["mode"] != "lines" for value in trace["y"]]
    feasible = [point for point in document["points"] if point["feasible"]]
    assert sorted(drawn) == sorted(point["config"]["tokens_per_s"] for point in feasible)


def test_an_ideal_line_grows_with_the_gpus() -> None:
    """Guards the dashed line: throughput of one GPU as at the first point, from the contract's own efficiency."""
    section = sweep_section(sweep_json(weak=False), identity="s1", source="test")
    for trace in titled(section, "figure", "Scaling")["figure"]["data"]:
        if trace["mode"] == "lines":
            per_gpu = [rate / gpus for rate, gpus in zip(trace["y"], trace["x"], strict=True)]
            assert per_gpu == pytest.approx([per_gpu[0]] * len(per_gpu))


def test_a_comparison_has_every_contender() -> None:
    """Guards the comparison: each one's numbers, parts that add up to the step, and the words of the terminal."""
    inputs = load_inputs(Choices(gpus=64, model="20b"))
    document = comparison_json(compare(inputs.problem), inputs)
    section = comparison_section(document, identity="s1", source="test")
    table = titled(section, "table", "Each at its best")
    for key in ("iteration_s", "compute_s", "mfu", "memory_bytes"):
        assert values(table, key) == [(each["prediction"] or {}).get(key) for each in document["contenders"]]
    assert values(table, "gain_of_4d") == [each["gain_of_4d"] for each in document["contenders"]]
    bars = [
        trace for trace in titled(section, "figure", "The step of each")["figure"]["data"] if trace["type"] == "bar"
    ]
    found = [each["prediction"]["iteration_s"] for each in document["contenders"] if each["prediction"]]
    assert [sum(parts) for parts in zip(*(trace["x"] for trace in bars), strict=True)] == pytest.approx(found)
    assert titled(section, "text", "In words")["sentences"] == document["remarks"]


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
    points = titled(section, "figure", "Predicted against measured")["figure"]["data"][0]
    assert points["x"] == [row["step_s"]["measured"] * 1e3 for row in rows] or points["x"] == pytest.approx(
        [row["step_s"]["measured"] * 1e3 for row in rows]
    )
    for place, row in enumerate(rows):
        runs = [run["step_s"] * 1e3 for run in row["runs"]]
        assert points["x"][place] + points["error_x"]["array"][place] == pytest.approx(max(runs))
        assert points["x"][place] - points["error_x"]["arrayminus"][place] == pytest.approx(min(runs))
        if row["high_s"] is not None:
            assert points["y"][place] + points["error_y"]["array"][place] == pytest.approx(row["high_s"] * 1e3)
    items = next(blocks(section, "configurations"))["items"]
    assert [item["title"] for item in items] == [row["name"] for row in rows]


def test_a_validation_claims_no_more_than_was_compared() -> None:
    """Guards the cards: what was not run beside one rank alone is not called sound, and nan is no number."""
    compared = validation_document(RunComparison(measurements()))
    alone = validation_document(RunComparison(measurements().model_copy(update={"serial": None})))
    assert _cards(compared)["training"] == ("sound", "against one rank alone: equal")
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
    found = summary(term("block"), term("head", predicted_s=None, predicted_exposed_s=None))
    section = run_section(found, identity="s1", source="test")
    table = titled(section, "table", "Each collective")
    assert values(table, "predicted_s") == [0.001, None]
    assert values(table, "measured_s") == [0.002, 0.002]
    notes = {card["label"]: card["note"] for card in section["cards"]}
    assert notes["exposed"] == "not predicted"
    assert notes["step"] == "predicted 200 ms, ratio 1.5"
