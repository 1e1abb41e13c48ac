"""Multi-head latent attention: priced in columns as alone; GEMMs, bytes and memory by hand and as published."""

from __future__ import annotations

from typing import Any

import pytest

from axonn_tune.cost.price import Detail, price
from axonn_tune.frameworks import find_framework
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.program.operations import Attention, Collective, MatMul
from axonn_tune.ranking.choosing import search
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload
from axonn_tune.units import GIB
from tests.unit.small import small_model, small_problem

MACHINE = load_machine("perlmutter-80gb").document
LATENT = {"query_rank": 512, "kv_rank": 256, "nope_dim": 64, "rope_dim": 32, "value_dim": 64}
EXPERTS = {"count": 8, "per_token": 2, "width": 1024, "shared_width": 1024}
MEGATRON = ("x", "z", "context", "data", "pipeline")
BALANCED = find_framework("megatron-core").with_step(imbalance=1.0)


def model_of(layers: str, **changes: Any) -> Model:
    """A model of hidden 2048 with 16 heads of latent attention, and experts in some layers."""
    own = {"latent": LATENT | changes}
    types = {"dense": own, "moe": own | {"experts": EXPERTS}}
    sizes = {"hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 8192, "vocab": 51200}
    sizes["head_dim"] = own["latent"]["nope_dim"] + own["latent"]["rope_dim"]
    used = {name: value for name, value in types.items() if name in layers}
    return small_model(family="llama", max_sequence_length=2048, layers=layers, layer_types=used, **sizes)


@pytest.mark.parametrize(
    ("name", "layers", "rank", "memory_gib"),
    [
        ("axonn-tune", "dense*2 moe*2", 512, 16.0),
        pytest.param("megatron-core", "dense moe*3", 512, 12.0, marks=pytest.mark.nightly),
        pytest.param("torchtitan", "dense*4", 512, 80.0, marks=pytest.mark.nightly),
        ("fsdp", "dense moe*3", None, 80.0),
    ],
)
def test_candidates_cost_what_each_does_alone(name: str, layers: str, rank: int | None, memory_gib: float) -> None:
    """Guards columns of weights that are duplicated over x and over y: the same as of one layout to the last bit."""
    small = MACHINE.accelerator.model_copy(update={"memory_gib": memory_gib})
    machine, model = MACHINE.model_copy(update={"accelerator": small}), model_of(layers, query_rank=rank)
    given = {"gpus": 4, "batch": 16, "sequence_length": 2048}
    ranked = search(small_problem(model, machine, find_framework(name), **given), variants=True, top=0)
    assert len(ranked)
    assert name != "megatron-core" or "mla_up_proj" in {row.recompute for row in ranked}
    for place in range(0, len(ranked), max(len(ranked) // 20, 1)):
        row, alone = ranked[place], ranked.detail(place)
        assert (row.iteration_s, row.communication_s, row.compute_s) == (
            alone.iteration_s,
            alone.communication_s,
            alone.compute_s,
        ), row.layout
        assert row.memory_bytes == pytest.approx(alone.memory_bytes, rel=1e-12)


def priced(grid: Grid, *, model: Model, framework: str = "megatron-core", recompute: str = "none") -> Detail:
    """One layout of 64 sequences of 2,048 tokens, a micro-batch of one."""
    workload = Workload(global_batch=64, sequence_length=2048)
    return price(Job(model, MACHINE, workload, find_framework(framework)), Layout(grid, 1, recompute, 0))


def test_gemms_of_a_block() -> None:
    """Guards every GEMM on one of two tensor ranks, of tokens T = 2048 and T/2 where weights are duplicated."""
    found = priced(Grid(x=2, data=8, order=MEGATRON), model=model_of("dense*4"))
    steps = found.program.blocks[0].forward.operations
    sizes = {
        one.layer: tuple(float(size.evaluate(found.values)) for size in (one.m, one.n, one.k))
        for one in steps
        if isinstance(one, MatMul)
    }
    assert {name: size for name, size in sizes.items() if name.startswith("attention")} == {
        "attention.q_down": (1024, 512, 2048),
        "attention.kv_down": (1024, 256 + 32, 2048),
        "attention.q_up": (2048, 8 * 96, 512),
        "attention.kv_up": (2048, 8 * 128, 256),
        "attention.output": (2048, 2048, 8 * 64),
    }
    every = found.program.blocks[0].backward.operations
    core = [one.flops.evaluate(found.values) for one in (*steps, *every) if isinstance(one, Attention)]
    pairs = 2048 * 2048 * 8
    assert core == [2 * pairs * (96 + 64), 2 * pairs * (3 * 96 + 2 * 64)]
    backward = [one.flops.evaluate(found.values) for one in every if isinstance(one, MatMul)]
    assert sum(backward) == 2 * sum(2 * m * n * k for m, n, k in sizes.values())


def test_bytes_over_tensor_ranks() -> None:
    """Guards gathers of latents in place of the hidden state's, and the sum of duplicated weights' gradients."""
    found = priced(Grid(x=2, data=8, order=MEGATRON), model=model_of("dense*4"))
    sent: dict[tuple[str, str, str], float] = {}
    for one, _ in found.program.collectives():
        if isinstance(one, Collective) and one.axis == "x" and one.layer.startswith(("attention.", "duplicated")):
            key = (one.phase, one.layer, one.kind)
            sent[key] = sent.get(key, 0.0) + float(one.size_bytes.evaluate(found.values))
    token = 2 * 2048
    assert sent == {
        ("forward", "attention.q_up", "all_gather"): 512 * token,
        ("forward", "attention.kv_up", "all_gather"): (256 + 32) * token,
        ("forward", "attention.output", "reduce_scatter"): 2048 * token,
        ("backward", "attention.output", "all_gather"): 2048 * token,
        ("backward", "attention.kv_up", "all_gather"): 256 * token,
        ("backward", "attention.kv_up", "reduce_scatter"): (256 + 32) * token,
        ("backward", "attention.q_up", "all_gather"): 512 * token,
        ("backward", "attention.q_up", "reduce_scatter"): 512 * token,
        ("step", "duplicated", "all_reduce"): 4 * 4 * 2048 * (512 + 256 + 32),
    }


@pytest.mark.parametrize(("x", "y"), [(1, 1), (4, 1), (1, 4), (2, 2)])
def test_weights_that_are_duplicated(x: int, y: int) -> None:
    """Guards what a rank holds: down-projections split over y, up-projections over x, the rest over both."""
    model = model_of("dense*4")
    found = priced(Grid(x=x, y=y, data=16 // (x * y)), model=model, framework="axonn-tune")
    down, up = 2048 * (512 + 256 + 32), 16 * (512 * 96 + 256 * 128)
    both = 16 * 64 * 2048 + 3 * 2048 * 8192
    tables = 2 * found.values["V"] * 2048 / (x * y)
    assert found.values["parameters"] == 4 * (down / y + up / x + both / (x * y)) + tables
    assert found.values["vectors"] == 4 * (2 * 2048 / y + 512 + 256) + 2048 / y


def deepseek(**changes: Any) -> Model:
    """DeepSeek-V2 or -V3 without its MTP layer, with other layers."""
    name = changes.pop("name")
    stored = load_model(name).document.model_dump(by_alias=True)
    types = {name: value for name, value in stored["layer_types"].items() if name in changes["layers"]}
    fresh = {"pattern": None, "mtp_layers": 0, "layer_types": types, **changes}
    return Model.model_validate(stored | fresh)


def stage_of(precision: str, recompute: str) -> dict[str, float]:
    """Memory of a stage with 16 of 64 MoE layers of DeepSeek-V3, GiB: PP 4, VPP 4, EP 64 on 256 GPUs.

    The third of four, which holds activations of 15 chunks: by them the published savings agree with each other.
    """
    workload = Workload(global_batch=2048, sequence_length=4096, precision=precision)
    machine, model = load_machine("dgx-b200").document, deepseek(name="deepseek-v3", layers="moe*64")
    grid = Grid(data=64, pipeline=4, expert=64, order=MEGATRON)
    found = price(Job(model, machine, workload, BALANCED), Layout(grid, 1, recompute, 0, 4))
    memory = found.stages[2].memory
    return {name: float(size) / GIB for name, size in memory.items} | {"": float(memory.total_bytes) / GIB}


def test_memory_of_deepseek_v3() -> None:
    """Guards arXiv 2603.07685, tables 3 and 4; activations without its memory-efficient permutation, which saves 26.3.

    Savings agree with one another in FP8 alone: `moe_act` is half of what it is in BF16.
    """
    items = stage_of("bf16", "none")
    held = {
        what: sum(size for name, size in items.items() if name.startswith(names))
        for what, names in {
            "weights": ("compute weights", "gradients"),
            "optimizer": ("master", "optimizer moments"),
            "activations": ("saved",),
        }.items()
    }
    assert held["weights"] == pytest.approx(36.4, rel=0.01)
    assert held["optimizer"] == pytest.approx(32.1, rel=0.01)
    assert held["activations"] + 26.3 == pytest.approx(131.0, rel=0.01)
    whole = stage_of("fp8-current", "none")[""]
    for module, saved in (("mla_up_proj", 30.4), ("layernorm", 8.2), ("moe_act", 3.8)):
        assert whole - stage_of("fp8-current", module)[""] == pytest.approx(saved, rel=0.05), module


@pytest.mark.parametrize(
    ("name", "stages", "memory_gib", "step_s"),
    [
        ("deepseek-v2", 1, 45.63, 0.3666),
        ("deepseek-v2", 2, 44.7, 0.2821),
        ("deepseek-v3", 1, 104.3, 0.6032),
        ("deepseek-v3", 2, 114.0, 0.4522),
    ],
)
def test_measured_memory_of_four_layers(name: str, stages: int, memory_gib: float, step_s: float) -> None:
    """Guards allocated memory on 8 B200, one of four layers dense (MooreThreads/SimuMax@4dcaae5, docs/b200)."""
    model, machine = deepseek(name=name, layers="dense moe*3"), load_machine("dgx-b200").document
    grid = Grid(data=8 // stages, pipeline=stages, expert=8 // stages, order=MEGATRON)
    workload = Workload(global_batch=32 // stages, sequence_length=4096)
    found = price(Job(model, machine, workload, BALANCED), Layout(grid, 1, "none", 0))
    assert found.memory_bytes / GIB == pytest.approx(memory_gib, rel=0.05)
    assert found.iteration_s < step_s


def test_a_router_is_whole_on_each_rank_of_its_tokens() -> None:
    """Guards routers under sequence parallelism: stored whole over x, their gradients summed over it."""
    model, found = model_of("moe*4"), dict[int, float]()
    for x in (1, 2):
        one = priced(Grid(x=x, data=4, order=MEGATRON), model=model)
        found[x] = float(one.values["W"])
        sums = [step for step, _ in one.program.collectives() if step.layer == "duplicated"]
        widths = 512 + 256 + 32 + model.types[0].experts.count
        assert [step.size_bytes.evaluate(one.values) for step in sums] == [4 * 4 * 2048 * widths]
    down = 2048 * (512 + 256 + 32) + 2048 * model.types[0].experts.count
    assert found[2] - found[1] == down
