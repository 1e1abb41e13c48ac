"""Multi-token prediction: priced in columns as alone, where a layout has it, and what it adds, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from axonn_tune.cost.price import Detail, price
from axonn_tune.frameworks import find_framework
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.program.count import parameters
from axonn_tune.program.dimensions import model_flops
from axonn_tune.program.operations import Collective, MatMul
from axonn_tune.ranking.choosing import search
from axonn_tune.request import Request
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload
from axonn_tune.stages import parse_layout
from tests.unit.small import small_model, small_problem

MACHINE = load_machine("perlmutter-80gb").document
MEGATRON = ("x", "z", "context", "data", "pipeline")
HIDDEN, LENGTH = 2048, 2048


def model_of(layers: Any, **changes: Any) -> Model:
    """A model of hidden 2048 with an MTP layer, and experts in some layers."""
    experts = {"count": 8, "per_token": 2, "width": 1024}
    types = {"dense": {}, "moe": {"experts": experts}, "alone": {"attention": False, "experts": experts}}
    used = {name: value for name, value in types.items() if name in str(layers)}
    sizes = {"hidden": HIDDEN, "heads": 16, "kv_heads": 16, "head_dim": 128, "ffn": 8192, "vocab": 51200}
    given = sizes | {"layer_types": used, "mtp_layers": 1} | changes
    return small_model(family="llama", max_sequence_length=LENGTH, layers=layers, **given)


@pytest.mark.parametrize(
    ("name", "layers", "count", "text"),
    [
        ("axonn-tune", 4, 1, None),
        pytest.param("megatron-core", "dense moe*5", 1, None, marks=pytest.mark.nightly),
        pytest.param("megatron-core", "(dense alone)*3", 2, None, marks=pytest.mark.nightly),
        pytest.param("megatron-core", "dense moe*5", 1, "Ett|tt|tt|mL", marks=pytest.mark.nightly),
        ("megatron-core", "dense moe*5", 1, "Et|tt|tt|t|m|L"),
        pytest.param("torchtitan", "dense*4", 1, None, marks=pytest.mark.nightly),
    ],
)
def test_candidates_cost_what_each_does_alone(name: str, layers: Any, count: int, text: str | None) -> None:
    """Guards columns of stages with MTP layers, in the last part or where a layout has them: the same bits."""
    request = Request(pipeline_layout=text) if text else Request()
    given = {"gpus": 4, "batch": 8, "sequence_length": LENGTH, "request": request}
    problem = small_problem(model_of(layers, mtp_layers=count), MACHINE, find_framework(name), **given)
    ranked = search(problem, variants=True, top=0)
    assert len(ranked)
    for place in range(0, len(ranked), max(len(ranked) // 20, 1)):
        row, alone = ranked[place], ranked.detail(place)
        assert (row.iteration_s, row.communication_s, row.compute_s) == (
            alone.iteration_s,
            alone.communication_s,
            alone.compute_s,
        ), row.layout
        assert row.memory_bytes == pytest.approx(alone.memory_bytes, rel=1e-12)
        assert row.executed_flops == pytest.approx(alone.executed_flops, rel=1e-12)


def priced(grid: Grid, *, model: Model, chunks: int = 1, text: str = "") -> Detail:
    """One layout of 64 sequences by Megatron-Core, a micro-batch of one."""
    workload, layout = Workload(global_batch=64, sequence_length=LENGTH), Layout(grid, 1, "none", 0, chunks)
    if text:
        split = parse_layout(text, stages=grid.pipeline, layers=model.layers, mtp=model.mtp_layers)
        layout = Layout(grid, 1, "none", 0, len(split.parts) // grid.pipeline, split.parts, mtp_part=split.mtp_part)
    return price(Job(model, MACHINE, workload, find_framework("megatron-core")), layout)


@pytest.mark.parametrize("x", [1, 2])
def test_a_layer_a_projection_and_a_head(x: int) -> None:
    """Guards GEMMs of an MTP layer: those of a decoder layer, 2H to H, and the LM head once more; MFU has the same."""
    grid = Grid(x=x, data=8 // x, order=MEGATRON)
    found, without = (priced(grid, model=model_of("dense*4", mtp_layers=count)) for count in (1, 0))
    block = HIDDEN * (4 * HIDDEN + 3 * 8192)
    added = 6 * (block + 2 * HIDDEN**2 + 51200 * HIDDEN) + 7 * 2 * LENGTH * HIDDEN
    tokens = 64 * LENGTH / 8
    assert found.executed_flops - without.executed_flops == pytest.approx(added * tokens, rel=1e-9)
    workload = Workload(global_batch=64, sequence_length=LENGTH)
    counted = [model_flops(model_of("dense*4", mtp_layers=count), workload) for count in (1, 0)]
    assert counted[0] - counted[1] == (added - 2 * LENGTH * HIDDEN) * 64 * LENGTH
    steps = found.program.blocks[1].forward.operations
    (projection,) = (one for one in steps if isinstance(one, MatMul) and one.layer.endswith("mtp.projection"))
    sizes = [float(size.evaluate(found.values)) for size in (projection.m, projection.n, projection.k)]
    assert sizes == [LENGTH, HIDDEN / x, 2 * HIDDEN]
    sent = [one for one in steps if isinstance(one, Collective) and one.layer == projection.layer and one.axis == "x"]
    sizes = [float(one.size_bytes.evaluate(found.values)) for one in sent]
    assert sizes == [2 * LENGTH * 2 * HIDDEN, 2 * LENGTH * HIDDEN]


@pytest.mark.parametrize(("text", "holder"), [("", 3), ("Et*3|t*3|m|L", 2)])
def test_the_stage_that_holds_it(text: str, holder: int) -> None:
    """Guards weights by stage: layer and projection, and a copy of the embedding that is summed with the first's."""
    grid = Grid(data=2, pipeline=4, order=MEGATRON)
    found = priced(grid, model=model_of("dense*6"), text=text)
    parts = (3, 3, 0, 0) if text else (1, 2, 2, 1)
    table, block = 51200 * HIDDEN, HIDDEN * (4 * HIDDEN + 3 * 8192)
    for number, stage in enumerate(found.stages):
        held = parts[number] * block + table * ((number == 0) + (number == 3))
        held += (block + 2 * HIDDEN**2 + table) * (number == holder)
        assert dict(stage.memory.items)["compute weights"] == pytest.approx(2 * held, rel=1e-3)
        assert stage.blocks == parts[number] + (number == holder)
    assert [one.axis for one, _ in found.program.collectives() if one.axis == "ends"] == []
    ends = [one for one in found.program.end.operations if isinstance(one, Collective) and one.axis == "ends"]
    assert [float(one.size_bytes.evaluate(found.values)) for one in ends] == [4 * table]


