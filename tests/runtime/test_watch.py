"""The watch alone: who is named when nobody says anything, as under a backend that raises nothing."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeAlias

import pytest

from axonn_tune.runtime import watch
from axonn_tune.runtime.trainer import START_TIMEOUT_S, StepLimit
from axonn_tune.runtime.watch import RankFailure, Watch

PATIENCE_S, LIMIT_S = 30.0, 0.2
Failures: TypeAlias = "queue.Queue[tuple[int, RankFailure]]"


def watches(world: int) -> tuple[list[Watch], Failures]:
    """Connected ends, and what each is told: `(rank, failure)`."""
    told: Failures = queue.Queue()

    def hear(rank: int) -> Callable[[RankFailure], None]:
        return lambda failure: told.put((rank, failure))

    found = [Watch(rank, world, hear(rank)) for rank in range(world)]
    port = found[0].listen()
    accepting = threading.Thread(target=found[0].accept, args=("token",))
    accepting.start()
    for one in found[1:]:
        one.join(("localhost", port), "token")
    accepting.join()
    return found, told


def greet(port: int, pieces: Iterable[bytes]) -> socket.socket:
    """Connect to rank 0 and say something in pieces."""
    connection = socket.create_connection(("localhost", port))
    for piece in pieces:
        connection.sendall(piece)
        time.sleep(0.1)
    return connection


def test_strangers_are_sent_away_and_a_cut_greeting_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the start from whoever else connects to an open port, and from where TCP cuts a message."""
    monkeypatch.setattr(watch, "_GREETING_S", 1.0)
    first = Watch(0, 2, lambda failure: None)
    port = first.listen()
    accepting = threading.Thread(target=first.accept, args=("token",), daemon=True)
    accepting.start()
    wrong = json.dumps({"token": "guessed", "rank": 1, "process": ["", 0]}).encode() + b"\n"
    strangers = [greet(port, pieces) for pieces in ([], [b"GET / HTTP/1.1\r\n"], [b"[1]\n"], [wrong])]
    hello = json.dumps({"token": "token", "rank": 1, "process": ["", 0]}).encode() + b"\n"
    rank = greet(port, (hello[:9], hello[9:]))
    accepting.join(PATIENCE_S)
    assert not accepting.is_alive()
    assert b"process" in rank.recv(65536)
    for one in (*strangers, rank):
        with one:
            assert one is rank or one.recv(65536) == b""


def test_a_first_step_that_compiles_does_not_count() -> None:
    """Guards hang_timeout_s after minutes of compilation: they allow the second step more, and no other."""
    limit, found = StepLimit(60.0), []
    for step_s in (200.0, 3.0, 5.0, 4.0):
        found.append(limit.next_s())
        limit.note(step_s)
    assert [*found, limit.next_s()] == [START_TIMEOUT_S, 460.0, 66.0, 70.0, 70.0]


SLOW = 10 * LIMIT_S


@pytest.mark.parametrize(
    ("limits_s", "issued", "hasty", "named", "reason"),
    [
        ((LIMIT_S,) * 3, (7, 9, 9), False, 0, "rank 0 hangs after 7 of 9 collectives"),
        ((LIMIT_S,) * 3, (9, 9, 7), False, 2, "rank 2 hangs after 7 of 9 collectives"),
        ((LIMIT_S, None, LIMIT_S), (9, 9, 9), False, 1, "rank 1 is in no step while others wait for it: a step did"),
        ((LIMIT_S, SLOW, LIMIT_S), (9, 9, 9), False, 0, "all ranks wait after 9 collectives each"),
        ((1000.0,) * 3, (9, 7, 9), True, 1, "rank 1 hangs after 7 of 9 collectives: a collective took longer"),
    ],
    ids=["first behind", "last behind", "outside of its step", "all wait", "gives up"],
)
def test_whoever_is_waited_for_is_named(
    limits_s: tuple[float | None, ...], issued: tuple[int, ...], hasty: bool, named: int, reason: str
) -> None:
    """Guards hangs under NCCL, where waiting raises nothing, and under Gloo, where a time-out ends a rank (hasty).

    If all steps are late, the fewest collectives tell; a rank may be stuck while saving, in no step; and nobody is
    named, nor blamed for what the network did, before the slowest rank's own limit.
    """
    found, told = watches(3)
    began = time.monotonic()
    for one, limit_s, count in zip(found, limits_s, issued, strict=True):
        one.issued = lambda count=count: count  # type: ignore[misc]
        if limit_s is not None:
            one.begin_step(limit_s)
    if hasty:
        found[2].fail("a collective took longer than 3 s", code=6, timed_out=True)
    heard = dict(told.get(timeout=PATIENCE_S) for _ in found)
    assert set(heard) == {0, 1, 2}
    for failure in heard.values():
        assert (failure.rank, failure.code) == (named, 6)
        assert reason in failure.reason
    assert time.monotonic() - began > 0.9 * SLOW or SLOW not in limits_s


def test_one_search_for_who_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the main thread and the one that reads, which note a time-out at the same moment."""
    searches: list[str] = []
    monkeypatch.setattr(Watch, "_name_late_ranks", lambda self, reason: searches.append(reason))
    first = Watch(0, 3, lambda failure: None)
    noting = [threading.Thread(target=first._search, args=("late",), kwargs={"hasty": False}) for _ in range(3)]
    for one in noting:
        one.start()
    for one in noting:
        one.join()
    assert searches == ["late"]


def test_steps_that_end_after_all_end_nothing() -> None:
    """Guards against false alarms: ten steps in time, and one too late for the first rank's limit, but not another's.

    The limit is five times a step, since the host may be busy.
    """
    found, told = watches(2)
    for limits_s, count in (((5 * LIMIT_S, 5 * LIMIT_S), 10), ((LIMIT_S, 20 * LIMIT_S), 1)):
        for _ in range(count):
            for one, limit_s in zip(found, limits_s, strict=True):
                one.begin_step(limit_s)
            time.sleep(LIMIT_S if count > 1 else 5 * LIMIT_S)
            for one in found:
                one.end_step()
    for one in found:
        one.begin_step(20 * LIMIT_S)
    with pytest.raises(queue.Empty):
        told.get(timeout=8 * LIMIT_S)
    assert not found[0]._searching
