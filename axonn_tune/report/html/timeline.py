"""Figures of the predicted schedule: a compute lane, and one lane for the collectives of each axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from axonn_tune.cost.prediction import Pricing
from axonn_tune.report.html.blocks import Json, figure
from axonn_tune.report.html.colors import BY_KIND, MUTED, WAIT, term_color
from axonn_tune.report.html.spans import SEVERAL, WAITING, Bar, layer_bars, step_bars
from axonn_tune.specs.traces import COMPUTE_LANE, END, HEAD, communication_lane
from axonn_tune.units import MILLI, show_seconds

_STEP_PARTS = 500
"""What is shorter than this part of a step is too narrow to see in a figure of the step."""
_BY_PHASE = {"forward": "--compute", HEAD: "--compute-4", "backward": "--compute-2", END: "--compute-3"}
_LANE_HEIGHT, _BASE_HEIGHT = 34, 80
_ALL_AXES = "xyzdata"


def timeline_figures(pricing: Pricing) -> list[Json]:
    """One layer forward, one backward, and the step."""
    forward, backward = layer_bars(pricing)
    step = step_bars(pricing, finest_s=pricing.iteration_s / _STEP_PARTS)
    batches = (
        f"All {pricing.accumulation:,} micro-batches of the step, then the optimizer."
        if pricing.accumulation > 1
        else "The step's only micro-batch, then the optimizer."
    )
    return [
        _lane_figure(
            "One layer, forward",
            forward,
            note="A block in the middle of the model, with what the blocks before it have sent and what it waits for.",
        ),
        _lane_figure(
            "One layer, backward",
            backward,
            note="The block as the backward pass meets it, with what is computed again.",
        ),
        _lane_figure(
            "The whole step",
            step,
            note=f"{batches} What is too short to see is drawn together with its neighbours; the paler a bar, the"
            " less of it the lane is in use.",
            faint=True,
        ),
    ]


def _lanes(bars: Iterable[Bar]) -> list[str]:
    """Lanes from the top, computation first."""
    return sorted({one.lane for one in bars}, key=lambda lane: (lane != COMPUTE_LANE, lane))


def _lane_figure(title: str, bars: Sequence[Bar], *, note: str, faint: bool = False) -> Json:
    lanes = _lanes(bars)
    end_s = max((one.end_s for one in bars), default=0.0)
    scale, unit = (MILLI, "ms") if end_s < 1.0 else (1.0, "s")
    traces = [
        _trace(what, [one for one in bars if (one.what, one.lane) == (what, lane)], lanes, scale=scale, faint=faint)
        for lane, what in sorted({(one.lane, one.what) for one in bars}, key=_place)
    ]
    layout = {
        "barmode": "overlay",
        "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "yaxis": {
            "tickvals": list(range(len(lanes))),
            "ticktext": [_lane_name(lane) for lane in lanes],
            "range": [len(lanes) - 0.5, -0.5],
            "fixedrange": True,
        },
        "hovermode": "closest",
    }
    height = _BASE_HEIGHT + _LANE_HEIGHT * len(lanes)
    return figure(title, traces, layout=layout, height=height, note=note)


def _trace(what: str, bars: Sequence[Bar], lanes: Sequence[str], *, scale: float, faint: bool) -> Json:
    color = _color(what, bars[0].lane)
    return {
        "type": "bar",
        "orientation": "h",
        "name": what,
        "base": [_short(one.start_s / scale) for one in bars],
        "x": [_short((one.end_s - one.start_s) / scale) for one in bars],
        "y": [lanes.index(one.lane) for one in bars],
        "width": 0.7,
        "text": [_words(one) for one in bars],
        "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {
            "color": color,
            "opacity": [round(0.25 + 0.75 * _share(one), 2) for one in bars] if faint else 1.0,
            # What is narrower than a pixel is still seen.
            "line": {"width": 0.7, "color": color},
        },
    }


def _words(one: Bar) -> str:
    lasted_s = one.end_s - one.start_s
    in_use = "" if _share(one) > 0.99 else f", {_share(one):.0%} of it in use"
    return f"{one.name}<br>{show_seconds(lasted_s)} from {show_seconds(one.start_s)}{in_use}"


def _share(one: Bar) -> float:
    lasted_s = one.end_s - one.start_s
    return min(one.busy_s / lasted_s, 1.0) if lasted_s else 1.0


def _short(value: float) -> float:
    """A number as exactly as a screen can show it."""
    return float(f"{value:.5g}")


def _place(lane_and_what: tuple[str, str]) -> tuple[bool, str, int, str]:
    """Traces in the order of lanes and of the step."""
    lane, what = lane_and_what
    phases = list(_BY_PHASE)
    return lane != COMPUTE_LANE, lane, phases.index(what) if what in phases else len(phases), what


def _lane_name(lane: str) -> str:
    """A lane beside the figure, where there is little room."""
    if lane == communication_lane(_ALL_AXES):
        return "over all"
    return lane.removeprefix("communication ")


def _color(what: str, lane: str) -> str:
    """Colour of a kind of bar."""
    if what == WAITING:
        return WAIT
    if what == SEVERAL:
        return MUTED if lane == COMPUTE_LANE else term_color("all_reduce", lane.rpartition(" ")[2])
    op, _, axis = what.partition(" over ")
    return term_color(op, axis) if axis else {**_BY_PHASE, **BY_KIND}[what]
