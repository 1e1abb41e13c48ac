"""Which layouts a framework can run: the constraints that a model and a workload put on them.

Each constraint has a name and states its numbers in the error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from axonn_tune.frameworks.description import Framework
from axonn_tune.frameworks.step import StepOptions
from axonn_tune.grid import BATCH_AXES, Grid
from axonn_tune.program.constraints import Constraint, common, refused_layouts
from axonn_tune.program.types import kinds
from axonn_tune.specs.model import Model
from axonn_tune.specs.tuning import Tuning, tools
from axonn_tune.specs.workload import Workload

MEMORY = "memory"
MICRO_BATCH, CHUNKS, EXPERT_OVERLAP = "micro-batch", "chunks", "expert overlap"
PINNED = "pinned"
"""Reason of a grid that is not ranked: a pinned axis has another size."""

STAGED = "layers-by-pipeline"
"""The constraint that each stage has a layer."""


def constraints(model: Model, workload: Workload, framework: Framework) -> tuple[Constraint, ...]:
    """Every divisibility constraint of a framework's layouts, and every combination of axes that it refuses.

    Where shards are whole rows, a weight `W[K_y, N_x]` is stored as rows of K split over y and then
    over z; transposed layers split K over x and z. Elsewhere they are padded.
    """
    whole, length = framework.step.whole_rows, workload.sequence_length
    over_z = ("z",) if whole else ()
    found = [
        Constraint("heads-by-x", "heads", common(model, "heads"), ("x",)),
        Constraint(
            "kv-heads-by-x", "kv_heads", common(model, "kv_heads"), ("x",), or_divides=framework.step.repeated_kv_heads
        ),
        Constraint("hidden-by-yz" if whole else "hidden-by-y", "hidden", model.hidden, ("y", *over_z)),
        Constraint(
            "attention-by-xz" if whole else "attention-by-x",
            "heads * head_dim",
            common(model, "query_width"),
            ("x", *over_z),
        ),
        Constraint("ffn-by-xz" if whole else "ffn-by-x", "ffn", common(model, "ffn"), ("x", *over_z)),
        Constraint("vocab-by-xyz", "vocab", model.vocab, ("x", "y", "z"), at_least=True),
        Constraint("batch-by-data-z", "global_batch", workload.global_batch, BATCH_AXES),
    ]
    if framework.step.sequence_parallel:
        found.append(Constraint("sequence-by-x", "sequence_length", length, ("x", "context")))
    for kind in kinds():
        found += kind.limits(model, framework)
    if workload.tuning is not None:
        found += _tuning_constraints(workload.tuning, framework)
    if "context" in framework.axes:
        # Each rank computes a block from either end of the sequence, which balances causal attention.
        blocks = Constraint("sequence-by-context", "sequence_length", length, ("context",), times=2, where="context")
        found += [blocks] if framework.exchanges else [blocks, *_exchange_constraints(model, framework.step)]
    if "pipeline" in framework.axes:
        uneven = framework.schedule.uneven
        # Layers that share an indexer are in one part.
        apart = len(model.starts)
        layers = framework.step.most_parts(apart) if uneven else model.layers
        what = "layers" if apart == model.layers else "layers with an indexer of their own"
        found.append(Constraint(STAGED, what, layers, ("pipeline",), at_least=uneven))
        if apart < model.layers and not framework.schedule.free:
            why = f"{framework.title} cannot be told which stage has which layers, and some share an indexer"
            found.append(Constraint("indexers-by-pipeline", why, 1, ("pipeline",), both=True))
        elsewhere = framework.streams_in_stage
        if model.residual_streams and elsewhere is not None and not {*elsewhere} & {*model.parts}:
            why = f"hyper-connections in {framework.title} are in one stage, so no {framework.called('pipeline')}"
            found.append(Constraint("streams-by-pipeline", why, 1, ("pipeline",), both=True))
    found += refused_layouts(framework)
    return tuple(found)


def _tuning_constraints(tuning: Tuning, framework: Framework) -> list[Constraint]:
    """Ranks that split an adapter by its rank (NVIDIA-NeMo/Megatron-Bridge@067f987d, peft/utils.py), and axes that a
    tool knows no adapters over."""
    axes = tools()[framework.tuner].axes if framework.tuner else ()
    apart = [axis for axis in framework.axes if axes and axis not in axes]
    found = [
        Constraint(f"adapters-by-{axis}", f"{framework.tuner} has no such axis", 1, (axis,), both=True)
        for axis in apart
    ]
    if tuning.adapts and tuning.collectives != "none":
        found.append(Constraint("rank-by-x", "rank of adapters", tuning.rank, ("x",)))
    return found


def _exchange_constraints(model: Model, step: StepOptions) -> list[Constraint]:
    """Limits of the exchange of context parallelism, as Transformer Engine and Megatron-Core have them.

    All-to-alls give each rank whole heads, and a ring knows no sliding window (context_parallel.py,
    attn_forward_func_with_cp); groups inside a hierarchy must fill the axis (megatron/core/parallel_state.py).
    """
    exchange, count, found = step.context_exchange, step.context_inside, list[Constraint]()
    attending = [layer for layer in model.types if layer.attention]
    if exchange != "all_gather" and any(layer.indexer for layer in attending):
        what = f"DeepSeek sparse attention gathers all keys over ranks of context, and does not go with {exchange}"
        found.append(Constraint("indexer-by-context", what, 1, ("context",), both=True))
    if exchange in ("ring", "hierarchical") and any(layer.window for layer in attending):
        what = f"context parallelism does not support sliding window attention with {exchange}"
        found.append(Constraint("window-by-context", what, 1, ("context",), both=True))
    if exchange in ("all_to_all", "hierarchical"):
        alone = exchange == "all_to_all"
        axes, times = (("x", "context"), 1) if alone else (("x",), count)
        for name in ("heads", "kv_heads"):
            value = math.gcd(*(getattr(layer, name) for layer in attending))
            title = f"{name.replace('_', '-')}-by-x-context"
            found.append(Constraint(title, name, value, axes, times=times, where="context"))
    if exchange == "hierarchical":
        what = "the first of hierarchical_context_parallel_sizes"
        found.append(Constraint("context-by-inside", what, count, ("context",), multiple=True, where="context"))
    return found


def broken_constraints(
    grid: Grid,
    model: Model,
    workload: Workload,
    framework: Framework,
    *,
    micro_batch: int,
    chunks: int = 1,
    parts: Sequence[int] | None = None,
) -> list[str]:
    """Reasons for which a framework would refuse one configuration, with their numbers; parts: layers, where given."""
    sizes = dict(grid.by_axis)
    if missing := [axis for axis, size in sizes.items() if size > 1 and axis not in framework.axes]:
        return [f"{framework.name} has no axis {axis}" for axis in missing]
    columns = {axis: np.array([size]) for axis, size in sizes.items()}
    # A stage may hold the embedding or the loss alone where it is given so.
    checks = [one for one in constraints(model, workload, framework) if parts is None or one.name != STAGED]
    found = [check.explain(sizes, framework) for check in checks if check.broken(columns)[0]]
    product = grid.batch_shares * micro_batch
    if workload.global_batch % product:
        shares = "·".join(framework.called(axis) for axis in BATCH_AXES if axis in framework.axes)
        found.append(f"global_batch ({workload.global_batch}) is not divisible by {shares}·micro-batch = {product}")
    if chunks > 1:
        batches, given = workload.global_batch // product, parts is not None
        found += _interleaving(grid.pipeline, chunks, batches, model, framework, given=given)
    if parts is not None and (why := shared_start(model, parts)):
        found.append(why)
    return found


def shared_start(model: Model, parts: Sequence[int]) -> str:
    """Where a model part begins with a layer that shares the indexer of one before it, and the nearest split; or ""."""
    start = next((end for end in accumulate(parts) if end < model.layers and end not in model.starts), None)
    if start is None:
        return ""
    # Imported here: most searches have no pipeline stages, and start-up time is theirs.
    from axonn_tune.program.pipeline import of_whole_groups
    from axonn_tune.stages import layout_text

    why = f"a part begins with layer {start + 1}, which shares the indexer of a layer before it"
    if len(parts) > len(model.starts):
        return f"{why}; {len(model.starts)} layers have their own"
    return f"{why}; nearest: {layout_text(of_whole_groups(tuple(parts), model.starts), model.mtp_layers)}"


def _interleaving(
    stages: int, chunks: int, micro_batches: int, model: Model, framework: Framework, *, given: bool
) -> list[str]:
    """Constraints of interleaving: several stages, micro-batches in groups, a block per chunk that is not given."""
    found = ["interleaving needs more than one stage"] if stages == 1 else []
    pipeline, both = framework.called("pipeline"), f"{framework.called('pipeline')}·{framework.called('chunks')}"
    if micro_batches % stages:
        found.append(
            f"micro-batches of an interleaved pipeline ({micro_batches}) are not divisible by {pipeline} = {stages}"
        )
    if given:
        return found
    if framework.step.most_parts(len(model.starts)) < stages * chunks:
        found.append(f"layers ({len(model.starts)}) is less than {both} = {stages * chunks}")
    elif framework.schedule.equal_chunks and (model.layers + sum(framework.step.less)) % (stages * chunks):
        uneven = f"layers ({model.layers}) is not divisible by {both} = {stages * chunks}"
        found.append(f"{uneven}: {framework.schedule.equal_chunks}")
    return found
