"""The end of a step: gradients over data, the gradient norm, the optimizer, and new weights to their users."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from axonn_tune.frameworks.optimizers import ADAMW, optimizers
from axonn_tune.frameworks.step import StepOptions
from axonn_tune.grid import WORLD
from axonn_tune.program.count import counted, trains_experts
from axonn_tune.program.inputs import ADAPTER, COPY, EXPERTS, TABLE, LayerInputs
from axonn_tune.program.operations import (
    ONCE,
    Collective,
    Kernel,
    Operation,
    OpKind,
    Phase,
    Size,
    Value,
    as_size,
    symbol,
)
from axonn_tune.program.tables import tables
from axonn_tune.specs.model import Model


class Update(NamedTuple):
    """What the update of an element keeps and moves, in bytes.

    gradient: as it reads it; weight: as it reads it, a master weight with what that lacks of the compute weight;
    master: of a master weight, which it writes; states: of each, read and written.
    """

    gradient: int
    weight: int
    master: int
    states: tuple[float, ...]

    @property
    def state_bytes(self) -> float:
        """Of all states."""
        return sum(self.states)

    @property
    def moved_bytes(self) -> float:
        """What an update reads and writes."""
        return float(self.gradient + self.weight + self.master + 2 * self.state_bytes)


class Updated(NamedTuple):
    """Elements with states on one rank, and their update; orthogonal: matrices as wholes."""

    update: Update
    elements: Size
    orthogonal: bool = False


def update_of(given: LayerInputs, *, name: str = "", vectors: bool = False) -> Update:
    """That of an optimizer, the step's unless it is named, for matrices or for vectors.

    Gradients are cast to the type of master weights, or read as accumulated by one with types of its own: AdamW's, or
    that of weights in 16 bits, whose states are in theirs.
    """
    main, options = given.state_element, given.options
    one = optimizers()[name or options.optimizer]
    kept = one.vectors if vectors else one.states
    states: tuple[float, ...] = tuple((options.exp_avg_bytes or main) if size is None else size for size in kept)
    if one.name == ADAMW:
        states = (options.exp_avg_bytes or main, options.exp_avg_sq_bytes or main)
    elif one.scales_bytes and not vectors:
        states = (*states, one.scales_bytes)
    return Update(
        gradient=given.gradient_bytes if options.precision_aware else main,
        weight=main,
        master=options.master_bytes or main,
        states=states,
    )


def updates(given: LayerInputs, *, routed: bool = False) -> tuple[Updated, ...]:
    """Those of a rank's matrices and tables, or of its routed experts, where replicas may share states."""
    whole = optimizers()[given.options.optimizer].whole
    _, replicas = given.replication(EXPERTS if routed else "")
    share = replicas if given.sharded else ONCE
    if whole is None:
        elements = symbol("expert_parameters" if routed else "parameters") / share
        return (Updated(update_of(given), elements),)
    matrices = Updated(update_of(given), symbol("orthogonal_experts" if routed else "orthogonal"), orthogonal=True)
    return (matrices,) if routed else (Updated(update_of(given, name=ADAMW), symbol("elementwise") / share), matrices)


def whole_symbols(
    model: Model,
    options: StepOptions,
    counts: Sequence[Value],
    axes: Mapping[str, Value],
    ranks: tuple[Value, ...],
    parameters: Value,
) -> dict[str, Value]:
    """Values of the symbols of an optimizer that takes matrices as wholes; none of another."""
    if optimizers()[options.optimizer].whole is None:
        return {}
    # Imported here: most searches are of AdamW, and start-up time is theirs.
    from axonn_tune.program.whole import whole_values

    return whole_values(model, options, counts, axes, ranks, parameters)


def data_bucket(layer: str, elements: Size, given: LayerInputs) -> Collective:
    """Gradients of one bucket over data: all-reduced, or reduce-scattered to the owner of the optimizer state."""
    kind: OpKind = "reduce_scatter" if given.sharded else "all_reduce"
    axes, _ = given.replication(layer)
    return Collective(kind, axes, "backward", layer, given.reduced_bytes * elements, "data")


Bucket = tuple[str, Size, Size]
"""`(layer, elements, how many a step)` of one data-parallel bucket."""


def step_end(given: LayerInputs, *, buckets: tuple[Bucket, ...], unsent: tuple[Collective, ...]) -> Iterator[Operation]:
    """Gradients of the replicated vectors, the gradient norm with the loss, the update; then new weights.

    buckets: those of the data-parallel reduction; unsent: what of it is reduced only here.
    """
    parameters = symbol("parameters")
    share = given.replicas if given.sharded else ONCE
    gradient = update_of(given).gradient
    yield from unsent
    yield from _vectors_end(given)
    yield from _tables_end(given)
    yield Kernel("step", "gradient_norm", gradient * parameters / share)
    experts = symbol("expert_parameters") / (given.replication(EXPERTS)[1] if given.sharded else ONCE)
    if trains_experts(given.model):
        yield Kernel("step", "gradient_norm", gradient * experts)
    reductions = 1.0 + given.options.step_reductions
    yield Collective("all_reduce", WORLD, "step", "gradient_norm", ONCE * 16.0, calls=as_size(reductions))
    yield from _updated_end(given, buckets)
    if given.sharded and given.options.reduction == "whole" and not given.options.primary_weights:
        yield parameter_gather("parameters", parameters, given, phase="step")
        if trains_experts(given.model):
            yield parameter_gather(EXPERTS, symbol("expert_parameters"), given, phase="step")
    elif given.sharded:
        ahead = ("block", EXPERTS, "head") if given.options.parameter_overlap else ()
        for layer, elements, count in buckets:
            if layer not in ahead:
                yield parameter_gather(layer, elements, given, phase="step", calls=count)
        if _copies_embedding(given):
            yield parameter_gather(COPY, symbol("table_bucket"), given, phase="step")


