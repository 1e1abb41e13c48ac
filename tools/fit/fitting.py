"""Robust fits: the few numbers of a profile with which the cost model's formulas come nearest to measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.numbers import number_at, with_numbers

Floats = NDArray[np.float64]
Predict = Callable[[Machine, Mapping[str, float]], Floats]

NUISANCE = "nuisance."
"""Prefix of parameters that are fitted together with the profile's but are not part of it."""

LINEAR_BEYOND = 0.05
"""Errors beyond this share count by their size instead of its square, so that outliers have little pull."""

OUTLIER = 1.0
"""Rows off by a factor of e and more, either way, are reported as outliers."""


@dataclass(frozen=True)
class Stage:
    """One fit: parameters of one machine, on one set of rows, everything else as in the profile.

    parameters: path in the profile to a start value, e.g. `tiers.nvlink.latency_us`; see `specs.numbers`.
    upper: bounds of parameters that have one.
    large: which rows are large enough to count in the second error, a mask.
    """

    machine: str
    name: str
    parameters: Mapping[str, float]
    predict: Predict
    measured_s: Floats
    large: NDArray[np.bool_]
    upper: Mapping[str, float]


@dataclass(frozen=True)
class Fit:
    """Result of a stage: fitted values by path, and log(predicted / measured) of the profile as it is written."""

    stage: Stage
    values: Mapping[str, float]
    written: Mapping[str, float]
    errors: Floats

    @property
    def outliers(self) -> int:
        """Rows off by more than a factor of e."""
        return int(np.sum(np.abs(self.errors) > OUTLIER))

    def quantile(self, share: float, *, large: bool) -> float:
        """Quantile of |predicted / measured - 1|, of all rows or of the large ones; nan without any."""
        errors = np.abs(np.expm1(self.errors[self.stage.large] if large else self.errors))
        return float(np.quantile(errors, share)) if errors.size else math.nan


def run(stage: Stage) -> Fit:
    """Fit a stage from several starts, and evaluate the profile as written on the same rows."""
    from scipy.optimize import least_squares

    profile = load_machine(stage.machine).document
    paths = tuple(stage.parameters)
    bounds = (-np.inf, np.array([math.log(stage.upper.get(path, math.inf)) for path in paths]))

    def errors(logs: Floats) -> Floats:
        values = dict(zip(paths, np.exp(logs).tolist(), strict=True))
        return np.log(stage.predict(with_numbers(profile, _of_profile(values)), values) / stage.measured_s)

    found = [
        least_squares(
            errors, start, bounds=bounds, loss="soft_l1", f_scale=LINEAR_BEYOND, diff_step=np.full(len(paths), 1e-4)
        )
        for start in _starts(stage)
    ]
    best = min(found, key=lambda result: float(result.cost))
    values = dict(zip(paths, np.exp(best.x).tolist(), strict=True))
    written = {path: number_at(profile, path) for path in _of_profile(values)}
    as_written = stage.predict(profile, values | written)
    return Fit(stage, values, written, np.log(as_written / stage.measured_s))


def _starts(stage: Stage) -> Iterator[Floats]:
    """The given start, and each parameter in turn halved and doubled."""
    given = np.log(np.array(list(stage.parameters.values())))
    yield given
    upper = [math.log(stage.upper.get(path, math.inf)) for path in stage.parameters]
    for position in range(given.size):
        for step in (-math.log(2), math.log(2)):
            start = given.copy()
            start[position] = min(start[position] + step, upper[position] - 1e-3)
            yield start


def _of_profile(values: Mapping[str, float]) -> dict[str, float]:
    """Those that are part of the profile."""
    return {path: value for path, value in values.items() if not path.startswith(NUISANCE)}
