"""Lost and hanging ranks: every rank has a TCP connection to rank 0, which tells all when one is lost.

A process that dies, for any reason, closes its connections at once; one that hangs or is stopped does not. So the watch
distinguishes a lost rank from a slow one, unlike the time-out of a collective. Over the same connections the ranks
agree to stop between two steps.

A step that does not end in time ends the run too, whatever the backend: under NCCL a rank that waits for another waits
in the driver, and raises nothing. Each rank has its own limit, from its earlier steps, so the first report only makes
rank 0 ask all ranks for their position, which a separate thread answers; it asks again until no step is within its
limit. The others wait for the rank that does not answer, is in no step, or has issued the fewest collectives. A silent
process may be stopped, so ranks of the same host kill it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOST_CODE = 6
"""Exit code after a rank was lost or hangs."""
LOST = "its process ended without a message (killed, out of memory, or crashed)"
_GATHER_S = 3.0
"""How long rank 0 waits for answers before it names the silent ranks; the last rank's usually ends the wait."""
_ANSWER_S = 5.0
"""How long another rank waits for rank 0 to ask, or to end the run, before it names rank 0."""
_GREETING_S = 5.0
"""How long a connection may take to identify itself: a rank does so at once, a stranger never."""
_GREETING_BYTES = 65536
_LOOK_S = 0.5
"""How often a rank checks whether its step is late."""


IN_TIME, LATE, OUTSIDE = "in time", "late", "outside"
"""Where a rank is: in a step within its limit or beyond it, or between two steps, as while it saves."""


@dataclass(frozen=True)
class RankFailure:
    """What ended the run. `told`: rank 0 has reported it; else this rank has to."""

    rank: int
    reason: str
    code: int
    told: bool


