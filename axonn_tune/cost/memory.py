"""Memory of one rank at the peak of a step, item by item, in bytes.

The peak is reached in the head or in the backward pass of the last block, when every saved activation
is alive; the two phases do not hold their temporaries together. Sizes follow the program: main weights
split over x, y and z; gathered weights and their gradients in the compute type; statistics of norms
always saved. Symbols as in `program.size`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

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


def lasting_items(model: Model, workload: Workload, *, recompute: Recompute) -> tuple[MemoryItem, ...]:
    """What is held through both phases: states, saved activations."""
    sizes = workload.element_sizes
    state_share = _DATA if workload.shard_optimizer_over_data else Size(1.0)
    items = [
        MemoryItem("main weights", sizes.main * _PARAMETERS / state_share),
        MemoryItem("optimizer moments", 2.0 * sizes.main * _PARAMETERS / state_share),
        MemoryItem("gradients", 1.0 * sizes.main * _PARAMETERS),
        MemoryItem("replicated vectors", 4.0 * sizes.main * _VECTORS),
    ]
    if workload.shard_optimizer_over_data:
        items.append(MemoryItem("compute weights", 1.0 * sizes.compute * _PARAMETERS))
    saved = saved_per_block(model, workload, recompute=recompute)
    return (*items, *(MemoryItem(f"saved {name}", _L * elements) for name, elements in saved))


def head_items(workload: Workload) -> tuple[MemoryItem, ...]:
    """Temporaries of the head: logits of one chunk with softmax and gradient, its input and that one's gradient."""
    sizes = workload.element_sizes
    return (
        MemoryItem("logits of one chunk", (sizes.compute + 2.0 * sizes.statistics) * TOKENS / _CHUNKS * _V / (X * Y)),
        MemoryItem("head input and gradient", 2.0 * sizes.compute * TOKENS * H),
    )


def backward_items(workload: Workload, *, recompute: Recompute) -> tuple[MemoryItem, ...]:
    """Temporaries of one block's backward pass: what is computed again, gradients of activations."""
    element = workload.element_sizes.compute
    again: tuple[tuple[str, Size], ...] = ()
    if recompute != "none":
        again = _RECOMPUTED_FULL if recompute == "full" else _RECOMPUTED_SELECTIVE
    return (
        *(MemoryItem(f"recomputed {name}", element * elements) for name, elements in again),
        MemoryItem("backward temporaries", element * TOKENS * (2.0 * G) / X),
        MemoryItem("residual gradients", 3.0 * element * TOKENS * H / Y),
    )


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
    """Two alternating buffers of the largest weight, and what a block computed again holds beyond them.

    With full recomputation the gathered weights of that block live through its backward pass, beside
    the next one's first; those of a kept block are held already. Gradients have two buffers as well.
    """
    element = workload.element_sizes.compute
    largest: Value = 0.0
    for width in (N, G, F, Q):
        largest = arithmetic.larger(largest, (element * H * width / (X * Y)).evaluate(values))
    largest = arithmetic.larger(largest, (element * H * _V / (X * Y)).evaluate(values))
    block = kept_layer_bytes(workload).evaluate(values)
    return 2.0 * largest, (arithmetic.larger(block - largest, 0.0) if recompute == "full" else 0.0 * largest)


Items: TypeAlias = tuple[tuple[str, Column], ...]


@dataclass(frozen=True)
class Memory:
    """Memory of one rank, for one candidate or a column of them, in bytes by name.

    lasting: held through both phases; head, backward: temporaries of either; total_bytes: the peak, with
    those of the larger phase; kept_layers: layers whose gathered weights are kept.
    """

    lasting: Items
    head: Items
    backward: Items
    total_bytes: Column
    kept_layers: Column

    @property
    def items(self) -> Items:
        """What is alive at the peak of a single candidate."""
        return (*self.lasting, *max(self.head, self.backward, key=_sum))


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
    lasting = _priced(lasting_items(model, workload, recompute=recompute), values)
    buffers, block = gather_buffers_bytes(workload, values, recompute=recompute, arithmetic=arithmetic)
    lasting += (("gathered weights", buffers), ("unreduced weight gradients", buffers))
    head = _priced(head_items(workload), values)
    backward = _priced(backward_items(workload, recompute=recompute), values)
    total = _sum(lasting) + arithmetic.larger(_sum(head), _sum(backward))
    per_layer = kept_layer_bytes(workload).evaluate(values)
    room = arithmetic.floor((limit_bytes - total) / per_layer)
    kept = arithmetic.smaller(arithmetic.larger(room, 0.0), float(model.layers))
    if kept_layers is not None:
        kept = 0.0 * kept + kept_layers
    # The block computed again is one that is kept, as long as there are any: backward begins with those.
    held = arithmetic.larger(kept * per_layer, block)
    return Memory((*lasting, ("gathered weights of whole blocks", held)), head, backward, total + held, kept)


def _priced(items: tuple[MemoryItem, ...], values: Mapping[str, Value]) -> Items:
    return tuple((item.name, item.size_bytes.evaluate(values)) for item in items)


def _sum(items: Items) -> Column:
    """Left fold of the bytes."""
    total: Column = 0.0
    for _, size_bytes in items:
        total = total + size_bytes
    return total
