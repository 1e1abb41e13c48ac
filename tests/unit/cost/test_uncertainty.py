"""MFU, HFU and intervals, by hand: those of a profile's half-widths, and those of what it has learned."""

from __future__ import annotations

import math

import numpy as np
import pytest

from axonn_tune.cost.prediction import Configuration, price_configuration
from axonn_tune.cost.uncertainty import (
    DEVIATIONS,
    ISSUE_S,
    OF_HOST,
    PER_DOUBLING,
    PER_STAGE_DOUBLING,
    covariance_of,
    difference_spread,
    half_width,
    performance,
    shared_spread,
    slopes_of,
    spread,
)
from axonn_tune.cost.utilisation import exposed_s
from axonn_tune.frameworks import find_framework
from axonn_tune.grid import Grid
from axonn_tune.program.dimensions import model_flops
from axonn_tune.ranking.by_alpha_beta import AlphaBetaRanking
from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.space import RankBy
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.machine import Learned, LearnedNumber, Machine, Software, Uncertainty
from axonn_tune.specs.numbers import number_at, scaled
from axonn_tune.specs.workload import Workload
from tests.unit.small import small_problem

WORKLOAD = Workload(global_batch=8192, sequence_length=2048)
CONFIGURATION = Configuration(Grid(1, 1, 64, 16), 1, "full")
SHARE, BANDWIDTH = "accelerator.training_share", "tiers.slingshot.bandwidth_gb_per_s"
GEMM = "software.axonn-tune.gemm"


def learned(
    share: float, bandwidth: float, *, correlation: float = 0.0, of_layout: float = 0.0, software: bool = False
) -> Machine:
    """Perlmutter, whose sustained efficiency and network have these standard deviations of their logarithms.

    software: with that of the bundled runtime known exactly.
    """
    machine = load_machine("perlmutter").document
    machine = machine.model_copy(update={"software": {"axonn-tune": Software()}})
    values = {path: number_at(machine, path) for path in (SHARE, BANDWIDTH, GEMM)}
    numbers = tuple(
        LearnedNumber(path=path, prior=values[path], prior_spread=0.5, value=values[path], spread=own)
        for path, own in ((SHARE, share), (BANDWIDTH, bandwidth), *(((GEMM, 0.0),) if software else ()))
    )
    found = Learned(
        evidence=("made up",),
        ranks=256.0,
        numbers=numbers,
        correlations=((), (correlation,)),
        of_layout=of_layout,
        of_model=0.03,
        per_doubling=0.01,
    )
    return machine.model_copy(update={"learned": found})


def known(machine: Machine) -> Learned:
    """What a profile has learned."""
    assert machine.learned is not None
    return machine.learned


def test_model_flops_of_the_papers_80b() -> None:
    """Guards the convention: 72·B·S·L·H²·(1 + S/(6H) + V/(12·L·H)), the usual form of the same count, for a GPT."""
    b, s, layers, h, v = 8192, 2048, 42, 12288, 51200
    by_hand = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model_flops(load_model("80b").document, WORKLOAD) == pytest.approx(by_hand, rel=1e-12)


def half(one: Configuration, *, compute_s: float = 3e4, iteration_s: float = 4e4) -> float:
    """Half of the interval of a long step on a machine with half-widths of 20% of waiting and 10% of computation."""
    fact = {"kind": "fitted", "source": "test"}
    uncertainty = Uncertainty.model_validate(
        {"communication": 0.2, "compute": 0.1, "sources": {"communication": fact, "compute": fact}}
    )
    machine = load_machine("perlmutter").document.model_copy(update={"uncertainty": uncertainty})
    return half_width(
        load_model("80b").document,
        machine,
        WORKLOAD,
        one,
        framework=find_framework("axonn-tune"),
        compute_s=compute_s,
        iteration_s=iteration_s,
    )


def test_interval_widens_each_part_by_its_own_share() -> None:
    """Guards the interval of a profile that has not learned: computing and waiting have their own half-widths."""
    assert half(Configuration(Grid(z=8), 1, "full")) == pytest.approx(0.75 * 0.1 + 0.25 * 0.2, rel=1e-4)


