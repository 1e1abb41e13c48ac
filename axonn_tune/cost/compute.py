"""Time of one rank's computation: GEMMs and attention by a roofline, everything else by its bytes; and its slowdown.

Efficiencies are shares of the datasheet peak that large, well-shaped work reaches on the machine;
the loss of small shapes is modelled by rounding to tiles, by memory accesses and by a fixed launch time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from axonn_tune.frameworks.description import FUSED
from axonn_tune.program.context import CORE
from axonn_tune.program.operations import (
    MATRIX_ALIGNMENT,
    ONCE,
    Arithmetic,
    Attention,
    Computation,
    HostWork,
    Kernel,
    MatMul,
    Measured,
    Size,
    Value,
    captured_layers,
    is_captured,
)
from axonn_tune.program.step import ONLY, Stage, StepProgram
from axonn_tune.specs.formats import FORMATS, Copies, quantization_shares
from axonn_tune.specs.machine import ASSUMED_HOST, Accelerator, Host, Machine, MatmulLayout, Software
from axonn_tune.specs.workload import ELEMENT_SIZES
from axonn_tune.units import bytes_per_s, seconds
from axonn_tune.vocabulary import CudaGraphs, GemmFormat, Precision

REFERENCE_KEYS, REFERENCE_WIDTH = 8192.0, 128.0
"""Keys of a query, and width of heads, for which an accelerator's shares of attention hold."""
_OVERLAP = 4.0
"""Exponent of the mean of the times of tensor cores and of softmax, which overlap: 1 one after the other, ever more
perfectly beside each other. 3 to 6 meet the measured kernels of tests/published/test_attention.py equally well."""

_ORDERED = 1.125
"""Time of attention's backward pass that adds gradients of queries in one order over that of atomics in any: 10 to 15%
more on GB200 and GB300 (NVIDIA/cudnn-frontend@3929da2e, benchmark/sdpa_benchmark_training)."""
_UNEQUAL: Mapping[str | None, float] = {"cdna4": 1052 / 763}
"""Time of the backward pass over heads of 192 and 128 (MLA) over that with one width: AITER's kernels add gradients of
queries in FP32 alone (ROCm/TransformerEngine PR 364), at 763 TFLOP/s where those in BF16 have 1,052 (ROCm/aiter PR
815, heads of 128)."""


# What one rank has of its host.

ADAM_BYTES = 28.0
"""Bytes of host memory that Adam moves for a parameter in FP32: four numbers are read, all but the gradient written."""
_VECTORIZED = 0.5
"""Share of a host's memory bandwidth that DeepSpeed's CPUAdam reaches: 2.57 s for 10 B parameters on two Xeon 8168 with
256 GB/s (0.43; arXiv 2101.06840, table 4), 0.098 s for 1 B on Grace with 500 GB/s (0.57; arXiv 2509.21271)."""
_ASSUMED_BANDWIDTH = 200.0
"""Memory bandwidth of a host that does not state it, for that: one socket with eight channels of DDR4, GB/s."""


@dataclass(frozen=True)
class HostRates:
    """link_bytes_per_s: copies of one rank each way; updated_per_s, vectorized_per_s: parameters that torch's AdamW and
    DeepSpeed's update of one rank, while all ranks of the host do."""

    link_bytes_per_s: float
    updated_per_s: float
    vectorized_per_s: float


def host_rates(machine: Machine, world: int) -> HostRates:
    """Those of a rank where all ranks of a job on its node use the host at once: they share its memory's bandwidth."""
    return _shared(machine.host or ASSUMED_HOST, min(world, machine.launcher.ranks_per_node))


def _shared(host: Host, ranks: int) -> HostRates:
    stated = host.memory_bandwidth_gb_per_s
    memory = bytes_per_s(stated or _ASSUMED_BANDWIDTH) / ranks
    link, updated = bytes_per_s(host.link_gb_per_s), host.adam_parameters_per_s
    if stated is not None:
        link, updated = min(link, memory), min(updated, memory / ADAM_BYTES)
    return HostRates(link, updated, _VECTORIZED * memory / ADAM_BYTES)


