"""Predicted vs. published measurements as sections: steps, collectives, GEMMs, memory.

A section has a figure, a color for each series; errors by group; every row; and what was not predicted.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from html import escape

from axonn_tune import __version__
from axonn_tune.errors import UsageError
from axonn_tune.report.html.page import (
    MUTED,
    PERCENT,
    SERIES,
    Cell,
    Choice,
    Column,
    Filter,
    card,
    figure,
    origin_fold,
    percent_column,
    round_ticks,
    section,
    series_color,
    table,
)
from axonn_tune.report.html.ranking_section import MOST_ROWS
from axonn_tune.report.output import NOTHING, Json, fields_of, percent
from axonn_tune.units import GIB, MICRO, show_seconds
from axonn_tune.validation.published.accuracy import Accuracy, FamilyQuality, Files, PredictedRow
from axonn_tune.validation.published.measurements import RELATIVE, Evaluation, errors_by_group
from axonn_tune.validation.published.rows import SHIPPED, StepRow
from axonn_tune.validation.quality import Errors

NEAR = 0.25
"""Size of the error at the dashed lines."""
MOST_POINTS = 3000
"""Of more, those that would lie on each other are drawn once: a browser takes long for ten thousand."""
_CELLS_PER_DECADE = 40
_SYMBOLS = ("circle", "diamond", "square", "triangle-up")
_FEW = 40
"""With more rows a table scrolls in a window of its own."""
_FIGURE, _EACH = "Predicted vs. measured", "Each row"


@dataclass(frozen=True)
class DisplayUnit:
    """What values are shown in: `name`, so many SI units each, with so many decimals; `show` writes one out."""

    name: str
    per: float
    decimals: int
    show: Callable[[float], str]


STEPS = DisplayUnit("s", 1.0, 3, show_seconds)
TIMES = DisplayUnit("µs", MICRO, 1, show_seconds)
MEMORY = DisplayUnit("GiB", GIB, 2, lambda value: f"{value / GIB:.3g} GiB")
SHARES = DisplayUnit("%", PERCENT, 1, lambda value: f"{value / PERCENT:.3g}%")


@dataclass(frozen=True)
class ScatterPoint:
    """A row that has both values, positive; `words`: what pointing at it says."""

    series: str
    measured: float
    predicted: float
    words: str

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True)
class _Kind:
    """Rows that are not steps. counted: over which of them errors are; series: what of a group the color is for."""

    title: str
    judged: tuple[Evaluation, ...]
    counted: str
    unit: DisplayUnit
    series: Callable[[str], str]


def accuracy_sections(found: Accuracy, files: Files, *, command: str) -> list[Json]:
    """A section for each kind of which there are rows, the last with what was read; UsageError if there are none."""
    sections = [_steps_section(found)] if found.steps else []
    for kind in _kinds(found):
        if kind.judged:
            sections.append(_kind_section(kind, f"s{len(sections) + 1}"))
    read = list(_read(files))
    if not sections:
        raise UsageError(f"nothing to report: no rows in {', '.join(words for _, words in read)}")
    sections[-1]["blocks"].append(origin_fold([("axonn-tune", __version__), ("command", command), *read]))
    return sections


def _read(files: Files) -> Iterator[tuple[str, str]]:
    """Which files were read, and their hashes."""
    chosen = files.or_shipped()
    for each in fields(chosen):
        path = getattr(chosen, each.name)
        if path is not None:
            where = f"{path.name}, shipped with the tool" if path.parent == SHIPPED else str(path)
            yield each.name, f"{where}, SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()}"


def _kinds(found: Accuracy) -> Iterator[_Kind]:
    yield _Kind("Collectives", found.collectives, "rows of 1 MiB or more", TIMES, _collective)
    yield _Kind("GEMMs", found.gemms, "rows of 10 GFLOP or more", TIMES, _accelerator)
    yield _Kind("Memory", found.memory, "all rows", MEMORY, str)


def _collective(group: str) -> str:
    """Of a group `system, collective`."""
    return group.rpartition(", ")[2]


def _accelerator(group: str) -> str:
    """Of a group `accelerator, layout`."""
    return group.partition(", ")[0]


def _steps_section(found: Accuracy) -> Json:
    """Training steps."""
    steps, summary = found.steps, found.summary
    points = [_step_point(one) for one in steps if one.error is not None]
    groups: Sequence[tuple[str, Mapping[str, Errors]]] = (
        ("source", {**summary.by_source, "all": summary.errors}),
        ("framework", summary.by_framework),
        ("accelerator", summary.by_accelerator),
    )
    blocks = [
        *([points_figure(points, STEPS, title=_FIGURE)] if points else []),
        *(errors_table(found, what=what, title=f"Errors by {what}") for what, found in groups if points),
        *([families_table(summary.families)] if summary.families else []),
        *([steps_table(steps)] if summary.predicted else []),
        *([refused_steps_table(summary.not_predicted)] if summary.not_predicted else []),
    ]
    lead = [
        f"{summary.predicted:,} of {summary.rows:,} rows are predicted, from their model, layout, software and "
        "accelerator. Error: predicted / measured − 1."
    ]
    return section("s1", "Training steps", lead=lead, cards=_step_cards(found), blocks=blocks)


def _step_cards(found: Accuracy) -> list[Json]:
    summary = found.summary
    return [
        *_error_cards(summary.errors),
        card("80% interval coverage", percent(summary.coverage, decimals=0), note="of the measured times"),
        card("Spearman", NOTHING if summary.spearman is None else f"{summary.spearman:.3f}", note="mean over families"),
        card("regret", percent(summary.regret), note="mean over families"),
        card("best in top 5", percent(summary.best_in_top_5, decimals=0), note="of the families"),
        *(
            card(f"mean |error|, held-out {kind}", percent(one.errors.mape), note=f"leave-one-{kind}-out")
            for kind, one in found.without.items()
        ),
    ]


def _error_cards(errors: Errors) -> list[Json]:
    return [
        card("mean |error|", percent(errors.mape), note=f"of {errors.rows:,} rows"),
        card("median |error|", percent(errors.median), note=f"90% within {percent(errors.p90)}"),
    ]


def _step_point(one: PredictedRow) -> ScatterPoint:
    """A step with what pointing at it says."""
    row, configuration = one.row, one.configuration
    assert configuration is not None, row.id
    assert one.predicted_s is not None, row.id
    assert row.step_s, row.id
    words = [
        row.id,
        f"{row.framework}, {row.model} on {row.gpus:,} {row.gpu}",
        f"{one.layout}, micro-batch {configuration.micro_batch}, recompute {configuration.recompute}",
        _both(row.step_s, one.predicted_s, STEPS),
    ]
    if one.low_s is not None and one.high_s is not None:
        words.append(f"80% interval: {STEPS.show(one.low_s)} to {STEPS.show(one.high_s)}")
    return ScatterPoint(row.dataset, row.step_s, one.predicted_s, _said(words))


def _both(measured: float, predicted: float, unit: DisplayUnit) -> str:
    error = predicted / measured - 1.0
    return f"measured {unit.show(measured)}, predicted {unit.show(predicted)} ({error:+.1%})"


def _said(lines: Sequence[str]) -> str:
    """Lines of what is said of a point: words of a file are no markup."""
    return "<br>".join(escape(line, quote=False) for line in lines)


def _kind_section(kind: _Kind, identity: str) -> Json:
    """Rows of another kind; shares among them have a figure and a table of their own."""
    parts = [part for part in _parts(kind) if part.rows]
    errors = errors_by_group(kind.judged)
    note = f"Errors are of {kind.counted}."
    refused = reasons_table(kind.judged)
    blocks = [
        *(figure for part in parts for figure in _figures(part, kind)),
        *([errors_table(errors, what="group", title="Errors by group", note=note)] if errors["all"].rows else []),
        *(
            judged_table(part.rows, part.unit, identity=f"{identity}-rows-{number}", title=part.table)
            for number, part in enumerate(parts, start=1)
        ),
        *([refused] if refused else []),
    ]
    predicted = sum(one.predicted is not None for one in kind.judged)
    lead = [f"{predicted:,} of {len(kind.judged):,} rows are predicted. Errors are of {kind.counted}."]
    return section(identity, kind.title, lead=lead, cards=_error_cards(errors["all"]), blocks=blocks)


@dataclass(frozen=True)
class _Part:
    """Predicted rows in one unit, and what their figure and table are called."""

    rows: Sequence[Evaluation]
    unit: DisplayUnit
    figure: str
    table: str


def _parts(kind: _Kind) -> Iterator[_Part]:
    predicted = [one for one in kind.judged if one.predicted is not None]
    shares = [one for one in predicted if kind.unit is MEMORY and one.group == RELATIVE]
    yield _Part([one for one in predicted if one not in shares], kind.unit, _FIGURE, _EACH)
    yield _Part(shares, SHARES, "Shares, predicted vs. measured", "Each share")


def _figures(part: _Part, kind: _Kind) -> Iterator[Json]:
    """The figure of rows that were measured too, if there are any."""
    points = [
        ScatterPoint(
            kind.series(one.group),
            one.measured,
            one.predicted,
            _said([f"{one.id}: {one.group}", _both(one.measured, one.predicted, part.unit)]),
        )
        for one in part.rows
        if one.measured and one.predicted
    ]
    if points:
        yield points_figure(points, part.unit, title=part.figure)


def points_figure(points: Sequence[ScatterPoint], unit: DisplayUnit, *, title: str) -> Json:
    """All points, the largest series first so that small ones lie on top, and lines for no error and ±25%."""
    drawn = _apart(points) if len(points) > MOST_POINTS else points
    series = _by_series(drawn)
    traces = [_points_trace(name, found, number) for number, (name, found) in enumerate(series.items())]
    errors: dict[int, Json] = {
        number: {"y": [[one.error / PERCENT for one in found]]} for number, found in enumerate(series.values())
    }
    ends = _axis_ends(drawn)
    for share in (0.0, NEAR, -NEAR):
        errors[len(traces)] = {"y": [[share / PERCENT] * 2]}
        traces.append(_error_line(ends, share))
    times = {number: {"y": [trace["y"]]} for number, trace in enumerate(traces)}
    axis = _log_axis(ends, unit)
    layout = {
        "xaxis": {"title": {"text": "measured"}, **axis},
        "yaxis": {"title": {"text": "predicted"}, **axis},
        "hovermode": "closest",
    }
    linear = {"yaxis.title.text": "error, %", "yaxis.type": "linear", "yaxis.tickvals": None, "yaxis.ticktext": None}
    choices = [Choice("predicted", times), Choice("error", errors, linear)]
    note = f"Solid line: measured as predicted; dashed: an error of ±{NEAR:.0%}."
    if len(drawn) < len(points):
        note += f" Of rows that lie on each other the worst is drawn: {len(drawn):,} of {len(points):,}."
    return figure(title, traces, layout=layout, height=540, note=note, choices=choices)


def _apart(points: Sequence[ScatterPoint]) -> list[ScatterPoint]:
    """The worst of each series in each cell of a fine grid, in the order of `points`."""
    worst: dict[tuple[str, int, int], ScatterPoint] = {}
    for one in points:
        cell = one.series, _grid_cell(one.measured), _grid_cell(one.predicted)
        if cell not in worst or abs(one.error) > abs(worst[cell].error):
            worst[cell] = one
    return list(worst.values())


def _grid_cell(value: float) -> int:
    return round(_CELLS_PER_DECADE * math.log10(value))


def _by_series(points: Sequence[ScatterPoint]) -> Mapping[str, list[ScatterPoint]]:
    """Points by series, the largest first."""
    found: dict[str, list[ScatterPoint]] = {}
    for one in points:
        found.setdefault(one.series, []).append(one)
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))


def _axis_ends(points: Sequence[ScatterPoint]) -> tuple[float, float]:
    """The range of all values, with room on both sides."""
    values = [value for one in points for value in (one.measured, one.predicted)]
    return 0.8 * min(values), 1.25 * max(values)


def _log_axis(ends: tuple[float, float], unit: DisplayUnit) -> Json:
    ticks = round_ticks(*ends, unit=unit.per)
    return {"type": "log", "tickvals": ticks, "ticktext": [unit.show(tick) for tick in ticks]}


def _points_trace(name: str, points: Sequence[ScatterPoint], number: int) -> Json:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [one.measured for one in points],
        "y": [one.predicted for one in points],
        "text": [one.words for one in points],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {
            "size": 6,
            "opacity": 0.7,
            "color": series_color(number),
            "symbol": _SYMBOLS[number // len(SERIES) % len(_SYMBOLS)],
        },
    }


def _error_line(ends: tuple[float, float], error: float) -> Json:
    """Where predictions have this error."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"error of ±{NEAR:.0%}" if error else "measured as predicted",
        "showlegend": error >= 0,
        "x": list(ends),
        "y": [(1.0 + error) * end for end in ends],
        "hoverinfo": "skip",
        "line": {"color": MUTED, "width": 1, "dash": "dash" if error else "solid"},
    }


