"""The run that a command or config file states: software, layout, model, what is assumed, and what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from axonn_tune.api.learning import explain_command
from axonn_tune.cost.price import price
from axonn_tune.cost.work import timed_gemms
from axonn_tune.errors import AxonnTuneError, DocumentError, UsageError
from axonn_tune.frameworks import step_on
from axonn_tune.job import Layout
from axonn_tune.learning.arguments import Stated, columns_of
from axonn_tune.learning.evidence import Setup
from axonn_tune.learning.run import CommandRun
from axonn_tune.learning.setups import changes_of
from axonn_tune.learning.stated import read_run
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.machine import Machine
from axonn_tune.validation.published.cases import Case

COMMANDS, PUBLIC = (Path(__file__).parents[2] / "fixtures" / name for name in ("commands", "public_scripts"))
H100 = load_machine("dgx-h100").document
GPT = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --vocab-size 50257 "
CORE = f"torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt.py {GPT} --micro-batch-size 1 --global-batch-size 64 "


SIZE, LLAMA = {"n_gpus": "64"}, {"mbs": "1", "seq": "8192", "model": "llama3-8b"}


def stated(folder: Path, text: str, *, name: str = "run.sh", **options: str) -> CommandRun:
    """The run of a text."""
    (folder / name).write_text(text, "utf-8")
    return read_run(folder / name, given=options)


def case(run: CommandRun) -> Case:
    """What the cost model sees of it, of whose configurations there is one."""
    found = run.case(H100)
    assert len(found.configurations) == 1
    return found


def one(run: CommandRun) -> Layout:
    """Its configuration."""
    return case(run).configurations[0]


def fixture(name: str, **options: str) -> CommandRun:
    """The run of a file."""
    model = options.pop("model", None)
    return read_run(COMMANDS / name, given=options, model=model)


def sizes(run: CommandRun) -> dict[str, int]:
    """Axes above 1, and chunks, by the framework's names."""
    found = one(run)
    layout = run.case(H100).framework.layout({**found.grid.by_axis, "chunks": found.chunks})
    return {name: size for name, size in layout.items() if size > 1}


EP = "--expert-model-parallel-size"
PP, OVERLAP = "--pipeline-model-parallel-size", "--overlap-moe-expert-parallel-comm"


@pytest.mark.parametrize(
    ("name", "given", "framework", "layout", "words"),
    [
        ("apertus-70b.sh", {}, "megatron-core", {"TP": 4, "PP": 8, "VPP": 5, "DP": 128}, "bf16 1 none"),
        ("gpt-one-line.sh", {}, "megatron-core", {"TP": 2, "DP": 16}, "fp16 2 selective"),
        ("llama31-70b-nemo.sh", {}, "nemo", {"TP": 4, "PP": 4, "VPP": 5, "CP": 2, "DP": 64}, "bf16 1 none"),
        ("megatron-deepspeed.sh", {}, "deepspeed", {"tp": 2, "pp": 4, "dp": 4}, "bf16 1 full"),
        ("torchtitan-8b.sh", {}, "torchtitan", {"tp": 2, "dp_shard": 8, "dp_replicate": 4}, "bf16 1 full"),
        ("torchtitan-70b.toml", SIZE, "torchtitan", {"tp": 8, "dp_shard": 4, "dp_replicate": 2}, "bf16 2 selective"),
        ("fsdp.yaml", LLAMA, "fsdp", {"shard": 8, "replicate": 4}, "bf16 1 full"),
    ],
)  # fmt: skip
def test_files_of_each_kind_are_read(
    name: str, given: dict[str, str], framework: str, layout: dict[str, int], words: str
) -> None:
    """Guards the readers: software, layout in its own words, number format, micro-batch, recompute."""
    run = fixture(name, **given)
    assert run.software == framework
    assert sizes(run) == layout
    assert f"{case(run).workload.precision} {one(run).micro_batch} {one(run).recompute}" == words


def test_a_model_of_a_trillion_parameters_has_a_plain_name(tmp_path: Path) -> None:
    """Guards `gpt-1.01e+03b`: 128 layers of 12 · 25,600² are 1,007 billion, with an embedding 1,008: three digits."""
    large = "--num-layers 128 --hidden-size 25600 --num-attention-heads 160 --ffn-hidden-size 102400"
    assert stated(tmp_path, f"{CORE} {large}").model().name == "gpt-1010b"


def test_what_deepspeed_does_not_say_is_left_open() -> None:
    """Guards ZeRO-3's JSON: the caller's recompute is unknown, and the model is named beside it."""
    run = fixture("zero3.json", n_gpus="64", seq="8192", model="llama3-8b")
    found = run.case(H100)
    assert run.software == "deepspeed"
    assert [one.recompute for one in found.configurations] == ["none", "selective", "full"]
    assert {(one.grid.z, one.micro_batch) for one in found.configurations} == {(64, 1)}
    assert "recompute is not stated: the kind that fits and is fastest" in run.assumed
    with pytest.raises(UsageError, match=r"layers, hidden, heads, ffn, vocab, seq: add --model NAME\|FILE, --seq N"):
        fixture("zero3.json", n_gpus="64")


def test_megatron_axonn_splits_over_three_axes_and_its_micro_batch_over_depth() -> None:
    """Guards row, column and depth as x, y and z, cached layers, and overlaps that are not asked for."""
    run = fixture("megatron-axonn.sh")
    found = one(run)
    assert (found.grid.x, found.grid.y, found.grid.z, found.grid.data) == (2, 2, 4, 4)
    assert (found.micro_batch, found.kept_layers, found.recompute) == (1, 2, "full")
    assert [axis for axis in found.grid.order if found.grid.axis_size(axis) > 1] == ["y", "x", "z", "data"]
    assert set(case(run).workload.overlaps) & {"gather_prefetch", "weight_gradient"} == {"gather_prefetch"}


def test_what_only_the_shell_knows_is_empty_after_a_switch_and_asked_for_elsewhere(tmp_path: Path) -> None:
    """Guards `--sequence-parallel $EXTRA`: a switch has no value, which a number needs."""
    run = stated(tmp_path, f"{CORE} --sequence-parallel $EXTRA ${{MORE[@]}} --tensor-model-parallel-size 2 --bf16 $Z")
    assert case(run).framework.step.sequence_parallel
    assert sizes(run)["TP"] == 2
    for name in ("$EXTRA", "${MORE[@]}", "$Z"):
        assert f"run.sh:1: {name} is not set in the file: taken to be empty" in run.assumed
    with pytest.raises(DocumentError, match=r"tensor_model_parallel_size: is \$TP, which the file does not set"):
        stated(tmp_path, f"{CORE} --tensor-model-parallel-size $TP")


def test_flags_of_the_step_are_taken(tmp_path: Path) -> None:
    """Guards overlap, distributed optimizer, gradients' format, dropout, exchange of keys and values."""
    plain = case(stated(tmp_path, f"{CORE} --tensor-model-parallel-size 2"))
    recipe = case(stated(tmp_path, f"{CORE} {' '.join(_RECIPE)}"))
    assert "data_parallel" not in plain.workload.overlaps
    assert "data_parallel" in recipe.workload.overlaps
    before, after = plain.framework.step, recipe.framework.step
    assert (before.distributed_optimizer, before.parameter_overlap, before.sequence_parallel) == (False, True, False)
    assert (after.distributed_optimizer, after.parameter_overlap, after.sequence_parallel) == (True, True, True)
    assert (before.gradient_bytes, after.gradient_bytes) == (None, 2)
    assert (before.dropout, after.dropout) == (True, False)
    assert after.context_exchange == "all_gather"
    assert after.pipelined_tensor


