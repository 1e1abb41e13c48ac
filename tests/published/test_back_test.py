"""Learning published clusters from a few of their rows: what it must reach, and that what is recorded still holds."""

from __future__ import annotations

import math

import pytest

from tools.fit.back_test import LEARNED_FROM, Quality, of_all, recorded, run


@pytest.fixture(scope="module")
def found() -> tuple[Quality, ...]:
    """Every group as it is recorded; the last test learns all anew."""
    return recorded()


@pytest.mark.parametrize(("rows", "most"), [(1, 1.5), (3, 1.3), (5, 1.15)])
def test_few_rows_come_near_a_fit_that_has_seen_the_source(found: tuple[Quality, ...], rows: int, most: float) -> None:
    """Mean error over groups against that of the same rows by fits without their family alone."""
    mean = of_all(found, learned_from=rows)
    assert mean.error / mean.family <= most


def test_physics_beats_one_factor(found: tuple[Quality, ...]) -> None:
    """Five rows teach more than one factor on every step, in three quarters of the groups."""
    groups = [one for one in found if (one.learned_from, one.beyond) == (5, 1)]
    assert sum(one.error < one.one_factor for one in groups) >= 0.75 * len(groups)


def test_learning_does_not_spoil_rankings(found: tuple[Quality, ...]) -> None:
    """Regret after three rows is at most a point above that of fits without the family."""
    mean = of_all(found, learned_from=3)
    assert mean.regret <= mean.regret_family + 0.01


@pytest.mark.parametrize("rows", LEARNED_FROM)
def test_intervals_hold_what_they_say(found: tuple[Quality, ...], rows: int) -> None:
    """80% intervals hold 75 to 90% of the rows, with as little evidence as with more."""
    assert 0.75 <= of_all(found, learned_from=rows).held <= 0.9


@pytest.mark.parametrize("beyond", [4, 16])
def test_small_runs_teach_large_ones(found: tuple[Quality, ...], beyond: int) -> None:
    """Rows on more than 4 and 16 times the GPUs of those learned from: median error and intervals."""
    groups = [one for one in found if one.beyond == beyond]
    assert groups
    assert all(one.median <= 0.06 and one.held >= 0.75 for one in groups)


@pytest.mark.deep
def test_the_record_is_current(found: tuple[Quality, ...]) -> None:
    """What the page shows is what the code gives: `python -m tools.fit.back_test --write`."""
    for one, record in zip(run(), found, strict=True):
        assert (one.group, one.learned_from, one.beyond) == (record.group, record.learned_from, record.beyond)
        for name in ("error", "held", "score"):
            assert math.isclose(getattr(one, name), getattr(record, name), rel_tol=0.02, abs_tol=0.005), (one, name)
