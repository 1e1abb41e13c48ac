"""The machine profile from measured points: numbers learned from them, each with its source, and the measured host.

The points are evidence like runs and logs (`learning`), and the cost model prices them: collectives and GEMMs as those
of other evidence, attention and whole steps as the operations of the program. What is not known before has a prior of
orders of magnitude, so that the points alone decide.
"""

from __future__ import annotations

import os
import socket
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import get_args

import numpy as np

from axonn_tune.cost.collectives import route
from axonn_tune.cost.compute import ComputeClock, compute_rates, compute_s
from axonn_tune.errors import UsageError
from axonn_tune.frameworks import software_on
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.grid import Grid, GroupShape
from axonn_tune.launch.host import installed
from axonn_tune.learning.evidence import Adjust, Sample, probe_samples
from axonn_tune.learning.learn import FACTORS, Prior, posterior_of
from axonn_tune.program.dimensions import symbol_values
from axonn_tune.program.operations import PLAIN, Attention, Kernel, MatMul, Measured
from axonn_tune.program.step import blocks_of, build_step, bundled, contents_of
from axonn_tune.specs.machine import (
    LEAST_FACTOR,
    MEASURED_KINDS,
    MOST_FACTOR,
    Accelerator,
    CollectiveFactors,
    CollectiveKind,
    Library,
    Machine,
    MatmulLayout,
    Measurement,
    Protocol,
    Source,
    Tier,
    Uncertainty,
)
from axonn_tune.specs.numbers import settled, validated
from axonn_tune.specs.points import (
    LOOPBACK,
    AttentionProbe,
    CollectiveProbe,
    CopyProbe,
    MatmulProbe,
    Point,
    PointFile,
    Probe,
    Setting,
    StepProbe,
)
from axonn_tune.specs.workload import ELEMENT_SIZES
from axonn_tune.units import GB, GIB, TERA, counted, rounded, show_bytes

_QUANTILE = 0.8
_LEAST_UNCERTAINTY = 0.02
_OUTLIER, _OUTLIER_IN_DEVIATIONS = 0.3, 5.0
_NOISE, _UNSEEN, _UNKNOWN = 0.04, 1e6, 2.0
"""Of logarithms: noise of a point, beyond twice which its influence is limited; of one held out; prior spread."""
_HELD_OUT = 5
"""Every fifth collective is held out to evaluate the fit of the others, among which its shape and size occur again."""
_TILES = (1, 8, 16, 32, 64, 128)
_LATENCY_US, _LAUNCH_US, _RAMP, _SHARE = 300.0, 20.0, 10.0, 0.5
"""Where the search for the numbers begins: orders of magnitude."""
LAYOUTS: tuple[MatmulLayout, ...] = get_args(MatmulLayout)
_ATTENTION = "attention_forward_efficiency", "attention_backward_efficiency"
_SHARES = (*_ATTENTION, "memory_efficiency")
_OF_GEMMS = (
    *(f"accelerator.matmul_efficiency.{layout}" for layout in LAYOUTS),
    *("accelerator.matmul_launch_us", "accelerator.matmul_ramp"),
)
_OF_THE_REST = tuple(f"accelerator.{name}" for name in (*_SHARES, "kernel_launch_us"))
_PLAIN = dict.fromkeys(MEASURED_KINDS, CollectiveFactors(latency_factor=1.0, bandwidth_factor=1.0))


@dataclass(frozen=True)
class Fit:
    """A profile with some numbers learned from points; errors of predicted / measured - 1 by probe."""

    machine: Machine
    errors: Mapping[Probe, float]

    @property
    def outliers(self) -> tuple[Probe, ...]:
        """Points that are far off, and had little influence."""
        errors = np.array(list(self.errors.values()))
        deviation = 1.4826 * float(np.median(np.abs(errors - np.median(errors))))
        limit = max(_OUTLIER, _OUTLIER_IN_DEVIATIONS * deviation)
        return tuple(probe for probe, error in self.errors.items() if abs(error) > limit)

    @property
    def typical_error(self) -> float:
        """Mean of the absolute errors, outliers left out."""
        kept = [abs(error) for probe, error in self.errors.items() if probe not in self.outliers]
        return statistics.fmean(kept) if kept else 0.0


