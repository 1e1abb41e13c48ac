"""The process that holds a lab: starting it, finding it, entering it, ending it.

`python -m axonn_tune.lab.holder JSON`, run by `start`, creates the namespaces, keeps them open, and takes them
along when it ends. A lab has no name outside this process: the network namespaces have no names, the
process ids belong to a namespace whose first process is bound to this one, the socket has no file. Even after
`kill -9` the kernel removes all of it.

A lab is found by its holder's abstract Unix socket: only one process can have the name, and the kernel frees it
when that process ends. The socket says which process that is; everything else about a lab is under /proc: its shape in
the command line, its namespaces as files.

`python -m axonn_tune.lab.holder` without arguments tries whether a lab could come up here. Exit code 0: yes, with the
rights of root; 3: yes, inside a user namespace; 5: no, and standard error says what is missing.
"""

from __future__ import annotations

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

from axonn_tune.errors import AxonnTuneError, EnvironmentProblem, UsageError, error_of
from axonn_tune.lab.namespaces import NamespaceKind, build, enter, let_go_of_streams, require_tools, separate
from axonn_tune.lab.shape import Shape
from axonn_tune.processes import die_with

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_PATIENCE_S = 10.0
_FIRST_RANK = 100
"""The holder's file descriptor of rank 0's network namespace; those of the others follow."""
_UP = "up"
UNPRIVILEGED = 3
NO_RIGHTS = (
    "the lab needs network namespaces, which this system refuses ({}): run it as root (sudo axonn-tune lab ..., or a "
    "container with --privileged), or let users make user namespaces (sysctl user.max_user_namespaces, on Ubuntu "
    "also sysctl kernel.apparmor_restrict_unprivileged_userns=0)"
)


@dataclass(frozen=True)
class RunningLab:
    """A lab that is up. holder: the process that holds it, and with which it ends; since_s: of the epoch."""

    name: str
    shape: Shape
    holder: int
    since_s: float

    @property
    def unprivileged(self) -> bool:
        """Whether it is inside a user namespace of its own."""
        return not Path(f"/proc/{self.holder}/ns/user").samefile("/proc/self/ns/user")

    def enter(self) -> None:
        """Enter the lab: only its network, and children that end with it. This process must have no other thread."""
        if self.unprivileged:
            enter(f"/proc/{self.holder}/ns/user", NamespaceKind.USER)
        enter(f"/proc/{self.holder}/ns/pid_for_children", NamespaceKind.PID)
        enter(f"/proc/{self.holder}/ns/net", NamespaceKind.NETWORK)

    def enter_rank(self, rank: int) -> None:
        """Enter one rank's network, from inside the lab."""
        enter(f"/proc/{self.holder}/fd/{_FIRST_RANK + rank}", NamespaceKind.NETWORK)


def start(name: str, shape: Shape, *, keep: bool) -> subprocess.Popen[str]:
    """Bring up a lab; the process that holds it. keep: it outlives this process.

    UsageError if one of this name is up; EnvironmentProblem without the rights or tools.
    """
    request = {"name": name, "shape": asdict(shape), "since_s": time.time(), "parent": None if keep else os.getpid()}
    command = [sys.executable, "-m", "axonn_tune.lab.holder", json.dumps(request)]
    # A separate session: Ctrl-C is for processes in the lab.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None, "asked for above"
    try:
        with process.stdout as stream:
            said = stream.read()
    except BaseException:
        process.kill()
        process.wait()
        raise
    if said != _UP:
        code = process.wait()
        kind = error_of(code)
        if said and kind.exit_code == code:
            raise kind(said)
        raise EnvironmentProblem(f"the lab did not come up: its process ended with {code}")
    return process


