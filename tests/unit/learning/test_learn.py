"""What is learned of machines whose numbers are known: those drawn from the prior, and two that were really run."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from axonn_tune.calibration.profile import LAYOUTS
from axonn_tune.cost.collectives import bus_bytes
from axonn_tune.cost.price import price
from axonn_tune.frameworks import find_framework
from axonn_tune.job import Job, Layout
from axonn_tune.learning.diagnose import diagnose
from axonn_tune.learning.evidence import Sample, measured_samples, probe_samples, step_sample
from axonn_tune.learning.learn import Learning, learn, prior_of
from axonn_tune.learning.reading import measured_evidence, with_nodes
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.loading import load_document
from axonn_tune.specs.machine import CollectiveKind, Dispatching, Machine
from axonn_tune.specs.numbers import told
from axonn_tune.specs.points import CollectiveProbe, MatmulProbe, Probe
from axonn_tune.specs.results import Measurements
from axonn_tune.validation.comparison import RunComparison, repriced
from axonn_tune.validation.published.cases import Case, case_of
from axonn_tune.validation.published.rows import SHIPPED, read_steps, step_row
from axonn_tune.validation.quality import spearman
from tests.unit.validation import made

NOISE = 0.03
LAB = Path(__file__).parents[2] / "fixtures" / "lab"
ONE_OF_EACH_AXIS = ("x1·y1·z8·data1", "x2·y1·z1·data4", "x1·y2·z2·data2")


# Synthetic truth.


@cache
def cases() -> tuple[Case, ...]:
    """Five layouts that differ in what bounds them: small and large models, on one node and on many."""
    chosen = ("0006", "0010", "0030", "0040", "0050")
    rows = [row for row in read_steps(SHIPPED / "steps.csv") if row.id in [f"llmfoundry_mpt_fsdp-{n}" for n in chosen]]
    found = [case for row in rows if not isinstance(case := case_of(row), str)]
    assert len(found) == len(chosen)
    return tuple(found)


def drawn(seed: int) -> tuple[Learning, dict[str, float]]:
    """A machine drawn from the prior, and what five noisy steps on it teach."""
    machine = cases()[0].machine
    prior = prior_of(machine, [cases()[0].framework])
    generator = np.random.default_rng(seed)
    truth = np.minimum(generator.multivariate_normal(np.zeros(len(prior.paths)), prior.covariance), prior.bounds.most)
    samples = [_noisy(step_sample(replace(case, machine=machine)), prior.adjust(truth), generator) for case in cases()]
    return learn(samples, machine), dict(zip(prior.paths, truth.tolist(), strict=True))


def _noisy(sample: Sample, adjust: object, generator: np.random.Generator) -> Sample:
    step_s = sample.price(adjust)[0] * math.exp(generator.normal(0.0, NOISE))  # type: ignore[arg-type]
    return replace(sample, measured_s=(step_s,), noise=(NOISE,))


@pytest.mark.nightly
def test_identified_numbers_are_where_their_intervals_say() -> None:
    """80% intervals of numbers that the rows identify hold the truth 75 to 90% of the time, on fifty machines."""
    held = []
    for learning, truth in map(drawn, range(50)):
        learned = learning.machine.learned
        assert learned is not None
        for number in learned.numbers:
            if number.path not in learning.silent:
                off = math.log(number.value / number.prior) - truth[number.path]
                held.append(abs(off) <= 1.2816 * number.spread)
    assert len(held) > 50
    assert 0.75 <= fmean(held) <= 0.9


def test_one_machine_is_learned_and_what_has_no_evidence_stays() -> None:
    """What the rows identify is nearer to the truth and surer; what they do not touch stays as it was."""
    learning, truth = drawn(0)
    learned = learning.machine.learned
    assert learned is not None
    touched = np.abs(learning.posterior.slopes).max(axis=0) >= 1e-4
    known = [one for one in learned.numbers if one.path not in learning.silent]
    off = [(abs(math.log(one.value / one.prior) - truth[one.path]), abs(truth[one.path])) for one in known]
    assert sum(after for after, _ in off) < sum(before for _, before in off)
    assert all(one.spread < one.prior_spread for one in known)
    for at in np.flatnonzero(~touched):
        assert learned.numbers[at].value == pytest.approx(learned.numbers[at].prior, rel=1e-3)
        assert learned.numbers[at].spread == pytest.approx(learned.numbers[at].prior_spread, rel=1e-3)


# Emulated clusters, really run: 4 and 6 nodes of 2 ranks, 50 Mbit/s from each node, `validate --all` of nano.


def lab(name: str) -> Measurements:
    """Steps and collectives as they were measured."""
    return load_document(LAB / f"{name}.yaml", schema=Measurements)


@cache
def learned() -> Learning:
    """Three runs on 4 nodes of 2, which between them use every axis; nothing was calibrated."""
    found, base = lab("4x2-50mbit"), with_nodes(load_machine("localhost").document, 2)
    kept = [one for one in found.configurations if one.name.split(" ")[0] in ONE_OF_EACH_AXIS]
    assert len(kept) == len(ONE_OF_EACH_AXIS)
    return learn(measured_samples(found.model_copy(update={"configurations": tuple(kept)}), base, name="lab"), base)


def steps(found: Measurements, machine: Machine) -> list[tuple[float, float]]:
    """Predicted and measured steps of what was not learned from."""
    return [
        (
            price(Job(found.model, machine, one.workload), Layout.of(one)).iteration_s,
            one.pairs.measured["step_s"],
        )
        for one in found.configurations
        if one.name.split(" ")[0] not in ONE_OF_EACH_AXIS
    ]


@pytest.mark.parametrize("name", ["4x2-50mbit", "6x2-50mbit"])
def test_three_runs_teach_a_network(name: str) -> None:
    """All other grids of the same cluster, and those of a larger one: every step within 10%, in the right order."""
    pairs = steps(lab(name), learned().machine)
    assert len(pairs) >= 16
    assert max(abs(predicted / measured - 1.0) for predicted, measured in pairs) < 0.1
    assert spearman(*map(list, zip(*pairs, strict=True))) >= 0.9


# Runs as predicted for another machine: what `validate --update` learns.


def slower(machine: Machine) -> Machine:
    """1.4 times the latency and 1 / 1.3 the bandwidth between nodes, GEMMs and attention at 0.85 of their rate."""
    inner, outer = machine.tiers
    rates = {"latency_us": 1.4 * outer.latency_us, "bandwidth_gb_per_s": outer.bandwidth_gb_per_s / 1.3}
    core = machine.accelerator
    share = core.model_copy(update={"training_share": 0.85 * core.training_share})
    return machine.model_copy(update={"tiers": (inner, outer.model_copy(update=rates)), "accelerator": share})


def learned_from(document: Measurements, machine: Machine) -> Learning:
    """What a validation teaches."""
    samples, words = measured_evidence(document, machine)
    return learn(samples, machine, evidence=[words])


@pytest.mark.nightly
def test_a_slower_machine_is_learned_from_its_runs() -> None:
    """Guards --update: after runs on a machine slower than its profile, the profile predicts them."""
    machine = made.machine()
    document = repriced(made.measurements(real=slower(machine)), machine)
    found = learned_from(document, machine)
    before, after = RunComparison(document), RunComparison(repriced(document, found.machine))
    assert after.qualities["step"].mape < 0.25 * before.qualities["step"].mape
    assert after.qualities["communication"].mape < 0.5 * before.qualities["communication"].mape
    moved = {one.path for one in found.machine.learned.numbers if one.moved_by} if found.machine.learned else set()
    assert f"tiers.{machine.tiers[1].name}.latency_us" in moved
    assert found.contradictions == ()


def test_runs_as_predicted_change_nothing() -> None:
    """Guards profiles: every prediction stays as it was, and is surer."""
    document = made.measurements()
    found = learned_from(document, document.machine)
    assert RunComparison(repriced(document, found.machine)).qualities["step"].mape < 1e-3
    learned = found.machine.learned
    assert learned is not None
    assert not [one for one in learned.numbers if one.moved_by]
    assert any(one.spread < 0.5 * one.prior_spread for one in learned.numbers)


# Evidence that contradicts itself.


@pytest.mark.parametrize("factors", [(0.75, 1.33), (1.0, 72.0 / 48.6)])
def test_conflicting_runs_widen_the_interval(factors: tuple[float, ...]) -> None:
    """Guards honesty: the interval that two runs of one layout teach holds both, as of 48.6 ms and 72 ms."""
    case = cases()[0]
    plain = step_sample(case).narrowed(lambda same: same)
    step_s = plain.price(lambda same: same)[0]
    runs = [replace(plain, name=f"{at}", measured_s=(at * step_s,), seen={"step": at * step_s}) for at in factors]
    found = learn(runs, case.machine, evidence=["a.log: 1 step (sha256 1)", "b.log: 1 step (sha256 2)"]).machine
    assert found.description == f"{case.machine.name}, learned from a.log: 1 step; b.log: 1 step"
    assert found.learned is not None
    assert 0.1 < found.learned.of_model < 0.5
    assert all(diagnose(run, found).reasonable for run in runs)


# GEMMs of a profiler trace.


def test_gemms_teach_sustained_rates() -> None:
    """GEMMs of twice the predicted time: within 5% afterwards, and the network as unsure as before."""
    machine, framework = load_machine("localhost").document, find_framework("axonn-tune")
    shapes = [(256, 512, 512), (1024, 512, 512), (768, 768, 768), (512, 2048, 512)]
    probes = [MatmulProbe(layout=layout, m=m, n=n, k=k) for layout in LAYOUTS for m, n, k in shapes]
    (plain,) = probe_samples(dict.fromkeys(probes, 1.0), machine, framework, name="trace.json")
    slow = [2.0 * seconds for seconds in plain.price(lambda same: same)]
    found = learn(probe_samples(dict(zip(probes, slow, strict=True)), machine, framework, name="trace.json"), machine)
    assert max(abs(row.after) for row in found.rows) < 0.05
    assert found.machine.accelerator.peak_tflops["fp32"] == pytest.approx(0.05, rel=0.1)
    assert "tiers.loopback.bandwidth_gb_per_s" in found.silent


@pytest.mark.parametrize("gb_per_s", [18.0, 90.0, 170.0, 260.0, 400.0])
@pytest.mark.parametrize("op", ["all_gather", "all_reduce"])
def test_no_group_of_a_learned_level_is_faster_than_its_log(gb_per_s: float, op: CollectiveKind) -> None:
    """Guards links that are others than the profile's: groups of two and four kept bandwidths of NVLink beside 18 GB/s,
    and collectives without a log those of NVLink."""
    machine, framework = load_machine("dgx-h100").document, find_framework("axonn-tune")
    probes = [CollectiveProbe(op=op, group=8, stride=1, size_bytes=2**power) for power in range(22, 33)]
    times = {one: 50e-6 + bus_bytes(op, 8, one.size_bytes) / (gb_per_s * 1e9) for one in probes}
    found = learn(probe_samples(dict[Probe, float](times), machine, framework, name="log"), machine)
    learned, levels = found.machine.tiers[0], found.machine.tiers_of(op)
    assert all(one.bandwidth_gb_per_s <= gb_per_s * 1.01 for one in learned.measured or ())
    assert levels[0].bandwidth_gb_per_s == pytest.approx(gb_per_s, rel=0.1) or op == "all_reduce"
    if gb_per_s < 100.0:
        assert found.machine.tiers_of("reduce_scatter")[0].bandwidth_gb_per_s == pytest.approx(gb_per_s, rel=0.1)
        since = f"since nvlink has {learned.bandwidth_gb_per_s:.4g} GB/s instead of 339"
        assert told(found.consequences, kept=False) == [
            f"tiers.nvlink.measured dropped: 5 of 5 groups that would exceed it, {since}",
            f"library.algorithms.all_reduce dropped: reduction in the switch (NVLS), {since}",
        ]
        assert "tiers.nvlink.bandwidth_gb_per_s" in [one.path for one in found.far]
    elif gb_per_s < 300.0:
        (words,) = told(found.consequences, kept=False)
        number, reached = 5 if gb_per_s < 200.0 else 2, levels[0].bandwidth_gb_per_s
        assert words.startswith(f"tiers.nvlink.measured dropped: {number} of 5 groups, since logs of nvlink reach ")
        assert op == "all_reduce" or words.endswith(f" {reached:.4g} GB/s")
    else:
        assert told(found.consequences, kept=False) == []


# Experts: one cluster of its own dispatcher and token imbalance.


def of_experts(name: str, routing: str) -> Case:
    """A published layout with experts, with this routing."""
    records = csv.DictReader((SHIPPED / "moe_steps.csv").read_text("utf-8").splitlines())
    record = next(record for record in records if record["id"] == name)
    case = case_of(step_row({**record, "routing": routing, "tflops_per_gpu": "", "step_time_s": "1"}, 2))
    assert isinstance(case, Case)
    return case


@pytest.mark.nightly
def test_a_dispatcher_and_the_token_imbalance_are_learned_from_one_cluster() -> None:
    """Guards numbers of experts: planted ones are found from three steps of one model, and layouts of two others are
    predicted with them. Forced routing says nothing of the imbalance, and all-gathers have no numbers of their own."""
    truth = {"dispatchers": {"deepep-nvshmem": Dispatching(call_us=2500.0)}, "imbalance": 1.8}

    def measured(name: str, routing: str) -> Sample:
        sample = step_sample(of_experts(name, routing))
        return replace(sample, measured_s=sample.price(lambda machine: machine.model_copy(update=truth)))

    evidence = [measured(f"aws-q235-ep32-mb4-{one}", "forced") for one in ("alltoall", "deepep-nvshmem")]
    base = of_experts("aws-q235-ep32-mb4-alltoall", "forced").machine
    found = learn([*evidence, measured("aws-q235-ep32-mb4-alltoall", "natural")], base).machine
    assert found.dispatchers["deepep-nvshmem"].call_us == pytest.approx(2500.0, rel=0.15)
    assert found.imbalance == pytest.approx(1.8, rel=0.1)
    for name, routing in (("aws-k2-mb4-off-deepep-nvshmem", "natural"), ("aws-q235-ep32-mb1-deepep-nvshmem", "forced")):
        other = measured(name, routing)
        before, after = (
            abs(math.log(other.price(lambda _, to=to: to)[0] / other.measured_s[0])) for to in (base, found)
        )
        assert before > 0.25
        assert after < 0.06
    forced = learn(evidence, base).machine
    assert forced.imbalance is None
    assert {*forced.dispatchers} == {"alltoall", "deepep-nvshmem"}
    gathered = [replace(one, dispatcher="allgather") for one in evidence[:1]]
    assert not learn(gathered, base).machine.dispatchers