def test_interval_grows_with_ranks_and_stages() -> None:
    """Guards scale: 1,024 ranks are seven doublings of a node, 4 pipeline stages two of one."""
    scale = DEVIATIONS * math.hypot(7.0 * PER_DOUBLING, 2.0 * PER_STAGE_DOUBLING)
    one = Configuration(Grid(z=256, pipeline=4, order=("x", "y", "z", "data", "pipeline")), 1, "full")
    assert half(one) == pytest.approx(math.hypot(0.125, scale), rel=1e-3)


def test_interval_is_wider_where_the_host_decides() -> None:
    """Guards small blocks: what the host issues in half of the computation counts by half."""
    one = Configuration(Grid(z=8), 1, "full")
    issued_s = 1024 * 42 * ISSUE_S
    found = half(one, compute_s=2.0 * issued_s, iteration_s=2.0 * issued_s)
    assert found == pytest.approx(math.hypot(0.1, 0.5 * OF_HOST))


def test_performance_by_hand() -> None:
    """Guards units: tokens per second of all GPUs; MFU of all, HFU of one."""
    model, machine = load_model("80b").document, load_machine("perlmutter").document
    found = performance(
        model,
        machine,
        WORKLOAD,
        CONFIGURATION,
        framework=find_framework("axonn-tune"),
        compute_s=30.0,
        iteration_s=40.0,
        executed_flops=312e12 * 20.0,
    )
    assert found.tokens_per_s == 8192 * 2048 / 40.0
    assert found.mfu == pytest.approx(model_flops(model, WORKLOAD) / (40.0 * 1024 * 312e12))
    assert found.hfu == pytest.approx(0.5)
    of_step = half_width(
        model,
        machine,
        WORKLOAD,
        CONFIGURATION,
        framework=find_framework("axonn-tune"),
        compute_s=30.0,
        iteration_s=40.0,
    )
    assert (found.low_s, found.high_s) == (40.0 * math.exp(-of_step), 40.0 * math.exp(of_step))


def test_rounding_is_no_waiting() -> None:
    """Guards exposed time: noise of either sign is exactly 0, the rest untouched, columns and numbers alike."""
    compute_s = 0.8984894338285713
    steps_s = [0.8984894338285716, compute_s, compute_s - 1e-16, compute_s + 1e-6, 2.0]
    expected = [0.0, 0.0, 0.0, steps_s[3] - compute_s, 2.0 - compute_s]
    assert [float(exposed_s(step_s, compute_s)) for step_s in steps_s] == expected
    column = np.asarray(exposed_s(np.array(steps_s), np.full(5, compute_s)))
    assert column.tolist() == expected
    assert not np.signbit(column).any()


def test_slopes_are_those_of_logarithms() -> None:
    """Guards ∂ log / ∂ log: a power law has its exponents, and what a price does not use has 0."""

    def price(machine: Machine) -> float:
        return 7.0 * number_at(machine, BANDWIDTH) ** -2

    assert slopes_of(price, learned(0.1, 0.1)) == pytest.approx([0.0, -2.0])


def test_spreads_by_hand() -> None:
    """Guards gᵀCg: spreads 0.1 and 0.2, correlation 0.5, g = (-0.5, -0.25); two doublings beyond the evidence."""
    found = known(learned(0.1, 0.2, correlation=0.5, of_layout=0.04))
    assert covariance_of(found) == pytest.approx(np.array([[0.01, 0.01], [0.01, 0.04]]))
    slopes = np.array([-0.5, -0.25])
    variance = 0.25 * 0.01 + 2 * 0.125 * 0.01 + 0.0625 * 0.04
    assert shared_spread(slopes, found, ranks=256) == pytest.approx(math.sqrt(variance + 0.03**2))
    assert shared_spread(slopes, found, ranks=32) == shared_spread(slopes, found, ranks=256)
    assert spread(slopes, found, ranks=1024) == pytest.approx(math.sqrt(variance + 0.03**2 + 0.02**2 + 0.04**2))


