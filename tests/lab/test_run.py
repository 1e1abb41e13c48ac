"""`axonn-tune lab run`: the same training as on localhost, and how it ends when it is made to."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from axonn_tune.cli.main import main
from axonn_tune.lab.holder import find
from axonn_tune.lab.lab import Lab
from tests.lab import labs
from tests.lab.labs import SMALL, needs_labs, run, wait_until

pytestmark = needs_labs


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab of four ranks."""
    with Lab(SMALL) as found:
        yield found


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A launch config of nano for four ranks."""
    path = tmp_path_factory.mktemp("launch") / "launch.yaml"
    chosen = ["--gpus", "4", "--model", "nano", "--machine", "localhost", "--precision", "fp64", "--batch", "4"]
    axes = ["--x", "2", "--y", "2", "--z", "1", "--data", "1", "--micro-batch", "4"]
    assert main([*chosen, *axes, "-q", "-o", str(path)]) == 0
    return path


def losses(directory: Path) -> list[float]:
    """Loss by step, from rank 0's metrics."""
    path = directory / "metrics-rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    return [line["loss"] for line in lines if "step" in line]


def test_two_steps_equal_those_on_localhost(lab: Lab, launch: Path, tmp_path: Path) -> None:
    """Guards `lab run`: four ranks in four namespaces train exactly as four on localhost."""
    code, _, err = run("run", str(launch), "--steps", "2", "--name", lab.name, "--directory", str(tmp_path / "lab"))
    assert code == 0, err
    assert main(["run", str(launch), "--steps", "2", "--directory", str(tmp_path / "plain")]) == 0
    assert len(losses(tmp_path / "lab")) == 2
    assert losses(tmp_path / "lab") == losses(tmp_path / "plain")


def test_ends_of_a_run(lab: Lab, launch: Path, tmp_path: Path) -> None:
    """Guards exit codes and leftovers: a lost rank is named and ends all with 6; a killed command takes its ranks."""
    began = labs.start("run", str(launch), "--name", lab.name, "--directory", str(tmp_path / "lost"))
    assert wait_until(lambda: len(losses(tmp_path / "lost")) >= 1)
    ranks = labs.namespaces_of(lab.name)[1:]
    (second,) = labs.processes_in(ranks[1:2])
    os.kill(second, signal.SIGKILL)
    _, err = began.communicate(timeout=labs.PATIENCE_S)
    assert began.returncode == 6
    assert "Error: rank 1: its process ended without a message" in err
    assert labs.processes_in(ranks) == []
    killed = labs.start("run", str(launch), "--name", lab.name, "--directory", str(tmp_path / "killed"))
    assert wait_until(lambda: len(labs.processes_in(ranks)) == 4)
    killed.kill()
    killed.communicate()
    assert wait_until(lambda: labs.processes_in(ranks) == [], within_s=10)
    assert find(lab.name) is not None, "the lab itself was not asked to end"


def test_wrong_number_of_ranks_is_refused(lab: Lab, tmp_path: Path) -> None:
    """Guards the first check: the arithmetic is in the message, and nothing starts."""
    path = tmp_path / "launch.yaml"
    assert main(["--gpus", "2", "--model", "nano", "--machine", "localhost", "-q", "-o", str(path)]) == 0
    code, _, err = run("run", str(path), "--name", lab.name)
    assert code == 2
    assert "has 2 ranks, but the lab has 2 nodes × 2 = 4" in err
