"""Kernels of training whose rate no source states: casts, clamped SwiGLU, Mamba-2's scan, windows, cross-entropy.

Libraries that are installed are measured, others left out with the reason; torch's own operations stand beside them.
Rates are of the bytes that a fused kernel has to move, and of the products of visible pairs, so that whatever a
kernel does besides is its loss. Rows are also written as `kernels.csv` beside the stage's document, in the columns of
the package's `axonn_tune/cost/kernels.csv`, with library, driver and clock in the source.
"""

from __future__ import annotations

import csv
import importlib
import math
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as functional

from axonn_tune.specs.catalog import load_machine
from axonn_tune.units import bytes_per_s
from benchmarks.gpu_matmuls import LARGEST, by_tensor, narrowed, seconds_of
from benchmarks.gpu_site import Row, Site

BLOCK, WINDOW, CLAMP, ALPHA = 128, 128, 7.0, 1.702
"""Elements that share a scale; keys of a window, as in gpt-oss; its clamp, and the factor of its quick GeLU."""
ROWS = ("kernel", "pass", "accelerator", "generation", "memory_gb_per_s", "unit", "units", "time_us", "kind", "source")
"""Columns of `axonn_tune/cost/kernels.csv`."""
Call = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """What is measured: tokens, widths of casts, of an expert's hidden layer, of the vocabulary; heads of Mamba-2."""

    tokens: int
    widths: tuple[int, ...]
    ffn: int
    vocabulary: int
    heads: int
    sequence: int


ON_GPU = Sizes(tokens=8192, widths=(4096, 14336), ffn=2880, vocabulary=128256, heads=64, sequence=4096)
ON_CPU = Sizes(tokens=256, widths=(256,), ffn=128, vocabulary=512, heads=4, sequence=256)


@dataclass(frozen=True)
class Timed:
    """A measured kernel; moved_bytes and flops of a call: what it must move and multiply.

    work: unit and units of a call by which the package prices it, if not bytes or FLOPs.
    """

    kernel: str
    library: str
    phase: str
    shape: str
    moved_bytes: float = 0.0
    flops: float = 0.0
    work: tuple[str, float] = ("", 0.0)
    time_us: float = math.nan
    why: str = ""

    @property
    def rate(self) -> str:
        """In words."""
        if self.why:
            return self.why
        unit, amount = ("TFLOP/s", self.flops) if self.flops else ("TB/s", self.moved_bytes)
        return f"{amount / self.time_us / 1e6:.4g} {unit}"


@dataclass(frozen=True)
class Bench:
    """Times calls on a device, and keeps what was found."""

    site: Site
    device: torch.device
    sizes: Sizes
    found: list[Timed] = field(default_factory=list)

    def randn(self, *shape: int) -> torch.Tensor:
        """A tensor in BF16 that takes a gradient."""
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16, requires_grad=True)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """By torch.compile, where this site compiles."""
        return torch.compile(function) if self.site.compiled else function

    @property
    def modes(self) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
        """Eager, and compiled where this site compiles."""
        return (("torch eager", lambda one: one), *((("torch compiled", torch.compile),) if self.site.compiled else ()))

    @cached_property
    def bandwidth(self) -> float:
        """Of the memory as the data sheet has it, bytes/s."""
        return bytes_per_s(load_machine(self.site.machine).document.accelerator.memory_bandwidth_gb_per_s)

    def time(self, what: Timed, call: Call) -> Row:
        """Time a call; one that fails here is a row without a time. Predicted: its bytes by the data sheet."""
        try:
            found_s = seconds_of(call, self.device)
        except Exception as problem:
            return self.left_out(what, f"{type(problem).__name__}: {str(problem).strip().splitlines()[0][:120]}")
        return self._kept(Timed(**asdict(what) | {"time_us": found_s * 1e6}))

    def left_out(self, what: Timed, why: str) -> Row:
        """A row without a time."""
        return self._kept(Timed(**asdict(what) | {"why": why}))

    def _kept(self, one: Timed) -> Row:
        self.found.append(one)
        measured_s = None if one.why else one.time_us / 1e6
        least_s = one.moved_bytes / self.bandwidth or None
        return Row(f"{one.kernel}, {one.phase}, {one.shape}, {one.library}", measured_s, "s", least_s, note=one.rate)

    def both_ways(self, forward: Timed, backward: Timed, call: Callable[[], Any], inputs: list[Any]) -> Iterator[Row]:
        """Forward, and backward alone with its graph kept."""
        yield self.time(forward, call)
        if self.found[-1].why:
            yield self.left_out(backward, "forward failed")
            return
        output = call()
        given = torch.randn_like(output)
        yield self.time(backward, partial(torch.autograd.grad, output, inputs, given, retain_graph=True))


