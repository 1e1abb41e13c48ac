"""Predicted vs. published measurements: steps, collectives, GEMMs, memory; as text, JSON and sections of a page.

A section has a figure, a color for each series; errors by group; every row; and what was not predicted. JSON follows
the contract `axonn-tune/accuracy/1`.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from html import escape
from statistics import fmean

from axonn_tune import __version__
from axonn_tune.errors import UsageError
from axonn_tune.frameworks import UNKNOWN
from axonn_tune.report import page
from axonn_tune.report.output import NOTHING, PERCENT, Column, Json, count, fields_of, percent, share, text_of, words
from axonn_tune.report.ranking_section import MOST_ROWS
from axonn_tune.specs.loading import Loaded
from axonn_tune.specs.machine import Machine
from axonn_tune.units import GIB, MICRO, show_seconds
from axonn_tune.validation.published.accuracy import (
    SUMS,
    Accuracy,
    FamilyQuality,
    Files,
    LeftOut,
    PredictedRow,
    StepSummary,
)
from axonn_tune.validation.published.cases import framework_of, nearest_framework
from axonn_tune.validation.published.measurements import RELATIVE, Evaluation, errors_by_group
from axonn_tune.validation.published.rows import SHIPPED, known_errata
from axonn_tune.validation.quality import Errors

ACCURACY_SCHEMA = "axonn-tune/accuracy/1"
NEAR = 0.25
"""Size of the error at the dashed lines."""
MOST_POINTS = 3000
"""Above this number of points, overlapping ones are drawn once: browsers are slow with ten thousand."""
_CELLS_PER_DECADE = 40
_SYMBOLS = ("circle", "diamond", "square", "triangle-up")
_FEW = 40
"""With more rows a table scrolls in its own window."""
_FIGURE, _EACH = "Predicted vs. measured", "Each row"
_GROUPINGS = ("source", "framework", "accelerator")

_ERROR = share("error", "error", "Predicted / measured − 1.", signed=True)
_SIZE = share("size", "|error|", "Size of the error.")
_WHY_NOT = words("why_not", "why not", "Why there is no prediction.", 60)
_ERRORS = (
    count("rows", "rows", "Rows that have both values."),
    share("mape", "mean |error|", "Mean size of the error.", title="mean"),
    share("median", "median |error|", "Half of the rows have a smaller one.", title="median"),
    share("p90", "90% of |error|", "Nine of ten rows have a smaller one.", title="90%"),
    share("bias", "bias", "Mean error with its sign.", signed=True),
)
_RANKED = (
    words("name", "families of\n5+ rows"),
    count("families", "families"),
    Column("spearman", "mean\nSpearman", decimals=3),
    share("regret", "mean\nregret"),
    share("best_in_top_5", "best in\ntop 5", decimals=0),
    share("coverage", "80% interval\ncoverage", decimals=0),
    share("width", "mean\nwidth", decimals=0),
)
_FAMILIES = (
    words("family", "family", "Layouts of one model and GPU count, of one source.", 40),
    count("rows", "rows", "Rows that have both times."),
    share("regret", "regret", "Time of the predicted best over that of the measured best, minus 1."),
    Column("spearman", "Spearman", "Rank correlation: 1 is the same order.", decimals=3),
    Column("kendall", "Kendall", "Rank correlation by pairs, tau-b.", decimals=3),
    count("best_rank", "rank of measured best", "Among the predictions, from 1."),
)
_STEP_COLUMNS = (
    words("id", "row", "Its name in the file.", 24),
    Column("measured", "measured, s", "Step.", decimals=3),
    Column("predicted", "predicted, s", "Step.", decimals=3),
    _ERROR,
    _SIZE,
    Column("low", "80% from, s", "Lower end of the 80% interval of the prediction.", decimals=3),
    Column("high", "to, s", "Upper end of it.", decimals=3),
    words("held", "within", "Whether the measured time is within the interval.", 7),
    words("source", "source", "Data set.", 20),
    words("framework", "framework", "What trained.", 30),
    words("gpu", "accel\u00aderator", "As the source names it.", 12),
    count("gpus", "GPUs", "Number of GPUs."),
    words("model", "model", "As the source names it.", 16),
    words("layout", "layout", "Priced micro-batch and recompute: the fastest where the row does not state them.", 44),
    count("micro_batch", "micro-batch", "Sequences."),
    words("recompute", "re\u00adcompute", "Activation recomputation.", 10),
    Column("memory", "memory, GiB", "Predicted peak of one GPU.", per=GIB, decimals=1),
)
_STEPS = {column.key: column for column in _STEP_COLUMNS}
_IN_TEXTS = (
    _STEPS["framework"],
    words("priced_as", "priced as"),
    *(_STEPS[key] for key in ("model", "layout", "measured", "predicted")),
    Column("interval", "80% interval", show=str),
    _ERROR,
)
_OPEN = (
    words("id", "layout in part not stated"),
    _STEPS["model"],
    Column("open", "open", show=str),
    count("choices", "layouts\nthat fit"),
    _STEPS["measured"],
    Column("least", "least, s", decimals=3),
    Column("most", "most, s", decimals=3),
)
"""Rows that leave part of their layout open, with the range over the layouts that fit."""
_REASONS = (count("rows", "rows", "How many."), replace(_WHY_NOT, width_ch=90))


@dataclass(frozen=True)
class DisplayUnit:
    """Display unit of values: `name`, its size in SI units, and decimals; `show` formats a value."""

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
    """A row with both values, positive; `words`: its tooltip."""

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
    """Rows that are not steps. key: in JSON; large: rows that count in errors; series: group part with its color."""

    key: str
    name: str
    evaluations: tuple[Evaluation, ...]
    large: str
    unit: DisplayUnit
    series: Callable[[str], str]


def _kinds(found: Accuracy) -> list[_Kind]:
    """Kinds with rows; groups are `system, collective` and `accelerator, layout`."""
    kinds = (
        _Kind(
            "collectives",
            "collectives",
            found.collectives,
            " of 1 MiB or more",
            TIMES,
            lambda group: group.rpartition(", ")[2],
        ),
        _Kind("gemm", "GEMMs", found.gemms, " of 10 GFLOP or more", TIMES, lambda group: group.partition(", ")[0]),
        _Kind("memory", "memory", found.memory, "", MEMORY, str),
    )
    return [kind for kind in kinds if kind.evaluations]


_STEP = ("id", "predicted_s", "low_s", "high_s", "why_not", "measured_s", "error", "memory_bytes")
_OF_KIND = ("id", "predicted", "measured", "why_not")


def accuracy_document(found: Accuracy) -> Json:
    """Everything, as JSON: `rows` are the steps; each other kind has a summary and rows of its own."""
    without = {f"without_{kind}": _step_summary(summary) for kind, summary in found.without.items()}
    if found.apart is not None:
        without["without_source_and_sums"] = _step_summary(found.apart)
    return {
        "schema": ACCURACY_SCHEMA,
        "machine": None if found.machine is None else found.machine.document.name,
        "summary": {**_step_summary(found.summary), **without},
        "rows": [
            {
                **fields_of(one, _STEP, id=one.row.id, why_not=one.why_not or None, measured_s=one.row.step_s),
                **{
                    f"{key}_s" if key != "choices" else key: _open_cells(one)[key]
                    for key in ("choices", "least", "most")
                },
                "outside_evidence": list(one.outside),
                "warnings": [*one.warnings, *_unknown_software(one)],
            }
            for one in found.steps
        ],
        **{
            kind.key: {
                "summary": {name: asdict(errors) for name, errors in errors_by_group(kind.evaluations).items()},
                "rows": [fields_of(one, _OF_KIND, why_not=one.why_not or None) for one in kind.evaluations],
            }
            for kind in _kinds(found)
        },
    }


def _step_summary(summary: StepSummary) -> Json:
    groups = {f"by_{what}": getattr(summary, f"by_{what}") for what in _GROUPINGS}
    return {
        **asdict(summary.errors),
        **fields_of(summary, ("rows", "predicted", "spearman", "regret", "best_in_top_5", "coverage", "width")),
        "open": len(summary.open),
        **fields_of(summary, ("not_fitting", "intervals")),
        **{by: {name: asdict(errors) for name, errors in group.items()} for by, group in groups.items()},
        "families": [asdict(family) for family in summary.families],
    }


def accuracy_text(found: Accuracy) -> str:
    """Everything as text."""
    parts = [] if found.machine is None else [f"steps priced on {_profile(found.machine)}\n"]
    parts += [steps_text(found.summary, found.without, headline(found))] if found.steps else []
    for kind in _kinds(found):
        parts.append(_errors_text(f"{kind.name}{kind.large}", errors_by_group(kind.evaluations)))
        counts = _reasons(kind.evaluations)
        parts.append("".join(f"not predicted: {one['rows']:,} rows: {one['why_not']}\n" for one in counts))
    return "\n".join(part for part in parts if part)


def _profile(machine: Loaded[Machine]) -> str:
    return f"{machine.document.name}, {machine.path}"


def _unknown_software(one: PredictedRow) -> list[str]:
    """Warning that a row's software is unknown, with the nearest known one; empty otherwise."""
    name = one.row.framework
    if framework_of(one.row).name != UNKNOWN:
        return []
    return [f"unknown framework, priced as the mean of all known ones: {name or 'no name'}{nearest_framework(name)}"]


