"""A run, predicted and measured: what `axonn-tune run` prints when it is over, its section, and both in one trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from axonn_tune.cost.price import Detail
from axonn_tune.cost.spans import STEP, predicted_spans, spans_of_one
from axonn_tune.errors import UsageError
from axonn_tune.grid import AXES
from axonn_tune.ranking.inputs import Inputs
from axonn_tune.report import page
from axonn_tune.report.output import NOTHING, Column, Json, axis_name, fields_of, known_value, text_of, words, wrapped
from axonn_tune.report.pairs import TERM_TIMES, pairs_figure, points_of, term_rows
from axonn_tune.report.ranking import COLLECTIVE
from axonn_tune.specs.results import Pairs, Summary
from axonn_tune.specs.traces import TRACE_SCHEMA, MeasuredTrace, Process, Span, shifted, step_name, trace_text
from axonn_tune.units import counted, show_bytes, show_seconds
from axonn_tune.vocabulary import COMPUTE_LANE, VERSION

PREDICTED = "predicted"
_MOST_SPANS = 100_000
"""About 15 MB of a file."""


_RATIO = Column("ratio", "measured /\npredicted", show=str)
_QUANTITIES = (words("name", ""), Column("predicted", "predicted", show=str), Column("measured", "measured", show=str))


def summary_text(summary: Summary, *, all_terms: bool) -> str:
    """The whole comparison; `all_terms`: one row for each collective, not one for each kind and axis."""
    title = f"{summary.name}: predicted vs. measured, per step and rank"
    tables = [text_of((*_QUANTITIES, _RATIO), list(_quantity_rows(summary)))]
    if summary.terms:
        rows = groups_of(summary, all_terms=all_terms)
        named = ("op", "axis", *(("phase", "layer") if all_terms else ()), "group", "count")
        times = list(TERM_TIMES.values())
        tables.append(text_of([*(COLLECTIVE[key] for key in named), *times[:2], _RATIO, *times[2:]], rows))
    notes = "\n".join(map(wrapped, _summary_notes(summary)))
    return f"{title}\n{'-' * len(title)}\n" + "\n".join([*tables, notes]) + "\n"


def groups_of(summary: Summary, *, all_terms: bool) -> list[Json]:
    """Rows of the table, most measured time first: sums over terms; of predictions None if any is missing."""
    found: dict[tuple[object, ...], list[Json]] = {}
    for term in term_rows(summary.terms):
        found.setdefault((term["op"], term["axis"], *(term.values() if all_terms else ())), []).append(term)
    groups = []
    for terms in found.values():
        sums: Json = {}
        for name in ("count", *TERM_TIMES):
            known = [term[name] for term in terms if term[name] is not None]
            sums[name] = sum(known) if len(known) == len(terms) else None
        groups.append({**terms[0], **sums, "ratio": ratio(sums["measured_s"], sums["predicted_s"])})
    return sorted(groups, key=lambda group: -group["measured_s"])


def other_hardware(summary: Summary) -> str | None:
    """What to say if the run was on another kind of processor than the prediction is about."""
    predicted, ran = summary.predicted_for.accelerator, summary.ran_on.device
    same = "cpu" in predicted.lower() if summary.ran_on.on_cpu else _same_gpu(predicted, ran)
    if same:
        return None
    return (
        f"Predicted for {predicted}, ran on {ran}: the ratios compare two machines, not a prediction with its outcome."
    )


def _same_gpu(predicted: str, ran: str) -> bool:
    """Whether `A100-SXM4-40GB` may be what torch calls `NVIDIA A100-SXM4-40GB`: the same model number."""
    return predicted.replace("-", " ").split()[0].lower() in ran.replace("-", " ").lower().split()


_PARTS = {
    "step": "step_s",
    "  computation": "compute_s",
    "  exposed communication": "exposed_communication_s",
    "all communication": "communication_s",
    "memory": "memory_bytes",
}
"""Of a step, by their names in texts."""


def _quantity_rows(summary: Summary) -> Iterator[Json]:
    """The step and its parts."""
    for name, key in _PARTS.items():
        show = show_bytes if key == "memory_bytes" else show_seconds
        compared = key != "memory_bytes" or not summary.ran_on.on_cpu
        measured, expected = summary.pairs.measured[key], summary.pairs.predicted.get(key) if compared else None
        yield {
            "name": name,
            "predicted": None if expected is None else show(expected),
            "measured": show(measured),
            "ratio": ratio(measured, expected),
        }


def ratio(measured: float, predicted: float | None) -> str:
    """Measured over predicted; `-` where nothing was predicted."""
    if not predicted:
        return NOTHING
    found = measured / predicted
    return f"{found:.3g}" if found < 1000 else f"{found:,.0f}"


def _summary_notes(summary: Summary) -> Iterator[str]:
    """What the prediction is for and what the run was on; then how it was measured."""
    ran, predicted = summary.ran_on, summary.predicted_for
    yield (
        f"Predicted for {predicted.machine} ({predicted.accelerator}) by {predicted.cost}; ran on "
        f"{counted(ran.ranks, 'rank')}, the first on {ran.host} ({ran.device}), with {ran.backend}."
    )
    warning = other_hardware(summary)
    if warning:
        yield f"Warning: {warning}"
    untimed = f"; a step's time is that of {counted(summary.untimed_steps, 'untimed step')}"
    yield (
        f"Measured: mean over ranks and {counted(summary.averaged_steps, 'step')}, out of the last "
        f"{summary.timed_steps} timed after {summary.warmup_steps} of warm-up; the fastest and slowest quarters are "
        f"excluded{untimed if summary.untimed_steps else ''}. "
        f"Memory: {summary.memory_convention}, of the rank with most"
        f"{'; buffers of Python and Gloo are in it, so it is not compared' if summary.ran_on.on_cpu else ''}."
    )
    if summary.terms:
        yield (
            f"Time of a collective: {summary.seconds_convention}. Exposed time is how long a rank's computation waits, "
            "stragglers included, so it can be more."
        )
    if any(term.seconds is None for term in summary.terms):
        yield (
            "-: the prediction has no collective of that name and size, so the launch config was edited after it was "
            "made."
        )


def run_section(summary: Summary, *, identity: str, source: str) -> Json:
    """The section of a run's summary."""
    ran = summary.ran_on
    named = ("tool_version", "averaged_steps", "timed_steps", "untimed_steps", "warmup_steps", "memory_convention")
    origin = [
        ("source", source),
        ("schema", summary.schema_),
        *((Summary.model_fields[key].description or key, str(getattr(summary, key))) for key in named),
        *((type(ran).model_fields[key].description or key, str(value)) for key, value in ran if value is not None),
    ]
    groups = {f"{one['op']} over {axis_name(one['axis'])}": one for one in groups_of(summary, all_terms=False)}
    sums = {
        side: {name: one[f"{side}_s"] for name, one in groups.items() if one[f"{side}_s"] is not None}
        for side in ("predicted", "measured")
    }
    times = summary.pairs.only(key for key in _PARTS.values() if key != "memory_bytes")
    words = {key: name.strip() for name, key in _PARTS.items()}
    points = [
        *points_of(times, words.__getitem__, lambda key: [words[key]]),
        *points_of(Pairs(**sums), str, lambda name: [f"{name}: all calls of a step, overlapped or not"]),
    ]
    setting, *notes = _summary_notes(summary)
    warning = other_hardware(summary)
    return page.section(
        identity,
        f"{summary.name}: predicted vs. measured",
        subtitle=setting,
        verdict=[warning] if warning else [],
        cards=list(_run_cards(summary)),
        blocks=[
            *(
                [pairs_figure("Predicted vs. measured", points, note="One step of one rank.", bars=True)]
                if points
                else []
            ),
            *page.notes([one for one in notes if not warning or warning not in one]),
            collectives_table(term_rows(summary.terms), f"{identity}-table", "Each collective", note=page.SORTS),
            page.origin_fold(origin),
        ],
    )