_RECIPE = (
    *("--tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel --use-distributed-optimizer",),
    *("--overlap-grad-reduce --overlap-param-gather --grad-reduce-in-bf16 --hidden-dropout 0.0",),
    *("--attention-dropout 0 --cp-comm-type all_gather --tp-comm-overlap",),
)


PP4 = "--pipeline-model-parallel-size 4"
MOE = "--num-experts 8 --moe-ffn-hidden-size 1024 --expert-model-parallel-size 4"
ENDS = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (PP4, None),
        (f"{PP4} --pipeline-model-parallel-layout 'Et*7|t*9|t*9|t*7L'", (7, 9, 9, 7)),
        (f"{PP4} --pipeline-model-parallel-layout 'Et*3|(tt|)*2t*4|(t*4|)*3t*9L'", (3, 2, 2, 4, 4, 4, 4, 9)),
        (f"{PP4} --pipeline-model-parallel-layout 'Et*8|(t*8|)*2t*8L'", None),
        (f"{PP4} --pipeline-model-parallel-layout 'Et*8|t*8|t*4|(t|)*12L'", (8, 8, 4, *[1] * 12, 0)),
        (f"{PP4} --pipeline-model-parallel-layout 'Et*8|(t*8|)*2T*8L'", "'T' in part 4 is no layer"),
        (f"{PP4} --pipeline-model-parallel-layout 'Et*8|(t*8|)*2t*9L'", "nearest valid: Et*8|t*8|t*7|t*9L"),
        (f"{PP4} --pipeline-model-parallel-layout 'Et*16|t*16L'", "4 stages do not divide its 2 parts"),
        (f"{PP4} --decoder-first-pipeline-num-layers 5 --decoder-last-pipeline-num-layers 7", (5, 10, 10, 7)),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*9|t*8|t*8|t*7L'", (9, 8, 8, 7)),
        (f"{PP4} --num-layers 30 {ENDS}", (7, 8, 8, 7)),
        (f"{PP4} --num-layers 30 {ENDS} --num-layers-per-virtual-pipeline-stage 4", (3, *[4] * 6, 3)),
        (f"{PP4} --num-layers 6 {ENDS} --num-virtual-stages-per-pipeline-rank 2", (0, *[1] * 6, 0)),
        (f"{PP4} --num-layers 2 {ENDS}", (0, 1, 1, 0)),
        (f"{PP4} --num-layers 7 {ENDS.split()[0]} --num-virtual-stages-per-pipeline-rank 2", (0, *[1] * 7)),
        (f"{PP4} --num-layers 6 --pipeline-model-parallel-layout 'E|(t|)*6L'", (0, *[1] * 6, 0)),
        (f"{PP4} --num-layers 6 --pipeline-model-parallel-layout 'E|(t|)*6L' {MOE}", (0, *[1] * 6, 0)),
    ],
)  # fmt: skip
def test_stages_may_differ_in_layers(flags: str, parts: tuple[int, ...] | str | None, tmp_path: Path) -> None:
    """Guards layouts and uneven ends, with parts that hold no layer; what is no layout is refused with its line."""
    run = stated(tmp_path, f"{CORE} {flags}")
    if isinstance(parts, str):
        with pytest.raises(DocumentError, match=r"/run.sh:1: parts: ") as caught:
            case(run)
        assert parts in str(caught.value)
    else:
        assert one(run).parts == parts
        assert one(run).chunks == (len(parts) // one(run).grid.pipeline if parts else 1)


def test_lists_of_layers_are_parts() -> None:
    """Guards a layout of YAML (NeMo, Megatron-Bridge), and torchtitan's names of modules, by which it splits models."""
    keys = {"pipeline_model_parallel_size": "2", "num_layers": "5"}
    layers = "[['embedding', 'decoder'], ['decoder'], ['decoder', 'decoder'], ['decoder', 'loss']]"
    found = columns_of({name: Stated(value, 1) for name, value in {**keys, _LAYOUT: layers}.items()})
    assert (found["parts"].value, found["vpp"].value) == (layers, 2)
    keys = {"pipeline_parallel_degree": "2", "n_layers": "12", "pipeline_parallel_schedule": "1F1B"}
    modules = "[['tok_embeddings', 'layers.0', 'layers.1'], ['layers.10', 'layers.11', 'norm', 'output']]"
    keys["module_fqns_per_model_part"] = modules.replace("['layers.10'", "['layers.2', 'layers.10'")
    found = columns_of({name: Stated(value, 1) for name, value in keys.items()})
    assert (found["parts"].value, found["vpp"].value) == ((2, 3), 1)


_LAYOUT = "pipeline_model_parallel_layout"


def test_layers_that_do_not_divide_are_explained(tmp_path: Path) -> None:
    """Guards a loss that counts as a layer beside layers that divide without it."""
    with pytest.raises(DocumentError) as caught:
        case(stated(tmp_path, f"{CORE} {PP4} --account-for-loss-in-pipeline-split"))
    words = "parts hold 31 layers together, but the model has 32; pp x vpp must divide the layers and what"
    assert f"run.sh:1: {words} account_for_loss_in_pipeline_split counts as one" in str(caught.value)


def test_torchtitan_counts_the_ends_as_layers() -> None:
    """Guards its default split, and looped schedules."""
    keys = {"pipeline_parallel_degree": "4", "n_layers": "32", "pipeline_parallel_first_stage_less_layers": "1"}
    keys |= {"pipeline_parallel_last_stage_less_layers": "1", "pipeline_parallel_schedule": "1F1B"}
    found = columns_of({name: Stated(value, 1) for name, value in keys.items()})
    assert (found["parts"].value, found["vpp"].value) == ((8, 9, 8, 7), 1)
    keys["pipeline_parallel_schedule"] = "Interleaved1F1B"
    assert columns_of({name: Stated(value, 1) for name, value in keys.items()})["vpp"].value == 2
    # 32 layers and the ends are 34, in parts of up to 3: 12.
    keys["pipeline_parallel_layers_per_stage"] = "3"
    found = columns_of({name: Stated(value, 1) for name, value in keys.items()})
    assert (found["parts"].value, found["vpp"].value) == ((2, *[3] * 9, 2, 1), 3)


@pytest.mark.parametrize(
    ("flags", "recompute", "layers"),
    [
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 3", "full", 3),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "full", None),
        ("--recompute-granularity selective --recompute-modules mlp layernorm", "layernorm,mlp", None),
        ("--recompute-activations --recompute-modules layernorm", "layernorm", None),
        ("--recompute-granularity selective --recompute-modules moe", "moe", None),
        ("--recompute-activations", "selective", None),
        ("", "none", None),
    ],
)
def test_recompute_is_read_as_a_set_on_some_layers(
    flags: str, recompute: str, layers: int | None, tmp_path: Path
) -> None:
    """Guards Megatron-Core's four arguments of recompute; modules of experts are those of the set, too."""
    found = one(stated(tmp_path, f"{CORE} --pipeline-model-parallel-size 4 {flags}"))
    assert (found.recompute, found.recompute_layers) == (recompute, layers)


@pytest.mark.parametrize(("option", "recompute"), [("op", "selective"), ("1", "full"), ("3", "full on 10")])
def test_every_nth_layer_is_as_many_of_the_first(option: str, recompute: str, tmp_path: Path) -> None:
    """Guards torchtitan 0.2.2's `selective_ac_option`, and that it is said which layers are priced instead."""
    flavor = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\n[activation_checkpoint]\n'
    text = f'{flavor}mode = "selective"\nselective_ac_option = "{option}"\n'
    run = stated(tmp_path, text, name="run.toml", n_gpus="8")
    assert one(run).recomputed == recompute
    said = "one layer in 3 is recomputed: priced as the first 10 of 32 of each chunk"
    assert (said in run.assumed) == (option == "3")


def test_what_has_a_default_of_its_own_is_said(tmp_path: Path) -> None:
    """Guards one query group where a switch alone asks for groups, and layers that are repeated several at once."""
    flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4"
    run = stated(tmp_path, f"{CORE} --group-query-attention {flags}")
    assert case(run).model.kv_heads == 1
    assert "the number of query groups is not stated: 1, as Megatron-LM has it" in run.assumed
    assert "recompute of 4 layers at once is priced as of each by itself, which has other memory" in run.assumed
    assert case(stated(tmp_path, CORE)).model.kv_heads == 32


@pytest.mark.parametrize(
    ("launcher", "gpus"),
    [
        ("torchrun --nproc_per_node 8", 8),
        ("#SBATCH --nodes=2\ntorchrun --nproc_per_node 4", 8),
        ("#SBATCH -n 16\n#SBATCH --gpus-per-task=1\nsrun -N 2 python", 16),
        ("srun -N2 --ntasks-per-node=8 --gpus-per-node=8 python", 16),
        ("#SBATCH -G 16\nsrun python", 16),
        ("mpirun -np 16 python", 16),
        ("mpiexec --verbose -n 16 -ppn 4 python", 16),
        ("deepspeed --hostfile hosts --num_gpus 8", None),
        ("deepspeed --num_gpus 8 --num_nodes 2", 16),
        ("#SBATCH --nodes=2\n#SBATCH --gpus-per-node=h100:4\nsrun python", 8),
        ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:8 # all\nsrun ./launch.sh python", 16),
        (
            '#SBATCH --nodes=2\nL="python -m torch.distributed.run --nproc_per_node 8 --nnodes $SLURM_NNODES"\n'
            'echo $L pretrain_gpt.py --num-layers 2\nsrun --wait=60 bash -c "$L --node_rank \\$SLURM_PROCID "',
            16,
        ),
        (
            "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\nexport L='torchrun --nproc_per_node 4 --nnodes 2'\n"
            "srun bash -c '$L '",
            8,
        ),
        ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nsrun python", None),
        ("#SBATCH -n 16\nsrun -N 2 python", None),
        ("#SBATCH --nodes=2\n#SBATCH --gres=lscratch:400,gpu:a100:4\nsrun python", 8),
        ("#SBATCH --nodes=2\n#SBATCH --gres=gpu\nsrun python", 2),
        ("#SBATCH --nodes=2\n#SBATCH --gres=lscratch:400\nsrun python", None),
    ],
)
def test_the_number_of_gpus_is_the_launchers(launcher: str, gpus: int | None, tmp_path: Path) -> None:
    """Guards torchrun, srun, mpirun, deepspeed, within quotes too, and what the job asks for; tasks are no GPUs."""
    ended = launcher[-1] if launcher[-1] in "'\"" else ""
    text = f"{launcher.rstrip(ended)} pretrain_gpt.py {GPT} --micro-batch-size 1 --global-batch-size 64{ended}"
    if gpus is None:
        with pytest.raises(UsageError, match="does not state n_gpus: add --gpus N"):
            stated(tmp_path, text)
        return
    assert stated(tmp_path, text).columns["n_gpus"].value == gpus


def test_an_argument_list_needs_no_program(tmp_path: Path) -> None:
    """Guards lists of arguments, one a line, and arrays of a script that starts nothing itself."""
    listed = GPT.replace(" --", "\n--") + "\n--micro-batch-size 1 --global-batch-size 64 --world-size 32\n"
    assert sizes(stated(tmp_path, listed, name="args.txt")) == {"DP": 32}
    arrays = f"ARGS=(\n{listed})\nsource launch.sh\n"
    assert sizes(stated(tmp_path, arrays)) == {"DP": 32}


TP, BATCH = "--tensor-model-parallel-size", "run.sh:2: gbs: the global batch, 60, is not divisible by micro-batch 1 x"


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("echo hello", UsageError, "DeepSpeed, accelerate or a Trainer"),
        (CORE.replace("--nnodes 4 --nproc-per-node 8", ""), UsageError, "run.sh:1: the file does not state n_gpus"),
        (CORE.replace("--nnodes 4", "--nnodes $N"), UsageError, "n_gpus: add --gpus N (--nnodes is $N)"),
        (CORE.replace("--num-layers 32", ""), UsageError, "does not state layers: add --model NAME|FILE"),
        (CORE.replace("--seq-length 2048", ""), UsageError, "does not state seq: add --seq N"),
        (f"T=3\n{CORE} {TP} $T", UsageError, "run.sh:2: tp 3 x pp 1 x cp 1 = 3 ranks, but n_gpus is 32"),
        (f"{CORE} {TP} $T", DocumentError, "run.sh:1: tensor_model_parallel_size: is $T, which the file does not set"),
        (f"{CORE} {TP} $(cat n)", DocumentError, "is what a command prints: write its value"),
        (f"A=1\n{CORE.replace('size 64', 'size 60')}", DocumentError, BATCH),
        (f"A=1\n{CORE} --seq-length 2k", DocumentError, "run.sh:2: --seq-length: is '2k', not a whole number from 1"),
        (f"{CORE} --normalization 1e308", DocumentError, "--normalization 1e308: must be LayerNorm or RMSNorm"),
        (f"T=1\n{CORE} --num-experts 8 --moe-router-topk 9", DocumentError, "run.sh:2: moe_router_topk: is 9, but"),
        (f"{CORE} --num-experts 8 --moe-router-topk two", DocumentError, "--moe-router-topk: is 'two', not a whole"),
        (f"{CORE} --num-experts 8 --moe-router-topk -8", DocumentError, "is '-8', not a whole number from 1"),
        (f"{CORE} --num-experts 8 {EP} 3", DocumentError, "experts (8) is not divisible by EP = 3"),
        (f"{CORE} {EP} 8", DocumentError, "ep: is 8, but the model has no experts"),
        (f"{CORE} --num-experts 8 --moe-layer-freq [1]*3", DocumentError, "has 3 marks, but there are 32 layers"),
        (f"{CORE} --num-experts 8 --moe-layer-freq __import__", DocumentError, "not a list of 0 and 1"),
        (f"{CORE} --hybrid-layer-pattern MX", DocumentError, "layers 'X' are not modelled, only M, G, "),
        (f"{CORE} --experimental-attention-variant gdn2", DocumentError, "'gdn2' is not modelled, only gated"),
        (f"{CORE} --num-experts 8 --moe-layer-freq []", DocumentError, "has 0 marks, but there are 32 layers"),
        (f"{CORE} --num-experts 8 --moe-layer-freq 0", DocumentError, "is 0, neither a whole number from 1 nor"),
        (f"{CORE} --moe-expert-capacity-factor nan", DocumentError, "is 'nan', not a number above 0"),
        (f"{CORE} --moe-expert-capacity-factor 0", DocumentError, "is '0', not a number above 0"),
        (f"{CORE} --moe-shared-expert-intermediate-size -2", DocumentError, "is '-2', not a whole number from 0"),
        (f"{CORE} --kv-channels -1", DocumentError, "run.sh:1: --kv-channels: is '-1', not a whole number from 1"),
        (f"{CORE} --kv-lora-rank 0", DocumentError, "--kv-lora-rank: is '0', not a whole number from 1"),
        (f"{CORE} --mtp-num-layers ٣", DocumentError, "--mtp-num-layers: is '٣', not a whole number from 0"),
        (f"{CORE} --exp-avg-dtype fp9", DocumentError, "--exp-avg-dtype: is 'fp9', not fp32"),
        (f"{CORE} --rotary-percent 2", DocumentError, "--rotary-percent: is '2', not a number from 0 to 1"),
        (f"{CORE.replace('layers 32', 'layers 33')} {PP} 4", DocumentError, "nearest: 32 or 36, or --"),
        (f"{CORE} --num-experts 8 {EP} 2 {PP} 2 {OVERLAP}", DocumentError, "must be specified with overlap_moe_expert"),
        (f"{CORE} --window-size x", DocumentError, "window_size: is 'x', not two whole numbers such as 127,0"),
        (f"{CORE} --bf16 --fp8-format e4m3 --fp8-recipe mxfp8", DocumentError, "has no mxfp8; it has"),
        (CORE.replace("--num-attention-heads 32", "--num-attention-heads 31"), None, ""),
        (f"{CORE} {TP} 32 --num-attention-heads 48", DocumentError, "heads (48) is not divisible by TP = 32"),
        (f'{CORE} --name "x', DocumentError, "run.sh:1: a quote \" is not closed"),
    ],
)  # fmt: skip
def test_what_is_missing_or_wrong_is_named(
    text: str, kind: type[AxonnTuneError] | None, message: str, tmp_path: Path
) -> None:
    """Guards errors: the file, the line, the value, and what to add."""
    if kind is None:
        case(stated(tmp_path, text))
        return
    with pytest.raises(kind) as caught:
        case(stated(tmp_path, text))
    assert message in str(caught.value)
    assert "run.sh" in str(caught.value)


