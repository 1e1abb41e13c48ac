"""Searches with a pipeline layout: columns against each layout priced alone, and what is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from axonn_tune.cost.price import detail_of, price
from axonn_tune.cost.pricer import Pricer
from axonn_tune.grid import Grid
from axonn_tune.job import Layout
from axonn_tune.launch.commands import command_of
from axonn_tune.learning.evidence import Setup
from axonn_tune.program.step import Stage
from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.inputs import launch_inputs, load_inputs
from axonn_tune.ranking.space import Problem
from axonn_tune.report.commands import pins
from axonn_tune.request import Request
from axonn_tune.stages import layout_text, parse_layout
from tests.cli.running import good

EIGHT = "Et*3|t*6|t*11|t*2|(t|)*2t*6|t*2L"
"""32 layers in 8 parts, no two stages alike."""


def problem_of(layout: str, **given: object) -> Problem:
    """A search for a model of 32 layers, with this layout."""
    asked = {"gpus": 32, "machine": "dgx-h100", "framework": "megatron-core", "batch": 64} | given
    return load_inputs(Request("llama3-8b", pipeline_layout=layout, **asked)).problem  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "framework"),
    [
        pytest.param(EIGHT, "megatron-core", marks=pytest.mark.nightly),
        ("Et*10|t|(t*2|)*7t*7L", "torchtitan"),
        pytest.param("Et*20|t*12L", "axonn-tune", marks=pytest.mark.nightly),
        pytest.param("E(t*8|)*3t*8L", "megatron-core", marks=pytest.mark.nightly),
        ("E|t*8|t*8|t*8|t*8|||L", "megatron-core"),
        pytest.param("Et*31||t|L", "axonn-tune", marks=pytest.mark.nightly),
    ],
)
def test_candidates_are_priced_as_each_is_alone(layout: str, framework: str) -> None:
    """Step, communication and memory of two dozen candidates, their parts; the bound hides no better one."""
    problem = problem_of(layout, framework=framework, gpus=16, batch=16)
    parts = parse_layout(layout).parts
    ranked = search(problem, variants=True, top=0)
    assert len(ranked)
    assert {one.grid.pipeline * one.chunks for one in ranked.rows} == {len(parts)}
    for place in range(0, len(ranked), max(len(ranked) // 24, 1)):
        row, alone = ranked[place], ranked.detail(place)
        assert alone.parts == parts
        assert [stage.blocks for stage in alone.stages] == [sum(parts[n :: row.pipeline]) for n in range(row.pipeline)]
        assert row.iteration_s == pytest.approx(alone.iteration_s, rel=1e-9)
        assert row.communication_s == pytest.approx(alone.communication_s, rel=1e-9)
        assert row.memory_bytes == pytest.approx(alone.memory_bytes, rel=1e-9)
    assert search(problem, top=1)[0].iteration_s == min(one.iteration_s for one in ranked.rows)


@pytest.mark.parametrize("recompute_layers", [None, 1])
def test_splits_share_a_pricer_and_have_their_own_prices(recompute_layers: int | None) -> None:
    """Guards what splits and numbers of chunks of a candidate share: the price of each is that of a pricer of its own,
    to the bit, and it fits where its largest stage does."""
    asked = {"gpus": 16, "machine": "dgx-h100", "framework": "megatron-core", "batch": 32}
    job = load_inputs(Request("llama3-8b", **asked)).problem  # type: ignore[arg-type]
    grid = Grid(data=4, pipeline=4, order=("x", "y", "z", "context", "data", "pipeline"))
    layout = Layout(grid, 1, "full", 0, 2, recompute_layers=recompute_layers)
    shared = Pricer(job, layout)
    detail_of(shared)
    for parts in ((3, 4, 4, 4, 5, 4, 4, 4), (2, 6, 4, 4, 4, 4, 6, 2), (3, 3, 3, 3, 3, 2, 3, 2, 2, 2, 3, 3)):
        other = replace(layout, chunks=len(parts) // 4, parts=parts)
        mine, alone = shared.split(other), Pricer(job, other)
        needed = float(alone.memory.total_bytes)
        assert mine.fits(needed)
        assert not mine.fits(np.nextafter(needed, 0.0))
        assert detail_of(mine).iteration_s == detail_of(alone).iteration_s
        assert mine.memory.total_bytes == needed
        stages = [(Stage(n == 0, n == 3), alone.contents[n::4]) for n in range(4)]
        assert [mine.stage_s(*one) for one in stages] == [alone.stage_s(*one) for one in stages]


def test_an_even_layout_is_the_even_split() -> None:
    """A layout of parts alike gives the steps of its stages and chunks; splits by time are shorter.
    Rows have the exchange of context parallelism that is best for each."""
    given = search(problem_of("E(t*4|)*7t*4L", pipeline=4), top=0)
    asked = {"machine": "dgx-h100", "framework": "megatron-core", "batch": 64, "pipeline": 4, "chunks": 2}
    split = search(load_inputs(Request("llama3-8b", gpus=32, **asked)).problem, top=0)
    even = {one.grid: one.iteration_s for one in given.rows}
    found = {one.grid: (one.layout, one.iteration_s) for one in split.rows}
    assert even.keys() == found.keys()
    assert {step_s < even[grid] for grid, (one, step_s) in found.items() if one.parts is not None} == {True}
    frameworks = [given.detail(place).job.framework for place in range(len(given.rows))]
    alone = [
        price(replace(split.problem, framework=framework), replace(one.layout, parts=None)).iteration_s
        for one, framework in zip(given.rows, frameworks, strict=True)
    ]
    assert alone == [one.iteration_s for one in given.rows]


@pytest.mark.parametrize("pins", [{"pipeline": 2}, {"chunks": 2}, {"pipeline": 4, "chunks": 2}, {}])
def test_pins_that_agree_are_taken(pins: dict[str, int]) -> None:
    """--pp and --vpp leave the grids of the layout that have them."""
    ranked = search(problem_of(EIGHT, **pins))
    layouts = ranked.rows
    assert layouts
    assert all(one.grid.pipeline * one.chunks == 8 for one in layouts)
    assert all({"pipeline": one.pipeline, "chunks": one.chunks}.items() >= pins.items() for one in layouts)


def test_a_command_has_the_layout() -> None:
    """Megatron-Core's command says it in full, without chunks beside it."""
    ranked = search(problem_of(EIGHT, pipeline=4))
    words = command_of(ranked.detail(0)).words
    assert words[words.index("--pipeline-model-parallel-layout") + 1] == "Et*3|t*6|t*11|t*2|(t*1|)*2t*6|t*2L"
    assert "--num-virtual-stages-per-pipeline-rank" not in words


