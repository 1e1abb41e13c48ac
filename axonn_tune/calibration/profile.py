"""The machine profile from measured points: fitted numbers, each with its source, and the measured host."""

from __future__ import annotations

import os
import socket
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date

import numpy as np

from axonn_tune.calibration.fit import (
    TRANSFER,
    CommunicationFit,
    ComputeFit,
    fit_communication,
    fit_compute,
    rounded,
)
from axonn_tune.errors import UsageError
from axonn_tune.launch.host import installed
from axonn_tune.specs.machine import (
    COLLECTIVE_KINDS,
    Accelerator,
    CollectiveFactors,
    Library,
    Machine,
    Measurement,
    Protocol,
    Source,
    Tier,
    Uncertainty,
)
from axonn_tune.specs.points import (
    AttentionProbe,
    CollectiveProbe,
    CopyProbe,
    MatmulProbe,
    Point,
    PointFile,
    Probe,
    Setting,
    StepProbe,
    TransferProbe,
    collective_or_message,
)
from axonn_tune.units import GIB, counted, show_bytes

LOOPBACK = "loopback: CPU time, not a network"
_QUANTILE = 0.8
_LEAST_UNCERTAINTY = 0.02
_LATENCY_FLOOR_US = 1e-3
"""Collectives have latency factors of a tier's latency, so it must not be zero."""


@dataclass(frozen=True)
class Calibration:
    """A profile with the fits behind it; no collectives on a single rank."""

    machine: Machine
    communication: CommunicationFit | None
    compute: ComputeFit


def medians(points: Sequence[Point]) -> dict[Probe, float]:
    """Median time of each probe, s, in the order first measured."""
    samples: dict[Probe, list[float]] = {}
    for point in points:
        samples.setdefault(point.probe, []).append(point.seconds)
    return {probe: statistics.median(found) for probe, found in samples.items()}


def calibrate(measured: PointFile, base: Machine, *, name: str, ranks_per_node: int | None = None) -> Calibration:
    """Fit a profile to points; numbers without measurement are `base`'s. UsageError if there is too little to fit."""
    setting, found = measured.setting, medians(measured.points)
    per_node = ranks_per_node or _ranks_per_node(setting)
    outline = base.model_copy(
        update={"tiers": _tiers(setting, per_node), "library": _library(setting, base.library.launch_us)}
    )
    compute, device = fit_compute(found, setting), setting.ranks[0].device
    world = len(setting.ranks)
    communication = fit_communication(found, outline, world=world) if world > 1 else None
    document = outline.model_copy(
        update={
            "name": name,
            "description": f"Measured: {_counted_ranks(setting)} of {device}; {_network_words(setting)}",
            "accelerator": _accelerator(base.accelerator, compute, setting),
            "uncertainty": _uncertainty(measured.points, found, compute, communication),
            "launcher": base.launcher.model_copy(update={"backend": setting.backend, "ranks_per_node": per_node}),
            "paper": None,
            "measured": _measurement(measured, compute, communication),
        }
    )
    if communication is not None:
        source = Source(kind="fitted", source=_origin(setting))
        tiers = tuple(_fitted_tier(tier, number, communication, source) for number, tier in enumerate(outline.tiers))
        launch_us, sources = rounded(communication.launch_s * 1e6), outline.library.sources | {"launch_us": source}
        library = outline.library.model_copy(update={"launch_us": launch_us, "sources": sources})
        document = document.model_copy(update={"tiers": tiers, "library": library})
    return Calibration(validated(document), communication, compute)


def validated(machine: Machine) -> Machine:
    """The same profile with its limits checked, which `model_copy` does not do."""
    return Machine.model_validate(machine.model_dump(by_alias=True, exclude_unset=True))


def _origin(setting: Setting) -> str:
    day = date.fromisoformat(setting.created[:10])
    return f"axonn-tune calibrate, {_counted_ranks(setting)} on {setting.ranks[0].host}, {setting.library}, {day}"


def _counted_ranks(setting: Setting) -> str:
    return f"{len(setting.ranks)} ranks" if len(setting.ranks) > 1 else "1 rank"


def is_loopback(setting: Setting) -> bool:
    """Whether all ranks shared one host's network stack, so nothing crossed a network."""
    return len({(place.host, place.network) for place in setting.ranks}) == 1 and setting.backend == "gloo"


def _network_words(setting: Setting) -> str:
    if is_loopback(setting):
        return LOOPBACK
    hosts, networks = len(_hosts(setting)), len({(place.host, place.network) for place in setting.ranks})
    places = counted(hosts, "host") if networks == hosts else f"{networks} networks of {counted(hosts, 'host')}"
    return f"{setting.library} between {places}"


def _hosts(setting: Setting) -> tuple[str, ...]:
    return tuple(dict.fromkeys(place.host for place in setting.ranks))


