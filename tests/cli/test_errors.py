"""What users get wrong: each call ends in its exit code and a message that names what is wrong and what is right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import Finished, good, run

COMMANDS = Path(__file__).parents[1] / "fixtures" / "commands"
TITAN = f"--from-command {COMMANDS}/torchtitan-8b.sh --machine dgx-h100"
SMALL = "--gpus 8 --model 5b"
EXPERTS = "search --gpus 8 --model nano-moe --machine dgx-h100"
H100 = "--gpus 64 --model llama3-70b --machine dgx-h100"
CORE = f"{H100} --framework megatron-core"
STEPS = "id,gpu,n_gpus,framework,layers,hidden,heads,ffn,vocab,seq,gbs,step_s\n"

CALLS = [
    # Numbers and names.
    ("--gpus 0 --model 80b", 2, "0 is not in the range x>=1"),
    ("--gpus 1.5 --model 80b", 2, "'1.5' is not a valid integer"),
    ("--model 80b", 2, "Missing option '--gpus'"),
    ("--gpus 8 --model 81b", 2, "no model named '81b', did you mean '80b'?"),
    (f"{SMALL} --machine perlmuter", 2, "did you mean 'perlmutter'?"),
    ("--gpus 8 --model missing.yaml", 2, "no file 'missing.yaml'"),
    (f"{SMALL} --lora-alpha 16", 2, "no option --lora-alpha: adapters are stated by --tune, --lora-rank and"),
    (f"{SMALL} --tune dora", 2, "has full, lora; frameworks with dora: megatron-core"),
    (
        f"{SMALL} --framework axonn --optimizer muon",
        2,
        "has adamw; frameworks that do: axonn-tune, megatron-core, nemo",
    ),
    (f"{SMALL} --machine H100", 2, "such an accelerator is in aws-p5 (H100-SXM5-80GB), dgx-h100 (H100-"),
    ("--gpus 8 --model meta-llama/Llama-2-13b", 2, "download https://huggingface.co/meta-llama/Llama-2-13b/blob/main"),
    ("--gpus 8 --model config.json", 2, "axonn-tune models import config.json -o mymodel.yaml"),
    ("serch --gpus 8", 2, "Did you mean 'search'?"),
    (f"{SMALL} --recompute ful", 2, "did you mean 'full'?"),
    (f"{SMALL} --use-precision-aware-optimizer", 2, "frameworks that do: megatron-core, nemo"),
    (
        f"{SMALL} --framework torchtitan --grad-reduce-in-bf16",
        2,
        "--grad-reduce-in-bf16: torchtitan has no such option",
    ),
    (f"{CORE} --use-precision-aware-optimizer bf8", 2, "did you mean 'fp8'"),
    (f"{CORE} --use-precision-aware-optimizer --precision fp32", 2, "needs --precision bf16 or fp16"),
    (
        f"{CORE} --use-precision-aware-optimizer fp8 --set step.distributed_optimizer=false",
        2,
        "needs step.distributed_optimizer",
    ),
    (f"{SMALL} --cuda-graphs", 2, "--cuda-graphs: axonn-tune (4D) has no CUDA graphs"),
    (f"{SMALL} --framework megatron-core --cuda-graphs atn", 2, "did you mean 'attn'?"),
    (f"{SMALL} --dispatcher deepep", 2, "has no experts"),
    (f"{SMALL} --imbalance 2", 2, "5b has no experts"),
    (f"{EXPERTS} --imbalance 0.5", 2, "must be a number from 1 to 10000; nearest valid: 1"),
    (f"{EXPERTS} --set step.capacity_factor=-1", 2, "step.capacity_factor=-1: must be a number from 0.01 to 10,000"),
    (f"{EXPERTS} --dispatcher depep", 2, "did you mean 'deepep'?"),
    (f"{EXPERTS} --dispatcher deepep", 2, "--dispatcher deepep: axonn-tune (4D) has alltoall"),
    (f"{EXPERTS} --framework fsdp --dispatcher deepep", 2, "has no expert parallelism"),
    (f"{SMALL} --framework torchtitan --cuda-graphs mlp", 2, "mlp: torchtitan captures full_iteration"),
    (f"{SMALL} --framework megatron-core --cuda-graphs --recompute full", 2, "CUDA graphs of full exclude it"),
    (f"{CORE} --columns epp", 2, "no column 'epp', did you mean"),
    (f"{CORE} --set machine.nvlink.ranks=72", 2, "--set nvlink.ranks: no 'nvlink', did you mean tiers.nvlink?"),
    (f"{CORE} --tp-size 8", 2, "No such option '--tp-size'. (Did you mean one of: '--optimizer', '--price', '--tp'?)"),
    (f"{CORE} --recompute-modules moe_act", 2, "of modules is --recompute NAME,NAME"),
    (f"{CORE} --tp ٢", 2, "--tp needs a whole number from 1 to 2,147,483,647, got '٢'"),
    (f"{CORE} --set model.rotary_base=1e400", 2, "rotary_base: must be a finite number"),
    (f"{CORE} --pp 2 --pipeline-layout Et*1000L", 2, "2 stages do not divide its 1 parts"),
    (f"{CORE} --tp 3", 2, "3 does not divide them; nearest that does: --tp 2"),
    (f"{SMALL} --columns mfuu", 2, "no column 'mfuu', did you mean 'mfu'?"),
    (f"{SMALL} --tokens-total 1.5X", 2, "such as 300B, 1.5T"),
    (f"{SMALL} --price 2.49", 2, "--price 2.49 is for the cost of a whole training: give --tokens-total, too"),
    (
        f"{SMALL} --tokens-total 1T --price 0",
        2,
        "--price 0: must be a number from 0.001 to 1e+06; nearest valid: 0.001",
    ),
    (f"{SMALL} --tokens-total 1T --set machine.operation.pue=0.5", 2, "operation.pue"),
    (f"{SMALL} --order x,y,k", 2, "rank order 'x,y,k' must name axes once each, as in x,y,z,data"),
    (f"{SMALL} --seq 1099511627775", 2, "1099511627775 is more than 2,147,483,647"),
    ("--gpus 8 --model nano -o \udcff.yaml", 2, "--output holds no text in this locale: the byte '\\udcff'"),
    # Options of other tools.
    (f"{SMALL} --tp 8", 2, "--tp is Megatron-Core's, torchtitan's and DeepSpeed ZeRO's name of axis x: --x 8"),
    (f"{SMALL} --zero=3", 2, "there is no option --zero: ZeRO-1 is --shard-optimizer"),
    (f"{SMALL} --nodes 2", 2, "--gpus N is the number of GPUs of all nodes"),
    (f"{SMALL} --ep 4", 2, "name of axis expert: --expert 4, or --framework megatron-core"),
    (f"{H100} --pp 8", 2, "name of axis pipeline: --pipeline 8, or --framework megatron-core"),
    (f"{CORE} --dp-shard 8", 2, "--dp-shard is torchtitan's name of what Megatron-Core calls GTP: --gtp N"),
    (f"{H100} --training.local_batch_size 2", 2, "is the micro-batch of a layout without stages: --micro-batch N"),
    (f"{H100} --job.config_file x.toml", 2, "explain and compare read a config file by --from-command FILE"),
    # --set.
    (f"{SMALL} --set model.layrs=3", 2, "did you mean 'layers'?"),
    (f"{SMALL} --set machine.bandwidth=5", 2, "did you mean accelerator.memory_bandwidth_gb_per_s or tiers.nv"),
    (f"{SMALL} --set accelerator.memory_gib=1e308", 2, "must be less than or equal to"),
    (f"{CORE} --set step.sequence=true", 2, "a step has no 'sequence', did you mean 'sequence_parallel'?"),
    (f"{CORE} --set step.imbalance=2", 2, "--set step.imbalance: llama3-70b has no experts"),
    (f"{CORE} --machine dgx2-v100 --precision fp16 --set step.fused_attention=true", 2, "need Ampere or newer"),
    (f"{CORE} --precision fp32 --set step.fused_attention=true", 2, "Megatron-Core writes all scores in fp32"),
    (f"{EXPERTS} --set step.imbalance=1e6", 2, "must be a number from 1 to 10,000; nearest valid: 10000"),
    (f"{SMALL} --set accelerator.attention_forward_efficiency=99999", 2, "must be less than or equal to 2, not 99999"),
    (f"{SMALL} --set accelerator.contention=7", 2, "accelerator.contention: must be less than or equal to 1, not 7"),
    (
        f"{SMALL} --set accelerator.reserved_memory_gib=1e6",
        2,
        "reserved_memory_gib (1e+06) leaves nothing of memory_gib",
    ),
    (f"{CORE} --set step.gather_copies=-1", 2, "step.gather_copies=-1: must be a whole number from 0 to 8; nearest"),
    (f"{CORE} --set step.gather_bytes=0", 2, "must be a whole number from 1 to 8; nearest valid: 1"),
    (f"{CORE} --set step.loss=eagr", 2, "step.loss=eagr: expected in_place, fused, softmax, copied, eager, got"),
    (f"{CORE} --set step.loss_reductions={'9' * 400}", 2, "must be a number from 0 to 64; nearest valid: 64"),
    (f"{CORE} --set step.loss_reductions=-1", 2, "step.loss_reductions=-1: must be a number from 0 to 64"),
    (f"{CORE} --set step.last_less=999999", 2, "must be a whole number from 0 to 64; nearest valid: 64"),
    (f"{CORE} --set step.vocabulary_multiple=1.5", 2, "must be a whole number from 0 to 65,536"),
    (f"{CORE} --set step.gather_copies=٣", 2, "'٣' is not a number"),
    (f"{EXPERTS} --set step.expert_shards=x,q", 2, "step.expert_shards='q': known: x, z, context, data"),
    (f"{EXPERTS} --set step.expert_replicas=nan", 2, "step.expert_replicas='nan': known: x, z, context, data"),
    (f"{CORE} --set step.selective=mlp.fc3", 2, "did you mean 'mlp.fc2'?"),
    (f"{CORE} --set step.replicated_tables=heads", 2, "did you mean 'head'?"),
    (f"{CORE} --recompute full --recompute-layers 99", 2, "llama3-70b has 80 layers; nearest valid: 80"),
    (
        "--gpus 8 --model mixtral-8x7b --framework megatron-core --set step.shared_expert_overlap=true",
        2,
        "no shared exp",
    ),
    (f"{H100} --framework deepspeed --no-shard-optimizer", 2, "DeepSpeed ZeRO always shards optimizer states"),
    (f"{CORE} --set model.mtp_layers=50", 2, "mtp_layers: must be less than or equal to 32, not 50"),
    (f"{CORE} --set model.rotary_base=1e400", 2, "rotary_base: must be a finite number, not inf"),
    (f"{EXPERTS} --imbalance ٣", 2, "--imbalance ٣: must be a number from 1 to 10000"),
    (f"{CORE} --pipeline-layout Et*1000L", 2, "has 1000 decoder layers; the model has 80; nearest valid: Et*80L"),
    (f"diagnose {TITAN} --step 3 --fact etp=nan", 2, "--fact etp=nan: not a whole number from 1 to 2,147,483,647"),
    # Layouts that cannot be.
    (f"{SMALL} --x 3", 2, "8 GPUs cannot be arranged with x = 3"),
    ("--gpus 64 --model 20b --kept-layers 99", 2, "--kept-layers 99: 20b has 32 layers"),
    (f"{CORE} --tp 8 --pp 16", 2, "64 GPUs cannot be arranged with TP = 8, PP = 16: 128 does not divide them"),
    (f"{CORE} --tp 1 --gtp 1 --pp 1 --cp 1 --dp 32", 2, "TP·GTP·PP·CP·DP = 1·1·1·1·32 is 32, not 64 GPUs"),
    (
        f"{CORE} --pipeline-layout Et*40|t*41L",
        2,
        "has 81 decoder layers; the model has 80; nearest valid: Et*40|t*40L",
    ),
    (
        f"{CORE} --pp 4 --pipeline-layout Et*40|t*40L",
        2,
        "4 stages do not divide its 2 parts; nearest valid: Et*20|(t*20|)*2t*20L",
    ),
    (f"{CORE} --decoder-first-pipeline-num-layers 5", 2, "--pipeline-layout LAYOUT says the layers of each stage"),
    (f"{CORE} --pp 2 --vpp 2 --pipeline-layout Et*40|t*40L", 2, "has 2 parts, which --pp 2 and --vpp 2 do not make"),
    (f"{CORE} --pipeline-layout Et*40|t*40mL", 2, "has 1 MTP layers; the model has 0"),
    (f"{CORE} --pipeline-layout Et*40|t*(20)L", 2, "'*' in part 2 is no layer"),
    (f"{H100} --framework fsdp --pipeline-layout Et*40|t*40L", 2, "has no pipeline stages"),
    (f"{CORE} --pipeline-layout Et*40|t*20|t*20L", 3, "PP·VPP as 3 parts"),
    (f"{CORE} --tp 8 --x 8", 2, "--tp and --x are two names of one option: give one"),
    (f"{CORE} --tensor-parallel-num-weight-shards 16", 2, "is TP times GTP: give --tp too, or --gtp N instead"),
    (f"{CORE} --order x,y,z,data", 2, "rank order 'x,y,z,data' must name axes once each, as in TP,GTP,CP,DP,PP"),
    # What a framework or a cost model does not have.
    (f"{CORE} --cost paper", 2, "--cost paper knows the grids of axonn-tune alone: leave out --framework"),
    (f"{CORE} --y 2", 2, "--y 2: Megatron-Core has no axis y; it has TP, GTP, PP, VPP, CP, DP"),
    (f"{H100} --framework fsdp --context 2", 2, "has no axis context; it has shard, replicate; frameworks that do: "),
    (f"{CORE} --kept-layers 4", 2, "--kept-layers 4: Megatron-Core reshards every layer after forward"),
    ("--gpus 8 --model 5b --framework deepspeed --zero3 1 --kept-layers 4", 2, "zero3 1 gathers no weights"),
    ("--gpus 64 --model 20b --cost paper --rank-by iteration", 2, "cannot rank by iteration"),
    ("--gpus 8 --model nano --framework nemo -o run.sh", 2, "NeMo is priced only: there is no command for it"),
    # Too much.
    ("--gpus 735134400 --pipeline --model 80b", 2, "735,134,400 GPUs have 68,906,250 grids of 5 axes"),
    ("--gpus 720720 --pipeline --model 80b --batch 735134400", 2, "there are 11,809,494 candidates or more"),
    # Files.
    (f"{SMALL} --pick 3", 2, "give -o FILE too"),
    ("--gpus 64 --model 20b -o same.x --html ./same.x", 2, "--output and --html are the same file, ./same.x"),
    ("--gpus 6 --model nano --machine perlmutter --emit slurm -o l.yaml", 2, "do not fill nodes of 4"),
    ("--gpus 8 --model nano --machine localhost --emit slurm -o l.yaml", 2, "no launcher.slurm section"),
    (f"{SMALL} -o /dev/full", 5, "cannot write '/dev/full'"),
    ("--gpus 8 --model /proc/kmsg", 2, "'/proc/kmsg' is a device or a pipe, not a file"),
    (f"{SMALL} --machine broken.yaml", 2, "broken.yaml:"),
    # Nothing feasible.
    ("--gpus 8 --model 640b", 3, "memory"),
    ("--gpus 1021 --model 80b", 3, "binding constraint"),
    ("--gpus 64 --model 20b --batch 1 --x 1 --y 1", 3, "nearest change"),
    ("sweep --gpus 1,2 --model 640b", 3, "nothing is feasible"),
    ("compare --gpus 4 --model 80b", 3, "Megatron-Core: needs 322.8 GiB of 35.4 GiB"),
    ("compare --gpus 7 --model nano-moe --machine dgx-h100", 3, "4D: global_batch (48) is not divisible by data·z = 7"),
    (f"{CORE} --vpp 200 --pp 4", 3, "layers (80) is less than PP·VPP = 800 of any layout that has PP=4"),
    ("--gpus 96 --model llama3-70b --framework megatron-core --tp 3", 3, "heads (64) is not divisible by TP = 3"),
    (f"{CORE} --micro-batch-size 7", 3, "micro-batch: 7 does not divide the share of the batch of any layout"),
    # Other commands.
    ("sweep --gpus 8..4 --model 5b", 2, "the range '8..4' is empty"),
    ("sweep --gpus 4,6 --model 5b --weak --batch 3", 2, "no whole number of sequences"),
    ("explain", 2, "Missing options --gpus and --model"),
    ("explain --gpus 64 --model 20b --trace -", 2, "standard output has the explanation"),
    (f"explain {COMMANDS}/torchtitan-8b.sh", 2, "is not a launch config: pass scripts and configs with"),
    (f"explain {TITAN} --x 8", 2, "says all of it: leave out --x"),
    (f"--gpus 8 --model {COMMANDS / 'torchtitan-8b.sh'}", 2, "make a model file of it first"),
    (f"explain --from-command {COMMANDS}/torchtitan-70b.toml", 2, "does not state n_gpus: add --gpus N"),
    (f"models import {COMMANDS}/zero3.json", 2, "no 'model_type': not a Hugging Face model config"),
    (f"models import {COMMANDS}/fsdp.yaml", 2, "does not state layers, hidden, heads, ffn, vocab"),
    ("run nowhere.yaml", 2, "nowhere.yaml"),
    ("calibrate -o m.yaml --budget soon", 2, "--budget soon: write a time such as 20s"),
    ("calibrate --from-logs a.log -o here.yaml", 2, "axonn-tune learn a.log --machine NAME -o FILE"),
    ("completion tcsh", 2, "'tcsh' is not one of"),
    ("data . --include /etc/* -o ../x", 2, "a pattern of names below a folder is needed"),
    ("learn rows.csv --fact layerz=3 -o x.yaml", 2, "--fact layerz: no such column, did you mean 'layers'?"),
    ("learn nothing.csv -o x.yaml", 2, "no file 'nothing.csv'"),
    ("diagnose nothing.log", 2, "nothing.log"),
    ("regress empty.yaml", 2, "the file is empty"),
    (
        "regress base.yaml --record --gpus 16 --model 5b --framework megatron-core --reason first",
        2,
        "--framework megatron-core: only layouts of axonn-tune (4D) are recorded and run",
    ),
    ("regress base.yaml --tolerance steps=1", 2, "no 'steps', did you mean 'step'?"),
    ("validate base.yaml", 2, "this is a baseline document"),
    ("validate --gpus 1 --model nano --machine localhost --update", 2, "comes with the tool"),
    ("validate --gpus 64 --model nano --machine localhost", 2, "64 ranks are more than"),
    ("accuracy --rows none.csv", 2, "no file 'none.csv'"),
    ("accuracy --machine perlmutter", 2, "--machine prices the steps of --rows"),
    ("validate --gemm rows.csv", 2, "python -m tools.measurements --gemm FILE"),
    ("validate --published -o m.yaml --update", 2, "The measurements say all of it: leave out -o, --update"),
    ("report config.json -o r.html", 2, "is not a document with a schema"),
    ("--gpus 8 --model nano --imbalance \u202e", 2, "--imbalance holds the control character '\\u202e'"),
    ("validate --gpus 2 --model nano --machine localhost --start-with '", 2, '--start-with "\'": No closing quotation'),
    (
        "--gpus 8 --model nano --tokens-total 1T --price 2 --set machine.operation.price_per_gpu_hour=-1",
        2,
        "--price 2 and --set machine.operation.price_per_gpu_hour=-1 both say a price",
    ),
]


def fails(line: str, *, code: int) -> Finished:
    """Run a command line that has to fail in one way, with one message."""
    finished = run(line)
    assert finished.code == code, finished.err
    assert "Traceback" not in finished.err
    assert finished.err.strip()
    return finished


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the calls read."""
    found = tmp_path_factory.mktemp("calls")
    (found / "rows.csv").write_text(f"{STEPS}a,H100,8,megatron-core,32,4096,32,16384,50257,2048,64,3\n", "utf-8")
    (found / "empty.yaml").write_text("", "utf-8")
    good(f"regress {found}/base.yaml --record --gpus 8 --model nano --top 1")
    (found / "broken.yaml").write_text("layers: [1, 2", "utf-8")
    (found / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    return found


@pytest.mark.parametrize(("line", "code", "said"), CALLS, ids=[line.encode("ascii", "replace") for line, *_ in CALLS])
def test_wrong_calls(line: str, code: int, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards exit codes 2, 3 and 5: what is wrong is named with the nearest right one, and nothing is written."""
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    finished = fails(line, code=code)
    assert said in " ".join(finished.err.split()), finished.err
    assert sorted(folder.rglob("*")) == before


def test_nothing_feasible_is_still_json() -> None:
    """Guards programs: the document is complete, with no config and the counts of what was rejected."""
    finished = fails("--gpus 8 --model 640b --format json", code=3)
    assert finished.document["configs"] == []
    assert finished.document["searched"]["rejected"]["memory"] > 0


@pytest.mark.parametrize("variables", [{"COMP_CWORD": "1"}, {"_AXONN_TUNE_COMPLETE": "nonsense"}])
def test_completion_that_no_shell_asks_for(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards variables that were exported by mistake."""
    for name, value in ({"_AXONN_TUNE_COMPLETE": "bash_complete"} | variables).items():
        monkeypatch.setenv(name, value)
    assert "are not as a shell sets them" in fails("--gpus 8", code=2).err


@pytest.mark.parametrize(("line", "code"), [("--gpus 8", 2), ("--gpus 8 --model nano --machine localhost", 5)])
def test_standard_error_on_a_full_disk(line: str, code: int) -> None:
    """Guards exit code 1 against a message that cannot be written."""
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "axonn_tune", *line.split()]
        assert subprocess.run(command, stdout=subprocess.DEVNULL, stderr=full, check=False).returncode == code


@pytest.mark.parametrize(
    "line",
    [
        "--gpus 8 --machine {}.yaml --model nano",
        "--gpus 8 --model nano --html {}.html",
        "learn {}.log -o ours.yaml",
        "models check {}.yaml",
        "{}",
    ],
)
def test_names_of_files_do_not_drive_the_terminal(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards messages that show a path: as on a terminal, where nothing is stripped of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("click.utils.should_strip_ansi", lambda *_: False)
    said = fails(line.format("\x1b[31m"), code=2).err
    assert "\x1b" not in said
    assert "[31m" in said or "control character '\\x1b'" in said


def test_contents_of_files_do_not_drive_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what a table or a remark repeats of rows and scripts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("click.utils.should_strip_ansi", lambda *_: False)
    (tmp_path / "rows.csv").write_text(f"{STEPS}\x1b[31mred,H100,8,x,32,4096,32,16384,50257,2048,64,3\n", "utf-8")
    assert "rows.csv:2: holds the control character '\\x1b'" in fails("validate --rows rows.csv", code=2).err
    sizes = "--num-layers 2 --hidden-size 192 --num-attention-heads 24 --seq-length 64 --global-batch-size 8"
    script = f"torchrun --nproc_per_node 8 pretrain_gpt.py {sizes} --tokenizer-model gpt2\x1b[31m\n"
    (tmp_path / "run.sh").write_text(script, "utf-8")
    out = good("explain --from-command run.sh --machine dgx-h100").out
    assert "as of GPT-2" in out
    assert "\x1b" not in out


def test_interrupts_and_our_own_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards exit codes 130 and 1: no traceback but on request, by option or variable."""

    def ends(error: type[BaseException]) -> None:
        def searched(*_: object, **__: object) -> None:
            raise error("somewhere inside")

        monkeypatch.setattr("axonn_tune.cli.search.search_command.callback", searched)

    monkeypatch.setenv("AXONN_TUNE_DEBUG", "")
    ends(KeyboardInterrupt)
    fails(SMALL, code=130)
    ends(ZeroDivisionError)
    said = fails(SMALL, code=1).err
    assert re.search("Internal error: ZeroDivisionError: somewhere inside[^$]*report this", said)
    assert "Traceback" in run(f"--debug {SMALL}").err
    monkeypatch.setenv("AXONN_TUNE_DEBUG", "1")
    assert "Traceback" in run(SMALL).err


def test_help_lists_examples_and_exit_codes() -> None:
    """Guards --help: a first call to copy, and every exit code."""
    out = good("--help").out
    assert "axonn-tune --gpus 1024 --model 80b" in out
    assert all(f"\n    {code:<3}  " in out for code in (0, 1, 2, 3, 4, 5, 6, 75, 130))
    assert good("--version").out.startswith("axonn-tune")
