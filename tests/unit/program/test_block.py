"""Passes of a block, derived from its nodes: their order, what is repeated, and how long arrays live."""

from __future__ import annotations

from itertools import groupby

import pytest

from axonn_tune.frameworks import find_framework, registry
from axonn_tune.frameworks.step import OFFLOAD_MODULES
from axonn_tune.program.block import block_nodes, check_arrays
from axonn_tune.program.memory import saved_arrays
from axonn_tune.program.operations import Array, Kernel, Operation, Size
from axonn_tune.program.step import Block, build_step
from axonn_tune.recompute import MODULES
from axonn_tune.specs.workload import Workload
from tests.unit.program.test_mixtures import TYPES, mixture

WORKLOAD = Workload(global_batch=8, sequence_length=512)


def block_of(name: str, recompute: str = "none", framework: str = "megatron-core") -> Block:
    """The block of one layer type, in a model that has others."""
    found = find_framework(framework)
    return build_step(
        mixture(tuple(dict.fromkeys((name, "plain")))), WORKLOAD, recompute=recompute, options=found.step
    ).blocks[0]


def layers_of(operations: tuple[Operation, ...], *phases: str) -> str:
    """Layers in the order of their GEMMs and kernels, each run of one once."""
    steps = (one.layer for one in operations if one.phase in phases and not hasattr(one, "axis"))
    return " ".join(name for name, _ in groupby(name.rpartition(".")[2] for name in steps))


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("plain", "norm qkv core output norm fc1 activation fc2", "fc2 activation fc1 norm output core qkv norm"),
        ("bare", "norm qkv core output", "output core qkv norm"),
        ("ffn", "norm fc1 activation fc2", "fc2 activation fc1 norm"),
        (
            "latent",
            "norm q_down kv_down q_up kv_up core output norm fc1 activation fc2",
            "fc2 activation fc1 norm output core kv_up kv_down q_up q_down q_up norm",
        ),
        (
            "moe",
            "norm qkv core output norm router shared_fc1 shared_activation shared_fc2 dispatch fc1 activation fc2 "
            "combine fc2",
            "combine fc2 activation fc1 dispatch shared_fc2 shared_activation shared_fc1 router norm output core qkv "
            "norm",
        ),
        (
            "mamba",
            "norm in conv scan out norm fc1 activation fc2",
            "fc2 activation fc1 norm out scan conv scan conv in norm",
        ),
        (
            "delta",
            "norm in conv scan gated out norm fc1 activation fc2",
            "fc2 activation fc1 norm out gated scan conv in norm",
        ),
        (
            "kda",
            "norm down in up conv scan gated out norm fc1 activation fc2",
            "fc2 activation fc1 norm out gated scan conv up down in norm",
        ),
        (
            "lightning",
            "norm in scan gated out norm fc1 activation fc2",
            "fc2 activation fc1 norm out gated scan in norm",
        ),
        ("conv", "norm in conv out norm fc1 activation fc2", "fc2 activation fc1 norm out conv in norm"),
        (
            "indexed",
            "norm q_down kv_down q_up kv_up indexer core output norm fc1 activation fc2",
            "fc2 activation fc1 norm output core indexer kv_up kv_down q_up q_down q_up norm",
        ),
        (
            "behind",
            "norm qkv core output post_norm output norm fc1 activation fc2 post_norm fc2",
            "post_norm fc2 activation fc1 norm post_norm output core qkv norm",
        ),
        (
            "folded",
            "norm q_down q_up kv core indexer core groups out hyper out norm fc1 activation fc2 hyper fc2",
            "hyper fc2 activation fc1 norm hyper out groups indexer core kv q_up q_down norm",
        ),
        (
            "gated",
            "norm qkv core gate output norm router shared_fc1 shared_activation shared_fc2 dispatch fc1 activation fc2 "
            "combine fc2",
            "combine fc2 activation fc1 dispatch shared_fc2 shared_activation shared_fc1 router norm output gate core "
            "qkv norm",
        ),
    ],
)
def test_backward_goes_through_a_block_in_reverse(name: str, forward: str, backward: str) -> None:
    """Guards both rules on each layer type; branches to latents go abreast forward, one after another backward."""
    block = block_of(name)
    assert layers_of(block.forward.operations, "forward") == forward
    assert layers_of(block.backward.operations, "backward") == backward


