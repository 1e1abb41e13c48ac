"""Running on the ranks of a lab, in new processes each time::

    with Lab(Shape(nodes=4, ranks_per_node=2, uplink_bits_per_s=200e6, port_bits_per_s=800e6)) as lab:
        values = lab.ranks.call("mypackage.mymodule:function", [(rank,) for rank in range(8)])

The lab ends with the `with`, and with the thread that entered it, however that ends: enter it in the main
thread. `Lab.attached` uses one that `axonn-tune lab up` has started, and leaves it up.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from axonn_tune.errors import AxonnTuneError, TrainingFailedError, UsageError, error_of
from axonn_tune.lab.forker import EXECUTE
from axonn_tune.lab.forker import execute as become
from axonn_tune.lab.holder import end, find, require_lab, start
from axonn_tune.lab.shape import RankResult, RunRequest, Shape
from axonn_tune.processes import die_with

if TYPE_CHECKING:
    # It imports numpy, whose threads would keep a process from entering a lab.
    from axonn_tune.specs.launch import Launch


_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Addresses of a lab have no host names; torch would warn of each."""


class RankPool:
    """Runs functions and commands on the ranks of a lab. A lab has one at a time, until it is closed."""

    def __init__(self, name: str, shape: Shape) -> None:
        """Raises UsageError if there is no such lab, or it is busy."""
        self.shape = shape
        self._running = False
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "axonn_tune.lab.forker", name, str(theirs.fileno()), str(os.getpid())]
        # Set before anything is imported, which then makes no threads: they would be lost in a fork.
        environment = _QUIET | os.environ | dict.fromkeys(_THREADS, "1")
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
            )
        problem = self._receive()
        if problem is not None:
            self.close()
            raise problem

    def run(
        self,
        function: Callable[..., Any] | str,
        each: Sequence[tuple[Any, ...]] | None = None,
        *,
        realtime: bool = False,
    ) -> list[RankResult]:
        """Call a function of a module, or `module:name`, on every rank; the results as the ranks end.

        each: the arguments of every rank, default none. What the module imports is imported once for all runs.
        Ranks that remain 2 s after the first failure get SIGTERM, after 10 s SIGKILL; they have no result.
        """
        if not isinstance(function, str):
            function = f"{function.__module__}:{function.__qualname__}"
        each = [()] * self.shape.world if each is None else list(each)
        if len(each) != self.shape.world:
            raise ValueError(f"arguments for {len(each)} ranks, but the lab has {self.shape.world}")
        self._running = True
        try:
            self._connection.send(RunRequest(function, each, tuple(sys.path), realtime))
            answer = self._receive()
        finally:
            self._running = False
        if isinstance(answer, str):
            raise AxonnTuneError(f"the ranks could not start:\n{answer}")
        results: list[RankResult] = answer
        return results

    def call(
        self,
        function: Callable[..., Any] | str,
        each: Sequence[tuple[Any, ...]] | None = None,
        *,
        realtime: bool = False,
    ) -> list[Any]:
        """As `run`, but returns what each rank's function returned.

        Raises the error of the first rank to fail, of the kind that its exit code says, else TrainingFailedError.
        """
        results = self.run(function, each, realtime=realtime)
        for first in results:
            if first.code:
                ended = f"ended by signal {-first.code}" if first.code < 0 else f"ended with exit code {first.code}"
                raise error_of(first.code)(f"rank {first.rank}: {first.error or ended}")
        return [one.value for one in sorted(results, key=lambda one: one.rank)]

    def execute(self, command: Sequence[str], *, realtime: bool = False) -> list[RankResult]:
        """Run a command on every rank, with torchrun's variables set; the results as the ranks end.

        Ranks that remain 15 s after the first failure are killed.
        """
        return self.run(EXECUTE, [(tuple(command),)] * self.shape.world, realtime=realtime)

    def save_and_stop(self) -> None:
        """Send SIGUSR2 to every rank of the current run; without one nothing happens."""
        if self._running:
            self._process.send_signal(signal.SIGUSR2)

    def close(self) -> None:
        """End the forker, and with it whatever still runs."""
        self._connection.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self) -> Any:  # noqa: ANN401 - whatever the forker sends
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError):
            raise TrainingFailedError("the lab ended while its ranks ran") from None


_numbers = itertools.count(1)


class Lab:
    """An emulated cluster for the duration of its `with`."""

    def __init__(self, shape: Shape, *, name: str | None = None) -> None:
        self.shape = shape
        self.name = f"py-{os.getpid()}-{next(_numbers)}" if name is None else name
        self._holder: subprocess.Popen[str] | None = None
        self._attached = False
        self._ranks: RankPool | None = None

    @classmethod
    def attached(cls, name: str) -> Lab:
        """A lab that is up already; UsageError if none of this name is."""
        lab = cls(require_lab(name).shape, name=name)
        lab._attached = True
        return lab

    def __enter__(self) -> Lab:
        if not self._attached:
            self._holder = start(self.name, self.shape, keep=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        if self._holder is not None:
            status = find(self.name)
            if status is not None:
                end(status)
            self._holder.wait()
            self._holder = None

    @property
    def ranks(self) -> RankPool:
        """Runs functions and commands on the ranks; started at first use."""
        if self._ranks is None:
            self._ranks = RankPool(self.name, self.shape)
        return self._ranks


SWITCH = "switch"


def execute(name: str, place: str, command: Sequence[str]) -> int:
    """Run a command at `NODE.RANK` or `switch` of a lab, with this process' streams; its exit code, 128 + a signal."""
    lab = require_lab(name)
    rank = None if place == SWITCH else lab.shape.rank_named(place)
    lab.enter()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        try:
            # The parent is outside of this process' namespace and so has the number 0.
            die_with(0)
            if rank is not None:
                lab.enter_rank(rank)
                os.environ.update(lab.shape.environment(rank))
            become(tuple(command))
        finally:
            os._exit(1)
    # The terminal interrupts both; the command decides what that does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


TRAIN = "axonn_tune.runtime.start:train"
_SAVING = (signal.SIGTERM, signal.SIGUSR2)


def require_world(launch: Launch, shape: Shape) -> None:
    """UsageError, with the arithmetic, unless the lab has as many ranks as the grid."""
    world = launch.grid.world
    if world != shape.world:
        raise UsageError(
            f"the launch config's grid has {world} ranks, but the lab has "
            f"{shape.nodes} nodes × {shape.ranks_per_node} = {shape.world}"
        )
    if launch.backend != "gloo":
        raise UsageError(
            f"the launch config's backend is {launch.backend}; a lab's ranks have CPUs only: backend: gloo"
        )


def train(
    ranks: RankPool,
    path: Path,
    *,
    steps: int | None = None,
    resume: bool = False,
    resume_from: str | None = None,
    directory: Path | None = None,
    realtime: bool = False,
) -> list[RankResult]:
    """Run a launch config once, as `axonn-tune run` would with these options; the results as the ranks end.

    realtime: scheduled before all ordinary processes of the host (SCHED_RR), where that is allowed.
    While it runs, SIGTERM and SIGUSR2 have the ranks save and stop, and Ctrl-C reaches them directly.
    """

    before = {one: signal.signal(one, lambda number, frame: ranks.save_and_stop()) for one in _SAVING}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: None)
    options = {"steps": steps, "resume": resume, "resume_from": resume_from, "directory": directory}
    try:
        return ranks.run(TRAIN, [(str(path), options)] * ranks.shape.world, realtime=realtime)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def exit_codes(results: list[RankResult]) -> list[tuple[int, int]]:
    """(rank, code) in the order in which they ended."""
    return [(one.rank, one.code) for one in results]
