"""What of a model trains: all of it, or adapters of low rank beside linear layers that stay as they are.

Names of what tools adapt, and their defaults, are in tuning.yaml. LoRA: Hu et al., arXiv 2106.09685; QLoRA: Dettmers et
al., arXiv 2305.14314; DoRA: Liu et al., arXiv 2402.09353.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from axonn_tune.errors import UsageError, suggest
from axonn_tune.specs.document import Document, Size, read_yaml, validate
from axonn_tune.vocabulary import AdapterType, Tune

Base: TypeAlias = Literal["bf16", "nf4", "int8"]
Collectives: TypeAlias = Literal["none", "gathered", "exchanged"]
Sharing: TypeAlias = Literal["shared", "each"]
Table: TypeAlias = Literal["embedding", "head"]

BASE_BYTES: dict[Base, float] = {
    "bf16": 2.0,
    # A scale a block of 64 in 8 bits, and of each 256 of those one in FP32 (double quantization; arXiv 2305.14314,
    # section 3); as LLM.int8() has it, a scale a row, of which there are few (bitsandbytes@95f9af30, functional.py).
    "nf4": 0.5 + 1.0 / 64.0 + 4.0 / (64.0 * 256.0),
    "int8": 1.0,
}
"""Bytes of an element of a linear layer's weight that does not train."""
BASES: dict[str, Base] = {"qlora": "nf4"}
"""Formats of the base by mode, where not BF16."""
REST = "*"
"""Among targets: all linear layers of blocks that are not named."""
TITLES: dict[str, str] = {"lora": "LoRA", "qlora": "QLoRA", "dora": "DoRA", "head": "LM head"}


class Tuning(Document):
    """What of a model trains, where that is not all of it."""

    mode: Literal["lora", "qlora", "dora", "head"] = Field(
        description="lora, dora: adapters; qlora: those of a base in 4 bits; head: the LM head alone."
    )
    rank: Size = Field(default=8, description="Rank of adapters.")
    targets: tuple[str, ...] = Field(
        default=(),
        description="Linear layers with adapters, as programs name them: attention.qkv, or attention.qkv/q for a part "
        "that has one of its own; * for all others.",
    )
    dtype: AdapterType = Field(default="bf16", description="Type of adapters: bf16, or fp32 without master weights.")
    base: Base = Field(default="bf16", description="Format of linear layers that do not train.")
    collectives: Collectives = Field(
        default="none",
        description="How adapters communicate under tensor parallelism: not, or as Megatron-Bridge, which gathers "
        "outputs of row-parallel layers or exchanges them by all-to-alls (a2a_experimental).",
    )
    input_gradients: bool = Field(
        default=False,
        description="Whether blocks that repeat their activations are given inputs with gradients, so that backward "
        "goes down to the embedding; otherwise it ends at the first adapter.",
    )
    experts: Sharing = Field(
        default="shared",
        description="Adapters of routed experts: one that all experts of a rank share, or each its own.",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.0, description="Dropout of adapters' inputs.")
    tables: tuple[Table, ...] = Field(default=(), description="Tables that train: embedding, head.")

    @model_validator(mode="after")
    def _trains_what_it_says(self) -> Self:
        if self.mode == "head" and self.tables != ("head",):
            raise ValueError("mode head trains the LM head alone: tables is [head]")
        if self.mode == "qlora" and self.base == "bf16":
            raise ValueError("mode qlora has its base in nf4 or int8, not bf16; lora has it in bf16")
        for name, values in (("targets", self.targets), ("tables", self.tables)):
            if len({*values}) < len(values):
                raise ValueError(f"{name} names something twice: {', '.join(values):.80}")
        return self

    @property
    def adapts(self) -> bool:
        """Whether there are adapters, so that gradients go through blocks."""
        return self.mode != "head"

    @property
    def base_bytes(self) -> float:
        """Of an element of a linear layer's weight that does not train."""
        return BASE_BYTES[self.base]

    @property
    def quantized(self) -> bool:
        """Whether linear layers are dequantized for each of their GEMMs."""
        return self.base != "bf16"

    @property
    def words(self) -> str:
        """As titles have it: `LoRA r 16`."""
        return f"{TITLES[self.mode]} r {self.rank}" if self.adapts else TITLES[self.mode]

    @property
    def ends_early(self) -> bool:
        """Whether backward may end before the embedding: nothing before the first adapter trains."""
        return self.adapts and "embedding" not in self.tables

    def reaches(self, sections: Iterable[str]) -> bool:
        """Whether a layer type with these sections of linear layers may have adapters."""
        return REST in self.targets or any(one.partition(".")[0] in sections for one in self.targets)

    def names(self, layer: str) -> bool:
        """Whether a layer, or a part of it, is named."""
        return any(one.partition("/")[0] == layer for one in self.targets)

    def parts(self, layer: str) -> tuple[str, ...]:
        """Parts of a linear layer that have an adapter each: "" for the whole, none if it has no adapter."""
        own = tuple(one.partition("/")[2] for one in self.targets if one.partition("/")[0] == layer)
        return own or (("",) if REST in self.targets else ())


