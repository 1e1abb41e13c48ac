"""What published steps validate: the largest of each size among the rows that are scored, and their accelerators.

`python -m tools.fit.scale` prints them; tests/published holds them against the rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from axonn_tune.cost.prediction import Configuration
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.workload import Workload

LARGEST: Mapping[str, int] = {"gpus": 8192, "pipeline": 64, "chunks": 12, "context": 2, "sequence": 65536}
"""The largest of each among them."""

ACCELERATORS = ("A100", "GB200", "H100", "V100")
"""Words in the names of their accelerators."""

ACCELERATOR = "accelerator"


def outside(machine: Machine, workload: Workload, one: Configuration) -> tuple[str, ...]:
    """What of a step is beyond them: names of `LARGEST`, and `ACCELERATOR` unless the machine itself was measured."""
    grid = one.grid
    sizes = {
        "gpus": grid.world,
        "pipeline": grid.pipeline,
        "chunks": one.chunks,
        "context": grid.context,
        "sequence": workload.sequence_length,
    }
    beyond = tuple(name for name, size in sizes.items() if size > LARGEST[name])
    if machine.learned or machine.measured or any(name in machine.accelerator.name for name in ACCELERATORS):
        return beyond
    return (*beyond, ACCELERATOR)
