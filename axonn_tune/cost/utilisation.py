"""What of a step is exposed communication, and what computation loses to communication beside it."""

from __future__ import annotations

import numpy as np

from axonn_tune.program.size import Value

ROUNDING = 1e-9
"""Waiting below this share of a step is what rounding leaves of sums made in another order."""


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
