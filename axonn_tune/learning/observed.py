"""The measured times of one run, or of one run and the same on fewer GPUs, with their covariance and likelihood.

The uncertainty of the prediction is the learned covariance of a profile, or the prior spreads of `learning.learn`, plus
residual errors, which the runs share.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np

from axonn_tune.cost.price import Detail
from axonn_tune.cost.uncertainty import DEVIATIONS, NUDGE
from axonn_tune.errors import UsageError
from axonn_tune.learning.evidence import OF_MODEL, RUN_NOISE, WHOLE, Adjust, Sample, Setup, named_times, noise_of
from axonn_tune.learning.learn import Prior, prior_of
from axonn_tune.learning.setups import possible
from axonn_tune.program.operations import Floats
from axonn_tune.specs.loading import read_text
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.numbers import number_at, scaled, with_numbers
from axonn_tune.units import read_number

DISPATCH_US = 74.7
"""Host time of an operation where the software has none (as of `unknown` in frameworks/software.csv), µs."""

RANK_NOISE = 0.1
"""Standard deviation of the logarithm of one rank's computation over the others', without a straggler."""

UNEXPECTED = 1e-3
"""Likelihood of a collective that a prediction does not have, and of one that it has, takes `NOTICED` of the step, and
was not sent. Collectives and their sizes are counted, not estimated, so this is small."""

NOTICED = 0.01
"""Share of a step below which a missing collective does not count."""

LAST_STEPS, FEWEST_RANKS = 32, 3
"""Steps of each rank's metrics that count, the last ones; ranks from which on one can be told from the others."""


BASELINE = "baseline"
"""The step of the same run on fewer GPUs."""


def _own_noise(sample: Sample) -> float:
    """Noise of a step without the error that all layouts of a model share."""
    noise = dict(zip(sample.what, sample.noise, strict=True))["step"]
    return math.sqrt(max(RUN_NOISE**2, noise**2 - OF_MODEL**2))


@dataclass(frozen=True)
class Guess:
    """Predicted measurement under one explanation: times by quantity, s.

    words: the explanation. slopes: ∂ log / ∂ number, a row for each observed time. slow_rank: computation of the
    slowest rank over the others'. chance: how probable it is beside the other guesses of its explanation.
    """

    words: str
    times: Mapping[str, float]
    slopes: Floats
    slow_rank: float = 1.0
    chance: float = 1.0


@dataclass(frozen=True)
class RankTimes:
    """Computation of each rank, median over steps, s."""

    compute_s: tuple[float, ...]

    @property
    def slowest(self) -> int:
        """The rank that computes longest."""
        return int(np.argmax(self.compute_s))

    @property
    def excess(self) -> float:
        """Logarithm of the computation of that rank over the others' median."""
        others = [seconds for rank, seconds in enumerate(self.compute_s) if rank != self.slowest]
        return math.log(self.compute_s[self.slowest] / median(others))


def read_rank_times(folder: Path) -> RankTimes | None:
    """Of a run's folder; None where ranks were not timed, or are too few to compare. UsageError for lines not read."""
    named = [(path, re.fullmatch(r"metrics-rank(\d+)", path.stem)) for path in folder.glob("metrics-rank*.jsonl")]
    paths = {int(found[1]): path for path, found in named if found}
    known: dict[int, float] = {}
    for rank, path in sorted(paths.items()):
        try:
            lines = [json.loads(line) for line in read_text(path).splitlines() if line.strip()]
            timed = [one["compute_s"] for one in lines if one.get("compute_s") and not one.get("warmup")]
            found = [read_number(seconds, least=1e-9, most=1e9) for seconds in timed]
        except (ValueError, AttributeError, TypeError) as error:
            raise UsageError(f"cannot read {path}: {error}") from error
        known |= {rank: median(found[-LAST_STEPS:])} if found else {}
    return None if len(known) < max(FEWEST_RANKS, len(paths)) else RankTimes(tuple(known.values()))