def kernels(site: Site, folder: Path) -> Iterator[Row]:
    """Every kernel, and `kernels.csv` of what was found."""
    bench = Bench(site, site.device(), ON_GPU if site.cuda else ON_CPU)
    for measure in (casts, clamped_swiglu, windowed_attention, cross_entropy, mamba):
        yield from measure(bench)
        write(folder.with_suffix(".csv"), site, bench.found)


def write(path: Path, site: Site, found: list[Timed]) -> None:
    """Measured rows in the columns of `axonn_tune/cost/kernels.csv`, the source with library, driver and clock."""
    accelerator = load_machine(site.machine).document.accelerator
    machine = {
        "accelerator": site.name,
        "generation": accelerator.generation,
        "memory_gb_per_s": accelerator.memory_bandwidth_gb_per_s,
    }
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ROWS, lineterminator="\n")
        writer.writeheader()
        for one in found:
            if not one.why:
                unit, units = (
                    one.work if one.work[0] else ("FLOP", one.flops) if one.flops else ("byte", one.moved_bytes)
                )
                source = f"make gpu: {one.library}, {one.shape}; {driver_of(site)}"
                own = {"kernel": one.kernel, "pass": one.phase, "unit": unit, "units": f"{units:.0f}"}
                timed = {"time_us": f"{one.time_us:.4g}", "kind": "measured", "source": source}
                writer.writerow(own | machine | timed)


