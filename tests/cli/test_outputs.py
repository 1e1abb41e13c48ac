"""What commands write: nothing over what they read or what others wrote, nothing that terminals obey."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from axonn_tune.grid import AXES
from tests.cli.running import good, run

SEARCH = "--gpus 8 --model nano --machine dgx-h100 -q"
CONFIG = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG |= {"intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64, "hidden_act": "silu"}
MODEL = "schema: axonn-tune/model/1\nname: m\nsource: s\nextends: nano\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def contents() -> dict[str, bytes]:
    """Every file here."""
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "line",
    [
        # Into a folder that is read.
        "data read -o read/a.txt",
        "data read -o read/new.bin",
        "models import read -o read/config.json",
        "report read -o read/summary.json",
        "learn read -o read/launch.yaml",
        "diagnose read --html read/summary.json",
        "export read -o read/step-3/__0_0.distcp",
        "learn log.out -o log.yaml",
        # Over a file that is read, or two outputs at one place.
        "--gpus 8 --model in.yaml -o ./in.yaml",
        "--gpus 8 --model nano --machine in.yaml --html in.yaml",
        "--gpus 8 --model nano --emit torchrun --html read/../launch.sh",
        "--gpus 8 --model in.yaml --framework fsdp -o in --emit torchrun",
        "--gpus 8 --model nano --framework fsdp -o t.sh --html t.yaml",
        "regress in.yaml --measurement in.yaml --record --reason x",
        "explain in.yaml --trace in.yaml",
        "trace in.yaml -o in.yaml",
        "report other in.yaml -o in.yaml",
        "validate in.yaml -o in.yaml",
        "learn in.yaml --machine dgx-h100 -o in.yaml",
        "models import in.yaml -o in.yaml",
        "data in.yaml -o in.yaml",
        "regress in.yaml --markdown in.yaml",
    ],
)
def test_nothing_is_written_over_what_is_read(line: str) -> None:
    """Guards inputs, whole folders and facts beside a log included, whatever else allows to replace files."""
    Path("read/step-3").mkdir(parents=True)
    Path("read/step-3/__0_0.distcp").touch()
    for name in (
        "read/a.txt",
        "read/config.json",
        "read/summary.json",
        "read/launch.yaml",
        "in.yaml",
        "log.out",
        "log.yaml",
    ):
        Path(name).write_text(json.dumps(CONFIG), "utf-8")
    before = contents()
    for force in ("", " --force"):
        finished = run(line + force)
        assert finished.code == 2, finished.err
        wanted = "is in the folder|are the same file|of its own|give each its own|No such option '--force'"
        assert re.search(wanted, finished.err), finished.err
    assert contents() == before


def test_a_model_is_written_beside_the_config_that_it_is_read_from() -> None:
    """Guards the folder of a config, of which one file is read."""
    Path("config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    good("models import . -o mine.yaml")
    good("--gpus 8 --model mine.yaml --machine dgx-h100")


@pytest.mark.parametrize(
    ("line", "foreign"),
    [
        (f"{SEARCH} -o notes", "notes"),
        (f"{SEARCH} -o l.yaml --emit torchrun", "l.sh"),
        (f"{SEARCH} --framework deepspeed -o config.sh", "config.json"),
        (f"{SEARCH} --framework fsdp -o config.sh", "config.yaml"),
        (f"{SEARCH} --framework fsdp --emit fully-shard -o own.sh", "own_mesh.py"),
        (f"{SEARCH} --html page", "page"),
        ("schema model -o notes", "notes"),
        ("models import given.json -o notes", "notes"),
    ],
)
def test_a_file_of_somebody_else_is_replaced_with_force_alone(line: str, foreign: str) -> None:
    """Guards files that this tool has not written, also those that are written beside -o; its own are replaced."""
    Path("given.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    Path(foreign).write_text("# Starts axonn-tune.\n", encoding="utf-8")
    before = contents()
    finished = run(line)
    assert finished.code == 2, finished.err
    assert f"{foreign!r} was not written by axonn-tune: name another file, or replace it with --force" in finished.err
    assert contents() == before
    good(f"{line} --force")
    good(line)
    Path("m.yaml").write_text("schema: axonn-tune/machine/1\nname: m\nextends: localhost\n", "utf-8")
    assert "'m.yaml' is a machine document" in run(f"{SEARCH} -o m.yaml").err


def test_a_full_disk_leaves_nothing_half_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards -o and --emit against a disk that fills up: exit code 5, the old file stays, no other is left."""

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    Path("launch.yaml").write_text("schema: axonn-tune/launch/1\n", encoding="utf-8")
    before = contents()
    monkeypatch.setattr("os.fsync", full)
    for line in (f"{SEARCH} -o launch.yaml --emit torchrun", "data launch.yaml -o t.bin", "schema model -o new"):
        finished = run(line)
        assert finished.code == 5
        assert "No space left" in finished.err
    assert contents() == before


