"""Strategies for models, machines, workloads and grids, small enough to search in milliseconds."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import strategies as st

from axonn_tune.cost.pipeline import StageTimes
from axonn_tune.grid import AXES, RANK_AXES, Grid
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload
from axonn_tune.vocabulary import OVERLAPS
from tests.unit.cost.machines import two_tier_machine

SMALL = st.sampled_from([1, 2, 3, 4, 6, 8])


@st.composite
def grids(draw: st.DrawFn, *, largest: int = 96) -> Grid:
    """Any grid of at most `largest` ranks, with any axis order."""
    order = tuple(draw(st.permutations(AXES)))
    grid = Grid(*(draw(SMALL) for _ in AXES), order=order)
    while grid.world > largest:
        grid = Grid(grid.x, grid.y, max(grid.z // 2, 1), max(grid.data // 2, 1), order=order)
        grid = Grid(max(grid.x // 2, 1), max(grid.y // 2, 1), grid.z, grid.data, order=order)
    return grid


@st.composite
def six_axis_grids(draw: st.DrawFn, *, largest: int = 96) -> Grid:
    """Any grid over all axes of at most `largest` ranks, with any order of them."""
    sizes = [draw(st.sampled_from([1, 1, 2, 3, 4])) for _ in RANK_AXES]
    while prod(sizes) > largest:
        sizes[sizes.index(max(sizes))] -= 1
    return Grid(*sizes, order=tuple(draw(st.permutations(RANK_AXES))))


@st.composite
def models(draw: st.DrawFn) -> Model:
    """GPT or Llama models whose sizes divide by 2, 3, 4, 6 and 8."""
    family = draw(st.sampled_from(["gpt", "llama"]))
    heads = draw(st.sampled_from([24, 48]))
    head_dim = draw(st.sampled_from([4, 8, 64]))
    return Model.model_validate(
        {
            "schema": "axonn-tune/model/1",
            "name": "drawn",
            "family": family,
            "layers": draw(st.integers(1, 9)),
            "hidden": 576 * draw(st.sampled_from([1, 4])),
            "heads": heads,
            "kv_heads": draw(st.sampled_from([24, heads])),
            "head_dim": head_dim,
            "ffn": 2304,
            "vocab": draw(st.sampled_from([512, 50257, 51200])),
            "max_sequence_length": 512,
            "biases": draw(st.booleans()),
            "tied_embeddings": draw(st.booleans()),
            "source": "drawn",
            "defaults": {"global_batch": 96, "sequence_length": 512},
        }
    )


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Two tiers with any reasonable latencies and bandwidths, and one or two protocols."""
    latency = st.floats(0.1, 100.0)
    bandwidth = st.floats(0.1, 900.0)
    return two_tier_machine(
        algorithms=draw(
            st.sampled_from([("ring",), ("ring", "tree"), ("ring", "tree", "in_switch"), ("recursive", "ring")])
        ),
        protocols=draw(st.sampled_from([(("simple", 1.0, 1.0),), (("simple", 1.0, 1.0), ("ll", 0.3, 0.3))])),
        ranks_per_node=draw(st.sampled_from([2, 3, 4, 8])),
        inner=(draw(latency), draw(bandwidth)),
        outer=(draw(latency), draw(bandwidth)),
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Batches with many divisors, any set of overlaps, split or not, either kind of optimizer state."""
    return Workload(
        global_batch=96 * draw(st.sampled_from([1, 3, 4])),
        sequence_length=draw(st.sampled_from([64, 512])),
        precision=draw(st.sampled_from(["bf16", "fp32"])),
        shard_optimizer_over_data=draw(st.booleans()),
        overlaps=tuple(overlap for overlap in OVERLAPS if draw(st.booleans())),
        split_micro_batch=draw(st.booleans()),
    )


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[StageTimes, int]:
    """Durations of up to 6 stages with up to 3 chunks, many of them equal or 0, and a number of micro-batches."""
    stages, chunks = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    duration = st.sampled_from([0.0, 1.0, 2.0]) | st.floats(0.0, 4.0)
    of_stage = st.lists(duration, min_size=stages, max_size=stages)
    of_chunk = st.lists(st.lists(duration, min_size=chunks, max_size=chunks), min_size=stages, max_size=stages)
    arrays = [np.array(draw(shape)) for shape in (of_chunk, of_chunk, of_chunk, of_stage, of_stage)]
    return StageTimes(*arrays, draw(st.booleans())), draw(st.integers(1, 12)) * (stages if chunks > 1 else 1)
