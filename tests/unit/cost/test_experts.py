"""Experts: priced in columns as alone, their groups of ranks, and what a rank holds and computes, by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, cast

import pytest

from axonn_tune.cost.collectives import route
from axonn_tune.cost.price import Detail, price
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.step import ExpertKernels
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.program.count import counted
from axonn_tune.program.operations import Kernel, MatMul
from axonn_tune.program.types.experts import STRIDED
from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.priced import Priced
from axonn_tune.request import Request
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload
from axonn_tune.vocabulary import OVERLAPS, Overlap, Precision
from tests.unit.small import small_model, small_problem

MACHINE = load_machine("perlmutter-80gb").document
SIZES: dict[str, Any] = {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 16384, "vocab": 51200}
MOE = {"experts": {"count": 8, "per_token": 2, "width": 2048, "shared_width": 1024}}
MEGATRON = ("x", "z", "context", "data", "pipeline")


def model_of(layers: str, **changes: int) -> Model:
    """A model with dense layers and some of experts."""
    experts = MOE["experts"] | changes
    used = {"dense": {}, "moe": {"experts": experts}, "near": {"experts": experts, "window": 512}}
    types = {name: value for name, value in used.items() if name in layers}
    return small_model(family="llama", max_sequence_length=2048, layers=layers, layer_types=types, **SIZES)


def priced(framework: str, grid: Grid, *, layers: str = "dense moe*3", **changes: int) -> Detail:
    """One layout of 64 sequences, a micro-batch of one, with forced load balancing."""
    workload = Workload(global_batch=64, sequence_length=2048)
    job = Job(model_of(layers, **changes), MACHINE, workload, find_framework(framework).with_step(imbalance=1.0))
    return price(job, Layout(grid, 1, "none", 0))


@pytest.mark.parametrize(
    ("layers", "gpus", "room"),
    [
        ("moe*6", 4, 1.0),
        pytest.param("(dense moe)*4", 4, 1.5, marks=pytest.mark.nightly),
        pytest.param("dense*2 moe*6", 8, 1.0, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize(
    ("name", "memory_gib"),
    [
        ("axonn-tune", 24.0),
        ("megatron-core", 20.0),
        pytest.param("torchtitan", 80.0, marks=pytest.mark.nightly),
        ("fsdp", 80.0),
    ],
)
def test_candidates_cost_what_each_does_alone(
    layers: str, gpus: int, room: float, name: str, memory_gib: float
) -> None:
    """Guards the columns of experts, with stages, chunks and recompute in some layers: the same to the last bit."""
    small = MACHINE.accelerator.model_copy(update={"memory_gib": memory_gib * room})
    machine = MACHINE.model_copy(update={"accelerator": small})
    given = {"gpus": gpus, "batch": 8 if gpus == 8 else 12, "sequence_length": 2048}
    ranked = search(small_problem(model_of(layers), machine, find_framework(name), **given), variants=True, top=0)
    assert name == "fsdp" or {row.grid.expert for row in ranked} >= {1, 2, gpus}
    assert memory_gib == 80.0 or any(one.recompute_layers for one in ranked.rows)
    _check_alone(ranked)


@pytest.mark.nightly
@pytest.mark.parametrize("overlaps", [OVERLAPS, ()])
def test_candidates_with_sharded_experts_cost_what_each_does_alone(overlaps: tuple[Overlap, ...]) -> None:
    """Guards the same where an axis of its own shards experts, beside GTP, EP, stages, chunks and recompute."""
    machine = load_machine("dgx-h100").document
    request, framework = Request(expert_z=2), find_framework("megatron-core").with_step(gathers_experts=True)
    problem = small_problem(
        model_of("dense moe*7"),
        *(machine, framework),
        **{"gpus": 8, "batch": 16, "sequence_length": 2048, "request": request, "overlaps": overlaps},
    )
    ranked = search(problem, variants=True, top=0)
    grids = [row.grid for row in ranked]
    assert {grid.axis_size("expert_z") for grid in grids} == {2}
    assert {grid.z for grid in grids} >= {1, 2, 8}
    assert {grid.expert for grid in grids} >= {1, 4}
    _check_alone(ranked)


def _check_alone(ranked: Priced) -> None:
    """Some 20 candidates of a search, each priced by itself."""
    assert len(ranked)
    for place in range(0, len(ranked), max(len(ranked) // 20, 1)):
        row, alone = ranked[place], ranked.detail(place)
        assert (row.iteration_s, row.communication_s, row.compute_s) == (
            alone.iteration_s,
            alone.communication_s,
            alone.compute_s,
        ), row.layout
        assert row.memory_bytes == pytest.approx(alone.memory_bytes, rel=1e-12)


def group_of_first(sizes: list[int], wide: set[int]) -> set[int]:
    """Ranks that share rank 0's coordinates but on some axes, the first axis varying fastest, as in Megatron-Core's
    core/parallel_state.py."""
    ranks, stride = {0}, 1
    for axis, size in enumerate(sizes):
        if axis in wide:
            ranks = {rank + step * stride for rank in ranks for step in range(size)}
        stride *= size
    return ranks


@pytest.mark.parametrize(
    ("x", "context", "data", "pipeline", "expert", "tensor", "shards"),
    [
        (1, 1, 16, 1, 8, 1, 1),
        (2, 1, 8, 2, 8, 1, 2),
        (2, 1, 8, 2, 8, 2, 1),
        (2, 2, 8, 1, 4, 1, 4),
        (4, 1, 4, 4, 2, 4, 1),
        (1, 4, 4, 2, 16, 1, 1),
        (8, 2, 4, 1, 16, 2, 2),
        (2, 1, 16, 8, 32, 1, 1),
    ],
)
def test_groups_are_those_of_two_rank_grids(
    x: int, context: int, data: int, pipeline: int, expert: int, tensor: int, shards: int
) -> None:
    """Guards parallel folding: ranks of EP are blocks of ETP, over TP, CP and DP, EGTP is after them, and EDP what is
    left."""
    sizes = {"x": x, "context": context, "data": data, "pipeline": pipeline}
    grid = Grid(**sizes, expert=expert, expert_tensor=tensor, expert_z=shards, order=MEGATRON)
    left = x * context * data // (expert * tensor * shards)
    folding, generated = find_framework("megatron-core").step.folding, [tensor, expert, shards, left, pipeline]
    for name, wide in (
        ("expert_tensor", {0}),
        ("expert", {1}),
        ("expert_tensorexpert", {0, 1}),
        ("expert_z", {2}),
        ("expert_data", {3}),
    ):
        ranks = {0}
        for size, stride in grid.group_shape(name, folding).levels:
            ranks = {rank + step * stride for rank in ranks for step in range(size)}
        assert ranks == group_of_first(generated, wide), name


def test_experts_shard_what_torchtitan_leaves_them() -> None:
    """Guards efsdp = dp_shard·cp·tp / ep, of ranks that lie ep apart."""
    folding = find_framework("torchtitan").step.folding
    grid = Grid(x=2, context=2, z=8, data=4, expert=8, order=("x", "context", "z", "data", "pipeline"))
    assert grid.group_shape("expert", folding).levels == ((8, 1),)
    assert grid.group_shape("expert_z", folding).levels == ((4, 8),)
    assert grid.group_shape("expert_data", folding).levels == ((4, 32),)


def test_a_rank_holds_its_experts() -> None:
    """Guards states at rest: experts of 3 layers over EP, with their own replicas, beside everything else."""
    found = priced("megatron-core", Grid(x=2, data=8, expert=4, expert_tensor=2, order=MEGATRON))
    one_expert = 3 * 2048 * 4096
    assert found.values["expert_parameters"] == 3 * (8 / 4) * one_expert / 2
    assert found.values["expert_data"] == 16 / (4 * 2)
    shared, router, attention = 3 * 1024 * 4096, 8 * 4096, 4096 * (2 * 4096 + 2 * 8 * 128)
    dense = 4 * attention + 3 * 16384 * 4096 + 3 * shared
    tables = 2 * found.values["V"] * 4096 / 2
    assert found.values["parameters"] == dense / 2 + 3 * router + tables
    items = dict(found.memory.items)
    assert items["compute weights of experts"] == 2 * found.values["expert_parameters"]
    assert items["optimizer moments of experts"] == 8 * found.values["expert_parameters"] / 2


def sharded(layers: str, *, overlaps: tuple[Overlap, ...] = OVERLAPS, gradient_bytes: int = 4) -> Detail:
    """Experts of 512 columns on 16 ranks, EP 4 and EGTP 2, with micro-batches of four."""
    workload = Workload(global_batch=64, sequence_length=2048, overlaps=overlaps)
    framework = find_framework("megatron-core").with_step(gathers_experts=True, shard_gradient_bytes=gradient_bytes)
    job = Job(model_of(layers, width=512), load_machine("gb200-nvl72").document, workload, framework)
    return price(job, Layout(Grid(data=16, expert=4, expert_z=2, order=MEGATRON), 4, "none", 0))


@pytest.mark.parametrize("gradient_bytes", [2, 4])
def test_a_rank_gathers_the_experts_that_egtp_shards(gradient_bytes: int) -> None:
    """Guards two gathers in BF16 and a reduce-scatter of each block's experts in each micro-batch, what EDP still
    reduces, and what a rank holds: half of everything at rest, and buffers for two blocks."""
    found = sharded("dense moe*3", gradient_bytes=gradient_bytes)
    block = (8 // 4) * 3 * 512 * 4096
    assert found.values["expert_parameters"] == 3 * block / 2
    terms = {(one.op, one.phase): one for one in found.terms if one.axis == "expert_z"}
    assert {key: (one.bytes, one.count) for key, one in terms.items()} == {
        ("all_gather", "forward"): (2 * block, 3),
        ("all_gather", "backward"): (2 * block, 3),
        ("reduce_scatter", "backward"): (gradient_bytes * block, 3),
    }
    assert {one.bytes for one in found.terms if one.axis == "expert_data"} == {4 * block / 2, 2 * block / 2}
    items = {name: size / block for name, size in found.memory.items if name.endswith("of experts")}
    assert items == {
        "compute weights of experts": 2 * 3 / 2,
        "gradients of experts": 4 * 3 / 2,
        "master weights of experts": 4 * 3 / 2 / 2,
        "optimizer moments of experts": 8 * 3 / 2 / 2,
        "gathered weights of experts": 2 * 2,
        "unreduced weight gradients of experts": 2 * gradient_bytes,
    }


@pytest.mark.parametrize("overlaps", [OVERLAPS, ()])
def test_experts_are_gathered_a_block_ahead(overlaps: tuple[Overlap, ...]) -> None:
    """Guards what is exposed: the first gather of each pass, which nothing runs ahead of; all of them without overlap
    (NVIDIA/Megatron-LM@d98e8a64, docs/api-guide/core/generalized_tensor_parallel.md, section 3.4)."""
    for one in sharded("moe*4", overlaps=overlaps).terms:
        if one.axis == "expert_z":
            share = 1.0 if not overlaps else {"all_gather": 1 / 4, "reduce_scatter": 0.0}[one.op]
            assert one.exposed_s == pytest.approx(share * one.seconds), one.op


def test_weak_scaling_with_egtp_is_the_published() -> None:
    """Guards GTP 64, EP 64 and EGTP 2 of a hybrid in MXFP8 on racks of 72, from 128 to 3,072 GPUs: at least 93% of the
    smaller run, as published of one of 280B (the same guide, section 1.7), with less memory; EGTP alone of what shards
    weights leaves the rack, and moves 1 + 1/32 bytes a weight twice and 2 once."""
    model, machine = load_model("nemotron-3-super-120b-a12b").document, load_machine("gb200-nvl72").document
    framework = find_framework("megatron-core").with_step(
        **{"gathers_experts": True, "primary_weights": True, "gradient_bytes": 2, "shard_gradient_bytes": 2}
    )
    runs = []
    for data in (2, 48):
        workload = Workload(global_batch=64 * data, sequence_length=4096, precision="mxfp8")
        grid = Grid(z=64, data=data, expert=64, expert_z=2, order=MEGATRON)
        runs.append(price(Job(model, machine, workload, framework), Layout(grid, 1, "none", 0)))
    assert 0.93 < runs[0].iteration_s / runs[1].iteration_s < 1.0
    assert runs[1].memory_bytes < runs[0].memory_bytes
    block = (512 // 64) * next(one.each for one in counted(model) if one.routed)
    sent = {(one.op, one.phase): one.bytes / block for one in runs[1].terms if one.axis == "expert_z"}
    assert sent == {("all_gather", one): 1 + 1 / 32 for one in ("forward", "backward")} | {
        ("reduce_scatter", "backward"): 2.0
    }
    tiers = machine.placing(64 * 48).tiers
    shapes = {axes: runs[1].grid.group_shape(axes, framework.step.folding) for axes in ("z", "expert", "expert_z")}
    crossed = {axes: tiers[route(shape, tiers, 64 * 48).outermost].name for axes, shape in shapes.items()}
    assert crossed == {"z": "nvlink", "expert": "nvlink", "expert_z": "network"}


@pytest.mark.parametrize(("expert", "tensor"), [(1, 1), (4, 1), (8, 1), (2, 2)])
def test_tokens_and_flops_do_not_depend_on_the_grid_of_experts(expert: int, tensor: int) -> None:
    """Guards rows of grouped GEMMs: balanced, each rank computes as much, in as many groups as it has experts."""
    found = priced(
        "megatron-core", Grid(x=2, data=4, expert=expert, expert_tensor=tensor, order=MEGATRON), layers="moe*4"
    )
    products = [step for step in found.program.blocks[0].forward.operations if isinstance(step, MatMul)]
    experts = {step.layer: step for step in products if step.layer in ("moe.fc1", "moe.fc2")}
    assert float(experts["moe.fc1"].groups.evaluate(found.values)) == 8 / expert
    flops = sum(float(step.flops.evaluate(found.values)) for step in experts.values())
    assert flops == 2.0 * (2048 / 2) * 2 * 3 * 2048 * 4096


def test_a_load_balancing_loss_counts_tokens_over_all_ranks() -> None:
    """Guards an all-reduce of one number an expert, layer and micro-batch; the layer hides most."""
    steps = dict[tuple[bool, bool], Detail]()
    for balanced, overlapped in itertools.product((False, True), repeat=2):
        overlaps = OVERLAPS if overlapped else ()
        workload = Workload(global_batch=64, sequence_length=2048, overlaps=overlaps)
        framework = find_framework("axonn-tune").with_step(imbalance=1.0, balancing_loss=balanced)
        job = Job(model_of("dense moe*3"), MACHINE, workload, framework)
        steps[balanced, overlapped] = price(job, Layout(Grid(2, 1, 2, 2, expert=4), 1, "none", 0))
    (term,) = (one for one in steps[True, False].terms if one.axis == "zdata")
    assert (term.op, term.phase, term.layer) == ("all_reduce", "forward", "moe.moe.router")
    assert (term.bytes, term.count) == (4 * 8, 3 * 64 / (2 * 2))
    assert len(steps[False, False].terms) == len(steps[True, False].terms) - 1
    longer = [steps[True, one].iteration_s - steps[False, one].iteration_s for one in (False, True)]
    assert longer[0] == pytest.approx(term.seconds)
    assert longer[1] < 0.5 * term.seconds


SAVED = ("saved dispatched tokens", "saved expert up projection", "saved expert activation")
GPT_OSS = load_model("gpt-oss-120b").document
F = H = 2880


def _between_gemms(software: ExpertKernels, dispatcher: str, *, recompute: str = "none", mxfp8: bool = False) -> Detail:
    framework = find_framework("megatron-core").with_step(imbalance=1.0, expert_kernels=software, dispatcher=dispatcher)
    machine, precision = load_machine("gb200-nvl72").document, cast(Precision, "mxfp8" if mxfp8 else "bf16")
    workload = Workload(global_batch=512, sequence_length=4096, precision=precision)
    return price(
        Job(GPT_OSS, machine, workload, framework), Layout(Grid(data=64, expert=8, order=MEGATRON), 1, recompute, 0)
    )


def _kernels(found: Detail, phase: str, *layers: str) -> tuple[float, float]:
    """Bytes of kernels that no software adds a time to, by row and width, and launches, of a block in a phase."""
    block, rows = found.program.blocks[0], 4096 * 4
    steps = [
        step
        for step in (block.forward if phase == "forward" else block.backward).operations
        if isinstance(step, Kernel) and step.phase == phase and step.layer.split(".", 1)[1] in layers and step.bare
    ]
    calls = [float(step.calls.evaluate(found.values)) for step in steps]
    moved = [float(step.size_bytes.evaluate(found.values)) for step in steps]
    return sum(one * each for one, each in zip(calls, moved, strict=True)) / rows / F, sum(calls)


@pytest.mark.parametrize(("dispatcher", "forward", "backward"), [("hybridep", 28.0, 40.0), ("alltoall", 12.0, 16.0)])
def test_what_is_between_the_grouped_gemms(dispatcher: str, forward: float, backward: float) -> None:
    """Guards Megatron-Core's operators of biases and clamps by their bytes a row (core/transformer/moe/experts.py,
    core/fusions/fused_bias_geglu.py): 16F and 20F of clamps at the bandwidth of strided halves, also repeated; FC2's
    bias in a loop over the 16 experts of a rank, with probabilities in FP32 where DeepEP or HybridEP sends them."""
    found = _between_gemms("separate", dispatcher, recompute="moe_act")
    for phase, bias, clamps, each in (("forward", forward, 16.0, 2), ("backward", backward, 20.0, 6)):
        moved, launches = _kernels(found, phase, "moe.fc2")
        assert moved == pytest.approx(bias)
        assert 16 * each < launches <= 16 * each + 2
        assert _kernels(found, phase, "moe.activation")[0] == pytest.approx(clamps / STRIDED)
    assert _kernels(found, "recompute", "moe.activation")[0] == pytest.approx(16.0 / STRIDED)
    assert 0.75 < STRIDED < 0.85
    compiled = _between_gemms("compiled", dispatcher)
    assert not any(
        one.bare for block in compiled.program.blocks for one in block.forward.operations if isinstance(one, Kernel)
    )
    assert compiled.iteration_s < _between_gemms("separate", dispatcher).iteration_s


def test_a_fused_grouped_mlp() -> None:
    """Guards Transformer Engine's fused grouped MLP in MXFP8: two kernels forward and four backward, beside them only
    what quantizes the dispatched rows and the gradient that comes back; in BF16 there is none."""
    fused, apart = (_between_gemms(one, "hybridep", mxfp8=True) for one in ("fused", "compiled"))
    kinds: dict[str, list[list[str]]] = {}
    for name, found in (("fused", fused), ("apart", apart)):
        block = found.program.blocks[0]
        kinds[name] = [
            [
                f"{type(step).__name__} {step.layer.split('.', 1)[1]}"
                for step in section.operations
                if step.layer.split(".", 1)[1] in ("moe.fc1", "moe.activation", "moe.fc2")
                and not (
                    isinstance(step, Kernel) and (step.size_bytes.coefficient == 0.0 or ("A", -1) in step.calls.powers)
                )
            ]
            for section in (block.forward, block.backward)
        ]
    ahead = ["Kernel moe.fc1", "MatMul moe.fc1", "MatMul moe.fc2"]
    back = ["Kernel moe.fc2", *["MatMul moe.fc2"] * 2, *["MatMul moe.fc1"] * 2]
    assert kinds["fused"] == [ahead, back]
    assert [len(one) for one in kinds["apart"]] == [len(ahead) + 2, len(back) + 2]
    assert fused.iteration_s < apart.iteration_s
    assert _between_gemms("fused", "hybridep").iteration_s == _between_gemms("compiled", "hybridep").iteration_s


def test_paged_stash_copies_what_is_saved() -> None:
    """Guards the copies into pages and back: the dispatched tokens, FC1's output and the activation, read and written
    once each way (NVIDIA/Megatron-LM@d98e8a64, docs/user-guide/features/paged_stash.md)."""
    plain = _between_gemms("fused", "hybridep", mxfp8=True)
    stash = plain.job.framework.with_step(paged_stash=True)
    found = price(replace(plain.job, framework=stash), plain.layout)

    def moved(detail: Detail) -> list[float]:
        block = detail.program.blocks[0]
        return [
            sum(
                float((step.size_bytes * step.calls).evaluate(detail.values))
                for step in section.operations
                if isinstance(step, Kernel) and step.layer.endswith("moe.fc2")
            )
            for section in (block.forward, block.backward)
        ]

    saved = sum(size for name, size in plain.memory.items if name in SAVED) / GPT_OSS.layers
    copied = [more - less for more, less in zip(moved(found), moved(plain), strict=True)]
    assert copied == pytest.approx([2.0 * saved] * 2)
    assert found.memory_bytes == plain.memory_bytes


def test_small_reductions_of_a_step() -> None:
    """Guards all-reduces at a step's end: the gradient norm's, tokens and loss of Megatron-Core, two more of Bridge."""
    calls = {}
    for name, grid in (("megatron-core", Grid(data=16)), ("nemo", Grid(data=16)), ("fsdp", Grid(z=16))):
        terms = [one.collective for one in priced(name, grid, layers="dense*2").terms]
        (calls[name],) = [one.calls.coefficient for one in terms if one.layer == "gradient_norm"]
    assert calls == {"megatron-core": 3.0, "nemo": 5.0, "fsdp": 1.0}
