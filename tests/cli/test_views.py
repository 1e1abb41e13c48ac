"""`compare`, `sweep`, `explain` and `--from-command` as a user meets them: what their numbers add up to."""

from __future__ import annotations

import csv
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import axonn_tune
from axonn_tune.program.count import counted
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.loading import load_document
from axonn_tune.specs.model import Model
from tests.cli.running import good, run
from tests.unit.specs.test_hugging_face import GLM

pytestmark = pytest.mark.usefixtures("shared_searches")
COMMANDS = Path(__file__).parents[1] / "fixtures" / "commands"
TITAN = f"--from-command {COMMANDS / 'torchtitan-8b.sh'} --machine dgx-h100"
CORE = f"--from-command {COMMANDS / 'gpt-one-line.sh'} --machine dgx-h100"
CASE = "--gpus 64 --model 20b --x 2 --y 2 --z 4"


def table(text: str) -> list[dict[str, str]]:
    """Rows of CSV."""
    return list(csv.DictReader(text.splitlines()))


# compare


def test_what_separates_strategies_adds_up() -> None:
    """Guards the comparison: parts of each step sum to it, and the causes to the difference; pipelines included."""
    found = good("compare --gpus 64 --model llama3-70b --machine dgx-h100 --format json").document
    first, *others = [each for each in found["contenders"] if each["feasible"] and each["measured"]]
    assert (first["separated_by"], first["over_baseline"], found["baseline"]) == ([], 0.0, first["key"])
    assert any(each["prediction"]["pipeline"] > 1 for each in (first, *others))
    best = first["prediction"]
    parts = best["compute_s"] + best["exposed_communication_s"] + best["bubble_s"]
    assert best["iteration_s"] == pytest.approx(parts)
    assert sum(part["seconds"] for part in best["traffic"]) == pytest.approx(best["communication_s"])
    for each in (first, *others):
        causes, step_s = each["prediction"]["causes"], each["prediction"]["iteration_s"]
        assert sum(causes.values()) == pytest.approx(step_s)
        assert abs(causes["the rest"]) < 0.02 * step_s
        assert each["prediction"]["own_software_s"] == pytest.approx(each["prediction"]["iteration_s"], rel=1e-12)
    for each in others:
        longer = each["relative_step"] - 1.0
        named = [part["share"] for part in each["separated_by"] if part["what"] != "the rest"]
        assert sum(part["share"] for part in each["separated_by"]) == pytest.approx(longer, abs=6e-4), each["key"]
        assert abs(longer - sum(named)) < 0.02, "what is not named is little"


@pytest.mark.nightly
def test_software_that_was_not_measured_on_several_gpus_stands_apart() -> None:
    """Guards the best and the baseline: the bundled runtime is neither, however short its step, asked for or not."""
    case = "compare --gpus 64 --model qwen3-30b-a3b --machine dgx-h100 --batch 512 --seq 8192"
    for line in (case, f"{case} --framework axonn-tune"):
        found = good(f"{line} --format json").document
        *others, own = [one for one in found["contenders"] if one["feasible"] or one["key"] == "axonn-tune"]
        assert (own["key"], own["measured"]) == ("axonn-tune", False)
        assert own["over_baseline"] is own["relative_step"] is None
        assert own["prediction"]["iteration_s"] < min(one["prediction"]["iteration_s"] for one in others)
        assert found["baseline"] == others[0]["key"] == "megatron-core"
        assert found["verdict"][0].startswith("Megatron-Core has the shortest step")
        assert any(one.startswith("4D stands apart: ") for one in found["remarks"])
    shown = good(case).out
    assert "4D *" in shown
    assert "* not measured on several GPUs" in shown
    few = axonn_tune.compare("nano", gpus=2, machine="dgx-h100")
    alone = replace(few, comparison=replace(few.comparison, contenders=few.comparison.apart))
    assert (alone.baseline, alone.to_dict()["baseline"], alone.to_dict()["verdict"]) == (None, None, [])
    assert "baseline: -." in alone.render()
    assert all(one.measured for one in axonn_tune.compare("nano", gpus=1, machine="dgx-h100"))


