"""Builds a model document from a local Hugging Face config.json.

Each layer has attention (a window, latents, sinks, norms of queries and keys) and an MLP or experts; layers that differ
become layer types. Blocks that cost the same as those of this tool's two families are imported, also where norms,
positions, biases or the residual stream differ: hugging_face.yaml says how, and the description names each difference.
What would change the cost noticeably (cross-attention, an encoder) is refused by name. Rotary base, norm epsilon and
biases of queries, keys and values are kept for scripts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from axonn_tune.errors import CONTROL, DocumentError, Problem, UsageError, edits
from axonn_tune.specs.document import LARGEST_SIZE, Node, Plain, Scalar, validate
from axonn_tune.specs.loading import read_text
from axonn_tune.specs.model import MIXERS, MODEL_SCHEMA, Model
from axonn_tune.specs.model_types import ExpertKeys, Kind, kinds, plain_type, table
from axonn_tune.specs.sections import MOST_LAYERS, Score
from axonn_tune.units import read_number

TOKENS_PER_STEP = 4 * 2**20
LONGEST_DEFAULT_SEQUENCE = 8192

_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "max_sequence_length": "max_position_embeddings",
    "ffn": "intermediate_size",
}
_ACTIVATIONS = {
    "llama": (("silu", "swish"), "SiLU"),
    "gpt": (("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "GELU"),
}
"""Names of the activation that is priced, and ours."""
_LATENT = {
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
_INDEXER = {"heads": "index_n_heads", "head_dim": "index_head_dim", "topk": "index_topk"}
_COMPRESSED: dict[object, str] = {
    **{0: "window", 4: "sparse", 128: "heavy", "sliding_attention": "window"},
    **{"compressed_sparse_attention": "sparse", "heavily_compressed_attention": "heavy"},
}
"""Layers of compressed attention, by ratio and by name."""
_BLOCKS = {
    **dict.fromkeys(("*", "attention", "full_attention"), "attention"),
    **dict.fromkeys(("-", "mlp"), "mlp"),
    **dict.fromkeys(("E", "moe"), "moe"),
}
"""What layers of hybrids are called."""
_MOST_SHARED = 64
_COUNTS = ("num_local_experts", "n_routed_experts", "num_experts")
_ATTENDS = {
    **dict.fromkeys(("full_attention", "indexed_attention", "deepseek_sparse_attention"), True),
    **dict.fromkeys(("sliding_attention", "chunked_attention"), False),
}
"""Types of layers, and whether they attend to the whole sequence."""
# Keys that mark model parts without operations in this tool, or in the model type.
_REFUSED = {
    **dict.fromkeys(_COUNTS, "a mixture of experts"),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), "multi-head latent attention"),
    "is_encoder_decoder": "an encoder beside the decoder",
    "add_cross_attention": "cross-attention",
    "vision_config": "a vision tower",
    "sparse_attention_config": "block-sparse attention",
    "attn_res_block_size": "a residual of stored rows (attention residuals)",
    "mla_use_output_gate": "an output gate of latent attention",
    "linear_attn_config.use_full_rank_gate": "a gate of full rank in delta attention",
    "hidden_size_per_layer_input": "an embedding of each layer",
    "num_kv_shared_layers": "attention with keys and values of another layer",
}
_TEXT = ("text_config", "llm_config", "language_config")
"""Sections of the language model, beside those of vision and sound."""
_ROPE_SCALING = "scaling of rotary positions"
_LEFT_OUT = {
    "rope_scaling": _ROPE_SCALING,
    "quantization_config": "quantization",
}
_BASES, _EPSILONS = (
    ("rope_theta", "rotary_emb_base"),
    ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
)
"""Keys of rotary base and norm epsilon, which scripts carry and no cost depends on."""


def model_from_hf_config(
    path: str | Path, *, name: str | None = None, global_batch: int | None = None, sequence_length: int | None = None
) -> Model:
    """Read a config.json, or the folder that holds one; DocumentError with all that cannot be mapped.

    The file has no batch. The default step has 4 Mi tokens in sequences of the model's maximum length, at most 8,192;
    `source` records this assumption.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    config = _Config(path)
    named, kind = config.kind()
    config.refuse_parts(kind)
    sizes = _sizes(config, named, kind)
    layers = {} if config.problems else _layer_types(config, kind, layers=int(sizes["layers"] or 0))
    if config.problems:
        raise DocumentError(str(path), config.problems)
    length = sequence_length or min(int(sizes["max_sequence_length"] or 0), LONGEST_DEFAULT_SEQUENCE)
    batch = global_batch or max(1, TOKENS_PER_STEP // length)
    assumed = [words for words, given in (("batch", global_batch), ("sequence length", sequence_length)) if not given]
    own = name or (path.resolve().parent.name if path.name == "config.json" else path.stem)
    values: dict[str, Scalar] = {"schema": MODEL_SCHEMA, "name": own, "description": config.description(named), **sizes}
    values["source"] = "Hugging Face config.json" + (f"; assumed: {', '.join(assumed)}" if assumed else "")
    source = str(path)
    items = {key: Node(value, source, config.line(key)) for key, value in values.items()}
    layers |= {"approximated": tuple(config.otherwise)} if config.otherwise else {}
    items |= {key: _node(value, source) for key, value in layers.items()}
    items["defaults"] = Node({"global_batch": Node(batch, source), "sequence_length": Node(length, source)}, source)
    return validate(Node(items, source), schema=Model, source=source)


def refuse_hub_name(name: str) -> None:
    """UsageError for a name of a model on the Hugging Face hub, with the file to download."""
    known = re.search(r"\.(ya?ml|json|toml|sh|sbatch|txt)$", name)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) and not known and not Path(name).parent.exists():
        raise UsageError(
            f"{name!r} is no file, but a name as on the Hugging Face hub, where nothing is looked up: download "
            f"https://huggingface.co/{name}/blob/main/config.json, then `axonn-tune models import config.json "
            "-o mine.yaml`"
        )


