"""Sections of predicted vs. published measurements: every row is drawn and listed, the worst first."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from axonn_tune.errors import UsageError
from axonn_tune.report.accuracy import (
    MOST_POINTS,
    STEPS,
    ScatterPoint,
    accuracy_sections,
    families_table,
    points_figure,
)
from axonn_tune.report.output import Json
from axonn_tune.validation.published.accuracy import Accuracy, FamilyQuality, Files, evaluate
from axonn_tune.validation.published.measurements import errors_by_group
from tests.unit.report.pages import blocks, titled, values
from tests.unit.report.published import STEPS as STEPS_HEADER
from tests.unit.report.published import evaluated, step


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Accuracy, list[Json]]:
    """A few rows of each kind, and their sections."""
    accuracy, files = evaluated(tmp_path_factory.mktemp("rows"))
    return accuracy, accuracy_sections(accuracy, files, command="axonn-tune validate")


def points(section: Json, title: str = "Predicted vs. measured") -> list[Json]:
    """Traces of a figure that are points."""
    traces = titled(section, "figure", title)["figure"]["data"]
    return [trace for trace in traces if trace["mode"] == "markers"]


def test_every_kind_has_a_section(found: tuple[Accuracy, list[Json]]) -> None:
    """Guards the order of sections, and that the last one says what was read."""
    _, sections = found
    assert [one["title"] for one in sections] == ["Training steps", "Collectives", "GEMMs", "Memory"]
    assert [one["id"] for one in sections] == ["s1", "s2", "s3", "s4"]
    rows = dict(next(blocks(sections[-1], "facts"))["rows"])
    assert rows["command"] == "axonn-tune validate"
    assert "steps.csv, SHA-256 " in rows["steps"]


def test_every_step_is_drawn(found: tuple[Accuracy, list[Json]]) -> None:
    """Guards the figure: measured across, predicted upwards, a trace for each source, and what pointing says."""
    accuracy, sections = found
    known = {one.row.id: one for one in accuracy.steps if one.error is not None}
    drawn = {
        text.partition("<br>")[0]: (trace["name"], x, y, text)
        for trace in points(sections[0])
        for x, y, text in zip(trace["x"], trace["y"], trace["text"], strict=True)
    }
    assert drawn.keys() == known.keys()
    for name, (source, x, y, text) in drawn.items():
        one = known[name]
        assert (source, x, y) == (one.row.dataset, one.row.step_s, one.predicted_s)
        assert f"({one.error:+.1%})" in text
        for words in (one.row.framework, one.layout, "80% interval: "):
            assert words in text
    assert len({trace["marker"]["color"] for trace in points(sections[0])}) == 2


def test_words_of_rows_are_no_markup(found: tuple[Accuracy, list[Json]]) -> None:
    """Guards against names that plotly would take for bold text."""
    (theirs,) = (trace for trace in points(found[1][0]) if trace["name"] == "theirs")
    assert "&lt;b&gt;GPT&lt;/b&gt; &amp; co" in theirs["text"][0]


def test_lines_are_where_they_say(found: tuple[Accuracy, list[Json]]) -> None:
    """Guards the lines of no error and ±25%, and the view of errors."""
    block = titled(found[1][0], "figure", "Predicted vs. measured")
    traces = block["figure"]["data"]
    lines = [trace for trace in traces if trace["mode"] == "lines"]
    shares = [[y / x for x, y in zip(line["x"], line["y"], strict=True)] for line in lines]
    assert shares == [pytest.approx([share] * 2) for share in (1.0, 1.25, 0.75)]
    times, errors = block["choices"]
    for number, trace in enumerate(traces):
        assert times["traces"][str(number)]["y"] == [trace["y"]]
        expected = [100 * (y / x - 1) for x, y in zip(trace["x"], trace["y"], strict=True)]
        assert errors["traces"][str(number)]["y"][0] == pytest.approx(expected, abs=1e-9)
    assert errors["layout"]["yaxis.type"] == "linear"


def test_rows_come_worst_first(found: tuple[Accuracy, list[Json]]) -> None:
    """Guards the table: every predicted row with its numbers, unmeasured ones last, refused ones in their own."""
    accuracy, sections = found
    table = titled(sections[0], "table", "Each row")
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
    refused = titled(sections[0], "table", "Rows without a prediction")
    known = "A100, A800, B200, B300, GB200, GB300, GH200, H100, H200, H800, MI250, V100"
    assert list(zip(values(refused, "id"), values(refused, "why_not"), strict=True)) == [
        ("refused", f"no machine profile has the accelerator 'Abacus': known are {known}")
    ]


def test_errors_are_those_of_the_summary(found: tuple[Accuracy, list[Json]]) -> None:
    """Guards the tables by source, framework and accelerator, the worst mean first and all rows last."""
    accuracy, sections = found
    for what in ("source", "framework", "accelerator"):
        groups = getattr(accuracy.summary, f"by_{what}")
        table = titled(sections[0], "table", f"Errors by {what}")
        names = [name for name in values(table, "name") if name != "all"]
        assert names == sorted(groups, key=lambda name: -groups[name].mape)
        for key in ("rows", "mape", "median", "p90", "bias"):
            assert values(table, key)[: len(names)] == [getattr(groups[name], key) for name in names]
    assert values(titled(sections[0], "table", "Errors by source"), "name")[-1] == "all"


def test_the_family_is_there(found: tuple[Accuracy, list[Json]]) -> None:
    """Guards ranking quality: the figures of the summary."""
    accuracy, sections = found
    (family,) = accuracy.summary.families
    table = titled(sections[0], "table", "Ranking of layouts")
    for key in ("family", "rows", "spearman", "kendall", "regret", "best_rank"):
        assert values(table, key) == [getattr(family, key)]


def test_families_come_worst_first() -> None:
    """Guards the order, by regret and then by correlation, and that an undefined correlation is no number."""
    names = {"good": (0.0, 0.9), "worse": (0.0, 0.2), "worst": (0.3, 0.9), "flat": (0.1, math.nan)}
    made = [FamilyQuality(name, 5, spearman, 0.5, regret, 1) for name, (regret, spearman) in names.items()]
    table = families_table(made)
    assert values(table, "family") == ["worst", "flat", "worse", "good"]
    assert values(table, "spearman") == [0.9, None, 0.2, 0.9]


def test_other_kinds_have_figures_errors_and_reasons(found: tuple[Accuracy, list[Json]]) -> None:
    """Guards collectives and products: points by kind, errors of large ones alone, reasons with their count."""
    accuracy, (_, collectives, products, _) = found
    assert {trace["name"] for trace in points(collectives)} == {"all_reduce", "all_gather"}
    errors = errors_by_group(accuracy.collectives)
    table = titled(collectives, "table", "Errors by group")
    assert values(table, "mape") == [errors[name].mape for name in values(table, "name")]
    assert values(table, "rows") == [1, 1]
    assert values(titled(collectives, "table", "Each row"), "counted").count("no") == 1
    refused = titled(collectives, "table", "Rows without a prediction")
    assert values(refused, "rows") == [1]
    assert values(refused, "why_not") == ["'alltoall' is not used by any layout here"]
    assert [trace["name"] for trace in points(products)] == ["A100-SXM4-80GB"]


def test_shares_of_memory_are_drawn_apart(found: tuple[Accuracy, list[Json]]) -> None:
    """Guards units: bytes and shares never on one axis."""
    accuracy, sections = found
    bytes_of, share = accuracy.memory
    assert [trace["x"] for trace in points(sections[3])] == [[bytes_of.measured]]
    assert [trace["x"] for trace in points(sections[3], "Shares")] == [[share.measured]]
    assert values(titled(sections[3], "table", "Each share"), "measured") == [0.6]


def test_of_many_points_the_worst_stay() -> None:
    """Guards speed: rows that lie on each other are drawn once, as the worst of them, and the note says so."""
    many = [ScatterPoint("one", 1.0 + number * 1e-7, 1.2, str(number)) for number in range(MOST_POINTS)]
    far = ScatterPoint("one", 1.0, 9.0, "far")
    assert len(points_figure([*many[1:], far], STEPS, title="t")["figure"]["data"][0]["x"]) == MOST_POINTS
    block = points_figure([*many, far], STEPS, title="t")
    assert block["figure"]["data"][0]["text"] == ["0", "far"]
    assert f"the worst is drawn: 2 of {MOST_POINTS + 1:,}" in block["note"]


def test_rows_that_only_ask_have_no_figure(tmp_path: Path) -> None:
    """Guards files without measured times: predictions in the table, no errors of nothing."""
    path = tmp_path / "asks.csv"
    path.write_text(STEPS_HEADER + step("asks", measured_s=""), "utf-8")
    files = Files(steps=path)
    (section,) = accuracy_sections(evaluate(files, worst=3), files, command="")
    assert [block["kind"] for block in section["blocks"]] == ["table", "fold"]
    assert {card["value"] for card in section["cards"]} == {"-"}


def test_no_rows_are_no_report(tmp_path: Path) -> None:
    """Guards the message for a file that has a heading alone."""
    path = tmp_path / "empty.csv"
    path.write_text(STEPS_HEADER, "utf-8")
    files = Files(steps=path)
    with pytest.raises(UsageError, match=r"nothing to report: no rows in .*empty\.csv"):
        accuracy_sections(evaluate(files, worst=3), files, command="")
