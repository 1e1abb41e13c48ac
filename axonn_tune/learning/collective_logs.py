"""Reads logs of collectives: nccl-tests and rccl-tests (text, JSON), OSU micro-benchmarks (text).

Sizes are those of the full (gathered or reduced) buffer, as nccl-tests has them; OSU's all-gather counts one rank's
shard. Times are out of place.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from axonn_tune.errors import DocumentError, Problem, UsageError
from axonn_tune.specs.document import LARGEST_SIZE
from axonn_tune.specs.loading import json_of, read_text
from axonn_tune.specs.machine import CollectiveKind, Machine
from axonn_tune.specs.points import CollectiveProbe, Probe
from axonn_tune.units import MICRO, read_count, read_number, seconds

_KINDS: dict[str, CollectiveKind] = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "reducescatterblock": "reduce_scatter",
}
_STARTING = re.compile(r"# Collective test starting: (?:\S*/)?(\w+?)_perf")
_BEGINNING = re.compile(r"# nThread\w* ")
_RANK = re.compile(r"#\s+Rank\s+(\d+)(?:\s+Group\s+(\d+))?\s+Pid\s+\d+ on\s+(\S+) device\s+\d+ \[[^\]]*\] (.+)")
_TIME_AT = 5
# What srun --label and mpirun --tag-output put before each line.
_LABEL = re.compile(r"^\s*(?:\d+:|\[\d+,\d+\]<std(?:out|err)>:)\s?")
_OSU = re.compile(r"# OSU MPI(?:-CUDA|-ROCM)? ([^#\n]{1,80}?) Latency Test")
_ROW = re.compile(r"\d+\s+\d+\s+[a-z]\w*\s")
_CLOSING = re.compile(r"# (?:Out of bounds values|Avg bus bandwidth|Collective test concluded)")


@dataclass(frozen=True)
class LogRow:
    """One collective of a log: all ranks in one group, nodes filled one after the other; 0 nodes: unknown."""

    op: CollectiveKind
    ranks: int
    nodes: int
    size_bytes: int
    seconds: float


LONGEST_S = 1e5
"""Of one collective."""


@dataclass(frozen=True)
class Log:
    """Content of one file; cut_off: last lines of truncated runs. assumed: what its columns say, by line."""

    rows: tuple[LogRow, ...]
    device: str = ""
    cut_off: tuple[int, ...] = ()
    assumed: tuple[tuple[int, str], ...] = ()


def read_log(path: str | Path, *, ranks: int | None = None, nodes: int | None = None) -> Log:
    """Read one log of any supported benchmark.

    ranks, nodes: of the run, for OSU, which prints neither; and for a log without its list of devices. UsageError
    if the file cannot be read, DocumentError with every line that is wrong, units included.
    """
    text = read_text(Path(path))
    problems: list[Problem] = []
    try:
        if not _LABEL.match(text) and text.lstrip()[:1] in ("{", "["):
            log = _json_log(text, str(path))
        else:
            reader = _osu_log if _OSU.search(text) else _text_log
            lines = [_LABEL.sub("", line).strip() for line in text.splitlines()]
            log = reader(lines, str(path), problems, ranks=ranks, nodes=nodes)
    except ReadingError as error:
        problems = [error.problem]
    else:
        problems += [] if problems or log.rows else [Problem("", "holds no result")]
    if problems:
        raise DocumentError(str(path), problems)
    return log


class ReadingError(Exception):
    """Error that ends the reading of a log or a trace, before its path is known; place: in the document."""

    def __init__(self, message: str, line: int | None = None, *, place: str = "") -> None:
        self.problem = Problem(place, message, line)
        super().__init__()


def kind_in(name: str) -> CollectiveKind | None:
    """The collective whose name is part of a file's, a kernel's or an operator's."""
    letters = re.sub("[^a-z]", "", name.lower())
    return next((kind for word, kind in _KINDS.items() if word in letters), None)


def _kind(name: str) -> CollectiveKind:
    found = _KINDS.get(re.sub(r"[^a-z]", "", name.lower()))
    if found is None:
        raise ReadingError(f"holds {name}, not an all-gather, a reduce-scatter or an all-reduce")
    return found


def _text_log(lines: list[str], name: str, problems: list[Problem], *, ranks: int | None, nodes: int | None) -> Log:
    """nccl-tests and rccl-tests, one run or several after each other."""
    for heading in (_STARTING, _BEGINNING):
        starts = [number for number, line in enumerate(lines) if heading.match(line)]
        if starts:
            break
    parts = [range(*ends) for ends in pairwise([*starts, len(lines)] if starts else [0, len(lines)])]
    found = [_run(lines, part, name, problems, ranks=ranks, nodes=nodes) for part in parts]
    rows = tuple(row for run in found for row in run.rows)
    cut_off, assumed = (
        tuple(line for run in found for line in run.cut_off),
        tuple(run.assumed[0] for run in found if run.assumed),
    )
    return Log(rows, found[0].device, cut_off, assumed)


