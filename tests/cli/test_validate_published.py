"""`axonn-tune validate` against rows of a file, and its report."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.cli.running import good, run
from tests.unit.report.published import STEPS, files, step


def test_a_report_beside_the_text(tmp_path: Path) -> None:
    """Guards --html: a section for each file given, standard output as without it, as text and as JSON."""
    made = files(tmp_path)
    line = f"validate --rows {made.steps} --memory {made.memory}"
    report = tmp_path / "report.html"
    done = good(f"{line} --html {report}")
    assert done.out == good(line).out
    assert done.err == f"Wrote the report as {report}.\n"
    assert good(f"{line} --format json --html {report}").document["schema"] == "axonn-tune/accuracy/1"
    data = re.search(r'id="data">(.*?)</script>', report.read_text("utf-8"), flags=re.DOTALL)
    assert data
    assert [section["title"] for section in json.loads(data[1])["sections"]] == ["Training steps", "Memory"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--rows {folder}/none.csv --html {folder}/r.html", "no file '{folder}/none.csv'"),
        ("--rows {folder}/rows.csv --html {folder}/none/r.html", "there is no folder '{folder}/none'"),
        ("--rows {folder}/empty.csv --html {folder}/r.html", "nothing to report: no rows in {folder}/empty.csv"),
        ("--rows {folder}/torn.csv --html {folder}/r.html", "no column 'gpu'"),
    ],
)
def test_refusals(line: str, message: str, tmp_path: Path) -> None:
    """Guards bad files: exit code 2, what is wrong, and no report."""
    (tmp_path / "rows.csv").write_text(STEPS + step("one"), "utf-8")
    (tmp_path / "empty.csv").write_text(STEPS, "utf-8")
    (tmp_path / "torn.csv").write_text("id,n_gpus\n", "utf-8")
    done = run(f"validate {line.format(folder=tmp_path)}")
    assert done.code == 2
    assert message.format(folder=tmp_path) in done.err
    assert not list(tmp_path.rglob("*.html"))


def test_without_plotly_nothing_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the extra: exit code 5 with what to install, before any row is read."""
    monkeypatch.setitem(sys.modules, "plotly", None)
    done = run(f"validate --rows {tmp_path}/none.csv --html {tmp_path}/r.html")
    assert done.code == 5
    assert "pip install 'axonn-tune[report]'" in done.err
