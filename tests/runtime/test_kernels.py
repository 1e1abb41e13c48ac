"""Bytes that kernels of rank 0 read and write in a step, on tensors without data, against those that are priced.

Compiled functions count by one rule, `KernelMeter`: what is summed over tokens is a kernel of its own, all else of a
function is one. No size here is one of a published model.
"""

from __future__ import annotations

import itertools
from collections import Counter
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

import axonn_tune
from axonn_tune.program.operations import Kernel
from axonn_tune.recompute import MODULES, RECOMPUTES
from axonn_tune.runtime import modules
from axonn_tune.runtime.ledger import program_of
from axonn_tune.runtime.mesh import build_mesh
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.model import LayerType
from axonn_tune.specs.tuning import Tuning
from axonn_tune.specs.workload import Recompute
from axonn_tune.vocabulary import EMBEDDING_BACKWARD, EMBEDDING_FORWARD, END, HEAD
from tests.runtime.kernels import KernelMeter, kernels_of_step

SECTIONS = ("block", "head", "block_backward")
WITHIN, LAYERS = 0.05, 3
FAMILIES, KINDS = (
    ("gpt", "llama"),
    (
        *RECOMPUTES,
        *(name for name, one in MODULES.items() if not one.needs),
        "core_attn,mlp_act",
        "core_attn,mlp",
        "layernorm,mlp",
    ),
)
GPT = {"hidden": 2304, "heads": 18, "kv_heads": 18, "ffn": 7680, "vocab": 30011, "max_sequence_length": 1536}
LLAMA = {"hidden": 2560, "heads": 20, "kv_heads": 4, "ffn": 6912, "vocab": 36000, "max_sequence_length": 4096}
SPLITS = [(1, 1, 1), (2, 1, 2), (1, 2, 1), (2, 2, 2)]


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
    recompute_layers: int | None = None,
    tied: bool = False,
    overlaps: bool = False,
    precision: str = "bf16",
    halved: bool = False,
    kept_layers: int = 1,
    normed: bool = False,
    gate: str | None = None,
    targets: tuple[str, ...] = (),
) -> Launch:
    """Three layers, two sequences of 1,536 tokens a rank; overlap moves kernels into the section beside theirs."""
    sizes = (LLAMA if family == "llama" else GPT) | {"head_dim": 128, "layers": LAYERS, "tied_embeddings": tied}
    x, y, z = split
    found = load_model("llama3-8b" if family == "llama" else "5b").document
    of_type = LayerType(qk_norms=normed, output_gate=gate)
    workload: dict[str, object] = {
        "global_batch": 2 * z,
        "sequence_length": 1536,
        "precision": precision,
        "split_micro_batch": halved,
    }
    tuning = Tuning(mode="lora", targets=targets, dtype="fp32") if targets else None
    workload |= {"tuning": tuning}
    return base().model_copy(
        update={
            "model": found.model_copy(update=sizes | {"layer_types": {"dense": of_type}}).tuned(tuning),
            "workload": base().workload.model_copy(update=workload | ({} if overlaps else {"overlaps": ()})),
            "grid": base().grid.model_copy(update={"x": x, "y": y, "z": z, "data": 1}),
            "micro_batch": 2,
            "grad_accumulation": 1,
            "recompute": recompute,
            "recompute_layers": recompute_layers,
            "kept_layers": kept_layers,
            "compile": compiled,
        }
    )


def launched(config: Launch) -> tuple[Counter[str], Counter[str]]:
    """Bytes and kernels of the runtime, by section."""
    grid = config.grid.grid()
    if grid.world > 1:
        dist.init_process_group("fake", rank=0, world_size=grid.world)
    try:
        parts = kernels_of_step(config, build_mesh(grid))
    finally:
        if grid.world > 1:
            dist.destroy_process_group()
    tables = {EMBEDDING_FORWARD: "embedding", HEAD: "head", EMBEDDING_BACKWARD: "embedding_backward", END: "end"}
    size_bytes, kernels = Counter[str](), Counter[str]()
    for part, found in parts.items():
        section = tables.get(part) or ("block" if part.endswith("forward") else "block_backward")
        size_bytes[section] += sum(found)
        kernels[section] += len(found)
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


