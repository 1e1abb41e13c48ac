"""The watch alone: who is named when nobody says anything, as under a backend that raises nothing."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable

import pytest

from axonn_tune.runtime import watch
from axonn_tune.runtime.trainer import START_TIMEOUT_S, StepLimit
from axonn_tune.runtime.watch import RankFailure, Watch

PATIENCE_S, LIMIT_S = 30.0, 0.2

Failures = "queue.Queue[tuple[int, Failure]]"


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


def test_a_first_step_that_compiles_does_not_count() -> None:
    """Guards hang_timeout_s after minutes of compilation: they allow the second step more, and no other."""
    limit, found = StepLimit(60.0), []
    for step_s in (200.0, 3.0, 5.0, 4.0):
        found.append(limit.next_s())
        limit.note(step_s)
    assert [*found, limit.next_s()] == [START_TIMEOUT_S, 460.0, 66.0, 70.0, 70.0]


@pytest.mark.parametrize("hanging", [0, 2])
def test_a_rank_that_hangs_is_the_one_that_is_behind(hanging: int) -> None:
    """Guards hangs under NCCL, where waiting raises nothing: all steps are late, and the fewest collectives tell."""
    found, told = watches(3)
    for rank, one in enumerate(found):
        one.issued = lambda rank=rank: 7 if rank == hanging else 9  # type: ignore[misc]
        one.begin_step(LIMIT_S)
    heard = dict(told.get(timeout=PATIENCE_S) for _ in found)
    assert set(heard) == {0, 1, 2}
    for failure in heard.values():
        assert (failure.rank, failure.code) == (hanging, 6)
        assert f"rank {hanging} hangs after 7 of 9 collectives" in failure.reason


def test_a_rank_outside_of_its_step_is_silent() -> None:
    """Guards ranks that are stuck while saving or writing: they are in no step, and those that wait name them."""
    found, told = watches(3)
    for one in (found[0], found[2]):
        one.begin_step(LIMIT_S)
    for _ in found:
        _, failure = told.get(timeout=PATIENCE_S)
        assert failure.rank == 1
        assert "rank 1 is in no step while others wait for it: a step did not end in time" in failure.reason


def test_the_slowest_ranks_limit_counts() -> None:
    """Guards a rank whose steps were longer, so that its limit is: it is healthy, and nobody is named before that."""
    found, told = watches(3)
    began = time.monotonic()
    for one, limit_s in zip(found, (LIMIT_S, 10 * LIMIT_S, LIMIT_S), strict=True):
        one.begin_step(limit_s)
    _, failure = told.get(timeout=PATIENCE_S)
    assert time.monotonic() - began > 9 * LIMIT_S
    assert "all ranks wait" in failure.reason


def test_a_late_step_that_ends_after_all_ends_nothing() -> None:
    """Guards a run whose first rank has a limit that is too short: the others are in time, and the step ends."""
    found, told = watches(2)
    for one, limit_s in zip(found, (LIMIT_S, 100 * LIMIT_S), strict=True):
        one.begin_step(limit_s)
    time.sleep(5 * LIMIT_S)
    for one in found:
        one.end_step()
        one.begin_step(100 * LIMIT_S)
    with pytest.raises(queue.Empty):
        told.get(timeout=8 * LIMIT_S)
    assert not found[0]._searching


def test_a_rank_that_gives_up_waits_for_nobodys_limit() -> None:
    """Guards Gloo, where a collective's time-out ends its rank: who is behind is named at once."""
    found, told = watches(3)
    for rank, one in enumerate(found):
        one.issued = lambda rank=rank: 7 if rank == 1 else 9  # type: ignore[misc]
        one.begin_step(1000 * LIMIT_S)
    found[2].fail("a collective took longer than 3 s", code=6, timed_out=True)
    for _ in found:
        _, failure = told.get(timeout=PATIENCE_S)
        assert failure.reason == "rank 1 hangs after 7 of 9 collectives: a collective took longer than 3 s"


def test_if_all_wait_for_the_same_nobody_is_blamed() -> None:
    """Guards against naming a rank for what the network did."""
    found, told = watches(2)
    for one in found:
        one.begin_step(LIMIT_S)
    for _ in found:
        assert "all ranks wait after 0 collectives each" in told.get(timeout=PATIENCE_S)[1].reason


def test_steps_that_end_in_time_end_nothing() -> None:
    """Guards against false alarms: of ten steps, twice as long as the limit in all, none is late."""
    limit_s = 10 * LIMIT_S  # Five times a step, since the host may be busy.
    found, told = watches(2)
    for _ in range(10):
        for one in found:
            one.begin_step(limit_s)
        threading.Event().wait(limit_s / 5)
        for one in found:
            one.end_step()
    with pytest.raises(queue.Empty):
        told.get(timeout=limit_s)
