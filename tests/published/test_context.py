"""Steps with context parallelism by all-to-all that SimuMax measured on a DGX B200, to which nothing is fitted."""

from __future__ import annotations

from statistics import mean

from axonn_tune.cost.price import price
from axonn_tune.validation.published.cases import Case, case_of, measured_s
from axonn_tune.validation.published.rows import SHIPPED, StepRow, read_steps

MEAN_ERROR, WORST_ERROR = 0.03, 0.045
"""Floors, which may only get better."""


def error(row: StepRow) -> float:
    """Of the step of its only layout, by the kernels measured on its system, as its script runs it."""
    case = case_of(row)
    assert isinstance(case, Case), case
    (layout,) = case.configurations
    assert layout.grid.context == row.context
    assert case.framework.step.context_exchange == "all_to_all"
    return price(case, layout).iteration_s / (measured_s(case) or 0.0) - 1.0


def test_published_steps_with_context() -> None:
    """Guards exchanges and attention of long sequences: seven steps of 32,768 and 131,072 tokens, CP 4 and 8."""
    rows = [row for row in read_steps(SHIPPED / "moe_steps.csv") if row.id.startswith("simumax-llama3")]
    errors = {row.id: error(row) for row in rows}
    assert len(errors) == 7
    assert mean(map(abs, errors.values())) < MEAN_ERROR, errors
    assert max(map(abs, errors.values())) < WORST_ERROR, errors
