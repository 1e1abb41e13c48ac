"""Steps with context parallelism by all-to-all that SimuMax measured on a DGX B200, to which nothing is fitted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean

from axonn_tune.cost.price import price
from axonn_tune.job import Job
from axonn_tune.validation.published.cases import Case, case_of
from axonn_tune.validation.published.rows import StepRow, read_steps

ROWS = read_steps(Path(__file__).with_name("context_steps.csv"))
MEAN_ERROR, WORST_ERROR = 0.11, 0.12
"""Floors, which may only get better."""


def case(row: StepRow) -> Case:
    """The row by the kernels measured on its system, as its script runs it.

    simu_tools/megatron_scripts/scripts/run_pretrain_llama3.sh: --cp-comm-type a2a, --use-distributed-optimizer without
    --overlap-grad-reduce, 16 query groups in what it calls 405B.
    """
    found = case_of(row)
    assert isinstance(found, Case), found
    overlaps = tuple(one for one in found.workload.overlaps if one != "data_parallel")
    workload = found.workload.model_copy(update={"overlaps": overlaps})
    return replace(found, framework=found.framework.with_step(context_exchange="all_to_all"), workload=workload)


def predicted_s(job: Job, row: StepRow) -> float:
    """The step of its only layout."""
    assert isinstance(job, Case)
    (layout,) = job.configurations
    assert layout.grid.context == row.context
    return price(job, layout).iteration_s


def test_published_steps_with_context() -> None:
    """Guards exchanges and attention of long sequences: seven steps of 32,768 and 131,072 tokens, CP 4 and 8."""
    errors = {row.id: predicted_s(case(row), row) / (row.step_s or 0.0) - 1.0 for row in ROWS}
    assert len(errors) == 7
    assert mean(map(abs, errors.values())) < MEAN_ERROR, errors
    assert max(map(abs, errors.values())) < WORST_ERROR, errors
