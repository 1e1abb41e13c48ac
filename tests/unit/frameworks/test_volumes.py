"""What each framework sends, against what its own code does: bytes and calls summed from its program.

Sources are those of the framework's file in `axonn_tune/frameworks/`; numbers of bytes are per element of the weight's
full slice of one tensor-parallel rank, before the (n-1)/n of a ring and without padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.description import Framework
from axonn_tune.grid import Grid
from axonn_tune.program.dimensions import symbol_values
from axonn_tune.program.operations import Collective
from axonn_tune.program.schedule import ISSUE, SYNC, Instructions, build_schedule
from axonn_tune.program.step import ONLY, Stage, StepProgram, build_step
from axonn_tune.specs.workload import Recompute, Workload
from tests.unit.small import small_model

LAYERS, HIDDEN, FFN, VOCAB, LENGTH, BATCH = 8, 64, 256, 512, 128, 16
MODEL = small_model(layers=LAYERS, hidden=HIDDEN, ffn=FFN, vocab=VOCAB, max_sequence_length=LENGTH)
BLOCK = 12 * HIDDEN**2
TABLE = VOCAB * HIDDEN
BF16 = 2
CORE, EASY, MEGATRON_AXONN, TITAN, FSDP, DEEPSPEED = (
    find_framework(name) for name in ("megatron-core", "axonn", "megatron-axonn", "torchtitan", "fsdp", "deepspeed")
)


@dataclass(frozen=True)
class Sent:
    """All calls of one collective in a step of one rank."""

    collective: Collective
    calls: float
    size_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.calls * self.size_bytes


def built(framework: Framework, recompute: Recompute = "none", *, context: bool = False) -> StepProgram:
    """The program of the model above, 16 sequences of 128 tokens, micro-batches of 1."""
    workload = Workload(global_batch=BATCH, sequence_length=LENGTH)
    return build_step(MODEL, workload, recompute=recompute, options=framework.step, context=context)


def sent(framework: Framework, recompute: Recompute = "none", *, stage: Stage = ONLY, **sizes: int) -> Iterator[Sent]:
    """Every collective of a group with several members."""
    grid = Grid(**sizes, order=("x", "y", "context", "z", "data", "pipeline"))
    program = built(framework, recompute, context=grid.context > 1)
    workload = Workload(global_batch=BATCH, sequence_length=LENGTH)
    values = symbol_values(MODEL, workload, grid, micro_batch=1, options=framework.step, stage=stage)
    values |= {"kept": 0.0, "unkept": values["L"]}
    for collective, calls in program.collectives(stage):
        if grid.group_shape(collective.axis).size > 1:
            numbers = calls.evaluate(values), collective.size_bytes.evaluate(values)
            yield Sent(collective, *map(float, numbers))


def bytes_of(found: Iterator[Sent], *, micro_batches: int, elements: float, **wanted: str | tuple[str, ...]) -> float:
    """Bytes per element and micro-batch of those collectives whose fields have one of the wanted values."""
    total = 0.0
    for one in found:
        fields = ((name, (value,) if isinstance(value, str) else value) for name, value in wanted.items())
        if all(getattr(one.collective, name) in values for name, values in fields):
            total += one.total_bytes
    return total / micro_batches / elements


LINEARS = ("attention.qkv", "attention.output", "mlp.fc1", "mlp.fc2", "block")


# GTP: Megatron-Core's guide, table of bytes per weight element and micro-batch.


@pytest.mark.parametrize(
    ("shard_gradient_bytes", "recompute", "expected"), [(2, "none", 6.0), (4, "none", 8.0), (2, "full", 8.0)]
)
def test_gtp_moves_the_bytes_of_its_guide(shard_gradient_bytes: int, recompute: Recompute, expected: float) -> None:
    """Guards z under Megatron-Core: two gathers of BF16 and a reduce-scatter of BF16 (6.0) or FP32 main gradients
    (8.0), each micro-batch; one more gather (+2) where recomputed. From the guide's table for BF16.
    """
    framework = CORE.with_step(shard_gradient_bytes=shard_gradient_bytes)
    found = list(sent(framework, recompute, x=2, z=4, data=2))
    micro_batches = BATCH // 8
    blocks = bytes_of(iter(found), micro_batches=micro_batches, elements=LAYERS * BLOCK / 2, axis="z", layer=LINEARS)
    assert blocks == pytest.approx(expected)


def test_gtp_shards_both_tables() -> None:
    """Guards the ends under GTP: the output layer is gathered for each pass (6.0 with BF16 gradients), the embedding
    once (2 and 2); vectors are summed over z once a step."""
    framework = CORE.with_step(shard_gradient_bytes=2)
    found = [one for one in sent(framework, x=2, z=4) if one.collective.axis == "z"]
    head, embedding = (
        bytes_of(iter(found), micro_batches=BATCH // 4, elements=TABLE / 2, layer=layer)
        for layer in ("head", "embedding")
    )
    assert (head, embedding) == (6.0, 4.0)
    assert [one.calls for one in found if one.collective.layer == "vectors"] == [1]


def test_gtp_gradients_go_over_data_once_in_fp32_and_weights_return_in_bf16() -> None:
    """Guards the distributed optimizer: FP32 reduce-scatter of each rank's shard, then a BF16 all-gather of all of
    it, once a step, tables included; without a distributed optimizer one all-reduce."""
    shard = (LAYERS * BLOCK + 2 * TABLE) / 2 / 4 + LENGTH * HIDDEN / 4
    found = [one for one in sent(CORE, x=2, z=4, data=2) if one.collective.axis == "data"]
    gradients = [one for one in found if one.collective.role == "data"]
    weights = [one for one in found if one.collective.kind == "all_gather"]
    assert {one.collective.kind for one in gradients} == {"reduce_scatter"}
    assert sum(one.total_bytes for one in gradients) == pytest.approx(4 * shard)
    assert sum(one.total_bytes for one in weights) == pytest.approx(2 * shard)
    plain = CORE.with_step(distributed_optimizer=False)
    reduced = [one for one in sent(plain, x=2, z=4, data=2) if one.collective.role == "data"]
    assert {one.collective.kind for one in reduced} == {"all_reduce"}
    assert sum(one.total_bytes for one in reduced) == pytest.approx(4 * shard)


# AxoNN: what its easy API and Megatron-AxoNN do.


@pytest.mark.parametrize(("recompute", "expected"), [("full", 14.0), ("none", 10.0)])
def test_easy_axonn_gathers_fp32_and_reduces_bf16(recompute: Recompute, expected: float) -> None:
    """Guards AxoNN's easy API: three gathers of 4 bytes with checkpointing, two without, one reduce-scatter of 2;
    the LM head, never checkpointed, 10. Traced: axonn develop under a fake process group."""
    found = list(sent(EASY, recompute, z=8, data=2))
    blocks, head = (
        bytes_of(iter(found), micro_batches=1, elements=elements, axis="z", layer=layers, kind=kinds)
        for elements, layers in ((LAYERS * BLOCK, LINEARS), (TABLE, ("head",)))
        for kinds in (("all_gather", "reduce_scatter"),)
    )
    assert blocks == pytest.approx(expected)
    assert head == pytest.approx(10.0)


def test_easy_axonn_reduces_each_parameter_once_and_blocks() -> None:
    """Guards the end of AxoNN's step: `sync_gradients` all-reduces FP32 parameter by parameter over data, the
    embedding and the positions, which are not sharded, over all ranks; nothing of it runs behind the backward pass."""
    found = [one for one in sent(EASY, z=4, data=4) if one.collective.role == "data"]
    calls = {one.collective.layer: (one.collective.axis, one.calls, one.size_bytes) for one in found}
    assert calls == {
        "attention.qkv": ("data", LAYERS, 4 * 3 * HIDDEN**2 / 4),
        "attention.output": ("data", LAYERS, 4 * HIDDEN**2 / 4),
        "mlp.fc1": ("data", LAYERS, 4 * HIDDEN * FFN / 4),
        "mlp.fc2": ("data", LAYERS, 4 * HIDDEN * FFN / 4),
        "head": ("data", 1, 4 * TABLE / 4),
        "embedding": ("zdata", 1, 4 * TABLE),
        "position": ("zdata", 1, 4 * LENGTH * HIDDEN),
    }
    assert all(one.collective.kind == "all_reduce" and one.collective.phase == "step" for one in found)
    tables = [one.collective.kind for one in sent(EASY, z=4) if one.collective.layer in ("embedding", "position")]
    assert tables == ["all_reduce", "all_reduce"]


def blocking(framework: Framework, recompute: Recompute, **wanted: str) -> tuple[set[str], set[str]]:
    """Layers of collectives that the compute stream waits for at once, and of those it does not."""
    program = built(framework, recompute)
    schedule = build_schedule(program, overlaps=Workload(global_batch=1, sequence_length=1).overlaps, split=False)
    batch = back = schedule.last_micro_batch
    parts: tuple[Instructions, ...] = (batch.embedding, batch.block, batch.last_block, batch.head, batch.flush)
    parts += (back.first, back.middle, back.last, schedule.ends[ONLY])
    steps = [step for part in parts for step in part]

    def layers(kind: int) -> set[str]:
        chosen = (schedule.collectives[number] for code, number, _ in steps if code == kind)
        return {one.layer for one in chosen if all(getattr(one, name) == value for name, value in wanted.items())}

    return layers(SYNC), layers(ISSUE)


def test_easy_axonn_prefetches_forward_gathers_alone() -> None:
    """Guards what overlaps in the easy API's published runs: the context wraps the forward pass only, so gathers of
    recompute and of the backward pass, and every reduce-scatter, block."""
    weights = set(LINEARS) - {"block"}
    assert blocking(EASY, "full", kind="all_gather", axis="z", phase="forward") == (set(), {*weights, "head"})
    assert blocking(EASY, "full", kind="all_gather", axis="z", phase="recompute") == (weights, set())
    assert blocking(EASY, "full", kind="all_gather", axis="z", phase="backward") == ({*weights, "head"}, set())
    assert blocking(EASY, "full", kind="reduce_scatter", axis="z") == ({*weights, "head"}, set())


@pytest.mark.parametrize(("recompute", "gathers"), [("full", 3), ("none", 2)])
def test_megatron_axonn_gathers_again_in_the_backward_pass(recompute: Recompute, gathers: int) -> None:
    """Guards the paper's software since axonn c5ef65d: BF16 gathers 3 with full recompute and 2 without, that of the
    backward pass blocking, and one BF16 reduce-scatter behind the next layer; tables not over z."""
    found = list(sent(MEGATRON_AXONN, recompute, x=2, z=4, data=2))
    micro_batches = BATCH // 8
    moved = bytes_of(iter(found), micro_batches=micro_batches, elements=LAYERS * BLOCK / 2, axis="z", layer=LINEARS)
    assert moved == pytest.approx(2 * gathers + 2)
    weights = set(LINEARS) - {"block"}
    assert blocking(MEGATRON_AXONN, recompute, kind="all_gather", phase="backward", role="weight")[0] == weights
    assert blocking(MEGATRON_AXONN, recompute, kind="all_gather", phase="forward", role="weight")[1] == weights
    assert blocking(MEGATRON_AXONN, recompute, kind="reduce_scatter", role="weight_gradient") == (set(), weights)
    tables = [one for one in found if one.collective.axis == "z" and one.collective.layer in ("embedding", "head")]
    assert [(one.collective.kind, one.calls, one.size_bytes) for one in tables] == [
        ("all_reduce", 1, 4 * TABLE / 2)
    ] * 2


def test_megatron_axonn_reduces_one_fp32_buffer() -> None:
    """Guards its data reduction: overlapped reduction is refused by its arguments, so one FP32 all-reduce of the whole
    gradient buffer at the end, with the tables that z does not split."""
    found = [one for one in sent(MEGATRON_AXONN, x=2, z=4, data=2) if one.collective.role == "data"]
    assert [(one.collective.kind, one.calls) for one in found] == [("all_reduce", 1)]
    whole = LAYERS * BLOCK / 8 + 2 * TABLE / 2 + LENGTH * HIDDEN
    assert found[0].size_bytes == pytest.approx(4 * whole)
    assert blocking(MEGATRON_AXONN, "none", role="data") == ({"gradients"}, set())


# FSDP2, HSDP, ZeRO.


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_fsdp2_gathers_each_unit_for_each_pass(recompute: Recompute) -> None:
    """Guards torchtitan's z and data: a block's BF16 all-gather forward and backward, whatever is recomputed, FP32
    reduce-scatter, FP32 all-reduce of the shard over data, all in every micro-batch. Traced: `fully_shard` on HSDP.
    """
    found = list(sent(TITAN, recompute, z=4, data=2))
    micro_batches = BATCH // 8
    blocks = [one for one in found if one.collective.layer == "block"]
    calls = [(one.collective.kind, one.collective.axis, one.calls, one.size_bytes) for one in blocks]
    assert sorted(calls) == sorted(
        [
            ("all_gather", "z", LAYERS * micro_batches, BF16 * BLOCK),
            ("all_gather", "z", LAYERS * micro_batches, BF16 * BLOCK),
            ("reduce_scatter", "z", LAYERS * micro_batches, 4 * BLOCK),
            ("all_reduce", "data", LAYERS * micro_batches, 4 * BLOCK / 4),
        ]
    )
    head = [one for one in found if one.collective.layer == "head" and one.collective.kind == "all_gather"]
    assert [one.calls for one in head] == [micro_batches]


def test_fsdp_of_llm_foundry_reduces_in_bf16() -> None:
    """Guards llm-foundry's mixed precision PURE: reduce-scatter and all-reduce of the shard in BF16."""
    found = {
        (one.collective.kind, one.collective.axis): one
        for one in sent(FSDP, z=4, data=2)
        if one.collective.layer == "block"
    }
    assert found["reduce_scatter", "z"].size_bytes == BF16 * BLOCK
    assert found["all_reduce", "data"].size_bytes == BF16 * BLOCK / 4


