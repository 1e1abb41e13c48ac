"""The cluster's network on one Linux host: namespaces, the links between them, their rates and delay.

Each rank has a network namespace, joined by a veth pair to its node's leaf bridge; each leaf bridge is joined by one
more pair, the uplink, to the spine bridge. Both ends of every pair hold token buckets, so each direction has its own
rate. The bridges are in the namespace of the process that builds the network. No namespace has a route to the host,
or to anything but the ranks.

Links are set up with iproute2. The system calls for namespaces are made here, for Python 3.11 has none; they
raise OSError as they fail.

Delay between nodes is netem's. Where the kernel has none, each uplink is a pair of TAP devices instead of a veth pair
and a relay process between them: it reads what the node's end sends, holds it for the delay, and writes it to the
spine's end; the other direction passes at once, so that a packet between two nodes is delayed once. Each packet costs
some CPU time.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from axonn_tune.errors import EnvironmentProblem
from axonn_tune.lab.shape import INTERFACE, MTU_BYTES, PREFIX, Shape, address, part
from axonn_tune.processes import die_with, system_call

_PR_SET_TIMERSLACK = 29


class NamespaceKind(enum.IntFlag):
    """Kinds of namespaces, as `clone(2)` numbers them."""

    USER = 0x1000_0000
    PID = 0x2000_0000
    NETWORK = 0x4000_0000


def enter(path: str, kind: NamespaceKind) -> None:
    """Put this process (its children, for PID) into the namespace of a path such as `/proc/1/ns/net`."""
    namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        system_call("setns", namespace, int(kind))
    finally:
        os.close(namespace)


def let_go_of_streams() -> None:
    """Close the standard streams, so that readers of them see the end though this process stays."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


def separate(kinds: NamespaceKind) -> bool:
    """New namespaces, in a new user namespace unless root; whether that was needed. OSError if neither is allowed."""
    try:
        system_call("unshare", int(kinds))
    except PermissionError:
        user, group = os.getuid(), os.getgid()
        system_call("unshare", int(kinds | NamespaceKind.USER))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        return True
    return False


_OWN_NETWORK = Path("/proc/self/ns/net")
_SPINE = f"{PREFIX}-spine"
_BURST_BYTES, _BURST_S = 9100, 5e-4
"""Size of a bucket: at least what the rate sends while the kernel's timer may be late, or the rate is not reached. A
larger one lets whole small messages through without waiting."""
_ACKNOWLEDGEMENTS = 0.1
"""Share of a rate reserved for packets under 64 bytes; data gets what they leave."""
_LENGTH_AT, _LONGER = 2, "0xffc0"
"""Offset of the length in an IP packet, and the bits of it that are set from 64 bytes on."""
_QUEUE_BYTES = 16 << 20
"""Deep enough that nothing is dropped: a loss stalls TCP for 200 ms."""
_SETTINGS = {
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv6/conf/default/disable_ipv6": "1",
    # Cubic probes for a rate that is known here, and may not be chosen without rights on the host.
    "ipv4/tcp_congestion_control": "reno",
    # Every collective begins after idle time; without these two it would begin slowly, or as the last one ended.
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_no_metrics_save": "1",
    # Less in flight than the queue holds.
    "ipv4/tcp_wmem": "4096 65536 {send_bytes}",
    "ipv4/tcp_rmem": "4096 131072 {receive_bytes}",
    "ipv4/tcp_limit_output_bytes": "131072",
}
_SEND_BYTES, _RECEIVE_BYTES = 256 << 10, 1 << 20
_NETEM_PACKETS = 100_000
_MISSING_TOOLS = "the lab needs `{}` of iproute2, which is not here: apt-get install iproute2 (Debian, Ubuntu)"


def require_tools() -> None:
    """EnvironmentProblem unless `ip` and `tc` are installed."""
    for name in ("ip", "tc"):
        _tool(name)