UNSHARED = _shared(ASSUMED_HOST, 1)
"""Those of a lone rank on an assumed host, where nothing is offloaded."""


@dataclass(frozen=True)
class AttentionRates:
    """One pass of fused attention. flops_per_s: of heads of 128 with 8,192 keys, the masked half counted.

    softmax: share of their time that it would take if tensor cores took none. ramp: keys at which such a call reaches
    half of what long ones do. narrow: time in 8 bits with this format's scales, over that with one scale a tensor.
    unequal: time with heads of unequal widths over that with equal ones.
    """

    flops_per_s: float
    softmax: float
    ramp: float
    narrow: float
    unequal: float = 1.0


@dataclass(frozen=True)
class ComputeRates:
    """Rates of one rank's accelerator, in SI units, for one precision.

    operation_s: what the software adds to a launch, but in the layers that are captured in CUDA graphs, and to
    quantization that is issued with its GEMM (`quantizes_in_gemm`).
    format_flops_per_s, format_bytes: rates of GEMMs in the number format of linear layers, and an element of their
    operands; those of all others where there is none. format_ramp: as many more steps of k as take the time of
    `matmul_ramp` in BF16, for latency and results are the same. accelerator: whose kernels were measured.
    """

    matmul_flops_per_s: dict[MatmulLayout, float]
    format_flops_per_s: dict[MatmulLayout, float]
    format_bytes: float
    format_ramp: float
    vector_flops_per_s: dict[MatmulLayout, float]
    vector_fp32_flops_per_s: dict[MatmulLayout, float]
    matmul_launch_s: float
    matmul_ramp: float
    tile: float
    attention: tuple[AttentionRates, AttentionRates]
    memory_bytes_per_s: float
    kernel_launch_s: float
    kernel_traffic: float
    dispatch_s: float
    contention: float
    operation_s: float
    captured: tuple[str, ...]
    quantizes_in_gemm: bool
    accelerator: Accelerator
    quantization: Mapping[Copies, float]
    host: HostRates


def compute_rates(
    accelerator: Accelerator,
    precision: Precision,
    software: Software = FUSED,
    *,
    multiplied: GemmFormat | None = None,
    cuda_graphs: tuple[CudaGraphs, ...] = (),
    quantizes_in_gemm: bool = False,
    host: HostRates = UNSHARED,
) -> ComputeRates:
    """Rates of an accelerator under some software; KeyError if it does not state a peak for this precision.

    multiplied: what GEMMs of linear layers multiply, if not that. cuda_graphs: scopes of what is captured, which the
    software's time per operation does not delay; nor quantization with `quantizes_in_gemm`, which is Transformer
    Engine's. host: as one rank sees it.
    """

    def by_layout(peak: float) -> dict[MatmulLayout, float]:
        """Sustained FLOP/s of large GEMMs, from a peak in FLOP/s."""
        sustained = peak * accelerator.training_share
        return {layout: sustained * share for layout, share in accelerator.matmul_efficiency.items()}

    narrow, reached = FORMATS.get(precision), accelerator.reached_flops_per_s(multiplied or precision)
    precision = "bf16" if narrow else precision
    lasting = accelerator.peak_flops_per_s(precision) * accelerator.training_share
    element = narrow.operand_bytes if narrow else ELEMENT_SIZES[precision].compute
    rates, promoted = by_layout(reached / software.gemm), narrow.promotes if narrow else ()
    share = accelerator.promoted_share or 1.0
    return ComputeRates(
        matmul_flops_per_s=by_layout(accelerator.peak_flops_per_s(precision) / software.gemm),
        format_flops_per_s={one: rate * share if one in promoted else rate for one, rate in rates.items()},
        format_bytes=float(element),
        format_ramp=accelerator.matmul_ramp * (reached / accelerator.peak_flops_per_s(precision) if narrow else 1.0),
        vector_flops_per_s=by_layout(accelerator.vector_flops_per_s(precision)),
        vector_fp32_flops_per_s=by_layout(accelerator.vector_flops_per_s("fp32")),
        matmul_launch_s=seconds(accelerator.matmul_launch_us + software.operation_us),
        matmul_ramp=accelerator.matmul_ramp,
        tile=float(accelerator.matmul_tile),
        attention=_attention_rates(accelerator, lasting / software.attention, narrow.attention if narrow else (1, 1)),
        memory_bytes_per_s=bytes_per_s(accelerator.memory_bandwidth_gb_per_s) * accelerator.memory_efficiency,
        kernel_launch_s=seconds(accelerator.kernel_launch_us + software.operation_us),
        kernel_traffic=software.traffic,
        dispatch_s=seconds(software.dispatch_us),
        contention=accelerator.contention,
        operation_s=seconds(software.operation_us),
        captured=captured_layers(cuda_graphs),
        quantizes_in_gemm=quantizes_in_gemm,
        accelerator=accelerator,
        quantization=quantization_shares(narrow.name, accelerator.generation, engine=quantizes_in_gemm)
        if narrow
        else {},
        host=host,
    )


