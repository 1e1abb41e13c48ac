"""Quality of predictions: relative errors, rank correlations and regret."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import StatisticsError, correlation, fmean, median

import numpy as np


@dataclass(frozen=True)
class Errors:
    """Relative errors of some rows: how many, mean of |error|, median, 90th percentile, mean with sign."""

    rows: int
    mape: float
    median: float
    p90: float
    bias: float


def relative_error(predicted: float | None, measured: float | None) -> float | None:
    """predicted / measured - 1; None where either is missing, or what was measured is 0."""
    return None if predicted is None or not measured else predicted / measured - 1.0


def errors_of(errors: Iterable[float | None]) -> Errors:
    """Summary of relative errors, those missing left out; all nan without any."""
    found = [error for error in errors if error is not None]
    if not found:
        return Errors(0, *[math.nan] * 4)
    sizes = [abs(error) for error in found]
    return Errors(len(found), fmean(sizes), median(sizes), float(np.quantile(sizes, 0.9)), fmean(found))


def errors_by(named: Iterable[tuple[str, float | None]]) -> dict[str, Errors]:
    """Summaries of (group, error) by group, in alphabetical order; groups without an error are left out."""
    groups: dict[str, list[float]] = {}
    for name, error in named:
        if error is not None:
            groups.setdefault(name, []).append(error)
    return {name: errors_of(found) for name, found in sorted(groups.items())}


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Regret: measured time of the predicted best over that of the best, minus 1; nan if the best is 0."""
    best = min(measured)
    return measured[predicted.index(min(predicted))] / best - 1.0 if best else math.nan


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation, ties at their mean rank; nan if either is constant."""
    try:
        return correlation(ranks(first), ranks(second))
    except StatisticsError:
        return math.nan


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1, equal values sharing the mean of theirs."""
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values), 1):
        places.setdefault(value, []).append(place)
    return [fmean(places[value]) for value in values]


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's tau-b; nan if either is constant."""
    a, b = (np.sign(np.subtract.outer(values, values)) for values in (first, second))
    spread = math.sqrt((a * a).sum() * (b * b).sum())
    return float((a * b).sum() / spread) if spread else math.nan
