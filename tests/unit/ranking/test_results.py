"""Entries of rankings: ties, reasons, what a search hands to its reports."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from axonn_tune.errors import DocumentError, NothingFeasibleError, UsageError
from axonn_tune.program.memory import memory_limit_bytes
from axonn_tune.ranking import pools
from axonn_tune.ranking.choosing import run_search, search
from axonn_tune.ranking.inputs import load_inputs, make_workload
from axonn_tune.ranking.nearest import require_any
from axonn_tune.ranking.priced import Interrupted, count_ties
from axonn_tune.request import Request
from axonn_tune.specs.catalog import load_model
from axonn_tune.vocabulary import OVERLAPS


def inputs(gpus: int = 64, model: str = "20b", **given: Any) -> Any:
    """Inputs of a small search."""
    return load_inputs(Request(model, gpus=gpus, **given))


@pytest.mark.parametrize(
    ("metric", "half_width", "count"),
    [([10.0, 11.0, 13.0, 20.0], 0.1, 2), ([1.0], 0.1, 1), ([1.0, 1.0, 1.0], 0.01, 3), ([1.0, 2.0, 1.1], 0.1, 1)],
)
def test_ties_end_at_the_first_that_differs(metric: list[float], half_width: float, count: int) -> None:
    """Guards ties: differences within the interval of the difference, counted from the top."""
    column = np.array(metric)
    assert count_ties(column, column * half_width) == count


def test_layouts_with_experts_are_apart_by_more_than_their_own_scatter() -> None:
    """Guards ties with experts: by hand from the scatter of published layouts, 6%, and from waiting for
    communication, the bubble excluded; rows of one family have one EP."""
    problem = inputs(32, "mixtral-8x7b", machine="dgx-h100", framework="megatron-core", z=1, chunks=1).problem
    ranked = search(problem, top=80)
    width, rows = problem.machine.uncertainty.communication, [ranked[place] for place in range(len(ranked))]

    def alike(spread: float) -> int:
        halves_s = [math.hypot(1.2816 * spread * one.iteration_s, width * one.exposed_communication_s) for one in rows]
        apart = [
            one.iteration_s - rows[0].iteration_s > math.hypot(half_s, halves_s[0])
            for one, half_s in zip(rows, halves_s, strict=True)
        ]
        return apart.index(True)

    assert ranked.ties == alike(0.06) > alike(0.04)
    for family in ranked.families(ranked.ties):
        assert len({(ranked[place].grid.expert, ranked[place].grid.expert_tensor) for place in family}) == 1


@pytest.mark.parametrize("rank_by", [pytest.param("communication", marks=pytest.mark.nightly), "iteration"])
def test_pools_are_searched_in_parts(monkeypatch: pytest.MonkeyPatch, rank_by: Any) -> None:
    """Guards searches with more candidates in a pool than are worked out at once: their rows are those of whole pools,
    with stages and without."""
    asked = inputs(16, "5b", rank_by=rank_by, framework="megatron-core", machine="dgx-h100", batch=64).problem
    whole = search(asked, top=20).rows
    monkeypatch.setattr(pools, "SLAB_ROWS", 100)
    parted = search(asked, top=20).rows
    assert {one.grid.pipeline > 1 for one in whole} == {False, True}
    assert [(one.layout, one.iteration_s) for one in parted] == [(one.layout, one.iteration_s) for one in whole]


@pytest.mark.parametrize("rank_by", ["communication", "exposed", "iteration"])
def test_tied_entries_overlap_with_the_first(rank_by: Any) -> None:
    """Guards the mark on entries: it agrees with each entry's own interval."""
    ranked = run_search(inputs(256, rank_by=rank_by).problem, top=0)
    entries = [ranked[position] for position in range(len(ranked))]
    assert [entry.tie for entry in entries] == [position < ranked.ties for position in range(len(ranked))]
    if rank_by == "iteration":
        first = entries[0]
        assert all(entry.low_s <= first.high_s for entry in entries[: ranked.ties])


def test_memory_needed_by_rejected_grids_exceeds_the_limit() -> None:
    """Guards the number beside a memory rejection: the least any candidate of the grid needs."""
    ranked = run_search(inputs(64, "80b").problem)
    rejected = [grid for grid in ranked.rejected() if grid.memory_bytes is not None]
    assert rejected
    limit_bytes = memory_limit_bytes(ranked.problem.machine.accelerator)
    assert all((entry.memory_bytes or 0) > limit_bytes for entry in rejected)


def test_grids_left_out_by_pins_are_told_from_rejected_ones() -> None:
    """Guards pins: grids of another size are no victims of the micro-batch."""
    found = run_search(inputs(z=16).problem)
    counts = found.searched.rejected
    assert counts["pinned"] == sum(grid.reasons[0][0] == "pinned" for grid in found.rejected())
    assert "micro-batch" not in counts