PARTS = ("attention.qkv/q", "attention.qkv/v", "mlp.fc1/gate")
CONFIGURATIONS: list[dict[str, Any]] = [
    {"family": "gpt", "split": SPLITS[0], "recompute": "none", "compiled": True},
    {"family": "gpt", "split": SPLITS[1], "recompute": "full", "compiled": False},
    {"family": "llama", "split": SPLITS[2], "recompute": "selective", "compiled": False},
    {"family": "llama", "split": (2, 2, 1), "compiled": True, "tied": True, "halved": True},
    {"family": "gpt", "split": SPLITS[2], "compiled": True, "precision": "fp32"},
    {"family": "gpt", "split": SPLITS[1], "recompute": "core_attn,mlp", "compiled": False},
    {"family": "llama", "split": (2, 2, 1), "recompute": "layernorm,mlp", "compiled": True},
    {"family": "gpt", "split": SPLITS[3], "recompute": "full", "recompute_layers": 2, "compiled": True},
    {"family": "llama", "split": SPLITS[1], "recompute": "selective", "compiled": True, "normed": True},
    {"family": "llama", "split": SPLITS[1], "recompute": "none", "compiled": False, "normed": True},
    {"family": "llama", "split": SPLITS[1], "recompute": "selective", "compiled": True, "gate": "element"},
    {"family": "llama", "split": SPLITS[0], "compiled": False, "normed": True, "gate": "element"},
    {"family": "gpt", "split": SPLITS[2], "recompute": "core_attn", "compiled": True, "gate": "head"},
    {"family": "llama", "split": (2, 2, 2), "compiled": True, "targets": ("*",)},
    {"family": "llama", "split": (1, 1, 2), "recompute": "full", "compiled": True, "targets": PARTS},
]
"""Those that run each time; nightly all kinds of recompute and splits, tied tables with halves, one type for all."""
NIGHTLY: list[dict[str, Any]] = [
    *(
        {"family": family, "split": split, "recompute": recompute, "compiled": compiled}
        for family, split, recompute, compiled in itertools.product(FAMILIES, SPLITS, KINDS, (True, False))
    ),
    *({"family": one, "split": (2, 2, 1), "compiled": False, "tied": True, "halved": True} for one in FAMILIES),
    *({"family": one, "split": SPLITS[2], "compiled": False, "precision": "fp32"} for one in FAMILIES),
]


