"""Rows of measured training steps: a CSV file with one row per measured layout.

Columns may come in any order and more of them than are read; those in `NEEDED` must be there. An empty
cell, `nan` or words where a number is expected mean that the source does not say; an empty `vpp` means no
interleaving, `unknown` that the source is silent about it.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from axonn_tune.errors import DocumentError, Problem, UsageError

SHIPPED = Path(__file__).parent
"""Folder of the measurements that ship with the tool."""

NEEDED = ("id", "gpu", "n_gpus", "framework", "layers", "hidden", "heads", "ffn", "vocab", "seq", "gbs")


@dataclass(frozen=True)
class StepRow:
    """One measured step; None where the source does not say. `step_s` is None in a row that only asks."""

    id: str
    line: int
    dataset: str
    family: str
    framework: str
    system: str
    gpu: str
    network: str
    model: str
    precision: str
    attention: str
    overlap: str
    zero: str
    recompute: str
    notes: str
    gpu_memory_gb: float | None
    gpus: int
    gpus_per_node: int | None
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    gated: bool
    vocab: int
    vocabulary_multiple: int | None
    sequence_length: int
    global_batch: int
    micro_batch: int | None
    tensor: int
    pipeline: int
    interleave: int
    interleave_known: bool
    context: int
    data: int
    sequence_parallel: bool
    step_s: float | None
    memory_gib: float | None


def read_steps(path: Path) -> tuple[StepRow, ...]:
    """Every row of a file; UsageError if it cannot be read, DocumentError with all problems of its contents."""
    rows, problems = [], []
    for line, record in read_records(path, needed=NEEDED):
        try:
            rows.append(_step_row(record, line))
        except ValueError as error:
            problems.append(Problem(record.get("id", ""), str(error), line))
    if problems:
        raise DocumentError(str(path), problems)
    return tuple(rows)


def _count(record: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A whole number from 1 up; ValueError if it is none and there is no default."""
    value = number(record, name)
    if value is None and default is not None:
        return default
    if value is None or value != int(value) or value < 1:
        raise ValueError(f"{name} is {record.get(name, '')!r}, not a whole number from 1 up")
    return int(value)


def _maybe(record: Mapping[str, str], name: str) -> int | None:
    return None if number(record, name) is None else _count(record, name)


@cache
def _blemishes() -> tuple[dict[str, str], ...]:
    """Columns that published rows are known to state wrongly, with what is taken instead, and why."""
    return tuple(record for _, record in read_records(SHIPPED / "blemishes.csv", needed=("dataset", "column")))


def _mended(record: Mapping[str, str]) -> dict[str, str]:
    """A record with known blemishes of its data set replaced."""
    mended = dict(record)
    for blemish in _blemishes():
        if (mended.get("dataset"), mended.get(blemish["column"], "")) == (blemish["dataset"], blemish["stated"]):
            mended[blemish["column"]] = blemish["taken"]
    return mended


_WORDS = {
    **{name: name for name in ("id", "dataset", "framework", "system", "gpu", "network", "model", "precision")},
    **{name: name for name in ("overlap", "notes", "recompute")},
    "attention": "attn",
    "zero": "zero_stage",
}
"""Fields that are words, and their columns."""


def _step_row(stated: Mapping[str, str], line: int) -> StepRow:
    record = _mended(stated)
    tensor, pipeline, context = (_count(record, name, 1) for name in ("tp", "pp", "cp"))
    gpus, heads = _count(record, "n_gpus"), _count(record, "heads")
    return StepRow(
        **{field: record.get(column, "") for field, column in _WORDS.items()},
        line=line,
        family=record.get("family") or f"{record.get('model', '')}|{gpus}",
        gpu_memory_gb=number(record, "gpu_mem_gb"),
        gpus=gpus,
        gpus_per_node=_maybe(record, "gpus_per_node"),
        layers=_count(record, "layers"),
        hidden=_count(record, "hidden"),
        heads=heads,
        kv_heads=_count(record, "kv_heads", heads),
        ffn=_count(record, "ffn"),
        gated=_flag(record, "gated_mlp"),
        vocab=_count(record, "vocab"),
        vocabulary_multiple=_multiple(record),
        sequence_length=_count(record, "seq"),
        global_batch=_count(record, "gbs"),
        micro_batch=_maybe(record, "mbs"),
        tensor=tensor,
        pipeline=pipeline,
        interleave=_count(record, "vpp", 1),
        interleave_known=record.get("vpp", "").lower() != "unknown",
        context=context,
        data=_count(record, "dp", max(1, gpus // (tensor * pipeline * context))),
        sequence_parallel=_flag(record, "seq_parallel"),
        step_s=_time_s(record),
        memory_gib=number(record, "mem_gib"),
    )


def _time_s(record: Mapping[str, str]) -> float | None:
    value = number(record, "step_s")
    if value is not None and value <= 0.0:
        raise ValueError(f"step_s is {record['step_s']!r}, not a time above 0")
    return value


def _multiple(record: Mapping[str, str]) -> int | None:
    """Multiple to which each rank's rows of the table are padded; 0: not padded; None: not said."""
    value = number(record, "vocab_multiple")
    if value is not None and (value != int(value) or value < 0):
        raise ValueError(f"vocab_multiple is {record['vocab_multiple']!r}, not a whole number from 0 up")
    return None if value is None else int(value)


def _flag(record: Mapping[str, str], name: str) -> bool:
    return record.get(name, "").lower() in {"1", "1.0", "true", "yes"}


def read_records(path: Path, *, needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Records of a CSV file with their line numbers; UsageError if it
    cannot be read, DocumentError if a needed column is missing."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in needed if name not in (reader.fieldnames or ())]
            if missing:
                raise DocumentError(str(path), [Problem("", f"no column {name!r}", 1) for name in missing])
            for record in reader:
                yield reader.line_num, {name: (value or "").strip() for name, value in record.items() if name}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def number(record: Mapping[str, str], name: str) -> float | None:
    """A number, or None if the cell is empty or holds words."""
    try:
        value = float(record.get(name, ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
