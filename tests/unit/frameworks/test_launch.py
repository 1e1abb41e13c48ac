"""Commands of the frameworks: what they start is the configuration that was asked for, in the framework's own terms."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from axonn_tune.errors import UsageError
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.command import Command, Run
from axonn_tune.grid import Grid
from axonn_tune.specs.workload import Recompute
from tests.unit.frameworks.launch_cases import Case, cases, command_of, run_of


def case_of(framework: str, name: str) -> Case:
    """A case by its name."""
    return next(case for case in cases(framework) if case.id == name)


def launched(run: Run, framework: str) -> Command:
    """The command of a run that is in no table."""
    launch = find_framework(framework).launch
    assert launch is not None
    return launch(run)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_command_is_literal_and_complete(case: Case) -> None:
    """Guards every command: no shell in it, sections that bash can name, every file that is read is written."""
    command = command_of(case)
    words = [*command.program, *command.words, *(word for one in command.accelerate for word in one.words)]
    assert not [word for word in words if re.search(r"[$`\s]", word)]
    titles = [section.title for section in command.sections]
    assert len(set(titles)) == len(titles)
    assert all(title.isidentifier() and title.islower() for title in titles)
    assert set(re.findall(r"\{file:(.+?)\}", " ".join(words))) <= set(command.files)
    assert not [switch for switch in words if switch.startswith("--") and words.count(switch) > 1]
    assert command.release
    assert command.needs
    assert all(sentence.endswith(".") for sentence in (*command.needs, *command.notes))
    for suffix, text in command.files.items():
        if suffix.endswith(".py"):
            ast.parse(text)
            assert max(len(line) for line in text.splitlines()) <= 120


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A process group of four ranks that sends nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_mesh_shards_a_model(recompute: Recompute) -> None:
    """Guards the Python file: it runs; blocks are sharded over z and replicated over data, the last one stays whole
    after forward, and gradients arrive as shards in FP32.
    """
    import torch
    from torch import nn
    from torch.distributed.tensor import DTensor, Replicate, Shard

    grid = Grid(z=2, data=2, order=("z", "data"))
    run = replace(run_of(case_of("fsdp", "8b-some-kept")), grid=grid, kept_layers=1, recompute=recompute)
    given: dict[str, Any] = {}
    exec(launched(run, "fsdp").files["_mesh.py"], given)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(8, 4))
    given["shard"](model, blocks, device="cpu")
    made = model(torch.randn(2, 8))
    assert made.dtype == torch.bfloat16
    assert [isinstance(next(block.parameters()), DTensor) for block in blocks] == [True, True, False]
    made.float().sum().backward()
    for weights in (list(model.parameters()), [one.grad for one in model.parameters()]):
        shards = [one for one in weights if isinstance(one, DTensor)]
        assert len(shards) == 8
        assert {(one.dtype, one.placements) for one in shards} == {(torch.float32, (Replicate(), Shard(0)))}


def test_what_deepspeed_reads_ahead() -> None:
    """Guards stage 3's buckets: gathers as priced, kept weights where all are, nothing ahead where that is off."""
    run = run_of(case_of("deepspeed", "8b-zero3"))
    zero = json.loads(launched(run, "deepspeed").files[".json"])["zero_optimization"]
    assert (zero["stage3_max_reuse_distance"], zero["stage3_prefetch_bucket_size"] > 0) == (0, True)
    kept = replace(run, kept_layers=run.model.layers)
    zero = json.loads(launched(kept, "deepspeed").files[".json"])["zero_optimization"]
    assert min(zero["stage3_max_reuse_distance"], zero["stage3_max_live_parameters"]) > 2 * run.model.parameters
    plain = replace(run, workload=run.workload.model_copy(update={"overlaps": ()}))
    zero = json.loads(launched(plain, "deepspeed").files[".json"])["zero_optimization"]
    assert (zero["stage3_prefetch_bucket_size"], zero["overlap_comm"]) == (0, False)


