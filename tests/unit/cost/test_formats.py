"""Number formats below 16 bits: bytes by hand, GEMM rates and steps relative to BF16 as published, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import axonn_tune
from axonn_tune.cost.compute import ComputeClock, compute_rates
from axonn_tune.cost.price import Detail, price
from axonn_tune.errors import UsageError
from axonn_tune.frameworks import find_framework, step_on
from axonn_tune.frameworks.step import StepOptions
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.program import block
from axonn_tune.program.count import counted, parameters
from axonn_tune.program.inputs import LayerInputs
from axonn_tune.program.layers import linear_backward, linear_forward
from axonn_tune.program.operations import PLAIN, Array, Collective, Kernel, MatMul, Size, as_size
from axonn_tune.program.step import build_step
from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.compare import compare
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.request import Request
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.formats import FORMATS, nearest_format
from axonn_tune.specs.machine import MatmulLayout
from axonn_tune.specs.workload import Workload
from axonn_tune.vocabulary import Precision
from tests.unit.small import linear_of, small_model, small_problem


@pytest.mark.parametrize(
    ("name", "one_layout", "moved", "kept"),
    [
        ("fp8-delayed", False, 4.0, 2.0),
        ("fp8-delayed", True, 3.0, 1.0),
        ("fp8-current", False, 6.0, 2.0),
        ("fp8-blockwise", False, 2 + 1 + 1 + 2 * 4 / 128, 2 + 2 * 4 / 128),
        ("mxfp8", True, 2 + 1 + 1 + 2 / 32, 2 + 2 / 32),
        ("nvfp4", True, 2 + 2 + 0.5 + 0.5 + 2 / 16, 1 + 2 / 16),
        ("mxfp4", True, 2 + 0.5 + 0.5 + 2 / 32, 1 + 2 / 32),
    ],
)
def test_bytes_of_an_operand(name: str, one_layout: bool, moved: float, kept: float) -> None:
    """Guards what quantization moves and what its copies take: Transformer Engine's guide, arXiv 2603.07685, 5.3."""
    one = FORMATS[name]
    copies = one.copies(one_layout=one_layout)
    assert one.quantization_bytes(copies) == moved
    assert copies * one.operand_bytes == kept


@pytest.mark.parametrize(
    ("machine", "precision", "primary", "held", "gathered"),
    [
        ("dgx-b200", "bf16", False, 2.0, 2.0),
        ("dgx-h100", "fp8-current", False, 2 + 2.0, 2.0),
        ("dgx-b200", "fp8-current", False, 2 + 1.0, 2.0),
        ("dgx-b200", "mxfp8", False, 2 + 2 + 2 / 32, 2.0),
        ("dgx-h100", "fp8-delayed", True, 1 + 1.0, 1.0),
        ("dgx-b200", "fp8-current", True, 1.0, 1.0),
        ("dgx-h100", "fp8-blockwise", True, 2 + 2 * 4 / 128, 1.0),
        ("dgx-b200", "mxfp8", True, 2 + 2 / 32, 2.0),
        ("dgx-b200", "nvfp4", True, 0.5 + 0.5 + 2 / 16, 1.0),
    ],
)
def test_bytes_of_a_parameter(machine: str, precision: Precision, primary: bool, held: float, gathered: float) -> None:
    """Guards what a rank keeps and gathers of a weight of a linear layer: arXiv 2603.07685, 5.2.2 and 5.3.5."""
    model, changes = load_model("llama3-8b").document, ["step.primary_weights=true"] if primary else []
    asked = Request(model, 8, machine=machine, framework="megatron-core", precision=precision, set=changes)
    job = load_inputs(asked).problem
    found = price(job, Layout(Grid(1, 1, 1, 8, order=("x", "context", "z", "data", "pipeline", "y")), 1, "none"))
    items = dict(found.memory.items)
    tables = 2.0 * 2 * model.vocab * model.hidden
    linear = items["compute weights"] + items.get("quantized weights", 0.0) - tables
    assert linear == pytest.approx(held * counted(model)[0].weights * model.layers, rel=1e-12)
    program = build_step(model, job.workload, recompute="none", options=step_on(job.framework, job.machine, "bf16"))
    (sent,) = (step for step in program.blocks[0].parameters.operations if isinstance(step, Collective))
    assert sent.size_bytes.coefficient == gathered


