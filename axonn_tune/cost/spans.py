"""The predicted step as a timeline of every operation, wait and collective: for Perfetto, and for figures of a page.

Tracks, parts and collectives have the names of a measured trace. The operations within a part exist only in
predictions. A figure has one block, or the whole step coarsely, or the passes of every pipeline stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby

import numpy as np

from axonn_tune.cost.pipeline import pipeline_passes
from axonn_tune.cost.price import Detail
from axonn_tune.cost.recorder import Batch, Interval
from axonn_tune.cost.work import CONTENDED
from axonn_tune.program.operations import Attention, Collective, Computation, HostWork, Kernel, MatMul, Measured
from axonn_tune.specs.traces import Span, communication_lane, shifted, term_name, wait_name
from axonn_tune.vocabulary import COMPUTE_LANE, END

STEP = "step"
LIKE_BEFORE = "micro-batch, as the one before"
MERGED = "forward and backward of two micro-batches"
PASSES = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
"""Passes of pipeline stages by their kind."""
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
    Passes that run beside each other (`--expert-overlap`) are one span a micro-batch; the first and the last are alone.
    """
    spans = [Span(COMPUTE_LANE, STEP, 0.0, pricing.iteration_s)]
    start_s, number = 0.0, 0
    for batch in pricing.batches:
        spelled = batch.times if alike is None else min(batch.times, alike)
        spelled, whole = (0, MERGED) if _merged(batch) else (spelled, LIKE_BEFORE)
        single = min(batch.times, spelled + _MOST_ALIKE)
        for time in range(single):
            at_s = start_s + time * batch.every_s
            if time >= spelled:
                details = {"micro_batch": number + time + 1}
                spans.append(Span(COMPUTE_LANE, whole, at_s, at_s + batch.every_s, details))
            else:
                spans += _batch(pricing, batch, at_s, number=number + time + 1, operations=operations)
        number, end_s = number + batch.times, start_s + batch.times * batch.every_s
        if single < batch.times:
            left = {"micro_batches": batch.times - single}
            spans.append(Span(COMPUTE_LANE, whole, start_s + single * batch.every_s, end_s, left))
        start_s = end_s
    if pricing.contended_s:
        spans.append(Span(COMPUTE_LANE, CONTENDED, pricing.iteration_s - pricing.contended_s, pricing.iteration_s))
    return spans


def _merged(batch: Batch) -> bool:
    """Whether it takes less time than its passes do one after the other."""
    return batch.stretches[-1].end_s > batch.every_s * (1.0 + 1e-9)


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
    calls = 1.0 if step.role in ("weight", "ahead") else float(step.calls.evaluate(pricing.values))
    details: dict[str, object] = {
        "bytes": round(float(step.size_bytes.evaluate(pricing.values))),
        "tier": interval.lane,
    }
    if calls > 1:
        details["calls"] = round(calls)
    if step.routing is not None:
        details["dispatcher"] = step.routing.dispatcher
    return Span(communication_lane(step.axis), name, start_s, end_s, details)


def _computation_name(step: Computation) -> str:
    names = {MatMul: "GEMM", Attention: "attention", Measured: "scan", Kernel: "kernel", HostWork: "host"}
    kind = names[type(step)]
    return f"{kind}, {step.phase}, {step.layer}"


def _computation_details(pricing: Detail, step: Computation) -> dict[str, object]:
    """Sizes of one call, with the values of this configuration."""
    values = pricing.values
    if isinstance(step, MatMul):
        m, n, k = (round(float(size.evaluate(values))) for size in (step.m, step.n, step.k))
        return {"m": m, "n": n, "k": k, "layout": step.layout}
    if isinstance(step, Attention | Measured):
        return {"flops": float(step.flops.evaluate(values))}
    sizes = (*step.to_host, *step.from_host) if isinstance(step, HostWork) else (step.size_bytes,)
    return {"bytes": sum(float(size.evaluate(values)) for size in sizes)}


# What figures show.

SEVERAL = "several in sequence"


