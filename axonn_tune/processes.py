"""Processes that end with their parent, whatever ends it; Linux only."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


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
