"""Rates of one rank, fitted to what it was measured to compute: products, attention, copies, whole steps.

Every measured time is a sum of the cost model's own terms with unknown factors: a fixed time per product
and per kernel, time per FLOP of each layout and of attention, time per byte. Non-negative least squares on
relative errors finds them all at once.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import TypeAlias

from axonn_tune.calibration.least_squares import Row, Solution, solve
from axonn_tune.errors import UsageError
from axonn_tune.grid import Grid
from axonn_tune.program.dimensions import symbol_values
from axonn_tune.program.operations import Attention, Computation, Kernel, MatMul
from axonn_tune.program.size import as_size
from axonn_tune.program.step import build_step
from axonn_tune.specs.machine import MatmulLayout
from axonn_tune.specs.points import AttentionProbe, CopyProbe, MatmulProbe, Probe, Setting, StepProbe

ComputeProbe: TypeAlias = MatmulProbe | AttentionProbe | StepProbe
LAYOUTS: tuple[MatmulLayout, ...] = ("NN", "NT", "TN")
_TILES = (1, 8, 16, 32, 64, 128)
_MATMUL, _RAMP, _KERNEL, _BYTE = "matmul_launch_s", "ramp_flop_s", "kernel_launch_s", "byte_s"
_FORWARD, _BACKWARD = "attention_forward_flop_s", "attention_backward_flop_s"


@dataclass(frozen=True)
class ComputeFit:
    """Fitted rates, SI units; tile: the rounding of rows and columns that fits best; peak: of the best product.

    copy_bytes_per_s: of memory, not of a cache.
    """

    matmul_launch_s: float
    matmul_ramp: float
    kernel_launch_s: float
    memory_bytes_per_s: float
    copy_bytes_per_s: float
    flops_per_s: Mapping[MatmulLayout, float]
    attention_forward_flops_per_s: float
    attention_backward_flops_per_s: float
    peak_flops_per_s: float
    tile: int
    solution: Solution
    outliers: tuple[Probe, ...]


def fit_compute(measured: Mapping[Probe, float], setting: Setting) -> ComputeFit:
    """Fit the rates to times of probes; UsageError without products of each layout, attention, a copy and a step."""
    _require_enough(measured)
    probes = [probe for probe in measured if isinstance(probe, MatmulProbe | AttentionProbe | StepProbe)]
    times = [measured[probe] for probe in probes]
    tried = {tile: solve([row_of(probe, setting, tile) for probe in probes], times) for tile in _TILES}
    tile = min(_TILES, key=lambda one: tried[one].typical_error)
    found = tried[tile].values
    copy_rate = _copy_rate(measured)
    rates = [2.0 * probe.m * probe.n * probe.k / measured[probe] for probe in probes if isinstance(probe, MatmulProbe)]
    flops_per_s = {layout: _rate(found[layout], max(rates)) for layout in LAYOUTS}
    return ComputeFit(
        matmul_launch_s=found[_MATMUL],
        matmul_ramp=found[_RAMP] * statistics.fmean(flops_per_s.values()),
        kernel_launch_s=found[_KERNEL],
        memory_bytes_per_s=_rate(found[_BYTE], copy_rate),
        copy_bytes_per_s=copy_rate,
        flops_per_s=flops_per_s,
        attention_forward_flops_per_s=_rate(found[_FORWARD], max(rates)),
        attention_backward_flops_per_s=_rate(found[_BACKWARD], max(rates)),
        peak_flops_per_s=max(rates),
        tile=tile,
        solution=tried[tile],
        outliers=tuple(probes[row] for row in tried[tile].outliers),
    )


def _require_enough(measured: Mapping[Probe, float]) -> None:
    there = {probe.layout if isinstance(probe, MatmulProbe) else probe.what for probe in measured}
    missing = [what for what in (*LAYOUTS, "attention", "copy", "step") if what not in there]
    if missing:
        raise UsageError(f"not measured in time: {', '.join(missing)}; give calibrate more with --budget")


def _copy_rate(measured: Mapping[Probe, float]) -> float:
    """Bytes read and written per second by the largest copy: smaller ones stay in a cache."""
    copies = {probe.size_bytes: seconds for probe, seconds in measured.items() if isinstance(probe, CopyProbe)}
    return 2.0 * max(copies) / copies[max(copies)]


def _rate(time_per_one: float, most: float) -> float:
    """The rate of a fitted time, at most what was seen: a fit may find that something costs nothing beside the rest."""
    return min(most, 1.0 / time_per_one) if time_per_one > 0.0 else most


def row_of(probe: ComputeProbe, setting: Setting, tile: int) -> Row:
    """What the time of a probe is made of."""
    row: Row = {}
    for step, values, count in _operations(probe, setting):
        for name, factor in _terms(step, values, tile):
            row[name] = row.get(name, 0.0) + count * factor
    return row


def _operations(probe: ComputeProbe, setting: Setting) -> Iterator[tuple[Computation, Mapping[str, float], float]]:
    """The operations of the program behind a probe, with the values of their symbols and how often."""
    if isinstance(probe, MatmulProbe):
        sizes = (as_size(probe.m), as_size(probe.n), as_size(probe.k))
        yield MatMul("forward", "probe", *sizes, probe.layout), {}, 1.0
        return
    launch = setting.launches[probe.launch if isinstance(probe, StepProbe) else 0]
    batch = probe.sequences if isinstance(probe, AttentionProbe) else launch.micro_batch
    values = symbol_values(launch.model, launch.workload, Grid(), micro_batch=batch)
    values |= {"kept": float(launch.kept_layers), "unkept": float(launch.model.layers - launch.kept_layers)}
    for step, count in build_step(launch.model, launch.workload, recompute="none").calls():
        if not isinstance(step, MatMul | Attention | Kernel):
            continue
        if isinstance(probe, StepProbe):
            yield step, values, float(count.evaluate(values))
        elif step.layer == "attention.core" and (step.phase == "forward" or probe.backward):
            yield step, values, 1.0


def _terms(step: Computation, values: Mapping[str, float], tile: int) -> Iterator[tuple[str, float]]:
    """The unknowns of one operation with their factors, as the cost model prices it."""
    if isinstance(step, MatMul):
        m, n, k = (float(size.evaluate(values)) for size in (step.m, step.n, step.k))
        yield _MATMUL, 1.0
        tiled = ceil(m / tile) * tile * ceil(n / tile) * tile
        yield step.layout, 2.0 * tiled * k
        yield _RAMP, 2.0 * tiled
    elif isinstance(step, Attention):
        yield _KERNEL, 1.0
        yield _BACKWARD if step.backward else _FORWARD, float(step.flops.evaluate(values))
    elif step.size_bytes.coefficient:
        yield _KERNEL, 1.0
        yield _BYTE, float(step.size_bytes.evaluate(values))
