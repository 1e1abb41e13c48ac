"""Traces read back, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axonn_tune.errors import DocumentError, UsageError
from axonn_tune.specs.traces import TRACE_SCHEMA, Process, Span, communication_lane, read_trace, step_name, trace_text
from axonn_tune.vocabulary import COMPUTE_LANE

SPANS = [
    Span(COMPUTE_LANE, step_name(3), 100.0, 100.5),
    Span(COMPUTE_LANE, "head and loss", 100.1, 100.2),
    Span(communication_lane("z"), "all_gather over z, forward, head", 100.2, 100.6, {"bytes": 8}),
    Span(COMPUTE_LANE, step_name(4), 101.0, 101.5),
]
NOTES = {"schema": TRACE_SCHEMA, "run": "nano", "rank": 1, "host": "here", "steps": [3, 4]}


def written(folder: Path, **changes: object) -> Path:
    """A trace with other notes."""
    path = folder / "trace-rank1.json"
    path.write_text(trace_text([Process("measured rank 1", 1, SPANS)], notes=NOTES | changes), encoding="utf-8")
    return path


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    """Guards the format in both directions."""
    trace = read_trace(written(tmp_path))
    assert (trace.run, trace.rank, trace.host, trace.steps) == ("nano", 1, "here", (3, 4))
    for found, wanted in zip(trace.spans, SPANS, strict=True):
        assert (found.lane, found.name, found.details) == (wanted.lane, wanted.name, wanted.details)
        assert found.start_s == pytest.approx(wanted.start_s, abs=1e-8)
        assert found.end_s == pytest.approx(wanted.end_s, abs=1e-8)
    assert [span.name for span in trace.of_step(3)] == [span.name for span in SPANS[:3]]
    with pytest.raises(UsageError, match="does not have step 5; it has 3, 4"):
        trace.of_step(5)


def test_a_truncated_trace_is_refused_with_its_line(tmp_path: Path) -> None:
    """Guards against half a file: what a full disk or a copy cut short leaves."""
    path = written(tmp_path)
    text = path.read_text("utf-8")
    for end in (0, 1, len(text) // 2, len(text) - 3):
        path.write_text(text[:end], encoding="utf-8")
        with pytest.raises(DocumentError, match=r"trace-rank1.json:1: truncated, or not JSON"):
            read_trace(path)


def test_events_and_notes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Guards edited files: a rank that is missing, a step without its span, a merged file."""
    for changes, words in (({"rank": None}, "no trace of one rank"), ({"steps": [3, 9]}, "does not have step 9")):
        with pytest.raises(DocumentError, match=words):
            read_trace(written(tmp_path, **changes))
    with pytest.raises(DocumentError, match="no step was traced"):
        read_trace(written(tmp_path, steps=[]))
    path = tmp_path / "merged.json"
    path.write_text(trace_text([Process("a", 0, SPANS), Process("b", 1, SPANS)], notes=NOTES), encoding="utf-8")
    with pytest.raises(DocumentError, match="it holds several processes"):
        read_trace(path)
    found = json.loads(written(tmp_path).read_text("utf-8"))
    del found["traceEvents"][-1]["ts"]
    path.write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(DocumentError, match="KeyError: 'ts'"):
        read_trace(path)
