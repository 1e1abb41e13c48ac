"""A thousand ranks in one process: what a rank would send, with torch's `fake` backend, which sends nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from axonn_tune.grid import Grid
from axonn_tune.program.dimensions import symbol_values
from axonn_tune.program.step import blocks_of, build_step, bundled, contents_of
from axonn_tune.runtime.communicator import Communicator
from axonn_tune.runtime.devices import RuntimeSettings
from axonn_tune.runtime.ledger import Ledger, LedgerEntry, RankProgram, compare, routed
from axonn_tune.runtime.mesh import build_mesh
from axonn_tune.runtime.optimizer import ShardedOptimizer
from axonn_tune.runtime.transformer import Transformer
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.launch import Optimizer
from axonn_tune.specs.tuning import Tuning
from axonn_tune.specs.workload import Workload
from axonn_tune.vocabulary import OVERLAPS
from tests.runtime.steps import forward_backward
from tests.runtime.test_mesh import world

WORLD = 1024
RING = Grid(2, 2, 8, 8, context=4, order=("x", "context", "y", "z", "data"))
GRIDS = [
    RING,
    Grid(4, 4, 8, 8),
    Grid(2, 8, 4, 16, order=("z", "data", "y", "x")),
    Grid(1, 1, 64, 16),
    Grid(8, 1, 1, 128),
]


OF_EXPERTS = (
    Grid(2, 4, 4, 32, expert=8, order=("z", "x", "data", "y")),
    Grid(2, 2, 8, 32, expert=4),
    Grid(2, 2, 4, 16, context=4, expert=8, order=("x", "z", "context", "data", "y")),
)


ALL_TO_ALL = dist.all_to_all_single


def sent_to_all(
    output: torch.Tensor, rows: torch.Tensor, received: list[int] | None, sent: list[int] | None, **how: Any
) -> Any:
    """An all-to-all of the fake backend, which makes what arrives of what is sent and fails where that is nothing."""
    if received is not None and not len(rows):
        rows, sent = torch.zeros_like(output), received
    return ALL_TO_ALL(output, rows, received, sent, **how)


@pytest.mark.parametrize("split", [False, True], ids=["plain", "split"])
@pytest.mark.parametrize(
    ("grid", "name", "rank"),
    [
        *((grid, name, rank) for grid in GRIDS for name, rank in (("nano", 0), ("nano-llama", WORLD - 3))),
        *((grid, "nano-moe", 77) for grid in OF_EXPERTS),
        (GRIDS[2], "nano-delta", 77),
        *((grid, "nano-llama+lora", rank) for grid, rank in ((RING, 5), (GRIDS[1], 77))),
    ],
    ids=str,
)
def test_a_step_on_1024_ranks_sends_what_the_program_says(
    grid: Grid, rank: int, name: str, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards every collective of a step with real tensors, the optimizer's included, and the values that were priced.

    `split`: micro-batches in halves, optimizer state over data, and bf16, whose weights are sent in another type.
    """
    monkeypatch.setattr(dist, "all_to_all_single", sent_to_all)
    # As many tokens for each of 24 experts. Muon's momenta are sent in FP32 in both.
    name, _, tuned = name.partition("+")
    by = "muon" if rank == 77 and not tuned else "adamw"
    sequence, micro_batch = 96 if name == "nano-moe" else 24, 2 if split else 1
    tuning = Tuning(mode="lora", targets=("*",), dtype="fp32") if tuned else None
    model = load_model(name).document.tuned(tuning)
    workload = Workload(
        global_batch=2 * grid.z * grid.data * micro_batch,
        sequence_length=sequence,
        precision="bf16" if split else "fp32",
        split_micro_batch=split,
        shard_optimizer_over_data=split,
    )
    wide, compute = torch.float32, torch.bfloat16 if split else torch.float32
    settings = RuntimeSettings(
        *(compute, wide, wide, frozenset(OVERLAPS), "full", 1, torch.device("cpu")),
        parts=micro_batch,
        shard_master=split,
        forced_balance=True,
        balance=1e-3,
    )
    tokens = torch.zeros(micro_batch, sequence, dtype=torch.int64)
    with world(WORLD, rank):
        transformer = Transformer(
            *(model, Communicator(build_mesh(grid), Ledger()), settings),
            sequence=sequence,
            seed=0,
        )
        optimizer = ShardedOptimizer(transformer.store, transformer.communicator, Optimizer(name=by), compute=compute)
        for last in (False, True):
            loss = forward_backward(transformer, tokens, tokens, scale=0.01, last=last)
        transformer.finish_gradients()
        optimizer.step(loss)
    options = bundled(compiled=True, balanced=True, optimizer=by)
    values = symbol_values(model, workload, grid, micro_batch=micro_batch, options=options)
    program = build_step(model, workload, recompute="full", options=options, context=grid.context > 1)
    values |= blocks_of(program, contents_of(model, (model.layers,)), kept=1, repeated=0)
    assert compare(transformer.communicator.ledger, RankProgram(program, values)) == []


