"""AdamW across the grid: the schedule, the norm of the whole gradient, clipping, what must not change."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from axonn_tune.errors import TrainingFailedError
from axonn_tune.grid import Grid
from axonn_tune.runtime.communicator import Communicator, Ledger
from axonn_tune.runtime.devices import RuntimeSettings
from axonn_tune.runtime.mesh import build_mesh
from axonn_tune.runtime.optimizer import AdamW, StepResult, learning_rate
from axonn_tune.runtime.parameters import Parameter
from axonn_tune.runtime.transformer import Transformer
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.launch import Optimizer
from tests.runtime.steps import forward_backward

BATCH, SEQUENCE, STEPS = 4, 64, 3
# Clipping acts from the first step on: its norm is about 2.
OPTIONS = Optimizer(warmup_steps=2, decay_steps=5, gradient_clip_norm=0.5)


@dataclass
class Training:
    """A nano model, its optimizer, and its part of a fixed batch."""

    model: Transformer
    optimizer: AdamW
    tokens: torch.Tensor

    def step(self) -> StepResult:
        """One step on the same batch."""
        tokens, targets = self.tokens[:, :-1], self.tokens[:, 1:]
        loss = forward_backward(self.model, tokens, targets, scale=1 / (BATCH * SEQUENCE), last=True)
        self.model.finish_gradients()
        return self.optimizer.step(loss)


def training(grid: Grid, *, options: Optimizer = OPTIONS) -> Training:
    """Training of this rank."""
    communicator = Communicator(build_mesh(grid), Ledger())
    place = communicator.mesh.grid.coordinates(communicator.mesh.rank)
    wide = torch.float64
    settings = RuntimeSettings(wide, wide, wide, frozenset(), "none", 0, torch.device("cpu"))
    model = Transformer(load_model("nano").document, communicator, settings, sequence=SEQUENCE, seed=0)
    tokens = torch.randint(0, 512, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    part = tokens.chunk(grid.z * grid.data)[place["data"] * grid.z + place["z"]]
    return Training(model, AdamW(model.store, communicator, options), part)


def parameters(one: Training) -> list[Parameter]:
    """Everything it trains."""
    return [*one.model.store.matrices, *one.model.store.vectors]


def test_first_step_by_hand() -> None:
    """Guards AdamW, clipping and decay: after one step every weight moves by rate · g/(|g| + eps), and decays first."""
    one = training(Grid())
    tokens, targets = one.tokens[:, :-1], one.tokens[:, 1:]
    forward_backward(one.model, tokens, targets, scale=1 / (BATCH * SEQUENCE), last=True)
    before = [(parameter.value.clone(), parameter.gradient.clone()) for parameter in parameters(one)]
    result = one.optimizer.step(torch.tensor(1.0))
    assert result.loss == 1.0
    norm = math.sqrt(sum(float((gradient**2).sum()) for _, gradient in before))
    assert result.gradient_norm == pytest.approx(norm, rel=1e-12)
    for parameter, (main, gradient) in zip(parameters(one), before, strict=True):
        clipped = gradient * 0.5 / norm
        decay = OPTIONS.weight_decay if main.dim() == 2 else 0.0
        expected = main * (1 - result.learning_rate * decay) - result.learning_rate * clipped / (clipped.abs() + 1e-8)
        torch.testing.assert_close(parameter.value, expected, rtol=1e-12, atol=1e-15, msg=parameter.name)
        assert not parameter.gradient.any(), "gradients start the next step at zero"


def test_warmup_then_cosine_then_minimum() -> None:
    """Guards the schedule at its corners."""
    options = Optimizer(learning_rate=1.0, minimum_learning_rate=0.1, warmup_steps=4, decay_steps=10)
    rates = [learning_rate(options, step) for step in range(14)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[6] == pytest.approx(0.55)
    assert all(later < earlier for earlier, later in pairwise(rates[3:10]))
    assert rates[9:] == [0.1] * 5


def test_schedule_without_warmup_or_decay() -> None:
    """Guards the two empty ranges."""
    assert learning_rate(Optimizer(warmup_steps=0, decay_steps=10_000), 0) == pytest.approx(3e-4)
    assert learning_rate(Optimizer(warmup_steps=5, decay_steps=5), 5) == 3e-5


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_non_finite_loss_changes_nothing(loss: float) -> None:
    """Guards the weights: the step is refused before they are touched."""
    one = training(Grid())
    one.step()
    before = [parameter.value.clone() for parameter in parameters(one)]
    with pytest.raises(TrainingFailedError, match="step 2"):
        one.optimizer.step(torch.tensor(loss))
    assert one.optimizer.steps_done == 1
    for parameter, main in zip(parameters(one), before, strict=True):
        assert torch.equal(parameter.value, main)


def test_non_finite_gradient_is_refused() -> None:
    """Guards against a finite loss with a broken gradient."""
    one = training(Grid())
    parameters(one)[0].gradient[0, 0] = math.nan
    with pytest.raises(TrainingFailedError, match="gradient norm nan"):
        one.optimizer.step(torch.tensor(1.0))
