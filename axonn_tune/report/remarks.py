"""What to know about a ranking besides the numbers: why the first is first, ties, what was rejected."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from axonn_tune.grid import AXES
from axonn_tune.ranking.entries import Entry, TermEntry
from axonn_tune.ranking.results import Results
from axonn_tune.units import counted, show_seconds

_MOST_DIFFERENCES = 3
_WORTH_SAYING = 0.01
"""Share of a step that another configuration must save to be named."""
_RANKED_BY = {
    "communication": "communication of a step, hidden or not",
    "exposed": "exposed communication of a step",
    "iteration": "time of a whole step",
}
_OURS = "alpha-beta"
_SAME_GRID = "for the fastest candidate of the same grid and order"
_METRICS = {
    "communication": ("communication", "communication_s"),
    "exposed": ("exposed communication", "exposed_communication_s"),
    "iteration": ("time a step", "iteration_s"),
}


@dataclass(frozen=True)
class Difference:
    """How much less (negative: more) time the first spends in one part of the step than the second."""

    less_s: float
    what: str

    def __str__(self) -> str:
        return f"{show_seconds(abs(self.less_s))} {'less' if self.less_s > 0 else 'more'} {self.what}"


def remarks(results: Results) -> list[str]:
    """Sentences to print below a table, one each."""
    said = [
        priced(results),
        why_first(results),
        ties(results),
        shortest_step(results),
        rejected(results),
        searched(results),
    ]
    return [sentence for sentence in said if sentence]


def priced(results: Results) -> str:
    """What was priced, and what it is ranked by."""
    problem, cost = results.inputs.problem, results.ranked.cost
    workload, machine = problem.workload, problem.machine
    sequences, tokens = counted(workload.global_batch, "sequence"), counted(workload.sequence_length, "token")
    said = (
        f"{problem.model.name} on {problem.gpus:,} × {machine.name} ({machine.accelerator.name}), "
        f"{sequences} of {tokens} in {workload.precision}; ranked by {_RANKED_BY[problem.rank_by]}"
    )
    if cost == _OURS:
        return f"{said}."
    return f"{said}, as --cost {cost} has it. Exposed, step, memory: by {_OURS}, {_SAME_GRID}."


def why_first(results: Results) -> str:
    """Where the first of the ranking spends less than the second."""
    ranked = results.ranked
    if len(ranked) < 2:
        return "Only one configuration is feasible." if len(ranked) else ""
    first, second = (ranked.entry(position, terms=True) for position in (0, 1))
    rank_by = results.inputs.problem.rank_by
    name, attribute = _METRICS[rank_by]
    less_s = getattr(second, attribute) - getattr(first, attribute)
    if less_s == 0.0:
        return f"#1 and #2 take the same {name}; the shorter step, then less memory decides."
    found = sorted(_differences(first, second, rank_by=rank_by), key=lambda difference: -abs(difference.less_s))
    parts = [str(difference) for difference in found[:_MOST_DIFFERENCES] if difference.less_s]
    return f"#1 beats #2 by {show_seconds(less_s)} of {name}: {', '.join(parts)}."


def _differences(first: Entry, second: Entry, *, rank_by: str) -> Iterator[Difference]:
    exposed = rank_by != "communication"
    ours, theirs = (_by_axis(entry.terms, exposed=exposed) for entry in (first, second))
    groups = [{(term.op, term.axis): f"{term.group} ranks" for term in entry.terms} for entry in (first, second)]
    waiting = "waiting for " if exposed else "in "
    for key in {**ours, **theirs}:
        here, there = groups[0].get(key), groups[1].get(key)
        sizes = here or f"{there} there"
        if here and there and here != there:
            sizes = f"{here} against {there}"
        op, axis = key
        yield Difference(theirs.get(key, 0.0) - ours.get(key, 0.0), f"{waiting}{op} over {axis} ({sizes})")
    if rank_by == "iteration" and first.compute_s is not None and second.compute_s is not None:
        yield Difference(second.compute_s - first.compute_s, "computing")


def _by_axis(terms: tuple[TermEntry, ...], *, exposed: bool) -> dict[tuple[str, str], float]:
    """Seconds by collective and axis."""
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for term in terms:
        sums[term.op, term.axis] += (term.exposed_s or 0.0) if exposed else term.seconds
    return sums


def ties(results: Results) -> str:
    """How many the prediction cannot tell apart from the first."""
    count = results.ranked.ties
    if count < 2:
        return ""
    uncertainty = results.inputs.machine.document.uncertainty
    known = f"communication is predicted to ±{uncertainty.communication:.0%}"
    if results.inputs.problem.rank_by == "iteration":
        known += f", computation to ±{uncertainty.compute:.0%}"
    return f"Ranks 1 to {count} are ties: {known}. Measuring the first {count} settles which is best."


def shortest_step(results: Results) -> str:
    """Which candidate has the shortest step, if it is clearly shorter than that of the first of the ranking."""
    problem, ranked = results.inputs.problem, results.ranked
    best = ranked.fastest() if len(ranked) and problem.rank_by != "iteration" else None
    first_s = ranked.entry(0, terms=False).iteration_s if best else None
    if best is None or best.iteration_s is None or not first_s:
        return ""
    gain = 1.0 - best.iteration_s / first_s
    if gain < _WORTH_SAYING:
        return ""
    cost = "" if ranked.cost == _OURS else f"--cost {_OURS} "
    return (
        f"The shortest step is another: {show_seconds(best.iteration_s)} ({gain:.0%} less than #1's "
        f"{show_seconds(first_s)}) with {_configuration(best)}: {cost}--rank-by iteration ranks by it."
    )


def _configuration(entry: Entry) -> str:
    """`x=1 y=1 z=64 data=4, order z,data, micro-batch 2, recompute none`."""
    sizes = " ".join(f"{axis}={size}" for axis, size in zip(AXES, entry.sizes, strict=True))
    order = [f"order {','.join(entry.wide_order)}"] if len(entry.wide_order) > 1 else []
    return ", ".join([sizes, *order, f"micro-batch {entry.micro_batch}", f"recompute {entry.recompute}"])


def rejected(results: Results) -> str:
    """How many grids were rejected, and for which constraints."""
    found = results.ranked.searched
    left_out = found.grids - len(results.ranked.ranks())
    if not left_out:
        return "The only grid is feasible." if found.grids == 1 else f"All {found.grids:,} grids are feasible."
    reasons = ", ".join(f"{name} {count}" for name, count in found.rejected.items())
    several = " (a grid can break several)" if sum(found.rejected.values()) > left_out else ""
    of, are, them = counted(found.grids, "grid"), *(("is", "it") if left_out == 1 else ("are", "them"))
    return f"{left_out:,} of {of} {are} rejected: {reasons}{several}; --all lists {them}."


def searched(results: Results) -> str:
    """How much was priced, in what time."""
    found = results.ranked.searched
    fit = "fits and was" if found.feasible == 1 else "fit and were"
    of = counted(found.candidates, "candidate")
    return f"{found.feasible:,} of {of} {fit} priced, in {show_seconds(found.seconds)}."
