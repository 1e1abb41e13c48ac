"""Points of a made-up machine whose numbers are known, for fits to find again."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from axonn_tune.calibration import profile
from axonn_tune.calibration.measure import build_plan
from axonn_tune.cost.collectives import lines, route
from axonn_tune.grid import GroupShape
from axonn_tune.ranking.inputs import make_workload
from axonn_tune.request import Request
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.machine import CollectiveFactors, Machine, Tier
from axonn_tune.specs.points import CollectiveProbe, Plan, Point, Probe, RankPlace, Setting

LAUNCH_S = 40e-6
FACTORS = {
    "all_gather": CollectiveFactors(latency_factor=1.0, bandwidth_factor=1.0),
    "reduce_scatter": CollectiveFactors(latency_factor=0.8, bandwidth_factor=0.7),
    "all_reduce": CollectiveFactors(latency_factor=0.6, bandwidth_factor=0.9),
    "all_to_all": CollectiveFactors(latency_factor=0.5, bandwidth_factor=0.8),
}
COMPUTE: dict[str, Any] = {
    "peak_tflops": {"fp32": 0.05},
    "matmul_efficiency": {"NN": 1.0, "NT": 0.9, "TN": 0.8},
    "attention_forward_efficiency": 0.2,
    "attention_backward_efficiency": 0.16,
    "memory_bandwidth_gb_per_s": 8.0,
    "memory_efficiency": 0.25,
    "training_share": 1.0,
    "matmul_launch_us": 20.0,
    "matmul_ramp": 10.0,
    "matmul_tile": 1,
    "kernel_launch_us": 30.0,
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


def cluster() -> Machine:
    """Gloo on nodes of two: 0.2 ms and 1 GB/s inside, 1 ms and 25 MB/s outside; computation in round numbers."""
    base = load_machine("localhost").document

    def tier(name: str, latency_us: float, bandwidth: float, *, ranks: int | None = None) -> Tier:
        numbers = {"latency_us": latency_us, "bandwidth_gb_per_s": bandwidth, "collectives": FACTORS}
        return base.tiers[0].model_copy(update={"name": name, "ranks": ranks, **numbers})

    algorithms = base.library.algorithms | {"reduce_scatter": ("direct",), "all_to_all": ("direct",)}
    library = base.library.model_copy(update={"algorithms": algorithms, "launch_us": LAUNCH_S * 1e6})
    tiers = (tier("node", 200.0, 1.0, ranks=2), tier("network", 1000.0, 0.025))
    accelerator = base.accelerator.model_copy(update=COMPUTE)
    return base.model_copy(update={"tiers": tiers, "library": library, "accelerator": accelerator})


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
    if probe.what == "copy":
        return 2.0 * probe.size_bytes / (8e9 if probe.size_bytes > 2**20 else 50e9)
    if probe.what == "matmul":
        busy = 2.0 * probe.m * probe.n * (probe.k + 10.0) / (50e9 * COMPUTE["matmul_efficiency"][probe.layout])
        moved = 4.0 * (probe.m * probe.k + probe.k * probe.n + probe.m * probe.n) / 2e9
        return 20e-6 + max(busy, moved)
    (priced,) = profile.program_sample(probe, 1.0, machine, setting(world)).price(lambda same: same)
    return priced
