"""Rows of measured training steps, which `published.cases` maps to the cost model.

A CSV file has one row per measured layout. Columns are those of `COLUMNS`, in any order; those in `NEEDED` must be
there. An empty cell, `nan` or words where a number is expected mean that the source does not state it; options of the
software are then those of its recipes. An empty `vpp` means no interleaving, `unknown` that the source does not state
it. Cells with few possible words hold one of them.

A row may name its model instead of its sizes, and say of experts, number formats and memory what columns of
`published.cells` hold: then an empty `vpp` of several stages is not stated, and what cannot be read is not predicted.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from axonn_tune.errors import CONTROL, DocumentError, Problem, UsageError, suggest
from axonn_tune.frameworks.names import why_unpriced
from axonn_tune.grid import RANK_AXES
from axonn_tune.recompute import MODULES, RECOMPUTES, parse_recompute
from axonn_tune.specs.document import LARGEST_SIZE
from axonn_tune.specs.loading import read_text
from axonn_tune.specs.workload import Recompute
from axonn_tune.stages import parse_layout
from axonn_tune.units import read_number
from axonn_tune.validation.published.cells import ALSO, MORE, NAMED, Named, named, names_model, odd_word

SHIPPED = Path(__file__).parent
"""Folder of the measurements that ship with the tool."""

_LEAST, _LARGEST = 1e-12, 1e18

Cell: TypeAlias = str | float | tuple[int, ...] | tuple[str, ...]
"""What a record has in a column: text of a file, or what a reader of another kind of file found: numbers, flags, axes
and blocks."""
Record: TypeAlias = Mapping[str, Cell]

Repeats: TypeAlias = tuple[tuple[Recompute, int | None], ...]
"""Recompute sets that a step may have, each with its layers of each chunk, None for all of them."""

Read = TypeVar("Read")

NEEDED = ("id", "gpu", "n_gpus", "framework", "layers", "hidden", "heads", "ffn", "vocab", "seq", "gbs")


OPTIONS = ("mbs", "vpp", "recompute", "seq_parallel", "zero_stage", "attn")
"""Columns of how a step runs that do not follow from others where a row leaves them blank."""


@dataclass(frozen=True)
class Place:
    """Where something was measured: cluster and network in words; None where the source does not say."""

    gpu: str
    system: str = ""
    network: str = ""
    gpus_per_node: int | None = None
    gpu_memory_gb: float | None = None


@dataclass(frozen=True, kw_only=True)
class StepRow(Place):
    """One step as a row, a log or a script states it; None or empty where it does not say, or only asks.

    z: ranks over which each weight is sharded, of the `data` that share the batch. order: rank order; parts: blocks of
    each model part; both empty where they are the framework's own. tflops_per_gpu: as the software's own log counts,
    None where a row has its own `flops_convention`. unstated: columns of `OPTIONS` that it leaves blank. more: what a
    row says that names its model.
    """

    id: str
    line: int
    gpus: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence_length: int
    global_batch: int
    data: int
    dataset: str = ""
    family: str = ""
    framework: str = ""
    model: str = ""
    precision: str = ""
    attention: str = ""
    overlap: str = ""
    zero: int = 0
    recomputes: Repeats = ()
    notes: str = ""
    gated: bool = False
    vocabulary_multiple: int | None = None
    micro_batch: int | None = None
    tensor: int = 1
    pipeline: int = 1
    interleave: int = 1
    interleave_known: bool = True
    context: int = 1
    sequence_parallel: bool | None = None
    step_s: float | None = None
    memory_gib: float | None = None
    y: int = 1
    z: int | None = None
    order: tuple[str, ...] = ()
    parts: tuple[int, ...] = ()
    head_dim: int | None = None
    biases: bool | None = None
    tied: bool | None = None
    tflops_per_gpu: float | None = None
    unstated: tuple[str, ...] = ()
    more: Named | None = None


def read_steps(path: Path) -> tuple[StepRow, ...]:
    """Every row of a file; UsageError if it cannot be read, DocumentError with all problems of its contents.

    A row that names its model and has something odd is one without a prediction, beside the others of its file.
    """
    return each_record(path, needed_columns(path), _listed_row, known=COLUMNS)


def _listed_row(stated: Record, line: int) -> StepRow:
    try:
        return step_row(stated, line)
    except ValueError as error:
        if not names_model(stated):
            raise
        cells, more = named({name: _text(stated, name) for name in stated})
        plain = {name: cells[name] for name in (*NEEDED, *_PLAIN) if name in cells and name != "precision"}
        lacking = "; ".join(filter(None, (more.lacking, str(error))))
        return replace(step_row(plain, line), more=replace(more, lacking=lacking))


def needed_columns(path: Path) -> tuple[str, ...]:
    """Columns that a file must have: those of sizes, or, without a hidden size, a model and GPUs by any name."""
    header = next(csv.reader(io.StringIO(read_text(path).partition("\n")[0])), [])
    if "hidden" in header or "model" not in header:
        return NEEDED
    gpus, system = (next((name for name in names if name in header), names[0]) for names in (_GPUS, ("gpu", "system")))
    return (*NAMED, gpus, system)


_GPUS = ("n_gpus", "gpus", "num_gpus")


def each_record(
    path: Path,
    needed: tuple[str, ...],
    reading: Callable[[Mapping[str, str], int], Read],
    *,
    known: tuple[str, ...] = (),
) -> tuple[Read, ...]:
    """What every record means; DocumentError with the line of every ValueError, else as `read_records`."""
    found, problems = [], []
    for line, record in read_records(path, needed=needed, known=known):
        try:
            found.append(reading(record, line))
        except ValueError as error:
            problems.append(Problem(record.get("id", ""), str(error), line))
    if problems:
        raise DocumentError(str(path), problems)
    return tuple(found)


def count(record: Record, name: str, default: int | None = None) -> int:
    """A whole number from 1 up; ValueError if it is none and there is no default."""
    value = number(record, name)
    if value is None and default is not None:
        return default
    if value is None or value != int(value) or not 1 <= value <= LARGEST_SIZE:
        raise ValueError(f"{name} is {_text(record, name)!r}, not a whole number from 1 to {LARGEST_SIZE:,}")
    return int(value)


@cache
def known_errata() -> tuple[dict[str, str], ...]:
    """Known errata of published rows: what the cell holds, what the source says, what is taken instead, and why."""
    return tuple(record for _, record in read_records(SHIPPED / "errata.csv", needed=("dataset", "column")))


def _maybe(record: Record, name: str) -> int | None:
    return None if number(record, name) is None else count(record, name)


def _flag(record: Record, name: str) -> bool | None:
    """A flag, or None where the row does not say."""
    text = _text(record, name).lower()
    return None if text in SILENT else text in _YES


def _text(record: Record, name: str) -> str:
    return cell_text(record.get(name, ""))


def above_zero(record: Record, name: str) -> float | None:
    """A number above 0, or None as of `number`; ValueError for one that is not."""
    value = number(record, name)
    if value is not None and value < _LEAST:
        raise ValueError(f"{name} is {record[name]!r}, not a number above 0, from {_LEAST:g}")
    return value


def _multiple(record: Record, name: str) -> int | None:
    value = number(record, name)
    if value is not None and (value != int(value) or value < 0):
        raise ValueError(f"{name} is {record[name]!r}, not a whole number from 0 up")
    return None if value is None else int(value)


_PLAIN = ("id", "dataset", "family", "framework", "system", "gpu", "network", "model", "precision", "overlap", "notes")
_READ_BY: tuple[tuple[Callable[[Record, str], Any], Mapping[str, str]], ...] = (
    (_maybe, {"tensor": "tp", "y": "y", "pipeline": "pp", "interleave": "vpp", "context": "cp", "data": "dp"}),
    (count, {"gpus": "n_gpus", "heads": "heads", "layers": "layers", "hidden": "hidden", "ffn": "ffn"}),
    (count, {"vocab": "vocab", "sequence_length": "seq", "global_batch": "gbs"}),
    (_maybe, {"gpus_per_node": "gpus_per_node", "micro_batch": "mbs", "z": "z", "head_dim": "head_dim"}),
    (_maybe, {"kv_heads": "kv_heads"}),
    (_multiple, {"vocabulary_multiple": "vocab_multiple"}),
    (above_zero, {"gpu_memory_gb": "gpu_mem_gb", "step_s": "step_s", "memory_gib": "mem_gib"}),
    (above_zero, {"tflops_per_gpu": "tflops_per_gpu"}),
    (_flag, {"sequence_parallel": "seq_parallel", "biases": "biases", "tied": "tied", "gated": "gated_mlp"}),
    (_text, {name: name for name in _PLAIN} | {"attention": "attn", "order": "order", "parts": "parts"}),
    (lambda record, name: zero_of(_text(record, name)), {"zero": "zero_stage"}),
    (lambda record, name: recomputes_of(_text(record, name)), {"recomputes": "recompute"}),
)
"""How the text of a column is read, and the field that it states."""
_COLUMN = {field: column for _, columns in _READ_BY for field, column in columns.items()}


def step_row(stated: Record, line: int) -> StepRow:
    """What a record of a file means; ValueError with all odd words, or the first size that is none."""
    record = dict(stated)
    more: Named | None = None
    if names_model(record):
        cells, more = named({name: _text(stated, name) for name in stated})
        record = dict[str, Cell](cells)
    for erratum in known_errata():
        if (record.get("dataset"), record.get(erratum["column"], "")) == (erratum["dataset"], erratum["cell"]):
            record[erratum["column"]] = erratum["taken"]
    if odd := list(odd_words(record)):
        raise ValueError("; ".join(odd))
    found = {column: read(record, column) for read, columns in _READ_BY for column in columns.values()}
    row = row_of({column: value for column, value in found.items() if value is not None}, line=line, more=more)
    return replace(
        row,
        family=row.family or f"{row.model}|{row.gpus}",
        interleave_known=_text(record, "vpp").lower() != "unknown",
        tflops_per_gpu=None if record.get("flops_convention") else row.tflops_per_gpu,
        unstated=tuple(name for name in OPTIONS if _text(record, name).lower() in SILENT),
    )


def row_of(words: Mapping[str, Any], *, line: int, more: Named | None = None) -> StepRow:
    """A step by what its columns mean; ValueError where they do not go together."""
    found = {field: words[column] for field, column in _COLUMN.items() if column in words}
    heads, z, stages, chunks = words["heads"], words.get("z"), words.get("pp", 1), words.get("vpp", 1)
    found["kv_heads"] = kv_heads = words.get("kv_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"heads is {heads}, not divisible by kv_heads, {kv_heads}")
    ranks = words.get("tp", 1) * words.get("y", 1) * stages * words.get("cp", 1)
    found["data"] = data = words.get("dp", max(1, words["n_gpus"] // ranks))
    if z is not None and data % z:
        raise ValueError(f"dp is {data}, not divisible by z, {z}")
    found["order"] = order_of(cell_text(words.get("order", "")))
    found["parts"] = parts_of(words.get("parts", ""), stages, chunks, words["layers"])
    return StepRow(**found, line=line, more=more)


def _read_by(*readers: Callable[[Record, str], Any]) -> tuple[str, ...]:
    return tuple(column for reader, columns in _READ_BY if reader in readers for column in columns.values())


_FLAGS, COUNTS = _read_by(_flag), (*_read_by(count, _maybe), "ep", "etp", "micro_batches", "grad_accum")
"""Columns of flags, and of whole numbers from 1."""
FROM_ZERO = ("vocab_multiple", "dense_layers")
"""Those of whole numbers from 0."""
MEASURES = (
    *(*_read_by(above_zero), "params_b", "state_bytes"),
    *("tokens_per_s_per_gpu", "mfu_percent", "mfu_of_tflops"),
)
"""Those of numbers above 0."""
TIMES = {"step": "step_s", "tflops": "tflops_per_gpu", "tokens-per-gpu": "tokens_per_s_per_gpu"}
"""Those that say what a step took, by the option of each."""
_DESCRIPTIVE = ("source", "source_loc", "url", "confidence", "flops_convention")
COLUMNS = tuple(dict.fromkeys((*NEEDED, *_COLUMN.values(), *_DESCRIPTIVE, *COUNTS, *MEASURES, *MORE, *ALSO)))
"""Every column of a file of steps: those that must be there, those that are read where they are, and those that say
where a row comes from, or repeat in other units what others say."""


def meaning(name: str, value: Cell) -> Cell:
    """What the text of a cell means by itself: a whole number, a measure, a flag, else its words."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if name in ("zero_stage", *COUNTS, *FROM_ZERO) and re.fullmatch(r"\d{1,15}(?:\.0*)?", text):
        return int(float(text))
    if name in MEASURES and re.fullmatch(r"\d+\.?\d*(e[+-]?\d+)?", text.lower()):
        return float(text)
    return text.lower() in _YES if name in _FLAGS and text.lower() in (*_YES, *_NO) else text


