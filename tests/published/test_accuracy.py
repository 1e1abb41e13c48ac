"""How far predictions are from published measurements: floors, which may only get better."""

from __future__ import annotations

import math
from collections import Counter
from statistics import fmean, median

import pytest

from axonn_tune.cost import evidence, uncertainty
from axonn_tune.validation.published.accuracy import SUMS, Accuracy, without
from axonn_tune.validation.published.measurements import errors_by_group
from tools.fit import scale
from tools.large_runs import RUNS, find


@pytest.fixture(name="found")
def _found(accuracy: Accuracy) -> Accuracy:
    return accuracy


def test_nearly_every_row_is_predicted(found: Accuracy) -> None:
    """Guards coverage of frameworks and layouts: a row may only be left out for a reason, and few are."""
    assert found.summary.predicted >= 0.95 * found.summary.rows
    assert all(one.why_not for one in found.summary.not_predicted)
    assert found.summary.not_fitting <= 0.012 * found.summary.rows


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


def test_printed_intervals_hold_what_they_say(found: Accuracy) -> None:
    """Guards the word 80% where no fit had seen the source: over all rows but those of sums, and in each source of 50
    rows; and that intervals are no wider than those that searches printed before they grew with scale."""
    assert found.apart is not None
    assert 0.75 <= found.apart.coverage <= 0.9
    assert found.apart.width <= WIDTH_BEFORE
    source = found.without["source"]
    large = {name: held for name, (held, _) in source.intervals.items() if source.by_source[name].rows >= 50}
    assert SUMS in large
    assert all(0.65 <= round(held, 2) <= 0.97 for held in large.values()), large


def test_intervals_grow_as_the_series_say(found: Accuracy) -> None:
    """Guards the numbers of scale, and the largest sizes in evidence, against rows or a model that have moved since."""
    shipped = uncertainty.PER_DOUBLING, uncertainty.PER_STAGE_DOUBLING
    assert scale.numbers(found.steps) == pytest.approx(shipped, rel=0.15)
    assert scale.largest(found.steps) == evidence.LARGEST
    scored = {one.row.gpu for one in found.steps if one.error is not None}
    assert all(any(name in gpu for name in evidence.ACCELERATORS) for gpu in scored)


def test_large_runs_are_within_their_intervals() -> None:
    """Guards scale where no row is: three of AxoNN's four large runs, in intervals no wider than ±35%."""
    met = [one.inside and one.half <= 0.35 for one in map(find, RUNS)]
    assert sum(met) >= 3


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


STEP_MEAN, STEP_MEDIAN, SOURCE_MEAN, WITHOUT_SOURCE = 0.055, 0.031, 0.065, 0.129
WIDTH_BEFORE = 0.536
"""Mean width over the prediction of the intervals that `search` printed for these rows before, ±25% and more."""
SPEARMAN, REGRET = 0.93, 0.037
