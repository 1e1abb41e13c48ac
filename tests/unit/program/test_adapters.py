"""Adapters: their parameters as published, and what of a step trains, by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from axonn_tune.cost.pricer import _SYMBOLIC_MODEL
from axonn_tune.frameworks import find_framework
from axonn_tune.grid import Grid
from axonn_tune.program.count import adapter_parameters
from axonn_tune.program.dimensions import model_flops, symbol_values
from axonn_tune.program.memory import memory_plan, saved_arrays
from axonn_tune.program.operations import PLAIN, Collective, MatMul
from axonn_tune.program.step import FIRST, ONLY, as_runs, blocks_by_type, build_step, contents_of, counted_blocks
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.tuning import tools, tuning
from axonn_tune.specs.workload import Recompute, Workload


def _adapters(model: Any, mode: Any, tool: str, rank: int, *targets: str) -> int:
    return adapter_parameters(model.tuned(tuning(mode, tool, rank=rank, targets=targets or None, dtype=None)))


LLAMA_3B = {"layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 8, "head_dim": 128, "ffn": 8192, "vocab": 128256}
QWEN_3B = {"layers": 36, "hidden": 2048, "heads": 16, "kv_heads": 2, "head_dim": 128, "ffn": 11008, "vocab": 151936}
"""Llama 3.2 3B and Qwen2.5-3B."""


@pytest.mark.parametrize(
    ("sizes", "rank", "targets", "mode", "published"),
    [
        (LLAMA_3B, 32, ("q_proj", "v_proj"), "lora", 9_175_040),
        (LLAMA_3B, 64, ("q_proj", "v_proj"), "lora", 18_350_080),
        (LLAMA_3B, 10, ("gate_proj", "up_proj", "down_proj"), "lora", 9_461_760),
        (LLAMA_3B, 32, ("q_proj", "v_proj"), "dora", 9_289_728),
        (QWEN_3B, 16, (), "lora", 3_686_400),
    ],
)
def test_parameters_are_those_published(
    sizes: dict[str, int], rank: int, targets: tuple[str, ...], mode: str, published: int
) -> None:
    """Guards parts of fused layers, and what PEFT adapts unasked: counts of huggingface/peft@5d602fdb,
    method_comparison/MetaMathQA/results and README.md."""
    model = load_model("llama3-8b").document.model_copy(update=sizes)
    assert _adapters(model, mode, "peft", rank, *targets) == published


@pytest.mark.parametrize(
    ("targets", "each"),
    [
        (("linear_qkv",), 8192 + 10240),
        (("linear_qkv", "linear_proj"), 8192 + 10240 + 2 * 8192),
        (("linear_q", "linear_k", "linear_v"), 3 * 8192 + 10240),
        ((), 8192 + 10240 + 2 * 8192 + 8192 + 2 * 28672 + 28672 + 8192),
    ],
)
def test_fused_projections_have_one_adapter(targets: tuple[str, ...], each: int) -> None:
    """Guards Megatron-Bridge's names: r(H + Q + 2kv) of the fused layer, 3rH + r(Q + 2kv) of its parts apart."""
    model = load_model("llama3-70b").document
    assert _adapters(model, "lora", "megatron-bridge", 16, *targets) == 16 * 80 * each


def test_every_name_adapts_a_layer() -> None:
    """Guards the table of names: each has layers, and defaults are names."""
    for tool in tools().values():
        assert all(tool.names.values())
        assert {*tool.targets} <= {*tool.names}


