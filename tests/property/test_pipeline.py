"""What must hold of every pipeline, whatever its durations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axonn_tune.cost import pipeline as pipeline_module
from axonn_tune.cost.pipeline import Chains, StageTimes, pipeline_time
from tests.property import strategies

DURATIONS = ("forward_s", "backward_s", "last_backward_s", "end_s", "send_s")


@given(strategies.pipelines())
def test_bound_is_never_above_the_exact_step(pipeline: tuple[StageTimes, int]) -> None:
    """Guards pruning: a candidate is dropped by its bound, so no step may be shorter."""
    times, micro_batches = pipeline
    step_s = pipeline_time(times, micro_batches=micro_batches).step_s
    assert Chains.of(times, micro_batches).step_s <= step_s * (1 + 1e-12)


@given(strategies.pipelines(), st.sampled_from(DURATIONS), st.randoms(use_true_random=False), st.floats(0.0, 3.0))
def test_longer_operations_never_shorten_a_step(
    pipeline: tuple[StageTimes, int], name: str, random: Any, more_s: float
) -> None:
    """Guards against rankings that reward slower work: the exact step is monotone in each duration."""
    times, micro_batches = pipeline
    durations = getattr(times, name).copy()
    durations.flat[random.randint(0, durations.size - 1)] += more_s
    before = pipeline_time(times, micro_batches=micro_batches).step_s
    after = pipeline_time(replace(times, **{name: durations}), micro_batches=micro_batches).step_s
    assert after >= before * (1 - 1e-9)


@given(strategies.pipelines())
def test_jumping_over_periods_changes_nothing(pipeline: tuple[StageTimes, int]) -> None:
    """Guards the jump over equal periods, and that each stage's time adds up to the step."""
    times, micro_batches = pipeline
    fast = pipeline_time(times, micro_batches=micro_batches)
    with patch.object(pipeline_module, "_period", return_value=None):
        plain = pipeline_time(times, micro_batches=micro_batches)
    assert fast.step_s == pytest.approx(plain.step_s, rel=1e-9)
    assert fast.sends == plain.sends
    assert fast.busy_s == plain.busy_s
    for one, other in zip(fast.exposed_send_s, plain.exposed_send_s, strict=True):
        assert one == pytest.approx(other, abs=1e-9 * plain.step_s)
    parts = np.array([fast.busy_s, fast.bubble_s, fast.exposed_send_s])
    assert parts.sum(axis=0) == pytest.approx(fast.step_s, rel=1e-9)


@given(strategies.pipelines(), st.floats(0.0, 3.0))
def test_a_reduction_after_the_schedule_is_paid_once(pipeline: tuple[StageTimes, int], longest_s: float) -> None:
    """Guards blocking reductions over data: on all stages at once they lengthen a step by no more than the longest, and
    without interleaving in the last backward passes by no less than after them."""
    times, micro_batches = pipeline
    shape = times.shape
    shares = np.linspace(0.5, 1.0, shape[0] * shape[1]).reshape(shape) * longest_s
    after = replace(times, end_s=times.end_s + shares.sum(axis=1))
    inside = replace(times, last_backward_s=times.last_backward_s + shares)
    without_s, after_s, inside_s = (
        pipeline_time(one, micro_batches=micro_batches).step_s for one in (times, after, inside)
    )
    assert after_s <= (without_s + shares.sum(axis=1).max()) * (1 + 1e-9)
    assert shape[1] > 1 or inside_s >= after_s * (1 - 1e-9)