_ERROR = percent_column("error", "error, %", "Predicted / measured − 1.")
_SIZE = percent_column("size", "|error|, %", "Size of the error.")
_ERRORS = (
    Column("rows", "rows", "Rows that have both values.", decimals=0),
    percent_column("mape", "mean |error|, %", "Mean size of the error."),
    percent_column("median", "median |error|, %", "Half of the rows have a smaller one."),
    percent_column("p90", "90% of |error|, %", "Nine of ten rows have a smaller one."),
    percent_column("bias", "bias, %", "Mean error with its sign."),
)
_FAMILIES = (
    Column("family", "family", "Layouts of one model on as many GPUs, of one source.", text=True, width_ch=40),
    Column("rows", "rows", "Rows that have both times.", decimals=0),
    percent_column("regret", "regret, %", "Time of the predicted best over that of the measured best, less 1."),
    Column("spearman", "Spearman", "Rank correlation: 1 is the same order.", decimals=3),
    Column("kendall", "Kendall", "Rank correlation by pairs, tau-b.", decimals=3),
    Column("best_rank", "rank of mea\u00adsured best", "Among the predictions, from 1.", decimals=0),
)
_STEPS = (
    Column("id", "row", "Its name in the file.", text=True, width_ch=24),
    Column("measured", "mea\u00adsured, s", "Step.", decimals=3),
    Column("predicted", "pre\u00addicted, s", "Step.", decimals=3),
    _ERROR,
    _SIZE,
    Column("low", "80% from, s", "Lower end of the 80% interval of the prediction.", decimals=3),
    Column("high", "to, s", "Upper end of it.", decimals=3),
    Column("held", "within", "Whether the measured time is within the interval.", text=True, width_ch=7),
    Column("source", "source", "Data set.", text=True, width_ch=20),
    Column("framework", "framework", "What trained.", text=True, width_ch=30),
    Column("gpu", "accel\u00aderator", "As the source names it.", text=True, width_ch=12),
    Column("gpus", "GPUs", "How many there were.", decimals=0),
    Column("model", "model", "As the source names it.", text=True, width_ch=16),
    Column("layout", "layout", "As predicted: where the row leaves it open, the fastest.", text=True, width_ch=44),
    Column("micro_batch", "micro-batch", "Sequences.", decimals=0),
    Column("recompute", "re\u00adcompute", "Activation recomputation.", text=True, width_ch=10),
    Column("memory", "memory, GiB", "Predicted peak of one GPU.", per=GIB, decimals=1),
)
_STEPS_REFUSED = (
    *(column for column in _STEPS if column.key in {"id", "source", "framework", "gpu", "model"}),
    Column("why_not", "why not", "Why there is no prediction.", text=True, width_ch=60),
)
_REASONS = (
    Column("rows", "rows", "How many.", decimals=0),
    Column("why_not", "why not", "Why there is no prediction.", text=True, width_ch=90),
)


