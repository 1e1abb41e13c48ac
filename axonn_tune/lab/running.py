"""Running a launch config on the ranks of a lab: signals passed on, one exit code for all."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

from axonn_tune.errors import UsageError
from axonn_tune.lab.messages import Outcome
from axonn_tune.lab.ranks import Ranks
from axonn_tune.lab.shape import Shape
from axonn_tune.specs.launch import Launch

TRAIN = "axonn_tune.runtime.forking:train"
_SAVING = (signal.SIGTERM, signal.SIGUSR2)


def require_world(launch: Launch, shape: Shape) -> None:
    """UsageError, with the arithmetic, unless the lab has as many ranks as the grid."""
    world = launch.grid.world
    if world != shape.world:
        raise UsageError(
            f"the launch config's grid has {world} ranks, but the lab has "
            f"{shape.nodes} nodes × {shape.ranks_per_node} = {shape.world}"
        )
    if launch.backend != "gloo":
        raise UsageError(
            f"the launch config's backend is {launch.backend}; a lab's ranks have CPUs only: backend: gloo"
        )


def train(
    ranks: Ranks,
    path: Path,
    *,
    steps: int | None = None,
    resume: bool = False,
    directory: Path | None = None,
    realtime: bool = False,
) -> list[Outcome]:
    """Run a launch config once, as `axonn-tune run` would with these options; how each rank ended, by rank.

    realtime: before all ordinary processes of the host (SCHED_RR), where that is allowed.
    While it runs, SIGTERM and SIGUSR2 have the ranks save and stop, and Ctrl-C is left to them.
    """

    def pass_on(number: int, frame: FrameType | None) -> None:
        ranks.signal(signal.SIGUSR2)

    before = {one: signal.signal(one, pass_on) for one in _SAVING}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: None)
    options = {"steps": steps, "resume": resume, "directory": directory}
    try:
        return ranks.run(TRAIN, [(str(path), options)] * ranks.shape.world, realtime=realtime)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def exit_codes(outcomes: list[Outcome]) -> list[tuple[int, int]]:
    """(rank, code) in the order in which they ended."""
    return [(one.rank, one.code) for one in sorted(outcomes, key=lambda one: one.place)]
