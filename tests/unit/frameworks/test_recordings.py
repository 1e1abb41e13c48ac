"""Commands against what frameworks' own code said of them, which `make frameworks` records; none is needed here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.description import Run
from axonn_tune.grid import EXPERT_GROUPS, RANK_AXES, GroupShape
from axonn_tune.program.count import parameters
from axonn_tune.program.dimensions import table_rows
from axonn_tune.program.operations import PLAIN
from axonn_tune.recompute import modules_of
from tests.cli.running import run as run_line
from tests.unit.frameworks.asked import (
    RECORDINGS,
    Asked,
    Case,
    Refusal,
    asked,
    cases,
    launched,
    recording,
    refusals,
    run_of,
)
from tools.frameworks.environments import ENVIRONMENTS, Environment
from tools.frameworks.record import script_hashes

CP_COMM_TYPES = {"ring": "p2p", "all_gather": "all_gather", "all_to_all": "a2a", "hierarchical": "a2a+p2p"}
"""Megatron-Core's words for exchanges of context parallelism."""

AGAIN = "run `make frameworks`, and look at what it changes in tests/fixtures/frameworks"
Entry: TypeAlias = dict[str, Any]


def _each(*kinds: str) -> pytest.MarkDecorator:
    """Everything recorded of some kinds, with the environment that said it."""
    found = [
        (environment, entry)
        for environment in ENVIRONMENTS
        for entry in recording(environment.name)["entries"]
        if entry["kind"] in kinds
    ]
    return pytest.mark.parametrize(("environment", "entry"), found, ids=[_key(entry) for _, entry in found])


def _key(entry: Entry) -> str:
    return f"{entry['framework']} {entry['kind']} {entry['id']}"


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


_BASES = "rotary-base|rotary-position-embeddings-theta|norm-epsilon|layernorm-epsilon"
FREE = re.compile(rf"(?: --(?:train-iters|training\.steps|{_BASES}) |\nsteps = |, eps=)[\d.e+-]+")
"""Arguments of which every positive number is accepted, and nothing recorded depends on it."""


def _without_free(entry: Entry) -> Entry:
    """A question without the values of those."""
    files = {name: FREE.sub("", text) for name, text in entry["files"].items()}
    return {**entry, "words": FREE.sub("", entry["words"]), "files": files}


@_each("case", "layout", "refusal")
def test_todays_command_is_the_recorded_one(environment: Environment, entry: Entry) -> None:
    """A changed command has to be shown to the framework again; what it said of this one is as it must be."""
    one = _today(environment)[_key(entry)]
    recorded = {name: entry[name] for name in one.recorded}
    assert _without_free(recorded) == _without_free(one.recorded), AGAIN
    assert one.as_expected(entry)


@_each("case", "layout")
def test_the_framework_reads_what_was_asked(environment: Environment, entry: Entry) -> None:
    """World, degrees, batches, layers of each stage and chunk, recompute, precision, model: as in the configuration."""
    expected = EXPECTED[environment.name](_today(environment)[_key(entry)].run)
    without = () if entry["starter"].startswith("accelerate") else ("machines", "block", "engine")
    assert entry["sizes"] == {name: value for name, value in expected.items() if name not in without}


