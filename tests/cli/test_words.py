"""The words of default outputs: what people who came from a framework did not understand is not in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.running import run

pytestmark = pytest.mark.usefixtures("shared_searches")
FIXTURES = Path(__file__).parents[1] / "fixtures"
DIAGNOSE, COMMANDS = FIXTURES / "diagnose", FIXTURES / "commands"
CORE = "--machine dgx-h100 --framework megatron-core"
OUTPUTS = {
    "search": f"--gpus 16 --model llama3-8b {CORE}",
    "search-experts": f"--gpus 16 --model nano-moe {CORE} --ep 8",
    "search-formats": f"--gpus 8 --model llama3-8b {CORE} --precision auto --recompute full --micro-batch 1",
    "search-4d": "--gpus 64 --model 20b",
    "search-infeasible": "--gpus 4 --model 640b",
    "compare": "compare --gpus 16 --model 5b",
    "sweep": "sweep --gpus 64,128 --model 5b",
    "explain": f"explain --gpus 16 --model llama3-8b {CORE}",
    "explain-script": f"explain --from-command {COMMANDS / 'gpt-one-line.sh'} --machine dgx-h100",
    "diagnose": f"diagnose {DIAGNOSE / 'lab' / 'slow-link'} --machine {DIAGNOSE / 'lab.yaml'}",
    "diagnose-step": f"diagnose --step 19.7 --from-command {COMMANDS / 'gpt-one-line.sh'} --machine dgx-h100",
}
"""A small case of each command."""
UNKNOWN = {
    "best of grid": "a column of --wide under another name",
    "exchange": "CP type",
    "is its own": "between rows",
    "common to all": "between rows",
    "unexplained": "not explained",
    "by the first cause": "what the first cause leaves",
    "times that of": "times the assumed",
    "unlim.": "unlimited memory, with -v",
    "leanest": "the layout that needs least",
    "not resharded": "layers gathered, which the title explains",
    "or CP": "Within model error, not listed: #2 with CP 2 for DP 2",
    "causal half": "with -v",
    "rejected: ": "with -v",
    "e+0": "a plain number",
}
"""Words, and what stands in their place."""
EXPLAINED = {
    "GTP": "GTP: weights in shards, gathered before use as in FSDP.",
    "gathered\n": "Layers gathered: weights stay gathered from forward to backward",
    "fp8-current": "Without a rank: the best in another format. MFU: of each format's own peak.",
    "≈": "≈ within model error of #1.",
    "°": "° beyond what published steps validate.",
}
"""Words that are explained above the table that has them."""


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("width", [80, pytest.param(100, marks=pytest.mark.nightly)])
def test_default_outputs_have_words_that_people_know(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what is printed without -v: no word of the table, odd ones explained, no heading hyphenated, and prose and
    tables within the line, nightly of 100 columns too; commands to copy stand on one line of any length."""
    monkeypatch.setenv("COLUMNS", str(width))
    done = run(OUTPUTS[name])
    text = f"{done.out}\n{done.err}"
    joined = " ".join(text.split())
    assert {word: better for word, better in UNKNOWN.items() if word in joined} == {}
    if name.startswith(("search", "sweep")):
        assert {word for word, said in EXPLAINED.items() if word in done.out and said not in joined} == set()
    lines = [line for line in text.splitlines() if not line.startswith(("axonn-tune ", "Error: "))]
    assert [line for line in lines if len(line) > width] == []
    assert not any(word.endswith("-") and word.strip("-") for line in lines for word in line.split())
