"""Sections of sweeps and comparisons: their numbers are their documents'."""

from __future__ import annotations

import pytest

from axonn_tune.ranking.compare import compare
from axonn_tune.ranking.inputs import Choices, load_inputs
from axonn_tune.ranking.sweep import sweep
from axonn_tune.report.output import Json
from axonn_tune.report.scaling import comparison_json, comparison_section, sweep_document, sweep_section
from axonn_tune.units import show_seconds
from tests.unit.report.pages import titled, values


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


def test_a_comparison_has_every_contender() -> None:
    """Guards the comparison: each one's numbers, parts that add up to the step, and the words of the terminal."""
    inputs = load_inputs(Choices(gpus=64, model="20b"))
    document = comparison_json(compare(inputs.problem), inputs)
    section = comparison_section(document, identity="s1", source="test")
    table = titled(section, "table", "Each strategy at its best")
    for key in ("iteration_s", "compute_s", "mfu", "memory_bytes"):
        assert values(table, key) == [(each["prediction"] or {}).get(key) for each in document["contenders"]]
    assert values(table, "gain_of_4d") == [each["gain_of_4d"] for each in document["contenders"]]
    bars = [
        trace
        for trace in titled(section, "figure", "Step time by strategy")["figure"]["data"]
        if trace["type"] == "bar"
    ]
    found = [each["prediction"]["iteration_s"] for each in document["contenders"] if each["prediction"]]
    assert [sum(parts) for parts in zip(*(trace["x"] for trace in bars), strict=True)] == pytest.approx(found)
    assert titled(section, "text", "In words")["sentences"] == document["remarks"]
    (verdict,) = section["verdict"]
    assert verdict in document["remarks"][0], "the terminal's own"
    first = document["contenders"][0]
    step_s = first["prediction"]["iteration_s"]
    assert f"{first['name']} has the shortest step, {show_seconds(step_s)} (80%: " in verdict
    assert section["subtitle"].startswith("A100-SXM4-40GB · 8,192 sequences of 2,048 tokens · bf16")
    figure = titled(section, "figure", "Step time by strategy")["figure"]
    _, whiskers = [trace for trace in figure["data"] if trace.get("name") == "80% interval"]
    lows = [x - less for x, less in zip(whiskers["x"], whiskers["error_x"]["arrayminus"], strict=True)]
    assert lows == pytest.approx([one["prediction"]["low_s"] for one in document["contenders"] if one["prediction"]])