def _run(
    lines: list[str], part: range, name: str, problems: list[Problem], *, ranks: int | None, nodes: int | None
) -> Log:
    """One run; old versions do not say which collective it is, so the file's name must."""
    own = lines[part.start : part.stop]
    starting, columns = _STARTING.match(own[0]) if own else None, _time_at(own)
    op = _kind(starting[1]) if starting else kind_in(Path(name).stem)
    places = [found for line in own if (found := _RANK.match(line))]
    ranks, nodes = len(places) or ranks, len({place[3] for place in places}) or nodes
    _require_one_group({place[2] for place in places}, line=part.start + 1)
    for number, line in enumerate(own, part.start + 1):
        # Every version prints times in µs; another unit in the header means another tool.
        if line.startswith("#") and "(B)" in line and "(us)" not in line:
            raise ReadingError(f"the column of times is not in (us): {' '.join(line.split())}", number)
    table = [(number, line) for number, line in enumerate(own, part.start + 1) if _ROW.match(line)]
    of_table, of_ranks = _said_by_columns([line.split() for _, line in table], time_at=columns)
    assumed = []
    if not op and of_table:
        op = of_table
        assumed.append(f"an {op.replace('_', '-')}, as its columns size, count, redop and root say")
    if not ranks and of_ranks > 1:
        ranks = of_ranks
        assumed.append(f"{ranks} ranks, as size and count say, on full nodes of the profile")
    op = op or _kind_of_name(name)
    if not ranks:
        raise ReadingError("lists no devices, so it does not say how many ranks and nodes ran: give --ranks")
    rows = [
        LogRow(op, ranks, nodes or 0, size, time)
        for number, line in table
        for size, time in _row(line, number, problems, time_at=columns)
    ]
    cut_off = (
        ()
        if any(map(_CLOSING.match, own))
        else (max((number for number, line in enumerate(own, part.start + 1) if line), default=part.start + 1),)
    )
    said = ((table[0][0], "; ".join(assumed)),) if assumed else ()
    return Log(tuple(rows), places[0][4].strip() if places else "", cut_off, said)


_ELEMENT_BYTES = {
    **dict.fromkeys(("int8", "uint8", "fp8_e4m3", "fp8_e5m2", "f8e4m3", "f8e5m2", "char"), 1),
    **dict.fromkeys(("half", "bfloat16", "bf16"), 2),
    **dict.fromkeys(("float", "int32", "uint32", "int"), 4),
    **dict.fromkeys(("double", "int64", "uint64"), 8),
}


def _said_by_columns(rows: Sequence[Sequence[str]], *, time_at: int) -> tuple[CollectiveKind | None, int]:
    """Collective and ranks (0: unknown) of rows `size count type redop root`, as NVIDIA/nccl-tests@a0b82b22 has them.

    `count` is of one rank's shard where results are gathered or scattered (src/all_gather.cu, src/reduce_scatter.cu),
    else of the whole; nothing is reduced in an all-gather, and only collectives without a root print -1. All-to-alls
    print the same columns as all-gathers.
    """
    found = set()
    for words in rows if time_at >= _TIME_AT else ():
        each = _ELEMENT_BYTES.get(words[2], 0) * int(words[1][:18])
        if each and len(words) > time_at and words[4] == "-1":
            found.add((int(words[0][:18]) / each, words[3] == "none"))
    ((ratio, unreduced),) = found if len(found) == 1 else [(0.0, False)]
    if not ratio.is_integer() or ratio < 1 or (unreduced and ratio == 1):
        return None, 0
    return ("all_gather" if unreduced else "reduce_scatter" if ratio > 1 else "all_reduce"), int(ratio) * (ratio > 1)


def _require_one_group(groups: Set[object], *, line: int | None) -> None:
    if len(groups) > 1:
        raise ReadingError(
            f"{len(groups)} groups ran at once (NCCL_TESTS_SPLIT); only runs of one group are read", line
        )


def _time_at(lines: list[str]) -> int:
    """Which column has the out-of-place time: versions differ in whether they print operation and root before it."""
    for line in lines:
        words = line.lstrip("#").split()
        if line.startswith("#") and words[:2] == ["size", "count"] and "time" in words:
            return words.index("time")
    return _TIME_AT


