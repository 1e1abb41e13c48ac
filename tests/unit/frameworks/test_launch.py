"""Commands of the frameworks: what they start is the configuration that was asked for, in the framework's own terms."""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from types import ModuleType
from typing import Any

import pytest
import yaml

from axonn_tune.errors import UsageError
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.command import Command, Run
from axonn_tune.grid import Grid
from axonn_tune.specs.workload import RECOMPUTES, Recompute
from tests.unit.frameworks.launch_cases import CASES, Case, cases, command_of, run_of

NAMES = ("torchtitan", "torchtitan-eager", "fsdp", "deepspeed", "axonn", "megatron-axonn")
ALIKE = {"torchtitan-eager": "torchtitan"}
"""Frameworks whose commands differ by a switch from another's, which has the cases."""
NOT_MODELLED = {"axonn": {"x", "y"}}
"""Axes that a framework has and the search refuses."""
KINDS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}

MEGATRON_AXONN = """
    row-tensor-model-parallel-size=int column-tensor-model-parallel-size=int depth-tensor-model-parallel-size=int
    pipeline-model-parallel-size=int num-layers-per-virtual-pipeline-stage=int overlap-axonn-comm
    overlap-axonn-reduce-scatter overlap-axonn-all-gather use-amd no-gradient-accumulation-fusion
    num-layers-for-caching-weights-in-depth-tensor-parallel-all-gather=int group-query-attention num-query-groups=int
    num-layers=int hidden-size=int ffn-hidden-size=int num-attention-heads=int kv-channels=int seq-length=int
    max-position-embeddings=int make-vocab-size-divisible-by=int use-rotary-position-embeddings swiglu use-flash-attn
    normalization=LayerNorm|RMSNorm disable-bias-linear untie-embeddings-and-output-weights vocab-size=int
    tokenizer-type=GPT2BPETokenizer|NullTokenizer attention-dropout=float hidden-dropout=float micro-batch-size=int
    global-batch-size=int recompute-granularity=full|selective recompute-method=uniform|block recompute-num-layers=int
    bf16 fp16 accumulate-allreduce-grads-in-fp32 train-iters=int eval-iters=int lr=float log-interval=int
"""
"""Arguments of axonn-ai/Megatron-AxoNN@064236e4, megatron/arguments.py, with their types and choices: those in use."""

MEGATRON_DEEPSPEED = """
    tensor-model-parallel-size=int pipeline-model-parallel-size=int no-pipeline-parallel zero-stage=int deepspeed
    deepspeed_config=str num-layers=int hidden-size=int ffn-hidden-size=int num-attention-heads=int kv-channels=int
    num-key-value-heads=int seq-length=int max-position-embeddings=int make-vocab-size-divisible-by=int vocab-size=int
    use-rotary-position-embeddings swiglu use-flash-attn-v2 normalization=layernorm|rmsnorm disable-bias-linear
    untie-embeddings-and-output-weights tokenizer-type=GPT2BPETokenizer|NullTokenizer attention-dropout=float
    hidden-dropout=float no-query-key-layer-scaling micro-batch-size=int global-batch-size=int checkpoint-activations
    deepspeed-activation-checkpointing recompute-granularity=full|selective bf16 fp16 train-iters=int eval-iters=int
    lr=float log-interval=int
"""
"""The same of deepspeedai/Megatron-DeepSpeed@207b2d5a, megatron/arguments.py, and of DeepSpeed 0.19.8."""


