"""The model document: a decoder as its sizes, of one layer type or of several in a pattern.

Letters used throughout the project, per layer: H hidden, Q = heads * head_dim (what attention
works on), N = Q + 2 * kv_heads * head_dim (fused qkv output), F ffn, G = 2F when the MLP is gated
and F otherwise (fused gate and up output), V vocabulary, S sequence length.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from axonn_tune.errors import suggest
from axonn_tune.specs import sections
from axonn_tune.specs.document import Document, Size
from axonn_tune.specs.sections import NAME, Experts, Indexer, LatentAttention, Mamba, Mixer, PositiveFloat
from axonn_tune.specs.tuning import TITLES, Tuning

MODEL_SCHEMA = "axonn-tune/model/1"
MOST_TYPES, MOST_PREDICTING = 64, 32
"""Of a pattern, a model and multi-token prediction: several times those of any model."""

Norms: TypeAlias = Literal["pre", "post", "both", "parallel"]
_Part = Annotated[float, Field(ge=0, le=1)]
_Layers = Annotated[
    Size, WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "minLength": 1}]})
]


MIXERS: dict[str, type[Mixer]] = {Mamba.SECTION: Mamba}
"""By section."""


_LATENT_HAS = {
    **dict.fromkeys(("head_dim", "value_dim"), "nope_dim, rope_dim and value_dim"),
    **{"output_gate": "none here", "values_are_keys": "a latent of both", "kv_heads": "as many key as query heads"},
}
"""In place of sizes that a layer type may not give beside it."""


class LayerType(Document):
    """A layer type: what it has, and what differs from the model's own sizes."""

    left_out_at_default: ClassVar[tuple[str, ...]] = (
        *("attention", "sinks", "qk_norms", "values_are_keys", "mlp", "in_bf16"),
    )

    attention: bool = Field(default=True, description="False: a layer without attention.")
    latent: LatentAttention | None = Field(default=None, description="Multi-head latent attention.")
    indexer: Indexer | None = Field(default=None, description="Sparse attention (DSA), of latent attention.")
    window: Size | None = Field(default=None, description="Sliding window or attention chunk, in tokens.")
    sinks: bool = Field(default=False, description="A learned attention sink for each head.")
    qk_norms: bool | Literal["all_heads"] = Field(
        default=False, description="Norms of queries and keys: true, of each head; all_heads, one over all of them."
    )
    norms: Norms | None = Field(default=None, description="Norms of a block, if not as the model's.")
    output_gate: Literal["element", "head"] | None = Field(
        default=None, description="A gate of attention's output, by a sigmoid: of each element, or of each head."
    )
    rotary_share: _Part | None = Field(default=None, description="Share of a head that is rotated; 0: no positions.")
    heads: Size | None = Field(default=None, description="Query heads.")
    kv_heads: Size | None = Field(default=None, description="Key and value heads.")
    head_dim: Size | None = Field(default=None, description="Width of one head.")
    value_dim: Size | None = Field(default=None, description="Width of one value head, if it is another.")
    values_are_keys: bool = Field(
        default=False, description="Values are the keys before their norm, without a projection (Gemma 4)."
    )
    mlp: bool = Field(default=True, description="False: a layer without MLP.")
    ffn: Size | None = Field(default=None, description="F, width of the MLP.")
    gated: bool | None = Field(default=None, description="Whether MLP and experts have a gate; else by the family.")
    experts: Experts | None = Field(default=None, description="Experts in place of the MLP.")
    mamba: Mamba | None = Field(default=None, description="A Mamba-2 mixer, of layers without attention.")
    in_bf16: bool = Field(default=False, description="GEMMs stay in BF16, whatever number format others have.")

    @model_validator(mode="after")
    def _consistent(self) -> LayerType:
        attends = (
            *("latent", "indexer", "window", "sinks", "qk_norms", "output_gate", "rotary_share"),
            *("heads", "kv_heads", "head_dim", "value_dim", "values_are_keys"),
        )
        for part, keys in (("attention", attends), ("mlp", ("ffn", "gated", "experts"))):
            given = [key for key in keys if getattr(self, key) not in (None, False)]
            if given and not getattr(self, part):
                raise ValueError(f"{given[0]} is given, but {part} is false")
        mixers = [name for name in MIXERS if getattr(self, name, None) is not None]
        if self.attention and mixers:
            raise ValueError(f"{mixers[0]} is given, but attention is not false")
        if len(mixers) > 1:
            raise ValueError(f"{' and '.join(mixers)} are both given: a layer has one")
        if not self.attention and not self.mlp and not mixers:
            raise ValueError("attention and mlp are both false: the layer is empty")
        if self.indexer is not None and (self.latent is None or self.window is not None):
            raise ValueError("indexer is of latent attention without a window")
        for name, has in _LATENT_HAS.items() if self.latent is not None else ():
            if getattr(self, name):
                raise ValueError(f"{name} is given, but latent attention has {has}")
        return self

    @property
    def mixer(self) -> Mixer | None:
        """What it has in place of attention."""
        return next((found for name in MIXERS if (found := getattr(self, name, None)) is not None), None)


