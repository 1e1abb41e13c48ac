"""Candidates priced together, which rank, and alone, which explain: the same to the last bit, for every framework."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from axonn_tune.cost.price import price
from axonn_tune.frameworks import find_framework, registry
from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.priced import Priced
from axonn_tune.request import Request
from axonn_tune.specs.catalog import load_machine
from tests.nightly import params
from tests.unit.small import small_model, small_problem

MACHINE = load_machine("perlmutter-80gb").document
SPACES = {
    "even": (small_model(), {"gpus": 8, "batch": 24}),
    "uneven, tied": (small_model(layers=7, tied_embeddings=True, biases=True, vocab=516), {"gpus": 8, "batch": 8}),
    "grouped heads": (small_model(family="llama", layers=12, kv_heads=4), {"gpus": 12, "batch": 12}),
    "large": (
        small_model(layers=13, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=16384, vocab=51200),
        {"gpus": 12, "batch": 12, "shard_optimizer_over_data": True},
    ),
}


def assert_same(ranking: Priced, positions: range) -> None:
    """Step, communication, computation, bubble and memory of some places."""
    for position in positions:
        found, priced = ranking[position], ranking.detail(position)
        alone = (priced.iteration_s, priced.communication_s, priced.compute_s, priced.bubble_s)
        assert (found.iteration_s, found.communication_s, found.compute_s, found.bubble_s) == alone, found
        assert found.memory_bytes == pytest.approx(float(priced.memory.total_bytes), rel=1e-12), found


@pytest.mark.parametrize("space", params(SPACES, ("even", "large")))
@pytest.mark.parametrize("name", sorted(registry()))
def test_listed_candidates_cost_what_explain_says(name: str, space: str) -> None:
    """Guards every row of a table, for all frameworks: what is listed is what `explain` says."""
    model, given = SPACES[space]
    ranking = search(small_problem(model, MACHINE, find_framework(name), **given), top=0)
    assert_same(ranking, range(0, min(len(ranking), 12), 2))


@pytest.mark.parametrize("name", ["axonn-tune", "megatron-core", "torchtitan", "megatron-2021", "deepspeed"])
@pytest.mark.parametrize("space", params(SPACES, ("large",)))
def test_chunks_that_differ_in_blocks_are_priced_as_they_are(name: str, space: str) -> None:
    """Guards `--chunks N` where the layers do not divide: each chunk has its own blocks, and memory those in flight."""
    model, given = SPACES[space]
    framework = find_framework(name)
    request = Request(chunks=2, pipeline=4 if given["gpus"] == 8 else 3)
    uneven = model.model_copy(update={"layers": model.layers + 3})
    ranking = search(small_problem(uneven, MACHINE, framework, **given, request=request), top=0)
    # Frameworks with a rule of equal chunks have none that differ.
    schedule = framework.schedule
    assert bool(len(ranking)) == (schedule.interleaved and not schedule.equal_chunks)
    assert_same(ranking, range(min(len(ranking), 8)))
    steps = [ranking[position].iteration_s for position in range(len(ranking))]
    assert not steps or steps[0] <= min(steps) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "pins"),
    [
        pytest.param("axonn-tune", {}, marks=pytest.mark.nightly),
        ("axonn-tune", {"pipeline": 4, "chunks": 3}),
        ("axonn-tune", {"recompute": "layernorm,mlp_act", "recompute_layers": 2}),
        pytest.param("megatron-core", {}, marks=pytest.mark.nightly),
        ("megatron-core", {"pipeline": 2, "chunks": 3, "recompute": "full", "recompute_layers": 1}),
        ("fsdp", {}),
    ],
)
def test_layouts_that_recompute_in_some_layers_are_priced_as_they_are(name: str, pins: dict[str, Any]) -> None:
    """Guards recompute in the first layers of each chunk: columns and one candidate have the same blocks of each kind,
    and where memory decides, one layer fewer does not fit."""
    sizes = {"hidden": 4096, "heads": 32, "kv_heads": 32, "head_dim": 128, "ffn": 16384, "vocab": 51200}
    model = small_model(layers=13, max_sequence_length=2048, **sizes)
    machine = MACHINE.model_copy(update={"accelerator": MACHINE.accelerator.model_copy(update={"memory_gib": 20.0})})
    sequences = {"gpus": 8, "batch": 24, "sequence_length": 2048}
    problem = small_problem(model, machine, find_framework(name), request=Request(**pins), **sequences)
    ranking = search(problem, variants=True, top=0)
    some = [place for place in range(len(ranking)) if ranking[place].recompute_layers]
    assert some
    for place in some[:: max(len(some) // 12, 1)]:
        assert_same(ranking, range(place, place + 1))
        layout = ranking[place].layout
        assert layout.recompute_layers is not None
        if not pins.get("recompute_layers"):
            fewer = replace(layout, recompute_layers=layout.recompute_layers - 1 or None)
            fewer = replace(fewer, recompute="none") if layout.recompute_layers == 1 else fewer
            assert price(problem, fewer).memory_bytes > ranking[place].memory_limit_bytes


@pytest.mark.parametrize(("pipeline", "gpus"), [(1, 32), (2, 32)])
def test_each_exchange_of_context_costs_what_explain_says(pipeline: int, gpus: int) -> None:
    """Guards the exchanges that a search compares: each candidate as it is alone, the best of a grid in its place."""
    model = small_model(family="llama", layers=4, heads=32, kv_heads=32, hidden=1024, head_dim=32, ffn=2048)
    request = Request(context=gpus // 2 if pipeline == 1 else 8, pipeline=pipeline)
    given = {"gpus": gpus, "batch": 8, "sequence_length": 2048, "request": request}
    problem = small_problem(model, MACHINE, find_framework("megatron-core"), **given)
    every, best = search(problem, variants=True, top=0), search(problem, top=0)
    found = {every[place].context_exchange for place in range(len(every))}
    assert found == {"ring", "all_to_all", "hierarchical 2", "hierarchical 4"}
    places = {every[place].context_exchange: place for place in reversed(range(len(every)))}
    assert_same(every, range(0, len(every), 5))
    for place in places.values():
        assert_same(every, range(place, place + 1))
    fastest = min(every[place].iteration_s for place in range(len(every)))
    assert best[0].iteration_s == fastest


def test_a_pinned_exchange_is_the_only_one() -> None:
    """Guards `--set step.context_exchange`: what a search does not compare costs what it did."""
    core = find_framework("megatron-core")
    model = small_model(family="llama", heads=32, kv_heads=32, hidden=1024, head_dim=32)
    given = {"gpus": 8, "batch": 8, "sequence_length": 2048, "request": Request(context=8, pipeline=1)}
    pinned, ring = (
        search(small_problem(model, MACHINE, core.with_step(context_exchange=name), **given))
        for name in ("all_to_all", "ring")
    )
    both = search(small_problem(model, MACHINE, core, **given))
    assert {one.context_exchange for one in (pinned[0], ring[0])} == {"all_to_all", "ring"}
    assert both[0].iteration_s == min(pinned[0].iteration_s, ring[0].iteration_s)
