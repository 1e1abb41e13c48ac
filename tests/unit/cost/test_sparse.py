"""DeepSeek sparse attention: FLOPs, bytes between ranks and saved arrays of one block, by hand."""

from __future__ import annotations

import pytest

from axonn_tune.cost.price import Detail, price
from axonn_tune.frameworks import find_framework
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.program.feasibility import broken_constraints
from axonn_tune.program.memory import saved_arrays
from axonn_tune.program.operations import Attention, Collective, MatMul, Measured
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload

ORDER = ("x", "z", "context", "data", "pipeline")
LENGTH, HIDDEN, HEADS, TOPK = 4096, 6144, 64, 2048
INDEX = 32 * 128
"""Width of the indexer's queries."""


def priced(*, x: int = 1, context: int = 1, shared: bool = False) -> Detail:
    """GLM-5's dense layers, of an indexer each or of one that is shared, as Megatron-Core runs them."""
    stored = load_model("glm-5").document.model_dump(by_alias=True)
    dense = stored["layer_types"]["dense"]
    dense["indexer"]["shared"] = shared
    fresh = {"layers": "dense*4", "pattern": None, "mtp_layers": 0, "layer_types": {"dense": dense}}
    model = Model.model_validate(stored | fresh)
    framework = find_framework("megatron-core").with_step(context_exchange="all_gather")
    grid = Grid(x=x, context=context, data=16 // (x * context), order=ORDER)
    job = Job(model, load_machine("dgx-b200").document, Workload(global_batch=16, sequence_length=LENGTH), framework)
    return price(job, Layout(grid, 1, "none", 0))


def cores(found: Detail, layer: str) -> list[float]:
    """FLOPs of attention of a layer, forward and backward."""
    block = found.program.blocks[0]
    steps = (*block.forward.operations, *block.backward.operations)
    return [
        float(one.flops.evaluate(found.values))
        for one in steps
        if isinstance(one, Attention | Measured) and one.layer == layer
    ]


@pytest.mark.parametrize(("x", "heads"), [(1, 64), (2, 64), (4, 64)])
def test_kernels_compute_whole_64_heads(x: int, heads: int) -> None:
    """Guards the absorbed core's FLOPs of chosen pairs, of which TP saves none below 64 heads a rank."""
    chosen = TOPK - TOPK * (TOPK - 1) / (2 * LENGTH)
    forward, backward = cores(priced(x=x), "attention.core")
    assert forward == pytest.approx(2 * LENGTH * heads * chosen * (576 + 512), rel=2e-3)
    assert backward / forward == (3 * 576 + 2 * 512) / (576 + 512)
    scores, probabilities, gradients = cores(priced(x=x), "attention.indexer")
    assert scores == 2 * LENGTH * LENGTH * INDEX
    assert probabilities == pytest.approx(2 * LENGTH * chosen * HEADS / x * 576, rel=2e-3)
    assert gradients == pytest.approx(4 * LENGTH * chosen * INDEX, rel=2e-3)


def test_the_indexer_is_duplicated_and_detached() -> None:
    """Guards its GEMMs on all tokens of each rank of x, without input gradients, and its gathers."""
    found = priced(x=2)
    block = found.program.blocks[0]
    sizes = {
        phase: [
            tuple(float(size.evaluate(found.values)) for size in (one.m, one.n, one.k))
            for one in steps
            if isinstance(one, MatMul) and one.layer == "attention.indexer"
        ]
        for phase, steps in (("forward", block.forward.operations), ("backward", block.backward.operations))
    }
    assert sizes["forward"] == [(LENGTH, INDEX, 2048), (LENGTH, 128 + 32, HIDDEN)]
    assert sizes["backward"] == [(2048, INDEX, LENGTH), (HIDDEN, 128 + 32, LENGTH)]
    sent = [
        (one.kind, float(one.size_bytes.evaluate(found.values)))
        for one in block.forward.operations
        if isinstance(one, Collective) and one.layer == "attention.indexer" and one.axis == "x"
    ]
    assert sent == [("all_gather", 2 * LENGTH * HIDDEN), ("all_gather", 2 * LENGTH * 2048)]


@pytest.mark.parametrize("shared", [False, True])
def test_saved_bytes_of_a_token(shared: bool) -> None:
    """Guards absorbed queries and outputs, the latent key, places of chosen tokens, and the indexer's own, if any."""
    found = priced(shared=shared)
    saved = {
        one.kind: sum(
            float(other.size_bytes.evaluate(found.values)) / LENGTH
            for other in saved_arrays(found.program.blocks[0])
            if other.kind == one.kind
        )
        for one in saved_arrays(found.program.blocks[0])
    }
    assert saved["qkv"] == 2 * HEADS * 576 + 2 * 576
    assert saved["attention output"] == 2 * HEADS * 512 + 2 * HEADS * 256
    assert saved["softmax statistics"] == 4 * HEADS
    assert saved["chosen tokens"] == 4 * TOPK
    assert saved.get("indexer", 0.0) == (0.0 if shared else 2 * (INDEX + 128 + 32))


def test_context_parallelism_gathers_the_latent_and_index_keys() -> None:
    """Guards bytes of its all-gathers, and that every other exchange is refused."""
    found = priced(context=2)
    sent = [
        (one.layer, float(one.size_bytes.evaluate(found.values)))
        for one in found.program.blocks[0].forward.operations
        if isinstance(one, Collective) and one.axis == "context"
    ]
    assert sent == [("attention.indexer", 2 * LENGTH * 128), ("attention.core", 2 * LENGTH * 576)]
    model, ring = load_model("glm-5").document, find_framework("megatron-core").with_step(context_exchange="ring")
    grid, workload = Grid(context=2, expert=8, data=8, order=ORDER), Workload(global_batch=64, sequence_length=LENGTH)
    said = broken_constraints(grid, model, workload, ring.training(model), micro_batch=1)
    assert any("sparse attention gathers all keys" in one for one in said)


def test_an_indexer_needs_latent_attention() -> None:
    """Guards the document."""
    stored = load_model("glm-5").document.model_dump(by_alias=True)
    stored["layer_types"]["dense"]["latent"] = None
    with pytest.raises(ValueError, match="indexer is of latent attention"):
        Model.model_validate(stored)