class Tool(Document):
    """A tool's names of what it adapts, its defaults, and how its adapters communicate."""

    modes: tuple[Tune, ...]
    axes: tuple[str, ...] = ()
    rank: Size
    dtype: AdapterType
    collectives: Collectives
    input_gradients: bool = False
    targets: tuple[str, ...]
    names: dict[str, tuple[str, ...]]

    def layers(self, names: Sequence[str]) -> tuple[str, ...]:
        """What these of its names adapt, by our names; UsageError for one that it has not."""
        found = dict[str, None]()
        for name in names:
            if name not in self.names:
                near = suggest(name, self.names)
                raise UsageError(f"--lora-targets {name[:40] or repr(name)}{near}: known: {', '.join(self.names)}")
            found |= dict.fromkeys(self.names[name])
        if REST in found:
            # Of layers that the tool has in parts, each part.
            found = dict.fromkeys(layer for own in self.names.values() for layer in own)
        return tuple(found)

    def keeping(self, one: Tuning) -> Tuning:
        """The same adapters as this tool has them: their type, their collectives, and where backward ends."""
        own = {"dtype": self.dtype, "collectives": self.collectives, "input_gradients": self.input_gradients}
        return one.model_copy(update=own) if one.adapts else one

    def named(self, one: Tuning) -> list[str]:
        """What it adapts by this tool's names: one for all of it, where there is one."""
        whole = [[name] for name in self.names if one.targets == self.layers([name])]
        known = [names for names in (self.targets, *whole) if {*self.layers(names)} == {*one.targets}]
        parts = [name for name, own in self.names.items() if {*own} <= {*one.targets} and REST not in own]
        return [*known[0]] if known else parts

    def words(self, one: Tuning) -> list[str]:
        """Options of a search that state it, by this tool's names and defaults."""
        if not one.adapts:
            return ["--tune", one.mode]
        found = ["--tune", one.mode, "--lora-rank", str(one.rank)]
        if {*one.targets} != {*self.layers(self.targets)}:
            found += ["--lora-targets", ",".join(self.named(one))]
        found += ["--lora-dtype", one.dtype] if one.dtype != self.dtype else []
        settings = {
            "dropout": one.dropout or None,
            "experts": one.experts if one.experts != "shared" else None,
            "base": one.base if one.base != BASES.get(one.mode, "bf16") else None,
            "tables": f"[{','.join(one.tables)}]" if one.tables else None,
        }
        more = ((key, value) for key, value in settings.items() if value is not None)
        return [*found, *(word for key, value in more for word in ("--set", f"workload.tuning.{key}={value}"))]


class _Tools(Document):
    tools: dict[str, Tool]


@cache
def tools() -> dict[str, Tool]:
    """All tools, by their names."""
    path = Path(__file__).with_name("tuning.yaml")
    node = read_yaml(path.read_text(encoding="utf-8"), source=str(path)).root
    return validate(node, schema=_Tools, source=str(path)).tools


def tuning(
    mode: Tune | None,
    tool: str,
    *,
    rank: int | None,
    targets: Sequence[str] | None,
    dtype: AdapterType | None,
    dropout: float = 0.0,
    bits: int = 16,
    exchanged: bool = False,
) -> Tuning | None:
    """What trains in a mode by a tool's defaults, or as asked; None where all does; UsageError for what it has not.

    bits: of a base in 16 or 8 bits, which no mode says. exchanged: by all-to-alls, where the tool has them.
    """
    if mode is None or mode == "full":
        return None
    if not tool:
        raise UsageError(f"--tune {mode}: the framework trains models whole")
    own = tools()[tool]
    if mode not in own.modes:
        having = ", ".join(name for name, one in tools().items() if mode in one.modes)
        raise UsageError(f"--tune {mode}: {tool} has {', '.join(own.modes)}; {mode} is of {having}")
    if mode == "head":
        return Tuning(mode="head", tables=("head",))
    return Tuning(
        mode=mode,
        rank=rank or own.rank,
        targets=own.layers(targets or own.targets),
        dtype=dtype or own.dtype,
        base="int8" if bits == 8 else BASES.get(mode, "bf16"),
        collectives="exchanged" if exchanged and own.collectives == "gathered" else own.collectives,
        input_gradients=own.input_gradients,
        dropout=dropout,
    )