@dataclass
class _Connection:
    """One connection, read as whole messages. `process`: the other end's, see `own_process`."""

    connection: socket.socket
    rank: int = -1
    rest: bytes = b""
    process: tuple[str, int] = ("", 0)
    finished: bool = False

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def greeting(self, token: str) -> dict[str, Any] | None:
        """The first message, in however many packets; None unless it comes in time and holds the token."""
        end_s = time.monotonic() + _GREETING_S
        with contextlib.suppress(ValueError):
            while len(self.rest) < _GREETING_BYTES:
                self.connection.settimeout(max(end_s - time.monotonic(), 1e-3))
                messages = self.receive()
                if messages is None:
                    return None
                if messages:
                    hello: object = messages[0]
                    return hello if isinstance(hello, dict) and hello.get("token") == token else None
        return None

    def receive(self) -> list[dict[str, Any]] | None:
        """Messages that have arrived; None once the connection is closed."""
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
    """One rank's connections. `on_failure` is called once, in a separate thread, when another rank has failed."""

    rank: int
    world: int
    on_failure: Callable[[RankFailure], None]
    issued: Callable[[], int] = lambda: 0
    stop_after: int | None = None
    asked_to_stop: bool = False
    _lines: list[_Connection] = field(default_factory=list)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _acknowledged: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _answers: dict[int, tuple[str, int]] = field(default_factory=dict)
    _searching: bool = False
    _hasty: bool = False
    _late: bool = False
    _late_at_s: float | None = None
    _unanswered_at_s: float | None = None
    _over: bool = False
    # Between the main thread, the reading thread, and the search for late ranks.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def listen(self) -> int:
        """Rank 0: the port that it listens on."""
        self._listener = socket.create_server(("", 0), family=socket.AF_INET, backlog=self.world)
        return int(self._listener.getsockname()[1])

    def accept(self, token: str) -> None:
        """Rank 0: accept the other ranks, which know port and token."""
        self._listener.settimeout(300.0)
        while len(self._lines) < self.world - 1:
            connection, _ = self._listener.accept()
            line = _Connection(connection)
            hello = line.greeting(token)
            if hello is None:
                connection.close()
                continue
            line.rank, line.process = int(hello["rank"]), tuple(hello["process"])
            line.send({"process": own_process()})
            self._lines.append(line)
        self._listener.close()
        self._start()

    def join(self, address: tuple[str, int], token: str) -> None:
        """Another rank: connect to rank 0."""
        line = _Connection(socket.create_connection(address, timeout=300.0), rank=0)
        line.send({"token": token, "rank": self.rank, "process": own_process()})
        self._lines.append(line)
        self._start()

    def fail(self, reason: str, *, code: int, timed_out: bool = False) -> None:
        """Tell all ranks that this one fails. timed_out: it has waited for another, which rank 0 finds first."""
        if timed_out:
            self._report(reason, hasty=True)
            return
        self._over = True
        self._tell_all({"failed": self.rank, "reason": reason, "code": code})

    def _tell_all(self, message: dict[str, Any]) -> None:
        for line in self._lines:
            line.send(message)

    def _report(self, reason: str, *, hasty: bool) -> None:
        """Tell rank 0 that this rank has waited too long. hasty: it ends soon, so no limit is waited for."""
        self._late = True
        if not self.rank:
            self._search(reason, hasty=hasty)
            return
        self._unanswered_at_s = time.monotonic() + _ANSWER_S
        self._lines[0].send({"waited": self.rank, "reason": reason, "hasty": hasty})

    def begin_step(self, limit_s: float) -> None:
        """A step begins, which must end within `limit_s`."""
        self._late_at_s = time.monotonic() + limit_s

    def end_step(self) -> None:
        """The step has ended."""
        self._late_at_s = self._unanswered_at_s = None
        self._late = False

    @property
    def _place(self) -> str:
        """Where this rank is."""
        if self._late:
            return LATE
        return OUTSIDE if self._late_at_s is None else IN_TIME

    def finish(self) -> None:
        """Tell the others that this rank ends normally."""
        self._over = True
        self._tell_all({"finished": self.rank})

    def agree_to_stop(self, step: int, *, signalled: bool) -> None:
        """Before the collective that ends a step: pass on this rank's signal; on rank 0, have all stop after the step.

        No rank can end it before rank 0 continues, which is once all know.
        """
        if signalled and not self.asked_to_stop:
            self.asked_to_stop = True
            if self.rank:
                self._lines[0].send({"stop_please": self.rank})
        if self.rank == 0 and self.asked_to_stop and self.stop_after is None:
            self.stop_after = step
            self._tell_all({"stop_after": step})
            for _ in self._lines:
                self._acknowledged.acquire(timeout=10.0)

    def _start(self) -> None:
        for line in self._lines:
            line.connection.settimeout(None)
            self._selector.register(line.connection, selectors.EVENT_READ, line)
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def _run(self) -> None:
        """Read messages, and check whether this rank's step is late and whether rank 0 answers."""
        while self._selector.get_map():
            for key, _ in self._selector.select(_LOOK_S):
                line: _Connection = key.data
                messages = line.receive()
                for message in messages or ():
                    self._handle(line, message)
                if messages is not None:
                    continue
                self._selector.unregister(line.connection)
                line.connection.close()
                if not line.finished and not self._over:
                    self._failed(RankFailure(line.rank, LOST, LOST_CODE, told=False))
            now_s = time.monotonic()
            if self._over:
                continue
            if self._late_at_s is not None and now_s > self._late_at_s:
                self._late_at_s = None
                self._report("a step did not end in time", hasty=False)
            elif self._unanswered_at_s is not None and now_s > self._unanswered_at_s:
                words = "rank 0 did not answer: a collective or a step took too long"
                self._failed(RankFailure(0, words, LOST_CODE, told=False), silent={0})

    def _handle(self, line: _Connection, message: dict[str, Any]) -> None:
        if "waited" in message:
            self._search(message["reason"], hasty=message["hasty"])
        elif "where" in message:
            line.send({"place": self._place, "issued": self.issued()})
            if self._unanswered_at_s is not None:
                self._unanswered_at_s = time.monotonic() + _ANSWER_S
        elif "place" in message:
            self._answers[line.rank] = message["place"], message["issued"]
        elif "failed" in message:
            self._failed(RankFailure(message["failed"], message["reason"], message["code"], told=line.rank == 0))
        elif "finished" in message:
            line.finished = True
        elif "process" in message:
            line.process = tuple(message["process"])
        elif "stop_please" in message:
            self.asked_to_stop = True
        elif "stop_after" in message:
            self.stop_after = message["stop_after"]
            line.send({"acknowledged": self.rank})
        else:
            self._acknowledged.release()

    def _search(self, reason: str, *, hasty: bool) -> None:
        """Rank 0: somebody has waited too long; the first such report starts the search for whom."""
        with self._lock:
            first, self._searching = not self._searching, True
            self._hasty = self._hasty or hasty
        if first:
            threading.Thread(target=self._name_late_ranks, args=(reason,), daemon=True).start()

    def _name_late_ranks(self, reason: str) -> None:
        """Rank 0, after a time-out: ask all until no step is within its limit, then name the ranks they wait for."""
        while not self._over:
            places, silent = self._ask_all()
            if silent or self._hasty or not any(place == IN_TIME for place, _ in places.values()):
                break
            if not any(place == LATE for place, _ in places.values()):
                # The late step has ended meanwhile; unless somebody has reported a rank that is to be named at once.
                with self._lock:
                    self._searching = bool(self._hasty)
                if not self._searching:
                    return
            time.sleep(_LOOK_S)
        else:
            return
        issued = {rank: count for rank, (place, count) in places.items() if place != OUTSIDE}
        outside = places.keys() - issued.keys()
        fewest, most = min(issued.values(), default=0), max(issued.values(), default=0)
        behind = {rank for rank, count in issued.items() if count == fewest < most}
        if silent:
            self._name(silent, f"rank {_shown(silent)} did not answer: {reason}", silent=silent)
        elif outside:
            self._name(outside, f"rank {_shown(outside)} is in no step while others wait for it: {reason}")
        elif behind:
            self._name(behind, f"rank {_shown(behind)} hangs after {fewest} of {most} collectives: {reason}")
        else:
            words = f"all ranks wait after {most} collectives each: {reason}; the network or a device hangs"
            self._name({self.rank}, words)

    def _ask_all(self) -> tuple[dict[int, tuple[str, int]], set[int]]:
        """Where each rank is and how many collectives it has issued; and those that do not answer in time."""
        self._answers = {}
        # A rank that has finished is in no step, and nobody waits for it.
        asked = {line.rank for line in self._lines if not line.finished}
        self._tell_all({"where": self.rank})
        end_s = time.monotonic() + _GATHER_S
        while self._answers.keys() < asked and time.monotonic() < end_s:
            time.sleep(0.01)
        found = {rank: answer for rank, answer in self._answers.items() if rank in asked}
        return {0: (self._place, self.issued()), **found}, asked - found.keys()

    def _name(self, ranks: Collection[int], words: str, *, silent: Collection[int] = ()) -> None:
        self._failed(RankFailure(min(ranks), words, LOST_CODE, told=False), silent=silent)

    def _failed(self, failure: RankFailure, *, silent: Collection[int] = ()) -> None:
        """The first failure reported ends this rank, through rank 0 all others, and silent processes."""
        with self._lock:
            if self._over:
                return
            self._over = True
        if not self.rank:
            self._tell_all({"failed": failure.rank, "reason": failure.reason, "code": failure.code})
        # Of this host and still connected.
        here, own = own_process()
        for place, number in (line.process for line in self._lines if line.rank in silent):
            if place == here and number != own:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(number, signal.SIGKILL)
        self.on_failure(failure)


def own_process() -> tuple[str, int]:
    """The process id namespace, by host and inode, and this process' id in it."""
    return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}", os.getpid()


def _shown(ranks: Iterable[int]) -> str:
    """At most eight of them, by number."""
    found = sorted(ranks)
    return ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")
