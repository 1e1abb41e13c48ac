"""Exposed communication of a step, and compute slowdown from overlap."""

from __future__ import annotations

import numpy as np

from axonn_tune.program.size import Value

ROUNDING = 1e-9
"""Waits below this share of a step are rounding errors of sums."""


def exposed_s(iteration_s: Value, compute_s: Value) -> Value:
    """Exposed communication of a step, s; exactly 0 where it is rounding noise."""
    waiting_s = iteration_s - compute_s
    return np.where(waiting_s < ROUNDING * iteration_s, 0.0, waiting_s)


def contended_s(communication_s: Value, compute_s: Value, iteration_s: Value, *, contention: float) -> Value:
    """Compute slowdown from overlap, s: communication and computation share SMs and memory bandwidth.

    It is proportional to the overlapped communication. Source: Galvatron (arXiv 2211.13878); FSDP's steps in
    tools/fit/software.py, where it is fitted.
    """
    if not contention:
        return 0.0
    return lost_s(communication_s - exposed_s(iteration_s, compute_s), compute_s, contention=contention)


def lost_s(hidden_s: Value, compute_s: Value, *, contention: float) -> Value:
    """`contention` times overlapped communication, s, which is at most the computation."""
    return contention * np.minimum(np.maximum(hidden_s, 0.0), compute_s)
