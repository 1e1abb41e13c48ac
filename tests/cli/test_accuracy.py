"""`axonn-tune accuracy` with rows of a file, its report, and the earlier words for it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from axonn_tune import accuracy
from tests.cli.running import good, run
from tests.unit.report.published import STEPS, rows, step


def test_a_report_beside_the_text(tmp_path: Path) -> None:
    """Guards --html: standard output as without it, as text and as JSON; and the earlier words, which say the new."""
    line = f"accuracy --rows {rows(tmp_path)}"
    report = tmp_path / "report.html"
    done = good(f"{line} --html {report}")
    assert done.out == good(line).out
    assert done.err == f"Wrote the report as {report}.\n"
    assert good(f"{line} --format json --html {report}").document["schema"] == "axonn-tune/accuracy/2"
    data = re.search(r'id="data">(.*?)</script>', report.read_text("utf-8"), flags=re.DOTALL)
    assert data
    assert [section["title"] for section in json.loads(data[1])["sections"]] == ["Training steps"]
    earlier = good(f"validate --rows {tmp_path}/steps.csv")
    assert (earlier.out, earlier.err) == (done.out, "This is now `axonn-tune accuracy --rows FILE`.\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--rows {folder}/none.csv --html {folder}/r.html", "no file '{folder}/none.csv'"),
        ("--rows {folder}/rows.csv --html {folder}/none/r.html", "there is no folder '{folder}/none'"),
        ("--rows {folder}/empty.csv --html {folder}/r.html", "nothing to report: no rows in {folder}/empty.csv"),
        ("--rows {folder}/torn.csv --html {folder}/r.html", "no column 'gpu'"),
        ("--rows {folder}/rows.csv --machine perlmuter", "did you mean 'perlmutter'?"),
        ("--machine perlmutter", "--machine prices the steps of --rows"),
    ],
)
def test_refusals(line: str, message: str, tmp_path: Path) -> None:
    """Guards bad files: exit code 2, what is wrong, and no report."""
    (tmp_path / "rows.csv").write_text(STEPS + step("one"), "utf-8")
    (tmp_path / "empty.csv").write_text(STEPS, "utf-8")
    (tmp_path / "torn.csv").write_text("id,n_gpus\n", "utf-8")
    done = run(f"accuracy {line.format(folder=tmp_path)}")
    assert done.code == 2
    assert message.format(folder=tmp_path) in done.err
    assert not list(tmp_path.rglob("*.html"))


def test_without_plotly_nothing_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the extra: exit code 5 with what to install, before any row is read."""
    monkeypatch.setitem(sys.modules, "plotly", None)
    done = run(f"accuracy --rows {tmp_path}/none.csv --html {tmp_path}/r.html")
    assert done.code == 5
    assert "pip install '.[report]'" in done.err


def test_rows_on_a_profile_of_ones_own(tmp_path: Path) -> None:
    """Guards --machine: every row on that profile, warnings by id in the text, in JSON, and from Python alike."""
    profile, rows, report = tmp_path / "mine.yaml", tmp_path / "rows.csv", tmp_path / "r.html"
    profile.write_text(good("machines show dgx-h100").out.replace("name: dgx-h100", "name: mine"), "utf-8")
    rows.write_text(STEPS + step("one") + step("two", gpu="H100") + step("three", gpu="Abacus"), "utf-8")
    line = f"accuracy --rows {rows} --machine {profile}"
    said = good(f"{line} --html {report}").out
    assert said.startswith(f"steps priced on mine, {profile}\n")
    warning = "gpu is 'A100-SXM', the accelerator of mine is 'H100-SXM5-80GB'"
    assert [text for text in said.splitlines() if text.startswith("warning: ")] == [
        f"warning: one: {warning}",
        f"warning: three: {warning.replace('A100-SXM', 'Abacus')}",
    ]
    document = good(f"{line} --format json").document
    found = accuracy(rows, machine=profile)
    assert document["machine"] == "mine"
    assert [row["warnings"] for row in document["rows"]] == [list(one.warnings) for one in found.steps]
    assert len({row["predicted_s"] for row in document["rows"]}) == 1
    assert [row["predicted_s"] for row in document["rows"]] == [one.predicted_s for one in found.steps]
    assert "all on mine; 2 say that they ran elsewhere" in report.read_text("utf-8")


def test_a_misspelt_framework_is_named_with_the_nearest(tmp_path: Path) -> None:
    """Guards rows of unknown software: priced, with the nearest known word, as text and as JSON."""
    rows = tmp_path / "rows.csv"
    rows.write_text(STEPS + step("one").replace("Megatron-LM", "Megatorn-LM"), "utf-8")
    words = "unknown framework, priced as the mean of all known ones: Megatorn-LM, did you mean 'megatron'?"
    assert words in good(f"accuracy --rows {rows}").out.splitlines()
    (row,) = good(f"accuracy --rows {rows} --format json").document["rows"]
    assert row["warnings"] == [words]
    assert row["predicted_s"] > 0.0
