"""docs/paper-picks.md: what the paper's models pick beside ours, on small real cells."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import axonn_tune
from benchmarks import paper_picks
from benchmarks.paper_cells import (
    COSTS,
    RELEASED,
    Case,
    Cell,
    causes,
    cell,
    latency_s,
    seconds,
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


def test_a_cell_has_the_first_of_each_ranking(small: Cell) -> None:
    """Guards against picks of another search than the one a user would run."""
    for cost in COSTS:
        first = axonn_tune.search("5b", gpus=64, machine="perlmutter", cost=cost).best
        for own in (small.picks[cost].sent, small.picks[cost].step):
            assert (own.sizes, own.wide_order) == (first.sizes, first.wide_order)
    assert small.ours.sent.communication_s == axonn_tune.search("5b", gpus=64).best.communication_s
    assert small.ours.step.iteration_s == axonn_tune.search("5b", gpus=64, rank_by="iteration").best.iteration_s


def test_a_pick_is_priced_at_its_best(small: Cell) -> None:
    """Guards the kind reading: no micro-batch or recomputation of the pick's grid and order does better."""
    pick = small.picks[RELEASED]
    every = axonn_tune.search("5b", gpus=64, variants=True, order=pick.sent.order).results.listed(top=0)
    same = [one for one in every if one.sizes == pick.sent.sizes]
    assert len(same) > 1
    assert pick.sent.communication_s == min(seconds(one.communication_s) for one in same)
    assert pick.step.iteration_s == min(seconds(one.iteration_s) for one in same)
    assert small.reordered is not None
    assert seconds(small.reordered.communication_s) <= seconds(pick.sent.communication_s)


def test_causes_add_up(small: Cell) -> None:
    """Guards the split of communication into latency and bytes over a rate."""
    theirs, ours = small.picks[RELEASED].sent, small.ours.sent
    sent, rate, late, _ = causes(theirs, ours)
    moving_s = seconds(ours.communication_s) - latency_s(ours)
    assert moving_s * sent / rate + latency_s(ours) * late == pytest.approx(seconds(theirs.communication_s))
    gathers = [term for term in theirs.terms if (term.op, term.axis) == ("all_gather", "z")]
    once = replace(theirs, terms=(gathers[0],))
    assert wire_bytes(once) == pytest.approx(gathers[0].count * gathers[0].bytes * 63 / 64)


def test_the_page_leaves_nothing_open() -> None:
    """Guards the fixed words against a table they name and nobody makes; and cells in which nothing fits."""
    text = paper_picks.page([SMALL, TOO_LARGE, Case("5b", "frontier", 64)])
    assert not re.findall(r"\{\{.*?\}\}|\bnan\b|\binf\b", text)
    assert "| 640b | 64 | nothing fits into memory |" in text
    assert re.search(r"\| 5b \| 64 \| z 64 \|.*×", text)