def driver_of(site: Site) -> str:
    """torch, and of a GPU driver, clock of the SMs after the last kernel and at most, and the limit of power."""
    if not site.cuda or torch.version.cuda is None:
        return f"torch {torch.__version__}"
    asked = "--query-gpu=driver_version,clocks.sm,clocks.max.sm,power.limit"
    command = ["nvidia-smi", asked, "--format=csv,noheader", "--id=0"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return f"torch {torch.__version__}, driver, clock, largest clock, power limit: {said or 'not known'}"


def library(name: str) -> ModuleType | None:
    """A module, or None where it is not installed or does not load."""
    try:
        return importlib.import_module(name)
    except Exception:
        return None


COPIES = {"rows": (True, False), "columns": (False, True), "both": (True, True)}
"""What a cast writes: a copy by rows, its transpose, or both."""


MakeQuantizer = Callable[..., Callable[[torch.Tensor], object]]
"""Makes a quantizer that writes these copies: `rowwise`, `columnwise`."""


def casts(bench: Bench) -> Iterator[Row]:
    """FP8 by a scale a tensor, of this step or of earlier ones, and by one a block: Transformer Engine and torch."""
    for width in bench.sizes.widths:
        x = bench.randn(bench.sizes.tokens, width).detach()
        shape = f"{x.shape[0]:,} x {width:,}"
        for scaling, make in _quantizers(bench.device).items():
            for copies, (rows, columns) in COPIES.items():
                # Current scaling reads the tensor once more, for its maximum.
                moved = x.numel() * ((4 if scaling == "current" else 2) + rows + columns)
                what = Timed(f"FP8 cast, {scaling} scaling", "Transformer Engine", copies, shape, moved)
                if make is None:
                    yield bench.left_out(what, "transformer_engine is not installed")
                else:
                    yield bench.time(what, _cast(make, x, rows=rows, columns=columns))
        for scaling, function in (("current", by_tensor), ("delayed", _by_given_scale), ("blockwise", _by_blocks)):
            moved = x.numel() * ((4 if scaling == "current" else 2) + 2)
            what = Timed(f"FP8 cast, {scaling} scaling", "torch compiled", "both", shape, moved)
            yield bench.time(what, partial(bench.compiled(function), x))


def _quantizers(device: torch.device) -> dict[str, MakeQuantizer | None]:
    """Transformer Engine's by scaling, None where it is not installed."""
    tensors, blocks, engine = (
        library(name)
        for name in (
            "transformer_engine.pytorch.tensor.float8_tensor",
            "transformer_engine.pytorch.tensor.float8_blockwise_tensor",
            "transformer_engine_torch",
        )
    )
    if tensors is None or blocks is None or engine is None:
        return dict.fromkeys(("current", "delayed", "blockwise"))
    kind, whole = engine.DType.kFloat8E4M3, torch.ones(1, device=device)
    return {
        "current": partial(tensors.Float8CurrentScalingQuantizer, kind, device),
        "delayed": partial(tensors.Float8Quantizer, whole, whole.clone(), kind),
        "blockwise": partial(blocks.Float8BlockQuantizer, kind, block_scaling_dim=1),
    }


def _cast(make: MakeQuantizer, x: torch.Tensor, *, rows: bool, columns: bool) -> Call:
    quantizer: list[Callable[[torch.Tensor], object]] = []

    def call() -> object:
        if not quantizer:
            quantizer.append(make(rowwise=rows, columnwise=columns))
        return quantizer[0](x)

    return call


def _by_given_scale(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both copies by a scale that is known, and the maximum for the next one."""
    narrow = narrowed(x, torch.full((), LARGEST, device=x.device))
    return narrow, narrow.t().contiguous(), x.abs().amax()


def _by_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy with a scale for so many elements of a row, and a transpose with one for as many of a column."""

    def along_rows(some: torch.Tensor) -> torch.Tensor:
        blocks = some.view(some.shape[0], -1, BLOCK)
        return narrowed(blocks, blocks.abs().amax(-1, keepdim=True)).view(some.shape)

    return along_rows(x), along_rows(x.t().contiguous())


def clamped_swiglu(bench: Bench) -> Iterator[Row]:
    """Quick GeGLU with both halves clamped, of rows of 2F, and its clamps alone as Megatron-Core has them: on the two
    strided halves, which are then put together again."""
    rows, width = bench.sizes.tokens * 4, bench.sizes.ffn
    x, size = bench.randn(rows, 2 * width), 2.0 * rows * width
    for name, function, moved in (
        ("clamps and cat of clamped SwiGLU", _clamps, (4.0, 6.0)),
        ("clamped SwiGLU", _swiglu, (3.0, 5.0)),
    ):
        for mode, made in bench.modes:
            forward, backward = (
                Timed(name, mode, phase, f"{rows:,} x {width:,}", share * size)
                for phase, share in zip(("forward", "backward"), moved, strict=True)
            )
            yield from bench.both_ways(forward, backward, partial(made(function), x), [x])


def _clamps(x: torch.Tensor) -> torch.Tensor:
    gate, linear = x.chunk(2, dim=-1)
    return torch.cat((gate.clamp(max=CLAMP), linear.clamp(-CLAMP, CLAMP)), dim=-1)


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, linear = x.chunk(2, dim=-1)
    gate, linear = gate.clamp(max=CLAMP), linear.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(ALPHA * gate) * (linear + 1.0)


def windowed_attention(bench: Bench) -> Iterator[Row]:
    """Causal attention of heads of 64 that see 128 keys; FLOPs of visible pairs."""
    length, heads, batch = bench.sizes.sequence, bench.sizes.heads, 2
    pairs = batch * heads * (length * WINDOW - WINDOW * (WINDOW - 1) / 2)
    shape = f"{batch} x {length:,}, {heads} heads of 64, window {WINDOW}"
    # On a CPU flex_attention has no backward, and refuses inputs that ask for one.
    q, k, v = (bench.randn(batch, heads, length, 64).requires_grad_(bench.site.cuda) for _ in range(3))
    for name, made in (("torch flex_attention", _flex), ("flash_attn", _flash)):
        forward, backward = (
            Timed("windowed attention", name, phase, shape, flops=products * 2.0 * 64 * pairs)
            for phase, products in (("forward", 2), ("backward", 5))
        )
        if name == "flash_attn" and library("flash_attn") is None:
            yield bench.left_out(forward, "flash_attn is not installed")
            yield bench.left_out(backward, "flash_attn is not installed")
        else:
            yield from bench.both_ways(forward, backward, partial(made(bench), q, k, v), [q, k, v])


def _flex(bench: Bench) -> Callable[..., Any]:
    """torch's flex_attention with the mask of a window."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(_: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (query - key < WINDOW)

    length = bench.sizes.sequence
    mask = create_block_mask(seen, None, None, length, length, device=str(bench.device))
    attend = bench.compiled(flex_attention)
    return partial(attend, block_mask=mask)


def _flash(bench: Bench) -> Callable[..., Any]:
    """FlashAttention's, whose heads come after tokens."""
    attend = importlib.import_module("flash_attn").flash_attn_func

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        shown = (one.transpose(1, 2) for one in inputs)
        found: torch.Tensor = attend(*shown, causal=True, window_size=(WINDOW - 1, 0))
        return found

    return call


def cross_entropy(bench: Bench) -> Iterator[Row]:
    """Cross-entropy of logits in BF16, in FP32: two reads forward, one read and one write backward are the least."""
    rows, width = bench.sizes.tokens, bench.sizes.vocabulary
    logits, targets = bench.randn(rows, width), torch.randint(width, (rows,), device=bench.device)

    def loss(some: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(some.float(), targets)

    size = 2.0 * rows * width
    for mode, made in bench.modes:
        forward, backward = (
            Timed("cross-entropy", mode, phase, f"{rows:,} x {width:,}", share * size)
            for phase, share in (("forward", 1.0), ("backward", 2.0))
        )
        yield from bench.both_ways(forward, backward, partial(made(loss), logits), [logits])


def mamba(bench: Bench) -> Iterator[Row]:
    """Mamba-2's chunk scan and convolution, by mamba_ssm and causal_conv1d alone: rates are of their kernels."""
    tokens, heads, width, state, groups = bench.sizes.tokens, bench.sizes.heads, 64, 128, 8
    channels = heads * width + 2 * groups * state
    scanned, convolved = 2.0 * tokens * channels + 2.0 * tokens * heads * width, 4.0 * tokens * channels
    states = "element of state a token", float(tokens * heads * width * state)
    elements = "element of its input", float(tokens * channels)
    for name, module, entry, moved, work in (
        ("mamba2_scan", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", scanned, states),
        ("causal_conv1d", "causal_conv1d", "causal_conv1d_fn", convolved, elements),
    ):
        found, shape = library(module), f"{tokens:,} tokens, {heads} heads of {width}, {groups} groups of {state}"
        forward, backward = (
            Timed(name, module.split(".")[0], phase, shape, share * moved, work=work)
            for phase, share in (("forward", 1.0), ("backward", 2.0))
        )
        if found is None:
            why = f"{module.split('.')[0]} is not installed"
            yield bench.left_out(forward, why)
            yield bench.left_out(backward, why)
        elif name == "mamba2_scan":
            x, b, c = (bench.randn(1, tokens, *one) for one in ((heads, width), (groups, state), (groups, state)))
            rate, decay = torch.rand(1, tokens, heads, device=bench.device), -torch.rand(heads, device=bench.device)
            call = partial(getattr(found, entry), x, rate, decay, b, c, chunk_size=128)
            yield from bench.both_ways(forward, backward, call, [x, b, c])
        else:
            x, weight = bench.randn(1, channels, tokens), bench.randn(channels, 4)
            call = partial(getattr(found, entry), x, weight, activation="silu")
            yield from bench.both_ways(forward, backward, call, [x, weight])
