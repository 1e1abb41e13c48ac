"""`axonn_tune.regress`: predicted and measured times against a recorded baseline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.loading import load_document
from axonn_tune.specs.results import Baseline, Floors, Measurements, Tolerances
from axonn_tune.validation.regression import Regression, check

if TYPE_CHECKING:
    from axonn_tune.specs.catalog import MachineLike


def regress(
    baseline: str | Path | Baseline,
    *,
    measurement: str | Path | Measurements | None = None,
    machine: MachineLike | None = None,
    tolerances: Tolerances | None = None,
    floors: Floors | None = None,
) -> Regression:
    """Compare predictions, and measured times if there are any, with a baseline, as `axonn-tune regress` does.

    measurement: what a validation wrote. machine: predict for this profile instead of the baseline's own.
    tolerances, floors: instead of the baseline's own. What fails is in `.failures`; nothing is raised for it.
    """
    return check(
        baseline if isinstance(baseline, Baseline) else load_document(baseline, schema=Baseline),
        machine=None if machine is None else load_machine(machine).document,
        measurements=load_document(measurement, schema=Measurements)
        if isinstance(measurement, str | Path)
        else measurement,
        tolerances=tolerances,
        floors=floors,
    )
