"""An sbatch script that starts a launch config with one task per rank. Nothing here submits it."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from axonn_tune.errors import UsageError
from axonn_tune.launch.environment import environment_lines
from axonn_tune.launch.layout import (
    Layout,
    heading_lines,
    launch_file_lines,
    node_layout,
    software_lines,
    world_lines,
)
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.machine import Machine, Slurm

SIGNAL_SECONDS = 120
_START_MINUTES = 15
_DEFAULT_MINUTES = 60

_NODES = """
if ((${SLURM_JOB_NUM_NODES:?submit this script with sbatch} != nodes)); then
  echo "this job has $SLURM_JOB_NUM_NODES nodes, but the grid needs $nodes" >&2
  exit 2
fi"""

_ADDRESS = """
# Ranks meet at the first node; the port differs from job to job, should two share a node.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\\n'*}
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))"""

# Slurm sets these for each task, over what the script exports.
_DEVICE_LISTS = frozenset({"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"})
_RANK = """export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID GROUP_RANK=$SLURM_NODEID
export WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$ranks_per_node"""

_WAIT = """
# Slurm sends USR2 to this shell alone; srun passes it on to every rank. A trapped signal ends `wait` early.
forwarded=no
trap 'forwarded=yes; kill -USR2 "$step" 2>/dev/null || true' USR2
while :; do
  status=0
  wait "$step" || status=$?
  [[ $forwarded == yes ]] || break
  forwarded=no
done"""

_REQUEUE = """
# 75: the ranks saved on the signal. The job goes back into the queue and resumes from there.
if ((status == 75)); then
  scontrol requeue "$SLURM_JOB_ID"
