"""The fit of software numbers: bounds, and what holds it where rows say nothing."""

from __future__ import annotations

import re

import numpy as np
import pytest

from axonn_tune.specs.catalog import available, load_machine
from axonn_tune.validation.published.accuracy import predict_steps
from tools.fit.published_steps import PublishedSteps
from tools.fit.software import LEAST, Numbers, cases, parameters, shipped, weighted_step


def test_a_step_stays_within_bounds() -> None:
    """Guards physics: however far rows pull, no GEMMs outrun the best published."""
    known = parameters()
    gemms = [at for at, name in enumerate(known.names) if name.endswith(":gemm")]
    slopes = np.zeros((300, len(known.names)))
    slopes[:, gemms] = 1.0
    step = weighted_step(known.expected, np.full(300, 3.0), slopes, np.ones(300))
    assert np.all(known.expected + step >= known.least - 1e-12)
    assert (known.expected + step)[gemms] == pytest.approx(np.log(LEAST["gemm"]))


@pytest.mark.parametrize("name", available("machine"))
def test_numbers_taken_from_another_machine_are_that_machines(name: str) -> None:
    """Guards copies: what is said to be as on another machine follows it when it is fitted again."""
    accelerator = load_machine(name).document.accelerator
    for number in ("training_share", "contention"):
        said = re.match(r"as (dgx-\w+)", accelerator.sources[number].source) if number in accelerator.sources else None
        if said:
            assert getattr(accelerator, number) == getattr(load_machine(said[1]).document.accelerator, number), number


def test_rows_move_the_number_they_depend_on() -> None:
    """Guards the arithmetic: rows that are 10% long in one number's time make it about 10% shorter, and no other."""
    known = parameters()
    position = next(at for at, name in enumerate(known.names) if name.endswith("dispatch_us"))
    slopes = np.zeros((200, len(known.names)))
    slopes[:, position] = 1.0
    step = weighted_step(known.expected, np.full(200, 0.1), slopes, np.ones(200))
    assert step[position] == pytest.approx(-0.1, rel=0.02)
    assert np.delete(step, position) == pytest.approx(0.0)


def test_columns_of_rows_are_what_is_predicted() -> None:
    """Guards the fit: priced as columns, published steps are those of the scalar engine, whatever the framework."""
    some = [case for case in cases() if case.row.dataset != "vtrain_single"][::12]
    numbers = Numbers(shipped())
    found = PublishedSteps(some).step_s([[numbers(case)] for case in some])[:, 0]
    known = {one.row.id: one.predicted_s for one in predict_steps(case.row for case in some)}
    for case, step_s in zip(some, found.tolist(), strict=True):
        assert known[case.row.id] in (None, pytest.approx(step_s, rel=1e-9)), case.row.id
