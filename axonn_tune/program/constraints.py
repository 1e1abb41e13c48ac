"""What a grid must satisfy before anything is priced: each constraint has a name and says its numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload

Integers = NDArray[np.int64]

MEMORY = "memory"
MICRO_BATCH = "micro-batch"


@dataclass(frozen=True)
class Constraint:
    """`value` must be a multiple of the product of some axes (or at least as large, with `at_least`)."""

    name: str
    what: str
    value: int
    axes: tuple[str, ...]
    at_least: bool = False

    def broken(self, sizes: dict[str, Integers]) -> NDArray[np.bool_]:
        """Which grids break it, given columns of axis sizes."""
        product = np.ones_like(sizes["x"])
        for axis in self.axes:
            product = product * sizes[axis]
        return product > self.value if self.at_least else self.value % product != 0

    def explain(self, sizes: dict[str, int]) -> str:
        """Why one grid breaks it: `heads (96) is no multiple of x = 5`."""
        product = 1
        for axis in self.axes:
            product *= sizes[axis]
        relation = "is less than" if self.at_least else "is no multiple of"
        return f"{self.what} ({self.value}) {relation} {'·'.join(self.axes)} = {product}"


def constraints(model: Model, workload: Workload) -> tuple[Constraint, ...]:
    """Every divisibility constraint of the 4D layout.

    A weight `W[K_y, N_x]` is stored as rows of K split over y and then over z, so that every shard is
    a rectangle; transposed layers split K over x and z.
    """
    return (
        Constraint("heads-by-x", "heads", model.heads, ("x",)),
        Constraint("kv-heads-by-x", "kv_heads", model.kv_heads, ("x",)),
        Constraint("hidden-by-yz", "hidden", model.hidden, ("y", "z")),
        Constraint("attention-by-xz", "heads * head_dim", model.query_width, ("x", "z")),
        Constraint("ffn-by-xz", "ffn", model.ffn, ("x", "z")),
        Constraint("vocab-by-xyz", "vocab", model.vocab, ("x", "y", "z"), at_least=True),
        Constraint("batch-by-data-z", "global_batch", workload.global_batch, ("data", "z")),
    )
