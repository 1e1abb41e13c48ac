"""`--from-command` of explain and compare, and `models import` of a run's script or config file."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path

import pytest

from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.loading import load_document
from axonn_tune.specs.model import Model
from tests.cli.running import good, run

COMMANDS = Path(__file__).parents[1] / "fixtures" / "commands"
TITAN = f"--from-command {COMMANDS / 'torchtitan-8b.sh'} --machine dgx-h100"
CORE = f"--from-command {COMMANDS / 'gpt-one-line.sh'} --machine dgx-h100"


def test_a_run_is_explained() -> None:
    """Guards the table: which run, what was assumed, what it costs, what would be better, with commands."""
    out = good(f"explain {TITAN}").out
    assert out.startswith("llama3-8b on 64 × dgx-h100 (H100-SXM5-80GB) with torchtitan: dp_shard=8 dp_replicate=4 ")
    for words in (
        "torchtitan-8b.sh runs torchtitan (line 3) on 64 GPUs",
        "Assumed: not stated, so as torchtitan has it: ",
        "80% interval",
        "Peak memory per GPU is",
        "Faster layouts",
        "ranks its grid",
    ):
        assert words in " ".join(out.split()), words
    command = next(line for line in out.splitlines() if line.startswith("axonn-tune "))
    assert "--framework torchtitan" in command
    assert command.endswith("-o run.sh")


def test_commands_of_changes_write_what_was_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the way on: the command of the best layout writes a script, which costs what was promised."""
    monkeypatch.chdir(tmp_path)
    document = good(f"explain {CORE} --format json").document
    best = next(change for change in document["changes"] if change["words"].startswith("the best layout"))
    assert best["step_s"] == pytest.approx(document["run"]["best_step_s"])
    assert best["step_s"] < document["config"]["iteration_s"]
    for command in (document["run"]["model_command"], best["command"]):
        words = shlex.split(command)
        assert words[0] == "axonn-tune"
        good(shlex.join(words[1:]))
    read = good("explain --from-command run.sh --machine dgx-h100 --format json").document
    assert read["config"]["iteration_s"] == pytest.approx(best["step_s"], rel=1e-6)


def test_json_has_the_run() -> None:
    """Guards `axonn-tune/explain/1` of a command: the run with what was stated, its rank, changes."""
    document = good(f"explain {CORE} --format json").document
    assert document["schema"] == "axonn-tune/explain/1"
    found = document["run"]
    assert found["framework"] == "megatron-core"
    assert found["line"] == 1
    assert found["stated"]["tp"] == "2"
    assert "vocab" not in found["stated"]
    assert 1 <= found["rank"] <= found["layouts"]
    assert all({"words", "layout", "step_s", "gain", "command"} == set(change) for change in document["changes"])


def test_options_hold_over_the_file_and_what_is_not_priced_is_said(tmp_path: Path) -> None:
    """Guards a template whose launcher has fewer GPUs than its layout, and the three kinds of sentences."""
    text = (COMMANDS / "gpt-one-line.sh").read_text("utf-8").rstrip()
    path = tmp_path / "template.sh"
    path.write_text(f"{text} --pipeline-model-parallel-size 32 --optimizer-cpu-offload --frob 3\n", "utf-8")
    good(f"models import {path} -o {tmp_path / 'mine.yaml'}")
    done = good(f"explain --from-command {path} --gpus 128 --batch 256 --machine dgx-h100")
    out = " ".join(done.out.split())
    for words in ("Assumed: --gpus 128 holds in place of", "Ignored: --optimizer-cpu-offload: priced on the GPU"):
        assert words in out
    assert "Unknown, taken to change nothing: --frob." in out
    assert "models import" in out
    err = good(f"compare --from-command {path} --gpus 128 --batch 256 --machine dgx-h100").err
    assert "Unknown, taken to change nothing: --frob." in err


def test_markdown_and_trace(tmp_path: Path) -> None:
    """Guards the other outputs that explain has."""
    text = good(f"explain {TITAN} --format md --trace {tmp_path / 'step.json'}").out
    assert "## The run" in text
    assert "```console\n$ axonn-tune " in text
    assert json.loads((tmp_path / "step.json").read_text("utf-8"))["traceEvents"]


def test_a_model_in_place_of_a_flavor_is_said() -> None:
    """Guards a model that replaces the one a torchtitan file names without its sizes; the same one replaces nothing."""
    out = good(f"explain {TITAN} --model llama3-70b --format json").document["run"]["assumed"]
    assert any("--model llama3-70b holds in place of the file's llama3_8b (line 4)" in words for words in out)
    out = good(f"explain {TITAN} --model llama3-8b --format json").document["run"]["assumed"]
    assert not any("in place of" in words for words in out)


