"""What of a model trains, as files of Hugging Face's Trainer and of what descends from it state it.

Arguments are those of the table `adapters`; a tool's defaults are in its line of the table `trainers`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from axonn_tune.frameworks.description import Framework
from axonn_tune.frameworks.keys import Arguments, Stated, is_on, keys_of, meaning_of
from axonn_tune.specs.tuning import Sharing, Table, Tuning, tools, tuning
from axonn_tune.vocabulary import AdapterType

_ALL = "all-linear"
"""PEFT's name of all linear layers but the LM head; LLaMA-Factory has `all`, axolotl `lora_target_linear`."""


@dataclass(frozen=True)
class Adapters:
    """Adapters beside weights that do not train, by PEFT's names.

    bits: of these weights; dtype: of adapters; exchanged: as Megatron-Bridge's `a2a_experimental` has it; tables: those
    that train beside them; experts: whether routed ones share one on a rank.
    """

    mode: Literal["lora", "qlora", "dora"]
    rank: int | None
    targets: tuple[str, ...]
    dropout: float
    bits: int
    dtype: AdapterType
    exchanged: bool = False
    tables: tuple[Table, ...] = ()
    experts: Sharing = "shared"

    def options(self, framework: Framework) -> dict[str, Any]:
        """What a request states for the same."""
        found: dict[str, Any] = {"tune": self.mode, "lora_dtype": self._dtype(framework)}
        found |= {"lora_rank": self.rank} if self.rank else {}
        found |= {"lora_targets": targets} if (targets := self._targets(framework)) else {}
        more = [f"workload.tuning.dropout={self.dropout}"] if self.dropout else []
        more += ["workload.tuning.base=int8"] if self.bits == 8 else []
        more += ["workload.tuning.collectives=exchanged"] if self.exchanged else []
        more += [f"workload.tuning.tables=[{','.join(self.tables)}]"] if self.tables else []
        more += ["workload.tuning.experts=each"] if self.experts == "each" else []
        return found | ({"set": tuple(more)} if more else {})

    def of(self, framework: Framework) -> Tuning | None:
        """The same as a workload has it; UsageError where the framework trains models whole."""
        made = tuning(
            self.mode,
            framework.tuner,
            rank=self.rank,
            targets=self._targets(framework) or None,
            dtype=self._dtype(framework),
            dropout=self.dropout,
            bits=self.bits,
            exchanged=self.exchanged,
        )
        more = {"tables": self.tables, "experts": self.experts}
        return made.model_copy(update=more) if made is not None else None

    def _targets(self, framework: Framework) -> tuple[str, ...]:
        """What is adapted, by the framework's names: () for all that its tool adapts unasked."""
        has_all = framework.tuner and _ALL in tools()[framework.tuner].names
        return () if self.targets == (_ALL,) and not has_all else self.targets

    def _dtype(self, framework: Framework) -> AdapterType | None:
        """Their type, where PEFT decides it."""
        return self.dtype if framework.tuner == "peft" else None


def stated_adapters(stated: Arguments) -> Adapters | None:
    """Those of a run; None where all weights train, or nothing says what does."""
    mode = meaning_of("tuning.mode", stated)
    if not (_is_on("tuning.adapts", stated) or (mode is not None and mode.value != "full")):
        return None
    bits = meaning_of("tuning.bits", stated)
    width = int(bits.value) if bits else 4 if mode and mode.value == "qlora" else 16
    rank, dropout = meaning_of("tuning.rank", stated), meaning_of("tuning.dropout", stated)
    pure = any(is_on(stated[key.name]) for key in keys_of("trainer.pure") if key.name in stated)
    dora = _is_on("tuning.dora", stated) or (mode is not None and mode.value == "dora")
    said = meaning_of("tuning.dtype", stated)
    return Adapters(
        mode="dora" if dora else "qlora" if width == 4 else "lora",
        rank=rank.value if rank else None,
        targets=_targets(stated),
        dropout=float(dropout.value or 0.0) if dropout else 0.0,
        bits=width,
        # PEFT casts adapters up, LLaMA-Factory's pure_bf16 does not (model/adapter.py).
        dtype=said.value if said else "bf16" if pure else "fp32",
        exchanged=_is_on("tuning.exchanged", stated),
        tables=_tables(stated),
        experts="each" if (shares := meaning_of("tuning.sharing", stated)) and not shares.value else "shared",
    )


def _tables(stated: Arguments) -> tuple[Table, ...]:
    """Tables that PEFT's `modules_to_save` names."""
    keys = [key for key in keys_of("tuning.tables") if key.name in stated]
    meant = {key.meanings.get(word) for key in keys for word in re.findall(r"\w+", stated[key.name].value)}
    known: tuple[Table, ...] = ("embedding", "head")
    return tuple(one for one in known if one in meant)


def _is_on(field: str, stated: Arguments) -> bool:
    found = meaning_of(field, stated)
    return found is not None and bool(found.value)


def _targets(stated: Arguments) -> tuple[str, ...]:
    """What is adapted; () for the tool's own choice."""
    found = meaning_of("tuning.targets", stated)
    words = re.findall(r"[\w-]+", found.value) if found else []
    if _is_on("tuning.linear", stated) or {*words} & {"all", _ALL}:
        return (_ALL,)
    return tuple(words)


def tool_defaults(tool: Mapping[str, str], stated: Arguments) -> Iterator[tuple[str, Stated]]:
    """What a tool has where its file does not say what trains, or what adapters are like."""
    own = {"tuning.mode": tool["tune"], "tuning.rank": tool["rank"], "tuning.targets": tool["targets"]}
    own["tuning.dropout"] = tool["dropout"]

    def said(*fields: str) -> bool:
        return any(key.name in stated for field in fields for key in keys_of(field))

    if not said("tuning.mode", "tuning.adapts") and tool["tune"] != "full":
        yield keys_of("tuning.mode")[0].name, Stated(tool["tune"], 0)
    elif stated_adapters(stated) is None:
        return
    for field in ("tuning.rank", "tuning.targets", "tuning.dropout"):
        also = ("tuning.linear",) if field == "tuning.targets" else ()
        if own[field] not in ("", "0") and not said(field, *also):
            yield keys_of(field)[0].name, Stated(own[field], 0)