def _reasons(evaluations: Sequence[Evaluation]) -> list[Json]:
    """Reasons of rows without a prediction, with counts."""
    counts = Counter(one.why_not for one in evaluations if one.why_not)
    return [{"rows": number, "why_not": why} for why, number in counts.most_common()]


_INTERVALS = "80% intervals: those that search, explain and diagnose print for the same layout."


def headline(found: Accuracy) -> list[str]:
    """What others can expect, in sentences: fits without the source, over sources and without the rows of sums."""
    apart, summary = found.apart, found.summary
    if apart is None:
        return []
    sources = found.without["source"].by_source
    rows, layers = found.sums
    columns = ", ".join(
        f"{one['column']} {one['taken']} (the source: {one['source_says'] or 'not stated'})" for one in known_errata()
    )
    return [
        f"Fits without the source: mean error {fmean(one.mape for one in sources.values()):.1%} over {len(sources)} "
        f"sources; {apart.errors.mape:.1%} over {apart.errors.rows:,} rows without {SUMS}, of which printed 80% "
        f"intervals hold {apart.coverage:.0%} (mean width {apart.width:.0%} of the step).",
        f"Independent measurements: {summary.errors.rows - rows + layers:,}. The {rows:,} rows of {SUMS} are sums of "
        f"{layers} layer times, with edited inputs: {columns}.",
        f"{summary.predicted:,} of {summary.rows:,} rows are scored; {len(summary.open)} leave part of their layout "
        f"open, {summary.not_fitting} do not fit into memory.",
    ]


