"""How good predictions are: errors, rank correlation and regret within families, coverage of intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median

from axonn_tune.accuracy.steps import Predicted

FAMILY_ROWS = 5
"""Families with fewer rows are not ranked."""


@dataclass(frozen=True)
class Errors:
    """Relative errors of some rows: how many, mean of |error|, median, 90th percentile, mean with sign."""

    rows: int
    mape: float
    median: float
    p90: float
    bias: float


@dataclass(frozen=True)
class FamilyQuality:
    """How well layouts of one model on as many GPUs are ranked.

    regret: what the predicted best really takes over what the best takes, less 1; best_rank: place of the
    measured best among the predictions, from 1.
    """

    family: str
    rows: int
    spearman: float
    kendall: float
    regret: float
    best_rank: int


def errors_of(errors: Iterable[float]) -> Errors:
    """Summary of predicted / measured - 1; all nan without any."""
    found = list(errors)
    if not found:
        return Errors(0, *[math.nan] * 4)
    sizes = sorted(map(abs, found))
    return Errors(len(found), fmean(sizes), median(sizes), quantile(sizes, 0.9), fmean(found))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Quantile of ascending values, linear between neighbours."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def families(predictions: Iterable[Predicted]) -> tuple[FamilyQuality, ...]:
    """Quality of each family with enough rows that have both times."""
    members: dict[str, list[tuple[float, float]]] = {}
    for one in predictions:
        if one.predicted_s is not None and one.row.step_s:
            members.setdefault(one.row.family, []).append((one.predicted_s, one.row.step_s))
    return tuple(family_quality(name, pairs) for name, pairs in sorted(members.items()) if len(pairs) >= FAMILY_ROWS)


def family_quality(name: str, pairs: Sequence[tuple[float, float]]) -> FamilyQuality:
    """Quality of one family of (predicted, measured) times."""
    predicted, measured = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    chosen = min(range(len(pairs)), key=lambda at: predicted[at])
    best = min(range(len(pairs)), key=lambda at: measured[at])
    return FamilyQuality(
        family=name,
        rows=len(pairs),
        spearman=spearman(predicted, measured),
        kendall=kendall(predicted, measured),
        regret=measured[chosen] / measured[best] - 1.0,
        best_rank=1 + sum(value < predicted[best] for value in predicted),
    )


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation, ties at their mean rank; nan if either is constant."""
    a, b = ranks(first), ranks(second)
    mean = (len(a) + 1) / 2.0
    spread = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True)) / spread if spread else math.nan


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1, equal values sharing the mean of theirs."""
    order = sorted(values)
    places: dict[float, list[int]] = {}
    for place, value in enumerate(order, 1):
        places.setdefault(value, []).append(place)
    return [fmean(places[value]) for value in values]


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's tau-b; nan if either is constant."""
    agree = ties_first = ties_second = pairs = 0
    for (a, c), (b, d) in combinations(zip(first, second, strict=True), 2):
        pairs += 1
        left, right = (a > b) - (a < b), (c > d) - (c < d)
        agree += left * right
        ties_first += not left
        ties_second += not right
    spread = math.sqrt((pairs - ties_first) * (pairs - ties_second))
    return agree / spread if spread else math.nan


def coverage(predictions: Iterable[Predicted]) -> float:
    """Share of measured times inside the predicted interval; nan without any."""
    inside = [
        one.low_s <= one.row.step_s <= one.high_s
        for one in predictions
        if one.low_s is not None and one.high_s is not None and one.row.step_s
    ]
    return sum(inside) / len(inside) if inside else math.nan
