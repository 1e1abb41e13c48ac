"""What must hold of every prediction, whatever the model, the machine and the grid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from axonn_tune.cost.collectives import lines, route
from axonn_tune.cost.prediction import Configuration, Pricing, price_configuration
from axonn_tune.grid import Grid, GroupShape
from axonn_tune.program.dimensions import symbol_values
from axonn_tune.program.memory import price_memory
from axonn_tune.program.size import PLAIN
from axonn_tune.program.step import build_step
from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.space import Problem
from axonn_tune.specs.machine import COLLECTIVE_KINDS, CollectiveKind, Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import RECOMPUTES, Recompute, Workload
from tests.property import strategies
from tests.unit.cost.machines import two_tier_machine

COUNTS = st.sampled_from([1, 2, 6, 7, 8, 12, 16, 24, 48])


@settings(max_examples=60)
@given(strategies.models(), strategies.machines(), strategies.workloads(), COUNTS, st.randoms(use_true_random=False))
def test_scalar_twin_equals_the_columns(
    model: Model, machine: Machine, workload: Workload, gpus: int, random: Any
) -> None:
    """Guards every prediction: plain Python and columns agree to the last bit."""
    ranking = search(Problem(model, machine, workload, gpus), variants=True)
    for position in random.sample(range(len(ranking)), min(6, len(ranking))):
        candidate, priced = ranking.candidate(position), ranking.price(position)
        assert candidate.communication_s == priced.communication_s
        assert candidate.compute_s == priced.compute_s
        assert candidate.iteration_s == priced.iteration_s
        assert candidate.memory_bytes == priced.memory.total_bytes


def with_tier(machine: Machine, number: int, **changes: float) -> Machine:
    """The machine with one tier's numbers changed."""
    tiers = list(machine.tiers)
    tiers[number] = tiers[number].model_copy(update=changes)
    return machine.model_copy(update={"tiers": tuple(tiers)})


@settings(max_examples=60)
@given(
    strategies.models(),
    strategies.machines(),
    strategies.workloads(),
    strategies.grids(),
    st.sampled_from(RECOMPUTES),
    st.integers(0, 1),
    st.floats(1.0, 50.0),
)
def test_more_bandwidth_or_less_latency_is_never_slower(
    model: Model,
    machine: Machine,
    workload: Workload,
    grid: Grid,
    recompute: Recompute,
    number: int,
    factor: float,
) -> None:
    """Guards against rankings that reward a worse network."""
    tier = machine.tiers[number]
    configuration = Configuration(grid, 2, recompute, 0)
    before = price(model, machine, workload, configuration)
    for better in (
        with_tier(machine, number, bandwidth_gb_per_s=tier.bandwidth_gb_per_s * factor),
        with_tier(machine, number, latency_us=tier.latency_us / factor),
    ):
        after = price(model, better, workload, configuration)
        assert after.communication_s <= before.communication_s * (1 + 1e-12)
        assert after.iteration_s <= before.iteration_s * (1 + 1e-9)


def price(model: Model, machine: Machine, workload: Workload, configuration: Configuration) -> Pricing:
    """Price a configuration after checking that it divides."""
    grid = configuration.grid
    assume(workload.global_batch % (grid.data * grid.z * configuration.micro_batch) == 0)
    assume(model.heads % grid.x == 0 and model.kv_heads % grid.x == 0)
    assume(model.hidden % (grid.y * grid.z) == 0 and model.ffn % (grid.x * grid.z) == 0)
    return price_configuration(model, machine, workload, configuration)


SENT_BY: list[tuple[CollectiveKind, str]] = [*((kind, "ring") for kind in COLLECTIVE_KINDS), ("all_reduce", "tree")]
"""A tree only reduces to all: other pairs have no line, and would test nothing."""


