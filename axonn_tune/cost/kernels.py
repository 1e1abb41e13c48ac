"""Kernels whose time is known from measurements and follows neither FLOPs nor bytes: scans, convolutions, cores of
sparse attention, hyper-connections, compiled SwiGLU.

`kernels.csv` has a row for each kernel, pass and accelerator: how many units of work took how long, with the source. An
operation names its kernel and the units of a call (`program.operations.Measured`); another kernel is rows there.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from axonn_tune.specs.machine import Accelerator


class KernelRow(NamedTuple):
    """A row of the table: on which accelerator, with its peak memory bandwidth, and units of work in a second."""

    accelerator: str
    generation: str
    memory_gb_per_s: float
    units_per_s: float
    kind: str


class KernelRate(NamedTuple):
    """Units of work in a second on an accelerator; kind: measured there, or assumed."""

    units_per_s: float
    kind: str


@cache
def kernel_rows() -> Mapping[tuple[str, bool], tuple[KernelRow, ...]]:
    """The rows of each kernel, forward and backward, in the order of the table."""
    text = files("axonn_tune.cost").joinpath("kernels.csv").read_text(encoding="utf-8")
    found: dict[tuple[str, bool], tuple[KernelRow, ...]] = {}
    for one in csv.DictReader(text.splitlines()):
        key, rate = (one["kernel"], one["pass"] == "backward"), float(one["units"]) / (1e-6 * float(one["time_us"]))
        where = one["accelerator"], one["generation"], float(one["memory_gb_per_s"])
        found[key] = (*found.get(key, ()), KernelRow(*where, rate, one["kind"]))
    return found


def kernel_rate(kernel: str, accelerator: Accelerator, *, backward: bool) -> KernelRate:
    """Rate of a kernel: that of the accelerator, else of its generation; KeyError for a kernel that has no rows.

    Else that of the accelerator whose memory is nearest in bandwidth, less by as much as that is below: these kernels
    did not gain from a faster memory, and are not assumed to.
    """
    rows = kernel_rows()[kernel, backward]
    named = [row for row in rows if accelerator.name.startswith(row.accelerator)]
    alike = [row for row in rows if row.generation == accelerator.generation]
    if own := named or alike:
        return KernelRate(own[0].units_per_s, own[0].kind)
    bandwidth = accelerator.memory_bandwidth_gb_per_s
    nearest = min(rows, key=lambda row: abs(math.log(row.memory_gb_per_s / bandwidth)))
    return KernelRate(nearest.units_per_s * min(1.0, bandwidth / nearest.memory_gb_per_s), "assumed")
