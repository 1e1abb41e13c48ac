"""The operations a training step is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from axonn_tune.grid import WORLD
from axonn_tune.program.size import Size, as_size
from axonn_tune.specs.machine import CollectiveKind, MatmulLayout

Phase: TypeAlias = Literal["forward", "recompute", "backward", "step"]

MATRIX_ALIGNMENT = 16
"""Rows that start at multiples of so many bytes feed tensor cores at their full rate."""

ONCE = as_size(1)

GROUP_AXES = ("x", "y", "z", "data", "xy", WORLD)
"""Every group of axes that the bundled runtime communicates over."""

Role: TypeAlias = Literal[
    "weight", "output", "input_gather", "input_gradient", "weight_gradient", "data", "parameters", "keys", "other"
]
"""What a collective is for, which decides what may run beside it:

weight: gather of a weight over z; output: forward reduction of a GEMM's output, exposed unless the micro-batch is
split or it is pipelined with its GEMM; input_gather: a column-parallel layer's input once more, beside the
input-gradient GEMM; input_gradient: dI reduction, beside the weight-gradient GEMM; weight_gradient: dW reduce-scatter
over z, finished one layer later; data: gradient bucket over data, beside the rest of the backward pass; parameters:
new weights over data, behind the next forward pass; keys: keys and values of other context ranks, beside attention;
other: needed at once.
"""

OpKind: TypeAlias = CollectiveKind | Literal["all_to_all", "send"]
"""Collectives a profile prices, and two that are priced by them: see `priced_kind`."""


def priced_kind(kind: OpKind) -> CollectiveKind:
    """The collective of a profile that one is priced by: an all-to-all by the all-gather of its buffer."""
    return "all_gather" if kind == "all_to_all" or kind == "send" else kind


@dataclass(frozen=True)
class Array:
    """An array one rank holds from the operation that makes it to the one that frees it; `kind` is for tables."""

    name: str
    kind: str
    size_bytes: Size


Arrays: TypeAlias = tuple[Array, ...]


@dataclass(frozen=True)
class Collective:
    """A collective. `size_bytes`: the full (gathered or reduced) buffer of one of its `calls`."""

    kind: OpKind
    axis: str
    phase: Phase
    layer: str
    size_bytes: Size
    role: Role = "other"
    calls: Size = ONCE
    makes: Arrays = field(default=(), compare=False, repr=False)
    frees: tuple[str, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class MatMul:
    """A GEMM `O[m, n] = A[m, k] · B[k, n]` on one rank, done `calls` times.

    alignment: bytes at whose multiples rows start, at most those that matter; batched: it is many narrow GEMMs.
    """

    phase: Phase
    layer: str
    m: Size
    n: Size
    k: Size
    layout: MatmulLayout
    calls: Size = ONCE
    alignment: int = MATRIX_ALIGNMENT
    batched: bool = False
    makes: Arrays = field(default=(), compare=False, repr=False)
    frees: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @cached_property
    def flops(self) -> Size:
        """2·m·n·k, of one call."""
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True)
class Attention:
    """Fused attention core; `flops` with the masked half counted as work."""

    phase: Phase
    layer: str
    flops: Size
    backward: bool = False
    calls: Size = ONCE
    makes: Arrays = field(default=(), compare=False, repr=False)
    frees: tuple[str, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Kernel:
    """An element-wise or reducing kernel; `size_bytes`: all it reads and writes (0: not needed, not launched).

    A kernel that `prepares_gather` goes with the weight gather after it, one that `accumulates` with
    the reduce-scatter before it, wherever overlap moves those.
    """

    phase: Phase
    layer: str
    size_bytes: Size
    calls: Size = ONCE
    prepares_gather: bool = False
    accumulates: bool = False
    makes: Arrays = field(default=(), compare=False, repr=False)
    frees: tuple[str, ...] = field(default=(), compare=False, repr=False)


Computation: TypeAlias = MatMul | Attention | Kernel
Operation: TypeAlias = Collective | Computation
