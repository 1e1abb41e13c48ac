"""GEMMs, quantization and attention on the GPU alone, beside what the cost model says of each.

Predicted are bursts: rates of the machine profile without its `training_share`, which is what long steps lose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional

from axonn_tune.cost.compute import ComputeClock, ComputeRates, compute_rates
from axonn_tune.frameworks import software_on
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.program.operations import PLAIN, Attention, Computation, Kernel, MatMul, Size
from axonn_tune.runtime.clocks import DeviceClock, HostClock
from axonn_tune.runtime.devices import synchronize
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.formats import FORMATS
from axonn_tune.specs.machine import MatmulLayout
from axonn_tune.vocabulary import Precision
from benchmarks.gpu_site import Row, Site

SHAPES = (
    ("8B, queries, keys and values", 8192, 6144, 4096),
    ("8B, attention's output", 8192, 4096, 4096),
    ("8B, FC1", 8192, 28672, 4096),
    ("8B, FC2", 8192, 4096, 14336),
    ("70B on 8 ranks, FC1", 8192, 7168, 8192),
    ("70B, FC2", 8192, 8192, 28672),
)
"""Linear layers of Llama 3 with 8,192 tokens: m, n, k of the forward pass."""
EXPERTS = (
    ("Mixtral 8x7B, FC1", 8, 16384, 28672, 4096),
    ("Qwen3-30B-A3B, FC1", 128, 65536, 1536, 2048),
    ("Qwen3-30B-A3B, FC1 on 8 ranks", 16, 65536, 1536, 2048),
    ("DeepSeek-V3, FC1 on 32 ranks", 8, 32768, 4096, 7168),
)
"""Experts, rows of all together, columns and k."""
LARGEST = 448.0
"""Of E4M3."""
MOST_ERROR = 1e-2
"""Of sums of products in BF16."""
BATCH_S = 0.04
"""How long calls in a row are timed."""


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Mean time of a call among enough in a row, by the device's own clock, after as many that warm it up."""
    clock: HostClock = DeviceClock(device) if device.type == "cuda" else HostClock()

    def many(times: int) -> float:
        start = clock.mark()
        for _ in range(times):
            call()
        end = clock.mark()
        synchronize(device)
        return clock.between_s(start, end) / times

    many(2)
    times = max(3, int(BATCH_S / max(many(3), 1e-6)))
    many(times)
    return many(times)


def clock_of(site: Site, precision: Precision) -> ComputeClock:
    """Prices single computations of a burst."""
    machine = load_machine(site.machine).document
    accelerator = machine.accelerator.model_copy(update={"training_share": 1.0})
    rates: ComputeRates = compute_rates(accelerator, precision, software_on(AXONN_TUNE, machine))
    return ComputeClock(rates, 2.0, {}, PLAIN)


def has(site: Site, precision: Precision) -> bool:
    """Whether the profile has the format."""
    return precision in load_machine(site.machine).document.accelerator.peak_tflops


def _priced(site: Site, precision: Precision, step: Computation) -> float:
    return float(clock_of(site, precision).call_s(step))


def matmuls(site: Site, folder: Path) -> Iterator[Row]:
    """Each shape in BF16 and each layout, and in each 8-bit format that this GPU and torch have."""
    device = site.device()
    for name, m, n, k in SHAPES:
        left, right = (torch.randn(size, device=device, dtype=torch.bfloat16) for size in ((m, k), (k, n)))
        calls: dict[tuple[str, Precision, MatmulLayout], Callable[[], object]] = {}
        other_left, other_right = left.t().contiguous().t(), right.t().contiguous().t()
        calls["BF16 NN", "bf16", "NN"] = partial(torch.mm, left, right)
        calls["BF16 NT", "bf16", "NT"] = partial(torch.mm, left, other_right)
        calls["BF16 TN", "bf16", "TN"] = partial(torch.mm, other_left, right)
        # Priced as the pass in which frameworks have it so: sums are in FP32 in gradients, and with scales of blocks.
        for (said, one), call in _narrow(left, other_right).items():
            calls[said, one, "NT" if "FP32" in said else "NN"] = call
        for (said, precision, layout), call in calls.items():
            if not has(site, precision):
                continue
            sizes = {"m": Size(float(m)), "n": Size(float(n)), "k": Size(float(k)), "layout": layout}
            step = MatMul("forward", "linear", **sizes, narrow=precision != "bf16")  # type: ignore[arg-type]
            yield _timed(f"{name}, {said}", call, _priced(site, precision, step), 2.0 * m * n * k)


