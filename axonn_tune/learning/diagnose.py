"""Comparison of a run with its prediction, and probabilities of explanations.

The uncertainty of the prediction is the learned covariance of a profile, or the prior spreads of `learning.learn`, plus
residual errors. Explanations are weighed by Bayes' rule: probability ∝ prior · likelihood,

    likelihood = N(log measured; log predicted, J C Jᵀ + diag(noise²)),    J = ∂ log(time) / ∂ log(number)

over all times of the run, each explanation with its own prediction: a number of the profile that is worse by a factor
of 1.1 to 10 (all factors equally likely by their logarithm, averaged), another configuration than was stated, or one
rank that computes longer. So ordinary uncertainty of the numbers explains ordinary gaps, without a fault.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np

from axonn_tune.cost.uncertainty import DEVIATIONS, NUDGE, Floats
from axonn_tune.errors import UsageError
from axonn_tune.frameworks.description import NATURAL_IMBALANCE
from axonn_tune.learning.evidence import OF_MODEL, WHOLE, Adjust, Sample, Setup, named_times, noise_of
from axonn_tune.learning.learn import Prior, prior_of
from axonn_tune.learning.setups import (
    Change,
    alternatives,
    captures,
    changes_of,
    most_bytes,
    possible,
    searched,
    with_step,
)
from axonn_tune.program.dimensions import logged_flops, model_flops
from axonn_tune.specs.loading import read_text
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.numbers import number_at, scaled, with_numbers
from axonn_tune.specs.workload import RECOMPUTES
from axonn_tune.units import read_number, show_seconds

PRIORS: Mapping[str, float] = {
    "nothing": 60.0,
    "oversubscribed": 60.0,
    "recompute": 5.0,
    "micro_batch": 4.0,
    "precision": 8.0,
    "overlaps": 3.0,
    "overlap": 3.0,
    "imbalance": 6.0,
    "dispatcher": 10.0,
    "routing": 3.0,
    "cuda_graphs": 3.0,
    "interleaving": 2.0,
    "rank_order": 2.0,
    "kernels": 2.0,
    "attention": 2.0,
    "sequence_parallel": 2.0,
    "distributed_optimizer": 2.0,
    "slow_network": 5.0,
    "slow_link": 2.0,
    "latency": 1.0,
    "host": 3.0,
    "straggler": 3.0,
    "throttled": 2.0,
    "shared": 2.0,
    "memory": 1.0,
    "contention": 1.0,
    "launch": 1.0,
}
"""Relative prior probabilities of faults, estimated, not measured. Most runs are as stated. Flags that are not in
effect and the inter-node network are the most frequent faults. `slow_network` is of the outermost network level,
`slow_link` of each other one, `latency` of each. `dispatcher` and `imbalance` are of models with experts."""

UNSTATED = 4.0
"""How many times as often an option differs from what was assumed of it as from what was stated: judgement, too. No run
states its token imbalance unless it forces the load balance."""

CONTRADICTED = 40.0
"""The same of a number format that was asked for where the log itself states another."""

LATE_HOST, DISPATCH_US = 4.0, 74.7
"""How many times as often the host is late with experts and without CUDA graphs: the steps of one layout of DeepSeek-V3
halved as launches and Python were removed (NVIDIA/Megatron-LM@1d9edcf8, docs/discussions). Host time of an operation
where the software has none (as of `unknown` in frameworks/software.csv), µs."""

SLOWER = np.geomspace(1.1, 10.0, 10)
BETWEEN = np.geomspace(1.1, 10.0, 46)
"""Factors that are priced, and those in between at which logarithms of prices are interpolated."""

RANK_NOISE = 0.1
"""Standard deviation of the logarithm of one rank's computation over the others', without a straggler."""

UNEXPECTED = 1e-3
"""Likelihood of a collective that a prediction does not have, and of one that it has, takes `NOTICED` of the step, and
was not sent. Collectives and their sizes are counted, not estimated, so this is small."""

NOTICED = 0.01
"""Share of a step below which a missing collective does not count."""

LAST_STEPS, FEWEST_RANKS = 32, 3
"""Steps of each rank's metrics that count, the last ones; ranks from which on one can be told from the others."""

