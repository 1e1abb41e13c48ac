"""How good predictions are: errors, rank correlation and regret within families, coverage of intervals; in sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median

from axonn_tune.frameworks import UNKNOWN
from axonn_tune.published.cases import framework_of
from axonn_tune.published.steps import PredictedStep

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


def families(predictions: Iterable[PredictedStep]) -> tuple[FamilyQuality, ...]:
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


def coverage(predictions: Iterable[PredictedStep]) -> float:
    """Share of measured times inside the predicted interval; nan without any."""
    inside = [
        one.low_s <= one.row.step_s <= one.high_s
        for one in predictions
        if one.low_s is not None and one.high_s is not None and one.row.step_s
    ]
    return sum(inside) / len(inside) if inside else math.nan


@dataclass(frozen=True)
class StepSummary:
    """Quality of step predictions; means over families are None without a family."""

    rows: int
    predicted: int
    errors: Errors
    by_source: dict[str, Errors]
    by_framework: dict[str, Errors]
    by_accelerator: dict[str, Errors]
    families: tuple[FamilyQuality, ...]
    coverage: float
    worst: tuple[PredictedStep, ...]
    not_predicted: tuple[PredictedStep, ...]
    not_measured: tuple[PredictedStep, ...]
    of_unknown_software: tuple[PredictedStep, ...]
    of_unknown_interleaving: tuple[PredictedStep, ...]

    @property
    def spearman(self) -> float | None:
        """Mean over families."""
        return fmean(family.spearman for family in self.families) if self.families else None

    @property
    def regret(self) -> float | None:
        """Mean over families."""
        return fmean(family.regret for family in self.families) if self.families else None

    @property
    def best_in_top_5(self) -> float | None:
        """Share of families whose measured best is among the five predicted best."""
        return fmean(family.best_rank <= 5 for family in self.families) if self.families else None


def summarize_steps(predictions: Sequence[PredictedStep], *, worst: int = 20) -> StepSummary:
    """Summary; `worst`: how many of the worst rows it lists."""
    measured = [one for one in predictions if one.error is not None]
    ordered = sorted(measured, key=lambda one: -abs(one.error or 0.0))
    return StepSummary(
        rows=len(predictions),
        predicted=sum(one.predicted_s is not None for one in predictions),
        errors=errors_of(_errors(measured)),
        by_source=_by(measured, lambda one: one.row.dataset),
        by_framework=_by(measured, lambda one: one.row.framework),
        by_accelerator=_by(measured, lambda one: one.row.gpu),
        families=families(measured),
        coverage=coverage(measured),
        worst=tuple(ordered[:worst]),
        not_predicted=tuple(one for one in predictions if one.predicted_s is None),
        not_measured=tuple(one for one in predictions if one.row.step_s is None),
        of_unknown_interleaving=tuple(one for one in measured if one.plain_s is not None),
        of_unknown_software=tuple(one for one in predictions if framework_of(one.row).name == UNKNOWN),
    )


def _errors(predictions: Sequence[PredictedStep]) -> list[float]:
    return [one.error for one in predictions if one.error is not None]


def _by(predictions: Sequence[PredictedStep], key: Callable[[PredictedStep], str]) -> dict[str, Errors]:
    groups: dict[str, list[PredictedStep]] = {}
    for one in predictions:
        groups.setdefault(key(one), []).append(one)
    return {name: errors_of(_errors(members)) for name, members in sorted(groups.items())}
