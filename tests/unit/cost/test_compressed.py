"""DeepSeek-V4's compressed attention and hyper-connections: GEMMs, keys, bytes and saved arrays of a block, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from axonn_tune.cost.price import Detail, price
from axonn_tune.frameworks import find_framework
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.program.feasibility import broken_constraints
from axonn_tune.program.memory import saved_arrays
from axonn_tune.program.operations import MatMul, Measured
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload

ORDER = ("x", "z", "context", "data", "pipeline")
LENGTH, H, N, D, Q, INDEX = 4096, 4096, 64, 512, 1024, 64 * 128
MEGATRON = find_framework("megatron-core")


def flash(kind: str, **changes: Any) -> Model:
    """Four layers of V4-Flash of one type."""
    stored = load_model("deepseek-v4-flash").document.model_dump(by_alias=True)
    own = {"layers": f"{kind}*4", "pattern": None, "mtp_layers": 0, "layer_types": {kind: stored["layer_types"][kind]}}
    return Model.model_validate(stored | own | changes)


def priced(
    model: Model, *, pipeline: int = 1, recompute: str = "none", machine: str = "dgx-b200", **step: bool
) -> Detail:
    """On four GPUs, a micro-batch of one sequence."""
    workload = Workload(global_batch=16, sequence_length=LENGTH)
    grid = Grid(data=4 // pipeline, pipeline=pipeline, order=ORDER)
    job = Job(model, load_machine(machine).document, workload, MEGATRON.with_step(**step))
    return price(job, Layout(grid, 1, recompute, 0))


@pytest.mark.parametrize(
    ("kind", "compressors", "keys"),
    [
        ("window", 0, 128),
        ("heavy", 2 * D, 128 + LENGTH / 256),
        ("sparse", 4 * D + 4 * 128 + 64, 128 + 512 * (1 - 2 * 512 / LENGTH)),
    ],
)
def test_gemms_and_keys_of_each_ratio(kind: str, compressors: int, keys: float) -> None:
    """Guards projections of ratios 0, 128 and 4, and keys of a query: a window, all compressed ones, chosen ones."""
    found = priced(flash(kind))
    block = found.program.blocks[0]
    sizes = {
        one.layer.partition(".")[2]: tuple(float(size.evaluate(found.values)) for size in (one.n, one.k))
        for one in block.forward.operations
        if isinstance(one, MatMul) and one.layer.startswith("compressed")
    }
    assert sizes == {
        "q_down": (Q, H),
        "q_up": (N * D + (INDEX if kind == "sparse" else 0), Q),
        "kv": (D + compressors, H),
        "groups": (1024, N * D),
        "out": (H, 8 * 1024),
    }
    steps = (*block.forward.operations, *block.backward.operations)
    cores = [one for one in steps if isinstance(one, Measured) and one.layer == "compressed.core"]
    flops = [float(one.flops.evaluate(found.values)) for one in cores]
    assert flops == pytest.approx([4 * LENGTH * N * D * keys, 10 * LENGTH * N * D * keys])


def test_hyper_connections_move_and_save_all_streams() -> None:
    """Guards bytes of both kernels of a site, forward and backward, and saved arrays, which `mhc` repeats in part."""
    found = priced(flash("window"))
    block = found.program.blocks[0]
    moved = [
        (one.kernel, one.backward, float(one.work.evaluate(found.values)) / (2 * LENGTH * H))
        for one in (*block.forward.operations, *block.backward.operations)
        if isinstance(one, Measured) and one.kernel.startswith("mhc")
    ]
    site = [("mhc_pre", False, 5.0), ("mhc_post", False, 9.0)]
    back = [("mhc_post", True, 14.0), ("mhc_pre", True, 9.0)]
    assert moved == [*site, *site, *back, *back]
    for recompute, mixed in (("none", 2.0), ("mhc", 0.0)):
        found = priced(flash("window"), recompute=recompute)
        saved = dict.fromkeys(("residual stream", "branch inputs", "branch outputs"), 0.0)
        for one in saved_arrays(found.program.blocks[0]):
            if one.kind in saved:
                saved[one.kind] += float(one.size_bytes.evaluate(found.values)) / (2 * LENGTH * H)
        assert saved == {"residual stream": 8.0, "branch inputs": mixed, "branch outputs": 2.0}


def test_hyper_connections_operator_by_operator() -> None:
    """Guards both kernels of a site as measured on MI355X: as many bytes, at the rate of a trace."""
    fused = priced(flash("window"), machine="mi355x")
    eager = priced(flash("window"), machine="mi355x", fused_hyper_connections=False)
    kernels = {one.kernel for one in eager.program.blocks[0].forward.operations if isinstance(one, Measured)}
    assert "eager_mhc" in kernels
    assert not any(one.startswith("mhc") for one in kernels)
    assert eager.iteration_s > fused.iteration_s


def test_stages_send_all_streams() -> None:
    """Guards messages of pipelines: four times the hidden state."""
    one, four = (
        priced(flash("window", residual_streams=streams), pipeline=2).program.send(scattered=False)
        for streams in (None, 4)
    )
    assert four.size_bytes == 4.0 * one.size_bytes


@pytest.mark.parametrize(("axis", "name"), [("x", "TP"), ("context", "CP")])
def test_neither_tensor_nor_context_parallelism_splits_it(axis: str, name: str) -> None:
    """Guards refusals by name."""
    grid = Grid(**{axis: 2}, expert=8, data=8, order=ORDER)
    workload, model = Workload(global_batch=64, sequence_length=LENGTH), load_model("deepseek-v4-flash").document
    said = broken_constraints(grid, model, workload, MEGATRON.training(model), micro_batch=1)
    assert f"compressed attention is not split by {name}" in said


def test_an_indexer_needs_compressed_keys() -> None:
    """Guards the document."""
    stored = load_model("deepseek-v4-flash").document.model_dump(by_alias=True)
    stored["layer_types"]["sparse"]["compressed"]["ratio"] = None
    with pytest.raises(ValueError, match="there are no compressed keys"):
        Model.model_validate(stored)