def test_a_block_that_is_not_resharded_is_gathered_once() -> None:
    """Guards `reshard_after_forward=False`: the backward all-gather disappears (traced)."""
    program = built(TITAN)
    gathers = [one for one, _ in program.collectives() if one.layer == "block" and one.phase == "backward"]
    kept = [one for one in gathers if one.kind == "all_gather"]
    assert [str(one.calls) for one in kept] == ["unkept/L"]


def test_zero_3_reduces_every_micro_batch_and_zero_1_once() -> None:
    """Guards DeepSpeed: stage 3 reduce-scatters in each micro-batch (traced); stage 1 reduces over data once a step
    in BF16 and gathers new weights in BF16."""
    micro_batches = BATCH // 4
    sharded = [one for one in sent(DEEPSPEED, z=4) if one.collective.role == "weight_gradient"]
    assert {one.calls for one in sharded} == {LAYERS * micro_batches, micro_batches}
    shard = LAYERS * BLOCK + 2 * TABLE + LENGTH * HIDDEN
    found = [one for one in sent(DEEPSPEED, data=4) if one.collective.axis == "data"]
    assert sum(one.total_bytes for one in found if one.collective.kind == "reduce_scatter") == BF16 * shard
    assert sum(one.total_bytes for one in found if one.collective.kind == "all_gather") == BF16 * shard