def add_mixers(found: Iterable[type[Mixer]]) -> None:
    """A layer type has these sections, too, in every document that holds a model."""
    added = [sizes for sizes in found if sizes.SECTION not in MIXERS]
    for sizes in added:
        MIXERS[sizes.SECTION] = sizes
        annotation: Any = sizes | None
        field = FieldInfo(annotation=annotation, default=None, description=sizes.WHAT)
        LayerType.__pydantic_fields__[sizes.SECTION] = field
    if added:
        rebuild_models()


def rebuild_models() -> None:
    """Every document that holds a model, or what holds one, takes the sections that layer types have now."""
    built: set[type[Document]] = set()

    def rebuilt(one: type[Document]) -> bool:
        """Whether it holds a layer type; those that it holds first."""
        holds = [rebuilt(held) for held in one.held()]
        if one not in built and (one is LayerType or any(holds)):
            one.model_rebuild(force=True)
            built.add(one)
        return one in built

    for one in Document.__subclasses__():
        rebuilt(one)


@dataclass(frozen=True)
class Layer:
    """A layer type with every value in place; widths of what it lacks are 0.

    predicts: the first of a multi-token prediction layer, with its projection and its three norms. opens: nothing
    before it trains, so that its input has no gradient.
    heads, kv_heads, head_dim: of queries and keys (of latent attention nope_dim + rope_dim, and as many key as query
    heads); value_dim: of a value head. ffn: of a dense MLP, 0 for experts. hidden, biases, rms: the model's.
    """

    name: str
    hidden: int
    biases: bool
    rms: bool
    attention: bool
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    latent: LatentAttention | None
    indexer: Indexer | None
    window: int | None
    sinks: bool
    qk_norms: bool | Literal["all_heads"]
    norms: Norms
    rotary_share: float | None
    ffn: int
    gated: bool
    experts: Experts | None
    mixer: Mixer | None
    output_gate: Literal["element", "head"] | None = None
    values_are_keys: bool = False
    in_bf16: bool = False
    predicts: bool = False
    opens: bool = False

    @property
    def sections(self) -> tuple[str, ...]:
        """What names of its linear layers begin with."""
        mixes = (self.mixer.SECTION,) if self.mixer else ("attention",) if self.attention else ()
        return (*mixes, *(("moe",) if self.experts else ("mlp",) if self.ffn else ()))

    @property
    def mamba(self) -> Mamba | None:
        """Its Mamba-2 mixer."""
        return self.mixer if isinstance(self.mixer, Mamba) else None

    @property
    def parts(self) -> tuple[str, ...]:
        """In words, what a block of a GPT or Llama has not."""
        found = {
            **({self.mixer.TITLE: True} if self.mixer else {}),
            "layers without attention": not self.attention,
            "multi-head latent attention": self.latent,
            "DeepSeek sparse attention": self.indexer,
            "sliding-window attention": self.window,
            "attention sinks": self.sinks,
            "output gates of attention": self.output_gate,
            "norms of queries and keys over all heads": self.qk_norms == "all_heads",
            "values that are keys": self.values_are_keys,
            "values of another width": self.attention and self.latent is None and self.value_dim != self.head_dim,
            "norms behind attention and MLP": self.norms in ("post", "both"),
            "attention and MLP in parallel": self.norms == "parallel",
            "experts": self.experts,
            "shared experts": self.experts is not None and self.experts.shared_width,
            "layers without MLP": not self.ffn and self.experts is None,
        }
        return tuple(words for words, has in found.items() if has)

    @property
    def words(self) -> str:
        """Its attention and its MLP, in words."""
        latent, experts, attention = self.latent, self.experts, f"{self.heads} heads"
        if latent is not None:
            ranks = " and ".join(f"{rank:,}" for rank in (latent.query_rank, latent.kv_rank) if rank)
            attention += f", latent attention of rank {ranks}"
        elif self.kv_heads != self.heads:
            attention += f", {self.kv_heads} of keys and values"
        attention += f", window {self.window:,}" if self.window else ""
        if (chosen := self.indexer) is not None:
            chooses = "a shared indexer" if chosen.shared else f"an indexer of {chosen.heads} heads"
            attention += f", {chosen.topk:,} tokens chosen by {chooses}"
        mlp = f"MLP of {self.ffn:,}"
        if experts is not None:
            shared = f", shared {experts.shared_width:,}" if experts.shared_width else ""
            mlp = f"{experts.per_token} of {experts.count} experts of {experts.width:,}{shared}"
        attention = self.mixer.words if self.mixer else attention
        computes = self.ffn > 0 or experts is not None
        return "; ".join(words for words, has in ((attention, self.mixes), (mlp, computes)) if has)

    @property
    def mixes(self) -> bool:
        """Whether it has attention, or what stands in its place."""
        return self.attention or self.mixer is not None

    @property
    def query_width(self) -> int:
        """Q = heads * head_dim: all query heads."""
        return self.heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Output of attention, heads * value_dim: what the output projection contracts over."""
        return self.heads * self.value_dim

    @property
    def gate_width(self) -> int:
        """What gates the output of attention, 0 without: a number an element, or a head."""
        return {None: 0, "element": self.value_width, "head": self.heads}[self.output_gate]

    @property
    def reach(self) -> int | None:
        """Most tokens that a query attends to, if it is not all: a window, or those that an indexer chooses."""
        return self.indexer.topk if self.indexer is not None else self.window

    def keys(self, length: float) -> float:
        """Keys that a query attends to, in the mean of a sequence: 1 to its reach, then so many."""
        reach = min(self.reach or length, length)
        return reach - reach * (reach - 1.0) / (2.0 * length)

    @property
    def scored_width(self) -> int:
        """Elements of a query and a value, all heads: of sparse attention, which is absorbed, those of the latent."""
        if self.indexer is not None and self.latent is not None:
            return self.heads * (2 * self.latent.kv_rank + self.latent.rope_dim)
        return self.query_width + self.value_width

    @property
    def qkv_width(self) -> int:
        """N: queries, keys and values as attention takes them."""
        return self.query_width + self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def up_width(self) -> int:
        """G of the dense MLP, gate included."""
        return self.ffn * self.ups

    @property
    def ups(self) -> int:
        """Matrices in front of the activation: 2 with a gate."""
        return 2 if self.gated else 1


class ModelDefaults(Document):
    """The workload a model is searched with unless the command line says otherwise."""

    global_batch: Size = Field(description="Global batch size, in sequences.")
    sequence_length: Size = Field(description="Tokens in one sequence.")


class Model(Document):
    """A decoder-only transformer."""

    left_out_at_default: ClassVar[tuple[str, ...]] = (
        *("pattern", "layer_types", "mtp_layers", "norms", "residual_streams", "block_class"),
    )

    schema_: Literal["axonn-tune/model/1"] = Field(
        alias="schema", description="Kind and version of this document: axonn-tune/model/1."
    )
    name: str = Field(min_length=1, description="The name it is found by: that of its file.")
    description: str = Field(default="", description="One line: what it is and where its sizes come from.")
    family: Literal["gpt", "llama"] = Field(
        description="gpt: LayerNorm, GELU, learned positions. llama: RMSNorm, SwiGLU, rotary positions."
    )
    layers: _Layers = Field(description="Transformer blocks.")
    pattern: str | None = Field(
        default=None,
        description="Types of the layers in order: dense*3 moe*58, (local full)*9. It may stand in place of layers.",
    )
    hidden: Size = Field(description="H, width of the residual stream.")
    heads: Size = Field(description="Query heads.")
    kv_heads: Size = Field(description="Key and value heads; equal to heads without grouped-query attention.")
    head_dim: Size = Field(description="Width of one head; need not be hidden / heads.")
    ffn: Size = Field(description="F, width of the MLP.")
    vocab: Size = Field(description="V, before padding.")
    max_sequence_length: Size = Field(description="Length of the learned position table, or the trained context.")
    biases: bool = Field(description="Biases on the linear layers.")
    tied_embeddings: bool = Field(description="The LM head uses the token embedding.")
    rotary_base: PositiveFloat | None = Field(
        default=None, description="Base of rotary positions (rope_theta), for scripts: no cost depends on it."
    )
    norm_epsilon: PositiveFloat | None = Field(default=None, description="Epsilon of norms, for scripts.")
    norms: Norms | None = Field(
        default=None,
        description="Norms of blocks: before each branch (pre, if not said), behind it, or both; parallel: one before "
        "attention and MLP, which are added at once.",
    )
    residual_streams: Annotated[int, Field(ge=2, le=64)] | None = Field(
        default=None, description="Residual streams of hyper-connections (mHC), hc_mult; without, there is one."
    )
    qkv_biases: bool | None = Field(
        default=None, description="Biases of queries, keys and values alone, for scripts: too small to be priced."
    )
    block_class: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z]\w*(,[A-Za-z]\w*)*$",
        description="Class of its blocks in transformers, which scripts of FSDP wrap; without, that of Llama or GPT-2.",
    )
    approximated: tuple[str, ...] = Field(
        default=(),
        # The validators below make of JSON what is no longer told from Python, whose lists are no tuples.
        strict=False,
        description="What the network has otherwise than priced here, in words: scripts of it need --approximate.",
    )
    layer_types: dict[str, LayerType] = Field(
        default={},
        description="Layer types by name; what one does not say is as above. Without any, all are alike.",
    )
    mtp_layers: Annotated[int, Field(ge=0, le=MOST_PREDICTING)] = Field(
        default=0,
        description="Multi-token prediction: further layers, each of the last type, and of the last with attention "
        "if that has none, with a projection.",
    )
    source: str = Field(min_length=1, description="Where the sizes come from.")
    # A workload's, which makes another network of the same document.
    _tuning: Tuning | None = PrivateAttr(default=None)
    defaults: ModelDefaults = Field(description="Workload unless the command line says otherwise.")

    @model_validator(mode="before")
    @classmethod
    def _keep_pattern(cls, values: Any) -> Any:  # noqa: ANN401 - what is validated
        if not isinstance(values, Mapping) or not isinstance(text := values.get("layers"), str):
            return values
        if values.get("pattern") not in (None, text):
            raise ValueError("layers and pattern are both patterns: give one")
        return {**values, "pattern": text}

    @field_validator("layers", mode="before")
    @classmethod
    def _count_layers(cls, layers: Any) -> Any:  # noqa: ANN401 - what is validated
        return len(sections.expand(layers)) if isinstance(layers, str) else layers

    @model_validator(mode="after")
    def _heads_group(self) -> Model:
        self._check_types()
        for layer in self.types:
            where = f"layer_types.{layer.name}: " if layer.name else ""
            if layer.norms == "parallel" and (not layer.attention or layer.latent or not layer.ffn):
                raise ValueError(f"{where}norms parallel are of attention without latents beside an MLP")
            if layer.attention and layer.heads % layer.kv_heads:
                raise ValueError(f"{where}heads ({layer.heads}) must be divisible by kv_heads ({layer.kv_heads})")
        attends = [layer for layer in self.types if layer.attention]
        if attends and all(layer.latent is not None for layer in attends):
            if self.kv_heads != self.heads:
                raise ValueError(f"kv_heads is {self.kv_heads}, but all attention is latent, which has {self.heads}")
            if self.head_dim not in (widths := sorted({layer.head_dim for layer in attends})):
                wide = f"nope_dim + rope_dim = {' or '.join(map(str, widths))}"
                raise ValueError(f"head_dim is {self.head_dim}, but all attention is latent, whose heads have {wide}")
        return self

    def _check_types(self) -> None:
        """ValueError unless the pattern names each type, and only those, and has as many layers."""
        named, types = tuple(sections.expand(self.pattern)) if self.pattern else (), tuple(self.layer_types)
        if len(types) > MOST_TYPES:
            raise ValueError(f"layer_types has {len(types):,} types, more than {MOST_TYPES}")
        for name in types:
            if not re.fullmatch(NAME, name, re.ASCII):
                raise ValueError(f"layer_types.{name[:40]}: a name has up to 64 letters, digits, - and _")
        if self.pattern is None and len(types) > 1:
            raise ValueError(f"layers must say the order of {', '.join(types)}, such as {types[0]}*3 {types[1]}*4")
        if self.pattern is not None and len(named) != self.layers:
            raise ValueError(f"layers ({self.layers}) is not the number of layers in pattern ({len(named)})")
        for name in dict.fromkeys(named):
            if name not in types:
                known = f"there are {', '.join(types)}" if types else "there are no layer_types"
                raise ValueError(f"layers names {name!r}, but {known}{suggest(name, types)}")
        if unused := [name for name in types if self.pattern is not None and name not in named]:
            raise ValueError(f"layer_types.{unused[0]} is not used: layers names {', '.join(dict.fromkeys(named))}")

    @model_serializer(mode="wrap")
    def _plainly(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """All keys, but of a model without layer types those that only others need."""
        absent = {key for key in self.left_out_at_default if not getattr(self, key)}
        return {key: value for key, value in write(self).items() if key not in absent}

    @classmethod
    def prepare(cls) -> None:
        """Sections of layer types are found with these, whose files import this module."""
        import_module("axonn_tune.program.types").kinds()

    def __hash__(self) -> int:
        return hash((self.name, self.family, self.layers, self.pattern, self.hidden, self.heads, self.ffn, self.vocab))

    @property
    def types(self) -> tuple[Layer, ...]:
        """Its layer types, resolved, in order of first use; the one of a model without layer_types has no name.

        The last is that of multi-token prediction, if there is any: as `mtp_types` says, with a projection.
        """
        return _resolved(self)

    @property
    def plain(self) -> Layer:
        """The block of a GPT or Llama of its own sizes, whatever its layer types are."""
        return _resolve(self, "", LayerType())

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Consecutive equal layers in order: (index into `types`, how many), those of multi-token prediction last."""
        return (*_runs(self), *self.predicting_runs)

    @property
    def decoder_runs(self) -> tuple[tuple[int, int], ...]:
        """The same of the layers that `layers` counts."""
        return _runs(self)

    @property
    def starts(self) -> tuple[int, ...]:
        """Layers, from 0, with which a part of the model may begin: those that share an indexer are where it is."""
        return _starts(self)

    @property
    def predicting_runs(self) -> tuple[tuple[int, int], ...]:
        """The same of layers of multi-token prediction."""
        first, others = len(self.types) - 1, self.mtp_types[1:]
        return (
            ((first, self.mtp_layers),)[: self.mtp_layers]
            if not others
            else ((first, 1), *((at, 1) for at in others)) * self.mtp_layers
        )

    @property
    def tuning(self) -> Tuning | None:
        """What of it trains, where that is not all."""
        return self._tuning

    def tuned(self, tuning: Tuning | None) -> Model:
        """The same model of which only so much trains, with its adapters; None: whole, without any."""
        if tuning == self._tuning:
            return self
        found = self.model_copy()
        found._tuning = tuning
        return found

    @property
    def opening(self) -> int:
        """Its first layers whose input has no gradient: up to the first with adapters, where nothing before trains."""
        return _opening(self) if self._tuning and self._tuning.ends_early else 0

    def with_bf16_ends(self, first: int, last: int) -> Model:
        """The same model whose first and last layers keep BF16; ValueError if it has fewer layers."""
        if first + last > self.layers:
            raise ValueError(f"{first} first and {last} last layers in BF16: {self.name} has {self.layers}")
        plain, end = next(iter(self.layer_types), "layer"), self.layers - last
        names = sections.expand(self.pattern) if self.pattern else [plain] * self.layers
        named = [name if first <= at < end else f"{name}-bf16" for at, name in enumerate(names)]
        types = dict(self.layer_types) or {plain: LayerType()}
        types |= {f"{name}-bf16": one.model_copy(update={"in_bf16": True}) for name, one in types.items()}
        pattern = sections.pattern_of(named)
        used = {name: types[name] for name in dict.fromkeys(named)}
        return self.model_copy(update={"pattern": pattern, "layer_types": used})

    @property
    def counts(self) -> tuple[int, ...]:
        """How many layers each of `types` has."""
        found = Counter[int]()
        for index, count in self.runs:
            found[index] += count
        return tuple(found[index] for index in range(len(self.types)))

    @property
    def mixed(self) -> bool:
        """Whether it is more than one block of today's GPT or Llama repeated; norms of queries and keys are not."""
        # The layer in which a backward pass ends is like the others.
        types = self.tuned(None).types
        only = replace(types[0], name="", qk_norms=self.plain.qk_norms, rotary_share=self.plain.rotary_share)
        return len(types) > 1 or self.mtp_layers > 0 or self.residual_streams is not None or only != self.plain

    @property
    def parts(self) -> tuple[str, ...]:
        """In words, what makes it `mixed`."""
        found = [part for layer in self.types for part in layer.parts]
        found += ["multi-token prediction"] * (self.mtp_layers > 0)
        found += ["hyper-connections"] * (self.residual_streams is not None)
        found += ["layer types of different sizes"] * (len(self.layer_types) > 1 or (self.mixed and not found))
        return tuple(dict.fromkeys(found))

    @property
    def otherwise(self) -> tuple[str, ...]:
        """What the network has otherwise than scripts of any framework say, in words: these need --approximate."""
        return (*self.approximated, *(part for part in self.parts if part in UNWRITTEN))

    @property
    def has_experts(self) -> bool:
        """Whether a layer type has experts."""
        return any(layer.experts is not None for layer in self.types)

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate (SwiGLU)."""
        return self.family == "llama"

    @property
    def learned_positions(self) -> bool:
        """Whether positions are a learned table (GPT) and not rotary (Llama)."""
        return self.family == "gpt"

    @property
    def by_type(self) -> tuple[tuple[Layer, int], ...]:
        """Layer types and how many layers each has, those of multi-token prediction included."""
        return tuple(zip(self.types, self.counts, strict=True))

    @property
    def mtp_types(self) -> tuple[int, ...]:
        """Types of one multi-token prediction layer, as indices into `types`: the last, after one with attention."""
        return _predicting(self, _typed(self))


@lru_cache(maxsize=64)
def _resolved(model: Model) -> tuple[Layer, ...]:
    types = _typed(model)
    if not model.mtp_layers:
        return types
    first = types[_predicting(model, types)[0]]
    if first.mixer is not None:
        first = replace(first, mixer=first.mixer.predicting)
    if first.indexer is not None:
        # It is behind all layers, and has no other's choice.
        first = replace(first, indexer=first.indexer.model_copy(update={"shared": False}))
    return (*types, replace(first, name=f"{first.name}-mtp" if first.name else "mtp", predicts=True, opens=False))


def _predicting(model: Model, types: Sequence[Layer]) -> tuple[int, ...]:
    used = [index for index, _ in reversed(_runs(model))]
    attends = [index for index in used if types[index].attention][:1]
    return tuple(dict.fromkeys([*attends, used[0]]))


def _typed(model: Model) -> tuple[Layer, ...]:
    plain = {name: _resolve(model, name, one) for name, one in (model.layer_types or {"": LayerType()}).items()}
    several = len(plain) > 1
    # Of those that open a model, types of their own come first, as they do.
    return tuple(
        replace(plain[name], name=f"{name}-first" if several else "first", opens=True) if opens else plain[name]
        for name, opens in dict.fromkeys((name, opens) for name, opens, _ in _named(model))
    )


def _named(model: Model) -> list[tuple[str, bool, int]]:
    """Runs of layers: the name of their type, whether they open the model, and their number."""
    plain = [(next(iter(model.layer_types), ""), model.layers)]
    return sections.opened(plain if model.pattern is None else sections.runs_of(model.pattern), model.opening)


@lru_cache(maxsize=64)
def _opening(model: Model) -> int:
    whole, tuning = model.tuned(None), model.tuning
    assert tuning is not None, "asked before"
    before = 0
    for index, count in whole.decoder_runs:
        if tuning.reaches(whole.types[index].sections):
            return before + 1
        before += count
    return model.layers


@lru_cache(maxsize=64)
def _runs(model: Model) -> tuple[tuple[int, int], ...]:
    named = _named(model)
    index = {one: number for number, one in enumerate(dict.fromkeys((name, opens) for name, opens, _ in named))}
    return tuple((index[name, opens], count) for name, opens, count in named)


@lru_cache(maxsize=64)
def _starts(model: Model) -> tuple[int, ...]:
    shares = [one.indexer is not None and one.indexer.shared for one in model.types]
    each = [shares[index] for index, count in _runs(model) for _ in range(count)]
    return tuple(layer for layer, shared in enumerate(each) if not shared or not layer)


def _resolve(model: Model, name: str, given: LayerType) -> Layer:
    """A layer type with the model's own sizes where it says nothing."""
    latent, attends = given.latent, int(given.attention)
    heads, own_dim = attends * (given.heads or model.heads), given.head_dim or model.head_dim
    head_dim, value_dim = (
        (own_dim, given.value_dim or own_dim)
        if latent is None
        else (latent.nope_dim + latent.rope_dim, latent.value_dim)
    )
    return Layer(
        name=name,
        hidden=model.hidden,
        biases=model.biases,
        rms=model.family == "llama",
        attention=given.attention,
        heads=heads,
        kv_heads=heads if latent is not None else attends * (given.kv_heads or model.kv_heads),
        head_dim=attends * head_dim,
        value_dim=attends * value_dim,
        latent=latent,
        indexer=given.indexer,
        window=given.window,
        sinks=given.sinks,
        qk_norms=given.qk_norms,
        norms=given.norms or model.norms or "pre",
        rotary_share=given.rotary_share,
        ffn=(given.ffn or model.ffn) if given.mlp and given.experts is None else 0,
        gated=given.mlp and (model.gated if given.gated is None else given.gated),
        experts=given.experts,
        mixer=given.mixer,
        output_gate=given.output_gate,
        values_are_keys=given.values_are_keys,
        in_bf16=given.in_bf16,
    )


