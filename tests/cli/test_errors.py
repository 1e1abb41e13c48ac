"""What users get wrong: each ends in its exit code and one message on standard error, without a traceback."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from axonn_tune.cli import main as entry
from tests.cli.running import Finished, good, run

MACHINE = """\
schema: axonn-tune/machine/1
name: mine
extends: perlmutter
tiers:
  - name: slingshot
    bandwidth_gb_per_s: {bandwidth}
    sources:
      bandwidth_gb_per_s: {{kind: assumed, source: test}}
"""


def fails(line: str, *, code: int) -> Finished:
    """Run a command line that has to fail in one way."""
    finished = run(line)
    assert finished.code == code, finished.err
    assert "Traceback" not in finished.err
    assert finished.err.strip()
    return finished


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--gpus 0 --model 80b", "0 is not in the range x>=1"),
        ("--gpus -4 --model 80b", "-4 is not in the range"),
        ("--gpus 1.5 --model 80b", "'1.5' is not a valid integer"),
        ("--gpus many --model 80b", "'many' is not a valid integer"),
        ("--model 80b", "Missing option '--gpus'"),
        ("--gpus 8", "Missing option '--model'"),
        ("--gpus 8 --model 81b", "no model named '81b', did you mean '80b'?"),
        ("--gpus 8 --model 80b --machine perlmuter", "did you mean 'perlmutter'?"),
        ("--gpus 8 --model missing.yaml", "no file 'missing.yaml'"),
        ("--gpus 8 --model 80b --machine no/such.yaml", "no/such.yaml"),
        ("--gpus 8 --model 80b --machine H100", "such an accelerator is in aws-p5 (H100-SXM5-80GB), dgx-h100 (H100-"),
        ("--gpus 8 --model 80b --machine a100-80gb", "is in dgx-a100 (A100-SXM4-80GB), perlmutter-80gb (A100-SXM4-80"),
        ("--gpus 8 --model 80b --machine MI250X", "is in frontier (MI250X GCD); known: alps"),
        ("--gpus 8 --model meta-llama/Llama-3-8B", "download https://huggingface.co/meta-llama/Llama-3-8B/blob/main"),
        (
            "--gpus 8 --model 5b --tp 8",
            "--tp is Megatron-Core's, torchtitan's and DeepSpeed ZeRO's name of axis x: --x 8",
        ),
        ("--gpus 8 --model 5b --pp 2", "name of axis pipeline: --pipeline 2"),
        ("--gpus 8 --model 5b --dp 2", "name of axis data: --data 2"),
        ("--gpus 8 --model 5b --fsdp 8", "there is no option --fsdp: sharded weights (FSDP, ZeRO-3) are axis z: --z N"),
        ("--gpus 8 --model 5b --zero=3", "there is no option --zero: ZeRO-1 is --shard-optimizer"),
        ("--gpus 8 --model 5b --nodes 2", "--gpus N is the number of GPUs of all nodes"),
        ("--gpus 8 --model 5b --gpus-per-node 4", "--set machine.launcher.ranks_per_node=N"),
        ("--gpus 8 --model 5b --ep 4", "mixtures of experts are not modelled"),
        ("--gpus 8 --model 5b --bf16", "the number format is --precision bf16"),
        ("--gpu 8 --model 80b", "--gpus"),
        ("serch --gpus 8", "Did you mean 'search'?"),
        ("--gpus 8 --model 5b --recompute ful", "did you mean 'full'?"),
        ("--gpus 8 --model 5b --rank-by comunication", "did you mean 'communication'?"),
        ("--gpus 8 --model 5b --no-overlap data", "did you mean 'data_parallel'?"),
        ("--gpus 8 --model 5b --cost paper-release", "did you mean 'paper-released'?"),
        ("--gpus 8 --model 5b --order x,y,k", "rank order 'x,y,k' must name axes once each, as in x,y,z,data"),
        ("--gpus 8 --model 5b --set model.layrs=3", "did you mean 'layers'?"),
        ("--gpus 8 --model 5b --set wrokload.global_batch=3", "unknown key 'wrokload'"),
        ("--gpus 8 --model 5b --set workload.global_batsh=3", "did you mean 'global_batch'?"),
        ("--gpus 8 --model 5b --set layers", "--set"),
        (
            "--gpus 8 --model 5b --set machine.bandwidth=5",
            "did you mean accelerator.memory_bandwidth_gb_per_s or tiers.nv",
        ),
        ("--gpus 8 --model 5b --set machine.bandwidth=5", "; there are name, description, accelerator, tiers, library"),
        (
            "--gpus 8 --model 5b --set machine.tiers.sling.ranks=5",
            "did you mean 'slingshot'?; there are nvlink, slingshot",
        ),
        ("--gpus 8 --model 5b --set memory=5", "a model has family, layers, hidden"),
        ("--gpus 64 --model 20b --variants --top 0 --format json", "--format csv lists all of them"),
        ("--gpus 8 --model 5b --set workload.global_batch=0", "global_batch"),
        ("--gpus 8 --model 5b --x 3", "8 GPUs cannot be arranged with x = 3"),
        ("--gpus 8 --model 5b --x 4 --z 4", "x = 4, z = 4: 16 does not divide them"),
        ("--gpus 8 --model 5b --seq 4096", "sequence length 4096 exceeds the position table"),
        ("--gpus 64 --model 20b --kept-layers 99", "--kept-layers 99: 20b has 32 layers"),
        ("--gpus 8 --model 5b --pick 3", "give -o FILE too"),
        ("--gpus 64 --model 20b --pick 300 -o launch.yaml", "configurations are ranked"),
        ("--gpus 64 --model 20b --cost paper --variants", "leave out --variants"),
        ("--gpus 64 --model 20b --cost paper --rank-by iteration", "cannot rank by iteration"),
        ("--gpus 64 --model 20b --machine dgx-h100 --cost paper", "no 'paper' section"),
        ("sweep --gpus 8..4 --model 5b", "the range '8..4' is empty"),
        ("sweep --gpus 8,x --model 5b", "'x' is no positive number"),
        ("sweep --gpus 4,6 --model 5b --weak --batch 3", "no whole number of sequences"),
        ("explain", "Missing options --gpus and --model"),
        ("explain --gpus 64 --model 20b --pick 300", "configurations are ranked"),
        ("explain --gpus 64 --model 20b --trace -", "standard output has the explanation"),
        ("run launch.yaml --trace-all", "give --trace N too"),
        ("calibrate --from-logs a.log -o here.yaml", "axonn-tune learn a.log --machine NAME -o FILE"),
        ("accuracy --rows missing.csv", "missing.csv"),
        ("--gpus 64 --model 20b -o same.x --html ./same.x", "--output and --html are the same file, ./same.x"),
        ("--gpus 8 --model 5b --seq 1099511627775 --batch 1099511627775", "1099511627775 is more than 2,147,483,647"),
        ("sweep --gpus 8 --model 5b --batch 99999999999", "'99999999999' is no positive number"),
        ("validate --model nano --gpus 2 -o same.x --html same.x", "--output and --html are the same file"),
        ("completion tcsh", "'tcsh' is not one of"),
    ],
)
def test_wrong_usage(line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards exit code 2: every wrong option, name or value is named, with the nearest right one."""
    monkeypatch.chdir(tmp_path)
    finished = fails(line, code=2)
    assert said in finished.err
    assert finished.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layers: [1, 2", "mine.yaml:"),
        ("just text", "must hold a mapping"),
        (MACHINE.format(bandwidth=-5), "mine.yaml:6: tiers.slingshot.bandwidth_gb_per_s"),
        (MACHINE.format(bandwidth="fast"), "mine.yaml:6: tiers.slingshot.bandwidth_gb_per_s"),
    ],
    ids=["broken YAML", "no mapping", "negative bandwidth", "a word for a number"],
)
def test_wrong_documents(text: str, said: str, tmp_path: Path) -> None:
    """Guards exit code 2 for documents: file, line and key."""
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    assert said in fails(f"--gpus 8 --model 5b --machine {path}", code=2).err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--gpus 8 --model 640b", "memory"),
        ("--gpus 1021 --model 80b", "binding constraint"),
        ("--gpus 64 --model 20b --batch 1 --x 1 --y 1", "nearest change"),
        ("--gpus 64 --model 20b --micro-batch 7", "binding constraint"),
        ("--gpus 32 --model 160b --cost paper", "memory"),
        ("explain --gpus 8 --model 640b", "memory"),
        ("sweep --gpus 1,2 --model 640b", "nothing is feasible"),
    ],
)
def test_nothing_feasible(line: str, said: str) -> None:
    """Guards exit code 3: what binds is named, and the nearest change."""
    assert said in fails(line, code=3).err


