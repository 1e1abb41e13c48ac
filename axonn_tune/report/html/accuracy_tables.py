"""Tables of predictions against measurements: errors by group, families, rows, and what was not predicted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from axonn_tune.published.measurements import Evaluation
from axonn_tune.published.quality import Errors, FamilyQuality
from axonn_tune.published.steps import PredictedStep
from axonn_tune.report.html.accuracy_figure import Unit
from axonn_tune.report.html.blocks import Cell, Column, Filter, Json, table
from axonn_tune.report.html.ranking import MOST_ROWS
from axonn_tune.units import GIB

EACH = "Each row"
"""Title of the table of all rows."""

_PERCENT = 0.01
_FEW = 40
"""With more rows a table scrolls in a window of its own."""


def _share(key: str, label: str, meaning: str) -> Column:
    return Column(key, label, meaning, per=_PERCENT, decimals=1, width_ch=9)


_ERROR = _share("error", "error, %", "Predicted over measured, less 1.")
_SIZE = _share("size", "|error|, %", "Size of the error.")
_ERRORS = (
    Column("rows", "rows", "Rows that have both values.", decimals=0, width_ch=7),
    _share("mape", "mean |error|, %", "Mean size of the error."),
    _share("median", "median |error|, %", "Half of the rows have a smaller one."),
    _share("p90", "90% of |error|, %", "Nine of ten rows have a smaller one."),
    _share("bias", "bias, %", "Mean error with its sign."),
)
_FAMILIES = (
    Column("family", "family", "Layouts of one model on as many GPUs, of one source.", text=True, width_ch=40),
    Column("rows", "rows", "Rows that have both times.", decimals=0, width_ch=7),
    _share("regret", "regret, %", "What the predicted best takes over what the best takes, less 1."),
    Column("spearman", "Spearman", "Rank correlation: 1 is the same order.", decimals=3, width_ch=10),
    Column("kendall", "Kendall", "Rank correlation by pairs, tau-b.", decimals=3, width_ch=10),
    Column("best_rank", "place of the mea\u00adsured best", "Among the predictions, from 1.", decimals=0, width_ch=11),
)
_STEPS = (
    Column("id", "row", "Its name in the file.", text=True, width_ch=24),
    Column("measured", "mea\u00adsured, s", "Step.", decimals=3, width_ch=10),
    Column("predicted", "pre\u00addicted, s", "Step.", decimals=3, width_ch=10),
    _ERROR,
    _SIZE,
    Column("low", "80% from, s", "Lower end of the 80% interval of the prediction.", decimals=3, width_ch=10),
    Column("high", "to, s", "Upper end of it.", decimals=3, width_ch=10),
    Column("held", "within", "Whether the interval holds the measured time.", text=True, width_ch=7),
    Column("source", "source", "Data set.", text=True, width_ch=20),
    Column("framework", "framework", "What trained.", text=True, width_ch=30),
    Column("gpu", "accel\u00aderator", "As the source names it.", text=True, width_ch=12),
    Column("gpus", "GPUs", "How many there were.", decimals=0, width_ch=7),
    Column("model", "model", "As the source names it.", text=True, width_ch=16),
    Column("layout", "layout", "As predicted: where the row leaves it open, the fastest.", text=True, width_ch=44),
    Column("micro_batch", "micro-batch", "Sequences.", decimals=0, width_ch=6),
    Column("recompute", "recom\u00adputation", "Of activations.", text=True, width_ch=10),
    Column("memory", "memory, GiB", "Predicted, of one GPU.", per=GIB, decimals=1, width_ch=9),
)
_STEPS_REFUSED = (
    *(column for column in _STEPS if column.key in {"id", "source", "framework", "gpu", "model"}),
    Column("why_not", "why not", "Why there is no prediction.", text=True, width_ch=60),
)
_REASONS = (
    Column("rows", "rows", "How many.", decimals=0, width_ch=7),
    Column("why_not", "why not", "Why there is no prediction.", text=True, width_ch=90),
)


def errors_table(groups: Mapping[str, Errors], *, what: str, title: str, note: str = "") -> Json:
    """Errors by group, the worst mean first; `all`, if it is there, last."""
    named = Column("name", what, "What errors are counted by.", text=True, width_ch=44)
    ordered = sorted(groups.items(), key=lambda item: (item[0] == "all", -item[1].mape))
    rows: list[Mapping[str, Cell]] = [
        {"name": name, "rows": one.rows, "mape": one.mape, "median": one.median, "p90": one.p90, "bias": one.bias}
        for name, one in ordered
        if one.rows
    ]
    return table("", title, (named, *_ERRORS), rows, note=note, tall=len(rows) > _FEW)


def families_table(families: Sequence[FamilyQuality]) -> Json:
    """How well layouts are ranked, by family; the highest regret first, then the lowest correlation."""
    rows: list[Mapping[str, Cell]] = [
        {
            "family": one.family,
            "rows": one.rows,
            "regret": one.regret,
            "spearman": _known(one.spearman),
            "kendall": _known(one.kendall),
            "best_rank": one.best_rank,
        }
        for one in sorted(families, key=lambda one: (-one.regret, _known(one.spearman) or 0.0))
    ]
    note = "Families of 5 rows or more, the highest regret first: what it costs to trust the first of the ranking."
    return table("s1-families", "How well layouts are ranked", _FAMILIES, rows, note=note, tall=True)


def steps_table(steps: Sequence[PredictedStep]) -> Json:
    """Every predicted step, the worst first; those that were not measured last."""
    known = sorted((one for one in steps if one.predicted_s is not None), key=lambda one: -abs(one.error or 0.0))
    rows = [_step(one) for one in known]
    filters = [
        Filter(key, label, sorted({str(row[key]) for row in rows if row[key]}))
        for key, label in (("source", "source"), ("framework", "framework"), ("gpu", "accelerator"), ("held", "within"))
    ]
    return _rows_table("s1-rows", _STEPS, rows, filters, title=EACH)


def _step(one: PredictedStep) -> Mapping[str, Cell]:
    row, configuration = one.row, one.configuration
    assert configuration is not None, row.id
    return {
        "id": row.id,
        "source": row.dataset,
        "framework": row.framework,
        "gpu": row.gpu,
        "gpus": row.gpus,
        "model": row.model,
        "layout": one.layout,
        "micro_batch": configuration.micro_batch,
        "recompute": configuration.recompute,
        "measured": row.step_s,
        "predicted": one.predicted_s,
        **_errors(one.error),
        "low": one.low_s,
        "high": one.high_s,
        "held": _held(one),
        "memory": one.memory_bytes,
    }


def _held(one: PredictedStep) -> str | None:
    """Whether the interval holds the measured time; None where either is missing."""
    if one.low_s is None or one.high_s is None or not one.row.step_s:
        return None
    return "yes" if one.low_s <= one.row.step_s <= one.high_s else "no"


def judged_table(judged: Sequence[Evaluation], unit: Unit, *, identity: str, title: str) -> Json:
    """Rows of another kind, the worst first."""
    columns = (
        Column("id", "row", "Its name in the file, or its line.", text=True, width_ch=16),
        Column("group", "group", "What its error is counted under.", text=True, width_ch=44),
        Column("measured", f"mea\u00adsured, {unit.name}", "", per=unit.per, decimals=unit.decimals, width_ch=12),
        Column("predicted", f"pre\u00addicted, {unit.name}", "", per=unit.per, decimals=unit.decimals, width_ch=12),
        _ERROR,
        _SIZE,
        Column("counted", "counted", "Whether it counts in the errors by group: small ones do not.", text=True),
    )
    rows: list[Mapping[str, Cell]] = [
        {
            "id": one.id,
            "group": one.group,
            "measured": one.measured,
            "predicted": one.predicted,
            **_errors(one.error),
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


def refused_steps_table(steps: Sequence[PredictedStep]) -> Json:
    """Steps without a prediction, each with the reason."""
    rows = [
        {
            "id": one.row.id,
            "source": one.row.dataset,
            "framework": one.row.framework,
            "gpu": one.row.gpu,
            "model": one.row.model,
            "why_not": one.why_not,
        }
        for one in steps[:MOST_ROWS]
    ]
    note = f"The first {MOST_ROWS:,} of {len(steps):,}." if len(steps) > MOST_ROWS else ""
    return table("", "Rows that are not predicted", _STEPS_REFUSED, rows, note=note, tall=len(rows) > _FEW)


def reasons_table(judged: Iterable[Evaluation]) -> Json | None:
    """Why rows have no prediction, and how many; None if all have one."""
    counts = Counter(one.why_not for one in judged if one.why_not)
    rows: list[Mapping[str, Cell]] = [{"rows": count, "why_not": why} for why, count in counts.most_common()]
    return table("", "Rows that are not predicted", _REASONS, rows, tall=len(rows) > _FEW) if rows else None


def _errors(error: float | None) -> dict[str, Cell]:
    return {"error": error, "size": None if error is None else abs(error)}


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
