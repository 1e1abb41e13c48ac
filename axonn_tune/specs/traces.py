"""Traces in the format that Perfetto and chrome://tracing read: lanes of named spans.

Measured and predicted timelines name lanes and events by the same functions, so they can be laid side by
side: one lane for the computation, one for the collectives of each axis.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from axonn_tune.units import MICRO

COMPUTE_LANE = "compute"


@dataclass(frozen=True)
class Span:
    """Something that lasted, on a lane; spans of one lane lie beside or within each other."""

    lane: str
    name: str
    start_s: float
    end_s: float
    details: Mapping[str, object] = field(default_factory=dict)


def communication_lane(axis: str) -> str:
    """The lane of the collectives over an axis."""
    return f"communication over {axis}"


def term_name(op: str, axis: str, phase: str, layer: str) -> str:
    """What a collective is called."""
    return f"{op} over {axis}, {phase}, {layer}"


def trace_text(spans: Sequence[Span], *, process: str, number: int, notes: Mapping[str, object]) -> str:
    """Spans of one process as a JSON trace; `number` tells processes apart where several are loaded together."""
    lanes = {lane: place for place, lane in enumerate(_ordered({span.lane for span in spans}))}
    events: list[dict[str, object]] = [_named("process_name", process, number, 0)]
    events += [_named("thread_name", lane, number, place) for lane, place in lanes.items()]
    events += [_order(number, place) for place in lanes.values()]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "pid": number,
            "tid": lanes[span.lane],
            "ts": round(span.start_s / MICRO, 3),
            "dur": round((span.end_s - span.start_s) / MICRO, 3),
            "args": dict(span.details),
        }
        for span in spans
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(notes)}) + "\n"


def _ordered(lanes: set[str]) -> list[str]:
    return sorted(lanes, key=lambda lane: (lane != COMPUTE_LANE, lane))


def _named(kind: str, name: str, process: int, lane: int) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": {"name": name}}


def _order(process: int, lane: int) -> dict[str, object]:
    return {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": lane, "args": {"sort_index": lane}}