class Priced:
    """Terms and bytes of one rank's step of a model with one layer type, in numbers."""

    def __init__(self, framework: str, grid: Grid, mode: Any = "lora", **asked: Any) -> None:
        own, stages = find_framework(framework), grid.pipeline
        options = {"rank": 16, "targets": None, "dtype": None} | asked
        self.model = load_model("llama3-8b").document.tuned(tuning(mode, own.tuner, **options))
        workload = Workload(global_batch=8 * grid.batch_shares, sequence_length=4096)
        program = build_step(self.model, workload, recompute="none", options=own.step)
        stage = FIRST if stages > 1 else ONLY
        first = contents_of(self.model, (32 // stages,) * stages)[:1]
        layers = blocks_by_type(self.model, first)
        values = symbol_values(self.model, workload, grid, micro_batch=1, options=own.step, stage=stage, layers=layers)
        values = counted_blocks(
            program, values, [(as_runs(one), stages) for one in first], repeated=0.0, kept=0.0, arithmetic=PLAIN
        )
        self.sent, self.gemms = Counter[tuple[str, str, str, str]](), Counter[tuple[str, str]]()
        for one, calls in program.calls(stage):
            times = calls.evaluate(values)
            if isinstance(one, Collective):
                layer = one.layer.removeprefix("first.")
                self.sent[one.kind, one.axis, one.phase, layer] += int(one.size_bytes.evaluate(values) * times)
            elif isinstance(one, MatMul):
                self.gemms[one.layout, one.layer.removeprefix("first.")] += int(one.flops.evaluate(values) * times)
        self.held = Counter[str]()
        plan = memory_plan(program, stage)
        for name, size in (*plan.persistent, *plan.saved):
            self.held[name] += int(size.evaluate(values))
        self.flops = model_flops(self.model, workload)


H, N, F, TOKENS, LAYERS, TABLE = 4096, 6144, 14336, 4096, 32, 128256 * 4096
"""Of Llama 3 8B: hidden, fused qkv and MLP width; tokens of a micro-batch, layers, and elements of a table."""
BASE = LAYERS * (H * N + H * H + 3 * H * F)
EACH = {"qkv": (H, N), "output": (H, H), "fc1": (H, 2 * F), "fc2": (F, H)}
ADAPTERS = LAYERS * 16 * sum(map(sum, EACH.values()))
MICRO = 8 * LAYERS
"""Micro-batches times layers."""


def test_tensor_parallel_adapters_with_sequence_parallelism() -> None:
    """Guards TP 4 of Megatron-Core: collectives of adapters by bytes, and what is frozen is there once on each rank."""
    found = Priced("megatron-core", Grid(x=4, data=2))
    rows = TOKENS * 2 * MICRO
    lora = {key: size for key, size in found.sent.items() if key[1] == "x" and key[3].endswith("lora")}
    middle = 16 * rows
    assert lora == {
        **{("all_gather", "x", "forward", f"{name}.lora"): middle for name in ("attention.qkv", "mlp.fc1")},
        **{("all_reduce", "x", "backward", f"{name}.lora"): middle for name in ("attention.qkv", "mlp.fc1")},
        **{("all_reduce", "x", phase, f"{name}.lora"): middle for name in _ROWS for phase in ("forward", "backward")},
        **{("all_gather", "x", phase, f"{name}.lora"): H * rows for name in _ROWS for phase in ("forward", "backward")},
    }
    assert found.held["frozen weights"] == 2 * (BASE // 4 + 2 * 128512 * H // 4 + H)  # rows padded to 128 a rank
    assert found.held["compute weights"] == 2 * ADAPTERS // 4
    assert found.held["gradients"] == 4 * ADAPTERS // 4
    assert found.held["master weights"] == 4 * ADAPTERS // 4 // 2
    assert found.held["optimizer moments"] == 8 * ADAPTERS // 4 // 2
    # The input of qkv and fc1 as it was gathered, and r numbers a token of each adapter.
    assert found.held["saved adapter inputs"] == LAYERS * TOKENS * 2 * (2 * H + 4 * 16)
    assert found.held["saved norm outputs"] == 0
    assert not [name for layout, name in found.gemms if layout == "TN" and not name.endswith("lora")]
    reduced = sum(size for (kind, axis, _, layer), size in found.sent.items() if axis == "data" and layer == "block")
    assert reduced == (4 + 2) * ADAPTERS // 4


_ROWS = "attention.output", "mlp.fc2"


def test_sharded_adapters() -> None:
    """Guards FSDP over 8 ranks: the base is gathered in both passes and has no gradient, adapters are reduced."""
    found = Priced("fsdp", Grid(z=8), targets=("all-linear",))
    each = LAYERS * 16 * (3 * H + N + 2 * H + 2 * H + 2 * F + F + H)
    gathered = 2 * (BASE + each) * 8
    assert found.sent["all_gather", "z", "forward", "block"] == gathered
    assert found.sent["all_gather", "z", "backward", "block"] == gathered
    assert found.sent["reduce_scatter", "z", "backward", "block"] == 2 * each * 8
    assert not [key for key in found.sent if key[3] in ("head", "embedding") and key[2] == "backward" and key[1] == "z"]
    assert found.held["frozen weights"] == 2 * (BASE + 2 * TABLE) // 8 + 2 * H
    assert found.held["master weights"] == 4 * each // 8
    assert found.held["optimizer moments"] == 8 * each // 8
    assert not [key for key in found.sent if key[3].endswith("lora")]
    quantized = Priced("fsdp", Grid(z=8), mode="qlora", targets=("all-linear",))
    assert quantized.held["frozen weights"] == int(BASE * (0.5 + 1 / 64 + 4 / 16384) / 8) + 4 * TABLE // 8 + 2 * H


def test_adapters_of_a_block_are_gathered_at_once() -> None:
    """Guards ZeRO-3: a block's adapters, far below its buckets, are one gather in each pass and one reduction."""
    found = Priced("deepspeed", Grid(z=8), targets=("all-linear",))
    each = LAYERS * 16 * (3 * H + N + 2 * H + 2 * H + 2 * F + F + H)
    sent = {key[:1] + key[2:]: size for key, size in found.sent.items() if key[3].endswith("lora")}
    assert sent == {
        ("all_gather", "forward", "lora"): 2 * each * 8,
        ("all_gather", "backward", "lora"): 2 * each * 8,
        ("reduce_scatter", "backward", "lora"): 2 * each * 8,
    }


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("all-linear",)])
def test_programs_hold_for_models_of_other_sizes(targets: tuple[str, ...]) -> None:
    """Guards widths of adapters as symbols: a program without a model's sizes has the same GEMMs."""
    found, model = Counter[tuple[str, float]](), load_model("llama3-8b").document
    tuned = model.tuned(tuning("lora", "peft", rank=8, targets=targets, dtype=None))
    workload, own = Workload(global_batch=8, sequence_length=4096), find_framework("fsdp")
    values = symbol_values(tuned, workload, Grid(z=8), micro_batch=1, options=own.step)
    for sign, one in ((1, tuned), (-1, tuned.model_copy(update=_SYMBOLIC_MODEL | {"layers": 2}))):
        program = build_step(one, workload, recompute="full", options=own.step)
        for step in (step for part in program.sections() for step in part.operations if isinstance(step, MatMul)):
            found[step.layer, float(step.flops.evaluate(values | {"kept": 0.0}))] += sign
    assert not any(found.values())


def test_stages_of_adapters() -> None:
    """Guards PP 4 with TP 2: each stage has its share of the base, the first the embedding, and no gradient of it."""
    found = Priced("megatron-core", Grid(x=2, pipeline=4, order=("x", "y", "z", "data", "pipeline")))
    assert found.held["frozen weights"] == 2 * (BASE // 8 + TABLE // 2)
    assert found.held["compute weights"] == 2 * ADAPTERS // 8
    assert not [key for key in found.sent if key[3] == "embedding" and key[2] == "backward"]
    assert found.gemms["TN", "attention.qkv.lora"] == 2 * 8 * TOKENS * 8 * 16 * (H + N) // 2


def test_flops_are_four_a_frozen_weight() -> None:
    """Guards MFU: frozen weights count four FLOPs a token, adapters six, and attention as ever; the first projection
    has no gradient of its input, nor has its adapter."""
    whole, found = (Priced("megatron-core", Grid(), mode) for mode in ("full", "lora"))
    tokens = 8 * 4096
    assert whole.flops - found.flops == tokens * (2 * (BASE + TABLE) - 6 * ADAPTERS + 2 * H * (N + 16))
    assert found.flops - Priced("megatron-core", Grid(), "lora", targets=("linear_fc2",)).flops == tokens * (
        6 * (ADAPTERS - LAYERS * 16 * (F + H)) - 2 * H * (N + 16) + 2 * (H * (N + H + 3 * F) + F * 16) + 8 * 4096 * H
    )
    head = Priced("megatron-core", Grid(), "head")
    assert head.gemms["TN", "head"] == 2 * TABLE * tokens
    assert [name for layout, name in head.gemms if layout != "NN"] == ["head", "head"]
    assert head.held["saved up projection"] == 0


def _last_gradients(framework: str, model: str, recompute: Recompute, *targets: str) -> list[tuple[str, str]]:
    """GEMMs of the backward pass of the first block, without those that are repeated."""
    own = find_framework(framework)
    tuned = load_model(model).document.tuned(tuning("lora", own.tuner, rank=8, targets=targets or None, dtype=None))
    program = build_step(tuned, Workload(global_batch=8, sequence_length=4096), recompute=recompute, options=own.step)
    steps = (step for step in program.blocks[0].backward.operations if step.phase == "backward")
    return [(step.layer.removeprefix("first."), step.layout) for step in steps if isinstance(step, MatMul)]


_ADAPTER = ("NT", "TN", "TN")
"""Gradients of an adapter: of B's input, of B, of A."""


@pytest.mark.parametrize(
    ("framework", "targets", "layers"),
    [
        ("fsdp", ("down_proj",), ["mlp.fc2.lora"]),
        ("fsdp", ("o_proj",), ["mlp.fc2", "mlp.fc1", "attention.output.lora"]),
        ("megatron-core", ("linear_qkv",), ["mlp.fc2", "mlp.fc1", "attention.output", "attention.qkv.lora"]),
    ],
)
def test_backward_ends_at_the_first_adapter(framework: str, targets: tuple[str, ...], layers: list[str]) -> None:
    """Guards what comes before all that trains: no gradient of it, nor of the first adapter's input."""
    frozen = [(layer, "NT") for layer in layers[:-1]]
    assert _last_gradients(framework, "llama3-8b", "none", *targets) == [
        *frozen,
        *((layers[-1], layout) for layout in _ADAPTER),
    ]


def test_backward_goes_down_where_checkpoints_are_reentrant() -> None:
    """Guards full recompute: transformers and Megatron-Bridge give its input a gradient, torchtitan does not."""
    *_, last = _last_gradients("fsdp", "llama3-8b", "full", "down_proj")
    assert last == ("attention.qkv", "NT")
    *_, last = _last_gradients("megatron-core", "llama3-8b", "full", "linear_qkv")
    assert last == ("attention.qkv", "NT")
    *_, last = _last_gradients("torchtitan", "llama3-8b", "full", "w2")
    assert last == ("mlp.fc2.lora", "TN")


def test_nothing_is_saved_before_the_first_adapter() -> None:
    """Guards memory: the first block saves its adapter's input and middle alone, layers below it nothing."""
    found = Priced("fsdp", Grid(z=8), targets=("down_proj",))
    element = 2 * TOKENS
    assert found.held["saved activation"] == element * LAYERS * F
    assert found.held["saved adapter inputs"] == element * LAYERS * 16
    above = {"qkv": N, "attention output": H, "residual stream": 2 * H, "up projection": 2 * F}
    assert {name: found.held[f"saved {name}"] for name in above} == {
        name: element * (LAYERS - 1) * width for name, width in above.items()
    }
    # Of DeepSeek-V2-Lite the first layer has no experts, so no adapter of them, and the second ends the pass.
    own, model = find_framework("megatron-core"), load_model("deepseek-v2-lite").document
    experts = tuning("lora", own.tuner, rank=8, targets=("linear_fc1",), dtype=None)
    assert experts is not None
    alone = experts.model_copy(update={"targets": ("moe.fc1",)})
    program = build_step(
        model.tuned(alone), Workload(global_batch=8, sequence_length=4096), recompute="none", options=own.step
    )
    kinds = {block.given.own.name: block for block in program.blocks}
    assert [name for name, block in kinds.items() if block.given.own.opens] == ["dense-first", "moe-first"]
    assert not kinds["dense-first"].backward.operations
    assert not saved_arrays(kinds["dense-first"])
    ended = [step for step in kinds["moe-first"].backward.operations if isinstance(step, MatMul)]
    assert [step.layer for step in ended][-3:] == ["moe-first.moe.fc1.lora"] * 3
    assert not [step for step in kinds["moe-first"].backward.operations if "attention" in step.layer]


def test_exchanged_outputs_and_dropout() -> None:
    """Guards Megatron-Bridge's all-to-alls in place of gathers of whole outputs, and what dropout keeps."""
    own = find_framework("megatron-core")
    one = tuning("lora", own.tuner, rank=16, targets=None, dtype=None)
    assert one is not None
    changed = one.model_copy(update={"collectives": "exchanged", "dropout": 0.1})
    model = load_model("llama3-8b").document.tuned(changed)
    program = build_step(model, Workload(global_batch=8, sequence_length=4096), recompute="none", options=own.step)
    sizes = {
        "x": 4.0,
        "y": 1.0,
        "H": 4096.0,
        "S": 4096.0,
        "b": 1.0,
        "context": 1.0,
        "parts": 1.0,
        "F": float(F),
        "Q": 4096.0,
    }
    block = program.blocks[-1]
    exchanged = [one for one in block.backward.operations if getattr(one, "kind", "") == "all_to_all"]
    assert [one.layer for one in exchanged] == ["mlp.fc2.lora", "attention.output.lora"]
    assert {one.size_bytes.evaluate(sizes) for one in exchanged if isinstance(one, Collective)} == {
        2.0 * TOKENS * H / 4
    }
    made = (one for step in block.forward.operations for one in step.makes if one.kind == "adapter inputs")
    kept = {one.name: one.size_bytes.evaluate(sizes) for one in made}
    assert kept["mlp.fc1.lora input"] == 3.0 * TOKENS * H
    assert kept["mlp.fc2.lora input"] == 3.0 * TOKENS * F / 4


def test_magnitudes_need_the_norm_of_the_sum() -> None:
    """Guards DoRA: B·A for its norm, what layer and adapter made kept, and states of its magnitudes."""
    plain, found = (Priced("fsdp", Grid(z=8), mode, targets=("o_proj",)) for mode in ("lora", "dora"))
    assert found.gemms["NN", "attention.output.lora"] - plain.gemms["NN", "attention.output.lora"] == (
        2 * H * H * 16 * MICRO
    )
    assert found.held["saved adapter inputs"] - plain.held["saved adapter inputs"] == 2 * LAYERS * TOKENS * 2 * H
    assert found.held["replicated vectors"] - plain.held["replicated vectors"] == (4 + 8 + 4) * LAYERS * H


def test_experts_of_a_rank_share_an_adapter() -> None:
    """Guards mixtures: one adapter for each of both GEMMs of a rank's experts, which sees all their rows."""
    own = find_framework("megatron-core")
    model = load_model("qwen3-30b-a3b").document
    tuned = model.tuned(tuning("lora", own.tuner, rank=8, targets=("linear_fc1", "linear_fc2"), dtype=None))
    assert adapter_parameters(tuned) == 8 * 48 * (2048 + 2 * 768 + 768 + 2048)
    program = build_step(tuned, Workload(global_batch=8, sequence_length=4096), recompute="none", options=own.step)
    values = symbol_values(tuned, Workload(global_batch=8, sequence_length=4096), Grid(data=8), micro_batch=1)
    steps = program.blocks[-1].forward.operations
    down = next(step for step in steps if isinstance(step, MatMul) and step.layer == "moe.fc1.lora")
    assert down.flops.evaluate(values) == pytest.approx(2 * 4096 * 8 * 2048 * 8 * values["imbalance"])
    assert not [step for step in program.blocks[0].bucket.operations if step.layer == "experts"]
    sent = [
        one for one in program.blocks[-1].backward.operations if isinstance(one, Collective) and one.axis == "expert"
    ]
    shared = [one for one in sent if one.layer.endswith("lora")]
    assert [one.size_bytes.evaluate(values) for one in shared] == [2 * 8 * n for n in (768, 2048, 2048, 1536)]
    named = tuned.tuned(tuning("lora", "torchtitan", rank=8, targets=None, dtype=None))
    assert adapter_parameters(named) == 8 * 48 * (2048 + 32 * 128 + 2 * 4 * 128 + 32 * 128 + 2048)


def test_experts_with_an_adapter_each() -> None:
    """Guards ms-swift's Megatron, and Megatron-Bridge without share_expert_adapters: grouped GEMMs of one adapter an
    expert, whose states and gradients go with those of experts."""
    own, workload = find_framework("megatron-core"), Workload(global_batch=8, sequence_length=4096)
    asked = tuning("lora", own.tuner, rank=8, targets=("linear_fc1", "linear_fc2"), dtype=None)
    assert asked is not None
    tuned = load_model("qwen3-30b-a3b").document.tuned(asked.model_copy(update={"experts": "each"}))
    each = 8 * (2048 + 2 * 768 + 768 + 2048)
    assert adapter_parameters(tuned) == 48 * 128 * each
    grid = Grid(data=8, expert=4, expert_tensor=1)
    program = build_step(tuned, workload, recompute="none", options=own.step)
    values = symbol_values(tuned, workload, grid, micro_batch=1, options=own.step) | {"kept": 0.0, "held": 48.0}
    assert values["expert_parameters"] == 48 * 32 * each
    gemms = [one for one in program.blocks[-1].forward.operations if isinstance(one, MatMul)]
    down = next(one for one in gemms if one.layer == "moe.fc1.lora")
    assert down.groups.evaluate(values) == 32
    assert down.flops.evaluate(values) == pytest.approx(2 * 4096 * 8 * 2048 * 8 * values["imbalance"])
    assert [step.layer for step in program.blocks[-1].bucket.operations] == ["experts"]
    held = Counter[str]()
    for name, size in memory_plan(program).persistent:
        held[name] += int(size.evaluate(values))
    assert held["gradients of experts"] == 4 * 48 * 32 * each
    assert held["optimizer moments of experts"] == 8 * 48 * 32 * each // 2
    assert held["frozen weights of experts"] == 2 * 48 * 32 * 3 * 2048 * 768
    sent = (one for one in program.blocks[-1].backward.operations if isinstance(one, Collective))
    assert not [one for one in sent if one.layer.endswith("lora") and one.axis == "expert"]


@pytest.mark.parametrize(
    ("targets", "layer", "bytes_each"), [(("linear_qkv",), "mlp.fc1", 1), (("linear_fc1",), "mlp.fc1", 2)]
)
def test_inputs_of_adapters_are_gathered_in_bf16(targets: tuple[str, ...], layer: str, bytes_each: int) -> None:
    """Guards FP8 with sequence parallelism: an adapter reads the input as Transformer Engine gathered it, in BF16."""
    own, workload = find_framework("nemo"), Workload(global_batch=8, sequence_length=4096, precision="fp8-current")
    model = load_model("llama3-8b").document.tuned(tuning("lora", own.tuner, rank=8, targets=targets, dtype=None))
    block = build_step(model, workload, recompute="none", options=own.step).blocks[-1]
    sizes = {"x": 4.0, "y": 1.0, "H": float(H), "S": 4096.0, "b": 1.0, "context": 1.0, "parts": 1.0}
    sent = [one for one in block.forward.operations if isinstance(one, Collective) and one.layer == layer]
    gathered = next(one for one in sent if (one.kind, one.axis) == ("all_gather", "x"))
    assert gathered.size_bytes.evaluate(sizes) == bytes_each * TOKENS * H
