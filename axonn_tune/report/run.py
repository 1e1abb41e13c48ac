"""A run, predicted and measured: what `axonn-tune run` prints when it is over, and the step of both in one trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from axonn_tune import __version__
from axonn_tune.cost.prediction import Pricing
from axonn_tune.cost.spans import STEP, predicted_spans, spans_of_one
from axonn_tune.errors import UsageError
from axonn_tune.grid import AXES
from axonn_tune.report.explain import PricedConfiguration
from axonn_tune.report.output import (
    NOTHING,
    Heading,
    Json,
    TableColumn,
    axis_name,
    each,
    fields_of,
    text_of,
    text_table,
    times,
    words,
    wrapped,
)
from axonn_tune.specs.results import Quantity, Summary, SummaryTerm
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
from axonn_tune.units import MILLI, counted, show_bytes, show_seconds

PREDICTED = "predicted"
_MOST_SPANS = 100_000
"""About 15 MB of a file."""


@dataclass(frozen=True)
class TermGroup:
    """Terms shown as one row: sums, s. A sum of predictions is None if any is missing."""

    op: str
    axis: str
    phase: str
    layer: str
    ranks: int
    tier: str
    count: int
    predicted_s: float | None
    measured_s: float
    predicted_exposed_s: float | None
    measured_exposed_s: float


def summary_text(summary: Summary, *, all_terms: bool) -> str:
    """The whole comparison; `all_terms`: one row for each collective, not one for each kind and axis."""
    groups = groups_of(summary.terms, all_terms=all_terms)
    title = f"{summary.name}: predicted vs. measured, per step and rank"
    parts = [f"{title}\n{'-' * len(title)}\n", text_table(_QUANTITY_HEADINGS, list(_quantity_rows(summary)))]
    if groups:
        parts += ["\n", _collectives_table(groups, all_terms=all_terms)]
    notes = "\n".join(map(wrapped, _summary_notes(summary)))
    return "".join([*parts, "\n", notes, "\n"])


def groups_of(terms: Sequence[SummaryTerm], *, all_terms: bool) -> list[TermGroup]:
    """Rows of the table, most measured time first."""
    found: dict[tuple[str, ...], list[SummaryTerm]] = {}
    for term in terms:
        key = (term.op, term.axis, *((term.phase, term.layer, str(term.bytes)) if all_terms else ()))
        found.setdefault(key, []).append(term)
    return sorted(map(_group, found.values()), key=lambda group: -group.measured_s)


def setting_sentence(summary: Summary) -> str:
    """What the prediction is for, and what the run was on."""
    ran, predicted = summary.ran_on, summary.predicted_for
    return (
        f"Predicted for {predicted.machine} ({predicted.accelerator}) by {predicted.cost}; ran on "
        f"{counted(ran.ranks, 'rank')}, the first on {ran.host} ({ran.device}), with {ran.backend}."
    )


def other_hardware(summary: Summary) -> str | None:
    """What to say if the run was on another kind of processor than the prediction is about."""
    predicted, ran = summary.predicted_for.accelerator, summary.ran_on.device
    same = "cpu" in predicted.lower() if ran.startswith("cpu") else _same_gpu(predicted, ran)
    if same:
        return None
    return (
        f"Predicted for {predicted}, ran on {ran}: the ratios compare two machines, not a prediction with its outcome."
    )


def _same_gpu(predicted: str, ran: str) -> bool:
    """Whether `A100-SXM4-40GB` may be what torch calls `NVIDIA A100-SXM4-40GB`: the same model number."""
    return predicted.replace("-", " ").split()[0].lower() in ran.replace("-", " ").lower().split()


def _group(terms: Sequence[SummaryTerm]) -> TermGroup:
    def total(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(values) else None

    first = terms[0]
    return TermGroup(
        op=first.op,
        axis=first.axis,
        phase=first.phase,
        layer=first.layer,
        ranks=first.group,
        tier=first.tier or NOTHING,
        count=sum(term.count for term in terms),
        predicted_s=total([term.predicted_s for term in terms]),
        measured_s=sum(term.measured_s for term in terms),
        predicted_exposed_s=total([term.predicted_exposed_s for term in terms]),
        measured_exposed_s=sum(term.measured_exposed_s for term in terms),
    )


_QUANTITY_HEADINGS = [
    Heading("", left=True),
    Heading("predicted"),
    Heading("measured"),
    Heading("measured /\npredicted"),
]


def _quantity_rows(summary: Summary) -> Iterator[list[str]]:
    """The step and its parts."""
    yield _quantity_row("step", summary.step_s, show_seconds)
    yield _quantity_row("  computation", summary.compute_s, show_seconds)
    yield _quantity_row("  exposed communication", summary.exposed_communication_s, show_seconds)
    yield _quantity_row("all communication", summary.communication_s, show_seconds)
    yield _quantity_row("memory", summary.memory_bytes, show_bytes)


def _quantity_row(name: str, quantity: Quantity, show: Callable[[float], str]) -> list[str]:
    predicted = NOTHING if quantity.predicted is None else show(quantity.predicted)
    return [name, predicted, show(quantity.measured), ratio(quantity.measured, quantity.predicted)]


def ratio(measured: float, predicted: float | None) -> str:
    """Measured over predicted; `-` where nothing was predicted."""
    if not predicted:
        return NOTHING
    found = measured / predicted
    return f"{found:.3g}" if found < 1000 else f"{found:,.0f}"


def _collectives_table(groups: Sequence[TermGroup], *, all_terms: bool) -> str:
    named: list[TableColumn[TermGroup]] = [
        words("phase", lambda group: group.phase),
        words("layer", lambda group: group.layer),
    ]
    columns: list[TableColumn[TermGroup]] = [
        words("collective", lambda group: group.op),
        words("axis", lambda group: axis_name(group.axis)),
        *(named if all_terms else []),
        each("ranks", lambda group: str(group.ranks)),
        each("calls", lambda group: str(group.count)),
        times("predicted,\nms", lambda group: _ms(group.predicted_s)),
        times("measured,\nms", lambda group: _ms(group.measured_s)),
        each("measured /\npredicted", lambda group: ratio(group.measured_s, group.predicted_s)),
        times("exposed,\npredicted,\nms", lambda group: _ms(group.predicted_exposed_s)),
        times("exposed,\nmeasured,\nms", lambda group: _ms(group.measured_exposed_s)),
    ]
    return text_of(columns, groups)


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s / MILLI


def _summary_notes(summary: Summary) -> Iterator[str]:
    yield setting_sentence(summary)
    warning = other_hardware(summary)
    if warning:
        yield f"Warning: {warning}"
    yield (
        f"Measured: mean over ranks and {counted(summary.averaged_steps, 'step')}, out of the last "
        f"{summary.timed_steps} timed after {summary.warmup_steps} of warm-up; the fastest and slowest quarters are "
        f"excluded. Memory: {summary.memory_convention}, of the rank with most."
    )
    if summary.terms:
        yield (
            f"Time of a collective: {summary.seconds_convention}. Exposed time is how long a rank's computation waits, "
            "stragglers included, so it can be more."
        )
    if any(term.predicted_s is None for term in summary.terms):
        yield (
            "-: the prediction has no collective of that name and size, so the launch config was edited after it was "
            "made."
        )


@dataclass(frozen=True)
class TraceStep:
    """Traces of some ranks, and the step of theirs to show."""

    traces: Sequence[MeasuredTrace]
    step: int

    @property
    def process_names(self) -> list[str]:
        """One for each trace; with the run's folder where there are several."""
        folders = {trace.path.parent for trace in self.traces}
        apart = len(folders) > 1
        return [f"measured rank {one.rank}{f', {one.path.parent.name}' if apart else ''}" for one in self.traces]


