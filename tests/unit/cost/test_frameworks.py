"""What frameworks do differently, by hand values and against each other."""

from __future__ import annotations

import pytest

from axonn_tune.cost.price import Detail, price
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.description import FUSED, Framework
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.program.operations import MatMul
from axonn_tune.program.step import StepProgram, build_step
from axonn_tune.recompute import RECOMPUTES
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.machine import Software
from axonn_tune.specs.workload import Recompute, Workload

ORDER = ("x", "context", "z", "data", "pipeline")
WORKLOAD = Workload(global_batch=64, sequence_length=2048)
TOKENS = {"b": 4.0, "S": 2048.0, "H": 4096.0, "x": 4.0, "y": 1.0, "parts": 1.0, "context": 1.0}
BUFFER_BYTES = 2 * 4 * 2048 * 4096


def program(name: str, recompute: Recompute = "none", **changes: object) -> StepProgram:
    """The program of 5b as a framework trains it."""
    options = find_framework(name).with_step(**changes).step
    return build_step(load_model("5b").document, WORKLOAD, recompute=recompute, options=options)


def priced(
    grid: Grid, *, framework: Framework, recompute: Recompute = "none", software: Software = FUSED, chunks: int = 1
) -> Detail:
    """5b on Perlmutter, micro-batches of 2 sequences."""
    return price(
        Job(load_model("5b").document, load_machine("perlmutter-80gb").document, WORKLOAD, framework),
        Layout(grid, 2, recompute, 0, chunks),
        software=software,
    )


def sent_over_x(found: StepProgram) -> list[tuple[str, float]]:
    """Kinds and bytes of a block's collectives over x."""
    sections = (found.blocks[0].forward, found.blocks[0].backward)
    return [
        (step.kind, float(step.size_bytes.evaluate(TOKENS)))
        for section in sections
        for step in section.operations
        if getattr(step, "axis", "") == "x"
    ]


def test_tensor_parallelism_sends_four_all_reduces_a_block() -> None:
    """Guards the volume: 4 all-reduces of 2·b·s·h bytes a block and micro-batch (arXiv 1909.08053, section 3)."""
    assert sent_over_x(program("megatron-2021")) == [("all_reduce", BUFFER_BYTES)] * 4


def test_sequence_parallelism_sends_as_much_and_gathers_two_inputs_again() -> None:
    """Guards the volume: an all-reduce becomes a gather and a scatter; two inputs are gathered for their gradients."""
    sent = sent_over_x(program("megatron-2022"))
    kinds = [kind for kind, _ in sent]
    assert (kinds.count("reduce_scatter"), kinds.count("all_gather"), kinds.count("all_reduce")) == (4, 4 + 2, 0)
    assert {size_bytes for _, size_bytes in sent} == {BUFFER_BYTES}


@pytest.mark.parametrize(("name", "repeats_fc2"), [("megatron-core", True), ("axonn-tune", False), ("fsdp", False)])
def test_full_recompute_repeats_what_its_framework_repeats(name: str, repeats_fc2: bool) -> None:
    """Guards fc2: Megatron-LM's recompute runs to the end of a block, others' stop once what was saved is there."""
    again = program(name, "full").blocks[0].backward.operations
    layers = [step.layer for step in again if isinstance(step, MatMul) and step.phase == "recompute"]
    assert ("mlp.fc2" in layers) == repeats_fc2
    assert {"attention.qkv", "attention.output", "mlp.fc1"} <= set(layers)


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_one_gpu_per_replica_is_plain_data_parallelism(recompute: Recompute) -> None:
    """Guards the options: with nothing split, Megatron-LM's FLOPs are the bundled runtime's but for fc2's repeat."""
    same = priced(Grid(data=8), framework=find_framework("axonn-tune"), recompute=recompute)
    found = priced(Grid(data=8), framework=find_framework("megatron-core"), recompute=recompute)
    model, tokens = load_model("5b").document, 2 * 2048
    again = 2.0 * model.layers * tokens * model.ffn * model.hidden * found.accumulation if recompute == "full" else 0.0
    head = found.executed_flops - same.executed_flops - again
    assert head == pytest.approx(0.0, abs=0.01 * same.executed_flops)


@pytest.mark.parametrize("name", ["megatron-core", "megatron-2021"])
def test_parts_add_up_to_the_step(name: str) -> None:
    """Guards the named parts of a pipelined step: computation, exposed communication and bubble."""
    grid = Grid(x=4, data=2, pipeline=2, context=1, z=1, order=ORDER)
    found = priced(grid, framework=find_framework(name), chunks=2)
    parts = found.compute_s + found.exposed_communication_s + found.bubble_s
    assert found.iteration_s == pytest.approx(parts)


def test_a_send_costs_what_a_collective_costs() -> None:
    """Guards software numbers: what is added to each collective is added to sends between stages, too."""
    grid = Grid(x=1, data=2, pipeline=2, context=1, z=1, order=ORDER)
    framework = find_framework("megatron-2021")
    fast, slow = (
        next(term for term in priced(grid, framework=framework, software=software).terms if term.op == "send")
        for software in (FUSED, Software(collective_us=200.0))
    )
    assert slow.seconds - fast.seconds == pytest.approx(fast.count * 200e-6)
