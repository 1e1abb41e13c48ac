"""Scripts, run with stand-ins for torchrun, srun, scontrol and Python: what starts is what was asked for."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import axonn_tune
from axonn_tune.api.search import SearchResult
from axonn_tune.errors import UsageError
from axonn_tune.grid import Grid
from axonn_tune.launch.commands import command_of
from axonn_tune.launch.config import write_launch
from axonn_tune.launch.scripts import ScriptKind, emit_script, script_text
from axonn_tune.specs.catalog import available
from axonn_tune.specs.launch import Checkpoint
from axonn_tune.specs.machine import Slurm
from tests.unit.launch.cases import Case, case

PRINTED = 'printf "%s\\n" "$@"'
JOB = {
    "SLURM_JOB_ID": "12345",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "nid[01-02]",
    "SLURM_CPUS_PER_TASK": "32",
}
# Starts what follows the options once, as the last task of two nodes of four.
SRUN = """
while [[ $1 != bash ]]; do shift; done
export SLURM_PROCID=7 SLURM_LOCALID=3 SLURM_NODEID=1 SLURM_NTASKS=8 CUDA_VISIBLE_DEVICES=0,1,2,3
exec "$@"
"""
SCONTROL = 'if [[ $1 == show ]]; then printf "nid01\\nnid02\\n"; else echo "scontrol $*"; fi'
ONE_NODE = ["launcher.ranks_per_node=4"]


def program(folder: Path, name: str, body: str) -> None:
    """Put a bash program of this name into a folder, to stand in for one that a cluster has."""
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """An environment in which programs of `folder` come first."""
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "HOME": str(folder), **variables}


def run(
    script: Path, *added: str, programs: Path, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script with stand-ins, these arguments, and these variables alone."""
    words, variables = ["bash", str(script), *added], environment(programs, **variables)
    return subprocess.run(words, env=variables, cwd=cwd, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize("kind", ["torchrun", "slurm"])
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
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, str(path)], check=True, timeout=30)


def emitted(folder: Path, built: Case, *, name: str = "launch.yaml") -> Path:
    """The torchrun script beside its launch config, and a torchrun that prints its arguments, one a line."""
    folder.mkdir(exist_ok=True)
    write_launch(folder / name, built.launch)
    program(folder, "torchrun", PRINTED)
    return emit_script("torchrun", launch=built.launch, machine=built.machine.document, launch_path=folder / name)


def test_one_node_runs_at_once(tmp_path: Path) -> None:
    """Guards the command: torchrun gets the counts, the rendezvous and the launch config, nothing else is needed."""
    done = run(emitted(tmp_path, case(overrides=ONE_NODE)), programs=tmp_path)
    assert done.returncode == 0, done.stderr
    given = done.stdout.splitlines()
    options = "--nnodes 1 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id nano-4"
    logs = ["--local-ranks-filter", "0", "--role", "rank", "--tee", "3", "--log-dir", str(tmp_path / "logs")]
    assert sorted(given[:-3]) == sorted([*options.split(), *logs])
    assert given[-3:] == ["-m", "axonn_tune.runtime", str(tmp_path / "launch.yaml")]


def test_odd_names_are_quoted(tmp_path: Path) -> None:
    """Guards quoting: folders and files with spaces, quotes and dollars run as any other, from anywhere."""
    folder, name = tmp_path / "it's $HOME", '-n "a" $(touch pwned).yaml'
    done = run(emitted(folder, case(overrides=ONE_NODE), name=name), programs=folder, cwd=tmp_path)
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


# Slurm.


def sbatch(path: str | Path = "launch.yaml", *, slurm: dict[str, Any] | None = None, **changes: Any) -> str:
    """The script of eight ranks on two Perlmutter nodes, with changes to the machine's section or the launch config."""
    built = case("nano", "perlmutter", grid=Grid(x=2, y=1, z=2, data=2))
    machine, launch = built.machine.document, built.launch.model_copy(update=changes)
    assert machine.launcher.slurm is not None
    section = machine.launcher.slurm.model_copy(update=slurm or {})
    machine = machine.model_copy(update={"launcher": machine.launcher.model_copy(update={"slurm": section})})
    if Path(path).is_absolute():
        write_launch(path, launch)
    return script_text("slurm", launch=launch, machine=machine, launch_path=path)


def directives(text: str) -> list[str]:
    """What sbatch reads: `#SBATCH` lines before the first command."""
    head = text.split("set -euo pipefail")[0].splitlines()
    assert all(line.startswith("#") for line in head)
    return [line.removeprefix("#SBATCH ") for line in head if line.startswith("#SBATCH ")]


