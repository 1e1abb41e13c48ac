"""Is 4D worth it? The best 4D grid beside the best of Megatron-LM, FSDP, HSDP and plain data parallelism.

FSDP (ZeRO-3), HSDP and data parallelism are grids of the same algebra: `(1, 1, G, 1)`,
`(1, 1, z, data)` and `(1, 1, 1, G)`. They gather and reduce weight by weight, one ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from axonn_tune.baselines.layout import CURRENT, WAITING, list_layouts
from axonn_tune.baselines.megatron import MegatronPrice, MegatronPricer, best_of
from axonn_tune.baselines.network import Traffic
from axonn_tune.baselines.paper import Claim, claims, paper_step_flops
from axonn_tune.cost.prediction import Pricing, price_configuration
from axonn_tune.cost.utilisation import Performance, performance
from axonn_tune.errors import NothingFeasibleError
from axonn_tune.grid import AXES
from axonn_tune.program.dimensions import model_flops
from axonn_tune.program.memory import memory_limit_bytes
from axonn_tune.ranking.space import Problem, Ranking, search
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.workload import OVERLAPS, Overlap
from axonn_tune.units import show_bytes

Key: TypeAlias = Literal["4d", "megatron-lm", "fsdp", "hsdp", "data-parallel"]
NAMES: dict[Key, str] = {
    "4d": "4D",
    "megatron-lm": "Megatron-LM",
    "fsdp": "FSDP (ZeRO-3)",
    "hsdp": "HSDP",
    "data-parallel": "data parallel",
}
Wanted: TypeAlias = Callable[[int, int], bool]
"""Whether a grid with these `(z, data)` is of the kind looked for."""

ENDLESS_MEMORY_GIB = 1e6
WORTH_NAMING = 0.01
"""Shares of a step below this are not named as a limit."""


@dataclass(frozen=True)
class Prediction:
    """What is predicted of one contender's best layout, per step and rank."""

    layout: str
    micro_batch: int
    accumulation: int
    recompute: str
    compute_s: float
    contended_s: float
    traffic: tuple[Traffic, ...]
    exposed_communication_s: float
    bubble_s: float
    iteration_s: float
    memory_bytes: float
    performance: Performance
    paper_share: float | None
    paper_flops_per_s: float | None
    recomputed_share: float

    @property
    def communication_s(self) -> float:
        """All communication, hidden or not."""
        return sum(part.seconds for part in self.traffic)

    def limits(self) -> tuple[tuple[str, float], ...]:
        """What the step is spent on beside the computation it needs, as shares of it, largest first."""
        shares = [(f"exposed {part.kind} traffic", part.exposed_s / self.iteration_s) for part in self.traffic]
        shares.append(("pipeline bubble", self.bubble_s / self.iteration_s))
        shares.append(("computation slowed by traffic", self.contended_s / self.iteration_s))
        alone_s = self.compute_s - self.contended_s
        shares.append(("recomputation", self.recomputed_share * alone_s / self.iteration_s))
        worth = [(what, share) for what, share in shares if share >= WORTH_NAMING]
        return tuple(sorted(worth, key=lambda limit: -limit[1]))


@dataclass(frozen=True)
class Contender:
    """One way to train: its best layout that fits, or why none does; and its best if memory were endless."""

    key: Key
    prediction: Prediction | None
    infeasible: str = ""
    endless_memory: Prediction | None = None

    @property
    def name(self) -> str:
        """Its name for a person."""
        return NAMES[self.key]


@dataclass(frozen=True)
class OverlapGain:
    """The best 4D configuration with all overlaps off, and with those of the workload on (all, if it has none)."""

    off_s: float
    on_s: float

    @property
    def gain(self) -> float:
        """Share by which overlap speeds the step up."""
        return self.off_s / self.on_s - 1.0


@dataclass(frozen=True)
class Comparison:
    """All contenders, the gain of overlap in the best 4D configuration, and what the paper claims of this case."""

    problem: Problem
    limit_bytes: float
    contenders: tuple[Contender, ...]
    overlap: OverlapGain | None
    claims: tuple[Claim, ...]

    def gain(self, contender: Contender) -> float | None:
        """By which share 4D trains faster than another contender; None if either does not fit."""
        mine, other = self.contenders[0].prediction, contender.prediction
        return None if mine is None or other is None else other.iteration_s / mine.iteration_s - 1.0


