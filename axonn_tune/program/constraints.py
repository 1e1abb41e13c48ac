"""Constraints on layouts before pricing: each has a name and states its numbers in the error."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from axonn_tune.frameworks.description import Framework
from axonn_tune.grid import BATCH_AXES, Grid
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload

Integers = NDArray[np.int64]

MEMORY = "memory"
MICRO_BATCH = "micro-batch"
PINNED = "pinned"
"""Reason of a grid that is not ranked: a pinned axis has another size."""


@dataclass(frozen=True)
class Constraint:
    """`value` must be divisible by the product of some axes.

    at_least: it must only be as large; or_divides: the product may also be divisible by it; twice: by twice the
    product where that is more than 1; both: these axes may not all be wider than 1, for the reason `what`.
    """

    name: str
    what: str
    value: int
    axes: tuple[str, ...]
    at_least: bool = False
    or_divides: bool = False
    twice: bool = False
    both: bool = False

    def broken(self, sizes: dict[str, Integers]) -> NDArray[np.bool_]:
        """Layouts that violate it, given columns of axis sizes."""
        product = np.ones_like(next(iter(sizes.values())))
        for axis in self.axes:
            product = product * sizes[axis]
        if self.both:
            together = np.ones(len(product), dtype=np.bool_)
            for axis in self.axes:
                together &= sizes[axis] > 1
            return together
        if self.at_least:
            return np.asarray(product > self.value)
        if self.twice:
            product = np.where(product > 1, 2 * product, product)
        wrong: NDArray[np.bool_] = self.value % product != 0
        return wrong & (product % self.value != 0) if self.or_divides else wrong

    def explain(self, sizes: dict[str, int], framework: Framework) -> str:
        """Violation of one layout, in the framework's names: `heads (96) is not divisible by TP = 5`."""
        if self.both:
            return self.what
        product = (2 if self.twice else 1) * prod(sizes[axis] for axis in self.axes)
        relation = "is less than" if self.at_least else "is not divisible by"
        return f"{self.what} ({self.value}) {relation} {self._product(framework)} = {product}"

    def brief(self, framework: Framework) -> str:
        """The constraint broken, without numbers: `heads not divisible by TP`, `zero3 with dp`."""
        if self.both:
            names = [framework.called(axis) for axis in self.axes]
            return " with ".join(names) if len(names) > 1 else f"{names[0]} above 1"
        relation = "fewer than" if self.at_least else "not divisible by"
        return f"{self.what.replace('_', ' ')} {relation} {self._product(framework)}"

    def _product(self, framework: Framework) -> str:
        names = [framework.called(axis) for axis in self.axes if axis in framework.axes]
        return "·".join(["2"] * self.twice + names)


def constraints(model: Model, workload: Workload, framework: Framework) -> tuple[Constraint, ...]:
    """Every divisibility constraint of a framework's layouts, and every combination of axes that it refuses.

    Where shards are whole rows, a weight `W[K_y, N_x]` is stored as rows of K split over y and then
    over z; transposed layers split K over x and z. Elsewhere they are padded.
    """
    whole, length = framework.step.whole_rows, workload.sequence_length
    over_z = ("z",) if whole else ()
    found = [
        Constraint("heads-by-x", "heads", model.heads, ("x",)),
        Constraint("kv-heads-by-x", "kv_heads", model.kv_heads, ("x",), or_divides=framework.step.repeated_kv_heads),
        Constraint("hidden-by-yz" if whole else "hidden-by-y", "hidden", model.hidden, ("y", *over_z)),
        Constraint(
            "attention-by-xz" if whole else "attention-by-x", "heads * head_dim", model.query_width, ("x", *over_z)
        ),
        Constraint("ffn-by-xz" if whole else "ffn-by-x", "ffn", model.ffn, ("x", *over_z)),
        Constraint("vocab-by-xyz", "vocab", model.vocab, ("x", "y", "z"), at_least=True),
        Constraint("batch-by-data-z", "global_batch", workload.global_batch, BATCH_AXES),
    ]
    if framework.step.sequence_parallel:
        found.append(Constraint("sequence-by-x", "sequence_length", length, ("x", "context")))
    if "context" in framework.axes:
        # Each rank computes a block from either end of the sequence, which balances causal attention.
        found.append(Constraint("sequence-by-context", "sequence_length", length, ("context",), twice=True))
    if "pipeline" in framework.axes:
        uneven = framework.schedule.uneven
        layers = framework.step.most_parts(model.layers) if uneven else model.layers
        found.append(Constraint("layers-by-pipeline", "layers", layers, ("pipeline",), at_least=uneven))
    for refused in framework.refused:
        found.append(Constraint(f"{framework.name}-{'-'.join(refused.axes)}", refused.why, 1, refused.axes, both=True))
    return tuple(found)


def broken_constraints(
    grid: Grid, model: Model, workload: Workload, framework: Framework, *, micro_batch: int, chunks: int = 1
) -> list[str]:
    """Reasons for which a framework would refuse one configuration, with their numbers."""
    sizes = dict(grid.by_axis)
    columns = {axis: np.array([size]) for axis, size in sizes.items()}
    checks = constraints(model, workload, framework)
    found = [check.explain(sizes, framework) for check in checks if check.broken(columns)[0]]
    missing = [axis for axis, size in sizes.items() if size > 1 and axis not in framework.axes]
    found += [f"{framework.name} has no axis {axis}" for axis in missing]
    product = grid.batch_shares * micro_batch
    if workload.global_batch % product:
        shares = "·".join(framework.called(axis) for axis in BATCH_AXES if axis in framework.axes)
        found.append(f"global_batch ({workload.global_batch}) is not divisible by {shares}·micro-batch = {product}")
    if chunks > 1:
        found += _interleaving(grid.pipeline, chunks, workload.global_batch // product, model, framework)
    return found


def _interleaving(stages: int, chunks: int, micro_batches: int, model: Model, framework: Framework) -> list[str]:
    """Constraints of interleaving: several stages, micro-batches in groups, at least one block per chunk."""
    found = ["interleaving needs more than one stage"] if stages == 1 else []
    pipeline, both = framework.called("pipeline"), f"{framework.called('pipeline')}·{framework.called('chunks')}"
    if micro_batches % stages:
        found.append(
            f"micro-batches of an interleaved pipeline ({micro_batches}) are not divisible by {pipeline} = {stages}"
        )
    if framework.step.most_parts(model.layers) < stages * chunks:
        found.append(f"layers ({model.layers}) is less than {both} = {stages * chunks}")
    elif framework.schedule.equal_chunks and (model.layers + sum(framework.step.less)) % (stages * chunks):
        uneven = f"layers ({model.layers}) is not divisible by {both} = {stages * chunks}"
        found.append(f"{uneven}: {framework.schedule.equal_chunks}")
    return found