def block_spans(pricing: Detail, phase: str) -> list[Span]:
    """A block in the middle of a typical micro-batch, forward or backward, from time 0, with what earlier ones sent."""
    batch = max(pricing.batches, key=lambda one: one.times)
    spans = list(_batch(pricing, batch, 0.0, number=1, operations=True))
    blocks = [one for one in spans if one.name.startswith("block ") and one.name.endswith(phase)]
    block = blocks[len(blocks) // 2]
    inside = [one for one in spans if one.start_s < block.end_s and one.end_s > block.start_s and not _is_part(one)]
    cut = [replace(one, start_s=max(one.start_s, block.start_s), end_s=min(one.end_s, block.end_s)) for one in inside]
    return [shifted(one, -block.start_s) for one in cut]


def _is_part(span: Span) -> bool:
    return span.lane == COMPUTE_LANE and "micro_batch" in span.details


def step_spans(pricing: Detail, *, finest_s: float) -> list[Span]:
    """The whole step without compute slowdown from overlap, whose position is not predicted; see `joined`.

    Computation is in its phases; of pipeline stages it has their passes, and no collectives.
    """
    if pricing.times is not None:
        return joined(pass_spans(pricing), finest_s=finest_s, name=lambda one: one.name)
    found: list[Span] = []
    start_s = 0.0
    for batch in pricing.batches:
        if _merged(batch):
            end_s = start_s + batch.times * batch.every_s
            found.append(Span(COMPUTE_LANE, MERGED, start_s, end_s))
            start_s = end_s
            continue
        spans = _batch(pricing, batch, 0.0, number=1, operations=False)
        whole = (one for one in spans if one.lane != COMPUTE_LANE or _is_part(one))
        once = joined(whole, finest_s=finest_s, name=_phase)
        if batch.every_s < finest_s:
            # All of a lane is joined, however many there are.
            later_s = (batch.times - 1) * batch.every_s
            once = [
                replace(one, end_s=one.end_s + later_s, details={"busy_s": batch.times * busy_s(one)}) for one in once
            ]
            found += [shifted(one, start_s) for one in once]
        else:
            found += [shifted(one, start_s + time * batch.every_s) for time in range(batch.times) for one in once]
        start_s += batch.times * batch.every_s
    return joined(found, finest_s=finest_s, name=lambda one: one.name)


def _phase(span: Span) -> str:
    """A part of the step, or a collective, without its layer."""
    return span.name.rpartition(", ")[2] if span.lane == COMPUTE_LANE else span.name.partition(",")[0]


def pass_spans(pricing: Detail) -> list[Span]:
    """Forward and backward passes of every pipeline stage, a track each, then the end of its step."""
    assert pricing.times is not None, "of a pipeline"
    passes = pipeline_passes(pricing.times, micro_batches=pricing.accumulation)
    found = [
        Span(
            f"stage {one.stage}",
            PASSES[one.kind],
            one.start_s,
            one.end_s,
            {"micro_batch": one.micro_batch, "chunk": one.chunk},
        )
        for one in passes
    ]
    last_s = {one.lane: one.end_s for one in found}
    ends_s = zip(last_s.items(), np.broadcast_to(pricing.times.end_s, len(last_s)).tolist(), strict=True)
    return [*found, *(Span(lane, END, at_s, at_s + end_s) for (lane, at_s), end_s in ends_s if end_s)]


def first_passes(pricing: Detail) -> tuple[int, list[Span]]:
    """Passes of a pipeline until its first micro-batches are done, two for each stage; and how many those are."""
    count, spans = min(2 * pricing.pipeline, pricing.accumulation), pass_spans(pricing)
    own = [one for one in spans if int(str(one.details.get("micro_batch", count))) < count]
    until_s = max(one.end_s for one in own)
    return count, [one for one in spans if one.start_s < until_s and one.name != END]


def joined(spans: Iterable[Span], *, finest_s: float, name: Callable[[Span], str]) -> list[Span]:
    """Spans of a track that are too short to see, or of one name, as one where they are less than `finest_s` apart.

    name: by which they are alike. Each has as `busy_s` for how much of it the track is in use.
    """
    found: list[Span] = []
    for lane, several in groupby(sorted(spans, key=lambda one: (one.lane, one.start_s)), lambda one: one.lane):
        before: Span | None = None
        for one in several:
            length_s, what, busy = one.end_s - one.start_s, name(one), busy_s(one)
            near = before is not None and one.start_s - before.end_s < finest_s
            short = before is not None and max(length_s, before.end_s - before.start_s) < finest_s
            if before is not None and near and (short or before.name == what):
                what = before.name if before.name == what else SEVERAL
                end_s, busy = max(before.end_s, one.end_s), busy + busy_s(before)
                found[-1] = before = Span(lane, what, before.start_s, end_s, {"busy_s": busy})
            else:
                before = Span(lane, what, one.start_s, one.end_s, {"busy_s": busy})
                found.append(before)
    return found


def busy_s(span: Span) -> float:
    """How much of a span its track is in use, s."""
    found = span.details.get("busy_s")
    return found if isinstance(found, float) else span.end_s - span.start_s
