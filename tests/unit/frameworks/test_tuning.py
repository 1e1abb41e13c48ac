"""What trains where it is not all: who has it, what writes it, and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from axonn_tune import explain, search
from axonn_tune.cost.price import price
from axonn_tune.errors import DocumentError, NothingFeasibleError, UsageError
from axonn_tune.frameworks.command import OWN_SCRIPT
from axonn_tune.job import Job
from axonn_tune.launch.commands import command_of
from axonn_tune.learning.stated import read_run
from axonn_tune.ranking.compare import compare
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.report.commands import run_words
from axonn_tune.request import Request
from axonn_tune.specs.tuning import Tuning, tools, tuning
from tests.unit.frameworks.test_round_trip import script

ASKED: dict[str, Any] = {"machine": "dgx-h100", "batch": 32, "seq": 4096, "tune": "lora", "lora_rank": 16}


def test_a_search_says_what_trains() -> None:
    """Guards titles, facts and the document: they name mode, rank and how much trains."""
    said = explain("llama3-70b", 8, framework="fsdp", **ASKED)
    assert str(said).startswith("LoRA r 16 of llama3-70b: ")
    words = " ".join(str(said).split())
    assert "32.8 M parameters beside 70.6 B that do not: adapters of q_proj, v_proj" in words


def test_a_batch_and_an_optimizer_are_said() -> None:
    """Guards explain, titles and the count of a log: they name packs, another optimizer than AdamW, and all weights."""
    asked: dict[str, Any] = {"framework": "fsdp", **ASKED, "optimizer": "muon", "lengths": "squad"}
    said = " ".join(str(explain("llama3-8b", 8, **asked)).split())
    assert "(squad: mean 174, p90 268, packed): 4 packs for each of 8 groups" in said
    assert "optimizer Muon" in said
    shown = " ".join(str(search("llama3-8b", 8, top=1, **asked)).split())
    assert "packed) in bf16, optimizer Muon; ranked by step time" in shown
    assert "log, which counts all weights as if they trained" in shown


def test_strategies_are_compared_with_one_optimizer() -> None:
    """Guards compare: all frameworks that have the optimizer take it, the others stand without a step."""
    asked = Request("llama3-8b", 8, framework="fsdp", machine="dgx-h100", batch=64, seq=4096, optimizer="muon")
    found = compare(load_inputs(asked).problem)
    names = {one.framework: one.prediction and one.prediction.job.framework.step.optimizer for one in found.contenders}
    assert {name for name, optimizer in names.items() if optimizer} >= {"megatron-core", "torchtitan"}
    assert {*names.values()} == {"muon", None}
    assert {one.infeasible for one in found.contenders if one.framework == "axonn"} == {"has no Muon"}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"framework": None, "tune": "qlora"}, "axonn-tune .4D. has full, lora; frameworks with qlora: fsdp"),
        ({"framework": "axonn"}, "frameworks with lora"),
        (
            {"framework": "megatron-core", "tune": "qlora"},
            "has full, lora, dora, head; frameworks with qlora: fsdp",
        ),
        ({"framework": "fsdp", "lora_targets": "q_prj"}, "did you mean 'q_proj'"),
        ({"framework": "fsdp", "lora_targets": ","}, "--lora-targets '': known: all-linear, "),
        ({"framework": "torchtitan", "set": ["workload.tuning.mode=dora"]}, "mode=dora: torchtitan has no dora"),
        (
            {"framework": "megatron-core", "set": ["workload.tuning.base=nf4"]},
            "base=nf4: Megatron-Core has no quantized",
        ),
        ({"framework": "fsdp", "set": ["workload.tuning.mode=head"]}, "head trains the LM head alone"),
        ({"framework": "fsdp", "set": ["workload.tuning.mode=qlora"]}, "qlora has its base in nf4"),
        ({"framework": "fsdp", "set": ["workload.tuning.targets=[]"]}, r"targets=\[\]: llama3-8b has no such layer"),
        ({"framework": "fsdp", "set": ["workload.tuning.targets=['*', '*']"]}, "targets names something twice"),
        ({"framework": "fsdp", "tune": None}, "--lora-rank 16 needs --tune lora"),
        ({"framework": "fsdp", "lora_targets": "in_proj"}, "llama3-8b has no such layer; it has all-linear, q_proj"),
        (
            {"framework": "fsdp", "lora_rank": None, "tune": "head", "lora_targets": "q_proj"},
            "--lora-targets q_proj needs",
        ),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, Any], words: str) -> None:
    """Guards refusals: each names who has it, or the nearest name."""
    with pytest.raises((UsageError, DocumentError), match=words):
        load_inputs(Request("llama3-8b", gpus=8, **ASKED | asked))


def test_the_head_alone_has_no_gradients_to_overlap() -> None:
    """Guards the head of models with experts: no pass back through blocks runs beside a forward pass, asked or not."""
    asked = {"gpus": 8, "framework": "megatron-core", "machine": "dgx-h100", "tune": "head", "recompute": "none"}
    found = search("nano-moe", expert=2, batch=16, **asked)
    assert len(found)
    assert not any(found.frame["expert_overlap"])
    with pytest.raises(UsageError, match="--expert-overlap: needs gradients through blocks"):
        load_inputs(Request("nano-moe", expert_overlap=True, **asked))


def test_lengths_without_candidates_are_refused_as_others() -> None:
    """Guards batches that divide over no grid, where no micro-batch has lengths."""
    with pytest.raises(NothingFeasibleError, match="nearest change that fits: --batch 8"):
        search("llama3-8b", 8, framework="fsdp", lengths="squad", **ASKED | {"batch": 1}).require_any()


def test_options_come_back() -> None:
    """Guards printed commands: their words make the same adapters again."""
    for tool, names, mode in (
        ("peft", None, "qlora"),
        ("peft", ("all-linear",), "lora"),
        ("peft", ("q_proj", "o_proj"), "dora"),
        ("megatron-bridge", ("linear_qkv", "linear_proj"), "lora"),
        ("torchtitan", None, "lora"),
    ):
        one = tuning(mode, tool, rank=16, targets=names, dtype=None)  # type: ignore[arg-type]
        assert one is not None
        words = tools()[tool].words(one)
        given = dict(zip(words[::2], words[1::2], strict=True))
        targets = given.get("--lora-targets", "").split(",") if "--lora-targets" in given else None
        again = tuning(given["--tune"], tool, rank=int(given["--lora-rank"]), targets=targets, dtype=None)  # type: ignore[arg-type]
        assert again == one
    assert tools()["peft"].words(Tuning(mode="lora", targets=("*",), dtype="fp32", base="int8"))[-2:] == [
        "--set",
        "workload.tuning.base=int8",
    ]


def test_peft_gets_its_config() -> None:
    """Guards scripts: PEFT's file of what was priced."""
    ranked = search("llama3-8b", 8, framework="fsdp", top=1, recompute="full", **ASKED)
    command = command_of(ranked.ranked.detail(0))
    config = json.loads(command.files["_peft.json"])
    assert (config["r"], config["target_modules"]) == (16, ["q_proj", "v_proj"])
    assert any("get_peft_model" in need for need in command.needs)
    problem = load_inputs(Request("llama3-8b", gpus=8, framework="fsdp", **ASKED)).problem
    words = run_words(problem, gpus=8, model=["llama3-8b"], machine="dgx-h100")
    assert words[words.index("--tune") :][:4] == ["--tune", "lora", "--lora-rank", "16"]
    assert replace(problem, workload=problem.workload).title == "LoRA r 16 of llama3-8b"