def find(name: str) -> RunningLab | None:
    """This user's lab of this name, if it is up; UsageError if it is not a name."""
    address = _address(name)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            # Python's own timeout would refuse at once while many others connect.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_PATIENCE_S), 0))
            connection.connect(address)
            holder, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            raise EnvironmentProblem(f"the socket of lab {name!r} belongs to another user's process")
        words = Path(f"/proc/{holder}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        request = json.loads(words[-1])
    except BlockingIOError:
        raise EnvironmentProblem(
            f"the process that holds lab {name!r} does not answer; if it is stopped, "
            "`pkill -CONT -f axonn_tune.lab.holder` continues it"
        ) from None
    except (ConnectionError, FileNotFoundError, json.JSONDecodeError):
        # It is not up, or it is ending.
        return None
    return RunningLab(name, Shape(**request["shape"]), holder, request["since_s"])


def require_lab(name: str) -> RunningLab:
    """The lab of this name; UsageError, with those that are up, if there is none."""
    found = find(name)
    if found is None:
        others = [one for one in names() if one != name]
        known = f"; up are: {', '.join(others)}" if others else ""
        raise UsageError(f"no lab named {name!r} is up{known}; `axonn-tune lab up --name {name} ...` starts it")
    return found


def names() -> list[str]:
    """This user's labs, by name."""
    prefix = f"@axonn-tune-lab-{os.getuid()}-"
    entries = (line.split()[-1] for line in Path("/proc/net/unix").read_text("utf-8", "replace").splitlines()[1:])
    return sorted({entry.removeprefix(prefix) for entry in entries if entry.startswith(prefix)})


def end(lab: RunningLab) -> None:
    """End a lab and everything that runs in it; returns once it is gone."""
    process = os.pidfd_open(lab.holder)
    try:
        if find(lab.name) == lab:
            signal.pidfd_send_signal(process, signal.SIGKILL)
    finally:
        os.close(process)
    deadline_s = time.monotonic() + _PATIENCE_S
    while find(lab.name) == lab:
        if time.monotonic() > deadline_s:
            raise EnvironmentProblem(f"process {lab.holder}, which holds lab {lab.name!r}, does not end")
        time.sleep(0.01)


def _address(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be a lab's name: use up to 32 of a-z, 0-9 and -")
    return f"\0axonn-tune-lab-{os.getuid()}-{name}"


def main(arguments: list[str]) -> int:
    """Bring up a lab and hold it; standard output gets `_UP`, or why not."""
    if not arguments:
        return check_rights()
    request = json.loads(arguments[0])
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            _bring_up(listener, request["name"], Shape(**request["shape"]), parent=request["parent"])
            # From here on it can be found.
            listener.listen(16)
            sys.stdout.write(_UP)
            sys.stdout.flush()
            let_go_of_streams()
            while True:
                listener.accept()[0].close()
    except AxonnTuneError as error:
        sys.stdout.write(str(error))
        return error.exit_code


def _bring_up(listener: socket.socket, name: str, shape: Shape, *, parent: int | None) -> None:
    """Make the lab around this process."""
    require_tools()
    try:
        # First: to be found, the socket has to be in the host's network namespace.
        listener.bind(_address(name))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise EnvironmentProblem(f"cannot make the socket of lab {name!r}: {error.strerror or error}") from error
        raise UsageError(
            f"a lab named {name!r} is up already: use it, end it with `axonn-tune lab down --name {name}`, "
            "or choose another --name"
        ) from error
    try:
        separate(NamespaceKind.NETWORK | NamespaceKind.PID)
    except OSError as error:
        raise EnvironmentProblem(NO_RIGHTS.format(error.strerror or error)) from error
    if parent is not None:
        die_with(parent)
    ended, until = os.pipe()
    if os.fork() == 0:
        # Process 1 of the lab: when it ends, the kernel kills all others of it. It ends with its parent, which is
        # outside of its namespace and so has the number 0, ended or not; the pipe says if it has.
        die_with(0)
        os.close(until)
        listener.close()
        let_go_of_streams()
        # Reaps processes whose parent has ended.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        os.read(ended, 1)
        os._exit(0)
    os.close(ended)
    build(shape, _FIRST_RANK)


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