def test_a_launch_config_keeps_the_parts(tmp_path: Path) -> None:
    """The bundled runtime gets them, and its config is priced with them again."""
    path = tmp_path / "launch.yaml"
    asked = "--gpus 8 --model nano-llama --machine dgx-h100 --set model.layers=8 --batch 48 --pipeline 2"
    good(f"{asked} --pipeline-layout Et*3|t*2|t|t*2L -o {path}")
    problem = launch_inputs(path)[0].problem
    assert problem.parts == (3, 2, 1, 2)
    again = search(problem)
    assert again[0].chunks == 2
    assert f"iteration_s: {again.detail(0).iteration_s!r}" in path.read_text(encoding="utf-8")


def test_the_options_of_a_run_pin_its_layout() -> None:
    """Guards commands that are printed for a run with a layout: asked again, they give the same step."""
    problem = problem_of(EIGHT, pipeline=4, micro_batch=1)
    ranked = search(problem)
    setup = Setup(problem.model, problem.machine, problem.workload, problem.framework, layout=ranked[0].layout)
    words = pins(setup, machine="dgx-h100", model="llama3-8b")
    assert words[words.index("--pipeline-layout") + 1] == layout_text(*parse_layout(EIGHT))
    again = json.loads(good(" ".join([*words, "--format", "json"])).out)
    assert again["configs"][0]["iteration_s"] == pytest.approx(ranked[0].iteration_s)
    assert again["configs"][0]["pipeline_layout"] == layout_text(*parse_layout(EIGHT))


@pytest.mark.nightly
def test_options_of_a_layout_without_exchange_leave_its_overlap_out() -> None:
    """Guards the same of searches with overlap of dispatch, which price layouts that exchange no tokens without it,
    and what is written for them: Megatron-Core refuses both the overlap and a flex dispatcher there."""
    asked = {"machine": "dgx-h100", "framework": "megatron-core", "batch": 32, "dispatcher": "alltoall"}
    pinned = {"y": 1, "z": 1, "context": 1, "pipeline": 8}
    problem = load_inputs(Request("mixtral-8x7b", 16, **asked, **pinned, expert_overlap=True)).problem  # type: ignore[arg-type]
    ranked = search(problem, variants=True, top=0)
    grids = (one.grid for one in ranked.rows)
    row = next(row for row, grid in enumerate(grids) if grid.expert * grid.expert_tensor == 1)
    setup = Setup(problem.model, problem.machine, problem.workload, problem.framework, layout=ranked[row].layout)
    words = pins(setup, machine="dgx-h100", model="mixtral-8x7b")
    assert "step.expert_overlap=true" not in words
    again = json.loads(good(" ".join([*words, "--format", "json"])).out)
    assert again["configs"][0]["iteration_s"] == pytest.approx(ranked[row].iteration_s)
    written = " ".join(command_of(ranked.detail(row)).words)
    assert "--moe-token-dispatcher-type alltoall" in written
    assert "--overlap-moe-expert-parallel-comm" not in written
