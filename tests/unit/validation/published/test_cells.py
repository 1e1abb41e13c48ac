"""Rows that name their model: every spelling of a cell means the same, and what means nothing is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from axonn_tune.specs.catalog import available, load_machine
from axonn_tune.validation.published.accuracy import predict_steps
from axonn_tune.validation.published.cases import Case, case_of, framework_of, measured_s, profile_of
from axonn_tune.validation.published.cells import model_named
from axonn_tune.validation.published.rows import SHIPPED, Place, StepRow, read_steps

CELLS = {
    **{"id": "one", "framework": "megatron-core", "model": "qwen3-235b-a22b", "gpus": "256", "system": "dgx-h100"},
    **{"precision": "bf16", "seq": "4096", "gbs": "2048", "mbs": "1", "tp": "2", "pp": "8", "vp": "4", "ep": "32"},
    **{"etp": "1", "recompute": "moe_act", "step_time_s": "19.7"},
}


def read(tmp_path: Path, **more: str) -> StepRow:
    """A row with some other cells."""
    cells = CELLS | more
    path = tmp_path / "rows.csv"
    path.write_text(",".join(cells) + "\n" + ",".join(f'"{cell}"' for cell in cells.values()) + "\n", "utf-8")
    return read_steps(path)[0]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        *(("Qwen3_30B_a3B", "qwen3-30b-a3b"), ("GPT OSS 120B", "gpt-oss-120b"), ("DeepSeekV3", "deepseek-v3")),
        *(("Nemotron_3_Nano", "nemotron-3-nano-30b-a3b"), ("meta-llama/Llama-3.1-405B", "llama3-405b")),
        *(("Qwen/Qwen3-235B-A22B", "qwen3-235b-a22b"), ("Mixtral 8x7B", "mixtral-8x7b"), ("kimi k2", "kimi-k2")),
        *(("DeepSeek-V3 671B", "deepseek-v3"), ("llama4-scout-17bx16e", "llama4-scout"), ("qwen3-8b", "qwen3-8b")),
        *(("DeepSeek-V2-Lite", "deepseek-v2-lite"), ("meta-llama/Llama-3.3-70B-Instruct", "llama3-70b")),
        *(("gpt2-xl", "gpt2-1.5b"), ("Llama-2-7b-hf", "llama2-7b"), ("qwen3", None), ("llama", None), ("", None)),
    ],
)
def test_models_by_any_spelling(name: str, model: str | None) -> None:
    """Guards names: one that could mean several models means none."""
    found = model_named(name)
    assert (found and found.name) == model


@pytest.mark.parametrize(
    ("cell", "recompute"),
    [
        *(("layernorm moe_act", "layernorm,moe_act"), ("norm, act", "layernorm,moe_act"), ("full", "full")),
        *(("selective (core_attn)", "core_attn"), ("full (uniform 1)", "full"), ("full block 3", "full on 3")),
        *(("off", "none"), ("selective", "selective"), ("moe_act (appendix B); mlp (table 1)", "moe_act")),
    ],
)
def test_recompute_lists(tmp_path: Path, cell: str, recompute: str) -> None:
    """Guards module lists, which sources write in their own words."""
    kind, _, some = recompute.partition(" on ")
    assert read(tmp_path, recompute=cell).recomputes == ((kind, int(some) if some else None),)


@pytest.mark.parametrize(
    ("cells", "precision"),
    [
        ({"precision": "fp8", "recipe": "tensorwise"}, "fp8-current"),
        ({"precision": "FP8", "recipe": ""}, "fp8-delayed"),
        ({"precision": "FP8-CS"}, "fp8-current"),
        ({"precision": "fp8", "recipe": "blockwise 1x128, 128x128"}, "fp8-blockwise"),
        ({"precision": "fp8", "recipe": "blockwise", "system": "gb200-nvl72"}, "fp8-blockwise"),
        ({"precision": "MXFP8", "system": "DGX-GB300"}, "mxfp8"),
        ({"precision": "NVFP4", "system": "gb300"}, "nvfp4"),
        ({"precision": "mxfp4", "system": "MI355X"}, "mxfp4"),
        ({"precision": "bf16", "recipe": "qwen3_pretrain_8gpu_gb200_fp8mx_config"}, "bf16"),
        ({"precision": "fp8_mx", "recipe": "mlperf closed", "system": "gb200"}, "mxfp8"),
        (
            {"precision": "fp8", "framework": "torchtitan (compile)", "model": "llama3-8b", "pp": "1", "vp": ""},
            "fp8-rowwise",
        ),
        ({"precision": "fp8", "recipe": "rowwise", "framework": "torchtitan", "pp": "1", "vp": ""}, "fp8-rowwise"),
    ],
)
def test_formats(tmp_path: Path, cells: dict[str, str], precision: str) -> None:
    """Guards number formats, as precision and recipe together say them."""
    case = case_of(read(tmp_path, **({"recompute": "none"} | cells)))
    assert isinstance(case, Case), case
    assert case.workload.precision == precision


def test_layout_and_options(tmp_path: Path) -> None:
    """Guards what changes a price: experts, dispatcher, graphs, number of MTP layers, exact stages, thousands."""
    row = read(tmp_path, gbs="2,048", seq="4k", dispatcher="all-to-all (NCCL)", routing="force-balanced")
    case = case_of(row)
    assert isinstance(case, Case)
    grid = case.configurations[0].grid
    assert (grid.x, grid.pipeline, grid.data, grid.expert, grid.expert_tensor) == (2, 8, 16, 32, 1)
    assert (case.workload.global_batch, case.workload.sequence_length) == (2048, 4096)
    assert case.framework.dispatcher_over(case.configurations[0].grid.expert, 8) == "alltoall", "not the default"
    assert row.more is not None
    assert row.more.routing == "forced"
    noted = read(
        tmp_path, notes="CUDA graphs attn, moe_router; layout string Et*2|(t*3|)*30t*2L, no MTP; 2 micro-batches"
    )
    assert framework_of(noted).step.cuda_graphs == ("attn", "moe_router")
    stated = framework_of(read(tmp_path, **{"step.gathers_experts": "true", "step.imbalance": "1.1"})).step
    assert (stated.gathers_experts, stated.imbalance) == (True, 1.1)
    found = case_of(noted)
    assert isinstance(found, Case)
    assert found.configurations[0].parts == (2, *[3] * 30, 2)


@pytest.mark.parametrize(
    ("cells", "seconds"),
    [
        ({"tokens_per_s_per_gpu": "1000"}, 2048 * 4096 / 256e3),
        # 148.03 GFLOP a token, by the published pairs of TFLOP/s and tokens/s.
        ({"tflops_per_gpu": "250"}, 2048 * 4096 * 148.03e9 / (256 * 250e12)),
        ({"mfu_percent": "25.27", "notes": "MFU of 989.5 TFLOP/s"}, 2048 * 4096 * 148.03e9 / (256 * 250e12)),
    ],
)
def test_steps_by_throughput(tmp_path: Path, cells: dict[str, str], seconds: float) -> None:
    """Guards steps from tokens/s, from the log's TFLOP/s and from MFU of the peak that the source names."""
    case = case_of(read(tmp_path, **(cells | {"step_time_s": ""})))
    assert isinstance(case, Case)
    assert measured_s(case) == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"gpus": ""}, "GPUs are not stated"),
        ({"seq": "", "gbs": ""}, "the sequence length is not stated; the global batch is not stated"),
        ({"recompute": "moe_atc"}, "recompute is 'moe_atc'"),
        ({"dispatcher": "carrier pigeon"}, "dispatcher is 'carrier pigeon'"),
        ({"model": "deepseek-v4-flash"}, "compressed attention is not split by TP"),
        ({"model": "something"}, "is not known"),
        ({"tp": "", "pp": "", "vp": "", "ep": ""}, "degrees of parallelism are not stated"),
        ({"tp": "two"}, "tp is 'two', not a whole number"),
        ({"fsdp": "x"}, "fsdp is 'x'; known: on, off"),
        ({"cuda_graphs": "foo"}, "cuda_graphs is 'foo'; known: none, attn"),
        ({"param_format": "foo"}, "param_format is 'foo'; known: bf16, fp8"),
        ({"grad_dtype": "int3"}, "grad_dtype is 'int3'; known: bf16, fp32"),
        ({"ep_overlap": "maybe"}, "ep_overlap is 'maybe'; known: on, off"),
        ({"offload": "to the moon"}, "offload is 'to the moon'; known: none, activations"),
        ({"precision": "mxfp8", "recipe": "delayd"}, "recipe is 'delayd', did you mean 'delayed'?"),
        ({"precision": "", "recipe": "mlperf closed"}, "the number format is not stated"),
        ({"precision": "bf61"}, "precision is 'bf61'"),
        ({"pipeline_layout": "Et|t"}, "pipeline layout 'Et|t'"),
        ({"layers": "1001"}, "layers are 1001"),
        ({"step.imbalance": "0.2"}, "step.imbalance=0.2: must be a number from 1 to 10,000; nearest valid: 1"),
        ({"step.narrow_attention": "maybe"}, "step.narrow_attention=maybe: expected true, false, got 'maybe'"),
        ({"dp": "3", "z": "2"}, "dp is 3, not divisible by z, 2"),
        ({"notes": "lora; functional"}, "fine-tuning is not priced: lora"),
        ({"notes": "sft; functional"}, "the lengths of its sequences are not stated"),
        ({"lengths": "100:900"}, "lengths 100:900: a 90th percentile of 900 with a mean of 100"),
        ({"packing": "thd"}, "packing is 'thd'; known: packed, padding-free, padded"),
        ({"adapters": "lora 16"}, "adapters is 'lora 16', did you mean 'lora r16'"),
        ({"recipe": "qwen35_vl_pretrain_config"}, "a model beside the language model is not priced: vl"),
        ({"notes": "vision-language"}, "a model beside the language model is not priced: vision-language"),
        (
            {"notes": "one figure for runs that differ: 8 in BF16 and FP8; x"},
            "one figure for runs that differ: 8 in bf16",
        ),
        ({"notes": "schedule zbv; dense"}, "this pipeline schedule is not priced: zbv"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, cells: dict[str, str], words: str) -> None:
    """Guards rows: nothing is passed over, and one odd cell leaves the others of the file to be read."""
    (found,) = predict_steps([read(tmp_path, **cells)])
    assert found.predicted_s is None
    assert words in found.why_not


