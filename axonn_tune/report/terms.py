"""Predicted beside measured: what `axonn-tune run` prints when a run is over."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from axonn_tune.report.table import Heading, seconds_cells, text_table
from axonn_tune.specs.results import Quantity, Summary, SummaryTerm
from axonn_tune.units import MILLI, counted, show_bytes, show_seconds

_WIDTH = 100


@dataclass(frozen=True)
class Group:
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
    title = f"{summary.name}: predicted beside measured, one step of one rank"
    parts = [f"{title}\n{'-' * len(title)}\n", text_table(_HEADINGS, list(_rows(summary)))]
    if groups:
        parts += ["\n", _collectives(groups, all_terms=all_terms)]
    notes = "\n".join(
        textwrap.fill(note, width=_WIDTH, subsequent_indent="  ", break_long_words=False) for note in _notes(summary)
    )
    return "".join([*parts, "\n", notes, "\n"])


def groups_of(terms: Sequence[SummaryTerm], *, all_terms: bool) -> list[Group]:
    """Rows of the table, most measured time first."""
    found: dict[tuple[str, ...], list[SummaryTerm]] = {}
    for term in terms:
        key = (term.op, term.axis, *((term.phase, term.layer, str(term.bytes)) if all_terms else ()))
        found.setdefault(key, []).append(term)
    return sorted(map(_group, found.values()), key=lambda group: -group.measured_s)


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


def _group(terms: Sequence[SummaryTerm]) -> Group:
    def total(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(values) else None

    first = terms[0]
    return Group(
        op=first.op,
        axis=first.axis,
        phase=first.phase,
        layer=first.layer,
        ranks=first.group,
        tier=first.tier or "-",
        count=sum(term.count for term in terms),
        predicted_s=total([term.predicted_s for term in terms]),
        measured_s=sum(term.measured_s for term in terms),
        predicted_exposed_s=total([term.predicted_exposed_s for term in terms]),
        measured_exposed_s=sum(term.measured_exposed_s for term in terms),
    )


_HEADINGS = [
    Heading("", left=True),
    Heading("predicted"),
    Heading("measured"),
    Heading("measured /\npredicted"),
]


def _rows(summary: Summary) -> Iterator[list[str]]:
    """The step and its parts."""
    yield _row("step", summary.step_s, show_seconds)
    yield _row("  computation", summary.compute_s, show_seconds)
    yield _row("  exposed communication", summary.exposed_communication_s, show_seconds)
    yield _row("communication, hidden included", summary.communication_s, show_seconds)
    yield _row("memory", summary.memory_bytes, show_bytes)


def _row(name: str, quantity: Quantity, show: Callable[[float], str]) -> list[str]:
    predicted = "-" if quantity.predicted is None else show(quantity.predicted)
    return [name, predicted, show(quantity.measured), ratio(quantity.measured, quantity.predicted)]


def ratio(measured: float, predicted: float | None) -> str:
    """Measured over predicted; `-` where nothing was predicted."""
    if not predicted:
        return "-"
    found = measured / predicted
    return f"{found:.3g}" if found < 1000 else f"{found:,.0f}"


def _collectives(groups: Sequence[Group], *, all_terms: bool) -> str:
    named = [Heading("phase", left=True), Heading("layer", left=True)] if all_terms else []
    headings = [
        Heading("collective", left=True), Heading("axis", left=True), *named, Heading("ranks"), Heading("calls"),
        Heading("predicted,\nms"), Heading("measured,\nms"), Heading("measured /\npredicted"),
        Heading("exposed,\npredicted,\nms"), Heading("exposed,\nmeasured,\nms"),
    ]  # fmt: skip
    predicted = seconds_cells([_ms(group.predicted_s) for group in groups])
    measured = seconds_cells([_ms(group.measured_s) for group in groups])
    exposed_predicted = seconds_cells([_ms(group.predicted_exposed_s) for group in groups])
    exposed_measured = seconds_cells([_ms(group.measured_exposed_s) for group in groups])
    rows = [
        [
            group.op,
            group.axis,
            *([group.phase, group.layer] if all_terms else []),
            str(group.ranks),
            str(group.count),
            predicted[number],
            measured[number],
            ratio(group.measured_s, group.predicted_s),
            exposed_predicted[number],
            exposed_measured[number],
        ]
        for number, group in enumerate(groups)
    ]
    return text_table(headings, rows)


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s / MILLI


def _notes(summary: Summary) -> Iterator[str]:
    ran, predicted = summary.ran_on, summary.predicted_for
    yield (
        f"Predicted for {predicted.machine} ({predicted.accelerator}) by {predicted.cost}; ran on "
        f"{counted(ran.ranks, 'rank')}, the first on {ran.host} ({ran.device}), with {ran.backend}."
    )
    warning = other_hardware(summary)
    if warning:
        yield f"Warning: {warning}"
    yield (
        f"Measured: mean over ranks and {counted(summary.averaged_steps, 'step')}, out of the last "
        f"{summary.timed_steps} timed after {summary.warmup_steps} of warm-up; the quarters that took least and most "
        f"are left out. Memory: {summary.memory_convention}, of the rank with most."
    )
    if summary.terms:
        yield (
            f"A collective takes, {summary.seconds_convention}. Exposed time is what a rank stands still for, waiting "
            "for late ranks included, so it can be more."
        )
    if any(term.predicted_s is None for term in summary.terms):
        yield (
            "-: the prediction has no collective of that name and size, so the launch config was edited after it was "
            "made."
        )
