"""Rates fitted to measured times, each a sum of unknown costs with known factors.

The factors come from the cost model. A collective takes launch + Σ hops_t·α_t + bytes·c_t/β_t, where t in the last
term is the tightest tier; which tier is tightest follows from the fit, so the fit repeats until it does not change.
Computation takes a fixed time per GEMM and per kernel, time per FLOP of each layout and of attention, and time per
byte. Robust non-negative least squares on relative errors finds all unknowns at once.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeAlias, get_args

import numpy as np

from axonn_tune.cost.collectives import lines, route
from axonn_tune.errors import UsageError
from axonn_tune.grid import Grid, GroupShape
from axonn_tune.program.dimensions import symbol_values
from axonn_tune.program.operations import Attention, Computation, Kernel, MatMul
from axonn_tune.program.size import as_size
from axonn_tune.program.step import build_step, bundled
from axonn_tune.specs.machine import Machine, MatmulLayout, Tier
from axonn_tune.specs.points import (
    AttentionProbe,
    CollectiveProbe,
    CopyProbe,
    MatmulProbe,
    Probe,
    Setting,
    StepProbe,
    TransferProbe,
    collective_or_message,
)

Factors: TypeAlias = dict[str, float]
"""Components of one time: unknown → its factor."""
ComputeProbe: TypeAlias = MatmulProbe | AttentionProbe | StepProbe

LINEAR_BEYOND = 0.08
"""Relative errors beyond this count by their size instead of its square, to limit the influence of outliers."""
_OUTLIER = 0.3
_OUTLIER_IN_DEVIATIONS = 5.0
_REWEIGHTINGS = 20

TRANSFER = "transfer"
"""Sent besides collectives: point-to-point messages."""
LAUNCH = "launch_s"
_TIER_ROUNDS = 8
_NO_LATENCY_US, _UNLIMITED_GB_PER_S = 0.0, 1e15
_HELD_OUT = 4
"""Every fourth probe is held out to evaluate the fit of the others, among which its shape and size occur again."""

LAYOUTS: tuple[MatmulLayout, ...] = get_args(MatmulLayout)
_TILES = (1, 8, 16, 32, 64, 128)
_MATMUL, _RAMP, _KERNEL, _BYTE = "matmul_launch_s", "ramp_flop_s", "kernel_launch_s", "byte_s"
_FORWARD, _BACKWARD = "attention_forward_flop_s", "attention_backward_flop_s"


def rounded(value: float) -> float:
    """Rounded to four digits."""
    return float(f"{value:.4g}")


@dataclass(frozen=True)
class Solution:
    """Unknowns by name, and predicted / measured - 1 of each row; `outliers` are numbers of rows."""

    values: Mapping[str, float]
    errors: tuple[float, ...]
    outliers: tuple[int, ...]

    @property
    def typical_error(self) -> float:
        """Mean of the absolute relative errors, outliers left out."""
        kept = [abs(error) for row, error in enumerate(self.errors) if row not in self.outliers]
        return float(np.mean(kept)) if kept else 0.0


def solve(rows: Sequence[Factors], times_s: Sequence[float]) -> Solution:
    """Non-negative least squares on relative errors, reweighted to limit the influence of outliers (Huber 1964)."""
    from scipy.optimize import nnls

    names = sorted({name for row in rows for name in row})
    matrix = np.array([[row.get(name, 0.0) for name in names] for row in rows]) / np.array(times_s)[:, None]
    # Unknowns differ by ten orders of magnitude: without this the small ones are lost in rounding.
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    weights = np.ones(len(rows))
    values = np.zeros(len(names))
    for _ in range(_REWEIGHTINGS):
        values, _ = nnls(matrix / scale * weights[:, None], weights)
        errors = matrix / scale @ values - 1.0
        weights = np.sqrt(np.minimum(1.0, LINEAR_BEYOND / np.maximum(np.abs(errors), 1e-12)))
    errors = matrix / scale @ values - 1.0
    found = dict(zip(names, (values / scale).tolist(), strict=True))
    deviation = 1.4826 * float(np.median(np.abs(errors - np.median(errors))))
    limit = max(_OUTLIER, _OUTLIER_IN_DEVIATIONS * deviation)
    return Solution(found, tuple(errors.tolist()), tuple(np.flatnonzero(np.abs(errors) > limit).tolist()))


@dataclass(frozen=True)
class CommunicationFit:
    """Launch, α and β in SI units by `(transport, tier)`; errors of predicted / measured - 1 by probe."""

    launch_s: float
    latency_s: Mapping[tuple[str, int], float]
    bandwidth_bytes_per_s: Mapping[tuple[str, int], float]
    errors: Mapping[Probe, float]
    outliers: tuple[Probe, ...]
    held_out_errors: tuple[float, ...] = ()

    @property
    def held_out_error(self) -> float | None:
        """Mean absolute error of the held-out probes, None without any."""
        errors = [abs(error) for error in self.held_out_errors]
        return rounded(sum(errors) / len(errors)) if errors else None


def fit_communication(measured: Mapping[Probe, float], machine: Machine, *, world: int) -> CommunicationFit:
    """Fit all transports and tiers at once; `machine` gives tiers and algorithms, its rates are ignored.

    world: ranks that took part. Every fourth probe is first held out to evaluate the fit of the others; then all are
    fitted.
    """
    probes: list[Probe] = [probe for probe in measured if collective_or_message(probe)]
    shares = {probe: _shares(probe, machine, world) for probe in probes}
    held_out, kept = probes[2::_HELD_OUT], list(probes)
    del kept[2::_HELD_OUT]
    held_out_errors: tuple[float, ...] = ()
    if held_out:
        part = _fit_probes(kept, measured, shares)
        held_out_errors = tuple(part.predict(probe) / measured[probe] - 1.0 for probe in held_out if part.knows(probe))
    whole = _fit_probes(probes, measured, shares)
    errors: dict[Probe, float] = dict(zip(probes, whole.solution.errors, strict=True))
    latency, bandwidth = whole.rates(measured)
    return CommunicationFit(
        whole.solution.values[LAUNCH],
        latency,
        bandwidth,
        errors,
        tuple(probes[row] for row in whole.solution.outliers),
        held_out_errors,
    )


@dataclass(frozen=True)
class _Shares:
    """Components of a probe's time: α by tier, and time per 1/β by tier, of which the largest counts."""

    transport: str
    hops: dict[int, float]
    loads: dict[int, float]

    def row(self, tight: int) -> Factors:
        """Factors of the unknowns, with `tight` the tier whose bandwidth counts."""
        found = {LAUNCH: 1.0, _beta(self.transport, tight): self.loads[tight]}
        return found | {_alpha(self.transport, tier): count for tier, count in self.hops.items() if count}


