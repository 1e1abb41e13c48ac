"""Where configurations run: on the ranks of a lab, on this host, or by a command that starts ranks elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from axonn_tune.errors import EnvironmentProblem, UsageError, error_of
from axonn_tune.lab.lab import Lab
from axonn_tune.lab.running import exit_codes, require_world
from axonn_tune.launch import host
from axonn_tune.specs.launch import Launch

LOOPBACK = "loopback: CPU time, not a network"
_TRIAL = "axonn_tune.runtime.trials:train"
_LOG = "log.txt"
_LAST_LINES = 12


class Ranks(Protocol):
    """Runs launch configs, each in fresh processes."""

    @property
    def network(self) -> str:
        """What the ranks talk through, in words."""

    def require(self, launch: Launch) -> None:
        """UsageError unless there are the ranks that a launch config needs."""

    def run(self, launch: Launch, path: Path, *, steps: int, directory: Path) -> None:
        """Train; metrics are in the directory afterwards. TrainingFailedError with the ranks' last words."""


@dataclass(frozen=True)
class LabRanks:
    """The ranks of a lab that is up. realtime: before all ordinary processes of this host, where that is allowed.

    function: `module:name` of what a rank is, with the arguments of `runtime.trials.train`.
    """

    lab: Lab
    realtime: bool = False
    function: str = _TRIAL

    @property
    def network(self) -> str:
        """The lab's shape."""
        return f"lab: {self.lab.shape.words()}"

    def require(self, launch: Launch) -> None:
        """UsageError unless the lab has as many ranks, and the backend is Gloo."""
        require_world(launch, self.lab.shape)

    def run(self, launch: Launch, path: Path, *, steps: int, directory: Path) -> None:
        """Train on every rank of the lab."""
        directory.mkdir(parents=True, exist_ok=True)
        options = {"steps": steps, "directory": directory}
        arguments = (str(path), options, str(directory / _LOG))
        ended = exit_codes(
            self.lab.ranks.run(self.function, [arguments] * self.lab.shape.world, realtime=self.realtime)
        )
        _require_success(next((code for _, code in ended if code), 0), directory)


@dataclass(frozen=True)
class StartedRanks:
    """Ranks started on this host; or, with words before the command of a rank, wherever that starts them."""

    before: tuple[str, ...] = ()

    @property
    def network(self) -> str:
        """Loopback, or the command."""
        return f"started by {' '.join(self.before)}" if self.before else LOOPBACK

    def require(self, launch: Launch) -> None:
        """UsageError if there are too many ranks for this host."""
        if not self.before:
            host.crowding(launch, cores=len(os.sched_getaffinity(0)))

    def run(self, launch: Launch, path: Path, *, steps: int, directory: Path) -> None:
        """Train."""
        directory.mkdir(parents=True, exist_ok=True)
        code = self._execute(
            self._command(launch, path, ["--steps", str(steps), "--directory", str(directory)]),
            launch,
            directory / _LOG,
        )
        _require_success(code, directory)

    def _command(self, launch: Launch, path: Path, arguments: Sequence[str]) -> list[str]:
        if self.before:
            return [*self.before, sys.executable, "-m", "axonn_tune.runtime", str(path), *arguments]
        return host.command_of(launch, path, arguments=arguments, environment={})

    def _execute(self, command: Sequence[str], launch: Launch, log: Path) -> int:
        variables = {variable.name: variable.value for variable in launch.environment}
        with log.open("a", encoding="utf-8") as file:
            try:
                return subprocess.run(
                    command, env=variables | os.environ, stdout=file, stderr=file, check=False
                ).returncode
            except OSError as error:
                raise EnvironmentProblem(f"cannot run {command[0]!r}: {error.strerror}") from error


def train_alone(launch: Launch, path: Path, *, steps: int, directory: Path) -> None:
    """Train a launch config of one rank in a process of its own."""
    if launch.grid.world != 1:
        raise UsageError(f"{launch.grid.world} ranks are not one")
    StartedRanks().run(launch, path, steps=steps, directory=directory)


def _require_success(code: int, directory: Path) -> None:
    if not code:
        return
    log = directory / _LOG
    lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
    said = [line for line in lines if line.startswith("Error: ")] or lines[-_LAST_LINES:]
    raise error_of(code)("\n".join([f"the run in {str(directory)!r} ended with exit code {code}", *said]))
