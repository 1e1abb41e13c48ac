"""The torchrun script: valid bash, right arithmetic, right command; run with a stand-in for torchrun."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from axonn_tune.errors import UsageError
from axonn_tune.grid import Grid
from axonn_tune.launch.config import write_launch
from axonn_tune.launch.scripts import ScriptKind, emit_script, script_text
from axonn_tune.specs.catalog import available
from tests.unit.launch.cases import Case, case, program, run

KINDS: tuple[ScriptKind, ...] = ("torchrun", "slurm")


def emitted(folder: Path, built: Case, *, name: str = "launch.yaml") -> Path:
    """The torchrun script beside its launch config, and a torchrun that prints its arguments, one a line."""
    folder.mkdir(exist_ok=True)
    write_launch(folder / name, built.launch)
    program(folder, "torchrun", 'printf "%s\\n" "$@"')
    return emit_script("torchrun", launch=built.launch, machine=built.machine.document, launch_path=folder / name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("machine", available("machine"))
def test_every_script_is_valid_bash(tmp_path: Path, machine: str, kind: ScriptKind) -> None:
    """Guards the scripts of every shipped machine: bash parses them, and shellcheck, where there is one, is content."""
    built = case("nano", machine, grid=Grid(x=2, y=2, z=2, data=2))
    if kind == "slurm" and built.machine.document.launcher.slurm is None:
        pytest.skip(f"{machine} has no Slurm")
    path = tmp_path / "script"
    path.write_text(script_text(kind, launch=built.launch, machine=built.machine.document, launch_path="a b.yaml"))
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=10)
    assert "set -euo pipefail" in path.read_text().splitlines()
    shellcheck = shutil.which("shellcheck")
    if shellcheck:
        subprocess.run([shellcheck, str(path)], check=True, timeout=30)


def test_one_node_runs_at_once(tmp_path: Path) -> None:
    """Guards the command: torchrun gets the counts, the rendezvous and the launch config, nothing else is needed."""
    built = case(overrides=["launcher.ranks_per_node=4"])
    done = run(emitted(tmp_path, built), programs=tmp_path)
    assert done.returncode == 0, done.stderr
    given = done.stdout.splitlines()
    options = dict(zip(given[:-3:2], given[1:-3:2], strict=True))
    assert options == {
        "--nnodes": "1",
        "--nproc-per-node": "4",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": "localhost:0",
        "--rdzv-id": "nano-4",
        "--local-ranks-filter": "0",
        "--role": "rank",
        "--tee": "3",
        "--log-dir": str(tmp_path / "logs"),
    }
    assert given[-3:] == ["-m", "axonn_tune.runtime", str(tmp_path / "launch.yaml")]


def test_odd_names_are_quoted(tmp_path: Path) -> None:
    """Guards quoting: folders and files with spaces, quotes and dollars run as any other, from anywhere."""
    folder = tmp_path / "it's $HOME"
    name = '-n "a" $(touch pwned).yaml'
    script = emitted(folder, case(overrides=["launcher.ranks_per_node=4"]), name=name)
    done = run(script, programs=folder, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(folder / name)
    assert {path.name for path in tmp_path.iterdir()} == {folder.name}


def test_the_arithmetic_is_printed_and_checked(tmp_path: Path) -> None:
    """Guards hand edits: a script whose numbers no longer agree stops before anything starts."""
    script = emitted(tmp_path, case())
    text = script.read_text()
    assert "# nodes · ranks_per_node = x · y · z · data: 2 · 2 = 1 · 1 · 2 · 2 = 4" in text.splitlines()
    script.write_text(text.replace("nodes=2\n", "nodes=3\n"))
    done = run(script, programs=tmp_path, HEAD_NODE="a")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "3 nodes of 2 ranks are 6 ranks, but the grid has 4\n"


@pytest.mark.parametrize("kind", KINDS)
def test_a_world_that_leaves_a_node_part_empty_is_refused(kind: ScriptKind) -> None:
    """Guards uneven worlds: the message has the division with its rest, and a count that works."""
    built = case("nano", "perlmutter", grid=Grid(z=2, data=3))
    with pytest.raises(UsageError, match=re.escape("6 ranks do not fill nodes of 4: 6 = 1 · 4 + 2;")) as caught:
        script_text(kind, launch=built.launch, machine=built.machine.document, launch_path="launch.yaml")
    assert "fills nodes, such as 4 or 8 (another number of ranks a node" in str(caught.value)
    assert "--set" not in str(caught.value)
