"""A framework's own names, groups of help, and what is said of what nobody chose."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest

import axonn_tune
from axonn_tune.cli.main import cli
from axonn_tune.frameworks import registry
from tests.cli.running import good, run
from tests.cli.test_printed_commands import SCRIPT

pytestmark = pytest.mark.usefixtures("shared_searches")
LLAMA = "--gpus 64 --model llama3-70b --machine dgx-h100"
CORE = f"{LLAMA} --framework megatron-core"
SEARCHING = ("search", "explain", "sweep", "compare", "validate", "regress")


def sizes(line: str) -> dict[str, int]:
    """The layout of the first of a ranking."""
    layout: dict[str, int] = good(f"{line} --top 1 --format json").document["configs"][0]["layout"]
    return layout


@pytest.mark.parametrize(
    "pins",
    [
        "--tp 4 --gtp 2 --pp 2 --vpp 5 --cp 1 --dp 4",
        "--x 4 --z 2 --pipeline 2 --chunks 5 --context 1 --data 4",
        "--tensor-model-parallel-size 4 --tensor-parallel-num-weight-shards=8 --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 5 --context-parallel-size=1",
    ],
)
def test_pins_have_several_names(pins: str) -> None:
    """Guards pins by the framework's short names, by ours, and by its flags; weight shards are TP times GTP."""
    found = sizes(f"{CORE} --mbs 1 --gbs 64 {pins}")
    assert found == {"TP": 4, "GTP": 2, "PP": 2, "VPP": 5, "CP": 1, "DP": 4}
    assert list(found) == ["TP", "GTP", "PP", "VPP", "CP", "DP"]


def test_torchtitans_sections_are_left_out() -> None:
    """Guards options copied from a command of torchtitan: pins, sequence and batch by its names."""
    titan = f"{LLAMA} --framework torchtitan --training.seq_len 4096 --training.global_batch_size 128"
    theirs = "--parallelism.tensor_parallel_degree 4 --parallelism.data_parallel_shard_degree=16"
    ours = f"{LLAMA} --framework torchtitan --seq 4096 --batch 128 --tp 4 --dp-shard 16"
    assert sizes(f"{titan} {theirs}") == sizes(ours)


@pytest.mark.parametrize("order", ["TP,GTP,DP,PP,CP", "tp,gtp,dp,pp,cp", "x,z,data,pipeline,context", "TP,GTP,DP"])
def test_orders_take_both_names(order: str) -> None:
    """Guards --order: the framework's names in any case, ours, and orders without what comes last."""
    found = good(f"{CORE} --order {order} --tp 8 --top 1 --format json").document["configs"][0]
    assert found["order"].startswith("x,z,data,pipeline,context" if order != "TP,GTP,DP" else "x,z,data")


@pytest.mark.parametrize("framework", [name for name, one in registry().items() if one.names])
def test_every_name_leads_back(framework: str) -> None:
    """Guards descriptions: each axis has one name, no two have the same, and it is an option."""
    one = registry()[framework]
    names = list(map(one.called, one.columns))
    assert len({name.lower() for name in names}) == len(names)
    assert [one.axis(name) for name in names] == list(one.columns)


@pytest.mark.parametrize("command", ["search", "explain", "sweep"])
def test_what_is_shown_is_in_its_names(command: str) -> None:
    """Guards tables and remarks: the framework's names, and none of ours beside them."""
    line = "--gpus 64 --model llama3-8b --machine dgx-h100 --framework megatron-core --cp 2 --pp 2 --tp 2"
    finished = good(f"{command} {line}")
    shown = f"{finished.out}\n{finished.err}"
    assert all(name in shown for name in ("TP", "PP", "DP"))
    assert not [ours for ours in (" x ", " z ", " over x", " over z", " over data", "x=", "z=") if ours in shown]


def headings(line: str) -> dict[str, list[str]]:
    """Options or commands below each heading of a help text."""
    found: dict[str, list[str]] = {}
    below = found
    for text in good(line).out.splitlines():
        if re.fullmatch(r"  Examples:|[A-Z][\w ,-]+:", text):
            # What frameworks call the options below is no option more.
            below = {} if "by the names of" in text else found
            below[text.strip()[:-1]] = []
        elif below and (named := re.match(r"  ((?:-\w, )?-[\w-]+|\w+)", text)):
            below[list(below)[-1]].append(named[1].split()[-1])
    return found


