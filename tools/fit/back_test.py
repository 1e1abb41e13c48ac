"""Learn each published cluster from a few of its own rows, and predict the others.

python -m tools.fit.back_test            # table by group and rows learned from, and beyond 4 and 16 times their ranks
python -m tools.fit.back_test --write    # the same, and keep it: published/back_test.csv

Every prediction starts from numbers fitted without any row of the source (published/without_source.csv, written by
tools.fit.left_out). A group is one publication, accelerator and framework with `LEAST_ROWS` rows or more; rows to learn
from are drawn among those of its smallest GPU counts. Errors are of all other rows of the group.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from statistics import fmean

import numpy as np

from axonn_tune.cost.uncertainty import DEVIATIONS, NUDGE, OF_LAYOUT, PER_DOUBLING
from axonn_tune.frameworks import software_key
from axonn_tune.learning.evidence import OF_MODEL, Sample, step_sample
from axonn_tune.learning.learn import Learning, Prior, learn, prior_of
from axonn_tune.specs.machine import Software
from axonn_tune.specs.numbers import with_numbers
from axonn_tune.specs.results import Pairs
from axonn_tune.validation.published.accuracy import FAMILY_ROWS, left_out_s
from axonn_tune.validation.published.cases import Case, profile_of
from axonn_tune.validation.quality import by_group
from tools.fit.fitting import Floats
from tools.fit.left_out import WITHOUT_SOURCE
from tools.fit.software import OF_PROFILES, cases, measured_s, write_records

RESULTS = WITHOUT_SOURCE.with_name("back_test.csv")

LEAST_ROWS = 8
LEARNED_FROM = (0, 1, 3, 5)
CHOICES = 6
"""Draws of rows to learn from, by seeds 0 and up; of none there is one."""
POOL = 2
"""Rows are drawn from the smallest GPU counts that have so many times as many."""
BEYOND = (4, 16)
MISSED = 2.0 / 0.2
"""What an 80% interval pays for each unit by which it misses (Gneiting and Raftery 2007, section 6)."""


@dataclass(frozen=True)
class Quality:
    """Rows of one group predicted by what others taught: means over draws of rows; `beyond`: ranks over theirs.

    error: mean |predicted / measured - 1|, median its median; family: the same mean by fits without the family;
    one_factor: by one factor fitted to the same rows. held: share inside 80% intervals; score: their interval score, of
    logarithms. regret: mean over families, and regret_family that by fits without the family; nan without families.
    """

    group: str
    learned_from: int
    beyond: int
    rows: float
    error: float
    median: float
    family: float
    one_factor: float
    held: float
    score: float
    regret: float
    regret_family: float


@dataclass(frozen=True)
class Group:
    """Cases of one publication, accelerator and framework, on numbers that have not seen the publication."""

    name: str
    cases: tuple[Case, ...]

    @property
    def ranks(self) -> Floats:
        """GPUs of each case."""
        return np.array([case.row.gpus for case in self.cases], dtype=float)

    @property
    def measured(self) -> Floats:
        """Logarithms of measured steps."""
        return np.log(measured_s(self.cases))


def groups() -> tuple[Group, ...]:
    """Every group with rows enough, in alphabetical order."""
    found: dict[str, list[Case]] = {}
    for case in cases():
        row = case.row
        found.setdefault(f"{row.dataset}, {row.gpu}, {row.framework}", []).append(_without_source(case))
    return tuple(Group(name, tuple(cases)) for name, cases in sorted(found.items()) if len(cases) >= LEAST_ROWS)


def _without_source(case: Case) -> Case:
    """A case on the numbers of a fit that has not seen its source."""
    values, profile, key = _numbers()[case.row.dataset], profile_of(case.row), software_key(case.framework)
    own = {f"accelerator.{number}": values[f"{profile}:{number}"] for number in OF_PROFILES.get(profile or "", ())}
    software = Software(
        **{name: values[f"{key}:{name}"] for name in Software.model_fields if f"{key}:{name}" in values}
    )
    machine = with_numbers(case.machine, own).model_copy(update={"software": {key: software}})
    return replace(case, machine=machine)


@cache
def _numbers() -> dict[str, dict[str, float]]:
    """Numbers by source that was left out, and by name."""
    found: dict[str, dict[str, float]] = {}
    with WITHOUT_SOURCE.open(encoding="utf-8", newline="") as file:
        for record in csv.DictReader(file):
            found.setdefault(record["source"], {})[record["number"]] = float(record["value"])
    return found


class BackTest:
    """One group: what it predicts of itself after some of its rows."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.samples = [step_sample(case, name=case.row.id) for case in group.cases]
        self.prior = prior_of(group.cases[0].machine, [case.framework for case in group.cases])
        self.before, self.slopes = self._sensitivities()
        without = left_out_s("family")
        self.family = np.log([without.get(case.row.id, math.nan) for case in group.cases])

    def _sensitivities(self) -> tuple[Floats, Floats]:
        """Logarithms of predictions before any evidence, and their slopes: rows by numbers."""
        none = np.zeros(len(self.prior.paths))
        narrowed = [sample.narrowed(self.prior.adjust(none)) for sample in self.samples]
        base = self._logs(narrowed, self.prior, none)
        moved = [self._logs(narrowed, self.prior, none + one) for one in NUDGE * np.eye(len(none))]
        return base, (np.array(moved) - base).T / NUDGE

    @staticmethod
    def _logs(samples: Sequence[Sample], prior: Prior, logs: Floats) -> Floats:
        adjust = prior.adjust(logs)
        return np.log([sample.price(adjust)[0] for sample in samples])

    def learned(self, rows: Sequence[int]) -> tuple[Floats, Floats]:
        """Logarithms of predictions and their standard deviations, after some rows."""
        if not len(rows):
            return self.before, self._spread(self.prior.covariance, float(self.group.ranks.min()))
        found: Learning = learn([self.samples[row] for row in rows], self.group.cases[0].machine)
        assert found.prior.paths == self.prior.paths, "one framework and machine"
        ranks = float(np.exp(np.log(self.group.ranks[list(rows)]).mean()))
        predicted = self._logs(self.samples, found.prior, found.posterior.found)
        return predicted, self._spread(found.posterior.covariance, ranks)

    def _spread(self, covariance: Floats, ranks: float) -> Floats:
        doublings = np.maximum(0.0, np.log2(self.group.ranks / ranks))
        of_numbers = np.einsum("ij,jk,ik->i", self.slopes, covariance, self.slopes)
        found: Floats = np.sqrt(of_numbers + OF_LAYOUT**2 + OF_MODEL**2 + (PER_DOUBLING * doublings) ** 2)
        return found

    def qualities(self) -> Iterator[Quality]:
        """By how many rows were learned from; and beyond the ranks of five."""
        for count in LEARNED_FROM:
            draws = [self._draw(count, seed) for seed in range(CHOICES if count else 1)]
            learned = [self.learned(rows) for rows in draws]
            yield self._mean(count, 1, draws, learned)
            for factor in BEYOND if count == max(LEARNED_FROM) else ():
                if all(self._rest(rows, factor).any() for rows in draws):
                    yield self._mean(count, factor, draws, learned)

    def _draw(self, count: int, seed: int) -> tuple[int, ...]:
        """Rows among those of the smallest GPU counts."""
        ranks, pool = self.group.ranks, np.zeros(0, dtype=int)
        for size in sorted(set(ranks)):
            pool = np.append(pool, np.flatnonzero(ranks == size))
            if len(pool) >= POOL * count:
                break
        return tuple(np.random.default_rng(seed).choice(pool, count, replace=False).tolist())

    def _rest(self, rows: Sequence[int], beyond: int) -> np.ndarray:
        """The rows to predict."""
        left = np.ones(len(self.group.cases), dtype=bool)
        left[list(rows)] = False
        if beyond > 1:
            left &= self.group.ranks > beyond * self.group.ranks[list(rows)].max()
        return left

    def _mean(
        self, count: int, beyond: int, draws: Sequence[Sequence[int]], learned: Sequence[tuple[Floats, Floats]]
    ) -> Quality:
        found = [
            self._quality(rows, predicted, spread, beyond)
            for rows, (predicted, spread) in zip(draws, learned, strict=True)
        ]
        means = {name: _mean([one[name] for one in found]) for name in found[0]}
        return Quality(group=self.group.name, learned_from=count, beyond=beyond, **means)

    def _quality(self, rows: Sequence[int], predicted: Floats, spread: Floats, beyond: int) -> dict[str, float]:
        rest, measured = self._rest(rows, beyond), self.group.measured
        errors, half = (predicted - measured)[rest], DEVIATIONS * spread[rest]
        factor = float(np.median((self.before - measured)[list(rows)])) if rows else math.nan
        return {
            "rows": float(rest.sum()),
            "error": float(np.mean(np.abs(np.expm1(errors)))),
            "median": float(np.median(np.abs(np.expm1(errors)))),
            "family": float(np.nanmean(np.abs(np.expm1((self.family - measured)[rest])))),
            "one_factor": float(np.mean(np.abs(np.expm1((self.before - measured)[rest] - factor)))),
            "held": float(np.mean(np.abs(errors) <= half)),
            "score": float(np.mean(2.0 * half + MISSED * np.maximum(0.0, np.abs(errors) - half))),
            "regret": self._regret(predicted, rest),
            "regret_family": self._regret(self.family, rest),
        }

    def _regret(self, predicted: Floats, rest: np.ndarray) -> float:
        """Mean over the families with rows enough; nan without any."""
        known = {str(at): at for at in np.flatnonzero(rest & np.isfinite(predicted))}
        pairs = Pairs(
            predicted={key: math.exp(predicted[at]) for key, at in known.items()},
            measured={key: math.exp(self.group.measured[at]) for key, at in known.items()},
        )
        families = {key: self.group.cases[at].row.family for key, at in known.items()}
        found = [one.regret for one in by_group(pairs, families, least=FAMILY_ROWS).values()]
        return fmean(found) if found else math.nan


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan


