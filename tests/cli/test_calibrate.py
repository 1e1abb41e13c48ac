"""`axonn-tune calibrate`, for real: two Gloo ranks on this host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.points import read_points
from tests.cli.running import good, run

COMMAND = [sys.executable, "-m", "axonn_tune", "calibrate", "--ranks", "2", "--batch", "8"]


def calibrate(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own, as users do."""
    return subprocess.run(
        [*COMMAND, "-o", "here.yaml", *options], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the profile of a calibration as short as can be."""
    folder = tmp_path_factory.mktemp("calibrated")
    done = calibrate(folder, "--budget", "1s")
    assert done.returncode == 0, done.stderr
    assert "CPU time, not a network" in done.stdout
    return folder


@pytest.mark.nightly
def test_the_profile_is_one_to_search_with(calibrated: Path) -> None:
    """Guards the whole way: measured, fitted, written, loaded, searched."""
    path = calibrated / "here.yaml"
    machine = load_machine(str(path)).document
    assert machine.name == "here"
    assert machine.measured is not None
    assert (machine.measured.ranks, machine.measured.cores) == (2, len(os.sched_getaffinity(0)))
    assert set(machine.tiers[0].collectives or ()) == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
    found = good(f"--gpus 2 --model nano --machine {path} --precision fp32 --format json").document
    assert found["configs"][0]["iteration_s"] > 0


def test_points_are_all_of_the_essential_ones(calibrated: Path) -> None:
    """Guards short budgets: what a fit needs is measured even when the time is over."""
    kinds = {point.probe.what for point in read_points(calibrated / "here.points.jsonl").points}
    assert kinds == {"collective", "matmul", "copy", "attention", "step"}


@pytest.mark.nightly
def test_goes_on_after_a_kill(tmp_path: Path) -> None:
    """Guards --resume: points measured before a kill -9, which ends all ranks, stay and are not the first again."""
    points = tmp_path / "here.points.jsonl"
    begun = subprocess.Popen([*COMMAND, "-o", "here.yaml", "--budget", "60s"], cwd=tmp_path, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline and (not points.exists() or len(points.read_text("utf-8").splitlines()) < 5):
        time.sleep(0.1)
    begun.send_signal(signal.SIGKILL)
    begun.communicate(timeout=60.0)  # To the end of the last rank that could write there.
    written = points.read_text("utf-8")
    before, points_end_whole = written.splitlines(), written.endswith("\n")
    assert len(before) >= 5
    refused = calibrate(tmp_path, "--budget", "1s")
    assert refused.returncode == 2
    assert "pass --resume to continue" in refused.stderr
    done = calibrate(tmp_path, "--budget", "1s", "--resume")
    assert done.returncode == 0, done.stderr
    after = points.read_text("utf-8").splitlines()
    kept = before if points_end_whole else before[:-1]
    assert after[: len(kept)] == kept
    probes = [json.loads(line)["probe"] for line in after[1:]]
    measured, measured_now = probes[: len(kept) - 1], probes[len(kept) - 1 :]
    assert len(measured_now) >= 3
    assert not any(probe in measured for probe in measured_now[:3])
    assert (tmp_path / "here.yaml").exists()


def test_starting_ranks_inside_a_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards torchrun and srun, where the ranks are there already."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    finished = run("calibrate -o m.yaml --ranks 2")
    assert finished.code == 2
    assert "one of a world already started" in finished.err