def prepared(folder: Path, *, python: str = "env", **changes: Any) -> Path:
    """Script, launch config and stand-ins in one folder."""
    for name, body in (("scontrol", SCONTROL), ("srun", SRUN), ("python3", python)):
        program(folder, name, body)
    path = folder / "launch.sbatch"
    path.write_text(sbatch(folder / "launch.yaml", **changes))
    return path


def test_the_time_limit_follows_the_prediction() -> None:
    """Guards the limit: steps at the upper end, and time to start; a round hour without a prediction."""
    predicted = case("nano", "perlmutter", grid=Grid(x=2, y=1, z=2, data=2)).launch.predicted
    for update, limit in (({"high_s": 90.0}, "02:45:00"), ({"high_s": None, "iteration_s": None}, "01:00:00")):
        text = sbatch(predicted=predicted.model_copy(update=update), steps=100)
        assert f"--time={limit}" in directives(text)


def test_jobs_requeue_only_if_they_can_resume() -> None:
    """Guards against a job that begins again at step 0 for ever."""
    assert "--no-requeue" in directives(sbatch())
    assert "--requeue" in directives(sbatch(checkpoint=Checkpoint(directory="checkpoints")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"constraint": "gpu\nrm -rf ~"}, "constraint\n.*match pattern"),
        ({"extra": ("--exclusive\nrm -rf ~",)}, "extra.0\n.*match pattern"),
        ({"account": 'a"b'}, "account\n.*match pattern"),
        ({"srun": ("--mpi=pmix\nrm -rf ~",)}, "srun.0\n.*match pattern"),
    ],
)
def test_options_that_would_break_out_are_refused(changes: dict[str, Any], message: str) -> None:
    """Guards the shell against a profile: an option stays one option."""
    with pytest.raises(ValidationError, match=message):
        Slurm.model_validate({"cpus_per_rank": 1, **changes})
    with pytest.raises(UsageError, match=r"launcher\.slurm\.srun: No closing quotation"):
        sbatch(slurm={"srun": ("--mpi='pmix",)})


def test_each_task_knows_its_rank(tmp_path: Path) -> None:
    """Guards the mapping from Slurm's names to torch's, the meeting point, and the list of devices."""
    path = prepared(tmp_path, python='env; echo "arguments: $*"')
    done = run(path, programs=tmp_path, SLURM_SUBMIT_DIR=str(tmp_path), **JOB)
    assert done.returncode == 0, done.stderr
    assert f"arguments: -m axonn_tune.runtime {tmp_path}/launch.yaml" in done.stdout
    found = dict(re.findall(r"^(\w+)=(.*)$", done.stdout, flags=re.MULTILINE))
    expected = {
        "RANK": "7", "LOCAL_RANK": "3", "GROUP_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "nid01", "MASTER_PORT": "20345", "CUDA_VISIBLE_DEVICES": "3,2,1,0", "NCCL_NET": "AWS Libfabric",
    }  # fmt: skip
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "submit this script with sbatch"),
        ({**JOB, "SLURM_JOB_NUM_NODES": "3"}, "this job has 3 nodes, but the grid needs 2"),
        ({**JOB, "SLURM_SUBMIT_DIR": "/"}, "there is no file //launch.yaml: submit from the folder that holds it"),
    ],
)
def test_a_wrong_job_stops_before_it_starts(tmp_path: Path, variables: dict[str, str], message: str) -> None:
    """Guards against a wrong number of nodes and a wrong folder, with a message before any rank runs."""
    done = run(prepared(tmp_path), programs=tmp_path, **variables)
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert message in done.stderr


@pytest.mark.parametrize(("checkpoint", "said"), [("saved", "saving\nscontrol requeue 12345\n"), (None, "saving\n")])
def test_the_signal_reaches_the_ranks_before_the_limit(tmp_path: Path, checkpoint: str | None, said: str) -> None:
    """Guards the end of a time limit: ranks get USR2, the script waits for them, and requeues what was saved."""
    rank = f"""
trap 'sleep 0.2; echo saving; exit 75' USR2
touch {tmp_path}/running
while :; do sleep 0.02; done
"""
    path = prepared(tmp_path, checkpoint=Checkpoint(directory=checkpoint), python=rank)
    variables = environment(tmp_path, SLURM_SUBMIT_DIR=str(tmp_path), **JOB)
    with subprocess.Popen(["bash", str(path)], env=variables, stdout=subprocess.PIPE, text=True) as job:
        started = time.monotonic()
        while not (tmp_path / "running").exists() and time.monotonic() - started < 20:
            time.sleep(0.02)
        os.kill(job.pid, signal.SIGUSR2)
        output, _ = job.communicate(timeout=20)
    assert (job.returncode, output) == (75, said)


# Other frameworks.


@pytest.fixture(scope="module")
def found() -> SearchResult:
    """Megatron-Core on 16 GPUs, with GTP, a pipeline and interleaving."""
    pins = {"x": 2, "z": 2, "data": 2, "context": 1, "pipeline": 2, "chunks": 2}
    return axonn_tune.search("20b", gpus=16, machine="perlmutter", framework="megatron-core", batch=64, **pins)