@pytest.mark.parametrize(
    ("pins", "reason", "words"),
    [
        (
            {"expert_overlap": True, "micro_batch": 1},
            "expert overlap",
            "--expert-overlap needs interleaved stages: PP = 8",
        ),
        ({"chunks": 2, "micro_batch": 1}, "chunks", "VPP above 1 needs PP above 1"),
        ({"micro_batch": 8}, "micro-batch", "no micro-batch that is allowed"),
    ],
)
def test_a_grid_without_a_shape_says_what_is_missing(pins: dict[str, Any], reason: str, words: str) -> None:
    """Guards reasons of --all: a pin of chunks or a forced expert overlap is not said to be the micro-batch's fault."""
    options = {"gpus": 8, "machine": "dgx-h100", "framework": "megatron-core", "batch": 12}
    found = search(load_inputs(Request("gpt-oss-20b", **options, **pins)).problem, top=1)
    told = [why for grid in found.rejected() for name, why in grid.reasons if name == reason]
    assert len(told) == found.searched.rejected[reason] > 0
    assert any(why.startswith(words) for why in told), told


@pytest.mark.parametrize("rank_by", ["communication", "iteration"])
def test_rows_are_the_first_of_those_of_longer_rankings(rank_by: Any) -> None:
    """Guards --top: N rows are the first N of all, of grids that differ; what is feasible beyond them is counted."""
    problem = inputs(16, "20b", framework="megatron-core", z=1, rank_by=rank_by).problem
    every = search(problem, top=0)
    assert (len(every), every.searched.unlisted) == (int(every.feasible.sum()), 0)
    assert len({one.grid.by_axis.values() for one in every.rows}) == len(every)
    for top in (1, 3, 15):
        few = search(problem, top=top)
        assert [one.layout for one in few.rows] == [one.layout for one in every.rows[:top]]
        assert [one.iteration_s for one in few.rows] == [one.iteration_s for one in every.rows[:top]]
        assert len(few) + few.searched.unlisted == len(every)
        assert [one.detail.iteration_s for one in few.rows] == [one.iteration_s for one in few.rows]
        assert few.rejected() == every.rejected()


@pytest.mark.parametrize("cost", ["alpha-beta", "paper"])
def test_the_shortest_step_has_no_rank(cost: Any) -> None:
    """Guards the row below a ranking by communication: the first of a ranking by steps, without a place in this one."""
    problem = inputs(1024, "80b").problem
    found = run_search(problem, costs=(cost,), top=3).fastest()
    assert found is not None
    best = search(replace(problem, rank_by="iteration"), top=1)[0]
    assert (found.rank, found.terms, found.iteration_s) == (None, (), best.iteration_s)


@pytest.mark.nightly
def test_an_interrupted_search_has_what_it_had_found() -> None:
    """Guards Ctrl-C: rows are candidates of the search in their order, as exact as at its end; it is told of it on its
    way, and one that has found nothing yet is interrupted as anything is."""
    problem = inputs(64, "20b", framework="megatron-core").problem
    whole, told = search(problem, top=0), list[tuple[int, int, float]]()

    def tell(done: int, left: int, best_s: float) -> None:
        told.append((done, left, best_s))
        if len(told) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        search(problem, tell=tell)
    assert isinstance(stopped.value, Interrupted)
    found = stopped.value.found
    assert found.interrupted
    assert 0 < len(found) <= 10
    assert told[-1][0] >= len(found)
    steps_s = [one.iteration_s for one in found.rows]
    assert steps_s == sorted(steps_s)
    assert steps_s[0] == told[-1][2] >= whole[0].iteration_s
    assert steps_s == pytest.approx([one.detail.iteration_s for one in found.rows], rel=1e-12)


# Inputs.


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (Request(), OVERLAPS),
        (Request(no_overlap="all"), ()),
        (Request(overlap=("output", "gather_prefetch")), ("gather_prefetch", "output")),
        (Request(no_overlap="output"), OVERLAPS[:-1]),
    ],
)
def test_overlaps(request_: Request, expected: tuple[str, ...]) -> None:
    """Guards the overlap options: named ones alone, less those switched off, in canonical order."""
    assert make_workload(load_model("nano").document, request_).overlaps == expected


def test_settings_of_the_workload_are_checked() -> None:
    """Guards --set workload.*: values are validated, unknown keys named."""
    model = load_model("nano").document
    assert make_workload(model, Request(), settings=["precision=fp64"]).precision == "fp64"
    with pytest.raises(DocumentError):
        make_workload(model, Request(), settings=["precision=bf8"])
    with pytest.raises(UsageError, match="global_batch"):
        make_workload(model, Request(), settings=["global_bach=3"])


def test_a_table_that_covers_nothing_is_named() -> None:
    """Guards the paper costs on a machine whose table lacks the groups: not blamed on the model."""
    found = inputs(64, machine="perlmutter")
    paper = found.machine.document.paper
    assert paper is not None
    bare = found.machine.document.model_copy(update={"paper": paper.model_copy(update={"table": paper.table[:1]})})
    ranked = run_search(replace(found.problem, machine=bare), costs=("paper-released",))
    with pytest.raises(NothingFeasibleError, match="no-bandwidth-entry"):
        require_any(ranked)
    rejected = next(grid for grid in ranked.rejected() if grid.priced is not None)
    assert (rejected.communication_s, rejected.reasons[-1][0]) == (None, "no-bandwidth-entry")
