"""Scripts that start a launch config, or another framework's command: bash around torchrun, or sbatch."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from axonn_tune.errors import EnvironmentProblem, UsageError
from axonn_tune.files import write_text_atomically
from axonn_tune.launch.config import comment, count_ranks, environment_lines, grid_line, prediction_line
from axonn_tune.specs.launch import Launch, Prediction
from axonn_tune.specs.machine import EnvironmentVariable, Machine, Slurm

ScriptKind: TypeAlias = Literal["torchrun", "slurm"]
SUFFIXES: dict[ScriptKind, str] = {"torchrun": ".sh", "slurm": ".sbatch"}

Emit: TypeAlias = Literal["torchrun", "slurm", "bridge", "toml", "fully-shard"]
"""Values of `--emit`: kinds of script, and forms for another front end."""


def emit_kind(wanted: Sequence[str]) -> tuple[ScriptKind, str]:
    """The kind of script, torchrun by default, and the form, "" for none; UsageError for two of one."""
    kinds = [one for one in wanted if one in SUFFIXES]
    forms = [one for one in wanted if one not in SUFFIXES]
    for several in (kinds, forms):
        if len(several) > 1:
            raise UsageError(f"--emit {' --emit '.join(several)}: one of them at a time")
    unknown = [one for one in forms if one not in get_args(Emit)]
    if unknown:
        raise UsageError(f"--emit {unknown[0]}: known are {', '.join(get_args(Emit))}")
    kind: ScriptKind = "slurm" if kinds == ["slurm"] else "torchrun"
    return kind, "".join(forms)


@dataclass(frozen=True)
class Job:
    """Inputs of a job script.

    about: sentences on top, before where the ranks are. factors: sizes of the axes by name, whose product is the number
    of ranks; inner: the axis whose neighbours are nearest. settings: lines that prepare what is started. program: the
    words after `torchrun` or `python3`, as bash reads them. variables: lines that set the environment; per_task: those
    that Slurm sets for each task. steps: that are run; saves: whether the ranks save on USR2, resumes: and go on from
    there. accelerate: options of `accelerate launch`, one process a node, which starts the ranks. fixed: framework that
    numbers ranks in its own order, "" where the order is chosen.
    """

    name: str
    about: tuple[str, ...]
    predicted: Prediction
    factors: Mapping[str, int]
    inner: str | None
    per_node: int
    settings: tuple[str, ...]
    program: str
    variables: tuple[str, ...]
    steps: int
    per_task: tuple[str, ...] = ()
    saves: bool = False
    resumes: bool = False
    accelerate: tuple[str, ...] = ()
    fixed: str = ""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.factors.values())

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node: all are full, or there is one, which need not be."""
        return min(self.world, self.per_node)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.world // self.ranks_per_node


def job_of(launch: Launch, *, launch_path: Path, folder: str, hint: str) -> Job:
    """The bundled runtime; the launch config is in `folder`, a bash expression."""
    grid, made = launch.grid, launch.provenance
    about = (
        f"Runs {launch.name}: {launch.model.name} on {count_ranks(grid.world)} of {launch.predicted.machine}.",
        f"{grid_line(launch)}.",
        f"Written by {made.tool} {made.version}; starts axonn_tune.runtime once per rank.",
        *(("The runtime has not been run over NCCL or under srun yet.",) if launch.backend == "nccl" else ()),
    )
    return Job(
        name=launch.name,
        about=about,
        predicted=launch.predicted,
        factors=grid.sizes,
        inner=next((axis for axis in grid.order if grid.grid().axis_size(axis) > 1), None),
        per_node=launch.ranks_per_node,
        settings=tuple(_launch_file_lines(folder, launch_path=launch_path, hint=hint)),
        program='-m axonn_tune.runtime "$launch"',
        variables=tuple(environment_lines(launch.environment)),
        per_task=per_task(launch.environment),
        steps=launch.steps,
        saves=True,
        resumes=launch.checkpoint.directory is not None,
    )


def per_task(environment: Iterable[EnvironmentVariable]) -> tuple[str, ...]:
    """Lines that set again what Slurm sets for each task."""
    again = [variable for variable in environment if variable.name in _DEVICE_LISTS]
    return tuple(f"export {variable.name}={shlex.quote(variable.value)}" for variable in again)


