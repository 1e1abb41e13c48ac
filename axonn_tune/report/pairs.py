"""Predicted vs. measured, as every command shows it: columns of a table, columns of its summary, one figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from statistics import median

from axonn_tune.report.output import Column, Json, count, fields_of, share, text_of, words
from axonn_tune.specs.launch import CollectiveTerm
from axonn_tune.specs.results import Pairs
from axonn_tune.units import GIB, MILLI, show_bytes, show_seconds
from axonn_tune.validation.quality import Quality

MOST_POINTS = 3000
"""Above this number of points, overlapping ones are drawn once: browsers are slow with ten thousand."""
_CELLS_PER_DECADE = 40


@dataclass(frozen=True)
class Unit:
    """Unit in which values are shown: `name`, its size in SI units, and decimals; `show` formats a value."""

    name: str
    per: float
    decimals: int | None
    show: Callable[[float], str]


SECONDS = Unit("s", 1.0, 3, show_seconds)
MILLISECONDS = Unit("ms", MILLI, None, show_seconds)
MEMORY = Unit("GiB", GIB, None, show_bytes)

ERROR = share("error", "error", "Predicted / measured − 1.", signed=True)


def pair_columns(key: str, label: str, unit: Unit, *, meaning: str = "") -> tuple[Column, Column, Column]:
    """Both sides of a quantity, and the error; key: of its pairs in a row."""
    column = partial(Column, per=unit.per, decimals=unit.decimals)
    return (
        column(f"{key}.predicted", f"{label}, predicted, {unit.name}", f"{meaning}, predicted."),
        column(f"{key}.measured", f"measured, {unit.name}", f"{meaning}, median of the runs."),
        share(f"{key}.error", "error", ERROR.meaning, signed=True),
    )


QUALITY = {
    column.key: column
    for column in (
        count("rows", "rows", "Rows that have both values."),
        share("mape", "mean |error|", "Mean size of the error.", title="mean\n|error|"),
        share("median", "median |error|", "Half of the rows have a smaller one.", title="median"),
        share("p90", "90% of |error|", "Nine of ten rows have a smaller one.", title="90%"),
        share("bias", "bias", "Mean error with its sign.", signed=True),
        share("worst", "worst error", "The largest.", signed=True, title="worst"),
        Column("spearman", "Spearman", "Rank correlation: 1 is the same order.", decimals=3),
        Column("kendall", "Kendall", "Rank correlation by pairs, tau-b.", decimals=3),
        share("regret", "regret", "Measured value of the predicted best over that of the best, minus 1."),
        count("best", "measured rank of predicted best", "From 1.", title="predicted\nbest is"),
        count("best_rank", "predicted rank of measured best", "From 1."),
        share(
            "coverage", "80% interval coverage", "Of the measured values.", decimals=0, title="80% interval\ncoverage"
        ),
        share("width", "mean width", "Of the intervals, over the prediction.", decimals=0, title="mean\nwidth"),
    )
}
"""The summary of pairs; each table has some of them."""
ERRORS = ("rows", "mape", "median", "p90", "bias")
RANKING = ("spearman", "regret", "best")
_IN_GROUPS = (*ERRORS, "worst", "coverage", "width")
_IN_FAMILIES = ("rows", "spearman", "kendall", "regret", "best", "best_rank")


def quality_columns(what: str, names: Iterable[str]) -> list[Column]:
    """A column of names, and these of the summary."""
    return [words("name", what, "", 44), *(QUALITY[name] for name in names)]


def quality_rows(groups: Mapping[str, Quality]) -> list[Json]:
    """Rows of a summary by group; a best without rows is none."""
    return [{"name": name, **asdict(one), "best": one.best or None} for name, one in groups.items()]


def quality_text(what: str, groups: Mapping[str, Quality], names: Iterable[str]) -> str:
    """The table of a summary."""
    return text_of(quality_columns(what, names), quality_rows(groups))


def group_json(groups: Mapping[str, Quality], *, families: bool = False) -> Json:
    """A summary by group: errors and intervals; of families, whose rows are ranked among each other, the ranking."""
    names = _IN_FAMILIES if families else _IN_GROUPS
    return {name: fields_of(one, names) for name, one in groups.items()}


TERM_TIMES = {
    "predicted_s": Column("predicted_s", "predicted, ms", "Time of all calls of a step.", per=MILLI),
    "measured_s": Column("measured_s", "measured, ms", "The same, measured; of several runs the median.", per=MILLI),
    "predicted_exposed_s": Column(
        "predicted_exposed_s", "exposed, predicted, ms", "The part not overlapped with computation.", per=MILLI
    ),
    "measured_exposed_s": Column(
        "measured_exposed_s", "exposed, measured, ms", "The same, waiting for stragglers included.", per=MILLI
    ),
}
"""Columns of collectives, predicted and measured."""


def term_rows(terms: Iterable[CollectiveTerm]) -> list[Json]:
    """Collectives as documents and tables have them, s; of several runs the median."""
    named = ("op", "axis", "phase", "layer", "count", "bytes", "group", "tier")
    return [
        {
            **fields_of(term, named),
            "predicted_s": term.seconds,
            "measured_s": median(term.measured_s),
            "predicted_exposed_s": term.exposed_s,
            "measured_exposed_s": median(term.measured_exposed_s),
        }
        for term in terms
    ]


@dataclass(frozen=True)
class Point:
    """A row with both values, positive. words: its tooltip; bars: measured and predicted ends to draw, low and high."""

    series: str
    measured: float
    predicted: float
    words: str
    bars: tuple[tuple[float, float], tuple[float, float]] | None = None

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted / self.measured - 1.0


def points_of(pairs: Pairs, series: Callable[[str], str], said: Callable[[str], Sequence[str]]) -> list[Point]:
    """A point for each key with both values. said: lines of its tooltip above the values."""
    found = []
    for key in pairs.errors:
        measured, predicted, half = pairs.measured[key], pairs.predicted[key], pairs.spread.get(key, 0.0) / 2.0
        if measured > 0.0 and predicted > 0.0:
            both = f"measured {show_seconds(measured)}, predicted {show_seconds(predicted)} ({pairs.errors[key]:+.1%})"
            lines = "<br>".join(escape(line, quote=False) for line in (*said(key), both))
            runs = (measured * (1.0 - half), measured * (1.0 + half))
            ends = (pairs.low.get(key, predicted), pairs.high.get(key, predicted))
            found.append(Point(series(key), measured, predicted, lines, (runs, ends)))
    return found


def pairs_figure(title: str, points: Sequence[Point], unit: Unit = SECONDS, *, note: str = "", bars: bool) -> Json:
    """All points, the largest series first so that small ones lie on top, and lines for no error and ±25%.

    bars: with the range of the runs and the 80% interval of the prediction.
    """
    drawn = _apart(points) if len(points) > MOST_POINTS else points
    series: dict[str, list[list[object]]] = {}
    for one in drawn:
        ends = [end for pair in one.bars or () for end in pair] if bars else []
        series.setdefault(one.series, []).append([one.measured, one.predicted, one.words, *ends])
    ordered = sorted(series.items(), key=lambda item: (-len(item[1]), item[0]))
    said = ["Solid line: predicted = measured; dashed: an error of ±25%.", note]
    if len(drawn) < len(points):
        said.append(f"Of overlapping rows the worst is drawn: {len(drawn):,} of {len(points):,}.")
    return {
        "kind": "points",
        "title": title,
        "note": " ".join(filter(None, said)),
        "unit": "bytes" if unit is MEMORY else "s",
        "choices": ["predicted", "error"],
        "ranges": bars,
        "series": [{"name": name, "points": found} for name, found in ordered],
    }


def _apart(points: Sequence[Point]) -> list[Point]:
    """The worst of each series in each cell of a fine grid, in the order of `points`."""
    worst: dict[tuple[str, int, int], Point] = {}
    for one in points:
        across, up = (round(_CELLS_PER_DECADE * math.log10(value)) for value in (one.measured, one.predicted))
        cell = (one.series, across, up)
        if cell not in worst or abs(one.error) > abs(worst[cell].error):
            worst[cell] = one
    return list(worst.values())
