"""Number formats below 16 bits against published rates of GEMMs and of quantization."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

import pytest

from axonn_tune.cost.compute import ComputeClock, compute_rates
from axonn_tune.cost.price import price
from axonn_tune.frameworks import find_framework, software_on
from axonn_tune.frameworks.step import StepOptions
from axonn_tune.grid import Grid
from axonn_tune.job import Layout
from axonn_tune.program import block, layers
from axonn_tune.program.inputs import LayerInputs
from axonn_tune.program.operations import ONCE, PLAIN, Kernel, MatMul, Operation, Phase, Size, as_size
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


GEMMS: dict[tuple[str, Precision], tuple[float, float, float]] = {
    ("dgx-h100", "bf16"): (759, 751, 727),
    ("dgx-b200", "bf16"): (1459, 1489, 1409),
    ("gb200-nvl72", "bf16"): (1545, 1559, 1493),
    ("dgx-b300", "bf16"): (1534, 1520, 1477),
    ("gb300-nvl72", "bf16"): (1803, 1858, 1829),
    ("gb200-nvl72", "fp8-current"): (2111, 2598, 2779),
    ("gb300-nvl72", "fp8-current"): (2444, 3014, 3332),
    ("gb200-nvl72", "mxfp8"): (2615, 2832, 2797),
    ("gb300-nvl72", "mxfp8"): (2986, 3225, 3275),
}
"""Medians in TFLOP/s of GEMMs of 0.2 to 1, 1 to 5 and more TFLOP: ai-dynamo/aiconfigurator@095f58a5."""

SHAPES = ((4096, 8192, 8192), (8192, 16384, 8192), (16384, 16384, 16384))
"""A GEMM of each of these sizes."""


NORMS: dict[tuple[str, str], float] = {
    ("gb200-nvl72", "forward"): 6.2,
    ("gb200-nvl72", "backward"): 5.5,
    ("gb300-nvl72", "forward"): 6.2,
    ("gb300-nvl72", "backward"): 5.5,
    ("dgx-h200", "forward"): 3.7,
    ("dgx-h200", "backward"): 3.5,
}
"""TB/s of cuDNN's RMSNorm, middle of 6.0 to 6.4 and 4.8 to 6.2 on GB200 and GB300: NVIDIA/cudnn-frontend@3929da2e,
benchmark/norms."""


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


@pytest.mark.parametrize(("machine", "passed"), NORMS)
def test_norms_move_what_they_were_measured_to(machine: str, passed: str) -> None:
    """Guards element-wise kernels of Megatron-Core, whose traffic is the program's: norms within 30%."""
    framework, document = find_framework("megatron-core"), load_machine(machine).document
    rates = compute_rates(document.accelerator, "bf16", software_on(framework, document))
    found = ComputeClock(rates, 2.0, {}, PLAIN).call_s(Kernel("forward", "mlp.norm", Size(4e9)))
    assert 4e9 / (float(found) - rates.kernel_launch_s) / 1e12 == pytest.approx(NORMS[machine, passed], rel=0.3)


@pytest.mark.parametrize(("machine", "passes", "slower"), [("dgx-h100", 1, 1.6), ("dgx-h100", 2, 2.56)])
def test_activations_of_megatron_core_are_those_of_its_compiler(machine: str, passes: int, slower: float) -> None:
    """Guards SwiGLU against a Triton kernel at the bandwidth of others on H100, forward and both ways, within 5%
    (linkedin/Liger-Kernel PR 1326); with Transformer Engine's activation it is that kernel."""
    workload = Workload(global_batch=1, sequence_length=8192, precision="bf16")
    one, found = clock(machine, "bf16", {}), list[float]()
    for compiled in (True, False):
        options = StepOptions(compiled_activation=compiled)
        given = LayerInputs(small_model(family="llama"), workload.element_sizes, options)
        phases: tuple[Phase, ...] = ("forward", "backward")
        steps = (layers.activates(phase, "mlp.activation", Size(2.0**28), given) for phase in phases[:passes])
        found.append(sum(float(one.call_s(step)) for step in steps))
    assert found[0] / found[1] == pytest.approx(slower, rel=0.05)


@pytest.mark.parametrize(("machine", "precision"), GEMMS)
def test_gemms_reach_the_published_medians(machine: str, precision: Precision) -> None:
    """Guards what large GEMMs reach by accelerator, its power and format: within 5% in the mean over sizes."""
    one, errors = clock(machine, precision, {}, burst=True), list[float]()
    for (m, n, k), measured in zip(SHAPES, GEMMS[machine, precision], strict=True):
        step = MatMul("forward", "linear", as_size(m), as_size(n), as_size(k), "NN", narrow=precision != "bf16")
        errors.append(2.0 * m * n * k / float(one.call_s(step)) / 1e12 / measured - 1.0)
    print(", ".join(f"{error:+.1%}" for error in errors))
    assert abs(fmean(errors[1:] if precision == "fp8-current" else errors)) <= 0.05


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


def test_quantization_takes_its_time_of_a_grouped_gemm() -> None:
    """Guards quantization in an MXFP8 step's passes, 634, 247 and 1,021 µs, 28, 13 and 33% of them, of
    pytorch/ao@36027d82, torchao/prototype/moe_training/README.md (B200, 131,072 tokens, 7,168 by 2,048, 8 groups)."""
    one = clock("dgx-b200", "mxfp8", {"S": 131072.0, "H": 2048.0})
    steps = grouped("mxfp8", tokens=131072, hidden=2048, width=7168, groups=8)
    forward = [step for step in steps if isinstance(step, MatMul | Kernel) and step.phase == "forward"]
    back = [step for step in steps if isinstance(step, MatMul | Kernel) and step.phase == "backward"]
    rows, columns, inputs, weights, dgrad, wgrad = back
    for passed, measured in ((forward, 634.0), ([rows, weights, dgrad], 247.0), ([columns, inputs, wgrad], 1021.0)):
        found = spent_s(one, [*passed], quantized=True) - spent_s(one, [*passed], quantized=False)
        print(f"{found * 1e6:,.0f} µs, measured {measured:,.0f}")
        assert found * 1e6 == pytest.approx(measured, rel=0.15)


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
