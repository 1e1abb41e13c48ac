"""Time of one rank's computation: matrix products and attention by a roofline, everything else by its bytes.

Efficiencies are shares of the datasheet peak that large, well-shaped work reaches on the machine;
what small shapes lose is modelled by rounding to tiles, by memory traffic and by a fixed launch time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from axonn_tune.cost.arithmetic import Arithmetic, Column
from axonn_tune.program.operations import MATRIX_ALIGNMENT
from axonn_tune.specs.machine import Accelerator, MatmulLayout
from axonn_tune.specs.workload import Precision
from axonn_tune.units import bytes_per_s, seconds


@dataclass(frozen=True)
class Kernels:
    """What training software makes of an accelerator; as given here, kernels as well fused as the programs say.

    products, attention: time of its matrix products and attention over the profile's; traffic: bytes its
    element-wise kernels move over those the programs count; operation_us, collective_us: what one operation or
    collective costs the accelerator beyond the profile's launch times; dispatch_us: time in which the host
    issues an operation.
    """

    products: float = 1.0
    attention: float = 1.0
    traffic: float = 1.0
    operation_us: float = 0.0
    collective_us: float = 0.0
    dispatch_us: float = 0.0


FUSED = Kernels()


@dataclass(frozen=True)
class ComputeRates:
    """What one rank computes with, in SI units, for one precision."""

    matmul_flops_per_s: dict[MatmulLayout, float]
    vector_flops_per_s: dict[MatmulLayout, float]
    vector_fp32_flops_per_s: dict[MatmulLayout, float]
    matmul_launch_s: float
    matmul_ramp: float
    tile: float
    attention_forward_flops_per_s: float
    attention_backward_flops_per_s: float
    memory_bytes_per_s: float
    kernel_launch_s: float
    kernel_traffic: float
    dispatch_s: float
    contention: float


def compute_rates(accelerator: Accelerator, precision: Precision, kernels: Kernels = FUSED) -> ComputeRates:
    """Rates of an accelerator under some software; KeyError if it does not state a peak for this precision."""
    lasting = accelerator.peak_flops_per_s(precision) * accelerator.training_share
    return ComputeRates(
        matmul_flops_per_s=_by_layout(accelerator, accelerator.peak_flops_per_s(precision) / kernels.products),
        vector_flops_per_s=_by_layout(accelerator, accelerator.vector_flops_per_s(precision)),
        vector_fp32_flops_per_s=_by_layout(accelerator, accelerator.vector_flops_per_s("fp32")),
        matmul_launch_s=seconds(accelerator.matmul_launch_us + kernels.operation_us),
        matmul_ramp=accelerator.matmul_ramp,
        tile=float(accelerator.matmul_tile),
        attention_forward_flops_per_s=lasting * accelerator.attention_forward_efficiency / kernels.attention,
        attention_backward_flops_per_s=lasting * accelerator.attention_backward_efficiency / kernels.attention,
        memory_bytes_per_s=bytes_per_s(accelerator.memory_bandwidth_gb_per_s) * accelerator.memory_efficiency,
        kernel_launch_s=seconds(accelerator.kernel_launch_us + kernels.operation_us),
        kernel_traffic=kernels.traffic,
        dispatch_s=seconds(kernels.dispatch_us),
        contention=accelerator.contention,
    )


def _by_layout(accelerator: Accelerator, peak: float) -> dict[MatmulLayout, float]:
    """FLOP/s of large products in long training by layout, from a peak in FLOP/s."""
    return {
        layout: peak * accelerator.training_share * share for layout, share in accelerator.matmul_efficiency.items()
    }


def rate_of_matmul(
    layout: MatmulLayout, *, element_bytes: float, alignment: int, batched: bool, rates: ComputeRates
) -> float:
    """Rate of a large product, FLOP/s: of matrix units if its rows start at multiples of 16 bytes.

    Copies into shared memory need 4 bytes, and are whole at 16, so rows aligned to single elements are left to the
    vector units. That others lie on a logarithmic line between the two rates is our assumption. Batches of narrow
    products (heads of unaligned width) fall to fp32: bigscience_a100-0073, -0107, -0110 and -0112, heads of 108.
    Source: NVIDIA, Matrix Multiplication Background User's Guide, section 3; CUDA C++ Programming Guide, cp.async.
    """
    matrix = rates.matmul_flops_per_s[layout]
    if alignment >= MATRIX_ALIGNMENT:
        return matrix
    if batched:
        return rates.vector_fp32_flops_per_s[layout]
    vector = rates.vector_flops_per_s[layout]
    way = math.log(max(1.0, alignment / element_bytes)) / math.log(MATRIX_ALIGNMENT / element_bytes)
    return float(vector * (matrix / vector) ** way)


def matmul_time_s(
    m: Column,
    n: Column,
    k: Column,
    *,
    flops_per_s: float,
    element_bytes: float,
    rates: ComputeRates,
    arithmetic: Arithmetic,
) -> Column:
    """Time of `O[m, n] = A[m, k] · B[k, n]`, s: launch + max(FLOPs / rate, bytes / memory bandwidth).

    flops_per_s: what a large product of its kind reaches (`rate_of_matmul`).
    Rows and columns of the output are rounded up to whole tiles, since a partial tile costs a whole one;
    each tile takes `matmul_ramp` more steps of k to fill its pipeline and to write its result.
    """
    tiled_m = arithmetic.floor((m + (rates.tile - 1.0)) / rates.tile) * rates.tile
    tiled_n = arithmetic.floor((n + (rates.tile - 1.0)) / rates.tile) * rates.tile
    arithmetic_s = 2.0 * tiled_m * tiled_n * (k + rates.matmul_ramp) / flops_per_s
    traffic_s = element_bytes * (m * k + k * n + m * n) / rates.memory_bytes_per_s
    busy_s: Column = arithmetic.larger(arithmetic_s, traffic_s)
    return rates.matmul_launch_s + busy_s


def kernel_time_s(size_bytes: Column, rates: ComputeRates) -> Column:
    """Time of an element-wise or reducing kernel that reads and writes `size_bytes` in all, s."""
    return rates.kernel_launch_s + size_bytes / rates.memory_bytes_per_s


def unfused_kernel_time_s(size_bytes: Column, rates: ComputeRates) -> Column:
    """The same of a kernel that would read and write `size_bytes` if the software fused it as the program does, s."""
    return rates.kernel_launch_s + size_bytes * rates.kernel_traffic / rates.memory_bytes_per_s


def attention_forward_time_s(flops: Column, rates: ComputeRates) -> Column:
    """Time of fused attention forward, s; `flops` counts the masked half too (4 · tokens · S · Q)."""
    return rates.kernel_launch_s + flops / rates.attention_forward_flops_per_s


def attention_backward_time_s(flops: Column, rates: ComputeRates) -> Column:
    """Time of fused attention backward, s; `flops` counts five products for the forward's two."""
    return rates.kernel_launch_s + flops / rates.attention_backward_flops_per_s
