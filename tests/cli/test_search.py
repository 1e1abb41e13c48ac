"""The main job as a user meets it: the ranking, its formats, its JSON contract."""

from __future__ import annotations

import csv
import io
from itertools import pairwise
from math import ceil, prod
from pathlib import Path
from typing import Any, get_args

import pytest

from axonn_tune.cost.paper import PaperBackend, price_paper
from axonn_tune.grid import AXES, factorizations
from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.inputs import Choices, load_inputs
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.workload import Workload
from tests.cli.running import good, run

NUMBER = (int, float)
OPTIONAL = (int, float, type(None))
CONTRACT: dict[str, Any] = {
    "schema": str, "gpus": int, "model": dict, "machine": dict, "workload": dict, "cost": str,
    "searched": {"grids": int, "candidates": int, "feasible": int, "rejected": dict, "seconds": float},
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "rank": int, "x": int, "y": int, "z": int, "data": int, "order": str, "feasible": bool,
    "rejected_because": list, "micro_batch": int, "grad_accumulation": int, "recompute": str, "kept_layers": int,
    "overlap": list, "communication_s": NUMBER, "exposed_communication_s": NUMBER, "compute_s": NUMBER,
    "iteration_s": NUMBER, "memory_bytes": NUMBER, "tokens_per_s": NUMBER, "low_s": NUMBER, "high_s": NUMBER,
    "mfu": NUMBER, "hfu": NUMBER, "terms": list,
}  # fmt: skip
TERM: dict[str, Any] = {
    "op": str, "axis": str, "phase": str, "layer": str, "count": int, "bytes": NUMBER, "group": int, "tier": str,
    "seconds": NUMBER, "exposed_s": OPTIONAL,
}  # fmt: skip


def follows(found: dict[str, Any], contract: dict[str, Any]) -> None:
    """Every key of the contract is there, with its type."""
    for key, kind in contract.items():
        assert key in found
        if isinstance(kind, dict):
            follows(found[key], kind)
        else:
            assert isinstance(found[key], kind), key


@pytest.fixture(scope="module")
def ranking() -> Any:
    """All of an 80b model on 64 GPUs of a machine it fits on, rejected grids too."""
    return good("--gpus 64 --model 80b --machine dgx-h100 --batch 64 --top 0 --all --format json").document


def test_json_follows_the_contract(ranking: Any) -> None:
    """Guards the contract other programs read: keys and types of the document, its configs and their terms."""
    follows(ranking, CONTRACT)
    assert ranking["schema"] == "axonn-tune/ranking/1"
    feasible = [config for config in ranking["configs"] if config["feasible"]]
    assert feasible
    for config in feasible:
        follows(config, CONFIG)
        assert config["rejected_because"] == []
        for term in config["terms"]:
            follows(term, TERM)


def test_json_carries_whole_documents(ranking: Any) -> None:
    """Guards provenance: the inputs are in the output, with file and hash."""
    assert ranking["model"]["hidden"] == 12288
    assert ranking["machine"]["tiers"]
    assert ranking["workload"]["global_batch"] == 64
    for kind in ("model", "machine"):
        assert Path(ranking[kind]["path"]).is_file()
        assert len(ranking[kind]["sha256"]) == 64


def test_rejected_grids_have_reasons(ranking: Any) -> None:
    """Guards --all: every grid is there once, the rejected without rank and with reasons."""
    configs = ranking["configs"]
    assert len(configs) == ranking["searched"]["grids"]
    assert len({tuple(config[axis] for axis in AXES) for config in configs}) == len(configs)
    rejected = [config for config in configs if not config["feasible"]]
    assert rejected
    for config in rejected:
        assert config["rank"] is None
        assert config["rejected_because"]
        assert all(": " in reason for reason in config["rejected_because"])
    names = {reason.partition(":")[0] for config in rejected for reason in config["rejected_because"]}
    assert names == set(ranking["searched"]["rejected"])


@pytest.mark.parametrize("gpus", [1, 6, 64, 96])
def test_every_grid_is_counted_and_multiplies_out(gpus: int) -> None:
    """Guards the search space: all ordered factorizations, and nothing else."""
    found = good(f"--gpus {gpus} --model nano --machine dgx-a100 --top 0 --all --format json").document
    assert found["searched"]["grids"] == len(factorizations(gpus))
    assert all(prod(config[axis] for axis in AXES) == gpus for config in found["configs"])
    assert all(sorted(config["order"].split(",")) == sorted(AXES) for config in found["configs"] if config["feasible"])


def test_communication_is_the_sum_of_its_terms(ranking: Any) -> None:
    """Guards the contract: the total is the left fold of the terms' seconds, to the bit."""
    for config in ranking["configs"]:
        if config["feasible"]:
            total = 0.0
            for term in config["terms"]:
                total += term["seconds"]
            assert total == config["communication_s"]


