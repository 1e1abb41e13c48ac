"""A run, predicted and measured: what the table says and must not hide, and both in one trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from axonn_tune.api.explanation import Explanation
from axonn_tune.cost.spans import predicted_spans
from axonn_tune.errors import UsageError
from axonn_tune.ranking.choosing import run_search
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.report.run import choose_step, merged_trace, trace_remarks
from axonn_tune.request import Request
from axonn_tune.specs.traces import MeasuredTrace, Span, step_name
from axonn_tune.vocabulary import COMPUTE_LANE


@pytest.fixture(scope="module")
def prediction() -> Explanation:
    """nano on two ranks."""
    inputs = load_inputs(Request("nano", gpus=2, machine="localhost", z=2))
    return Explanation(inputs, run_search(inputs.problem).detail(0))


def measured(
    prediction: Explanation, *, rank: int, late_s: float, host: str = "here", folder: str = "run"
) -> MeasuredTrace:
    """A run just as predicted, begun late, whose steps 3 to 5 take 1, 3 and 2 times as long."""
    spans = []
    for step, slower in ((3, 1.0), (4, 3.0), (5, 2.0)):
        for span in predicted_spans(prediction.priced, operations=False):
            name = step_name(step) if span.name == "step" else span.name
            start_s = 1000.0 * step + late_s
            spans.append(Span(span.lane, name, start_s + slower * span.start_s, start_s + slower * span.end_s))
    path = Path(folder) / f"trace-rank{rank}.json"
    return MeasuredTrace(path, "nano", rank, host, (3, 4, 5), tuple(spans))


def events(text: str) -> dict[str, list[dict[str, Any]]]:
    """Spans by process."""
    found = json.loads(text)["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in found if one["name"] == "process_name"}
    return {name: [one for one in found if one["ph"] == "X" and one["pid"] == pid] for pid, name in names.items()}


def test_one_process_each_with_the_same_lanes_and_names(prediction: Explanation) -> None:
    """Guards the merged file: predicted first, then the ranks; all starts at the start of the step."""
    traces = [measured(prediction, rank=rank, late_s=0.25 * rank) for rank in (0, 1)]
    text = merged_trace(prediction.inputs, prediction.priced, choose_step(traces, step=None))
    found = events(text)
    assert list(found) == ["predicted", "measured rank 0", "measured rank 1"]
    steps = {name: next(one for one in mine if one["name"] == "step 5") for name, mine in found.items()}
    assert [one["ts"] for one in steps.values()] == pytest.approx([0.0, 0.0, 0.25e6])
    assert steps["measured rank 0"]["dur"] == pytest.approx(2e6 * prediction.priced.iteration_s, rel=1e-3)
    shown = {one["name"] for one in found["measured rank 0"]}
    assert shown <= {one["name"] for one in found["predicted"]}
    notes = json.loads(text)["otherData"]
    assert notes["step"] == 5
    assert [one["rank"] for one in notes["measured"]] == [0, 1]
    assert notes["predicted"]["model_sha256"] == prediction.inputs.model.sha256


def test_steps_that_are_not_there_are_refused(prediction: Explanation) -> None:
    """Guards --step, and traces of different steps."""
    trace = measured(prediction, rank=0, late_s=0.0)
    with pytest.raises(UsageError, match="does not have step 9; it has 3, 4, 5"):
        choose_step([trace], step=9)
    other = MeasuredTrace(trace.path, "nano", 1, "here", (8,), (Span(COMPUTE_LANE, step_name(8), 0.0, 1.0),))
    with pytest.raises(UsageError, match="no step in common: rank 0 has 3, 4, 5; rank 1 has 8"):
        choose_step([trace, other], step=None)


def test_remarks_say_what_only_one_side_has(prediction: Explanation) -> None:
    """Guards against laying a run beside the prediction of another config."""
    trace = measured(prediction, rank=0, late_s=0.0)
    said = trace_remarks(prediction.priced, choose_step([trace], step=3))
    assert len(said) == 1
    assert said[0].startswith("Step 3 took")
    strange = Span("communication over q", "all_gather over q, forward, mlp.fc9", 3000.0, 3000.001)
    found = MeasuredTrace(trace.path, "nano", 0, "here", (3,), (*trace.spans, strange))
    said = trace_remarks(prediction.priced, choose_step([found], step=3))
    assert "1 collective only measured, such as all_gather over q" in said[1]
