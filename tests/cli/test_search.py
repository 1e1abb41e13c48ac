"""The main job as a user meets it: what its numbers add up to, and what each option changes. Its text is golden."""

from __future__ import annotations

import csv
import io
import math
import re
from itertools import pairwise
from math import ceil, prod
from pathlib import Path
from typing import Any, get_args

import pytest
from click.shell_completion import ShellComplete

import axonn_tune
from axonn_tune.cli.main import cli
from axonn_tune.cost.paper import PaperBackend, price_paper
from axonn_tune.grid import AXES, factorizations
from axonn_tune.ranking.loop import Loop
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.document import to_yaml
from axonn_tune.specs.workload import Workload
from tests import searches
from tests.cli.running import good, run

pytestmark = pytest.mark.usefixtures("shared_searches")


@pytest.fixture(scope="module")
def ranking() -> Any:
    """All of an 80b model on 64 GPUs of a machine it fits on, rejected grids too."""
    return good("--gpus 64 --model 80b --machine dgx-h100 --batch 64 --top 0 --all --format json").document


def test_every_grid_is_there_once_with_its_numbers_or_its_reasons(ranking: Any) -> None:
    """Guards the contract: terms fold to the total to the bit, intervals hold the step, MFU by hand."""
    configs, model = ranking["configs"], ranking["model"]
    assert len({tuple(config[axis] for axis in AXES) for config in configs}) == ranking["searched"]["grids"]
    assert len(configs) == len(factorizations(64))
    h, layers, tokens = model["hidden"], model["layers"], 64 * 2048
    flops = 3 * tokens * (2 * (layers * 12 * h * h + model["vocab"] * h) + 4 * 2048 * h * layers)
    peak = ranking["machine"]["accelerator"]["peak_tflops"]["bf16"] * 1e12 * 64
    rejected = [config for config in configs if not config["feasible"]]
    for config in (config for config in configs if config["feasible"]):
        assert prod(config[axis] for axis in AXES) == 64
        assert sorted(config["order"].split(",")) == sorted(AXES)
        total = 0.0
        for term in config["terms"]:
            total += term["seconds"]
        assert total == config["communication_s"]
        assert config["low_s"] < config["iteration_s"] < config["high_s"]
        assert config["tokens_per_s"] == tokens / config["iteration_s"]
        assert config["mfu"] == pytest.approx(flops / config["iteration_s"] / peak, rel=1e-12)
        assert config["mfu"] <= config["hfu"] <= 1
    assert rejected
    assert all(config["rank"] is None and config["rejected_because"] for config in rejected)
    names = {reason.partition(":")[0] for config in rejected for reason in config["rejected_because"]}
    assert names == set(ranking["searched"]["rejected"])
    assert all(len(ranking[kind]["sha256"]) == 64 for kind in ("model", "machine"))


@pytest.mark.parametrize(
    ("rank_by", "key"),
    [("communication", "communication_s"), ("exposed", "exposed_communication_s"), ("iteration", "iteration_s")],
)
def test_ranked_by_what_was_asked_for(rank_by: str, key: str) -> None:
    """Guards the order of rows: the metric never falls, ranks count from 1."""
    configs = good(f"--gpus 64 --model 20b --rank-by {rank_by} --top 0 --format json").document["configs"]
    assert [config["rank"] for config in configs] == list(range(1, len(configs) + 1))
    assert all(before[key] <= after[key] for before, after in pairwise(configs))


def test_limits_reach_the_search() -> None:
    """Guards pins: every listed config has what was asked for, and grids left out say so."""
    line = "--gpus 64 --model 20b --z 16 --order z,x,y,data --recompute full --micro-batch 2 --kept-layers 1 --all"
    found = good(f"{line} --top 0 --format json").document
    feasible = [config for config in found["configs"] if config["feasible"]]
    keys = ("z", "recompute", "micro_batch", "kept_layers", "order")
    assert {tuple(config[key] for key in keys) for config in feasible} == {(16, "full", 2, 1, "z,x,y,data")}
    assert any("pinned: asked for z = 16" in str(config["rejected_because"]) for config in found["configs"])


