"""Reads what torch.profiler exports (Kineto, Chrome JSON, plain or gzip): steps, collectives, GEMMs, kernels by kind.

Fields of events are those of pytorch/kineto, libkineto/src/output_json.cpp at acf03f80. A trace without kernels is of a
rank on CPUs: operators and Gloo's records count then. A collective's time starts when this rank enters it, so it
includes the wait for the last rank.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from axonn_tune.errors import DocumentError, Problem, UsageError
from axonn_tune.specs.document import LARGEST_COUNT, LARGEST_SIZE
from axonn_tune.specs.loading import read_bytes
from axonn_tune.specs.machine import CollectiveKind, MatmulLayout
from axonn_tune.specs.points import CollectiveProbe, MatmulProbe, Probe
from axonn_tune.units import MICRO

TRACE_BYTES = 200 << 20
"""Most that a trace may have, packed and unpacked."""
MOST_RANKS = 1 << 20

KernelKind = Literal["gemm", "attention", "collective", "copy", "elementwise", "other"]


@dataclass(frozen=True)
class TracedCollective:
    """One call; None where the trace does not say. `op` is None for kinds that no layout uses, too.

    size_bytes: the full (gathered or reduced) buffer. group: its ranks; stride: between neighbours, if always the same.
    """

    op: CollectiveKind | None
    size_bytes: int | None
    group: tuple[int, ...] | None
    seconds: float

    @property
    def stride(self) -> int | None:
        """Ranks between neighbours of the group."""
        apart = {after - before for before, after in pairwise(self.group or ())}
        return apart.pop() if len(apart) == 1 else None


@dataclass(frozen=True)
class TracedGemm:
    """`batch` GEMMs `O[m, n] = A[m, k] · B[k, n]` by one operator; layout: None if both are transposed, or not said."""

    m: int
    n: int
    k: int
    batch: int
    layout: MatmulLayout | None
    seconds: float


@dataclass(frozen=True)
class Trace:
    """The profile of one rank; times by kind are sums over the trace, nested operators counted once.

    overlapped_s: time in collectives while computation ran. rank, world, backend: None where there is no group.
    """

    path: Path
    steps_s: tuple[float, ...]
    collectives: tuple[TracedCollective, ...]
    gemms: tuple[TracedGemm, ...]
    kernel_s: Mapping[KernelKind, float]
    overlapped_s: float
    device: str
    rank: int | None
    world: int | None
    backend: str | None


def read_trace(path: Path) -> Trace:
    """One rank's trace; UsageError for what is no file or too long, DocumentError with the place of what is wrong."""
    try:
        return _trace(path, _parsed(_unpacked(read_bytes(path, limit_bytes=TRACE_BYTES), path)))
    except _TraceError as error:
        raise DocumentError(str(path), [error.problem]) from None


def probes(trace: Trace) -> Mapping[Probe, float]:
    """Collectives and GEMMs that a calibration measures too: medians of their times in the trace, seconds."""
    found: defaultdict[Probe, list[float]] = defaultdict(list)
    for call in trace.collectives:
        size, stride = call.size_bytes or 0, call.stride or 0
        if call.op and call.group and stride > 0 and 0 < size <= LARGEST_COUNT and call.seconds:
            probe = CollectiveProbe(op=call.op, group=len(call.group), stride=stride, size_bytes=size)
            found[probe].append(call.seconds)
    for gemm in trace.gemms:
        if gemm.layout and gemm.batch == 1 and min(gemm.m, gemm.n, gemm.k) and gemm.seconds:
            found[MatmulProbe(layout=gemm.layout, m=gemm.m, n=gemm.n, k=gemm.k)].append(gemm.seconds)
    return {probe: median(times) for probe, times in found.items()}


class _TraceError(Exception):
    """Error in a trace, before the file's name is known."""

    def __init__(self, place: str, message: str, line: int | None = None) -> None:
        self.problem = Problem(place, message, line)
        super().__init__(message)


def _unpacked(data: bytes, path: Path) -> bytes:
    if not data.startswith(b"\x1f\x8b"):
        return data
    stream = zlib.decompressobj(wbits=31)
    try:
        found = stream.decompress(data, TRACE_BYTES + 1)
    except zlib.error as error:
        raise _TraceError("", f"damaged gzip: {error}") from error
    if len(found) > TRACE_BYTES:
        raise UsageError(f"{str(path)!r} unpacks to more than the {TRACE_BYTES >> 20} MiB that a trace may have")
    if not stream.eof:
        raise _TraceError("", "truncated gzip")
    return found


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _TraceError("", f"truncated, or not JSON: {error}", getattr(error, "lineno", None)) from error
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise _TraceError("traceEvents", "no list of events: not what torch.profiler exports")
    return found