def _updated_end(given: LayerInputs, buckets: tuple[Bucket, ...]) -> Iterator[Operation]:
    """The update, of a weight in the compute type, too, where that is gathered."""
    written = float(given.element) if given.sharded else 0.0
    updated = [*updates(given), *(updates(given, routed=True) if trains_experts(given.model) else ())]
    for one in updated:
        if not one.orthogonal:
            away = given.options.offloaded_states * ("moments" in given.options.offloaded)
            if away:
                # Imported here: most searches offload nothing, and start-up time is theirs.
                from axonn_tune.program.offload import update_on_host

                yield update_on_host(given, away * one.elements)
            if away < 1.0:
                yield Kernel("step", "optimizer", (1.0 - away) * (one.update.moved_bytes + written) * one.elements)
    if _trains_vectors(given):
        yield Kernel("step", "optimizer", update_of(given, vectors=True).moved_bytes * symbol("vectors"))
    if any(one.orthogonal for one in updated):
        # Imported here: most searches are of AdamW, and start-up time is theirs.
        from axonn_tune.program.whole import LAYER, whole_operations

        if given.sharded and given.options.muon_gathered:
            for layer, elements, count in buckets:
                if layer in ("block", EXPERTS):
                    axes, _ = given.replication(layer)
                    size = float(given.elements.main) * elements
                    yield Collective("all_gather", axes, "step", f"{LAYER}.{layer}", size, calls=count)
        yield from whole_operations(given, written=written)


def _copies_embedding(given: LayerInputs) -> bool:
    """Whether the last of several stages has a copy of an embedding that trains."""
    return (given.model.tied_embeddings or given.model.mtp_layers > 0) and given.trains_table("embedding")


def _trains_vectors(given: LayerInputs) -> bool:
    return given.tuning is None or given.tuning.mode == "dora"


def _vectors_end(given: LayerInputs) -> Iterator[Operation]:
    """Sums of the gradients of replicated vectors, of which only DoRA's adapters have some."""
    if not _trains_vectors(given):
        return
    vectors = given.elements.main * symbol("vectors")
    if given.launched and any(one.trains.vectors.heads for one in counted(given.model)):
        yield Collective("all_reduce", "x", "step", "vectors", given.elements.main * symbol("head_norms"))
    if given.options.sequence_parallel:
        yield Collective("all_reduce", "x", "step", "vectors", given.gradient_bytes * symbol("vectors"))
    yield Collective("all_reduce", given.shard_axes, "step", "vectors", vectors)
    yield Collective("all_reduce", given.data_axes, "step", "vectors", vectors)


def _tables_end(given: LayerInputs) -> Iterator[Operation]:
    """Gradients of tables replicated over z, and of tied embeddings on the first and the last stage."""
    if given.options.reduction != "parameter":
        for table, elements in tables(given):
            if given.replicated(table):
                yield Collective("all_reduce", given.shard_axes, "step", table, given.gradient_bytes * elements)
    if _copies_embedding(given):
        shard = TABLE / given.table_shards("embedding")
        bucket = shard if given.replicated("embedding") else symbol("table_bucket")
        if given.options.reduction != "whole":
            yield replace(data_bucket(COPY, bucket, given), phase="step")
        # Megatron-LM adds whole buffers; the bundled runtime adds only each rank's share.
        own = bucket / given.replicas if given.sharded and not given.options.distributed_optimizer else shard
        yield Collective("all_reduce", "ends", "step", "embedding", given.gradient_bytes * own)


def adapters_by_axis(given: LayerInputs) -> tuple[tuple[str, Size], ...]:
    """Where adapters are whole on all ranks of z: an axis over which ranks have some alike, with gradients of their
    own, and how many elements a rank has of those. x and y each split one dim of one matrix of an adapter."""
    if not given.replicates_adapters:
        return ()
    return ("x", symbol("adapters_over_y")), ("y", symbol("adapters_over_x"))


def adapters_end(given: LayerInputs) -> Iterator[Collective]:
    """Sums of their gradients over that axis, over z and over data, in one call each."""
    for axis, elements in adapters_by_axis(given):
        size = given.gradient_bytes * elements
        yield Collective("all_reduce", axis, "step", ADAPTER, size)
        yield Collective("all_reduce", given.shard_axes, "step", ADAPTER, size)
        yield replace(data_bucket(ADAPTER, elements, given), phase="step")


def parameter_gather(layer: str, elements: Size, given: LayerInputs, *, phase: Phase, calls: Size = ONCE) -> Collective:
    """New weights of one bucket, in the compute type, from the ranks that updated them."""
    axes, _ = given.replication(layer)
    return Collective(
        "all_gather",
        axes,
        phase,
        layer,
        given.weight_element(layer, copies=2) * elements,
        "parameters" if phase != "step" else "other",
        calls,
    )