@pytest.mark.parametrize(
    "options",
    [*CONFIGURATIONS, *(pytest.param(one, marks=pytest.mark.nightly) for one in NIGHTLY if one not in CONFIGURATIONS)],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_kernels_move_what_is_priced(options: dict[str, Any]) -> None:
    """Guards the price of element-wise work: each section's bytes and kernels are those of the program.

    Of FP32, where a conversion is no kernel, kernels are counted as if it were one.
    """
    config = launch(**options)
    (moved, kernels), (expected, counted) = launched(config), priced(config)
    for name in SECTIONS:
        assert expected[name] == pytest.approx(moved[name], rel=WITHIN), name
        assert counted[name] == pytest.approx(kernels[name], rel=0.3 if "precision" in options else 0.1), name


EXPERTS = {"count": 8, "per_token": 3, "width": 1280, "shared_width": 1024}


@pytest.mark.parametrize(
    ("split", "expert", "compiled", "recompute"),
    [
        ((1, 1, 1), 1, True, "none"),
        ((1, 1, 2), 2, True, "selective"),
        ((2, 1, 2), 2, False, "none"),
        ((1, 2, 2), 1, False, "full"),
        ((2, 2, 2), 2, True, "full"),
    ],
)
def test_experts_move_what_is_priced(
    split: tuple[int, int, int], expert: int, compiled: bool, recompute: Recompute
) -> None:
    """Guards the same of experts, whose loops over single ones launch more kernels than are counted."""
    config = launch("llama", split, compiled=compiled, recompute=recompute)
    moe = {"layers": f"moe*{LAYERS}", "layer_types": {"moe": {"experts": EXPERTS}}}
    given = config.model.model_dump(mode="json", by_alias=True, exclude_none=True) | moe
    changes = {"model": type(config.model).model_validate(given), "force_load_balancing": True}
    changes |= {"grid": config.grid.model_copy(update={"expert": expert})}
    config = config.model_copy(update=changes)
    (moved, _), (expected, _) = launched(config), priced(config)
    for name in SECTIONS:
        assert expected[name] == pytest.approx(moved[name], rel=WITHIN), name


@pytest.mark.parametrize(
    ("split", "heads", "precision", "recompute"),
    [((1, 1, 1), (8, 16), "bf16", "none"), ((2, 2, 2), (8, 24), "fp32", "full")],
)
def test_delta_nets_move_what_is_priced(
    split: tuple[int, int, int], heads: tuple[int, int], precision: str, recompute: Recompute
) -> None:
    """Guards the operators of gated delta nets, which are not compiled: bytes, and kernels with those of the chain."""
    config = launch("llama", split, compiled=True, recompute=recompute, precision=precision)
    delta = {"attention": False, "gdn": dict(zip(("key_heads", "value_heads"), heads, strict=True))}
    given = config.model.model_dump(mode="json", by_alias=True, exclude_none=True)
    given |= {"layers": f"delta*{LAYERS}", "layer_types": {"delta": delta}}
    config = config.model_copy(update={"model": type(config.model).model_validate(given)})
    (moved, kernels), (expected, counted) = launched(config), priced(config)
    for name in SECTIONS:
        assert expected[name] == pytest.approx(moved[name], rel=WITHIN), name
        assert counted[name] == pytest.approx(kernels[name], rel=0.1), name


@pytest.mark.parametrize("family", FAMILIES)
def test_overlap_moves_no_byte_more(family: str) -> None:
    """Guards the sum of all sections: overlap launches a gather's conversion and a gradient's addition elsewhere."""
    every = (*SECTIONS, "embedding", "embedding_backward")
    plain, overlapped = (launched(launch(family, (2, 1, 2), compiled=True, overlaps=one))[0] for one in (False, True))
    assert sum(plain[name] for name in every) == sum(overlapped[name] for name in every)


def test_the_rule_by_hand() -> None:
    """Guards the count: a fused kernel reads once and sums over tokens apart; a view is none; broadcasts count once.

    M = 64, H = 32, BF16, statistics and weights of FP32. An operator in place reads what it writes, an overwriting one
    does not.
    """
    x, gradient, residual = (torch.empty(64, 32, dtype=torch.bfloat16, device="meta") for _ in range(3))
    weight, scale = torch.empty(32, device="meta"), torch.empty(64, 1, device="meta")
    with KernelMeter() as meter:
        meter.compiler(modules.whole_gradient)(x, (scale,), weight, gradient, residual)
    row, vectors, statistics = 2 * 64 * 32, 4 * 32, 4 * 64
    rows, columns = sorted(meter.launched, reverse=True)
    assert rows == 4 * row + vectors + statistics
    assert columns == 2 * row + vectors + statistics
    x = torch.empty(64, 32, device="meta")
    with KernelMeter() as meter:
        x.view(32, 64).t()
        x.add_(weight.expand(64, 32))
        x.copy_(weight)
        x @ x.t()
    whole, one = 4 * 64 * 32, 4 * 32
    assert meter.launched == [2 * whole + one, whole + one]