@given(st.sampled_from(SENT_BY), st.integers(1, 400), st.integers(1, 400))
def test_a_larger_group_never_moves_fewer_bytes(sent_by: tuple[CollectiveKind, str], size: int, more: int) -> None:
    """Guards the volume factors: (p-1)/p grows with p, in time at equal bandwidth."""
    kind, algorithm = sent_by
    machine = two_tier_machine(algorithms=(algorithm,), nodes=False)
    bytes_per_s = [
        [
            line.bandwidth_bytes_per_s
            for line in lines(kind, route(GroupShape(((ranks, 1),)), machine.tiers, ranks), machine)
        ]
        for ranks in (size + 1, size + 1 + more)
    ]
    assert all(len(found) == 1 for found in bytes_per_s)
    assert all(late <= early for early, late in zip(*bytes_per_s, strict=True))


@given(strategies.models(), strategies.machines(), strategies.workloads(), st.sampled_from(RECOMPUTES))
def test_a_grid_of_ones_communicates_nothing(
    model: Model, machine: Machine, workload: Workload, recompute: Recompute
) -> None:
    """Guards the serial case: no term, no exposed time, a step that is pure computation."""
    priced = price_configuration(model, machine, workload, Configuration(Grid(), 2, recompute))
    assert priced.terms == ()
    assert priced.communication_s == 0.0
    assert priced.iteration_s == pytest.approx(priced.compute_s)


def memory_bytes(model: Model, workload: Workload, grid: Grid, recompute: Recompute) -> float:
    """Memory of one rank with all layers resharded, at micro-batch 1."""
    values = symbol_values(model, workload, grid, micro_batch=1)
    values["held"] = values["L"]
    program = build_step(model, workload, recompute=recompute)
    priced = price_memory(program, values, limit_bytes=1e15, arithmetic=PLAIN, kept_layers=0.0)
    return float(priced.total_bytes)


@given(strategies.models(), strategies.workloads(), strategies.grids(), st.sampled_from(RECOMPUTES), st.integers(2, 4))
def test_memory_never_grows_with_z_or_with_sharded_data(
    model: Model, workload: Workload, grid: Grid, recompute: Recompute, factor: int
) -> None:
    """Guards the memory model: more shards hold less; tables that need no more padding are assumed."""
    divisible = model.model_copy(
        update={"vocab": 512 * grid.world * factor, "max_sequence_length": 512 * grid.z * factor}
    )
    here = memory_bytes(divisible, workload, grid, recompute)
    deeper = Grid(grid.x, grid.y, grid.z * factor, grid.data)
    wider = Grid(grid.x, grid.y, grid.z, grid.data * factor)
    assert memory_bytes(divisible, workload, deeper, recompute) <= here
    if workload.shard_optimizer_over_data:
        assert memory_bytes(divisible, workload, wider, recompute) <= here


@settings(max_examples=40)
@given(strategies.models(), strategies.machines(), strategies.workloads(), COUNTS)
def test_rankings_are_sorted_and_complete(model: Model, machine: Machine, workload: Workload, gpus: int) -> None:
    """Guards the answer itself: best first, every grid once, ranked and rejected together all of them."""
    for rank_by in ("communication", "exposed", "iteration"):
        ranking = search(Problem(model, machine, workload, gpus, rank_by=rank_by))
        found = [ranking.candidate(position) for position in range(len(ranking))]
        values = [
            {
                "communication": one.communication_s,
                "exposed": one.exposed_communication_s,
                "iteration": one.iteration_s,
            }[rank_by]
            for one in found
        ]
        assert values == sorted(values)
        listed = [one.configuration.grid for one in found]
        assert all(grid.world == gpus for grid in listed)
        sizes = {(grid.x, grid.y, grid.z, grid.data) for grid in listed}
        rejected = {tuple(one.sizes.values()) for one in ranking.rejected()}
        assert len(sizes) == len(listed)
        assert sizes.isdisjoint(rejected)
        assert len(sizes) + len(rejected) == ranking.searched.grids == len(ranking.grids.sizes)
        assert np.all(np.isfinite(values))