def test_nothing_feasible_is_still_json() -> None:
    """Guards programs: the document is complete, with no config and the counts of what was rejected."""
    finished = fails("--gpus 8 --model 640b --format json", code=3)
    assert finished.document["configs"] == []
    assert finished.document["searched"]["rejected"]["memory"] > 0


def test_a_prime_number_of_gpus_works() -> None:
    """Guards odd sizes: a prime count is searched like any other when the batch divides."""
    assert good("--gpus 13 --model nano --batch 26 --machine dgx-a100").out


@pytest.mark.parametrize("path", ["/dev/full", "/nonexistent/launch.yaml"])
def test_files_that_cannot_be_written(path: str) -> None:
    """Guards -o: a full disk is 5, a missing folder 2."""
    finished = fails(f"--gpus 64 --model 20b -o {path}", code=5 if path == "/dev/full" else 2)
    assert f"cannot write '{path}'" in finished.err


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards -o against a disk that fills up: the old file stays, no other is left."""

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "launch.yaml"
    path.write_text("schema: axonn-tune/launch/1\n", encoding="utf-8")
    monkeypatch.setattr("os.fsync", full)
    assert "No space left" in fails(f"--gpus 64 --model 20b -o {path}", code=5).err
    assert path.read_text() == "schema: axonn-tune/launch/1\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"COMP_CWORD": "1"}, "are not as a shell sets them"),
        ({"COMP_WORDS": "axonn-tune", "COMP_CWORD": "x"}, "are not as a shell sets them"),
        ({"_AXONN_TUNE_COMPLETE": "nonsense"}, "are not as a shell sets them"),
    ],
)
def test_completion_that_no_shell_asks_for(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards variables that were exported by mistake."""
    for name, value in ({"_AXONN_TUNE_COMPLETE": "bash_complete"} | variables).items():
        monkeypatch.setenv(name, value)
    assert said in fails("--gpus 8", code=2).err


