"""Published measurements against their predictions: each step with its interval or why there is none, and in sum.

A row is the search with the row's layout pinned: the same candidates, memory limit, prices and intervals. Where it
leaves micro-batch, recompute or chunks open, the search finds several, and the row has their range and no error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Literal, TypeAlias, get_args

from axonn_tune.cost.price import Detail, PricedLayout, price
from axonn_tune.cost.uncertainty import outside
from axonn_tune.frameworks import UNKNOWN
from axonn_tune.job import Layout
from axonn_tune.program.memory import memory_limit_bytes
from axonn_tune.ranking.choosing import search
from axonn_tune.specs.loading import Loaded
from axonn_tune.specs.machine import Machine
from axonn_tune.units import GIB
from axonn_tune.validation.published.cases import Case, case_of, differences, framework_of
from axonn_tune.validation.published.measurements import Evaluation, evaluate_rows
from axonn_tune.validation.published.rows import SHIPPED, StepRow, read_records, read_steps
from axonn_tune.validation.quality import Errors, errors_by, errors_of, kendall, regret, relative_error, spearman

FAMILY_ROWS = 5
"""Families with fewer rows are not ranked."""
SUMS = "vtrain_single"
"""The source whose rows are sums of few layer times: tools/vtrain_sums.py."""

LeftOut: TypeAlias = Literal["family", "source"]
"""What is held out of a fit: the row's model on its number of GPUs, or the whole publication."""

LEFT_OUT: tuple[LeftOut, ...] = get_args(LeftOut)


@dataclass(frozen=True)
class PredictedRow:
    """Prediction of a row; without a step time, `why_not` has the reason.

    choices_s: steps of all layouts that fit, the shortest first, of a row that leaves some open, and open_words what in
    it is open. fits: false where memory is the reason.
    warnings: differences between the row's machine and the profile.
    """

    row: StepRow
    case: Case | None = None
    configuration: Layout | None = None
    predicted_s: float | None = None
    memory_bytes: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    why_not: str = ""
    choices_s: tuple[float, ...] = ()
    open_words: str = ""
    fits: bool = True
    warnings: tuple[str, ...] = ()

    @property
    def error(self) -> float | None:
        """predicted / measured - 1; None where either is missing."""
        return relative_error(self.predicted_s, self.row.step_s)

    @property
    def outside(self) -> tuple[str, ...]:
        """What of it is beyond the rows that are scored."""
        if self.case is None or self.configuration is None:
            return ()
        return outside(self.case.problem, self.configuration)

    @property
    def layout(self) -> str:
        """The priced layout: `tp=8 pp=2 dp=64, interleaved 3, ...`; "" without a price."""
        if self.case is None or self.configuration is None:
            return ""
        grid, options = self.configuration.grid, self.case.framework.step
        words = [f"tp={grid.x} pp={grid.pipeline} dp={grid.data * grid.z}"]
        words += [f"cp={grid.context}"] if grid.context > 1 else []
        words += [f"interleaved {self.configuration.chunks}"] if self.configuration.chunks > 1 else []
        words += ["sequence parallel"] if options.sequence_parallel else []
        words += ["sharded weights"] if grid.z > 1 else []
        words += ["distributed optimizer"] if options.distributed_optimizer and grid.z == 1 else []
        return ", ".join(words)


def predict_steps(rows: Iterable[StepRow], *, machine: Machine | None = None) -> tuple[PredictedRow, ...]:
    """Predictions in the order of the rows, each on the nearest profile, or all on `machine` as it is."""
    if machine is None:
        return tuple(_predict(row, None) for row in rows)
    return tuple(replace(_predict(row, machine), warnings=differences(row, machine)) for row in rows)


def best_pricing(case: Case, configurations: Iterable[Layout]) -> Detail:
    """The fastest of some configurations that fits into memory, or the leanest if none does."""
    every = [price(case.problem, one) for one in configurations]
    fitting = [one for one in every if one.memory_bytes <= one.memory_limit_bytes]
    return min(fitting, key=lambda one: one.iteration_s) if fitting else min(every, key=lambda one: one.memory_bytes)


def choices_of(case: Case) -> tuple[tuple[PricedLayout, ...], float]:
    """What a search finds with a row's layout pinned, the shortest step first; the least memory of all, bytes."""
    if case.row.parts:
        # A search has no pin for the blocks of each part.
        priced = [best_pricing(case, [one]) for one in case.configurations]
        least = min(one.memory_bytes for one in priced)
        fitting = [one for one in priced if one.memory_bytes <= one.memory_limit_bytes]
        return tuple(sorted(fitting, key=lambda one: one.iteration_s)), least
    ranking = search(case.problem, variants=True, exact=1)
    least = min((float(one.total_bytes.min(initial=math.inf)) for one in ranking.fittings.values()), default=math.inf)
    return tuple(sorted((ranking[place] for place in range(len(ranking))), key=lambda one: one.iteration_s)), least