def test_pick_and_emit_write_files() -> None:
    """Guards -o, --pick and --emit: the row asked for is written, and both files are named."""
    finished = good("--gpus 64 --model 20b -o launch.yaml --pick 2 --emit slurm --format json")
    assert "launch.yaml" in finished.err
    assert Path("launch.sbatch").stat().st_mode & 0o111
    second = finished.document["configs"][1]
    explained = good("explain launch.yaml --format json").document["config"]
    for key in (*AXES, "order", "micro_batch", "recompute", "communication_s", "iteration_s"):
        assert explained[key] == second[key]
    assert "axonn-tune --gpus 64 --model 20b -o" in Path("launch.yaml").read_text("utf-8")


def test_names_are_escaped_wherever_they_are_printed() -> None:
    """Guards terminals: of files' names and logs, nothing but this tool's own colors gets there as it is."""
    Path("configs").mkdir()
    odd = "configs/a\x1b]0;b\x07\x9b1m\ud800.yaml".encode("utf-8", "surrogatepass")
    Path(odd.decode("utf-8", "surrogateescape")).write_text(MODEL, "utf-8")
    environment = {**os.environ, "AXONN_TUNE_PATH": "."}
    for words in (["models", "list"], ["models", "list", "--format", "json"], ["models", "show", "a"]):
        command = [sys.executable, "-m", "axonn_tune", *words]
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
        said = (done.stdout + done.stderr).decode()
        assert not [letter for letter in said if letter < "\n" or "\x0b" <= letter < " " or "\x7f" <= letter < "\xa0"]
        assert words[-1] != "json" or json.loads(done.stdout)
        assert done.returncode == 2 or "\\u001b]0;b\\u0007" in said
    assert "\x1b[1m" in good(f"{SEARCH} --color").out
    assert "\x1b" not in good(f"{SEARCH} --no-color").out


@pytest.mark.parametrize(("line", "code"), [("--gpus 1024 --model 80b --top 0 --format csv", 0), ("models list", 0)])
def test_a_reader_that_has_gone_is_no_error(line: str, code: int) -> None:
    """Guards `| head` and `>&-`: what cannot be printed is dropped, and the exit code is that of the command."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "axonn_tune", *line.split()]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (code, b"")
    closed = subprocess.run(["bash", "-c", '"$@" <&- >&- 2>&-', "bash", *command], check=False)
    assert closed.returncode == code


@pytest.mark.parametrize("name", ["=1+1", "@SUM(A1)", "-1+1"])
def test_no_cell_of_a_sweep_is_a_formula(name: str) -> None:
    """Guards spreadsheets against names of models."""
    Path("m.yaml").write_text(MODEL.replace("name: m", f'name: "{name}"'), encoding="utf-8")
    assert good("sweep --gpus 8 --model m.yaml --format csv").out.splitlines()[1].startswith(f"'{name},")
