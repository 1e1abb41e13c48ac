"""Maximum a posteriori of a few numbers, with its covariance.

Unknowns are logarithms x of factors on numbers of a profile, 0 before any evidence, with a prior covariance.
Predictions are compared as r = log(predicted / measured). Each step of Gauss-Newton minimises

    Σ w_i r_i² + xᵀ P x,    w_i = 1 / (n_i² · sqrt(1 + (r_i / (c·n_i))²))

where n_i is the noise of row i and P the inverse of the prior covariance: outliers have limited influence
(pseudo-Huber; Huber 1964). The covariance is the inverse of JᵀWJ + P at the end (Laplace's approximation; MacKay 2003,
chapter 27).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from axonn_tune.program.operations import Floats

LINEAR_BEYOND = 2.0
"""Residuals beyond this many times their noise count by their size instead of its square."""

SETTLED, SLOPES_HOLD, STEPS, LONGEST = 0.003, 0.1, 30, 1.0
"""A fit ends when no unknown moves by more than the first, or after so many steps, none longer than the last in any
unknown; slopes are worked out again when an unknown has moved by more than the second since."""


REACH, FLAT = 3.0, 1e-9
"""Prior standard deviations to which a slope is looked for where there is none, and what counts as none."""


@dataclass(frozen=True)
class Bounds:
    """Least and most of each unknown."""

    least: Floats
    most: Floats


@dataclass(frozen=True)
class Posterior:
    """Posterior of the unknowns.

    found: logarithms of factors; covariance: of them; slopes: ∂ log(predicted) / ∂ unknown, a row for each row of
    evidence; residuals: log(predicted / measured) at the end; weights: of the rows.
    """

    found: Floats
    covariance: Floats
    slopes: Floats
    residuals: Floats
    weights: Floats

    @property
    def spread(self) -> Floats:
        """Standard deviation of each unknown."""
        return np.sqrt(np.diag(self.covariance))

    def inflated(self, factors: Floats, prior: Floats) -> Floats:
        """The covariance as if the noise of each row were this much larger; of unknowns with this prior covariance."""
        weights = self.weights / factors**2
        return np.linalg.inv(self.slopes.T @ (weights[:, None] * self.slopes) + np.linalg.inv(prior))

    def moves(self) -> Floats:
        """Contribution of each row to each unknown: rows of evidence by unknowns, which sum to `found`."""
        pulled = self.residuals - self.slopes @ self.found
        moved: Floats = -(self.weights * pulled)[:, None] * (self.slopes @ self.covariance)
        return moved


def newton_step(at: Floats, gradient: Floats, normal: Floats, *, bounds: Bounds, longest: float = LONGEST) -> Floats:
    """One step down a quadratic with this gradient and matrix, unknowns at their bounds held there."""
    step, free = np.zeros(len(at)), np.ones(len(at), dtype=bool)
    while free.any():
        held = np.where(free, 0.0, step)
        step[free] = np.linalg.solve(normal[np.ix_(free, free)], -(gradient + normal @ held)[free])
        low, high = free & (at + step < bounds.least), free & (at + step > bounds.most)
        if not (low.any() or high.any()):
            break
        step[low], step[high] = bounds.least[low] - at[low], bounds.most[high] - at[high]
        free &= ~(low | high)
    return np.clip(step, -longest, longest)


def maximize(
    predict: Callable[[Floats], Floats],
    derivatives: Callable[[Floats], Floats],
    measured: Floats,
    *,
    noise: Floats,
    prior: Floats,
    bounds: Bounds,
) -> Posterior:
    """The most probable unknowns, from 0.

    predict: logarithms of predictions at some unknowns, one per row; derivatives: their slopes, rows by unknowns.
    measured: logarithms; noise: standard deviations of the rows' logarithms. prior: covariance of the unknowns.
    """
    precision, reach = np.linalg.inv(prior), REACH * np.sqrt(np.diag(prior))

    def searched(at: Floats, *, secants: bool) -> Floats:
        """Line search from a point."""
        slopes, moved = np.zeros((len(measured), len(at))), np.full(len(at), np.inf)
        best, least, settled = at, np.inf, False
        for _ in range(STEPS):
            predicted = predict(at)
            residuals, weights = predicted - measured, robust_weights(predicted - measured, noise)
            # Half the squares of residuals in units of noise, pseudo-Huber for outliers.
            far = np.sqrt(1.0 + (residuals / (LINEAR_BEYOND * noise)) ** 2)
            cost = float(np.sum(LINEAR_BEYOND**2 * (far - 1.0))) + 0.5 * float(at @ precision @ at)
            if cost < least:
                best, least = at, cost
            if settled:
                break
            if np.max(np.abs(moved), initial=0.0) > SLOPES_HOLD:
                slopes, moved = derivatives(at), np.zeros(len(at))
                slopes = _with_secants(slopes, predict, at, predicted, reach=reach) if secants else slopes
            gradient = slopes.T @ (weights * residuals) + precision @ at
            normal = slopes.T @ (weights[:, None] * slopes) + precision
            step = newton_step(at, gradient, normal, bounds=bounds)
            at, moved = at + step, moved + step
            settled = bool(np.max(np.abs(step), initial=0.0) < SETTLED)
        return best

    best = searched(searched(np.zeros(len(prior)), secants=True), secants=False)
    slopes, residuals = derivatives(best), predict(best) - measured
    weights = robust_weights(residuals, noise)
    covariance = np.linalg.inv(slopes.T @ (weights[:, None] * slopes) + precision)
    return Posterior(best, covariance, slopes, residuals, weights)


def _with_secants(
    slopes: Floats, predict: Callable[[Floats], Floats], at: Floats, predicted: Floats, *, reach: Floats
) -> Floats:
    """Slopes whose columns without any are those of a line to `reach` below.

    Of the bandwidths that a collective crosses only the least counts: another one has no slope until it is that.
    """
    found = slopes.copy()
    for unknown in np.flatnonzero(np.abs(slopes).max(axis=0, initial=0.0) < FLAT):
        far = at.copy()
        far[unknown] -= reach[unknown]
        found[:, unknown] = (predicted - predict(far)) / reach[unknown]
    return found


def robust_weights(residuals: Floats, noise: Floats) -> Floats:
    """Weight of each row: 1 / noise², less for outliers."""
    weights: Floats = 1.0 / (noise**2 * np.sqrt(1.0 + (residuals / (LINEAR_BEYOND * noise)) ** 2))
    return weights