def _attention_rates(
    accelerator: Accelerator, flops_per_s: float, narrow: tuple[float, float]
) -> tuple[AttentionRates, AttentionRates]:
    """Attention forward and backward. flops_per_s: the peak that training sustains."""
    forward, backward = accelerator.attention_forward_efficiency, accelerator.attention_backward_efficiency
    softmax = accelerator.attention_forward_softmax, accelerator.attention_backward_softmax
    ramp = accelerator.attention_ramp_tokens
    return (
        AttentionRates(flops_per_s * forward, softmax[0], ramp, narrow[0]),
        AttentionRates(flops_per_s * backward, softmax[1], ramp, narrow[1], _UNEQUAL.get(accelerator.generation, 1.0)),
    )


def rate_of_matmul(
    layout: MatmulLayout, *, element_bytes: float, alignment: int, batched: bool, rates: ComputeRates
) -> float:
    """Rate of a large GEMM, FLOP/s: that of tensor cores if its rows are aligned to 16 bytes.

    Copies into shared memory need 4 bytes, and reach full speed at 16, so rows aligned to single elements use the
    vector units. We assume a logarithmic line between the two rates. Batches of narrow GEMMs (heads of unaligned width)
    fall to fp32: bigscience_a100-0073, -0107, -0110 and -0112, heads of 108. Source: NVIDIA, Matrix Multiplication
    Background User's Guide, section 3; CUDA C++ Programming Guide, cp.async.
    """
    matrix = rates.matmul_flops_per_s[layout]
    if alignment >= MATRIX_ALIGNMENT:
        return matrix
    if batched:
        return rates.vector_fp32_flops_per_s[layout]
    vector = rates.vector_flops_per_s[layout]
    share = math.log(max(1.0, alignment / element_bytes)) / math.log(MATRIX_ALIGNMENT / element_bytes)
    return float(vector * (matrix / vector) ** share)


UNHIDDEN = 0.6
"""Share of the shorter of arithmetic and memory accesses of a grouped GEMM that is not behind the longer one. By rates
of Transformer Engine's on B200, 20 to 256 groups of 128 to 1,232 rows (MooreThreads/SimuMax@e691807,
configs/system/b200_bf16_ceperm.json; tests/published/test_grouped.py)."""


