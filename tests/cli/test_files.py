"""Commands on documents, tokens, launch configs and checkpoints: `models`, `machines`, `doctor`, `schema`, `data`,
`run`, `export`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from axonn_tune.cli.documents import KINDS
from axonn_tune.errors import UsageError
from axonn_tune.grid import Grid
from axonn_tune.launch.host import command_of, crowding, profile_checks, variable_checks
from axonn_tune.runtime.shards import shards_of
from axonn_tune.runtime.tokens import open_tokens
from axonn_tune.specs.catalog import available
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document, parse_document
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from tests.cli.running import good, run
from tests.runtime import saving

ROOT = Path(__file__).parents[2]
NANO = "--model nano --machine localhost"

# models and machines


@pytest.mark.parametrize("kind", ["model", "machine"])
def test_lists_have_one_row_per_name(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the table: each name once, nothing cut; a broken file of the user's is named and hides no other."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "40")
    output = good(f"{kind}s list").out
    # Below the headings units have a row of their own.
    rows = [line.split()[0] for line in output.splitlines()[1:] if line[:1].strip()]
    assert rows == list(available(kind))
    assert "…" not in output
    folder = tmp_path / "axonn-tune" / {"model": "configs", "machine": "machines"}[kind]
    folder.mkdir(parents=True)
    (folder / "bad.yaml").write_text("layers: x\n", encoding="utf-8")
    done = good(f"{kind}s list")
    assert done.out == output
    assert "left out bad:" in done.err


def test_documents_that_are_shown_load(tmp_path: Path) -> None:
    """Guards `show NAME > mine.yaml`, changes by --set included, and `check *.yaml`: it reports every file."""
    text = good("models show NANO --set layers=3").out
    assert parse_document(text, schema=Model).layers == 3
    assert parse_document(good("machines show dgx-h100").out, schema=Machine).name == "dgx-h100"
    assert json.loads(good("models show nano --format json").out)["document"]["hidden"] == 192
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("schema: axonn-tune/model/1\nlayer: 3\n", encoding="utf-8")
    done = run(f"models check {tmp_path}/a.yaml nano {tmp_path}/b.yaml")
    assert done.code == 2
    assert f"{tmp_path}/b.yaml:2: layer: unknown key 'layer', did you mean 'layers'?" in done.err
    assert done.err.strip().endswith("2 of 3 cannot be used")
    assert done.out.count("ok ") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_schemas_are_printed(kind: str) -> None:
    """Guards what is printed against docs/schemas."""
    assert good(f"schema {kind}").out == (ROOT / "docs" / "schemas" / f"{kind}.json").read_text("utf-8")


# doctor and run


@pytest.fixture
def launch(tmp_path: Path) -> Path:
    """Eight ranks on CPUs."""
    good(f"--gpus 8 {NANO} --precision fp32 -o {tmp_path}/launch.yaml")
    return tmp_path / "launch.yaml"


def test_doctor_looks_at_everything(launch: Path) -> None:
    """Guards the areas; what a launch config lacks here ends with 5, variables are set against its own."""
    findings = good(f"doctor {launch} --format json").document["findings"]
    areas = {"host", "software", "torch", "starting jobs", "rights", "variables", "launch config"}
    assert areas <= {one["area"] for one in findings}
    document = load_document(launch, schema=Launch)
    name, value = document.environment[0].name, document.environment[0].value
    for here, state in ((None, "ok"), (value, "ok"), ("17", "differs")):
        found = {one.what: one for one in variable_checks({} if here is None else {name: here}, document)}
        assert found[name].state == state
    changed = yaml.safe_load(launch.read_text("utf-8")) | {"data": {"path": "none.bin"}}
    launch.write_text(yaml.safe_dump(changed, sort_keys=False), encoding="utf-8")
    finished = run(f"doctor {launch}")
    assert finished.code == 5
    assert "cannot run here: data.path (no such file)" in finished.err


@pytest.mark.parametrize(
    ("name", "gib", "first"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "dgx-h100"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "perlmutter"),
        ("AMD Instinct MI300X", 191.7, "mi300x"),
        ("NVIDIA H100 NVL", 93.1, ""),
        ("NVIDIA H100 PCIe", 79.2, ""),
        ("NVIDIA GeForce GT", 8.0, ""),
    ],
)
def test_doctor_names_profiles_with_the_gpu(name: str, gib: float, first: str) -> None:
    """Guards which profiles fit a GPU: those of its name and memory; none is a hint to measure."""
    (found,) = profile_checks([{"name": name, "memory_bytes": gib * 2**30}] * 8)
    assert (first in found.here.split(", ")) if first else "calibrate" in found.note


def test_dry_run_compares_one_rank_with_the_program(tmp_path: Path) -> None:
    """Guards the dry run: the collectives of a step of rank 0 of a world that is not there equal the program."""
    grid = "--x 2 --y 2 --z 1 --data 2 --micro-batch 4 --recompute full --shard-optimizer --split-micro-batch"
    good(f"--gpus 8 {NANO} -o {tmp_path}/launch.yaml {grid}")
    command = [sys.executable, "-m", "axonn_tune", "run", "launch.yaml", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for words in ("They match the program", "optimizer moments", "gradient_norm"):
        assert words in done.stdout


def test_runs_that_cannot_start(launch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards laptops: up to four ranks a core, with a warning; worlds that are there; hosts without torch."""
    document, find = load_document(launch, schema=Launch), importlib.util.find_spec
    assert crowding(document, cores=8) is None
    assert crowding(document, cores=2) == "8 ranks share 2 cores; what was predicted for is 'one CPU core'"
    with pytest.raises(UsageError, match="--emit"):
        crowding(document, cores=1)
    for environment, everything in (({"RANK": "1"}, False), ({"SLURM_NTASKS": "8"}, False), ({}, True)):
        assert ("--all" in command_of(document, launch, arguments=[], environment=environment)) is everything
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "torch" else find(name, *more))
    finished = run(f"run {launch}")
    assert finished.code == 5
    assert "pip install '.[runtime]'" in finished.err


