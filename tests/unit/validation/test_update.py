"""What runs taught, folded back into a profile."""

from __future__ import annotations

import pytest

from axonn_tune.specs.document import to_yaml
from axonn_tune.specs.loading import parse_document
from axonn_tune.specs.machine import Machine
from axonn_tune.validation.comparison import RunComparison, repriced
from axonn_tune.validation.update import updated
from tests.unit.validation import made


def slower(machine: Machine) -> Machine:
    """Twice the latency and two thirds of the bandwidth between nodes, half the speed of computation."""
    inner, outer = machine.tiers
    tier = outer.model_copy(
        update={"latency_us": 2.0 * outer.latency_us, "bandwidth_gb_per_s": outer.bandwidth_gb_per_s / 1.5}
    )
    core = machine.accelerator
    half = core.model_copy(
        update={
            "peak_tflops": {name: peak / 2.0 for name, peak in core.peak_tflops.items()},
            "memory_bandwidth_gb_per_s": core.memory_bandwidth_gb_per_s / 2.0,
            "matmul_launch_us": core.matmul_launch_us * 2.0,
            "kernel_launch_us": core.kernel_launch_us * 2.0,
        }
    )
    return machine.model_copy(update={"tiers": (inner, tier), "accelerator": half})


@pytest.mark.parametrize(("contention", "least_error"), [(0.0, 1e-3), (0.5, 2e-2)])
def test_a_slower_machine_is_learnt(contention: float, least_error: float) -> None:
    """Guards --update: after runs on a machine slower than its profile, the profile predicts them.

    Where communication slows computation, what is not learnt of the one shows in the other.
    """
    core = made.machine().accelerator.model_copy(update={"contention": contention})
    machine = made.machine().model_copy(update={"accelerator": core})
    document = repriced(made.measurements(real=slower(machine)), machine)
    learnt = updated(document, machine)
    before, after = RunComparison(document), RunComparison(repriced(document, learnt.machine))
    assert after.quality_of("computation").mape < least_error < before.quality_of("computation").mape
    assert after.quality_of("communication").mape < 0.5 * before.quality_of("communication").mape
    computing = next(change for change in learnt.changes if change.what == "computation")
    assert computing.factor == pytest.approx(2.0)
    assert any("network" in change.what or machine.tiers[1].name in change.what for change in learnt.changes)


def test_nothing_learnt_changes_nothing() -> None:
    """Guards profiles: runs as predicted leave every prediction as it was."""
    document = made.measurements()
    learnt = updated(document, document.machine)
    assert all(change.factor == pytest.approx(1.0) for change in learnt.changes)
    assert RunComparison(repriced(document, learnt.machine)).quality_of("step").mape < 1e-6


def test_updated_profile_says_what_it_was_fitted_to() -> None:
    """Guards provenance, and that it does not grow with every update; the profile loads back."""
    document = made.measurements(lambda number: 1.5)
    once = updated(document, document.machine).machine
    twice = updated(document, once).machine
    for found in (once, twice):
        source = found.accelerator.sources["peak_tflops"]
        assert source.kind == "fitted"
        assert source.source.count("then fitted to runs of nano on 8 ranks, 2026-01-02") == 1
        assert parse_document(to_yaml(found), schema=Machine) == found
