"""Update of a profile by evidence: its numbers, their priors, posteriors and contributions of the evidence.

The prior spread of a number is its variation between clusters and software of one description
(`frameworks.SOFTWARE_SPREADS`: between software; `SPREADS`: between machines, by where the profile has the number
from). docs/accuracy.md has the errors of predictions from one to five runs with these spreads; none is fitted to a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import TypeVar

import numpy as np

from axonn_tune.cost.uncertainty import NUDGE, OF_LAYOUT, PER_DOUBLING, covariance_of
from axonn_tune.errors import UsageError
from axonn_tune.frameworks import SOFTWARE_SPREADS, base_software, software_key
from axonn_tune.frameworks.description import Framework
from axonn_tune.frameworks.dispatchers import dispatching, find_dispatcher
from axonn_tune.frameworks.step import IMBALANCE_SPREAD, NATURAL_IMBALANCE
from axonn_tune.learning.evidence import OF_MODEL, STEP_NOISE, WHOLE, Sample
from axonn_tune.learning.operation import with_operation
from axonn_tune.learning.posterior import Bounds, Posterior, maximize, robust_weights
from axonn_tune.program.operations import Floats
from axonn_tune.specs.machine import (
    COLLECTIVE_KINDS,
    Accelerator,
    CollectiveFactors,
    Dispatching,
    Learned,
    LearnedNumber,
    Library,
    Machine,
    Software,
    Source,
    Tier,
)
from axonn_tune.specs.numbers import (
    Consequence,
    has_number,
    kind_at,
    number_at,
    scaled,
    settled,
    validated,
    with_consequence,
    with_numbers,
)
from axonn_tune.units import rounded

OF_A_PLACEHOLDER = 2.0
"""The same for orders of magnitude."""

SPREADS: Mapping[str, Mapping[str, float]] = {
    "latency_us": {"measured": 0.3, "peak": 0.5, "assumed": 0.7, "placeholder": OF_A_PLACEHOLDER},
    "bandwidth_gb_per_s": {"measured": 0.15, "peak": 0.3, "assumed": 0.4, "placeholder": OF_A_PLACEHOLDER},
    "launch_us": {"measured": 0.3, "assumed": 0.5, "placeholder": OF_A_PLACEHOLDER},
    "training_share": {"measured": 0.05, "assumed": 0.15},
    "memory_efficiency": {"measured": 0.05, "assumed": 0.05},
    "contention": {"measured": 0.5, "assumed": 0.5},
    "peak_tflops": {"placeholder": OF_A_PLACEHOLDER},
    "memory_bandwidth_gb_per_s": {"placeholder": 1.0},
    "kernel_launch_us": {"placeholder": 1.0},
    "matmul_launch_us": {"placeholder": 1.0},
}
"""The same of numbers of a profile, by the kind of their source; `fitted` is as `measured`, a kind that is missing
is known."""

OF_ANOTHER_NETWORK = 0.4
"""Least of the bandwidth between nodes, in profiles not measured by their user: NICs, topology and congestion differ
from cluster to cluster, while links within a node come with the accelerator. Else one log of a slow network is taken as
one of slow links within nodes."""

S = TypeVar("S", Accelerator, Library, Tier)

EXPERT_SPREADS = {"call_us": 0.7, "bandwidth_share": 0.15, "imbalance": IMBALANCE_SPREAD}
"""The same of experts over several ranks: the fixed time of a dispatcher's call is host and software (shipped ones lie
between 50 and 1,000 µs), the bandwidth that it reaches within what tables of dispatchers scatter by."""

FACTORS, FACTOR_SPREAD = ("latency_factor", "bandwidth_factor"), 0.2
"""Of latency and bandwidth of one collective over those of a tier, where collectives themselves were measured."""

SHARES, UNBOUNDED, LEAST_IMBALANCE = ("training_share", "memory_efficiency", "contention"), 20.0, 1.01
"""Numbers that are at most 1; logarithms that nothing reaches; the least token imbalance of natural routing, since 1 is
forced load balancing."""

WORSE = 0.05
"""By how much more of its logarithm a row must be off than before to be called worse."""

SILENT, MOVED, FAR, CONTRADICTS = 0.9, 0.02, 3.0, 3.0
"""A number whose spread stays above the first share of its prior is not identified; one that moves by less than the
second has not moved. Beyond so many standard deviations a number contradicts its prior, and a row the others."""


@dataclass(frozen=True)
class Prior:
    """Numbers that may move, as paths of a profile that has them all, with the covariance of their logarithms.

    restated: bandwidths that take the place of those of a profile, and of what hangs on them.
    """

    machine: Machine
    paths: tuple[str, ...]
    covariance: Floats
    restated: Mapping[str, float] = field(default_factory=dict)

    def adjust(self, logs: Sequence[float] | Floats) -> Callable[[Machine], Machine]:
        """Multiplies these numbers of a profile by e^logs, where it has them."""
        factors = {path: math.exp(log) for path, log in zip(self.paths, logs, strict=True) if log}
        factored = any(path.endswith(FACTORS) for path in self.paths)
        # Most samples have the same profile, which is kept with what it became: an identity may be used again.
        known: dict[int, tuple[Machine, Machine]] = {}

        def adjusted(machine: Machine) -> Machine:
            if id(machine) not in known:
                base, _ = settled(machine, with_numbers(machine, self.restated), self.restated.keys())
                tiers = tuple(map(_with_factors, base.tiers)) if factored else base.tiers
                own = {name: getattr(self.machine, name) for name in ("software", "dispatchers", "imbalance")}
                whole = base.model_copy(update={**own, "tiers": tiers})
                known[id(machine)] = machine, scaled(whole, factors)
            return known[id(machine)][1]

        return adjusted

    @property
    def values(self) -> list[float]:
        """The numbers before any evidence."""
        return [number_at(self.machine, path) for path in self.paths]

    @property
    def bounds(self) -> Bounds:
        """Shares stay at most 1, and the token imbalance above 1."""
        most = [-math.log(number_at(self.machine, path)) if path.endswith(SHARES) else UNBOUNDED for path in self.paths]
        least = [
            math.log(LEAST_IMBALANCE / number_at(self.machine, path)) if path == "imbalance" else -UNBOUNDED
            for path in self.paths
        ]
        return Bounds(np.array(least), np.array(most))


def prior_of(
    machine: Machine,
    frameworks: Sequence[Framework],
    *,
    collectives: bool = False,
    dispatchers: Iterable[str] = (),
    natural: bool = False,
) -> Prior:
    """Prior of a machine and some frameworks, or the posterior that the profile has learned before.

    collectives: with factors of each kind of collective on each tier. dispatchers: with numbers of these, but for
    all-gathers, which are collectives of the profile; natural: with the token imbalance of natural routing.
    """
    software = {software_key(one): base_software(one, machine) for one in frameworks}
    routed = {one: dispatching(one, machine) for one in dispatchers if find_dispatcher(one).counting != "all"}
    update: dict[str, object] = {"software": {**machine.software, **software}}
    update |= {"dispatchers": {**machine.dispatchers, **routed}} if routed else {}
    update |= {"imbalance": NATURAL_IMBALANCE} if natural and machine.imbalance is None else {}
    whole = machine.model_copy(update=update)
    if collectives:
        whole = whole.model_copy(update={"tiers": tuple(map(_with_factors, whole.tiers))})
    spreads = dict(_spreads(whole))
    if collectives and machine.measured is None:
        networks = (f"tiers.{tier.name}.bandwidth_gb_per_s" for tier in machine.tiers[1:])
        spreads.update({path: max(spreads.get(path, 0.0), OF_ANOTHER_NETWORK) for path in networks})
    learned = machine.learned
    known = [] if learned is None else [one.path for one in learned.numbers]
    if lost := [path for path in known if not has_number(whole, path)]:
        raise UsageError(f"{machine.name} has learned {lost[0]}, but has no such number: was it edited by hand?")
    paths = (*known, *(path for path in spreads if path not in known))
    covariance = np.diag([spreads.get(path, 0.0) ** 2 for path in paths])
    if learned is not None:
        covariance[: len(known), : len(known)] = covariance_of(learned)
    return Prior(whole, paths, covariance)


def _of_other_links(prior: Prior, posterior: Posterior) -> Prior:
    """The prior with the bandwidths of links that are others than the profile's; unchanged where there are none.

    Where collectives lower a bandwidth beyond `FAR`, its prior is of another machine: it would hold the number up, and
    what was measured with the old one would stay.
    """
    logs, restated, covariance = dict(zip(prior.paths, posterior.found, strict=True)), {}, prior.covariance.copy()
    for at, (path, log) in enumerate(logs.items()):
        level = path.removesuffix("bandwidth_gb_per_s")
        if path.startswith("tiers.") and path != level and -log > FAR * math.sqrt(covariance[at, at]):
            factors = (own for name, own in logs.items() if name.startswith(f"{level}c") and name.endswith(FACTORS[1]))
            restated[path] = number_at(prior.machine, path) * math.exp(log + max(factors, key=abs, default=0.0))
            covariance[at, :] = covariance[:, at] = 0.0
            covariance[at, at] = OF_A_PLACEHOLDER**2
    if not restated:
        return prior
    machine, _ = settled(prior.machine, with_numbers(prior.machine, restated), restated.keys())
    return Prior(machine, prior.paths, covariance, restated)


def _hanging(prior: Prior, own: Prior, profile: Machine) -> tuple[Machine, tuple[Consequence, ...]]:
    """A profile with what hangs on links that are others than the profile's, by the bandwidths that were learned."""
    learned = {path: number_at(profile, path) for path in own.restated}
    _, found = settled(prior.machine, with_numbers(prior.machine, learned), learned.keys())
    for one in found:
        profile = profile if one.effect == "kept" else with_consequence(profile, one)
    return profile, found


