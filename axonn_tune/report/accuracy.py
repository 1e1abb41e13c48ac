"""Predicted vs. published steps, and those of a user's own file: as text, JSON and a section of a page.

The section has a figure, a color for each source; errors by group; every row; and what was not predicted. JSON follows
the contract `axonn-tune/accuracy/2`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean

from axonn_tune.errors import UsageError
from axonn_tune.frameworks import UNKNOWN
from axonn_tune.report import page
from axonn_tune.report.output import NOTHING, Column, Json, count, fields_of, percent, share, text_of, words
from axonn_tune.report.pairs import (
    ERROR,
    ERRORS,
    QUALITY,
    SECONDS,
    group_json,
    pairs_figure,
    points_of,
    quality_columns,
    quality_rows,
)
from axonn_tune.report.ranking_section import MOST_ROWS
from axonn_tune.units import GIB, show_seconds
from axonn_tune.validation.published import groups
from axonn_tune.validation.published.accuracy import SUMS, Accuracy, PredictedRow, StepSummary
from axonn_tune.validation.published.cases import framework_of, nearest_framework
from axonn_tune.validation.published.rows import SHIPPED, known_errata
from axonn_tune.validation.quality import Quality
from axonn_tune.vocabulary import VERSION

ACCURACY_SCHEMA = "axonn-tune/accuracy/2"
_FEW = 40
"""With more rows a table scrolls in its own window."""
_GROUPINGS = {"source": "dataset", "framework": "framework", "accelerator": "gpu"}

_WHY_NOT = words("why_not", "why not", "Why there is no prediction.", 60)
_SIZE = share("size", "|error|", "Size of the error.")
_RANKED = (
    words("name", "families of\n5+ rows"),
    count("families", "families"),
    replace(QUALITY["spearman"], title="mean\nSpearman"),
    replace(QUALITY["regret"], title="mean\nregret"),
    share("best_in_top_5", "best in\ntop 5", decimals=0),
    QUALITY["coverage"],
    QUALITY["width"],
)
_FAMILIES = ("rows", "regret", "spearman", "kendall", "best_rank")
_STEP_COLUMNS = (
    words("id", "row", "Its name in the file.", 24),
    Column("measured", "measured, s", "Step.", decimals=3),
    Column("predicted", "predicted, s", "Step.", decimals=3),
    ERROR,
    _SIZE,
    Column("low", "80% from, s", "Lower end of the 80% interval of the prediction.", decimals=3),
    Column("high", "to, s", "Upper end of it.", decimals=3),
    words("held", "within", "Whether the measured time is within the interval.", 7),
    words("source", "source", "Data set.", 20),
    words("framework", "framework", "What trained.", 30),
    words("gpu", "accelerator", "As the source names it.", 12),
    count("gpus", "GPUs", "Number of GPUs."),
    words("model", "model", "As the source names it.", 16),
    words("layout", "layout", "Priced micro-batch and recompute: the fastest where the row does not state them.", 44),
    count("micro_batch", "micro-batch", "Sequences."),
    words("recompute", "recompute", "Activation recomputation.", 10),
    Column("memory", "memory, GiB", "Predicted peak of one GPU.", per=GIB, decimals=1),
    Column("limit", "limit, GiB", "What is usable of one GPU.", per=GIB, decimals=1),
    words("fits", "fits", "Whether the prediction does; a row that ran and does not is priced all the same.", 6),
)
_STEPS = {column.key: column for column in _STEP_COLUMNS}
_IN_TEXTS = (
    _STEPS["framework"],
    words("priced_as", "priced as"),
    *(_STEPS[key] for key in ("model", "layout", "measured", "predicted")),
    Column("interval", "80% interval", show=str),
    ERROR,
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

_GROUPED = ("rows", "mape", "median", "bias", "coverage", "width")
_PAIRS = (
    words("name", "pairs that differ in one thing", "", 60),
    Column("what", "what", show=str),
    Column("measured", "ratio\nmeasured", decimals=3),
    Column("predicted", "predicted", decimals=3),
    Column("right", "faster one\nnamed", show=str),
)
_PAIR_KINDS = (
    words("name", "pairs by what differs", "", 40),
    count("pairs", "pairs"),
    count("told", "beyond 5%"),
    share("right", "faster one\nnamed", decimals=0),
    share("error", "median error\nof the ratio"),
)
_UNFIT = (words("id", "rows that ran and do not fit"), _STEPS["layout"])
_MEMORY = (
    words("id", "rows that print memory"),
    Column("kind", "which", show=str),
    Column("measured", "printed, GiB", decimals=1),
    Column("predicted", "predicted, GiB", per=GIB, decimals=1),
    ERROR,
)

_STEP = ("id", "predicted_s", "low_s", "high_s", "why_not", "measured_s", "error", "memory_bytes")


def accuracy_document(found: Accuracy) -> Json:
    """Everything, as JSON."""
    without = {f"without_{kind}": _step_summary(summary) for kind, summary in found.without.items()}
    if found.apart is not None:
        without["without_source_and_sums"] = _step_summary(found.apart)
    return {
        "schema": ACCURACY_SCHEMA,
        "machine": None if found.machine is None else found.machine.document.name,
        "summary": {**_step_summary(found.summary), **without},
        "rows": _rows_json(found.steps),
        **({} if found.more is None else {"more": _more_json(found, found.more)}),
    }


def _more_json(found: Accuracy, more: StepSummary) -> Json:
    """Rows that name their model: in groups, in pairs, and their memory."""
    pairs = [
        {
            **fields_of(one, ("what", "measured", "predicted", "right")),
            "first": one.first.row.id,
            "second": one.second.row.id,
        }
        for one in groups.pairs(more.rows)
    ]
    memory = [
        {"id": one.row.id, "kind": one.memory_kind, "error": error, "predicted_bytes": one.counted_bytes}
        for one, error in groups.memory(more.rows)
    ]
    return {
        "groups": {name: _step_summary(one) for name, one in groups.groups(more.rows).items()},
        "pairs": pairs,
        "pairs_by": {name: asdict(one) for name, one in groups.by_what(groups.pairs(more.rows)).items()},
        "memory": memory,
        "unfit": [one.row.id for one in groups.unfit(more.rows)],
        "rows": [] if more.rows == found.steps else _rows_json(more.rows),
    }


def _rows_json(steps: Sequence[PredictedRow]) -> list[Json]:
    rows = []
    for one in steps:
        cells = {f"{key}_s" if key != "choices" else key: value for key, value in _open_cells(one).items()}
        rows.append(
            {
                **fields_of(one, _STEP, id=one.row.id, why_not=one.why_not or None, measured_s=one.row.step_s),
                **{key: cells[key] for key in ("choices", "least_s", "most_s")},
                "fits": None if one.memory_bytes is None else one.fits,
                "memory_limit_bytes": one.limit_bytes,
                "outside_evidence": list(one.outside),
                "warnings": [*one.warnings, *_unknown_software(one)],
            }
        )
    return rows


def _step_summary(summary: StepSummary) -> Json:
    ranking = fields_of(summary, ("predicted", "spearman", "regret", "best_in_top_5", "not_fitting"))
    return {
        **group_json({"all": summary.quality})["all"],
        **ranking,
        "rows": len(summary.rows),
        "open": len(summary.open),
        **{f"by_{what}": group_json(summary.by(column)) for what, column in _GROUPINGS.items()},
        "families": group_json(summary.families, families=True),
    }


def _unknown_software(one: PredictedRow) -> list[str]:
    """Warning that a row's software is unknown, with the nearest known one; empty otherwise."""
    name = one.row.framework
    if framework_of(one.row).name != UNKNOWN:
        return []
    return [f"unknown framework, priced as the mean of all known ones: {name or 'no name'}{nearest_framework(name)}"]


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
    held = apart.quality
    return [
        f"Fits without the source: mean error {fmean(one.mape for one in sources.values()):.1%} over {len(sources)} "
        f"sources; {held.mape:.1%} over {held.rows:,} rows without {SUMS}, of which printed 80% "
        f"intervals hold {held.coverage:.0%} (mean width {held.width:.0%} of the step).",
        f"Independent measurements: {summary.quality.rows - rows + layers:,}. The {rows:,} rows of {SUMS} are sums of "
        f"{layers} layer times, with edited inputs: {columns}.",
        f"{summary.predicted:,} of {len(summary.rows):,} rows are scored; {len(summary.open)} leave part of their "
        f"layout open, {summary.not_fitting} do not fit into memory.",
    ]


