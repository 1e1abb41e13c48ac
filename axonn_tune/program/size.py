"""Symbolic sizes: products and quotients of named quantities, such as `2·H·N/(x·y)`.

Array sizes, byte counts and call counts of a step are such sizes. A size is a value that can be
compared and used as a key; evaluated with numbers it is exact as long as the products stay below
2^53, with numpy columns it gives one value per candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from axonn_tune.grid import ALL_AXES, AXES

Value: TypeAlias = float | NDArray[np.float64]
"""A quantity of one candidate, or of many: one float64 each."""


@dataclass(frozen=True)
class Arithmetic:
    """Formulas evaluated on columns of candidates (numpy) or on one candidate (plain Python).

    Formulas use `+ - * /` and these functions, all of which IEEE 754 defines exactly, so both readings give the
    same bits.
    """

    smaller: Callable[[Any, Any], Any]
    larger: Callable[[Any, Any], Any]
    floor: Callable[[Any], Any]


COLUMNS = Arithmetic(smaller=np.minimum, larger=np.maximum, floor=np.floor)
PLAIN = Arithmetic(smaller=min, larger=max, floor=lambda value: float(math.floor(value)))

MODEL_SYMBOLS = ("L", "H", "Q", "N", "F", "G", "W", "S", "grouped", "halved")
"""Constants of one search: layers, hidden, query, qkv, ffn and up widths, weights of a block, sequence length.

grouped, halved: 1 where keys have several queries each, and where micro-batches are split, else 0.
"""

CANDIDATE_SYMBOLS = (
    *AXES,
    *("b", "A", "C", "parts", "kept", "unkept", "V", "P"),
    *("block_bucket", "table_bucket", "position_bucket", "parameters", "vectors"),
    *(axis for axis in ALL_AXES if axis not in AXES),
    *("scores", "scores_back", "softmax", "softmax_back", "alone", "shared", "held"),
)
"""What differs between candidates.

b: micro-batch (sequences of one rank); A: accumulation steps; C: chunks of the loss; parts: halves of a split
micro-batch; kept, unkept: layers not resharded after forward, and the others; V, P: padded rows
of the vocabulary and position tables; *_bucket: elements of one data-parallel bucket; parameters, vectors: elements
of split and of replicated parameters one rank stores; alone, shared: 1 where a rank has the whole hidden dim and where
y splits it, else 0.
"""

_ORDER = {name: position for position, name in enumerate((*MODEL_SYMBOLS, *CANDIDATE_SYMBOLS))}


@dataclass(frozen=True)
class Size:
    """`coefficient · Π symbol^power`; powers sorted by the canonical order of symbols, none zero."""

    coefficient: float
    powers: tuple[tuple[str, int], ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.coefficient, self.powers))

    def __mul__(self, other: Size | float) -> Size:
        return self._combine(as_size(other), sign=1)

    __rmul__ = __mul__

    def __truediv__(self, other: Size | float) -> Size:
        return self._combine(as_size(other), sign=-1)

    def _combine(self, other: Size, *, sign: int) -> Size:
        coefficient = self.coefficient * other.coefficient if sign > 0 else self.coefficient / other.coefficient
        if not other.powers:
            return Size(coefficient, self.powers)
        powers = dict(self.powers)
        for name, power in other.powers:
            powers[name] = powers.get(name, 0) + sign * power
        ordered = sorted(((name, power) for name, power in powers.items() if power), key=lambda item: _ORDER[item[0]])
        return Size(coefficient, tuple(ordered))

    @cached_property
    def _numerator(self) -> tuple[str, ...]:
        return tuple(name for name, power in self.powers for _ in range(power))

    @cached_property
    def _denominator(self) -> tuple[str, ...]:
        return tuple(name for name, power in self.powers for _ in range(-power))

    def evaluate(self, values: Mapping[str, Value]) -> Value:
        """Value for given symbols: the left fold of the numerator, then of the denominator.

        Both folds run in the canonical order, so numbers and columns give the same bits.
        """
        result: Value = self.coefficient
        for name in self._numerator:
            result = result * values[name]
        if not self._denominator:
            return result
        divisor: Value = 1.0
        for name in self._denominator:
            divisor = divisor * values[name]
        return result / divisor

    def __str__(self) -> str:
        number = f"{self.coefficient:.12g}"
        factors = [name if power == 1 else f"{name}^{power}" for name, power in self.powers if power > 0]
        if self.coefficient != 1 or not factors:
            factors.insert(0, number)
        under = [name if power == -1 else f"{name}^{-power}" for name, power in self.powers if power < 0]
        above = "·".join(factors)
        return above if not under else f"{above}/{under[0]}" if len(under) == 1 else f"{above}/({'·'.join(under)})"


def as_size(value: Size | float) -> Size:
    """A number as a size; a size as it is."""
    return value if isinstance(value, Size) else Size(float(value))


def symbol(name: str) -> Size:
    """A single named quantity; KeyError for a name outside the canonical list."""
    _ORDER[name]
    return Size(1.0, ((name, 1),))
