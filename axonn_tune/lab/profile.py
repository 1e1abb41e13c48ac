"""A machine profile of a lab: what was asked of it, to rank by until `calibrate` has measured."""

from __future__ import annotations

import os

from axonn_tune.lab.shape import Shape, show_rate
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.machine import Accelerator, Launcher, Machine, Source, Tier
from axonn_tune.units import GB, GIB, MICRO

_BITS = 8


def profile(shape: Shape, *, name: str, rank_round_trip_s: float, node_round_trip_s: float) -> Machine:
    """The lab as a machine: two tiers with the rates asked for and the round trips measured, cores shared.

    Where nodes have one rank, or there is one node, the only tier is the one there is.
    """
    template = load_machine("localhost").document
    node_ranks = shape.ranks_per_node if shape.nodes > 1 else None
    tiers = []
    if shape.ranks_per_node > 1 or shape.nodes == 1:
        tiers.append(_tier("node", node_ranks, shape.port_bits_per_s, rank_round_trip_s))
    if shape.nodes > 1:
        alone = shape.ranks_per_node == 1
        rate = min(shape.port_bits_per_s, shape.uplink_bits_per_s) if alone else shape.uplink_bits_per_s
        tiers.append(_tier("cluster", None, rate, node_round_trip_s))
    launcher = Launcher(backend="gloo", ranks_per_node=shape.ranks_per_node)
    changed = {
        "name": name,
        "description": f"Emulated cluster, not calibrated: {shape.words()}",
        "accelerator": _shared_cores(template.accelerator, shape.world),
        "tiers": tuple(tiers),
        "launcher": launcher,
    }
    return template.model_copy(update=changed)


def _tier(name: str, ranks: int | None, rate_bits_per_s: float, round_trip_s: float) -> Tier:
    sources = {
        "latency_us": Source(
            kind="measured", source="shortest round trip of a small packet in this lab: what a step of Gloo waits"
        ),
        "bandwidth_gb_per_s": Source(kind="assumed", source=f"{show_rate(rate_bits_per_s)}, as asked of the lab"),
    }
    if ranks is not None:
        sources["ranks"] = Source(kind="fact", source="ranks on a node of the lab")
    return Tier(
        name=name,
        ranks=ranks,
        # All of it and not half: Gloo's sender waits for the receiver to say that it is ready, so a step of a ring
        # takes one crossing for that and one for the data (1.19 ms measured over round trips of 1 ms).
        latency_us=round(round_trip_s / MICRO, 1),
        bandwidth_gb_per_s=rate_bits_per_s / _BITS / GB,
        sources=sources,
    )


def _shared_cores(core: Accelerator, world: int) -> Accelerator:
    """One rank's part of this host: all ranks compute on the same cores."""
    cores = len(os.sched_getaffinity(0))
    share = min(1.0, cores / world)
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB / world
    why = Source(kind="assumed", source=f"placeholder of localhost, {cores} cores shared by {world} ranks")
    changed = {
        "name": f"{share:.3g} of a CPU core",
        "memory_gib": round(memory_gib, 2),
        "memory_bandwidth_gb_per_s": core.memory_bandwidth_gb_per_s * share,
        "peak_tflops": {precision: peak * share for precision, peak in core.peak_tflops.items()},
        "sources": core.sources
        | dict.fromkeys(("memory_bandwidth_gb_per_s", "peak_tflops"), why)
        | {"memory_gib": Source(kind="fact", source=f"memory of this host by {world} ranks")},
    }
    return core.model_copy(update=changed)
