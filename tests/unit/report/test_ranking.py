"""What is said about a ranking: true, and in words."""

from __future__ import annotations

import re
from typing import Any

import pytest

import axonn_tune
from axonn_tune.cost.evidence import LARGEST
from axonn_tune.frameworks import find_framework
from axonn_tune.ranking.inputs import Choices, load_inputs
from axonn_tune.ranking.results import Results, run_search
from axonn_tune.ranking.space import Limits
from axonn_tune.report import ranking


def results(gpus: int = 256, model: str = "20b", **given: Any) -> Results:
    """Results of a search."""
    return run_search(load_inputs(Choices(gpus=gpus, model=model, **given)))


@pytest.mark.parametrize(
    ("rank_by", "key"),
    [("communication", "communication_s"), ("exposed", "exposed_communication_s"), ("iteration", "iteration_s")],
)
def test_why_the_first_is_first(rank_by: Any, key: str) -> None:
    """Guards the reason: the difference is that of the metric, and its largest part is named first."""
    found = results(rank_by=rank_by)
    first, second = (found.ranked.entry(position, terms=True) for position in (0, 1))
    said = ranking.why_first(found)
    stated = re.match(r"#1 beats #2 by ([\d.]+) (µs|ms|s) of", said)
    assert stated, said
    less_s = float(stated[1]) * {"µs": 1e-6, "ms": 1e-3, "s": 1.0}[stated[2]]
    assert less_s == pytest.approx(getattr(second, key) - getattr(first, key), rel=6e-3)
    parts = [float(sign + number) * UNITS[unit] for sign, number, unit in SIGNED.findall(said.partition(":")[2])]
    savings, costs = [part for part in parts[:-1] if part < 0], [part for part in parts[:-1] if part > 0]
    assert parts[:-1] == [*sorted(savings), *sorted(costs, reverse=True)]
    assert -sum(parts) == pytest.approx(less_s, abs=0.02 * sum(map(abs, parts)))


SIGNED = re.compile(r"(?:^| )([-+])([\d.]+) (µs|ms|s) ")
UNITS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}


def test_ties_are_marked_and_three_named() -> None:
    """Guards ties: marked on every row but the first, and at most three are named."""
    found = results(gpus=64, model="llama3-70b", machine="dgx-h100", framework=find_framework("megatron-core"))
    assert found.ranked.ties == 19
    marks = ["≈" in row[0] for row in ranking.ranking_table(found, found.listed(top=10)).cells]
    assert marks == [False, *[True] * 9]
    said = ranking.ties_remark(found)
    assert "#2 to #19 are within model error of #1" in said
    assert said.endswith("benchmark #1, #2 and #3 first.")


def test_steps_closer_than_layouts_scatter_are_ties() -> None:
    """Guards ties by step: what layouts have by themselves counts, also where no communication is exposed."""
    found = results(rank_by="iteration")
    entries, ties = found.listed(top=0), found.ranked.ties
    steps = [entry.iteration_s or 0.0 for entry in entries]
    assert steps[ties - 1] < 1.11 * steps[0]
    assert steps[ties] > 1.072 * steps[0]


@pytest.mark.parametrize(
    ("framework", "words"),
    [("deepspeed", "zero3 with pp"), ("axonn", "G_intra_r above 1"), ("megatron-core", "heads not divisible by TP")],
)
def test_rejections_are_in_the_names_of_the_framework(framework: str, words: str) -> None:
    """Guards the words: axes as the framework calls them, and no identifier of a constraint."""
    said = ranking.rejected_remark(results(gpus=64, model="20b", framework=find_framework(framework)))
    assert words in said
    assert f"{framework}-" not in said


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
    alone = results(limits=Limits(axes={"x": 1, "y": 1, "z": 256, "data": 1}))
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
