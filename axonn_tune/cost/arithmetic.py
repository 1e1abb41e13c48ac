"""One formula, two readings: on columns of candidates (numpy) and on one candidate (plain Python).

Formulas use `+ - * /` and the three functions of an `Arithmetic`, all of which IEEE 754 defines
exactly, so both readings give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Column: TypeAlias = float | NDArray[np.float64]
"""A quantity of one candidate, or of many: one float64 each."""


@dataclass(frozen=True)
class Arithmetic:
    """The functions formulas may use beyond the four operations."""

    smaller: Callable[[Any, Any], Any]
    larger: Callable[[Any, Any], Any]
    floor: Callable[[Any], Any]


COLUMNS = Arithmetic(smaller=np.minimum, larger=np.maximum, floor=np.floor)
PLAIN = Arithmetic(smaller=min, larger=max, floor=lambda value: float(math.floor(value)))
