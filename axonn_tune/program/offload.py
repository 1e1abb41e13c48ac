"""What a rank keeps on its host: copies of it in each pass of a block, and Adam there at the end of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from axonn_tune.program.inputs import LayerInputs
from axonn_tune.program.nodes import kept_arrays
from axonn_tune.program.operations import HostWork, Operation, Phase, Size, symbol

OFFLOAD = "offload"
"""Their layer."""


def with_copies(
    given: LayerInputs,
    forward: tuple[Operation, ...],
    backward: tuple[Operation, ...],
    *,
    whole: bool,
    buckets: Sequence[tuple[str, Size]],
) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """Both passes of a block with the copies of one micro-batch, each behind the computation of its pass.

    Saved activations go to the host in the forward pass and come back in the backward pass; weights come for both,
    gradients go in the backward pass. As all blocks have copies, those of one run behind another of its kind.
    buckets: layers with elements of what trains and one rank has of it.
    """
    options, layers = given.options, given.options.offloaded_layers
    moved = [
        (layers + (1.0 - layers) * given.moved_share(array.name)) * array.size_bytes
        for array in kept_arrays(forward, backward, whole=whole)
    ]
    shards = [elements / given.replication(layer)[1] if given.sharded else elements for layer, elements in buckets]
    weights = [given.element * one for one in shards] if "weights" in options.offloaded else []
    out, back = _gradients(given, shards) if "gradients" in options.offloaded else ([], [])
    return (
        (*forward, *_copies("forward", moved, weights, forward)),
        (*backward, *_copies("backward", out, [*moved, *weights, *back], backward)),
    )


def _gradients(given: LayerInputs, shards: Sequence[Size]) -> tuple[list[Size], list[Size]]:
    """Gradients of a mean micro-batch that go to the host, and that come back to be added to.

    DeepSpeed adds in the compute type on the GPU to what it sent before, which comes back, and sends the last sum in
    FP32 (deepspeedai/DeepSpeed@edaa7221, runtime/zero/stage_1_and_2.py, copy_grads_in_partition, of more than one
    micro-batch; stage3.py, partition_grads, of each). One copy of a step, ZeRO-3's one each way, is left out.
    """
    if given.options.host_optimizer != "deepspeed":
        return [float(given.gradient_bytes) * one for one in shards], []
    element, last = float(given.element), float(given.state_element - given.element)
    sent, batches = [element * one for one in shards], symbol("A")
    return [*sent, *(last * one / batches for one in shards)], [*sent, *(-element * one / batches for one in shards)]


def _copies(
    phase: Phase, out: Sequence[Size], back: Sequence[Size], beside: tuple[Operation, ...]
) -> Iterator[HostWork]:
    """Copies of a pass of a block, if it has any."""
    to_host, from_host = (tuple(size for size in sizes if size.coefficient) for sizes in (out, back))
    if beside and (to_host or from_host):
        yield HostWork(phase, OFFLOAD, to_host, from_host, beside=beside)


def update_on_host(given: LayerInputs, elements: Size) -> HostWork:
    """Adam on the host for some elements of a rank: FP32 gradients go there unless they are there, new weights come
    back unless they stay.

    Torch's optimizer sends weights back in FP32 (NVIDIA/Megatron-LM@d98e8a64, megatron/core/optimizer/cpu_offloading/
    hybrid_optimizer.py), DeepSpeed's in the compute type (deepspeedai/DeepSpeed@edaa7221,
    runtime/zero/stage_1_and_2.py).
    """
    options, vectorized = given.options, given.options.host_optimizer == "deepspeed"
    element = float(given.element if vectorized else given.state_element)
    return HostWork(
        *("step", OFFLOAD),
        to_host=() if "gradients" in options.offloaded else (given.state_element * elements,),
        from_host=() if "weights" in options.offloaded else (element * elements,),
        updated=(elements,),
        vectorized=vectorized,
        pipelined=options.offload_overlap,
    )