@dataclass(frozen=True)
class _CommunicationModel:
    """A solution with the factors that predict from it."""

    shares: Mapping[Probe, _Shares]
    solution: Solution

    def knows(self, probe: Probe) -> bool:
        """Whether the transport and the tiers of a probe were among those fitted."""
        shares = self.shares[probe]
        return all(name in self.solution.values for tier in shares.loads for name in shares.row(tier))

    def tight(self, probe: Probe) -> int:
        """The tier whose bandwidth counts."""
        shares = self.shares[probe]
        values = self.solution.values
        return max(shares.loads, key=lambda tier: shares.loads[tier] * values.get(_beta(shares.transport, tier), 0.0))

    def predict(self, probe: Probe) -> float:
        """Time of a call, s."""
        row = self.shares[probe].row(self.tight(probe))
        return sum(self.solution.values[name] * factor for name, factor in row.items())

    def rates(
        self, measured: Mapping[Probe, float]
    ) -> tuple[dict[tuple[str, int], float], dict[tuple[str, int], float]]:
        """α and β by transport and tier, for those that were measured.

        Where another tier is always tighter, or noise exceeds the time of bytes, β is the largest that any
        single point shows.
        """
        latency: dict[tuple[str, int], float] = {}
        bandwidth: dict[tuple[str, int], float] = {}
        values = self.solution.values
        for probe, shares in self.shares.items():
            for tier, load in shares.loads.items():
                key = (shares.transport, tier)
                latency[key] = values.get(_alpha(*key), 0.0)
                fitted = values.get(_beta(*key), 0.0)
                bandwidth[key] = 1.0 / fitted if fitted else max(bandwidth.get(key, 0.0), load / measured[probe])
        return latency, bandwidth


