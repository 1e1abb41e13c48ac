"""Memory by kind, against what papers and frameworks document: bytes a parameter, bytes of activations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from axonn_tune.frameworks import find_framework, registry
from axonn_tune.frameworks.description import Framework
from axonn_tune.grid import Grid
from axonn_tune.program.count import parameters
from axonn_tune.program.dimensions import symbol_values
from axonn_tune.program.memory import persistent_items, price_memory, saved_arrays
from axonn_tune.program.operations import PLAIN, Collective, Kernel
from axonn_tune.program.step import StepProgram, build_step
from axonn_tune.specs.catalog import available, load_model
from axonn_tune.specs.workload import Recompute, Workload
from tests.unit.small import small_model

MODEL = small_model(layers=4, hidden=256, heads=8, kv_heads=8, head_dim=32, ffn=1024)
HIDDEN, HEADS, LENGTH, MICRO_BATCH = 256, 8, 128, 2
_UNPADDED = replace(find_framework("megatron-core").step, vocabulary_multiple=1)


def program_of(framework: Framework, recompute: Recompute = "none", *, sharded: bool = False) -> StepProgram:
    """The program of the model above."""
    workload = Workload(global_batch=64, sequence_length=LENGTH, shard_optimizer_over_data=sharded)
    return build_step(MODEL, workload, recompute=recompute, options=framework.step)


def values_of(framework: Framework, **sizes: int) -> dict[str, float]:
    """Symbols of one rank, with nothing kept."""
    grid = Grid(**sizes, order=("x", "y", "context", "z", "data", "pipeline"))
    workload = Workload(global_batch=64, sequence_length=LENGTH)
    values = symbol_values(MODEL, workload, grid, micro_batch=MICRO_BATCH, options=framework.step)
    return values | {"held": values["L"], "kept": 0.0, "unkept": values["L"]}


def per_parameter(framework: Framework, *, sharded: bool = False, **sizes: int) -> dict[str, float]:
    """Bytes of persistent state by kind, over the parameters of one rank without what data splits."""
    values = values_of(framework, **sizes)
    items = persistent_items(program_of(framework, sharded=sharded).given)
    return {name: size.evaluate(values) / values["parameters"] for name, size in items if name != "replicated vectors"}


def test_mixed_precision_adam_of_megatron_takes_18_bytes() -> None:
    """Guards parameters' memory: weights in 16 bits and in FP32, two FP32 moments, FP32 gradients, 18 bytes in all;
    with the distributed optimizer 6 + 12/d (Megatron-Core's distributed optimizer, table of bytes a parameter)."""
    core = find_framework("megatron-core").with_step(distributed_optimizer=False)
    found = per_parameter(core)
    assert found == {"master weights": 4, "optimizer moments": 8, "gradients": 4, "compute weights": 2}
    assert sum(found.values()) == 18
    assert sum(per_parameter(find_framework("megatron-core"), data=4).values()) == 6 + 12 / 4
    assert sum(per_parameter(find_framework("nemo"), data=4).values()) == 4 + 12 / 4, "gradients in BF16"


@pytest.mark.parametrize(
    ("master", "first", "second", "split"),
    [
        (4, 4, 4, 4 + 4 + 4),
        (4, 2, 2, 4 + 2 + 2),
        (4, 1, 1, 4 + 1 + 1),
        (2, 4, 4, 12 - 2),
        (2, 2, 2, 8 - 2),
        (2, 1, 1, 6 - 2),
        (2, 2, 1, 2 + 2 + 1),
    ],
)
def test_types_of_optimizer_states_take_their_bytes(master: int, first: int, second: int, split: int) -> None:
    """Guards a precision-aware optimizer: 12 bytes a parameter, 8 with BF16 moments, 6 with FP8's, all split over data;
    2 fewer with remainders of master weights (NVIDIA/Megatron-LM@d98e8a64, core/optimizer/optimizer_config.py)."""
    types = {"master_bytes": master, "exp_avg_bytes": first, "exp_avg_sq_bytes": second}
    core = find_framework("megatron-core").with_step(**types)
    found = per_parameter(core, data=8)
    assert found["master weights"] + found["optimizer moments"] == split / 8
    assert found["gradients"] + found["compute weights"] == 4 + 2
    values = values_of(core, data=8)
    items = dict(persistent_items(program_of(core).given))
    assert items["replicated vectors"].evaluate(values) == (split + 4) * values["vectors"], "with an FP32 gradient"


@pytest.mark.parametrize(
    ("types", "moved"),
    [
        # An FP32 gradient; master weight and moments read and written; the new BF16 weight.
        ({}, 4 + 2 * 4 + 2 * (4 + 4) + 2),
        # Cast to FP32 before the update.
        ({"gradient_bytes": 2}, 4 + 2 * 4 + 2 * (4 + 4) + 2),
        # The remainder of a master weight read and written, its other half read as the BF16 weight.
        ({"master_bytes": 2}, 4 + 2 * 2 + 2 + 2 * (4 + 4) + 2),
        ({"master_bytes": 2, "exp_avg_bytes": 2, "exp_avg_sq_bytes": 1}, 4 + 2 * 2 + 2 + 2 * (2 + 1) + 2),
        ({"gradient_bytes": 2, "master_bytes": 2, "exp_avg_bytes": 2, "exp_avg_sq_bytes": 2}, 2 + 6 + 2 * (2 + 2) + 2),
    ],
)
def test_the_optimizer_moves_its_states_in_their_types(types: dict[str, int], moved: int) -> None:
    """Guards the optimizer's kernel: bytes a parameter that it reads and writes, of what data leaves a rank."""
    core = find_framework("megatron-core").with_step(**types)
    values = values_of(core, data=4)
    kernels = [
        step for step in program_of(core).end.operations if isinstance(step, Kernel) and step.layer == "optimizer"
    ]
    assert kernels[0].size_bytes.evaluate(values) == moved * values["parameters"] / 4


def test_zero_stages_split_what_their_papers_say() -> None:
    """Guards ZeRO's shares of 16 bytes (2 + 2 + 12, gradients in 16 bits; arXiv 1910.02054, figure 1): stage 1
    4 + 12/d, stage 2 2 + 14/d, stage 3 16/d."""
    deepspeed = find_framework("deepspeed")
    assert sum(per_parameter(deepspeed, data=8).values()) == 4 + 12 / 8
    assert sum(per_parameter(deepspeed.with_step(shard_gradients=True), data=8).values()) == 2 + 14 / 8
    whole, third = (values_of(deepspeed, **sizes)["parameters"] for sizes in ({}, {"z": 8}))
    assert third == whole / 8
    assert sum(per_parameter(deepspeed, z=8).values()) == 16


def test_whole_gradients_are_kept_beside_shards() -> None:
    """Guards FSDP that reduces in the last micro-batch alone: 2 bytes of every weight on each rank, beside 16/z."""
    late = find_framework("fsdp").with_step(whole_gradient_bytes=2)
    assert sum(per_parameter(late, z=8).values()) == 16 + 2 * 8


@pytest.mark.parametrize("name", ["fsdp", "torchtitan", "axonn-tune", "axonn"])
def test_sharded_fp32_weights_are_kept_once(name: str) -> None:
    """Guards frameworks that gather from FP32 shards: 4 of weights, 8 of moments, 4 of gradients, nothing beside;
    over z all of it is split (FSDP2: sharded parameters, gradients and optimizer state)."""
    framework = find_framework(name)
    found = per_parameter(framework, z=4)
    assert found == {"master weights": 4, "optimizer moments": 8, "gradients": 4}
    if not framework.step.replicated_tables:
        assert values_of(framework, z=4)["parameters"] == values_of(framework)["parameters"] / 4


def test_tables_that_z_does_not_split_are_held_whole() -> None:
    """Guards AxoNN's memory: its easy API shards linear layers, so every rank of z has the whole embedding and
    positions; Megatron-AxoNN keeps the LM head whole, too."""
    table, positions, blocks = 512 * HIDDEN, 128 * HIDDEN, 4 * 12 * HIDDEN**2
    easy, megatron = (values_of(find_framework(name), z=4)["parameters"] for name in ("axonn", "megatron-axonn"))
    assert easy == (blocks + table) / 4 + table + positions
    assert megatron == blocks / 4 + 2 * 512 * HIDDEN + positions


def test_every_framework_has_the_same_kinds_of_persistent_state() -> None:
    """Guards names in tables and documents: a framework has some of five kinds, each once."""
    kinds = {"master weights", "optimizer moments", "gradients", "replicated vectors", "compute weights"}
    for framework in registry().values():
        names = [name for name, _ in persistent_items(program_of(framework).given)]
        assert set(names) <= kinds
        assert len(set(names)) == len(names)


OLD, NEW = find_framework("megatron-2021"), find_framework("megatron-2022")


def saved_bytes(framework: Framework, recompute: Recompute = "none", **sizes: int) -> float:
    """Activations of one block and micro-batch, in units of s·b·h, without statistics, which the paper leaves out."""
    values = values_of(framework, **sizes)
    arrays = [one for one in saved_arrays(program_of(framework, recompute).blocks[0]) if "statistics" not in one.kind]
    return sum(one.size_bytes.evaluate(values) for one in arrays) / (LENGTH * MICRO_BATCH * HIDDEN)


SCORES = 5 * HEADS * LENGTH / HIDDEN
"""5·a·s/h, the attention scores of equation 1."""


def test_activations_of_a_gpt_block() -> None:
    """Guards activation memory: s·b·h·(34 + 5·a·s/h) bytes a block without recompute; attention alone recomputed, 34;
    everything, 2 (Korthikanti et al., arXiv 2205.05198, equation 1 and table 2)."""
    assert saved_bytes(OLD) == pytest.approx(34 + SCORES)
    assert saved_bytes(OLD, "selective") == pytest.approx(34)
    assert saved_bytes(OLD, "full") == pytest.approx(2)


@pytest.mark.parametrize(
    ("recompute", "saved"),
    [
        ("core_attn", 34),
        ("layernorm", 30 + SCORES),
        ("mlp_act", 26 + SCORES),
        ("mlp", 18 + SCORES),
        ("layernorm,mlp", 14 + SCORES),
        ("core_attn,layernorm,mlp", 14),
    ],
)
def test_activations_that_modules_leave(recompute: str, saved: float) -> None:
    """Guards recompute sets: of 34 + 5·a·s/h (arXiv 2205.05198, section 4.1) two norms' outputs are 4, fc1's output and
    the activation's 8 each; a repeated MLP saves its input, and its dropout mask, which is outside."""
    assert saved_bytes(OLD, recompute) == pytest.approx(saved)


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_activations_split_over_tensor_ranks(tensor: int) -> None:
    """Guards what tensor parallelism splits: 10 + 24/t + 5·a·s/(h·t) (equation 2), with sequence parallelism all of it
    (equation 4), and with selective recompute 34/t (table 2)."""
    assert saved_bytes(OLD, x=tensor) == pytest.approx(10 + (24 + SCORES) / tensor)
    assert saved_bytes(NEW, x=tensor) == pytest.approx((34 + SCORES) / tensor)
    assert saved_bytes(NEW, "selective", x=tensor) == pytest.approx(34 / tensor)
    assert saved_bytes(NEW, "full", x=tensor) == pytest.approx(2 / tensor)


def test_activations_of_a_gated_delta_net() -> None:
    """Guards what a delta net saves, of Qwen3.5 27B (K 2,048, W 6,144, v 48) 119,264 bytes a token: its input's norm
    2H, projections 2(2K + 2W + 2v), normed queries and keys 4K, expanded ones 512v, values 2W, β and decay 6v, chunks'
    inverses 128v, output 2W, and the gated norm 2W, which recompute drops; TP divides all."""
    model = load_model("qwen3.5-27b").document
    workload, options = Workload(global_batch=8, sequence_length=512), find_framework("megatron-core").step
    names = ("gdn.norm output", "gdn projections", "gated delta nets inputs", "gated delta nets output")
    for recompute, left in (("none", 119_264), ("gdn_norm_out", 119_264 - 2 * 6144), ("full", 0)):
        block = build_step(model, workload, recompute=recompute, options=options).blocks[0]
        for x in (1, 4):
            values = {"b": 1.0, "S": 1.0, "H": 5120.0, "x": float(x), "y": 1.0}
            own = [one for one in saved_arrays(block) if one.name in (*names, "gated delta nets norm")]
            assert sum(one.size_bytes.evaluate(values) for one in own) == pytest.approx(left / x)


def test_held_activations_scale_with_blocks_in_flight() -> None:
    """Guards pipelines: activations of the blocks in flight, whatever number a stage has; the rest is the stage's."""
    program = program_of(OLD)

    def priced(held: float) -> dict[str, float]:
        values = values_of(OLD) | {"held": held}
        found = price_memory(program, values, limit_bytes=1e12, arithmetic=PLAIN, kept_layers=0.0)
        return {name: float(size) for name, size in found.items}

    one, four = priced(1.0), priced(4.0)
    for name, size in one.items():
        assert four[name] == pytest.approx(4 * size if name.startswith("saved") else size)


@pytest.mark.parametrize(("reshard", "room_bytes", "kept"), [("always", 1e12, 0), ("never", 1e5, 4), ("fit", 1e12, 4)])
def test_layers_are_resharded_as_the_framework_says(reshard: str, room_bytes: float, kept: int) -> None:
    """Guards gathered weights: all blocks are resharded after forward, none whatever the memory, or those that must."""
    framework = find_framework("fsdp").with_step(reshard=reshard)
    values, program = values_of(framework, z=4), program_of(framework)
    found = price_memory(program, values, limit_bytes=room_bytes, arithmetic=PLAIN)
    assert found.kept_layers == kept
    names = [name for name, _ in found.items]
    assert ("gathered weights of whole blocks" in names) == bool(kept)


@pytest.mark.parametrize("name", available("model"))
def test_one_rank_holds_the_parameters_of_the_model_to_the_element(name: str) -> None:
    """Guards symbols of one rank: matrices, experts with their biases, norms, biases and sinks of the step's
    dimensions are the model's parameters, and four ranks of experts hold a quarter of them."""
    model = load_model(name).document
    workload = Workload(global_batch=4, sequence_length=128)

    def held(expert: int) -> dict[str, float]:
        grid = Grid(data=expert, expert=expert, order=("x", "y", "context", "z", "data", "pipeline"))
        found = symbol_values(model, workload, grid, micro_batch=1, options=_UNPADDED)
        return {kind: found.get(kind, 0.0) for kind in ("parameters", "expert_parameters", "vectors")}

    alone = held(1)
    assert sum(alone.values()) == parameters(model)
    if model.has_experts:
        assert held(4) == alone | {"expert_parameters": alone["expert_parameters"] / 4}


@pytest.mark.parametrize(
    ("name", "narrow", "wide", "over_x"),
    [
        ("axonn-tune", 2, 0, 0),
        ("torchtitan", 4, 0, 2),
        ("torchtitan-eager", 2, 12, 4),
        ("fsdp", 4, 0, 2),
        ("megatron-core", 2, 4, 0),
        ("nemo", 2, 4, 0),
        ("megatron-2022", 2, 8, 0),
    ],
)
def test_copies_of_the_logits(name: str, narrow: int, wide: int, over_x: int) -> None:
    """Guards bytes of a logit at the peak, in BF16 and in FP32, alone and where x splits the vocabulary, by the code of
    each framework's loss."""
    framework = find_framework(name)
    arrays = {array.name: array for step in program_of(framework).head.operations for array in step.makes}
    for x in (1, 2):
        values = values_of(framework, x=x) | {"C": 1.0}
        logits = MICRO_BATCH * LENGTH * values["V"] / x
        sizes = {kind: one.size_bytes.evaluate(values) / logits for kind, one in arrays.items() if "logits" in kind}
        held = sizes.pop("logits"), sum(sizes.values())
        assert held == (narrow, wide + (over_x if x > 1 else 0))


@pytest.mark.parametrize(
    ("chunks", "split", "held"), [(1, True, 6 / 2), (8, True, 6 / 16), (1, False, 4), (8, False, 0.5)]
)
def test_logits_in_chunks_and_gathered_over_tensor_ranks(chunks: int, split: bool, held: float) -> None:
    """Guards torchtitan's loss: an eighth of the bytes in eight chunks, those of all words without loss_parallel."""
    framework = find_framework("torchtitan").with_step(loss_chunks=chunks, loss_parallel=split)
    operations = program_of(framework).head.operations
    values = values_of(framework, x=2)
    made = [one for step in operations for one in step.makes if "logits" in one.name]
    size = sum(one.size_bytes.evaluate(values) for one in made) / (MICRO_BATCH * LENGTH * values["V"])
    gathered = [
        one for one in operations if isinstance(one, Collective) and one.kind == "all_gather" and one.axis == "x"
    ]
    assert size == held
    assert any(one.layer == "loss" for one in gathered) != split


def test_selective_recompute_of_torchtitan_repeats_half_of_a_gated_mlp() -> None:
    """Guards what it saves of every second GEMM: the gate's output, not that of the other half."""
    workload = Workload(global_batch=4, sequence_length=128)
    step, model = find_framework("torchtitan").step, load_model("nano-llama").document
    saved = {
        recompute: [
            one.name for one in saved_arrays(build_step(model, workload, recompute=recompute, options=step).blocks[0])
        ]
        for recompute in ("none", "selective")
    }
    assert {"up projection", "gate projection"} <= {*saved["none"]}
    assert "gate projection" in saved["selective"]
    assert "up projection" not in saved["selective"]
