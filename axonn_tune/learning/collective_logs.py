"""Reads logs of collectives: nccl-tests and rccl-tests (text, JSON), OSU micro-benchmarks (text).

Sizes are those of the full (gathered or reduced) buffer, as nccl-tests has them; OSU's all-gather counts one rank's
shard. Times are out of place.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Set
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from axonn_tune.errors import DocumentError, Problem, UsageError
from axonn_tune.specs.loading import read_text
from axonn_tune.specs.machine import CollectiveKind, Machine
from axonn_tune.specs.points import CollectiveProbe, Probe
from axonn_tune.units import seconds

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
_OSU = re.compile(r"# OSU MPI(?:-CUDA|-ROCM)? (\S+(?: \S+)*?) Latency Test")
_ROW = re.compile(r"\d+\s+\d+\s+[a-z]\w*\s")
_CLOSING = re.compile(r"# (?:Out of bounds values|Avg bus bandwidth|Collective test concluded)")


@dataclass(frozen=True)
class LogRow:
    """One collective of a log: all ranks of the run in one group, nodes filled one after the other."""

    op: CollectiveKind
    ranks: int
    nodes: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class Log:
    """Content of one file; cut_off: last lines of truncated runs."""

    rows: tuple[LogRow, ...]
    device: str = ""
    cut_off: tuple[int, ...] = ()


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
    found = [_run(lines, part, name, problems, ranks=ranks, nodes=nodes) for part in _runs(lines)]
    rows = tuple(row for run in found for row in run.rows)
    return Log(rows, found[0].device, tuple(line for run in found for line in run.cut_off))


def _runs(lines: list[str]) -> Iterator[range]:
    """The lines of each run: from one heading to the next; all of them if there is none."""
    for heading in (_STARTING, _BEGINNING):
        starts = [number for number, line in enumerate(lines) if heading.match(line)]
        if starts:
            break
    for start, end in pairwise([*starts, len(lines)] if starts else [0, len(lines)]):
        yield range(start, end)


def _run(
    lines: list[str], part: range, name: str, problems: list[Problem], *, ranks: int | None, nodes: int | None
) -> Log:
    """One run; old versions do not say which collective it is, so the file's name must."""
    own = lines[part.start : part.stop]
    starting = _STARTING.match(own[0]) if own else None
    op = _kind(starting[1]) if starting else _kind_of_name(name)
    places = [found for line in own if (found := _RANK.match(line))]
    ranks, nodes = len(places) or ranks, len({place[3] for place in places}) or nodes
    if not ranks or not nodes:
        raise ReadingError("lists no devices, so it does not say how many ranks and nodes ran: give --ranks")
    _require_one_group({place[2] for place in places}, line=part.start + 1)
    _check_units(own, first=part.start + 1)
    rows = [
        LogRow(op, ranks, nodes, size, time)
        for number, line in enumerate(own, part.start + 1)
        if _ROW.match(line)
        for size, time in _row(line, number, problems, time_at=_time_at(own))
    ]
    cut_off = (
        ()
        if any(map(_CLOSING.match, own))
        else (max((number for number, line in enumerate(own, part.start + 1) if line), default=part.start + 1),)
    )
    return Log(tuple(rows), places[0][4].strip() if places else "", cut_off)


def _require_one_group(groups: Set[object], *, line: int | None) -> None:
    if len(groups) > 1:
        raise ReadingError(
            f"{len(groups)} groups ran at once (NCCL_TESTS_SPLIT); only runs of one group are read", line
        )


def _check_units(lines: list[str], *, first: int) -> None:
    """Times in µs, as every version prints them; another unit in the header means another tool."""
    for number, line in enumerate(lines, first):
        if line.startswith("#") and "(B)" in line and "(us)" not in line:
            raise ReadingError(f"the column of times is not in (us): {' '.join(line.split())}", number)


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
        size, time, bandwidth = int(words[0]), float(words[time_at]), float(words[time_at + 1])
        float(words[time_at + 2])
        wrong = words[time_at + 3] if len(words) > time_at + 3 else "0"
    except (IndexError, ValueError):
        problems.append(Problem("", "a row of results is truncated or holds something else", number))
        return
    if wrong.isdigit() and int(wrong):
        problems.append(Problem("", f"{wrong} values were wrong: the collective did not do its work", number))
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
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReadingError(f"is not complete JSON: {error}", getattr(error, "lineno", None)) from error
    try:
        return _rccl_json(found) if isinstance(found, list) else _nccl_json(found, name)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise ReadingError(f"is not a result of nccl-tests or rccl-tests: missing or wrong {error!r}") from error


def _nccl_json(found: dict[str, Any], name: str) -> Log:
    """nccl-tests -J."""
    program = Path(found["args"][0]).name.split("_perf")[0]
    devices = found["config"]["devices"]
    _require_one_group({device.get("group", 0) for device in devices}, line=None)
    nodes = len({str(device["hostname"]) for device in devices})
    op = _kind(program) if program else _kind_of_name(name)
    rows = [
        LogRow(op, len(devices), nodes, int(row["size"]), seconds(float(row["out_of_place"]["time"])))
        for row in found["results"]
        if row["out_of_place"] is not None
    ]
    return Log(tuple(rows), str(devices[0]["device_info"]))


def _rccl_json(found: list[dict[str, Any]]) -> Log:
    """rccl-tests -Z json."""
    rows = [
        LogRow(_kind(row["name"]), int(row["ranks"]), int(row["nodes"]), int(row["size"]), seconds(float(row["time"])))
        for row in found
        if not row["inPlace"]
    ]
    return Log(tuple(rows))


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
                shards = ranks if op == "all_gather" else 1
                rows.append(LogRow(op, ranks, nodes or 1, int(size) * shards, seconds(float(time))))
            except ValueError:
                problems.append(Problem("", "a row of results is truncated or holds something else", number))
    return Log(tuple(rows))


def times_of(log: Log, base: Machine) -> dict[Probe, float]:
    """Median time of each collective, group and size, s; UsageError unless nodes are filled as the profile's are."""
    samples: dict[Probe, list[float]] = {}
    for row in log.rows:
        _require_whole_nodes(row, base)
        if row.ranks > 1 and row.size_bytes > 0:
            probe = CollectiveProbe(op=row.op, group=row.ranks, stride=1, size_bytes=row.size_bytes)
            samples.setdefault(probe, []).append(row.seconds)
    return {probe: statistics.median(found) for probe, found in samples.items()}


def _require_whole_nodes(row: LogRow, base: Machine) -> None:
    inner = base.tiers[0].ranks
    if row.nodes > 1 and inner is not None and row.ranks != row.nodes * inner:
        raise UsageError(
            f"a log has {row.ranks} ranks on {row.nodes} nodes, but nodes of {base.name} hold {inner}: "
            "give the profile of that machine as --machine"
        )
