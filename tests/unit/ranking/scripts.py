"""Twelve scripts and config files of small runs, six of them with experts, and what each command says is best for them.

Forms are those of the frameworks' own examples; the runs are made up.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import axonn_tune
from axonn_tune.api.learning import explain_command
from axonn_tune.learning.setups import with_own_flags
from axonn_tune.report.commands import run_words
from tests.cli.running import good

MEGATRON = """torchrun --nproc-per-node 8 --nnodes {nodes} pretrain_gpt.py --num-layers {layers} --hidden-size 2048
--num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --position-embedding-type rope
--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --bf16
--micro-batch-size 1 --transformer-impl transformer_engine {more}"""
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
EXPERTS = (
    "--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 1024 --moe-grouped-gemm "
    "--moe-router-load-balancing-type aux_loss"
)


def megatron(layers: int, more: str, *, nodes: int = 1) -> str:
    """A script of Megatron-Core."""
    return MEGATRON.format(layers=layers, nodes=nodes, more=more).replace("\n", " \\\n") + "\n"


NEMO = """trainer:
  num_nodes: 1
  devices: 8
  precision: bf16
model:
  mcore_gpt: true
  micro_batch_size: 1
  global_batch_size: 64
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  encoder_seq_length: 2048
  max_position_embeddings: 2048
  num_layers: 12
  hidden_size: 2048
  ffn_hidden_size: 5632
  num_attention_heads: 16
  num_query_groups: 4
  normalization: rmsnorm
  bias: false
  activation: fast-swiglu
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  tokenizer:
    library: huggingface
    type: meta-llama/Meta-Llama-3.1-70B
  sequence_parallel: true
  transformer_engine: true
  optim:
    name: distributed_fused_adam
"""
DEEPSPEED = """deepspeed --num_nodes 1 --num_gpus 8 pretrain_gpt.py \\
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 16 --hidden-size 2048 \\
  --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 \\
  --global-batch-size 64 --bf16 --tokenizer-type Llama2Tokenizer --vocab-size 32000 --deepspeed --zero-stage 1
"""
TITAN = """torchrun --nproc_per_node=8 --nnodes {nodes} -m torchtitan.train --module {module} --config {config} \\
  --training.global_batch_size {batch} --training.seq_len 2048 {more} --compile.enable
