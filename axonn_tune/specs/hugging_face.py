"""Builds a model document from a local Hugging Face config.json.

Supported are gpt2, llama, mistral, qwen2 and qwen3, whose blocks are the two families of this tool. What would change
the cost noticeably (experts, latent attention, sliding windows, cross-attention, parallel residual streams) is refused
by name. What changes it by less than the error of any prediction (biases on some of the layers, norms of queries and
keys, the scaling of rotary positions) is ignored, and the description says so.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from axonn_tune.errors import DocumentError, Problem, UsageError, suggest
from axonn_tune.specs.document import Node, Position, Scalar, validate
from axonn_tune.specs.loading import read_text
from axonn_tune.specs.model import MODEL_SCHEMA, Model

TOKENS_PER_STEP = 4 * 2**20
LONGEST_DEFAULT_SEQUENCE = 8192

_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_KEYS = {
    "gpt2": {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "max_sequence_length": "n_positions"},
    "llama": {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "ffn": "intermediate_size",
        "max_sequence_length": "max_position_embeddings",
    },
}
# Keys that mark model parts without operations in this tool.
_REFUSED = {
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "multi-head latent attention",
    "q_lora_rank": "multi-head latent attention",
    "num_nextn_predict_layers": "multi-token prediction layers",
    "is_encoder_decoder": "an encoder beside the decoder",
    "add_cross_attention": "cross-attention",
    "use_parallel_residual": "attention and MLP in parallel",
    "vision_config": "a vision tower",
}
_ROPE_SCALING = "scaling of rotary positions"
_LEFT_OUT = {
    "rope_scaling": _ROPE_SCALING,
    "partial_rotary_factor": "partial rotary positions",
    "quantization_config": "quantisation",
}
_UNPRICED = ("rope_theta", "rms_norm_eps", "layer_norm_epsilon")
"""Numbers that no cost depends on, kept in the description for whoever writes a training script."""
_ACTIVATIONS = {"gpt2": ("activation_function", ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "GELU")}
_GATED_ACTIVATION = ("hidden_act", ("silu", "swish"), "SiLU")


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
    kind = config.kind()
    config.refuse_parts()
    sizes = _gpt2(config) if kind == "gpt2" else _llama(config)
    if config.problems:
        raise DocumentError(str(path), config.problems)
    length = sequence_length or min(int(sizes["max_sequence_length"] or 0), LONGEST_DEFAULT_SEQUENCE)
    batch = global_batch or max(1, TOKENS_PER_STEP // length)
    assumed = [words for words, given in (("batch", global_batch), ("sequence length", sequence_length)) if not given]
    own = name or (path.resolve().parent.name if path.name == "config.json" else path.stem)
    values: dict[str, Scalar] = {"schema": MODEL_SCHEMA, "name": own, "description": config.description(kind), **sizes}
    values["source"] = "Hugging Face config.json" + (f"; assumed: {', '.join(assumed)}" if assumed else "")
    place = Position(str(path))
    items = {key: Node(value, config.place(key)) for key, value in values.items()}
    defaults = {"global_batch": Node(batch, place), "sequence_length": Node(length, place)}
    root = Node({**items, "defaults": Node(defaults, place)}, place)
    return validate(root, schema=Model, source=str(path))


def refuse_hub_name(name: str) -> None:
    """UsageError for a name of a model on the Hugging Face hub, with the file to download."""
    known = re.search(r"\.(ya?ml|json|toml|sh|sbatch|txt)$", name)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) and not known and not Path(name).parent.exists():
        raise UsageError(
            f"{name!r} is no file, but a name as on the Hugging Face hub, where nothing is looked up: download "
            f"https://huggingface.co/{name}/blob/main/config.json, then `axonn-tune models import config.json "
            "-o mine.yaml`"
        )


def _gpt2(config: _Config) -> dict[str, Scalar]:
    sizes = config.sizes("gpt2")
    hidden, heads = sizes["hidden"], sizes["heads"]
    config.check_activation(*_ACTIVATIONS["gpt2"])
    inner = config.value("n_inner")
    ffn = config.size("n_inner") if inner is not None else 4 * hidden
    return {
        "family": "gpt",
        **sizes,
        "kv_heads": heads,
        "head_dim": config.even_share(hidden, heads, "n_embd", "n_head"),
        "ffn": ffn,
        "vocab": config.size("vocab_size"),
        "biases": True,
        "tied_embeddings": config.flag("tie_word_embeddings", absent=True),
    }


def _llama(config: _Config) -> dict[str, Scalar]:
    kind = str(config.value("model_type"))
    sizes = config.sizes("llama")
    config.check_activation(*_GATED_ACTIVATION)
    _check_attention(config)
    # A config.json without these keys means the defaults of the model's class; only Llama's follow from the sizes.
    follows = kind == "llama" or config.states("num_key_value_heads")
    kv_heads = config.size("num_key_value_heads", absent=sizes["heads"] if follows else None)
    if config.value("head_dim") is not None or kind == "qwen3":
        head_dim = config.size("head_dim")
    else:
        head_dim = config.even_share(sizes["hidden"], sizes["heads"], "hidden_size", "num_attention_heads")
    return {
        "family": "llama",
        **sizes,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab": config.size("vocab_size"),
        "biases": _llama_biases(config, kind),
        "tied_embeddings": config.flag("tie_word_embeddings", absent=False),
    }


def _check_attention(config: _Config) -> None:
    """Refuse attention over less than the whole sequence."""
    window, longest = config.value("sliding_window"), config.value("max_position_embeddings")
    if config.value("model_type") == "mistral" and not config.states("sliding_window"):
        config.report("sliding_window", "missing, which means a window of 4096 tokens; null if there is none")
    # Qwen's configs state a window that a flag, off by default, switches on; elsewhere the window alone does.
    on = config.flag("use_sliding_window", absent=config.value("model_type") not in ("qwen2", "qwen3"))
    if isinstance(window, int) and isinstance(longest, int) and on and window < longest:
        config.report("sliding_window", f"attention over a window of {window} tokens is not supported")
    layers = config.value("layer_types") or []
    others = sorted({str(layer) for layer in layers} - {"full_attention"}) if isinstance(layers, list) else []
    if others and not (isinstance(window, int) and on):
        config.report("layer_types", f"layers other than full_attention are not supported: {', '.join(others)}")


def _llama_biases(config: _Config, kind: str) -> bool:
    """Whether all linear layers have biases; biases of only some layers are ignored and noted."""
    attention = config.flag("attention_bias", absent=False)
    mlp = config.flag("mlp_bias", absent=False)
    if kind == "qwen2":
        config.left_out.append("biases of queries, keys and values")
    elif attention != mlp:
        config.left_out.append("biases of the attention layers" if attention else "biases of the MLP layers")
    if kind == "qwen3":
        config.left_out.append("norms of queries and keys")
    return attention and mlp and kind != "qwen2"


class _Config:
    """A config.json being read: its values, its problems, and what was ignored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[Problem] = []
        self.left_out: list[str] = []
        self._text = read_text(path)
        try:
            values = json.loads(self._text)
        except (ValueError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            raise DocumentError(str(path), [Problem("", f"not valid JSON: {error}", line)]) from error
        if not isinstance(values, dict):
            raise DocumentError(str(path), [Problem("", "must hold one JSON object")])
        self._values: dict[str, Any] = values

    def value(self, key: str) -> Any:  # noqa: ANN401 - JSON
        """What the file says, or None."""
        return self._values.get(key)

    def states(self, key: str) -> bool:
        """Whether the file has the key, if only with null."""
        return key in self._values

    def place(self, key: str) -> Position:
        """Where a key is first written."""
        match = re.search(rf'"{re.escape(key)}"\s*:', self._text)
        return Position(str(self.path), self._text.count("\n", 0, match.start()) + 1 if match else None)

    def report(self, key: str, message: str) -> None:
        """Note a problem at a key."""
        self.problems.append(Problem(key, message, self.place(key).line))

    def kind(self) -> str:
        """The model type, if it is one that can be mapped; DocumentError else."""
        kind, known = self.value("model_type"), ("gpt2", *_LLAMA_LIKE)
        if kind in known:
            return str(kind)
        if kind is None:
            raise DocumentError(str(self.path), [Problem("", "no 'model_type': not a Hugging Face model config")])
        self.report(
            "model_type", f"{kind!r} is not supported{suggest(str(kind), known)}; supported: {', '.join(known)}"
        )
        if kind == "gpt_neox":
            self.report("model_type", "its LayerNorm with rotary positions is neither of this tool's families")
        self.refuse_parts()
        raise DocumentError(str(self.path), self.problems)

    def refuse_parts(self) -> None:
        """Report every model part without operations in this tool; note those it may ignore."""
        for key, part in _REFUSED.items():
            if self.value(key) not in (None, False, 0):
                self.report(key, f"{part} is not supported")
        self.left_out += [words for key, words in _LEFT_OUT.items() if self.value(key) not in (None, False, 1.0)]
        # Newer files keep the base and the scaling of rotary positions together.
        rope = self.value("rope_parameters")
        rope = rope if isinstance(rope, dict) else {}
        if rope.get("rope_type", "default") != "default":
            self.left_out.append(_ROPE_SCALING)
        numbers = {key: rope.get(key, self.value(key)) for key in _UNPRICED}
        self.left_out += [f"{key} {value:g}" for key, value in numbers.items() if isinstance(value, int | float)]

    def sizes(self, family: str) -> dict[str, int]:
        """The sizes whose keys this family states, under this tool's names."""
        return {own: self.size(key) for own, key in _KEYS[family].items()}

    def size(self, key: str, *, absent: int | None = None) -> int:
        """A positive whole number; what is wrong with it is noted, and 1 returned."""
        value = self.value(key)
        if value is None and absent is not None:
            return absent
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        words = "missing" if not self.states(key) else f"must be a positive whole number, not {value!r}"
        self.report(key, words)
        return 1

    def flag(self, key: str, *, absent: bool) -> bool:
        """True or false; what is wrong with it is noted."""
        value = self.value(key)
        if value is not None and not isinstance(value, bool):
            self.report(key, f"must be true or false, not {value!r}")
        return absent if value is None else bool(value)

    def even_share(self, total: int, parts: int, total_key: str, parts_key: str) -> int:
        """total / parts, which must come out even."""
        known = not any(problem.path in (total_key, parts_key) for problem in self.problems)
        if known and total % parts:
            self.report(total_key, f"{total} is not divisible by {parts_key} ({parts}), and there is no head_dim")
        return max(1, total // parts)

    def check_activation(self, key: str, same: tuple[str, ...], ours: str) -> None:
        """Note an activation that costs the same but is another function."""
        value = self.value(key)
        if value is not None and value not in same:
            self.left_out.append(f"its activation ({value}, here {ours})")

    def description(self, kind: str) -> str:
        """One line on the model and on what was ignored."""
        architectures = self.value("architectures")
        title = architectures[0] if isinstance(architectures, list) and architectures else kind
        return f"{title}, imported" + (f"; left out: {', '.join(self.left_out)}" if self.left_out else "")
