"""What ranks do to measure a lab's links: TCP streams and a small packet to and fro, with plain sockets."""

from __future__ import annotations

import bisect
import contextlib
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from axonn_tune.lab.shape import address

_STREAM_PORT, _PING_PORT = 28000, 27000
_CHUNK_BYTES = 1 << 18
_PATIENCE_S = 5.0
_WARM_UP_S = 0.2
"""Not counted: buckets are full and queues empty at first."""
_ANSWER_WITHIN_S = 2.5

Flow = tuple[int, int]
"""From one rank to another."""


Arrived = list[tuple[float, int]]
"""Bytes that had arrived by a time; all ranks of a host read the same clock."""


def stream(rank: int, flows: Sequence[Flow], duration_s: float) -> dict[Flow, Arrived]:
    """Take this rank's part in streams that all run at once; what arrived when, of those it receives."""
    receiving, sending = list[tuple[Flow, socket.socket]](), list[tuple[str, int]]()
    for number, (source, target) in enumerate(flows):
        place = (address(target), _STREAM_PORT + number)
        if rank == target:
            receiving.append(((source, target), socket.create_server(place)))
        if rank == source:
            sending.append(place)
    with ThreadPoolExecutor(max_workers=max(1, len(receiving) + len(sending))) as pool:
        arriving = {flow: pool.submit(_receive, listener) for flow, listener in receiving}
        leaving = [pool.submit(_send, place, duration_s) for place in sending]
        for sent in leaving:
            sent.result()
        return {flow: found.result() for flow, found in arriving.items()}


def rates(flows: Sequence[Arrived]) -> list[float]:
    """Bit/s of streams, without headers, over the time that all of them ran; 0 if there was none."""
    begin = max(one[0][0] for one in flows) + _WARM_UP_S
    end = min(one[-1][0] for one in flows)
    if end <= begin:
        return [0.0] * len(flows)
    return [(_arrived_by(end, one) - _arrived_by(begin, one)) * 8 / (end - begin) for one in flows]


def ping(rank: int, source: int, target: int, count: int) -> list[float]:
    """Round trips of a 64-byte packet between two ranks in s; nothing but on the source."""
    if rank == target:
        _echo(address(target), source)
    if rank != source:
        return []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        connection.connect((address(target), _PING_PORT))
        _wait_for_echo(connection)
        found = [_round_trip(connection, number) for number in range(count)]
        connection.send(b"")
    return found


def _send(place: tuple[str, int], duration_s: float) -> None:
    with _connected(place) as connection:
        chunk, end = bytes(_CHUNK_BYTES), time.monotonic() + duration_s
        while time.monotonic() < end:
            connection.sendall(chunk)


def _connected(place: tuple[str, int]) -> socket.socket:
    """The other side starts at the same time, so it may be a moment late."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return socket.create_connection(place, timeout=_PATIENCE_S)
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _receive(listener: socket.socket) -> Arrived:
    listener.settimeout(_PATIENCE_S)
    with listener:
        connection, _ = listener.accept()
    buffer, total = bytearray(_CHUNK_BYTES), 0
    found = [(time.monotonic(), 0)]
    with connection:
        while size := connection.recv_into(buffer):
            total += size
            found.append((time.monotonic(), total))
    return found


def _arrived_by(time_s: float, found: Arrived) -> float:
    """In between two moments, as if it had come evenly."""
    after = bisect.bisect_left(found, (time_s, 0))
    (t0, b0), (t1, b1) = found[max(0, after - 1)], found[min(after, len(found) - 1)]
    return b1 if t1 <= t0 else b0 + (b1 - b0) * (time_s - t0) / (t1 - t0)


def _echo(own_address: str, source: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        connection.bind((own_address, _PING_PORT))
        connection.settimeout(_PATIENCE_S)
        while True:
            packet, sender = connection.recvfrom(128)
            if not packet:
                return
            if sender[0] == address(source):
                connection.sendto(packet, sender)


def _wait_for_echo(connection: socket.socket) -> None:
    """Until the other side is there; what came too early is read and forgotten."""
    deadline = time.monotonic() + _PATIENCE_S
    connection.settimeout(0.1)
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            connection.send(b"early")
            connection.recv(128)
            break
    connection.settimeout(0.05)
    with contextlib.suppress(TimeoutError):
        while True:
            connection.recv(128)
    connection.settimeout(_ANSWER_WITHIN_S)


def _round_trip(connection: socket.socket, number: int) -> float:
    packet = number.to_bytes(64, "little")
    began_s = time.perf_counter()
    connection.send(packet)
    while connection.recv(128) != packet:
        pass
    return time.perf_counter() - began_s
