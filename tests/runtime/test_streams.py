"""Order between streams: nothing is read, overwritten or freed too early, and all ranks issue in one order."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from axonn_tune.grid import AXES, Grid
from axonn_tune.recompute import RECOMPUTES
from axonn_tune.runtime.communicator import CollectiveHandle, Communicator, DataBuckets, WeightGradients
from axonn_tune.runtime.devices import RuntimeSettings
from axonn_tune.runtime.trainer import Inbox, Outbox
from axonn_tune.runtime.transformer import Transformer
from axonn_tune.specs.catalog import load_model
from axonn_tune.vocabulary import OVERLAPS
from tests.runtime.streams import Event, Run, Streams, disorder, run

GRID, RANK = Grid(2, 2, 2, 2), 5
STAGES = (*AXES, "pipeline")
SMALL = {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64, "layers": 4, "vocab": 30}
SMALL |= {"max_sequence_length": 8}
VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(OVERLAPS, (True, False)),
    "family": ("nano", "nano-llama"),
    "tied": (True, False),
    "recompute": ("layernorm,mlp", *RECOMPUTES),
    "recompute_layers": (1, None),
    "kept_layers": (0, 1, 2),
    "parts": (1, 2),
    "micro_batches": (2, 4),
    "stage": (0, 1, None),
    "chunks": (2, 1),
    "sharded": (True, False),
    "dropout": (0.0, 0.1),
    "timed": (True, False),
}
CHANCE, CANDIDATES, DAILY = 7, 60, 4
Options = dict[str, Any]
ALL_ON: Options = {name: values[-1] for name, values in VALUES.items()} | dict.fromkeys(OVERLAPS, True)
BRIEF: Options = ALL_ON | {"micro_batches": 2, "recompute": "none", "dropout": 0.0}
ORDERED: Options = BRIEF | {"family": "nano", "sharded": False}
ORDERED_ON = Grid(2, 1, 2, 2)


def coverage() -> list[Options]:
    """Runs in which every two values of two options meet."""
    chance, found = random.Random(CHANCE), [ALL_ON]
    every = {
        pair
        for names in itertools.combinations(VALUES, 2)
        for pair in itertools.product(*([(name, value) for value in VALUES[name]] for name in names))
    }
    missing = every - pairs(ALL_ON)
    while missing:
        some = [{name: chance.choice(values) for name, values in VALUES.items()} for _ in range(CANDIDATES)]
        found.append(max(some, key=lambda options: len(pairs(options) & missing)))
        missing -= pairs(found[-1])
    return found


def pairs(options: Options) -> set[object]:
    """Every two values of a run."""
    return set(itertools.combinations(options.items(), 2))


def simulate(options: Options, rank: int = RANK, *, steps: int = 2, grid: Grid = GRID) -> Streams:
    """Some steps of one rank of a grid, or of a stage of two of it."""
    wide = torch.float32
    settings = RuntimeSettings(
        *(torch.bfloat16, wide, wide, frozenset(one for one in OVERLAPS if options[one])),
        *(options["recompute"], options["kept_layers"], torch.device("cpu")),
        recompute_layers=options["recompute_layers"],
        parts=options["parts"],
        shard_master=options["sharded"],
        dropout=options["dropout"],
        forced_balance=True,
        balance=1e-3,
    )
    model = load_model(options["family"]).document
    small = SMALL | ({"layers": model.layers} if model.layer_types else {})
    model = model.model_copy(update={**small, "tied_embeddings": options["tied"]})
    stage, chunks = options["stage"], 1 if options["stage"] is None else options["chunks"]
    staged = grid if stage is None else Grid(*grid.sizes[:4], pipeline=options.get("stages", 2), order=STAGES)
    chosen = Run(model, settings, options["micro_batches"], options["timed"], chunks)
    return run(staged, (stage or 0) * grid.world + rank, chosen, steps=steps)


def label(options: Options) -> str:
    """What is unlike the run with all overlaps."""
    return "-".join(f"{name}={value}" for name, value in options.items() if value != ALL_ON[name]) or "all overlaps"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(one, id=label(one), marks=[] if number < DAILY else pytest.mark.nightly)
        for number, one in enumerate(coverage())
    ],
)
def test_every_two_accesses_are_ordered(options: Options) -> None:
    """Guards all options under NCCL, where streams run at the same time: no access is left to chance."""
    streams = simulate(options)
    assert streams.kernels > 1000
    assert len(streams.events) > 100
    assert streams.hazards == {}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_dispatch_and_combine_are_ordered(recompute: str) -> None:
    """Guards tokens on their way to experts and back, and what is gathered and reduced of experts."""
    grid = Grid(2, 1, 4, 1, expert=2)
    options = BRIEF | {"recompute": recompute, "stage": None, "parts": 2, "family": "nano-moe", "sharded": True}
    streams = simulate(options, grid=grid)
    sent = [event for event in streams.events if (event.what or "").startswith("all_to_all")]
    # Two steps of two micro-batches in halves, one layer: rows and probabilities there, rows back; the same backward.
    assert len(sent) == 2 * 2 * 2 * (8 if recompute == "full" else 6)
    assert streams.hazards == {}


def test_a_delta_net_is_ordered() -> None:
    """Guards a layer whose backward pass repeats its forward pass, by autograd, between collectives."""
    options = BRIEF | {"recompute": "selective", "stage": None, "parts": 2, "family": "nano-delta", "sharded": True}
    streams = simulate(options, grid=Grid(2, 1, 2, 2))
    assert streams.kernels > 1000
    assert streams.hazards == {}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_ring_is_ordered(recompute: str) -> None:
    """Guards keys and values on their way around ranks of context, and their gradients."""
    grid = Grid(2, 1, 1, 1, context=4, order=(*AXES, "context"))
    streams = simulate(BRIEF | {"recompute": recompute, "stage": None, "parts": 2}, grid=grid)
    sent = [event for event in streams.events if (event.what or "").startswith("all_to_all")]
    # Two steps of two micro-batches in halves, 4 layers: three sends forward, six backward.
    assert len(sent) == 2 * 2 * 2 * 4 * (12 if recompute == "full" else 9)
    assert streams.hazards == {}


@pytest.mark.parametrize(
    ("operation", "over"),
    [
        *(("all_gather", "z"), ("reduce_scatter", "data"), ("all_reduce", "x"), ("all_reduce", "data")),
        *(("receive", "F"), ("receive", "B")),
        *(pytest.param("all_gather", axis, marks=pytest.mark.nightly) for axis in ("y", "data")),
        *(pytest.param("reduce_scatter", axis, marks=pytest.mark.nightly) for axis in ("y", "z")),
        *(pytest.param("all_reduce", axis, marks=pytest.mark.nightly) for axis in ("y", "z", "xy")),
    ],
)
def test_a_missing_wait_is_found(operation: str, over: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the check itself: whichever wait is missing, something reads what is not there yet.

    Of all collectives but the gradient norm's, whose result the host reads: no kernel does; and of both messages.
    """
    real = getattr(Communicator, operation)

    def forgetful(self: Any, tensor: torch.Tensor, its: str, *rest: Any, **more: Any) -> CollectiveHandle:
        handle = real(self, tensor, its, *rest, **more)
        if its == over:
            handle.work = None
        return handle

    monkeypatch.setattr(Communicator, operation, forgetful)
    stage = {"F": 1, "B": 0}.get(over)
    found = simulate(
        BRIEF | {"sharded": (operation, over) != ("all_reduce", "data"), "stage": stage, "chunks": 1}, steps=1
    )
    assert any("reads what is being written on nccl" in hazard for hazard in found.hazards)