def _with_factors(tier: Tier) -> Tier:
    """A tier that states the factors of each collective."""
    plain = CollectiveFactors(latency_factor=1.0, bandwidth_factor=1.0)
    stated = dict.fromkeys(COLLECTIVE_KINDS, plain) | (tier.collectives or {})
    return tier.model_copy(update={"collectives": stated})


def _spreads(machine: Machine) -> Iterator[tuple[str, float]]:
    """Path and prior spread of every number that may move; zeros have no logarithm."""
    paths = [f"software.{key}.{name}" for key in machine.software for name in Software.model_fields]
    paths += [f"accelerator.{name}" for name in ("training_share", "memory_efficiency", "contention")]
    paths += [f"accelerator.peak_tflops.{precision}" for precision in machine.accelerator.peak_tflops]
    rates = ("memory_bandwidth_gb_per_s", "kernel_launch_us", "matmul_launch_us")
    paths += [*(f"accelerator.{name}" for name in rates), "library.launch_us"]
    paths += [f"dispatchers.{one}.{name}" for one in machine.dispatchers for name in Dispatching.model_fields]
    paths += ["imbalance"] if machine.imbalance is not None else []
    for tier in machine.tiers:
        paths += [f"tiers.{tier.name}.{name}" for name in ("latency_us", "bandwidth_gb_per_s")]
        paths += [f"tiers.{tier.name}.collectives.{kind}.{name}" for kind in tier.collectives or {} for name in FACTORS]
    for path in paths:
        name = path.rsplit(".", 1)[-1]
        if number_at(machine, path) <= 0.0:
            continue
        if path.startswith("software."):
            yield path, SOFTWARE_SPREADS[name]
        elif name in FACTORS:
            yield path, FACTOR_SPREAD
        elif name in EXPERT_SPREADS:
            yield path, EXPERT_SPREADS[name]
        else:
            of_kind = SPREADS[path.split(".")[1] if path.startswith("accelerator.") else name]
            kind = kind_at(machine, path)
            if spread := of_kind.get("measured" if kind == "fitted" else kind, 0.0):
                yield path, spread