def parsed(command: Command, table: str) -> argparse.Namespace:
    """Arguments as a parser of the table reads them; SystemExit for one that it does not know."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for one in table.split():
        name, _, kind = one.partition("=")
        if not kind:
            parser.add_argument(f"--{name}", action="store_true")
        elif "|" in kind:
            parser.add_argument(f"--{name}", choices=kind.split("|"))
        else:
            parser.add_argument(f"--{name}", type=KINDS[kind])
    return parser.parse_args(list(command.words))


def case_of(framework: str, name: str) -> Case:
    """A case by its name."""
    return next(case for case in cases(framework) if case.id == name)


def launched(run: Run, framework: str) -> Command:
    """The command of a run that is in no table."""
    launch = find_framework(framework).launch
    assert launch is not None
    return launch(run)


@pytest.mark.parametrize("framework", CASES)
def test_the_table_has_every_kind(framework: str) -> None:
    """Guards the table: three models, several sizes, every axis above 1 somewhere, each kind of recompute."""
    if framework in ALIKE:
        return
    found, has = cases(framework), find_framework(framework)
    assert len(found) >= 10
    assert len({case.model for case in found}) >= 3
    assert len({case.gpus for case in found}) >= 4
    used = {axis for case in found for axis, size in run_of(case).grid.by_axis.items() if size > 1}
    assert used == set(has.axes) - NOT_MODELLED.get(framework, set())
    assert ("pipeline" in has.axes and has.schedule.interleaved) == any(run_of(case).chunks > 1 for case in found)
    recomputes = {run_of(case).recompute for case in found}
    # PyTorch has no selective recompute of its own.
    assert recomputes == set(RECOMPUTES) - ({"selective"} if framework == "fsdp" else set())


@pytest.mark.parametrize("case", cases(*NAMES), ids=str)
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


def titan_keys(command: Command) -> dict[str, str]:
    """Overrides of torchtitan by their keys; a switch is "true" or "false"."""
    words = [word for word in command.words if not word.startswith("activation")]
    found = dict[str, str]()
    for place, word in enumerate(words):
        if word.startswith("--"):
            value = words[place + 1] if place + 1 < len(words) and not words[place + 1].startswith("--") else None
            section, _, name = word.removeprefix("--").rpartition(".")
            off = value is None and name.startswith("no-")
            found[f"{section}.{name.removeprefix('no-')}"] = value or ("false" if off else "true")
    return found


@pytest.mark.parametrize("case", cases("torchtitan", "torchtitan-eager"), ids=str)
def test_torchtitan_gets_the_configuration(case: Case) -> None:
    """Guards degrees, whose product is the world, batch arithmetic with and without stages, and the compiler."""
    run, command = run_of(case), command_of(case)
    keys = titan_keys(command)
    degrees = {
        "z": "data_parallel_shard_degree",
        "data": "data_parallel_replicate_degree",
        "x": "tensor_parallel_degree",
        "context": "context_parallel_degree",
        "pipeline": "pipeline_parallel_degree",
    }
    sizes = {axis: int(keys[f"parallelism.{key}"]) for axis, key in degrees.items()}
    assert sizes == {axis: run.size(axis) for axis in degrees}
    assert prod(sizes.values()) == case.gpus
    local, total = int(keys["training.local_batch_size"]), int(keys["training.global_batch_size"])
    steps, rest = divmod(total, local * sizes["z"] * sizes["data"])
    assert (total, rest) == (run.workload.global_batch, 0)
    if run.size("pipeline") > 1:
        micro_batch = int(keys["parallelism.pipeline_parallel_microbatch_size"])
        assert (steps, local // micro_batch, micro_batch) == (1, run.accumulation, run.micro_batch)
        interleaved = keys["parallelism.pipeline_parallel_schedule"] == "Interleaved1F1B"
        assert interleaved == (run.chunks > 1)
    else:
        assert (steps, local) == (run.accumulation, run.micro_batch)
    assert keys["compile.enable"] == ("true" if case.framework == "torchtitan" else "false")
    assert keys["parallelism.fsdp_reshard_after_forward"] == ("never" if run.kept_layers else "always")
    assert command.words[-1] == f"activation-checkpoint:{run.recompute}"
    assert command.sections[-1].last


@pytest.mark.parametrize(
    ("name", "less", "layers"),
    [
        # 70B in 4 and in 20 parts, and 4 parts over 2 stages, which a looped schedule has by itself.
        ("70b-pipeline", ("0", "0"), None),
        ("70b-chunks", ("0", "0"), "4"),
        ("70b-all", ("0", "0"), None),
        # 126 blocks in 16 parts: 7, 14 of 8, 7. With the embedding as one it is 127: 15 of 8, 7.
        ("405b-uneven", ("1", "0"), None),
    ],
)
def test_torchtitan_splits_as_priced(name: str, less: tuple[str, str], layers: str | None) -> None:
    """Guards the layers of each part, which torchtitan computes from what it takes off its ends."""
    keys = titan_keys(command_of(case_of("torchtitan", name)))
    ends = [keys[f"parallelism.pipeline_parallel_{end}_stage_less_layers"] for end in ("first", "last")]
    assert tuple(ends) == less
    assert keys.get("parallelism.pipeline_parallel_layers_per_stage") == layers


def constants(text: str) -> dict[str, Any]:
    """Literals that a Python file assigns to names, and to tuples of names."""
    found = dict[str, Any]()
    for one in ast.parse(text).body:
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]).strip("()").replace(", ", "").isupper():
            names = ast.unparse(one.targets[0]).strip("()").split(", ")
            try:
                values = ast.literal_eval(one.value)
            except ValueError:
                continue
            found |= {names[0]: values} if len(names) == 1 else dict(zip(names, values, strict=True))
    return found


def test_torchtitan_gets_a_module_for_other_sizes() -> None:
    """Guards models and splits that no shipped config has: sizes and blocks of each part are in a module of its own."""
    for name, parted in (("405b-chunks", False), ("70b-odd-chunks", True)):
        run, command = (make(case_of("torchtitan", name)) for make in (run_of, command_of))
        assert isinstance(run, Run)
        assert isinstance(command, Command)
        assert command.program == ("{file:_model.py}",)
        assert titan_keys(command)[".module"] == "__main__"
        given, model = constants(command.files["_model.py"]), run.model
        assert given["NAME"] == model.name
        # Without groups of parameters of its own, torchtitan's optimizer holds none of them, and it stops.
        assert "optimizer=default_adamw(" in command.files["_model.py"]
        assert [given[size] for size in ("LAYERS", "HIDDEN", "HEADS", "KV_HEADS", "HEAD_DIM", "FFN", "VOCAB")] == [
            model.layers,
            model.hidden,
            model.heads,
            model.kv_heads,
            model.head_dim,
            model.ffn,
            model.vocab,
        ]
        parts = given["PARTS"]
        assert (parts is not None) == parted
        if parts is not None:
            assert tuple(sum(one.startswith("layers.") for one in part) for part in parts) == run.parts
            assert [parts[0][0], *parts[-1][-2:]] == ["tok_embeddings", "norm", "lm_head"]
            blocks = [one for part in parts for one in part if one.startswith("layers.")]
            assert blocks == [f"layers.{number}" for number in range(model.layers)]


@pytest.mark.parametrize("case", cases("torchtitan"), ids=str)
def test_the_toml_says_the_same(case: Case) -> None:
    """Guards `--emit toml`: the older release's file has the sizes of the newer one's arguments."""
    run, command = run_of(case), command_of(case)
    form = command.forms["toml"]
    assert form.words == ("--job.config_file", "{file:.toml}")
    found, keys = tomllib.loads(form.files[".toml"]), titan_keys(command)
    assert found["model"]["flavor"].lower() in case.model
    assert found["activation_checkpoint"]["mode"] == run.recompute
    parts = found["parallelism"].pop("module_fqns_per_model_part", None)
    if parts is not None:
        assert len(parts) == len(run.parts)
        assert parts[-1][-1] == "output"
    for section in ("training", "parallelism"):
        for name, value in found[section].items():
            place = "dataloader.dataset" if name == "dataset" else f"{section}.{name}"
            assert keys[place] == str(value)


@pytest.mark.parametrize("case", cases("fsdp"), ids=str)
def test_fsdp_gets_the_configuration(case: Case) -> None:
    """Guards accelerate's config, and the mesh where that cannot say it."""
    run, command = run_of(case), command_of(case)
    words = command.words
    said = {name: int(words[words.index(name) + 1]) for name in words if name.startswith("--")}
    assert said["--per_device_train_batch_size"] == run.micro_batch
    assert said["--gradient_accumulation_steps"] == run.accumulation
    assert prod((*said.values(),)[:2]) * run.grid.batch_shares == run.workload.global_batch
    mesh = constants(command.forms["fully-shard"].files["_mesh.py"])
    assert prod(mesh["SIZES"]) == case.gpus
    sizes = dict(zip(mesh["NAMES"], mesh["SIZES"], strict=True))
    assert (sizes["shard"], sizes.get("replicate", 1)) == (run.size("z"), run.size("data"))
    assert (mesh["KEPT_LAYERS"], mesh["RECOMPUTE"]) == (run.kept_layers, run.recompute == "full")
    said_by_config = run.size("z") > 1 and run.kept_layers in (0, run.model.layers)
    assert bool(command.accelerate) == said_by_config
    if said_by_config:
        config = yaml.safe_load(command.files[".yaml"])
        assert (config["distributed_type"], config["fsdp_config"]["fsdp_version"]) == ("FSDP", 2)
        assert config["num_processes"] == case.gpus
        assert config["num_machines"] * run.machine.launcher.ranks_per_node >= case.gpus
        assert config["fsdp_config"]["fsdp_reshard_after_forward"] is (run.kept_layers == 0)
        assert config["fsdp_config"]["fsdp_activation_checkpointing"] is (run.recompute == "full")
        parallel = config.get("parallelism_config", {})
        assert parallel.get("parallelism_config_dp_replicate_size", 1) == run.size("data")
        assert parallel.get("parallelism_config_dp_shard_size", run.size("z")) == run.size("z")


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


