"""Layer types of a model from arguments of Megatron-LM: experts, latent attention, windows, hybrids, MTP."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, get_args

from axonn_tune.frameworks.keys import NOTHING, Arguments, is_off, is_on, names_of
from axonn_tune.frameworks.megatron_layers import indexes, letters
from axonn_tune.learning.arguments import stated_count
from axonn_tune.specs.model import MIXERS, LayerType, Model
from axonn_tune.specs.sections import MOST_LAYERS, Experts, Indexer, LatentAttention, Mixer, Score

_SCORES: dict[str, Score] = {"": "softmax", **{one: one for one in get_args(Score)}}
"""Of the router, by its argument; without one Megatron-LM's."""


def with_layer_types(model: Model, arguments: Arguments) -> Model:
    """The model with what arguments say beyond one dense block; ValueError, with the argument, for what is impossible.

    Unstated sizes are the parser's defaults (NVIDIA/Megatron-LM@d98e8a64, megatron/training/arguments.py).
    """
    reading = _Reading(model, arguments)
    hybrid = reading.text("hybrid_layer_pattern")
    layers = [*(reading.hybrid_layers(hybrid) if hybrid else reading.layers())]
    family = "llama" if reading.squared else model.family
    mtp = hybrid.count("/") if hybrid else reading.number("mtp_num_layers", 0)
    if family == model.family and not mtp and all(one == LayerType() for one in layers):
        return model
    types: dict[str, LayerType] = {}
    names = []
    for one in layers:
        name = next((known for known, kind in types.items() if kind == one), "")
        if not name:
            plain = _name(one)
            name = plain if plain not in types else f"{plain}-{len(types)}"
            types[name] = one
        names.append(name)
    latent = next((one.latent for one in layers if one.latent is not None), None)
    heads = {} if latent is None else {"kv_heads": model.heads, "head_dim": latent.nope_dim + latent.rope_dim}
    runs = ((name, len([*same])) for name, same in groupby(names))
    return Model.model_validate(
        {
            **model.model_dump(by_alias=True),
            **heads,
            "layers": " ".join(f"{name}*{count}" if count > 1 else name for name, count in runs),
            **{"pattern": None, "layer_types": types, "mtp_layers": mtp, "family": family},
        }
    )


def _name(kind: LayerType) -> str:
    """A name of a layer type by what it has."""
    if kind.mixer is not None and not kind.mlp:
        return kind.mixer.SECTION
    own = ("moe" if kind.experts else "dense") if kind.mlp else "attention"
    own += f"-{kind.mixer.SECTION}" if kind.mixer is not None else ""
    return own + ("-local" if kind.window else "") + ("-unrotated" if kind.attention and kind.rotary_share == 0 else "")


