"""Everything `axonn-tune validate --published` says, as one value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from axonn_tune.accuracy.frameworks import framework_of
from axonn_tune.accuracy.quality import Errors, FamilyQuality, coverage, errors_of, families
from axonn_tune.accuracy.steps import Predicted


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
    worst: tuple[Predicted, ...]
    not_predicted: tuple[Predicted, ...]
    not_measured: tuple[Predicted, ...]
    of_unknown_software: tuple[Predicted, ...]

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


def summarize_steps(predictions: Sequence[Predicted], *, worst: int = 20) -> StepSummary:
    """Summary; `worst`: how many of the worst rows it lists."""
    judged = [one for one in predictions if one.error is not None]
    ordered = sorted(judged, key=lambda one: -abs(one.error or 0.0))
    return StepSummary(
        rows=len(predictions),
        predicted=sum(one.price is not None for one in predictions),
        errors=errors_of(_errors(judged)),
        by_source=_by(judged, lambda one: one.row.dataset),
        by_framework=_by(judged, lambda one: one.row.framework),
        by_accelerator=_by(judged, lambda one: one.row.gpu),
        families=families(judged),
        coverage=coverage(judged),
        worst=tuple(ordered[:worst]),
        not_predicted=tuple(one for one in predictions if one.price is None),
        not_measured=tuple(one for one in predictions if one.row.step_s is None),
        of_unknown_software=tuple(one for one in predictions if not framework_of(one.row).known),
    )


def _errors(predictions: Sequence[Predicted]) -> list[float]:
    return [one.error for one in predictions if one.error is not None]


def _by(predictions: Sequence[Predicted], key: Callable[[Predicted], str]) -> dict[str, Errors]:
    groups: dict[str, list[Predicted]] = {}
    for one in predictions:
        groups.setdefault(key(one), []).append(one)
    return {name: errors_of(_errors(members)) for name, members in sorted(groups.items())}
