"""Symbolic sizes: algebra, evaluation, display."""

import numpy as np
import pytest

from axonn_tune.program.operations import Size, as_size, symbol


def test_products_and_quotients_cancel() -> None:
    """Guards that equal sizes are equal keys, however they were written."""
    x, y, hidden = symbol("x"), symbol("y"), symbol("H")
    assert 2.0 * hidden / x * y / y == hidden * 2.0 / x
    assert x / x == as_size(1)
    assert len({hidden / (x * y), hidden / y / x}) == 1


def test_numbers_and_columns_give_the_same_bits() -> None:
    """Guards the twin: one candidate and a column are evaluated in the same order."""
    size = 2.0 * symbol("H") * symbol("N") / (symbol("x") * symbol("y"))
    columns = {"H": 12288.0, "N": 36864.0, "x": np.array([3.0, 7.0]), "y": np.array([5.0, 11.0])}
    for row in range(2):
        single = {name: value if isinstance(value, float) else float(value[row]) for name, value in columns.items()}
        assert size.evaluate(single) == np.asarray(size.evaluate(columns))[row]


def test_display() -> None:
    """Guards the formulas that `explain` prints."""
    assert str(2.0 * symbol("H") * symbol("N") / (symbol("x") * symbol("y"))) == "2·H·N/(x·y)"
    assert str(symbol("b") * symbol("b") / symbol("z")) == "b^2/z"
    assert str(as_size(16)) == "16"
    assert str(Size(1.0)) == "1"


def test_unknown_symbols_are_refused() -> None:
    """Guards against a typo that would only surface when priced."""
    with pytest.raises(KeyError):
        symbol("width")
