"""Candidates priced together, which rank, and alone, which explain: the same to the last bit, for every framework."""

from __future__ import annotations

import pytest

from axonn_tune.frameworks import find_framework, registry
from axonn_tune.ranking.choosing import Ranking, search
from axonn_tune.request import RankBy, Request
from axonn_tune.specs.catalog import load_machine
from tests.unit.small import small_model, small_problem

MACHINE = load_machine("perlmutter-80gb").document
SPACES = {
    "even": (small_model(), {"gpus": 8, "batch": 24}),
    "uneven, tied": (small_model(layers=7, tied_embeddings=True, biases=True), {"gpus": 8, "batch": 8}),
    "grouped heads": (small_model(family="llama", layers=12, kv_heads=4), {"gpus": 12, "batch": 12}),
    "large": (
        small_model(layers=13, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=16384, vocab=51200),
        {"gpus": 12, "batch": 12, "shard_optimizer_over_data": True},
    ),
}


def assert_same(ranking: Ranking, positions: range) -> None:
    """Step, communication, computation, bubble and memory of some places."""
    for position in positions:
        found, priced = ranking.candidate(position), ranking.price(position)
        alone = (priced.iteration_s, priced.communication_s, priced.compute_s, priced.bubble_s)
        assert (found.iteration_s, found.communication_s, found.compute_s, found.bubble_s) == alone, found
        assert found.memory_bytes == pytest.approx(float(priced.memory.total_bytes), rel=1e-12), found


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("name", sorted(registry()))
def test_listed_candidates_cost_what_explain_says(name: str, space: str) -> None:
    """Guards every row of a table, for all frameworks: what is listed is what `explain` says."""
    model, given = SPACES[space]
    ranking = search(small_problem(model, MACHINE, find_framework(name), **given))
    assert_same(ranking, range(0, min(len(ranking), 12), 2))


@pytest.mark.parametrize("name", ["axonn-tune", "megatron-core", "torchtitan", "megatron-2021", "deepspeed"])
@pytest.mark.parametrize("space", SPACES)
def test_chunks_that_differ_in_blocks_are_priced_as_they_are(name: str, space: str) -> None:
    """Guards `--chunks N` where the layers do not divide: each chunk has its own blocks, and memory those in flight."""
    model, given = SPACES[space]
    framework = find_framework(name)
    request = Request(chunks=2, pipeline=4 if given["gpus"] == 8 else 3)
    uneven = model.model_copy(update={"layers": model.layers + 3})
    ranking = search(small_problem(uneven, MACHINE, framework, **given, request=request))
    # Frameworks with a rule of equal chunks have none that differ.
    schedule = framework.schedule
    assert bool(len(ranking)) == (schedule.interleaved and not schedule.equal_chunks)
    assert_same(ranking, range(min(len(ranking), 8)))
    steps = [ranking.candidate(position).iteration_s for position in range(len(ranking))]
    assert not steps or steps[0] <= min(steps) * (1 + 1e-9)


@pytest.mark.parametrize("order", ["x,data,pipeline", "data,pipeline,x", "pipeline,data,x"])
def test_rank_orders_reach_sends_between_stages(order: str) -> None:
    """Guards the scatter and gather around a send: x is nearer or farther, and so is the next stage.

    Each stage of the framework sends shares over x, which are gathered with the stride that x has in the order.
    """
    request, framework = Request(order=order, x=2, pipeline=2), find_framework("megatron-2021")
    problem = small_problem(SPACES["large"][0], MACHINE, framework, gpus=16, batch=16, request=request)
    ranking = search(problem)
    assert len(ranking)
    assert_same(ranking, range(len(ranking)))


@pytest.mark.parametrize("rank_by", ["communication", "exposed"])
def test_other_rankings_list_exact_steps_too(rank_by: RankBy) -> None:
    """Guards rankings whose measure is not the step: what they list with pipeline stages is no bound, and neither is
    the configuration they name as fastest."""
    model = SPACES["grouped heads"][0]
    ranking = search(
        small_problem(model, MACHINE, find_framework("axonn-tune"), gpus=12, batch=12, rank_by=rank_by), exact=3
    )
    assert any(ranking.candidate(position).configuration.grid.pipeline > 1 for position in range(12))
    assert_same(ranking, range(12))
    fastest = ranking.fastest()
    assert_same(fastest, range(1))
    shortest_s = min(ranking.candidate(position).iteration_s for position in range(len(ranking)))
    assert fastest.candidate(0).iteration_s <= shortest_s * (1 + 1e-9)
