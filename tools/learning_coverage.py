"""How often 80% intervals of a learned profile hold the step: machines drawn from the prior, evidence partly wrong.

    python -m tools.learning_coverage [MACHINES]

Each machine has numbers drawn from the prior of one profile. Four files of evidence are of it: three runs and a CSV of
two, each step with the residual errors of a layout and a model. On every second machine the times of one file are off
by a factor of 1.3 to 2, or its inverse. What is learned then predicts layouts that were not among the evidence.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

import numpy as np

from axonn_tune.cost.uncertainty import OF_LAYOUT
from axonn_tune.learning.evidence import OF_MODEL, Sample, step_sample
from axonn_tune.learning.learn import Prior, learn, prior_of
from axonn_tune.validation.published.cases import Case, case_of
from axonn_tune.validation.published.rows import SHIPPED, read_steps

EVIDENCE = (("0006",), ("0030",), ("0050",), ("0010", "0040"))
"""Rows of each file."""
PREDICTED = ("0007", "0012", "0016", "0024", "0034", "0045", "0055")


@dataclass(frozen=True)
class Machine:
    """Whether one file was wrong, and for each predicted layout whether its interval held the step."""

    conflict: bool
    held: tuple[bool, ...]


@cache
def case(number: str) -> Case:
    """A published row of FSDP on H100."""
    (row,) = [row for row in read_steps(SHIPPED / "steps.csv") if row.id == f"llmfoundry_mpt_fsdp-{number}"]
    found = case_of(row)
    assert not isinstance(found, str), found
    return found


def drawn(seed: int, *, conflict: bool) -> Machine:
    """One machine, what is learned of it, and whether predictions hold."""
    base = case(EVIDENCE[0][0]).machine
    prior, chance = prior_of(base, [case(EVIDENCE[0][0]).framework]), np.random.default_rng(seed)
    truth = np.minimum(chance.multivariate_normal(np.zeros(len(prior.paths)), prior.covariance), prior.bounds.most)
    factors = [1.0] * len(EVIDENCE)
    if conflict:
        factors[chance.integers(len(EVIDENCE))] = chance.uniform(1.3, 2.0) ** chance.choice([-1.0, 1.0])
    errors = {model: chance.normal(0.0, OF_MODEL) for model in sorted({case(one).model.name for one in _all()})}
    samples = [
        _measured(case(number), prior, truth, factor * _error(chance, errors[case(number).model.name]))
        for factor, numbers in zip(factors, EVIDENCE, strict=True)
        for number in numbers
    ]
    learned = learn(samples, base).machine
    held = []
    for number in PREDICTED:
        one = replace(case(number), machine=learned)
        sample = step_sample(replace(one, machine=base)).narrowed(lambda same: same)
        step_s = sample.price(prior.adjust(truth))[0] * _error(chance, errors[one.model.name])
        setup = replace(sample.setup, machine=learned)  # type: ignore[type-var]
        found = setup.price(lambda same: same)  # type: ignore[union-attr]
        held.append(found.low_s <= step_s <= found.high_s)
    return Machine(conflict, tuple(held))


def _all() -> Iterator[str]:
    yield from (number for numbers in EVIDENCE for number in numbers)
    yield from PREDICTED


def _error(chance: np.random.Generator, of_model: float) -> float:
    return math.exp(chance.normal(0.0, OF_LAYOUT) + of_model)


def _measured(one: Case, prior: Prior, truth: np.ndarray, factor: float) -> Sample:
    sample = step_sample(one).narrowed(lambda same: same)
    return replace(sample, measured_s=(factor * sample.price(prior.adjust(truth))[0],))


def coverage(found: Sequence[Machine]) -> float:
    """Share of predictions whose interval held."""
    return fmean(held for machine in found for held in machine.held)


def main(count: int = 50) -> None:
    """Draw the machines, and print the coverage over all, with and without a wrong file."""
    found = [drawn(seed, conflict=bool(seed % 2)) for seed in range(count)]
    wrong = [machine for machine in found if machine.conflict]
    right = [machine for machine in found if not machine.conflict]
    print(f"{count} machines, {len(wrong)} with one of {len(EVIDENCE)} files off: 80% intervals hold")
    for words, some in (("all", found), ("one file off", wrong), ("no file off", right)):
        print(f"  {words:14}{coverage(some):6.1%} of {sum(len(one.held) for one in some)} steps")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