def errors_table(groups: Mapping[str, Errors], *, what: str, title: str, note: str = "") -> Json:
    """Errors by group, the worst mean first; `all`, if it is there, last."""
    named = Column("name", what, "What errors are counted by.", text=True, width_ch=44)
    ordered = sorted(groups.items(), key=lambda item: (item[0] == "all", -item[1].mape))
    rows: list[Mapping[str, Cell]] = [{"name": name, **asdict(one)} for name, one in ordered if one.rows]
    return table("", title, (named, *_ERRORS), rows, note=note, tall=len(rows) > _FEW)


def families_table(families: Sequence[FamilyQuality]) -> Json:
    """How well layouts are ranked, by family; the highest regret first, then the lowest correlation."""
    rows: list[Mapping[str, Cell]] = [
        {**asdict(one), "spearman": _known(one.spearman), "kendall": _known(one.kendall)}
        for one in sorted(families, key=lambda one: (-one.regret, _known(one.spearman) or 0.0))
    ]
    note = "Families of 5 rows or more, the highest regret first."
    return table("s1-families", "Ranking of layouts", _FAMILIES, rows, note=note, tall=True)


def steps_table(steps: Sequence[PredictedRow]) -> Json:
    """Every predicted step, the worst first; those that were not measured last."""
    known = sorted((one for one in steps if one.predicted_s is not None), key=lambda one: -abs(one.error or 0.0))
    rows = [_step_row(one) for one in known]
    filters = [
        Filter(key, label, sorted({str(row[key]) for row in rows if row[key]}))
        for key, label in (("source", "source"), ("framework", "framework"), ("gpu", "accelerator"), ("held", "within"))
    ]
    return _rows_table("s1-rows", _STEPS, rows, filters, title=_EACH)


