"""`--set`: single values changed from the command line, and what that does to their provenance."""

from __future__ import annotations

from pathlib import Path

import pytest

from axonn_tune.errors import DocumentError, UsageError
from axonn_tune.specs.catalog import load_machine, load_model, route_overrides
from axonn_tune.specs.machine import Machine, Source

MACHINE = str(Path(__file__).parent / "data" / "twotier.yaml")
ASSUMED = Source(kind="assumed", source="--set on the command line")


def with_set(*assignments: str) -> Machine:
    """The test machine with assignments applied."""
    return load_machine(MACHINE, overrides=assignments).document


def test_a_number_is_set_and_becomes_an_assumption() -> None:
    """Guards provenance: a number typed in must not keep the source of the one it replaces."""
    machine = with_set("tiers.network-1.0.bandwidth_gb_per_s=20", "accelerator.peak_tflops.bf16=25e1")
    assert machine.tiers[1].bandwidth_gb_per_s == 20
    assert machine.tiers[1].sources["bandwidth_gb_per_s"] == ASSUMED
    assert machine.tiers[1].sources["latency_us"].source == "invented"
    assert machine.accelerator.peak_tflops == {"bf16": 250, "fp32": 25}
    assert (
        machine.accelerator.sources["peak_tflops"].source
        == f"{ASSUMED.source}; others scaled: times 2.5, as that of bf16"
    )


def test_a_model_keeps_its_source_and_says_what_was_set() -> None:
    """Guards a model's one source, which would otherwise vouch for sizes it never gave."""
    model = load_model("nano", overrides=["layers=4", "defaults.global_batch=6"]).document
    assert (model.layers, model.defaults.global_batch) == (4, 6)
    assert model.source.endswith("; layers: --set on the command line")


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("nonsense", "--set needs KEY=VALUE, not 'nonsense'"),
        ("=3", "--set needs KEY=VALUE"),
        ("tiers.netwrk.latency_us=3", "no 'netwrk' in 'tiers', did you mean 'network-1.0'?"),
        (
            "tiers.link.bandwith_gb_per_s=3",
            "no 'bandwith_gb_per_s' in 'tiers.link', did you mean 'bandwidth_gb_per_s'?",
        ),
        ("tiers.7.latency_us=3", "no '7' in 'tiers'"),
        ("accelerator.memory_gib.x=3", "no 'x' in 'accelerator.memory_gib'"),
        ("tiers.link.bandwidth_gbit_per_s=400", "'bandwidth_gb_per_s'? That is gigabytes a second: divide Gbit by 8"),
        ("acelerator.memory_gib=3", "no 'acelerator', did you mean 'accelerator'?"),
        ("launcher.slurm.account=m1", "has no 'launcher.slurm' to change a part of"),
        ("accelerator.memory_gib={a: 1}", "must be a YAML scalar or list"),
        ("accelerator.memory_gib=[1", "no YAML scalar or list"),
        ("accelerator.memory_gib=*x", "must be a YAML scalar or list"),
    ],
)
def test_a_wrong_assignment_is_a_usage_error(assignment: str, words: str) -> None:
    """Guards the messages for paths that do not exist and values that are none."""
    with pytest.raises(UsageError) as caught:
        with_set(assignment)
    assert words in str(caught.value)


def test_a_wrong_value_is_reported_as_set() -> None:
    """Guards against sending the user to a line of the file for a value typed in."""
    with pytest.raises(DocumentError) as caught:
        with_set("tiers.link.latency_us=-1", "accelerator.matmul_tile=x")
    assert [problem.line for problem in caught.value.problems] == [None, None]
    assert "must be greater than or equal to 0, not -1 (from --set on the command line)" in str(caught.value)


def test_assignments_are_routed_by_their_first_key() -> None:
    """Guards one --set for both documents: each key belongs to one, and the ambiguous ones say so."""
    assignments = ["layers=3", "tiers.link.latency_us=1", "model.name=a", "machine.name=b"]
    assert route_overrides(assignments) == (["layers=3", "name=a"], ["tiers.link.latency_us=1", "name=b"])
    with pytest.raises(UsageError, match=r"write model\.name or machine\.name"):
        route_overrides(["name=c"])
    with pytest.raises(UsageError, match="unknown key 'layer', did you mean 'layers'"):
        route_overrides(["layer=3"])