T = TypeVar("T")
_Shape: TypeAlias = tuple[int, ...]
_WORDS: dict[type, str] = {str: "text", int: "a whole number", list: "a list", dict: "a mapping"}


def _has(value: object, kind: type[T], place: str) -> T:
    """A value that is of the kind it has to be."""
    if not isinstance(value, kind):
        raise _TraceError(place, _needed(value, _WORDS[kind]))
    return value


def _needed(value: object, what: str) -> str:
    return f"{'is missing' if value is None else f'is {json.dumps(value)[:40]}'}, where {what} is needed"


def _number(value: object, place: str, least: float, most: float = 1e18) -> float:
    # Not-a-number is in no range.
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise _TraceError(place, _needed(value, f"a number from {least:g} to {most:g}"))
    return float(value)


def _count(value: object, place: str, most: int = LARGEST_SIZE) -> int:
    return int(_number(_has(value, int, place), place, 0, most))


@dataclass(frozen=True, slots=True)
class _Event:
    """An event with a duration: operator, kernel or record; start and duration in µs. place: in the file."""

    place: str
    name: str
    cat: str
    thread: tuple[str, str]
    ts: float
    dur: float
    args: Mapping[str, Any]

    @property
    def kind(self) -> KernelKind:
        return _kind(self.name)

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


_KINDS: tuple[tuple[KernelKind, str], ...] = (
    # Inductor names a kernel after all fused operators.
    ("elementwise", "^triton_(poi|per|red)"),
    ("collective", "nccl|rccl|^gloo:|c10d|record_param_comms|all_?reduce|all_?gather|reduce_?scatter"),
    ("attention", "flash|fmha|attention|sdpa"),
    ("gemm", r"gemm|cutlass|nvjet|cublas|cijk_|xmma|splitk|triton_(tem|mm)|^aten::(mm|addmm|bmm|baddbmm|mv|addmv)$"),
    ("copy", "copy|memcpy|memset|^aten::(cat|clone|contiguous|fill_|zero_)$"),
    ("elementwise", "elementwise|vectorized|reduce|norm|softmax|multi_tensor|dropout|embedding"),
    ("elementwise", "^aten::_?(add|sub|mul|div|neg|exp|log|pow|r?sqrt|gelu|relu|silu|tanh|sigmoid|sum|mean)"),
)
"""Words in names of kernels, and of operators on CPUs; the first found count."""


@lru_cache(maxsize=4096)
def _kind(name: str) -> KernelKind:
    return next((kind for kind, words in _KINDS if re.search(words, name.lower())), "other")


_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_READ = (*_ON_GPU, "cpu_op", "user_annotation", "gpu_user_annotation", "cuda_runtime", "cuda_driver")
_STEP = re.compile(r"user_annotation ProfilerStep#\d+$")


def _events(listed: Sequence[object]) -> list[_Event]:
    """Relevant events with a duration, by start; enclosing ones first."""
    found = []
    for number, event in enumerate(listed):
        place = f"traceEvents.{number}"
        if not isinstance(event, dict):
            raise _TraceError(place, "an event is needed")
        if event.get("ph") == "X" and event.get("cat") in _READ:
            found.append(_event(event, place))
    return sorted(found, key=lambda one: (one.ts, -one.dur))


def _event(event: Mapping[str, Any], place: str) -> _Event:
    return _Event(
        place,
        _has(event.get("name"), str, f"{place}.name"),
        event["cat"],
        (str(event.get("pid")), str(event.get("tid"))),
        _number(event.get("ts"), f"{place}.ts", -1e18),
        _number(event.get("dur"), f"{place}.dur", 0.0),
        _has(event.get("args", {}), dict, f"{place}.args"),
    )


