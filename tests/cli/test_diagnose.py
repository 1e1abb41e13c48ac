"""`axonn-tune diagnose` as a user runs it: the verdict's exit code, its text, JSON and page, and commands that work."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from axonn_tune.learning.stated import read_run
from axonn_tune.specs.catalog import load_machine
from axonn_tune.validation.published.accuracy import best_pricing
from tests.cli.running import good, run

FIXTURES = Path(__file__).parents[1] / "fixtures" / "diagnose"
LAB = f"--machine {FIXTURES / 'lab.yaml'}"
HEALTHY, SLOW = FIXTURES / "lab" / "healthy-z2-data2", FIXTURES / "lab" / "slow-link"


def test_a_healthy_run_ends_well() -> None:
    """Guards exit code 0 inside the interval, which the text shows."""
    done = good(f"diagnose {HEALTHY} {LAB}")
    assert "which is reasonable" in done.out
    assert "80%:" in done.out


def test_json_has_everything() -> None:
    """Guards the document: causes that sum to one with health, and changes with commands."""
    document = json.loads(run(f"diagnose {SLOW} {LAB} --format json").out)
    assert document["schema"] == "axonn-tune/diagnosis/1"
    assert document["reasonable"] is False
    assert document["healthy"] + sum(cause["probability"] for cause in document["causes"]) == pytest.approx(1.0)
    assert document["causes"][0]["kind"] == "slow_network"
    assert document["low_s"] < document["predicted_s"] < document["high_s"] < document["measured_s"]


def test_commands_lead_to_the_predicted_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the pins of a change: its command finds the layout with the step that was promised."""
    monkeypatch.chdir(tmp_path)
    change = json.loads(run(f"diagnose {SLOW} {LAB} --format json").out)["changes"][0]
    words = shlex.split(change["command"])
    assert words[0] == "axonn-tune"
    assert words[-2:] == ["-o", "launch.yaml"]
    found = json.loads(good("", [*words[1:-2], "--rank-by", "step", "--format", "json"]).out)
    assert found["configs"][0]["iteration_s"] == pytest.approx(change["step_s"])
    good("", words[1:])
    assert (tmp_path / "launch.yaml").is_file()


@pytest.mark.parametrize(("machine", "taken"), [("dgx-h100", "flash"), ("dgx2-v100", "unfused")])
def test_a_kernel_that_is_not_stated_is_said_once(machine: str, taken: str, tmp_path: Path) -> None:
    """Guards attention's kernel of a script: one statement, of the kernel that is priced on the machine."""
    script = tmp_path / "run.sh"
    script.write_text(
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 "
        "--seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --fp16 "
        "--vocab-size 50257 --use-distributed-optimizer\n"
    )
    out = run(f"diagnose --step 2 --from-command {script} --machine {machine}").out
    assert f"attn={taken}, not stated" in " ".join(out.split())
    assert "attention's kernel" not in out


MINIMAL = """id,gpu,n_gpus,framework,model,layers,hidden,heads,kv_heads,ffn,vocab,gated_mlp,seq,gbs,mbs,tp,pp,dp,step_s
me,H100,512,Megatron-Core,llama3-70b,80,8192,64,8,28672,128256,1,8192,1024,1,8,4,16,{step_s}
"""
"""Llama 3 70B on 512 H100, with nothing but its layout."""


@pytest.fixture(name="minimal")
def _minimal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("steps.csv").write_text(MINIMAL.format(step_s=24), "utf-8")


