"""Quality of predictions: one summary of pairs, by group where there are several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import StatisticsError, correlation, fmean, median

import numpy as np

from axonn_tune.specs.results import Pairs


@dataclass(frozen=True)
class Quality:
    """How well pairs are predicted; nan without any.

    Errors are predicted / measured - 1. mape, median, p90: of |error|; bias: mean with its sign. spearman, kendall:
    rank correlations. regret: measured value of the predicted best over that of the best, minus 1; best: place of the
    predicted best among the measured, best_rank: of the measured best among the predicted, from 1, 0 without rows.
    coverage: share of measured values within the intervals; width: mean of those over the prediction.
    """

    rows: int = 0
    mape: float = math.nan
    median: float = math.nan
    p90: float = math.nan
    bias: float = math.nan
    worst: float = math.nan
    spearman: float = math.nan
    kendall: float = math.nan
    regret: float = math.nan
    best: int = 0
    best_rank: int = 0
    coverage: float = math.nan
    width: float = math.nan


def quality(pairs: Pairs) -> Quality:
    """Quality of the pairs that have both values, as rows of one family."""
    errors = pairs.errors
    if not errors:
        return Quality()
    sizes = [abs(error) for error in errors.values()]
    predicted, measured = ([column[key] for key in errors] for column in (pairs.predicted, pairs.measured))
    chosen, best = (measured[predicted.index(min(predicted))], predicted[measured.index(min(measured))])
    ends = {key: (pairs.low[key], pairs.high[key]) for key in errors if key in pairs.low}
    inside = [low <= pairs.measured[key] <= high for key, (low, high) in ends.items()]
    widths = [(high - low) / pairs.predicted[key] for key, (low, high) in ends.items()]
    return Quality(
        rows=len(errors),
        mape=fmean(sizes),
        median=median(sizes),
        p90=float(np.quantile(sizes, 0.9)),
        bias=fmean(errors.values()),
        worst=max(errors.values(), key=abs),
        spearman=spearman(predicted, measured),
        kendall=kendall(predicted, measured),
        regret=chosen / min(measured) - 1.0,
        best=1 + sum(value < chosen for value in measured),
        best_rank=1 + sum(value < best for value in predicted),
        coverage=fmean(inside) if inside else math.nan,
        width=fmean(widths) if widths else math.nan,
    )


def by_group(pairs: Pairs, groups: Mapping[str, str], *, least: int = 1) -> dict[str, Quality]:
    """Quality by group of a key, in alphabetical order; groups of fewer than `least` rows are left out."""
    members: dict[str, list[str]] = {}
    for key in pairs.errors:
        members.setdefault(groups[key], []).append(key)
    return {name: quality(pairs.only(keys)) for name, keys in sorted(members.items()) if len(keys) >= least}


def relative_error(predicted: float | None, measured: float | None) -> float | None:
    """predicted / measured - 1; None where either is missing, or what was measured is 0."""
    return None if predicted is None or not measured else predicted / measured - 1.0


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
    a, b = np.array(first), np.array(second)
    agreed = spread_a = spread_b = 0.0
    # Row by row: all pairs at once would take gigabytes for thousands of rows.
    for one, other in zip(a, b, strict=True):
        signs_a, signs_b = np.sign(one - a), np.sign(other - b)
        agreed += signs_a @ signs_b
        spread_a += signs_a @ signs_a
        spread_b += signs_b @ signs_b
    return float(agreed / math.sqrt(spread_a * spread_b)) if spread_a and spread_b else math.nan
