"""A ranking as a section: where time goes, the map of all grids, their table, each of the first in detail."""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from axonn_tune.cost.breakdown import hidden_s, work_by_kind
from axonn_tune.frameworks.description import Framework
from axonn_tune.grid import ALL_AXES
from axonn_tune.ranking.inputs import Inputs
from axonn_tune.ranking.results import Results
from axonn_tune.report import page
from axonn_tune.report.configuration import (
    ConfigurationDetail,
    LayoutWords,
    detail_blocks,
    detailed,
    explain_command,
    inputs_of,
    launch_command,
    outcome,
    over_axis,
    time_unit,
)
from axonn_tune.report.explain import memory_items
from axonn_tune.report.output import Column, Json, axis_name, unbroken
from axonn_tune.report.ranking import (
    COLUMNS,
    METRICS,
    TIED,
    axis_columns,
    rank_column,
    ranking_document,
    shown_row,
    with_framework,
)
from axonn_tune.units import GIB, counted, show_bytes, show_seconds

DETAILED = 10
"""How many configurations, from the first, are shown with timeline, memory and terms."""
MOST_ROWS = 12_000
"""More rows than this would make the file too large to send."""
FEASIBLE, TIE = "feasible", f"{TIED} within model error of the first"
REJECTED = "rejected: "
_HOLES = {key: f"{{{key}}}" for key in (*ALL_AXES, "chunks", "order", "micro_batch", "recompute", "kept_layers")}
"""Where a page fills in the cells of a row."""
PAGE_COLUMNS = tuple(
    COLUMNS[key]
    for key in (
        *("rank", "iteration_s", "communication_s", "exposed_communication_s", "low_s", "high_s", "mfu"),
        *("memory_bytes", "micro_batch", "recompute", "kept_layers", "wide_order", "compute_s", "tokens_per_s", "hfu"),
        *("gpu_hours", "node_hours", "days", "grad_accumulation", "state", "rejected_because", "order"),
    )
)
_FILTERS = {"recompute": "recompute", "wide_order": "rank order", "state": "state"}


def ranking_section(document: Json, *, identity: str, source: str, picked: Json | None = None) -> Json:
    """The section of a ranking document; `picked`: a configuration of its own to show first, as of a launch config.

    `source` is what errors call the document.
    """
    inputs = inputs_of(document, source=source)
    configs = _listed(document["configs"])
    layouts = LayoutWords.of(document, document["configs"])
    pins = layouts.pins
    picked = picked and next((one for one in configs[:DETAILED] if pins(one) == pins(picked)), picked)
    found = _details(configs, inputs, picked=picked)
    opens = f"{identity}-configuration"
    panel = _configurations(found, configs, inputs, identity=opens, picked=picked, layouts=layouts, source=source)
    meanings = [(unbroken(column.label), column.meaning) for column in _columns(layouts) if not column.hidden]
    pieces = [
        *([shares_figure(found, picked=picked, layouts=layouts)] if found else []),
        *page.notes(_remarks(document, configs), title="How sure, and what was searched"),
        _ranking_table(configs, document, identity=identity, opens=opens if configs else "", layouts=layouts),
        *([panel] if configs or found else []),
        map_figure(document["configs"], rank_by=document["rank_by"], layouts=layouts),
        page.fold("What the columns mean", [page.facts(meanings)]),
        *page.provenance_folds(document, source=source),
    ]
    first = picked or next((config for config in configs if config["feasible"]), None)
    return page.section(
        identity,
        f"{document['model']['name']} on {document['gpus']:,} × {document['machine']['name']}"
        f"{with_framework(layouts.framework)}",
        subtitle=page.subtitle(document, f"ranked by {METRICS[document['rank_by']][0]}"),
        verdict=_verdict(document, first, layouts),
        blocks=[piece for piece in pieces if piece is not None],
    )


def _verdict(document: Json, first: Json | None, layouts: LayoutWords) -> list[str]:
    """The configuration to take with its step and interval, then the sentences of the document that say why."""
    if first is None:
        return ["No grid is feasible; the table says why for each."]
    return [f"{layouts.title(first)}: {outcome(first)}", *document.get("verdict", [])]


