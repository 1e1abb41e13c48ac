"""Multi-token prediction (MTP): what one of its layers does before a decoder layer, and its pass of the LM head.

Embedding of the next token and hidden state `[T, H_y]` are normed and, side by side, projected `[M, 2H_y] → [M, H_x]`,
which is gathered over x. The stage has a copy of the embedding; the LM head is that of the model, with logits and a
loss of their own. Sources: DeepSeek-V3, arXiv 2412.19437, section 2.2; NVIDIA/Megatron-LM@d98e8a64,
megatron/core/transformer/multi_token_prediction.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from axonn_tune.program import layers
from axonn_tune.program.experts import Gathering
from axonn_tune.program.layers import CHUNKS, PARTS, WIDE_LOGITS, H, LayerInputs, V, X, Y, moves
from axonn_tune.program.loss import LOSSES
from axonn_tune.program.operations import Array, Collective, Kernel, Operation, Phase, Traffic

NORM, EMBEDDING = "mtp.norm", "mtp.embedding"


def forward(given: LayerInputs, gather: Gathering, *, phase: Phase) -> Iterator[Operation]:
    """From the hidden state `[T, H_y]` to the input of a decoder layer; gather: of a weight."""
    if phase != "recompute":
        for step in _without_weights(layers.embedding_forward(given)):
            yield replace(step, layer=EMBEDDING)
    for name in ("embedding", "hidden state"):
        made: tuple[Array, ...] = (given.stream(f"MTP {name} output", "norm outputs", element=given.saved_element),)
        if phase == "recompute":
            yield from layers.norm_recompute(NORM, given, makes=made)
        else:
            made = given.stream(f"MTP {name}", "residual stream"), *made
            yield from layers.norm_forward(NORM, given, tokens=given.part, calls=PARTS, makes=made)
    yield from gather(given.prediction)
    yield from layers.linear_forward(given.prediction, given, phase=phase)
    yield _whole(given, phase)


def backward(given: LayerInputs, gather: Gathering) -> Iterator[Operation]:
    """Gradients of hidden state, to which those of its LM head are added, and embedding."""
    yield _whole(given, "backward")
    yield from gather(given.prediction)
    made = given.stream("MTP gradient", "residual gradients", 2.0 * H / Y)
    dead = ("MTP embedding output", "MTP hidden state output")
    yield from layers.linear_backward(given.prediction, given, makes=made, frees=dead)
    for name in ("embedding", "hidden state"):
        freed = (f"MTP {name}", *([made.name] if name == "hidden state" else []))
        yield from layers.norm_backward(NORM, given, tokens=given.part, calls=PARTS, frees=freed, summed=False)
    yield moves("backward", NORM, Traffic(1, 3), given.outside(given.part) * H / Y, given, calls=PARTS)
    for step in _without_weights(layers.embedding_backward(given)):
        yield replace(step, layer=EMBEDDING)


def heads(given: LayerInputs) -> Iterator[Operation]:
    """A norm, the LM head and a loss for each MTP layer, whose statistics of logits stay until its backward pass.

    Its weight is there for the main loss, and its gradient is reduced behind that.
    """
    # What stays from forward to backward: a softmax, its logarithm or a gradient in FP32, else logits.
    kept = given.elements.statistics if LOSSES[given.options.loss].wide else given.element
    for number in range(1, given.model.mtp_layers + 1):
        for step in _without_weights(layers.head(given)):
            made = []
            for array in step.makes:
                size = array.size_bytes
                if array.name == "logits":
                    size = kept * given.tokens / CHUNKS * V / (X * Y)
                if array.kind != WIDE_LOGITS and (array.name != "logits" or not given.options.chunked_loss):
                    made.append(Array(f"{array.name} of MTP {number}", f"{array.kind} of MTP", size))
            yield replace(step, makes=tuple(made))


def _whole(given: LayerInputs, phase: Phase) -> Collective:
    """Gather of the projection's output over x, or of its gradient."""
    size = given.element * given.part * H
    return Collective("all_gather", "x", phase, given.prediction.layer, size, calls=PARTS)


def _without_weights(operations: Iterable[Operation]) -> Iterator[Operation]:
    """What is done for a table that is there already, and whose gradient goes with another's."""
    for step in operations:
        gathers = isinstance(step, Collective) and step.role in ("weight", "weight_gradient")
        if not gathers and not (isinstance(step, Kernel) and (step.with_gather or step.accumulates)):
            yield step