@pytest.mark.parametrize(
    ("cell", "dispatcher"), [("None", "alltoall"), ("(", ""), ("–", ""), ("hybrid-ep", "hybridep")]
)
def test_dispatchers(tmp_path: Path, cell: str, dispatcher: str) -> None:
    """Guards cells of recipes in Python: `None` is Megatron-Core's own, the rest of a cut expression says nothing."""
    more = read(tmp_path, dispatcher=cell).more
    assert more is not None
    assert (more.dispatcher, more.lacking) == (dispatcher, "")


def test_closed_division_of_mlperf_has_its_configs(tmp_path: Path) -> None:
    """Guards fields that all configs of a round have: one graph, weights gathered in FP8, experts not split by TP."""
    cells = {"system": "gb200", "precision": "mxfp8", "recompute": "none"}
    step = framework_of(read(tmp_path, framework="megatron-core (mlperf)", **cells)).step
    assert (step.cuda_graphs, step.primary_weights) == (("full_iteration",), True)
    stated = framework_of(read(tmp_path, recipe="mlperf closed", param_format="bf16", cuda_graphs="none", **cells)).step
    assert (stated.cuda_graphs, stated.primary_weights) == ((), False)
    case = case_of(read(tmp_path, framework="megatron-core (mlperf)", etp="", **cells))
    assert isinstance(case, Case), case
    assert case.configurations[0].grid.expert_tensor == 1


