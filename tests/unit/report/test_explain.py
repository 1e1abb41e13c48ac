"""Where an explanation counts memory of experts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from axonn_tune.cost.price import Detail
from axonn_tune.ranking.choosing import run_search
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.report.explain import MEMORY_GROUPS, stage_rows
from axonn_tune.request import Request


def _explained(precision: str | None = None) -> Detail:
    """Mixtral 8x7B on two nodes of 8: TP 2, DP 8; experts by ETP 2, EP 4, and two replicas."""
    axes = {"x": 2, "z": 1, "context": 1, "pipeline": 1, "expert": 4, "expert_tensor": 2}
    request = Request("mixtral-8x7b", gpus=16, machine="dgx-h200", framework="megatron-core", micro_batch=1, **axes)
    return run_search(load_inputs(replace(request, precision=precision)).problem).detail(0)


@pytest.mark.parametrize("precision", [None, "fp8-current"])
def test_memory_of_experts_is_with_that_of_other_weights(precision: str | None) -> None:
    """Experts of a rank are 8/4/2 of 3·4096·14336 in each of 32 layers: their FP32 gradients are no temporaries."""
    priced = _explained(precision)
    (row,) = stage_rows(priced)
    elements = 32 * 3 * 4096 * 14336
    assert elements * 4 < row["gradients"] < elements * 5
    assert row["weights"] > elements * (2 if precision is None else 3)
    # Master weights and two moments in FP32, over two expert replicas.
    assert elements * 6 < row["optimizer states"] < elements * 7
    assert sum(row[group] for group in MEMORY_GROUPS) == pytest.approx(row["total"])
    assert row["temporaries"] < elements
