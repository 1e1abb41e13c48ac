"""Traces in the format of Perfetto and chrome://tracing: tracks of named spans, written and read back.

Measured and predicted timelines name tracks and events by the same functions: one track for computation, one for the
collectives of each axis.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from axonn_tune.errors import DocumentError, Problem, UsageError
from axonn_tune.specs.loading import read_text
from axonn_tune.units import MICRO
from axonn_tune.vocabulary import COMPUTE_LANE

TRACE_SCHEMA = "axonn-tune/trace/1"


@dataclass(frozen=True)
class Span:
    """A time span on a track; spans of one track are disjoint or nested."""

    lane: str
    name: str
    start_s: float
    end_s: float
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Process:
    """The spans of one rank, or of a prediction, under a name; `number` tells those of one file apart."""

    name: str
    number: int
    spans: Sequence[Span]


def step_name(step: int) -> str:
    """A whole step of a run, counted from 1."""
    return f"step {step}"


def block_forward(number: int) -> str:
    """The part of a step in which a block is run forward."""
    return f"block {number}, forward"


def block_backward(number: int) -> str:
    """The part in which it is run backward."""
    return f"block {number}, backward"


def wait_name(name: str) -> str:
    """Name of a wait, by its collective."""
    return f"wait: {name}"


def communication_lane(axis: str) -> str:
    """The track of the collectives over an axis."""
    return f"communication over {axis}"


def term_name(op: str, axis: str, phase: str, layer: str) -> str:
    """What a collective is called."""
    return f"{op} over {axis}, {phase}, {layer}"


def trace_text(processes: Iterable[Process], *, notes: Mapping[str, object]) -> str:
    """Processes as one JSON trace; `notes` go with it."""
    events = [event for process in processes for event in _events(process)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(notes)}) + "\n"


def _events(process: Process) -> Iterator[dict[str, object]]:
    number = process.number
    ordered = sorted({span.lane for span in process.spans}, key=lambda lane: (lane != COMPUTE_LANE, lane))
    lanes = {lane: place for place, lane in enumerate(ordered)}
    yield _label("process_name", number, 0, name=process.name)
    yield _label("process_sort_index", number, 0, sort_index=number)
    for lane, place in lanes.items():
        yield _label("thread_name", number, place, name=lane)
        yield _label("thread_sort_index", number, place, sort_index=place)
    for span in process.spans:
        # Whole nanoseconds: Perfetto drops a slice that overlaps the next one by rounding.
        start_ns, end_ns = round(span.start_s * 1e9), round(span.end_s * 1e9)
        yield {
            "ph": "X",
            "name": span.name,
            "pid": number,
            "tid": lanes[span.lane],
            "ts": _microseconds(start_ns),
            "dur": _microseconds(end_ns - start_ns),
            "args": dict(span.details),
        }


def _microseconds(time_ns: int) -> float:
    """Microseconds, such that readers that truncate to 1 ns get the same number of nanoseconds."""
    found = time_ns / 1000
    return math.nextafter(found, math.inf) if int(found * 1000) < time_ns else found


def _label(kind: str, process: int, lane: int, **said: object) -> dict[str, object]:
    """Name or position of a process or a track."""
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": said}


_FILE_NAME = re.compile(r"trace-rank(\d+)\.json")


@dataclass(frozen=True)
class MeasuredTrace:
    """The trace of one rank in some steps; times by its host's clock.

    steps: their numbers, counted from 1; host: empty where the file does not say.
    """

    path: Path
    run: str
    rank: int
    host: str
    steps: tuple[int, ...]
    spans: tuple[Span, ...]

    def whole_step(self, step: int) -> Span:
        """The span of a whole step; UsageError if the trace does not have it."""
        for span in self.spans:
            if span.lane == COMPUTE_LANE and span.name == step_name(step):
                return span
        known = ", ".join(map(str, self.steps))
        raise UsageError(f"{str(self.path)!r} does not have step {step}; it has {known}")

    def of_step(self, step: int) -> list[Span]:
        """Everything that began in a step, the whole step first."""
        whole = self.whole_step(step)
        inside = [one for one in self.spans if one is not whole and whole.start_s <= one.start_s < whole.end_s]
        return [whole, *inside]


def find_traces(path: str | Path) -> list[Path]:
    """The traces of a run's folder, by rank; or the file itself. UsageError if there are none."""
    path = Path(path)
    if not path.is_dir():
        return [path]
    numbered = sorted((int(match[1]), one) for one in path.iterdir() if (match := _FILE_NAME.fullmatch(one.name)))
    if not numbered:
        raise UsageError(
            f"no trace-rank<N>.json in {str(path)!r}: runs write them with `axonn-tune run --trace N --trace-all`"
        )
    return [one for _, one in numbered]


def read_trace(path: str | Path) -> MeasuredTrace:
    """One rank's trace; UsageError if it cannot be read, DocumentError if it is truncated or something else."""
    path = Path(path)
    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        raise DocumentError(str(path), [Problem("", f"truncated, or not JSON: {error}", line)]) from error
    if not isinstance(found, dict):
        raise _wrong(path, "", "no trace of a run: a list of events, without what they are of")
    given = found.get("otherData")
    notes: dict[str, Any] = given if isinstance(given, dict) else {}
    if (schema := notes.get("schema")) != TRACE_SCHEMA:
        raise _wrong(path, "otherData.schema", f"no trace of a run: {schema!r} where {TRACE_SCHEMA!r} is needed")
    try:
        events = found["traceEvents"]
        if len({event["pid"] for event in events}) != 1:
            raise ValueError("it holds several processes; give the files of the run, not what was merged of them")
        lanes = {event["tid"]: str(event["args"]["name"]) for event in events if event["name"] == "thread_name"}
        spans = []
        for event in (one for one in events if one["ph"] == "X"):
            start_s, took_s = float(event["ts"]) * MICRO, float(event["dur"]) * MICRO
            words = lanes[event["tid"]], str(event["name"])
            spans.append(Span(*words, start_s, start_s + took_s, dict(event["args"])))
        steps = tuple(int(str(step)) for step in notes["steps"])
        run, host = str(notes["run"]), str(notes.get("host", ""))
        trace = MeasuredTrace(path, run, int(notes["rank"]), host, steps, tuple(spans))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        said = f"no trace of one rank of a run: {type(error).__name__}: {error}"
        raise _wrong(path, "traceEvents", said) from error
    if not trace.steps:
        raise _wrong(path, "otherData.steps", "no step was traced")
    try:
        for step in trace.steps:
            trace.whole_step(step)
    except UsageError as error:
        raise _wrong(path, "traceEvents", str(error)) from error
    return trace


def _wrong(path: Path, place: str, message: str) -> DocumentError:
    return DocumentError(str(path), [Problem(place, message)])


def shifted(span: Span, by_s: float) -> Span:
    """A span moved in time."""
    return replace(span, start_s=span.start_s + by_s, end_s=span.end_s + by_s)
