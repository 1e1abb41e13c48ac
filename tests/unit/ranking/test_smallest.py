"""How many GPUs at least: the answer of an exhaustive search of every smaller number, and what is taken is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import axonn_tune as tune
from axonn_tune.cost.price import price
from axonn_tune.errors import NothingFeasibleError, UsageError
from axonn_tune.frameworks import find_framework, registry
from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.fit import fit_all
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.ranking.nearest import Saving, offloads, savings
from axonn_tune.ranking.programs import Programs
from axonn_tune.ranking.shapes import list_shapes
from axonn_tune.ranking.smallest import Smallest, counts, smallest
from axonn_tune.ranking.space import Problem, list_grids
from axonn_tune.request import MIN, Request
from axonn_tune.units import GIB
from tests.nightly import params

CORE = {"machine": "dgx-h100", "framework": "megatron-core"}
FSDP = {"machine": "dgx-h100", "framework": "fsdp"}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "dense, less than a node": ({"model": "llama3-8b", **CORE}, 2),
    "experts, odd sizes": ({"model": "moonlight-16b-a3b", **CORE}, 3),
    "all savers": ({"model": "llama3-8b", **CORE, "set": ("machine.accelerator.memory_gib=50",)}, 2),
    "pins": ({"model": "llama3-8b", **CORE, "pipeline": 3}, 3),
    "without savers": ({"model": "llama3-8b", **FSDP}, 2),
    "by its batch": ({"model": "llama3-70b", **FSDP}, 32),
    "the bundled runtime": ({"model": "5b", "machine": "dgx-h100"}, 2),
    "dense": ({"model": "llama3-70b", **CORE}, 16),
    "experts": ({"model": "qwen3-30b-a3b", **CORE}, 4),
    "experts, FSDP": ({"model": "qwen3-30b-a3b", **FSDP}, 8),
    "more experts": ({"model": "qwen3-235b-a22b", **CORE}, 32),
    "most experts": ({"model": "deepseek-v3", **CORE}, 104),
}
LONG = ("dense", "experts", "more experts", "most experts")


def found_of(case: str) -> Smallest:
    """The smallest number of a case."""
    return smallest(Request(gpus=MIN, **CASES[case][0]))


def combinations(found: Smallest) -> list[Saving | None]:
    """Every combination of savers, none first."""
    problem = found.inputs.problem
    return [None, *savings(problem.framework, problem.workload, problem.request, switched_off=False)]


@pytest.mark.parametrize("case", params(CASES, LONG))
def test_no_smaller_number_trains(case: str) -> None:
    """Guards the answer: a whole search, priced, of every smaller number, below a node and in whole nodes, with every
    combination of savers lists nothing; one of the number that is named does."""
    found, expected = found_of(case), CASES[case][1]
    assert found.gpus == expected
    smaller = [gpus for gpus in counts(found.inputs.problem) if gpus < found.gpus]
    for gpus in smaller:
        for saving in combinations(found):
            assert not len(search(found.sized(gpus, saving), top=1)), (gpus, saving and saving.words)
    assert any(len(search(found.sized(found.gpus, saving), top=1)) for saving in combinations(found))


@pytest.mark.parametrize("case", params(("all savers", "pins", "dense", "experts"), ("dense", "experts")))
def test_what_is_taken_is_fastest_and_needed(case: str) -> None:
    """Guards each row: without savers where it fits without; else no combination of savers is faster than the one that
    is shown, and none with fewer fits than the one that is needed."""
    found = found_of(case)
    for size in list(found.sizes())[: 1 if case == "all savers" else 2]:
        gpus, steps = size.inputs.problem.gpus, dict[str, float]()
        for saving in combinations(found):
            ranked = search(found.sized(gpus, saving), top=1)
            if len(ranked):
                steps[saving.words if saving else ""] = ranked[0].iteration_s
        assert (size.needed.words if size.needed else "") == next(iter(steps))
        fastest = steps[""] if "" in steps else min(steps.values())
        assert size.ranked[0].iteration_s == pytest.approx(fastest, rel=1e-9)


def problems() -> Iterator[Problem]:
    """A problem of each framework with savers of its own."""
    for name, framework in registry().items():
        if any(one.option != "set" for one in framework.savers) and not any(one.trades for one in framework.savers):
            yield load_inputs(Request("nano-llama", 8, machine="dgx-h100", framework=name, pipeline=True)).problem


def test_each_saver_takes_less_memory() -> None:
    """Guards that the last combination decides whether anything fits: of every shape, each combination takes no more
    memory than any part of it, and no more than with an earlier saver of the same option."""
    seen = 0
    for problem in problems():
        totals = dict[tuple[Any, ...], Any]()
        for saving in (None, *savings(problem.framework, problem.workload, problem.request)):
            changed = problem if saving is None else saving.of(problem)
            shapes = list_shapes(list_grids(changed), changed)
            fitting = fit_all(shapes, Programs(changed.by_dispatcher[0]), every=True)
            least = np.min([one.total_bytes for one in fitting.values()], axis=0)
            totals[saving.savers if saving else ()] = least
        last = list(totals)[-1]
        for savers, total in totals.items():
            seen += 1
            assert (totals[last] <= total).all(), savers
            for part, more in totals.items():
                if {*part} < {*savers}:
                    assert (total <= more).all(), (part, savers)
    assert seen > 6


def test_a_number_that_only_the_batch_rules_out_is_said() -> None:
    """Guards sizes without a layout: the batch is kept, and said to be why, with one that would do."""
    found = found_of("by its batch")
    assert found.of_batch == ((24, 504),)
    asked = Request(gpus=24, **CASES["by its batch"][0])
    assert not len(search(load_inputs(asked).problem, top=1))
    assert len(search(load_inputs(replace(asked, batch=504)).problem, top=1))


def test_what_is_switched_off_stays_off() -> None:
    """Guards what is asked for: a search for the smallest number turns on nothing that a request turns off, and takes
    no other type of what it states."""
    off = ("step.sequence_parallel=false",)
    asked = Request(gpus=MIN, model="llama3-8b", **CORE, set=off, grad_reduce_in_bf16=True)
    words = [one.words for one in combinations(smallest(asked)) if one]
    assert words == ["--use-precision-aware-optimizer fp32", "--use-precision-aware-optimizer bf16"]
    assert find_framework("torchtitan").savers[0].words == "--set step.sequence_parallel=true"
    assert not combinations(found_of("without savers"))[1:]


def test_nothing_fits_at_any_number() -> None:
    """Guards the end of the search for a number, and commands that need one."""
    words = r"no number of GPUs up to 2,048 can train this; on 64, binding constraint: memory"
    with pytest.raises(NothingFeasibleError, match=words):
        smallest(Request(gpus=MIN, model="llama3-8b", **FSDP, batch=64, seq=1048576))
    with pytest.raises(UsageError, match="give this a number of GPUs"):
        load_inputs(Request(gpus=MIN, model="llama3-8b"))


@pytest.mark.parametrize(
    ("asked", "fewest", "offloaded", "host_gib"),
    [
        ({"model": "llama3-8b", **CORE, "set": ("machine.accelerator.memory_gib=30",)}, 4, 2, None),
        ({"model": "llama3-70b", **FSDP}, 32, 16, 600),
        ({"model": "llama3-70b", **FSDP}, 32, None, 300),
        ({"model": "llama3-8b", **FSDP, "set": ("step.offloaded=",)}, 2, None, None),
    ],
)
def test_fewer_gpus_with_offload(
    asked: dict[str, Any], fewest: int, offloaded: int | None, host_gib: float | None
) -> None:
    """Guards the optimizer in host memory: the fewest GPUs with it by searches of each smaller number, what it adds to
    a step, no layout that hosts lack memory for, and that it is not tried where a request says otherwise."""
    settings = (*asked.get("set", ()), *([f"machine.host.memory_gib={host_gib}"] if host_gib else []))
    found = smallest(Request(gpus=MIN, **{**asked, "set": settings}))
    problem, said = found.inputs.problem, found.offloaded
    assert (found.gpus, said and said.gpus) == (fewest, offloaded)
    every = list(offloads(problem.framework, problem.workload, problem.request))
    assert bool(every) == ("step.offloaded=" not in settings)
    for gpus in counts(problem):
        if gpus > (offloaded or fewest - 1):
            break
        rows = [row for one in every if len(row := search(found.sized(gpus, one), top=1))]
        assert bool(rows) == (gpus == offloaded), gpus
    if said is not None:
        first = search(found.sized(said.gpus, every[-1]), top=1).detail(0)
        assert said.host_bytes <= (host_gib or 2048) * GIB
        assert 0.0 < said.added_s < said.iteration_s
        assert first.without_offload is not None
        assert first.without_offload.memory_bytes > first.memory_limit_bytes


def test_layouts_that_hosts_lack_memory_for_are_not_listed() -> None:
    """Guards a search against layouts priced alone: of the first ones those within the host's memory are listed."""
    asked = {"gpus": 8, "model": "llama3-8b", **CORE, "batch": 16, "micro_batch": 1, "top": 24, "pipeline": True}
    moved = ("step.offloaded=moments,core_attn", "step.distributed_optimizer=false")
    held = {row.layout: price(row.job, row.layout).host_bytes for row in tune.search(**asked, set=moved)}
    limit = float(np.median([*held.values()]))
    listed = tune.search(**asked, set=(*moved, f"machine.host.memory_gib={limit / GIB}"))
    expected = {layout for layout, size in held.items() if size < limit}
    assert 0 < len(expected) < len(held)
    assert expected <= {row.layout for row in listed}
    assert max(price(row.job, row.layout).host_bytes for row in listed) <= limit * (1 + 1e-9)


def test_deepspeed_has_weights_on_the_host_with_zero_3_alone() -> None:
    """Guards that no replicas are ranked that would stream whole weights, which DeepSpeed cannot: offload_param is
    stage 3's."""
    moved = "step.offloaded=moments,master,gradients,weights"
    found = tune.search("llama3-8b", 8, machine="dgx-h100", framework="deepspeed", set=(moved,))
    grids = [row.layout.grid for row in found]
    assert grids
    assert all(grid.data == grid.pipeline == 1 for grid in grids)
