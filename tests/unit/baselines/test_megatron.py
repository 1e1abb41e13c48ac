"""Prices of Megatron-LM against hand values and against the 4D program where the two are the same."""

from __future__ import annotations

import pytest

from axonn_tune.baselines.layout import (
    CURRENT,
    NARAYANAN_2021,
    WAITING,
    Layout,
    Software,
    broken_constraints,
    list_layouts,
)
from axonn_tune.baselines.network import transfer_time_s
from axonn_tune.baselines.pipeline import bubble_share, chain_exposed_s, pipeline_time
from axonn_tune.baselines.stretches import Block, block_backward, block_forward, collectives, computations
from axonn_tune.cost.prediction import Configuration, price_configuration
from axonn_tune.grid import Grid
from axonn_tune.program.operations import Kernel, MatMul
from axonn_tune.program.size import PLAIN
from axonn_tune.specs.workload import ELEMENT_SIZES, RECOMPUTES, Recompute
from tests.unit.baselines.cases import machine, model, price, workload

SIZES = {"b": 4.0, "S": 2048.0, "H": 4096.0, "x": 4.0}
BUFFER_BYTES = 2 * 4 * 2048 * 4096


def block(*, split: bool) -> Block:
    """A block of 5b, with the sequence split or not."""
    return Block(model(), ELEMENT_SIZES["bf16"], CURRENT, sequence_parallel=split)


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_a_single_gpu_layout_is_data_parallelism(recompute: Recompute) -> None:
    """Guards both programs against each other: without t and p only the last product of full recomputation differs."""
    grid = Configuration(Grid(data=8), 2, recompute, kept_layers=0)
    same = price_configuration(model(), machine(), workload(), grid)
    priced = price(Layout(data=8, micro_batch=2, recompute=recompute))
    tokens, m = 2 * 2048, model()
    fc2_again = 2.0 * m.layers * tokens * m.ffn * m.hidden * priced.micro_batches if recompute == "full" else 0.0
    assert priced.executed_flops == pytest.approx(same.executed_flops + fc2_again, rel=1e-9)


def test_computation_is_that_of_data_parallelism() -> None:
    """Guards kernel times: equal but for rounding weights and adding gradients, which Megatron-LM fuses."""
    grid = Configuration(Grid(data=8), 2, "none", kept_layers=0)
    same = price_configuration(model(), machine(), workload(), grid)
    clock = Clock(same.rates, 2.0, same.values, PLAIN)
    only_sharded_s = sum(
        float(count.evaluate(same.values)) * float(clock.call_s(step))
        for step, count in same.program.calls()
        if isinstance(step, Kernel) and (step.prepares_gather or step.accumulates)
    )
    priced = price(Layout(data=8, micro_batch=2), software=WAITING)
    assert priced.compute_s == pytest.approx(same.alone_s - only_sharded_s, rel=0.001)


def test_tensor_parallelism_sends_four_all_reduces_a_block() -> None:
    """Guards the volume: 4 all-reduces of 2·b·s·h bytes a block and micro-batch (arXiv 1909.08053, section 3)."""
    sent = collectives((*block_forward(block(split=False)), *block_backward(block(split=False), recompute="none")))
    assert [step.kind for step in sent] == ["all_reduce"] * 4
    assert sum(step.size_bytes.evaluate(SIZES) for step in sent) == 4 * BUFFER_BYTES


def test_sequence_parallelism_sends_as_much_and_gathers_two_inputs_again() -> None:
    """Guards the volume: an all-reduce becomes a gather and a scatter; two inputs are gathered for their gradients."""
    sent = collectives((*block_forward(block(split=True)), *block_backward(block(split=True), recompute="none")))
    kinds = [step.kind for step in sent]
    assert (kinds.count("reduce_scatter"), kinds.count("all_gather"), kinds.count("all_reduce")) == (4, 4 + 2, 0)
    assert {step.size_bytes.evaluate(SIZES) for step in sent} == {BUFFER_BYTES}


def test_full_recomputation_repeats_the_whole_block() -> None:
    """Guards what Megatron-LM does and the 4D program saves: fc2 and its collective once more."""
    once, again = (
        block_backward(block(split=False), recompute="none"),
        block_backward(block(split=False), recompute="full"),
    )
    assert len(collectives(again)) - len(collectives(once)) == 2
    layers = [step.layer for step in computations(again) if isinstance(step, MatMul) and step.phase == "recompute"]
    assert layers == ["attention.qkv", "attention.output", "mlp.fc1", "mlp.fc2"]