@pytest.mark.nightly
def test_the_same_kernels_are_those_of_all() -> None:
    """Guards --same-kernels with experts: no numbers of a software's own, no faster attention of one of them.

    What routing does to experts is said for all, not for the framework named alone.
    """
    case = "compare --gpus 8 --model nano-moe --machine dgx-h100 --batch 64 --framework megatron-core --ep 8"
    own, same = (
        {one["key"]: one["prediction"] for one in good(f"{case} --format json{more}").document["contenders"]}
        for more in ("", " --same-kernels")
    )
    for key in ("megatron-core", "torchtitan", "fsdp"):
        assert same[key]["iteration_s"] < own[key]["iteration_s"], key
        assert same[key]["own_software_s"] > same[key]["iteration_s"], key
    forced = axonn_tune.compare("nano-moe", gpus=8, machine="dgx-h100", imbalance=1.0)
    assert {one.prediction.job.framework.step.imbalance for one in forced if one.prediction} == {1.0}


@pytest.mark.nightly
def test_the_step_asked_for_is_the_frameworks() -> None:
    """Guards --set step.KEY and the baseline: both are of the framework named, whatever the kernels."""
    for kernels in ("", " --same-kernels"):
        asked = "--gpus 64 --model 5b --batch 256 --framework megatron-2022 --recompute full --micro-batch 1"
        line = f"compare {asked} --format json{kernels}"
        then, changed = (good(line + more).document for more in ("", " --set step.fused_attention=true"))
        steps = [{each["key"]: each["prediction"] for each in one["contenders"]} for one in (then, changed)]
        assert then["baseline"] == "megatron-2022"
        assert then["same_kernels"] == bool(kernels)
        for key in ("iteration_s", "own_software_s"):
            assert steps[1]["megatron-2022"][key] < steps[0]["megatron-2022"][key]
            assert steps[1]["megatron-core"][key] == steps[0]["megatron-core"][key]
        searched = good(f"{asked} --top 1 --format json").document
        own = steps[0]["megatron-2022"]["iteration_s"] == pytest.approx(searched["configs"][0]["iteration_s"])
        assert own == (not kernels), "the step of compare is the one of search"


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["--gpus 1024 --model 80b", "--gpus 64 --model 20b"])
def test_the_comparison_fits_100_columns(case: str) -> None:
    """Guards terminals; what steps are spent on with -v, all columns with --wide. CSV has every strategy."""
    narrow, wide = good(f"compare {case}"), good(f"compare {case} --wide")
    assert max(map(len, narrow.out.splitlines())) <= 100
    assert "Next: search --framework NAME" in narrow.err
    assert "paper's" in wide.out
    quiet = good(f"compare {case} -q")
    assert quiet.err == ""
    assert narrow.out.startswith(quiet.out)
    assert len(quiet.out) < len(narrow.out)
    rows = table(good(f"compare {case} --format csv").out)
    assert len(rows) >= 9
    assert all(bool(row["iteration_s"]) != bool(row["infeasible"]) for row in rows)


@pytest.mark.nightly
def test_a_pinned_size_is_why_others_are_not_listed() -> None:
    """Guards the reason of contenders that the request itself rules out."""
    said = good("compare --gpus 64 --model 5b --batch 256 --framework fsdp --z 16 -v").out
    assert "FSDP (ZeRO-3): infeasible, asked for shard = 16, not 64." in said


# sweep


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("64,128, 256", [64, 128, 256]),
        ("64..512x2", [64, 128, 256, 512]),
        ("64..500", [64, 128, 256]),
        ("8..32+8", [8, 16, 24, 32]),
        ("3,3..9x3,3", [3, 9]),
    ],
)
def test_ranges_of_a_sweep(text: str, numbers: list[int]) -> None:
    """Guards lists and ranges."""
    found = run("", ["sweep", "--model", "nano", "--machine", "dgx-a100", "--format", "json", "--gpus", text])
    assert [point["gpus"] for point in found.document["points"]] == numbers


