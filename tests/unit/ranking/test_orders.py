"""Orders of passes of pipeline stages in a search: none that is better is missed, bounds hold, and what cannot be is
refused by name."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest

from axonn_tune.errors import UsageError
from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.ranking.loop import Loop, Split
from axonn_tune.ranking.space import Problem
from axonn_tune.request import Request

_SMALL: dict[str, Any] = {"gpus": 8, "model": "llama2-7b", "machine": "mi300x", "framework": "primus", "seq": 4096}


def _problem(**more: Any) -> Problem:
    return load_inputs(Request(**{**_SMALL, **more})).problem


_ASKED: dict[str, Any] = {"batch": 16, "set": {"layers": 12}, "x": 1, "context": 1}


def _steps_by_bounds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Steps of candidates whose backward passes are split, by the bounds at which they are decided."""
    decided, seen = Loop._decide, list[float]()

    def checked(self: Loop, bound_s: float, item: Split) -> None:
        decided(self, bound_s, item)
        key = id(item.batch.pool), item.row
        if item.batch.problem.framework.step.splits_backward and key in self._own:
            seen.append(self._own[key] / bound_s)

    monkeypatch.setattr(Loop, "_decide", checked)
    return seen


def test_bounds_of_split_passes_have_the_way_to_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZB1P of the bundled runtime: no bound is above a step, and they are 0.83 of it in the mean; m W / p is 0.75."""
    seen = _steps_by_bounds(monkeypatch)
    asked = {**_ASKED, "y": 1, "framework": "axonn-tune", "pipeline": True, "rank_by": "iteration"}
    search(_problem(**asked, pipeline_schedule="zb1p"), top=1000)
    assert len(seen) > 40
    assert min(seen) >= 1.0 - 1e-9
    assert fmean(1.0 / one for one in seen) > 0.8


def test_search_takes_the_best_order_of_each_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate of each order priced, without bounds: the same step of each grid, and no bound above a price."""
    asked, seen = _ASKED, _steps_by_bounds(monkeypatch)
    found = search(_problem(**asked), top=1000)
    best = dict[tuple[int, ...], float]()
    for order in ("1f1b", "zb1p", "zbv", "v-half", "v-min"):
        every = search(_problem(**asked, pipeline_schedule=order), top=100_000, variants=order != "1f1b")
        for row in every.rows:
            sizes = tuple(row.grid.by_axis.values())
            best[sizes] = min(best.get(sizes, float("inf")), row.iteration_s)
    assert {tuple(row.grid.by_axis.values()): row.iteration_s for row in found.rows} == pytest.approx(best, rel=1e-12)
    orders = {row.job.framework.step.pipeline_order for row in found.rows if row.grid.pipeline > 1}
    assert len(seen) > 20
    assert min(seen) >= 1.0 - 1e-9
    assert len(orders) > 1


def test_half_of_the_memory_is_chosen_where_it_binds() -> None:
    """8 stages of Llama 3 8B at 32,768 tokens: in 160 GiB V-half, since neither ZBV nor 1F1B fits; with room the
    latter, interleaved, and in 192 GiB plain."""
    asked: dict[str, Any] = {"model": "llama3-8b", "seq": 32768, "batch": 32, "pipeline": 8, "recompute": "none"}

    def first(gib: int, **more: Any) -> str | None:
        found = search(_problem(**asked, **more, set={"machine.accelerator.memory_gib": gib}), top=1)
        return found.rows[0].pipeline_order if len(found) else None

    assert first(500) == "1f1b"
    assert first(192, chunks=2) == first(160) == "v-half"
    assert first(192, pipeline_schedule="zbv") is first(192, pipeline_schedule="1f1b", chunks=2) is None
    assert first(160, pipeline_schedule="1f1b") is None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"framework": "megatron-core", "pipeline_schedule": "zbv"}, "frameworks that do: .*primus"),
        ({"framework": "torchtitan", "pipeline_schedule": "zbv"}, "compiles blocks"),
        ({"framework": "primus", "pipeline_schedule": "dualpipe-v"}, "frameworks that do: torchtitan-eager"),
        ({"pipeline_schedule": "zbv", "chunks": 3}, "has 2 chunks a stage in Primus, not 3"),
        ({"pipeline_schedule": "zb1p", "chunks": 2}, "has 1 chunk a stage in Primus, not 2"),
        ({"pipeline_schedule": "zbv", "pipeline": 1}, "several pipeline stages"),
        ({"pipeline_schedule": "v-half", "precision": "fp8-current"}, "bf16 or fp16"),
        ({"framework": "torchtitan-eager", "pipeline_schedule": "zbv", "recompute": "full"}, "--recompute none"),
        ({"framework": "torchtitan-eager", "pipeline_schedule": "zb1p", "chunks": 1}, "has 2 chunks or more a stage"),
        ({"pipeline_schedule": "zbv", "model": "deepseek-v3", "gpus": 256}, "multi-token prediction"),
        ({"pipeline_schedule": "zbv", "cuda_graphs": "attn"}, "CUDA graphs"),
    ],
)
def test_what_no_order_can_have_is_refused(more: dict[str, Any], words: str) -> None:
    """With the flag, and why."""
    with pytest.raises(UsageError, match=words) as error:
        _problem(**more)
    assert f"--pipeline-schedule {more['pipeline_schedule']}: " in str(error.value)


def test_other_frameworks_search_as_before() -> None:
    """Megatron-Core and compiled torchtitan have 1F1B alone, Primus compares, the bundled runtime is asked; one that is
    named is the only one."""
    assert _problem(framework=None).compared_orders == ()
    assert _problem(framework="megatron-core").compared_orders == ()
    assert _problem(framework="torchtitan").compared_orders == ()
    assert _problem().compared_orders == ("zb1p", "zbv", "v-half", "v-min")
    assert _problem(recompute="full", framework="torchtitan-eager").compared_orders == ()
    named = _problem(pipeline_schedule="zbv")
    assert (named.compared_orders, named.request.chunks) == ((), 2)
