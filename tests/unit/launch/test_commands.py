"""Scripts of other frameworks: what they start is what the framework's description says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import axonn_tune
from axonn_tune.api.search import SearchResult
from axonn_tune.launch.commands import command_of
from tests.unit.launch.cases import program, run

SRUN = """
while [[ $1 != bash ]]; do shift; done
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=16
exec "$@"
"""
PRINTED = 'printf "%s\\n" "$@"'
JOB = {
    "SLURM_JOB_ID": "12345",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "nid[01-04]",
    "SLURM_CPUS_PER_TASK": "16",
}


@pytest.fixture(scope="module")
def found() -> SearchResult:
    """Megatron-Core on 16 GPUs, with GTP, a pipeline and interleaving."""
    pins = {"x": 2, "z": 2, "data": 2, "context": 1, "pipeline": 2, "chunks": 2}
    return axonn_tune.search("20b", gpus=16, machine="perlmutter", framework="megatron-core", batch=64, **pins)


def words_of(found: SearchResult, form: str = "") -> list[str]:
    """Program and arguments by the framework's description."""
    problem = found.inputs.problem
    command = command_of(
        found.results.ranked.pricing(0),
        model=problem.model,
        machine=problem.machine,
        workload=problem.workload,
        form=form,
    )
    return [*command.program, *command.words]


def test_torchrun_gets_every_argument(tmp_path: Path, found: SearchResult) -> None:
    """Guards the script: what bash hands to torchrun is the command, and what the user adds comes last."""
    (path,) = found.write_launch_config(tmp_path / "run")
    assert path == tmp_path / "run.sh"
    assert path.stat().st_mode & 0o100
    program(tmp_path, "torchrun", PRINTED)
    ended = subprocess.run(
        ["bash", str(path), "--save", "a b"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HEAD_NODE": "nid01"},
        capture_output=True,
        text=True,
        check=True,
    )
    words = words_of(found)
    assert ended.stdout.splitlines()[-len(words) - 2 :] == [*words, "--save", "a b"]
    assert "--tensor-parallel-num-weight-shards" in words
    assert words[words.index("--tensor-parallel-num-weight-shards") + 1] == "4"


def test_slurm_starts_a_task_a_rank(tmp_path: Path, found: SearchResult) -> None:
    """Guards the sbatch script: each task runs the same arguments, with the environment that the framework wants."""
    (path,) = found.write_launch_config(tmp_path / "run.yaml", emit="slurm")
    assert path == tmp_path / "run.sbatch"
    assert "numbers ranks in this order itself: the order of the hosts does not matter." in path.read_text("utf-8")
    program(tmp_path, "srun", SRUN)
    program(tmp_path, "scontrol", 'printf "nid01\\nnid02\\n"')
    program(tmp_path, "python3", f'echo "$CUDA_DEVICE_MAX_CONNECTIONS $RANK $WORLD_SIZE $MASTER_ADDR"\n{PRINTED}')
    ended = run(path, programs=tmp_path, cwd=tmp_path, SLURM_SUBMIT_DIR=str(tmp_path), **JOB)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["1 0 16 nid01", *words_of(found)]
    assert "#SBATCH --nodes=4" in path.read_text()
    assert "--signal" not in path.read_text()


def test_a_subcommand_stays_last(tmp_path: Path) -> None:
    """Guards torchtitan's command line: what the user adds comes before the subcommand, after which options fail."""
    found = axonn_tune.search("llama3-8b", gpus=8, machine="dgx-h100", framework="torchtitan", batch=16)
    (path,) = found.write_launch_config(tmp_path / "run.sh")
    program(tmp_path, "torchrun", PRINTED)
    ended = subprocess.run(
        ["bash", str(path), "--training.steps", "7"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    *_, added, steps, last = ended.stdout.splitlines()
    assert (added, steps) == ("--training.steps", "7")
    assert last.startswith("activation-checkpoint:")
