"""What a user states of a machine holds: what hangs on the value that it replaces is dropped, scaled or named."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from axonn_tune.cost.uncertainty import covariance_of
from axonn_tune.errors import DocumentError
from axonn_tune.specs.catalog import available, load_machine
from axonn_tune.specs.loading import Loaded
from axonn_tune.specs.machine import Learned, LearnedNumber, Machine
from axonn_tune.specs.numbers import number_at, told


def with_set(name: str, *assignments: str) -> Loaded[Machine]:
    """A shipped machine with assignments applied."""
    return load_machine(name, overrides=assignments)


def groups(machine: Machine) -> list[float]:
    """Bandwidths measured of groups of the innermost level, GB/s."""
    return [one.bandwidth_gb_per_s for one in machine.tiers[0].measured or ()]


def test_shipped_profiles_are_as_they_are_written() -> None:
    """Guards the prices of shipped machines: those that extend another restate what hangs on what they replace."""
    changed = {name: told(load_machine(name).consequences, kept=False) for name in available("machine")}
    assert not any(changed.values()), changed


@pytest.mark.parametrize(
    ("machine", "bandwidth", "left"),
    [
        ("dgx-h100", 22, []),
        ("dgx-h100", 250, [229, 229, 229]),
        ("dgx-h100", 339, [229, 229, 229, 300, 300]),
        ("dgx-h100", 678, [458, 458, 458, 600, 600]),
        ("mi300x", 60, [47.7, 47.7, 47.7]),
        ("frontier", 40, [38.7]),
    ],
)
def test_no_group_exceeds_a_stated_bandwidth(machine: str, bandwidth: float, left: list[float]) -> None:
    """Guards a slower link, which bandwidths measured on a faster one hid, and that a faster one is faster for all."""
    path = "tiers." + load_machine(machine).document.tiers[0].name
    assert groups(with_set(machine, f"{path}.bandwidth_gb_per_s={bandwidth}").document) == pytest.approx(left)


def test_links_of_another_kind_have_no_switch() -> None:
    """Guards NVLS, which PCIe has not; links in bad order keep it."""
    kept, dropped = (with_set("dgx-h100", f"tiers.nvlink.bandwidth_gb_per_s={one}").document for one in (200, 50))
    assert "in_switch" in kept.library.algorithms["all_reduce"]
    assert dropped.library.algorithms["all_reduce"] == ("ring", "tree")


def test_peaks_follow_that_of_16_bits() -> None:
    """Guards peaks of other formats, which were up to 13 times BF16's, and that a stated one is not touched."""
    found = with_set("dgx-h100", "accelerator.peak_tflops.bf16=148", "accelerator.peak_tflops.fp64=1")
    peaks, vector = found.document.accelerator.peak_tflops, found.document.accelerator.vector_tflops
    assert (peaks["fp16"], peaks["fp64"]) == (148, 1)
    assert peaks["fp8-current"] == pytest.approx(1979 * 148 / 989, rel=1e-3)
    assert vector is not None
    assert vector["bf16"] == pytest.approx(133.8 * 148 / 989, rel=1e-3)
    assert "fp8-blockwise" in "".join(told(found.consequences, kept=False))
    narrow = with_set("dgx-h100", "accelerator.peak_tflops.fp8-current=1000").document.accelerator.peak_tflops
    assert (narrow["bf16"], narrow["fp8-blockwise"]) == (989, 1000)


def test_nodes_follow_their_domain() -> None:
    """Guards a node of four: a rank's share of the network stays, and scripts start nodes of four."""
    machine = with_set("dgx-h100", "tiers.nvlink.ranks=4").document
    assert machine.tiers[1].bandwidth_gb_per_s == 190
    assert (machine.launcher.ranks_per_node, machine.launcher.slurm and machine.launcher.slurm.extra) == (
        4,
        ("--gpus-per-node=4",),
    )
    stated = with_set("dgx-h100", "tiers.nvlink.ranks=4", "tiers.network.bandwidth_gb_per_s=380").document
    assert stated.tiers[1].bandwidth_gb_per_s == 380
    rack = with_set("dgx-b200", "tiers.nvlink.ranks=72").document
    assert (rack.tiers[1].bandwidth_gb_per_s, rack.launcher.ranks_per_node) == (3312, 8)