@pytest.mark.parametrize("command", SEARCHING)
def test_options_are_in_groups(command: str) -> None:
    """Guards the help of commands that search: each option below one heading, --help as the last."""
    found = headings(f"{command} --help")
    shown = good(f"{command} --help").out
    assert "Constraints by the names of a framework, each with a size:" in shown
    assert "--tp --gtp --pp --vpp --cp --ep --etp --egtp --dp torchtitan," in " ".join(shown.split())
    listed = [option for options in found.values() for option in options]
    options = [param for param in cli.commands[command].params if isinstance(param, click.Option) and not param.hidden]
    assert sorted(listed) == sorted(max(param.opts, key=len) for param in options)
    assert listed[-1] == "--help"
    assert {"Workload", "Hardware", "Constraints", "Overlap"} <= set(found)
    assert found["Workload"][0] == "--model"
    assert {name for names in headings("--help").values() for name in names} >= set(cli.commands) - {"search"}


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("--model nano --machine localhost --emit torchrun", {"launch.yaml", "launch.sh"}),
        ("--model 5b --emit slurm", {"launch.yaml", "launch.sbatch"}),
        ("--model 5b --emit slurm --framework megatron-core", {"run.sbatch"}),
    ],
)
def test_emit_alone_writes_files(line: str, files: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards --emit without -o: the names are the tool's, and said."""
    monkeypatch.chdir(tmp_path)
    said = good(f"--gpus {2 if 'nano' in line else 8} {line} --top 1 --batch 64").err
    assert {path.name for path in tmp_path.iterdir()} == files
    assert all(name in said for name in files)


def test_what_was_assumed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a model of one's own: the machine, batch and sequence length that nobody chose."""
    monkeypatch.chdir(tmp_path)
    config = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    config |= {"intermediate_size": 1376, "vocab_size": 1024, "max_position_embeddings": 131072, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    good("models import config.json -o mine.yaml")
    said = " ".join(good("--gpus 8 --model mine.yaml --top 1").err.split())
    assert "a batch of 512 sequences (--batch) and 8,192 of up to 131,072 tokens in a sequence (--seq)" in said
    chosen = good("--gpus 8 --model mine.yaml --machine dgx-h100 --batch 64 --seq 4096 --top 1").err
    assert "Assumed" not in chosen


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A small run of Megatron-LM on 16 GPUs."""
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT, "utf-8")
    return path


def test_an_assumed_machine_is_in_the_first_line(script: Path) -> None:
    """Guards the machine that nobody named: the title of each command that prices says so; no other does."""
    asked, mark = "--gpus 8 --model nano", "× perlmutter (A100-SXM4-40GB; assumed, no --machine)"
    for line in (asked, f"explain {asked}", f"compare {asked}", f"explain --from-command {script}"):
        assert mark in " ".join(good(line).out.split())[:150], line
    assert mark[2:] in " ".join(good(f"sweep {asked}").out.split())[:150]
    for line in (asked, f"explain {asked}", f"explain --from-command {script}"):
        assert "assumed, no --machine" not in good(f"{line} --machine dgx-a100").out, line
    assert good(f"{asked} --format json --top 1").document["machine_assumed"] is True


def test_another_accelerator_that_a_script_names_is_remarked(script: Path) -> None:
    """Guards a run on H800 that is priced on H100: NVLink is half as fast."""
    words = "the file names H800, and dgx-h100 is priced: --machine h800 has it"
    for named in ("#!/bin/bash\n#SBATCH --gres=gpu:h800:8\n", "# on H800\n"):
        script.write_text(f"{named}{SCRIPT}", "utf-8")
        said = {name: good(f"explain --from-command {script} --machine {name}").out for name in ("dgx-h100", "h800")}
        assert [words in " ".join(one.split()) for one in said.values()] == [True, False]


def test_gpus_of_a_node_that_the_machine_has_not_are_remarked(script: Path) -> None:
    """Guards --nproc_per_node 8 on nodes of four."""
    said = {name: good(f"explain --from-command {script} --machine {name}").out for name in ("perlmutter", "dgx-a100")}
    remark = "8 GPUs a node are stated, but perlmutter is priced with its 4"
    assert [remark in " ".join(one.split()) for one in said.values()] == [True, False]


@pytest.mark.parametrize("batch", [514, 512])
def test_a_batch_that_rules_out_most_grids(batch: int) -> None:
    """Guards the hint at a batch nearby: only where it saves much."""
    said = " ".join(good(f"--gpus 64 --model llama3-8b --machine perlmutter --batch {batch} --top 1").err.split())
    assert ("--batch 512 has a shortest step of 20.6 s instead of 123 s" in said) == (batch == 514)


def test_a_profile_that_is_not_at_hand_is_asked_for(tmp_path: Path) -> None:
    """Guards launch configs of a profile of one's own: found beside them, given, or asked for; and a missing peak."""
    profile, launch = tmp_path / "profiles" / "here.yaml", tmp_path / "launch.yaml"
    profile.parent.mkdir()
    profile.write_text("schema: axonn-tune/machine/1\nextends: localhost\nname: here\n", encoding="utf-8")
    good(f"--gpus 1 --model nano --machine {profile} --precision fp32 -o {launch}")
    for command in ("trace", "explain", "validate"):
        finished = run(f"{command} {launch}")
        assert finished.code == 2
        assert f"{launch}: no machine named 'here'" in finished.err
        assert "--machine FILE says where its profile is" in finished.err
    good(f"explain {launch} --machine {profile}")
    assert not axonn_tune.explain_launch(launch, machine=str(profile)).machine_changed
    refused = run(f"--gpus 1 --model nano --machine {profile} --precision fp16")
    assert refused.code == 2
    advised = refused.err.partition("; try --precision ")[2].strip()
    good(f"--gpus 1 --model nano --machine {profile} --precision {advised}")
    (tmp_path / "broken.yaml").write_text("schema: axonn-tune/machine/1\nname: [", encoding="utf-8")
    profile.rename(tmp_path / "ours.yaml")
    good(f"explain {launch}")
