"""Predicted vs. measured: figures of known data, verdicts, and what else could have been predicted."""

from __future__ import annotations

import math

import pytest

from axonn_tune.grid import Grid
from axonn_tune.report.validation import validation_document, validation_text
from axonn_tune.specs.document import to_yaml
from axonn_tune.specs.launch import LaunchGrid
from axonn_tune.specs.loading import parse_document
from axonn_tune.specs.results import ComparedConfiguration, Measurements, Pairs
from axonn_tune.validation.comparison import (
    RunComparison,
    compare_with_serial,
    paper_communication_s,
    repriced,
)
from axonn_tune.validation.quality import quality
from tests.unit.validation import made


def test_all_a_quarter_longer() -> None:
    """Guards the figures: ranks agree, the best is the best, and every prediction is a fifth short."""
    comparison = RunComparison(made.measurements(lambda number: 1.25))
    for found in (comparison.qualities["step"], comparison.qualities["communication"]):
        assert found.mape == pytest.approx(0.2)
        assert found.bias == pytest.approx(-0.2)
        assert found.spearman == pytest.approx(1.0)
        assert (found.regret, found.best) == (0.0, 1)
    assert all(one["mape"] == pytest.approx(0.2) for one in (*comparison.shares("axis"), *comparison.shares("op")))


def test_the_summary_by_hand() -> None:
    """Guards it: the predicted best takes 2 s where 1.6 s would do, half of the intervals hold, errors keep a sign."""
    found = quality(
        Pairs(
            predicted={"a": 1.0, "b": 1.1, "c": 3.0, "unmeasured": 1.0},
            low={"a": 0.5, "b": 1.0},
            high={"a": 1.5, "b": 2.1},
            measured={"a": 2.0, "b": 1.6, "c": 3.0, "unpredicted": 0.1},
        )
    )
    assert (found.rows, found.regret, found.best, found.best_rank) == (3, pytest.approx(0.25), 2, 2)
    assert found.spearman == pytest.approx(0.5)
    assert found.kendall == pytest.approx(1 / 3)
    assert (found.mape, found.bias, found.worst) == pytest.approx((0.8125 / 3, -0.8125 / 3, -0.5))
    assert (found.median, found.coverage, found.width) == pytest.approx((0.3125, 0.5, 1.0))
    nothing = quality(Pairs(measured={"a": 1.0}))
    assert nothing.rows == 0
    assert math.isnan(nothing.mape)


def test_repeats_count_by_their_median() -> None:
    """Guards robustness: one disturbed run of three moves nothing but the spread."""
    once = made.measurements(runs=3)
    first = once.configurations[0]
    step_s = first.runs[1].measured["step_s"]
    slow = first.runs[1].model_copy(update={"measured": first.runs[1].measured | {"step_s": 10.0 * step_s}})
    changed = first.with_runs((first.runs[0], slow, first.runs[2]), first.terms)
    row = RunComparison(once.model_copy(update={"configurations": (changed,)})).pairs["step_s"].row(first.name)
    assert row["error"] == pytest.approx(0.0)
    assert row["spread"] == pytest.approx(9.0)


def test_gain_of_overlapping() -> None:
    """Guards the gain: a step of 0.8 of what it takes without overlaps is one of 20%, measured and predicted alike."""
    document = made.measurements()
    one = document.configurations[0]
    step_s = one.pairs.predicted["step_s"] / 0.8
    pairs = one.pairs.model_copy(update={"predicted": {"step_s": step_s}, "measured": {"step_s": step_s}})
    blocking = one.workload.model_copy(update={"overlaps": ()})
    slow = one.model_copy(update={"workload": blocking, "pairs": pairs})
    gains = RunComparison(document.model_copy(update={"configurations": (one, slow)})).gains
    assert (gains.predicted, gains.measured) == ({one.name: pytest.approx(0.2)}, {one.name: pytest.approx(0.2)})


def trained(configuration: ComparedConfiguration, *, loss: float = 0.0, norm: float = 0.0) -> ComparedConfiguration:
    """The configuration with its first loss or norm off by a share."""
    run = configuration.runs[0]
    losses = (made.LOSSES[0] * (1.0 + loss), made.LOSSES[1])
    norms = (made.NORMS[0] * (1.0 + norm), made.NORMS[1])
    return configuration.model_copy(
        update={"runs": (run.model_copy(update={"losses": losses, "gradient_norms": norms}),)}
    )


