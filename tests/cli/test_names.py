"""A framework's own names: pins, orders and tables in them, and what is said of requests that it cannot meet."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import axonn_tune
from axonn_tune.errors import UsageError
from axonn_tune.frameworks import registry
from tests.cli.running import good, run

ON_H100 = "--model llama3-70b --machine dgx-h100"
LLAMA = f"--gpus 64 {ON_H100}"
CORE = f"{LLAMA} --framework megatron-core"
SMALL = "--gpus 8 --model 5b --framework"

BAD = [
    # Frameworks.
    (f"{LLAMA} --framework megatron", 2, "no framework named 'megatron', did you mean 'megatron-core'?"),
    (f"{LLAMA} --framework=", 2, "no framework named ''"),
    (f"{CORE} --cost paper", 2, "--cost paper knows the grids of axonn-tune alone: leave out --framework"),
    # Axes that a framework does not have.
    (f"{CORE} --y 2", 2, "--y 2: Megatron-Core has no axis y; it has TP, GTP, PP, VPP, CP, DP"),
    (f"{LLAMA} --framework fsdp --pipeline 2", 2, "PyTorch FSDP has no axis pipeline"),
    (f"{LLAMA} --context 2", 2, "has no axis context; it has x, y, z, data, pipeline, chunks; frameworks that do: "),
    (f"{LLAMA} --grid 1,1,64,1", 2, "each axis has an option: --x N --y N --z N --data N"),
    (
        f"{LLAMA} --framework nemo --gtp 2",
        2,
        "--gtp is Megatron-Core's name of axis z, which NeMo does not have; it has TP, PP, VPP, CP, DP",
    ),
    (f"{LLAMA} --framework megascale --context 2", 2, "--cp 2: MegaScale has no axis context; it has TP, PP, VPP, DP"),
    (f"{LLAMA} --framework deepspeed --chunks 2 --pipeline 2", 2, "DeepSpeed ZeRO has no interleaved stages"),
    # Names of another framework, or of one where none is asked for.
    (
        f"{CORE} --dp-shard 8",
        2,
        "--dp-shard is torchtitan's name of what Megatron-Core calls GTP: --gtp N",
    ),
    (f"{CORE} --data-parallel-replicate-degree 8", 2, "torchtitan's name of what Megatron-Core calls DP: --dp N"),
    (f"{LLAMA} --pp 8", 2, "name of axis pipeline: --pipeline 8, or --framework megatron-core"),
    (f"{LLAMA} --vpp 2", 2, "name of chunks a stage: --chunks 2, or --framework megatron-core"),
    (f"{LLAMA} --cp 2", 2, "name of axis context, which axonn-tune (4D) does not have; it has x, y, z, data"),
    (f"{CORE} --tpp 8", 2, "No such option"),
    # Names with torchtitan's sections before them.
    (
        f"{LLAMA} --parallelism.tensor_parallel_degree 8",
        2,
        "--tensor-parallel-degree is torchtitan's and DeepSpeed ZeRO's name of axis x: --x 8, or --framework tor",
    ),
    (f"{LLAMA} --parallelism.data_parallel_shard_degree=8", 2, "is torchtitan's name of axis z: --z 8"),
    (f"{LLAMA} --training.local_batch_size 2", 2, "is the micro-batch of a layout without stages: --micro-batch N"),
    (f"{LLAMA} --activation_checkpoint.mode full", 2, "activation recomputation is --recompute selective or"),
    (f"{LLAMA} --model.flavor 70B", 2, "there is no option --model.flavor: the model is --model NAME, such as"),
    (f"{LLAMA} --job.config_file x.toml", 2, "explain and compare read a config file by --from-command FILE"),
    (f"{LLAMA} --validation.seq_len 2048", 2, "No such option '--validation.seq_len'"),
    (f"{LLAMA} --training.dataset c4", 2, "No such option '--training.dataset'"),
    # Pins.
    (f"{CORE} --tp 3", 2, "64 GPUs cannot be arranged with TP = 3: 3 does not divide them"),
    (f"{CORE} --tp 8 --pp 16", 2, "64 GPUs cannot be arranged with TP = 8, PP = 16: 128 does not divide them"),
    (f"{CORE} --tp 1 --gtp 1 --pp 1 --cp 1 --dp 32", 2, "TP·GTP·PP·CP·DP = 1·1·1·1·32 is 32, not 64 GPUs"),
    (f"{CORE} --tp 0", 2, "--tp needs a whole number from 1 to 2,147,483,647, got '0'"),
    (f"{CORE} --pp", 2, "--pp needs a whole number from 1 to 2,147,483,647, got ''"),
    (f"{CORE} --tp 8 --x 8", 2, "--tp and --x are two names of one option: give one"),
    (f"{CORE} --tp 8 --tensor-model-parallel-size 8", 2, "are two names of one option"),
    (f"{CORE} --tensor-parallel-num-weight-shards 16", 2, "is TP times GTP: give --tp too, or --gtp N instead"),
    (f"{CORE} --tp 8 --tensor-parallel-num-weight-shards 12", 2, "is TP times GTP, and not divisible by TP = 8"),
    # Pipelines.
    (f"{CORE} --vpp 2 --pp 1", 2, "--vpp 2 is for several pipeline stages, but --pp is 1"),
    (f"{LLAMA} --chunks 2", 2, "--chunks 2 is for several pipeline stages, which --pipeline searches"),
    (f"{CORE} --vpp 200 --pp 4", 3, "layers (80) is less than PP·VPP = 800 of any grid that has PP=4"),
    (f"{CORE} --vpp 2 --pp 8 --dp 8 --batch 8", 3, "PP does not divide the micro-batches of any grid"),
    (f"--gpus 180 {ON_H100} --framework megatron-core --pp 90", 3, "layers (80) is less than PP = 90"),
    # Rank orders.
    (f"{CORE} --order x,y,z,data", 2, "rank order 'x,y,z,data' must name axes once each, as in TP,GTP,CP,DP,PP"),
    (f"{CORE} --order TP,TP,DP", 2, "rank order 'TP,TP,DP' must name axes once each"),
    # What a layout cannot be.
    (f"--gpus 96 {ON_H100} --framework megatron-core --tp 3", 3, "heads (64) is not divisible by TP = 3"),
    (f"{CORE} --seq 4097 --cp 2", 3, "sequence_length (4097) is not divisible by TP·CP = 2"),
    (f"{CORE} --dp 64 --batch 100", 3, "global_batch (100) is not divisible by DP·GTP = 64"),
    (f"{CORE} --micro-batch-size 7", 3, "micro-batch: 7 does not divide the share of the batch of any grid"),
    (f"{SMALL} deepspeed --z 4 --data 2", 3, "ZeRO-3 shards over all data-parallel ranks: stage 3 has no replicas"),
    (f"{SMALL} axonn --x 2", 3, "the easy API brackets each layer with all-to-alls"),
    ("--gpus 1024 --model nano --framework fsdp --z 1024 --batch 1024", 3, "vocab (512) is less than"),
    # What a step cannot do.
    (f"{CORE} --kept-layers 4", 2, "--kept-layers 4: Megatron-Core reshards every layer after forward"),
    (f"{CORE} --split-micro-batch", 2, "Megatron-Core does not interleave half micro-batches"),
    (f"{CORE} --set step.sequence=true", 2, "a step has no 'sequence', did you mean 'sequence_parallel'?"),
    # Other commands.
    (f"explain {CORE} --tp 8 --pick 5000", 2, "configurations are ranked"),
    (f"compare {CORE} --tp 3", 2, "64 GPUs cannot be arranged with TP = 3"),
    (f"sweep --gpus 64,128 {ON_H100} --framework megatron-core --tp 5", 2, "cannot be arranged with TP = 5"),
]


@pytest.mark.parametrize(("line", "code", "said"), BAD, ids=[line for line, _, _ in BAD])
def test_what_a_framework_cannot_do_is_said(line: str, code: int, said: str) -> None:
    """Guards requests that a framework cannot meet: one message in its words, exit code 2 or 3, no traceback."""
    finished = run(line)
    assert finished.code == code, finished.err
    assert said in finished.err
    message = [row for row in finished.err.splitlines() if row.startswith("Error: ")]
    assert len(message) == 1, finished.err


def sizes(line: str) -> dict[str, int]:
    """The layout of the first of a ranking."""
    layout: dict[str, int] = good(f"{line} --top 1 --format json").document["configs"][0]["layout"]
    return layout


@pytest.mark.parametrize(
    "pins",
    [
        "--tp 4 --gtp 2 --pp 2 --vpp 5 --cp 1 --dp 4",
        "--x 4 --z 2 --pipeline 2 --chunks 5 --context 1 --data 4",
        "--tensor-model-parallel-size 4 --tensor-parallel-num-weight-shards=8 --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 5 --context-parallel-size=1",
    ],
)
def test_pins_have_several_names(pins: str) -> None:
    """Guards pins by the framework's short names, by ours, and by its flags; weight shards are TP times GTP."""
    found = sizes(f"{CORE} --mbs 1 --gbs 64 {pins}")
    assert found == {"TP": 4, "GTP": 2, "PP": 2, "VPP": 5, "CP": 1, "DP": 4}
    assert list(found) == ["TP", "GTP", "PP", "VPP", "CP", "DP"]


