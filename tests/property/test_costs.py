"""What must hold of every prediction, whatever the model, the machine and the grid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from axonn_tune.cost.price import METRICS, Detail, price
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.space import Problem
from axonn_tune.recompute import RECOMPUTES
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Recompute, Workload
from tests.property import strategies
from tests.unit.cost.machines import two_tier_machine
from tests.unit.small import small_model

COUNTS = st.sampled_from([1, 2, 6, 7, 8, 12, 16, 24, 48])


SPACES = st.tuples(
    strategies.models(), strategies.machines(), strategies.workloads(), COUNTS, st.randoms(use_true_random=False)
)


@settings(max_examples=8)
@given(SPACES)
def test_one_candidate_is_priced_as_its_column(drawn: Any) -> None:
    """Guards every prediction: plain Python and columns agree to the last bit."""
    agree(*drawn)


@pytest.mark.nightly
@settings(max_examples=50)
@given(SPACES)
def test_one_candidate_is_priced_as_its_column_of_more(drawn: Any) -> None:
    """Guards the same."""
    agree(*drawn)


def agree(model: Model, machine: Machine, workload: Workload, gpus: int, random: Any) -> None:
    """Prices of some candidates are those of their columns."""
    ranking = search(Problem(model, machine, workload, gpus=gpus), variants=True, top=0)
    for position in random.sample(range(len(ranking)), min(6, len(ranking))):
        candidate, priced = ranking[position], ranking.detail(position)
        assert candidate.communication_s == priced.communication_s
        assert candidate.compute_s == priced.compute_s
        assert candidate.iteration_s == priced.iteration_s
        assert candidate.memory_bytes == priced.memory.total_bytes


def with_tier(machine: Machine, number: int, **changes: float) -> Machine:
    """The machine with one tier's numbers changed."""
    tiers = list(machine.tiers)
    tiers[number] = tiers[number].model_copy(update=changes)
    return machine.model_copy(update={"tiers": tuple(tiers)})


HOST_BOUND = (
    small_model(layers=1, hidden=576, heads=24, kv_heads=24, head_dim=4, ffn=2304, max_sequence_length=512),
    two_tier_machine(algorithms=("ring",), ranks_per_node=2, inner=(1.0, 2.0), outer=(1.0, 4.0)),
    Workload(global_batch=96, sequence_length=64, overlaps=("gather_prefetch", "weight_gradient")),
)
"""The host is late, and what a block sends is waited for behind it: a shorter block makes this wait longer."""


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
@example(*HOST_BOUND, Grid(y=2, z=2), "none", 0, 2.0)
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
    configuration = Layout(grid, 2, recompute, 0)
    before = priced(model, machine, workload, configuration)
    for better in (
        with_tier(machine, number, bandwidth_gb_per_s=tier.bandwidth_gb_per_s * factor),
        with_tier(machine, number, latency_us=tier.latency_us / factor),
    ):
        after = priced(model, better, workload, configuration)
        assert after.communication_s <= before.communication_s * (1 + 1e-12)
        assert after.iteration_s <= before.iteration_s * (1 + 1e-9)


def priced(model: Model, machine: Machine, workload: Workload, configuration: Layout) -> Detail:
    """Price a configuration after checking that it divides."""
    grid = configuration.grid
    assume(workload.global_batch % (grid.data * grid.z * configuration.micro_batch) == 0)
    assume(model.heads % grid.x == 0 and model.kv_heads % grid.x == 0)
    assume(model.hidden % (grid.y * grid.z) == 0 and model.ffn % (grid.x * grid.z) == 0)
    return price(Job(model, machine, workload), configuration)


@settings(max_examples=12)
@given(strategies.models(), strategies.machines(), strategies.workloads(), COUNTS)
def test_rankings_are_sorted_and_complete(model: Model, machine: Machine, workload: Workload, gpus: int) -> None:
    """Guards the answer itself: best first, every grid once, ranked and rejected together all of them."""
    for rank_by in ("communication", "exposed", "iteration"):
        ranking = search(Problem(model, machine, workload, gpus=gpus, rank_by=rank_by), top=0)
        found = [ranking[position] for position in range(len(ranking))]
        values = [getattr(one, METRICS[rank_by]) for one in found]
        assert values == sorted(values)
        listed = [one.grid for one in found]
        assert all(grid.world == gpus for grid in listed)
        sizes = {(grid.x, grid.y, grid.z, grid.data) for grid in listed}
        rejected = {tuple(one.sizes.values()) for one in ranking.rejected()}
        assert len(sizes) == len(listed)
        assert sizes.isdisjoint(rejected)
        assert len(sizes) + len(rejected) == ranking.searched.grids == len(ranking.grids.sizes)
        assert np.all(np.isfinite(values))
