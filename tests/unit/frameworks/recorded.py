"""What frameworks' own code is asked about the commands written for them; `make frameworks` records its answers.

Cases are those of `launch_cases`. Layouts are small worlds of which every rank group is asked for, one for each rank
order that a framework has. Refusals are commands of cases with one thing changed, which the framework refuses.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.command import Run
from axonn_tune.grid import ALL_AXES, Grid
from tests.unit.frameworks.launch_cases import Case, cases, run_of

RECORDINGS = Path(__file__).parents[2] / "fixtures" / "frameworks"
ARGUMENT_NAMES = Path(__file__).parents[2] / "fixtures" / "arguments"

CAPABILITIES = {"A100": 8, "GB200": 10, "H100": 9, "MI250X": 9}
"""First number of the compute capability that NVIDIA's GPUs report."""

Kind = Literal["case", "layout", "refusal"]


@dataclass(frozen=True)
class Asked:
    """One command that a framework is asked about.

    run: the configuration it is written for; of a refusal, that of the command before the change. refused_for: what the
    framework's error says.
    """

    framework: str
    kind: Kind
    id: str
    run: Run
    starter: tuple[str, ...]
    program: tuple[str, ...]
    words: tuple[str, ...]
    environment: Mapping[str, str]
    files: Mapping[str, str]
    world: int
    refused_for: str = ""

    @property
    def key(self) -> str:
        """A name among all that an environment is asked."""
        return f"{self.framework} {self.kind} {self.id}"

    def as_expected(self, answer: Mapping[str, Any]) -> bool:
        """Whether the framework accepts it, or refuses it for the reason it is to be refused for."""
        return answer["accepted"] if not self.refused_for else self.refused_for in answer.get("error", "")

    @property
    def recorded(self) -> dict[str, object]:
        """What a recording says of the question."""
        return {
            "framework": self.framework,
            "kind": self.kind,
            "id": self.id,
            "world": self.world,
            "starter": shlex.join(self.starter),
            "program": shlex.join(self.program),
            "words": shlex.join(self.words),
            "environment": dict(self.environment),
            "files": dict(self.files),
        }

    @property
    def request(self) -> dict[str, object]:
        """The same for a check script (tools/frameworks/answering.py)."""
        return {
            "key": self.key,
            "world": self.world,
            "starter": list(self.starter),
            "program": list(self.program),
            "arguments": list(self.words),
            "environment": dict(self.environment),
            "files": dict(self.files),
            "layers": self.run.model.layers,
            "capability": next(
                (number for name, number in CAPABILITIES.items() if name in self.run.machine.accelerator.name.upper()),
                0,
            ),
            "groups": "all" if self.kind == "layout" else "one",
        }


@dataclass(frozen=True)
class Refusal:
    """A command that a framework refuses: that of a case, changed.

    theirs: what its error says. flags: new values of options, None to leave one out, "" for a switch. files: what
    stands in config files instead, by what stood there. ours: the options of a search that asks for the same, and what
    our refusal says; none where nothing can ask for it, since no command is ever written so.
    """

    framework: str
    id: str
    theirs: str
    case: str
    flags: Mapping[str, str | None] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] | None = None
    world: int | None = None
    ours: str = ""
    says: str = ""

    def __str__(self) -> str:
        return f"{self.framework}: {self.id}"


LAYOUTS = {
    "megatron-core": """
        tensor x=4 data=3 pipeline=2
        context x=2 context=2 data=3 pipeline=2
        gtp x=2 z=3 data=2 pipeline=2
        gtp-context x=2 z=3 context=2 data=2 pipeline=2
        gtp-alone z=4 data=3
        stages-inside x=2 data=3 pipeline=4 order=x,z,context,pipeline,data
        stages-inside-gtp x=2 z=3 data=2 pipeline=2 order=x,z,context,pipeline,data
    """,
    "torchtitan": """
        hsdp z=3 data=4
        tensor x=2 z=3 data=2 pipeline=2
        context x=2 context=2 z=3 data=2 pipeline=2
    """,
    "fsdp": """
        hsdp z=3 data=4
    """,
    "deepspeed": """
        3d x=2 data=3 pipeline=2
        zero3 x=2 z=6
    """,
    "axonn": """
        hybrid z=4 data=3
    """,
    "megatron-axonn": """
        tensor x=2 y=4 data=3
        all x=2 y=2 z=2 data=3 pipeline=2
    """,
}
"""By framework: name, sizes of axes and rank order, if it is not the framework's first; of llama3-8b."""