def _trace(path: Path, document: Mapping[str, Any]) -> Trace:
    events, about = _events(document["traceEvents"]), _about(document)
    kernels = [one for one in events if one.cat in _ON_GPU]
    operators = [one for one in events if one.cat == "cpu_op"]
    calls = list(_nccl_calls(events) if kernels else _gloo_calls(events, about))
    kernel_s = dict.fromkeys(get_args(KernelKind), 0.0)
    for event, dur in [(one, one.dur) for one in kernels] or _own_times(operators):
        kernel_s[event.kind] += dur * MICRO
    kernel_s["collective"] = sum(call.seconds for _, call in calls)
    # On a CPU, "other" operators can contain others: a whole backward pass, for instance.
    idle = {"collective", "copy"} if kernels else {"collective", "copy", "other"}
    computing = _union(one for one in kernels or operators if one.kind not in idle)
    return Trace(
        path,
        steps_s=tuple(one.dur * MICRO for one in events if _STEP.match(f"{one.cat} {one.name}")),
        collectives=tuple(call for _, call in calls),
        gemms=tuple(_gemms(events, on_gpu=bool(kernels))),
        kernel_s=kernel_s,
        overlapped_s=_common(_union(event for event, _ in calls), computing) * MICRO,
        device=about.device if kernels else "CPU",
        rank=about.rank,
        world=about.world,
        backend=about.backend,
    )


@dataclass(frozen=True)
class _About:
    """A rank's metadata in the trace; groups: ranks of each process group."""

    rank: int | None
    world: int | None
    backend: str | None
    device: str
    groups: tuple[tuple[int, ...], ...]


def _about(document: Mapping[str, Any]) -> _About:
    place = "distributedInfo"
    given = _has(document.get(place, {}), dict, place)
    rank, world = (
        None if given.get(name) is None else _count(given[name], f"{place}.{name}") for name in ("rank", "world_size")
    )
    listed = _has(given.get("pg_config", []), list, f"{place}.pg_config")
    of_groups = [one["ranks"] for one in listed if isinstance(one, dict) and "ranks" in one]
    groups = (_has(ranks, list, f"{place}.pg_config.ranks") for ranks in of_groups)
    backend = None if given.get("backend") is None else _has(given["backend"], str, f"{place}.backend")
    devices = _has(document.get("deviceProperties", []), list, "deviceProperties")
    device = next((str(one["name"]) for one in devices if isinstance(one, dict) and "name" in one), "GPU")
    ranks_of = tuple(tuple(_count(rank, f"{place}.pg_config.ranks") for rank in ranks) for ranks in groups)
    return _About(rank, world, backend, device, ranks_of)


def _op(name: str) -> CollectiveKind | None:
    letters = re.sub("[^a-z]", "", name.lower())
    kinds: dict[str, CollectiveKind] = {
        "allgather": "all_gather",
        "reducescatter": "reduce_scatter",
        "allreduce": "all_reduce",
    }
    return next((kind for words, kind in kinds.items() if words in letters), None)


_TYPE_BYTES = {"double": 8, "long": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2, "short": 2}


def _type_bytes(name: str) -> int | None:
    """Bytes of one number, as `Float` and `c10::BFloat16` name it; None for other names."""
    lower = name.lower().rpartition(":")[2].split()[0] if name.strip() else ""
    return 1 if lower in ("byte", "char", "bool") or lower.startswith("float8") else _TYPE_BYTES.get(lower)


