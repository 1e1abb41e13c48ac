"""Where norms of a block are: order of its nodes, elements, saved arrays and sums over heads, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from axonn_tune.cost.price import Detail, price
from axonn_tune.frameworks import find_framework
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.program.block import block_nodes
from axonn_tune.program.count import ELEMENT_SIZES, counted
from axonn_tune.program.inputs import LayerInputs
from axonn_tune.program.memory import saved_arrays
from axonn_tune.program.operations import Collective, Kernel
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload
from tests.unit.small import small_model

HIDDEN, LENGTH = 512, 1024
EXPERTS = {"count": 4, "per_token": 2, "width": 256, "shared_width": 256}


def model_of(norms: str, **own: Any) -> Model:
    """Four layers of 8 query heads of 64 and 2 of keys and values."""
    sizes = {"hidden": HIDDEN, "heads": 8, "kv_heads": 2, "head_dim": 64, "ffn": 1024, "max_sequence_length": LENGTH}
    return small_model(family="llama", norms=norms, layers="a*4", layer_types={"a": own}, **sizes)


def priced(model: Model, *, x: int = 1, recompute: str = "none", precision: str = "bf16") -> Detail:
    """As Megatron-Core runs it on four GPUs."""
    workload = Workload(global_batch=8, sequence_length=LENGTH, precision=precision)
    job = Job(model, load_machine("dgx-h100").document, workload, find_framework("megatron-core"))
    grid = Grid(x=x, data=4 // x, order=("x", "z", "context", "data", "pipeline"))
    return price(job, Layout(grid, 1, recompute, 0))


@pytest.mark.parametrize(
    ("norms", "names"),
    [
        ("pre", ["norm", "output", "output", "norm", "fc2", "fc2"]),
        ("post", ["norm", "output", "post_norm", "output", "norm", "fc2", "post_norm", "fc2"]),
        ("both", ["norm", "output", "post_norm", "output", "norm", "fc2", "post_norm", "fc2"]),
        ("parallel", ["norm", "output", "output", "fc2", "fc2"]),
    ],
)
def test_nodes_in_order_and_their_elements(norms: str, names: list[str]) -> None:
    """Guards what is normed, and that a stream that is read as it is has no weight."""
    model = model_of(norms)
    nodes = block_nodes(LayerInputs(model, ELEMENT_SIZES["bf16"], layer=model.types[0])).forward
    left_out = ("qkv", "core", "fc1", "activation")
    assert [name for node in nodes if (name := node.layer.partition(".")[2]) not in left_out] == names
    assert counted(model)[0].vectors_of(0) == {"both": 4, "parallel": 1}.get(norms, 2) * HIDDEN


def test_norms_of_queries_and_keys_have_a_weight_of_each_head_or_of_all() -> None:
    """Guards their elements: OLMo's are as wide as all heads, and x splits them."""
    each, every = (counted(model_of("post", qk_norms=one))[0].vectors for one in (True, "all_heads"))
    assert (each.whole, each.over_x) == (2 * 64, 0)
    assert (every.whole, every.over_x) == (0, (8 + 2) * 64)


def test_norms_over_all_heads_sum_over_tensor_ranks() -> None:
    """Guards an all-reduce of a number a token of queries and of keys, in both passes."""
    for norms, count in ((True, 0), ("all_heads", 1)):
        block = priced(model_of("pre", qk_norms=norms), x=2).program.blocks[0]
        for steps in (block.forward.operations, block.backward.operations):
            sums = [one for one in steps if isinstance(one, Collective) and one.layer == "attention.core"]
            assert [one.kind for one in sums if one.axis == "x"] == ["all_reduce"] * count


@pytest.mark.parametrize("experts", [False, True])
def test_saved_arrays(experts: bool) -> None:
    """Guards that norms behind save their inputs instead of those before, and norms around both."""
    saved = {}
    for norms in ("pre", "post", "both"):
        found = priced(model_of(norms, **({"experts": EXPERTS} if experts else {})))
        arrays = saved_arrays(found.program.blocks[0])
        saved[norms] = dict.fromkeys(("residual stream", "norm outputs", "branch outputs"), 0.0)
        for one in arrays:
            if one.kind in saved[norms]:
                saved[norms][one.kind] += float(one.size_bytes.evaluate(found.values)) / (2 * HIDDEN * LENGTH)
    assert [tuple(saved[norms].values()) for norms in saved] == [(2, 2, 0), (2, 0, 2), (2, 2, 2)]


@pytest.mark.parametrize("predicted", [0, 1])
def test_attention_and_mlp_in_parallel_share_a_norm(predicted: int) -> None:
    """Guards parallel branches: the stream and its norm are saved once, whose gradient is a sum of two, and what takes
    no MLP beside attention is refused."""
    found = priced(model_of("parallel").model_copy(update={"mtp_layers": predicted}))
    block = found.program.blocks[0]
    saved = [one.name for one in saved_arrays(block) if one.kind in ("residual stream", "norm outputs")]
    assert saved == ["block input", "attention.norm output"]
    freed = [one.frees for one in block.backward.operations if isinstance(one, Kernel)]
    assert sum(any("norm gradient by" in name for name in names) for names in freed) == 1
    assert found.iteration_s < priced(model_of("pre").model_copy(update={"mtp_layers": predicted})).iteration_s
    with pytest.raises(ValueError, match="norms parallel are of attention without latents beside an MLP"):
        model_of("parallel", mlp=False)


@pytest.mark.parametrize("norms", ["post", "both", "parallel"])
@pytest.mark.parametrize("recompute", ["layernorm", "core_attn", "mlp_act", "moe", "full"])
@pytest.mark.parametrize("precision", ["bf16", "fp8-current"])
def test_every_recompute_set_keeps_its_arrays(norms: str, recompute: str, precision: str) -> None:
    """Guards lifetimes, which a step is checked for where it is built; full recompute saves only inputs of blocks."""
    routed = recompute == "moe" and norms != "parallel"
    model, recompute = (
        model_of(norms, **({"experts": EXPERTS} if routed else {})),
        recompute if routed or recompute != "moe" else "mlp",
    )
    found = priced(model, recompute=recompute, precision=precision)
    arrays = saved_arrays(found.program.blocks[0])
    assert recompute != "full" or [one.name for one in arrays] == ["block input"]
    assert found.iteration_s > 0.0
