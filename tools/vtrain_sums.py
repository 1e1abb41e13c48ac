"""How many measurements vTrain's single-node rows are: sums of few layer times, to the last digit.

python -m tools.vtrain_sums    # residuals, layer times, and what two of them do to the ranking
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from axonn_tune.report.output import Column, markdown_table, words
from axonn_tune.validation.published.accuracy import PredictedRow, StepSummary, predict_steps
from axonn_tune.validation.published.rows import SHIPPED, StepRow, read_steps

DATASET = "vtrain_single"
FEWEST = 5
"""Rows of a group: one more than the numbers fitted to it."""

ODD = ((2048, 2, 2), (2048, 4, 2), (1024, 2, 4))
"""Layer times that no law of shapes has, by hidden size, tensor-parallel ranks and micro-batch."""


@dataclass(frozen=True)
class Group:
    """Rows of one hidden size, micro-batch and layout, which differ in layers and in micro-batches alone.

    numbers: measured and predicted time of a layer and micro-batch, of the rest of a micro-batch, of a
    layer and step, of a step, ms; residual: of the measured steps, the largest relative one.
    """

    key: tuple[int, int, int]
    pipeline: int
    data: int
    rows: int
    measured_ms: tuple[float, ...]
    predicted_ms: tuple[float, ...]
    residual: float


def groups(steps: Sequence[PredictedRow]) -> Iterator[Group]:
    """Every group with rows enough to fit `micro-batches · layers · a + micro-batches · b + layers · c + d`."""
    members: dict[tuple[int, ...], list[PredictedRow]] = {}
    for one in steps:
        row = one.row
        if row.dataset == DATASET and one.predicted_s and row.step_s and row.micro_batch:
            key = (row.hidden, row.tensor, row.micro_batch, row.pipeline, row.data)
            members.setdefault(key, []).append(one)
    for (hidden, tensor, micro_batch, pipeline, data), found in sorted(members.items()):
        sums = np.array([_sums(one.row) for one in found])
        if len(found) < FEWEST or np.linalg.matrix_rank(sums) < sums.shape[1]:
            continue
        measured, residual = _fitted(sums, np.array([one.row.step_s for one in found], dtype=float))
        predicted, _ = _fitted(sums, np.array([one.predicted_s for one in found], dtype=float))
        yield Group((hidden, tensor, micro_batch), pipeline, data, len(found), measured, predicted, residual)


def _sums(row: StepRow) -> tuple[float, float, float, float]:
    batches = row.global_batch / row.data / (row.micro_batch or 1)
    layers = row.layers / row.pipeline
    return batches * layers, batches, layers, 1.0


def _fitted(sums: np.ndarray, seconds: np.ndarray) -> tuple[tuple[float, ...], float]:
    """The four numbers in ms, and the largest relative residual."""
    relative = sums / seconds[:, None]
    numbers = np.linalg.lstsq(relative, np.ones(len(seconds)), rcond=None)[0]
    return tuple((1e3 * numbers).tolist()), float(np.max(np.abs(relative @ numbers - 1.0)))


def residuals(found: Sequence[Group]) -> str:
    """How exactly rows are sums."""
    sizes = sorted(group.residual for group in found)
    return (
        f"{sum(group.rows for group in found)} rows in {len(found)} groups of {FEWEST} and more: largest residual of a "
        f"sum {sizes[-1]:.2%}, of half of the groups below {sizes[len(found) // 2]:.3%}."
    )


def layer_times(found: Sequence[Group]) -> str:
    """Measured and predicted, of the first group of each hidden size, tensor-parallel degree and micro-batch."""
    headings = [Column("", "hidden"), Column("", "tensor"), Column("", "micro-batch")]
    headings += [
        Column("", "layer, ms"),
        Column("", "predicted"),
        Column("", "rest of a micro-batch, ms"),
        Column("", "predicted"),
    ]
    rows: dict[tuple[int, int, int], list[str]] = {}
    for one in found:
        cells = [one.measured_ms[0], one.predicted_ms[0], one.measured_ms[1], one.predicted_ms[1]]
        rows.setdefault(one.key, [*map(str, one.key), *(f"{cell:.2f}" for cell in cells)])
    return markdown_table(headings, list(rows.values()))


def cuts(steps: Sequence[PredictedRow]) -> str:
    """How well families are ranked, and how well without some layer times."""
    headings = [words("", "rows"), Column("", "families"), Column("", "Spearman"), Column("", "regret")]
    rows = []
    for cut in ((), *((one,) for one in ODD), ODD):
        kept = StepSummary(tuple(one for one in steps if one.row.dataset == DATASET and _key(one.row) not in cut))
        rows.append([_words(cut), str(len(kept.families)), f"{kept.spearman:.3f}", f"{kept.regret:.1%}"])
    return markdown_table(headings, rows)


def _words(cut: Sequence[tuple[int, int, int]]) -> str:
    if len(cut) == 1:
        hidden, tensor, micro_batch = cut[0]
        return f"without hidden {hidden}, tensor {tensor}, micro-batch {micro_batch}"
    return "without these" if cut else "all layer times"


def _key(row: StepRow) -> tuple[int, int, int]:
    return row.hidden, row.tensor, row.micro_batch or 0


def main() -> int:
    """Print all of it; returns the exit code."""
    steps = predict_steps(row for row in read_steps(SHIPPED / "steps.csv") if row.dataset == DATASET)
    found = list(groups(steps))
    print(residuals(found), layer_times(found), cuts(steps), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
