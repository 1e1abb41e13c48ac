"""What is said about a ranking: true, and in words."""

from __future__ import annotations

from typing import Any

import axonn_tune
from axonn_tune.cost.evidence import LARGEST
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.ranking.results import Results, run_search
from axonn_tune.report import ranking
from axonn_tune.request import Request


def results(gpus: int = 256, model: str = "20b", **given: Any) -> Results:
    """Results of a search."""
    return run_search(load_inputs(Request(model, gpus=gpus, **given)))


def test_the_shortest_step_stands_below_the_ranked_ones_once() -> None:
    """Guards the marked row: under the ranked rows, in place where it is one of them, absent where it is #1's."""
    found = results(gpus=4096, model="80b", machine="dgx-h100")
    best = found.ranked.fastest()
    assert best is not None
    shown = ranking.with_shortest(found, found.listed(top=3))
    assert (len(shown), shown[-1].iteration_s, shown[-1].feasible) == (4, best.iteration_s, True)
    ranks = [row["marked_rank"] for row in ranking.ranking_table(found, shown).rows]
    assert [rank.strip()[-1] for rank in ranks].count(ranking.SHORTEST) == 1
    assert ranks[-1].strip() == ranking.SHORTEST
    assert "rejected_because" not in ranking.ranking_table(found, shown).names
    assert ranking.ranking_document(found, shown)["shortest_step"]["iteration_s"] == best.iteration_s
    assert ranking.with_shortest(found, shown) == shown
    assert ranking.with_shortest(fastest := results(rank_by="iteration"), fastest.listed(top=2))[-1].rank == 2


def test_one_row_needs_no_comparison() -> None:
    """Guards the smallest rankings: one feasible configuration, and none."""
    alone = results(x=1, y=1, z=256, data=1)
    assert len(alone.ranked) == 1
    assert ranking.why_first(alone) == "Only one configuration with these pins is feasible."
    nothing = results(gpus=1)
    assert len(nothing.ranked) == 0
    assert ranking.ranking_remarks(nothing)


def test_what_no_published_step_validates_is_marked() -> None:
    """Guards marks: 64k GPUs and an accelerator without a row, in the table, in JSON and in one remark."""
    found = axonn_tune.search("320b", gpus=65536, machine="frontier", rank_by="step", recompute="full")
    said = ranking.outside_remark(found.results)
    assert all("°" in row[0] for row in ranking.ranking_table(found.results, found.results.listed(top=3)).cells)
    assert found.to_dict()["configs"][0]["outside_evidence"] == ["gpus", "accelerator"]
    assert f"largest number of GPUs in the data: {LARGEST['gpus']:,}" in said
    assert "MI250X GCD: the data has A100, GB200, H100, V100" in said
    inside = axonn_tune.search("20b", gpus=64, machine="perlmutter")
    assert "°" not in str(inside)
    assert inside.to_dict()["configs"][0]["outside_evidence"] == []
