"""What each framework's own log prints: its count of FLOPs, by hand and against published pairs."""

from __future__ import annotations

import pytest

from axonn_tune.frameworks import find_framework
from axonn_tune.grid import Grid
from axonn_tune.program.dimensions import logged_flops, model_flops
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Recompute, Workload


def counted(
    name: str, model: Model, *, seq: int, batch: int = 1, tensor: int = 1, recompute: Recompute = "none"
) -> float:
    """FLOPs of one step by a framework's log."""
    workload = Workload(schema="axonn-tune/workload/1", global_batch=batch, sequence_length=seq)
    grid = Grid(x=tensor, y=1, z=1, data=1)
    found = logged_flops(find_framework(name), model, workload, grid=grid, recompute=recompute)
    assert found is not None
    return found


def test_megatron_counts_half_of_attention_and_the_padded_vocabulary() -> None:
    """Its counter by hand for two models: per token 6 FLOPs a weight, 6·Q·S a layer for the causal half."""
    seventy = 80 * (8192 * (8192 + 2 * 8 * 128) + 8192 * 8192 + 3 * 8192 * 28672)
    # 128,256 rows are padded to a multiple of 128 · TP = 1,024.
    per_token = 6 * (seventy + 129_024 * 8192) + 6 * 80 * 8192 * 8192
    assert counted("megatron-core", load_model("llama3-70b").document, seq=8192, tensor=8) == 8192 * per_token
    gpt3 = 96 * (12288 * 3 * 12288 + 12288 * 12288 + 2 * 12288 * 49152)
    per_token = 6 * (gpt3 + 51_200 * 12288) + 6 * 96 * 12288 * 2048
    model = load_model("gpt3-175b").document
    assert counted("megatron-core", model, seq=2048, batch=3, tensor=8) == 3 * 2048 * per_token
    # Recompute is never counted.
    assert counted("megatron-core", model, seq=2048, batch=3, tensor=8, recompute="full") == 3 * 2048 * per_token


@pytest.mark.parametrize(
    ("name", "parameters", "layers", "query"),
    [("llama3-8b", 8_030_261_248, 32, 4096), ("llama3-70b", 70_553_706_496, 80, 8192)],
)
def test_torchtitan_counts_all_of_attention_and_every_parameter_but_the_embedding(
    name: str, parameters: int, layers: int, query: int
) -> None:
    """Its counter by hand: 6 · (parameters − embedding) + 6 · layers · heads · (128 + 128) · S per token."""
    per_token = 6 * (parameters - 128_256 * query) + 6 * layers * 2 * query * 8192
    assert counted("torchtitan", load_model(name).document, seq=8192) == 8192 * per_token


@pytest.mark.parametrize(
    ("name", "model", "seq", "batch", "gpus", "step_s", "tflops"),
    [
        # NVIDIA/dgxc-benchmarking, expected performance of NeMo on H100.
        ("nemo", "llama3-70b", 8192, 128, 64, 14.98, 526.0),
        ("nemo", "gpt3-175b", 2048, 1024, 512, 8.42, 522.6),
        ("nemo", "llama3-405b", 8192, 256, 512, 19.78, 548.5),
        # NVIDIA-NeMo/Automodel@36044ad3:docs/performance-summary.mdx, whose count is Megatron's: 866.77 tokens/s a GPU.
        ("megatron-core", "llama3-70b", 8192, 1, 1, 8192 / 866.77, 389.0),
    ],
)
def test_published_pairs_of_step_and_tflops(
    name: str, model: str, seq: int, batch: int, gpus: int, step_s: float, tflops: float
) -> None:
    """A published step gives the TFLOP/s that the same source printed, within 1%."""
    flops = counted(name, load_model(model).document, seq=seq, batch=batch)
    assert flops / (step_s * gpus * 1e12) == pytest.approx(tflops, rel=0.01)


def test_counts_with_recompute() -> None:
    """AxoNN's is Narayanan's equation 3 in any case; Megatron-DeepSpeed's has a fourth pass with full recompute."""
    model = load_model("gpt3-175b").document
    layers, hidden, rows, tokens = 96, 12288, 51_200, 2048
    expected = 96 * tokens * layers * hidden**2 * (1 + tokens / (6 * hidden) + rows / (16 * layers * hidden))
    for recompute in ("none", "full"):
        found = counted("megatron-axonn", model, seq=tokens, recompute=recompute)
        assert found == pytest.approx(expected, rel=1e-12)
    passes = [counted("megatron-deepspeed", model, seq=2048, recompute=one) for one in ("none", "full")]
    assert passes[1] == pytest.approx(passes[0] * 4 / 3, rel=1e-12)


def test_models_without_groups_are_counted_alike() -> None:
    """On a GPT block every count is MFU's but for the masked half, the padding, and vectors as weights."""
    model = load_model("gpt3-175b").document
    workload = Workload(schema="axonn-tune/workload/1", global_batch=1, sequence_length=2048)
    reference = model_flops(model, workload)
    assert counted("nemo", model, seq=2048) == reference
    for name in ("torchtitan", "fsdp", "megatron-deepspeed"):
        assert counted(name, model, seq=2048) == pytest.approx(reference, rel=1e-3)
    masked = 6.0 * 96 * 12288 * 2048 * 2048
    assert counted("megatron-core", model, seq=2048) == pytest.approx(reference - masked, rel=1e-4)
