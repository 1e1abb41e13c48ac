"""Rows that name their model, seen in groups, in pairs that differ in one thing, and by their memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median

from axonn_tune.frameworks.optimizers import ADAMW
from axonn_tune.units import GIB
from axonn_tune.validation.published.accuracy import PredictedRow, StepSummary
from axonn_tune.validation.published.cases import Case, profile_of
from axonn_tune.validation.published.rows import StepRow
from axonn_tune.validation.quality import relative_error

LEAST_DIFFERENCE = 0.05
"""Pairs whose measured steps differ by less say nothing of which is faster."""

GROUPS = (
    *("dense, BF16", "dense, formats on Blackwell", "experts, BF16", "formats", "context"),
    *("MLPerf", "AMD", "fine-tuning", "LoRA", "offload", "Muon", "functional"),
)
"""In the order in which they are shown."""

SLOWED = "rowwise with TP"
"""Formats whose publication says that their steps are slower than they should be: pytorch/torchtitan issue 1207."""


@dataclass(frozen=True)
class Pair:
    """Two rows of one source that differ in one thing alone; ratios: second step over first."""

    what: str
    first: PredictedRow
    second: PredictedRow

    @property
    def measured(self) -> float:
        """Of the steps as measured."""
        return (self.second.row.step_s or 0.0) / (self.first.row.step_s or 1.0)

    @property
    def predicted(self) -> float:
        """Of the steps as predicted, the shortest of layouts where a row leaves some open."""
        return _step_s(self.second) / _step_s(self.first)

    @property
    def speed_up_error(self) -> float:
        """Predicted less measured speed-up; of a format over BF16, whichever comes first."""
        turned = self.second.row.precision == "bf16"
        return self.predicted - self.measured if turned else 1.0 / self.predicted - 1.0 / self.measured

    @property
    def right(self) -> bool | None:
        """Whether the faster one is the predicted; None where the steps are as good as equal."""
        if abs(self.measured - 1.0) <= LEAST_DIFFERENCE:
            return None
        return (self.measured - 1.0) * (self.predicted - 1.0) > 0.0


def groups(rows: Sequence[PredictedRow]) -> dict[str, StepSummary]:
    """Rows that are scored, by what they measure; one of MLPerf, or with context parallelism, is in others as well.

    Recipes that their publisher calls functional checks are in a group of their own, and so are steps on AMD's.
    """
    members = dict[str, list[PredictedRow]]()
    for one in rows:
        for name in () if one.case is None else _groups_of(one, one.case):
            members.setdefault(name, []).append(one)
    return {name: StepSummary(tuple(members[name])) for name in GROUPS if name in members}


def is_tuned(one: PredictedRow) -> bool:
    """Whether a row is more than a check that a recipe works, which its publisher calls untuned."""
    return one.row.more is None or not one.row.more.functional


def _groups_of(one: PredictedRow, case: Case) -> Iterator[str]:
    accelerator, narrow = case.machine.accelerator, case.workload.format is not None
    if not is_tuned(one):
        yield "functional"
        return
    if case.workload.tuning is not None or case.workload.lengths is not None:
        yield "fine-tuning" if case.workload.tuning is None else "LoRA"
        return
    step = case.framework.step
    if "moments" in step.offloaded or step.optimizer != ADAMW:
        yield "offload" if step.offloads else "Muon"
        return
    if "training_results" in one.row.dataset:
        yield "MLPerf"
    if accelerator.is_amd:
        yield "AMD"
        return
    if narrow:
        yield "formats"
        if not case.model.has_experts and accelerator.generation == "blackwell":
            yield "dense, formats on Blackwell"
    else:
        yield "experts, BF16" if case.model.has_experts else "dense, BF16"
    if one.row.context > 1:
        yield "context"


@dataclass(frozen=True)
class PairSummary:
    """Pairs that differ in one thing.

    told: those whose measured steps differ by more than `LEAST_DIFFERENCE`; right: share of them with the faster one
    named; error: median of the distance of predicted and measured ratio, None without any.
    """

    pairs: int
    told: int
    right: float | None
    error: float | None


def summary(every: Iterable[Pair]) -> PairSummary:
    """Of some pairs."""
    found = list(every)
    told = [one.right for one in found if one.right is not None]
    errors = [abs(one.predicted - one.measured) for one in found]
    return PairSummary(len(found), len(told), fmean(told) if told else None, median(errors) if errors else None)


def by_what(every: Iterable[Pair]) -> dict[str, PairSummary]:
    """Pairs by what they differ in, and all."""
    found = list(every)
    kinds = {what: summary(one for one in found if one.what == what) for what in sorted({one.what for one in found})}
    return {**kinds, "all": summary(found)} if found else {}


def pairs(rows: Sequence[PredictedRow]) -> Iterator[Pair]:
    """Every pair of rows that differ in one thing, in the order of the rows."""
    timed = [one for one in rows if one.row.step_s and (one.predicted_s or one.choices_s)]
    for first, second in combinations(timed, 2):
        if _shared(first.row) != _shared(second.row):
            continue
        ours, theirs = _varied(first.row), _varied(second.row)
        differing = [name for name, value in ours.items() if value != theirs[name]]
        if len(differing) == 1:
            what, both = differing[0], f"{ours[differing[0]]}{theirs[differing[0]]}"
            ports = what == "dispatcher" and "-" in both
            slowed = what == "format" and "rowwise" in both and first.row.tensor > 1
            yield Pair(f"{what}, ports" if ports else f"{what}, {SLOWED}" if slowed else what, first, second)


def memory(rows: Sequence[PredictedRow]) -> list[tuple[PredictedRow, float]]:
    """Rows that print their memory, with the error of the predicted, the worst first."""
    printed = ((one, relative_error((one.counted_bytes or 0.0) / GIB, one.row.memory_gib)) for one in rows)
    found = [(one, error) for one, error in printed if error is not None and one.memory_bytes]
    return sorted(found, key=lambda each: -abs(each[1]))


def unfit(rows: Sequence[PredictedRow]) -> list[PredictedRow]:
    """Rows that ran with a recompute that they state, and whose predicted memory does not fit."""
    return [one for one in rows if one.misfit and one.row.more is not None and not one.row.more.open_recompute]


def _step_s(one: PredictedRow) -> float:
    return one.predicted_s or one.choices_s[0]


def _shared(row: StepRow) -> tuple[object, ...]:
    """What two rows of a pair have in common."""
    more = row.more
    of_all = (row.dataset, row.framework, row.model, row.layers, row.gpus, row.sequence_length)
    degrees = (row.global_batch, row.pipeline, row.interleave, row.interleave_known, row.context)
    of_more = (more.shards, more.sharded, more.layout, more.software, more.functional) if more else ()
    return (*of_all, *degrees, *of_more)


def _varied(row: StepRow) -> dict[str, object]:
    """What one of two rows may have otherwise."""
    more = row.more
    found: dict[str, object] = {
        "machine": profile_of(row),
        "micro-batch": row.micro_batch,
        "format": row.precision,
        "recompute": row.recomputes,
        "folding": (row.tensor, more and more.expert, more and more.expert_tensor),
    }
    if more is not None:
        found |= {"dispatcher": more.dispatcher, "overlap": bool(more.expert_overlap), "routing": more.routing}
        step = {name: value for name, value in more.step.items() if name.startswith("offload")}
        found |= {"offload": (more.offload, *step.values()), "optimizer": more.step.get("optimizer", ADAMW)}
        found |= {"async TP": more.async_tp, "compiled": "compile" in row.notes, "CUDA graphs": more.cuda_graphs}
    return found
