"""Arguments of Megatron-Core for what layers have beyond a dense block of a GPT or Llama.

Experts with their router and dispatcher, latent attention, windows, sinks, state spaces, multi-token prediction.
Sources: NVIDIA/Megatron-LM@d98e8a64, megatron/training/arguments.py and core/transformer/transformer_config.py, whose
checks it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, groupby
from typing import Any

from axonn_tune.frameworks.description import Because, Run, Value
from axonn_tune.specs.model import MIXERS, Layer, Model
from axonn_tune.specs.sections import Experts, Indexer, LatentAttention, Mixer

WRITTEN = {
    "attention": """
        model.multi_latent_attention model.q_lora_rank model.kv_lora_rank model.qk_head_dim model.qk_pos_emb_head_dim
        model.v_head_dim model.qk_layernorm model.window_size model.window_attn_skip_freq model.softmax_type
        model.no_rope_freq rotary_percent model.attention_output_gate model.experimental_attention_variant
        model.linear_attention_freq model.linear_conv_kernel_dim model.linear_key_head_dim model.linear_value_head_dim
        model.linear_num_key_heads model.linear_num_value_heads model.dsa_indexer_n_heads
        model.dsa_indexer_head_dim model.dsa_indexer_topk model.dsa_indexer_topk_freq
        model.dsa_indexer_skip_topk_offset model.dsa_indexer_loss_coeff model.dsa_indexer_use_sparse_loss
        model.dsa_kernel_backend
    """,
    "mamba": """
        hybrid_layer_pattern model.mamba_num_heads model.mamba_head_dim model.mamba_state_dim model.mamba_num_groups
    """,
    "experts": """
        num_experts model.moe_layer_freq model.moe_ffn_hidden_size model.moe_shared_expert_intermediate_size
        model.moe_shared_expert_gate model.moe_latent_size model.activation_func_clamp_value model.moe_router_topk
        model.moe_router_score_function model.moe_router_pre_softmax model.moe_router_num_groups
        model.moe_router_group_topk model.moe_router_topk_scaling_factor model.moe_router_enable_expert_bias
        model.moe_router_load_balancing_type model.moe_aux_loss_coeff model.moe_router_dtype
        model.moe_router_force_load_balancing model.moe_expert_capacity_factor model.moe_token_dispatcher_type
        model.moe_flex_dispatcher_backend model.moe_grouped_gemm model.moe_permute_fusion
        model.expert_model_parallel_size model.expert_tensor_parallel_size model.overlap_moe_expert_parallel_comm
        model.delay_wgrad_compute model.moe_shared_expert_overlap quick_geglu model.glu_linear_offset
    """,
    "prediction": "model.mtp_num_layers",
}
"""Arguments by section, each by its name in Megatron-Bridge, whose last part is that of `pretrain_gpt.py`."""

_PARTS = (
    *("experts", "shared experts", "multi-head latent attention", "sliding-window attention", "attention sinks"),
    "DeepSeek sparse attention",
    *("output gates of attention", "multi-token prediction", "layers without attention", "layers without MLP"),
    "layer types of different sizes",
)


def parts() -> frozenset[str]:
    """Of `Model.parts`, those that it has arguments for."""
    return frozenset((*_PARTS, *(mixer.TITLE for mixer in MIXERS.values() if mixer.LETTER or mixer.VARIANT)))


def layers_of(run: Run) -> list[Layer]:
    """Every layer in order."""
    model = run.model
    return [model.types[index] for index, count in model.decoder_runs for _ in range(count)]


def is_hybrid(run: Run) -> bool:
    """Whether layers are Mamba-2, attention, MLP or experts alone, which another program trains."""
    return any(
        (layer.mixer is not None and not (_variant(layer) and _computes(layer)))
        or (layer.mixer is None and not layer.attention)
        for layer in run.model.types
    )


def _computes(layer: Layer) -> bool:
    """Whether it has an MLP or experts."""
    return layer.ffn > 0 or layer.experts is not None


def values(run: Run) -> dict[str, Value]:
    """Values by name; UsageError for layers that differ in what one argument states for all."""
    layers = layers_of(run)
    return {
        **_attention(run, layers),
        **_mixers(run, layers),
        **_mlp(run, layers),
        **(_hybrid(run, layers) if is_hybrid(run) else {}),
        "mtp_num_layers": run.model.mtp_layers or None,
        # An option of every step, and an argument of layers with an indexer alone.
        "dsa_kernel_backend": run.step.sparse_kernels if any(layer.indexer for layer in layers) else None,
    }


def _common(run: Run, layers: Iterable[Layer], what: str, read: Callable[[Layer], Any]) -> Any:  # noqa: ANN401
    """What `read` finds in each of the layers, None of none; UsageError where they differ."""
    found = list(dict.fromkeys(map(read, layers)))
    if len(found) > 1:
        raise run.cannot(f"layers that differ in {what}")
    return found[0] if found else None


def pattern(marks: Iterable[bool]) -> str:
    """Marks of all layers as Megatron-LM reads them: `([0]*3+[1]*58)`."""
    return f"({'+'.join(f'[{int(mark)}]*{len(list(run))}' for mark, run in groupby(marks))})"


def _sizes(part: str, of_layers: Experts | Indexer | LatentAttention | Mixer) -> dict[str, Value]:
    """Sizes of a part of layers, by the fields of arguments."""
    return {f"{part}.{name}": value or None for name, value in vars(of_layers).items()}


def _attention(run: Run, layers: list[Layer]) -> dict[str, Value]:
    attending = [layer for layer in layers if layer.attention]
    latent = _common(run, attending, "latents of attention", lambda one: one.latent)
    heads = _common(run, attending, "heads", lambda one: (one.heads, one.kv_heads, one.head_dim))
    windowed, found = [layer for layer in attending if layer.window], dict[str, Value]()
    if windowed:
        window = _common(run, windowed, "windows", lambda one: one.window)
        found["window_size"] = Because(f"{window - 1},0", f"a token and {window - 1} before it")
        partly = len(windowed) < len(layers)
        found["window_attn_skip_freq"] = pattern(layer.window is not None for layer in layers) if partly else None
    if latent is None and heads is not None:
        grouped = heads[0] != heads[1]
        found |= {"heads": heads[0], "head_dim": heads[2], "num_query_groups": heads[1] if grouped else None}
        found["group_query_attention"] = grouped
    elif latent is not None:
        found |= {
            **{"multi_latent_attention": True, **_sizes("latent", latent)},
            **{"head_dim": None, "num_query_groups": None, "group_query_attention": False},
            **_indexers(run, layers),
        }
    unrotated = [layer.rotary_share == 0 for layer in layers]
    if attending and all(layer.rotary_share == 0 for layer in attending):
        found["position_embedding_type"], unrotated = "none", []
    shares = {layer.rotary_share for layer in attending if layer.rotary_share}
    sinks = _common(run, attending, "attention sinks", lambda one: one.sinks)
    gate = _common(run, attending, "output gates", lambda one: one.output_gate)
    if gate == "head":
        raise run.cannot("a gate of attention's output by head", "it has one of each element")
    return found | {
        "attention_output_gate": gate is not None,
        "no_rope_freq": pattern(unrotated) if any(unrotated) else None,
        # Of latents Megatron-Core has the norms by the same switch.
        "qk_layernorm": bool(attending) and all(layer.qk_norms or layer.latent is not None for layer in attending),
        "softmax_type": "learnable" if sinks else None,
        "rotary_percent": shares.pop() if len(shares) == 1 else None,
    }


def _indexers(run: Run, layers: list[Layer]) -> dict[str, Value]:
    """Sparse attention: sizes, which layers share an indexer, the loss (coefficient: recipes of Megatron-Bridge)."""
    sizes = _common(
        run, layers, "indexers", lambda one: one.indexer and one.indexer.model_copy(update={"shared": False})
    )
    if sizes is None:
        return {}
    shared = [one.indexer is not None and one.indexer.shared for one in layers]
    offset = shared.index(True) if any(shared) else 0
    every = next((at for at in range(offset, len(shared)) if not shared[at]), len(shared)) - offset + 1
    if shared != [any(shared) and not indexes(layer, every, offset) for layer in range(len(layers))]:
        raise run.cannot("an order of shared indexers other than full ones first, then every so many layers")
    return {
        "experimental_attention_variant": "dsa",
        **_sizes("indexer", sizes),
        "dsa_indexer_topk_freq": every if any(shared) else None,
        "dsa_indexer_skip_topk_offset": offset or None,
        "dsa_indexer_loss_coeff": 1e-3,
        "dsa_indexer_use_sparse_loss": True,
    }


def indexes(layer: int, every: int, offset: int) -> bool:
    """Whether a layer, from 0, has an indexer of its own: the first, then every so many."""
    return max(layer - offset + 1, 0) % every == 0


def _mixers(run: Run, layers: list[Layer]) -> dict[str, Value]:
    """Sizes of what mixes tokens in place of attention; of one beside an MLP, which layers have it."""
    found: dict[str, Value] = {}
    for section, kind in MIXERS.items():
        those = [layer for layer in layers if isinstance(layer.mixer, kind)]
        if (mixer := _common(run, those, kind.TITLE, lambda one: one.mixer)) is not None:
            found |= _sizes(section, mixer)
    mixed = [layer for layer in layers if layer.mixer is not None]
    if mixed and not is_hybrid(run):
        found["experimental_attention_variant"] = _common(run, mixed, "attention", _variant)
        found["linear_attention_freq"] = pattern(layer.mixer is not None for layer in layers)
    return found


def _variant(layer: Layer) -> str:
    """What stands in place of attention, in its words."""
    return layer.mixer.VARIANT if layer.mixer else ""


def _mlp(run: Run, layers: list[Layer]) -> dict[str, Value]:
    computing = [*filter(_computes, layers)]
    dense, routed = ([one for one in computing if (one.experts is None) == plain] for plain in (True, False))
    gated = _common(run, computing, "the gate of MLP and experts", lambda one: one.gated)
    found: dict[str, Value] = {
        "ffn": _common(run, dense, "the width of the MLP", lambda one: one.ffn) or run.model.ffn,
        "gated_mlp": gated,
        "squared_relu": run.model.gated and gated is False,
    }
    if not routed:
        return found
    freq = pattern(one.experts is not None for one in layers)
    freq_needed = len(computing) == len(layers) and bool(dense)
    return found | _experts(run, routed) | {"moe_layer_freq": freq if freq_needed else None}


def _experts(run: Run, routed: list[Layer]) -> dict[str, Value]:
    """Sizes, router, dispatcher and degrees."""
    experts = _common(run, routed, "experts", lambda one: one.experts)
    # Its fused kernels clamp in GPT-OSS's activation alone (core/fusions/fused_bias_geglu.py).
    clamped = {"gated_mlp": False, "quick_geglu": True, "glu_linear_offset": 1.0} if experts.clamp else {}
    tensor, shards = run.size("expert_tensor"), run.size("expert_z")
    biased, sigmoid = bool(experts.score_bias), experts.score != "softmax"
    if biased and not sigmoid:
        raise run.cannot("a bias of scores by softmax", "it has one with sigmoid")
    if run.model.biases and tensor > 1:
        raise run.cannot("biases of experts with ETP above 1", "ask for --etp 1")
    return {
        "num_experts": experts.count,
        **_sizes("experts", experts),
        **clamped,
        "moe_router_score_function": experts.score if sigmoid else None,
        "moe_router_pre_softmax": not sigmoid and (not experts.normalized or experts.per_token == 1),
        **({} if experts.groups > 1 else {"experts.groups": None, "experts.chosen_groups": None}),
        "moe_router_topk_scaling_factor": experts.scaling,
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_router_enable_expert_bias": biased,
        "moe_router_load_balancing_type": "seq_aux_loss" if biased else "aux_loss",
        "moe_aux_loss_coeff": 1e-4 if biased else 1e-2,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
        "expert_model_parallel_size": Because(run.size("expert"), "EP"),
        "expert_tensor_parallel_size": Because(tensor, "ETP"),
        "expert_z": Because(tensor * shards, f"ETP * EGTP = {tensor} * {shards}") if shards > 1 else None,
    }


def letters() -> Mapping[str, str]:
    """Layers of a hybrid's pattern, those that mix tokens by their section of a layer type
    (core/models/hybrid/hybrid_layer_allocation.py)."""
    Model.prepare()
    mixers = {mixer.LETTER: section for section, mixer in MIXERS.items() if mixer.LETTER}
    return {**mixers, "*": "attention", "-": "mlp", "E": "moe"}


def _letter(run: Run, layer: Layer) -> str:
    has = {"*": layer.attention, "-": layer.ffn > 0, "E": layer.experts is not None}
    has |= {layer.mixer.LETTER: bool(layer.mixer.LETTER)} if layer.mixer else {}
    letters = [letter for letter, present in has.items() if present]
    if len(letters) != 1:
        raise run.cannot("layers without attention or MLP beside others that have both")
    return letters[0]


def _hybrid(run: Run, layers: list[Layer]) -> dict[str, Value]:
    """The pattern of letters, cut into parts of stages and chunks, which replaces every other split of layers."""
    letters = "".join(_letter(run, layer) for layer in layers)
    ends = [*accumulate(run.parts)]
    text = "|".join(letters[end - count : end] for end, count in zip(ends, run.parts, strict=True))
    predicted = "".join(_letter(run, run.model.types[index]) for index in run.model.mtp_types)
    text += f"/{predicted}" * run.model.mtp_layers
    counted = (f"account_for_{what}_in_pipeline_split" for what in ("embedding", "loss"))
    split = dict.fromkeys(("pipeline_model_parallel_layout", "chunks", "layers", *counted))
    return {**split, "hybrid_layer_pattern": Because(text, "layers of each part")}