def _nccl_calls(events: Sequence[_Event]) -> Iterator[tuple[_Event, TracedCollective]]:
    """NCCL's kernels, or where there are none its spans on the GPU, each with what the host recorded of it."""
    kernels = [one for one in events if one.cat == "kernel" and one.kind == "collective"]
    spans = [one for one in events if one.cat == "gpu_user_annotation" and one.name.startswith("nccl:")]
    host = {one.external: one for one in events if one.name == "record_param_comms"}
    for event in kernels or spans:
        said = event if "In msg nelems" in event.args else host.get(event.external, event)
        elements = [said.count(f"{way} msg nelems", LARGEST_COUNT // 8) for way in ("In", "Out")]
        each = _type_bytes(str(said.args.get("dtype", "")))
        size = None if each is None or None in elements else each * max(one or 0 for one in elements)
        op = _op(event.name) or _op(str(said.args.get("Collective name", "")))
        yield event, TracedCollective(op, size, _group(said), event.dur * MICRO)


def _group(said: _Event) -> tuple[int, ...] | None:
    """Ranks of a call: as listed, or where the list was cut off, as spaced."""
    size, listed = said.count("Group size", MOST_RANKS), str(said.args.get("Process Group Ranks", "..."))
    ranks = tuple(map(int, re.findall(r"\d{1,9}", listed)))
    if "..." not in listed and ranks and len(ranks) == (size or len(ranks)):
        return ranks
    first, stride = said.count("Global rank start"), said.count("Global rank stride")
    return tuple(range(first, first + size * stride, stride)) if size and stride and first is not None else None


def _gloo_calls(events: Sequence[_Event], about: _About) -> Iterator[tuple[_Event, TracedCollective]]:
    """Gloo's records, each with the operator that queued it: it records some reduce-scatters as an all-reduce.

    Their group is known if there is only one.
    """
    records = [one for one in events if one.name.startswith("gloo:")]
    queued = [one for one in events if re.match("_?c10d(_functional)?::", one.name) and "wait" not in one.name]
    # They run in the order in which they were queued.
    paired = len(queued) == len(records) and all(map(_may_be, queued, records))
    group = about.groups[0] if len(about.groups) == 1 else None
    for number, record in enumerate(records):
        by = queued[number] if paired else record
        op, types = _op(by.name) or _op(record.name), record.args.get("Input type")
        each = _type_bytes(str(types[0]) if isinstance(types, list) and types else "")
        shapes, full = record.shapes("Input Dims"), [prod(one) for one in by.shapes("Input Dims")]
        gathered = len(group or ()) if op == "all_gather" else 1
        says = bool(shapes) and (gathered > 0 or by.name.startswith("c10d::"))
        elements = max([gathered * sum(map(prod, shapes)), *full]) if says else None
        size = each * elements if each and elements else None
        yield record, TracedCollective(op, size, group, record.dur * MICRO)


def _may_be(queued: _Event, record: _Event) -> bool:
    """Whether a record may be of what an operator queued."""
    kinds = _op(queued.name), _op(record.name)
    return queued.ts <= record.ts and (kinds[0] == kinds[1] or kinds == ("reduce_scatter", "all_reduce"))


_GEMM_INPUTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operators, and which of their inputs is A; B follows."""


def _gemms(events: Sequence[_Event], *, on_gpu: bool) -> Iterator[TracedGemm]:
    """GEMMs whose shapes were recorded, with the time of the kernels that they launched, or their own on a CPU."""
    runtime = {one.count("correlation"): one for one in events if one.cat.startswith("cuda_")}
    launched: defaultdict[int | None, float] = defaultdict(float)
    for event in events:
        if event.cat == "kernel" and event.kind == "gemm":
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
            yield TracedGemm(m, n, k, prod(batch), _layout(shapes, strides), dur * MICRO)


def _layout(shapes: Sequence[_Shape], strides: Sequence[_Shape]) -> MatmulLayout | None:
    if [len(one) for one in strides] != [len(one) for one in shapes]:
        return None
    letters = ""
    for shape, stride in zip(shapes, strides, strict=True):
        by_rows, by_columns = (stride[dim] == 1 or shape[dim] == 1 for dim in (-1, -2))
        letters += "N" if by_rows else "T" if by_columns else "?"
    return next((layout for layout in get_args(MatmulLayout) if layout == letters), None)


def _own_times(operators: Sequence[_Event]) -> list[tuple[_Event, float]]:
    """Operators by start, each with its duration less that of those it calls, µs."""
    own = {one.place: one.dur for one in operators}
    calling: defaultdict[tuple[str, str], list[_Event]] = defaultdict(list)
    for event in operators:
        outer = calling[event.thread]
        while outer and outer[-1].ts + outer[-1].dur <= event.ts:
            outer.pop()
        if outer:
            own[outer[-1].place] -= event.dur
        outer.append(event)
    return [(one, max(0.0, own[one.place])) for one in operators]


def _union(events: Iterable[_Event]) -> list[tuple[float, float]]:
    """Start and end, µs, of the times in which any of some events ran; they come by start."""
    found: list[tuple[float, float]] = []
    for event in events:
        if found and event.ts <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], event.ts + event.dur)
        else:
            found.append((event.ts, event.ts + event.dur))
    return found


def _common(some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Overlap of two lists of intervals; each sorted and disjoint."""
    total, at = 0.0, 0
    for start, end in some:
        while at < len(others) and others[at][1] <= start:
            at += 1
        # What reaches beyond the end of one may last during the next, too.
        reached = at
        while reached < len(others) and others[reached][0] < end:
            total += min(end, others[reached][1]) - max(start, others[reached][0])
            reached += 1
    return total