def compare(problem: Problem) -> Comparison:
    """Find the best layout of each kind by iteration time; NothingFeasibleError if none of any kind fits.

    Axes and their order are pinned for 4D alone; recomputation and micro-batch for all.
    """
    problem = replace(problem, rank_by="iteration")
    full = search(problem)
    sharded = search(_sharded(problem))
    without_limit = replace(problem, machine=endless_memory(problem.machine))
    full_endless, sharded_endless = search(without_limit), search(_sharded(without_limit))
    contenders = (
        _from_ranking("4d", full, full_endless, lambda z, data: True),
        _megatron(problem),
        _from_ranking("fsdp", sharded, sharded_endless, lambda z, data: data == 1 and z > 1),
        _from_ranking("hsdp", sharded, sharded_endless, lambda z, data: z > 1 and data > 1),
        _from_ranking("data-parallel", sharded, sharded_endless, lambda z, data: z == 1),
    )
    if all(contender.prediction is None for contender in contenders):
        raise NothingFeasibleError("; ".join(f"{each.name}: {each.infeasible}" for each in contenders))
    return Comparison(
        problem=problem,
        limit_bytes=memory_limit_bytes(problem.machine.accelerator),
        contenders=contenders,
        overlap=_overlap_gain(full) if len(full) else None,
        claims=claims(problem.model, machine_name=problem.machine.name, gpus=problem.gpus),
    )


def _sharded(problem: Problem) -> Problem:
    """The problem of FSDP, HSDP and data parallelism, whose inner axis is always the sharding one."""
    return replace(problem, limits=replace(problem.limits, axes={"x": 1, "y": 1}, order=None, kept_layers=None))


def endless_memory(machine: Machine) -> Machine:
    """The machine with memory that never runs out."""
    accelerator = machine.accelerator.model_copy(update={"memory_gib": ENDLESS_MEMORY_GIB})
    return machine.model_copy(update={"accelerator": accelerator})


def _from_ranking(key: Key, ranking: Ranking, endless: Ranking, wanted: Wanted) -> Contender:
    """Best grid of a ranking with the wanted `(z, data)`."""
    best = _first(ranking, wanted)
    if best is None:
        return Contender(key, None, infeasible=_why_not(ranking, wanted), endless_memory=_first(endless, wanted))
    return Contender(key, best, endless_memory=_first(endless, wanted))


def _first(ranking: Ranking, wanted: Wanted) -> Prediction | None:
    for position in range(len(ranking)):
        grid = ranking.candidate(position).configuration.grid
        if wanted(grid.z, grid.data):
            return _of_grid(ranking.problem, ranking.price(position))
    return None


def _why_not(ranking: Ranking, wanted: Wanted) -> str:
    """What the leanest grid of this kind needs; or, if all break a constraint, one that breaks the fewest."""
    sizes = ranking.grids.sizes[ranking.shapes.grid]
    mine = np.array([wanted(int(z), int(data)) for z, data in sizes[:, 2:]], dtype=np.bool_)
    if mine.any():
        least = min(float(fitting.total_bytes[mine].min()) for fitting in ranking.fittings.values())
        limit_bytes = next(iter(ranking.fittings.values())).limit_bytes
        return f"needs {show_bytes(least)} of {show_bytes(limit_bytes)}"
    pinned = ranking.problem.limits.axes.items()
    refused = [
        [why for _, why in grid.reasons]
        for grid in ranking.rejected()
        if wanted(grid.sizes["z"], grid.sizes["data"]) and all(grid.sizes[axis] == size for axis, size in pinned)
    ]
    fewest: list[str] = min(refused, key=len, default=["no such grid"])
    return ", ".join(fewest)


def _of_grid(problem: Problem, pricing: Pricing) -> Prediction:
    """A priced 4D candidate as a prediction; its traffic by axis."""
    configuration, grid = pricing.configuration, pricing.configuration.grid
    by_axis: dict[str, tuple[float, float]] = {}
    for term in pricing.terms:
        seconds, exposed_s = by_axis.get(term.axis, (0.0, 0.0))
        by_axis[term.axis] = (seconds + term.seconds, exposed_s + term.exposed_s)
    sizes = " ".join(f"{axis}={grid.axis_size(axis)}" for axis in AXES)
    wide = [axis for axis in grid.order if grid.axis_size(axis) > 1]
    return _prediction(
        problem,
        layout=f"{sizes}, order {','.join(wide)}" if len(wide) > 1 else sizes,
        split=(configuration.micro_batch, pricing.accumulation, configuration.recompute),
        computing_s=(pricing.compute_s, pricing.contended_s),
        traffic=tuple(Traffic(axis, *found) for axis, found in by_axis.items()),
        waiting_s=(pricing.exposed_communication_s, 0.0),
        memory_bytes=float(pricing.memory.total_bytes),
        executed_flops=pricing.executed_flops,
    )


