"""The shipped machine profiles: they load, say where their numbers come from, and give times one can check by hand."""

from __future__ import annotations

import csv

import pytest

from axonn_tune.cost.collectives import collective_time_s, lines, route
from axonn_tune.grid import GroupShape
from axonn_tune.program.operations import PLAIN
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.machine import CollectiveKind
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
