"""Write docs/paper-picks.md, which compares the paper's picks with ours: `python -m benchmarks.paper_picks` (2 min).

paper_picks.md in this folder has the fixed text; every number is computed here.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from axonn_tune.cost.collectives import Term
from axonn_tune.cost.price import PricedLayout
from axonn_tune.report.output import Column, markdown_table, words
from axonn_tune.units import show_seconds
from benchmarks.paper_cells import (
    COSTS,
    RELEASED,
    Best,
    Case,
    Cell,
    by_paper,
    causes,
    cell,
    kind,
    latency_s,
    layout,
    script_fate,
    seconds,
    sent_ratio,
    sent_tie,
    step_ratio,
    step_tie,
)
from tools.pages import table, write_page

PAGE = Path(__file__).parents[1] / "docs" / "paper-picks.md"
WORDS = Path(__file__).with_name("paper_picks.md")

MODELS = ("5b", "10b", "20b", "40b", "60b", "80b", "160b", "320b", "640b")
MACHINES = ("perlmutter", "frontier")
GPUS = tuple(64 * 2**doubling for doubling in range(8))
WORTH_A_ROW = 0.01
"""Share of a layout's communication below which a collective is summed up with others."""
_GB = 1e9


def tables(cases: Sequence[Case]) -> dict[str, str]:
    """Every table by name; each machine's cells under its own."""
    found = {case: cell(case) for case in cases}
    loads = (case.problem.workload for case in cases)
    batches = dict.fromkeys(f"{one.global_batch:,} sequences of {one.sequence_length:,} tokens" for one in loads)
    cells = [one for one in found.values() if one is not None]
    return {
        "batch": ", ".join(batches),
        "finding": _finding(found),
        "summary": _summary(cells),
        "scale": _scale(cells),
        "kinds": _kinds(cells),
        "script": _script(cases),
        "traced": "\n".join(map(_traced, _telling(cells))),
        **{f"cells-{name}": _cells({c: f for c, f in found.items() if c.machine == name}) for name in MACHINES},
    }


def _summary(cells: Sequence[Cell]) -> str:
    """Agreement and what the paper's pick costs: by machine and variant, communication and step."""
    names = ("cells", "same grid", "and order", "within error", "median", "p90", "worst")
    rows = []
    for machine in dict.fromkeys(one.case.machine for one in cells):
        for cost in COSTS:
            pairs = [(one, one.picks[cost]) for one in cells if one.case.machine == machine and cost in one.picks]
            rows += [[machine, f"`{cost}`", *row] for row in _summary_rows(pairs)]
    return table(["machine", "`--cost`", "of"], names, rows)


def _summary_rows(pairs: Sequence[tuple[Cell, Best]]) -> Iterator[list[str]]:
    """One row for communication, one for the step; none without cells."""
    measures = (("communication", "sent", sent_ratio, sent_tie), ("step", "step", step_ratio, step_tie))
    for what, which, ratio, tie in measures if pairs else ():
        both = [(getattr(pick, which), getattr(one.ours, which)) for one, pick in pairs]
        counts = (
            sum(theirs.grid.sizes == ours.grid.sizes for theirs, ours in both),
            sum(layout(theirs) == layout(ours) for theirs, ours in both),
            sum(tie(*pair) for pair in pairs),
        )
        shares = [f"{count} ({count / len(pairs):.0%})" for count in counts]
        yield [what, str(len(pairs)), *shares, *_spread([ratio(*pair) for pair in pairs])]


def _spread(ratios: Sequence[float]) -> list[str]:
    """Median, 90th percentile and worst."""
    return [_times(float(np.quantile(ratios, at))) for at in (0.5, 0.9, 1.0)]


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×"


def _scale(cells: Sequence[Cell]) -> str:
    """How much worse the pick is as GPUs grow in number."""
    columns = ("cells", "median", "worst", "step median", "step worst")
    rows = []
    for gpus in sorted({one.case.gpus for one in cells}):
        row = [f"{gpus:,}"]
        for machine in MACHINES:
            pairs = [pair for pair in _released(cells) if (pair[0].case.machine, pair[0].case.gpus) == (machine, gpus)]
            row += [str(len(pairs)), *(_middle_and_worst(pairs) if pairs else ["-"] * 4)]
        rows.append(row)
    return table([], ["GPUs", *(f"{machine}: {column}" for machine in MACHINES for column in columns)], rows)


def _released(cells: Sequence[Cell]) -> list[tuple[Cell, Best]]:
    """Cells with the pick of the authors' script."""
    return [(one, one.picks[RELEASED]) for one in cells if RELEASED in one.picks]


def _middle_and_worst(pairs: Sequence[tuple[Cell, Best]]) -> list[str]:
    spreads = [_spread([ratio(*pair) for pair in pairs]) for ratio in (sent_ratio, step_ratio)]
    return [cell for median, _, worst in spreads for cell in (median, worst)]


