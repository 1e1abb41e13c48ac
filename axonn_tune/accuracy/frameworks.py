"""What the software of a row does: how it fuses, what it overlaps, how fast its host issues work."""

from __future__ import annotations

from dataclasses import dataclass, replace

from axonn_tune.accuracy.rows import StepRow
from axonn_tune.baselines.layout import Software


@dataclass(frozen=True)
class Framework:
    """A training framework: what its software does, and whether its GPT layers have biases.

    sharded: parameters are split over the data-parallel ranks (FSDP, ZeRO-3).
    """

    name: str
    software: Software
    biases: bool = True
    sharded: bool = False


EAGER = Software(tensor_overlap=False, pipeline_overlap=False)
MEGATRON_2021 = Software(
    fused_attention=False,
    dropout=True,
    fused_accumulation=False,
    tensor_overlap=False,
    pipeline_overlap=False,
    data_overlap=False,
)
MEGATRON_2022 = replace(MEGATRON_2021, fused_accumulation=True, tensor_overlap=True)
MEGATRON_CORE = Software()

_KNOWN: tuple[tuple[str, Framework], ...] = (
    ("megatron-deepspeed", Framework("megatron-deepspeed", MEGATRON_2021)),
    ("zero-3", Framework("deepspeed", MEGATRON_2021, sharded=True)),
    ("ptd-p", Framework("megatron-2021", MEGATRON_2021)),
    ("scatter-gather", Framework("megatron-2021", MEGATRON_2021)),
    ("megatron-core", Framework("megatron-core", MEGATRON_CORE, biases=False)),
    ("nemo", Framework("megatron-core", MEGATRON_CORE, biases=False)),
    ("megatron-bridge", Framework("megatron-core", MEGATRON_CORE, biases=False)),
    ("megascale", Framework("megascale", MEGATRON_CORE)),
    ("meta", Framework("megatron-core", MEGATRON_CORE, biases=False)),
    ("megatron", Framework("megatron-lm", MEGATRON_2022)),
    ("fsdp", Framework("fsdp", EAGER, biases=False, sharded=True)),
    ("maxtext", Framework("xla", MEGATRON_CORE, biases=False, sharded=True)),
    ("paxml", Framework("xla", MEGATRON_CORE, biases=False, sharded=True)),
)


def framework_of(row: StepRow) -> Framework:
    """The framework a row names, with what the row itself says of attention and overlap."""
    words = row.framework.lower()
    found = next((known for word, known in _KNOWN if word in words), None)
    if found is None:
        found = Framework("unknown", EAGER, biases=False, sharded=row.zero.startswith("3"))
    if row.zero.startswith("3") or (row.zero.startswith("2") and row.tensor == row.pipeline == 1):
        found = replace(found, sharded=True)
    attention = row.attention.lower()
    if attention and attention != "nan":
        fused = ("flash" in attention or "sdpa" in attention) and "no flash" not in attention
        found = replace(found, software=replace(found.software, fused_attention=fused))
    return found
