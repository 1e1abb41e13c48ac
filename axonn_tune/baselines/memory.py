"""Memory of Megatron-LM's fullest rank, term by term: Korthikanti et al., arXiv 2205.05198, sections 4 and 5.

Letters: M tokens of a micro-batch, t tensor ranks, p stages, v interleaved chunks a stage, and those
of `axonn_tune.specs.model`. The activation terms are the paper's, with qkv, MLP and element sizes
taken from the model: for a GPT in 16 bits they add up to its `s·b·h·(34 + 5·a·s/h)` bytes a block.
"""

from __future__ import annotations

from dataclasses import dataclass

from axonn_tune.baselines.layout import Layout, Software
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import ElementSizes, Workload


@dataclass(frozen=True)
class Item:
    """One kind of array, and what the rank holds of it."""

    name: str
    size_bytes: float


def block_activations(
    model: Model, elements: ElementSizes, layout: Layout, *, software: Software, sequence_length: int
) -> tuple[Item, ...]:
    """Bytes one block keeps of one micro-batch without recomputation (equations 1, 2 and 4).

    Split over t: what lies inside tensor-parallel layers. The rest is split only by sequence parallelism.
    """
    e, t = elements.compute, layout.tensor
    tokens = float(layout.micro_batch * sequence_length) / layout.context
    outside = tokens / t if layout.sequence_parallel else tokens
    mask = 1.0 if software.dropout else 0.0
    return (
        Item("norm inputs", 2.0 * e * outside * model.hidden),
        Item("norm outputs", 2.0 * e * outside * model.hidden),
        Item("dropout masks", 2.0 * mask * outside * model.hidden),
        Item("qkv", e * tokens * model.qkv_width / t),
        Item("attention output", e * tokens * model.query_width / t),
        Item("up projection", e * tokens * model.up_width / t),
        Item("activation", e * tokens * model.ffn / t),
        core_activations(model, elements, layout, software=software, sequence_length=sequence_length),
    )


def core_activations(
    model: Model, elements: ElementSizes, layout: Layout, *, software: Software, sequence_length: int
) -> Item:
    """What the attention core keeps: `5·a·s²·b` bytes unfused (softmax, its dropout and mask), else one sum a row."""
    rows = float(layout.micro_batch * sequence_length) / layout.context * model.heads / layout.tensor
    if software.fused_attention:
        return Item("softmax statistics", elements.statistics * rows)
    mask = (elements.compute + 1.0) if software.dropout else 0.0
    return Item("attention scores", (elements.compute + mask) * rows * sequence_length)


def kept_per_block(
    model: Model, elements: ElementSizes, layout: Layout, *, software: Software, sequence_length: int
) -> float:
    """Bytes a block keeps of one micro-batch: everything, all but the attention core, or its input alone (table 2)."""
    items = block_activations(model, elements, layout, software=software, sequence_length=sequence_length)
    if layout.recompute == "full":
        return items[0].size_bytes / 2.0
    kept = items[:-1] if layout.recompute == "selective" else items
    return sum(item.size_bytes for item in kept)


def blocks_in_flight(model: Model, layout: Layout, *, micro_batches: int) -> float:
    """Blocks whose activations the first stage holds, full: `L`, interleaved `L·(1 + (p-1)/(p·v))` (section 4.2.3)."""
    p, v = layout.pipeline, layout.interleave
    full = model.layers * (1.0 + (p - 1.0) / (p * v) if v > 1 else 1.0)
    return min(full, float(micro_batches) * model.layers / p)


def states(
    elements: ElementSizes, layout: Layout, *, parameters: float, gradient_bytes: int | None = None
) -> tuple[Item, ...]:
    """AdamW, 18 bytes a parameter in 16 bits, less what the data-parallel ranks split (ZeRO 1 to 3)."""
    copies = 3.0 if elements.main != elements.compute else 2.0
    ranks = layout.data * layout.context
    return (
        Item("weights", elements.compute * parameters / (ranks if layout.sharded_weights else 1)),
        Item(
            "gradients",
            (gradient_bytes or elements.main)
            * parameters
            / (ranks if layout.sharded_gradients or layout.sharded_weights else 1),
        ),
        Item(
            "main weights and moments",
            copies * elements.main * parameters / (ranks if layout.distributed_optimizer else 1),
        ),
    )


