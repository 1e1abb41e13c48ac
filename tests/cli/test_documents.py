"""`models` and `machines` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from axonn_tune.cli.documents import machines_command, models_command
from axonn_tune.errors import AxonnTuneError
from axonn_tune.specs.catalog import available
from axonn_tune.specs.loading import parse_document
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model

MACHINE = Path(__file__).parents[1] / "unit" / "specs" / "data" / "twotier.yaml"
GROUPS = {"models": models_command, "machines": machines_command}


@pytest.fixture(autouse=True)
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user catalog of its own, empty."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("AXONN_TUNE_PATH", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path / "axonn-tune"


def run(line: str) -> Result:
    """Run a command line; errors meant for users come back as the result's exception."""
    group, *arguments = line.split()
    return CliRunner().invoke(GROUPS[group], arguments)


def good(line: str) -> str:
    """Standard output of a command that has to succeed."""
    result = run(line)
    assert result.exit_code == 0, result.exception
    return result.stdout


@pytest.mark.parametrize("group", GROUPS)
def test_list_has_one_row_per_name(group: str) -> None:
    """Guards the table: each name once, nothing cut although standard output is no terminal."""
    output = good(f"{group} list")
    names = available("model" if group == "models" else "machine")
    assert [line.split()[0] for line in output.splitlines()[1:]] == list(names)
    assert "…" not in output


@pytest.mark.parametrize("group", GROUPS)
def test_headings_are_whole_at_any_width(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards narrow terminals: the table is the same text, no word of it broken."""
    wide = good(f"{group} list")
    monkeypatch.setenv("COLUMNS", "40")
    assert good(f"{group} list") == wide


@pytest.mark.parametrize("group", GROUPS)
def test_list_as_json(group: str) -> None:
    """Guards the JSON: schema, and whole documents with their origin."""
    listed = json.loads(good(f"{group} list --format json"))
    assert listed["schema"] == f"axonn-tune/{group.removesuffix('s')}-list/1"
    assert all(len(entry["sha256"]) == 64 and entry["document"]["schema"] for entry in listed[group])


def test_a_broken_file_does_not_hide_the_others(user_folder: Path) -> None:
    """Guards `list` against one bad file of the user's: it is named on standard error and left out."""
    (user_folder / "configs").mkdir(parents=True)
    (user_folder / "configs" / "bad.yaml").write_text("layers: x\n", encoding="utf-8")
    result = run("models list")
    assert result.exit_code == 0
    assert "left out bad:" in result.stderr
    assert "nano" in result.stdout
    assert "bad" not in result.stdout


def test_show_prints_a_document_that_loads() -> None:
    """Guards `show NAME > mine.yaml` as the way to start one's own file, changes by --set included."""
    text = good("models show NANO --set layers=3")
    assert parse_document(text, schema=Model).layers == 3
    assert text.startswith("# From ")
    assert "parameters (1.45 M)" in text
    assert parse_document(good(f"machines show {MACHINE}"), schema=Machine).name == "twotier"
    assert json.loads(good("models show nano --format json"))["document"]["hidden"] == 192


def test_check_reports_every_file(tmp_path: Path) -> None:
    """Guards `check *.yaml`: the first bad file does not hide the second, and the exit code is 2."""
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("schema: axonn-tune/model/1\nlayer: 3\n", encoding="utf-8")
    result = run(f"models check {tmp_path}/a.yaml nano {tmp_path}/b.yaml")
    assert isinstance(result.exception, AxonnTuneError)
    assert result.exception.exit_code == 2
    message = str(result.exception)
    assert f"{tmp_path}/a.yaml:2: layer: unknown key 'layer', did you mean 'layers'?" in message
    assert f"{tmp_path}/b.yaml:2: layer:" in message
    assert message.endswith("2 of 3 cannot be used")
    assert result.stdout.count("ok ") == 1


def test_import_writes_a_model_file(tmp_path: Path) -> None:
    """Guards the way from a Hugging Face folder to a file that the other commands take."""
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    output = tmp_path / "tiny.yaml"
    assert good(f"models import {tmp_path} -o {output} --name tiny --batch 8 --seq 32") == ""
    assert good(f"models check {output}") == f"ok {output}\n"
    assert parse_document(good(f"models import {tmp_path} --name tiny --batch 8 --seq 32"), schema=Model).heads == 4
