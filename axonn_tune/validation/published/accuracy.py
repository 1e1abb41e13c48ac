"""Published measurements against their predictions: each step with its interval or why there is none, and in sum.

A row is the search with the row's layout pinned: the same candidates, memory limit, prices and intervals. Where it
leaves micro-batch, recompute or chunks open, the search finds several, and the row has their range and no error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean
from typing import Literal, TypeAlias, get_args

from axonn_tune.cost.price import Detail, PricedLayout, price
from axonn_tune.cost.uncertainty import outside
from axonn_tune.grid import divisors
from axonn_tune.job import Job, Layout
from axonn_tune.program.memory import memory_limit_bytes
from axonn_tune.ranking.choosing import search
from axonn_tune.recompute import lacked_by
from axonn_tune.specs.loading import Loaded
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.results import Pairs
from axonn_tune.specs.workload import Recompute
from axonn_tune.units import GIB
from axonn_tune.validation.published.cases import Case, case_of, differences, framework_of, measured_s
from axonn_tune.validation.published.cells import Named
from axonn_tune.validation.published.rows import SHIPPED, StepRow, read_records, read_steps
from axonn_tune.validation.quality import Quality, by_group, quality, relative_error

FAMILY_ROWS = 5
"""Families with fewer rows are not ranked."""
NEARLY = 1.07
"""Of the memory that there is: rows that print it are predicted about as well."""
ALLOCATOR_SHARE = 0.05
"""Of what torch's allocator reserves, what it loses to fragments: as profiles have it in `reserved_memory_gib`
(ai-dynamo/aiconfigurator, h100_sxm.yaml)."""
CONTEXT_GIB, COMMUNICATORS_GIB = 0.5, 4 * 0.38
"""What a process has on its GPU beside: the context, and four communicators of NCCL where there are several ranks (the
same)."""
SUMS = "vtrain_single"
"""The source whose rows are sums of few layer times: tools/vtrain_sums.py."""

NAMED_ROWS = ("moe_steps.csv", "finetuning.csv")
"""Files of rows that name their model."""

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
    def key(self) -> str:
        """Name and line, since names of a user's rows may repeat."""
        return f"{self.row.id}:{self.row.line}"

    @property
    def error(self) -> float | None:
        """predicted / measured - 1; None where either is missing, or the row is for ratios only."""
        return relative_error(self.predicted_s, self.row.step_s) if self.scored else None

    @property
    def counted_bytes(self) -> float | None:
        """Predicted memory as the row counts it: what torch reserves is more than what is allocated, and nvidia-smi
        shows the context and communicators, too."""
        if self.memory_bytes is None or self.memory_kind not in ("reserved", "device"):
            return self.memory_bytes
        reserved = self.memory_bytes / (1.0 - ALLOCATOR_SHARE)
        several = self.row.gpus > 1
        return reserved + (self.memory_kind == "device") * GIB * (CONTEXT_GIB + several * COMMUNICATORS_GIB)

    @property
    def memory_kind(self) -> str:
        """Which memory a row prints."""
        return "unstated" if self.row.more is None else self.row.more.memory_kind

    @property
    def scored(self) -> bool:
        """Whether its step counts, and not only its ratio to those of others."""
        return self.row.more is None or not self.row.more.ratios_only

    @property
    def limit_bytes(self) -> float | None:
        """Usable memory of a GPU; None without a case."""
        return None if self.case is None else memory_limit_bytes(self.case.machine.accelerator)

    @property
    def misfit(self) -> str:
        """The words for a row that is priced although its memory does not fit; "" for others."""
        if self.fits or self.memory_bytes is None or self.limit_bytes is None:
            return ""
        return f", does not fit: {self.memory_bytes / GIB:.1f} of {self.limit_bytes / GIB:.1f} GiB"

    @property
    def nearly_fits(self) -> bool:
        """Whether it fits, by an error of memory that is not unusual."""
        if self.fits or self.limit_bytes is None or self.memory_bytes is None:
            return self.fits
        return self.memory_bytes <= NEARLY * self.limit_bytes

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
        words += ["sequence parallel"] if options.sequence_parallel and grid.x > 1 else []
        words += ["sharded weights"] if grid.z > 1 else []
        words += ["distributed optimizer"] if options.distributed_optimizer and grid.z == 1 else []
        return ", ".join(words)


