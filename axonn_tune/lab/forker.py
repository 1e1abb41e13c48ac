"""The process inside a lab that forks its ranks: slow imports happen once, here.

`python -m axonn_tune.lab.forker NAME FD PARENT`, started by `RankPool`, which sends one request a run over the
connection FD and gets one reply. Every run has new processes, one in each rank's namespace.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import pkgutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from axonn_tune.errors import AxonnTuneError, UsageError
from axonn_tune.lab.holder import LabAccess, join
from axonn_tune.lab.lab import RankResult, RunRequest
from axonn_tune.processes import die_with

GRACE_S = 15.0
"""How long the other ranks may take to end once one has failed."""
_COMMAND_NOT_FOUND = 127


@dataclass
class _RankProcess:
    number: int
    pid: int
    process: int
    answer: int

    def ended(self, place: int) -> RankResult:
        """Reap the process; its result."""
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with os.fdopen(self.answer, "rb") as file:
            file.seek(0)
            written = file.read()
        os.close(self.process)
        value, error = pickle.loads(written) if written and code >= 0 else (None, None)
        return RankResult(self.number, code, place, value, error)


def main(arguments: list[str]) -> int:
    """Join the lab, then serve runs until the connection closes; in a child, for only children are in the lab."""
    name, connection, parent = arguments[0], Connection(int(arguments[1])), int(arguments[2])
    # Ctrl-C reaches the ranks directly; they decide how it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        access = join(name)
        access.enter()
        die_with(parent)
        lock = _only_one(name)
    except AxonnTuneError as error:
        connection.send(error)
        return error.exit_code
    child = os.fork()
    if child:
        connection.close()
        lock.close()
        return abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    die_with(0)
    connection.send(None)
    _serve(connection, access)
    return 0


def _only_one(name: str) -> socket.socket:
    """A name in the lab's own network, held for as long as its ranks may run."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind("\0axonn-tune-lab-run")
    except OSError as error:
        raise UsageError(f"lab {name!r} is running something already; two runs would share its links") from error
    return lock


def _serve(connection: Connection, access: LabAccess) -> None:
    turn = 0
    while True:
        try:
            request: RunRequest | int = connection.recv()
        except EOFError:
            return
        if isinstance(request, int):
            # A signal for ranks that have ended in the meantime.
            continue
        connection.send(_run(connection, access, request, turn))
        turn += 1


def _run(connection: Connection, access: LabAccess, request: RunRequest, turn: int) -> list[RankResult] | str:
    """Results by rank, or why nothing started."""
    sys.path.extend(one for one in request.path if one not in sys.path)
    try:
        function = None if request.function is None else pkgutil.resolve_name(request.function)
    except Exception:
        return traceback.format_exc()
    sys.stdout.flush()
    ranks = [_start(connection, access, request, function, (rank, turn)) for rank in range(len(request.each))]
    return _wait_for(connection, ranks)


def _start(
    connection: Connection,
    access: LabAccess,
    request: RunRequest,
    function: Callable[..., Any] | None,
    place: tuple[int, int],
) -> _RankProcess:
    rank, turn = place
    answer, forker = os.memfd_create("answer"), os.getpid()
    pid = os.fork()
    if pid:
        return _RankProcess(rank, pid, os.pidfd_open(pid), answer)
    try:
        die_with(forker)
        connection.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        access.enter_rank(rank)
        if request.realtime:
            # Scheduled before all ordinary processes, where that is allowed.
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        os.environ.update(access.status.shape.environment(rank, turn=turn))
        if function is None:
            _execute(request.command)
        _call(function, request.each[rank], answer)
    except BaseException:
        _leave(answer, None, traceback.format_exc())
    finally:
        os._exit(1)


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], answer: int) -> NoReturn:
    """Call it, leave its value or error in `answer`, and end."""
    value, error, code = None, None, 0
    try:
        value = function(*arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except KeyboardInterrupt:
        code = 130
    except AxonnTuneError as raised:
        error, code = str(raised), raised.exit_code
    except BaseException:
        error, code = traceback.format_exc(), 1
    try:
        _leave(answer, value, error)
    except Exception:
        # Its value cannot be pickled.
        _leave(answer, None, traceback.format_exc())
        code = code or 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave(answer: int, value: object, error: str | None) -> None:
    """Leave what becomes the result's value and error."""
    os.write(answer, pickle.dumps((value, error)))


def _execute(command: tuple[str, ...]) -> NoReturn:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"Error: cannot run {command[0]!r}: {error.strerror}\n")
        sys.stderr.flush()
    os._exit(_COMMAND_NOT_FOUND)


def _wait_for(connection: Connection, ranks: list[_RankProcess]) -> list[RankResult]:
    """Wait until all have ended; kill those that remain after the grace period of a failure."""
    deadline: float | None = None
    running, results = {rank.process: rank for rank in ranks}, list[RankResult]()
    while running:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([connection, *running], left)
        if not ready:
            _signal(running, signal.SIGKILL)
            deadline = None
        for one in ready:
            if isinstance(one, Connection):
                _signal(running, _asked(connection))
                continue
            assert isinstance(one, int), "connections and process descriptors are waited for"
            results.append(running.pop(one).ended(len(results)))
            if results[-1].code and deadline is None:
                deadline = time.monotonic() + GRACE_S
    return sorted(results, key=lambda result: result.rank)


def _asked(connection: Connection) -> int:
    """The signal that the other side sends to the ranks; this process ends if the other side has."""
    try:
        return int(connection.recv())
    except EOFError:
        os._exit(1)


def _signal(running: dict[int, _RankProcess], number: int) -> None:
    for rank in running.values():
        signal.pidfd_send_signal(rank.process, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
