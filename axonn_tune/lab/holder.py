"""The process that holds a lab: starting it, finding it, entering it, ending it.

`python -m axonn_tune.lab.holder JSON`, run by `start`, creates the namespaces, keeps them open, and takes them
along when it ends. A lab has no name outside this process: the network namespaces have no names, the
process ids belong to a namespace whose first process is bound to this one, the socket has no file. Even after
`kill -9` the kernel removes all of it.

A lab is found by its holder's abstract Unix socket: only one process can have the name, and the kernel frees it
when that process ends. A client sends one word and gets the lab's status and, to join it, its namespaces as file
descriptors.

`python -m axonn_tune.lab.holder check` tries whether a lab could come up here. Exit code 0: yes, with the rights
of root; 3: yes, inside a user namespace; 5: no, and standard error says what is missing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from axonn_tune.errors import AxonnTuneError, EnvironmentProblem, UsageError, error_of
from axonn_tune.lab.namespaces import NamespaceKind, build, enter, let_go_of_streams, opened, require_tools, separate
from axonn_tune.lab.shape import MOST_RANKS, Shape
from axonn_tune.processes import die_with

JOIN, STATUS = b"join", b"status"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_PATIENCE_S = 10.0
_LONGEST_REPLY = 1 << 16
CHECK = "check"
UNPRIVILEGED = 3
NO_RIGHTS = (
    "the lab needs network namespaces, which this system refuses ({}): run it as root (sudo axonn-tune lab ..., or a "
    "container with --privileged), or let users make user namespaces (sysctl user.max_user_namespaces, on Ubuntu "
    "also sysctl kernel.apparmor_restrict_unprivileged_userns=0)"
)


@dataclass(frozen=True)
class LabStatus:
    """A running lab. holder: the process that holds it; the lab ends with it."""

    name: str
    shape: Shape
    holder: int
    unprivileged: bool
    since_s: float


@dataclass
class LabAccess:
    """A lab's namespaces as file descriptors; user is None if the lab needed none of its own."""

    status: LabStatus
    pids: int
    switch: int
    ranks: list[int]
    user: int | None

    def enter(self) -> None:
        """Enter the lab: only its network, and children that end with it."""
        if self.user is not None:
            enter(self.user, NamespaceKind.USER)
        enter(self.pids, NamespaceKind.PID)
        enter(self.switch, NamespaceKind.NETWORK)

    def enter_rank(self, rank: int) -> None:
        """Enter one rank's network, from inside the lab."""
        enter(self.ranks[rank], NamespaceKind.NETWORK)


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


def answer(connection: socket.socket, status: LabStatus, namespaces: list[int]) -> None:
    """Answer one client. namespaces: pids, switch, each rank, then user if there is one."""
    connection.settimeout(_PATIENCE_S)
    with contextlib.suppress(OSError), connection:
        if _peer(connection)[1] != os.getuid():
            return
        text = json.dumps(asdict(status)).encode()
        socket.send_fds(connection, [text], namespaces if connection.recv(16) == JOIN else [])


def start(name: str, shape: Shape, *, keep: bool) -> subprocess.Popen[str]:
    """Bring up a lab; the process that holds it. keep: it outlives this process.

    UsageError if one of this name is up; EnvironmentProblem without the rights or tools.
    """
    request = {"name": require_name(name), "shape": asdict(shape), "keep": keep, "parent": os.getpid()}
    command = [sys.executable, "-m", "axonn_tune.lab.holder", json.dumps(request)]
    # A separate session: Ctrl-C is for processes in the lab.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None, "asked for above"
    with process.stdout as stream:
        line = stream.readline()
    if not line:
        raise EnvironmentProblem(f"the lab did not come up: its process ended with {process.wait()}")
    reply = json.loads(line)
    if "error" in reply:
        process.wait()
        raise error_of(reply["code"])(reply["error"])
    return process