def accuracy_text(found: Accuracy) -> str:
    """Errors by source with held-out errors, families, the worst rows first, and rows without a prediction."""
    summary = found.summary
    parts = [] if found.machine is None else [f"steps priced on {found.machine.document.name}, {found.machine.path}\n"]
    parts.append("".join(f"{sentence}\n" for sentence in headline(found)))
    if summary.quality.rows:
        parts += [_by_source_text(found), _ranked_text(found), _steps_text("worst rows", summary.worst(found.listed))]
    if found.more is not None:
        parts += _more_text(found, found.more)
    parts.append(text_of(_OPEN, [{**_step_row(one), **_open_cells(one)} for one in summary.open]))
    parts.append(
        _steps_text("rows without a time", [one for one in found.steps if one.predicted_s and not one.row.step_s])
    )
    parts.append("80% intervals: those that search, explain and diagnose print for the same layout.")
    parts += sorted({said for one in found.steps for said in _unknown_software(one)})
    parts += [f"warning: {one.row.id}: {said}" for one in found.steps for said in one.warnings]
    parts += [f"not predicted: {one.row.id}: {one.why_not}" for one in summary.not_predicted]
    return "\n".join(part for part in parts if part) + "\n" if found.steps else ""


def _more_text(found: Accuracy, more: StepSummary) -> Iterable[str]:
    """Rows that name their model: errors by group and source, the worst, pairs and memory."""
    named = groups.groups(more.rows)
    yield text_of(quality_columns("rows that name their model", _GROUPED), quality_rows(_qualities(named)))
    for name, one in named.items():
        yield text_of(quality_columns(name, _GROUPED), quality_rows(one.by_source))
    if more.rows != found.steps:
        tuned = StepSummary(tuple(filter(groups.is_tuned, more.rows)))
        yield _steps_text("worst rows that name their model", tuned.worst(min(10, found.listed)))
    rows = [
        {"name": f"{one.first.row.id}, {one.second.row.id}", **fields_of(one, ("what", "measured", "predicted"))}
        | {"right": {None: "≈", True: "yes", False: "no"}[one.right]}
        for one in groups.pairs(more.rows)
    ]
    yield text_of(_PAIRS, rows)
    by_what = groups.by_what(groups.pairs(more.rows))
    yield text_of(_PAIR_KINDS, [{"name": name, **asdict(one)} for name, one in by_what.items()])
    yield text_of(_UNFIT, list(map(_step_row, groups.unfit(more.rows))))
    yield text_of(
        _MEMORY,
        [
            {
                "id": one.row.id,
                "kind": one.memory_kind,
                "error": error,
                "measured": one.row.memory_gib,
                "predicted": one.counted_bytes,
            }
            for one, error in groups.memory(more.rows)
        ],
    )


