"""The watch alone: who is named when nobody says anything, as under a backend that raises nothing."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest

from axonn_tune.runtime.watch import Failure, Watch

PATIENCE_S, LIMIT_S = 30.0, 0.2

Failures = "queue.Queue[tuple[int, Failure]]"


def watches(world: int) -> tuple[list[Watch], Failures]:
    """Connected ends, and what each is told: `(rank, failure)`."""
    told: Failures = queue.Queue()

    def hear(rank: int) -> Callable[[Failure], None]:
        return lambda failure: told.put((rank, failure))

    found = [Watch(rank, world, hear(rank)) for rank in range(world)]
    port, accept = found[0].serve()
    accepting = threading.Thread(target=accept, args=("token",))
    accepting.start()
    for one in found[1:]:
        one.join(("localhost", port), "token")
    accepting.join()
    return found, told


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
        assert f"rank {hanging} hangs, after 7 collectives of 9" in failure.reason


def test_a_rank_outside_of_its_step_is_silent() -> None:
    """Guards ranks that are stuck while saving or writing: they are in no step, and those that wait name them."""
    found, told = watches(3)
    for one in (found[0], found[2]):
        one.begin_step(LIMIT_S)
    for _ in found:
        _, failure = told.get(timeout=PATIENCE_S)
        assert failure.rank == 1
        assert "rank 1 did not answer: a step did not end in time" in failure.reason


def test_if_all_wait_for_the_same_nobody_is_blamed() -> None:
    """Guards against naming a rank for what the network did."""
    found, told = watches(2)
    for one in found:
        one.begin_step(LIMIT_S)
    for _ in found:
        assert "all ranks wait, after 0 collectives each" in told.get(timeout=PATIENCE_S)[1].reason


def test_steps_that_end_in_time_end_nothing() -> None:
    """Guards against false alarms: of ten steps as long as half the limit, none is late."""
    found, told = watches(2)
    for _ in range(10):
        for one in found:
            one.begin_step(LIMIT_S)
        threading.Event().wait(LIMIT_S / 2)
        for one in found:
            one.end_step()
    with pytest.raises(queue.Empty):
        told.get(timeout=3 * LIMIT_S)