def odd_fact(name: str, text: str) -> str:
    """What is wrong with a cell that somebody states, so that it is none of a source's words; "" where nothing is."""
    if name in (*COUNTS, *FROM_ZERO):
        least, count = int(name in COUNTS), meaning(name, text)
        near = f"; nearest valid: {min(max(count, least), LARGEST_SIZE)}" if isinstance(count, int) else ""
        fits = isinstance(count, int) and least <= count <= LARGEST_SIZE
        return "" if fits else f"not a whole number from {least} to {LARGEST_SIZE:,}{near}"
    if name in MEASURES:
        try:
            read_number(text, least=_LEAST, most=_LARGEST)
        except ValueError:
            return f"not a number from {_LEAST:g} to {_LARGEST:g}"
    return odd_word(name, text)


def cell_text(value: object) -> str:
    """A cell as a file has it."""
    if isinstance(value, tuple):
        return (" " if isinstance(value[0], int) else ",").join(map(str, value))
    return str(int(value) if isinstance(value, bool) else value)


def recomputes_of(words: str) -> Repeats:
    """Recompute sets that words may mean: one, as in `full on 3`, or every set of all layers."""
    stated = re.match(r"([a-z_]+(?:,[a-z_]+)*)(?: on (\d+))?", words.lower())
    with suppress(ValueError):
        if stated:
            return ((parse_recompute(stated[1]), int(stated[2]) if stated[2] else None),)
    return tuple((kind, None) for kind in RECOMPUTES)