def _fit(
    probes: Sequence[Probe],
    samples: Sequence[Sample],
    outline: Machine,
    paths: Sequence[str],
    held_out: Sequence[Probe] = (),
) -> Fit:
    """Learn the numbers at some paths of a profile. probes: those of the samples; held_out: without influence."""
    prior = Prior(outline, tuple(paths), np.eye(len(paths)) * _UNKNOWN**2)
    noise = np.array([_UNSEEN if probe in held_out else _NOISE for probe in probes])
    posterior = posterior_of(samples, prior, noise=noise)
    errors = dict(zip(probes, np.expm1(posterior.residuals).tolist(), strict=True))
    return Fit(prior.adjust(posterior.found)(outline), errors)


def fit_communication(found: Mapping[Probe, float], outline: Machine, *, world: int) -> tuple[Fit, tuple[float, ...]]:
    """α and β of each collective over each network level, and the errors of those that were first held out.

    outline: gives levels and algorithms; its rates are ignored. world: ranks that took part.
    """
    probes = sorted(
        (probe for probe in found if isinstance(probe, CollectiveProbe)),
        key=lambda one: (one.op, one.group, one.stride),
    )
    times: dict[Probe, float] = {probe: found[probe] for probe in probes}
    crossed = measured_kinds(probes, outline, world=world)
    for tier in outline.tiers:
        if not crossed[tier.name]:
            raise UsageError(f"too little was measured over network level {tier.name}: raise --budget")
    start = {"latency_us": _LATENCY_US, "bandwidth_gb_per_s": _fastest_gb_per_s(times), "collectives": _PLAIN}
    outline = outline.model_copy(update={"tiers": tuple(tier.model_copy(update=start) for tier in outline.tiers)})
    paths = [
        f"tiers.{tier.name}.collectives.{kind}.{factor}"
        for tier in outline.tiers
        for kind in crossed[tier.name]
        for factor in FACTORS
    ]
    paths.append("library.launch_us")
    samples = probe_samples(times, outline, AXONN_TUNE, name="points", world=world)
    held_out = [probe for probe in found if isinstance(probe, CollectiveProbe)][2::_HELD_OUT]
    unseen = _fit(probes, samples, outline, paths, held_out).errors if held_out else {}
    known = measured_kinds([probe for probe in probes if probe not in held_out], outline, world=world)
    fair = (
        probe
        for probe in held_out
        if all(probe.op in known[name] for name, kinds in crossed.items() if probe.op in kinds)
    )
    return _fit(probes, samples, outline, paths), tuple(unseen[probe] for probe in fair)


def _fastest_gb_per_s(found: Mapping[Probe, float]) -> float:
    """Most bytes of a collective's buffer over its time, GB/s."""
    return max(probe.size_bytes / time_s for probe, time_s in found.items() if isinstance(probe, CollectiveProbe)) / GB


def measured_kinds(
    probes: Iterable[CollectiveProbe], outline: Machine, *, world: int
) -> dict[str, tuple[CollectiveKind, ...]]:
    """For each network level the collectives of which a group reached it, and no further."""
    reached = {
        (route(GroupShape(((one.group, one.stride),)), outline.tiers, world).outermost, one.op) for one in probes
    }
    return {
        tier.name: tuple(kind for kind in MEASURED_KINDS if (number, kind) in reached)
        for number, tier in enumerate(outline.tiers)
    }


