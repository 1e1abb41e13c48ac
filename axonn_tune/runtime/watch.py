"""Who is still there: a TCP connection from every rank to rank 0, which tells all when one is lost.

A process that dies, however it dies, closes its connections at once; one that hangs or is stopped does
not. So this tells a lost rank from a slow one, which the time-out of a collective cannot. The same
connections carry the wish to stop, agreed between two steps.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LOST = "its process ended without a word (killed, out of memory, or crashed)"
_GATHER_S = 1.5
"""After a time-out, how long rank 0 waits for the others' before it names those that say nothing."""


@dataclass(frozen=True)
class Failure:
    """What ended the run. `told`: by rank 0, which prints it; else whoever holds this has to."""

    rank: int
    reason: str
    code: int
    told: bool


@dataclass
class _Line:
    """One connection: whole messages out of what has arrived."""

    connection: socket.socket
    rank: int = -1
    rest: bytes = b""
    finished: bool = False

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Messages that have arrived; None once the other side is gone."""
        try:
            arrived = self.connection.recv(65536)
        except OSError:
            return None
        if not arrived:
            return None
        *lines, self.rest = (self.rest + arrived).split(b"\n")
        return [json.loads(line) for line in lines]


@dataclass
class Watch:
    """One rank's end. `on_failure` is called once, in a thread of its own, when another rank has failed."""

    rank: int
    world: int
    on_failure: Callable[[Failure], None]
    stop_after: int | None = None
    asked_to_stop: bool = False
    _lines: list[_Line] = field(default_factory=list)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _acknowledged: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _timed_out: set[int] = field(default_factory=set)
    _over: bool = False

    def serve(self) -> tuple[int, Callable[[str], None]]:
        """Rank 0: listen; returns the port, and what accepts the others once they know port and token."""
        listener = socket.create_server(("", 0), family=socket.AF_INET, backlog=self.world)

        def accept(token: str) -> None:
            listener.settimeout(300.0)
            while len(self._lines) < self.world - 1:
                connection, _ = listener.accept()
                line = _Line(connection)
                hello = line.receive()
                if hello and hello[0].get("token") == token:
                    line.rank = int(hello[0]["rank"])
                    self._lines.append(line)
            listener.close()
            self._start()

        return int(listener.getsockname()[1]), accept

    def join(self, address: tuple[str, int], token: str) -> None:
        """Another rank: connect to rank 0."""
        line = _Line(socket.create_connection(address, timeout=300.0), rank=0)
        line.send({"token": token, "rank": self.rank})
        self._lines.append(line)
        self._start()

    def fail(self, reason: str, *, code: int, timed_out: bool = False) -> None:
        """Tell everybody that this rank fails. After a time-out rank 0 finds out first who did not answer."""
        if timed_out and not self.rank:
            self._name_the_silent(reason)
            return
        self._over = not timed_out
        for line in self._lines:
            line.send({"failed": self.rank, "reason": reason, "code": code, "timed_out": timed_out})

    def finish(self) -> None:
        """Say that this rank ends in good order."""
        self._over = True
        for line in self._lines:
            line.send({"finished": self.rank})

    def ask_to_stop(self) -> None:
        """Tell rank 0 that this rank got a signal."""
        self.asked_to_stop = True
        if self.rank:
            self._lines[0].send({"stop_please": self.rank})

    def agree_to_stop(self, step: int) -> None:
        """Rank 0, before the collective that ends a step: have all stop after it. Returns once all know."""
        self.stop_after = step
        for line in self._lines:
            line.send({"stop_after": step})
        for _ in self._lines:
            self._acknowledged.acquire(timeout=10.0)

    def _start(self) -> None:
        for line in self._lines:
            line.connection.settimeout(None)
            self._selector.register(line.connection, selectors.EVENT_READ, line)
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def _run(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                self._read(key.data)

    def _read(self, line: _Line) -> None:
        messages = line.receive()
        if messages is None:
            self._selector.unregister(line.connection)
            if not line.finished and not self._over:
                self._failed(Failure(line.rank, LOST, 6, told=False))
            return
        for message in messages:
            self._handle(line, message)

    def _handle(self, line: _Line, message: dict[str, Any]) -> None:
        if "failed" in message:
            if message["timed_out"] and not self.rank:
                self._timed_out.add(line.rank)
                if len(self._timed_out) == 1:
                    threading.Thread(target=self._name_the_silent, args=(message["reason"],), daemon=True).start()
                return
            self._failed(Failure(message["failed"], message["reason"], message["code"], told=line.rank == 0))
        elif "finished" in message:
            line.finished = True
        elif "stop_please" in message:
            self.asked_to_stop = True
        elif "stop_after" in message:
            self.stop_after = message["stop_after"]
            line.send({"acknowledged": self.rank})
        else:
            self._acknowledged.release()

    def _name_the_silent(self, reason: str) -> None:
        """Rank 0, after a collective timed out: who has not said so is what the others waited for."""
        time.sleep(_GATHER_S)
        silent = sorted({line.rank for line in self._lines if not line.finished} - self._timed_out)
        if silent:
            shown = ", ".join(map(str, silent[:8])) + (", ..." if len(silent) > 8 else "")
            self._failed(Failure(silent[0], f"rank {shown} did not answer: {reason}", 6, told=False))
        else:
            self._failed(Failure(self.rank, reason, 6, told=False))

    def _failed(self, failure: Failure) -> None:
        """The first failure heard of ends this rank, and through rank 0 all others."""
        if self._over:
            return
        self._over = True
        if not self.rank:
            for line in self._lines:
                line.send({"failed": failure.rank, "reason": failure.reason, "code": failure.code, "timed_out": False})
        self.on_failure(failure)
