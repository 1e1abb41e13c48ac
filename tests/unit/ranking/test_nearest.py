"""When nothing fits: what binds is said with true numbers, and what is suggested fits."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from axonn_tune.ranking.choosing import run_search, search
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.ranking.nearest import nearest_change
from axonn_tune.ranking.priced import Priced
from axonn_tune.ranking.space import Problem
from axonn_tune.request import Request
from axonn_tune.units import show_bytes, show_seconds
from tests.nightly import params

MIXTRAL = {"gpus": 16, "model": "mixtral-8x7b", "machine": "dgx-h200", "framework": "megatron-core", "micro_batch": 1}
LLAMA = {"model": "llama3-70b", "machine": "dgx-h100", "framework": "megatron-core"}
CASES: dict[str, dict[str, Any]] = {
    "a prime count": {"gpus": 13},
    "a factor of three": {"gpus": 384},
    "one GPU": {"gpus": 1, "model": "llama3-8b", "machine": "dgx-h200", "set": ("machine.accelerator.memory_gib=100",)},
    "a large prime": {"gpus": 1021, "model": "80b"},
    "far too large": {"gpus": 8, "model": "640b"},
    "a batch of one": {"gpus": 64, "batch": 1, "x": 1, "y": 1},
    "a micro-batch": {"gpus": 64, "micro_batch": 7},
    "no halves": {"gpus": 64, "batch": 64, "split_micro_batch": True, "x": 1, "y": 1},
    "a batch of seven": {"gpus": 13, "batch": 7},
    "weights kept whole": {"gpus": 16, "model": "llama3-70b", "machine": "dgx-h100", "framework": "megatron-core"},
    "no such EP": {**MIXTRAL, "x": 1, "expert": 7},
    "too wide an EP": {**MIXTRAL, "x": 1, "expert": 32},
    "no such ETP": {**MIXTRAL, "x": 2, "expert_tensor": 3},
    "nothing recomputed": {"gpus": 8, "model": "llama3-8b", "framework": "fsdp", "seq": 16384, "recompute": "none"},
    "no types of fewer bytes": {**LLAMA, "gpus": 16, "x": 8, "pipeline": 2, "recompute": "none", "micro_batch": 1},
    "two at once": {**LLAMA, "gpus": 16, "x": 8, "pipeline": 2, "recompute": "none", "micro_batch": 2},
    "parts that 16 stages do not divide": {
        **LLAMA,
        "gpus": 64,
        "batch": 256,
        **{"x": 1, "z": 1, "context": 1, "pipeline": 8, "chunks": 3, "recompute": "none"},
        "pipeline_layout": "Et*3|(t*3|)*7(t*4|)*8(t*3|)*7t*3L",
    },
    "pins that no count suits": {
        **LLAMA,
        "gpus": 8,
        "set": ("step.offloaded=",),
        **{"x": 8, "z": 1, "pipeline": 1, "data": 1, "context": 1, "micro_batch": 1},
    },
    "states of lone ranks": {
        **LLAMA,
        "gpus": 8,
        **{"x": 8, "z": 1, "pipeline": 1, "data": 1, "context": 1, "micro_batch": 1},
    },
    "long sequences": {"gpus": 8, "model": "llama3-8b", "batch": 8, "seq": 262144},
}
LONG = ("weights kept whole", "no such ETP", "too wide an EP", "parts that 16 stages do not divide")
"""Cases that take seconds, and so run nightly."""


@cache
def said(case: str) -> str:
    """What is said of a case."""
    return nearest_change(load_inputs(asked(case)).problem)


def asked(case: str) -> Request:
    """The case as the command line has it."""
    return Request(**{"model": "20b", **CASES[case]})


def changed(request: Request, change: str) -> Request:
    """The request with a suggestion followed."""
    change, left_out, _ = change.partition("leave out")
    if left_out:
        request = request.without_pins()
    words = re.findall(r"--(\S+)(?: (\d+|[a-z]\S+))?", change)
    names = {"ep": "expert", "etp": "expert_tensor", "pp": "pipeline", "gtp": "z", "tp": "x"}
    given = {
        names.get(name, name.replace("-", "_")): int(value) if value.isdecimal() else value or True
        for name, value in words
    }
    if "set" in given:
        given["set"] = (*request.set, given["set"])
    return replace(request, **given)


@pytest.mark.parametrize("case", params(CASES, LONG))
def test_every_suggestion_fits(case: str) -> None:
    """Guards suggestions: each, followed on its own, leaves something feasible."""
    words = re.search(r"nearest changes? that fits?(?:, cheapest first)?: (.*)", said(case))
    assert words
    assert not len(run_search(load_inputs(asked(case)).problem))
    for change in words[1].split(" or "):
        found = run_search(load_inputs(changed(asked(case), change)).problem)
        assert len(found), change
        if "GiB" in change:
            best = f"({show_seconds(found[0].iteration_s)} a step, {show_bytes(found[0].memory_bytes)})"
            assert change.endswith(best), change


@pytest.mark.parametrize(
    ("case", "suggested"),
    [
        ("a prime count", "nearest change that fits: --gpus 16"),
        ("a factor of three", "nearest changes that fit: --batch 8064 or --gpus"),
        ("one GPU", "--gpus 2"),
        ("a large prime", "--gpus 1024"),
        ("a batch of one", "--batch 64 or leave out --x and --y"),
        ("a micro-batch", "--batch 8064 or leave out --micro-batch"),
        ("no halves", "--batch 128"),
        ("weights kept whole", "cheapest first: --use-precision-aware-optimizer bf16 ("),
        ("two at once", "cheapest first: --use-precision-aware-optimizer bf16 --micro-batch 1 ("),
        ("weights kept whole", ") or --use-precision-aware-optimizer fp32 ("),
        ("no such EP", "fit: --ep 8 or "),
        ("too wide an EP", "fit: --ep 8 or "),
        ("no such ETP", "fit: --etp 2 or "),
        ("nothing recomputed", " or --recompute full ("),
        ("long sequences", "cheapest first: --seq 131072 ("),
        ("no types of fewer bytes", "fit: --use-precision-aware-optimizer bf16 ("),
        ("weights kept whole", ") or --framework torchtitan or --gpus 24"),
        ("parts that 16 stages do not divide", "fit: --tp 8 ("),
        ("states of lone ranks", "fits: --use-precision-aware-optimizer fp32 --set step.offloaded=moments,master ("),
        ("pins that no count suits", "fits: --gpus 24 and leave out --tp, --gtp, --dp, --cp, --pp and --micro-batch ("),
    ],
)
def test_suggestions_are_useful(case: str, suggested: str) -> None:
    """Guards what is preferred: batches that every grid divides, counts that fill nodes, the nearest first."""
    assert suggested in said(case)


SEARCHED = {
    "weights kept whole": [16, 16, 16],
    "a batch of one": [],
    "pins that no count suits": [24],
    "parts that 16 stages do not divide": [64],
}


def test_few_changes_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the time of a refusal: changes of the same job alone are priced, nothing to see whether one fits, and of
    large searches the first alone."""
    searched = list[int]()

    def counted(problem: Problem, *, top: int) -> Priced:
        searched.append(problem.gpus)
        return search(problem, top=top)

    monkeypatch.setattr("axonn_tune.ranking.nearest.search", counted)
    for case, gpus in SEARCHED.items():
        searched.clear()
        nearest_change(load_inputs(asked(case)).problem)
        assert searched == gpus


def test_what_binds_covers_every_grid() -> None:
    """Guards the constraints named: their counts add up to all grids, each with a grid that breaks it."""
    expected = (
        "binding constraint of each layout: 2 of 4 hidden-by-yz (hidden (7168) is not divisible by y·z = 13), "
        "1 heads-by-x (heads (56) is not divisible by x = 13), "
        "1 batch-by-data-z (global_batch (8192) is not divisible by data·z = 13); "
    )
    assert said("a prime count").startswith(expected)
    pinned = said("a batch of one")
    assert pinned.startswith("binding constraint of each layout that has x=1, y=1: 7 of 7 batch-by-data-z (")
    assert said("a micro-batch").startswith("binding constraint: micro-batch: 7 does not divide the share")
    assert said("far too large").startswith("binding constraint: memory: the smallest configuration (")