def test_what_is_given_holds(tmp_path: Path) -> None:
    """Guards options beside a command: they fill gaps, and hold over what is stated, which is said with its line."""
    template = CORE.replace("--nnodes 4", "--nnodes 1") + "--tensor-model-parallel-size 8"
    with pytest.raises(UsageError, match=r"tp 8 x pp 2 x cp 1 = 16 ranks, but n_gpus is 8"):
        stated(tmp_path, f"{template} --pipeline-model-parallel-size 2")
    run = stated(tmp_path, f"{template} --pipeline-model-parallel-size 2", n_gpus="64", gbs="128")
    assert sizes(run) == {"TP": 8, "PP": 2, "DP": 4}
    assert case(run).workload.global_batch == 128
    assert "--gpus 64 holds in place of the file's n_gpus 8 (line 1)" in run.assumed
    assert "--batch 128 holds in place of the file's gbs 64 (line 1)" in run.assumed
    assert not any("holds" in words for words in stated(tmp_path, CORE, n_gpus="32").assumed)
    run = read_run(tmp_path / "run.sh", given={}, model="llama3-8b")
    assert case(run).model == load_model("llama3-8b").document
    assert "--model holds in place of the file's heads 32, ffn" not in run.assumed
    assert any(words.startswith("--model holds in place of the file's vocab 50257") for words in run.assumed)
    assert case(stated(tmp_path, CORE, precision="bf16")).workload.precision == "bf16"
    assert case(stated(tmp_path, CORE)).workload.precision == "fp32"
    run = stated(tmp_path, f"{CORE} --bf16 --fp8-format hybrid")
    assert case(run).workload.precision == "fp8-delayed"
    assert one(stated(tmp_path, f"{CORE} --micro-batch-size {{{{N}}}}", mbs="2")).micro_batch == 2
    with pytest.raises(UsageError, match="the sizes of 3B are not known, only those of 120b, 20b, 235b-a22b"):
        stated(tmp_path, '[model]\nname = "llama3"\nflavor = "3B"\n', name="run.toml", n_gpus="8")


