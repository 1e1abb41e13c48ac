"""The fit of software prices published rows by arrays of numbers: it must price them as every command does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from axonn_tune.validation.published.accuracy import Accuracy
from tools.fit.published_steps import PublishedSteps
from tools.fit.software import Numbers, parameters, shipped, touches

EVERY = 60
"""Of so many rows one is looked at."""
MOVED = 0.9


def test_a_fit_prices_rows_as_commands_do(accuracy: Accuracy) -> None:
    """Guards the fit against a cost model that has moved since it was last run: numbers would be fitted to others'."""
    rows = [one for one in accuracy.steps if one.error is not None and one.case and one.configuration][::EVERY]
    cases = [replace(one.case, configurations=(one.configuration,)) for one in rows if one.case and one.configuration]
    assert len({case.framework.software for case in cases}) >= 4
    numbers = Numbers(shipped())
    moved = [next(at for at, name in enumerate(parameters().names) if touches(name, case)) for case in cases]
    found = PublishedSteps(cases).step_s(
        [[numbers(case), numbers(case, at)] for case, at in zip(cases, moved, strict=True)]
    )
    assert found[:, 0] == pytest.approx(np.array([one.predicted_s for one in rows]), rel=1e-9)
    assert np.mean(found[:, 1] != found[:, 0]) >= MOVED, "a number that moves changes the step"
