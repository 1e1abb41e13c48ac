"""The exchanges of context parallelism: what they send, worked out by hand, their groups, and their limits."""

from __future__ import annotations

from itertools import pairwise

import pytest

from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.step import ContextExchange
from axonn_tune.grid import Grid
from axonn_tune.program.dimensions import symbol_values
from axonn_tune.program.feasibility import broken_constraints
from axonn_tune.program.operations import Collective
from axonn_tune.program.schedule import ISSUE, SYNC, WAIT, build_schedule
from axonn_tune.program.step import build_step
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload
from tests.unit.small import small_model

CORE = find_framework("megatron-core")
MODEL = small_model(family="llama", heads=16, kv_heads=8, head_dim=4)
WORKLOAD = Workload(global_batch=8, sequence_length=128)
# TP 2, CP 4, micro-batches of 3: 128 / 4 · 3 tokens of a rank, 8 query heads of 4, 4 key and 4 value heads, 2 bytes.
TOKENS, QUERIES, KEYS, ELEMENT, CP = 96, 32, 32, 2, 4
SENDS: dict[ContextExchange, dict[str, list[tuple[str, str, float]]]] = {
    # CP - 1 sends of a rank's own keys and values; backward of their gradients, too.
    "ring": {
        "forward": [("all_gather", "context", (CP - 1) * TOKENS * KEYS * ELEMENT)],
        "backward": [("all_gather", "context", (CP - 1) * TOKENS * 2 * KEYS * ELEMENT)],
    },
    "all_gather": {
        "forward": [("all_gather", "context", (CP - 1) * TOKENS * KEYS * ELEMENT)],
        "backward": [
            (kind, "context", (CP - 1) * TOKENS * KEYS * ELEMENT) for kind in ("all_gather", "reduce_scatter")
        ],
    },
    # All but a rank's own heads leave it: of q, k and v, and all but its own tokens of the output.
    "all_to_all": {
        "forward": [("all_to_all", "context", TOKENS * width * ELEMENT * 3 / 4) for width in (QUERIES + KEYS, QUERIES)],
        "backward": [
            ("all_to_all", "context", TOKENS * width * ELEMENT * 3 / 4) for width in (QUERIES, QUERIES + KEYS)
        ],
    },
    # Groups of 2 inside: half leaves; then each rank has half of the heads for twice the tokens, sent once across.
    "hierarchical": {
        "forward": [
            ("all_to_all", "context[:2]", TOKENS * (QUERIES + KEYS) * ELEMENT / 2),
            ("all_gather", "context[::2]", 2 * TOKENS * KEYS / 2 * ELEMENT),
            ("all_to_all", "context[:2]", TOKENS * QUERIES * ELEMENT / 2),
        ],
        "backward": [
            ("all_to_all", "context[:2]", TOKENS * QUERIES * ELEMENT / 2),
            ("all_gather", "context[::2]", 2 * 2 * TOKENS * KEYS / 2 * ELEMENT),
            ("all_to_all", "context[:2]", TOKENS * (QUERIES + KEYS) * ELEMENT / 2),
        ],
    },
}


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("exchange", SENDS)
def test_bytes_that_a_rank_sends(exchange: ContextExchange, phase: str) -> None:
    """Guards each exchange in a layer: its collectives in their order, and the bytes that leave a rank."""
    options = CORE.with_step(context_exchange=exchange, context_inside=2).step
    grid = Grid(x=2, context=CP, order=CORE.axes)
    program = build_step(MODEL, WORKLOAD, recompute="none", options=options, context=True)
    values = symbol_values(MODEL, WORKLOAD, grid, micro_batch=3, options=options)
    section = program.blocks[0].forward if phase == "forward" else program.blocks[0].backward
    found = []
    for one in section.operations:
        if isinstance(one, Collective) and one.axis.startswith("context"):
            ranks, whole = grid.group_shape(one.axis).size, one.size_bytes.evaluate(values)
            found.append((one.kind, one.axis, float(whole) * (ranks - 1) / ranks))
    assert found == SENDS[exchange][phase]


