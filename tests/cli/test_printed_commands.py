"""Every command that a command prints runs: next steps, changes, commands of pages, and what would fit.

A call of the table is run, its output searched for command lines and for options that are said to fit, and each of
those is run in the same folder, in order, so that one may read what another wrote. Names of commands, forms with a word
to fill in (`FILE`), and what starts ranks or takes minutes are parsed only.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.document import to_yaml
from tests.cli.running import good, run
from tests.cli.test_documented import LEAVES

pytestmark = pytest.mark.usefixtures("shared_searches")
SCRIPT = """\
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 4 --hidden-size 512 --ffn-hidden-size 1024 \\
  --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --vocab-size 4000 --swiglu \\
  --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights \\
  --micro-batch-size 1 --global-batch-size 64 --bf16 --use-distributed-optimizer --transformer-impl transformer_engine
"""
EXPERTS = SCRIPT[:-1] + (
    " --num-experts 8 --expert-model-parallel-size 8 --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall\n"
)
LARGE = re.sub(
    "layers 4 --hidden-size 512 --ffn-hidden-size 1024",
    "layers 48 --hidden-size 8192 --ffn-hidden-size 28672",
    SCRIPT,
)
CONFIG = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
CONFIG |= {"intermediate_size": 1376, "vocab_size": 1024, "max_position_embeddings": 2048, "hidden_act": "silu"}
LINE = (
    " [2026-01-01 00:00:0{0}] iteration {0}/ 100 | consumed samples: 64 | elapsed time per iteration (ms): 900.0 | "
    "global batch size: 64 | lm loss: 1.0E+01 |\n"
)
FILES = {"dense.sh": SCRIPT, "moe.sh": EXPERTS, "large.sh": LARGE, "run.log": "".join(map(LINE.format, range(1, 9)))}
FILES["config.json"] = json.dumps(CONFIG)
NETWORK = load_model("nano-llama").document.model_copy(update={"approximated": ("norms after attention and MLP",)})
FILES["other.yaml"] = to_yaml(NETWORK)
EVIDENCE = Path(__file__).parents[1] / "fixtures" / "evidence"
FINISHED, MEASURED = EVIDENCE.parent / "diagnose/lab/healthy-z4", EVIDENCE.parent / "v2/measurement.yaml"
FILES |= {name: (EVIDENCE / name).read_text("utf-8") for name in ("nccl.txt", "steps.csv")}
"""What calls and printed commands read: small runs of Megatron-LM, one that does not fit, logs, rows, and a config."""

CORE = "--machine dgx-h100 --framework megatron-core"
CALLS = {
    "search": (2, "--gpus 4 --model nano --machine localhost"),
    "search-experts": (3, f"--gpus 8 --model nano-moe {CORE} --tp 2 --pp 1 --ep 4"),
    "search-part-of-a-node": (2, f"--gpus 12 --model nano-moe {CORE} --tp 2 --ep 2 --pp 1"),
    "search-no-arguments": (2, "--gpus 8 --model nano --machine=dgx-h100 --framework torchtitan --tp 2 --top=3 --wide"),
    "search-page": (3, "--gpus 4 --model nano --machine localhost --top 3 -q --html page.html"),
    "explain-approximated": (
        1,
        "explain --gpus 4 --model other.yaml --machine dgx-h100 --framework fsdp --html page.html",
    ),
    "explain-page": (
        1,
        "explain --gpus 4 --model nano --machine dgx-h100 --framework fsdp --html page.html",
    ),
    "explain-script": (1, "explain --from-command dense.sh --machine dgx-h100"),
    "explain-experts": (2, "explain --from-command moe.sh --machine dgx-h100"),
    "diagnose-experts": (2, "diagnose run.log --from-command moe.sh --machine dgx-h100"),
    "diagnose-large": (1, "diagnose --step 100 --from-command large.sh --machine dgx-h100"),
    "diagnose-two-runs": (
        1,
        "diagnose --tflops 40 --gpus 16 --tflops 90 --gpus 8 --from-command large.sh --machine dgx-h100",
    ),
    "infeasible-memory": (1, f"--gpus 8 --model llama3-70b {CORE} --seq 1024 --batch 16 --recompute none"),
    "infeasible-batch": (2, "--gpus 4 --model nano --batch 5 --micro-batch 2 --machine localhost"),
    "no-model": (1, "--gpus 4 --model someone/else"),
    "no-machine": (2, "--gpus 4 --model nano --machine nowhere"),
    "logs": (1, "calibrate --from-logs all_reduce.txt -o y.yaml"),
    "calibrate": (0, "calibrate --ranks 1 --batch 8 --budget 1s -o here.yaml"),
    "learn-log": (0, "learn run.log --from-command dense.sh --machine dgx-h100 -o mine.yaml"),
    "learn-collectives": (0, "learn nccl.txt --machine dgx-h100 -o mine.yaml"),
    "diagnose-learned": (0, "diagnose run.log --from-command dense.sh --machine dgx-h100 --html page.html"),
    "accuracy-rows": (0, "accuracy --rows steps.csv --html page.html"),
    "validate-rows": (1, "validate --rows steps.csv"),
    "report": (
        0,
        f"report {EVIDENCE.parent / 'diagnose/lab/healthy-z4'} {EVIDENCE.parent / 'v2/measurement.yaml'} -o page.html",
    ),
}
"""At least so many commands, and the call that prints them; comparisons print none today."""
MORE = {
    "explain-large": (1, "explain --from-command large.sh --machine dgx-h100"),
    "infeasible-experts": (1, f"--gpus 2 --model qwen3-30b-a3b --seq 512 --batch 2 {CORE}"),
    "sweep-experts": (1, f"sweep --gpus 7 --model qwen3-30b-a3b --seq 8192 {CORE}"),
    "search-fsdp": (3, "--gpus 16 --model llama3-8b --machine dgx-h100 --framework fsdp --seq 8192"),
    "search-torchtitan": (3, "--gpus 16 --model llama3-8b --machine dgx-h100 --framework torchtitan"),
    "search-deepseek": (3, f"--gpus 512 --model deepseek-v3 {CORE}"),
    "search-640b": (1, "--gpus 4 --model 640b"),
    "compare-page": (0, "compare --gpus 8 --model qwen3-30b-a3b --machine dgx-h100 --html page.html"),
}

ONLY_PARSED = {"run", "calibrate", "validate", "accuracy", "lab"}
"""Commands that start ranks, or take minutes: golden outputs and other tests run them."""
OPTIONS = r"(?:--[\w-]+(?: (?!or\b|and\b)[\w.,=*'/-]+)?)"


def printed(text: str) -> Iterator[list[str]]:
    """Command lines on lines of their own, between backticks, and at the end of a sentence after a colon."""
    for line in re.findall(r"^\s*(axonn-tune .*)$", text, flags=re.MULTILINE):
        yield shlex.split(line)
    joined = re.sub(r"\s*\n\s+", " ", text)
    for line in re.findall(
        r"`(axonn-tune [^`]*)`|(?<!Next): (axonn-tune (?:(?!\. )[^\n`])*)$", joined, flags=re.MULTILINE
    ):
        yield shlex.split("".join(line).replace("...", ""))


def of_page(text: str) -> Iterator[list[str]]:
    """Command lines that a page shows as such, without those whose holes its script fills."""
    for found in re.findall(r'"line": ?("axonn-tune (?:[^"\\]|\\.)*")', text):
        if "{" not in (line := json.loads(found)):
            yield shlex.split(line)


def following(call: list[str], text: str) -> Iterator[list[str]]:
    """The call with each word and option that the line of next steps of a search names."""
    for said in re.findall(r"^Next: ((?:.|\n  )*)", text, flags=re.MULTILINE):
        for word in re.sub(r" \([^)]*\)", "", " ".join(said.split())).split(", "):
            if "NAME" in word or "FILE" in word or call[0] in ("explain", "diagnose"):
                continue
            others = [one for one in call if one not in ("--top=3", "--wide")]
            yield ["axonn-tune", *([*call, *word.split()] if word.startswith("-") else [word, *others])]


def fitting(call: list[str], text: str) -> Iterator[list[str]]:
    """The call with each change that is said to fit, and without the options that it leaves out."""
    joined = re.sub(r"\s*\n\s+", " ", text)
    for listed in re.findall(r"nearest changes? that fits?(?:, cheapest first)?: (.*)", joined):
        for one in re.sub(r" \([^)]*\)", "", listed).split(" or "):
            added, _, left = one.partition("leave out ")
            words, skipped = list[str](), re.findall(r"--[\w-]+", left)
            for at, word in enumerate(call):
                if word not in skipped and (at == 0 or call[at - 1] not in skipped):
                    words.append(word)
            yield ["axonn-tune", *words, *shlex.split(added.removesuffix(" and ").removesuffix("and "))]


def is_form(words: list[str]) -> bool:
    """Whether it only names a command, a word is to be filled in, or the command is only parsed."""
    named = len(words) == 2 and not words[1].startswith("-")
    return (
        named
        or words[1] in ONLY_PARSED
        or any(re.fullmatch(r"[A-Z]+(\.[a-zA-Z]+)?|[\w.]*\|.*", word) for word in words[2:])
    )


def understood(words: list[str]) -> bool:
    """Whether a command has the options of a form."""
    for path, command in LEAVES:
        if tuple(words[1 : len(path) + 1]) == path:
            known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
            return {word for word in words if word.startswith("-")} <= known
    return words[1].startswith("-")


def check(name: str, least: int, line: str, folder: Path) -> None:
    """Run a call in a folder, and every command that it prints."""
    for path, text in FILES.items():
        (folder / path).write_text(text, encoding="utf-8")
    call = run(line)
    text = call.out + call.err
    page = folder / "page.html"
    shown = [*printed(text), *(of_page(page.read_text("utf-8")) if page.exists() else ())]
    words = line.split()
    found = [list(one) for one in dict.fromkeys(map(tuple, [*shown, *following(words, text), *fitting(words, text)]))]
    assert len(found) >= least, f"{name}: {found}\n{text}"
    for words in found:
        if is_form(words):
            assert understood(words), words
            continue
        finished = run("", words[1:])
        # A diagnosis says by 4 that a run is not as predicted.
        allowed = (0, 4) if words[1] == "diagnose" else (0,)
        assert finished.code in allowed, f"{name}: {shlex.join(words)}\n{finished.err}"


@pytest.mark.parametrize("name", CALLS)
def test_every_printed_command_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what people copy: each command that is printed, and each change that is said to fit, ends with 0."""
    monkeypatch.chdir(tmp_path)
    check(name, *CALLS[name], tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MORE)
def test_every_printed_command_of_larger_searches_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the same of searches that take longer."""
    monkeypatch.chdir(tmp_path)
    check(name, *MORE[name], tmp_path)


def test_a_change_of_stages_costs_what_its_row_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the pins of stages without interleaving: a command that left it open found other stages, and another step
    and memory than the row of the change."""
    monkeypatch.chdir(tmp_path)
    parallel = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 64"
    (tmp_path / "run.sh").write_text(SCRIPT.replace("--global-batch-size 64", parallel), "utf-8")
    call = "explain --from-command run.sh --machine dgx-h100 --format json"
    explained = json.loads(good(call).out)
    good(explained["run"]["model_command"].removeprefix("axonn-tune "))
    assert len(explained["changes"]) >= 3
    for change in explained["changes"]:
        words = [word for word in shlex.split(change["command"])[1:] if word not in ("-o", "run.sh")]
        found = json.loads(good("", [*words, "--format", "json"]).out)["configs"][0]
        assert found["iteration_s"] == pytest.approx(change["step_s"], rel=1e-6), words
        assert found["memory_bytes"] == pytest.approx(change["memory_bytes"], rel=1e-6), words
