"""What each framework's own log prints: its count of FLOPs, by hand and against published pairs."""

from __future__ import annotations

import pytest

from axonn_tune.frameworks import find_framework
from axonn_tune.grid import Grid
from axonn_tune.program.count import active_parameters
from axonn_tune.program.dimensions import logged_flops, model_flops
from axonn_tune.program.lengths import own_tokens, sequences_of
from axonn_tune.recompute import RECOMPUTES
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.lengths import read_lengths
from axonn_tune.specs.tuning import Tuning
from axonn_tune.specs.workload import Recompute, Workload


def counted(
    name: str,
    model: str,
    *,
    seq: int,
    batch: int = 1,
    tensor: int = 1,
    recompute: Recompute = "none",
    overrides: tuple[str, ...] = (),
) -> float:
    """FLOPs of one step by a framework's log."""
    workload, grid = Workload(global_batch=batch, sequence_length=seq), Grid(x=tensor, y=1, z=1, data=1)
    framework, loaded = find_framework(name), load_model(model, overrides=overrides).document
    found = logged_flops(framework, loaded, workload, grid=grid, recompute=recompute)
    assert found is not None
    return found


SEVENTY = 80 * (8192 * (8192 + 2 * 8 * 128) + 8192 * 8192 + 3 * 8192 * 28672)
GPT3 = 96 * (12288 * 3 * 12288 + 12288 * 12288 + 2 * 12288 * 49152)


@pytest.mark.parametrize(
    ("name", "model", "seq", "tensor", "per_token"),
    [
        # 6 FLOPs a weight, 6·Q·S a layer for the causal half; 128,256 rows are padded to a multiple of 1,024.
        ("megatron-core", "llama3-70b", 8192, 8, 6 * (SEVENTY + 129_024 * 8192) + 6 * 80 * 8192 * 8192),
        ("megatron-core", "gpt3-175b", 2048, 8, 6 * (GPT3 + 51_200 * 12288) + 6 * 96 * 12288 * 2048),
        # 6 · (parameters - embedding) + 6 · layers · heads · (128 + 128) · S.
        ("torchtitan", "llama3-8b", 8192, 1, 6 * (8_030_261_248 - 128_256 * 4096) + 6 * 32 * 2 * 4096 * 8192),
        ("torchtitan", "llama3-70b", 8192, 1, 6 * (70_553_706_496 - 128_256 * 8192) + 6 * 80 * 2 * 8192 * 8192),
    ],
)
def test_counts_by_hand(name: str, model: str, seq: int, tensor: int, per_token: int) -> None:
    """Guards the counters of two logs, in which recompute is never counted."""
    for batch, recompute in ((1, "none"), (3, "full")):
        found = counted(name, model, seq=seq, batch=batch, tensor=tensor, recompute=recompute)
        assert found == batch * seq * per_token


def test_lora_has_the_rule_of_its_log() -> None:
    """Guards Megatron-Bridge's rule of LoRA: 4 FLOPs a weight and token, all scores of each sample, where it holds; its
    published TFLOP/s are 278.1 to 279.1 GFLOP a token of the packs (NVIDIA-NeMo/Megatron-Bridge@067f987d,
    docs/performance-summary-archive.md)."""
    framework, model = find_framework("megatron-core"), load_model("llama3-70b").document
    lora, grid = Tuning(mode="lora", rank=16, targets=("attention.qkv",)), Grid(x=1, y=1, z=1, data=1)
    packs = Workload(global_batch=32, sequence_length=4096, tuning=lora, lengths=read_lengths("squad", "packed"))

    def of(workload: Workload) -> float:
        return logged_flops(framework, model, workload, grid=grid, recompute="none") or 0.0

    squares = sum(number * length**2 for length, number in sequences_of(packs))
    weights = SEVENTY + 128_256 * 8192
    assert of(packs) == pytest.approx(4 * weights * own_tokens(packs) + 12 * 80 * 8192 * squares, rel=1e-12)
    assert 278.1e9 <= of(packs) / (32 * 4096) <= 279.1e9
    # Of other lengths and modes, all weights as if they trained.
    for other in ({"lengths": None}, {"tuning": lora.model_copy(update={"mode": "dora"})}):
        whole = packs.model_copy(update={"tuning": None, "lengths": None})
        assert of(packs.model_copy(update=other)) == of(whole)


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
    assert counted(name, model, seq=seq, batch=batch) / (step_s * gpus * 1e12) == pytest.approx(tflops, rel=0.01)


