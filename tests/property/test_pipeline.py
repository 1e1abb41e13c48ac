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
from axonn_tune.cost.pipeline import StageTimes, pipeline_bound_s, pipeline_time
from tests.property import strategies

DURATIONS = ("forward_s", "backward_s", "last_backward_s", "end_s", "activation_send_s", "gradient_send_s")


@given(strategies.pipelines())
def test_bound_is_never_above_the_exact_step(pipeline: tuple[StageTimes, int]) -> None:
    """Guards pruning: a candidate is dropped by its bound, so no step may be shorter."""
    times, micro_batches = pipeline
    step_s = pipeline_time(times, micro_batches=micro_batches).step_s
    assert pipeline_bound_s(times, micro_batches=micro_batches) <= step_s * (1 + 1e-12)


@given(strategies.pipelines(), st.sampled_from(DURATIONS), st.randoms(use_true_random=False), st.floats(0.0, 3.0))
def test_longer_operations_never_shorten_a_step(
    pipeline: tuple[StageTimes, int], name: str, random: Any, more_s: float
) -> None:
    """Guards against rankings that reward slower work: the exact step is monotone in each duration."""
    times, micro_batches = pipeline
    durations = np.array(getattr(times, name), dtype=float)
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