def test_torchtitans_sections_are_left_out() -> None:
    """Guards options copied from a command of torchtitan: pins, sequence and batch by its names."""
    titan = f"{LLAMA} --framework torchtitan --training.seq_len 4096 --training.global_batch_size 128"
    assert sizes(
        f"{titan} --parallelism.tensor_parallel_degree 4 --parallelism.data_parallel_shard_degree=16"
    ) == sizes(f"{LLAMA} --framework torchtitan --seq 4096 --batch 128 --tp 4 --dp-shard 16")


def test_python_takes_the_same_names() -> None:
    """Guards the package's functions: names of the framework, of another, and of none."""
    given: dict[str, Any] = {"gpus": 64, "machine": "dgx-h100", "framework": "megatron-core"}
    best = axonn_tune.search("llama3-70b", **given, tp=8, pp=4, global_batch_size=128).best  # type: ignore[call-arg]
    assert (best.x, best.pipeline) == (8, 4)
    assert best.accumulation is not None
    assert best.micro_batch is not None
    assert best.accumulation * best.micro_batch * best.data * best.z == 128
    swept = axonn_tune.sweep("llama3-70b", **{**given, "gpus": [64, 128]}, global_batch_size=256)  # type: ignore[call-arg]
    assert {point.inputs.problem.workload.global_batch for point in swept} == {256}
    with pytest.raises(UsageError, match=r"--dp-shard is torchtitan's name of what Megatron-Core calls GTP"):
        axonn_tune.search("llama3-70b", **given, dp_shard=8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'tpp'"):
        axonn_tune.search("llama3-70b", **given, tpp=8)  # type: ignore[call-arg]


def test_orders_take_both_names() -> None:
    """Guards --order: the framework's names in any case, and ours."""
    orders = ("TP,GTP,DP,PP,CP", "tp,gtp,dp,pp,cp", "x,z,data,pipeline,context")
    found = [good(f"{CORE} --order {order} --top 1 --format json").document["configs"][0] for order in orders]
    assert {one["order"].partition(",y")[0] for one in found} == {"x,z,data,pipeline,context"}


@pytest.mark.parametrize("framework", [name for name, one in registry().items() if one.names])
def test_every_name_leads_back(framework: str) -> None:
    """Guards descriptions: each axis has one name, no two have the same, and it is an option."""
    one = registry()[framework]
    names = list(map(one.called, one.columns))
    assert len({name.lower() for name in names}) == len(names)
    assert [one.axis(name) for name in names] == list(one.columns)
    assert all(one.option(axis).removeprefix("--").replace("-", "").isalnum() for axis in one.columns)


@pytest.mark.parametrize("framework", ["megatron-core", "torchtitan", "axonn-tune"])
@pytest.mark.parametrize("command", ["search", "explain", "sweep"])
def test_what_is_shown_is_in_its_names(framework: str, command: str) -> None:
    """Guards tables and remarks: the framework's names in its own order, and none of ours beside them."""
    one = registry()[framework]
    line = f"{command} --gpus 64 --model llama3-8b --machine dgx-h100 --framework {framework}"
    finished = good(f"{line} --cp 2 --pp 2 --tp 2" if framework != "axonn-tune" else f"{line} --pipeline 2")
    shown = f"{finished.out}\n{finished.err}"
    for axis in ("x", "z", "pipeline", "data"):
        assert one.called(axis) in shown
    if framework == "megatron-core":
        for ours in (" x ", " z ", " over x", " over z", " over data", "x=", "z="):
            assert ours not in shown


def test_names_load_only_where_they_are_used() -> None:
    """Guards start-up time: a search whose options are ours imports no table of other names."""
    sys.modules.pop("axonn_tune.frameworks.names", None)
    good("--gpus 8 --model 5b --top 1")
    assert "axonn_tune.frameworks.names" not in sys.modules
