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
from axonn_tune.program import block
from axonn_tune.program.inputs import LayerInputs
from axonn_tune.program.layers import linear_backward, linear_forward
from axonn_tune.program.operations import PLAIN, Array, Kernel, MatMul, Operation, Size
from axonn_tune.program.types import experts
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.request import Request
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.workload import Workload
from axonn_tune.units import GIB
from axonn_tune.vocabulary import Precision
from tests.unit.small import linear_of, small_model

RATES: dict[tuple[str, Precision, bool], float] = {
    ("dgx-b300", "bf16", True): 1503,
    ("dgx-b300", "fp8-current", True): 2096,
    ("dgx-b300", "fp8-delayed", True): 2457,
    ("dgx-b300", "mxfp8", True): 2134,
    ("dgx-b300", "nvfp4", True): 2971,
    ("dgx-b300", "fp8-current", False): 2815,
    ("dgx-b300", "mxfp8", False): 2677,
    ("dgx-b300", "nvfp4", False): 5094,
    ("dgx-h200", "fp8-current", True): 945 / 599,
    ("dgx-h200", "fp8-delayed", True): 1010 / 599,
    ("dgx-h200", "fp8-blockwise", True): 838 / 599,
    ("dgx-h200", "fp8-current", False): 1142 / 600,
}
"""TFLOP/s of three GEMMs with and without quantization, of NVIDIA/TransformerEngine@d0067d0d, gemm_profiling.rst; those
of H200 NVL, of which there is no profile, over BF16's."""


def clock(machine: str, precision: Precision, values: dict[str, float], *, burst: bool = False) -> ComputeClock:
    """burst: of calls so short that no power limit slows them down."""
    accelerator = load_machine(machine).document.accelerator
    accelerator = accelerator.model_copy(update={"training_share": 1.0}) if burst else accelerator
    ones = dict.fromkeys(("x", "y", "z", "data", "b", "parts", "A", "expert", "expert_tensor", "imbalance"), 1.0)
    return ComputeClock(compute_rates(accelerator, precision), 2.0, ones | values, PLAIN)


def spent_s(clock: ComputeClock, steps: list[Operation], *, quantized: bool) -> float:
    """Seconds of GEMMs, with or without those of quantization."""
    found = [one for one in steps if isinstance(one, MatMul) or (isinstance(one, Kernel) and one.quantizes)]
    return float(sum(clock.run_s(one) for one in found if quantized or isinstance(one, MatMul)))


def tflops(machine: str, precision: Precision, *, quantized: bool) -> float:
    """Of a linear layer of 4,096 by 16,384 and 15,872 tokens."""
    one = clock(machine, precision, {"S": 15872.0, "H": 4096.0, "F": 16384.0}, burst=True)
    workload = Workload(global_batch=1, sequence_length=15872, precision=precision)
    options = StepOptions(
        keeps_quantized=True, one_layout="mxfp8" in load_machine(machine).document.accelerator.peak_tflops
    )
    given = LayerInputs(small_model(family="llama"), workload.element_sizes, options, format=workload.format)
    made = Array("made", "made", Size(1.0))
    steps = [
        *linear_forward(linear_of(given, "mlp.fc2"), given, phase="forward"),
        *linear_backward(linear_of(given, "mlp.fc2"), given, makes=made, frees=()),
    ]
    return 6.0 * 15872 * 4096 * 16384 / spent_s(one, steps, quantized=quantized) / 1e12


def test_gemm_rates_are_met() -> None:
    """Guards rates in formats below 16 bits, with and without quantization: in the median 10%, none by over 25%."""
    errors: dict[str, float] = {}
    for (machine, precision, quantized), measured in RATES.items():
        found = tflops(machine, precision, quantized=quantized)
        found /= tflops(machine, "bf16", quantized=True) if measured < 100 else 1.0
        errors[f"{machine} {precision} quantized={quantized}"] = found / measured - 1.0
    print("\n".join(f"{name}: {error:+.1%}" for name, error in errors.items()))
    eight = [abs(error) for name, error in errors.items() if "fp4" not in name and "bf16" not in name]
    assert median(eight) <= 0.10
    assert max(map(abs, errors.values())) <= 0.25


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
