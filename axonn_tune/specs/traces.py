"""Traces in the format that Perfetto and chrome://tracing read: lanes of named spans.

Measured and predicted timelines name lanes and events by the same functions, so they can be laid side by
side: one lane for the computation, one for the collectives of each axis.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from axonn_tune.units import MICRO

TRACE_SCHEMA = "axonn-tune/trace/1"

COMPUTE_LANE = "compute"
# Parts of a step on the compute lane, in order: forward, loss, backward, end.
EMBEDDING_FORWARD, HEAD, EMBEDDING_BACKWARD = "embedding, forward", "head and loss", "embedding, backward"
END = "gradients and optimizer"


@dataclass(frozen=True)
class Span:
    """Something that lasted, on a lane; spans of one lane lie beside or within each other."""

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
    """What a pause of the computation is called, by the collective it waits for."""
    return f"wait: {name}"


def communication_lane(axis: str) -> str:
    """The lane of the collectives over an axis."""
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
    lanes = {lane: place for place, lane in enumerate(_ordered({span.lane for span in process.spans}))}
    yield _named("process_name", process.name, number, 0)
    yield _order("process_sort_index", number, 0, place=number)
    for lane, place in lanes.items():
        yield _named("thread_name", lane, number, place)
        yield _order("thread_sort_index", number, place, place=place)
    for span in process.spans:
        yield {
            "ph": "X",
            "name": span.name,
            "pid": number,
            "tid": lanes[span.lane],
            "ts": round(span.start_s / MICRO, 3),
            "dur": round((span.end_s - span.start_s) / MICRO, 3),
            "args": dict(span.details),
        }


def _ordered(lanes: set[str]) -> list[str]:
    return sorted(lanes, key=lambda lane: (lane != COMPUTE_LANE, lane))


def _named(kind: str, name: str, process: int, lane: int) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": {"name": name}}


def _order(kind: str, process: int, lane: int, *, place: int) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": {"sort_index": place}}
