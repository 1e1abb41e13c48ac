"""Predictions by fits that have not seen a row."""

from __future__ import annotations

import pytest

from axonn_tune.validation.published.accuracy import LEFT_OUT, LeftOut, predict_steps, without
from axonn_tune.validation.published.rows import SHIPPED, read_steps


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_times_move_and_intervals_with_them(kind: LeftOut) -> None:
    """Guards left-out rows: another time, and an interval of the same width around it."""
    rows = [row for row in read_steps(SHIPPED / "steps.csv") if row.dataset in {"torchtitan", "dgxc"}]
    steps = predict_steps(rows)
    moved = without(steps, kind)
    assert [one.row.id for one in moved] == [one.row.id for one in steps if one.predicted_s is not None]
    before = {one.row.id: one for one in steps}
    for one in moved:
        own = before[one.row.id]
        assert one.low_s is not None
        assert one.high_s is not None
        assert own.high_s is not None
        assert own.low_s is not None
        assert one.low_s < (one.predicted_s or 0.0) < one.high_s
        assert one.high_s / one.low_s == pytest.approx(own.high_s / own.low_s)
    assert any(one.predicted_s != before[one.row.id].predicted_s for one in moved)