def test_recompute_modules_and_fp16_gradients_are_priced(tmp_path: Path) -> None:
    """Guards --recompute-modules, unfused accumulation, and FP16's gradients, which are in FP16 unless told."""
    flags = "--bf16 --recompute-granularity selective --recompute-modules layernorm core_attn"
    run = stated(tmp_path, f"{CORE} {flags} --no-gradient-accumulation-fusion")
    assert one(run).recompute == "core_attn,layernorm"
    assert not case(run).framework.step.fused_accumulation
    half, told = (
        case(stated(tmp_path, f"{CORE} --fp16 {more}")) for more in ("", "--accumulate-allreduce-grads-in-fp32")
    )
    assert (half.framework.step.gradient_bytes, told.framework.step.gradient_bytes) == (2, None)


@pytest.mark.parametrize(
    ("flags", "states"),
    [
        ("--bf16 --exp-avg-dtype bf16", (None, None, None)),
        ("--bf16 --use-precision-aware-optimizer", (2, 4, 4)),
        ("--fp16 --use-precision-aware-optimizer --exp-avg-dtype fp16", (4, 2, 4)),
        ("--fp16 --use-precision-aware-optimizer --main-params-dtype fp16 --exp-avg-sq-dtype fp8", (2, 4, 1)),
        (
            "--bf16 optimizer.use_precision_aware_optimizer=true optimizer.store_param_remainders=false "
            "optimizer.exp_avg_dtype=torch.bfloat16 optimizer.exp_avg_sq_dtype=torch.uint8",
            (4, 2, 1),
        ),
    ],
)
def test_types_of_optimizer_states_are_read(flags: str, states: tuple[int | None, ...], tmp_path: Path) -> None:
    """Guards the precision-aware optimizer of Megatron-LM and Bridge: types that it keeps, remainders in BF16."""
    run = stated(tmp_path, f"{CORE} {flags}")
    step = case(run).framework.step
    assert (step.master_bytes, step.exp_avg_bytes, step.exp_avg_sq_bytes) == states
    assert not [words for words in run.ignored if "dtype" in words or "precision" in words]


@pytest.mark.parametrize(
    ("flags", "scopes"),
    [
        ("", ()),
        ("--cuda-graph-impl none --cuda-graph-modules attn", ()),
        ("--cuda-graph-impl local", ("full",)),
        ("--enable-cuda-graph", ("full",)),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules mlp attn", ("attn", "mlp")),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", ("full_iteration",)),
        ("--cuda-graph-impl full_iteration", ("full_iteration",)),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules moe_router", ("moe_router",)),
    ],
)
def test_cuda_graphs_are_read(flags: str, scopes: tuple[str, ...], tmp_path: Path) -> None:
    """Guards CUDA graphs of Megatron-LM: its scopes, whole layers without one, and its older names of both."""
    run = stated(tmp_path, f"{CORE} {flags}")
    assert case(run).framework.step.cuda_graphs == scopes


