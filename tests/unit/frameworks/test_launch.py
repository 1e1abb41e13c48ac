"""Commands of the frameworks: what they start is the configuration that was asked for, in the framework's own terms."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from axonn_tune.errors import UsageError
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.description import Run
from axonn_tune.grid import Grid
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.model import LayerType
from tests.unit.frameworks.asked import Case, case_of, cases, launched, run_of


@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_command_is_literal_and_complete(case: Case) -> None:
    """Guards every command: no shell in it, sections that bash can name, every file that is read is written."""
    command = launched(run_of(case))
    words = [*command.program, *command.words, *(word for one in command.accelerate for word in one.words)]
    assert not [word for word in words if re.search(r"[$`\s]", word)]
    titles = [section.title for section in command.sections]
    assert len(set(titles)) == len(titles)
    assert all(title.isidentifier() and title.islower() for title in titles)
    assert set(re.findall(r"\{file:(.+?)\}", " ".join(words))) <= set(command.files)
    assert not [switch for switch in words if switch.startswith("--") and words.count(switch) > 1]
    assert command.needs
    assert all(sentence.endswith(".") for sentence in (*command.needs, *command.notes))
    for text in (text for suffix, text in command.files.items() if suffix.endswith(".py")):
        ast.parse(text)


Change = Callable[[Run], Run]


def workload(**changes: object) -> Change:
    """The same run with another workload."""
    return lambda run: replace(run, workload=run.workload.model_copy(update=changes))


def step(**changes: object) -> Change:
    """The same run with other options of the step."""
    return lambda run: replace(run, step=replace(run.step, **changes))  # type: ignore[arg-type]


def changed(**changes: Any) -> Change:
    """The same run with other fields."""
    return lambda run: replace(run, **changes)


def model(**changes: object) -> Change:
    """The same run of a model with other sizes."""
    return lambda run: replace(run, model=run.model.model_copy(update=changes))


MIXED = changed(grid=Grid(z=8, data=8, order=("data", "z", "x", "y", "context", "pipeline")))
"""A rank order that no framework has."""
TWO = Grid(x=4, z=4, pipeline=2, data=24, order=find_framework("megatron-axonn").axes)
DELTA = load_model("qwen3-next-80b-a3b").document
ORDER = ("x", "z", "context", "pipeline", "data")
FOLDED = Grid(x=2, pipeline=8, data=8, expert=8, order=ORDER)
GATHERED = Grid(z=4, data=2, pipeline=2, expert=8, order=find_framework("megatron-core").axes)
SHARDED = Grid(data=8, pipeline=2, expert=4, expert_z=2, order=find_framework("megatron-core").axes)
STATED = model(rotary_base=1_000_000.0, norm_epsilon=1e-6, qkv_biases=True)


def predicting(run: Run) -> Run:
    """One MTP layer, in the third part."""
    return replace(run, model=run.model.model_copy(update={"mtp_layers": 1}), mtp_part=2)


REFUSED: list[tuple[str, Change, str]] = [
    ("torchtitan 8b-fsdp", model(family="gpt"), "a GPT's LayerNorm, GELU and learned positions; ask for a Llama"),
    ("torchtitan 8b-fsdp", model(biases=True), "biases; ask for a Llama-shaped model without"),
    ("torchtitan 70b-pipeline", model(tied_embeddings=True), "with a tied embedding; ask for --pipeline 1"),
    ("torchtitan 70b-pipeline", changed(accumulation=2), r"fewer micro-batches \(2\) than stages \(4\); ask for"),
    ("torchtitan 8b-fsdp", changed(kept_layers=5), "5 of 32 layers .* ask for --kept-layers 0 or 32"),
    ("torchtitan 70b-pipeline", changed(kept_layers=5), "5 of 20 layers .* ask for --kept-layers 0 or 20"),
    ("torchtitan 8b-fsdp", workload(precision="fp16"), "--precision fp16; it has bf16, fp32"),
    ("torchtitan 8b-fsdp", workload(overlaps=()), "--no-overlap gather_prefetch; leave it out"),
    ("torchtitan 8b-hsdp", workload(shard_optimizer_over_data=True), "ZeRO-1; leave out --shard-optimizer"),
    ("torchtitan 8b-hsdp", step(reduce_each_micro_batch=False), "leave out --set step.reduce_each_micro_batch"),
    ("torchtitan 8b-hsdp", MIXED, "the rank order dp_replicate,dp_shard"),
    ("torchtitan 8b-context", workload(sequence_length=8200), "8200, which is not divisible by 16; ask for another"),
    ("torchtitan-eager 8b-fsdp", step(fused_norms=True), "leave out --set step.fused_norms"),
    (
        "torchtitan qwen3-30b",
        step(dispatcher="allgather"),
        "the dispatcher allgather; it has alltoall, deepep, hybridep",
    ),
    ("torchtitan qwen3-30b", model(hidden=4096), "the sizes of qwen3-30b-a3b; it has qwen3-30b-a3b, qwen3-235b-a22b"),
    ("torchtitan 8b-float8", model(ffn=8192), "fp8-rowwise of a model of other sizes than llama3's; ask for --precis"),
    ("fsdp 8b-hsdp", changed(recompute="selective"), "selective recompute; ask for --recompute full or none"),
    ("fsdp 8b-hsdp", workload(precision="fp32"), "--precision fp32; it has bf16"),
    ("fsdp 8b-hsdp", workload(split_micro_batch=True), "a split micro-batch; leave out --split-micro-batch"),
    ("fsdp 8b-hsdp", MIXED, "replicate,shard; it has shard,replicate"),
    ("deepspeed 8b-zero3", changed(kept_layers=4), "4 of 32 layers .* ask for --kept-layers 0 or 32"),
    ("deepspeed 8b-zero3", workload(precision="fp32"), "--precision fp32; it has bf16, fp16"),
    ("deepspeed 70b-3d", changed(parts=(3, 11, *[11] * 6)), "a stage of 11 blocks; each has 10 at most"),
    ("deepspeed 70b-3d", step(shard_gradients=True), "ZeRO-2 with pipeline stages; its pipeline module has ZeRO-1"),
    ("deepspeed 8b-zero3", step(reshard="fit"), "step.reshard = fit; leave out --set step.reshard"),
    ("axonn 5b-depth", changed(kept_layers=3), "not resharded after forward; ask for --kept-layers 0"),
    ("axonn 5b-depth", workload(precision="fp16"), "--precision fp16; it has bf16"),
    ("axonn 5b-depth", step(gather_bytes=2), "step.gather_bytes = 2; leave out --set step.gather_bytes"),
    ("megatron-axonn 20b-pipeline", changed(parts=(3, 5, *[4] * 6)), "uneven stages.* ask for --pipeline and"),
    ("megatron-axonn 20b-pipeline", changed(kept_layers=3), "3 layers of each stage .* --kept-layers 0 or 4"),
    ("megatron-axonn 5b-4d", workload(overlaps=("gather_prefetch",)), "switch off all with --no-overlap all"),
    ("megatron-axonn 80b-chunks", changed(grid=TWO, parts=(3,) * 14), "two interleaved stages; ask for --chunks 1"),
    ("megatron-axonn 20b-4d", workload(precision="fp32"), "--precision fp32; it has bf16, fp16"),
    (
        "megatron-core qwen3-next",
        changed(model=load_model("kimi-linear-48b-a3b").document),
        "Kimi delta attention of kimi-linear-48b-a3b; no framework does",
    ),
    (
        "megatron-core qwen3-next",
        model(layers=32, pattern=None, layer_types={"full": LayerType(output_gate="head")}),
        "a gate of attention's output by head; it has one of each element",
    ),
    (
        "fsdp 8b-one-node",
        changed(model=DELTA.model_copy(update={"block_class": None})),
        "gated delta nets, .* of qwen3-next-80b-a3b; --framework megatron-core does",
    ),
    ("fsdp 8b-one-node", changed(model=DELTA.model_copy(update={"mtp_layers": 1})), "multi-token prediction of qwen3"),
    ("megatron-core 8b-gtp", MIXED, "the rank order DP,GTP; it has GTP,DP"),
    ("megatron-core 8b-gtp", step(gradient_bytes=2), "some are reduced in 2 bytes; set step.gradient_bytes=2 and"),
    ("torchtitan 8b-fsdp", step(cuda_graphs=("attn",)), "CUDA graphs of attn; it captures full_iteration"),
    ("torchtitan 70b-pipeline", step(cuda_graphs=("full_iteration",)), "full_iteration, without stages"),
    ("megatron-core 8b-gtp", step(exp_avg_bytes=2), "these types of optimizer states; ask for --use-precision"),
    ("megatron-core 70b-chunks", step(cuda_graphs=("attn",)), "full recompute inside CUDA graphs of layers; ask for"),
    ("megatron-core 8b-context", step(selective=("mlp.up",)), "recompute of mlp.up; leave out --set step.selective"),
    ("megatron-core mixtral-22b", changed(grid=FOLDED), "experts with pipeline stages inside DP; ask for --order"),
    ("megatron-core mixtral-tensor", model(biases=True), "biases of experts with ETP above 1; ask for --etp 1"),
    ("megatron-core gpt-oss", changed(grid=GATHERED), "GTP in mxfp8 with weights in BF16; ask for --set step.primary"),
    ("megatron-core gpt-oss", changed(grid=SHARDED), "GTP in mxfp8 with weights in BF16; ask for --set step.primary"),
    ("megatron-core mixtral-tensor", workload(precision="fp8-delayed"), "in fp8-delayed; ask for --precision fp8-cur"),
]


@pytest.mark.parametrize(("name", "change", "said"), REFUSED, ids=[f"{name}: {said}" for name, _, said in REFUSED])
def test_what_cannot_be_said_is_refused(name: str, change: Change, said: str) -> None:
    """Guards against commands that do something else: an error that says what, and what to ask for instead."""
    run = run_of(case_of(*name.split()))
    launched(run)
    with pytest.raises(UsageError, match=f"^{re.escape(run.framework.title)} cannot express .*{said}"):
        launched(change(run))


SAID: list[tuple[str, Change, str]] = [
    # What no cost depends on is carried as the model states it, or said to be missing.
    ("megatron-core 8b-gtp", STATED, "--rotary-base 1000000 --norm-epsilon 1e-06 --add-qkv-bias"),
    ("deepspeed 8b-tensor", STATED, "--rotary-position-embeddings-theta 1000000 --layernorm-epsilon 1e-06"),
    ("deepspeed 8b-tensor", STATED, "no biases of queries, keys and values alone"),
    ("megatron-axonn 5b-4d", STATED, "--norm-epsilon 1e-06"),
    ("megatron-axonn 5b-4d", STATED, "Its rotary base is 10,000, without an argument"),
    ("torchtitan 8b-fsdp", STATED, "theta=1000000"),
    ("torchtitan qwen3-30b", changed(), "--debug.moe_force_load_balance"),
    ("torchtitan qwen3-30b", changed(), "--module qwen3 --config qwen3_30b_a3b"),
    ("torchtitan qwen3-30b", step(dispatcher="deepep"), 'model_registry("30B-A3B", moe_comm_backend="deepep")'),
    ("torchtitan 8b-mxfp8", changed(), 'converters=[MXFP8LinearConverter.Config(fqns=["attention", "shared_experts"'),
    # Blocks of any kind are transformers' own.
    ("fsdp 8b-one-node", changed(), "fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer"),
    ("fsdp 8b-one-node", changed(model=DELTA), "fsdp_transformer_layer_cls_to_wrap: Qwen3NextDecoderLayer"),
    ("fsdp 8b-one-node", STATED, "with rotary base 1e+06, norm epsilon 1e-06, biases of queries, keys and values"),
    ("deepspeed 8b-zero3", STATED, "with rotary base 1e+06, norm epsilon 1e-06, biases of queries, keys and values"),
    # Dispatchers and their ports, and tokens that are not spread evenly.
    ("megatron-core gpt-oss", changed(), "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep"),
    ("megatron-core gpt-oss", step(dispatcher="deepep-uccl"), "needs UCCL's DeepEP, as the Python module deep_ep."),
    ("megatron-core gpt-oss", changed(), "--window-size 127,0 --window-attn-skip-freq ([1]*1+[0]*1+"),
    ("megatron-core deepseek-v2", changed(), "--moe-layer-freq ([0]*1+[1]*59)"),
    ("megatron-core mixtral-22b", changed(), "--moe-router-dtype fp32 --moe-expert-capacity-factor 1.5 --moe-token"),
    ("megatron-core mixtral-22b", step(imbalance=1.0), "--moe-router-dtype fp32 --moe-router-force-load-balancing"),
    ("megatron-core nemotron-egtp", changed(), "--expert-tensor-parallel-num-weight-shards 4"),
    ("megatron-core nemotron-egtp", step(cuda_graphs=("attn",)), "CUDA_GRAPHS_USE_NODE_PRIORITY=1"),
    # The part with MTP layers.
    ("megatron-core 70b-all", predicting, "--pipeline-model-parallel-layout Et*20|t*20|t*20m|t*20L"),
    # Stage 3's buckets: kept weights where all are, nothing ahead where that is off.
    ("deepspeed 8b-zero3", changed(), '"stage3_max_reuse_distance": 0'),
    ("deepspeed 8b-zero3", changed(kept_layers=32), '"stage3_max_reuse_distance": 1000000000000000'),
    ("deepspeed 8b-zero3", changed(kept_layers=32), '"stage3_max_live_parameters": 1000000000000000'),
    ("deepspeed 8b-zero3", workload(overlaps=()), '"stage3_prefetch_bucket_size": 0'),
    ("deepspeed 8b-zero3", workload(overlaps=()), '"overlap_comm": false'),
    # What the framework does otherwise than it was priced.
    ("torchtitan 70b-pipeline", changed(), "gradients are reduced with the last micro-batch"),
    ("deepspeed 70b-3d", changed(), "Stages exclude overlap_comm"),
    ("deepspeed 405b-uneven", changed(), "the first stages get one more"),
    ("megatron-axonn 5b-some-kept", changed(), "the first layers whose weights stay gathered"),
]


@pytest.mark.parametrize(("name", "change", "said"), SAID, ids=[f"{name}: {said}" for name, _, said in SAID])
def test_what_is_carried_and_what_is_noted(name: str, change: Change, said: str) -> None:
    """Guards scripts for training: arguments, files and sentences say what the model states and what is otherwise."""
    command = launched(change(run_of(case_of(*name.split()))))
    variables = (f"{one.name}={one.value}" for one in command.environment)
    assert said in "\n".join(
        [" ".join(command.words), *variables, *command.needs, *command.notes, *command.files.values()]
    )
