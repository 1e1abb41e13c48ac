"""Numbers of a profile by their path."""

from __future__ import annotations

import pytest

from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.machine import CollectiveFactors, Machine, MeasuredBandwidth, Software
from axonn_tune.specs.numbers import kind_at, number_at, scaled, with_numbers


def machine() -> Machine:
    """DGX H100 with software of its own, a collective that differs, a measured group, and a tier with a dot."""
    found = load_machine("dgx-h100").document
    inner, outer = found.tiers
    factors = {"all_reduce": CollectiveFactors(latency_factor=2.0, bandwidth_factor=0.5)}
    measured = (
        MeasuredBandwidth(stride=1, group=4, bandwidth_gb_per_s=200.0),
        MeasuredBandwidth(stride=2, group=4, bandwidth_gb_per_s=100.0),
    )
    outer = outer.model_copy(update={"name": "ib.ndr", "collectives": factors, "measured": measured})
    software = {"core": Software(gemm=1.1)}
    return found.model_copy(update={"tiers": (inner, outer), "software": software})


PATHS = {
    "accelerator.training_share": machine().accelerator.training_share,
    "accelerator.peak_tflops.bf16": machine().accelerator.peak_tflops["bf16"],
    "library.launch_us": machine().library.launch_us,
    "tiers.nvlink.latency_us": machine().tiers[0].latency_us,
    "tiers.ib.ndr.bandwidth_gb_per_s": machine().tiers[1].bandwidth_gb_per_s,
    "tiers.ib.ndr.collectives.all_reduce.bandwidth_factor": 0.5,
    "software.core.gemm": 1.1,
}


@pytest.mark.parametrize("path", PATHS)
def test_a_number_is_read_scaled_and_replaced(path: str) -> None:
    """Guards every kind of section: lists by name, mappings by key, names with dots; nothing else changes."""
    before = machine()
    assert number_at(before, path) == PATHS[path]
    for after, value in ((scaled(before, {path: 1.5}), 1.5 * PATHS[path]), (with_numbers(before, {path: 0.7}), 0.7)):
        assert number_at(after, path) == value
        assert {one: number_at(after, one) for one in PATHS if one != path} == {
            one: PATHS[one] for one in PATHS if one != path
        }
    assert before == machine(), "profiles are values"


def test_measured_groups_go_with_their_tier() -> None:
    """Guards consistency: a tier of 0.8 times the bandwidth has groups of 0.8 times theirs, each once."""
    after = scaled(machine(), {"tiers.ib.ndr.bandwidth_gb_per_s": 0.8})
    assert [one.bandwidth_gb_per_s for one in after.tiers[1].measured or ()] == pytest.approx([160.0, 80.0])
    assert scaled(machine(), {"tiers.ib.ndr.latency_us": 0.8}).tiers[1].measured == machine().tiers[1].measured


@pytest.mark.parametrize(
    "path", ["software.eager.gemm", "tiers.slingshot.latency_us", "tiers.nvlink.collectives.all_reduce.latency_factor"]
)
def test_what_is_not_there_is_named_and_left_alone(path: str) -> None:
    """Guards profiles without a section: no number to read, none to scale."""
    with pytest.raises(KeyError, match=path):
        number_at(machine(), path)
    assert scaled(machine(), {path: 2.0}) == machine()


def test_provenance_of_a_number() -> None:
    """Guards prior spreads: the kind that the number's own section gives, of a whole mapping for its items."""
    found = machine()
    for name, tier in (("nvlink", found.tiers[0]), ("ib.ndr", found.tiers[1])):
        assert kind_at(found, f"tiers.{name}.bandwidth_gb_per_s") == tier.sources["bandwidth_gb_per_s"].kind
    assert kind_at(found, "accelerator.peak_tflops.bf16") == "peak"
    assert kind_at(found, "software.core.gemm") == ""
    assert kind_at(found, "tiers.slingshot.latency_us") == ""