def _narrow(left: torch.Tensor, right: torch.Tensor) -> dict[tuple[str, Precision], Callable[[], object]]:
    """Calls of GEMMs with 8-bit operands `[m, k]` and, transposed, `[n, k]`."""
    one, two = (_cast(part) for part in (left, right.t()))
    whole = torch.ones((), device=left.device)
    rows, columns = (torch.ones(size, device=left.device) for size in ((left.shape[0], 1), (1, right.shape[1])))

    def scaled(scale_a: torch.Tensor, scale_b: torch.Tensor, *, fast: bool) -> Callable[[], object]:
        options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
        return lambda: torch._scaled_mm(one, two.t(), scale_a, scale_b, **options)

    of_rows = torch.ones(left.shape[1] // 128, left.shape[0], device=left.device).t()
    of_blocks = torch.ones(right.shape[1] // 128, left.shape[1] // 128, device=left.device).t()
    return {
        ("a scale a tensor", "fp8-current"): scaled(whole, whole, fast=True),
        ("a scale a tensor, sums in FP32", "fp8-current"): scaled(whole, whole, fast=False),
        ("a scale a row", "fp8-rowwise"): scaled(rows, columns, fast=True),
        ("a scale a row, sums in FP32", "fp8-rowwise"): scaled(rows, columns, fast=False),
        ("a scale a block", "fp8-blockwise"): scaled(of_rows, of_blocks, fast=False),
    }


def _cast(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().to(torch.float8_e4m3fn)


def _timed(name: str, call: Callable[[], object], predicted_s: float | None, flops: float = 0.0) -> Row:
    """A row; a call that fails here is one without a time."""
    try:
        found_s = seconds_of(call, torch.device("cuda", 0))
    except (RuntimeError, ValueError, NotImplementedError, TypeError) as problem:
        return Row(name, None, "s", predicted_s, note=f"{type(problem).__name__}: {str(problem).splitlines()[0][:120]}")
    return Row(name, found_s, "s", predicted_s, note=f"{flops / found_s / 1e12:.0f} TFLOP/s" if flops else "")


def quantization(site: Site, folder: Path) -> Iterator[Row]:
    """What torch.compile makes of quantizing activations of 8,192 tokens, to both copies."""
    device = site.device()
    for name, precision, function in (
        ("a scale a tensor", "fp8-current", by_tensor),
        ("a scale a row, by rows and by columns", "fp8-rowwise", _by_rows),
    ):
        compiled = torch.compile(function)
        for width in (4096, 14336):
            rows = torch.randn(8192, width, device=device, dtype=torch.bfloat16)
            size = FORMATS[precision].quantization_bytes(2) * rows.numel()
            step = Kernel("forward", "linear", Size(size), quantizes="all")
            predicted_s = _priced(site, precision, step)  # type: ignore[arg-type]
            yield _timed(f"{name}, {rows.shape[0]:,} x {width:,}", partial(compiled, rows), predicted_s)


def by_tensor(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy by rows, and its transpose."""
    narrow = narrowed(x, x.abs().amax())
    return narrow, narrow.t().contiguous()


def _by_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy by rows, and one of the transpose."""
    return narrowed(x, x.abs().amax(1, keepdim=True)), narrowed(x, x.abs().amax(0, keepdim=True)).t().contiguous()


def narrowed(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """In E4M3, scaled so that these maxima become the largest value of the format."""
    scale = LARGEST / largest.float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def grouped(site: Site, folder: Path) -> Iterator[Row]:
    """GEMMs of experts with as many rows each: one launch of all, and one by one as the bundled runtime has them."""
    device = site.device()
    yield from _uneven(device)
    for name, groups, rows, n, k in EXPERTS:
        given = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
        weight = torch.randn(groups, k, n, device=device, dtype=torch.bfloat16)
        ends = torch.arange(1, groups + 1, device=device, dtype=torch.int32) * (rows // groups)
        sizes = {"m": Size(rows / groups), "n": Size(float(n)), "k": Size(float(k)), "layout": "NN"}
        flops = 2.0 * rows * n * k
        together = MatMul("forward", "experts", **sizes, groups=Size(float(groups)))  # type: ignore[arg-type]
        yield _timed(
            f"{name}, {groups} experts: in one launch",
            partial(torch._grouped_mm, given, weight, offs=ends),
            _priced(site, "bf16", together),
            flops,
        )
        alone = MatMul("forward", "experts", **sizes)  # type: ignore[arg-type]
        yield _timed(
            f"{name}, {groups} experts: one by one",
            partial(_one_by_one, given.view(groups, -1, k), weight),
            groups * _priced(site, "bf16", alone),
            flops,
        )


def _uneven(device: torch.device) -> Iterator[Row]:
    """Groups of any number of rows, none among them, in one launch: outputs and both gradients against one by one."""
    sizes = [37, 0, 130, 1, 255, 64, 9, 16]
    ends = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    rows, gradient = (torch.randn(sum(sizes), width, device=device, dtype=torch.bfloat16) for width in (192, 384))
    weight = torch.randn(len(sizes), 192, 384, device=device, dtype=torch.bfloat16)
    apart = zip(torch.split(rows, sizes), torch.split(gradient, sizes), weight, strict=True)
    right = [(a @ w, g @ w.t(), a.t() @ g) for a, g, w in apart]
    found = {
        "output": (functional.grouped_mm(rows, weight, offs=ends), torch.cat([one[0] for one in right])),
        "gradient of rows": (
            functional.grouped_mm(gradient, weight.transpose(1, 2), offs=ends),
            torch.cat([one[1] for one in right]),
        ),
        "gradient of weights": (
            functional.grouped_mm(rows.t(), gradient, offs=ends),
            torch.stack([one[2] for one in right]),
        ),
    }
    for name, (made, its) in found.items():
        error = float((made.double() - its.double()).norm() / its.double().norm())
        yield Row(f"uneven groups in one launch, {name}", error, "relative", ok=error < MOST_ERROR)


def _one_by_one(rows: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    return [some @ its for some, its in zip(rows, weight, strict=True)]


def attention(site: Site, folder: Path) -> Iterator[Row]:
    """Causal attention of 32 heads of 128 over 16,384 tokens, as sequences of several lengths."""
    device = site.device()
    for length in (2048, 4096, 8192, 16384):
        shape = (16384 // length, 32, length, 128)
        inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        flops = 4.0 * 16384 * length * 4096
        keys = Size(float(length))
        forward = Attention("forward", "attention", Size(flops), keys=keys)

        run = partial(functional.scaled_dot_product_attention, inputs[0], inputs[1], inputs[2], is_causal=True)
        name = f"sequences of {length:,}"
        yield _timed(f"{name}, forward", run, _priced(site, "bf16", forward), flops / 2)
        output = run()
        back = partial(torch.autograd.grad, output, inputs, torch.randn_like(output), retain_graph=True)
        backward = Attention("backward", "attention", Size(2.5 * flops), keys=keys, backward=True)
        yield _timed(f"{name}, backward", back, _priced(site, "bf16", backward), 1.25 * flops)
