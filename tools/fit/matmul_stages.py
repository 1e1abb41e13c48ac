"""Which numbers of which accelerator are fitted on which published matrix products."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from axonn_tune.specs.machine import Machine, MatmulLayout
from tools.fit.fitting import NUISANCE, Floats, Predict, Stage
from tools.fit.rows import MatmulRow, matmul_rows, matmul_times_s

TRAINING_FLOPS = 1e9
"""Smaller products are left out: training has few of them, and they are all launch time."""

LARGE_FLOPS = 5e10
"""Products from this size on count in the second error."""

EFFICIENCY = "accelerator.matmul_efficiency."
LAYOUTS: tuple[MatmulLayout, ...] = ("NN", "NT", "TN")


def matmul_stages() -> tuple[Stage, ...]:
    """Launch time and forward efficiency per accelerator, then the other layouts where they were measured."""
    return (
        forward_stage("dgx-a100", "A100"),
        layout_stage("dgx-a100", "A100-PCIe"),
        forward_stage("dgx-h100", "H100"),
        forward_stage("dgx-h200", "H200"),
        forward_stage("dgx-b200", "B200", ramp=False),
        layout_stage("dgx-b200", "B200"),
    )


def forward_stage(machine: str, gpu: str, *, ramp: bool = True) -> Stage:
    """Fit on short bursts; what long training leaves of their speed is the profile's `training_share`.

    B200 shows no ramp.
    """
    rows = tuple(row for row in matmul_rows() if (row.gpu, row.layout) == (gpu, "linear"))
    rows = tuple(row for row in rows if row.flops >= TRAINING_FLOPS)

    def predict(profile: Machine, _: Mapping[str, float]) -> Floats:
        return matmul_times_s(profile, rows, layout="NN")

    parameters = {"accelerator.matmul_launch_us": 5.0, EFFICIENCY + "NN": 0.8}
    parameters |= {"accelerator.matmul_ramp": 60.0} if ramp else {}
    return _stage(machine, "forward products", parameters, rows=rows, predict=predict)


def layout_stage(machine: str, gpu: str) -> Stage:
    """Fit the gradients' layouts relative to the forward one, on a card whose own speed is a nuisance."""
    by_layout = {layout: _of_layout(gpu, layout) for layout in LAYOUTS}
    rows = tuple(row for layout in LAYOUTS for row in by_layout[layout])

    def predict(profile: Machine, values: Mapping[str, float]) -> Floats:
        speed = values[NUISANCE + "speed"]
        times = [matmul_times_s(profile, by_layout[layout], layout=layout, speed=speed) for layout in LAYOUTS]
        return np.concatenate(times)

    parameters = {NUISANCE + "speed": 0.9, EFFICIENCY + "NT": 0.75, EFFICIENCY + "TN": 0.7}
    return _stage(machine, "gradient products", parameters, rows=rows, predict=predict)


def _of_layout(gpu: str, layout: str) -> tuple[MatmulRow, ...]:
    rows = (row for row in matmul_rows() if (row.gpu, row.layout) == (gpu, layout))
    return tuple(row for row in rows if row.flops >= TRAINING_FLOPS)


def _stage(
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