def test_config_files_are_read_beside_the_script(tmp_path: Path) -> None:
    """Guards job.config_file: what the command says wins, and a file that is not there is said."""
    toml = (COMMANDS / "torchtitan-70b.toml").read_text("utf-8")
    (tmp_path / "llama.toml").write_text(toml, "utf-8")
    text = "torchrun --nproc_per_node 8 --nnodes 8 -m torchtitan.train --job.config_file ./conf/llama.toml"
    found = sizes(stated(tmp_path, f"{text} --parallelism.tensor_parallel_degree 4"))
    assert found == {"tp": 4, "dp_shard": 8, "dp_replicate": 2}
    (tmp_path / "llama.toml").unlink()
    run = stated(tmp_path, f"{text} --module llama3 --config llama3_8b")
    assert "run.sh:1: ./conf/llama.toml does not lie beside it, and is not read" in run.assumed
    (tmp_path / "broken.toml").write_text("[a]\nb = \n", "utf-8")
    with pytest.raises(DocumentError, match=r"broken.toml:2: "):
        read_run(tmp_path / "broken.toml", given={})


@pytest.mark.parametrize(
    ("zero", "off"),
    [
        ('"stage": 3', set()),
        ('"stage": 2', {"data_parallel", "weight_gradient"}),
        ('"stage": 3, "overlap_comm": false', {"data_parallel", "weight_gradient"}),
        ('"stage": 3, "stage3_prefetch_bucket_size": 0', {"gather_prefetch"}),
        ('"stage": 3, "stage3_prefetch_bucket_size": "auto"', set()),
    ],
)
def test_overlaps_of_deepspeed_are_those_of_its_config(zero: str, off: set[str], tmp_path: Path) -> None:
    """Guards overlap_comm, which is on for stage 3 alone unless stated, and a bucket without room to prefetch into,
    as one that the Trainer of transformers sizes is not."""
    text = f'{{"train_batch_size": 64, "zero_optimization": {{{zero}}}}}'
    (tmp_path / "zero.json").write_text(text, "utf-8")
    read = read_run(tmp_path / "zero.json", given={"n_gpus": "64", "seq": "8192"}, model="llama3-8b").case(H100)
    assert set(read.framework.step.overlaps) - set(read.workload.overlaps) == off


def test_a_number_of_layers_makes_no_run_of_megatron(tmp_path: Path) -> None:
    """Guards configs of tools that are not known: one common name was taken for Megatron-Core in FP32."""
    (tmp_path / "own.yaml").write_text("model: {num_layers: 32, width: 4096}\nloader: {train_batch: 512}", "utf-8")
    with pytest.raises(UsageError, match="states no arguments of"):
        read_run(tmp_path / "own.yaml", given={"n_gpus": "32", "seq": "2048", "gbs": "64"}, model="llama3-8b")


PEFT = "adapters are stated by --tune"
TRAINER = "torchrun --nproc_per_node 8 train.py --per_device_train_batch_size 2 "


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("r.sh", f"{CORE}--bf16 --lora-rank 16", f"r.sh:1: --lora-rank 16: {PEFT}"),
        ("r.sh", f"{CORE}--bf16 --lora-target-modules wq wv --seed 1", f"--lora-target-modules wq wv: {PEFT}"),
        ("r.sh", f"{CORE}--bf16 --lora-rank 16", "without --lora-rank the file is priced"),
        ("r.sh", f"{CORE}--bf16 --optimizer soap", "--optimizer soap: is not priced: known are AdamW"),
        ("r.sh", f"{CORE}--bf16 --freeze-all-layers", "frozen weights are priced with --tune alone"),
        ("r.json", '{"zero_optimization": {"stage": 2}, "optimizer": {"type": "Lamb"}}', "optimizer.type Lamb: is not"),
        ("r.json", '{"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}', ""),
        ("r.toml", '[model]\nflavor = "8B"\n[lora]\nrank = 8', f"r.toml:4: lora.rank 8: {PEFT}"),
        ("r.toml", '[model]\nflavor = "8B"\n[optimizer]\nname = "Shampoo"', "optimizer.name Shampoo: is not priced"),
        (
            "r.yaml",
            "finetuning_type: freeze\ncutoff_len: 4096",
            "r.yaml:1: finetuning_type freeze: is not priced: full, lora and qlora are",
        ),
        ("r.yaml", "parallelism: {tp: 2, pp_engine: 1f1b}", "files of nanotron are not read"),
        ("r.sh", "python3 -m verl.trainer.main_ppo trainer.nnodes=4", "files of verl are not read"),
        ("r.sh", f"{TRAINER}--use_peft true --lora_r 8 --vera true", f"--vera true: {PEFT}"),
        ("r.sh", "swift rlhf --rlhf_type dpo --tuner_type lora", "DPO and RL of ms-swift are not read: `swift sft` or"),
        ("r.py", "from nemo.collections import llm\nr.data.global_batch_size = 64", "--framework nemo --batch 64"),
        ("r.py", "from megatron.bridge.recipes import llama3_70b_config", "explain --gpus 8 --model llama3-70b"),
        ("r.py", "from olmo_core.config import DType", "files of OLMo-core are not read"),
        ("r.yaml", "trainer: {train_batch_size: 8, mp: 'p=f32,c=bf16'}", "files of Levanter are not read"),
        ("r.yaml", "loss: {_component_: torchtune.rlhf.loss.DPOLoss}", "files of torchtune are not read"),
    ],
)
def test_other_tools_and_training_that_is_not_priced_are_refused_by_name(
    name: str, text: str, words: str, tmp_path: Path
) -> None:
    """Guards that nothing of them is priced as full training or as another framework, and what is offered instead."""
    (tmp_path / name).write_text(text, "utf-8")
    given = {"n_gpus": "32", "seq": "2048", "gbs": "64"}
    if not words:
        assert read_run(tmp_path / name, given=given, model="llama3-8b").software == "deepspeed"
        return
    with pytest.raises(DocumentError) as caught:
        read_run(tmp_path / name, given=given, model="llama3-8b")
    assert words in str(caught.value)
    assert "rices training of all weights" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("r.yaml", "lora_rank: 16\nlora_dropout: 0.1\ncutoff_len: 4096\nper_device_train_batch_size: 1", "LoRA r 16"),
        ("r.yaml", "cutoff_len: 4096\nquantization_bit: 4\nper_device_train_batch_size: 1", "QLoRA r 8"),
        ("r.sh", f"{TRAINER}--fsdp full_shard --use_peft true --lora_target_modules q_proj k_proj", "LoRA r 16"),
    ],
)
def test_adapters_of_trainers_are_read(name: str, text: str, words: str, tmp_path: Path) -> None:
    """Guards LLaMA-Factory, by whose default adapters of all layers train, and TRL: what trains, by their defaults."""
    (tmp_path / name).write_text(text, "utf-8")
    run = read_run(tmp_path / name, given={"n_gpus": "8", "seq": "2048", "gbs": "64"}, model="llama3-8b")
    trains = run.case(H100).workload.tuning
    assert trains is not None
    assert trains.words == words
    assert "attention.qkv/q" in trains.targets
    assert ("mlp.fc2" in trains.targets) == ("peft" not in text)
    assert trains.dropout == (0.1 if "dropout" in text else 0.05 if "peft" in text else 0.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train.py --beta 0.1", "--beta: generates answers, or holds a reference"),
        ("train.py --simpo_gamma 0.5", "--simpo_gamma: generates answers, or holds a reference"),
        ("scripts/run_dpo.py --bf16 true", "dpo.py: generates answers, or holds a reference"),
        ("examples/scripts/ppo/ppo.py --bf16 true", "ppo.py: generates answers, or holds a reference"),
        ("train.py --adam_beta1 0.9", ""),
    ],
)
def test_training_with_a_second_model_is_not_priced_as_without(text: str, words: str, tmp_path: Path) -> None:
    """Guards DPO and its kin by their arguments and by the programs of TRL's examples: a reference model runs, too."""
    path = tmp_path / "run.sh"
    path.write_text(
        f"# like dpo.py\naccelerate launch --num_processes 8 {text} --per_device_train_batch_size 2", "utf-8"
    )
    given = {"n_gpus": "8", "seq": "2048", "gbs": "64"}
    if not words:
        assert read_run(path, given=given, model="llama3-8b").software == "fsdp"
        return
    with pytest.raises(DocumentError, match=words):
        read_run(path, given=given, model="llama3-8b")


