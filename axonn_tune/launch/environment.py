"""Environment variables of a launch: which ones, why, and the block of a script that sets them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from axonn_tune.errors import UsageError
from axonn_tune.specs.launch import PURPOSES, VARIABLE_NAME, Launch, LaunchVariable, Purpose
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.workload import Workload

_HEADINGS: dict[Purpose, str] = {
    "overlap": "For communication behind computation, which the predicted step time assumes.",
    "memory": "For memory, most of which the prediction takes to be usable.",
    "compute": "For computation: the cores that the prediction gives each rank.",
    "site": "What this machine wants.",
    "debug": "For finding faults. Training does not need it.",
}

_QUEUES = LaunchVariable(
    name="CUDA_DEVICE_MAX_CONNECTIONS",
    value="8",
    why="hardware queues: with 1, kernels issued after a waiting collective wait with it",
    purpose="overlap",
)
_PRIORITY = LaunchVariable(
    name="TORCH_NCCL_HIGH_PRIORITY",
    value="1",
    why="collectives get the next free processors of the GPU, not those left over by a matrix product",
    purpose="overlap",
)
_SEGMENTS = LaunchVariable(
    name="PYTORCH_ALLOC_CONF",
    value="expandable_segments:True",
    why="less memory lost to fragmentation",
    purpose="memory",
)
_NCCL_DEBUG = LaunchVariable(
    name="NCCL_DEBUG",
    value="WARN",
    why="a failing link or version conflict is named when it happens",
    purpose="debug",
)
_FAULTS = LaunchVariable(
    name="PYTHONFAULTHANDLER",
    value="1",
    why="a rank that crashes prints where it was",
    purpose="debug",
)


def launch_environment(machine: Machine, *, workload: Workload) -> tuple[LaunchVariable, ...]:
    """Variables every rank gets, each once: what overlap, memory and debugging need, and what the machine sets.

    Where both set one, the machine's value and reason hold.
    UsageError if the machine sets something that cannot be the name of a variable.
    """
    own = {variable.name: variable for variable in machine.launcher.environment}
    wrong = sorted(name for name in own if not VARIABLE_NAME.fullmatch(name))
    if wrong:
        raise UsageError(f"machine {machine.name}: launcher.environment cannot set {', '.join(map(repr, wrong))}")
    found = {variable.name: variable for variable in _needed(machine, workload)}
    for name, variable in own.items():
        purpose = found[name].purpose if name in found else "site"
        found[name] = LaunchVariable(name=name, value=variable.value, why=variable.why, purpose=purpose)
    return tuple(sorted(found.values(), key=lambda variable: PURPOSES.index(variable.purpose)))


def _needed(machine: Machine, workload: Workload) -> Iterator[LaunchVariable]:
    if machine.launcher.backend == "gloo":
        yield _threads(machine)
    else:
        if workload.overlaps:
            yield from (_QUEUES, _PRIORITY)
        yield from (_SEGMENTS, _NCCL_DEBUG)
    yield _FAULTS


def _threads(machine: Machine) -> LaunchVariable:
    slurm = machine.launcher.slurm
    return LaunchVariable(
        name="OMP_NUM_THREADS",
        value=str(slurm.cpus_per_rank if slurm else 1),
        why="as many threads as one rank has cores, so that ranks of a node do not take each other's",
        purpose="compute",
    )


def environment_lines(launch: Launch) -> list[str]:
    """The block of a script that sets the variables, grouped by purpose, one comment each."""
    lines: list[str] = []
    for purpose in PURPOSES:
        variables = [variable for variable in launch.environment if variable.purpose == purpose]
        if variables:
            lines += ["", f"# {_HEADINGS[purpose]}"]
        for variable in variables:
            lines += [comment(variable.why), f"export {variable.name}={shlex.quote(variable.value)}"]
    return lines


def comment(text: str) -> str:
    """Text as one comment line, whatever line breaks and control characters it holds."""
    words = "".join(letter if letter.isprintable() else " " for letter in text).split()
    return " ".join(["#", *words])
