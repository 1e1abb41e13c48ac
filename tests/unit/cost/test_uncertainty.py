"""MFU, HFU and intervals, by hand: those of a profile's half-widths, and those of what it has learned."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from axonn_tune.cost.compute import ATTENTION, ELEMENT_WISE, GEMMS, SCANS, UNMEASURED
from axonn_tune.cost.price import PricedLayout, price
from axonn_tune.cost.uncertainty import (
    ASSUMED,
    DEVIATIONS,
    OF_LAYOUT,
    PER_DOUBLING,
    PER_STAGE_DOUBLING,
    covariance_of,
    difference_spread,
    half_width,
    of_rates,
    shared_spread,
    spread,
)
from axonn_tune.frameworks import find_framework
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.program.dimensions import model_flops
from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.priced import Priced
from axonn_tune.request import RankBy
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.machine import Learned, LearnedNumber, Machine, Software, Uncertainty
from axonn_tune.specs.numbers import number_at, scaled
from axonn_tune.specs.workload import Workload
from axonn_tune.vocabulary import CudaGraphs
from tests.unit.small import small_problem

WORKLOAD = Workload(global_batch=8192, sequence_length=2048)
CONFIGURATION = Layout(Grid(1, 1, 64, 16), 1, "full")
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


def priced(
    machine: Machine, one: Layout = CONFIGURATION, *, compute_s: float = 3e4, step_s: float = 4e4
) -> PricedLayout:
    """A made-up price of a layout of 80b."""
    job = Job(load_model("80b").document, machine, WORKLOAD)
    made = {"communication_s": 1.0, "bubble_s": 0.0, "memory_bytes": 1.0, "executed_flops": 312e12 * step_s / 2.0}
    return PricedLayout(**vars(one), job=job, compute_s=compute_s, iteration_s=step_s, **made)


FACT = {"kind": "fitted", "source": "test"}


def of(communication: float, compute: float, *, assumed: tuple[str, ...] = ()) -> Machine:
    """Perlmutter with these half-widths, and all rates measured but these."""
    sources = {"communication": FACT, "compute": FACT}
    known = {"communication": communication, "compute": compute, "sources": sources}
    machine = load_machine("perlmutter").document
    kinds = {name: "assumed" if name in assumed else "measured" for name in machine.accelerator.sources}
    marked = {name: one.model_copy(update={"kind": kinds[name]}) for name, one in machine.accelerator.sources.items()}
    accelerator = machine.accelerator.model_copy(update={"sources": marked})
    return machine.model_copy(update={"uncertainty": Uncertainty.model_validate(known), "accelerator": accelerator})


def half(machine: Machine, one: Layout = CONFIGURATION, **computed_s: float) -> float:
    """Half-width of a step of 40,000 s of 80b that computes 30,000 s."""
    job = Job(load_model("80b").document, machine, WORKLOAD)
    return half_width(job, one, computed_s=computed_s, compute_s=3e4, iteration_s=4e4)


def test_interval_by_hand() -> None:
    """Guards the parts: kinds of computation by their shares of three quarters, a quarter of waiting, 1,024 ranks of
    seven doublings of a node, 4 pipeline stages of two, and each layout's own."""
    one = Layout(Grid(z=256, pipeline=4, order=("x", "y", "z", "data", "pipeline")), 1, "full")
    kinds = math.hypot(0.75 * 0.8 * 0.1, 0.75 * 0.2 * 0.1)
    scale = DEVIATIONS * math.hypot(7.0 * PER_DOUBLING, 2.0 * PER_STAGE_DOUBLING)
    by_hand = math.hypot(kinds, 0.25 * 0.2, scale, DEVIATIONS * OF_LAYOUT)
    found = half(of(0.2, 0.1), one, **{GEMMS: 8.0, ATTENTION: 2.0})
    assert found == pytest.approx(by_hand, rel=1e-3)


def test_a_rate_that_is_assumed_widens_by_what_hangs_on_it() -> None:
    """Guards the mark: an assumed rate of attention widens steps of much attention, and no other kind's."""
    measured, assumed = of(0.2, 0.1), of(0.2, 0.1, assumed=("attention_backward_efficiency",))
    assert half(assumed, **{GEMMS: 1.0}) == half(measured, **{GEMMS: 1.0})
    little, much = ({GEMMS: 1.0 - share, ATTENTION: share} for share in (0.1, 0.5))
    wider = [half(assumed, **parts) - half(measured, **parts) for parts in (little, much)]
    assert 0.0 < wider[0] < 0.02 < wider[1]
    assert of_rates(assumed, ATTENTION) == pytest.approx(math.hypot(0.1, ASSUMED))


