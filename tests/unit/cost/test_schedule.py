"""The schedule: nothing lost, nothing early, the extrapolation holds, and overlap only ever helps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from axonn_tune.cost.prediction import Configuration, Pricing, price_configuration
from axonn_tune.frameworks.description import FUSED
from axonn_tune.grid import Grid
from axonn_tune.program.operations import Collective
from axonn_tune.program.schedule import Instructions, Issue, MicroBatch, Run, StepSchedule, Sync, Wait, build_schedule
from axonn_tune.program.step import ONLY, build_step
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.workload import OVERLAPS, RECOMPUTES, Overlap, Recompute, Workload
from tests.unit.cost.machines import two_tier_machine

WORKLOAD = Workload(global_batch=48 * 8, sequence_length=64)
GRID = Grid(2, 2, 2, 2)
MICRO_BATCH = 12


def unrolled(schedule: StepSchedule, *, layers: int, kept: int, accumulation: int) -> Iterator[Instructions]:
    """Every part of a step in order, each block and micro-batch spelled out."""

    def batch(parts: MicroBatch) -> Iterator[Instructions]:
        yield parts.embedding
        yield from [parts.block] * (layers - 1)
        yield parts.last_block
        yield parts.head_all_kept if kept == layers else parts.head
        back = parts.backward
        if kept:
            yield back.kept_first
            yield from [back.kept_middle] * (kept - 1)
            yield from [back.middle] * (layers - kept - 1)
            yield from [back.last] * (kept < layers)
        elif layers == 1:
            yield back.only
        else:
            yield back.first
            yield from [back.middle] * (layers - 2)
            yield back.last
        yield parts.flush

    for _ in range(accumulation - 1):
        yield from batch(schedule.micro_batch)
    yield from batch(schedule.last_micro_batch)
    yield schedule.ends[ONLY]


def play_out(priced: Pricing, machine: Machine, workload: Workload) -> float:
    """End of the step with every instruction replayed, micro-batches joined by waiting for all lanes."""
    schedule = build_schedule(priced.program, overlaps=workload.overlaps, split=workload.split_micro_batch)
    call_s = {id(term.collective): term.seconds / term.count for term in priced.terms}
    by_value = {(t.op, t.axis, t.bytes): t.seconds / t.count for t in priced.terms}
    tier = {term.axis: term.tier for term in priced.terms}
    played = [one for batch in priced.batches for stretch in batch.stretches for one in stretch.intervals]
    runs = {id(i.operation): i.end_s - i.start_s for i in played if not isinstance(i.operation, Collective)}
    now, lanes, slots = 0.0, dict.fromkeys(tier.values(), 0.0), dict[str, float]()

    def duration(one: Collective) -> float:
        calls = 1.0 if one.role == "weight" else float(one.calls.evaluate(priced.values))
        known = call_s.get(id(one))
        return calls * (
            known if known is not None else by_value[one.kind, one.axis, float(one.size_bytes.evaluate(priced.values))]
        )

    model_layers = int(priced.values["L"])
    parts = unrolled(schedule, layers=model_layers, kept=int(priced.values["kept"]), accumulation=priced.accumulation)
    for part in parts:
        for step in part:
            if isinstance(step, Run):
                now += sum(runs[id(one)] for one in step.operations)
            elif isinstance(step, Wait):
                now = max(now, slots.get(step.slot, now))
            elif step.collective.axis in tier:
                lane = tier[step.collective.axis]
                lanes[lane] = max(lanes[lane], now) + duration(step.collective)
                if isinstance(step, Issue):
                    slots[step.slot] = lanes[lane]
                else:
                    now = lanes[lane]
    return now


@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("kept", [0, 1, 2, 5])
@pytest.mark.parametrize("overlaps", [OVERLAPS, (), OVERLAPS[:1], OVERLAPS[2:4]])
def test_every_collective_of_the_program_is_scheduled_as_often_as_it_says(
    recompute: Recompute, kept: int, overlaps: tuple[Overlap, ...]
) -> None:
    """Guards the one idea: the schedule only moves the program's operations, it adds and drops none."""
    model = load_model("nano", overrides=["layers=5"]).document
    for split in (False, True):
        workload = WORKLOAD.model_copy(update={"overlaps": overlaps, "split_micro_batch": split})
        priced = price_configuration(
            model, two_tier_machine(), workload, Configuration(GRID, MICRO_BATCH, recompute, kept)
        )
        program = build_step(model, workload, recompute=recompute)
        schedule = build_schedule(program, overlaps=overlaps, split=split)
        sent: Counter[tuple[str, str, str, str]] = Counter()
        for part in unrolled(schedule, layers=5, kept=kept, accumulation=priced.accumulation):
            for step in part:
                if isinstance(step, Sync | Issue):
                    one = step.collective
                    calls = 1 if one.role == "weight" else int(float(one.calls.evaluate(priced.values)))
                    sent[one.kind, one.axis, one.phase, one.layer] += calls
        expected = {(term.op, term.axis, term.phase, term.layer): 0 for term in priced.terms}
        for term in priced.terms:
            expected[term.op, term.axis, term.phase, term.layer] += term.count
        assert {key: count for key, count in sent.items() if count} == {k: c for k, c in expected.items() if c}


