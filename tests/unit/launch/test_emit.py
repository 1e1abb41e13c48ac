"""Scripts as files: beside the launch config, executable, whole or not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from axonn_tune.errors import EnvironmentProblem, UsageError
from axonn_tune.grid import Grid
from axonn_tune.launch.scripts import ScriptKind, emit_script, script_text
from tests.unit.launch.cases import case

BUILT = case("nano", "perlmutter", grid=Grid(x=2, y=2, z=2, data=2))


def emit(path: Path, *, kind: ScriptKind = "torchrun") -> Path:
    """Emit a script beside a launch config at `path`."""
    return emit_script(kind, launch=BUILT.launch, machine=BUILT.machine.document, launch_path=path)


@pytest.mark.parametrize(("kind", "name"), [("torchrun", "my launch.v2.sh"), ("slurm", "my launch.v2.sbatch")])
def test_the_script_lies_beside_the_config(tmp_path: Path, kind: ScriptKind, name: str) -> None:
    """Guards place and name, the executable bit for everyone who may read, and the text."""
    config = tmp_path / "my launch.v2.yaml"
    path = emit(config, kind=kind)
    assert path == tmp_path / name
    mode = path.stat().st_mode
    assert (mode & 0o111) == (mode & 0o444) >> 2 != 0
    machine = BUILT.machine.document
    assert path.read_text() == script_text(kind, launch=BUILT.launch, machine=machine, launch_path=config)


def test_an_older_script_is_replaced(tmp_path: Path) -> None:
    """Guards repeated use: the last command's script is the one there."""
    (tmp_path / "launch.sh").write_text("old")
    assert emit(tmp_path / "launch.yaml").read_text().startswith("#!")


@pytest.mark.parametrize("name", ["/dev/stdout", "", "launch.sh", "."])
def test_a_config_that_is_no_file_has_no_beside(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a script in /dev, and one that replaces its own launch config."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="--emit needs a launch config in a file to write"):
        emit(Path(name))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against half a script: exit code 5 and no file."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(EnvironmentProblem) as caught:
        emit(tmp_path / "launch.yaml")
    assert caught.value.exit_code == 5
    assert not list(tmp_path.iterdir())


def test_an_uneven_world_writes_no_script(tmp_path: Path) -> None:
    """Guards the order: the ranks are counted before anything is written."""
    built = case("nano", "perlmutter", grid=Grid(z=2, data=3))
    with pytest.raises(UsageError):
        emit_script("slurm", launch=built.launch, machine=built.machine.document, launch_path=tmp_path / "launch.yaml")
    assert not list(tmp_path.iterdir())