REFUSALS = (
    Refusal(
        "megatron-core",
        "heads by TP",
        "must be a multiple of tensor_model_parallel_size",
        "70b-chunks",
        {"--tensor-model-parallel-size": "3"},
        world=96,
        ours="--model llama3-70b --gpus 96 --tp 3",
        says="heads (64) is not divisible by TP = 3",
    ),
    Refusal(
        "megatron-core",
        "world by TP and PP",
        "world size (100) is not divisible",
        "70b-chunks",
        world=100,
        ours="--model llama3-70b --gpus 100 --tp 8 --pp 4",
        says="100 GPUs cannot be arranged with TP = 8, PP = 4: 32 does not divide them",
    ),
    Refusal(
        "megatron-core",
        "world by TP and GTP",
        "world size (500) is not divisible",
        "70b-tensor-gtp",
        world=500,
        ours="--model llama3-70b --gpus 500 --tp 4 --gtp 8",
        says="500 GPUs cannot be arranged with TP = 4, GTP = 8: 32 does not divide them",
    ),
    Refusal(
        "megatron-core",
        "batch by DP",
        "eval_global_batch_size (129) must be divisible",
        "70b-chunks",
        {"--global-batch-size": "129"},
        ours="--model llama3-70b --gpus 64 --tp 8 --pp 4 --dp 2 --batch 129",
        says="global_batch (129) is not divisible by DP·GTP = 2",
    ),
    Refusal(
        "megatron-core",
        "batch by DP and GTP",
        "global batch size (528) is not divisible",
        "70b-tensor-gtp",
        {"--global-batch-size": "528"},
        ours="--model llama3-70b --gpus 512 --tp 4 --gtp 8 --dp 16 --batch 528",
        says="global_batch (528) is not divisible by DP·GTP = 128",
    ),
    Refusal(
        "megatron-core",
        "batch by micro-batch",
        "eval_global_batch_size (512) must be divisible",
        "70b-all",
        {"--micro-batch-size": "3"},
        ours="--model llama3-70b --gpus 256 --tp 4 --gtp 2 --cp 2 --dp 4 --micro-batch 3 --batch 512",
        says="micro-batch",
    ),
    Refusal(
        "megatron-core",
        "sequence by CP",
        "seq-length should be a multiple of 2 * context-parallel-size",
        "8b-context",
        {"--seq-length": "16386"},
        ours="--model llama3-8b --gpus 16 --tp 2 --cp 2 --seq 16386",
        says="16386",
    ),
    Refusal(
        "megatron-core",
        "chunks without stages",
        "pipeline-model-parallel size should be greater than 1",
        "8b-context",
        {"--num-virtual-stages-per-pipeline-rank": "2"},
        ours="--model llama3-8b --gpus 16 --vpp 2 --pp 1",
        says="--pp is 1",
    ),
    Refusal(
        "megatron-core",
        "more parts than layers",
        "should be divisible by vp_size 8",
        "405b-gtp-chunks",
        {"--num-virtual-stages-per-pipeline-rank": "8"},
        ours="--model llama3-405b --gpus 576 --pp 18 --vpp 8",
        says="layers (126) is less than PP·VPP = 144",
    ),
    Refusal(
        "megatron-core",
        "stages inside DP with CP",
        "When not using pp-last rank ordering",
        "70b-all",
        {"--use-tp-pp-dp-mapping": ""},
        ours="--model llama3-70b --gpus 512 --tp 8 --cp 2 --dp 8 --pp 4 --order x,z,context,pipeline,data",
        says="cannot express CP with pipeline stages inside DP",
    ),
    Refusal(
        "megatron-core",
        "shards by TP",
        "tensor_parallel_num_weight_shards (6) must be divisible",
        "70b-tensor-gtp",
        {"--tensor-parallel-num-weight-shards": "6"},
    ),
    Refusal(
        "megatron-core",
        "fewer shards than TP",
        "tensor_parallel_num_weight_shards (2) must be >=",
        "70b-tensor-gtp",
        {"--tensor-parallel-num-weight-shards": "2"},
    ),
    Refusal(
        "megatron-core",
        "GTP with optimizer instances",
        "num_distributed_optimizer_instances > 1 is not yet supported",
        "70b-tensor-gtp",
        {"--num-distributed-optimizer-instances": "2"},
    ),
    Refusal(
        "megatron-core",
        "layout without a layer",
        "Number of decoder layers 79",
        "70b-all",
        {"--pipeline-model-parallel-layout": "Et*20|t*20|t*20|t*19L"},
    ),
    Refusal(
        "megatron-core",
        "gather without reduction behind",
        "Must use --overlap-param-gather with --overlap-grad-reduce",
        "8b-gtp",
        {"--overlap-grad-reduce": None},
    ),
    Refusal("megatron-core", "connections not set", "CUDA_DEVICE_MAX_CONNECTIONS to 1", "70b-chunks", environment={}),
    Refusal(
        "megatron-core",
        "no such argument",
        "unrecognized arguments: --weight-shards 8",
        "8b-gtp",
        {"--weight-shards": "8"},
    ),
    Refusal(
        "torchtitan",
        "world by degrees",
        "dp_shard(17)",
        "8b-hsdp",
        {"--parallelism.data_parallel_shard_degree": "17"},
        ours="--model llama3-8b --gpus 64 --dp-shard 17",
        says="64 GPUs cannot be arranged with dp_shard = 17",
    ),
    Refusal(
        "torchtitan",
        "more ranks than there are",
        "tp(64)",
        "8b-kept",
        {"--parallelism.tensor_parallel_degree": "64"},
        ours="--model llama3-8b --gpus 32 --tp 64",
        says="32 GPUs cannot be arranged with tp = 64",
    ),
    Refusal(
        "torchtitan",
        "batch by dp",
        "global batch 500",
        "8b-hsdp",
        {"--training.global_batch_size": "500"},
        ours="--model llama3-8b --gpus 64 --dp-shard 8 --dp-replicate 8 --batch 500",
        says="global_batch (500) is not divisible by dp_replicate·dp_shard = 64",
    ),
    Refusal(
        "torchtitan",
        "batch by micro-batch",
        "local batch 3",
        "8b-hsdp",
        {"--training.local_batch_size": "3"},
        ours="--model llama3-8b --gpus 64 --dp-shard 8 --dp-replicate 8 --batch 512 --micro-batch 3",
        says="micro-batch",
    ),
    Refusal(
        "torchtitan",
        "pipeline batch by micro-batch",
        "must be evenly divisible by parallelism.pipeline_parallel_microbatch_size (3)",
        "70b-pipeline",
        {"--parallelism.pipeline_parallel_microbatch_size": "3"},
        ours="--model llama3-70b --gpus 128 --tp 8 --dp-shard 2 --dp-replicate 2 --pp 4 --batch 128 --micro-batch 3",
        says="micro-batch",
    ),
    Refusal(
        "torchtitan",
        "more stages than layers",
        "Number of stages (128) cannot be greater",
        "70b-pipeline",
        {"--parallelism.pipeline_parallel_degree": "128", "--parallelism.tensor_parallel_degree": "1"},
        world=512,
        ours="--model llama3-70b --gpus 512 --dp-shard 2 --dp-replicate 2 --pp 128",
        says="layers (80) is less than pp = 128",
    ),
    Refusal(
        "torchtitan",
        "1F1B with chunks",
        "Single stage schedule requires exactly 1 stage per rank",
        "70b-chunks",
        {"--parallelism.pipeline_parallel_schedule": "1F1B"},
    ),
    Refusal(
        "torchtitan",
        "parts by stages",
        "must be divisible by pipeline parallel size (4)",
        "70b-chunks",
        {"--parallelism.pipeline_parallel_layers_per_stage": "9"},
    ),
    Refusal(
        "torchtitan",
        "graphs with stages",
        "CUDA graphs do not support pipeline parallelism",
        "70b-pipeline",
        {"--training.disable_cuda_graphs": None},
    ),
    Refusal(
        "torchtitan",
        "no such key",
        "Unrecognized options: --parallelism.tensor_parallel_degre",
        "8b-fsdp",
        {"--parallelism.tensor_parallel_degre": "1"},
    ),
    Refusal(
        "torchtitan",
        "no such section",
        "Unrecognized options: --parallel.tensor_parallel_degree",
        "8b-fsdp",
        {"--parallel.tensor_parallel_degree": "1"},
    ),
    Refusal(
        "torchtitan",
        "no such reduction",
        "invalid choice 'bfloat16'",
        "8b-fsdp",
        {"--training.mixed_precision_reduce": "bfloat16"},
    ),
    Refusal(
        "torchtitan",
        "some layers not resharded",
        "invalid choice '12'",
        "8b-kept",
        {"--parallelism.fsdp_reshard_after_forward": "12"},
    ),
    Refusal(
        "torchtitan", "no such config", "Config function 'llama3_13b' not found", "8b-fsdp", {"--config": "llama3_13b"}
    ),
    Refusal(
        "fsdp",
        "world by sizes",
        "ParallelismConfig total_size (56) does not match num_processes (64)",
        "8b-hsdp",
        files={"dp_shard_size: 8": "dp_shard_size: 7"},
        ours="--model llama3-8b --gpus 64 --replicate 8 --shard 7",
        says="64 GPUs cannot be arranged with shard = 7, replicate = 8",
    ),
    Refusal(
        "fsdp",
        "world by mesh",
        "Mesh should not be bigger than default world size 32",
        "8b-some-kept",
        files={"(2, 16)": "(2, 17)"},
        ours="--model llama3-8b --gpus 32 --replicate 2 --shard 17",
        says="32 GPUs cannot be arranged with shard = 17",
    ),
    Refusal(
        "fsdp",
        "tensor parallelism beside replicas alone",
        "cannot be used with pure data parallelism",
        "8b-hsdp",
        files={"dp_shard_size: 8": "dp_shard_size: 1", "tp_size: 1": "tp_size: 8"},
        ours="--model llama3-8b --gpus 64 --replicate 8 --x 8",
        says="PyTorch FSDP has no axis x",
    ),
    Refusal(
        "fsdp",
        "two kinds of context parallelism",
        "mutually exclusive",
        "8b-hsdp",
        files={"dp_shard_size: 8": "dp_shard_size: 2", "cp_size: 1": "cp_size: 2\n  parallelism_config_sp_size: 2"},
        ours="--model llama3-8b --gpus 64 --context 2",
        says="PyTorch FSDP has no axis context",
    ),
    Refusal(
        "fsdp",
        "no such key",
        "had unknown keys (['machines'])",
        "8b-hsdp",
        files={"num_machines: 8": "num_machines: 8\nmachines: 8"},
    ),
    Refusal(
        "fsdp",
        "no such number format",
        "Unknown mixed_precision mode: bf17",
        "8b-hsdp",
        files={"mixed_precision: bf16": "mixed_precision: bf17"},
    ),
    Refusal(
        "fsdp",
        "no such wrapping",
        "Invalid auto wrap policy",
        "8b-hsdp",
        files={"TRANSFORMER_BASED_WRAP": "BLOCK_BASED_WRAP"},
    ),
    Refusal(
        "fsdp", "layers not resharded", "invalid truth value 12", "8b-hsdp", files={"forward: true": "forward: 12"}
    ),
    Refusal(
        "deepspeed",
        "batch by dp",
        "train_batch_size is not equal",
        "5b-zero3",
        files={'"train_batch_size": 512': '"train_batch_size": 500'},
        ours="--model 5b --gpus 64 --zero3 64 --batch 500",
        says="global_batch (500) is not divisible by",
    ),
    Refusal(
        "deepspeed",
        "batch by accumulation",
        "train_batch_size is not equal",
        "5b-zero3",
        files={'"gradient_accumulation_steps": 4': '"gradient_accumulation_steps": 3'},
    ),
    Refusal(
        "deepspeed",
        "world by tp and pp",
        "Invalid Grid",
        "70b-3d",
        world=100,
        ours="--model llama3-70b --gpus 100 --tp 8 --pp 8",
        says="100 GPUs cannot be arranged with tp = 8, pp = 8",
    ),
    Refusal(
        "deepspeed",
        "ZeRO-3 with stages",
        "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
        "70b-pipeline",
        files={'"stage": 1': '"stage": 3'},
        ours="--model llama3-70b --gpus 40 --zero3 4 --pp 10 --batch 320",
        says="DeepSpeed's pipeline module excludes ZeRO-3",
    ),
    Refusal(
        "deepspeed",
        "ZeRO-3 with replicas",
        "mics_shard_size",
        "5b-zero3",
        files={'"stage": 3': '"stage": 3, "mics_shard_size": 8'},
        ours="--model 5b --gpus 64 --zero3 8 --dp 8",
        says="stage 3 has no replicas",
    ),
    Refusal(
        "deepspeed",
        "no such key of ZeRO",
        "stage3_prefetch_bucket",
        "5b-zero3",
        files={"stage3_prefetch_bucket_size": "stage3_prefetch_bucket"},
    ),
    Refusal("deepspeed", "no such stage", "Input should be 0, 1, 2, 3", "5b-zero3", files={'"stage": 3': '"stage": 4'}),
    Refusal(
        "deepspeed",
        "no such key",
        "DeepSpeed ignores zero_optimisation",
        "5b-zero3",
        files={"zero_optimization": "zero_optimisation"},
    ),
    Refusal(
        "deepspeed",
        "two number formats",
        "bfloat16 and fp16 modes cannot be simultaneously enabled",
        "5b-zero3",
        files={'"bf16": {': '"fp16": {"enabled": true}, "bf16": {'},
    ),
    Refusal(
        "axonn",
        "world by degrees",
        "The product of G_inter, G_intra_r, G_intra_c, G_intra_d",
        "5b-depth",
        files={"G_data=4": "G_data=3"},
        ours="--model 5b --gpus 64 --g-data 3 --g-intra-d 16",
        says="64 GPUs cannot be arranged with",
    ),
    Refusal(
        "axonn",
        "batch by G_data",
        "Batch Size should be divisible by the G_data*micro_batch_size",
        "5b-depth",
        files={"ACCUMULATION = 1024": "ACCUMULATION = 1020"},
        ours="--model 5b --gpus 64 --g-data 4 --g-intra-d 16 --batch 1020",
        says="global_batch (1020) is not divisible by G_data·G_intra_d = 64",
    ),
    Refusal("axonn", "no such degree", "unexpected keyword argument", "5b-depth", files={"G_data=4": "G_replicas=4"}),
    Refusal(
        "megatron-axonn",
        "world by degrees",
        "The product of G_inter, G_intra_r, G_intra_c, G_intra_d",
        "5b-4d",
        {"--row-tensor-model-parallel-size": "3"},
        ours="--model 5b --gpus 64 --row 3",
        says="64 GPUs cannot be arranged with row = 3",
    ),
)


