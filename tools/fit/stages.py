"""The numbers of each profile that are fitted, and the published collectives and GEMMs they are fitted to."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from axonn_tune.specs.machine import CollectiveKind, Machine, MatmulLayout
from tools.fit.fitting import NUISANCE, Floats, Predict, Stage
from tools.fit.rows import CollectiveRow, MatmulRow, collective_rows, collective_times_s, matmul_rows, matmul_times_s

MIB = 1024**2
BANDWIDTH_FROM = 32 * MIB
"""Bandwidths are fitted from this size on, where they decide; latencies and protocols on all sizes."""

GROUPS_OF_2, GROUPS_OF_4 = (f"measured.{size}.bandwidth_gb_per_s" for size in (2, 4))
"""Of a tier, what groups of that size measured."""

RINGS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter")
ALL: tuple[CollectiveKind, ...] = (*RINGS, "all_reduce")

TRAINING_FLOPS = 1e9
"""Smaller GEMMs are left out: training has few of them, and they are all launch time."""

LARGE_FLOPS = 5e10
"""GEMMs from this size on count in the second error."""

EFFICIENCY = "accelerator.matmul_efficiency."
LAYOUTS: tuple[MatmulLayout, ...] = ("NN", "NT", "TN")


def stages() -> tuple[Stage, ...]:
    """Every fit, in the order in which one builds on another."""
    return (*_inside_nodes(), *_across_nodes(), *_frontier(), *_matmul_stages())


def _inside_nodes() -> list[Stage]:
    found = []
    for machine, system, kinds, scale in (
        ("dgx-a100", "a100-node", ALL, 1.0),
        ("dgx-h100", "h100-node", RINGS, 1.5),
        ("dgx-b200", "b200-node", ALL, 2.8),
    ):
        tier = "tiers.nvlink."
        bandwidths = {tier + "bandwidth_gb_per_s": 226.0, tier + GROUPS_OF_2: 180.0, tier + GROUPS_OF_4: 212.0}
        scaled = {path: value * scale for path, value in bandwidths.items()}
        rows = _rows(system, kinds=kinds)
        found += [
            _collective_stage(
                machine, "NVLink bandwidth", scaled, tuple(row for row in rows if row.size_bytes >= BANDWIDTH_FROM)
            ),
            _collective_stage(machine, "small messages", {"library.launch_us": 8.0, **_protocol()}, rows),
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
        _collective_stage("perlmutter", "across nodes", {**both, **_protocol()}, _rows("perlmutter")),
        _collective_stage("alps", "across two nodes", latency, alps),
        _collective_stage("dgx-a100", "across two nodes", {network: 187.0}, azure, line_rate={"network": 200.0}),
        _collective_stage("dgx-b200", "across four nodes", {network: 380.0}, ec2, line_rate={"network": 400.0}),
    ]


def _frontier() -> list[Stage]:
    """Inside a node everything is fitted; across nodes only where RCCL behaves, from 256 MiB on."""
    fabric, slingshot = "tiers.infinity-fabric.", "tiers.slingshot."
    inside = {fabric + "latency_us": 10.0, fabric + "bandwidth_gb_per_s": 80.0}
    across = {slingshot + "latency_us": 100.0, slingshot + "bandwidth_gb_per_s": 90.0}
    rows = tuple(row for row in _rows("frontier", ranks=range(9, 1024)) if row.size_bytes >= 256 * MIB)
    return [
        _collective_stage("frontier", "inside a node", inside, _rows("frontier", ranks=range(2, 9))),
        _collective_stage("frontier", "across nodes", across, rows, line_rate={"slingshot": 100.0}),
    ]


def _protocol() -> dict[str, float]:
    path = "library.protocols.ll."
    return {path + "latency_factor": 0.4, path + "bandwidth_factor": 0.2}


def _rows(
    system: str, *, kinds: Collection[CollectiveKind] = ALL, ranks: range = range(2, 1 << 20)
) -> tuple[CollectiveRow, ...]:
    return tuple(row for row in collective_rows() if row.system == system and row.kind in kinds and row.ranks in ranks)


def _collective_stage(
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


def _matmul_stages() -> tuple[Stage, ...]:
    """Launch time and forward efficiency per accelerator, then the other layouts where they were measured."""
    return (
        _forward_stage("dgx-a100", "A100-SXM4-80GB"),
        _layout_stage("dgx-a100", "A100-PCIe-80GB"),
        _forward_stage("dgx-h100", "H100-SXM-80GB"),
        _forward_stage("dgx-h200", "H200-SXM"),
        _forward_stage("dgx-b200", "B200-SXM", ramp=False),
        _layout_stage("dgx-b200", "B200-SXM"),
    )


def _forward_stage(machine: str, gpu: str, *, ramp: bool = True) -> Stage:
    """Fit on short bursts; the sustained efficiency of long training is the profile's `training_share`.

    B200 shows no ramp.
    """
    rows = tuple(row for row in matmul_rows() if (row.gpu, row.layout) == (gpu, "linear"))
    rows = tuple(row for row in rows if row.flops >= TRAINING_FLOPS)

    def predict(profile: Machine, _: Mapping[str, float]) -> Floats:
        return matmul_times_s(profile, rows, layout="NN")

    parameters = {"accelerator.matmul_launch_us": 5.0, EFFICIENCY + "NN": 0.8}
    parameters |= {"accelerator.matmul_ramp": 60.0} if ramp else {}
    return _matmul_stage(machine, "forward GEMMs", parameters, rows=rows, predict=predict)


def _layout_stage(machine: str, gpu: str) -> Stage:
    """Fit the gradients' layouts relative to the forward one, on a card whose own speed is a nuisance."""
    by_layout = {layout: _of_layout(gpu, layout) for layout in LAYOUTS}
    rows = tuple(row for layout in LAYOUTS for row in by_layout[layout])

    def predict(profile: Machine, values: Mapping[str, float]) -> Floats:
        speed = values[NUISANCE + "speed"]
        times = [matmul_times_s(profile, by_layout[layout], layout=layout, speed=speed) for layout in LAYOUTS]
        return np.concatenate(times)

    parameters = {NUISANCE + "speed": 0.9, EFFICIENCY + "NT": 0.75, EFFICIENCY + "TN": 0.7}
    return _matmul_stage(machine, "gradient GEMMs", parameters, rows=rows, predict=predict)


def _of_layout(gpu: str, layout: str) -> tuple[MatmulRow, ...]:
    rows = (row for row in matmul_rows() if (row.gpu, row.layout) == (gpu, layout))
    return tuple(row for row in rows if row.flops >= TRAINING_FLOPS)


def _matmul_stage(
    machine: str, name: str, parameters: Mapping[str, float], *, rows: tuple[MatmulRow, ...], predict: Predict
) -> Stage:
    return Stage(
        machine=machine,
        name=name,
        parameters=parameters,
        predict=predict,
        measured_s=np.array([row.time_s for row in rows]),
        large=np.array([row.flops >= LARGE_FLOPS for row in rows]),
        upper={path: 1.0 for path in parameters if path.startswith(EFFICIENCY)},
    )
