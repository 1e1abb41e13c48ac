"""Where the computing time of a step goes, and what each collective runs behind: for explanations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from axonn_tune.cost.compute import ComputeClock
from axonn_tune.cost.prediction import Pricing, Term
from axonn_tune.program.operations import Attention, Computation, Kernel, MatMul, Role
from axonn_tune.program.size import PLAIN
from axonn_tune.program.step import ONLY, Stage
from axonn_tune.specs.workload import Overlap, Workload

GEMMS, ATTENTION = "GEMMs", "attention"
ELEMENT_WISE, OPTIMIZER = "element-wise kernels", "optimizer and gradient norm"
CONTENDED = "compute slowdown from overlap"

_BEHIND: dict[Role, tuple[Overlap, str]] = {
    "weight": ("gather_prefetch", "preceding layer's GEMMs"),
    "output": ("output", "the other half"),
    "input_gather": ("input_gradient", "its input gradient"),
    "input_gradient": ("input_gradient", "its weight gradient"),
    "weight_gradient": ("weight_gradient", "the next layer"),
    "data": ("data_parallel", "rest of backward"),
    "parameters": ("data_parallel", "the next forward pass"),
    "keys": ("data_parallel", "attention"),
}


@dataclass(frozen=True)
class Work:
    """Computation of one kind and phase, of one rank in a step; element-wise work counts no FLOPs."""

    kind: str
    phase: str
    seconds: float
    flops: float


def work_by_kind(pricing: Pricing, workload: Workload) -> tuple[Work, ...]:
    """All computation of a step, by kind and phase, in program order; last what communication beside it costs it.

    Of pipeline stages it is that of the one that computes longest.
    """
    stage, values = pricing.computing or (ONLY, pricing.values)
    clock = ComputeClock(pricing.rates, float(workload.element_sizes.compute), values, PLAIN)
    sums: dict[tuple[str, str], tuple[float, float]] = {}
    for step, count in _computations(pricing, stage, values):
        key = (kind_of(step), step.phase)
        seconds, flops = sums.get(key, (0.0, 0.0))
        calls = float(count)
        own = 0.0 if isinstance(step, Kernel) else float(step.flops.evaluate(values))
        sums[key] = (seconds + calls * float(clock.call_s(step)), flops + calls * own)
    found = [Work(kind, phase, *sums[kind, phase]) for kind, phase in sums if sums[kind, phase][0]]
    return (*found, *([Work(CONTENDED, "", pricing.contended_s, 0.0)] if pricing.contended_s else []))


def _computations(pricing: Pricing, stage: Stage, values: Mapping[str, float]) -> Iterator[tuple[Computation, float]]:
    for step, count in pricing.program.calls(stage):
        if isinstance(step, MatMul | Attention | Kernel):
            yield step, float(count.evaluate(values))


def kind_of(step: Computation) -> str:
    """What sort of computation it is."""
    if isinstance(step, MatMul):
        return GEMMS
    if isinstance(step, Attention):
        return ATTENTION
    return OPTIMIZER if step.phase == "step" else ELEMENT_WISE


def hidden_s(term: Term) -> float:
    """Time of a term that computation hides, s; queueing behind other collectives can expose more than its own."""
    return max(term.seconds - term.exposed_s, 0.0)


def hidden_behind(term: Term, workload: Workload) -> str:
    """What a collective can run behind with the overlaps that are on; empty for nothing."""
    overlap, behind = _BEHIND.get(term.collective.role, (None, ""))
    if overlap not in workload.overlaps or (overlap == "output" and not workload.split_micro_batch):
        return ""
    return behind