@pytest.mark.parametrize("command", ["search", "explain"])
def test_kept_layers_without_sharded_ones_are_remarked(command: str) -> None:
    """Guards an option that has no effect in what is shown, and silence where it has one."""
    said, line = "--kept-layers 1 changes nothing here", f"{command} --gpus 8 --model 5b --kept-layers 1"
    for z, silent in ((1, False), (2, True)):
        done = good(f"{line} --z {z}")
        assert (said not in done.out + done.err) == silent


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ("--batch 128", "global_batch", 128),
        ("--seq 1024", "sequence_length", 1024),
        ("--precision fp32", "precision", "fp32"),
        ("--shard-optimizer", "shard_optimizer_over_data", True),
        ("--no-shard-optimizer", "shard_optimizer_over_data", False),
        ("--split-micro-batch", "split_micro_batch", True),
        ("--no-overlap", "overlaps", []),
        ("--overlap output --overlap gather_prefetch", "overlaps", ["gather_prefetch", "output"]),
        ("--no-overlap data_parallel --overlap output --overlap data_parallel", "overlaps", ["output"]),
        ("--set workload.global_batch=256", "global_batch", 256),
    ],
)
def test_workload_options(given: str, key: str, value: object) -> None:
    """Guards the options of the workload: each arrives where the cost model reads it."""
    found = good(f"--gpus 16 --model 5b {given} --top 1 --format json").document
    config = found["configs"][0]
    assert found["workload"][key] == value
    assert config["overlap"] == found["workload"]["overlaps"]
    if given == "--no-overlap":
        assert config["iteration_s"] == pytest.approx(config["compute_s"] + config["communication_s"], rel=1e-9)


def test_set_changes_documents() -> None:
    """Guards --set: one value of the model or machine, with the hash changed."""
    plain, changed = (
        good(f"--gpus 16 --model 5b {extra} --top 1 --format json").document
        for extra in ("", "--set model.layers=48 --set machine.tiers.slingshot.bandwidth_gb_per_s=20")
    )
    assert changed["model"]["layers"] == 48
    assert changed["machine"]["tiers"][1]["bandwidth_gb_per_s"] == 20
    assert plain["machine"]["sha256"] != changed["machine"]["sha256"]
    line, wider = "--gpus 16 --model 5b --set machine.tiers.nvlink.ranks=8", "bandwidth_gb_per_s=200"
    said, whole = (good(f"{line}{more}").err for more in ("", f" --set machine.tiers.slingshot.{wider}"))
    assert "Assumed: tiers.slingshot.bandwidth_gb_per_s scaled: from 65.8 to 131.6 GB/s" in said
    assert "slingshot.bandwidth_gb_per_s scaled" not in whole


@pytest.mark.parametrize(("given", "tokens"), [("1.5T", 1.5e12), ("300b", 3e11), ("1,000,000", 1e6)])
def test_a_whole_training_is_costed(given: str, tokens: float) -> None:
    """Guards --tokens-total: steps, GPU-hours, node-hours and days by hand, with what goodput takes of them."""
    for config in good(f"--gpus 64 --model 20b --batch 512 --top 2 --tokens-total {given} --format json").document[
        "configs"
    ]:
        steps = ceil(tokens / (512 * 2048))
        assert config["steps"] == steps
        elapsed_s = steps * config["iteration_s"] / config["goodput"]
        for name, per_s in (("gpu_hours", 64 / 3600), ("node_hours", 16 / 3600), ("days", 1 / 86400)):
            assert config[name] == pytest.approx(elapsed_s * per_s)
            # The interval of the step, and a little more.
            for end, key in (("_low", "low_s"), ("_high", "high_s")):
                of_step, own = config[key] / config["iteration_s"], config[name + end] / config[name]
                assert abs(own - 1.0) >= abs(of_step - 1.0) * (1.0 - 1e-9)
                # One step alone has a checkpoint, too, and its restart.
                assert steps == 1 or own == pytest.approx(of_step, rel=0.02)


def test_csv_holds_what_json_does() -> None:
    """Guards CSV: same values, every digit; and that no command and `search` are one."""
    line = "--gpus 64 --model 20b --top 5 --format"
    rows = list(csv.DictReader(io.StringIO(good(f"search {line} csv").out)))
    configs = good(f"{line} json").document["configs"]
    assert len(rows) == len(configs) == 5
    for row, config in zip(rows, configs, strict=True):
        for name in (*AXES, "communication_s", "iteration_s", "low_s", "mfu", "hfu", "memory_bytes"):
            assert float(row[name]) == config[name]