class Observed:
    """The times of one run, with their covariance by what is known of the machine."""

    def __init__(self, sample: Sample, machine: Machine, ranks: RankTimes | None, baseline: Sample | None) -> None:
        self.sample, self.setup, self.ranks, self.baseline = sample, sample.setup, ranks, baseline
        times = dict(sample.seen or zip(sample.what, sample.measured_s, strict=True))
        given = dict(zip(sample.what, sample.noise, strict=True))
        if baseline is not None:
            # The error that a lone step has of its model is here that of both.
            given = {"step": _own_noise(sample), BASELINE: _own_noise(baseline)}
            times = {"step": times["step"], BASELINE: baseline.seen["step"]}
        self.rows, self.measured = tuple(times), np.log(list(times.values()))
        step_s = times.get("step", 0.0)
        self.noise = np.array([given.get(row) or noise_of(row, times[row], step_s=step_s) for row in self.rows])
        self.prior: Prior = prior_of(
            machine, [sample.framework], collectives=any(row not in WHOLE for row in self.rows)
        )
        self.known = self.prior.adjust(np.zeros(len(self.prior.paths)))
        learned = machine.learned
        beyond = learned.per_doubling * max(0.0, math.log2(sample.ranks / learned.ranks)) if learned else 0.0
        # The noise of a lone step has that of its model in it; in a run, step and computation share it.
        whole = np.array([float(row in (*WHOLE, BASELINE)) for row in self.rows])
        of_model = learned.of_model if learned else OF_MODEL
        alone = of_model**2 - OF_MODEL**2 if len(self.rows) == 1 else of_model**2
        self.shared = beyond**2 + alone * np.outer(whole, whole)
        # What no number explains of a cluster and software on which the profile was not checked: all to its half-width.
        missing = max(0.0, (self.half_width / DEVIATIONS) ** 2 - self.spread**2)
        self.shared = self.shared + missing * np.outer(whole, whole)

    @cached_property
    def half_width(self) -> float:
        """Half of the 80% interval that every command gives this step's logarithm; 0 where only its parts have one."""
        return self.half_width_of(self.setup) if self.setup is not None and "step" in self.rows else 0.0

    def half_width_of(self, setup: Setup) -> float:
        """The same of another run on this machine."""
        priced = setup.price(lambda machine: machine)
        machine = self.prior.machine if self.prior.machine.learned else setup.machine
        return replace(priced, job=replace(priced.job, machine=machine)).half_width

    @property
    def interval(self) -> tuple[float, float]:
        """Least and most of the 80% interval over the prediction."""
        half = self.half_width or DEVIATIONS * self.spread
        return math.exp(-half), math.exp(half)

    def price(self, adjust: Adjust, setup: Setup | None = None) -> Mapping[str, float]:
        """Predicted times with the numbers under trial."""
        used = setup or self.setup
        if used is None:
            return dict(zip(self.sample.what, self.sample.price(adjust), strict=True))
        times = named_times(used.price(adjust))
        if (beside := self._beside(used)) is not None:
            times[BASELINE] = beside.price(adjust).iteration_s
        return times

    def _beside(self, changed: Setup) -> Setup | None:
        """The smaller run with what a configuration changes of this one, where it can have that; None without one."""
        base, stated = None if self.baseline is None else self.baseline.setup, self.setup
        if base is None or stated is None or changed is stated:
            return base
        of_layout = {name: getattr(changed.layout, name) for name in ("micro_batch", "recompute", "recompute_layers")}
        kept = {name: value for name, value in of_layout.items() if value != getattr(stated.layout, name)}
        workload = changed.workload.model_copy(update={"global_batch": base.workload.global_batch})
        layout = replace(base.layout, **kept)
        found = replace(base, framework=changed.framework, workload=workload, layout=layout)
        return found if possible(found, within_bytes=math.inf) else base

    @cached_property
    def _smaller(self) -> Detail | None:
        """The smaller run as stated, if there is one."""
        setup = None if self.baseline is None else self.baseline.setup
        return None if setup is None else setup.price(self.known)

    def of_one_rank(self, factor: float) -> list[tuple[dict[str, float], float]]:
        """The smaller run with and without the rank that computes so much longer, with the probability of each."""
        if self.baseline is None or (priced := self._smaller) is None:
            return [({}, 1.0)]
        share = self.baseline.ranks / self.sample.ranks
        slow_s = priced.iteration_s + (factor - 1.0) * priced.compute_s
        return [({BASELINE: slow_s}, share), ({BASELINE: priced.iteration_s}, 1.0 - share)]

    def slower(self, factors: Mapping[str, float], *, stated: Mapping[str, float] | None = None) -> Adjust:
        """The profile with some numbers multiplied, after others were stated."""
        return lambda machine: scaled(with_numbers(self.known(machine), stated or {}), factors)

    @cached_property
    def launches_experts(self) -> bool:
        """Whether the host launches the many kernels of experts one by one."""
        graphs = () if self.setup is None else self.setup.framework.step.cuda_graphs
        return self.setup is not None and self.setup.model.has_experts and not {"full", "full_iteration"} & {*graphs}

    @cached_property
    def late_host(self) -> dict[str, float]:
        """Host times of an operation that the software does not have, by path, where experts have kernels to launch."""
        paths = (f"software.{key}.dispatch_us" for key in self.prior.machine.software)
        return {
            path: DISPATCH_US for path in paths if self.launches_experts and not number_at(self.prior.machine, path)
        }

    def guess(self, words: str, setup: Setup | None = None) -> Guess:
        """Prediction and slopes of a step configuration."""
        times = self.price(self.known, setup)
        if setup is not None and times == self.stated.times:
            return replace(self.stated, words=words)
        base, nudges = self.logs(times), NUDGE * np.eye(len(self.prior.paths))
        moved = [self.logs(self.price(self.prior.adjust(nudge), setup)) for nudge in nudges]
        slopes = np.nan_to_num((np.array(moved).reshape(len(nudges), len(base)) - base).T / NUDGE)
        return Guess(words, times, slopes)

    @cached_property
    def stated(self) -> Guess:
        """The prediction of the stated run."""
        return self.guess("as stated")

    def logs(self, times: Mapping[str, float]) -> Floats:
        """Logarithms in the order of the rows; nan without a prediction."""
        return np.log([times.get(row) or np.nan for row in self.rows])

    def covariance(self, slopes: Floats) -> Floats:
        """Of the logarithms of all rows."""
        return np.asarray(slopes @ self.prior.covariance @ slopes.T + np.diag(self.noise**2) + self.shared)

    def residuals(self, guess: Guess) -> tuple[Floats, Floats]:
        """log(measured / predicted) of the rows that a guess knows, and their covariance."""
        logs = self.logs(guess.times)
        known = ~np.isnan(logs)
        return (self.measured - logs)[known], self.covariance(guess.slopes)[np.ix_(known, known)]

    def log_likelihood(self, guess: Guess, *, misfit: float) -> float:
        """Of all rows; misfit: by how much their spread is more than predicted."""
        _, covariance = self.residuals(guess)
        spread = 0.5 * np.linalg.slogdet(2.0 * math.pi * misfit * covariance)[1]
        return self.fit(guess, misfit=misfit) - float(spread)

    def fit(self, guess: Guess, *, misfit: float) -> float:
        """The same but for how wide the guess is: 0 where it meets every row."""
        residuals, covariance = self.residuals(guess)
        square = 0.5 * residuals @ np.linalg.solve(misfit * covariance, residuals)
        missing, of_ranks = len(self.rows) - len(residuals), 0.0
        if len(self.rows) > len(WHOLE) and "step" in self.rows:
            # Collectives that a guess has and the run has not.
            least_s = NOTICED * guess.times["step"]
            missing += sum(seconds > least_s for what, seconds in guess.times.items() if what not in self.rows)
        if self.ranks is not None:
            # The slowest rank's computation over the others'.
            chance = -math.log(len(self.ranks.compute_s)) if guess.slow_rank > 1.0 else 0.0
            of_ranks = chance - 0.5 * ((self.ranks.excess - math.log(guess.slow_rank)) / RANK_NOISE) ** 2
        return missing * math.log(UNEXPECTED) + of_ranks - float(square)

    def total(self, guess: Guess) -> float:
        """The step, or all collectives together, s."""
        if "step" in self.rows:
            return guess.times["step"]
        return float(np.exp(self.logs(guess.times)).sum())

    @property
    def measured_s(self) -> float:
        """The same, measured."""
        times = np.exp(self.measured)
        return float(times[self.rows.index("step")] if "step" in self.rows else times.sum())

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm of the total."""
        covariance = self.covariance(self.stated.slopes)
        if "step" in self.rows:
            return math.sqrt(covariance[self.rows.index("step"), self.rows.index("step")])
        shares = np.exp(self.logs(self.stated.times)) / self.total(self.stated)
        return math.sqrt(shares @ covariance @ shares)
