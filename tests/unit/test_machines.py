"""The shipped machine profiles: they load, say where their numbers come from, and give times one can check by hand."""

from __future__ import annotations

import csv
from statistics import median

import pytest

from axonn_tune.cost.collectives import bus_bytes, collective_time_s, lines, route
from axonn_tune.cost.compute import compute_rates, matmul_time_s
from axonn_tune.grid import GroupShape
from axonn_tune.program.operations import PLAIN
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.machine import CollectiveKind, MatmulLayout
from tools.fit import profiles
from tools.fit.rows import PUBLISHED

GIB = 2**30


def perlmutter_time_s(kind: CollectiveKind, *, ranks: int, stride: int, world: int, size_bytes: float) -> float:
    """Time of one collective on Perlmutter by the formulas of the search, s."""
    machine = load_machine("perlmutter").document
    path = route(GroupShape(((ranks, stride),)), machine.tiers, world)
    chosen = tuple((line.latency_s, line.bandwidth_bytes_per_s) for line in lines(kind, path, machine))
    time_s = collective_time_s(chosen, size_bytes, PLAIN)
    assert isinstance(time_s, float)
    return time_s


def test_numbers_marked_fitted_are_those_of_the_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the claim `kind: fitted`: the fit can be re-run from the shipped rows and gives the profile's numbers."""
    assert profiles.main(["--check"]) == 0, capsys.readouterr().err


def test_every_published_row_names_a_known_source() -> None:
    """Guards citations: each row of the shipped measurements leads to an address."""
    named: dict[bool, set[str]] = {True: set(), False: set()}
    for path in PUBLISHED.glob("*.csv"):
        if path.name in ("without_source.csv", "back_test.csv"):
            continue  # what fits make of the measurements
        with path.open(encoding="utf-8", newline="") as file:
            named[path.name == "sources.csv"] |= {record["source"] for record in csv.DictReader(file)}
    assert named[False] == named[True]


def test_all_gather_across_nodes_by_hand() -> None:
    """1 GiB over 16 GPUs on 4 nodes: 12 hops in nodes, 3 between them, 15/16 of the bytes at the node's bandwidth."""
    by_hand = 10.2e-6 + 12 * 3.4e-6 + 3 * 47.6e-6 + 15 / 16 * GIB / 65.8e9
    time_s = perlmutter_time_s("all_gather", ranks=16, stride=1, world=16, size_bytes=GIB)
    assert time_s == pytest.approx(by_hand, rel=1e-12)
    assert time_s == pytest.approx(16.3e-3, rel=0.1)  # measured: 16.3 ms


@pytest.mark.parametrize("name", ["mi300x", "mi355x"])
@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [("all_gather", 305, 360), ("reduce_scatter", 305, 360), ("all_reduce", 305, 360), ("all_to_all", 45, 50)],
)
def test_bus_bandwidths_of_two_nodes_of_amd(name: str, kind: CollectiveKind, least: float, most: float) -> None:
    """Guards what RCCL reaches over two nodes from 8 GiB on: ROCm/cvs expects 330 to 360 GB/s, of all-to-alls 45 to 50;
    312 inside a node of MI300X is measured and holds there for both."""
    machine, size = load_machine(name).document, 8 * 2**30
    found = lines(kind, route(GroupShape(((16, 1),)), machine.tiers, 16), machine)
    chosen = tuple((one.latency_s, one.bandwidth_bytes_per_s) for one in found)
    bus = bus_bytes(kind, 16, size) / float(collective_time_s(chosen, size, PLAIN)) / 1e9
    assert least <= bus <= most


GROUPED: tuple[tuple[MatmulLayout, int, int, int, int], ...] = (
    *(("NN", 2048, 4096, 7168, 992), ("NN", 4096, 4096, 7168, 1534), ("NN", 2048, 7168, 2048, 1203)),
    *(("NN", 4096, 7168, 2048, 1268), ("NT", 2048, 7168, 4096, 1091), ("NT", 4096, 7168, 4096, 1554)),
    *(("NT", 2048, 2048, 7168, 1208), ("NT", 4096, 2048, 7168, 1287), ("TN", 7168, 4096, 2048, 1256)),
    *(("TN", 7168, 4096, 4096, 1385), ("TN", 2048, 7168, 2048, 1182)),
)
"""Grouped GEMMs of 16 groups in BF16 on MI355X, TFLOP/s of hipBLASLt: layout, m, n and k of each (AMD-AGI/Primus-Turbo
PR 284)."""


def test_gemms_of_mi355x_by_their_contraction() -> None:
    """Guards the ramp over k: half of the measured GEMMs within 8%, and none as much faster as with the best shape's
    rate for all."""
    accelerator = load_machine("mi355x").document.accelerator
    rates = compute_rates(accelerator, "bf16")
    errors = []
    for layout, m, n, k, measured in GROUPED:
        rate = rates.matmul_flops_per_s[layout] / accelerator.training_share
        time_s = matmul_time_s(m, n, k, flops_per_s=rate, element_bytes=2.0, rates=rates, arithmetic=PLAIN)
        errors.append(2.0 * m * n * k / float(time_s - rates.matmul_launch_s) / 1e12 / measured - 1.0)
    assert median(map(abs, errors)) <= 0.08
    assert max(errors) <= 0.6
