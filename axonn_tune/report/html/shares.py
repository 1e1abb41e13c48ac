"""Where the time of each configuration goes: stacked bars by term, exposed time in the step, hidden time apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from axonn_tune.cost.breakdown import hidden_s, work_by_kind
from axonn_tune.report.html.blocks import Json, figure
from axonn_tune.report.html.colors import BY_KIND, WAIT, term_color
from axonn_tune.report.html.configuration import Detailed
from axonn_tune.units import show_seconds

_ROW_HEIGHT = 38
_STEP_PLACE, _HIDDEN_PLACE = -0.1, 0.3
_OTHERS, _WORTH = "all other collectives", 0.005
"""Collectives that take less than this share of every step shown are one."""


def shares_figure(found: Sequence[Detailed], names: Sequence[str]) -> Json:
    """One pair of bars per configuration: the step above, what computation hides of its communication below."""
    steps = [one.pricing.iteration_s for one in found]
    computed = [_work(one) for one in found]
    exposed = _main_ones([_terms(one, exposed=True) for one in found], steps)
    hidden = _main_ones([_terms(one, exposed=False) for one in found], steps)
    waited, hiding = _keys(exposed), _keys(hidden)
    traces = [
        *(
            _trace(kind, kind, computed, color=BY_KIND[kind])
            for kind in BY_KIND
            if any(kind in one for one in computed)
        ),
        *(_term_trace(key, exposed) for key in waited),
        *(_term_trace(key, hidden, apart=True, shown=key not in waited) for key in hiding),
        _ends(steps),
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "s"}, "range": [0, 1.22 * max(steps)]},
        "yaxis": {
            "tickvals": list(range(len(names))),
            "ticktext": names,
            "range": [len(names) - 0.4, -0.5],
            "fixedrange": True,
        },
        "hovermode": "closest",
    }
    return figure(
        "Where the time goes",
        traces,
        layout=layout,
        height=60 + _ROW_HEIGHT * len(names),
        note="Thick bars: the step, that is computation, then the time it stands still for each collective. Thin bars:"
        " communication hidden behind computation, which costs no time. A colour is an axis, its strength the"
        " collective. Names are rank, then x × y × z × data.",
    )


def _ends(steps: Sequence[float]) -> Json:
    """The time of each step, at the end of its bar."""
    return {
        "type": "scatter",
        "mode": "text",
        "x": list(steps),
        "y": [number + _STEP_PLACE for number in range(len(steps))],
        "text": [f" {show_seconds(step_s)}" for step_s in steps],
        "textposition": "middle right",
        "cliponaxis": False,
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _main_ones(sums: Sequence[dict[str, float]], steps: Sequence[float]) -> list[dict[str, float]]:
    """The same with what is nowhere worth a colour of its own put together."""
    large = {
        key
        for one, step_s in zip(sums, steps, strict=True)
        for key, seconds in one.items()
        if seconds > _WORTH * step_s
    }
    found: list[dict[str, float]] = []
    for one in sums:
        rest = sum(seconds for key, seconds in one.items() if key not in large)
        kept = {key: seconds for key, seconds in one.items() if key in large}
        found.append({**kept, **({_OTHERS: rest} if rest else {})})
    return found


def _work(one: Detailed) -> dict[str, float]:
    """Seconds by kind of computation."""
    found: dict[str, float] = {}
    for each in work_by_kind(one.pricing, one.inputs.problem.workload):
        found[each.kind] = found.get(each.kind, 0.0) + each.seconds
    return found


def _terms(one: Detailed, *, exposed: bool) -> dict[str, float]:
    """Seconds by collective and axis: those in which computation stands still, or those it hides."""
    found: dict[str, float] = {}
    for term in one.pricing.terms:
        key = f"{term.op} over {term.axis}"
        found[key] = found.get(key, 0.0) + (term.exposed_s if exposed else hidden_s(term))
    return {key: seconds for key, seconds in found.items() if seconds}


def _keys(sums: Iterable[dict[str, float]]) -> list[str]:
    return sorted({key for one in sums for key in one}, key=lambda key: (key.rpartition(" ")[2], key))


def _term_trace(key: str, sums: Sequence[dict[str, float]], *, shown: bool = True, apart: bool = False) -> Json:
    op, _, axis = key.partition(" over ")
    label = f"{key}, hidden" if apart else f"waiting for {key}"
    color = term_color(op, axis) if axis else WAIT
    found = _trace(key, label, sums, color=color, place=_HIDDEN_PLACE if apart else _STEP_PLACE)
    return {**found, "showlegend": shown, "width": 0.14 if apart else 0.5}


def _trace(key: str, label: str, sums: Sequence[dict[str, float]], *, color: str, place: float = _STEP_PLACE) -> Json:
    rows = [number for number, one in enumerate(sums) if key in one]
    return {
        "type": "bar",
        "orientation": "h",
        "name": key,
        "legendgroup": key,
        "y": [number + place for number in rows],
        "x": [sums[number][key] for number in rows],
        "text": [f"{label}: {show_seconds(sums[number][key])}" for number in rows],
        "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
        "width": 0.5,
        "marker": {"color": color, "line": {"width": 0}},
    }