@pytest.mark.parametrize(
    ("line", "code"), [("--gpus 8", 2), ("--gpus 8 --model 6b", 2), ("--gpus 8 --model nano --machine localhost", 5)]
)
def test_standard_error_on_a_full_disk(line: str, code: int) -> None:
    """Guards exit code 1 against a message that cannot be written."""
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "axonn_tune", *line.split()]
        assert subprocess.run(command, stdout=subprocess.DEVNULL, stderr=full, check=False).returncode == code


@pytest.mark.parametrize(
    "line",
    [
        "--gpus 8 --machine {}.yaml --model nano",
        "--gpus 8 --model nano -o {}.yaml",
        "--gpus 8 --model nano --html {}.html",
        "learn {}.log -o ours.yaml",
        "calibrate --from-logs {} -o ours.yaml",
        "models check {}.yaml",
        "{}",
    ],
)
def test_names_of_files_do_not_drive_the_terminal(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards messages that show a path: as on a terminal, where nothing is stripped of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("click.utils.should_strip_ansi", lambda *_: False)
    said = fails(line.format("\x1b[31m"), code=2).err
    assert "\x1b" not in said
    assert "[31m" in said or "control character '\\x1b'" in said


def test_contents_of_files_do_not_drive_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what a table or a remark repeats of rows and scripts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("click.utils.should_strip_ansi", lambda *_: False)
    heading = "id,gpu,n_gpus,framework,layers,hidden,heads,ffn,vocab,seq,gbs,step_s"
    row = "\x1b[31mred,H100,8,megatron-core,32,4096,32,16384,50257,2048,64,3"
    (tmp_path / "rows.csv").write_text(f"{heading}\n{row}\n", "utf-8")
    assert "rows.csv:2: holds the control character '\\x1b'" in fails("accuracy --rows rows.csv", code=2).err
    sizes = "--num-layers 2 --hidden-size 192 --num-attention-heads 24 --seq-length 64 --global-batch-size 8"
    script = f"torchrun --nproc_per_node 8 pretrain_gpt.py {sizes} --tokenizer-model gpt2\x1b[31m\n"
    (tmp_path / "run.sh").write_text(script, "utf-8")
    out = good("explain --from-command run.sh --machine dgx-h100").out
    assert "as of gpt2" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    "line",
    [
        "--gpus 8 --model in.yaml -o ./in.yaml",
        "--gpus 8 --model nano --machine in.yaml --html in.yaml",
        "--gpus 8 --model nano --emit torchrun --html run/../launch.sh",
        "--gpus 8 --model nano --emit slurm --html launch.yaml",
        "--gpus 8 --model in.yaml --framework fsdp -o in --emit torchrun",
        "--gpus 8 --model nano --framework fsdp -o t.sh --html t.yaml",
        "regress in.yaml --measurement in.yaml --record --reason x",
        "explain in.yaml --trace in.yaml",
        "trace in.yaml -o in.yaml",
        "report other in.yaml -o in.yaml",
        "validate in.yaml -o in.yaml",
        "learn in.yaml --machine dgx-h100 -o in.yaml",
        "diagnose in.yaml --machine dgx-h100 --html in.yaml",
        "models import in.yaml -o in.yaml",
        "data in.yaml -o in.yaml",
        "regress in.yaml --markdown in.yaml",
    ],
)
def test_no_command_writes_over_what_it_reads(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards logs and documents against a name given twice, and a report against what is written beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "in.yaml").write_text("as it was", "utf-8")
    assert re.search("of its own|give each its own", fails(line, code=2).err)
    assert (tmp_path / "in.yaml").read_text("utf-8") == "as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.yaml", "run"]


