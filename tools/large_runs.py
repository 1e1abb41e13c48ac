"""AxoNN's large runs beside their predictions: `python -m tools.large_runs` prints the table of docs/paper-claims.md.

The abstract of arXiv 2502.08145 states throughput and GPUs, that of arXiv 2305.13525 the 57% of peak. Neither states a
layout, the first no model size either: the model is then one of the weak-scaling sizes of arXiv 2305.13525, with its
sequences and batch. Predicted is AxoNN's own program, `megatron-axonn`. None of these runs is a row of any fit.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import axonn_tune
from axonn_tune.ranking.compare import paper_step_flops
from axonn_tune.report.output import Column, markdown_table, words
from axonn_tune.specs.catalog import load_machine


@dataclass(frozen=True)
class LargeRun:
    """A run: sustained FLOP/s of all GPUs, as its source counts them; stated: its source names the model's size."""

    name: str
    source: str
    machine: str
    gpus: int
    model: str
    flops_per_s: float
    stated: bool = False


RUNS = (
    LargeRun("57% of peak", "arXiv 2305.13525", "perlmutter", 1024, "80b", 0.57 * 1024 * 312e12, stated=True),
    LargeRun("620.1 PFLOP/s", "arXiv 2502.08145", "perlmutter", 4096, "40b", 620.1e15),
    LargeRun("1.423 EFLOP/s", "arXiv 2502.08145", "alps", 6144, "60b", 1.423e18),
    LargeRun("1.381 EFLOP/s", "arXiv 2502.08145", "frontier", 32768, "320b", 1.381e18),
)


@dataclass(frozen=True)
class Found:
    """A run beside its prediction, s; the interval is that of `search`."""

    run: LargeRun
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float

    @property
    def inside(self) -> bool:
        """Whether the interval holds the measured step."""
        return self.low_s <= self.measured_s <= self.high_s

    @property
    def half(self) -> float:
        """Half of the interval, over the prediction."""
        return (self.high_s - self.low_s) / (2.0 * self.predicted_s)


def find(run: LargeRun, *, framework: str = "megatron-axonn") -> Found:
    """The shortest step of all layouts with full recompute, which both papers' counts include."""
    result = axonn_tune.search(
        run.model, gpus=run.gpus, machine=run.machine, rank_by="step", recompute="full", framework=framework
    )
    problem, best = result.inputs.problem, result.best
    flops = paper_step_flops(problem.model, problem.workload)
    assert flops is not None, run.model
    assert best.iteration_s is not None, run.name
    assert best.low_s is not None, run.name
    assert best.high_s is not None, run.name
    return Found(run, flops / run.flops_per_s, best.iteration_s, best.low_s, best.high_s)


def table() -> str:
    """A line for each run."""
    headings = [words("", name) for name in ("run", "GPUs", "model")]
    names = ("measured, s", "predicted, s", "error", "80% interval, s", "half", "inside", "bundled runtime, s")
    headings += [Column("", name) for name in names]
    return markdown_table(headings, [_cells(find(run)) for run in RUNS])


def _cells(found: Found) -> list[str]:
    run = found.run
    return [
        f"{run.name}, {run.source}",
        f"{run.gpus:,} {load_machine(run.machine).document.accelerator.name}",
        run.model if run.stated else f"not stated; {run.model} taken",
        f"{found.measured_s:.1f}",
        f"{found.predicted_s:.1f}",
        f"{found.predicted_s / found.measured_s - 1.0:+.0%}",
        f"{found.low_s:.1f} to {found.high_s:.1f}",
        f"±{found.half:.0%}",
        "yes" if found.inside else "no",
        f"{find(run, framework='axonn-tune').predicted_s:.1f}",
    ]


def main() -> int:
    """Print the table."""
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