BESIDE = '$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")'
SUBMITTED = "$SLURM_SUBMIT_DIR"
"""Folder of a script, and the one that a job was submitted from, in bash."""


def script_text(kind: ScriptKind, *, launch: Launch, machine: Machine, launch_path: str | Path) -> str:
    """The script as text; UsageError as `torchrun_script` and `slurm_script`, or as `emit_script` for the path."""
    path = Path(launch_path)
    if not _is_file_of_its_own(path, suffix=SUFFIXES[kind]):
        raise UsageError(f"--emit needs a launch config in a file to write a script beside, not {str(launch_path)!r}")
    if kind == "slurm":
        hint = "submit from the folder that holds it"
        return slurm_script(job_of(launch, launch_path=path, folder=SUBMITTED, hint=hint), machine)
    return torchrun_script(
        job_of(launch, launch_path=path, folder=BESIDE, hint="it belongs beside this script"), machine
    )


def emit_script(kind: ScriptKind, *, launch: Launch, machine: Machine, launch_path: str | Path) -> Path:
    """Write the executable script to the folder of the launch config, replacing an older one; its path.

    `launch.yaml` gets `launch.sh` (torchrun) or `launch.sbatch` (slurm). UsageError as `script_text`,
    or if the launch config is no file in a folder; EnvironmentProblem if the disk is full. On any
    failure what was there stays.
    """
    path = Path(launch_path)
    text = script_text(kind, launch=launch, machine=machine, launch_path=path)
    target = path.with_name(path.stem + SUFFIXES[kind])
    write_script(target, text)
    return target


def write_script(target: Path, text: str) -> None:
    """Write a script, executable for whoever may read it."""
    write_text_atomically(target, text)
    try:
        # Whoever may read it may run it.
        mode = target.stat().st_mode
        target.chmod(mode | (mode & 0o444) >> 2)
    except OSError as error:
        raise EnvironmentProblem(f"cannot make {str(target)!r} executable: {error.strerror}") from error


def _is_file_of_its_own(path: Path, *, suffix: str) -> bool:
    """Whether a launch config at `path` is, or will be, a file that the script does not replace."""
    # /dev/stdout counts as a file when output goes to one.
    device = path.absolute().parts[1:2] in (("dev",), ("proc",))
    return bool(path.name) and path.suffix != suffix and not device and (path.is_file() or not path.exists())


def _require_full_nodes(job: Job) -> None:
    """UsageError with the arithmetic if the last node would not be full."""
    world, per_node, left = job.world, job.ranks_per_node, job.world % job.ranks_per_node
    if left:
        raise UsageError(
            f"{world} ranks do not fill nodes of {per_node}: {world} = {job.nodes} · {per_node} + {left}; take a GPU "
            f"count that fills nodes, such as {world - left} or {world - left + per_node} "
            "(another number of ranks a node is another placement than the one priced)"
        )


def _heading_lines(job: Job) -> list[str]:
    """Comments on top of a script: the run, placement of ranks, prediction, and origin."""
    last = job.ranks_per_node - 1
    placed = f"Ranks of a node are consecutive, 0 to {last} on the first: neighbours along {job.inner} are nearest."
    if job.fixed:
        placed += f" {job.fixed} numbers ranks in this order itself: the order of the hosts does not matter."
    *about, written = job.about
    return [
        *map(comment, about),
        *([comment(placed)] if last else []),
        comment(f"Predicted: {prediction_line(job.predicted)}."),
        comment(written),
    ]


def _world_lines(job: Job) -> list[str]:
    """The world size, checked by the script, so that an edit of one number is noticed."""
    sizes = " * ".join(map(str, job.factors.values()))
    return [
        "",
        f"# nodes · ranks_per_node = {' · '.join(job.factors)}: "
        f"{job.nodes} · {job.ranks_per_node} = {sizes.replace('*', '·')} = {job.world}",
        f"nodes={job.nodes}",
        f"ranks_per_node={job.ranks_per_node}",
        f"world=$(({sizes}))",
        "if ((nodes * ranks_per_node != world)); then",
        '  echo "$nodes nodes of $ranks_per_node ranks are $((nodes * ranks_per_node)) ranks,'
        ' but the grid has $world" >&2',
        "  exit 2",
        "fi",
    ]


