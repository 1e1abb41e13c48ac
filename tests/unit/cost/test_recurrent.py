"""Gated delta nets, Kimi delta attention and short convolutions: times, bytes between ranks and constraints."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from axonn_tune.cost.kernels import kernel_rate
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.step import ScanKernels
from axonn_tune.grid import Grid
from axonn_tune.program.feasibility import broken_constraints
from axonn_tune.program.operations import Collective, Measured
from axonn_tune.program.step import Block, build_step
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload

LENGTH = 8192


def block_of(layer: dict[str, object], *, context: bool = False, kernels: ScanKernels = "fla") -> Block:
    """A block of one layer type, in BF16."""
    stored = load_model("llama3-8b").document.model_dump(by_alias=True)
    own = {"layers": "delta*4", "pattern": None, "layer_types": {"delta": {"attention": False, **layer}}}
    workload = Workload(global_batch=8, sequence_length=LENGTH)
    options = replace(find_framework("megatron-core").step, scan_kernels=kernels)
    return build_step(
        Model.model_validate(stored | own), workload, recompute="none", options=options, context=context
    ).blocks[0]


def values(**sizes: float) -> dict[str, float]:
    """One sequence on one rank but for these."""
    return {"b": 1.0, "S": LENGTH, "H": 4096.0, "x": 1.0, "y": 1.0, "context": 1.0, "parts": 1.0, **sizes}


def scan_s(layer: dict[str, object], machine: str, *, backward: bool = False, kernels: ScanKernels = "fla") -> float:
    """Time of the recurrence of one sequence, without launches, s."""
    accelerator, block = load_machine(machine).document.accelerator, block_of(layer, kernels=kernels)
    steps = (block.backward if backward else block.forward).operations
    return sum(
        float(step.work.evaluate(values())) / kernel_rate(step.kernel, accelerator, backward=step.backward).units_per_s
        for step in steps
        if isinstance(step, Measured) and step.layer.endswith(".scan")
    )


def delta(heads: int) -> dict[str, object]:
    """A gated delta net of so many value heads."""
    return {"gdn": {"key_heads": 16, "value_heads": heads}}


MEASURED = (
    # ai-dynamo/aiconfigurator@095f58a5, gdn_perf and kda_perf; PaddlePaddle/flash-attention issue 133 (H800);
    # flashinfer-ai/flashinfer issue 2742; NVIDIA/cudnn-frontend issue 1017: ms of one sequence of 8,192 tokens.
    *(("dgx-h100", delta(heads), ms) for heads, ms in ((32, 1.011), (48, 1.085), (64, 1.335), (96, 2.033))),
    *(("dgx-b200", delta(heads), ms) for heads, ms in ((32, 0.616), (48, 0.792), (64, 0.925), (96, 1.492))),
    *(("dgx-h100", {"kda": {"heads": heads}}, ms) for heads, ms in ((96, 3.67), (24, 1.154))),
    ("dgx-b200", {"kda": {"heads": 96}}, 2.50),
)


def test_recurrences_take_what_was_measured() -> None:
    """Guards the law of chain and scan over heads, median 10%, and the backward pass, 3.3 times the forward pass."""
    errors = [abs(1e3 * scan_s(layer, machine) / ms - 1.0) for machine, layer, ms in MEASURED]
    assert median(errors) <= 0.10
    assert max(errors) <= 0.15
    for layer in (delta(32), {"kda": {"heads": 32}}):
        assert scan_s(layer, "dgx-h100", backward=True) / scan_s(layer, "dgx-h100") == pytest.approx(3.3, rel=1e-3)


def test_scans_of_another_library_take_what_was_measured() -> None:
    """Guards the choice of a library: cuDNN's scan of 64 heads on GB200, four times as fast as Triton's on B200, and
    that of delta attention on H100, which is slower (flashinfer-ai/flashinfer issue 4968, NVIDIA/cudnn-frontend issue
    1017); a recurrence that has no delta rule stays."""
    assert 1e3 * scan_s(delta(64), "gb200-nvl72", kernels="cudnn") == pytest.approx(0.2436, rel=1e-3)
    kda: dict[str, object] = {"kda": {"heads": 24}}
    assert 1e3 * scan_s(kda, "dgx-h100", kernels="cudnn") == pytest.approx(1.510, rel=1e-3)
    lightning: dict[str, object] = {"lightning": {"heads": 64, "head_dim": 128}}
    assert scan_s(lightning, "dgx-h100", kernels="cudnn") == scan_s(lightning, "dgx-h100")


@pytest.mark.parametrize("x", [1, 4])
def test_a_delta_net_swaps_tokens_for_heads(x: int) -> None:
    """Guards one all-to-all of everything projected before the recurrence, and one of its normed output behind
    (NVIDIA/Megatron-LM@d98e8a64, megatron/core/ssm/gated_delta_net/gdn.py), and both in the backward pass."""
    block, projected, output = block_of(delta(32), context=True), 2 * (16 + 32) * 128 + 2 * 32, 32 * 128
    for steps, widths in ((block.forward, (projected, output)), (block.backward, (output, projected))):
        sent = [
            float(step.size_bytes.evaluate(values(x=x, context=2.0)))
            for step in steps.operations
            if isinstance(step, Collective) and step.axis == "context"
        ]
        assert sent == [2.0 * LENGTH / 2.0 * width / x for width in widths]


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("qwen3.5-9b", {"x": 32}, "delta-net key heads (16) is not divisible by TP = 32"),
        ("qwen3.5-9b", {"x": 4, "context": 8}, "delta-net key heads (16) is not divisible by TP·CP = 32"),
        ("qwen3.5-9b", {"x": 4, "context": 4}, ""),
        ("qwen3.5-9b torchtitan", {"context": 2}, "layers with gated delta nets need whole sequences, so no"),
        ("kimi-linear-48b-a3b", {"context": 2}, "layers with Kimi delta attention need whole sequences, so no CP"),
        ("lfm2-1.2b", {"context": 2}, "layers with short convolutions need whole sequences, so no CP"),
    ],
)
def test_constraints(name: str, sizes: dict[str, int], said: str) -> None:
    """Guards whole heads over TP and CP, and what has no context parallelism."""
    model, _, other = name.partition(" ")
    framework = find_framework(other or "megatron-core")
    axes = {"context": 1, "data": 1, **sizes}
    grid = Grid(**axes, order=tuple(axis for axis in framework.axes if axis in axes))
    workload = Workload(global_batch=8, sequence_length=LENGTH)
    found = broken_constraints(grid, load_model(model).document, workload, framework, micro_batch=1)
    own = [one for one in found if "delta" in one or "convolution" in one]
    assert bool(own) == bool(said)
    assert all(said in one for one in own)