@pytest.mark.parametrize(
    ("name", "text", "optimizer"),
    [
        ("r.sh", f"{CORE}--bf16 --use-distributed-optimizer --optimizer muon --muon-tp-mode distributed", "muon"),
        ("r.sh", f"{CORE}--bf16 --optimizer sgd", "sgd"),
        ("r.json", '{"zero_optimization": {"stage": 2}, "optimizer": {"type": "Muon"}}', "muon"),
        ("r.json", '{"zero_optimization": {"stage": 1}, "optimizer": {"type": "Lion"}}', "lion"),
        ("r.toml", '[model]\nflavor = "8B"\n[optimizer]\nname = "Muon"', "muon"),
        ("r.toml", '[model]\nflavor = "8B"\n[optimizer]\nname = "DistMuon"', "muon"),
        ("r.sh", f"{TRAINER}--bf16 true --optim adamw_bnb_8bit --fsdp full_shard", "adamw-8bit"),
        ("r.sh", f"{TRAINER}--bf16 true --optim adafactor --fsdp full_shard", "adafactor"),
        ("r.sh", f"{TRAINER}--bf16 true --fsdp full_shard", "adamw"),
    ],
)
def test_an_optimizer_is_read_by_its_framework_s_name(name: str, text: str, optimizer: str, tmp_path: Path) -> None:
    """Guards rows of optimizers: each that a framework has is priced as that."""
    (tmp_path / name).write_text(text, "utf-8")
    run = read_run(tmp_path / name, given={"n_gpus": "8", "seq": "2048", "gbs": "64"}, model="llama3-8b")
    step = run.case(H100).framework.step
    assert step.optimizer == optimizer
    assert "distributed" not in text.partition("--muon")[2] or step.muon_tp_mode == "distributed"


@pytest.mark.parametrize(
    ("flags", "vocabulary"),
    [
        ("--tokenizer-type Llama2Tokenizer", 32_000),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model /data/ours.model", 128_256),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen3-8B", 151_936),
        ("--tokenizer-model Qwen/Qwen2.5-72B-Instruct", 152_064),
        ("--tokenizer-model Qwen/Qwen2.5-1.5B", 151_936),
        ("--tokenizer-model Qwen/Qwen2-57B-A14B", 151_936),
        ("--tokenizer-model deepseek-ai/DeepSeek-R1-Distill-Llama-70B", 128_256),
        ("--tokenizer-model deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", 152_064),
        ("--tokenizer-model codellama/CodeLlama-13b-hf", 32_016),
        ("--tokenizer-model codellama/CodeLlama-34b-hf", 32_000),
        ("--tokenizer-model mistralai/Mistral-7B-Instruct-v0.3", 32_768),
        ("--tokenizer-model mistralai/Mistral-7B-v0.1", 32_000),
        ("--tokenizer-model meta-llama/Llama-4-Scout-17B-16E", 202_048),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model deepseek-ai/DeepSeek-V3", 129_280),
        ("--tokenizer-type GPT2BPETokenizer", 50_257),
        ("--tokenizer-type SentencePieceTokenizer", 128_256),
    ],
)
def test_the_vocabulary_is_that_of_the_tokenizer(flags: str, vocabulary: int, tmp_path: Path) -> None:
    """Guards sizes by name and by class, the name first, and that what is assumed is said."""
    run = stated(tmp_path, CORE.replace("--vocab-size 50257", "") + f"--bf16 {flags}")
    assert run.columns["vocab"].value == vocabulary
    assert f"{vocabulary:,}, as of " in "".join(run.assumed)


V100 = load_machine("dgx1-v100").document


@pytest.mark.parametrize(
    ("text", "machine", "fused", "said"),
    [
        (
            CORE + "--fp16",
            V100,
            False,
            "attention's kernel is not stated: one that writes all scores on V100-SXM2-32GB",
        ),
        (CORE + "--bf16", H100, True, "attention's kernel is not stated: FlashAttention or cuDNN's"),
        (CORE + "--use-flash-attn", H100, False, "the run is in FP32"),
        (CORE + "--bf16 --transformer-impl local", H100, False, ""),
        (CORE + "--bf16 --transformer-impl local --use-flash-attn", H100, True, ""),
        (CORE + "--bf16 --attention-backend unfused", H100, False, ""),
        (CORE + "--bf16 --attention-backend local", H100, False, ""),
        (CORE + "--fp16 --zero-stage 1", H100, False, "use_flash_attn False"),
        (CORE + "--fp16 --zero-stage 1 --use-flash-attn-v2", H100, True, ""),
    ],
)
def test_attention_writes_its_scores_where_no_kernel_avoids_it(
    text: str, machine: Machine, fused: bool, said: str, tmp_path: Path
) -> None:
    """Guards attention before Ampere, in FP32, of Megatron's own layers and of Megatron-DeepSpeed, and what is said."""
    run = stated(tmp_path, text)
    found = run.case(machine)
    assert step_on(found.framework, machine, found.workload.precision).fused_attention == fused
    told = " ".join((*run.assumed, *run.kernel(found)))
    assert said in told
    assert ("attention's kernel" in told) == ("attn" not in run.columns)


@pytest.mark.parametrize(
    ("words", "columns", "said", "unknown"),
    [
        ("--per_device_train_batch 2 --gradient_accum 4", {"mbs": 2, "gbs": 64}, 2, ()),
        ("--per_device_train_batch_size 2 --gradient_accum 4", {"mbs": 2, "gbs": 64}, 1, ()),
        (
            "--per_device_train_batch_size 2 --gradient 4 --my_own 3",
            {"mbs": 2, "gbs": 16},
            0,
            ("--gradient", "--my_own"),
        ),
    ],
)
def test_abbreviations_count_where_the_parser_takes_them(
    words: str, columns: dict[str, int], said: int, unknown: tuple[str, ...], tmp_path: Path
) -> None:
    """Guards names in short for DeepSpeed's launcher and Hugging Face's parser, which are said; others are unknown."""
    config = '{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}'
    (tmp_path / "zero.json").write_text(config, "utf-8")
    text = f"deepspeed --num_gpu 8 train.py --deepspeed zero.json {words}"
    (tmp_path / "run.sh").write_text(text, "utf-8")
    run = read_run(tmp_path / "run.sh", given={"seq": "4096"}, model="llama3-8b")
    assert {name: run.columns[name].value for name in columns} == columns
    assert sum(" in short" in one for one in run.assumed) == said + 1
    assert run.unknown == unknown


ALIASED = """shared: &shared {tensor_model_parallel_size: &size 4, num_layers: !!int "32"}
model:
  <<: *shared
  pipeline_model_parallel_size: *size
  hidden_size: 4096
  num_attention_heads: 32
  encoder_seq_length: 4096
  micro_batch_size: 1
  global_batch_size: 64
trainer: {num_nodes: 4, devices: 8, precision: bf16}
"""