def test_terms_and_columns_agree(ranking: Any) -> None:
    """Guards the twin: what was ranked by is exactly what the terms of each config add up to."""
    chosen = Choices(gpus=64, model="80b", machine="dgx-h100")
    inputs = load_inputs(chosen)
    workload = Workload(global_batch=64, sequence_length=2048)
    found = search(type(inputs.problem)(inputs.problem.model, inputs.problem.machine, workload, 64))
    configs = [config for config in ranking["configs"] if config["feasible"]]
    assert len(configs) == len(found)
    for position, config in enumerate(configs):
        candidate, pricing = found.candidate(position), found.price(position)
        for name in ("communication_s", "compute_s", "iteration_s"):
            assert config[name] == getattr(candidate, name) == getattr(pricing, name)
        assert config["memory_bytes"] == candidate.memory_bytes == pricing.memory.total_bytes
        assert config["hfu"] * config["iteration_s"] == pytest.approx(
            pricing.executed_flops / inputs.problem.machine.accelerator.peak_flops_per_s("bf16"), rel=1e-12
        )


@pytest.mark.parametrize(
    ("rank_by", "key"),
    [("communication", "communication_s"), ("exposed", "exposed_communication_s"), ("iteration", "iteration_s")],
)
def test_ranked_by_what_was_asked_for(rank_by: str, key: str) -> None:
    """Guards the order of rows: the metric never falls, ranks count from 1."""
    configs = good(f"--gpus 64 --model 20b --rank-by {rank_by} --top 0 --format json").document["configs"]
    assert [config["rank"] for config in configs] == list(range(1, len(configs) + 1))
    assert all(before[key] <= after[key] for before, after in pairwise(configs))


def test_intervals_and_utilisation(ranking: Any) -> None:
    """Guards derived numbers: the interval holds the prediction; MFU by hand."""
    tokens, model = 64 * 2048, ranking["model"]
    h, layers = model["hidden"], model["layers"]
    forward = 2 * (layers * 12 * h * h + model["vocab"] * h) + 4 * 2048 * h * layers
    for config in ranking["configs"]:
        if config["feasible"]:
            assert config["low_s"] < config["iteration_s"] < config["high_s"]
            assert config["tokens_per_s"] == tokens / config["iteration_s"]
            peak = ranking["machine"]["accelerator"]["peak_tflops"]["bf16"] * 1e12 * 64
            assert config["mfu"] == pytest.approx(3 * forward * tokens / config["iteration_s"] / peak, rel=1e-12)
            assert config["mfu"] <= config["hfu"] <= 1


def test_limits_reach_the_search() -> None:
    """Guards pins: every listed config has what was asked for, and grids left out say so."""
    line = "--gpus 64 --model 20b --z 16 --order z,x,y,data --recompute full --micro-batch 2 --kept-layers 1 --all"
    found = good(f"{line} --top 0 --format json").document
    feasible = [config for config in found["configs"] if config["feasible"]]
    assert feasible
    for config in feasible:
        assert (config["z"], config["recompute"], config["micro_batch"], config["kept_layers"]) == (16, "full", 2, 1)
        assert config["order"] == "z,x,y,data"
    assert any("pinned: asked for z = 16" in str(config["rejected_because"]) for config in found["configs"])
    assert found["searched"]["rejected"]["pinned"] > 0


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
        ("--set precision=fp32", "precision", "fp32"),
    ],
)
def test_workload_options(given: str, key: str, value: object) -> None:
    """Guards the options of the workload: each arrives where the cost model reads it."""
    found = good(f"--gpus 16 --model 5b {given} --top 1 --format json").document
    assert found["workload"][key] == value
    assert found["configs"][0]["overlap"] == found["workload"]["overlaps"]


def test_set_changes_documents() -> None:
    """Guards --set: one value of the model or machine, with the hash changed."""
    plain, changed = (
        good(f"--gpus 16 --model 5b {extra} --top 1 --format json").document
        for extra in ("", "--set model.layers=48 --set machine.tiers.slingshot.bandwidth_gb_per_s=20")
    )
    assert changed["model"]["layers"] == 48
    assert changed["machine"]["tiers"][1]["bandwidth_gb_per_s"] == 20
    assert plain["machine"]["sha256"] != changed["machine"]["sha256"]


def test_no_overlap_exposes_everything() -> None:
    """Guards the meaning of --no-overlap: the step is computing plus communicating."""
    config = good("--gpus 64 --model 20b --no-overlap --top 1 --format json").document["configs"][0]
    assert config["iteration_s"] == pytest.approx(config["compute_s"] + config["communication_s"], rel=1e-9)