HIGHEST_SHARE = 0.9
"""Share of the peak that no step reaches with the FLOPs that causal kernels compute: the highest MFU of
published steps is 66%."""


@dataclass(frozen=True)
class Guess:
    """Predicted measurement under one explanation: times by quantity, s.

    words: the explanation. slopes: ∂ log / ∂ number, a row for each observed time. slow_rank: computation of the
    slowest rank over the others'.
    """

    words: str
    times: Mapping[str, float]
    slopes: Floats
    slow_rank: float = 1.0


@dataclass(frozen=True)
class Hypothesis:
    """One explanation: equally likely guesses, and advice; weight: multiplies its prior."""

    kind: str
    title: str
    guesses: tuple[Guess, ...]
    advice: str = ""
    weight: float = 1.0


@dataclass(frozen=True)
class Cause:
    """An explanation after the evidence; `explains_s`: how much longer the step is than predicted if it holds.

    extreme: its number is at the end of the range that was tried.
    """

    kind: str
    title: str
    words: str
    probability: float
    explains_s: float
    advice: str
    extreme: bool = False


@dataclass(frozen=True)
class Alternative:
    """What an assumption may be instead, in words, and the step that is then predicted, s; whether the run fits it."""

    words: str
    step_s: float
    reasonable: bool


@dataclass(frozen=True)
class Assumption:
    """A column of the run that was not stated, the cell it was taken to hold, and others that change the step."""

    column: str
    taken: str
    others: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """One run against its prediction; times of `of`, s, with the prediction's 80% interval.

    learned: the interval is the uncertainty left by the runs learned from, else the profile's half-widths. assumed:
    settings that the file does not state. healthy: probability of no fault. misfit: root mean square of the deviations
    that even the nearest explanation leaves, in standard deviations; 1 where it leaves less. causes: explanations, the
    most probable first. find_changes: makes `changes`. flops_ratio: FLOPs of a step by the log's own TFLOP/s over those
    that its framework counts for this model and batch, None if unknown; counts_recompute: whether these have recompute.
    flops_s: what useful FLOPs of the step take at the peak of its number format, so that MFU is 1, s; None if unknown.
    impossible: no run is as stated, since the step took less; it then has no causes, and `healthy` is 0.
    """

    name: str
    of: str
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float
    healthy: float
    misfit: float
    causes: tuple[Cause, ...]
    find_changes: Callable[[], tuple[Change, ...]] = field(repr=False, compare=False)
    assumed: tuple[Assumption, ...] = ()
    learned: bool = False
    flops_ratio: float | None = None
    counts_recompute: bool = False
    flops_s: float | None = None
    impossible: bool = False

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """Changes of the layout that save time, the best of a search among them, which takes place when first asked."""
        return self.find_changes()

    @property
    def reasonable(self) -> bool:
        """Whether the measurement is inside the interval, and possible."""
        return not self.impossible and self.low_s <= self.measured_s <= self.high_s

    @property
    def faster(self) -> bool:
        """Whether it took less than the interval."""
        return self.measured_s < self.low_s


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