def zero_of(words: str) -> int:
    """ZeRO's stage; where words describe sharding instead, gradients are taken to be sharded."""
    return int(words[0]) if words[:1].isdecimal() else 2 if re.search("shard|fsdp", words.lower()) else 0


def order_of(words: str) -> tuple[str, ...]:
    """Axes from the fastest-varying rank outwards, between commas; none where the row does not say."""
    found = tuple(axis.strip() for axis in words.split(",") if axis.strip())
    if not set(found) <= set(RANK_AXES) or len(set(found)) < len(found):
        raise ValueError(f"order is {words!r}, not axes once each: there are {', '.join(RANK_AXES)}")
    return found


def parts_of(stated: str | tuple[int, ...], stages: int, chunks: int, layers: int) -> tuple[int, ...]:
    """Blocks of each part of the model, chunk c of stage s at c·stages + s: between blanks, or as a pipeline layout."""
    words = "" if isinstance(stated, tuple) else stated
    numbers = words.split()
    parts = stated if isinstance(stated, tuple) else ()
    parts = parts or tuple(int(word) for word in numbers if word.isdecimal() and len(word) < 10)
    if words and len(parts) < len(numbers):
        if odd := [word for word in numbers if re.fullmatch(r"[+-]?\d+(\.\d*)?", word) and not word.isdecimal()]:
            raise ValueError(f"parts: {odd[0]!r} is not a whole number of blocks from 0 to {layers:,}")
        try:
            parts = parse_layout(words, stages=stages, layers=layers).parts
        except UsageError as error:
            raise ValueError(f"parts: {error}") from None
    if parts and len(parts) != stages * chunks:
        raise ValueError(f"parts are {len(parts)}, but pp {stages} x vpp {chunks} = {stages * chunks} are needed")
    if parts and sum(parts) != layers:
        raise ValueError(f"parts hold {sum(parts)} layers together, but the model has {layers}")
    return parts


