"""Memory of one rank at the peak of a step, item by item, in bytes.

The peak is taken at the start of the last block's backward pass, when every saved activation is
alive. Sizes follow the program: main weights split over x, y and z; gathered weights and their
gradients in the compute type; statistics of norms always saved. Symbols as in `program.size`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from axonn_tune.cost.arithmetic import Arithmetic, Column
from axonn_tune.program.layers import TOKENS, Context, F, G, H, N, Q, X, Y
from axonn_tune.program.size import Size, Value, symbol
from axonn_tune.specs.machine import Accelerator
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Recompute, Workload
from axonn_tune.units import GIB

_L, _W, _V, _CHUNKS = symbol("L"), symbol("W"), symbol("V"), symbol("C")
_PARAMETERS, _VECTORS, _DATA = symbol("parameters"), symbol("vectors"), symbol("data")


@dataclass(frozen=True)
class MemoryItem:
    """One kind of array: what it is and what one rank holds of it."""

    name: str
    size_bytes: Size


def memory_limit_bytes(accelerator: Accelerator) -> float:
    """What a step may use: the memory less what context, communicators and the allocator take."""
    return accelerator.memory_gib * GIB - accelerator.reserved_memory_gib * GIB


def kept_layer_bytes(workload: Workload) -> Size:
    """Gathered weights of one block, which a kept layer holds from forward to backward."""
    return workload.element_sizes.compute * _W / (X * Y)


def memory_items(model: Model, workload: Workload, *, recompute: Recompute) -> tuple[MemoryItem, ...]:
    """Everything but the gather buffers, which depend on which weight is the largest."""
    sizes, tokens = workload.element_sizes, TOKENS
    state_share = _DATA if workload.shard_optimizer_over_data else Size(1.0)
    items = [
        MemoryItem("main weights", sizes.main * _PARAMETERS / state_share),
        MemoryItem("optimizer moments", 2.0 * sizes.main * _PARAMETERS / state_share),
        MemoryItem("gradients", 1.0 * sizes.main * _PARAMETERS),
        MemoryItem("replicated vectors", 4.0 * sizes.main * _VECTORS),
    ]
    if workload.shard_optimizer_over_data:
        items.append(MemoryItem("compute weights", 1.0 * sizes.compute * _PARAMETERS))
    items += [
        MemoryItem(f"saved {name}", _L * elements)
        for name, elements in saved_per_block(model, workload, recompute=recompute)
    ]
    if recompute != "none":
        extra = {"selective": _RECOMPUTED_SELECTIVE, "full": _RECOMPUTED_FULL}[recompute]
        items += [MemoryItem(f"recomputed {name}", sizes.compute * elements) for name, elements in extra]
    items += [
        MemoryItem("backward temporaries", sizes.compute * tokens * (2.0 * G) / X),
        MemoryItem("residual gradients", 3.0 * sizes.compute * tokens * H / Y),
        MemoryItem("logits of one chunk", (sizes.compute + 2.0 * sizes.statistics) * tokens / _CHUNKS * _V / (X * Y)),
        MemoryItem("head input and gradient", 2.0 * sizes.compute * tokens * H),
    ]
    return tuple(items)


_RECOMPUTED_SELECTIVE = (
    ("norm output", TOKENS * H / Y),
    ("attention output", TOKENS * Q / X),
    ("activation", TOKENS * F / X),
)
_RECOMPUTED_FULL = (
    ("norm outputs and residual", 3.0 * TOKENS * H / Y),
    ("qkv", TOKENS * N / X),
    ("attention output", TOKENS * Q / X),
    ("up projection", TOKENS * G / X),
    ("activation", TOKENS * F / X),
)


def saved_per_block(model: Model, workload: Workload, *, recompute: Recompute) -> tuple[tuple[str, Size], ...]:
    """Bytes one block keeps from forward to backward, by array."""
    element, statistics = workload.element_sizes.compute, workload.element_sizes.statistics
    saved: list[tuple[str, Size]] = [
        ("residual stream", element * TOKENS * H / Y * (1.0 if recompute == "full" else 2.0)),
        ("norm statistics", 2.0 * Context(model, workload.element_sizes).norm_statistics * statistics * TOKENS),
    ]
    if recompute != "full":
        saved += [("qkv", element * TOKENS * N / X), ("up projection", element * TOKENS * G / X)]
    if recompute == "none":
        saved += [
            ("norm outputs", 2.0 * element * TOKENS * H / Y),
            ("attention output", element * TOKENS * Q / X),
            ("softmax statistics", statistics * TOKENS * Q / X / model.head_dim),
            ("activation", element * TOKENS * F / X),
        ]
    return tuple(saved)


def gather_buffers_bytes(
    workload: Workload, values: Mapping[str, Value], *, recompute: Recompute, arithmetic: Arithmetic
) -> tuple[Column, Column]:
    """Buffers of gathered weights, and of weight gradients before their reduce-scatter.

    Two alternating buffers of the largest weight each; with full recomputation the gathered weights
    of the block being computed live through its backward pass, beside the next one's first.
    """
    element = workload.element_sizes.compute
    largest: Value = 0.0
    for width in (N, G, F, Q):
        largest = arithmetic.larger(largest, (element * H * width / (X * Y)).evaluate(values))
    largest = arithmetic.larger(largest, (element * H * _V / (X * Y)).evaluate(values))
    block = kept_layer_bytes(workload).evaluate(values)
    return (block + largest if recompute == "full" else 2.0 * largest), 2.0 * largest


@dataclass(frozen=True)
class Memory:
    """Memory of one rank, for one candidate or a column of them: bytes by item, in all, and layers kept."""

    items: tuple[tuple[str, Column], ...]
    total_bytes: Column
    kept_layers: Column


def price_memory(
    model: Model,
    workload: Workload,
    values: Mapping[str, Value],
    *,
    recompute: Recompute,
    limit_bytes: float,
    arithmetic: Arithmetic,
    kept_layers: float | None = None,
) -> Memory:
    """Memory with as many kept layers as fit (or with just `kept_layers`).

    A candidate that does not fit even without kept layers has `total_bytes` above `limit_bytes` and
    keeps none.
    """
    items = [
        (item.name, item.size_bytes.evaluate(values)) for item in memory_items(model, workload, recompute=recompute)
    ]
    gathered, gradients = gather_buffers_bytes(workload, values, recompute=recompute, arithmetic=arithmetic)
    items += [("gathered weights", gathered), ("unreduced weight gradients", gradients)]
    total: Column = 0.0
    for _, size_bytes in items:
        total = total + size_bytes
    per_layer = kept_layer_bytes(workload).evaluate(values)
    room = arithmetic.floor((limit_bytes - total) / per_layer)
    kept = arithmetic.smaller(arithmetic.larger(room, 0.0), float(model.layers))
    if kept_layers is not None:
        kept = 0.0 * kept + kept_layers
    kept_bytes = kept * per_layer
    return Memory((*items, ("kept gathered weights", kept_bytes)), total + kept_bytes, kept)