def test_of_a_difference_only_what_is_not_shared_counts() -> None:
    """Guards ties: layouts that depend alike on all numbers differ by what none explains, whatever the spreads."""
    found = known(learned(0.5, 0.2, of_layout=0.04))
    alike = np.array([-0.9, -0.1])
    assert difference_spread(alike, alike, found) == pytest.approx(0.04 * math.sqrt(2.0))
    other = np.array([-0.8, -0.2])
    by_hand = 0.1**2 * 0.5**2 + 0.1**2 * 0.2**2 + 2 * 0.04**2
    assert difference_spread(alike, other, found) == pytest.approx(math.sqrt(by_hand))


def test_interval_of_a_learned_profile() -> None:
    """Guards the whole: 80% by the slopes of the step itself, the same factor up and down."""
    machine, model, axonn_tune = (
        learned(0.1, 0.2, software=True),
        load_model("80b").document,
        find_framework("axonn-tune"),
    )

    def step_s(one: Machine) -> float:
        return price_configuration(model, one, WORKLOAD, CONFIGURATION, framework=axonn_tune).iteration_s

    found = performance(
        model,
        machine,
        WORKLOAD,
        CONFIGURATION,
        framework=axonn_tune,
        compute_s=1.0,
        iteration_s=40.0,
        executed_flops=1.0,
    )
    share, bandwidth = (
        math.log(step_s(scaled(machine, {path: 1.01})) / step_s(machine)) for path in (SHARE, BANDWIDTH)
    )
    assert min(-share, -bandwidth) > 0.002, "both numbers matter"
    variance = (100 * share * 0.1) ** 2 + (100 * bandwidth * 0.2) ** 2 + 0.03**2 + (2 * 0.01) ** 2
    half = DEVIATIONS * math.sqrt(variance)
    assert math.log(found.high_s / 40.0) == pytest.approx(half, rel=0.03)
    assert found.low_s * found.high_s == pytest.approx(40.0**2)


def ranked(model: str, machine: Machine, *, gpus: int, batch: int, rank_by: RankBy = "iteration") -> AlphaBetaRanking:
    """Grids of a model in sequences of 2,048, by their step unless asked otherwise."""
    document, framework = load_model(model).document, find_framework("axonn-tune")
    problem = small_problem(document, machine, framework, gpus=gpus, batch=batch, sequence_length=2048, rank_by=rank_by)
    return AlphaBetaRanking(search(problem))


@pytest.mark.parametrize("has_learned", [False, True])
def test_ties_by_communication_hold_for_steps_too(has_learned: bool) -> None:
    """Guards ties: grids whose communication could be the same, but not their steps, are none."""
    machine = learned(0.02, 1.0, of_layout=0.01) if has_learned else load_machine("perlmutter").document
    wide = machine.model_copy(update={"uncertainty": machine.uncertainty.model_copy(update={"communication": 0.3})})
    found = ranked("5b", wide, gpus=16, batch=64, rank_by="communication")
    entries = [found.entry(place, terms=False) for place in range(found.ties + 1)]
    alone = found._alike_as_learned if has_learned else found._alike
    assert 1 <= found.ties == alone("iteration") < alone("communication")
    assert entries[-1].iteration_s > entries[0].iteration_s


def test_ties_of_a_ranking_use_differences_only() -> None:
    """Guards the number of ties: a wide interval that all grids share makes none, one that they do not share does."""
    alike = ranked("5b", learned(0.5, 1e-6, of_layout=1e-6, software=True), gpus=16, batch=64)
    first, others = alike.entry(0, terms=False), [alike.entry(place, terms=False) for place in range(1, 6)]
    assert all(first.low_s < other.iteration_s < first.high_s for other in others)
    assert alike.ties == 1
    apart = [
        ranked("20b", learned(1e-6, own, of_layout=1e-6, software=True), gpus=64, batch=256).ties
        for own in (1e-6, 0.5, 2.0)
    ]
    assert apart[0] == 1
    assert apart == sorted(set(apart))
