"""The 80% interval of a predicted step: wider where less is known of machine and software."""

from __future__ import annotations

from axonn_tune.accuracy.cases import Case
from axonn_tune.cost.utilisation import interval_s


def bounds_s(case: Case, *, step_s: float, waiting_s: float) -> tuple[float, float]:
    """Lower and upper bound of a step, s."""
    low_s, high_s = interval_s(step_s - waiting_s, waiting_s, case.machine.uncertainty)
    return float(low_s), float(high_s)