def steps_text(summary: StepSummary, without: Mapping[LeftOut, StepSummary], said: Sequence[str] = ()) -> str:
    """Errors by source with held-out errors, families, the worst rows first, and rows without a prediction.

    said: sentences above all tables.
    """
    parts = ["".join(f"{sentence}\n" for sentence in said)]
    if summary.errors.rows:
        held_out = {kind: _with_all(one) for kind, one in without.items()}
        parts += [_errors_text("source", _with_all(summary), held_out), _ranked_text(summary, without)]
        parts.append(_steps_text("worst rows", summary.worst))
    parts.append(text_of(_OPEN, [{**_step_row(one), **_open_cells(one)} for one in summary.open]))
    parts.append(_steps_text("rows without a time", [one for one in summary.not_measured if one.predicted_s]))
    parts.append(_INTERVALS)
    parts += sorted({words for one in summary.of_unknown_software for words in _unknown_software(one)})
    parts += [f"warning: {one.row.id}: {words}" for one in summary.warned for words in one.warnings]
    parts += [f"not predicted: {one.row.id}: {one.why_not}" for one in summary.not_predicted]
    return "\n".join(part for part in parts if part) + "\n"


def _open_cells(one: PredictedRow) -> Json:
    """Number and range of the layouts of a row that leaves part of its layout open."""
    least, most = (one.choices_s[0], one.choices_s[-1]) if one.choices_s else (None, None)
    return {"open": one.open_words, "choices": len(one.choices_s) or None, "least": least, "most": most}