def _launch_file_lines(folder: str, *, launch_path: Path, hint: str) -> list[str]:
    """The launch config in `folder` (a bash expression), and a check that it is there."""
    return [
        f"folder={folder}",
        f'launch="$folder"/{shlex.quote(launch_path.name)}',
        "if [[ ! -f $launch ]]; then",
        f'  echo "there is no file $launch: {hint}" >&2',
        "  exit 2",
        "fi",
    ]


def torchrun_script(job: Job, machine: Machine) -> str:
    """The script, for the same folder as the files it starts. UsageError if the ranks do not fill nodes."""
    _require_full_nodes(job)
    starts = _accelerate_lines(job) if job.accelerate else [*_rendezvous_lines(job), *_command_lines(job, machine)]
    return _script(job, starts=starts)


def _script(job: Job, *, starts: Iterable[str], directives: Iterable[str] = (), checks: Iterable[str] = ("",)) -> str:
    """What both kinds of script have, around the lines of one kind."""
    lines = [
        "#!/usr/bin/env bash",
        *_heading_lines(job),
        *directives,
        "set -euo pipefail",
        *_world_lines(job),
        *checks,
        *job.settings,
        "",
        "# Load modules and activate your Python environment here, unless they are already.",
        *job.variables,
        *starts,
    ]
    return "\n".join(lines) + "\n"


def _accelerate_lines(job: Job) -> list[str]:
    """`accelerate launch`, which starts the ranks of a node; every node runs the script with its own number."""
    heading, number, head = "# One node.", "0", "localhost"
    if job.nodes > 1:
        heading = f"# Run this script on each of the {job.nodes} nodes, with HEAD_NODE the name of the first."
        number = '"${NODE_RANK:?set it to 0 on the first node, 1 on the next, and so on}"'
        head = '"${HEAD_NODE:?set it to the name of the first node, the same on all}"'
    options = [
        '--num_machines "$nodes"',
        '--num_processes "$world"',
        f"--machine_rank {number}",
        f"--main_process_ip {head}",
        '--main_process_port "${HEAD_PORT:-29400}"',
    ]
    return [
        "",
        heading,
        " \\\n  ".join(["exec accelerate launch", *job.accelerate, *options, job.program]),
    ]


def _rendezvous_lines(job: Job) -> list[str]:
    if job.nodes == 1:
        return ["", "# One node: any free port will do.", "rendezvous=localhost:0"]
    return [
        "",
        f"# Run this script on each of the {job.nodes} nodes, with HEAD_NODE the name of the same one on all.",
        "# torchrun decides which of them has the first ranks.",
        'rendezvous="${HEAD_NODE:?set it to the name of one of the nodes, the same on all}:${HEAD_PORT:-29400}"',
    ]


_BINDING = (
    "# Each rank runs on the cores next to its GPU; torch has the option from 2.9 on.",
    "binding=",
    "if [[ $(torchrun --help) == *--numa-binding* ]]; then",
    "  binding=node",
    "fi",
)


def _command_lines(job: Job, machine: Machine) -> list[str]:
    options = [
        '--nnodes "$nodes"',
        '--nproc-per-node "$ranks_per_node"',
        "--rdzv-backend c10d",
        '--rdzv-endpoint "$rendezvous"',
        f"--rdzv-id {shlex.quote(job.name)}",
        "--local-ranks-filter 0",
        "--role rank",
        "--tee 3",
        '--log-dir "$folder/logs"',
    ]
    lines = ["", "# The terminal shows the first rank of a node; logs/ holds what every rank prints."]
    if machine.library.name == "NCCL":
        lines = ["", *_BINDING, *lines]
        options.append("${binding:+--numa-binding $binding}")
    command = ["exec torchrun", *options, job.program]
    return [*lines, " \\\n  ".join(command)]


SIGNAL_SECONDS = 120
_START_MINUTES = 15
_DEFAULT_MINUTES = 60

_NODES = """
if ((${SLURM_JOB_NUM_NODES:?submit this script with sbatch} != nodes)); then
  echo "this job has $SLURM_JOB_NUM_NODES nodes, but the grid needs $nodes" >&2
  exit 2
fi

# Slurm runs a copy of this script, so the folder is the one it was submitted from."""

