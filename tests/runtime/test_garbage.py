"""Garbage collection between steps only."""

from __future__ import annotations

import gc
import weakref

from axonn_tune.runtime.trainer import COLLECT_EVERY_STEPS, collect_after, garbage_between_steps


class Ring:
    """Something that only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_goes_after_the_same_steps_on_every_rank() -> None:
    """Guards step times: nothing is collected within steps, and what is garbage does go in the end."""
    with garbage_between_steps():
        assert not gc.isenabled()
        gone = {}
        for steps in range(1, COLLECT_EVERY_STEPS + 1):
            gone[steps] = weakref.ref(Ring())
            collect_after(steps)
            left = [one for one, ring in gone.items() if ring() is not None]
            assert left == ([] if steps in (1, COLLECT_EVERY_STEPS) else list(range(2, steps + 1)))
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