def _with_all(summary: StepSummary) -> dict[str, Errors]:
    return {**summary.by_source, "all": summary.errors}


def _errors_text(
    title: str, groups: Mapping[str, Errors], held_out: Mapping[LeftOut, Mapping[str, Errors]] | None = None
) -> str:
    """Errors by group; of `held_out` mean and median too, by fits without a row's family or source."""
    others = held_out or {}
    rows = [
        {"name": name, **asdict(errors), **{kind: other.get(name) for kind, other in others.items()}}
        for name, errors in groups.items()
    ]
    measures = (("mape", "mean"), ("median", "median"))
    columns = [share(f"{kind}.{key}", f"held-out\n{kind},\n{name}") for kind in others for key, name in measures]
    return text_of([words("name", title), *_ERRORS, *columns], rows)


def _ranked_text(summary: StepSummary, without: Mapping[LeftOut, StepSummary]) -> str:
    """Ranking quality within families, and coverage of intervals."""
    if not summary.families:
        return ""
    named = {"all rows": summary, **{f"held-out {kind}": one for kind, one in without.items()}}
    figures = [column.key for column in _RANKED[1:]]
    rows = [{"name": name, **fields_of(one, figures, families=len(one.families))} for name, one in named.items()]
    return text_of(_RANKED, rows)


def _steps_text(title: str, steps: Sequence[PredictedRow]) -> str:
    """One line per row, with the priced layout and its interval; empty without rows."""
    return text_of([words("id", title), *_IN_TEXTS], list(map(_step_row, steps)))


def _step_row(one: PredictedRow) -> Json:
    """Cells of a step in tables."""
    row, configuration = one.row, one.configuration
    interval, held = None, None
    if one.low_s is not None and one.high_s is not None:
        interval = f"{one.low_s:.3f} to {one.high_s:.3f}"
        if row.step_s:
            held = "yes" if one.low_s <= row.step_s <= one.high_s else "no"
    return {
        **fields_of(row, ("id", "framework", "gpu", "gpus", "model")),
        "source": row.dataset,
        "priced_as": framework_of(row).software,
        "layout": one.layout,
        "measured": row.step_s,
        "predicted": one.predicted_s,
        **_error_cells(one.error),
        "low": one.low_s,
        "high": one.high_s,
        "interval": interval,
        "held": held,
        "micro_batch": configuration and configuration.micro_batch,
        "recompute": configuration and configuration.recompute,
        "memory": one.memory_bytes,
        "why_not": one.why_not,
    }


def _error_cells(error: float | None) -> Json:
    return {"error": error, "size": None if error is None else abs(error)}


def accuracy_sections(found: Accuracy, files: Files, *, command: str) -> list[Json]:
    """A section for each kind with rows, the last with the input files; UsageError if there are none."""
    sections = [_steps_section(found)] if found.steps else []
    for kind in _kinds(found):
        sections.append(_kind_section(kind, f"s{len(sections) + 1}"))
    read = list(_read(files))
    if found.machine is not None:
        read.append(("machine", f"{_profile(found.machine)}, SHA-256 {found.machine.sha256}"))
    if not sections:
        raise UsageError(f"nothing to report: no rows in {', '.join(words for _, words in read)}")
    sections[-1]["blocks"].append(page.origin_fold([("axonn-tune", __version__), ("command", command), *read]))
    return sections


