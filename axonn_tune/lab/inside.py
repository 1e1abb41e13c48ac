"""Running one command of a user where a rank is."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from axonn_tune.lab.control import Access, join
from axonn_tune.processes import die_with

SWITCH = "switch"
_NOT_FOUND = 127


def execute(name: str, place: str, command: Sequence[str]) -> int:
    """Run a command at `NODE.RANK` or `switch` of a lab, with this process' streams; its exit code, 128 + a signal."""
    access = join(name)
    rank = None if place == SWITCH else access.status.shape.rank_named(place)
    access.enter()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _become(command, access, rank)
    # The terminal interrupts both; the command decides what that means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _become(command: Sequence[str], access: Access, rank: int | None) -> NoReturn:
    try:
        # The parent is outside of this process' namespace and so has the number 0.
        die_with(0)
        if rank is not None:
            access.enter_rank(rank)
            os.environ.update(access.status.shape.environment(rank))
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"Error: cannot run {command[0]!r}: {error.strerror}\n".encode())
    finally:
        os._exit(_NOT_FOUND)