# Tensor and sequence parallelism of Megatron-Core, traced with its layers under a fake process group.


def tensor_calls(framework: Framework, recompute: Recompute) -> dict[str, list[tuple[str, float]]]:
    """Kind and elements, over those of the stream, of each collective over x of a block, by phase."""
    found: dict[str, list[tuple[str, float]]] = {}
    for one in sent(framework, recompute, x=4, data=4):
        layer, axis = one.collective.layer, one.collective.axis
        if axis == "x" and layer in LINEARS:
            each = one.calls / LAYERS / (BATCH // 4)
            assert each == 1
            found.setdefault(one.collective.phase, []).append(
                (one.collective.kind, one.size_bytes / BF16 / LENGTH / HIDDEN)
            )
    return found


GATHER, SCATTER, REDUCE = ("all_gather", 1.0), ("reduce_scatter", 1.0), ("all_reduce", 1.0)


def test_sequence_parallel_collectives_of_a_block() -> None:
    """Guards x with sequence parallelism, per pair of column- and row-parallel layers: forward an all-gather and a
    reduce-scatter, both blocking; backward a blocking all-gather of the row layer's gradient, an all-gather of the
    column layer's input and a reduce-scatter beside GEMMs; recompute repeats the forward's two. All of n·h elements."""
    found = tensor_calls(CORE, "full")
    assert found["forward"] == [GATHER, SCATTER] * 2
    assert found["recompute"] == [GATHER, SCATTER] * 2
    assert found["backward"] == [GATHER, GATHER, SCATTER] * 2
    column, row = {"attention.qkv", "mlp.fc1"}, {"attention.output", "mlp.fc2"}
    assert blocking(CORE, "none", axis="x", phase="forward", kind="all_gather")[0] == {*column, "head"}
    assert blocking(CORE, "none", axis="x", phase="forward", kind="reduce_scatter") == ({*row, "embedding"}, set())
    gathers = blocking(CORE, "none", axis="x", phase="backward", kind="all_gather")
    assert gathers == ({*row, "embedding"}, {*column, "head"})
    assert blocking(CORE, "none", axis="x", phase="backward", kind="reduce_scatter") == ({"head"}, column)


def test_tensor_parallel_collectives_without_sequence_parallelism() -> None:
    """Guards x alone: forward an all-reduce after each row-parallel layer, blocking; backward one of each
    column-parallel layer's input gradient, beside the weight-gradient GEMM."""
    framework = CORE.with_step(sequence_parallel=False)
    found = tensor_calls(framework, "full")
    assert found == {"forward": [REDUCE] * 2, "recompute": [REDUCE] * 2, "backward": [REDUCE] * 2}
    assert blocking(framework, "none", axis="x", phase="forward")[0] >= {"attention.output", "mlp.fc2"}
    assert blocking(framework, "none", axis="x", phase="backward")[1] == {"attention.qkv", "mlp.fc1"}


def test_norm_gradients_are_summed_over_tensor_ranks_with_sequence_parallelism() -> None:
    """Guards the end of the step: one all-reduce of norm gradients over x, with sequence parallelism alone."""
    of_vectors = [one for one in sent(CORE, x=4, data=4) if one.collective.layer == "vectors"]
    assert [one.calls for one in of_vectors if one.collective.axis == "x"] == [1]
    without = sent(CORE.with_step(sequence_parallel=False), x=4, data=4)
    assert not [one for one in without if one.collective.layer == "vectors" and one.collective.axis == "x"]


def test_loss_reductions() -> None:
    """Guards the vocabulary-parallel loss: Megatron-Core all-reduces maximum, target logit and sum, one FP32 number a
    token each; AxoNN's easy API nothing."""
    found = [one for one in sent(CORE, x=4, data=4) if one.collective.layer.startswith("loss")]
    assert [(one.collective.kind, one.calls, one.size_bytes) for one in found] == [
        ("all_reduce", BATCH // 4, 4 * LENGTH)
    ] * 3
    assert not [one for one in sent(EASY, z=4) if one.collective.layer.startswith("loss")]


# Context parallelism.


@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
def test_context_ranks_exchange_keys_and_values(exchange: str) -> None:
    """Guards context with a ring or an all-gather: keys and values of the whole sequence arrive in the forward pass
    (2·kv_heads·head_dim·S elements, (c-1)/c of it sent), as much and their gradients in the backward pass."""
    framework = CORE.with_step(context_exchange=exchange, context_overlap=exchange == "ring")
    found = [one for one in sent(framework, x=2, context=4) if one.collective.axis == "context"]
    keys = {one.collective.phase: one for one in found if one.collective.layer == "attention.core"}
    whole = BF16 * 2 * HIDDEN / 2 * LENGTH
    assert keys["forward"].size_bytes == whole
    assert keys["backward"].size_bytes == 2 * whole
    assert {one.calls for one in keys.values()} == {LAYERS * BATCH}
    assert {one.collective.role for one in keys.values()} == {"keys" if exchange == "ring" else "other"}


def test_context_by_all_to_all_moves_heads() -> None:
    """Guards Ulysses (arXiv 2309.14509, section 3.2): all-to-alls of queries, keys, values and the output, 4·n·h
    elements a rank forward, the same backward."""
    framework = CORE.with_step(context_exchange="all_to_all")
    found = [one for one in sent(framework, context=4) if one.collective.kind == "all_to_all"]
    for phase in ("forward", "backward"):
        moved = sum(one.size_bytes for one in found if one.collective.phase == phase)
        assert moved == BF16 * 4 * HIDDEN * LENGTH / 4
    assert {one.collective.role for one in found} == {"other"}


def test_gradients_are_summed_over_context_as_over_data_or_sharded_over_it() -> None:
    """Guards who shares weights: context ranks are replicas under Megatron-Core, and hold shards under torchtitan."""
    core = {one.collective.axis for one in sent(CORE, context=2, data=2) if one.collective.role == "data"}
    titan = {one.collective.axis for one in sent(TITAN, context=2, z=2) if one.collective.role == "weight_gradient"}
    assert (core, titan) == ({"contextdata"}, {"zcontext"})


# Tied embeddings over pipeline stages.


def test_tied_embeddings_are_summed_between_the_ends() -> None:
    """Guards a tied embedding with stages: its gradients are all-reduced between first and last stage once, and the
    last stage's copy is reduced over data as the first's is."""
    tied = MODEL.model_copy(update={"tied_embeddings": True})
    workload = Workload(global_batch=BATCH, sequence_length=LENGTH)
    program = build_step(tied, workload, recompute="none", options=CORE.step)
    grid = Grid(x=2, data=2, pipeline=4, order=("x", "data", "pipeline"))
    for stage, expected in ((Stage(True, False), 1), (Stage(False, False), 0), (Stage(False, True), 1), (ONLY, 0)):
        values = symbol_values(tied, workload, grid, micro_batch=1, options=CORE.step, stage=stage)
        found = [one for one, _ in program.collectives(stage)]
        ends = [one for one in found if one.axis == "ends"]
        tables = [one for one in found if one.role == "data" and one.layer.startswith("embedding")]
        assert [one.size_bytes.evaluate(values) for one in ends] == [4 * TABLE / 2] * expected
        assert len(tables) == (1 if stage == ONLY else expected)


def test_options_that_are_not_used_change_nothing() -> None:
    """Guards the bundled runtime: spelling out that tables are sharded and gradients reduced as accumulated gives the
    same operations."""
    runtime = find_framework("axonn-tune")
    spelled = replace(runtime, step=replace(runtime.step, reduced_bytes=4, gradient_bytes=4, replicated_tables=()))
    assert list(built(runtime).calls()) == list(built(spelled).calls())