def _read(files: Files) -> Iterator[tuple[str, str]]:
    """Which files were read, and their hashes."""
    chosen = files.or_shipped()
    for each in fields(chosen):
        path = getattr(chosen, each.name)
        if path is not None:
            where = f"{path.name}, shipped with the tool" if path.parent == SHIPPED else str(path)
            yield each.name, f"{where}, SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()}"


def _steps_section(found: Accuracy) -> Json:
    summary = found.summary
    points = [_step_point(one) for one in found.steps if one.error is not None]
    groups = {"source": _with_all(summary), "framework": summary.by_framework, "accelerator": summary.by_accelerator}
    blocks = [
        *([points_figure(points, STEPS, title=_FIGURE)] if points else []),
        *(_errors_table(found, what=what) for what, found in groups.items() if points),
        *([families_table(summary.families)] if summary.families else []),
        *([_steps_table(found.steps)] if summary.predicted else []),
        *([_refused_steps(refused)] if (refused := (*summary.open, *summary.not_predicted)) else []),
    ]
    said = [
        f"{summary.predicted:,} of {summary.rows:,} rows are predicted from their model, layout, software and "
        "accelerator",
        "error: predicted / measured − 1",
    ]
    if found.machine is not None:
        said.append(f"all on {found.machine.document.name}; {len(summary.warned):,} say that they ran elsewhere")
    said += [sentence.rstrip(".") for sentence in headline(found)]
    return page.section("s1", "Training steps", subtitle=" · ".join(said), cards=_step_cards(found), blocks=blocks)


def _step_cards(found: Accuracy) -> list[Json]:
    summary = found.summary
    order = NOTHING if summary.spearman is None else f"{summary.spearman:.3f}"
    return [
        *_error_cards(summary.errors),
        page.card("80% interval coverage", percent(summary.coverage, decimals=0), note="of the measured times"),
        page.card("Spearman", order, note="mean over families"),
        page.card("regret", percent(summary.regret), note="mean over families"),
        page.card("best in top 5", percent(summary.best_in_top_5, decimals=0), note="of the families"),
        *(
            page.card(f"mean |error|, held-out {kind}", percent(one.errors.mape), note=f"leave-one-{kind}-out")
            for kind, one in found.without.items()
        ),
    ]


def _error_cards(errors: Errors) -> list[Json]:
    return [
        page.card("mean |error|", percent(errors.mape), note=f"of {errors.rows:,} rows"),
        page.card("median |error|", percent(errors.median), note=f"90% within {percent(errors.p90)}"),
    ]


def _step_point(one: PredictedRow) -> ScatterPoint:
    row = _step_row(one)
    said = [
        row["id"],
        f"{row['framework']}, {row['model']} on {row['gpus']:,} {row['gpu']}",
        f"{row['layout']}, micro-batch {row['micro_batch']}, recompute {row['recompute']}",
        _both(row["measured"], row["predicted"], STEPS),
    ]
    if row["interval"]:
        said.append(f"80% interval: {STEPS.show(row['low'])} to {STEPS.show(row['high'])}")
    return ScatterPoint(row["source"], row["measured"], row["predicted"], _said(said))


def _both(measured: float, predicted: float, unit: DisplayUnit) -> str:
    error = predicted / measured - 1.0
    return f"measured {unit.show(measured)}, predicted {unit.show(predicted)} ({error:+.1%})"


def _said(lines: Sequence[str]) -> str:
    """Lines of a tooltip, with text of files escaped."""
    return "<br>".join(escape(line, quote=False) for line in lines)


