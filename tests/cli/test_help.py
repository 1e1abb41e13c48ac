"""What help shows first, and what is said of what nobody chose: groups, defaults, files that are written unasked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest

from axonn_tune.cli.main import _COMMANDS, cli
from axonn_tune.request import SEARCHING
from tests.cli.running import good, run

CONFIG = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "intermediate_size": 1376, "vocab_size": 1024, "max_position_embeddings": 131072},
    **{"hidden_act": "silu", "rms_norm_eps": 1e-5},
}


def headings(line: str) -> dict[str, list[str]]:
    """Options or commands below each heading of a help text."""
    found: dict[str, list[str]] = {}
    for text in good(line).out.splitlines():
        if re.fullmatch(r"  Examples:|[A-Z][\w -]+:", text):
            found[text.strip()[:-1]] = []
        elif found and (named := re.match(r"  ((?:-\w, )?-[\w-]+|\w+)", text)):
            found[list(found)[-1]].append(named[1].split()[-1])
    return found


@pytest.mark.parametrize("command", SEARCHING)
def test_options_are_in_groups(command: str) -> None:
    """Guards the help of commands that search: each option below one heading, --help as the last."""
    found = headings(f"{command} --help")
    listed = [option for options in found.values() for option in options]
    options = [param for param in cli.commands[command].params if isinstance(param, click.Option)]
    assert sorted(listed) == sorted(max(param.opts, key=len) for param in options)
    assert listed[-1] == "--help"
    assert list(found)[-1] == "Output"
    assert {"Workload", "Hardware", "Constraints", "Overlap"} <= set(found)
    assert found["Workload"][0] == "--model"
    assert found["Constraints"][:4] == ["--x", "--y", "--z", "--data"]


def test_commands_are_in_groups() -> None:
    """Guards the top-level help: every command below one heading, and where a profile of one's own comes from."""
    found = headings("--help")
    assert {heading: found[heading] for heading in _COMMANDS} == {of: list(names) for of, names in _COMMANDS.items()}
    assert "axonn-tune learn slurm-1234.out" in good("--help").out
    assert "axonn-tune learn" in good("machines --help").out


@pytest.mark.parametrize(
    ("short", "whole"),
    [
        ("--order z,data", "--order z,data,x,y"),
        ("--order y,x", "--order y,x,z,data"),
        (
            "--framework megatron-core --machine dgx-h100 --order DP,PP",
            "--framework megatron-core --order DP,PP,TP,GTP",
        ),
    ],
)
def test_orders_as_tables_print_them(short: str, whole: str) -> None:
    """Guards rank orders without axes of size 1: those left out come last."""
    line, csv = "--gpus 64 --model 20b --machine dgx-h100 --top 5", "--format csv -q"
    assert good(f"{line} {short} {csv}").out == good(f"{line} {whole} {csv}").out


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("--model nano --machine localhost --emit torchrun", {"launch.yaml", "launch.sh"}),
        ("--model 5b --emit slurm", {"launch.yaml", "launch.sbatch"}),
        ("--model 5b --emit torchrun --framework megatron-core", {"run.sh"}),
        ("--model 5b --emit slurm --framework megatron-core", {"run.sbatch"}),
    ],
)
def test_emit_alone_writes_files(line: str, files: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards --emit without -o: the names are the tool's, and said."""
    monkeypatch.chdir(tmp_path)
    gpus = 2 if "nano" in line else 8
    said = good(f"--gpus {gpus} {line} --top 1 --batch 64").err
    assert {path.name for path in tmp_path.iterdir()} == files
    assert all(name in said for name in files)
    assert ("starts the bundled runtime" in said) == ("--framework" not in line)


def test_what_was_assumed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a model of one's own: the machine, batch and sequence length that nobody chose."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    good("models import config.json -o mine.yaml")
    assert "\nname: mine\n" in Path("mine.yaml").read_text("utf-8")
    said = good("--gpus 8 --model mine.yaml --top 1").err
    assert "Priced on perlmutter, since no --machine was given" in said
    assert "a batch of 512 sequences (--batch) and 8,192 of up to 131,072 tokens in a sequence (--seq)" in said
    swept = good("sweep --gpus 8,16 --model mine.yaml,5b").err
    assert swept.count("Priced on perlmutter, since") == swept.count("a batch of 512 sequences (--batch)") == 1
    chosen = good("--gpus 8 --model mine.yaml --machine dgx-h100 --batch 64 --seq 4096 --top 1").err
    assert "Priced on" not in chosen
    assert "Assumed" not in chosen
    assert "Priced on" not in good("--gpus 8 --model 5b --top 1").err


def test_a_hugging_face_config_by_any_name(tmp_path: Path) -> None:
    """Guards --model with a config that was renamed: one error that says what makes a model of it."""
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    finished = run(f"--gpus 8 --model {path}")
    assert finished.code == 2
    assert f"axonn-tune models import {path} -o mymodel.yaml" in finished.err
    assert len(finished.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("batch", "said"),
    [(514, "--batch 512 has a shortest step of 21.5 s instead of 124 s"), (512, ""), (544, "")],
)
def test_a_batch_that_rules_out_most_grids(batch: int, said: str) -> None:
    """Guards the hint at a batch nearby: only where it saves much."""
    shown = " ".join(good(f"--gpus 64 --model llama3-8b --machine perlmutter --batch {batch} --top 1").err.split())
    assert ("is not divisible by 64 GPUs" in shown) == bool(said)
    assert said in shown
