"""The Slurm script: directives, quoting, and its run with stand-ins for scontrol and srun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from axonn_tune.errors import UsageError
from axonn_tune.grid import Grid
from axonn_tune.launch.config import write_launch
from axonn_tune.launch.scripts import script_text
from axonn_tune.specs.launch import Checkpoint, Launch
from axonn_tune.specs.machine import Machine, Slurm
from tests.unit.launch.cases import case, environment, program, run

JOB = {
    "SLURM_JOB_ID": "12345",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "nid[01-02]",
    "SLURM_CPUS_PER_TASK": "32",
}
# Stands in for srun: starts what follows the options once, as the last task of two nodes of four.
SRUN = """
while [[ $1 != bash ]]; do shift; done
export SLURM_PROCID=7 SLURM_LOCALID=3 SLURM_NODEID=1 SLURM_NTASKS=8 CUDA_VISIBLE_DEVICES=0,1,2,3
exec "$@"
"""
SCONTROL = 'if [[ $1 == show ]]; then printf "nid01\\nnid02\\n"; else echo "scontrol $*"; fi'


def script(**changes: Any) -> str:
    """The script of eight ranks on two Perlmutter nodes, with changes to the machine's Slurm section."""
    launch, machine = launch_and_machine(changes)
    return script_text("slurm", launch=launch, machine=machine, launch_path=Path("launch.yaml"))


def launch_and_machine(changes: Mapping[str, Any]) -> tuple[Launch, Machine]:
    """What `script` is made from."""
    built = case("nano", "perlmutter", grid=Grid(x=2, y=1, z=2, data=2))
    machine = built.machine.document
    assert machine.launcher.slurm is not None
    slurm = machine.launcher.slurm.model_copy(update=dict(changes))
    return built.launch, machine.model_copy(update={"launcher": machine.launcher.model_copy(update={"slurm": slurm})})


def directives(text: str) -> list[str]:
    """What sbatch reads: `#SBATCH` lines before the first command."""
    head = text.split("set -euo pipefail")[0].splitlines()
    assert all(line.startswith("#") for line in head)
    return [line.removeprefix("#SBATCH ") for line in head if line.startswith("#SBATCH ")]


def prepared(folder: Path, *, checkpoint: str | None = None, python: str = "env", srun: str = SRUN) -> Path:
    """Script, launch config and stand-ins in one folder."""
    launch, machine = launch_and_machine({})
    launch = launch.model_copy(update={"checkpoint": Checkpoint(directory=checkpoint)})
    write_launch(folder / "launch.yaml", launch)
    for name, body in (("scontrol", SCONTROL), ("srun", srun), ("python3", python)):
        program(folder, name, body)
    path = folder / "launch.sbatch"
    path.write_text(script_text("slurm", launch=launch, machine=machine, launch_path=folder / "launch.yaml"))
    return path


def test_the_time_limit_follows_the_prediction() -> None:
    """Guards the limit: steps at the upper end, and time to start; a round hour without a prediction."""
    launch, machine = launch_and_machine({})
    slow = launch.predicted.model_copy(update={"high_s": 90.0})
    unknown = launch.predicted.model_copy(update={"high_s": None, "iteration_s": None})
    for predicted, limit in ((slow, "02:45:00"), (unknown, "01:00:00")):
        changed = launch.model_copy(update={"predicted": predicted, "steps": 100})
        text = script_text("slurm", launch=changed, machine=machine, launch_path=Path("l.yaml"))
        assert f"--time={limit}" in directives(text)


def test_jobs_requeue_only_if_they_can_resume() -> None:
    """Guards against a job that begins again at step 0 for ever."""
    launch, machine = launch_and_machine({})
    assert "--no-requeue" in directives(
        script_text("slurm", launch=launch, machine=machine, launch_path=Path("l.yaml"))
    )
    saving = launch.model_copy(update={"checkpoint": Checkpoint(directory="checkpoints")})
    assert "--requeue" in directives(script_text("slurm", launch=saving, machine=machine, launch_path=Path("l.yaml")))


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
        script(srun=("--mpi='pmix",))


def test_options_are_quoted() -> None:
    """Guards names with spaces, and srun options with what the shell would run."""
    text = script(account="my project", srun=("--mpi=pmix --x='a b'", "--y=$(id);"))
    assert '--account="my project"' in directives(text)
    assert "  --mpi=pmix \\\n  '--x=a b' \\\n  '--y=$(id);' \\\n  bash -c" in text


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
    path = prepared(tmp_path, checkpoint=checkpoint, python=rank)
    variables = environment(tmp_path, SLURM_SUBMIT_DIR=str(tmp_path), **JOB)
    with subprocess.Popen(["bash", str(path)], env=variables, stdout=subprocess.PIPE, text=True) as job:
        started = time.monotonic()
        while not (tmp_path / "running").exists() and time.monotonic() - started < 20:
            time.sleep(0.02)
        os.kill(job.pid, signal.SIGUSR2)
        output, _ = job.communicate(timeout=20)
    assert (job.returncode, output) == (75, said)
