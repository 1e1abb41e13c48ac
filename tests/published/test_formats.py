"""Number formats below 16 bits against published rates of GEMMs and of quantization."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from axonn_tune.cost.compute import ComputeClock, compute_rates
from axonn_tune.cost.price import price
from axonn_tune.frameworks.step import StepOptions
from axonn_tune.grid import Grid
from axonn_tune.job import Layout
from axonn_tune.program import block, layers
from axonn_tune.program.inputs import LayerInputs
from axonn_tune.program.operations import ONCE, PLAIN, Kernel, MatMul, Operation, Size, as_size
from axonn_tune.program.types import experts
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.request import Request
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.formats import FORMATS, Copies
from axonn_tune.specs.workload import Workload
from axonn_tune.units import GIB
from axonn_tune.vocabulary import Precision
from tests.unit.small import small_model

LINEAR_MS: dict[tuple[str, Precision, bool], float] = {
    ("dgx-b300", "bf16", True): 12.758,
    ("dgx-b300", "fp8-current", True): 9.147,
    ("dgx-b300", "fp8-delayed", True): 7.802,
    ("dgx-b300", "mxfp8", True): 8.984,
    ("dgx-b300", "nvfp4", True): 6.453,
    ("dgx-b300", "fp8-current", False): 6.812,
    ("dgx-b300", "mxfp8", False): 7.161,
    ("dgx-b300", "nvfp4", False): 3.764,
    ("dgx-h200", "fp8-current", True): 20.285 / 32.014,
    ("dgx-h200", "fp8-delayed", True): 18.978 / 32.014,
    ("dgx-h200", "fp8-blockwise", True): 22.882 / 32.014,
    ("dgx-h200", "fp8-current", False): 16.785 / 31.968,
}
"""ms of the twelve GEMMs of a layer with and without quantization, of NVIDIA/TransformerEngine@d0067d0d,
gemm_profiling.rst; those of H200 NVL, of which there is no profile, over BF16's."""

CASTS_US: dict[tuple[str, Copies, int, int], float] = {
    ("dgx-b200", "rows", 8192, 8192): 34.84,
    ("dgx-b200", "columns", 8192, 8192): 39.61,
    ("dgx-b200", "all", 8192, 8192): 52.34,
    ("mi355x", "rows", 8192, 8192): 38.0,
    ("mi355x", "columns", 8192, 8192): 41.6,
    ("mi355x", "all", 8192, 8192): 56.6,
    ("gb200-nvl72", "columns", 8192, 28672): 105.0,
    ("gb200-nvl72", "columns", 4096, 14336): 39.9,
    ("gb200-nvl72", "all", 4096, 14336): 58.2,
}
"""µs of a kernel that quantizes BF16 to MXFP8: ROCm/TransformerEngine PR 598; NVIDIA/TransformerEngine PR 3291
and, with the sums of a bias gradient, PR 3137."""


def clock(
    machine: str, precision: Precision, values: dict[str, float], *, burst: bool = False, engine: bool = False
) -> ComputeClock:
    """burst: of calls so short that no power limit slows them down; engine: with kernels of Transformer Engine."""
    accelerator = load_machine(machine).document.accelerator
    accelerator = accelerator.model_copy(update={"training_share": 1.0}) if burst else accelerator
    ones = dict.fromkeys(("x", "y", "z", "data", "b", "parts", "A", "expert", "expert_tensor", "imbalance"), 1.0)
    rates = compute_rates(accelerator, precision, quantizes_in_gemm=engine)
    return ComputeClock(rates, 2.0, ones | values, PLAIN)


def spent_s(clock: ComputeClock, steps: list[Operation], *, quantized: bool) -> float:
    """Seconds of GEMMs, with or without those of quantization."""
    found = [one for one in steps if isinstance(one, MatMul) or (isinstance(one, Kernel) and one.quantizes)]
    return float(sum(clock.run_s(one) for one in found if quantized or isinstance(one, MatMul)))


def linear_ms(machine: str, precision: Precision, *, quantized: bool) -> float:
    """Twelve calls of Transformer Engine's linear layer forward, one for each GEMM of a layer of 4,096 by 16,384: each
    quantizes its input to all copies and its weight by rows, which in training are quantized once for several."""
    one = clock(machine, precision, {}, burst=True, engine=True)
    workload = Workload(global_batch=1, sequence_length=15872, precision=precision)
    options = StepOptions(
        quantizes_in_gemm=True, one_layout="mxfp8" in load_machine(machine).document.accelerator.peak_tflops
    )
    given = LayerInputs(small_model(family="llama"), workload.element_sizes, options, format=workload.format)
    tokens, hidden, width = 15872, 4096, 16384
    forward = [(tokens, k, n) for k, n in ((hidden, 3 * hidden), (hidden, hidden), (hidden, width), (width, hidden))]
    shapes = [*forward, *((m, n, k) for m, k, n in forward), *((k, m, n) for m, k, n in forward)]
    steps = list[Operation]()
    for m, k, n in shapes:
        steps += [
            *layers.quantized("forward", "linear", as_size(m * k), given, calls=ONCE),
            *layers.quantized("forward", "linear", as_size(k * n), given, calls=ONCE, once=True),
            MatMul("forward", "linear", as_size(m), as_size(n), as_size(k), "NN", narrow=given.narrow),
        ]
    return 1e3 * spent_s(one, steps, quantized=quantized)