def _ranks_per_node(setting: Setting) -> int:
    """Consecutive ranks on a node: LOCAL_WORLD_SIZE where it was set, else those on a host.

    UsageError unless every node has as many.
    """
    known = {place.node_ranks for place in setting.ranks}
    if None in known:
        return _ranks_per_host(setting)
    per_node = max(count for count in known if count is not None)
    if len(known) > 1 or len(setting.ranks) % per_node:
        sizes = ", ".join(str(place.node_ranks) for place in setting.ranks)
        raise UsageError(f"nodes do not have as many ranks each; LOCAL_WORLD_SIZE, rank by rank: {sizes}")
    return per_node


def _ranks_per_host(setting: Setting) -> int:
    hosts = [place.host for place in setting.ranks]
    counts = {hosts.count(host) for host in hosts}
    per_host = hosts.count(hosts[0])
    blocks = [hosts[begin : begin + per_host] for begin in range(0, len(hosts), per_host)]
    if len(counts) > 1 or any(len(set(block)) > 1 for block in blocks):
        raise UsageError(f"ranks do not lie on hosts in equal blocks of consecutive ones: {', '.join(hosts)}")
    return per_host


def _tiers(setting: Setting, per_node: int) -> tuple[Tier, ...]:
    """The levels of the network, their rates still to be fitted."""
    world = len(setting.ranks)
    if per_node >= world or per_node == 1:
        name = "loopback" if is_loopback(setting) else "network" if per_node == 1 else "node"
        return (_unfitted(name),)
    return _unfitted("node", ranks=per_node), _unfitted("network")


def _unfitted(name: str, *, ranks: int | None = None) -> Tier:
    later = Source(kind="fitted", source="to be fitted")
    sources = {"latency_us": later, "bandwidth_gb_per_s": later}
    if ranks is not None:
        sources["ranks"] = Source(kind="fact", source="ranks of a node or host, or as given to calibrate")
    return Tier(name=name, ranks=ranks, latency_us=1.0, bandwidth_gb_per_s=1.0, sources=sources)


def _library(setting: Setting, launch_us: float) -> Library:
    """How the runtime's collectives go over this backend, as lines of one protocol."""
    gloo = setting.backend == "gloo"
    source = "the runtime's reduce-scatter over Gloo is an all-to-all and a sum" if gloo else "fitted as rings"
    return Library(
        name="Gloo" if gloo else "NCCL",
        version=setting.library,
        launch_us=launch_us,
        algorithms={
            "all_gather": ("ring",),
            "reduce_scatter": ("direct",) if gloo else ("ring",),
            "all_reduce": ("ring",),
        },
        protocols=(Protocol(name="tcp" if gloo else "fitted", latency_factor=1.0, bandwidth_factor=1.0),),
        sources={
            "launch_us": Source(kind="fitted", source="to be fitted"),
            "protocols": Source(kind="fact", source=source),
        },
    )


def _fitted_tier(tier: Tier, number: int, fit: CommunicationFit, source: Source) -> Tier:
    """A tier with the all-gather's rates, and the factors of the other collectives."""
    latency = {kind: fit.latency_s.get((kind, number), 0.0) * 1e6 for kind in COLLECTIVE_KINDS}
    bandwidth = {kind: fit.bandwidth_bytes_per_s.get((kind, number)) for kind in COLLECTIVE_KINDS}
    known = {kind: rate for kind, rate in bandwidth.items() if rate is not None}
    plain = fit.bandwidth_bytes_per_s.get((TRANSFER, number))
    if not known:
        raise UsageError(f"too little was measured over network level {tier.name}: raise --budget")
    own_us = max(*latency.values(), _LATENCY_FLOOR_US)
    own_bandwidth = known.get("all_gather") or plain or max(known.values())
    factors = {
        kind: CollectiveFactors(
            latency_factor=rounded(latency[kind] / own_us), bandwidth_factor=rounded(rate / own_bandwidth)
        )
        for kind, rate in known.items()
    }
    return tier.model_copy(
        update={
            "latency_us": rounded(own_us),
            "bandwidth_gb_per_s": rounded(own_bandwidth / 1e9),
            "collectives": factors,
            "sources": tier.sources | dict.fromkeys(("latency_us", "bandwidth_gb_per_s", "collectives"), source),
        }
    )


