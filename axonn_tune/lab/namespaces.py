"""The kernel's namespaces, which Python 3.11 has no calls for: making them, entering them.

Linux only; every function raises OSError as the system call fails.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterator
from pathlib import Path

from axonn_tune.processes import system_call

_PR_SET_TIMERSLACK = 29


class Kind(enum.IntFlag):
    """Kinds of namespaces, as `clone(2)` numbers them."""

    USER = 0x1000_0000
    PID = 0x2000_0000
    NETWORK = 0x4000_0000


def unshare(kinds: Kind) -> None:
    """Put this process (its children, for PID) into new namespaces; EPERM without the right to."""
    system_call("unshare", int(kinds))


def enter(namespace: int, kind: Kind) -> None:
    """Put this process (its children, for PID) into the namespace behind a file descriptor."""
    system_call("setns", namespace, int(kind))


def opened(kind: str) -> int:
    """A file descriptor of this process' namespace: `net`, `user`, or `pid_for_children`."""
    return os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)


def be_exact() -> None:
    """Wake up when asked to, and not up to 50 µs later to save power."""
    system_call("prctl", _PR_SET_TIMERSLACK, 1)


def let_go_of_streams() -> None:
    """Whoever reads what started this process must see the end of it, though this process stays."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


def separate(kinds: Kind) -> bool:
    """New namespaces as root, else inside a new user namespace; whether that was needed. OSError if neither may be."""
    try:
        unshare(kinds)
    except PermissionError:
        user, group = os.getuid(), os.getgid()
        unshare(kinds | Kind.USER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        return True
    return False


@contextlib.contextmanager
def inside(network: int) -> Iterator[None]:
    """Stay in another network namespace for a while; processes started meanwhile begin there."""
    before = opened("net")
    enter(network, Kind.NETWORK)
    try:
        yield
    finally:
        enter(before, Kind.NETWORK)
        os.close(before)