def fit_compute(found: Mapping[Probe, float], outline: Machine, setting: Setting) -> Fit:
    """Rates of computation; UsageError without GEMMs of each layout, attention, a copy and a step."""
    kinds = {probe.layout if isinstance(probe, MatmulProbe) else probe.what for probe in found}
    missing = [what for what in (*LAYOUTS, "attention", "copy", "step") if what not in kinds]
    if missing:
        raise UsageError(f"not measured within the budget: {', '.join(missing)}; raise --budget")
    gemms = [probe for probe in found if isinstance(probe, MatmulProbe)]
    others = [probe for probe in found if isinstance(probe, AttentionProbe | StepProbe)]
    copies = {probe.size_bytes: seconds for probe, seconds in found.items() if isinstance(probe, CopyProbe)}
    accelerator = outline.accelerator.model_copy(
        update={
            "peak_tflops": {setting.precision: max(2.0 * one.m * one.n * one.k / found[one] for one in gemms) / TERA},
            # Bytes read and written per second by the largest: smaller ones stay in a cache.
            "memory_bandwidth_gb_per_s": 2.0 * max(copies) / copies[max(copies)] / GB,
            "training_share": 1.0,
            **dict.fromkeys(_SHARES, _SHARE),
            "matmul_efficiency": dict.fromkeys(LAYOUTS, _SHARE),
            "matmul_launch_us": _LAUNCH_US,
            "kernel_launch_us": _LAUNCH_US,
            "matmul_ramp": _RAMP,
        }
    )
    tried = []
    for tile in _TILES:
        machine = outline.model_copy(update={"accelerator": accelerator.model_copy(update={"matmul_tile": tile})})
        samples = probe_samples({probe: found[probe] for probe in gemms}, machine, AXONN_TUNE, name="points")
        tried.append((_fit(gemms, samples, machine, _OF_GEMMS), samples, machine))
    _, samples, machine = min(tried, key=lambda one: one[0].typical_error)
    samples += [program_sample(probe, found[probe], machine, setting) for probe in others]
    return _fit([*gemms, *others], samples, machine, (*_OF_GEMMS, *_OF_THE_REST))


def program_sample(probe: AttentionProbe | StepProbe, measured_s: float, machine: Machine, setting: Setting) -> Sample:
    """A probe of the operations of a program of one rank."""
    launch = setting.launches[probe.launch if isinstance(probe, StepProbe) else 0]
    batch = probe.sequences if isinstance(probe, AttentionProbe) else launch.micro_batch
    values = symbol_values(launch.model, launch.workload, Grid(), micro_batch=batch)
    program = build_step(launch.model, launch.workload, recompute="none", options=bundled(compiled=launch.compile))
    values |= blocks_of(program, contents_of(launch.model, (launch.model.layers,)), kept=launch.kept_layers, repeated=0)
    first = next((block for block in program.blocks if block.given.own.attention), program.blocks[0])
    core = [
        step
        for step in (*first.forward.operations, *first.backward.operations)
        if isinstance(step, MatMul | Attention | Measured | Kernel)
        and step.layer.endswith("attention.core")
        and (step.phase == "forward" or isinstance(probe, StepProbe) or probe.backward)
    ]
    element_bytes = float(ELEMENT_SIZES[launch.workload.precision].compute)

    def price(adjust: Adjust) -> tuple[float, ...]:
        adjusted = adjust(machine)
        rates = compute_rates(adjusted.accelerator, setting.precision, software_on(AXONN_TUNE, adjusted))
        clock = ComputeClock(rates, element_bytes, values, PLAIN)
        if isinstance(probe, StepProbe):
            return (float(compute_s(program, clock)),)
        return (sum(float(clock.run_s(step)) for step in core),)

    return Sample(
        name=probe_words(probe),
        framework=AXONN_TUNE,
        ranks=1,
        what=(probe.what,),
        measured_s=(measured_s,),
        noise=(_NOISE,),
        price=price,
    )


@dataclass(frozen=True)
class Calibration:
    """A profile with the fits behind it; no collectives on a single rank."""

    machine: Machine
    communication: Fit | None
    compute: Fit


def medians(points: Sequence[Point]) -> dict[Probe, float]:
    """Median time of each probe, s, in the order first measured."""
    samples: dict[Probe, list[float]] = {}
    for point in points:
        samples.setdefault(point.probe, []).append(point.seconds)
    return {probe: statistics.median(found) for probe, found in samples.items()}


