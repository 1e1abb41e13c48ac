"""Fits the network of a profile to logs of other benchmarks: nccl-tests and rccl-tests (text, JSON), OSU (text).

Sizes are those of the full (gathered or reduced) buffer, as nccl-tests has them; OSU's all-gather counts one rank's
shard. Times are out of place. Everything but the network stays as in the profile that is fitted.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from axonn_tune import __version__
from axonn_tune.calibration.fit import CommunicationFit, fit_communication
from axonn_tune.calibration.profile import (
    Calibration,
    communication_uncertainty,
    fitted_library,
    fitted_tier,
    probe_words,
    validated,
)
from axonn_tune.errors import DocumentError, Problem, UsageError
from axonn_tune.specs.loading import read_text
from axonn_tune.specs.machine import (
    COLLECTIVE_KINDS,
    CollectiveKind,
    Library,
    Machine,
    Measurement,
    Protocol,
    Source,
)
from axonn_tune.specs.points import CollectiveProbe, Probe
from axonn_tune.units import seconds

_LineProblems: TypeAlias = list[tuple[int | None, str]]
"""Line, where one is at fault, and what is wrong."""

_LEAST_POINTS = 4
_KINDS: dict[str, CollectiveKind] = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "reducescatterblock": "reduce_scatter",
}
_STARTING = re.compile(r"# Collective test starting: (?:\S*/)?(\w+?)_perf")
_BEGINNING = re.compile(r"# nThread\w* ")
_RANK = re.compile(r"#\s+Rank\s+(\d+)(?:\s+Group\s+(\d+))?\s+Pid\s+\d+ on\s+(\S+) device\s+\d+ \[[^\]]*\] (.+)")
_VERSION = re.compile(r"(?:nccl-library=|[NR]CCL version\s*:?\s*)(\d\S*)")
_TIME_AT = 5
# What srun --label and mpirun --tag-output put before each line.
_LABEL = re.compile(r"^\s*(?:\d+:|\[\d+,\d+\]<std(?:out|err)>:)\s?")
_OSU = re.compile(r"# OSU MPI(?:-CUDA|-ROCM)? (\S+(?: \S+)*?) Latency Test")
_ROW = re.compile(r"\d+\s+\d+\s+[a-z]\w*\s")


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
    """What one file holds."""

    rows: tuple[LogRow, ...]
    library: str
    hosts: tuple[str, ...]
    device: str


def read_log(path: str | Path, *, ranks: int | None = None, nodes: int | None = None) -> Log:
    """Read one log, whatever wrote it.

    ranks, nodes: of the run, for OSU, which prints neither; and for a log without its list of devices. UsageError
    if the file cannot be read, DocumentError with every line that is wrong, units included.
    """
    text = read_text(Path(path))
    try:
        if not _LABEL.match(text) and text.lstrip()[:1] in ("{", "["):
            return _json_log(text, str(path))
        if _OSU.search(text):
            return _osu_log(text, ranks=ranks, nodes=nodes)
        return _text_log(text, str(path), ranks=ranks, nodes=nodes)
    except _LogError as error:
        raise DocumentError(str(path), error.problems) from None


class _LogError(Exception):
    """What is wrong with a log, before its path is known."""

    def __init__(self, *problems: tuple[int | None, str]) -> None:
        self.problems = [Problem("", message, line) for line, message in problems]
        super().__init__()


def _kind(name: str) -> CollectiveKind:
    found = _KINDS.get(re.sub(r"[^a-z]", "", name.lower()))
    if found is None:
        raise _LogError((None, f"holds {name}, not an all-gather, a reduce-scatter or an all-reduce"))
    return found


def _text_log(text: str, name: str, *, ranks: int | None, nodes: int | None) -> Log:
    """nccl-tests and rccl-tests, one run or several after each other, as `srun` or `mpirun` may have labelled them."""
    lines = [_LABEL.sub("", line).strip() for line in text.splitlines()]
    problems: _LineProblems = []
    found = [_run(lines, part, name, problems, ranks=ranks, nodes=nodes) for part in _runs(lines)]
    rows = [row for run in found for row in run.rows]
    _require(rows, problems)
    version = _VERSION.search(text)
    library = f"{'RCCL' if 'rccl' in text.lower() else 'NCCL'} {version[1] if version else 'of a log'}"
    hosts = tuple(dict.fromkeys(host for run in found for host in run.hosts))
    return Log(tuple(rows), library, hosts, found[0].device)


def _runs(lines: list[str]) -> Iterator[range]:
    """The lines of each run: from one heading to the next; all of them if there is none."""
    for heading in (_STARTING, _BEGINNING):
        starts = [number for number, line in enumerate(lines) if heading.match(line)]
        if starts:
            break
    for start, end in pairwise([*starts, len(lines)] if starts else [0, len(lines)]):
        yield range(start, end)


def _run(
    lines: list[str],
    part: range,
    name: str,
    problems: _LineProblems,
    *,
    ranks: int | None,
    nodes: int | None,
) -> Log:
    """One run; old versions do not say which collective it is, so the file's name must."""
    own = lines[part.start : part.stop]
    starting = _STARTING.match(own[0]) if own else None
    op = _kind(starting[1]) if starting else _kind_of_name(name)
    places = [found for line in own if (found := _RANK.match(line))]
    hosts = tuple(dict.fromkeys(place[3] for place in places))
    ranks, nodes = len(places) or ranks, len(hosts) or nodes
    if not ranks or not nodes:
        raise _LogError((None, "lists no devices, so it does not say how many ranks and nodes ran: give --log-ranks"))
    _require_one_group({place[2] for place in places}, line=part.start + 1)
    _check_units(own, first=part.start + 1)
    rows = [
        LogRow(op, ranks, nodes, size, time)
        for number, line in enumerate(own, part.start + 1)
        if _ROW.match(line)
        for size, time in _row(line, number, problems, time_at=_time_at(own))
    ]
    return Log(tuple(rows), "", hosts, places[0][4].strip() if places else "")