@pytest.mark.parametrize("exchange", SENDS)
def test_a_ring_alone_overlaps_with_attention(exchange: ContextExchange) -> None:
    """Guards what is exposed; the ring of a hierarchy has ended before its heads go back."""
    options = CORE.with_step(context_exchange=exchange, context_inside=2).step
    program = build_step(MODEL, WORKLOAD, recompute="none", options=options, context=True)
    schedule = build_schedule(program, overlaps=WORKLOAD.overlaps, split=False)
    codes, rings = [], set[int]()
    for code, number, handle in schedule.micro_batch.forward(0, 0):
        if code in (ISSUE, SYNC) and schedule.collectives[number].axis.startswith("context"):
            codes.append((code, schedule.collectives[number].axis))
            rings |= {handle} if code == ISSUE else set()
        elif code == WAIT and number in rings:
            codes.append((WAIT, "keys"))
    inner, outer = (SYNC, "context[:2]"), [(ISSUE, "context[::2]"), (WAIT, "keys")]
    assert (
        codes
        == {
            "ring": [(ISSUE, "context"), (WAIT, "keys")],
            "all_gather": [(SYNC, "context")],
            "all_to_all": [(SYNC, "context")] * 2,
            "hierarchical": [inner, *outer, inner],
        }[exchange]
    )


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_groups_of_a_hierarchy(count: int) -> None:
    """Guards both groups: neighbours inside, one rank of each of them across, as Megatron-Core makes them."""
    grid = Grid(x=2, context=8, data=2, order=CORE.axes)
    ranks = grid.members(0, "context")
    for axes, members in ((f"context[:{count}]", ranks[:count]), (f"context[::{count}]", ranks[::count])):
        shape = grid.group_shape(axes)
        assert shape.size == len(members)
        strides = {after - before for before, after in pairwise(members)}
        assert [stride for _, stride in shape.levels] == [*strides]


WINDOWED = Model.model_validate(
    {**small_model(kv_heads=8).model_dump(by_alias=True), "layer_types": {"a": {"window": 16}}}
)
NO_RING = "context parallelism does not support sliding window attention with ring"


@pytest.mark.parametrize(
    ("model", "exchange", "sizes", "why"),
    [
        (MODEL, "all_to_all", {"x": 2, "context": 4}, None),
        (MODEL, "all_to_all", {"x": 2, "context": 8}, "kv_heads (8) is not divisible by TP·CP = 16"),
        # More ranks of TP than key heads are fine without context.
        (MODEL, "all_to_all", {"x": 16}, None),
        (MODEL, "ring", {"x": 2, "context": 8}, None),
        (MODEL, "hierarchical", {"x": 4, "context": 8}, None),
        (MODEL, "hierarchical", {"x": 8, "context": 8}, "kv_heads (8) is not divisible by 2·TP = 16"),
        (
            MODEL,
            "hierarchical",
            {"context": 3},
            "CP = 3 is not divisible by the first of hierarchical_context_parallel_sizes (2)",
        ),
        (WINDOWED, "ring", {"context": 2}, NO_RING),
        (WINDOWED, "ring", {}, None),
        (WINDOWED, "all_gather", {"context": 2}, None),
        (WINDOWED, "all_to_all", {"context": 2}, None),
    ],
)
def test_limits(model: Model, exchange: ContextExchange, sizes: dict[str, int], why: str | None) -> None:
    """Guards what Transformer Engine and Megatron-Core refuse, in their names of the axes."""
    framework = CORE.with_step(context_exchange=exchange, context_inside=2)
    workload = Workload(global_batch=8, sequence_length=96 if sizes.get("context") == 3 else 128)
    found = broken_constraints(Grid(**sizes, order=CORE.axes), model, workload, framework, micro_batch=1)
    assert found == ([why] if why else [])
