"""Import of Hugging Face configs: what maps, what is left out in words, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axonn_tune.errors import DocumentError
from axonn_tune.specs.hugging_face import model_from_hf_config
from axonn_tune.specs.model import Model

Config = dict[str, object]

GPT2: Config = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
    "n_positions": 1024, "n_ctx": 1024, "vocab_size": 50257, "activation_function": "gelu_new",
}  # fmt: skip
LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 8192, "hidden_act": "silu", "rope_scaling": None, "tie_word_embeddings": False,
    "attention_bias": False, "pretraining_tp": 1,
}  # fmt: skip
MISTRAL: Config = {**LLAMA, "model_type": "mistral", "head_dim": 160, "sliding_window": None}
QWEN2: Config = {
    **LLAMA, "model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 21,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3: Config = {**LLAMA, "model_type": "qwen3", "head_dim": 128, "num_attention_heads": 16, "hidden_size": 1024}


def load(folder: Path, config: Config, *, name: str | None = None) -> Model:
    """Import a config given as a mapping."""
    path = folder / "config.json"
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    return model_from_hf_config(path, name=name)


def problems(folder: Path, config: Config) -> dict[str, str]:
    """What is refused in a config, by key; every one of them with its line."""
    with pytest.raises(DocumentError) as caught:
        load(folder, config)
    lines = json.dumps(config, indent=2).splitlines()
    for problem in caught.value.problems:
        assert problem.line is None or f'"{problem.path}"' in lines[problem.line - 1]
    return {problem.path: problem.message for problem in caught.value.problems}


def test_llama_equals_the_shipped_model(tmp_path: Path) -> None:
    """Guards the Llama mapping by the count of parameters, 8,030,261,248."""
    model = load(tmp_path, LLAMA)
    assert (model.family, model.kv_heads, model.head_dim, model.parameters) == ("llama", 8, 128, 8_030_261_248)
    assert model.name == tmp_path.name
    assert model.description == "LlamaForCausalLM, imported"


def test_the_workload_is_an_assumption_and_says_so(tmp_path: Path) -> None:
    """Guards against a guessed batch passing for the model's own: 4 Mi tokens in sequences of at most 8,192."""
    model = load(tmp_path, {**LLAMA, "max_position_embeddings": 131072})
    assert (model.defaults.sequence_length, model.defaults.global_batch) == (8192, 512)
    assert model.source == "Hugging Face config.json; assumed: batch, sequence length"
    given = model_from_hf_config(tmp_path, global_batch=7, sequence_length=16)
    assert (given.defaults.global_batch, given.defaults.sequence_length) == (7, 16)
    assert given.source == "Hugging Face config.json"


NEOX: Config = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_size": 6144, "num_hidden_layers": 44,
    "num_attention_heads": 64, "intermediate_size": 24576, "max_position_embeddings": 2048, "vocab_size": 50432,
    "hidden_act": "gelu_fast", "layer_norm_eps": 1e-5, "rotary_pct": 0.25, "rotary_emb_base": 10000,
}  # fmt: skip
FALCON: Config = {
    "architectures": ["FalconForCausalLM"], "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32,
    "num_attention_heads": 71, "vocab_size": 65024, "bias": False, "multi_query": True, "parallel_attn": True,
    "alibi": False, "new_decoder_architecture": False, "layer_norm_epsilon": 1e-5,
}  # fmt: skip
GEMMA: Config = {
    "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "intermediate_size": 24576,
    "max_position_embeddings": 8192, "vocab_size": 256000, "hidden_act": "gelu", "rms_norm_eps": 1e-6,
}  # fmt: skip
OLMO2: Config = {
    "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "intermediate_size": 11008, "max_position_embeddings": 4096, "vocab_size": 100352,
    "hidden_act": "silu", "rope_theta": 500000, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
PHI: Config = {
    "architectures": ["PhiForCausalLM"], "model_type": "phi", "hidden_size": 2560, "num_hidden_layers": 32,
    "num_attention_heads": 32, "intermediate_size": 10240, "max_position_embeddings": 2048, "vocab_size": 51200,
    "hidden_act": "gelu_new", "partial_rotary_factor": 0.4, "tie_word_embeddings": False, "qk_layernorm": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "published", "others", "left_out"),
    [
        # The table of positions that the model does not have.
        (NEOX, 20_554_567_680, 2048 * 6144, ("rotary positions", "attention and MLP in parallel")),
        # The same, and a second LayerNorm in each block.
        (FALCON, 6_921_720_704, 2048 * 4544 + 32 * 2 * 4544, ("attention and MLP in parallel",)),
        (GEMMA, 8_537_680_896, 0, ("its activation (gelu, here SiLU)",)),
        # Without the norms of queries and keys.
        (OLMO2, 7_298_617_344, -32 * 2 * 4096, ("norms of queries and keys", "norms after attention and MLP")),
        # The table, a second LayerNorm, and no bias of the LM head.
        (PHI, 2_779_683_840, 2048 * 2560 + 32 * 2 * 2560 - 51200, ("rotary positions", "the bias of the LM head")),
    ],
)
def test_blocks_that_price_the_same_are_imported(
    tmp_path: Path, config: Config, published: int, others: int, left_out: tuple[str, ...]
) -> None:
    """Guards models with other norms, positions, biases or residuals: their published size but for what is named."""
    model = load(tmp_path, config)
    assert model.parameters == published + others
    assert all(words in model.description for words in left_out)


