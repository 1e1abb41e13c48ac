"""Settings of the runtime from a launch config: number formats, overlaps, activation recomputation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from axonn_tune.errors import NothingFeasibleError
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.workload import Overlap, Precision, Recompute
from axonn_tune.units import show_bytes

MOST_LAYERS, MOST_TOKENS, MOST_BYTES = 2_000, 1 << 24, 1 << 44
"""Limits of one rank: blocks and tokens of a micro-batch, which take time to build; bytes of memory."""

DTYPES: dict[Precision, tuple[torch.dtype, torch.dtype, torch.dtype]] = {
    "bf16": (torch.bfloat16, torch.float32, torch.float32),
    "fp32": (torch.float32, torch.float32, torch.float32),
    "fp64": (torch.float64, torch.float64, torch.float64),
}
"""Compute, master and statistics type of each precision that the runtime supports."""


def compile_static(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile with static shapes: each new set of shapes is recompiled."""
    return torch.compile(function, dynamic=False)


@dataclass(frozen=True)
class RuntimeSettings:
    """compute: type of activations and gathered weights; master: of stored weights and gradients; statistics: of norms
    and loss.

    parts: 2 splits each micro-batch for two-batch overlap; shard_master: master weights and moments are sharded over
    data; dropout: share of a block's outputs and of the embedding set to zero; compile: elementwise work between
    GEMMs, attention and collectives becomes kernels of `compiler`.
    """

    compute: torch.dtype
    master: torch.dtype
    statistics: torch.dtype
    overlaps: frozenset[Overlap]
    recompute: Recompute
    kept_layers: int
    device: torch.device
    parts: int = 1
    shard_master: bool = False
    dropout: float = 0.0
    compile: bool = False
    compiler: Callable[[Callable[..., Any]], Callable[..., Any]] = compile_static


def least_bytes(launch: Launch) -> int:
    """Least memory of the largest rank: an equal share of master weights, their gradients and both moments."""
    return 4 * launch.workload.element_sizes.main * launch.model.parameters // launch.grid.world


def require_size(launch: Launch) -> None:
    """NothingFeasibleError for a model that no rank can hold; building it, even for a dry run, would take hours."""
    layers, tokens = launch.model.layers, launch.micro_batch * launch.workload.sequence_length
    if layers > MOST_LAYERS or tokens > MOST_TOKENS:
        raise NothingFeasibleError(
            f"{layers:,} layers and micro-batches of {tokens:,} tokens: a rank is built for at most {MOST_LAYERS:,} "
            f"and {MOST_TOKENS:,}"
        )
    limit_bytes = min(launch.predicted.memory_limit_bytes or MOST_BYTES, MOST_BYTES)
    if least_bytes(launch) > limit_bytes:
        raise NothingFeasibleError(
            f"master weights, gradients and moments of a rank need {show_bytes(least_bytes(launch))} or more, above "
            f"the {show_bytes(limit_bytes)} that it may use"
        )


def settings_of(launch: Launch, device: torch.device) -> RuntimeSettings:
    """Number formats, overlaps and activation recomputation of a launch config."""
    compute, master, statistics = DTYPES[launch.workload.precision]
    return RuntimeSettings(
        compute=compute,
        master=master,
        statistics=statistics,
        overlaps=frozenset(launch.workload.overlaps),
        recompute=launch.recompute,
        kept_layers=launch.kept_layers,
        device=device,
        parts=2 if launch.workload.split_micro_batch else 1,
        shard_master=launch.workload.shard_optimizer_over_data,
        dropout=launch.dropout,
        compile=launch.compile,
    )