def test_a_sweep_has_the_best_of_each_search() -> None:
    """Guards the points: the best of each search, efficiency relative to the first of each model; what does not fit."""
    points = good("sweep --gpus 2,64,128 --model 5b,20b --format json").document["points"]
    assert [(one["model"], one["gpus"]) for one in points] == [(m, g) for m in ("5b", "20b") for g in (2, 64, 128)]
    assert [one["feasible"] for one in points] == [False, True, True] * 2
    for first, point in ((points[1], points[2]), (points[4], points[5])):
        per_gpu = [each["config"]["tokens_per_s"] / each["gpus"] for each in (point, first)]
        assert point["efficiency"] == per_gpu[0] / per_gpu[1]
    best = good("--gpus 128 --model 20b --top 1 --format json").document["configs"][0]
    assert points[5]["config"] == {key: best[key] for key in points[5]["config"]}
    assert "20b on 2 GPUs, batch 8192: binding constraint: memory" in good("sweep --gpus 2,64 --model 20b").out
    weak = good("sweep --gpus 16,32 --model 5b --batch 256 --weak --format json").document["points"]
    assert [point["global_batch"] for point in weak] == [256, 512]


# explain


@pytest.fixture(scope="module")
def document() -> Any:
    """A configuration that uses every axis."""
    return good(f"explain {CASE} --format json").document


def test_explanations_add_up(document: Any) -> None:
    """Guards the numbers: terms, computation, memory and the gap to peak sum to the totals that the search gave."""
    config, gap = document["config"], document["gap_to_peak"]
    assert sum(term["seconds"] for term in config["terms"]) == pytest.approx(config["communication_s"], rel=1e-12)
    exposed = sum(term["exposed_s"] for term in config["terms"])
    assert exposed == pytest.approx(config["exposed_communication_s"], rel=1e-6)
    assert sum(work["seconds"] for work in document["computation"]) == pytest.approx(config["compute_s"], rel=1e-9)
    assert sum(document["memory"]["items"].values()) == pytest.approx(config["memory_bytes"], rel=1e-9)
    for term in config["terms"]:
        priced = term["count"] * (term["latency_s"] + term["bytes"] / term["bandwidth_bytes_per_s"])
        assert term["seconds"] == pytest.approx(priced, rel=1e-9)
        assert term["hidden_s"] == max(term["seconds"] - term["exposed_s"], 0.0)
    assert gap[0]["seconds"] == pytest.approx(config["mfu"] * config["iteration_s"], rel=1e-9)
    assert sum(part["seconds"] for part in gap) == pytest.approx(config["iteration_s"], rel=1e-9)


def test_sends_have_a_fixed_time_and_a_bandwidth() -> None:
    """Guards sends: launch and one latency, the node's bandwidth over its 8 ranks, by hand; and names of axes."""
    line = "explain --gpus 64 --model llama3-8b --machine dgx-h100 --framework megatron-core --tp 2 --pp 8 --terms"
    text = " ".join(good(line).out.split())
    config = good(f"{line} --format json").document["config"]
    send = next(term for term in config["terms"] if term["op"] == "send")
    assert send["latency_s"] == pytest.approx(5.1e-6 + 22e-6, rel=1e-6)
    assert send["bandwidth_bytes_per_s"] == pytest.approx(380e9 / 8, rel=1e-9)
    assert "2·H·S·b/TP" in text
    assert "TP·y" not in text


def test_replicated_attention_has_its_name() -> None:
    """Guards the gap to peak: over y ranks, all but one of the y shares of attention are overhead."""
    document = good("explain --gpus 64 --model 20b --machine dgx-h100 --x 2 --y 4 --format json").document
    gap = {part["what"]: part["seconds"] for part in document["gap_to_peak"]}
    # 3 · 4·S·Q FLOPs a token and layer of 32 layers, Q = 7,168, for each of y = 4 ranks and not one of them.
    useful = 3 * 4 * 2048 * 7168 * 32 * 8192 * 2048 / 64 / 989e12
    assert gap["attention replicated over y"] == pytest.approx(3 * useful, rel=1e-3)


def test_overlaps_decide_what_hides_what(document: Any) -> None:
    """Guards `overlapped with`: with an overlap off, its collectives are overlapped with nothing."""
    off = good(f"explain {CASE} --no-overlap gather_prefetch --format json").document
    for found, behind in ((document, "preceding layer's GEMMs"), (off, None)):
        terms = found["config"]["terms"]
        gathers = [term for term in terms if (term["op"], term["axis"]) == ("all_gather", "z")]
        assert {term["hidden_behind"] for term in gathers} == {behind}