def test_settings_behind_aliases_and_merge_keys_count(tmp_path: Path) -> None:
    """Guards degrees that a config file writes once: TP and PP are 4, not 1."""
    run = stated(tmp_path, ALIASED, name="run.yaml")
    assert [run.columns[name].value for name in ("tp", "pp", "layers")] == [4, 4, 32]


TITAN = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nbatch_size = 1\nseq_len = 8192\n'


@pytest.mark.parametrize(
    ("more", "framework", "precision", "said"),
    [
        ("compile = true\n", "torchtitan", "bf16", ""),
        ("compile = false\n", "torchtitan-eager", "bf16", ""),
        ("compile = true\n[float8]\nenable_float8_linear = true\n", "torchtitan", "fp8-current", ""),
        ("[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true", "torchtitan-eager", "bf16", "float8 is con"),
        ('data_parallel_type = "ddp"\n', "torchtitan-eager", "bf16", "weights are priced as sharded by FSDP"),
    ],
)
def test_older_keys_of_torchtitan_count(more: str, framework: str, precision: str, said: str, tmp_path: Path) -> None:
    """Guards `training.compile`, FP8's old switch, and a table of a format that no converter turns on."""
    run = stated(tmp_path, TITAN + more, name="run.toml", n_gpus="8")
    assert (run.software, run.columns["precision"].value) == (framework, precision)
    assert said in "".join(run.ignored)
    assert bool(said) == bool(run.ignored)


@pytest.mark.parametrize(
    ("text", "name", "chunks", "split"),
    [
        (TITAN, "run.toml", 1, True),
        (f"{TITAN}[parallelism]\ndisable_loss_parallel = true\n", "run.toml", 1, False),
        (f"{TITAN}[parallelism]\ndisable_loss_parallel = false\n", "run.toml", 1, True),
        ("torchrun -m torchtitan.train --module llama3 --config llama3_8b", "run.sh", 8, True),
        ("torchrun -m torchtitan.train --module llama3 --config llama3_8b --loss.num_chunks 4", "run.sh", 4, True),
    ],
)
def test_logits_of_torchtitan_by_release(text: str, name: str, chunks: int, split: bool, tmp_path: Path) -> None:
    """Guards the loss: whole, and over TP unless switched off, in TOML; in 8 chunks in configs of 0.3.0."""
    run = stated(tmp_path, text, name=name, n_gpus="8")
    step = run.case(H100).framework.step
    assert (step.loss_chunks, step.loss_parallel) == (chunks, split)
    assert not run.ignored


@pytest.mark.parametrize("count", ["-0.5", "0", "2.5", "x"])
def test_ranks_that_a_launcher_starts_are_a_count(count: str, tmp_path: Path) -> None:
    """Guards odd numbers of ranks, which were replaced by --gpus without a word."""
    with pytest.raises(
        DocumentError, match=f"run.sh:1: --nproc_per_node: is '{count}', not gpu, cpu, auto, or a whole"
    ):
        stated(tmp_path, f"torchrun --nproc_per_node={count} -m torchtitan.train --module llama3 --config llama3_8b")


ZERO = (
    '{"zero_optimization": {"stage": %s%s}, "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": 1, '
    '"activation_checkpointing": {%s}}'
)
CPU = ', "offload_optimizer": {"device": "cpu"%s}'
OFF, AWARE, FINE = (
    "--bf16 --use-distributed-optimizer ",
    "--use-precision-aware-optimizer ",
    "--fine-grained-activation-",
)


@pytest.mark.parametrize(
    ("more", "left"),
    [
        ("--optimizer-cpu-offload", (0, 1, 1, 1, 1)),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.25", (0.75, 1, 1, 1, 1)),
        (f"--optimizer-cpu-offload --optimizer-offload-fraction 0.25 {AWARE}", (0.75, 0.75, 1, 1, 1)),
        ("--optimizer-offload-fraction 0.25", (1, 1, 1, 1, 1)),
        ("--cpu-offloading-num-layers 4", (1, 1, 1, 28 / 32, 28 / 32)),
        (f"{FINE}offloading --offload-modules core_attn attn_proj", (1, 1, 1, 1 / 32, 1)),
        (f"{FINE}offloading --offload-modules mlp_norm --activation-offload-fraction 0.5", (1, 1, 1, 1, 1)),
        ("--offload-modules core_attn", (1, 1, 1, 1, 1)),
        ((1, CPU % "", ""), (0, 0, 1, 1, 1)),
        ((2, CPU % "", ""), (0, 0, 0, 1, 1)),
        ((3, CPU % ', "ratio": 0.5', ""), (0.5, 0.5, 0, 1, 1)),
        ((3, "", '"cpu_checkpointing": true'), (1, 1, 1, 1, 1)),
    ],
)
def test_what_stays_on_the_gpu_beside_what_is_offloaded(
    more: str | tuple[int, str, str], left: tuple[float, ...], tmp_path: Path
) -> None:
    """Guards offload that a file states: fractions of moments and master weights, gradients of ZeRO-2 and 3, layers,
    and inputs of modules, of which the last layer's stay."""

    def items(words: str | tuple[int, str, str]) -> dict[str, float]:
        """Memory of a run."""
        if isinstance(words, str):
            run = stated(tmp_path, CORE + OFF + words)
        else:
            (tmp_path / "z.json").write_text(ZERO % words, "utf-8")
            given = {"n_gpus": "8", "seq": "4096", "gbs": "8", "recompute": "full"}
            run = read_run(tmp_path / "z.json", given=given, model="llama3-8b")
        found = run.case(H100)
        return dict(price(found, found.configurations[0]).memory.items)

    plain = AWARE * (AWARE in more) if isinstance(more, str) else (more[0], "", "")
    now, before = items(more), items(plain)
    names = ("optimizer moments", "master weights", "gradients", "saved qkv", "saved norm outputs")
    found = [now.get(name, 0.0) / before[name] if name in before else 1.0 for name in names]
    assert found == pytest.approx(left)
    stream = [one.get("saved residual stream", 0.0) for one in (now, before)]
    whole = {"mlp_norm": 0.75 + 0.25 / 32, "cpu_ch": 1 / 32, "cpu-offloading": 28 / 32}
    assert stream[0] / stream[1] == pytest.approx(next((one for key, one in whole.items() if key in str(more)), 1.0))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--kv-channels 256", "--kv-channels 256: latent attention has sizes of its own"),
        ("--group-query-attention --num-query-groups 2", "--num-query-groups 2: latent attention has keys"),
        (
            "--cpu-offloading-num-layers 2 --cpu-offloading-weights",
            "--cpu-offloading-weights: weights are priced on the",
        ),
    ],
)
def test_what_is_not_priced_is_named(more: str, said: str, tmp_path: Path) -> None:
    """Guards sizes of heads that latent attention replaces, and offload that is not priced."""
    run = stated(tmp_path, f"{CORE} --bf16 --multi-latent-attention --kv-lora-rank 64 {more}")
    assert any(one.startswith(said) for one in run.ignored), run.ignored


@pytest.mark.parametrize(
    ("more", "loss", "said"),
    [
        ("", "softmax", ""),
        ("--cross-entropy-loss-fusion", "softmax", ""),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl native", "softmax", ""),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "in_place", "--set step.loss=softmax"),
        ("--cross-entropy-fusion-impl te", "softmax", "without --cross-entropy-loss-fusion"),
    ],
)
def test_the_loss_that_a_script_fuses(more: str, loss: str, said: str, tmp_path: Path) -> None:
    """Guards Transformer Engine's loss, whose gradient overwrites the logits, and the version of which that is said."""
    run = stated(tmp_path, f"{CORE} --bf16 {more}")
    assert run.case(H100).framework.step.loss == loss
    assert said in "".join(run.ignored)
    assert bool(said) == bool(run.ignored)


