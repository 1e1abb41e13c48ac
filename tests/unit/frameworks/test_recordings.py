"""Commands against what frameworks' own code said of them, which `make frameworks` records; none is needed here."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.command import Run
from axonn_tune.grid import ALL_AXES
from axonn_tune.program.dimensions import table_rows
from axonn_tune.program.size import PLAIN
from tests.cli.running import run as run_line
from tests.unit.frameworks.launch_cases import Case, cases, command_of, run_of
from tests.unit.frameworks.recorded import RECORDINGS, REFUSALS, Asked, Refusal, asked, recording
from tools.frameworks.environments import ENVIRONMENTS, Environment
from tools.frameworks.record import script_hashes

ENVIRONMENT_OF = {name: one for one in ENVIRONMENTS if "" in one.forms for name in one.frameworks}
AGAIN = "run `make frameworks`, and look at what it changes in tests/fixtures/frameworks"
Entry: TypeAlias = dict[str, Any]


def _key(entry: Entry) -> str:
    return f"{entry['framework']} {entry['kind']} {entry['id']}"


def _entries(*kinds: str) -> list[tuple[Environment, Entry]]:
    """Everything recorded of some kinds, with the environment that said it."""
    return [
        (environment, entry)
        for environment in ENVIRONMENTS
        for entry in recording(environment.name)["entries"]
        if entry["kind"] in kinds
    ]


def _each(*kinds: str) -> pytest.MarkDecorator:
    found = _entries(*kinds)
    return pytest.mark.parametrize(("environment", "entry"), found, ids=[_key(entry) for _, entry in found])


@cache
def _today(environment: Environment) -> dict[str, Asked]:
    """Today's questions by name."""
    found = [one for name in environment.frameworks for one in asked(name, environment.forms)]
    return {one.key: one for one in found}


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda one: one.name)
def test_a_recording_is_of_todays_questions(environment: Environment) -> None:
    """All are recorded and nothing else, by today's check script, in the releases that are pinned."""
    found = recording(environment.name)
    assert {_key(entry) for entry in found["entries"]} == set(_today(environment)), AGAIN
    assert found["scripts"] == script_hashes(environment), f"another check script recorded this: {AGAIN}"
    pinned = {f"{name}=={version.partition('+')[0]}" for name, version in found["packages"].items()}
    assert pinned <= {*environment.packages, *environment.before}


@_each("case", "layout", "refusal")
def test_todays_command_is_the_recorded_one(environment: Environment, entry: Entry) -> None:
    """A changed command has to be shown to the framework again; what it said of this one is as it must be."""
    one = _today(environment)[_key(entry)]
    assert {name: entry[name] for name in one.recorded} == one.recorded, AGAIN
    assert one.as_expected(entry)


@_each("case", "layout")
def test_the_framework_reads_what_was_asked(environment: Environment, entry: Entry) -> None:
    """World, degrees, batches, layers of each stage and chunk, recompute, precision, model: as in the configuration."""
    one = _today(environment)[_key(entry)]
    assert entry["sizes"] == EXPECTED[environment.name](one)


