"""Which numbers of which profile are fitted on which published collectives."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from axonn_tune.specs.machine import CollectiveKind, Machine
from tools.fit.fitting import Floats, Stage
from tools.fit.matmul_stages import matmul_stages
from tools.fit.rows import CollectiveRow, collective_rows, collective_times_s

MIB = 1024**2
BANDWIDTH_FROM = 32 * MIB
"""Bandwidths are fitted from this size on, where they decide; latencies and protocols on all sizes."""

RINGS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter")
ALL: tuple[CollectiveKind, ...] = (*RINGS, "all_reduce")


def stages() -> tuple[Stage, ...]:
    """Every fit, in the order in which one builds on another."""
    return (*_inside_nodes(), *_across_nodes(), *_frontier(), *matmul_stages())


def _inside_nodes() -> list[Stage]:
    found = []
    for machine, system, kinds, scale in (
        ("dgx-a100", "a100-node", ALL, 1.0),
        ("dgx-h100", "h100-node", RINGS, 1.5),
        ("dgx-b200", "b200-node", ALL, 2.8),
    ):
        tier = "tiers.nvlink."
        bandwidths = {tier + "bandwidth_gb_per_s": 226.0, tier + "measured.2": 180.0, tier + "measured.4": 212.0}
        scaled = {path: value * scale for path, value in bandwidths.items()}
        rows = _rows(system, kinds=kinds)
        found += [
            _stage(machine, "NVLink bandwidth", scaled, tuple(row for row in rows if row.size_bytes >= BANDWIDTH_FROM)),
            _stage(machine, "small messages", {"library.launch_us": 8.0, **_protocol()}, rows),
        ]
    return found


def _across_nodes() -> list[Stage]:
    network, slingshot = "tiers.network.bandwidth_gb_per_s", "tiers.slingshot."
    both = {slingshot + "latency_us": 36.0, slingshot + "bandwidth_gb_per_s": 66.0}
    azure = tuple(row for row in _rows("azure-nd-a100") if row.size_bytes >= BANDWIDTH_FROM)
    ec2 = tuple(row for row in _rows("aws-p6-b200") if row.size_bytes >= BANDWIDTH_FROM)
    alps = tuple(row for row in _rows("alps") if row.size_bytes <= 4 * MIB)
    latency = {slingshot + "latency_us": 60.0, **_protocol()}
    return [
        _stage("perlmutter", "across nodes", {**both, **_protocol()}, _rows("perlmutter")),
        _stage("alps", "across two nodes", latency, alps),
        _stage("dgx-a100", "across two nodes", {network: 187.0}, azure, line_rate={"network": 200.0}),
        _stage("dgx-b200", "across four nodes", {network: 380.0}, ec2, line_rate={"network": 400.0}),
    ]


def _frontier() -> list[Stage]:
    """Inside a node everything is fitted; across nodes only where RCCL behaves, from 256 MiB on."""
    fabric, slingshot = "tiers.infinity-fabric.", "tiers.slingshot."
    inside = {fabric + "latency_us": 10.0, fabric + "bandwidth_gb_per_s": 80.0}
    across = {slingshot + "latency_us": 100.0, slingshot + "bandwidth_gb_per_s": 90.0}
    rows = tuple(row for row in _rows("frontier", ranks=range(9, 1024)) if row.size_bytes >= 256 * MIB)
    return [
        _stage("frontier", "inside a node", inside, _rows("frontier", ranks=range(2, 9))),
        _stage("frontier", "across nodes", across, rows, line_rate={"slingshot": 100.0}),
    ]


def _protocol() -> dict[str, float]:
    path = "library.protocols.ll."
    return {path + "latency_factor": 0.4, path + "bandwidth_factor": 0.2}


def _rows(
    system: str, *, kinds: Collection[CollectiveKind] = ALL, ranks: range = range(2, 1 << 20)
) -> tuple[CollectiveRow, ...]:
    return tuple(row for row in collective_rows() if row.system == system and row.kind in kinds and row.ranks in ranks)


def _stage(
    machine: str,
    name: str,
    parameters: Mapping[str, float],
    rows: tuple[CollectiveRow, ...],
    *,
    line_rate: Mapping[str, float] | None = None,
) -> Stage:
    """A fit on collectives; `line_rate` bounds the bandwidth of a tier, GB/s."""

    def predict(profile: Machine, _: Mapping[str, float]) -> Floats:
        return collective_times_s(profile, rows)

    bounds = {f"tiers.{tier}.bandwidth_gb_per_s": rate for tier, rate in (line_rate or {}).items()}
    return Stage(
        machine=machine,
        name=name,
        parameters=parameters,
        predict=predict,
        measured_s=np.array([row.time_s for row in rows]),
        large=np.array([row.size_bytes >= MIB for row in rows]),
        upper=bounds | {path: 1.0 for path in parameters if path.endswith("_factor")},
    )