@pytest.mark.parametrize(
    ("precision", "one_layout", "forward", "backward", "moved", "reduced"),
    [
        ("fp8-current", False, 1.0, 1.0, [5.0, 2.0], 1),
        ("fp8-delayed", True, 1.0, 1.0, [3.0], 0),
        ("mxfp8", True, 33 / 32, 2 * 33 / 32, [2 + 2 * 33 / 32], 0),
        ("nvfp4", True, 9 / 16, 2 * 9 / 16, [4 + 2 * 9 / 16], 1),
    ],
)
def test_sequence_parallel_gathers_move_the_format(
    precision: Precision, one_layout: bool, forward: float, backward: float, moved: list[float], reduced: int
) -> None:
    """Guards gathers over x: shards are quantized first, after their maximum; output gradients go in both copies."""
    workload = Workload(global_batch=1, sequence_length=2048, precision=precision)
    options = StepOptions(sequence_parallel=True, narrow_gathers=True, one_layout=one_layout)
    given = LayerInputs(small_model(family="llama"), workload.element_sizes, options, format=workload.format)
    there = linear_forward(linear_of(given, "attention.qkv"), given, phase="forward")
    back = linear_backward(
        linear_of(given, "attention.output"), given, makes=Array("made", "made", Size(1.0)), frees=()
    )
    for steps, width in ((there, forward), (back, backward)):
        gathers = [one for one in steps if isinstance(one, Collective) and one.kind == "all_gather" and one.axis == "x"]
        assert [one.size_bytes.coefficient for one in gathers] == [width]
        kernels = [one for one in steps if isinstance(one, Kernel) and one.quantizes]
        operands = kernels[:-1] if steps is there else kernels
        assert [one.size_bytes.coefficient * one.calls.coefficient for one in operands] == moved
        assert sum(isinstance(one, Collective) and one.size_bytes == Size(4.0) for one in steps) == reduced


def test_what_torchao_adds() -> None:
    """Guards its tensor parallelism, whose gathers move a scale a tensor's format and of others BF16; and the kernel
    that multiplies gradients by scales of rows, which reads and writes them in BF16."""
    options, model = step_on(find_framework("torchtitan"), load_machine("dgx-h100").document, "bf16"), small_model()
    moved: dict[Precision, tuple[float, list[float]]] = {}
    for name in ("bf16", "fp8-current", "fp8-rowwise"):
        workload = Workload(global_batch=1, sequence_length=2048, precision=name)
        given = LayerInputs(model, workload.element_sizes, options, format=workload.format)
        back = linear_backward(
            linear_of(given, "attention.output"), given, makes=Array("made", "made", Size(1.0)), frees=()
        )
        gathers = (
            one.size_bytes.coefficient for one in back if isinstance(one, Collective) and one.kind == "all_gather"
        )
        plain = [one.size_bytes.coefficient for one in back if isinstance(one, Kernel) and not one.quantizes]
        moved[name] = next(gathers), plain
    assert moved == {"bf16": (2.0, []), "fp8-current": (1.0, [2 + 1.0]), "fp8-rowwise": (2.0, [4.0, 4.0])}


@pytest.mark.parametrize(
    ("machine", "precision", "saved", "weights"),
    [
        ("dgx-h100", "fp8-current", 2.0, ([6 - 2.0], [])),
        ("dgx-h100", "fp8-delayed", 1.0, ([2 + 1.0], [2 + 2.0])),
        ("dgx-b200", "fp8-delayed", 1.0, ([2 + 1.0], [2 + 1.0])),
        ("dgx-b200", "mxfp8", 1 + 1 / 32, ([2 + 1 + 1 / 32], [2 + 2 * (1 + 1 / 32)])),
    ],
)
def test_transformer_engine_under_fsdp_quantizes_weights_in_each_pass(
    machine: str, precision: Precision, saved: float, weights: tuple[list[float], list[float]]
) -> None:
    """Guards what it keeps of an input beside torchao, which saves originals, and the bytes of a weight that its
    forward pass quantizes by rows and its backward pass again for its own GEMM; gathers stay in BF16."""
    workload, options = Workload(global_batch=1, sequence_length=2048, precision=precision), find_framework("fsdp").step
    options = replace(
        step_on(find_framework("fsdp"), load_machine(machine).document, "bf16"), engine_formats=options.engine_formats
    )
    given = build_step(small_model(), workload, recompute="none", options=options).given
    assert given.saved_element == saved
    assert given.weight_element("block", copies=1) == 2.0
    made, linear = Array("made", "made", Size(1.0)), linear_of(given, "attention.output")
    passes = linear_forward(linear, given, phase="forward"), linear_backward(linear, given, makes=made, frees=())
    weight = linear.weight.powers
    for steps, moved in zip(passes, weights, strict=True):
        sizes = [one.size_bytes * one.calls for one in steps if isinstance(one, Kernel)]
        assert [one.coefficient / linear.weight.coefficient for one in sizes if one.powers == weight] == moved


