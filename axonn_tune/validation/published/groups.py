"""Rows that name their model, seen in groups, in pairs that differ in one thing, and by their memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from axonn_tune.units import GIB
from axonn_tune.validation.published.accuracy import PredictedRow, StepSummary
from axonn_tune.validation.published.rows import StepRow
from axonn_tune.validation.quality import relative_error

LEAST_DIFFERENCE = 0.05
"""Pairs whose measured steps differ by less say nothing of which is faster."""

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
    """Rows that are scored: those with experts in BF16, in formats below 16 bits, and with context parallelism."""
    cases = [(one, one.case) for one in rows if one.case is not None]
    found = {
        "experts, BF16": [one for one, case in cases if case.model.has_experts and not case.workload.format],
        "formats": [one for one, case in cases if case.workload.format],
        "context": [one for one, _ in cases if one.row.context > 1],
        "dense, BF16": [one for one, case in cases if not case.model.has_experts and not case.workload.format],
    }
    return {name: StepSummary(tuple(members)) for name, members in found.items() if members}


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
    printed = ((one, relative_error((one.memory_bytes or 0.0) / GIB, one.row.memory_gib)) for one in rows)
    found = [(one, error) for one, error in printed if error is not None and one.memory_bytes]
    return sorted(found, key=lambda each: -abs(each[1]))


def _step_s(one: PredictedRow) -> float:
    return one.predicted_s or one.choices_s[0]


def _shared(row: StepRow) -> tuple[object, ...]:
    """What two rows of a pair have in common."""
    more = row.more
    of_all = (row.dataset, row.framework, row.model, row.layers, row.gpus, row.gpu, row.sequence_length)
    degrees = (row.global_batch, row.pipeline, row.interleave, row.interleave_known, row.context)
    of_more = (more.shards, more.sharded, more.layout, more.cuda_graphs, more.software, more.offload) if more else ()
    return (*of_all, *degrees, *of_more)


def _varied(row: StepRow) -> dict[str, object]:
    """What one of two rows may have otherwise."""
    more = row.more
    found: dict[str, object] = {
        "micro-batch": row.micro_batch,
        "format": row.precision,
        "recompute": row.recomputes,
        "folding": (row.tensor, more and more.expert, more and more.expert_tensor),
    }
    if more is not None:
        found |= {"dispatcher": more.dispatcher, "overlap": bool(more.expert_overlap), "routing": more.routing}
        found |= {"async TP": more.async_tp, "compiled": "compile" in row.notes}
    return found