def test_linear_layers_take_the_published_time() -> None:
    """Guards rates in formats below 16 bits, with and without quantization: in the median 10%, none by over 25%."""
    errors: dict[str, float] = {}
    for (machine, precision, quantized), measured in LINEAR_MS.items():
        found = linear_ms(machine, precision, quantized=quantized)
        found /= linear_ms(machine, "bf16", quantized=True) if measured < 1 else 1.0
        errors[f"{machine} {precision} quantized={quantized}"] = found / measured - 1.0
    print("\n".join(f"{name}: {error:+.1%}" for name, error in errors.items()))
    assert median(map(abs, errors.values())) <= 0.10
    assert max(map(abs, errors.values())) <= 0.25


@pytest.mark.parametrize(("machine", "copies", "rows", "columns"), CASTS_US)
def test_quantization_takes_the_published_time(machine: str, copies: Copies, rows: int, columns: int) -> None:
    """Guards kernels that quantize, alone: within 30%."""
    moved = FORMATS["mxfp8"].quantization_bytes(2 if copies == "all" else 1)
    step = Kernel("forward", "linear", Size(moved * rows * columns), quantizes=copies)
    found = float(clock(machine, "mxfp8", {}, engine=True).call_s(step))
    measured = CASTS_US[machine, copies, rows, columns]
    print(f"{1e6 * found:.1f} µs, measured {measured}")
    assert 1e6 * found == pytest.approx(measured, rel=0.3)


def grouped(precision: Precision, *, tokens: int, hidden: int, width: int, groups: int) -> list[Operation]:
    """One GEMM of experts, forward and backward, of a framework that saves originals: rows by 1 of `groups` experts."""
    workload = Workload(global_batch=1, sequence_length=tokens, precision=precision)
    sizes = {"experts": {"count": groups, "per_token": 1, "width": width}}
    model = small_model(family="llama", hidden=hidden, layers="moe*2", layer_types={"moe": sizes})
    options = StepOptions(saves_original=True, one_layout=True, sequence_parallel=True)
    given = LayerInputs(model, workload.element_sizes, options, format=workload.format)
    nodes = block.block_nodes(given)
    steps = (*block.forward(nodes), *block.backward(nodes, recompute="none"))
    return [one for one in steps if one.layer == experts.FC2]


def test_quantization_takes_its_share_of_a_grouped_gemm() -> None:
    """Guards the shares of quantization in an MXFP8 step's passes, 28, 13 and 33%, of pytorch/ao@36027d82,
    torchao/prototype/moe_training/README.md (B200, 131,072 tokens, 7,168 by 2,048, 8 groups)."""
    one = clock("dgx-b200", "mxfp8", {"S": 131072.0, "H": 2048.0})
    steps = grouped("mxfp8", tokens=131072, hidden=2048, width=7168, groups=8)
    forward = [step for step in steps if isinstance(step, MatMul | Kernel) and step.phase == "forward"]
    back = [step for step in steps if isinstance(step, MatMul | Kernel) and step.phase == "backward"]
    rows, columns, inputs, weights, dgrad, wgrad = back
    for passed, measured in (
        (forward, 634 / 2305),
        ([rows, weights, dgrad], 247 / 1931),
        ([columns, inputs, wgrad], 1021 / 3125),
    ):
        whole = spent_s(one, [*passed], quantized=True)
        share = 1.0 - spent_s(one, [*passed], quantized=False) / whole
        print(f"{whole * 1e6:,.0f} µs, {share:.1%}, measured {measured:.1%}")
        assert share == pytest.approx(measured, abs=0.05)


@pytest.mark.parametrize(
    ("n", "k", "groups", "bf16", "mxfp8"),
    [
        (8192, 5120, 1, 747, 1350),
        (8192, 5120, 8, 854, 1453),
        (2048, 7168, 1, 863, 1025),
        (2048, 7168, 8, 753, 1084),
    ],
)
def test_grouped_gemm_gains(n: int, k: int, groups: int, bf16: float, mxfp8: float) -> None:
    """Guards what MXFP8 gains of grouped GEMMs with quantization, of the same README (128,000 rows, both passes): its
    rates are those of calls, 31 to 45% below the sum of the parts that it lists."""
    flops = 6.0 * 128000 * n * k / 1e12
    values = {"S": 128000.0, "H": float(n)}
    found = {
        name: flops
        / spent_s(
            clock("dgx-b200", name, values),
            grouped(name, tokens=128000, hidden=n, width=k, groups=groups),
            quantized=True,
        )
        for name in ("bf16", "mxfp8")
    }
    print(f"{found['bf16']:,.0f} (measured {bf16}), {found['mxfp8']:,.0f} ({mxfp8})")
    assert found["mxfp8"] / found["bf16"] == pytest.approx(mxfp8 / bf16, rel=0.25)


def saved_gib(precision: Precision) -> float:
    """Activations that a stage of 16 MoE layers of DeepSeek-V3 saves (arXiv 2603.07685, table 4): PP 4, VPP 4, EP 64
    on 256 GPUs, forced load balancing, nothing recomputed."""
    given: dict[str, Any] = {"framework": "megatron-core", "batch": 8192, "seq": 4096, "imbalance": 1}
    asked = Request("deepseek-v3", 256, machine="gb200-nvl72", precision=precision, set=["model.mtp_layers=0"], **given)
    order = ("x", "context", "z", "data", "pipeline", "y")
    grid = Grid(1, 1, 1, 64, pipeline=4, expert=64, expert_tensor=1, order=order)
    stage = price(load_inputs(asked).problem, Layout(grid, 1, "none", chunks=4)).stages[1]
    return sum(size for name, size in stage.memory.items if name.startswith("saved")) / GIB


def test_fp8_saves_activations_of_deepseek_v3() -> None:
    """Guards 16 GiB of FP8, which halves inputs of linear layers, and no more."""
    saving = saved_gib("bf16") - saved_gib("mxfp8")
    print(f"{saving:.1f} GiB, published 16")
    assert saving == pytest.approx(16.0, rel=0.15)
