"""Machines with round numbers, for checks by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axonn_tune.specs.machine import COLLECTIVE_KINDS, Machine


def sources(*names: str) -> dict[str, Any]:
    """Provenance for every number of a section."""
    return {name: {"kind": "assumed", "source": "round numbers for tests"} for name in names}


_NUMBERS = {
    "reserved_memory_gib": 1.0,
    "memory_bandwidth_gb_per_s": 2000.0,
    "memory_efficiency": 0.9,
    "peak_tflops": {"bf16": 300.0, "fp32": 20.0},
    "matmul_efficiency": {"NN": 0.8, "NT": 0.75, "TN": 0.7},
    "training_share": 0.95,
    "matmul_launch_us": 5.0,
    "matmul_tile": 128,
    "attention_forward_efficiency": 0.6,
    "attention_backward_efficiency": 0.5,
    "kernel_launch_us": 3.0,
}
ACCELERATOR = {**_NUMBERS, "sources": sources("memory_gib", *_NUMBERS)}


def two_tier_machine(
    *,
    algorithms: Sequence[str] = ("ring", "tree"),
    protocols: Sequence[tuple[str, float, float]] = (("simple", 1.0, 1.0),),
    measured: Sequence[tuple[int, int, float]] = (),
    nodes: bool = True,
    ranks_per_node: int = 4,
    inner: tuple[float, float] = (2.0, 200.0),
    outer: tuple[float, float] = (10.0, 80.0),
    memory_gib: float = 80.0,
) -> Machine:
    """Nodes of 4 ranks at (latency_us, bandwidth_gb_per_s) `inner`, joined at `outer`; launch 5 µs.

    `measured`: (stride, group, bandwidth_gb_per_s) of the inner tier; `nodes=False`: one tier only.
    """
    library = {
        "name": "NCCL",
        "version": "2",
        "launch_us": 5.0,
        "algorithms": {kind: tuple(algorithms) for kind in COLLECTIVE_KINDS},
        "protocols": tuple(
            {"name": name, "latency_factor": latency, "bandwidth_factor": bandwidth}
            for name, latency, bandwidth in protocols
        ),
        "sources": sources("launch_us", "protocols"),
    }
    tiers = [_tier("link", inner, ranks=ranks_per_node if nodes else None, measured=measured)]
    if nodes:
        tiers.append(_tier("network", outer))
    return Machine.model_validate(
        {
            "schema": "axonn-tune/machine/1",
            "name": "round",
            "accelerator": {"name": "R1", "memory_gib": memory_gib, **ACCELERATOR},
            "tiers": tuple(tiers),
            "library": library,
            "uncertainty": {"communication": 0.1, "compute": 0.05, "sources": sources("communication", "compute")},
            "launcher": {"backend": "nccl", "ranks_per_node": ranks_per_node},
        }
    )


def _tier(
    name: str,
    speed: tuple[float, float],
    *,
    ranks: int | None = None,
    measured: Sequence[tuple[int, int, float]] = (),
) -> dict[str, Any]:
    """One tier; what is not given is left out, with its provenance."""
    tier: dict[str, Any] = {"latency_us": speed[0], "bandwidth_gb_per_s": speed[1]}
    if ranks is not None:
        tier["ranks"] = ranks
    if measured:
        keys = ("stride", "group", "bandwidth_gb_per_s")
        tier["measured"] = tuple(dict(zip(keys, entry, strict=True)) for entry in measured)
    return {"name": name, **tier, "sources": sources(*tier)}
