"""The bound loses no exact best: rankings of many small spaces against all their candidates, priced exactly."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache

import pytest

from axonn_tune.frameworks import find_framework
from axonn_tune.program.memory import memory_limit_bytes
from axonn_tune.ranking.candidates import ranking_metric
from axonn_tune.ranking.choosing import candidates_of, search
from axonn_tune.ranking.space import Problem, Variant
from axonn_tune.request import Request
from axonn_tune.specs.catalog import load_machine
from axonn_tune.units import GIB
from tests.unit.small import small_model, small_problem
from tests.unit.specs.test_layer_types import typed

FRAMEWORKS = ("axonn-tune", "megatron-core", "torchtitan", "megatron-2021", "deepspeed", "xla", "megatron-axonn")


def seeds(number: int, *, of: int) -> list[object]:
    """The first seeds, which have each framework once; `make nightly` draws all."""
    return [seed if seed < number else pytest.param(seed, marks=pytest.mark.nightly) for seed in range(of)]


@cache
def space(seed: int) -> Problem:
    """A model of 4 to 24 blocks, wide or narrow, on 8 to 64 GPUs of one kind or another, with a batch that divides."""
    draw = random.Random(seed)
    framework = find_framework(FRAMEWORKS[seed % len(FRAMEWORKS)])
    width = draw.choice((1, 16, 32))
    model = small_model(
        family=draw.choice(("gpt", "llama")),
        layers=draw.randint(4, 24),
        hidden=128 * width,
        head_dim=16 * width,
        ffn=draw.choice((256, 512)) * width,
        vocab=draw.choice((512, 50257)),
        tied_embeddings=draw.random() < 0.5,
    )
    recompute = draw.choice(("none", "selective", "full"))
    gpus = draw.choice((8, 12, 16, 24, 32, 64))
    order = tuple(axis for axis in framework.axes if axis != "pipeline")
    request = Request(recompute=recompute, y=1, order=(*order, "pipeline") if framework.permuted else None)
    machine = load_machine(draw.choice(("perlmutter-80gb", "dgx-h100"))).document
    return small_problem(model, machine, framework, gpus=gpus, batch=draw.choice((8, 12)), request=request)


@pytest.mark.parametrize("seed", seeds(7, of=50))
def test_the_first_of_a_ranking_is_the_best_of_all(seed: int) -> None:
    """Guards pruning by the bound: nothing that is not priced exactly is better than what is listed first, and no
    bound is above what it bounds.

    Steps and exposed communication it is held against are those of `price`, one candidate at a time.
    """
    problem = space(seed)
    first, every = search(problem), candidates_of(problem, top=1, variants=True)
    exact = [every.priced(row).detail for row in range(len(every.columns.shape))]
    steps_s = [priced.iteration_s for priced in exact]
    assert first[0].iteration_s == pytest.approx(min(steps_s), rel=1e-9)
    columns = every.columns
    exposed_s = ranking_metric(columns, rank_by="exposed")
    for priced, bound_s, least_s in zip(exact, columns.iteration_s, exposed_s, strict=True):
        assert bound_s <= priced.iteration_s * (1 + 1e-9)
        assert least_s <= priced.exposed_communication_s + 1e-9 * priced.iteration_s


@cache
def uneven_space(seed: int) -> Problem:
    """A model whose layers few numbers of chunks divide; every other one has memory for half of its candidates."""
    draw = random.Random(seed)
    framework = find_framework(("axonn-tune", "megatron-core", "torchtitan", "meta-4d", "nemo")[seed % 5])
    like = space(seed)
    model = like.model.model_copy(update={"layers": draw.choice((7, 9, 10, 11, 13, 14, 15))})
    order = tuple(axis for axis in framework.axes if axis != "pipeline")
    recompute = draw.choice(("none", "selective", "full"))
    request = Request(recompute=recompute, y=1, order=(*order, "pipeline") if framework.permuted else None)
    gpus, batch = draw.choice((8, 16)), draw.choice((8, 16, 24))
    problem = small_problem(model, like.machine, framework, gpus=gpus, batch=batch, request=request)
    problem = replace(problem, rank_by="iteration")
    if seed % 2 == 0:
        return problem
    roomy = candidates_of(problem, top=1, variants=True)
    needed = sorted(roomy.fittings[Variant(recompute)].total_bytes.tolist())
    accelerator = problem.machine.accelerator
    tight = {"memory_gib": needed[len(needed) // 2] / GIB + accelerator.reserved_memory_gib}
    machine = problem.machine.model_copy(update={"accelerator": accelerator.model_copy(update=tight)})
    return replace(problem, machine=machine)


@pytest.mark.parametrize("seed", seeds(5, of=30))
def test_no_number_of_chunks_is_lost(seed: int) -> None:
    """Guards uneven interleaving: with every number of chunks asked for by itself, no candidate is shorter than what a
    search finds that drops most of them by bounds; steps and memory are those of the candidate alone, here of the
    shortest and of some others of each number."""
    problem = uneven_space(seed)
    limit_bytes = memory_limit_bytes(problem.machine.accelerator)
    best = math.inf
    for chunks in range(1, problem.model.layers // 2 + 1):
        every = search(replace(problem, request=replace(problem.request, chunks=chunks)), variants=True, top=0)
        listed = every.rows
        shortest = min(range(len(every)), key=lambda position: listed[position].iteration_s, default=0)
        for position in {shortest, *range(seed % 8, len(every), 8)} if listed else ():
            alone = every.detail(position)
            assert listed[position].iteration_s == pytest.approx(alone.iteration_s, rel=1e-12)
            assert listed[position].memory_bytes == pytest.approx(float(alone.memory.total_bytes), rel=1e-12)
            assert alone.memory.total_bytes <= limit_bytes
        best = min([best, *(one.iteration_s for one in listed)])
    first = search(problem, top=1)
    assert first[0].iteration_s == pytest.approx(best, rel=1e-12)
    assert first.fastest().iteration_s == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("layers", ["dense*3 moe*5", "(dense moe)*3 moe*2"])
def test_of_several_layer_types_nothing_is_lost(layers: str) -> None:
    """Guards stages and chunks that are worked out together, and what is left out before pricing: every candidate's
    bound is below its step alone, and the fastest of all numbers of chunks is found or beaten by balanced stages."""
    request, machine = Request(recompute="full", micro_batch=1), load_machine("dgx-h100").document
    problem = small_problem(typed(layers), machine, find_framework("megatron-core"), gpus=8, batch=8, request=request)
    best = math.inf
    for chunks in (1, 2):
        every = candidates_of(replace(problem, request=replace(request, chunks=chunks)), top=1, variants=True)
        listed = [every.priced(row) for row in range(len(every.columns.shape))]
        assert any(one.pipeline > 1 for one in listed)
        for position in range(0, len(listed), 9):
            alone = listed[position].detail
            assert listed[position].iteration_s == pytest.approx(alone.iteration_s, rel=1e-12)
            assert every.columns.iteration_s[position] <= alone.iteration_s * (1 + 1e-9)
        best = min([best, *(one.iteration_s for one in listed)])
    assert search(problem, top=1).fastest().iteration_s <= best * (1 + 1e-12)
