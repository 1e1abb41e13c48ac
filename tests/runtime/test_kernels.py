"""Bytes that kernels of rank 0 read and write in a step, on tensors without data, against those that are priced.

Compiled functions count by one rule, `KernelMeter`: what is summed over tokens is a kernel of its own, all else of a
function is one. No size here is one of a published model.
"""

from __future__ import annotations

import itertools
from collections import Counter
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist

import axonn_tune
from axonn_tune.program.operations import Kernel
from axonn_tune.runtime import modules
from axonn_tune.runtime.ledger import program_of
from axonn_tune.runtime.mesh import build_mesh
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.traces import EMBEDDING_BACKWARD, EMBEDDING_FORWARD, END, HEAD
from axonn_tune.specs.workload import RECOMPUTES, Recompute
from tests.runtime.kernels import KernelMeter, kernels_of_step

SECTIONS = ("block", "head", "block_backward")
WITHIN, KERNELS_WITHIN = 0.05, 0.1
LAYERS = 3
GPT = {"hidden": 2304, "heads": 18, "kv_heads": 18, "ffn": 7680, "vocab": 30011, "max_sequence_length": 1536}
LLAMA = {"hidden": 2560, "heads": 20, "kv_heads": 4, "ffn": 6912, "vocab": 36000, "max_sequence_length": 4096}
SPLITS = [(1, 1, 1), (2, 1, 2), (1, 2, 1), (2, 2, 2)]
DAILY = [
    *(("gpt", SPLITS[0], "none", True), ("gpt", SPLITS[1], "full", False), ("llama", SPLITS[2], "selective", False)),
    *(("llama", SPLITS[3], "full", True), ("gpt", SPLITS[3], "none", False)),
]


@lru_cache
def base() -> Launch:
    """A launch config to be changed."""
    return axonn_tune.search("5b", gpus=8, machine="dgx-h100").launch_config()


def launch(
    family: str,
    split: tuple[int, int, int] = (1, 1, 1),
    *,
    compiled: bool,
    recompute: Recompute = "none",
    tied: bool = False,
    overlaps: bool = False,
    precision: str = "bf16",
    halved: bool = False,
    kept_layers: int = 1,
) -> Launch:
    """Three layers, two sequences of 1,536 tokens a rank; overlap moves kernels into the section beside theirs."""
    sizes = LLAMA if family == "llama" else GPT
    x, y, z = split
    found = load_model("llama3-8b" if family == "llama" else "5b").document
    workload = {"global_batch": 2 * z, "sequence_length": 1536, "precision": precision, "split_micro_batch": halved}
    return base().model_copy(
        update={
            "model": found.model_copy(update={**sizes, "head_dim": 128, "layers": LAYERS, "tied_embeddings": tied}),
            "workload": base().workload.model_copy(update=workload | ({} if overlaps else {"overlaps": ()})),
            "grid": base().grid.model_copy(update={"x": x, "y": y, "z": z, "data": 1}),
            "micro_batch": 2,
            "grad_accumulation": 1,
            "recompute": recompute,
            "kept_layers": kept_layers,
            "compile": compiled,
        }
    )


def section(part: str) -> str:
    """The program's section of a part of the computation."""
    tables = {EMBEDDING_FORWARD: "embedding", HEAD: "head", EMBEDDING_BACKWARD: "embedding_backward", END: "end"}
    return tables.get(part) or ("block" if part.endswith("forward") else "block_backward")


def launched(config: Launch) -> tuple[Counter[str], Counter[str]]:
    """Bytes and kernels of the runtime, by section."""
    grid = config.grid.grid()
    if grid.world > 1:
        dist.init_process_group("fake", rank=0, world_size=grid.world)
    size_bytes, kernels = Counter[str](), Counter[str]()
    try:
        parts = kernels_of_step(config, build_mesh(grid))
    finally:
        if grid.world > 1:
            dist.destroy_process_group()
    for part, found in parts.items():
        size_bytes[section(part)] += sum(one.size_bytes for one in found)
        kernels[section(part)] += len(found)
    return size_bytes, kernels


def priced(config: Launch) -> tuple[Counter[str], Counter[str]]:
    """Bytes and kernels of the program, by section."""
    planned, size_bytes, kernels = program_of(config), Counter[str](), Counter[str]()
    for one in planned.program.sections():
        for step in one.operations:
            if isinstance(step, Kernel) and step.size_bytes.coefficient:
                count = float((one.repeats * step.calls).evaluate(planned.values))
                size_bytes[one.name] += round(count * float(step.size_bytes.evaluate(planned.values)))
                kernels[one.name] += round(count)
    return size_bytes, kernels