def test_verdicts_in_words() -> None:
    """Guards the verdict: equal, within rounding, wrong and in which part; nothing to compare with says so."""
    document = made.measurements()
    one, serial = document.configurations[0], document.serial
    assert compare_with_serial(one, serial).words == "equal"
    assert compare_with_serial(trained(one, loss=1e-4), serial).words == "within rounding (1e-04)"
    assert (
        "loss of step 1 differs by 5.0%: the forward pass" in compare_with_serial(trained(one, loss=0.05), serial).words
    )
    assert (
        "gradient norm of step 1 differs by 50.0%: the gradients"
        in compare_with_serial(trained(one, norm=0.5), serial).words
    )
    assert compare_with_serial(trained(one, loss=math.nan), serial).agreement == "wrong"
    assert compare_with_serial(one, None).words == "not compared"


@pytest.mark.parametrize(
    ("axes", "named"), [(("y",), "y is"), (("data",), "data is"), (("x", "z"), "x and z together are")]
)
def test_wrong_axes_are_named(axes: tuple[str, ...], named: str) -> None:
    """Guards the words for wrong axes: what splits all of them is wrong, and just those are said."""
    document = made.measurements()
    broken = [
        trained(one, norm=0.5) if all(one.grid.grid().axis_size(axis) > 1 for axis in axes) else one
        for one in document.configurations
    ]
    comparison = RunComparison(document.model_copy(update={"configurations": tuple(broken)}))
    assert comparison.blame == f"wrong wherever {named} split, and nowhere else"
    assert not comparison.sound
    assert f"Training is wrong wherever {named} split" in validation_text(comparison)


def test_collectives_that_differ_from_the_program_fail() -> None:
    """Guards the ledger: what was sent otherwise is shown, and is no success."""
    document = made.measurements()
    first = document.configurations[0]
    differs = first.runs[0].model_copy(update={"differs": ("all_reduce over x: none (on 8 of the ranks)",)})
    changed = (first.model_copy(update={"runs": (differs,)}), *document.configurations[1:])
    comparison = RunComparison(document.model_copy(update={"configurations": changed}))
    assert not comparison.sound
    assert "all_reduce over x: none" in validation_text(comparison)
    assert validation_document(comparison)["sound"] is False


def test_same_profile_prices_the_same() -> None:
    """Guards repricing: predictions of the same profile are those in the file, which loads back equal."""
    document = made.measurements(runs=2)
    assert parse_document(to_yaml(document), schema=Measurements) == document
    again = repriced(document, document.machine)
    for before, now in zip(document.configurations, again.configurations, strict=True):
        assert now.pairs.predicted == before.pairs.predicted
        assert [term.seconds for term in now.terms] == [term.seconds for term in before.terms]


def test_paper_rule_by_hand() -> None:
    """Guards the paper's rule: ring bytes of what is really sent, over β_inter / min(G_node, inner axes)."""
    document = made.measurements()
    tier = document.machine.tiers[0].model_copy(update={"measured": None, "collectives": None})
    node = tier.model_copy(update={"ranks": 4, "bandwidth_gb_per_s": 100e-9})
    machine = document.machine.model_copy(
        update={"tiers": (node, tier.model_copy(update={"ranks": None, "bandwidth_gb_per_s": 10e-9}))}
    )
    only_data = next(one for one in document.configurations if one.grid.data == 8)
    term = only_data.terms[0].model_copy(update={"op": "all_reduce", "count": 1, "bytes": 1000})

    def rule(axis: str, grid: Grid) -> float:
        shape = LaunchGrid.from_fields_of(grid)
        one = term.model_copy(update={"axis": axis, "group": grid.axis_size(axis)})
        changed = only_data.model_copy(update={"grid": shape, "terms": (one,)})
        sent = 2 * (one.group - 1) / one.group * one.bytes
        return sent / paper_communication_s(changed, machine, world=grid.world)

    assert rule("x", Grid(x=4)) == pytest.approx(100.0)
    assert rule("x", Grid(x=8)) == pytest.approx(10.0)
    assert rule("y", Grid(x=2, y=4)) == pytest.approx(5.0)
    assert rule("y", Grid(x=8, y=2)) == pytest.approx(2.5)
    sent = sum(2 * 7 / 8 * term.bytes * term.count for term in only_data.terms)
    assert paper_communication_s(only_data, machine, world=8) == pytest.approx(sent / 10.0)
