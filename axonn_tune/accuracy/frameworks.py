"""What the software of a row does: how it fuses, what it overlaps, how fast its host issues work.

Its numbers are in `published/kernels.csv`, with their sources; `python -m benchmarks.software` fits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from axonn_tune.accuracy.records import read_records
from axonn_tune.accuracy.rows import StepRow
from axonn_tune.accuracy.shipped import SHIPPED
from axonn_tune.baselines.layout import CURRENT, KORTHIKANTI_2022, NARAYANAN_2021, Software
from axonn_tune.cost.compute import Kernels

CUDNN_ON_HOPPER = 0.5
"""Time of attention of cuDNN and FlashAttention-3 over FlashAttention-2's on Hopper (arXiv 2407.08608, figure 5)."""


UNKNOWN = "unknown"
"""Software that no row of the fit ran: in kernels.csv the mean of all that were."""


@dataclass(frozen=True)
class Framework:
    """A training framework: what its software does, and whether its GPT layers have biases.

    kernels: the software in kernels.csv that it uses; sharded: parameters are split over the data-parallel
    ranks (FSDP, ZeRO-3); newest_attention: its attention uses what Hopper adds; known: it was in the fit.
    """

    name: str
    software: Software
    kernels: str
    biases: bool = True
    sharded: bool = False
    newest_attention: bool = False
    known: bool = True


_EAGER = replace(CURRENT, tensor_overlap=False, pipeline_overlap=False)
_CORE = replace(CURRENT, gradient_bytes=2)
_XLA = Framework("xla", CURRENT, "core", biases=False, sharded=True, newest_attention=True)
_MEGATRON_CORE = Framework("megatron-core", _CORE, "core", biases=False, newest_attention=True)
_DEEPSPEED = replace(NARAYANAN_2021, gradient_bytes=2)
FRAMEWORKS: tuple[tuple[str, Framework], ...] = (
    ("bigscience", Framework("megatron-deepspeed", NARAYANAN_2021, "megatron-2021")),
    ("megatron-deepspeed", Framework("megatron-deepspeed", _DEEPSPEED, "megatron-deepspeed")),
    ("zero-3", Framework("deepspeed", NARAYANAN_2021, "megatron-2021", sharded=True)),
    ("ptd-p", Framework("megatron-2021", NARAYANAN_2021, "megatron-2021")),
    ("scatter-gather", Framework("megatron-2021", NARAYANAN_2021, "megatron-2021")),
    ("megatron-core", _MEGATRON_CORE),
    ("nemo", _MEGATRON_CORE),
    ("megatron-bridge", _MEGATRON_CORE),
    ("megatron bridge", _MEGATRON_CORE),
    ("megascale", Framework("megascale", CURRENT, "core")),
    ("meta internal", Framework("meta-4d", CURRENT, "core", biases=False, newest_attention=True)),
    ("megatron", Framework("megatron-lm", KORTHIKANTI_2022, "megatron-2021")),
    ("fsdp", Framework("fsdp", _EAGER, "eager", biases=False, sharded=True)),
    ("torchtitan", Framework("fsdp", _EAGER, "eager", biases=False, sharded=True)),
    ("maxtext", _XLA),
    ("paxml", _XLA),
    ("jax", _XLA),
    ("xla", _XLA),
)
"""Word in a framework's name, and what it means; the first found counts."""

_UNKNOWN = Framework(UNKNOWN, _EAGER, UNKNOWN, biases=False, known=False)


def framework_of(row: StepRow) -> Framework:
    """The framework a row names, with what the row itself says of attention, overlap and compilation."""
    words = row.framework.lower()
    found = next((known for word, known in FRAMEWORKS if word in words), _UNKNOWN)
    said = f"{row.framework} {row.overlap} {row.notes}".lower()
    if found.kernels == "eager" and "compile" in said and "eager" not in row.overlap.lower():
        found = replace(found, kernels="compiled")
    attention = row.attention.lower()
    if attention not in {"", "nan"}:
        fused = ("flash" in attention or "sdpa" in attention or "cudnn" in attention) and "no flash" not in attention
        found = replace(found, software=replace(found.software, fused_attention=fused))
    elif found.name == "megatron-core" and any(chip in row.gpu.lower() for chip in ("a100", "v100")):
        # Where it does not say so, what ran on these is NeMo before it had FlashAttention and fused layers.
        found = replace(found, software=replace(found.software, fused_attention=False), kernels="megatron-2021")
    kernels = software_kernels(found.kernels)
    if found.newest_attention and any(chip in row.gpu.lower() for chip in ("h100", "h200", "h800", "gh200")):
        kernels = replace(kernels, attention=kernels.attention * CUDNN_ON_HOPPER)
    sharded = found.sharded or row.zero.startswith("3")
    return replace(found, sharded=sharded, software=replace(found.software, kernels=kernels))


@cache
def software_kernels(name: str) -> Kernels:
    """Numbers of one software in kernels.csv."""
    return kernels_from(name, {key: value for (software, key), value in kernel_numbers().items() if software == name})


def kernels_from(name: str, numbers: Mapping[str, float]) -> Kernels:
    """Numbers by parameter as one value; `name` is whose they are."""
    assert numbers, f"no numbers of {name}"
    return Kernels(**numbers)


@cache
def kernel_numbers() -> dict[tuple[str, str], float]:
    """Every number of kernels.csv by software and parameter."""
    records = read_records(SHIPPED / "kernels.csv", needed=("software", "parameter", "value"))
    return {(record["software"], record["parameter"]): float(record["value"]) for _, record in records}