def _accelerator(base: Accelerator, fit: ComputeFit, setting: Setting) -> Accelerator:
    place = setting.ranks[0]
    shared = setting.backend == "gloo"
    on_host = [other.host for other in setting.ranks].count(place.host)
    measured = Source(kind="measured", source=f"{_origin(setting)}, all ranks busy")
    fitted = measured.model_copy(update={"kind": "fitted"})
    numbers = {
        "memory_gib": rounded(setting.memory_bytes / GIB / (on_host if shared else 1)),
        "memory_bandwidth_gb_per_s": rounded(fit.copy_bytes_per_s / 1e9),
        "peak_tflops": {setting.precision: rounded(fit.peak_flops_per_s / 1e12)},
        "memory_efficiency": _share(fit.memory_bytes_per_s / fit.copy_bytes_per_s),
        "matmul_efficiency": {layout: _share(rate / fit.peak_flops_per_s) for layout, rate in fit.flops_per_s.items()},
        "training_share": 1.0,
        "matmul_launch_us": rounded(fit.matmul_launch_s * 1e6),
        "matmul_ramp": rounded(fit.matmul_ramp),
        "matmul_tile": fit.tile,
        "attention_forward_efficiency": rounded(fit.attention_forward_flops_per_s / fit.peak_flops_per_s),
        "attention_backward_efficiency": rounded(fit.attention_backward_flops_per_s / fit.peak_flops_per_s),
        "kernel_launch_us": rounded(fit.kernel_launch_s * 1e6),
    }
    as_measured = ("memory_gib", "memory_bandwidth_gb_per_s", "peak_tflops")
    sources = {key: measured if key in as_measured else fitted for key in numbers}
    sources["training_share"] = Source(kind="fact", source="the rates were measured with all ranks busy")
    name = f"CPU: {setting.cores} cores of {place.device} for {counted(on_host, 'rank')}" if shared else place.device
    return base.model_copy(update={"name": name, **numbers, "sources": {**base.sources, **sources}})


def _uncertainty(
    points: Sequence[Point], found: Mapping[Probe, float], compute: ComputeFit, fit: CommunicationFit | None
) -> Uncertainty:
    """80% quantile of errors: of the fit, or of one sample, whichever is larger."""
    spread = {
        sends: [
            abs(point.seconds / found[point.probe] - 1.0)
            for point in points
            if collective_or_message(point.probe) == sends
        ]
        for sends in (True, False)
    }
    # The held-out errors; of the fit's own, if nothing was held out.
    fitted = () if fit is None else fit.held_out_errors or tuple(fit.errors.values())
    communication = max(_quantile(spread[True]), _quantile([abs(error) for error in fitted]))
    computing = max(_quantile(spread[False]), _quantile([abs(error) for error in compute.solution.errors]))
    source = Source(kind="measured", source="80% quantile of the errors of the fit and of single samples")
    return Uncertainty(
        communication=_share(communication),
        compute=_share(computing),
        sources={"communication": source, "compute": source},
    )


def _quantile(errors: Sequence[float]) -> float:
    return max(_LEAST_UNCERTAINTY, float(np.quantile(errors, _QUANTILE))) if errors else _LEAST_UNCERTAINTY


def _measurement(measured: PointFile, compute: ComputeFit, fit: CommunicationFit | None) -> Measurement:
    setting = measured.setting
    outliers = [*compute.outliers, *(fit.outliers if fit is not None else ())]
    return Measurement(
        created=setting.created,
        tool_version=setting.tool_version,
        torch_version=setting.torch_version,
        hosts=_hosts(setting),
        device=setting.ranks[0].device,
        ranks=len(setting.ranks),
        cores=setting.cores,
        network=_network_words(setting),
        samples=len(measured.points),
        held_out_error=fit.held_out_error if fit is not None else None,
        outliers=tuple(probe_words(probe) for probe in outliers),
    )


def _share(value: float) -> float:
    """At most 1, and as a document writes it."""
    return min(1.0, rounded(value))


def probe_words(probe: Probe) -> str:
    """Such as `all_gather of 1 MiB over 4 ranks, stride 2`."""
    if isinstance(probe, CollectiveProbe):
        return f"{probe.op} of {show_bytes(probe.size_bytes)} over {probe.group} ranks, stride {probe.stride}"
    if isinstance(probe, TransferProbe):
        return f"transfer of {show_bytes(probe.size_bytes)} to the rank at distance {probe.stride}"
    if isinstance(probe, MatmulProbe):
        return f"GEMM {probe.layout} of {probe.m} x {probe.n} x {probe.k}"
    if isinstance(probe, CopyProbe):
        return f"copy of {show_bytes(probe.size_bytes)}"
    if isinstance(probe, AttentionProbe):
        return f"attention {'forward and backward' if probe.backward else 'forward'} of {probe.sequences} sequences"
    assert isinstance(probe, StepProbe), "the last kind of probe"
    return f"training step {probe.launch + 1} on a single rank"


def differences(measured: Measurement) -> Iterator[str]:
    """How this host has changed since a profile was measured on it, in words; nothing where it was measured elsewhere.

    A login node checks what its compute nodes have measured. torch is not imported for its version.
    """
    if socket.gethostname() not in measured.hosts:
        return
    cores, before, now = len(os.sched_getaffinity(0)), measured.torch_version, installed("torch")
    if measured.cores is not None and measured.cores != cores:
        yield f"measured with {measured.cores} cores, this host has {cores}"
    if before is not None and now and _release(before) != _release(now):
        yield f"measured with torch {before}, this is torch {now}"


def _release(version: str) -> str:
    """A version without its build suffix."""
    return version.partition("+")[0]