@pytest.mark.parametrize("name", ["nano", "nano-llama", "nano-moe", "nano-delta"])
def test_modules_go_in_the_order_of_nodes(name: str) -> None:
    """Guards norms and weights of the runtime's blocks: as layer types list them, which their program goes by."""
    model = load_model(name).document
    grid, compute = Grid(2, 1, 2, 1), torch.float32
    settings = RuntimeSettings(*(compute,) * 3, frozenset(OVERLAPS), "none", 1, torch.device("cpu"))
    program = build_step(model, Workload(global_batch=4, sequence_length=64, precision="fp32"), recompute="none")
    with world(4, 0):
        of_rank = Transformer(model, Communicator(build_mesh(grid), Ledger()), settings, sequence=64, seed=0)
    types = [index for index, count in model.decoder_runs for _ in range(count)]
    for block, index in zip(of_rank.blocks, types, strict=True):
        steps = program.blocks[index].forward.operations
        gathered = [step.layer for step in steps if getattr(step, "role", "") == "weight"]
        assert [one.layer for one in block.linears] == gathered
        normed = [step.layer for step in steps if getattr(step, "axis", "") == "y" and "norm" in step.layer]
        assert [block.attention.norm.name, block.mlp.norm.name] == normed


def test_each_term_that_differs_is_one_line() -> None:
    """Guards the words: a call that is missing, one of another size, and two that nobody planned; else silence."""
    model, workload = load_model("nano").document, Workload(global_batch=48, sequence_length=64, precision="fp32")
    kept = {"kept": 1.0, "unkept": model.layers - 1}
    values = symbol_values(model, workload, Grid(2, 2, 2, 2), micro_batch=3) | kept
    program = RankProgram(build_step(model, workload, recompute="none"), values)
    ledger = Ledger(program.collectives() + program.collectives() + program.collectives())
    assert compare(ledger, program, steps=3) == []
    ledger = Ledger(program.collectives())
    ledger.counts[LedgerEntry("all_reduce", "y", "forward", "mlp.fc1", 3 * 64 * 384 * 4)] -= 1
    right = LedgerEntry("all_reduce", "x", "forward", "mlp.fc2", 3 * 64 * 96 * 4)
    ledger.counts[LedgerEntry("all_reduce", "x", "forward", "mlp.fc2", 8)] = ledger.counts.pop(right)
    ledger.record(LedgerEntry("all_gather", "data", "step", "secret", 4))
    ledger.record(LedgerEntry("all_gather", "data", "step", "secret", 8))
    assert set(compare(ledger, program)) == {
        "all_reduce over y, forward, mlp.fc1: expected 8 × 294,912 bytes, got 7 × 294,912 bytes",
        "all_reduce over x, forward, mlp.fc2: expected 8 × 73,728 bytes, got 8 × 8 bytes",
        "all_gather over data, step, secret: expected none, got 1 × 4 bytes and 1 × 8 bytes",
    }
    alone = symbol_values(model, workload, Grid(), micro_batch=3) | kept
    assert compare(Ledger(), RankProgram(program.program, alone)) == [], "groups of one leave no trace"


def test_what_a_router_sent_stands_beside_what_was_expected() -> None:
    """Guards natural routing: bytes of balanced experts, the mean and the most of what went, and nothing else."""
    model, workload = load_model("nano-moe").document, Workload(global_batch=4, sequence_length=24, precision="fp32")
    values = symbol_values(model, workload, Grid(1, 1, 2, 1, expert=2), micro_batch=2)
    program = build_step(model, workload, recompute="none")
    values |= blocks_of(program, contents_of(model, (model.layers,)), kept=0, repeated=0)
    plan = RankProgram(program, values, natural=True)
    name = ("combine", "expert", "forward", "moe.moe.combine")
    whole = 2 * 24 * 2 * model.hidden * 4
    ledger = Ledger(plan.collectives() + plan.collectives())
    ledger.counts[LedgerEntry(*name, whole)] -= 1
    ledger.record(LedgerEntry(*name, 3 * whole))
    assert compare(ledger, plan, steps=2) == []
    (found,) = (one for one in routed(ledger, plan, steps=2) if tuple(one.values())[:4] == name)
    assert found["count"] == 1
    assert (found["expected_bytes"], found["mean_bytes"], found["most_bytes"]) == (whole, 2 * whole, 3 * whole)