def _step_row(one: PredictedRow) -> Mapping[str, Cell]:
    row, configuration = one.row, one.configuration
    assert configuration is not None, row.id
    assert one.predicted_s is not None, row.id
    return {
        **_row_cells(row),
        "gpus": row.gpus,
        "layout": one.layout,
        "micro_batch": configuration.micro_batch,
        "recompute": configuration.recompute,
        "measured": row.step_s,
        "predicted": one.predicted_s,
        **_error_cells(one.error),
        "low": one.low_s,
        "high": one.high_s,
        "held": _within(one),
        "memory": one.memory_bytes,
    }


def _row_cells(row: StepRow) -> dict[str, Cell]:
    """What a row is of."""
    return {"id": row.id, "source": row.dataset, **fields_of(row, ("framework", "gpu", "model"))}


def _within(one: PredictedRow) -> str | None:
    """Whether the interval holds the measured time; None where either is missing."""
    if one.low_s is None or one.high_s is None or not one.row.step_s:
        return None
    return "yes" if one.low_s <= one.row.step_s <= one.high_s else "no"


def judged_table(judged: Sequence[Evaluation], unit: DisplayUnit, *, identity: str, title: str) -> Json:
    """Rows of another kind, the worst first."""
    columns = (
        Column("id", "row", "Its name in the file, or its line.", text=True, width_ch=16),
        Column("group", "group", "What its error is counted under.", text=True, width_ch=44),
        Column("measured", f"mea\u00adsured, {unit.name}", "", per=unit.per, decimals=unit.decimals),
        Column("predicted", f"pre\u00addicted, {unit.name}", "", per=unit.per, decimals=unit.decimals),
        _ERROR,
        _SIZE,
        Column("counted", "counted", "Whether the errors by group include it: small ones are excluded.", text=True),
    )
    rows: list[Mapping[str, Cell]] = [
        {
            "id": one.id,
            "group": one.group,
            "measured": one.measured,
            "predicted": one.predicted,
            **_error_cells(one.error),
            "counted": "yes" if one.large and one.error is not None else "no",
        }
        for one in sorted(judged, key=lambda one: -abs(one.error or 0.0))
    ]
    filters = [Filter(key, key, sorted({str(row[key]) for row in rows})) for key in ("group", "counted")]
    return _rows_table(identity, columns, rows, filters, title=title)


