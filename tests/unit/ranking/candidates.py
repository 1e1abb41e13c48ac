"""Candidates of searches at random, with their exact prices: what bounds are held against.

They are of all kinds of model, frameworks, number formats and recompute sets; of one stage, several, and interleaved
ones; with layers that are not resharded, recompute in some blocks, expert overlap, multi-token prediction, and splits
of the layers by time. Each fits into memory, of which there is so little that half of what is drawn needs recompute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any

import numpy as np

from axonn_tune.cost.price import Detail, price
from axonn_tune.errors import UsageError
from axonn_tune.frameworks import find_framework
from axonn_tune.job import Layout
from axonn_tune.program.memory import memory_limit_bytes
from axonn_tune.ranking.fit import Fitting
from axonn_tune.ranking.inputs import check_expert_overlap, unpriced_experts
from axonn_tune.ranking.shapes import Shapes
from axonn_tune.ranking.space import Grids, Problem, Variant, list_grids
from axonn_tune.specs.catalog import load_machine
from axonn_tune.units import GIB
from tests.unit.ranking.exhaustive import (
    can_merge,
    fitting_of,
    jobs_of,
    layout_of,
    orders_of,
    program_of,
    shapes_of,
    sizes_of,
    splits_beside,
)
from tests.unit.ranking.models import KINDS, model_of
from tests.unit.small import small_problem

FRAMEWORKS = (
    "axonn-tune",
    "torchtitan",
    "fsdp",
    "nemo",
    "megatron-axonn",
    "deepspeed",
    "meta-4d",
    *["megatron-core"] * 3,
)
MACHINES = ("dgx-h100", "perlmutter-80gb", "dgx-b200")
_FEW = 48
"""Shapes of a space that are tried."""


@dataclass(frozen=True)
class Drawn:
    """A candidate with its exact price.

    problem: with its number format, exchange of context parallelism, dispatcher and expert overlap; kind: its recompute
    set; row: its shape among `shapes`, of which `fitting` is the memory; own_s: the step of its own split.
    """

    problem: Problem
    kind: Variant
    grids: Grids
    shapes: Shapes
    fitting: Fitting
    row: int
    layout: Layout
    detail: Detail
    own_s: float

    @property
    def iteration_s(self) -> float:
        """Its exact step, s."""
        return self.detail.iteration_s

    @property
    def moved(self) -> bool:
        """Whether it has another split than its own."""
        return self.layout.parts != self.problem.parts

    @cached_property
    def pinned(self) -> Problem:
        """A search of its shape alone: pins of grid, micro-batch, chunks, recompute and rank order."""
        layout, request = self.layout, self.problem.request
        pins: dict[str, Any] = {axis: layout.grid.axis_size(axis) for axis in self.grids.axes}
        pins |= {"micro_batch": layout.micro_batch, "chunks": layout.chunks, "order": layout.grid.order}
        pins |= {"recompute": layout.recompute, "recompute_layers": layout.recompute_layers}
        return replace(self.problem, request=replace(request, **pins), compares_expert_overlap=False)

    @property
    def features(self) -> tuple[str, ...]:
        """What is particular about it."""
        layout, model, step = self.layout, self.problem.model, self.problem.framework.step
        found = {
            "one stage": layout.pipeline == 1,
            "stages": layout.pipeline > 1 and layout.chunks == 1,
            "interleaved": layout.chunks > 1,
            "uneven": layout.pipeline > 1 and model.layers % (layout.pipeline * layout.chunks) > 0,
            "by time": layout.parts is not None,
            "repeats": layout.recompute != "none" and layout.recompute_layers is None,
            "repeats in some": layout.recompute_layers is not None,
            "kept": step.reshard == "fit" and bool(layout.kept_layers),
            "context": layout.grid.context > 1,
            "experts exchanged": layout.grid.expert > 1,
            "overlap": self.detail.expert_overlap,
            "MTP": model.mtp_layers > 0,
            "layer types": len(model.types) > 1,
            "narrow": self.problem.workload.format is not None,
        }
        return tuple(name for name, has in found.items() if has)


def random_candidates(draw: Random, count: int, *, each: int = 8, slow_updates: bool = False) -> Iterator[Drawn]:
    """So many candidates, several of each space; the same for the same seed. slow_updates: with another optimizer than
    AdamW, or with one on the host."""
    found, number = 0, 0
    while found < count:
        problem = _problem(draw, list(KINDS)[number % len(KINDS)])
        problem = _updating(draw, problem) if slow_updates else problem
        number += 1
        for one in _of_space(draw, problem, min(each, count - found)):
            found += 1
            yield one


def _updating(draw: Random, problem: Problem) -> Problem:
    """The same with an optimizer of the framework, in each of its modes, or with moments on the host."""
    framework = problem.framework
    others = [one for one in framework.optimizers if one != "adamw"]
    if others and draw.random() < 0.7:
        framework = framework.optimizing("muon" if "muon" in others else draw.choice(others))
        mode = draw.choice(("duplicated", "distributed", "blockwise", "layer_sharded"))
        return replace(problem, framework=framework.with_step(muon_tp_mode=mode))
    share, overlap = draw.choice((0.5, 1.0)), draw.random() < 0.5
    return replace(
        problem,
        framework=framework.with_step(offloaded=("moments",), offloaded_states=share, offload_overlap=overlap),
    )


def _problem(draw: Random, kind: str) -> Problem:
    """A search for a model of this kind that a framework can train."""
    model = model_of(kind)
    known = [find_framework(name) for name in FRAMEWORKS]
    framework = draw.choice([one for one in known if not unpriced_experts(one, model)])
    machine = load_machine(draw.choice(MACHINES)).document
    formats = [one for one in framework.formats if one in machine.accelerator.peak_tflops]
    precision: Any = draw.choice(formats) if formats and draw.random() < 0.5 else "bf16"
    gpus, length = draw.choice((2, 4, 8, 8, 16)), draw.choice((1024, 2048))
    batch = gpus * draw.choice((2, 4, 8))
    return small_problem(model, machine, framework, gpus=gpus, batch=batch, sequence_length=length, precision=precision)


def _tight(draw: Random, problem: Problem, shapes: Shapes) -> Problem:
    """The same with memory for some share of the shapes without recompute."""
    needed = np.sort(fitting_of(problem, shapes, Variant("none")).total_bytes)
    accelerator = problem.machine.accelerator
    room = float(needed[draw.randrange(len(needed))]) + accelerator.memory_gib * GIB - memory_limit_bytes(accelerator)
    tight = accelerator.model_copy(update={"memory_gib": 1.01 * room / GIB})
    return replace(problem, machine=problem.machine.model_copy(update={"accelerator": tight}))


def _of_space(draw: Random, problem: Problem, count: int) -> Iterator[Drawn]:
    """Candidates of a space, of one, several and interleaved stages in turn."""
    grids = list_grids(problem)
    every = shapes_of(problem, grids)
    if not len(every):
        return
    rows = _few(draw, every)
    problem = _tight(draw, problem, every.taken(rows, chunks=every.chunks[rows]))
    grids, every = list_grids(problem), shapes_of(problem, grids)
    own = _merging(draw, problem)
    if own is not problem:
        able = [row for row in rows.tolist() if can_merge(sizes_of(grids, every, row), int(every.chunks[row]))]
        own, rows = (own, np.array(able)) if able else (problem, rows)
    shapes = replace(every.taken(rows, chunks=every.chunks[rows]), problem=own)
    fittings = {kind: fitting_of(problem, shapes, kind) for kind in problem.variants}
    for number in range(count):
        one = _drawn(draw, own, grids, shapes, fittings, number)
        if one is not None:
            yield one


def _few(draw: Random, shapes: Shapes) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Some shapes: as many with one stage, with several, and with interleaved ones, where there are."""
    alike = shapes.stages == 1, (shapes.stages > 1) & (shapes.chunks == 1), shapes.chunks > 1
    found = [np.flatnonzero(one).tolist() for one in alike]
    chosen = [draw.sample(one, min(len(one), _FEW // 3)) for one in found]
    return np.sort(np.array([row for rows in chosen for row in rows], dtype=np.int64))


def _merging(draw: Random, problem: Problem) -> Problem:
    """The problem with expert overlap, often, where it can have it."""
    try:
        check_expert_overlap(problem.with_expert_overlap)
    except UsageError:
        return problem
    return problem.with_expert_overlap if draw.random() < 0.7 else problem


def _drawn(
    draw: Random, own: Problem, grids: Grids, shapes: Shapes, fittings: dict[Variant, Fitting], number: int
) -> Drawn | None:
    """One candidate, of recompute sets that repeat more often than not; None where what was drawn does not fit."""
    stages, chunks = shapes.stages, shapes.chunks
    alike = (stages == 1, (stages > 1) & (chunks == 1), chunks > 1)[number % 3]
    fitting = [(row, kind) for kind, one in fittings.items() for row in one.rows.tolist() if alike[row]]
    kinds = [kind for kind in fittings if any(kind == other for _, other in fitting)]
    if not kinds:
        return None
    kind = draw.choice(kinds)
    row = draw.choice([row for row, other in fitting if other == kind])
    job = draw.choice(jobs_of(own, grids, int(shapes.grid[row])))
    if job.framework.step.expert_overlap and not program_of(job, kind).merges:
        return None
    _, order = draw.choice(list(orders_of(own, sizes_of(grids, shapes, row))))
    layout = layout_of(own, grids, shapes, row, kind, fittings[kind], order)
    detail = price(job, layout)
    own_s, limit_bytes = detail.iteration_s, memory_limit_bytes(job.machine.accelerator)
    if job.splits and layout.pipeline > 1 and draw.random() < 0.5 and (beside := splits_beside(job, layout)):
        other = price(job, replace(layout, parts=draw.choice(beside)))
        detail = other if other.memory_bytes <= limit_bytes else detail
    return Drawn(job, kind, grids, shapes, fittings[kind], row, detail.layout, detail, own_s)