def _fit_probes(
    chosen: Sequence[Probe], measured: Mapping[Probe, float], shares: Mapping[Probe, _Shares]
) -> _CommunicationModel:
    """Fit some probes, until the tightest tiers stay the same."""
    times = [measured[probe] for probe in chosen]
    tight = {probe: max(shares[probe].loads) for probe in chosen}
    for _ in range(_TIER_ROUNDS):
        fitted = _CommunicationModel(shares, solve([shares[probe].row(tight[probe]) for probe in chosen], times))
        now = {probe: fitted.tight(probe) for probe in chosen}
        if now == tight:
            break
        tight = now
    return fitted


def _shares(probe: Probe, machine: Machine, world: int) -> _Shares:
    """Factors of every α and 1/β, by asking the cost model with one of them at a time."""
    if isinstance(probe, TransferProbe):
        return _transfer_shares(probe, machine.tiers, world)
    assert isinstance(probe, CollectiveProbe), "the other kind of probe that sends"
    shape = GroupShape(((probe.group, probe.stride),))
    hops, loads = {}, {}
    for number in range(route(shape, machine.tiers, world).outermost + 1):
        slow = machine.model_copy(update={"tiers": _only(machine.tiers, number)})
        line = lines(probe.op, route(shape, slow.tiers, world), slow)[0]
        hops[number] = line.latency_s - slow.library.launch_s
        loads[number] = probe.size_bytes / line.bandwidth_bytes_per_s
    return _Shares(probe.op, hops, loads)


def _transfer_shares(probe: TransferProbe, tiers: Sequence[Tier], world: int) -> _Shares:
    """A message to a rank `stride` further on: one hop; a domain sends what leaves it."""
    hops, loads = {0: 1.0}, {0: float(probe.size_bytes)}
    for number in range(1, len(tiers)):
        domain = tiers[number - 1].ranks or world
        if domain < world:
            hops = {number: 1.0}
            loads[number] = float(probe.size_bytes) * min(probe.stride, domain)
    return _Shares(TRANSFER, hops, loads)


def _only(tiers: Sequence[Tier], number: int) -> tuple[Tier, ...]:
    """Tiers without cost except one: 1 s per hop, 1 byte/s."""
    return tuple(
        tier.model_copy(
            update={
                "latency_us": 1e6 if position == number else _NO_LATENCY_US,
                "bandwidth_gb_per_s": 1e-9 if position == number else _UNLIMITED_GB_PER_S,
                "measured": None,
                "collectives": None,
            }
        )
        for position, tier in enumerate(tiers)
    )


def _alpha(transport: str, tier: int) -> str:
    return f"alpha:{transport}:{tier}"


def _beta(transport: str, tier: int) -> str:
    return f"beta:{transport}:{tier}"


@dataclass(frozen=True)
class ComputeFit:
    """Fitted rates, SI units; tile: the rounding of rows and columns that fits best; peak: of the best GEMM.

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
    """Fit the rates to times of probes; UsageError without GEMMs of each layout, attention, a copy and a step."""
    kinds = {probe.layout if isinstance(probe, MatmulProbe) else probe.what for probe in measured}
    missing = [what for what in (*LAYOUTS, "attention", "copy", "step") if what not in kinds]
    if missing:
        raise UsageError(f"not measured within the budget: {', '.join(missing)}; raise --budget")
    probes = [probe for probe in measured if isinstance(probe, MatmulProbe | AttentionProbe | StepProbe)]
    times = [measured[probe] for probe in probes]
    tried = {tile: solve([compute_factors(probe, setting, tile) for probe in probes], times) for tile in _TILES}
    tile = min(_TILES, key=lambda one: tried[one].typical_error)
    found = tried[tile].values
    copies = {probe.size_bytes: seconds for probe, seconds in measured.items() if isinstance(probe, CopyProbe)}
    # Bytes read and written per second by the largest: smaller ones stay in a cache.
    copy_rate = 2.0 * max(copies) / copies[max(copies)]
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


def _rate(time_per_one: float, most: float) -> float:
    """The rate of a fitted time, at most the measured one: a fit may find that something costs nothing."""
    return min(most, 1.0 / time_per_one) if time_per_one > 0.0 else most


def compute_factors(probe: ComputeProbe, setting: Setting, tile: int) -> Factors:
    """Components of a probe's time."""
    row: Factors = {}
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
    program = build_step(launch.model, launch.workload, recompute="none", options=bundled(compiled=launch.compile))
    for step, count in program.calls():
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