_YES, _NO = ("1", "true", "yes", "1.0"), ("0", "false", "no", "0.0")


# Cells with few possible words: what else they hold is refused, because it would silently mean something else.

SILENT = ("", "nan", "unknown", "not stated")
"""Words of a cell that does not say."""
_FORMATS, _SETS = ("bf16", "fp16", "fp32", "fp64"), (*RECOMPUTES, *MODULES)
_WORDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("recompute", rf"^({'|'.join(_SETS)})(?![a-z])|not stated", _SETS),
    # Rows of FP8, INT8 and FP4 are read, and not predicted.
    ("precision", r"(?<![a-z0-9])(bf16|fp16|fp32|fp64|bfloat16|half|mixed)(?![a-z0-9])|fp8|int8|fp4|tf32", _FORMATS),
    ("zero_stage", r"^[0-3](\.0)?(?![\w.])|shard|fsdp", ("0", "1", "2", "3", "sharded", "fsdp")),
    *((name, r"^(1|true|yes|1\.0|0|false|no|0\.0)\Z", (*_YES[:3], *_NO[:3])) for name in _FLAGS),
)
"""Columns with few possible words, what their cells may hold, and what is suggested for another word."""


def odd_words(record: Record) -> Iterator[str]:
    """What is wrong with each cell whose words mean nothing."""
    for column, pattern, known in _WORDS:
        text = _text(record, column).lower()
        if text not in SILENT and not re.search(pattern, text):
            near = nearest_word(text, known)
            yield f"{column} is {record[column]!r}{near or '; known: ' + ', '.join(known)}"