@pytest.mark.parametrize("case", cases("deepspeed"), ids=str)
def test_deepspeed_gets_the_configuration(case: Case) -> None:
    """Guards the JSON, whose batch sizes must agree, and Megatron-DeepSpeed's arguments."""
    run, command = run_of(case), command_of(case)
    config = json.loads(command.files[".json"])
    shares = run.size("z") * run.size("data")
    batch = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * shares
    assert batch == config["train_batch_size"] == run.workload.global_batch
    zero = config["zero_optimization"]
    assert zero["stage"] == (3 if run.size("z") > 1 else 1)
    assert zero["overlap_comm"] is (run.size("pipeline") == 1)
    assert config["communication_data_type"] == config["data_types"]["grad_accum_dtype"] == "bf16"
    assert config["bf16"] == {"enabled": True}
    assert command.words[-2:] == ("--deepspeed_config", "{file:.json}") or command.program == ("pretrain_gpt.py",)
    assert (command.program == ("train.py",)) == (run.size("x") * run.size("pipeline") == 1)
    if command.program == ("pretrain_gpt.py",):
        found = parsed(command, MEGATRON_DEEPSPEED)
        stages = found.pipeline_model_parallel_size or 1
        assert found.tensor_model_parallel_size * stages * shares == case.gpus
        assert (found.tensor_model_parallel_size, stages) == (run.size("x"), run.size("pipeline"))
        assert found.no_pipeline_parallel is (stages == 1)
        assert found.zero_stage == zero["stage"]
        assert (found.micro_batch_size, found.global_batch_size) == (run.micro_batch, run.workload.global_batch)
        assert found.checkpoint_activations is (run.recompute == "full")
        assert_model(run, found)
        assert (found.num_key_value_heads or found.num_attention_heads) == run.model.kv_heads