@dataclass(frozen=True)
class Row:
    """One time of the evidence, before and after; log errors are log(predicted / measured).

    bus_bytes: what the bus bandwidth of a collective counts, 0 of other times.
    """

    name: str
    what: str
    ranks: int
    measured_s: float
    before: float
    after: float
    noise: float
    bus_bytes: float = 0.0

    @property
    def worse(self) -> bool:
        """Whether it is predicted worse than before, because others count more."""
        return abs(self.after) > abs(self.before) + WORSE

    @property
    def contradicts(self) -> bool:
        """Whether it contradicts the posterior of all evidence."""
        return abs(self.after) > CONTRADICTS * self.noise


@dataclass(frozen=True)
class Learning:
    """Result of learning. consequences: what hung on links that are others than the profile's."""

    prior: Prior
    posterior: Posterior
    rows: tuple[Row, ...]
    machine: Machine
    consequences: tuple[Consequence, ...] = ()

    @cached_property
    def movers(self) -> tuple[tuple[str, ...], ...]:
        """For each number the rows that moved it most, with their contributions; empty if it has not moved."""
        moves = self.posterior.moves()
        return tuple(_movers(moves[:, at], self.rows) for at in range(len(self.prior.paths)))

    @property
    def numbers(self) -> tuple[LearnedNumber, ...]:
        """What was learned."""
        assert self.machine.learned is not None, "written by learn"
        return self.machine.learned.numbers

    @cached_property
    def silent(self) -> tuple[str, ...]:
        """Numbers the evidence says nothing about."""
        found = (one for one in self.numbers if one.spread > SILENT * one.prior_spread)
        return tuple(one.path for one in found if one not in self.far)

    @property
    def operation(self) -> tuple[tuple[str, float, str], ...]:
        """Names, values and sources of what was learned of the site."""
        before, site = self.prior.machine.operation, self.machine.operation
        sources = ((name, one.source) for name, one in site.sources.items() if before.sources.get(name) != one)
        return tuple((name, getattr(site, name), source) for name, source in sources)

    @property
    def contradictions(self) -> tuple[Row, ...]:
        """Rows that contradict the others."""
        return tuple(row for row in self.rows if row.contradicts)

    @property
    def far(self) -> tuple[LearnedNumber, ...]:
        """Numbers far from their prior."""
        return tuple(one for one in self.numbers if deviations(one) > FAR)