def _predict(row: StepRow, machine: Machine | None) -> PredictedRow:
    case = case_of(row, machine=machine)
    if isinstance(case, str):
        return PredictedRow(row, why_not=case)
    choices, least = choices_of(case)
    if not choices:
        there = memory_limit_bytes(case.machine.accelerator) / GIB
        why_not = f"does not fit: needs {least / GIB:.1f} GiB of {there:.1f} GiB"
        return PredictedRow(row, case, why_not=why_not, fits=False)
    times = tuple(one.iteration_s for one in choices)
    if len(choices) > 1:
        open_words = ", ".join(open_columns(choices))
        why_not = f"leaves {open_words} open: {len(choices)} layouts fit"
        return PredictedRow(row, case, choices_s=times, open_words=open_words, why_not=why_not)
    one = choices[0]
    return PredictedRow(row, case, one.layout, one.iteration_s, one.memory_bytes, one.low_s, one.high_s)


def open_columns(choices: Sequence[PricedLayout]) -> list[str]:
    """In what some layouts of a row differ."""
    names = {"micro_batch": "micro-batch", "recompute": "recompute", "chunks": "interleaving"}
    return [name for key, name in names.items() if len({getattr(one, key) for one in choices}) > 1]


def without(predictions: Iterable[PredictedRow], left_out: LeftOut) -> tuple[PredictedRow, ...]:
    """Predictions with the row's family or source held out, from `left_out.csv`.

    Intervals keep their width. Rows without such a time are omitted.
    """
    times = left_out_s(left_out)
    return tuple(
        _moved(one, times[one.row.id]) for one in predictions if one.row.id in times and one.predicted_s is not None
    )


def _moved(one: PredictedRow, step_s: float) -> PredictedRow:
    assert one.predicted_s is not None, one.row.id
    share = step_s / one.predicted_s
    low_s, high_s = (None if bound is None else share * bound for bound in (one.low_s, one.high_s))
    return replace(one, predicted_s=step_s, low_s=low_s, high_s=high_s)


@cache
def left_out_s(left_out: LeftOut) -> dict[str, float]:
    """Step times with a row's family or source held out, by its id, s."""
    column = f"without_{left_out}_s"
    records = read_records(SHIPPED / "left_out.csv", needed=("id", column))
    return {record["id"]: float(record[column]) for _, record in records}


@dataclass(frozen=True)
class FamilyQuality:
    """Ranking quality of layouts of one model and GPU count.

    regret: measured time of the predicted best over that of the best, minus 1; best_rank: place of the
    measured best among the predictions, from 1.
    """

    family: str
    rows: int
    spearman: float
    kendall: float
    regret: float
    best_rank: int


def families(predictions: Iterable[PredictedRow]) -> tuple[FamilyQuality, ...]:
    """Quality of each family with enough rows that have both times."""
    members: dict[str, list[tuple[float, float]]] = {}
    for one in predictions:
        if one.predicted_s is not None and one.row.step_s:
            members.setdefault(one.row.family, []).append((one.predicted_s, one.row.step_s))
    return tuple(family_quality(name, pairs) for name, pairs in sorted(members.items()) if len(pairs) >= FAMILY_ROWS)


def family_quality(name: str, pairs: Sequence[tuple[float, float]]) -> FamilyQuality:
    """Quality of one family of (predicted, measured) times."""
    predicted, measured = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    best = measured.index(min(measured))
    return FamilyQuality(
        family=name,
        rows=len(pairs),
        spearman=spearman(predicted, measured),
        kendall=kendall(predicted, measured),
        regret=regret(predicted, measured),
        best_rank=1 + sum(value < predicted[best] for value in predicted),
    )


def coverage(predictions: Iterable[PredictedRow]) -> float:
    """Share of measured times inside the predicted interval; nan without any."""
    inside = [
        one.low_s <= one.row.step_s <= one.high_s
        for one in predictions
        if one.low_s is not None and one.high_s is not None and one.row.step_s
    ]
    return sum(inside) / len(inside) if inside else math.nan


def mean_width(predictions: Iterable[PredictedRow]) -> float:
    """Mean width of intervals, over their predictions; nan without any."""
    widths = [
        (one.high_s - one.low_s) / one.predicted_s
        for one in predictions
        if one.low_s and one.high_s and one.predicted_s
    ]
    return fmean(widths) if widths else math.nan


