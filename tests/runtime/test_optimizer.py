"""The schedule's corners, and what a step that is not finite must not change. `test_equivalence` holds the updates."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from axonn_tune.errors import TrainingFailedError
from axonn_tune.grid import Grid
from axonn_tune.runtime.optimizer import learning_rate
from axonn_tune.specs.launch import Optimizer
from tests.runtime import saving


def test_warmup_then_cosine_then_minimum() -> None:
    """Guards the schedule at its corners, and its two empty ranges."""
    options = Optimizer(learning_rate=1.0, minimum_learning_rate=0.1, warmup_steps=4, decay_steps=10)
    rates = [learning_rate(options, step) for step in range(14)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[6] == pytest.approx(0.55)
    assert all(later < earlier for earlier, later in pairwise(rates[3:10]))
    assert rates[9:] == [0.1] * 5
    assert learning_rate(Optimizer(warmup_steps=0, decay_steps=10_000), 0) == pytest.approx(3e-4)
    assert learning_rate(Optimizer(warmup_steps=5, decay_steps=5), 5) == 3e-5


def test_what_is_not_finite_changes_nothing() -> None:
    """Guards the weights against a broken loss, or a finite one with a broken gradient: refused before any change."""
    one = saving.trainee(Grid())
    one.step()
    before = [bucket.value.clone() for bucket in one.optimizer.buckets]
    for loss in (math.nan, math.inf):
        with pytest.raises(TrainingFailedError, match="step 2"):
            one.optimizer.step(torch.tensor(loss))
    one.model.store.matrices[0].gradient[0, 0] = math.nan
    with pytest.raises(TrainingFailedError, match="gradient norm nan"):
        one.optimizer.step(torch.tensor(1.0))
    assert one.optimizer.steps_done == 1
    assert all(torch.equal(new.value, old) for new, old in zip(one.optimizer.buckets, before, strict=True))