def calibrate(measured: PointFile, base: Machine, *, name: str, ranks_per_node: int | None = None) -> Calibration:
    """Learn a profile from points; numbers without measurement are `base`'s. UsageError if there is too little."""
    setting, found = measured.setting, medians(measured.points)
    per_node, device = ranks_per_node or _ranks_per_node(setting), setting.ranks[0].device
    all_to_alls = any(isinstance(probe, CollectiveProbe) and probe.op == "all_to_all" for probe in found)
    outline = base.model_copy(
        update={
            "name": name,
            "description": f"Measured: {_counted_ranks(setting)} of {device}; {_network_words(setting)}",
            "library": _library(setting, base.library.launch_us, all_to_alls=all_to_alls),
            "launcher": base.launcher.model_copy(update={"backend": setting.backend, "ranks_per_node": per_node}),
            "tiers": _tiers(setting, per_node),
            "paper": None,
        }
    )
    compute = fit_compute(found, outline, setting)
    communication, held_out = None, tuple[float, ...]()
    tiers, library = outline.tiers, outline.library
    if len(setting.ranks) > 1:
        communication, held_out = fit_communication(found, outline, world=len(setting.ranks))
        source = Source(kind="fitted", source=_origin(setting))
        collectives = [probe for probe in found if isinstance(probe, CollectiveProbe)]
        crossed = measured_kinds(collectives, outline, world=len(setting.ranks))
        told_gb_per_s = _fastest_gb_per_s(found) / _NOISE
        tiers = tuple(
            _fitted_tier(tier, crossed[tier.name], source, told_gb_per_s) for tier in communication.machine.tiers
        )
        launch_us, sources = rounded(communication.machine.library.launch_us), library.sources | {"launch_us": source}
        library = library.model_copy(update={"launch_us": launch_us, "sources": sources})
    errors = held_out or (tuple(communication.errors.values()) if communication else ())
    outliers = (*compute.outliers, *(communication.outliers if communication else ()))
    document = outline.model_copy(
        update={
            "accelerator": _accelerator(compute.machine.accelerator, setting),
            "tiers": tiers,
            "library": library,
            "uncertainty": _uncertainty(measured.points, found, errors, tuple(compute.errors.values())),
            "measured": Measurement(
                created=setting.created,
                tool_version=setting.tool_version,
                torch_version=setting.torch_version,
                hosts=_hosts(setting),
                device=device,
                ranks=len(setting.ranks),
                cores=setting.cores,
                network=_network_words(setting),
                samples=len(measured.points),
                held_out_error=rounded(statistics.fmean(map(abs, held_out))) if held_out else None,
                outliers=tuple(map(probe_words, outliers)),
            ),
        }
    )
    stated = {"launcher.ranks_per_node", *(f"tiers.{tier.name}.bandwidth_gb_per_s" for tier in tiers)}
    document, _ = settled(base, document, stated)
    return Calibration(validated(document), communication, compute)


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


def _library(setting: Setting, launch_us: float, *, all_to_alls: bool) -> Library:
    """How the runtime's collectives go over this backend, as lines of one protocol; all_to_alls: they were measured."""
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
            **({"all_to_all": ("direct",)} if all_to_alls else {}),
        },
        protocols=(Protocol(name="tcp" if gloo else "fitted", latency_factor=1.0, bandwidth_factor=1.0),),
        sources={
            "launch_us": Source(kind="fitted", source="to be fitted"),
            "protocols": Source(kind="fact", source=source),
        },
    )


