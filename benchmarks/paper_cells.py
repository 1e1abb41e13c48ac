"""One cell of docs/paper-picks.md: what the paper's models and ours pick for a model, a machine and a GPU count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import gt, lt
from typing import Any

import numpy as np

import axonn_tune
from axonn_tune.api.search import SearchResult
from axonn_tune.cost.paper import PaperBackend, price_paper
from axonn_tune.cost.price import PricedLayout
from axonn_tune.cost.uncertainty import own_half_s
from axonn_tune.grid import AXES, factorizations
from axonn_tune.program.feasibility import MEMORY
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.ranking.priced import Sizes, count_ties
from axonn_tune.ranking.space import Problem
from axonn_tune.request import Request

RELEASED: PaperBackend = "paper-released"
COSTS: tuple[PaperBackend, ...] = (RELEASED, "paper", "paper-mended")


@dataclass(frozen=True)
class Best:
    """Configurations by our model: of the least communication (`sent`), and of the shortest step (`step`)."""

    sent: PricedLayout
    step: PricedLayout


@dataclass(frozen=True)
class Case:
    """One cell of the table: a model on a number of GPUs of a machine, with the model's own batch."""

    model: str
    machine: str
    gpus: int

    def search(self, **options: Any) -> SearchResult:  # noqa: ANN401 - options of the search
        """A search of this case."""
        return axonn_tune.search(self.model, gpus=self.gpus, machine=self.machine, **options)

    def best(self, **options: Any) -> Best | None:  # noqa: ANN401 - options of the search
        """Our first by communication and by time of a step; None if nothing fits."""
        found = self.search(**options)
        return Best(found.best, self.search(**options, rank_by="iteration").best) if len(found) else None

    def pick(self, cost: PaperBackend) -> Best | None:
        """The first grid by a paper's model, in its order, at its best by ours; None if the table covers no grid."""
        found = self.search(cost=cost)
        return self.best(**pinned(found.best)) if len(found) else None

    @cached_property
    def problem(self) -> Problem:
        """The documents of this case."""
        return load_inputs(Request(self.model, gpus=self.gpus, machine=self.machine)).problem


@dataclass(frozen=True)
class Cell:
    """What the models say of one case: ours, and the paper's by variant.

    reordered: least communication of the released model's grid in any order of its axes.
    """

    case: Case
    ours: Best
    picks: Mapping[PaperBackend, Best]
    reordered: PricedLayout | None


def sizes_of(entry: PricedLayout) -> dict[str, int]:
    """Options of a search for this grid alone, in any order."""
    return {axis: entry.grid.axis_size(axis) for axis in AXES}


def pinned(entry: PricedLayout) -> dict[str, Any]:
    """Options of a search for this grid and order alone."""
    return {"order": entry.order, **sizes_of(entry)}


def cell(case: Case) -> Cell | None:
    """Everything about one case; None if nothing fits into memory."""
    ours = case.best()
    if ours is None:
        return None
    picks = {cost: pick for cost in COSTS if (pick := case.pick(cost)) is not None}
    reordered = case.search(**sizes_of(picks[RELEASED].sent)).best if RELEASED in picks else None
    return Cell(case, ours, picks, reordered)


def sent_ratio(found: Cell, pick: Best) -> float:
    """Communication of the paper's pick over that of our first by communication."""
    return seconds(pick.sent.communication_s) / seconds(found.ours.sent.communication_s)


def step_ratio(found: Cell, pick: Best) -> float:
    """Step of the paper's pick over that of our first by step."""
    return seconds(pick.step.iteration_s) / seconds(found.ours.step.iteration_s)


def sent_tie(found: Cell, pick: Best) -> bool:
    """Whether the communication of both is within model error."""
    sent_s = np.array([seconds(best.sent.communication_s) for best in (found.ours, pick)])
    return count_ties(sent_s, sent_s * found.case.problem.machine.uncertainty.communication) == 2


def step_tie(found: Cell, pick: Best) -> bool:
    """The same of steps: errors of exposed communication and the residual of each layout count."""
    step_s, exposed_s = (
        np.array([seconds(getattr(best.step, name)) for best in (found.ours, pick)])
        for name in ("iteration_s", "exposed_communication_s")
    )
    return count_ties(step_s, np.asarray(own_half_s(found.case.problem, step_s=step_s, waiting_s=exposed_s))) == 2