def stage_parameters(model: Model, layout: Layout, *, software: Software, stage: int) -> float:
    """Elements a rank of a stage holds: blocks, the embedding on the first stage, the head on the last."""
    t, tables = layout.tensor, 0
    block = model.block_weights / t + block_vectors(model, tensor=t)
    table = rows_of_table(model, tensor=t, software=software) * model.hidden / t
    positions = model.max_sequence_length * model.hidden if model.learned_positions else 0
    first, last = stage == 0, stage == layout.pipeline - 1
    if first:
        tables += 1
    if last and not (first and model.tied_embeddings):
        tables += 1
    return layout.blocks_of_stages(model.layers)[stage] * block + tables * table + (positions if first else 0)


def block_vectors(model: Model, *, tensor: int) -> float:
    """Norm weights and biases of one block: only those of column-parallel layers are split."""
    norms = 2.0 * (1.0 if model.family == "llama" else 2.0) * model.hidden
    split = (model.qkv_width + model.up_width) / tensor
    return norms + (split + 2.0 * model.hidden if model.biases else 0.0)


def rows_of_table(model: Model, *, tensor: int, software: Software) -> int:
    """Rows of the table on all ranks: padded, or cut without padding."""
    each = software.vocabulary_multiple
    return tensor * (each * -(-model.vocab // (each * tensor)) if each else model.vocab // tensor)


def stage_memory(
    model: Model, workload: Workload, layout: Layout, *, software: Software, stage: int
) -> tuple[Item, ...]:
    """Everything a rank of the first (0) or of the last stage holds at its peak: in the head or in a backward pass."""
    elements, length = workload.element_sizes, workload.sequence_length
    tokens, t = float(layout.micro_batch * length) / layout.context, layout.tensor
    kept = kept_per_block(model, elements, layout, software=software, sequence_length=length)
    items = block_activations(model, elements, layout, software=software, sequence_length=length)
    again = {"none": 0.0, "selective": items[-1].size_bytes, "full": sum(item.size_bytes for item in items)}
    in_flight = blocks_in_flight(model, layout, micro_batches=layout.micro_batches(workload))
    if stage > 0:
        in_flight = model.layers / layout.pipeline * (2.0 if layout.interleave > 1 else 1.0)
    # Softmax and gradient in 32 bits next to the logits, none of it cut into chunks of tokens.
    rows = rows_of_table(model, tensor=t, software=software) / t
    logits = (elements.compute + 2.0 * elements.statistics) * tokens * rows
    gathered = 2.0 * elements.compute * model.block_weights / t
    head = (Item("logits", logits if stage == layout.pipeline - 1 else 0.0),)
    backward = (
        Item("recomputed activations", again[layout.recompute]),
        Item("backward temporaries", elements.compute * tokens * (2.0 * model.up_width / t + 2.0 * model.hidden)),
    )
    return (
        *states(
            elements,
            layout,
            parameters=stage_parameters(model, layout, software=software, stage=stage),
            gradient_bytes=software.gradient_bytes,
        ),
        Item("gathered weights", gathered if layout.sharded_weights else 0.0),
        Item("saved activations", in_flight * kept),
        *max(head, backward, key=total_bytes),
    )


def peak_memory(model: Model, workload: Workload, layout: Layout, *, software: Software) -> tuple[Item, ...]:
    """Memory of whichever holds more, the first stage or the last."""
    stages = [
        stage_memory(model, workload, layout, software=software, stage=stage) for stage in {0, layout.pipeline - 1}
    ]
    return max(stages, key=total_bytes)


def total_bytes(items: tuple[Item, ...]) -> float:
    """Sum of the items, bytes."""
    return sum(item.size_bytes for item in items)