@_each("case", "layout")
def test_rank_groups_are_those_of_our_grid(environment: Environment, entry: Entry) -> None:
    """In every rank order that the framework has: all groups of a small world, those of one rank in a large one."""
    run = _today(environment)[_key(entry)].run
    grid, ours = run.grid, dict[str, list[list[int]]]()
    assert grid.world == entry["world"]
    starts = range(grid.world) if entry["kind"] == "layout" else [grid.world // 3]
    # torchtitan has no groups of experts without expert parallelism.
    grouped = run.model.has_experts and not (run.framework.tensor_without_expert and run.size("expert") == 1)
    for name, axis in run.framework.names.items() if grouped else ():
        if name in EXPERT_GROUPS:
            shape = grid.group_shape(name, run.step.folding)
            if shape.size > 1:
                ours[axis.lower()] = sorted(map(list, {_members(shape, rank) for rank in starts}))
    for name, axes in _group_axes(environment, entry["framework"]).items():
        if prod(grid.axis_size(axis) for axis in axes) > 1:
            over = "".join(axes)
            groups = grid.groups(over) if entry["kind"] == "layout" else [grid.members(grid.world // 3, over)]
            ours[name] = sorted(list(ranks) for ranks in groups)
    assert {name: sorted(groups) for name, groups in entry["groups"].items()} == ours


def _members(shape: GroupShape, rank: int) -> tuple[int, ...]:
    """The group of a rank: all that differ from it in the levels of a shape alone."""
    found = [rank - sum(rank // stride % size * stride for size, stride in shape.levels)]
    for size, stride in shape.levels:
        found = [start + place * stride for start in found for place in range(size)]
    return tuple(sorted(found))


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
    names = {name.lower(): axis for axis, name in find_framework(called).names.items() if axis in RANK_AXES}
    return {name: (axis,) for name, axis in names.items() if name != "g_inter"}


@pytest.mark.parametrize("framework", sorted({case.framework for case in cases()} - {"torchtitan-eager"}))
def test_ten_configurations_use_every_axis(framework: str) -> None:
    """The cases of each framework: ten or more, with each axis that it does not refuse wider than 1 somewhere."""
    runs, described = [run_of(case) for case in cases(framework)], find_framework(framework)
    assert len(runs) >= 10
    never = {axis for refused in described.refused if len(refused.axes) == 1 for axis in refused.axes}
    assert {axis for run in runs for axis in described.axes if run.size(axis) > 1} == {*described.axes} - never


@pytest.mark.parametrize("refusal", [one for one in refusals() if one.ours], ids=str)
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
    command = launched(run_of(case))
    sections = command.sections if command.program == ("pretrain_gpt.py",) else ()
    for argument in (one for section in sections for one in section.arguments):
        kind = FLAGS[case.framework]["arguments"][argument.name]
        if kind == "switch":
            assert argument.value is None, argument
        elif isinstance(kind, list):
            assert argument.value in kind, argument
        else:
            {"int": int, "float": float, "str": str}[kind](str(argument.value))


def _sizes(run: Run) -> dict[str, Any]:
    """What most check scripts find, by the names that they use."""
    model, stages = run.model, run.size("pipeline")
    return {
        "world": run.grid.world,
        "tp": run.size("x"),
        "cp": run.size("context"),
        "pp": stages,
        "dp_shard": run.size("z"),
        "dp_replicate": run.size("data"),
        "global_batch": run.workload.global_batch,
        "micro_batch": run.micro_batch,
        "micro_batches": run.accumulation,
        "sequence": run.workload.sequence_length,
        "blocks": model.layers,
        "hidden": model.hidden,
        "ffn": model.ffn,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab": model.vocab,
        "parameters": parameters(model),
        "dtype": "bfloat16",
        "layers": [list(run.parts[stage::stages]) for stage in range(stages)],
    }


def _of(run: Run, names: str) -> dict[str, Any]:
    return {name: _sizes(run)[name] for name in names.split()}


def _megatron_core(run: Run) -> dict[str, Any]:
    model, order, full = run.model, run.grid.order, run.recompute == "full"
    stages_inside = run.size("pipeline") > 1 and order.index("pipeline") < order.index("data")
    hierarchy = run.step.context_exchange == "hierarchical"
    unrotated = all(one.rotary_share == 0 for one in model.types if one.attention)
    # Latent attention has heads of its own, so that --kv-channels is left to its default.
    head_dim = {"head_dim": model.hidden // model.heads} if any(one.latent for one in model.types) else {}
    shared = "world tp pp cp micro_batch global_batch micro_batches dtype blocks hidden ffn heads kv_heads head_dim"
    return {
        **_of(run, f"{shared} sequence layers"),
        **head_dim,
        "weight_shards": run.size("x") * run.size("z"),
        "gtp": run.size("z"),
        "expert_gtp": run.size("z") if stages_inside else run.size("expert_z"),
        "vpp": run.chunks if run.chunks > 1 else None,
        "dp": run.size("data"),
        **{"ep": run.size("expert"), "etp": run.size("expert_tensor") if model.has_experts else run.size("x")},
        **_beyond_dense(run),
        "order": "tp-cp-ep-pp-dp" if stages_inside else "tp-cp-ep-dp-pp",
        "optimizer_instances": 1,
        "sequence_parallel": run.size("x") > 1,
        "cp_comm_type": CP_COMM_TYPES[run.step.context_exchange],
        "hierarchy": [run.step.context_inside, run.size("context") // run.step.context_inside] if hierarchy else None,
        "recompute": {"none": None, "full": "full"}.get(run.recompute, "selective"),
        "recompute_method": ("block" if run.recompute_layers else "uniform") if full else None,
        "recompute_layers": (run.recompute_layers or 1) if full else None,
        "recompute_modules": [*modules_of(run.recompute)] or ["core_attn"],
        **dict.fromkeys(("fp32_gradients", "distributed_optimizer", "overlap_gradients", "overlap_parameters"), True),
        "overlap_tensor": False,
        "overlap_p2p": run.chunks > 1,
        "padded_vocab": table_rows(model, run.size("x"), 1, options=run.step, arithmetic=PLAIN),
        "gated": next(one.gated for one in model.types if one.ffn or one.experts),
        "normalization": "RMSNorm" if model.gated else "LayerNorm",
        "positions": "learned_absolute" if model.learned_positions else "none" if unrotated else "rope",
        "biases": model.biases,
        "tied": model.tied_embeddings,
        "dropout": [0.0, 0.0],
    }


def _beyond_dense(run: Run) -> dict[str, Any]:
    """Experts, dispatcher, format, clamp, window, sinks, latents and MTP of all layers together."""
    experts = next((one.experts for one in run.model.types if one.experts is not None), None)
    latent = next((one.latent for one in run.model.types if one.latent is not None), None)
    narrow = {
        **{"fp8-delayed": "hybrid delayed", "fp8-current": "hybrid tensorwise", "fp8-blockwise": "e4m3 blockwise"},
        **{"mxfp8": "e4m3 mxfp8", "nvfp4": "e2m1"},
    }
    ranks = latent and [latent.query_rank, latent.kv_rank, latent.nope_dim, latent.rope_dim, latent.value_dim]
    routed = experts and [experts.count, experts.per_token, experts.width, experts.shared_width or None]
    return {
        "experts": routed,
        "dispatcher": run.step.dispatcher.split("-")[0] if experts else "allgather",
        "format": narrow.get(run.workload.precision),
        "clamp": experts and experts.clamp,
        "window": next((one.window for one in run.model.types if one.window), None),
        "sinks": any(one.sinks for one in run.model.types),
        "latent": ranks,
        "mtp": run.model.mtp_layers or None,
    }


def _torchtitan(run: Run) -> dict[str, Any]:
    experts = next((one.experts for one in run.model.types if one.experts is not None), None)
    first = run.model.types[run.model.runs[0][0]]
    beyond = {
        "ep": run.size("expert"),
        "ffn": first.ffn or None,
        "experts": experts and [experts.count, experts.per_token, "AllToAllTokenDispatcher"],
    }
    staged = run.size("pipeline") > 1
    shared = "world tp cp dp_shard dp_replicate pp global_batch micro_batch micro_batches sequence blocks hidden ffn"
    return {
        **_of(run, f"{shared} heads kv_heads vocab parameters dtype layers"),
        "spmd_backend": "spmd_types",
        "sequence_parallel": True,
        "schedule": ("Interleaved1F1B" if run.chunks > 1 else "1F1B") if staged else None,
        "accumulated": 1 if staged else run.accumulation,
        "recompute": {"none": None, "selective": "SelectiveAC", "full": "FullAC"}[run.recompute],
        "reshard": "never" if run.kept_layers else "always",
        "compile": run.framework.name == "torchtitan",
        "reduced": "float32",
        "cuda_graphs": False,
        **beyond,
    }


def _torchtitan_toml(run: Run) -> dict[str, Any]:
    """What 0.2.2 is told by the same names, without what it does not have."""
    left_out = {
        "ep",
        "experts",
        "spmd_backend",
        "sequence_parallel",
        "cuda_graphs",
        "hidden",
        "ffn",
        "heads",
        "kv_heads",
        "vocab",
    }
    found = {name: value for name, value in _torchtitan(run).items() if name not in left_out}
    return found | {"recompute": run.recompute}


def _accelerate(run: Run) -> dict[str, Any]:
    layers = run.model.layers
    machines = -(-run.grid.world // run.machine.launcher.ranks_per_node)
    block = {"llama": "LlamaDecoderLayer", "gpt": "GPT2Block"}[run.model.family]
    engine = {"fp8-delayed": "HYBRID", "mxfp8": "mxfp8"}.get(run.workload.precision)
    return {
        "world": run.grid.world,
        "shard": run.size("z"),
        "replicate": run.size("data"),
        "units": layers,
        "resharded": layers - run.kept_layers,
        "first_kept": layers - run.kept_layers if run.kept_layers else None,
        # With Transformer Engine one's own train.py checkpoints blocks.
        "recompute": (run.recompute_layers or layers) if run.recompute == "full" and not engine else 0,
        **{"gathered": "bfloat16", "reduced": "bfloat16", "stored": "float32"},
        **{"machines": machines, "block": block, "engine": engine},
    }


def _deepspeed(run: Run) -> dict[str, Any]:
    sharded = run.size("z") > 1
    return {
        **_of(run, "world tp pp global_batch micro_batch micro_batches"),
        # It gives one more to its first stages, where ours has them in the middle.
        "layers": sorted(_sizes(run)["layers"], reverse=True),
        "dp": run.size("z") * run.size("data"),
        "stage": 3 if sharded else 1,
        **{"bf16": True, "fp16": False, "communicated": "bfloat16", "accumulated": "bf16", "contiguous": True},
        "overlap": run.size("pipeline") == 1,
        "reduced_elements": 500_000_000,
        "prefetched_elements": 50_000_000,
        "live_parameters": 1_000_000_000,
        "reuse_distance": 0 if sharded else 1_000_000_000,
    }


def _axonn(run: Run) -> dict[str, Any]:
    axes = {"G_inter": "pipeline", "G_intra_r": "x", "G_intra_c": "y", "G_intra_d": "z", "G_data": "data"}
    degrees = {"world": run.grid.world, **{name: run.size(axis) for name, axis in axes.items()}}
    if run.framework.name == "megatron-axonn":
        return degrees
    return degrees | {
        **_of(run, "global_batch micro_batch micro_batches"),
        "samples": run.micro_batch * run.accumulation,
        "shards": [64 * 256 // run.size("z")] * 2,
        "dtype": "float32",
    }


EXPECTED: dict[str, Callable[[Run], dict[str, Any]]] = {
    "megatron-core": _megatron_core,
    "torchtitan": _torchtitan,
    "torchtitan-toml": _torchtitan_toml,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "axonn": _axonn,
}
"""Sizes that an environment's check script has to find, by its name."""