def _run_cards(summary: Summary) -> Iterator[Json]:
    for row in _quantity_rows(summary):
        compared = "not compared" if "memory" in row["name"] and summary.ran_on.on_cpu else "not predicted"
        known = f"predicted {row['predicted']}, ratio {row['ratio']}" if row["predicted"] else compared
        yield page.card(row["name"].strip(), row["measured"], note=known)
    yield page.card("tokens/s", f"{summary.tokens_per_s:,.0f}", note="measured")


def collectives_table(terms: Sequence[Json], identity: str = "", title: str = "", *, note: str = "") -> Json:
    """Each collective, with the columns of which something is known."""
    columns = [
        *(COLLECTIVE[key] for key in ("op", "axis", "phase", "layer")),
        *TERM_TIMES.values(),
        *(COLLECTIVE[key] for key in ("count", "group", "tier")),
        replace(COLLECTIVE["bytes"], label="buffer, KiB", per=1024.0),
    ]
    known = [column for column in columns if any(known_value(term, column.key) is not None for term in terms)]
    return page.table(identity, title, known, terms, note=note)


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
            of_each = (f"rank {trace.rank} has {', '.join(map(str, trace.steps))}" for trace in traces)
            raise UsageError("the traces have no step in common: " + "; ".join(of_each))
        by_time = sorted(common, key=lambda one: (_duration_s(traces[0].whole_step(one)), one))
        step = by_time[(len(by_time) - 1) // 2]
    for trace in traces:
        trace.whole_step(step)
    return TraceStep(traces, step)


def merged_trace(inputs: Inputs, priced: Detail, measured: TraceStep | None) -> str:
    """The JSON trace: a process of the prediction, then one for each measured rank.

    Each run's ranks of one host are aligned at the first of their starts: differences between those are real,
    differences between clocks of several hosts would not be.
    """
    spans = predicted_spans(priced, alike=_alike(priced))
    if measured is None:
        return trace_text([Process(PREDICTED, 0, spans)], notes=_trace_notes(inputs, priced, None))
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
    return trace_text(processes, notes=_trace_notes(inputs, priced, measured))


def _alike(priced: Detail) -> int:
    """How many equal micro-batches to show: as many as a browser shows without effort, and at least one."""
    return max(_MOST_SPANS // spans_of_one(priced), 1)


def trace_remarks(priced: Detail, measured: TraceStep | None) -> list[str]:
    """Durations of the step, and collectives that only one side has, which then are about different things."""
    predicted_s = priced.iteration_s
    alike, times = _alike(priced), priced.batches[0].times
    short = [f"{alike} of {times} equal micro-batches are shown."] if times > alike else []
    if measured is None:
        return [f"{STEP.capitalize()} predicted to take {show_seconds(predicted_s)}.", *short]
    took_s = [_duration_s(trace.whole_step(measured.step)) for trace in measured.traces]
    whole = f"Step {measured.step} took {show_seconds(max(took_s))}, predicted {show_seconds(predicted_s)}."
    if priced.stages:
        shown = priced.stage
        return [
            whole,
            *short,
            f"Of the prediction, pipeline stage {shown} is shown, without messages and waits for others.",
        ]
    ours = _collective_names(predicted_spans(priced, operations=False, alike=1))
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


def _trace_notes(inputs: Inputs, priced: Detail, measured: TraceStep | None) -> Json:
    """What the file is of, with the hashes of what made it."""
    grid = priced.grid
    notes: Json = {
        "schema": TRACE_SCHEMA,
        "tool_version": VERSION,
        "predicted": {
            "model": inputs.problem.model.name,
            "model_sha256": inputs.model.sha256,
            "machine": inputs.problem.machine.name,
            "machine_sha256": inputs.machine.sha256,
            **{axis: grid.axis_size(axis) for axis in AXES},
            "order": ",".join(grid.order),
            "iteration_s": priced.iteration_s,
        },
    }
    if measured is not None:
        notes["step"] = measured.step
        notes["measured"] = [
            fields_of(one, ("path", "run", "rank", "host"), path=str(one.path)) for one in measured.traces
        ]
    return notes