def asked(framework: str, forms: Sequence[str] = ("",)) -> list[Asked]:
    """Everything that a framework is asked; forms: as other front ends or releases take the cases."""
    found = [_asked("case", case.id, run_of(case), form) for form in forms for case in cases(framework)]
    if "" not in forms:
        return [one for one in found if one is not None]
    lines = LAYOUTS.get(framework, "").strip().splitlines()
    found += [_asked("layout", line.split()[0], _layout_run(framework, line)) for line in lines]
    found += [_refusal(one) for one in REFUSALS if one.framework == framework]
    return [one for one in found if one is not None]


def _layout_run(framework: str, line: str) -> Run:
    name, *options = line.split()
    given = dict(one.split("=") for one in options)
    order = tuple(given.pop("order", ",".join(find_framework(framework).axes)).split(","))
    grid = Grid(order=order, **{axis: int(given.get(axis, 1)) for axis in ALL_AXES})
    batch = str(grid.batch_shares * grid.pipeline * 2)
    case = Case(framework, name, "llama3-8b", "dgx-h100", grid.world, given | {"batch": batch})
    return replace(run_of(case), grid=grid)


def _asked(kind: Kind, name: str, run: Run, form: str = "") -> Asked | None:
    """A question about the command of a run, or one of its forms; None where it has no such form."""
    launch = run.framework.launch
    assert launch is not None, f"{run.framework.name} starts nothing"
    first = launch(run)
    command = first.forms.get(form) if form else first
    if command is None or (form and command.files == first.files):
        return None
    words = [word for one in command.accelerate for word in one.words]
    return Asked(
        framework=run.framework.name,
        kind=kind,
        id=f"{name} as {form}" if form else name,
        run=run,
        starter=("accelerate", *words) if words else ("torchrun",),
        program=command.program,
        words=command.words,
        environment={one.name: one.value for one in command.environment},
        files=command.files,
        world=run.grid.world,
    )


