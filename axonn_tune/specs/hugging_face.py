"""Builds a model document from a local Hugging Face config.json.

Blocks that cost the same as those of this tool's two families are imported, also where norms, positions, biases or
the residual stream differ: `_KINDS` says how, and the description names each difference. What would change the cost
noticeably (experts, latent attention, sliding windows, cross-attention) is refused by name. Rotary base, norm epsilon
and biases of queries, keys and values are kept for scripts. Source of keys and of what files without them mean:
transformers 5.23.0, models/*/configuration_*.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from axonn_tune.errors import CONTROL, DocumentError, Problem, UsageError, suggest
from axonn_tune.specs.document import Node, Scalar, validate
from axonn_tune.specs.loading import read_text
from axonn_tune.specs.model import MODEL_SCHEMA, Model
from axonn_tune.units import read_number

TOKENS_PER_STEP = 4 * 2**20
LONGEST_DEFAULT_SEQUENCE = 8192

_SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "max_sequence_length": "max_position_embeddings",
}
_WITH_FFN = {**_SIZES, "ffn": "intermediate_size"}
_ROTARY = "rotary positions (here a learned table)"
_PARALLEL = "attention and MLP in parallel (here one after the other)"
_QK_NORMS = "norms of queries and keys"


@dataclass(frozen=True)
class _Kind:
    """How a model type is mapped.

    keys: of our sizes; ffn without a key is ffn_key's, or 4 times hidden. stated: keys that a file must have, since the
    defaults of its class do not follow from other sizes. kv_heads: key, or none for as many as heads. tied, biases: in
    files that do not say. approximated: differences in words; flags: those that a key switches, with its default.
    """

    family: Literal["gpt", "llama"]
    keys: Mapping[str, str] = field(default_factory=lambda: _WITH_FFN)
    ffn_key: str = ""
    kv_heads: str = "num_key_value_heads"
    stated: tuple[str, ...] = ()
    defaults: Mapping[str, int] = field(default_factory=dict)
    activation: str = "hidden_act"
    tied: bool = False
    approximated: tuple[str, ...] = ()
    flags: Mapping[str, tuple[bool, str]] = field(default_factory=dict)


_ACTIVATIONS = {
    "llama": (("silu", "swish"), "SiLU"),
    "gpt": (("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "GELU"),
}
"""Names of the activation that is priced, and ours."""
_OF_QWEN = ("num_key_value_heads",)
_KINDS = {
    "gpt2": _Kind(
        "gpt",
        {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "max_sequence_length": "n_positions"},
        ffn_key="n_inner",
        kv_heads="",
        activation="activation_function",
        tied=True,
    ),
    "llama": _Kind("llama"),
    "mistral": _Kind("llama", stated=_OF_QWEN),
    "qwen2": _Kind("llama", stated=_OF_QWEN, approximated=("biases of queries, keys and values in the price",)),
    "qwen3": _Kind("llama", stated=(*_OF_QWEN, "head_dim"), approximated=(_QK_NORMS,)),
    "olmo2": _Kind("llama", approximated=(_QK_NORMS, "norms after attention and MLP (here before)")),
    "gemma": _Kind("llama", stated=(*_OF_QWEN, "head_dim"), tied=True),
    "phi": _Kind(
        "gpt",
        approximated=(_ROTARY, _PARALLEL, "the bias of the LM head"),
        flags={"qk_layernorm": (False, _QK_NORMS)},
    ),
    "gpt_neox": _Kind("gpt", kv_heads="", approximated=(_ROTARY,), flags={"use_parallel_residual": (True, _PARALLEL)}),
    "falcon": _Kind(
        "gpt",
        _SIZES,
        ffn_key="ffn_hidden_size",
        defaults={"max_position_embeddings": 2048},
        activation="activation",
        tied=True,
        flags={"parallel_attn": (True, _PARALLEL), "alibi": (False, "ALiBi (here a learned table)")},
    ),
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
    "vision_config": "a vision tower",
}
_ROPE_SCALING = "scaling of rotary positions"
_LEFT_OUT = {
    "rope_scaling": _ROPE_SCALING,
    "partial_rotary_factor": "partial rotary positions",
    "quantization_config": "quantisation",
}
_BASES, _EPSILONS = ("rope_theta", "rotary_emb_base"), ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
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
    kind = config.kind()
    config.refuse_parts()
    sizes = _sizes(config, kind, _KINDS[kind])
    if config.problems:
        raise DocumentError(str(path), config.problems)
    length = sequence_length or min(int(sizes["max_sequence_length"] or 0), LONGEST_DEFAULT_SEQUENCE)
    batch = global_batch or max(1, TOKENS_PER_STEP // length)
    assumed = [words for words, given in (("batch", global_batch), ("sequence length", sequence_length)) if not given]
    own = name or (path.resolve().parent.name if path.name == "config.json" else path.stem)
    values: dict[str, Scalar] = {"schema": MODEL_SCHEMA, "name": own, "description": config.description(kind), **sizes}
    values["source"] = "Hugging Face config.json" + (f"; assumed: {', '.join(assumed)}" if assumed else "")
    source = str(path)
    items = {key: Node(value, source, config.line(key)) for key, value in values.items()}
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


def _sizes(config: _Config, name: str, kind: _Kind) -> dict[str, Scalar]:
    sizes = {own: config.size(key, absent=kind.defaults.get(key)) for own, key in kind.keys.items()}
    hidden, heads = sizes["hidden"], sizes["heads"]
    if kind.ffn_key:
        sizes["ffn"] = 4 * hidden if config.value(kind.ffn_key) is None else config.size(kind.ffn_key)
    activation, (same, ours) = config.value(kind.activation), _ACTIVATIONS[kind.family]
    if activation is not None and activation not in same:
        config.left_out.append(f"its activation ({activation}, here {ours})")
    switched = (words for key, (on, words) in kind.flags.items() if config.flag(key, absent=on))
    config.left_out += [*kind.approximated, *switched]
    if kind.family == "llama":
        _check_attention(config)
    return {
        "family": kind.family,
        **sizes,
        "kv_heads": _kv_heads(config, name, kind, heads=heads),
        "head_dim": _head_dim(config, kind, hidden=hidden, heads=heads),
        "vocab": config.size("vocab_size"),
        "biases": _biases(config, name),
        "tied_embeddings": config.flag("tie_word_embeddings", absent=kind.tied),
        "rotary_base": config.number(_BASES) if kind.family == "llama" else None,
        "norm_epsilon": config.number(_EPSILONS),
        "qkv_biases": True if name == "qwen2" else None,
    }


def _kv_heads(config: _Config, name: str, kind: _Kind, *, heads: int) -> int:
    """Key and value heads; of Falcon one, unless its flags say otherwise."""
    if name == "falcon":
        grouped = config.flag("new_decoder_architecture", absent=False)
        single = config.flag("multi_query", absent=True) and not grouped
        return 1 if single else config.size("num_kv_heads", absent=heads)
    # A config.json without the key means the default of the model's class, which may not follow from the sizes.
    must = kind.kv_heads in kind.stated and not config.states(kind.kv_heads)
    return config.size(kind.kv_heads, absent=None if must else heads) if kind.kv_heads else heads


def _head_dim(config: _Config, kind: _Kind, *, hidden: int, heads: int) -> int:
    if config.value("head_dim") is not None or "head_dim" in kind.stated:
        return config.size("head_dim")
    total, parts = kind.keys["hidden"], kind.keys["heads"]
    if hidden % heads and not any(problem.path in (total, parts) for problem in config.problems):
        config.report(total, f"{hidden} is not divisible by {parts} ({heads}), and there is no head_dim")
    return max(1, hidden // heads)


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


def _biases(config: _Config, name: str) -> bool:
    """Whether all linear layers have biases; biases of only some layers are ignored and noted."""
    if name in ("gpt2", "phi"):
        return True
    if name == "falcon":
        return config.flag("bias", absent=False)
    neox = name == "gpt_neox"
    attention = config.flag("attention_bias", absent=neox)
    mlp = neox or config.flag("mlp_bias", absent=False)
    if attention != mlp and name != "qwen2":
        config.left_out.append("biases of the attention layers" if attention else "biases of the MLP layers")
    return attention and mlp and name != "qwen2"


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
        for key, value in values.items():
            words = value if isinstance(value, list) else [value]
            if odd := next(filter(None, (CONTROL.search(word) for word in words if isinstance(word, str))), None):
                self.report(key, f"holds {odd[0]!r}, which no text needs")

    def value(self, key: str) -> Any:  # noqa: ANN401 - JSON
        """What the file says, or None."""
        return self._values.get(key)

    def states(self, key: str) -> bool:
        """Whether the file has the key, if only with null."""
        return key in self._values

    def line(self, key: str) -> int | None:
        """Where a key is first written."""
        match = re.search(rf'"{re.escape(key)}"\s*:', self._text)
        return self._text.count("\n", 0, match.start()) + 1 if match else None

    def report(self, key: str, message: str) -> None:
        """Note a problem at a key."""
        self.problems.append(Problem(key, message, self.line(key)))

    def kind(self) -> str:
        """The model type, if it is one that can be mapped; DocumentError else."""
        kind, known = self.value("model_type"), tuple(_KINDS)
        if kind in known:
            return str(kind)
        if kind is None:
            raise DocumentError(str(self.path), [Problem("", "no 'model_type': not a Hugging Face model config")])
        self.report(
            "model_type", f"{kind!r} is not supported{suggest(str(kind), known)}; supported: {', '.join(known)}"
        )
        self.refuse_parts()
        raise DocumentError(str(self.path), self.problems)

    def refuse_parts(self) -> None:
        """Report every model part without operations in this tool; note those it may ignore."""
        for key, part in _REFUSED.items():
            if self.value(key) not in (None, False, 0):
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
        for key in keys:
            if isinstance(value := self._rope.get(key, self.value(key)), int | float):
                try:
                    return read_number(value, least=1e-30)
                except ValueError as error:
                    self.report(key, str(error))
        return None

    def size(self, key: str, *, absent: int | None = None) -> int:
        """A positive whole number; what is wrong with it is noted, and 1 returned."""
        value = self.value(key)
        if value is None and absent is not None:
            return absent
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        words = "missing" if not self.states(key) else f"must be a positive whole number, not {value!r:.40}"
        self.report(key, words)
        return 1

    def flag(self, key: str, *, absent: bool) -> bool:
        """True or false; what is wrong with it is noted."""
        value = self.value(key)
        if value is not None and not isinstance(value, bool):
            self.report(key, f"must be true or false, not {value!r}")
        return absent if value is None else bool(value)

    def description(self, kind: str) -> str:
        """One line on the model and on what was ignored."""
        architectures = self.value("architectures")
        title = architectures[0] if isinstance(architectures, list) and architectures else kind
        return f"{title}, imported" + (f"; left out: {'; '.join(self.left_out)}" if self.left_out else "")