def matmul_time_s(
    m: Value,
    n: Value,
    k: Value,
    *,
    flops_per_s: float,
    element_bytes: float,
    rates: ComputeRates,
    arithmetic: Arithmetic,
    step: MatMul | None = None,
) -> Value:
    """Time of `O[m, n] = A[m, k] · B[k, n]`, s: launch + max(FLOPs / rate, bytes / memory bandwidth).

    flops_per_s: rate of a large GEMM of its kind (`rate_of_matmul`). step: whose operands may have a number format of
    their own, and whose groups may have padded rows.
    Rows and columns of the output are rounded up to whole tiles, since a partial tile costs a whole one;
    each tile takes `matmul_ramp` more steps of k to fill its pipeline and to write its result. Groups of one launch are
    short, and each loads its weights and writes its result: arithmetic and memory accesses overlap less (`UNHIDDEN`).
    """
    padded, operand_bytes, ramp = 0.0, element_bytes, rates.matmul_ramp
    if step is not None:
        padded = step.padded
        operand_bytes, ramp = (rates.format_bytes, rates.format_ramp) if step.narrow else (operand_bytes, ramp)
    if step is not None and step.layout == "TN":
        k, padded = k + padded, 0.0
    tiled_m = arithmetic.floor((m + (rates.tile - 1.0)) / rates.tile) * rates.tile
    tiled_m = arithmetic.larger(tiled_m, m + padded) if padded else tiled_m
    tiled_n = arithmetic.floor((n + (rates.tile - 1.0)) / rates.tile) * rates.tile
    arithmetic_s = 2.0 * tiled_m * tiled_n * (k + ramp) / flops_per_s
    written_bytes = 2.0 * step.added_bytes if step is not None and step.added_bytes else element_bytes
    if operand_bytes == written_bytes:
        moved_bytes = operand_bytes * (m * k + k * n + m * n)
    else:
        moved_bytes = operand_bytes * (m * k + k * n) + written_bytes * (m * n)
    traffic_s = moved_bytes / rates.memory_bytes_per_s
    busy_s: Value = arithmetic.larger(arithmetic_s, traffic_s)
    if step is not None and step.groups != ONCE:
        busy_s = busy_s + UNHIDDEN * arithmetic.smaller(arithmetic_s, traffic_s)
    return rates.matmul_launch_s + busy_s


def kernel_time_s(size_bytes: Value, rates: ComputeRates, *, traffic: float = 1.0) -> Value:
    """Time of an element-wise or reducing kernel that reads and writes `size_bytes` in all, s.

    traffic: what the software moves, relative to the program's bytes.
    """
    return rates.kernel_launch_s + size_bytes * traffic / rates.memory_bytes_per_s


def attention_time_s(step: Attention, flops: Value, keys: Value, rates: ComputeRates) -> Value:
    """Time of fused attention, s; `flops` counts the masked half too: forward 4 · tokens · S · Q, backward five GEMMs
    for the forward's two.

    keys: of a query, the masked half included. Of a score the tensor cores' time follows the width of heads and their
    operands' bits; softmax's is the same for all. A kernel fills and drains once a tile of queries, and computes tiles
    on the diagonal whole, which takes as long as `ramp` keys of heads of 128: long beside a window of few.
    """
    own, width = rates.attention[step.backward], step.width / REFERENCE_WIDTH
    cores, softmax = width / 2.0 if step.narrow else width, own.softmax**_OVERLAP
    score = ((1.0 - softmax) * cores**_OVERLAP + softmax) ** (1.0 / _OVERLAP) * (own.narrow if step.narrow else 1.0)
    of_reference: Value = (score + own.ramp / keys) / (1.0 + own.ramp / REFERENCE_KEYS)
    flops = flops * _ORDERED if step.ordered else flops
    flops = flops * own.unequal if step.unequal else flops
    return rates.kernel_launch_s + flops / width * of_reference / own.flops_per_s


