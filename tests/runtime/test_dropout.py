"""Dropout by coordinate."""

from __future__ import annotations

import pytest
import torch

from axonn_tune.runtime.modules import Dropout
from axonn_tune.runtime.philox import key_of

HIDDEN, SHARE = 96, 0.25


def dropout(name: str = "embedding", columns: range = range(HIDDEN), share: float = SHARE) -> Dropout:
    """One of a layer."""
    return Dropout(share, torch.tensor(key_of(0, f"dropout.{name}")), columns, HIDDEN)


def test_the_share_and_the_scale() -> None:
    """Guards that the mean stays: a quarter is gone, the others are four thirds."""
    kept = dropout()(torch.ones(4096, HIDDEN, dtype=torch.float64), torch.arange(4096))
    assert set(kept.unique().tolist()) == {0.0, 1 / (1 - SHARE)}
    assert float((kept == 0).double().mean()) == pytest.approx(
        SHARE, abs=5 * (SHARE * (1 - SHARE) / kept.numel()) ** 0.5
    )


def test_layers_and_tokens_are_independent() -> None:
    """Guards the keys and the counters: another layer or later tokens have other elements dropped, as chance has it."""
    ones, alike = torch.ones(512, HIDDEN), SHARE**2 + (1 - SHARE) ** 2
    first = dropout()(ones, torch.arange(512)) == 0
    for other in (dropout("blocks.0.mlp.fc2")(ones, torch.arange(512)), dropout()(ones, torch.arange(512, 1024))):
        assert float((first == (other == 0)).double().mean()) == pytest.approx(alike, abs=0.01)
