"""What commands write: nothing over what they read or what others wrote, nothing that terminals obey."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import good, run

SEARCH = "--gpus 8 --model nano --machine dgx-h100 -q"
CONFIG = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG |= {"intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64, "hidden_act": "silu"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def contents() -> dict[str, bytes]:
    """Every file here."""
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("data read -o read/a.txt", "read/a.txt"),
        ("data read -o read/new.bin", "read/a.txt"),
        ("models import read -o read/config.json", "read/config.json"),
        ("report read -o read/summary.json", "read/summary.json"),
        ("learn read -o read/launch.yaml", "read/launch.yaml"),
        ("diagnose read --html read/summary.json", "read/summary.json"),
        ("export read -o read/step-3/__0_0.distcp", "read/step-3/__0_0.distcp"),
        ("learn log.out -o log.yaml", "log.yaml"),
    ],
)
@pytest.mark.parametrize("force", ["", " --force"])
def test_nothing_is_written_over_what_is_read(line: str, read: str, force: str) -> None:
    """Guards inputs, whole folders and facts beside a log included, whatever else allows to replace files."""
    Path("read/step-3").mkdir(parents=True)
    Path(read).write_text(json.dumps(CONFIG), encoding="utf-8")
    Path("log.out").write_text("log", encoding="utf-8")
    before = contents()
    finished = run(line + force)
    assert finished.code == 2, finished.err
    assert "is in the folder" in finished.err or "are the same file" in finished.err
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
        (f"{SEARCH} --framework megatron-core -o run.sh", "run.sh"),
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


def test_a_document_of_another_kind_is_not_replaced() -> None:
    """Guards a machine profile of one's own against a launch config, which the tool writes too."""
    profile = "schema: axonn-tune/machine/1\nname: m\nextends: localhost\n"
    Path("m.yaml").write_text(profile, encoding="utf-8")
    assert "'m.yaml' is a machine document" in run(f"{SEARCH} -o m.yaml").err
    assert Path("m.yaml").read_text("utf-8") == profile


def test_names_are_escaped_wherever_they_are_printed() -> None:
    """Guards terminals: of files' names and logs, nothing but this tool's own colors gets there as it is."""
    Path("configs").mkdir()
    text = "schema: axonn-tune/model/1\nname: m\nsource: s\nextends: nano\n"
    Path(
        "configs/a\x1b]0;b\x07\x9b1m\ud800.yaml".encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
    ).write_text(text)
    environment = {**os.environ, "AXONN_TUNE_PATH": "."}
    for words in (["models", "list"], ["models", "list", "--format", "json"], ["models", "show", "a"]):
        done = subprocess.run(
            [sys.executable, "-m", "axonn_tune", *words], env=environment, capture_output=True, check=False
        )
        said = (done.stdout + done.stderr).decode()
        assert not [letter for letter in said if letter < "\n" or "\x0b" <= letter < " " or "\x7f" <= letter < "\xa0"]
        assert words[-1] != "json" or json.loads(done.stdout)
        assert done.returncode == 2 or "\\u001b]0;b\\u0007" in said
    assert "\x1b[1m" in good(f"{SEARCH} --color").out


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["search", "--help"], ["models", "list"]])
def test_a_reader_that_has_gone_is_no_error(words: list[str]) -> None:
    """Guards `| head`: exit code 0, and nothing said."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "axonn_tune", *words], stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("name", ["=1+1", "@SUM(A1)", "+1+1", "-1+1"])
def test_no_cell_of_a_sweep_is_a_formula(name: str) -> None:
    """Guards spreadsheets against names of models."""
    text = f'schema: axonn-tune/model/1\nname: "{name}"\nsource: s\nextends: nano\n'
    Path("m.yaml").write_text(text, encoding="utf-8")
    assert good("sweep --gpus 8 --model m.yaml --format csv").out.splitlines()[1].startswith(f"'{name},")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--gpus 735134400 --pipeline --model 80b", "735,134,400 GPUs have 68,906,250 grids of 5 axes"),
        ("--gpus 720720 --pipeline --model 80b --batch 735134400", "there are 11,809,494 candidates or more"),
        ("--gpus 720720 --all --variants --top 0 --model 80b", "there are 89,600 rows"),
        ("--gpus 8 --model nano --set accelerator.memory_gib=1e308", "must be less than or equal to"),
        (f"{SEARCH} --set tiers.network.bandwidth_gb_per_s=5e-324", "must be greater than or equal to"),
        ("--gpus 8 --model /proc/kmsg", "'/proc/kmsg' is a device or a pipe, not a file"),
        ("data /proc/kmsg -o x", "'/proc/kmsg' is a device or a pipe, not a file"),
        ("data . --include /etc/* -o ../x", "a pattern of names below a folder is needed"),
        ("--gpus 8 --model nano -o \udcff.yaml", "--output holds no text in this locale: the byte '\\udcff'"),
    ],
)
def test_extremes_are_refused_with_their_number(line: str, said: str) -> None:
    """Guards memory and time against searches, numbers and files beyond all bounds."""
    finished = run(line)
    assert finished.code == 2
    assert said in finished.err
