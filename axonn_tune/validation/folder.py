"""What one run left in its folder: the summary of all ranks, each rank's steps, and how it differs from the program."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from axonn_tune.errors import TrainingFailedError
from axonn_tune.specs.loading import load_document
from axonn_tune.specs.results import SUMMARY_NAME, RunSite, RunTimes, Summary, SummaryTerm

TermKey: TypeAlias = tuple[str, str, str, str, int]
"""Operation, axis, phase, layer, bytes."""
_DIGITS = 6


@dataclass(frozen=True)
class Outcome:
    """One run. `terms` by what they are called, `step_terms_s` each step's, in seconds."""

    times: RunTimes
    ran_on: RunSite
    warmup_steps: int
    terms: dict[TermKey, SummaryTerm]
    step_terms_s: dict[TermKey, tuple[float, ...]]


def read_outcome(directory: Path, *, began: str, load: float) -> Outcome:
    """The outcome of a run that ended well; TrainingFailedError if it left no summary."""
    path = directory / SUMMARY_NAME
    if not path.exists():
        raise TrainingFailedError(f"the run in {str(directory)!r} measured nothing: too few steps beyond the warm-up")
    summary = load_document(path, schema=Summary)
    ranks = [_steps(one) for one in sorted(directory.glob("metrics-rank*.jsonl"))]
    timed = [[step for step in steps if not step["warmup"]] for steps in ranks]
    times = RunTimes(
        began=began,
        load=load,
        step_s=summary.step_s.measured,
        compute_s=summary.compute_s.measured,
        communication_s=summary.communication_s.measured,
        exposed_communication_s=summary.exposed_communication_s.measured,
        memory_bytes=summary.memory_bytes.measured,
        steps_s=_means([[step["step_s"] for step in steps] for steps in timed]),
        losses=tuple(float(step["loss"]) for step in ranks[0]),
        gradient_norms=tuple(float(step["gradient_norm"]) for step in ranks[0]),
        differs=_differences(directory),
    )
    return Outcome(
        times,
        summary.ran_on,
        summary.warmup_steps,
        {(term.op, term.axis, term.phase, term.layer, term.bytes): term for term in summary.terms},
        _step_terms(timed),
    )


def _steps(path: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, path.read_text("utf-8").splitlines())
    return [line for line in lines if "step" in line]


def _means(by_rank: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Of each step over ranks."""
    return tuple(_rounded(fmean(step)) for step in zip(*by_rank, strict=True))


def _step_terms(timed: Sequence[Sequence[dict[str, Any]]]) -> dict[TermKey, tuple[float, ...]]:
    """Each term's time in each step, mean over ranks."""
    found: dict[TermKey, list[list[float]]] = {}
    for steps in timed:
        mine: dict[TermKey, list[float]] = {}
        for step in steps:
            for term in step["terms"]:
                key = (term["op"], term["axis"], term["phase"], term["layer"], term["bytes"])
                mine.setdefault(key, []).append(term["seconds"])
        for key, values in mine.items():
            found.setdefault(key, []).append(values)
    return {key: _means(by_rank) for key, by_rank in found.items()}


def _differences(directory: Path) -> tuple[str, ...]:
    """Every difference from the program, with how many ranks have it."""
    paths = sorted(directory.glob("differs-rank*.json"))
    counts = Counter(line for path in paths for line in json.loads(path.read_text("utf-8"))["differs"])
    return tuple(f"{line} (on {count} of the ranks)" for line, count in counts.items())


def _rounded(seconds: float) -> float:
    """As many digits as a time can have."""
    return float(f"{seconds:.{_DIGITS}g}")