@pytest.mark.parametrize(
    ("precision", "cudnn", "one_layout", "norm", "kernel"),
    [
        ("mxfp8", False, True, 6.0, 2 + 2 * 33 / 32),
        ("mxfp8", True, True, 4 + 2 * 33 / 32, 0.0),
        ("fp8-current", False, True, 6.0, 3.0),
        ("fp8-current", True, True, 6.0, 5.0),
        ("fp8-delayed", False, True, 5.0, 0.0),
        ("fp8-delayed", False, False, 5.0, 2.0),
        ("nvfp4", True, True, 6.0, 4 + 2 * 9 / 16),
    ],
)
def test_norms_quantize_for_the_layer_in_their_module(
    precision: Precision, cudnn: bool, one_layout: bool, norm: float, kernel: float
) -> None:
    """Guards bytes an element of a norm and of the kernels that quantize its output, forward: NVIDIA/TransformerEngine,
    pytorch/csrc/extensions/normalization.cpp."""
    workload = Workload(global_batch=1, sequence_length=2048, precision=precision)
    options = StepOptions(quantizes_in_gemm=True, keeps_quantized=True, one_layout=one_layout, cudnn_norms=cudnn)
    model = small_model(family="llama")
    given = LayerInputs(model, workload.element_sizes, options, format=workload.format)
    found = dict.fromkeys(("mlp.norm", "mlp.fc1"), 0.0)
    for step in block.forward(block.block_nodes(given)):
        if not isinstance(step, Kernel) or step.layer not in found or ("A", -1) in step.calls.powers:
            continue
        if step.layer == "mlp.norm" or step.quantizes:
            found[step.layer] += step.size_bytes.coefficient * step.calls.coefficient
    assert found == {"mlp.norm": pytest.approx(norm), "mlp.fc1": pytest.approx(kernel)}


def test_the_lm_head_may_be_in_the_format() -> None:
    """Guards Megatron-Core's fp8_output_proj: the LM head's three GEMMs in 8 bits, which quantize what they take."""
    asked: dict[str, Any] = {"machine": "gb200-nvl72", "framework": "megatron-core", "precision": "mxfp8", "batch": 8}
    steps = {}
    for narrow in (False, True):
        job = load_inputs(Request("llama3-8b", 8, **asked, set=[f"step.narrow_head={narrow}".lower()])).problem
        layout = Layout(Grid(1, 1, 1, 8, order=("x", "context", "z", "data", "pipeline", "y")), 1, "none")
        steps[narrow] = price(job, layout).iteration_s
        program = build_step(job.model, job.workload, recompute="none", options=job.framework.step)
        gemms = [step for step in program.head.operations if isinstance(step, MatMul)]
        assert {step.narrow for step in gemms} == {narrow}
    assert steps[True] < steps[False]


@pytest.mark.parametrize(("ranks", "written"), [(1.0, 1.0), (2.0, 2.0), (8.0, 2.0)])
def test_a_lone_rank_writes_both_copies_at_once(ranks: float, written: float) -> None:
    """Guards the transposed copy of what x gathers: of one rank it is a second write of the kernel that quantizes."""
    rates = compute_rates(load_machine("dgx-h100").document.accelerator, "fp8-current")
    step = Kernel("forward", "mlp.fc1", Size(2e9), quantizes="all", turns=True)
    found = ComputeClock(rates, 2.0, {"x": ranks}, PLAIN).call_s(step) - rates.kernel_launch_s
    assert found == pytest.approx(written * 1e9 / 0.46 / rates.memory_bytes_per_s)