def deviations(number: LearnedNumber) -> float:
    """How far a number has moved, in prior standard deviations."""
    return abs(math.log(number.value / number.prior)) / number.prior_spread if number.prior_spread else 0.0


def learn(
    samples: Sequence[Sample],
    machine: Machine,
    *,
    frameworks: Sequence[Framework] = (),
    evidence: Sequence[str] = (),
    name: str | None = None,
    listen: Callable[[int], None] = lambda rounds: None,
) -> Learning:
    """Update a profile by evidence.

    frameworks: additional software to update. evidence: description for the profile. name: of the new
    profile, that of `machine` unless given. listen: called with the number of computed prices.
    """
    if not samples:
        raise UsageError("nothing to learn from: no step, collective or term could be read")
    used = {software_key(one): one for one in (*frameworks, *(sample.framework for sample in samples))}
    timed = any(what not in WHOLE for sample in samples for what in sample.what)
    prior = prior_of(
        machine,
        list(used.values()),
        collectives=timed,
        dispatchers=dict.fromkeys(sample.dispatcher for sample in samples if sample.dispatcher),
        natural=any(sample.natural for sample in samples),
    )
    measured = np.log([seconds for sample in samples for seconds in sample.measured_s])
    # Repeats of one model and layout share residual errors.
    names = [(sample.setup, sample.what) if sample.setup else sample.name for sample in samples]
    shares = [math.sqrt(names.count(name)) for name in names]
    noise = np.concatenate([share * np.array(one.noise) for share, one in zip(shares, samples, strict=True)])
    posterior = posterior_of(samples, prior, noise=noise, listen=listen)
    own = _of_other_links(prior, posterior) if timed else prior
    if own is not prior:
        posterior = posterior_of(samples, own, noise=noise, listen=listen)
    before = _Pricing(samples, prior, lambda prices: None).predict(np.zeros(len(prior.paths))) - measured
    labels = [
        (sample, what, of_bus)
        for sample in samples
        for what, of_bus in zip(sample.what, sample.bus_bytes or (0.0,) * len(sample.what), strict=True)
    ]
    rows = tuple(
        Row(sample.name, what, sample.ranks, math.exp(time), float(old), float(new), float(own), of_bus)
        for (sample, what, of_bus), time, old, new, own in zip(
            labels, measured, before, posterior.residuals, noise, strict=True
        )
    )
    learned = _learned(samples, prior, own, posterior, rows, evidence)
    profile = _profile(prior, own, learned, evidence).model_copy(update={"name": name or machine.name})
    profile, found = _hanging(prior, own, profile)
    for one in _faster_than_learned(profile, learned):
        profile, found = with_consequence(profile, one), (*found, one)
    return Learning(prior, posterior, rows, with_operation(profile, samples), found)