def _refusal(refusal: Refusal) -> Asked:
    case = next(one for one in cases(refusal.framework) if one.id == refusal.case)
    start = _asked("refusal", refusal.id, run_of(case))
    assert start is not None
    words = start.words
    for flag, value in refusal.flags.items():
        words = _with_flag(words, flag, value)
    return replace(
        start,
        words=words,
        files={suffix: _with_text(text, refusal.files) for suffix, text in start.files.items()},
        environment=start.environment if refusal.environment is None else refusal.environment,
        world=refusal.world or start.world,
        refused_for=refusal.theirs,
    )


def _with_flag(words: tuple[str, ...], flag: str, value: str | None) -> tuple[str, ...]:
    """A command line with another value of an option, or without it; what it does not have comes first."""
    new = () if value is None else (flag, value) if value else (flag,)
    if flag not in words:
        return (*new, *words)
    start = words.index(flag)
    end = start + 1
    # An option that a subcommand follows, `activation-checkpoint:full`, is a switch.
    if end < len(words) and not words[end].startswith("--") and ":" not in words[end]:
        end += 1
    return (*words[:start], *new, *words[end:])


def _with_text(text: str, changes: Mapping[str, str]) -> str:
    for before, after in changes.items():
        text = text.replace(before, after)
    return text


def recording(environment: str) -> Any:
    """What was recorded of an environment's framework."""
    return json.loads((RECORDINGS / f"{environment}.json").read_text(encoding="utf-8"))
