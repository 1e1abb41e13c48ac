"""Overlap: which collectives stay open while other work goes on. That it changes no bit, `test_equivalence` checks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from axonn_tune.grid import Grid
from axonn_tune.recompute import RECOMPUTES
from axonn_tune.runtime.ledger import Ledger
from axonn_tune.runtime.mesh import build_mesh
from axonn_tune.specs.workload import Recompute
from axonn_tune.vocabulary import Overlap
from tests.runtime import steps
from tests.runtime.cases import Case, Training
from tests.runtime.lateness import Noting

GPT = Training("gpt", tied=False, biases=True, kv_heads=12, clipping=False)
BOTH = {"all_reduce x", "all_reduce y"}


@pytest.mark.parametrize(
    ("overlap", "split", "expected"),
    [
        (None, False, set()),
        (None, True, set()),
        ("gather_prefetch", False, {"all_gather z"}),
        ("input_gradient", False, BOTH),
        ("weight_gradient", False, {"reduce_scatter z"}),
        ("data_parallel", False, {"all_reduce data"}),
        ("output", False, set()),
        ("output", True, BOTH),
    ],
)
@pytest.mark.parametrize("recompute", [*RECOMPUTES, "layernorm,mlp"])
def test_an_overlap_keeps_its_own_collectives_open(
    overlap: Overlap | None, split: bool, expected: set[str], recompute: Recompute
) -> None:
    """Guards the switches: each overlaps what it names, and nothing else; without any, each wait follows its issue.

    One step of a rank of 2x2x2x2, by a network that sends nothing. Halves of a micro-batch hide each other's output.
    """
    case = Case(GPT, Grid(2, 2, 2, 2), micro_batch=6, recompute=recompute, kept_layers=1, split=split)
    dist.init_process_group("fake", rank=5, world_size=16)
    try:
        communicator = Noting(build_mesh(case.grid), Ledger())
        model = steps.transformer(case, communicator, [overlap] if overlap else [])
        tokens = torch.zeros(24, 16, dtype=torch.int64)
        steps.accumulate(model, case, (tokens, tokens, torch.arange(24)))
    finally:
        dist.destroy_process_group()
    issued, waited = ({number for kind, number in communicator.events if kind == what} for what in ("issue", "wait"))
    assert issued == waited, "every collective is waited for"
    assert communicator.left_open() == expected
