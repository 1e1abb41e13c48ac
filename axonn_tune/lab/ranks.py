"""Runs functions or commands on the ranks of a lab that is up, in fresh processes each time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from axonn_tune.errors import (
    AxonnTuneError,
    CheckFailedError,
    EnvironmentProblem,
    NothingFeasibleError,
    TrainingFailedError,
    UsageError,
)
from axonn_tune.lab.messages import Outcome, Request
from axonn_tune.lab.shape import Shape

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Addresses of a lab have no host names; torch would warn of each."""
_KINDS = {
    kind.exit_code: kind
    for kind in (UsageError, NothingFeasibleError, CheckFailedError, EnvironmentProblem, TrainingFailedError)
}


class Ranks:
    """One forker in a lab, and so the only one to run ranks there until it is closed."""

    def __init__(self, name: str, shape: Shape) -> None:
        """Raises UsageError if there is no such lab, or it is busy."""
        self.shape = shape
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "axonn_tune.lab.forker", name, str(theirs.fileno()), str(os.getpid())]
            # Set before anything is imported, which then makes no threads: they would be lost in a fork.
            environment = _QUIET | os.environ | dict.fromkeys(_THREADS, "1")
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
            )
        self._connection = Connection(ours.detach())
        self._held: list[int] | None = None
        problem = self._receive()
        if problem is not None:
            self.close()
            raise problem

    def run(
        self,
        function: Callable[..., Any] | str,
        each: Sequence[tuple[Any, ...]] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        realtime: bool = False,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        """Call a function of a module, or `module:name`, on every rank; how each ended, by rank.

        each: the arguments of every rank, default none. What the module imports is imported once for all runs.
        A run takes at most timeout_s; ranks that are left 15 s after the first failure are killed.
        """
        if not isinstance(function, str):
            function = f"{function.__module__}:{function.__qualname__}"
        each = [()] * self.shape.world if each is None else list(each)
        if len(each) != self.shape.world:
            raise ValueError(f"arguments for {len(each)} ranks, but the lab has {self.shape.world}")
        variables = tuple((environment or {}).items())
        request = Request(list(each), function, (), variables, tuple(sys.path), realtime, timeout_s)
        return self._ask(request)

    def call(
        self,
        function: Callable[..., Any] | str,
        each: Sequence[tuple[Any, ...]] | None = None,
        *,
        realtime: bool = False,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """As `run`, but returns what each rank's function returned.

        Raises the error of the first rank to fail, of the kind that its exit code says, else TrainingFailedError.
        """
        outcomes = self.run(function, each, realtime=realtime, timeout_s=timeout_s)
        failed = sorted((one for one in outcomes if one.code), key=lambda one: one.place)
        if failed:
            first = failed[0]
            ended = f"ended by signal {-first.code}" if first.code < 0 else f"ended with exit code {first.code}"
            said = first.error or ended
            raise _KINDS.get(first.code, TrainingFailedError)(f"rank {first.rank}: {said}")
        return [one.value for one in outcomes]

    def execute(self, command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> list[Outcome]:
        """Run a command on every rank, with torchrun's variables set; how each ended, by rank."""
        variables = tuple((environment or {}).items())
        return self._ask(Request([()] * self.shape.world, None, tuple(command), variables))

    def signal(self, number: int) -> None:
        """Send a signal to every rank of the run that is under way; without one nothing happens."""
        if self._held is not None:
            self._held.append(number)
            return
        self._connection.send(number)

    def close(self) -> None:
        """End the forker, and with it whatever still runs."""
        self._connection.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, request: Request) -> list[Outcome]:
        # A signal handler may run in the midst of this, and what it sends would stand inside of the request.
        self._held = []
        try:
            self._connection.send(request)
        finally:
            held, self._held = self._held, None
        for number in held:
            self._connection.send(number)
        answer = self._receive()
        if isinstance(answer, str):
            raise AxonnTuneError(f"the ranks could not start:\n{answer}")
        outcomes: list[Outcome] = answer
        return outcomes

    def _receive(self) -> Any:  # noqa: ANN401 - whatever the forker sends
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError):
            raise TrainingFailedError("the lab ended while its ranks ran") from None