@pytest.mark.parametrize(
    ("precision", "layout", "h200", "b200"),
    [
        ("fp8-current", "NN", 1.95, 1.79),
        ("fp8-current", "NT", 1.77, 1.79),
        ("fp8-delayed", "TN", 1.77, 1.79),
        ("fp8-blockwise", "NN", 1.62, 1.83),
        ("fp8-blockwise", "NT", 1.62, 1.83),
    ],
)
def test_sums_of_gemms(precision: Precision, layout: MatmulLayout, h200: float, b200: float) -> None:
    """Guards GEMMs in 8 bits over BF16's, with fast accumulation forward and FP32 sums of gradients, by means over six
    shapes of 8B and 70B models on one H200: docs/gpu.md. On Blackwell, whose 8 bits power holds back, all sum alike."""
    shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (7168, 8192), (8192, 28672)]

    def ratio(machine: str, n: int, k: int) -> float:
        accelerator = load_machine(machine).document.accelerator
        steps = [MatMul("forward", "mlp.fc1", *map(as_size, (8192, n, k)), layout, narrow=one) for one in (False, True)]
        clock = ComputeClock(compute_rates(accelerator, precision), 2.0, {}, PLAIN)
        return float(clock.call_s(steps[0]) / clock.call_s(steps[1]))

    assert fmean(ratio("dgx-h200", *shape) for shape in shapes) == pytest.approx(h200, rel=0.02)
    assert fmean(ratio("dgx-b200", *shape) for shape in shapes) == pytest.approx(b200, rel=0.02)


def test_ends_in_bf16_are_layer_types() -> None:
    """Guards first and last layers in BF16: their GEMMs are in no format, the others' are."""
    model = small_model(family="llama").model_copy(update={"layers": 8}).with_bf16_ends(1, 2)
    assert model.pattern == "layer-bf16*1 layer*5 layer-bf16*2"
    assert parameters(model.with_bf16_ends(0, 0)) == parameters(model)
    program = build_step(model, Workload(global_batch=8, sequence_length=2048, precision="mxfp8"), recompute="none")
    for one, narrow in zip(program.blocks, (False, True), strict=True):
        gemms = [step for step in one.forward.operations if isinstance(step, MatMul)]
        assert {step.narrow for step in gemms} == {narrow}


def test_ends_in_bf16_leave_the_model_that_ships() -> None:
    """Guards models that are read once in a process: their layer types stay."""
    model = load_model("mixtral-8x7b").document
    ends = model.with_bf16_ends(1, 1)
    assert list(ends.layer_types) == ["moe-bf16", "moe"]
    assert list(load_model("mixtral-8x7b").document.layer_types) == ["moe"]


@pytest.mark.parametrize(
    ("layout", "rows", "m", "k"), [("NN", 300, 384, 8192), ("NN", 350, 414, 8192), ("TN", 8000, 8192, 8064)]
)
def test_rows_of_groups_are_padded(layout: MatmulLayout, rows: int, m: int, k: int) -> None:
    """Guards an alignment of 128: 64 rows more a group in the mean, within whole tiles where these have as many."""
    rates = replace(compute_rates(load_machine("dgx-b200").document.accelerator, "nvfp4"), memory_bytes_per_s=1e18)
    sizes = (rows, 8192, 8192) if layout == "NN" else (8192, 8192, rows)
    step = MatMul("forward", "moe.fc1", *map(as_size, sizes), layout, narrow=True, padded=64.0)
    expected = 2.0 * m * 8192 * (k + rates.format_ramp) / rates.format_flops_per_s[layout]
    assert ComputeClock(rates, 2.0, {}, PLAIN).call_s(step) - rates.matmul_launch_s == pytest.approx(expected)


def llama(machine: str, precision: Precision, micro_batch: int) -> Detail:
    """Llama-3 8B by torchtitan's FSDP on eight GPUs, sequences of 8,192."""
    workload = Workload(global_batch=8 * micro_batch, sequence_length=8192, precision=precision)
    framework = find_framework("torchtitan")
    job = Job(load_model("llama3-8b").document, load_machine(machine).document, workload, framework)
    grid = Grid(1, 1, 8, 1, order=("x", "context", "z", "data", "pipeline", "y"))
    return price(job, Layout(grid, micro_batch, "selective", 0))