def _columns(layouts: LayoutWords) -> list[Column]:
    """Columns of the table: the rank, the layout, the rest."""
    return [PAGE_COLUMNS[0], *axis_columns(layouts.framework, layouts.axes), *PAGE_COLUMNS[1:]]


def _listed(configs: Sequence[Json]) -> list[Json]:
    """What fits into the page: the first of the feasible, then rejected ones."""
    feasible = [config for config in configs if config["feasible"]]
    rejected = [config for config in configs if not config["feasible"]]
    return [*feasible[:MOST_ROWS], *rejected[: max(MOST_ROWS - len(feasible), 0)]]


def _remarks(document: Json, configs: Sequence[Json]) -> list[str]:
    """What else the document says in words, and what the page leaves out."""
    # In the terminal another option lists rejected grids; here the table does.
    rest = [line for line in document.get("remarks", []) if line not in document.get("verdict", [])]
    said = [line.replace("--all lists", "the table lists") for line in rest]
    left = document.get("left_out", 0) + len(document["configs"]) - len(configs)
    if left:
        said.append(f"{counted(left, 'more row')} are left out of this page; --format csv or json has all.")
    return said


def _details(configs: Sequence[Json], inputs: Inputs, *, picked: Json | None) -> list[ConfigurationDetail]:
    """The configuration picked, then the first of the ranking."""
    wanted = [*([picked] if picked else []), *(config for config in configs[:DETAILED] if config is not picked)]
    return [one for config in wanted if (one := detailed(config, inputs)) is not None]


def _ranking_table(configs: Sequence[Json], document: Json, *, identity: str, opens: str, layouts: LayoutWords) -> Json:
    others = [rank_column(cost) for cost in (configs[0].get("ranks") or {})] if configs else []
    rows = [{**shown_row(config, layouts.framework), "state": state_of(config)} for config in configs]
    used = [column for column in _columns(layouts) if any(row.get(column.key) not in (None, "") for row in rows)]
    filters = {**{axis: layouts.framework.called(axis) for axis in layouts.axes}, **_FILTERS}
    note = f"Ranked by {METRICS[document['rank_by']][0]}. Click a heading to sort, a row for its details."
    columns, name = [*used[:1], *others, *used[1:]], f"{identity}-table"
    return page.table(name, "Ranking", columns, rows, note=note, filters=filters, opens=opens, tall=True)


def state_of(config: Json) -> str:
    """Whether a configuration can be used, in a word or two."""
    if not config["feasible"]:
        return f"{REJECTED}{reason_name(config)}"
    return TIE if config["tie"] and config["rank"] != 1 else FEASIBLE


def _configurations(
    found: Sequence[ConfigurationDetail],
    configs: Sequence[Json],
    inputs: Inputs,
    *,
    identity: str,
    picked: Json | None,
    layouts: LayoutWords,
    source: str,
) -> Json:
    """Details that the table opens, one configuration at a time, or two beside each other."""
    explain = explain_command(inputs)
    places = {id(config): place for place, config in enumerate(configs)}
    items = [
        {
            "row": places.get(id(one.config)),
            "title": f"{'The launch config: ' if one.config is picked else ''}{layouts.title(one.config)}",
            "short": layouts.short(one.config, launch=one.config is picked),
            "spent": spent(one),
            "blocks": detail_blocks(one, explain=explain, layouts=layouts, source=source),
        }
        for one in found
    ]
    pins = layouts.pins(_HOLES)
    commands = {
        "Explain it": " ".join([shlex.join(explain), *pins]),
        "Write what starts it": launch_command(explain, pins),
    }
    return {
        "kind": "configurations",
        "id": identity,
        "title": "One configuration",
        "items": items,
        "rowTitle": f"#{{rank}}: {layouts.sizes(_HOLES)}",
        "rejectedTitle": f"{layouts.sizes(_HOLES)}, infeasible",
        "elsewhere": "This page has timeline, memory, terms and launch config only for the first of the ranking; these"
        " commands have them for this one.",
        "commands": commands if explain else {},
    }