_ADDRESS = """
# The first node is the rendezvous. The port depends on the job, in case two jobs share a node.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\\n'*}
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))"""

# Slurm sets these for each task, over what the script exports.
_DEVICE_LISTS = frozenset({"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"})
# By node, whatever --distribution the site sets: $SLURM_PROCID follows it, and may go round the nodes.
_NUMBER = "$((SLURM_NODEID * {per_node} + SLURM_LOCALID))"
_RANK = f"""export RANK={_NUMBER.format(per_node="ranks_per_node")}
export LOCAL_RANK=$SLURM_LOCALID GROUP_RANK=$SLURM_NODEID
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


def slurm_script(job: Job, machine: Machine) -> str:
    """The script; it expects to be submitted from the folder of what it starts.

    UsageError if the machine has no Slurm, an option cannot be written as `#SBATCH` line, or the
    ranks do not fill nodes.
    """
    slurm = machine.launcher.slurm
    if slurm is None:
        raise UsageError(f"machine {machine.name} has no launcher.slurm section; use --emit torchrun, or write one")
    _require_full_nodes(job)
    directives = [
        *([] if job.accelerate or job.nodes == 1 else _check_lines(job)),
        "#",
        *_directives(job, slurm),
    ]
    starts = [
        _ADDRESS,
        *([] if job.accelerate else _rank_lines(job)),
        *_step_lines(job, slurm),
        *([_WAIT] if job.saves else []),
        *([_REQUEUE] if job.resumes else []),
        *(['exit "$status"'] if job.saves else []),
    ]
    return _script(job, starts=starts, directives=directives, checks=[_NODES])


def _check_lines(job: Job) -> list[str]:
    """Comment with the command that prints the host of each rank."""
    number = _NUMBER.format(per_node=job.ranks_per_node)
    return [
        "# To check which host each rank is on, run this in the job, or in an salloc of as many nodes:",
        f"#   srun --nodes {job.nodes} --ntasks-per-node {job.ranks_per_node} "
        f"bash -c 'echo {number} $(hostname)' | sort -n",
    ]


def _directives(job: Job, slurm: Slurm) -> list[str]:
    minutes, reason = _minutes(job)
    account = f"--account={_value(slurm.account)}" if slurm.account else None
    ranks = job.ranks_per_node
    return [
        f"#SBATCH --job-name={_value(job.name)}",
        *([f"#SBATCH {account}"] if account else _ACCOUNT_PLACEHOLDER),
        f"#SBATCH --nodes={job.nodes}",
        f"#SBATCH --ntasks-per-node={1 if job.accelerate else ranks}",
        f"# {ranks} · {slurm.cpus_per_rank} = {ranks * slurm.cpus_per_rank} cores of a node: a smaller number where it "
        "has fewer.",
        f"#SBATCH --cpus-per-task={slurm.cpus_per_rank * (ranks if job.accelerate else 1)}",
        *_resources(job, slurm),
        f"# {reason}",
        f"#SBATCH --time={minutes // 60:02d}:{minutes % 60:02d}:00",
        *(_SIGNAL if job.saves else []),
        *(_SITE_COMMENTS[job.resumes] if job.saves else []),
        "#SBATCH --open-mode=append",
        "#SBATCH --output=%x-%j.out",
        *(f"#SBATCH {option}" for option in slurm.extra),
    ]


_SIGNAL = [
    f"# {SIGNAL_SECONDS} s before that limit this shell gets USR2, which it passes on to the ranks.",
    f"#SBATCH --signal=B:USR2@{SIGNAL_SECONDS}",
]
_ACCOUNT_PLACEHOLDER = [
    "# If your site charges an account, write its name here and uncomment the line (##SBATCH to #SBATCH).",
    "##SBATCH --account=YOUR_ACCOUNT",
]
_SITE_COMMENTS = {
    True: ["# After a node failure or preemption the job resumes from its last checkpoint.", "#SBATCH --requeue"],
    False: [
        "# Without checkpoint.directory in the launch config a second start would begin again at step 0.",
        "#SBATCH --no-requeue",
    ],
}


def _resources(job: Job, slurm: Slurm) -> Iterator[str]:
    if slurm.gpus_per_rank:
        yield "# Per node, not per task: a rank that sees its own GPU only cannot reach the others directly."
        yield f"#SBATCH --gpus-per-node={job.ranks_per_node * slurm.gpus_per_rank}"
    for option in ("constraint", "partition", "qos"):
        value = getattr(slurm, option)
        if value:
            yield f"#SBATCH --{option}={_value(value)}"


def _minutes(job: Job) -> tuple[int, str]:
    """Time limit and its source."""
    predicted = job.predicted
    step_s = predicted.high_s or predicted.iteration_s
    if step_s is None:
        return _DEFAULT_MINUTES, "No step time is predicted: adjust this."
    end = "the upper end of the predicted interval" if predicted.high_s else "the predicted time"
    minutes = _START_MINUTES + math.ceil(job.steps * step_s / 60)
    return minutes, f"{job.steps} steps at {end}, and {_START_MINUTES} minutes to start and save."


def _rank_lines(job: Job) -> list[str]:
    """First lines of each task."""
    names = " and ".join(line.removeprefix("export ").partition("=")[0] for line in job.per_task)
    return [
        "# What torchrun would tell each rank, from what Slurm tells each task. Ranks of a node are consecutive, as in",
        "# the rank order that was priced, whatever --distribution srun is given.",
        *([f"# {names} once more, because Slurm sets that for each task."] if names else []),
        "export ranks_per_node",
        "# shellcheck disable=SC2016  # expanded by each task, not here",
        "start_rank=" + shlex.quote("\n".join([_RANK, *job.per_task, 'exec "$@"'])),
    ]


def _step_lines(job: Job, slurm: Slurm) -> list[str]:
    try:
        extra = [shlex.quote(word) for option in slurm.srun for word in shlex.split(option)]
    except ValueError as error:
        raise UsageError(f"launcher.slurm.srun: {error} in {' '.join(slurm.srun)!r}") from error
    given = {option.split("=")[0] for option in extra}
    # Tasks are labelled as their ranks are numbered, unless the site distributes them otherwise.
    bindings = ["--cpu-bind=cores", "--distribution=block:block"]
    bindings = [option for option in bindings if option.split("=")[0] not in given]
    common = ["--export=ALL --kill-on-bad-exit=1 --label", *extra]
    if job.accelerate:
        return _node_step_lines(job, [_CPUS, *common])
    options = [
        '--nodes "$nodes" --ntasks "$world" --ntasks-per-node "$ranks_per_node"',
        " ".join([_CPUS, *bindings]),
        *common,
    ]
    end = " &" if job.saves else ""
    command = ["srun", *options, f'bash -c "$start_rank" rank python3 {job.program}{end}']
    return [
        "",
        "# One task per rank, filled node by node and bound to cores in the same order. --cpus-per-task again, because",
        "# srun does not take it from #SBATCH; if one rank fails, srun ends the others.",
        *_CONTAINER,
        " \\\n  ".join(command),
        *(["step=$!"] if job.saves else []),
    ]


_CPUS = '--cpus-per-task "$SLURM_CPUS_PER_TASK"'
_CONTAINER = (
    "# In a container: srun --container-image=IMAGE --container-mounts=PATH:PATH (pyxis with enroot), or",
    "# `apptainer exec --nv --bind PATH IMAGE bash` for bash below; --rocm for AMD.",
)


def _node_step_lines(job: Job, common: list[str]) -> list[str]:
    """One task a node, whose `accelerate launch` starts the ranks there."""
    launch = [
        "accelerate launch",
        *job.accelerate,
        '--num_machines "$nodes" --num_processes "$world" --machine_rank "$SLURM_NODEID"',
        '--main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT"',
        '"$@"',
    ]
    command = ["srun", '--nodes "$nodes" --ntasks "$nodes" --ntasks-per-node 1', *common]
    return [
        "",
        "# One task a node, which starts the ranks there.",
        *_CONTAINER,
        "export nodes world folder",
        "# shellcheck disable=SC2016  # expanded by each task, not here",
        "start_node=" + shlex.quote("\n".join([*job.per_task, " \\\n  ".join(["exec", *launch])])),
        " \\\n  ".join([*command, f'bash -c "$start_node" node {job.program}']),
    ]


def _value(text: str) -> str:
    """A value as an `#SBATCH` line holds it."""
    return f'"{text}"' if re.search(r"[\s#']", text) else text