class _Reading:
    """Layer types as arguments state them."""

    def __init__(self, model: Model, arguments: Arguments) -> None:
        self._model, self._arguments = model, arguments
        self.squared = is_on(arguments.get("squared_relu", NOTHING))

    def text(self, name: str) -> str:
        """The value of an argument, "" where it is off."""
        stated = self._arguments.get(name, NOTHING)
        return "" if is_off(stated) and stated.value != "[]" else str(stated.value)

    def number(self, name: str, default: int) -> int:
        """A whole number from 0, the default where it is off or -1; ValueError for what is none."""
        text, stated = self.text(name), stated_count(self._arguments, name)
        if stated is None and text not in ("", "0", "-1"):
            raise ValueError(f"{name}: must be a whole number, not {text!r}; Megatron-Core's default is {default}")
        return default if stated is None else int(stated.value)

    def sizes(self, part: str, **defaults: int | None) -> dict[str, Any]:
        """Sizes of a part of a layer, by the fields of arguments, with the parser's defaults."""
        names = {size: names_of(f"{part}.{size}")[0] for size in defaults}
        return {size: self.number(names[size], default or 0) or default for size, default in defaults.items()}

    def layers(self) -> Iterator[LayerType]:
        """Each layer of a GPT: attention, and an MLP or experts."""
        count = self._model.layers
        experts, attention = self._experts(), self._attention()
        windows = self._marks("window_attn_skip_freq", lambda layer, each: (layer + 1) % each != 0)
        unrotated = self._marks("no_rope_freq", lambda layer, each: (layer + 1) % each == 0)
        routed = self._marks("moe_layer_freq", lambda layer, each: layer % each == 0)
        variant = self._variant()
        mixed = self._marks("linear_attention_freq", lambda layer, each: (layer + 1) % each != 0)
        window, shared = self._window(), self._shared(indexed="indexer" in attention)
        for layer in range(count):
            mixes = variant is not None and mixed[layer] is not False
            own: dict[str, Any] = self._mixer(variant) if variant is not None and mixes else dict(attention)
            if window is not None and windows[layer] is not False and not mixes:
                own["window"] = window
            if shared[layer]:
                own["indexer"] = own["indexer"].model_copy(update={"shared": True})
            if unrotated[layer] and not mixes:
                own["rotary_share"] = 0
            if experts is not None and routed[layer] is not False:
                own["experts"] = experts
            yield LayerType(**own, **self._gate())

    def hybrid_layers(self, pattern: str) -> Iterator[LayerType]:
        """Each layer of a hybrid: one letter of its pattern."""
        named, known = pattern.partition("/")[0].replace("|", ""), letters()
        if unknown := sorted({*named} - {*known}):
            raise ValueError(f"hybrid_layer_pattern: layers {unknown[0]!r} are not modelled, only {', '.join(known)}")
        experts = self._experts()
        if "E" in named and experts is None:
            raise ValueError("hybrid_layer_pattern: has layers E, but num_experts is not stated")
        mixers = [letter for letter in dict.fromkeys(named) if known[letter] in MIXERS]
        kinds = {
            **{letter: LayerType(mlp=False, **self._mixer(MIXERS[known[letter]])) for letter in mixers},
            "*": LayerType(mlp=False, **self._attention()),
            "-": LayerType(attention=False, **self._gate()),
            "E": LayerType(attention=False, experts=experts, **self._gate()),
        }
        yield from (kinds[letter] for letter in named)

    def _gate(self) -> dict[str, Any]:
        return {"gated": False} if self.squared else {}

    def _attention(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if is_on(self._arguments.get("multi_latent_attention", NOTHING)):
            dims = {"nope_dim": 128, "rope_dim": 64, "value_dim": 128}
            found["latent"] = LatentAttention(**self.sizes("latent", query_rank=None, kv_rank=32, **dims))
        if self.text("experimental_attention_variant") == "dsa":
            if "latent" not in found:
                raise ValueError("experimental_attention_variant: 'dsa' is modelled only with --multi-latent-attention")
            sizes = self.sizes("indexer", heads=None, head_dim=None, topk=None)
            if missing := [names_of(f"indexer.{name}")[0] for name, size in sizes.items() if size is None]:
                raise ValueError(f"{missing[0]}: is not stated, but experimental_attention_variant is dsa")
            found["indexer"] = Indexer(**sizes)
        if self.text("softmax_type") not in ("", "vanilla"):
            found["sinks"] = True
        if is_on(self._arguments.get("attention_output_gate", NOTHING)):
            found["output_gate"] = "element"
        # Of latents it means their own norms.
        if "latent" not in found and is_on(self._arguments.get("qk_layernorm", NOTHING)):
            found["qk_norms"] = True
        share = self.text("rotary_percent")
        if share and float(share) < 1:
            found["rotary_share"] = float(share)
        if self._arguments.get("position_embedding_type", NOTHING).value == "none":
            found["rotary_share"] = 0
        return found

    def _shared(self, *, indexed: bool) -> Sequence[bool]:
        """Whether each layer shares an indexer."""
        every = self.number("dsa_indexer_topk_freq", 1) if indexed else 1
        offset = self.number("dsa_indexer_skip_topk_offset", 0)
        return [not indexes(layer, max(every, 1), offset) for layer in range(self._model.layers)]

    def _window(self) -> int | None:
        """Tokens that attention sees, its own among them; the left end of the stated window."""
        text = self.text("window_size")
        if not text:
            return None
        left = re.fullmatch(r"[(\[]?\s*(\d{1,9})(?:[,\s]+-?\d{1,9})?\s*[)\]]?", text)
        if left is None:
            raise ValueError(f"window_size: is {text!r}, not two whole numbers such as 127,0")
        return int(left[1]) + 1

    def _experts(self) -> Experts | None:
        count = self.number("num_experts", 0)
        if count <= 1:
            return None
        widths = {"width": self._model.ffn, "shared_width": 0, "latent_width": None}
        sizes = self.sizes("experts", per_token=2, groups=1, chosen_groups=1, **widths)
        topk = sizes["per_token"]
        if topk > count:
            raise ValueError(f"moe_router_topk: is {topk}, but there are {count} experts: at most {count}")
        scaling, score = self.text("moe_router_topk_scaling_factor"), self.text("moe_router_score_function")
        clamp = self.text("activation_func_clamp_value")
        pre = is_on(self._arguments.get("moe_router_pre_softmax", NOTHING))
        return Experts(
            **{**sizes, "chosen_groups": sizes["chosen_groups"] if sizes["groups"] > 1 else 1},
            count=count,
            score=_SCORES.get(score, "sigmoid"),
            normalized=not (pre and topk > 1),
            shared_gate=is_on(self._arguments.get("moe_shared_expert_gate", NOTHING)) and sizes["shared_width"] > 0,
            scaling=(float(scaling) or None) if scaling else None,
            clamp=float(clamp) if clamp else None,
            score_bias=is_on(self._arguments.get("moe_router_enable_expert_bias", NOTHING)) or None,
        )

    def _variant(self) -> type[Mixer] | None:
        """What stands in place of attention, where an argument says so."""
        Model.prepare()
        text = self.text("experimental_attention_variant").lower()
        variants = {
            name: mixer for mixer in MIXERS.values() if mixer.VARIANT for name in (mixer.VARIANT, mixer.SECTION)
        }
        if text and text not in (*variants, "dsa"):
            known = ", ".join((*variants, "dsa"))
            raise ValueError(f"experimental_attention_variant: {text[:40]!r} is not modelled, only {known}")
        return variants.get(text)

    def _mixer(self, mixer: type[Mixer]) -> dict[str, Any]:
        """A layer's sizes of what mixes tokens in place of attention."""
        section, head_dim = mixer.SECTION, self.sizes("mamba", head_dim=64)["head_dim"]
        heads = {"heads": 2 * self._model.hidden // head_dim} if section == "mamba" else {}
        defaults = {**mixer.PARSED, **heads}
        return {"attention": False, section: mixer(**self.sizes(section, **defaults))}

    def _marks(self, name: str, marked: Callable[[int, int], bool]) -> Sequence[bool | None]:
        """Marks of all layers: of a list, or of every so-manieth layer; None of each where nothing is stated."""
        text, count = self.text(name), self._model.layers
        if name == "moe_layer_freq" and self._arguments.get(name, NOTHING).value == "0":
            raise ValueError(f"{name}: is 0, neither a whole number from 1 nor a list of 0 and 1; nearest: 1")
        if not text:
            return [None] * count
        if text.isascii() and text.isdecimal() and len(text) < 6 and "[" not in text:
            return [marked(layer, int(text)) for layer in range(count)]
        try:
            found = _evaluated(ast.parse(text if "[" in text else f"[{','.join(text.split())}]", mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ValueError(f"{name}: is {text[:60]!r}, not a list of 0 and 1 such as ([0]*3+[1]*58)") from None
        if len(found) != count:
            raise ValueError(f"{name}: has {len(found)} marks, but there are {count} layers")
        return found


def _evaluated(node: ast.expr) -> list[bool]:
    """A list of marks that is written as lists, their sums and multiples."""
    if isinstance(node, ast.List) and all(isinstance(one, ast.Constant) and one.value in (0, 1) for one in node.elts):
        return [bool(ast.literal_eval(one)) for one in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        found = _evaluated(node.left) + _evaluated(node.right)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.right, ast.Constant):
        times = node.right.value
        if not isinstance(times, int) or not 0 <= times <= MOST_LAYERS:
            raise ValueError("no number of times")
        found = (part := _evaluated(node.left)) * min(times, MOST_LAYERS // max(len(part), 1) + 1)
    else:
        raise ValueError("no list of marks")
    if len(found) > MOST_LAYERS:
        raise ValueError("too long")
    return found