@pytest.mark.parametrize(("given", "tokens"), [("1.5T", 1.5e12), ("300b", 3e11), ("2e9", 2e9), ("1,000,000", 1e6)])
def test_a_whole_training_is_costed(given: str, tokens: float) -> None:
    """Guards --tokens-total: steps, GPU-hours, node-hours and days by hand, with the interval of the step."""
    line = f"--gpus 64 --model 20b --batch 512 --top 2 --tokens-total {given} --format"
    for config in good(f"{line} json").document["configs"]:
        steps = ceil(tokens / (512 * 2048))
        assert config["steps"] == steps
        for end, key in (("", "iteration_s"), ("_low", "low_s"), ("_high", "high_s")):
            assert config[f"gpu_hours{end}"] == pytest.approx(steps * config[key] * 64 / 3600)
            assert config[f"node_hours{end}"] == pytest.approx(steps * config[key] * 16 / 3600)
            assert config[f"days{end}"] == pytest.approx(steps * config[key] / 86400)
    assert "gpu_hours,gpu_hours_low,gpu_hours_high" in good(f"{line} csv").out.splitlines()[0]
    assert "gpu_hours" not in good("--gpus 64 --model 20b --format csv").out


def test_tokens_of_a_training_reach_every_command() -> None:
    """Guards --tokens-total of sweep, compare and explain, its columns within a line, and what it refuses."""
    table = good("--gpus 1024 --model 80b --tokens-total 1.5T")
    assert max(map(len, table.out.splitlines())) <= 100
    assert "#1: 1.5T tokens are 89,407 steps: " in table.err
    for line in ("sweep --gpus 64,128 --model 5b", "compare --gpus 16 --model 5b --batch 64"):
        assert "GPU-" in good(f"{line} --tokens-total 1T").out
    assert "1T tokens are" in " ".join(good("explain --gpus 64 --model 5b --tokens-total 1T").out.split())
    for wrong in ("0", "1.5X", "many", "1e30"):
        refused = run(f"--gpus 64 --model 5b --tokens-total {wrong}")
        assert refused.code == 2
        assert "such as 300B, 1.5T" in refused.err


def test_variants_list_every_candidate() -> None:
    """Guards --variants: as many rows as candidates were priced."""
    found = good("--gpus 2 --model nano --machine dgx-a100 --variants --top 0 --format json").document
    assert len(found["configs"]) == found["searched"]["feasible"] > found["searched"]["grids"]


def test_columns_without_room_and_uneven_splits_are_counted() -> None:
    """Guards silence: what a narrow table leaves out is named, and candidates include the uneven splits that fit."""
    narrow = good("--gpus 64 --model llama3-8b --machine dgx-h100 --framework torchtitan --tp 2 --pp 1 --top 2")
    assert "No room for not resharded: --wide shows all." in narrow.err
    wide = "--gpus 64 --model llama3-70b --machine dgx-h100 --framework megatron-core --tp 16 --pp 4 --batch 64 --wide"
    done = good(f"{wide} --top 1")
    assert "No room" not in done.err
    feasible, candidates = (
        int(good(f"{wide.removesuffix(' --wide')} --format json --top 1").document["searched"][key])
        for key in ("feasible", "candidates")
    )
    assert feasible <= candidates


