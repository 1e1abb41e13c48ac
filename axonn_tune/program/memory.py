"""Memory of one rank at the peak of a step, item by item, in bytes, by the lifetimes of the program's arrays.

Operations say which arrays they make and free. What a block's forward pass makes lives until its backward pass,
unless recompute makes it anew; the peak is reached in the LM head or in the backward pass of a block while the
activations of all blocks in flight are alive. Beside them stand persistent state and communication buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from axonn_tune.program.layers import BLOCK, Given, X, Y
from axonn_tune.program.operations import Array, Collective, Operation
from axonn_tune.program.size import Arithmetic, Size, Value, symbol
from axonn_tune.program.step import ONLY, Stage, StepProgram
from axonn_tune.specs.machine import Accelerator
from axonn_tune.units import GIB

_PARAMETERS, _VECTORS, _HELD = symbol("parameters"), symbol("vectors"), symbol("held")

Items: TypeAlias = tuple[tuple[str, Value], ...]

Held: TypeAlias = tuple[tuple[str, Size], ...]
"""Sizes by kind of array."""


def memory_limit_bytes(accelerator: Accelerator) -> float:
    """What a step may use: the memory less what context, communicators and the allocator take."""
    return accelerator.memory_gib * GIB - accelerator.reserved_memory_gib * GIB


def kept_layer_bytes(given: Given) -> Size:
    """Gathered weights of one block, which a block not resharded after forward holds until its backward."""
    return (given.options.gather_bytes or given.element) * BLOCK / (X * Y)


def persistent_items(given: Given) -> Held:
    """Weights, gradients and optimizer state, with what the data-parallel ranks split of them (ZeRO-1, ZeRO-2)."""
    sizes, options = given.elements, given.options
    share = given.replicas if given.sharded else Size(1.0)
    copied = given.sharded or not options.master_shards
    master = options.master_shards or sizes.main != sizes.compute
    return (
        *([("master weights", sizes.main * _PARAMETERS / share)] if master else []),
        ("optimizer moments", 2.0 * sizes.main * _PARAMETERS / share),
        ("gradients", given.gradient_bytes * _PARAMETERS / (given.replicas if options.shard_gradients else Size(1.0))),
        ("replicated vectors", 4.0 * sizes.main * _VECTORS),
        *([("compute weights", 1.0 * sizes.compute * _PARAMETERS)] if copied else []),
    )


def saved_arrays(program: StepProgram) -> tuple[Array, ...]:
    """What one block keeps of a micro-batch from forward to backward: all that is not made anew.

    Full recompute of whole blocks keeps their inputs alone (arXiv 2205.05198, table 2).
    """
    made = list(_made(program.block.operations))
    if program.recompute == "full" and program.given.options.recompute_whole_block:
        return tuple(array for array in made if array.name == "block input")
    again = {array.name for array in _recomputed(program)}
    return tuple(array for array in made if array.name not in again)


def _recomputed(program: StepProgram) -> Iterator[Array]:
    return _made(step for step in program.block_backward.operations if step.phase == "recompute")


def _made(operations: Iterable[Operation]) -> Iterator[Array]:
    for step in operations:
        yield from step.makes


def temporaries(operations: Iterable[Operation], *, first: tuple[Array, ...] = ()) -> tuple[Held, ...]:
    """What is alive beside saved activations at each point of some operations that no other point outdoes."""
    alive = {array.name: array for array in first}
    points: list[dict[tuple[str, Size], float]] = []
    for step in operations:
        if step.makes:
            alive |= {array.name: array for array in step.makes}
            points.append(_by_kind(alive.values()))
        for name in step.frees:
            alive.pop(name, None)
    distinct = [point for number, point in enumerate(points) if point not in points[:number]]
    largest = [one for one in distinct if not any(_outdone(one, other) for other in distinct if other is not one)]
    return tuple(tuple((kind, count * size) for (kind, size), count in point.items()) for point in largest)


def _by_kind(arrays: Iterable[Array]) -> dict[tuple[str, Size], float]:
    """Arrays of one kind and shape as one, with the sum of their sizes."""
    found: dict[tuple[str, Size], float] = {}
    for array in arrays:
        key = (array.kind, Size(1.0, array.size_bytes.powers))
        found[key] = found.get(key, 0.0) + array.size_bytes.coefficient
    return found


def _outdone(one: Mapping[tuple[str, Size], float], other: Mapping[tuple[str, Size], float]) -> bool:
    """Whether another point holds at least as much of everything."""
    return all(count <= other.get(key, 0.0) for key, count in one.items())


@dataclass(frozen=True)
class MemoryPlan:
    """What a program holds, as sizes: in all of the step, per block in flight, in the LM head, in a backward pass."""

    given: Given
    persistent: Held
    saved: Held
    head: tuple[Held, ...]
    backward: tuple[Held, ...]
    gathers: tuple[Size, ...]
    reductions: tuple[Size, ...]
    recomputes: bool


@lru_cache(maxsize=256)
def memory_plan(program: StepProgram, stage: Stage = ONLY) -> MemoryPlan:
    """Sizes of one stage of a program."""
    given = program.given
    saved = _by_kind(saved_arrays(program))
    weights = [
        step
        for section in program.sections(stage)
        for step in section.operations
        if isinstance(step, Collective) and step.axis == given.shard_axes and step.role in ("weight", "weight_gradient")
    ]
    gradient = given.stream("residual gradient", "residual gradients")
    return MemoryPlan(
        given=given,
        persistent=persistent_items(given),
        saved=tuple((f"saved {kind}", count * _HELD * size) for (kind, size), count in saved.items()),
        head=temporaries(program.head.operations) if stage.last else (),
        backward=temporaries(program.block_backward.operations, first=(gradient,)),
        gathers=_distinct(step.size_bytes for step in weights if step.role == "weight"),
        reductions=_distinct(step.size_bytes for step in weights if step.role == "weight_gradient"),
        recomputes=program.recompute == "full" and not given.options.gather_after_recompute,
    )


def _distinct(sizes: Iterable[Size]) -> tuple[Size, ...]:
    return tuple(dict.fromkeys(sizes))


@dataclass(frozen=True)
class Memory:
    """Memory of one rank, for one candidate or a column of them, in bytes by name.

    lasting: held through both phases; peaks: temporaries at each point that may be the peak; total_bytes: with the
    largest of them; kept_layers: blocks whose gathered weights are not resharded after forward.
    """

    lasting: Items
    peaks: tuple[Items, ...]
    total_bytes: Value
    kept_layers: Value

    @property
    def items(self) -> Items:
        """What is alive at the peak of a single candidate; kinds that are not held at all are left out."""
        found: dict[str, Value] = {}
        for name, size_bytes in (*self.lasting, *max(self.peaks, key=_sum)):
            found[name] = found.get(name, 0.0) + size_bytes
        return tuple(found.items())


def price_memory(
    program: StepProgram,
    values: Mapping[str, Value],
    *,
    limit_bytes: float,
    arithmetic: Arithmetic,
    kept_layers: Value | None = None,
    stage: Stage = ONLY,
) -> Memory:
    """Memory with as many kept layers as fit (or with just `kept_layers`).

    values: with `held`, the blocks whose saved activations are alive together. A candidate that does not fit even
    without kept layers has `total_bytes` above `limit_bytes` and keeps none.
    """
    plan = memory_plan(program, stage)
    lasting = _priced((*plan.persistent, *plan.saved), values)
    buffers, reductions, block = _buffers_bytes(plan, values, arithmetic=arithmetic)
    lasting += (("gathered weights", buffers), ("unreduced weight gradients", reductions))
    peaks = tuple(_priced(point, values) for point in (*plan.head, *plan.backward))
    largest = _sum(peaks[0])
    for point in peaks[1:]:
        largest = arithmetic.larger(largest, _sum(point))
    total = _sum(lasting) + largest
    per_layer = kept_layer_bytes(plan.given).evaluate(values)
    kept = _kept_layers(plan.given, (limit_bytes - total) / per_layer, values["L"], arithmetic=arithmetic)
    if kept_layers is not None:
        kept = 0.0 * kept + kept_layers
    # The block computed again is one that is kept, as long as there are any: backward begins with those.
    held = arithmetic.larger(kept * (per_layer * _gathers(plan.given, values, arithmetic=arithmetic)), block)
    return Memory((*lasting, ("gathered weights of whole blocks", held)), peaks, total + held, kept)


def _kept_layers(given: Given, room: Value, layers: Value, *, arithmetic: Arithmetic) -> Value:
    """Blocks that are not resharded after forward: none, all, or as many as there is room for."""
    if given.options.reshard == "always":
        return 0.0 * room
    if given.options.reshard == "never":
        return 0.0 * room + layers
    kept: Value = arithmetic.smaller(arithmetic.larger(arithmetic.floor(room), 0.0), layers)
    return kept


def _gathers(given: Given, values: Mapping[str, Value], *, arithmetic: Arithmetic) -> Value:
    """1.0 where a rank must gather weights before it can use them, 0.0 where it has them whole."""
    if given.options.master_shards:
        return 1.0
    split: Value = arithmetic.smaller(given.shards.evaluate(values) - 1.0, 1.0)
    return split


def _buffers_bytes(
    plan: MemoryPlan, values: Mapping[str, Value], *, arithmetic: Arithmetic
) -> tuple[Value, Value, Value]:
    """Two alternating buffers of the largest gather and of the largest reduction, and what a recomputed block adds.

    With full recompute the gathered weights of that block live through its backward pass, beside the next one's
    first; those of a kept block are held already.
    """
    needed = _gathers(plan.given, values, arithmetic=arithmetic)
    gathers, reductions = (_largest(sizes, values, arithmetic=arithmetic) for sizes in (plan.gathers, plan.reductions))
    block = kept_layer_bytes(plan.given).evaluate(values)
    whole = arithmetic.larger(block - gathers, 0.0) if plan.recomputes else 0.0 * gathers
    return 2.0 * gathers * needed, 2.0 * reductions * needed, whole * needed


def _largest(sizes: tuple[Size, ...], values: Mapping[str, Value], *, arithmetic: Arithmetic) -> Value:
    largest: Value = 0.0
    for size in sizes:
        largest = arithmetic.larger(largest, size.evaluate(values))
    return largest


def _priced(items: Held, values: Mapping[str, Value]) -> Items:
    return tuple((name, size.evaluate(values)) for name, size in items)


def _sum(items: Items) -> Value:
    """Left fold of the bytes."""
    total: Value = 0.0
    for _, size_bytes in items:
        total = total + size_bytes
    return total