UNWRITTEN = frozenset(
    {
        *("norms behind attention and MLP", "norms of queries and keys over all heads"),
        "attention and MLP in parallel",
    }
)
"""Of `Model.parts`: those that are priced, and of which no framework has arguments."""

RUN = frozenset(
    {
        *("experts", "shared experts", "layer types of different sizes"),
        *("gated delta nets", "layers without attention", "output gates of attention"),
    }
)
"""Of `Model.parts`: those of models which the bundled runtime trains."""


def unrun(model: Model) -> str | None:
    """Why the bundled runtime does not train a model, if that is so."""
    lacking = [part for part in model.parts if part not in RUN]
    experts = [layer.experts for layer in model.types if layer.experts is not None]
    finer = {
        "latent projections of experts": any(one.latent_width for one in experts),
        "node-limited routing": any(one.groups > 1 for one in experts),
        "biases of experts": bool(experts) and model.biases,
        "gates of shared experts": any(one.shared_gate for one in experts),
        "layers that are an MLP alone": not all(layer.mixes for layer in model.types),
        "norms of queries and keys without rotary positions": model.family == "gpt"
        and any(layer.qk_norms for layer in model.types),
    }
    if (tuning := model.tuning) is not None:
        finer |= {
            TITLES[tuning.mode]: tuning.mode != "lora",
            f"base in {tuning.base}": tuning.quantized,
            f"adapters in {tuning.dtype}": tuning.dtype != "fp32",
            "dropout of adapters": tuning.dropout > 0.0,
            "gradients of a first layer's input": tuning.input_gradients,
            "collectives of adapters": tuning.collectives != "none",
            "tables that train beside adapters": bool(tuning.tables) and tuning.adapts,
            "adapters of models with experts": bool(experts),
            "adapters of models with gated delta nets": any(layer.mixer is not None for layer in model.types),
        }
    lacking += [words for words, has in finer.items() if has]
    return f"{model.name}: the bundled runtime has no {', no '.join(lacking)}" if lacking else None