@pytest.mark.parametrize(
    ("framework", "said"),
    [("megatron-core", "Megatron-Core's log will print about"), ("fsdp", "llm-foundry's log would print about")],
)
def test_what_a_log_prints_is_told_with_what_it_counts(framework: str, said: str) -> None:
    """Guards the log's share of peak, which is not MFU, and logs of one program of several that run a framework."""
    shown = " ".join(good(f"explain --gpus 8 --model 5b --machine dgx-h100 --framework {framework}").out.split())
    assert said in shown
    assert re.search(r"log counts .*MFU", shown)


def test_picks_and_launch_configs_are_explained(tmp_path: Path) -> None:
    """Guards --pick: row N of the same search; and launch configs, which say everything: other options are refused."""
    third = good("--gpus 64 --model 20b --top 3 --format json").document["configs"][2]
    config = good("explain --gpus 64 --model 20b --pick 3 --format json").document["config"]
    assert {key: config[key] for key in third if key != "terms"} == {key: third[key] for key in third if key != "terms"}
    path = tmp_path / "launch.yaml"
    good(f"--gpus 64 --model 20b --set machine.tiers.slingshot.bandwidth_gb_per_s=20 -o {path}")
    assert "machine profile is not the one" in good(f"explain {path}").err
    assert "leave out --batch, --x" in run(f"explain {path} --batch 64 --x 2").err
    alone = good("explain --gpus 1 --model nano --machine dgx-a100 --format json").document
    assert alone["config"]["terms"] == []


def test_rows_of_collectives_add_up_in_a_pipeline() -> None:
    """Guards the table of collectives: seconds and exposed seconds of its rows are those of its last row."""
    asked = "explain --gpus 64 --model llama3-70b --machine dgx-h100 --framework megatron-core --pp 4"
    shown = run(f"{asked} -v --format md").out.partition("## Collectives per rank and step")[2].partition("##")[0]
    rows = [line.strip("|").split("|") for line in shown.splitlines() if line.startswith("|")][2:]
    seconds = [[in_s(cell) for cell in (row[-3], row[-2])] for row in rows]
    for column in range(2):
        assert sum(row[column] for row in seconds[:-1]) == pytest.approx(seconds[-1][column], rel=0.02)


def in_s(cell: str) -> float:
    """A duration of a table, `2.79 s`, in seconds."""
    value, unit = (*cell.split(), "s")[:2]
    return float(value.replace(",", "")) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]


# --from-command


