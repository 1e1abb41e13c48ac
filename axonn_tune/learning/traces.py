"""Reads what torch.profiler exports (Kineto, Chrome JSON, plain or gzip): times of collectives and of GEMMs.

Fields of events are those of pytorch/kineto, libkineto/src/output_json.cpp at acf03f80. A trace without kernels is of a
rank on CPUs: operators and Gloo's records count then. A collective's time starts when this rank enters it, so it
includes the wait for the last rank.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias, TypeVar, get_args

from axonn_tune.errors import DocumentError, UsageError
from axonn_tune.learning.collective_logs import ReadingError, kind_in
from axonn_tune.specs.document import LARGEST_COUNT, LARGEST_SIZE
from axonn_tune.specs.loading import read_bytes
from axonn_tune.specs.machine import CollectiveKind, MatmulLayout
from axonn_tune.specs.points import CollectiveProbe, MatmulProbe, Probe
from axonn_tune.units import MICRO

TRACE_BYTES = 200 << 20
"""Most that a trace may have, packed and unpacked."""
MOST_RANKS = 1 << 20

_Group: TypeAlias = tuple[int, int]
"""Ranks of a group, and the stride between neighbours."""
_Timed: TypeAlias = tuple[Probe, float]
"""A call, and its duration, µs."""


def read_trace(path: Path) -> Mapping[Probe, float]:
    """Collectives and GEMMs that a calibration measures too, in one rank's trace: medians of their times, s.

    UsageError for what is no file or too long, DocumentError with the place of what is wrong.
    """
    times_s: defaultdict[Probe, list[float]] = defaultdict(list)
    try:
        for probe, dur in _calls(_parsed(_unpacked(read_bytes(path, limit_bytes=TRACE_BYTES), path))):
            times_s[probe].append(dur * MICRO)
    except ReadingError as error:
        raise DocumentError(str(path), [error.problem]) from None
    return {probe: median(found) for probe, found in times_s.items()}


def _unpacked(data: bytes, path: Path) -> bytes:
    if not data.startswith(b"\x1f\x8b"):
        return data
    stream = zlib.decompressobj(wbits=31)
    try:
        found = stream.decompress(data, TRACE_BYTES + 1)
    except zlib.error as error:
        raise ReadingError(f"damaged gzip: {error}") from error
    if len(found) > TRACE_BYTES:
        raise UsageError(f"{str(path)!r} unpacks to more than the {TRACE_BYTES >> 20} MiB that a trace may have")
    if not stream.eof:
        raise ReadingError("truncated gzip")
    return found


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ReadingError(f"truncated, or not JSON: {error}", getattr(error, "lineno", None)) from error
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise ReadingError("no list of events: not what torch.profiler exports", place="traceEvents")
    return found


T = TypeVar("T")
_Shape: TypeAlias = tuple[int, ...]
_WORDS: dict[type, str] = {str: "text", int: "a whole number", list: "a list", dict: "a mapping"}


def _has(value: object, kind: type[T], place: str) -> T:
    """A value that is of the kind it has to be."""
    if not isinstance(value, kind):
        raise ReadingError(_needed(value, _WORDS[kind]), place=place)
    return value


def _needed(value: object, what: str) -> str:
    return f"{'is missing' if value is None else f'is {json.dumps(value)[:40]}'}, where {what} is needed"


def _number(value: object, place: str, least: float, most: float = 1e18) -> float:
    # Not-a-number is in no range.
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ReadingError(_needed(value, f"a number from {least:g} to {most:g}"), place=place)
    return float(value)


def _count(value: object, place: str, most: int = LARGEST_SIZE) -> int:
    return int(_number(_has(value, int, place), place, 0, most))


@dataclass(frozen=True, slots=True)
class _Event:
    """An event with a duration: operator, kernel or record; start and duration in µs. place: in the file."""

    place: str
    name: str
    cat: str
    ts: float
    dur: float
    args: Mapping[str, Any]

    @property
    def external(self) -> int | None:
        """Number of the operator that it is, or that launched it."""
        return self.count("External id")

    def count(self, name: str, most: int = LARGEST_SIZE) -> int | None:
        """A whole number among its arguments, or None without it."""
        value = self.args.get(name)
        return None if value is None else _count(value, f"{self.place}.args.{name}", most)

    def shapes(self, name: str) -> list[_Shape]:
        """Shapes, or strides, of its inputs: those of a list of tensors one by one, () of what is no tensor."""
        place = f"{self.place}.args.{name}"
        found = [_has(one, list, place) for one in _has(self.args.get(name, []), list, place)]
        nested = (one if any(isinstance(part, list) for part in one) else [one] for one in found)
        return [tuple(_count(size, place) for size in _has(shape, list, place)) for one in nested for shape in one]


_KERNELS = (
    # Inductor names a kernel after all fused operators.
    ("", "^triton_(poi|per|red)"),
    ("collective", "nccl|rccl|c10d|all_?reduce|all_?gather|reduce_?scatter"),
    # CUTLASS makes attention, too.
    ("", "flash|fmha|attention|sdpa"),
    ("gemm", "gemm|cutlass|nvjet|cublas|cijk_|xmma|splitk|triton_(tem|mm)"),
)
"""Kinds of kernels, and words in their names; the first found counts, "" is of no interest."""


@lru_cache(maxsize=4096)
def _kind(name: str) -> str:
    return next((kind for kind, words in _KERNELS if re.search(words, name.lower())), "")


_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_READ = (*_ON_GPU, "cpu_op", "user_annotation", "gpu_user_annotation", "cuda_runtime", "cuda_driver")


def _events(listed: Sequence[object]) -> list[_Event]:
    """Relevant events with a duration, by start; enclosing ones first."""
    found = []
    for number, event in enumerate(listed):
        place = f"traceEvents.{number}"
        if not isinstance(event, dict):
            raise ReadingError("an event is needed", place=place)
        if event.get("ph") == "X" and event.get("cat") in _READ:
            name = _has(event.get("name"), str, f"{place}.name")
            ts = _number(event.get("ts"), f"{place}.ts", -1e18)
            dur = _number(event.get("dur"), f"{place}.dur", 0.0)
            found.append(_Event(place, name, event["cat"], ts, dur, _has(event.get("args", {}), dict, f"{place}.args")))
    return sorted(found, key=lambda one: (one.ts, -one.dur))


def _calls(document: Mapping[str, Any]) -> Iterator[_Timed]:
    events = _events(document["traceEvents"])
    on_gpu = any(one.cat in _ON_GPU for one in events)
    yield from _nccl_calls(events) if on_gpu else _gloo_calls(events, _only_group(document))
    yield from _gemms(events, on_gpu=on_gpu)


# Collectives.


def _collective(event: _Event, op: CollectiveKind | None, group: _Group | None, size_bytes: int) -> Iterator[_Timed]:
    """The call of an event; nothing where the trace does not say enough of it, or no layout uses its kind."""
    if op and group and 0 < size_bytes <= LARGEST_COUNT and event.dur:
        ranks, stride = group
        yield CollectiveProbe(op=op, group=ranks, stride=stride, size_bytes=size_bytes), event.dur


_TYPE_BYTES = {"double": 8, "long": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2, "short": 2}


def _type_bytes(name: str) -> int:
    """Bytes of one number, as `Float` and `c10::BFloat16` name it; 0 for other names."""
    lower = name.lower().rpartition(":")[2].split()[0] if name.strip() else ""
    return 1 if lower in ("byte", "char", "bool") or lower.startswith("float8") else _TYPE_BYTES.get(lower, 0)


def _nccl_calls(events: Sequence[_Event]) -> Iterator[_Timed]:
    """NCCL's kernels, or where there are none its spans on the GPU, each with what the host recorded of it."""
    kernels = [one for one in events if one.cat == "kernel" and _kind(one.name) == "collective"]
    spans = [one for one in events if one.cat == "gpu_user_annotation" and one.name.startswith("nccl:")]
    host = {one.external: one for one in events if one.name == "record_param_comms"}
    for event in kernels or spans:
        said = event if "In msg nelems" in event.args else host.get(event.external, event)
        elements = [said.count(f"{way} msg nelems", LARGEST_COUNT // 8) for way in ("In", "Out")]
        largest = 0 if None in elements else max(one or 0 for one in elements)
        op = kind_in(event.name) or kind_in(str(said.args.get("Collective name", "")))
        yield from _collective(event, op, _group(said), _type_bytes(str(said.args.get("dtype", ""))) * largest)


def _group(said: _Event) -> _Group | None:
    """The group of a call: as its ranks are listed, or where the list was cut off, as they are spaced."""
    size, listed = said.count("Group size", MOST_RANKS), str(said.args.get("Process Group Ranks", "..."))
    ranks = tuple(map(int, re.findall(r"\d{1,9}", listed)))
    if "..." not in listed and ranks and len(ranks) == (size or len(ranks)):
        return _spaced(ranks)
    stride = said.count("Global rank stride")
    return (size, stride) if size and size > 1 and stride else None


def _spaced(ranks: Sequence[int]) -> _Group | None:
    """The group of these ranks; None where they are not as far apart each."""
    apart = {after - before for before, after in pairwise(ranks)}
    return (len(ranks), apart.pop()) if len(apart) == 1 and min(apart) > 0 else None


def _only_group(document: Mapping[str, Any]) -> _Group | None:
    """The process group of a trace that has a single one."""
    place = "distributedInfo"
    listed = _has(_has(document.get(place, {}), dict, place).get("pg_config", []), list, f"{place}.pg_config")
    groups = [one["ranks"] for one in listed if isinstance(one, dict) and "ranks" in one]
    if len(groups) != 1:
        return None
    place = f"{place}.pg_config.ranks"
    return _spaced([_count(rank, place) for rank in _has(groups[0], list, place)])


def _gloo_calls(events: Sequence[_Event], group: _Group | None) -> Iterator[_Timed]:
    """Gloo's records, each with the operator that queued it: it records some reduce-scatters as an all-reduce.

    They do not say their group, so it has to be the only one.
    """
    records = [one for one in events if one.name.startswith("gloo:")]
    queued = [one for one in events if re.match("_?c10d(_functional)?::", one.name) and "wait" not in one.name]
    # They run in the order in which they were queued.
    paired = len(queued) == len(records) and all(map(_may_be, queued, records))
    for number, record in enumerate(records):
        by = queued[number] if paired else record
        op, types = kind_in(by.name) or kind_in(record.name), record.args.get("Input type")
        each = _type_bytes(str(types[0]) if isinstance(types, list) and types else "")
        shapes, full = record.shapes("Input Dims"), [prod(one) for one in by.shapes("Input Dims")]
        if group and shapes:
            gathered = group[0] if op == "all_gather" else 1
            yield from _collective(record, op, group, each * max([gathered * sum(map(prod, shapes)), *full]))


def _may_be(queued: _Event, record: _Event) -> bool:
    """Whether a record may be of what an operator queued."""
    kinds = kind_in(queued.name), kind_in(record.name)
    return queued.ts <= record.ts and (kinds[0] == kinds[1] or kinds == ("reduce_scatter", "all_reduce"))


# GEMMs.

_GEMM_INPUTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operators, and which of their inputs is A; B follows."""


def _gemms(events: Sequence[_Event], *, on_gpu: bool) -> Iterator[_Timed]:
    """GEMMs whose shapes were recorded, with the time of the kernels that they launched, or their own on a CPU."""
    runtime = {one.count("correlation"): one for one in events if one.cat.startswith("cuda_")}
    launched: defaultdict[int | None, float] = defaultdict(float)
    for event in events:
        if event.cat == "kernel" and _kind(event.name) == "gemm":
            by = event if "External id" in event.args else runtime.get(event.count("correlation"), event)
            launched[by.external] += event.dur
    launched.pop(None, None)
    for event in events:
        first = _GEMM_INPUTS.get(event.name) if event.cat == "cpu_op" else None
        if first is None:
            continue
        dur = launched.get(event.external, 0.0) if on_gpu else event.dur
        shapes, strides = (event.shapes(f"Input {what}")[first : first + 2] for what in ("Dims", "Strides"))
        if dur and len(shapes) == 2 and {len(one) for one in shapes} <= {2, 3} and shapes[0][-1] == shapes[1][-2]:
            (*batch, m, k), n = shapes[0], shapes[1][-1]
            layout = _layout(shapes, strides)
            if layout and prod(batch) == 1 and min(m, n, k):
                yield MatmulProbe(layout=layout, m=m, n=n, k=k), dur


def _layout(shapes: Sequence[_Shape], strides: Sequence[_Shape]) -> MatmulLayout | None:
    """Layout of `O[m, n] = A[m, k] · B[k, n]`; None if both are transposed, or the trace does not say."""
    if [len(one) for one in strides] != [len(one) for one in shapes]:
        return None
    letters = ""
    for shape, stride in zip(shapes, strides, strict=True):
        by_rows, by_columns = (stride[dim] == 1 or shape[dim] == 1 for dim in (-1, -2))
        letters += "N" if by_rows else "T" if by_columns else "?"
    return next((layout for layout in get_args(MatmulLayout) if layout == letters), None)