@pytest.mark.parametrize(
    ("machine", "precision", "micro_batch", "measured"),
    [
        ("dgx-b200", "mxfp8", 1, 9969.0 / 8307.5),
        ("dgx-b200", "fp8-current", 1, 10417.0 / 8307.5),
        ("dgx-h100", "fp8-current", 2, 8532 / 6667),
    ],
)
def test_steps_over_bf16_are_the_published(
    machine: str, precision: Precision, micro_batch: int, measured: float
) -> None:
    """Guards a step's gain by rows of pytorch/torchtitan@b5bcd76c: quantization/mxfp8.md, llama3_h100_202412."""
    found = llama(machine, "bf16", micro_batch).iteration_s / llama(machine, precision, micro_batch).iteration_s
    print(f"{machine} {precision}: {found:.3f}, measured {measured:.3f}")
    assert found == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("framework", [pytest.param("megatron-core", marks=pytest.mark.nightly), "torchtitan"])
def test_candidates_cost_what_each_does_alone(framework: str) -> None:
    """Guards the columns of formats, for layers with and without experts: the same to the last bit."""
    sizes: dict[str, Any] = {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 16384, "vocab": 51200}
    types = {"dense": {}, "moe": {"experts": {"count": 8, "per_token": 2, "width": 2048, "shared_width": 1024}}}
    model = small_model(family="llama", max_sequence_length=2048, layers="dense*2 moe*6", layer_types=types, **sizes)
    given: dict[str, Any] = {"gpus": 8, "batch": 24, "sequence_length": 2048, "precision": "mxfp8"}
    ranked = search(small_problem(model, load_machine("dgx-b200").document, find_framework(framework), **given), top=0)
    for place in range(0, len(ranked), max(len(ranked) // 10, 1)):
        row, alone = ranked[place], ranked.detail(place)
        assert (row.iteration_s, row.compute_s) == (alone.iteration_s, alone.compute_s), row.layout
        assert row.memory_bytes == pytest.approx(alone.memory_bytes, rel=1e-12)


def test_auto_finds_the_best_of_each_format() -> None:
    """Guards one ranking of all formats, of which those after BF16 are tried in part: each has its best of all."""
    asked: dict[str, Any] = {"machine": "dgx-b200", "framework": "megatron-core", "batch": 32, "seq": 4096}
    asked |= {"micro_batch": 1, "x": 4, "pipeline": 1}
    found = axonn_tune.search("llama3-70b", 32, precision="auto", **asked)
    formats = ("bf16", "fp8-delayed", "fp8-current", "fp8-blockwise", "mxfp8", "nvfp4")
    assert tuple(found.ranked.best_by_format) == tuple(sorted(formats, key=formats.index))
    for name, row in found.ranked.best_by_format.items():
        alone = search(load_inputs(Request("llama3-70b", 32, precision=name, **asked)).problem)[0]
        assert (row.layout, row.iteration_s, row.memory_bytes) == (alone.layout, alone.iteration_s, alone.memory_bytes)
        assert row.job.workload.precision == name
    listed = found.to_dict(top=2)["configs"]
    assert {one["precision"] for one in listed} == {*formats}
    assert found.frame["precision"].iloc[0] == found.best.job.workload.precision
    assert any(one.startswith("nvfp4 at best:") and "less; " in one for one in found.remarks)
    alone = axonn_tune.search("llama3-70b", 32, **{**asked, "machine": "perlmutter"}, precision="auto")
    assert {*alone.ranked.best_by_format} <= {"bf16"}


@pytest.mark.nightly
def test_compare_ranks_those_that_have_the_format() -> None:
    """Guards a comparison in a format: who lacks it says what it has."""
    found = compare(load_inputs(Request("llama3-8b", 8, machine="dgx-b200", precision="mxfp8", batch=8)).problem)
    priced = {one.key for one in found.contenders if one.prediction}
    assert priced == {"megatron-core", "torchtitan", "fsdp", "hsdp", "data-parallel"}
    asked = Request("llama3-8b", 8, machine="dgx-h100", precision="auto", batch=8, micro_batch=1, recompute="none")
    names = {one.key: one.name for one in compare(load_inputs(asked).problem).contenders if one.prediction}
    assert (names["torchtitan"], names["deepspeed"]) == ("torchtitan in fp8-rowwise", "DeepSpeed in bf16")
    assert next(one.infeasible for one in found.contenders if one.key == "deepspeed") == "priced in bf16 only"


def test_accelerate_is_told_of_fp8(tmp_path: Path) -> None:
    """Guards FSDP in torchao's FP8: its config, with or without gathers in FP8, which take less time."""
    asked: dict[str, Any] = {"machine": "dgx-h100", "framework": "fsdp", "batch": 16, "recompute": "full"}
    asked |= {"precision": "fp8-current", "micro_batch": 2, "z": 8, "kept_layers": 0}
    steps = []
    for gathers in ("false", "true"):
        found = axonn_tune.search("llama3-8b", 8, **asked, set={"step.primary_weights": gathers == "true"})
        found.write_launch_config(tmp_path / f"{gathers}.sh")
        config = (tmp_path / f"{gathers}.yaml").read_text(encoding="utf-8")
        assert "mixed_precision: fp8" in config
        assert f"  backend: AO\n  enable_fsdp_float8_all_gather: {gathers}\n" in config
        steps.append(found.best.communication_s)
    assert steps[1] < steps[0]


def test_what_has_no_format_says_which_it_has() -> None:
    """Guards refusals: by framework with those that have it, by accelerator with the nearest."""
    with pytest.raises(UsageError, match=r"priced in bf16; frameworks with it: megatron-core"):
        search(load_inputs(Request("llama3-8b", machine="dgx-b200", gpus=8, precision="mxfp8")).problem)
    assert nearest_format("mxfp8", ["bf16", "fp8-delayed", "fp8-blockwise"]) == "fp8-blockwise"
    assert nearest_format("mxfp8", ["bf16", "fp32"]) == "bf16"
    asked = Request("llama3-8b", machine="dgx-h100", gpus=8, precision="mxfp8", framework="megatron-core")
    with pytest.raises(UsageError, match="try --precision fp8-blockwise"):
        search(load_inputs(asked).problem)
    for framework, precision, why in (
        ("torchtitan", "mxfp8", "has no such option; frameworks that do: megatron-core, nemo, primus$"),
        ("megatron-core", "bf16", "needs a --precision of fp8-delayed"),
        ("megatron-core", "fp8-delayed", "delayed scaling has no layers in BF16"),
    ):
        kept: dict[str, Any] = {"framework": framework, "precision": precision, "set": ["step.last_layers_bf16=1"]}
        with pytest.raises(UsageError, match=why):
            load_inputs(Request("llama3-8b", machine="dgx-b200", gpus=8, **kept))
    kept = {"framework": "fsdp", "precision": "mxfp8", "set": ["step.primary_weights=true"]}
    with pytest.raises(UsageError, match="weights are gathered in BF16; try fp8-current"):
        load_inputs(Request("llama3-8b", machine="dgx-b200", gpus=8, **kept))


ON_HOPPER = ("fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-blockwise")
SUPPORT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("dgx-a100", "a800", "perlmutter", "frontier"), ()),
    **dict.fromkeys(("dgx-h100", "dgx-h200", "aws-p5", "alps", "h800"), ON_HOPPER),
    **dict.fromkeys(("dgx-b200", "dgx-b300", "gb200-nvl72", "gb300-nvl72"), (*ON_HOPPER, "mxfp8", "nvfp4")),
    **dict.fromkeys(("mi300x", "mi325x"), ("fp8-delayed", "fp8-current", "fp8-rowwise")),
    **dict.fromkeys(("mi350x", "mi355x"), ("fp8-delayed", "fp8-current", "fp8-rowwise", "mxfp8", "mxfp4")),
}
"""NVIDIA's by compute capability: NVIDIA/TransformerEngine@d0067d0d, pytorch/quantization.py, check_recipe_support:
from 9.0 FP8 and its blocks, which MXFP8 emulates from 10.0 on; from 10.0 MXFP8 and NVFP4. AMD's: pytorch/ao@36027d82,
torchao/float8/config.py (MI300), README of ROCm/TransformerEngine (delayed scaling),
torchao/prototype/moe_training/kernels/mxfp8/quant.py (gfx950); MXFP4: AMD's runs of MLPerf Training 6.0."""


@pytest.mark.parametrize("machine", SUPPORT)
def test_accelerators_have_the_formats_that_libraries_support(machine: str) -> None:
    """Guards which accelerator has which format, and that 8 bits go at twice the peak of BF16."""
    peaks = load_machine(machine).document.accelerator.peak_tflops
    assert {*peaks} & {*FORMATS} == {*SUPPORT[machine]}
    for name in (one for one in ON_HOPPER if one in peaks):
        assert peaks[name] == pytest.approx(2.0 * peaks["bf16"], rel=0.001)
