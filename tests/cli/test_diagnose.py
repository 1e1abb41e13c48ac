"""`axonn-tune diagnose` as a user runs it: the verdict's exit code, its text, JSON and page, and commands that work."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.cli.running import good, run

FIXTURES = Path(__file__).parents[1] / "fixtures" / "diagnose"
LAB = f"--machine {FIXTURES / 'lab.yaml'}"
HEALTHY, SLOW = FIXTURES / "lab" / "healthy-z2-data2", FIXTURES / "lab" / "slow-link"


def test_a_healthy_run_ends_well() -> None:
    """Guards exit code 0 inside the interval, which the text shows."""
    done = good(f"diagnose {HEALTHY} {LAB}")
    assert "which is reasonable" in done.out
    assert "80%:" in done.out


def test_a_slow_link_is_named_with_what_to_do() -> None:
    """Guards exit code 4 and the first explanation."""
    done = run(f"diagnose {SLOW} {LAB}")
    assert done.code == 4
    assert "slower than predicted" in done.out
    assert "slow link: bandwidth of network" in done.out
    assert "NCCL_IB_HCA" in done.out
    assert done.err.startswith("Error: 1 of 1 outside the 80% interval: slow-link")


def test_json_has_everything() -> None:
    """Guards the document: causes that sum to one with health, and changes with commands."""
    document = json.loads(run(f"diagnose {SLOW} {LAB} --format json").out)
    assert document["schema"] == "axonn-tune/diagnosis/1"
    assert document["reasonable"] is False
    assert document["healthy"] + sum(cause["probability"] for cause in document["causes"]) == pytest.approx(1.0)
    assert document["causes"][0]["kind"] == "slow_network"
    assert document["low_s"] < document["predicted_s"] < document["high_s"] < document["measured_s"]


def test_commands_lead_to_the_predicted_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the pins of a change: its command finds the layout with the step that was promised."""
    monkeypatch.chdir(tmp_path)
    change = json.loads(run(f"diagnose {SLOW} {LAB} --format json").out)["changes"][0]
    words = shlex.split(change["command"])
    assert words[0] == "axonn-tune"
    assert words[-2:] == ["-o", "launch.yaml"]
    found = json.loads(good(shlex.join([*words[1:-2], "--rank-by", "step", "--format", "json"])).out)
    assert found["configs"][0]["iteration_s"] == pytest.approx(change["step_s"])
    good(shlex.join(words[1:]))
    assert (tmp_path / "launch.yaml").is_file()


def test_the_page_draws_it(tmp_path: Path) -> None:
    """Guards `--html`: the step with its interval, the gap, the probabilities."""
    path = tmp_path / "diagnosis.html"
    run(f"diagnose {SLOW} {LAB} --html {path}")
    text = path.read_text("utf-8")
    for words in ("The gap, and the time of each explanation", "How likely", "no fault"):
        assert words in text


def test_a_file_that_is_none_is_refused() -> None:
    """Guards the error for what cannot be read."""
    assert run(f"diagnose {FIXTURES / 'nothing.log'}").code == 2