def test_what_no_cost_depends_on_is_kept_for_scripts(tmp_path: Path) -> None:
    """Guards rotary base, norm epsilon and biases of queries, keys and values, of files old and new."""
    model = load(tmp_path, {**QWEN2, "rope_theta": 1e6, "rms_norm_eps": 1e-6})
    assert (model.rotary_base, model.norm_epsilon, model.qkv_biases) == (1e6, 1e-6, True)
    newer = load(tmp_path, {**LLAMA, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}})
    assert (newer.rotary_base, newer.norm_epsilon, newer.qkv_biases) == (5e5, None, None)
    assert load(tmp_path, {**LLAMA, "rope_theta": "big"}).rotary_base is None
    with pytest.raises(DocumentError, match=r"rms_norm_eps: 1000.*is not a number from"):
        load(tmp_path, {**LLAMA, "rms_norm_eps": 10**400})
    assert load(tmp_path, NEOX).norm_epsilon == 1e-5


@pytest.mark.parametrize(
    ("config", "left_out", "biases"),
    [
        (QWEN2, "biases of queries, keys and values", False),
        (QWEN3, "norms of queries and keys", False),
        ({**LLAMA, "attention_bias": True}, "biases of the attention layers", False),
        ({**LLAMA, "mlp_bias": True}, "biases of the MLP layers", False),
        ({**LLAMA, "attention_bias": True, "mlp_bias": True}, "", True),
        ({**LLAMA, "rope_scaling": {"factor": 8.0}}, "scaling of rotary positions", False),
        ({**LLAMA, "rope_parameters": {"rope_type": "yarn"}}, "scaling of rotary positions", False),
        ({**LLAMA, "rope_parameters": {"rope_type": "default"}}, "", False),
        ({**LLAMA, "hidden_act": "gelu"}, "its activation (gelu, here SiLU)", False),
        ({**GPT2, "activation_function": "relu"}, "its activation (relu, here GELU)", True),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantisation", False),
    ],
)
def test_what_hardly_costs_is_left_out_in_words(tmp_path: Path, config: Config, left_out: str, biases: bool) -> None:
    """Guards honesty: an approximation is named in the description, an exact mapping has none."""
    model = load(tmp_path, config)
    assert model.biases is biases
    assert (f"left out: {left_out}" in model.description) if left_out else ("left out" not in model.description)


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({**LLAMA, "num_local_experts": 8}, {"num_local_experts": "a mixture of experts is not supported"}),
        ({**LLAMA, "kv_lora_rank": 512}, {"kv_lora_rank": "multi-head latent attention is not supported"}),
        ({**MISTRAL, "sliding_window": 4096}, {"sliding_window": "attention over a window of 4096 tokens"}),
        ({**LLAMA, "model_type": "mistral"}, {"sliding_window": "missing, which means a window of 4096 tokens"}),
        ({**QWEN2, "use_sliding_window": True}, {"sliding_window": "attention over a window of 4096 tokens"}),
        ({**LLAMA, "layer_types": ["full_attention", "linear_attention"]}, {"layer_types": "linear_attention"}),
        ({**GPT2, "add_cross_attention": True}, {"add_cross_attention": "cross-attention is not supported"}),
        ({**GPT2, "n_head": 7}, {"n_embd": "768 is not divisible by n_head (7)"}),
        (
            {**LLAMA, "hidden_size": "4096", "num_hidden_layers": 0},
            {"hidden_size": "not '4096'", "num_hidden_layers": "not 0"},
        ),
        ({**LLAMA, "tie_word_embeddings": "no"}, {"tie_word_embeddings": "must be true or false"}),
        ({**LLAMA, "num_key_value_heads": 7}, {"": "heads (32) must be divisible by kv_heads (7)"}),
        ({"model_type": "llama"}, {"hidden_size": "missing", "vocab_size": "missing", "intermediate_size": "missing"}),
    ],
)
def test_what_cannot_be_modelled_is_refused(tmp_path: Path, config: Config, refused: dict[str, str]) -> None:
    """Guards against a price for a model that is not the one given; all reasons at once, with lines."""
    found = problems(tmp_path, config)
    assert {key: words for key, words in refused.items() if words not in found.get(key, "")} == {}


def test_unknown_types_are_refused_with_their_parts(tmp_path: Path) -> None:
    """Guards the message for other architectures: the type, the nearest known one, and what else stands in the way."""
    found = problems(tmp_path, {"model_type": "mixtral", "num_local_experts": 8})
    assert "'mixtral' is not supported, did you mean 'mistral'?" in found["model_type"]
    assert found["num_local_experts"] == "a mixture of experts is not supported"
    assert "not a Hugging Face model config" in problems(tmp_path, {"hidden_size": 3})[""]
