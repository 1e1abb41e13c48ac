"""Sweeps as tables, Markdown, CSV and JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from axonn_tune import __version__
from axonn_tune.ranking.entries import Entry
from axonn_tune.ranking.sweep import Point
from axonn_tune.report.ranking_json import Json, entry_fields, origin
from axonn_tune.report.table import (
    Heading,
    aligned_cells,
    csv_table,
    markdown_table,
    require_columns,
    seconds_cells,
    text_table,
)
from axonn_tune.units import GIB

Cells: TypeAlias = Callable[[Sequence[Point]], list[str]]

SCHEMA = "axonn-tune/sweep/1"
NOTHING = "-"
_NO_ENTRY = Entry(sizes=(0, 0, 0, 0))


def sweep_table(points: Sequence[Point], *, names: Sequence[str] = (), color: bool = False) -> str:
    """A table for people, with these columns or the main ones; points without a grid have their reasons below it."""
    headings, rows, reasons = sweep_cells(points, names=names)
    return text_table(headings, rows, color=color) + "".join(f"\n{reason}\n" for reason in reasons)


def sweep_markdown(points: Sequence[Point], *, names: Sequence[str] = ()) -> str:
    """The same as Markdown."""
    headings, rows, reasons = sweep_cells(points, names=names)
    listed = "".join(f"- {reason}\n" for reason in reasons)
    return markdown_table(headings, rows) + (f"\n{listed}" if reasons else "")


def sweep_cells(
    points: Sequence[Point], *, names: Sequence[str] = ()
) -> tuple[Sequence[Heading], list[list[str]], list[str]]:
    """Headings and cells of the table, and the reasons of points where nothing is feasible; UsageError as by names."""
    reasons = [f"{_where(point)}: {point.reason}" for point in points if point.entry is None]
    require_columns(names, _COLUMNS)
    chosen = [_COLUMNS[name] for name in names or MAIN_COLUMNS]
    cells = [show(points) for _, show in chosen]
    return [heading for heading, _ in chosen], [list(row) for row in zip(*cells, strict=True)], reasons


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


def _each(show: Callable[[Point, Entry], str]) -> Cells:
    return lambda points: [show(point, point.entry or _NO_ENTRY) for point in points]


def _seconds(read: Callable[[Entry], float | None]) -> Cells:
    return lambda points: seconds_cells([read(point.entry or _NO_ENTRY) for point in points])


def _grids(points: Sequence[Point]) -> list[str]:
    entries = [point.entry or _NO_ENTRY for point in points]
    return aligned_cells([[str(size) if size else NOTHING for size in entry.sizes] for entry in entries])


def _order(entry: Entry) -> str:
    return ",".join(entry.wide_order or entry.order or (NOTHING,))


def _plain(value: object) -> str:
    return NOTHING if value is None else str(value)


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.1f}"


_COLUMNS: dict[str, tuple[Heading, Cells]] = {
    "model": (Heading("model", left=True), _each(lambda point, entry: point.inputs.problem.model.name)),
    "gpus": (Heading("GPUs"), _each(lambda point, entry: f"{point.inputs.problem.gpus:,}")),
    "batch": (Heading("batch"), _each(lambda point, entry: f"{point.inputs.problem.workload.global_batch:,}")),
    "grid": (Heading("grid\nx y z data"), _grids),
    "order": (Heading("order", left=True), _each(lambda point, entry: _order(entry))),
    "micro_batch": (Heading("micro-\nbatch"), _each(lambda point, entry: _plain(entry.micro_batch))),
    "recompute": (Heading("recompute", left=True), _each(lambda point, entry: _plain(entry.recompute))),
    "communication_s": (Heading("communi-\ncation,\ns"), _seconds(lambda entry: entry.communication_s)),
    "exposed_communication_s": (Heading("exposed,\ns"), _seconds(lambda entry: entry.exposed_communication_s)),
    "step": (Heading("step,\ns"), _seconds(lambda entry: entry.iteration_s)),
    "low_s": (Heading("at least,\ns"), _seconds(lambda entry: entry.low_s)),
    "high_s": (Heading("at most,\ns"), _seconds(lambda entry: entry.high_s)),
    "tokens_per_s": (Heading("tokens/s"), _each(lambda point, entry: _count(entry.tokens_per_s))),
    "mfu": (Heading("MFU,\n%"), _each(lambda point, entry: _percent(entry.mfu))),
    "memory": (Heading("memory,\nGiB"), _each(lambda point, entry: _gib(entry.memory_bytes))),
    "efficiency": (Heading("efficiency,\n%"), _each(lambda point, entry: _percent(point.efficiency))),
}
"""Every column there is, by name, in the order of a wide table."""
ALL_COLUMNS = tuple(_COLUMNS)
MAIN_COLUMNS = ("model", "gpus", "batch", "grid", "order", "step", "tokens_per_s", "mfu", "efficiency")


def _count(number: float | None) -> str:
    return NOTHING if number is None else f"{number:,.0f}"


def _gib(value_bytes: float | None) -> str:
    return NOTHING if value_bytes is None else f"{value_bytes / GIB:.1f}"
