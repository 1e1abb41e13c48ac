"""A hundred descriptions of layers that no model has: refused at once, by key, with what would be valid."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from axonn_tune.errors import AxonnTuneError
from axonn_tune.specs.hugging_face import model_from_hf_config
from axonn_tune.specs.loading import load_document
from axonn_tune.specs.model import Model
from tests.unit.specs.test_hugging_face import DEEPSEEK_V3, GPT_OSS, LLAMA, LLAMA4, LLAMA4_TEXT, MIXTRAL, QWEN3_MOE

LATENT = {"query_rank": 24, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 6}
EXPERTS = {"count": 8, "per_token": 2, "width": 32}
TYPES: dict[str, Any] = {"dense": {"latent": LATENT}, "moe": {"experts": EXPERTS}}
MODEL: dict[str, Any] = {
    "schema": "axonn-tune/model/1", "name": "m", "family": "llama", "layers": "dense*2 moe*6", "layer_types": TYPES,
    "hidden": 64, "heads": 8, "kv_heads": 8, "head_dim": 8, "ffn": 256, "vocab": 512, "max_sequence_length": 128,
    "biases": False, "tied_embeddings": False, "source": "made up",
    "defaults": {"global_batch": 16, "sequence_length": 128},
}  # fmt: skip
SUCH = "such as dense*3 moe*58"

PATTERNS = [
    ("t*999999999", "at most 1,000 layers, not 999,999,999"),
    ("dense*1000 moe", "at most 1,000 layers, not 1,001"),
    ("(dense moe)*999999999", "at most 1,000 layers, not 1,999,999,998"),
    ("(dense*999 moe)*9999", "at most 1,000 layers, not 9,999,000"),
    ("dense " * 300_000, "at most 1,000 layers, not 1,001"),
    ("dense*1e9", SUCH),
    ("dense*9999999999999", SUCH),
    ("dense*-1", SUCH),
    ("dense*0", SUCH),
    ("dense*", SUCH),
    ("dense**2", SUCH),
    ("dense*2.5", SUCH),
    ("dense*0x10", SUCH),
    ("dense,moe", SUCH),
    ("dense|moe", SUCH),
    ("dense+moe", SUCH),
    ("3*dense", SUCH),
    ("[0]*3+[1]*58", SUCH),
    ("M-M*E", SUCH),
    ("", "must be a number of layers, or a pattern such as dense*3 moe*58"),
    ("   ", SUCH),
    ("()", SUCH),
    ("()*5", SUCH),
    ("(dense", SUCH),
    ("dense)", SUCH),
    ("((dense)*2)*2", SUCH),
    ("(" * 900_000, SUCH),
    ("(" + "dense " * 200_000, SUCH),
    ("(dense moe)2", SUCH),
    ("(dense)(moe)", SUCH),
    ("*3", SUCH),
    ("dénse", SUCH),
    ("x" * 1_000_000, SUCH),
    ("dens*2 moe*6", "names 'dens', but there are dense, moe, did you mean 'dense'?"),
    ("x y z", "names 'x', but there are dense, moe"),
    ("dense*8", "layer_types.moe is not used: layers names dense"),
    ("Dense*2 moe*6", "did you mean 'dense'?"),
]
MODELS: list[tuple[dict[str, Any], str]] = [
    ({"layers": 8}, "layers must say the order of dense, moe, such as dense*3 moe*4"),
    ({"layers": 0}, "layers: must be greater than 0, not 0"),
    ({"layers": -3}, "layers: must be greater than 0, not -3"),
    ({"layers": 2.5}, "layers: must be a whole number, not 2.5"),
    ({"layers": True}, "layers: must be a whole number, not true"),
    ({"layers": None}, "layers: must be a whole number, not empty"),
    ({"layers": ["dense", "moe"]}, "layers: must be a whole number, not a list"),
    ({"layers": 10**12}, "layers: must be less than or equal to 2147483647"),
    ({"pattern": "dense moe*7"}, "layers and pattern are both patterns: give one"),
    ({"layers": 9, "pattern": "dense*2 moe*6"}, "layers (9) is not the number of layers in pattern (8)"),
    ({"layers": 8, "pattern": "dense*1e9"}, SUCH),
    ({"layer_types": {}}, "layers names 'dense', but there are no layer_types"),
    ({"layer_types": []}, "layer_types: must be a mapping"),
    ({"layer_types": {"dense": {}, "moe": {}, "other": {}}}, "layer_types.other is not used"),
    ({"layer_types": {f"t{number}": {} for number in range(5_000)}}, "layer_types has 5,000 types, more than 64"),
    ({"layer_types": {"a b": {}, "moe": {}}}, "layer_types.a b: a name has"),
    ({"layer_types": {"9": {}}, "layers": 3}, "layer_types.9: a name has"),
    ({"layer_types": {"x" * 1_000: {}}, "layers": 3}, ": a name has up to 64 letters, digits, - and _"),
    ({"layer_types": {**TYPES, "dense": []}}, "layer_types.dense: must be a mapping"),
    ({"layer_types": {**TYPES, "dense": {"expert": EXPERTS}}}, "unknown key 'expert', did you mean 'experts'?"),
    ({"layer_types": {**TYPES, "dense": {"name": "x"}}}, "unknown key 'name'"),
    ({"mtp_layers": -1}, "mtp_layers: must be greater than or equal to 0"),
    ({"mtp_layers": 10**9}, "mtp_layers: must be less than or equal to 32"),
    ({"mtp_layer": 1}, "unknown key 'mtp_layer', did you mean 'mtp_layers'?"),
    ({"experts": EXPERTS}, "unknown key 'experts'"),
    ({"num_experts": 8, "num_local_experts": 16}, "unknown key 'num_local_experts'"),
]
LAYERS: list[tuple[dict[str, Any], str]] = [
    ({"window": -1}, "layer_types.dense.window: must be greater than 0, not -1"),
    ({"window": 0}, "layer_types.dense.window: must be greater than 0, not 0"),
    ({"window": 10**30}, "layer_types.dense.window: must be less than or equal to 2147483647"),
    ({"window": "all"}, "layer_types.dense.window: must be a whole number, not 'all'"),
    ({"rotary_share": 1.5}, "layer_types.dense.rotary_share: must be less than or equal to 1"),
    ({"rotary_share": -0.5}, "layer_types.dense.rotary_share: must be greater than or equal to 0"),
    ({"sinks": 1}, "layer_types.dense.sinks: must be true or false"),
    ({"heads": 8, "kv_heads": 3}, "layer_types.dense: heads (8) must be divisible by kv_heads (3)"),
    ({"kv_heads": 16}, "layer_types.dense: heads (8) must be divisible by kv_heads (16)"),
    ({"attention": False, "window": 8}, "window is given, but attention is false"),
    ({"attention": False, "latent": LATENT}, "latent is given, but attention is false"),
    ({"attention": False, "mlp": False}, "attention and mlp are both false: the layer is empty"),
    ({"mlp": False, "ffn": 8}, "ffn is given, but mlp is false"),
    ({"mlp": False, "experts": EXPERTS}, "experts is given, but mlp is false"),
    ({"latent": LATENT, "head_dim": 8}, "head_dim is given, but latent attention has nope_dim, rope_dim and value_dim"),
    ({"latent": {}}, "missing key 'kv_rank'"),
    ({"latent": LATENT | {"rope_dim": 0}}, "latent.rope_dim: must be greater than 0"),
    ({"latent": LATENT | {"q_rank": 8}}, "unknown key 'q_rank', did you mean 'kv_rank'?"),
    ({"latent": 512}, "layer_types.dense.latent: must be a mapping"),
    ({"experts": EXPERTS | {"count": 10**9}}, "experts.count: must be less than or equal to 65536"),
    ({"experts": EXPERTS | {"count": 0}}, "experts.count: must be greater than 0"),
    ({"experts": EXPERTS | {"per_token": 9}}, "per_token (9) exceeds the experts it chooses from (8)"),
    ({"experts": EXPERTS | {"per_token": 0}}, "experts.per_token: must be greater than 0"),
    ({"experts": EXPERTS | {"groups": 3}}, "count (8) is not divisible by groups (3), but by 2"),
    ({"experts": EXPERTS | {"groups": 2**31 - 1}}, "is not divisible by groups (2147483647), but by 8"),
    ({"experts": EXPERTS | {"groups": 2, "chosen_groups": 4}}, "chosen_groups (4) exceeds groups (2)"),
    ({"experts": EXPERTS | {"groups": 8, "chosen_groups": 1}}, "per_token (2) exceeds the experts it chooses from (1)"),
    ({"experts": EXPERTS | {"shared_width": -1}}, "experts.shared_width: must be greater than or equal to 0"),
    ({"experts": EXPERTS | {"score": "tanh"}}, "experts.score: must be 'softmax', 'sigmoid' or 'sqrtsoftplus'"),
    ({"experts": {"count": 8}}, "missing key 'per_token'"),
    ({"experts": 8}, "layer_types.dense.experts: must be a mapping"),
]
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({**LLAMA, "rms_norm_eps": {"a": 1}}, "rms_norm_eps: must be a number, not {'a': 1}"),
    ({**LLAMA, "rms_norm_eps": "1e-6"}, "rms_norm_eps: must be a number, not '1e-6'"),
    ({**MIXTRAL, "num_experts": 64}, "num_experts: 64, but num_local_experts is 8"),
    ({**QWEN3_MOE, "n_routed_experts": 64}, "num_experts: 128, but n_routed_experts is 64"),
    ({**MIXTRAL, "num_local_experts": -8}, "num_local_experts: must be a positive whole number, not -8"),
    ({**MIXTRAL, "num_hidden_layers": 10**9}, "num_hidden_layers: 1,000,000,000 layers, more than 1,000"),
    ({**LLAMA, "num_hidden_layers": 10**18}, "num_hidden_layers: must be a positive whole number"),
    ({**MIXTRAL, "num_experts_per_tok": 9}, "per_token (9) exceeds the experts it chooses from (8)"),
    ({**DEEPSEEK_V3, "first_k_dense_replace": -3}, "first_k_dense_replace: must be a whole number, not -3"),
    ({**DEEPSEEK_V3, "kv_lora_rank": "512"}, "kv_lora_rank: must be a positive whole number, not '512'"),
    ({**DEEPSEEK_V3, "num_nextn_predict_layers": 10**9}, "mtp_layers: must be less than or equal to 32"),
    ({**GPT_OSS, "sliding_window": -128}, "sliding_window: must be a whole number, not -128"),
    ({**GPT_OSS, "layer_types": ["full_attention"] * 10**5}, "layer_types: 100000 items for 24 layers"),
    ({**GPT_OSS, "layer_types": [[]] * 24}, "layer_types: layers other than full_attention"),
    ({**LLAMA4, "text_config": {**LLAMA4_TEXT, "no_rope_layers": [7] * 48}}, "no_rope_layers: layers other than 0, 1"),
    ({**LLAMA, "hidden_act": 3.7}, "hidden_act: must be the name of an activation, such as silu, not 3.7"),
    ({**LLAMA, "hidden_act": "٣"}, "hidden_act: must be the name of an activation, such as silu, not '٣'"),
    ({**DEEPSEEK_V3, "hidden_act": 1}, "hidden_act: must be the name of an activation, such as silu, not 1"),
    ({**DEEPSEEK_V3, "scoring_func": ""}, "scoring_func: must be one of softmax, sigmoid, sqrtsoftplus, not ''"),
    ({**QWEN3_MOE, "decoder_sparse_step": 0}, "decoder_sparse_step: must be a positive whole number, not 0"),
]


def refused(load: Any, path: Path) -> str:
    """The message of what loading refuses, with exit code 2, within a second of CPU time and 300 MB."""
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(AxonnTuneError) as caught:
            load(path)
        took, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.exit_code == 2
    assert took < 1
    assert peak < 300e6
    assert len(str(caught.value)) < 5000
    return str(caught.value)


OF_LAYERS: list[tuple[dict[str, Any], str]] = [
    *(({"layers": pattern}, said) for pattern, said in PATTERNS),
    *MODELS,
    *(({"layer_types": TYPES | {"dense": layer}}, said) for layer, said in LAYERS),
]


@pytest.mark.parametrize(("changes", "said"), OF_LAYERS, ids=range(len(OF_LAYERS)))
def test_layers_that_no_model_has_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """Guards against time, memory and a price for nonsense in a model document."""
    path = tmp_path / "m.yaml"
    path.write_text(json.dumps(MODEL | changes), encoding="utf-8")
    assert said in refused(lambda one: load_document(one, schema=Model), path)


@pytest.mark.parametrize(("config", "said"), CONFIGS, ids=range(len(CONFIGS)))
def test_configs_that_no_model_has_are_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    """Guards the same for a config.json."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert said in refused(model_from_hf_config, path)
