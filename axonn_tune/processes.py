"""Processes: ranks as forks of one, ends with their parent, system calls, the CPU's name."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from axonn_tune.errors import TrainingFailedError

_PR_SET_PDEATHSIG = 1
ENDING = ((2.0, signal.SIGTERM), (10.0, signal.SIGKILL))
"""Seconds after the first failure of a rank, or Ctrl-C, and what is sent then to the ranks that still run."""
_LOOK_S = 0.05


def die_with(parent: int | None) -> None:
    """Have the kernel kill this process when its parent ends, however that ends; None: no longer.

    The parent is the thread that started it. Whatever changes this process' rights undoes it, entering a user
    namespace above all. OSError as the system call fails.
    """
    system_call("prctl", _PR_SET_PDEATHSIG, 0 if parent is None else int(signal.SIGKILL))
    if parent is not None and os.getppid() != parent:
        # It ended before it could be bound to.
        os.kill(os.getpid(), signal.SIGKILL)


def system_call(name: str, *arguments: int) -> None:
    """Call the C library's function of this name; OSError if it fails."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments, *([0] * (5 - len(arguments)) if name == "prctl" else [])) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def processor_name() -> str:
    """This host's CPU as Linux names it; its architecture where Linux has no name."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8", "replace").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def fork_ranks(
    count: int,
    run: Callable[[int], int],
    *,
    passed_on: Sequence[signal.Signals] = (),
    ending: Sequence[tuple[float, signal.Signals]] = ENDING,
) -> list[tuple[int, int]]:
    """`run(rank)` in as many forks of this process, which must have no other thread; (rank, exit code) as they end.

    What this process has imported, the ranks need not. A negative code is the signal that ended a rank, unless it was
    sent from here: once a rank fails, the others soon have to end. passed_on: signals that become SIGUSR2 of all ranks,
    also those that came while the ranks were forked, or before while they were blocked.
    """
    # What the forks share they need not go through, nor copy, each time that garbage is collected.
    gc.freeze()
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    parent, running = os.getpid(), dict[int, int]()
    for rank in range(count):
        child = os.fork()
        if not child:
            code = 1
            try:
                die_with(parent)
                for one in passed_on:
                    signal.signal(one, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
                code = run(rank)
            except BaseException:
                traceback.print_exc()
            end_process(code)
        running[child] = rank

    def send(number: int) -> None:
        for child in running:
            os.kill(child, number)

    for one in passed_on:
        signal.signal(one, lambda number, frame: send(signal.SIGUSR2))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    ended: list[tuple[int, int]] = []
    try:
        _wait_for(running, ended, send, ending)
    except KeyboardInterrupt:
        # The terminal has interrupted the ranks too; they decide when they have ended.
        _wait_for(running, ended, send, ending, began_s=time.monotonic())
        raise
    return ended


def _wait_for(
    running: dict[int, int],
    ended: list[tuple[int, int]],
    send: Callable[[int], None],
    ending: Sequence[tuple[float, signal.Signals]],
    began_s: float | None = None,
) -> None:
    """Until no process is running; those that have ended are appended. began_s: of the end of all."""
    steps = list(ending)
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            rank, code = running.pop(child), os.waitstatus_to_exitcode(status)
            if code >= 0 or len(steps) == len(ending):
                ended.append((rank, code))
            began_s = time.monotonic() if code and began_s is None else began_s
        elif steps and began_s is not None and time.monotonic() > began_s + steps[0][0]:
            send(steps.pop(0)[1])
        else:
            time.sleep(_LOOK_S)


def end_process(code: int) -> NoReturn:
    """Exit now: threads of torch that wait for a lost rank would block an orderly exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_code_of(ended: Sequence[tuple[int, int]]) -> int:
    """That of a failed training if any rank has it, else the first that is not 0. ended: (rank, code) by time.

    A negative code is the signal that ended a rank; if no rank could say why the run ended, that is said here.
    """
    lost = sorted((rank, -code) for rank, code in ended if code < 0)
    said = [code for _, code in ended if code > 0]
    if lost and not said:
        names = {int(one): one.name for one in signal.Signals}
        ranks = [f"rank {rank}: ended by {names.get(number, f'signal {number}')}" for rank, number in lost]
        print(f"Error: {'; '.join(ranks)}", file=sys.stderr)
    failed = TrainingFailedError.exit_code
    return failed if failed in said or (lost and not said) else next(iter(said), 0)