def build(shape: Shape, first: int) -> None:
    """Make the network around this process' network namespace; rank r's is file descriptor `first` + r.

    EnvironmentProblem with the tool's own words if the kernel lacks something.
    """
    _settle(("ipv6/conf/all/disable_ipv6", "ipv6/conf/default/disable_ipv6"), shape)
    with _OWN_NETWORK.open("rb") as switch:
        networks = [f"/proc/{os.getpid()}/fd/{first + rank}" for rank in range(shape.world)]
        for rank in range(shape.world):
            system_call("unshare", int(NamespaceKind.NETWORK))
            with _OWN_NETWORK.open("rb") as network:
                os.dup2(network.fileno(), first + rank)
        back = f"/proc/self/fd/{switch.fileno()}"
        enter(back, NamespaceKind.NETWORK)
        netem = shape.delay_s > 0 and _has_netem()
        relayed = shape.delay_s > 0 and not netem
        if relayed:
            start_relay(shape)
        batch("ip", switch_links(shape, networks, relayed=relayed))
        batch("tc", switch_limits(shape, netem=netem))
        for rank, path in enumerate(networks):
            enter(path, NamespaceKind.NETWORK)
            _settle(_SETTINGS, shape)
            batch("ip", ["link set lo up", f"addr add {address(rank)}/24 dev {INTERFACE}", f"link set {INTERFACE} up"])
            batch("tc", limit(INTERFACE, shape.port_bits_per_s))
        enter(back, NamespaceKind.NETWORK)


def switch_links(shape: Shape, namespaces: Sequence[str], *, relayed: bool = False) -> Iterator[str]:
    """Lines for `ip`: bridges, uplinks (made by the relay, if any), and a link to each rank's namespace, a path."""
    yield "link set lo up"
    for bridge in (_SPINE, *(part("leaf", node) for node in range(shape.nodes))):
        yield f"link add {bridge} type bridge"
        yield f"link set {bridge} mtu {MTU_BYTES} up"
    for node in range(shape.nodes):
        inner, outer = part("up", node), part("down", node)
        if relayed:
            yield from (f"link set {end} mtu {MTU_BYTES}" for end in (inner, outer))
        else:
            yield f"link add {inner} mtu {MTU_BYTES} type veth peer name {outer} mtu {MTU_BYTES}"
        yield f"link set {inner} master {part('leaf', node)} up"
        yield f"link set {outer} master {_SPINE} up"
    for rank, namespace in enumerate(namespaces):
        peer = f"peer name {INTERFACE} mtu {MTU_BYTES} netns {namespace}"
        yield f"link add {part('port', rank)} mtu {MTU_BYTES} type veth {peer}"
        yield f"link set {part('port', rank)} master {part('leaf', shape.node_of(rank))} up"


def switch_limits(shape: Shape, *, netem: bool) -> Iterator[str]:
    """Lines for `tc`: each end's rate; with netem, what a node sends to others is delayed first."""
    delayed = {part("up", node) for node in range(shape.nodes)} if netem else set()
    for link, rate in shape.links():
        yield from limit(link, rate, delay_s=shape.delay_s if link in delayed else 0.0)


def limit(link: str, rate_bits_per_s: float, *, delay_s: float = 0.0) -> Iterator[str]:
    """Lines for `tc` that limit what a link's end sends, acknowledgements before all else.

    Queued behind data they would halve the rate of two ranks that send to each other: TCP then sends by
    turns (Zhang, Shenker and Clark, SIGCOMM 1991, "Observations on the dynamics of a congestion control
    algorithm: the effects of two-way traffic"), which links that are faster, or know no TCP, do not show.
    """
    burst_bytes = max(_BURST_BYTES, int(rate_bits_per_s / 8 * _BURST_S))
    burst = f"burst {burst_bytes} cburst {burst_bytes} quantum {MTU_BYTES + 100}"
    queue = f"netem delay {delay_s * 1e6:.0f}us limit {_NETEM_PACKETS}" if delay_s else f"bfifo limit {_QUEUE_BYTES}"
    yield f"qdisc add dev {link} root handle 1: htb default 3"
    yield f"class add dev {link} parent 1: classid 1:1 htb rate {rate_bits_per_s:.0f}bit {burst}"
    for number, share in ((2, _ACKNOWLEDGEMENTS), (3, 1.0 - _ACKNOWLEDGEMENTS)):
        rates = f"rate {rate_bits_per_s * share:.0f}bit ceil {rate_bits_per_s:.0f}bit"
        yield f"class add dev {link} parent 1:1 classid 1:{number} htb {rates} {burst} prio {number - 2}"
        yield f"qdisc add dev {link} parent 1:{number} {queue}"
    yield f"filter add dev {link} parent 1: protocol ip u32 match u16 0 {_LONGER} at {_LENGTH_AT} flowid 1:2"


