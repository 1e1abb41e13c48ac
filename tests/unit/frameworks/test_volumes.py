"""What each framework sends, against what its own code does: calls and bytes summed from its program.

Sources are those of the framework's file in `axonn_tune/frameworks/`; bytes are of the full slice of one
tensor-parallel rank, before the (n-1)/n of a ring and without padding.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest

from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.description import Framework
from axonn_tune.grid import Grid
from axonn_tune.program.dimensions import symbol_values
from axonn_tune.program.schedule import ISSUE, SYNC, build_schedule
from axonn_tune.program.step import ONLY, Behind, Stage, StepProgram, build_step
from axonn_tune.specs.workload import Recompute, Workload
from tests.unit.small import small_model

LAYERS, HIDDEN, FFN, VOCAB, LENGTH, BATCH = 8, 64, 256, 512, 128, 16
MODEL = small_model(layers=LAYERS, hidden=HIDDEN, ffn=FFN, vocab=VOCAB, max_sequence_length=LENGTH)
BLOCK, TABLE, POSITIONS, STREAM = 12 * HIDDEN**2, VOCAB * HIDDEN, LENGTH * HIDDEN, LENGTH * HIDDEN
WORKLOAD = Workload(global_batch=BATCH, sequence_length=LENGTH)
CORE, EASY, AXONN, TITAN, FSDP, DEEPSPEED = (
    find_framework(name) for name in ("megatron-core", "axonn", "megatron-axonn", "torchtitan", "fsdp", "deepspeed")
)
COLUMN, ROW = {"attention.qkv", "mlp.fc1"}, {"attention.output", "mlp.fc2"}
WEIGHTS = COLUMN | ROW
LINEARS = (*WEIGHTS, "block")
Sent: TypeAlias = dict[str, tuple[float, float]]


def built(framework: Framework, recompute: Recompute = "none", *, context: bool = False) -> StepProgram:
    """The program of the model above, 16 sequences of 128 tokens, micro-batches of 1."""
    return build_step(MODEL, WORKLOAD, recompute=recompute, options=framework.step, context=context)


def sent(framework: Framework, recompute: Recompute, sizes: dict[str, int], wanted: dict[str, Any]) -> Sent:
    """Calls and bytes in a step of one rank, by `kind axis`, of collectives whose fields have a wanted value."""
    grid = Grid(**sizes, order=("x", "y", "context", "z", "data", "pipeline"))
    values = symbol_values(MODEL, WORKLOAD, grid, micro_batch=1, options=framework.step, stage=ONLY)
    values |= {"kept": 0.0, "unkept": values["L"]}
    found: Sent = {}
    for one, count in built(framework, recompute, context=grid.context > 1).collectives(ONLY):
        asked = all(getattr(one, name) in value for name, value in wanted.items())
        if asked and grid.group_shape(one.axis).size > 1:
            calls, size_bytes = float(count.evaluate(values)), float(one.size_bytes.evaluate(values))
            before = found.get(f"{one.kind} {one.axis}", (0.0, 0.0))
            found[f"{one.kind} {one.axis}"] = before[0] + calls, before[1] + calls * size_bytes
    return found


def over(axis: str, *layers: str) -> dict[str, Any]:
    """Collectives over an axis, of some layers or of all."""
    return {"axis": (axis,)} | ({"layer": layers} if layers else {})


GTP, HSDP, TENSOR, CONTEXT = {"x": 2, "z": 4, "data": 2}, {"z": 4, "data": 2}, {"x": 4, "data": 4}, {"context": 4}
DATA, LOSS = {"role": ("data",)}, {"layer": ("loss", "loss.max", "loss.sums")}
BF16_CORE, PLAIN = CORE.with_step(shard_gradient_bytes=2), CORE.with_step(distributed_optimizer=False)
ALL_REDUCE, ULYSSES = CORE.with_step(sequence_parallel=False), CORE.with_step(context_exchange="all_to_all")
RING, GATHERED = CORE, CORE.with_step(context_exchange="all_gather")
HIERARCHY = CORE.with_step(context_exchange="hierarchical", context_inside=2)
BLOCKS = LAYERS * BLOCK
WHOLE = BLOCKS + 2 * TABLE + POSITIONS
SHARD = (BLOCKS + 2 * TABLE) / 2 / 4 + POSITIONS / 4
"""Elements of a rank under GTP, x = 2 and z = 4."""
PASSES = LAYERS * BATCH // 4
"""Passes of four ranks over their blocks."""


def weights(calls: int, elements: float, *, gathers: int, gathered: int, reduced: int) -> Sent:
    """Gathers and one reduction of weights over z; bytes of an element in each."""
    return {
        "all_gather z": (gathers * calls, gathers * gathered * elements),
        "reduce_scatter z": (calls, reduced * elements),
    }


ROWS: list[tuple[str, Framework, Recompute, dict[str, int], dict[str, Any], Sent]] = [
    # Table of Megatron-Core's guide: 6, 8 and 8 bytes of a weight and micro-batch, which is a third gather where
    # recomputed. 2 micro-batches; x halves the weights.
    *(
        ("gtp", one, recompute, GTP, over("z", *LINEARS), weights(64, BLOCKS, gathers=count, gathered=2, reduced=size))
        for one, recompute, count, size in (
            (BF16_CORE, "none", 2, 2), (CORE, "none", 2, 4), (BF16_CORE, "full", 3, 2),
            # Megatron-AxoNN since axonn c5ef65d gathers again in the backward pass.
            (AXONN, "none", 2, 2), (AXONN, "full", 3, 2),
        )
    ),
    # The LM head is gathered for each pass, the embedding once; vectors are summed once a step.
    ("gtp head", BF16_CORE, "none", {"x": 2, "z": 4}, over("z", "head"),
     weights(4, 2 * TABLE, gathers=2, gathered=2, reduced=2)),
    ("gtp embedding", BF16_CORE, "none", {"x": 2, "z": 4}, over("z", "embedding"),
     weights(4, 2 * TABLE, gathers=1, gathered=2, reduced=2)),
    # The distributed optimizer: FP32 gradients of each rank's shard out, BF16 weights back, once a step.
    ("gtp gradients", CORE, "none", GTP, DATA, {"reduce_scatter data": (11, 4 * SHARD)}),
    ("gtp new weights", CORE, "none", GTP, over("data") | {"kind": ("all_gather",)},
     {"all_gather data": (11, 2 * SHARD)}),
    ("gtp without", PLAIN, "none", GTP, DATA, {"all_reduce data": (11, 4 * SHARD)}),
    # AxoNN's easy API, traced under a fake process group: FP32 gathers, three with checkpoints of blocks, two without,
    # which the LM head never has; BF16 reduce-scatters.
    ("easy", EASY, "full", {"z": 8, "data": 2}, over("z", *LINEARS),
     weights(32, BLOCKS, gathers=3, gathered=4, reduced=2)),
    ("easy", EASY, "none", {"z": 8, "data": 2}, over("z", *LINEARS),
     weights(32, BLOCKS, gathers=2, gathered=4, reduced=2)),
    ("easy head", EASY, "full", {"z": 8, "data": 2}, over("z", "head"),
     weights(1, TABLE, gathers=2, gathered=4, reduced=2)),
    # Its `sync_gradients` all-reduces FP32 parameter by parameter; tables, which are not sharded, over all ranks.
    ("easy gradients", EASY, "none", {"z": 4, "data": 4}, DATA,
     {"all_reduce data": (4 * LAYERS + 1, BLOCKS + TABLE), "all_reduce zdata": (2, 4 * TABLE + 4 * POSITIONS)}),
    ("easy tables", EASY, "none", {"z": 4}, {"layer": ("embedding", "position")},
     {"all_reduce zdata": (2, 4 * TABLE + 4 * POSITIONS)}),
    ("easy loss", EASY, "none", {"z": 4}, LOSS, {}),
    # Megatron-AxoNN: tables are not over z; one FP32 buffer at the end, with the tables whole.
    ("axonn tables", AXONN, "none", GTP, over("z", "embedding", "head"), {"all_reduce z": (2, 4 * TABLE)}),
    ("axonn gradients", AXONN, "none", GTP, DATA, {"all_reduce data": (1, 4 * (BLOCKS / 8 + TABLE + POSITIONS))}),
    # FSDP2 with HSDP, traced with `fully_shard`: a block's BF16 gathers forward and backward, whatever is recomputed,
    # FP32 reduce-scatter and all-reduce of the shard, all in every micro-batch.
    *(
        ("hsdp", TITAN, recompute, HSDP, {"layer": ("block",)},
         weights(16, 16 * BLOCK, gathers=2, gathered=2, reduced=4) | {"all_reduce data": (16, 16 * BLOCK)})
        for recompute in ("none", "full")
    ),
    ("hsdp head", TITAN, "none", HSDP, over("z", "head") | {"kind": ("all_gather",)}, {"all_gather z": (2, 4 * TABLE)}),
    # llm-foundry's mixed precision PURE reduces in BF16.
    ("llm-foundry", FSDP, "none", HSDP, {"layer": ("block",)},
     weights(16, 16 * BLOCK, gathers=2, gathered=2, reduced=2) | {"all_reduce data": (16, 8 * BLOCK)}),
    # DeepSpeed: stage 3 reduces in each micro-batch (traced), stage 1 once a step, both ways in BF16.
    ("zero-3", DEEPSPEED, "none", {"z": 4}, {"role": ("weight_gradient",)},
     {"reduce_scatter z": (4 * (4 * LAYERS + 3), 8 * WHOLE)}),
    ("zero-1", DEEPSPEED, "none", {"data": 4}, over("data") | {"kind": ("reduce_scatter", "all_gather")},
     {"reduce_scatter data": (11, 2 * WHOLE), "all_gather data": (11, 2 * WHOLE)}),
    # Tensor parallelism, traced with Megatron-Core's layers: per pair of column- and row-parallel layers with sequence
    # parallelism an all-gather and a reduce-scatter forward, and again where recomputed; backward one more all-gather;
    # without it all-reduces.
    *(
        (f"tensor {phase}", one, "full", TENSOR, over("x", *LINEARS) | {"phase": (phase,)},
         {f"{kind} x": (count * PASSES, count * PASSES * 2 * STREAM) for kind, count in calls.items()})
        for one, phase, calls in (
            (CORE, "forward", {"all_gather": 2, "reduce_scatter": 2}),
            (CORE, "recompute", {"all_gather": 2, "reduce_scatter": 2}),
            (CORE, "backward", {"all_gather": 4, "reduce_scatter": 2}),
            *((ALL_REDUCE, phase, {"all_reduce": 2}) for phase in ("forward", "recompute", "backward")),
        )
    ),
    # Gradients of norms: once a step, with sequence parallelism alone.
    ("norms", CORE, "none", TENSOR, over("x", "vectors"), {"all_reduce x": (1, 4 * (4 * LAYERS + 2) * HIDDEN)}),
    ("norms", ALL_REDUCE, "none", TENSOR, over("x", "vectors"), {}),
    # The vocabulary-parallel loss: maximum, target logit and sum, one FP32 number a token each.
    ("loss", CORE, "none", TENSOR, LOSS, {"all_reduce xy": (12, 12 * 4 * LENGTH)}),
    # Keys and values of the whole sequence arrive forward; backward they do again, and their gradients go back. Around
    # a ring both are one call, of as many bytes.
    *(
        (f"context {phase}", one, "none", CONTEXT | {"x": 2}, over("context") | {"phase": (phase,), "role": (role,)},
         {f"{kind} context": (LAYERS * BATCH, LAYERS * BATCH * passes * 2 * HIDDEN * LENGTH) for kind in kinds})
        for one, role, phase, passes, kinds in (
            (RING, "keys", "forward", 1, ["all_gather"]), (RING, "keys", "backward", 2, ["all_gather"]),
            (GATHERED, "other", "forward", 1, ["all_gather"]),
            (GATHERED, "other", "backward", 1, ["all_gather", "reduce_scatter"]),
        )
    ),
    # Ulysses (arXiv 2309.14509, section 3.2): queries, keys, values and the output, forward and backward.
    *(
        ("ulysses", ULYSSES, "none", CONTEXT, {"kind": ("all_to_all",), "phase": (phase,)},
         {"all_to_all context": (2 * LAYERS * BATCH, LAYERS * BATCH * 2 * HIDDEN * LENGTH)})
        for phase in ("forward", "backward")
    ),
    # a2a+p2p, 2 ranks inside and 2 across: the same all-to-alls inside, and half of the heads around rings across.
    *(
        ("hierarchy", HIERARCHY, "none", CONTEXT, {"layer": ("attention.core",), "phase": (phase,)},
         {"all_to_all context[:2]": (2 * LAYERS * BATCH, LAYERS * BATCH * 2 * HIDDEN * LENGTH),
          "all_gather context[::2]": (LAYERS * BATCH, LAYERS * BATCH * passes * 2 * HIDDEN * LENGTH)})
        for phase, passes in (("forward", 1), ("backward", 2))
    ),
    # Context ranks are replicas under Megatron-Core, and hold shards under torchtitan.
    ("replicas", CORE, "none", {"context": 2, "data": 2}, DATA, {"reduce_scatter contextdata": (11, 4 * WHOLE)}),
    ("shards", TITAN, "none", {"context": 2, "z": 2}, over("zcontext") | {"role": ("weight_gradient",)},
     {"reduce_scatter zcontext": (8 * (LAYERS + 3), 32 * WHOLE)}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("framework", "recompute", "sizes", "wanted", "expected"),
    [row[1:] for row in ROWS],
    ids=[f"{row[1].name} {row[0]} {row[2]}" for row in ROWS],
)
def test_calls_and_bytes_of_a_step(
    framework: Framework, recompute: Recompute, sizes: dict[str, int], wanted: dict[str, Any], expected: Sent
) -> None:
    """Guards what a rank sends in a step: calls and bytes by collective and axis."""
    assert sent(framework, recompute, sizes, wanted) == expected


GATHERS, SCATTERS = {"kind": "all_gather"}, {"kind": "reduce_scatter"}


@pytest.mark.parametrize(
    ("framework", "recompute", "wanted", "waited_for", "behind"),
    [
        # The easy API's context wraps the forward pass only: gathers of recompute and of the backward pass, and every
        # reduce-scatter, block.
        (EASY, "full", {**GATHERS, "axis": "z", "phase": "forward"}, set(), {*WEIGHTS, "head"}),
        (EASY, "full", {**GATHERS, "axis": "z", "phase": "recompute"}, WEIGHTS, set()),
        (EASY, "full", {**GATHERS, "axis": "z", "phase": "backward"}, {*WEIGHTS, "head"}, set()),
        (EASY, "full", {**SCATTERS, "axis": "z"}, {*WEIGHTS, "head"}, set()),
        (EASY, "none", {"role": "data"}, {*WEIGHTS, "head", "embedding", "position"}, set()),
        # Megatron-AxoNN refuses overlapped data reduction.
        *(
            (AXONN, recompute, wanted, *layers)
            for recompute in ("none", "full")
            for wanted, layers in (
                ({**GATHERS, "phase": "backward", "role": "weight"}, (WEIGHTS, set())),
                ({**GATHERS, "phase": "forward", "role": "weight"}, (set(), WEIGHTS)),
                ({**SCATTERS, "role": "weight_gradient"}, (set(), WEIGHTS)),
            )
        ),
        (AXONN, "none", {"role": "data"}, {"gradients"}, set()),
        (CORE, "none", {**GATHERS, "axis": "x", "phase": "forward"}, {*COLUMN, "head"}, set()),
        (CORE, "none", {**SCATTERS, "axis": "x", "phase": "forward"}, {*ROW, "embedding"}, set()),
        (CORE, "none", {**GATHERS, "axis": "x", "phase": "backward"}, {*ROW, "embedding"}, {*COLUMN, "head"}),
        (CORE, "none", {**SCATTERS, "axis": "x", "phase": "backward"}, {"head"}, COLUMN),
        (ALL_REDUCE, "none", {"axis": "x", "phase": "backward"}, {"head"}, COLUMN),
    ],
)
def test_what_the_compute_stream_waits_for(
    framework: Framework, recompute: Recompute, wanted: dict[str, str], waited_for: set[str], behind: set[str]
) -> None:
    """Guards what overlaps: layers of collectives that are waited for at once, and of those that are not."""
    schedule = build_schedule(built(framework, recompute), overlaps=WORKLOAD.overlaps, split=False)
    one, block = schedule.last_micro_batch, Behind(0)
    ahead = one.embedding(0), one.forward(0, 0), one.forward(0, None, head=True), one.head(0)
    parts = (
        *ahead,
        *(one.backward(*place) for place in ((None, block, 0), (0, block, 0), (0, block, None))),
        one.flush(0),
    )
    steps = [step for part in (*parts, schedule.ends[ONLY]) for step in part]
    for kind, expected in ((SYNC, waited_for), (ISSUE, behind)):
        chosen = (schedule.collectives[number] for code, number, _ in steps if code == kind)
        assert {
            each.layer for each in chosen if all(getattr(each, name) == value for name, value in wanted.items())
        } == expected


def test_a_block_that_is_not_resharded_is_gathered_once() -> None:
    """Guards `reshard_after_forward=False`: the backward all-gather disappears (traced)."""
    gathers = [one for one, _ in built(TITAN).collectives() if one.layer == "block" and one.phase == "backward"]
    assert [str(one.calls) for one in gathers if one.kind == "all_gather"] == ["unkept/L"]


def test_tied_embeddings_are_summed_between_the_ends() -> None:
    """Guards a tied embedding with stages: its gradients are all-reduced between first and last stage once, and the
    last stage's copy is reduced over data as the first's is."""
    tied = MODEL.model_copy(update={"tied_embeddings": True})
    program = build_step(tied, WORKLOAD, recompute="none", options=CORE.step)
    grid = Grid(x=2, data=2, pipeline=4, order=("x", "data", "pipeline"))
    for stage, expected in ((Stage(True, False), 1), (Stage(False, False), 0), (Stage(False, True), 1), (ONLY, 0)):
        values = symbol_values(tied, WORKLOAD, grid, micro_batch=1, options=CORE.step, stage=stage)
        found = [one for one, _ in program.collectives(stage)]
        ends = [one for one in found if one.axis == "ends"]
        tables = [one for one in found if one.role == "data" and one.layer.startswith("embedding")]
        assert [one.size_bytes.evaluate(values) for one in ends] == [4 * TABLE / 2] * expected
        assert len(tables) == (1 if stage == ONLY else expected)
