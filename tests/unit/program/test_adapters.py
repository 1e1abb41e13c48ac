"""Adapters: their parameters as published, and what of a step trains, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from axonn_tune.program.count import adapter_parameters
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.tuning import tools, tuning


def _adapters(model: Any, mode: Any, tool: str, rank: int, *targets: str) -> int:
    return adapter_parameters(model.tuned(tuning(mode, tool, rank=rank, targets=targets or None, dtype=None)))


LLAMA_3B = {"layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 8, "head_dim": 128, "ffn": 8192, "vocab": 128256}
"""Llama 3.2 3B."""


@pytest.mark.parametrize(
    ("rank", "targets", "mode", "published"),
    [
        (32, ("q_proj", "v_proj"), "lora", 9_175_040),
        (64, ("q_proj", "v_proj"), "lora", 18_350_080),
        (10, ("gate_proj", "up_proj", "down_proj"), "lora", 9_461_760),
    ],
)
def test_parameters_are_those_published(rank: int, targets: tuple[str, ...], mode: str, published: int) -> None:
    """Guards parts of fused layers: counts of huggingface/peft@5d602fdb, method_comparison/MetaMathQA/results."""
    model = load_model("llama3-8b").document.model_copy(update=LLAMA_3B)
    assert _adapters(model, mode, "peft", rank, *targets) == published


@pytest.mark.parametrize(
    ("targets", "each"),
    [
        (("linear_qkv",), 8192 + 10240),
        (("linear_qkv", "linear_proj"), 8192 + 10240 + 2 * 8192),
        (("linear_q", "linear_k", "linear_v"), 3 * 8192 + 10240),
        ((), 8192 + 10240 + 2 * 8192 + 8192 + 2 * 28672 + 28672 + 8192),
    ],
)
def test_fused_projections_have_one_adapter(targets: tuple[str, ...], each: int) -> None:
    """Guards Megatron-Bridge's names: r(H + Q + 2kv) of the fused layer, 3rH + r(Q + 2kv) of its parts apart."""
    model = load_model("llama3-70b").document
    assert _adapters(model, "lora", "megatron-bridge", 16, *targets) == 16 * 80 * each


def test_every_name_adapts_a_layer() -> None:
    """Guards the table of names: each has layers, and defaults are names."""
    for tool in tools().values():
        assert all(tool.names.values())
        assert {*tool.targets} <= {*tool.names}