@pytest.mark.parametrize(
    ("framework", "name", "recompute", "repeated"),
    [
        ("megatron-core", "plain", "mlp", "fc1 activation fc2"),
        ("axonn-tune", "plain", "layernorm,mlp", "norm fc1 activation norm"),
        ("axonn-tune", "plain", "full", "norm qkv core output norm fc1 activation fc2"),
        ("megatron-core", "plain", "full", "norm qkv core output norm fc1 activation fc2"),
        ("megatron-core", "moe", "layernorm,moe_act", "activation norm"),
        ("megatron-core", "moe", "shared_experts", "shared_fc1 shared_activation shared_fc2"),
        ("megatron-core", "latent", "mla_up_proj", "q_up kv_up"),
        ("megatron-core", "delta", "gdn_norm_out", "gated"),
        ("megatron-core", "folded", "mhc,mla_up_proj", "norm q_up norm"),
    ],
)
def test_a_set_repeats_the_nodes_that_a_block_has(framework: str, name: str, recompute: str, repeated: str) -> None:
    """Guards recompute: of a set the nodes that are there, each before the first gradient that needs it."""
    assert layers_of(block_of(name, recompute, framework).backward.operations, "recompute") == repeated


def test_arrays_live_from_one_node_to_the_last_that_needs_them() -> None:
    """Guards lifetimes of each layer type under each module: building fails where an array is lost or freed twice."""
    for name in TYPES:
        for recompute in ("none", "full", *MODULES, ",".join(MODULES)):
            for framework in ("megatron-core", "axonn-tune", "torchtitan", "deepspeed-2021"):
                block_of(name, recompute, framework)


def test_a_lost_array_is_an_error() -> None:
    """Guards the check itself: an array that is freed and was never made, freed twice, or never freed."""
    made = Kernel("forward", "norm", Size(1.0), makes=(Array("output", "norm outputs", Size(1.0)),))
    freed = Kernel("backward", "norm", Size(1.0), frees=("output",))
    check_arrays([made], [freed])
    for forward, backward, said in (
        ([made], [], "never freed: output"),
        ([], [freed], "norm frees output, which is not there"),
        ([made], [freed, freed], "norm frees output, which is not there"),
    ):
        with pytest.raises(AssertionError, match=said):
            check_arrays(forward, backward)


def test_modules_that_are_offloaded_have_inputs() -> None:
    """Guards names of arrays in that table against a node that calls its own otherwise."""
    blocks = (block_of("plain"), block_of("moe"))
    saved = {array.name for block in blocks for array in saved_arrays(block)}
    assert {name for several in OFFLOAD_MODULES.values() for name in several} <= saved


def test_recompute_names_nodes_that_there_are() -> None:
    """Guards tables of modules and of frameworks against a layer that no node goes by."""
    given = (block_nodes(block_of(name).given) for name in TYPES)
    known = {name for nodes in given for node in nodes.forward for name in (*node.alone, *node.modules)}
    assert {*MODULES, *(layer for one in registry().values() for layer in one.step.selective)} <= known


def test_a_checkpoint_of_a_block_repeats_all_at_once() -> None:
    """Guards torchtitan's selective recompute, whose outputs are all there at the first gradient, and others, which
    repeat each module before the gradient that needs it."""
    for name, first in (("torchtitan", 5), ("megatron-core", 0)):
        steps = block_of("plain", "selective", name).backward.operations
        again = [number for number, step in enumerate(steps) if step.phase == "recompute"]
        gradients = [number for number, step in enumerate(steps) if step.phase == "backward" and hasattr(step, "m")]
        assert sum(number < gradients[0] for number in again) >= first
        assert (again[-1] < gradients[0]) == bool(first)