@pytest.mark.parametrize("more", ["", "--wide", "--all", "--cost alpha-beta --cost paper", "--tokens-total 1.5T"])
def test_tables_are_whole_without_a_terminal(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards Slurm logs: nothing is cut at a narrow COLUMNS or a dumb terminal, no color, 100 columns suffice."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "dumb")
    finished = good(f"--gpus 1024 --model 80b -q {more}")
    assert finished.err == ""
    assert len([line for line in finished.out.splitlines() if line[:3].strip().isdigit()]) >= 10
    assert "…" not in finished.out
    assert "\x1b" not in finished.out
    if more not in ("--wide", "--all"):
        assert max(map(len, finished.out.splitlines())) <= 100


@pytest.mark.parametrize("backend", get_args(PaperBackend))
@pytest.mark.parametrize("machine", ["perlmutter", "frontier"])
def test_paper_costs_are_the_papers(backend: PaperBackend, machine: str) -> None:
    """Guards --cost paper*: each grid, rejected or not, has the time of the paper's model, and its terms."""
    line = f"--gpus 64 --model 40b --machine {machine} --batch 1024 --cost {backend} --all --top 0 --format json"
    found = good(line).document
    assert len(found["configs"]) == len(factorizations(64))
    model, profile = load_model("40b").document, load_machine(machine).document
    for config in found["configs"]:
        assert sum(term["seconds"] for term in config["terms"]) == pytest.approx(config["communication_s"] or 0.0)
        prices = price_paper(
            backend,
            model=model,
            machine=profile,
            workload=Workload(global_batch=1024, sequence_length=2048),
            **{axis: config[axis] for axis in AXES},
        )
        expected = None if prices.rejected[0] else float(prices.communication_s[0])
        assert config["communication_s"] == expected
        assert expected is not None or any("no-bandwidth-entry" in reason for reason in config["rejected_because"])


def test_every_grid_the_released_script_knows_is_there() -> None:
    """Guards --all with a model that fits nowhere: the paper's times are printed, the exit code says so."""
    finished = run("--gpus 32 --model 160b --cost paper-released --all --top 0 --format json")
    assert finished.code == 3
    configs = finished.document["configs"]
    assert len(configs) == len(factorizations(32))
    assert all(config["communication_s"] is not None and not config["feasible"] for config in configs)


def test_several_costs_show_where_they_disagree() -> None:
    """Guards --cost twice: the first ranks, the other's rank of each grid stands beside."""
    both = good("--gpus 256 --model 40b --cost alpha-beta --cost paper --top 0 --format json").document
    alone = good("--gpus 256 --model 40b --cost paper --top 0 --format json").document
    ranks = {tuple(config[axis] for axis in AXES): config["rank"] for config in alone["configs"]}
    assert both["cost"] == "alpha-beta"
    for config in both["configs"]:
        assert config["ranks"] == {"paper": ranks.get(tuple(config[axis] for axis in AXES))}


@pytest.mark.nightly
def test_what_no_published_step_validates_is_marked() -> None:
    """Guards marks: 64k GPUs and an accelerator without a row, in the table, in JSON and in one remark."""
    line = "--gpus 65536 --model 320b --machine frontier --rank-by step --recompute full --top 3"
    done = good(f"{line} -v")
    assert done.out.count("°") >= 3
    assert "° beyond what published steps validate." in " ".join(good(line).out.split())
    assert "largest number of GPUs in the data" in " ".join(done.err.split())
    configs = good(f"{line} --format json").document["configs"]
    assert configs[0]["outside_evidence"] == ["gpus", "accelerator"]
    line = "--gpus 64 --model 20b --framework megatron-core --pp 1 --gtp 1"
    listed = {top: good(f"{line} -v --top {top}") for top in (3, 0)}
    assert {top: ("\n°:" in f"\n{done.err}", "°" in done.out) for top, done in listed.items()} == {
        3: (False, False),
        0: (True, True),
    }, "the remark is of the rows that are listed"
    assert "largest CP in the data" in " ".join(listed[0].err.split())
    line = "--gpus 64 --model mixtral-8x7b --machine dgx-h100 --framework megatron-core --batch 128 -v"
    for more, marked in (("--seq 32768", False), ("--seq 131072", True), ("--seq 131072 --unfold", True)):
        done = good(f"{line} {more}")
        assert ("°" in done.out, "\n°:" in done.err) == (marked,) * 2, (
            "CP 16 is among the fastest of long sequences alone"
        )


def test_columns_differ_or_are_said_once() -> None:
    """Guards tables: what all rows have stands above, what differs in a column, throughput in each row."""
    line = "--gpus 256 --model llama3-8b --machine dgx-h100 --framework torchtitan --seq 16384 -q"
    title, _, body = good(line).out.partition("In all rows: ")
    assert "torchtitan" in title
    assert body.startswith("tp 1, pp 1, vpp 1, micro-batch 1.")
    assert {"none", "selective"} <= set(body.split())
    head = next(row for row in good(f"{line} --format md").out.splitlines() if row.startswith("| rank"))
    assert head.index("tokens") < head.index("MFU") < head.index("TFLOP/s in log, /GPU") < head.index("exposed, s")
    alone = good(f"{line} --top 1").out
    assert "Also: tp 1, pp 1, vpp 1, micro-batch 1, recompute none." in alone
    assert alone.splitlines()[-1].split()[:4] == ["1", "32", "4", "2"]
    line = "--gpus 64 --model llama3-70b --machine dgx-h100 --framework megatron-core --tp 16 --pp 4 --batch 64 --top 1"
    searched = good(f"{line} --format json").document["searched"]
    assert searched["feasible"] <= searched["candidates"]


@pytest.mark.nightly
def test_layouts_that_exchange_equal_factors_are_one_row() -> None:
    """Guards folding: rows with equal tokens a micro-batch and equal shards are named in the first, JSON has them all.

    --unfold and --variants list them, and the rank is that of --pick.
    """
    line = "--gpus 256 --model llama3-70b --machine dgx-h100 --framework megatron-core --top 40"
    configs = good(f"{line} --format json").document["configs"]
    shown, unfolded = (table_ranks(good(f"{line} -q{more}").out) for more in ("", " --unfold"))
    assert unfolded == [config["rank"] for config in configs] == list(range(1, 41))
    assert shown[0] == 1
    assert len(shown) < 35
    for config in configs:
        if config["rank"] in shown:
            head, tokens = config, config["micro_batch"] / config["context"]
            heads = [one for one in configs if one["rank"] in shown and one["rank"] < config["rank"]]
            assert all(key_of(one) != key_of(config) or not tied(one, config) for one in heads)
        else:
            heads = [one for one in configs if one["rank"] in shown and key_of(one) == key_of(config)]
            head = next(one for one in heads if tied(one, config))
            tokens = config["micro_batch"] / config["context"]
            assert head["micro_batch"] / head["context"] == tokens
            assert config["data"] * config["context"] == head["data"] * head["context"]
    assert "#1 vs. #2:" not in good(line).err


def table_ranks(text: str) -> list[int]:
    """Ranks of the rows of a table."""
    return [int(line.split()[0]) for line in text.splitlines() if line[:3].strip().isdigit()]


def key_of(config: Any) -> tuple[object, ...]:
    """What is the same of rows of one family."""
    names = ("x", "z", "pipeline", "chunks", "recompute", "kept_layers")
    return (*(config[name] for name in names), config["micro_batch"] / config["context"])


def tied(one: Any, other: Any) -> bool:
    """Whether two steps are within model error: 5% of each, and 30% of exposed communication."""
    halves = [
        math.hypot(0.05 * config["iteration_s"], 0.3 * config["exposed_communication_s"]) for config in (one, other)
    ]
    return abs(one["iteration_s"] - other["iteration_s"]) <= math.hypot(*halves)


def test_what_to_do_next_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the last line: words to add to this command line, and a script only where there is one."""
    monkeypatch.setenv("COLUMNS", "100")
    line = "--gpus 64 --model llama3-8b --machine dgx-h100 --framework torchtitan --tp 2 --top 2"
    last = good(line).err.splitlines()[-1]
    assert last == (
        "Next: explain (where the time goes), compare (other frameworks), --emit slurm (a script), -v (more)"
    )
    assert good(f"{line} -v").err.splitlines()[-1] == last.removesuffix(", -v (more)")
    assert "--emit" not in good("--gpus 12 --model nano-moe --machine dgx-h100 --framework megatron-core").err
    for word in ("explain", "compare"):
        good(f"{word} {line}".replace(" --top 2", ""))


LISTED = (
    "--gpus 64 --model llama3-70b --machine dgx-h100 --framework megatron-core",
    "--gpus 64 --model qwen3-30b-a3b --machine dgx-h100 --framework megatron-core --ep 8",
    "--gpus 64 --model llama3-70b --machine dgx-h100 --framework torchtitan --tp 8",
    "--gpus 16 --model llama3-8b --machine dgx-h100 --framework fsdp",
    "--gpus 8 --model llama3-8b",
)


@pytest.mark.parametrize("line", LISTED)
@pytest.mark.parametrize("width", [100, 80])
def test_a_search_is_a_table_and_five_lines(line: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what a terminal shows: no longer line, no hyphenated heading, the log's TFLOP/s, and what to do next."""
    monkeypatch.setenv("COLUMNS", str(width))
    done = good(line)
    shown, said = done.out.splitlines(), done.err.strip().splitlines()
    assert max(map(len, [*shown, *said])) <= width
    head = shown[next(at for at, row in enumerate(shown) if row.startswith(("rank", " rank"))) - 1 :][:3]
    assert not any(word.endswith("-") for row in head for word in row.split())
    assert ("TFLOP/s" in " ".join(head)) == ("--framework" in line)
    assert len([row for row in said if not row.startswith("  ")]) <= 5
    assert width < 100 or len(said) <= 6
    assert said[0].startswith(("Benchmark #1", "Run #1", "* "))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    """Guards `completion`: a script that calls the tool back, which knows options and names before any command."""
    assert "_AXONN_TUNE_COMPLETE" in good(f"completion {shell}").out
    asked = ShellComplete(cli, {}, "axonn-tune", "_AXONN_TUNE_COMPLETE")
    for before, start, found in (
        ([], "--mo", "--model"),
        (["--model"], "gpt", "gpt3-175b"),
        ([], "sw", "sweep"),
        (["machines", "show"], "front", "frontier"),
    ):
        assert found in [item.value for item in asked.get_completions(before, start)]


def test_mfu_stays_where_a_terminal_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards terminals of 80, 100 and 120 characters: all lines fit, MFU is there in each."""
    found, shown = axonn_tune.search("20b", 64, pipeline=True), list[str]()
    for width in (80, 100, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        shown.append(re.sub("\x1b\\[[0-9;]*m", "", found.render("table", top=5, terminal=width, color=True)))
        assert max(map(len, shown[-1].splitlines())) <= width
        assert "MFU" in shown[-1]
    assert ["exposed" in text for text in shown] == [False, True, True]


@pytest.mark.parametrize(
    ("more", "said"), [("--seq 1024", True), ("--seq 2048", False), ("--seq 1024 --batch 8", False)]
)
def test_another_length_without_a_batch_is_said(more: str, said: bool) -> None:
    """Guards `--seq` alone, which changes the tokens of a step: 5b has 8,192 sequences of 2,048 by default."""
    words = (
        "--seq 1,024 without --batch keeps 8,192 sequences: 8.39 million tokens a step, 0.5 times the model's default."
    )
    assert (words in " ".join(good(f"--gpus 8 --model 5b {more}").err.split())) == said


def test_a_rank_beyond_the_table_is_searched_for() -> None:
    """Guards --pick and explain: a rank below the listed ones is that of a longer ranking; one beyond all is named."""
    line = "--gpus 8 --model nano --machine localhost --precision fp32"
    listed = good(f"{line} --top 12 --format json").document
    twelfth = listed["configs"][11]
    explained = good(f"explain {line} --pick 12 --format json").document
    assert explained["config"]["iteration_s"] == twelfth["iteration_s"]
    assert axonn_tune.search("nano", 8, machine="localhost", precision="fp32", top=3).explain(12).entry.rank == 12
    count = 12 + listed["searched"]["unlisted"]
    assert f"only {count} configurations are ranked" in run(f"explain {line} --pick {count + 1}").err


def test_an_interrupted_search_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards Ctrl-C: what was found is printed with a line that says so, and the exit code is that of an interrupt."""

    def interrupted(loop: Loop, until_s: float) -> None:
        settle(loop, until_s)
        raise KeyboardInterrupt

    settle = Loop._settle
    monkeypatch.setattr(searches, "folder", None)
    monkeypatch.setattr(Loop, "_settle", interrupted)
    line = "--gpus 64 --model 20b --seq 1024"
    shown = run(line)
    assert shown.code == 130
    assert "\n 1  " in shown.out
    assert "Interrupted: the rest was not searched" in shown.err
    quiet = run(f"{line} --format json")
    assert (quiet.code, quiet.document["interrupted"]) == (130, True)
    assert "Interrupted: the rest was not searched" in quiet.err
    assert run(f"explain {line}").code == 130


@pytest.mark.parametrize("framework", ["megatron-core", "axonn-tune"])
def test_a_script_of_another_network_is_asked_for(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards models whose norms are elsewhere (OLMo-2, Gemma 3): no script without --approximate, and a warning with
    it, which the next step that is printed has."""
    monkeypatch.chdir(tmp_path)
    model = load_model("nano-llama").document.model_copy(update={"approximated": ("norms after attention and MLP",)})
    Path("other.yaml").write_text(to_yaml(model), "utf-8")
    words = f"--gpus 4 --model other.yaml --machine dgx-h100 --framework {framework}"
    assert "--approximate (a script)" in " ".join(good(words).err.split())
    refused = run(f"{words} --emit torchrun")
    assert (refused.code, "has norms after attention and MLP: what is written would train" in refused.err) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["other.yaml"]
    written = good(f"{words} --emit torchrun --approximate")
    assert "Warning: what was written trains another network" in written.err
    assert "Warning" not in good(f"{words.replace('other.yaml', 'nano-llama')} --emit torchrun --approximate").err
    assert run(f"{words} --approximate").code == 2
