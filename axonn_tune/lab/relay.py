"""Delays what nodes send to each other where the kernel cannot (`netem` missing): a process between two TAP devices.

Each node's uplink is then a pair of TAP devices instead of a veth pair. What the node's end sends is read
here, kept for the delay, and written to the spine's end; the other direction passes at once, so that a
packet between two nodes is delayed once. It takes time of a core for each packet.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import select
import signal
import struct
import time

from axonn_tune.errors import EnvironmentProblem
from axonn_tune.lab.namespaces import be_exact, let_go_of_streams
from axonn_tune.lab.shape import MTU_BYTES, Shape, down, up
from axonn_tune.processes import die_with

_DEVICE = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_TAP, _NO_HEADER = 0x0002, 0x1000
_FRAME_BYTES = MTU_BYTES + 64
_AT_ONCE = 64


def start_relay(shape: Shape) -> None:
    """Make every node's uplink in this network namespace and a process that relays; it ends with this one."""
    pairs = [(_tap(up(node)), _tap(down(node))) for node in range(shape.nodes)]
    if os.fork() == 0:
        # The parent is outside of this process' namespace and so has the number 0.
        die_with(0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            # Before the ranks, which may be before all others: they wait for this.
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))
        let_go_of_streams()
        be_exact()
        _relay(pairs, shape.delay_s)
    for device in (one for pair in pairs for one in pair):
        os.close(device)


def _tap(name: str) -> int:
    """A new TAP device, gone when the last process closes it."""
    try:
        device = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_HEADER))
    except OSError as error:
        raise EnvironmentProblem(
            f"--delay: this kernel has no netem, and a relay in its place needs {_DEVICE} ({error.strerror})"
        ) from error
    return device


def _relay(pairs: list[tuple[int, int]], delay_s: float) -> None:
    """For ever: frames of each first device to the second, late; of the second to the first, at once."""
    later = dict(pairs)
    other = later | {second: first for first, second in pairs}
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        left = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
        for device in select.select(list(other), [], [], left)[0]:
            for frame in _frames(device):
                if device in later:
                    waiting.append((time.monotonic() + delay_s, other[device], frame))
                else:
                    _write(other[device], frame)
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, device, frame = waiting.popleft()
            _write(device, frame)


def _frames(device: int) -> list[bytes]:
    found: list[bytes] = []
    with contextlib.suppress(OSError):
        while len(found) < _AT_ONCE:
            found.append(os.read(device, _FRAME_BYTES))
    return found


def _write(device: int, frame: bytes) -> None:
    # A device that is not up yet refuses.
    with contextlib.suppress(OSError):
        os.write(device, frame)
