"""Where an explanation counts memory of experts."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from axonn_tune.cost.compute import ELEMENT_WISE, GEMMS
from axonn_tune.cost.price import Detail, price
from axonn_tune.cost.work import HOST, work_by_kind
from axonn_tune.grid import ALL_AXES
from axonn_tune.ranking.choosing import run_search
from axonn_tune.ranking.compare import REST, causes, compare
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.report.explain import gap_to_peak, sections
from axonn_tune.report.learning import better_section
from axonn_tune.report.pipeline_map import MEMORY_GROUPS, stage_rows
from axonn_tune.report.remarks import format_words, merged_remark
from axonn_tune.request import Request

OVERLAPPED = {"model": "qwen3-30b-a3b", "machine": "dgx-h100", "framework": "megatron-core", "expert_overlap": True}


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"gpus": 8, "expert": 8, "pipeline": 1, "recompute": "none"}, ""),
        ({"gpus": 8, "expert": 8, "pipeline": 1, "chunks": 1, "batch": 8}, "recompute full repeats experts"),
        ({"gpus": 32, "pipeline": 8, "chunks": 3, "micro_batch": 1, "batch": 64}, "EP is 1"),
    ],
)
def test_an_expert_overlap_without_effect_is_said_with_its_reason(asked: dict[str, Any], why: str) -> None:
    """Guards `explain --expert-overlap` of a layout that has none: the reason is that layout's."""
    ranked = run_search(load_inputs(Request(**OVERLAPPED, **asked)).problem)
    assert merged_remark(ranked, 0) == (why and f"--expert-overlap changes nothing here: {why}.")
    assert ranked[0].expert_overlap == (why == "")


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (1.0, "takes 10 s, as long as this run does: 10 s."),
        (1.0004, "takes 10 s, as long as this run does: 10 s."),
        (0.9, "takes 9 s, 10.0% less than this run's 10 s."),
        (1.02, "takes 10.2 s, 2.0% more than this run's 10 s."),
    ],
)
def test_a_best_layout_beside_a_run_is_longer_shorter_or_as_long(times: float, words: str) -> None:
    """Guards a difference that no percentage shows: it is none."""
    ranking = Mock(is_feasible=lambda _: True)
    command = Mock(best_s=10.0 * times, rank=1, layouts="3 layouts", ranking=ranking, changes=())
    found = better_section(command, Mock(iteration_s=10.0, memory_bytes=1.0, memory_limit_bytes=2.0))
    assert found.sentences[0].endswith(f"the best that fits {words}")


def _explained(precision: str | None = None) -> Detail:
    """Mixtral 8x7B on two nodes of 8: TP 2, DP 8; experts by ETP 2, EP 4, and two replicas."""
    axes = {"x": 2, "z": 1, "context": 1, "pipeline": 1, "expert": 4, "expert_tensor": 2}
    request = Request("mixtral-8x7b", gpus=16, machine="dgx-h200", framework="megatron-core", micro_batch=1, **axes)
    return run_search(load_inputs(replace(request, precision=precision)).problem).detail(0)


@pytest.mark.parametrize("precision", [None, "fp8-current"])
def test_memory_of_experts_is_with_that_of_other_weights(precision: str | None) -> None:
    """Experts of a rank are 8/4/2 of 3·4096·14336 in each of 32 layers: their FP32 gradients are no temporaries."""
    priced = _explained(precision)
    (row,) = stage_rows(priced)
    elements = 32 * 3 * 4096 * 14336
    assert elements * 4 < row["gradients"] < elements * 5
    assert row["weights"] > elements * (2 if precision is None else 3)
    # Master weights and two moments in FP32, over two expert replicas.
    assert elements * 6 < row["optimizer states"] < elements * 7
    assert sum(row[group] for group in MEMORY_GROUPS) == pytest.approx(row["total"])
    assert row["temporaries"] < elements


def test_letters_of_formulas_are_explained() -> None:
    """Guards `imbalance`, by the layout with natural routing, and buckets of experts and of layer types: none stands
    unexplained."""
    priced = _explained()
    letters = next(section for section in sections(priced, terms=True) if "per rank" in section.title).notes[0]
    used = {name for term in priced.terms for name, _ in term.collective.size_bytes.powers}
    assert {"imbalance", "expert_bucket"} <= used
    assert all(f"{name} = " in letters for name in used - {*ALL_AXES})
    assert f"imbalance = {priced.values['imbalance']:.4g} (" in letters
    assert any(what.startswith("token imbalance") for what, _ in gap_to_peak(priced))


