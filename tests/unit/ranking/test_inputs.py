"""Options of a search that change the step of its framework."""

from __future__ import annotations

from typing import Any

import pytest

from axonn_tune.frameworks import find_framework
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.request import Request

AWARE = {"use_precision_aware_optimizer": "bf16"}


@pytest.mark.parametrize(
    ("asked", "step"),
    [
        ({"grad_reduce_in_bf16": True}, {"gradient_bytes": 2, "shard_gradient_bytes": 2}),
        (AWARE, {"master_bytes": 2, "exp_avg_bytes": 2, "exp_avg_sq_bytes": 2}),
        ({**AWARE, "precision": "fp16"}, {"master_bytes": None, "exp_avg_bytes": 2, "exp_avg_sq_bytes": 2}),
        ({"use_precision_aware_optimizer": True}, {"master_bytes": 2, "exp_avg_bytes": 4, "exp_avg_sq_bytes": 4}),
        ({"cuda_graphs": True}, {"cuda_graphs": ("full",)}),
        ({"cuda_graphs": ("mlp", "attn")}, {"cuda_graphs": ("attn", "mlp")}),
    ],
)
def test_options_are_those_of_the_step(asked: dict[str, Any], step: dict[str, object]) -> None:
    """Guards types and CUDA graphs: an option is what Megatron-Core's step has, nothing else of it changes."""
    problem = load_inputs(Request("llama3-8b", gpus=8, framework="megatron-core", **asked)).problem
    assert problem.framework.step == find_framework("megatron-core").with_step(**step).step
    assert ("full" in problem.request.recomputes) == ("cuda_graphs" not in asked), "which captured layers exclude"