@pytest.mark.parametrize(("stages", "micro_batches", "interleave", "share"), [(4, 8, 1, 3 / 8), (4, 8, 3, 1 / 8)])
def test_bubble_is_as_published(stages: int, micro_batches: int, interleave: int, share: float) -> None:
    """Guards (p-1)/(v·m), arXiv 2104.04473, section 2.2, and that equal stages give just that."""
    assert bubble_share(stages=stages, micro_batches=micro_batches, interleave=interleave) == pytest.approx(share)
    found = pipeline_time((2.0,) * stages, micro_batches=micro_batches, interleave=interleave)
    assert found.busy_s == 2.0 * micro_batches
    assert found.bubble_s == pytest.approx(share * found.busy_s)


def test_the_slowest_stage_sets_the_pace() -> None:
    """Guards uneven stages by a hand value: 10 rounds of 3, and the others once to fill and drain."""
    found = pipeline_time((3.0, 1.0, 2.0), micro_batches=10)
    assert (found.busy_s, found.bubble_s) == (30.0, 3.0)


def test_the_last_bucket_is_always_exposed() -> None:
    """Guards the tail of the data-parallel reduction, and what is left when it is slower than the work beside it."""
    assert chain_exposed_s(1.0, behind_s=5.0, links=10) == 1.0
    assert chain_exposed_s(3.0, behind_s=2.0, links=10) == 3.0 + 9 * 1.0


def test_sends_share_the_node() -> None:
    """Guards point-to-point times by hand: all four ranks of a Perlmutter node send through its links at once."""
    tiers = machine().tiers
    inside = transfer_time_s(1e9, stride=1, tiers=tiers, launch_s=0.0)
    across = transfer_time_s(1e9, stride=4, tiers=tiers, launch_s=0.0)
    assert inside == pytest.approx(tiers[0].latency_s + 1e9 / tiers[0].bandwidth_bytes_per_s)
    assert across == pytest.approx(tiers[1].latency_s + 4e9 / tiers[1].bandwidth_bytes_per_s)


@pytest.mark.parametrize("software", [CURRENT, NARAYANAN_2021])
def test_parts_add_up_to_the_step(software: Software) -> None:
    """Guards the named parts: their sum is the step, and nothing exposed exceeds what is sent."""
    layout = Layout(4, 2, 2, 1, interleave=2, sequence_parallel=True, distributed_optimizer=True)
    found = price(layout, software=software)
    parts = found.compute_s + sum(part.exposed_s for part in found.traffic) + found.bubble_s
    assert found.iteration_s == pytest.approx(parts)
    assert all(0.0 <= part.exposed_s <= part.seconds for part in found.traffic)
    assert {part.kind for part in found.traffic} == {"tensor", "pipeline", "data", "tied table"}


def test_hiding_only_saves_time() -> None:
    """Guards the overlaps of today's release: none of them makes a layout slower."""
    layout = Layout(4, 2, 2, 2, interleave=2, sequence_parallel=True, distributed_optimizer=True)
    assert price(layout).iteration_s < price(layout, software=NARAYANAN_2021).iteration_s


def test_listed_layouts_are_accepted_and_complete() -> None:
    """Guards the space: all GPUs in use, nothing refused, and the corners are there."""
    layouts = list(list_layouts(64, model(), workload()))
    assert all(layout.gpus == 64 and not broken_constraints(layout, model(), workload()) for layout in layouts)
    assert {1, 2, 4, 8, 16, 32} == {layout.tensor for layout in layouts}
    assert {1, 2, 4, 8} == {layout.pipeline for layout in layouts}
    assert len(set(layouts)) == len(layouts)


def test_refusals_name_their_numbers() -> None:
    """Guards messages: each constraint shows what does not divide what."""
    found = broken_constraints(Layout(tensor=5, pipeline=7, interleave=2, micro_batch=1, data=1), model(), workload())
    assert "heads (32) is no multiple of tensor = 5" in found
    assert "layers (24) is no multiple of pipeline · interleave = 14" in found