BRIDGE: dict[str, Any] = {"framework": "megatron-core", "lora_targets": "linear_qkv,linear_proj", "z": 1}
STAGES: dict[str, Any] = {"x": 2, "pipeline": 2, "chunks": 2, "context": 1}


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        ("llama3-70b", BRIDGE | STAGES),
        ("qwen3-8b", BRIDGE | {"x": 2, "pipeline": 1, "context": 2}),
        ("llama3-8b", BRIDGE | STAGES | {"tune": "dora", "set": ["workload.tuning.collectives=exchanged"]}),
        ("qwen3-30b-a3b", BRIDGE | {"x": 1, "expert": 4, "pipeline": 1, "context": 1}),
        ("qwen3-30b-a3b", {"framework": "megatron-core", "x": 1, "expert": 4, "set": ["workload.tuning.experts=each"]}),
        ("llama3-8b", BRIDGE | STAGES | {"tune": None, "lora_rank": None, "lora_targets": None, "lengths": "tulu"}),
        ("llama3-8b", {"framework": "fsdp", "z": 8, "set": ["workload.tuning.dropout=0.1"]}),
        ("llama3-8b", {"framework": "fsdp", "z": 8, "set": ["workload.tuning.tables=[embedding,head]"]}),
        ("llama3-8b", {"framework": "deepspeed", "z": 8, "tune": "qlora", "lora_dtype": "bf16"}),
    ],
    ids=str,
)
def test_what_fine_tunes_is_read_as_it_is_written(model: str, asked: dict[str, Any], tmp_path: Path) -> None:
    """Guards scripts of LoRA and SFT, Megatron-Bridge's recipes among them: what trains, layout, step and memory."""
    found = search(model, 8, top=1, recompute="full", micro_batch=1, **ASKED | asked)
    priced, command = found.ranked.detail(0), command_of(found.ranked.detail(0))
    own = load_inputs(Request(model, gpus=8)).problem.model if OWN_SCRIPT in command.checks else None
    given = {} if command.accelerate else {"n_gpus": "8"}
    several = {"plain": command} | {form: one for form, one in command.forms.items() if form == "swift"}
    assert ("swift" in several) == (model in ("llama3-70b", "qwen3-8b") or "lengths" in asked or "each" in str(asked))
    for form, one in several.items():
        read = read_run(script(one, tmp_path / form), given=given, model=own)
        assert not read.unknown
        case = read.case(found.inputs.problem.machine)
        trained = priced.job.workload.tuning
        if trained is not None and form == "swift":
            # As ms-swift has it of all models, with experts or without.
            trained = trained.model_copy(update={"experts": "each"})
        assert case.workload.tuning == trained
        # Lengths are those of the data, which no file states.
        workload = case.workload.model_copy(update={"lengths": priced.job.workload.lengths})
        layout = next(one for one in case.configurations if one.recompute == "full")
        theirs = price(Job(case.model, case.machine, workload, case.framework), layout)
        assert theirs.grid.by_axis == priced.grid.by_axis
        assert theirs.iteration_s == pytest.approx(priced.iteration_s, rel=1e-9)
        assert theirs.memory.total_bytes == pytest.approx(priced.memory.total_bytes, rel=1e-9)


