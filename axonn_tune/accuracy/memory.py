"""Predicted memory of published training steps, by the quantity each row names.

The quantities are those of Korthikanti et al., arXiv 2205.05198, figures 1 and 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from axonn_tune.accuracy.judged import Judged
from axonn_tune.accuracy.records import number, read_records
from axonn_tune.baselines.layout import KORTHIKANTI_2022, Layout
from axonn_tune.baselines.memory import blocks_in_flight, kept_per_block, stage_parameters, states, total_bytes
from axonn_tune.specs.model import Model, ModelDefaults
from axonn_tune.specs.workload import ELEMENT_SIZES, Recompute
from axonn_tune.units import GIB

NEEDED = ("model", "h", "a", "l", "tp", "pp", "mbs", "gbs", "quantity", "value", "unit")
SEQUENCE_LENGTH, VOCABULARY = 2048, 51200
"""Of all models of that paper."""


def judge_memory(path: Path) -> tuple[Judged, ...]:
    """Every row of a file with its predicted bytes, or share; quantities not known say so. Errors as `read_records`."""
    return tuple(_judge(record, line) for line, record in read_records(path, needed=NEEDED))


def _judge(record: Mapping[str, str], line: int) -> Judged:
    name, quantity = record.get("id") or f"line {line}", record["quantity"]
    value = number(record, "value")
    relative = record["unit"].strip() == "%"
    measured = None if value is None else value / 100.0 if relative else value * GIB
    model, layout = _model(record), _layout(record)
    words = quantity.lower()
    if "activation" in words:
        predicted = _activations_bytes(model, _as_named(layout, words), record)
        if relative:
            predicted /= _activations_bytes(model, layout, record)
    elif "optimizer" in words or "parameter" in words or "grad" in words:
        predicted = _states_bytes(model, layout)
    else:
        return Judged(name, quantity, measured, why_not=f"no such quantity is predicted: {quantity!r}")
    return Judged(name, "relative" if relative else words.split(",")[0], measured, predicted)


def _states_bytes(model: Model, layout: Layout) -> float:
    """Of the mean stage: the paper divides all parameters by all GPUs."""
    stages = [
        stage_parameters(model, layout, software=KORTHIKANTI_2022, stage=stage) for stage in range(layout.pipeline)
    ]
    return total_bytes(states(ELEMENT_SIZES["fp16"], layout, parameters=fmean(stages)))


def _activations_bytes(model: Model, layout: Layout, record: Mapping[str, str]) -> float:
    """Activations of the first stage: its blocks in flight times what a block keeps, temporaries not counted."""
    kept = kept_per_block(
        model, ELEMENT_SIZES["fp16"], layout, software=KORTHIKANTI_2022, sequence_length=SEQUENCE_LENGTH
    )
    batches = int(number(record, "gbs") or 1) // (layout.micro_batch * layout.data)
    return blocks_in_flight(model, layout, micro_batches=batches) * kept


def _as_named(layout: Layout, words: str) -> Layout:
    """The layout with what a quantity's name says is split or computed again."""
    split = any(name in words for name in ("seq-parallel", "seq parallel", "sequence parallel", "sequence-parallel"))
    recompute: Recompute = "selective" if "selective" in words else "full" if "full" in words else "none"
    return replace(layout, sequence_parallel=split, recompute=recompute)


def _layout(record: Mapping[str, str]) -> Layout:
    tensor, pipeline = int(number(record, "tp") or 1), int(number(record, "pp") or 1)
    gpus = int(number(record, "gpus") or tensor * pipeline)
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        data=max(1, gpus // (tensor * pipeline)),
        micro_batch=int(number(record, "mbs") or 1),
        interleave=int(number(record, "vpp") or 1),
    )


def _model(record: Mapping[str, str]) -> Model:
    hidden, heads = int(number(record, "h") or 0), int(number(record, "a") or 0)
    return Model(
        schema="axonn-tune/model/1",
        name=record["model"],
        family="gpt",
        layers=int(number(record, "l") or 0),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocab=VOCABULARY,
        max_sequence_length=SEQUENCE_LENGTH,
        biases=True,
        tied_embeddings=True,
        source="published row",
        defaults=ModelDefaults(global_batch=1, sequence_length=SEQUENCE_LENGTH),
    )