@pytest.mark.nightly
def test_commands_of_changes_write_what_was_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the way on: the command of the best layout writes a script, which costs what was promised."""
    monkeypatch.chdir(tmp_path)
    document = good(f"explain {CORE} --format json").document
    found = document["run"]
    assert (found["framework"], found["line"], found["stated"]["tp"]) == ("megatron-core", 1, "2")
    assert 1 <= found["rank"] <= found["layouts"]
    best = next(change for change in document["changes"] if change["words"].startswith("the best layout"))
    assert best["step_s"] == pytest.approx(found["best_step_s"])
    assert best["step_s"] < document["config"]["iteration_s"]
    for command in (found["model_command"], best["command"]):
        words = shlex.split(command)
        assert words[0] == "axonn-tune"
        good(shlex.join(words[1:]))
    read = good("explain --from-command run.sh --machine dgx-h100 --format json").document
    assert read["config"]["iteration_s"] == pytest.approx(best["step_s"], rel=1e-6)
    text = good(f"explain {TITAN} --format md --trace step.json").out
    assert "```console\n$ axonn-tune " in text
    assert json.loads(Path("step.json").read_text("utf-8"))["traceEvents"]


@pytest.mark.nightly
def test_options_hold_over_the_file_and_what_is_not_priced_is_said(tmp_path: Path) -> None:
    """Guards a template whose launcher has fewer GPUs than its layout, and the three kinds of sentences."""
    text = (COMMANDS / "gpt-one-line.sh").read_text("utf-8").rstrip()
    path = tmp_path / "template.sh"
    path.write_text(f"{text} --pipeline-model-parallel-size 32 --cpu-offloading-weights --frob 3\n", "utf-8")
    done = good(f"explain --from-command {path} --gpus 128 --batch 256 --machine dgx-h100")
    out = " ".join(done.out.split())
    named = "-weights: weights are priced on the GPU", "--frob, taken to change nothing"
    for words in ("--gpus 128 holds in place of", *named):
        assert words in out
    plain, wide = (good(f"explain {CORE} --format json{more}").document for more in ("", " --set model.vocab=256000"))
    assert wide["config"]["iteration_s"] > plain["config"]["iteration_s"]


@pytest.mark.nightly
def test_a_layout_too_large_for_memory_is_explained_all_the_same(tmp_path: Path) -> None:
    """Guards a run that someone has although it is predicted not to fit: said, and not refused."""
    text = (COMMANDS / "torchtitan-8b.sh").read_text("utf-8").replace("checkpoint:full", "checkpoint:none")
    path = tmp_path / "large.sh"
    large = "--training.local_batch_size 4 --training.seq_len 32768 --compile"
    path.write_text(text.replace("--compile", large), "utf-8")
    out = " ".join(good(f"explain --from-command {path} --machine dgx-h100").out.split())
    assert out.startswith("does not fit: needs ")


@pytest.mark.nightly
def test_a_run_is_compared_and_its_model_imported(tmp_path: Path) -> None:
    """Guards the row `yours` among the strategies, and models of scripts and config files: sizes, workload, source."""
    found = {row["key"]: row for row in table(good(f"compare {TITAN} --format csv").out)}
    assert found["yours"]["layout"] == "dp_shard=8 dp_replicate=4 tp=2"
    assert float(found["yours"]["iteration_s"]) > float(found["torchtitan"]["iteration_s"])
    path = tmp_path / "mine.yaml"
    good(f"models import {COMMANDS / 'apertus-70b.sh'} -o {path} --name apertus")
    model = load_document(path, schema=Model)
    assert (model.name, model.layers, model.ffn, model.vocab) == ("apertus", 80, 43008, 128256)
    assert re.match(r"arguments of Megatron-Core in apertus-70b\.sh", model.source)
    good(f"models import {COMMANDS / 'torchtitan-70b.toml'} -o {path} --batch 8 --seq 128")
    model = load_document(path, schema=Model)
    assert counted(model) == counted(load_model("llama3-70b").document)
    assert (model.defaults.global_batch, model.defaults.sequence_length) == (8, 128)


@pytest.mark.nightly
def test_formats_that_differ_are_a_column(tmp_path: Path) -> None:
    """Guards `--precision auto`: the format of each best is said, in text, CSV, JSON and pages."""
    asked = "--model llama3-8b --machine dgx-h100 --framework megatron-core --precision auto --recompute full"
    (point,) = good(f"sweep --gpus 64 {asked} --format json").document["points"]
    name = point["config"]["precision"]
    assert name.startswith("fp8")
    out = good(f"sweep --gpus 64 {asked} --html {tmp_path / 'page.html'}").out
    assert "bf16, fp8-delayed" in " ".join(out.split())
    assert f"format {name}" in " ".join(out.split())
    assert f'"words":["{name}"]' in (tmp_path / "page.html").read_text("utf-8")
    rows = list(csv.DictReader(good(f"compare --gpus 64 {asked} --format csv").out.splitlines()))
    assert {row["precision"] for row in rows if row["key"] in ("megatron-core", "deepspeed")} == {name, "bf16"}


@pytest.mark.nightly
def test_a_config_of_glm_comes_back_from_its_script(tmp_path: Path) -> None:
    """Guards the way from `config.json` to a script of Megatron-Core and back: the same layout, step and memory."""
    (tmp_path / "config.json").write_text(json.dumps(GLM | {"architectures": ["Glm4MoeForCausalLM"]}), "utf-8")
    model, script = tmp_path / "glm.yaml", tmp_path / "run.sh"
    good(f"models import {tmp_path / 'config.json'} -o {model}")
    pins = "--tp 2 --pp 8 --ep 16 --etp 1 --cp 1 --gtp 1 --vpp 2 --micro-batch 1 --recompute full"
    asked = f"--gpus 256 --model {model} --machine dgx-h200 --framework megatron-core {pins} --batch 1024 --seq 4096"
    ranked = good(f"{asked} -q -o {script} --format json").document["configs"][0]
    read = good(f"explain --from-command {script} --machine dgx-h200 --format json").document
    keys = ("layout", "iteration_s", "memory_bytes", "dispatcher", "pipeline_layout", "recompute", "micro_batch")
    assert {key: read["config"][key] for key in keys} == {key: ranked[key] for key in keys}
    assert read["run"]["unknown"] == []
