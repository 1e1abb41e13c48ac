"""Finding a lab and speaking to the process that holds it.

A lab is its holder's abstract Unix socket: a name that only one process can have, that the kernel takes
back when that process ends in whatever way, and that leaves no file. Whoever connects says one word and
gets what the lab is, and, to join it, its namespaces as file descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from axonn_tune.errors import EnvironmentProblem, UsageError
from axonn_tune.lab.namespaces import Kind, enter
from axonn_tune.lab.shape import MOST_RANKS, Shape

DEFAULT_NAME = "lab"
JOIN, STATUS = b"join", b"status"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_PATIENCE_S = 10.0
_LONGEST_REPLY = 1 << 16


@dataclass(frozen=True)
class Status:
    """A lab that is up. holder: the process to end to end the lab."""

    name: str
    shape: Shape
    holder: int
    unprivileged: bool
    since_s: float


@dataclass
class Access:
    """A lab's namespaces as file descriptors; user is None if the lab needed none of its own."""

    status: Status
    pids: int
    switch: int
    ranks: list[int]
    user: int | None

    def enter(self) -> None:
        """Go into the lab: no network but its own, and children that end with it."""
        if self.user is not None:
            enter(self.user, Kind.USER)
        enter(self.pids, Kind.PID)
        enter(self.switch, Kind.NETWORK)

    def enter_rank(self, rank: int) -> None:
        """Go on to the place of one rank."""
        enter(self.ranks[rank], Kind.NETWORK)


def require_name(name: str) -> str:
    """UsageError unless it can be a lab's name."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be a lab's name: use up to 32 of a-z, 0-9 and -")
    return name


def listen(name: str) -> socket.socket:
    """The socket that is the lab of this name; UsageError if there is one, EnvironmentProblem if there can be none."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(_address(require_name(name)))
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise EnvironmentProblem(f"cannot make the socket of lab {name!r}: {error.strerror or error}") from error
        raise UsageError(
            f"a lab named {name!r} is up already: use it, end it with `axonn-tune lab down --name {name}`, "
            "or choose another --name"
        ) from error
    listener.listen(16)
    return listener


def answer(connection: socket.socket, status: Status, namespaces: list[int]) -> None:
    """The holder's side of one conversation. namespaces: pids, switch, each rank, then user if there is one."""
    connection.settimeout(_PATIENCE_S)
    with contextlib.suppress(OSError), connection:
        if _user_of(connection) != os.getuid():
            return
        text = json.dumps(status.__dict__ | {"shape": status.shape.as_dict()}).encode()
        socket.send_fds(connection, [text], namespaces if connection.recv(16) == JOIN else [])


def find(name: str) -> Status | None:
    """The lab of this name, if it is up; EnvironmentProblem if it does not answer."""
    try:
        return _ask(name, STATUS)[0]
    except ConnectionError:
        return None


def join(name: str) -> Access:
    """The way into a lab; UsageError if there is none of this name."""
    try:
        status, (pids, switch, *others) = _ask(name, JOIN)
    except ConnectionError:
        raise UsageError(missing(name)) from None
    world = status.shape.world
    return Access(status, pids, switch, others[:world], others[world] if status.unprivileged else None)


def missing(name: str) -> str:
    """The message about a lab that is not up."""
    others = [one for one in names() if one != name]
    known = f"; up are: {', '.join(others)}" if others else ""
    return f"no lab named {name!r} is up{known}; `axonn-tune lab up --name {name} ...` starts it"


def names() -> list[str]:
    """This user's labs, by name."""
    prefix = "@" + _address("")[1:]
    entries = (line.split()[-1] for line in Path("/proc/net/unix").read_text("utf-8", "replace").splitlines()[1:])
    return sorted({entry.removeprefix(prefix) for entry in entries if entry.startswith(prefix)})


def end(status: Status) -> None:
    """End a lab and everything that runs in it; returns once it is gone."""
    process = os.pidfd_open(status.holder)
    try:
        if find(status.name) == status:
            signal.pidfd_send_signal(process, signal.SIGKILL)
    finally:
        os.close(process)
    deadline_s = time.monotonic() + _PATIENCE_S
    while find(status.name) == status:
        if time.monotonic() > deadline_s:
            raise EnvironmentProblem(f"process {status.holder}, which holds lab {status.name!r}, does not end")
        time.sleep(0.01)


def _ask(name: str, word: bytes) -> tuple[Status, list[int]]:
    """ConnectionError if the lab is not up, or just ends; EnvironmentProblem if its holder does not answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_PATIENCE_S)
        connection.connect(_address(require_name(name)))
        if _user_of(connection) != os.getuid():
            raise EnvironmentProblem(f"the socket of lab {name!r} belongs to another user's process")
        try:
            connection.send(word)
            text, namespaces, _, _ = socket.recv_fds(connection, _LONGEST_REPLY, MOST_RANKS + 3)
        except TimeoutError:
            holder = _holder_of(connection)
            raise EnvironmentProblem(
                f"process {holder}, which holds lab {name!r}, does not answer; if it is stopped, "
                f"`kill -CONT {holder}` lets it go on, and `kill -KILL {holder}` ends the lab"
            ) from None
    if not text:
        raise ConnectionRefusedError
    said = json.loads(text)
    return Status(**said | {"shape": Shape(**said["shape"])}), namespaces


def _holder_of(connection: socket.socket) -> int:
    return int.from_bytes(_credentials(connection)[:4], "little")


def _user_of(connection: socket.socket) -> int:
    return int.from_bytes(_credentials(connection)[4:8], "little")


def _credentials(connection: socket.socket) -> bytes:
    """Process, user and group of the other side, four bytes each."""
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)


def _address(name: str) -> str:
    return f"\0axonn-tune-lab-{os.getuid()}-{name}"
