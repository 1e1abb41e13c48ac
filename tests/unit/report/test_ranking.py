"""What is said about a ranking: true, and in words."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import axonn_tune
from axonn_tune.cost.evidence import LARGEST
from axonn_tune.frameworks import find_framework
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.ranking.results import Results, run_search
from axonn_tune.report import ranking
from axonn_tune.request import Request
from axonn_tune.units import show_seconds


def results(gpus: int = 256, model: str = "20b", **given: Any) -> Results:
    """Results of a search."""
    return run_search(load_inputs(Request(model, gpus=gpus, **given)))


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


def test_bars_are_for_terminals() -> None:
    """Guards logs: a bar as long as its step where a terminal has room, none without one or with chosen columns."""
    found = results()
    entries = found.listed(top=3)
    plain = ranking.ranking_table(found, entries)
    wide = ranking.ranking_table(found, entries, terminal=plain.width + 2 + 20)
    steps = [entry.iteration_s or 0.0 for entry in entries]
    for step_s, row in zip(steps, wide.cells, strict=True):
        drawn = row[-1].count("█") + row[-1].count("░")
        assert drawn == pytest.approx(20 * step_s / max(steps), abs=1.0)
    assert "bar" not in plain.names
    assert "bar" not in ranking.ranking_table(found, entries, terminal=plain.width + 5).names
    assert plain.width <= 100


def test_ties_are_marked_and_three_named() -> None:
    """Guards ties: marked on every row but the first, and at most three are named."""
    found = results(gpus=64, model="llama3-70b", machine="dgx-h100", framework=find_framework("megatron-core"))
    assert found.ranked.ties == 19
    marks = ["≈" in row[0] for row in ranking.ranking_table(found, found.listed(top=10)).cells]
    assert marks == [False, *[True] * 9]
    said = ranking.ties_remark(found)
    assert "#2 to #19 are within model error of #1" in said
    assert said.endswith("benchmark #1, #2 and #3 first.")


def test_the_interval_is_in_two_parts() -> None:
    """Guards the one line on the interval: its ends, what is common to all rows and what is particular to the first."""
    found = results()
    first, widths = found.ranked.entry(0, terms=False), found.inputs.problem.machine.uncertainty
    said = ranking.interval_remark(found)
    common = f"(±{widths.compute:.0%}) and of scale are common to all rows"
    waiting_s, step_s = first.exposed_communication_s or 0.0, first.iteration_s or 0.0
    own_s = ((waiting_s * widths.communication) ** 2 + (0.04 * 1.2816 * step_s) ** 2) ** 0.5
    assert common in said
    assert f"±{show_seconds(own_s)} is #1's own" in said
    assert f"80% interval {show_seconds(first.low_s or 0.0)} to {show_seconds(first.high_s or 0.0)}" in said


def test_steps_closer_than_layouts_scatter_are_ties() -> None:
    """Guards ties by step: what layouts have by themselves counts, also where no communication is exposed."""
    found = results(rank_by="iteration")
    entries, ties = found.listed(top=0), found.ranked.ties
    steps = [entry.iteration_s or 0.0 for entry in entries]
    assert steps[ties - 1] < 1.11 * steps[0]
    assert steps[ties] > 1.072 * steps[0]


def test_rejections_are_counted() -> None:
    """Guards the counts: rejected and ranked grids are all grids."""
    found = results(gpus=1024, model="80b")
    said = ranking.rejected_remark(found)
    left_out = found.ranked.searched.grids - len(found.ranked)
    assert said.startswith(f"{left_out} of {found.ranked.searched.grids} grids are rejected: ")
    assert len(found.ranked.rejected_entries()) == left_out


@pytest.mark.parametrize(
    ("framework", "words"),
    [("deepspeed", "zero3 with pp"), ("axonn", "G_intra_r above 1"), ("megatron-core", "heads not divisible by TP")],
)
def test_rejections_are_in_the_names_of_the_framework(framework: str, words: str) -> None:
    """Guards the words: axes as the framework calls them, and no identifier of a constraint."""
    said = ranking.rejected_remark(results(gpus=64, model="20b", framework=find_framework(framework)))
    assert words in said
    assert f"{framework}-" not in said


def test_long_sequences_name_frameworks_with_context_parallelism() -> None:
    """Guards the hint: for long sequences alone, and not where there is such an axis."""
    long = Request("llama3-8b", gpus=64, machine="dgx-h100", batch=64, seq=65536)
    found = load_inputs(long).problem
    assert "--framework megatron-core or torchtitan" in ranking.context_remark(found)
    assert ranking.context_remark(load_inputs(replace(long, framework="torchtitan")).problem) == ""
    assert ranking.context_remark(load_inputs(Request("llama3-8b", gpus=64)).problem) == ""


def test_ties_are_said_with_their_reason() -> None:
    """Guards ties: their number, and the uncertainty they come from."""
    found = results()
    u = found.inputs.problem.machine.uncertainty.communication
    assert (
        f"are within model error (communication ±{u:.0%}, each layout's step ±5%): benchmark "
        in ranking.ties_remark(found)
    )


def test_the_head_of_a_table_says_what_was_priced() -> None:
    """Guards the context of the numbers, also without remarks: model, machine, workload, and what is ranked by."""
    found = results(gpus=1024, model="80b")
    assert ranking.ranking_remarks(found)[0] == "#1 also has the shortest step of all."
    assert ranking.ranking_table(found, found.listed(top=1)).title == (
        "80b on 1,024 × perlmutter (A100-SXM4-40GB) with the bundled 4D runtime, 8,192 sequences of 2,048 tokens in "
        "bf16; ranked by communication per step, overlapped or not."
    )
    assert "ranked by step time." in ranking.priced_remark(results(rank_by="iteration"))
    paper = run_search(load_inputs(Request("20b", gpus=64)), costs=("paper",))
    assert ranking.priced_remark(paper).endswith(
        "by --cost paper. Exposed communication, step and memory: by alpha-beta, "
        "for the fastest candidate with the same grid and rank order."
    )


def test_the_shortest_step_is_that_of_all_candidates() -> None:
    """Guards the pointer to --rank-by iteration: the configuration it would put first, and what that saves."""
    alone = ("accelerator.contention=0",)
    found, fastest = results(set=alone), results(rank_by="iteration", set=alone)
    first, best = (one.ranked.entry(0, terms=False) for one in (found, fastest))
    assert first.iteration_s is not None
    assert best.iteration_s is not None
    x, y, z, data = best.sizes
    said = ranking.shortest_step_remark(found)
    assert f"{1 - best.iteration_s / first.iteration_s:.0%} less than #1's" in said
    order = f", rank order {','.join(best.wide_order)}" if len(best.wide_order) > 1 else ""
    batching = f"micro-batch {best.micro_batch}, recompute {best.recompute}"
    assert f"'s grid with x={x} y={y} z={z} data={data}{order}, {batching}. " in said
    assert said.endswith(" --rank-by step ranks by it.")
    assert ranking.shortest_step_remark(fastest) == ""


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


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (-0.5, "#1's step is within 1% of the"),
        (0.0, "#1 also has the shortest step"),
        (0.009, "#1's step is within 1% of the"),
    ],
)
def test_small_gains_are_not_named(gain: float, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the line against noise: no other configuration is named when the shortest step is hardly shorter."""
    found = results(gpus=64)
    first = found.ranked.entry(0, terms=False)
    best = replace(first, iteration_s=(first.iteration_s or 0.0) * (1 - gain))
    monkeypatch.setattr(type(found.ranked), "fastest", lambda self: best)
    assert ranking.shortest_step_remark(found).startswith(words)


def test_one_is_not_many() -> None:
    """Guards grammar: one grid, one candidate."""
    one = results(gpus=1, model="llama3-8b", machine="dgx-h200")
    assert ranking.rejected_remark(one) == "The only grid is feasible."
    assert ranking.rejected_remark(results(gpus=1)).startswith(
        "1 of 1 grid is rejected: 1 out of memory; --all lists it."
    )
    assert "llama3-8b on 1 × dgx-h200" in ranking.priced_remark(one)


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