def batch(tool: str, lines: Iterable[str]) -> None:
    """Have one `ip` or `tc` execute all lines; EnvironmentProblem with its message."""
    text = "".join(f"{line}\n" for line in lines)
    command = [_tool(tool), "-batch", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentProblem(f"{tool} could not set up the lab's network: {done.stderr.strip()}")


def _tool(name: str) -> str:
    # Ordinary users of Debian do not have the last two in their PATH.
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))
    if found is None:
        raise EnvironmentProblem(_MISSING_TOOLS.format(name))
    return found


def _has_netem() -> bool:
    """Whether this kernel can delay packets; tried on this namespace's own loopback."""
    try:
        batch("tc", ["qdisc add dev lo root netem delay 1ms", "qdisc del dev lo root"])
    except EnvironmentProblem:
        return False
    return True


def _settle(keys: Iterable[str], shape: Shape) -> None:
    """Write settings of the current network namespace; those the kernel lacks are skipped."""
    # A longer path holds more.
    in_flight_bytes = int(shape.uplink_bits_per_s / 8 * 2 * shape.delay_s)
    send_bytes, receive_bytes = _SEND_BYTES + 2 * in_flight_bytes, _RECEIVE_BYTES + 4 * in_flight_bytes
    for key in keys:
        path = Path("/proc/sys/net") / key
        if path.exists():
            try:
                path.write_text(_SETTINGS[key].format(send_bytes=send_bytes, receive_bytes=receive_bytes))
            except OSError as error:
                raise EnvironmentProblem(f"cannot set {path} for the lab: {error.strerror}") from error


_DEVICE = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_TAP, _NO_HEADER = 0x0002, 0x1000
_FRAME_BYTES = MTU_BYTES + 64
_AT_ONCE = 64


def start_relay(shape: Shape) -> None:
    """Make every node's uplink in this network namespace and a process that relays; it ends with this one."""
    pairs = [(_tap(part("up", node)), _tap(part("down", node))) for node in range(shape.nodes)]
    if os.fork() == 0:
        # The parent is outside of this process' namespace and so has the number 0.
        die_with(0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            # Scheduled before the ranks, which wait for it and may be before all others.
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))
        let_go_of_streams()
        # Wake up on time, and not up to 50 µs later to save power.
        system_call("prctl", _PR_SET_TIMERSLACK, 1)
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
    """Relay for ever: frames of each first device to the second after the delay, of the second to the first at once."""
    later = dict(pairs)
    other = later | {second: first for first, second in pairs}
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        left = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
        for device in select.select(list(other), [], [], left)[0]:
            # Until none is left, or it refuses frames because it is not up yet.
            with contextlib.suppress(OSError):
                for _ in range(_AT_ONCE):
                    frame = os.read(device, _FRAME_BYTES)
                    if device in later:
                        waiting.append((time.monotonic() + delay_s, other[device], frame))
                    else:
                        os.write(other[device], frame)
        while waiting and waiting[0][0] <= time.monotonic():
            _, device, frame = waiting.popleft()
            with contextlib.suppress(OSError):
                os.write(device, frame)