@dataclass(frozen=True)
class ComputeClock:
    """Prices computations: rates, element size, the values of the symbols.

    known, stretched: times of a call and of its calls in a row, by identity of the operation, which is kept with it.
    others: the clock of more candidates, with the rows that these are among them (None: the same): all but the end of
    the step takes equally long on every pipeline stage.
    """

    rates: ComputeRates
    element_bytes: float
    values: Mapping[str, Value]
    arithmetic: Arithmetic
    known: dict[int, tuple[Computation, Value]] = field(default_factory=dict, compare=False, repr=False)
    stretched: dict[int, tuple[Computation, Value]] = field(default_factory=dict, compare=False, repr=False)
    others: tuple[ComputeClock, NDArray[np.int64] | None] | None = field(default=None, compare=False, repr=False)

    def call_s(self, step: Computation) -> Value:
        """Time of one call, s; a kernel without bytes is not launched."""
        found = self.known.get(id(step))
        if found is None:
            found = self.known[id(step)] = step, self._call_s(step)
        return found[1]

    def _of_others(self, step: Computation) -> Value | None:
        """Time of one call by the clock of more candidates, s; None where it is not the same."""
        if self.others is None or step.phase == "step":
            return None
        clock, rows = self.others
        call_s = clock.call_s(step)
        return call_s if rows is None or isinstance(call_s, float) else call_s.take(rows)

    @cached_property
    def _captured_rates(self) -> ComputeRates:
        """Rates without the software's time per operation."""
        rates = self.rates
        launches = (rates.matmul_launch_s - rates.operation_s, rates.kernel_launch_s - rates.operation_s)
        return replace(rates, matmul_launch_s=launches[0], kernel_launch_s=launches[1])

    def _call_s(self, step: Computation) -> Value:
        if (call_s := self._of_others(step)) is not None:
            return call_s
        rates, element = self.rates, self.element_bytes
        quantizes = rates.quantizes_in_gemm and isinstance(step, Kernel) and step.quantizes
        bare = isinstance(step, Kernel) and step.bare
        if step.phase != "step" and (quantizes or bare or is_captured(step.layer, rates.captured)):
            rates = self._captured_rates
        if isinstance(step, MatMul):
            m, n, k = (size.evaluate(self.values) for size in (step.m, step.n, step.k))
            rate, numbers = self.rate_of(step), self.arithmetic
            one_s = matmul_time_s(
                *(m, n, k), flops_per_s=rate, element_bytes=element, rates=rates, arithmetic=numbers, step=step
            )
            if step.groups == ONCE:
                return one_s
            launch_s = rates.matmul_launch_s
            return launch_s + step.groups.evaluate(self.values) * (one_s - launch_s)
        if isinstance(step, Attention):
            return attention_time_s(step, step.flops.evaluate(self.values), step.keys.evaluate(self.values), rates)
        if isinstance(step, Measured):
            # Imported here: most models have no such kernel, and start-up time is theirs.
            from axonn_tune.cost.kernels import kernel_rate

            one = kernel_rate(step.kernel, rates.accelerator, backward=step.backward)
            return step.launches * rates.kernel_launch_s + step.work.evaluate(self.values) / one.units_per_s
        if isinstance(step, HostWork):
            return self._host_s(step)
        if step.size_bytes.coefficient == 0.0:
            return 0.0
        traffic = 1.0 if step.phase == "step" else rates.kernel_traffic
        traffic = 1.0 / rates.quantization[step.quantizes] if step.quantizes else traffic
        size_bytes = step.size_bytes.evaluate(self.values)
        if step.turns:
            size_bytes = size_bytes * (1.0 + self.arithmetic.smaller(self.values["x"] - 1.0, 1.0)) / 2.0
        return kernel_time_s(size_bytes, rates, traffic=traffic)

    def _host_s(self, step: HostWork) -> Value:
        """What a rank waits for its host, s: copies beyond the computation that they run behind, and the update."""
        host, larger = self.rates.host, self.arithmetic.larger

        def spent_s(sizes: tuple[Size, ...], rate: float) -> Value:
            total: Value = 0.0
            for size in sizes:
                total = total + size.evaluate(self.values)
            return total / rate

        out_s, back_s = (spent_s(sizes, host.link_bytes_per_s) for sizes in (step.to_host, step.from_host))
        if not step.beside:
            update_s = spent_s(step.updated, host.vectorized_per_s if step.vectorized else host.updated_per_s)
            longest_s: Value = larger(larger(out_s, back_s), update_s)
            return longest_s if step.pipelined else out_s + update_s + back_s
        hidden_s: Value = 0.0
        for one in step.beside:
            if isinstance(one, Computation):
                hidden_s = hidden_s + self.run_s(one)
        left_s: Value = larger(larger(out_s, back_s) - hidden_s, 0.0)
        return left_s

    def rate_of(self, step: MatMul) -> float:
        """Rate of a large GEMM of its kind, FLOP/s."""
        if step.narrow:
            return self.rates.format_flops_per_s[step.layout]
        element, aligned, batched = self.element_bytes, step.alignment, step.batched
        return rate_of_matmul(step.layout, element_bytes=element, alignment=aligned, batched=batched, rates=self.rates)

    def run_s(self, step: Computation) -> Value:
        """Time of a computation in the schedule: its consecutive calls, s."""
        found = self.stretched.get(id(step))
        if found is None:
            once = isinstance(step, Kernel) and step.with_gather
            call_s = self.call_s(step)
            found = self.stretched[id(step)] = step, call_s if once else step.calls.evaluate(self.values) * call_s
        return found[1]