def find(name: str) -> LabStatus | None:
    """The lab of this name, if it is up; EnvironmentProblem if it does not answer."""
    try:
        return _ask(name, STATUS)[0]
    except ConnectionError:
        return None


def join(name: str) -> LabAccess:
    """Access to a lab; UsageError if there is none of this name."""
    try:
        status, (pids, switch, *others) = _ask(name, JOIN)
    except ConnectionError:
        raise UsageError(missing(name)) from None
    world = status.shape.world
    return LabAccess(status, pids, switch, others[:world], others[world] if status.unprivileged else None)


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


def end(status: LabStatus) -> None:
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


def _ask(name: str, word: bytes) -> tuple[LabStatus, list[int]]:
    """ConnectionError if the lab is not up, or is ending; EnvironmentProblem if its holder does not answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_PATIENCE_S)
        connection.connect(_address(require_name(name)))
        holder, user = _peer(connection)
        if user != os.getuid():
            raise EnvironmentProblem(f"the socket of lab {name!r} belongs to another user's process")
        try:
            connection.send(word)
            text, namespaces, _, _ = socket.recv_fds(connection, _LONGEST_REPLY, MOST_RANKS + 3)
        except TimeoutError:
            raise EnvironmentProblem(
                f"process {holder}, which holds lab {name!r}, does not answer; if it is stopped, "
                f"`kill -CONT {holder}` continues it, and `kill -KILL {holder}` ends the lab"
            ) from None
    if not text:
        raise ConnectionRefusedError
    reply = json.loads(text)
    return LabStatus(**reply | {"shape": Shape(**reply["shape"])}), namespaces


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user of the other side."""
    process, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process, user


def _address(name: str) -> str:
    return f"\0axonn-tune-lab-{os.getuid()}-{name}"


def main(arguments: list[str]) -> int:
    """Bring up a lab, report on standard output, and hold it; with `keep` also when the parent has ended."""
    if arguments == [CHECK]:
        return check_rights()
    request = json.loads(arguments[0])
    try:
        die_with(request["parent"])
        status, listener, namespaces = _bring_up(request)
    except AxonnTuneError as error:
        _say({"error": str(error), "code": error.exit_code})
        return error.exit_code
    if request["keep"]:
        die_with(None)
    _say({"holder": status.holder})
    let_go_of_streams()
    while True:
        connection, _ = listener.accept()
        answer(connection, status, namespaces)


def _bring_up(request: dict[str, Any]) -> tuple[LabStatus, socket.socket, list[int]]:
    shape = Shape(**request["shape"])
    require_tools()
    # Made first: to be found, the socket has to be in the host's network namespace.
    listener = listen(request["name"])
    holder = os.getpid()
    try:
        unprivileged = separate(NamespaceKind.NETWORK | NamespaceKind.PID)
    except OSError as error:
        raise EnvironmentProblem(NO_RIGHTS.format(error.strerror or error)) from error
    die_with(request["parent"])
    _start_first(listener)
    ranks = build(shape)
    user = [opened("user")] if unprivileged else []
    namespaces = [opened("pid_for_children"), opened("net"), *ranks, *user]
    return LabStatus(request["name"], shape, holder, unprivileged, time.time()), listener, namespaces


def _start_first(listener: socket.socket) -> None:
    """Start process 1 of the lab: when it ends, the kernel kills all others of the lab. It ends with this one."""
    holders_end, end = os.pipe()
    if os.fork():
        os.close(holders_end)
        return
    listener.close()
    os.close(end)
    let_go_of_streams()
    # Reaps processes whose parent has ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.read(holders_end, 1)
    os._exit(0)


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def check_rights() -> int:
    """Try the first steps of bringing up a lab; what they made ends with this process."""
    try:
        require_tools()
        return UNPRIVILEGED if separate(NamespaceKind.NETWORK | NamespaceKind.PID) else 0
    except (OSError, EnvironmentProblem) as error:
        sys.stderr.write(f"{error}\n")
        return EnvironmentProblem.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