def test_what_is_offloaded_takes_no_memory_and_fp32_is_named_first(tmp_path: Path) -> None:
    """Guards ZeRO's and Megatron's offload, and the number format by accident."""
    moved = ', "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}'
    (tmp_path / "z.json").write_text(ZERO % (3, moved, ""), "utf-8")
    run = read_run(tmp_path / "z.json", given={"n_gpus": "8", "seq": "4096", "gbs": "8"}, model="llama3-8b")
    assert run.case(H100).framework.step.offloaded == ("moments", "master", "gradients", "weights")
    assert not run.ignored
    assert run.assumed[0].startswith("bf16.enabled is auto")
    assert run.columns["precision"].value == "bf16"
    core = stated(tmp_path, CORE + "--optimizer-cpu-offload --use-distributed-optimizer")
    assert core.assumed[0].startswith("the run is in FP32: no BF16 or FP16 is stated")
    plain = stated(tmp_path, CORE + "--use-distributed-optimizer")
    both = [price(found, found.configurations[0]) for found in (case(core), case(plain))]
    assert [("optimizer moments" in dict(one.memory.items)) for one in both] == [False, True]
    assert both[0].memory_bytes < both[1].memory_bytes


@pytest.mark.parametrize(
    ("more", "machine", "multiplied", "peak"),
    [
        ("", H100, "tf32", 494.5e12),
        ("--transformer-impl local", H100, "fp32", 67e12),
        ("", V100, "fp32", 15.7e12),
        ("--bf16", H100, "bf16", 989e12),
    ],
)
def test_what_gemms_of_fp32_multiply(more: str, machine: Machine, multiplied: str, peak: float, tmp_path: Path) -> None:
    """Guards TF32 of Transformer Engine, where the accelerator has it, and MFU, which is of the same peak; what torch
    multiplies, such as the LM head, stays in FP32."""
    found = stated(tmp_path, f"{CORE} {more}").case(machine)
    assert (found.gemm_format, found.peak_flops_per_s) == (multiplied, peak)
    rates = {
        one.layer: one.rate for one in timed_gemms(price(found, found.configurations[0])) if one.phase == "forward"
    }
    assert (rates["mlp.fc2"] > 2.0 * rates["head"]) == (multiplied == "tf32")


def test_bf16_is_the_first_change_of_a_run_in_fp32(tmp_path: Path) -> None:
    """Guards FP32 by accident: BF16 is listed with its step and memory, also where it does not fit by itself."""
    found = case(stated(tmp_path, f"{CORE} --tensor-model-parallel-size 8 --recompute-activations"))
    small = H100.model_copy(update={"accelerator": H100.accelerator.model_copy(update={"memory_gib": 14.0})})
    for machine, words in ((H100, "--bf16"), (small, "--bf16; too much memory by itself")):
        setup = Setup(
            *(found.model, machine, found.workload, found.framework), layout=found.configurations[0], recomputes=()
        )
        now, made = setup.price(lambda same: same), changes_of(setup, step_s, ranking=None)
        change = next(one for one in made if one.words == words)
        assert change.step_s < 0.6 * now.iteration_s
        assert 0.0 < change.memory_bytes < now.memory_bytes


MOMENTS = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"


@pytest.mark.parametrize(
    ("memory_gib", "first"),
    [
        (14.0, "--grad-reduce-in-bf16"),
        (12.0, f"--grad-reduce-in-bf16 {MOMENTS}"),
        (11.0, f"--pipeline-model-parallel-size 2 {MOMENTS}"),
        (9.0, ""),
    ],
)
def test_as_few_savers_are_named_as_do(tmp_path: Path, memory_gib: float, first: str) -> None:
    """Guards a run that does not fit: a saver where one does, several where only several do, and beside another change
    where neither does alone, as the framework's own arguments, the one that costs least first."""
    found = case(stated(tmp_path, f"{CORE} --bf16 --tensor-model-parallel-size 8 {SHARDED}"))
    small = H100.model_copy(update={"accelerator": H100.accelerator.model_copy(update={"memory_gib": memory_gib})})
    setup = Setup(*(found.model, small, found.workload, found.framework), layout=found.configurations[0], recomputes=())
    made = changes_of(setup, step_s, ranking=None)
    assert (made[0].words if made else "") == first
    assert [one.step_s for one in made] == sorted(one.step_s for one in made)
    assert all(one.memory_bytes <= setup.priced.memory_limit_bytes for one in made)


SHARDED = "--sequence-parallel --use-distributed-optimizer"


def step_s(setup: Setup) -> float:
    """Its step, s."""
    return setup.price(lambda same: same).iteration_s


def test_offload_is_named_where_nothing_else_fits(tmp_path: Path) -> None:
    """Guards 70B on half of a node, whose states have no other ranks to go to: the optimizer in host memory, by
    Megatron-LM's arguments."""
    sizes = "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --swiglu"
    groups = "--group-query-attention --num-query-groups 8 --seq-length 8192 --untie-embeddings-and-output-weights"
    run = "--tensor-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 4 --bf16 --vocab-size 128256"
    repeats = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    path = tmp_path / "run.sh"
    path.write_text(f"torchrun --nproc_per_node 4 pretrain_gpt.py {sizes} {groups} {run} {repeats} {SHARDED}", "utf-8")
    said = explain_command(path, machine="dgx-h100").fit
    assert "--optimizer-cpu-offload --optimizer-offload-fraction 1.0 (" in said
    assert "--use-precision-aware-optimizer" in said


def test_arguments_of_ones_own_program_have_any_names(tmp_path: Path) -> None:
    """Guards names that only look like another framework's: unknown, and not refused as misspelt."""
    (tmp_path / "ds.json").write_text('{"train_batch_size": 64, "zero_optimization": {"stage": 1}}', "utf-8")
    (tmp_path / "run.sh").write_text(
        "deepspeed --num_gpus 8 train_own.py --deepspeed_config ds.json --dp_size 8 --seq_lenght 2048", "utf-8"
    )
    run = read_run(tmp_path / "run.sh", given={"seq": 2048}, model="llama3-8b")
    assert (run.columns["n_gpus"].value, run.unknown) == (8, ("--dp_size", "--seq_lenght"))
    (tmp_path / "a.yaml").write_text(
        "{base_model: meta-llama/Llama-3.1-8B, sequence_len: 512, activation_offloading: legacy, bf16: true}", "utf-8"
    )
    assert read_run(tmp_path / "a.yaml", given={"n_gpus": 8}).unknown == ()


def test_recipes_of_megatron_bridge_group_experts(tmp_path: Path) -> None:
    """Guards modules of recompute that only grouped experts have."""
    (tmp_path / "run.sh").write_text(
        "torchrun --nproc_per_node 8 run_recipe.py --recipe qwen3_30b_a3b_sft_config "
        "model.recompute_granularity=selective model.recompute_modules=[moe_act] "
        "train.global_batch_size=8 train.micro_batch_size=1 dataset.seq_length=2048",
        "utf-8",
    )
    assert read_run(tmp_path / "run.sh", given={}).columns["recompute"].value == "moe_act"
