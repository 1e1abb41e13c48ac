"""docs/paper-picks.md: what the paper's models pick beside ours, on small real cells."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import axonn_tune
from axonn_tune.cost.price import PricedLayout
from axonn_tune.grid import AXES
from benchmarks import paper_picks
from benchmarks.paper_cells import (
    COSTS,
    RELEASED,
    Case,
    Cell,
    causes,
    cell,
    kind,
    latency_s,
    layout,
    script_fate,
    script_first,
    seconds,
    sent_ratio,
    sent_tie,
    step_ratio,
    step_tie,
    wide_order,
    wire_bytes,
)

SMALL = Case("5b", "perlmutter", 64)
TOO_LARGE = Case("640b", "perlmutter", 64)


@pytest.fixture(scope="module")
def small() -> Cell:
    """The small cell, worked out once."""
    found = cell(SMALL)
    assert found is not None
    return found


def entry(*sizes: int, order: tuple[str, ...] = AXES) -> PricedLayout:
    """A layout without prices."""
    x, y, z, data = sizes
    return PricedLayout(sizes=(x, y, z, data), order=order)


def test_a_cell_has_the_first_of_each_ranking(small: Cell) -> None:
    """Guards against picks of another search than the one a user would run."""
    for cost in COSTS:
        first = axonn_tune.search("5b", gpus=64, machine="perlmutter", cost=cost).best
        for own in (small.picks[cost].sent, small.picks[cost].step):
            assert (own.grid.sizes, wide_order(own)) == (first.grid.sizes, wide_order(first))
    assert small.ours.sent.communication_s == axonn_tune.search("5b", gpus=64).best.communication_s
    assert small.ours.step.iteration_s == axonn_tune.search("5b", gpus=64, rank_by="iteration").best.iteration_s


def test_a_pick_is_priced_at_its_best(small: Cell) -> None:
    """Guards the kind reading: no micro-batch or recomputation of the pick's grid and order does better."""
    pick = small.picks[RELEASED]
    every = axonn_tune.search("5b", gpus=64, variants=True, order=pick.sent.order).ranked.listed(top=0)
    same = [one for one in every if one.grid.sizes == pick.sent.grid.sizes]
    assert len(same) > 1
    assert pick.sent.communication_s == min(seconds(one.communication_s) for one in same)
    assert pick.step.iteration_s == min(seconds(one.iteration_s) for one in same)
    assert small.reordered is not None
    assert seconds(small.reordered.communication_s) <= seconds(pick.sent.communication_s)


def test_no_pick_beats_ours(small: Cell) -> None:
    """Guards that both rank the same grids by our model."""
    for pick in small.picks.values():
        assert sent_ratio(small, pick) >= 1.0
        assert step_ratio(small, pick) >= 1.0
    assert sent_ratio(small, small.ours) == step_ratio(small, small.ours) == 1.0


def test_within_error_is_by_the_profile(small: Cell) -> None:
    """Guards both ends: a pick like ours is within the error, one ten times as long is not."""
    longer = replace(
        small.ours,
        sent=replace(small.ours.sent, communication_s=10 * seconds(small.ours.sent.communication_s)),
        step=replace(small.ours.step, iteration_s=10 * seconds(small.ours.step.iteration_s)),
    )
    assert sent_tie(small, small.ours)
    assert step_tie(small, small.ours)
    assert not sent_tie(small, longer)
    assert not step_tie(small, longer)


def test_layouts_name_wide_axes_in_the_order_of_ranks() -> None:
    """Guards the notation of the page."""
    assert layout(entry(2, 1, 16, 2, order=("z", "x", "y", "data"))) == "z 16 · x 2 · data 2"
    assert layout(entry(1, 1, 1, 1)) == "1"


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        (entry(1, 1, 64, 1), entry(1, 1, 16, 4), "more z, less data"),
        (entry(1, 1, 64, 1), entry(2, 2, 8, 2), "more z, less x·y and data"),
        (entry(4, 1, 16, 1), entry(2, 2, 16, 1), "same x·y, split otherwise"),
        (entry(2, 1, 16, 2), entry(2, 1, 16, 2, order=("z", "x", "y", "data")), "same grid, other order"),
        (entry(1, 1, 16, 4), entry(1, 1, 16, 4, order=("y", "z", "x", "data")), "same"),
    ],
)
def test_kinds_of_difference(theirs: PricedLayout, ours: PricedLayout, words: str) -> None:
    """Guards the table of kinds; axes of size 1 make no other order."""
    assert kind(theirs, ours) == words


def test_causes_add_up(small: Cell) -> None:
    """Guards the split of communication into latency and bytes over a rate."""
    theirs, ours = small.picks[RELEASED].sent, small.ours.sent
    sent, rate, late, _ = causes(theirs, ours)
    moving_s = seconds(ours.communication_s) - latency_s(ours)
    assert moving_s * sent / rate + latency_s(ours) * late == pytest.approx(seconds(theirs.communication_s))
    gathers = [term for term in theirs.terms if (term.op, term.axis) == ("all_gather", "z")]
    once = replace(theirs, terms=(gathers[0],))
    assert wire_bytes(once) == pytest.approx(gathers[0].count * gathers[0].bytes * 63 / 64)


def test_the_script_by_itself_knows_no_memory() -> None:
    """Guards its own space, and that what becomes of its first is our search's word."""
    assert script_first(SMALL) == (1, 1, 64, 1)
    assert script_fate(SMALL) == "fits"
    assert script_fate(TOO_LARGE) == "memory"


def test_the_page_leaves_nothing_open() -> None:
    """Guards the fixed words against a table they name and nobody makes; and cells in which nothing fits."""
    text = paper_picks.page([SMALL, TOO_LARGE, Case("5b", "frontier", 64)])
    assert not re.findall(r"\{\{.*?\}\}|\bnan\b|\binf\b", text)
    assert "| 640b | 64 | nothing fits into memory |" in text
    assert re.search(r"\| 5b \| 64 \| z 64 \|.*×", text)