"""
FSDP = """distributed_type: FSDP
mixed_precision: bf16
num_processes: 16
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
"""


@dataclass(frozen=True)
class Script:
    """A file, its name, and options that state what it does not; quick: in the fast suite."""

    name: str
    text: str
    options: str = ""
    quick: bool = False


SCRIPTS = {
    "dense": Script(
        "run.sh",
        megatron(
            18,
            "--ffn-hidden-size 5632 --vocab-size 128256 --global-batch-size 16 --pipeline-model-parallel-size 2 "
            f"--tensor-model-parallel-size 2 {OVERLAPPED}",
        ),
        quick=True,
    ),
    "dense, plain optimizer": Script(
        "run.sh",
        megatron(
            12,
            "--ffn-hidden-size 5632 --group-query-attention --num-query-groups 4 --vocab-size 32000 "
            "--global-batch-size 128 --tensor-model-parallel-size 4 --sequence-parallel",
            nodes=2,
        ),
    ),
    "NeMo": Script("run.yaml", NEMO),
    "Megatron-DeepSpeed": Script("run.sh", DEEPSPEED),
    "torchtitan": Script(
        "run.sh",
        TITAN.format(nodes=1, module="llama3", config="llama3_8b", batch=32, more="activation-checkpoint:full"),
    ),
    "accelerate": Script("run.yaml", FSDP, "--model llama3-8b --batch 64 --seq 2048 --micro-batch 1"),
    "experts": Script(
        "run.sh",
        megatron(
            12,
            f"{EXPERTS} --vocab-size 151936 --global-batch-size 16 --expert-model-parallel-size 8 "
            f"--moe-token-dispatcher-type alltoall {OVERLAPPED}",
        ),
        quick=True,
    ),
    "experts over nodes": Script(
        "run.sh",
        megatron(
            12,
            f"{EXPERTS} --vocab-size 32000 --global-batch-size 128 --expert-model-parallel-size 16 "
            f"--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep {OVERLAPPED}",
            nodes=2,
        ),
    ),
    "experts with overlap": Script(
        "run.sh",
        megatron(
            16,
            f"{EXPERTS} --vocab-size 32000 --global-batch-size 64 --expert-model-parallel-size 4 "
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4 "
            f"--moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm {OVERLAPPED}",
        ),
    ),
    "experts by all-gather": Script(
        "run.sh",
        megatron(
            12,
            f"{EXPERTS} --vocab-size 32000 --global-batch-size 64 --expert-model-parallel-size 2 "
            f"--context-parallel-size 2 --moe-token-dispatcher-type allgather {OVERLAPPED}",
        ),
    ),
    "experts of some layers, latent attention": Script(
        "run.sh",
        megatron(
            12,
            f"{EXPERTS} --vocab-size 129280 --global-batch-size 64 --expert-model-parallel-size 8 "
            '--moe-layer-freq "([0]*2+[1]*10)" --ffn-hidden-size 8192 --moe-shared-expert-intermediate-size 1024 '
            "--multi-latent-attention --q-lora-rank 512 --kv-lora-rank 256 --qk-head-dim 64 --qk-pos-emb-head-dim 32 "
            f"--v-head-dim 64 --mtp-num-layers 1 --moe-token-dispatcher-type alltoall {OVERLAPPED}",
        ),
    ),
    "experts of torchtitan": Script(
        "run.sh",
        TITAN.format(
            nodes=2,
            module="gpt_oss",
            config="gpt_oss_20b",
            batch=64,
            more="--parallelism.expert_parallel_degree 8 --training.local_batch_size 1",
        ),
    ),
}


def best_steps(script: Script, folder: Path) -> dict[str, float]:
    """The step of the best layout by each command, as documents have it, s."""
    path, model = folder / script.name, folder / "model.yaml"
    path.write_text(script.text, encoding="utf-8")
    stated = f"--from-command {path} --machine dgx-h100 {script.options}"
    return dict(_best_steps(path, model, stated, _keywords(script.options.split())))


def _best_steps(path: Path, model: Path, stated: str, options: dict[str, Any]) -> Iterator[tuple[str, float]]:
    explained = json.loads(good(f"explain {stated} --format json").out)
    yield "explain", explained["run"]["best_step_s"]
    yield from (("explain, as a change", step_s) for step_s in _whole(explained))
    compared = json.loads(good(f"compare {stated} --format json").out)
    mine = [
        one["prediction"]["iteration_s"]
        for one in compared["contenders"]
        if one["framework"] == explained["run"]["framework"] and one["key"] != "yours" and one["prediction"]
    ]
    if mine:
        # HSDP and FSDP are two rows of one framework.
        yield "compare", min(mine)
    step_s = explained["config"]["iteration_s"]
    facts = stated.replace("--batch ", "--fact gbs=").replace("--seq ", "--fact seq=")
    facts = facts.replace("--micro-batch ", "--fact mbs=")
    diagnosed = json.loads(good(f"diagnose {facts} --step {step_s} --format json").out)
    yield from (("diagnose", step_s) for step_s in _whole(diagnosed))
    command = explain_command(path, machine="dgx-h100", **options).stated
    assert command is not None
    named = [options["model"]] if "model" in options else [str(model)]
    if "model" not in options:
        good(f"models import {path} -o {model}")
    job = with_own_flags(command.setup)
    words = run_words(job, gpus=job.layout.grid.world, model=named, machine="dgx-h100")
    ranked = json.loads(good(" ".join([*words, "--rank-by", "step", "--format", "json"])).out)
    yield "search", ranked["configs"][0]["iteration_s"]
    yield "Python", axonn_tune.search(**_keywords(words), rank_by="step").best.iteration_s


def steps_of_changes(script: Script) -> dict[str, tuple[float, float]]:
    """Steps of changes that `explain` lists, and those that their commands find, s, in the folder of this process."""
    Path(script.name).write_text(script.text, encoding="utf-8")
    stated = f"--from-command {script.name} --machine dgx-h100 {script.options}"
    explained = json.loads(good(f"explain {stated} --format json").out)
    if explained["run"]["model_command"]:
        good(explained["run"]["model_command"].removeprefix("axonn-tune "))
    found = dict[str, tuple[float, float]]()
    for one in explained["changes"]:
        if one["command"]:
            words = [word for word in shlex.split(one["command"])[1:] if word != "explain"]
            words = words[: words.index("-o")] if "-o" in words else words
            ranked = json.loads(good("", [*words, "--rank-by", "step", "--format", "json"]).out)
            found[one["words"]] = one["step_s"], ranked["configs"][0]["iteration_s"]
    return found


def _whole(document: dict[str, Any]) -> Iterator[float]:
    """Steps of the layouts of searches among changes of a run."""
    yield from (one["step_s"] for one in document["changes"] if one["words"].startswith("the best layout of a search"))


def _keywords(words: list[str]) -> dict[str, Any]:
    """Options of a command line as keywords of the Python functions."""
    found = dict[str, Any]()
    places = iter(words)
    for word in places:
        name = word.removeprefix("--").replace("-", "_")
        if name in ("split_micro_batch", "shard_optimizer"):
            found[name] = True
            continue
        value: Any = next(places)
        if name in ("set", "no_overlap"):
            found[name] = (*found.get(name, ()), value)
        else:
            found[name] = int(value) if value.isdigit() else value
    return found


def shown(steps: dict[str, float]) -> str:
    """Steps that are not those of the first command, with their distance."""
    first = next(iter(steps.values()), math.nan)
    return ", ".join(
        f"{name} {step_s!r} ({step_s / first - 1:+.3%})" for name, step_s in steps.items() if step_s != first
    )
