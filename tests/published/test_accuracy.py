"""How far predictions are from published measurements: floors, which may only get better."""

from __future__ import annotations

import math
from collections import Counter
from statistics import fmean, median

import pytest

from axonn_tune.validation.published.accuracy import Accuracy, Files, evaluate, without
from axonn_tune.validation.published.measurements import errors_by_group


@pytest.fixture(scope="module")
def found() -> Accuracy:
    """Everything, predicted once."""
    return evaluate(Files(), worst=5)


def test_nearly_every_row_is_predicted(found: Accuracy) -> None:
    """Guards coverage of frameworks and layouts: a row may only be left out for a reason, and few are."""
    assert found.summary.predicted >= 0.995 * found.summary.rows
    assert all(one.why_not for one in found.summary.not_predicted)


def test_steps_are_met(found: Accuracy) -> None:
    """Guards step times over all sources."""
    assert found.summary.errors.mape <= STEP_MEAN
    assert found.summary.errors.median <= STEP_MEDIAN


def test_steps_that_no_fit_had_seen_are_met(found: Accuracy) -> None:
    """Guards what others can expect: fits without a row's family, and without its whole source."""
    family, source = found.without["family"], found.without["source"]
    assert family.errors.rows == source.errors.rows == found.summary.errors.rows
    assert family.errors.mape <= STEP_MEAN
    assert family.errors.median <= STEP_MEDIAN
    assert fmean(one.mape for one in source.by_source.values()) <= WITHOUT_SOURCE
    assert (family.spearman or 0.0) >= SPEARMAN
    assert (family.regret or math.inf) <= REGRET
    assert 0.75 <= family.coverage <= 0.9


def test_left_out_rows_stem_from_the_model_as_it_is(found: Accuracy) -> None:
    """Guards left_out.csv against a model that has moved since: a family less moves predictions by little."""
    shipped = {one.row.id: one.predicted_s or 0.0 for one in found.steps}
    moved = [abs((one.predicted_s or 0.0) / shipped[one.row.id] - 1.0) for one in without(found.steps, "family")]
    assert median(moved) <= 0.01
    assert fmean(moved) <= 0.02


@pytest.mark.parametrize("source", ["bigscience_a100", "dgxc", "llmfoundry_mpt_fsdp", "torchtitan", "vtrain_single"])
def test_no_source_is_far_off(found: Accuracy, source: str) -> None:
    """Guards sources against one that is bought with the others."""
    assert found.summary.by_source[source].mape <= SOURCE_MEAN


def test_layouts_are_ranked(found: Accuracy) -> None:
    """Guards the ranking, which is what the tool is for."""
    assert (found.summary.spearman or 0.0) >= SPEARMAN
    assert (found.summary.regret or math.inf) <= REGRET
    assert (found.summary.best_in_top_5 or 0.0) >= 0.9


def test_intervals_hold_what_they_say(found: Accuracy) -> None:
    """Guards the word 80%: set from rows that fits had not seen, counted on all."""
    assert 0.75 <= found.summary.coverage <= 0.9


def test_collectives_and_gemms_are_met(found: Accuracy) -> None:
    """Guards collectives from 1 MiB and GEMMs from 10 GFLOP up, in the median."""
    assert errors_by_group(found.collectives)["all"].median <= 0.08
    assert errors_by_group(found.gemms)["all"].median <= 0.06


def test_memory_is_met(found: Accuracy) -> None:
    """Guards memory, activations and states alike."""
    assert errors_by_group(found.memory)["all"].mape <= 0.01


def test_rows_are_left_out_for_known_reasons(found: Accuracy) -> None:
    """Guards scope: of 4,411 collectives those are left out that no layout sends or no profile covers."""
    reasons = Counter(one.why_not for one in found.collectives if one.why_not)
    assert sum(reasons.values()) <= 2000


STEP_MEAN, STEP_MEDIAN, SOURCE_MEAN, WITHOUT_SOURCE = 0.055, 0.031, 0.065, 0.127
SPEARMAN, REGRET = 0.93, 0.037
