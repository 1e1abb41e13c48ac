"""Mamba-2: priced in columns as alone; FLOPs, bytes, parameters and memory of one block by hand."""

from __future__ import annotations

import pytest

from axonn_tune.cost.compute import ComputeClock, compute_rates
from axonn_tune.cost.kernels import kernel_rate
from axonn_tune.cost.price import Detail, price
from axonn_tune.frameworks import find_framework
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.program.count import parameters
from axonn_tune.program.feasibility import broken_constraints
from axonn_tune.program.operations import PLAIN, Collective, Kernel, MatMul, Measured, Size
from axonn_tune.ranking.choosing import search
from axonn_tune.request import Request
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload
from axonn_tune.vocabulary import Precision
from tests.unit.small import small_model, small_problem

MACHINE = load_machine("dgx-h100").document
HIDDEN, HEADS, DIM, STATE, GROUPS, CHUNK, LENGTH = 2048, 64, 64, 128, 8, 128, 2048
INNER, CONVOLVED = HEADS * DIM, HEADS * DIM + 2 * GROUPS * STATE
PROJECTED = INNER + CONVOLVED + HEADS
TYPES = {
    "mamba": {
        "attention": False,
        "mlp": False,
        "mamba": {"heads": HEADS, "head_dim": DIM, "state": STATE, "groups": GROUPS},
    },
    "both": {"attention": False, "mamba": {"heads": HEADS, "head_dim": DIM, "state": STATE, "groups": GROUPS}},
    "moe": {"attention": False, "experts": {"count": 8, "per_token": 2, "width": 512, "shared_width": 512}},
    "attention": {"mlp": False},
}
MEGATRON = ("x", "z", "context", "data", "pipeline")


def model_of(layers: str) -> Model:
    """A model with this pattern of layer types."""
    sizes = {"hidden": HIDDEN, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 4096, "vocab": 51200}
    used = {name: value for name, value in TYPES.items() if name in layers}
    return small_model(family="llama", max_sequence_length=LENGTH, layers=layers, layer_types=used, **sizes)


def priced(grid: Grid, *, layers: str = "mamba*4", recompute: str = "none", precision: Precision = "bf16") -> Detail:
    """One layout of 64 sequences, a micro-batch of one."""
    workload = Workload(global_batch=64, sequence_length=LENGTH, precision=precision)
    return price(
        Job(model_of(layers), MACHINE, workload, find_framework("megatron-core")), Layout(grid, 1, recompute, 0)
    )