@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("kept", [0, 3, 12])
@pytest.mark.parametrize("outer", [(10.0, 80.0), (5.0, 2.0), (200.0, 80.0), (10.0, 0.02)])
def test_extrapolated_steps_equal_unrolled_ones(recompute: Recompute, kept: int, outer: tuple[float, float]) -> None:
    """Guards the shortcut of replaying two blocks: every block replayed gives the same step."""
    model = load_model("nano", overrides=["layers=12"]).document
    machine = two_tier_machine(outer=outer)
    for grid in (GRID, Grid(1, 1, 16, 1), Grid(1, 1, 1, 16), Grid(4, 1, 2, 2, order=("z", "x", "data", "y"))):
        priced = price_configuration(
            model, machine, WORKLOAD, Configuration(grid, MICRO_BATCH, recompute, kept), software=FUSED
        )
        assert play_out(priced, machine, WORKLOAD) == pytest.approx(priced.iteration_s, rel=2e-3)


def test_no_step_is_shorter_than_what_one_network_has_to_send() -> None:
    """Guards steps that only the network bounds: reductions queue, each block's behind the one before."""
    model = load_model("nano", overrides=["layers=12"]).document
    machine = two_tier_machine(outer=(10.0, 0.001))
    priced = price_configuration(model, machine, WORKLOAD, Configuration(Grid(1, 1, 1, 16), MICRO_BATCH, "none"))
    assert {term.tier for term in priced.terms} == {"network"}
    assert priced.iteration_s >= priced.communication_s


def test_without_overlap_a_step_is_computation_plus_communication() -> None:
    """Guards the synchronous twin: every second of communication is exposed."""
    model, machine = load_model("nano").document, two_tier_machine()
    workload = WORKLOAD.model_copy(update={"overlaps": ()})
    priced = price_configuration(model, machine, workload, Configuration(GRID, MICRO_BATCH, "full"))
    assert priced.iteration_s == pytest.approx(priced.compute_s + priced.communication_s)
    assert sum(term.exposed_s for term in priced.terms) == pytest.approx(priced.communication_s)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_each_overlap_helps_or_does_nothing(overlap: Overlap, recompute: Recompute) -> None:
    """Guards each overlap by itself against the synchronous twin, and the sum of exposed times."""
    model, machine = load_model("nano").document, two_tier_machine()
    for grid in (GRID, Grid(1, 1, 8, 2), Grid(2, 8, 1, 1), Grid(1, 1, 1, 16)):
        steps = []
        for overlaps in ((), (overlap,)):
            workload = WORKLOAD.model_copy(update={"overlaps": overlaps, "split_micro_batch": True})
            priced = price_configuration(
                model, machine, workload, Configuration(grid, MICRO_BATCH, recompute), software=FUSED
            )
            steps.append(priced.iteration_s)
            assert sum(term.exposed_s for term in priced.terms) == pytest.approx(priced.exposed_communication_s)
        assert steps[1] <= steps[0] * (1 + 1e-12)


def test_prefetch_hides_gathers_behind_products() -> None:
    """Guards that overlap does something: with a slow network and large products most gathers vanish."""
    model, machine = load_model("5b").document, two_tier_machine()
    workload = Workload(global_batch=64, sequence_length=2048)
    for overlaps, hidden in (((), False), (OVERLAPS, True)):
        chosen = workload.model_copy(update={"overlaps": overlaps})
        priced = price_configuration(model, machine, chosen, Configuration(Grid(1, 1, 16, 1), 4, "full"))
        gathers = [term for term in priced.terms if term.op == "all_gather" and "mlp" in term.layer]
        share = sum(term.exposed_s for term in gathers) / sum(term.seconds for term in gathers)
        assert (share < 0.1) is hidden
