"""Reads what torch.profiler exports (Kineto, Chrome JSON, plain or gzip): times of collectives and of GEMMs.

Fields of events are those of pytorch/kineto, libkineto/src/output_json.cpp at acf03f80. A trace without kernels is of a
rank on CPUs: operators and Gloo's records count then. A collective's time starts when this rank enters it, so it
includes the wait for the last rank.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
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
from axonn_tune.units import MICRO, json_int

TRACE_BYTES, MOST_EVENTS = 200 << 20, 1 << 20
"""Most that a trace may have, packed and unpacked; and most events and other values at its top level."""
_WINDOW_BYTES = 1 << 20
"""A trace is parsed event by event in windows of this size, so that its objects never fill the memory at once; none of
its values may be longer."""
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
        document = _Document(read_bytes(path, limit_bytes=TRACE_BYTES), path)
        events, on_gpu = _events(document)
        calls = _nccl_calls(events) if on_gpu else _gloo_calls(events, _only_group(document.about))
        for probe, dur in chain(calls, _gemms(events, on_gpu=on_gpu)):
            times_s[probe].append(dur * MICRO)
    except ReadingError as error:
        raise DocumentError(str(path), [error.problem]) from None
    return {probe: median(found) for probe, found in times_s.items()}


def _unpacked(data: bytes, path: Path) -> Iterator[bytes]:
    """The content in parts."""
    packed, stream, size = data.startswith(b"\x1f\x8b"), zlib.decompressobj(wbits=31), 0
    for at in range(0, len(data), _WINDOW_BYTES):
        left = part = data[at : at + _WINDOW_BYTES]
        if not packed:
            yield part
        while packed and not stream.eof and (left or len(part) == _WINDOW_BYTES):
            try:
                part = stream.decompress(left, _WINDOW_BYTES)
            except zlib.error as error:
                raise ReadingError(f"damaged gzip: {error}") from error
            left, size = stream.unconsumed_tail, size + len(part)
            if size > TRACE_BYTES:
                raise UsageError(
                    f"{str(path)!r} unpacks to more than the {TRACE_BYTES >> 20} MiB that a trace may have"
                )
            yield part
    if packed and not stream.eof:
        raise ReadingError("truncated gzip")


_NO_SPACE = re.compile(r"\S")


class _Document:
    """The JSON of a trace, read from its begin, one event at a time; about: `distributedInfo`, after the events."""

    def __init__(self, data: bytes, path: Path) -> None:
        self._parts, self._decoder = _unpacked(data, path), json.JSONDecoder(parse_int=json_int)
        self._bytes = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._line, self._values = "", 0, 1, 0
        self.about: object = {}

    def events(self) -> Iterator[tuple[object, int]]:
        """Each item of `traceEvents`, with the length of its text."""
        listed = False
        if self._next() == "{":
            self._expect("{")
            while self._next() != "}":
                key, _ = self._value()
                self._expect(":")
                if key == "traceEvents" and self._next() == "[":
                    listed = True
                    self._expect("[")
                    while self._next() != "]":
                        yield self._value()
                        if self._next() != "]":
                            self._expect(",")
                    self._expect("]")
                else:
                    value, _ = self._value()
                    listed = listed and key != "traceEvents"
                    self.about = value if key == "distributedInfo" else self.about
                if self._next() != "}":
                    self._expect(",")
            self._expect("}")
            self._expect("")
        if not listed:
            raise ReadingError("no list of events: not what torch.profiler exports", place="traceEvents")

    def _more(self) -> bool:
        """Read on; False at the end."""
        part = next(self._parts, None)
        try:
            text = self._bytes.decode(part or b"", final=part is None)
        except UnicodeDecodeError as error:
            raise self._wrong(f"not UTF-8 text: {error.reason}") from error
        self._line += self._text.count("\n", 0, self._at)
        self._text, self._at = self._text[self._at :] + text, 0
        return part is not None

    def _next(self) -> str:
        """The next character that is no white space, "" at the end."""
        while True:
            found = _NO_SPACE.search(self._text, self._at)
            self._at = found.start() if found else len(self._text)
            if found or not self._more():
                return found[0] if found else ""

    def _expect(self, mark: str) -> None:
        if self._next() != mark:
            raise self._wrong(f"{repr(mark) if mark else 'the end'} is needed")
        self._at += len(mark)

    def _value(self) -> tuple[Any, int]:
        """The next value, and the length of its text."""
        self._values += 1
        if self._values > MOST_EVENTS:
            raise self._wrong(f"more than {MOST_EVENTS:,} events")
        self._next()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                if len(self._text) - self._at > _WINDOW_BYTES:
                    raise self._wrong(f"a value of more than {_WINDOW_BYTES >> 10} KiB, or {error}") from error
                if not self._more():
                    raise self._wrong(str(error)) from error
                continue
            length = end - self._at
            # A number at the end of what was read may go on.
            if end < len(self._text) or not self._more():
                self._at += length
                return value, length

    def _wrong(self, words: str) -> ReadingError:
        line = self._line + self._text.count("\n", 0, self._at)
        return ReadingError(f"truncated, or not JSON: {words}", line)


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


_USED_BYTES = 32 << 20
"""Most that the used events of a trace may have together."""


def _events(document: _Document) -> tuple[list[_Event], bool]:
    """Events that a collective or a GEMM may need, by start, enclosing ones first; and whether any ran on a GPU."""
    found, on_gpu, used_bytes = [], False, 0
    for number, (event, length) in enumerate(document.events()):
        place = f"traceEvents.{number}"
        if not isinstance(event, dict):
            raise ReadingError("an event is needed", place=place)
        if event.get("ph") == "X" and event.get("cat") in _READ:
            name = _has(event.get("name"), str, f"{place}.name")
            ts = _number(event.get("ts"), f"{place}.ts", -1e18)
            dur = _number(event.get("dur"), f"{place}.dur", 0.0)
            args = _has(event.get("args", {}), dict, f"{place}.args")
            on_gpu = on_gpu or event["cat"] in _ON_GPU
            if _is_used(event["cat"], name):
                found.append(_Event(place, name, event["cat"], ts, dur, args))
                used_bytes += length
        if used_bytes > _USED_BYTES:
            raise ReadingError(f"more than {_USED_BYTES >> 20} MiB of collectives and GEMMs", place=place)
    return sorted(found, key=lambda one: (one.ts, -one.dur)), on_gpu


@lru_cache(maxsize=4096)
def _is_used(cat: str, name: str) -> bool:
    if cat == "kernel":
        return bool(_kind(name))
    return cat.startswith("cuda_") or name in _GEMM_INPUTS or bool(_NAMES.match(name))


_NAMES = re.compile("nccl:|gloo:|_?c10d(_functional)?::|record_param_comms$")


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


def _only_group(about: object) -> _Group | None:
    """The process group of a trace that has a single one."""
    place = "distributedInfo"
    listed = _has(_has(about, dict, place).get("pg_config", []), list, f"{place}.pg_config")
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
    paired = len(queued) == len(records)
    for by, record in zip(queued, records, strict=False):
        kinds = kind_in(by.name), kind_in(record.name)
        same = kinds[0] == kinds[1] or kinds == ("reduce_scatter", "all_reduce")
        paired = paired and by.ts <= record.ts and same
    for number, record in enumerate(records):
        by = queued[number] if paired else record
        op, types = kind_in(by.name) or kind_in(record.name), record.args.get("Input type")
        each = _type_bytes(str(types[0]) if isinstance(types, list) and types else "")
        shapes, full = record.shapes("Input Dims"), [prod(one) for one in by.shapes("Input Dims")]
        if group and shapes:
            gathered = group[0] if op == "all_gather" else 1
            yield from _collective(record, op, group, each * max([gathered * sum(map(prod, shapes)), *full]))


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