@pytest.mark.parametrize("wide", ["", "--wide", "--cost alpha-beta --cost paper-released"])
def test_table_is_whole_without_a_terminal(wide: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards Slurm logs: nothing is cut at a narrow COLUMNS or a dumb terminal, and nothing colored."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "dumb")
    out = good(f"--gpus 1024 --model 80b {wide}").out
    rows = [line for line in out.splitlines() if line.split()[0].isdigit()]
    assert len(rows) == 10
    assert "…" not in out
    assert "\x1b" not in out
    if not wide:
        assert max(map(len, out.splitlines())) <= 100


def test_csv_holds_what_json_does() -> None:
    """Guards CSV: same values, every digit."""
    line = "--gpus 64 --model 20b --top 5 --format"
    rows = list(csv.DictReader(io.StringIO(good(f"{line} csv").out)))
    configs = good(f"{line} json").document["configs"]
    assert len(rows) == len(configs) == 5
    for row, config in zip(rows, configs, strict=True):
        for name in ("communication_s", "iteration_s", "low_s", "mfu", "hfu", "memory_bytes"):
            assert float(row[name]) == config[name]
        assert [int(row[axis]) for axis in AXES] == [config[axis] for axis in AXES]
        assert row["order"] == config["order"]


def test_markdown_and_columns() -> None:
    """Guards Markdown, and --columns in the order asked for."""
    lines = good("--gpus 64 --model 20b --format md --columns rank,grid,mfu --top 2").out.splitlines()
    assert lines[0].startswith("20b on 64 × perlmutter (A100-SXM4-40GB) with the bundled 4D runtime, ")
    assert " ".join(lines[2].split()) == "| rank | grid x y z data | MFU, % |"
    assert len([line for line in lines if line.startswith("| ") and "*" not in line]) == 4
    layouts = good("--gpus 64 --model 20b --framework megatron-core --format md --columns layout --top 1").out
    assert "| layout TP GTP PP VPP CP DP |" in " ".join(layouts.split())
    assert "no column 'mfuu', did you mean 'mfu'?" in run("--gpus 64 --model 20b --columns mfuu").err


def test_remarks_are_talk() -> None:
    """Guards the streams: the table alone on standard output, remarks on standard error unless --quiet."""
    finished = good("--gpus 1024 --model 80b")
    assert "#1 beats #2 by" in finished.err
    assert "grids are rejected: 56 out of memory, 35 heads not divisible by x" in finished.err
    assert "are within model error" in finished.err
    assert "beats" not in finished.out
    assert good("--gpus 1024 --model 80b -q").err == ""
    assert good("--gpus 1024 --model 80b --format json").err == ""


def test_search_and_the_bare_call_are_the_same() -> None:
    """Guards the main job: no command needed, --debug in front does not matter."""
    line = "--gpus 64 --model 20b --format csv"
    assert good(line).out == good(f"search {line}").out


def test_color_only_where_wanted() -> None:
    """Guards --color: headings bold, the best row green."""
    assert "\x1b[1m" in good("--gpus 8 --model nano --machine dgx-a100 --color").out
    assert "\x1b" not in good("--gpus 8 --model nano --machine dgx-a100 --no-color").out


# Paper costs.


@pytest.mark.parametrize("backend", get_args(PaperBackend))
@pytest.mark.parametrize("machine", ["perlmutter", "frontier"])
def test_paper_costs_are_the_papers(backend: PaperBackend, machine: str) -> None:
    """Guards --cost paper*: each grid, rejected or not, has the time of the paper's model, and its terms."""
    line = f"--gpus 256 --model 40b --machine {machine} --batch 1024 --cost {backend} --all --top 0 --format json"
    found = good(line).document
    assert found["cost"] == backend
    assert len(found["configs"]) == len(factorizations(256))
    for config in found["configs"]:
        assert sum(term["seconds"] for term in config["terms"]) == pytest.approx(config["communication_s"] or 0.0)
        prices = price_paper(
            backend,
            model=load_model("40b").document,
            machine=load_machine(machine).document,
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
    assert all(config["communication_s"] is not None for config in configs)
    assert not any(config["feasible"] for config in configs)


def test_paper_ranking_falls_back_on_our_model_for_the_rest() -> None:
    """Guards what the paper does not know: step time and memory are there, hidden parts of terms are not."""
    found = good("--gpus 256 --model 40b --cost paper --top 3 --format json --order x,y,z,data").document
    assert [config["order"] for config in found["configs"]] == ["x,y,z,data"] * 3
    for config in found["configs"]:
        follows(config, CONFIG)
        assert all(term["exposed_s"] is None for term in config["terms"])


def test_several_costs_show_where_they_disagree() -> None:
    """Guards --cost twice: the first ranks, the other's rank of each grid stands beside."""
    both = good("--gpus 256 --model 40b --cost alpha-beta --cost paper --top 0 --format json").document
    alone = good("--gpus 256 --model 40b --cost paper --top 0 --format json").document
    ranks = {tuple(config[axis] for axis in AXES): config["rank"] for config in alone["configs"]}
    assert both["cost"] == "alpha-beta"
    for config in both["configs"]:
        assert config["ranks"] == {"paper": ranks.get(tuple(config[axis] for axis in AXES))}


# Names.


def test_names_complete_without_a_command() -> None:
    """Guards shell completion: the search's options and names, before any command is typed."""
    from click.shell_completion import ShellComplete

    from axonn_tune.cli.main import cli

    shell = ShellComplete(cli, {}, "axonn-tune", "_AXONN_TUNE_COMPLETE")
    assert "--model" in [item.value for item in shell.get_completions([], "--mo")]
    assert [item.value for item in shell.get_completions(["--model"], "gpt")] == ["gpt3-175b"]
    assert "sweep" in [item.value for item in shell.get_completions([], "sw")]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    """Guards `completion`: a script that calls the tool back."""
    assert "_AXONN_TUNE_COMPLETE" in good(f"completion {shell}").out


@pytest.mark.parametrize(
    "more", ["", "--all", "--cost alpha-beta --cost paper", "--all --cost alpha-beta --cost paper"]
)
def test_tables_fit_a_line(more: str) -> None:
    """Guards tables on a terminal: what others need room for makes the less important columns go; reasons come last."""
    table = good(f"--gpus 64 --model 20b --top 3 -q {more}").out
    width = table.splitlines()[4].find("rejected because") if "--all" in more else max(map(len, table.splitlines()))
    assert 0 < width <= 102
    assert "x y  z data" in table
    assert "step" in table