def _rows_table(
    identity: str,
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, Cell]],
    filters: Sequence[Filter],
    *,
    title: str,
) -> Json:
    note = "The worst first. Click a heading to sort."
    if len(rows) > MOST_ROWS:
        note += f" The first {MOST_ROWS:,} of {len(rows):,}."
    return table(identity, title, columns, rows[:MOST_ROWS], note=note, filters=filters, tall=True)


def refused_steps_table(steps: Sequence[PredictedRow]) -> Json:
    """Steps without a prediction, each with the reason."""
    rows = [{**_row_cells(one.row), "why_not": one.why_not} for one in steps[:MOST_ROWS]]
    note = f"The first {MOST_ROWS:,} of {len(steps):,}." if len(steps) > MOST_ROWS else ""
    return table("", "Rows without a prediction", _STEPS_REFUSED, rows, note=note, tall=len(rows) > _FEW)


def reasons_table(judged: Iterable[Evaluation]) -> Json | None:
    """Why rows have no prediction, and how many; None if all have one."""
    counts = Counter(one.why_not for one in judged if one.why_not)
    rows: list[Mapping[str, Cell]] = [{"rows": count, "why_not": why} for why, count in counts.most_common()]
    return table("", "Rows without a prediction", _REASONS, rows, tall=len(rows) > _FEW) if rows else None


def _error_cells(error: float | None) -> dict[str, Cell]:
    return {"error": error, "size": None if error is None else abs(error)}


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
