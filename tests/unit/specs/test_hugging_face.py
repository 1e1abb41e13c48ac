"""Import of Hugging Face configs: what maps, what is left out in words, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axonn_tune.errors import DocumentError
from axonn_tune.program.count import parameters
from axonn_tune.specs.catalog import load_model
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

MIXTRAL: Config = {
    **LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
    "sliding_window": None, "max_position_embeddings": 32768,
}  # fmt: skip
QWEN3_MOE: Config = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "head_dim": 128,
    "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
    "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "sliding_window": None, "use_sliding_window": False,
    "tie_word_embeddings": False, "vocab_size": 151936,
}  # fmt: skip
QWEN2_MOE: Config = {
    "model_type": "qwen2_moe", "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21, "moe_intermediate_size": 1408,
    "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 16, "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
    "use_sliding_window": False, "tie_word_embeddings": False, "vocab_size": 151936,
}  # fmt: skip
_MLA: Config = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "moe_layer_freq": 1, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
DEEPSEEK_V2: Config = {
    **_MLA, "model_type": "deepseek_v2", "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_hidden_layers": 60, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 160,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "n_group": 8, "topk_group": 3,
    "topk_method": "group_limited_greedy", "norm_topk_prob": False, "routed_scaling_factor": 16.0, "vocab_size": 102400,
    "max_position_embeddings": 163840,
}  # fmt: skip
DEEPSEEK_V3: Config = {
    **_MLA, "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
    "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "num_nextn_predict_layers": 1, "vocab_size": 129280, "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
DEEPSEEK_V32: Config = {
    **DEEPSEEK_V3, "model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
}  # fmt: skip
GLM_52: Config = {
    **_MLA, "model_type": "glm_moe_dsa", "hidden_size": 6144, "intermediate_size": 12288, "q_lora_rank": 2048,
    "moe_intermediate_size": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "num_hidden_layers": 78,
    "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "num_nextn_predict_layers": 1, "vocab_size": 154880,
    "max_position_embeddings": 1048576, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
    "index_topk_freq": 4, "index_skip_topk_offset": 3,
}  # fmt: skip
DEEPSEEK_V4: Config = {
    "model_type": "deepseek_v4", "hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 43,
    "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 1024, "o_lora_rank": 1024,
    "o_groups": 8, "sliding_window": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "hc_mult": 4,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 6, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0, "num_hash_layers": 3, "num_nextn_predict_layers": 1, "vocab_size": 129280,
    "max_position_embeddings": 1048576, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
KIMI_K2: Config = {
    **DEEPSEEK_V3, "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0, "vocab_size": 163840,
}  # fmt: skip
GPT_OSS: Config = {
    "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12, "num_hidden_layers": 24,
    "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4, "num_key_value_heads": 8,
    "num_local_experts": 32, "sliding_window": 128, "tie_word_embeddings": False, "vocab_size": 201088,
}  # fmt: skip
LLAMA4_TEXT: Config = {
    "model_type": "llama4_text", "attention_chunk_size": 8192, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 5120, "interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "max_position_embeddings": 262144, "no_rope_layers": [], "num_attention_heads": 40, "num_experts_per_tok": 1,
    "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16, "use_qk_norm": True,
    "vocab_size": 202048,
}  # fmt: skip
LLAMA4: Config = {"model_type": "llama4", "text_config": LLAMA4_TEXT, "vision_config": {"hidden_size": 1408}}
GLM: Config = {
    "model_type": "glm4_moe", "attention_bias": True, "first_k_dense_replace": 3, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 5120, "intermediate_size": 12288, "max_position_embeddings": 131072, "moe_intermediate_size": 1536,
    "n_group": 1, "topk_group": 1, "n_routed_experts": 160, "n_shared_experts": 1, "num_attention_heads": 96,
    "num_experts_per_tok": 8, "num_hidden_layers": 92, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5, "routed_scaling_factor": 2.5, "use_qk_norm": True, "vocab_size": 151552,
}  # fmt: skip

NEMOTRON: Config = {
    "model_type": "nemotron_h", "attention_bias": False, "chunk_size": 128, "conv_kernel": 4, "head_dim": 128,
    "hidden_size": 2688, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856, "mamba_head_dim": 64, "mamba_num_heads": 64, "max_position_embeddings": 262144,
    "mlp_bias": False, "mlp_hidden_act": "relu2", "moe_intermediate_size": 1856, "n_group": 1, "n_groups": 8,
    "moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52,
    "num_key_value_heads": 2, "routed_scaling_factor": 2.5, "ssm_state_size": 128, "tie_word_embeddings": False,
    "topk_group": 1, "vocab_size": 131072,
}  # fmt: skip


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
        assert problem.line is None or f'"{problem.path.rpartition(".")[2]}"' in lines[problem.line - 1]
    return {problem.path: problem.message for problem in caught.value.problems}


def test_llama_equals_the_shipped_model(tmp_path: Path) -> None:
    """Guards the Llama mapping by the count of parameters, 8,030,261,248."""
    model = load(tmp_path, LLAMA)
    assert (model.family, model.kv_heads, model.head_dim, parameters(model)) == ("llama", 8, 128, 8_030_261_248)
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
        (OLMO2, 7_298_617_344, 0, ()),
        # The table, and no bias of the LM head.
        (PHI, 2_779_683_840, 2048 * 2560 - 51200, ("rotary positions", "the bias of the LM head")),
    ],
)
def test_blocks_that_price_the_same_are_imported(
    tmp_path: Path, config: Config, published: int, others: int, left_out: tuple[str, ...]
) -> None:
    """Guards models with other norms, positions, biases or residuals: their published size but for what is named."""
    model = load(tmp_path, config)
    assert parameters(model) == published + others
    assert all(words in model.description for words in left_out)


def test_what_no_cost_depends_on_is_kept_for_scripts(tmp_path: Path) -> None:
    """Guards rotary base, norm epsilon and biases of queries, keys and values, of files old and new."""
    model = load(tmp_path, {**QWEN2, "rope_theta": 1e6, "rms_norm_eps": 1e-6})
    assert (model.rotary_base, model.norm_epsilon, model.qkv_biases) == (1e6, 1e-6, True)
    newer = load(tmp_path, {**LLAMA, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}})
    assert (newer.rotary_base, newer.norm_epsilon, newer.qkv_biases) == (5e5, None, None)
    with pytest.raises(DocumentError, match=r"rope_theta: must be a number, not 'big'"):
        load(tmp_path, {**LLAMA, "rope_theta": "big"})
    with pytest.raises(DocumentError, match=r"rms_norm_eps: 1000.*is not a number from"):
        load(tmp_path, {**LLAMA, "rms_norm_eps": 10**400})
    assert load(tmp_path, NEOX).norm_epsilon == 1e-5


@pytest.mark.parametrize(
    ("config", "left_out", "biases"),
    [
        (QWEN2, "biases of queries, keys and values", False),
        (QWEN3, "", False),
        ({**LLAMA, "attention_bias": True}, "biases of the attention layers", False),
        ({**LLAMA, "mlp_bias": True}, "biases of the MLP layers", False),
        ({**LLAMA, "attention_bias": True, "mlp_bias": True}, "", True),
        ({**LLAMA, "rope_scaling": {"factor": 8.0}}, "scaling of rotary positions", False),
        ({**LLAMA, "rope_parameters": {"rope_type": "yarn"}}, "scaling of rotary positions", False),
        ({**LLAMA, "rope_parameters": {"rope_type": "default"}}, "", False),
        ({**LLAMA, "hidden_act": "gelu"}, "its activation (gelu, here SiLU)", False),
        ({**GPT2, "activation_function": "relu"}, "its activation (relu, here GELU)", True),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization", False),
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
        ({**LLAMA, "layer_types": ["full_attention", "linear_attention"]}, {"layer_types": "linear_attention"}),
        ({**LLAMA, "layer_types": ["full_attention"] * 3}, {"layer_types": "3 items for 32 layers"}),
        ({**LLAMA, "layer_types": "full"}, {"layer_types": "not supported: full"}),
        ({**MISTRAL, "sliding_window": -1}, {"sliding_window": "must be a whole number, not -1"}),
        ({**LLAMA, "num_hidden_layers": 10**9}, {"num_hidden_layers": "1,000,000,000 layers, more than 1,000"}),
        ({**MIXTRAL, "num_experts": 16}, {"num_experts": "16, but num_local_experts is 8"}),
        ({**MIXTRAL, "num_local_experts": 10**9}, {"layer_types.moe.experts.count": "less than or equal to 65536"}),
        ({**QWEN3_MOE, "mlp_only_layers": "all"}, {"mlp_only_layers": "must be a list of whole numbers"}),
        ({**DEEPSEEK_V3, "moe_layer_freq": 2}, {"moe_layer_freq": "2 is not supported, only 1"}),
        ({**GLM_52, "index_topk_pattern": "SFS"}, {"index_topk_pattern": "must say full or shared of each of 78"}),
        ({**DEEPSEEK_V4, "compress_ratios": [4] * 42}, {"compress_ratios": "must say one of 0, 4, 128 of each of 43"}),
        ({**DEEPSEEK_V3, "n_group": 7}, {"layer_types.moe.experts": "is not divisible by groups (7), but by 4"}),
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
    found = problems(tmp_path, {"model_type": "mixtrall", "num_local_experts": 8, "is_encoder_decoder": True})
    assert "'mixtrall' is not supported, did you mean 'mixtral'?" in found["model_type"]
    assert found["is_encoder_decoder"] == "an encoder beside the decoder is not supported"
    assert "not a Hugging Face model config" in problems(tmp_path, {"hidden_size": 3})[""]


def test_what_the_network_has_otherwise_is_kept_apart_from_what_is_left_out(tmp_path: Path) -> None:
    """Guards scripts of approximated models: norms elsewhere and another activation are another network, quantization,
    scaling of positions and small biases that scripts carry are not."""
    olmo = load(tmp_path, OLMO2)
    assert (len(olmo.approximated), len(olmo.otherwise)) == (0, 2)
    assert load(tmp_path, GEMMA).approximated == ("its activation (gelu, here SiLU)",)
    plain = load(tmp_path, {**QWEN3_MOE, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    assert (plain.approximated, "scaling of rotary positions" in plain.description) == ((), True)


SHIPPED = ("description", "source", "defaults", "name", "rotary_base", "norm_epsilon", "max_sequence_length")


@pytest.mark.parametrize(
    ("config", "shipped"),
    [
        (MIXTRAL, "mixtral-8x7b"),
        (QWEN3_MOE, "qwen3-30b-a3b"),
        (DEEPSEEK_V2, "deepseek-v2"),
        (DEEPSEEK_V3, "deepseek-v3"),
        (DEEPSEEK_V32, "deepseek-v3.2"),
        (GLM_52, "glm-5.2"),
        (DEEPSEEK_V4, "deepseek-v4-flash"),
        ({**GLM_52, "index_topk_freq": 1, "index_topk_pattern": "FFF" + "SSSF" * 18 + "SSS"}, "glm-5.2"),
        (KIMI_K2, "kimi-k2"),
        (GPT_OSS, "gpt-oss-20b"),
        (LLAMA4, "llama4-scout"),
        (GLM, "glm-45"),
        (NEMOTRON, "nemotron-3-nano-30b-a3b"),
    ],
)
def test_configs_with_experts_equal_the_shipped_models(tmp_path: Path, config: Config, shipped: str) -> None:
    """Guards keys and defaults of each family: the same layers as those that ship, whose source is another."""
    found, expected = load(tmp_path, config), load_model(shipped).document
    assert found.types == expected.types
    assert found.runs == expected.runs
    assert parameters(found) == parameters(expected)
    others = Model.model_fields.keys() - {*SHIPPED, "pattern", "layer_types"}
    assert {key: getattr(found, key) for key in others} == {key: getattr(expected, key) for key in others}


@pytest.mark.parametrize(
    ("config", "pattern", "windows"),
    [
        ({**MISTRAL, "sliding_window": 4096}, None, (4096,)),
        ({**LLAMA, "model_type": "mistral"}, None, (4096,)),
        ({**MISTRAL, "sliding_window": 8192}, None, (None,)),
        ({**QWEN2, "use_sliding_window": True}, "full*21 local*11", (None, 4096)),
        (QWEN2, None, (None,)),
        ({**GEMMA, "model_type": "gemma2", "sliding_window": 4096}, "(local full)*14", (4096, None)),
        (
            {**GEMMA, "model_type": "gemma3_text", "sliding_window": 512},
            "local*5 full local*5 full local*5 full local*5 full local*4",
            (512, None),
        ),
        (
            {**LLAMA, "sliding_window": 512, "layer_types": ["full_attention", *["sliding_attention"] * 31]},
            "full local*31",
            (None, 512),
        ),
        ({**LLAMA, "model_type": "phi3", "sliding_window": 2047}, None, (2047,)),
    ],
)
def test_windows_become_layer_types(
    tmp_path: Path, config: Config, pattern: str | None, windows: tuple[int | None, ...]
) -> None:
    """Guards which layers have a window: by the file's list, else as the class of the type has them."""
    model = load(tmp_path, config)
    assert model.pattern == pattern
    assert tuple(layer.window for layer in model.types) == windows