def run() -> tuple[Quality, ...]:
    """Every group."""
    with ProcessPoolExecutor() as pool:
        found = pool.map(_of_group, range(len(groups())))
        return tuple(quality for several in found for quality in several)


def _of_group(number: int) -> list[Quality]:
    return list(BackTest(groups()[number]).qualities())


def recorded() -> tuple[Quality, ...]:
    """What `--write` has kept."""
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return tuple(
            Quality(record.pop("group"), int(record.pop("learned_from")), int(record.pop("beyond")), **_floats(record))
            for record in csv.DictReader(file)
        )


def _floats(record: Mapping[str, str]) -> dict[str, float]:
    return {name: float(value) for name, value in record.items()}


def of_all(found: Sequence[Quality], *, learned_from: int, beyond: int = 1) -> Quality:
    """Means over groups."""
    own = [one for one in found if (one.learned_from, one.beyond) == (learned_from, beyond)]
    names = [each.name for each in fields(Quality) if each.name not in ("group", "learned_from", "beyond")]
    means: Mapping[str, float] = {name: _mean([getattr(one, name) for one in own]) for name in names}
    return Quality(group=f"mean of {len(own)}", learned_from=learned_from, beyond=beyond, **means)


def table(found: Sequence[Quality]) -> str:
    """A line for each group and mean."""
    lines = [f"{'':58} rows   error median family  factor  held  score  regret  family"]
    for count in LEARNED_FROM:
        for beyond in (1, *(BEYOND if count == max(LEARNED_FROM) else ())):
            own = [one for one in found if (one.learned_from, one.beyond) == (count, beyond)]
            lines.append(f"{count} rows{f', beyond {beyond} times their ranks' if beyond > 1 else ''}")
            lines += [_line(one) for one in (*own, of_all(found, learned_from=count, beyond=beyond))]
    return "\n".join(lines)


def _line(one: Quality) -> str:
    shares = "".join(f"{getattr(one, name):>7.1%}" for name in ("error", "median", "family", "one_factor", "held"))
    return f"  {one.group:<56} {one.rows:>4.0f} {shares} {one.score:>6.3f} {one.regret:>6.1%} {one.regret_family:>6.1%}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools.fit.back_test", description="Learn clusters from a few of their rows.")
    parser.add_argument("--write", action="store_true", help=f"keep the result in {RESULTS.name}")
    options = parser.parse_args(arguments)
    found = run()
    print(table(found))
    if options.write:
        write_records(RESULTS, [{name: _word(value) for name, value in asdict(one).items()} for one in found])
    return 0


def _word(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
