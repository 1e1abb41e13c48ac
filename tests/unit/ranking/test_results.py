"""Entries of rankings: ties, reasons, what a search hands to its reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from axonn_tune.errors import DocumentError, NothingFeasibleError, UsageError
from axonn_tune.ranking.by_alpha_beta import AlphaBetaRanking, count_ties
from axonn_tune.ranking.inputs import load_inputs, make_workload
from axonn_tune.ranking.results import run_search
from axonn_tune.request import Request
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.workload import OVERLAPS


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


@pytest.mark.parametrize("rank_by", ["communication", "exposed", "iteration"])
def test_tied_entries_overlap_with_the_first(rank_by: Any) -> None:
    """Guards the mark on entries: it agrees with each entry's own interval."""
    ranked = run_search(inputs(256, rank_by=rank_by)).ranked
    entries = [ranked.entry(position, terms=False) for position in range(len(ranked))]
    assert [entry.tie for entry in entries] == [position < ranked.ties for position in range(len(ranked))]
    if rank_by == "iteration":
        first = entries[0]
        assert all((entry.low_s or 0) <= (first.high_s or 0) for entry in entries[: ranked.ties])


def test_entries_with_terms_are_the_same_entries() -> None:
    """Guards the two ways to list: terms change nothing else, and executed FLOPs agree with the twin's."""
    results = run_search(inputs())
    plain, full = (results.listed(top=0, terms=terms) for terms in (False, True))
    assert [replace(entry, terms=()) for entry in full] == list(plain)
    peak = results.inputs.problem.machine.accelerator.peak_flops_per_s("bf16")
    for position, entry in enumerate(full):
        pricing = results.ranked.pricing(position)
        assert entry.hfu == pricing.executed_flops / (pricing.iteration_s * peak)


def test_memory_needed_by_rejected_grids_exceeds_the_limit() -> None:
    """Guards the number beside a memory rejection: the least any candidate of the grid needs."""
    results = run_search(inputs(64, "80b"))
    assert isinstance(results.ranked, AlphaBetaRanking)
    rejected = [entry for entry in results.ranked.rejected_entries() if entry.memory_bytes is not None]
    assert rejected
    limit = next(iter(results.ranked.ranking.fittings.values())).limit_bytes
    assert all((entry.memory_bytes or 0) > limit for entry in rejected)


def test_grids_left_out_by_pins_are_told_from_rejected_ones() -> None:
    """Guards pins: grids of another size are no victims of the micro-batch."""
    found = run_search(inputs(z=16)).ranked
    counts = found.searched.rejected
    reasons = [entry.rejected_because for entry in found.rejected_entries()]
    assert counts["pinned"] == sum("pinned" in reason[0] for reason in reasons)
    assert "micro-batch" not in counts


def test_wide_order_leaves_out_what_changes_nothing() -> None:
    """Guards the shown order: axes of size 1 have no place in it."""
    for entry in run_search(inputs()).listed(top=0):
        sizes = dict(zip(("x", "y", "z", "data"), entry.sizes, strict=True))
        assert set(entry.wide_order) == {axis for axis, size in sizes.items() if size > 1}


def test_nothing_feasible_says_what_binds() -> None:
    """Guards the empty ranking: an error with the binding constraint, not an empty answer."""
    with pytest.raises(NothingFeasibleError, match="memory"):
        run_search(inputs(1, "80b")).require_any()


def test_repeated_costs_count_once() -> None:
    """Guards --cost given twice: no column beside itself."""
    assert run_search(inputs(), costs=("alpha-beta", "alpha-beta")).others == {}


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
    results = run_search(replace(found, problem=replace(found.problem, machine=bare)), costs=("paper-released",))
    with pytest.raises(NothingFeasibleError, match="no-bandwidth-entry"):
        results.require_any()