def _require_one_group(groups: Set[object], *, line: int | None) -> None:
    if len(groups) > 1:
        raise _LogError((line, f"{len(groups)} groups ran at once (NCCL_TESTS_SPLIT); only runs of one group are read"))


def _check_units(lines: list[str], *, first: int) -> None:
    """Times in µs, as every version prints them; another unit in the header means another tool."""
    for number, line in enumerate(lines, first):
        if line.startswith("#") and "(B)" in line and "(us)" not in line:
            raise _LogError((number, f"the column of times is not in (us): {' '.join(line.split())}"))


def _time_at(lines: list[str]) -> int:
    """Which column has the out-of-place time: versions differ in whether they print operation and root before it."""
    for line in lines:
        words = line.lstrip("#").split()
        if line.startswith("#") and words[:2] == ["size", "count"] and "time" in words:
            return words.index("time")
    return _TIME_AT


def _row(line: str, number: int, problems: _LineProblems, *, time_at: int) -> Iterator[tuple[int, float]]:
    """Size and time of a row, `size count type redop root time algbw busbw #wrong ...`, if it has any."""
    words = line.split()
    try:
        size, time, bandwidth = int(words[0]), float(words[time_at]), float(words[time_at + 1])
        float(words[time_at + 2])
    except (IndexError, ValueError):
        problems.append((number, "a row of results is truncated or holds something else"))
        return
    # Printed with two decimals, so small rows say nothing of their bandwidth.
    if time and bandwidth > 1.0 and not 0.9 < size / (time * 1e3) / bandwidth < 1.1:
        problems.append((number, f"{size} bytes in {time:g} µs are not {bandwidth:g} GB/s: are the units mixed?"))
    if size and time:
        yield size, seconds(time)


def _kind_of_name(name: str) -> CollectiveKind:
    plain = re.sub(r"[^a-z]", "", Path(name).stem.lower())
    for word, kind in _KINDS.items():
        if word in plain:
            return kind
    raise _LogError((None, "does not say which collective it measured; name the file after it, as in all_gather.txt"))


def _json_log(text: str, name: str) -> Log:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _LogError((getattr(error, "lineno", None), f"is not complete JSON: {error}")) from error
    try:
        return _rccl_json(found) if isinstance(found, list) else _nccl_json(found, name)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise _LogError((None, f"is not a result of nccl-tests or rccl-tests: missing or wrong {error!r}")) from error


def _nccl_json(found: dict[str, Any], name: str) -> Log:
    """nccl-tests -J."""
    program = Path(found["args"][0]).name.split("_perf")[0]
    devices = found["config"]["devices"]
    _require_one_group({device.get("group", 0) for device in devices}, line=None)
    hosts = tuple(dict.fromkeys(str(device["hostname"]) for device in devices))
    op = _kind(program) if program else _kind_of_name(name)
    rows = [
        LogRow(op, len(devices), len(hosts), int(row["size"]), seconds(float(row["out_of_place"]["time"])))
        for row in found["results"]
        if row["out_of_place"] is not None
    ]
    _require(rows, [])
    return Log(tuple(rows), f"NCCL {found['nccl_version']}", hosts, str(devices[0]["device_info"]))


def _rccl_json(found: list[dict[str, Any]]) -> Log:
    """rccl-tests -Z json."""
    rows = [
        LogRow(_kind(row["name"]), int(row["ranks"]), int(row["nodes"]), int(row["size"]), seconds(float(row["time"])))
        for row in found
        if not row["inPlace"]
    ]
    _require(rows, [])
    return Log(tuple(rows), "RCCL of a log", (), "")


