"""Commands against what frameworks' own code said of them: `make frameworks` records it, nothing of it is needed here."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from axonn_tune.errors import UsageError
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.command import Run
from axonn_tune.grid import ALL_AXES
from axonn_tune.program.dimensions import table_rows
from axonn_tune.program.size import PLAIN
from tests.cli.running import run as run_line
from tests.unit.frameworks.recorded import REFUSALS, Asked, Refusal, asked, recording
from tools.frameworks.environments import ENVIRONMENTS, Environment
from tools.frameworks.record import script_hashes

RECORDED = [name for one in ENVIRONMENTS for name in one.frameworks]
ENVIRONMENT_OF = {name: one for one in ENVIRONMENTS for name in one.frameworks}
AGAIN = "run `make frameworks`, and look at what it changes in tests/fixtures/frameworks"


def _every(*kinds: str) -> list[Asked]:
    return [one for name in RECORDED for one in asked(name) if one.kind in kinds]


@cache
def _entries(environment: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {(one["framework"], one["kind"], one["id"]): one for one in recording(environment)["entries"]}


def _entry(one: Asked) -> dict[str, Any]:
    """What was recorded of a question."""
    found = _entries(ENVIRONMENT_OF[one.framework].name).get((one.framework, one.kind, one.id))
    assert found is not None, f"{one.key} is not recorded: {AGAIN}"
    return found


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda one: one.name)
def test_a_recording_is_of_todays_questions(environment: Environment) -> None:
    """Nothing recorded is left over, and today's check script recorded it, in the releases that are named."""
    found = recording(environment.name)
    wanted = {one.key for name in environment.frameworks for one in asked(name)}
    assert {" ".join((one["framework"], one["kind"], one["id"])) for one in found["entries"]} == wanted, AGAIN
    assert found["scripts"] == script_hashes(environment), f"another check script recorded this: {AGAIN}"
    pinned = {f"{name}=={version.partition('+')[0]}" for name, version in found["packages"].items()}
    assert pinned <= {*environment.packages, *environment.before}


@pytest.mark.parametrize("one", _every("case", "layout", "refusal"), ids=lambda one: one.key)
def test_todays_command_is_the_recorded_one(one: Asked) -> None:
    """A changed command has to be shown to the framework again."""
    found = _entry(one)
    assert {name: found[name] for name in one.recorded} == one.recorded, AGAIN
    assert found["accepted"] == one.accepted


@pytest.mark.parametrize("one", _every("case", "layout"), ids=lambda one: one.key)
def test_the_framework_reads_what_was_asked(one: Asked) -> None:
    """World, degrees, batches, layers of each stage and chunk, recompute, precision, model: as in the configuration."""
    assert _entry(one)["sizes"] == EXPECTED[ENVIRONMENT_OF[one.framework].name](one.run)


@pytest.mark.parametrize("one", _every("case", "layout"), ids=lambda one: one.key)
def test_rank_groups_are_those_of_our_grid(one: Asked) -> None:
    """In every rank order that the framework has: all groups of a small world, those of one rank in a large one."""
    grid, names, found = one.run.grid, find_framework(one.framework).names, _entry(one)["groups"]
    wide = {axis: names[axis].lower() for axis in ALL_AXES if grid.axis_size(axis) > 1}
    ours = {
        name: [list(ranks) for ranks in (grid.groups(axis) if one.kind == "layout" else [grid.members(grid.world // 3, axis)])]
        for axis, name in wide.items()
    }
    assert found == {name: sorted(groups) for name, groups in ours.items()}


@pytest.mark.parametrize("refusal", [one for one in REFUSALS if one.ours], ids=str)
def test_what_the_framework_refuses_is_refused_here(refusal: Refusal, tmp_path: Path) -> None:
    """Asked for the same, the search or the command says why not; nothing is written."""
    script = tmp_path / "run.sh"
    finished = run_line(f"--framework {refusal.framework} --machine dgx-h100 {refusal.ours} -o {script}")
    assert finished.code in (2, 3)
    assert refusal.says in " ".join(finished.err.split())
    assert not script.exists()


def _layers(run: Run) -> list[list[int]]:
    """Layers of each chunk of each stage."""
    stages = run.size("pipeline")
    return [list(run.parts[stage::stages]) for stage in range(stages)]


def _megatron_core(run: Run) -> dict[str, Any]:
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


def _torchtitan(run: Run) -> dict[str, Any]:
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
        "compile": run.framework == "torchtitan",
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


EXPECTED: dict[str, Callable[[Run], dict[str, Any]]] = {
    "megatron-core": _megatron_core,
    "torchtitan": _torchtitan,
}
"""Sizes that an environment's check script has to find, by its name."""
