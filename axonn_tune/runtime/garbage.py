"""Python's garbage collector, kept out of the steps.

It stops a rank whenever its counters say so, on every rank at another time, and all others wait in their
next collective. So it is off while training, and runs between two steps, on all ranks after the same ones.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

COLLECT_EVERY_STEPS = 50


@contextmanager
def garbage_between_steps() -> Iterator[None]:
    """Switch the collector off; on again at the end, if it was on."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if before:
            gc.enable()


def collect_after(steps: int) -> None:
    """Collect, if it is time to, after so many steps of this run.

    After the first, what is still there is set aside for good: model, optimizer and modules need not be
    looked through again.
    """
    if steps == 1:
        gc.collect()
        gc.freeze()
    elif steps % COLLECT_EVERY_STEPS == 0:
        gc.collect()