def posterior_of(
    samples: Sequence[Sample], prior: Prior, *, noise: Floats, listen: Callable[[int], None] = lambda rounds: None
) -> Posterior:
    """The numbers of a profile that the samples make most probable. noise: of each time, in their order."""
    measured = np.log([seconds for sample in samples for seconds in sample.measured_s])
    pricing = _Pricing(samples, prior, listen)
    return maximize(
        pricing.predict, pricing.derivatives, measured, noise=noise, prior=prior.covariance, bounds=prior.bounds
    )


class _Pricing:
    """Logarithms of what is predicted of all samples, and their slopes."""

    def __init__(self, samples: Sequence[Sample], prior: Prior, listen: Callable[[int], None]) -> None:
        self._samples, self._prior, self._listen, self._prices = samples, prior, listen, 0

    def predict(self, logs: Floats) -> Floats:
        return self._priced(self._samples, logs)

    def derivatives(self, logs: Floats) -> Floats:
        narrowed = [sample.narrowed(self._prior.adjust(logs)) for sample in self._samples]
        base = self._priced(narrowed, logs)
        moved = logs + NUDGE * np.eye(len(logs))
        return np.array([(self._priced(narrowed, one) - base) / NUDGE for one in moved]).T.reshape(len(base), len(logs))

    def _priced(self, samples: Sequence[Sample], logs: Floats) -> Floats:
        adjust = self._prior.adjust(logs)
        self._prices += len(samples)
        self._listen(self._prices)
        return np.log([max(seconds, 1e-12) for sample in samples for seconds in sample.price(adjust)])


def _learned(
    samples: Sequence[Sample],
    prior: Prior,
    own: Prior,
    posterior: Posterior,
    rows: Sequence[Row],
    evidence: Sequence[str],
) -> Learned:
    """What was learned. prior: of the profile; own: the same, of its links as they are."""
    steps, terms = _conflict([row for row in rows if row.what in WHOLE]), _conflict(rows, besides=WHOLE)
    factors = np.array([steps if row.what in WHOLE else terms for row in rows])
    covariance, moves, earlier = posterior.inflated(factors, own.covariance), posterior.moves(), prior.machine.learned
    spreads = np.sqrt(np.diag(covariance))
    correlations = covariance / np.outer(np.maximum(spreads, 1e-12), np.maximum(spreads, 1e-12))
    known = {} if earlier is None else {one.path: one for one in earlier.numbers}
    numbers = []
    for at, path in enumerate(prior.paths):
        value, spread = number_at(prior.machine, path), rounded(math.sqrt(prior.covariance[at, at]))
        before = known.get(path) or LearnedNumber(
            path=path, prior=rounded(value), prior_spread=spread, value=value, spread=spread
        )
        update = {
            "value": rounded(number_at(own.machine, path) * math.exp(posterior.found[at])),
            "spread": rounded(float(spreads[at])),
            "moved_by": _movers(moves[:, at], rows) or before.moved_by,
        }
        numbers.append(before.model_copy(update=update))
    # Repeats share their error, so that each has more noise.
    noise = max([STEP_NOISE, *(row.noise for row in rows if row.what == "step")])
    ranks = math.exp(float(np.mean([math.log(sample.ranks) for sample in samples])))
    return Learned(
        evidence=tuple(dict.fromkeys((*(earlier.evidence if earlier else ()), *evidence))),
        ranks=rounded(max(ranks, earlier.ranks) if earlier else ranks),
        numbers=tuple(numbers),
        correlations=tuple(
            tuple(round(float(value), 6) for value in correlations[row, :row]) for row in range(len(numbers))
        ),
        of_layout=OF_LAYOUT,
        of_model=rounded(
            max(math.hypot(OF_MODEL, noise * math.sqrt(steps**2 - 1.0)), earlier.of_model if earlier else 0.0)
        ),
        per_doubling=PER_DOUBLING,
    )