@pytest.mark.nightly
@pytest.mark.usefixtures("minimal")
def test_one_run_has_one_prediction_by_whichever_command() -> None:
    """Guards against opposite verdicts: the same facts give the same step and interval to three commands."""
    layout = "--tp 8 --pp 4 --dp 16 --cp 1 --gtp 1 --vpp 1 --micro-batch 1"
    asked = f"--gpus 512 --model llama3-70b --batch 1024 --seq 8192 --framework megatron-core {layout}"
    explained = good(f"explain {asked} --machine dgx-h100 --format json").document["config"]
    diagnosed = json.loads(run("diagnose steps.csv --machine dgx-h100 --format json").out)
    Path("stated.csv").write_text(
        Path("steps.csv").read_text("utf-8").replace(",step_s", ",step_s,recompute").replace(",24", ",24,none"), "utf-8"
    )
    checked = good("accuracy --rows stated.csv --machine dgx-h100 --format json").document["rows"][0]
    for one in (diagnosed, checked):
        assert one["predicted_s"] == pytest.approx(explained["iteration_s"], rel=1e-6)
        assert one["low_s"] == pytest.approx(explained["low_s"], rel=1e-6)
        assert one["high_s"] == pytest.approx(explained["high_s"], rel=1e-6)


@pytest.mark.nightly
@pytest.mark.usefixtures("minimal")
def test_the_verdict_says_on_which_assumption_it_depends() -> None:
    """Guards blank cells: the verdict says on which it depends, all of them are listed below, and can be stated."""
    done = run("diagnose steps.csv --machine dgx-h100")
    said = " ".join(done.out.split())
    assert said.startswith("steps.csv:2 The step took 24 s")
    assert "Assumed: vpp=1, recompute=none, seq_parallel=1, zero_stage=1, attn=flash, not stated." in said
    assert "--model llama3-70b --machine" in said, "a row that states no rotary base has none to set"
    depends = "slower than predicted, if recompute=none as assumed; reasonable with recompute full (24 s predicted)"
    assert depends in said
    assert done.code == 4
    stated = good("diagnose steps.csv --machine dgx-h100 --fact recompute=full")
    assert "which is reasonable." in " ".join(stated.out.split())
    assert "recompute=" not in stated.out.partition("Faster")[0]


@pytest.mark.nightly
@pytest.mark.usefixtures("minimal")
def test_what_no_cause_explains_has_no_probabilities() -> None:
    """Guards steps far below the prediction of 18 s: 7.5 s are less than FLOPs take at peak, which is said first; of
    9.5 s (MFU 84%) no cause is "100.0%" likely."""
    Path("steps.csv").write_text(MINIMAL.format(step_s=7.5), "utf-8")
    done = run("diagnose steps.csv --machine dgx-h100 --html page.html")
    assert done.code == 4
    assert re.match(
        r"steps.csv:2 The step took 7\.5 s, which is less than the 7\.98 s that its", " ".join(done.out.split())
    )
    assert not re.search(r"how likely|[Pp]robabilit", done.out)
    Path("steps.csv").write_text(MINIMAL.format(step_s=9.5), "utf-8")
    done = run("diagnose steps.csv --machine dgx-h100")
    assert done.code == 4
    assert "so none has a probability" in " ".join(done.out.split())
    assert re.search(r"^ +-  .*not explained: ", done.out, re.MULTILINE)
    assert not re.search(r"^ *\d+\.\d%  ", done.out, re.MULTILINE)


COMMANDS = Path(__file__).parents[1] / "fixtures" / "commands"


def megatron_log(path: Path, *, step_s: float, tflops: float, more: str = "") -> str:
    """Words of `diagnose` for a log of the run of `apertus-70b.sh`, which states only its steps."""
    lines = ["using world size: 4096, data-parallel size: 128, tensor-model-parallel size: 4,"]
    lines += [
        f" iteration {number:8d}/{500:8d} | consumed samples: {4096 * number:12d} | elapsed time per iteration (ms): "
        f"{step_s * 1e3:.1f} | throughput per GPU (TFLOP/s/GPU): {tflops:.1f} | global batch size:  4096 |{more}"
        for number in range(1, 9)
    ]
    path.write_text("\n".join(lines), "utf-8")
    return f"diagnose {path} --from-command {COMMANDS / 'apertus-70b.sh'} --machine alps"