def workload(**changes: object) -> Callable[[Run], Run]:
    """The same run with another workload."""
    return lambda run: replace(run, workload=run.workload.model_copy(update=changes))


def step(**changes: object) -> Callable[[Run], Run]:
    """The same run with other options of the step."""
    return lambda run: replace(run, step=replace(run.step, **changes))  # type: ignore[arg-type]


def changed(**changes: Any) -> Callable[[Run], Run]:
    """The same run with other fields."""
    return lambda run: replace(run, **changes)


def model(**changes: object) -> Callable[[Run], Run]:
    """The same run of a model with other sizes."""
    return lambda run: replace(run, model=run.model.model_copy(update=changes))


ORDER = ("data", "z", "x", "y", "context", "pipeline")
"""A rank order that no framework has."""
TWO = Grid(x=4, z=4, pipeline=2, data=24, order=find_framework("megatron-axonn").axes)


@pytest.mark.parametrize(
    ("framework", "name", "change", "said"),
    [
        (
            "torchtitan",
            "8b-fsdp",
            model(family="gpt"),
            "a GPT's LayerNorm, GELU and learned positions; ask for a Llama",
        ),
        ("torchtitan", "8b-fsdp", model(biases=True), "cannot express biases; ask for a Llama-shaped model without"),
        ("torchtitan", "70b-pipeline", model(tied_embeddings=True), "with a tied embedding; ask for --pipeline 1"),
        (
            "torchtitan",
            "70b-pipeline",
            changed(accumulation=2),
            r"fewer micro-batches \(2\) than stages \(4\); ask for",
        ),
        ("torchtitan", "8b-fsdp", changed(kept_layers=5), "5 of 32 layers .* ask for --kept-layers 0 or 32"),
        ("torchtitan", "70b-pipeline", changed(kept_layers=5), "5 of 20 layers .* ask for --kept-layers 0 or 20"),
        ("torchtitan", "8b-fsdp", workload(precision="fp16"), "--precision fp16; it has bf16, fp32"),
        ("torchtitan", "8b-fsdp", workload(overlaps=()), "--no-overlap gather_prefetch; leave it out"),
        ("torchtitan", "8b-hsdp", workload(shard_optimizer_over_data=True), "ZeRO-1; leave out --shard-optimizer"),
        ("torchtitan", "8b-hsdp", step(reduce_each_micro_batch=False), "leave out --set step.reduce_each_micro_batch"),
        ("torchtitan", "8b-hsdp", changed(grid=Grid(z=8, data=8, order=ORDER)), "the rank order dp_replicate,dp_shard"),
        (
            "torchtitan",
            "8b-context",
            workload(sequence_length=8200),
            "a sequence of 8200, which is not divisible by 16; ask for another --seq",
        ),
        ("torchtitan-eager", "8b-fsdp", step(fused_norms=True), "leave out --set step.fused_norms"),
        ("fsdp", "8b-hsdp", changed(recompute="selective"), "selective recompute; ask for --recompute full or none"),
        ("fsdp", "8b-hsdp", workload(precision="fp32"), "--precision fp32; it has bf16"),
        ("fsdp", "8b-hsdp", workload(split_micro_batch=True), "a split micro-batch; leave out --split-micro-batch"),
        ("fsdp", "8b-hsdp", changed(grid=Grid(z=8, data=8, order=ORDER)), "replicate,shard; it has shard,replicate"),
        ("deepspeed", "8b-zero3", changed(kept_layers=4), "4 of 32 layers .* ask for --kept-layers 0 or 32"),
        ("deepspeed", "8b-zero3", workload(precision="fp32"), "--precision fp32; it has bf16, fp16"),
        ("deepspeed", "70b-3d", changed(parts=(3, 11, *[11] * 6)), "a stage of 11 blocks; each has 10 at most"),
        ("deepspeed", "8b-zero3", step(reshard="fit"), "step.reshard = fit; leave out --set step.reshard"),
        ("axonn", "5b-depth", changed(kept_layers=3), "not resharded after forward; ask for --kept-layers 0"),
        ("axonn", "5b-depth", workload(precision="fp16"), "--precision fp16; it has bf16"),
        ("axonn", "5b-depth", step(gather_bytes=2), "step.gather_bytes = 2; leave out --set step.gather_bytes"),
        ("megatron-axonn", "20b-pipeline", changed(parts=(3, 5, *[4] * 6)), "uneven stages.* ask for --pipeline and"),
        ("megatron-axonn", "20b-pipeline", changed(kept_layers=3), "3 layers of each stage .* --kept-layers 0 or 4"),
        ("megatron-axonn", "5b-4d", workload(overlaps=("gather_prefetch",)), "switch off all with --no-overlap all"),
        (
            "megatron-axonn",
            "80b-chunks",
            changed(grid=TWO, parts=(3,) * 14),
            "two interleaved stages; ask for --chunks 1",
        ),
        ("megatron-axonn", "20b-4d", workload(precision="fp32"), "--precision fp32; it has bf16, fp16"),
    ],
)
def test_what_cannot_be_said_is_refused(framework: str, name: str, change: Callable[[Run], Run], said: str) -> None:
    """Guards against commands that do something else: an error that says what, and what to ask for instead."""
    run = run_of(case_of(framework, name))
    launched(run, framework)
    with pytest.raises(UsageError, match=said) as refused:
        launched(change(run), framework)
    assert refused.value.exit_code == 2
    assert str(refused.value).startswith(f"{run.framework.title} cannot express ")


