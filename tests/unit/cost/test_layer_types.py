"""Models of several layer types: priced in columns as alone, alike types as one, and windows by hand."""

from __future__ import annotations

from typing import Any

import pytest

from axonn_tune.cost.price import price
from axonn_tune.cost.pricer import Pricer
from axonn_tune.frameworks import find_framework
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.program.memory import KnownSizes
from axonn_tune.program.operations import Attention
from axonn_tune.ranking.choosing import search
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload
from tests.unit.small import small_model, small_problem

MACHINE = load_machine("perlmutter-80gb").document
SIZES: dict[str, Any] = {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 16384, "vocab": 51200}
TYPES: dict[str, dict[str, Any]] = {
    "local": {"window": 512},
    "global": {},
    "mixer": {"mlp": False, "sinks": True},
    "mlp": {"attention": False},
    "wide": {"ffn": 32768},
}


def model_of(layers: str, **types: dict[str, Any]) -> Model:
    """A model with this pattern of layer types."""
    used = {name: value for name, value in (TYPES | types).items() if name in layers}
    return small_model(family="llama", max_sequence_length=2048, layers=layers, layer_types=used, **SIZES)


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param("(local*2 global)*3 local", marks=pytest.mark.nightly),
        "wide*2 (mixer mlp)*3 global*4",
    ],
)
@pytest.mark.parametrize(
    ("name", "memory_gib"),
    [
        ("megatron-core", 16.0),
        pytest.param("axonn-tune", 16.0, marks=pytest.mark.nightly),
        pytest.param("torchtitan", 80.0, marks=pytest.mark.nightly),
    ],
)
def test_candidates_cost_what_each_does_alone(layers: str, name: str, memory_gib: float) -> None:
    """Guards the columns of layer types, with stages, chunks and recompute in some layers: the same to the bit, and
    stages have the memory together that each has by itself."""
    small = MACHINE.accelerator.model_copy(update={"memory_gib": memory_gib})
    machine = MACHINE.model_copy(update={"accelerator": small})
    given = {"gpus": 8, "batch": 24, "sequence_length": 2048}
    ranked = search(small_problem(model_of(layers), machine, find_framework(name), **given), variants=True, top=0)
    assert len(ranked)
    for place in range(0, len(ranked), max(len(ranked) // 20, 1)):
        row, alone = ranked[place], ranked.detail(place)
        assert (row.iteration_s, row.communication_s, row.compute_s) == (
            alone.iteration_s,
            alone.communication_s,
            alone.compute_s,
        ), row.layout
        assert row.memory_bytes == pytest.approx(alone.memory_bytes, rel=1e-12)
        pricer, needed = Pricer(alone.job, alone), list[float]()
        for number in range(alone.pipeline):
            pricer.known = KnownSizes()
            needed.append(float(pricer.settled_stage(number)[1].total_bytes))
        assert max(needed) == alone.memory_bytes


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "grid", [Grid(z=8), Grid(x=2, z=2, data=2), Grid(z=2, pipeline=4, order=("x", "y", "z", "data", "pipeline"))]
)
def test_types_that_are_alike_cost_what_one_does(recompute: str, grid: Grid) -> None:
    """Guards the change from one type to the next: a model of two equal types is that of one."""
    one = model_of("global*8")
    two = model_of("(first second)*4", first={}, second={})
    workload = Workload(global_batch=64, sequence_length=2048)
    layout = Layout(grid, 1, recompute, 0)
    single, several = (price(Job(model, MACHINE, workload), layout) for model in (one, two))
    assert several.iteration_s == pytest.approx(single.iteration_s, rel=1e-9)
    assert several.communication_s == pytest.approx(single.communication_s, rel=1e-9)
    assert several.memory_bytes == pytest.approx(single.memory_bytes, rel=1e-9)
    assert several.executed_flops == pytest.approx(single.executed_flops, rel=1e-12)


def test_a_window_has_the_positions_in_it() -> None:
    """Guards windows: of 2,048 positions a causal token sees W·(W + 1) / 2 + (S - W)·W; both halves are counted."""
    workload = Workload(global_batch=8, sequence_length=2048)
    priced = price(Job(model_of("local*2 global"), MACHINE, workload), Layout(Grid(data=8), 1, "none", 0))
    forward = {
        step.layer: float(step.flops.evaluate(priced.values))
        for block in priced.program.blocks
        for step in block.forward.operations
        if isinstance(step, Attention)
    }
    width, window, length = 32 * 128, 512.0, 2048.0
    assert forward["global.attention.core"] == 4.0 * length * length * width
    seen = window * window / 2 + (length - window) * window
    assert forward["local.attention.core"] == pytest.approx(4.0 * 2.0 * seen * width)
