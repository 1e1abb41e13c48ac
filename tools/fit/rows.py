"""The published measurements in `tools/published` that machine profiles are fitted to, and what a profile predicts."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from axonn_tune.cost.collectives import collective_time_s, lines, route
from axonn_tune.cost.compute import compute_rates, matmul_time_s
from axonn_tune.grid import GroupShape
from axonn_tune.program.operations import COLUMNS, PLAIN
from axonn_tune.specs.machine import CollectiveKind, Machine, MatmulLayout

PUBLISHED = Path(__file__).parents[1] / "published"
BF16_BYTES = 2

_KINDS: dict[str, CollectiveKind] = {kind: kind for kind in get_args(CollectiveKind)}


@dataclass(frozen=True)
class CollectiveRow:
    """One measured collective over consecutive ranks; `size_bytes` is the full (gathered or reduced) buffer.

    system: what stages of the fit call the place, `fitted_as` of the file.
    """

    source: str
    system: str
    kind: CollectiveKind
    ranks: int
    size_bytes: int
    time_s: float


@dataclass(frozen=True)
class MatmulRow:
    """One measured GEMM `O[m, n] = A[m, k] · B[k, n]` in bf16.

    `layout` is NN, NT or TN as in a profile, `linear` for a forward GEMM timed in a short burst,
    `best` for the best shape of a search that ran until clocks and power had settled.
    """

    source: str
    gpu: str
    layout: str
    m: int
    n: int
    k: int
    time_s: float

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.m * self.n * self.k


@cache
def collective_rows() -> tuple[CollectiveRow, ...]:
    """Rows of collectives.csv that a fit uses."""
    return tuple(_collective_row(record) for record in _read("collectives.csv") if record["fitted_as"])


@cache
def matmul_rows() -> tuple[MatmulRow, ...]:
    """Every row of gemm.csv with its shape."""
    return tuple(_matmul_row(record) for record in _read("gemm.csv") if record["m"])


def collective_times_s(machine: Machine, rows: Iterable[CollectiveRow]) -> NDArray[np.float64]:
    """Time the profile predicts for each row, s, by the formulas the search uses."""
    known: dict[tuple[CollectiveKind, int], tuple[tuple[float, float], ...]] = {}
    times = []
    for row in rows:
        group = (row.kind, row.ranks)
        if group not in known:
            path = route(GroupShape(((row.ranks, 1),)), machine.tiers, row.ranks)
            found = lines(row.kind, path, machine)
            known[group] = tuple((line.latency_s, line.bandwidth_bytes_per_s) for line in found)
        times.append(collective_time_s(known[group], float(row.size_bytes), PLAIN))
    return np.array(times)


def matmul_times_s(
    machine: Machine, rows: tuple[MatmulRow, ...], *, layout: MatmulLayout, speed: float = 1.0
) -> NDArray[np.float64]:
    """Time the profile predicts for each row, s; `speed` scales its efficiencies; bursts, so no training share."""
    shares = machine.accelerator.matmul_efficiency
    scaled = {name: share * speed for name, share in shares.items()}
    accelerator = machine.accelerator.model_copy(update={"matmul_efficiency": scaled, "training_share": 1.0})
    m, n, k = (np.array([getattr(row, name) for row in rows], dtype=np.float64) for name in "mnk")
    rates = compute_rates(accelerator, "bf16")
    flops_per_s = rates.matmul_flops_per_s[layout]
    times = matmul_time_s(m, n, k, flops_per_s=flops_per_s, element_bytes=BF16_BYTES, rates=rates, arithmetic=COLUMNS)
    return np.asarray(times)


def _read(name: str) -> list[dict[str, str]]:
    with (PUBLISHED / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _collective_row(record: dict[str, str]) -> CollectiveRow:
    return CollectiveRow(
        source=record["source"],
        system=record["fitted_as"],
        kind=_KINDS[record["collective"]],
        ranks=int(record["nranks"]),
        size_bytes=int(record["size_bytes"]),
        time_s=float(record["time_us"]) * 1e-6,
    )


def _matmul_row(record: dict[str, str]) -> MatmulRow:
    return MatmulRow(
        source=record["source"],
        gpu=record["gpu"],
        layout=record["layout"],
        m=int(record["m"]),
        n=int(record["n"]),
        k=int(record["k"]),
        time_s=float(record["latency_us"]) * 1e-6,
    )