def predict_steps(rows: Iterable[StepRow], *, machine: Machine | None = None) -> tuple[PredictedRow, ...]:
    """Predictions in the order of the rows, each on the nearest profile, or all on `machine` as it is."""
    if machine is None:
        return tuple(_predict(row, None) for row in rows)
    return tuple(replace(_predict(row, machine), warnings=differences(row, machine, framework_of(row))) for row in rows)


def best_pricing(job: Job, configurations: Iterable[Layout]) -> Detail:
    """The fastest of some configurations that fits into memory, or the leanest if none does."""
    every = [price(job, one) for one in configurations]
    fitting = [one for one in every if one.memory_bytes <= one.memory_limit_bytes]
    return min(fitting, key=lambda one: one.iteration_s) if fitting else min(every, key=lambda one: one.memory_bytes)


def choices_of(case: Case) -> tuple[tuple[PricedLayout, ...], float]:
    """What a search finds with a row's layout pinned, the shortest step first; the least memory of all, bytes."""
    if len({one.grid for one in case.configurations}) > 1 or any(one.parts for one in case.configurations):
        # A search has no pin for the blocks of each part, nor for several grids.
        priced = [best_pricing(case, [one]) for one in case.configurations]
        least = min(one.memory_bytes for one in priced)
        fitting = [one for one in priced if one.memory_bytes <= one.memory_limit_bytes]
        return tuple(sorted(fitting, key=lambda one: one.iteration_s)), least
    ranking = search(case.problem, variants=True, top=0)
    return tuple(sorted(ranking.first, key=lambda one: one.iteration_s)), float(
        ranking.least_bytes.min(initial=math.inf)
    )


def _predict(row: StepRow, machine: Machine | None) -> PredictedRow:
    if row.more is not None and row.more.open_recompute and row.more.model is not None:
        return _least_recomputed(row, row.more.model, replace(row.more, open_recompute=False), machine)
    case = case_of(row, machine=machine)
    if isinstance(case, str):
        return PredictedRow(row, why_not=case)
    row = replace(row, step_s=measured_s(case))
    choices, least = choices_of(case)
    if not choices:
        there = memory_limit_bytes(case.machine.accelerator) / GIB
        why_not = f"does not fit: needs {least / GIB:.1f} GiB of {there:.1f} GiB"
        if row.more is None or len(case.configurations) > 1:
            return PredictedRow(row, case, memory_bytes=least, why_not=why_not, fits=False)
        # It ran: its step counts, and its memory is listed.
        tight = best_pricing(case, case.configurations)
        ends = tight.low_s, tight.high_s
        return PredictedRow(row, case, tight.layout, tight.iteration_s, tight.memory_bytes, *ends, fits=False)
    times = tuple(one.iteration_s for one in choices)
    if len(choices) > 1:
        names = {"micro_batch": "micro-batch", "recompute": "recompute", "chunks": "interleaving", "grid": "EP"}
        return _in_part_open(
            row, case, times, [name for key, name in names.items() if len({getattr(one, key) for one in choices}) > 1]
        )
    one = choices[0]
    return PredictedRow(row, case, one.layout, one.iteration_s, one.memory_bytes, one.low_s, one.high_s)