def diagnose(sample: Sample, machine: Machine, *, ranks: RankTimes | None = None) -> Diagnosis:
    """Compare a run, or collectives, with the prediction, and rank explanations; ranks: metrics per rank, if known."""
    sample = sample.narrowed(lambda same: same)
    # Ranks of several stages compute different parts of the model.
    setup = sample.setup
    staged = setup is not None and setup.layout.pipeline > 1
    observed = _Observed(sample, machine, None if staged else ranks)
    flops_s, impossible = _at_peak(observed)
    hypotheses = [] if impossible else list(_hypotheses(observed))
    causes, healthy, misfit = ((), 0.0, 1.0) if impossible else _weighed(observed, hypotheses)
    step, (least, most) = observed.total(observed.stated), observed.interval
    ratios = []
    if setup is not None and sample.flops:
        kinds = RECOMPUTES if "recompute" in sample.unstated else (setup.layout.recompute,)
        what = setup.framework, setup.model, setup.workload
        counts = [logged_flops(*what, grid=setup.layout.grid, recompute=kind) for kind in kinds]
        ratios = [sample.flops / count for count in counts if count]
    return Diagnosis(
        name=sample.name,
        of="step" if "step" in observed.rows else "all collectives",
        measured_s=observed.measured_s,
        predicted_s=step,
        low_s=step * least,
        high_s=step * most,
        healthy=healthy,
        misfit=misfit,
        causes=causes,
        find_changes=lambda: (
            changes_of(setup, lambda one: observed.price(observed.known, one)["step"], ranking=searched(setup))
            if setup and not impossible
            else ()
        ),
        assumed=tuple(_assumptions(observed, hypotheses)),
        learned=machine.learned is not None,
        flops_ratio=min(ratios, key=lambda ratio: abs(math.log(ratio)), default=None),
        counts_recompute=bool(sample.framework.logged and sample.framework.logged.repeated),
        flops_s=flops_s,
        impossible=impossible,
    )


def _at_peak(observed: _Observed) -> tuple[float | None, bool]:
    """What useful FLOPs of the step take at the peak, s, None without a step; whether none can take what was measured.

    MFU counts keys that kernels may skip, so by itself it may be above 1 for long sequences.
    """
    setup = observed.setup
    if setup is None or "step" not in observed.rows:
        return None, False
    peak = setup.layout.grid.world * setup.machine.accelerator.peak_flops_per_s(setup.workload.precision)
    flops_s, seen_s = (model_flops(setup.model, setup.workload, masked=masked) / peak for masked in (True, False))
    return flops_s, observed.measured_s < min(flops_s, seen_s / HIGHEST_SHARE)


_KINDS = {
    "mbs": "micro_batch",
    "vpp": "interleaving",
    "recompute": "recompute",
    "seq_parallel": "sequence_parallel",
    "zero_stage": "distributed_optimizer",
    "routing": "routing",
    "dispatcher": "dispatcher",
    "precision": "precision",
}
"""Columns that a row may leave blank, and the hypothesis of another value. Attention has none: frameworks that have it
fused seldom run without."""


def _assumptions(observed: _Observed, hypotheses: Sequence[Hypothesis]) -> Iterator[Assumption]:
    """Settings that the file does not state, with other values that change the step."""
    (least, most), setup = observed.interval, observed.setup
    if setup is None:
        return
    one, step = setup.layout, setup.framework.step
    taken = {
        "mbs": str(one.micro_batch),
        "vpp": str(one.chunks),
        "recompute": one.recompute,
        "seq_parallel": str(int(step.sequence_parallel)),
        "zero_stage": str(3 if one.z > 1 else 2 if step.shard_gradients else int(step.distributed_optimizer)),
        "attn": "flash" if step.fused_attention else "unfused",
        "routing": "natural" if step.imbalance == NATURAL_IMBALANCE else "forced",
        "dispatcher": step.dispatcher,
    }
    for column in filter(taken.__contains__, observed.sample.unstated):
        others = (
            Alternative(re.sub(", not [^,]+", "", guess.words), step_s, least <= observed.measured_s / step_s <= most)
            for hypothesis in hypotheses
            if hypothesis.kind == _KINDS.get(column)
            for guess in hypothesis.guesses
            if (step_s := guess.times["step"])
        )
        yield Assumption(column, taken[column], tuple(others))


# Observations and their predictions.


