"""The smallest number of GPUs on which a model trains and a larger one, with what each takes: as a table and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from axonn_tune.ranking.smallest import Offloaded, Size
from axonn_tune.report.facts import fit_json
from axonn_tune.report.output import Json, Table, count, words
from axonn_tune.report.ranking import (
    COLUMNS,
    TEXT_COLUMNS,
    entry_fields,
    explained,
    machine_words,
    memory_columns,
    optimizer_words,
    shown_axes,
    shown_rows,
    with_framework,
)
from axonn_tune.units import counted, show_bytes, show_seconds
from axonn_tune.vocabulary import Tune

_NAMES = (
    "gpus",
    "layout",
    "precision",
    "micro_batch",
    "memory",
    "tight",
    "step",
    "mfu",
    "tokens_per_s_per_gpu",
    "took",
)
_FIELDS = (
    *("gpus", "room", "memory_bytes", "memory_limit_bytes", "iteration_s", "mfu", "tokens_per_s_per_gpu"),
    *("micro_batch", "recompute", "took", "arguments", "needed"),
)


@dataclass(frozen=True)
class Sizes:
    """What is shown of the smallest number of GPUs, in its first row, and more.

    of_batch: smaller numbers that the batch alone rules out, each with the nearest batch with which it fits. without:
    the smallest number that takes no savers, None where none does. offloaded: fewer GPUs with offload. other_modes:
    smallest numbers of what trains otherwise, where only adapters do.
    """

    rows: Sequence[Size]
    of_batch: Sequence[tuple[int, int]]
    without: int | None
    offloaded: Offloaded | None = None
    other_modes: Mapping[Tune, int] = field(default_factory=dict)


def sizes_table(found: Sizes, *, names: Sequence[str] = ()) -> Table:
    """A row for each number, and below the arguments of what it takes."""
    problem = found.rows[0].inputs.problem
    framework, rows = problem.framework, [_fields(one) for one in found.rows]
    axes = [axis for axis in shown_axes(problem) if any((row.get(axis) or 1) > 1 for row in rows)]
    label, shown = shown_rows(rows, framework, axes)
    columns = {
        **TEXT_COLUMNS,
        "gpus": count("gpus", "GPUs", "How many there are."),
        "layout": replace(COLUMNS["grid"], label=label),
        "step": TEXT_COLUMNS["iteration_s"],
        **memory_columns(rows[0]["memory_limit_bytes"]),
        "precision": COLUMNS["precision"],
        "took": words("took", "what it takes", "What takes less memory than the framework does by itself.", 40),
    }
    has = {"tight": any(row["tight"] for row in shown), "precision": bool(problem.formats)}
    chosen = names or [name for name in _NAMES if has.get(name, True)]
    workload = problem.workload
    formats = ", ".join(problem.formats or (workload.precision,))
    title = (
        f"{problem.title} on {machine_words(problem)}{with_framework(framework)}, {workload.batch_words} in "
        f"{formats}{optimizer_words(framework)}: the fewest GPUs, in part of a node or whole nodes."
    )
    table = Table(columns, shown, chosen, _FIELDS, [*_notes(found)], title=title)
    table = table if names else table.fitted(("tokens_per_s_per_gpu", "micro_batch", "mfu"))
    return explained(table, framework, axes)


def _fields(size: Size) -> Json:
    entry = size.ranked[0]
    return {
        **entry_fields(entry),
        "gpus": size.inputs.problem.gpus,
        "room": fit_json(entry)["room"],
        "memory_limit_bytes": entry.memory_limit_bytes,
        "took": ", ".join(taken.title for taken in size.took) or "nothing",
        "arguments": " ".join(taken.arguments for taken in size.took),
        "needed": size.needed.titles if size.needed else "",
    }


def sizes_remarks(found: Sizes) -> list[str]:
    """What each number takes, in sentences, as a page has them, and what stands below the table."""
    first, *more = [
        (counted(row.inputs.problem.gpus, "GPU"), ", ".join(taken.title for taken in row.took) or "nothing")
        for row in found.rows
    ]
    said = [f"The fewest: {first[0]}. What it takes: {first[1]}.", *(f"On {gpus}: {took}." for gpus, took in more)]
    return [*said, *_notes(found)]


def _notes(found: Sizes) -> Iterator[str]:
    """Arguments of what is taken, which less would do, from where on it takes none, and sizes that the batch rules
    out."""
    arguments = {taken.title: taken.arguments for row in found.rows for taken in row.took}
    yield from (f"{title}: {words}" for title, words in arguments.items())
    for row in found.rows:
        if row.needed and row.needed != row.taken:
            gpus = counted(row.inputs.problem.gpus, "GPU")
            yield f"On {gpus}, {row.needed.titles} alone would do; with the others a step is shorter."
    if found.rows[0].taken and found.without:
        yield f"The fewest GPUs without these options, recompute aside: {found.without:,}."
    if one := found.offloaded:
        host = found.rows[0].inputs.problem.machine.host
        yield (
            f"{counted(one.gpus, 'GPU')} would do with {one.title}: {show_seconds(one.iteration_s)} a step, "
            f"{show_seconds(one.added_s)} of them for that, {show_bytes(one.host_bytes)} on each host"
            f"{'' if host else ' (whose link and Adam are assumed)'}: {one.arguments}"
        )
    if found.other_modes:
        several = (f"{gpus:,} with --tune {mode}" for mode, gpus in found.other_modes.items())
        yield f"The fewest GPUs otherwise: {', '.join(several)}."
    if found.of_batch:
        fewer, batch = found.of_batch[0]
        yield f"{counted(fewer, 'GPU')} would do with --batch {batch}; the batch is what rules them out."


def sizes_json(found: Sizes) -> Json:
    """Everything, for a key of `axonn-tune/ranking/1`."""
    return {
        "gpus": found.rows[0].inputs.problem.gpus,
        "sizes": [
            {
                "gpus": row.inputs.problem.gpus,
                "fit": fit_json(row.ranked[0]),
                "took": [taken._asdict() for taken in row.took],
                "needed": [saver.title for saver in row.needed.savers] if row.needed else [],
                "options": row.taken.words if row.taken else "",
                "config": entry_fields(row.ranked[0]),
            }
            for row in found.rows
        ],
        "ruled_out_by_batch": [{"gpus": gpus, "batch": batch} for gpus, batch in found.of_batch],
        "without_savers": found.without,
        "with_offload": found.offloaded and found.offloaded._asdict(),
        **({"other_modes": dict(found.other_modes)} if found.other_modes else {}),
    }