def _kinds(cells: Sequence[Cell]) -> str:
    """Which picks differ in which way, and what is behind it."""
    ratios = ("median", "worst", "step median", "step worst", "best order", "bytes", "rate", "latency", "micro-batches")
    groups: dict[str, list[tuple[Cell, Best]]] = {}
    for one, pick in _released(cells):
        groups.setdefault(kind(pick.sent, one.ours.sent), []).append((one, pick))
    rows = []
    for name, pairs in sorted(groups.items(), key=lambda group: -len(group[1])):
        counts = [str(sum(one.case.machine == machine for one, _ in pairs)) for machine in MACHINES]
        # Communication over ours if the paper's grid could have its axes in the best order.
        least = [
            seconds(one.reordered.communication_s) / seconds(one.ours.sent.communication_s)
            for one, _ in pairs
            if one.reordered
        ]
        traced = np.median([list(causes(pick.sent, one.ours.sent)) for one, pick in pairs], axis=0)
        medians = map(_times, (float(np.median(least)), *traced))
        rows.append([name, *counts, *_middle_and_worst(pairs), *medians])
    return table(["the paper's grid has"], [*MACHINES, *ratios], rows)


def _finding(found: Mapping[Case, Cell | None]) -> str:
    """What the tables come to, in a few sentences."""
    pairs = _released([one for one in found.values() if one is not None])
    other = [(pick.sent, one.ours.sent) for one, pick in pairs if pick.sent.grid.sizes != one.ours.sent.grid.sizes]
    more_z = sum(theirs.z > ours.z for theirs, ours in other)
    late = sum(
        2 * (latency_s(theirs) - latency_s(ours)) > seconds(theirs.communication_s) - seconds(ours.communication_s)
        for theirs, ours in other
    )
    again = sum((theirs.accumulation or 1) > (ours.accumulation or 1) for theirs, ours in other)
    empty = sum(one is None for one in found.values())
    return _wrapped(
        f"Of {len(found)} cells, {empty} have no grid that fits into memory, and in {len(pairs) - len(other)} both "
        f"models pick the same grid by communication. In {more_z} of the other {len(other)} the paper's pick has more "
        f"z. In {late} of them most of its additional communication time is latency; in {again} it needs more "
        f"micro-batches per step. {_margin(pairs)}"
    )


def _margin(pairs: Sequence[tuple[Cell, Best]]) -> str:
    """How far apart both picks are by the paper's own model, where its table has a bandwidth for ours."""
    both = [(by_paper(pick.sent, one.case), by_paper(one.ours.sent, one.case)) for one, pick in pairs]
    ratios = [
        seconds(ours.communication_s) / seconds(theirs.communication_s) for theirs, ours in both if theirs and ours
    ]
    if not ratios:
        return ""
    return (
        "By the paper's own model, our pick's communication takes "
        f"{_times(float(np.median(ratios)))} as long as its pick's in the median, {_times(max(ratios))} at worst."
    )


def _wrapped(text: str) -> str:
    """A paragraph in lines as long as those of the fixed words."""
    return textwrap.fill(text, width=120, break_long_words=False, break_on_hyphens=False)


def _script(cases: Sequence[Case]) -> str:
    fates = {"fits": "fits", "memory": "too large", "divisibility": "does not divide", "none": "nothing to search"}
    rows = []
    for machine in dict.fromkeys(case.machine for case in cases):
        found = [script_fate(case) for case in cases if case.machine == machine]
        rows.append([machine, str(len(found)), *(str(found.count(fate)) for fate in fates)])
    return table(["machine"], ["cells", *fates.values()], rows)


def _cells(found: Mapping[Case, Cell | None]) -> str:
    """One row for each case of a machine."""
    names = ("paper's pick", "ours by communication", "ours by step", "`paper`, where it differs")
    headings = [words("", "model"), Column("", "GPUs"), *(words("", name) for name in names[:3])]
    headings += [Column("", "communication"), Column("", "step"), words("", names[3])]
    return markdown_table(headings, [[c.model, f"{c.gpus:,}", *_cell_row(one)] for c, one in found.items()])


def _cell_row(found: Cell | None) -> list[str]:
    if found is None:
        return ["nothing fits into memory", *["-"] * 4, ""]
    ours = [layout(found.ours.sent), layout(found.ours.step)]
    if RELEASED not in found.picks:
        return ["no bandwidth in its table", *ours, "-", "-", ""]
    pick = found.picks[RELEASED]
    theirs = layout(pick.sent)
    ours = ["the same" if name == theirs else name for name in ours]
    return [theirs, *ours, _times(sent_ratio(found, pick)), _times(step_ratio(found, pick)), _published(found, theirs)]


def _published(found: Cell, released: str) -> str:
    """The pick of the paper's equations with both ratios, unless it is the script's."""
    pick = found.picks.get("paper")
    if pick is None or layout(pick.sent) == released:
        return ""
    return f"{layout(pick.sent)} ({_times(sent_ratio(found, pick))}, {_times(step_ratio(found, pick))})"