def compute_s(program: StepProgram, clock: ComputeClock, stage: Stage = ONLY) -> Value:
    """All computation of one step and rank of a stage, s: the left fold over the program."""
    total: Value = 0.0
    counts = dict[Size, Value]()
    for step, count in program.calls(stage):
        if isinstance(step, Computation):
            if count not in counts:
                counts[count] = count.evaluate(clock.values)
            total = total + counts[count] * clock.call_s(step)
    return total


GEMMS, ATTENTION, SCANS = "GEMMs", "attention", "scans and fused kernels"
ELEMENT_WISE, OPTIMIZER = "element-wise kernels", "optimizer and gradient norm"
OFFLOAD = "waiting for offload to the host"


def kind_of(step: Computation) -> str:
    """Its kind of computation."""
    if isinstance(step, MatMul):
        return GEMMS
    if isinstance(step, Attention) or (isinstance(step, Measured) and step.layer.endswith(CORE)):
        return ATTENTION
    if isinstance(step, Measured) and step.flops.coefficient:
        return SCANS
    if isinstance(step, HostWork):
        return OFFLOAD
    return OPTIMIZER if step.phase == "step" else ELEMENT_WISE


UNMEASURED = "kernels of assumed rates"


def _evidence(step: Computation, rates: ComputeRates) -> str:
    """Its kind of computation, but kernels whose rate was assumed are one of their own."""
    if not isinstance(step, Measured):
        return kind_of(step)
    # Imported here: most models have no such kernel, and start-up time is theirs.
    from axonn_tune.cost.kernels import kernel_rate

    rate = kernel_rate(step.kernel, rates.accelerator, backward=step.backward)
    return UNMEASURED if rate.kind == "assumed" else kind_of(step)


def seconds_by_kind(program: StepProgram, clock: ComputeClock, stage: Stage) -> dict[str, float]:
    """All computation of one step and rank of a stage by its kind, s, as its rates are known; of one candidate."""
    sums = dict[str, float]()
    for step, count in program.calls(stage):
        if isinstance(step, Computation):
            spent_s = float(count.evaluate(clock.values)) * float(clock.call_s(step))
            kind = _evidence(step, clock.rates)
            sums[kind] = sums.get(kind, 0.0) + spent_s
    return sums


ROUNDING = 1e-9
"""Waits below this share of a step are rounding errors of sums."""


def exposed_s(iteration_s: Value, compute_s: Value) -> Value:
    """Exposed communication of a step, s; exactly 0 where it is rounding noise."""
    waiting_s = iteration_s - compute_s
    return np.where(waiting_s < ROUNDING * iteration_s, 0.0, waiting_s)


def contended_s(communication_s: Value, compute_s: Value, iteration_s: Value, *, contention: Value) -> Value:
    """Compute slowdown from overlap, s: communication and computation share SMs and memory bandwidth.

    It is proportional to the overlapped communication. Source: Galvatron (arXiv 2211.13878); FSDP's steps in
    tools/fit/software.py, where it is fitted.
    """
    if not np.any(contention):
        return 0.0
    return lost_s(communication_s - exposed_s(iteration_s, compute_s), compute_s, contention=contention)


def lost_s(hidden_s: Value, compute_s: Value, *, contention: Value) -> Value:
    """`contention` times overlapped communication, s, which is at most the computation."""
    return contention * np.minimum(np.maximum(hidden_s, 0.0), compute_s)
