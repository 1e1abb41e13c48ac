"""The 80% interval of a predicted step: as wide as errors of rows that no fit had seen, by how much is known.

Widths are in `published/intervals.csv`: of software that was in the fit, from fits without the row's
family; of other software and of accelerators without a measured step, from fits without the row's source.
"""

from __future__ import annotations

import math
from functools import cache

from axonn_tune.accuracy.cases import Case
from axonn_tune.accuracy.frameworks import UNKNOWN
from axonn_tune.accuracy.records import read_records
from axonn_tune.accuracy.shipped import SHIPPED

_FITTED_CHIPS = ("a100", "h100", "gb200")
"""Accelerators with measured steps enough to know how theirs turn out."""


def bounds_s(case: Case, *, step_s: float) -> tuple[float, float]:
    """Lower and upper bound of a step, s."""
    factor = math.exp(width(case))
    return step_s / factor, step_s * factor


def width(case: Case) -> float:
    """Half-width of the interval of log(step)."""
    known = widths()
    own = known.get(case.framework.kernels, known[UNKNOWN]) if case.framework.known else known[UNKNOWN]
    chip = any(name in case.row.gpu.lower() for name in _FITTED_CHIPS)
    return own if chip else max(own, known[UNKNOWN])


@cache
def widths() -> dict[str, float]:
    """Half-widths by software."""
    records = read_records(SHIPPED / "intervals.csv", needed=("software", "width"))
    return {record["software"]: float(record["width"]) for _, record in records}