@pytest.mark.parametrize(
    "layers", ["mamba*4", pytest.param("(mamba moe)*2 attention both*2", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(("name", "memory_gib"), [("axonn-tune", 8.0), ("megatron-core", 8.0), ("fsdp", 80.0)])
def test_candidates_cost_what_each_does_alone(layers: str, name: str, memory_gib: float) -> None:
    """Guards the columns of Mamba-2, with stages, chunks, context and recompute: the same to the last bit."""
    small = MACHINE.accelerator.model_copy(update={"memory_gib": memory_gib})
    machine = MACHINE.model_copy(update={"accelerator": small})
    given = {"gpus": 8, "batch": 8, "sequence_length": LENGTH}
    ranked = search(small_problem(model_of(layers), machine, find_framework(name), **given), variants=True, top=0)
    assert len(ranked)
    for place in range(0, len(ranked), max(len(ranked) // 12, 1)):
        row, alone = ranked[place], ranked.detail(place)
        assert (row.iteration_s, row.communication_s, row.compute_s) == (
            alone.iteration_s,
            alone.communication_s,
            alone.compute_s,
        ), row.layout
        assert row.memory_bytes == pytest.approx(alone.memory_bytes, rel=1e-12)


@pytest.mark.parametrize("tensor", [1, 4])
def test_flops_of_a_block(tensor: int) -> None:
    """Guards GEMMs: both projections; of a chunk C·Bᵀ of each group, states, and outputs from inside and before it
    (arXiv 2405.21060, section 6). Backward once more C·Bᵀ and states, then gradients of every factor."""
    found = priced(Grid(x=tensor, data=8 // tensor, order=MEGATRON))
    block = found.program.blocks[0]

    def flops(layer: str, *, backward: bool = False) -> float:
        section = block.backward if backward else block.forward
        steps = [step for step in section.operations if isinstance(step, MatMul | Measured) and step.layer == layer]
        return sum(float((step.calls * step.flops).evaluate(found.values)) for step in steps) * tensor

    assert flops("mamba.in") == 2.0 * LENGTH * HIDDEN * PROJECTED
    assert flops("mamba.out") == 2.0 * LENGTH * INNER * HIDDEN
    shared, by_state, inside = 2.0 * GROUPS * CHUNK * STATE, 2.0 * INNER * STATE, 2.0 * INNER * CHUNK
    assert flops("mamba.scan") == LENGTH * (shared + by_state + (inside + by_state))
    assert flops("mamba.in", backward=True) == 2.0 * flops("mamba.in")
    again, states, x = shared + by_state, by_state, inside + by_state
    assert flops("mamba.scan", backward=True) == LENGTH * (again + states + x + 2 * by_state + 2 * inside + 2 * shared)


def test_work_of_a_block() -> None:
    """Guards the measured kernels' units of work, split over TP, and the bytes of gate and norm."""
    for tensor in (1, 4):
        found = priced(Grid(x=tensor, data=8 // tensor, order=MEGATRON))
        steps = found.program.blocks[0].forward.operations
        work = {one.kernel: float(one.work.evaluate(found.values)) for one in steps if isinstance(one, Measured)}
        assert work == {"causal_conv1d": LENGTH * CONVOLVED / tensor, "mamba2_scan": LENGTH * INNER * STATE / tensor}
        moved = [one for one in steps if isinstance(one, Kernel) and one.layer == "mamba.scan"]
        assert [float(one.size_bytes.evaluate(found.values)) for one in moved] == [LENGTH * 2 * 4 * INNER / tensor]


MEASURED = (
    ("dgx-h100", 128, 8192, 79.0),
    ("dgx-b200", 64, 8192, 44.0),
    ("dgx-b200", 128, 8192, 86.6),
    ("dgx-b200", 256, 8192, 162.5),
)
"""Machine, heads of 64 with a state of 128, tokens; ns a token of the scan (vllm-project/vllm PR 27299;
ai-dynamo/aiconfigurator@095f58a5)."""

CONVOLUTIONS = {"dgx-h100": 0.158, "dgx-b200": 0.125, "gb200-nvl72": 0.1235, "dgx-b300": 0.121, "gb300-nvl72": 0.118}
"""Of 6,144 channels and 16,384 tokens, ms (the same)."""


def kernel_s(machine: str, kernel: str, units: float, *, backward: bool = False) -> float:
    """One call on a machine, s."""
    rates = compute_rates(load_machine(machine).document.accelerator, "bf16")
    clock = ComputeClock(rates, 2.0, {}, PLAIN)
    return float(clock.call_s(Measured("forward", "", kernel, Size(units), Size(0.0), backward)))


def test_scans_take_what_was_measured() -> None:
    """Guards rates of measured kernels: no faster on Blackwell than on Hopper; other accelerators as the nearest in
    memory bandwidth, no faster than that."""
    for machine, heads, tokens, measured_ns in MEASURED:
        found_ns = 1e9 * kernel_s(machine, "mamba2_scan", tokens * heads * 64.0 * 128.0) / tokens
        assert found_ns == pytest.approx(measured_ns, rel=0.15), machine
    for machine, measured_ms in CONVOLUTIONS.items():
        assert 1e3 * kernel_s(machine, "causal_conv1d", 16384.0 * 6144) == pytest.approx(measured_ms, rel=0.05), machine
    ahead, back = (kernel_s("dgx-h100", "mamba2_scan", 1e12, backward=one) for one in (False, True))
    assert back / ahead == pytest.approx(2.69, rel=0.01)
    slower = kernel_s("dgx-a100", "mamba2_scan", 1e12) / ahead
    assert slower == pytest.approx(3350 / 2039, rel=0.01)
    accelerators = {name: load_machine(name).document.accelerator for name in ("dgx-a100", "dgx-h200", "mi355x")}
    rows = {name: kernel_rate("mamba2_scan", one, backward=False) for name, one in accelerators.items()}
    assert [row.kind for row in rows.values()] == ["assumed", "measured", "assumed"]
    blackwell = load_machine("dgx-b200").document.accelerator
    assert rows["mi355x"].units_per_s == kernel_rate("mamba2_scan", blackwell, backward=False).units_per_s


@pytest.mark.parametrize("tensor", [1, 2])
def test_memory_of_a_block(tensor: int) -> None:
    """Guards states and activations: vectors split over TP but the norm; a token keeps the block's input, the norm's
    output, all projections, the scan's output, the gated one, and what goes into the GEMM out."""
    found = priced(Grid(x=tensor, data=8 // tensor, order=MEGATRON))
    vectors = HIDDEN + (CONVOLVED * 5 + HEADS * 3 + INNER) / tensor
    assert found.values["vectors"] == 4 * vectors + HIDDEN
    weights = 4 * HIDDEN * (PROJECTED + INNER)
    assert found.values["parameters"] == (weights + 2 * found.values["V"] * HIDDEN) / tensor
    items = dict(found.memory.items)
    assert items["saved Mamba-2 projections"] == 4 * 2 * LENGTH * PROJECTED / tensor
    assert items["saved Mamba-2 scan"] == 4 * 2 * LENGTH * 2 * INNER / tensor
    assert items["saved norm outputs"] == 4 * 2 * LENGTH * (HIDDEN + INNER) / tensor
    full = dict(priced(Grid(x=tensor, data=8 // tensor, order=MEGATRON), recompute="full").memory.items)
    assert not any(name.startswith("saved Mamba") for name in full)


def test_parameters_are_the_models() -> None:
    """Guards what a lone rank stores: every element of the description."""
    for layers in ("mamba*4", "(mamba moe)*2 attention both"):
        found, model = priced(Grid(data=8, order=MEGATRON), layers=layers), model_of(layers)
        elements = found.values["parameters"] + found.values["vectors"] + found.values.get("expert_parameters", 0.0)
        assert elements - 2 * (found.values["V"] - model.vocab) * HIDDEN == parameters(model)


def test_context_swaps_tokens_for_heads() -> None:
    """Guards Megatron-Core's all-to-alls: z, x, B, C and dt, the output back, and mirrored (mamba_context_parallel.py);
    only whole groups are swapped."""
    found = priced(Grid(context=2, data=4, order=MEGATRON))
    each = [INNER, INNER, GROUPS * STATE, GROUPS * STATE, HEADS]
    for section, widths in (("forward", [*each, INNER]), ("backward", [INNER, *each])):
        steps = getattr(found.program.blocks[0], section).operations
        sent = [step for step in steps if isinstance(step, Collective) and step.axis == "context"]
        assert {step.kind for step in sent} == {"all_to_all"}
        assert [float(step.size_bytes.evaluate(found.values)) for step in sent] == [
            2 * (LENGTH / 2) * width for width in widths
        ]
    model, framework = model_of("mamba*4"), find_framework("megatron-core")
    workload = Workload(global_batch=64, sequence_length=LENGTH)
    grid = Grid(x=4, context=4, order=MEGATRON)
    assert broken_constraints(grid, model, workload, framework, micro_batch=1) == [
        "Mamba groups (8) is not divisible by TP·CP = 16"
    ]
    grid = Grid(x=16, order=MEGATRON)
    assert "Mamba groups (8) is not divisible by TP = 16" in broken_constraints(
        grid, model, workload, framework, micro_batch=1
    )


def test_formats_quantize_both_gemms() -> None:
    """Guards number formats: GEMMs in and out are narrow, those of the scan are not."""
    found = priced(Grid(data=8, order=MEGATRON), precision="fp8-current")
    products = [step for step in found.program.blocks[0].forward.operations if isinstance(step, MatMul)]
    assert {step.layer for step in products if step.narrow} == {"mamba.in", "mamba.out"}


def test_a_shipped_model_is_ranked() -> None:
    """Guards Nemotron 3 Nano on 64 GPUs, of one pipeline stage: ranked, with experts spread."""
    request = Request(pipeline=1, context=1, micro_batch=1)
    machine, framework = load_machine("dgx-h100").document, find_framework("megatron-core")
    model = load_model("nemotron-3-nano-30b-a3b").document
    given = {"gpus": 64, "batch": 64, "sequence_length": 4096}
    ranked = search(small_problem(model, machine, framework, request=request, **given), top=0)
    assert len(ranked)
    assert ranked[0].grid.expert > 1
