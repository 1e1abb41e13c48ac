"""Pins make no first row faster, and lose no row that has them."""

from __future__ import annotations

import pytest

from tests.nightly import params
from tests.unit.ranking.pins import PINS, SEARCHES, SMALL, asked, pinned, searched

NIGHTLY = ("llama3-70b", "mixtral-8x7b")


@pytest.mark.parametrize("model", params(SMALL, ("gpt-oss-20b",)))
def test_a_few_pins_change_nothing(model: str) -> None:
    """Guards one search, whatever is pinned: every pin of a row finds that row or a faster one, none a faster one than
    is first without pins; and pins of all axes find the row itself."""
    assert [one.wrong for one in pinned(model, SMALL[model], count=8, rows=8) if one.wrong] == []
    ranked = searched(asked(model, SMALL[model]), 6)
    for row in (ranked[0], ranked[5]):
        grid = {axis: row.size(axis) for axis in row.job.framework.columns if axis != "chunks"}
        found = searched(asked(model, SMALL[model], **grid), 1)[0]
        assert (found.grid, found.iteration_s) == (row.grid, row.iteration_s)


@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else pytest.mark.deep) for name in SEARCHES],
)
def test_pins_change_nothing(model: str) -> None:
    """Guards the same of large models, forty pins each."""
    assert [one.wrong for one in pinned(model, SEARCHES[model], count=PINS) if one.wrong] == []
