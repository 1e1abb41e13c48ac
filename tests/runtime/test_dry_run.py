"""The peak memory of a step of rank 0 on tensors without data, against what is predicted of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch.distributed as dist

import axonn_tune
from axonn_tune.errors import NothingFeasibleError
from axonn_tune.runtime.dry_run import dry_run, require_memory
from axonn_tune.specs.launch import Launch

FIRST_RUNS = {
    "llama3-8b on 8 H100": ("llama3-8b", {"gpus": 8, "machine": "dgx-h100", "rank_by": "step"}),
    "llama3-70b on 64 H100": ("llama3-70b", {"gpus": 64, "machine": "dgx-h100", "rank_by": "step"}),
    "20b on 64 A100": ("20b", {"gpus": 64}),
    "5b on 32 A100": ("5b", {"gpus": 32}),
    "gpt3-175b on 256 A100": ("gpt3-175b", {"gpus": 256, "machine": "dgx-a100"}),
    "80b on 1024 A100": ("80b", {"gpus": 1024}),
    "80b on 1024 A100, x = 2": ("80b", {"gpus": 1024, "x": 2}),
    "80b on 1024 A100, y = 2": ("80b", {"gpus": 1024, "y": 2}),
    "nano on this host, without a compiler": ("nano", {"gpus": 1, "machine": "localhost"}),
}
"""Requests of the first minute, whose launch configs must fit on the first try."""

DAILY = ("llama3-8b on 8 H100", "nano on this host, without a compiler")

SPLITS = [(1, 1, 8), (2, 1, 4), (1, 2, 4), (2, 2, 1), (4, 2, 1)]
DAILY_SPLITS = [
    *(("5b", SPLITS[0], "none"), ("5b", SPLITS[1], "selective"), ("5b", SPLITS[4], "full")),
    *(("llama3-8b", SPLITS[2], "full"), ("llama3-8b", SPLITS[3], "none")),
]
WITHIN, WITHIN_SMALL = 0.03, 0.01


@pytest.fixture(autouse=True)
def _no_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def peak_over_predicted(launch: Launch) -> float:
    """Peak of the dry run over the prediction."""
    assert launch.predicted.memory_bytes is not None
    return dry_run(launch)[1] / launch.predicted.memory_bytes


@pytest.mark.parametrize(
    "request_",
    [pytest.param(one, marks=[] if one in DAILY else pytest.mark.nightly) for one in FIRST_RUNS],
)
def test_a_first_run_fits_as_predicted(request_: str) -> None:
    """Guards the launch config of the most ordinary requests: within 3% of its prediction, and under the limit."""
    model, options = FIRST_RUNS[request_]
    launch = axonn_tune.search(model, **options).launch_config()  # type: ignore[arg-type]
    _, peak_bytes = dry_run(launch)
    require_memory(launch, peak_bytes)
    assert peak_bytes == pytest.approx(launch.predicted.memory_bytes, rel=WITHIN)


@pytest.mark.parametrize(
    ("model", "split", "recompute"),
    [
        pytest.param(*one, marks=[] if one in DAILY_SPLITS else pytest.mark.nightly)
        for one in itertools.product(("5b", "llama3-8b"), SPLITS, ("none", "selective", "full"))
    ],
)
def test_memory_is_that_of_the_program(model: str, split: tuple[int, int, int], recompute: str) -> None:
    """Guards the memory model: GPT and Llama with grouped heads, every recompute, split, layers not resharded."""
    x, y, z = split
    found = axonn_tune.search(
        *(model,),
        gpus=8,
        machine="dgx-h100",
        **{"x": x, "y": y, "z": z, "recompute": recompute, "micro_batch": 1, "kept_layers": 2 if z == 4 else 0},  # type: ignore[arg-type]
        set={"model.layers": 6},
    )
    assert peak_over_predicted(found.launch_config()) == pytest.approx(1.0, rel=WITHIN_SMALL)


def test_more_than_the_machine_has_is_an_error() -> None:
    """Guards a launch config that was edited: what a step needs, what there is, and what is missing."""
    launch = axonn_tune.search("5b", gpus=32).launch_config()
    _, needed = dry_run(launch)
    little = launch.model_copy(
        update={"predicted": launch.predicted.model_copy(update={"memory_limit_bytes": needed - 2.0**30})}
    )
    with pytest.raises(NothingFeasibleError, match="by 1 GiB: use a smaller micro_batch"):
        require_memory(little, needed)