def nearest_word(text: str, known: Iterable[str]) -> str:
    """`suggest` for a cell, or for the first of its words that is near something known."""
    names = tuple(known)
    lower = text.lower()
    parts = (lower, *re.findall("[a-z0-9-]+", lower), *re.findall("[0-9]", lower))
    return next(filter(None, (suggest(part, names) for part in parts)), "")


def read_records(
    path: Path, *, needed: tuple[str, ...], known: tuple[str, ...] = ()
) -> Iterator[tuple[int, dict[str, str]]]:
    """Records of a CSV file with their line numbers; UsageError if it cannot be read.

    known: all columns there may be; empty: any. DocumentError for columns that are missing, twice there or not known.
    """
    try:
        reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
        # Columns without a name are not read.
        there = Counter(filter(None, reader.fieldnames or ()))
        wrong = [f"no column {name!r}" for name in needed if name not in there]
        wrong += [f"column {name!r} is there {times} times" for name, times in there.items() if times > 1]
        for name in (name for name in there if known and name not in known):
            why = why_unpriced(name)
            near = f": {why}" if why else nearest_word(name, known) or f"; known: {', '.join(known)}"
            wrong.append(f"unknown column {name!r}{near}")
        if wrong:
            raise DocumentError(str(path), [Problem("", words, 1) for words in wrong])
        for record in reader:
            if odd := CONTROL.search("".join(value for value in record.values() if isinstance(value, str))):
                raise DocumentError(
                    str(path), [Problem("", f"holds the control character {odd[0]!r}", reader.line_num)]
                )
            yield reader.line_num, {name: (value or "").strip() for name, value in record.items() if name}
    except csv.Error as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def number(record: Record, name: str) -> float | None:
    """A number, or None if the cell is empty or holds words."""
    text = _text(record, name)
    try:
        value = float(text)
    except ValueError:
        return None
    try:
        return read_number(text, least=-_LARGEST, most=_LARGEST) if not math.isnan(value) else None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