@pytest.mark.parametrize(
    ("model", "overrides", "batch", "gpus", "step_s", "tflops"),
    [
        # yanring/Megatron-MoE-ModelZoo@e8650517, best practices: Qwen3 235B on 256 H100.
        ("qwen3-235b-a22b", (), 2048, 256, 17.6, 276),
        # NVIDIA-NeMo/Megatron-Bridge@067f987d, model cards on H100. GPT-OSS ran with a vocabulary of 32,768.
        ("qwen3-30b-a3b", (), 1024, 16, 20.14729, 299.352),
        ("moonlight-16b-a3b", (), 1024, 16, 11.63635, 386.59),
        ("gpt-oss-20b", ("vocab=32768",), 512, 16, 22.40088, 117.01),
        ("gpt-oss-120b", ("vocab=32768",), 512, 64, 512 * 4096 / 64 / 1966.285, 58.42),
        # NVIDIA/Megatron-LM, arXiv 2603.07685, table 11: DeepSeek-V3 on 256 GB300, 4,730 tokens/s a GPU.
        ("deepseek-v3", (), 8192, 256, 8192 * 4096 / 256 / 4730, 1233),
        # NVIDIA-NeMo/Automodel@36044ad3:docs/performance-summary.mdx, without multi-token prediction.
        ("deepseek-v3", ("mtp_layers=0",), 512, 256, 8.18, 250),
        ("kimi-k2", (), 512, 256, 8.86, 189),
    ],
)
def test_published_pairs_of_models_with_experts(
    model: str, overrides: tuple[str, ...], batch: int, gpus: int, step_s: float, tflops: float
) -> None:
    """Guards experts, latent attention, windows and multi-token prediction in Megatron's count, at 4,096 tokens."""
    found = counted("megatron-core", model, seq=4096, batch=batch, overrides=overrides)
    assert found / (step_s * gpus * 1e12) == pytest.approx(tflops, rel=0.01)


@pytest.mark.parametrize(
    ("model", "overrides", "seq", "batch", "gpus", "step_s", "tflops"),
    [
        # NVIDIA-NeMo/Megatron-Bridge@067f987d, on H100: recompute of Nemotron 3 Nano, the model card of Super.
        ("nemotron-3-nano-30b-a3b", (), 8192, 16, 16, 0.65742, 277.72),
        ("nemotron-3-super-120b-a12b", (), 4096, 1280, 64, 27.58858, 248.61),
        # NVIDIA-NeMo/Automodel@36044ad3:docs/performance-summary.mdx, without multi-token prediction.
        ("nemotron-3-super-120b-a12b", ("mtp_layers=0",), 4096, 512, 64, 7.286, 334),
    ],
)
def test_published_pairs_of_hybrids(
    model: str, overrides: tuple[str, ...], seq: int, batch: int, gpus: int, step_s: float, tflops: float
) -> None:
    """Guards Mamba-2 in Megatron's count (its inner width, and the scan), and prediction layers of two types."""
    found = counted("megatron-core", model, seq=seq, batch=batch, overrides=overrides)
    assert found / (step_s * gpus * 1e12) == pytest.approx(tflops, rel=0.015)


@pytest.mark.parametrize(
    ("model", "overrides", "giga"),
    [
        ("qwen3-235b-a22b", (), 148.03),
        ("qwen3-30b-a3b", (), 23.006),
        ("deepseek-v3", (), 259.99),
        ("deepseek-v3", ("mtp_layers=0",), 249.81),
        # NVIDIA-NeMo/Megatron-Bridge@067f987d, model card: 102.52 TFLOP/s at 337.189 tokens/s a GPU.
        ("glm-5.2", (), 304.043),
        # The same, of Megatron-Bridge: 706 TFLOP/s at 7,776 tokens/s a GPU, and by its function.
        ("deepseek-v4-flash", (), 90.781),
        # The same repository's gdn_layer_flops; its card of Qwen3.8 27B has 167.95 with the vision tower.
        ("qwen3.8-27b", (), 167.393),
    ],
)
def test_flops_of_a_token_of_models_with_experts(model: str, overrides: tuple[str, ...], giga: float) -> None:
    """What Megatron-LM's function returns for a token at 4,096, in GFLOP."""
    assert counted("megatron-core", model, seq=4096, overrides=overrides) / 4096e9 == pytest.approx(giga, rel=1e-4)