def _row(line: str, number: int, problems: list[Problem], *, time_at: int) -> Iterator[tuple[int, float]]:
    """Size and time of a row, `size count type redop root time algbw busbw #wrong ...`, if it has any."""
    words = line.split()
    try:
        size = read_count(words[0])
        time, bandwidth, _ = (read_number(word, most=LONGEST_S / MICRO) for word in words[time_at : time_at + 3])
        wrong = words[time_at + 3] if len(words) > time_at + 3 else "N/A"
        # Old versions print the largest error instead, with an exponent; N/A: not checked.
        many = read_count(wrong) if wrong[:1].isdigit() and "e" not in wrong else 0
    except ValueError as error:
        shown = "" if len(words) < time_at + 3 else f": {error}"
        problems.append(Problem("", f"a row of results is truncated or holds something else{shown}", number))
        return
    if many:
        problems.append(Problem("", f"{many:,} values were wrong: the collective did not do its work", number))
    # Printed with two decimals, so the bandwidth of small rows is not checked.
    if time and bandwidth > 1.0 and not 0.9 < size / (time * 1e3) / bandwidth < 1.1:
        mixed = f"{size} bytes in {time:g} µs are not {bandwidth:g} GB/s: are the units mixed?"
        problems.append(Problem("", mixed, number))
    if size and time:
        yield size, seconds(time)


def _kind_of_name(name: str) -> CollectiveKind:
    found = kind_in(Path(name).stem)
    if found is None:
        raise ReadingError("does not say which collective it measured; name the file after it, as in all_gather.txt")
    return found


def _json_log(text: str, name: str) -> Log:
    """`nccl-tests -J`, a mapping, or `rccl-tests -Z json`, a list of rows."""

    def time_s(value: object) -> float:
        return seconds(read_number(value, most=LONGEST_S / MICRO))

    try:
        found: Any = json_of(text)
    except (ValueError, RecursionError) as error:
        raise ReadingError(f"is not complete JSON: {error}", getattr(error, "lineno", None)) from error
    try:
        if isinstance(found, list):
            rows = []
            for row in (one for one in found if not one["inPlace"]):
                ranks, nodes = (read_count(row[key], most=LARGEST_SIZE) for key in ("ranks", "nodes"))
                rows.append(LogRow(_kind(row["name"]), ranks, nodes, read_count(row["size"]), time_s(row["time"])))
            return Log(tuple(rows))
        program, devices = Path(found["args"][0]).name.split("_perf")[0], found["config"]["devices"]
        _require_one_group({device.get("group", 0) for device in devices}, line=None)
        nodes = len({str(device["hostname"]) for device in devices})
        op = _kind(program) if program else _kind_of_name(name)
        timed = [row for row in found["results"] if row["out_of_place"] is not None]
        rows = [
            LogRow(op, len(devices), nodes, read_count(row["size"]), time_s(row["out_of_place"]["time"]))
            for row in timed
        ]
        return Log(tuple(rows), str(devices[0]["device_info"]))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise ReadingError(f"is not a result of nccl-tests or rccl-tests: missing or wrong {error!r}") from error


def _osu_log(lines: list[str], name: str, problems: list[Problem], *, ranks: int | None, nodes: int | None) -> Log:
    """OSU micro-benchmarks of collectives."""
    if not ranks:
        raise ReadingError("an OSU log does not say how many ranks ran: give --ranks, and --nodes")
    rows: list[LogRow] = []
    op: CollectiveKind | None = None
    for number, line in enumerate(lines, 1):
        if found := _OSU.match(line):
            op = _kind(found[1])
        elif line.startswith("# Size") and "(us)" not in line:
            problems.append(Problem("", f"times are not in (us): {' '.join(line.split())}", number))
        elif op is not None and re.match(r"\d", line):
            try:
                size, time = line.split()[:2]
                taken = seconds(read_number(time, most=LONGEST_S / MICRO))
                shards = ranks if op == "all_gather" else 1
                rows.append(LogRow(op, ranks, nodes or 1, read_count(size, most=2**53 // shards) * shards, taken))
            except ValueError as error:
                wrong = f"a row of results is truncated or holds something else: {error}"
                problems.append(Problem("", wrong, number))
    return Log(tuple(rows))


def times_of(log: Log, base: Machine) -> dict[Probe, float]:
    """Median time of each collective, group and size, s; UsageError unless nodes are filled as the profile's are."""
    samples: dict[Probe, list[float]] = {}
    for row in log.rows:
        inner = base.tiers[0].ranks
        if row.nodes > 1 and inner is not None and row.ranks != row.nodes * inner:
            raise UsageError(
                f"a log has {row.ranks} ranks on {row.nodes} nodes, but nodes of {base.name} hold {inner}: "
                "give the profile of that machine as --machine"
            )
        if row.ranks > 1 and row.size_bytes > 0:
            probe = CollectiveProbe(op=row.op, group=row.ranks, stride=1, size_bytes=row.size_bytes)
            samples.setdefault(probe, []).append(row.seconds)
    return {probe: statistics.median(found) for probe, found in samples.items()}
