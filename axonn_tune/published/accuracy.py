"""All published measurements against their predictions: those shipped, or those of given files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from axonn_tune.published.measurements import Evaluation, evaluate_collectives, evaluate_gemms, evaluate_memory
from axonn_tune.published.quality import StepSummary, summarize_steps
from axonn_tune.published.rows import SHIPPED, read_steps
from axonn_tune.published.steps import LEFT_OUT, LeftOut, PredictedStep, predict_steps, without


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

    without: steps by fits that have not seen a row's family, or its source; of the shipped rows alone.
    """

    steps: tuple[PredictedStep, ...]
    summary: StepSummary
    collectives: tuple[Evaluation, ...]
    gemms: tuple[Evaluation, ...]
    memory: tuple[Evaluation, ...]
    without: Mapping[LeftOut, StepSummary] = field(default_factory=dict)


def evaluate(files: Files, *, worst: int) -> Accuracy:
    """Predict everything; errors as `rows.read_steps`. `worst`: how many of the worst steps the summary lists."""
    chosen = files.or_shipped()
    steps = () if chosen.steps is None else predict_steps(read_steps(chosen.steps))
    own = chosen.steps == SHIPPED / "steps.csv"
    return Accuracy(
        steps=steps,
        summary=summarize_steps(steps, worst=worst),
        without={kind: summarize_steps(without(steps, kind), worst=0) for kind in LEFT_OUT} if own else {},
        collectives=() if chosen.collectives is None else evaluate_collectives(chosen.collectives),
        gemms=() if chosen.gemm is None else evaluate_gemms(chosen.gemm),
        memory=() if chosen.memory is None else evaluate_memory(chosen.memory),
    )