class _Observed:
    """The times of one run, with their covariance by what is known of the machine."""

    def __init__(self, sample: Sample, machine: Machine, ranks: RankTimes | None) -> None:
        self.sample, self.setup, self.ranks = sample, sample.setup, ranks
        times = dict(sample.seen or zip(sample.what, sample.measured_s, strict=True))
        self.rows, self.measured = tuple(times), np.log(list(times.values()))
        given = dict(zip(sample.what, sample.noise, strict=True))
        step_s = times.get("step", 0.0)
        self.noise = np.array([given.get(row) or noise_of(row, times[row], step_s=step_s) for row in self.rows])
        self.prior: Prior = prior_of(
            machine, [sample.framework], collectives=any(row not in WHOLE for row in self.rows)
        )
        self.known = self.prior.adjust(np.zeros(len(self.prior.paths)))
        learned = machine.learned
        beyond = learned.per_doubling * max(0.0, math.log2(sample.ranks / learned.ranks)) if learned else 0.0
        # The noise of a lone step has that of its model in it; in a run, step and computation share it.
        whole = np.array([float(row in WHOLE) for row in self.rows])
        of_model = learned.of_model if learned else OF_MODEL
        alone = of_model**2 - OF_MODEL**2 if len(self.rows) == 1 else of_model**2
        self.shared = beyond**2 + alone * np.outer(whole, whole)
        # What no number explains of a cluster and software on which the profile was not checked: all to its half-width.
        missing = max(0.0, (self.half_width / DEVIATIONS) ** 2 - self.spread**2)
        self.shared = self.shared + missing * np.outer(whole, whole)

    @cached_property
    def half_width(self) -> float:
        """Half of the 80% interval that every command gives this step's logarithm; 0 where only its parts have one."""
        if self.setup is None or "step" not in self.rows:
            return 0.0
        priced = self.setup.price(lambda machine: machine)
        machine = self.prior.machine if self.prior.machine.learned else self.setup.machine
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
        return named_times(used.price(adjust))

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
        residuals, covariance = self.residuals(guess)
        covariance = misfit * covariance
        normal = (
            -0.5 * residuals @ np.linalg.solve(covariance, residuals)
            - 0.5 * np.linalg.slogdet(2.0 * math.pi * covariance)[1]
        )
        missing, of_ranks = len(self.rows) - len(residuals), 0.0
        if len(self.rows) > len(WHOLE) and "step" in self.rows:
            # Collectives that a guess has and the run has not.
            least_s = NOTICED * guess.times["step"]
            missing += sum(seconds > least_s for what, seconds in guess.times.items() if what not in self.rows)
        if self.ranks is not None:
            # The slowest rank's computation over the others'.
            chance = -math.log(len(self.ranks.compute_s)) if guess.slow_rank > 1.0 else 0.0
            of_ranks = chance - 0.5 * ((self.ranks.excess - math.log(guess.slow_rank)) / RANK_NOISE) ** 2
        return float(normal) + missing * math.log(UNEXPECTED) + of_ranks

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


def _weighed(observed: _Observed, hypotheses: Sequence[Hypothesis]) -> tuple[tuple[Cause, ...], float, float]:
    """Every hypothesis with its probability, the most probable first; the probability of no fault; and the misfit.

    Where a run has many times and even the nearest guess is further off than its covariance says, all covariances are
    widened until it fits (Birge 1932), so that a misfit of the model does not select a wrong cause.
    """
    plain = Hypothesis("nothing", "", (observed.stated,))
    every = [plain, *hypotheses]
    deviations = []
    for residuals, covariance in (observed.residuals(guess) for one in every for guess in one.guesses):
        square = float(residuals @ np.linalg.solve(covariance, residuals)) / len(residuals)
        deviations.append((-len(residuals), square))
    # Of the nearest guess that knows most rows.
    left = max(1.0, min(deviations)[1])
    misfit = left if len(observed.rows) > len(WHOLE) else 1.0
    logs = [[observed.log_likelihood(guess, misfit=misfit) for guess in one.guesses] for one in every]
    weights = np.array(
        [
            math.log(one.weight * PRIORS[one.kind]) + float(np.logaddexp.reduce(found)) - math.log(len(found))
            for one, found in zip(every, logs, strict=True)
        ]
    )
    shares = np.exp(weights - np.logaddexp.reduce(weights))
    stated_s = observed.total(observed.stated)
    causes = []
    for one, found, share in zip(every[1:], logs[1:], shares[1:], strict=True):
        best = one.guesses[int(np.argmax(found))]
        explains_s = observed.total(best) - stated_s
        extreme = len(one.guesses) >= len(BETWEEN) and best is one.guesses[-1]
        causes.append(Cause(one.kind, one.title, best.words, float(share), explains_s, one.advice, extreme))
    return tuple(sorted(causes, key=lambda cause: -cause.probability)), float(shares[0]), math.sqrt(left)


