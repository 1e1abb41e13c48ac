"""When nothing fits: which constraint binds, and the smallest change that leaves something feasible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from axonn_tune.grid import divisors
from axonn_tune.program.constraints import MEMORY
from axonn_tune.search.ranking import Problem
from axonn_tune.search.space import Fitting, Limits, Shapes, fit_memory, list_grids, list_shapes
from axonn_tune.specs.workload import Recompute
from axonn_tune.units import GIB


def nearest_change(problem: Problem) -> str:
    """Say what binds and what to change, for a problem whose ranking is empty."""
    grids = list_grids(problem.gpus, problem.model, problem.workload)
    shapes = list_shapes(grids, problem.model, problem.workload, problem.limits)
    said = [_binding_memory(problem, shapes) if len(shapes) else _binding_divisibility(problem)]
    changes = [text for text, changed in _changes(problem) if feasible(changed)]
    said.append(f"nearest change that fits: {changes[0]}" if changes else "no single change tried makes it fit")
    return "; ".join(said)


def feasible(problem: Problem) -> bool:
    """Whether any candidate satisfies every constraint; nothing is priced."""
    grids = list_grids(problem.gpus, problem.model, problem.workload)
    shapes = list_shapes(grids, problem.model, problem.workload, problem.limits)
    return len(shapes) > 0 and any(len(fitting.rows) for _, fitting in _fittings(problem, shapes))


def _fittings(problem: Problem, shapes: Shapes) -> Iterator[tuple[Recompute, Fitting]]:
    for recompute in problem.limits.recomputes:
        yield (
            recompute,
            fit_memory(
                problem.model, problem.machine, problem.workload, shapes, recompute=recompute, limits=problem.limits
            ),
        )


def _binding_memory(problem: Problem, shapes: Shapes) -> str:
    """The candidate that comes closest to fitting, and by how much it misses."""
    least: tuple[float, str] | None = None
    limit_bytes = 0.0
    for recompute, fitting in _fittings(problem, shapes):
        row = int(np.argmin(fitting.total_bytes))
        limit_bytes = fitting.limit_bytes
        axes = ", ".join(f"{axis}={int(np.asarray(shapes.values[axis])[row])}" for axis in ("x", "y", "z", "data"))
        text = f"{axes}, micro-batch {shapes.micro_batch[row]}, recompute {recompute}"
        needed = float(fitting.total_bytes[row])
        if least is None or needed < least[0]:
            least = (needed, text)
    assert least is not None, "limits always allow at least one kind of recomputation"
    return (
        f"binding constraint: {MEMORY}: the leanest configuration ({least[1]}) needs {least[0] / GIB:.1f} GiB, "
        f"{limit_bytes / GIB:.1f} GiB can be used"
    )


def _binding_divisibility(problem: Problem) -> str:
    """The constraint that rejects most grids, with an example."""
    grids = list_grids(problem.gpus, problem.model, problem.workload)
    counts = grids.broken.sum(axis=0)
    if len(grids.sound):
        pinned = ", ".join(f"{axis}={size}" for axis, size in problem.limits.axes.items()) or "what was asked"
        return f"binding constraint: no grid that satisfies the others allows {pinned} and the micro-batch"
    worst = int(np.argmax(counts))
    check = grids.constraints[worst]
    fewest = int(np.argmin(grids.broken.sum(axis=1)))
    sizes = dict(zip(("x", "y", "z", "data"), grids.sizes[fewest].tolist(), strict=True))
    reasons = "; ".join(
        other.explain(sizes) for other, broken in zip(grids.constraints, grids.broken[fewest], strict=True) if broken
    )
    rejects = f"{check.name} rejects {int(counts[worst])} of {len(grids.sizes)} grids"
    return f"binding constraint: {rejects} (closest: {reasons})"


def _changes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Changes to try, smallest first: what was pinned, the batch, the GPU count, the optimizer state."""
    limits = problem.limits
    if limits != Limits():
        yield "drop the pinned axes, order, recompute and micro-batch", replace(problem, limits=Limits())
    yield from _batches(problem)
    sharded = problem.workload.model_copy(update={"shard_optimizer_over_data": True})
    yield "--shard-optimizer", replace(problem, workload=sharded)
    for gpus in _gpu_counts(problem.gpus):
        yield f"--gpus {gpus}", replace(problem, gpus=gpus)
        workload = problem.workload.model_copy(
            update={"global_batch": _next_multiple(problem.workload.global_batch, gpus)}
        )
        yield (
            f"--gpus {gpus} --batch {workload.global_batch}",
            replace(problem, gpus=gpus, workload=workload),
        )


def _batches(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Batches that the GPU count, or one of its divisors, divides; nearest first."""
    batch = problem.workload.global_batch
    options = {_next_multiple(batch, share) for share in divisors(problem.gpus)} - {batch}
    for option in sorted(options, key=lambda other: (abs(other - batch), other))[:12]:
        workload = problem.workload.model_copy(update={"global_batch": option})
        yield f"--batch {option}", replace(problem, workload=workload)


def _next_multiple(number: int, of: int) -> int:
    """The smallest multiple of `of` that is at least `number`."""
    return -(-number // of) * of


def _gpu_counts(gpus: int) -> Iterator[int]:
    """Nearby round counts, then powers of two upwards."""
    nearby = {8 * (gpus // 8), 8 * (gpus // 8 + 1)} - {gpus, 0}
    yield from sorted(nearby, key=lambda count: (abs(count - gpus), count))
    larger = 1 << gpus.bit_length()
    for _ in range(12):
        yield larger
        larger *= 2