def _qualities(named: Mapping[str, StepSummary]) -> dict[str, Quality]:
    return {name: one.quality for name, one in named.items()}


def _open_cells(one: PredictedRow) -> Json:
    """Number and range of the layouts of a row that leaves part of its layout open."""
    least, most = (one.choices_s[0], one.choices_s[-1]) if one.choices_s else (None, None)
    return {"open": one.open_words, "choices": len(one.choices_s) or None, "least": least, "most": most}


def _with_all(summary: StepSummary) -> dict[str, Quality]:
    return {**summary.by_source, "all": summary.quality}


def _by_source_text(found: Accuracy) -> str:
    """Errors by source; mean and median also by fits without a row's family or source."""
    others = {kind: _with_all(summary) for kind, summary in found.without.items()}
    rows = [
        {**row, **{kind: other.get(row["name"]) for kind, other in others.items()}}
        for row in quality_rows(_with_all(found.summary))
    ]
    held_out = [
        share(f"{kind}.{key}", f"held-out\n{kind}\n{name}")
        for kind in others
        for key, name in (("mape", "mean"), ("median", "median"))
    ]
    return text_of([*quality_columns("source", ERRORS), *held_out], rows)


def _ranked_text(found: Accuracy) -> str:
    """Ranking quality within families, and coverage of intervals."""
    if not found.summary.families:
        return ""
    named = {"all rows": found.summary, **{f"held-out {kind}": one for kind, one in found.without.items()}}
    means = ("spearman", "regret", "best_in_top_5")
    rows = [
        {"name": name, **asdict(one.quality), **fields_of(one, means), "families": len(one.families)}
        for name, one in named.items()
    ]
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
        "layout": one.layout + one.misfit,
        "fits": None if one.memory_bytes is None else "yes" if one.fits else "no",
        "limit": one.limit_bytes,
        "measured": row.step_s,
        "predicted": one.predicted_s,
        "error": one.error,
        "size": None if one.error is None else abs(one.error),
        "low": one.low_s,
        "high": one.high_s,
        "interval": interval,
        "held": held,
        "micro_batch": configuration and configuration.micro_batch,
        "recompute": configuration and configuration.recompute,
        "memory": one.memory_bytes,
        "why_not": one.why_not,
    }