def test_scores_outside_windows_have_a_row_of_their_own() -> None:
    """Gemma-3 27B, 5 of 6 layers with a window of 1,024: MFU counts all scores, kernels compute W·(2·S - W) of S² with
    the masked half, and so much is below 0 in the gap, which hid it in what is padded or replicated."""
    axes = {"x": 8, "z": 1, "context": 1, "pipeline": 1}
    request = Request("gemma3-27b", gpus=16, machine="dgx-h100", framework="megatron-core", micro_batch=1, **axes)
    priced = run_search(load_inputs(request).problem).detail(0)
    job, gap = priced.job, dict(gap_to_peak(priced))
    length, tokens = job.workload.sequence_length, job.workload.sequence_length * job.workload.global_batch
    outside = sum(
        6.0 * count * layer.scored_width * (length - layer.window * (2.0 * length - layer.window) / length)
        for layer, count in job.model.by_type
        if layer.window
    )
    outside_s = outside * tokens / (16 * job.peak_flops_per_s)
    assert gap["scores outside windows, not computed"] == pytest.approx(-outside_s, rel=1e-3)
    assert sum(gap.values()) == pytest.approx(priced.iteration_s)
    assert gap["useful FLOPs at peak (MFU)"] == pytest.approx(priced.mfu * priced.iteration_s)
    assert 0.0 <= gap.get("padded or replicated weights", 0.0) < 0.02 * priced.iteration_s


def test_every_second_of_a_host_bound_pipeline_is_in_a_row() -> None:
    """Guards the wait for the host, a third of this step: tables, the gap to peak and causes add up to their totals, on
    the stage that computes longest, which is not the one that communicates most."""
    axes = {"x": 4, "z": 1, "context": 1, "pipeline": 8, "expert": 8, "expert_tensor": 1}
    request = Request("qwen3-235b-a22b", gpus=128, machine="dgx-h100", framework="megatron-core", micro_batch=1, **axes)
    priced = run_search(load_inputs(request).problem).detail(0)
    assert priced.host_s > 0.15 * priced.iteration_s
    assert sum(one.seconds for one in work_by_kind(priced)) == pytest.approx(priced.compute_s)
    assert sum(spent_s for _, spent_s in gap_to_peak(priced)) == pytest.approx(priced.iteration_s)
    assert sum(one.exposed_s for one in priced.awaited) == pytest.approx(priced.exposed_communication_s, rel=0.05)
    found = causes(priced)
    assert found[HOST] == priced.host_s
    assert abs(found[REST]) < 0.005 * priced.iteration_s
    titles = [section.title for section in sections(priced, verbose=True)]
    assert f"Computation per rank and step, of stage {priced.busiest}, which computes longest" in titles


def test_attention_is_rated_by_the_peak_of_its_own_format() -> None:
    """Guards attention and the router beside FP8: they compute in BF16, whose peak is half of FP8's on H200."""
    priced = _explained("fp8-current")
    whole, every = ({one.title: one for one in sections(priced, terms=also, verbose=True)} for also in (False, True))
    forward = [row for row in whole["Computation per rank and step"].rows if row["phase"] == "forward"]
    of_peak = {row["kind"]: row["rate"] / row["of_peak"] for row in forward if row["of_peak"]}
    assert of_peak["attention"] == pytest.approx(989e12)
    assert 989e12 < of_peak["GEMMs"] < 1979e12
    gemms = every["GEMMs and attention per rank and step"].rows
    peaks = {row["layer"].split(".")[-1]: row["rate"] / row["of_peak"] for row in gemms}
    assert (peaks["core"], peaks["router"], peaks["fc1"]) == pytest.approx((989e12, 989e12, 1979e12))


def test_a_comparison_has_only_strategies_whose_experts_are_priced() -> None:
    """Guards DeepSpeed and AxoNN, which have no experts: no step is made up for them."""
    request = Request("nano-moe", gpus=8, machine="dgx-h100", batch=64)
    found = {one.framework: one for one in compare(load_inputs(request).problem).contenders}
    assert found["megatron-core"].prediction is not None
    for name in ("deepspeed", "axonn", "megatron-axonn"):
        assert found[name].prediction is None
        assert found[name].infeasible == "experts are not priced for it"


