"""What a row means to the cost model: model, workload, layout and software; or why it cannot be priced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from axonn_tune.accuracy.frameworks import Framework, framework_of
from axonn_tune.accuracy.rows import StepRow
from axonn_tune.accuracy.sites import ACCELERATORS, machine_of
from axonn_tune.baselines.layout import Layout, Software, broken_constraints
from axonn_tune.grid import divisors
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model, ModelDefaults
from axonn_tune.specs.workload import RECOMPUTES, Precision, Recompute, Workload


@dataclass(frozen=True)
class Case:
    """A row as the cost model sees it; `layouts`: several where the row leaves something open."""

    row: StepRow
    model: Model
    workload: Workload
    machine: Machine
    framework: Framework
    software: Software
    layouts: tuple[Layout, ...]


@dataclass(frozen=True)
class Refusal:
    """A row that cannot be priced, and why."""

    row: StepRow
    why: str


def case_of(row: StepRow) -> Case | Refusal:
    """Map a row; Refusal with the reason where something in it is out of scope or impossible."""
    precision = _precision(row.precision)
    if precision is None:
        return Refusal(row, f"number format {row.precision!r} is not modelled: bf16, fp16, fp32 and fp64 are")
    machine = machine_of(row)
    if machine is None:
        known = ", ".join(sorted({word.upper() for word, _ in ACCELERATORS}))
        return Refusal(row, f"no machine profile has the accelerator {row.gpu!r}: known are {known}")
    ranks = row.tensor * row.pipeline * row.context * row.data
    if ranks != row.gpus:
        parts = f"tensor {row.tensor} x pipeline {row.pipeline} x context {row.context} x data {row.data}"
        return Refusal(row, f"{parts} = {ranks}, not {row.gpus} GPUs")
    framework = framework_of(row)
    model = _model(row, framework)
    workload = Workload(global_batch=row.global_batch, sequence_length=row.sequence_length, precision=precision)
    layouts = tuple(_layouts(row, model, workload))
    if not layouts:
        wrong = broken_constraints(next(_open_layouts(row)), model, workload, uneven_stages=True)
        return Refusal(row, "; ".join(wrong) or "no layout satisfies the constraints")
    software = framework.software
    if row.vocabulary_multiple is not None:
        software = replace(software, vocabulary_multiple=row.vocabulary_multiple)
    return Case(row, model, workload, machine, framework, software, layouts)


def _precision(words: str) -> Precision | None:
    text = words.lower()
    if "fp8" in text or "int8" in text or "fp4" in text:
        return None
    if "fp16" in text or "half" in text or "mixed" in text:
        return "bf16" if text.startswith("bf16") else "fp16"
    if text in {"", "nan"}:
        return "bf16"
    found: dict[str, Precision] = {"bf16": "bf16", "bfloat16": "bf16", "fp64": "fp64", "fp32": "fp32"}
    return next((precision for word, precision in found.items() if word in text), None)


def _model(row: StepRow, framework: Framework) -> Model:
    return Model(
        schema="axonn-tune/model/1",
        name=row.model or "model",
        family="llama" if row.gated else "gpt",
        layers=row.layers,
        hidden=row.hidden,
        heads=row.heads,
        kv_heads=row.kv_heads,
        head_dim=max(1, row.hidden // row.heads),
        ffn=row.ffn,
        vocab=row.vocab,
        max_sequence_length=row.sequence_length,
        biases=framework.biases and not row.gated,
        tied_embeddings=not row.gated,
        source="published row",
        defaults=ModelDefaults(global_batch=row.global_batch, sequence_length=row.sequence_length),
    )


def _layouts(row: StepRow, model: Model, workload: Workload) -> Iterator[Layout]:
    """The row's layout; every one that is allowed where micro-batch, interleaving or recomputation is open."""
    for layout in _open_layouts(row):
        per_rank = workload.global_batch // layout.data
        batches = divisors(per_rank) if row.micro_batch is None and per_rank else (row.micro_batch or 1,)
        chunks: tuple[int, ...] = (row.interleave or 1,)
        if row.interleave is None and layout.pipeline > 1:
            chunks = tuple(sorted({*divisors(max(1, model.layers // layout.pipeline))}))
        for micro_batch in batches:
            for interleave in chunks:
                candidate = replace(layout, micro_batch=micro_batch, interleave=interleave)
                if not broken_constraints(candidate, model, workload, uneven_stages=True):
                    yield candidate


def _open_layouts(row: StepRow) -> Iterator[Layout]:
    """The row's degrees, with each recomputation it may mean."""
    zero = _zero_stage(row)
    for recompute in _recomputes(row.recompute):
        yield Layout(
            tensor=row.tensor,
            pipeline=row.pipeline,
            data=row.data,
            micro_batch=row.micro_batch or 1,
            interleave=row.interleave or 1,
            recompute=recompute,
            sequence_parallel=row.sequence_parallel and row.tensor > 1,
            distributed_optimizer=zero >= 1,
            context=row.context,
            sharded_gradients=zero >= 2,
            sharded_weights=zero >= 3,
        )


def _zero_stage(row: StepRow) -> int:
    """ZeRO stage; where words describe sharding instead, gradients are taken to be sharded."""
    first = row.zero[:1]
    if first.isdigit():
        return int(first)
    return 2 if "shard" in row.zero.lower() or "fsdp" in row.zero.lower() else 0


def _recomputes(words: str) -> tuple[Recompute, ...]:
    text = words.lower()
    if "not stated" in text or text in {"", "nan"}:
        return RECOMPUTES
    return next(((kind,) for kind in RECOMPUTES if text.startswith(kind)), RECOMPUTES)
