"""Documents that users have on disk: those of `tests/fixtures/v1`, written by version 0.1.0, are still read."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import good, run

STORED = Path(__file__).parents[1] / "fixtures" / "v1"
RANKINGS = {
    "ranking-nano.json": "--gpus 4 --model nano --machine localhost --precision fp32 --format json",
    "ranking-5b.json": "--gpus 64 --model 5b --format json",
}
DATA_KEYS = ("sources", "rejected", "measured", "collectives")
"""Below these keys stands what a profile or a search happens to hold, not the contract."""


def test_launch_config_is_built(tmp_path: Path) -> None:
    """Guards what the runtime reads of a launch config: one rank is built from it and sends what is predicted."""
    assert "They match the program" in _run(tmp_path, "launch.yaml", "--dry-run").stdout


def test_profile_is_checked_and_searched_with() -> None:
    """Guards profiles of users' own machines, which nobody measures again for an upgrade."""
    assert "ok" in good(f"machines check {STORED / 'profile.yaml'}").out
    options = f"--model {STORED / 'model.yaml'} --machine {STORED / 'profile.yaml'} --precision fp32 --format json"
    assert good(f"--gpus 2 {options}").document["configs"][0]["iteration_s"] > 0


def test_points_are_fitted(tmp_path: Path) -> None:
    """Guards raw points: `calibrate --resume` with nothing left to measure fits them again."""
    shutil.copy(STORED / "profile.points.jsonl", tmp_path / "mine.points.jsonl")
    options = f"--ranks 2 --budget 1s --resume --model {STORED / 'model.yaml'} -o mine.yaml"
    command = [sys.executable, "-m", "axonn_tune", "calibrate", *options.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "axonn-tune/machine/1" in (tmp_path / "mine.yaml").read_text("utf-8"), done.stderr


def test_measurement_is_checked_against_the_baseline() -> None:
    """Guards both: 4 is a prediction that has moved since, which is another matter than an unread document."""
    done = run(f"regress {STORED / 'baseline.yaml'} --measurement {STORED / 'measurement.yaml'} --format json")
    assert done.code in (0, 4), done.err
    measured = [row for row in json.loads(done.out)["findings"] if row["gate"] == "measurements"]
    assert measured
    assert not any(row["failed"] for row in measured)


@pytest.mark.parametrize("name", RANKINGS)
def test_ranking_keeps_its_keys(name: str) -> None:
    """Guards programs that read rankings: every key of version 1 is still written."""
    stored = json.loads((STORED / name).read_text("utf-8"))
    assert set(_keys(stored)) <= set(_keys(good(RANKINGS[name]).document))


@pytest.mark.parametrize("name", ["launch.yaml", "launch-2-ranks.yaml"], ids=["same-grid", "another-grid"])
def test_checkpoint_is_trained_on(name: str, tmp_path: Path) -> None:
    """Guards checkpoints: training goes on from one, on its own grid and on another, as it did in version 1."""
    shutil.copytree(STORED / "checkpoint", tmp_path / "checkpoint")
    _run(tmp_path, name, "--resume", "--directory", "run")
    stored = json.loads((STORED / "continuation.json").read_text("utf-8"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics-rank0.jsonl").read_text("utf-8").splitlines()]
    steps = [row for row in rows if "step" in row]
    assert [row["step"] for row in steps] == stored["steps"]
    assert all(math.isfinite(row["loss"]) for row in steps)
    assert [row["loss"] for row in steps] == pytest.approx(stored["losses"], rel=1e-6)


def _run(folder: Path, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a stored launch config in a folder of its own, as users do."""
    command = [sys.executable, "-m", "axonn_tune", "run", str(STORED / name), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def _keys(value: Any, path: str = "") -> Iterator[str]:
    """Paths of all keys, as in `configs[].terms[].op`."""
    if isinstance(value, list):
        for one in value:
            yield from _keys(one, f"{path}[]")
    elif isinstance(value, dict):
        for name, one in value.items():
            yield f"{path}.{name}"
            if name not in DATA_KEYS:
                yield from _keys(one, f"{path}.{name}")