def checkout(folder: Path, *, release: str = "0.19.2") -> None:
    """Files of frameworks' checkouts by which scripts know them, of this release of Megatron-Core."""
    major, minor, patch = release.split(".")
    parts = f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\nVERSION = (MAJOR, MINOR, PATCH)\n"
    files = {"megatron/core/package_info.py": parts, "assets/version.txt": "0.3.0\n"}
    for name in ("pretrain_gpt.py", "torchtitan/train.py", "train.py"):
        files[name] = ""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")


def started(script: Path, *added: str) -> list[str]:
    """What bash hands to torchrun, with arguments of the user's."""
    program(script.parent, "torchrun", PRINTED)
    checkout(script.parent)
    return run(script, *added, programs=script.parent, cwd=script.parent, HEAD_NODE="nid01").stdout.splitlines()


def test_torchrun_gets_every_argument(tmp_path: Path) -> None:
    """Guards the script: what bash hands to torchrun is the command, a layout of stages with its bars and stars, and
    what the user adds comes last."""
    pins = {"x": 4, "z": 1, "data": 1, "context": 1, "pipeline": 5}
    found = axonn_tune.search("20b", gpus=20, machine="perlmutter", framework="megatron-core", batch=64, **pins)
    (path,) = found.write_launch_config(tmp_path / "run")
    assert path == tmp_path / "run.sh"
    assert path.stat().st_mode & 0o100
    command = command_of(found.ranked.detail(0))
    words = [*command.program, *command.words, "--save", "a b"]
    assert any("|" in word for word in words)
    assert started(path, "--save", "a b")[-len(words) :] == words


def test_slurm_starts_a_task_a_rank(tmp_path: Path, found: SearchResult) -> None:
    """Guards the sbatch script: each task runs the same arguments, with the environment that the framework wants."""
    (path,) = found.write_launch_config(tmp_path / "run.yaml", emit="slurm")
    program(tmp_path, "srun", SRUN.replace("TASKS=8", "TASKS=16"))
    program(tmp_path, "scontrol", SCONTROL)
    program(tmp_path, "python3", f'echo "$CUDA_DEVICE_MAX_CONNECTIONS $RANK $WORLD_SIZE $MASTER_ADDR"\n{PRINTED}')
    job = {**JOB, "SLURM_JOB_NUM_NODES": "4", "SLURM_SUBMIT_DIR": str(tmp_path)}
    checkout(tmp_path)
    ended = run(path, programs=tmp_path, cwd=tmp_path, **job)
    command = command_of(found.ranked.detail(0))
    assert ended.stdout.splitlines() == ["1 7 16 nid01", *command.program, *command.words], ended.stderr
    assert {"--nodes=4", "--exclusive", "--mem=0"} <= {*directives(path.read_text())}
    assert "--signal" not in path.read_text()


def test_a_subcommand_stays_last(tmp_path: Path) -> None:
    """Guards torchtitan's command line: what the user adds comes before the subcommand, after which options fail."""
    found = axonn_tune.search("llama3-8b", gpus=8, machine="dgx-h100", framework="torchtitan", batch=16)
    (path,) = found.write_launch_config(tmp_path / "run.sh")
    *_, added, steps, last = started(path, "--training.steps", "7")
    assert (added, steps) == ("--training.steps", "7")
    assert last.startswith("activation-checkpoint:")


RANKS = 'echo "srun $*"'
"""An srun that says what it was to start."""


@pytest.fixture(name="cluster")
def _cluster(tmp_path: Path, found: SearchResult) -> Path:
    """A folder with the sbatch script of 16 ranks on 4 nodes, a checkout, and stand-ins for Slurm."""
    found.write_launch_config(tmp_path / "run.yaml", emit="slurm")
    program(tmp_path, "srun", RANKS)
    program(tmp_path, "scontrol", SCONTROL)
    checkout(tmp_path)
    return tmp_path


