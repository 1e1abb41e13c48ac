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
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn

from axonn_tune.errors import AxonnTuneError, UsageError
from axonn_tune.lab.holder import RunningLab, require_lab
from axonn_tune.lab.shape import RankResult, RunRequest
from axonn_tune.processes import ENDING, die_with, end_process, fork_ranks

EXECUTE = "axonn_tune.lab.forker:execute"
"""The function of a run that is a command."""
_PATIENT = ((15.0, signal.SIGKILL),)
"""As `ENDING`, for commands: what they do with SIGTERM is not known."""


def main(arguments: list[str]) -> int:
    """Join the lab, then serve runs until the connection closes; in a child, for only children are in the lab."""
    name, connection, parent = arguments[0], Connection(int(arguments[1])), int(arguments[2])
    os.set_inheritable(connection.fileno(), False)
    # Ctrl-C reaches the ranks directly; they decide how it ends. The other signal waits until it can be passed on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR2,))
    try:
        lab = require_lab(name)
        lab.enter()
        die_with(parent)
        # A name in the lab's own network, held for as long as its ranks may run.
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind("\0axonn-tune-lab-run")
        except OSError as error:
            raise UsageError(f"lab {name!r} is running something already; two runs would share its links") from error
    except AxonnTuneError as error:
        connection.send(error)
        return error.exit_code
    child = os.fork()
    if child:
        connection.close()
        lock.close()

        def pass_on(number: int, frame: FrameType | None) -> None:
            os.kill(child, number)

        signal.signal(signal.SIGUSR2, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR2,))
        return abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    die_with(0)
    connection.send(None)
    turn = 0
    with contextlib.suppress(EOFError):
        while True:
            answer = _run(connection, connection.recv(), lab, turn)
            # A signal that came too late is not for the next run.
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR2,))
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            connection.send(answer)
            turn += 1
    return 0


def _run(connection: Connection, request: RunRequest, lab: RunningLab, turn: int) -> list[RankResult] | str:
    """Results in the order in which the ranks ended, or why nothing started."""
    sys.path.extend(one for one in request.path if one not in sys.path)
    try:
        function = pkgutil.resolve_name(request.function)
    except Exception:
        return traceback.format_exc()
    answers = [os.memfd_create("answer") for _ in request.each]

    def run(rank: int) -> int:
        connection.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        lab.enter_rank(rank)
        if request.realtime:
            # Scheduled before all ordinary processes, where that is allowed.
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        os.environ.update(lab.shape.environment(rank, turn=turn))
        return _call(function, request.each[rank], answers[rank])

    sys.stdout.flush()
    found = []
    ending = _PATIENT if request.function == EXECUTE else ENDING
    for rank, code in fork_ranks(len(answers), run, passed_on=(signal.SIGUSR2,), ending=ending):
        os.lseek(answers[rank], 0, os.SEEK_SET)
        written = os.read(answers[rank], os.fstat(answers[rank]).st_size)
        value, error = pickle.loads(written) if written and code >= 0 else (None, None)
        found.append(RankResult(rank, code, value, error))
    for answer in answers:
        os.close(answer)
    return found


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], answer: int) -> int:
    """Call it and leave its value or error in `answer`; the exit code."""
    value, error, code = None, None, 0
    try:
        value = pickle.dumps((function(*arguments), None))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except KeyboardInterrupt:
        code = 130
    except AxonnTuneError as raised:
        error, code = str(raised), raised.exit_code
    except BaseException:
        error, code = traceback.format_exc(), 1
    os.write(answer, value or pickle.dumps((None, error)))
    return code


def execute(command: tuple[str, ...]) -> NoReturn:
    """Become another program; exit code 127, and why on standard error, if that cannot be."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"Error: cannot run {command[0]!r}: {error.strerror}\n")
    end_process(127)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
