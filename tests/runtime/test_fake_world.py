"""A thousand ranks in one process: what a rank would send, with torch's `fake` backend, which sends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from axonn_tune.grid import Grid
from axonn_tune.program.dimensions import step_values
from axonn_tune.program.step import build_step
from axonn_tune.ranking.choosing import Ranking, search
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.request import Request
from axonn_tune.runtime.communicator import Communicator
from axonn_tune.runtime.devices import RuntimeSettings
from axonn_tune.runtime.ledger import Ledger, LedgerEntry, RankProgram, compare
from axonn_tune.runtime.mesh import Mesh, build_mesh
from axonn_tune.runtime.optimizer import AdamW
from axonn_tune.runtime.transformer import Transformer
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.launch import Optimizer
from axonn_tune.specs.workload import OVERLAPS, Workload
from tests.runtime.steps import forward_backward

WORLD, BEST = 1024, 10
GRIDS = [Grid(4, 4, 8, 8), Grid(2, 8, 4, 16, order=("z", "data", "y", "x")), Grid(1, 1, 64, 16), Grid(8, 1, 1, 128)]


@contextmanager
def fake_mesh(grid: Grid, rank: int) -> Iterator[Mesh]:
    """The place of a rank in a world that does not exist."""
    dist.init_process_group("fake", rank=rank, world_size=grid.world)
    try:
        yield build_mesh(grid)
    finally:
        dist.destroy_process_group()


def send_step(transformer: Transformer, accumulation: int, micro_batch: int) -> Ledger:
    """What one step sends, but for the optimizer: two micro-batches, the first standing for all but the last."""
    ledger, shape = transformer.communicator.ledger, (micro_batch, transformer.sequence)
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    forward_backward(transformer, tokens, tokens, scale=1.0, last=False)
    first = ledger.counts.copy()
    forward_backward(transformer, tokens, tokens, scale=1.0, last=True)
    transformer.finish_gradients()
    for entry, count in first.items():
        ledger.counts[entry] += count * (accumulation - 2)
    ledger.record(LedgerEntry("all_reduce", "xyzdata", "step", "gradient_norm", 16))
    return ledger


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    """What the command line ranks for 80b on 1,024 GPUs."""
    return search(load_inputs(Request("80b", gpus=WORLD)).problem)


@pytest.mark.parametrize(
    "position",
    [pytest.param(one, marks=[] if one in (0, BEST - 1) else pytest.mark.nightly) for one in range(BEST)],
)
def test_the_best_grids_of_80b_send_what_was_priced(position: int, ranking: Ranking) -> None:
    """Guards the ranking: the whole 80b model, on the meta device, sends what the program says.

    The norm of the gradient needs values, so its one collective is taken for granted here.
    """
    model, workload = ranking.problem.model, ranking.problem.workload
    priced = ranking.price(position)
    found, kept = priced.configuration, int(priced.values["kept"])
    bf16, wide = torch.bfloat16, torch.float32
    settings = RuntimeSettings(bf16, wide, wide, frozenset(OVERLAPS), found.recompute, kept, torch.device("meta"))
    with fake_mesh(found.grid, rank=position * 100) as mesh:
        communicator = Communicator(mesh, Ledger())
        transformer = Transformer(model, communicator, settings, sequence=workload.sequence_length, seed=0)
        sent = send_step(transformer, priced.accumulation, found.micro_batch)
    values = step_values(model, workload, found.grid, micro_batch=found.micro_batch, kept_layers=kept)
    assert compare(sent, RankProgram(priced.program, values)) == []
    assert priced.values == values | {"held": values["L"]}


@pytest.mark.parametrize("split", [False, True], ids=["plain", "split"])
@pytest.mark.parametrize("name", ["nano", "nano-llama"])
@pytest.mark.parametrize("rank", [0, WORLD - 3])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_step_on_1024_ranks_sends_what_the_program_says(grid: Grid, rank: int, name: str, split: bool) -> None:
    """Guards every collective of a step with real tensors, the optimizer's included, on any rank.

    `split`: micro-batches in halves, optimizer state over data, and bf16, whose weights are sent in another type.
    """
    model, sequence, micro_batch = load_model(name).document, 16, 2 if split else 1
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
    )
    tokens = torch.zeros(micro_batch, sequence, dtype=torch.int64)
    with fake_mesh(grid, rank) as mesh:
        transformer = Transformer(model, Communicator(mesh, Ledger()), settings, sequence=sequence, seed=0)
        optimizer = AdamW(transformer.store, transformer.communicator, Optimizer())
        for last in (False, True):
            loss = forward_backward(transformer, tokens, tokens, scale=0.01, last=last)
        transformer.finish_gradients()
        optimizer.step(loss)
    values = step_values(model, workload, grid, micro_batch=micro_batch, kept_layers=1)
    program = build_step(model, workload, recompute="full")
    assert compare(transformer.communicator.ledger, RankProgram(program, values)) == []
