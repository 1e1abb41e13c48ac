"""`axonn-tune run`: what it refuses before anything starts, and the dry run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from axonn_tune.errors import UsageError
from axonn_tune.launch.host import command_of, crowding
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document
from tests.cli.running import good, run


def written(folder: Path, *, gpus: int = 8, options: str = "") -> Path:
    """A launch config of nano."""
    path = folder / "launch.yaml"
    good(f"--gpus {gpus} --model nano --machine localhost -o {path} {options}")
    return path


@pytest.mark.parametrize("more", ["", " --shard-optimizer --split-micro-batch"], ids=["plain", "split"])
def test_dry_run_compares_one_rank_with_the_program(more: str, tmp_path: Path) -> None:
    """Guards the dry run: the collectives of a step of rank 0 of a world that is not there equal the program."""
    path = written(tmp_path, options="--x 2 --y 2 --z 1 --data 2 --micro-batch 4 --recompute full" + more)
    command = [sys.executable, "-m", "axonn_tune", "run", str(path), "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "They match the program" in done.stdout
    assert "optimizer moments" in done.stdout
    assert "gradient_norm" in done.stdout


def test_missing_torch_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards users of the tuner alone."""
    path, find = written(tmp_path), importlib.util.find_spec

    def without_torch(name: str, *arguments: Any) -> Any:
        return None if name == "torch" else find(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", without_torch)
    finished = run(f"run {path}")
    assert finished.code == 5
    assert "pip install '.[runtime]'" in finished.err


def test_what_an_earlier_run_left_is_not_shown(tmp_path: Path) -> None:
    """Guards a folder used again: a run that fails before its first step has no table, least of all another run's."""
    path = written(tmp_path, gpus=1)
    for name in ("summary.json", "differs-rank0.json"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    finished = run(f"run {path} --resume --directory {tmp_path}")
    assert (finished.code, finished.out) == (2, "")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["launch.yaml"]


def test_missing_file_is_a_usage_error() -> None:
    """Guards the first mistake."""
    assert run("run nowhere.yaml").code == 2


def test_too_many_ranks_for_this_host(tmp_path: Path) -> None:
    """Guards laptops: up to four ranks a core, with a warning, and scripts for the rest."""
    launch = load_document(written(tmp_path), schema=Launch)
    assert crowding(launch, cores=8) is None
    assert crowding(launch, cores=2) == "8 ranks share 2 cores; what was predicted for is 'one CPU core'"
    with pytest.raises(UsageError, match="--emit"):
        crowding(launch, cores=1)


def test_joins_a_world_that_is_being_started(tmp_path: Path) -> None:
    """Guards `torchrun ... axonn-tune run` and srun: there this process is one rank; alone it starts all."""
    path = written(tmp_path)
    launch = load_document(path, schema=Launch)
    for environment, everything in (({"RANK": "1"}, False), ({"SLURM_NTASKS": "8"}, False), ({}, True)):
        assert ("--all" in command_of(launch, path, arguments=[], environment=environment)) is everything
