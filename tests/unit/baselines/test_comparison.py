"""The comparison of 4D with its alternatives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from axonn_tune.baselines.comparison import Comparison, Contender, compare
from axonn_tune.baselines.paper import claims, paper_step_flops
from axonn_tune.errors import NothingFeasibleError
from axonn_tune.ranking.space import Limits, Problem, search
from axonn_tune.units import TERA
from tests.unit.baselines.cases import machine, model, workload

PROBLEM = Problem(model("5b"), machine("perlmutter"), workload(256), gpus=64)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """5b on 64 GPUs."""
    return compare(PROBLEM)


def named(comparison: Comparison, key: str) -> Contender:
    """One contender."""
    return next(each for each in comparison.contenders if each.key == key)


def test_4d_is_the_fastest_of_its_own_algebra(comparison: Comparison) -> None:
    """Guards the searches: FSDP, HSDP and data parallelism are grids of the same search, so none can be faster."""
    for key in ("fsdp", "hsdp", "data-parallel"):
        gain = comparison.gain(named(comparison, key))
        assert gain is None or gain >= -1e-12
    best = search(replace(PROBLEM, rank_by="iteration")).candidate(0)
    found = named(comparison, "4d").prediction
    assert found is not None
    assert found.iteration_s == pytest.approx(best.iteration_s)


def test_each_alternative_is_of_its_kind(comparison: Comparison) -> None:
    """Guards the names: what is called FSDP shards over all, HSDP over some, data parallelism over none."""
    fsdp, hsdp = named(comparison, "fsdp").prediction, named(comparison, "hsdp").prediction
    assert fsdp is not None
    assert fsdp.layout == "x=1 y=1 z=64 data=1"
    assert hsdp is not None
    assert hsdp.layout.startswith("x=1 y=1 z=")
    assert not hsdp.layout.endswith("data=1")


def test_what_does_not_fit_says_how_much_it_needs(comparison: Comparison) -> None:
    """Guards messages: 5b with 16 bytes a parameter is too much for 40 GB, and the numbers are there."""
    plain = named(comparison, "data-parallel")
    assert plain.prediction is None
    assert plain.infeasible.startswith("needs ")
    assert " of " in plain.infeasible
    assert plain.endless_memory is not None


def test_parts_add_up(comparison: Comparison) -> None:
    """Guards what is printed side by side: computation, exposed communication and bubble are the step."""
    for contender in comparison.contenders:
        found = contender.prediction
        if found is not None:
            parts = found.compute_s + found.exposed_communication_s + found.bubble_s
            assert found.iteration_s == pytest.approx(parts)
            assert sum(share for _, share in found.limits()) < 1.0


def test_endless_memory_is_never_slower(comparison: Comparison) -> None:
    """Guards the second searches: taking a limit away cannot hurt."""
    for contender in comparison.contenders:
        if contender.prediction is not None:
            assert contender.endless_memory is not None
            assert contender.endless_memory.iteration_s <= contender.prediction.iteration_s + 1e-12


def test_overlap_never_hurts(comparison: Comparison) -> None:
    """Guards the line on overlap: the same configuration, all waits where they are issued, is no faster."""
    assert comparison.overlap is not None
    assert comparison.overlap.gain >= 0.0


def test_without_overlap_nobody_overlaps(comparison: Comparison) -> None:
    """Guards --no-overlap: Megatron-LM hides nothing either, and the line on overlap still compares off with on."""
    waiting = compare(replace(PROBLEM, workload=workload(256).model_copy(update={"overlaps": ()})))
    for key in ("4d", "megatron-lm"):
        off, on = named(waiting, key).prediction, named(comparison, key).prediction
        assert off is not None
        assert on is not None
        assert off.iteration_s > on.iteration_s
    hidden = named(waiting, "megatron-lm").prediction
    assert hidden is not None
    assert all(part.exposed_s == part.seconds for part in hidden.traffic)
    assert waiting.overlap is not None
    assert waiting.overlap.gain > 0.0


def test_pins_hold_for_all() -> None:
    """Guards --recompute and --micro-batch, which set both frameworks to the same."""
    pinned = compare(replace(PROBLEM, limits=Limits(recompute="full", micro_batch=1)))
    found = [each.prediction for each in pinned.contenders if each.prediction is not None]
    assert len(found) >= 3
    assert {(each.recompute, each.micro_batch) for each in found} == {("full", 1)}


def test_nothing_feasible_names_every_reason() -> None:
    """Guards the empty answer: one error with the reason of each contender."""
    with pytest.raises(NothingFeasibleError, match=r"Megatron-LM: .*memory.*data parallel: needs"):
        compare(replace(PROBLEM, model=model("80b"), gpus=4, workload=workload(4)))


def test_papers_count_gives_the_papers_share() -> None:
    """Guards the formula by a published row: 76.1B on 1,024 A100 in 16.058 s is 140 TFLOP/s (2104.04473, table 1)."""
    published = model("80b").model_copy(update={"layers": 60, "hidden": 10240, "ffn": 40960, "heads": 80})
    published = published.model_copy(update={"kv_heads": 80})
    flops = paper_step_flops(published, workload(1792))
    assert flops is not None
    assert flops / 16.058 / 1024 / TERA == pytest.approx(140, abs=0.5)
    assert paper_step_flops(model("llama3-8b"), workload()) is None


def test_claims_are_printed_only_where_they_were_measured() -> None:
    """Guards the paper's numbers: that model, that many GPUs, that machine."""
    assert [claim.value for claim in claims(model("80b"), machine_name="perlmutter", gpus=1024)] == [0.26, 0.57]
    assert [claim.value for claim in claims(model("20b"), machine_name="perlmutter-80gb", gpus=64)] == [0.53]
    assert not claims(model("80b"), machine_name="perlmutter", gpus=512)
    assert not claims(model("80b"), machine_name="frontier", gpus=1024)
