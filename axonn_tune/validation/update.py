"""Updates a machine profile with measured runs: few factors, each a median, each reported.

For every collective and tier one factor of its latency, from latency-bound terms, and one of its bandwidth, from
bandwidth-bound terms; and one of all computation. Medians, so that a disturbed term has no pull.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias

from axonn_tune.calibration.fit import rounded
from axonn_tune.calibration.profile import validated
from axonn_tune.cost.collectives import lines, route
from axonn_tune.specs.machine import (
    COLLECTIVE_KINDS,
    Accelerator,
    CollectiveFactors,
    CollectiveKind,
    Machine,
    Source,
    Tier,
)
from axonn_tune.specs.results import MeasuredConfiguration, MeasuredTerm, Measurements, RunTimes
from axonn_tune.validation.comparison import price

Part: TypeAlias = Literal["latency", "bandwidth"]
_Key: TypeAlias = tuple[CollectiveKind, int, Part]
_LEAST_TERMS = 3
"""A factor from fewer terms would be their noise."""


@dataclass(frozen=True)
class Change:
    """One changed number of a profile. what: in words; factor: of the time it stands for; terms: behind it."""

    what: str
    factor: float
    terms: int

    @property
    def words(self) -> str:
        """For a person."""
        return f"{self.what}: {self.factor - 1.0:+.1%} time, the median of {self.terms}"


@dataclass(frozen=True)
class Update:
    """An updated profile, and its changes."""

    machine: Machine
    changes: tuple[Change, ...]


def updated(measurements: Measurements, machine: Machine) -> Update:
    """The profile that explains the measurements better; `measurements` must hold its predictions."""
    source = f"runs of {measurements.model.name} on {measurements.place.ranks} ranks, {measurements.created[:10]}"
    found = _factors(measurements, machine)
    tiers = tuple(_tier(tier, number, found, source) for number, tier in enumerate(machine.tiers))
    computing = _computing(measurements, machine)
    accelerator = _accelerator(machine.accelerator, computing, source) if computing else machine.accelerator
    changes = [_change(machine, key, ratios) for key, ratios in found.items()]
    if computing:
        changes.append(Change("computation", median(computing), len(computing)))
    changed = machine.model_copy(update={"tiers": tiers, "accelerator": accelerator})
    return Update(validated(changed), tuple(changes))


def _change(machine: Machine, key: _Key, ratios: list[float]) -> Change:
    kind, tier, part = key
    return Change(f"{part} of {kind} over network level {machine.tiers[tier].name}", median(ratios), len(ratios))


def _factors(measurements: Measurements, machine: Machine) -> dict[_Key, list[float]]:
    """Measured / predicted of the terms of each collective, tier and part that has enough."""
    found: dict[_Key, list[float]] = {}
    for configuration in measurements.configurations:
        for term in configuration.terms:
            key = _key(term, configuration, machine)
            if key is not None and term.predicted_s:
                found.setdefault(key, []).append(median(term.measured_s) / term.predicted_s)
    return {key: ratios for key, ratios in sorted(found.items()) if len(ratios) >= _LEAST_TERMS and median(ratios) > 0}


def _key(term: MeasuredTerm, configuration: MeasuredConfiguration, machine: Machine) -> _Key | None:
    """The number of the profile that dominates a term's time."""
    grid = configuration.grid.grid()
    path = route(grid.group_shape(term.axis), machine.tiers, grid.world)
    kind = next((one for one in COLLECTIVE_KINDS if one == term.op), None)
    if kind is None or path.outermost < 0:
        return None
    ways = lines(kind, path, machine)
    line = min(ways, key=lambda one: one.latency_s + term.bytes / one.bandwidth_bytes_per_s)
    waits = line.latency_s > term.bytes / line.bandwidth_bytes_per_s
    return kind, path.outermost, "latency" if waits else "bandwidth"


def _tier(tier: Tier, number: int, found: Mapping[_Key, list[float]], source: str) -> Tier:
    """The tier with its factors of each collective multiplied."""
    factors = dict(tier.collectives or {})
    for kind in COLLECTIVE_KINDS:
        latency, bandwidth = found.get((kind, number, "latency")), found.get((kind, number, "bandwidth"))
        if latency or bandwidth:
            before = factors.get(kind) or CollectiveFactors(latency_factor=1.0, bandwidth_factor=1.0)
            factors[kind] = CollectiveFactors(
                latency_factor=rounded(before.latency_factor * (median(latency) if latency else 1.0)),
                bandwidth_factor=rounded(before.bandwidth_factor / (median(bandwidth) if bandwidth else 1.0)),
            )
    if factors == dict(tier.collectives or {}):
        return tier
    sources = tier.sources | {"collectives": _source(tier.sources, "collectives", source)}
    return tier.model_copy(update={"collectives": factors, "sources": sources})


def _computing(measurements: Measurements, machine: Machine) -> list[float]:
    """Measured / predicted computation of each configuration, both without contention."""
    contention, found = machine.accelerator.contention, []
    for one in measurements.configurations:
        alone_s = median(_alone_s(run, contention=contention) for run in one.runs)
        predicted_s = price(measurements.model, machine, one).alone_s
        if alone_s and predicted_s:
            found.append(alone_s / predicted_s)
    return found


def _alone_s(run: RunTimes, *, contention: float) -> float:
    """Computation of a run without its slowdown from overlap, s: `cost.utilisation.contended_s` solved for it."""
    overlapped_s = max(0.0, run.communication_s - run.exposed_communication_s)
    return max(run.compute_s - contention * overlapped_s, run.compute_s / (1.0 + contention))


def _accelerator(before: Accelerator, ratios: list[float], source: str) -> Accelerator:
    """All rates divided, all fixed times multiplied by the median."""
    factor = median(ratios)
    changed: dict[str, object] = {
        "peak_tflops": {precision: rounded(peak / factor) for precision, peak in before.peak_tflops.items()},
        "memory_bandwidth_gb_per_s": rounded(before.memory_bandwidth_gb_per_s / factor),
        "matmul_launch_us": rounded(before.matmul_launch_us * factor),
        "kernel_launch_us": rounded(before.kernel_launch_us * factor),
    }
    if before.vector_tflops:
        changed["vector_tflops"] = {name: rounded(peak / factor) for name, peak in before.vector_tflops.items()}
    sources = before.sources | {name: _source(before.sources, name, source) for name in changed}
    return before.model_copy(update=changed | {"sources": sources})


def _source(sources: Mapping[str, Source], name: str, source: str) -> Source:
    """The source of a number, and what it was then fitted to; only the last fit is kept."""
    before = sources[name].source.partition("; then fitted to ")[0] if name in sources else "the tier's own"
    return Source(kind="fitted", source=f"{before}; then fitted to {source}")