def test_software_that_no_step_was_fitted_to_widens() -> None:
    """Guards DeepSpeed, whose numbers are the mean of all software: by what these scatter by, of each kind."""
    kept = of(0.2, 0.1)

    def found(framework: str, **computed_s: float) -> float:
        job = Job(load_model("80b").document, kept, WORKLOAD, find_framework(framework))
        return half_width(job, CONFIGURATION, computed_s=computed_s, compute_s=3e6, iteration_s=3e6)

    plain = found("fsdp", **{GEMMS: 1.0})
    assert plain == pytest.approx(found("fsdp", **{ELEMENT_WISE: 1.0}), rel=1e-3)
    for kind, scatter in ((GEMMS, 0.1), (ELEMENT_WISE, 0.3), (ATTENTION, 0.3)):
        assert found("deepspeed", **{kind: 1.0}) == pytest.approx(math.hypot(plain, DEVIATIONS * scatter), rel=2e-2)


def test_what_graphs_capture_hangs_on_no_host() -> None:
    """Guards the host's share: less of it with attention in a graph, none with the whole pass; of blocks so short that
    it may decide the step."""
    model, machine = load_model("llama3-8b").document, load_machine("dgx-b200").document
    workload, layout = Workload(global_batch=16, sequence_length=2048), Layout(Grid(data=8), 1, "none")

    def width(*scopes: CudaGraphs) -> tuple[float, float]:
        framework = replace(find_framework("nemo"), exchanges=()).capturing(scopes)
        found = price(Job(model, machine, workload, framework), layout)
        return found.issued_share, found.half_width

    issued, attention, whole = width(), width("attn"), width("full_iteration")
    assert (issued[0], whole[0]) == (1.0, 0.0)
    assert 0.2 < attention[0] < 0.8
    assert whole[1] < 0.15 < issued[1]


def test_kernels_of_assumed_rates_widen_by_their_share() -> None:
    """Guards the mark of measured kernels: the backward pass of a scan, whose rate is assumed, is apart from its
    forward pass, which was measured on this accelerator, and widens the interval."""
    framework = find_framework("megatron-core")
    model, machine = load_model("nemotron-3-nano-30b-a3b").document, load_machine("dgx-h100").document
    job = Job(model, machine, WORKLOAD, framework)
    found = price(job, Layout(Grid(expert=8, data=64), 1, "none")).computed_s
    assert found[UNMEASURED] > found[SCANS] > 0.0
    measured = of(0.2, 0.1)
    assert half(measured, **{GEMMS: 0.8, UNMEASURED: 0.2}) > half(measured, **{GEMMS: 0.8, SCANS: 0.2}) + 0.005


def test_performance_by_hand() -> None:
    """Guards units: tokens per second of all GPUs; MFU of all, HFU of one; the same factor up and down."""
    found = priced(load_machine("perlmutter").document, compute_s=30.0, step_s=40.0)
    assert found.tokens_per_s == 8192 * 2048 / 40.0
    assert found.mfu == pytest.approx(model_flops(found.job.model, WORKLOAD) / (40.0 * 1024 * 312e12))
    assert found.hfu == pytest.approx(0.5)
    assert found.low_s * found.high_s == pytest.approx(40.0**2)
    assert found.high_s > found.iteration_s


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
    machine = learned(0.1, 0.2, software=True)
    found = priced(machine, compute_s=1.0, step_s=40.0)

    def step_s(one: Machine) -> float:
        return price(replace(found.job, machine=one), CONFIGURATION).iteration_s

    share, bandwidth = (
        math.log(step_s(scaled(machine, {path: 1.01})) / step_s(machine)) for path in (SHARE, BANDWIDTH)
    )
    assert min(-share, -bandwidth) > 0.002, "both numbers matter"
    variance = (100 * share * 0.1) ** 2 + (100 * bandwidth * 0.2) ** 2 + 0.03**2 + (2 * 0.01) ** 2
    half = DEVIATIONS * math.sqrt(variance)
    assert math.log(found.high_s / 40.0) == pytest.approx(half, rel=0.03)
    assert found.low_s * found.high_s == pytest.approx(40.0**2)


def ranked(model: str, machine: Machine, *, gpus: int, batch: int, rank_by: RankBy = "iteration") -> Priced:
    """Grids of a model in sequences of 2,048, by their step unless asked otherwise."""
    document, framework = load_model(model).document, find_framework("axonn-tune")
    problem = small_problem(document, machine, framework, gpus=gpus, batch=batch, sequence_length=2048, rank_by=rank_by)
    return search(problem, top=0)


@pytest.mark.parametrize("has_learned", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_ties_by_communication_hold_for_steps_too(has_learned: bool) -> None:
    """Guards ties: grids whose communication could be the same, but not their steps, are none."""
    machine = learned(0.02, 1.0, of_layout=0.01) if has_learned else load_machine("perlmutter").document
    wide = machine.model_copy(update={"uncertainty": machine.uncertainty.model_copy(update={"communication": 0.3})})
    # On 16 GPUs none is a tie by either: sends of stages of one or two GPUs leave nodes of four alike.
    found = ranked("5b", wide, gpus=32, batch=128, rank_by="communication")
    entries = [found[place] for place in range(found.ties + 1)]
    alone = found._alike_as_learned if has_learned else found._alike
    assert 1 <= found.ties == alone("iteration") < alone("communication")
    assert entries[-1].iteration_s > entries[0].iteration_s
