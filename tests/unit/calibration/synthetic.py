"""Points of a made-up machine whose numbers are known, for fits to find again."""

from __future__ import annotations

import random
from functools import cache

from axonn_tune.calibration.fit import compute_factors
from axonn_tune.calibration.measure import build_plan
from axonn_tune.cost.collectives import lines, route
from axonn_tune.grid import GroupShape
from axonn_tune.ranking.inputs import make_workload
from axonn_tune.request import Request
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.machine import CollectiveFactors, Machine, Tier
from axonn_tune.specs.points import CollectiveProbe, Plan, Point, Probe, RankPlace, Setting, TransferProbe

LAUNCH_S = 40e-6
FACTORS = {
    "all_gather": CollectiveFactors(latency_factor=1.0, bandwidth_factor=1.0),
    "reduce_scatter": CollectiveFactors(latency_factor=0.8, bandwidth_factor=0.7),
    "all_reduce": CollectiveFactors(latency_factor=0.6, bandwidth_factor=0.9),
}
COMPUTE = {
    "matmul_launch_s": 20e-6,
    "ramp_flop_s": 2e-10,
    "kernel_launch_s": 30e-6,
    "byte_s": 1 / 2e9,
    "NN": 1 / 50e9,
    "NT": 1 / 45e9,
    "TN": 1 / 40e9,
    "attention_forward_flop_s": 1 / 10e9,
    "attention_backward_flop_s": 1 / 8e9,
}


@cache
def plan(world: int) -> Plan:
    """What calibrate would measure of nano on this many ranks."""
    model, machine = load_model("nano"), load_machine("localhost")
    workload = make_workload(model.document, Request(precision="fp32"))
    return build_plan(model, machine, workload, world=world, backend="gloo", budget_s=20.0)


def setting(world: int, *, ranks_per_host: int | None = None) -> Setting:
    """Ranks on as many hosts as it takes."""
    per_host = ranks_per_host or world
    places = tuple(
        RankPlace(host=f"host{rank // per_host}", network="net:[1]", device="a CPU", threads=1) for rank in range(world)
    )
    return Setting(
        schema="axonn-tune/points/2",
        created="2026-01-02T03:04:05+00:00",
        tool_version="0",
        torch_version="2",
        library="Gloo of torch 2",
        backend="gloo",
        precision="fp32",
        cores=2,
        memory_bytes=2**34,
        ranks=places,
        launches=plan(world).launches,
    )


def cluster(machine: Machine, *, factors: bool = True) -> Machine:
    """Gloo on nodes of two: 0.2 ms and 1 GB/s inside, 1 ms and 25 MB/s outside."""
    inner, outer = machine.tiers
    return machine.model_copy(
        update={
            "tiers": (
                _tier(inner, 200.0, 1.0, factors=factors),
                _tier(outer, 1000.0, 0.025, factors=factors),
            ),
            "library": machine.library.model_copy(update={"launch_us": LAUNCH_S * 1e6}),
        }
    )


def _tier(tier: Tier, latency_us: float, bandwidth: float, *, factors: bool) -> Tier:
    return tier.model_copy(
        update={
            "latency_us": latency_us,
            "bandwidth_gb_per_s": bandwidth,
            "collectives": FACTORS if factors else None,
        }
    )


def collective_s(probe: CollectiveProbe, machine: Machine, world: int) -> float:
    """What the cost model says of a collective."""
    path = route(GroupShape(((probe.group, probe.stride),)), machine.tiers, world)
    return min(
        line.latency_s + probe.size_bytes / line.bandwidth_bytes_per_s for line in lines(probe.op, path, machine)
    )


def points(world: int, machine: Machine, *, noise: float, seed: int = 0) -> list[Point]:
    """Three samples of every probe of the plan, each off by up to `noise`."""
    random_ = random.Random(seed)
    return [
        Point(probe=probe, seconds=_seconds(probe, machine, world) * random_.uniform(1 - noise, 1 + noise), calls=3)
        for _ in range(3)
        for probe in plan(world).probes
    ]


def _seconds(probe: Probe, machine: Machine, world: int) -> float:
    if isinstance(probe, CollectiveProbe):
        return collective_s(probe, machine, world)
    if isinstance(probe, TransferProbe):
        return 1e-3 + probe.size_bytes * min(probe.stride, 2) / 25e6
    if probe.what == "copy":
        return 2.0 * probe.size_bytes / (8e9 if probe.size_bytes > 2**20 else 50e9)
    return sum(COMPUTE[name] * factor for name, factor in compute_factors(probe, setting(world), 1).items())