def test_experts_of_one_rank_need_no_dispatcher(tmp_path: Path) -> None:
    """Guards rows of a rack with EP 1: HybridEP, which its recipes name, was refused there."""
    case = case_of(
        read(tmp_path, system="gb300", model="gpt-oss-20b", gpus="8", tp="1", pp="1", vp="", ep="1", gbs="8")
    )
    assert isinstance(case, Case), case


def test_shipped_rows_have_their_source() -> None:
    """Guards the file: a row names its source and the place in it, and an assumed cell where it is from."""
    rows = read_steps(SHIPPED / "moe_steps.csv")
    assert len(rows) == len({row.id for row in rows}) == 414
    assert all(row.dataset and row.more is not None for row in rows)
    assert sum(row.more.blind for row in rows if row.more) == 24


def test_weights_in_the_format_alone_take_less(tmp_path: Path) -> None:
    """Guards `param_format`: as `step.primary_weights` of a search, and not where the row is in BF16."""
    row = read(tmp_path, precision="fp8-blockwise", param_format="fp8")
    assert framework_of(row).step.primary_weights
    assert not framework_of(read(tmp_path, param_format="fp8")).step.primary_weights
    with_copies, alone = predict_steps([read(tmp_path, precision="fp8-blockwise"), row])
    assert alone.memory_bytes is not None
    assert with_copies.memory_bytes is not None
    assert alone.memory_bytes < 0.97 * with_copies.memory_bytes