fi"""


def slurm_script(launch: Launch, *, machine: Machine, launch_path: Path) -> str:
    """The script; it expects to be submitted from the folder of the launch config.

    UsageError if the machine has no Slurm, an option cannot be written as `#SBATCH` line, or the
    ranks do not fill nodes.
    """
    slurm = machine.launcher.slurm
    if slurm is None:
        raise UsageError(f"machine {machine.name} has no launcher.slurm section; use --emit torchrun, or write one")
    layout = node_layout(launch)
    lines = [
        "#!/usr/bin/env bash",
        *heading_lines(launch, layout),
        "#",
        *_directives(launch, slurm, layout),
        "set -euo pipefail",
        *world_lines(launch, layout),
        _NODES,
        "",
        "# Slurm runs a copy of this script, so the folder is the one it was submitted from.",
        *launch_file_lines("$SLURM_SUBMIT_DIR", launch_path=launch_path, hint="submit from the folder that holds it"),
        *software_lines(),
        *environment_lines(launch),
        _ADDRESS,
        *_rank_lines(launch),
        *_step_lines(slurm),
        _WAIT,
        *([_REQUEUE] if launch.checkpoint.directory else []),
        'exit "$status"',
    ]
    return "\n".join(lines) + "\n"


def _directives(launch: Launch, slurm: Slurm, layout: Layout) -> list[str]:
    minutes, reason = _minutes(launch)
    account = f"--account={_value(slurm.account)}" if slurm.account else None
    resumes = launch.checkpoint.directory is not None
    return [
        f"#SBATCH --job-name={_value(launch.name)}",
        *([f"#SBATCH {account}"] if account else _ACCOUNT_PLACEHOLDER),
        f"#SBATCH --nodes={layout.nodes}",
        f"#SBATCH --ntasks-per-node={layout.ranks_per_node}",
        *_resources(slurm, layout),
        f"# {reason}",
        f"#SBATCH --time={minutes // 60:02d}:{minutes % 60:02d}:00",
        f"# {SIGNAL_SECONDS} s before that limit this shell gets USR2, which it passes on to the ranks.",
        f"#SBATCH --signal=B:USR2@{SIGNAL_SECONDS}",
        *_SITE_COMMENTS[resumes],
        "#SBATCH --open-mode=append",
        "#SBATCH --output=%x-%j.out",
        *(f"#SBATCH {_one_line(option)}" for option in slurm.extra),
    ]


_ACCOUNT_PLACEHOLDER = [
    "# The account to charge: write its name and take one # away, or leave this if your site needs none.",
    "##SBATCH --account=YOUR_ACCOUNT",
]
_SITE_COMMENTS = {
    True: ["# After a node failure or preemption the job resumes from its last checkpoint.", "#SBATCH --requeue"],
    False: [
        "# Without checkpoint.directory in the launch config a second start would begin again at step 0.",
        "#SBATCH --no-requeue",
    ],
}


def _resources(slurm: Slurm, layout: Layout) -> Iterator[str]:
    yield f"#SBATCH --cpus-per-task={slurm.cpus_per_rank}"
    if slurm.gpus_per_rank:
        yield "# Per node, not per task: a rank that sees its own GPU only cannot reach the others directly."
        yield f"#SBATCH --gpus-per-node={layout.ranks_per_node * slurm.gpus_per_rank}"
    for option in ("constraint", "partition", "qos"):
        value = getattr(slurm, option)
        if value:
            yield f"#SBATCH --{option}={_value(value)}"


def _minutes(launch: Launch) -> tuple[int, str]:
    """Time limit, and where it comes from."""
    predicted = launch.predicted
    step_s = predicted.high_s or predicted.iteration_s
    if step_s is None:
        return _DEFAULT_MINUTES, "No step time is predicted: adjust this."
    end = "the upper end of the predicted interval" if predicted.high_s else "the predicted time"
    minutes = _START_MINUTES + math.ceil(launch.steps * step_s / 60)
    return minutes, f"{launch.steps} steps at {end}, and {_START_MINUTES} minutes to start and save."


def _rank_lines(launch: Launch) -> list[str]:
    """What each task runs first."""
    again = [variable for variable in launch.environment if variable.name in _DEVICE_LISTS]
    exports = [f"export {variable.name}={shlex.quote(variable.value)}" for variable in again]
    names = " and ".join(variable.name for variable in again)
    return [
        "# What torchrun would tell each rank, from what Slurm tells each task.",
        *([f"# {names} once more, because Slurm sets that for each task."] if again else []),
        "export ranks_per_node",
        "# shellcheck disable=SC2016  # expanded by each task, not here",
        "start_rank=" + shlex.quote("\n".join([_RANK, *exports, 'exec "$@"'])),
    ]


def _step_lines(slurm: Slurm) -> list[str]:
    extra = _srun_options(slurm)
    given = {option.split("=")[0] for option in extra}
    bindings = ["--cpu-bind=cores", "--distribution=block:block"]
    options = [
        '--nodes "$nodes" --ntasks "$world" --ntasks-per-node "$ranks_per_node"',
        " ".join([f"--cpus-per-task {slurm.cpus_per_rank}", *(o for o in bindings if o.split("=")[0] not in given)]),
        "--export=ALL --kill-on-bad-exit=1 --label",
        *extra,
    ]
    command = ["srun", *options, 'bash -c "$start_rank" rank python3 -m axonn_tune.runtime "$launch" &']
    return [
        "",
        "# One task per rank, filled node by node and bound to cores in the same order. --cpus-per-task again, because",
        "# srun does not take it from #SBATCH; one rank that fails ends the others.",
        " \\\n  ".join(command),
        "step=$!",
    ]


def _srun_options(slurm: Slurm) -> list[str]:
    """The machine's own options, each word quoted."""
    try:
        return [shlex.quote(word) for option in slurm.srun for word in shlex.split(option)]
    except ValueError as error:
        raise UsageError(f"launcher.slurm.srun: {error} in {' '.join(slurm.srun)!r}") from error


def _value(text: str) -> str:
    """A value as an `#SBATCH` line can hold it; UsageError if it cannot."""
    _one_line(text)
    if re.search(r"[\"\\]", text):
        raise UsageError(f"launcher.slurm: {text!r} holds a quote or backslash, which #SBATCH lines cannot")
    return f'"{text}"' if re.search(r"[\s#']", text) else text


def _one_line(text: str) -> str:
    """The text itself; UsageError if it is no single line and so would end the `#SBATCH` comment."""
    if not text.isprintable() or not text.strip():
        raise UsageError(f"launcher.slurm: {text!r} is not one printable line")
    return text