def _osu_log(text: str, *, ranks: int | None, nodes: int | None) -> Log:
    """OSU micro-benchmarks of collectives."""
    if not ranks:
        raise _LogError((None, "an OSU log does not say how many ranks ran: give --log-ranks, and --log-nodes"))
    rows: list[LogRow] = []
    problems: _LineProblems = []
    op: CollectiveKind | None = None
    for number, line in enumerate((_LABEL.sub("", one).strip() for one in text.splitlines()), 1):
        if found := _OSU.match(line):
            op = _kind(found[1])
        elif line.startswith("# Size") and "(us)" not in line:
            problems.append((number, f"times are not in (us): {' '.join(line.split())}"))
        elif op is not None and re.match(r"\s*\d", line):
            rows += _osu_row(line, number, op, ranks, nodes or 1, problems)
    _require(rows, problems)
    return Log(tuple(rows), "MPI (OSU micro-benchmarks)", (), "")


def _osu_row(
    line: str, number: int, op: CollectiveKind, ranks: int, nodes: int, problems: _LineProblems
) -> Iterator[LogRow]:
    words = line.split()
    try:
        size, time = int(words[0]), float(words[1])
    except (IndexError, ValueError):
        problems.append((number, "a row of results is truncated or holds something else"))
        return
    yield LogRow(op, ranks, nodes, size * (ranks if op == "all_gather" else 1), seconds(time))


def _require(rows: list[LogRow], problems: _LineProblems) -> None:
    if problems:
        raise _LogError(*problems)
    if not rows:
        raise _LogError((None, "holds no result"))


def profile_from_logs(logs: Sequence[Log], base: Machine, *, name: str) -> Calibration:
    """Refit the outermost tier that each log crosses; UsageError if the logs do not match the nodes of `base`."""
    rows = [row for log in logs for row in log.rows]
    measured = _times(rows, base)
    if len(measured) < _LEAST_POINTS:
        raise UsageError(f"{len(measured)} different sizes and groups are too few to fit: give more logs")
    outline = base.model_copy(update={"library": _library(base, logs)})
    fit = fit_communication(measured, outline, world=None)
    source = Source(kind="fitted", source=f"{logs[0].library}, {len(rows)} results of logs")
    crossed = {_outermost(row, base) for row in rows}
    tiers = tuple(
        fitted_tier(tier, number, fit, source) if number in crossed else tier for number, tier in enumerate(base.tiers)
    )
    uncertainty = base.uncertainty.model_copy(
        update={
            "communication": communication_uncertainty(fit),
            "sources": base.uncertainty.sources | {"communication": source},
        }
    )
    document = base.model_copy(
        update={
            "name": name,
            "description": f"{base.name} with its network fitted to logs of {logs[0].library}",
            "tiers": tiers,
            "library": fitted_library(outline.library, fit, source),
            "uncertainty": uncertainty,
            "paper": None,
            "measured": _measurement(logs, rows, base, fit),
        }
    )
    return Calibration(validated(document), fit, None, measured)


def _times(rows: Sequence[LogRow], base: Machine) -> dict[Probe, float]:
    """Median time of each collective, group and size."""
    samples: dict[Probe, list[float]] = {}
    for row in rows:
        _outermost(row, base)
        if row.ranks > 1 and row.size_bytes > 0:
            probe = CollectiveProbe(op=row.op, group=row.ranks, stride=1, size_bytes=row.size_bytes)
            samples.setdefault(probe, []).append(row.seconds)
    return {probe: statistics.median(found) for probe, found in samples.items()}


def _outermost(row: LogRow, base: Machine) -> int:
    """The outermost tier that a run crosses; UsageError unless its nodes are filled as the profile's are."""
    inner = base.tiers[0].ranks
    if row.nodes > 1 and inner is not None and row.ranks != row.nodes * inner:
        raise UsageError(
            f"a log has {row.ranks} ranks on {row.nodes} nodes, but nodes of {base.name} hold {inner}: "
            "give the profile of that machine as --machine"
        )
    sizes = [tier.ranks for tier in base.tiers]
    return next((number for number, ranks in enumerate(sizes) if ranks is None or row.ranks <= ranks), len(sizes) - 1)


def _library(base: Machine, logs: Sequence[Log]) -> Library:
    """One line of a ring per collective, which is what the fit is of."""
    return base.library.model_copy(
        update={
            "name": logs[0].library.split()[0],
            "version": logs[0].library,
            "algorithms": dict.fromkeys(COLLECTIVE_KINDS, ("ring",)),
            "protocols": (Protocol(name="fitted", latency_factor=1.0, bandwidth_factor=1.0),),
            "sources": {
                "launch_us": Source(kind="fitted", source="to be fitted"),
                "protocols": Source(kind="fitted", source="one line for all sizes"),
            },
        }
    )


def _measurement(logs: Sequence[Log], rows: Sequence[LogRow], base: Machine, fit: CommunicationFit) -> Measurement:
    return Measurement(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_version=__version__,
        hosts=tuple(dict.fromkeys(host for log in logs for host in log.hosts)),
        device=next((log.device for log in logs if log.device), base.accelerator.name),
        ranks=max(row.ranks for row in rows),
        network=f"logs of {logs[0].library}",
        samples=len(rows),
        held_out_error=fit.held_out_error,
        outliers=tuple(probe_words(probe) for probe in fit.outliers),
    )
