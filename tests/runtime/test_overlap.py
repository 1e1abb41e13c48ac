"""Overlap: what stays open while other work goes on, and that nothing is read or changed meanwhile."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from axonn_tune.grid import Grid
from axonn_tune.runtime.ledger import Ledger
from axonn_tune.runtime.mesh import build_mesh
from axonn_tune.specs.workload import RECOMPUTES, Overlap, Recompute
from tests.runtime import steps
from tests.runtime.cases import Case, Training
from tests.runtime.lateness import Noting
from tests.runtime.pool import Pools

GPT = Training("gpt", tied=False, biases=True, kv_heads=12, clipping=False)
LLAMA = Training("llama", tied=True, biases=False, kv_heads=24, clipping=False)
OPEN: dict[Overlap, set[str]] = {
    "gather_prefetch": {"all_gather z"},
    "input_gradient": {"all_reduce x", "all_reduce y"},
    "weight_gradient": {"reduce_scatter z"},
    "data_parallel": {"all_reduce data"},
}


def open_collectives(overlaps: set[Overlap], recompute: Recompute, *, split: bool = False) -> set[str]:
    """Collectives that other collectives pass in one step of a rank of 2x2x2x2, by a network that sends nothing."""
    case = Case(GPT, Grid(2, 2, 2, 2), micro_batch=6, recompute=recompute, kept_layers=1, split=split)
    dist.init_process_group("fake", rank=5, world_size=16)
    try:
        communicator = Noting(build_mesh(case.grid), Ledger())
        model = steps.transformer(case, communicator, overlaps)
        tokens = torch.zeros(24, 16, dtype=torch.int64)
        steps.accumulate(model, case, (tokens, tokens, torch.arange(24)))
    finally:
        dist.destroy_process_group()
    issued, waited = ({number for kind, number in communicator.events if kind == what} for what in ("issue", "wait"))
    assert issued == waited, "every collective is waited for"
    return communicator.left_open()


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_without_overlap_each_wait_follows_its_issue(recompute: Recompute, split: bool) -> None:
    """Guards the plain twin: it must not overlap, or the comparison with it would say nothing."""
    assert open_collectives(set(), recompute, split=split) == set()


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_halves_hide_each_other(recompute: Recompute) -> None:
    """Guards the one overlap that needs the micro-batch in two: forward all-reduces stay open meanwhile."""
    assert open_collectives({"output"}, recompute, split=True) == {"all_reduce x", "all_reduce y"}
    assert open_collectives({"output"}, recompute) == set()


@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("overlap", OPEN)
def test_an_overlap_keeps_its_own_collectives_open(overlap: Overlap, recompute: Recompute) -> None:
    """Guards the switches: each overlaps what it names, and nothing else."""
    assert open_collectives({overlap}, recompute) == OPEN[overlap]


@pytest.mark.parametrize(
    ("training", "recompute", "grid"),
    [
        *((GPT, "none", Grid(1, 2, 2, 1)), (LLAMA, "full", Grid(1, 1, 2, 2)), (LLAMA, "selective", Grid(2, 2, 1, 1))),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in itertools.product((GPT, LLAMA), RECOMPUTES, (Grid(2, 2, 2, 1), Grid(1, 2, 2, 2)))
        ),
    ],
    ids=str,
)
def test_a_late_network_changes_no_bit(training: Training, recompute: Recompute, grid: Grid, pools: Pools) -> None:
    """Guards against buffers that are reused or read too early, which a quick network hides.

    With layers not resharded and several micro-batches, where buffers live longest; with halves and split optimizer
    state where there are halves.
    """
    micro_batch = 24 // grid.z // grid.data // 2
    case = Case(
        training,
        grid,
        micro_batch=micro_batch,
        recompute=recompute,
        kept_layers=1,
        split=micro_batch % 2 == 0,
        sharded=grid.data > 1,
    )
    assert pools(grid.world).run(steps.late_network, case) == [[]] * grid.world