def _kind_section(kind: _Kind, identity: str) -> Json:
    """Rows of another kind; rows that are shares have a separate figure and table."""
    predicted = [one for one in kind.evaluations if one.predicted is not None]
    shares = [one for one in predicted if kind.unit is MEMORY and one.group == RELATIVE]
    parts = [
        (_FIGURE, _EACH, [one for one in predicted if one not in shares], kind.unit),
        ("Shares, predicted vs. measured", "Each share", shares, SHARES),
    ]
    shown = [part for part in parts if part[2]]
    errors, reasons = errors_by_group(kind.evaluations), _reasons(kind.evaluations)
    note = f"Errors are of {f'rows{kind.large}' if kind.large else 'all rows'}."
    blocks = [
        *(made for title, _, rows, unit in shown for made in _kind_figure(kind, rows, unit, title=title)),
        *([_errors_table(errors, what="group", note=note)] if errors["all"].rows else []),
        *(
            _kind_table(rows, unit, identity=f"{identity}-rows-{number}", title=title)
            for number, (_, title, rows, unit) in enumerate(shown, start=1)
        ),
        *([page.table("", _REFUSED, _REASONS, reasons, tall=len(reasons) > _FEW)] if reasons else []),
    ]
    said = f"{len(predicted):,} of {len(kind.evaluations):,} rows are predicted. {note}"
    title = kind.name[0].upper() + kind.name[1:]
    return page.section(identity, title, subtitle=said, cards=_error_cards(errors["all"]), blocks=blocks)


def _kind_figure(kind: _Kind, rows: Sequence[Evaluation], unit: DisplayUnit, *, title: str) -> Iterator[Json]:
    """The figure of rows that were measured too, if there are any."""
    points = [
        ScatterPoint(
            kind.series(one.group),
            one.measured,
            one.predicted,
            _said([f"{one.id}: {one.group}", _both(one.measured, one.predicted, unit)]),
        )
        for one in rows
        if one.measured and one.predicted
    ]
    if points:
        yield points_figure(points, unit, title=title)


def points_figure(points: Sequence[ScatterPoint], unit: DisplayUnit, *, title: str) -> Json:
    """All points, the largest series first so that small ones lie on top, and lines for no error and ±25%."""
    drawn = _apart(points) if len(points) > MOST_POINTS else points
    series = _by_series(drawn)
    traces = [_points_trace(name, found, number) for number, (name, found) in enumerate(series.items())]
    errors: dict[int, Json] = {
        number: {"y": [[one.error / PERCENT for one in found]]} for number, found in enumerate(series.values())
    }
    values = [value for one in drawn for value in (one.measured, one.predicted)]
    # With room on both sides.
    ends = (0.8 * min(values), 1.25 * max(values))
    for share_off in (0.0, NEAR, -NEAR):
        errors[len(traces)] = {"y": [[share_off / PERCENT] * 2]}
        traces.append(_error_line(ends, share_off))
    times = {number: {"y": [trace["y"]]} for number, trace in enumerate(traces)}
    ticks = page.round_ticks(*ends, unit=unit.per)
    axis = {"type": "log", "tickvals": ticks, "ticktext": [unit.show(tick) for tick in ticks]}
    layout = {
        "xaxis": {"title": {"text": "measured"}, **axis},
        "yaxis": {"title": {"text": "predicted"}, **axis},
    }
    linear = {"yaxis.title.text": "error, %", "yaxis.type": "linear", "yaxis.tickvals": None, "yaxis.ticktext": None}
    choices = [page.choice("predicted", times), page.choice("error", errors, linear)]
    note = f"Solid line: predicted = measured; dashed: an error of ±{NEAR:.0%}."
    if len(drawn) < len(points):
        note += f" Of overlapping rows the worst is drawn: {len(drawn):,} of {len(points):,}."
    return page.figure(title, traces, layout=layout, height=540, note=note, choices=choices)


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


