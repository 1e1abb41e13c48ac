"""Rankings as tables, Markdown and CSV: which columns there are, and how each is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from axonn_tune.ranking.entries import Entry
from axonn_tune.ranking.results import Results
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

Cells: TypeAlias = Callable[[Sequence[Entry]], list[str]]
NOTHING = "-"
_MOST_COLUMNS = 9
_LEFT_OUT_FIRST = ("mfu", "exposed_communication_s", "order", "batching")
"""What makes room where other cost models or reasons need columns, unless the table is to be wide."""


@dataclass(frozen=True)
class Column:
    """A column of a table: its name for `--columns`, its heading, and the cells of all entries."""

    name: str
    heading: Heading
    cells: Cells


def ranking_table(
    results: Results, entries: Sequence[Entry], *, names: Sequence[str], limit_bytes: float, color: bool = False
) -> str:
    """A table for people, one row per entry."""
    best = 0 if entries and entries[0].feasible else None
    return text_table(*ranking_cells(results, entries, names=names, limit_bytes=limit_bytes), color=color, best=best)


def ranking_markdown(results: Results, entries: Sequence[Entry], *, names: Sequence[str], limit_bytes: float) -> str:
    """The same as a Markdown table."""
    return markdown_table(*ranking_cells(results, entries, names=names, limit_bytes=limit_bytes))


def ranking_cells(
    results: Results, entries: Sequence[Entry], *, names: Sequence[str], limit_bytes: float
) -> tuple[list[Heading], list[list[str]]]:
    """Headings and cells of these columns; UsageError for a column that does not exist."""
    columns = _chosen(results, names, limit_bytes=limit_bytes)
    return [column.heading for column in columns], _rows(columns, entries)


def default_columns(results: Results, entries: Sequence[Entry], *, wide: bool = False) -> list[str]:
    """Names of the columns shown unless others are asked for."""
    names = ["rank", "grid", "order", "batching", "communication_s", "exposed_communication_s", "step", "mfu", "memory"]
    if wide:
        names[5:8] = ["exposed_communication_s", "compute_s", "step", "tokens_per_s", "mfu", "hfu"]
    names += [f"rank_{cost}" for cost in results.others]
    if any(not entry.feasible for entry in entries):
        names.append("rejected_because")
    if not wide:
        for name in _LEFT_OUT_FIRST[: max(len(names) - _MOST_COLUMNS, 0)]:
            names.remove(name)
    return names


def column_names(results: Results) -> list[str]:
    """Every name that `--columns` takes."""
    return list(_columns(results, limit_bytes=0.0))


def ranking_csv(results: Results, entries: Sequence[Entry], *, limit_bytes: float) -> str:
    """Every field of every entry but the terms, in SI units."""
    return csv_table(*ranking_records(results, entries, limit_bytes=limit_bytes))


def ranking_records(
    results: Results, entries: Sequence[Entry], *, limit_bytes: float
) -> tuple[list[str], list[list[object]]]:
    """Names of all fields, units included, and their values of every entry: what CSV and data frames hold."""
    costs = list(results.others)
    names = [*_CSV_FIELDS, "memory_limit_bytes", *(f"rank_{cost}" for cost in costs), "rejected_because"]
    rows = [
        [
            *(read(entry) for read in _CSV_FIELDS.values()),
            limit_bytes,
            *(results.others[cost].get(entry.sizes) for cost in costs),
            "; ".join(entry.rejected_because),
        ]
        for entry in entries
    ]
    return names, rows


_CSV_FIELDS: dict[str, Callable[[Entry], object]] = {
    "rank": lambda entry: entry.rank,
    "x": lambda entry: entry.sizes[0],
    "y": lambda entry: entry.sizes[1],
    "z": lambda entry: entry.sizes[2],
    "data": lambda entry: entry.sizes[3],
    "order": lambda entry: ",".join(entry.order) if entry.order else None,
    "feasible": lambda entry: entry.feasible,
    "tie": lambda entry: entry.tie,
    "micro_batch": lambda entry: entry.micro_batch,
    "grad_accumulation": lambda entry: entry.accumulation,
    "recompute": lambda entry: entry.recompute,
    "kept_layers": lambda entry: entry.kept_layers,
    "communication_s": lambda entry: entry.communication_s,
    "exposed_communication_s": lambda entry: entry.exposed_communication_s,
    "compute_s": lambda entry: entry.compute_s,
    "iteration_s": lambda entry: entry.iteration_s,
    "low_s": lambda entry: entry.low_s,
    "high_s": lambda entry: entry.high_s,
    "tokens_per_s": lambda entry: entry.tokens_per_s,
    "mfu": lambda entry: entry.mfu,
    "hfu": lambda entry: entry.hfu,
    "memory_bytes": lambda entry: entry.memory_bytes,
}


def _rows(columns: Sequence[Column], entries: Sequence[Entry]) -> list[list[str]]:
    cells = [column.cells(entries) for column in columns]
    return [list(row) for row in zip(*cells, strict=True)]


def _chosen(results: Results, names: Sequence[str], *, limit_bytes: float) -> list[Column]:
    """The columns of these names; UsageError for one that does not exist."""
    known = _columns(results, limit_bytes=limit_bytes)
    require_columns(names, known)
    return [known[name] for name in names]


def _columns(results: Results, *, limit_bytes: float) -> dict[str, Column]:
    """Every column there is, by name, in the order of the table."""
    columns = [
        Column("rank", Heading("rank"), _each(lambda entry: _plain(entry.rank))),
        Column("grid", Heading("grid\nx y z data"), _grids),
        Column("order", Heading("order", left=True), _each(_order)),
        Column("batching", Heading("micro-batch,\nrecompute,\nkept layers", left=True), _batchings),
        Column("micro_batch", Heading("micro-\nbatch"), _each(lambda entry: _plain(entry.micro_batch))),
        Column("grad_accumulation", Heading("accumu-\nlation"), _each(lambda entry: _plain(entry.accumulation))),
        Column("recompute", Heading("recompute", left=True), _each(lambda entry: _plain(entry.recompute))),
        Column("kept_layers", Heading("kept\nlayers"), _each(lambda entry: _plain(entry.kept_layers))),
        *_time_columns(),
        Column("mfu", Heading("MFU,\n%"), _each(lambda entry: _percent(entry.mfu))),
        Column("hfu", Heading("HFU,\n%"), _each(lambda entry: _percent(entry.hfu))),
        _memory_column(limit_bytes),
        Column("tie", Heading("ties\nwith 1"), _each(lambda entry: "yes" if entry.tie else NOTHING)),
        *(_rank_column(results, cost) for cost in results.others),
        Column("rejected_because", Heading("rejected because", left=True), _each(_reasons)),
    ]
    return {column.name: column for column in columns}


def _time_columns() -> list[Column]:
    return [
        Column("communication_s", Heading("communi-\ncation,\ns"), _seconds(lambda entry: entry.communication_s)),
        Column(
            "exposed_communication_s", Heading("exposed,\ns"), _seconds(lambda entry: entry.exposed_communication_s)
        ),
        Column("compute_s", Heading("compute,\ns"), _seconds(lambda entry: entry.compute_s)),
        Column("step", Heading("step,\ns"), _steps),
        Column("iteration_s", Heading("step,\ns"), _seconds(lambda entry: entry.iteration_s)),
        Column("low_s", Heading("at least,\ns"), _seconds(lambda entry: entry.low_s)),
        Column("high_s", Heading("at most,\ns"), _seconds(lambda entry: entry.high_s)),
        Column("tokens_per_s", Heading("tokens/s"), _each(lambda entry: _count(entry.tokens_per_s))),
    ]


def _memory_column(limit_bytes: float) -> Column:
    def gib(entry: Entry) -> str:
        return NOTHING if entry.memory_bytes is None else f"{entry.memory_bytes / GIB:.1f}"

    return Column("memory", Heading(f"memory,\nGiB of\n{limit_bytes / GIB:.1f}"), _each(gib))


def _rank_column(results: Results, cost: str) -> Column:
    def rank(entry: Entry) -> str:
        return _plain(results.others[cost].get(entry.sizes))

    return Column(f"rank_{cost}", Heading("rank by\n" + cost.replace("-", "-\n", 1)), _each(rank))


def _each(show: Callable[[Entry], str]) -> Cells:
    return partial(_show_each, show)


def _show_each(show: Callable[[Entry], str], entries: Sequence[Entry]) -> list[str]:
    return [show(entry) for entry in entries]


def _seconds(read: Callable[[Entry], float | None]) -> Cells:
    return lambda entries: seconds_cells([read(entry) for entry in entries])


def _grids(entries: Sequence[Entry]) -> list[str]:
    return aligned_cells([[str(size) for size in entry.sizes] for entry in entries])


def _batchings(entries: Sequence[Entry]) -> list[str]:
    parts = [[_plain(entry.micro_batch), _plain(entry.recompute), _plain(entry.kept_layers)] for entry in entries]
    return aligned_cells(parts)


def _steps(entries: Sequence[Entry]) -> list[str]:
    """Step times with the half-width of their interval."""
    times = seconds_cells([entry.iteration_s for entry in entries])
    halves = [
        None if entry.high_s is None or entry.low_s is None else (entry.high_s - entry.low_s) / 2 for entry in entries
    ]
    decimals = max((len(time.partition(".")[2]) for time in times), default=0)
    return [time if half is None else f"{time} ±{half:.{decimals}f}" for time, half in zip(times, halves, strict=True)]


def _order(entry: Entry) -> str:
    return ",".join(entry.wide_order or entry.order or (NOTHING,))


def _reasons(entry: Entry) -> str:
    return "; ".join(entry.rejected_because)


def _plain(value: object) -> str:
    return NOTHING if value is None else str(value)


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.1f}"


def _count(number: float | None) -> str:
    return NOTHING if number is None else f"{number:,.0f}"