@pytest.mark.parametrize(
    ("cell", "offloaded"),
    [("expert_fc1 and moe_act", ("expert_fc1", "moe_act")), ("optimizer", ("moments", "master")), ("none", ())],
)
def test_what_is_offloaded_is_on_the_host(tmp_path: Path, cell: str, offloaded: tuple[str, ...]) -> None:
    """Guards the column `offload`: steps ran with less memory than was predicted of them."""
    row = read(tmp_path, offload=cell, recompute="none")
    assert framework_of(row).step.offloaded == offloaded
    moved, stayed = predict_steps([row, read(tmp_path, recompute="none")])
    assert moved.memory_bytes is not None
    assert stayed.memory_bytes is not None
    assert (moved.memory_bytes < stayed.memory_bytes) == bool(offloaded)


def test_a_row_that_does_not_fit_is_marked(tmp_path: Path) -> None:
    """Guards that a step which ran is priced, with `fits`, its limit and words beside its layout."""
    found = predict_steps([read(tmp_path, recompute="none", mbs="8"), read(tmp_path)])
    assert [one.fits for one in found] == [False, True]
    assert found[0].predicted_s is not None
    assert "does not fit" in found[0].misfit
    assert found[1].misfit == ""


def test_a_micro_batch_is_open_with_the_recompute_that_it_needs(tmp_path: Path) -> None:
    """Guards rows without a word of micro-batch and recompute: those that fit without recompute alone were taken."""
    rows = [read(tmp_path, vp="1", recompute=kind, mbs=size) for kind, size in (("", ""), ("", "1"), ("none", ""))]
    silent, stated, without = predict_steps(rows)
    assert silent.predicted_s is None
    assert "micro-batch" in silent.open_words
    assert stated.predicted_s in silent.choices_s
    assert silent.row.micro_batch is None
    assert len(silent.choices_s) > len(without.choices_s)


@pytest.mark.parametrize("name", [name for name in available("machine") if name != "localhost"])
def test_every_profile_is_found_by_its_name_and_its_accelerator(name: str) -> None:
    """Guards rows of an accelerator that ships: `system: mi355x` had no profile."""
    assert profile_of(Place(gpu=name)) == name
    near = profile_of(Place(gpu=load_machine(name).document.accelerator.name))
    assert near is not None
    assert load_machine(near).document.accelerator.name.split("-")[0] in load_machine(name).document.accelerator.name
