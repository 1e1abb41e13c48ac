"""The timelines of the report: coarser than a trace, but with the same sums."""

from __future__ import annotations

from itertools import pairwise

import pytest

from axonn_tune.cost.prediction import Pricing
from axonn_tune.report.configuration import step_bars
from axonn_tune.specs.traces import COMPUTE_LANE
from tests.unit.report.pages import results

PLACES = (0, 2, 4, 30, 60)


@pytest.fixture(scope="module", params=PLACES)
def pricing(request: pytest.FixtureRequest) -> Pricing:
    """Configurations with and without layers not resharded after forward, replicas and several micro-batches."""
    return results().ranked.pricing(request.param)


@pytest.mark.parametrize("part", [1e9, 500, 7])
def test_a_step_has_all_its_work(pricing: Pricing, part: float) -> None:
    """Guards what is drawn: merging moves no time from one lane to another, and loses none."""
    bars = step_bars(pricing, finest_s=pricing.iteration_s / part)
    computed = sum(one.busy_s for one in bars if one.lane == COMPUTE_LANE)
    sent = sum(one.busy_s for one in bars if one.lane != COMPUTE_LANE)
    assert computed == pytest.approx(pricing.compute_s, rel=1e-6)
    assert sent == pytest.approx(pricing.communication_s, rel=1e-6)
    assert max(one.end_s for one in bars) == pytest.approx(pricing.iteration_s, rel=1e-9)
    assert min(one.start_s for one in bars) == pytest.approx(0.0, abs=1e-9)


def test_bars_of_a_lane_do_not_overlap(pricing: Pricing) -> None:
    """Guards lanes: one thing at a time, also after merging."""
    bars = sorted(step_bars(pricing, finest_s=pricing.iteration_s / 300), key=lambda one: (one.lane, one.start_s))
    for one, other in pairwise(bars):
        if one.lane == other.lane:
            assert other.start_s >= one.end_s - 1e-9


def test_few_bars_are_drawn() -> None:
    """Guards the size of the page: a step of many micro-batches has no more bars than can be seen."""
    for place in PLACES:
        pricing = results().ranked.pricing(place)
        assert len(step_bars(pricing, finest_s=pricing.iteration_s / 500)) < 2500