def assert_model(run: Run, found: argparse.Namespace) -> None:
    """The sizes that Megatron's arguments share."""
    model = run.model
    sizes = (found.num_layers, found.hidden_size, found.ffn_hidden_size, found.num_attention_heads, found.kv_channels)
    assert sizes == (model.layers, model.hidden, model.ffn, model.heads, model.head_dim)
    assert found.seq_length == run.workload.sequence_length <= found.max_position_embeddings
    assert found.vocab_size + 1 == model.vocab, "the null tokenizer adds a token"
    assert found.swiglu is model.gated
    assert found.disable_bias_linear is not model.biases
    assert found.untie_embeddings_and_output_weights is not model.tied_embeddings
    assert found.bf16


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


@pytest.mark.parametrize("case", cases("axonn"), ids=str)
def test_axonn_gets_the_configuration(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards axonn.init's degrees and the batch of each rank, by running the file against modules that record them."""
    import torch

    run, calls = run_of(case), dict[str, Any]()
    api, layers = ModuleType("axonn.axonn"), ModuleType("axonn.intra_layer")
    api.init = lambda **degrees: calls.update(degrees)  # type: ignore[attr-defined]
    api.create_dataloader = lambda _, **sizes: calls.update(sizes)  # type: ignore[attr-defined]
    for name in ("auto_parallelize", "clip_grad_norm_", "optimize_communication", "sync_gradients"):
        setattr(layers, name, None)
    package = ModuleType("axonn")
    package.axonn = api  # type: ignore[attr-defined]
    for name, module in (("axonn", package), ("axonn.axonn", api), ("axonn.intra_layer", layers)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend: calls.update(backend=backend))
    given: dict[str, Any] = {}
    exec(command_of(case).files["_layout.py"], given)
    given["init"]()
    given["batches"]([])
    degrees = {"x": "G_intra_r", "y": "G_intra_c", "z": "G_intra_d", "pipeline": "G_inter", "data": "G_data"}
    assert {axis: calls[name] for axis, name in degrees.items()} == {axis: run.size(axis) for axis in degrees}
    assert prod(calls[name] for name in degrees.values()) == case.gpus
    assert calls["backend"] == "nccl"
    shares = calls["G_data"] * calls["G_intra_d"]
    assert calls["global_batch_size"] == calls["micro_batch_size"] * given["ACCUMULATION"] * shares
    assert calls["micro_batch_size"] == run.micro_batch


def test_axonn_takes_axes_that_are_not_modelled() -> None:
    """Guards x and y of the easy API: the search refuses them, axonn.init does not."""
    run = replace(run_of(case_of("axonn", "5b-depth")), grid=Grid(x=2, y=2, z=4, data=4, order=("y", "x", "z", "data")))
    assert "G_data=4, G_intra_r=2, G_intra_c=2, G_intra_d=4" in launched(run, "axonn").files["_layout.py"]


@pytest.mark.parametrize("case", cases("megatron-axonn"), ids=str)
def test_megatron_axonn_gets_the_configuration(case: Case) -> None:
    """Guards its flags against a table of its parser: degrees, and micro-batches of a whole tensor group."""
    run = run_of(case)
    found = parsed(command_of(case), MEGATRON_AXONN)
    sizes = {
        "x": found.row_tensor_model_parallel_size,
        "y": found.column_tensor_model_parallel_size,
        "z": found.depth_tensor_model_parallel_size,
        "pipeline": found.pipeline_model_parallel_size or 1,
    }
    assert sizes == {axis: run.size(axis) for axis in sizes}
    data, rest = divmod(case.gpus, prod(sizes.values()))
    assert (data, rest) == (run.size("data"), 0)
    assert found.micro_batch_size == run.micro_batch * sizes["z"]
    assert divmod(found.global_batch_size, found.micro_batch_size * data) == (run.accumulation, 0)
    chunk = found.num_layers_per_virtual_pipeline_stage
    assert run.chunks == (run.model.layers // sizes["pipeline"] // chunk if chunk else 1)
    assert found.overlap_axonn_comm
    assert found.recompute_granularity == (None if run.recompute == "none" else run.recompute)
    assert found.use_amd is (case.machine == "frontier")
    cached = found.num_layers_for_caching_weights_in_depth_tensor_parallel_all_gather or 0
    whole = run.kept_layers == run.model.layers // sizes["pipeline"]
    assert cached == (run.model.layers if whole else run.kept_layers)
    assert_model(run, found)
    assert (found.num_query_groups or found.num_attention_heads) == run.model.kv_heads


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


def test_two_interleaved_stages_of_megatron_axonn_are_refused() -> None:
    """Guards its own check: interleaving needs more than two stages."""
    run = run_of(case_of("megatron-axonn", "80b-chunks"))
    grid = Grid(x=4, z=4, pipeline=2, data=24, order=find_framework("megatron-axonn").axes)
    with pytest.raises(UsageError, match="two interleaved stages; ask for --chunks 1 or more stages"):
        launched(replace(run, grid=grid, parts=(3,) * 14), "megatron-axonn")


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