def _fitted_tier(tier: Tier, kinds: Sequence[CollectiveKind], source: Source, told_gb_per_s: float) -> Tier:
    """A tier with the all-gather's β, the largest α, and the factors of each collective that was measured.

    told_gb_per_s: bandwidth at which the largest buffer takes less than the noise of a point, so that points tell none
    above it.
    """
    used = {
        kind: own.model_copy(update={"bandwidth_gb_per_s": min(own.bandwidth_gb_per_s, told_gb_per_s)})
        for kind, own in ((kind, tier.used_by(kind)) for kind in kinds)
    }
    # Sends are priced by this latency too, and an all-to-all is several messages at once.
    latency_us = max(one.latency_us for kind, one in used.items() if kind != "all_to_all" or len(used) == 1)
    bandwidth = used.get("all_gather", max(used.values(), key=lambda one: one.bandwidth_gb_per_s)).bandwidth_gb_per_s
    factors = {
        kind: CollectiveFactors(
            latency_factor=min(rounded(one.latency_us / latency_us), MOST_FACTOR),
            bandwidth_factor=min(max(rounded(one.bandwidth_gb_per_s / bandwidth), LEAST_FACTOR), MOST_FACTOR),
        )
        for kind, one in used.items()
    }
    return tier.model_copy(
        update={
            "latency_us": rounded(latency_us),
            "bandwidth_gb_per_s": rounded(bandwidth),
            "collectives": factors,
            "sources": tier.sources | dict.fromkeys(("latency_us", "bandwidth_gb_per_s", "collectives"), source),
        }
    )


def _accelerator(fitted: Accelerator, setting: Setting) -> Accelerator:
    """The device with its rates rounded, and the source of each; shares are at most 1, but of attention, of which the
    masked half counts as work that is never done."""
    place, shared = setting.ranks[0], setting.backend == "gloo"
    on_host = [other.host for other in setting.ranks].count(place.host)
    measured = Source(kind="measured", source=f"{_origin(setting)}, all ranks busy")
    learned = measured.model_copy(update={"kind": "fitted"})
    numbers = {
        "memory_gib": rounded(setting.memory_bytes / GIB / (on_host if shared else 1)),
        "peak_tflops": {name: rounded(peak) for name, peak in fitted.peak_tflops.items()},
        "matmul_efficiency": {name: min(1.0, rounded(share)) for name, share in fitted.matmul_efficiency.items()},
        **{name: rounded(getattr(fitted, name)) for name in ("memory_bandwidth_gb_per_s", "matmul_ramp")},
        **{name: rounded(getattr(fitted, name)) for name in ("matmul_launch_us", "kernel_launch_us")},
        **{name: rounded(getattr(fitted, name)) for name in _ATTENTION},
        "memory_efficiency": min(1.0, rounded(fitted.memory_efficiency)),
    }
    as_measured = ("memory_gib", "memory_bandwidth_gb_per_s", "peak_tflops")
    sources = {key: measured if key in as_measured else learned for key in (*numbers, "matmul_tile")}
    sources["training_share"] = Source(kind="fact", source="the rates were measured with all ranks busy")
    name = f"CPU: {setting.cores} cores of {place.device} for {counted(on_host, 'rank')}" if shared else place.device
    return fitted.model_copy(update={"name": name, **numbers, "sources": {**fitted.sources, **sources}})


def _uncertainty(
    points: Sequence[Point], found: Mapping[Probe, float], communication: Sequence[float], compute: Sequence[float]
) -> Uncertainty:
    """80% quantile of errors: of the fit, or of one sample, whichever is larger."""
    widths = {}
    for sends, fitted in ((True, communication), (False, compute)):
        own = [point for point in points if isinstance(point.probe, CollectiveProbe) == sends]
        spread = [abs(point.seconds / found[point.probe] - 1.0) for point in own]
        widths[sends] = min(1.0, rounded(max(_quantile(spread), _quantile([abs(error) for error in fitted]))))
    source = Source(kind="measured", source="80% quantile of the errors of the fit and of single samples")
    return Uncertainty(
        communication=widths[True],
        compute=widths[False],
        sources={"communication": source, "compute": source},
    )


def _quantile(errors: Sequence[float]) -> float:
    return max(_LEAST_UNCERTAINTY, float(np.quantile(errors, _QUANTILE))) if errors else _LEAST_UNCERTAINTY


def probe_words(probe: Probe) -> str:
    """Such as `all_gather of 1 MiB over 4 ranks, stride 2`."""
    if isinstance(probe, CollectiveProbe):
        return f"{probe.op} of {show_bytes(probe.size_bytes)} over {probe.group} ranks, stride {probe.stride}"
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
