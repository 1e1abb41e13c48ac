"""What is said about a ranking: true, and in words."""

from __future__ import annotations

import re
from typing import Any

import pytest

from axonn_tune.report import remarks
from axonn_tune.report.ranking_json import to_text
from axonn_tune.search.inputs import Choices, load_inputs
from axonn_tune.search.results import Results, run_search
from axonn_tune.search.space import Limits


def results(gpus: int = 256, model: str = "20b", **given: Any) -> Results:
    """Results of a search."""
    return run_search(load_inputs(Choices(gpus=gpus, model=model, **given)))


@pytest.mark.parametrize(
    ("rank_by", "key"),
    [("communication", "communication_s"), ("exposed", "exposed_communication_s"), ("iteration", "iteration_s")],
)
def test_why_the_first_is_first(rank_by: Any, key: str) -> None:
    """Guards the reason: the difference is that of the metric, and its largest part is named first."""
    found = results(rank_by=rank_by)
    first, second = (found.ranked.entry(position, terms=True) for position in (0, 1))
    said = remarks.why_first(found)
    stated = re.match(r"#1 beats #2 by ([\d.]+) (µs|ms|s) of", said)
    assert stated, said
    less_s = float(stated[1]) * {"µs": 1e-6, "ms": 1e-3, "s": 1.0}[stated[2]]
    assert less_s == pytest.approx(getattr(second, key) - getattr(first, key), rel=6e-3)
    assert re.search(r"(less|more) (in|waiting for) \w+ over \w+ \(\d+ ranks", said)


def test_differences_add_up() -> None:
    """Guards completeness: the parts of which the largest are named sum to the whole difference."""
    found = results()
    first, second = (found.ranked.entry(position, terms=True) for position in (0, 1))
    parts = remarks._differences(first, second, rank_by="communication")
    assert first.communication_s is not None
    assert second.communication_s is not None
    whole = second.communication_s - first.communication_s
    assert sum(part.less_s for part in parts) == pytest.approx(whole, rel=1e-9)


def test_rejections_are_counted() -> None:
    """Guards the counts: rejected and ranked grids are all grids."""
    found = results(gpus=1024, model="80b")
    said = remarks.rejected(found)
    left_out = found.ranked.searched.grids - len(found.ranked)
    assert said.startswith(f"{left_out} of {found.ranked.searched.grids} grids are rejected: ")
    assert len(found.ranked.rejected_entries()) == left_out


def test_ties_are_said_with_their_reason() -> None:
    """Guards ties: their number, and the uncertainty they come from."""
    found = results()
    u = found.inputs.problem.machine.uncertainty.communication
    assert remarks.ties(found).startswith(
        f"Ranks 1 to {found.ranked.ties} are ties: communication is predicted to ±{u:.0%}."
    )


def test_one_row_needs_no_comparison() -> None:
    """Guards the smallest rankings: one feasible configuration, and none."""
    alone = results(limits=Limits(axes={"x": 1, "y": 1, "z": 256, "data": 1}))
    assert len(alone.ranked) == 1
    assert remarks.why_first(alone) == "Only one configuration is feasible."
    nothing = results(gpus=1)
    assert len(nothing.ranked) == 0
    assert remarks.remarks(nothing)


def test_json_has_no_nan() -> None:
    """Guards strict JSON: what is not finite becomes null, however deep."""
    assert to_text({"a": [float("nan"), {"b": float("inf")}, 1.5]}) == '{"a": [null, {"b": null}, 1.5]}\n'