@pytest.mark.parametrize("precision", [None, "fp8-current"])
def test_a_gemm_can_be_recomputed_by_hand(precision: str | None) -> None:
    """Guards `--terms`: shape, rate and the note below give each call's time; all calls those by kind."""
    priced = _explained(precision)
    every = {section.title: section for section in sections(priced, terms=True)}
    found = every["GEMMs and attention per rank and step"]
    said = found.notes[0]
    launch_us, flash_us = map(float, re.findall(r"([\d.]+) µs", said))
    (memory,), ramps = re.findall(r"/ ([\d,]+) GB/s", said), re.search(r"ramp ([\d.]+)(?: or ([\d.]+))?", said)
    (unhidden,) = (float(one) / 100.0 for one in re.findall(r"and (\d+)% of the shorter", said))
    assert ramps is not None
    bytes_per_s = 1e9 * float(memory.replace(",", ""))
    for row in found.rows:
        if "keys" in row["shape"]:
            assert row["call_s"] == pytest.approx(1e-6 * flash_us + row["flops"] / row["rate"], rel=1e-3)
            continue
        m, n, k = (float(one.replace(",", "")) for one in row["shape"].partition(", ")[0].split(" × "))
        groups = float((re.search(r"(\S+) groups", row["shape"]) or ["", "1"])[1])
        narrow = precision is not None and row["layer"] not in ("head", "moe.router")
        ramp, element = float(ramps[2 if narrow else 1]), 1.0 if narrow else 2.0
        tiled = math.ceil(m / 128) * math.ceil(n / 128) * 128**2
        # Weight gradients of experts, which contract over rows, are added in FP32.
        written = 2.0 if k.is_integer() else 2.0 * 4.0
        parts = 2.0 * tiled * (k + ramp) / row["rate"], (element * (m * k + k * n) + written * m * n) / bytes_per_s
        busy_s = max(parts) + (unhidden * min(parts) if groups > 1.0 else 0.0)
        assert row["call_s"] == pytest.approx(1e-6 * launch_us + groups * busy_s, rel=0.02), row
        assert row["flops"] == pytest.approx(2.0 * m * n * k * groups, rel=1e-4)
    of_kinds = every["Computation per rank and step"].rows
    for kind, keys in (("GEMMs", False), ("attention", True)):
        whole_s = sum(row["calls"] * row["call_s"] for row in found.rows if ("keys" in row["shape"]) == keys)
        assert whole_s == pytest.approx(sum(row["seconds"] for row in of_kinds if row["kind"] == kind))


def test_what_a_format_saves_is_said() -> None:
    """Guards the sentence on FP8: GEMMs as tables of both formats have them, and more element-wise kernels."""
    priced = _explained("fp8-current")
    assert format_words(_explained()) == ""
    workload = priced.job.workload.model_copy(update={"precision": "bf16"})
    plain = price(replace(priced.job, workload=workload), priced.layout)
    sums = [
        {kind: sum(one.seconds for one in work_by_kind(each) if one.kind == kind) for kind in (GEMMS, ELEMENT_WISE)}
        for each in (priced, plain)
    ]
    more_s = sums[0][ELEMENT_WISE] - sums[1][ELEMENT_WISE]
    found = re.findall(r"([\d.]+) (m?s)\b", format_words(priced))
    said = [float(number) * {"s": 1.0, "ms": 1e-3}[unit] for number, unit in found]
    assert said == pytest.approx(
        [priced.iteration_s, plain.iteration_s, sums[0][GEMMS], sums[1][GEMMS], more_s], rel=0.01
    )
    assert ("no less than GEMMs save" in format_words(priced)) == (more_s >= sums[1][GEMMS] - sums[0][GEMMS])


@pytest.mark.parametrize("pipelined", [True, False])
def test_what_is_overlapped_is_called_so(pipelined: bool) -> None:
    """Guards async tensor parallelism: "not overlappable" stands beside collectives that are exposed as a whole."""
    asked: dict[str, Any] = {"machine": "dgx-h100", "framework": "torchtitan", "batch": 32, "x": 4, "z": 2}
    asked |= {"set": (f"step.pipelined_tensor={pipelined}".lower(),), "rank_by": "step", "seq": 8192}
    inputs = load_inputs(Request("llama3-8b", gpus=8, **asked))
    for terms in (True, False):
        every = {one.title: one for one in sections(run_search(inputs.problem).detail(0), terms=terms, verbose=True)}
        rows = every["Collectives per rank and step"].rows
        for row in rows:
            if row.get("overlapped_with") == "not overlappable":
                assert row["exposed_s"] >= 0.999 * row["seconds"], row
        assert any("its own GEMM" in str(row.get("overlapped_with")) for row in rows) == pipelined