def test_a_buffer_freed_or_used_again_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the check, and `sent`: where an observer has waited for it, NCCL's work no longer holds what it sends.

    And a weight gradient that is written again while it is reduced.
    """
    real, reduce = CollectiveHandle.__init__, WeightGradients.reduce
    with monkeypatch.context() as patch:
        patch.setattr(CollectiveHandle, "__init__", lambda self, *given, sent=None, **more: real(self, *given, **more))
        assert "memory is freed while it is used on nccl" in simulate(BRIEF | {"timed": True}).hazards

    def hasty(self: WeightGradients, matrix: Any, gradient: torch.Tensor, *rest: Any) -> None:
        reduce(self, matrix, gradient, *rest)
        gradient.zero_()

    monkeypatch.setattr(WeightGradients, "reduce", hasty)
    assert "aten::zero_ writes what is being read on nccl" in simulate(BRIEF).hazards


def orders(ranks: list[int]) -> dict[int, list[Event]]:
    """Collectives of ranks, in the order of their issue."""
    return {rank: simulate(ORDERED, rank, steps=1, grid=ORDERED_ON).events for rank in ranks}


def test_all_ranks_issue_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against hangs and mixed-up data: groups agree on their calls, and no two groups wait for each other.

    And the check: one rank sends the tables' gradients the other way round; two sum vectors over data before z, and
    four groups wait for each other in a ring.
    """
    issued, fill = orders(list(range(ORDERED_ON.world))), Transformer._fill_buckets
    assert disorder(issued, by_issue=True) == []

    def backwards(self: Transformer) -> None:
        fill(self)
        self._tables.reverse()

    with monkeypatch.context() as patch:
        patch.setattr(Transformer, "_fill_buckets", backwards)
        assert any("where another issues" in said for said in disorder(issued | orders([RANK]), by_issue=True))

    def swapped(self: DataBuckets, bucket: Any) -> None:
        for axis in ("data", "z"):
            self.communicator.all_reduce(bucket.gradient, axis, "step", bucket.layer).wait()

    monkeypatch.setattr(DataBuckets, "reduce_vectors", swapped)
    corners = [ORDERED_ON.rank({"x": 0, "y": 0, "z": place, "data": place}) for place in (0, 1)]
    assert any("wait for each other" in said for said in disorder(issued | orders(corners), by_issue=True))


def stages(chunks: int, count: int = 2) -> dict[int, list[Event]]:
    """What the stages of a pipeline alone issue and wait for, the last one first."""
    options = ORDERED | {"parts": 2, "micro_batches": 2 * count, "chunks": chunks, "stages": count, "timed": False}
    ranks = reversed(range(count))
    return {rank: simulate(options | {"stage": rank}, 0, steps=1, grid=Grid()).events for rank in ranks}


@pytest.mark.parametrize(("chunks", "count"), [(1, 2), (2, 2), (1, 4)])
def test_no_two_stages_wait_for_each_other(chunks: int, count: int) -> None:
    """Guards 1F1B, plain and interleaved, against hangs: what a stage waits for needs nothing it has yet to send."""
    assert disorder(stages(chunks, count), by_issue=False) == []


def test_a_message_sent_too_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the check: stages that send only once they have received something wait for each other for ever."""
    kept: list[tuple[Any, ...]] = []
    send, take = Outbox.send, Inbox.take

    def hesitant(self: Inbox) -> torch.Tensor:
        message = take(self)
        while kept:
            send(*kept.pop(0))
        return message

    monkeypatch.setattr(Outbox, "send", lambda *given: kept.append(given))
    monkeypatch.setattr(Inbox, "take", hesitant)
    assert any("wait for each other" in said for said in disorder(stages(1), by_issue=False))
