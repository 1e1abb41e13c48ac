"""What follows from a candidate: padded tables, accumulation steps, chunks, buckets, stored elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import floor

from axonn_tune.grid import AXES, Grid, divisors
from axonn_tune.program.size import Value
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload

LOSS_CHUNK_TOKENS = 4096
"""Most tokens whose logits exist at one time."""


@lru_cache(maxsize=4096)
def loss_chunks(tokens: int) -> int:
    """Fewest equal chunks of at most `LOSS_CHUNK_TOKENS` tokens."""
    return next(chunks for chunks in divisors(tokens) if tokens // chunks <= LOSS_CHUNK_TOKENS)


def constants(model: Model, workload: Workload) -> dict[str, float]:
    """Values of the symbols that a whole search shares."""
    return {
        "L": float(model.layers),
        "H": float(model.hidden),
        "Q": float(model.query_width),
        "N": float(model.qkv_width),
        "F": float(model.ffn),
        "G": float(model.up_width),
        "W": float(model.block_weights),
        "S": float(workload.sequence_length),
        "parts": 2.0 if workload.split_micro_batch else 1.0,
    }


def dimensions(
    model: Model, workload: Workload, axes: Mapping[str, Value], *, chunks: Value, floor: Callable[[Value], Value]
) -> dict[str, Value]:
    """Values of every symbol but `kept` and `unkept`.

    `axes` holds x, y, z, data and b (the micro-batch); `chunks` is `loss_chunks(b · S)`; `floor` rounds
    a value or a column down.
    """

    def up(elements: Value, multiple: Value) -> Value:
        return floor((elements + (multiple - 1.0)) / multiple) * multiple

    x, y, z, data = axes["x"], axes["y"], axes["z"], axes["data"]
    hidden, layers = float(model.hidden), float(model.layers)
    split = x * y * z
    rows = up(float(model.vocab), split)
    positions = up(float(model.max_sequence_length), z) if model.learned_positions else 0.0 * z
    block, table, position = float(model.block_weights) / split, rows * hidden / split, positions * hidden / (y * z)
    tables = 1.0 if model.tied_embeddings else 2.0
    share = data if workload.shard_optimizer_over_data else 1.0
    norm_vectors = 1.0 if model.family == "llama" else 2.0
    biases = 1.0 if model.biases else 0.0
    block_vectors = 2.0 * norm_vectors * hidden / y + biases * (
        float(model.qkv_width) / x + hidden / y + float(model.up_width) / x + hidden / y
    )
    return {
        **constants(model, workload),
        **axes,
        "A": float(workload.global_batch) / (data * z * axes["b"]),
        "C": chunks,
        "V": rows,
        "P": positions,
        "block_bucket": up(block, share),
        "table_bucket": up(table, share),
        "position_bucket": up(position, share),
        "parameters": layers * block + tables * table + position,
        "vectors": layers * block_vectors + norm_vectors * hidden / y,
    }


def symbol_values(model: Model, workload: Workload, grid: Grid, *, micro_batch: int) -> dict[str, float]:
    """Values of every symbol but `kept` and `unkept`, for one grid."""
    axes: dict[str, Value] = {axis: float(grid.axis_size(axis)) for axis in AXES}
    axes["b"] = float(micro_batch)
    chunks = float(loss_chunks(micro_batch * workload.sequence_length))
    found = dimensions(model, workload, axes, chunks=chunks, floor=lambda value: float(floor(float(value))))
    return {name: float(value) for name, value in found.items()}


def step_values(
    model: Model, workload: Workload, grid: Grid, *, micro_batch: int, kept_layers: int
) -> dict[str, float]:
    """Values of every symbol for one step of one rank."""
    kept = {"kept": float(kept_layers), "unkept": float(model.layers - kept_layers)}
    return symbol_values(model, workload, grid, micro_batch=micro_batch) | kept
