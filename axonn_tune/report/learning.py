"""What was learned from runs, as text: every number before and after, what it rests on, what contradicts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from axonn_tune import __version__
from axonn_tune.learning.evidence import WHOLE
from axonn_tune.learning.learn import Learning, Row, deviations
from axonn_tune.learning.reading import Evidence
from axonn_tune.report.output import Column, Json, fields_of, signed_percent, text_of, words, wrapped
from axonn_tune.units import GB, show_seconds

SCHEMA = "axonn-tune/learning/1"
_LISTED = 20
"""Rows of evidence listed, worst first."""

_NUMBERS = (
    words("path", "number"),
    Column("prior", "before", show="{:.4g}".format),
    Column("value", "now", show="{:.4g}".format),
    Column("prior_spread", "± before", show="{:.0%}".format),
    Column("spread", "± now", show="{:.0%}".format),
    words("moved_by", "moved most by"),
)
_ROWS = (
    words("name", "evidence"),
    words("what", ""),
    Column("ranks", "ranks", decimals=0),
    Column("measured_s", "measured", show=show_seconds),
    Column("bus_bytes_per_s", "busbw,\nGB/s", per=GB, decimals=1),
    Column("before", "predicted\nbefore", show=signed_percent),
    Column("after", "now", show=signed_percent),
    words("mark", ""),
)


def learning_text(learning: Learning, evidence: Evidence) -> str:
    """Numbers that moved, the evidence with its errors before and after, and what to know about both."""
    parts = [f"{learning.machine.name}, learned from {'; '.join(evidence.sources)}\n"]
    if moved := numbers_text(learning):
        parts.append(moved)
    steps = sorted(learning.rows, key=lambda row: (row.what not in WHOLE, -abs(row.after) / row.noise))
    of_bus = any(row.bus_bytes for row in steps)
    columns = [column for column in _ROWS if of_bus or column.key != "bus_bytes_per_s"]
    rows = [
        {**_row_fields(row), "mark": "contradicts" if row.contradicts else "worse" if row.worse else ""}
        for row in steps[:_LISTED]
    ]
    parts.append(text_of(columns, rows))
    if len(steps) > _LISTED:
        parts.append(f"and {len(steps) - _LISTED} more rows with smaller errors\n")
    notes = list(_notes(learning, evidence))
    parts += ["".join(f"{wrapped(note)}\n" for note in notes)] if notes else []
    return "\n".join(parts)


def learning_json(learning: Learning, evidence: Evidence) -> Json:
    """The same with all rows, by the schema `axonn-tune/learning/1`; before, after: predicted / measured - 1."""
    return {
        "schema": SCHEMA,
        "tool_version": __version__,
        "machine": learning.machine.name,
        **fields_of(evidence, ("sources", "assumed", "left_out"), assumed=[*evidence.assumed, *_unstated(evidence)]),
        "numbers": _moved(learning),
        "rows": [{**_row_fields(row), **fields_of(row, ("contradicts", "worse"))} for row in learning.rows],
        "silent": list(learning.silent),
        "far": [one.path for one in learning.far],
    }


def numbers_text(learning: Learning) -> str:
    """Numbers that moved, before and after; an empty text if none did."""
    return text_of(_NUMBERS, _moved(learning))


def _moved(learning: Learning) -> list[Json]:
    """Numbers that moved."""
    learned = learning.machine.learned
    assert learned is not None, "written by learn"
    before, spreads = learning.prior.values, np.sqrt(np.diag(learning.prior.covariance)).tolist()
    return [
        {**fields_of(one, ("path", "value", "spread")), "prior": value, "prior_spread": spread, "moved_by": movers[0]}
        for one, value, spread, movers in zip(learned.numbers, before, spreads, learning.movers, strict=True)
        if movers
    ]


def _row_fields(row: Row) -> Json:
    named = ("name", "what", "ranks", "measured_s", "bus_bytes_per_s", "before", "after")
    bus_bytes_per_s = row.bus_bytes / row.measured_s if row.bus_bytes else None
    errors = {"before": math.expm1(row.before), "after": math.expm1(row.after)}
    return fields_of(row, named, bus_bytes_per_s=bus_bytes_per_s, **errors)


def _notes(learning: Learning, evidence: Evidence) -> Iterator[str]:
    """What the evidence does not say, what contradicts it or the profile, and what was assumed."""
    if learning.silent:
        yield f"This evidence says little or nothing about {_listed(_silent(learning))}: they keep their spread."
    for one in learning.far:
        yield (
            f"{one.path} is now {deviations(one):.1f} standard deviations from what the profile had: check that the "
            "evidence is of this machine and software."
        )
    for row in learning.contradictions:
        off = math.expm1(-row.after)
        where = f"{abs(off):.0%} {'above' if off > 0.0 else 'below'}"
        yield (
            f"{row.name} ({row.what}) was measured {where} what the profile and all evidence together predict; it is "
            "down-weighted."
        )
    if worse := sorted((row for row in learning.rows if row.worse), key=lambda row: abs(row.before) - abs(row.after)):
        most = worse[0]
        yield (
            f"{len(worse)} of {len(learning.rows)} rows are predicted worse than before (marked worse), most "
            f"{most.name}, {most.what}: {signed_percent(math.expm1(most.before))} became "
            f"{signed_percent(math.expm1(most.after))}. Other rows outweigh them; large messages have the most weight."
        )
    yield from (f"Assumed: {words}" for words in (*evidence.assumed, *_unstated(evidence)))
    yield from (f"Left out: {words}" for words in evidence.left_out)


def _unstated(evidence: Evidence) -> Iterator[str]:
    """Columns that rows leave blank, once for all rows that leave the same."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for sample in evidence.samples:
        if sample.unstated:
            rows.setdefault((*sample.unstated, sample.framework.title), []).append(sample.name)
    for (*columns, title), names in rows.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield (
            f"{names[0]}{more} without {', '.join(columns)}: as {title}'s recipes have it, or the fastest that fits; "
            "state them as columns or with --fact"
        )


def _silent(learning: Learning) -> list[str]:
    """Numbers the evidence says nothing about; `tiers.network.*` where that is so of all of a section."""
    learned = learning.machine.learned
    assert learned is not None, "written by learn"
    loud = [one.path for one in learned.numbers if one.path not in learning.silent]

    def section(path: str) -> str:
        words = path.split(".")
        starts = (".".join(words[:end]) + "." for end in range(1, len(words)))
        whole = next((start for start in starts if not any(one.startswith(start) for one in loud)), None)
        return path if whole is None else f"{whole}*"

    return list(dict.fromkeys(map(section, learning.silent)))


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths[:-1]) + (f" and {paths[-1]}" if len(paths) > 1 else paths[0])