def ranking_of(results: Results) -> Json:
    """A search as the ranking document with what fits into a page, and the terms of those shown in detail.

    `left_out`: how many more are ranked than it lists.
    """
    first = results.listed(top=DETAILED, terms=True)
    entries = (*first, *results.listed(top=MOST_ROWS, rejected=True)[len(first) :])
    return {**ranking_document(results, entries), "left_out": max(len(results.ranked) - MOST_ROWS, 0)}


_ROW_HEIGHT = 38
_STEP_PLACE, _HIDDEN_PLACE = -0.1, 0.3
BREAKDOWN, BUBBLE = "Step time: breakdown and 80% interval", "pipeline bubble"
_OTHERS, _WORTH = "all other collectives", 0.005
"""Collectives that take less than this share of every step shown are one."""


def spent(one: ConfigurationDetail) -> list[Json]:
    """What a configuration spends of time and memory, by the same names in all, to compare it with another."""
    exposed = _term_sums(one, exposed=True)
    framework, bubble_s = one.inputs.problem.framework, one.pricing.bubble_s
    step = {
        **_work_sums(one),
        **{f"exposed {over_axis(key, framework)}": exposed_s for key, exposed_s in exposed.items()},
    }
    step |= {BUBBLE: bubble_s} if bubble_s else {}
    # Terms are those of all pipeline stages, the step's wait that of one.
    rest_s = one.pricing.iteration_s - sum(step.values())
    step |= {"the rest": rest_s} if bubble_s else {}
    *items, _ = memory_items(one.pricing)
    scale, unit = time_unit(one.pricing.iteration_s)
    return [
        {"title": "Step", "unit": unit, "per": scale, "values": step},
        {"title": "Peak memory per GPU", "unit": "GiB", "per": float(GIB), "values": dict(items)},
    ]


def shares_figure(found: Sequence[ConfigurationDetail], *, picked: Json | None, layouts: LayoutWords) -> Json:
    """One pair of bars per configuration: the step with its interval above, overlapped communication below."""
    names = [layouts.short(one.config, launch=one.config is picked) for one in found]
    steps = [one.pricing.iteration_s for one in found]
    computed = [_work_sums(one) | ({BUBBLE: one.pricing.bubble_s} if one.pricing.bubble_s else {}) for one in found]
    exposed = _with_others([_term_sums(one, exposed=True) for one in found], steps)
    hidden = _with_others([_term_sums(one, exposed=False) for one in found], steps)
    configs, places = [one.config for one in found], [number + _STEP_PLACE for number in range(len(found))]
    waited, hiding = _sorted_keys(exposed), _sorted_keys(hidden)
    framework = layouts.framework
    traces = [
        *(
            _share_trace(kind, kind, computed, color=color)
            for kind, color in {**page.BY_KIND, BUBBLE: page.MUTED}.items()
            if any(kind in one for one in computed)
        ),
        *(_term_trace(key, exposed, framework) for key in waited),
        *(_term_trace(key, hidden, framework, apart=True, shown=key not in waited) for key in hiding),
        *page.interval_traces(configs, places, machine=found[0].inputs.problem.machine),
        page.label_trace(configs, places),
    ]
    axes = {"xaxis": page.steps_axis(configs), "yaxis": page.named_axis(names, above=0.5)}
    note = _breakdown_note(names, layouts)
    height = 60 + _ROW_HEIGHT * len(names)
    return page.figure(BREAKDOWN, traces, layout={"barmode": "stack", **axes}, height=height, note=note)


def _breakdown_note(names: Sequence[str], layouts: LayoutWords) -> str:
    """How to read the figure."""
    tied = f"; {TIED} is within model error of #1" if any(TIED in name for name in names) else ""
    return (
        f"Names are rank, then {' × '.join(map(layouts.framework.called, layouts.axes))}{tied}. Upper bars: the step, "
        "that is computation, then exposed communication by collective. Whiskers: its 80% interval; their thick part "
        "is the row's own, which is what tells rows apart. Lower bars: communication overlapped with computation, "
        "which lengthens the step only by the compute slowdown it causes."
    )


