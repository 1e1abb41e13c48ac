"""The process that is a lab: it makes the namespaces, keeps them, and takes them along when it ends.

`python -m axonn_tune.lab.holder JSON`, started by `Lab`. Nothing of a lab has a name outside this
process: network namespaces without names, process ids of a namespace whose first process is bound to
this one, a socket without a file. Killed with -9, the kernel removes all of it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from typing import Any

from axonn_tune.errors import AxonnTuneError, EnvironmentProblem
from axonn_tune.lab.control import Status, answer, listen
from axonn_tune.lab.namespaces import Kind, let_go_of_streams, opened, separate
from axonn_tune.lab.network import build, require_tools
from axonn_tune.lab.shape import Shape
from axonn_tune.processes import die_with

NO_RIGHTS = (
    "the lab needs network namespaces, which this system refuses ({}): run it as root (sudo axonn-tune lab ..., or a "
    "container with --privileged), or let users make user namespaces (sysctl user.max_user_namespaces, on Ubuntu "
    "also sysctl kernel.apparmor_restrict_unprivileged_userns=0)"
)


def main(arguments: list[str]) -> int:
    """Bring up a lab, say so on standard output, and hold it; `keep`: also when the parent has ended."""
    wanted = json.loads(arguments[0])
    try:
        die_with(wanted["parent"])
        status, listener, namespaces = _bring_up(wanted)
    except AxonnTuneError as error:
        _say({"error": type(error).__name__, "message": str(error)})
        return error.exit_code
    if wanted["keep"]:
        die_with(None)
    _say({"holder": status.holder})
    let_go_of_streams()
    while True:
        connection, _ = listener.accept()
        answer(connection, status, namespaces)


def _bring_up(wanted: dict[str, Any]) -> tuple[Status, socket.socket, list[int]]:
    shape = Shape(**wanted["shape"])
    require_tools()
    # Made first, for the socket has to be in the host's network namespace to be found there.
    listener = listen(wanted["name"])
    holder = os.getpid()
    try:
        unprivileged = separate(Kind.NETWORK | Kind.PID)
    except OSError as error:
        raise EnvironmentProblem(NO_RIGHTS.format(error.strerror or error)) from error
    die_with(wanted["parent"])
    _start_first(listener)
    ranks = build(shape)
    user = [opened("user")] if unprivileged else []
    namespaces = [opened("pid_for_children"), opened("net"), *ranks, *user]
    return Status(wanted["name"], shape, holder, unprivileged, time.time()), listener, namespaces


def _start_first(listener: socket.socket) -> None:
    """Start process 1 of the lab: when it ends, the kernel kills all others of the lab. It ends with this one."""
    holders_end, end = os.pipe()
    if os.fork():
        os.close(holders_end)
        return
    listener.close()
    os.close(end)
    let_go_of_streams()
    # Collects, without a word, processes whose parent has ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.read(holders_end, 1)
    os._exit(0)


def _say(said: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
