"""Hugging Face's model types, each as hugging_face.yaml says how it is mapped to a model document."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from axonn_tune.specs.document import Document, read_yaml, validate
from axonn_tune.specs.loading import read_text
from axonn_tune.specs.sections import Score


class ExpertKeys(Document):
    """Experts of a model type.

    shared: the key of the shared experts' width, or of their number (n_...); shared_gate: they have one.
    score_bias: a bias balances the load. switch: the key of a flag, without which there are none.
    """

    width: str = "moe_intermediate_size"
    shared: str = ""
    shared_gate: bool = False
    score: Score = "softmax"
    score_bias: bool | None = None
    switch: str = ""


class Kind(Document):
    """How a model type is mapped.

    block: class of its blocks in transformers, or of several. keys: of our sizes, where they are not those of most
    types; renamed: other names of keys that files have. ffn_of_hidden: 4 times
    hidden without its key; ffn_adjusted: two thirds of that, rounded up, where `block_auto_adjust_ff_dim` says so.
    gated: whether MLPs have a gate, if not as the family. local, full: keys of sizes and switches of attention that
    windowed layers, and those that attend to all, have for themselves.
    defaults: of keys that a file lacks; stated: keys that it must have, since the defaults of its class do not follow
    from other sizes.
    kv_heads: key, or none for as many as heads. biases: all, none, or of queries, keys and values, in files without
    bias_keys. approximated: differences in words; flags: those that a key switches, with its default. window: its key;
    window_switch: key of a flag, off unless given. full_every: of so many layers the last attends to all, if
    `layer_types` does not say; full_unrotated: those have no positions. qk_norms: in all files, if not by its key.
    mixers: what `layer_types` names in place of attention, by section, or the only one, of layers that mixed_key lists,
    from 1, of all but those that attending_key lists, from 0, or of all that do not attend. output_gate: of attention,
    in files without the key `attn_output_gate`, of each element or head. indexer: sparse attention; compressed:
    DeepSeek-V4's. hybrid: each layer is of one part. predicts: its MTP layers are as the last of the others; else they
    are left out.
    """

    family: Literal["gpt", "llama"]
    block: str
    keys: dict[str, str] = Field(default={})
    renamed: dict[str, str] = Field(default={})
    ffn_of_hidden: bool = False
    ffn_adjusted: bool = False
    gated: bool | None = None
    kv_heads: str = "num_key_value_heads"
    defaults: dict[str, bool | int | float] = Field(default={})
    stated: tuple[str, ...] = ()
    activation: str = "hidden_act"
    biases: Literal["all", "none", "qkv"] = "none"
    bias_keys: tuple[str, ...] = ("attention_bias", "mlp_bias")
    approximated: tuple[str, ...] = ()
    flags: dict[str, tuple[bool, str]] = Field(default={})
    window: str = "sliding_window"
    window_switch: str = ""
    full_every: int = 0
    full_every_key: str = ""
    full_unrotated: bool = False
    qk_norms: bool | Literal["all_heads"] = False
    norms: Literal["post", "both", "parallel"] | None = None
    qk_norms_key: str = ""
    local: dict[str, str] = Field(default={})
    full: dict[str, str] = Field(default={})
    latent: bool = False
    mixers: dict[str, str] = Field(default={})
    mixed_key: str = ""
    attending_key: str = ""
    output_gate: bool | Literal["head"] = False
    indexer: bool = False
    compressed: bool = False
    sinks: bool = False
    experts: ExpertKeys | None = None
    hybrid: bool = False
    predicts: bool = True


class _Table(Document):
    """All model types, those of language models with vision that are as others, and what unsupported ones have."""

    kinds: dict[str, Kind]
    same_as: dict[str, str]
    lacking: dict[str, str]


@cache
def table() -> _Table:
    """The shipped table."""
    path = Path(__file__).with_name("hugging_face.yaml")
    return validate(read_yaml(read_text(path), source=str(path)).root, schema=_Table, source=str(path))


@cache
def kinds() -> dict[str, Kind]:
    """How each model type is mapped, by its name."""
    found = table().kinds
    return found | {name: found[other] for name, other in table().same_as.items()}


def plain_type(stated: object) -> str:
    """A model type without what says that it is the language model of another."""
    return re.sub(r"_text(_model)?$", "", str(stated))