def choose_step(traces: Sequence[MeasuredTrace], *, step: int | None) -> TraceStep:
    """This step, or of those that all traces have the one of median duration by the first; UsageError if none."""
    if step is None:
        common = set(traces[0].steps).intersection(*(trace.steps for trace in traces[1:]))
        if not common:
            raise UsageError("the traces have no step in common: " + "; ".join(map(_steps_of, traces)))
        by_time = sorted(common, key=lambda one: (_duration_s(traces[0].whole_step(one)), one))
        step = by_time[(len(by_time) - 1) // 2]
    for trace in traces:
        trace.whole_step(step)
    return TraceStep(traces, step)


def merged_trace(prediction: PricedConfiguration, measured: TraceStep | None) -> str:
    """The JSON trace: a process of the prediction, then one for each measured rank.

    Each run's ranks of one host are aligned at the first of their starts: differences between those are real,
    differences between clocks of several hosts would not be.
    """
    spans = predicted_spans(prediction.pricing, alike=_alike(prediction.pricing))
    if measured is None:
        return trace_text([Process(PREDICTED, 0, spans)], notes=_trace_notes(prediction, None))
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
    return trace_text(processes, notes=_trace_notes(prediction, measured))


def _alike(pricing: Pricing) -> int:
    """How many equal micro-batches to show: as many as a browser shows without effort, and at least one."""
    return max(_MOST_SPANS // spans_of_one(pricing), 1)


def trace_remarks(prediction: PricedConfiguration, measured: TraceStep | None) -> list[str]:
    """Durations of the step, and collectives that only one side has, which then are about different things."""
    predicted_s = prediction.pricing.iteration_s
    alike, times = _alike(prediction.pricing), prediction.pricing.batches[0].times
    short = [f"{alike} of {times} equal micro-batches are shown."] if times > alike else []
    if measured is None:
        return [f"{STEP.capitalize()} predicted to take {show_seconds(predicted_s)}.", *short]
    took_s = [_duration_s(trace.whole_step(measured.step)) for trace in measured.traces]
    whole = f"Step {measured.step} took {show_seconds(max(took_s))}, predicted {show_seconds(predicted_s)}."
    ours = _collective_names(predicted_spans(prediction.pricing, operations=False, alike=1))
    theirs = {name for trace in measured.traces for name in _collective_names(trace.of_step(measured.step))}
    remarks = [
        f"{counted(len(names), 'collective')} only {where}, such as {min(names)}: is this the config that ran?"
        for names, where in ((ours - theirs, PREDICTED), (theirs - ours, "measured"))
        if names
    ]
    return [whole, *short, *remarks]


def _collective_names(spans: Sequence[Span]) -> set[str]:
    return {span.name for span in spans if span.lane != COMPUTE_LANE}


def _duration_s(span: Span) -> float:
    return span.end_s - span.start_s


def _steps_of(trace: MeasuredTrace) -> str:
    return f"rank {trace.rank} has {', '.join(map(str, trace.steps))}"


def _trace_notes(prediction: PricedConfiguration, measured: TraceStep | None) -> Json:
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
            fields_of(one, ("path", "run", "rank", "host"), path=str(one.path)) for one in measured.traces
        ]
    return notes
