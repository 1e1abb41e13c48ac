"""Computation beside dispatch and combine: merged passes of two micro-batches, shared experts, what excludes them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from axonn_tune.cost.price import Detail, price
from axonn_tune.cost.spans import MERGED, predicted_spans
from axonn_tune.cost.work import hidden_behind
from axonn_tune.errors import UsageError
from axonn_tune.frameworks import find_framework
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.program.pipeline import held_of_chunks
from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.documents import detailed, inputs_of
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.ranking.priced import Priced
from axonn_tune.report.commands import layout_pins
from axonn_tune.report.ranking import page_axes
from axonn_tune.request import Request
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.machine import Software
from axonn_tune.specs.workload import Workload
from tests.cli.running import good
from tests.unit.cost.test_experts import MEGATRON, model_of
from tests.unit.small import small_problem

MACHINE = load_machine("dgx-h100").document.model_copy(
    update={
        "accelerator": load_machine("dgx-h100").document.accelerator.model_copy(
            update={"contention": 0.0, "memory_gib": 400.0}
        )
    }
)
# A host that is never late: what the streams can do.
CORE = replace(find_framework("megatron-core"), expert_software="")


def _priced(chunks: int = 1, recompute: str = "none", batch: int = 64, pipeline: int = 1, **step: Any) -> Detail:
    """EP 16 over two nodes, forced load balancing, no slowdown of computation."""
    framework = CORE.with_step(imbalance=1.0, **step)
    job = Job(model_of("moe*8"), MACHINE, Workload(global_batch=batch, sequence_length=2048), framework)
    grid = Grid(data=16, expert=8, pipeline=pipeline, order=MEGATRON)
    return price(job, Layout(grid, 1, recompute, 0, chunks=chunks))  # type: ignore[arg-type]


def _sent_s(priced: Detail) -> float:
    return sum(term.seconds for term in priced.terms if term.collective.routing is not None)


@pytest.mark.parametrize("dispatcher", ["alltoall", "deepep", "hybridep"])
@pytest.mark.parametrize(("pipeline", "chunks"), [(1, 1), (2, 2), (4, 2)])
def test_overlap_is_bounded_by_both_streams(dispatcher: str, pipeline: int, chunks: int) -> None:
    """Never slower than without; never faster than computation alone, nor than tokens alone take.

    On the last of p stages with v chunks, (v - 1)·p + 1 of v·m forwards (m = 32) are before the first backward pass.
    """
    given: dict[str, Any] = {"pipeline": pipeline, "chunks": chunks, "dispatcher": dispatcher, "batch": 16 * 32}
    without, merged = _priced(**given), _priced(**given, expert_overlap=True)
    assert merged.iteration_s < without.iteration_s
    assert merged.iteration_s >= merged.compute_s
    assert merged.iteration_s >= _sent_s(merged)
    hidden = without.iteration_s - merged.iteration_s
    assert hidden <= _sent_s(without) * (1 - ((chunks - 1) * pipeline + 1) / (chunks * 32)) * (1 + 1e-9)
    exposed = sum(term.exposed_s for term in merged.terms if term.collective.routing is not None)
    assert exposed < _sent_s(merged) == pytest.approx(_sent_s(without))


def test_traces_end_with_the_step_and_name_the_dispatcher() -> None:
    """Merged micro-batches are one span each, on the compute stream; the first and the last pass are spelled out."""
    priced = _priced(dispatcher="deepep", batch=16 * 4, expert_overlap=True)
    spans = predicted_spans(priced)
    assert max(span.end_s for span in spans) == pytest.approx(priced.iteration_s)
    assert sum(span.name == MERGED for span in spans) == 3
    assert {span.details["dispatcher"] for span in spans if span.name.startswith("dispatch ")} == {"deepep"}
    sent = next(term for term in priced.terms if term.op == "dispatch")
    assert hidden_behind(sent, priced.job.workload) == "another micro-batch, or shared experts"


def test_a_late_host_is_never_hidden() -> None:
    """Each further micro-batch takes at least its time to issue, which is linear in that of an operation; the gradient
    buckets of the last one, on the stream of dispatch and combine, make no room for more overlap in the others."""
    job = _priced(dispatcher="hybridep", expert_overlap=True).job
    layout = Layout(Grid(data=16, expert=8, order=MEGATRON), 1, "none", 0)

    def more_s(dispatch_us: float) -> float:
        few, many = (replace(job, workload=job.workload.model_copy(update={"global_batch": 16 * n})) for n in (2, 3))
        software = Software(dispatch_us=dispatch_us)
        return price(many, layout, software=software).iteration_s - price(few, layout, software=software).iteration_s

    each_s, late_s = (more_s(2000.0) - more_s(1000.0)) / 1000.0, more_s(2000.0)
    assert more_s(20.0) > late_s - each_s * 1980.0
    for dispatch_us in (68.0, 76.0, 84.0):
        assert more_s(dispatch_us) >= (late_s - each_s * (2000.0 - dispatch_us)) * (1 - 1e-9)


def test_a_host_that_drives_transfers_issues_nothing_meanwhile() -> None:
    """Guards steps of late hosts: beside another micro-batch only ports whose transfers it drives hold it up."""
    layout = Layout(Grid(data=16, expert=8, order=MEGATRON), 1, "none", 0)

    def unissued_s(dispatcher: str) -> tuple[float, float]:
        """What of a step does not grow with the time to issue an operation, and all dispatch and combine, s."""
        job = _priced(dispatcher=dispatcher, expert_overlap=True).job
        one, two = (price(job, layout, software=Software(dispatch_us=us)) for us in (4e3, 8e3))
        return 2.0 * one.iteration_s - two.iteration_s, _sent_s(one)

    free_s, _ = unissued_s("hybridep")
    assert unissued_s("deepep")[0] == pytest.approx(free_s)
    port_s, sent_s = unissued_s("deepep-uccl")
    assert port_s == pytest.approx(free_s + sent_s)


def test_delayed_weight_gradients_never_lose() -> None:
    """They fill the combine of gradients."""
    delayed = _priced(dispatcher="alltoall", expert_overlap=True, delayed_weight_gradients=True)
    assert delayed.iteration_s <= _priced(dispatcher="alltoall", expert_overlap=True).iteration_s


def test_one_micro_batch_has_nothing_beside_it() -> None:
    """The first forward and the last backward pass are all there are."""
    assert _priced(batch=16, expert_overlap=True).iteration_s == _priced(batch=16).iteration_s


@pytest.mark.parametrize("given", [{"recompute": "full"}, {"recompute": "moe"}, {"pipeline": 2, "chunks": 1}])
def test_layouts_that_cannot_overlap_are_as_without(given: dict[str, Any]) -> None:
    """Repeated dispatch, and stages that are not interleaved."""
    merged = _priced(**given, expert_overlap=True)
    assert merged.iteration_s == _priced(**given).iteration_s
    assert not merged.expert_overlap


def test_one_more_micro_batch_is_held() -> None:
    """First of two stages of two chunks: 2·1 + 2 warm-up forwards, the one before the first backward, and one more."""
    held = [sum(held_of_chunks(0, stages=2, micro_batches=8, weights=(1, 1), more=more)) for more in (0, 1)]
    assert held == [5, 6]
    given: dict[str, Any] = {"pipeline": 2, "chunks": 2, "batch": 16 * 32}
    assert _priced(**given, expert_overlap=True).memory_bytes > _priced(**given).memory_bytes


def test_shared_experts_run_beside_tokens() -> None:
    """Some of dispatch is hidden, at most what shared experts compute; their GEMMs are the same."""
    without, beside = (_priced(dispatcher="alltoall", shared_expert_overlap=one) for one in (False, True))
    assert without.iteration_s > beside.iteration_s
    assert beside.compute_s == pytest.approx(without.compute_s)
    assert beside.communication_s == pytest.approx(without.communication_s)


def test_candidates_that_overlap_cost_what_each_does_alone() -> None:
    """Guards the columns: the same to the last bit, with stages and without."""
    step = CORE.with_step(expert_overlap=True, shared_expert_overlap=False)
    ranked = search(small_problem(model_of("moe*4"), MACHINE, step, gpus=8, batch=8, sequence_length=2048), top=0)
    assert any(ranked[place].expert_overlap for place in range(len(ranked)))
    for place in range(0, len(ranked), max(len(ranked) // 12, 1)):
        row, alone = ranked[place], ranked.detail(place)
        assert row.iteration_s == alone.iteration_s, row.layout
        assert row.memory_bytes == pytest.approx(alone.memory_bytes, rel=1e-12)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"model": "5b"}, "5b has no experts"),
        ({"framework": "torchtitan"}, "torchtitan has no such overlap; it is in megatron-core"),
        ({"ep": 1}, "needs EP above 1"),
        ({"pp": 2, "vpp": 1}, "needs interleaved stages"),
        ({"pp": 32}, "needs interleaved stages.*has 32 layers for 32"),
        ({"recompute": "full"}, "excludes --recompute full"),
        ({"recompute": "moe"}, "excludes --recompute moe"),
        ({"dispatcher": "allgather"}, "all-gathers cannot overlap"),
        ({"cuda_graphs": "mlp"}, "excludes CUDA graphs of mlp"),
        ({"set": {"step.shared_expert_overlap": True}}, "step.shared_expert_overlap excludes it"),
        ({"expert_overlap": False, "set": {"step.delayed_weight_gradients": True}}, "needs --expert-overlap"),
    ],
)
def test_what_excludes_overlap_is_named(given: dict[str, Any], why: str) -> None:
    """As Megatron-Core refuses it."""
    names = {"ep": "expert", "pp": "pipeline", "vpp": "chunks"}
    asked = {"model": "mixtral-8x7b", "framework": "megatron-core", "expert_overlap": True} | given
    request = Request(gpus=64, machine="dgx-h100", **{names.get(name, name): one for name, one in asked.items()})
    with pytest.raises(UsageError, match=why):
        load_inputs(request)


def _places(ranked: Priced, count: int) -> list[tuple[float, bool]]:
    """Steps of the first rows, and whether they overlap; every row is priced again alone."""
    for place in range(count):
        detail = ranked.detail(place)
        assert ranked[place].iteration_s == detail.iteration_s, ranked[place]
        assert ranked[place].memory_bytes == pytest.approx(detail.memory_bytes, rel=1e-12)
        assert detail.memory_bytes <= detail.memory_limit_bytes
    return [(ranked[place].iteration_s, ranked[place].expert_overlap) for place in range(count)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "given",
    [
        pytest.param(
            {"model": "qwen3-30b-a3b", "machine": "dgx-h100", "gpus": 32, "batch": 256, "expert": 8},
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"model": "gpt-oss-20b", "machine": "dgx-h100", "gpus": 16, "batch": 256}, marks=pytest.mark.nightly
        ),
        {"model": "qwen3-30b-a3b", "machine": "dgx-h100", "gpus": 16, "batch": 256, "pipeline": 2, "expert": 8},
        pytest.param({"model": "deepseek-v3", "machine": "dgx-h200", "gpus": 256}, marks=pytest.mark.nightly),
    ],
)
def test_a_search_has_the_better_of_layouts_with_overlap_and_without(given: dict[str, Any]) -> None:
    """Guards the bounds by which few layouts are priced both ways: its first grids are the best of two whole searches,
    with every exchange of context parallelism, of which windows (gpt-oss) leave but one."""
    asked = {"framework": "megatron-core"} | given
    found, *each = (
        search(load_inputs(Request(**asked, expert_overlap=overlap)).problem, top=20) for overlap in (None, False, True)
    )
    best = dict[tuple[int, ...], tuple[float, bool]]()
    for ranked in each:
        for place in range(min(20, len(ranked))):
            detail = ranked.detail(place)
            grid = tuple(detail.grid.by_axis.values())
            best[grid] = min(best.get(grid, (math.inf, False)), (detail.iteration_s, detail.expert_overlap))
    first = sorted(best.values())[:10]
    assert [step_s for step_s, _ in _places(found, 10)] == [step_s for step_s, _ in first]
    assert any(overlap for _, overlap in best.values())


@pytest.mark.parametrize(
    ("given", "compared"),
    [
        ({}, True),
        ({"recompute": "full"}, False),
        ({"expert": 1}, False),
        ({"expert_overlap": True}, False),
        ({"expert_overlap": False}, False),
        ({"framework": "torchtitan"}, False),
        ({"pipeline": 4, "chunks": 1}, False),
        ({"model": "deepseek-v2", "set": {"step.shared_expert_overlap": True}}, False),
        ({"x": 1, "z": 1, "pipeline": 1, "context": 1, "expert": 16, "expert_tensor": 1, "data": 16}, True),
        ({"rank_by": "communication"}, False),
    ],
)
def test_overlap_is_compared_where_nobody_says_whether(given: dict[str, Any], *, compared: bool) -> None:
    """Not where it is asked for or pinned away, or cannot be; but where every axis is pinned."""
    asked: dict[str, Any] = {"framework": "megatron-core"} | given
    problem = load_inputs(
        Request(asked.pop("model", "qwen3-30b-a3b"), gpus=16, machine="dgx-h200", batch=128, **asked)
    ).problem
    assert problem.compares_expert_overlap == compared


def test_a_layout_with_overlap_is_asked_for_again_by_its_options(tmp_path: Path) -> None:
    """What a ranking chose is priced alike from its commands and its documents, and written as the framework's
    argument; the ranking says what it saves."""
    words = "--framework megatron-core --gpus 32 --model qwen3-30b-a3b --machine dgx-h100 --batch 256 --pp 1 --tp 1"
    document = json.loads(good(f"{words} --format json").out)
    first = document["configs"][0]
    assert first["expert_overlap"] is True
    assert any(
        "#1: dispatch and combine overlap with" in said and " s a step, " in said for said in document["remarks"]
    )
    inputs = inputs_of(document, source="a ranking")
    again = detailed(first, inputs)
    assert again is not None
    assert again.priced.iteration_s == first["iteration_s"]
    framework = inputs.problem.framework
    pins = layout_pins(framework, page_axes(framework, [first]), first)
    pinned = json.loads(good(f"{words} {' '.join(pins)} --format json").out)["configs"][0]
    assert pinned["iteration_s"] == first["iteration_s"]
    without = " ".join(pins).replace("--expert-overlap", "--no-expert-overlap")
    assert json.loads(good(f"{words} {without} --format json").out)["configs"][0]["iteration_s"] > first["iteration_s"]
    good(f"{words} -o {tmp_path / 'run.sh'}")
    assert "--overlap-moe-expert-parallel-comm" in (tmp_path / "run.sh").read_text(encoding="utf-8")
    refused = json.loads(good(f"{words} --no-expert-overlap --format json").out)["configs"][0]
    assert not refused.get("expert_overlap")
