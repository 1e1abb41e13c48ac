"""Sweeps as tables, Markdown, CSV and JSON."""

from __future__ import annotations

from collections.abc import Sequence

from axonn_tune import __version__
from axonn_tune.ranking.entries import Entry
from axonn_tune.ranking.sweep import Point
from axonn_tune.report.ranking_json import Json, entry_fields, origin
from axonn_tune.report.table import (
    Heading,
    aligned_cells,
    csv_table,
    markdown_table,
    seconds_cells,
    text_table,
)

SCHEMA = "axonn-tune/sweep/1"
NOTHING = "-"
_NO_ENTRY = Entry(sizes=(0, 0, 0, 0))

_HEADINGS = (
    Heading("model", left=True),
    Heading("GPUs"),
    Heading("batch"),
    Heading("grid\nx y z data"),
    Heading("order", left=True),
    Heading("step,\ns"),
    Heading("tokens/s"),
    Heading("MFU,\n%"),
    Heading("efficiency,\n%"),
)


def sweep_table(points: Sequence[Point], *, color: bool = False) -> str:
    """A table for people; points where nothing is feasible have their reasons below it."""
    headings, rows, reasons = sweep_cells(points)
    return text_table(headings, rows, color=color) + "".join(f"\n{reason}\n" for reason in reasons)


def sweep_markdown(points: Sequence[Point]) -> str:
    """The same as Markdown."""
    headings, rows, reasons = sweep_cells(points)
    listed = "".join(f"- {reason}\n" for reason in reasons)
    return markdown_table(headings, rows) + (f"\n{listed}" if reasons else "")


def sweep_cells(points: Sequence[Point]) -> tuple[Sequence[Heading], list[list[str]], list[str]]:
    """Headings and cells of the table, and the reasons of points where nothing is feasible."""
    reasons = [f"{_where(point)}: {point.reason}" for point in points if point.entry is None]
    return _HEADINGS, _rows(points), reasons


def sweep_csv(points: Sequence[Point]) -> str:
    """Every field of every point but workload details, in SI units."""
    return csv_table(*sweep_records(points))


def sweep_records(points: Sequence[Point]) -> tuple[list[str], list[list[object]]]:
    """Names of all fields, units included, and their values of each point: what CSV and data frames hold."""
    documents = [_point_json(point) for point in points]
    configs = [point.entry or _NO_ENTRY for point in points]
    names = ["model", "gpus", "global_batch", "feasible", "reason", "efficiency"]
    fields = [
        "x", "y", "z", "data", "order", "micro_batch", "grad_accumulation", "recompute", "kept_layers",
        "communication_s", "exposed_communication_s", "compute_s", "iteration_s", "low_s", "high_s", "tokens_per_s",
        "mfu", "hfu", "memory_bytes",
    ]  # fmt: skip
    rows: list[list[object]] = []
    for point, document, entry in zip(points, documents, configs, strict=True):
        found = entry_fields(entry, point.inputs.problem.workload) if point.entry else {}
        rows.append([*(document[name] for name in names), *(found.get(name) for name in fields)])
    return [*names, *fields], rows


def sweep_document(points: Sequence[Point], *, weak: bool) -> Json:
    """Everything, as `axonn-tune/sweep/1`; each model and the machine once."""
    models = {point.inputs.model.document.name: origin(point.inputs.model) for point in points}
    return {
        "schema": SCHEMA,
        "tool_version": __version__,
        "scaling": "weak" if weak else "strong",
        "rank_by": points[0].inputs.problem.rank_by if points else None,
        "models": list(models.values()),
        "machine": origin(points[0].inputs.machine) if points else None,
        "points": [_point_json(point, config=True) for point in points],
    }


def _point_json(point: Point, *, config: bool = False) -> Json:
    problem = point.inputs.problem
    found: Json = {
        "model": problem.model.name,
        "gpus": problem.gpus,
        "global_batch": problem.workload.global_batch,
        "feasible": point.entry is not None,
        "reason": point.reason or None,
        "efficiency": point.efficiency,
    }
    if config:
        found["workload"] = problem.workload.model_dump(mode="json", by_alias=True)
        found["config"] = None if point.entry is None else entry_fields(point.entry, problem.workload)
    return found


def _where(point: Point) -> str:
    problem = point.inputs.problem
    return f"{problem.model.name} on {problem.gpus} GPUs, batch {problem.workload.global_batch}"


def _rows(points: Sequence[Point]) -> list[list[str]]:
    entries = [point.entry or _NO_ENTRY for point in points]
    grids = aligned_cells([[str(size) if size else NOTHING for size in entry.sizes] for entry in entries])
    steps = seconds_cells([entry.iteration_s for entry in entries])
    return [
        [
            point.inputs.problem.model.name,
            f"{point.inputs.problem.gpus:,}",
            f"{point.inputs.problem.workload.global_batch:,}",
            grid,
            ",".join(entry.wide_order or entry.order or (NOTHING,)),
            step,
            NOTHING if entry.tokens_per_s is None else f"{entry.tokens_per_s:,.0f}",
            _percent(entry.mfu),
            _percent(point.efficiency),
        ]
        for point, entry, grid, step in zip(points, entries, grids, steps, strict=True)
    ]


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.1f}"