@_each("case", "layout")
def test_rank_groups_are_those_of_our_grid(environment: Environment, entry: Entry) -> None:
    """In every rank order that the framework has: all groups of a small world, those of one rank in a large one."""
    grid = _today(environment)[_key(entry)].run.grid
    assert grid.world == entry["world"]
    ours = dict[str, list[list[int]]]()
    for name, axes in _group_axes(environment, entry["framework"]).items():
        if prod(grid.axis_size(axis) for axis in axes) > 1:
            over = "".join(axes)
            groups = grid.groups(over) if entry["kind"] == "layout" else [grid.members(grid.world // 3, over)]
            ours[name] = sorted(list(ranks) for ranks in groups)
    assert {name: sorted(groups) for name, groups in entry["groups"].items()} == ours


def _group_axes(environment: Environment, framework: str) -> dict[str, tuple[str, ...]]:
    """Our axes of the groups that a check script names; AxoNN has none for its stages, which MPI joins."""
    if environment.name == "torchtitan-toml":
        return {
            "tp": ("x",),
            "cp": ("context",),
            "fsdp": ("z", "context"),
            "dp_replicate": ("data",),
            "pp": ("pipeline",),
        }
    called = "axonn" if framework == "megatron-axonn" else framework
    names = {name.lower(): axis for axis, name in find_framework(called).names.items() if axis in ALL_AXES}
    return {name: (axis,) for name, axis in names.items() if name != "g_inter"}


@pytest.mark.parametrize("framework", ["megatron-core", "torchtitan", "fsdp", "deepspeed", "axonn", "megatron-axonn"])
def test_ten_configurations_use_every_axis(framework: str) -> None:
    """The table of each framework: ten or more, of several models and sizes, with each axis wider than 1 somewhere."""
    runs = [one.run for one in _today(ENVIRONMENT_OF[framework]).values() if one.kind == "case"]
    runs = [run for run in runs if run.framework.name == framework]
    assert len(runs) >= 10
    assert len({run.model.name for run in runs}) >= 3
    assert len({run.grid.world for run in runs}) >= 3
    axes = set(find_framework(framework).axes)
    for refused in find_framework(framework).refused:
        axes -= set(refused.axes) if len(refused.axes) == 1 else set()
    assert {axis for run in runs for axis in axes if run.size(axis) > 1} == axes


@pytest.mark.parametrize("refusal", [one for one in REFUSALS if one.ours], ids=str)
def test_what_the_framework_refuses_is_refused_here(refusal: Refusal, tmp_path: Path) -> None:
    """Asked for the same, the search or the command says why not; nothing is written."""
    script = tmp_path / "run.sh"
    finished = run_line(f"--framework {refusal.framework} --machine dgx-h100 {refusal.ours} -o {script}")
    assert finished.code in (2, 3)
    assert refusal.says in " ".join(finished.err.split())
    assert not script.exists()


FLAGS = json.loads((RECORDINGS / "flags.json").read_text(encoding="utf-8"))
"""Arguments of frameworks that are no packages, with the sources they were taken from: a switch, a type, or choices."""


@pytest.mark.parametrize("case", cases(*FLAGS), ids=str)
def test_arguments_of_a_framework_that_is_no_package_are_those_of_its_sources(case: Case) -> None:
    """Where no code can be run: every argument is in the table, a switch alone, a value of its type or choices."""
    command = command_of(case)
    if command.program != ("pretrain_gpt.py",):
        return
    table = FLAGS[case.framework]["arguments"]
    for argument in (one for section in command.sections for one in section.arguments):
        kind = table[argument.name]
        if kind == "switch":
            assert argument.value is None, argument
        elif isinstance(kind, list):
            assert argument.value in kind, argument
        else:
            {"int": int, "float": float, "str": str}[kind](str(argument.value))


@pytest.mark.parametrize("case", cases("megatron-axonn"), ids=str)
def test_megatron_axonn_is_told_what_was_asked(case: Case) -> None:
    """Its micro-batch is that of a tensor group, split over depth; its stages' chunks are counted in layers."""
    run, command = run_of(case), command_of(case)
    told = {one.name: one.value for section in command.sections for one in section.arguments}
    assert {axis: told[f"--{axis}-tensor-model-parallel-size"] for axis in ("row", "column", "depth")} == {
        "row": run.size("x"),
        "column": run.size("y"),
        "depth": run.size("z"),
    }
    assert told.get("--pipeline-model-parallel-size", 1) == run.size("pipeline")
    if run.chunks > 1:
        assert told["--num-layers-per-virtual-pipeline-stage"] == run.parts[0]
    assert told["--micro-batch-size"] == run.micro_batch * run.size("z")
    steps = run.workload.global_batch // (told["--micro-batch-size"] * run.size("data"))
    assert steps == run.accumulation
    kept = told.get("--num-layers-for-caching-weights-in-depth-tensor-parallel-all-gather", 0)
    assert kept == run.kept_layers * run.size("pipeline")
    assert told.get("--recompute-granularity", "none") == run.recompute


def _layers(run: Run) -> list[list[int]]:
    """Layers of each chunk of each stage."""
    stages = run.size("pipeline")
    return [list(run.parts[stage::stages]) for stage in range(stages)]


def _megatron_core(one: Asked) -> dict[str, Any]:
    run = one.run
    model, staged, order = run.model, run.size("pipeline") > 1, run.grid.order
    stages_inside = staged and order.index("pipeline") < order.index("data")
    expert_shards = run.size("z") if stages_inside else 1
    return {
        "world": run.grid.world,
        "tp": run.size("x"),
        "weight_shards": run.size("x") * run.size("z"),
        "gtp": run.size("z"),
        "expert_gtp": expert_shards,
        "pp": run.size("pipeline"),
        "vpp": run.chunks if run.chunks > 1 else None,
        "cp": run.size("context"),
        "dp": run.size("data"),
        "order": "tp-cp-ep-pp-dp" if stages_inside else "tp-cp-ep-dp-pp",
        "optimizer_instances": 1,
        "sequence_parallel": run.size("x") > 1,
        "cp_comm_type": "p2p",
        "micro_batch": run.micro_batch,
        "global_batch": run.workload.global_batch,
        "micro_batches": run.accumulation,
        "recompute": None if run.recompute == "none" else run.recompute,
        "recompute_method": "uniform" if run.recompute == "full" else None,
        "recompute_layers": 1 if run.recompute == "full" else None,
        "recompute_modules": ["core_attn"],
        "dtype": "bfloat16",
        "fp32_gradients": True,
        "distributed_optimizer": True,
        "overlap_gradients": True,
        "overlap_parameters": True,
        "overlap_tensor": False,
        "overlap_p2p": run.chunks > 1,
        "blocks": model.layers,
        "hidden": model.hidden,
        "ffn": model.ffn,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "sequence": run.workload.sequence_length,
        "padded_vocab": table_rows(model, run.size("x"), 1, options=run.step, arithmetic=PLAIN),
        "gated": model.gated,
        "normalization": "RMSNorm" if model.gated else "LayerNorm",
        "positions": "learned_absolute" if model.learned_positions else "rope",
        "biases": model.biases,
        "tied": model.tied_embeddings,
        "dropout": [0.0, 0.0],
        "layers": _layers(run),
    }


def _torchtitan(one: Asked) -> dict[str, Any]:
    run = one.run
    model, staged = run.model, run.size("pipeline") > 1
    schedule = "Interleaved1F1B" if run.chunks > 1 else "1F1B"
    return {
        "world": run.grid.world,
        "tp": run.size("x"),
        "cp": run.size("context"),
        "dp_shard": run.size("z"),
        "dp_replicate": run.size("data"),
        "pp": run.size("pipeline"),
        "spmd_backend": "spmd_types",
        "sequence_parallel": True,
        "schedule": schedule if staged else None,
        "global_batch": run.workload.global_batch,
        "micro_batch": run.micro_batch,
        "accumulated": 1 if staged else run.accumulation,
        "micro_batches": run.accumulation,
        "sequence": run.workload.sequence_length,
        "recompute": {"none": None, "selective": "SelectiveAC", "full": "FullAC"}[run.recompute],
        "reshard": "never" if run.kept_layers else "always",
        "compile": run.framework.name == "torchtitan",
        "dtype": "bfloat16",
        "reduced": "float32",
        "cuda_graphs": False,
        "blocks": model.layers,
        "hidden": model.hidden,
        "ffn": model.ffn,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "vocab": model.vocab,
        "parameters": model.parameters,
        "layers": _layers(run),
    }


def _torchtitan_toml(one: Asked) -> dict[str, Any]:
    """What 0.2.2 is told by the same names, without what it does not have."""
    newer = _torchtitan(one)
    left_out = {"spmd_backend", "sequence_parallel", "cuda_graphs", "hidden", "ffn", "heads", "kv_heads", "vocab"}
    return {name: value for name, value in newer.items() if name not in left_out} | {"recompute": one.run.recompute}


def _accelerate(one: Asked) -> dict[str, Any]:
    run, layers = one.run, one.run.model.layers
    nodes = -(-run.grid.world // run.machine.launcher.ranks_per_node)
    block = {"llama": "LlamaDecoderLayer", "gpt": "GPT2Block"}[run.model.family]
    return {
        "world": run.grid.world,
        "shard": run.size("z"),
        "replicate": run.size("data"),
        "units": layers,
        "resharded": layers - run.kept_layers,
        "first_kept": layers - run.kept_layers if run.kept_layers else None,
        "recompute": layers if run.recompute == "full" else 0,
        "gathered": "bfloat16",
        "reduced": "bfloat16",
        "stored": "float32",
        **({"machines": nodes, "block": block} if one.starter[0] == "accelerate" else {}),
    }


def _deepspeed(one: Asked) -> dict[str, Any]:
    run, sharded = one.run, one.run.size("z") > 1
    # It gives one more to its first stages, where ours has them in the middle.
    layers = sorted(_layers(run), reverse=True)
    return {
        "world": run.grid.world,
        "tp": run.size("x"),
        "pp": run.size("pipeline"),
        "layers": layers,
        "dp": run.size("z") * run.size("data"),
        "stage": 3 if sharded else 1,
        "global_batch": run.workload.global_batch,
        "micro_batch": run.micro_batch,
        "micro_batches": run.accumulation,
        "bf16": True,
        "fp16": False,
        "communicated": "bfloat16",
        "accumulated": "bf16",
        "overlap": run.size("pipeline") == 1,
        "contiguous": True,
        "reduced_elements": 500_000_000,
        "prefetched_elements": 50_000_000,
        "live_parameters": 1_000_000_000,
        "reuse_distance": 0 if sharded else 1_000_000_000,
    }


def _axonn(one: Asked) -> dict[str, Any]:
    run = one.run
    degrees = {
        "world": run.grid.world,
        "G_inter": run.size("pipeline"),
        "G_intra_r": run.size("x"),
        "G_intra_c": run.size("y"),
        "G_intra_d": run.size("z"),
        "G_data": run.size("data"),
    }
    if run.framework.name == "megatron-axonn":
        return degrees
    weight = 64 * 256
    return degrees | {
        "global_batch": run.workload.global_batch,
        "micro_batch": run.micro_batch,
        "micro_batches": run.accumulation,
        "samples": run.micro_batch * run.accumulation,
        "shards": [weight // run.size("z")] * 2,
        "dtype": "float32",
    }


EXPECTED: dict[str, Callable[[Asked], dict[str, Any]]] = {
    "megatron-core": _megatron_core,
    "torchtitan": _torchtitan,
    "torchtitan-toml": _torchtitan_toml,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "axonn": _axonn,
}
"""Sizes that an environment's check script has to find, by its name."""