def test_what_a_command_does_not_say_is_given() -> None:
    """Guards options beside it: GPUs, model, batch, sequence, precision, and --set."""
    zero = f"--from-command {COMMANDS / 'zero3.json'} --machine dgx-h100"
    out = good(f"explain {zero} --gpus 64 --model llama3-8b --seq 4096").out
    assert "512 sequences of 4,096 tokens" in " ".join(out.split())
    plain, wide = (good(f"explain {CORE} --format json{more}").document for more in ("", " --set model.vocab=256000"))
    assert wide["config"]["iteration_s"] > plain["config"]["iteration_s"]
    gaps = [[words for words in one["run"]["assumed"] if "(--set model.vocab=N)" in words] for one in (plain, wide)]
    assert [len(found) for found in gaps] == [1, 0]
    assert (
        "the machine is perlmutter, since no --machine was named"
        in good(f"explain --from-command {COMMANDS / 'torchtitan-8b.sh'} --format json").document["run"]["assumed"]
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"explain {TITAN} --x 8", "says all of it: leave out --x"),
        (f"explain {TITAN} --tp 8 --pp 2", "says all of it: leave out --tp, --pp"),
        (f"explain {TITAN} --framework torchtitan --tp=8 --gbs 64", "says all of it: leave out --tp."),
        (f"--gpus 8 --model {COMMANDS / 'torchtitan-8b.sh'}", "make a model file of it first"),
        (f"explain {TITAN} --recompute full --pick 2", "leave out --pick"),
        (f"explain launch.yaml {TITAN}", "leave out launch.yaml"),
        (f"explain {COMMANDS / 'torchtitan-8b.sh'}", "is not a launch config: pass scripts and configs with"),
        (f"compare {TITAN} --no-overlap", "says all of it: leave out --no-overlap"),
        ("explain --from-command nothing.sh", "no file 'nothing.sh'"),
        (f"explain --from-command {COMMANDS / 'torchtitan-70b.toml'}", "does not state n_gpus: add --gpus N"),
        (f"explain {TITAN} --gpus 3", "tp 2 x pp 1 x cp 1 = 2 ranks, but n_gpus is 3"),
        (f"explain {TITAN} --framework torchtitn", "did you mean 'torchtitan'?"),
        (f"explain {TITAN} --set model.hiden=3", "did you mean 'hidden'?"),
        ("compare --gpus 64", "Missing option --model"),
        ("compare", "Missing options --gpus and --model"),
        ("models import meta-llama/Llama-3.1-8B", "https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json"),
        ("--gpus 8 --model meta-llama/Llama-3.1-8B", "models import config.json -o mine.yaml"),
        (f"models import {COMMANDS / 'zero3.json'}", "no 'model_type': not a Hugging Face model config"),
        (f"models import {COMMANDS / 'fsdp.yaml'}", "does not state layers, hidden, heads, ffn, vocab"),
    ],
)  # fmt: skip
def test_wrong_requests_are_explained(line: str, message: str) -> None:
    """Guards exit code 2, and what to do."""
    done = run(line)
    assert done.code == 2, done.out
    assert message in done.err
    assert "Traceback" not in done.err


def test_a_layout_too_large_for_memory_is_explained_all_the_same(tmp_path: Path) -> None:
    """Guards a run that someone has although it is predicted not to fit: said, and not refused."""
    text = (COMMANDS / "torchtitan-8b.sh").read_text("utf-8").replace("checkpoint:full", "checkpoint:none")
    path = tmp_path / "large.sh"
    large = "--training.local_batch_size 4 --training.seq_len 32768 --compile"
    path.write_text(text.replace("--compile", large), "utf-8")
    out = " ".join(good(f"explain --from-command {path} --machine dgx-h100").out.split())
    assert "It is predicted to exceed memory: " in out
    assert "Faster layouts" in out


def test_a_run_is_compared() -> None:
    """Guards the row `yours` among the strategies, by the time of its step on the kernels of all others."""
    rows = csv.DictReader(good(f"compare {TITAN} --format csv").out.splitlines())
    found = {row["key"]: row for row in rows}
    assert found["yours"]["layout"] == "dp_shard=8 dp_replicate=4 tp=2"
    assert float(found["yours"]["iteration_s"]) > float(found["torchtitan"]["iteration_s"])
    assert list(found).index("yours") > list(found).index("torchtitan")


def test_models_are_imported(tmp_path: Path) -> None:
    """Guards models of scripts and config files: sizes, workload, source."""
    path = tmp_path / "mine.yaml"
    done = good(f"models import {COMMANDS / 'apertus-70b.sh'} -o {path} --name apertus")
    model = load_document(path, schema=Model)
    assert (model.name, model.layers, model.ffn, model.vocab) == ("apertus", 80, 43008, 128256)
    assert (model.defaults.global_batch, model.defaults.sequence_length) == (4096, 4096)
    assert model.source == "arguments of Megatron-Core in apertus-70b.sh"
    assert "the vocabulary is assumed" in done.err
    good(f"models import {COMMANDS / 'torchtitan-70b.toml'} -o {path} --batch 8 --seq 128")
    model, shipped = load_document(path, schema=Model), load_model("llama3-70b").document
    assert model.block_weights == shipped.block_weights
    assert (model.defaults.global_batch, model.defaults.sequence_length) == (8, 128)