def test_files_that_leave_sizes_to_their_class(tmp_path: Path) -> None:
    """Guards Gemma 3 4B, whose file states neither heads nor vocabulary: 3.88 billion without the vision tower."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }  # fmt: skip
    model = load(tmp_path, {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}})
    assert parameters(model) / 1e9 == pytest.approx(3.88, rel=0.001)
    assert model.counts == (29, 5)
    assert "the vision tower" in model.description


LACKING = {
    "minimax_text_01": ({"num_experts": 16}, "transformers' own type is minimax"),
    "jamba": ({"num_experts": 16}, "Mamba-1"),
    "gemma3n": ({"text_config": {"model_type": "gemma3n_text", "num_experts": 256}}, "embeddings of each layer"),
    "qwen4_exp": ({"num_experts": 8}, "'qwen4_exp' is not supported (its n-gram embeddings"),
    "minimax_m3": ({"num_local_experts": 128}, "block-sparse attention"),
    "qwen3moe": ({}, "did you mean 'qwen3_moe'?"),
    "llama5": ({}, "'llama5' is not supported; supported: "),
}


@pytest.mark.parametrize("kind", LACKING)
def test_a_refusal_is_true_and_offers_no_other_model(kind: str, tmp_path: Path) -> None:
    """Guards types that are not supported: why, where that is known, and nothing of parts that others have."""
    config, said = LACKING[kind]
    found = problems(tmp_path, {"model_type": kind, **config})
    assert found.keys() == {"model_type"}
    assert said in found["model_type"]
    assert ("did you mean" in found["model_type"]) == ("did you mean" in said)


@pytest.mark.parametrize(
    ("outer", "section", "inner"),
    [
        ("mistral3", "text_config", {**LLAMA, "model_type": "mistral", "num_key_value_heads": 8}),
        ("mistral3", "text_config", {**LLAMA, "model_type": "ministral3", "num_key_value_heads": 8}),
        ("llava", "text_config", LLAMA),
        ("internvl_chat", "llm_config", {**QWEN3, "model_type": "qwen3"}),
        ("qwen3_vl", "text_config", {**QWEN3, "model_type": "qwen3_vl_text"}),
        ("qwen3_vl_moe", "text_config", {**QWEN3_MOE, "model_type": "qwen3_vl_moe_text"}),
        ("kimi_vl", "text_config", DEEPSEEK_V3),
        ("deepseek_vl", "language_config", LLAMA),
        ("made_up_vl", "text_config", MIXTRAL),
        ("qwen3_vl", "", QWEN3),
    ],
)
def test_language_models_of_vision_models_are_read(outer: str, section: str, inner: Config, tmp_path: Path) -> None:
    """Guards sizes in a section of their own, whatever the whole is called; its vision is left out, and said."""
    vision: Config = {"vision_config": {"hidden_size": 1024}}
    whole = {**vision, section: inner, "model_type": outer} if section else {**inner, **vision, "model_type": outer}
    alone, found = load(tmp_path, inner if section else {**inner, "model_type": "qwen3"}), load(tmp_path, whole)
    assert parameters(found) == parameters(alone)
    assert "the vision tower" in found.description


def test_norms_of_queries_and_partial_positions_are_of_the_layer(tmp_path: Path) -> None:
    """Guards what was left out before: both are kept, and such models are priced as before."""
    (qwen,) = load(tmp_path, QWEN3).types
    (phi,) = load(tmp_path, {**LLAMA, "model_type": "phi3", "partial_rotary_factor": 0.75}).types
    assert (qwen.qk_norms, phi.rotary_share) == (True, 0.75)
    assert not load(tmp_path, QWEN3).mixed


def test_layers_of_hybrids_by_either_list(tmp_path: Path) -> None:
    """Guards the newer list of names beside the pattern of letters, dense layers, and latent experts."""
    blocks = ["linear_attention", "moe", "full_attention", "mlp"] * 13
    model = load(tmp_path, {**NEMOTRON, "layers_block_type": blocks, "moe_latent_size": 512})
    assert model.pattern == "(mamba moe attention mlp)*13"
    assert [layer.ffn for layer in model.types] == [0, 0, 0, 1856]
    assert model.types[1].experts is not None
    assert model.types[1].experts.latent_width == 512
    assert (
        "must list up to 1,000"
        in problems(tmp_path, {**NEMOTRON, "layers_block_type": ["moe", "conv"]})["layers_block_type"]
    )


_DELTA: Config = {
    "attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_value_head_dim": 128,
    "max_position_embeddings": 262144, "tie_word_embeddings": False,
}  # fmt: skip
_GEMMA_4: Config = {
    "model_type": "gemma4_text", "attention_k_eq_v": True, "global_head_dim": 512, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    "max_position_embeddings": 262144, "sliding_window": 1024, "tie_word_embeddings": True, "vocab_size": 262144,
    "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
}  # fmt: skip
DELTA: dict[str, Config] = {
    "qwen3-next-80b-a3b": {
        **_DELTA, "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32, "num_experts": 512,
        "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "vocab_size": 151936,
    },
    "qwen3.5-27b": {
        "model_type": "qwen3_5", "tie_word_embeddings": False, "vision_config": {"hidden_size": 1152}, "text_config": {
            **_DELTA, "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408,
            "num_hidden_layers": 64, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
            "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48, "vocab_size": 248320,
            "mtp_num_hidden_layers": 1, "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e7},
        },
    },
    "qwen3.5-35b-a3b": {
        "model_type": "qwen3_5_moe", "vision_config": {"hidden_size": 1152}, "text_config": {
            **_DELTA, "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40,
            "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32, "num_experts": 256,
            "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "vocab_size": 248320, "mtp_num_hidden_layers": 1,
        },
    },
    "kimi-linear-48b-a3b": {
        "model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
            "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
            "short_conv_kernel_size": 4,
        },
        "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "hidden_act": "silu", "vocab_size": 163840,
        "model_max_length": 1048576, "tie_word_embeddings": False, "routed_scaling_factor": 2.446,
    },
    "hy3": {
        "model_type": "hy_v3", "hidden_size": 4096, "intermediate_size": 13312, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 192,
        "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536, "vocab_size": 120832,
        "max_position_embeddings": 131072, "mlp_layer_types": ["dense"] + ["sparse"] * 79,
    },
    "ernie-4.5-21b-a3b": {
        "model_type": "ernie4_5_moe", "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28,
        "num_attention_heads": 20, "num_key_value_heads": 4, "moe_intermediate_size": 1536, "moe_k": 6,
        "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "use_bias": False,
        "vocab_size": 103424, "max_position_embeddings": 131072,
    },
    "mistral-small-4-119b": {
        "model_type": "mistral4", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 32, "moe_intermediate_size": 2048, "n_routed_experts": 128,
        "num_experts_per_tok": 4, "n_shared_experts": 1, "q_lora_rank": 1024, "kv_lora_rank": 256,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 131072,
        "max_position_embeddings": 1048576,
    },
    "lfm2-1.2b": {
        "model_type": "lfm2", "hidden_size": 2048, "block_ff_dim": 12288, "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5, "vocab_size": 65536,
        "max_position_embeddings": 128000, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    "lfm2-8b-a1b": {
        "model_type": "lfm2_moe", "hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 24,
        "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3, "num_experts": 32,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "num_dense_layers": 2, "use_expert_bias": True,
        "norm_topk_prob": True, "vocab_size": 65536, "max_position_embeddings": 128000, "layer_types": [
            *["conv"] * 2, "full_attention", *["conv", "conv", "conv", "full_attention"] * 4, "conv", "conv",
            "full_attention", "conv", "conv",
        ],
    },
    "olmo-hybrid-7b": {
        **_DELTA, "attn_output_gate": False, "model_type": "olmo_hybrid", "hidden_size": 3840, "head_dim": 128,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 30, "num_key_value_heads": 30,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8, "linear_num_key_heads": 30,
        "linear_num_value_heads": 30, "linear_key_head_dim": 96, "linear_value_head_dim": 192, "vocab_size": 100352,
    },
    "step-3.7-flash": {
        "model_type": "step3p7", "vision_config": {"width": 1536}, "text_config": {
            "model_type": "step3p5", "hidden_size": 4096, "intermediate_size": 11264, "num_hidden_layers": 45,
            "num_attention_heads": 64, "num_attention_groups": 8, "head_dim": 128, "sliding_window": 512,
            "moe_layers_enum": ",".join(map(str, range(3, 45))), "moe_num_experts": 288, "moe_top_k": 8,
            "moe_intermediate_size": 1280, "share_expert_dim": 1280, "num_nextn_predict_layers": 3,
            "layer_types": ["full_attention", *["sliding_attention"] * 3] * 12, "vocab_size": 128896,
            "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8},
            "max_position_embeddings": 262144, "hidden_act": "silu",
        },
    },
    "mimo-v2-flash": {
        "model_type": "mimo_v2_flash", "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "sliding_window": 128,
        "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
        "hybrid_layer_pattern": [int((at + 1) % 6 > 0 and at > 0) for at in range(48)],
        "moe_layer_freq": [0, *[1] * 47], "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "n_shared_experts": None, "num_experts_per_tok": 8, "routed_scaling_factor": None, "vocab_size": 152576,
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "max_position_embeddings": 262144,
    },
    "gemma-4-31b": {
        "model_type": "gemma4", "vision_config": {"head_dim": 72}, "text_config": {
            **_GEMMA_4, "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60,
            "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4,
            "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10, "num_experts": None,
        },
    },
    "gemma-4-26b-a4b": {
        "model_type": "gemma4", "vision_config": {"head_dim": 72}, "text_config": {
            **_GEMMA_4, "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
            "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2,
            "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
        },
    },
    "command-a-111b": {
        "model_type": "cohere2", "hidden_act": "silu", "hidden_size": 12288, "intermediate_size": 36864,
        "num_hidden_layers": 64, "num_attention_heads": 96, "num_key_value_heads": 8, "vocab_size": 256000,
        "max_position_embeddings": 131072, "sliding_window": 4096, "sliding_window_pattern": 4,
    },
    "apertus-8b": {
        "model_type": "apertus", "hidden_act": "xielu", "hidden_size": 4096, "intermediate_size": 21504,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 131072,
        "max_position_embeddings": 65536, "tie_word_embeddings": False,
    },
    "hunyuan-a13b": {
        "model_type": "hunyuan_v1_moe", "hidden_size": 4096, "intermediate_size": 3072, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 64,
        "moe_topk": [8] * 32, "moe_intermediate_size": [3072] * 32, "num_shared_expert": [1] * 32,
        "vocab_size": 128167, "max_position_embeddings": 32768, "tie_word_embeddings": True,
    },
    "ling-mini-2.0": {
        "model_type": "bailing_moe_v2", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 20,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 256,
        "num_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "first_k_dense_replace": 1,
        "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "vocab_size": 157184, "use_qkv_bias": False,
        "max_position_embeddings": 32768, "num_nextn_predict_layers": 0, "score_function": "sigmoid",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", DELTA)
def test_models_with_other_layers_are_those_that_are_shipped(name: str, tmp_path: Path) -> None:
    """Guards keys of delta nets, gates, layers with sizes of their own and nested sections: layer by layer the sizes of
    the shipped model."""
    found, shipped = load(tmp_path, DELTA[name]), load_model(name).document
    assert parameters(found) == parameters(shipped)
    assert [layer.words for layer in found.types] == [layer.words for layer in shipped.types]
    assert (found.counts, found.mtp_layers) == (shipped.counts, shipped.mtp_layers)
    assert {*shipped.parts} <= {*found.parts}
    assert shipped.approximated in ((), found.approximated)


def test_newer_spellings_of_layers(tmp_path: Path) -> None:
    """Guards files that list sparse attention by its name, a hybrid's layers without their number, and the width of its
    heads by an older key."""
    listed = load(tmp_path, {**GLM_52, "layer_types": ["deepseek_sparse_attention"] * 78})
    assert listed.types == load_model("glm-5.2").document.types
    blocks = ["mamba", "moe", "attention", "mlp"] * 13
    hybrid: Config = {**NEMOTRON, "layers_block_type": blocks, "attention_head_dim": 96}
    found = load(tmp_path, {key: hybrid[key] for key in hybrid.keys() - {"num_hidden_layers", "head_dim"}})
    assert (found.layers, found.types[2].head_dim) == (52, 96)


@pytest.mark.parametrize(
    ("config", "lacking"),
    [
        ({**_GEMMA_4, "hidden_size_per_layer_input": 256}, {"hidden_size_per_layer_input": "an embedding of each"}),
        ({**_GEMMA_4, "num_kv_shared_layers": 20}, {"num_kv_shared_layers": "keys and values of another layer"}),
        (
            {"model_type": "kimi_linear", "attn_res_block_size": 12, "mla_use_output_gate": True},
            {"attn_res_block_size": "attention residuals", "mla_use_output_gate": "gate of latent attention"},
        ),
        (
            {"model_type": "kimi_linear", "linear_attn_config": {"use_full_rank_gate": True}},
            {"linear_attn_config.use_full_rank_gate": "a gate of full rank"},
        ),
    ],
)
def test_parts_of_blocks_that_are_not_there_are_refused(
    config: Config, lacking: dict[str, str], tmp_path: Path
) -> None:
    """Guards Gemma 4 E2B and Kimi K3, which are built as types that are supported but for these parts."""
    found = problems(tmp_path, config)
    assert all(said in found[key] for key, said in lacking.items())


def test_layers_of_lightning_attention_are_listed(tmp_path: Path) -> None:
    """Guards MiniMax-01's form, whose experts have the width of the MLP, and a file that does not say which layers."""
    config: Config = {
        "model_type": "minimax", "hidden_size": 6144, "intermediate_size": 9216, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 32,
        "num_experts_per_tok": 2, "block_size": 256, "vocab_size": 200064, "max_position_embeddings": 10240000,
        "layer_types": [*["linear_attention"] * 7, "full_attention"] * 10,
    }  # fmt: skip
    model = load(tmp_path, config)
    assert (model.pattern, model.counts) == ("(lightning*7 full)*10", (70, 10))
    assert parameters(model) / 1e9 == pytest.approx(456, rel=0.005)
    assert "which have lightning attention?" in problems(tmp_path, {**config, "layer_types": None})["layer_types"]


def test_experts_that_some_layers_have(tmp_path: Path) -> None:
    """Guards the lists and steps of Qwen's and Llama 4's files."""
    listed = load(tmp_path, {**QWEN3_MOE, "mlp_only_layers": [0, 47], "decoder_sparse_step": 2})
    assert listed.pattern == "dense moe " * 23 + "dense*2"
    stepped = load(tmp_path, {**LLAMA4, "text_config": {**LLAMA4_TEXT, "interleave_moe_layer_step": 2}})
    assert stepped.pattern == "(local-dense local-moe local-dense full-moe)*12"
    assert stepped.types[0].ffn == 16384
    shared = load(tmp_path, QWEN2_MOE)
    assert shared.pattern is None
    assert shared.types[0].experts is not None
    assert shared.types[0].experts.shared_width == 5632
    # Published: 14.3 billion.
    assert parameters(shared) / 1e9 == pytest.approx(14.3, rel=0.005)
