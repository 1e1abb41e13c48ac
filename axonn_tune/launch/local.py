"""Running a launch config on this host: joining a world that is being started, or starting one."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from axonn_tune.errors import EnvironmentProblem, TrainingFailedError, UsageError
from axonn_tune.specs.launch import Launch
from axonn_tune.units import counted

RANKS_PER_CORE = 4
"""More than this and ranks mostly wait for each other's turn."""
_FORWARDED = (signal.SIGTERM, signal.SIGUSR2)


def require_torch() -> None:
    """EnvironmentProblem unless torch is installed; does not import it."""
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentProblem("running needs torch, which is not installed: pip install 'axonn-tune[runtime]'")


def already_started(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of several that torchrun or srun has started."""
    return "RANK" in environment or int(environment.get("SLURM_NTASKS", "1")) > 1


def leads(environment: Mapping[str, str]) -> bool:
    """Whether this process is rank 0, or starts all ranks."""
    name = "RANK" if "RANK" in environment else "SLURM_PROCID"
    return not already_started(environment) or environment.get(name) == "0"


def crowding(launch: Launch, *, cores: int) -> str | None:
    """A warning if ranks share cores; UsageError if there are too many for this host."""
    ranks = launch.grid.world
    if launch.backend != "gloo" or ranks <= cores:
        return None
    if ranks > RANKS_PER_CORE * cores:
        raise UsageError(
            f"{ranks} ranks are more than {RANKS_PER_CORE} for each of this host's {cores} cores; "
            "to start them on several hosts, write a script with `axonn-tune ... -o launch.yaml --emit torchrun|slurm`"
        )
    # Whether a profile allows for that, as one calibrated with as many ranks does, its accelerator's name tells.
    return f"{ranks} ranks share {counted(cores, 'core')}; what was predicted for is {launch.predicted.accelerator!r}"


def command_of(launch: Launch, path: Path, *, arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """What to run: this rank alone, or an agent that starts all ranks."""
    joins = already_started(environment) or launch.grid.world == 1
    module = "axonn_tune.runtime" if joins else "axonn_tune.runtime.agent"
    return [sys.executable, "-m", module, str(path), *arguments]


def run_command(command: Sequence[str], launch: Launch) -> int:
    """Run it with the launch config's environment and pass signals on; its exit code."""
    variables = {variable.name: variable.value for variable in launch.environment}
    # What the user has set by hand is meant.
    process = subprocess.Popen(command, env=variables | os.environ)

    def forward(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {one: signal.signal(one, forward) for one in _FORWARDED}
    # The terminal interrupts the whole process group; what runs decides when it has ended.
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        code = process.wait()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    if code == -signal.SIGPIPE:
        return 0
    return code if code >= 0 else TrainingFailedError.exit_code


def dry_run_command(path: Path) -> list[str]:
    """What builds rank 0 without memory or network."""
    return [sys.executable, "-m", "axonn_tune.runtime.dry_run", str(path)]
