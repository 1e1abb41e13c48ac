"""All published measurements against their predictions: those shipped, or those of given files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from axonn_tune.accuracy.collectives import judge_collectives
from axonn_tune.accuracy.judged import Judged
from axonn_tune.accuracy.left_out import LEFT_OUT, LeftOut, without
from axonn_tune.accuracy.memory import judge_memory
from axonn_tune.accuracy.products import judge_products
from axonn_tune.accuracy.rows import read_steps
from axonn_tune.accuracy.shipped import SHIPPED
from axonn_tune.accuracy.steps import Predicted, predict_steps
from axonn_tune.accuracy.summary import StepSummary, summarize_steps


@dataclass(frozen=True)
class Files:
    """Files to judge by; all None: those shipped."""

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

    steps: tuple[Predicted, ...]
    summary: StepSummary
    collectives: tuple[Judged, ...]
    products: tuple[Judged, ...]
    memory: tuple[Judged, ...]
    without: Mapping[LeftOut, StepSummary] = field(default_factory=dict)


def judge(files: Files, *, worst: int) -> Accuracy:
    """Predict everything; errors as `rows.read_steps`. `worst`: how many of the worst steps the summary lists."""
    chosen = files.or_shipped()
    steps = () if chosen.steps is None else predict_steps(read_steps(chosen.steps))
    own = chosen.steps == SHIPPED / "steps.csv"
    return Accuracy(
        steps=steps,
        summary=summarize_steps(steps, worst=worst),
        without={kind: summarize_steps(without(steps, kind), worst=0) for kind in LEFT_OUT} if own else {},
        collectives=() if chosen.collectives is None else judge_collectives(chosen.collectives),
        products=() if chosen.gemm is None else judge_products(chosen.gemm),
        memory=() if chosen.memory is None else judge_memory(chosen.memory),
    )
