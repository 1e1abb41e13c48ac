"""One training step, described once: the cost model prices it, the memory model sizes it, the runtime must match it.

A step is `A` micro-batches, each forward through embedding, L blocks and the head, then backward; the
data-parallel buckets go out during the last backward pass; then the optimizer. Sections list one
rank's operations in the order they are issued when nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from axonn_tune.program import layers, tables
from axonn_tune.program.layers import ATTENTION_OUTPUT, BLOCK_LINEARS, FC1, FC2, PART, PARTS, QKV, Context
from axonn_tune.program.operations import ONCE, Collective, Operation, Phase
from axonn_tune.program.size import Size, symbol
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Recompute, Workload

ACCUMULATION, BLOCKS = symbol("A"), symbol("L")


@dataclass(frozen=True)
class Section:
    """Operations done one after the other, `repeats` times a step."""

    name: str
    repeats: Size
    operations: tuple[Operation, ...]


@dataclass(frozen=True)
class StepProgram:
    """All sections of one step, for one model, workload and kind of recomputation."""

    recompute: Recompute
    embedding: Section
    block: Section
    head: Section
    block_backward: Section
    embedding_backward: Section
    head_bucket: Section
    block_bucket: Section
    table_buckets: Section
    end: Section

    @property
    def sections(self) -> tuple[Section, ...]:
        """Every section, in program order: the order in which totals are summed."""
        return (
            self.embedding,
            self.block,
            self.head,
            self.block_backward,
            self.embedding_backward,
            self.head_bucket,
            self.block_bucket,
            self.table_buckets,
            self.end,
        )

    def calls(self) -> Iterator[tuple[Operation, Size]]:
        """Yield each operation with how often one rank does it a step."""
        for section in self.sections:
            for operation in section.operations:
                yield operation, section.repeats * operation.calls

    def collectives(self) -> Iterator[tuple[Collective, Size]]:
        """Yield each collective with its calls per step and rank; axes of size 1 included."""
        for operation, count in self.calls():
            if isinstance(operation, Collective):
                yield operation, count


def build_step(model: Model, workload: Workload, *, recompute: Recompute) -> StepProgram:
    """The program of one step; the grid, the micro-batch and what follows from them stay symbols."""
    sharded = workload.shard_optimizer_over_data
    context = Context(model, workload.element_sizes, sharded)
    buckets = _buckets(model)
    head_buckets = [] if model.tied_embeddings else buckets[1:2]
    table_buckets = [bucket for bucket in buckets if bucket[0] in ("embedding", "position")]

    def bucket_section(name: str, chosen: list[tuple[str, Size, Size]]) -> Section:
        operations = tuple(
            tables.data_bucket(layer, elements, context, sharded=sharded) for layer, elements, _ in chosen
        )
        return Section(name, chosen[0][2] if chosen else ONCE, operations)

    return StepProgram(
        recompute=recompute,
        embedding=Section("embedding", ACCUMULATION, tuple(tables.embedding_forward(context))),
        block=Section("block", BLOCKS * ACCUMULATION, tuple(_block_forward(context))),
        head=Section("head", ACCUMULATION, tuple(tables.head(context))),
        block_backward=Section(
            "block_backward", BLOCKS * ACCUMULATION, tuple(_block_backward(context, recompute=recompute))
        ),
        embedding_backward=Section("embedding_backward", ACCUMULATION, tuple(tables.embedding_backward(context))),
        head_bucket=bucket_section("head_bucket", head_buckets),
        block_bucket=bucket_section("block_bucket", buckets[:1]),
        table_buckets=bucket_section("table_buckets", table_buckets),
        end=Section("end", ONCE, tuple(tables.step_end(context, buckets=tuple(buckets), sharded=sharded))),
    )


def _buckets(model: Model) -> list[tuple[str, Size, Size]]:
    """Data-parallel buckets as `(layer, elements, how many a step)`: one a block, one a table."""
    found = [("block", symbol("block_bucket"), BLOCKS)]
    if not model.tied_embeddings:
        found.append(("head", symbol("table_bucket"), ONCE))
    found.append(("embedding", symbol("table_bucket"), ONCE))
    if model.learned_positions:
        found.append(("position", symbol("position_bucket"), ONCE))
    return found


def _block_forward(context: Context) -> Iterator[Operation]:
    """Norm, attention, norm, MLP, each followed by its addition to the residual stream."""
    gathers = {
        linear.layer: layers.gather_weight(linear.layer, linear.k * linear.n, context, phase="forward")
        for linear in BLOCK_LINEARS
    }
    yield from layers.norm_forward("attention.norm", context, tokens=PART, calls=PARTS)
    yield from gathers[QKV.layer]
    yield from layers.linear_forward(QKV, context, phase="forward")
    yield from layers.attention_core(context, phase="forward")
    yield from gathers[ATTENTION_OUTPUT.layer]
    yield from layers.linear_forward(ATTENTION_OUTPUT, context, phase="forward")
    yield from layers.residual("attention.output", context, phase="forward")
    yield from layers.norm_forward("mlp.norm", context, tokens=PART, calls=PARTS)
    yield from gathers[FC1.layer]
    yield from layers.linear_forward(FC1, context, phase="forward")
    yield from layers.activation(context, phase="forward")
    yield from gathers[FC2.layer]
    yield from layers.linear_forward(FC2, context, phase="forward")
    yield from layers.residual("mlp.fc2", context, phase="forward")


def _gather_again(linear: layers.Linear, context: Context, *, phase: Phase) -> list[Operation]:
    """Second gather of a weight in a micro-batch, of those blocks that did not keep it."""
    return layers.gather_weight(linear.layer, linear.k * linear.n, context, phase=phase, calls=layers.UNKEPT_SHARE)


def _recompute_full(context: Context) -> Iterator[Operation]:
    """The block's forward pass again up to the activation: backward does not need the output of fc2.

    Norm statistics are always saved, so nothing is gathered for the norms. The gathered weights stay
    for the backward pass.
    """
    yield from layers.norm_recompute("attention.norm", context)
    yield from _gather_again(QKV, context, phase="recompute")
    yield from layers.linear_forward(QKV, context, phase="recompute")
    yield from layers.attention_core(context, phase="recompute")
    yield from _gather_again(ATTENTION_OUTPUT, context, phase="recompute")
    yield from layers.linear_forward(ATTENTION_OUTPUT, context, phase="recompute")
    yield from layers.residual("attention.output", context, phase="recompute")
    yield from layers.norm_recompute("mlp.norm", context)
    yield from _gather_again(FC1, context, phase="recompute")
    yield from layers.linear_forward(FC1, context, phase="recompute")
    yield from layers.activation(context, phase="recompute")
    yield from _gather_again(FC2, context, phase="recompute")


def _block_backward(context: Context, *, recompute: Recompute) -> Iterator[Operation]:
    """What was not saved is computed again, then the gradients of the block, last layer first."""

    def gather(linear: layers.Linear) -> list[Operation]:
        return [] if recompute == "full" else _gather_again(linear, context, phase="backward")

    selective = recompute == "selective"
    if recompute == "full":
        yield from _recompute_full(context)
    yield from gather(FC2)
    yield from layers.activation(context, phase="recompute") if selective else []
    yield from layers.linear_backward(FC2, context)
    yield from layers.activation_backward(context)
    yield from gather(FC1)
    yield from layers.norm_recompute("mlp.norm", context) if selective else []
    yield from layers.linear_backward(FC1, context)
    yield from layers.norm_backward("mlp.norm", context, tokens=PART, calls=PARTS)
    yield from gather(ATTENTION_OUTPUT)
    yield from layers.attention_core(context, phase="recompute") if selective else []
    yield from layers.linear_backward(ATTENTION_OUTPUT, context)
    yield from layers.attention_core_backward(context)
    yield from gather(QKV)
    yield from layers.norm_recompute("attention.norm", context) if selective else []
    yield from layers.linear_backward(QKV, context)
    yield from layers.norm_backward("attention.norm", context, tokens=PART, calls=PARTS)