# Explanations.


def _hypotheses(observed: _Observed) -> Iterator[Hypothesis]:
    """All explanations that change the prediction."""
    found = [*_worse_numbers(observed)]
    if observed.setup is not None:
        found += [
            *_other_setups(observed, observed.setup),
            _straggler(observed),
            *_imbalanced(observed, observed.setup),
        ]
    if observed.sample.ranks_per_core > 1.0:
        found.append(_oversubscribed(observed, observed.sample.ranks_per_core))
    stated = observed.logs(observed.stated.times)
    for one in found:
        apart = [float(np.nanmax(np.abs(observed.logs(guess.times) - stated))) for guess in one.guesses]
        if max(apart) > NOTICED:
            yield one


def _worse_numbers(observed: _Observed) -> Iterator[Hypothesis]:
    """A number of the profile that is worse than its uncertainty allows."""
    gloo = observed.prior.machine.launcher.backend == "gloo"
    for kind, title, signs, advised in _numbers(observed.prior.machine):
        advice = _OF_GLOO.get(advised, advised) if gloo else advised
        late, launches = observed.late_host if kind == "host" else {}, kind == "host" and observed.launches_experts
        worse = [{path: factor**sign for path, sign in signs.items()} for factor in SLOWER]
        priced = [observed.price(observed.slower(factors, stated=late)) for factors in worse]
        if launches:
            nearest = min(range(len(SLOWER)), key=lambda at: abs(priced[at]["step"] - observed.measured_s))
            advice += _captured(observed, observed.slower(worse[nearest], stated=late))
        guesses = _between(
            observed, priced, f"{{:.2g}} × {DISPATCH_US:g} µs an operation" if late else "{:.2g} times slower"
        )
        yield Hypothesis(kind, title, guesses, advice, LATE_HOST if launches else 1.0)


def _captured(observed: _Observed, late: Adjust) -> str:
    """What CUDA graphs would save of a step whose host is late."""
    setup = observed.setup
    graphs = {} if setup is None else captures(setup)
    steps = {scope: observed.price(late, one)["step"] for scope, one in graphs.items() if scope}
    if not steps:
        return ""
    scope = min(steps, key=steps.__getitem__)
    return f" With --cuda-graphs {scope} the step is predicted to take {show_seconds(steps[scope])}."


def _between(observed: _Observed, priced: Sequence[Mapping[str, float]], words: str) -> tuple[Guess, ...]:
    """Guesses at the factors `BETWEEN` from what is predicted at those of `SLOWER`; words: of a factor."""
    columns = np.array([observed.logs(times) for times in priced]).T
    between = np.array([np.interp(np.log(BETWEEN), np.log(SLOWER), column) for column in columns]).T
    found = (dict(zip(observed.rows, np.nan_to_num(np.exp(logs)).tolist(), strict=True)) for logs in between)
    return tuple(
        replace(observed.stated, words=words.format(factor), times={**observed.stated.times, **times})
        for factor, times in zip(BETWEEN, found, strict=True)
    )


