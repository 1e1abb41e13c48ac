"""Shipped steps as predicted by fits that have not seen their family, or their source: what other rows can expect.

`published/left_out.csv` holds the times; `python -m benchmarks.left_out` fits and writes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Literal, TypeAlias

from axonn_tune.accuracy.records import read_records
from axonn_tune.accuracy.shipped import SHIPPED
from axonn_tune.accuracy.steps import Predicted

LeftOut: TypeAlias = Literal["family", "source"]
"""What a fit has not seen of a row: its model on its number of GPUs, or the whole publication."""

LEFT_OUT: tuple[LeftOut, ...] = ("family", "source")


def without(predictions: Iterable[Predicted], left_out: LeftOut) -> tuple[Predicted, ...]:
    """Predictions with the times of such fits; intervals keep their width. Rows without such a time are left out."""
    times = _times_s(left_out)
    return tuple(_moved(one, times[one.row.id]) for one in predictions if one.row.id in times and one.price is not None)


def _moved(one: Predicted, step_s: float) -> Predicted:
    assert one.price is not None, one.row.id
    share = step_s / one.price.step_s
    low_s, high_s = (None if bound is None else share * bound for bound in (one.low_s, one.high_s))
    return replace(one, price=replace(one.price, step_s=step_s), low_s=low_s, high_s=high_s)


@cache
def _times_s(left_out: LeftOut) -> dict[str, float]:
    column = f"without_{left_out}_s"
    records = read_records(SHIPPED / "left_out.csv", needed=("id", column))
    return {record["id"]: float(record[column]) for _, record in records}
