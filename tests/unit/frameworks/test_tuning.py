"""What trains where it is not all: who has it, what writes it, and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from axonn_tune import explain, search
from axonn_tune.errors import UsageError
from axonn_tune.launch.commands import command_of
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.report.commands import run_words
from axonn_tune.request import Request
from axonn_tune.specs.tuning import tools, tuning

ASKED: dict[str, Any] = {"machine": "dgx-h100", "batch": 32, "seq": 4096, "tune": "lora", "lora_rank": 16}


def test_a_search_says_what_trains() -> None:
    """Guards titles, facts and the document: they name mode, rank and how much trains."""
    said = explain("llama3-70b", 8, framework="fsdp", **ASKED)
    assert str(said).startswith("LoRA r 16 of llama3-70b: ")
    assert "32.8 M parameters beside 70.6 B that do not" in " ".join(str(said).split())


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"framework": None}, "axonn-tune .4D. trains models whole; frameworks with adapters: megatron-core, .*fsdp"),
        ({"framework": "axonn"}, "frameworks with adapters"),
        ({"framework": "megatron-core", "tune": "qlora"}, "megatron-bridge has lora, dora, head; qlora is of peft"),
        ({"framework": "fsdp", "lora_targets": "q_prj"}, "did you mean 'q_proj'"),
        ({"framework": "fsdp", "tune": None}, "--lora-rank 16: is of adapters"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, Any], words: str) -> None:
    """Guards refusals: each names who has it, or the nearest name."""
    with pytest.raises(UsageError, match=words):
        load_inputs(Request("llama3-8b", gpus=8, **ASKED | asked))


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
