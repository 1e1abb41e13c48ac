"""Gates against a baseline: what fails, what is tracked, what only warns; and how it is written."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from axonn_tune.report.validation import regression_json, regression_junit, regression_markdown, regression_text
from axonn_tune.specs.document import to_yaml
from axonn_tune.specs.loading import parse_document
from axonn_tune.specs.results import Baseline, Floors, Tolerances
from axonn_tune.validation.regression import baseline_of, check
from tests.unit.validation import made


def baseline(*, floors: Floors | None = None) -> Baseline:
    """Of measurements that are just as predicted."""
    return baseline_of(made.measurements(), reason="a test", tolerances=Tolerances(), floors=floors or Floors())


def test_unchanged_passes_without_a_warning() -> None:
    """Guards the gates from crying wolf."""
    found = check(baseline(floors=Floors(spearman=0.99, regret=0.01)), measurements=made.measurements())
    assert (found.failures, found.warnings) == ((), ())
    assert "none beyond tolerance" in regression_text(found)


def test_moved_prediction_fails_whichever_way() -> None:
    """Guards the first gate: a faster network moves predictions, which blocks, and says that the profile differs."""
    machine = made.machine()
    tiers = tuple(tier.model_copy(update={"latency_us": tier.latency_us / 2.0}) for tier in machine.tiers)
    found = check(baseline(), machine=machine.model_copy(update={"tiers": tiers}))
    assert {one.gate for one in found.failures} == {"predictions"}
    assert all(one.change is not None and one.change < 0.0 for one in found.failures)
    assert "profile 'perlmutter'" in found.warnings[0]
    wide = check(baseline(), machine=machine.model_copy(update={"tiers": tiers}), tolerances=Tolerances(prediction=0.9))
    assert wide.failures == ()


def test_slower_step_fails_and_a_faster_one_does_not() -> None:
    """Guards the second gate: 30% longer is more than 10% and 20%; memory did not grow."""
    found = check(baseline(), measurements=made.measurements(lambda number: 1.3 if number == 0 else 0.7))
    failed = {(one.gate, one.quantity) for one in found.failures}
    assert failed == {("measurements", "step"), ("measurements", "communication")}
    assert len({one.subject for one in found.failures}) == 1


def test_configuration_that_no_longer_runs_fails() -> None:
    """Guards against a regression that hides by not being measured; what is new is said."""
    document = made.measurements()
    fewer = document.model_copy(update={"configurations": document.configurations[1:]})
    found = check(baseline(), measurements=fewer)
    assert {one.now for one in found.failures} == {None}
    assert "missing" in regression_text(found)
    less = baseline()
    grown = check(less.model_copy(update={"configurations": less.configurations[1:]}), measurements=document)
    assert grown.failures == ()
    assert "not in the baseline" in grown.warnings[0]


def test_accuracy_is_tracked_and_fails_below_its_floor_alone() -> None:
    """Guards the third: worse than before passes, worse than the floor does not."""
    worse = made.measurements(lambda number: 1.0 + 0.05 * (number % 2))
    tracked = check(baseline(), measurements=worse, tolerances=Tolerances(step=1.0, communication=1.0))
    assert tracked.failures == ()
    errors = {one.quantity: one for one in tracked.of("accuracy")}
    assert errors["mean error of steps"].before == pytest.approx(0.0)
    assert 0.02 < (errors["mean error of steps"].now or 0.0) < 0.03
    floors = Floors(step_error=0.01)
    failed = check(baseline(floors=floors), measurements=worse, tolerances=Tolerances(step=1.0, communication=1.0))
    assert [one.quantity for one in failed.failures] == ["mean error of steps"]


def test_another_machine_warns() -> None:
    """Guards comparisons of what cannot be compared: each thing that differs is named."""
    document = made.measurements()
    elsewhere = document.model_copy(update={"place": made.place().model_copy(update={"cores": 64, "host": "there"})})
    found = check(baseline(), measurements=elsewhere)
    assert len(found.warnings) == 2
    assert "host was 'here', is 'there'" in found.warnings[0]
    assert found.failures == ()


def test_predictions_alone() -> None:
    """Guards baselines without runs: accuracy has nothing to say, measurements warn."""
    alone = baseline_of(made.chosen(top=3), reason="", tolerances=Tolerances(), floors=Floors(spearman=0.9))
    assert parse_document(to_yaml(alone), schema=Baseline) == alone
    bare = alone.model_copy(update={"floors": Floors()})
    assert parse_document(to_yaml(bare), schema=Baseline) == bare
    found = check(alone)
    assert {one.gate for one in found.findings} == {"predictions"}
    assert "no measurements" in check(alone, measurements=made.measurements()).warnings[0]


def test_reports_say_the_same() -> None:
    """Guards what CI reads: JUnit counts configurations, Markdown and JSON name the failures."""
    found = check(baseline(), measurements=made.measurements(lambda number: 2.0 if number < 2 else 1.0))
    suites = {suite.get("name"): suite for suite in ElementTree.fromstring(regression_junit(found))}
    count = str(len(made.chosen().launches))
    assert (suites["predictions"].get("tests"), suites["predictions"].get("failures")) == (count, "0")
    assert (suites["measurements"].get("tests"), suites["measurements"].get("failures")) == (count, "2")
    failure = suites["measurements"].find("testcase/failure")
    assert failure is not None
    assert "+100.00%" in (failure.text or "")
    assert "| FAIL |" in regression_markdown(found)
    assert '"passed": false' in regression_json(found)