def _points_trace(name: str, points: Sequence[ScatterPoint], number: int) -> Json:
    symbol = _SYMBOLS[number // len(page.SERIES) % len(_SYMBOLS)]
    return page.point_trace(
        name,
        [one.measured for one in points],
        [one.predicted for one in points],
        text=[one.words for one in points],
        marker={"size": 6, "opacity": 0.7, "color": page.series_color(number), "symbol": symbol},
    )


def _error_line(ends: tuple[float, float], error: float) -> Json:
    """Where predictions have this error."""
    name = f"error of ±{NEAR:.0%}" if error else "measured as predicted"
    ys = [(1.0 + error) * end for end in ends]
    return page.line_trace(name, list(ends), ys, dash="dash" if error else "solid", showlegend=error >= 0)


_REFUSED = "Rows without a prediction"


def _errors_table(groups: Mapping[str, Errors], *, what: str, note: str = "") -> Json:
    """Errors by group, the worst mean first; `all`, if it is there, last."""
    named = words("name", what, "What errors are counted by.", 44)
    ordered = sorted(groups.items(), key=lambda item: (item[0] == "all", -item[1].mape))
    rows = [{"name": name, **asdict(one)} for name, one in ordered if one.rows]
    return page.table("", f"Errors by {what}", (named, *_ERRORS), rows, note=note, tall=len(rows) > _FEW)


def families_table(families: Sequence[FamilyQuality]) -> Json:
    """Ranking quality by family; the highest regret first, then the lowest correlation."""
    rows = sorted(families, key=lambda one: (-one.regret, 0.0 if math.isnan(one.spearman) else one.spearman))
    note = "Families of 5 rows or more, the highest regret first."
    return page.table("s1-families", "Ranking of layouts", _FAMILIES, rows, note=note, tall=True)


def _steps_table(steps: Sequence[PredictedRow]) -> Json:
    """Every predicted step, the worst first; steps without a measurement last."""
    rows = [_step_row(one) for one in steps if one.predicted_s is not None]
    filters = {"source": "source", "framework": "framework", "gpu": "accelerator", "held": "within"}
    return _rows_table("s1-rows", _STEP_COLUMNS, rows, filters, title=_EACH)


def _kind_table(evaluations: Sequence[Evaluation], unit: DisplayUnit, *, identity: str, title: str) -> Json:
    columns = (
        words("id", "row", "Its name in the file, or its line.", 16),
        words("group", "group", "Error group of the row.", 44),
        Column("measured", f"measured, {unit.name}", per=unit.per, decimals=unit.decimals),
        Column("predicted", f"predicted, {unit.name}", per=unit.per, decimals=unit.decimals),
        _ERROR,
        _SIZE,
        words("counted", "counted", "Whether the errors by group include it: small ones are excluded."),
    )
    rows = [
        {
            **fields_of(one, ("id", "group", "measured", "predicted")),
            **_error_cells(one.error),
            "counted": "yes" if one.large and one.error is not None else "no",
        }
        for one in evaluations
    ]
    return _rows_table(identity, columns, rows, {"group": "group", "counted": "counted"}, title=title)


def _rows_table(
    identity: str, columns: Sequence[Column], rows: Sequence[Json], filters: Mapping[str, str], *, title: str
) -> Json:
    """The worst first, up to the page's limit."""
    note = f"The worst first. {page.SORTS}"
    if len(rows) > MOST_ROWS:
        note += f" The first {MOST_ROWS:,} of {len(rows):,}."
    ordered = sorted(rows, key=lambda row: -(row["size"] or 0.0))
    return page.table(identity, title, columns, ordered[:MOST_ROWS], note=note, filters=filters, tall=True)


def _refused_steps(steps: Sequence[PredictedRow]) -> Json:
    """Steps without a prediction, each with the reason."""
    columns = [*(_STEPS[key] for key in ("id", "source", "framework", "gpu", "model")), _WHY_NOT]
    note = f"The first {MOST_ROWS:,} of {len(steps):,}." if len(steps) > MOST_ROWS else ""
    rows = list(map(_step_row, steps[:MOST_ROWS]))
    return page.table("", _REFUSED, columns, rows, note=note, tall=len(rows) > _FEW)