def test_parameters_of_deepseek_v3() -> None:
    """Guards the sum of MTP and everything else, with embedding and head shared: 682.6 B."""
    from axonn_tune.specs.catalog import load_model

    assert parameters(load_model("deepseek-v3").document) == pytest.approx(682.6e9, rel=1e-4)


def test_balanced_stages_make_room_for_it() -> None:
    """Guards searched splits: the last stage, with an MTP layer and two passes of the LM head, has fewest layers."""
    given = {"gpus": 4, "batch": 64, "sequence_length": LENGTH, "request": Request(pipeline=4, chunks=1)}
    best = search(small_problem(model_of("dense*20"), MACHINE, find_framework("megatron-core"), **given))[0]
    assert best.parts is not None
    assert sum(best.parts) == 20
    assert best.parts[-1] < min(best.parts[:-1])


def test_a_vocabulary_that_is_not_padded_is_slower() -> None:
    """Guards tables of 50,257 rows as they are: GEMMs of an odd width take longer than padded ones."""
    model, machine = load_model("gpt2-1.5b").document, load_machine("dgx-a100").document
    workload, core = Workload(global_batch=8, sequence_length=1024), find_framework("megatron-core")
    odd, padded = (
        price(Job(model, machine, workload, core.with_step(vocabulary_multiple=rows)), Layout(Grid(data=8), 1, "none"))
        for rows in (0, 128)
    )
    assert odd.compute_s > 1.01 * padded.compute_s
