"""The timelines of the report: coarser than a trace, but with the same sums."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest

from axonn_tune.cost.price import Detail
from axonn_tune.report.configuration import Bar, bar, layer_bars, merged, step_bars
from axonn_tune.specs.traces import COMPUTE_LANE
from tests.unit.report.pages import results

PLACES = (0, 2, 4, 30, 60)


@pytest.fixture(scope="module", params=PLACES)
def pricing(request: pytest.FixtureRequest) -> Detail:
    """Configurations with and without layers not resharded after forward, replicas and several micro-batches."""
    return results().ranked.detail(request.param)


@pytest.mark.parametrize("part", [1e9, 500, 7])
def test_a_step_has_all_its_work(pricing: Detail, part: float) -> None:
    """Guards what is drawn: merging moves no time from one lane to another, and loses none."""
    bars = step_bars(pricing, finest_s=pricing.iteration_s / part)
    computed = sum(one.busy_s for one in bars if one.lane == COMPUTE_LANE)
    sent = sum(one.busy_s for one in bars if one.lane != COMPUTE_LANE)
    assert computed == pytest.approx(pricing.compute_s, rel=1e-6)
    assert sent == pytest.approx(pricing.communication_s, rel=1e-6)
    assert max(one.end_s for one in bars) == pytest.approx(pricing.iteration_s, rel=1e-9)
    assert min(one.start_s for one in bars) == pytest.approx(0.0, abs=1e-9)


def test_micro_batches_too_short_to_see_are_not_made_one_by_one(pricing: Detail) -> None:
    """Guards steps of millions of them: the same bars as if each had been drawn and joined, and as fast as one."""
    many = 10**9
    first, last = pricing.batches[0], pricing.batches[-1]
    long_s = many * first.every_s + pricing.iteration_s
    found = SimpleNamespace(batches=(replace(first, times=many), last), contended_s=0.0)
    bars = step_bars(cast(Detail, found), finest_s=long_s / 100)
    assert len(bars) < 100
    computed = sum(one.busy_s for one in bars if one.lane == COMPUTE_LANE)
    assert computed > 0.2 * long_s * (pricing.compute_s / pricing.iteration_s)


def test_bars_of_a_lane_do_not_overlap(pricing: Detail) -> None:
    """Guards lanes: one thing at a time, also after merging."""
    bars = sorted(step_bars(pricing, finest_s=pricing.iteration_s / 300), key=lambda one: (one.lane, one.start_s))
    for one, other in pairwise(bars):
        if one.lane == other.lane:
            assert other.start_s >= one.end_s - 1e-9


def test_a_layer_lies_within_its_own_time(pricing: Detail) -> None:
    """Guards the figures of a layer: from 0 to its end, with computation and with what it waits for."""
    for phase in ("forward", "backward"):
        bars = layer_bars(pricing, phase)
        lasts_s = max(one.end_s for one in bars if one.lane == COMPUTE_LANE)
        assert min(one.start_s for one in bars) >= -1e-12
        on_lane = sum(one.busy_s for one in bars if one.lane == COMPUTE_LANE)
        assert on_lane == pytest.approx(lasts_s, rel=1e-6)


def test_a_lane_that_falls_behind_does_one_thing_at_a_time() -> None:
    """Guards what earlier layers have sent: on a lane slower than the computation they began longer ago."""
    pricing = results(model="5b", gpus=64).ranked.detail(15)
    late = [one for one in pricing.batches[-1].stretches if max(one.lane_every_s.values(), default=0.0) > 0.0]
    assert any(max(one.lane_every_s.values()) > 1.5 * (one.end_s - one.start_s) for one in late)
    layers = [layer_bars(pricing, phase) for phase in ("forward", "backward")]
    bars = [sorted(found, key=lambda one: (one.lane, one.start_s)) for found in layers]
    assert any(one.lane != COMPUTE_LANE for found in bars for one in found)
    for one, other in (pair for found in bars for pair in pairwise(found)):
        assert one.lane != other.lane or other.start_s >= one.end_s - 1e-12


def test_few_bars_are_drawn() -> None:
    """Guards the size of the page: a step of many micro-batches has no more bars than can be seen."""
    for place in PLACES:
        pricing = results().ranked.detail(place)
        assert len(step_bars(pricing, finest_s=pricing.iteration_s / 500)) < 2500


def test_neighbours_of_one_kind_are_joined_and_keep_their_share() -> None:
    """Guards the opacity: a bar that stands for two with a gap between is in use for their time alone."""
    bars = [Bar("lane", "a", "first", 0.0, 1.0, 1.0), Bar("lane", "a", "second", 1.5, 2.0, 0.5)]
    assert merged(bars, finest_s=0.1) == bars
    (joined,) = merged(bars, finest_s=1.0)
    assert (joined.what, joined.start_s, joined.end_s, joined.busy_s) == ("a", 0.0, 2.0, 1.5)


def test_intervals_bear_the_names_of_a_trace(pricing: Detail) -> None:
    """Guards that a bar can be found in a trace: the same lanes, waits and terms."""
    names = {f"{term.op} over {term.axis}, {term.phase}, {term.layer}" for term in pricing.terms}
    for stretch in pricing.batches[-1].stretches:
        for interval in stretch.intervals:
            found = bar(interval)
            if found.lane != COMPUTE_LANE:
                assert found.name in names
