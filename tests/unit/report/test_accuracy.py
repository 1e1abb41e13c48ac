"""Sections of predicted vs. published measurements: every row is drawn and listed, the worst first."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from axonn_tune.errors import UsageError
from axonn_tune.report.accuracy import accuracy_section, families_table
from axonn_tune.report.output import Json
from axonn_tune.report.pairs import MOST_POINTS, Point, pairs_figure
from axonn_tune.validation.published.accuracy import Accuracy, evaluate
from axonn_tune.validation.quality import Quality
from tests.unit.report.pages import blocks, titled, values
from tests.unit.report.published import STEPS as STEPS_HEADER
from tests.unit.report.published import evaluated, step


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Accuracy, Json]:
    """A few rows, and their section."""
    accuracy = evaluated(tmp_path_factory.mktemp("rows"))
    return accuracy, accuracy_section(accuracy, command="axonn-tune accuracy")


def points(section: Json, title: str = "Predicted vs. measured") -> list[Json]:
    """Traces of a figure that are points."""
    traces = titled(section, "figure", title)["figure"]["data"]
    return [trace for trace in traces if trace["mode"] == "markers"]


def test_what_was_read_is_said(found: tuple[Accuracy, Json]) -> None:
    """Guards provenance: the command, and the file with its hash."""
    rows = dict(next(blocks(found[1], "facts"))["rows"])
    assert rows["command"] == "axonn-tune accuracy"
    assert "steps.csv, SHA-256 " in rows["steps"]


def test_every_step_is_drawn(found: tuple[Accuracy, Json]) -> None:
    """Guards the figure: measured across, predicted upwards, a trace for each source, and what pointing says."""
    accuracy, section = found
    known = {one.row.id: one for one in accuracy.steps if one.error is not None}
    drawn = {
        text.partition("<br>")[0]: (trace["name"], x, y, text)
        for trace in points(section)
        for x, y, text in zip(trace["x"], trace["y"], trace["text"], strict=True)
    }
    assert drawn.keys() == known.keys()
    for name, (source, x, y, text) in drawn.items():
        one = known[name]
        assert (source, x, y) == (one.row.dataset, one.row.step_s, one.predicted_s)
        assert f"({one.error:+.1%})" in text
        for words in (one.row.framework, one.layout, "80% interval: "):
            assert words in text
    assert len({trace["marker"]["color"] for trace in points(section)}) == 2


def test_words_of_rows_are_no_markup(found: tuple[Accuracy, Json]) -> None:
    """Guards against names that plotly would take for bold text."""
    (theirs,) = (trace for trace in points(found[1]) if trace["name"] == "theirs")
    assert "&lt;b&gt;GPT&lt;/b&gt; &amp; co" in theirs["text"][0]


def test_rows_come_worst_first(found: tuple[Accuracy, Json]) -> None:
    """Guards the table: every predicted row with its numbers, unmeasured ones last, refused ones in their own."""
    accuracy, section = found
    table = titled(section, "table", "Each row")
    by_name = {one.row.id: one for one in accuracy.steps}
    names = values(table, "id")
    assert sorted(names) == sorted(one.row.id for one in accuracy.steps if one.predicted_s is not None)
    assert names[-1] == "unmeasured"
    sizes = values(table, "size")
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
    assert sizes[-1] is None
    for key, attribute in (("predicted", "predicted_s"), ("error", "error"), ("low", "low_s"), ("high", "high_s")):
        assert values(table, key) == [getattr(by_name[name], attribute) for name in names]
    assert {one["column"] for one in table["filters"]} >= {"source"}
    refused = titled(section, "table", "Rows without a prediction")
    known = "A100, A800, B200, B300, GB200, GB300, GH200, H100, H200, H800, MI250, V100"
    assert list(zip(values(refused, "id"), values(refused, "why_not"), strict=True)) == [
        ("refused", f"no machine profile has the accelerator 'Abacus': known are {known}")
    ]


def test_families_come_worst_first() -> None:
    """Guards the order, by regret and then by correlation, and that an undefined correlation is no number."""
    names = {"good": (0.0, 0.9), "worse": (0.0, 0.2), "worst": (0.3, 0.9), "flat": (0.1, math.nan)}
    table = families_table({name: Quality(5, spearman=rank, regret=cost) for name, (cost, rank) in names.items()})
    assert values(table, "name") == ["worst", "flat", "worse", "good"]
    assert values(table, "spearman") == [0.9, None, 0.2, 0.9]


def test_of_many_points_the_worst_stay() -> None:
    """Guards speed: rows that lie on each other are drawn once, as the worst of them, and the note says so."""
    many = [Point("one", 1.0 + number * 1e-7, 1.2, str(number)) for number in range(MOST_POINTS)]
    far = Point("one", 1.0, 9.0, "far")
    assert len(pairs_figure("t", [*many[1:], far], bars=False)["figure"]["data"][0]["x"]) == MOST_POINTS
    block = pairs_figure("t", [*many, far], bars=False)
    assert block["figure"]["data"][0]["text"] == ["0", "far"]
    assert f"the worst is drawn: 2 of {MOST_POINTS + 1:,}" in block["note"]


def test_rows_that_only_ask_have_no_figure(tmp_path: Path) -> None:
    """Guards files without measured times: predictions in the table, no errors of nothing."""
    path = tmp_path / "asks.csv"
    path.write_text(STEPS_HEADER + step("asks", measured_s=""), "utf-8")
    section = accuracy_section(evaluate(path), command="")
    assert [block["kind"] for block in section["blocks"]] == ["table", "fold"]
    assert {card["value"] for card in section["cards"]} == {"-"}


def test_no_rows_are_no_report(tmp_path: Path) -> None:
    """Guards the message for a file that has a heading alone."""
    path = tmp_path / "empty.csv"
    path.write_text(STEPS_HEADER, "utf-8")
    with pytest.raises(UsageError, match=r"nothing to report: no rows in .*empty\.csv"):
        accuracy_section(evaluate(path), command="")
