"""What Python does not offer of Linux: processes that end with their parent, system calls, the CPU's name."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
AGENT = "_AXONN_TUNE_AGENT"
"""Variable with the process that has started all ranks of a host, and that they end with."""


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