def _telling(cells: Sequence[Cell]) -> list[Cell]:
    """The paper's own case; of each machine where its pick makes the step longest; where its order costs most."""
    pairs = _released(cells)
    own = [pair for pair in pairs if pair[0].case == Case("80b", "perlmutter", 1024)]
    for machine in MACHINES:
        there = [pair for pair in pairs if pair[0].case.machine == machine]
        own += [max(there, key=lambda pair: step_ratio(*pair))] if there else []
    turned = max(pairs, key=lambda pair: _order_costs(*pair))
    own += [turned] if _order_costs(*turned) > 1.0 else []
    return list({one.case: one for one, _ in own}.values())


def _order_costs(found: Cell, pick: Best) -> float:
    """Communication of a pick over that of the same grid in the best order of its axes."""
    return seconds(pick.sent.communication_s) / seconds((found.reordered or pick.sent).communication_s)


def _traced(found: Cell) -> str:
    """One cell, collective by collective: both layouts, priced by both models."""
    pick, case = found.picks[RELEASED], found.case
    whose = {"the paper's": pick.step, "ours": found.ours.step}
    numbers = ["ranks", *(f"paper: {name}" for name in ("GB", "GB/s", "s"))]
    numbers += [f"ours: {name}" for name in ("calls", "GB", "GB/s", "s of bytes", "s of latency", "s exposed")]
    rows = [row for name, entry in whose.items() for row in _traced_rows(name, entry, case)]
    stories = " ".join(_story(name, entry, case) for name, entry in whose.items())
    title = f"**{case.model} on {case.gpus:,} GPUs of {case.machine}**, step {_times(step_ratio(found, pick))}."
    return f"{_wrapped(f'{title} {stories}')}\n\n{table(['pick', 'collective'], numbers, rows)}"


def _story(name: str, entry: PricedLayout, case: Case) -> str:
    """A layout in words, with what both models make of it."""
    theirs = by_paper(entry, case)
    paper = show_seconds(seconds(theirs.communication_s)) if theirs else "nothing, for want of a bandwidth,"
    times = (entry.iteration_s, entry.compute_s, entry.exposed_communication_s, entry.communication_s, latency_s(entry))
    step, computing, waiting, sent, late = (show_seconds(seconds(time_s)) for time_s in times)
    return (
        f"{name.capitalize()}, {layout(entry)} (micro-batch {entry.micro_batch}, {entry.accumulation} to a step, "
        f"recompute {entry.recompute}): a step of {step}, of which computation {computing} and exposed communication "
        f"{waiting}; communication {sent}, of which latency {late}; the paper's model says {paper} for this grid and "
        "order."
    )


def _traced_rows(name: str, entry: PricedLayout, case: Case) -> Iterator[list[str]]:
    """A row for each collective and axis that matters to either model, then one for all others."""
    paper = by_paper(entry, case)
    ours, theirs = _grouped(entry.terms), _grouped(paper.terms if paper else ())
    total_s = seconds(entry.communication_s)
    large = [
        key for key, terms in ours.items() if key in theirs or sum(t.seconds for t in terms) > WORTH_A_ROW * total_s
    ]
    for op, axis in large:
        terms = ours[op, axis]
        yield [
            name,
            f"{op} {axis}",
            f"{terms[0].group:,}",
            *_paper_cells(theirs.get((op, axis), [])),
            *_our_cells(terms),
        ]
    rest = [term for key, terms in ours.items() if key not in large for term in terms]
    if rest:
        yield [name, "others", "", "", "", "", *_our_cells(rest)]


def _grouped(terms: Sequence[Term]) -> dict[tuple[str, str], list[Term]]:
    """Terms by collective and axis."""
    groups: dict[tuple[str, str], list[Term]] = {}
    for term in terms:
        groups.setdefault((term.op, term.axis), []).append(term)
    return groups


def _paper_cells(terms: Sequence[Term]) -> list[str]:
    if not terms:
        return ["", "", ""]
    size, time_s = sum(term.count * term.bytes for term in terms), sum(term.seconds for term in terms)
    return [f"{size / _GB:,.1f}", f"{size / time_s / _GB:,.1f}", f"{time_s:,.2f}"]


def _our_cells(terms: Sequence[Term]) -> list[str]:
    size, time_s = sum(term.count * term.bytes for term in terms), sum(term.seconds for term in terms)
    late_s = sum(term.count * term.line.latency_s for term in terms)
    calls, waiting_s = sum(term.count for term in terms), sum(term.exposed_s or 0.0 for term in terms)
    rate = size / (time_s - late_s) / _GB
    moving_s = time_s - late_s
    return [f"{calls:,}", f"{size / _GB:,.1f}", f"{rate:,.1f}", *(f"{s:,.2f}" for s in (moving_s, late_s, waiting_s))]


def main() -> int:
    """Write the page."""
    cases = [Case(model, machine, gpus) for machine in MACHINES for model in MODELS for gpus in GPUS]
    write_page(PAGE, WORDS, tables(cases))
    return 0


if __name__ == "__main__":
    sys.exit(main())
