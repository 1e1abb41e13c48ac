"""What least steps leave out of a search: small spaces of experts against all their candidates, priced one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from axonn_tune.frameworks import find_framework
from axonn_tune.ranking import choosing
from axonn_tune.ranking.choosing import candidates_of, search
from axonn_tune.ranking.space import Problem
from axonn_tune.request import AUTO, Request
from axonn_tune.specs.catalog import load_machine
from tests.unit.cost import test_experts, test_mamba
from tests.unit.small import small_problem

SPACES: dict[str, tuple[str, str, str, float, dict[str, Any], dict[str, Any]]] = {
    "one layer type": ("megatron-core", "perlmutter-80gb", "moe*6", 24.0, {"y": 1}, {}),
    "two layer types, tight": ("megatron-core", "perlmutter-80gb", "dense*2 moe*6", 14.0, {}, {}),
    "merged passes": ("megatron-core", "dgx-h100", "moe*8", 40.0, {"recompute": "none"}, {"expert_overlap": True}),
    "windows": ("megatron-core", "dgx-h100", "near*2 moe*2", 20.0, {"context": 2, "recompute": "none"}, {}),
    "hybrid": ("megatron-core", "dgx-h100", "(mamba moe)*2 attention both*2", 8.0, {"micro_batch": 1}, {}),
    "number formats": ("megatron-core", "dgx-h100", "dense moe*3", 40.0, {"precision": AUTO, "recompute": "full"}, {}),
    "weights gathered": ("torchtitan", "dgx-h100", "dense*2 moe*4", 40.0, {"recompute": "none"}, {}),
}


def space(name: str) -> Problem:
    """One of the spaces, on 8 GPUs with so much memory."""
    framework, machine, layers, memory_gib, asked, step = SPACES[name]
    like = load_machine(machine).document
    small = like.accelerator.model_copy(update={"memory_gib": memory_gib})
    model = (test_mamba if "mamba" in layers else test_experts).model_of(layers)
    return small_problem(
        model,
        like.model_copy(update={"accelerator": small}),
        find_framework(framework).with_step(**step),
        gpus=8,
        batch=16,
        sequence_length=2048,
        request=Request(**asked),
    )


@pytest.mark.parametrize("name", SPACES)
def test_the_first_rows_are_those_of_all_candidates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards least steps: none is above the step of its candidate, and the first ten grids, and the best of each number
    format, have the candidates and the bits that they have where every one is priced by the recurrence."""
    monkeypatch.setattr(choosing, "_balanced", lambda priced, **_: priced)
    problem = space(name)
    some, every = search(problem), candidates_of(problem, top=0, variants=True)
    steps_s = every.columns.iteration_s
    for start, pool in every.columns.pools:
        (least_s, cut_s, *_), (bare_s, *_) = pool.least_s(exchanged=(True, False))
        exact_s = steps_s[start : start + len(pool)]
        assert np.all(least_s <= exact_s * (1 + 1e-9))
        assert np.all(bare_s <= least_s * (1 + 1e-9))
        assert np.all(cut_s[np.isfinite(cut_s)] <= least_s[np.isfinite(cut_s)] * (1 + 1e-9))
    places, best = every.columns.places(every.shapes), dict[int, float]()
    for place, step_s in zip(places.tolist(), steps_s.tolist(), strict=True):
        best[place] = min(step_s, best.get(place, np.inf))
    ranked = sorted(best, key=lambda place: best[place])
    found = [some[position].iteration_s for position in range(min(10, len(some)))]
    assert found == [best[place] for place in ranked[: len(found)]]
    assert len(some) <= len(best)
    assert candidates_of(problem, top=10, variants=False).columns.pending.any() or len(some) < 10
    for number, row in enumerate(some.best_by_format.values()):
        mine = steps_s[every.columns.precision == number]
        assert row.iteration_s == mine.min()
    last = some.rows[-1]
    assert last.iteration_s == pytest.approx(last.detail.iteration_s, rel=1e-12)