def accuracy_section(found: Accuracy, *, command: str) -> Json:
    """The section of the rows of a file; UsageError if it has none."""
    path, summary = found.path, found.summary
    where = f"{path.name}, shipped with the tool" if path.parent == SHIPPED else str(path)
    if not found.steps:
        raise UsageError(f"nothing to report: no rows in {where}")
    origin = [("axonn-tune", VERSION), ("command", command)]
    origin.append(("steps", f"{where}, SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()}"))
    said = [
        f"{summary.predicted:,} of {len(summary.rows):,} rows are predicted from their model, layout, software and "
        "accelerator",
        "error: predicted / measured − 1",
    ]
    if found.machine is not None:
        profile, elsewhere = found.machine, sum(bool(one.warnings) for one in found.steps)
        origin.append(("machine", f"{profile.document.name}, {profile.path}, SHA-256 {profile.sha256}"))
        said.append(f"all on {profile.document.name}; {elsewhere:,} say that they ran elsewhere")
    said += [sentence.rstrip(".") for sentence in headline(found)]
    blocks = [*_blocks(summary), page.origin_fold(origin)]
    return page.section("s1", "Training steps", subtitle=" · ".join(said), cards=_cards(found), blocks=blocks)


def _blocks(summary: StepSummary) -> Iterable[Json]:
    """The figure, errors by group, families, every row, and rows without a prediction."""
    by_key = {one.key: _step_row(one) for one in summary.rows}
    points = points_of(summary.pairs, lambda key: str(by_key[key]["source"]), lambda key: _said(by_key[key]))
    if points:
        yield pairs_figure("Predicted vs. measured", points, SECONDS, bars=False)
        for what, column in _GROUPINGS.items():
            yield _errors_table(summary.by(column), summary.quality, what=what)
    if summary.families:
        yield families_table(summary.families)
    if summary.predicted:
        rows = [row for row in by_key.values() if row["predicted"] is not None]
        ordered = sorted(rows, key=lambda row: -(row["size"] or 0.0))
        filters = {"source": "source", "framework": "framework", "gpu": "accelerator", "held": "within"}
        note = f"The worst first. {page.SORTS}{_cut(rows)}"
        yield page.table(
            "s1-rows", "Each row", _STEP_COLUMNS, ordered[:MOST_ROWS], note=note, filters=filters, tall=True
        )
    if refused := [by_key[one.key] for one in (*summary.open, *summary.not_predicted)]:
        columns = [*(_STEPS[key] for key in ("id", "source", "framework", "gpu", "model")), _WHY_NOT]
        shown = refused[:MOST_ROWS]
        yield page.table(
            "", "Rows without a prediction", columns, shown, note=_cut(refused).strip(), tall=len(shown) > _FEW
        )


def _cut(rows: Sequence[Json]) -> str:
    return f" The first {MOST_ROWS:,} of {len(rows):,}." if len(rows) > MOST_ROWS else ""


def _said(row: Json) -> list[str]:
    """What pointing at a row says above its times."""
    said = [
        row["id"],
        f"{row['framework']}, {row['model']} on {row['gpus']:,} {row['gpu']}",
        f"{row['layout']}, micro-batch {row['micro_batch']}, recompute {row['recompute']}",
    ]
    if row["interval"]:
        said.append(f"80% interval: {show_seconds(row['low'])} to {show_seconds(row['high'])}")
    return said


def _cards(found: Accuracy) -> list[Json]:
    summary, errors = found.summary, found.summary.quality
    order = NOTHING if summary.spearman is None else f"{summary.spearman:.3f}"
    return [
        page.card("mean |error|", percent(errors.mape), note=f"of {errors.rows:,} rows"),
        page.card("median |error|", percent(errors.median), note=f"90% within {percent(errors.p90)}"),
        page.card("80% interval coverage", percent(errors.coverage, decimals=0), note="of the measured times"),
        page.card("Spearman", order, note="mean over families"),
        page.card("regret", percent(summary.regret), note="mean over families"),
        page.card("best in top 5", percent(summary.best_in_top_5, decimals=0), note="of the families"),
        *(
            page.card(f"mean |error|, held-out {kind}", percent(one.quality.mape), note=f"leave-one-{kind}-out")
            for kind, one in found.without.items()
        ),
    ]


def _errors_table(groups: Mapping[str, Quality], everything: Quality, *, what: str) -> Json:
    """Errors by group, the worst mean first; of sources all rows last."""
    ordered = dict(sorted(groups.items(), key=lambda item: -item[1].mape))
    rows = quality_rows({**ordered, **({"all": everything} if what == "source" else {})})
    return page.table("", f"Errors by {what}", quality_columns(what, ERRORS), rows, tall=len(rows) > _FEW)


def families_table(families: Mapping[str, Quality]) -> Json:
    """Ranking quality by family; the highest regret first, then the lowest correlation."""
    rows = sorted(
        quality_rows(families),
        key=lambda one: (-one["regret"], 0.0 if math.isnan(one["spearman"]) else one["spearman"]),
    )
    note = "Families of 5 rows or more, the highest regret first."
    return page.table(
        "s1-families", "Ranking of layouts", quality_columns("family", _FAMILIES), rows, note=note, tall=True
    )