def test_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards Ctrl-C: exit code 130 and no traceback."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("axonn_tune.api.search.run_search", interrupted)
    fails("--gpus 8 --model 5b", code=130)


@pytest.mark.parametrize("how", ["option", "variable", "neither"])
def test_our_own_mistakes(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards exit code 1: a line that asks for a report; the traceback only on request."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("somewhere inside")

    monkeypatch.setattr("axonn_tune.api.search.run_search", broken)
    monkeypatch.setenv("AXONN_TUNE_DEBUG", "1" if how == "variable" else "")
    finished = run(f"{'--debug ' if how == 'option' else ''}--gpus 8 --model 5b")
    assert finished.code == 1
    assert "Internal error: ZeroDivisionError: somewhere inside" in finished.err
    assert "report this" in finished.err
    assert ("Traceback" in finished.err) == (how != "neither")


def test_help_lists_examples_and_exit_codes() -> None:
    """Guards --help: a first call to copy, and every exit code of the README."""
    out = good("--help").out
    assert "axonn-tune --gpus 1024 --model 80b" in out
    for code in (0, 1, 2, 3, 4, 5, 6, 75, 130):
        assert f"\n    {code:<3}  " in out
    assert "--version" in out
    assert good("--version").out.startswith("axonn-tune")
    assert entry.EPILOG
