"""Scripts that start a launch config, or another framework's command: bash around torchrun, or sbatch."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from axonn_tune.errors import EnvironmentProblem, UsageError
from axonn_tune.files import write_text_atomically
from axonn_tune.job import require_full_nodes, slurm_section
from axonn_tune.launch.config import comment, count_ranks, environment_lines, grid_line, prediction_line
from axonn_tune.specs.launch import Launch, Prediction
from axonn_tune.specs.machine import EnvironmentVariable, Machine

ScriptKind: TypeAlias = Literal["torchrun", "slurm"]
SUFFIXES: dict[ScriptKind, str] = {"torchrun": ".sh", "slurm": ".sbatch"}

Emit: TypeAlias = Literal["torchrun", "slurm", "bridge", "toml", "fully-shard", "swift"]
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
    there. checks: bash that looks for what must be there. accelerate: options of `accelerate launch`, one process a
    node, which starts the ranks. fixed: framework that numbers ranks in its own order, "" where the order is chosen.
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
    checks: tuple[str, ...] = ()
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
        settings=(
            f"folder={folder}",
            f'launch="$folder"/{shlex.quote(launch_path.name)}',
            "if [[ ! -f $launch ]]; then",
            f'  echo "there is no file $launch: {hint}" >&2',
            "  exit 2",
            "fi",
        ),
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


FOLDERS: dict[ScriptKind, str] = {
    "torchrun": '$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")',
    "slurm": "$SLURM_SUBMIT_DIR",
}
"""Folder of the files that a script starts, in bash: its own, or the one that the job was submitted from."""


def script_text(kind: ScriptKind, *, launch: Launch, machine: Machine, launch_path: str | Path) -> str:
    """The script as text; UsageError as `job_script`, or as `emit_script` for the path."""
    path = Path(launch_path)
    # /dev/stdout counts as a file when output goes to one.
    device = path.absolute().parts[1:2] in (("dev",), ("proc",))
    if not path.name or path.suffix == SUFFIXES[kind] or device or (path.exists() and not path.is_file()):
        raise UsageError(f"--emit needs a launch config in a file to write a script beside, not {str(launch_path)!r}")
    folder, hint = FOLDERS[kind], "submit from the folder that holds it"
    if kind == "torchrun":
        hint = "it belongs beside this script"
    return job_script(kind, job_of(launch, launch_path=path, folder=folder, hint=hint), machine)


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


def job_script(kind: ScriptKind, job: Job, machine: Machine) -> str:
    """The script of a job, from the template of its kind: it starts, or is submitted from, the folder of its files.

    UsageError as `require_full_nodes`, and for Slurm as `slurm_section`.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    require_full_nodes(job.world, job.per_node)
    fixed = f" {job.fixed} numbers ranks in this order itself: the order of the hosts does not matter."
    templates = Environment(
        loader=PackageLoader("axonn_tune.launch"),
        undefined=StrictUndefined,
        # Bash has `${#`.
        comment_start_string="{//",
        comment_end_string="//}",
        lstrip_blocks=True,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {"comment": comment, "quote": shlex.quote, "value": _value}
    return templates.get_template(kind + SUFFIXES[kind]).render(
        job=job,
        fixed=fixed if job.fixed else "",
        predicted=prediction_line(job.predicted),
        nccl=machine.library.name == "NCCL",
        gpus=machine.launcher.backend == "nccl",
        **(_slurm_fields(job, machine) if kind == "slurm" else {}),
    )


SIGNAL_SECONDS = 120
_START_MINUTES = 15
_DEFAULT_MINUTES = 60

_WHOLE = {"--exclusive": ("--exclusive", "--oversubscribe"), "--mem=0": ("--mem", "--mem-per-cpu", "--mem-per-gpu")}
"""Options of jobs on whole nodes, and those of a site that say otherwise."""

# Slurm sets these for each task, over what the script exports.
_DEVICE_LISTS = frozenset({"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"})


def _slurm_fields(job: Job, machine: Machine) -> dict[str, Any]:
    """What the template of Slurm needs beyond the job: the machine's section, srun's options, and the time limit."""
    (slurm, extra), predicted = slurm_section(machine), job.predicted
    given = {option.split("=")[0] for option in extra}
    asked = {option.split("=")[0] for option in slurm.extra}
    whole = job.ranks_per_node == machine.launcher.ranks_per_node
    # Tasks are labelled as their ranks are numbered, unless the site distributes them otherwise.
    bindings = [one for one in ("--cpu-bind=cores", "--distribution=block:block") if one.split("=")[0] not in given]
    step_s = predicted.high_s or predicted.iteration_s
    if step_s is None:
        minutes, limit_from = _DEFAULT_MINUTES, "No step time is predicted: adjust this."
    else:
        end = "the upper end of the predicted interval" if predicted.high_s else "the predicted time"
        minutes = _START_MINUTES + math.ceil(job.steps * step_s / 60)
        limit_from = f"{job.steps} steps at {end}, and {_START_MINUTES} minutes to start and save."
    return {
        "slurm": slurm,
        "srun": extra,
        "extra": [*(one for one, same in _WHOLE.items() if whole and not asked & {*same}), *slurm.extra],
        "bindings": "".join(f" {one}" for one in bindings),
        "again": " and ".join(line.removeprefix("export ").partition("=")[0] for line in job.per_task),
        "minutes": minutes,
        "limit_from": limit_from,
        "signal_s": SIGNAL_SECONDS,
    }


def _value(text: str) -> str:
    """A value as an `#SBATCH` line holds it."""
    return f'"{text}"' if re.search(r"[\s#']", text) else text