@pytest.mark.parametrize(
    ("machine", "settings"),
    [
        ("dgx-h100", ["launcher.ranks_per_node=4"]),
        ("dgx-h100", ["launcher.ranks_per_node=16"]),
        ("dgx-b200", ["tiers.nvlink.ranks=36"]),
        ("gb200-nvl72", ["launcher.ranks_per_node=5"]),
    ],
)
def test_nodes_that_are_no_domain_are_refused_with_both_values(machine: str, settings: list[str]) -> None:
    """Guards scripts, which started other nodes than those that were priced."""
    with pytest.raises(DocumentError, match=r"ranks_per_node:? is \d+, but .*tiers\.nvlink\.ranks \d+"):
        with_set(machine, *settings)


PCIE = """
schema: axonn-tune/machine/1
extends: dgx-a100
name: a100-pcie
accelerator:
  name: A100-PCIe-80GB
  memory_bandwidth_gb_per_s: 1935
  sources: {memory_bandwidth_gb_per_s: {kind: peak, source: datasheet}}
tiers:
  - name: nvlink
    bandwidth_gb_per_s: 19
    sources: {bandwidth_gb_per_s: {kind: measured, source: nccl-tests}}
"""


def test_a_file_that_extends_another_says_what_it_inherits(tmp_path: Path) -> None:
    """Guards `machines check`, which found nothing to say of PCIe with the bandwidths of NVLink: dropped, scaled and
    kept; and a file that extends this one."""
    (tmp_path / "a100-pcie.yaml").write_text(PCIE, encoding="utf-8")
    found = load_machine(tmp_path / "a100-pcie.yaml")
    assert groups(found.document) == []
    assert found.document.tiers[0].sources["measured"].kind == "assumed"
    said = told(found.consequences, kept=True)
    assert any(line.startswith("tiers.nvlink.measured dropped") for line in said)
    assert any("memory_efficiency kept" in line for line in said)
    assert any("memory_gib" in line and "A100-SXM4-80GB" in line for line in said)
    assert "kept" not in "".join(told(found.consequences, kept=False))
    (tmp_path / "more.yaml").write_text(
        "schema: axonn-tune/machine/1\nextends: a100-pcie\nname: more\n", encoding="utf-8"
    )
    assert load_machine(tmp_path / "more.yaml").consequences == found.consequences
    assert load_machine(found, overrides=["accelerator.memory_gib=70"]).consequences[: len(found.consequences)] == (
        found.consequences
    )


def test_the_papers_table_is_of_its_own_network() -> None:
    """Guards `--cost paper`, whose table of bandwidths knows nothing of a changed level."""
    assert load_machine("perlmutter", overrides=["accelerator.memory_gib=70"]).document.paper is not None
    assert with_set("perlmutter", "tiers.slingshot.bandwidth_gb_per_s=20").document.paper is None


def test_a_learned_number_that_is_stated_is_as_uncertain_as_before() -> None:
    """Guards intervals: the covariance that was learned is not that of another value."""
    paths = ("tiers.network.bandwidth_gb_per_s", "tiers.nvlink.bandwidth_gb_per_s")
    base = load_machine("dgx-h100").document
    numbers = tuple(
        LearnedNumber(path=path, prior=number_at(base, path), prior_spread=0.4, value=number_at(base, path), spread=0.1)
        for path in paths
    )
    learned = Learned(
        evidence=("a log",),
        ranks=8.0,
        numbers=numbers,
        correlations=((), (0.5,)),
        of_layout=0.04,
        of_model=0.05,
        per_doubling=0.01,
    )
    held = load_machine(base.model_copy(update={"learned": learned}), overrides=[f"{paths[0]}=100"]).document.learned
    assert held is not None
    covariance = covariance_of(held)
    assert [math.sqrt(covariance[at, at]) for at in range(2)] == pytest.approx([0.4, 0.1])
    assert covariance[0, 1] == pytest.approx(0.0)
    assert (held.numbers[0].value, held.numbers[1].value) == (100, 339)
