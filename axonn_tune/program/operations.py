"""The operations a training step is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from axonn_tune.program.size import Size, as_size
from axonn_tune.specs.machine import CollectiveKind, MatmulLayout

Phase: TypeAlias = Literal["forward", "recompute", "backward", "step"]

MATRIX_ALIGNMENT = 16
"""Rows that start at multiples of so many bytes feed matrix units at their full rate."""

ONCE = as_size(1)

GROUP_AXES = ("x", "y", "z", "data", "xy", "xyzdata")
"""Every group of axes a program communicates over."""

Role: TypeAlias = Literal["weight", "output", "input_gradient", "weight_gradient", "data", "other"]
"""What a collective is for, which decides what may run beside it:

weight: gather of a weight over z; output: forward all-reduce of a product, exposed unless the
micro-batch is split; input_gradient: dI all-reduce, beside the weight-gradient product;
weight_gradient: dW reduce-scatter over z, finished one layer later; data: gradient bucket over data,
beside the rest of the backward pass; other: needed at once.
"""


@dataclass(frozen=True)
class Collective:
    """A collective. `size_bytes`: the full (gathered or reduced) buffer of one of its `calls`."""

    kind: CollectiveKind
    axis: str
    phase: Phase
    layer: str
    size_bytes: Size
    role: Role = "other"
    calls: Size = ONCE


@dataclass(frozen=True)
class MatMul:
    """A product `O[m, n] = A[m, k] · B[k, n]` on one rank, done `calls` times.

    alignment: bytes at whose multiples rows start, at most those that matter; batched: it is many narrow products.
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

    @property
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


Computation: TypeAlias = MatMul | Attention | Kernel
Operation: TypeAlias = Collective | Computation
