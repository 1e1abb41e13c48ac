"""What Megatron-LM's data-parallel ranks exchange once a step, and how much of it hides."""

from __future__ import annotations

from axonn_tune.baselines.layout import Layout, Software
from axonn_tune.baselines.memory import block_vectors, rows_of_table, stage_parameters
from axonn_tune.baselines.network import Network, Traffic
from axonn_tune.baselines.pipeline import chain_exposed_s
from axonn_tune.specs.machine import CollectiveKind
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload


def exchange_gradients(
    model: Model,
    workload: Workload,
    layout: Layout,
    *,
    network: Network,
    software: Software,
    forward_s: float,
    backward_s: float,
) -> tuple[Traffic, ...]:
    """Traffic of the first stage, whose backward pass ends last.

    `forward_s`, `backward_s`: one block, one micro-batch. Gradients are all-reduced; or with the
    distributed optimizer reduce-scattered, and new weights gathered in the compute type, which
    hides behind the next forward pass. A block's turn to hide behind comes with the last
    micro-batch; interleaved stages run p micro-batches through a chunk before the next one.
    """
    sizes, blocks = workload.element_sizes, layout.blocks_of_stages(model.layers)[0]
    bucket = model.block_weights / layout.tensor + block_vectors(model, tensor=layout.tensor)
    rest = stage_parameters(model, layout, software=software, stage=0) - blocks * bucket
    gradient_bytes = software.gradient_bytes or sizes.main
    sent: list[tuple[CollectiveKind, int, float]] = [("all_reduce", gradient_bytes, backward_s)]
    if layout.distributed_optimizer:
        sent = [("reduce_scatter", gradient_bytes, backward_s), ("all_gather", sizes.compute, forward_s)]
    if layout.sharded_weights:
        sent = layout.micro_batches(workload) * [*sent, ("all_gather", sizes.compute, backward_s)]
    turn = layout.pipeline if layout.interleave > 1 else 1
    seconds = exposed_s = 0.0
    for kind, element_bytes, beside_s in sent:
        if not software.data_overlap:
            whole_s = network.collective_s(kind, layout.data_group, element_bytes * (blocks * bucket + rest))
            seconds, exposed_s = seconds + whole_s, exposed_s + whole_s
            continue
        bucket_s = network.collective_s(kind, layout.data_group, element_bytes * bucket)
        rest_s = network.collective_s(kind, layout.data_group, element_bytes * rest)
        seconds += blocks * bucket_s + rest_s
        exposed_s += chain_exposed_s(bucket_s, behind_s=turn * beside_s, links=blocks) + rest_s
    tied_s = _tied_table_s(model, workload, layout, network, software)
    return Traffic("data", seconds, exposed_s), Traffic("tied table", tied_s, tied_s)


def _tied_table_s(model: Model, workload: Workload, layout: Layout, network: Network, software: Software) -> float:
    """Gradient of the shared table, all-reduced between first and last stage."""
    if not model.tied_embeddings:
        return 0.0
    table = rows_of_table(model, tensor=layout.tensor, software=software) * model.hidden / layout.tensor
    element_bytes = software.gradient_bytes or workload.element_sizes.main
    return network.collective_s("all_reduce", layout.embedding_group, element_bytes * table)
