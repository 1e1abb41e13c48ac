"""What a step time means: tokens per second, MFU, HFU, and the interval around the prediction.

Which FLOPs MFU and HFU count is said in `program.flops`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from axonn_tune.program.dimensions import model_flops, step_tokens
from axonn_tune.program.size import Value
from axonn_tune.specs.machine import Machine, Uncertainty
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload

ROUNDING = 1e-9
"""Waiting below this share of a step is what rounding leaves of sums made in another order."""


@dataclass(frozen=True)
class Performance:
    """What follows from a predicted step time; `low_s` and `high_s` bound it at 80%."""

    tokens_per_s: float
    low_s: float
    high_s: float
    mfu: float
    hfu: float


def exposed_s(iteration_s: Value, compute_s: Value) -> Value:
    """Time of a step in which nothing is computed, s; exactly 0 where it is rounding noise."""
    waiting_s = iteration_s - compute_s
    return np.where(waiting_s < ROUNDING * iteration_s, 0.0, waiting_s)


def contended_s(communication_s: Value, compute_s: Value, iteration_s: Value, *, contention: float) -> Value:
    """Time that computation loses to communication beside it, s: both use the same multiprocessors and memory.

    Of what is hidden. Source: Galvatron (arXiv 2211.13878); FSDP's steps in tools/fit/software.py, where it is fitted.
    """
    if not contention:
        return 0.0
    return lost_s(communication_s - exposed_s(iteration_s, compute_s), compute_s, contention=contention)


def lost_s(hidden_s: Value, compute_s: Value, *, contention: float) -> Value:
    """`contention` times hidden communication, s; on several tiers at once that counts up to what is computed."""
    return contention * np.minimum(np.maximum(hidden_s, 0.0), compute_s)


def interval_s(compute_s: Value, waiting_s: Value, uncertainty: Uncertainty) -> tuple[Value, Value]:
    """Lower and upper bound of a step time, s: each part less and more its relative half-width."""
    return (
        compute_s * (1.0 - uncertainty.compute) + waiting_s * (1.0 - uncertainty.communication),
        compute_s * (1.0 + uncertainty.compute) + waiting_s * (1.0 + uncertainty.communication),
    )


def performance(
    model: Model,
    machine: Machine,
    workload: Workload,
    *,
    gpus: int,
    compute_s: float,
    iteration_s: float,
    executed_flops: float,
) -> Performance:
    """Performance of one candidate; `executed_flops` are those of one rank."""
    peak = machine.accelerator.peak_flops_per_s(workload.precision)
    low_s, high_s = interval_s(compute_s, exposed_s(iteration_s, compute_s), machine.uncertainty)
    return Performance(
        tokens_per_s=step_tokens(workload) / iteration_s,
        low_s=float(low_s),
        high_s=float(high_s),
        mfu=model_flops(model, workload) / (iteration_s * gpus * peak),
        hfu=executed_flops / (iteration_s * peak),
    )