def submitted(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The job on as many nodes as it needs, but for variables."""
    job = {**JOB, "SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS": "16", "SLURM_GPUS_ON_NODE": "4", **variables}
    return run(folder / "run.sbatch", programs=folder, cwd=folder, SLURM_SUBMIT_DIR=str(folder), **job)


@pytest.mark.parametrize(
    ("variables", "change", "said"),
    [
        ({}, lambda folder: (folder / "pretrain_gpt.py").unlink(), "there is no pretrain_gpt.py in "),
        ({}, lambda folder: checkout(folder, release="0.12.1"), "those of Megatron-Core 0.19.2, and here is 0.12.1: "),
        ({}, lambda folder: shutil.rmtree(folder / "megatron"), "0.19.2, and here is an unknown one: "),
        ({"SLURM_JOB_NUM_NODES": "3"}, None, "this job has 3 nodes, but the grid needs 4"),
        ({"SLURM_NTASKS": "8"}, None, "this job has 8 tasks, but the grid has 16 ranks"),
        ({"SLURM_GPUS_ON_NODE": "2"}, None, "this job has 2 GPUs a node, but the grid needs 4"),
    ],
)
def test_what_is_missing_ends_a_job_before_a_rank_starts(
    variables: dict[str, str], change: Callable[[Path], object] | None, said: str, cluster: Path
) -> None:
    """Guards GPU-hours: a missing program, another release and a smaller job each end with one line, and no srun."""
    if change:
        change(cluster)
    done = submitted(cluster, **variables)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert said in done.stderr


def test_what_is_there_starts_and_a_container_is_a_variable(cluster: Path) -> None:
    """Guards the job that is right, one of another release that is asked for, and an image for all ranks."""
    done = submitted(cluster)
    assert done.returncode == 0, done.stderr
    assert "srun --nodes 4 --ntasks 16" in done.stdout
    assert "python3 pretrain_gpt.py --num-layers" in done.stdout
    assert "--train-iters 10 " in done.stdout
    checkout(cluster, release="0.20.0")
    done = submitted(cluster, ANY_RELEASE="1", IMAGE="nvcr.io#nvidia/pytorch:26.01-py3")
    assert done.returncode == 0, done.stderr
    assert "--container-image=nvcr.io#nvidia/pytorch:26.01-py3" in done.stdout


def test_a_dispatcher_that_is_not_installed_ends_a_job(tmp_path: Path) -> None:
    """Guards DeepEP: it is said to be needed, and looked for, in the container where there is one."""
    pins = {"x": 1, "context": 1, "pipeline": 1, "expert": 8}
    steps = ["step.dispatcher=deepep"]
    found = axonn_tune.search(
        "qwen3-30b-a3b", gpus=16, machine="dgx-h100", framework="megatron-core", batch=64, set=steps, **pins
    )
    found.write_launch_config(tmp_path / "run.yaml", emit="slurm")
    assert "needs DeepEP (deepseek-ai/DeepEP), as the Python module deep_ep" in (tmp_path / "run.sbatch").read_text()
    program(tmp_path, "srun", RANKS)
    program(tmp_path, "scontrol", SCONTROL)
    checkout(tmp_path)
    job = {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    done = submitted(tmp_path, **job)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("there is no Python module deep_ep: install DeepEP")
    inside = submitted(tmp_path, IMAGE="image.sqsh", **job).stdout.splitlines()
    assert inside[0].startswith("srun --nodes 1 --ntasks 1 --container-image=image.sqsh"), inside
    (tmp_path / "deep_ep.py").write_text("")
    assert submitted(tmp_path, **job).stdout.startswith("srun --nodes 2 --ntasks 16")


@pytest.mark.parametrize("framework", ["megatron-core", "torchtitan", "fsdp", "deepspeed", "axonn"])
def test_every_framework_looks_for_what_it_starts(framework: str, tmp_path: Path) -> None:
    """Guards each framework's own checks: in an empty folder nothing starts, and one line says why."""
    found = axonn_tune.search("llama3-8b", gpus=16, machine="dgx-h100", framework=framework, batch=64)
    found.write_launch_config(tmp_path / "run.yaml", emit="slurm", pick=1)
    program(tmp_path, "srun", RANKS)
    program(tmp_path, "scontrol", SCONTROL)
    done = submitted(tmp_path, SLURM_JOB_NUM_NODES="2", SLURM_GPUS_ON_NODE="8")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert done.stderr.startswith("there is no ")


@pytest.mark.parametrize(
    ("framework", "tensor", "cuda"),
    [("megatron-core", 1, 0), ("megatron-core", 8, 1), ("megatron-axonn", 8, 1), ("axonn", 1, 0), ("torchtitan", 8, 0)],
)
def test_rocm_has_its_own_variables(framework: str, tensor: int, cuda: int, tmp_path: Path) -> None:
    """Guards AMD's machines: the names that HIP reads; CUDA's only where Megatron's own check asks for it by that."""
    found = axonn_tune.search("llama3-8b", gpus=16, machine="mi300x", framework=framework, batch=64, x=tensor)
    found.write_launch_config(tmp_path / "run.yaml", emit="slurm")
    exported = re.findall(r"^export (\w+)=", (tmp_path / "run.sbatch").read_text(), re.MULTILINE)
    assert ("PYTORCH_HIP_ALLOC_CONF" in exported) == ("axonn" not in framework)
    assert ("GPU_MAX_HW_QUEUES" in exported) == bool(cuda or framework == "axonn")
    assert sum("CUDA" in name for name in exported) == cuda
