"""Predicted times of published matrix products: single kernels in short bursts, before long training slows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from axonn_tune.accuracy.judged import Judged
from axonn_tune.accuracy.records import number, read_records
from axonn_tune.accuracy.sites import machine_of
from axonn_tune.cost.compute import ComputeRates, compute_rates, matmul_time_s
from axonn_tune.program.size import PLAIN
from axonn_tune.specs.machine import MatmulLayout
from axonn_tune.specs.workload import ELEMENT_SIZES, Precision

NEEDED = ("gpu", "m", "n", "k", "latency_us")
LARGE_FLOPS = 1e10
"""Products from this size on count as large: training has few smaller ones."""

_PRECISIONS: dict[str, Precision] = {"bf16": "bf16", "fp16": "fp16", "float16": "fp16", "bfloat16": "bf16"}
_LAYOUTS: dict[str, MatmulLayout] = {"NN": "NN", "NT": "NT", "TN": "TN"}


@dataclass(frozen=True)
class Card:
    """An accelerator on its own, for `sites`."""

    gpu: str
    system: str = ""
    network: str = ""
    gpu_memory_gb: float | None = None
    gpus_per_node: int | None = None


def judge_products(path: Path) -> tuple[Judged, ...]:
    """Every row of a file with its predicted time; rows out of scope say why. Errors as `read_records`."""
    return tuple(_judge(record, line) for line, record in read_records(path, needed=NEEDED))


def _judge(record: Mapping[str, str], line: int) -> Judged:
    name = record.get("id") or f"line {line}"
    latency_us = number(record, "latency_us")
    measured_s = None if latency_us is None else latency_us * 1e-6
    group = f"{record['gpu']}, {record.get('layout', '')}".rstrip(", ")
    sizes = [number(record, key) for key in ("m", "n", "k")]
    precision = _PRECISIONS.get(record.get("dtype", "bf16").lower().split("/")[0])
    if precision is None:
        return Judged(name, group, measured_s, why_not=f"number format {record.get('dtype')!r} is not modelled")
    rates = _rates(record["gpu"], precision)
    if rates is None:
        return Judged(name, group, measured_s, why_not=f"no machine profile has the accelerator {record['gpu']!r}")
    if None in sizes:
        return Judged(name, group, measured_s, why_not="no shape")
    m, n, k = (float(size or 0.0) for size in sizes)
    batch = number(record, "batch") or 1.0
    predicted_s = matmul_time_s(
        m * batch,
        n,
        k,
        flops_per_s=rates.matmul_flops_per_s[_LAYOUTS.get(record.get("layout", ""), "NN")],
        element_bytes=float(ELEMENT_SIZES[precision].compute),
        rates=rates,
        arithmetic=PLAIN,
    )
    return Judged(name, group, measured_s, float(predicted_s), large=2.0 * batch * m * n * k >= LARGE_FLOPS)


@lru_cache(maxsize=256)
def _rates(gpu: str, precision: Precision) -> ComputeRates | None:
    """Rates of a burst: without what long training takes away."""
    machine = machine_of(Card(gpu))
    if machine is None or precision not in machine.accelerator.peak_tflops:
        return None
    return compute_rates(machine.accelerator.model_copy(update={"training_share": 1.0}), precision)