@pytest.mark.nightly
def test_a_log_takes_what_it_lacks_from_the_script(tmp_path: Path) -> None:
    """Guards `--from-command`: a log without model and layout, what stays assumed, and the framework's names."""
    script = good(f"explain --from-command {COMMANDS / 'apertus-70b.sh'} --machine alps --format json").document
    step_s, tflops = (script["config"][name] for name in ("iteration_s", "logged_tflops_per_gpu"))
    words = megatron_log(tmp_path / "a.log", step_s=step_s, tflops=tflops)
    found = good(f"{words} --format json").document
    assert found["predicted_s"] == pytest.approx(step_s)
    assert found["flops_ratio"] == pytest.approx(1.0, rel=1e-3)
    assert found["verdict"].endswith("which is reasonable.")
    assert any("the vocabulary is not stated: 128,256" in remark for remark in found["remarks"])
    assert not any("no experts" in remark for remark in found["remarks"])
    said = {cause["kind"]: cause["words"] for cause in found["causes"]}
    assert said["interleaving"].startswith("VPP ")
    assert re.fullmatch(r"rank order [A-Z]+(,[A-Z]+)*", said["rank_order"])
    assert found["unexplained"] is None


ALONE = {
    **{"num_layers": 16, "hidden_size": 2048, "num_attention_heads": 16, "ffn_hidden_size": 8192, "swiglu": False},
    **{"padded_vocab_size": 32000, "seq_length": 2048, "global_batch_size": 32, "micro_batch_size": 1, "fp16": False},
    **{"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 1, "data_parallel_size": 4, "world_size": 16},
}


@pytest.mark.nightly
def test_a_log_in_fp32_says_so_and_states_the_run_of_its_baseline(tmp_path: Path) -> None:
    """Guards a log without its script: FP32 by accident is named, and a smaller run of which only a time is given has
    its batch, sequence length and model."""
    steps = [f" iteration {at}/ 9 | elapsed time per iteration (ms): 3000.0 |" for at in range(1, 9)]
    for bf16 in (False, True):
        lines = [f"  {name} {'.' * 9} {value}" for name, value in (ALONE | {"bf16": bf16}).items()]
        (tmp_path / "run.log").write_text("\n".join((*lines, *steps)), "utf-8")
        line = f"diagnose {tmp_path / 'run.log'} --machine dgx-a100 --beside 3.1 --beside-fact n_gpus=8"
        done = run(line)
        assert "On 8 GPUs" in done.out, done.err
        assert ("The run is in FP32" in done.out) != bf16


def test_a_log_without_degrees_has_its_run_on_fewer_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards data parallelism alone, which a Trainer's log does not state."""
    monkeypatch.setattr("axonn_tune.learning.diagnose.changes_of", lambda *_, **__: ())
    asked = (
        f"{FIXTURES.with_name('logs') / 'trainer.log'} --model llama3-8b --fact n_gpus=16 --fact seq=4096 --fact gbs=64"
    )
    found = run(f"diagnose {asked} --machine dgx-h100 --beside 2 --beside-gpus 8 --format json").document
    alone = run(f"diagnose {asked.replace('n_gpus=16', 'n_gpus=8')} --machine dgx-h100 --format json").document
    assert found["baseline"]["predicted_s"] == alone["predicted_s"]


def leave_out_causes_and_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the prediction alone is asked for: other explanations and faster layouts take most of a diagnosis."""
    monkeypatch.setattr("axonn_tune.learning.diagnose.changes_of", lambda *_, **__: ())
    monkeypatch.setattr("axonn_tune.learning.diagnose.hypotheses_of", lambda _: ())
    monkeypatch.setattr("axonn_tune.learning.diagnose._weighed", lambda *_: ((), 1.0, 0.0))


def test_what_a_log_states_holds_for_its_run_on_fewer_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a step beside a log that prints its arguments: recompute, interleaving and what overlaps are the same
    there, as if its log were given; a log says so of itself, too."""
    leave_out_causes_and_changes(monkeypatch)
    more = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    more |= {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "bf16": True}
    more |= {"overlap_grad_reduce": False, "use_distributed_optimizer": True, "transformer_impl": "transformer_engine"}

    def predicted_s(name: str, given: dict[str, object], beside: str = "") -> tuple[float, float]:
        """Of the run of a log, and of the one beside it."""
        lines = [f"  {key} {'.' * 9} {value}" for key, value in (ALONE | more | given).items()]
        steps = [f" iteration {at}/ 9 | elapsed time per iteration (ms): 3000.0 |" for at in range(1, 9)]
        (tmp_path / name).write_text("\n".join((*lines, *steps)), "utf-8")
        found = run(f"diagnose {tmp_path / name} --machine dgx-a100 --format json {beside}").document
        return found["predicted_s"], found["baseline"] and found["baseline"]["predicted_s"]

    small_s, _ = predicted_s("small.log", {"world_size": 8, "data_parallel_size": 1})
    large_s, beside_s = predicted_s("large.log", {"data_parallel_size": 2}, "--beside 3.1 --beside-gpus 8")
    assert beside_s == small_s
    assert predicted_s("hidden.log", {"data_parallel_size": 2, "overlap_grad_reduce": True})[0] != large_s


# Runs with experts, or in a format below 16 bits, from one log beside the script.

SIZES = (
    "--num-layers 16 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --normalization RMSNorm "
    "--position-embedding-type rope --vocab-size 32000 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16 "
    "--global-batch-size"
)
MIXTURE = f"{SIZES} 128 --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
MIXTURE = f"{MIXTURE} --expert-model-parallel-size 8 --pipeline-model-parallel-size 2"


def core_run(folder: Path, arguments: str, *, asked: str = "", machine: str = "dgx-h100", prints: bool = True) -> str:
    """Options for the log of a run of Megatron-Core on 64 GPUs, with the script that asks for more than that ran.

    The steps take what is predicted of them; prints: the log has its arguments.
    """
    script, log = folder / "run.sh", folder / "run.log"
    script.write_text(f"torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py {arguments}", "utf-8")
    case = read_run(script, given={}).case(load_machine(machine).document)
    step_s = best_pricing(case, case.configurations).iteration_s
    lines = [f"  {name} {'.' * 20} {one.value}" for name, one in read_run(script, given={}).arguments.items()]
    steps = [f" iteration {step:8d}/ 500 | elapsed time per iteration (ms): {1e3 * step_s} |" for step in range(1, 9)]
    log.write_text("\n".join([*(lines if prints else ["using world size: 64,"]), *steps]), "utf-8")
    nodes = "8" if prints else "${SLURM_NNODES:-1}"
    script.write_text(f"torchrun --nproc_per_node 8 --nnodes {nodes} pretrain_gpt.py {arguments} {asked}", "utf-8")
    return f"{log} --machine {machine}"


@pytest.mark.parametrize("prints", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_log_with_experts_is_priced_as_its_script(
    prints: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards EP, dispatcher and experts of a log: of the script beside it, and of what it prints itself."""
    leave_out_causes_and_changes(monkeypatch)
    monkeypatch.setattr("axonn_tune.api.learning.changes_of", lambda *_, **__: ())
    words, beside = core_run(tmp_path, MIXTURE, prints=prints), f"--from-command {tmp_path / 'run.sh'}"
    for more in (beside, "") if prints else (beside,):
        found = good(f"diagnose {words} {more} --format json").document
        assert found["predicted_s"] == pytest.approx(found["measured_s"], rel=1e-4), more
        assert not any("no experts" in remark for remark in found["remarks"])
    if not prints:
        failed = run(f"diagnose {words} {beside} --fact ep=16")
        assert (failed.code, "experts (8) is not divisible by EP = 16" in failed.err) == (2, True)


@pytest.mark.parametrize("prints", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("machine", "recipe", "name"),
    [
        ("gb200-nvl72", "e4m3 --fp8-recipe mxfp8", "mxfp8"),
        ("dgx-h100", "hybrid --fp8-recipe tensorwise", "fp8-current"),
    ],
)
def test_a_log_in_bf16_beside_a_script_in_8_bits_is_named_first(
    machine: str, recipe: str, name: str, prints: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a recipe that is not active: steps are BF16's, whether or not the log says so; `learn` refuses those."""
    monkeypatch.setattr("axonn_tune.learning.diagnose.changes_of", lambda *_, **__: ())
    monkeypatch.setattr("axonn_tune.api.learning.changes_of", lambda *_, **__: ())
    words = core_run(tmp_path, f"{SIZES} 256", asked=f"--fp8-format {recipe}", machine=machine, prints=prints)
    words = f"{words} --from-command {tmp_path / 'run.sh'}"
    found = run(f"diagnose {words} --format json").document
    assert found["causes"][0]["kind"] == "precision"
    assert found["causes"][0]["words"] == f"this looks like BF16: the recipe {name} is not active"
    assert (
        any(f"the log states precision bf16, and {tmp_path / 'run.sh'} {name}" in one for one in found["remarks"])
        == prints
    )
    if prints:
        assert f"states precision bf16, but {name} is given" in run(f"learn {words} -o {tmp_path / 'ours.yaml'}").err


@pytest.mark.nightly
def test_a_run_with_experts_has_the_best_layout_of_a_search(tmp_path: Path) -> None:
    """Guards `explain --from-command` of experts: the rank of its grid, and flags to try next; routing is none."""
    script = tmp_path / "run.sh"
    script.write_text(f"torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py {MIXTURE}", "utf-8")
    out = " ".join(good(f"explain --from-command {script} --machine dgx-h100").out.split())
    assert "A search of Megatron-Core's layouts for this model, batch and number of GPUs ranks its grid" in out
    assert "the best layout of a search" in out
    assert "routing: forced" not in out, "no layout"


LAYOUT = "--model llama3-8b --machine dgx-h100 --framework megatron-core --fact n_gpus=8 --fact gbs=64 --fact seq=8192"


@pytest.mark.parametrize(
    ("model", "gpus"),
    [
        ("llama3-8b --batch 64 --seq 8192", 8),
        pytest.param("qwen3-30b-a3b --batch 256 --seq 4096", 16, marks=pytest.mark.nightly),
    ],
)
def test_a_step_without_a_layout_is_compared_with_the_best(model: str, gpus: int) -> None:
    """Guards "410 TFLOP/s: is that good": the prediction is the first row of a search, and the layout is assumed."""
    job = f"--gpus {gpus} --model {model} --machine dgx-h100 --framework megatron-core"
    best = json.loads(run(f"search {job} --top 1 --format json").out)["configs"][0]
    found = json.loads(run(f"diagnose --step 9 {job} --format json").out)
    assert found["predicted_s"] == pytest.approx(best["iteration_s"], rel=1e-6)
    assert any("best of a search" in said for said in found["remarks"])


@pytest.mark.nightly
def test_a_step_alone_is_compared_with_its_script_or_layout(tmp_path: Path) -> None:
    """Guards "is 9 s a step reasonable": the prediction, interval and causes without a log, of a script as `explain`
    predicts it, or of facts; without a layout, that of the best."""
    script = COMMANDS / "apertus-70b.sh"
    explained = good(f"explain --from-command {script} --machine alps --format json").document["config"]
    found = json.loads(run(f"diagnose --step 60 --from-command {script} --machine alps --format json").out)
    for name, own in (("predicted_s", "iteration_s"), ("low_s", "low_s"), ("high_s", "high_s")):
        assert found[name] == pytest.approx(explained[own], rel=1e-6)
    assert found["measured_s"] == pytest.approx(60.0)
    assert found["causes"]
    stated = run(f"diagnose --step 9 {LAYOUT} --fact tp=2")
    assert (stated.code, stated.out.partition("\n")[0]) == (4, "the stated step")
    assert "The step took 9 s, predicted" in stated.out
    lacking = run(f"diagnose --step 9 {LAYOUT.replace(' --framework megatron-core', '')}")
    assert lacking.code == 2
    assert "does not state framework" in lacking.err
    words = "--gpus 8 --model llama3-8b --machine dgx-h100 --framework megatron-core --batch 64 --seq 8192"
    as_options = run(f"diagnose --step 9 {words} --tp=2")
    assert (as_options.code, as_options.out) == (4, stated.out)
    for odd, why in (
        ("ep=0", "ep=0: not a whole number"),
        ("tp=x", "tp=x: not"),
        ("layers=99", "has 32: leave"),
        ("gpu=Z80", "no profile has"),
        ("cuda_graphs=foo", "known: "),
        ("routing=foced", "mean 'forced'?"),
    ):
        refused = run(f"diagnose --step 9 {LAYOUT} --fact {odd}")
        assert (refused.code, why in refused.err) == (2, True), refused.err
    assert run(f"diagnose {tmp_path} --step 9").code == run("diagnose").code == run("diagnose --step nan").code == 2


TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
batch_size = 1
seq_len = 8192
tensor_parallel_degree = 1
data_parallel_shard_degree = -1
compile = false
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
"""A config of torchtitan that leaves the number of GPUs to the launcher."""


def titan_log(gpus: int, tokens: int) -> str:
    """A log of it, which says how many GPUs only by the batch of all and of one."""
    starts = f"Training starts at step 1, with local batch size 1, global batch size {gpus}, sequence length 8192,"
    steps = [f"step: {10 * at}  loss: 1.5  memory: 26.47GiB(33.47%)  wps: {tokens:,}  mfu: 10%" for at in range(1, 9)]
    return "\n".join((starts, *steps))


SLOW_NETWORK = (
    "one.log --beside four.log",
    "four.log --beside-tokens-per-gpu 6500 --gpus 32 --beside-gpus=8",
    "--step 1.26 --gpus 8 --step 4.587 --gpus 32",
    "--tokens-per-gpu 1,786 --gpus 32 --tokens-per-gpu 6,500 --fact n_gpus=8",
    "--tflops=103.43 --gpus 32 --beside-tflops 376.4 --beside-gpus 8 --beside-command train.toml",
    "four.log --beside one.log --beside-gpus 8",
    "four.log --beside 1.26 --gpus 32 --gpus 8",
)


@pytest.fixture(name="titan")
def _titan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.toml").write_text(TITAN, "utf-8")
    for name, gpus, tokens in (("one", 8, 6500), ("four", 32, 1786), ("fine", 32, 6300)):
        Path(f"{name}.log").write_text(titan_log(gpus, tokens), "utf-8")


@pytest.mark.usefixtures("titan")
@pytest.mark.parametrize(
    "runs", [*SLOW_NETWORK[:2], *(pytest.param(one, marks=pytest.mark.nightly) for one in SLOW_NETWORK[2:])]
)
def test_one_node_beside_four_names_the_network(runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards two runs of different size, by logs or what people know of a step, in either order: the larger one is
    diagnosed, and the network is what they differ by."""
    monkeypatch.setattr("axonn_tune.learning.diagnose.changes_of", lambda *_, **__: ())
    done = run(f"diagnose {runs} --from-command train.toml --machine dgx-h100 --format json")
    found = json.loads(done.out)
    assert found["measured_s"] == pytest.approx(4.587, rel=2e-3)
    assert found["baseline"]["gpus"] == 8
    assert found["baseline"]["measured_s"] == pytest.approx(1.26, rel=2e-3)
    assert found["network"] > 0.8


@pytest.mark.usefixtures("titan")
def test_a_model_that_is_too_slow_for_both_runs_hides_no_cause() -> None:
    """Guards the causes where one node is faster than predicted: they explain the gap that this leaves, and what is
    beside the run already is not named as the next thing to give."""
    found = run("diagnose --step 0.9 --gpus 8 --step 2 --gpus 32 --from-command train.toml --machine dgx-h100")
    assert "not slow: the cause comes with more GPUs" in " ".join(found.out.split())
    assert "likely the network" in " ".join(found.out.split())
    assert "no cause that was tried" not in found.out
    assert "-v (all assumptions and commands)" in found.err
    assert "--beside" not in found.err
    assert "Otherwise the prediction" not in found.out


@pytest.mark.usefixtures("titan")
def test_two_runs_as_predicted_name_no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a cause where nothing is wrong, and a network that both runs cannot share."""
    fine = good("diagnose one.log --beside fine.log --from-command train.toml --machine dgx-h100")
    assert "which is reasonable" in fine.out
    assert "how likely" not in fine.out
    assert "not compiled" not in " ".join(fine.out.split()), "the script says whether it is"
    assert "the network" not in " ".join(fine.out.split())
    assert fine.err.splitlines()[-1] == "Next: -v (all assumptions and commands)"
    monkeypatch.setattr("axonn_tune.learning.diagnose.changes_of", lambda *_, **__: ())
    both = run("diagnose --step 4.5 --gpus 8 --step 4.6 --gpus 32 --from-command train.toml --machine dgx-h100")
    assert "slow as well" in " ".join(both.out.split())
    assert "network (network)" not in both.out


CONTRADICTIONS = {
    "four.log --tflops 410": "--tflops and four.log each say what the step took",
    "--step 3 --tflops 410 --gpus 8": "--step 3 and --tflops 410 each say",
    "--step 3 --gpus 8 --gpus 32": "a fact that is given twice, is of another run",
    "--step 3 --gpus 8 --beside-step 3": "are both on 8 GPUs",
    "four.log --beside 1.2 --beside-step 1.3 --beside-gpus 8": "--beside 1.2 and step_s=1.3 each say",
    "four.log --beside one.log --beside-tflops 400": "--beside-tflops and one.log each say",
    "--tflops x --gpus 8": "Invalid value for '--tflops'",
    "--tokens-per-gpu 0 --gpus 8": "Invalid value for '--tokens-per-gpu'",
    "--step 3 --gpus 8 --gpus 32 --gpus 64": "n_gpus is stated twice of the run beside",
    "--step 3 --gpus 8 --beside-step x --beside-gpus 32": "--beside-fact step_s=x: not a number",
    "--step 3 --gpus 8 --beside-step": "Option '--beside-step' requires an argument",
    "--step 3 --gpus 8 --beside-command train.toml": "--beside-command is the script of another run",
    "--gpus 8": "or else --step SECONDS, --tflops or --tokens-per-gpu",
}


@pytest.mark.usefixtures("titan")
@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_what_contradicts_itself_is_refused(words: str) -> None:
    """Guards two statements of one step, and a second run that is not there or no other."""
    refused = run(f"diagnose {words} --from-command train.toml --machine dgx-h100")
    assert (refused.code, CONTRADICTIONS[words] in " ".join(refused.err.split())) == (2, True), refused.err


def test_a_rate_is_the_step_that_a_log_with_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `--tflops` and `--tokens-per-gpu`: the step by the FLOPs that the framework's own log counts."""
    monkeypatch.setattr("axonn_tune.learning.diagnose.changes_of", lambda *_, **__: ())
    run_ = f"--from-command {tmp_path / 'run.sh'} --machine dgx-h100 --format json"
    script = f"torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py {SIZES} 256"
    (tmp_path / "run.sh").write_text(script, "utf-8")
    config = good(f"explain {run_}").document["config"]
    tokens = 256 * 4096 / 64 / config["iteration_s"]
    for rate in (f"--tflops {config['logged_tflops_per_gpu']!r}", f"--tokens-per-gpu {tokens!r}"):
        found = good(f"diagnose {rate} {run_}").document
        assert found["measured_s"] == pytest.approx(config["iteration_s"], rel=1e-6)


def test_tflops_of_adapters_above_the_peak_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what a log counts of LoRA: above the peak is its rule, where MFU is below it, and below it nothing."""
    monkeypatch.setattr("axonn_tune.learning.diagnose.changes_of", lambda *_, **__: ())
    sizes = "model.tensor_model_parallel_size=2 train.micro_batch_size=1 train.global_batch_size=32"
    recipe = f"--recipe llama3_8b_peft_config --mode lora peft.dim=16 dataset.seq_length=4096 {sizes}"
    (tmp_path / "run.sh").write_text(f"torchrun --nproc_per_node 8 scripts/training/run_recipe.py {recipe}", "utf-8")
    run_ = f"--from-command {tmp_path / 'run.sh'} --machine dgx-h100"
    said = {rate: " ".join(run(f"diagnose --tflops {rate} {run_}").out.split()) for rate in (600, 1100, 1900)}
    why = "of peak by its own rule, since it counts gradients of weights that do not train"
    assert [why in words for words in said.values()] == [False, True, False]
    assert "less than the" in said[1900]


def test_replicas_out_of_memory_are_told_to_shard(tmp_path: Path) -> None:
    """Guards the smallest change of a run that only replicates: all replicas as shards, which Accelerate has, not the
    distributed optimizer, which it lacks."""
    config = tmp_path / "ddp.yaml"
    config.write_text(
        "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_machines: 2\nnum_processes: 16\n", "utf-8"
    )
    asked = (
        f"explain --from-command {config} --model llama3-8b --seq 4096 --batch 16 --micro-batch 1 --machine dgx-h100"
    )
    assert "; smallest change: shard 16, replicate 1 (" in " ".join(good(asked).out.split())


def test_a_script_out_of_memory_is_told_what_costs_least(tmp_path: Path) -> None:
    """Guards `explain --from-command` of a run that does not fit: its first line, and changes by step, as the
    framework's own arguments, with the step and memory that the script has with them; sequence parallelism before full
    recompute."""
    script = tmp_path / "run.sh"
    asked = f"--tensor-model-parallel-size 8 {SIZES} 64".replace("4096 --m", "32768 --m")
    script.write_text(f"torchrun --nproc-per-node 8 pretrain_gpt.py {asked}", "utf-8")
    little = f"explain --from-command {script} --machine dgx-h100 --set machine.accelerator.memory_gib=32"
    found = good(f"{little} --format json").document
    steps = [one["step_s"] for one in found["changes"]]
    assert steps == sorted(steps)
    single = [one["words"] for one in found["changes"] if one["words"].startswith("--")]
    assert single[0] == "--sequence-parallel"
    assert "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1" in single
    said = " ".join(good(little).out.split())
    first = r"does not fit: needs [\d.]+ of [\d.]+ GiB; smallest change: --sequence-parallel \([\d.]+ GiB, [\d.]+ s\)"
    assert re.match(first, said)
    assert found["fit"]["smallest_change"]["words"] == "--sequence-parallel"
    text = script.read_text("utf-8")
    for change in found["changes"]:
        if change["words"] in single:
            script.write_text(f"{text} {change['words']}", "utf-8")
            followed = good(f"{little} --format json").document
            assert followed["config"]["iteration_s"] == pytest.approx(change["step_s"]), change
            assert followed["memory"]["total_bytes"] == pytest.approx(change["memory_bytes"]), change
            assert followed["memory"]["total_bytes"] <= followed["memory"]["limit_bytes"]


def test_a_framework_that_is_not_stated_is_named() -> None:
    """Guards `--tp 4` of a user of Megatron: that the bundled runtime is priced stands under Assumed, not where a
    framework is given, as an option or a fact."""
    asked = "diagnose --step 60 --gpus 8 --model llama3-8b --machine dgx-h100 --tp 4"
    assert "Assumed: framework axonn-tune (4D), since none is stated: --framework" in run(asked).out
    for given in ("--framework megatron-core", "--fact framework=torchtitan"):
        assert "Assumed: framework" not in run(f"{asked} {given}").out