def _imbalanced(observed: _Observed, setup: Setup) -> Iterator[Hypothesis]:
    """More tokens on one rank of experts than predicted, for which all others wait."""
    step = setup.framework.step
    if setup.layout.grid.expert == 1:
        return
    priced = [observed.price(observed.known, with_step(setup, imbalance=step.imbalance * factor)) for factor in SLOWER]
    guesses = _between(observed, priced, f"{{:.2g}} times that of {step.imbalance:g}")
    balanced_s = observed.price(observed.known, with_step(setup, imbalance=1.0))["step"]
    natural = step.imbalance == NATURAL_IMBALANCE
    advice = f"{_BALANCE} Balanced, the step is predicted to take {show_seconds(balanced_s)}."
    yield Hypothesis("imbalance", "token imbalance of experts", guesses, advice, UNSTATED if natural else 1.0)


_Number = tuple[str, str, Mapping[str, float], str]


def _numbers(machine: Machine) -> Iterator[_Number]:
    """Kind, title, the numbers of a profile that get worse together, with the sign of the exponent, and advice."""
    accelerator = {"accelerator.training_share": -1.0}
    memory = {"accelerator.memory_bandwidth_gb_per_s": -1.0}
    host = {f"accelerator.{name}": 1.0 for name in ("kernel_launch_us", "matmul_launch_us")}
    host |= {f"software.{key}.{name}": 1.0 for key in machine.software for name in ("operation_us", "dispatch_us")}
    calls = {"library.launch_us": 1.0} | {f"software.{key}.collective_us": 1.0 for key in machine.software}
    for tier in machine.tiers:
        kind = "slow_network" if tier is machine.tiers[-1] else "slow_link"
        rate, hop = f"tiers.{tier.name}.bandwidth_gb_per_s", f"tiers.{tier.name}.latency_us"
        yield kind, f"slow link: bandwidth of {tier.name}", {rate: -1.0}, _LINKS
        yield "latency", f"latency of {tier.name}", {hop: 1.0}, _LINKS
    yield "throttled", "sustained efficiency of GEMMs and attention (clocks, power)", accelerator, _CLOCKS
    yield (
        "shared",
        "the accelerator as a whole (shared with another process, or another one)",
        (accelerator | memory | host),
        _SHARED,
    )
    yield "memory", "memory bandwidth", memory, _CLOCKS
    yield "host", "host-bound: dispatch and launch of kernels", host, _HOST
    yield "contention", "larger compute slowdown from overlap", {"accelerator.contention": 1.0}, ""
    yield "launch", "fixed time of each collective call", calls, _LINKS


_LINKS = (
    "Measure the links with nccl-tests on these nodes (then `axonn-tune learn`), look at NCCL_DEBUG=INFO for the "
    "transport, NICs and rings in use (NCCL_IB_HCA, NCCL_SOCKET_IFNAME, NCCL_NET_GDR_LEVEL), and exclude slow nodes."
)
_CLOCKS = "Check clocks, power and temperature while it trains (nvidia-smi -q -d CLOCK,POWER,PERFORMANCE)."
_OF_GLOO = {
    _LINKS: (
        "Measure the links between the hosts (iperf3, `axonn-tune calibrate`), and look at GLOO_SOCKET_IFNAME: Gloo "
        "sends over TCP, on the interface of the host's name unless that is set."
    ),
    _CLOCKS: "Check clocks and other processes on the cores while it trains (top, turbostat).",
}
_SHARED = "Check for other processes on the accelerators and cores, and that each rank has its own cores."
_HOST = "Bind each rank to cores next to its GPU (numactl, --cpu-bind), compile, or use CUDA graphs."
_QUEUES = "Check that the flags reached every rank, and CUDA_DEVICE_MAX_CONNECTIONS=1 where the framework needs it."
_BALANCE = (
    "Log the tokens of each expert. A balancing loss or a bias of the router evens them out (--moe-aux-loss-coeff, "
    "--moe-router-enable-expert-bias); a capacity factor bounds them, and drops tokens."
)
_DISPATCH = (
    "Look for the dispatcher's kernels in a profiler trace, and compare --moe-token-dispatcher-type and the backend of "
    "flex with the arguments that the run printed."
)
_FLAGS = "Compare the arguments that the run printed with those stated here."
_STATE = "State the settings that ran, as columns of the CSV or with --fact COLUMN=VALUE."


