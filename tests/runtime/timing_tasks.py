"""Tasks about time for the ranks of a pool."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from axonn_tune.grid import Grid
from axonn_tune.runtime.communicator import Communicator
from axonn_tune.runtime.ledger import Ledger
from axonn_tune.runtime.mesh import build_mesh
from axonn_tune.runtime.metrics import TimedCall, Timer

LATE_S = 0.3
"""How late the late rank is: far longer than the collective takes."""


def _timed(late: tuple[float, float]) -> tuple[TimedCall, TimedCall]:
    """Two all-reduces of a step of two ranks: one read long after it is done, one waited for at once.

    `late`: for how long each rank computes before the first is read, and before the second is sent.
    """
    timer = Timer()
    timer.start(torch.device("cpu"))
    communicator = Communicator(build_mesh(Grid(1, 1, 1, 2)), Ledger(), timer)
    dist.barrier()
    timer.begin_step(0)
    hidden = communicator.all_reduce(torch.ones(1000), "data", "backward", "block")
    time.sleep(late[0])
    hidden.wait()
    time.sleep(late[1])
    communicator.all_reduce(torch.ones(1000), "data", "step", "vectors").wait()
    times = timer.end_step()
    assert times is not None, "a started timer times step 0"
    first, second = times.calls
    return first, second


def one_late_rank() -> tuple[TimedCall, TimedCall]:
    """Both compute behind the first all-reduce; rank 1 comes late to the second."""
    return _timed((LATE_S, LATE_S * dist.get_rank()))
