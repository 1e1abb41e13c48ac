"""Time breakdown of a step, differences between steps, and overlaps of each collective, for explanations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from axonn_tune.cost.compute import ComputeClock
from axonn_tune.cost.price import Detail, Term
from axonn_tune.program.operations import Attention, Computation, Kernel, MatMul, Role
from axonn_tune.program.size import PLAIN
from axonn_tune.program.step import ONLY
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


def work_by_kind(priced: Detail) -> tuple[Work, ...]:
    """All computation of a step, by kind and phase, in program order; last the compute slowdown from overlap.

    For a pipeline, that of the stage with the most computation.
    """
    stage, values = priced.computing or (ONLY, priced.values)
    clock = ComputeClock(priced.rates, float(priced.job.workload.element_sizes.compute), values, PLAIN)
    sums: dict[tuple[str, str], tuple[float, float]] = {}
    for step, count in priced.program.calls(stage):
        if not isinstance(step, MatMul | Attention | Kernel):
            continue
        key = (kind_of(step), step.phase)
        seconds, flops = sums.get(key, (0.0, 0.0))
        calls = float(count.evaluate(values))
        own = 0.0 if isinstance(step, Kernel) else float(step.flops.evaluate(values))
        sums[key] = (seconds + calls * float(clock.call_s(step)), flops + calls * own)
    found = [Work(kind, phase, *sums[kind, phase]) for kind, phase in sums if sums[kind, phase][0]]
    return (*found, *([Work(CONTENDED, "", priced.contended_s, 0.0)] if priced.contended_s else []))


def kind_of(step: Computation) -> str:
    """Its kind of computation."""
    if isinstance(step, MatMul):
        return GEMMS
    if isinstance(step, Attention):
        return ATTENTION
    return OPTIMIZER if step.phase == "step" else ELEMENT_WISE


Parts: TypeAlias = Mapping[Hashable, tuple[str, float]]
"""Part of a step: its key, common to all frameworks, its name, and s."""


def waiting(axes: str, priced: Detail) -> str:
    """Name of exposed communication over axes."""
    return f"exposed {priced.job.framework.called(axes)} communication"


def step_parts(priced: Detail) -> Parts:
    """Parts of a step; exposed communication by axes without context, which has shards or replicas like z or data."""
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for term in priced.terms:
        alike = term.axis.replace("context", "") or term.axis
        sums[f"over {alike}", waiting(term.axis, priced)] += term.exposed_s
    for work in work_by_kind(priced):
        kind = "recompute" if work.phase == "recompute" else work.kind
        sums[kind, kind] += work.seconds
    sums["bubble", "pipeline bubble"] = priced.bubble_s
    return {key: (words, spent_s) for (key, words), spent_s in sums.items()}


def separated(
    base: Parts, other: Parts, *, longer_s: float, worth_s: float, unseen_s: float
) -> list[tuple[str, float]]:
    """Parts of the difference `longer_s` between another step and a first (negative: savings), s.

    Savings first, then costs, each the largest first; then the sum of all below `worth_s`, unless it is below
    `unseen_s`.
    """
    none, named = ("", 0.0), list[tuple[str, float]]()
    for key, (words, _) in {**base, **other}.items():
        more_s = other.get(key, none)[1] - base.get(key, none)[1]
        if abs(more_s) >= max(worth_s, unseen_s) and more_s:
            named.append((words, more_s))
    named.sort(key=lambda part: (part[1] > 0.0, -abs(part[1])))
    rest_s = longer_s - sum(more_s for _, more_s in named)
    return [*named, *([("the rest", rest_s)] if abs(rest_s) >= unseen_s and rest_s else [])]


def hidden_s(term: Term) -> float:
    """Overlapped time of a term, s; a queued collective can be exposed for longer than its own time."""
    return max(term.seconds - term.exposed_s, 0.0)


def hidden_behind(term: Term, workload: Workload) -> str:
    """What a collective overlaps with under the active overlaps; empty if it is not overlappable."""
    overlap, behind = _BEHIND.get(term.collective.role, (None, ""))
    if overlap not in workload.overlaps or (overlap == "output" and not workload.split_micro_batch):
        return ""
    return behind