def _conflict(rows: Sequence[Row], *, besides: Sequence[str] = ()) -> float:
    """By how much residuals exceed the noise of their rows, at least 1: root mean square over the samples (Birge 1932).

    Runs that contradict each other leave residuals that no number explains, and a next run may be like either. One of
    several that is far off counts as little as in the fit; of two, nothing says which is wrong, and the farther counts.
    """
    squares: dict[str, list[float]] = {}
    several = len({row.name for row in rows if row.what not in besides}) > 2
    for row in rows:
        if row.what not in besides:
            weight = float(robust_weights(np.array(row.after), np.array(row.noise))) if several else row.noise**-2
            squares.setdefault(row.name, []).append(weight * row.after**2)
    means = list(map(fmean, squares.values()))
    return max(1.0, math.sqrt(fmean(means) if several else max(means))) if means else 1.0


def _movers(moves: Floats, rows: Sequence[Row]) -> tuple[str, ...]:
    """The rows that moved a number most, with how far, largest first; none if it has not moved."""
    if abs(float(moves.sum())) < MOVED:
        return ()
    order = np.argsort(-np.abs(moves))[:3]
    return tuple(
        f"{rows[at].name}, {rows[at].what}: {math.expm1(moves[at]):+.1%}" for at in order if abs(moves[at]) >= MOVED / 4
    )


def _profile(prior: Prior, own: Prior, learned: Learned, evidence: Sequence[str]) -> Machine:
    """The profile with its numbers moved, each with its source; prior, own: as for `_learned`."""
    machine = scaled(own.machine, {one.path: one.value / number_at(own.machine, one.path) for one in learned.numbers})
    before = {one.path: number_at(prior.machine, one.path) for one in learned.numbers}
    moved = {one.path for one in learned.numbers if abs(math.log(one.value / before[one.path])) > MOVED}
    words = "; ".join(dict.fromkeys(evidence)) or "runs"
    # The profile that was learned on, and what was learned from.
    base = machine.description.partition(_LEARNED_FROM)[0] if machine.learned else machine.name
    named = [source.partition(" (sha256")[0] for source in learned.evidence]
    more = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
    update = {
        "description": f"{base}{_LEARNED_FROM}{'; '.join(named[:NAMED]) or 'runs'}{more}",
        "accelerator": _resourced(machine.accelerator, "accelerator", moved, words),
        "library": _resourced(machine.library, "library", moved, words),
        "tiers": tuple(_resourced(tier, f"tiers.{tier.name}", moved, words) for tier in machine.tiers),
        "learned": learned,
    }
    return validated(machine.model_copy(update=update))


def _faster_than_learned(machine: Machine, learned: Learned) -> Iterator[Consequence]:
    """Measured groups of a level whose logs are slower than these: factors, which they do not have, were learned."""
    for tier in machine.tiers:
        of_level = f"tiers.{tier.name}.collectives."
        own = [one for one in learned.numbers if one.path.startswith(of_level) and one.path.endswith(FACTORS[1])]
        share = max((one.value for one in own if one.spread <= SILENT * one.prior_spread), default=1.0)
        groups, most = tier.measured or (), tier.bandwidth_gb_per_s * share
        left = tuple(one for one in groups if share > 1.0 - MOVED or one.bandwidth_gb_per_s <= most)
        if left != groups:
            words = (
                f"{len(groups) - len(left)} of {len(groups)} groups, since logs of {tier.name} reach {most:.4g} GB/s"
            )
            yield Consequence(f"tiers.{tier.name}.measured", "dropped", words, left)


NAMED = 3
"""Sources that a description names."""


_LEARNED_FROM = ", learned from "


def _resourced(section: S, name: str, moved: Set[str], words: str) -> S:
    """A section whose moved numbers name the evidence as their source; only the last is kept."""
    found = dict(section.sources)
    for path in moved:
        if path.startswith(f"{name}."):
            key = path[len(name) + 1 :].split(".")[0]
            before = found[key].source.partition("; then learned from ")[0] if key in found else "as the tier"
            found[key] = Source(kind="fitted", source=f"{before}; then learned from {words}")
    if getattr(section, "collectives", None) is not None:
        found.setdefault("collectives", Source(kind="assumed", source="as the tier"))
    return section.model_copy(update={"sources": found})
