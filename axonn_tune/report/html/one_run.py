"""The summary of a run as a section: predicted beside measured, term by term."""

from __future__ import annotations

from axonn_tune.report.html import provenance
from axonn_tune.report.html.blocks import Column, Json, card, figure, section, table
from axonn_tune.report.html.colors import MEASURED, PREDICTED
from axonn_tune.report.terms import groups_of, other_hardware, ratio
from axonn_tune.specs.results import Quantity, Summary
from axonn_tune.units import MILLI, counted, show_bytes, show_seconds

_TERMS = (
    Column("op", "collective", "What is sent.", text=True, width_ch=14),
    Column("axis", "axis", "Axis whose ranks take part.", text=True, width_ch=7),
    Column("phase", "phase", "Part of the step.", text=True, width_ch=10),
    Column("layer", "layer", "Layer it belongs to.", text=True, width_ch=15),
    Column("predicted_s", "pre\u00addicted, ms", "Time of all calls of a step.", per=MILLI, width_ch=10),
    Column("measured_s", "mea\u00adsured, ms", "The same, measured.", per=MILLI, width_ch=10),
    Column(
        "predicted_exposed_s", "exposed, pre\u00addicted, ms", "The part no computation hides.", per=MILLI, width_ch=10
    ),
    Column(
        "measured_exposed_s", "mea\u00adsured, ms", "The same, waiting for late ranks included.", per=MILLI, width_ch=10
    ),
    Column("count", "calls", "Calls per step and rank.", decimals=0, width_ch=7),
    Column("group", "ranks", "Ranks that take part.", decimals=0, width_ch=7),
    Column("bytes", "buffer, KiB", "Full buffer of one call.", per=1024.0, width_ch=10),
    Column("tier", "network", "Outermost tier it was predicted to cross.", text=True, width_ch=12),
)


def run_section(summary: Summary, *, identity: str, source: str) -> Json:
    """The section of a run's summary."""
    ran, predicted = summary.ran_on, summary.predicted_for
    lead = [
        f"Predicted for {predicted.machine} ({predicted.accelerator}) by {predicted.cost}; ran on "
        f"{counted(ran.ranks, 'rank')}, the first on {ran.host} ({ran.device}), with {ran.backend}.",
        f"Measured: mean over ranks and {counted(summary.averaged_steps, 'step')} of {summary.timed_steps} timed.",
    ]
    warning = other_hardware(summary)
    rows = [term.model_dump(mode="json") for term in summary.terms]
    named = ("averaged_steps", "timed_steps", "warmup_steps", "memory_convention")
    origin = [
        ("source", source),
        ("schema", summary.schema_),
        *((Summary.model_fields[key].description or key, str(getattr(summary, key))) for key in named),
        *((type(ran).model_fields[key].description or key, str(value)) for key, value in ran.model_dump().items()),
    ]
    return section(
        identity,
        f"{summary.name}: predicted beside measured",
        lead=[*lead, *([f"Warning: {warning}"] if warning else [])],
        cards=_cards(summary),
        blocks=[
            _times(summary),
            *([_terms(summary)] if summary.terms else []),
            table(f"{identity}-table", "Each collective", _TERMS, rows, note="Click a heading to sort."),
            provenance.origin_fold(origin),
        ],
    )


def _cards(summary: Summary) -> list[Json]:
    times = (
        ("step", summary.step_s),
        ("computation", summary.compute_s),
        ("communication", summary.communication_s),
        ("exposed", summary.exposed_communication_s),
    )
    return [
        *(card(name, show_seconds(value.measured), note=_beside(value)) for name, value in times),
        card("memory", show_bytes(summary.memory_bytes.measured), note=_bytes_beside(summary.memory_bytes)),
        card("tokens/s", f"{summary.tokens_per_s:,.0f}", note="measured"),
    ]


def _beside(value: Quantity) -> str:
    if value.predicted is None:
        return "not predicted"
    return f"predicted {show_seconds(value.predicted)}, ratio {ratio(value.measured, value.predicted)}"


def _bytes_beside(value: Quantity) -> str:
    if value.predicted is None:
        return "not predicted"
    return f"predicted {show_bytes(value.predicted)}, ratio {ratio(value.measured, value.predicted)}"


def _times(summary: Summary) -> Json:
    rows = (
        ("step", summary.step_s),
        ("computation", summary.compute_s),
        ("communication", summary.communication_s),
        ("exposed", summary.exposed_communication_s),
    )
    pairs = [(name, value.predicted, value.measured) for name, value in rows]
    return _bars("Predicted beside measured", pairs, note="One step of one rank.")


def _terms(summary: Summary) -> Json:
    groups = groups_of(summary.terms, all_terms=False)
    pairs = [(f"{group.op} over {group.axis}", group.predicted_s, group.measured_s) for group in groups]
    return _bars("Collectives", pairs, note="All calls of a step, hidden or not, by collective and axis.")


def _bars(title: str, pairs: list[tuple[str, float | None, float]], *, note: str) -> Json:
    names = [name for name, _, _ in pairs]
    sides = (
        ("predicted", PREDICTED, [None if one is None else one / MILLI for _, one, _ in pairs]),
        ("measured", MEASURED, [one / MILLI for _, _, one in pairs]),
    )
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": side,
            "y": names,
            "x": values,
            "hovertemplate": "%{y}: " + side + " %{x:.4g} ms<extra></extra>",
            "marker": {"color": color},
        }
        for side, color, values in sides
    ]
    layout = {
        "barmode": "group",
        "xaxis": {"title": {"text": "ms a step"}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "fixedrange": True},
        "hovermode": "closest",
    }
    return figure(title, traces, layout=layout, height=140 + 46 * len(names), note=note)
