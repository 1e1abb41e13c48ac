"""MFU, HFU and intervals, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from axonn_tune.cost.utilisation import exposed_s, interval_s, performance
from axonn_tune.program.dimensions import model_flops
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.machine import Uncertainty
from axonn_tune.specs.workload import Workload

WORKLOAD = Workload(global_batch=8192, sequence_length=2048)


def test_model_flops_of_the_papers_80b() -> None:
    """Guards the convention: 72·B·S·L·H²·(1 + S/(6H) + V/(12·L·H)), the usual form of the same count, for a GPT."""
    b, s, layers, h, v = 8192, 2048, 42, 12288, 51200
    known = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model_flops(load_model("80b").document, WORKLOAD) == pytest.approx(known, rel=1e-12)


def test_interval_widens_each_part_by_its_own_share() -> None:
    """Guards the interval: computing and waiting have half-widths of their own."""
    fact = {"kind": "fitted", "source": "test"}
    uncertainty = Uncertainty.model_validate(
        {"communication": 0.2, "compute": 0.1, "sources": {"communication": fact, "compute": fact}}
    )
    assert interval_s(10.0, 5.0, uncertainty) == pytest.approx((9.0 + 4.0, 11.0 + 6.0))


def test_performance_by_hand() -> None:
    """Guards units: tokens per second of all GPUs; MFU of all, HFU of one."""
    model, machine = load_model("80b").document, load_machine("perlmutter").document
    found = performance(
        model, machine, WORKLOAD, gpus=1024, compute_s=30.0, iteration_s=40.0, executed_flops=312e12 * 20.0
    )
    assert found.tokens_per_s == 8192 * 2048 / 40.0
    assert found.mfu == pytest.approx(model_flops(model, WORKLOAD) / (40.0 * 1024 * 312e12))
    assert found.hfu == pytest.approx(0.5)
    assert found.low_s < 40.0 < found.high_s


def test_rounding_is_no_waiting() -> None:
    """Guards exposed time: noise of either sign is exactly 0, the rest untouched, columns and numbers alike."""
    compute_s = 0.8984894338285713
    steps_s = [0.8984894338285716, compute_s, compute_s - 1e-16, compute_s + 1e-6, 2.0]
    expected = [0.0, 0.0, 0.0, steps_s[3] - compute_s, 2.0 - compute_s]
    assert [float(exposed_s(step_s, compute_s)) for step_s in steps_s] == expected
    column = np.asarray(exposed_s(np.array(steps_s), np.full(5, compute_s)))
    assert column.tolist() == expected
    assert not np.signbit(column).any()
