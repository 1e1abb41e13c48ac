"""What the time of a priced step consists of, by kind of work and axes, and how the times of two differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from axonn_tune.cost.collectives import Term
from axonn_tune.cost.compute import ComputeClock, kind_of
from axonn_tune.cost.price import Detail
from axonn_tune.program.operations import Attention, Collective, Computation, HostWork, Kernel, MatMul, Measured, Role
from axonn_tune.specs.workload import Workload
from axonn_tune.vocabulary import Overlap

CONTENDED, HOST = "compute slowdown from overlap", "host-bound launch overhead"

_BEHIND: dict[Role, tuple[Overlap, str]] = {
    "weight": ("gather_prefetch", "preceding layer's GEMMs"),
    "ahead": ("gather_prefetch", "the preceding block"),
    "output": ("output", "the other half"),
    "input_gather": ("input_gradient", "its input gradient"),
    "input_gradient": ("input_gradient", "its weight gradient"),
    "weight_gradient": ("weight_gradient", "the next layer"),
    "data": ("data_parallel", "rest of backward"),
    "parameters": ("data_parallel", "the next forward pass"),
    "keys": ("data_parallel", "attention"),
    "counts": ("data_parallel", "experts"),
}


Parts: TypeAlias = Mapping[Hashable, tuple[str, float]]
"""Part of a step: its key, common to all frameworks, its name, and s."""


@dataclass(frozen=True)
class Work:
    """Computation of one kind and phase, of one rank in a step; element-wise work counts no FLOPs.

    at_peak_s: of its FLOPs at the peaks of the number formats of their operands.
    """

    kind: str
    phase: str
    seconds: float
    flops: float = 0.0
    at_peak_s: float = 0.0


def _computed(priced: Detail) -> tuple[ComputeClock, Iterator[tuple[Computation, float]]]:
    """The clock of a step's computations, and each with its calls; for a pipeline of the stage that computes most."""
    clock, stage = priced.clock
    every = ((step, count) for step, count in priced.program.calls(stage) if not isinstance(step, Collective))
    return clock, ((step, float(count.evaluate(clock.values))) for step, count in every)


def quantization(priced: Detail) -> tuple[float, float]:
    """GEMMs of a step, and the kernels that quantize their operands, s."""
    clock, steps = _computed(priced)
    sums = [0.0, 0.0]
    for step, calls in steps:
        if isinstance(step, MatMul) or (isinstance(step, Kernel) and step.quantizes):
            sums[isinstance(step, Kernel)] += calls * float(clock.call_s(step))
    return sums[0], sums[1]


@dataclass(frozen=True)
class TimedGemm:
    """A GEMM, fused attention or scan of a step: its shape, what one call takes, and the rate of a large one.

    shape: m × n × k and the groups of one launch; of attention, the keys of a query; of a scan its name in the table of
    measured kernels. peak: of its operands' format.
    """

    phase: str
    layer: str
    shape: str
    flops: float
    rate: float
    peak: float
    call_s: float


def timed_gemms(priced: Detail) -> dict[TimedGemm, float]:
    """Every GEMM, attention and scan of a step with its calls, in program order; of a pipeline as `work_by_kind`."""
    clock, steps = _computed(priced)
    found: dict[TimedGemm, float] = {}
    for step, calls in steps:
        if isinstance(step, Kernel | HostWork) or (isinstance(step, Measured) and not step.flops.coefficient):
            continue
        call_s, flops = float(clock.call_s(step)), float(step.flops.evaluate(clock.values))
        if isinstance(step, MatMul):
            sizes = [f"{float(one.evaluate(clock.values)):,.6g}" for one in (step.m, step.n, step.k)]
            groups = float(step.groups.evaluate(clock.values))
            shape, rate = " × ".join(sizes) + (f", {groups:,.6g} groups" if groups != 1.0 else ""), clock.rate_of(step)
        elif isinstance(step, Measured):
            shape, rate = step.kernel, flops / (call_s - step.launches * priced.rates.kernel_launch_s)
        else:
            shape = f"{float(step.keys.evaluate(clock.values)):,.6g} keys"
            rate = flops / (call_s - priced.rates.kernel_launch_s)
        row = TimedGemm(step.phase, step.layer, shape, flops, rate, _peak_of(step, priced), call_s)
        found[row] = found.get(row, 0.0) + calls
    return found


def work_by_kind(priced: Detail) -> tuple[Work, ...]:
    """All computation of a step, by kind and phase, in program order; last what the GPU waits for its host, and the
    compute slowdown from overlap.

    For a pipeline, that of the stage with the most computation.
    """
    clock, steps = _computed(priced)
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for step, calls in steps:
        found = sums[kind_of(step), step.phase]
        found[0] += calls * float(clock.call_s(step))
        if not isinstance(step, Kernel | HostWork):
            flops = calls * float(step.flops.evaluate(clock.values))
            found[1], found[2] = found[1] + flops, found[2] + flops / _peak_of(step, priced)
    works = [Work(*key, *found) for key, found in sums.items() if found[0]]
    lost = ((HOST, priced.host_s), (CONTENDED, priced.contended_s))
    return (*works, *(Work(kind, "", spent_s) for kind, spent_s in lost if spent_s))


def _peak_of(step: MatMul | Attention | Measured, priced: Detail) -> float:
    """Peak of what it multiplies, FLOP/s: in the format of activations where that of linear layers leaves it out."""
    job = priced.job
    if not isinstance(step, Measured) and step.narrow:
        return job.peak_flops_per_s
    return job.machine.accelerator.peak_flops_per_s(job.workload.base_precision)


def waiting(axes: str, priced: Detail) -> str:
    """Name of exposed communication over axes."""
    return f"exposed {priced.job.framework.called(axes)} communication"


def step_parts(priced: Detail) -> Parts:
    """Parts of a step; exposed communication by axes without context, which has shards or replicas like z or data."""
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for term in priced.awaited:
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
    `unseen_s`. It is no more than the difference itself: what would make it more is named, too.
    """
    none, named, rest_s = ("", 0.0), list[tuple[str, float]](), longer_s
    apart = [(words, other.get(key, none)[1] - base.get(key, none)[1]) for key, (words, _) in {**base, **other}.items()]
    for words, more_s in sorted(apart, key=lambda part: -abs(part[1])):
        if more_s and abs(more_s) >= unseen_s and (abs(more_s) >= worth_s or abs(rest_s) > abs(longer_s)):
            named.append((words, more_s))
            rest_s -= more_s
    named.sort(key=lambda part: (part[1] > 0.0, -abs(part[1])))
    return [*named, *([("the rest", rest_s)] if abs(rest_s) >= unseen_s and rest_s else [])]


def hidden_s(term: Term) -> float:
    """Overlapped time of a term, s; a queued collective can be exposed for longer than its own time."""
    return max(term.seconds - term.exposed_s, 0.0)


def hidden_behind(term: Term, workload: Workload) -> str:
    """What a collective overlaps with under the active overlaps; empty if it is not overlappable."""
    if term.op == "send" and hidden_s(term):
        return "other passes"
    if term.collective.routing is not None and hidden_s(term) > 1e-6 * term.seconds:
        return "another micro-batch, or shared experts"
    overlap, behind = _BEHIND.get(term.collective.role, (None, ""))
    if overlap == "output" and not workload.split_micro_batch:
        return "its own GEMM" if hidden_s(term) > 1e-6 * term.seconds else ""
    return behind if overlap in workload.overlaps else ""
