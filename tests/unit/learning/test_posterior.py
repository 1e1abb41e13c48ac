"""The most probable numbers and how sure they are, against what linear algebra says of small problems."""

from __future__ import annotations

import numpy as np
import pytest

from axonn_tune.learning.posterior import LINEAR_BEYOND, Bounds, Posterior, maximize, robust_weights
from axonn_tune.program.operations import Floats

SLOPES = np.array([[1.0, 0.5, 0.0], [0.2, 1.0, 0.0], [1.0, 1.0, 0.0], [0.7, 0.1, 0.0]])
MEASURED = np.array([0.10, 0.04, 0.13, 0.07])
NOISE = np.array([0.05, 0.1, 0.05, 0.2])
PRIOR = np.diag([0.3, 0.2, 0.5]) ** 2
FREE = Bounds(np.full(3, -20.0), np.full(3, 20.0))


def linear(measured: Floats = MEASURED, *, bounds: Bounds = FREE, prior: Floats = PRIOR) -> Posterior:
    """Rows that are linear in three unknowns, of which no row has the third."""
    return maximize(lambda at: SLOPES @ at, lambda at: SLOPES, measured, noise=NOISE, prior=prior, bounds=bounds)


def test_a_linear_problem_has_its_closed_form() -> None:
    """Guards Gauss-Newton: x = C Sᵀ W y with C = (Sᵀ W S + P)⁻¹, with the weights that it ends with."""
    prior = PRIOR.copy()
    prior[0, 1] = prior[1, 0] = 0.5 * 0.3 * 0.2
    found = linear(prior=prior)
    weights = np.diag(found.weights)
    covariance = np.linalg.inv(SLOPES.T @ weights @ SLOPES + np.linalg.inv(prior))
    assert found.covariance == pytest.approx(covariance)
    assert found.found == pytest.approx(covariance @ SLOPES.T @ weights @ MEASURED, abs=2e-3)
    assert found.residuals == pytest.approx(SLOPES @ found.found - MEASURED)
    assert found.moves().sum(axis=0) == pytest.approx(found.found, abs=2e-3)
    assert (found.found[2], found.spread[2]) == (0.0, pytest.approx(0.5)), "no row has it"


def test_bounds_hold_and_the_others_make_the_best_of_it() -> None:
    """Guards shares, which are at most 1: the unknown ends at its bound, the other takes over what it can."""
    free = linear(5.0 * MEASURED)
    bounds = Bounds(FREE.least, np.array([0.1, 20.0, 20.0]))
    held = linear(5.0 * MEASURED, bounds=bounds)
    assert free.found[0] > 0.1
    assert held.found[0] == pytest.approx(0.1)
    assert held.found[1] > free.found[1]
    weights = held.weights
    gradient = SLOPES.T @ (weights * held.residuals) + np.linalg.inv(PRIOR) @ held.found
    assert gradient[1:] == pytest.approx(0.0, abs=0.2)
    assert gradient[0] < -1.0, "it would go further"


def test_a_row_far_off_has_little_pull() -> None:
    """Guards robustness: weights by hand, and one wrong row of four that moves the result by a little."""
    at = np.array([0.0, 0.1, 1.0])
    noise = np.full(3, 0.1)
    by_hand = [
        100.0,
        100.0 / np.sqrt(1.0 + (1.0 / LINEAR_BEYOND) ** 2),
        100.0 / np.sqrt(1.0 + (10 / LINEAR_BEYOND) ** 2),
    ]
    assert robust_weights(at, noise) == pytest.approx(by_hand)
    wrong = MEASURED.copy()
    wrong[3] += 3.0
    found, usual = linear(wrong), linear()
    assert found.weights[3] < 0.25 * usual.weights[3]
    assert abs(found.found - usual.found).max() < 0.12