def _straggler(observed: _Observed) -> Hypothesis:
    """One rank computes longer and all others wait for it; no collective is slower on the network."""
    stated, count, guesses = observed.stated.times, observed.sample.ranks, []
    who = "one rank" if observed.ranks is None else f"rank {observed.ranks.slowest}"
    for factor in BETWEEN:
        lost_s = (factor - 1.0) * stated["computation"]
        whole = {"step": stated["step"] + lost_s, "computation": stated["computation"] + lost_s / count}
        words = f"{who} computes {factor:.2g} times as long"
        guesses.append(replace(observed.stated, words=words, times={**stated, **whole}, slow_rank=float(factor)))
    return Hypothesis("straggler", "straggler: one rank computes longer", tuple(guesses), _SHARED)


CROWDED, KEPT_WAITING = np.geomspace(1.0, 10.0, 12), np.geomspace(1.0, 40.0, 20)
"""Factors of computation and of collectives where ranks share cores: a rank without a core keeps others waiting."""


def _oversubscribed(observed: _Observed, ranks_per_core: float) -> Hypothesis:
    """Ranks share cores: what a profile with cores of their own has takes longer, computation and collectives apart."""
    machine, guesses = observed.prior.machine, []
    by_kind = {kind: signs for kind, _, signs, _ in _numbers(machine) if kind == "shared"}
    network = {f"tiers.{tier.name}.{name}": sign for tier in machine.tiers for name, sign in _OF_TIERS}
    # Which rank waits longest for a core is chance.
    slow_rank = math.exp(max(0.0, observed.ranks.excess)) if observed.ranks else 1.0
    for factor in CROWDED:
        own = {path: factor**sign for path, sign in by_kind["shared"].items()}
        for waiting in KEPT_WAITING:
            times = observed.price(observed.slower(own | {path: waiting**sign for path, sign in network.items()}))
            words = (
                f"{ranks_per_core:.3g} ranks a core: computation {factor:.2g}, collectives {waiting:.2g} times as long"
            )
            guesses.append(replace(observed.stated, words=words, times=times, slow_rank=slow_rank))
    return Hypothesis("oversubscribed", "oversubscribed host: more ranks than cores", tuple(guesses), _CORES)


_OF_TIERS = (("bandwidth_gb_per_s", -1.0), ("latency_us", 1.0))
_CORES = "Start no more ranks than cores, or `axonn-tune calibrate` with as many ranks on this host and pass --machine."


def _other_setups(observed: _Observed, setup: Setup) -> Iterator[Hypothesis]:
    """A configuration other than stated or assumed."""
    within, open_ = most_bytes(setup), {_KINDS.get(column) for column in observed.sample.unstated}
    for (kind, title), others in alternatives(setup).items():
        guesses = tuple(
            observed.guess(words, changed) for words, changed in others if possible(changed, within_bytes=within)
        )
        advice = {"overlap": _QUEUES, "overlaps": _QUEUES, "dispatcher": _DISPATCH}.get(kind, _FLAGS)
        if guesses and kind == "precision":
            yield Hypothesis(kind, title, guesses, advice, CONTRADICTED if kind in open_ else 1.0)
        elif guesses and kind in open_:
            yield Hypothesis(kind, title.replace("than stated", "than assumed"), guesses, _STATE, UNSTATED)
        elif guesses:
            yield Hypothesis(kind, title, guesses, advice)
