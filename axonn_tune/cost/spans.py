"""The predicted step as a timeline of every operation, wait and collective.

Tracks, parts and collectives have the names of a measured trace. The operations within a part exist only in
predictions.
"""

from __future__ import annotations

from collections.abc import Iterator

from axonn_tune.cost.price import CONTENDED, Detail
from axonn_tune.cost.replay import Batch, Interval
from axonn_tune.program.operations import Attention, Collective, Computation, Kernel, MatMul
from axonn_tune.specs.traces import COMPUTE_LANE, Span, communication_lane, term_name, wait_name

STEP = "step"
LIKE_BEFORE = "micro-batch, as the one before"
HOST = "wait for the host that issues the kernels"


_MOST_ALIKE = 10_000


def spans_of_one(pricing: Detail) -> int:
    """Largest number of spans in one micro-batch."""
    return max(
        sum(len(stretch.names) * (1 + len(stretch.intervals)) for stretch in batch.stretches)
        for batch in pricing.batches
    )


def predicted_spans(pricing: Detail, *, operations: bool = True, alike: int | None = None) -> list[Span]:
    """One step of one rank, in seconds from its start; without `operations` computation shows as parts and waits.

    The step ends at `pricing.iteration_s`. Spans of a collective add up to its term's seconds, and waits for it to its
    exposed time; one span holds all calls in a row. `alike` is the number of equal micro-batches with all their
    operations; each other one is a single span, and of thousands the last share one. Waits for the host are at the end
    of their micro-batch, the compute slowdown from overlap at the end of the step: their positions are not predicted.
    """
    spans = [Span(COMPUTE_LANE, STEP, 0.0, pricing.iteration_s)]
    start_s, number = 0.0, 0
    for batch in pricing.batches:
        spelled = batch.times if alike is None else min(batch.times, alike)
        single = min(batch.times, spelled + _MOST_ALIKE)
        for time in range(single):
            at_s = start_s + time * batch.every_s
            if time >= spelled:
                details = {"micro_batch": number + time + 1}
                spans.append(Span(COMPUTE_LANE, LIKE_BEFORE, at_s, at_s + batch.every_s, details))
            else:
                spans += _batch(pricing, batch, at_s, number=number + time + 1, operations=operations)
        number, end_s = number + batch.times, start_s + batch.times * batch.every_s
        if single < batch.times:
            left = {"micro_batches": batch.times - single}
            spans.append(Span(COMPUTE_LANE, LIKE_BEFORE, start_s + single * batch.every_s, end_s, left))
        start_s = end_s
    if pricing.contended_s:
        spans.append(Span(COMPUTE_LANE, CONTENDED, pricing.iteration_s - pricing.contended_s, pricing.iteration_s))
    return spans


def _batch(pricing: Detail, batch: Batch, start_s: float, *, number: int, operations: bool) -> Iterator[Span]:
    """One micro-batch, counted from 1."""
    for stretch in batch.stretches:
        for time, name in enumerate(stretch.names):
            shift_s = stretch.shifts_s(time)
            if stretch.end_s > stretch.start_s:
                by_s, details = start_s + shift_s(COMPUTE_LANE), {"micro_batch": number}
                yield Span(COMPUTE_LANE, name, by_s + stretch.start_s, by_s + stretch.end_s, details)
            for interval in stretch.intervals:
                if interval.end_s > interval.start_s and (operations or isinstance(interval.operation, Collective)):
                    yield _span(pricing, interval, start_s + shift_s(interval.lane))
    if batch.every_s > batch.stretches[-1].end_s:
        at_s = start_s + batch.stretches[-1].end_s
        yield Span(COMPUTE_LANE, HOST, at_s, start_s + batch.every_s, {"micro_batch": number})


def _span(pricing: Detail, interval: Interval, by_s: float) -> Span:
    start_s, end_s, step = by_s + interval.start_s, by_s + interval.end_s, interval.operation
    if not isinstance(step, Collective):
        return Span(COMPUTE_LANE, _computation_name(step), start_s, end_s, _computation_details(pricing, step))
    name = term_name(step.kind, step.axis, step.phase, step.layer)
    if interval.pause:
        return Span(COMPUTE_LANE, wait_name(name), start_s, end_s)
    calls = 1.0 if step.role == "weight" else float(step.calls.evaluate(pricing.values))
    details: dict[str, object] = {
        "bytes": round(float(step.size_bytes.evaluate(pricing.values))),
        "tier": interval.lane,
    }
    if calls > 1:
        details["calls"] = round(calls)
    return Span(communication_lane(step.axis), name, start_s, end_s, details)


def _computation_name(step: Computation) -> str:
    kind = {MatMul: "GEMM", Attention: "attention", Kernel: "kernel"}[type(step)]
    return f"{kind}, {step.phase}, {step.layer}"


def _computation_details(pricing: Detail, step: Computation) -> dict[str, object]:
    """Sizes of one call, with the values of this configuration."""
    values = pricing.values
    if isinstance(step, MatMul):
        m, n, k = (round(float(size.evaluate(values))) for size in (step.m, step.n, step.k))
        return {"m": m, "n": n, "k": k, "layout": step.layout}
    if isinstance(step, Attention):
        return {"flops": float(step.flops.evaluate(values))}
    return {"bytes": float(step.size_bytes.evaluate(values))}
