"""Robust fit of times that are sums of unknown non-negative costs, each with a known factor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Row = dict[str, float]
"""What one time is made of: unknown → its factor."""

LINEAR_BEYOND = 0.08
"""Relative errors beyond this count by their size instead of its square, so that outliers have little pull."""
_OUTLIER = 0.3
_OUTLIER_IN_DEVIATIONS = 5.0
_ROUNDS = 20


@dataclass(frozen=True)
class Solution:
    """Unknowns by name, and predicted / measured - 1 of each row; `outliers` are numbers of rows."""

    values: Mapping[str, float]
    errors: tuple[float, ...]
    outliers: tuple[int, ...]

    @property
    def typical_error(self) -> float:
        """Mean of the absolute relative errors, outliers left out."""
        kept = [abs(error) for row, error in enumerate(self.errors) if row not in self.outliers]
        return float(np.mean(kept)) if kept else 0.0


def solve(rows: Sequence[Row], times_s: Sequence[float]) -> Solution:
    """Non-negative least squares on relative errors, reweighted until far-off rows have little pull (Huber 1964)."""
    from scipy.optimize import nnls

    names = sorted({name for row in rows for name in row})
    matrix = np.array([[row.get(name, 0.0) for name in names] for row in rows]) / np.array(times_s)[:, None]
    # Unknowns differ by ten orders of magnitude: without this the small ones are lost in rounding.
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    weights = np.ones(len(rows))
    values = np.zeros(len(names))
    for _ in range(_ROUNDS):
        values, _ = nnls(matrix / scale * weights[:, None], weights)
        errors = matrix / scale @ values - 1.0
        weights = np.sqrt(np.minimum(1.0, LINEAR_BEYOND / np.maximum(np.abs(errors), 1e-12)))
    errors = matrix / scale @ values - 1.0
    found = dict(zip(names, (values / scale).tolist(), strict=True))
    return Solution(found, tuple(errors.tolist()), _outliers(errors))


def _outliers(errors: NDArray[np.float64]) -> tuple[int, ...]:
    """Rows off by much more than most are."""
    deviation = 1.4826 * float(np.median(np.abs(errors - np.median(errors))))
    limit = max(_OUTLIER, _OUTLIER_IN_DEVIATIONS * deviation)
    return tuple(np.flatnonzero(np.abs(errors) > limit).tolist())
