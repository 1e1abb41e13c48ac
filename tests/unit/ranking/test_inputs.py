"""Options of a search that change the step of its framework."""

from __future__ import annotations

import json
from typing import Any

import pytest

from axonn_tune.errors import UsageError
from axonn_tune.frameworks import find_framework
from axonn_tune.ranking.documents import inputs_of
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.report.commands import explain_command
from axonn_tune.report.ranking import document_head
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
    tried = {variant.recompute for variant in problem.variants}
    assert ("full" in tried) == ("cuda_graphs" not in asked), "which captured layers exclude"


def test_a_document_of_results_has_the_options_of_its_step() -> None:
    """Guards pages of results: details are priced again, and explained, with the types and graphs of the search."""
    asked: dict[str, Any] = {
        "use_precision_aware_optimizer": "fp8",
        "cuda_graphs": ("attn", "mlp"),
        "recompute": "none",
    }
    inputs = load_inputs(Request("llama3-8b", gpus=8, framework="megatron-core", **asked))
    document = json.loads(json.dumps(document_head("axonn-tune/ranking/1", inputs)))
    again = inputs_of(document, source="results.json")
    assert again.problem.framework.step == inputs.problem.framework.step
    words = " ".join(explain_command(again))
    assert "--set step.exp_avg_bytes=1" in words
    assert "--set step.cuda_graphs=attn,mlp" in words
    plain = load_inputs(Request("llama3-8b", gpus=8, framework="megatron-core"))
    assert "step" not in document_head("axonn-tune/ranking/1", plain)


def test_a_framework_with_fused_attention_is_refused_where_there_is_none() -> None:
    """Guards Python's `with_step(fused_attention=True)`: before Ampere Megatron-LM writes all scores, and it was
    overridden without a word."""
    fused = find_framework("megatron-2022").with_step(fused_attention=True)
    asked: dict[str, Any] = {"framework": fused, "set": ("workload.precision=fp16",)}
    with pytest.raises(UsageError, match=r"fused_attention=True: Megatron-LM \(2022\) writes all scores on V100"):
        load_inputs(Request("llama3-8b", 8, machine="dgx1-v100", **asked))
    assert load_inputs(Request("llama3-8b", 8, machine="dgx-h100", **asked)).problem.framework.step.fused_attention