def _of_megatron(problem: Problem, price: MegatronPrice) -> Prediction:
    layout = price.layout
    return _prediction(
        problem,
        layout=layout.words(),
        split=(layout.micro_batch, price.micro_batches, layout.recompute),
        computing_s=(price.compute_s, price.contended_s),
        traffic=tuple(part for part in price.traffic if part.seconds > 0.0),
        waiting_s=(price.exposed_communication_s, price.bubble_s),
        memory_bytes=price.memory_bytes,
        executed_flops=price.executed_flops,
    )


def _prediction(
    problem: Problem,
    *,
    layout: str,
    split: tuple[int, int, str],
    computing_s: tuple[float, float],
    traffic: tuple[Traffic, ...],
    waiting_s: tuple[float, float],
    memory_bytes: float,
    executed_flops: float,
) -> Prediction:
    """`split`: micro-batch, accumulation steps, recomputation; `waiting_s`: exposed communication, bubble.

    `computing_s`: all computation, and what of it communication beside it costs.
    """
    model, machine, workload, gpus = problem.model, problem.machine, problem.workload, problem.gpus
    compute_s, contended_s = computing_s
    iteration_s = compute_s + sum(waiting_s)
    peak = machine.accelerator.peak_flops_per_s(workload.precision) * gpus
    counted = paper_step_flops(model, workload)
    return Prediction(
        layout,
        *split,
        compute_s=compute_s,
        contended_s=contended_s,
        traffic=traffic,
        exposed_communication_s=waiting_s[0],
        bubble_s=waiting_s[1],
        iteration_s=iteration_s,
        memory_bytes=memory_bytes,
        performance=performance(
            model,
            machine,
            workload,
            gpus=gpus,
            compute_s=compute_s,
            iteration_s=iteration_s,
            executed_flops=executed_flops,
        ),
        paper_share=None if counted is None else counted / (iteration_s * peak),
        paper_flops_per_s=None if counted is None else counted / iteration_s,
        recomputed_share=max(0.0, 1.0 - model_flops(model, workload) / gpus / executed_flops),
    )


def _megatron(problem: Problem) -> Contender:
    """Megatron-LM at its best, and with endless memory."""
    model, workload, limits = problem.model, problem.workload, problem.limits
    layouts = [
        layout
        for layout in list_layouts(problem.gpus, model, workload)
        if limits.recompute in (None, layout.recompute) and limits.micro_batch in (None, layout.micro_batch)
    ]
    if not layouts:
        return Contender("megatron-lm", None, infeasible="no tensor x pipeline x data divides heads, layers and batch")
    software = CURRENT if workload.overlaps else WAITING
    pricer = MegatronPricer(model, problem.machine, workload, gpus=problem.gpus, software=software)
    fitting = best_of(layouts, pricer, limit_bytes=memory_limit_bytes(problem.machine.accelerator))
    endless = best_of(layouts, pricer, limit_bytes=memory_limit_bytes(endless_memory(problem.machine).accelerator))
    return Contender(
        "megatron-lm",
        None if fitting is None else _of_megatron(problem, fitting),
        infeasible="" if fitting is not None else "no layout fits into memory",
        endless_memory=None if endless is None else _of_megatron(problem, endless),
    )


def _overlap_gain(ranking: Ranking) -> OverlapGain:
    """Price the best configuration waiting wherever it sends, and with the workload's overlaps (or all)."""
    problem, best = ranking.problem, ranking.candidate(0).configuration

    def step_s(overlaps: tuple[Overlap, ...]) -> float:
        workload = problem.workload.model_copy(update={"overlaps": overlaps})
        return price_configuration(problem.model, problem.machine, workload, best).iteration_s

    return OverlapGain(off_s=step_s(()), on_s=step_s(problem.workload.overlaps or OVERLAPS))