def _sizes(config: _Config, name: str, kind: Kind) -> dict[str, Scalar]:
    keys = _KEYS | kind.keys
    wide = 4 * config.size(keys["hidden"]) if kind.ffn_of_hidden else None
    # Of a hybrid the list of layers has their number, too.
    listed = config.value("layers_block_type") if kind.hybrid else None
    absent = {"ffn": wide, "layers": len(listed) if isinstance(listed, list) else None}
    sizes = {own: config.size(key, absent=absent.get(own)) for own, key in keys.items()}
    hidden, heads = sizes["hidden"], sizes["heads"]
    if kind.ffn_adjusted and config.flag("block_auto_adjust_ff_dim", absent=True):
        narrowed = int(2 * sizes["ffn"] // 3 * (config.number(("block_ffn_dim_multiplier",)) or 1.0))
        multiple = config.size("block_multiple_of", absent=256)
        sizes["ffn"] = -(-narrowed // multiple) * multiple
    if sizes["layers"] > MOST_LAYERS:
        config.report(keys["layers"], f"{sizes['layers']:,} layers, more than {MOST_LAYERS:,}")
    activation, (same, ours) = config.value(kind.activation), _ACTIVATIONS[kind.family]
    same, ours = (("relu2",), "squared ReLU") if kind.gated is False else (same, ours)
    if activation is not None and not re.fullmatch(r"[A-Za-z]\w*", str(activation), re.ASCII):
        config.report(kind.activation, f"must be the name of an activation, such as {same[0]}, not {activation!r:.40}")
    elif activation is not None and activation not in same:
        # Scripts of a hybrid have its own.
        apart = config.left_out if kind.hybrid else config.otherwise
        apart.append(f"its activation ({activation}, here {ours})")
    switched = (words for key, (on, words) in kind.flags.items() if config.flag(key, absent=on))
    config.otherwise += [*kind.approximated, *switched]
    of_qkv = kind.biases == "qkv" and all(config.flag(key, absent=False) for key in kind.bias_keys)
    if of_qkv:
        config.left_out.append("biases of queries, keys and values in the price")
    return {
        "family": kind.family,
        "norms": None if kind.mixers else kind.norms,
        "residual_streams": config.size("hc_mult") if kind.compressed else None,
        **sizes,
        "kv_heads": _kv_heads(config, name, kind, heads=heads),
        "head_dim": _head_dim(config, kind, hidden=hidden, heads=heads),
        "vocab": config.size("vocab_size"),
        "biases": kind.biases != "qkv" and _biases(config, kind),
        "tied_embeddings": config.flag("tie_word_embeddings", absent=False),
        "rotary_base": config.number(_BASES) if kind.family == "llama" else None,
        "norm_epsilon": config.number(_EPSILONS),
        "qkv_biases": of_qkv or None,
        # Of a type that is built as another, the class is another's, too.
        "block_class": kind.block if name in table().kinds else None,
    }


def _kv_heads(config: _Config, name: str, kind: Kind, *, heads: int) -> int:
    """Key and value heads; of Falcon one, unless its flags say otherwise."""
    if name == "falcon":
        grouped = config.flag("new_decoder_architecture", absent=False)
        single = config.flag("multi_query", absent=True) and not grouped
        return 1 if single else config.size("num_kv_heads", absent=heads)
    # A config.json without the key means the default of the model's class, which may not follow from the sizes.
    must = kind.kv_heads in kind.stated and not config.states(kind.kv_heads)
    return config.size(kind.kv_heads, absent=None if must else heads) if kind.kv_heads else heads


def _head_dim(config: _Config, kind: Kind, *, hidden: int, heads: int) -> int:
    if kind.latent:
        return config.size("qk_nope_head_dim") + config.size("qk_rope_head_dim")
    if config.value("head_dim") is not None or "head_dim" in kind.stated:
        return config.size("head_dim")
    total, parts = ((_KEYS | kind.keys)[own] for own in ("hidden", "heads"))
    if hidden % heads and not any(problem.path in (total, parts) for problem in config.problems):
        config.report(total, f"{hidden} is not divisible by {parts} ({heads}), and there is no head_dim")
    return max(1, hidden // heads)


def _biases(config: _Config, kind: Kind) -> bool:
    """Whether all linear layers have biases; biases of only some layers are ignored and noted."""
    has = {key: config.flag(key, absent=kind.biases == "all") for key in kind.bias_keys}
    if any(has.values()) and not all(has.values()):
        config.otherwise.append(f"biases of the {'attention' if has['attention_bias'] else 'MLP'} layers")
    return all(has.values())


def _node(value: Plain, source: str) -> Node:
    """A value and all within it, from one source."""
    if isinstance(value, dict):
        return Node({key: _node(item, source) for key, item in value.items()}, source)
    return Node([_node(item, source) for item in value] if isinstance(value, tuple) else value, source)


def _layer_types(config: _Config, kind: Kind, *, layers: int) -> dict[str, Plain]:
    """`layers`, `layer_types` and `mtp_layers`, as far as they say something."""
    if kind.hybrid:
        return _hybrid(config, kind)
    attention = (_compressed if kind.compressed else partial(_attention, kind=kind))(config, layers=layers)
    mlps = _mlps(config, kind, layers)
    windows, experts = (len({name for name, _ in part}) > 1 for part in (attention, mlps))
    names: list[str] = []
    types: dict[str, Plain] = {}
    for (attends, own), (computes, others) in zip(attention, mlps, strict=True):
        names.append(f"{attends}-{computes}" if windows and experts else attends if windows else computes)
        types.setdefault(names[-1], own | others)
    found: dict[str, Plain] = {"layer_types": types} if any(types.values()) else {}
    found |= {"layers": _pattern(names)} if len(types) > 1 else {}
    predicting = _predicting(config)
    if predicting and not kind.predicts:
        config.left_out.append("layers of multi-token prediction, which are otherwise")
    return found | (predicting if kind.predicts else {})


def _predicting(config: _Config) -> dict[str, Plain]:
    """`mtp_layers`, if there are any."""
    layers = config.size("mtp_num_hidden_layers", absent=config.size("num_mtp_layers", absent=0, least=0), least=0)
    layers = config.size("num_nextn_predict_layers", absent=layers, least=0)
    return {"mtp_layers": layers} if layers else {}


def _hybrid(config: _Config, kind: Kind) -> dict[str, Plain]:
    """The same of a model whose layers are listed, each of one part."""
    key = "layers_block_type" if config.value("layers_block_type") else "hybrid_override_pattern"
    stated = config.value(key)
    Model.prepare()
    blocks = _BLOCKS | {name: section for section, mixer in MIXERS.items() for name in mixer.NAMES}
    names = [blocks.get(str(one), "") for one in stated] if isinstance(stated, list | str) else []
    if not 0 < len(names) <= MOST_LAYERS or not all(names):
        config.report(key, f"must list up to {MOST_LAYERS:,} of {', '.join(blocks)}, not {stated!r:.40}")
        return {}
    alone: dict[str, Plain] = {"attention": False, "gated": False}
    types: dict[str, Plain] = {}
    for name in dict.fromkeys(names):
        if name in MIXERS:
            types[name] = _mixer(config, name) | {"mlp": False}
        elif name == "attention":
            types[name] = {"mlp": False, "rotary_share": 0}
        else:
            assert kind.experts is not None
            types[name] = alone | ({"experts": _experts(config, kind.experts)} if name == "moe" else {})
    return {"layers": _pattern(names), "layer_types": types, **_predicting(config)}


def _mixer(config: _Config, section: str) -> dict[str, Plain]:
    """A layer with this in place of attention."""
    return {"attention": False, section: _mixer_sizes(config, section)}


def _mixer_sizes(config: _Config, section: str) -> dict[str, Plain]:
    sizes, fields = MIXERS[section].KEYS.items(), MIXERS[section].model_fields
    found: dict[str, Plain] = {}
    for own, theirs in sizes:
        if isinstance(flag := fields[own].default, bool):
            found[own] = config.flag(theirs, absent=flag)
        else:
            found[own] = config.size(theirs, absent=None if fields[own].is_required() else fields[own].default)
    return found


def _mixed(config: _Config, kind: Kind, layers: int) -> list[str]:
    """What stands in place of attention in each layer, by section; "" of one that attends."""
    if not kind.mixers:
        return [""] * layers
    Model.prepare()
    stated, only = config.listed("layer_types", layers), next(iter(kind.mixers.values()))
    if isinstance(stated, list) and len(stated) == layers:
        return [kind.mixers.get(str(one), "") for one in stated]
    if (listed := config.places(kind.mixed_key)) is not None:
        return [only if layer + 1 in listed else "" for layer in range(layers)]
    if (attending := config.places(kind.attending_key)) is not None:
        return ["" if layer in attending else only for layer in range(layers)]
    every = config.size(kind.full_every_key, absent=kind.full_every, least=0)
    if not every:
        config.report("layer_types", f"missing, or not of {layers} layers: which have {MIXERS[only].TITLE}?")
    return [only if not every or (layer + 1) % every else "" for layer in range(layers)]


def _pattern(names: Sequence[str]) -> str:
    """Names of layers in order, as a pattern: a repeated group if they are that, else runs."""

    def runs(part: Sequence[str]) -> str:
        counted = [(name, len(list(run))) for name, run in groupby(part)]
        return " ".join(name if count == 1 else f"{name}*{count}" for name, count in counted)

    for period in range(2, min(len(names) // 2, 64) + 1):
        if len(names) % period == 0 and list(names[:period]) * (len(names) // period) == list(names):
            return f"({runs(names[:period])})*{len(names) // period}"
    return runs(names)


def _attention(config: _Config, kind: Kind, layers: int) -> list[tuple[str, dict[str, Plain]]]:
    """Name and values of each layer's attention."""
    norms = kind.qk_norms or config.flag(kind.qk_norms_key, absent=False)
    share = config.number(("partial_rotary_factor",)) or 1
    own: dict[str, Plain] = {"rotary_share": share} if share != 1 and kind.family == "llama" else {}
    own |= {"sinks": True} if kind.sinks else {}
    own |= {"norms": kind.norms} if kind.mixers and kind.norms else {}
    gate = "head" if kind.output_gate == "head" else "element"
    own |= {"output_gate": gate} if config.flag("attn_output_gate", absent=bool(kind.output_gate)) else {}
    if kind.latent:
        rank = {} if config.value("q_lora_rank") is None else {"query_rank": config.size("q_lora_rank")}
        own["latent"] = {**rank, **{name: config.size(key) for name, key in _LATENT.items()}}
    indexer: dict[str, Plain] = {name: config.size(key) for name, key in _INDEXER.items()} if kind.indexer else {}
    window, found = _window(config, kind), []
    apart = _apart(config, kind.local), _apart(config, kind.full)
    marks = _full(config, kind, layers), _shared(config, layers), _mixed(config, kind, layers)
    for full, shared, mixer in zip(*marks, strict=True):
        if mixer:
            found.append((mixer, _mixer(config, mixer)))
            continue
        unrotated = full and kind.full_unrotated
        values = own | apart[full] | ({"window": window} if window and not full else {})
        # Llama 4 normalizes queries and keys where it rotates them.
        values |= {"rotary_share": 0} if unrotated else {"qk_norms": norms} if norms else {}
        if indexer:
            values["indexer"] = indexer | ({"shared": True} if shared else {})
        whole = kind.indexer or kind.mixers or (full and (window or unrotated))
        found.append(("shared" if shared else "full" if whole else "local", values))
    return found


def _apart(config: _Config, keys: dict[str, str]) -> dict[str, Plain]:
    """What the attention of some layers has for itself, as far as the file says so."""
    found: dict[str, Plain] = {}
    for name, key in keys.items():
        if isinstance(config.value(key), bool):
            found |= {name: True} if config.flag(key, absent=False) else {}
        elif config.value(key) is not None:
            found[name] = config.size(key)
    return found


def _compressed(config: _Config, *, layers: int) -> list[tuple[str, dict[str, Plain]]]:
    """The same of compressed attention, by its ratios, which prediction layers have behind, or names of layers."""
    key = "compress_ratios" if config.value("compress_ratios") else "layer_types"
    stated = config.value(key)
    names = [_COMPRESSED.get(one) for one in stated[:layers]] if isinstance(stated, list) else []
    if len(names) != layers or None in names:
        known = [str(one) for one in _COMPRESSED if isinstance(one, str) == (key == "layer_types")]
        config.report(key, f"must say one of {', '.join(known)} of each of {layers} layers, not {stated!r:.40}")
        return [("window", {})] * layers
    Model.prepare()
    sizes = _mixer_sizes(config, "compressed")
    index: dict[str, Plain] = {name: config.size(theirs) for name, theirs in _INDEXER.items()}
    others: dict[str | None, dict[str, Plain]] = {"sparse": {"ratio": 4, "indexer": index}, "heavy": {"ratio": 128}}
    return [(str(one), {"attention": False, "compressed": sizes | others.get(one, {})}) for one in names]


def _shared(config: _Config, layers: int) -> list[bool]:
    """Whether each layer shares the indexer of one before it: by a list, a pattern of F and S, or every so many."""
    stated = config.value("indexer_types") or config.value("index_topk_pattern")
    if stated is None:
        every, offset = (
            config.size("index_topk_freq", absent=1),
            config.size("index_skip_topk_offset", absent=2, least=0),
        )
        return [max(layer - offset + 1, 0) % every != 0 for layer in range(layers)]
    words = [{"F": "full", "S": "shared"}.get(str(one), str(one)) for one in stated]
    if len(words) != layers or {*words} - {"full", "shared"} or words[0] == "shared":
        key = "indexer_types" if config.value("indexer_types") else "index_topk_pattern"
        config.report(key, f"must say full or shared of each of {layers} layers, of the first full, not {stated!r:.40}")
        return [False] * layers
    return [one == "shared" for one in words]


def _window(config: _Config, kind: Kind) -> int:
    """The window of layers that have one, 0 without or where it is as long as the sequence."""
    window, longest = config.size(kind.window, absent=0, least=0), config.value("max_position_embeddings")
    off = kind.window_switch and not config.flag(kind.window_switch, absent=False)
    return 0 if off or (isinstance(longest, int) and window >= longest) else window


def _full(config: _Config, kind: Kind, layers: int) -> list[bool]:
    """Whether each layer attends to the whole sequence."""
    key = "layer_types"
    if not config.value(key):
        key = "no_rope_layers" if kind.full_unrotated else "hybrid_layer_pattern"
    stated = config.listed(key, layers)
    if stated:
        known = [*_ATTENDS, *kind.mixers] if key == "layer_types" else [0, 1]
        others = sorted({str(one) for one in stated if one not in known}) if isinstance(stated, list) else [str(stated)]
        if others or len(stated) != layers:
            wrong = f"layers other than {', '.join(map(str, known))} are not supported: {', '.join(others):.80}"
            config.report(key, wrong if others else f"{len(stated)} items for {layers} layers")
            return [False] * layers
        return [_ATTENDS.get(one, not one) for one in stated]
    if kind.window_switch:
        first = config.size("max_window_layers", absent=layers, least=0)
        return [at < first for at in range(layers)]
    every = config.size(kind.full_every_key, absent=kind.full_every, least=0)
    return [every > 0 and (at + 1) % every == 0 for at in range(layers)]


def _mlps(config: _Config, kind: Kind, layers: int) -> list[tuple[str, dict[str, Plain]]]:
    """Name and values of each layer's MLP or experts."""
    own: dict[str, Plain] = {} if kind.gated is None else {"gated": kind.gated}
    if kind.experts is None or (kind.experts.switch and not config.flag(kind.experts.switch, absent=False)):
        return [("dense", own)] * layers
    every = config.listed("moe_layer_freq", layers)
    marks = isinstance(every, list) and len(every) == layers and {*every} <= {0, 1}
    if every not in (None, 1) and not marks:
        config.report("moe_layer_freq", f"{every!r:.40} is not supported, only 1, or 0 or 1 of each layer")
    first = config.size("first_k_dense_replace", absent=config.size("num_dense_layers", absent=0, least=0), least=0)
    step = config.size("decoder_sparse_step", absent=config.size("interleave_moe_layer_step", absent=1))
    only, never = config.places("moe_layers"), config.places("mlp_only_layers")
    dense: tuple[str, dict[str, Plain]] = ("dense", own)
    moe: tuple[str, dict[str, Plain]] = ("moe", own | {"experts": _experts(config, kind.experts)})
    listed = every if marks else config.listed("mlp_layer_types", layers)
    if isinstance(listed, list) and len(listed) == layers:
        return [moe if one in (1, "sparse") else dense for one in listed]
    routed = (
        at in only if only is not None else at >= first and (at + 1) % step == 0 and at not in (never or ())
        for at in range(layers)
    )
    return [moe if one else dense for one in routed]


def _experts(config: _Config, keys: ExpertKeys) -> dict[str, Plain]:
    """The experts of a layer."""
    count, *others = [key for key in _COUNTS if config.value(key) is not None] or _COUNTS[:1]
    for key in others:
        if (found := config.value(key)) != config.value(count):
            config.report(
                key, f"{found!r:.40}, but {count} is {config.value(count)!r:.40}: one number of experts is needed"
            )
    width, shared, score = config.size(keys.width), 0, config.value("scoring_func")
    score = keys.score if score is None else score
    if score not in get_args(Score):
        config.report("scoring_func", f"must be one of {', '.join(get_args(Score))}, not {score!r:.40}")
    if keys.shared:
        number = config.size(keys.shared, absent=0, least=0)
        if keys.shared.startswith("n_") and number > _MOST_SHARED:
            config.report(keys.shared, f"{number:,} shared experts, more than {_MOST_SHARED}")
        shared = number * (width if keys.shared.startswith("n_") else 1)
    grouped = config.value("topk_method") != "greedy"
    return {
        "count": config.size(count),
        "per_token": config.size("num_experts_per_tok"),
        "width": width,
        "shared_width": shared,
        "shared_gate": keys.shared_gate and shared > 0,
        "latent_width": config.value("moe_latent_size") and config.size("moe_latent_size"),
        "clamp": config.number(("swiglu_limit",)),
        "score": score,
        "normalized": config.flag("norm_topk_prob", absent=True),
        "scaling": config.number(("routed_scaling_factor",)),
        "score_bias": keys.score_bias,
        "groups": config.size("n_group", absent=1) if grouped else 1,
        "chosen_groups": config.size("topk_group", absent=1) if grouped else 1,
    }


class _Config:
    """A config.json being read: its values, its problems, what was ignored, and what its network has otherwise."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[Problem] = []
        self.left_out: list[str] = []
        self.otherwise: list[str] = []
        self._text = read_text(path)
        try:
            values = json.loads(self._text)
        except (ValueError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            raise DocumentError(str(path), [Problem("", f"not valid JSON: {error}", line)]) from error
        if not isinstance(values, dict):
            raise DocumentError(str(path), [Problem("", "must hold one JSON object")])
        if text := next((one for one in map(values.get, _TEXT) if isinstance(one, dict)), None):
            # Of a model with a vision tower, whose sizes stand in a section of their own: some name the text's type.
            own = {key: values[key] for key in ("architectures", "model_type", "tie_word_embeddings") if key in values}
            typed = "model_type" if plain_type(text.get("model_type")) in kinds() else ""
            values = own | text | {key: own[key] for key in {"architectures", "model_type"} - {typed} if key in own}
            self.left_out.append("the vision tower")
        elif values.pop("vision_config", None) and plain_type(values.get("model_type")) in kinds():
            self.left_out.append("the vision tower")
        self._values: dict[str, Any] = values
        for key, value in values.items():
            words = value if isinstance(value, list) else [value]
            if odd := next(filter(None, (CONTROL.search(word) for word in words if isinstance(word, str))), None):
                self.report(key, f"holds {odd[0]!r}, which no text needs")

    def value(self, key: str) -> Any:  # noqa: ANN401 - JSON
        """What the file says, or None."""
        section, _, inner = key.partition(".")
        found = self._values.get(section)
        return found.get(inner) if inner and isinstance(found, dict) else None if inner else found

    def listed(self, key: str, layers: int) -> Any:  # noqa: ANN401 - JSON
        """The same, of a list with the layers of multi-token prediction behind them only the others."""
        found, predicting = self.value(key), self.value("num_nextn_predict_layers")
        padded = isinstance(found, list) and isinstance(predicting, int) and len(found) == layers + predicting
        return found[:layers] if padded else found

    def states(self, key: str) -> bool:
        """Whether the file has the key, if only with null."""
        section, _, inner = key.partition(".")
        return inner in self._values.get(section, ()) if inner else key in self._values

    def line(self, key: str) -> int | None:
        """Where a key is first written."""
        match = re.search(rf'"{re.escape(key.rpartition(".")[2])}"\s*:', self._text)
        return self._text.count("\n", 0, match.start()) + 1 if match else None

    def report(self, key: str, message: str) -> None:
        """Note a problem at a key, once."""
        if (found := Problem(key, message, self.line(key))) not in self.problems:
            self.problems.append(found)

    def kind(self) -> tuple[str, Kind]:
        """The model type, if it is one that can be mapped, and how; DocumentError else."""
        stated, known = self.value("model_type"), kinds()
        if stated is None:
            raise DocumentError(str(self.path), [Problem("", "no 'model_type': not a Hugging Face model config")])
        kind = plain_type(stated)
        if kind in known:
            stated = {name: self.value(other) for other, name in known[kind].renamed.items() if self.states(other)}
            self._values = known[kind].defaults | stated | self._values
            return kind, known[kind]
        # Another model's name is none for this one: only typing mistakes are, and digits are another version's.
        alike = (one for one in known if re.findall(r"\d", one) == re.findall(r"\d", kind))
        near = sorted((edits(kind, one, 2), one) for one in alike if edits(kind, one, 2) <= 2)
        why = table().lacking.get(kind, "")
        said = f" ({why})" if why else "".join(f", did you mean {one!r}?" for _, one in near[:1])
        self.report("model_type", f"{stated!r:.40} is not supported{said}; supported: {', '.join(table().kinds)}")
        # Experts and latent attention are supported in types that have them.
        self.refuse_parts(known["deepseek_v3"])
        raise DocumentError(str(self.path), self.problems)

    def refuse_parts(self, kind: Kind) -> None:
        """Report every model part without operations in this tool or model type; note those that may be ignored."""
        has = (
            *(_COUNTS if kind.experts else ()),
            *(("kv_lora_rank", "q_lora_rank") if kind.latent or kind.compressed else ()),
        )
        for key, part in _REFUSED.items():
            if self.value(key) not in (None, False, 0) and key not in has:
                self.report(key, f"{part} is not supported")
        self.left_out += [words for key, words in _LEFT_OUT.items() if self.value(key) not in (None, False, 1.0)]
        if self._rope.get("rope_type", "default") != "default":
            self.left_out.append(_ROPE_SCALING)

    @property
    def _rope(self) -> dict[str, Any]:
        """What newer files say of rotary positions."""
        found = self.value("rope_parameters")
        return found if isinstance(found, dict) else {}

    def number(self, keys: Iterable[str]) -> float | None:
        """The first number of these keys; what is wrong with it is noted."""
        whole = self._rope.get("full_attention")
        for key in keys:
            inner = whole.get(key) if isinstance(whole, dict) and key in _BASES else None
            if isinstance(value := self._rope.get(key, inner or self.value(key)), int | float):
                try:
                    return read_number(value, least=1e-30)
                except ValueError as error:
                    self.report(key, str(error))
            elif isinstance(value, str) or (isinstance(value, dict) and key not in _BASES):
                # Bases may be stated for each type of layer.
                self.report(key, f"must be a number, not {value!r:.40}")
        return None

    def size(self, key: str, *, absent: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`; what is wrong with it is noted, and 1 returned."""
        value = self.value(key)
        if value is None and absent is not None:
            return absent
        if isinstance(value, list) and value and value == value[:1] * len(value):
            # Of each layer, all alike.
            value = value[0]
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST_SIZE:
            return value
        wanted = "a positive whole number" if least else "a whole number"
        self.report(key, f"must be {wanted}, not {value!r:.40}" if self.states(key) else "missing")
        return 1

    def places(self, key: str) -> frozenset[int] | None:
        """Indices of layers, None without the key; what is wrong with them is noted."""
        value = self.value(key)
        if isinstance(value, str) and re.fullmatch(r"\d+(, *\d+)*", value, re.ASCII):
            value = [int(one) for one in value.split(",")]
        if value is None or (isinstance(value, list) and all(isinstance(one, int) for one in value)):
            return None if value is None else frozenset(value)
        self.report(key, f"must be a list of whole numbers, not {value!r:.40}")
        return None

    def flag(self, key: str, *, absent: bool) -> bool:
        """True or false; what is wrong with it is noted."""
        value = self.value(key)
        if value is not None and not isinstance(value, bool):
            self.report(key, f"must be true or false, not {value!r:.40}")
        return absent if value is None else bool(value)

    def description(self, kind: str) -> str:
        """One line on the model and on what was ignored."""
        architectures = self.value("architectures")
        title = architectures[0] if isinstance(architectures, list) and architectures else kind
        left_out = [*self.otherwise, *self.left_out]
        return f"{title}, imported" + (f"; left out: {'; '.join(left_out)}" if left_out else "")