def seconds(value_s: float | None) -> float:
    """A time that is known, for every feasible configuration has one."""
    assert value_s is not None
    return value_s


def wide_order(entry: PricedLayout) -> tuple[str, ...]:
    """The rank order without axes of size 1."""
    return tuple(axis for axis in entry.order if entry.grid.axis_size(axis) > 1)


def layout(entry: PricedLayout) -> str:
    """Axes wider than 1 with their sizes, the fastest-varying rank first: `y 2 · x 4 · z 1024`."""
    return " · ".join(f"{axis} {getattr(entry, axis)}" for axis in wide_order(entry)) or "1"


def kind(theirs: PricedLayout, ours: PricedLayout) -> str:
    """How the paper's pick differs from ours, in words: `more z, less data`."""
    if theirs.grid.sizes == ours.grid.sizes:
        return "same" if wide_order(theirs) == wide_order(ours) else "same grid, other order"
    degrees = [{"x·y": e.x * e.y, "z": e.z, "data": e.data} for e in (theirs, ours)]
    more, less = ([name for name in degrees[0] if wider(degrees[0][name], degrees[1][name])] for wider in (gt, lt))
    return f"more {' and '.join(more)}, less {' and '.join(less)}" if more else "same x·y, split otherwise"


def latency_s(entry: PricedLayout) -> float:
    """What all collectives of a step take without their bytes, s: launches and hops."""
    return sum(term.count * term.line.latency_s for term in entry.terms)


RELEASED_MINIMUM_TENSOR_PARALLELISM = {
    "5b": 4,
    "10b": 8,
    "20b": 16,
    "40b": 32,
    "50b": 32,
    "60b": 64,
    "80b": 64,
    "100b": 64,
    "160b": 128,
    "175b": 128,
}
"""Smallest x·y·z that the authors hard-coded for each model, in place of a memory model."""


def script_first(case: Case) -> Sizes | None:
    """The first of the authors' script in its own space: without memory and divisibility, with its typed-in minimum."""
    problem = case.problem
    # Powers of two that divide the batch.
    rows = factorizations(case.gpus) if case.gpus.bit_count() == 1 else np.empty((0, len(AXES)), dtype=np.int64)
    x, y, z, data = rows.T
    least = RELEASED_MINIMUM_TENSOR_PARALLELISM.get(case.model, 1)
    grids = rows[(problem.workload.global_batch % (data * z) == 0) & (x * y * z >= least)]
    x, y, z, data = grids.T
    prices = price_paper(
        RELEASED, model=problem.model, machine=problem.machine, workload=problem.workload, x=x, y=y, z=z, data=data
    )
    if not len(grids) or prices.rejected.all():
        return None
    x0, y0, z0, data0 = grids[int(np.argmin(prices.communication_s))].tolist()
    return x0, y0, z0, data0


def script_fate(case: Case) -> str:
    """What becomes of the script's own first in our search: `fits`, or the constraint it breaks."""
    sizes = script_first(case)
    for grid in case.search().ranked.rejected():
        if tuple(grid.sizes.values()) == sizes:
            return "memory" if grid.reasons[0][0] == MEMORY else "divisibility"
    return "none" if sizes is None else "fits"


def wire_bytes(entry: PricedLayout) -> float:
    """Bytes that one rank sends in a step by rings: (p − 1)/p of each buffer, an all-reduce twice."""
    return sum(
        term.count * term.bytes * (term.group - 1) / term.group * (2 if term.op == "all_reduce" else 1)
        for term in entry.terms
    )


def causes(theirs: PricedLayout, ours: PricedLayout) -> Iterator[float]:
    """Theirs over ours: bytes sent, bytes per second without latency, latency, micro-batches in a step."""
    sent = [wire_bytes(entry) for entry in (theirs, ours)]
    late = [latency_s(entry) for entry in (theirs, ours)]
    rates = [
        size / (seconds(entry.communication_s) - wait)
        for size, entry, wait in zip(sent, (theirs, ours), late, strict=True)
    ]
    for one, other in (sent, rates, late):
        yield one / other
    yield (theirs.accumulation or 1) / (ours.accumulation or 1)


def by_paper(entry: PricedLayout, case: Case) -> PricedLayout | None:
    """What the paper's model says of a grid and order; None if its table has no bandwidth for it."""
    found = case.search(cost=RELEASED, **pinned(entry))
    return found.best if len(found) else None