def assert_priced(config: Launch, *, kernels_within: float = KERNELS_WITHIN) -> None:
    """Each section's bytes and kernels are those of the program."""
    (moved, kernels), (expected, counted) = launched(config), priced(config)
    for name in SECTIONS:
        assert expected[name] == pytest.approx(moved[name], rel=WITHIN), name
        assert counted[name] == pytest.approx(kernels[name], rel=kernels_within), name


@pytest.mark.parametrize(
    ("family", "split", "recompute", "compiled"),
    [
        pytest.param(*one, marks=[] if one in DAILY else pytest.mark.nightly)
        for one in itertools.product(("gpt", "llama"), SPLITS, RECOMPUTES, (True, False))
    ],
)
def test_kernels_move_what_is_priced(
    family: str, split: tuple[int, int, int], recompute: Recompute, *, compiled: bool
) -> None:
    """Guards the price of element-wise work: every kind of recompute and split, with one kept layer."""
    assert_priced(launch(family, split, compiled=compiled, recompute=recompute))


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_tied_tables_and_split_micro_batches_move_what_is_priced(family: str, *, compiled: bool) -> None:
    """Guards the head's gradient beside the embedding's, and halves that are joined for the loss."""
    assert_priced(launch(family, (2, 2, 1), compiled=compiled, tied=True, halved=True))


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_one_type_needs_no_conversions(family: str, *, compiled: bool) -> None:
    """Guards FP32, where a conversion is no kernel; kernels are counted as if it were one."""
    assert_priced(launch(family, (1, 2, 1), compiled=compiled, precision="fp32"), kernels_within=0.3)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_overlap_moves_no_byte_more(family: str) -> None:
    """Guards the sum of all sections: overlap launches a gather's conversion and a gradient's addition elsewhere."""
    every = (*SECTIONS, "embedding", "embedding_backward")
    plain, overlapped = (launched(launch(family, (2, 1, 2), compiled=True, overlaps=one))[0] for one in (False, True))
    assert sum(plain[name] for name in every) == sum(overlapped[name] for name in every)


def test_compiled_steps_stay_lean() -> None:
    """Guards what compilation is for: 5b, four layers, 16,384 tokens, all layers kept; bounds in GB by section."""
    four = base().model_copy(
        update={
            "model": load_model("5b").document.model_copy(update={"layers": 4}),
            "workload": base().workload.model_copy(update={"global_batch": 8, "sequence_length": 2048, "overlaps": ()}),
            "grid": base().grid.model_copy(update={"x": 1, "y": 1, "z": 1, "data": 1}),
            "micro_batch": 8,
            "grad_accumulation": 1,
            "recompute": "none",
            "kept_layers": 4,
            "compile": True,
        }
    )
    moved, _ = launched(four)
    assert moved["head"] < 10e9
    assert moved["block"] < 14.5e9
    assert moved["block_backward"] < 29.5e9


def test_a_fused_kernel_reads_once_and_sums_over_tokens_apart() -> None:
    """Guards the rule by hand: M = 64, H = 32, BF16, statistics and weights of FP32."""
    x, gradient, residual = (torch.empty(64, 32, dtype=torch.bfloat16, device="meta") for _ in range(3))
    weight, scale = torch.empty(32, device="meta"), torch.empty(64, 1, device="meta")
    with KernelMeter() as meter:
        meter.compiler(modules.whole_gradient)(x, (scale,), weight, gradient, residual)
    row, vectors, statistics = 2 * 64 * 32, 4 * 32, 4 * 64
    rows, columns = sorted((one.size_bytes for one in meter.launched), reverse=True)
    assert rows == 4 * row + vectors + statistics
    assert columns == 2 * row + vectors + statistics


def test_a_view_is_no_kernel_and_an_operator_in_place_reads_what_it_writes() -> None:
    """Guards the count without a compiler: broadcast elements count once, overwritten ones are not read."""
    x, row = torch.empty(64, 32, device="meta"), torch.empty(32, device="meta")
    with KernelMeter() as meter:
        x.view(32, 64).t()
        x.add_(row.expand(64, 32))
        x.copy_(row)
        x @ x.t()
    whole, one = 4 * 64 * 32, 4 * 32
    assert [kernel.size_bytes for kernel in meter.launched] == [2 * whole + one, whole + one]