@dataclass(frozen=True)
class StepSummary:
    """Quality of step predictions; means over families are None without a family.

    open: rows that leave part of their layout open. coverage, width: of the printed 80% intervals; intervals: the same
    by source.
    """

    rows: int
    predicted: int
    errors: Errors
    by_source: dict[str, Errors]
    by_framework: dict[str, Errors]
    by_accelerator: dict[str, Errors]
    families: tuple[FamilyQuality, ...]
    coverage: float
    worst: tuple[PredictedRow, ...]
    not_predicted: tuple[PredictedRow, ...]
    not_measured: tuple[PredictedRow, ...]
    of_unknown_software: tuple[PredictedRow, ...]
    open: tuple[PredictedRow, ...]
    not_fitting: int
    width: float
    intervals: dict[str, tuple[float, float]]
    warned: tuple[PredictedRow, ...]

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


def summarize_steps(predictions: Sequence[PredictedRow], *, worst: int = 20) -> StepSummary:
    """Summary; `worst`: how many of the worst rows it lists."""
    measured = [one for one in predictions if one.error is not None]
    ordered = sorted(measured, key=lambda one: -abs(one.error or 0.0))
    return StepSummary(
        rows=len(predictions),
        predicted=sum(one.predicted_s is not None for one in predictions),
        errors=errors_of(one.error for one in measured),
        by_source=errors_by((one.row.dataset, one.error) for one in measured),
        by_framework=errors_by((one.row.framework, one.error) for one in measured),
        by_accelerator=errors_by((one.row.gpu, one.error) for one in measured),
        families=families(measured),
        coverage=coverage(measured),
        worst=tuple(ordered[:worst]),
        not_predicted=tuple(one for one in predictions if one.predicted_s is None and not one.choices_s),
        not_measured=tuple(one for one in predictions if one.row.step_s is None),
        open=tuple(one for one in predictions if one.choices_s),
        not_fitting=sum(not one.fits for one in predictions),
        width=mean_width(measured),
        intervals={
            name: (coverage(own), mean_width(own))
            for name in dict.fromkeys(one.row.dataset for one in measured)
            for own in [[one for one in measured if one.row.dataset == name]]
        },
        warned=tuple(one for one in predictions if one.warnings),
        of_unknown_software=tuple(one for one in predictions if framework_of(one.row).name == UNKNOWN),
    )


@dataclass(frozen=True)
class Files:
    """Files of measurements; all None: those shipped."""

    steps: Path | None = None
    collectives: Path | None = None
    gemm: Path | None = None
    memory: Path | None = None

    def or_shipped(self) -> Files:
        """These files, or all shipped ones if none is given."""
        if any((self.steps, self.collectives, self.gemm, self.memory)):
            return self
        names = ("steps", "collectives", "gemm", "memory")
        return Files(**{name: SHIPPED / f"{name}.csv" for name in names})


@dataclass(frozen=True)
class Accuracy:
    """What was predicted of each kind, in the order of its rows; empty for a kind that was left out.

    without: steps with a row's family or source held out; only for the shipped rows. apart: of them those by fits
    without the source, and without the rows of `SUMS`. machine: the profile that all steps were priced on; None: each
    on the nearest.
    """

    steps: tuple[PredictedRow, ...]
    summary: StepSummary
    collectives: tuple[Evaluation, ...]
    gemms: tuple[Evaluation, ...]
    memory: tuple[Evaluation, ...]
    without: Mapping[LeftOut, StepSummary] = field(default_factory=dict)
    apart: StepSummary | None = None
    machine: Loaded[Machine] | None = None

    @property
    def sums(self) -> tuple[int, int]:
        """Rows of `SUMS`, and the layer times of which they are sums: one a hidden size, TP and micro-batch."""
        rows = [one.row for one in self.steps if one.row.dataset == SUMS]
        return len(rows), len({(row.hidden, row.tensor, row.micro_batch) for row in rows})


def evaluate(files: Files, *, worst: int, machine: Loaded[Machine] | None = None) -> Accuracy:
    """Predict everything; errors as `rows.read_steps`.

    worst: how many of the worst steps the summary lists. machine: price all steps on this profile as it is.
    """
    chosen = files.or_shipped()
    profile = None if machine is None else machine.document
    own = machine is None and chosen.steps == SHIPPED / "steps.csv"
    rows = () if chosen.steps is None else read_steps(chosen.steps)
    steps = predict_steps(rows, machine=profile)
    apart = [one for one in without(steps, "source") if one.row.dataset != SUMS] if own else []
    return Accuracy(
        steps=steps,
        summary=summarize_steps(steps, worst=worst),
        without={kind: summarize_steps(without(steps, kind), worst=0) for kind in LEFT_OUT} if own else {},
        collectives=evaluate_rows(chosen.collectives, "collectives"),
        gemms=evaluate_rows(chosen.gemm, "gemm"),
        memory=evaluate_rows(chosen.memory, "memory"),
        apart=summarize_steps(apart, worst=0) if own else None,
        machine=machine,
    )
