"""Predicted and measured steps in one trace, with the same lanes and names, aligned where the step starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from axonn_tune import __version__
from axonn_tune.cost.single import Pricing
from axonn_tune.cost.spans import STEP, predicted_spans, spans_of_one
from axonn_tune.errors import UsageError
from axonn_tune.grid import AXES
from axonn_tune.ranking.inputs import Inputs
from axonn_tune.report.ranking_json import Json
from axonn_tune.specs.traces import (
    COMPUTE_LANE,
    TRACE_SCHEMA,
    MeasuredTrace,
    Process,
    Span,
    shifted,
    step_name,
    trace_text,
)
from axonn_tune.units import counted, show_seconds

PREDICTED = "predicted"
_MOST_SPANS = 100_000
"""About 15 MB of a file."""


@dataclass(frozen=True)
class Prediction:
    """A priced configuration and what it was made from."""

    inputs: Inputs
    pricing: Pricing


@dataclass(frozen=True)
class Measured:
    """Traces of some ranks, and the step of theirs to show."""

    traces: Sequence[MeasuredTrace]
    step: int

    @property
    def process_names(self) -> list[str]:
        """One for each trace; with the run's folder where there are several."""
        folders = {trace.path.parent for trace in self.traces}
        apart = len(folders) > 1
        return [f"measured rank {one.rank}{f', {one.path.parent.name}' if apart else ''}" for one in self.traces]


def choose_step(traces: Sequence[MeasuredTrace], *, step: int | None) -> Measured:
    """The step wanted, or of those that all traces have the one of median duration by the first; UsageError if none."""
    if step is None:
        common = set(traces[0].steps).intersection(*(trace.steps for trace in traces[1:]))
        if not common:
            raise UsageError("the traces have no step in common: " + "; ".join(map(_steps_of, traces)))
        by_time = sorted(common, key=lambda one: (_duration_s(traces[0].whole_step(one)), one))
        step = by_time[(len(by_time) - 1) // 2]
    for trace in traces:
        trace.whole_step(step)
    return Measured(traces, step)


def merged_trace(prediction: Prediction, measured: Measured | None) -> str:
    """The JSON trace: a process of the prediction, then one for each measured rank.

    Each run's ranks of one host are aligned at the first of their starts: differences between those are real,
    differences between clocks of several hosts would not be.
    """
    spans = predicted_spans(prediction.pricing, alike=_alike(prediction.pricing))
    if measured is None:
        return trace_text([Process(PREDICTED, 0, spans)], notes=_notes(prediction, None))
    spans[0] = replace(spans[0], name=step_name(measured.step))
    begun_s: dict[tuple[Path, str], float] = {}
    for trace in measured.traces:
        start_s = trace.whole_step(measured.step).start_s
        place = (trace.path.parent, trace.host)
        begun_s[place] = min(begun_s.get(place, start_s), start_s)
    processes = [Process(PREDICTED, 0, spans)]
    for number, (name, trace) in enumerate(zip(measured.process_names, measured.traces, strict=True), 1):
        found = [shifted(span, -begun_s[trace.path.parent, trace.host]) for span in trace.of_step(measured.step)]
        processes.append(Process(name, number, found))
    return trace_text(processes, notes=_notes(prediction, measured))


def _alike(pricing: Pricing) -> int:
    """How many equal micro-batches to spell out: as many as a browser shows without effort, and one in any case."""
    return max(_MOST_SPANS // spans_of_one(pricing), 1)


def trace_remarks(prediction: Prediction, measured: Measured | None) -> list[str]:
    """Durations of the step, and collectives that only one side has, which then are about different things."""
    predicted_s = prediction.pricing.iteration_s
    alike, times = _alike(prediction.pricing), prediction.pricing.batches[0].times
    short = [f"Of {times} equal micro-batches {alike} are spelled out."] if times > alike else []
    if measured is None:
        return [f"{STEP.capitalize()} predicted to take {show_seconds(predicted_s)}.", *short]
    took_s = [_duration_s(trace.whole_step(measured.step)) for trace in measured.traces]
    whole = f"Step {measured.step} took {show_seconds(max(took_s))}, predicted {show_seconds(predicted_s)}."
    ours = _collectives(predicted_spans(prediction.pricing, operations=False, alike=1))
    theirs = {name for trace in measured.traces for name in _collectives(trace.of_step(measured.step))}
    remarks = [
        f"{counted(len(names), 'collective')} {where} alone, such as {min(names)}: is this the config that ran?"
        for names, where in ((ours - theirs, PREDICTED), (theirs - ours, "measured"))
        if names
    ]
    return [whole, *short, *remarks]


def _collectives(spans: Sequence[Span]) -> set[str]:
    return {span.name for span in spans if span.lane != COMPUTE_LANE}


def _duration_s(span: Span) -> float:
    return span.end_s - span.start_s


def _steps_of(trace: MeasuredTrace) -> str:
    return f"rank {trace.rank} has {', '.join(map(str, trace.steps))}"


def _notes(prediction: Prediction, measured: Measured | None) -> Json:
    """What the file is of, with the hashes of what made it."""
    inputs, pricing = prediction.inputs, prediction.pricing
    grid = pricing.configuration.grid
    notes: Json = {
        "schema": TRACE_SCHEMA,
        "tool_version": __version__,
        "predicted": {
            "model": inputs.problem.model.name,
            "model_sha256": inputs.model.sha256,
            "machine": inputs.problem.machine.name,
            "machine_sha256": inputs.machine.sha256,
            **{axis: grid.axis_size(axis) for axis in AXES},
            "order": ",".join(grid.order),
            "iteration_s": pricing.iteration_s,
        },
    }
    if measured is not None:
        notes["step"] = measured.step
        notes["measured"] = [
            {"path": str(one.path), "run": one.run, "rank": one.rank, "host": one.host} for one in measured.traces
        ]
    return notes