STATED = {"rotary_base": 1_000_000.0, "norm_epsilon": 1e-6, "qkv_biases": True}


@pytest.mark.parametrize(
    ("framework", "name", "arguments", "elsewhere"),
    [
        ("megatron-core", "8b-gtp", "--rotary-base 1000000 --norm-epsilon 1e-06 --add-qkv-bias", ""),
        (
            "deepspeed",
            "8b-tensor",
            "--rotary-position-embeddings-theta 1000000 --layernorm-epsilon 1e-06",
            "no biases of queries, keys and values alone",
        ),
        ("megatron-axonn", "5b-4d", "--norm-epsilon 1e-06", "Its rotary base is 10,000, without an argument"),
        ("torchtitan", "8b-fsdp", "", "theta=1000000"),
        ("fsdp", "8b-one-node", "", "with rotary base 1e+06, norm epsilon 1e-06, biases of queries, keys and values"),
        ("deepspeed", "8b-zero3", "", "with rotary base 1e+06, norm epsilon 1e-06, biases of queries, keys and values"),
    ],
)
def test_what_no_cost_depends_on_is_carried(framework: str, name: str, arguments: str, elsewhere: str) -> None:
    """Guards scripts for training: rotary base, norm epsilon and biases as the model states them, or a note."""
    run = run_of(case_of(framework, name))
    model = run.model.model_copy(update=STATED)
    command = launched(replace(run, model=model), framework)
    assert arguments in " ".join(command.words)
    others = [*command.needs, *command.notes, *command.files.values()]
    assert any(elsewhere in text for text in others) or not elsewhere


@pytest.mark.parametrize(
    ("framework", "name", "change", "noted"),
    [
        ("torchtitan", "70b-pipeline", changed(), "gradients are reduced with the last micro-batch"),
        ("torchtitan", "8b-fsdp", changed(), "every second GEMM"),
        ("deepspeed", "70b-3d", changed(), "Stages exclude overlap_comm"),
        ("deepspeed", "405b-uneven", changed(), "the first stages get one more"),
        ("deepspeed", "8b-tensor-zero3", changed(), "AutoTP"),
        ("megatron-axonn", "5b-some-kept", changed(), "the first layers whose weights stay gathered"),
    ],
)
def test_what_is_said_otherwise_is_noted(framework: str, name: str, change: Callable[[Run], Run], noted: str) -> None:
    """Guards notes: what the framework does otherwise than it was priced."""
    command = launched(change(run_of(case_of(framework, name))), framework)
    assert any(noted in note for note in command.notes)
