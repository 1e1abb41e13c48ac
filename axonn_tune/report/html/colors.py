"""Colours by meaning, as variables of `style.css`, `--name` or `--name/opacity`; the same in every figure."""

from __future__ import annotations

from axonn_tune.cost.breakdown import ATTENTION, CONTENDED, ELEMENT_WISE, MATRIX_PRODUCTS, OPTIMIZER

COMPUTATION, TEXT = "--compute", "--text"
ACCENT, MUTED, LIMIT, WAIT, RING = "--accent", "--muted", "--limit", "--wait", "--ring"
PREDICTED, MEASURED = "--predicted", "--measured"
BY_KIND = {
    MATRIX_PRODUCTS: "--compute",
    ATTENTION: "--compute-2",
    ELEMENT_WISE: "--compute-3",
    OPTIMIZER: "--compute-4",
    CONTENDED: "--compute/0.35",
}
SERIES = tuple(f"--series-{number}" for number in range(1, 9))
_STRENGTH = {"all_gather": 1.0, "reduce_scatter": 0.72, "all_reduce": 0.45}
_AXES = {"x": "--axis-x", "y": "--axis-y", "z": "--axis-z", "data": "--axis-data"}


def term_color(op: str, axis: str) -> str:
    """The colour of an axis, one for all groups over several; the collectives of an axis differ in strength."""
    return f"{_AXES.get(axis, '--axis-several')}/{_STRENGTH.get(op, 1.0)}"


def series_color(number: int) -> str:
    """The colour of one of several lines."""
    return SERIES[number % len(SERIES)]
