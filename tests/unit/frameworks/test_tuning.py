"""What trains where it is not all: who has it, what writes it, and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from axonn_tune import explain, search
from axonn_tune.errors import DocumentError, NothingFeasibleError, UsageError
from axonn_tune.launch.commands import command_of
from axonn_tune.ranking.compare import compare
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.report.commands import run_words
from axonn_tune.request import Request
from axonn_tune.specs.tuning import Tuning, tools, tuning

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
        ({"framework": None}, "axonn-tune .4D. trains models whole; frameworks with lora: megatron-core, .*fsdp"),
        ({"framework": "axonn"}, "frameworks with lora"),
        (
            {"framework": "megatron-core", "tune": "qlora"},
            "has full, lora, dora, head; frameworks with qlora: fsdp",
        ),
        ({"framework": "fsdp", "lora_targets": "q_prj"}, "did you mean 'q_proj'"),
        ({"framework": "fsdp", "lora_targets": ","}, "--lora-targets '': known: all-linear, "),
        ({"framework": "torchtitan", "set": ["workload.tuning.mode=dora"]}, "mode=dora: torchtitan has no dora"),
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
    """Guards scripts: PEFT's file of what was priced, and frameworks whose scripts cannot say it refuse."""
    ranked = search("llama3-8b", 8, framework="fsdp", top=1, recompute="full", **ASKED)
    command = command_of(ranked.ranked.detail(0))
    config = json.loads(command.files["_peft.json"])
    assert (config["r"], config["target_modules"]) == (16, ["q_proj", "v_proj"])
    assert any("get_peft_model" in need for need in command.needs)
    problem = load_inputs(Request("llama3-8b", gpus=8, framework="fsdp", **ASKED)).problem
    words = run_words(problem, gpus=8, model=["llama3-8b"], machine="dgx-h100")
    assert words[words.index("--tune") :][:4] == ["--tune", "lora", "--lora-rank", "16"]
    bridge = search("llama3-8b", 8, framework="megatron-core", top=1, recompute="none", x=1, pipeline=1, z=1, **ASKED)
    with pytest.raises(
        UsageError, match="Megatron-Core cannot express --tune lora; as PEFT's config it is written for"
    ):
        command_of(bridge.ranked.detail(0))
    assert replace(problem, workload=problem.workload).title == "LoRA r 16 of llama3-8b"
