"""Finding documents by name or path, and the documents that are shipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from axonn_tune.program.count import active_parameters, parameters
from axonn_tune.specs.catalog import available, find, load_model

MACHINE = Path(__file__).parent / "data" / "twotier.yaml"

# Parameters in billions as published: the names of the AxoNN paper's models round them, its 10B and
# 640B the furthest; GPT-3 in Narayanan et al. 2021, table 1; Llama 3 on the model cards. With experts:
# Mixtral 46.7 and 141 (mistral.ai), Qwen3 30.5 and 235, GPT-OSS 20.91 and 116.83 (model cards),
# DeepSeek-V2 236 (arXiv 2405.04434), -V3 671 without multi-token prediction (arXiv 2412.19437), V3.2 671 and
# GLM-5 744, Gemma 3 1, 4, 12 and 27, OLMo 3 7 and 32, GLM-4 9 and 32, MiniMax-M2.5 230, Step 3.7 196, MiMo-V2 309,
# DeepSeek-V4 Flash 284 and Pro 1,573, with its MTP layer 1,599
# (names of their checkpoints and model cards, to more digits by sizes), Kimi K2
# 1,040 (arXiv 2507.20534), Moonlight 16 (arXiv 2502.16982), Llama 4 Scout 109 with its vision tower,
# GLM-4.5 355 with multi-token prediction, without embedding and head (arXiv 2508.06471, table 1), Nemotron 3
# 31.6 and 120.6 (model cards), Super with two prediction layers of 2.94 here. GPT-2, Llama 2, Qwen2.5, Qwen3 and
# DeepSeek-V2-Lite: sums of the tensors of the released checkpoints; 14.77 of Qwen2.5 with its biases. Without vision
# tower and prediction layer (2H^2, a full layer, five norms) Qwen3.5 9B 8,953,803,264 (huggingface/transformers issue
# 48692), its others and Qwen3-Next as their names; Kimi Linear 48, LFM2 0.35, 0.74, 1.17 and 8.3 as
# theirs, Ling mini 16.26 (1.43 a token), others of 2025 and 2026 as their names, but for Ling flash (100) and ERNIE
# (21).
PUBLISHED = {
    "5b": (5, 0.05),
    "10b": (10, 0.05),
    "20b": (20, 0.05),
    "40b": (40, 0.05),
    "60b": (60, 0.05),
    "80b": (80, 0.05),
    "160b": (160, 0.05),
    "320b": (320, 0.05),
    "640b": (640, 0.05),
    "gpt3-175b": (174.6, 0.001),
    "gpt2-1.5b": (1.5576, 0.0005),
    "llama2-7b": (6.738, 0.0001),
    "llama2-70b": (68.98, 0.0001),
    "qwen2.5-14b": (14.77, 0.0005),
    "qwen3-8b": (8.19, 0.0005),
    "qwen3-32b": (32.76, 0.0005),
    "deepseek-v2-lite": (15.71, 0.001),
    "llama3-8b": (8.03, 0.001),
    "llama3-70b": (70.55, 0.001),
    "llama3-405b": (405.85, 0.001),
    "mixtral-8x7b": (46.7, 0.001),
    "mixtral-8x22b": (140.6, 0.001),
    "qwen3-30b-a3b": (30.53, 0.001),
    "qwen3-235b-a22b": (235.09, 0.001),
    "deepseek-v2": (235.74, 0.001),
    "deepseek-v3": (682.64, 0.001),
    "moonlight-16b-a3b": (15.96, 0.001),
    "kimi-k2": (1026.4, 0.001),
    "gpt-oss-20b": (20.91, 0.0005),
    "gpt-oss-120b": (116.83, 0.0005),
    "llama4-scout": (107.77, 0.001),
    "nemotron-3-nano-30b-a3b": (31.58, 0.001),
    "nemotron-3-super-120b-a12b": (120.67 + 2 * 2.941, 0.001),
    "deepseek-v3.2": (671.88 + 11.62, 0.0005),
    "glm-5": (743.91 + 9.95, 0.0005),
    "glm-5.2": (743.38 + 9.95, 0.0005),
    "qwen3-next-80b-a3b": (79.674, 0.0001),
    "qwen3.5-9b": (8.953803264 + 0.243290624, 1e-6),
    **dict.fromkeys(("qwen3.5-27b", "qwen3.6-27b", "qwen3.8-27b"), (26.896 + 0.4247, 0.0001)),
    **dict.fromkeys(("qwen3.5-35b-a3b", "qwen3.6-35b-a3b"), (34.661 + 0.8444, 0.0001)),
    "qwen3.5-122b-a10b": (122.1115 + 2.5237, 0.0001),
    "qwen3.5-397b-a17b": (396.346 + 6.5956, 0.0001),
    "olmo-hybrid-7b": (7.431, 0.0001),
    "deepseek-v4-flash": (284.332 + 6.61, 0.0005),
    "deepseek-v4-pro": (1598.8, 0.0005),
    "gemma-3-1b": (1.000, 0.001),
    "gemma-3-4b": (3.880, 0.001),
    "gemma-3-12b": (11.766, 0.001),
    "gemma-3-27b": (27.009, 0.001),
    "gemma-4-31b": (30.697, 0.0005),
    "gemma-4-26b-a4b": (25.233, 0.0005),
    "command-a-111b": (111.06, 0.001),
    "olmo-3-7b": (7.298, 0.001),
    "olmo-3-32b": (32.234, 0.001),
    "glm-4-9b": (9.400, 0.001),
    "glm-4-32b": (32.566, 0.001),
    "minimax-m2.5": (228.69, 0.001),
    "step-3.7-flash": (196.956, 0.001),
    "mimo-v2-flash": (308.78, 0.001),
    "ling-mini-2.0": (16.256, 0.0001),
    "ling-flash-2.0": (102.89, 0.0001),
    "ling-1t": (999.705, 0.0001),
    "hunyuan-a13b": (80.393, 0.0001),
    "hy3": (295.034, 0.0001),
    "ernie-4.5-21b-a3b": (21.825, 0.0001),
    "ernie-4.5-300b-a47b": (299.484, 0.0001),
    "mistral-small-4-119b": (118.973, 0.0001),
    "mistral-large-3": (673.421, 0.0001),
    "nemotron-3-ultra-550b-a55b": (549.309, 0.0001),
    "llama4-maverick": (400.712, 0.0001),
    "apertus-8b": (8.0533, 0.0001),
    "apertus-70b": (70.5999, 0.0001),
    "kimi-linear-48b-a3b": (49.123, 0.0001),
    "lfm2-350m": (0.354483968, 1e-9),
    "lfm2-700m": (0.742489344, 1e-9),
    "lfm2-1.2b": (1.170340608, 1e-9),
    "lfm2-8b-a1b": (8.34, 0.0001),
    "glm-45": (355.2 + 2 * 151_552 * 5120 / 1e9, 0.001),
}
# Parameters that a token meets, in billions: the model cards' 37, 21, 32 and 17; of Qwen3 3.3 and 22, of
# GPT-OSS 3.61 and 5.13 (without the token embedding), of Qwen3.5 17 and 10 without it (16.3, 9.0), of Mixtral 12.9 and
# 39, of Nemotron 3 3.6 and 12.7.
ACTIVE = {
    "deepseek-v3": (37.55, 1),
    "deepseek-v3.2": (37.48 + 129_280 * 7168 / 1e9, 1),
    "glm-5": (40.83 + 154_880 * 6144 / 1e9, 1),
    "glm-5.2": (40.30 + 154_880 * 6144 / 1e9, 1),
    "deepseek-v4-flash": (13.27 + 129_280 * 4096 / 1e9, 1),
    "deepseek-v4-pro": (48.85 + 129_280 * 7168 / 1e9, 1),
    "minimax-m2.5": (10.42 + 200_064 * 3072 / 1e9, 0),
    "gemma-4-26b-a4b": (3.823, 0),
    "step-3.7-flash": (11.46 + 128_896 * 4096 / 1e9, 0),
    "mimo-v2-flash": (14.82 + 152_576 * 4096 / 1e9, 0),
    "deepseek-v2": (21.4, 0),
    "deepseek-v2-lite": (2.66, 0),
    "kimi-k2": (32.86, 0),
    "llama4-scout": (17.17, 0),
    "qwen3-30b-a3b": (3.35, 0),
    "qwen3-235b-a22b": (22.19, 0),
    "gpt-oss-20b": (3.61 + 201_088 * 2880 / 1e9, 0),
    "gpt-oss-120b": (5.13 + 201_088 * 2880 / 1e9, 0),
    "nemotron-3-nano-30b-a3b": (3.58, 0),
    "nemotron-3-super-120b-a12b": (12.75, 1),
    "qwen3-next-80b-a3b": (3.875, 0),
    "qwen3.5-35b-a3b": (3.455, 1),
    "ling-mini-2.0": (1.433, 0),
    "ling-flash-2.0": (6.152, 0),
    "ling-1t": (51.05, 0),
    "hunyuan-a13b": (12.747, 0),
    "hy3": (20.676, 0),
    "ernie-4.5-21b-a3b": (3.352, 0),
    "ernie-4.5-300b-a47b": (47.927, 0),
    "mistral-small-4-119b": (6.633, 0),
    "mistral-large-3": (39.947, 0),
    "nemotron-3-ultra-550b-a55b": (56.059, 0),
    "llama4-maverick": (17.185, 0),
    "kimi-linear-48b-a3b": (3.485, 0),
    "lfm2-8b-a1b": (1.558, 0),
    "qwen3.5-122b-a10b": (9.771, 1),
    "qwen3.5-397b-a17b": (17.349, 1),
    "mixtral-8x7b": (12.88, 0),
    "mixtral-8x22b": (39.15, 0),
}
SMALL = ("nano", "nano-16", "nano-llama", "nano-moe", "nano-delta", "mini")


@pytest.fixture(autouse=True)
def no_user_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the tester's own models and machines out."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("AXONN_TUNE_PATH", raising=False)


def place(folder: Path, name: str) -> Path:
    """A copy of the test machine in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(MACHINE.read_text(encoding="utf-8"), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_models_have_the_published_size(name: str) -> None:
    """Guards a slip in any size: the count of parameters would move."""
    billions, tolerance = PUBLISHED[name]
    assert parameters(load_model(name).document) / 1e9 == pytest.approx(billions, rel=tolerance)


@pytest.mark.parametrize("name", ACTIVE)
def test_shipped_models_have_the_published_active_size(name: str) -> None:
    """Guards experts a token and shared experts, without multi-token prediction where 1 stands."""
    billions, predicting = ACTIVE[name]
    model = load_model(name, overrides=["mtp_layers=0"] if predicting else []).document
    assert active_parameters(model) / 1e9 == pytest.approx(billions, rel=0.003)


@pytest.mark.parametrize(
    ("name", "billions"), [("deepseek-v3", 671.03), ("nemotron-3-super-120b-a12b", 120.67), ("qwen3.5-9b", 8.953803264)]
)
def test_sums_that_are_published_without_multi_token_prediction(name: str, billions: float) -> None:
    """Guards the parameters of three models to five digits."""
    model = load_model(name, overrides=["mtp_layers=0"]).document
    assert parameters(model) / 1e9 == pytest.approx(billions, rel=2e-5)


@pytest.mark.parametrize(
    ("spelt", "name"),
    [("meta-llama/Llama-3.3-70B-Instruct", "llama3-70b"), ("Qwen3_30B_A3B", "qwen3-30b-a3b"), ("GPT2-XL", "gpt2-1.5b")],
)
def test_models_as_users_write_them(spelt: str, name: str) -> None:
    """Guards names of the Hugging Face hub, of recipes and of papers."""
    assert load_model(spelt).document.name == name


@pytest.mark.parametrize("name", SMALL)
def test_small_models_divide_by_every_small_grid(name: str) -> None:
    """Guards the demo and the runtime's tests: these train on all grids of 2, 3, 4, 6 and 8 ranks."""
    model = load_model(name).document
    sizes = (model.hidden, model.heads, model.kv_heads, model.ffn, model.defaults.global_batch)
    assert all(size % ranks == 0 for size in sizes for ranks in (2, 3, 4, 6, 8))
    assert model.defaults.sequence_length <= model.max_sequence_length


def test_no_shipped_model_is_untested() -> None:
    """Guards the two tests above: a new model has to join one."""
    assert set(available("model")) == {*PUBLISHED, *SMALL}


def test_user_folders_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the order: $AXONN_TUNE_PATH, then the configuration folder, then what is shipped."""
    shipped = find("machine", "perlmutter")
    user = place(tmp_path / "xdg" / "axonn-tune" / "machines", "Perlmutter.yml")
    assert find("machine", "perlmutter") == user
    first = place(tmp_path / "a" / "machines", "perlmutter.yaml")
    monkeypatch.setenv("AXONN_TUNE_PATH", f"{tmp_path / 'none'}:{tmp_path / 'a'}")
    assert find("machine", "PERLMUTTER") == first
    assert available("machine")["perlmutter"] == first
    assert find("machine", "perlmutter", besides=first) == user
    assert shipped not in available("machine").values()
