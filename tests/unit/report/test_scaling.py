"""Sections of sweeps and comparisons: their numbers are their documents'."""

from __future__ import annotations

import pytest

from axonn_tune.ranking.compare import compare
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.ranking.sweep import sweep
from axonn_tune.report.output import Json
from axonn_tune.report.scaling import comparison_json, comparison_section, sweep_document, sweep_section
from axonn_tune.request import Request
from axonn_tune.units import show_seconds
from tests.unit.report.pages import titled, values


def sweep_json(*, weak: bool) -> Json:
    """Two models on 16 to 64 GPUs; the larger does not fit on the fewest."""
    points = sweep(Request(weak=weak), models=["5b", "20b"], gpus=(16, 32, 64), batches=(None,))
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


def test_curves_have_the_interval_of_the_step() -> None:
    """Guards whiskers of a sweep: the contract's interval in each view; none on efficiency, where it cancels."""
    document = sweep_json(weak=False)
    block = titled(sweep_section(document, identity="s1", source="test"), "figure", "Scaling")
    line = [point["config"] for point in document["points"] if point["feasible"] and point["model"] == "5b"]
    views = {choice["label"]: choice["traces"]["0"] for choice in block["choices"]}
    steps = views["step, s"]
    ends = [step - less for step, less in zip(steps["y"][0], steps["error_y.arrayminus"][0], strict=True)]
    assert ends == pytest.approx([one["low_s"] for one in line])
    rates = views["tokens/s"]
    most = [rate + more for rate, more in zip(rates["y"][0], rates["error_y.array"][0], strict=True)]
    assert most == pytest.approx([one["tokens_per_s"] * one["iteration_s"] / one["low_s"] for one in line])
    assert set(views["efficiency, %"]["error_y.array"][0]) == {0.0}


def test_an_ideal_line_grows_with_the_gpus() -> None:
    """Guards the dashed line: throughput of one GPU as at the first point, from the contract's own efficiency."""
    section = sweep_section(sweep_json(weak=False), identity="s1", source="test")
    for trace in titled(section, "figure", "Scaling")["figure"]["data"]:
        if trace["mode"] == "lines":
            per_gpu = [rate / gpus for rate, gpus in zip(trace["y"], trace["x"], strict=True)]
            assert per_gpu == pytest.approx([per_gpu[0]] * len(per_gpu))


def test_a_comparison_has_every_contender() -> None:
    """Guards the comparison: each one's numbers, parts that add up to the step, and the words of the terminal."""
    inputs = load_inputs(Request("20b", gpus=64))
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