def _with_others(sums: Sequence[dict[str, float]], steps: Sequence[float]) -> list[dict[str, float]]:
    """The same with what is nowhere worth a color of its own put together."""
    pairs = [(key, seconds, step_s) for one, step_s in zip(sums, steps, strict=True) for key, seconds in one.items()]
    large = {key for key, seconds, step_s in pairs if seconds > _WORTH * step_s}
    return [_sums((key if key in large else _OTHERS, seconds) for key, seconds in one.items()) for one in sums]


def _work_sums(one: ConfigurationDetail) -> dict[str, float]:
    """Seconds by kind of computation."""
    return _sums((each.kind, each.seconds) for each in work_by_kind(one.pricing, one.inputs.problem.workload))


def _term_sums(one: ConfigurationDetail, *, exposed: bool) -> dict[str, float]:
    """Seconds by collective and axis: exposed or overlapped."""
    seconds = [term.exposed_s if exposed else hidden_s(term) for term in one.pricing.terms]
    names = [f"{term.op} over {axis_name(term.axis)}" for term in one.pricing.terms]
    return {key: found_s for key, found_s in _sums(zip(names, seconds, strict=True)).items() if found_s}


def _sums(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for key, seconds in pairs:
        found[key] += seconds
    return found


def _sorted_keys(sums: Iterable[dict[str, float]]) -> list[str]:
    return sorted({key for one in sums for key in one}, key=lambda key: (key.rpartition(" ")[2], key))


def _term_trace(
    key: str, sums: Sequence[dict[str, float]], framework: Framework, *, shown: bool = True, apart: bool = False
) -> Json:
    op, _, axis = key.partition(" over ")
    name = over_axis(key, framework)
    label = f"{name}, overlapped" if apart else f"waiting for {name}"
    color = page.term_color(op, axis) if axis else page.WAIT
    found = _share_trace(key, label, sums, color=color, place=_HIDDEN_PLACE if apart else _STEP_PLACE, name=name)
    return {**found, "showlegend": shown, "width": 0.14 if apart else 0.5}


def _share_trace(
    key: str, label: str, sums: Sequence[dict[str, float]], *, color: str, place: float = _STEP_PLACE, name: str = ""
) -> Json:
    rows = [number for number, one in enumerate(sums) if key in one]
    seconds = [sums[number][key] for number in rows]
    said = [f"{label}: {show_seconds(one)}" for one in seconds]
    places = [number + place for number in rows]
    return page.bar_trace(name or key, seconds, places, color=color, text=said, legendgroup=key, width=0.5)


_MOST_COLUMNS = 130
"""With more columns, those of one product x·y are joined, each cell the best of them."""
_MARKS = (
    "x-thin-open",
    "circle-open",
    "square-open",
    "diamond-open",
    "triangle-up-open",
    "cross-thin-open",
    "hash-open",
)
_NOTHING_TO_SHOW = 2
_SPAN, _NEAR = 12.0, 0.8
"""What takes more than this many times the best has the color of the worst."""


@dataclass(frozen=True)
class MapMetric:
    """What the color can stand for."""

    label: str
    key: str
    show: Callable[[float], str] = show_seconds
    tick: Callable[[float], str] = show_seconds


_MAP_METRICS = {
    "communication": MapMetric("communication", "communication_s"),
    "exposed": MapMetric("exposed", "exposed_communication_s"),
    "iteration": MapMetric("step", "iteration_s"),
    "memory": MapMetric("memory", "memory_bytes", show_bytes, lambda value: f"{value / GIB:.3g} GiB"),
}


@dataclass(frozen=True)
class GridMap:
    """Where each grid lies: columns by (x, y) or by their product, rows by z."""

    columns: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    joined: bool

    @classmethod
    def of(cls, configs: Sequence[Json]) -> GridMap:
        """Columns in the order of x·y, then of x falling; rows in the order of z."""
        pairs = {(config["x"], config["y"]) for config in configs}
        rows = tuple(sorted({config["z"] for config in configs}))
        if len(pairs) <= _MOST_COLUMNS:
            return cls(tuple(sorted(pairs, key=lambda pair: (pair[0] * pair[1], -pair[0]))), rows, False)
        return cls(tuple((product, 1) for product in sorted({x * y for x, y in pairs})), rows, True)

    def at(self, config: Json) -> tuple[int, int]:
        """Column and row."""
        x, y = config["x"], config["y"]
        return self.columns.index((x * y, 1) if self.joined else (x, y)), self.rows.index(config["z"])


def map_figure(configs: Sequence[Json], *, rank_by: str, layouts: LayoutWords) -> Json | None:
    """The map of all configurations of a ranking; None for so few grids that there is nothing to see."""
    best = _best_of_each_grid(configs)
    rejected = [config for config in configs if not config["feasible"]]
    if len(best) + len(rejected) <= _NOTHING_TO_SHOW:
        return None
    places = GridMap.of([*best, *rejected])
    metrics = [metric for metric in _MAP_METRICS.values() if any(config[metric.key] for config in best)]
    metrics.sort(key=lambda metric: metric != _MAP_METRICS[rank_by])
    traces = [
        *([_heat(best, places, metrics[0], layouts)] if metrics else []),
        *_rejected_marks(rejected, places, layouts),
        *([_ring(best[0], places)] if best else []),
    ]
    choices = [page.choice(metric.label, {0: _colored_cells(best, places, metric, layouts)}) for metric in metrics]
    what = "Columns of one product x·y are joined; a cell shows the best of them. " if places.joined else ""
    across, z = layouts.across, layouts.framework.called("z")
    falls = f"; within one {' · '.join(across)}, {across[0]} falls from left to right" if len(across) > 1 else ""
    return page.figure(
        "The space of grids",
        traces,
        layout=_map_layout(places, layouts),
        height=170 + max(24 * len(places.rows), 140),
        note=f"Each cell is a grid at its best: {' and '.join(across)} across{falls}; {z} upwards; "
        f"{' and '.join(layouts.others)} {'are' if len(layouts.others) > 1 else 'is'} what remains. {what}"
        "The ring is the first of the ranking. Marks are infeasible grids; the legend says why, and hides them when"
        " clicked.",
        choices=choices,
        least_width=max(14 * len(places.columns), 320),
    )


def _best_of_each_grid(configs: Sequence[Json]) -> list[Json]:
    """The first of each grid, in ranking order."""
    found: dict[tuple[int, ...], Json] = {}
    for config in configs:
        if config["feasible"]:
            found.setdefault(tuple(config.get(axis, 1) for axis in ALL_AXES), config)
    return list(found.values())


def _heat(best: Sequence[Json], places: GridMap, metric: MapMetric, layouts: LayoutWords) -> Json:
    cells = _colored_cells(best, places, metric, layouts)
    return {
        "type": "heatmap",
        "x": list(range(len(places.columns))),
        "y": list(range(len(places.rows))),
        "z": cells["z"][0],
        "text": cells["text"][0],
        "zmin": cells["zmin"],
        "zmax": cells["zmax"],
        "colorbar": {"thickness": 12, "outlinewidth": 0, **_color_ticks(best, metric)},
        "colorscale": [[0, "--map-best"], [0.5, "--map-middle"], [1, "--map-worst"]],
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
        "hovertemplate": page.SAID,
    }


def _colored_cells(best: Sequence[Json], places: GridMap, metric: MapMetric, layouts: LayoutWords) -> Json:
    """Colors (logarithms) and words of each cell, as a change to the trace."""
    colors: list[list[float | None]] = [[None] * len(places.columns) for _ in places.rows]
    said = [[""] * len(places.columns) for _ in places.rows]
    for config in reversed(best):
        value = config[metric.key]
        if value is None:
            continue
        column, row = places.at(config)
        colors[row][column] = round(math.log10(max(value, 1e-9)), 4)
        said[row][column] = f"#{config['rank']}: {layouts.sizes(config)}<br>{metric.label} {metric.show(value)}"
    ticks = _color_ticks(best, metric)
    low, high = _color_range(best, metric)
    return {
        "zmin": math.log10(low),
        "zmax": math.log10(high),
        "z": [colors],
        "text": [said],
        **{f"colorbar.{key}": [value] for key, value in ticks.items()},
    }


def _color_ticks(best: Sequence[Json], metric: MapMetric) -> Json:
    """Ticks of the logarithmic color bar; the last says so if there is more beyond it."""
    low, high = _color_range(best, metric)
    shown = page.round_ticks(low, high, unit=GIB if metric.key == "memory_bytes" else 1.0)
    words = [metric.tick(value) for value in shown]
    if max(config[metric.key] or 0.0 for config in best) > high:
        shown = [*(value for value in shown if value < _NEAR * high), high]
        words = [*(metric.tick(value) for value in shown[:-1]), f"≥ {metric.tick(high)}"]
    return {"tickvals": [math.log10(value) for value in shown], "ticktext": words}


def _color_range(best: Sequence[Json], metric: MapMetric) -> tuple[float, float]:
    """What the colors span: from the best to so many times as much, where differences matter."""
    known = [value for config in best if (value := config[metric.key])]
    return min(known), min(max(known), _SPAN * min(known))


def _rejected_marks(rejected: Sequence[Json], places: GridMap, layouts: LayoutWords) -> Iterator[Json]:
    """Grids that cannot be used, by the first constraint they break."""
    by_reason: dict[str, list[Json]] = {}
    for config in rejected:
        by_reason.setdefault(reason_name(config), []).append(config)
    for number, (reason, found) in enumerate(by_reason.items()):
        at = [places.at(config) for config in found]
        said = [f"{layouts.sizes(config)}<br>{'<br>'.join(config['rejected_because'])}" for config in found]
        marker = {"color": page.MUTED, "symbol": _MARKS[number % len(_MARKS)], "size": 7, "line": {"width": 1.4}}
        columns, rows = [column for column, _ in at], [row for _, row in at]
        yield page.point_trace(f"{reason} ({len(found)})", columns, rows, text=said, marker=marker)


def reason_name(config: Json) -> str:
    """The constraint a rejected grid breaks: the first, if there are several."""
    return str(config["rejected_because"][0]).partition(":")[0] if config["rejected_because"] else "rejected"


def _ring(first: Json, places: GridMap) -> Json:
    """A ring around the first of the ranking."""
    column, row = places.at(first)
    marker = {"color": page.RING, "symbol": "circle-open", "size": 16, "line": {"width": 3}}
    return page.point_trace("first of the ranking", [column], [row], marker=marker)


def _map_layout(places: GridMap, layouts: LayoutWords) -> Json:
    products = [x * y for x, y in places.columns]
    borders = [place for place, (one, other) in enumerate(pairwise(products)) if one != other]
    starts = [0, *(place + 1 for place in borders)]
    ends = [*borders, len(products) - 1]
    centres = [(start + end) / 2 for start, end in zip(starts, ends, strict=True)]
    line, bare = {"color": "--grid", "width": 1}, {"showgrid": False, "zeroline": False}
    product = " · ".join(layouts.across)
    across = {"title": {"text": product}, "tickvals": centres}
    upwards = {"title": {"text": layouts.framework.called("z")}, "tickvals": list(range(len(places.rows)))}
    products_shown, sizes_shown = [f"{products[start]:,}" for start in starts], [f"{size:,}" for size in places.rows]
    return {
        "xaxis": {**across, "ticktext": products_shown, "range": [-0.5, len(products) - 0.5], **bare},
        "yaxis": {**upwards, "ticktext": sizes_shown, "range": [-0.5, len(places.rows) - 0.5], **bare},
        "shapes": [page.upright(at + 0.5, line) for at in borders],
    }