def test_flops_of_a_token_of_sparse_attention_where_it_sees_all() -> None:
    """Guards shared indexers, at 2,048 tokens: 54.595 TFLOP/s at 190.926 tokens/s (the same card, on H100)."""
    assert counted("megatron-core", "glm-5.2", seq=2048) / 2048e9 == pytest.approx(54_595 / 190.926, rel=1e-4)


def test_torchtitan_counts_a_tokens_experts_and_no_windows() -> None:
    """6 · (active parameters - embedding) + 6 · attention layers · heads · (qk + v) · S."""
    for name, layers, width in (("gpt-oss-20b", 24, 64 * 128), ("kimi-k2", 61, 64 * (192 + 128))):
        loaded = load_model(name).document
        active = active_parameters(loaded) - loaded.vocab * loaded.hidden
        assert counted("torchtitan", name, seq=4096) == 4096 * (6 * active + 6 * layers * width * 4096)


def test_mfu_of_mixed_models_has_a_tokens_experts_and_full_attention() -> None:
    """By hand: GPT-OSS, whose windows and biases MFU does not see, and whose router it does."""
    model = load_model("gpt-oss-20b").document
    layer = 2880 * (64 + 8 + 8) * 64 + 64 * 64 * 2880 + 2880 * 32 + 4 * 3 * 2880 * 2880
    weights, workload = 2 * (24 * layer + 201_088 * 2880), Workload(global_batch=1, sequence_length=4096)
    assert model_flops(model, workload) == 3 * 4096 * (weights + 4 * 4096 * 24 * 64 * 64)
    # Unmasked: 1 to 4,096 keys of a query in half of the layers, 1 to 128 in the others.
    keys = 12 * (sum(range(1, 4097)) + sum(min(query, 128) for query in range(1, 4097))) / 4096
    assert model_flops(model, workload, masked=False) == pytest.approx(3 * 4096 * (weights + 4 * 64 * 64 * keys))


def test_logs_without_layer_types_print_nothing_for_them() -> None:
    """AxoNN's and Megatron-DeepSpeed's formulas are of one block."""
    for name in ("megatron-axonn", "megatron-deepspeed"):
        arguments = (
            find_framework(name),
            load_model("mixtral-8x7b").document,
            Workload(global_batch=1, sequence_length=64),
        )
        assert logged_flops(*arguments, grid=Grid(x=2, y=1, z=1, data=1), recompute="none") is None


def test_counts_of_a_gpt() -> None:
    """AxoNN's is Narayanan's equation 3 in any case; Megatron-DeepSpeed's has a fourth pass with full recompute; the
    others are MFU's but for the masked half, the padding, and vectors as weights.
    """
    layers, hidden, rows, tokens = 96, 12288, 51_200, 2048
    expected = 96 * tokens * layers * hidden**2 * (1 + tokens / (6 * hidden) + rows / (16 * layers * hidden))
    for recompute in RECOMPUTES:
        found = counted("megatron-axonn", "gpt3-175b", seq=tokens, recompute=recompute)
        assert found == pytest.approx(expected, rel=1e-12)
    reference = model_flops(load_model("gpt3-175b").document, Workload(global_batch=1, sequence_length=tokens))
    full = counted("megatron-deepspeed", "gpt3-175b", seq=tokens, recompute="full")
    masked = 6.0 * layers * hidden * tokens * tokens
    plain = {name: counted(name, "gpt3-175b", seq=tokens) for name in ("nemo", *WEIGHTS_AND_VECTORS, "megatron-core")}
    assert full == pytest.approx(plain["megatron-deepspeed"] * 4 / 3, rel=1e-12)
    assert plain["nemo"] == reference
    assert [plain[name] for name in WEIGHTS_AND_VECTORS] == pytest.approx([reference] * 3, rel=1e-3)
    assert plain["megatron-core"] == pytest.approx(reference - masked, rel=1e-4)


WEIGHTS_AND_VECTORS = ("torchtitan", "fsdp", "megatron-deepspeed")