def test_what_an_earlier_run_left_is_not_shown(launch: Path) -> None:
    """Guards a folder used again: a run that fails before its first step has no table, least of all another run's."""
    good(f"--gpus 1 {NANO} -o {launch}")
    for name in ("summary.json", "differs-rank0.json"):
        (launch.parent / name).write_text("{}", encoding="utf-8")
    finished = run(f"run {launch} --resume --directory {launch.parent}")
    assert (finished.code, finished.out) == (2, "")
    assert [one.name for one in launch.parent.iterdir()] == ["launch.yaml"]


# data


def test_bytes_of_a_folder(tmp_path: Path) -> None:
    """Guards order, marks after each file, what is left out, and what is printed."""
    names = ("b.txt", "a.py", "deep/c.md", "image.png", ".hidden/d.txt", "site-packages/e.py", "__pycache__/f.py")
    for name in names:
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(f"né{name}", encoding="utf-8")
    out = tmp_path / "tokens.bin"
    finished = good(f"data {tmp_path}/texts -o {out} --vocab 257")
    expected = [id_ for name in ("a.py", "b.txt", "deep/c.md") for id_ in [*f"né{name}".encode(), 256]]
    assert open_tokens(out).tolist() == expected
    assert finished.out.endswith(f"{len(expected)} tokens from 0.0 MB of text, vocabulary 257 (bytes)\n")


class Words:
    """What is used of a tokenizer of the library `tokenizers`; an id is the length of a word."""

    def encode(self, text: str, *, add_special_tokens: bool) -> SimpleNamespace:
        """As the library's."""
        assert not add_special_tokens
        return SimpleNamespace(ids=[len(word) for word in text.split()])

    def token_to_id(self, word: str) -> int | None:
        """As the library's."""
        return 9 if word == "</s>" else None

    def get_vocab(self, *, with_added_tokens: bool) -> dict[str, int]:
        """As the library's."""
        return {"a": 0, "</s>": 9}


def test_hugging_face_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards whole lines across chunks, text that is no UTF-8, the end mark; and the hint at the library."""
    library = SimpleNamespace(Tokenizer=SimpleNamespace(from_file=lambda path: Words()))
    monkeypatch.setitem(sys.modules, "tokenizers", library)
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "text.txt").write_bytes(b"ab \xff\n" + 200_000 * "née née\n".encode())
    line = f"data {tmp_path}/text.txt -o {tmp_path}/t.bin --tokenizer {tmp_path}/tokenizer.json"
    good(line)
    assert np.array_equal(open_tokens(tmp_path / "t.bin"), [2, 1, *(400_000 * [3]), 9])
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    finished = run(line)
    assert finished.code == 5
    assert "pip install tokenizers" in finished.err


def test_torch_is_not_needed(tmp_path: Path) -> None:
    """Guards that tokenizing and searching work where only the tuner is installed."""
    code = (
        "import sys; sys.modules['torch'] = None; from axonn_tune.cli.main import main; "
        "sys.exit(main(sys.argv[1:]) or main(['--gpus', '8', '--model', 'nano', '-o', 'l.yaml']))"
    )
    words = ["data", "--python-stdlib", "--include", "this.py", "-o", "t.bin"]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


# export


@pytest.mark.parametrize(("which", "dtype"), [("", None), ("step-2", torch.float32), ("", torch.bfloat16)])
def test_another_program_reads_the_whole_model(which: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    """Guards the format, the names, every value in each number format, and which checkpoint is taken."""
    for step in (2, 10):
        saving.save_marked(Grid(), tmp_path / "run", step)
    out = tmp_path / "model.safetensors"
    options = {None: "", torch.float32: "--dtype fp32", torch.bfloat16: "--dtype bf16"}[dtype]
    finished = good(f"export {tmp_path / 'run' / which} -o {out} {options}")
    buckets = saving.marked(Grid()).optimizer.buckets
    wanted = {
        one.name: shards_of(one, bucket, bucket.master)[0].values for bucket in buckets for one in bucket.parameters
    }
    found = load_file(out)
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], value.to(dtype or value.dtype)) for name, value in wanted.items())
    assert f"parameters of {tmp_path / 'run' / (which or 'step-10')}" in finished.out
    with safe_open(out, "pt") as file:
        assert file.metadata()["step"] == (which or "step-10").removeprefix("step-")