@pytest.mark.parametrize(
    ("model", "asked", "words"),
    [
        ("llama3-8b", {"tune": "head", "lora_rank": None}, "cannot express --tune head; recipes of Megatron-Bridge"),
        ("llama3-8b", {"lora_targets": "linear_q,linear_v"}, "cannot express adapters of parts of fused layers"),
        ("llama3-8b", {"lora_dtype": "fp32"}, "cannot express --lora-dtype fp32"),
        ("llama3-8b", {"set": ["workload.tuning.tables=[head]"]}, "cannot express tables that train beside adapters"),
        ("llama3-8b", {"precision": "fp8-current"}, "cannot express this step as a recipe of Megatron-Bridge"),
        ("olmo-3-7b", {}, "cannot express fine-tuning of olmo-3-7b; .* llama3-8b"),
        ("llama3-8b", {"framework": "torchtitan", "lora_dtype": "bf16"}, "torchtitan cannot express --lora-dtype bf16"),
        ("qwen3-8b", {"framework": "torchtitan"}, "LoRA of a model of other sizes than llama3's"),
    ],
)
def test_what_no_tool_writes_is_refused_by_name(model: str, asked: dict[str, Any], words: str) -> None:
    """Guards refusals of scripts: each names what cannot be said."""
    pins = {"framework": "megatron-core", "recompute": "full", "pipeline": 1, "x": 1} | asked
    found = search(model, 8, top=1, **ASKED | pins)
    with pytest.raises(UsageError, match=words):
        command_of(found.ranked.detail(0))


def test_torchtitan_has_a_converter() -> None:
    """Guards torchtitan's LoRA: a module of its own with the converter, which names what was priced but the LM head."""
    found = search("llama3-8b", 8, framework="torchtitan", top=1, recompute="full", z=8, **ASKED)
    module = command_of(found.ranked.detail(0)).files["_model.py"]
    compile(module, "_model.py", "exec")
    assert 'rank=16, alpha=32.0, target_modules=["wqkv", "wo", "w1", "w2", "w3"]' in module


def test_the_fewest_gpus_stand_beside_those_of_other_modes() -> None:
    """Guards --gpus min: LoRA says what QLoRA and all weights take, as searches of these do; others say nothing."""
    asked: dict[str, Any] = {"framework": "fsdp", **ASKED}
    found = search("llama3-70b", "min", **asked)
    plain = {name: value for name, value in asked.items() if name not in ("tune", "lora_rank")}
    others = {"qlora": asked | {"tune": "qlora"}, "full": plain}
    fewest = {mode: search("llama3-70b", "min", **one).inputs.problem.gpus for mode, one in others.items()}
    assert found.sizes is not None
    assert found.sizes.other_modes == fewest
    said = f"The fewest GPUs otherwise: {fewest['qlora']} with --tune qlora, {fewest['full']} with --tune full."
    assert said in " ".join(str(found).split())
    assert "otherwise" not in str(search("llama3-8b", "min", **plain))