def _least_recomputed(row: StepRow, model: Model, closed: Named, machine: Machine | None) -> PredictedRow:
    """Without a word of recompute the least that fits; the same for each micro-batch that a row may mean."""
    several = row.micro_batch is None and row.global_batch % row.data == 0
    sizes = divisors(row.global_batch // row.data) if several else (row.micro_batch,)
    kinds, found = tuple(_recomputes(row, model)), list[PredictedRow]()
    for size in sizes:
        # No larger one fits with less recompute.
        for at in range(len(kinds)):
            one = _predict(replace(row, micro_batch=size, recomputes=(kinds[at],), more=closed), machine)
            if one.fits or (one.nearly_fits and one.predicted_s):
                break
        timed = one.nearly_fits and (one.predicted_s or one.choices_s)
        if found and not timed:
            break
        found, kinds = [*found, one], kinds[at:]
        if not timed:
            break
    if len(found) == 1:
        return found[0]
    times = [time_s for one in found for time_s in one.choices_s or (one.predicted_s or 0.0,)]
    words = ("micro-batch", *(word for one in found for word in one.open_words.split(", ") if word))
    return _in_part_open(replace(found[0].row, micro_batch=None), found[0].case, times, dict.fromkeys(words))


def _in_part_open(row: StepRow, case: Case | None, times: Sequence[float], words: Iterable[str]) -> PredictedRow:
    """A row of which several layouts fit; words: what it leaves open."""
    said = ", ".join(words)
    why_not = f"leaves {said} open: {len(times)} layouts fit"
    return PredictedRow(row, case, choices_s=tuple(sorted(times)), open_words=said, why_not=why_not)


def _recomputes(row: StepRow, model: Model) -> Iterator[tuple[Recompute, int | None]]:
    """Recompute sets of a row's software from least to most; whole layers first on an eighth of them, and so on. None
    where activations are offloaded."""
    framework, layers = framework_of(row), -(-row.layers // (row.pipeline * row.interleave))
    for kind in ("none",) if row.more and row.more.offload else framework.recompute_sets:
        if kind == "full" and not framework.cannot_recompute(kind, 1):
            yield from ((kind, some) for some in range(-(-layers // 8), layers, -(-layers // 8)))
        if not lacked_by(kind, model.parts):
            yield kind, None


def without(predictions: Iterable[PredictedRow], left_out: LeftOut) -> tuple[PredictedRow, ...]:
    """Predictions with the row's family or source held out, from `left_out.csv`.

    Intervals keep their width. Rows without such a time are omitted.
    """
    times, found = left_out_s(left_out), []
    for one in predictions:
        step_s = times.get(one.row.id)
        if step_s is not None and one.predicted_s is not None:
            share = step_s / one.predicted_s
            low_s, high_s = (None if bound is None else share * bound for bound in (one.low_s, one.high_s))
            found.append(replace(one, predicted_s=step_s, low_s=low_s, high_s=high_s))
    return tuple(found)


@cache
def left_out_s(left_out: LeftOut) -> dict[str, float]:
    """Step times with a row's family or source held out, by its id, s."""
    column = f"without_{left_out}_s"
    records = read_records(SHIPPED / "left_out.csv", needed=("id", column))
    return {record["id"]: float(record[column]) for _, record in records}


@dataclass(frozen=True)
class StepSummary:
    """Quality of step predictions by one fit; means over families are None without a family."""

    rows: tuple[PredictedRow, ...]

    @cached_property
    def pairs(self) -> Pairs:
        """Steps by the rows' keys, s."""
        return Pairs(
            predicted={one.key: one.predicted_s for one in self.rows if one.predicted_s is not None},
            low={one.key: one.low_s for one in self.rows if one.low_s is not None},
            high={one.key: one.high_s for one in self.rows if one.high_s is not None},
            measured={one.key: one.row.step_s for one in self.rows if one.row.step_s is not None and one.scored},
        )

    @cached_property
    def quality(self) -> Quality:
        """Of all rows that have both times."""
        return quality(self.pairs)

    def by(self, column: str, *, least: int = 1) -> dict[str, Quality]:
        """Of the rows with the same value in a field, if there are at least so many."""
        return by_group(self.pairs, {one.key: getattr(one.row, column) for one in self.rows}, least=least)

    @cached_property
    def by_source(self) -> dict[str, Quality]:
        """Of each source."""
        return self.by("dataset")

    @cached_property
    def families(self) -> dict[str, Quality]:
        """Of layouts of one model and GPU count, where there are enough."""
        return self.by("family", least=FAMILY_ROWS)

    @property
    def spearman(self) -> float | None:
        """Mean over families."""
        return fmean(one.spearman for one in self.families.values()) if self.families else None

    @property
    def regret(self) -> float | None:
        """Mean over families."""
        return fmean(one.regret for one in self.families.values()) if self.families else None

    @property
    def best_in_top_5(self) -> float | None:
        """Share of families whose measured best is among the five predicted best."""
        return fmean(one.best_rank <= 5 for one in self.families.values()) if self.families else None

    @property
    def predicted(self) -> int:
        """How many rows have a step."""
        return len(self.pairs.predicted)

    @property
    def open(self) -> tuple[PredictedRow, ...]:
        """Rows that leave part of their layout open."""
        return tuple(one for one in self.rows if one.choices_s)

    @property
    def not_predicted(self) -> tuple[PredictedRow, ...]:
        """Rows with neither a step nor a range of steps."""
        return tuple(one for one in self.rows if one.predicted_s is None and not one.choices_s)

    @property
    def not_fitting(self) -> int:
        """How many rows memory rejects."""
        return sum(not one.fits for one in self.rows)

    def worst(self, count: int) -> list[PredictedRow]:
        """The rows with the largest errors."""
        return sorted((one for one in self.rows if one.error is not None), key=lambda one: -abs(one.error or 0.0))[
            :count
        ]


@dataclass(frozen=True)
class Accuracy:
    """What was predicted of each row, in the order of the rows.

    path: file of the rows. without: steps with a row's family or source held out; only for the shipped rows. apart: of
    them those by fits without the source, and without the rows of `SUMS`. more: of rows that name their model, those of
    a file of their own where the shipped ones are asked for. machine: the profile that all steps were
    priced on; None: each on the nearest. listed: how many of the worst rows to list.
    """

    path: Path
    summary: StepSummary
    without: Mapping[LeftOut, StepSummary] = field(default_factory=dict)
    apart: StepSummary | None = None
    more: StepSummary | None = None
    machine: Loaded[Machine] | None = None
    listed: int = 20

    @property
    def steps(self) -> tuple[PredictedRow, ...]:
        """Every row with its prediction."""
        return self.summary.rows

    @property
    def sums(self) -> tuple[int, int]:
        """Rows of `SUMS`, and the layer times of which they are sums: one a hidden size, TP and micro-batch."""
        rows = [one.row for one in self.steps if one.row.dataset == SUMS]
        return len(rows), len({(row.hidden, row.tensor, row.micro_batch) for row in rows})


def evaluate(rows: Path | None = None, *, machine: Loaded[Machine] | None = None, listed: int = 20) -> Accuracy:
    """Predict every row of a file, or of those that ship; errors as `rows.read_steps`.

    machine: price all steps on this profile as it is. listed: how many of the worst rows to list.
    """
    path = rows or SHIPPED / "steps.csv"
    steps = predict_steps(read_steps(path), machine=None if machine is None else machine.document)
    found = Accuracy(path, StepSummary(steps), machine=machine, listed=listed)
    if rows is not None:
        named = tuple(one for one in steps if one.row.more is not None)
        return replace(found, more=StepSummary(named)) if named else found
    read = (row for name in NAMED_ROWS for row in read_steps(SHIPPED / name))
    more = StepSummary(predict_steps(read))
    held_out = {kind: StepSummary(without(steps, kind)) for kind in LEFT_OUT}
    apart = StepSummary(tuple(one for one in held_out["source"].rows if one.row.dataset != SUMS))
    return replace(found, without=held_out, apart=apart, more=more)
